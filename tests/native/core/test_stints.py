"""Writers that move from lane to lane: together the lanes are one ring, whoever writes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engram import _native
from engram.errors import StorageInUseError
from native.core.support import Array, row_words, store, words

WIDTH = 2
FIRST_WRITER_BYTE = 1 << 61  # of the locks: docs/store-format.md
SET_LOCK = getattr(fcntl, "F_OFD_SETLK", 37)


class Writers:
    """A store of several lanes in memory that processes share, and objects that write there as processes would."""

    def __init__(self, fd: int, lanes: int, capacity: int, *, extents: bool = True) -> None:
        self.code, payload = words(WIDTH)
        self.fd, self.max_size = fd, lanes * capacity
        self.store = store(payload, capacity, lanes=lanes, fd=fd, extents=extents)
        self.count = 0  # rows that all have written

    def new(self, patience: float = 0.0) -> _native.Store:
        """One more writer, whose process is taken to live as long as it holds a lock, which it does not."""
        one = _native.Store.open(self.fd)
        one.writer = one.new_writer(0, os.getpid())
        one.use_writer_locks(self.fd, FIRST_WRITER_BYTE, patience)
        return one

    def extend(self, writer: _native.Store, n: int) -> Array:
        """Appends the next n rows; returns their slots."""
        rows = row_words(np.arange(self.count, self.count + n), WIDTH)
        self.count += n
        slots: Array = writer.append(0, self.code.check_list([rows], 1, 0))
        assert all(self.store.lane(lane)["turn"] != writer.writer for lane in range(self.store.lanes))
        return slots

    def numbers(self, slots: Array) -> list[int]:
        """The numbers of the rows in these slots."""
        (rows,), overwritten, absent, _ = self.store.gather(self.code, slots)
        assert not overwritten and not absent
        return [int(n) for n in rows[:, 0] // 1_000_003]


@contextlib.contextmanager
def writers(lanes: int, capacity: int, **options: Any) -> Iterator[Writers]:
    fd = os.memfd_create("stints")
    try:
        yield Writers(fd, lanes, capacity, **options)
    finally:
        os.close(fd)


def some_shapes(n: int, seed: int) -> Iterator[tuple[int, int, random.Random]]:
    draw = random.Random(seed)
    for _ in range(n):
        yield draw.randrange(2, 20), draw.randrange(1, 60), draw


@pytest.mark.parametrize(("shapes", "extends"), [(40, 30), pytest.param(300, 60, marks=pytest.mark.deep)])
def test_one_writer_fills_the_lanes_as_one_ring(shapes: int, extends: int) -> None:
    for lanes, capacity, draw in some_shapes(shapes, seed=1):
        with writers(lanes, capacity) as shared:
            me, total = shared.new(), lanes * capacity
            for _ in range(extends):
                first, n = shared.count, draw.randrange(1, 90)
                expected = me.next_stint_slots(n)
                slots = shared.extend(me, n)
                assert [int(slot) for slot in slots] == [w % total for w in range(first, first + n)]
                assert [int(slot) for slot in expected] == [int(slot) for slot in slots]
                assert shared.store.rows() == min(shared.count, total) and list(me.next_stint_slots(1)) == [
                    shared.count % total
                ]


@pytest.mark.parametrize(("shapes", "extends"), [(40, 40), pytest.param(400, 80, marks=pytest.mark.deep)])
def test_no_row_leaves_before_max_size_rows_are_in_whoever_writes(shapes: int, extends: int) -> None:
    for lanes, capacity, draw in some_shapes(shapes, seed=2):
        with writers(lanes, capacity) as shared:
            those = [shared.new() for _ in range(6)]
            for _ in range(extends):
                k = draw.randrange(6)
                if draw.randrange(5) == 0:
                    those[k] = shared.new()
                shared.extend(those[k], draw.randrange(1, 40))
                assert shared.store.rows() == min(shared.count, shared.max_size)


def test_rows_lie_in_the_slots_that_are_returned() -> None:
    for lanes, capacity, draw in some_shapes(10, seed=3):
        with writers(lanes, capacity) as shared:
            those = [shared.new() for _ in range(3)]
            for _ in range(20):
                first, n = shared.count, draw.randrange(1, max(2, capacity * (lanes - 3)))
                slots = shared.extend(those[draw.randrange(3)], n)
                assert shared.numbers(slots) == list(range(first, first + n))


def test_a_stint_begins_with_a_seam_where_the_lane_has_rows_and_only_there() -> None:
    with writers(3, 4) as shared:
        a, b = shared.new(), shared.new()
        shared.extend(a, 2)
        shared.extend(b, 1)  # in another lane: nobody has filled it
        shared.extend(a, 2)
        shared.extend(b, 3)
        assert [shared.store.seams(lane) for lane in range(3)] == [[], [], []]
        shared.extend(a, 6)  # the last lane, which was empty, and two rows of the oldest
        assert [shared.store.seams(lane) for lane in range(3)] == [[4], [], []]
        shared.extend(a, 1)
        assert shared.store.seams(0) == [4]


def test_parts_of_checked_columns_go_on_in_the_next_lane() -> None:
    with writers(4, 5) as shared:
        me, other = shared.new(), shared.new()
        columns = [row_words(np.arange(19), WIDTH).view(np.ndarray)]
        checked = shared.code.check_columns(columns, 1, 0)
        assert checked is not None
        for first in range(0, 18, 6):
            assert me.append(0, checked, first, 6, False)
        assert other.append(0, checked, 18, 1, False)
        assert shared.numbers(np.arange(19)) == list(range(19))
        assert shared.store.seams(3)[:1] == [3]  # another writer's row


def test_a_stint_that_another_writer_ended_is_left() -> None:
    with writers(2, 4) as shared:
        a, b = shared.new(), shared.new()
        assert list(shared.extend(a, 8)) == list(range(8))
        assert list(shared.extend(a, 2)) == [0, 1]
        assert list(shared.extend(b, 4)) == [4, 5, 6, 7]
        assert list(shared.extend(b, 3)) == [
            2,
            3,
            0,
        ]  # the oldest lane, from where it stands, once
        assert list(shared.extend(a, 2)) == [4, 5]  # not behind the rows of the other one


def test_extents_say_whose_rows_a_lane_has() -> None:
    for lanes, capacity, draw in some_shapes(10, seed=4):
        with writers(lanes, capacity) as shared:
            those, truth, sent = [shared.new() for _ in range(4)], {}, [0] * 4
            for _ in range(40):
                k, n = draw.randrange(4), draw.randrange(1, 30)
                shared.extend(those[k], n)
                for number in range(shared.count - n, shared.count):
                    truth[number] = those[k].writer, sent[k]
                    sent[k] += 1
            known = 0
            for lane in range(lanes):
                state, extents = shared.store.lane(lane), shared.store.extents(lane)
                for w in range(state["first"], state["published"]):
                    extent = next((x for x in reversed(extents) if x[0] <= w), None)
                    if extent is not None:
                        (number,) = shared.numbers(np.array([lane * capacity + w % capacity]))
                        assert (extent[1], extent[2] + w - extent[0]) == truth[number]
                        known += 1
            assert known > shared.max_size // 2


def test_a_store_without_extents_has_stints_all_the_same() -> None:
    with writers(3, 5, extents=False) as shared:
        a, b = shared.new(), shared.new()
        for n in (4, 9, 2, 20, 7):
            shared.extend(a, n), shared.extend(b, n)
            assert shared.store.rows() == min(shared.count, 15)
        assert [shared.store.extents(lane) for lane in range(3)] == [[], [], []]


def test_after_empty_one_writer_begins_with_the_first_lane() -> None:
    with writers(3, 5) as shared:
        me = shared.new()
        shared.extend(me, 23)
        me.empty(True)
        assert list(shared.extend(me, 7)) == [0, 1, 2, 3, 4, 5, 6]
        assert [len(shared.store.extents(lane)) for lane in range(3)] == [1, 1, 0]


def test_a_slow_writer_has_its_share_of_the_rows_and_old_rows_go() -> None:
    with writers(64, 100) as shared:
        fast, slow, of_slow, ages, shares = shared.new(), shared.new(), set(), [], []
        for k in range(1300):
            shared.extend(fast, 19)
            of_slow.add(shared.count)
            shared.extend(slow, 1)
            if k > 700 and k % 5 == 0:
                numbers = shared.numbers(np.arange(shared.max_size))
                ages.append((shared.count - min(numbers)) / shared.max_size)
                shares.append(sum(number in of_slow for number in numbers) / shared.max_size)
        print(f"share {min(shares):.4f} to {max(shares):.4f}, mean {np.mean(shares):.4f}; oldest {max(ages):.3f}")
        assert min(shares) > 0.035 and np.mean(shares) < 0.05 and max(shares) < 0.053
        newest = range(shared.count - shared.max_size, shared.count)
        assert sum(number in newest for number in numbers) > 0.98 * shared.max_size
        assert max(ages) < 1.2


def test_writers_that_are_equally_fast_fill_their_lanes() -> None:
    """However many they are, nobody ends the stints of others."""
    with writers(32, 20) as shared:
        those = [shared.new() for _ in range(16)]
        for _ in range(207):
            for writer in those:
                shared.extend(writer, 1)
        seams = [seam for lane in range(32) for seam in shared.store.seams(lane)]
        assert len(seams) == 16 and all(seam % 20 == 0 for seam in seams)


@pytest.mark.parametrize("lanes", [4, 64])
def test_a_writer_that_pauses_leaves_its_rest_of_a_lane_to_the_others(lanes: int) -> None:
    with writers(lanes, 10) as shared:
        me, other = shared.new(), shared.new()
        shared.extend(me, lanes * 10)
        shared.extend(other, 4)  # and pauses
        oldest = []
        for _ in range(lanes * 10):
            expected = me.next_stint_slots(3)
            assert list(shared.extend(me, 3)) == list(expected)
            assert shared.store.rows() == shared.max_size
            oldest.append(shared.count - min(shared.numbers(np.arange(shared.max_size))))
        late = max(lanes // 8, 2) + 3  # lanes that it fills first
        assert max(oldest) <= (lanes + late) * 10
        assert list(shared.extend(other, 1)) != [4]


@pytest.mark.parametrize("rows", [1.0, 1.2, 2.7])
def test_an_extend_of_max_size_rows_leaves_no_other_row(rows: float) -> None:
    """Beside stints that other writers have not finished, and in the middle of one of its own."""
    for lanes, capacity, draw in some_shapes(60, seed=5):
        with writers(lanes, capacity) as shared:
            me, others = shared.new(), [shared.new() for _ in range(draw.randrange(1, 5))]
            shared.extend(me, draw.randrange(1, 2 * shared.max_size))
            for other in others:
                shared.extend(other, draw.randrange(1, capacity + 1))
            shared.extend(me, draw.randrange(1, capacity + 1))
            first, n = shared.count, int(rows * shared.max_size)
            expected = me.next_stint_slots(n)
            slots = shared.extend(me, n)
            assert list(slots) == list(expected)
            numbers = shared.numbers(np.arange(shared.max_size))
            assert min(numbers) >= first and len(set(numbers)) == shared.max_size
            if rows == 1:
                assert sorted(slots) == list(range(shared.max_size))


def test_an_extend_of_max_size_rows_waits_for_lanes_before_it_replaces_its_own_rows() -> None:
    with writers(3, 4) as shared:
        me, other = shared.new(patience=30), shared.new()
        shared.extend(me, 12)
        with alive(shared, other):
            assert other.begin_turn(1) == 0
            timer = threading.Timer(0.05, lambda: other.end_turn(1))
            timer.start()
            try:
                slots = shared.extend(me, 12)
            finally:
                timer.join()
        assert sorted(slots) == list(range(12))


def test_an_extend_of_max_size_rows_gives_up_a_lane_that_is_never_free() -> None:
    with writers(3, 4) as shared:
        me, other = shared.new(patience=0.05), shared.new()
        shared.extend(me, 12)
        with alive(shared, other):
            assert other.begin_turn(1) == 0
            slots = shared.extend(me, 12)
        assert set(slots) == {0, 1, 2, 3, 8, 9, 10, 11}


@pytest.mark.parametrize(
    ("many", "lanes", "capacity"), [(300, 16, 64), pytest.param(20_000, 64, 1563, marks=pytest.mark.deep)]
)
def test_each_of_many_writers_of_few_rows_is_kept_and_the_oldest_rows_leave(
    many: int, lanes: int, capacity: int
) -> None:
    with writers(lanes, capacity) as shared:
        for k in range(many):
            shared.extend(shared.new(), 10)
            assert shared.store.rows() == min(shared.count, shared.max_size)
            if k % (many // 20) == 0 and shared.store.rows() == shared.max_size:
                assert shared.count - min(shared.numbers(np.arange(shared.max_size))) < 1.2 * shared.max_size


def windows(positions: list[int], length: int = 32) -> int:
    """How many slices of so many steps lie in these steps of one writer (ascending): those without a gap inside."""
    at = np.array(positions)
    return int((at[length - 1 :] - at[: len(at) - length + 1] == length - 1).sum()) if len(at) >= length else 0


@pytest.mark.deep
@pytest.mark.parametrize("speeds", [(1,), (1, 1, 1, 1), (19, 1)], ids=["one", "four", "slow"])
def test_a_seam_at_a_stint_costs_slices_their_length_of_each_lane(speeds: tuple[int, ...]) -> None:
    lanes, capacity, length = 64, 1024, 32
    with writers(lanes, capacity) as shared:
        those = [shared.new() for _ in speeds]
        truth, sent = np.zeros((4 * shared.max_size, 2), np.int64), [0] * len(speeds)  # the writer, its count
        while shared.count < 3.3 * shared.max_size:
            for k, speed in enumerate(speeds):
                first, n = shared.count, 16 * speed
                truth[first : first + n, 0], truth[first : first + n, 1] = k, np.arange(sent[k], sent[k] + n)
                shared.extend(those[k], n)
                sent[k] += n
        whole = 0
        for lane in range(lanes):
            state, seams = shared.store.lane(lane), set(shared.store.seams(lane))
            sequences = np.arange(state["first"], state["published"])
            of = truth[shared.numbers(lane * capacity + sequences % capacity)]
            joined = (np.diff(of[:, 1]) == 1) & (np.diff(of[:, 0]) == 0)
            assert all(bool(joined[w - state["first"] - 1]) or w in seams for w in sequences[1:])
            runs = np.concatenate([[0], np.cumsum([w in seams for w in sequences[1:]])]) * (1 << 20)
            whole += windows(list(runs + np.arange(len(runs))), length)
        newest = truth[shared.count - shared.max_size : shared.count]
        there = [int((newest[:, 0] == k).sum()) for k in range(len(speeds))]
        possible = sum(n - length + 1 for n in there)
        # With a fixed lane for each writer no slice is cut, but each keeps only its own part of max_size.
        fixed = sum(min(n, shared.max_size // max(2, len(speeds))) - length + 1 for n in there)
        print(f"{speeds}: lost {1 - whole / possible:.2%}, with fixed lanes {1 - fixed / possible:.2%}")
        # A slow writer's stints are overdue before they are used up: some more seams.
        assert 1 - whole / possible < length / capacity * (1 if len(set(speeds)) == 1 else 1.2)
        if len(set(speeds)) > 1 or len(speeds) == 1:
            assert whole > 1.3 * fixed


@contextlib.contextmanager
def alive(shared: Writers, writer: _native.Store) -> Iterator[None]:
    """A block in which a writer's byte is locked, as by a process that lives."""
    fd = os.open(f"/proc/self/fd/{shared.fd}", os.O_RDWR)
    byte = FIRST_WRITER_BYTE + (writer.writer >> _native.PID_BITS)
    try:
        fcntl.fcntl(fd, SET_LOCK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        yield
    finally:
        os.close(fd)


def test_the_lane_of_a_dead_writer_is_taken_over_with_a_new_term() -> None:
    with writers(2, 4) as shared:
        me, other = shared.new(), shared.new()
        term = shared.store.lane(0)["term"]
        assert other.begin_turn(0) == 0  # inside an append
        assert list(shared.extend(me, 2)) == [0, 1]
        assert shared.store.lane(0)["term"] == term + 1


def test_the_lane_of_a_living_writer_is_left_to_it() -> None:
    with writers(2, 4) as shared:
        me, other = shared.new(patience=0.05), shared.new()
        with alive(shared, other):
            assert other.begin_turn(0) == 0
            assert list(shared.extend(me, 2)) == [4, 5]
            other.end_turn(0)
            assert list(shared.extend(me, 3)) == [6, 7, 0]


def test_a_writer_leaves_its_stint_while_another_one_has_the_turn_there() -> None:
    with writers(2, 4) as shared:
        me, other = shared.new(), shared.new()
        assert list(shared.extend(me, 2)) == [0, 1]
        with alive(shared, other):
            assert other.begin_turn(0) == 0  # it has chosen the lane, and not begun a stint yet
            assert list(shared.extend(me, 1)) == [4]
        assert shared.store.lane(0)["published"] == 2


def test_who_waits_too_long_for_a_lane_is_told_for_whom() -> None:
    with writers(2, 4) as shared:
        me, others = shared.new(patience=0.05), [shared.new(), shared.new()]
        with alive(shared, others[0]), alive(shared, others[1]):
            assert [other.begin_turn(lane) for lane, other in enumerate(others)] == [0, 0]
            with pytest.raises(
                StorageInUseError, match=rf"each of the 2 lanes.*0\.05 seconds.*process {os.getpid()}.*Nothing was"
            ):
                shared.extend(me, 1)
        assert shared.store.rows() == 0


def test_who_waits_too_long_within_an_extend_is_told_what_was_written() -> None:
    """Both lanes are taken between its two parts, by a thread that runs while the first one is written."""
    lane, n = 1 << 15, 40_000  # enough rows for the GIL to be released
    rows = row_words(np.arange(n), WIDTH)
    for _ in range(300):
        with writers(2, lane) as shared:
            me, others = shared.new(patience=0.001), [shared.new(), shared.new()]
            plan, begins = shared.code.check_list([rows], 1, 0), threading.Event()

            def take_the_first_lane(writer: _native.Store = others[0], begins: threading.Event = begins) -> None:
                begins.wait()
                until = time.monotonic() + 0.02
                while writer.begin_turn(0) and time.monotonic() < until:
                    pass

            with alive(shared, others[0]), alive(shared, others[1]):
                assert others[1].begin_turn(1) == 0
                thread = threading.Thread(target=take_the_first_lane)
                thread.start()
                begins.set()
                try:
                    me.append(0, plan)
                except StorageInUseError as error:
                    message = str(error)
                else:
                    message = ""
                finally:
                    thread.join()
            if "Nothing was written" in message:
                assert shared.store.rows() == 0
            elif message:
                assert f"The first {lane} of {n} steps were written" in message and shared.store.rows() == lane
                return
    pytest.fail("the lanes were never taken at this moment")


def test_a_writer_waits_until_a_lane_is_free() -> None:
    with writers(2, 4) as shared:
        me, others = shared.new(patience=30), [shared.new(), shared.new()]
        with alive(shared, others[0]), alive(shared, others[1]):
            assert [other.begin_turn(lane) for lane, other in enumerate(others)] == [0, 0]
            timer = threading.Timer(0.05, lambda: others[1].end_turn(1))
            timer.start()
            try:
                assert list(shared.extend(me, 2)) == [4, 5]
            finally:
                timer.join()
