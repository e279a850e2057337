"""`GymEnv`: gymnasium environments as engram environments."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.envs.base import EnvBase
from engram.envs.codecs import flag_of, reward_of, reward_vector
from engram.envs.engines import GymEngine, GymVectorEngine, InfoKeys, VectorEngine
from engram.envs.vector_env import VectorStepper
from engram.specs import Composite, Spec, Unbounded
from engram.specs.tensors import usable_device


class _Stepper(Protocol):
    engine: Any
    observation_spec: Composite
    action_spec: Spec

    def seed(self, seed: int) -> None: ...
    def seed_alike(self, seed: int) -> None: ...
    def reset(self, mask: Tensor | None) -> dict[Any, Tensor]: ...
    def step(self, td: TensorDictBase) -> dict[Any, Tensor]: ...


class GymEnv(EnvBase):
    """A gymnasium environment or several of them, from a name or an existing object.

    Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict and Tuple spaces are supported. The entries of a Dict are
    observations under their own keys; any other observation is `observation`. Discrete and MultiDiscrete values are
    one-hot int64, or categories with `categorical_action_encoding=True`. Texts (a mission of MiniGrid) are UTF-8 in a
    fixed number of bytes: `env.observation_spec[key].decode(batch[key])` gives them back, see `Text`. Rewards are
    float32 `[1]`, or vectors of the shape of the environment's `reward_space` (mo-gymnasium). A reset is never stored
    as a step, and the last observation of an episode stays under `next`, in every autoreset mode of gymnasium.

    Args:
        name_or_env: a name, a `gymnasium.Env`, or a `gymnasium.vector.VectorEnv` (any autoreset mode; EnvPool's too).
        num_envs: the number of environments of that name, batch `[num_envs]`; 0: a single one, batch `[]`. They are
            created by `gymnasium.make_vec`: by the environment's vector entry point if it has one, else in sync;
            `vectorization_mode=` is "sync", "async" or "vector_entry_point". Sync and async environments reset in the
            step that ends an episode unless `vector_kwargs={"autoreset_mode": ...}` is given. Where a vector entry
            point needs a call for a reset (CartPole), steps may have rows that are no steps: see `VectorEnv`.
        from_pixels: uint8 `pixels` `[H, W, 3]` instead of the observation; with `pixels_only=False`, beside it.
        frame_skip: repeats each action so many times and adds up the rewards. Like `from_pixels`, it does not use the
            vector entry point.
        info_keys: entries of gymnasium's `info` that become observations, at the root and under `next`: a list of keys
            (a tuple leads into nested dicts), whose shapes are those of one reset and one random step, or a mapping
            from keys to specs. Entries that `info` lacks, as after resets, are zeros.
        kwargs: for `gymnasium.make` or `gymnasium.make_vec`.

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
        info_keys: InfoKeys | None = None,
        **kwargs: Any,
    ) -> None:
        from engram.envs import gym_make  # loads gymnasium, or raises ImportError with the line that installs it

        target = usable_device(device, "device")  # before an environment is created
        if num_envs < 0:
            raise ValueError(f"num_envs must be 0 (a single environment) or more, got {num_envs}")
        if frame_skip is not None and frame_skip < 1:
            raise ValueError(f"frame_skip must be 1 or more, got {frame_skip}")
        codecs: dict[str, Any] = {
            "categorical": categorical_action_encoding,
            "observation_key": "pixels" if from_pixels else "observation",
            "info_keys": info_keys,
        }
        pixels: dict[str, bool] = {"from_pixels": from_pixels, "pixels_only": pixels_only}
        self._stepper: _Stepper
        if num_envs or gym_make.is_vector(name_or_env):
            envs = gym_make.make_vector(name_or_env, num_envs, kwargs, frame_skip=frame_skip, **pixels)
            self._stepper = VectorStepper(GymVectorEngine(envs, **codecs))
        else:
            env = gym_make.make_single(name_or_env, kwargs, **pixels)
            self._stepper = SingleStepper(GymEngine(env, frame_skip=frame_skip, **codecs))
        spec = self._stepper.observation_spec
        super().__init__(spec, self._stepper.action_spec, batch_size=spec.shape)
        if reward_shape := self._stepper.engine.reward_shape:
            self.reward_spec = Unbounded((*spec.shape, *reward_shape))
        if target is not None:
            self.to(target)

    @property
    def gym_env(self) -> Any:
        """The gymnasium environment, wrappers included."""
        return self._stepper.engine.env

    def engines(self) -> list[GymEngine] | None:
        """The engine of a single environment, in a list, for collectors.

        None if a subclass may have changed steps, or if rewards are vectors, which only the TensorDict interface has.
        """
        stepper = self._stepper
        return [stepper.engine] if isinstance(stepper, SingleStepper) and self._has_raw_steps() else None

    def _has_raw_steps(self) -> bool:
        return not self._has_own_steps() and not self._stepper.engine.reward_shape

    def _has_own_steps(self) -> bool:
        cls = type(self)
        return (cls._step, cls._reset, cls.step, cls.reset) != _UNCHANGED_METHODS

    def vector_engine(self) -> VectorEngine | None:
        """The engine that steps several environments, for collectors; None as `engines`."""
        stepper = self._stepper
        return stepper.engine if isinstance(stepper, VectorStepper) and self._has_raw_steps() else None

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
        if self._has_own_steps():  # otherwise the engine has checked the raw values
            super()._check_values(td)

    def _set_seed(self, seed: int) -> None:
        self._stepper.seed(seed)

    def _set_same_seed(self, seed: int) -> None:
        self._stepper.seed_alike(seed)

    def random_state(self) -> Any:
        return self._stepper.engine.random_state()

    def set_random_state(self, state: Any) -> None:
        self._stepper.engine.set_random_state(state)

    def _close(self) -> None:
        self._stepper.engine.env.close()

    def __repr__(self) -> str:
        return f"GymEnv({self.gym_env}, device={self.device})"


_UNCHANGED_METHODS = (GymEnv._step, GymEnv._reset, GymEnv.step, GymEnv.reset)


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
        """The observations, reward and flags after `td["action"]`. Raises ValueError for values of another kind."""
        raw = self.engine.raw_action(td.get("action"))
        observation, reward, terminated, truncated, _ = self.engine.step(raw)
        values = self.engine.observation(observation)
        if shape := self.engine.reward_shape:
            values["reward"] = torch.tensor(reward_vector(reward, shape))
        else:
            values["reward"] = torch.tensor([reward_of(reward)], dtype=torch.float32)
        values["terminated"] = torch.tensor([flag_of(terminated, "terminated")])
        values["truncated"] = torch.tensor([flag_of(truncated, "truncated")])
        return values
