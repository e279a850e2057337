"""The state of a buffer in numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

from engram._figures import ReadAsMapping
from engram._system import human_bytes
from engram.data.replay_buffers.samplers.base import Sampler, plan_of
from engram.data.replay_buffers.samplers.queue import QueueSampler
from engram.data.replay_buffers.storages.base import Storage
from engram.data.replay_buffers.storages.ensemble import StorageEnsemble
from engram.pytree import format_key
from engram.store.episodes import EpisodeIndex, StoredTrajectories
from engram.store.flow import queue_figures, rate_figures
from engram.store.observation_shares import ObservationShares
from engram.store.writers import WriterShare, writer_shares

_COUNTED_IN_REPR = 1 << 20  # rows: `repr` reads the flags of no more to count episodes


class _Counts(NamedTuple):
    rows: int
    bytes: int
    capacity: int | None
    writes: int
    draws: int
    episodes: int | None
    writers: tuple[WriterShare, ...] = ()
    compact: ObservationShares | None = None
    removed: int = 0
    samples: int | None = None
    samples_per_insert: float | None = None
    waited_insert_s: float = 0.0
    waited_sample_s: float = 0.0
    waiting: int | None = None
    uncommitted: int = 0
    missed: int = 0
    stale: int = 0
    versions: tuple[int | None, int] | None = None


class BufferStats(ReadAsMapping, _Counts):
    """What a buffer holds, and what has been done with it; there may be more fields later.

    Also read as a mapping, `stats["rows"]` or `dict(stats)`, which has TorchRL's names, too: `size` and `write_count`
    (`rows` and `writes`), `utilization` (rows / capacity, where there is one) and `initialized`.

    Attributes:
        rows: stored steps, of all environments.
        bytes: of the storage, used or not; 0 before the first write.
        capacity: steps that fit; None: no limit.
        writes: steps ever written, by all processes.
        draws: batches that this object has handed out, by `sample` and in iteration.
        episodes: trajectories of which steps are stored, as a slice sampler with these keys would see them: seams and
            the write cursor cut them, too. None where the steps do not say where trajectories end.
        writers: of a storage with several lanes, whose rows it has: the `pid` of each process (0: of rows whose writer
            is not known any more), its `rows`, how many it has `written`, and the slot of its `newest` one.
        compact: of a storage with `compact=`, which share of the newest rows took no memory for an observation, and
            what would make them smaller; None of other storages.
        removed: of the stored steps, those that `remove` has taken out: they are not drawn.
        samples: rows that were drawn, by all processes, since the rate limiter began to count; None: there is none.
        samples_per_insert: that for each row written since then, after the limiter's first `min_size_to_sample`.
        waited_insert_s, waited_sample_s: seconds that a rate limiter, or a queue, has let those wait who write, and who
            sample, all of them together.
        waiting: of a storage that is a queue (`QueueSampler`), the rows that are to be handed out; None: it is none.
        uncommitted: rows that were handed out, and keep their places until they are committed.
        missed: rows that were overwritten before they were handed out.
        stale: rows that were passed because they were too old (`max_staleness`).
        versions: of a buffer with a QueueSampler, the policy's version of the oldest row that waits (None: there is
            none, or rows have no version), and the version that trains; else None.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
        >>> done = torch.tensor([0, 0, 1, 0, 0]).bool()
        >>> _ = rb.extend(TensorDict({"n": torch.arange(5), "next": {"done": done}}, [5]))
        >>> _ = rb.sample()
        >>> rb.stats()
        BufferStats(rows=4, bytes=..., capacity=4, writes=5, draws=1, episodes=2,
                    writers=(), compact=None, removed=0, samples=None, samples_per_insert=None,
                    waited_insert_s=0.0, waited_sample_s=0.0, waiting=None,
                    uncommitted=0, missed=0, stale=0, versions=None)
        >>> rb.stats()["size"], dict(rb.stats())["utilization"]
        (4, 1.0)
    """

    def by_name(self) -> dict[str, Any]:
        """What the mapping has: the fields, and TorchRL's names."""
        used = {"utilization": self.rows / self.capacity} if self.capacity else {}
        return {**self._asdict(), "size": self.rows, "write_count": self.writes, **used, "initialized": True}


class BatchCount:
    """How many batches a buffer has handed out."""

    __slots__ = ("batches",)

    def __init__(self) -> None:
        self.batches = 0


class StepCount(NamedTuple):
    """Stored steps, steps ever written, and stored trajectories (None: no step tells where they end), of one moment."""

    rows: int
    writes: int
    episodes: int | None


def count_steps(storage: Storage, sampler: Sampler, index: EpisodeIndex) -> StepCount:
    """Counts what is stored, with the trajectories as the sampler sees them, or as `index` does where it sees none."""
    episodes = plan_of(sampler, storage).episodes or index
    with sampler.lock, storage.mutex:
        return storage.access.validated(lambda: _counted(storage, episodes))


