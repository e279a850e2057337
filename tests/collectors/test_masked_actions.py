"""Random actions of collectors leave out what the mask of the action spec forbids."""

from __future__ import annotations

import torch

from contracts.each import each
from engram.collectors import SyncDataCollector
from engram.envs import GymEnv, SerialEnv

ONLY_FIRST = torch.tensor([True, False])


@each("categorical", [False, True])
@each(
    "make",
    [
        lambda **encoding: GymEnv("CartPole-v1", **encoding),
        lambda **encoding: SerialEnv(2, lambda: GymEnv("CartPole-v1", **encoding)),
        lambda **encoding: GymEnv("CartPole-v1", num_envs=2, vectorization_mode="sync", **encoding),
    ],
)
@each("later", [False, True])
def test_masked_actions_are_not_drawn(make, categorical, later):
    env = make(categorical_action_encoding=categorical)
    if not later:
        env.action_spec.update_mask(ONLY_FIRST)
    collector = SyncDataCollector(env, None, frames_per_batch=40, total_frames=80)
    batches = iter(collector)
    first = next(batches)["action"]
    env.action_spec.update_mask(ONLY_FIRST)
    second = next(batches)["action"]
    choices = [action if categorical else action.argmax(-1) for action in (first, second)]
    assert choices[0].unique().tolist() == ([0, 1] if later else [0]) and choices[1].unique().tolist() == [0]
    collector.shutdown()
