"""Power cuts: images of a store in which each page is as old or as new as the disk happened to have it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from contracts.each import each
from contracts.power import PAGE, Disk
from engram import _native
from native.core.support import (
    append_strands,
    file_store,
    numbers_of,
    open_image,
    row_words,
    slots,
    words,
)


class StoreOnDisk(Disk):
    """A store in a file, and what a disk may hold of it; `durable` holds what each lane's flush promised."""

    def __init__(self, s: _native.Store, seed: int) -> None:
        super().__init__(lambda: s.memory().tobytes(), seed)
        self.store = s
        self.durable = [0] * s.lanes
        self.written = [s.lane(i)["published"] for i in range(s.lanes)]
        self.floor = [s.lane(i)["first"] for i in range(s.lanes)]  # rows below were gone when all began

    def flush(self) -> None:
        """Rows first, then the mark, as the storage does it."""
        published = [self.store.lane(i)["published"] for i in range(self.store.lanes)]
        self.look()
        self.forget()
        self.store.mark_durable(published)
        self.look()
        if self.random.random() < 0.7:  # the sync of the header has returned
            self.forget()
            self.durable = published

    def take_lane(self, lane: int) -> None:
        """As a process that takes the lane does: the term is synced before the first row; the seam is not."""
        self.store.raise_term(lane)
        self.look()
        self.forget(range(self.store.rows_offset // PAGE))
        self.store.mark_seam(lane)


def term_of(s: _native.Store, lane: int, number: int) -> int:
    """The term in the trailer of a row's first strand."""
    row = lane * s.envs * s.lane_capacity + number % s.lane_capacity
    at = s.rows_offset + (row + 1) * s.row_stride - 8
    return int.from_bytes(s.memory()[at : at + 4].tobytes(), "little")


def check(disk: StoreOnDisk, path: Path, code: object, image: bytes) -> _native.Store:
    s, fd = open_image(path, image)
    s.repair()
    s.finish_interrupted()
    before = [s.lane(i)["term"] for i in range(s.lanes)]
    s.recover()
    os.close(fd)
    for lane in range(s.lanes):
        state = s.lane(lane)
        numbers = np.arange(state["first"], state["published"])
        assert state["term"] > before[lane]
        where = (numbers % s.lane_capacity + lane * s.lane_capacity).reshape(-1, 1) * s.envs
        where = (where + np.arange(s.envs)).reshape(-1)
        rows, missing, unwritten, made = s.gather(code, where, sequences=True)
        assert missing is None and unwritten is None
        found, whole = numbers_of(rows[0])
        expected = (numbers.reshape(-1, 1) * s.envs + np.arange(s.envs)).reshape(-1)
        assert whole.all() and np.array_equal(found, expected), "a row that came back is torn or out of place"
        assert np.array_equal(made, numbers.repeat(s.envs))
        alive = range(max(disk.written[lane] - s.lane_capacity, disk.floor[lane]), disk.durable[lane])
        assert not alive or (state["first"] <= alive[0] and state["published"] >= alive[-1] + 1), (
            f"durable rows {alive} of lane {lane}, found {state}"
        )
        terms = [term_of(s, lane, int(w)) for w in numbers]
        assert terms == sorted(terms), "terms fall"
        cuts = [int(w) for w, a, b in zip(numbers[1:], terms, terms[1:], strict=False) if a != b]
        assert set(cuts) <= set(s.seams(lane)), "a writer's first row without a seam"
    return s


def run(path: Path, seed: int, images: int, lanes: int, strands: int, capacity: int, width: int) -> None:
    code, row_bytes = words(width)
    draw = random.Random(seed)
    scratch = path.with_name("image")
    with file_store(path, row_bytes, capacity, lanes=lanes, strands=strands) as s:
        disk = StoreOnDisk(s, seed)
        for lane in range(lanes):
            disk.take_lane(lane)
        for _ in range(images):
            for _ in range(draw.randrange(1, 8)):
                lane, what = draw.randrange(lanes), draw.random()
                if what < 0.15:
                    disk.flush()
                elif what < 0.25:
                    disk.take_lane(lane)
                else:
                    n = draw.choice((1, 2, 3, capacity // 3, capacity + 1))
                    piece = max(1, capacity // 8)
                    while n > 0:  # piece by piece: pages may be written back between any two
                        take = min(n, piece)
                        first = s.lane(lane)["published"]
                        append_strands(s, code, take, lane)
                        disk.written[lane] = first + take
                        n -= take
                        disk.look()
            check(disk, scratch, code, disk.image())


@each(("lanes", "strands", "capacity", "width"), [
    (1, 1, 40, 20), (1, 1, 16, 700), (2, 1, 24, 60), (1, 3, 12, 33), (5, 2, 9, 130),
])  # fmt: skip
def test_what_comes_back_after_a_power_cut_is_whole_and_nothing_durable_is_lost(
    tmp_path: Path, lanes: int, strands: int, capacity: int, width: int
) -> None:
    for seed in range(4):
        run(tmp_path / f"s{seed}", seed, 15, lanes, strands, capacity, width)


@pytest.mark.long
def test_many_power_cuts(tmp_path: Path) -> None:
    for seed in range(150):
        draw = random.Random(seed)
        capacity, width = draw.randrange(1, 60), draw.choice((1, 20, 130, 700))
        run(tmp_path / f"s{seed}", seed, 15, draw.randrange(1, 4), draw.randrange(1, 4), capacity, width)


@each("seed", range(8))
def test_one_power_cut_after_another(tmp_path: Path, seed: int) -> None:
    # Rows that a recovery dropped lie about, whole, with high numbers and old terms: they must not come back.
    code, row_bytes = words(60)
    draw = random.Random(seed)
    path = tmp_path / "s"
    with file_store(path, row_bytes, 24) as s:
        image = bytearray(s.memory().tobytes())
    for _ in range(12):
        s, fd = open_image(path, image)
        disk = StoreOnDisk(s, draw.randrange(1 << 30))
        disk.take_lane(0)
        for _ in range(draw.randrange(1, 6)):
            if draw.random() < 0.4:
                disk.flush()
            first, n = s.lane(0)["published"], draw.randrange(1, 4)
            append_strands(s, code, n, 0)
            disk.written[0] = first + n
            disk.look()
        cut = disk.image()
        os.close(fd)
        s = check(disk, path, code, cut)
        image = bytearray(s.memory().tobytes())


def test_a_tail_of_an_older_term_is_not_joined_to_the_newer_rows(tmp_path: Path) -> None:
    code, width = words(4)
    with file_store(tmp_path / "s", width, 16) as s:
        append_strands(s, code, 12)
        image = bytearray(s.memory().tobytes())
        # Row 8 is torn: 0 to 7 are kept (7 was durable), 9 to 11 are left lying there.
        image[s.rows_offset + 8 * s.row_stride] ^= 1
        s.mark_durable([8])
        image[: s.rows_offset] = s.memory()[: s.rows_offset].tobytes()
    s, fd = open_image(tmp_path / "s", image)
    assert s.recover() == 4
    assert (s.lane(0)["first"], s.lane(0)["published"]) == (0, 8)
    append_strands(s, code, 1)
    s.mark_durable([0])  # the mark is lost: the newest block is that of the highest term
    s.recover()
    assert (s.lane(0)["first"], s.lane(0)["published"]) == (0, 9)
    os.close(fd)


def test_an_older_row_between_two_newer_ones_ends_the_block(tmp_path: Path) -> None:
    code, width = words(4)
    with file_store(tmp_path / "s", width, 16) as s:
        append_strands(s, code, 12)
        old = s.memory().tobytes()
        s.restore_lane(0, 0, 6, 0)  # a recovery kept 0 to 5; 6 to 11 lie there, whole
        s.raise_term(0)
        append_strands(s, code, 3)
        s.mark_durable([6])
        image = bytearray(s.memory().tobytes())
        at = s.rows_offset + 7 * s.row_stride
        image[at : at + s.row_stride] = old[at : at + s.row_stride]  # the new row 7 never reached the disk
    s, fd = open_image(tmp_path / "s", image)
    s.recover()
    assert (s.lane(0)["first"], s.lane(0)["published"]) == (0, 7)
    os.close(fd)


def test_rows_from_before_an_empty_do_not_come_back(tmp_path: Path) -> None:
    code, width = words(4)
    with file_store(tmp_path / "s", width, 16) as s:
        append_strands(s, code, 12)
        s.empty(False)
        assert s.recover() == 0 and s.rows() == 0
        append_strands(s, code, 2)
        assert s.recover() == 0 and s.generations(np.arange(3)).tolist() == [16, 17, -1]


def test_rows_from_before_a_load_do_not_come_back(tmp_path: Path) -> None:
    code, width = words(4)
    with file_store(tmp_path / "s", width, 16) as s:
        append_strands(s, code, 100)
        s.begin_restore()
        s.put(0, 0, row_words(np.arange(5), 4).view("u1").reshape(1, 5, 32))
        s.restore_lane(0, 0, 5, 0)
        s.end_restore()
        assert s.recover() == 0
        assert (s.lane(0)["first"], s.lane(0)["published"]) == (0, 5)


def test_a_row_in_the_wrong_place_or_of_another_store_is_not_whole(tmp_path: Path) -> None:
    code, width = words(4)
    with file_store(tmp_path / "s", width, 16) as s:
        append_strands(s, code, 32)
        assert all(_native.testing.is_whole(s, i) for i in range(16))
        rows = s.memory()[s.rows_offset : s.rows_offset + 16 * s.row_stride].reshape(16, s.row_stride)
        rows[3] = rows[4]
        assert [i for i in range(16) if not _native.testing.is_whole(s, i)] == [3]
        rows[5, 0] ^= 1
        assert not _native.testing.is_whole(s, 5)
        rows[6, -16] ^= 16  # the number: one ring further
        assert not _native.testing.is_whole(s, 6)
        with pytest.raises(IndexError):
            _native.testing.is_whole(s, 16)
        assert s.recover() > 0
        assert s.gather(code, slots(15))[2] is None


def test_an_empty_store_recovers_to_an_empty_one(tmp_path: Path) -> None:
    with file_store(tmp_path / "s", 8, 16, lanes=3) as s:
        assert s.recover() == 0 and s.rows() == 0 and s.incarnation == 2
