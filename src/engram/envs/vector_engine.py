"""`VectorEnv`: a `VectorEngine` with the TensorDict interface; `GymVectorEngine`: gymnasium's vector environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.envs.base import EnvBase
from engram.envs.codecs import BOOL, SpaceCodec, SpaceLeaf, codec_for, flag_row, narrow_rewards, reward_row
from engram.envs.engines import (
    Array,
    Autoreset,
    InfoKeys,
    VectorEngine,
    VectorStep,
    check_action,
    composite_spec,
    make_info_reader,
    observation_leaves,
    validate_random_state,
)
from engram.specs import Categorical
from engram.transforms.base import IDLE


class VectorStepper:
    """Steps a VectorEngine with tensors, and tracks which environments need a reset.

    An environment is *over* after the last step of an episode, and *fresh* when the engine has started the next episode
    and `reset` has not yet returned its first observation.
    """

    def __init__(self, engine: VectorEngine) -> None:
        self.engine = engine
        self.marks_idle = engine.autoreset is Autoreset.NEXT_STEP and not engine.can_reset_some
        spec = composite_spec(engine.leaves)
        self.observation_spec = spec.expand(engine.n)
        if self.marks_idle:
            self.observation_spec[IDLE] = Categorical(2, (engine.n, 1), dtype=torch.bool)
        self.action_spec = engine.action.spec.expand(engine.n, *engine.action.spec.shape)
        self._shown: dict[Any, Tensor] = {}
        self._clear_marks()

    def _clear_marks(self) -> None:
        self._over = np.zeros(self.engine.n, dtype=np.bool_)
        self._fresh = np.zeros(self.engine.n, dtype=np.bool_)

    def seed(self, seed: int) -> None:
        """Seeds environment i with `seed + i` at the next reset of all."""
        self._fresh[:] = False  # episodes that began without the seed are not used
        self.engine.seed(seed)

    def reset(self, mask: Tensor | None) -> dict[Any, Tensor]:
        """Observations after a reset of all, or where `mask` (bool `[n, 1]`) holds; the other rows are not read.

        Raises ValueError if an environment is in the middle of an episode and cannot be reset without the others.
        """
        rows = np.ones(self.engine.n, dtype=np.bool_) if mask is None else mask.cpu().numpy().reshape(-1)
        needed = rows & ~self._fresh
        is_running = needed & ~self._over
        if mask is None or (rows.all() and is_running.any() and not self.engine.can_reset_some):
            needed = is_running = rows
        postponed = needed if self.marks_idle and not is_running.any() else np.zeros_like(needed)
        if needed.any() and not postponed.any():
            self._reset_now(needed)
        self._fresh[rows] = False
        self._over[rows & ~postponed] = False
        values = {key: column.clone() for key, column in self._shown.items()}
        return {**values, IDLE: _column(postponed)} if self.marks_idle else values

    def _reset_now(self, rows: Array) -> None:
        shown = self._encoded(self.engine.reset(None if rows.all() else rows))
        if not rows.all():
            where = torch.from_numpy(rows)
            for key, column in shown.items():
                column[~where] = self._shown[key][~where]
        self._shown = shown

    def step(self, td: TensorDictBase) -> dict[Any, Tensor]:
        """The observations, reward and flags after `td["action"]`. Marks rows in `td` that only reset.

        Raises ValueError for an action that does not fit its spec, RuntimeError if an environment must be reset first.
        """
        self._check_all_reset()
        action = td.get("action")
        check_action(self.engine.action, action, (self.engine.n,))
        raw = self.engine.action.decode_batch(action)
        observation, reward, terminated, truncated, last, idle = self.engine.step(raw)
        n = self.engine.n
        idle = np.zeros(n, dtype=np.bool_) if idle is None else idle.copy()
        reward, terminated = reward_row(reward, n), flag_row(terminated, n, "terminated")
        truncated = flag_row(truncated, n, "truncated")
        rewards = narrow_rewards(np.where(idle, 0, reward)[None])
        if rewards.error is not None:
            raise rewards.error
        values = self._encoded(observation)
        ended = np.logical_or(terminated, truncated)
        changes = bool((ended | idle).any())  # the caller may write into the tensors that it gets
        self._shown = {key: column.clone() if changes else column for key, column in values.items()}
        for env, raw_last in last:
            for leaf in self.engine.leaves:
                values[leaf.key][env] = leaf.codec.encode(leaf.value(raw_last)[None])[0]
        self._fresh = ended & ~idle if self.engine.autoreset is Autoreset.SAME_STEP else idle
        self._over = ended & ~idle & ~self._fresh
        if self.marks_idle:
            td.set(IDLE, _column(idle))
            values[IDLE] = torch.zeros(self.engine.n, 1, dtype=torch.bool)
        values["reward"] = _column(rewards.values[0])
        values["terminated"] = _column(terminated & ~idle)
        values["truncated"] = _column(
            truncated | idle
        )  # a reset follows, which policies and transforms see by this flag
        return values

    def _check_all_reset(self) -> None:
        unreset = self._fresh if self.marks_idle else self._fresh | self._over
        if unreset.any():
            raise RuntimeError(
                f"the episodes of environments {np.flatnonzero(unreset).tolist()} are over; reset them before the next "
                "step: env.maybe_reset(step_mdp(td)), or env.step_and_maybe_reset(td)"
            )

    def _encoded(self, raw: Any) -> dict[Any, Tensor]:
        """Batched raw observations as tensors in new memory, by key. Raises ValueError if they are not of the space."""
        return {leaf.key: leaf.codec.encode(leaf.rows(raw, self.engine.n)).clone() for leaf in self.engine.leaves}


class VectorEnv(EnvBase):
    """A VectorEngine with the TensorDict interface: batch `[n]`.

    A reset is never a step, and the last observation of an episode stays under `next`, in every autoreset mode of the
    engine. An engine that needs a call of `step` to reset environments (NEXT_STEP without `can_reset_some`) cannot hide
    that call. Its environment has one more entry, `"_idle"` (bool `[n, 1]`): where it holds at the root, the step only
    resets. `reset` sets it for environments that could not be reset yet. Such a row is no step: its action is ignored,
    its reward is 0, and its `("next", "truncated")` is set so that a reset follows, which returns the first
    observation. `rollout` and the collectors leave these rows out; your own loops must, too.

    Raises RuntimeError for a step of an environment whose episode is over and that was not reset.

    >>> import gymnasium
    >>> from engram.envs.vector_engine import GymVectorEngine
    >>> engine = GymVectorEngine(gymnasium.make_vec("CartPole-v1", num_envs=3), categorical=False)
    >>> VectorEnv(engine).rollout(2)["action"].shape
    torch.Size([3, 2, 2])
    """

    def __init__(self, engine: VectorEngine, *, device: torch.device | str | None = None) -> None:
        self._stepper = VectorStepper(engine)
        super().__init__(self._stepper.observation_spec, self._stepper.action_spec, batch_size=(engine.n,))
        if device is not None:
            self.to(device)

    def vector_engine(self) -> VectorEngine | None:
        """The engine that steps with raw values, for collectors; None if a subclass has changed steps."""
        cls = type(self)
        is_changed = (cls._step, cls._reset, cls.step, cls.reset) != _UNCHANGED_METHODS
        return None if is_changed else self._stepper.engine

    def _reset(self, mask: Tensor | None) -> TensorDictBase:
        return TensorDict(self._stepper.reset(mask), batch_size=self.batch_size, device=self.device)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        return TensorDict(self._stepper.step(td), batch_size=self.batch_size, device=self.device)

    def _set_seed(self, seed: int) -> None:
        self._stepper.seed(seed)

    def _close(self) -> None:
        self._stepper.engine.close()


_UNCHANGED_METHODS = (VectorEnv._step, VectorEnv._reset, VectorEnv.step, VectorEnv.reset)


def _column(values: Array) -> Tensor:
    return torch.tensor(values).reshape(-1, 1)


class GymVectorEngine(VectorEngine):
    """Steps a `gymnasium.vector.VectorEnv`: sync, async, or a vectorised implementation.

    `can_reset_some` is True for gymnasium's SyncVectorEnv and AsyncVectorEnv, and wherever autoreset is disabled, as
    that mode requires the option `reset_mask`. Raises ValueError for an environment without a known autoreset mode, or
    one that resets twice.
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
        self._is_async, self._is_sync = "AsyncVectorEnv" in kinds, "SyncVectorEnv" in kinds
        has_mask = not kinds.isdisjoint(("SyncVectorEnv", "AsyncVectorEnv"))
        self.can_reset_some = has_mask or self.autoreset is Autoreset.DISABLED
        self.action: SpaceCodec = codec_for(env.single_action_space, categorical=categorical)
        self._seed: int | None = None
        self._over = np.zeros(self.n, dtype=np.bool_)
        self._info = make_info_reader(info_keys, self._probed, batch_dims=1)
        space = env.single_observation_space
        self.leaves: list[SpaceLeaf] = observation_leaves(space, observation_key, self._info, categorical=categorical)

    def _probed(self) -> list[Any]:
        """The `infos` of a step and of a reset."""
        _, first = self.env.reset()
        after = self.env.step(self.env.action_space.sample())[4]
        return [after, after.get("final_info", {}), first]

    def _shown(self, observation: Any, infos: Mapping[str, Any]) -> Any:
        return observation if self._info is None else (observation, self._info.read_batch(infos, self.n))

    def seed(self, seed: int) -> None:
        self._seed = seed

    def random_state(self) -> dict[str, Any] | None:
        """The state of the random generators; None if it cannot be read.

        It cannot if the environments run in other processes, or do not use the generator that gymnasium offers
        (EnvPool), which then does not exist.
        """
        env = self.env.unwrapped
        has_generator = self._is_sync or getattr(env, "_np_random", None) is not None
        return self._random_state_now() if has_generator and not self._is_async else None

    def _random_state_now(self) -> dict[str, Any]:
        states = [generator.bit_generator.state for generator in self._generators()]
        return {
            "seed": self._seed,
            "generator": {"bit_generator": [s["bit_generator"] for s in states], "each": states},
        }

    def _generators(self) -> tuple[Any, ...]:
        generators = () if self._is_async else self.env.unwrapped.np_random
        return generators if isinstance(generators, tuple) else (generators,)

    def set_random_state(self, state: dict[str, Any]) -> None:
        """Sets the generators to a `random_state`, for the next reset of all. ValueError: they are of another kind."""
        validate_random_state(state, self._random_state_now())
        self._seed = state["seed"]
        for generator, one in zip(self._generators(), state["generator"]["each"], strict=True):
            generator.bit_generator.state = one

    def reset(self, mask: Array | None = None) -> Any:
        if mask is None:
            seed, self._seed = self._seed, None
            self._receive_last_step()
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

    def _receive_last_step(self) -> None:
        """Receives the results that AsyncVectorEnv still waits for after an interrupt: it refuses resets before."""
        waits_for = getattr(getattr(self.env.unwrapped, "_state", None), "value", None) if self._is_async else None
        if waits_for in ("step", "reset"):
            getattr(self.env.unwrapped, f"{waits_for}_wait")()

    def step(self, actions: Any) -> VectorStep:
        observation, reward, terminated, truncated, infos = self.env.step(actions)
        observation = self._shown(observation, infos)
        if self.autoreset is Autoreset.DISABLED:
            return VectorStep(observation, reward, terminated, truncated)
        ended = self._ended(terminated, truncated)
        if self.autoreset is Autoreset.SAME_STEP:
            if 1 not in ended.tobytes():  # a tenth of the cost of `any`
                return VectorStep(observation, reward, terminated, truncated)
            terminated, truncated = self._flags(terminated, truncated)
            return VectorStep(observation, reward, terminated, truncated, self._last(infos, ended))
        idle, has_idle = self._over, 1 in self._over.tobytes()
        self._over = np.greater(ended, idle) if has_idle else ended
        return VectorStep(observation, reward, terminated, truncated, (), idle if has_idle else None)

    def _ended(self, terminated: Any, truncated: Any) -> Array:
        """Whether an episode is over, bool `[n]`. Raises ValueError for values that are no flags."""
        try:
            ended: Array = np.logical_or(terminated, truncated)
            if ended.dtype is BOOL and ended.shape == self._over.shape:
                return ended
        except (TypeError, ValueError):
            pass  # text, or two shapes: an error below
        terminated, truncated = self._flags(terminated, truncated)
        return np.asarray(terminated | truncated)

    def _flags(self, terminated: Any, truncated: Any) -> tuple[Array, Array]:
        return flag_row(terminated, self.n, "terminated"), flag_row(truncated, self.n, "truncated")

    def _last(self, infos: Mapping[str, Any], ended: Array) -> Sequence[tuple[int, Any]]:
        final = infos.get("final_obs", infos.get("final_observation", None))
        if final is None:
            raise ValueError(
                "the environment resets in the step that ends an episode, without infos['final_obs'], so that the "
                "last observation is lost; use another autoreset mode"
            )
        batched = final if self._info is None else (final, self._info.read_batch(infos.get("final_info", {}), self.n))
        return [(env, _row(batched, env)) for env in np.flatnonzero(ended).tolist()]

    def close(self) -> None:
        self.env.close()


def autoreset_of(env: Any) -> Autoreset:
    """The autoreset mode of a vector environment. Raises ValueError if it has none that is known."""
    mode = (env.metadata or {}).get("autoreset_mode", None) or getattr(env.unwrapped, "autoreset_mode", None)
    name = str(getattr(mode, "value", mode)).upper().replace("_", "")
    for autoreset in Autoreset:
        if name == autoreset.name.replace("_", ""):
            return autoreset
    raise ValueError(
        f"{env} has autoreset_mode={mode!r}; its metadata['autoreset_mode'] must be one of "
        "gymnasium.vector.AutoresetMode, so that resets are not taken for steps"
    )


def _row(batched: Any, env: int) -> Any:
    """The row of one environment in a batched value."""
    if isinstance(batched, Mapping):
        return {key: _row(value, env) for key, value in batched.items()}
    return tuple(_row(value, env) for value in batched) if isinstance(batched, tuple) else batched[env]
