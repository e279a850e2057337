"""`check_env_specs`: compares what an environment returns with its specs."""

from __future__ import annotations

from typing import Any

import torch

from engram.envs.base import EnvBase
from engram.specs import Composite, Spec


def check_env_specs(env: EnvBase, *, seed: int | None = None, max_steps: int = 5) -> None:
    """Runs `env` for some random steps and compares every value with its spec, nested ones leaf by leaf.

    It also checks that TensorDicts have the environment's `batch_size` and device, that flags agree, and that
    environments which are not reset continue from their last step. Raises ValueError with the key, the value and what
    its spec allows. The environment is left in the middle of an episode.

    >>> from engram.envs import GymEnv
    >>> check_env_specs(GymEnv("CartPole-v1", num_envs=2), seed=0)
    """
    if seed is not None:
        env.set_seed(seed)
    state = {**_leaves((), env.observation_spec), **_leaves((), env.full_done_spec)}
    after = {**state, **_leaves(("reward",), env.reward_spec)}
    td = env.reset()
    _check("reset", env, td, state)
    for _ in range(max_steps):
        td, following = env.step_and_maybe_reset(env.rand_action(td))
        _check("step", env, td, {**state, **_leaves(("action",), env.action_spec)})
        _check("step, under 'next'", env, td.get("next"), after)
        _check_flags(td.get("next"))
        _check("step and reset", env, following, state)
        _check_others_continue(td.get("next"), following, state)
        td = following


def _leaves(path: tuple[str, ...], spec: Any) -> dict[Any, Spec]:
    if not isinstance(spec, Composite):
        return {path if len(path) > 1 else path[0]: spec}
    return {key: leaf for name, part in spec.items() for key, leaf in _leaves((*path, name), part).items()}


def _check(where: str, env: EnvBase, td: Any, specs: dict[Any, Spec]) -> None:
    if td.batch_size != env.batch_size or td.device != env.device:
        raise ValueError(
            f"{where}: a TensorDict of batch_size={tuple(td.batch_size)}, device={td.device}; the environment has "
            f"batch_size={tuple(env.batch_size)}, device={env.device}"
        )
    for key, spec in specs.items():
        value = td.get(key, None)
        if not spec.is_in(value):
            is_tensor = isinstance(value, torch.Tensor)
            text = f"{value.dtype} {tuple(value.shape)}: {value}" if is_tensor else repr(value)
            raise ValueError(f"{where}: {key!r} is not what its spec says.\n  found:   {text}\n  allowed: {spec}")


def _check_others_continue(after: Any, following: Any, specs: dict[Any, Spec]) -> None:
    continues = ~after["done"].squeeze(-1)
    for key in specs:
        before, now = after.get(key)[continues], following.get(key)[continues]
        if not bool(((before == now) | ((before != before) & (now != now))).all()):  # NaN stays NaN
            raise ValueError(f"a reset changed {key!r} where no episode was over.\n  before: {before}\n  after:  {now}")


def _check_flags(td: Any) -> None:
    if not torch.equal(td["done"], td["terminated"] | td["truncated"]):
        raise ValueError(
            f"done must be terminated | truncated, got done={td['done'].tolist()}, "
            f"terminated={td['terminated'].tolist()}, truncated={td['truncated'].tolist()}"
        )
