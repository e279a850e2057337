"""Storages as they were at one moment: what a save reads while the storage goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engram._system import map_privately
from engram.errors import StorageInUseError
from engram.store.lanes import Lanes
from engram.store.layout import ObservationKeys, RowLayout, StoredLayout

if TYPE_CHECKING:
    from engram.store.items import ItemRows


class ChangeTracker:
    """Which rows of a storage have changed in place, as of the moment in which this was made."""

    def __init__(self, lanes: Lanes) -> None:
        self._identity = lanes.identity()
        # Read now: a row that was changed in place and overwritten later could no longer be named.
        self._log = lanes.log()

    def identity(self) -> dict[str, Any]:
        return self._identity

    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None:
        now, log_end = self._identity, since.get("log")
        same_rows = since.get("session") == now["session"] and since.get("incarnation") == now["incarnation"]
        if not same_rows or type(log_end) is not int:
            return None
        if not now["log"] - len(self._log) <= log_end <= now["log"]:
            return None
        return list(filter(None, self._log[len(self._log) - (now["log"] - log_end) :]))


class PrivateRows(NamedTuple):
    """Rows of a lane where they lie in the store's file: writes into them stay in this process's memory."""

    rows: np.ndarray[Any, Any]  #: uint8 [envs, lane capacity, bytes from row to row]
    check: Callable[[], None]  #: a StorageInUseError where somebody has changed one of them since


class RowSnapshot(ChangeTracker):
    """Packed rows: the RowSource of a save.

    Writers of this process keep a copy of each row that they overwrite before it was read; rows that other processes
    overwrite are left out. The caller holds the storage's mutex here and at `close`.

    Args:
        copy_on_write: whether this process writes while the save runs; otherwise the caller holds the mutex all along.
        stored: where leaves lie in the store, where that is not as in packed rows.
    """

    def __init__(
        self,
        lanes: Lanes,
        layout: dict[str, Any],
        counters: dict[str, Any],
        row_layout: RowLayout,
        copy_on_write: bool = True,
        stored: StoredLayout | None = None,
    ) -> None:
        super().__init__(lanes)
        self._lanes, self._stored = lanes, StoredLayout(row_layout) if stored is None else stored
        self._layout, self._row_layout = copy.deepcopy(layout), row_layout
        #: Those that are stored once; None: there are none.
        self.observations: ObservationKeys | None = self._stored.observations
        self._counters = counters
        self._row_bytes = row_layout.payload_bytes
        self._copy_on_write = copy_on_write
        self._pass = lanes.store.begin_save(copy_on_write)

    def layout_state(self) -> dict[str, Any]:
        return self._layout

    def counters(self) -> dict[str, Any]:
        lanes = [
            {**lane, "base": min(lane["published"], max(lane["base"], self._pass.lost_below(i)))}
            for i, lane in enumerate(self._counters["lanes"])
        ]
        return {**self._counters, "lanes": lanes}

    @property
    def left_out(self) -> int:
        """Rows that other processes overwrote before they were read."""
        pairs = zip(self.counters()["lanes"], self._counters["lanes"], strict=True)
        return int(self._counters["envs"] * sum(now["base"] - then["base"] for now, then in pairs))

    def read_block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        out = np.empty((self._counters["envs"], stop - start, self._row_bytes), np.uint8)
        self._lanes.store.check_file()
        if stop > start:  # other processes may have overwritten all rows before the save began
            self._read(lane, start, stop, out)
        return out

    def _read(self, lane: int, start: int, stop: int, out: np.ndarray[Any, Any]) -> None:
        if self._stored.observations is None:
            self._pass.read(lane, start, stop, out)
            return
        rows = np.empty((*out.shape[:2], self._pass.row_bytes), np.uint8)
        self._pass.read(lane, start, stop, rows)
        for leaf in self._row_layout.leaves:
            at = self._stored.offset(leaf)
            out[..., leaf.offset : leaf.offset + leaf.nbytes] = rows[..., at : at + leaf.nbytes]

    def row_layout(self) -> RowLayout:
        return self._row_layout

    def private_rows(self) -> PrivateRows | None:
        """The rows of a single lane; None: others have the store open, or this process writes while it is saved, or
        observations are not in the rows.
        """
        locks, store = self._lanes.locks, self._lanes.store
        if self._copy_on_write or locks is None or store.lanes > 1 or locks.is_open_elsewhere():
            return None
        if self._stored.observations is not None:
            return None
        store.check_file()
        end = store.rows_offset + store.envs * store.lane_capacity * store.row_stride
        rows = map_privately(locks.fd, end)[store.rows_offset :]
        epoch, lane = store.epoch(), self._counters["lanes"][0]
        first = max(lane["base"], lane["published"] - store.lane_capacity)

        def check() -> None:
            overwritten = store.lane(0)["claimed"] - store.lane_capacity > first
            if overwritten or store.epoch() != epoch:
                raise StorageInUseError(
                    "another process changed rows while they were saved through hooks; nothing was saved. Try again"
                )

        return PrivateRows(rows.reshape(store.envs, store.lane_capacity, store.row_stride), check)

    def close(self) -> None:
        if self._copy_on_write:
            self._lanes.store.end_save()


class ColumnSnapshot(ChangeTracker):
    """A copy of all rows of a storage that keeps columns, whose writers do not tell a save what they overwrite."""

    left_out = 0
    observations: ObservationKeys | None = None  # they are columns like others

    def __init__(self, lanes: Lanes, source: Any) -> None:
        super().__init__(lanes)
        self._layout = copy.deepcopy(source.layout_state())
        self._row_layout: RowLayout = source.row_layout()
        self._counters = copy.deepcopy(source.counters())
        self._blocks = [
            source.read_block(i, lane["base"], lane["published"]) for i, lane in enumerate(self._counters["lanes"])
        ]

    def layout_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._layout
        return state

    def counters(self) -> dict[str, Any]:
        state: dict[str, Any] = self._counters
        return state

    def read_block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        base = self._counters["lanes"][lane]["base"]
        rows: np.ndarray[Any, Any] = self._blocks[lane][:, start - base : stop - base]
        return rows

    def row_layout(self) -> RowLayout:
        return self._row_layout

    def private_rows(self) -> PrivateRows | None:
        return None

    def close(self) -> None:
        self._blocks = []


class ItemSnapshot(ChangeTracker):
    """The ItemSource of a save: items, which are replaced and never changed."""

    left_out = 0

    def __init__(self, rows: ItemRows) -> None:
        super().__init__(rows.lanes)
        self._counters = copy.deepcopy(rows.counters())
        self._items, self._sequences = rows.items(), rows.sequences()

    def items(self) -> list[Any]:
        return self._items

    def sequences(self) -> list[int]:
        return self._sequences

    def counters(self) -> dict[str, Any]:
        return self._counters

    def close(self) -> None:
        self._items = []


class EnsembleSnapshot:
    """Snapshots of the members of an ensemble, each with its checkpointer."""

    def __init__(self, parts: list[tuple[Any, Any]]) -> None:
        self._parts = parts

    def parts(self) -> list[tuple[Any, Any]]:
        return self._parts

    @property
    def left_out(self) -> int:
        return sum(int(source.left_out) for _, source in self._parts)

    def close(self) -> None:
        for _, source in self._parts:
            source.close()


class EmptySource:
    """The RowSource of a storage to which nothing has been written."""

    left_out = 0

    def layout_state(self) -> None:
        return None

    def counters(self) -> dict[str, Any]:
        return {"lane_capacity": 0, "envs": 1, "lanes": []}

    def identity(self) -> dict[str, Any]:
        return {}

    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None:
        return None

    def read_block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        raise IndexError("nothing has been written")

    def row_layout(self) -> None:
        return None

    def private_rows(self) -> None:
        return None

    def close(self) -> None:
        pass
