"""Rows that were removed from a shard's store: they are not sent, and count for no share, so that draws stay exact."""

import pytest
import torch

from contracts.each import each
from distributed.shards import LAYOUT, Link, client, draw, rows, shard, whole, write
from engram.data import LazyMemmapStorage, PrioritizedSampler, RandomSampler, ReplayBuffer, SliceSampler
from engram.distributed import ReplayShard, unpack
from engram.distributed.local import LocalReader
from engram.distributed.resharding import divide_saved
from engram.store.episodes import EpisodeIndex
from engram.testing import chi_square

LEAST = 1e-4  # of the probability that counts deviate as far as they do
SIZE = 200
PERCENT = [1, 50, 99]


@pytest.fixture(autouse=True)
def _same_draws():
    torch.manual_seed(0)


def pair(percent, sampler=RandomSampler, **settings):
    """Two shards of the rows 0 to 399; of the first so many are removed. And which rows are left, bool [400]."""
    left = torch.ones(2 * SIZE, dtype=torch.bool)
    left[torch.randperm(SIZE)[: SIZE * percent // 100]] = False
    shards = []
    for k in range(2):
        s = shard(1000, sampler=sampler(), **settings)
        write(s, "a", rows(k * SIZE, k * SIZE + 80)), write(s, "b", rows(k * SIZE + 80, (k + 1) * SIZE))
        shards.append(s)
    gone = shards[0]._buffer.remove(lambda of: ~left[of["n"]])
    assert gone == SIZE * percent // 100
    return shards, left


def assert_drawn(counts, weights):
    assert int(counts[weights == 0].sum()) == 0
    assert chi_square(counts[weights > 0], weights[weights > 0]) > LEAST


@each("percent", PERCENT)
def test_shares_are_those_of_the_rows_that_are_left(percent):
    shards, left = pair(percent)
    for k, one in enumerate(shards):
        draws = one.totals(one.incarnation).draws
        assert draws.share == one.draw(one.incarnation, 3, 1).totals.draws.share == int(left[k * SIZE :][:SIZE].sum())


@each("percent", PERCENT)
def test_what_a_client_draws_is_uniform_over_the_rows_that_are_left(percent):
    shards, left = pair(percent)
    numbers = torch.cat([batch["n"] for batch in _batches(shards, RandomSampler())])
    assert_drawn(torch.bincount(numbers, minlength=2 * SIZE), left.double())


@each("percent", PERCENT)
def test_what_a_client_draws_by_priority_is_in_proportion(percent):
    def sampler():
        return PrioritizedSampler(None, 0.7, 0.5, 0.0)

    shards, left = pair(percent, sampler)
    priorities = 1.0 + torch.arange(2 * SIZE) % 7
    for one in shards:
        slots = torch.arange(one.capacity)
        slots = slots[one._lanes.generations(slots) >= 0]
        stored = one._storage.get(slots)["n"]
        one.update_priority(one.incarnation, slots, priorities[stored])
    weights = torch.where(left, priorities.double() ** 0.7, 0.0)
    assert sum(one.totals(one.incarnation).draws.share for one in shards) == pytest.approx(float(weights.sum()))
    batches = list(_batches(shards, sampler()))
    assert_drawn(torch.bincount(torch.cat([b["n"] for b in batches]), minlength=2 * SIZE), weights)
    lowest = weights[left].min()
    for batch in batches:
        expected = (weights[batch["n"]] / lowest) ** -0.5
        torch.testing.assert_close(batch["priority_weight"].double(), expected, rtol=1e-4, atol=0)


def _batches(shards, sampler, n=20):
    buffer = client([Link(one) for one in shards], sampler=sampler, batch_size=1000)
    return (buffer.sample() for _ in range(n))


@each("percent", PERCENT)
def test_rows_that_are_asked_for_by_sequence_are_there_where_they_are_left(percent):
    shards, left = pair(percent)
    numbers, gone = draw(shards, [one.ranges(one.incarnation) for one in shards], 20_000)
    assert gone == pytest.approx(20_000 * percent / 200, rel=0.2, abs=30)
    assert_drawn(torch.bincount(torch.tensor(numbers), minlength=2 * SIZE), left.double())


@each("percent", PERCENT)
def test_slices_of_a_shard_have_no_removed_row(percent):
    shards, left = pair(percent, lambda: SliceSampler(slice_len=2, traj_key="traj"))
    one = shards[0]
    if not one.totals(one.incarnation).draws.share:
        assert len(one.sample(one.incarnation, 20).slots) == 0
        return
    drawn = one.sample(one.incarnation, 20)
    assert bool(left[whole(unpack(LAYOUT, drawn.block))].all())


def test_a_shard_of_which_all_was_removed_gives_nothing():
    shards, _ = pair(1)
    shards[0]._buffer.remove(slice(None))
    assert (
        shards[0].totals(shards[0].incarnation).draws.share
        == 0
        == len(shards[0].draw(shards[0].incarnation, 5, 1).slots)
    )
    assert shards[0].sample(shards[0].incarnation, 5).totals.draws.share == 0
    numbers = torch.cat([batch["n"] for batch in _batches(shards, RandomSampler(), 2)])
    assert bool((numbers >= SIZE).all())


class AnyRows(RandomSampler):
    """A child that looks at nothing."""

    def sample(self, storage, batch_size):
        return torch.randint(80, (batch_size,)), {}


def test_what_a_users_sampler_draws_of_removed_rows_is_left_out():
    shards, left = pair(50, AnyRows)
    drawn = shards[0].sample(shards[0].incarnation, 400)
    numbers = whole(unpack(LAYOUT, drawn.block))
    assert 0 < len(numbers) < 400 and bool(left[numbers].all())


@each("percent", PERCENT)
def test_a_process_beside_a_shard_draws_and_counts_the_rows_that_are_left(percent, tmp_path):
    one = shard(1000, scratch_dir=tmp_path / "shard")
    write(one, "a", rows(0, SIZE))
    beside = ReplayBuffer(storage=LazyMemmapStorage(None, tmp_path / "shard", existsok=True))
    left = torch.ones(SIZE, dtype=torch.bool)
    left[torch.randperm(SIZE)[: SIZE * percent // 100]] = False
    assert beside.remove(lambda of: ~left[of["n"]]) == SIZE * percent // 100

    class Watch:
        def is_held(self):
            return True

        def close(self):
            pass

    class Shard:
        number, totals = 0, one.totals(one.incarnation)

    reader = LocalReader(Shard(), str(tmp_path / "shard"), Watch())
    drawn = reader.draw(4000, 7).result(1)
    assert drawn.totals.draws.share == int(left.sum()) == one.totals(one.incarnation).draws.share
    assert_drawn(torch.bincount(whole(unpack(LAYOUT, drawn.block)), minlength=SIZE), left.double())
    reader.close()
    beside.storage.close()


@each("sampler", [RandomSampler, lambda: PrioritizedSampler(None, 0.7, 0.5)])
def test_a_shard_that_is_made_anew_has_the_same_rows_removed(sampler, tmp_path):
    one = shard(1000, sampler=sampler(), scratch_dir=tmp_path / "shard")
    write(one, "a", rows(0, SIZE))
    one._buffer.remove(lambda of: of["n"] % 2 == 0)
    one.dumps(one.incarnation, tmp_path / "saved")
    one.close()
    again = ReplayShard(1000, lanes=4, sampler=sampler(), scratch_dir=tmp_path / "shard", timeout=0.0)
    loaded = shard(1000, sampler=sampler())
    loaded.loads(loaded.incarnation, tmp_path / "saved")
    filed = shard(1000, sampler=sampler(), scratch_dir=tmp_path / "filed")
    filed.loads(filed.incarnation, tmp_path / "saved")
    filed.close()
    filed = ReplayShard(1000, lanes=4, sampler=sampler(), scratch_dir=tmp_path / "filed", timeout=0.0)
    for now in (again, loaded, filed):
        numbers = whole(unpack(LAYOUT, now.sample(now.incarnation, 500).block))
        assert set((numbers % 2).tolist()) == {1}
        assert now.totals(now.incarnation).draws.share == pytest.approx(SIZE // 2)
        now.close()


@each("sampler", [RandomSampler, lambda: PrioritizedSampler(None, 0.7, 0.5)])
def test_another_number_of_shards_gets_the_rows_that_are_left_with_seams_between_them(sampler, tmp_path):
    one = shard(1000, sampler=sampler())
    write(one, "a", rows(0, SIZE))
    one._buffer.remove(lambda of: of["n"] % 10 == 4)
    name = one.dumps(one.incarnation, tmp_path / "saved")
    found = []
    for pieces in divide_saved([(str(tmp_path / "saved"), name)], 3):
        new = shard(1000, sampler=sampler())
        new.load_pieces(new.incarnation, pieces)
        stored = new._buffer[:]["n"]
        found += stored.tolist()
        assert EpisodeIndex(traj_key="traj").longest(new._storage) == 9  # none goes on over a gap
    assert sorted(found) == [n for n in range(SIZE) if n % 10 != 4]
