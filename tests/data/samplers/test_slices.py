"""Slices of trajectories: drawn at random, in epochs, and with a burn-in."""

import copy
import pickle
import re
import warnings
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from tensordict import TensorDict, tensorclass

from contracts.each import each
from data.samplers.episode_data import episodes, slices_of
from data.samplers.test_uniform import assert_uniform
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.data.replay_buffers.samplers.frames import FrameStackSampler
from engram.data.replay_buffers.samplers.runs import RunRule, mark
from engram.data.replay_buffers.samplers.slices import mark_rows
from engram.store.places import LaneCount
from engram.testing.helpers import assert_equal, numbers, steps
from engram.testing.sampler import SamplerContract


# ---- SliceSampler: its contract, what a slice is ----
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
        with pytest.raises(TypeError, match="exactly one of num_slices and slice_len"):
            SliceSampler(**how)
    for how in ({"num_slices": 0}, {"slice_len": True}, {"slice_len": 1.5}):
        with pytest.raises(ValueError, match="integer of 1 or more"):
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


def test_slices_that_are_longer_than_a_lane_are_an_error_that_says_how_long_lanes_are():
    storage = LazyTensorStorage(60, shared=True, lanes=LaneCount(3))
    rb = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=21), batch_size=21)
    rb.extend(episodes([40]))
    with pytest.raises(RuntimeError, match=r"has 20\. Use shorter slices.*fewer lanes.* 3 of 20 steps each"):
        rb.sample()
    rb.set_sampler(SliceSampler(slice_len=20))
    rb.extend(episodes([10], start=40))
    assert rb.sample(20)["n"].diff().eq(1).all()


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
    2: [(3, 4), (3, 5), (3, 6), (4, 7), (5, 8), (6, 8), (7, 8)],
    (2, True): [(3, 4), (3, 5), (3, 6), (4, 7), (5, 8), (6, 8), (7, 8), (8, 8)],
    (False, 2): [(3, 6), (4, 7), (5, 8), (6, 8), (7, 8)],
}


@each("span", SPANS)
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


def test_span_is_a_bool_a_number_or_a_pair_of_them():
    assert SliceSampler(slice_len=2, span=True).span == (True, True)
    assert SliceSampler(slice_len=3, span=2).span == (2, 2) and SliceSampler(slice_len=2, span=0).span == (0, 0)
    assert SliceSampler(slice_len=3, span=[True, 2]).span == (True, 2)
    for span in (-1, (True,), (True, -2), 0.5, "both"):
        with pytest.raises(ValueError, match="span is a bool, a number of steps"):
            SliceSampler(slice_len=2, span=span)


def test_a_span_leaves_something_of_every_slice():
    for span in (4, (4, 0), (False, 7)):
        with pytest.raises(ValueError, match="leaves nothing of slices of 4 steps"):
            SliceSampler(slice_len=4, span=span)
    rb = ReplayBuffer(storage=LazyTensorStorage(30), sampler=SliceSampler(num_slices=2, span=3))
    rb.extend(episodes([9]))
    with pytest.raises(ValueError, match="leaves nothing of slices of 3 steps"):
        rb.sample(6)
    assert len(rb.sample(8)) <= 8


@pytest.mark.parametrize("ask", [{}, {"return_info": True}])
def test_a_setting_that_is_assigned_decides_the_next_draw(ask):
    def rows():
        drawn = [rb.sample(**ask) for _ in range(40)]
        return {len(one[0] if ask else one) for one in drawn}

    sampler = SliceSampler(num_slices=1, traj_key="episode", strict_length=False)
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=4)
    rb.extend(TensorDict({"episode": torch.tensor([0, 0, 1, 1, 1, 1, 1])}, [7]))
    assert rows() == {2, 4}
    sampler.strict_length = True
    assert rows() == {4}
    sampler.span = (False, True)
    assert rows() == {1, 2, 3, 4} and sampler.span == (False, True)
    sampler.span = 1
    assert sampler.span == (1, 1) and rows() == {3, 4}
    with pytest.raises(ValueError, match="span is a bool, a number"):
        sampler.span = "some"
    sampler.span, sampler.strict_length, sampler.weight = False, False, "steps"
    assert rows() == {1, 2, 3, 4}  # every step is a start
    with pytest.raises(ValueError, match="weight must be one of"):
        sampler.weight = "rows"
    assert sampler.weight == "steps"
    sampler.weight, sampler.strict_length = "trajectories", True
    sampler.num_slices = 2
    with pytest.raises(ValueError, match="num_slices must be an integer of 1 or more"):
        sampler.num_slices = 0
    assert len(rb.sample(8)) == 8 and sampler.num_slices == 2


def test_pickles_of_samplers_that_had_their_settings_as_attributes_are_read():
    samplers = [
        SliceSampler(slice_len=3, span=(1, True), pad_output=True, slice_key="s", weight="steps"),
        SliceSamplerWithoutReplacement(num_slices=2, truncated_key=None),
        SequenceSampler(slice_len=4, burn_in=2, mask_key="m", init_key=None),
        PrioritizedSliceSampler(50, 0.7, 0.5, num_slices=2, strict_length=False),
        FrameStackSampler(slice_len=3),
    ]
    for sampler in samplers:
        state = sampler.__getstate__()
        rule = state.pop("_rule")
        shown = {name: value for name, value in rule._asdict().items() if hasattr(type(sampler), name)}
        read = type(sampler).__new__(type(sampler))
        read.__setstate__({**state, **shown})
        assert read._rule == rule and repr(read) == repr(sampler) and not shown.keys() & vars(read).keys()


