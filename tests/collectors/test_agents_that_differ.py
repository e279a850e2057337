"""Agents that see and do things of different shapes: through transforms, workers, collectors and buffers."""

import copy
import functools
import pickle

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from contracts.each import each
from engram.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from engram.collectors.utils import split_trajectories
from engram.data import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    MultiStep,
    SliceSampler,
    TensorDictReplayBuffer,
)
from engram.envs import EnvBase, ParallelEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv, check_env_specs
from engram.specs import Bounded, Categorical, Composite, Unbounded

EPISODE = 5


class Team(EnvBase):
    """A scout that sees 3 numbers and does 2, a tank that sees 5 and its fuel and does 4; all show the step."""

    def __init__(self, tank_sees=5, first=0):
        super().__init__()
        scout, tank = Composite(obs=Unbounded((3,))), Composite(obs=Unbounded((5,)), fuel=Unbounded((1,)))
        tank["hull", "heat"] = Unbounded((1,))
        self.observation_spec = Composite(agents=torch.stack([scout, tank], 0), count=Unbounded((1,)))
        actions = [Composite(action=Bounded(-1, 1, (width,))) for width in (2, 4)]
        self.full_action_spec = Composite(agents=torch.stack(actions, 0))
        self.full_reward_spec = Composite(agents=Composite(reward=Unbounded((2, 1)), shape=(2,)))
        self.full_done_spec = Composite(done=Categorical(2, (1,), dtype=torch.bool))
        self.n, self._tank_sees, self._first = first, tank_sees, first

    def _observations(self):
        scout = TensorDict({"obs": torch.full((3,), float(self.n))})
        tank = TensorDict(
            {"obs": torch.full((self._tank_sees,), float(self.n)), "fuel": torch.full((1,), float(self.n))}
        )
        tank["hull", "heat"] = torch.full((1,), float(self.n))
        return TensorDict({"agents": lazy_stack([scout, tank], 0), "count": torch.full((1,), float(self.n))})

    def _reset(self, tensordict=None, **kwargs):
        self.n = self._first
        return self._observations()

    def _step(self, tensordict):
        assert [one["action"].shape for one in tensordict["agents"].unbind(0)] == [(2,), (4,)]
        self.n += 1
        td = self._observations().set("done", torch.tensor([self.n - self._first >= EPISODE]))
        return td.set(("agents", "reward"), torch.full((2, 1), float(self.n)))

    def _set_seed(self, seed):
        pass


def assert_whole_observations(td):
    """Every agent has its own shape and the numbers of its step."""
    agents = td["agents"]
    assert isinstance(agents, LazyStackedTensorDict)
    scout, tank = agents.unbind(td.ndim)
    assert scout["obs"].shape == (*td.shape, 3) and tank["obs"].shape == (*td.shape, 5)
    for value in (scout["obs"], tank["obs"], tank["fuel"], tank["hull", "heat"]):
        assert bool((value == td["count"]).all())


def assert_whole(batch):
    """Every agent of every step has its own shape and the numbers of that step."""
    for td in (batch, batch["next"]):
        assert_whole_observations(td)
    scout, tank = batch["agents"].unbind(batch.ndim)
    assert scout["action"].shape == (*batch.shape, 2) and tank["action"].shape == (*batch.shape, 4)
    assert bool((batch["next", "count"] == batch["count"] + 1).all())
    assert bool((batch["next", "agents", "reward"] == batch["next", "count"].unsqueeze(-1)).all())


def collected(env=Team, frames=14):
    return SyncDataCollector(env(), None, frames_per_batch=7, total_frames=frames)


def test_its_specs_say_each_agents_own_shape():
    env = Team()
    check_env_specs(env)
    assert env.action_keys == [("agents", "action")] and env.reward_keys == [("agents", "reward")]
    assert env.action_spec.shape == (2, -1) and env.observation_spec["agents", "obs"].shape == (2, -1)
    assert env.full_action_spec.is_in(env.rand_action().select("agents"))
    assert env.fake_tensordict()["agents"][1]["obs"].shape == (5,)


def test_an_observation_or_action_of_another_shape_is_refused_by_agent():
    with pytest.raises(ValueError, match=r"\('agents', 1, 'obs'\).*\(4,\).*\(5,\)"):
        Team(tank_sees=4).reset()
    td = Team().rand_action(Team().reset())
    td["agents"].tensordicts[0]["action"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"the policy gave \('agents', 'action', 0\).*\(3,\).*\(2,\)"):
        Team().step(td)
    with pytest.raises(KeyError, match="step needs an"):
        Team().step(Team().reset())


