"""Writers that are killed inside native appends while they move from lane to lane; a reader believes no wrong row."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import mmap
import os
import random
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from contracts.tiers import in_turns
from engram import _native
from native.core.support import Array, store, words

WRITERS, WIDTH = 4, 32  # words of a row
FIRST_WRITER_BYTE = 1 << 61  # of the locks: docs/store-format.md
SET_LOCK = getattr(fcntl, "F_OFD_SETLK", 37)
PID = (1 << _native.PID_BITS) - 1
CODE, PAYLOAD = words(WIDTH)


def rows(stream: int, numbers: Array, period: int) -> Array:
    """int64 [n, WIDTH]: whose rows they are, their number in its stream modulo `period`, that, and words from these."""
    numbers = numbers % period
    values: Array = (numbers * 1_000_003 + stream * 31 + period)[:, None] * np.arange(1, WIDTH + 1)
    values[:, 0], values[:, 1], values[:, 2] = stream, numbers, period
    return values


def is_whole(batch: Array) -> bool:
    """Whether every word of these rows follows from their first three."""
    expected = (batch[:, 1] * 1_000_003 + batch[:, 0] * 31 + batch[:, 2])[:, None] * np.arange(1, WIDTH + 1)
    return bool((expected[:, 3:] == batch[:, 3:]).all())


def write_for_ever(fd: int, seed: int, begun: mmap.mmap) -> NoReturn:
    """Appends the same batches again and again, so that nearly all time is spent in the native append."""
    os.nice(5)  # the one that kills has a turn, too
    one = _native.Store.open(fd)
    one.writer = one.new_writer(0, os.getpid())
    alive = struct.pack(
        "hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, FIRST_WRITER_BYTE + (one.writer >> _native.PID_BITS), 1, 0
    )
    fcntl.fcntl(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), SET_LOCK, alive)
    one.use_writer_locks(fd, FIRST_WRITER_BYTE, 60.0)
    most = one.lanes * one.lane_capacity * 3 // 4  # an extend of more rows waits for the lanes of others
    # A long one, to be inside most of the time.
    sizes = [min(most, n) for n in (64 + seed % 7, 400 + seed % 11, 3000 + seed % 13)]
    every = rows(one.writer, np.arange(sum(sizes)), sum(sizes))
    batches = [CODE.check_list([batch], 1, 0) for batch in np.split(every, np.cumsum(sizes)[:-1])]
    begun[seed % WRITERS] = 1
    while True:
        for batch in batches:
            one.append(0, batch)


def started(work: Callable[[], NoReturn]) -> int:
    """The pid of a forked child, which has five minutes."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.alarm(300)
        work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


@dataclasses.dataclass
class Counts:
    kills: int = 0
    inside: int = 0  # of these in an append, with the turn of a lane
    copying: int = 0  # of these between the claim of rows and their publication
    believed: int = 0
    known: int = 0  # of these, by an extent, whose they are


def check(shared: _native.Store, counts: Counts) -> None:
    """Reads every lane beside the writers."""
    for lane in range(shared.lanes):
        state = shared.lane(lane)
        sequences = np.arange(state["first"], state["published"])
        if not len(sequences):
            continue
        extents = shared.extents(lane)  # after the look at rows, before the copy
        slots = lane * shared.lane_capacity + sequences % shared.lane_capacity
        (batch,), gone, absent, numbers = shared.gather(CODE, slots, sequences=True)
        stays = np.asarray(numbers) == sequences
        stays[[*(gone or []), *(absent or [])]] = False
        mine, at = np.asarray(batch)[stays], sequences[stays]
        assert is_whole(mine), f"lane {lane} has torn rows"
        counts.believed += len(mine)
        for k, (start, stream, position) in enumerate(extents):
            end = extents[k + 1][0] if k + 1 < len(extents) else 1 << 62
            of = (at >= start) & (at < end)
            assert (mine[of, 0] == stream).all(), f"lane {lane}: rows of another stream than the extent says"
            assert (mine[of, 1] == (position + at[of] - start) % mine[of, 2]).all(), f"lane {lane}: other rows of it"
            counts.known += int(of.sum())


