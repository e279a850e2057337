"""Several environments that are stepped together, with raw values."""

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

from engram.envs.codecs import (
    Codec,
    Key,
    Leaf,
    LeafCodec,
    array_of,
    codec_for,
    flag_of,
    leaves_of,
    plain_array,
    reward_of,
)
from engram.specs import Bounded, Composite, Spec, Unbounded
from engram.transforms.base import IDLE

Array = np.ndarray[Any, Any]


class Autoreset(Enum):
    """When an environment whose episode has ended starts the next one, as gymnasium's vector environments name it."""

    DISABLED = "the caller resets it before the next step"
    SAME_STEP = "in the step that ends it; its last observation comes beside"
    NEXT_STEP = "in the call after, whose action it ignores"


class BatchStep(NamedTuple):
    """What one call of `BatchEngine.step` gives; arrays may be overwritten by the next call.

    `observation` is what the environments show now, batched as gymnasium batches (arrays `[n, ...]`, Dicts of them,
    Tuples of them). `reward` `[n]`, `terminated` and `truncated` bool `[n]`. `last` (SAME_STEP): for each environment
    whose episode ended, its number and the raw last observation of the old episode. `idle` (NEXT_STEP): bool `[n]`,
    where this was a reset and no step; None: nowhere.
    """

    observation: Any
    reward: Array
    terminated: Array
    truncated: Array
    last: Sequence[tuple[int, Any]] = ()
    idle: Array | None = None


class BatchEngine(ABC):
    """`n` environments with the same spaces, stepped together.

    `action` and `leaves` are those of one environment. `leaf.pick` works on batched observations as on single ones.
    """

    n: int
    action: Codec
    leaves: list[Leaf]
    autoreset: Autoreset
    can_reset_some: bool

    @abstractmethod
    def seed(self, seed: int) -> None:
        """The next reset of all starts environment i from `seed + i`."""

    @abstractmethod
    def reset(self, mask: Array | None = None) -> Any:
        """The batched observations after a reset of all, or of those where `mask` (bool `[n]`) holds.

        What stands in the other rows is not to be read.
        Raises ValueError for a mask where `can_reset_some` is False.
        """

    @abstractmethod
    def step(self, actions: Any) -> BatchStep:
        """One step of each. `actions` are batched as gymnasium batches: see `Codec.decode_batch`."""

    def close(self) -> None:
        """Releases what the environments hold."""


InfoKeys = Sequence[Key] | Mapping[Key, Spec]


class _Like(NamedTuple):
    dtype: Any
    shape: tuple[int, ...]


