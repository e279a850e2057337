"""Engines: environments stepped with raw values instead of tensors, one (`GymEngine`) or many (`VectorEngine`).

`GymVectorEngine` steps gymnasium's vector environments, whatever their autoreset mode.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram import _forms as forms
from engram._checks import attribute
from engram._native import ended_envs
from engram.envs.action_checks import ActionCheck
from engram.envs.codecs import (
    ArrayCodec,
    SpaceCodec,
    SpaceLeaf,
    TextCodec,
    action_codec_for,
    array_of,
    codec_for,
    flag_of,
    flag_row,
    number_array,
    reward_of,
    reward_vector,
    space_leaves,
)
from engram.pytree import Key, KeyPath, key_path
from engram.specs import Composite, Spec, Unbounded
from engram.specs.spaces import LeafSpace, leaf_spaces, observation_path
from engram.transforms.base import IDLE

Array = np.ndarray[Any, Any]
_TRUE = b"\x01"


class Autoreset(Enum):
    """When an environment starts the next episode after one has ended, in the terms of gymnasium."""

    DISABLED = "when the caller resets it, before the next step"
    SAME_STEP = "in the step that ends the episode, which also returns the last observation"
    NEXT_STEP = "in the next call, whose action is ignored"


class VectorStep(NamedTuple):
    """The result of `VectorEngine.step`; its arrays may be overwritten by the next call.

    `observation` holds the present observations, batched as by gymnasium (arrays `[n, ...]`, Dicts or Tuples of them).
    `reward` `[n]`, `terminated` and `truncated` bool `[n]`. `last` (SAME_STEP): for each environment whose episode
    ended, its index and the raw last observation of that episode. `idle`: bool `[n]`, the environments that this call
    only reset; None if there are none. With NEXT_STEP these are those whose episode the call before ended; with
    SAME_STEP, of an engine that can reset some, those that had to be made anew and have lost their episode.
    """

    observation: Any
    reward: Array
    terminated: Array
    truncated: Array
    last: Sequence[tuple[int, Any]] = ()
    idle: Array | None = None


class BareSteps(NamedTuple):
    """A vector environment whose `step` returns, as gymnasium has it, all that a `VectorStep` would say.

    It starts an environment's next episode in the call after the one that ended the last (NEXT_STEP). `over`, bool
    `[n]`, says whose episode the last call ended; whoever calls `step` keeps it up to date.
    """

    env: Any
    over: Array


class VectorEngine(ABC):
    """`n` environments with the same spaces, stepped together with raw values.

    A subclass sets the attributes and implements `seed`, `reset` and `step`. `action` and `leaves` are
    those of one environment; `leaf.pick` also works on batched observations.
    """

    n: int
    action: SpaceCodec
    leaves: list[SpaceLeaf]
    autoreset: Autoreset
    can_reset_some: bool
    reward_shape: tuple[int, ...] = ()  #: the shape of one environment's reward; () for gymnasium's single number

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seeds environment i with `seed + i` at the next reset of all."""

    def seed_alike(self, seed: int) -> None:
        """Seeds every environment with `seed` at the next reset of all. Raises ValueError if that is impossible."""
        raise ValueError(
            f"static_seed=True gives {self.n} environments one seed, and those of a {type(self).__name__} cannot be "
            "seeded one by one: use SerialEnv or ParallelEnv of single environments"
        )

    @abstractmethod
    def reset(self, mask: Array | None = None) -> Any:
        """The batched observations after a reset of all, or of those where `mask` (bool `[n]`) holds.

        The other rows have no meaning. Raises ValueError for a mask if `can_reset_some` is False.
        """

    @abstractmethod
    def step(self, actions: Any) -> VectorStep:
        """One step of each environment. `actions` are batched as by gymnasium: see `SpaceCodec.decode_batch`."""

    def bare_steps(self) -> BareSteps | None:
        """The environment below, where `step` only calls that; None: it does more."""
        return None

    def close(self) -> None:
        """Releases the resources of the environments."""


