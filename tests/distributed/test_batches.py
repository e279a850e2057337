"""Batches from several shards: as likely as from one buffer while these grow, as old as asked, by few calls."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from contracts.waiting import NEVER
from distributed.shards import LAYOUT, Link, client, rows, shard, whole, write
from engram.data import PrioritizedSampler, PrioritizedSliceSampler, RandomSampler, SliceSampler
from engram.data.replay_buffers.samplers import DrawTotals
from engram.distributed import Block, DrawnRows, ReplayShard, ShardFacts, ShardTotals, batches
from engram.distributed.batches import BatchStream
from engram.distributed.client import PendingCall, ShardClient, ShardLink
from engram.testing import chi_square

LEAST = 1e-4  # of the probability that counts deviate as far as they do
CAPACITY = 1 << 30


class _Pending(PendingCall):
    def __init__(self, clock: Clock, comes: float, answer: Callable[[], Any]) -> None:
        self._clock, self._comes, self._answer = clock, comes, answer

    def result(self, timeout: float) -> Any:
        self._clock.wait_until(min(self._comes, self._clock.now + timeout))
        if self._clock.now < self._comes:
            raise TimeoutError
        return self._answer()

    def has_come(self) -> bool:
        return self._clock.now >= self._comes


class Clock:
    """Time that passes when somebody waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def wait_until(self, then: float) -> None:
        self.now = max(self.now, then)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    new = Clock()
    monkeypatch.setattr(batches, "time", new)
    monkeypatch.setattr("engram.distributed.client.time", new)
    return new


class TimedShard(ShardLink):
    """A shard whose answers take a while; the generation of a row is the time of its draw, in nanoseconds.

    Attributes:
        held: how many rows it has, by the time; asked: how many rows were asked for in each call.
    """

    def __init__(self, clock: Clock, held: Callable[[float], int], takes: Callable[[], float]) -> None:
        self._clock, self._held, self._takes = clock, held, takes
        self._rng = torch.Generator().manual_seed(0)
        self.asked: list[int] = []

    def call(self, method: str, *arguments: Any, answer_bytes: int = 0) -> PendingCall:
        takes = self._takes()
        drawn = self._clock.now + takes / 2
        if method == "facts":
            facts = ShardFacts(LAYOUT.to_bytes(), CAPACITY, None, (), 0, self._totals(drawn))
            return _Pending(self._clock, self._clock.now, lambda: facts)
        n = arguments[1]
        self.asked.append(n)
        totals = self._totals(drawn)
        n = n if totals.rows else 0
        slots = torch.randint(max(1, totals.rows), (n,), generator=self._rng)
        block = Block((np.zeros((n, LAYOUT.payload_bytes), np.uint8),))
        answer = DrawnRows(block, slots, torch.full((n,), int(1e9 * drawn)), None, None, None, None, totals)
        return _Pending(self._clock, self._clock.now + takes, lambda: answer)

    def _totals(self, at: float) -> ShardTotals:
        n = self._held(at)
        return ShardTotals(7, n, n, DrawTotals(float(n)))


def stream(links: list[Any], batch_size: int = 64, sampler: Any = None, **settings: Any) -> BatchStream:
    shards = [ShardClient(link, k) for k, link in enumerate(links)]
    kind = RandomSampler() if sampler is None else sampler
    return BatchStream(shards, kind, batch_size, LAYOUT, **{"timeout": NEVER, **settings})