@pytest.mark.parametrize("ask", [{}, {"return_info": True}])
def test_a_setting_that_is_assigned_while_a_plan_is_made_decides_the_next_draw(ask, monkeypatch):
    sampler = SliceSampler(num_slices=1, traj_key="episode", strict_length=False)
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=4)
    rb.extend(TensorDict({"episode": torch.tensor([0, 0, 1, 1, 1, 1, 1])}, [7]))
    rb.sample(2, **ask)
    plan = RunRule.plan

    def plan_and_assign(rule, batch_size):  # as another thread may do at this moment
        planned = plan(rule, batch_size)
        monkeypatch.setattr(RunRule, "plan", plan)
        sampler.strict_length = True
        return planned

    monkeypatch.setattr(RunRule, "plan", plan_and_assign)
    rb.sample(**ask)
    assert sampler.strict_length
    assert {len(rb.sample(**ask)[0] if ask else rb.sample()) for _ in range(40)} == {4}


def test_sizes_of_slices_are_not_both_none():
    sampler = SliceSampler(slice_len=2, traj_key="episode")
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler)
    rb.extend(TensorDict({"episode": torch.zeros(9).long()}, [9]))
    with pytest.raises(TypeError, match="slice_len cannot be None where num_slices is: assign num_slices first"):
        sampler.slice_len = None
    assert sampler.slice_len == 2 and rb.sample(6, return_info=True)[1]["slice_id"].tolist() == [0, 0, 1, 1, 2, 2]
    sampler.num_slices, sampler.slice_len = 2, None
    assert rb.sample(6, return_info=True)[1]["slice_id"].tolist() == [0, 0, 0, 1, 1, 1]
    with pytest.raises(TypeError, match="num_slices cannot be None where slice_len is"):
        sampler.num_slices = None
    assert len(rb.sample(8)) == 8


def test_a_burn_in_that_is_assigned_decides_the_next_draw():
    sampler = SequenceSampler(num_slices=1, burn_in=3, traj_key="episode")
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=4)
    rb.extend(TensorDict({"episode": torch.tensor([0, 0])}, [2]))
    padding = {int((~rb.sample()["collector", "mask"]).sum()) for _ in range(40)}
    assert padding == {2, 3}
    sampler.burn_in = 2
    assert {int((~rb.sample()["collector", "mask"]).sum()) for _ in range(40)} == {2}
    with pytest.raises(ValueError, match="burn_in must be an integer of 0 or more"):
        sampler.burn_in = -1
    sampler.burn_in = 4
    with pytest.raises(ValueError, match="leaves no row to train on"):
        rb.sample()


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
    many = [ReplayBuffer(storage=LazyMemmapStorage(60, tmp_path, existsok=True, lanes=LaneCount(2))) for _ in range(2)]
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


# ---- the flag that a trajectory begins ----
ALL_SLICES = {
    "uniform": lambda **how: SliceSampler(slice_len=4, traj_key="id", **how),
    "by step": lambda **how: SliceSampler(slice_len=4, traj_key="id", weight="steps", **how),
    "short": lambda **how: SliceSampler(slice_len=4, traj_key="id", strict_length=False, span=True, **how),
    "padded": lambda **how: SliceSampler(slice_len=4, traj_key="id", strict_length=False, pad_output=True, **how),
    "epochs": lambda **how: SliceSamplerWithoutReplacement(slice_len=4, traj_key="id", **how),
    "by priority": lambda **how: PrioritizedSliceSampler(None, 0.7, 0.9, slice_len=4, traj_key="id", **how),
    "sequences": lambda **how: SequenceSampler(slice_len=4, traj_key="id", **how),
}
FLAG_SHAPES = {"column": (1,), "plain": (), "agents": (3, 1)}


def with_init(lengths, start=0, first_id=0, shape=(1,)):
    """Episodes of which every third step is said to begin one."""
    data = episodes(lengths, start, first_id)
    data["is_init"] = (data["n"] % 3 == 0).reshape(-1, *[1] * len(shape)).expand(-1, *shape).clone()
    return data


def assert_init_marked(batch, slice_id, mask=None):
    first = slice_id != torch.cat([torch.tensor([-1]), slice_id[:-1]])
    expected = first | (batch["n"] % 3 == 0)
    assert torch.equal(batch["is_init"].reshape(len(first), -1).all(1), expected)
    assert torch.equal(batch["is_init"].reshape(len(first), -1).any(1), expected)


@each("kind", ALL_SLICES)
@each("storage", STORAGES)
def test_first_step_of_each_slice_is_marked_as_init_and_the_stored_row_stays(kind, storage, tmp_path):
    for truncated_key in (None, ("next", "truncated")):
        sampler = ALL_SLICES[kind](truncated_key=truncated_key)
        rb = ReplayBuffer(storage=STORAGES[storage](tmp_path / str(truncated_key), 30), sampler=sampler, batch_size=12)
        if storage != "columns":
            for k in range(3):  # the ring wraps
                rb.extend(with_init([7, 9, 4], 20 * k, 3 * k))
        else:
            rb = ReplayBuffer(storage=TensorStorage(with_init([7, 9, 4])), sampler=sampler, batch_size=12)
        before = [step["is_init"].clone() for step in rb[:]]
        for _ in range(4):
            batch, info = rb.sample(return_info=True)
            assert_init_marked(batch, info["slice_id"])
            plain = rb.sample()  # by the native reader, where there is one
            starts = plain["n"] != torch.cat([torch.tensor([-9]), plain["n"][:-1]]) + 1
            assert bool(plain["is_init"].flatten()[starts & (kind not in ("padded", "sequences"))].all())
        assert all(torch.equal(old, step["is_init"]) for old, step in zip(before, rb[:], strict=True))


