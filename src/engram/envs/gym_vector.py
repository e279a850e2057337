"""Gymnasium's vector environments as batch engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engram.envs.batched import Array, Autoreset, BatchEngine, BatchStep
from engram.envs.gym_codecs import Codec, Leaf, codec_for, leaves_of


class VectorEngine(BatchEngine):
    """A `gymnasium.vector.VectorEnv`: sync, async, or one that is written for many environments.

    `can_reset_some` holds for gymnasium's own two and wherever autoreset is disabled, as that asks for the option
    `reset_mask`. Raises ValueError for an environment that does not say what its autoreset mode is.
    """

    def __init__(self, env: Any, *, categorical: bool, observation_key: str = "observation") -> None:
        self.env = env
        self.n = int(env.num_envs)
        self.autoreset = autoreset_of(env)
        kinds = {cls.__name__ for cls in type(env.unwrapped).__mro__}
        # Gymnasium 1.4: workers without shared memory forget that they were reset, and reset again at the next step.
        self._resets_again = (
            self.autoreset is Autoreset.NEXT_STEP
            and "AsyncVectorEnv" in kinds
            and not getattr(env.unwrapped, "shared_memory", True)
        )
        has_mask = self.autoreset is Autoreset.DISABLED or not kinds.isdisjoint(("SyncVectorEnv", "AsyncVectorEnv"))
        self.can_reset_some = has_mask and not self._resets_again
        self.action: Codec = codec_for(env.single_action_space, categorical=categorical)
        observation = codec_for(env.single_observation_space, categorical=categorical)
        has_own_keys = isinstance(getattr(env.single_observation_space, "spaces", None), dict)
        self.leaves: list[Leaf] = leaves_of(observation, () if has_own_keys else (observation_key,))
        self._seed: int | None = None
        self._over = np.zeros(self.n, dtype=np.bool_)

    def seed(self, seed: int) -> None:
        self._seed = seed

    def reset(self, mask: Array | None = None) -> Any:
        if mask is None:
            seed, self._seed = self._seed, None
            observation, _ = self.env.reset() if seed is None else self.env.reset(seed=seed)
            self._over = self._over & self._resets_again
            return observation
        if not self.can_reset_some:
            raise ValueError(
                f"environments {np.flatnonzero(mask).tolist()} of {self.env} cannot be reset alone: it has no option "
                "'reset_mask'. Let episodes end by themselves (max_episode_steps=..., no max_frames_per_traj), or use "
                "vectorization_mode='sync'"
            )
        observation, _ = self.env.reset(options={"reset_mask": mask.copy()})
        self._over = self._over & ~mask
        return observation

    def step(self, actions: Any) -> BatchStep:
        observation, reward, terminated, truncated, infos = self.env.step(actions)
        if self.autoreset is Autoreset.DISABLED:
            return BatchStep(observation, reward, terminated, truncated)
        ended = np.logical_or(terminated, truncated)
        if self.autoreset is Autoreset.SAME_STEP:
            return BatchStep(observation, reward, terminated, truncated, _last(infos, ended) if ended.any() else ())
        idle, has_idle = self._over, np.count_nonzero(self._over)  # a fifth of the cost of `any`
        self._over = np.greater(ended, idle) if has_idle else ended
        return BatchStep(observation, reward, terminated, truncated, (), idle if has_idle else None)

    def close(self) -> None:
        self.env.close()


def autoreset_of(env: Any) -> Autoreset:
    """The autoreset mode that a vector environment states. Raises ValueError where it states none."""
    mode = (env.metadata or {}).get("autoreset_mode", None) or getattr(env.unwrapped, "autoreset_mode", None)
    name = str(getattr(mode, "value", mode)).upper().replace("_", "")
    for known in Autoreset:
        if name == known.name.replace("_", ""):
            return known
    raise ValueError(
        f"{env} says autoreset_mode={mode!r}; its metadata['autoreset_mode'] must be one of "
        "gymnasium.vector.AutoresetMode, so that resets are not taken for steps"
    )


def _last(infos: Mapping[str, Any], ended: Array) -> list[tuple[int, Any]]:
    found = infos.get("final_obs", infos.get("final_observation", None))
    if found is None:
        raise ValueError(
            "the environment resets in the step that ends an episode and gives no infos['final_obs'], so that its last "
            "observation is lost; use another autoreset mode"
        )
    return [(env, _row(found, env)) for env in np.flatnonzero(ended).tolist()]


def _row(batched: Any, env: int) -> Any:
    """What belongs to one environment of a batched value."""
    if isinstance(batched, Mapping):
        return {key: _row(value, env) for key, value in batched.items()}
    return tuple(_row(value, env) for value in batched) if isinstance(batched, tuple) else batched[env]