@pytest.mark.parametrize("make", [Team, lambda: SerialEnv(2, Team)])
def test_an_action_that_is_nan_is_refused_by_agent_before_the_step(make):
    calls, env = [], make()

    def act(td):
        calls.append(1)
        env.rand_action(td)
        if len(calls) == 4:
            td["agents"].unbind(len(env.batch_size))[1]["action"][..., -1] = float("nan")
        return td

    collector = SyncDataCollector(env, act, frames_per_batch=7 * env.batch_size.numel())
    batch = collector.rollout()
    assert batch.shape[-1] == 3
    assert_whole(batch)
    with pytest.raises(ValueError, match=r"action \('agents', 'action', 1\) is not(.|\n)*step 4 of the batch"):
        collector.rollout()


def test_a_rollout_and_a_collector_give_whole_steps():
    assert_whole(Team().rollout(12, break_when_any_done=False))
    for batch in collected():
        assert_whole(batch)


@pytest.mark.parametrize("make", [SerialEnv, ParallelEnv])
def test_several_of_them_step_together(make):
    env = make(3, [functools.partial(Team, first=first) for first in (0, 20, 40)])
    assert_whole_observations(env.reset())
    batch = env.rollout(8, break_when_any_done=False)
    env.close()
    assert batch["count"][:, 0].flatten().tolist() == [0, 20, 40]
    assert_whole(batch)


def test_they_pass_through_transforms():
    env = TransformedEnv(Team(), [StepCounter(), RewardSum(in_keys=[("agents", "reward")])])
    batch = next(iter(SyncDataCollector(env, None, frames_per_batch=7, total_frames=7)))
    assert_whole(batch)
    assert batch["next", "step_count"].flatten().tolist() == [1, 2, 3, 4, 5, 1, 2]
    assert batch["next", "agents", "episode_reward"][:, 0].flatten().tolist() == [1, 3, 6, 10, 15, 1, 3]


@pytest.mark.parametrize("kind", [MultiSyncDataCollector, MultiaSyncDataCollector])
def test_worker_processes_collect_them_and_write_them_into_one_store(kind):
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(40, lanes=2), batch_size=8)
    with kind([Team, Team], None, frames_per_batch=8, total_frames=16) as collector:
        for batch in collector:
            assert_whole(batch)
    with kind([Team, Team], None, frames_per_batch=8, total_frames=16, replay_buffer=rb) as collector:
        for _ in collector:
            pass
    assert len(rb) == 16
    assert_whole(rb.sample())


STORAGES = [ListStorage, LazyTensorStorage, LazyMemmapStorage, LazyStackStorage, CompressedListStorage]