@each("shape", FLAG_SHAPES.values())
@each("kind", ["uniform", "by priority"])
def test_init_flags_of_any_shape_are_marked_with_environments_and_ahead(kind, shape):
    storage = LazyTensorStorage(40, ndim=2)
    rb = TensorDictReplayBuffer(storage=storage, sampler=ALL_SLICES[kind](), batch_size=12, prefetch=2)
    rb.extend(torch.stack([with_init([7, 9, 4], 100 * env, 10 * env, shape) for env in range(2)]))
    for _ in range(6):
        batch, info = rb.sample(return_info=True)
        assert_init_marked(batch, info["slice_id"])


@pytest.mark.parametrize("kind", ["uniform", "by priority"])
def test_init_flags_are_marked_in_each_part_of_an_ensemble(kind):
    rbs = [ReplayBuffer(storage=LazyTensorStorage(20), sampler=ALL_SLICES[kind]()) for _ in range(2)]
    for k, rb in enumerate(rbs):
        rb.extend(with_init([7, 9, 4], 20 * k))
    batch, info = ReplayBufferEnsemble(*rbs, batch_size=24, sample_from_all=True).sample(return_info=True)
    for part, slice_id in zip(batch, info["slice_id"], strict=True):
        assert_init_marked(part, slice_id)


@pytest.mark.filterwarnings("ignore:a batch of shape")
@pytest.mark.parametrize("kind", ["uniform", "by priority"])
def test_init_flags_are_not_added_and_those_of_whole_trajectories_stay(kind):
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=ALL_SLICES[kind]())
    rb.extend(episodes([7, 9, 4]))
    assert "is_init" not in rb.sample(8).keys()
    for data in (TensorDict({"is_init": torch.zeros(8, 5, 1).bool()}, [8, 5]), {"is_init": torch.zeros(8, 5).bool()}):
        sampler = SliceSampler(slice_len=2, trajectories=torch.zeros(8).long(), truncated_key=None)
        rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler)
        rb.extend(data)
        for _ in range(2):
            assert not bool(rb.sample(4)["is_init"].any()) and not bool(rb.sample(4, True)[0]["is_init"].any())


@each("kind", ["uniform", "padded", "by priority", "sequences"])
def test_slices_that_came_as_rows_are_marked_as_those_of_a_buffer(kind):
    sampler = ALL_SLICES[kind](slice_key="slice")
    for data in (with_init([7, 9, 4, 2]), episodes([7, 9, 4, 2])):
        rb = ReplayBuffer(storage=LazyTensorStorage(30), sampler=sampler)
        rb.extend(data)
        index, info = sampler.sample(rb.storage, 20)
        slices = info["slices"]
        expected, batch = rb[index], rb[index]
        mark(expected, sampler._rule.marks, slices, {})
        mask = slices.mask() if ("collector", "mask") in info else None
        mark_rows(batch, sampler, slices.last().flatten(), mask)
        assert_equal(batch, expected)


def test_init_flags_of_numbers_are_marked_too():
    for dtype in (torch.uint8, torch.float32):
        data = with_init([7, 9, 4])
        data["is_init"] = data["is_init"].to(dtype)
        rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=4, traj_key="id"))
        rb.extend(data)
        assert bool((rb.sample(12)["is_init"].reshape(3, 4)[:, 0] == 1).all())


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
@each("dtype", [torch.int8, torch.int16, torch.uint8, torch.int32, torch.int64])
@each("key", ["episode", ("collector", "traj_ids"), ("some", "where", "deep")])
def test_ids_of_any_integer_dtype_and_place_begin_trajectories(dtype, key):
    ids = torch.tensor([5, 5, 5, 5, 2, 2, 2, 2, 5, 5, 5, 5], dtype=dtype)
    known = key != ("some", "where", "deep")
    sampler = SliceSampler(slice_len=4, traj_key=None if known else key)
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler)
    data = TensorDict({"n": torch.arange(12), "next": {"done": torch.zeros(12, 1).bool()}}, [12])
    rb.extend(data.set(key, ids))
    assert set(rb.sample(400)["n"][::4].tolist()) == {0, 4, 8}
    assert len(sampler.episodes.trajectories(rb.storage).start) == 3


def test_given_end_key_has_precedence_over_stored_trajectory_ids():
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
    rb.set_sampler(SliceSampler(slice_len=2, traj_key="which", end_key="end"))
    with pytest.raises(KeyError, match="neither done flags 'end' nor trajectory ids 'which'"):
        rb.sample(4)
    rb.set_sampler(SliceSampler(slice_len=2, end_keys=["end", "over"]))
    with pytest.raises(KeyError, match="neither done flags 'end' or 'over' nor trajectory ids"):
        rb.sample(4)
    rb.set_sampler(SliceSampler(slice_len=2, end_key=("next", "reward")))
    with pytest.raises(ValueError, match=re.escape("('next', 'reward') is torch.float32 [1] a step; a flag is a bool")):
        rb.sample(4)
    with pytest.raises(TypeError, match="end_key: a key is"):
        SliceSampler(slice_len=2, end_key=3)
    with pytest.raises(ValueError, match="give one of traj_key, ends, trajectories"):
        SliceSampler(slice_len=2, traj_key="a", ends=torch.zeros(3).bool())


def of_any_steps(storage, n, **how):
    return ReplayBuffer(storage=storage(n), sampler=SliceSampler(**how))


