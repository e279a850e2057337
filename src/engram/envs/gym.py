"""`GymEnv`: gymnasium environments as engram environments."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import ModuleType
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from engram._advice import SignatureOfInit, advised
from engram._checks import count, count_or_none
from engram._providers import PROVIDERS
from engram.envs.base import EnvBase, steps_as
from engram.envs.codecs import flag_of, reward_of, reward_vector
from engram.envs.engines import GymEngine, HasEngines, InfoKeys, VectorEngine
from engram.envs.policies import transforms_of
from engram.envs.vector_env import VectorStepper
from engram.specs import Composite, Spec, Unbounded
from engram.specs.spaces import EncodedSpaces
from engram.specs.tensors import usable_device


class _EnvNames:
    """A descriptor, for classes and objects, that returns the names in gymnasium's registry."""

    def __get__(self, instance: Any, owner: type) -> list[Any]:
        from engram.envs import gym_make

        return gym_make.registered_names()


class _Stepper(Protocol):
    engine: Any
    observation_spec: Composite
    action_spec: Spec

    def seed(self, seed: int) -> None: ...
    def seed_alike(self, seed: int) -> None: ...
    def reset(self, mask: Tensor | None) -> dict[Any, Tensor]: ...
    def step(self, td: TensorDictBase) -> dict[Any, Tensor]: ...