# ---- as likely as from one buffer ----
def ranks_of(numbers: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Where each number lies in the sum of the masses of all, from 0 to 1, evenly within each."""
    ends = mass.cumsum(0)
    return (ends[numbers] - mass[numbers] * torch.rand(len(numbers), dtype=torch.float64)) / ends[-1]


class TestWhileShardsGrow:
    """One of three shards grows a hundredfold; batches are of the rows that are there when they are asked for."""

    STEPS, ROWS, GROWS = 60, 40, 1

    def ranks(self, sampler: Callable[[], Any], mass: Callable[[torch.Tensor], torch.Tensor], unit: int = 1) -> Any:
        """Ranks of drawn rows, or of the first row of each slice, by the mass of every number that is there.

        Where draws are by priority, the mass of a row is its priority.
        """
        by_priority = isinstance(sampler(), PrioritizedSampler)
        links = [Link(shard(12_000, sampler=sampler())) for _ in range(3)]
        number = itertools.count(step=self.ROWS)

        def written() -> int:
            return sum(len(link.shard) for link in links)

        def grow(k: int, n: int) -> None:
            for _ in range(n):
                start = next(number)
                batch = rows(start, start + self.ROWS, start)
                write(links[k].shard, "a", batch, priority=mass(batch["n"]) if by_priority else None)

        for k, n in enumerate((2, 1, 4)):
            grow(k, n)
        rb = client(links, sampler=sampler(), batch_size=64, max_batch_age=0.0)
        ranks = []
        for _ in range(self.STEPS):
            grow(self.GROWS, 2)
            drawn = whole(rb.sample())[::unit]
            ranks.append(ranks_of(drawn, mass(torch.arange(written())).double()))
        assert len(links[self.GROWS].shard) > 100 * self.ROWS
        return torch.cat(ranks)

    def test_every_row_is_as_likely(self) -> None:
        ranks = self.ranks(RandomSampler, lambda n: torch.ones(len(n), dtype=torch.float64))
        assert chi_square(torch.histc(ranks, 40, 0, 1)) > LEAST

    def test_rows_are_drawn_in_proportion_to_priorities(self) -> None:
        ranks = self.ranks(
            lambda: PrioritizedSampler(None, 1.0, 1.0, eps=0.0), lambda n: (n % 5 + n // 1000 + 1).double()
        )
        assert chi_square(torch.histc(ranks, 40, 0, 1)) > LEAST

    @pytest.mark.parametrize("kind", [SliceSampler, PrioritizedSliceSampler])
    def test_every_start_of_a_slice_is_as_likely(self, kind: Any) -> None:
        prioritised = kind is PrioritizedSliceSampler

        def sampler() -> Any:
            if not prioritised:
                return SliceSampler(slice_len=4, traj_key="traj", weight="steps")
            return PrioritizedSliceSampler(None, 1.0, 1.0, eps=0.0, slice_len=4, traj_key="traj")

        ranks = self.ranks(
            sampler, lambda n: (n % self.ROWS <= self.ROWS - 4) * (n % 3 + 1.0 if prioritised else 1.0), unit=4
        )
        assert chi_square(torch.histc(ranks, 30, 0, 1)) > LEAST


def test_weights_are_those_of_one_buffer_with_all_rows() -> None:
    links = [Link(shard(400, sampler=PrioritizedSampler(None, 0.7, 0.5, eps=0.0))) for _ in range(3)]
    priorities = torch.rand(300, dtype=torch.float64) * 3 + 0.1
    for k, link in enumerate(links):
        write(link.shard, "a", rows(100 * k, 100 * k + 100), priority=priorities[100 * k : 100 * k + 100])
    rb = client(links, sampler=PrioritizedSampler(None, 0.7, 0.5, eps=0.0), batch_size=256)
    leaf, counts = priorities**0.7, torch.zeros(300)
    for _ in range(60):
        batch = rb.sample()
        numbers = whole(batch)
        counts += torch.bincount(numbers, minlength=300)
        expected = (leaf[numbers] / leaf.min()) ** -0.5
        torch.testing.assert_close(batch["priority_weight"].double(), expected, rtol=1e-4, atol=0)
    assert chi_square(counts, leaf) > LEAST


def test_batches_are_those_of_a_plain_loop_over_the_same_answers() -> None:
    """Of shards whose shares vary a hundredfold from answer to answer: which shard gives a row, and of which share."""
    sizes, shares = [7, 30, 12], [[5, 500], [40, 40], [300, 3]]

    class Fixed(ShardLink):
        def __init__(self, k: int) -> None:
            self.k, self.count = k, 0

        def call(self, method: str, *arguments: Any, answer_bytes: int = 0) -> PendingCall:
            share = shares[self.k][self.count % 2]
            totals = ShardTotals(7, share, share, DrawTotals(float(share)))
            if method == "facts":
                answer: Any = ShardFacts(LAYOUT.to_bytes(), 1000, None, (), 0, totals)
            else:
                self.count += 1
                n = sizes[self.k]
                block = Block((np.zeros((n, LAYOUT.payload_bytes), np.uint8),))
                slots = torch.full((n,), share)
                answer = DrawnRows(block, slots, slots, None, None, None, None, totals)
            return _Pending(Clock(), 0.0, lambda: answer)

    total = 40_000
    drawn = stream([Fixed(k) for k in range(3)], 50, max_batch_age=math.inf)
    got = torch.cat([drawn.next().flat_index for _ in range(total // 50)])
    rng, counts, heads = random.Random(5), [0, 0, 0], [0, 0, 0]
    left, plain = list(sizes), []
    for _ in range(total):
        now = [shares[k][heads[k] % 2] for k in range(3)]
        (k,) = rng.choices(range(3), now)
        plain.append(1000 * k + now[k])
        left[k] -= 1
        if not left[k]:
            heads[k], left[k] = heads[k] + 1, sizes[k]
    places = sorted({*plain, *got.tolist()})
    counts = [[some.count(place) for place in places] for some in (got.tolist(), plain)]
    assert len(places) == 5
    # Rows of an answer come together, so that counts vary more than those of rows by themselves: by less than this.
    assert max(abs(a - b) for a, b in zip(*counts, strict=True)) < 0.02 * total
    assert min(counts[0]) > 0


# ---- as old as asked ----
AGE = 0.1


def ages_of(
    clock: Clock, links: list[TimedShard], learner: Callable[[], float], n: int, **settings: Any
) -> tuple[torch.Tensor, float]:
    """The age of the oldest draw of each of n batches, and how long a batch was waited for on average; in seconds."""
    s = stream(links, **{"max_batch_age": AGE, **settings})
    ages, waited = [], 0.0
    for k in range(n):
        before = clock.now
        batch = s.next()
        waited += clock.now - before if k >= n // 4 else 0.0  # at first nobody knows the pace
        ages.append(clock.now - 1e-9 * float(batch.generation.min()))
        clock.now += learner()
    return torch.tensor(ages, dtype=torch.float64), waited / (n - n // 4)


class TestAges:
    TAKES = 0.004

    def links(self, clock: Clock, n: int, seed: int = 0) -> list[TimedShard]:
        rng = random.Random(seed)
        return [TimedShard(clock, lambda at: 10_000, lambda: self.TAKES * (0.5 + rng.random())) for _ in range(n)]

    @pytest.mark.parametrize("shards", [1, 5, 64])
    @pytest.mark.parametrize("batch", [0.0002, 0.003, 0.04, 0.3])
    def test_a_batch_is_no_older_than_asked_and_an_answer(self, clock: Clock, shards: int, batch: float) -> None:
        rng = random.Random(1)
        ages, _ = ages_of(
            clock, self.links(clock, shards), lambda: rng.expovariate(1 / batch), 1000 if shards < 64 else 300
        )
        assert float((ages <= AGE + 1.5 * self.TAKES).double().mean()) >= 0.999

    @pytest.mark.parametrize("shards", [1, 5, 64])
    @pytest.mark.parametrize(("batch", "most"), [(0.0005, 0.1), (0.003, 0.1), (0.03, 0.05)])
    def test_a_learner_seldom_waits(self, clock: Clock, shards: int, batch: float, most: float) -> None:
        rng = random.Random(1)
        _, waited = ages_of(clock, self.links(clock, shards), lambda: batch * (0.8 + 0.4 * rng.random()), 1000)
        assert waited < most * batch

    def test_after_a_pause_nothing_old_is_handed_out(self, clock: Clock) -> None:
        links, pauses = self.links(clock, 3), iter([0.001] * 200 + [60.0] + [0.001] * 50)
        ages, _ = ages_of(clock, links, lambda: next(pauses), 250)
        assert float(ages.max()) <= AGE + 1.5 * self.TAKES

    def test_of_age_0_every_batch_is_asked_for(self, clock: Clock) -> None:
        ages, _ = ages_of(clock, self.links(clock, 4), lambda: 0.01, 100, max_batch_age=0.0)
        assert float(ages.max()) <= 2 * self.TAKES

    def test_rows_of_any_age_are_used_where_that_is_asked(self, clock: Clock) -> None:
        links = self.links(clock, 2)
        ages, _ = ages_of(clock, links, lambda: 1.0, 400, max_batch_age=math.inf, batches_per_call=16)
        assert 10.0 < float(ages.max()) < 60.0

    @pytest.mark.parametrize("shards", [1, 5])
    def test_a_call_asks_for_what_the_learner_takes_in_that_time(self, clock: Clock, shards: int) -> None:
        links = self.links(clock, shards)
        ages_of(clock, links, lambda: 0.002, 1000)
        for link in links:
            expected = AGE / 0.002 * 64 / shards
            assert link.asked[0] < 130 / shards**0.5 and 0.5 * expected < link.asked[-1] < 1.4 * expected

    def test_no_call_asks_for_more_batches_than_the_hint_says(self, clock: Clock) -> None:
        (link,) = links = self.links(clock, 1)
        ages_of(clock, links, lambda: 0.0001, 500, batches_per_call=8)
        assert max(link.asked) == 8 * 64 and link.asked[0] == 64

    def test_the_first_calls_ask_for_little(self, clock: Clock) -> None:
        (link,) = links = self.links(clock, 1)
        ages_of(clock, links, lambda: 0.0001, 200, batches_per_call=20)
        assert [n // 64 for n in link.asked[:5]] == [1, 4, 16, 20, 20]

    def test_calls_do_not_grow_with_the_pace(self, clock: Clock) -> None:
        calls = []
        for batch in (0.001, 0.0001):
            links = self.links(clock, 16)
            began = clock.now
            ages_of(clock, links, lambda batch=batch: batch, int(1 / batch))
            calls.append(sum(len(link.asked) for link in links) / 16 / (clock.now - began))
        assert all(n < 2 / AGE for n in calls)  # a second, of each shard

    def test_answers_stay_small_where_rows_or_shards_are_many(self, clock: Clock, monkeypatch: Any) -> None:
        monkeypatch.setattr(batches, "_MOST_ANSWER", 20_000)
        (link,) = links = self.links(clock, 1)
        ages_of(clock, links, lambda: 0.0001, 500)
        assert max(link.asked) * (LAYOUT.payload_bytes + 16) <= 20_000
        monkeypatch.setattr(batches, "_MOST_BYTES", 20_000)
        links = self.links(clock, 8)
        ages_of(clock, links, lambda: 0.0001, 500)
        assert sum(max(link.asked) for link in links) * (LAYOUT.payload_bytes + 16) < 3 * 20_000


def test_a_shard_that_grows_gets_its_part_of_the_draws(clock: Clock) -> None:
    """With rounds of 32 batches, divided by the shares of two rounds before, it got 53 % for 68 % of the rows."""
    grows = TimedShard(clock, lambda at: 1000 + int(20_000 * (at - 100.0)), lambda: 0.004)
    links = [TimedShard(clock, lambda at: 10_000, lambda: 0.004), grows]
    s, part, parts, drawn = stream(links, max_batch_age=0.02), [], [], []
    for _ in range(400):
        drawn.append(float((s.next().flat_index >= CAPACITY).double().mean()))
        n = 1000 + int(20_000 * (clock.now - 100.0))
        parts.append(n / (n + 10_000))
        clock.now += 0.005
    part = [sum(drawn[i : i + 100]) / sum(parts[i : i + 100]) for i in range(0, 400, 100)]
    assert all(0.94 < one < 1.03 for one in part), part


def test_rows_of_a_shard_that_had_none_are_drawn_soon(clock: Clock) -> None:
    links = [TimedShard(clock, lambda at: 1000, lambda: 0.004),
             TimedShard(clock, lambda at: 0 if at < 101.0 else 3000, lambda: 0.004)]  # fmt: skip
    s = stream(links, max_batch_age=math.inf, batches_per_call=4)
    seen = None
    for _ in range(300):
        if bool((s.next().flat_index >= CAPACITY).any()) and seen is None:
            seen = clock.now
        clock.now += 0.01
    assert seen is not None and 101.0 < seen < 102.2


def test_only_shards_whose_rows_are_few_are_asked(clock: Clock) -> None:
    rng = random.Random(0)
    links = [TimedShard(clock, lambda at: 1000, lambda: 0.004 * rng.random()) for _ in range(64)]
    s = stream(links, 256, max_batch_age=math.inf, batches_per_call=32)
    for _ in range(400):
        s.next()
        clock.now += 0.01
    before, most = sum(len(link.asked) for link in links), 0
    for _ in range(100):
        now = sum(len(link.asked) for link in links)
        s.next()
        most = max(most, sum(len(link.asked) for link in links) - now)
        clock.now += 0.01
    assert sum(len(link.asked) for link in links) - before <= 100 * 64 / 32 and most < 32


@pytest.mark.parametrize("sampler", [RandomSampler, lambda: PrioritizedSampler(None, 1.0, 1.0)])
def test_a_shard_that_was_told_no_layout_yet_gives_nothing(sampler: Any) -> None:
    links = [Link(shard(sampler=sampler())), Link(ReplayShard(400, sampler=sampler()))]
    write(links[0].shard, "a", rows(0, 50))
    shards = [ShardClient(link, k) for k, link in enumerate(links)]
    numbers = BatchStream(shards, sampler(), 16, LAYOUT, timeout=NEVER).next().flat_index
    assert len(numbers) == 16 and bool((numbers < 400).all())


def test_an_error_of_a_shard_is_raised_and_the_next_batch_comes() -> None:
    links = [Link(shard()), Link(shard())]
    for k, link in enumerate(links):
        write(link.shard, "a", rows(100 * k, 100 * k + 50))
    rb = client(links, max_batch_age=0.0)
    rb.sample()
    broken = SimpleNamespace(draw=None, incarnation=links[0].shard.incarnation)
    links[0].shard, kept = broken, links[0].shard
    with pytest.raises(TypeError):
        rb.sample()
    links[0].shard = kept
    assert {int(n) // 100 for n in torch.cat([whole(rb.sample()) for _ in range(8)])} == {0, 1}
