"""A producer that has filled its shard moves on to another one: all have rows, once, in order, and never across."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.tiers import in_quick
from contracts.waiting import NEVER
from distributed.shards import Link, client, read_all, rows, shard, whole, write
from engram.data import PrioritizedSampler, SliceSampler
from engram.distributed.client import ShardClient
from engram.distributed.local import LocalProducer
from engram.errors import ShardGoneError, ShardUnavailableError

SHARDS, CAPACITY = 4, 120
LOCAL = pytest.mark.parametrize("local", [False, True])


def links(path: Path | None = None, **settings: Any) -> list[Link]:
    folders = [{} if path is None else {"scratch_dir": path / str(k)} for k in range(SHARDS)]
    return [Link(shard(CAPACITY, **folder, **copy.deepcopy(settings))) for folder in folders]


def stored(ls: list[Link]) -> list[list[int]]:
    return [sorted(read_all(link.shard)) for link in ls]


def all_of(ls: list[Link]) -> list[int]:
    return sorted(n for one in stored(ls) for n in one)


@LOCAL
@pytest.mark.parametrize("piece", in_quick([7, 64, CAPACITY, 3 * CAPACITY + 5], [64, 3 * CAPACITY + 5]))
def test_one_alone_fills_all_shards_and_then_replaces_the_oldest_rows(tmp_path: Path, piece: int, local: bool) -> None:
    ls, end = links(tmp_path if local else None), 11 * CAPACITY
    rb = client(ls, local=[local] * SHARDS)
    for start in range(0, end, piece):
        n = min(end, start + piece)
        index = rb.extend(rows(start, n))
        assert len(index) == n - start and len(index.unique()) == min(n - start, SHARDS * CAPACITY)
        rb.flush()
        assert all_of(ls) == list(range(max(0, n - SHARDS * CAPACITY), n)) and rb.stats().accepted == n
    if local:
        assert not any("extend" in link.calls for link in ls)


def test_the_index_is_that_of_the_rows_in_whichever_shard_they_are() -> None:
    ls = links()
    rb = client(ls)
    index = torch.cat([rb.extend(rows(k, k + 50)) for k in range(0, SHARDS * CAPACITY - 30, 50)])
    rb.flush()
    batch = rb.sample(512)
    assert torch.equal(batch["index"], index[batch["n"]])


def test_producers_that_have_a_shard_each_stay_there() -> None:
    ls = links()
    writers = [client(ls) for _ in ls]
    for k in range(0, 5 * CAPACITY, 10):
        for number, writer in enumerate(writers):
            writer.extend(rows(1000 * number + k, 1000 * number + k + 10))
    for writer in writers:
        writer.flush()
    assert all({n // 1000 for n in one} == {one[0] // 1000} and len(one) == CAPACITY for one in stored(ls))


def test_those_that_are_fewer_than_the_shards_fill_all_and_share_none() -> None:
    ls = links()
    writers = [client(ls) for _ in range(SHARDS - 1)]
    for k in range(0, 4 * CAPACITY, 10):
        for number, writer in enumerate(writers):
            writer.extend(rows(1000 * number + k, 1000 * number + k + 10))
            writer.flush()
            assert all(len(link.shard.facts().producers) <= 1 for link in ls)
    assert len(all_of(ls)) == SHARDS * CAPACITY


def test_a_shard_that_was_filled_more_often_keeps_its_newer_rows_until_the_others_were_as_often() -> None:
    ls = links()[:2]
    first = client(ls).producing_as("first")
    for k in range(0, 3 * CAPACITY, 10):
        first.extend(rows(10_000 + k, 10_000 + k + 10))
    first.close()
    often = [len(one) > 0 for one in stored(ls)].index(True)
    rb = client(ls)
    for k in range(0, 3 * CAPACITY, 10):
        rb.extend(rows(k, k + 10))
    rb.flush()
    assert stored(ls)[1 - often] == list(range(2 * CAPACITY, 3 * CAPACITY))
    assert stored(ls)[often] == list(range(10_000 + 2 * CAPACITY, 10_000 + 3 * CAPACITY))
    rb.extend(rows(3 * CAPACITY, 4 * CAPACITY))
    rb.flush()
    assert all_of(ls) == list(range(2 * CAPACITY, 4 * CAPACITY))


def test_one_with_a_name_of_its_choice_stays_so_that_its_count_is_in_one_shard() -> None:
    ls = links()
    rb = client(ls).producing_as("it")
    for k in range(0, 3 * CAPACITY, 10):
        rb.extend(rows(k, k + 10))
    rb.flush()
    assert rb.rows_in() == 3 * CAPACITY and all_of(ls) == list(range(2 * CAPACITY, 3 * CAPACITY))


@LOCAL
@pytest.mark.parametrize("piece", in_quick([7, 64, 3 * CAPACITY + 5], [64, 3 * CAPACITY + 5]))
def test_one_with_a_name_fills_all_shards_where_nobody_is_to_continue_its_work(
    tmp_path: Path, piece: int, local: bool
) -> None:
    ls, end = links(tmp_path if local else None), 11 * CAPACITY
    rb = client(ls, local=[local] * SHARDS).producing_as("it", moves_on=True)
    for start in range(0, end, piece):
        n = min(end, start + piece)
        rb.extend(rows(start, n))
        rb.flush()
        number, before = rb.stint()
        assert rb.rows_in() == n and 0 <= n - before <= CAPACITY and number >= (before > 0)
        assert all_of(ls) == list(range(max(0, n - SHARDS * CAPACITY), n)) and sum(producers(ls)) == 1
    rb.close()
    assert client(ls).end_producer("it", 0) == end and sum(producers(ls)) == 0


@pytest.mark.parametrize("seed", in_quick(range(12), range(4)))
def test_the_rows_of_a_named_one_that_moves_on_are_counted_wherever_it_died(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    local = seed % 2 == 1
    ls = links(tmp_path)

    def fate(method: str) -> str | None:
        return rng.choice(["call", "answer"]) if rng.random() < 0.1 else None

    for link in ls:
        link.lose = fate
    rb = client(ls, local=[local] * SHARDS, timeout=NEVER).producing_as("it", moves_on=True)
    other = client(ls, timeout=NEVER)
    written, reported, stint = 0, 0, (0, 0)
    for _ in range(rng.randrange(1, 60)):
        n = rng.choice([1, 7, 30, CAPACITY, 3 * CAPACITY])
        rb.extend(rows(written, written + n))
        written += n
        if rng.random() < 0.2:
            rb.flush()
            reported, stint = rb.rows_in(), rb.stint()
            assert reported == written
        if not local and rng.random() < 0.1:
            other.extend(rows(100_000, 100_007))
    others = other.stats().accepted
    other.close()
    for producer in (rb._producer, rb._next, *rb._left):
        if isinstance(producer, LocalProducer):
            producer.release()  # as its death does
    for _ in range(2):  # who counts may have to ask again
        counted = stint[1] + client(ls, timeout=NEVER).end_producer("it", stint[0])
        for link in ls:
            link.lose = lambda method: None
        in_all = sum(link.shard.write_count for link in ls if link.shard is not None)
        assert reported <= counted == in_all - max(others, other.stats().accepted) <= written
    assert producers(ls) == [0] * SHARDS


def test_one_with_a_name_does_not_move_on_before_its_rows_are_in(tmp_path: Path) -> None:
    ls = links(tmp_path)
    rb = client(ls, timeout=0.2, extend_timeout=0.2).producing_as("it", moves_on=True)
    rb.extend(rows(0, CAPACITY - 10))
    rb.flush()
    ls[0].lose = lambda method: "call" if method in ("extend", "facts") else None
    rb.extend(rows(CAPACITY - 10, CAPACITY + 10))
    assert [len(one) for one in stored(ls)] == [CAPACITY - 10, 0, 0, 0] and rb.stint() == (0, 0)
    ls[0].lose = lambda method: None
    rb.flush()
    assert client(ls).end_producer("it", 0) == CAPACITY + 10


def test_each_stint_of_one_with_a_name_has_rows_of_it() -> None:
    ls = links()[:2]
    rb = client(ls).producing_as("it", moves_on=True)
    rb.rows_in()  # it has joined
    home = next(link for link in ls if link.shard is not None and link.shard.facts().producers)
    assert home.shard is not None
    write(home.shard, "another", rows(1000, 1000 + CAPACITY))
    rb._own_producer(1e12).shard.take_facts(home.shard.facts())
    rb.extend(rows(0, 10))
    rb.flush()
    assert rb.stint()[0] == 0 and client(ls).end_producer("it", 0) == 10


def test_no_slice_goes_over_the_end_of_a_stint() -> None:
    settings = {"sampler": SliceSampler(slice_len=5, traj_key="traj", strict_length=True)}
    ls = links(**settings)
    rb = client(ls, batch_size=50, **settings)
    for k in range(0, 7 * CAPACITY + 33, 11):
        rb.extend(rows(k, k + 11))
        if k > 50:
            numbers = whole(rb.sample()).reshape(-1, 5)
            assert bool((numbers.diff(dim=1) == 1).all())


def test_priorities_go_with_their_rows_into_the_next_shard() -> None:
    def sampler() -> PrioritizedSampler:
        return PrioritizedSampler(None, 1.0, 1.0, eps=0.0)

    ls = links(sampler=sampler())
    rb = client(ls, sampler=sampler())
    n = 3 * CAPACITY
    index = rb.extend(rows(0, n), priority=torch.arange(1.0, n + 1))
    rb.flush()
    found = [link.shard._sampler.priorities(torch.arange(CAPACITY), storage=link.shard._storage) for link in ls]
    assert torch.cat(found)[index].tolist() == list(range(1, n + 1))


@pytest.mark.parametrize("seed", range(8))
def test_each_row_is_in_once_and_in_order_where_calls_are_lost_and_shards_made_anew(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    ls = links(tmp_path)

    def fate(method: str) -> str | None:
        return rng.choice(["call", "answer"]) if rng.random() < 0.1 else None

    for link in ls:
        link.lose = fate
    rb = client(ls, timeout=NEVER)
    written, most = 0, SHARDS * CAPACITY
    while written < 3 * most:
        n = rng.choice([1, 7, 30, CAPACITY])
        rb.extend(rows(written, written + n))
        written += n
        if rng.random() < 0.1:
            k = rng.randrange(SHARDS)
            ls[k].end()
            ls[k].shard = shard(CAPACITY, scratch_dir=tmp_path / str(k))
    rb.flush()
    for link in ls:
        link.lose = lambda method: None
    there = [read_all(link.shard) for link in ls]
    numbers = sorted(n for one in there for n in one)
    assert len(set(numbers)) == len(numbers) and rb.stats().accepted == written
    # A shard that did not answer at the end of a stint keeps what it had for another round.
    assert numbers[-CAPACITY:] == list(range(written - CAPACITY, written))
    assert all(len(one) in (0, CAPACITY) for one in there) and sum(map(bool, there)) > 1


def test_while_the_other_shards_are_away_it_stays_and_moves_on_when_they_are_back() -> None:
    ls = links()
    rb = client(ls, timeout=0.2)
    rb.extend(rows(0, 10))
    for link in ls[1:]:
        link.lose = lambda method: "call"
    for k in range(10, 2 * CAPACITY, 10):
        rb.extend(rows(k, k + 10))
    rb.flush()
    assert stored(ls)[0] == list(range(CAPACITY, 2 * CAPACITY))
    for link in ls[1:]:
        link.lose = lambda method: None
    for k in range(2 * CAPACITY, 6 * CAPACITY, 10):
        rb.extend(rows(k, k + 10))
    rb.flush()
    assert all(len(one) == CAPACITY for one in stored(ls))


def test_rows_for_a_shard_that_went_away_go_in_when_it_is_back_though_others_were_written_since(tmp_path: Path) -> None:
    ls = links(tmp_path)
    rb = client(ls, timeout=0.2, extend_timeout=0.2)
    rb.extend(rows(0, CAPACITY - 10))
    rb.flush()
    ls[0].lose = lambda method: "call" if method in ("extend", "leave", "facts") else None
    rb.extend(rows(CAPACITY - 10, CAPACITY + 10))
    assert rb.stats().unacknowledged and stored(ls)[1]
    with pytest.raises(ShardUnavailableError):
        rb.flush()
    rb.extend(rows(CAPACITY + 10, CAPACITY + 20))
    ls[0].lose = lambda method: None
    rb.flush()
    assert all_of(ls) == list(range(CAPACITY + 20)) and rb.stats().unacknowledged == 0


def test_it_does_not_go_back_to_a_shard_that_it_could_not_leave_yet(tmp_path: Path) -> None:
    ls = links(tmp_path)[:2]
    rb = client(ls, timeout=0.2, extend_timeout=0.2)
    rb.extend(rows(0, CAPACITY - 10))
    rb.flush()
    home = next(link for link in ls if len(link.shard))
    home.lose = lambda method: "call" if method == "leave" else None
    for k in range(CAPACITY - 10, 3 * CAPACITY, 10):
        rb.extend(rows(k, k + 10))
    home.lose = lambda method: None
    rb.flush()
    assert all_of(ls) == [*range(CAPACITY), *range(2 * CAPACITY, 3 * CAPACITY)]
    assert rb.stats().accepted == 3 * CAPACITY and len(home.shard.facts().producers) == 0


def test_a_call_whose_rows_go_to_several_shards_does_not_end_between_them() -> None:
    ls = links()[:2]
    rb = client(ls, timeout=0.2, extend_timeout=0.2)
    rb.extend(rows(0, CAPACITY - 10))
    rb.flush()
    for link in ls:
        link.lose = lambda method: "call" if method == "extend" else None
    rb.extend(rows(CAPACITY - 10, 4 * CAPACITY))  # the last rows follow others whose shard does not acknowledge them
    for link in ls:
        link.lose = lambda method: None
    rb.flush()
    assert all_of(ls) == [*range(CAPACITY), *range(3 * CAPACITY, 4 * CAPACITY)] and rb.stats().accepted == 4 * CAPACITY


def test_it_does_not_go_where_another_one_has_just_gone() -> None:
    ls = links()[:2]
    rb = client(ls)
    rb.extend(rows(0, CAPACITY))
    home, other = sorted(ls, key=lambda link: len(link.shard), reverse=True)

    def is_joined_first(method: str) -> None:
        if method == "admit":
            write(other.shard, "another", rows(900, 901))

    other.lose = is_joined_first
    rb.extend(rows(CAPACITY, CAPACITY + 10))
    rb.flush()
    assert read_all(other.shard) == [900] and len(home.shard.facts().producers) == 1
    assert "admit" in other.calls


def producers(ls: list[Link]) -> list[int]:
    """How many each shard knows."""
    return [len(link.shard.facts().producers) for link in ls]


def lost_once(link: Link, method: str, fate: str) -> None:
    """Of the next call of a method, the call or its answer is lost."""
    fates = iter([fate])
    link.lose = lambda called: next(fates, None) if called == method else None


@pytest.mark.parametrize("fate", ["call", "answer"])
@LOCAL
def test_a_shard_whose_answer_was_lost_does_not_count_who_began_elsewhere(
    tmp_path: Path, local: bool, fate: str
) -> None:
    ls = links(tmp_path if local else None)[:2]
    rb = client(ls, local=[local] * 2)
    lost_once(ls[0], "admit", fate)
    rb.extend(rows(0, 10))
    rb.extend(rows(10, 20))  # the lost answer is not waited for again
    assert stored(ls)[1] == list(range(20)) and producers(ls) == [0, 1]
    another = client(ls)
    another.extend(rows(900, 910))
    assert producers(ls) == [1, 1]
    calls = ls[0].calls.count("end_producer")
    for k in range(20, 2 * CAPACITY, 10):
        rb.extend(rows(k, k + 10))
    assert ls[0].calls.count("end_producer") == calls == 1 and producers(ls) == [1, 1]


@pytest.mark.parametrize("fate", ["call", "answer"])
def test_a_shard_whose_answer_was_lost_does_not_count_who_went_elsewhere(fate: str) -> None:
    ls = links()[:3]
    rb = client(ls)
    rb.extend(rows(0, CAPACITY))
    lost_once(ls[1], "admit", fate)
    rb.extend(rows(CAPACITY, CAPACITY + 10))
    rb.extend(rows(CAPACITY + 10, CAPACITY + 20))
    assert stored(ls)[2] == list(range(CAPACITY, CAPACITY + 20)) and producers(ls) == [0, 0, 1]
    for k in range(CAPACITY + 20, 5 * CAPACITY, 10):  # and it goes there when it is its turn
        rb.extend(rows(k, k + 10))
    rb.flush()
    assert all(len(one) == CAPACITY for one in stored(ls)) and sum(producers(ls)) == 1


def test_a_shard_that_admitted_it_and_then_went_away_forgets_it_when_it_is_back() -> None:
    ls = links()[:2]
    rb = client(ls, timeout=0.2, extend_timeout=0.2)
    rb.extend(rows(0, CAPACITY))
    home, other = sorted(ls, key=lambda link: len(link.shard), reverse=True)
    other.lose = lambda method: "call" if method in ("join", "end_producer") else None
    rb.extend(rows(CAPACITY, CAPACITY + 10))  # it was admitted, and cannot begin there
    assert producers([home, other]) == [1, 1] and len(other.shard) == 0
    other.lose = lambda method: "call" if method in ("join", "facts") else None
    rb.extend(rows(CAPACITY + 10, CAPACITY + 20))
    other.lose = lambda method: None
    for k in range(CAPACITY + 20, CAPACITY + 60, 10):  # of which the first ones greet it
        rb.extend(rows(k, k + 10))
    assert producers([home, other]) == [1, 0]


def test_ending_one_that_moved_on_ends_it_also_where_it_was_admitted_since_the_shard_was_greeted() -> None:
    ls = links()[:2]
    learner = client(ls)
    assert len(learner) == 0 and producers(ls) == [0, 0]  # what it knows of them
    rb = client(ls).producing_as("it", moves_on=True)
    rb.extend(rows(0, CAPACITY))
    ls[1].shard.admit(ls[1].shard.incarnation, "it, stint 3", 9)  # it died before it wrote there
    assert learner.end_producer("it", 0) == CAPACITY and producers(ls) == [0, 0]


def test_one_that_was_admitted_and_never_joined_is_forgotten_when_it_closes() -> None:
    ls = links()[:2]
    rb = client(ls, timeout=0.2, extend_timeout=0.2)
    for link in ls:
        link.lose = lambda method: "call" if method == "join" else None
    with pytest.raises(ShardUnavailableError):
        rb.extend(rows(0, 10))
    assert producers(ls) == [1, 0]
    for link in ls:
        link.lose = lambda method: None
    rb.close()
    assert producers(ls) == [0, 0]


def test_how_many_rows_of_a_call_are_in_is_said_where_the_next_shard_has_ended_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ls = links(tmp_path)[:2]
    rb = client(ls, local=[True, True])
    rb.extend(rows(0, CAPACITY - 10))
    home, extend = rb._producer.shard.number, LocalProducer.extend

    def ends(self: LocalProducer, *arguments: Any) -> torch.Tensor:
        if self.shard.number != home:
            raise ShardUnavailableError("the shard has ended")
        return extend(self, *arguments)

    monkeypatch.setattr(LocalProducer, "extend", ends)
    with pytest.raises(ShardUnavailableError, match=r"has ended\. The first 10 of 30 steps were sent"):
        rb.extend(rows(CAPACITY - 10, CAPACITY + 20))
    monkeypatch.undo()
    rb.extend(rows(CAPACITY, CAPACITY + 20))
    assert all_of(ls) == list(range(CAPACITY + 20))


def test_rows_of_other_producers_fill_a_shard_too() -> None:
    ls = links()[:2]
    rb = client(ls)
    rb.extend(rows(0, 10))
    rb.flush()
    home, other = sorted(ls, key=lambda link: len(link.shard), reverse=True)
    write(home.shard, "another", rows(1000, 1000 + CAPACITY - 20))
    rb.extend(rows(10, 20))
    rb.flush()
    rb.extend(rows(20, 50))
    rb.flush()
    assert read_all(other.shard) == list(range(20, 50))


def test_what_a_shard_says_of_another_life_is_not_taken_for_this_one() -> None:
    link = Link(shard())
    one = ShardClient(link, 0)
    life = one.await_presence(NEVER).totals.incarnation
    link.shard.empty(life)
    one.take_facts(one.ask_facts().result(NEVER))
    assert one.is_awaited and one.totals.incarnation == life and one.is_present
    assert one.totals.incarnation == link.shard.incarnation


def test_waiting_ends_where_a_shard_answers_and_rows_for_it_are_lost_each_time() -> None:
    ls = links()[:1]
    rb = client(ls, timeout=0.2, extend_timeout=0.2)
    rb.extend(rows(0, 10))
    rb.flush()
    ls[0].lose = lambda method: "call" if method == "extend" else None
    rb.extend(rows(10, 20))
    for call in (rb.flush, rb.close):
        with pytest.raises(ShardUnavailableError, match="shard 0 answers, and rows for it were lost"):
            call()
        rb.extend(rows(20, 30))


def test_rows_that_are_lost_with_a_shard_that_has_ended_are_told_once() -> None:
    ls = links()
    rb = client(ls, timeout=0.2, extend_timeout=0.2)
    rb.extend(rows(0, CAPACITY - 10))
    rb.flush()
    ls[0].lose = lambda method: "call" if method in ("extend", "leave", "facts") else None
    rb.extend(rows(CAPACITY - 10, CAPACITY + 10))
    ls[0].lose, ls[0].is_gone = lambda method: None, True
    ls[0].end()
    with pytest.raises(ShardGoneError):
        rb.flush()
    rb.extend(rows(CAPACITY + 10, CAPACITY + 20))
    rb.flush()
    assert sorted(read_all(ls[1].shard)) == list(range(CAPACITY, CAPACITY + 20))


def test_closing_after_moves_leaves_no_producer_behind() -> None:
    ls = links()
    rb = client(ls)
    for k in range(0, 6 * CAPACITY, 50):
        rb.extend(rows(k, k + 50))
    rb.close()
    assert [link.shard.facts().producers for link in ls] == [()] * SHARDS
    rb.extend(rows(6 * CAPACITY, 6 * CAPACITY + 10))
    rb.empty()
    assert all_of(ls) == []
    rb.extend(rows(0, 2 * CAPACITY))
    rb.flush()
    assert all_of(ls) == list(range(2 * CAPACITY))
