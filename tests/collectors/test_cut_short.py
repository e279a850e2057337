"""Rows that were stepped before an error are handed out, or written, before it is raised."""

from __future__ import annotations

import itertools
import os
import signal

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from collectors.failing import raises
from contracts.batch_worlds import LoopEngine
from contracts.each import each
from contracts.gym_loop import Proxy
from contracts.gym_worlds import Countdown
from contracts.waiting import comes
from engram.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.envs import GymEnv, ParallelEnv, SerialEnv, TransformedEnv
from engram.envs.engines import Autoreset
from engram.envs.transforms import RewardScaling
from engram.envs.vector_env import VectorEnv
from engram.errors import WorkerError


class Breaks(Countdown):
    """Does something else at its nth step, counted over all episodes."""

    def __init__(self, n=9, what=raises, lengths=(4,)):
        super().__init__(lengths)
        self.n, self.what, self.steps = n, what, 0

    def step(self, action):
        self.steps += 1
        if self.steps == self.n:
            self.what()
        return super().step(action)


class LiesAboutReward(Breaks):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, None if self.steps == self.n else reward, *rest


class Changed(GymEnv):
    """Not known to be stepped as gymnasium is."""


def policy():
    return nn.Sequential(nn.Linear(2, 3), nn.Softmax(-1), Hot())


class Hot(nn.Module):
    def forward(self, scores):
        return nn.functional.one_hot(scores.argmax(-1), 3)


def together(mode):
    def make(world):
        return VectorEnv(LoopEngine([Countdown((4,)), world], mode))

    return make


WAYS = {
    "at random": lambda world: GymEnv(world),
    "by TensorDicts": lambda world: Changed(world),
    "in a series": lambda world: SerialEnv(2, [lambda: GymEnv(Countdown((4,))), lambda: GymEnv(world)]),
    "in a series, by TensorDicts": lambda world: SerialEnv(
        2, [lambda: Changed(Countdown((4,))), lambda: Changed(world)]
    ),
    "transformed": lambda world: TransformedEnv(GymEnv(world), RewardScaling(0.0, 2.0)),
    "in processes": lambda world: ParallelEnv(2, [lambda: GymEnv(Countdown((4,))), lambda: GymEnv(world)]),
    **{f"together, {mode.name}": together(mode) for mode in Autoreset},
}
ways = pytest.mark.parametrize("way", WAYS)
policies = pytest.mark.parametrize(
    "make_policy",
    [
        lambda: None,
        policy,
        lambda: TensorDictModule(policy(), in_keys=["observation"], out_keys=["action"]),
    ],
    ids=["random", "module", "TensorDict module"],
)


def shown(batch):
    """The time left of the last environment, before and after each step."""
    rows = batch.reshape(-1, batch.shape[-1])[-1]
    return rows["observation"][:, 0].tolist(), rows["next", "observation"][:, 0].tolist()


@pytest.mark.pairwise
@ways
@policies
@pytest.mark.parametrize("world", [Breaks, LiesAboutReward])
def test_rows_stepped_before_an_error_are_handed_out_before_it_is_raised(way, make_policy, world):
    env = WAYS[way](world(7))
    width = env.batch_size.numel()
    collector = SyncDataCollector(env, make_policy(), frames_per_batch=5 * width)
    assert shown(collector.rollout()) == ([4, 3, 2, 1, 4], [3, 2, 1, 0, 3])
    batch = collector.rollout()
    rows = batch.shape[-1]
    assert rows == 1 and shown(batch) == ([3], [2]) and collector.frames == 6 * width
    assert batch["action"].shape[: batch.ndim] == batch.shape and not batch["next", "done"].any()
    with pytest.raises((ArithmeticError, ValueError, WorkerError), match=r"simulator broke|gave a? ?reward"):
        collector.rollout()
    if way != "in processes":
        following = collector.rollout()
        assert (
            following.shape[-1] == 5 and following["collector", "traj_ids"].min() > batch["collector", "traj_ids"].max()
        )
    env.close()


@ways
def test_an_error_right_after_an_episode_keeps_its_end(way):
    env = WAYS[way](Breaks(5))
    batch = SyncDataCollector(env, frames_per_batch=10 * env.batch_size.numel()).rollout()
    assert shown(batch) == ([4, 3, 2, 1], [3, 2, 1, 0])
    assert batch["next", "done"].reshape(-1, 4)[-1].tolist() == [False, False, False, True]
    env.close()


