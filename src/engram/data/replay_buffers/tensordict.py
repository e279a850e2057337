"""Replay buffers of TensorDicts, whose samples carry the index of each row, and buffers that draw by priority."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import TypeVar, Unpack

from engram._advice import advised, with_argument
from engram.data.replay_buffers.buffer import BufferArguments, ReplayBuffer
from engram.data.replay_buffers.reader import index_and_weight
from engram.data.replay_buffers.samplers.prioritized import PrioritizedSampler
from engram.data.replay_buffers.storages.base import Storage
from engram.data.replay_buffers.writers.round_robin import TensorDictRoundRobinWriter, Writer
from engram.pytree import get_entry

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

    _copied_as: ClassVar[dict[str, Any]] = {"_layout_checked": (None, True)}

    def __init__(
        self,
        capacity: int | None = None,
        /,
        *,
        priority_key: str = "td_error",
        **kwargs: Unpack[BufferArguments],
    ) -> None:
        self._priority_key = priority_key
        self._layout_checked: tuple[Any, bool] = (None, True)  # and whether its rows have priorities
        super().__init__(capacity, **kwargs)

    def _default_writer(self) -> Writer:
        return TensorDictRoundRobinWriter()

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "priority_key": self._priority_key}

    @property
    def priority_key(self) -> str:
        return self._priority_key

    @property
    def _attaches(self) -> bool:
        return True

    _attach = staticmethod(index_and_weight)

    extend = with_argument(ReplayBuffer.extend, "data", "tensordicts")

    # ---- priorities that come with the data ----
    def _given_priorities(self, items: Any, single: bool, time_dim: int) -> Tensor | None:
        return self._priorities_in(items, single, time_dim) if self._takes_priorities() else None

    def _writing(self) -> AbstractContextManager[Any]:
        return self._with_sampler() if self._takes_priorities() else super()._writing()

    @contextlib.contextmanager
    def _with_sampler(self) -> Iterator[None]:
        storage = self._storage
        # In the order of those who draw, load and save; a turn, so that the rows are there when they get priorities.
        with self._sampler.lock, storage.mutex, storage._turn():
            yield

    def _set_priorities(self, slots: Tensor | int, priorities: Tensor) -> None:
        at = torch.as_tensor(slots).reshape(-1)
        if self._storage._item_shape:  # of an item's priorities, one would be made of those of items that are gone
            last = torch.tensor(list({slot: i for i, slot in enumerate(at.tolist())}.values()))
            at, priorities = at[last], priorities[last]
        given = ~priorities.isnan() & (at >= 0)  # a writer gives -1 to steps that it refuses
        self._sampler.update_priority(self._storage.from_slots(at[given]), priorities[given], storage=self._storage)

    def _takes_priorities(self) -> bool:
        """Whether data may come with priorities, for a sampler that takes them."""
        if not self._sampler._takes_priorities:
            return False
        # Where the rows have no such leaf, data that have it are refused anyhow: looking for it in each costs more.
        layout = self._storage.layout
        if layout is None:
            return True
        if self._layout_checked[0] is not layout:
            path = self._priority_key if isinstance(self._priority_key, tuple) else (self._priority_key,)
            self._layout_checked = layout, any(leaf.path == path for leaf in layout.leaves)
        return self._layout_checked[1]

    def _priorities_in(self, items: Any, single: bool, time_dim: int) -> Tensor | None:
        """One for each step, in the order of slots; NaN for items without one; None where no item has any."""
        if isinstance(items, list):
            each = [self._priorities_in(item, True, -1) for item in items]
            if all(p is None for p in each):
                return None
            return torch.cat([torch.tensor([torch.nan], dtype=torch.float64) if p is None else p for p in each])
        given = get_entry(items, self._priority_key)
        if given is None:
            return None
        dims = self._storage.ndim - 1 if single else self._storage.ndim
        value = torch.as_tensor(given)
        if not single and time_dim < value.ndim:
            value = value.movedim(time_dim, 0)
        lead = value.shape[:dims]
        n = lead.numel()
        priorities: Tensor = self._sampler.checked_priorities(value.reshape(n, *value.shape[dims:]), n)
        return priorities

    def update_tensordict_priority(self, data: Any) -> None:
        """Sets the priorities of a batch's rows from `data[priority_key]`.

        Raises:
            KeyError: the batch has no such key, or no `"index"`.
            TypeError: the batch has no keys.
        """
        if not hasattr(data, "keys"):
            raise TypeError(
                f"priorities come in a batch with keys, 'index' and {self._priority_key!r}, found a "
                f"{type(data).__name__}; nothing was changed"
            )
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
