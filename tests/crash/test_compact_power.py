"""Power cuts of stores that keep each observation once: rows that come back are whole, and no flushed one is missing.

As `test_store_power.py`, between operations instead of inside them, and so thousands of cuts instead of hundreds: pages
of rows, words, records, units, tails and owners are each as at any moment since they were synced, and the file as long.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from contracts.power import PAGE, Disk
from crash import sessions
from engram.data import Compact, LazyMemmapStorage, ReplayBuffer
from engram.store import files as recovery
from engram.store import places

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def boots(monkeypatch):
    for module in (recovery, places):
        monkeypatch.setattr(module, "boot_id", module.boot_id)


class Machine:
    """A store whose machine loses its power again and again."""

    def __init__(self, root: Path, seed: int) -> None:
        self.draw, self._root, self._seed = random.Random(seed), root, seed
        self.capacity = self.draw.randint(2, 20)
        frames, n_steps = self.draw.randint(1, 4), self.draw.choice([1, 1, 2, 3])
        self.shape = {"frames": frames, "n_steps": n_steps, "size": self.draw.choice([30, 400, 1500, 4000])}
        self._edition, self._generation = 1, 0
        self.made: dict[int, set[int]] = {}  # with which numbers each row was ever made
        self.durable: dict[int, int] = {}  # rows that must come back, and with which number
        self._now: dict[int, int] = {}  # with which number each row is there
        self.cuts: Counter[str] = Counter()
        self._open()
        self.extend(1)

    def _open(self) -> None:
        sessions._set_boot(self._generation)
        compact = Compact("x", self.shape["frames"], self.shape["n_steps"])
        storage = LazyMemmapStorage(self.capacity, scratch_dir=self._root / "store", existsok=True, compact=compact)
        self.rb = ReplayBuffer(storage=storage)

    # ---- what is done ----
    def extend(self, n: int) -> None:
        lanes = self.rb.storage.lanes
        first = 0 if lanes is None else lanes.states()[0]["published"]
        self._edition += 1
        numbers = torch.arange(first, first + n) + self._edition * sessions.STRANDS
        x, after = sessions.observed(numbers, self.shape)
        self.rb.extend(TensorDict({"made": numbers, "x": x, "next": {"x": after}}, [n]))
        for w, number in zip(range(first, first + n), numbers.tolist(), strict=True):
            self.made.setdefault(w, set()).add(number)
            self._now[w] = number
        self.durable = {w: number for w, number in self.durable.items() if w >= first + n - self.capacity}
        if lanes is None:
            self._disk = Disk((self._root / "store" / "rows.engram").read_bytes, self._seed)
        self._disk.look()

    def flush(self, monkeypatch: Any) -> None:
        sync = os.fsync

        def synced(fd: int) -> None:
            self._disk.look()
            self.maybe_check()
            sync(fd)
            if os.readlink(f"/proc/self/fd/{fd}").endswith("rows.engram"):
                self._disk.forget()

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", synced)
            self.rb.storage.flush()
        self._disk.look()
        self.maybe_check()
        self._disk.forget(range(self.rb.storage.lanes.store.rows_offset // PAGE))
        state = self.rb.storage.lanes.states()[0]
        self.durable = {w: self._now[w] for w in range(state["first"], state["published"])}

    def empty(self) -> None:
        self.durable = {}
        self.rb.empty()
        self._disk.look()

    # ---- what comes back ----
    def maybe_check(self) -> None:
        if self.draw.random() < 0.4:
            self.check(self._disk.image())

    def check(self, image: bytes) -> dict[int, int]:
        folder = self._root / "image"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "rows.engram").write_bytes(image)
        sessions._set_boot(self._generation + 1)
        rb = ReplayBuffer.open(folder)
        state = rb.storage.lanes.states()[0]
        there = torch.arange(state["first"], state["published"])
        found: dict[int, int] = {}
        if len(there):
            rows = rb.storage.get(there % self.capacity)
            x, after = sessions.observed(rows["made"], self.shape)
            assert torch.equal(rows["x"], x), "an observation of another row"
            assert torch.equal(rows["next", "x"], after), "a next observation of another row"
            found = dict(zip(there.tolist(), rows["made"].tolist(), strict=True))
        rb.storage.close()
        sessions._set_boot(self._generation)
        for w, number in found.items():
            assert number in self.made.get(w, ()), f"row {w} was never that"
        for w, number in self.durable.items():
            assert found.get(w) == number, f"flushed row {w} is {found.get(w)}, {found.keys()} of {self.durable.keys()}"
        self.cuts.update(images=1, found=len(found), flushed=len(self.durable))
        return found

    def cut(self) -> None:
        """The power goes, and the store is opened by the next boot."""
        image = self._disk.image()
        self.check(image)
        self.rb.storage.lanes.store.clean = False  # whatever the close that follows says
        self.rb.storage.close()
        (self._root / "store" / "rows.engram").write_bytes(image)
        self._generation += 1
        self._open()
        state = self.rb.storage.lanes.states()[0]
        there = torch.arange(state["first"], state["published"])
        made = self.rb.storage.get(there % self.capacity)["made"].tolist() if len(there) else []
        self._now, self.durable = dict(zip(there.tolist(), made, strict=True)), {}
        self._disk = Disk((self._root / "store" / "rows.engram").read_bytes, self.draw.randrange(1 << 30))

    def run(self, monkeypatch: Any) -> Counter[str]:
        for _ in range(3):
            for _ in range(self.draw.randint(3, 25)):
                what = self.draw.random()
                if what < 0.7:
                    self.extend(self.draw.choice([1, 1, 1, 2, 3, self.capacity // 2 + 1, self.capacity + 1]))
                elif what < 0.85:
                    self.flush(monkeypatch)
                elif what < 0.95:
                    self.rb.storage.release()
                else:
                    self.empty()
                self.maybe_check()
            self.cut()
        self.rb.storage.close()
        return self.cuts


def run_all(root: Path, monkeypatch: Any, seeds: range) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        folder = root / str(seed)
        folder.mkdir()
        total += Machine(folder, seed).run(monkeypatch)
        shutil.rmtree(folder)
    return total


@pytest.mark.deep
@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 600), marks=pytest.mark.long)])
def test_rows_that_come_back_are_whole_and_no_flushed_one_is_missing(ram_path, monkeypatch, seeds):
    total = run_all(ram_path, monkeypatch, seeds)
    print(dict(total))
    assert total["images"] > 10 * len(seeds) and total["flushed"] > 20 * len(seeds)
