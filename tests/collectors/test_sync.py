"""SyncDataCollector against a loop written with gymnasium alone."""

from __future__ import annotations

import gc
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.nn.functional import one_hot

from contracts.each import each
from contracts.gym_loop import WORLDS, Proxy, Rule, assert_same, on_tensordicts, reference, remembering
from contracts.gym_worlds import SPACES, Countdown, Echo
from engram.collectors import Collector, RandomPolicy, SyncDataCollector
from engram.envs import GymEnv, SerialEnv

ways = pytest.mark.parametrize("way", ["raw", "stepped"])


def collect(worlds, policy, way="raw", batches=4, frames=7, seed=0, **arguments):
    envs = [lambda w=w: GymEnv(w) for w in worlds]
    env = SerialEnv(len(envs), envs) if len(envs) > 1 else envs[0]()
    env = env if way == "raw" else Proxy(env)
    collector = SyncDataCollector(env, policy, frames_per_batch=frames, **arguments)
    collector.set_seed(seed)
    return [collector.rollout() for _ in range(batches)]


@pytest.mark.pairwise
@ways
@pytest.mark.parametrize("limit", [None, 1, 2, 3])
@pytest.mark.parametrize("reuse", [False, True], ids=["fresh arrays", "one array, written again"])
def test_batches_of_one_environment_are_those_of_a_gymnasium_loop(way, limit, reuse):
    batches = collect([Countdown(reuse_array=reuse)], Rule(), way, max_frames_per_traj=limit)
    for batch, expected in zip(batches, reference([Countdown()], 4, 7, limit), strict=True):
        assert_same(batch, {key: value[0] for key, value in expected.items()})
        assert batch.batch_size == (7,) and batch.device is None


@ways
@pytest.mark.parametrize("limit", [None, 2])
def test_batches_of_several_environments_are_those_of_a_gymnasium_loop(way, limit):
    worlds = [Countdown(lengths) for lengths in WORLDS]
    batches = collect(worlds, Rule(), way, frames=21, max_frames_per_traj=limit)
    for batch, expected in zip(batches, reference([Countdown(w) for w in WORLDS], 4, 7, limit), strict=True):
        assert_same(batch, expected)
        assert batch.batch_size == (3, 7) and batch["action"].is_contiguous()


@given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3),
    steps=st.integers(1, 9),
    limit=st.none() | st.integers(1, 7),
)
@settings(max_examples=25, deadline=None)
def test_any_episodes_are_those_of_a_gymnasium_loop(lengths, steps, limit):
    worlds = [Countdown(tuple(lens)) for lens in lengths]
    batches = collect(worlds, Rule(), batches=3, frames=steps * len(lengths), max_frames_per_traj=limit)
    copies = [Countdown(tuple(lens)) for lens in lengths]
    for batch, expected in zip(batches, reference(copies, 3, steps, limit), strict=True):
        single = len(lengths) == 1
        assert_same(batch, {key: value[0] if single else value for key, value in expected.items()})


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    steps=st.integers(1, 9),
    limit=st.none() | st.integers(1, 7),
    reuse=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_random_episodes_are_those_of_a_gymnasium_loop_with_the_same_actions(lengths, steps, limit, reuse):
    batches = collect([Countdown(tuple(lengths), reuse)], None, batches=3, frames=steps, max_frames_per_traj=limit)
    actions = iter(torch.cat([batch["action"] for batch in batches]).argmax(-1).tolist())
    world = Countdown(tuple(lengths))
    for batch, expected in zip(batches, reference([world], 3, steps, limit, lambda _: next(actions)), strict=True):
        assert_same(batch, {key: value[0] for key, value in expected.items()})


@each(
    "policy",
    [
        TensorDictModule(Rule(), in_keys=["observation"], out_keys=["action"]),
        TensorDictSequential(TensorDictModule(Rule(), in_keys=["observation"], out_keys=["action"])),
        on_tensordicts,
    ],
)
@each("worlds", [1, 3])
def test_every_kind_of_policy_gives_the_same_batches(policy, worlds):
    ours = collect([Countdown(w) for w in WORLDS[:worlds]], policy)
    plain = collect([Countdown(w) for w in WORLDS[:worlds]], Rule())
    assert all(bool((a == b).all()) for a, b in zip(ours, plain, strict=True))