def kill_writers(shared: _native.Store, fd: int, kills: int, seed: int) -> Counts:
    """So many kills, and more until every fifth was inside an append and every twentieth copied rows."""
    counts, draw, begun = Counts(), random.Random(seed), mmap.mmap(-1, WRITERS)
    pids = [started(lambda k=k: write_for_ever(fd, k, begun)) for k in range(WRITERS)]
    try:
        while counts.kills < kills or counts.inside < kills // 5 or counts.copying < kills // 20:
            assert counts.kills < 20 * kills, f"writers are hardly ever killed inside an append: {counts}"
            k = counts.kills
            if k % 3 == 0:
                check(shared, counts)
            victim = draw.randrange(WRITERS)
            while not begun[victim]:
                time.sleep(1e-4)
            time.sleep(draw.random() * 0.003)
            stop(pids[victim])  # what a living one holds nobody else takes over, so that it can be looked at
            held = [state for state in map(shared.lane, range(shared.lanes)) if state["turn"] & PID == pids[victim]]
            counts.inside += bool(held)
            counts.copying += any(state["claimed"] > state["published"] for state in held)
            kill(pids[victim])
            begun[victim], counts.kills = 0, k + 1
            pids[victim] = started(lambda k=k, victim=victim: write_for_ever(fd, (k + 1) * WRITERS + victim, begun))
    finally:
        for pid in pids:
            kill(pid)
    check(shared, counts)
    return counts


def stop(pid: int) -> None:
    """Stops a child at any instruction."""
    os.kill(pid, signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1]), "a writer had ended before it was killed"


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "a writer had ended before it was killed"


@contextlib.contextmanager
def descriptor(kind: str, path: Path) -> Iterator[int]:
    fd = os.memfd_create("kills") if kind == "memory" else os.open(path / "store", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.deep
@pytest.mark.parametrize("kills", [35, pytest.param(1750, marks=pytest.mark.long)])
@pytest.mark.parametrize(("size", "kind"), in_turns([(16, 256), (5, 40)], ["memory", "file"]))
def test_writers_that_are_killed_inside_an_append_tear_and_mix_nothing(
    kind: str, size: tuple[int, int], kills: int, tmp_path: Path
) -> None:
    lanes, capacity = size
    with descriptor(kind, tmp_path) as fd:
        shared = store(PAYLOAD, capacity, lanes=lanes, fd=fd, trailer=kind == "file", extents=True)
        counts = kill_writers(shared, fd, kills, seed=capacity)
        print(
            f"{kind}, {lanes} lanes of {capacity}: {counts}, terms {sum(shared.lane(k)['term'] for k in range(lanes))}"
        )
        assert counts.believed > 10 * kills and counts.known > counts.believed / 2
        # A kill costs the rows that one piece was replacing, until the next writer of the lane.
        piece = max(1, min(64, capacity // 8))
        assert shared.rows() >= lanes * capacity - piece * min(lanes, WRITERS)
        last = started(lambda: fill_once(fd))
        assert os.waitpid(last, 0)[1] == 0
        check(shared, counts)
        assert shared.rows() == lanes * capacity
        assert all(shared.extents(lane)[-1][1] & PID == last for lane in range(lanes))


def fill_once(fd: int) -> NoReturn:
    """One more writer replaces every row."""
    one = _native.Store.open(fd)
    one.writer = one.new_writer(0, os.getpid())
    one.use_writer_locks(fd, FIRST_WRITER_BYTE, 60.0)
    n = one.lanes * one.lane_capacity
    one.append(0, CODE.check_list([rows(one.writer, np.arange(n), n)], 1, 0))
    os._exit(0)
