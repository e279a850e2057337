"""What every storage checkpointer must do, and stores made of numpy and lists to try it on.

Subclass `CheckpointerContract` and say how to make the checkpointer, a filled store and an empty one.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.corruption import flip
from engram._native import FIRST_REPLACED
from engram.checkpoint.protocols import Rows
from engram.data.replay_buffers.checkpointers import open_snapshot, save_snapshot
from engram.errors import CheckpointError, CorruptCheckpointError


def lane_counters(base: int, published: int) -> dict[str, Any]:
    """The counters of a lane of which nothing else is known."""
    said = {"origin": 0, "seams": [], "border": {"looked": 0, "agreed": None}, "replaced": 0}
    return {"base": base, "published": published, **said}


class RowRings:
    """Packed rows in numpy arrays: the RowSource and RowSink that checkpointers are tested with."""

    def __init__(self, lane_capacity: int = 100, lanes: int = 1, strands: int = 1, row_bytes: int = 24) -> None:
        self.lane_capacity, self.strands, self.row_bytes = lane_capacity, strands, row_bytes
        self.memory = np.zeros((lanes, strands, lane_capacity, row_bytes), np.uint8)
        self.empty()

    def identity(self) -> dict[str, Any]:
        return {"store": self.name, "edits": len(self.changed)}

    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None:
        return self.changed[since["edits"] :] if since.get("store") == self.name else None

    def empty(self) -> None:
        self.name, self.changed = os.urandom(8).hex(), list[tuple[int, int]]()
        self.written = self.restoring = False
        self.lanes: list[dict[str, Any]] = [lane_counters(0, 0) for _ in self.memory]

    def append(self, lane: int, count: int, salt: int = 0) -> None:
        """Rows whose bytes are a function of lane, strand, write number and `salt`."""
        self.written = True
        start = self.lanes[lane]["published"]
        for number in range(max(start, start + count - self.lane_capacity), start + count):
            for strand in range(self.strands):
                row = np.random.default_rng([lane, strand, number, salt]).integers(0, 256, self.row_bytes, np.uint8)
                self.memory[lane, strand, number % self.lane_capacity] = row
        self.lanes[lane]["published"] += count

    def first(self, lane: int) -> int:
        return int(max(self.lanes[lane]["base"], self.lanes[lane]["published"] - self.lane_capacity))

    def contents(self) -> Any:
        """Everything that must be equal after a load, in a form that `==` compares."""
        rows = [
            self.read_block(lane, self.first(lane), counters["published"]).tobytes()
            for lane, counters in enumerate(self.lanes)
        ]
        return self.restoring, self.written, copy.deepcopy(self.lanes), rows

    def layout_state(self) -> dict[str, Any] | None:
        return {"row_bytes": self.row_bytes, "leaves": [["a", "uint8"]]} if self.written else None

    def counters(self) -> dict[str, Any]:
        return {"lane_capacity": self.lane_capacity, "envs": self.strands, "lanes": self.lanes}

    def read_block(self, lane: int, start: int, stop: int) -> Rows:
        rows: Rows = self.memory[lane][:, np.arange(start, stop) % self.lane_capacity]
        return rows

    def check_restore(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> None:
        differences = []
        if layout is not None and layout["row_bytes"] != self.row_bytes:
            differences.append(f"row_bytes is {layout['row_bytes']}, not {self.row_bytes}")
        if (len(counters["lanes"]), counters["envs"]) != self.memory.shape[:2]:
            differences.append("other lanes or strands")
        if differences:
            raise ValueError("; ".join(differences))

    def begin_restore(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> None:
        self.check_restore(layout, counters)
        self.empty()
        self.memory[:] = 0
        self.restoring = True
        self._coming = (layout is not None, copy.deepcopy(counters["lanes"]))

    def write_block(self, lane: int, start: int, rows: Rows) -> None:
        numbers = np.arange(start, start + rows.shape[1])
        self.memory[lane][:, numbers % self.lane_capacity] = rows

    def end_restore(self) -> None:
        self.written, self.lanes = self._coming
        self.restoring = False

    def abort_restore(self) -> None:
        self.empty()

    def __len__(self) -> int:
        return int(self.strands * sum(c["published"] - self.first(lane) for lane, c in enumerate(self.lanes)))


class ItemList:
    """A ring of Python objects: the ItemSource and ItemSink that checkpointers are tested with."""

    def __init__(self, capacity: int | None = 100) -> None:
        self.capacity, self.name, self.changed = capacity, os.urandom(8).hex(), list[tuple[int, int]]()
        self.stored: list[Any] = []
        self.own: list[int] = []  # sequences
        self.published = self.base = 0

    def append(self, items: list[Any]) -> None:
        """Each third of them has a sequence of its own."""
        self.stored = [*self.stored, *items]
        self.own += [FIRST_REPLACED + self.published + i if i % 3 == 1 else 0 for i in range(len(items))]
        self.published += len(items)
        self.stored = self.stored if self.capacity is None else self.stored[-self.capacity :]
        self.own = self.own if self.capacity is None else self.own[-self.capacity :]

    def contents(self) -> Any:
        return self.base, self.published, self.stored, self.own

    def identity(self) -> dict[str, Any]:
        return {"store": self.name, "edits": len(self.changed)}

    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None:
        return self.changed[since["edits"] :] if since.get("store") == self.name else None

    def items(self) -> list[Any]:
        return self.stored

    def sequences(self) -> list[int]:
        return self.own

    def counters(self) -> dict[str, Any]:
        return {"lane_capacity": self.capacity, "envs": 1, "lanes": [lane_counters(self.base, self.published)]}

    def check_restore(self, counters: dict[str, Any]) -> None:
        if counters["lane_capacity"] != self.capacity:
            raise ValueError(f"capacity is {counters['lane_capacity']}, not {self.capacity}")

    def restore_items(self, items: list[Any], counters: dict[str, Any], sequences: list[int]) -> None:
        self.check_restore(counters)
        self.own = sequences
        (lane,) = counters["lanes"]
        self.name = os.urandom(8).hex()
        self.stored, self.base, self.published = items, lane["base"], lane["published"]

    def __len__(self) -> int:
        return len(self.stored)


def data_files(path: Path) -> list[Path]:
    """Files of rows or items below a checkpoint that hold anything."""
    return sorted(file for file in path.glob("g-*/storage/*") if file.stat().st_size)


class CheckpointerContract:
    """Inherit, and implement the four makers."""

    def make(self) -> Any:
        raise NotImplementedError

    def make_filled(self, salt: int = 0) -> Any:
        """A store that holds something; another `salt`, another content of the same shape."""
        raise NotImplementedError

    def make_empty(self) -> Any:
        """An empty store that takes what `make_filled` holds."""
        raise NotImplementedError

    def make_misfit(self) -> Any:
        """A store that holds something and cannot take what `make_filled` holds."""
        raise NotImplementedError

    def save(self, path: Path, store: Any, **options: Any) -> str:
        return save_snapshot(path, {}, (self.make(), store), **options)

    def load(self, path: Path, store: Any, snapshot: str | None = None) -> Any:
        with open_snapshot(path, snapshot) as opened:
            opened.load_storage(self.make(), store)
        return store

    def test_what_was_saved_comes_back(self, tmp_path: Path) -> None:
        store = self.make_filled()
        self.save(tmp_path, store)
        assert self.load(tmp_path, self.make_empty()).contents() == store.contents()

    def test_an_empty_store_comes_back_empty(self, tmp_path: Path) -> None:
        self.save(tmp_path, self.make_empty())
        assert self.load(tmp_path, self.make_filled()).contents() == self.make_empty().contents()

    def test_a_load_replaces_what_the_store_held(self, tmp_path: Path) -> None:
        self.save(tmp_path, self.make_filled())
        assert self.load(tmp_path, self.make_filled(salt=1)).contents() == self.make_filled().contents()

    def test_the_second_save_to_a_path_replaces_the_first(self, tmp_path: Path) -> None:
        self.save(tmp_path, self.make_filled())
        self.save(tmp_path, self.make_filled(salt=1))
        assert self.load(tmp_path, self.make_empty()).contents() == self.make_filled(salt=1).contents()
        assert len(list(tmp_path.glob("g-*"))) == 1

    def test_an_older_snapshot_that_was_kept_can_be_loaded(self, tmp_path: Path) -> None:
        first = self.save(tmp_path, self.make_filled(), keep_last=2)
        self.save(tmp_path, self.make_filled(salt=1), keep_last=2)
        assert self.load(tmp_path, self.make_empty(), first).contents() == self.make_filled().contents()

    def test_parents_of_the_path_are_made(self, tmp_path: Path) -> None:
        self.save(tmp_path / "a" / "b", self.make_filled())
        assert self.load(tmp_path / "a" / "b", self.make_empty()).contents() == self.make_filled().contents()

    def test_a_store_that_does_not_fit_is_refused_and_unchanged(self, tmp_path: Path) -> None:
        self.save(tmp_path, self.make_filled())
        store = self.make_misfit()
        before = copy.deepcopy(store.contents())
        with pytest.raises(ValueError, match="not"):
            self.load(tmp_path, store)
        with open_snapshot(tmp_path) as opened, pytest.raises(ValueError, match="not"):
            opened.check_storage(self.make(), store)
        assert store.contents() == before

    @pytest.mark.parametrize("which", [0, -1])
    def test_damage_leaves_a_store_that_holds_something_untouched(self, tmp_path: Path, which: int) -> None:
        self.save(tmp_path, self.make_filled())
        file = data_files(tmp_path)[which]
        flip(file, file.stat().st_size - 1)
        store = self.make_filled(salt=1)
        with pytest.raises(CorruptCheckpointError, match=file.name):
            self.load(tmp_path, store)
        assert store.contents() == self.make_filled(salt=1).contents()

    @pytest.mark.parametrize("which", [0, -1])
    def test_damage_leaves_an_empty_store_empty(self, tmp_path: Path, which: int) -> None:
        self.save(tmp_path, self.make_filled())
        file = data_files(tmp_path)[which]
        flip(file, 0)
        store = self.make_empty()
        with pytest.raises(CorruptCheckpointError, match=file.name):
            self.load(tmp_path, store)
        assert store.contents() == self.make_empty().contents()

    def test_a_storage_saved_by_another_checkpointer_is_refused(self, tmp_path: Path) -> None:
        self.save(tmp_path, self.make_filled())
        checkpointer = self.make()
        checkpointer.format = "another"
        with open_snapshot(tmp_path) as opened, pytest.raises(CheckpointError, match="use the checkpointer"):
            opened.load_storage(checkpointer, self.make_empty())
