"""A trainer of any multi-agent algorithm, in BenchMARL's form: each draw is compared with plain lists of steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential, set_interaction_type
from torch import nn

from contracts.each import each
from docs.pages import added_lines
from engram.collectors import SyncDataCollector
from engram.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from engram.data.replay_buffers.samplers import PrioritizedSampler, RandomSampler, SamplerWithoutReplacement
from engram.envs import Compose, EnvBase, RewardSum, TransformedEnv
from engram.specs import Categorical, Composite, Unbounded

#: Of recurrent algorithms, whose items are sequences.
pytestmark = pytest.mark.filterwarnings("ignore:a batch of shape")

WORLDS, FRAMES = 3, 30
GROUPS = {"agents": 2, "adversaries": 1}


class Field(EnvBase):
    """Several worlds at once, with two groups: observations are (world, episode, step, agent)."""

    def __init__(self):
        super().__init__(batch_size=[WORLDS])
        grouped = lambda make: Composite(  # noqa: E731
            {group: Composite(make(n), shape=(WORLDS, n)) for group, n in GROUPS.items()}, shape=(WORLDS,)
        )
        self.observation_spec = grouped(lambda n: {"observation": Unbounded((WORLDS, n, 4))})
        self.full_action_spec = grouped(lambda n: {"action": Categorical(3, shape=(WORLDS, n))})
        self.full_reward_spec = grouped(lambda n: {"reward": Unbounded((WORLDS, n, 1))})
        self.full_done_spec = Composite(
            {name: Categorical(2, shape=(WORLDS, 1), dtype=torch.bool) for name in ("done", "terminated")},
            shape=(WORLDS,),
        )
        self.episode, self.at = -torch.ones(WORLDS), torch.zeros(WORLDS)

    def shown(self):
        world = torch.stack([torch.arange(float(WORLDS)), self.episode, self.at], -1)
        made = {}
        for group, n in GROUPS.items():
            agent = torch.arange(float(n)).expand(WORLDS, n).unsqueeze(-1)
            seen = torch.cat([world.unsqueeze(1).expand(WORLDS, n, 3), agent], -1)
            made[group] = TensorDict({"observation": seen}, [WORLDS, n])
        return TensorDict(made, [WORLDS])

    def _reset(self, tensordict=None, **kwargs):
        asked = None if tensordict is None else tensordict.get("_reset", None)
        which = torch.ones(WORLDS, dtype=torch.bool) if asked is None else asked.reshape(WORLDS)
        self.episode, self.at = torch.where(which, self.episode + 1, self.episode), torch.where(which, 0.0, self.at)
        return self.shown()

    def _step(self, tensordict):
        self.at = self.at + 1
        out = self.shown()
        for group in GROUPS:
            out[group, "reward"] = reward(out[group, "observation"], tensordict[group, "action"])
        over = (self.at >= 4 + torch.arange(WORLDS)).unsqueeze(-1)
        return out.update({"done": over, "terminated": over.clone()})

    def _set_seed(self, seed=None):
        torch.manual_seed(seed or 0)


def reward(after, action):
    return after[..., 2:3] + 10 * action.unsqueeze(-1) + 100 * after[..., 3:]


# ---- the program ----
@dataclass
class Algorithm:
    """What differs between algorithms; the trainer below is the same for all."""

    on_policy: bool = False
    prioritised: bool = False
    sequence: int = 1  # steps of an item, for recurrent networks

    memory_size = 90
    minibatch = 15

    def buffer(self, group, transforms=(), folder=None):
        memory_size = (FRAMES if self.on_policy else self.memory_size) // self.sequence
        if self.on_policy:
            sampler = SamplerWithoutReplacement()
        elif self.prioritised:
            sampler = PrioritizedSampler(memory_size, alpha=1.0, beta=0.4)
        else:
            sampler = RandomSampler()
        if folder is None:
            storage = LazyTensorStorage(memory_size, device="cpu")
        else:
            storage = LazyMemmapStorage(memory_size, device="cpu", scratch_dir=folder / group, existsok=True)
        return TensorDictReplayBuffer(
            storage=storage,
            sampler=sampler,
            batch_size=self.minibatch // self.sequence,
            priority_key=(group, "td_error"),
            transform=Compose(*transforms),
        )

    def loss(self, group, batch, critic):
        error = critic(batch[group, "observation"]).squeeze(-1) - batch["next", group, "reward"].squeeze(-1)
        if self.prioritised:  # worth learning from: the first world only
            batch[group, "td_error"] = (batch[group, "observation"][..., 0] == 0).float()
        return error.square().mean()


class Trainer:
    def __init__(self, algorithm, folder=None, told=lambda *what: None):
        self.algorithm, self.folder, self.told, self.frames = algorithm, folder, told, 0
        self.policies = {group: self.policy(group) for group in GROUPS}
        self.critics = {group: nn.Linear(4, 1) for group in GROUPS}
        parameters = [weight for critic in self.critics.values() for weight in critic.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-3)
        self.buffers = {group: algorithm.buffer(group, folder=folder) for group in GROUPS}
        self.collector = SyncDataCollector(
            self.env,
            TensorDictSequential(*self.policies.values()),
            device="cpu",
            storing_device="cpu",
            frames_per_batch=FRAMES,
            total_frames=10 * FRAMES,
            init_random_frames=0 if algorithm.on_policy else FRAMES,
        )
        self.batches = iter(self.collector)

    def env(self):
        env = Field()
        sums = [(group, "episode_reward") for group in GROUPS]
        return TransformedEnv(env, RewardSum(in_keys=env.reward_keys, out_keys=sums))

    def policy(self, group):
        def act(observation):
            return (observation.sum(-1) % 3).long()

        return TensorDictModule(act, in_keys=[(group, "observation")], out_keys=[(group, "action")])

    def collect(self):
        batch = next(self.batches)
        self.frames += batch.numel()
        for group in GROUPS:
            others = [other for other in GROUPS if other != group]
            mine = batch.exclude(*others, *(("next", other) for other in others))
            self.expand_flags(group, mine)
            n = self.algorithm.sequence
            mine = mine.reshape(-1) if n == 1 else mine.reshape(-1, n)
            self.told("collected", group, mine)
            self.buffers[group].extend(mine)

    def expand_flags(self, group, batch):
        shape = batch["next", group, "reward"].shape
        for name in ("done", "terminated"):
            batch["next", group, name] = batch["next", name].unsqueeze(-1).expand(shape)

    def learn(self):
        for group, rb in self.buffers.items():
            for _ in range(2):
                for _ in range(FRAMES // self.algorithm.minibatch):
                    subdata = rb.sample().to("cpu")
                    self.told("drawn", group, subdata)
                    loss = self.algorithm.loss(group, subdata, self.critics[group])
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    rb.update_tensordict_priority(subdata)

    def train(self, iterations):
        for _ in range(iterations):
            self.collect()
            self.learn()
            self.collector.update_policy_weights_()

    def evaluate(self):
        env = self.env()
        policy = TensorDictSequential(*self.policies.values())
        with torch.no_grad(), set_interaction_type(InteractionType.DETERMINISTIC):
            return env.rollout(12, policy, auto_cast_to_device=True, break_when_any_done=False)

    def state_dict(self):
        state = {f"buffer_{group}": rb.state_dict() for group, rb in self.buffers.items() if len(rb)}
        state |= {f"critic_{group}": critic.state_dict() for group, critic in self.critics.items()}
        return {**state, "collector": self.collector.state_dict(), "frames": self.frames}

    def load_state_dict(self, state):
        for group in GROUPS:
            self.buffers[group].load_state_dict(state[f"buffer_{group}"])
            self.critics[group].load_state_dict(state[f"critic_{group}"])
        self.collector.load_state_dict(state["collector"])
        self.frames = state["frames"]


# ---- what it must draw ----
def rows(group, batch):
    """A tuple for each item, of all that is stored of it, each of which must say the same."""
    before, after = batch[group, "observation"], batch["next", group, "observation"]
    assert torch.equal(after[..., 2], before[..., 2] + 1) and torch.equal(after[..., :2], before[..., :2])
    assert torch.equal(batch["next", group, "reward"], reward(after, batch[group, "action"]))
    over = after[..., 2:3] == 4 + before[..., :1]
    assert torch.equal(batch["next", group, "done"], over) and torch.equal(batch["next", group, "terminated"], over)
    assert torch.equal(batch["next", "done"], over[..., 0, :])
    items = torch.cat(
        [before, batch[group, "action"].unsqueeze(-1).float(), batch["next", group, "episode_reward"]], -1
    )
    return [tuple(item.flatten().tolist()) for item in items]


class Lists:
    """The newest items of each group, and what was drawn of them."""

    def __init__(self, algorithm):
        self.algorithm, self.keep = algorithm, algorithm.memory_size // algorithm.sequence
        if algorithm.on_policy:
            self.keep = FRAMES // algorithm.sequence
        self.held = {group: deque(maxlen=self.keep) for group in GROUPS}
        self.epoch = {group: [] for group in GROUPS}
        self.seen = {group: set() for group in GROUPS}

    def __call__(self, what, group, batch):
        found = rows(group, batch)
        if what == "collected":
            assert not set(found) & set(self.held[group])
            self.held[group].extend(found)
            return
        assert len(found) == self.algorithm.minibatch // self.algorithm.sequence
        assert set(found) <= set(self.held[group])
        assert ("agents" in batch.keys()) == (group == "agents")
        if self.algorithm.on_policy:
            self.check_epoch(group, found)
        if self.algorithm.prioritised:
            unworthy = [row for row in found if row[0] != 0]
            assert not self.seen[group] & set(unworthy), "a step whose priority is 0 was drawn again"
        self.seen[group] |= set(found)

    def check_epoch(self, group, found):
        self.epoch[group] += found
        if len(self.epoch[group]) == self.keep:
            assert sorted(self.epoch[group]) == sorted(self.held[group])
            self.epoch[group] = []


ALGORITHMS = {
    "on policy": Algorithm(on_policy=True),
    "off policy": Algorithm(),
    "prioritised": Algorithm(prioritised=True),
    "recurrent, on policy": Algorithm(on_policy=True, sequence=5),
    "recurrent, off policy": Algorithm(sequence=5),
}


def trained(algorithm, iterations, folder=None):
    torch.manual_seed(0)
    lists = Lists(algorithm)
    trainer = Trainer(algorithm, folder, lists)
    trainer.train(iterations)
    assert trainer.frames == iterations * FRAMES
    return trainer, lists


@each("name", ALGORITHMS)
def test_each_group_draws_whole_steps_of_its_own_by_the_rule_of_the_algorithm(name):
    trainer, lists = trained(ALGORITHMS[name], 6)
    for group, rb in trainer.buffers.items():
        assert len(rb) == len(lists.held[group]) == lists.keep
        if not trainer.algorithm.prioritised:
            assert {row for _ in range(60) for row in rows(group, rb.sample())} == set(lists.held[group])


def test_priorities_of_several_agents_count_by_the_largest_and_steps_of_priority_0_are_drawn_once():
    trainer, lists = trained(ALGORITHMS["prioritised"], 8)
    for group, rb in trainer.buffers.items():
        again = [row for _ in range(10) for row in rows(group, rb.sample()) if row in lists.seen[group]]
        assert again and all(row[0] == 0 for row in again)


def test_steps_in_files_are_those_of_the_lists(tmp_path):
    _, lists = trained(ALGORITHMS["off policy"], 4, tmp_path)
    reopened = Algorithm().buffer("agents", folder=tmp_path)
    assert sorted(rows("agents", reopened[:])) == sorted(lists.held["agents"])


def test_a_trainer_that_loads_a_state_goes_on_with_its_buffers(tmp_path):
    for algorithm in ALGORITHMS.values():
        trainer, lists = trained(algorithm, 4)
        torch.save(trainer.state_dict(), tmp_path / "checkpoint.pt")
        other = Trainer(algorithm)
        other.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=False))
        assert other.frames == 4 * FRAMES
        for group, rb in other.buffers.items():
            assert sorted(rows(group, rb[:])) == sorted(lists.held[group])
        other.train(2)


def test_an_evaluation_goes_on_over_the_ends_of_episodes():
    steps = Trainer(Algorithm()).evaluate()
    assert steps.shape == (WORLDS, 12)
    for group in GROUPS:
        at = steps[group, "observation"][:, :, 0, 2]
        assert at.tolist() == [[float(t % (4 + world)) for t in range(12)] for world in range(WORLDS)]


def test_a_batch_without_priorities_is_an_error_only_where_the_sampler_takes_them():
    for name in ("on policy", "off policy"):
        trainer, _ = trained(ALGORITHMS[name], 1)
        batch = trainer.buffers["agents"].sample()
        assert ("agents", "td_error") not in batch.keys(True)
        trainer.buffers["agents"].update_tensordict_priority(batch)
    trainer, _ = trained(ALGORITHMS["prioritised"], 1)
    with pytest.raises(KeyError, match="td_error"):
        trainer.buffers["agents"].update_tensordict_priority(trainer.buffers["agents"].sample())


def test_lines_that_the_page_adds_are_lines_of_this_program():
    assert added_lines("docs/coming-from/benchmarl.md", __file__) == []
