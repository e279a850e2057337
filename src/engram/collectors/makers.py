"""The arguments of each worker of a collector: its environment, its policy, and settings of its own."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from engram._checks import count_or_none
from engram.collectors.rollout import is_environment
from engram.collectors.settings import Device
from engram.collectors.sync import device_argument
from engram.envs.gym import in_gym_env
from engram.processes.worker import CloudpickleWrapper


def makers_of_workers(
    create_env_fn: Any, create_env_kwargs: Any, policy: Any, policy_factory: Any, num_workers: int | None
) -> tuple[list[Callable[[], Any]], list[Callable[[], Any] | None]]:
    """For each worker a callable that makes its environment, and one that makes its policy, or None.

    Raises ValueError for another number of them than `num_workers`, TypeError for values that are not callable.
    """
    makers = _with_arguments(_env_makers(create_env_fn, num_workers), create_env_kwargs)
    return makers, _policy_makers(policy, policy_factory, len(makers))


def _env_makers(create_env_fn: Any, num_workers: int | None) -> list[Callable[[], Any]]:
    is_one = callable(create_env_fn) or is_environment(create_env_fn)
    num_workers = count_or_none(num_workers, "num_workers")
    makers = [create_env_fn] * (num_workers or 1) if is_one else list(create_env_fn)
    if not makers or (num_workers is not None and len(makers) != num_workers):
        raise ValueError(
            f"{len(makers)} environments to make and num_workers={num_workers}; give a callable for each worker, or "
            "a single one and num_workers of 1 or more"
        )
    return [_maker_of(one, any(one is other for other in makers[:k])) for k, one in enumerate(makers)]


def _maker_of(value: Any, is_repeated: bool) -> Callable[..., Any]:
    """A function that makes an environment. Raises TypeError for what is neither that nor an environment."""
    if is_environment(value):
        value = CopyOfEnvironment(in_gym_env(value))
    if not callable(value):
        raise TypeError(f"each worker makes its own environment: give callables that do, got a {type(value).__name__}")
    return with_own_seed(value) if is_repeated else value


class CopyOfEnvironment:
    """Makes a copy of an environment, from the bytes of its pickle. The original stays its owner's to close.

    With `has_own_seed` it has a seed that is drawn from torch's generator where it is made: random numbers that are
    pickled with an environment would give each copy the same episodes.

    Raises:
        TypeError: it cannot be pickled.
    """

    has_own_seed = False

    def __init__(self, env: Any) -> None:
        try:
            self._pickled = pickle.dumps(CloudpickleWrapper(env))
        except Exception as error:  # a user's class may raise anything here
            raise TypeError(
                f"each worker gets a copy of the environment, and this {type(env).__name__} cannot be pickled "
                f"({type(error).__name__}: {error}); give a callable that makes one"
            ) from error

    def __call__(self) -> Any:
        env = pickle.loads(self._pickled).function
        if self.has_own_seed:
            env.set_seed(int(torch.randint(2**31, (), device="cpu")))
        return env


def with_own_seed(make_env: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; one that copies an environment gives the copy a seed of its own."""
    if isinstance(make_env, CopyOfEnvironment):
        make_env = copy.copy(make_env)
        make_env.has_own_seed = True
    return make_env


def one_for_each(name: str, value: Any, n: int) -> Sequence[Any]:
    """One value for each of `n` workers: those of a sequence, or the same one. ValueError: another number of them."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * n
    if len(value) != n:
        raise ValueError(f"{name} has {len(value)} values for {n} workers; give one for each")
    return value


def devices_of_workers(
    name: str, given: Device | Sequence[Device], default: Device | Sequence[Device], n: int
) -> list[torch.device | None]:
    """The device of each worker; where it is None, that of the argument `device`, which is `default`."""
    pairs = zip(one_for_each(name, given, n), one_for_each("device", default, n), strict=True)
    return [device_argument(name, one, usual) for one, usual in pairs]


def only_device(devices: Sequence[torch.device | None]) -> torch.device | None:
    """The device on which batches of all workers are handed out. ValueError: there are several."""
    if len(set(devices)) > 1:
        raise ValueError(f"batches of all workers are handed out on one device; storing_device is {list(devices)}")
    return devices[0]


def _with_arguments(
    makers: list[Callable[..., Any]], arguments: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
) -> list[Callable[[], Any]]:
    if not arguments:
        return makers
    if any(isinstance(make, CopyOfEnvironment) for make in makers):
        raise TypeError("create_env_kwargs are arguments of callables that make environments; got one made")
    each = [arguments] * len(makers) if isinstance(arguments, Mapping) else list(arguments)
    if len(each) != len(makers):
        raise ValueError(
            f"create_env_kwargs are for {len(each)} workers, and there are {len(makers)}; give one for each"
        )
    return [functools.partial(make, **own) for make, own in zip(makers, each, strict=True)]


def _policy_makers(policy: Any, factory: Any, num_workers: int) -> list[Callable[[], Any] | None]:
    if factory is None:
        return [None] * num_workers
    if policy is not None:
        raise TypeError("policy_factory makes the policy: it cannot be used with policy; give one of them")
    makers = [factory] * num_workers if callable(factory) else list(factory)
    if len(makers) != num_workers:
        raise ValueError(f"{len(makers)} factories in policy_factory for {num_workers} workers; give one for each")
    for maker in makers:
        if not callable(maker):
            raise TypeError(f"policy_factory must be callables without arguments, got a {type(maker).__name__}")
    return makers
