"""`SerialEnv`: several environments as one, stepped one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram._advice import advised
from engram._checks import count
from engram.envs.base import SPEC_NAMES, EnvBase, own_next, own_reset, steps_as
from engram.envs.engines import GymEngine, HasEngines
from engram.envs.from_torchrl import as_env
from engram.processes.timeouts import reject_timeout
from engram.specs.spaces import EncodedSpaces, common_spaces
from engram.specs.tensors import usable_device


@advised
class SerialEnv(EnvBase, HasEngines):
    """`n` environments, stepped one after the other: batch `[n, *batch of one]`.

    `make_env` creates one environment, or is a list of n such functions; `create_env_kwargs` are its arguments, or a
    list of n of them. `num_workers` and `create_env_fn` are other names of `n` and `make_env`; `serial_for_single`, and
    the arguments that TorchRL's SerialEnv has for processes, shared memory and devices, have no effect. All must have
    the same specs, and be different objects. Environment i gets the seed `seed + i * (number of environments in one)`.
    Raises ValueError for different specs or a list of another length, TypeError for a `timeout`, which only
    `ParallelEnv` has.

    >>> from engram.envs import GymEnv
    >>> SerialEnv(3, lambda: GymEnv("CartPole-v1")).rollout(2)["observation"].shape
    torch.Size([3, 2, 4])
    """

    def __init__(
        self,
        n: int | None = None,
        make_env: Any = None,
        *,
        create_env_fn: Any = None,
        create_env_kwargs: Any = None,
        num_workers: int | None = None,
        serial_for_single: bool = False,
        device: torch.device | str | None = None,
        timeout: None = None,
    ) -> None:
        reject_timeout(timeout, "SerialEnv")
        n = count(only_one("n", n, "num_workers", num_workers), "n")
        make_env = only_one("make_env", make_env, "create_env_fn", create_env_fn)
        place = usable_device(device, "device")  # raises before an environment is created
        envs = [as_env(make(), "SerialEnv") for make in env_makers("SerialEnv", n, make_env, create_env_kwargs)]
        reject_shared_envs(envs)
        first = envs[0]
        for index, env in enumerate(envs):
            check_same_specs(index, env, first)
        super().__init__(batch_size=(n, *first.batch_size), device=first.device)
        self._envs: list[Any] = envs
        for index, env in enumerate(envs):
            self.add_module(str(index), env)
        self._take_specs(first, n)
        self.policy_entries = first.policy_entries
        if place is not None:
            self.to(place)

    def encoded_spaces(self) -> EncodedSpaces:
        return super().encoded_spaces()._replace(spaces=common_spaces([env.encoded_spaces() for env in self._envs]))

    @property
    def num_workers(self) -> int:
        """The number of environments."""
        return int(self.batch_size[0])

    def engines(self) -> list[GymEngine] | None:
        """The engines that step with raw values, for collectors; None unless all are single gymnasium environments."""
        self.start()
        members: list[Any] = [env.engines() if isinstance(env, HasEngines) else None for env in self._envs]
        if type(self) is not SerialEnv or not steps_as(self, SerialEnv) or len(self.batch_size) != 1 or None in members:
            return None
        engines: list[GymEngine] = [engine for member in members for engine in member]
        return engines if all(engine.has_spaces_of(engines[0]) for engine in engines) else None

    def _reset_from(self, td: TensorDictBase | None, mask: Tensor | None, kwargs: dict[str, Any]) -> TensorDictBase:
        if td is None or not self._reads_state():
            return super()._reset_from(td, mask, kwargs)
        rows = list(zip(self._envs, td.unbind(0), strict=True))
        fresh = [own_reset(env, row, **kwargs) if mask is None or row["_reset"].any() else None for env, row in rows]
        blank = next((one.apply(torch.zeros_like) for one in fresh if one is not None), td[0].exclude("_reset"))
        return torch.stack([blank if one is None else one for one in fresh])  # blank rows are never read

    def _reads_state(self) -> bool:
        reads: bool = self._envs[0]._reads_state()
        return reads

    def call_below(self, path: str) -> Any:
        return [env.call_below(path) for env in self._envs]

    def _reset(self, mask: Tensor | None) -> TensorDictBase:
        rows = [None] * len(self._envs) if mask is None else mask.unbind(0)
        return torch.stack([self._reset_one(env, row) for env, row in zip(self._envs, rows, strict=True)])

    def _reset_one(self, env: EnvBase, mask: Tensor | None) -> TensorDictBase:
        if mask is None:
            return own_reset(env)
        blank = env.observation_spec.zero().update(env.full_done_spec.zero())
        return own_reset(env, blank.set("_reset", mask)) if bool(mask.any()) else blank

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        rows = zip(self._envs, td.unbind(0), strict=True)
        return torch.stack([own_next(env, row.copy()) for env, row in rows])

    def _check_values(self, td: TensorDictBase) -> None:
        """Does nothing: each environment has checked its own values."""

    def _set_seed(self, seed: int) -> None:
        for env in self._envs:
            seed = env.set_seed(seed)

    def _set_same_seed(self, seed: int) -> None:
        for env in self._envs:
            env.set_seed(seed, static_seed=True)

    def random_state(self) -> Any:
        states = [env.random_state() for env in self._envs]
        return None if None in states else states

    def set_random_state(self, state: Any) -> None:
        if not isinstance(state, list) or len(state) != len(self._envs):
            given = f"{len(state)} states" if isinstance(state, list) else type(state).__name__
            raise ValueError(f"SerialEnv of {len(self._envs)} takes a list of as many random states, got {given}")
        before = self.random_state()
        try:
            for env, member in zip(self._envs, state, strict=True):
                env.set_random_state(member)
        except ValueError:
            for env, member in zip(self._envs, before, strict=True):
                env.set_random_state(member)
            raise

    def to(self, device: torch.device | str) -> SerialEnv:  # type: ignore[override]
        for env in self._envs:
            env.to(device)
        return super().to(device)

    def _open(self) -> None:
        for env in self._envs:
            env.start()

    def _close(self) -> None:
        for env in self._envs:
            env.close()

    def __repr__(self) -> str:
        return f"SerialEnv({len(self._envs)} x {self._envs[0]!r})"


def only_one(name: str, value: Any, alias: str, other: Any) -> Any:
    """The one of two values that is given. Raises TypeError if both are, or none."""
    if (value is None) == (other is None):
        raise TypeError(f"give {name} (or, under its other name, {alias}), and only one of them")
    return other if value is None else value


def env_makers(kind: str, n: int, make_env: Any, create_env_kwargs: Any = None) -> list[Callable[[], Any]]:
    """One function for each of `n` environments. Raises ValueError for n < 1, and for a list of another length."""
    if not callable(make_env) and not isinstance(make_env, Sequence):
        raise TypeError(
            f"{kind} makes its environments itself: give a function that makes one (lambda: gymnasium.make(...)), or "
            f"{n} of them, got a {type(make_env).__name__}"
        )
    makers: list[Callable[..., Any]] = [make_env] * n if callable(make_env) else list(make_env)
    if len(makers) != n:
        raise ValueError(f"{kind}({n}, ...) got {len(makers)} callables; give {n}, or a single one")
    if not create_env_kwargs:
        return makers
    settings = [create_env_kwargs] * n if isinstance(create_env_kwargs, dict) else list(create_env_kwargs)
    if len(settings) != n:
        raise ValueError(f"{kind}({n}, ...) got {len(settings)} create_env_kwargs; give {n}, or a single dict")
    return [functools.partial(make, **setting) for make, setting in zip(makers, settings, strict=True)]


def reject_shared_envs(envs: Iterable[EnvBase], first: int = 0) -> None:
    """Raises ValueError if two of these share an environment: a step of one would step the other.

    `first` is the number of the first of them in errors.
    """
    owners: dict[int, int] = {}
    for index, env in enumerate(envs, first):
        for part in env.modules():
            if isinstance(part, EnvBase) and owners.setdefault(id(part), index) != index:
                raise ValueError(
                    f"environments {owners[id(part)]} and {index} are one and the same {type(part).__name__}, so that "
                    "each step of one would step the other; give a function that makes a new one at each call"
                )


def check_same_specs(index: int, env: Any, first: Any) -> None:
    """Raises ValueError if environment `index` has other specs than the first."""
    names = ("batch_size", "device", "observation_spec", "action_spec", "reward_spec", "done_spec", *SPEC_NAMES)
    for name in names:
        value, expected = getattr(env, name), getattr(first, name)
        if value != expected:
            raise ValueError(
                f"environment {index} has another {name} than environment 0.\n  found:   {value}\n  allowed: {expected}"
            )