@each("storage", [LazyTensorStorage, ListStorage, LazyMemmapStorage])
@each("how", [{}, {"end_key": "over"}])
def test_flags_decide_where_the_steps_lack_the_ids_that_are_named_and_a_warning_says_so_once(storage, how):
    rb = of_any_steps(storage, 20, slice_len=4, traj_key="which", **how)
    data = episodes([4, 6, 4])
    data["over"] = data["next", "done"]
    rb.extend(data)
    with pytest.warns(UserWarning, match="no trajectory ids 'which'"):
        slices_of(*rb.sample(80, return_info=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.extend(episodes([3]).update({"over": torch.zeros(3, 1, dtype=torch.bool)}))
        slices_of(*rb.sample(80, return_info=True))
        ReplayBuffer(storage=rb.storage, sampler=rb.sampler).sample(8)


@each("storage", [LazyTensorStorage, ListStorage, LazyMemmapStorage])
def test_any_of_several_flags_ends_a_trajectory(storage):
    rb = of_any_steps(storage, 40, slice_len=3, end_keys=[("next", "done"), "cut", "missing"])
    for _ in range(4):
        data = episodes([5, 7])
        data["cut"] = torch.zeros(12, dtype=torch.uint8)
        data["cut"][8] = 3
        rb.extend(data)
    starts = set(rb.sample(900)["n"][::3].tolist())
    assert starts == {0, 1, 2, 5, 6, 9}
    assert rb.sampler.end_keys == (("next", "done"), "cut", "missing") and rb.sampler.end_key is None
    other = of_any_steps(storage, 40, slice_len=3, end_keys=[("next", "done"), "cut", "missing"])
    other.load_state_dict(rb.state_dict())
    assert set(other.sample(900)["n"][::3].tolist()) == starts
    with pytest.raises(ValueError, match="end_key"):
        of_any_steps(storage, 40, slice_len=3).load_state_dict(rb.state_dict())


def test_either_one_flag_or_several_are_named():
    for keys in ({"end_key": "a", "end_keys": ["b"]}, {"end_keys": []}, {"end_keys": "done"}):
        with pytest.raises(ValueError, match="give end_key, or end_keys"):
            SliceSampler(slice_len=2, **keys)


def test_a_sampler_says_which_keys_it_reads():
    sampler = SliceSampler(slice_len=2, traj_key="id")
    assert sampler.traj_key == "id" and sampler.end_key == ("next", "done") and sampler.end_keys is None
    sampler = SliceSampler(slice_len=2, traj_key=("collector", "traj_ids"), end_key="end")
    assert sampler.traj_key == ("collector", "traj_ids") and sampler.end_key == "end"
    assert SliceSampler(slice_len=2).traj_key is None


# ---- without a buffer ----
FLAGS = [("next", "truncated"), ("next", "done"), ("next", "terminated")]


def test_a_sampler_alone_hands_out_the_flags_with_the_last_step_of_each_slice_marked(make):
    data = episodes([4, 6, 2], running=True)
    data["next", "truncated"][3] = True
    data["next", "terminated"][3] = False
    rb = make(20, slice_len=2)
    rb.extend(data)
    for _ in range(5):
        index, info = rb.sampler.sample(rb.storage, 20)
        assert all(info[key].shape == (20, 1) and info[key].dtype is torch.bool for key in FLAGS)
        stored, last = data[index], torch.tensor([[False], [True]]).repeat(10, 1)
        assert torch.equal(info[FLAGS[0]], stored[FLAGS[0]] | last)
        assert torch.equal(info[FLAGS[1]], stored[FLAGS[1]] | last)
        assert torch.equal(info[FLAGS[2]], stored[FLAGS[2]])


@pytest.mark.parametrize("ask", [
    lambda info: dict(info), lambda info: {**info}, lambda info: dict(info.items()), lambda info: info.copy(),
    lambda info: {key: info[key] for key in info}, lambda info: dict(zip(info.keys(), info.values(), strict=True)),
    lambda info: {key: info.get(key) for key in [*FLAGS, "slice_id", "slices"]},
    lambda info: {key: info.pop(key) for key in [*FLAGS, "slice_id", "slices"]},
    lambda info: info | {},
])  # fmt: skip
def test_flags_are_there_however_they_are_looked_for_and_not_read_before(make, ask):
    rb = make(20, slice_len=2)
    rb.extend(episodes([4, 6]))
    _, info = rb.sampler.sample(rb.storage, 4)
    assert info and all(key in info for key in FLAGS) and "more" not in info and info.make is not None
    answer = ask(info)
    assert type(answer) is dict and set(answer) == {*FLAGS, "slice_id", "slices"}
    with pytest.raises(KeyError):
        info["more"]


def test_flags_that_the_steps_lack_are_made_and_environments_have_their_own():
    rb = ReplayBuffer(storage=LazyTensorStorage(40, ndim=2), sampler=SliceSampler(slice_len=2, end_key="end"))
    end = torch.zeros(3, 8, dtype=torch.bool)
    end[1, 3] = True
    rb.extend(TensorDict({"end": end, "next": {"terminated": end.unsqueeze(-1)}}, [3, 8]))
    (time, env), info = rb.sampler.sample(rb.storage, 60)
    last = torch.tensor([[False], [True]]).repeat(30, 1)
    assert torch.equal(info[FLAGS[0]], last) and torch.equal(info[FLAGS[1]], last)
    assert torch.equal(info[FLAGS[2]], ((time == 3) & (env == 1)).unsqueeze(-1)) and bool(info[FLAGS[2]].any())


def test_a_batch_says_terminated_whether_it_is_stored_or_not(make):
    rb = make(20, slice_len=4)
    rb.extend(episodes([4, 4]))
    batch, info = rb.sample(20, return_info=True)
    assert torch.equal(info[FLAGS[2]], batch[FLAGS[2]]) and info[FLAGS[2]].sum() == 5
    rb = of_any_steps(LazyTensorStorage, 20, slice_len=4)
    rb.extend(episodes([4, 4]).exclude(("next", "terminated")))
    batch, info = rb.sample(20, return_info=True)
    assert info[FLAGS[2]].shape == (20, 1) and not bool(info[FLAGS[2]].any()) and FLAGS[2] not in batch.keys(True)
    rb.set_sampler(SliceSampler(slice_len=4, truncated_key=None))
    assert (
        not set(FLAGS) & set(rb.sample(20, return_info=True)[1]) and FLAGS[0] not in rb.sampler.sample(rb.storage, 4)[1]
    )


# ---- padding behind ----
def test_short_slices_are_padded_behind_and_a_mask_says_where(make):
    torch.manual_seed(0)
    rb = make(30, slice_len=4, strict_length=False, span=(2, False), pad_output=True)
    rb.extend(episodes([1, 3, 6]))
    batch, info = rb.sample(400, return_info=True)
    mask = batch["collector", "mask"]
    assert torch.equal(mask, info["collector", "mask"]) and len(batch) == len(mask) == 400
    assert torch.equal(info["slice_id"], torch.arange(100).repeat_interleave(4))
    rows, seen = batch["n"].reshape(100, 4), set()
    for n, is_step, cut in zip(rows, mask.reshape(100, 4), batch["next", "truncated"].reshape(100, 4), strict=True):
        steps = int(is_step.sum())
        assert is_step.tolist() == [True] * steps + [False] * (4 - steps)
        assert n.tolist() == list(range(int(n[0]), int(n[0]) + steps)) + [int(n[0]) + steps - 1] * (4 - steps)
        assert cut.tolist() == [i == steps - 1 for i in range(4)]
        seen.add((int(n[0]), steps))
    assert seen == {(0, 1), (1, 2), (1, 3), (4, 2), (4, 3), (4, 4), (5, 4), (6, 4)}


def test_an_epoch_of_slices_can_be_padded_too():
    sampler = SliceSamplerWithoutReplacement(slice_len=3, strict_length=False, pad_output=True, shuffle=False)
    rb = ReplayBuffer(storage=LazyTensorStorage(30), sampler=sampler, batch_size=6)
    rb.extend(episodes([3, 1, 2]))
    assert [batch["n"].tolist() for batch in rb] == [[0, 1, 2, 3, 3, 3], [4, 5, 5]]


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


# ---- SliceSamplerWithoutReplacement: each trajectory once an epoch, wherever it is loaded ----
class TestSliceSamplerWithoutReplacement(SliceContract):
    def make(self):
        return SliceSamplerWithoutReplacement(slice_len=2, end_key="done", truncated_key=None)


class TestInOrder(SliceContract):
    def make(self):
        return SliceSamplerWithoutReplacement(
            num_slices=1, end_key="done", truncated_key=None, drop_last=True, shuffle=False, strict_length=False
        )

    def test_a_sampler_used_for_two_buffers_mixes_nothing_up(self):
        super().test_a_sampler_used_for_two_buffers_mixes_nothing_up()


def buffer(capacity=100, batch_size=6, **how):
    sampler = SliceSamplerWithoutReplacement(slice_len=2, **how)
    generator = torch.Generator().manual_seed(3)
    return ReplayBuffer(
        storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=batch_size, generator=generator
    )


def ids_of(rb):
    """The episode of each slice, to the end of the epoch."""
    return [n for batch in rb for n in batch["id"][::2].tolist()]


def test_every_trajectory_that_is_long_enough_is_drawn_once_an_epoch():
    rb = buffer()
    rb.extend(episodes([5, 1, 3, 2, 9, 1, 4, 2, 2, 7]))
    for _ in range(5):
        sizes, seen = [], []
        for batch in rb:
            sizes.append(len(batch))
            seen += batch["id"][::2].tolist()
        assert sorted(seen) == [0, 2, 3, 4, 6, 7, 8, 9] and sizes == [6, 6, 4]
        assert rb.sampler.ran_out
    slices_of(*rb.sample(return_info=True))
    assert not rb.sampler.ran_out


def test_a_last_batch_that_is_not_full_can_be_left_out():
    rb = buffer(drop_last=True)
    rb.extend(episodes([2] * 8))
    for _ in range(3):
        assert [len(batch) for batch in rb] == [6, 6]
    assert rb.sample(16).shape == (16,)
    with pytest.raises(ValueError, match=r"a batch is 9 slices, but only 8 trajectories have 2 steps"):
        rb.sample(18)


def test_in_order_means_oldest_first():
    rb = buffer(capacity=20, shuffle=False)
    rb.extend(episodes([2] * 13))
    assert ids_of(rb) == list(range(3, 13))


def test_orders_are_as_likely_and_so_are_starts():
    rb = buffer(batch_size=2)
    rb.extend(episodes([4, 4, 4]))
    first, starts = [], []
    for _ in range(3000):
        batches = [batch["n"][0].item() for batch in rb]
        first.append(tuple(n // 4 for n in batches))
        starts += batches
    assert_uniform(first, [(a, b, 3 - a - b) for a in range(3) for b in range(3) if a != b])
    assert_uniform(starts, [0, 1, 2, 4, 5, 6, 8, 9, 10])


def test_trajectories_that_come_during_an_epoch_join_the_next():
    rb = buffer()
    rb.extend(episodes([2, 2, 2, 2, 1], running=True))
    seen = rb.sample()["id"][::2].tolist()
    rb.extend(episodes([3, 2], start=9, first_id=4))
    assert sorted(seen + ids_of(rb)) == [0, 1, 2, 3]
    assert sorted(ids_of(rb)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("shuffle", [True, False])
def test_trajectories_that_are_overwritten_during_an_epoch_are_skipped(shuffle):
    for seed in range(20):
        rb = buffer(capacity=20, shuffle=shuffle)
        rb.generator.manual_seed(seed)
        rb.extend(episodes([2] * 10))
        seen = rb.sample()["id"][::2].tolist()
        rb.extend(episodes([2] * 4, start=20, first_id=10))
        seen += ids_of(rb) if not rb.sampler.ran_out else []
        assert len(seen) == len(set(seen)) and set(seen) | set(range(4)) == set(range(10))
        assert sorted(ids_of(rb)) == list(range(4, 14))


def test_a_row_of_a_slice_that_a_draw_has_left_out_is_not_drawn_again():
    rb = buffer(capacity=10, shuffle=False)
    rb.extend(episodes([2] * 5))
    draw = rb.sampler.draw_plan(rb.storage).draw(10)  # the whole epoch: nothing can take the place of a slice
    assert draw.redraw([9]).slots.tolist() == list(range(8))
    assert draw.redraw([8]).slots.tolist() == list(range(8))


def test_another_batch_size_that_changes_the_length_begins_an_epoch():
    sampler = SliceSamplerWithoutReplacement(num_slices=2)
    rb = ReplayBuffer(storage=LazyTensorStorage(50), sampler=sampler)
    rb.extend(episodes([4, 2, 4, 2, 4]))
    rb.sample(4)
    seen = [n for _ in range(2) for n in rb.sample(8)["id"][::4].tolist()]
    assert sorted(seen) == [0, 2, 4]


def test_a_state_saved_at_every_step_goes_on_the_same_elsewhere(tmp_path):
    """Also where rows were written and overwritten between the last draw and the save."""
    for shuffle in (True, False):
        rb = buffer(capacity=40, batch_size=4, shuffle=shuffle)
        rb.extend(episodes([3, 2, 5, 1, 2, 2, 4, 2, 6]))
        at = 27
        for k in range(14):
            if k % 3 != 2:
                rb.sample()
            if k % 2:
                rb.extend(episodes([k % 5 + 1], start=at, first_id=100 + k, running=k % 4 == 1))
                at += k % 5 + 1
            path = tmp_path / f"{shuffle}{k}"
            rb.dumps(path)
            expected = [rb.sample()["n"].tolist() for _ in range(9)]
            for capacity in (40, 55):
                twin = buffer(capacity=capacity, batch_size=4, shuffle=shuffle)
                twin.loads(path)
                assert [twin.sample()["n"].tolist() for _ in range(9)] == expected, (shuffle, k, capacity)
            rb.loads(path)


def test_an_epoch_that_is_loaded_into_a_store_with_more_lanes_goes_on(tmp_path):
    rb = buffer()
    rb.extend(episodes([2] * 10))
    rb.sample()
    rb.dumps(tmp_path / "saved")
    expected = ids_of(rb)
    sampler = SliceSamplerWithoutReplacement(slice_len=2)
    twin = ReplayBuffer(
        storage=LazyMemmapStorage(400, lanes=2), sampler=sampler, batch_size=6, generator=torch.Generator()
    )
    twin.loads(tmp_path / "saved")
    assert ids_of(twin) == expected


def test_prepared_batches_are_those_without_preparation():
    def drawn(prefetch):
        sampler = SliceSamplerWithoutReplacement(slice_len=2)
        generator = torch.Generator().manual_seed(1)
        storage = LazyTensorStorage(60)
        rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=4, generator=generator, prefetch=prefetch)
        rb.extend(episodes([4, 2, 6, 3, 2, 8, 5, 2, 2]))
        first = [rb.sample()["n"].tolist() for _ in range(4)]
        rb[0] = rb[0]  # drops what was prepared
        return first + [[b["n"].tolist() for b in rb] for _ in range(3)]

    assert drawn(0) == drawn(3)


def test_saved_settings_that_differ_are_refused():
    rb = buffer()
    rb.extend(episodes([2] * 5))
    with pytest.raises(ValueError, match="drop_last=True here, False there"):
        buffer(drop_last=True).load_state_dict(rb.state_dict())


# ---- SequenceSampler: windows of one length, burn-in, padding, masks, beginnings ----
MASK = ("collector", "mask")


class TestSequenceSampler(SliceContract):
    def make(self):
        return SequenceSampler(slice_len=2, end_key="done", truncated_key=None)


@each("storage", [LazyTensorStorage, ListStorage])
@each("strict", [True, False])
def test_a_window_is_burn_in_and_training_steps_with_padding_around(storage, strict):
    sampler = SequenceSampler(slice_len=6, burn_in=2, strict_length=strict)
    rb = ReplayBuffer(storage=storage(40), sampler=sampler)
    rb.extend(episodes([7, 3, 4], start=0))
    trained = set()
    for _ in range(100):
        batch = rb.sample(12).reshape(2, 6)
        for row in batch:
            n, mask = row["n"].tolist(), row[MASK].tolist()
            real = [i for i, m in zip(n, mask, strict=True) if m]
            assert real == list(range(real[0], real[0] + len(real))) and len(set(row["id"].tolist())) == 1
            left = mask.index(True)
            right = 6 - left - len(real)
            assert n == [real[0]] * left + real + [real[-1]] * right
            assert left <= 2 and (left == 0 or real[0] in (0, 7, 10))
            assert right == 0 or (not strict and real[-1] == 9)
            ends = [i == left + len(real) - 1 for i in range(6)]
            done = row["next", "done"].flatten().tolist()
            assert row["next", "truncated"].flatten().tolist() == ends
            assert [d for d, m in zip(done, mask, strict=True) if m] == [
                e for e, m in zip(ends, mask, strict=True) if m
            ]
            assert row["is_init"].flatten().tolist() == [i == left for i in range(6)]
            trained |= {i for i, m in zip(n[2:], mask[2:], strict=True) if m}
        warm_up, training = sampler.split(batch)
        assert warm_up.shape == (2, 2) and torch.equal(training["n"], batch["n"][:, 2:])
    assert trained == {*range(7), *(range(7, 10) if not strict else ()), *range(10, 14)}


def test_starts_of_training_are_uniform():
    torch.manual_seed(0)
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sampler=SequenceSampler(slice_len=5, burn_in=3))
    rb.extend(episodes([8]))
    assert_uniform(rb.sample(100_000)["n"].reshape(-1, 5)[:, 3].tolist(), range(7))


def test_without_burn_in_whole_windows_are_slices():
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sampler=SequenceSampler(num_slices=3))
    rb.extend(episodes([8, 9]))
    batch, info = rb.sample(12, return_info=True)
    assert batch[MASK].all() and info[MASK].all() and (batch["n"].reshape(3, 4).diff() == 1).all()


def test_short_trajectories_are_padded_behind():
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sampler=SequenceSampler(slice_len=5, strict_length=False))
    rb.extend(episodes([3]))
    batch, info = rb.sample(5, return_info=True)
    assert batch["n"].tolist() == [0, 1, 2, 2, 2] and batch[MASK].tolist() == [True] * 3 + [False] * 2
    assert info["slice_id"].tolist() == [0] * 5 and info["index"].tolist() == [0, 1, 2, 2, 2]


def test_marks_that_the_data_have_stay():
    data = episodes([4, 4])
    data["is_init"] = torch.tensor([1, 0, 1, 0, 1, 0, 0, 0]).bool().unsqueeze(-1)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=SequenceSampler(slice_len=4), batch_size=8)
    rb.extend(data)
    for row in rb.sample().reshape(2, 4):
        wanted = [True, False, row["id"].unique().item() == 0, False]
        assert row["is_init"].flatten().tolist() == wanted
    rb.set_sampler(SequenceSampler(slice_len=3, init_key=None, mask_key="real", traj_key="id"))
    batch = rb.sample(6)
    assert batch["real"].all() and "collector" not in batch


