"""Draws from several shards are those of one buffer with all their rows."""

from __future__ import annotations

import pytest
import torch

from contracts.each import each
from distributed.shards import LAYOUT, draw, read_all, rows, shard, whole, write
from engram.data import PrioritizedSampler, PrioritizedSliceSampler, RandomSampler, SliceSampler
from engram.distributed import ReplayShard, divide, draw_sequences, importance_weights, unpack
from engram.testing import chi_square

SIZES = (200, 50, 130, 20)
LEAST = 1e-4  # of the probability that counts deviate as far as they do


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    torch.manual_seed(0)


def several(sampler=lambda: None, sizes=SIZES, **settings) -> list[ReplayShard]:
    """Shards of these sizes, whose rows have the numbers 0, 1, ..., two producers in each."""
    shards, start = [], 0
    for size in sizes:
        s = shard(4000, sampler=sampler(), **settings)
        half = size // 3
        write(s, "a", rows(start, start + half)), write(s, "b", rows(start + half, start + size))
        shards.append(s)
        start += size
    return shards


def totals(shards: list[ReplayShard]):
    return [s.totals(s.incarnation) for s in shards]


def test_uniform_draws_give_every_row_as_often() -> None:
    shards = several()
    ranges = [s.ranges(s.incarnation) for s in shards]
    numbers, gone = draw(shards, ranges, 40_000)
    assert gone == 0 and chi_square(torch.bincount(torch.tensor(numbers), minlength=400)) > LEAST


@pytest.mark.deep
def test_uniform_draws_are_exact_while_shards_grow() -> None:
    ranks = []
    for _ in range(40):
        shards = several(sizes=(100, 30, 60))
        numbers = 190
        for step in range(8):
            now = [one.ranges(one.incarnation) for one in shards]
            s = shards[step % 2]  # it grows between the look at the ranges and the read
            write(s, "a", rows(10_000 + numbers, 10_000 + numbers + 40))
            drawn = draw_sequences(now, 100)
            counts = torch.tensor([int((one[:, 1] - one[:, 0]).sum()) for one in now])
            before = counts.cumsum(0) - counts
            for k, one in enumerate(shards):
                mine = drawn.shard == k
                taken = one.take(one.incarnation, drawn.lane[mine], drawn.sequence[mine])
                assert bool(taken.present.all())
                sizes = now[k][:, 1] - now[k][:, 0]
                at = (sizes.cumsum(0) - sizes)[drawn.lane[mine]] + drawn.sequence[mine] - now[k][drawn.lane[mine], 0]
                ranks.append((before[k] + at + torch.rand(len(at))) / int(counts.sum()))
            numbers += 40
    assert chi_square(torch.histc(torch.cat(ranks), 100, 0, 1)) > LEAST


def test_what_a_shard_draws_is_uniform_over_its_rows() -> None:
    s = shard(160)
    write(s, "a", rows(0, 100)), write(s, "b", rows(100, 130))
    write(s, "a", rows(200, 240)), write(s, "b", rows(300, 340))
    left = torch.zeros(400, dtype=torch.bool)
    left[read_all(s)] = True
    assert int(left.sum()) == 160
    drawn = s.draw(s.incarnation, 40_000, 7)
    numbers = whole(unpack(LAYOUT, drawn.block))
    counts = torch.bincount(numbers, minlength=400)
    assert drawn.totals.draws.share == 160
    assert not counts[~left].any() and chi_square(counts[left]) > LEAST
    assert torch.equal(whole(LAYOUT.unpack(s._storage.read_packed(drawn.slots).batch[0])), numbers)
    assert torch.equal(s._lanes.generations(drawn.slots), drawn.generation)


@pytest.mark.parametrize("by_priority", [False, True])
def test_rows_that_are_overwritten_while_they_are_read_are_left_out(by_priority: bool, monkeypatch) -> None:
    s = shard(160, sampler=PrioritizedSampler(None, 1.0, 1.0) if by_priority else None)
    write(s, "a", rows(0, 100))
    read, slots = s._storage.read_packed, []

    def overwritten(drawn, *settings, **more):
        slots.append(drawn)
        return read(drawn, *settings, **more)._replace(overwritten=[1, 7], absent=[3])

    monkeypatch.setattr(s._storage, "read_packed", overwritten)
    answer = s.sample(s.incarnation, 10) if by_priority else s.draw(s.incarnation, 10, 7)
    left = [0, 2, 4, 5, 6, 8, 9]
    assert torch.equal(answer.slots, slots[0][left]) and len(slots) == 1
    assert torch.equal(answer.generation, s._lanes.generations(answer.slots))
    numbers = whole(LAYOUT.unpack(read(answer.slots).batch[0]))
    assert torch.equal(whole(unpack(LAYOUT, answer.block)), numbers)
    assert answer.ratio is None or len(answer.ratio) == 7


def test_a_shard_without_rows_gives_none() -> None:
    s = shard(160)
    drawn = s.draw(s.incarnation, 10, 7)
    assert len(drawn.block) == len(drawn.slots) == 0 and drawn.totals.draws.share == 0


