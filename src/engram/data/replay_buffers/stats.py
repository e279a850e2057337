"""The state of a buffer in numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engram.data.replay_buffers.samplers.base import Sampler
from engram.data.replay_buffers.storages.base import Storage
from engram.store.episodes import EpisodeIndex, StoredTrajectories


class BufferStats(NamedTuple):
    """What a buffer holds, and what has been done with it; there may be more fields later.

    Attributes:
        rows: stored steps, of all environments.
        bytes: of the storage, used or not; 0 before the first write.
        capacity: steps that fit; None: no limit.
        writes: steps ever written, by all processes.
        draws: batches that this object has handed out, by `sample` and in iteration.
        episodes: trajectories of which steps are stored, as a slice sampler with these keys would see them: seams and
            the write cursor cut them, too. None where the steps do not say where trajectories end.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
        >>> done = torch.tensor([0, 0, 1, 0, 0]).bool()
        >>> _ = rb.extend(TensorDict({"n": torch.arange(5), "next": {"done": done}}, [5]))
        >>> _ = rb.sample()
        >>> rb.stats()
        BufferStats(rows=4, bytes=..., capacity=4, writes=5, draws=1, episodes=2)
    """

    rows: int
    bytes: int
    capacity: int | None
    writes: int
    draws: int
    episodes: int | None


class BatchCount:
    """How many batches a buffer has handed out."""

    __slots__ = ("batches",)

    def __init__(self) -> None:
        self.batches = 0


def count_episodes(storage: Storage, sampler: Sampler, index: EpisodeIndex) -> int | None:
    """The stored trajectories as the sampler sees them, or with `index`, where it sees none; None: no step tells."""
    with sampler.lock:
        trajectories = stored_trajectories(storage, sampler._episode_index or index)
    return None if trajectories is None else len(trajectories.length)


def stored_trajectories(storage: Storage, index: EpisodeIndex) -> StoredTrajectories | None:
    """Every stored trajectory; None where the steps do not say where trajectories end. Reads the flags of new steps."""
    if not len(storage):
        return StoredTrajectories(*(torch.empty(0, dtype=torch.int64) for _ in range(4)))
    with storage.mutex:
        try:
            return storage._validated(lambda: index.trajectories(storage))
        except (KeyError, ValueError):  # the steps have neither ids nor flags, or not one a step
            return None
