"""Storages as they were at one moment, for saves that run while the storage goes on."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from engram.store.lanes import Lanes


class Changes:
    """What `identity` and `edited` of a storage said at one moment."""

    def __init__(self, lanes: Lanes) -> None:
        self._identity = lanes.identity()
        # Now: a row that was changed in place and is then overwritten could not be named any more.
        self._log = lanes.log()

    def identity(self) -> dict[str, Any]:
        return self._identity

    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None:
        mine, reached = self._identity, since.get("log")
        same_rows = since.get("session") == mine["session"] and since.get("incarnation") == mine["incarnation"]
        if not same_rows or type(reached) is not int:
            return None
        if not mine["log"] - len(self._log) <= reached <= mine["log"]:
            return None
        return list(filter(None, self._log[len(self._log) - (mine["log"] - reached) :]))


class FrozenRows(Changes):
    """Packed rows: the RowSource of a save while others write.

    Writers of this process keep a copy of what they overwrite before it was read; what other processes overwrite is
    left out. The caller holds the storage's mutex, here and at `close`; all the time where nothing is written
    `beside` the save by this process.
    """

    def __init__(
        self, lanes: Lanes, layout: dict[str, Any], counters: dict[str, Any], row_bytes: int, beside: bool = True
    ) -> None:
        super().__init__(lanes)
        self._lanes = lanes
        self._layout = copy.deepcopy(layout)
        self._counters = counters
        self._row_bytes = row_bytes
        self._beside = beside
        self._pass = lanes.store.begin_save(beside)

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
        return int(self._counters["strands"] * sum(now["base"] - then["base"] for now, then in pairs))

    def read_block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        out = np.empty((self._counters["strands"], stop - start, self._row_bytes), np.uint8)
        self._lanes.store.check_file()
        if stop > start:  # other processes may have overwritten all rows before the save began
            self._pass.read(lane, start, stop, out)
        return out

    def close(self) -> None:
        if self._beside:
            self._lanes.store.end_save()


class CopiedRows(Changes):
    """Rows of a storage that keeps columns, copied: they change without notice."""

    left_out = 0

    def __init__(self, lanes: Lanes, source: Any) -> None:
        super().__init__(lanes)
        self._layout = copy.deepcopy(source.layout_state())
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

    def close(self) -> None:
        self._blocks = []


class FrozenItems(Changes):
    """Items of a list, which are replaced and never changed."""

    left_out = 0

    def __init__(self, lanes: Lanes, source: Any) -> None:
        super().__init__(lanes)
        self._counters = copy.deepcopy(source.counters())
        self._items, self._sequences = list(source.items()), source.sequences()

    def items(self) -> list[Any]:
        return self._items

    def sequences(self) -> list[int]:
        own: list[int] = self._sequences
        return own

    def counters(self) -> dict[str, Any]:
        state: dict[str, Any] = self._counters
        return state

    def close(self) -> None:
        self._items = []


class FrozenParts:
    """The members of an ensemble, each frozen behind its checkpointer."""

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


class NothingYet:
    """A storage to which nothing has been written."""

    left_out = 0

    def layout_state(self) -> None:
        return None

    def counters(self) -> dict[str, Any]:
        return {"lane_capacity": 0, "strands": 1, "lanes": []}

    def identity(self) -> dict[str, Any]:
        return {}

    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None:
        return None

    def read_block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        raise IndexError("nothing has been written")

    def close(self) -> None:
        pass