def test_burn_in_must_leave_steps_to_train_on():
    for burn_in in (-1, True, 1.5):
        with pytest.raises(ValueError, match="burn_in must be an integer of 0 or more"):
            SequenceSampler(slice_len=4, burn_in=burn_in)
    with pytest.raises(ValueError, match="burn_in=4 leaves no row to train on of sequences of 4"):
        SequenceSampler(slice_len=4, burn_in=4)
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sampler=SequenceSampler(num_slices=2, burn_in=4))
    rb.extend(episodes([9]))
    with pytest.raises(ValueError, match="leaves no row to train on of sequences of 3"):
        rb.sample(6)
    with pytest.raises(TypeError, match="there is no span"):
        SequenceSampler(slice_len=4, span=True)


def test_batches_of_dicts_and_tensors_are_split_into_burn_in_and_training_rows():
    sampler, x = SequenceSampler(slice_len=4, burn_in=1), torch.arange(8).reshape(2, 4)
    for part in (sampler.split({"x": x, "next": {"x": x}}), [{"x": p, "next": {"x": p}} for p in sampler.split(x)]):
        assert [p["x"].tolist() for p in part] == [[[0], [4]], [[1, 2, 3], [5, 6, 7]]]
        assert [p["next"]["x"].shape[1] for p in part] == [1, 3]


