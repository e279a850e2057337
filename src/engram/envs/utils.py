"""`engram.envs.utils`: helpers under the names of `torchrl.envs.utils`."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from engram._advice import advise_on_names
from engram.envs.base import step_mdp
from engram.envs.from_torchrl import as_env
from engram.envs.policies import ExplorationType, RandomPolicy, exploration_type, set_exploration_type


def check_env_specs(
    env: Any,
    return_contiguous: bool | None = None,
    check_dtype: bool = True,
    seed: int | None = None,
    tensordict: TensorDictBase | None = None,
    break_when_any_done: Any = None,
    *,
    max_steps: int = 5,
) -> None:
    """Runs `env` for some random steps and compares every value with its spec, nested ones leaf by leaf.

    It also checks that TensorDicts have the environment's `batch_size` and device, that flags agree, and that
    environments which are not reset continue from their last step. The first reset gets `tensordict`. Raises ValueError
    with the key, the value and what its spec allows, TypeError for objects that are not environments of engram or
    TorchRL. The environment is left in the middle of an episode. `return_contiguous`, `check_dtype` and
    `break_when_any_done` have no effect: dtypes are always checked, and environments that are done are reset.

    >>> from engram.envs import GymEnv
    >>> check_env_specs(GymEnv("CartPole-v1", num_envs=2), seed=0)
    """
    as_env(env, "check_env_specs").check_env_specs(seed=seed, tensordict=tensordict, max_steps=max_steps)


__all__ = [
    "ExplorationType",
    "RandomPolicy",
    "check_env_specs",
    "exploration_type",
    "set_exploration_type",
    "step_mdp",
]

advise_on_names(__name__)
