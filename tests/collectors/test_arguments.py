"""What each argument of SyncDataCollector does, its statistics, and going on after a saved state."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn

from contracts.each import each
from contracts.gym_loop import WORLDS, Proxy, Rule
from contracts.gym_worlds import SPACES, Countdown, Echo
from engram.collectors import SyncDataCollector
from engram.collectors.rollout import is_cpu
from engram.collectors.stats import EpisodeStats
from engram.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from engram.envs import GymEnv, SerialEnv
from engram.envs.utils import ExplorationType


def serial(worlds=WORLDS):
    return SerialEnv(len(worlds), [lambda w=w: GymEnv(Countdown(w)) for w in worlds])


def test_whole_trajectories_come_in_the_order_in_which_they_ended():
    collector = SyncDataCollector(serial([(3,), (2,)]), Rule(), frames_per_batch=2, trajs_per_batch=2)
    batches = [collector.rollout() for _ in range(3)]
    ids = [batch["collector", "traj_ids"][:, 0].tolist() for batch in batches]
    assert ids == [[1, 0], [2, 3], [4, 6]]  # they end after 2, 3, 4, and both after 6, then 8 steps
    for batch in batches:
        mask, left = batch["collector", "mask"], batch["observation"][..., 0]
        assert [row[m].tolist() for row, m in zip(left, mask, strict=True)] == [
            list(range(int(m.sum()), 0, -1)) for m in mask
        ]
        assert batch["next", "done"].squeeze(-1).sum(-1).tolist() == [1, 1]


@given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=3),
    steps=st.integers(1, 9),
    trajs=st.integers(1, 5),
)
@settings(max_examples=15, deadline=None)
def test_whole_trajectories_are_those_of_long_batches(lengths, steps, trajs):
    def make(**arguments):
        env = serial([tuple(own) for own in lengths])
        return SyncDataCollector(env, Rule(), frames_per_batch=steps * len(lengths), **arguments)

    made = make(trajs_per_batch=trajs)
    whole = [made.rollout() for _ in range(3)]
    plain = make()
    everything = torch.cat([plain.rollout() for _ in range(90 // steps + 1)], -1).reshape(len(lengths), -1)
    for batch in whole:
        mask = batch["collector", "mask"]
        for row, m in zip(batch.exclude(("collector", "mask")), mask, strict=True):
            steps_of_it = row[m]
            number = int(steps_of_it["collector", "traj_ids"][0])
            assert bool((steps_of_it == everything[everything["collector", "traj_ids"] == number]).all())
            assert bool(steps_of_it["next", "done"][-1])


def test_frames_of_whole_trajectories_are_those_handed_out():
    collector = SyncDataCollector(GymEnv(Countdown((3,))), Rule(), trajs_per_batch=2, total_frames=18)
    assert [batch["collector", "traj_ids"][:, 0].tolist() for batch in collector] == [[0, 1], [2, 3], [4, 5]]
    assert collector.frames == 18


def test_whole_trajectories_go_into_a_buffer_without_padding():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100))
    SyncDataCollector(serial(), Rule(), trajs_per_batch=4, replay_buffer=rb).rollout()
    assert int(rb[:]["next", "done"].sum()) == 4 and bool(rb[:]["next", "done"][-1])


def test_waiting_whole_trajectories_are_in_the_state_and_none_is_lost_at_resume():
    settings = {"frames_per_batch": 60, "trajs_per_batch": 2}
    first = SyncDataCollector(serial(), Rule(), **settings)
    first.rollout()
    state = first.state_dict()
    waiting = state["waiting"]["lengths"]
    assert len(waiting) > 4 and sum(waiting) == len(state["waiting"]["steps"]["action"])
    expected = [first.rollout() for _ in range(len(waiting) // 2)]
    second = SyncDataCollector(serial(), Rule(), **settings)
    second.rollout()
    second.load_state_dict(copy.deepcopy(state))
    for batch in expected:
        assert bool((second.rollout() == batch).all())
    assert second.frames == first.frames
    assert int(second.rollout()["collector", "traj_ids"].max()) >= state["trajectories"]


def test_a_state_without_waiting_trajectories_drops_those_that_wait():
    made = SyncDataCollector(serial(), Rule(), frames_per_batch=60, trajs_per_batch=2)
    made.rollout()
    state = made.state_dict()
    state.pop("waiting")  # of an earlier version
    made.load_state_dict(state)
    assert int(made.rollout()["collector", "traj_ids"][:, 0].min()) >= state["trajectories"]


@each(
    "damage",
    [
        lambda waiting: {**waiting, "lengths": [3]},
        lambda waiting: {**waiting, "lengths": ["3"]},
        lambda waiting: {**waiting, "steps": None},
        lambda waiting: {**waiting, "steps": {k: v for k, v in waiting["steps"].items() if k != "collector"}},
        lambda waiting: 7,
    ],
)
def test_damaged_waiting_trajectories_are_refused_and_nothing_is_changed(damage):
    made = SyncDataCollector(serial(), Rule(), frames_per_batch=60, trajs_per_batch=2)
    made.rollout()
    state = made.state_dict()
    count, frames = made._assembler.count, made.frames
    with pytest.raises(ValueError, match="waiting trajectories"):
        made.load_state_dict({**state, "frames": 0, "waiting": damage(state["waiting"])})
    assert (made._assembler.count, made.frames) == (count, frames)


def test_waiting_trajectories_are_refused_by_a_collector_that_would_lose_them():
    made = SyncDataCollector(serial(), Rule(), frames_per_batch=60, trajs_per_batch=2)
    made.rollout()
    with pytest.raises(ValueError, match="whole trajectories wait in the state"):
        SyncDataCollector(serial(), Rule(), frames_per_batch=60).load_state_dict(made.state_dict())


def test_one_tensordict_is_handed_out_again_and_again():
    plain = SyncDataCollector(serial(), Rule(), frames_per_batch=9)
    same = SyncDataCollector(serial(), Rule(), frames_per_batch=9, return_same_td=True)
    first = same.rollout()
    tensor = first["next", "observation"]
    plain.rollout()
    second, expected = same.rollout(), plain.rollout()
    assert second is first and second["next", "observation"] is tensor
    assert bool((second == expected).all())


@pytest.mark.parametrize("path", ["raw", "stepped"])
def test_the_last_step_is_marked_as_truncated_on_request_and_the_episode_goes_on(path):
    env = GymEnv(Countdown((3,)))
    env = env if path == "raw" else Proxy(env)
    collector = SyncDataCollector(env, Rule(), frames_per_batch=4, set_truncated=True)
    first, second = collector.rollout(), collector.rollout()
    assert first["next", "truncated"].squeeze(-1).tolist() == [False, False, False, True]
    assert first["next", "done"].squeeze(-1).tolist() == [False, False, True, True]
    assert first["collector", "traj_ids"].tolist() == [0, 0, 0, 1]
    assert second["collector", "traj_ids"].tolist() == [1, 1, 2, 2] and second["observation"][0, 0] == 2
    assert collector.stats.episodes == 2  # the marks are no ends


def test_a_step_that_terminates_is_not_marked_as_truncated():
    collector = SyncDataCollector(GymEnv(Countdown((4,))), Rule(), frames_per_batch=4, set_truncated=True)
    following = collector.rollout()["next"]
    assert following["terminated"][-1] and not following["truncated"][-1]


def test_versions_say_which_policy_acted():
    collector = SyncDataCollector(serial(), Rule(), frames_per_batch=6, track_policy_version=True)
    versions = []
    for _ in range(3):
        versions.append(collector.rollout()["collector", "policy_version"])
        collector.update_policy_weights_()
    assert [v.unique().tolist() for v in versions] == [[0], [1], [2]]
    assert versions[0].dtype is torch.int64 and versions[0].shape == (3, 2) and collector.policy_version == 3


def gaussian():
    net = nn.Linear(2, 2)
    nn.init.zeros_(net.weight)
    nn.init.constant_(net.bias, 0.5)

    class Both(nn.Module):
        def forward(self, observation):
            return net(observation), torch.full_like(observation, 0.1)

    return ProbabilisticTensorDictSequential(
        TensorDictModule(Both(), in_keys=["observation"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=torch.distributions.Normal,
            return_log_prob=True,
        ),
    )


@each("kind", ["RANDOM", "MODE", "MEAN", "DETERMINISTIC"])
@each("path", ["raw", "stepped"])
def test_exploration_types_decide_how_a_distribution_acts(kind, path):
    env = GymEnv(Echo(SPACES["box"], SPACES["box"]))
    env = env if path == "raw" else Proxy(env)
    batch = SyncDataCollector(env, gaussian(), frames_per_batch=20, exploration_type=ExplorationType[kind]).rollout()
    assert (len(batch["action"].unique()) > 10) == (kind == "RANDOM")
    assert kind == "RANDOM" or bool((batch["action"] == 0.5).all())
    assert batch["loc"].shape == (20, 2) and batch["action_log_prob"].shape[0] == 20


def test_another_exploration_type_holds_from_the_next_batch_on():
    env = GymEnv(Echo(SPACES["box"], SPACES["box"]))
    collector = SyncDataCollector(env, gaussian(), frames_per_batch=20, exploration_type=ExplorationType.RANDOM)
    assert len(collector.rollout()["action"].unique()) > 10
    collector.exploration_type = ExplorationType.MODE
    assert bool((collector.rollout()["action"] == 0.5).all())


def test_tensors_without_a_device_and_those_on_the_cpu_are_in_main_memory():
    devices = [None, torch.device("cpu"), torch.device("cuda"), torch.device("meta")]
    assert [is_cpu(device) for device in devices] == [True, True, False, False]


def test_without_resets_the_environment_decides_what_follows_an_end():
    collector = SyncDataCollector(GymEnv(Countdown((2,))), Rule(), frames_per_batch=5, reset_when_done=False)
    batch = collector.rollout()
    assert batch["observation"][:, 0].tolist() == [2, 1, 0, -1, -2]
    assert batch["collector", "traj_ids"].tolist() == [0] * 5


@each("envs", [1, 3])
@each("ndim", [1, 2])
def test_a_prioritized_buffer_takes_batches_and_keeps_their_ids(envs, ndim):
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(60, ndim=ndim), batch_size=8, priority_key="td_error"
    )
    worlds = WORLDS[:envs]
    env = serial(worlds) if envs > 1 else GymEnv(Countdown(worlds[0]))
    collector = SyncDataCollector(env, Rule(), frames_per_batch=12, total_frames=48, replay_buffer=rb)
    assert list(collector) == [None] * 4
    assert len(rb) == 48
    plain = serial(worlds) if envs > 1 else GymEnv(Countdown(worlds[0]))
    expected = list(SyncDataCollector(plain, Rule(), frames_per_batch=12, total_frames=48))
    flat = torch.cat([b.reshape(-1) for b in expected]) if ndim == 1 else torch.cat(expected, -1).reshape(envs, -1)
    stored = rb[:]
    assert all(torch.equal(stored.get(k), flat.get(k)) for k in flat.keys(True, True))
    batch = rb.sample()
    assert torch.equal(batch["priority_weight"], torch.ones(8))
    rb.update_tensordict_priority(batch.set("td_error", torch.rand(8)))


@given(
    done=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=6, max_size=6),
    envs=st.sampled_from([1, 2, 3]),
)
def test_returns_and_lengths_are_those_of_a_plain_loop(done, envs):
    rng, episodes = np.random.default_rng(0), EpisodeStats(envs)
    totals, lengths, expected = [0.0] * envs, [0] * envs, []
    for first in range(0, 6, envs):
        ends, reward = np.array(done[first : first + envs]), rng.integers(0, 9, (envs, 5)).astype(np.float32)
        episodes.add(reward, ends)
        for t in range(5):
            for e in range(envs):
                totals[e], lengths[e] = totals[e] + reward[e, t], lengths[e] + 1
                if ends[e, t]:
                    expected.append((totals[e], lengths[e]))
                    totals[e], lengths[e] = 0.0, 0
    assert list(zip(episodes.returns, episodes.lengths, strict=True)) == expected
    assert episodes.count == len(expected)


def test_returns_of_episodes_over_several_batches_are_summed_in_float64():
    episodes, steps = EpisodeStats(1), np.full((1, 4), 60000, np.float16)
    episodes.add(steps, np.zeros((1, 4), np.bool_))
    episodes.add(steps, np.array([[False, False, False, True]]))
    assert list(episodes.returns) == [8 * float(steps[0, 0])]


def test_statistics_are_ready_for_a_progress_bar():
    collector = SyncDataCollector(GymEnv(Countdown((3, 1))), Rule(), frames_per_batch=3)
    assert math.isnan(collector.stats.mean_return) and math.isnan(collector.stats.steps_per_second)
    for _ in range(3):
        collector.rollout()
    stats = collector.stats
    assert (stats.frames, stats.batches, stats.episodes) == (9, 3, 4)
    assert (stats.mean_length, stats.last_length) == (2.0, 1)
    assert stats.steps_per_second > 0 and stats.mean_steps_per_second > 0
    assert set(stats._asdict()) == set(stats._fields)


class Numbers(nn.Module):
    """Gives tensors at first, and then what no environment takes."""

    def __init__(self, found, sound, first):
        super().__init__()
        self.found, self.sound, self.left = found, sound, first

    def forward(self, observation):
        self.left -= 1
        return self.found if self.left < 0 else self.sound


@pytest.mark.pairwise
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("found", [1, None, "left", [1], (torch.tensor(1),)])
@pytest.mark.parametrize("envs", [0, 2, "vector"])
def test_a_policy_that_gives_no_tensor_is_told_so_at_whichever_step(envs, found, first):
    if envs == "vector":
        env, sound = GymEnv("Pendulum-v1", num_envs=2), torch.zeros(2, 1)
    elif envs:
        env, sound = SerialEnv(envs, lambda: GymEnv("CartPole-v1")), torch.tensor([[1, 0]] * envs)
    else:
        env, sound = GymEnv("CartPole-v1", categorical_action_encoding=True), torch.tensor(1)
    for policy in (
        Numbers(found, sound, first),
        TensorDictModule(Numbers(found, sound, first), in_keys=["observation"], out_keys=["action"]),
    ):
        collector = SyncDataCollector(env, policy, frames_per_batch=20)
        kind = type(found).__name__
        with pytest.raises(
            ValueError, match=rf"action is not what the environment takes.\n.*a {kind} instead of a tensor"
        ):
            collector.rollout()  # the rows of before come first
            collector.rollout()


def bounded():
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh())


class Noisy(Echo):
    """Draws its observations and how long an episode takes from its own generator."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = int(self.np_random.integers(1, 6))
        return self.shown(), {}

    def step(self, action):
        _, reward, terminated, truncated, info = super().step(action)
        return self.shown(), reward, terminated, truncated, info

    def shown(self):
        return self.np_random.random(2).astype(np.float32)