@pytest.mark.deep
def test_rows_that_are_overwritten_meanwhile_are_left_out_and_the_others_as_likely() -> None:
    counts = torch.zeros(400)
    for _ in range(60):
        shards = several(sizes=(80, 80))
        small = shard(40)
        write(small, "a", rows(160, 200))
        shards.append(small)
        ranges = [s.ranges(s.incarnation) for s in shards]
        write(small, "a", rows(200, 220))
        numbers, gone = draw(shards, ranges, 500)
        assert gone > 0
        counts += torch.bincount(torch.tensor(numbers), minlength=400)
    assert not counts[160:180].any() and not counts[200:].any()
    assert chi_square(torch.cat([counts[:160], counts[180:200]])) > LEAST


class TestByPriority:
    def shards(self) -> tuple[list[ReplayShard], torch.Tensor]:
        """Shards, and the priority of each number."""
        shards = several(lambda: PrioritizedSampler(None, 0.7, 0.4, eps=0.0))
        priorities = torch.rand(400, dtype=torch.float64) * 3 + 0.1
        for s in shards:
            s.sample(s.incarnation, 1)
            sizes = s.ranges(s.incarnation)[:, 1]
            lanes = torch.arange(len(sizes)).repeat_interleave(sizes)
            sequence = torch.cat([torch.arange(int(n)) for n in sizes])
            numbers = whole(unpack(LAYOUT, s.take(s.incarnation, lanes, sequence).block))
            s.update_priority(s.incarnation, s._lanes.slots_of(lanes, sequence), priorities[numbers], sequence)
        return shards, priorities

    def test_draws_are_in_proportion_to_priorities(self) -> None:
        shards, priorities = self.shards()
        now = totals(shards)
        counts = torch.zeros(400)
        for s, n in zip(shards, divide([t.draws.share for t in now], 40_000).tolist(), strict=True):
            counts += torch.bincount(whole(unpack(LAYOUT, s.sample(s.incarnation, n).block)), minlength=400)
        assert chi_square(counts, priorities**0.7) > LEAST

    @pytest.mark.parametrize("shares", ["newest", "remembered"])
    def test_weights_are_those_of_the_probabilities_that_were_used(self, shares: str) -> None:
        shards, priorities = self.shards()
        used = [t.draws.share for t in totals(shards)]
        if shares == "remembered":
            used = [used[0] * 2, used[1], used[2] / 3, used[3]]
        drawn = [s.sample(s.incarnation, 300) for s in shards]
        weights = importance_weights([d.ratio for d in drawn], [d.totals.draws for d in drawn], used, 0.5)
        leaf = priorities**0.7
        ends = torch.tensor([0, *SIZES]).cumsum(0).tolist()
        p = torch.cat(
            [u / sum(used) * leaf[a:b] / leaf[a:b].sum() for u, a, b in zip(used, ends, ends[1:], strict=False)]
        )
        for d, w in zip(drawn, weights, strict=True):
            numbers = whole(unpack(LAYOUT, d.block))
            torch.testing.assert_close(w, (p[numbers] / p.min()) ** -0.5, rtol=1e-4, atol=0)
        assert max(float(w.max()) for w in weights) <= 1 + 1e-9

    def test_new_rows_get_the_highest_priority_of_all_shards(self) -> None:
        shards, priorities = self.shards()
        highest = max(t.draws.new_priority for t in totals(shards))
        assert highest == float(priorities.max())
        write(shards[3], "a", rows(500, 501), new_priority=highest)
        assert shards[3].totals(shards[3].incarnation).draws.new_priority == highest

    def test_a_priority_for_a_row_that_is_gone_changes_nothing(self) -> None:
        s = shard(10, sampler=PrioritizedSampler(None, 1.0, 1.0, eps=0.0))
        write(s, "a", rows(0, 10))
        drawn = s.sample(s.incarnation, 5)
        write(s, "a", rows(10, 20))
        after = s.update_priority(s.incarnation, drawn.slots, torch.full((5,), 9.0), drawn.generation)
        assert after.draws.share == 10


