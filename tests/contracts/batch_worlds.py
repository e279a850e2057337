"""Gymnasium environments that step together, in each of the three ways to reset, for tests."""

from __future__ import annotations

import numpy as np
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from engram.envs.base import EnvBase
from engram.envs.engines import Autoreset, GymEngine, VectorEngine, VectorStep


class LoopEngine(VectorEngine):
    """Steps gymnasium environments one by one, into arrays that it overwrites at each call."""

    def __init__(self, worlds, autoreset, can_reset_some=True):
        first = GymEngine(worlds[0], categorical=False, frame_skip=None, observation_key="observation")
        self.worlds, self.n = worlds, len(worlds)
        self.action, self.leaves, self.observation_spec = first.action, first.leaves, first.observation_spec
        self.autoreset, self.can_reset_some = autoreset, can_reset_some
        self.space, self.action_space = worlds[0].observation_space, worlds[0].action_space
        self.out = create_empty_array(batch_space(self.space, self.n), 1, fn=np.zeros)
        self.shown, self.seeds = [None] * self.n, None
        self.over = np.zeros(self.n, bool)
        self.reward, self.flags = np.zeros(self.n), np.zeros((2, self.n), bool)

    def seed(self, seed):
        self.seeds = seed

    def reset(self, mask=None):
        if mask is not None and not self.can_reset_some:
            raise ValueError("all or none")
        for i in range(self.n):
            if mask is None or mask[i]:
                seed = None if self.seeds is None else self.seeds + i
                self.shown[i], self.over[i] = self.worlds[i].reset(seed=seed)[0], False
        self.seeds = None
        return self.batched()

    def step(self, actions):
        idle, last = np.zeros(self.n, bool), []
        for i, world in enumerate(self.worlds):
            if self.over[i]:
                assert self.autoreset is Autoreset.NEXT_STEP, "stepped after the end"
                self.shown[i], self.over[i], idle[i] = world.reset()[0], False, True
                self.reward[i], self.flags[:, i] = 0, False
                continue
            self.shown[i], self.reward[i], *self.flags[:, i], _ = world.step(pick(actions, i))
            self.over[i] = self.flags[:, i].any()
            if self.over[i] and self.autoreset is Autoreset.SAME_STEP:
                last.append((i, self.shown[i]))
                self.shown[i], self.over[i] = world.reset()[0], False
        is_next = self.autoreset is Autoreset.NEXT_STEP
        return VectorStep(self.batched(), self.reward, *self.flags, last, idle if is_next else None)

    def batched(self):
        self.out = concatenate(self.space, self.shown, create_empty_array(self.space, self.n, fn=np.zeros))
        return self.out


def pick(actions, i):
    """Action i of a batch, whatever it is made of."""
    if isinstance(actions, dict):
        return {key: pick(value, i) for key, value in actions.items()}
    if isinstance(actions, tuple):
        return tuple(pick(value, i) for value in actions)
    return actions[i]


class Together(EnvBase):
    """An environment for collectors only: it is stepped through its engine."""

    def __init__(self, worlds, autoreset, **arguments):
        self.engine = LoopEngine(worlds, autoreset, **arguments)
        n, observation, action = self.engine.n, self.engine.observation_spec, self.engine.action.spec
        super().__init__(observation.expand(n, *observation.shape), action.expand(n, *action.shape), batch_size=(n,))

    def vector_engine(self):
        return self.engine

    def _reset(self, mask):
        raise AssertionError("a collector steps the engine")

    def _step(self, td):
        raise AssertionError("a collector steps the engine")

    def _set_seed(self, seed):
        self.engine.seed(seed)
