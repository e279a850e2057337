"""Creates gymnasium environments. This file imports gymnasium, and is imported when the first `GymEnv` is created."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from engram._checks import attribute
from engram._packages import packages
from engram.envs.codecs import flag_of, nest_like, reward_of
from engram.envs.engines import (
    Autoreset,
    GymVectorEngine,
    InfoKeys,
    VectorStep,
    autoreset_of,
    observation_leaves,
    repeat_action,
)
from engram.processes.timeouts import reject_timeout

with packages("GymEnv", "engram[gym]", gymnasium="gymnasium"):
    import gymnasium
    from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, load_env_creator, parse_env_id


ENTRY_POINT = "vector_entry_point"


def register_atari() -> None:
    """Registers Atari's environments, which the import of `ale_py` does, where that is installed."""
    with contextlib.suppress(ImportError):
        gymnasium.register_envs(importlib.import_module("ale_py"))


register_atari()


def backend() -> ModuleType:
    """The module that creates the environments: gymnasium."""
    return gymnasium


def registered_names() -> list[str]:
    """The names of all registered environments."""
    return sorted(gymnasium.registry)


def registered_name(env: Any) -> str | None:
    """The name that an environment was created by; None if it has none."""
    return env.spec.id if isinstance(env.spec, EnvSpec) else None


