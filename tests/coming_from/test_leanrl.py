"""Loops in one file as LeanRL has them, a transition in and a batch out at each step, against a plain list of steps."""

from __future__ import annotations

from collections import deque

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from contracts.each import each
from docs.pages import added_lines
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer

DEVICE = torch.device("cpu")
CAPACITY, BATCH = 50, 32


class Ramp(gym.Env):
    """Shows (episode, step); odd episodes are cut, even ones end."""

    observation_space = gym.spaces.Box(-1000, 1000, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, first):
        self.episode = first - 1

    def show(self):
        return np.array([self.episode, self.at], np.float32)

    def reset(self, *, seed=None, options=None):
        self.episode, self.at = self.episode + 1, 0
        return self.show(), {}

    def step(self, action):
        self.at += 1
        over, odd = self.at == 3 + self.episode % 4, self.episode % 2 == 1
        return self.show(), self.at + 0.25 * float(action), over and not odd, over and odd, {}


# ---- the program ----
class QLearning:
    """The update is a function of tensors only, so that it can be compiled, or captured as a CUDA graph."""

    def __init__(self):
        self.q, self.target = nn.Linear(2, 2), nn.Linear(2, 2)
        self.target.load_state_dict(self.q.state_dict())
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=1e-3)

    def act(self, observations):
        return self.q(observations).argmax(-1)

    def update(self, data):
        with torch.no_grad():
            best = self.target(data["next_observations"]).amax(-1)
            goal = data["rewards"] + 0.99 * best * ~data["terminations"]
        loss = (self.q(data["observations"]).gather(1, data["actions"].unsqueeze(1)).squeeze(1) - goal).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def train(envs, learner, steps, update, tell, folder=None):
    if folder is None:
        rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY, device=DEVICE))
    else:
        rb = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=folder, existsok=True))

    def extend_and_sample(transition):
        rb.extend(transition)
        return rb.sample(BATCH)

    obs, _ = envs.reset(seed=1)
    obs = torch.as_tensor(obs, device=DEVICE)
    for _ in range(steps):
        actions = torch.where(torch.rand(envs.num_envs) < 0.5, torch.randint(2, (envs.num_envs,)), learner.act(obs))
        next_obs, rewards, terminations, truncations, infos = envs.step(actions.numpy())
        true_next_obs = next_obs.copy()
        for i in np.flatnonzero(terminations | truncations):
            true_next_obs[i] = infos["final_obs"][i]
        transition = TensorDict(
            observations=obs,
            next_observations=torch.as_tensor(true_next_obs),
            actions=actions,
            rewards=torch.as_tensor(rewards, dtype=torch.float32),
            terminations=torch.as_tensor(terminations),
            dones=torch.as_tensor(terminations | truncations),
            batch_size=envs.num_envs,
            device=DEVICE,
        )
        data = extend_and_sample(transition)
        tell(transition, data, update(data))
        obs = torch.as_tensor(next_obs, device=DEVICE)
    return rb


# ---- what it must draw ----
def vector(n):
    made = [lambda first=100 * i: Ramp(first) for i in range(n)]
    return gym.vector.SyncVectorEnv(made, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


def rows(batch):
    """A tuple for each step, of all that is stored with it."""
    columns = [batch[key].tolist() for key in ("observations", "next_observations", "actions", "rewards")]
    flags = [batch[key].tolist() for key in ("terminations", "dones")]
    return [(tuple(o), tuple(n), *rest) for o, n, *rest in zip(*columns, *flags, strict=True)]


class Ring:
    """The newest CAPACITY steps, and those of them that were drawn."""

    def __init__(self):
        self.held, self.drawn, self.losses = deque(maxlen=CAPACITY), set(), []

    def tell(self, transition, data, loss):
        self.held.extend(rows(transition))
        drawn = rows(data)
        assert len(drawn) == BATCH and set(drawn) <= set(self.held)
        self.drawn = (self.drawn | set(drawn)) & set(self.held)
        self.losses.append(loss.item())


@each("envs", [1, 4])
def test_each_row_of_a_batch_is_a_whole_step_of_the_newest_and_each_of_them_is_drawn(envs):
    torch.manual_seed(0)
    ring, learner = Ring(), QLearning()
    rb = train(vector(envs), learner, 120, learner.update, ring.tell)
    for _ in range(20):
        ring.drawn |= set(rows(rb.sample(BATCH)))
    assert ring.drawn == set(ring.held) and len(rb) == CAPACITY


def test_a_step_that_ends_an_episode_has_the_last_observation_and_not_the_first_of_the_next():
    ring, learner = Ring(), QLearning()
    train(vector(2), learner, 40, learner.update, ring.tell)
    ended = [step for step in ring.held if step[-1]]
    assert ended and all(after == (before[0], before[1] + 1) for before, after, *_ in ring.held)
    assert {step[-2] for step in ended} == {True, False}


def test_steps_in_a_file_are_there_for_the_next_run(tmp_path):
    folder = tmp_path / "replay"
    ring, learner = Ring(), QLearning()
    for _ in range(2):
        train(vector(1), learner, 20, learner.update, ring.tell, folder)
    assert rows(ReplayBuffer(storage=LazyMemmapStorage.open(folder))[:]) == list(ring.held) and len(ring.held) == 40


@pytest.mark.deep
def test_an_update_is_compiled_in_one_piece_and_once_for_all_batches():
    torch.manual_seed(0)
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    ring, learner = Ring(), QLearning()

    def loss(data):
        best = learner.target(data["next_observations"]).amax(-1)
        goal = data["rewards"] + 0.99 * best * ~data["terminations"]
        return (learner.q(data["observations"]).amax(-1) - goal.detach()).square().mean()

    train(vector(1), learner, 30, torch.compile(loss, backend=count, fullgraph=True), ring.tell)
    assert len(compiled) == 1 and len(ring.losses) == 30


@pytest.mark.deep
def test_a_step_that_stores_and_draws_inside_compiled_code_does_both():
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))

    @torch.compile(backend="eager")
    def step(transition):
        rb.extend(transition)
        return rb.sample(BATCH)["x"] * 2

    for n in range(5):
        drawn = step(TensorDict({"x": torch.full((1,), float(n))}, [1]))
        assert set(drawn.tolist()) <= {2.0 * i for i in range(n + 1)}
    assert rb[:]["x"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_lines_that_the_page_adds_are_lines_of_this_program():
    assert added_lines("docs/coming-from/leanrl.md", __file__) == []