@each("worlds", [1, 3])
@each("random_frames", [None, 8])
def test_what_a_policy_writes_is_stored_and_handed_on_the_same_way_on_both_paths(worlds, random_frames):
    torch.manual_seed(0)
    both = [
        collect([Countdown(w) for w in WORLDS[:worlds]], remembering, way, init_random_frames=random_frames)
        for way in ("raw", "stepped")
    ]
    assert set(both[0][0].keys(True, True)) == set(both[0][-1].keys(True, True))
    for raw, stepped in zip(*both, strict=True):
        assert set(raw.keys(True, True)) == set(stepped.keys(True, True))
        if random_frames is None:
            assert all(torch.equal(raw.get(k), stepped.get(k)) for k in raw.keys(True, True))


def test_policy_memory_is_reset_at_the_end_of_an_episode():
    batch = collect([Countdown((3,))], remembering, frames=6, batches=1)[0]
    assert batch["next", "memory"].squeeze(-1).tolist() == [1, 2, 3, 1, 2, 3]
    assert batch["seen"].squeeze(-1).tolist() == [0, 2, 4, 0, 2, 4]


@pytest.mark.pairwise
@pytest.mark.parametrize("name", [name for name in SPACES if name not in ("dict", "tuple")])
@pytest.mark.parametrize("categorical", [False, True])
@ways
def test_every_space_is_collected(name, categorical, way):
    env = GymEnv(Echo(SPACES[name], SPACES[name]), categorical_action_encoding=categorical)
    world = env.gym_env
    batch = SyncDataCollector(env if way == "raw" else Proxy(env), frames_per_batch=12).rollout()
    assert env.action_spec.is_in(batch["action"])
    assert all(spec.is_in(batch[key]) for key, spec in env.observation_spec.items())
    assert len(world.actions) == 12


@each("name", ["dict", "tuple"])
@each("envs", [1, 2])
def test_nested_spaces_are_collected(name, envs):
    env = SerialEnv(envs, lambda: GymEnv(Echo(SPACES[name], SPACES[name])))
    batch = SyncDataCollector(env, frames_per_batch=12).rollout()
    assert env.action_spec.is_in(batch["action"].transpose(0, 1))
    assert all(batch.get(key) is not None for key in env.observation_spec.leaves())


def test_the_stored_action_is_the_one_that_gymnasium_got():
    env = GymEnv(Echo(SPACES["discrete from 5"], SPACES["discrete from 5"]))
    batch = SyncDataCollector(env, frames_per_batch=20).rollout()
    assert (batch["action"].argmax(-1) + 5).tolist() == [int(action) for action in env.gym_env.actions]


def test_members_whose_spaces_count_from_different_numbers_get_their_own_actions():
    worlds = [Echo(SPACES["box"], SPACES[name]) for name in ("discrete", "discrete from 5")]
    batch = SyncDataCollector(SerialEnv(2, [lambda w=w: GymEnv(w) for w in worlds]), frames_per_batch=20).rollout()
    assert (batch["action"][1].argmax(-1) + 5).tolist() == [int(action) for action in worlds[1].actions]


def test_an_environment_that_changes_its_action_does_not_change_the_batch():
    class Zeroes(Echo):
        def step(self, action):
            result = super().step(action)
            action[:] = 0
            return result

    batch = SyncDataCollector(GymEnv(Zeroes(SPACES["box"], SPACES["box"])), frames_per_batch=20).rollout()
    assert (batch["action"] != 0).all()


def test_later_batches_do_not_change_earlier_ones():
    collector = SyncDataCollector(GymEnv(Countdown(reuse_array=True)), Rule(), frames_per_batch=5)
    first = collector.rollout()
    kept = first.clone()
    collector.rollout()
    assert bool((first == kept).all())


def test_changing_the_observations_of_a_batch_leaves_the_next_ones_alone():
    batch = SyncDataCollector(GymEnv(Countdown()), Rule(), frames_per_batch=5).rollout()
    kept = batch["next"].clone()
    batch["observation"].zero_()
    assert bool((batch["next"] == kept).all())


