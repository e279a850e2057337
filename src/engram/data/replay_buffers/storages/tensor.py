"""Storages whose rows all have one layout: packed rows in memory, columns on a GPU, tensors that exist."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram import pytree
from engram._advice import advised, with_argument
from engram._checks import count
from engram.data.replay_buffers.state.rows import SavedRows
from engram.data.replay_buffers.storages.base import Storage
from engram.errors import StorageError
from engram.pytree import Key
from engram.specs import Spec
from engram.store.columnar_rows import ColumnarRows
from engram.store.compact import Compact, KnownSteps, as_compact
from engram.store.first_writers import FirstWriters, UnmadeStore
from engram.store.lanes import Lanes
from engram.store.layout import ObservationKeys, RowLayout
from engram.store.packed_rows import PackedRows
from engram.store.places import (
    GivenRoom,
    GivenTensors,
    LaneCount,
    NewTable,
    Place,
    PrivateMemory,
    SharedMemory,
    TableSize,
    memory_device,
)
from engram.store.rows import Rows
from engram.store.table import Table


class TableStorage(Storage):
    """A storage whose rows all have one layout: those of a table that is made when the layout is known."""

    def _hold_rows(self, table: Table, checkpointer: Any) -> None:
        """Begins with a table."""
        self._hold(table, checkpointer, functools.partial(SavedRows, table=table), TensorStorage)

    def adopt(self, layout: RowLayout) -> None:
        """Makes the storage for rows of this layout before the first of them comes; ndim=1. The same again is no error.

        Raises:
            ValueError: it has another layout already; every difference is listed. Or ndim is not 1.
            StorageError: it cannot be made.

        Example:
            >>> storage = LazyTensorStorage(10)
            >>> storage.adopt(RowLayout.of(TensorDict({"x": torch.zeros(3)}, [3]), 1))
            >>> storage.layout.paths, len(storage)
            (frozenset({('x',)}), 0)
        """
        if self.ndim != 1:
            raise ValueError(f"a layout says nothing of environments: ndim must be 1, it is {self.ndim}")
        self._held_table.adopt(layout)

    # ---- rows as bytes ----
    def append_packed(self, rows: Tensor | np.ndarray[Any, Any]) -> Tensor:
        """Writes rows as bytes, uint8 [n, layout.payload_bytes], behind this process's newest one.

        Returns time slots, int64 [n].

        Raises:
            ValueError: the rows are not ones of this layout; nothing was written.
            StorageError: the rows are not kept as bytes.

        Example:
            >>> batch = TensorDict({"x": torch.arange(3)}, [3])
            >>> storage = LazyTensorStorage(10, shared=True, lanes=2)
            >>> storage.adopt(RowLayout.of(batch, 1))
            >>> storage.append_packed(storage.layout.pack(batch))
            tensor([0, 1, 2])
        """
        with self.mutex:
            packed = _packed(self._held_table)
            slots = packed.append_plan(packed.plan_packed(rows))
        assert isinstance(slots, Tensor)
        return slots

    def append_leaves(self, leaves: list[Any]) -> Tensor:
        """As `append_packed`, of the bytes of each leaf: uint8 [n, nbytes] for each of `layout.leaves`."""
        with self.mutex:
            packed = _packed(self._held_table)
            slots = packed.append_plan(packed.plan_leaves(leaves))
        assert isinstance(slots, Tensor)
        return slots

    def read_packed(self, slots: Tensor, by_leaf: bool = False, sequences: bool = False) -> Rows:
        """As `read`, as bytes: `batch` is a list of one tensor, uint8 [n, layout.payload_bytes].

        With `by_leaf` a list with the bytes of each leaf, uint8 [n, nbytes].
        """
        return self._held_table.rows.lanes.validated(
            functools.partial(_packed(self._held_table).read_packed, slots, by_leaf, sequences)
        )


def _packed(table: Table) -> PackedRows:
    """The rows as bytes. StorageError: there are none, or they are not kept so."""
    if not isinstance(table.rows, PackedRows):
        raise StorageError("this storage has no rows as bytes: adopt a layout first, with device='cpu'")
    return table.rows


@advised
class TensorStorage(TableStorage):
    """A storage around tensors that exist: they are the stored rows, all of them, and are written in place.

    Args:
        storage: a tensor, TensorDict, tensorclass or pytree whose first `ndim` dimensions are `[time, ...]`. A
            TensorDict without entries is room for as many steps as its batch size says, which the first write fills
            with entries: the rows are then the storage's own. Of a tensor whose elements share memory (`expand`,
            `unfold`), the rows are a copy: written in place, one would change others.
        max_size: steps; must agree with the data.
        device: where the data must be; the data's own if None.
        ndim: batch dimensions.

    Raises:
        ValueError: there are no data, `max_size` or `ndim` do not fit them, or there is no such device.

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
        compilable: bool = False,
    ) -> None:
        if storage is None:
            raise ValueError("the data of a TensorStorage are to be non-null; LazyTensorStorage(n) begins without any")
        root, entries = pytree.describe(storage, ndim)
        if not entries and isinstance(storage, TensorDictBase):
            self._hold_rows(_table_with_room(storage, max_size, device, ndim), checkpointer)
            return
        tensors = [_with_own_elements(_tensor(value, path)) for path, value in entries]
        lead = _common_lead(entries, tensors, ndim)
        count = math.prod(lead)
        if max_size is not None and max_size not in (lead[0], count):
            raise ValueError(f"max_size={max_size}, but the data hold {count} steps; leave max_size out")
        if count == 0:
            raise ValueError("the data have no steps: there is nothing to store in")
        if device is not None:
            tensors = [t.to(memory_device(device)) for t in tensors]
        layout = RowLayout.of(pytree.map_outermost(storage, lambda part: part[:1]), ndim)
        layout.take_root(root)
        env_shape = tuple(lead[1:])
        lanes = Lanes.in_memory(lead[0], math.prod(env_shape))
        lanes.advance(lead[0])
        rows = ColumnarRows(lanes, layout, tensors, env_shape, ndim)
        place = GivenTensors(storage, tensors[0].device)
        self._hold_rows(Table(TableSize(count, None, ndim, None), place, rows), checkpointer)

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self._held_table.place.device

    @device.setter
    def device(self, device: torch.device) -> None:
        self._held_table.place.device = device