@ways
@pytest.mark.parametrize("n", [1, 2])
def test_an_error_in_a_reset_comes_after_the_rows_before_it(way, n):
    class NoReset(Countdown):
        def reset(self, **kwargs):
            if self.episode == n - 1:
                raises()
            return super().reset(**kwargs)

    env = WAYS[way](NoReset((4,)))
    collector = SyncDataCollector(env, frames_per_batch=10 * env.batch_size.numel())
    rows = 4 * (n - 1) + (3 if way in ("in processes", "together, SAME_STEP") else 4)  # where the step itself resets
    with pytest.raises((ArithmeticError, WorkerError), match="simulator broke"):
        for batch in collector:
            assert batch.shape[-1] == rows and rows is not None
            rows = None
    assert rows is None
    env.close()


def test_an_error_in_the_first_step_is_raised_at_once():
    with pytest.raises(ArithmeticError):
        SyncDataCollector(GymEnv(Breaks(1)), frames_per_batch=4).rollout()


@policies
def test_with_a_buffer_the_rows_are_written_and_the_error_is_raised_at_once(make_policy):
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    collector = SyncDataCollector(GymEnv(Breaks(8)), make_policy(), frames_per_batch=5, replay_buffer=rb)
    collector.rollout()
    with pytest.raises(ArithmeticError):
        collector.rollout()
    assert rb[:]["observation"][:, 0].tolist() == [4, 3, 2, 1, 4, 3, 2] and collector.frames == 7
    collector.rollout()
    assert rb[:]["observation"][7:, 0].tolist() == [4, 3, 2, 1, 4]


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("has_buffer", [False, True])
def test_an_interrupt_is_raised_at_once_and_its_rows_are_written_where_there_is_a_buffer(has_buffer):
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4) if has_buffer else None
    collector = SyncDataCollector(GymEnv(Breaks(4, interrupt)), frames_per_batch=5, replay_buffer=rb)
    with pytest.raises(KeyboardInterrupt):
        collector.rollout()
    assert rb is None or rb[:]["observation"][:, 0].tolist() == [4, 3, 2]
    batch = collector.rollout()
    assert (rb[3:] if has_buffer else batch)["observation"][:, 0].tolist() == [4, 3, 2, 1, 4]


def test_the_error_is_raised_though_all_frames_are_there():
    batches = iter(SyncDataCollector(GymEnv(Breaks(5)), frames_per_batch=6, total_frames=6))
    assert len(next(batches)) == 4
    with pytest.raises(ArithmeticError):
        next(batches)


def test_of_whole_trajectories_those_that_have_ended_are_handed_out():
    collector = SyncDataCollector(GymEnv(Breaks(11)), frames_per_batch=3, trajs_per_batch=5)
    batch = collector.rollout()
    assert batch.shape == (2, 4) and batch["collector", "mask"].all()
    with pytest.raises(ArithmeticError):
        collector.rollout()
    assert collector.rollout().shape == (5, 4)


def test_an_error_in_the_policy_comes_after_the_rows_before_it():
    def tired(td):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ArithmeticError("tired")
        return td.set("action", nn.functional.one_hot(torch.tensor(0), 3)).set("memory", torch.full((1,), calls))

    calls = 0
    collector = SyncDataCollector(GymEnv(Countdown((4,))), tired, frames_per_batch=5)
    batch = collector.rollout()
    assert batch["memory"].flatten().tolist() == [1, 2] and shown(batch) == ([4, 3], [3, 2])
    with pytest.raises(ArithmeticError, match="tired"):
        collector.rollout()


def test_a_short_batch_is_not_put_into_the_tensordict_that_is_handed_out_again_and_again():
    collector = SyncDataCollector(GymEnv(Breaks(8)), frames_per_batch=5, return_same_td=True)
    first = collector.rollout()
    assert collector.rollout().shape == (2,) and first.shape == (5,)
    with pytest.raises(ArithmeticError):
        collector.rollout()
    assert collector.rollout() is first


BOTH = [MultiSyncDataCollector, MultiaSyncDataCollector]


def rows_before_error(collector):
    batches = []
    with pytest.raises(WorkerError) as caught:
        for batch in collector:
            batches.append(batch)
    assert collector.is_shut_down
    with pytest.raises(RuntimeError, match="was shut down"):
        collector.rollout()
    return batches, str(caught.value)


