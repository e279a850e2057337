"""Storages in memory: made at the first write, or around tensors that exist."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engram.data.replay_buffers import trees
from engram.data.replay_buffers.columns import ColumnTable
from engram.data.replay_buffers.files import StoreSize, open_shared_memory, refuse_if_memory_is_short
from engram.data.replay_buffers.lanes import Lanes
from engram.data.replay_buffers.layout import RowLayout
from engram.data.replay_buffers.locks import LaneLocks
from engram.data.replay_buffers.rows import RowTable
from engram.data.replay_buffers.storages.base import log
from engram.data.replay_buffers.storages.sharing import share_descriptor, store_of_descriptor
from engram.data.replay_buffers.storages.table import TableStorage
from engram.data.specs.base import usable_device
from engram.errors import StorageError


class LazyTensorStorage(TableStorage):
    """Packed rows in memory, made at the first write; on a GPU, one tensor per key.

    Args:
        max_size: steps that fit. With `ndim=2` it is rounded up to whole rows of environments.
        device: where the rows are kept.
        ndim: batch dimensions of the data; the last one is time.
        shared: keep the rows in memory that other processes see and write too.
        lanes: how many processes may append.

    Raises:
        ValueError: a setting that is not allowed, or there is no such device.
        StorageError: at the first write, with the numbers, when memory cannot hold it.

    Example:
        >>> storage = LazyTensorStorage(100)
        >>> rb = ReplayBuffer(storage=storage, batch_size=4)
        >>> rb.extend(TensorDict({"x": torch.arange(6.0)}, [6]))
        tensor([0, 1, 2, 3, 4, 5])
        >>> len(storage), storage[2:4]["x"]
        (6, tensor([2., 3.]))
    """

    def __init__(
        self,
        max_size: int,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        shared: bool = False,
        lanes: int = 1,
        *,
        checkpointer: Any = None,
    ) -> None:
        super().__init__(max_size, ndim, checkpointer, lanes)
        self.device = _device(device)
        self.shared = shared
        if self.device.type != "cpu" and (shared or lanes > 1):
            raise ValueError(f"a storage on {self.device} belongs to one process: shared and lanes need device='cpu'")
        if lanes > 1 and not shared:
            raise ValueError("lanes are for processes that share a storage: pass shared=True too")

    def _make(self, layout: RowLayout, lane_capacity: int) -> tuple[Lanes, RowTable | ColumnTable]:
        size = StoreSize(layout, self._n_lanes, lane_capacity, _count(self._inner), trailer=False)
        if self.device.type != "cpu":
            lanes = Lanes.in_memory(lane_capacity, _count(self._inner))
            log.info("storage on %s: %s", self.device, size)
            return lanes, ColumnTable.empty(lanes, layout, self._inner, self.device)
        log.info("storage in %smemory: %s", "shared " if self.shared else "", size)
        if self.shared:
            fd = open_shared_memory(size)
            lanes = Lanes(size.create_in(fd), LaneLocks(fd))
        else:
            refuse_if_memory_is_short(size)
            lanes = Lanes(size.create(-1))
        return lanes, RowTable(lanes, layout, mapped=False)

    def settings(self) -> dict[str, Any]:
        return {
            "max_size": self._asked_size, "device": str(self.device), "ndim": self.ndim, "shared": self.shared,
            "lanes": self._n_lanes,
        }  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        if not self.shared:
            raise StorageError(
                f"Cannot share a storage of type {type(self).__name__} whose rows are in private memory: make it with "
                "shared=True"
            )
        if self._lanes is None or self._lanes.locks is None:
            raise StorageError(
                "the storage has not been initialized: write its first batch before sending it to another process"
            )
        return {
            "init": (self._asked_size, str(self.device), self.ndim, True, self._n_lanes),
            "inner": self._inner,
            "descriptor": share_descriptor(self._lanes.locks.fd),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["init"])  # type: ignore[misc]
        store, locks, layout = store_of_descriptor(state["descriptor"])
        lanes = Lanes(store, locks)
        lanes.mutex = self.mutex
        self._inner, self._lanes = state["inner"], lanes
        self._table = RowTable(lanes, layout, mapped=False)
        self._max_size = lanes.capacity


class TensorStorage(TableStorage):
    """A storage around tensors that exist: they are the stored rows, all of them, and are written in place.

    Args:
        storage: a tensor, TensorDict, tensorclass or pytree whose first `ndim` dimensions are `[time, ...]`.
        max_size: steps; must agree with the data.
        device: where the data must be; the data's own if None.
        ndim: batch dimensions.

    Raises:
        ValueError: `max_size` or `ndim` do not fit the data, or there is no such device.

    Example:
        >>> data = torch.arange(10)
        >>> storage = TensorStorage(data)
        >>> len(storage), storage[3]
        (10, tensor(3))
    """

    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        device: torch.device | str | None = None,
        ndim: int = 1,
        *,
        checkpointer: Any = None,
    ) -> None:
        root, found = trees.describe(storage, ndim)
        tensors = [_tensor(value, path) for path, value in found]
        lead = _common_lead(found, tensors, ndim)
        count = 1
        for d in lead:
            count *= d
        if max_size is not None and max_size not in (lead[0], count):
            raise ValueError(f"max_size={max_size}, but the data hold {count} steps; leave max_size out")
        if count == 0:
            raise ValueError("the data have no steps: there is nothing to store in")
        super().__init__(count, ndim, checkpointer)
        if device is not None:
            tensors = [t.to(_device(device)) for t in tensors]
        layout = RowLayout.of(_first_step(storage), ndim)
        layout.take_root(root)
        self._inner = tuple(lead[1:])
        self._lanes = Lanes.in_memory(lead[0], _count(self._inner))
        self._lanes.mutex = self.mutex
        self._lanes.advance(lead[0])
        self._table = ColumnTable(self._lanes, layout, tensors, self._inner)
        self._data = storage
        self.device = tensors[0].device

    def settings(self) -> dict[str, Any]:
        return {"storage": self._data, "ndim": self.ndim}

    def _make(self, layout: RowLayout, lane_capacity: int) -> tuple[Lanes, RowTable | ColumnTable]:
        raise AssertionError("made in __init__")


def _device(device: torch.device | str) -> torch.device:
    """Where rows are to be kept. ValueError, TypeError: they cannot be kept there."""
    found = usable_device(device, "device")
    if found is None or found.type == "meta":
        raise ValueError(f"device={device!r}: a storage keeps its rows in memory, 'cpu' or that of a GPU")
    return found


def _count(shape: tuple[int, ...]) -> int:
    n = 1
    for d in shape:
        n *= d
    return n


def _tensor(value: Any, path: trees.Path) -> Tensor:
    if not isinstance(value, Tensor):
        return trees.as_tensor(value, path)
    if value.device.type == "cpu":
        trees.as_tensor(value, path)  # for its errors
    return value.detach()


def _common_lead(found: list[tuple[trees.Path, Any]], tensors: list[Tensor], ndim: int) -> tuple[int, ...]:
    if not tensors:
        raise ValueError("nothing to store: the data hold no tensor")
    lead = tuple(tensors[0].shape[:ndim])
    for (path, _), t in zip(found, tensors, strict=True):
        if t.ndim < ndim or tuple(t.shape[:ndim]) != lead:
            raise ValueError(f"{trees.show(path)} has shape {list(t.shape)}; all data must begin with {list(lead)}")
    if len(lead) < ndim:
        raise ValueError(f"the data have shape {list(lead)}, fewer than ndim={ndim} dimensions")
    return lead


def _first_step(storage: Any) -> Any:
    """The data cut to one step, for their layout alone."""
    if isinstance(storage, dict):
        return {k: _first_step(v) for k, v in storage.items()}
    if isinstance(storage, list | tuple):
        return type(storage)(_first_step(v) for v in storage)
    return storage[:1]


__all__ = ["LazyTensorStorage", "TensorStorage"]
