"""Rows of any length in the native core: what is given is what was written, and each row is as likely as any other."""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engram import _native
from engram.errors import QueueFullError, StorageError
from native.core.support import Array, open_image, row_words, store, words

HEAD = 8  # bytes of each row that say how many it has
FEATURES, FEATURE_NAMES, RAGGED = 16, 24, 16  # of the header: docs/store-format.md; the bit of the feature


class Pages:
    """What a ragged store should hold, by lane: pages that were ever written, and the rows whose heads are there."""

    def __init__(self, one: _native.Store, seed: int) -> None:
        self.store, self.draw = one, random.Random(seed)
        self.written = [0] * one.lanes
        self.rows: dict[tuple[int, int], bytes] = {}  # by lane and the sequence of the head

    def row(self, most: int | None = None) -> bytes:
        """Any row that fits, often one whose last page is full or has a byte."""
        page, longest = self.store.payload_bytes, self.store.longest_row * self.store.payload_bytes - HEAD
        n = self.draw.choice([self.draw.randint(0, longest), self.draw.randint(0, min(3 * page, longest)), longest])
        if self.draw.randrange(3) == 0:
            n = max(0, min(longest, n // page * page + self.draw.choice((-HEAD, 1 - HEAD))))
        return self.draw.randbytes(min(n, most) if most is not None else n)

    def append(self, row: bytes, writer: _native.Store | None = None, lane: int = 0) -> int:
        slot = (writer or self.store).append_row(lane, row)
        assert slot is not None
        self.note(slot, row)
        return slot

    def note(self, slot: int, row: bytes) -> None:
        capacity = self.store.lane_capacity
        lane = slot // capacity
        assert slot == lane * capacity + self.written[lane] % capacity
        self.rows[lane, self.written[lane]] = row
        self.written[lane] += -(-(len(row) + HEAD) // self.store.payload_bytes)
        gone = self.written[lane] - capacity
        self.rows = {(where, w): row for (where, w), row in self.rows.items() if where != lane or w >= gone}

    def slots(self) -> dict[int, bytes]:
        """The rows by their slots, lane after lane, the oldest first."""
        capacity = self.store.lane_capacity
        return {lane * capacity + w % capacity: self.rows[lane, w] for lane, w in sorted(self.rows)}

    def check(self, count: _native.HeadCount) -> None:
        expected = self.slots()
        heads = self.store.heads()
        assert [int(slot) for slot in heads] == list(expected)
        assert count.of(self.store) == len(expected)
        assert self.store.read_rows(heads) == (list(expected.values()), None, None)
        page = self.store.payload_bytes
        within = [slot + 1 for slot, row in expected.items() if len(row) + HEAD > page and slot + 1 not in expected]
        within = [slot for slot in within if slot % self.store.lane_capacity]
        assert self.store.read_rows(np.array(within, np.int64))[2] == (list(range(len(within))) or None)


@pytest.mark.parametrize("trailer", [False, True])
def test_rows_are_those_that_were_written(trailer: bool) -> None:
    for seed, (page, capacity) in enumerate([(8, 1), (16, 3), (8, 5), (24, 16), (64, 100), (256, 64), (16, 1000)]):
        pages = Pages(store(page, capacity, trailer=trailer, ragged=True), seed)
        count = _native.HeadCount()
        for k in range(150):
            pages.append(pages.row())
            if k % 3 == 0:
                pages.check(count)
        pages.check(_native.HeadCount())


def test_the_count_begins_anew_where_all_rows_are_replaced() -> None:
    pages, count = Pages(store(16, 40, ragged=True), 0), _native.HeadCount()
    for _ in range(9):
        pages.append(pages.row())
    assert count.of(pages.store) == len(pages.rows) > 0
    pages.store.empty(True)
    assert count.of(pages.store) == 0 and len(pages.store.heads()) == 0
    assert pages.store.read_rows(np.arange(40)) == ([b""] * 40, None, list(range(40)))
    assert count.of(Pages(store(16, 80, ragged=True), 0).store) == 0


def writer_of(fd: int) -> _native.Store:
    one = _native.Store.open(fd)
    one.writer = one.new_writer(0, os.getpid())
    return one


def test_rows_of_writers_that_move_on_lie_in_one_lane_where_they_were_foretold() -> None:
    for seed in range(12):
        draw = random.Random(seed)
        fd = os.memfd_create("ragged")
        pages = Pages(store(16, draw.randrange(4, 70), lanes=draw.randrange(2, 9), fd=fd, ragged=True), seed)
        count, writers = _native.HeadCount(), [writer_of(fd) for _ in range(3)]
        for k in range(300):
            if draw.randrange(40) == 0:
                writers[draw.randrange(3)] = writer_of(fd)
            who, row = draw.choice(writers), pages.row()
            foretold = who.next_stint_slots(-(-(len(row) + HEAD) // 16))
            slot = pages.append(row, who)
            assert slot == int(foretold[0]) and len({int(at) // pages.store.lane_capacity for at in foretold}) == 1
            if k % 25 == 0:
                pages.check(count)
        pages.check(count)
        os.close(fd)


def newest_there(lanes: int, capacity: int, longest: int, rounds: float) -> float:
    """Of the pages that one writer wrote last, as many as fit: the share that is there."""
    fd, draw, last = os.memfd_create("ragged"), random.Random(0), 0
    one = store(8, capacity, lanes=lanes, fd=fd, ragged=True)
    who, when = writer_of(fd), dict[tuple[int, int], tuple[int, int]]()
    written = [0] * lanes
    while last < rounds * lanes * capacity:
        n = draw.randint(1, longest)
        slot = who.append_row(0, bytes(8 * n - HEAD))
        assert slot is not None
        lane = slot // capacity
        when[lane, written[lane]] = last, n
        written[lane] += n
        last += n
    os.close(fd)
    here = [(at, n) for (lane, w), (at, n) in when.items() if w >= written[lane] - capacity]
    assert len(here) == len(one.heads())
    return sum(n for at, n in here if at >= last - lanes * capacity) / (lanes * capacity)


def test_old_rows_leave_before_new_ones() -> None:
    assert newest_there(64, 272, 8, 1.5) > 0.97 and newest_there(64, 272, 8, 5) > 0.95
    assert newest_there(16, 128, 32, 1.5) > 0.85


@pytest.mark.parametrize("lanes", [1, 20])
def test_each_row_is_as_likely_as_any_other(lanes: int) -> None:
    fd = os.memfd_create("ragged")
    pages = Pages(store(8, 400, lanes=lanes, fd=fd, ragged=True), 3)
    who = writer_of(fd) if lanes > 1 else None
    for _ in range(90 * lanes):
        pages.append(pages.row(most=pages.draw.choice([8, 100, 790])), who)
    expected = pages.slots()
    drawn = Counter[int]()
    for seed in range(300):
        slots = pages.store.uniform(np.array([seed]), 64)
        assert slots is not None
        drawn.update(int(slot) for slot in slots)
    assert drawn.keys() <= expected.keys()
    mean = 300 * 64 / len(expected)
    chi = sum((drawn[slot] - mean) ** 2 / mean for slot in expected)
    assert abs(chi - len(expected)) < 5 * (2 * len(expected)) ** 0.5
    os.close(fd)


def test_few_long_rows_are_drawn_from_a_list() -> None:
    pages = Pages(store(8, 80_000, ragged=True), 0)
    for _ in range(3):
        pages.append(bytes(20_000 * 8 - HEAD))
    slots = pages.store.uniform(np.array([1]), 600)
    assert slots is not None
    drawn = Counter(int(slot) for slot in slots)
    assert drawn.keys() == {0, 20_000, 40_000} and min(drawn.values()) > 150


def walked(one: _native.Store, shuffle: bool) -> list[int]:
    lanes = [one.lane(lane) for lane in range(one.lanes)]
    ranges = [(lane["first"], lane["published"] - lane["first"]) for lane in lanes]
    walk, taken, position = _native.EpochWalk(one, 5, shuffle, ranges), list[int](), 0
    while position < len(walk):
        slots, position = walk.take(one, position, 7)
        taken += [int(slot) for slot in slots]
    return taken


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_gives_each_row_once(lanes: int, shuffle: bool) -> None:
    fd = os.memfd_create("ragged")
    pages = Pages(store(16, 60, lanes=lanes, fd=fd, ragged=True), 1)
    who = writer_of(fd) if lanes > 1 else None
    for _ in range(40 * lanes):
        pages.append(pages.row(), who)
    taken = walked(pages.store, shuffle)
    assert sorted(taken) == sorted(pages.slots())
    os.close(fd)


def test_only_heads_have_priorities() -> None:
    pages, priorities = Pages(store(16, 64, ragged=True), 2), _native.Priorities(1.0, 0.0, False)
    every = np.arange(64)
    for k in range(60):
        pages.append(pages.row())
        priorities.poll(pages.store)
        heads = np.array(sorted(pages.slots()))
        assert (np.asarray(priorities.of(pages.store, every)) > 0).nonzero()[0].tolist() == heads.tolist()
        written = every[: pages.written[0]]
        priorities.set(pages.store, written, np.full(len(written), 3.0 + k % 2))  # slots inside rows have none
        priorities.raise_new(pages.store, 5.0)
        assert priorities.total == pytest.approx((3.0 + k % 2) * len(heads))
        drawn = priorities.draw(pages.store, np.array([k]), 20, 0.4, False)
        assert drawn is not None and {int(slot) for slot in drawn[0]} <= set(heads.tolist())
    seen, highest, latest, skipped, saved = priorities.state(pages.store)
    again = _native.Priorities(1.0, 0.0, False)
    again.resume(pages.store, seen, highest, latest, skipped, saved)
    assert again.total == priorities.total
    assert np.array_equal(again.of(pages.store, every), priorities.of(pages.store, every))


def test_removed_rows_are_not_drawn_and_a_page_inside_a_row_is_not_removed() -> None:
    pages = Pages(store(16, 64, ragged=True), 4)
    for _ in range(30):
        pages.append(pages.row())
    one, heads = pages.store, list(pages.slots())
    within = [slot for slot in range(64) if slot not in heads]
    generations = np.asarray(one.generations(np.arange(64)))
    assert one.remove(0, np.array(within), generations[within]) == 0
    gone, left = heads[::2], set(heads[1::2])
    assert one.remove(0, np.array(gone), generations[gone]) == len(gone)
    slots = one.uniform(np.array([0]), 400)
    assert slots is not None and {int(slot) for slot in slots} == left
    assert set(walked(one, True)) == left
    priorities = _native.Priorities(1.0, 0.0, False)
    priorities.poll(one)
    assert priorities.total == len(left)
    assert one.remove(0, np.array(sorted(left)), generations[sorted(left)]) == len(left)
    assert one.uniform(np.array([0]), 4) is None


def test_what_has_no_place_is_refused_and_changes_nothing() -> None:
    pages = Pages(store(16, 40, ragged=True), 0)
    pages.append(b"a row")
    with pytest.raises(ValueError, match=r"a row of 153 bytes takes 11 pages of 16 bytes, .* has 10"):
        pages.store.append_row(0, bytes(10 * 16 - HEAD + 1))
    code, payload = words(2)
    plan = code.check_list([row_words(np.arange(3), 2)], 1, 0)
    with pytest.raises(ValueError, match="use append_row"):
        pages.store.append(0, plan)
    with pytest.raises(ValueError, match="not changed in place"):
        pages.store.overwrite(np.array([0]), code.check_list([row_words(np.arange(1), 2)], 1, 0))
    with pytest.raises(IndexError):
        pages.store.read_rows(np.array([40]))
    with pytest.raises(IndexError):
        pages.store.append_row(1, b"")
    pages.check(_native.HeadCount())
    plain = store(payload, 40)
    for refused in (lambda: plain.append_row(0, b""), plain.heads, lambda: plain.read_rows(np.array([0]))):
        with pytest.raises(ValueError, match="one length"):
            refused()
    for wrong in ({"payload": 12}, {"payload": 0}, {"strands": 2}):
        with pytest.raises(ValueError, match="rows of any length"):
            store(**{"payload": 16, "capacity": 8, "ragged": True} | wrong)  # type: ignore[arg-type]


def test_a_queue_takes_whole_rows_only() -> None:
    one = store(16, 16, ragged=True)
    _native.StoreQueue(one).begin(False, False)
    for _ in range(5):
        assert one.append_row(0, bytes(2 * 16)) is not None  # of 3 pages
    with pytest.raises(QueueFullError):
        one.append_row(0, bytes(2 * 16 - HEAD))
    assert one.append_row(0, bytes(8)) == 15 and one.rows() == 16


def test_a_lane_whose_turn_another_has_is_left_alone() -> None:
    fd = os.memfd_create("ragged")
    one = store(16, 16, fd=fd, ragged=True)
    first, second = writer_of(fd), writer_of(fd)
    for each in (first, second):
        assert each.begin_turn(0) == 0 and each.append_row(0, b"one") is not None
        each.end_turn(0)
    assert first.begin_turn(0) == 0 and second.append_row(0, b"two") is None
    first.end_turn(0)
    assert second.append_row(0, b"two") == 2 and len(one.heads()) == 3
    os.close(fd)


def test_the_feature_is_a_bit_that_only_such_stores_have(tmp_path: Path) -> None:
    plain, ragged = (bytes(store(16, 8, ragged=is_one).memory()[:512]) for is_one in (False, True))
    bits = [struct.unpack_from("<Q", shape, FEATURES)[0] for shape in (plain, ragged)]
    assert bits[0] & RAGGED == 0 and bits[1] == bits[0] | RAGGED
    assert plain[FEATURE_NAMES:].startswith(b"flow\0") and ragged[FEATURE_NAMES:].startswith(b"flow,ragged\0")
    memory = store(16, 8, ragged=True)
    memory.append_row(0, b"kept")
    opened, fd = open_image(tmp_path / "store", memory.memory())
    assert opened.is_ragged and opened.longest_row == 2 and opened.read_rows(opened.heads())[0] == [b"kept"]
    os.close(fd)


def forgeries(draw: random.Random, longest: int) -> Iterator[int]:
    yield from (0, 1, HEAD - 1, 16 * longest + 1, 1 << 31, (1 << 32) + 8, (1 << 63) + 8, (1 << 64) - 1, (1 << 64) - 8)
    for _ in range(40):
        yield draw.choice((draw.getrandbits(64), 16 * longest + 1 + draw.getrandbits(20)))


def test_a_head_with_a_length_that_no_row_has_is_an_error() -> None:
    pages = Pages(store(16, 64, ragged=True), 7)
    for _ in range(20):
        pages.append(pages.row())
    one, heads = pages.store, list(pages.slots())
    memory = one.memory()
    for forged in forgeries(pages.draw, one.longest_row):
        slot = pages.draw.choice(heads)
        at = one.rows_offset + slot * one.row_stride
        before = bytes(memory[at : at + HEAD])
        memory[at : at + HEAD] = np.frombuffer(struct.pack("<Q", forged), np.uint8)
        with pytest.raises(StorageError, match=f"slot {slot} says a length"):
            one.read_rows(np.array(heads))
        memory[at : at + HEAD] = np.frombuffer(before, np.uint8)
    newest = heads[-1] * one.row_stride + one.rows_offset
    memory[newest : newest + HEAD] = np.frombuffer(struct.pack("<Q", 16 * one.longest_row), np.uint8)
    if one.lane(0)["published"] % 64 - heads[-1] < one.longest_row:
        with pytest.raises(StorageError, match="says a length"):  # it would reach into rows that are not there
            one.read_rows(np.array(heads[-1:]))


def test_bits_and_lengths_of_any_bytes_are_never_read_outside() -> None:
    draw = np.random.default_rng(0)
    for trailer in (False, True):
        one = store(16, 64, trailer=trailer, ragged=True)
        for _ in range(40):
            one.append_row(0, bytes(100))
        memory = one.memory()
        seams = struct.unpack_from("<Q", bytes(memory[:304]), 192)[0]
        count, priorities = _native.HeadCount(), _native.Priorities(1.0, 0.0, False)
        for _ in range(60):
            memory[seams : seams + 8] = draw.integers(0, 256, 8, np.uint8)
            rows = memory[one.rows_offset :]
            rows[draw.integers(0, len(rows), 400)] = draw.integers(0, 256, 400, np.uint8)
            heads: Array = np.asarray(one.heads())
            assert ((heads >= 0) & (heads < 64)).all()
            one.append_row(0, bytes(30))
            count.of(one), priorities.poll(one), one.uniform(np.array([1]), 50), walked(one, True)
            for slot in range(64):
                try:
                    (row,), _, _ = one.read_rows(np.array([slot]))
                    assert len(row) <= one.longest_row * 16
                except StorageError:
                    pass
