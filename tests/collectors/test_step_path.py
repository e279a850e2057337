"""Small batches of one environment, whose steps go from a window of columns into the rows: the same as batches."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from contracts.each import each
from contracts.gym_loop import Proxy, Rule, on_tensordicts, remembering
from contracts.gym_worlds import SPACES, Countdown, Echo
from engram.collectors import SyncDataCollector, step_rollout
from engram.collectors.step_rollout import StepRollout
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.data.replay_buffers.buffers.batch_writer import ColumnRows
from engram.envs import GymEnv, SerialEnv
from engram.envs.transforms import MultiStepTransform, RewardScaling

BATCHES = 26
SIZES = [1, 3, 16]


class TwoOutputs(nn.Module):
    """The action, and how much the observation adds up to."""

    def forward(self, observation):
        return observation.sum(-1).long() % 3, observation.sum(-1, keepdim=True)


class Ragged(nn.Module):
    """Has another dtype in every second step, of one of its outputs."""

    calls = 0

    def forward(self, observation):
        self.calls += 1
        return torch.tensor(1), torch.zeros(2, dtype=[torch.float32, torch.float64][self.calls % 2])


class Fails:
    """Raises an error in the call of a certain number, and in no other."""

    def __init__(self, call, function, error=RuntimeError):
        self.left, self.function, self.error = call, function, error

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise self.error("as was asked for")
        return self.function(*args, **kwargs)


POLICIES = {
    "a module": lambda: Rule(hot=False),
    "a function": lambda: lambda observation: Rule(hot=False)(observation),
    "random": lambda: None,
    "two outputs": TwoOutputs,
    "TensorDictModule": lambda: TensorDictModule(Rule(hot=False), ["observation"], ["action"]),
    "on TensorDicts": lambda: lambda td: td.set("action", Rule(hot=False)(td["observation"])),
    "with a memory": lambda: lambda td: remembering(td).set("action", Rule(hot=False)(td["observation"])),
}
BUFFERS = {
    "rows": lambda: ReplayBuffer(storage=LazyTensorStorage(25)),
    "rows with their index": lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(25)),
    "priorities": lambda: ReplayBuffer(storage=LazyTensorStorage(25), sampler=PrioritizedSampler(25, 0.6, 0.4)),
    "priorities that may come with the data": lambda: TensorDictPrioritizedReplayBuffer(
        0.6, 0.4, storage=LazyTensorStorage(25), priority_key="action"
    ),
    "environments by time": lambda: ReplayBuffer(storage=LazyTensorStorage(25, ndim=2)),
    "items": lambda: ReplayBuffer(storage=ListStorage(25)),
    "a file": lambda: ReplayBuffer(storage=LazyMemmapStorage(25)),
    "a transform": lambda: ReplayBuffer(storage=LazyTensorStorage(25), transform=RewardScaling(0.0, 2.0)),
    "a transform that holds steps back": lambda: ReplayBuffer(
        storage=LazyTensorStorage(25), transform=MultiStepTransform(n_steps=3, gamma=0.5)
    ),
    "the best": lambda: TensorDictReplayBuffer(
        storage=LazyTensorStorage(25), writer=TensorDictMaxValueWriter(rank_key=("next", "reward"))
    ),
}
SETTINGS = [
    {},
    {"max_frames_per_traj": 2},
    {"init_random_frames": 5},
    {"track_policy_version": True, "track_traj_ids": False},
    {"compact_obs": True},
    {"set_truncated": True},
    {"storing_device": "cpu"},
    {"reset_at_each_iter": True},
    {"reset_when_done": False},
    {"trajs_per_batch": 2},
]


def countdown(reuse=True):
    return GymEnv(Countdown(reuse_array=reuse), categorical_action_encoding=True)


def in_general(monkeypatch):
    """From now on every batch is made as a large one, and then written."""
    monkeypatch.setattr(step_rollout, "FEW_STEPS", 0)
    monkeypatch.setattr(ReplayBuffer, "column_rows", None)


def outcome(make_collector, buffer, batches):
    """All that is left of a program that collects so many batches, errors included."""
    torch.manual_seed(0)
    collector = make_collector(buffer)
    collector.set_seed(3)
    seen = []
    for _ in range(batches):
        try:
            batch = collector.rollout()
        except (RuntimeError, ValueError, KeyboardInterrupt) as error:
            seen.append((type(error), str(error)))
        else:
            seen.append(batch)
    state = collector.state_dict()
    state.pop("policy_state_dict", None)
    stats = collector.stats
    return seen, state, (stats.frames, stats.batches, stats.episodes, list(collector._episodes.returns)), buffer


def assert_same_outcome(one, other):
    (seen, state, stats, buffer), (seen_2, state_2, stats_2, buffer_2) = one, other
    assert len(seen) == len(seen_2) and stats == stats_2
    assert_same_values(state, state_2)
    for batch, batch_2 in zip(seen, seen_2, strict=True):
        assert_same_values(batch, batch_2)
    if buffer is not None:
        assert len(buffer) == len(buffer_2) and buffer.write_count == buffer_2.write_count
        if len(buffer):
            assert_same_values(buffer[:], buffer_2[:])


def assert_same_values(one, other):
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same_values(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for member, member_2 in zip(one, other, strict=True):
            assert_same_values(member, member_2)
    elif hasattr(one, "to_dict"):
        assert type(one) is type(other) and one.shape == other.shape and one.device == other.device
        assert one.names == other.names
        assert_same_values(one.to_dict(), other.to_dict())
    else:
        assert one == other


def both(make_collector, make_buffer=lambda: None, batches=BATCHES):
    """The same program by steps and in general."""
    by_steps = outcome(make_collector, make_buffer(), batches)
    with pytest.MonkeyPatch.context() as patch:
        in_general(patch)
        general = outcome(make_collector, make_buffer(), batches)
    assert_same_outcome(by_steps, general)
    return by_steps


@each("size", SIZES)
@each("make_policy", POLICIES.values())
def test_batches_that_are_handed_out_are_the_same(make_policy, size):
    both(lambda _: SyncDataCollector(countdown(), make_policy(), frames_per_batch=size))


@pytest.mark.deep
@each("size", SIZES)
@each("make_policy", POLICIES.values())
def test_rows_of_a_buffer_are_the_same(make_policy, size):
    both(
        lambda buffer: SyncDataCollector(countdown(), make_policy(), frames_per_batch=size, replay_buffer=buffer),
        BUFFERS["rows"],
    )


@pytest.mark.deep
@each("size", SIZES)
@each("make_buffer", BUFFERS.values())
def test_every_buffer_has_the_same_rows(make_buffer, size):
    both(
        lambda buffer: SyncDataCollector(countdown(), Rule(hot=False), frames_per_batch=size, replay_buffer=buffer),
        make_buffer,
    )


@pytest.mark.deep
@each("size", SIZES)
@each("settings", SETTINGS)
@each("make_buffer", [BUFFERS["rows with their index"], lambda: None])
def test_every_setting_gives_the_same(settings, size, make_buffer):
    both(
        lambda buffer: SyncDataCollector(
            countdown(), Rule(hot=False), frames_per_batch=size, replay_buffer=buffer, **settings
        ),
        make_buffer,
        batches=14,
    )


@pytest.mark.deep
@each("categorical", [False, True])
@each("name", SPACES)
def test_every_space_gives_the_same(name, categorical):
    def make(buffer):
        env = GymEnv(Echo(SPACES[name], SPACES[name]), categorical_action_encoding=categorical)
        return SyncDataCollector(env, None, frames_per_batch=2, replay_buffer=buffer)

    for make_buffer in (BUFFERS["rows"], lambda: None):
        both(make, make_buffer, batches=12)


@pytest.mark.deep
@each("size", [1, 3])
@each("call", range(2, 8))
@each("place, error", [("step", RuntimeError), ("reset", RuntimeError), ("policy", KeyboardInterrupt)])
def test_after_an_error_the_same_rows_are_there(place, error, call, size):
    def make(buffer):
        world, rule = Countdown(), Rule(hot=False)
        fails = Fails(call, rule if place == "policy" else getattr(world, place), error)
        if place != "policy":
            setattr(world, place, fails)
        env = GymEnv(world, categorical_action_encoding=True)
        policy = (lambda observation: fails(observation)) if place == "policy" else rule
        return SyncDataCollector(env, policy, frames_per_batch=size, replay_buffer=buffer)

    for make_buffer in (BUFFERS["rows"], lambda: None):
        both(make, make_buffer, batches=10)


@pytest.mark.deep
@each("what", ["reward", "observation", "flag", "action"])
@each("size", SIZES)
def test_values_that_no_space_has_give_the_same_errors(what, size):
    class Odd(Countdown):
        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            if self.total == 7:
                changed = {"reward": [1.0, 2.0], "observation": observation[:1], "flag": "no"}
                reward = changed["reward"] if what == "reward" else reward
                observation = changed["observation"] if what == "observation" else observation
                terminated = changed["flag"] if what == "flag" else terminated
            return observation, reward, terminated, truncated, info

    class Beyond(nn.Module):
        def forward(self, observation):
            return torch.tensor(7 if what == "action" and int(observation[1]) == 5 else 1)

    def make(buffer):
        env = GymEnv(Odd(), categorical_action_encoding=True)
        return SyncDataCollector(env, Beyond(), frames_per_batch=size, replay_buffer=buffer)

    for make_buffer in (BUFFERS["rows"], lambda: None):
        both(make, make_buffer, batches=10)


def test_an_action_of_another_shape_is_refused_in_the_first_step_of_a_batch():
    collector = SyncDataCollector(
        countdown(), lambda observation: torch.zeros(1, dtype=torch.int64), frames_per_batch=1
    )
    with pytest.raises(ValueError, match="step 1 of the batch"):
        collector.rollout()


def test_columns_go_into_the_rows_without_a_batch(monkeypatch):
    buffer, appended = BUFFERS["rows with their index"](), []
    append = ColumnRows.append_part
    monkeypatch.setattr(
        ColumnRows, "append_part", lambda self, *part: appended.append(append(self, *part)) or appended[-1]
    )
    collector = SyncDataCollector(countdown(), Rule(hot=False), frames_per_batch=1, replay_buffer=buffer)
    for _ in range(50):
        collector.rollout()
    assert appended == [True] * 49  # the first batch decides what a row has
    assert buffer[:]["index"].tolist() == list(range(25))


def test_columns_of_several_environments_go_into_the_rows_of_each(monkeypatch):
    def make(buffer):
        env = SerialEnv(2, [countdown, lambda: GymEnv(Countdown((2,)), categorical_action_encoding=True)])
        return SyncDataCollector(env, Rule(hot=False), frames_per_batch=6, replay_buffer=buffer)

    for storage in (LazyTensorStorage(50), LazyTensorStorage(50, ndim=2)):
        both(make, lambda storage=storage: ReplayBuffer(storage=type(storage)(50, ndim=storage.ndim)), batches=8)


def test_an_extend_of_the_users_own_gets_every_batch():
    class Counts(ReplayBuffer):
        seen = 0

        def extend(self, data, **more):
            self.seen += len(data)
            return super().extend(data, **more)

    buffer = Counts(storage=LazyTensorStorage(50))
    collector = SyncDataCollector(countdown(), Rule(hot=False), frames_per_batch=1, replay_buffer=buffer)
    for _ in range(20):
        collector.rollout()
    assert buffer.seen == len(buffer) == 20


def test_a_hook_gets_every_batch_and_may_come_and_go():
    seen, buffer = [], BUFFERS["rows"]()
    collector = SyncDataCollector(countdown(), Rule(hot=False), frames_per_batch=1, replay_buffer=buffer)
    for number in range(12):
        collector.set_post_collect_hook(seen.append if number % 2 else None)
        collector.rollout()
    assert torch.cat(seen)["observation"].tolist() == buffer[1::2]["observation"].tolist()


def test_a_buffer_whose_parts_change_is_written_to_as_it_is_now():
    buffer = BUFFERS["rows"]()
    collector = SyncDataCollector(countdown(), Rule(hot=False), frames_per_batch=1, replay_buffer=buffer)
    for number in range(9):
        if number == 6:
            buffer.append_transform(RewardScaling(0.0, 2.0), invert=False)
        collector.rollout()
    assert len(buffer) == 9
    buffer.empty()
    collector.rollout()
    assert len(buffer) == 1


def test_what_a_policy_has_seen_and_batches_that_are_held_do_not_change():
    seen = []

    def policy(observation):
        seen.append((observation, observation.clone()))
        return torch.tensor(1)

    collector = SyncDataCollector(countdown(), policy, frames_per_batch=1)
    held = [(batch, batch.clone()) for batch in (collector.rollout() for _ in range(600))]
    assert all(torch.equal(one, copy) for one, copy in seen)
    assert all(bool((batch == copy).all()) for batch, copy in held)
    held[3][0]["next", "observation"].fill_(9)
    held[3][0]["observation"].fill_(9)
    assert not bool((held[4][0]["observation"] == 9).any()) and not bool((held[2][0]["next", "observation"] == 9).any())


def test_hooks_of_a_module_that_come_and_go_hand_the_episode_on():
    module = TensorDictModule(Rule(hot=False), ["observation"], ["action"])

    def make(buffer):
        collector = SyncDataCollector(countdown(), module, frames_per_batch=1, max_frames_per_traj=3)
        assert isinstance(collector._rollout, StepRollout)
        return collector

    plain = outcome(make, None, 20)
    collector, seen = make(None), []
    for number in range(20):
        hook = module.register_forward_hook(lambda *_: None) if number % 3 == 0 else None
        seen.append(collector.rollout())
        if hook is not None:
            hook.remove()
    for one, other in zip(plain[0], seen, strict=True):
        assert_same_values(one, other)


def test_a_window_that_is_full_hands_the_last_observation_on(monkeypatch):
    monkeypatch.setattr(step_rollout, "WINDOW_STEPS", 1)
    monkeypatch.setattr(step_rollout, "FEW_STEPS", 5)
    both(lambda _: SyncDataCollector(countdown(), Rule(hot=False), frames_per_batch=3))


def test_on_tensordicts_is_a_policy_of_the_general_way():
    both(lambda _: SyncDataCollector(lambda: GymEnv(Countdown()), on_tensordicts, frames_per_batch=2))


@each(
    "size, make_policy, way, reason",
    [
        (1, POLICIES["a module"], "steps", ""),
        (1, POLICIES["two outputs"], "steps", ""),
        (1, POLICIES["with a memory"], "steps", ""),
        (64, POLICIES["a module"], "columns", ""),
        (3, lambda: TensorDictModule(Ragged(), ["observation"], ["action", "more"]), "tensordicts", "'more' was"),
    ],
)
def test_stats_say_which_way_the_steps_went_and_why(size, make_policy, way, reason):
    collector = SyncDataCollector(countdown(), make_policy(), frames_per_batch=size)
    collector.rollout()
    stats = collector.stats
    assert stats()["way"] == way and reason in stats()["reason"]
    assert {**stats._asdict(), "way": way, "reason": stats()["reason"]} == stats() or stats.episodes == 0
    assert pickle.loads(pickle.dumps(stats)).steps_way == stats.steps_way and stats.frames == size


def test_stats_of_an_environment_without_raw_values_name_the_reason():
    collector = SyncDataCollector(Proxy(GymEnv(Countdown())), Rule(), frames_per_batch=3)
    collector.rollout()
    assert collector.stats()["way"] == "tensordicts" and "TensorDict interface" in collector.stats()["reason"]