def _without_policy(name_or_env: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The settings, without `policy` if the environment's constructor has no such parameter."""
    if "policy" not in kwargs or (isinstance(name_or_env, str) and "policy" in _parameters(name_or_env)):
        return kwargs
    return {name: value for name, value in kwargs.items() if name != "policy"}


def _parameters(name: str) -> Mapping[str, Any]:
    """The parameters of the constructor of a registered environment; none where it is not registered."""
    with contextlib.suppress(gymnasium.error.Error):
        entry_point = gymnasium.spec(name).entry_point
        creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
        return {} if creator is None else inspect.signature(creator).parameters
    return {}


def with_own_frame_skip(
    name_or_env: Any, kwargs: dict[str, Any], frame_skip: int | None
) -> tuple[dict[str, Any], int | None]:
    """Gives constructors with a parameter `frameskip` (Atari's) the skip; returns settings and remaining skip.

    Raises:
        ValueError: the settings have another `frameskip`.
    """
    if frame_skip is None or not isinstance(name_or_env, str) or "frameskip" not in _parameters(name_or_env):
        return kwargs, frame_skip
    if kwargs.get("frameskip", frame_skip) != frame_skip:
        raise ValueError(f"frame_skip={frame_skip} is frameskip={kwargs['frameskip']!r} of {name_or_env}: give one")
    return {**kwargs, "frameskip": frame_skip}, None


class FrameSkip(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Repeats each action `times` times, adds up the rewards, and stops when the episode ends."""

    def __init__(self, env: Any, times: int) -> None:
        super().__init__(env)
        self._repeated = repeat_action(env.step, times)

    def step(self, action: Any) -> Any:
        return self._repeated(action)


class CheckStepValues(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Checks one environment's values against its spaces, before gymnasium batches those of all into one array.

    That array would turn None into NaN, parse text and broadcast numbers. `copy_final`: copies the final observation of
    an episode, as a reset in the same step may write into the same array.
    """

    def __init__(self, env: Any, *, observation_key: str, copy_final: bool) -> None:
        super().__init__(env)
        self.check = StepCheck(env, observation_key, copy_final)
        self.step = self.check.step  # type: ignore[method-assign]  # a wrapper looks every attribute up twice

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        self.check.compare(observation)
        return observation, info


class StepCheck:
    """The `step` of `CheckStepValues`; an observation of the `dtype` and `shape` needs no `compare`."""

    def __init__(self, env: Any, observation_key: str, copy_final: bool) -> None:
        self.unchecked_step, self._copy_final = env.step, copy_final
        self._leaves = observation_leaves(env.observation_space, observation_key, None, categorical=True)
        codec, is_single = self._leaves[0].codec, len(self._leaves) == 1 and not self._leaves[0].path
        self.dtype, self.shape = codec.raw_dtype if is_single else None, codec.raw_shape

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = values = self.unchecked_step(action)
        if not self.is_plain(observation):
            self.compare(observation)
        if terminated is False and truncated is False and type(reward) is float:
            return values
        terminated, truncated = flag_of(terminated, "terminated"), flag_of(truncated, "truncated")
        if self._copy_final and (terminated or truncated):
            observation = copy.deepcopy(observation)
        return observation, reward if type(reward) is float else reward_of(reward), terminated, truncated, info

    def is_plain(self, observation: Any) -> bool:
        """Whether an observation is one array, and as its space says."""
        dtype, shape = self.dtype, self.shape
        return type(observation) is np.ndarray and observation.dtype is dtype and observation.shape == shape

    def compare(self, observation: Any) -> None:
        """Raises ValueError if the observation is not in its space."""
        for leaf in self._leaves:
            leaf.value(observation)


class SyncEngine(GymVectorEngine):
    """Steps the environments of a SyncVectorEnv that resets them in the same step, each in a `CheckStepValues`.

    Its own `step` copies all that it gives, keeps every value in an array first, and merges what no collector reads,
    the infos: three times the cost of this one. Values are checked as by `CheckStepValues`, and copied at once.
    """

    def __init__(self, env: Any, *, categorical: bool, observation_key: str) -> None:
        super().__init__(env, categorical=categorical, observation_key=observation_key)
        self._checks = [single.check for single in env.envs]
        self._iterate = gymnasium.vector.utils.iterate

    def step(self, actions: Any) -> VectorStep:
        env, leaves, ndarray = self.env, self.leaves, np.ndarray
        dtype, shape = self._checks[0].dtype, self._checks[0].shape
        terminated, truncated = (np.zeros(self.n, np.bool_) for _ in range(2))
        rewards = np.empty(self.n)
        columns = [np.empty((self.n, *leaf.codec.raw_shape), leaf.codec.raw_dtype) for leaf in leaves]
        only = columns[0]
        last: list[tuple[int, Any]] = []
        pairs = zip(self._checks, self._iterate(env.action_space, actions), strict=True)
        for number, (check, action) in enumerate(pairs):
            observation, reward, terminates, truncates, _ = check.unchecked_step(action)
            rewards[number] = reward if type(reward) is float else reward_of(reward)
            if terminates is not False or truncates is not False:
                terminated[number] = terminates = flag_of(terminates, "terminated")
                truncated[number] = truncates = flag_of(truncates, "truncated")
                if terminates or truncates:
                    last.append((number, copy.deepcopy(observation)))  # the reset may write into the same array
                    observation, _ = env.envs[number].reset()
            if type(observation) is ndarray and observation.dtype is dtype and observation.shape == shape:
                only[number] = observation  # at once: the next environment may write into the same array
            else:
                for leaf, column in zip(leaves, columns, strict=True):
                    column[number] = leaf.value(observation)
        return VectorStep(nest_like(leaves, columns), rewards, terminated, truncated, last)


def vector_engine(env: Any, info_keys: InfoKeys | None, **codecs: Any) -> GymVectorEngine:
    """The engine of a vector environment of `make_vector`."""
    is_sync = not info_keys and isinstance(env, gymnasium.vector.SyncVectorEnv)
    are_checked = is_sync and all(isinstance(single, CheckStepValues) for single in env.envs)
    if are_checked and autoreset_of(env) is Autoreset.SAME_STEP:
        return SyncEngine(env, **codecs)
    return GymVectorEngine(env, info_keys=info_keys, **codecs)


def make_single(name_or_env: Any, kwargs: dict[str, Any], *, from_pixels: bool, pixels_only: bool) -> Any:
    """One environment, from a name or an existing object. Raises TypeError for anything else."""
    kwargs = _without_policy(name_or_env, kwargs)
    if isinstance(name_or_env, str):
        with _explains_timeout(kwargs), _explains_namespace(name_or_env):
            env = gymnasium.make(name_or_env, **_with_render_mode(kwargs, from_pixels))
    elif isinstance(name_or_env, gymnasium.Env):
        _check_no_settings(kwargs)
        _check_is_single(name_or_env)
        env = name_or_env
    else:
        raise TypeError(f"GymEnv takes a name, a gymnasium.Env or a VectorEnv, got {type(name_or_env).__name__}")
    return with_pixels(env, pixels_only) if from_pixels else env


def make_vector(
    name_or_env: Any,
    num_envs: int,
    kwargs: dict[str, Any],
    *,
    from_pixels: bool,
    pixels_only: bool,
    frame_skip: int | None,
) -> Any:
    """A vector environment, from a name or an existing object. Raises TypeError and ValueError for wrong settings."""
    kwargs = _without_policy(name_or_env, kwargs)
    if is_vector(name_or_env):
        _check_no_settings(kwargs)
        if from_pixels or frame_skip is not None:
            raise ValueError(
                "from_pixels and frame_skip wrap each environment, and this vector environment exists already; "
                "give its name and num_envs, or create it with wrappers=[...]"
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
    with _explains_timeout(kwargs):
        return _make_vector_by_name(name_or_env, num_envs, _with_render_mode(kwargs, from_pixels), changes, key)


def _check_is_single(env: Any) -> None:
    """Raises TypeError for a pool of an EnvPool before 1.2: a `gymnasium.Env` that steps several environments."""
    if (pooled := attribute(env, "spec.config.num_envs")) is not None:
        raise TypeError(
            f"{type(env).__name__} steps {pooled} environments together but is no gymnasium.vector.VectorEnv, as "
            "EnvPool's are since version 1.2: pip install 'envpool>=1.2'"
        )


def is_vector(env: Any) -> bool:
    """Whether `env` is a vector environment of gymnasium."""
    return isinstance(env, gymnasium.vector.VectorEnv)


def _make_vector_by_name(
    name: str, num_envs: int, kwargs: dict[str, Any], changes: list[Callable[[Any], Any]], observation_key: str
) -> Any:
    mode = kwargs.pop("vectorization_mode", None)
    mode = mode.value if isinstance(mode, Enum) else mode
    options = dict(kwargs.pop("vector_kwargs", None) or {})
    wrappers = [*(kwargs.pop("wrappers", None) or ()), *changes]
    if mode is None:
        mode = ENTRY_POINT if _has_entry_point(name) and not options and not wrappers else "sync"
    if mode == ENTRY_POINT:
        if wrappers or options:
            raise ValueError(
                f"vectorization_mode={ENTRY_POINT!r} has no single environments to wrap: frame_skip, from_pixels, "
                "wrappers and vector_kwargs need 'sync' or 'async'"
            )
        with _explains_namespace(name):
            return gymnasium.make_vec(name, num_envs, vectorization_mode=mode, **kwargs)
    copy_final = False
    same_step = attribute(gymnasium.vector, "AutoresetMode")  # gymnasium 1.0 has one mode and no name for it
    if same_step is not None:
        options.setdefault("autoreset_mode", same_step.SAME_STEP)
        copy_final = same_step(options["autoreset_mode"]) is same_step.SAME_STEP
    wrappers.append(partial(CheckStepValues, observation_key=observation_key, copy_final=copy_final))
    with _explains_namespace(name):
        return gymnasium.make_vec(
            name, num_envs, vectorization_mode=mode, vector_kwargs=options, wrappers=wrappers, **kwargs
        )


def _has_entry_point(name: str) -> bool:
    module, _, env_id = name.rpartition(":")
    if module:
        importlib.import_module(module)
    namespace, base, version = parse_env_id(env_id)
    with _explains_namespace(env_id):
        version = find_highest_version(namespace, base) if version is None else version
    spec = gymnasium.registry.get(get_env_id(namespace, base, version))
    return spec is not None and spec.vector_entry_point is not None


def _with_render_mode(kwargs: dict[str, Any], from_pixels: bool) -> dict[str, Any]:
    return {**({"render_mode": "rgb_array"} if from_pixels else {}), **kwargs}


@contextlib.contextmanager
def _explains_namespace(name: str) -> Iterator[None]:
    """Around the making of an environment: an error that its namespace is unknown says how it becomes known."""
    try:
        yield
    except gymnasium.error.NamespaceNotFound as error:
        package, pip_name = _PACKAGES.get(name.partition("/")[0], ("the_package", "the package that has it"))
        raise type(error)(
            f"{error} It is known once its package has been imported: pip install {pip_name}, and "
            f"GymEnv('{package}:{name}') imports it"
        ) from error


#: Of namespaces of environments: the modules that register them, and their packages.
_PACKAGES = {"ALE": ("ale_py", "'gymnasium[atari]'")}


@contextlib.contextmanager
def _explains_timeout(kwargs: dict[str, Any]) -> Iterator[None]:
    """Turns the TypeError for a `timeout` argument into one that names the class which has a timeout."""
    try:
        yield
    except TypeError:
        if "timeout" in kwargs:
            reject_timeout(kwargs["timeout"], "GymEnv")
        raise


def _check_no_settings(kwargs: dict[str, Any]) -> None:
    reject_timeout(kwargs.get("timeout"), "GymEnv")
    if kwargs:
        raise TypeError(f"{sorted(kwargs)} are for gymnasium.make, and the environment exists already; pass its name")


def with_pixels(env: Any, pixels_only: bool) -> Any:
    """`env` with its rendered frames as the observation, or beside it."""
    if env.render_mode != "rgb_array":
        raise ValueError(
            f"from_pixels=True needs an environment with render_mode='rgb_array', got {env.render_mode!r}; "
            "pass its name, or create it with that mode"
        )
    env.reset()  # some environments cannot render before a reset, and the wrapper renders one frame for its shape
    return gymnasium.wrappers.AddRenderObservation(
        env, render_only=pixels_only, render_key="pixels", obs_key="observation"
    )
