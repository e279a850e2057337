"""Power cuts in stores whose writers move from lane to lane: what comes back is whole, and joins no two writers."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.power import Disk, live_and_cut
from engram import _native
from native.core.support import HEADER_BYTES, LANE_BYTES, Array, store, words

WIDTH = 32  # words of a row: 15 rows a page
PUBLISHED, TURN = 64, 320  # in a lane's header: docs/store-format.md


class World:
    """A mapped store, writers that come, go and are killed, and the disk below."""

    def __init__(self, path: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.path, self.code = path, words(WIDTH)[0]
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        lanes, capacity = self.draw.randrange(2, 5), self.draw.randrange(8, 40)
        self.store = store(8 * WIDTH, capacity, lanes=lanes, trailer=True, fd=self.fd, extents=True)
        self.streams, self.flushed = 0, dict[tuple[int, int], list[int]]()
        self.begin()

    def begin(self) -> None:
        self.disk = Disk(self.path.read_bytes, self.draw.randrange(1 << 30))
        self.writers: list[tuple[Any, list[int]]] = []

    def writer(self) -> tuple[Any, list[int]]:
        one = _native.Store.open(self.fd)
        one.writer = one.new_writer(0, os.getpid())
        self.streams += 1
        return one, [self.streams, 0]  # its stream, and how many rows it has appended

    def rows(self, at: list[int], n: int) -> Array:
        rows = np.zeros((n, WIDTH), np.int64)
        rows[:, 0], rows[:, 1] = at[0], np.arange(at[1], at[1] + n)
        rows[:, 2:] = rows[:, :1] * 1_000_003 + rows[:, 1:2] * 31 + np.arange(WIDTH - 2)
        at[1] += n
        return rows

    def extend(self) -> None:
        if len(self.writers) < 3:
            self.writers.append(self.writer())
        who, at = self.draw.choice(self.writers)
        who.append(0, self.code.check_list([self.rows(at, self.draw.randrange(1, 12))], 1, 0))

    def kill_inside(self) -> None:
        """A writer dies when it has copied rows and not published them, or not all bytes of the last one."""
        if not self.writers:
            return
        who, at = self.writers.pop(self.draw.randrange(len(self.writers)))
        before = [self.store.lane(lane)["published"] for lane in range(self.store.lanes)]
        n = self.draw.randrange(1, 6)
        slots = who.append(0, self.code.check_list([self.rows(at, n)], 1, 0))
        lane = int(slots[-1]) // self.store.lane_capacity
        memory, of_lane = self.store.memory(), HEADER_BYTES + lane * LANE_BYTES
        published = before[lane] if self.draw.randrange(2) else self.store.lane(lane)["published"] - 1
        memory[of_lane + PUBLISHED :][:8] = np.frombuffer(np.uint64(published).tobytes(), np.uint8)
        memory[of_lane + TURN :][:8] = np.frombuffer(np.uint64(who.writer).tobytes(), np.uint8)
        if self.draw.randrange(2):
            begin = self.store.rows_offset + int(slots[-1]) * self.store.row_stride
            memory[begin + self.draw.randrange(self.store.row_stride) : begin + self.store.row_stride] = 0xAB

    def flush(self) -> None:
        published = [self.store.lane(lane)["published"] for lane in range(self.store.lanes)]
        self.disk.look()
        self.disk.forget()
        self.store.mark_durable(published)
        self.disk.look()
        if self.draw.randrange(2):
            self.disk.forget()  # the header, too
            self.flushed = {
                (lane, w): self.row(lane, w)
                for lane in range(self.store.lanes) for w in range(self.store.lane(lane)["first"], published[lane])
            }  # fmt: skip

    def row(self, lane: int, sequence: int) -> list[int]:
        slot = lane * self.store.lane_capacity + sequence % self.store.lane_capacity
        (rows,), overwritten, absent, sequences = self.store.gather(self.code, np.array([slot]), sequences=True)
        assert not overwritten and not absent and int(sequences[0]) == sequence
        return [int(x) for x in rows[0]]

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
        self.check()
        for (lane, w), expected in self.flushed.items():  # flushed and not overwritten since: it is there
            if w >= claimed[lane] - capacity:
                state = self.store.lane(lane)
                assert state["first"] <= w < state["published"] and self.row(lane, w) == expected
        self.flushed = {}
        assert all(not self.store.extents(lane) and not self.store.lane(lane)["ticket"] for lane in range(len(claimed)))
        self.begin()

    def check(self) -> None:
        """Each row is whole; rows without a seam between them are neighbours in one stream."""
        for lane in range(self.store.lanes):
            state, seams = self.store.lane(lane), set(self.store.seams(lane))
            before = None
            for w in range(state["first"], state["published"]):
                row = self.row(lane, w)
                tail = row[0] * 1_000_003 + row[1] * 31 + np.arange(WIDTH - 2)
                assert row[2:] == tail.tolist(), f"row {w} of lane {lane} is torn"
                joined = before is not None and w not in seams
                assert not joined or row[:2] == [before[0], before[1] + 1], f"row {w} of lane {lane} joins two writers"
                before = row


@pytest.mark.deep
@pytest.mark.parametrize("trials", [60, pytest.param(3000, marks=[pytest.mark.deep, pytest.mark.long])])
def test_what_a_power_cut_leaves_is_whole_and_joins_no_two_writers(tmp_path: Path, trials: int) -> None:
    for seed in range(trials):
        live_and_cut(World(tmp_path / "store", seed), extends=8, kills=1)
