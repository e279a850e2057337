"""Gymnasium environments as engram environments. The only file that imports gymnasium, and late."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.envs.base import EnvBase
from engram.envs.gym_engine import GymEngine


class GymEnv(EnvBase):
    """A gymnasium environment, by name or as it is.

    Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple spaces work. A Dict's entries are observations under their
    own keys; anything else is `observation`. Discrete and MultiDiscrete values are one-hot int64, or categories with
    `categorical_action_encoding=True`. `frame_skip` repeats each action and adds the rewards up. `from_pixels=True`
    gives uint8 `pixels` `[H, W, 3]` instead of the observation (`pixels_only=False`: next to it). `kwargs` go to
    `gymnasium.make`. Gymnasium's own autoreset is not used: a reset is never stored as a step.

    Raises NotImplementedError for vectorised gymnasium environments, TypeError for spaces without a fixed shape.

    >>> env = GymEnv("CartPole-v1")
    >>> env.set_seed(0)
    1
    >>> env.rollout(3)["action"].shape
    torch.Size([3, 2])
    """

    def __init__(
        self,
        name_or_env: Any,
        *,
        device: torch.device | str | None = None,
        num_envs: int = 0,
        from_pixels: bool = False,
        pixels_only: bool = True,
        frame_skip: int | None = None,
        categorical_action_encoding: bool = False,
        **kwargs: Any,
    ) -> None:
        if num_envs:
            raise NotImplementedError(
                f"num_envs={num_envs}: vectorised gymnasium environments come in a later release; "
                f"use SerialEnv({num_envs}, lambda: GymEnv(...))"
            )
        if frame_skip is not None and frame_skip < 1:
            raise ValueError(f"frame_skip must be 1 or more, got {frame_skip}")
        env = _make(name_or_env, kwargs, from_pixels)
        self._engine = GymEngine(
            _with_pixels(env, pixels_only) if from_pixels else env,
            categorical=categorical_action_encoding,
            frame_skip=frame_skip,
            observation_key="pixels" if from_pixels else "observation",
        )
        super().__init__(self._engine.observation_spec, self._engine.action.spec)
        if device is not None:
            self.to(device)

    @property
    def gym_env(self) -> Any:
        """The gymnasium environment, wrappers included."""
        return self._engine.env

    def engines(self) -> list[GymEngine] | None:
        """What steps this environment raw, for collectors; None where a child class may have changed a step."""
        return [self._engine] if type(self) is GymEnv else None

    def _reset(self, mask: Tensor | None) -> TensorDictBase:
        return TensorDict(self._engine.observation(self._engine.reset()), device=self.device)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        raw = self._engine.raw_action(td.get("action"))
        observation, reward, terminated, truncated, _ = self._engine.step(raw)
        values = self._engine.observation(observation)
        values["reward"] = torch.as_tensor(reward, dtype=torch.float32).reshape(1)
        values["terminated"] = torch.tensor([bool(terminated)])
        values["truncated"] = torch.tensor([bool(truncated)])
        return TensorDict(values, device=self.device)

    def _set_seed(self, seed: int) -> None:
        self._engine.seed(seed)

    def random_state(self) -> Any:
        return self._engine.random_state()

    def set_random_state(self, state: Any) -> None:
        self._engine.set_random_state(state)

    def _close(self) -> None:
        self._engine.env.close()

    def __repr__(self) -> str:
        return f"GymEnv({self._engine.env}, device={self.device})"


def _make(name_or_env: Any, kwargs: dict[str, Any], from_pixels: bool) -> Any:
    import gymnasium

    if isinstance(name_or_env, gymnasium.vector.VectorEnv):
        raise NotImplementedError(
            "vectorised gymnasium environments come in a later release; use SerialEnv(n, lambda: GymEnv(...))"
        )
    if isinstance(name_or_env, str):
        return gymnasium.make(name_or_env, **{**({"render_mode": "rgb_array"} if from_pixels else {}), **kwargs})
    if not isinstance(name_or_env, gymnasium.Env):
        raise TypeError(f"GymEnv takes a name or a gymnasium.Env, got {type(name_or_env).__name__}")
    if kwargs:
        raise TypeError(f"{sorted(kwargs)} are for gymnasium.make, and the environment exists already; pass its name")
    return name_or_env


def _with_pixels(env: Any, pixels_only: bool) -> Any:
    import gymnasium

    if env.render_mode != "rgb_array":
        raise ValueError(
            f"from_pixels=True needs an environment with render_mode='rgb_array', got {env.render_mode!r}; "
            "pass its name, or make it with that mode"
        )
    env.reset()  # some environments cannot render before; gymnasium's wrapper reads the shape of a frame
    return gymnasium.wrappers.AddRenderObservation(
        env, render_only=pixels_only, render_key="pixels", obs_key="observation"
    )