@pytest.mark.parametrize("storage", STORAGES)
class TestInAStorage:
    def filled(self, storage):
        rb = TensorDictReplayBuffer(storage=storage(30), batch_size=6)
        for batch in collected():
            rb.extend(batch)
        return rb

    def test_rows_come_back_with_each_agents_own_shape(self, storage):
        rb = self.filled(storage)
        assert_whole(rb.sample())
        assert_whole(rb[3])
        assert rb[torch.tensor([4])][0]["agents"][1]["obs"].shape == (5,)

    def test_steps_that_are_added_one_by_one_are_the_same_rows(self, storage):
        one, other = self.filled(storage), TensorDictReplayBuffer(storage=storage(30), batch_size=6)
        for batch in collected():
            for step in batch.unbind(0):
                other.add(step)
        other.extend(lazy_stack(list(batch.unbind(0))))
        assert len(other) == len(one) + 7
        for i in range(len(one)):
            assert bool((one[i]["agents"][1]["obs"] == other[i]["agents"][1]["obs"]).all())
        assert_whole(other.sample())

    def test_they_are_saved_and_copied(self, storage, tmp_path):
        rb = self.filled(storage)
        rb.dumps(tmp_path)
        loaded = TensorDictReplayBuffer(storage=storage(30), batch_size=6)
        loaded.loads(tmp_path)
        for twin in (loaded, copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
            assert len(twin) == 14
            for i in range(14):
                assert bool((twin[i]["agents"][1]["obs"] == rb[i]["agents"][1]["obs"]).all())
            assert_whole(twin.sample())


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
class TestInPackedRows:
    def test_an_agent_of_another_shape_or_with_another_key_is_refused_and_nothing_is_written(self, storage):
        rb = TensorDictReplayBuffer(storage=storage(30), batch_size=6)
        batch = next(iter(collected()))
        rb.extend(batch)
        wide, other = batch.clone(), batch.clone()
        wide["agents"].tensordicts[0]["obs"] = torch.zeros(7, 4)
        other["agents"].tensordicts[0]["fuel"] = torch.zeros(7, 1)
        three = batch.clone().set("agents", lazy_stack([*batch["agents"].unbind(1), batch["agents"][:, 0]], 1))
        for wrong, text in (
            (wide, r"\('agents', 0, 'obs'\).*\[3\].*\[4\]"),
            (other, r"\('agents', 0, 'fuel'\) is not in this storage"),
            (three, "'agents' is a stack of 2 in this storage"),
        ):
            with pytest.raises(ValueError, match=text):
                rb.extend(wrong)
        assert len(rb) == 7
        assert_whole(rb[:])

    def test_steps_of_different_shapes_are_refused(self, storage):
        rows = [TensorDict({"obs": torch.zeros(n)}) for n in (3, 5)]
        with pytest.raises(ValueError, match="has different shapes in the members of a lazy stack"):
            TensorDictReplayBuffer(storage=storage(20)).extend(lazy_stack(rows))

    def test_environments_side_by_side_and_slices_of_trajectories(self, storage):
        rb = TensorDictReplayBuffer(storage=storage(40, ndim=2), sampler=SliceSampler(slice_len=3), batch_size=6)
        for batch in SyncDataCollector(SerialEnv(2, Team), None, frames_per_batch=10, total_frames=20):
            rb.extend(batch)
        batch = rb.sample()
        assert_whole(batch)
        assert (batch["count"].reshape(2, 3).diff(dim=1) == 1).all()
        assert_whole(rb[:])


def test_trajectories_are_split_and_returns_summed():
    batch = next(iter(SyncDataCollector(SerialEnv(2, Team), None, frames_per_batch=12, total_frames=12)))
    split = split_trajectories(batch)
    mask = split["collector", "mask"]
    assert split.shape == (4, EPISODE) and split["agents"][..., 1]["obs"].shape == (4, EPISODE, 5)
    assert_whole(split[mask])
    summed = MultiStep(gamma=1.0, n_steps=2, reward_keys=[("next", "agents", "reward")])(batch)
    assert summed["next", "agents", "reward"][0, :, 0].flatten().tolist() == [3, 5, 7, 9, 5, 1]


@each("make", [Team, lambda: SerialEnv(2, Team), lambda: TransformedEnv(Team(), StepCounter())])
@each(
    "arguments",
    [
        {"max_frames_per_traj": 2},
        {"trajs_per_batch": 2, "traj_format": "cat"},
        {"set_truncated": True},
        {"return_same_td": True},
        {"init_random_frames": 3},
        {"storing_device": "cpu"},
    ],
)
def test_each_way_to_collect_gives_whole_steps(make, arguments):
    env = make()
    collector = SyncDataCollector(env, env.rand_action, frames_per_batch=14, **arguments)
    for _ in range(2):
        assert_whole(collector.rollout())


@pytest.mark.parametrize("arguments", [{"split_trajs": True}, {"trajs_per_batch": 2}])
def test_padded_batches_have_whole_steps(arguments):
    batch = SyncDataCollector(Team, None, frames_per_batch=14, **arguments).rollout()
    assert_whole(batch[batch["collector", "mask"]])


def test_batches_of_workers_of_different_lengths_are_padded():
    settings = {"frames_per_batch": [4, 7], "preemptive_threshold": 1.0}
    with MultiSyncDataCollector([Team, Team], None, **settings) as collector:
        batch = collector.rollout()
    mask = batch["collector", "mask"]
    assert batch.shape == (2, 7) and mask.sum(1).tolist() == [4, 7]
    assert_whole(batch[mask])


def test_compact_batches_lack_what_each_agent_sees_next():
    batch = SyncDataCollector(Team, None, frames_per_batch=7, compact_obs=True).rollout()
    following = batch["next"]
    assert "count" not in following.keys() and bool(
        (following["agents", "reward"][:5, 0, 0] == torch.arange(1.0, 6)).all()
    )
    for agent in following["agents"].unbind(1):
        assert "obs" not in agent.keys()
