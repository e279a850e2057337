"""Replay buffers of TensorDicts, whose samples carry the index of each row, and buffers that draw by priority."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from typing_extensions import TypeVar, Unpack

from engram._advice import advised, with_argument
from engram.data.replay_buffers.buffers.buffer import BufferArguments, ReplayBuffer
from engram.data.replay_buffers.reading.reader import index_and_weight
from engram.data.replay_buffers.samplers.prioritized import PrioritizedSampler
from engram.data.replay_buffers.storages.base import Storage
from engram.data.replay_buffers.writers.round_robin import TensorDictRoundRobinWriter
from engram.pytree import has_keys

#: What samples are: TensorDicts, or a tensorclass.
TD = TypeVar("TD", default=TensorDictBase)


class TensorDictReplayBuffer(ReplayBuffer[TD]):
    """A ReplayBuffer whose samples carry `"index"`, for data with keys.

    Args:
        priority_key: where priorities are: in batches that `update_tensordict_priority` gets, and, with a sampler that
            has priorities, in data that are written (steps without the key get the priority of new ones).
        Others: as ReplayBuffer; the default writer is `TensorDictRoundRobinWriter`.

    Items may be whole trajectories: `extend` of a TensorDict `[3, 4]` stores 3 items of 4 steps (with ndim=1), a sample
    of two is `[2, 4]`, and `"index"` and `"priority_weight"` say the same for each step of an item. What
    `update_tensordict_priority` gets for an item's steps is reduced to one priority (the sampler's `reduction`).

    What a sampler of your own has in its info for each row, tensors and arrays `[batch, ...]`, is in the samples under
    the same keys, unless the data have an entry there. `"generation"` is with `track_generations=True` only.

    Example:
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(TensorDict({"obs": torch.arange(10.0)}, [10]))
        >>> batch = rb.sample()
        >>> bool((rb[batch["index"]]["obs"] == batch["obs"]).all())
        True
    """

    _entries = staticmethod(index_and_weight)
    _make_default_writer = TensorDictRoundRobinWriter

    def __init__(
        self,
        capacity: int | None = None,
        /,
        *,
        priority_key: str = "td_error",
        **kwargs: Unpack[BufferArguments],
    ) -> None:
        self._priority_key = priority_key
        super().__init__(capacity, **kwargs)

    @property
    def priority_key(self) -> str:
        key: str = self._priority_key
        return key

    extend = with_argument(ReplayBuffer.extend, "data", "tensordicts")
    _extends_plainly = True

    def update_tensordict_priority(self, data: Any) -> None:
        """Sets the priorities of a batch's rows from `data[priority_key]`.

        For samplers without priorities there is nothing to do, whatever keys the batch has.

        Raises:
            KeyError: the batch has no such key, or no `"index"`.
            TypeError: the batch has no keys.
        """
        if not (has_keys(data) or isinstance(data, Mapping)):
            raise TypeError(
                f"priorities come in a batch with keys, 'index' and {self._priority_key!r}, found a "
                f"{type(data).__name__}; nothing was changed"
            )
        if not self._parts.plan.takes_updates:
            return
        try:
            index, priority = data["index"], data[self._priority_key]
        except KeyError:
            keys = sorted(map(str, data.keys()))
            raise KeyError(f"the batch needs 'index' and {self._priority_key!r}; its keys are {keys}") from None
        generation = data["generation"] if "generation" in data.keys() else None  # noqa: SIM118 -- a TensorDict iterates over rows
        self.update_priority(index, priority, generation)


@advised
class PrioritizedReplayBuffer(ReplayBuffer):
    """A ReplayBuffer with a `PrioritizedSampler`.

    Args:
        alpha, beta, eps, dtype, reduction, max_priority_within_buffer: as PrioritizedSampler.
        sampler_device: None and "cpu" are accepted; sync: accepted, without effect.
        Others: as ReplayBuffer, but there is no `sampler`.

    Example:
        >>> rb = PrioritizedReplayBuffer(0.7, 0.9, storage=LazyTensorStorage(10), batch_size=4)
        >>> index = rb.extend(torch.arange(5))
        >>> rb.update_priority(index, torch.tensor([0.1, 2.0, 0.1, 0.1, 0.1]))
        >>> batch, info = rb.sample(return_info=True)
        >>> info["priority_weight"].shape
        torch.Size([4])
    """

    def __init__(
        self,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        *,
        capacity: int | None = None,
        storage: Storage | Callable[[], Storage] | None = None,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        **kwargs: Any,
    ) -> None:
        sampler = PrioritizedSampler(None, alpha, beta, eps, dtype, reduction, max_priority_within_buffer)
        super().__init__(capacity, storage=storage, sampler=sampler, **kwargs)

    @property
    def prioritized_sampler(self) -> PrioritizedSampler:
        """The sampler; another one where `set_sampler` was called."""
        sampler: PrioritizedSampler = self.sampler
        return sampler


@advised
class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """A TensorDictReplayBuffer with a `PrioritizedSampler`: samples carry `"index"` and `"priority_weight"`.

    Args:
        alpha, beta, eps, dtype, reduction, max_priority_within_buffer: as PrioritizedSampler.
        priority_key: where priorities are, in data that are written and in batches that come back.
        sampler_device: None and "cpu" are accepted; sync: accepted, without effect.
        Others: as TensorDictReplayBuffer, but there is no `sampler`.

    Example:
        >>> rb = TensorDictPrioritizedReplayBuffer(0.7, 0.9, storage=LazyTensorStorage(10), batch_size=4)
        >>> _ = rb.extend(TensorDict({"obs": torch.arange(5.0), "td_error": torch.ones(5)}, [5]))
        >>> batch = rb.sample()
        >>> batch["td_error"] = (batch["obs"] - 2).abs() * batch["priority_weight"]
        >>> rb.update_tensordict_priority(batch)
    """

    def __init__(
        self,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        priority_key: str = "td_error",
        reduction: str = "max",
        dtype: torch.dtype = torch.float,
        *,
        capacity: int | None = None,
        storage: Storage | Callable[[], Storage] | None = None,
        max_priority_within_buffer: bool = False,
        **kwargs: Any,
    ) -> None:
        sampler = PrioritizedSampler(None, alpha, beta, eps, dtype, reduction, max_priority_within_buffer)
        super().__init__(capacity, storage=storage, sampler=sampler, priority_key=priority_key, **kwargs)

    @property
    def prioritized_sampler(self) -> PrioritizedSampler:
        """The sampler; another one where `set_sampler` was called."""
        sampler: PrioritizedSampler = self.sampler
        return sampler