@advised
class GymEnv(EnvBase, HasEngines):
    """A gymnasium environment or several of them, from a name or an existing object.

    Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict and Tuple spaces are supported. The entries of a Dict are
    observations under their own keys; any other observation is `observation`. Discrete and MultiDiscrete values are
    one-hot int64, or categories with `categorical_action_encoding=True`. Texts (a mission of MiniGrid) are UTF-8 in a
    fixed number of bytes: `env.observation_spec[key].decode(batch[key])` gives them back, see `Text`. Rewards are
    float32 `[1]`, or vectors of the shape of the environment's `reward_space` (mo-gymnasium). A reset is never stored
    as a step, and the last observation of an episode stays under `next`, in every autoreset mode of gymnasium.

    Members that it does not have are those of the gymnasium environment: `env.render()`, `env.unwrapped`,
    `env.action_space`. Atari's environments are registered where `ale_py` is installed.

    Args:
        name_or_env: a name, a `gymnasium.Env`, or a `gymnasium.vector.VectorEnv` (any autoreset mode; EnvPool's too,
            since its version 1.2).
        env_name, env: other names of `name_or_env`.
        num_envs: the number of environments of that name, batch `[num_envs]`; 0: a single one, batch `[]`. They are
            created by `gymnasium.make_vec`: by the environment's vector entry point if it has one, as CartPole-v1 has,
            whose random numbers and resets are others than those of single environments; else in sync.
            `vectorization_mode="sync"` or "async" makes single ones of any name, "vector_entry_point" insists on it.
            Sync and async environments reset in the step that ends an episode unless
            `vector_kwargs={"autoreset_mode": ...}` is given. Where a vector entry point needs a call for a reset
            (CartPole), steps may have rows that are not steps: see `VectorEnv`.
        from_pixels: uint8 `pixels` `[H, W, 3]` instead of the observation; with `pixels_only=False`, beside it.
        frame_skip: repeats each action so many times and adds up the rewards. An environment whose constructor has the
            parameter `frameskip` (Atari's) gets it, instead of its own default; otherwise, like `from_pixels`, it does
            not use the vector entry point. None: as the environment's name says.
        info_keys: entries of gymnasium's `info` that become observations, at the root and under `next`: a list of keys
            (a tuple leads into nested dicts), whose shapes are those of one reset and one random step, or a mapping
            from keys to specs. Entries that `info` lacks, as after resets, are zeros.
        batch_size: as a check, `()` of a single environment or `(num_envs,)`.
        kwargs: for `gymnasium.make` or `gymnasium.make_vec`. A `policy` goes there if the environment's constructor has
            that parameter. With a recurrent one the result is a `TransformedEnv` with the transforms that it needs:
            an `InitTracker` where it reads `"is_init"`, and its primers. TorchRL's `allow_done_after_reset`,
            `auto_reset_replace`, `convert_actions_to_numpy`, `missing_obs_value`, `run_type_checks` and `spec_locked`
            have no effect.

    Environment i of several is seeded with `seed + i`; those of a vector entry point share one generator.
    Raises TypeError for spaces without a fixed shape and for arguments that an existing environment cannot take,
    KeyError for info keys that do not exist, ImportError if gymnasium is missing: `pip install "engram[gym]"`.

    >>> env = GymEnv("CartPole-v1")
    >>> env.set_seed(0)
    1
    >>> env.rollout(3)["action"].shape
    torch.Size([3, 2])
    >>> GymEnv("CartPole-v1", num_envs=4).rollout(50, break_when_any_done=False)["observation"].shape
    torch.Size([4, 50, 4])
    """

    available_envs: Any = _EnvNames()  #: the names in gymnasium's registry
    libname = "gym"  #: TorchRL's name of the library

    def __new__(cls, *args: Any, policy: Any = None, **kwargs: Any) -> Any:
        env = super().__new__(cls)
        if not isinstance(policy, nn.Module):
            return env
        env.__init__(*args, policy=policy, **kwargs)  # type: ignore[misc]
        needed = transforms_of(policy, env)
        # Of another class, Python does not call `__init__` again.
        return PROVIDERS["transformed_env"]()(env, needed) if needed else env

    __signature__ = SignatureOfInit()

    def __init__(
        self,
        name_or_env: Any = None,
        *,
        env_name: str | None = None,
        env: Any = None,
        batch_size: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        num_envs: int = 0,
        from_pixels: bool = False,
        pixels_only: bool = True,
        frame_skip: int | None = None,
        categorical_action_encoding: bool = False,
        info_keys: InfoKeys | None = None,
        **kwargs: Any,
    ) -> None:
        from engram.envs import gym_make  # loads gymnasium, or raises ImportError with the line that installs it

        name_or_env = _only_given(name_or_env=name_or_env, env_name=env_name, env=env)
        target = usable_device(device, "device")  # raises before an environment is created
        num_envs, frame_skip = count(num_envs, "num_envs", 0), count_or_none(frame_skip, "frame_skip")
        if batch_size is not None and tuple(batch_size) != ((num_envs,) if num_envs else ()):
            raise ValueError(f"batch_size={tuple(batch_size)}: it is (num_envs,), and () without num_envs")
        kwargs, frame_skip = gym_make.with_own_frame_skip(name_or_env, kwargs, frame_skip)
        codecs: dict[str, Any] = {
            "categorical": categorical_action_encoding,
            "observation_key": "pixels" if from_pixels else "observation",
            "info_keys": info_keys,
        }
        pixels: dict[str, bool] = {"from_pixels": from_pixels, "pixels_only": pixels_only}
        self._stepper: _Stepper
        self._make_again: Callable[[], _Stepper] | None = None
        if num_envs or gym_make.is_vector(name_or_env):
            make_vector = functools.partial(
                _make_vector, name_or_env, num_envs, kwargs, codecs, frame_skip=frame_skip, **pixels
            )
            self._stepper = make_vector()
            if isinstance(name_or_env, str):
                self._make_again = make_vector
        else:
            single = gym_make.make_single(name_or_env, kwargs, **pixels)
            self._stepper = SingleStepper(GymEngine(single, frame_skip=frame_skip, **codecs))
        spec = self._stepper.observation_spec
        super().__init__(spec, self._stepper.action_spec, batch_size=spec.shape)
        self.frame_skip, self.from_pixels = frame_skip or 1, bool(pixels.get("from_pixels"))
        self.env_name = gym_make.registered_name(self.gym_env)  #: gymnasium's name of it; None if it has none
        if reward_shape := self._stepper.engine.reward_shape:
            self.reward_spec = Unbounded((*spec.shape, *reward_shape))
        if target is not None:
            self.to(target)

    @property
    def lib(self) -> ModuleType:
        """The module that makes the environments: gymnasium."""
        from engram.envs import gym_make

        return gym_make.backend()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            value = _ABSENT if name.startswith("_") else getattr(self.gym_env, name, _ABSENT)
            if value is _ABSENT:
                raise error from None
        return value

    @property
    def gym_env(self) -> Any:
        """The gymnasium environment, wrappers included."""
        return self._stepper.engine.env

    def encoded_spaces(self) -> EncodedSpaces:
        return super().encoded_spaces()._replace(spaces=self._stepper.engine.spaces)

    def engines(self) -> list[GymEngine] | None:
        """The engine of a single environment, in a list, for collectors.

        None if a subclass may have changed steps, or for vector rewards, which only the TensorDict interface supports.
        """
        if not isinstance(self._stepper, SingleStepper) or not self._has_raw_steps():
            return None
        self.start()
        return [self._stepper.engine]

    def _has_raw_steps(self) -> bool:
        return steps_as(self, GymEnv) and not self._stepper.engine.reward_shape

    def vector_engine(self) -> VectorEngine | None:
        """The engine that steps several environments, for collectors; None in the same cases as `engines`."""
        if not isinstance(self._stepper, VectorStepper) or not self._has_raw_steps():
            return None
        self.start()
        return self._stepper.engine

    def call_below(self, path: str) -> Any:
        if isinstance(self._stepper, VectorStepper):
            raise AttributeError(
                f"gymnasium's vector environments have begun the next episode when a step ends one, and cannot say "
                f"{path!r} of its end: use SerialEnv(n, lambda: GymEnv(...))"
            )
        return attrgetter(path)(self.gym_env)()

    def _reset(self, mask: Tensor | None) -> TensorDictBase:
        return TensorDict(self._stepper.reset(mask), batch_size=self.batch_size, device=self.device)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        return TensorDict(self._stepper.step(td), batch_size=self.batch_size, device=self.device)

    def _check_values(self, td: TensorDictBase) -> None:
        if not steps_as(self, GymEnv):  # otherwise the engine has checked the raw values
            super()._check_values(td)

    def _set_seed(self, seed: int) -> None:
        self._stepper.seed(seed)

    def _set_same_seed(self, seed: int) -> None:
        self._stepper.seed_alike(seed)

    def random_state(self) -> Any:
        return self._stepper.engine.random_state()

    def set_random_state(self, state: Any) -> None:
        self._stepper.engine.set_random_state(state)

    def _open(self) -> None:
        if self._make_again is not None:  # a closed vector environment cannot be reset; a closed single one can
            self._stepper = self._make_again()

    def _close(self) -> None:
        self._stepper.engine.env.close()

    def __repr__(self) -> str:
        return f"GymEnv({self.gym_env}, device={self.device})"