class TestSlices:
    def shards(self, sampler) -> tuple[list[ReplayShard], list[int]]:
        """Shards with trajectories of several lengths, and these lengths; the number of a row has its trajectory."""
        shards, lengths = [], []
        for k, parts in enumerate(((3, 10, 30, 4), (2, 2, 50), (7, 5, 8, 9, 11, 1), (4,))):
            s = shard(4000, sampler=sampler())
            for j, length in enumerate(parts):
                trajectory = len(lengths)
                write(s, f"{k}.{j % 3}", rows(1000 * trajectory, 1000 * trajectory + length, trajectory))
                lengths.append(length)
            shards.append(s)
        return shards, lengths

    def starts(self, shards: list[ReplayShard], slices: int) -> torch.Tensor:
        now = totals(shards)
        numbers = []
        for s, n in zip(shards, divide([t.draws.share for t in now], slices).tolist(), strict=True):
            drawn = s.sample(s.incarnation, 4 * n)
            each = whole(unpack(LAYOUT, drawn.block)).reshape(-1, 4)
            assert bool((each.diff() == 1).all()) and drawn.slice_id.tolist() == sorted([*range(n)] * 4)
            numbers.append(each[:, 0])
        return torch.cat(numbers)

    def test_every_trajectory_that_is_long_enough_is_as_likely(self) -> None:
        shards, lengths = self.shards(lambda: SliceSampler(slice_len=4, traj_key="traj"))
        counts = torch.bincount(self.starts(shards, 20_000) // 1000, minlength=len(lengths))
        assert chi_square(counts, [float(n >= 4) for n in lengths]) > LEAST

    def test_the_last_row_of_each_slice_is_marked(self) -> None:
        s = self.shards(lambda: SliceSampler(slice_len=4, traj_key="traj"))[0][0]
        drawn = s.sample(s.incarnation, 12)
        assert drawn.last.reshape(3, 4).tolist() == [[False, False, False, True]] * 3 and drawn.mask is None

    def test_the_padding_of_short_slices_is_masked(self) -> None:
        s = shard(sampler=SliceSampler(slice_len=4, traj_key="traj", strict_length=False, pad_output=True))
        write(s, "a", rows(0, 3))
        drawn = s.sample(s.incarnation, 4)
        real = drawn.mask
        assert real.any() and torch.equal(drawn.last.flatten().nonzero()[-1], real.nonzero()[-1])

    def test_every_start_is_as_likely_where_steps_count(self) -> None:
        shards, lengths = self.shards(lambda: SliceSampler(slice_len=4, traj_key="traj", weight="steps"))
        possible = torch.cat([1000 * t + torch.arange(max(0, n - 3)) for t, n in enumerate(lengths)])
        counts = torch.bincount(self.starts(shards, 20_000), minlength=20_000)
        assert chi_square(counts[possible]) > LEAST and int(counts[possible].sum()) == 20_000

    def test_starts_by_priority_are_in_proportion_to_priorities(self) -> None:
        shards, lengths = self.shards(
            lambda: PrioritizedSliceSampler(None, 1.0, 1.0, eps=0.0, slice_len=4, traj_key="traj")
        )
        for k, s in enumerate(shards):
            s.sample(s.incarnation, 4)
            sizes, room = s.ranges(s.incarnation)[:, 1], s._lanes.store.lane_capacity
            every = torch.cat([room * lane + torch.arange(int(stop)) for lane, stop in enumerate(sizes)])
            s.update_priority(s.incarnation, every, torch.full((len(every),), k + 1.0), every % room)
        starts = self.starts(shards, 20_000)
        of_shard = [0] * 4 + [1] * 3 + [2] * 6 + [3]
        possible = [(1000 * t + i, of_shard[t] + 1.0) for t, n in enumerate(lengths) for i in range(max(0, n - 3))]
        counts = torch.bincount(starts, minlength=20_000)[torch.tensor([number for number, _ in possible])]
        assert chi_square(counts, [p for _, p in possible]) > LEAST


def test_a_shard_without_a_share_gives_nothing() -> None:
    assert divide([0.0, 2.0, 0.0], 1000).tolist() == [0, 1000, 0]


@each("shares", [[-1.0, 2.0], [float("nan")], [float("inf"), 1.0]])
def test_shares_that_are_none_are_refused(shares: list[float]) -> None:
    with pytest.raises(ValueError, match="finite and 0 or more"):
        divide(shares, 3)


@pytest.mark.parametrize("shares", [[], [0.0, 0.0]])
def test_nothing_is_divided_among_empty_shards(shares: list[float]) -> None:
    with pytest.raises(RuntimeError, match="empty"):
        divide(shares, 3)


class Returns(RandomSampler):
    """Returns what it was given."""

    def __init__(self, index) -> None:
        super().__init__()
        self.index = index

    def sample(self, storage, batch_size):
        return self.index, {}


@each(
    "index",
    [torch.rand(4), torch.ones(4, dtype=torch.bool), [0.0] * 4, torch.full((4,), 10**6), torch.zeros(2, 2).long()],
)
def test_shard_refuses_an_invalid_index(index) -> None:
    s = shard(sampler=Returns(index))
    write(s, "a", rows(0, 10))
    with pytest.raises(IndexError, match=r"Returns\.sample returned"):
        s.sample(s.incarnation, 4)


def test_shard_refuses_more_rows_than_asked_for() -> None:
    s = shard(sampler=Returns(torch.arange(5)))
    write(s, "a", rows(0, 10))
    with pytest.raises(ValueError, match="drew 5 rows where 4 were asked for"):
        s.sample(s.incarnation, 4)


def test_shard_takes_integers_of_any_form() -> None:
    for index in ([0, 1, 2], torch.arange(3, dtype=torch.int32), torch.arange(3).unsqueeze(1)):
        s = shard(sampler=Returns(index))
        write(s, "a", rows(0, 10))
        drawn = s.sample(s.incarnation, 4)
        assert drawn.slots.dtype == torch.int64 and whole(unpack(LAYOUT, drawn.block)).tolist() == [0, 1, 2]
