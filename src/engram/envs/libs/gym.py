"""Gymnasium's environments: `GymEnv`, and the choice of a library, of which there is one."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

from engram.envs.gym import GymEnv

GymWrapper = GymEnv  # takes an existing environment as well as a name


def gym_backend() -> ModuleType:
    """The module `gymnasium`. Raises ImportError where it is missing."""
    from engram.envs import gym_make  # loads gymnasium, or raises ImportError with the line that installs it

    return gym_make.backend()


class set_gym_backend(contextlib.ContextDecorator):
    """Chooses gymnasium: in a `with` block, as a decorator, or by `.set()`.

    It has no effect, as gymnasium is the only library that `GymEnv` takes. Raises ValueError for any other.

    >>> with set_gym_backend("gymnasium"):
    ...     env = GymEnv("CartPole-v1")
    """

    def __init__(self, backend: str | ModuleType) -> None:
        name = backend if isinstance(backend, str) else backend.__name__
        if name != "gymnasium":
            raise ValueError(f"the backend {name!r} is not supported: GymEnv takes environments of 'gymnasium' only")

    def set(self) -> None:
        """Nothing: gymnasium is chosen."""

    def __enter__(self) -> set_gym_backend:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


__all__ = ["GymEnv", "GymWrapper", "gym_backend", "set_gym_backend"]
