"""SliceSampler: contract, what a slice is, marks, and statistics at the 1e-6 level."""

import pickle
import re

import pytest
import torch
from tensordict import TensorDict, tensorclass

from data.samplers.episode_data import episodes, slices_of
from data.samplers.test_uniform import assert_uniform
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.testing.helpers import numbers, steps
from engram.testing.sampler import SamplerContract


class SliceContract(SamplerContract):
    """Of the contract's data, those without keys have no trajectories: steps take their place."""

    def test_the_buffers_own_generator_leaves_the_global_one_alone(self):
        def draw(global_seed):
            torch.manual_seed(global_seed)
            generator = torch.Generator().manual_seed(5)
            rb = ReplayBuffer(storage=LazyTensorStorage(50), sampler=self.make(), generator=generator, batch_size=4)
            rb.extend(steps(0, 50))
            before = torch.get_rng_state()
            drawn = [numbers(rb.sample()) for _ in range(6)]
            assert torch.equal(before, torch.get_rng_state())
            return drawn

        assert draw(0) == draw(1)

    def test_it_can_be_sent_to_another_process_in_the_middle(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=self.make(), batch_size=4)
        rb.extend(steps(0, 10))
        rb.sample()
        copy = pickle.loads(pickle.dumps(rb.sampler))
        torch.manual_seed(1)
        expected = numbers(rb.sample())
        rb.set_sampler(copy)
        torch.manual_seed(1)
        assert numbers(rb.sample()) == expected

    def test_a_sampler_used_for_two_buffers_mixes_nothing_up(self):
        sampler = self.make()
        rbs = [ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=2) for _ in range(2)]
        rbs[0].extend(steps(0, 10))
        rbs[1].extend(steps(50, 55))
        for _ in range(10):
            assert max(numbers(rbs[0].sample())) < 10 and min(numbers(rbs[1].sample())) >= 50


class TestSliceSampler(SliceContract):
    def make(self):
        return SliceSampler(slice_len=2, end_key="done", truncated_key=None)


class TestSliceSamplerOfShortTrajectories(SliceContract):
    def make(self):
        return SliceSampler(num_slices=1, end_key="done", truncated_key=None, strict_length=False, span=(False, True))


STORAGES = {
    "rows": lambda path, n: LazyTensorStorage(n),
    "list": lambda path, n: ListStorage(n),
    "mapped": lambda path, n: LazyMemmapStorage(n, path),
    "columns": lambda path, n: TensorStorage(episodes([n])),
}


@pytest.fixture(params=STORAGES)
def make(request, tmp_path):
    def buffer(n, **how):
        rb = ReplayBuffer(storage=STORAGES[request.param](tmp_path / "s", n), sampler=SliceSampler(**how))
        rb.empty()
        return rb

    return buffer


@pytest.mark.parametrize("how", [{}, {"traj_key": "id"}])
def test_slices_are_parts_of_one_episode_wherever_the_ring_wraps(make, how):
    rb = make(50, slice_len=4, **how)
    first = 0
    for k in range(12):
        rb.extend(episodes([7, 4, 9, 3], start=23 * k, first_id=4 * k))
        first = max(0, 23 * (k + 1) - 50)
        for _ in range(5):
            batch, info = rb.sample(20, return_info=True)
            found = slices_of(batch, info)
            assert len(found) == 5 and all(len(n) == 4 and n[0] >= first for n in found)


def test_either_the_number_or_the_length_of_slices_is_given_and_divides():
    for how in ({}, {"num_slices": 2, "slice_len": 3}):
        with pytest.raises(ValueError, match="exactly one of num_slices and slice_len"):
            SliceSampler(**how)
    for how in ({"num_slices": 0}, {"slice_len": True}, {"slice_len": 1.5}):
        with pytest.raises(ValueError, match="positive integer"):
            SliceSampler(**how)
    for how in ({"num_slices": 4}, {"slice_len": 4}):
        rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(**how))
        rb.extend(episodes([10]))
        with pytest.raises(ValueError, match=r"batch_size=10 is no multiple of (num_slices|slice_len)=4"):
            rb.sample(10)
        assert rb.sample(8).shape == (8,)


def test_no_trajectory_long_enough_is_an_error_that_says_how_long_they_are(make):
    rb = make(20, slice_len=5)
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
        rb.sample(10)
    rb.extend(episodes([3, 4, 2]))
    with pytest.raises(RuntimeError, match="no trajectory has 5 steps; the longest that is stored has 4"):
        rb.sample(10)
    rb.extend(episodes([1], start=9, running=True))
    rb.extend(episodes([4], start=10))
    assert set(rb.sample(10)["n"].tolist()) == {9, 10, 11, 12, 13}