def test_cartpole_batches_are_ted_to_the_letter():
    batch = SyncDataCollector(lambda: GymEnv("CartPole-v1"), frames_per_batch=200).rollout()
    flags = dict.fromkeys(("done", "terminated", "truncated"), (torch.bool, (200, 1)))
    state = {"observation": (torch.float32, (200, 4)), **flags}
    expected = {
        **state,
        "action": (torch.int64, (200, 2)),
        ("collector", "traj_ids"): (torch.int64, (200,)),
        **{("next", key): value for key, value in state.items()},
        ("next", "reward"): (torch.float32, (200, 1)),
    }
    assert {key: (value.dtype, tuple(value.shape)) for key, value in batch.items(True, True)} == expected
    assert batch.device is None and batch["next"].device is None


def test_frames_per_batch_round_up_to_whole_rows_and_total_frames_to_whole_batches():
    env = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
    with pytest.warns(UserWarning, match="408 frames will be collected"):
        collector = SyncDataCollector(env, frames_per_batch=22, total_frames=400)
    shapes = [batch.shape for batch in collector]
    assert shapes == [(3, 8)] * 17
    assert (collector.frames_per_batch, collector.total_frames, collector.frames) == (24, 400, 408)


def test_total_frames_that_divide_bring_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(SyncDataCollector(GymEnv(Countdown()), frames_per_batch=5, total_frames=15))) == 3


def test_without_total_frames_it_never_ends():
    batches = iter(SyncDataCollector(GymEnv(Countdown()), frames_per_batch=1))
    assert [next(batches).shape for _ in range(50)] == [(1,)] * 50


@each(
    "make_policy",
    [
        lambda env: None,
        lambda env: env.rand_step,
        lambda env: env.rand_action,
        lambda env: RandomPolicy(env.action_spec),
    ],
)
def test_torchs_seed_reproduces_random_actions(make_policy):
    def run():
        env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
        collector = SyncDataCollector(env, make_policy(env), frames_per_batch=40)
        collector.set_seed(0)
        torch.manual_seed(5)
        return torch.stack([collector.rollout() for _ in range(2)])

    first = run()
    assert bool((first == run()).all())
    assert first["action"].float().mean((0, 1, 2)).sub(0.5).abs().max() < 0.3


def test_a_random_policy_for_one_environment_serves_several():
    spec = GymEnv("CartPole-v1").action_spec
    env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    batch = SyncDataCollector(env, RandomPolicy(spec), frames_per_batch=40).rollout()
    assert batch["action"].shape == (2, 20, 2)
    assert not torch.equal(batch["action"][0], batch["action"][1])


def test_another_seed_gives_other_episodes():
    first, second = (collect([GymEnv("CartPole-v1").gym_env], None, batches=1, seed=seed)[0] for seed in (0, 1))
    assert not torch.equal(first["observation"][0], second["observation"][0])


@ways
def test_random_frames_come_first_and_only_they_are_random(way):
    calls = []

    def never_two(td):
        calls.append(1)
        return td.set("action", one_hot(torch.zeros(3, dtype=torch.int64), 3))

    torch.manual_seed(0)
    batches = collect([Countdown((9,))] * 3, never_two, way, batches=2, frames=60, init_random_frames=75)
    choice = torch.cat([batch["action"].argmax(-1) for batch in batches], 1)
    assert choice[:, :25].unique().tolist() == [0, 1, 2] and (choice[:, 25:] == 0).all()
    assert len(calls) == 15 + 1  # the one looks which keys the policy writes


@ways
def test_every_batch_starts_with_a_reset_if_asked(way):
    batches = collect([Countdown((5,))], Rule(), way, batches=3, frames=3, reset_at_each_iter=True)
    assert [batch["observation"][:, 0].tolist() for batch in batches] == [[5, 4, 3]] * 3
    assert [batch["collector", "traj_ids"].tolist() for batch in batches] == [[0] * 3, [1] * 3, [2] * 3]


def test_a_replay_buffer_gets_the_batches_and_the_loop_gets_none():
    class Buffer:
        batches = []

        def extend(self, batch):
            self.batches.append(batch)

    collector = SyncDataCollector(GymEnv(Countdown()), frames_per_batch=5, total_frames=10, replay_buffer=Buffer())
    assert list(collector) == [None, None]
    assert [batch.shape for batch in Buffer.batches] == [(5,), (5,)]


