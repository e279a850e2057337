"""Loads of packed rows: a load is an object, which the storage that it fills does not know."""

from __future__ import annotations

import functools
import math
import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from engram.checkpoint.protocols import Rows, RowSource
from engram.data.replay_buffers.state.plans import SavedStorage, TooManyRowsError
from engram.errors import CheckpointError
from engram.store.counters import Counters
from engram.store.lanes import Lanes
from engram.store.layout import LayoutState, MalformedLayoutError, RowLayout
from engram.store.tables import Table

_COPY_BLOCK_BYTES = 16 << 20
_STAGED_BYTES = 1 << 28  # rows that a load keeps aside: those that come, until they are verified, and those that go
_IN_MEMORY_BYTES = 1 << 25  # more of them are kept in a temporary file


class TableForLoad(NamedTuple):
    """Where a load puts rows, and whether it was made for that; None: nothing was ever written, there or here."""

    lanes: Lanes | None
    table: Table | None
    is_new: bool


class FillableStorage(RowSource, Protocol):
    """A storage of packed rows, as loads see it."""

    ndim: int

    def __len__(self) -> int: ...
    def check_restore(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> None: ...
    def table_for(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> TableForLoad: ...
    def reset(self, with_table: bool) -> None: ...
    def rows_to_save(self, background: bool) -> Any: ...
    def row_form(self) -> Any: ...
    def take_row_form(self, form: Any) -> None: ...


class _Sink:
    """What the RowSinks of a storage have in common: it says itself what is in it, and what would fit."""

    def __init__(self, storage: FillableStorage, spill: bool = False) -> None:
        self._storage, self.ndim, self._spill = storage, storage.ndim, spill
        self.layout_state, self.counters = storage.layout_state, storage.counters
        self.row_layout, self.check_restore = storage.row_layout, storage.check_restore


class RowLoad(_Sink):
    """One load of packed rows: the RowSink that a checkpointer fills."""

    def __len__(self) -> int:
        return len(self._storage)

    def begin_restore(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> None:
        """Makes the table if there is none and empties it."""
        self.check_restore(layout, counters)
        self._lanes, self._table, self._made_table = self._storage.table_for(layout, counters)
        # From here on the old rows are being lost: whatever may fail comes first.
        self._byte_order = None  # where a saved row has each byte of ours, as its keys may have been in another order
        if layout is not None and self._table is not None:
            self._byte_order = self._table.layout.order_in(layout_of(layout, self._table.layout))
        self._counters = counters
        if self._lanes is not None:
            self._lanes.hold_as_saved(counters["lanes"])
            self._lanes.store.begin_restore()
            for i, lane in enumerate(counters["lanes"]):
                shift = self._shift(i)
                seams = [seam - shift for seam in lane["seams"] if seam > lane["base"]]
                self._lanes.store.set_seams(i, lane["base"] - shift, lane["published"] - shift, seams)

    def write_block(self, lane: int, start: int, rows: Rows) -> None:
        """Takes rows [envs, n, row bytes] with sequences from `start` on."""
        assert self._table is not None
        if self._byte_order is not None:
            rows = np.ascontiguousarray(rows[..., self._byte_order])
            rows[..., self._byte_order < 0] = 0  # sequences, which the saved rows did not carry
        self._table.set_block(lane, start - self._shift(lane), rows)

    def end_restore(self, counters: dict[str, Any] | None = None) -> None:
        """Shows the restored rows, or those of other counters, which have lost some of the oldest."""
        if counters is not None:
            self._counters = counters
        if self._lanes is not None:
            self._lanes.store.replaced = 0  # a save of a storage that was never written has no lane that says so
            for i, lane in enumerate(self._counters["lanes"]):
                self._lanes.restore_lane(i, lane, self._shift(i))
            self._lanes.store.end_restore()

    def abort_restore(self) -> None:
        """Leaves the storage empty, and without a layout where it had none before the load."""
        self._storage.reset(with_table=self._made_table)

    def _shift(self, lane: int) -> int:
        """By how much sequences go down: not in a lane of the same capacity; else so that the oldest row has 0."""
        assert self._lanes is not None
        same = self._counters["lane_capacity"] == self._lanes.store.lane_capacity
        return 0 if same else int(self._counters["lanes"][lane]["base"])


class StagedRows(_Sink):
    """The RowSink of a storage that holds rows: takes a saved state, which the storage gets in `commit`.

    Many rows wait in a temporary file; in memory where there is no room for it.

    Args:
        spill: whether any number of rows may wait in the file; else more than `_STAGED_BYTES` are too many.
    """

    _in_memory = 0  # bytes that wait there
    _file: Any = None
    _end = 0  # of the file

    def __len__(self) -> int:
        return 0  # filling this destroys nothing

    def begin_restore(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> None:
        """Raises TooManyRowsError before any row is read."""
        self.check_restore(layout, counters)
        nbytes = 0 if layout is None else Counters(counters).rows * int(layout["row_bytes"])
        if nbytes > _STAGED_BYTES and not self._spill:
            raise TooManyRowsError
        self._saved_layout, self._saved_counters = layout, counters
        self._fits_in_memory = nbytes <= _IN_MEMORY_BYTES
        self._blocks: list[tuple[int, int, Rows | _SpilledRows]] = []
        self._lock = threading.Lock()  # checkpointers read several files at once

    def write_block(self, lane: int, start: int, rows: Rows) -> None:
        with self._lock:
            self._blocks.append(
                (lane, start, self._in_memory_copy(rows) if self._fits_in_memory else self._spilled(rows))
            )

    def end_restore(self) -> None:
        pass

    def abort_restore(self) -> None:
        self._blocks.clear()

    def commit(self) -> None:
        """Writes the rows into the storage."""
        load = RowLoad(self._storage)
        load.begin_restore(self._saved_layout, self._saved_counters)
        try:
            for lane, start, rows in self._blocks:
                load.write_block(lane, start, rows.read() if isinstance(rows, _SpilledRows) else rows)
            load.end_restore()
        except BaseException:
            load.abort_restore()
            raise

    def _in_memory_copy(self, rows: Rows) -> Rows:
        self._in_memory += rows.nbytes
        return np.array(rows, order="C")

    def _spilled(self, rows: Rows) -> _SpilledRows | Rows:
        content = np.ascontiguousarray(rows).reshape(-1)
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="engram-", buffering=0)  # noqa: SIM115 (lives as long as this)
            block = _SpilledRows(self._file, self._end, rows.shape)
            view = content.data
            while len(view):
                done = os.pwrite(self._file.fileno(), view, self._end)
                view, self._end = view[done:], self._end + done
        except OSError as error:
            if self._in_memory + rows.nbytes <= _STAGED_BYTES:
                return self._in_memory_copy(rows)
            raise CheckpointError(
                "with load hooks, rows that are loaded into a buffer that holds some wait in a temporary file until "
                f"all of them are verified, and that cannot be written ({error.strerror}); set TMPDIR to a place with "
                "room for it, or empty() the buffer first"
            ) from error
        return block


class _SpilledRows:
    """Rows in a temporary file."""

    def __init__(self, file: Any, at: int, shape: tuple[int, ...]) -> None:
        self._file, self._at, self._shape = file, at, shape

    def read(self) -> Rows:
        rows = np.empty(math.prod(self._shape), np.uint8)
        view, at = rows.data, self._at
        while len(view):
            done = os.preadv(self._file.fileno(), [view], at)
            if not done:
                raise CheckpointError("the temporary file of a load has been cut short")
            view, at = view[done:], at + done
        return rows.reshape(self._shape)


class SavedRows(SavedStorage):
    """A storage of packed rows."""

    def source(self, background: bool) -> Any:
        return self._storage.rows_to_save(background)

    def sink(self) -> RowLoad:
        return RowLoad(self._storage)

    def staging(self) -> StagedRows:
        return StagedRows(self._storage, spill=bool(getattr(self._storage.checkpointer, "load_hooks", None)))

    def restore_point(self) -> Callable[[], None] | None:
        layout, counters = self._storage.layout_state(), self._storage.counters()
        if layout is None:
            return functools.partial(self._storage.reset, with_table=True)
        rows = StagedRows(self._storage)
        try:
            rows.begin_restore(layout, counters)
        except TooManyRowsError:
            return None
        copy_blocks(self._storage, layout, counters, rows)
        return rows.commit

    def state(self) -> dict[str, Any]:
        source = self.source(background=False)
        lanes = source.counters()["lanes"]
        blocks = [source.read_block(i, lane["base"], lane["published"]) for i, lane in enumerate(lanes)]
        counters = source.counters()  # other processes may have overwritten the oldest rows meanwhile
        lost = [now["base"] - then["base"] for now, then in zip(counters["lanes"], lanes, strict=True)]
        rows = [torch.from_numpy(block[:, n:]) for block, n in zip(blocks, lost, strict=True)]
        return {"layout": self._storage.layout_state(), "counters": counters, "rows": rows}

    def check(self, state: dict[str, Any]) -> None:
        try:
            check_rows(state)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the state of the storage is not one that state_dict gave ({error!r})") from error
        self._storage.check_restore(state["layout"], state["counters"])

    def fill(self, state: dict[str, Any]) -> None:
        load = self.sink()
        load.begin_restore(state["layout"], state["counters"])
        for i, (lane, rows) in enumerate(zip(state["counters"]["lanes"], state["rows"], strict=True)):
            if lane["published"] > lane["base"]:
                load.write_block(i, lane["base"], rows.numpy())
        load.end_restore()

    def row_form(self) -> Any:
        return self._storage.row_form()

    def copy_to(self, other: Any, memo: dict[int, Any]) -> None:
        # Block by block: there may be more rows than memory.
        other.take_row_form(self.row_form())
        source, load = self.source(background=False), RowLoad(other)
        layout, before = source.layout_state(), source.counters()
        load.begin_restore(layout, before)
        copy_blocks(source, layout, before, load)
        load.end_restore(source.counters())  # other processes may have overwritten the oldest rows meanwhile


def copy_blocks(
    source: RowSource, layout: dict[str, Any], counters: dict[str, Any], load: RowLoad | StagedRows
) -> None:
    """Gives a load all rows that these counters count, block by block: there may be more of them than memory."""
    steps = max(1, _COPY_BLOCK_BYTES // max(1, int(layout["row_bytes"]) * int(counters["envs"])))
    for i, lane in enumerate(counters["lanes"]):
        for start in range(lane["base"], lane["published"], steps):
            load.write_block(i, start, source.read_block(i, start, min(start + steps, lane["published"])))


def layout_of(saved: Any, own: RowLayout | None) -> RowLayout:
    """The saved layout; the storage's own where both are equal, so that rows go back without memory for one."""
    if not isinstance(saved, dict):
        return RowLayout.from_json(saved)  # for its error
    return (saved if isinstance(saved, LayoutState) else LayoutState(saved)).parse(own)


def env_shape_of(layout: dict[str, Any]) -> tuple[int, ...]:
    """The shape of the environments of a saved layout; MalformedLayoutError where it has none."""
    shape = layout.get("envs")
    if not isinstance(shape, list) or not all(type(n) is int for n in shape) or "ndim" not in layout:
        raise MalformedLayoutError(f"this is no row layout: it is of environments {shape!r:.80}")
    return tuple(shape)


def check_rows(state: dict[str, Any]) -> None:
    """ValueError, KeyError, TypeError or AttributeError where the rows of a state are not those of its counters."""
    layout, counters, rows = state["layout"], state["counters"], state["rows"]
    envs = Counters(counters).envs
    row_bytes = 0 if layout is None else layout["row_bytes"]
    expected = [(envs, lane["published"] - lane["base"], row_bytes) for lane in counters["lanes"]]
    shapes = [tuple(some.shape) if some.dtype is torch.uint8 else some.dtype for some in rows]
    if shapes != expected:
        raise ValueError(f"the rows of the lanes are uint8 {shapes}, their counters say {expected}")