def test_shorter_trajectories_are_slices_whole_where_that_is_allowed():
    rb = ReplayBuffer(storage=LazyTensorStorage(30), sampler=SliceSampler(slice_len=4, strict_length=False))
    rb.extend(episodes([3, 6, 1]))
    lengths = set()
    for _ in range(50):
        for n in slices_of(*rb.sample(8, return_info=True)):
            lengths.add((n[0] < 3, len(n)))
            assert n in ([0, 1, 2], [9]) or (len(n) == 4 and 3 <= n[0] <= 5)
    assert lengths == {(True, 3), (False, 4), (False, 1)}


SPANS = {
    (False, False): [(3, 6), (4, 7), (5, 8)],
    (True, False): [(3, 3), (3, 4), (3, 5), (3, 6), (4, 7), (5, 8)],
    (False, True): [(3, 6), (4, 7), (5, 8), (6, 8), (7, 8), (8, 8)],
    (True, True): [(3, 3), (3, 4), (3, 5), (3, 6), (4, 7), (5, 8), (6, 8), (7, 8), (8, 8)],
}


@pytest.mark.parametrize("span", SPANS)
def test_a_span_lets_windows_reach_over_the_ends_of_a_trajectory(span):
    torch.manual_seed(0)
    rb = ReplayBuffer(storage=LazyTensorStorage(30), sampler=SliceSampler(slice_len=4, span=span))
    rb.extend(episodes([3, 6, 2]))
    batch, info = rb.sample(40_000, return_info=True)
    last = torch.cat([info["slice_id"].diff() != 0, torch.tensor([True])])
    n, ends = batch["n"], last.nonzero().flatten()
    begins = torch.cat([torch.tensor([0]), ends[:-1] + 1])
    assert_uniform(list(zip(n[begins].tolist(), n[ends].tolist(), strict=True)), SPANS[span])
    if span == (True, True):
        assert_uniform(n.tolist(), range(3, 9))


def test_span_is_a_bool_or_a_pair():
    assert SliceSampler(slice_len=2, span=True).span == (True, True)
    for span in (1, (True,), (True, 2), "both"):
        with pytest.raises(ValueError, match="span is a bool or a pair"):
            SliceSampler(slice_len=2, span=span)


# ---- statistics ----
def test_trajectories_are_uniform_and_starts_are_uniform():
    torch.manual_seed(0)
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=5))
    rb.extend(episodes([5, 30, 4, 8, 40, 7, 25, 6], running=True))  # 125 into 100: the first is gone, the second cut
    found = []
    for _ in range(10):
        found += rb.sample(500_000)["n"][::5].tolist()
    bounds = [(25, 35), (39, 47), (47, 87), (87, 94), (94, 119), (119, 125)]
    where = torch.bucketize(torch.tensor(found), torch.tensor([a for a, _ in bounds]), right=True) - 1
    assert_uniform(where.tolist(), range(len(bounds)))
    for k, (a, b) in enumerate(bounds):
        assert_uniform([n for n, w in zip(found, where.tolist(), strict=True) if w == k], range(a, b - 4))


