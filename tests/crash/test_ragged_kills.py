"""`kill -9` of writers of rows of any length: a row is there whole or not at all, and none that was told of is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import mmap
import os
import random
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

import engram.data  # noqa: F401  the core returns tensors
from contracts.children import fork
from contracts.tiers import in_turns
from engram import _native

WRITERS, PAGE_BYTES, LONGEST = 4, 64, 2000
HEAD, WORDS = 8, struct.Struct("<QQQ")  # of a row: its stream, its number there, its pages
HEADER_BYTES, LANE_BYTES, PUBLISHED = 1024, 512, 64  # docs/store-format.md
FIRST_WRITER_BYTE = 1 << 61  # of the locks: docs/store-format.md
SET_LOCK = getattr(fcntl, "F_OFD_SETLK", 37)
PID = (1 << _native.PID_BITS) - 1
BODY = random.Random(0).randbytes(PAGE_BYTES * LONGEST + 4096)
Row = tuple[int, int, int]  # the three words


def row_of(stream: int, number: int, pages: int) -> bytes:
    """A row of so many pages, whose bytes follow from its first words."""
    n = pages * PAGE_BYTES - HEAD - WORDS.size - number % (PAGE_BYTES - HEAD - WORDS.size)
    at = (stream * 31 + number * 7) % 4096
    return WORDS.pack(stream, number, pages) + BODY[at : at + n]


class Report:
    """Of each writer its last acknowledged row, and the lane and sequence of its head, which outlive it."""

    def __init__(self) -> None:
        self._words = mmap.mmap(-1, WRITERS * 128)

    def begin(self, k: int) -> None:
        struct.pack_into("<Q", self._words, k * 128, 0)

    def acknowledge(self, k: int, row: Row, lane: int, head: int) -> None:
        """Only one of the two places is written at a time, and then named: a kill in between leaves the row before."""
        count = struct.unpack_from("<Q", self._words, k * 128)[0] + 1
        struct.pack_into("<QQQQQ", self._words, k * 128 + 8 + count % 2 * 40, *row, lane, head)
        struct.pack_into("<Q", self._words, k * 128, count)

    def last(self, k: int) -> tuple[Row, int, int] | None:
        count = struct.unpack_from("<Q", self._words, k * 128)[0]
        if not count:
            return None
        stream, number, pages, lane, head = struct.unpack_from("<QQQQQ", self._words, k * 128 + 8 + count % 2 * 40)
        return (stream, number, pages), lane, head


def take_turn(one: _native.Store) -> None:
    """In the one lane of a store; from a dead writer, too, which begins a new term, as engram's lanes do it."""
    while holder := one.begin_turn(0):
        try:
            os.kill(holder & PID, 0)
        except OSError as error:
            assert error.errno == errno.ESRCH
            if one.begin_turn(0, holder) == 0:
                one.raise_term(0)
                return
        os.sched_yield()


def write_for_ever(fd: int, k: int, seed: int, report: Report) -> NoReturn:
    os.nice(5)  # the one that kills has a turn, too
    draw, one = random.Random(seed), _native.Store.open(fd)
    one.writer = one.new_writer(0, os.getpid())
    byte = FIRST_WRITER_BYTE + (one.writer >> _native.PID_BITS)
    alive = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    fcntl.fcntl(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), SET_LOCK, alive)
    one.use_writer_locks(fd, FIRST_WRITER_BYTE, 60.0)
    at = HEADER_BYTES + PUBLISHED
    published = np.ndarray(one.lanes, np.uint64, one.memory(), at, (LANE_BYTES,))  # of each lane, as it is
    number = 0
    while True:
        pages = draw.choice((1, 2, 3, draw.randint(1, 40), draw.randint(1, LONGEST)))
        if one.lanes == 1:
            take_turn(one)
        row, before = (one.writer, number, pages), published.copy()
        slot = one.append_row(0, row_of(*row))
        assert slot is not None
        one.end_turn(0)
        lane, place = divmod(slot, one.lane_capacity)
        # Where a lane went round since `before` was read, this is a sequence that is gone by then.
        report.acknowledge(k, row, lane, int(before[lane]) + (place - int(before[lane])) % one.lane_capacity)
        number += 1


def words_of(row: bytes) -> Row:
    """Fails unless it is a row that somebody wrote, whole."""
    words: Row = WORDS.unpack_from(row)
    assert row == row_of(*words), "a row is not one that was written"
    return words


def check_beside(shared: _native.Store, draw: random.Random) -> int:
    """Reads some rows while others write; returns how many were believed."""
    heads = shared.heads()
    some = heads[[draw.randrange(len(heads)) for _ in range(32)]] if len(heads) else heads
    rows, gone, absent = shared.read_rows(some)
    lost = {*(gone or []), *(absent or [])}
    for i, row in enumerate(rows):
        if i not in lost:
            words_of(row)
    return len(rows) - len(lost)


