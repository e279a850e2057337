"""Loads of packed rows: a load is an object, which the storage that it fills does not know."""

from __future__ import annotations

import copy
import math
import os
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram import _forms as forms
from engram.checkpoint.protocols import Rows, RowSource
from engram.checkpoint.writer import Block
from engram.data.replay_buffers.state.checkpointers.rows import RowRestorePlan, TensorStorageCheckpointer
from engram.data.replay_buffers.state.plans import SavedStorage, TooManyRowsError
from engram.errors import (
    CheckpointError,
    CheckpointMisfitError,
    CorruptCheckpointError,
    StorageError,
    StorageInUseError,
)
from engram.store.compact import KnownSteps
from engram.store.counters import Counters
from engram.store.lanes import Lanes
from engram.store.layout import LayoutState, MalformedLayoutError, ObservationKeys, RowLayout, StoredLayout
from engram.store.rows import READ_ONLY
from engram.store.snapshots import ChangeTracker, ColumnSnapshot, EmptySource, PrivateRows, RowSnapshot
from engram.store.table import Table, Unwritten

_COPY_BLOCK_BYTES = 16 << 20
_STAGED_BYTES = 1 << 28  # rows that a load keeps aside: those that come, until they are verified, and those that go
_IN_MEMORY_BYTES = 1 << 25  # more of them are kept in a temporary file


class StoredRows:
    """The rows of a table as they are now: the RowSource of a save that keeps writers out."""

    #: Those that are stored once; None: there are none.
    observations: ObservationKeys | None = None

    def __init__(self, table: Table) -> None:
        self._table, self.ndim = table, table.rows.ndim
        self.observations = table.rows.observations

    def layout_state(self) -> dict[str, Any] | None:
        """The layout and the dimensions as JSON; None before the first write."""
        rows = self._table.rows
        if rows.layout is None:
            return None
        return {**rows.layout.to_json(), "envs": list(rows.env_shape), "ndim": self.ndim}

    def counters(self) -> dict[str, Any]:
        """Counters of every lane as JSON."""
        if self._table.rows.layout is None:
            return {"lane_capacity": 0, "envs": 1, "lanes": []}
        lanes = self._table.rows.lanes
        return {"lane_capacity": lanes.store.lane_capacity, "envs": lanes.store.envs, "lanes": lanes.saved_states()}

    def read_block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        """uint8 [envs, stop - start, row bytes]."""
        return self._table.rows.block(lane, start, stop)

    def row_layout(self) -> RowLayout | None:
        """The layout; None before the first write."""
        return self._table.rows.layout

    def private_rows(self) -> PrivateRows | None:
        """None: what a hook writes into rows of this memory would change them."""
        return None

    def identity(self) -> dict[str, Any]:
        """As `Lanes.identity`."""
        return {} if self._table.rows.layout is None else self._table.rows.lanes.identity()

    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None:
        """Rows changed in place since `identity()` returned `since`; None where the log does not reach back so far."""
        return ChangeTracker(self._table.rows.lanes).edited(since)