def slices_of_two_trajectories(sampler, n=20):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(n), sampler=sampler, batch_size=12)
    rb.extend(TensorDict({"episode": torch.arange(n) // 10, "step": torch.arange(n)}, [n]))
    return rb


def test_sequences_ignore_pad_output():
    sampler = SequenceSampler(slice_len=4, burn_in=1, traj_key="episode")
    rb = slices_of_two_trajectories(sampler)
    sampler.pad_output = True
    assert len(rb.sample()) == 12 and len(sampler.sample(rb.storage, 12)[0]) == 12


class GrowingSlices(SliceSampler):
    length = 2

    @property
    def slice_len(self):
        return self.length

    @slice_len.setter
    def slice_len(self, value):
        self.given_len = value


class GrowingSequences(SequenceSampler):
    length = 2
    slice_len = GrowingSlices.slice_len


@pytest.mark.parametrize("kind", [GrowingSlices, GrowingSequences])
@pytest.mark.parametrize("ask", [{}, {"return_info": True}])
def test_a_length_that_a_child_decides_is_obeyed_by_every_draw(kind, ask):
    sampler = kind(slice_len=5, traj_key="episode", slice_key="slice")
    rb = slices_of_two_trajectories(sampler)
    assert sampler.given_len == 5 and sampler.state_dict()["slice_len"] == 2
    for length in (2, 3, 4, 2):
        sampler.length = length
        batch = rb.sample(**ask)[0] if ask else rb.sample()
        assert torch.equal(batch["slice"], torch.arange(12) // length)
        assert sampler.sample(rb.storage, 12)[1]["slice_id"].max() == 12 // length - 1
        assert sampler.can_sample(rb.storage, 12)
    with pytest.raises(ValueError, match="no multiple of slice_len=5"):
        sampler.length = 5
        rb.sample()


def test_a_number_of_slices_that_a_child_stores_elsewhere_is_obeyed():
    class Slices(SliceSampler):
        @property
        def num_slices(self):
            return self.settings["num_slices"]

        @num_slices.setter
        def num_slices(self, value):
            self.settings = {"num_slices": value}

    sampler = Slices(num_slices=3, traj_key="episode")
    rb = slices_of_two_trajectories(sampler)
    assert sampler.sample(rb.storage, 12)[1]["slice_id"].max() == 2
    sampler.num_slices = 4
    assert rb.sample(return_info=True)[1]["slice_id"].max() == 3 and repr(sampler).startswith("Slices(num_slices=4")


@pytest.mark.parametrize("as_property", [False, True])
def test_a_strict_length_of_a_child_is_its_own(as_property):
    class Slices(SliceSampler):
        strict_length = property(lambda self: False, lambda self, value: None) if as_property else False

    sampler = Slices(slice_len=12, traj_key="episode")
    rb = slices_of_two_trajectories(sampler)
    if not as_property:  # the constructor's argument lies before the attribute of the class
        with pytest.raises(RuntimeError, match="no trajectory has 12 steps"):
            rb.sample()
        del sampler.strict_length
    assert not sampler.strict_length and len(rb.sample()) == 10
    read = copy.copy(sampler)
    assert not read.strict_length and read.can_sample(rb.storage, 12)


def test_a_child_that_draws_another_number_of_rows_keeps_its_marks():
    class Halves(SliceSampler):
        def sample(self, storage, batch_size):
            return super().sample(storage, batch_size // 2 * 2)

    rb = slices_of_two_trajectories(Halves(num_slices=2, traj_key="episode"))
    assert rb.sample(9)["next", "done"].sum() == 2


class OwnNames(SliceSampler):
    def __init__(self, **settings):
        self.rule = "before"
        super().__init__(**settings)
        self.stays_here = self.burn_in = self.adds_init = "mine"


def test_names_of_a_childs_attributes_are_its_own():
    sampler = OwnNames(slice_len=3, traj_key="episode")
    rb = slices_of_two_trajectories(sampler)
    sampler.adds_init = True
    for one in (sampler, pickle.loads(pickle.dumps(sampler)), pickle.loads(ForkingPickler.dumps(sampler))):
        assert (one.rule, one.stays_here, one.burn_in, one.adds_init) == ("before", "mine", "mine", True)
    assert len(rb.sample()) == 12 and len(rb.sample(return_info=True)[0]) == 12


def test_pickles_from_before_keep_the_attributes_of_children():
    state = OwnNames(slice_len=3, traj_key="episode").__getstate__()
    state.pop("_rule", None)
    read = OwnNames.__new__(OwnNames)
    read.__setstate__({**state, "slice_len": 4, "strict_length": False})
    assert (read.slice_len, read.strict_length, read.burn_in, read.adds_init) == (4, False, "mine", "mine")
    assert len(slices_of_two_trajectories(read).sample()) == 12

    read = GrowingSlices.__new__(GrowingSlices)
    read.__setstate__({**state, "given_len": 7})
    assert read.given_len == 7 and read.slice_len == 2


@pytest.mark.parametrize(
    "sampler", [SequenceSampler(num_slices=4, burn_in=2), SliceSampler(num_slices=4, span=2)], ids=repr
)
def test_an_empty_storage_has_no_batch_whatever_the_settings(sampler):
    storage = LazyTensorStorage(10)
    assert not sampler.can_sample(storage, 4)
    with pytest.raises(ValueError, match="no multiple"):
        sampler.can_sample(storage, 3)


def test_marks_stand_in_the_order_of_keys_as_ever():
    keys = {
        SliceSampler: ["episode", "step", "next", "collector", "sid"],
        SequenceSampler: ["episode", "step", "next", "collector", "sid", "is_init"],
    }
    for kind, expected in keys.items():
        more = {"pad_output": True} if kind is SliceSampler else {}
        rb = slices_of_two_trajectories(kind(slice_len=4, traj_key="episode", slice_key="sid", **more))
        for batch in (rb.sample(), rb.sample(return_info=True)[0]):
            found = [key for key in batch.keys() if key in expected]
            assert found == [key for key in expected if key in batch.keys()]


def test_stacks_have_a_number_of_frames():
    sampler = FrameStackSampler(slice_len=3, traj_key="episode")
    sampler.num_slices = 2
    with pytest.raises(TypeError, match="slice_len is the number of frames of a stack; it cannot be None"):
        sampler.slice_len = None
    assert sampler.slice_len == 3
    with pytest.raises(TypeError, match="number of frames"):
        FrameStackSampler(slice_len=None, num_slices=2)


def test_slice_sampler_without_replacement_is_the_one_of_that_name():
    sampler = SliceSampler(slice_len=2, replacement=False, drop_last=True, traj_key="episode")
    assert type(sampler) is SliceSamplerWithoutReplacement and sampler.drop_last and sampler.slice_len == 2
    assert type(SliceSampler(slice_len=2, replacement=True)) is SliceSampler
    with pytest.raises(TypeError, match="a SequenceSampler draws with replacement; SliceSamplerWithoutReplacement"):
        SequenceSampler(slice_len=2, replacement=False)
    with pytest.raises(TypeError, match="an epoch has each trajectory once; SliceSampler draws with replacement"):
        SliceSamplerWithoutReplacement(slice_len=2, replacement=True)
