"""Weights and their version: they change together, whichever thread updates them, and never during an action."""

from __future__ import annotations

import os
import sys
import threading

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch import nn

from contracts.each import each
from contracts.gym_loop import Proxy
from contracts.waiting import NEVER
from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.envs import GymEnv, SerialEnv

pytestmark = pytest.mark.usefixtures("lock_order")


class Endless(gymnasium.Env):
    observation_space = action_space = Box(-np.inf, np.inf, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


class Layers(nn.Module):
    """Acts with its first and its last weight. `during`, if given, is called between the two, in each call."""

    def __init__(self, during=None):
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(4)])
        self.during = during

    def forward(self, observation):
        first = self.layers[0][0].clone()
        if self.during is not None:
            self.during()
        return torch.stack([first, self.layers[-1][0].clone()]).expand(*observation.shape[:-1], 2)


def weights(value):
    return {f"layers.{i}": torch.full((1,), float(value)) for i in range(4)}


def envs(path):
    if path == "vector":
        return GymEnv(gymnasium.vector.SyncVectorEnv([Endless] * 2))
    env = GymEnv(Endless()) if path == "single" else SerialEnv(2, lambda: GymEnv(Endless()))
    return Proxy(env) if path == "stepped" else env


def collected(batch):
    """Actions `[frames, 2]` and versions `[frames]`, in the order of time."""
    rows = batch.reshape(-1, batch.shape[-1])
    return rows["action"].transpose(0, 1).reshape(-1, 2), rows["collector", "policy_version"].T.reshape(-1)


PATHS = ["single", "serial", "vector", "stepped"]


class FromAnotherThread:
    """Updates weights to 1, 2, ..., in a thread of its own, during calls of a policy; `asked` says when one began."""

    def __init__(self):
        self.value, self.threads = 0, []

    def __call__(self):
        self.value += 1
        asked = threading.Event()

        def update(value=self.value):
            asked.set()
            self.collector.update_policy_weights_(weights(value), version=value)

        self.threads.append(threading.Thread(target=update, daemon=True))
        self.threads[-1].start()
        assert asked.wait(NEVER)
        self.threads[-1].join(0.002)  # the time in which it would write into a policy that nothing guards


@each("path", PATHS)
def test_an_update_of_a_shared_policy_waits_for_its_present_call(path):
    updates = FromAnotherThread()
    collector = updates.collector = SyncDataCollector(
        envs(path), Layers(updates), frames_per_batch=16, track_policy_version=True
    )
    for batch in (collector.rollout(), collector.rollout()):
        actions, versions = collected(batch)
        assert torch.equal(actions[:, 0], actions[:, 1]) and torch.equal(actions[:, 0].long(), versions)
    for thread in updates.threads:
        thread.join(NEVER)
    assert collector.policy_version > 0 and versions.max() > 0


@each("path", PATHS)
def test_updates_of_a_policy_of_its_own_wait_for_the_next_batch_in_the_foreground_too(path):
    updates = FromAnotherThread()
    collector = updates.collector = SyncDataCollector(
        envs(path), policy_factory=lambda: Layers(updates), frames_per_batch=8, track_policy_version=True
    )
    for _ in range(3):
        before = collector.state_dict()["policy_version"]
        actions, versions = collected(collector.rollout())
        assert bool((versions == before).all()) and bool((actions == before).all())
        for thread in updates.threads:
            thread.join(NEVER)
        assert collector.state_dict()["policy_version"] > before


