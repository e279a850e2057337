"""Does an environment do what its specs say?"""

from __future__ import annotations

from typing import Any

import torch

from engram.data.specs import Spec
from engram.envs.base import EnvBase


def check_env_specs(env: EnvBase, *, seed: int | None = None, max_steps: int = 5) -> None:
    """Runs `env` for some random steps and compares every value with its spec.

    Raises ValueError that names the key, what came and what its spec allows; the environment is left in mid-episode.

    >>> from engram.envs import GymEnv
    >>> check_env_specs(GymEnv("CartPole-v1"), seed=0)
    """
    if seed is not None:
        env.set_seed(seed)
    td = env.reset()
    _check("reset", td, {**env.observation_spec.leaves(), **env.full_done_spec.leaves()})
    for _ in range(max_steps):
        td, following = env.step_and_maybe_reset(env.rand_action(td))
        _check("step", td, {"action": env.action_spec})
        after = {**env.observation_spec.leaves(), **env.full_done_spec.leaves(), "reward": env.reward_spec}
        _check("step, under 'next'", td.get("next"), after)
        _check_flags(td.get("next"))
        td = following


def _check(where: str, td: Any, specs: dict[Any, Spec]) -> None:
    for key, spec in specs.items():
        value = td.get(key, None)
        if not spec.is_in(value):
            is_tensor = isinstance(value, torch.Tensor)
            found = f"{value.dtype} {tuple(value.shape)}: {value}" if is_tensor else repr(value)
            raise ValueError(f"{where}: {key!r} is not what its spec says.\n  found:   {found}\n  allowed: {spec}")


def _check_flags(td: Any) -> None:
    if not torch.equal(td["done"], td["terminated"] | td["truncated"]):
        raise ValueError(
            f"done must be terminated | truncated, got done={td['done'].tolist()}, "
            f"terminated={td['terminated'].tolist()}, truncated={td['truncated'].tolist()}"
        )
