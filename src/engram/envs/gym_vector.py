"""Gymnasium's vector environments as batch engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engram.envs.batched import Array, Autoreset, BatchEngine, BatchStep
from engram.envs.gym_codecs import Codec, Leaf, codec_for
from engram.envs.gym_engine import leaves_for, refuse_other_generator
from engram.envs.gym_info import InfoKeys, reader_of
from engram.envs.gym_values import BOOL, flag_row


class VectorEngine(BatchEngine):
    """A `gymnasium.vector.VectorEnv`: sync, async, or one that is written for many environments.

    `can_reset_some` holds for gymnasium's own two and wherever autoreset is disabled, as that asks for the option
    `reset_mask`. Raises ValueError for an environment that does not say what its autoreset mode is, or resets twice.
    """

    def __init__(
        self,
        env: Any,
        *,
        categorical: bool,
        observation_key: str = "observation",
        info_keys: InfoKeys | None = None,
    ) -> None:
        self.env = env
        self.n = int(env.num_envs)
        self.autoreset = autoreset_of(env)
        kinds = {cls.__name__ for cls in type(env.unwrapped).__mro__}
        if self.autoreset is Autoreset.NEXT_STEP and "AsyncVectorEnv" in kinds and not env.unwrapped.shared_memory:
            raise ValueError(
                "gymnasium's AsyncVectorEnv with shared_memory=False and autoreset_mode=NEXT_STEP resets a second time "
                "after env.reset(), whatever the seed; use shared_memory=True, or another autoreset mode"
            )
        self._is_elsewhere, self._is_in_series = "AsyncVectorEnv" in kinds, "SyncVectorEnv" in kinds
        has_mask = not kinds.isdisjoint(("SyncVectorEnv", "AsyncVectorEnv"))
        self.can_reset_some = has_mask or self.autoreset is Autoreset.DISABLED
        self.action: Codec = codec_for(env.single_action_space, categorical=categorical)
        self._seed: int | None = None
        self._over = np.zeros(self.n, dtype=np.bool_)
        self._info = reader_of(info_keys, self._probed, batch_dims=1)
        space = env.single_observation_space
        self.leaves: list[Leaf] = leaves_for(space, observation_key, self._info, categorical=categorical)

    def _probed(self) -> list[Any]:
        """What `infos` has in a reset and in a step."""
        _, first = self.env.reset()
        after = self.env.step(self.env.action_space.sample())[4]
        return [after, after.get("final_info", {}), first]

    def _shown(self, observation: Any, infos: Mapping[str, Any]) -> Any:
        return observation if self._info is None else (observation, self._info.read_batch(infos, self.n))

    def seed(self, seed: int) -> None:
        self._seed = seed

    def random_state(self) -> dict[str, Any] | None:
        """Where the environments' random numbers stand; None where that cannot be known.

        That is where they come from other processes, or from something else than the generator that gymnasium offers
        (EnvPool), which nobody has asked for a number then.
        """
        env = self.env.unwrapped
        is_known = self._is_in_series or getattr(env, "_np_random", None) is not None
        return self._random_state_now() if is_known and not self._is_elsewhere else None

    def _random_state_now(self) -> dict[str, Any]:
        states = [generator.bit_generator.state for generator in self._generators()]
        return {
            "seed": self._seed,
            "generator": {"bit_generator": [s["bit_generator"] for s in states], "each": states},
        }

    def _generators(self) -> tuple[Any, ...]:
        found = () if self._is_elsewhere else self.env.unwrapped.np_random
        return found if isinstance(found, tuple) else (found,)

    def set_random_state(self, state: dict[str, Any]) -> None:
        """The next reset of all goes on where `random_state` stood. Raises ValueError for other generators."""
        refuse_other_generator(state, self._random_state_now())
        self._seed = state["seed"]
        for generator, one in zip(self._generators(), state["generator"]["each"], strict=True):
            generator.bit_generator.state = one

    def reset(self, mask: Array | None = None) -> Any:
        if mask is None:
            seed, self._seed = self._seed, None
            self._hear_the_last_step()
            observation, infos = self.env.reset() if seed is None else self.env.reset(seed=seed)
            self._over = np.zeros(self.n, dtype=np.bool_)
            return self._shown(observation, infos)
        if not self.can_reset_some:
            raise ValueError(
                f"environments {np.flatnonzero(mask).tolist()} of {self.env} cannot be reset alone: it has no option "
                "'reset_mask'. Let episodes end by themselves (max_episode_steps=..., no max_frames_per_traj), or use "
                "vectorization_mode='sync'"
            )
        observation, infos = self.env.reset(options={"reset_mask": mask.copy()})
        self._over = self._over & ~mask
        return self._shown(observation, infos)

    def _hear_the_last_step(self) -> None:
        """AsyncVectorEnv refuses everything while it waits for workers, and an interrupt leaves it so."""
        waits_for = getattr(getattr(self.env.unwrapped, "_state", None), "value", None) if self._is_elsewhere else None
        if waits_for in ("step", "reset"):
            getattr(self.env.unwrapped, f"{waits_for}_wait")()

    def step(self, actions: Any) -> BatchStep:
        observation, reward, terminated, truncated, infos = self.env.step(actions)
        observation = self._shown(observation, infos)
        if self.autoreset is Autoreset.DISABLED:
            return BatchStep(observation, reward, terminated, truncated)
        ended = self._ended(terminated, truncated)
        if self.autoreset is Autoreset.SAME_STEP:
            if 1 not in ended.tobytes():  # a tenth of the cost of `any`
                return BatchStep(observation, reward, terminated, truncated)
            terminated, truncated = self._flags(terminated, truncated)
            return BatchStep(observation, reward, terminated, truncated, self._last(infos, ended))
        idle, has_idle = self._over, 1 in self._over.tobytes()
        self._over = np.greater(ended, idle) if has_idle else ended
        return BatchStep(observation, reward, terminated, truncated, (), idle if has_idle else None)

    def _ended(self, terminated: Any, truncated: Any) -> Array:
        """Where an episode is over, bool `[n]`. Raises ValueError where that shows that they are no flags."""
        try:
            ended: Array = np.logical_or(terminated, truncated)
            if ended.dtype is BOOL and ended.shape == self._over.shape:
                return ended
        except (TypeError, ValueError):
            pass  # text, or two shapes: told of below
        terminated, truncated = self._flags(terminated, truncated)
        return np.asarray(terminated | truncated)

    def _flags(self, terminated: Any, truncated: Any) -> tuple[Array, Array]:
        return flag_row(terminated, self.n, "terminated"), flag_row(truncated, self.n, "truncated")

    def _last(self, infos: Mapping[str, Any], ended: Array) -> Sequence[tuple[int, Any]]:
        found = infos.get("final_obs", infos.get("final_observation", None))
        if found is None:
            raise ValueError(
                "the environment resets in the step that ends an episode and gives no infos['final_obs'], so that its "
                "last observation is lost; use another autoreset mode"
            )
        batched = found if self._info is None else (found, self._info.read_batch(infos.get("final_info", {}), self.n))
        return [(env, _row(batched, env)) for env in np.flatnonzero(ended).tolist()]

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


def _row(batched: Any, env: int) -> Any:
    """What belongs to one environment of a batched value."""
    if isinstance(batched, Mapping):
        return {key: _row(value, env) for key, value in batched.items()}
    return tuple(_row(value, env) for value in batched) if isinstance(batched, tuple) else batched[env]
