"""Making gymnasium environments: the one file of the environments that imports gymnasium, when a `GymEnv` is made."""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from engram.envs.codecs import flag_of, reward_of
from engram.envs.engines import leaves_for, repeated
from engram.processes.timeouts import reject_timeout

try:
    import gymnasium
    from gymnasium.envs.registration import find_highest_version, get_env_id, parse_env_id
except ImportError as error:
    raise ImportError('GymEnv needs gymnasium: pip install "engram[gym]"') from error


NATIVE = "vector_entry_point"


class FrameSkip(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes each action `times` times, adds the rewards up, and stops where the episode ends."""

    def __init__(self, env: Any, times: int) -> None:
        super().__init__(env)
        self._repeated = repeated(env.step, times)

    def step(self, action: Any) -> Any:
        return self._repeated(action)


class CheckedSteps(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Compares what one of several environments gives with its spaces, before gymnasium puts all into one array.

    There None becomes nan, text is parsed, and numbers are broadcast. `copies_last`: the last observation of an episode
    is copied, as a reset in the same step may write into the same array.
    """

    def __init__(self, env: Any, *, observation_key: str, copies_last: bool) -> None:
        super().__init__(env)
        self._comparison = _Comparison(env, observation_key, copies_last)
        self.step = self._comparison.step  # type: ignore[method-assign]  # a wrapper looks every attribute up twice

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        self._comparison.compare(observation)
        return observation, info


class _Comparison:
    """The steps of `CheckedSteps`."""

    def __init__(self, env: Any, observation_key: str, copies_last: bool) -> None:
        self._step, self._copies_last = env.step, copies_last
        self._leaves = leaves_for(env.observation_space, observation_key, None, categorical=True)
        codec, is_single = self._leaves[0].codec, len(self._leaves) == 1 and not self._leaves[0].path
        self._dtype, self._shape = codec.raw_dtype if is_single else None, codec.raw_shape

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = given = self._step(action)
        is_plain = type(observation) is np.ndarray and observation.dtype is self._dtype
        if not is_plain or observation.shape != self._shape:
            self.compare(observation)
        if terminated is False and truncated is False and type(reward) is float:
            return given
        terminated, truncated = flag_of(terminated, "terminated"), flag_of(truncated, "truncated")
        if self._copies_last and (terminated or truncated):
            observation = copy.deepcopy(observation)
        return observation, reward if type(reward) is float else reward_of(reward), terminated, truncated, info

    def compare(self, observation: Any) -> None:
        """Raises ValueError where it is not of the space."""
        for leaf in self._leaves:
            leaf.value(observation)


def single(name_or_env: Any, kwargs: dict[str, Any], *, from_pixels: bool, pixels_only: bool) -> Any:
    """One environment, by name or as it is. Raises TypeError for what is neither."""
    if isinstance(name_or_env, str):
        with _told_of_timeout(kwargs):
            env = gymnasium.make(name_or_env, **_rendering(kwargs, from_pixels))
    elif isinstance(name_or_env, gymnasium.Env):
        _refuse_settings(kwargs)
        env = name_or_env
    else:
        raise TypeError(f"GymEnv takes a name, a gymnasium.Env or a VectorEnv, got {type(name_or_env).__name__}")
    return with_pixels(env, pixels_only) if from_pixels else env


def vector(
    name_or_env: Any,
    num_envs: int,
    kwargs: dict[str, Any],
    *,
    from_pixels: bool,
    pixels_only: bool,
    frame_skip: int | None,
) -> Any:
    """A vector environment, by name or as it is. Raises TypeError and ValueError for settings that it cannot have."""
    if is_vector(name_or_env):
        _refuse_settings(kwargs)
        if from_pixels or frame_skip is not None:
            raise ValueError(
                "from_pixels and frame_skip change each environment, and this vector environment exists already; "
                "give its name and num_envs, or make it with wrappers=[...]"
            )
        if num_envs not in (0, name_or_env.num_envs):
            raise ValueError(
                f"num_envs={num_envs}, and the vector environment has {name_or_env.num_envs}; leave it out"
            )
        return name_or_env
    if not isinstance(name_or_env, str):
        raise TypeError(
            f"num_envs={num_envs} needs a name, got {type(name_or_env).__name__}; "
            "for environments that exist, SerialEnv or gymnasium.vector.SyncVectorEnv"
        )
    changes: list[Callable[[Any], Any]] = []
    if frame_skip is not None:
        changes.append(partial(FrameSkip, times=frame_skip))
    if from_pixels:
        changes.append(partial(with_pixels, pixels_only=pixels_only))
    key = "pixels" if from_pixels else "observation"
    with _told_of_timeout(kwargs):
        return _made_vector(name_or_env, num_envs, _rendering(kwargs, from_pixels), changes, key)


def is_vector(env: Any) -> bool:
    """Whether `env` is a vector environment of gymnasium's."""
    return isinstance(env, gymnasium.vector.VectorEnv)


def _made_vector(
    name: str, num_envs: int, kwargs: dict[str, Any], changes: list[Callable[[Any], Any]], observation_key: str
) -> Any:
    mode = kwargs.pop("vectorization_mode", None)
    mode = getattr(mode, "value", mode)
    options = dict(kwargs.pop("vector_kwargs", None) or {})
    wrappers = [*(kwargs.pop("wrappers", None) or ()), *changes]
    if mode is None:
        mode = NATIVE if _is_native(name) and not options and not wrappers else "sync"
    if mode == NATIVE:
        if wrappers or options:
            raise ValueError(
                f"vectorization_mode={NATIVE!r} knows no single environments: frame_skip, from_pixels, wrappers and "
                "vector_kwargs need 'sync' or 'async'"
            )
        return gymnasium.make_vec(name, num_envs, vectorization_mode=mode, **kwargs)
    copies_last = False
    same_step = getattr(gymnasium.vector, "AutoresetMode", None)  # gymnasium 1.0 has one mode and no name for it
    if same_step is not None:
        options.setdefault("autoreset_mode", same_step.SAME_STEP)
        copies_last = same_step(options["autoreset_mode"]) is same_step.SAME_STEP
    wrappers.append(partial(CheckedSteps, observation_key=observation_key, copies_last=copies_last))
    return gymnasium.make_vec(
        name, num_envs, vectorization_mode=mode, vector_kwargs=options, wrappers=wrappers, **kwargs
    )


def _is_native(name: str) -> bool:
    module, _, env_id = name.rpartition(":")
    if module:
        importlib.import_module(module)
    namespace, base, version = parse_env_id(env_id)
    version = find_highest_version(namespace, base) if version is None else version
    spec = gymnasium.registry.get(get_env_id(namespace, base, version))
    return spec is not None and spec.vector_entry_point is not None


def _rendering(kwargs: dict[str, Any], from_pixels: bool) -> dict[str, Any]:
    return {**({"render_mode": "rgb_array"} if from_pixels else {}), **kwargs}


@contextlib.contextmanager
def _told_of_timeout(kwargs: dict[str, Any]) -> Iterator[None]:
    """Says where there is a `timeout`, if the environment itself knows no such argument."""
    try:
        yield
    except TypeError:
        if "timeout" in kwargs:
            reject_timeout(kwargs["timeout"], "GymEnv")
        raise


def _refuse_settings(kwargs: dict[str, Any]) -> None:
    reject_timeout(kwargs.get("timeout"), "GymEnv")
    if kwargs:
        raise TypeError(f"{sorted(kwargs)} are for gymnasium.make, and the environment exists already; pass its name")


def with_pixels(env: Any, pixels_only: bool) -> Any:
    """`env` with what it renders as its observation, or beside it."""
    if env.render_mode != "rgb_array":
        raise ValueError(
            f"from_pixels=True needs an environment with render_mode='rgb_array', got {env.render_mode!r}; "
            "pass its name, or make it with that mode"
        )
    env.reset()  # some environments cannot render before; gymnasium's wrapper reads the shape of a frame
    return gymnasium.wrappers.AddRenderObservation(
        env, render_only=pixels_only, render_key="pixels", obs_key="observation"
    )
