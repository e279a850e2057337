"""`to_torchrl`: wraps an environment of engram for TorchRL's transforms and collectors.

TorchRL is never imported here: its base class is looked up in `sys.modules`.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from tensordict import TensorDictBase

from engram.transforms.base import IDLE


def as_torchrl_env(env: Any) -> Any:
    """`env` behind a subclass of TorchRL's `EnvBase`, with TorchRL's specs; seeds and episodes are those of `env`.

    Raises:
        ImportError: torchrl is not imported.
        TypeError: the environment returns rows that are not steps (see `VectorEnv`), which TorchRL would use as steps.
    """
    if IDLE in env.observation_spec:
        raise TypeError(
            "environments of a vector entry point return rows that are no steps, and TorchRL has no mark for those; "
            'create them with vectorization_mode="sync"'
        )
    return _adapter_class()(env)


@functools.lru_cache(maxsize=1)
def _adapter_class() -> Any:
    theirs = sys.modules.get("torchrl.envs")
    if theirs is None:
        raise ImportError("to_torchrl makes a TorchRL environment: `import torchrl.envs` first (pip install torchrl)")
    base: Any = theirs.EnvBase

    class EngramEnv(base):  # type: ignore[misc]
        """Wraps an environment of engram in TorchRL's interface."""

        __qualname__ = "EngramEnv"  # for pickle: see `__getattr__` below

        def __init__(self, env: Any) -> None:
            super().__init__(device=env.device, batch_size=env.batch_size)
            self.engram_env = env
            self._newest: Any = None  # the latest state: TorchRL may request a partial reset without passing it
            self._batch_locked = env.batch_locked
            self.observation_spec = env.observation_spec.to_torchrl()
            self.full_action_spec = env.full_action_spec.to_torchrl()
            self.full_reward_spec = env.full_reward_spec.to_torchrl()
            self.full_done_spec = env.full_done_spec.to_torchrl()
            self.state_spec = env.state_spec.to_torchrl()

        def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
            td = tensordict
            if td is not None and td.get("_reset", None) is not None and self._newest is not None:
                td = self._newest.copy().update(td)
            fresh = self.engram_env.reset(td, **kwargs).exclude("_reset")
            self._newest = fresh.copy()
            return fresh

        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            following = self.engram_env.step(tensordict.exclude("next")).get("next")
            self._newest = following.exclude(*self.engram_env.reward_keys)
            return following

        def _set_seed(self, seed: int | None) -> None:
            if seed is not None:
                self.engram_env.set_seed(seed)

        def close(self, *, raise_if_closed: bool = True) -> None:
            super().close(raise_if_closed=raise_if_closed)
            self.engram_env.close()

    return EngramEnv


def __getattr__(name: str) -> Any:
    if name == "EngramEnv":
        return _adapter_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
