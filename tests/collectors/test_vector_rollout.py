"""Environments that step together, collected: what a loop with gymnasium alone gives, in each way to reset."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from contracts.batch_worlds import LoopEngine, Together
from contracts.each import each
from contracts.gym_loop import WORLDS, Proxy, Rule, assert_same, on_tensordicts, reference, remembering
from contracts.gym_worlds import SPACES, Countdown, Echo
from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.envs import GymEnv, SerialEnv
from engram.envs.engines import Autoreset, GymVectorEngine
from engram.envs.vector_env import VectorEnv

modes = pytest.mark.parametrize("mode", Autoreset, ids=lambda mode: mode.name)


def collector(worlds, mode, policy, steps=7, **arguments):
    made = SyncDataCollector(Together(worlds, mode), policy, frames_per_batch=steps * len(worlds), **arguments)
    made.set_seed(0)
    return made


def collect(worlds, mode, policy, batches=4, **arguments):
    made = collector(worlds, mode, policy, **arguments)
    return [made.rollout() for _ in range(batches)]


def serial(worlds, policy, batches=4, steps=7, **arguments):
    env = SerialEnv(len(worlds), [lambda w=w: GymEnv(w) for w in worlds])
    made = SyncDataCollector(Proxy(env), policy, frames_per_batch=steps * len(worlds), **arguments)
    made.set_seed(0)
    return [made.rollout() for _ in range(batches)]


@modes
@pytest.mark.parametrize("limit", [None, 1, 2, 3])
def test_batches_are_those_of_a_gymnasium_loop(mode, limit):
    batches = collect([Countdown(w) for w in WORLDS], mode, Rule(), max_frames_per_traj=limit)
    for batch, expected in zip(batches, reference([Countdown(w) for w in WORLDS], 4, 7, limit), strict=True):
        assert_same(batch, expected)
        assert batch.batch_size == (3, 7) and batch.device is None and batch["action"].is_contiguous()


@given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4),
    steps=st.integers(1, 9),
    limit=st.none() | st.integers(1, 7),
    mode=st.sampled_from(list(Autoreset)),
)
@settings(max_examples=30, deadline=None)
def test_any_episodes_are_those_of_a_gymnasium_loop(lengths, steps, limit, mode):
    worlds, copies = ([Countdown(tuple(own)) for own in lengths] for _ in range(2))
    batches = collect(worlds, mode, Rule(), 3, steps=steps, max_frames_per_traj=limit)
    for batch, expected in zip(batches, reference(copies, 3, steps, limit), strict=True):
        assert_same(batch, expected)


@given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4),
    steps=st.integers(1, 9),
    random_rows=st.integers(0, 20),
    mode=st.sampled_from(list(Autoreset)),
)
@settings(max_examples=20, deadline=None)
def test_exactly_the_first_rows_of_each_environment_are_random(lengths, steps, random_rows, mode):
    worlds = [Countdown(tuple(own)) for own in lengths]

    def always_two(td):
        return td.set("action", torch.tensor([0, 0, 1]).expand(len(lengths), 3)).set("mark", torch.ones(len(lengths)))

    made = collector(worlds, mode, always_two, steps, init_random_frames=random_rows * len(lengths))
    batches = torch.cat([made.rollout() for _ in range(4)], 1)
    assert bool((batches["mark"][:, :random_rows] == 0).all()) and bool((batches["mark"][:, random_rows:] == 1).all())
    assert bool((batches["action"][:, random_rows:].argmax(-1) == 2).all())
    if random_rows * len(lengths) > 50:
        assert batches["action"][:, :random_rows].argmax(-1).unique().tolist() == [0, 1, 2]


@pytest.mark.pairwise
@modes
@pytest.mark.parametrize("policy", [on_tensordicts, remembering], ids=["plain", "remembering"])
@pytest.mark.parametrize("limit", [None, 2])
def test_policies_on_tensordicts_write_what_they_write_step_by_step(mode, policy, limit):
    ours = collect([Countdown(w) for w in WORLDS], mode, policy, max_frames_per_traj=limit)
    theirs = serial([Countdown(w) for w in WORLDS], policy, max_frames_per_traj=limit)
    for batch, expected in zip(ours, theirs, strict=True):
        assert_same(batch, {key: expected.get(key) for key in expected.keys(True, True)})


@modes
@pytest.mark.parametrize("name", SPACES)
def test_every_space_is_collected(mode, name):
    worlds = [Echo(SPACES[name], SPACES[name], length) for length in (3, 5)]
    made = collector(worlds, mode, None, 12)
    batch = torch.cat([made.rollout() for _ in range(2)], 1)
    assert made.env.action_spec.is_in(batch["action"].transpose(0, 1))
    for key, spec in made.env.observation_spec.leaves().items():
        assert spec.is_in(batch.get(key).transpose(0, 1))


def test_the_stored_actions_are_those_that_gymnasium_got():
    worlds = [Echo(SPACES["box"], SPACES["discrete from 5"]) for _ in range(2)]
    batch = collect(worlds, Autoreset.DISABLED, None, 1, steps=20)[0]
    assert (batch["action"].argmax(-1) + 5).tolist() == [[int(a) for a in world.actions] for world in worlds]


def test_frames_that_one_environment_has_more_open_the_next_batch():
    worlds = [Countdown((1,)), Countdown((100,))]
    made = collector(worlds, Autoreset.NEXT_STEP, Rule(), 10)
    batches = [made.rollout() for _ in range(3)]
    assert torch.cat(batches, 1)["observation"][1, :, 0].tolist() == list(range(100, 70, -1))
    assert worlds[1].total > 50  # it ran ahead


def test_frames_that_wait_are_dropped_by_a_reset():
    made = collector([Countdown((1,)), Countdown((100,))], Autoreset.NEXT_STEP, Rule(), 10)
    made.rollout()
    made.reset()
    batch = made.rollout()
    assert batch["observation"][1, :, 0].tolist() == list(range(100, 90, -1))
    assert batch["collector", "traj_ids"][:, 0].tolist() == [11, 12]


def test_frames_that_waited_have_the_version_of_the_policy_that_made_them():
    made = collector([Countdown((1,)), Countdown((100,))], Autoreset.NEXT_STEP, Rule(), 10, track_policy_version=True)
    made.rollout()
    made.update_policy_weights_()
    version = made.rollout()["collector", "policy_version"]
    assert version.dtype is torch.int64
    assert version[0].tolist() == [1] * 10 and version[1].tolist() == [0] * 9 + [1]


class Stepped(VectorEnv):
    """Not known to be stepped as its engine is."""

    def _step(self, td):
        return super()._step(td)


def only_together(worlds, mode, cls=VectorEnv):
    return cls(LoopEngine([Countdown(w) for w in worlds], mode, can_reset_some=False))


resets_itself = pytest.mark.parametrize("mode", [Autoreset.NEXT_STEP, Autoreset.SAME_STEP], ids=lambda mode: mode.name)


@resets_itself
@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4),
    steps=st.integers(1, 9),
    limit=st.integers(1, 5),
    random=st.integers(0, 12),
)
@settings(max_examples=15, deadline=None)
def test_cut_episodes_of_environments_that_only_reset_together_are_those_of_the_general_loop(
    mode, lengths, steps, limit, random
):
    batches = []
    for cls in (VectorEnv, Stepped):
        torch.manual_seed(0)
        n = len(lengths)
        made = SyncDataCollector(
            only_together([tuple(own) for own in lengths], mode, cls),
            Rule(),
            frames_per_batch=steps * n,
            max_frames_per_traj=limit,
            init_random_frames=random if n == 1 else 0,  # several differ in when each has had its random frames
        )
        made.set_seed(0)
        batches.append([made.rollout() for _ in range(4)])
    for raw, stepped in zip(*batches, strict=True):
        assert set(raw.keys(True, True)) == set(stepped.keys(True, True))
        assert bool((raw == stepped).all())


@resets_itself
@pytest.mark.parametrize("cls", [VectorEnv, Stepped])
@pytest.mark.parametrize("worlds", [WORLDS, [(9, 3, 20), (4, 30), (7,)]], ids=["short", "long"])
def test_each_cut_episode_of_environments_that_only_reset_together_begins_with_a_reset(mode, cls, worlds):
    made = SyncDataCollector(only_together(worlds, mode, cls), Rule(), frames_per_batch=21, max_frames_per_traj=5)
    made.set_seed(0)
    batch = torch.cat([made.rollout() for _ in range(4)], 1)
    for row, lengths in zip(batch, worlds, strict=True):
        ids = row["collector", "traj_ids"]
        for trajectory in [row[ids == i] for i in ids.unique()[:-1]]:
            left = trajectory["observation"][:, 0].int().tolist()
            assert left[0] in lengths and left == list(range(left[0], left[0] - len(left), -1))
            assert len(left) == min(left[0], 5)
            done, truncated = (trajectory["next", key].squeeze(-1).tolist() for key in ("done", "truncated"))
            assert done == [False] * (len(left) - 1) + [True] and (truncated[-1] or left[0] <= 5)
    assert bool((batch["next", "observation"] == batch["observation"] + torch.tensor([-1.0, 1.0])).all())


def test_environments_that_end_no_episode_are_reset_together_at_the_limit():
    engine = LoopEngine([Countdown((900,)), Countdown((900,))], Autoreset.NEXT_STEP, can_reset_some=False)
    batch = SyncDataCollector(VectorEnv(engine), Rule(), frames_per_batch=20, max_frames_per_traj=4).rollout()
    assert batch["observation"][..., 0].tolist() == [[900, 899, 898, 897] * 2 + [900, 899]] * 2
    assert engine.worlds[0].total == 10


def test_an_environment_that_ends_no_episode_beside_others_is_an_error(monkeypatch):
    monkeypatch.setattr("engram.collectors.vector_rollout.MOST_AHEAD", 50)
    # the others never end at one step
    env = only_together([(100_000,), (2,), (1, *[2] * 1000)], Autoreset.SAME_STEP)
    made = SyncDataCollector(env, Rule(), frames_per_batch=60, max_frames_per_traj=7)
    with pytest.raises(RuntimeError, match=r"environments \[0\] were cut after max_frames_per_traj=7"):
        for _ in range(10):
            made.rollout()


def test_torchs_seed_reproduces_random_actions():
    def run():
        torch.manual_seed(3)
        return torch.cat(collect([Countdown(w) for w in WORLDS], Autoreset.NEXT_STEP, None), 1)

    first = run()
    assert bool((first == run()).all())
    assert first["action"].argmax(-1).unique().tolist() == [0, 1, 2]


@modes
def test_after_an_error_in_an_environment_new_trajectories_start(mode):
    class Breaks(Countdown):
        def step(self, action):
            if self.total == 3:
                self.total += 1
                raise OSError("the simulator is gone")
            return super().step(action)

    made = collector([Breaks((100,)), Countdown((100,))], mode, Rule(), 2)
    assert made.rollout()["collector", "traj_ids"].tolist() == [[0, 0], [1, 1]]
    assert made.rollout()["observation"][..., 0].tolist() == [[98]] * 2  # what was stepped before
    with pytest.raises(OSError, match="simulator"):
        made.rollout()
    batch = made.rollout()
    assert batch["collector", "traj_ids"].tolist() == [[2, 2], [3, 3]]
    assert batch["observation"][..., 0].tolist() == [[100, 99]] * 2


@modes
def test_later_batches_do_not_change_earlier_ones(mode):
    made = collector([Countdown(w, reuse_array=True) for w in WORLDS], mode, Rule())
    first = made.rollout()
    kept = first.clone()
    made.rollout()
    assert bool((first == kept).all())
    first["observation"].zero_()
    assert bool((first["next"] == kept["next"]).all())


@modes
def test_observations_of_another_shape_than_the_space_are_refused(mode):
    made = collector([Countdown()], mode, Rule())
    made.env.engine.batched = lambda: np.zeros((1, 3), np.float32)
    with pytest.raises(ValueError, match=r"'observation' of shape .* its space says"):
        made.rollout()


@modes
def test_a_policy_that_gives_scores_is_told_to_choose(mode):
    with pytest.raises(ValueError, match="argmax"):
        collect([Countdown()], mode, nn.Linear(2, 3))


MODES = {"NEXT_STEP": "NextStep", "SAME_STEP": "SameStep", "DISABLED": "Disabled"}


def vector(mode, worlds):
    mode = gymnasium.vector.AutoresetMode(MODES[mode])
    return gymnasium.vector.SyncVectorEnv([lambda w=w: w for w in worlds], autoreset_mode=mode)


@each("mode", MODES)
@each("limit", [None, 2])
@each("way", ["raw", "stepped"])
def test_gymnasiums_vector_environments_give_what_a_gymnasium_loop_gives(mode, limit, way):
    class Changed(VectorEnv):
        """Not known to be stepped as its engine is."""

        def _step(self, td):
            return super()._step(td)

    engine = GymVectorEngine(vector(mode, [Countdown(w) for w in WORLDS]), categorical=False)
    env = (VectorEnv if way == "raw" else Changed)(engine)
    assert (env.vector_engine() is None) == (way == "stepped")
    made = SyncDataCollector(env, Rule(), frames_per_batch=21, max_frames_per_traj=limit)
    made.set_seed(0)
    for expected in reference([Countdown(w) for w in WORLDS], 4, 7, limit):
        assert_same(made.rollout(), expected)


@pytest.mark.parametrize("way", ["raw", "stepped"])
def test_an_environment_that_only_resets_by_itself_gives_what_a_gymnasium_loop_gives(way):
    class Changed(VectorEnv):
        def _step(self, td):
            return super()._step(td)

    engine = LoopEngine([Countdown(w) for w in WORLDS], Autoreset.NEXT_STEP, can_reset_some=False)
    made = SyncDataCollector(
        (VectorEnv if way == "raw" else Changed)(engine), Rule(), frames_per_batch=21, track_policy_version=True
    )
    made.set_seed(0)
    for expected in reference([Countdown(w) for w in WORLDS], 4, 7):
        batch = made.rollout()
        assert_same(batch.exclude(("collector", "policy_version")), expected)


class SteppedGym(GymEnv):
    """Not known to be stepped as its engine is: collected through TensorDicts."""

    def _step(self, td):
        return super()._step(td)


class Remembers(nn.Module):
    """Two outputs: the choice, and one more entry of each step."""

    def forward(self, observation):
        return Rule()(observation), observation.sum(-1, keepdim=True)


ways = pytest.mark.parametrize(
    "arguments",
    [{}, {"split_trajs": True}, {"trajs_per_batch": 3}, {"max_frames_per_traj": 2}, {"set_truncated": True}],
    ids=lambda arguments: next(iter(arguments), "plain"),
)


@pytest.mark.pairwise
@ways
@pytest.mark.parametrize("policy", [Rule, Remembers], ids=["rule", "two outputs"])
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_rows_are_those_of_the_tensordict_interface(mode, policy, arguments):
    both = []
    for cls in (GymEnv, SteppedGym):
        torch.manual_seed(0)
        into = ReplayBuffer(storage=LazyTensorStorage(400))
        given, stats = [], []
        for buffer in (None,) if "split_trajs" in arguments else (None, into):
            env = cls(SyncVectorEnv([lambda w=w: Countdown(w) for w in WORLDS], autoreset_mode=mode))
            made = SyncDataCollector(env, policy(), frames_per_batch=15, replay_buffer=buffer, **arguments)
            made.set_seed(0)
            batches = [made.rollout() for _ in range(3)]
            given += batches if buffer is None else [buffer[:]]
            stats.append(made.stats._replace(steps_per_second=0, mean_steps_per_second=0))
        both.append((given, stats))
    assert both[0][1] == both[1][1]
    for ours, theirs in zip(both[0][0], both[1][0], strict=True):
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        assert ours.batch_size == theirs.batch_size and bool((ours == theirs).all())


class Discretes(gymnasium.vector.VectorEnv):
    """Two environments whose observation is 0, 1, 2, ..., also beyond their space of three values."""

    def __init__(self):
        self.num_envs, self.metadata = 2, {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = self.single_action_space = gymnasium.spaces.Discrete(3)
        self.observation_space = self.action_space = gymnasium.spaces.MultiDiscrete([3, 3])

    def reset(self, *, seed=None, options=None):
        self.shown = 0
        return np.zeros(2, np.int64), {}

    def step(self, actions):
        self.shown += 1
        return np.full(2, self.shown), np.zeros(2), np.zeros(2, np.bool_), np.zeros(2, np.bool_), {}


def test_the_rows_before_a_value_beyond_its_space_are_a_batch():
    made = SyncDataCollector(GymEnv(Discretes()), frames_per_batch=10)
    batch = made.rollout()
    assert batch["next", "observation"].argmax(-1).tolist() == [[1, 2], [1, 2]]
    with pytest.raises(ValueError, match=r"'observation' with .*3"):
        made.rollout()


def test_rewards_beyond_float32_end_the_batch_before_them():
    worlds = [Countdown((100,)), Countdown((100,))]
    made = collector(worlds, Autoreset.DISABLED, Rule(), 5)
    step = made.env.engine.step

    def with_rewards(actions):
        out = step(actions)
        return out._replace(reward=np.array([1.0, 1e300 if worlds[0].total == 4 else 2.0]))

    made.env.engine.step = with_rewards
    batch = made.rollout()
    assert batch["next", "reward"][..., 0].tolist() == [[1, 1, 1], [2, 2, 2]]
    with pytest.raises(ValueError, match=r"1e\+300\) in float64"):
        made.rollout()


@modes
def test_an_interrupt_between_the_halves_of_a_step_leaves_whole_frames(mode):
    made = collector(
        [Countdown((100,)), Countdown((100,))],
        mode,
        Rule(),
        5,
        replay_buffer=ReplayBuffer(storage=LazyTensorStorage(50)),
    )
    made.rollout()
    log = made._rollout._log
    record, calls = log._record, []

    def interrupted(call, *values):
        result = record(call, *values)
        calls.append(call)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return result

    log._record = interrupted
    with pytest.raises(KeyboardInterrupt):
        made.rollout()
    kept = made.replay_buffer[:]
    assert kept["observation"][:, 0].tolist() == [*range(100, 95, -1)] * 2 + [95, 94] * 2


@modes
def test_observations_that_a_policy_keeps_do_not_change(mode):
    kept = []

    class Keeps(nn.Module):
        def forward(self, observation):
            kept.append((observation, observation.clone()))
            return Rule()(observation)

    made = collector([Countdown(w, reuse_array=True) for w in WORLDS], mode, Keeps())
    for _ in range(4):
        made.rollout()
        for now, then in kept[:-1]:  # a reset may still write over the newest one
            assert torch.equal(now, then)


class InLists(gymnasium.vector.VectorWrapper):
    """Gives rewards and flags as lists, and observations in float64."""

    def step(self, actions):
        shown, reward, terminated, truncated, info = self.env.step(actions)
        return shown.astype(np.float64), reward.tolist(), terminated.tolist(), truncated.tolist(), info


def test_results_in_other_forms_are_recorded_as_those_in_arrays():
    made = SyncDataCollector(GymEnv(InLists(vector("NEXT_STEP", map(Countdown, WORLDS)))), Rule(), frames_per_batch=21)
    made.set_seed(0)
    for expected in reference([Countdown(w) for w in WORLDS], 4, 7):
        assert_same(made.rollout(), expected)


def test_policies_with_a_state_are_told_which_episodes_begin():
    engine = GymVectorEngine(vector("NEXT_STEP", map(Countdown, WORLDS)), categorical=False)
    made = SyncDataCollector(VectorEnv(engine), remembering, frames_per_batch=21)
    made.set_seed(0)
    for expected in serial([Countdown(w) for w in WORLDS], remembering):
        assert_same(made.rollout(), {key: expected.get(key) for key in expected.keys(True, True)})


def test_the_engine_knows_whose_episode_the_last_collected_step_ended():
    engine = GymVectorEngine(vector("NEXT_STEP", [Countdown((2,)), Countdown((5,))]), categorical=False)
    made = SyncDataCollector(VectorEnv(engine), frames_per_batch=4)
    made.rollout()
    assert engine.step(np.zeros(2, np.int64)).idle.tolist() == [True, False]
    made.reset()
    made.rollout()
    engine.reset()
    assert engine.step(np.zeros(2, np.int64)).idle is None


def test_a_subclass_of_the_engine_is_stepped_by_its_own_step():
    class Doubled(GymVectorEngine):
        def step(self, actions):
            out = super().step(actions)
            return out._replace(reward=out.reward * 2)

    engines = [
        cls(vector("NEXT_STEP", map(Countdown, WORLDS)), categorical=False) for cls in (GymVectorEngine, Doubled)
    ]
    one, two = (SyncDataCollector(VectorEnv(engine), Rule(), frames_per_batch=21).rollout() for engine in engines)
    assert one["next", "reward"].any() and torch.equal(one["next", "reward"] * 2, two["next", "reward"])