def observation_shares_of(storage: Storage) -> ObservationShares | None:
    """What the rows of a storage are made of that keeps observations once; None: it keeps whole rows."""
    return storage.access.validated(storage.access.table.rows.observation_shares)


def writers_of(storage: Storage) -> tuple[WriterShare, ...]:
    """Whose rows a storage has; () where it does not tell, or there was one writer at a time."""
    with storage.mutex:
        return storage.access.validated(lambda: writer_shares(storage.lanes.store))


def draws_of(storage: Storage) -> dict[str, Any]:
    """What `BufferStats` has of draws and waits."""
    figures = rate_figures(storage.lanes.store)
    if figures is None:
        return {}
    return {
        "samples": figures.drawn,
        "samples_per_insert": figures.samples_per_insert,
        "waited_insert_s": figures.waited_insert_s,
        "waited_sample_s": figures.waited_sample_s,
    }


def queue_figures_of(storage: Storage, sampler: Any) -> dict[str, Any]:
    """What `BufferStats` has of a queue."""
    figures = queue_figures(storage.lanes.store)
    if figures is None:
        return {}
    return {
        "waiting": figures.waiting,
        "uncommitted": figures.uncommitted,
        "missed": figures.missed,
        "stale": figures.stale,
        "versions": sampler.versions(storage) if isinstance(sampler, QueueSampler) else None,
        "waited_insert_s": figures.waited_insert_s,
        "waited_sample_s": figures.waited_sample_s,
    }


def _counted(storage: Storage, index: EpisodeIndex) -> StepCount:
    if not storage.initialized:
        return StepCount(len(storage), storage.write_count, 0)
    lanes = storage.lanes
    counted = _trajectories_and_rows(storage, index)
    counters = lanes.counters()
    if counted is None:
        rows, episodes = [range(lane["first"], lane["published"]) for lane in counters], None
    elif counted[1]:
        rows, episodes = counted[1], len(counted[0].length)
    elif any(lane["published"] > lane["first"] for lane in counters):  # the first rows, written meanwhile
        return _counted(storage, index)
    else:
        rows, episodes = [range(lane["published"], lane["published"]) for lane in counters], 0
    # A lane without rows has the range (0, 0), wherever its rows begin.
    writes = sum(max(r.stop, lane["first"]) - lane["origin"] for lane, r in zip(counters, rows, strict=True)) % (
        1 << 64
    )
    return StepCount(sum(map(len, rows)) * lanes.envs, writes * lanes.envs, episodes)


def stored_trajectories(storage: Storage, index: EpisodeIndex) -> tuple[StoredTrajectories, list[range]] | None:
    """As `EpisodeIndex.trajectories_and_rows`; None where the steps do not say where trajectories end.

    Reads the flags of new steps.
    """
    with storage.mutex:
        return storage.access.validated(lambda: _trajectories_and_rows(storage, index))


def _trajectories_and_rows(storage: Storage, index: EpisodeIndex) -> tuple[StoredTrajectories, list[range]] | None:
    """As `stored_trajectories`; the caller holds the mutex, and validates what it reads."""
    try:
        return index.trajectories_and_rows(storage)
    except (KeyError, ValueError):  # the steps have neither ids nor flags, or not one a step
        return None


def shown_content(storage: Storage, sampler: Sampler, index: EpisodeIndex) -> dict[str, Any]:
    """Keys, rows, bytes and episodes, as a buffer's `repr` shows them; nothing before the first write."""
    rows, layout = len(storage), storage.layout
    if not rows or isinstance(storage, StorageEnsemble):
        return {}
    counted = _counted_at_once(storage, sampler, index) if rows <= _COUNTED_IN_REPR else None
    rows = rows if counted is None else counted.rows
    shown: dict[str, Any] = {"rows": rows, "bytes": human_bytes(storage.nbytes)}
    if layout is not None:
        keys = [f"{format_key(x.path)}: {str(x.dtype)[6:]} {list(x.shape)}" for x in layout.leaves]
        shown["keys"] = f"{{{', '.join(keys)}}}"
    episodes = None if counted is None else counted.episodes
    return shown if episodes is None else {**shown, "episodes": episodes}


def _counted_at_once(storage: Storage, sampler: Sampler, index: EpisodeIndex) -> StepCount | None:
    """What is stored; None where another thread is using the buffer."""
    locks = sampler.lock, storage.mutex
    acquired = [lock for lock in locks if lock.acquire(blocking=False)]
    try:
        return count_steps(storage, sampler, index) if len(acquired) == len(locks) else None
    finally:
        for lock in acquired:
            lock.release()