_ABSENT = object()


def _only_given(**values: Any) -> Any:
    """The one of several values that is given. Raises TypeError for none or more than one."""
    given = [value for value in values.values() if value is not None]
    if len(given) != 1:
        raise TypeError(f"GymEnv needs one of {list(values)}, the name of an environment or an environment")
    return given[0]


def in_gym_env(env: Any) -> Any:
    """An environment, or a vector of some, of gymnasium's as a `GymEnv`; anything else as it is.

    >>> import gymnasium
    >>> in_gym_env(gymnasium.make("CartPole-v1")).rollout(3).shape, in_gym_env(7)
    (torch.Size([3]), 7)
    """
    gymnasium: Any = sys.modules.get("gymnasium")
    is_theirs = gymnasium is not None and isinstance(env, gymnasium.Env | gymnasium.vector.VectorEnv)
    return GymEnv(env) if is_theirs else env


def _make_vector(
    name_or_env: Any, num_envs: int, kwargs: dict[str, Any], codecs: dict[str, Any], **wrappers: Any
) -> VectorStepper:
    from engram.envs import gym_make

    env = gym_make.make_vector(name_or_env, num_envs, dict(kwargs), **wrappers)
    return VectorStepper(gym_make.vector_engine(env, **codecs))


class SingleStepper:
    """Steps a GymEngine with tensors, as `VectorStepper` steps a VectorEngine."""

    def __init__(self, engine: GymEngine) -> None:
        self.engine = engine
        self.observation_spec = engine.observation_spec
        self.action_spec = engine.action.spec

    def seed(self, seed: int) -> None:
        """Seeds the environment at the next reset."""
        self.engine.seed(seed)

    seed_alike = seed

    def reset(self, mask: Tensor | None) -> dict[Any, Tensor]:
        """Observations after a reset."""
        return self.engine.observation(self.engine.reset())

    def step(self, td: TensorDictBase) -> dict[Any, Tensor]:
        """The observations, reward and flags after `td["action"]`. Raises ValueError for invalid values."""
        raw = self.engine.raw_action(td.get("action"))
        observation, reward, terminated, truncated, _ = self.engine.step(raw)
        values = self.engine.observation(observation)
        if shape := self.engine.reward_shape:
            values["reward"] = torch.tensor(reward_vector(reward, shape), device="cpu")
        else:
            values["reward"] = torch.tensor([reward_of(reward)], dtype=torch.float32, device="cpu")
        values["terminated"] = torch.tensor([flag_of(terminated, "terminated")], device="cpu")
        values["truncated"] = torch.tensor([flag_of(truncated, "truncated")], device="cpu")
        return values