@each("path", PATHS)
@each("is_own", [False, True])
def test_a_policy_that_updates_its_own_weights_acts_with_them_from_the_next_call_or_batch(path, is_own):
    def update():
        value = collector.policy_version + 1
        collector.update_policy_weights_(given := weights(value))
        given["layers.3"] += 0.5  # the caller's dict: what waits is a copy

    policy = {"policy_factory": lambda: Layers(update)} if is_own else {"policy": Layers(update)}
    collector = SyncDataCollector(envs(path), **policy, frames_per_batch=6, track_policy_version=True)
    collector.update_policy_weights_(weights(0), version=0)
    calls = 6 if path == "single" else 3
    for start in (0, calls):
        actions, versions = collected(collector.rollout())
        acted = [start] * calls if is_own else list(range(start, start + calls))
        assert versions.tolist()[:: 6 // calls] == acted
        assert torch.equal(actions, versions.unsqueeze(1).expand(-1, 2).float())
    assert collector.policy_version == collector.state_dict()["policy_version"] == 2 * calls


def test_a_policy_may_pause_the_background_and_load_a_state_while_it_acts():
    def during():
        with collector.pause():
            collector.update_policy_weights_(weights(5), version=5)
        if not loaded:
            loaded.append(collector.load_state_dict(state))

    loaded, rb = [], ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    collector = SyncDataCollector(
        envs("single"), Layers(during), frames_per_batch=5, replay_buffer=rb, total_frames=20, track_policy_version=True
    )
    state = collector.state_dict()
    collector.start()
    collector._background._thread.join(NEVER)
    collector.async_shutdown()
    assert loaded and collector.policy_version == 5


@each("given", ["weights", "nothing"])
@each("path", PATHS)
def test_updates_inside_a_pause_are_those_of_the_next_batch(path, given):
    policy, rb = Layers(), ReplayBuffer(storage=LazyTensorStorage(4000), batch_size=4)
    collector = SyncDataCollector(
        envs(path), policy, frames_per_batch=4, replay_buffer=rb, total_frames=160, track_policy_version=True
    )
    collector.start()
    while collector.is_running():
        with collector.pause(), torch.no_grad():
            value = collector.policy_version + 1
            for weight in policy.parameters() if given == "nothing" else ():
                weight.fill_(value)  # as an optimizer does
            collector.update_policy_weights_(None if given == "nothing" else weights(value))
    collector.async_shutdown()
    rows = rb[:]
    versions = rows["collector", "policy_version"]
    assert torch.equal(rows["action"], versions.unsqueeze(1).expand(-1, 2).float()) and versions.max() > 0


def test_threads_that_update_at_once_are_counted_one_by_one():
    collector = SyncDataCollector(envs("single"), policy_factory=Layers, frames_per_batch=5)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda: [collector.update_policy_weights_(weights(1)) for _ in range(50)])
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(NEVER)
    finally:
        sys.setswitchinterval(before)
    assert collector.policy_version == 150


@each("is_own", [False, True])
@each(
    ("wrong", "error"),
    [
        ({**weights(1), "layers.3": torch.ones(2)}, ValueError),
        ({**weights(1), "layers.4": torch.ones(1)}, ValueError),
        ({f"layers.{i}": torch.ones(1) for i in range(3)}, ValueError),
        ({**weights(1), "layers.3": np.ones(1)}, ValueError),
        ([1], TypeError),
    ],
)
def test_refused_weights_change_none_of_the_policys(is_own, wrong, error):
    policy = {"policy_factory": Layers} if is_own else {"policy": Layers()}
    collector = SyncDataCollector(envs("single"), **policy, frames_per_batch=5)
    with pytest.raises(error):
        collector.update_policy_weights_(wrong)
    assert collector.policy_version == 0 and not any(w.any() for w in collector.policy.parameters())


def test_a_process_that_was_forked_during_a_call_updates_and_collects():
    inside, opened = threading.Event(), threading.Event()

    def wait():
        inside.set()
        assert opened.wait(NEVER)

    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    policy = Layers(wait)
    collector = SyncDataCollector(envs("single"), policy, frames_per_batch=5, total_frames=5, replay_buffer=rb)
    collector.start()
    assert inside.wait(NEVER)
    child = os.fork()
    if child == 0:
        threading.Timer(NEVER, os._exit, [1]).start()
        policy.during = None
        collector.update_policy_weights_(weights(3))
        os._exit(0 if collector.policy_version == 1 and policy.layers[0].item() == 3 else 2)
    _, status = os.waitpid(child, 0)
    opened.set()
    collector.async_shutdown()
    assert os.waitstatus_to_exitcode(status) == 0


def test_an_update_by_a_thread_for_which_the_policy_waits_follows_the_call():
    is_held, acts, updated, lock = threading.Event(), threading.Event(), threading.Event(), threading.Lock()

    def during():
        acts.set()
        with lock:  # that the trainer has while it updates
            pass

    def train():
        with lock:
            is_held.set()
            acts.wait(NEVER)
            collector.update_policy_weights_(weights(1))
            updated.set()

    collector = SyncDataCollector(envs("single"), Layers(during), frames_per_batch=4, track_policy_version=True)
    threading.Thread(target=train, daemon=True).start()
    is_held.wait(NEVER)
    batches = []
    acting = threading.Thread(target=lambda: batches.append(collector.rollout()), daemon=True)
    acting.start()
    assert updated.wait(NEVER)
    acting.join(NEVER)
    actions, versions = collected(batches[0])
    assert versions.flatten().tolist() == [0, 1, 1, 1]
    assert (actions == versions.unsqueeze(-1)).all()


@each(("version", "error"), [(-1, ValueError), (2**63, ValueError), (1.5, TypeError), ("1", TypeError)])
def test_a_version_that_rows_cannot_have_is_refused_and_changes_nothing(version, error):
    collector = SyncDataCollector(envs("single"), Layers(), frames_per_batch=4, track_policy_version=True)
    with pytest.raises(error, match="version of weights"):
        collector.update_policy_weights_(weights(1), version=version)
    assert collector.policy_version == 0
    batch = collector.rollout()
    assert (batch["action"] == 0).all() and (batch["collector", "policy_version"] == 0).all()
