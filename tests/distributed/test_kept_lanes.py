"""Lanes that a shard keeps for producers that pause: whoever needs their room waits where nobody else has to."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distributed.shards import LAYOUT, Link, client, read_all, rows, shard, whole, write
from engram.data import PrioritizedSampler
from engram.distributed import ReplayShard, pack, producers, sharded, unpack
from engram.distributed import client as clients
from engram.distributed.blocks import Block
from engram.distributed.shard import Acknowledgement
from engram.errors import ShardUnavailableError

FIRST = 10_000  # the number of the first row of the producer that pauses
SHARE = pytest.mark.parametrize("share", [0.75, 0.875, 1.0, 2.5])


class Clock:
    """Time that passes while a client waits, for shards as well."""

    def __init__(self) -> None:
        self.now, self.waited = 1000.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now, self.waited = self.now + seconds, self.waited + seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    new = Clock()
    for module in (producers, clients, sharded):
        there = SimpleNamespace(monotonic=new.monotonic, sleep=new.sleep, time_ns=time.time_ns)
        monkeypatch.setattr(module, "time", there)
    return new


def full_shard(pausing: int = 2, **settings: Any) -> ReplayShard:
    """A full one of 8 lanes, which keeps as many of them as it may."""
    new = shard(800, **settings)
    assert new.capacity == 800 and new._lanes.store.lanes == 8
    write(new, "old", rows(20_000, 20_800))
    for k in range(pausing):
        assert write(new, f"pauses {k}", rows(FIRST + k, FIRST + k + 1)).place is not None
    return new


def send(to: ReplayShard, n: int, first: int = 0) -> Acknowledgement:
    """Sends rows `first` to `n` - 1 of one producer."""
    tenancy = to.join(to.incarnation, "large")
    return to.extend(
        to.incarnation, "large", tenancy.number, first, pack(LAYOUT, rows(first, n)), None, None, asks_slots=True
    )


def rows_below(n: int, of: ReplayShard) -> set[int]:
    """The numbers of the rows of a shard that are less than n."""
    return {number for number in read_all(of) if number < n}


@SHARE
def test_an_extend_that_needs_the_room_of_kept_lanes_is_sent_again(clock: Clock, share: float) -> None:
    s = full_shard()
    n = int(share * s.capacity) + 1
    before = s.totals(s.incarnation)
    answer = send(s, n)
    assert answer.in_force and answer.rows == 0 and answer.wait == producers.LANE_KEPT
    assert s.totals(s.incarnation) == before  # nobody has waited, and nothing was written
    clock.sleep(answer.wait)
    answer = send(s, n)
    assert answer.rows == n and answer.wait is None and answer.slots is not None
    assert len(answer.slots.unique()) == len(rows_below(n, s)) == min(n, s.capacity)


def test_one_that_needs_none_of_them_does_not_wait(clock: Clock) -> None:
    s = full_shard()
    assert send(s, 600).rows == 600
    assert {FIRST, FIRST + 1, *range(600)} <= set(read_all(s))


def test_the_own_kept_lane_is_no_hindrance(clock: Clock) -> None:
    s = full_shard(pausing=0)
    assert send(s, 1).place is not None
    assert send(s, 801, first=1).rows == 801
    assert read_all(s) != [] and set(read_all(s)) == set(range(1, 801))


def test_while_one_waits_no_lanes_are_kept_anew(clock: Clock) -> None:
    s = full_shard(pausing=1)
    assert send(s, 800).wait == 1.0
    clock.sleep(0.9)
    assert write(s, "pauses 0", rows(FIRST + 5, FIRST + 9)).place is None
    assert write(s, "another", rows(30_000, 30_001)).place is None
    assert send(s, 800).rows == 800  # nobody's lane is kept any more
    assert write(s, "another", rows(30_001, 30_002)).place is not None


def test_the_rows_of_who_was_told_of_a_place_go_there_while_another_one_waits(clock: Clock) -> None:
    s = full_shard(pausing=0)
    place = write(s, "pauses", rows(FIRST, FIRST + 1)).place
    assert place is not None and send(s, 800).wait is not None
    clock.sleep(0.5)
    assert write(s, "pauses", rows(FIRST + 1, FIRST + 4)).wait is None
    slots = place.first_slot + (place.sequence + torch.arange(3)) % place.capacity
    numbers = whole(unpack(LAYOUT, Block(tuple(part.numpy() for part in s._storage.read_packed(slots).batch))))
    assert numbers.tolist() == [FIRST + 1, FIRST + 2, FIRST + 3]


def test_rows_that_come_behind_others_that_wait_are_sent_again_too(clock: Clock) -> None:
    s = full_shard()
    tenancy = s.join(s.incarnation, "large")
    late = pack(LAYOUT, rows(800, 803))
    with pytest.raises(ValueError, match="those between never came"):
        s.extend(s.incarnation, "large", tenancy.number, 800, late)
    send(s, 800)
    clock.sleep(5.0)
    answer = s.extend(s.incarnation, "large", tenancy.number, 800, late)
    assert answer.rows == 0 and answer.wait is not None and answer.in_force
    assert send(s, 800).rows == 800
    assert s.extend(s.incarnation, "large", tenancy.number, 800, late).rows == 803


def test_one_that_died_while_it_waited_hinders_nobody_for_long(clock: Clock) -> None:
    s = full_shard()
    assert send(s, 800).wait is not None
    clock.sleep(producers.LANE_KEPT + 0.5)
    assert write(s, "another", rows(0, 1)).place is None
    clock.sleep(producers.LANE_KEPT)
    assert write(s, "another", rows(1, 2)).place is not None
    assert s.leave(s.incarnation, "large", s.join(s.incarnation, "large").number) == 0
    assert s._producers._waiting == {}


def test_a_lane_whose_rows_could_not_be_appended_is_not_kept(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    s = full_shard(pausing=1)

    def fails(block: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(s, "_append", fails)
    with pytest.raises(MemoryError):
        write(s, "pauses 0", rows(FIRST + 1, FIRST + 2))
    monkeypatch.undo()
    assert send(s, 800).rows == 800 and len(rows_below(800, s)) == 800


@SHARE
def test_a_client_waits_and_its_index_is_that_of_the_rows(clock: Clock, share: float) -> None:
    link = Link(full_shard())
    rb = client([link], producer="large", timeout=30.0)
    n = int(share * 800) + 1
    index = rb.extend(rows(0, n))
    assert clock.waited == producers.LANE_KEPT and link.calls.count("extend") == 2
    rb.extend(rows(n, n + 5))
    rb.flush()
    assert len(index.unique()) == min(n, 800) and rb.stats().accepted == n + 5
    assert link.shard is not None and len(rows_below(n + 5, link.shard)) == min(n + 5, 800)


def test_priorities_come_with_the_rows_that_waited(clock: Clock) -> None:
    def sampler() -> PrioritizedSampler:
        return PrioritizedSampler(None, 1.0, 1.0, eps=0.0)

    link = Link(full_shard(sampler=sampler()))
    rb = client([link], producer="large", sampler=sampler(), timeout=30.0)
    index = rb.extend(rows(0, 800), priority=torch.arange(1.0, 801.0))
    rb.flush()
    assert link.shard is not None and link.calls.count("extend") == 2
    assert link.shard._sampler.priorities(index, storage=link.shard._storage).tolist() == list(range(1, 801))


def test_a_client_that_may_not_wait_so_long_keeps_the_rows_for_later(clock: Clock) -> None:
    link = Link(full_shard())
    rb = client([link], producer="large", timeout=0.5)
    rb.extend(rows(0, 800))
    assert rb.stats().unacknowledged == 800
    with pytest.raises(ShardUnavailableError, match="shard 0 answers, and rows for it need room that it keeps"):
        rb.flush()
    clock.sleep(producers.LANE_KEPT)
    rb.extend(rows(800, 805))
    rb.flush()
    assert link.shard is not None and len(rows_below(805, link.shard)) == 800
    assert rb.stats().accepted == 805