def check_at_rest(shared: _native.Store, count: _native.HeadCount, report: Report) -> None:
    """While all writers stand still: rows lie behind one another, each of them whole, and the last ones are there."""
    heads, capacity = shared.heads(), shared.lane_capacity
    found, gone, absent = shared.read_rows(heads)
    assert gone is None and absent is None and count.of(shared) == len(found)
    of_lane: dict[int, list[tuple[int, Row]]] = {}
    for slot, w, row in zip(heads.tolist(), shared.generations(heads).tolist(), found, strict=True):
        of_lane.setdefault(slot // capacity, []).append((w, words_of(row)))
    for lane, rows in of_lane.items():
        ends = [w for w, _ in rows[1:]] + [shared.lane(lane)["published"]]
        assert [w + row[2] for w, row in rows] == ends, f"a row of lane {lane} is there in part"
        if shared.lanes == 1:
            newest: dict[int, int] = {}
            for _, (stream, number, _) in rows:
                assert number == newest.setdefault(stream, number - 1) + 1, "a row within a stream is lost"
                newest[stream] = number
    for k in range(WRITERS):
        last = report.last(k)
        if last and last[2] >= shared.lane(last[1])["first"]:
            row, lane, head = last
            assert (head, row) in of_lane[lane], f"row {row} was acknowledged, and is not in lane {lane}"


@dataclasses.dataclass
class Counts:
    kills: int = 0
    copying: int = 0  # of these between the claim of a row and its publication
    believed: int = 0
    wrote: int = 0  # rows that were acknowledged


def kill_writers(shared: _native.Store, fd: int, kills: int, seed: int) -> Counts:
    """So many kills, and more until every twentieth was inside a row."""
    counts, draw, report, count = Counts(), random.Random(seed), Report(), _native.HeadCount()

    def start(k: int) -> int:
        report.begin(k)
        life = draw.getrandbits(40)
        return fork(lambda: write_for_ever(fd, k, life, report))

    def acknowledged(k: int) -> int:
        last = report.last(k)
        return last[0][1] + 1 if last else 0

    pids = {k: start(k) for k in range(WRITERS)}
    try:
        while counts.kills < kills or counts.copying < kills // 20:
            assert counts.kills < 20 * kills, f"writers are hardly ever killed inside a row: {counts}"
            while not all(map(acknowledged, range(WRITERS))):
                time.sleep(1e-4)
            counts.believed += check_beside(shared, draw)
            time.sleep(draw.random() * 0.01)
            for pid in pids.values():
                os.kill(pid, signal.SIGSTOP)
            for pid in pids.values():
                assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1]), "a writer had ended before it was killed"
            held = [state for state in map(shared.lane, range(shared.lanes)) if state["claimed"] > state["published"]]
            copying = [k for k, pid in pids.items() if any(state["turn"] & PID == pid for state in held)]
            victim = draw.choice(copying if copying and draw.randrange(2) else range(WRITERS))
            counts.copying += victim in copying
            kill(pids.pop(victim))
            check_at_rest(shared, count, report)
            counts.kills, counts.wrote = counts.kills + 1, counts.wrote + acknowledged(victim)
            pids[victim] = start(victim)
            for pid in pids.values():
                os.kill(pid, signal.SIGCONT)
    finally:
        for pid in pids.values():
            kill(pid)
    check_at_rest(shared, count, report)
    counts.wrote += sum(map(acknowledged, range(WRITERS)))
    return counts


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "a writer had ended before it was killed"


@contextlib.contextmanager
def ragged_store(kind: str, lanes: int, folder: Path) -> Iterator[tuple[_native.Store, int]]:
    fd = os.memfd_create("kills") if kind == "memory" else os.open(folder / "store", os.O_RDWR | os.O_CREAT, 0o600)
    trailer = kind == "file"
    try:
        shape = lanes, 4 * LONGEST, 1, PAGE_BYTES, 8, trailer
        os.ftruncate(fd, _native.Store.size_needed(*shape, 2))
        yield _native.Store.create(fd, *shape, b"{}", bytes(16), extents=True, ragged=True), fd
    finally:
        os.close(fd)


@pytest.mark.deep
@pytest.mark.parametrize("kills", [25, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize(("lanes", "kind"), in_turns([1, 8, 64], ["memory", "file"]))
def test_writers_that_are_killed_leave_whole_rows(kind: str, lanes: int, kills: int, ram_path: Path) -> None:
    with ragged_store(kind, lanes, ram_path) as (shared, fd):
        counts = kill_writers(shared, fd, kills, seed=lanes)
        rounds = sum(shared.lane(lane)["published"] for lane in range(lanes)) / lanes / shared.lane_capacity
        print(f"{kind}, {lanes} lanes: {counts}, {rounds:.1f} rounds, rows there: {len(shared.heads())}")
        assert counts.believed > 5 * kills
        # A kill costs the oldest pages that one row was replacing, until the next writer of the lane.
        assert rounds < 1 or shared.rows() > lanes * shared.lane_capacity * 3 / 4 - WRITERS * LONGEST