def test_a_buffer_of_one_dimension_gets_the_environments_one_after_the_other():
    class Buffer:
        class storage:
            ndim = 1

        def extend(self, batch):
            self.batch = batch

    buffer, env = Buffer(), SerialEnv(2, lambda: GymEnv(Countdown()))
    SyncDataCollector(env, Rule(), frames_per_batch=6, replay_buffer=buffer).rollout()
    assert buffer.batch["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 1]


def test_postproc_makes_what_is_handed_out():
    collector = SyncDataCollector(
        GymEnv(Countdown()), frames_per_batch=5, postproc=lambda batch: batch.select("action")
    )
    assert set(collector.rollout().keys()) == {"action"}


def test_split_trajs_gives_one_trajectory_a_row():
    batch = collect([Countdown((3, 1, 4))], Rule(), frames=6, batches=1, split_trajs=True)[0]
    assert batch["collector", "mask"].tolist() == [[True] * 3, [True, False, False], [True, True, False]]


def test_devices_are_those_that_were_asked_for():
    batch = SyncDataCollector(GymEnv(Countdown()), Rule(), frames_per_batch=5, device="cpu").rollout()
    assert batch.device == torch.device("cpu")
    batch = SyncDataCollector(GymEnv(Countdown()), Rule(), frames_per_batch=5, storing_device="meta").rollout()
    assert batch["action"].device.type == "meta"


def test_a_hook_on_a_tensordict_module_is_called():
    module, seen = TensorDictModule(Rule(), in_keys=["observation"], out_keys=["action"]), []
    collector = SyncDataCollector(GymEnv(Countdown()), module, frames_per_batch=5)
    collector.rollout()
    module.register_forward_hook(lambda *args: seen.append(1))
    collector.rollout()
    assert len(seen) == 5


def test_the_policy_runs_without_gradients():
    seen = []

    def look(td):
        seen.append(torch.is_grad_enabled())
        return on_tensordicts(td)

    collect([Countdown()], look)
    assert not any(seen)


def test_new_weights_reach_the_policy():
    net = nn.Linear(2, 3)
    policy = nn.Sequential(net, nn.Softmax(-1))
    collector = SyncDataCollector(GymEnv(Echo(SPACES["box"], SPACES["box"])), nn.Linear(2, 2), frames_per_batch=4)
    collector.update_policy_weights_({"weight": torch.zeros(2, 2), "bias": torch.tensor([0.25, 0.5])})
    assert collector.rollout()["action"].tolist() == [[0.25, 0.5]] * 4
    collector.update_policy_weights_(TensorDict({"weight": torch.zeros(2, 2), "bias": torch.tensor([0.0, 1.0])}))
    assert collector.rollout()["action"].tolist() == [[0.0, 1.0]] * 4
    assert policy is not None


def test_a_loaded_state_goes_on_counting_frames_and_trajectories():
    first = SyncDataCollector(GymEnv(Countdown((3,))), Rule(), frames_per_batch=6, total_frames=18)
    first.rollout()
    second = SyncDataCollector(GymEnv(Countdown((3,))), Rule(), frames_per_batch=6, total_frames=18)
    second.load_state_dict(first.state_dict())
    assert [batch["collector", "traj_ids"].tolist() for batch in second] == [[2, 2, 2, 3, 3, 3], [4, 4, 4, 5, 5, 5]]


def test_after_an_error_in_the_environment_new_trajectories_start():
    class Breaks(Countdown):
        def step(self, action):
            if self.total == 3:
                self.total += 1
                raise OSError("the simulator is gone")
            return super().step(action)

    collector = SyncDataCollector(GymEnv(Breaks((100,))), Rule(), frames_per_batch=2)
    assert collector.rollout()["collector", "traj_ids"].tolist() == [0, 0]
    assert collector.rollout()["observation"][:, 0].tolist() == [98]  # what was stepped before
    with pytest.raises(OSError, match="simulator"):
        collector.rollout()
    batch = collector.rollout()
    assert batch["collector", "traj_ids"].tolist() == [1, 1] and batch["observation"][:, 0].tolist() == [100, 99]


def test_shutdown_closes_what_the_collector_made_and_leaves_what_it_was_given():
    made, given = SyncDataCollector(lambda: GymEnv(Countdown()), frames_per_batch=5), GymEnv(Countdown())
    with made:
        pass
    with SyncDataCollector(given, frames_per_batch=5) as collector:
        pass
    assert made.env.is_closed and not given.is_closed
    with pytest.raises(RuntimeError, match="shut down"):
        collector.rollout()


def test_a_collector_that_nobody_holds_closes_its_environment():
    collector = SyncDataCollector(lambda: GymEnv(Countdown()), Rule(), frames_per_batch=5)
    env = collector.env
    collector.rollout()
    del collector
    gc.collect()
    assert env.is_closed


@each(
    ("arguments", "message"),
    [
        ({"frames_per_batch": 0}, "frames_per_batch must be an integer of 1 or more"),
        ({"frames_per_batch": 5, "total_frames": 0}, "total_frames must be an integer of 1 or more"),
        ({"frames_per_batch": 5, "max_frames_per_traj": -2}, "max_frames_per_traj must be an integer of 1 or more"),
        ({"frames_per_batch": 5, "init_random_frames": -2}, "init_random_frames must be an integer of 0 or more"),
        ({"frames_per_batch": 5, "split_trajs": True, "replay_buffer": object()}, "padding"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        SyncDataCollector(GymEnv(Countdown()), **arguments)


@ways
def test_a_policy_that_gives_scores_is_told_to_choose(way):
    with pytest.raises(ValueError, match="argmax"):
        collect([Countdown()], nn.Linear(2, 3), way)


def test_a_function_of_observations_is_told_to_be_a_module():
    with pytest.raises(TypeError, match=r"nn\.Module"):
        collect([Countdown()], lambda td: torch.zeros(3))


def test_an_observation_of_another_shape_than_its_space_is_refused():
    class Liar(Countdown):
        def show(self):
            return np.zeros(1, np.float32)

    with pytest.raises(ValueError, match="its space says"):
        collect([Liar()], None)


VALUES = np.array([1, 0, 2, 1])
DRIFTED = {
    "integers of the same size": VALUES.astype(np.int32),
    "doubles": VALUES.astype(np.float64),
    "the other byte order": VALUES.astype(">f4"),
    "every second entry": np.repeat(VALUES, 2).astype(np.float32)[::2],
    "a list": VALUES.tolist(),
    "a tensor": torch.tensor(VALUES, dtype=torch.float32),
}


class Drifts(Echo):
    """Steps, other than resets, show what they are told to."""

    def __init__(self, shown):
        box = SPACES["box"]
        super().__init__(type(box)(-9.0, 9.0, (4,), np.float32), box)
        self.shown = shown

    def step(self, action):
        return self.shown, *super().step(action)[1:]


@each("name", DRIFTED)
@each("policy", [None, nn.Sequential(nn.Linear(4, 2), nn.Tanh())])
def test_an_observation_of_another_kind_than_its_space_is_stored_as_numpy_assigns_it(name, policy):
    batch = SyncDataCollector(GymEnv(Drifts(DRIFTED[name])), policy, frames_per_batch=8).rollout()
    assert torch.equal(batch["next", "observation"], torch.tensor(VALUES, dtype=torch.float32).expand(8, 4))


@each("shape", [(2, 2), (4, 1), (2,), (8,), (0,)])
@each("policy", [None, nn.Sequential(nn.Linear(4, 2), nn.Tanh())])
def test_an_observation_that_changes_its_shape_within_an_episode_is_refused(shape, policy):
    world = GymEnv(Drifts(np.zeros(shape, np.float32)))
    with pytest.raises(ValueError, match=r"'observation' of shape .* its space says"):
        SyncDataCollector(world, policy, frames_per_batch=8).rollout()


@each(
    "rewards", [[1.0, 0.1], [1.0, np.float32(0.1)], [1.0, 2], [1, 0.5], [1.0, True], [np.array([1.0]), np.array([0.1])]]
)
def test_rewards_of_any_kind_are_stored_as_single_floats(rewards):
    class Pays(Echo):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, rewards[self.t - 1], *rest

    batch = SyncDataCollector(GymEnv(Pays(SPACES["box"], SPACES["box"])), frames_per_batch=2).rollout()
    expected = torch.tensor([float(np.squeeze(reward)) for reward in rewards], dtype=torch.float32)
    assert torch.equal(batch["next", "reward"], expected.unsqueeze(-1))


def test_collector_is_another_name():
    assert Collector is SyncDataCollector
