"""Producers that died: who went on with their work knows how many of their rows are in, and no late row comes after."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from contracts.waiting import NEVER, comes
from distributed.shards import LAYOUT, Link, client, read_all, rows, shard, whole
from engram.data import PrioritizedSampler
from engram.distributed import ReplayShard, pack, unpack
from engram.distributed import client as clients
from engram.distributed.client import PendingCall
from engram.store.layout import RowLayout


class _Unanswered(PendingCall):
    """A call that was carried out, whose answer comes when somebody waits for it."""

    def __init__(self, answer: PendingCall) -> None:
        self._answer = answer

    def result(self, timeout: float) -> Any:
        return self._answer.result(timeout)

    def has_come(self) -> bool:
        return False


class SlowLink(Link):
    def call(self, method: str, *arguments: Any, answer_bytes: int = 0) -> PendingCall:
        return _Unanswered(super().call(method, *arguments))

    @property
    def extends(self) -> int:
        return self.calls.count("extend")


def test_the_rows_of_a_producer_that_died_are_counted() -> None:
    link = Link(shard())
    client([link], producer="one").extend(rows(0, 30))
    other = client([link])
    assert other.end_producer("one") == 30 == other.end_producer("one")
    assert link.shard.facts().producers == () and other.end_producer("nobody") == 0


def test_a_row_that_was_on_its_way_when_its_producer_was_ended_does_not_come_in() -> None:
    link = Link(shard())
    late = client([link], producer="one")
    late.extend(rows(0, 5))
    one = link.shard.join(link.shard.incarnation, "one")
    assert client([link]).end_producer("one") == 5
    answer = link.shard.extend(link.shard.incarnation, "one", one.number, 5, pack(LAYOUT, rows(5, 9)))
    assert not answer.in_force and answer.rows == 5
    assert read_all(link.shard) == list(range(5))


def test_ending_a_producer_is_asked_again_where_the_answer_was_lost() -> None:
    link = Link(shard())
    client([link], producer="one").extend(rows(0, 7))
    fates = iter(["answer", "call"])
    link.lose = lambda method: next(fates, None) if method == "end_producer" else None
    assert client([link]).end_producer("one") == 7


def test_a_client_draws_what_another_one_wrote_first() -> None:
    links = [Link(ReplayShard(400, lanes=4, idle=1e9, timeout=0.0)) for _ in range(2)]  # without a layout yet
    learner = client(links)
    assert len(learner) == 0
    client(links).extend(rows(0, 30))
    assert bool((whole(learner.sample()) < 30).all())


def test_rows_that_come_faster_than_answers_are_sent_together_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_LONGEST_HELD", 1e6)
    link = SlowLink(shard())
    rb = client([link])
    index = [rb.extend(rows(k, k + 5)) for k in range(0, 50, 5)]
    assert link.extends == 2 and rb._producer.unacknowledged == 45  # the first answer says how many may be on their way
    rb.flush()
    assert link.extends == 3 and read_all(link.shard) == torch.cat(index).tolist() == list(range(50))


def test_a_call_has_no_more_rows_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_LONGEST_HELD", 1e6)
    monkeypatch.setattr(clients, "_MOST_HELD", 20 * LAYOUT.payload_bytes)
    link = SlowLink(shard(4000))
    rb = client([link])
    for start, stop in [(0, 5), (5, 10), (10, 24), (24, 25), (25, 60), (60, 65)]:
        rb.extend(rows(start, stop))
    assert link.extends == 4  # the first two, two together, and the large one, behind which the last one waits
    rb.flush()
    assert read_all(link.shard) == list(range(65))


def sampler() -> PrioritizedSampler:
    return PrioritizedSampler(None, 1.0, 1.0, eps=0.0)


def priorities(link: Link) -> list[float]:
    return link.shard._sampler.priorities(torch.arange(len(link.shard)), storage=link.shard._storage).tolist()


def test_rows_that_are_held_and_sent_together_have_the_priorities_that_they_came_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clients, "_LONGEST_HELD", 1e6)
    link = SlowLink(shard(sampler=sampler()))
    rb = client([link], sampler=sampler())
    for k in range(0, 50, 5):
        rb.extend(rows(k, k + 5), priority=0.1 * k if k % 2 else None)
    rb.flush()
    assert link.extends == 3
    assert priorities(link) == pytest.approx([0.1 * k if k % 2 else 1.0 for k in range(0, 50, 5) for _ in range(5)])


def test_priorities_are_sent_behind_the_held_rows_that_they_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_LONGEST_HELD", 1e6)
    link = SlowLink(shard(sampler=sampler()))
    rb = client([link], sampler=sampler())
    for k in range(0, 50, 5):
        rb.update_priority(rb.extend(rows(k, k + 5)), 0.5)
    rb.flush()
    assert priorities(link) == [0.5] * 50


def test_rows_that_are_held_are_sent_though_nobody_calls() -> None:
    link = SlowLink(shard())
    rb = client([link])
    for k in range(0, 50, 5):
        rb.extend(rows(k, k + 5))
    assert comes(lambda: len(link.shard) == 50)
    assert read_all(link.shard) == list(range(50))


def test_rows_of_a_producer_that_is_slower_than_answers_are_not_held() -> None:
    link = Link(shard())
    rb = client([link])
    for k in range(0, 50, 5):
        rb.extend(rows(k, k + 5))
        assert len(link.shard) == k + 5


def test_what_becomes_of_a_batch_after_it_was_written_does_not_change_its_rows() -> None:
    batch = TensorDict({"n": torch.arange(6), "wide": torch.arange(6.0).unsqueeze(1).repeat(1, 2000)}, [6])
    layout = RowLayout.of(batch, 1)  # large rows, which travel leaf by leaf
    link = Link(ReplayShard(400, lanes=1, idle=1e9, timeout=0.0))
    rb = client([link])
    rb.extend(batch)
    link.lose = lambda method: "call" if method == "extend" else None
    rb.extend(batch)
    batch["n"].zero_()
    batch["wide"].zero_()
    link.lose = lambda method: None
    rb.flush()
    taken = link.shard.take(link.shard.incarnation, torch.zeros(12, dtype=torch.int64), torch.arange(12))
    came = unpack(layout, taken.block)
    assert came["n"].tolist() == [*range(6)] * 2 and torch.equal(came["wide"][:, 7], came["n"].float())


def test_rows_go_on_in_a_new_life_of_the_shard_that_another_call_has_noticed() -> None:
    link = Link(shard())
    rb = client([link])
    rb.extend(rows(0, 10))
    rb.flush()
    link.end()
    link.shard = shard()  # made anew on another machine, without its rows
    with pytest.warns(RuntimeWarning, match="came back without 10 rows"):
        rb._shards[0].forget()  # as another thread's call finds out
        rb._shards[0].await_presence(time.monotonic() + NEVER)
    rb.extend(rows(10, 20))
    rb.flush()
    assert read_all(link.shard) == list(range(10, 20))
    link.end()
    link.shard = shard()
    with pytest.warns(RuntimeWarning, match="came back without 10 rows"):
        rb._shards[0].forget()
        rb._shards[0].await_presence(time.monotonic() + NEVER)
    rb.close()  # which leaves a tenancy that this life does not know
