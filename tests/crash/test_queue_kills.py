"""Users of a queue are killed: no row is handed out twice, at most a batch is lost for each of them, nobody stands."""

from __future__ import annotations

import functools
import os
import random
import signal
import struct
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from contracts.children import fork
from contracts.waiting import comes
from engram.data import LazyMemmapStorage, QueueSampler, ReplayBuffer

CAPACITY, BATCH, MOST_WRITTEN = 60, 14, 25
PRODUCERS, CONSUMERS = 3, 3
RECORD = 512  # bytes, a divisor of a page: a kill leaves no part of one
KILLS = pytest.mark.parametrize(
    ("kills", "lanes"),
    [pytest.param(30, None, marks=pytest.mark.quick), (100, 3), pytest.param(1000, 3, marks=pytest.mark.long)],
)


class Place(NamedTuple):
    """Where the store of a queue lies, and what is written down of it."""

    folder: Path
    lanes: int | None
    full: str

    @property
    def taken(self) -> Path:
        return self.folder / "taken"

    @property
    def is_over(self) -> Path:
        return self.folder / "over"

    def open(self) -> ReplayBuffer:
        store = self.folder / "store"
        storage = LazyMemmapStorage(CAPACITY, scratch_dir=store, shared_init=True, existsok=True, lanes=self.lanes)
        return ReplayBuffer(storage=storage, sampler=QueueSampler(full=self.full))


def produce(place: Place, life: int) -> None:
    """Writes rows with numbers of its own, in order."""
    rb, rng, n = place.open(), random.Random(life), life << 32
    while True:
        rows = rng.randint(1, MOST_WRITTEN)
        if rows == 1:
            rb.add(torch.tensor(n))
        else:
            rb.extend(torch.arange(n, n + rows))
        n += rows