@each("envs", [1, 3])
@each("batches", [0, 1, 3])
def test_a_resumed_collector_gives_the_batches_that_would_have_followed(envs, batches):
    def make():
        env = SerialEnv(envs, lambda: GymEnv(Noisy(SPACES["box"], SPACES["box"])))
        return SyncDataCollector(
            env, bounded(), frames_per_batch=7 * envs, reset_at_each_iter=True, track_policy_version=True
        )

    first, second = make(), make()
    first.set_seed(3)
    second.set_seed(9)
    for _ in range(batches):
        first.rollout()
    first.update_policy_weights_()
    state = copy.deepcopy(first.state_dict())
    second.rollout()
    second.load_state_dict(state)
    assert second.stats[:3] == first.stats[:3] and second.stats[5:] == pytest.approx(first.stats[5:], nan_ok=True)
    for _ in range(3):
        assert bool((first.rollout() == second.rollout()).all())
    assert second.frames == first.frames


def test_a_state_survives_torchs_own_way_to_disk(tmp_path):
    first, second = (SyncDataCollector(GymEnv("CartPole-v1"), frames_per_batch=50) for _ in range(2))
    first.rollout()
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    first.reset()
    both = []
    for collector in (first, second):
        torch.manual_seed(0)
        both.append(collector.rollout())
    assert bool((both[0] == both[1]).all())