@pytest.mark.parametrize("cls", BOTH)
def test_a_worker_hands_over_the_rows_before_its_error(cls):
    collector = cls([lambda: GymEnv(Breaks(8))], frames_per_batch=5)
    batches, told = rows_before_error(collector)
    assert [batch.numel() for batch in batches] == [5, 2] and "simulator broke" in told
    assert shown(batches[1]) == ([3, 2], [2, 1]) and collector.frames == 7
    assert batches[1].ndim == batches[0].ndim


@pytest.mark.parametrize("threshold", [None, 1.0])
def test_what_another_worker_has_handed_over_comes_before_the_error(threshold, tmp_path):
    makers = [lambda: GymEnv(Countdown((4,))), lambda: GymEnv(Breaks(18, after_that(tmp_path / "came", raises)))]
    collector = MultiSyncDataCollector(makers, frames_per_batch=20, preemptive_threshold=threshold)
    tell(collector, tmp_path / "came")
    batches, _ = rows_before_error(collector)
    assert [tuple(batch.shape) for batch in batches] == [(2, 10), (1, 10), (1, 7)] and collector.frames == 37
    assert shown(batches[1])[0] == [2, 1, 4, 3, 2, 1, 4, 3, 2, 1]
    ids = [set(batch["collector", "traj_ids"].unique().tolist()) for batch in batches]
    assert not ids[1] & ids[2] and (threshold is None or batches[2]["collector", "mask"].all())


def tell(collector, file):
    """Makes the file when the second batch of the first worker has come."""
    receive, batches = collector._receive_batch, itertools.count(1)

    def receive_and_tell(k, message):
        receive(k, message)
        if k == 0 and next(batches) == 2:
            file.touch()

    collector._receive_batch = receive_and_tell


def after_that(file, what):
    def later():
        assert comes(file.exists)
        what()

    return later


@each("cls", BOTH)
@each("shared", [False, True])
def test_workers_write_the_rows_before_an_error_into_the_buffer(cls, shared):
    storage = LazyTensorStorage(1000, shared=shared, lanes=1) if shared else LazyTensorStorage(1000)
    rb = ReplayBuffer(storage=storage, batch_size=4)
    collector = cls([lambda: GymEnv(Breaks(18))], frames_per_batch=5, replay_buffer=rb)
    rows_before_error(collector)
    assert len(rb) == 17 and collector.frames == 17
    assert rb[:]["observation"][:, 0].tolist() == ([4, 3, 2, 1] * 5)[:17]


def test_a_worker_that_is_killed_takes_no_batch_of_another_one_with_it(tmp_path):
    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    makers = [lambda: GymEnv(Countdown((4,))), lambda: GymEnv(Breaks(18, after_that(tmp_path / "came", kill)))]
    collector = MultiSyncDataCollector(makers, frames_per_batch=20)
    tell(collector, tmp_path / "came")
    batches, told = rows_before_error(collector)
    assert [tuple(batch.shape) for batch in batches] == [(2, 10), (1, 10)] and "SIGKILL" in told


def test_an_environment_without_truncation_is_cut_all_the_same():
    class NoTruncation:
        """As another library might have it: knows whether an episode is over, and nothing else."""

        def __init__(self):
            self.inner = Proxy(GymEnv(Countdown((6,))))
            self.batch_size, self.device, self.action_spec = self.inner.batch_size, None, self.inner.action_spec

        def reset(self, td=None):
            return self.inner.reset(td).exclude("truncated")

        def step(self, td):
            td = self.inner.step(td)
            return td.set("next", td["next"].exclude("truncated"))

    collector = SyncDataCollector(NoTruncation(), frames_per_batch=8, max_frames_per_traj=4)
    for _ in range(2):
        batch = collector.rollout()
        assert batch["next", "truncated"].flatten().tolist() == [False, False, False, True] * 2
        assert batch["next", "done"].flatten().tolist() == [False, False, False, True] * 2
        assert not batch["truncated"].any() and batch["observation"][:, 0].tolist() == [6, 5, 4, 3] * 2
    batch = SyncDataCollector(NoTruncation(), frames_per_batch=4, set_truncated=True).rollout()
    assert batch["next", "truncated"].flatten().tolist() == [False, False, False, True]