class InfoReader:
    """Reads some entries of `info`: arrays in the order of `leaves`, zeros where an entry is missing.

    A key that is a tuple leads through nested dicts. Raises ValueError for a value that does not fit its spec.

    >>> reader = InfoReader({"lives": Unbounded((), dtype=torch.int64)})
    >>> reader.read({"lives": 3}), reader.read({})
    ((array(3),), (array(0),))
    """

    def __init__(self, specs: Mapping[Key, Spec]) -> None:
        self._columns = [(_path(key), *_raw(key, spec)) for key, spec in specs.items()]
        self.leaves = [
            Leaf(key, (1, index), LeafCodec(spec, _Like(*self._columns[index][1:])))
            for index, (key, spec) in enumerate(specs.items())
        ]

    def read(self, info: Mapping[str, Any]) -> tuple[Array, ...]:
        """One array per leaf, from the `info` of one environment."""
        return tuple(_fitted(_found(info, path), dtype, shape, path) for path, dtype, shape in self._columns)

    def read_batch(self, infos: Mapping[str, Any], n: int) -> tuple[Array, ...]:
        """One array `[n, ...]` per leaf, from the `infos` of a vector environment."""
        return tuple(self._batched(infos, n, *column) for column in self._columns)

    def _batched(
        self, infos: Mapping[str, Any], n: int, path: tuple[str, ...], dtype: Any, shape: tuple[int, ...]
    ) -> Array:
        values = _found(infos, path)
        has = _found(infos, (*path[:-1], f"_{path[-1]}"))
        if values is None:
            return np.zeros((n, *shape), dtype)
        if getattr(values, "dtype", np.dtype(float)).hasobject:  # gymnasium has no array for such values
            return np.stack([_fitted(value, dtype, shape, path) for value in values])
        column = _fitted(values, dtype, (n, *shape), path)
        if has is not None:
            column[~np.asarray(has)] = 0
        return column

    def stepping(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`step` of one environment with pairs (observation, entries) for observations."""

        def step_with_info(action: Any) -> Any:
            observation, reward, terminated, truncated, info = step(action)
            return (observation, self.read(info)), reward, terminated, truncated, info

        return step_with_info


def reader_of(
    keys: InfoKeys | None, probe: Callable[[], Sequence[Mapping[str, Any]]], batch_dims: int
) -> InfoReader | None:
    """The reader of `keys`; without specs they are taken from what `probe` gives, which is not called otherwise.

    Raises KeyError for a key that was not there, TypeError for a value that is no array of numbers.
    """
    if not keys:
        return None
    if isinstance(keys, Mapping):
        return InfoReader(keys)
    if isinstance(keys, str):
        raise TypeError(f"info_keys must be a list of keys or a mapping from keys to specs, got {keys!r}: [{keys!r}]?")
    infos = probe()
    return InfoReader({key: _spec_seen(key, infos, batch_dims) for key in keys})


def _spec_seen(key: Key, infos: Sequence[Mapping[str, Any]], batch_dims: int) -> Spec:
    values = [value for info in infos if (value := _found(info, _path(key))) is not None]
    if not values:
        seen = sorted({str(name) for info in infos for name in info})
        raise KeyError(
            f"info has no {key!r} after a reset and a step, it has {seen}; if it comes later, give its spec: "
            f"info_keys={{{key!r}: Unbounded(shape, dtype=...)}}"
        )
    array = np.asarray(values[0])
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"info[{key!r}] is {values[0]!r}, which has no tensor form; leave it out, or give a spec of numbers: "
            f"info_keys={{{key!r}: Unbounded(shape, dtype=...)}}"
        )
    return Unbounded(array.shape[batch_dims:], dtype=torch.from_numpy(np.zeros(0, array.dtype)).dtype)


def _path(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _raw(key: Key, spec: Spec) -> tuple[Any, tuple[int, ...]]:
    if spec.dtype is None:
        raise TypeError(f"info_keys[{key!r}] must be the spec of one tensor, got {spec}; name its entries by tuples")
    return torch.zeros(0, dtype=spec.dtype).numpy().dtype, tuple(spec.shape)


def _found(info: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        info = info.get(step, None) if isinstance(info, Mapping) else None
    return info


def _fitted(value: Any, dtype: Any, shape: tuple[int, ...], path: tuple[str, ...]) -> Array:
    if value is None:
        return np.zeros(shape, dtype)
    what = f"info{list(path)} is {value!r:.80}, a value"
    array = plain_array(value, what, shape, dtype)
    if array.size == math.prod(shape):
        array = array.reshape(shape)  # a number where the spec says [1], or the reverse
    return np.array(array_of(array, dtype, shape, what))


RESERVED = (IDLE, "_reset", "action", "collector", "done", "next", "reward", "terminated", "truncated")
RawStep = Callable[[Any], tuple[Any, Any, bool, bool, Any]]


class GymEngine:
    """A gymnasium environment stepped with raw values; without frame skip, `step` is its own bound method.

    A Dict's entries are observations of their own; any other observation is called `observation_key`. With `info_keys`
    a raw observation is a pair: the environment's own, and the entries of `info`.
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
        self.step: RawStep = env.step if frame_skip is None else repeated(env.step, frame_skip)
        self.action: Codec = codec_for(env.action_space, categorical=categorical)
        self._info = reader_of(info_keys, self._probed, batch_dims=0)
        if self._info is not None:
            self.step = self._info.stepping(self.step)
        self.leaves = leaves_for(env.observation_space, observation_key, self._info, categorical=categorical)
        self.observation_spec = composite_of(self.leaves)
        self._seed: int | None = None

    def _probed(self) -> list[Any]:
        """What `info` has in a reset and in a step."""
        _, first = self.env.reset()
        return [self.step(self.env.action_space.sample())[4], first]

    def has_spaces_of(self, other: GymEngine) -> bool:
        """Whether raw values of both mean the same."""
        mine, theirs = self.env, other.env
        same = mine.action_space == theirs.action_space and mine.observation_space == theirs.observation_space
        return bool(same and self.observation_spec == other.observation_spec)

    def seed(self, seed: int) -> None:
        """The next reset starts from `seed`."""
        self._seed = seed

    def random_state(self) -> dict[str, Any]:
        """Where the environment's random numbers stand; the generator is None if it has none."""
        generator = getattr(self.env.unwrapped, "np_random", None)
        return {"seed": self._seed, "generator": None if generator is None else generator.bit_generator.state}

    def set_random_state(self, state: dict[str, Any]) -> None:
        """The next reset goes on where `random_state` stood. Raises ValueError for the state of another generator."""
        refuse_other_generator(state, self.random_state())
        self._seed = state["seed"]
        if state["generator"] is not None:
            self.env.unwrapped.np_random.bit_generator.state = state["generator"]

    def reset(self) -> Any:
        """The first raw observation of a new episode."""
        seed, self._seed = self._seed, None
        observation, info = self.env.reset() if seed is None else self.env.reset(seed=seed)
        return observation if self._info is None else (observation, self._info.read(info))

    def raw_action(self, action: Tensor | TensorDictBase) -> Any:
        """One action for `step`. Raises ValueError where it is not what the spec says."""
        check_action(self.action, action)
        return self.action.decode_one(action)

    def observation(self, raw: Any) -> dict[Any, Tensor]:
        """A raw observation as tensors of their own memory, by key. Raises ValueError where it is not of the space."""
        return {leaf.key: leaf.codec.encode(leaf.value(raw)[None])[0].clone() for leaf in self.leaves}


def refuse_other_generator(state: Any, present: dict[str, Any]) -> None:
    """Raises ValueError where `state` is no random state of a generator like that of `present`."""
    if not isinstance(state, dict) or state.keys() != present.keys():
        raise ValueError(f"a random state is a dict with {sorted(present)}, got {state!r}")
    found, allowed = (s["generator"] and s["generator"]["bit_generator"] for s in (state, present))
    if found != allowed:
        raise ValueError(
            f"the state is of the generator {found}, and the environment's is {allowed}; use the same kind"
        )


def check_action(codec: Codec, action: Any, batch_size: Sequence[int] = ()) -> None:
    """Raises ValueError for an action `[*batch_size, *spec.shape]` that gymnasium could misread.

    The shape must be right; one-hot vectors and categories must lie in their domain. The dtype may differ, and floats
    outside the bounds of a Box are the environment's own affair.
    """
    for key, spec in _leaf_specs(codec).items():
        value = action if key is None else action.get(key, None) if isinstance(action, TensorDictBase) else action
        fits = isinstance(value, Tensor) and value.shape == (*batch_size, *spec.shape)
        if not fits or (not isinstance(spec, (Bounded, Unbounded)) and not _is_choice(spec, value)):
            where = "" if key is None else f" {key!r}"
            raise ValueError(
                f"action{where} is not what the environment takes.\n"
                f"  found:   {_described(value)}\n"
                f"  allowed: {spec}, after the batch dimensions {tuple(batch_size)}\n"
                "  A network's scores need an argmax: one_hot(scores.argmax(-1), n), or scores.argmax(-1) with "
                "GymEnv(..., categorical_action_encoding=True)."
            )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}: {value}"
    return f"a {type(value).__name__} instead of a tensor: {value!r:.200}"