@pytest.mark.parametrize("mode", ["sync", "vector_entry_point"])
def test_vectorised_environments_resume_too(mode):
    made = []
    for seed in (3, 9):
        env = GymEnv("CartPole-v1", num_envs=3, vectorization_mode=mode)
        made.append(SyncDataCollector(env, frames_per_batch=90, reset_at_each_iter=True))
        made[-1].set_seed(seed)
        made[-1].rollout()
    made[1].load_state_dict(made[0].state_dict())
    both = []
    for collector in made:
        torch.manual_seed(0)
        both.append(torch.cat([collector.rollout() for _ in range(2)], 1))
    assert bool((both[0] == both[1]).all())


@each(
    ("change", "message"),
    [
        ({"frames": -1}, "'frames' of 0 or more"),
        ({"trajectories": "many"}, "'trajectories' of 0 or more"),
        ({"episodes": None}, "episodes in a collector's state"),
        ({"policy_state_dict": {"weight": torch.zeros(3, 3), "bias": torch.zeros(3)}}, "not this collector's"),
        ({"env_random_state": [1]}, "list of as many random states"),
        ({"env_random_state": [{}, {}]}, "a random state is .* a dict"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change, message):
    env = SerialEnv(2, lambda: GymEnv(Noisy(SPACES["box"], SPACES["box"])))
    collector = SyncDataCollector(env, bounded(), frames_per_batch=8)
    collector.rollout()
    before = copy.deepcopy(collector.state_dict())
    other = SyncDataCollector(
        SerialEnv(2, lambda: GymEnv(Noisy(SPACES["box"], SPACES["box"]))), bounded(), frames_per_batch=8
    )
    with pytest.raises(ValueError, match=message):
        collector.load_state_dict({**other.state_dict(), **change})
    after = collector.state_dict()
    policy, old = after.pop("policy_state_dict"), before.pop("policy_state_dict")
    assert after == before and all(torch.equal(policy[key], old[key]) for key in old)


@each(
    "arguments",
    [
        {},
        {"frames_per_batch": 5, "trajs_per_batch": 0},
        {"trajs_per_batch": 2, "set_truncated": True},
        {"trajs_per_batch": 2, "reset_at_each_iter": True},
        {"frames_per_batch": 5, "return_same_td": True, "split_trajs": True},
        {"frames_per_batch": 5, "max_frames_per_traj": 3, "reset_when_done": False},
    ],
)
def test_arguments_that_contradict_each_other_are_refused_at_once(arguments):
    with pytest.raises(ValueError, match=r"frames_per_batch|trajs_per_batch|leave out"):
        SyncDataCollector(GymEnv(Countdown()), **arguments)


def test_a_collector_that_cannot_be_made_closes_the_environment_that_it_made():
    made = []

    def make():
        made.append(GymEnv(Countdown()))
        return made[0]

    with pytest.raises(TypeError, match="policy must be"):
        SyncDataCollector(make, 5, frames_per_batch=5)
    assert made[0].is_closed


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_the_policy_reaches_the_caller_and_no_trajectory_goes_on(error):
    class Stops(Rule):
        calls = 0

        def forward(self, observation):
            self.calls += 1
            if self.calls == 7:
                raise error("now")
            return super().forward(observation)

    collector = SyncDataCollector(GymEnv(Countdown((100,))), Stops(), frames_per_batch=5)
    collector.rollout()
    with pytest.raises(error, match="now"):
        collector.rollout()
    batch = collector.rollout()
    assert batch["observation"][0, 0] == 100 and batch["collector", "traj_ids"].tolist() == [1] * 5
    assert collector.frames == 10


def test_an_error_of_the_consumer_leaves_the_collector_whole_and_closes_what_it_made():
    with (
        pytest.raises(ZeroDivisionError),
        SyncDataCollector(lambda: GymEnv(Countdown()), Rule(), frames_per_batch=5) as collector,
    ):
        for _ in collector:
            raise ZeroDivisionError
    assert collector.env.is_closed and collector.frames == 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_policy_on_a_gpu_collects_and_batches_are_stored_there():
    batch = SyncDataCollector(
        GymEnv("CartPole-v1", categorical_action_encoding=True),
        TensorDictModule(lambda x: (x[..., 0] > 0).long(), in_keys=["observation"], out_keys=["action"]),
        frames_per_batch=20,
        policy_device="cuda",
        storing_device="cuda",
    ).rollout()
    assert batch.device.type == "cuda" and batch["action"].is_cuda
    assert isinstance(batch, TensorDict)