def test_trajectories_of_all_environments_and_lanes_are_as_likely(tmp_path):
    torch.manual_seed(0)
    rb = ReplayBuffer(storage=LazyTensorStorage(90, ndim=2), sampler=SliceSampler(slice_len=3))
    data = torch.stack([episodes(lengths, start=100 * e) for e, lengths in enumerate(([10, 10, 10], [30], [3, 27]))])
    rb.extend(data)
    batch, info = rb.sample(60_000, return_info=True)
    time, env = info["index"]
    assert torch.equal(rb.storage[time, env]["n"], batch["n"]) and torch.equal(batch["n"] // 100, env)
    starts = batch["n"][::3]
    episode = torch.bucketize(starts.contiguous(), torch.tensor([0, 10, 20, 100, 200, 203]), right=True)
    assert_uniform(episode.tolist(), range(1, 7))
    many = [ReplayBuffer(storage=LazyMemmapStorage(60, tmp_path, existsok=True, lanes=2)) for _ in range(2)]
    many[0].extend(episodes([5, 5, 5]))
    many[1].extend(episodes([20], start=50))
    many[0].set_sampler(SliceSampler(slice_len=5))
    starts = many[0].sample(20_000)["n"][::5]
    assert_uniform((starts // 5).clamp(max=10).tolist(), [0, 1, 2, 10])


# ---- marks ----
def test_the_last_step_is_marked_and_what_is_stored_is_not(make):
    rb = make(20, slice_len=3)
    rb.extend(episodes([5, 6]))
    stored = rb[:] if not isinstance(rb[:], list) else torch.stack(rb[:])
    batch, info = rb.sample(12, return_info=True)
    slices_of(batch, info)
    assert torch.equal(info["next", "truncated"], batch["next", "truncated"])
    assert torch.equal(info["next", "done"], batch["next", "done"])
    again = rb[:] if not isinstance(rb[:], list) else torch.stack(rb[:])
    assert bool((stored == again).all())


def test_marks_that_the_data_lack_are_added():
    plain = {"n": torch.arange(9), "end": torch.tensor([0, 0, 0, 0, 1] + [0] * 4).bool()}
    for data in (TensorDict(plain, [9]), plain):
        rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=3, end_key="end"))
        rb.extend(data)
        batch = rb.sample(6)
        for key in ("truncated", "done"):
            flags = batch["next"][key]
            assert flags.shape == (6, 1) and flags.flatten().tolist() == [False, False, True] * 2
        assert "terminated" not in batch["next"]
        rb.set_sampler(SliceSampler(slice_len=3, end_key="end", truncated_key="cut", slice_key=("which", "slice")))
        batch = rb.sample(6)
        assert batch["cut"].flatten().tolist() == [False, False, True] * 2
        assert batch["which"]["slice"].tolist() == [0, 0, 0, 1, 1, 1]
        rb.set_sampler(SliceSampler(slice_len=3, end_key="end", truncated_key=None))
        assert set(rb.sample(6)) == {"n", "end"} if isinstance(data, dict) else set(rb.sample(6).keys()) == {"n", "end"}


@tensorclass
class Step:
    n: torch.Tensor
    end: torch.Tensor


def test_a_tensorclass_without_the_field_says_what_to_do():
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=3, end_key="end"))
    rb.extend(Step(n=torch.arange(9), end=torch.zeros(9).bool(), batch_size=[9]))
    with pytest.raises(TypeError, match=r"a Step has no place for \('next', 'truncated'\)"):
        rb.sample(6)
    rb.set_sampler(SliceSampler(slice_len=3, end_key="end", truncated_key=None))
    assert rb.sample(6).n.reshape(2, 3).diff().eq(1).all()


def test_flags_of_another_dtype_or_shape_are_marked_too():
    data = episodes([4, 5])
    data["next", "truncated"] = torch.zeros(9, 2, 1).bool()
    data["next", "done"] = data["next", "done"].to(torch.uint8)
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=4))
    rb.extend(data)
    batch = rb.sample(4)
    assert batch["next", "truncated"].tolist() == [[[False]] * 2] * 3 + [[[True]] * 2]
    assert batch["next", "done"].flatten().tolist() == [0, 0, 0, 1]


def test_a_tensordict_buffer_attaches_the_index_and_what_is_asked_for():
    sampler = SliceSampler(num_slices=2, slice_key="slice_id")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=8, prefetch=2)
    rb.extend(episodes([9, 5]))
    for _ in range(5):
        batch, info = rb.sample(return_info=True)
        assert torch.equal(batch["n"], batch["index"]) and torch.equal(batch["slice_id"], info["slice_id"])
        slices_of(batch, info)
        assert "slices" not in info


# ---- where trajectories end ----
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("key", ["episode", ("collector", "traj_ids"), ("some", "where", "deep")])
def test_ids_of_any_integer_dtype_and_place_begin_trajectories(dtype, key):
    ids = torch.tensor([5, 5, 5, 5, 2, 2, 2, 2, 5, 5, 5, 5], dtype=dtype)
    known = key != ("some", "where", "deep")
    sampler = SliceSampler(slice_len=4, traj_key=None if known else key)
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler)
    data = TensorDict({"n": torch.arange(12), "next": {"done": torch.zeros(12, 1).bool()}}, [12])
    rb.extend(data.set(key, ids))
    assert set(rb.sample(400)["n"][::4].tolist()) == {0, 4, 8}
    assert len(sampler.episodes.trajectories(rb.storage).start) == 3


