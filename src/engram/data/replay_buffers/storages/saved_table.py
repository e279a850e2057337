"""How storages with a fixed layout are saved and restored: the RowSource and RowSink that a checkpointer sees."""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from engram.data.replay_buffers.checkpointers.counters import Counters
from engram.data.replay_buffers.columns import ColumnTable
from engram.data.replay_buffers.lanes import Lanes
from engram.data.replay_buffers.layout import MalformedLayoutError, RowLayout
from engram.data.replay_buffers.rows import RowTable
from engram.data.replay_buffers.storages.base import Storage
from engram.data.replay_buffers.storages.frozen import Changes, CopiedRows, FrozenRows, NothingYet
from engram.data.replay_buffers.storages.staging import StagedRows, TooManyRowsError
from engram.errors import CheckpointError, CheckpointMisfitError


class SavedTable(Storage):
    """A storage whose rows lie in a table that is made when the layout is known."""

    _n_lanes: int
    _inner: tuple[int, ...]
    _asked_size: int | None
    _lanes: Lanes | None
    _table: RowTable | ColumnTable | None
    _made_for_restore = False

    @abc.abstractmethod
    def _adopt(self, layout: RowLayout, inner: tuple[int, ...]) -> None:
        """Makes the table for a layout and strands of this shape."""

    @property
    @abc.abstractmethod
    def _can_widen(self) -> bool:
        """Whether rows that are there can get a place for sequences: not in a file, nor where others see them."""

    @abc.abstractmethod
    def _make_room(self, layout: RowLayout) -> None:
        """Before rows of this layout are restored into the table: for the sequences that they carry, if it can."""

    @abc.abstractmethod
    def _unmake(self) -> bool:
        """Gives a table that nobody has seen back; False: it stays."""

    def _default_checkpointer(self) -> Any:
        from engram.data.replay_buffers.checkpointers.tensor import TensorStorageCheckpointer

        return TensorStorageCheckpointer()

    def layout_state(self) -> dict[str, Any] | None:
        """The layout as JSON, with what else a twin needs to make the same table; None before the first write."""
        if self._table is None:
            return None
        return {**self._table.layout.to_json(), "strands": list(self._inner), "ndim": self.ndim}

    def counters(self) -> dict[str, Any]:
        """Counters of every lane as JSON."""
        if self._lanes is None:
            return {"lane_capacity": 0, "strands": 1, "lanes": []}
        store, lanes = self._lanes.store, self._lanes.saved_states()
        return {"lane_capacity": store.lane_capacity, "strands": store.strands, "lanes": lanes}

    def read_block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        """uint8 [strands, stop - start, row bytes]."""
        assert self._table is not None
        return self._table.block(lane, start, stop)

    def identity(self) -> dict[str, Any]:
        """What names these rows, as `Lanes.identity`."""
        return self._changes().identity()

    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None:
        """Rows changed in place since `identity()` was `since`; None if that is not known."""
        return self._changes().edited(since)

    def _changes(self) -> Changes | NothingYet:
        return NothingYet() if self._lanes is None else Changes(self._lanes)

    def freeze(self) -> Any:
        """The rows as they are now, for a save in the background; the caller holds the mutex, here and to close it."""
        if self._table is None or self._lanes is None:
            return NothingYet()
        if isinstance(self._table, ColumnTable):
            return CopiedRows(self._lanes, self)
        if self._lanes.store.saving:
            raise CheckpointError("this buffer is being saved in the background; wait for that save's result()")
        layout = self.layout_state()
        assert layout is not None
        return FrozenRows(self._lanes, layout, self.counters(), self._table.layout.payload_bytes)

    @contextlib.contextmanager
    def still(self) -> Iterator[Any]:
        table, lanes = self._table, self._lanes
        if lanes is None or lanes.locks is None or not isinstance(table, RowTable):
            yield self  # no other process sees these rows
            return
        layout = self.layout_state()
        assert layout is not None
        yield FrozenRows(lanes, layout, self.counters(), table.layout.payload_bytes, beside=False)

    def check_restore(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> None:
        """A ValueError that lists every difference between what was saved and this storage."""
        said = []
        lanes = counters["lanes"]
        if layout is not None:
            saved, inner = self._saved_layout(layout), _inner(layout)
            if layout["ndim"] != self.ndim:
                said.append(f"ndim is {self.ndim} here, {layout['ndim']} there")
            if self._table is not None:
                said += self._table.layout.differences(saved)
                replaced = any(lane["replaced"] for lane in lanes)
                if replaced and saved.carries_sequence > self._table.layout.carries_sequence and not self._can_widen:
                    said.append(
                        "rows carry sequences of their own there, as a TensorDictMaxValueWriter has replaced some; "
                        "those here, in a file or in shared memory, have no place for them: use a storage that is made "
                        "with such a writer"
                    )
                if inner != self._inner:
                    said.append(f"environments are {list(self._inner)} here, {list(inner)} there")
            strands = math.prod(inner)
            if counters["strands"] != strands:
                said.append(f"counters of {counters['strands']} strands stand beside a layout of {strands} there")
            room = self._room(strands)
            rows = [lane["published"] - lane["base"] for lane in lanes]
            if len(lanes) > self._n_lanes:
                said.append(f"{self._n_lanes} lanes here, {len(lanes)} there")
            if any(r > room for r in rows):
                said.append(f"room for {room * strands} steps in a lane here, {max(rows) * strands} saved there")
        if said:
            raise CheckpointMisfitError("the checkpoint does not fit this storage", said)

    def _room(self, strands: int) -> int:
        if self._lanes is not None:
            return self._lanes.store.lane_capacity
        return math.ceil((self._asked_size or 0) / (self._n_lanes * strands))

    def begin_restore(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> None:
        """Makes the table if there is none and empties it."""
        self.check_restore(layout, counters)
        self._made_for_restore = self._table is None and layout is not None
        if self._table is None and layout is not None:
            self._adopt(RowLayout.from_json(layout), _inner(layout))
        elif layout is not None:
            self._make_room(RowLayout.from_json(layout))
        # From here on rows of before are being lost: whatever may fail comes first.
        self._order = None if layout is None or self._table is None else self._order_in(layout)
        self._restoring = counters
        if self._lanes is not None:
            self._lanes.hold()
            self._lanes.store.begin_restore()
        if self._lanes is not None:
            for i, lane in enumerate(counters["lanes"]):
                shift = self._shift(i)
                seams = [seam - shift for seam in lane["seams"] if seam > lane["base"]]
                self._lanes.store.set_seams(i, lane["base"] - shift, lane["published"] - shift, seams)

    def _saved_layout(self, saved: dict[str, Any]) -> RowLayout:
        """What was saved; where it is that of this storage, ours: rows can go back where there is no memory for one."""
        mine = None if self._table is None else self._table.layout
        if mine is not None and isinstance(saved, dict) and mine.to_json().items() <= saved.items():
            return mine
        return RowLayout.from_json(saved)

    def _order_in(self, layout: dict[str, Any]) -> Any:
        """Where a saved row has each byte of ours: the same keys may have been written in another order there."""
        assert self._table is not None
        return self._table.layout.order_in(self._saved_layout(layout))

    def write_block(self, lane: int, start: int, rows: np.ndarray[Any, Any]) -> None:
        """Takes rows [strands, n, row bytes] with write numbers from `start` on."""
        assert self._table is not None
        if self._order is not None:
            rows = np.ascontiguousarray(rows[..., self._order])
            rows[..., self._order < 0] = 0  # sequences, which the saved rows did not carry
        self._table.set_block(lane, start - self._shift(lane), rows)

    def end_restore(self) -> None:
        """Shows the restored rows."""
        if self._lanes is None:
            return
        store = self._lanes.store
        for i, lane in enumerate(self._restoring["lanes"]):
            self._lanes.restore_lane(i, lane, self._shift(i))
        store.end_restore()
        self.shifts = [self._shift(i) for i in range(len(self._restoring["lanes"]))]

    def state_dict(self) -> dict[str, Any]:
        with self.mutex, self.still() as source:
            lanes = source.counters()["lanes"]
            blocks = [source.read_block(i, lane["base"], lane["published"]) for i, lane in enumerate(lanes)]
            counters = source.counters()  # other processes may have overwritten the oldest rows meanwhile
        lost = [now["base"] - then["base"] for now, then in zip(counters["lanes"], lanes, strict=True)]
        rows = [torch.from_numpy(block[:, n:]) for block, n in zip(blocks, lost, strict=True)]
        return {"layout": self.layout_state(), "counters": counters, "rows": rows}

    def check_state(self, state: dict[str, Any]) -> None:
        try:
            _check_rows(state)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the state of the storage is not one that state_dict gave ({error!r})") from error
        self.check_restore(state["layout"], state["counters"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state(state)
        with self.replacing("load_state_dict"):
            self.begin_restore(state["layout"], state["counters"])
            for i, (lane, rows) in enumerate(zip(state["counters"]["lanes"], state["rows"], strict=True)):
                if lane["published"] > lane["base"]:
                    self.write_block(i, lane["base"], rows.numpy())
            self.end_restore()

    def staging(self) -> StagedRows:
        return StagedRows(self, spill=bool(getattr(self.checkpointer, "load_hooks", None)))

    def kept(self) -> Callable[[], None] | None:
        layout, counters = self.layout_state(), self.counters()
        if layout is None:
            return self._forget
        rows = StagedRows(self, spill=False)
        try:
            rows.begin_restore(layout, counters)
        except TooManyRowsError:
            return None
        for i, lane in enumerate(counters["lanes"]):
            if lane["published"] > lane["base"]:
                rows.write_block(i, lane["base"], self.read_block(i, lane["base"], lane["published"]))
        rows.end_restore()
        return rows.commit

    def _forget(self) -> None:
        """Nothing has been written to this storage."""
        self._made_for_restore = True
        self.abort_restore()

    def abort_restore(self) -> None:
        """Leaves the storage empty; one that had no rows to be like has none again."""
        if self._made_for_restore and self._unmake():
            return
        if self._lanes is not None:
            self._lanes.store.begin_restore()
            self._lanes.store.mend()
            self._lanes.store.end_restore()

    def _shift(self, lane: int) -> int:
        """Write numbers stay as they are in a lane of the same capacity; in another one the oldest row is number 0."""
        assert self._lanes is not None
        same = self._restoring["lane_capacity"] == self._lanes.store.lane_capacity
        return 0 if same else int(self._restoring["lanes"][lane]["base"])


def _inner(layout: dict[str, Any]) -> tuple[int, ...]:
    """The shape of the environments that a saved layout is of; MalformedLayoutError where it says none."""
    strands = layout.get("strands")
    if not isinstance(strands, list) or not all(type(n) is int for n in strands) or "ndim" not in layout:
        raise MalformedLayoutError(f"this is no row layout: it is of environments {strands!r:.80}")
    return tuple(strands)


def _check_rows(state: dict[str, Any]) -> None:
    """ValueError, KeyError, TypeError or AttributeError where the rows of a state are not those of its counters."""
    layout, counters, rows = state["layout"], state["counters"], state["rows"]
    known = Counters(counters)
    row_bytes = 0 if layout is None else layout["row_bytes"]
    expected = [(known.strands, lane["published"] - lane["base"], row_bytes) for lane in counters["lanes"]]
    found = [tuple(some.shape) if some.dtype is torch.uint8 else some.dtype for some in rows]
    if found != expected:
        raise ValueError(f"the rows of the lanes are uint8 {found}, their counters say {expected}")
