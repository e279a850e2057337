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

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.power import PAGE, Disk
from crash import sessions
from engram.data import Compact, LazyMemmapStorage, ReplayBuffer
from engram.store import files as recovery
from engram.store import places
from engram.store.places import LaneCount

MANY = 64  # lanes

OF_LANES, OF_EDITIONS = 10**6, 10**8  # what the numbers of rows rise by
Row = tuple[int, int]

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def boots(monkeypatch):
    for module in (recovery, places):
        monkeypatch.setattr(module, "boot_id", module.boot_id)


class Machine:
    """A store whose machine loses its power again and again.

    Of several lanes any has a writer of its own, who opens the store for itself.
    """

    def __init__(self, root: Path, seed: int, lanes: int = 1) -> None:
        self.draw, self._root, self._seed = random.Random(seed), root, seed
        self.lanes, self.capacity = lanes, self.draw.randint(2, 20 if lanes == 1 else 5)
        frames, n_steps = self.draw.randint(1, 4), self.draw.choice([1, 1, 2, 3])
        sizes = [30, 400, 1500, 4000] if lanes == 1 else [30, 400, 1500]
        self.shape = {"frames": frames, "n_steps": n_steps, "size": self.draw.choice(sizes)}
        self._edition, self._generation = 1, 0
        # Of each row, by its lane and sequence: with which numbers it was ever made, must come back, and is there.
        self.made: dict[Row, set[int]] = {}
        self.durable: dict[Row, int] = {}
        self._now: dict[Row, int] = {}
        self._observed: dict[int, list[torch.Tensor]] = {}  # what rows of these numbers have
        self.cuts: Counter[str] = Counter()
        self._open()
        self.extend(1)

    def _open(self) -> None:
        sessions._set_boot(self._generation)
        self.writers: dict[int, ReplayBuffer] = {}
        self.rb = self.writer(0)

    def writer(self, number: int) -> ReplayBuffer:
        if number not in self.writers:
            compact = Compact("x", self.shape["frames"], self.shape["n_steps"])
            storage = LazyMemmapStorage(
                self.capacity * self.lanes, scratch_dir=self._root / "store", existsok=True, compact=compact,
                lanes=None if self.lanes == 1 else LaneCount(self.lanes),
            )  # fmt: skip
            self.writers[number] = ReplayBuffer(storage=storage)
        return self.writers[number]

    # ---- what is done ----
    def extend(self, n: int) -> None:
        is_first = not self.rb.storage.initialized
        rb = self.writer(0 if is_first else self.draw.randrange(self.lanes))
        lanes = rb.storage.lanes
        going = Counter({0: n}) if is_first else Counter((lanes.next_slots(n) // self.capacity).tolist())
        first = Counter({lane: state["published"] for lane, state in enumerate(lanes.counters())})
        self._edition += 1
        written = [(lane, first[lane] + i) for lane, steps in going.items() for i in range(steps)]
        numbers = torch.tensor([w + lane * OF_LANES + self._edition * OF_EDITIONS for lane, w in written])
        x, after = self._observations(numbers)
        rb.extend(TensorDict({"made": numbers, "x": x, "next": {"x": after}}, [n]))
        for row, number in zip(written, numbers.tolist(), strict=True):
            self.made.setdefault(row, set()).add(number)
            self._now[row] = number
        for lane, steps in going.items():
            oldest = first[lane] + steps - self.capacity
            gone = [row for row in self.durable if row[0] == lane and row[1] < oldest]
            for row in gone:
                del self.durable[row]
        if is_first:
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
        self.durable = {row: self._now[row] for row in self._rows(self.rb)}

    def release(self) -> None:
        self.writers[self.draw.choice(list(self.writers))].storage.release()

    def empty(self) -> None:
        self._close_others()
        self.durable = {}
        self.rb.empty()
        self._disk.look()

    def _observations(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """X and next.X of rows with these numbers, as `sessions.observed`, which takes long, makes them."""
        new = torch.tensor([number for number in numbers.tolist() if number not in self._observed], dtype=torch.int64)
        for number, *observed in zip(new.tolist(), *sessions.observed(new, self.shape), strict=True):
            self._observed[number] = observed
        x, after = zip(*(self._observed[number] for number in numbers.tolist()), strict=True)
        return torch.stack(x), torch.stack(after)

    def _close_others(self) -> None:
        for rb in self.writers.values():
            if rb is not self.rb:
                rb.storage.close()
        self.writers = {0: self.rb}

    # ---- what comes back ----
    @staticmethod
    def _rows(rb: ReplayBuffer) -> list[Row]:
        """All that are there."""
        lanes = enumerate(rb.storage.lanes.counters())
        return [(lane, w) for lane, state in lanes for w in range(state["first"], state["published"])]

    def _slots(self, there: list[Row]) -> torch.Tensor:
        return torch.tensor([lane * self.capacity + w % self.capacity for lane, w in there])

    def maybe_check(self) -> None:
        if self.draw.random() < 0.4:
            self.check(self._disk.image())

    def check(self, image: bytes) -> None:
        folder = self._root / "image"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "rows.engram").write_bytes(image)
        sessions._set_boot(self._generation + 1)
        rb = ReplayBuffer.open(folder)
        there = self._rows(rb)
        found: dict[Row, int] = {}
        if there:
            rows = rb.storage.get(self._slots(there))
            x, after = self._observations(rows["made"])
            assert torch.equal(rows["x"], x), "an observation of another row"
            assert torch.equal(rows["next", "x"], after), "a next observation of another row"
            found = dict(zip(there, rows["made"].tolist(), strict=True))
        rb.storage.close()
        sessions._set_boot(self._generation)
        for row, number in found.items():
            assert number in self.made.get(row, ()), f"row {row} was never that"
        for row, number in self.durable.items():
            assert found.get(row) == number, (
                f"flushed row {row} is {found.get(row)}, {list(found)} of {list(self.durable)}"
            )
        self.cuts.update(images=1, found=len(found), flushed=len(self.durable))

    def cut(self) -> None:
        """The power goes, and the store is opened by the next boot."""
        image = self._disk.image()
        self.check(image)
        self._close_others()
        self.rb.storage.lanes.store.clean = False  # whatever the close that follows says
        self.rb.storage.close()
        (self._root / "store" / "rows.engram").write_bytes(image)
        self._generation += 1
        self._open()
        there = self._rows(self.rb)
        made = self.rb.storage.get(self._slots(there))["made"].tolist() if there else []
        self._now, self.durable = dict(zip(there, made, strict=True)), {}
        self._disk = Disk((self._root / "store" / "rows.engram").read_bytes, self.draw.randrange(1 << 30))

    def run(self, monkeypatch: Any) -> Counter[str]:
        for _ in range(3):
            for _ in range(self.draw.randint(3, 25) if self.lanes == 1 else self.draw.randint(60, 150)):
                what = self.draw.random()
                if what < 0.7:
                    self.extend(self.draw.choice([1, 1, 1, 2, 3, self.capacity // 2 + 1, self.capacity + 1]))
                elif what < 0.85:
                    self.flush(monkeypatch)
                elif what < (0.95 if self.lanes == 1 else 0.995):
                    self.release()
                else:
                    self.empty()
                self.maybe_check()
            self.cut()
        self.cuts["lanes"] = len({lane for lane, _ in self.made})
        self._close_others()
        self.rb.storage.close()
        return self.cuts


def run_all(root: Path, monkeypatch: Any, seeds: range, lanes: int = 1) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        folder = root / str(seed)
        folder.mkdir()
        total += Machine(folder, seed, lanes).run(monkeypatch)
        shutil.rmtree(folder)
    return total


@pytest.mark.deep
@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 600), marks=pytest.mark.long)])
def test_rows_that_come_back_are_whole_and_no_flushed_one_is_missing(ram_path, monkeypatch, seeds):
    total = run_all(ram_path, monkeypatch, seeds)
    print(dict(total))
    assert total["images"] > 10 * len(seeds) and total["flushed"] > 20 * len(seeds)


@pytest.mark.deep
@pytest.mark.parametrize(
    "seeds",
    [range(2), range(24, 25), *(pytest.param(range(n, n + 5), marks=pytest.mark.long) for n in range(2, 62, 5))],
)
def test_rows_of_64_lanes_that_come_back_are_whole_and_no_flushed_one_is_missing(ram_path, monkeypatch, seeds):
    total = run_all(ram_path, monkeypatch, seeds, MANY)
    print(dict(total))
    assert total["images"] > 100 * len(seeds) and total["flushed"] > 5000 * len(seeds)
    assert total["lanes"] > 60 * len(seeds)


class Pages:
    """The file of a store at some moments, from pages of which a power cut makes what is left."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.moments = [self._read()]

    def look(self) -> None:
        self.moments.append(self._read())

    def without(self, moment: int, only: range | None = None) -> bytes:
        """What is there now, but pages that only the write before this moment changed are as they were before it.

        Of these pages, if some are given.
        """
        now = self.moments[-1].copy()
        before, after = self._same_length(moment - 1), self._same_length(moment)
        is_older = (before != after).any(1)
        for later in range(moment + 1, len(self.moments)):
            is_older &= (self._same_length(later) == self._same_length(later - 1)).all(1)
        if only is not None:
            is_older[: only.start] = is_older[only.stop :] = False
        assert is_older.any(), "nothing of this is lost"
        now[is_older] = before[is_older]
        return bytes(now.tobytes())

    def behind(self, what: torch.Tensor) -> range:
        """The pages from the last place of this frame on: its record's, and those of units."""
        content = self.moments[-1].tobytes()
        return range(content.rindex(bytes(what.numpy())) // PAGE, len(content) // PAGE)

    def _same_length(self, moment: int) -> np.ndarray:
        pages, most = self.moments[moment], len(self.moments[-1])
        return np.concatenate([pages, np.zeros((most - len(pages), PAGE), np.uint8)])

    def _read(self) -> np.ndarray:
        return np.fromfile(self._file, np.uint8).reshape(-1, PAGE)


def _row(number: int, edition: int, *, begins: bool = False) -> TensorDict:
    """A row of 2-step rows whose observation is a stack of two frames; next to nothing lies beside another row's."""

    def frame(what: int, edition: int) -> torch.Tensor:
        pixels = torch.zeros(16384, dtype=torch.uint8)
        pixels[6144:10240] = torch.arange(4096) * (what * 7 + edition * 31 + 1) % 251
        return pixels

    mine = frame(number, edition)
    before = mine if begins else frame(number - 1, edition if number > 4 else 1)
    pad = torch.zeros(8192, dtype=torch.uint8)
    row = {"before": pad, "made": torch.tensor(number + edition * 100), "behind": pad, "x": torch.stack([before, mine])}
    return TensorDict({**row, "next": {"x": torch.stack([mine, frame(50 + number, 1)])}}, []).unsqueeze(0)


def _opened(folder: Path, generation: int, image: bytes | None = None) -> ReplayBuffer:
    """A buffer of three rows after as many boots, where a power cut left this."""
    if image is not None:
        (folder / "rows.engram").write_bytes(image)
    sessions._set_boot(generation)
    compact = Compact("x", frames=2, n_steps=2)
    return ReplayBuffer(storage=LazyMemmapStorage(3, scratch_dir=folder, existsok=True, compact=compact))


def _stopped(rb: ReplayBuffer) -> None:
    rb.storage.lanes.store.clean = False
    rb.storage.close()


def _with_one_row_more_than_flushed(folder: Path) -> tuple[ReplayBuffer, Pages]:
    """A buffer of rows 0 to 3, which are flushed, and row 4; its file before and after that one."""
    rb = _opened(folder, 1)
    for number in range(4):
        rb.extend(_row(number, 1))
    rb.storage.flush()
    pages = Pages(folder / "rows.engram")
    rb.extend(_row(4, 1))
    pages.look()
    return rb, pages


def _what_is_there(rb: ReplayBuffer) -> list[int]:
    """What rows were made as, whose observations are theirs."""
    state = rb.storage.lanes.states()[0]
    rows = [rb.storage.get(w % 3) for w in range(state["first"], state["published"])]
    made = [int(row["made"]) for row in rows]
    for row, number in zip(rows, made, strict=True):
        written = _row(number % 100, number // 100, begins=number % 100 == 5)
        assert torch.equal(row["x"], written["x"][0]), "an observation of another row"
        assert torch.equal(row["next", "x"], written["next", "x"][0]), "a next observation of another row"
    return made


@pytest.mark.deep
def test_a_row_that_a_power_cut_dropped_does_not_come_back_before_rows_written_behind_another_one(ram_path):
    """Row 5 is dropped with the torn row 4, and written anew; the next power cut takes all of the new one.

    What is left of the old row 5 is whole, and row 6, whose stack has a frame of the new row 5, stands behind it.
    """

    folder = ram_path / "store"
    rb, pages = _with_one_row_more_than_flushed(folder)
    rb.extend(_row(5, 1, begins=True))
    pages.look()
    _stopped(rb)
    rb = _opened(folder, 2, pages.without(1))
    assert [state["published"] for state in rb.storage.lanes.states()] == [4]
    rb.extend(_row(4, 2))
    pages = Pages(folder / "rows.engram")
    rb.extend(_row(5, 2, begins=True))
    pages.look()
    rb.extend(_row(6, 2))
    pages.look()
    _stopped(rb)
    rb = _opened(folder, 3, pages.without(1))
    assert 105 not in _what_is_there(rb), "a row that was dropped is there again"
    rb.storage.close()


@pytest.mark.deep
def test_the_record_of_a_row_that_a_power_cut_dropped_is_not_that_of_the_row_in_its_place(ram_path):
    """Row 4 is dropped for its values, which are lost, and written anew; the next power cut takes the new one's record.

    What is left of the old record is whole, and as many rows lie before it.
    """
    folder = ram_path / "store"
    rb, pages = _with_one_row_more_than_flushed(folder)
    store = rb.storage.lanes.store
    values = range(store.rows_offset // PAGE, store.total_bytes // PAGE)
    _stopped(rb)
    rb = _opened(folder, 2, pages.without(1, values))
    assert _what_is_there(rb) == [102, 103]
    pages = Pages(folder / "rows.engram")
    rb.extend(_row(4, 2))
    pages.look()
    record = pages.behind(_row(4, 2)["x"][0, 1])
    _stopped(rb)
    rb = _opened(folder, 3, pages.without(1, record))
    assert _what_is_there(rb) == [102, 103]
    rb.storage.close()


@pytest.mark.deep
def test_a_row_whose_unit_a_power_cut_tore_is_dropped(ram_path):
    """The unit keeps for row 2 what no later row shows, and is written with row 4: its end stays, not what it holds."""
    folder = ram_path / "store"
    rb, pages = _with_one_row_more_than_flushed(folder)
    begin = pages.behind(_row(2, 1)["next", "x"][0, 1]).start
    _stopped(rb)
    rb = _opened(folder, 2, pages.without(1, range(begin, begin + 3)))
    assert _what_is_there(rb) == [102, 103]
    rb.storage.close()