def consume(place: Place, life: int) -> None:
    """Writes down what it takes: its own number, how many rows, and of each its number, slot and sequence."""
    rb, file = place.open(), os.open(place.taken, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while True:
        try:
            batch, info = rb.sample(BATCH, return_info=True, timeout=0.05)
        except TimeoutError:
            if place.is_over.exists():
                return
            continue
        numbers = [life, len(batch), *batch.tolist(), *info["index"].tolist(), *info["generation"].tolist()]
        os.write(file, struct.pack(f"{len(numbers)}q", *numbers).ljust(RECORD, b"\0"))


class Taken(NamedTuple):
    """A batch that was taken."""

    consumer: int
    rows: list[int]
    slots: list[int]
    sequences: list[int]


def taken(place: Place) -> list[Taken]:
    data = place.taken.read_bytes()
    assert len(data) % RECORD == 0
    found = []
    for at in range(0, len(data), RECORD):
        life, n = struct.unpack_from("2q", data, at)
        assert n == BATCH
        of_rows = [list(struct.unpack_from(f"{n}q", data, at + 16 + 8 * n * i)) for i in range(3)]
        found.append(Taken(life, *of_rows))
    return found


class Jobs:
    """Producers and consumers in children, some of which are killed and replaced. Each life has a number."""

    def __init__(self, place: Place, spoil: Callable[[], None]) -> None:
        self._place, self._spoil, self._lives = place, spoil, 0
        self.pids = [self._start(i) for i in range(PRODUCERS + CONSUMERS)]
        self.killed_consumers = 0

    def _start(self, i: int) -> int:
        self._lives += 1
        work = functools.partial(produce if i < PRODUCERS else consume, self._place, self._lives)

        def spoiled() -> None:
            self._spoil()
            work()

        return fork(spoiled)

    def kill(self, which: list[int]) -> None:
        for i in which:
            os.kill(self.pids[i], signal.SIGKILL)
        for i in which:
            pid, self.pids[i] = self.pids[i], 0
            assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "it ended by itself"
            self.killed_consumers += i >= PRODUCERS

    def replace(self, which: list[int]) -> None:
        self.kill(which)
        for i in which:
            self.pids[i] = self._start(i)

    def finish(self) -> None:
        """Producers are killed, consumers take what is left and end."""
        self.kill(list(range(PRODUCERS)))
        self._place.is_over.touch()
        for i in range(PRODUCERS, len(self.pids)):
            pid, self.pids[i] = self.pids[i], 0
            assert os.waitpid(pid, 0)[1] == 0, "it failed"

    def close(self) -> None:
        for pid in filter(None, self.pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def run(place: Place, kills: int, spoil: Callable[[], None] = lambda: None) -> tuple[list[Taken], ReplayBuffer, int]:
    """Runs and kills them; returns what was taken, the rest included, the buffer, and how many rows may be lost."""
    jobs, rng = Jobs(place, spoil), random.Random(kills)
    try:
        rb = place.open()
        assert comes(lambda: rb.storage.initialized and place.taken.exists())
        done = 0
        while done < kills:
            written, size = rb.write_count, place.taken.stat().st_size
            assert comes(lambda then=written: rb.write_count > then), "who writes stands"
            assert comes(lambda then=size: place.taken.stat().st_size > then + RECORD), "who samples stands"
            which = rng.choice([[0], [1], [3], [4], [5], [0, 1], [3, 4], [0, 3], [1, 4, 5], list(range(6))])
            jobs.replace(which)
            done += len(which)
        jobs.finish()
    finally:
        jobs.close()
    found = taken(place)
    while left := rb.stats().waiting:
        batch, info = rb.sample(left, return_info=True, timeout=10)
        found.append(Taken(0, batch.tolist(), info["index"].tolist(), info["generation"].tolist()))
    return found, rb, jobs.killed_consumers * BATCH


def check_order(found: list[Taken], in_lane: int) -> None:
    """The rows of a lane come in their order: of each producer, in a lane, and of each consumer."""
    rows: dict[int, dict[int, int]] = defaultdict(dict)
    newest: dict[tuple[int, int], int] = {}
    for batch in found:
        for row, slot, sequence in zip(batch.rows, batch.slots, batch.sequences, strict=True):
            lane = slot // in_lane
            assert sequence % in_lane == slot % in_lane
            assert sequence > newest.get((batch.consumer, lane), -1), "not in the order of the lane"
            newest[batch.consumer, lane] = sequence
            assert rows[lane].setdefault(sequence, row) == row, "two rows with one number"
    last: dict[tuple[int, int], int] = {}
    for lane, of_lane in rows.items():
        for _, row in sorted(of_lane.items()):
            assert row > last.get((lane, row >> 32), -1), "not in the order in which it was written"
            last[lane, row >> 32] = row


def check_each_once(place: Place, kills: int, spoil: Callable[[], None] = lambda: None) -> None:
    found, rb, may_be_lost = run(place, kills, spoil)
    rows = [row for batch in found for row in batch.rows]
    assert len(set(rows)) == len(rows), "a row twice"
    check_order(found, rb.storage.lanes.store.lane_capacity)
    lost = rb.write_count - len(rows)
    assert 0 <= lost <= may_be_lost
    # What a producer has published has no holes but what was lost with a consumer.
    newest: dict[int, int] = {}
    for row in rows:
        newest[row >> 32] = max(newest.get(row >> 32, 0), row & 0xFFFFFFFF)
    assert sum(n + 1 for n in newest.values()) - len(rows) <= lost
    assert rb.stats().missed == 0


@KILLS
def test_killed_producers_and_consumers_leave_each_row_handed_out_once(
    tmp_path: Path, kills: int, lanes: int | None
) -> None:
    check_each_once(Place(tmp_path, lanes, "wait"), kills)


@KILLS
def test_killed_users_of_a_queue_that_overwrites_get_no_row_twice_and_the_others_are_counted(
    tmp_path: Path, kills: int, lanes: int | None
) -> None:
    place = Place(tmp_path, lanes, "overwrite")
    found, rb, may_be_lost = run(place, kills)
    rows = [row for batch in found for row in batch.rows]
    assert len(set(rows)) == len(rows), "a row twice"
    check_order(found, rb.storage.lanes.store.lane_capacity)
    assert 0 <= rb.write_count - rb.stats().missed - len(rows) <= may_be_lost


def take_without_a_turn() -> None:
    QueueSampler._begin_turn = lambda self, storage, lanes: None  # type: ignore[method-assign]
    QueueSampler._end_turn = lambda self, storage, queue: None  # type: ignore[method-assign]


def hand_out_before_reading() -> None:
    take = QueueSampler._draw_ahead

    def early(self: QueueSampler, storage: object, n: int) -> object:
        draw = take(self, storage, n)  # type: ignore[arg-type]
        draw.taken(True)  # type: ignore[misc]
        draw.taken = None
        comes(lambda: storage.lanes.queue.total_room < BATCH, 0.05)  # type: ignore[attr-defined]
        return draw

    QueueSampler._draw_ahead = early  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("mistake", [take_without_a_turn, hand_out_before_reading])
def test_a_mistake_of_who_takes_is_found(tmp_path: Path, mistake: Callable[[], None]) -> None:
    found = "a row twice|two rows with one number|not in the order|^assert 0 <= "
    if mistake is take_without_a_turn:
        found += "|it ended by itself"  # as two of them wanted the turn of one
    with pytest.raises(AssertionError, match=found):
        check_each_once(Place(tmp_path, None, "wait"), 200, mistake)
