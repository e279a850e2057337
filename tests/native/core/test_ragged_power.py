"""Power cuts in stores of rows of any length: rows come back whole, and those that were flushed are there."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from contracts.power import Disk, live_and_cut
from contracts.programs import run_program
from engram import _native
from native.core.support import HEADER_BYTES, LANE_BYTES, store

PAGE_BYTES, HEAD = 4080, 8  # with its trailer as long as a page of the disk, though not at the begin of one
PUBLISHED, TURN, TERM = 64, 320, 208  # in a lane's header: docs/store-format.md
PLANTS = {
    29: "a recovery does not look whether the last pages of the newest row are there",
    30: "a recovery takes pages of a row that was never finished for those of the row that replaced it",
}


def row_of(stream: int, number: int, pages: int) -> bytes:
    """A row of so many pages whose every byte follows from whose it is and its number."""
    draw = random.Random(stream * 1_000_003 + number)
    n = pages * PAGE_BYTES - HEAD - draw.randrange(PAGE_BYTES - 4 * HEAD)
    return struct.pack("<QQQ", stream, number, pages) + draw.randbytes(n - 24)


class World:
    """A mapped store, writers that come, go and are killed, and the disk below."""

    def __init__(self, path: Path, seed: int) -> None:
        self.draw, self.path = random.Random(seed), path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        lanes, capacity = self.draw.randrange(1, 4), self.draw.randrange(8, 25)
        self.store = store(PAGE_BYTES, capacity, lanes=lanes, trailer=True, fd=self.fd, extents=True, ragged=True)
        self.streams, self.flushed = 0, dict[tuple[int, int], bytes]()
        self.begin()

    def begin(self) -> None:
        self.disk = Disk(self.path.read_bytes, self.draw.randrange(1 << 30))
        self.writers: list[tuple[_native.Store, list[int]]] = []

    def writer(self) -> tuple[_native.Store, list[int]]:
        one = _native.Store.open(self.fd)
        one.writer = one.new_writer(0, os.getpid())
        self.streams += 1
        return one, [self.streams, 0]  # its stream, and how many rows it has appended

    def append(self, who: _native.Store, at: list[int], pages: int) -> int:
        """The slot of the head."""
        if who.lanes == 1:
            assert who.begin_turn(0) == 0
        slot = who.append_row(0, row_of(*at, pages))
        assert slot is not None
        who.end_turn(0)
        at[1] += 1
        return slot

    def extend(self) -> None:
        if len(self.writers) < 3:
            self.writers.append(self.writer())
        self.append(*self.draw.choice(self.writers), self.draw.randint(1, self.store.longest_row))

    def kill_inside(self) -> None:
        """A writer dies when it has copied some pages of a row, or all, and not published it."""
        if not self.writers:
            return
        who, at = self.writers.pop(self.draw.randrange(len(self.writers)))
        pages = self.draw.randint(1, self.store.longest_row)
        before = [self.store.lane(lane)["published"] for lane in range(self.store.lanes)]
        head = self.append(who, at, pages)
        lane, first = divmod(head, self.store.lane_capacity)
        memory, of_lane = self.store.memory(), HEADER_BYTES + lane * LANE_BYTES
        memory[of_lane + PUBLISHED :][:8] = np.frombuffer(struct.pack("<Q", before[lane]), np.uint8)
        if self.store.lanes > 1:
            memory[of_lane + TURN :][:8] = np.frombuffer(struct.pack("<Q", who.writer), np.uint8)
        else:
            self.store.raise_term(0)
        for page in range(self.draw.randint(0, pages), pages):
            slot = (first + page) % self.store.lane_capacity + lane * self.store.lane_capacity
            begin = self.store.rows_offset + slot * self.store.row_stride
            memory[begin : begin + self.store.row_stride] = 0xAB

    def rows(self) -> dict[tuple[int, int], bytes]:
        """By lane and the sequence of the head; each is looked at."""
        heads = self.store.heads()
        rows, gone, absent = self.store.read_rows(heads)
        assert gone is None and absent is None and _native.HeadCount().of(self.store) == len(rows)
        for row in rows:
            assert row == row_of(*struct.unpack_from("<QQQ", row)), "a row is not one that was written"
        found = zip(heads, self.store.generations(heads), rows, strict=True)
        return {(int(slot) // self.store.lane_capacity, int(w)): row for slot, w, row in found}

    def flush(self) -> None:
        published = [self.store.lane(lane)["published"] for lane in range(self.store.lanes)]
        self.disk.look()
        self.disk.forget()
        self.store.mark_durable(published)
        self.disk.look()
        if self.draw.randrange(2):
            self.disk.forget()  # the header, too
            self.flushed = self.rows()

    def cut(self) -> None:
        """The machine stops; another life begins with one of the things that the disk may hold."""
        self.disk.look()
        claimed = [self.store.lane(lane)["claimed"] for lane in range(self.store.lanes)]
        capacity, image = self.store.lane_capacity, self.disk.image()
        del self.writers, self.store
        os.close(self.fd)
        self.path.write_bytes(image)
        self.fd = os.open(self.path, os.O_RDWR)
        self.store = _native.Store.open(self.fd)
        self.store.repair()
        self.store.recover()
        found = self.rows()
        for (lane, w), row in self.flushed.items():
            if w >= claimed[lane] - capacity:
                assert found[lane, w] == row, "a flushed row is lost"
        for lane in range(self.store.lanes):  # the newest row is there to its last page
            heads = [w for of, w in found if of == lane]
            if heads:
                pages = -(-(len(found[lane, max(heads)]) + HEAD) // PAGE_BYTES)
                assert self.store.lane(lane)["published"] == max(heads) + pages
        self.flushed = {}
        self.begin()


@pytest.mark.deep
@pytest.mark.parametrize("trials", [60, pytest.param(3000, marks=[pytest.mark.deep, pytest.mark.long])])
def test_a_power_cut_leaves_whole_rows(tmp_path: Path, trials: int) -> None:
    for seed in range(trials):
        live_and_cut(World(tmp_path / "store", seed), extends=8, kills=3)


@pytest.mark.deep
@pytest.mark.parametrize("plant", PLANTS)
def test_it_fails_without_a_protection(plant: int) -> None:
    ran = run_program(
        "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))",
        *("-q", "-x", "-p", "no:cacheprovider", "--show-capture=no", "--rootdir", Path(__file__).parents[3]),
        *("-m", "deep", "-k", "whole_rows and not 3000", __file__),
        env=os.environ | {"ENGRAM_PLANTED_MISTAKE": str(plant)},
    )
    assert ran.returncode == 1 and "1 failed" in ran.stdout, f"{PLANTS[plant]}: {ran.stdout[-2000:]}"
