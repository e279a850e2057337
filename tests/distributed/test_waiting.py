"""How long calls wait for shards that do not answer, by a clock that only waiting moves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distributed.shards import Link, client, rows, whole
from engram.data import PrioritizedSampler, RandomSampler
from engram.distributed import ReplayShard, batches, local, sharded
from engram.distributed import client as shard_client
from engram.distributed.client import PendingCall
from engram.errors import ShardUnavailableError

pytestmark = pytest.mark.usefixtures("lock_order")

TIMEOUT, ON_ITS_WAY = 1.0, 0.005


class Clock:
    """Time that passes while somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    new = Clock()
    for module in (batches, local, sharded, shard_client):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=new.monotonic, sleep=new.sleep))
    return new


class _Silence(PendingCall):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def result(self, timeout: float) -> Any:
        self._clock.sleep(timeout)
        raise TimeoutError

    def has_come(self) -> bool:
        return False


class _LateAnswer(PendingCall):
    """An answer that takes a while on its way."""

    def __init__(self, clock: Clock, answer: PendingCall) -> None:
        self._clock, self._answer, self._comes = clock, answer, clock.now + ON_ITS_WAY

    def result(self, timeout: float) -> Any:
        left = max(0.0, self._comes - self._clock.now)
        self._clock.sleep(min(left, timeout))
        if timeout < left:
            raise TimeoutError
        return self._answer.result(timeout)

    def has_come(self) -> bool:
        return self._clock.now >= self._comes


class QuietLink(Link):
    """A link whose shard may stop to answer, without an error: as one of a node that is gone."""

    def __init__(self, shard: ReplayShard, clock: Clock) -> None:
        super().__init__(shard)
        self.is_quiet, self._clock = False, clock

    def call(self, method: str, *arguments: Any, answer_bytes: int = 0) -> PendingCall:
        if self.is_quiet:
            return _Silence(self._clock)
        return _LateAnswer(self._clock, super().call(method, *arguments))


def buffer(clock: Clock, n: int = 3, kind: Callable[[], Any] = RandomSampler) -> tuple[list[QuietLink], Any]:
    """Shards with 50 rows each, and a client that has drawn from them."""
    links = [QuietLink(ReplayShard(400, lanes=4, idle=1e9, timeout=0.0, sampler=kind()), clock) for _ in range(n)]
    for k in range(n):
        writer = client(links, sampler=kind(), timeout=TIMEOUT)
        writer.extend(rows(100 * k, 100 * k + 50))
        writer.flush()
    rb = client(links, sampler=kind(), timeout=TIMEOUT, batches_per_call=4)
    rb.sample()
    return links, rb


def by_priority() -> PrioritizedSampler:
    return PrioritizedSampler(None, 1.0, 1.0)


@pytest.mark.parametrize("kind", [RandomSampler, by_priority])
@pytest.mark.parametrize("quiet", [(0,), (2,), (0, 1)])
def test_batches_come_from_the_other_shards_within_the_timeout(clock: Clock, quiet: tuple[int, ...], kind: Any) -> None:
    links, rb = buffer(clock, kind=kind)
    for k in quiet:
        links[k].is_quiet = True
    for _ in range(40):
        before = clock.now
        numbers = whole(rb.sample())
        assert len(numbers) == 16 and clock.now - before <= TIMEOUT
    assert not {int(n) // 100 for n in numbers} & set(quiet) and rb.stats().away == quiet
    before = clock.now
    rb.sample()
    assert clock.now - before <= 2 * ON_ITS_WAY  # it is waited for once


def test_what_writes_waits_as_long_as_it_is_told_and_says_for_whom(clock: Clock, caplog: Any) -> None:
    links, _ = buffer(clock)
    for link in links:
        link.place = ", on a node,"
    rb = client(links, timeout=TIMEOUT, extend_timeout=30.0)
    rb.extend(rows(300, 310))
    rb.flush()
    home = rb._producer.shard.number
    for link in links:
        link.is_quiet = True
    clock.now += 10.0  # where the next rows go has to be asked for
    for write in (lambda: rb.extend(rows(310, 320)), rb.flush, lambda: rb.extend(rows(320, 330)), rb.flush):
        caplog.clear()
        before = clock.now
        try:
            write()
        except ShardUnavailableError as error:
            assert f"shard {home}, on a node, does not answer" in str(error)
        else:
            assert write is not rb.flush
        assert clock.now - before == pytest.approx(30.0, abs=0.1)
        (said,) = (one.getMessage() for one in caplog.records)
        assert said.startswith(f"shard {home}, on a node, does not answer; waiting for it, 2")
    before = clock.now
    with pytest.raises(ShardUnavailableError):
        rb.sample()
    assert clock.now - before == pytest.approx(TIMEOUT, abs=0.1)


@pytest.mark.parametrize(
    "call",
    [
        lambda rb: rb.stats(),
        len,
        lambda rb: rb.sample(),
        lambda rb: rb.sample(32),
        lambda rb: rb.flush_priorities(),
        lambda rb: rb.update_priority(torch.arange(5), 1.0, torch.arange(5)),
    ],
    ids=["stats", "len", "sample", "sample of another size", "flush_priorities", "update_priority"],
)
@pytest.mark.parametrize("quiet", [(0,), (0, 1), (0, 1, 2)])
def test_no_call_waits_longer_than_the_timeout(clock: Clock, call: Any, quiet: tuple[int, ...]) -> None:
    links, rb = buffer(clock, kind=by_priority)
    for k in quiet:
        links[k].is_quiet = True
    for _ in range(5):
        rb.update_priority(torch.tensor([0, 400, 800]), 2.0, torch.zeros(3, dtype=torch.int64))
        before = clock.now
        try:
            call(rb)
        except ShardUnavailableError:
            assert len(quiet) == 3
        assert clock.now - before <= (TIMEOUT if len(quiet) < 3 else TIMEOUT + 0.1)


def test_a_client_that_begins_while_a_shard_is_away_draws_from_the_others(clock: Clock) -> None:
    links, _ = buffer(clock)
    links[0].is_quiet = True
    rb = client(links, timeout=TIMEOUT)
    before = clock.now
    assert bool((whole(rb.sample()) >= 100).all()) and clock.now - before <= TIMEOUT


def test_writing_waits_for_its_shard_no_longer_than_the_timeout(clock: Clock) -> None:
    links, _ = buffer(clock)
    rb = client(links, timeout=TIMEOUT)
    links[0].is_quiet = True
    for _ in range(20):
        before = clock.now
        try:
            rb.extend(rows(0, 10))
        except ShardUnavailableError:
            pass
        assert clock.now - before <= TIMEOUT + 0.1


def test_draws_do_not_wait_for_another_thread_that_writes(clock: Clock) -> None:
    _, rb = buffer(clock)
    holds, drawn, came_meanwhile = threading.Event(), threading.Event(), []

    def write() -> None:
        with rb._writing:  # as while its shard is away
            holds.set()
            came_meanwhile.append(drawn.wait(300))

    thread = threading.Thread(target=write)
    thread.start()
    holds.wait(300)
    try:
        assert len(whole(rb.sample())) == 16
    finally:
        drawn.set()
        thread.join()
    assert came_meanwhile == [True]


def test_producers_go_to_the_shards_in_turn_whichever_answers_first(clock: Clock) -> None:
    links, _ = buffer(clock)
    assert [len(link.shard) for link in links] == [50] * 3