class HasEngines(ABC):
    """An environment that may consist of gymnasium environments alone."""

    @abstractmethod
    def engines(self) -> list[GymEngine] | None:
        """The engines that step these with raw values, for collectors; None if steps do more than that."""


InfoKeys = Sequence[Key] | Mapping[Key, Spec]


class ArraySpace(NamedTuple):
    """What an `ArrayCodec` needs to know of a space: the form of its values."""

    dtype: Any
    shape: tuple[int, ...]


class InfoReader:
    """Reads entries of `info` as arrays in the order of `leaves`; a missing entry is zeros.

    A tuple is a path through nested dicts. Raises ValueError for a value that does not fit its spec.

    >>> reader = InfoReader({"lives": Unbounded((), dtype=torch.int64)})
    >>> reader.read({"lives": 3}), reader.read({})
    ((array(3),), (array(0),))
    """

    def __init__(self, specs: Mapping[Key, Spec]) -> None:
        self._columns = [(key_path(key), *_raw_dtype_and_shape(key, spec)) for key, spec in specs.items()]
        self.leaves = [
            SpaceLeaf(key, (1, index), ArrayCodec(spec, ArraySpace(*self._columns[index][1:])))
            for index, (key, spec) in enumerate(specs.items())
        ]

    def read(self, info: Mapping[str, Any]) -> tuple[Array, ...]:
        """One array per leaf, from the `info` of one environment."""
        return tuple(_as_array(_entry_of(info, path), dtype, shape, path) for path, dtype, shape in self._columns)

    def read_batch(self, infos: Mapping[str, Any], n: int) -> tuple[Array, ...]:
        """One array `[n, ...]` per leaf, from the `infos` of a vector environment."""
        return tuple(self._batched(infos, n, *column) for column in self._columns)

    def _batched(
        self, infos: Mapping[str, Any], n: int, path: tuple[str, ...], dtype: Any, shape: tuple[int, ...]
    ) -> Array:
        values = _entry_of(infos, path)
        has = _entry_of(infos, (*path[:-1], f"_{path[-1]}"))
        if values is None:
            return np.zeros((n, *shape), dtype)
        if isinstance(values, np.ndarray) and values.dtype.hasobject:  # gymnasium batches such values so
            return np.stack([_as_array(value, dtype, shape, path) for value in values])
        column = _as_array(values, dtype, (n, *shape), path)
        if has is not None:
            column[~np.asarray(has)] = 0
        return column

    def stepping(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The `step` of one environment, with pairs (observation, info entries) as observations."""

        def step_with_info(action: Any) -> Any:
            observation, reward, terminated, truncated, info = step(action)
            return (observation, self.read(info)), reward, terminated, truncated, info

        return step_with_info


def make_info_reader(
    keys: InfoKeys | None, probe: Callable[[], Sequence[Mapping[str, Any]]], batch_dims: int
) -> InfoReader | None:
    """The reader of `keys`; for keys without specs, `probe` is called for infos to derive the specs from.

    Raises KeyError for a key that these infos lack, TypeError for a value that is not an array of numbers.
    """
    if not keys:
        return None
    if isinstance(keys, Mapping):
        return InfoReader(keys)
    if isinstance(keys, str):
        raise TypeError(f"info_keys must be a list of keys or a mapping from keys to specs, got {keys!r}: [{keys!r}]?")
    infos = probe()
    return InfoReader({key: _spec_of_probe(key, infos, batch_dims) for key in keys})


def _spec_of_probe(key: Key, infos: Sequence[Mapping[str, Any]], batch_dims: int) -> Spec:
    values = [value for info in infos if (value := _entry_of(info, key_path(key))) is not None]
    if not values:
        seen = sorted({str(name) for info in infos for name in info})
        raise KeyError(
            f"info has no {key!r} after a reset and a step, it has {seen}; if it is added later, give its spec: "
            f"info_keys={{{key!r}: Unbounded(shape, dtype=...)}}"
        )
    array = np.asarray(values[0])
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"info[{key!r}] is {values[0]!r}, which has no tensor form; leave it out, or give a spec of numbers: "
            f"info_keys={{{key!r}: Unbounded(shape, dtype=...)}}"
        )
    return Unbounded(array.shape[batch_dims:], dtype=torch.from_numpy(np.zeros(0, array.dtype)).dtype)


def _raw_dtype_and_shape(key: Key, spec: Spec) -> tuple[Any, tuple[int, ...]]:
    if spec.dtype is None:
        raise TypeError(f"info_keys[{key!r}] must be the spec of one tensor, got {spec}; name its entries by tuples")
    return torch.zeros(0, dtype=spec.dtype, device="cpu").numpy().dtype, tuple(spec.shape)


def _entry_of(info: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        info = info.get(step, None) if isinstance(info, Mapping) else None
    return info


def _as_array(value: Any, dtype: Any, shape: tuple[int, ...], path: tuple[str, ...]) -> Array:
    if value is None:
        return np.zeros(shape, dtype)
    what = f"info{list(path)} is {value!r:.80}, a value"
    array = number_array(value, what, shape, dtype)
    if array.size == math.prod(shape):
        array = array.reshape(shape)  # a number for a spec of shape [1], or the reverse
    return np.array(array_of(array, dtype, shape, what))


RESERVED = (IDLE, "_reset", "action", "collector", "done", "next", "reward", "terminated", "truncated")
RawStep = Callable[[Any], tuple[Any, Any, bool, bool, Any]]


class GymEngine:
    """A gymnasium environment stepped with raw values; without frame skip, `step` is the environment's bound method.

    The entries of a Dict are separate observations; any other observation is called `observation_key`. With `info_keys`
    a raw observation is a pair: the environment's observation, and the entries of `info`.
    """

    def __init__(
        self,
        env: Any,
        *,
        categorical: bool,
        frame_skip: int | None,
        observation_key: str,
        info_keys: InfoKeys | None = None,
    ) -> None:
        self.env = env
        #: The shape of a reward; () for a single number.
        self.reward_shape = reward_shape_of(env)
        self.step: RawStep = env.step if frame_skip is None else repeat_action(env.step, frame_skip, self.reward_shape)
        self.action: SpaceCodec = action_codec_for(env.action_space, categorical=categorical)
        self._action_check = action_check(self.action)
        self._info = make_info_reader(info_keys, self._probe_infos, batch_dims=0)
        if self._info is not None:
            self.step = self._info.stepping(self.step)
        self.leaves = observation_leaves(env.observation_space, observation_key, self._info, categorical=categorical)
        self.spaces = entry_spaces(env.observation_space, observation_key, env.action_space)
        self.observation_spec = composite_spec(self.leaves)
        self._seed: int | None = None

    def _probe_infos(self) -> list[Any]:
        """The `info` of a step and of a reset."""
        _, first = self.env.reset()
        return [self.step(self.env.action_space.sample())[4], first]

    def has_spaces_of(self, other: GymEngine) -> bool:
        """Whether both engines have the same spaces, so that their raw values are interchangeable."""
        mine, theirs = self.env, other.env
        same = mine.action_space == theirs.action_space and mine.observation_space == theirs.observation_space
        return bool(same and self.observation_spec == other.observation_spec)

    def seed(self, seed: int) -> None:
        """Seeds the environment at the next reset."""
        self._seed = seed

    def random_state(self) -> dict[str, Any]:
        """The state of the environment's random generator, None if it has none, and the seed for the next reset."""
        generator = attribute(self.env, "unwrapped.np_random")
        return {"seed": self._seed, "generator": None if generator is None else generator.bit_generator.state}

    def set_random_state(self, state: dict[str, Any]) -> None:
        """Sets the generator to a `random_state`. Raises ValueError for the state of another kind of generator."""
        validate_random_state(state, self.random_state())
        if state["generator"] is not None:
            generator = self.env.unwrapped.np_random.bit_generator
            generator.state = _tried(generator, state["generator"])
        self._seed = state["seed"]

    def reset(self) -> Any:
        """The first raw observation of a new episode."""
        seed, self._seed = self._seed, None
        observation, info = self.env.reset() if seed is None else self.env.reset(seed=seed)
        return observation if self._info is None else (observation, self._info.read(info))

    def raw_action(self, action: Tensor | TensorDictBase) -> Any:
        """A tensor as an action for `step`. Raises ValueError if it does not fit the spec."""
        codec = self.action
        if isinstance(codec, ArrayCodec) and (array := self._action_check.array_of(action)) is not None:
            return codec.unstacked(codec.raw_of(array[None]))[0]
        self._action_check.require(action)
        return codec.decode_one(action)

    def observation(self, raw: Any) -> dict[Any, Tensor]:
        """A raw observation as tensors in new memory, by key. Raises ValueError if it is not in the space."""
        return {leaf.key: leaf.codec.encode(leaf.value(raw)[None])[0].clone() for leaf in self.leaves}


_GENERATOR = forms.nullable(forms.record({"bit_generator": forms.plain}))
_SEED = forms.nullable(forms.integer(0, 1 << 128))


def _seeds(value: Any) -> None:
    """The form of a seed, or of one for each environment."""
    form = forms.list_of(_SEED) if isinstance(value, list | tuple) else _SEED
    form(value)


_RANDOM_STATE = forms.record({"seed": _seeds, "generator": _GENERATOR})


def validate_random_state(state: Any, present: dict[str, Any]) -> None:
    """Raises ValueError unless `state` is a random state of the same kind of generator as `present`."""
    forms.check(_RANDOM_STATE, state, "a random state")
    given, allowed = (s["generator"] and s["generator"]["bit_generator"] for s in (state, present))
    if given != allowed:
        raise ValueError(
            f"the state is of the generator {given}, and the environment's is {allowed}; use the same kind"
        )


def _tried(generator: Any, state: Any) -> Any:
    """A state of a NumPy bit generator, which another one of its kind has taken. ValueError: it does not take it."""
    try:
        type(generator)().state = state
    except (TypeError, ValueError, KeyError, IndexError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{forms.shown(state)} is no state of a {type(generator).__name__}: {error!r}") from None
    return state


def action_check(codec: SpaceCodec, batch_size: Sequence[int] = ()) -> ActionCheck:
    """The check of actions `[*batch_size, *spec.shape]` of environments with this action space."""
    spec = codec.spec
    return ActionCheck(spec.leaves() if isinstance(spec, Composite) else {None: spec}, batch_size)


def _reserved(key: str) -> str:
    """The error for a key of observations that steps have for something else, with the wrapper that renames it."""
    return (
        f"the observation space has a key {key!r}, which is reserved: steps have an entry of their own there. Give the "
        f"environment (each single one of a vector) with another name for it, such as 'observed_{key.lstrip('_')}':\n"
        f"    new = lambda old: {{'observed_{key.lstrip('_')}' if k == {key!r} else k: v for k, v in old.items()}}\n"
        "    space = gymnasium.spaces.Dict(new(env.observation_space))\n"
        "    env = gymnasium.wrappers.TransformObservation(env, new, space)"
    )


def composite_spec(leaves: list[SpaceLeaf]) -> Composite:
    """The specs of one environment's observations. Raises ValueError for reserved keys."""
    spec = Composite()
    for leaf in leaves:
        root = leaf.key if isinstance(leaf.key, str) else leaf.key[0]
        if root in RESERVED:
            raise ValueError(_reserved(root))
        if leaf.key in spec or root in spec.leaves():
            raise ValueError(f"{leaf.key!r} is an observation already; info_keys must name other entries")
        spec[leaf.key] = leaf.codec.spec
    return spec


def entry_spaces(observation: Any, key: str, action: Any) -> dict[KeyPath, LeafSpace]:
    """The gymnasium spaces of one environment's observations and actions, by their keys in a TensorDict."""
    return {**leaf_spaces(observation, observation_path(observation, key)), **leaf_spaces(action, ("action",))}


def observation_leaves(
    space: Any, observation_key: str, info: InfoReader | None, *, categorical: bool
) -> list[SpaceLeaf]:
    """The leaves of an observation space, followed by those of the `info` entries. Raises TypeError for none at all."""
    key = observation_path(space, observation_key)
    codec = codec_for(space, categorical=categorical)
    leaves = space_leaves(codec, key) if info is None else [*space_leaves(codec, key, (0,)), *info.leaves]
    if not leaves:
        raise TypeError(
            f"the observation space is {space}, which has no entries; give the environment an observation by a wrapper "
            "(gymnasium.wrappers.TransformObservation), or info_keys=[...]"
        )
    return leaves


def reward_shape_of(env: Any) -> tuple[int, ...]:
    """The shape of an environment's `reward_space`; without one, () for single numbers.

    Environments with several objectives (mo-gymnasium) have such a space; below a `LinearReward` their rewards are
    single numbers.
    """
    layer = env
    while layer is not None:
        if any(cls.__name__ == "LinearReward" for cls in type(layer).__mro__):
            return ()
        layer = attribute(layer, "env")
    try:
        space = env.get_wrapper_attr("reward_space")
    except AttributeError:
        return ()
    shape = tuple(attribute(space, "shape") or ())
    return () if shape == (1,) else shape


def repeat_action(step: RawStep, times: int, reward_shape: tuple[int, ...] = ()) -> RawStep:
    """A `step` that repeats each action `times` times, adds up the rewards, and stops when the episode ends."""

    def step_times(action: Any) -> tuple[Any, Any, bool, bool, Any]:
        total: Any = 0.0
        for _ in range(times):
            observation, reward, terminated, truncated, info = step(action)
            total = total + (reward_vector(reward, reward_shape) if reward_shape else reward_of(reward))
            if flag_of(terminated, "terminated") or flag_of(truncated, "truncated"):
                break
        return observation, total, terminated, truncated, info

    return step_times


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
        self.reward_shape = self._reward_shape()
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
        self.action: SpaceCodec = action_codec_for(env.single_action_space, categorical=categorical)
        self._seed: int | list[int] | None = None
        self._over = np.zeros(self.n, np.bool_)  # whose episode the last call ended (NEXT_STEP)
        self._info = make_info_reader(info_keys, self._probed, batch_dims=1)
        space = env.single_observation_space
        self.leaves: list[SpaceLeaf] = observation_leaves(space, observation_key, self._info, categorical=categorical)
        texts = [leaf.key for leaf in self.leaves if isinstance(leaf.codec, TextCodec)]
        if texts and self._is_async and env.unwrapped.shared_memory:
            raise ValueError(
                f"gymnasium's AsyncVectorEnv with shared_memory=True reads texts ({texts[0]!r}) only once, when it is "
                "made; use shared_memory=False with autoreset_mode=SAME_STEP, or ParallelEnv"
            )
        self.spaces = entry_spaces(space, observation_key, env.single_action_space)

    def _reward_shape(self) -> tuple[int, ...]:
        env = self.env.unwrapped
        shape = tuple(attribute(env, "reward_space.shape") or ())
        single = next((shape for shape in map(reward_shape_of, attribute(env, "envs") or ()) if shape), ())
        if single and not shape:
            raise ValueError(
                f"the environments give rewards of shape {single}, and {type(env).__name__} has a place for one number "
                "each; use SerialEnv or ParallelEnv of single environments"
            )
        return () if shape == (1,) else shape

    def _probed(self) -> list[Any]:
        """The `infos` of a step and of a reset."""
        _, first = self.env.reset()
        after = self.env.step(self.env.action_space.sample())[4]
        return [after, after.get("final_info", {}), first]

    def _shown(self, observation: Any, infos: Mapping[str, Any]) -> Any:
        return observation if self._info is None else (observation, self._info.read_batch(infos, self.n))

    def seed(self, seed: int) -> None:
        self._seed = seed

    def seed_alike(self, seed: int) -> None:
        if not (self._is_sync or self._is_async):
            super().seed_alike(seed)  # raises: they may share one generator
        self._seed = [seed] * self.n

    def random_state(self) -> dict[str, Any] | None:
        """The state of the random generators; None if it cannot be read.

        It cannot if the environments run in other processes, or do not use the generator that gymnasium offers
        (EnvPool), which then does not exist.
        """
        env = self.env.unwrapped
        has_generator = self._is_sync or attribute(env, "_np_random") is not None
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
        each = [generator.bit_generator for generator in self._generators()]
        forms.check(forms.record({"each": forms.list_of(forms.anything, len(each))}), state["generator"], "generator")
        states = [_tried(generator, one) for generator, one in zip(each, state["generator"]["each"], strict=True)]
        for generator, one in zip(each, states, strict=True):
            generator.state = one
        self._seed = state["seed"]

    def reset(self, mask: Array | None = None) -> Any:
        if mask is None:
            seed, self._seed = self._seed, None
            self._receive_last_step()
            observation, infos = self.env.reset() if seed is None else self.env.reset(seed=seed)
            self._over[:] = False
            return self._shown(observation, infos)
        if not self.can_reset_some:
            raise ValueError(
                f"environments {np.flatnonzero(mask).tolist()} of {self.env} cannot be reset alone: it has no option "
                "'reset_mask'. Let episodes end by themselves (max_episode_steps=..., no max_frames_per_traj), or use "
                "vectorization_mode='sync'"
            )
        observation, infos = self.env.reset(options={"reset_mask": mask.copy()})
        self._over &= ~mask
        return self._shown(observation, infos)

    def _receive_last_step(self) -> None:
        """Receives the results that AsyncVectorEnv still waits for after an interrupt: it refuses resets before."""
        if not self._is_async:
            return
        env = self.env.unwrapped
        waits_for = attribute(env, "_state.value")
        if waits_for in ("step", "reset"):
            (env.step_wait if waits_for == "step" else env.reset_wait)()

    def step(self, actions: Any) -> VectorStep:
        observation, reward, terminated, truncated, infos = self.env.step(actions)
        if self._info is not None:
            observation = self._shown(observation, infos)
        if self.autoreset is Autoreset.DISABLED:
            return VectorStep(observation, reward, terminated, truncated)
        idle = self._over.copy() if _TRUE in self._over.tobytes() else None
        try:
            ended = ended_envs(self.n, terminated, truncated, idle)
        except TypeError:  # no arrays of flags
            terminated, truncated = self._flags(terminated, truncated)
            ended = ended_envs(self.n, terminated, truncated, idle)
        if self.autoreset is Autoreset.NEXT_STEP:
            self._over[:] = False if ended is None else ended
        elif ended is not None:
            terminated, truncated = self._flags(terminated, truncated)
            return VectorStep(observation, reward, terminated, truncated, self._last(infos, ended))
        return VectorStep(observation, reward, terminated, truncated, (), idle)

    def bare_steps(self) -> BareSteps | None:
        is_bare = type(self) is GymVectorEngine and self._info is None and self.autoreset is Autoreset.NEXT_STEP
        return BareSteps(self.env, self._over) if is_bare else None

    def _flags(self, terminated: Any, truncated: Any) -> tuple[Array, Array]:
        return flag_row(terminated, self.n, "terminated"), flag_row(truncated, self.n, "truncated")

    def _last(self, infos: Mapping[str, Any], ended: Array) -> Sequence[tuple[int, Any]]:
        final = infos.get("final_obs", infos.get("final_observation", None))
        if final is None:
            raise ValueError(
                "the environment resets in the step that ends an episode, without infos['final_obs'], so that the "
                "last observation is lost; use another autoreset mode"
            )
        if self._info is None and type(final) is np.ndarray:
            envs = np.flatnonzero(ended)
            return list(zip(envs.tolist(), final[envs], strict=True))
        batched = final if self._info is None else (final, self._info.read_batch(infos.get("final_info", {}), self.n))
        return [(env, _row(batched, env)) for env in np.flatnonzero(ended).tolist()]

    def close(self) -> None:
        self.env.close()


def autoreset_of(env: Any) -> Autoreset:
    """The autoreset mode of a vector environment. Raises ValueError if it has none that is known."""
    mode = (env.metadata or {}).get("autoreset_mode", None) or attribute(env, "unwrapped.autoreset_mode")
    name = str(mode.value if isinstance(mode, Enum) else mode).upper().replace("_", "")
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