def _table_with_room(room: TensorDictBase, max_size: int | None, device: Any, ndim: int) -> Table:
    """The table of a storage for as many steps as the batch size of a TensorDict says."""
    lead = tuple(room.batch_size[:ndim])
    if len(lead) < ndim or 0 in lead:
        raise ValueError(f"a TensorDict without entries of batch size {list(room.batch_size)} is no room for steps")
    count = math.prod(lead)
    if max_size is not None and max_size not in (lead[0], count):
        raise ValueError(f"max_size={max_size}, but the batch size is {list(lead)}; leave max_size out")
    place = GivenRoom(room, lead, memory_device(device if device is not None else room.device or "cpu"))
    return Table(TableSize(count, None, ndim, None), place)


@advised
class LazyTensorStorage(TensorStorage):
    """Packed rows in memory, made at the first write; on a GPU, one tensor per key.

    Args:
        max_size: steps that fit. With `ndim=2` it is rounded up to whole rows of environments.
        device: where the rows are kept; "auto": on the device of the first batch.
        ndim: batch dimensions of the data; the last one is time.
        shared: keep the rows in memory that other processes see and write too.
        lanes: about how many processes append side by side; more are welcome. The ring is cut in some dozens of lanes,
            and a writer fills one after the other, each time that with the oldest steps: `max_size` steps are kept,
            whoever writes, and trajectories are cut where a writer moves on. None: any number take turns in one ring,
            an `extend` at a time, and slices end where another process wrote. 1: one process writes.
        compilable: accepted, without effect: under `torch.compile` each use of a buffer is a graph break.
        consolidated, cleanup_memmap: accepted, without effect: rows are packed in one memory, which goes with them.
        shared_init: shared, and processes that have it (forked, or sent) before the first write share it, too: the
            first of them that writes makes the rows' memory, the others use it.
        max_bytes: instead of `max_size`, what the rows and their header may take: a number, "8GB", "512MiB". As many
            steps as fit, which is known at the first write; until then `max_size` is None.
        compact: store observations once: True, keys, or a `Compact`. Of an observation X that rows have at the root and
            under `"next"` (flat rows: as `"next_X"`) each frame is stored once, so that stacks of 4 frames take an
            eighth of the memory. Rows come back byte for byte; stored rows change in all other entries, and slices of
            them are copies. None: as False, with a warning at the first write of large rows where True would save much.

    Raises:
        ValueError: a setting that is not allowed, or there is no such device.
        StorageError: at the first write, with the numbers, when memory cannot hold it, or `max_bytes` not one step.

    Example:
        >>> storage = LazyTensorStorage(100)
        >>> rb = ReplayBuffer(storage=storage, batch_size=4)
        >>> rb.extend(TensorDict({"x": torch.arange(6.0)}, [6]))
        tensor([0, 1, 2, 3, 4, 5])
        >>> len(storage), storage[2:4]["x"]
        (6, tensor([2., 3.]))
        >>> storage = LazyTensorStorage(max_bytes="1MB")
        >>> storage.set(0, torch.zeros(250))
        >>> storage.max_size > 900, storage.nbytes <= 1_000_000
        (True, True)
    """

    def __init__(
        self,
        max_size: int | None = None,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        shared: bool = False,
        lanes: int | LaneCount | None = None,
        *,
        checkpointer: Any = None,
        compilable: bool = False,
        shared_init: bool = False,
        max_bytes: int | str | None = None,
        compact: bool | Key | list[Key] | Compact | None = None,
    ) -> None:
        if max_size is None and max_bytes is None:
            raise ValueError('a storage needs a size: max_size=100_000 steps, or max_bytes="8GB"')
        size, private = TableSize(max_size, max_bytes, ndim, lanes), PrivateMemory(device)
        is_shared = shared or shared_init
        if private.device.type != "cpu" and (is_shared or size.lanes > 1):
            raise ValueError(
                f"a storage on {private.device} belongs to one process: shared and lanes need device='cpu'"
            )
        if size.lanes > 1 and not is_shared:
            raise ValueError("lanes are for processes that share a storage: pass shared=True too")
        found = as_compact(compact)
        if found is not None and private.device.type != "cpu":
            raise ValueError(f"compact= stores observations once in memory of the CPU, not on {private.device}")
        place: Place = SharedMemory() if is_shared else private
        if shared_init:
            place = FirstWriters(SharedMemory(), UnmadeStore(temporary=False))
        self._hold_rows(Table(size, place, compact=found, advises=compact is None), checkpointer)

    @classmethod
    def nbytes_for(cls, spec: Any, n: int, *, compact: bool | Key | list[Key] | Compact | None = None) -> int:
        """The bytes that storage of this class needs for n steps, before one is made: `nbytes` after the first write.

        Args:
            spec: of a step: a spec of `engram.specs`, or a step itself, without a batch dimension. A
                `TensorDictReplayBuffer` also stores `"index"`, an int64.
            n: the steps, of all environments.

            compact: as the storage's: of observations that are stored once, frames of a picture lie along its first
                dimension, if that is below 16 and `frames` says nothing else. Ends of episodes take a frame more each.

        Raises:
            ValueError: n is below 1, the step holds no tensor, or `compact` names what is not there.
            TypeError: an entry has a dtype that no row holds.

        Example:
            >>> step = {"pixels": torch.zeros(84, 84, dtype=torch.uint8), "action": 0, "reward": 0.0, "done": False}
            >>> LazyTensorStorage.nbytes_for(step, 1_000_000) // 1_000_000
            7072
            >>> stack = torch.zeros(4, 84, 84, dtype=torch.uint8)
            >>> step = {"pixels": stack, "action": 0, "next": {"pixels": stack, "reward": 0.0, "done": False}}
            >>> [LazyTensorStorage.nbytes_for(step, 1_000_000, compact=x) // 1_000_000 for x in (False, True)]
            [56464, 7081]
        """
        return table_bytes(spec, n, PrivateMemory("cpu"), as_compact(compact))

    @property
    def compact(self) -> Compact | None:
        """Which observations are stored once: before the first write as given, then as found; None: none."""
        table = self._held_table
        if not self.initialized:
            return table.compact
        return None if table.rows.observations is None else Compact.of(table.rows.observations)

    @property
    def shared(self) -> bool:
        """Whether other processes can see and write the rows."""
        return not isinstance(self._held_table.place, PrivateMemory)

    get = with_argument(TableStorage.get, "index", "indices")