def _is_choice(spec: Any, value: Tensor) -> bool:
    cast = value.to(spec.dtype)
    return bool(spec.is_in(cast)) and torch.equal(cast.to(value.dtype), value)


def _leaf_specs(codec: Codec) -> dict[Any, Any]:
    return dict(codec.spec.leaves()) if isinstance(codec.spec, Composite) else {None: codec.spec}


def composite_of(leaves: list[Leaf]) -> Composite:
    """The specs of one environment's observations. Raises ValueError for keys that engram uses itself."""
    spec = Composite()
    for leaf in leaves:
        root = leaf.key if isinstance(leaf.key, str) else leaf.key[0]
        if root in RESERVED:
            raise ValueError(
                f"the observation space has a key {root!r}, which engram uses itself; rename it by a wrapper"
            )
        if leaf.key in spec or root in spec.leaves():
            raise ValueError(f"{leaf.key!r} is an observation already; info_keys must name other entries")
        spec[leaf.key] = leaf.codec.spec
    return spec


def leaves_for(space: Any, observation_key: str, info: InfoReader | None, *, categorical: bool) -> list[Leaf]:
    """The leaves of an observation space and of the `info` entries beside it."""
    key = () if isinstance(getattr(space, "spaces", None), dict) else (observation_key,)
    codec = codec_for(space, categorical=categorical)
    return leaves_of(codec, key) if info is None else [*leaves_of(codec, key, (0,)), *info.leaves]


def repeated(step: RawStep, times: int) -> RawStep:
    """`step` that takes each action `times` times, adds the rewards up, and stops where the episode ends."""

    def step_times(action: Any) -> tuple[Any, Any, bool, bool, Any]:
        total = 0.0
        for _ in range(times):
            observation, reward, terminated, truncated, info = step(action)
            total += reward_of(reward)
            if flag_of(terminated, "terminated") or flag_of(truncated, "truncated"):
                break
        return observation, total, terminated, truncated, info

    return step_times
