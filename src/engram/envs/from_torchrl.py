"""`as_env`: wraps environments of gymnasium and TorchRL for `TransformedEnv`, `SerialEnv` and `ParallelEnv`."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase

from engram.envs.base import EnvBase
from engram.envs.gym import in_gym_env
from engram.pytree import key_path
from engram.specs.torchrl import spec_from_torchrl
from engram.transforms.torchrl import primed_keys

Self = TypeVar("Self", bound="TorchRLEnv")


class TorchRLEnv(EnvBase):
    """Wraps a TorchRL environment, single or batched, in engram's interface.

    It steps `torchrl_env`, has its attributes, and has `truncated` wherever that has `done`.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(batch_size=env.batch_size, device=env.device)
        self.torchrl_env = env
        self.batch_locked = env.batch_locked
        self._read_specs()
        self.policy_entries = tuple(_primed_entries(env))

    def _read_specs(self) -> None:
        env = self.torchrl_env
        self.observation_spec = spec_from_torchrl(env.observation_spec)
        self.full_action_spec = spec_from_torchrl(env.full_action_spec)
        self.full_reward_spec = spec_from_torchrl(env.full_reward_spec)
        self.full_done_spec = spec_from_torchrl(env.full_done_spec)
        self.state_spec = spec_from_torchrl(env.state_spec)

    def _reads_state(self) -> bool:
        return not self.state_spec.is_empty()

    def _reset(self, mask: Any = None, **kwargs: Any) -> TensorDictBase:
        td: TensorDictBase | None = None if mask is None else mask.copy()  # TorchRL takes the caller's
        where = None if td is None else td.get("_reset", None)
        keys = list(self.torchrl_env.reset_keys)
        if td is not None and where is not None:
            td = td.exclude("_reset")
            for key in keys:  # agents with their own flags have their own reset masks beside these
                flag = (*key_path(key)[:-1], "done")
                shape = self.full_done_spec[flag].shape
                one = where.reshape(where.shape[: td.ndim] + (1,) * (len(shape) - td.ndim))
                td.set(key, one.expand(shape).clone())
        fresh: TensorDictBase = self.torchrl_env.reset(td, **kwargs)
        return fresh.exclude(*keys)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        following: TensorDictBase = self.torchrl_env.step(td.copy()).get("next")
        return following

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        following: int | None = self.torchrl_env.set_seed(seed, static_seed=static_seed)
        return following

    def _set_seed(self, seed: int) -> None:
        self.torchrl_env.set_seed(seed)

    def to(self: Self, device: torch.device | str) -> Self:  # type: ignore[override]
        super().to(device)
        self.torchrl_env = self.torchrl_env.to(device)
        self._read_specs()
        return self

    def _close(self) -> None:
        if not self.torchrl_env.is_closed:
            self.torchrl_env.close()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "torchrl_env":
                raise
            return getattr(self.torchrl_env, name)

    def __repr__(self) -> str:
        return repr(self.torchrl_env)


def as_env(env: Any, who: str) -> EnvBase:
    """`env`, wrapped if it is gymnasium's or TorchRL's. Raises TypeError, which names `who`, for other objects."""
    env = in_gym_env(env)
    if isinstance(env, EnvBase):
        return env
    theirs = sys.modules.get("torchrl.envs")
    if theirs is None or not isinstance(env, theirs.EnvBase):
        raise TypeError(f"{who} takes an environment of engram, gymnasium or TorchRL, got a {type(env).__name__}")
    return TorchRLEnv(env)


def _primed_entries(env: Any) -> list[Any]:
    """The entries that a TorchRL environment's primers add at resets, and that the policy changes."""
    if not isinstance(env, sys.modules["torchrl.envs"].TransformedEnv):
        return []
    return [*_primed_entries(env.base_env), *primed_keys(env.transform)]