def table_bytes(spec: Any, n: int, place: Place, compact: Compact | None = None) -> int:
    """The bytes of a table in a place, for n steps of a spec, or like a step; errors as `nbytes_for`."""
    n = count(n, "n")
    step = spec.zero() if isinstance(spec, Spec) else spec
    layout = RowLayout.of(step, 0)
    observations = None if compact is None else compact.find(layout, KnownSteps(ObservationKeys({})))
    return place.bytes_of(NewTable(layout, (), 1, 1, int(n), given_lanes=None, observations=observations))


def _tensor(value: Any, path: pytree.KeyPath) -> Tensor:
    if not isinstance(value, Tensor):
        return pytree.as_tensor(value, path)
    if value.device.type == "cpu":
        pytree.as_tensor(value, path)  # for its errors
    return value.detach()


def _with_own_elements(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it where several of its elements may be one: of `expand`, or of windows (`unfold`)."""
    reach = 0  # of the elements along all dimensions with smaller strides
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1 and stride <= reach:
            return tensor.clone(memory_format=torch.contiguous_format)
        reach += stride * max(0, n - 1)
    return tensor


def _common_lead(entries: list[tuple[pytree.KeyPath, Any]], tensors: list[Tensor], ndim: int) -> tuple[int, ...]:
    if not tensors:
        raise ValueError("nothing to store: the data hold no tensor")
    lead = tuple(tensors[0].shape[:ndim])
    for (path, _), t in zip(entries, tensors, strict=True):
        if t.ndim < ndim or tuple(t.shape[:ndim]) != lead:
            raise ValueError(
                f"{pytree.format_key(path)} has shape {list(t.shape)}; all data must begin with {list(lead)}"
            )
    if len(lead) < ndim:
        raise ValueError(f"the data have shape {list(lead)}, fewer than ndim={ndim} dimensions")
    return lead


__all__ = ["LazyTensorStorage", "TensorStorage"]