def test_an_end_key_of_ones_own_goes_before_ids_that_are_there():
    data = episodes([4, 4, 4])
    data["episode"] = torch.zeros(12).long()
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=4))
    rb.extend(data)
    assert len(set(rb.sample(400)["n"][::4].tolist())) == 9
    rb.set_sampler(SliceSampler(slice_len=4, end_key=("next", "terminated")))
    assert set(rb.sample(400)["n"][::4].tolist()) == {0, 4, 8}


def test_keys_that_are_not_there_or_say_nothing_are_refused(make):
    rb = make(20, slice_len=2, end_key="end")
    rb.extend(episodes([4]))
    with pytest.raises(KeyError, match="neither done flags 'end' nor trajectory ids"):
        rb.sample(4)
    rb.set_sampler(SliceSampler(slice_len=2, traj_key="which"))
    with pytest.raises(KeyError, match="no trajectory ids 'which'"):
        rb.sample(4)
    rb.set_sampler(SliceSampler(slice_len=2, end_key=("next", "reward")))
    with pytest.raises(ValueError, match=re.escape("('next', 'reward') is torch.float32 [1] a step; a flag is a bool")):
        rb.sample(4)
    with pytest.raises(TypeError, match="end_key: a key is"):
        SliceSampler(slice_len=2, end_key=3)
    with pytest.raises(ValueError, match="give one of traj_key, ends, trajectories"):
        SliceSampler(slice_len=2, traj_key="a", ends=torch.zeros(3).bool())


def test_flags_of_several_agents_are_refused():
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=2))
    rb.extend(TensorDict({"next": {"done": torch.zeros(6, 3, 1).bool()}}, [6]))
    with pytest.raises(ValueError, match=r"one a step \(agents and groups"):
        rb.sample(4)


def test_flags_or_ids_of_a_dataset_can_be_given(make):
    ends = torch.tensor([0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0]).bool()
    ids = torch.tensor([3] * 4 + [1] * 4 + [9] * 4)
    rb = make(12, slice_len=4)
    for given in ({"ends": ends}, {"ends": ends.unsqueeze(-1)}, {"trajectories": ids}):
        rb.empty()
        rb.set_sampler(SliceSampler(slice_len=4, **given))
        rb.extend(episodes([12]))
        assert set(rb.sample(400)["n"][::4].tolist()) == {0, 4, 8}
        rb.extend(episodes([2]))
        with pytest.raises(RuntimeError, match="steps were written after ends or trajectories were given"):
            rb.sample(4)
    rb = ReplayBuffer(storage=TensorStorage(episodes([12])), sampler=SliceSampler(slice_len=4, ends=ends[:11]))
    with pytest.raises(ValueError, match="have 11 entries, but 12 steps are stored"):
        rb.sample(4)
    with pytest.raises(ValueError, match="ends are bools, got"):
        SliceSampler(slice_len=4, ends=ends.float())


def test_a_reopened_store_knows_its_trajectories(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(50, tmp_path), sampler=SliceSampler(slice_len=4))
    rb.extend(episodes([9, 30, 7, 20]))
    torch.manual_seed(2)
    expected = rb.sample(40)["n"].tolist()
    rb.storage.close()
    again = ReplayBuffer.open(tmp_path, sampler=SliceSampler(slice_len=4))
    torch.manual_seed(2)
    assert again.sample(40)["n"].tolist() == expected
    again.extend(episodes([6], start=66, first_id=9))  # after a seam
    for _ in range(10):
        slices_of(*again.sample(40, return_info=True))


def test_the_draws_of_an_index_that_grew_are_those_of_one_that_was_loaded(tmp_path):
    def made(capacity=60):
        return ReplayBuffer(
            storage=LazyTensorStorage(capacity), sampler=SliceSampler(slice_len=3, strict_length=False),
            generator=torch.Generator().manual_seed(1), batch_size=12,
        )  # fmt: skip

    rb = made()
    for k in range(15):
        rb.extend(episodes([3, 5, 1, 2], start=11 * k, running=k % 2 == 0))
        rb.sample()
        if k % 4 == 3:
            rb[k : k + 2] = episodes([2], start=1000 + k)
        rb.dumps(tmp_path / str(k))
        expected = [rb.sample()["n"].tolist() for _ in range(3)]
        twin = made()
        twin.loads(tmp_path / str(k))
        assert [twin.sample()["n"].tolist() for _ in range(3)] == expected
        larger = made(90)
        larger.loads(tmp_path / str(k))
        assert [larger.sample()["n"].tolist() for _ in range(3)] == expected
