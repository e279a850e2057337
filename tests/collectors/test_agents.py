"""Environments of several agents: action, reward and flags in groups, lazy stacks, through every collector."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from contracts.each import each
from engram.collectors import MultiSyncDataCollector, SyncDataCollector
from engram.collectors.worker import SharedBatchReader, SharedBatchWriter
from engram.data import Categorical, Composite, LazyTensorStorage, SliceSampler, TensorDictReplayBuffer, Unbounded
from engram.envs import EnvBase, SerialEnv

FLAGS = ("done", "terminated")


class Agents(EnvBase):
    """Two agents, whose episode ends for both after four steps."""

    def __init__(self, lazy=False):
        super().__init__(device=None, batch_size=[])
        group = lambda **specs: Composite({"agents": Composite(specs, shape=(2,))})  # noqa: E731
        self.observation_spec = group(observation=Unbounded((2, 3)))
        self.action_spec = group(action=Categorical(4, shape=(2,)))
        self.reward_spec = group(reward=Unbounded((2, 1)))
        self.done_spec = group(**{name: Categorical(2, shape=(2, 1), dtype=torch.bool) for name in FLAGS})
        self.lazy, self.time = lazy, 0

    def _state(self, **entries):
        ended = torch.full((2, 1), self.time >= 4)
        entries |= {"observation": torch.full((2, 3), float(self.time)), "done": ended, "terminated": ended.clone()}
        agents = TensorDict(entries, [2])
        return TensorDict({"agents": lazy_stack(list(agents.unbind(0))) if self.lazy else agents}, [])

    def _reset(self, tensordict=None, **kwargs):
        self.time = 0
        return self._state()

    def _step(self, tensordict):
        self.time += 1
        return self._state(reward=tensordict["agents", "action"].float().unsqueeze(-1))

    def _set_seed(self, seed=None):
        torch.manual_seed(seed or 0)


class WithoutRootFlags(Agents):
    """As another library's environment: no flags at the root, and resets are asked for beside those of the agents."""

    def reset(self, td=None):
        if td is not None:
            assert td["agents", "_reset"].shape == (2, 1) and bool(td["agents", "_reset"].all())
        return super().reset(td).exclude("done", "terminated", "truncated")

    def step(self, td):
        stepped = super().step(td)
        return stepped.exclude(*(("next", flag) for flag in ("done", "terminated", "truncated")))


def check(batch, length=4):
    action, reward = batch["agents", "action"], batch["next", "agents", "reward"]
    assert action.shape == (*batch.shape, 2) and torch.equal(reward.squeeze(-1), action.float())
    assert set(batch["agents"].keys()) >= {"observation", "action", "done", "terminated"}
    assert "_reset" not in batch["agents"].keys()
    steps = batch.shape[-1]
    after, ids = batch["next", "agents", "observation"][..., 0, 0], batch["collector", "traj_ids"]
    done = batch["next", "done"].squeeze(-1)
    for times, trajectories, ends in zip(*(x.reshape(-1, steps) for x in (after, ids, done)), strict=True):
        assert times.tolist() == [1.0 + k % length for k in range(steps)]
        assert ends.tolist() == [k % length == length - 1 for k in range(steps)]
        assert (trajectories[1:] != trajectories[:-1]).tolist() == ends[:-1].tolist()


KINDS = {"one": Agents, "lazy": lambda: Agents(lazy=True), "no root flags": lambda: WithoutRootFlags()}


@each("kind", KINDS)
@each("length", [4, 3])
def test_agents_are_collected_with_their_groups(kind, length):
    limit = None if length == 4 else length
    with SyncDataCollector(KINDS[kind](), None, frames_per_batch=9, max_frames_per_traj=limit) as collector:
        check(torch.cat([collector.rollout(), collector.rollout()]), length)


def test_a_policy_writes_where_their_actions_are():
    def policy(td):
        return td.set(("agents", "action"), torch.full((*td.batch_size, 2), 3))

    with SyncDataCollector(Agents(), policy, frames_per_batch=8) as collector:
        batch = collector.rollout()
    check(batch)
    assert (batch["agents", "action"] == 3).all()


def test_several_environments_of_agents_are_stepped_together():
    with SyncDataCollector(SerialEnv(2, Agents), None, frames_per_batch=12) as collector:
        check(collector.rollout())


@pytest.mark.parametrize("kind", ["lazy", "no root flags"])
def test_workers_collect_them(kind):
    with MultiSyncDataCollector([KINDS[kind]] * 2, None, frames_per_batch=12) as collector:
        check(collector.rollout())


def test_slices_of_their_steps_are_sampled():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(50), sampler=SliceSampler(slice_len=2), batch_size=8)
    with SyncDataCollector(Agents(lazy=True), None, frames_per_batch=24, replay_buffer=rb) as collector:
        collector.rollout()
    assert rb.stats().episodes == 6
    assert (rb.sample()["agents", "observation"][:, 0, 0].reshape(-1, 2).diff() == 1).all()


def test_environment_without_a_done_flag_is_refused_by_name():
    class Endless(WithoutRootFlags):
        def step(self, td):
            return super().step(td).exclude(*(("next", "agents", flag) for flag in (*FLAGS, "truncated")))

    with (
        SyncDataCollector(Endless(), None, frames_per_batch=4) as collector,
        pytest.raises(KeyError, match="no 'done'"),
    ):
        collector.rollout()


def test_batches_of_agents_of_different_shapes_come_from_workers_as_they_are():
    agents = lazy_stack([TensorDict({"observation": torch.ones(6, 3 + 2 * k)}, [6]) for k in range(2)], 1)
    uneven = TensorDict({"agents": agents, "x": torch.arange(6)}, [6])
    even = TensorDict({"x": torch.arange(6)}, [6])
    writer, reader = SharedBatchWriter(2), SharedBatchReader()
    for batch in (even, uneven, even, uneven):
        found = reader.take(writer.put(batch))
        assert torch.equal(found["x"], batch["x"]) and found.shape == batch.shape
        if batch is uneven:
            assert [found["agents"][:, k]["observation"].shape[-1] for k in range(2)] == [3, 5]
