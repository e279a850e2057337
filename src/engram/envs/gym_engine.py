"""One gymnasium environment with its codecs: raw steps, for those who translate by the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.data.specs import Bounded, Composite, Unbounded
from engram.envs.gym_codecs import Codec, Leaf, codec_for, leaves_of
from engram.envs.gym_info import InfoKeys, InfoReader, reader_of
from engram.envs.gym_values import flag_of, reward_of
from engram.transforms.in_env import IDLE

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