class _Sink(StoredRows):
    """What the RowSinks of a table have in common.

    Args:
        replacing: a block in which all rows may be replaced, by the name of the operation.
    """

    def __init__(self, table: Table, replacing: Callable[[str], AbstractContextManager[None]]) -> None:
        self._table, self.ndim, self._replacing = table, table.rows.ndim, replacing

    def check_restore(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> None:
        """A ValueError that lists every difference between what was saved and this table."""
        differences = [] if layout is None else self._differences(layout, counters)
        if differences:
            raise CheckpointMisfitError("the checkpoint does not fit this storage", differences)

    def _observations_in(self, layout: dict[str, Any], made: RowLayout) -> ObservationKeys | None:
        """What a table of this layout stores once of them; a ValueError where they lack what `compact=` names."""
        saved = layout.observations if isinstance(layout, LayoutState) else None
        compact = self._table.compact
        return None if compact is None or saved is None else compact.find(made, KnownSteps(saved))

    def _differences(self, layout: dict[str, Any], counters: dict[str, Any]) -> list[str]:
        differences, lanes, table = [], counters["lanes"], self._table
        own = table.rows.layout
        saved, env_shape = layout_of(layout, own), env_shape_of(layout)
        if layout["ndim"] != self.ndim:
            differences.append(f"ndim is {self.ndim} here, {layout['ndim']} there")
        if own is not None:
            differences += own.differences(saved)
            replaced = any(lane["replaced"] for lane in lanes)
            if replaced and saved.carries_sequence > own.carries_sequence and table.rows.widened is None:
                differences.append(
                    "rows carry sequences of their own there, as a TensorDictMaxValueWriter has replaced some; "
                    "those here, in a file or in shared memory, have no place for them: use a storage that is made "
                    "with such a writer"
                )
            if env_shape != table.rows.env_shape:
                differences.append(f"environments are {list(table.rows.env_shape)} here, {list(env_shape)} there")
        else:
            try:
                self._observations_in(layout, saved)
            except ValueError as error:
                differences.append(str(error))
        envs = math.prod(env_shape)
        if counters["envs"] != envs:
            differences.append(f"counters of {counters['envs']} environments, but a layout of {envs} there")
        store = table.rows.lanes.store
        if own is None:
            n, room = table.size.fit(saved, env_shape, table.place, len(lanes))
        else:
            n, room = store.lanes, store.lane_capacity
        rows, kept = [lane["published"] - lane["base"] for lane in lanes], counters["lane_capacity"]
        if not store.has_flow and any("removed" in lane for lane in lanes):
            differences.append("rows were removed there, and the store here was made by an engram that removed no rows")
        if len(lanes) > n:
            differences.append(f"{n} lanes here, {len(lanes)} there")
        if kept is not None and max(rows, default=0) > kept:
            differences.append(f"{max(rows)} steps in a lane there, which has room for {kept}")
        if len(lanes) > 1 and sum(rows) > n * room:
            differences.append(f"room for {n * room * envs} steps here, {sum(rows) * envs} saved there")
        elif any(r > room for r in rows):
            each = "" if n == len(lanes) == 1 else "in a lane "
            differences.append(f"room for {room * envs} steps {each}here, {max(rows) * envs} saved there")
        return differences

    def _reset(self, with_table: bool) -> None:
        """Leaves the table empty; `with_table` also without a layout, unless other processes may use it."""
        table = self._table
        if with_table and not table.place.awaits_others() and table.take_back():
            return
        store = table.lanes.store
        store.begin_restore()
        store.repair()
        store.end_restore()


class RowLoad(_Sink):
    """One load of packed rows: the RowSink that a checkpointer fills."""

    def __len__(self) -> int:
        return len(self._table.rows.lanes)

    def begin_restore(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> None:
        """Makes the table if there is none and empties it."""
        self.check_restore(layout, counters)
        self._makes_table = self._table.rows.layout is None and layout is not None
        if layout is not None:
            self._make_or_widen(layout, counters)
        self._lanes, self._loaded = self._table.rows.lanes, self._table.rows
        # From here on the old rows are being lost: whatever may fail comes first.
        self._byte_order = None  # where a saved row has each byte of ours, as its keys may have been in another order
        if layout is not None and self._loaded.layout is not None:
            self._byte_order = self._loaded.layout.order_in(layout_of(layout, self._loaded.layout))
        self._counters = counters
        self._lanes.hold()
        self._lanes.store.begin_restore()
        bases = []
        for i, lane in enumerate(counters["lanes"]):
            shift = self._shift(i)
            bases.append(lane["base"] - shift)
            seams = [seam - shift for seam in lane["seams"] if seam > lane["base"]]
            self._lanes.store.set_seams(i, bases[-1], lane["published"] - shift, seams)
        if self._loaded.layout is not None:
            self._write = self._loaded.block_writer(bases)

    def _make_or_widen(self, layout: dict[str, Any], counters: dict[str, Any]) -> None:
        """Makes the table where there is none, and room for what these rows carry."""
        table = self._table
        if (own := table.rows.layout) is not None:
            table.widen_for(layout_of(layout, own), self._replacing)
            return
        # A copy: batches of this storage may give it another form, and what was saved may fill several storages.
        made = copy.copy(layout_of(layout, None))
        table.make_for(made, env_shape_of(layout), len(counters["lanes"]), self._observations_in(layout, made))
        if table.place.awaits_others():
            self.check_restore(layout, counters)  # another process may have made it

    def write_block(self, lane: int, start: int, rows: Rows) -> None:
        """Takes rows [envs, n, row bytes] with sequences from `start` on."""
        if self._byte_order is not None:
            rows = np.ascontiguousarray(rows[..., self._byte_order])
            rows[..., self._byte_order < 0] = 0  # sequences, which the saved rows did not carry
        self._write(lane, start - self._shift(lane), rows)

    def end_restore(self, counters: dict[str, Any] | None = None) -> None:
        """Shows the restored rows, or those of other counters, which have lost some of the oldest."""
        if counters is not None:
            self._counters = counters
        self._lanes.store.replaced = 0  # a save of a storage that was never written has no lane that says so
        for i, lane in enumerate(self._counters["lanes"]):
            self._lanes.restore_lane(i, lane, self._shift(i))
        self._lanes.store.end_restore()
        self._lanes.continue_as_saved(self._counters["lanes"])

    def forget(self) -> None:
        """Leaves the storage empty and without a layout, unless other processes may use its table."""
        self._reset(with_table=True)

    def abort_restore(self) -> None:
        """Leaves the storage empty, and without a layout where it had none before the load."""
        self._reset(with_table=self._makes_table)

    def _shift(self, lane: int) -> int:
        """By how much sequences go down: not in a lane of the same capacity; else so that the oldest row has 0."""
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

    def __init__(
        self, table: Table, replacing: Callable[[str], AbstractContextManager[None]], spill: bool = False
    ) -> None:
        self._table, self.ndim, self._replacing, self._spill = table, table.rows.ndim, replacing, spill

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
        load = RowLoad(self._table, self._replacing)
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


_STATE = forms.record(
    {
        "layout": forms.nullable(forms.plain),
        "counters": forms.plain,
        "rows": forms.list_of(forms.tensor(torch.uint8, ndim=3)),
    }
)
#: Of the state of a storage that keeps each observation once: as in a manifest, and the content of each chunk's file.
_OF_CHUNKS = ("layout", "counters", "rows_per_chunk", "observations", "chunks")
_STATE_OF_CHUNKS = forms.record({**dict.fromkeys(_OF_CHUNKS, forms.plain), "files": forms.mapping_of(forms.anything)})


class _StateFiles:
    """The files of a saved state, in memory: uint8 [n] under each name."""

    def __init__(self, contents: dict[str, Any]) -> None:
        self.contents, self.features = contents, set[str]()

    def write_file(self, name: str, blocks: Iterable[Block]) -> None:
        parts = [np.frombuffer(block, np.uint8) for block in blocks]
        content = np.empty(sum(map(len, parts)), np.uint8)
        np.concatenate(parts, out=content)
        self.contents[name] = torch.from_numpy(content)

    def reuse(self, *names: str) -> bool:
        return False

    def nbytes(self, name: str) -> int:
        return len(self._content(name))

    def read_into(self, name: str, buffer: Rows) -> None:
        buffer[:] = self._content(name).numpy()

    def _content(self, name: str) -> Tensor:
        content = self.contents.get(name)
        if not isinstance(content, Tensor) or content.dtype != torch.uint8 or content.ndim != 1 or content.is_meta:
            raise self.malformed(f"{name} is {type(content).__name__}, and no tensor uint8 [n]")
        return content.cpu()

    def read_ahead(self, name: str) -> None:
        """Nothing: they are in memory."""

    def path(self, name: str) -> str:
        return name

    def malformed(self, reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError("its description", reason)


def _plan_of_chunks(state: dict[str, Any]) -> RowRestorePlan:
    """The load of a state whose rows are in chunks; CorruptCheckpointError where its description cannot be true."""
    return TensorStorageCheckpointer().plan_restore(_StateFiles(state["files"]), state)


class SavedRows(SavedStorage):
    """A storage of rows of one layout."""

    def __init__(self, storage: Any, table: Table) -> None:
        self._storage, self._table = storage, table

    @property
    def _now(self) -> StoredRows:
        return StoredRows(self._table)

    def default_checkpointer(self) -> Any:
        return TensorStorageCheckpointer()

    def hands_out(self, needs: str) -> bool:
        return hasattr(StoredRows, needs)

    def source(self, background: bool) -> Any:
        table = self._table
        lanes, rows = table.lanes, table.rows
        if not background and lanes.locks is None:
            return StoredRows(table)  # no other process sees these rows
        if isinstance(rows, Unwritten):
            return EmptySource()
        if rows.stored is None:
            return ColumnSnapshot(lanes, self._now)
        if background and lanes.store.saving:
            raise CheckpointError("this buffer is being saved in the background; wait for that save's result()")
        layout = self._now.layout_state()
        assert layout is not None
        return RowSnapshot(
            lanes, layout, self._now.counters(), rows.stored.logical, copy_on_write=background, stored=rows.stored
        )

    def sink(self) -> RowLoad:
        return RowLoad(self._table, self._storage.access.replacing)

    def staging(self) -> StagedRows:
        spill = bool(getattr(self._storage.checkpointer, "load_hooks", None))
        return StagedRows(self._table, self._storage.access.replacing, spill)

    def restore_point(self) -> Callable[[], None] | None:
        now = StoredRows(self._table)
        layout, counters = now.layout_state(), now.counters()
        if layout is None:
            return self.sink().forget
        rows = StagedRows(self._table, self._storage.access.replacing)
        try:
            rows.begin_restore(layout, counters)
        except TooManyRowsError:
            return None
        copy_blocks(now, layout, counters, rows)
        return rows.commit

    def state(self) -> dict[str, Any]:
        source = self.source(background=False)
        if source.observations is not None:
            files = _StateFiles({})
            description = TensorStorageCheckpointer().plan_save(source).write(files)
            return {name: description[name] for name in _OF_CHUNKS} | {"files": files.contents}
        lanes = source.counters()["lanes"]
        blocks = [source.read_block(i, lane["base"], lane["published"]) for i, lane in enumerate(lanes)]
        counters = source.counters()  # other processes may have overwritten the oldest rows meanwhile
        lost = [now["base"] - then["base"] for now, then in zip(counters["lanes"], lanes, strict=True)]
        rows = [torch.from_numpy(block[:, n:]) for block, n in zip(blocks, lost, strict=True)]
        return {"layout": self._now.layout_state(), "counters": counters, "rows": rows}

    def check(self, state: Any) -> None:
        sink, is_of_chunks = self.sink(), isinstance(state, dict) and "files" in state
        forms.check(_STATE_OF_CHUNKS if is_of_chunks else _STATE, state, "the state of the storage")
        if not is_of_chunks:
            check_rows(state)
            sink.check_restore(state["layout"], state["counters"])
            return
        try:
            plan = _plan_of_chunks(state)
            plan.check(sink)
            plan.verify()
        except CorruptCheckpointError as error:
            raise ValueError(f"the state of the storage is not one that state_dict gave: {error}") from error

    def fill(self, state: dict[str, Any]) -> None:
        load = self.sink()
        if "files" in state:
            _plan_of_chunks(state).load(load)
            return
        load.begin_restore(state["layout"], state["counters"])
        for i, (lane, rows) in enumerate(zip(state["counters"]["lanes"], state["rows"], strict=True)):
            if lane["published"] > lane["base"]:
                load.write_block(i, lane["base"], rows.numpy())
        load.end_restore()

    def recount(self, counters: dict[str, Any], oldest: int) -> None:
        now = StoredRows(self._table)
        layout, (lane,), (own,) = now.layout_state(), counters["lanes"], now.counters()["lanes"]
        staged = StagedRows(self._table, self._storage.access.replacing, True)
        staged.begin_restore(layout, counters)
        n, begin = lane["published"] - lane["base"], lane["base"]
        step = max(1, _COPY_BLOCK_BYTES // max(1, 0 if layout is None else layout["row_bytes"]))
        for start, stop in ((oldest, n), (0, oldest)):
            for at in range(start, stop, step):
                end = min(at + step, stop)
                staged.write_block(0, begin, now.read_block(0, own["base"] + at, own["base"] + end))
                begin += end - at
        staged.end_restore()
        staged.commit()

    def row_form(self) -> Any:
        return self._table.row_form()

    def take_row_form(self, form: Any) -> None:
        self._table.take_row_form(form)

    def copy_to(self, other: Any, memo: dict[int, Any]) -> None:
        # Block by block: there may be more rows than memory.
        twin = other.saved_form
        twin.take_row_form(self.row_form())
        source, load = self.source(background=False), twin.sink()
        layout, before = source.layout_state(), source.counters()
        load.begin_restore(layout, before)
        copy_blocks(source, layout, before, load)
        load.end_restore(source.counters())  # other processes may have overwritten the oldest rows meanwhile


class SavedObservedRows(SavedRows):
    """Rows that other processes may be writing."""

    def source(self, background: bool) -> Any:
        if background:
            raise StorageError(f"{READ_ONLY}, and keeps nothing that others change meanwhile; save with blocking=True")
        table = self._table
        lanes, stored, layout = table.lanes, table.rows.stored, self._now.layout_state()
        if stored is None or layout is None:
            raise StorageError("this store has been closed")
        return lanes.validated(lambda: _ObservedRows(lanes, layout, self._now.counters(), stored))


class _ObservedRows(RowSnapshot):
    """The RowSource of a save: rows of the moment in which it was made; an error where they have changed since."""

    def __init__(self, lanes: Lanes, layout: dict[str, Any], counters: dict[str, Any], stored: StoredLayout) -> None:
        self._epoch = lanes.store.epoch()
        super().__init__(lanes, layout, counters, stored.logical, copy_on_write=False, stored=stored)

    def private_rows(self) -> None:
        """None: another process writes them."""

    def read_block(self, lane: int, start: int, stop: int) -> Any:
        block = super().read_block(lane, start, stop)
        if self._lanes.store.epoch() != self._epoch:
            raise StorageInUseError("rows were changed in place while they were saved; nothing was saved. Try again")
        return block


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
    """ValueError where the rows of a state are not those of its counters."""
    layout, counters = state["layout"], state["counters"]
    checked, row_bytes = Counters(counters), 0
    if layout is not None:
        row_bytes = layout_of(layout, None).payload_bytes
        checked.check_envs(layout)
    elif checked.rows:
        raise ValueError(f"counters of {checked.rows} rows without a layout")
    expected = [(checked.envs, lane["published"] - lane["base"], row_bytes) for lane in counters["lanes"]]
    shapes = [tuple(some.shape) for some in state["rows"]]
    if shapes != expected:
        raise ValueError(f"the rows of the lanes are uint8 {shapes}, their counters say {expected}")
