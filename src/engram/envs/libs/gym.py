"""Gymnasium's environments: `GymEnv`, and the choice of a library, of which there is one."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from engram.envs.gym import GymEnv

GymWrapper = GymEnv  # takes an existing environment as well as a name


def gym_backend(submodule: str | None = None) -> ModuleType:
    """The module `gymnasium`, or one below it, as "wrappers". Raises ImportError where it is missing."""
    from engram.envs import gym_make  # loads gymnasium, or raises ImportError with the line that installs it

    backend = gym_make.backend()
    return backend if submodule is None else importlib.import_module(f"{backend.__name__}.{submodule}")


class set_gym_backend(contextlib.ContextDecorator):
    """Chooses gymnasium: in a `with` block, as a decorator, or by `.set()`.

    It has no effect, as gymnasium is the only library that `GymEnv` takes; "gym" is taken for it. Raises ValueError for
    any other.

    >>> with set_gym_backend("gym") as chosen:
    ...     env = GymEnv("CartPole-v1")
    >>> chosen.backend.__name__
    'gymnasium'
    """

    def __init__(self, backend: str | ModuleType | Callable[[], ModuleType]) -> None:
        module = backend if isinstance(backend, str | ModuleType) else backend()
        name = module if isinstance(module, str) else module.__name__
        if name not in ("gymnasium", "gym"):
            raise ValueError(f"the backend {name!r} is not supported: GymEnv takes environments of 'gymnasium' only")

    @property
    def backend(self) -> ModuleType:
        """The module `gymnasium`."""
        return gym_backend()

    def clone(self) -> set_gym_backend:
        """Another one, with the same effect."""
        return set_gym_backend("gymnasium")

    def set(self) -> None:
        """Nothing: gymnasium is chosen."""

    def __enter__(self) -> set_gym_backend:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


__all__ = ["GymEnv", "GymWrapper", "gym_backend", "set_gym_backend"]
