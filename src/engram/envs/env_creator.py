"""`EnvCreator`: a function that creates an environment, with its arguments; `env_creator` makes one of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engram._advice import advised


@advised
class EnvCreator:
    """A picklable call of `create_env_fn` with `create_env_kwargs`, for collectors and `ParallelEnv`.

    `share_memory` has no effect: each environment has its own transforms.

    >>> from engram.envs import GymEnv, SerialEnv
    >>> SerialEnv(2, EnvCreator(GymEnv, {"name_or_env": "CartPole-v1"})).batch_size
    torch.Size([2])
    """

    def __init__(
        self,
        create_env_fn: Callable[..., Any],
        create_env_kwargs: dict[str, Any] | None = None,
        share_memory: bool = True,
        **kwargs: Any,
    ) -> None:
        if not callable(create_env_fn):
            raise TypeError(f"create_env_fn must be callable, got a {type(create_env_fn).__name__}")
        self.create_env_fn = create_env_fn
        self.create_env_kwargs = {**(create_env_kwargs or {}), **kwargs}

    def __call__(self, **kwargs: Any) -> Any:
        return self.create_env_fn(**{**self.create_env_kwargs, **kwargs})

    def make_variant(self, **kwargs: Any) -> EnvCreator:
        """A creator of the same environment with these arguments changed."""
        return EnvCreator(self.create_env_fn, {**self.create_env_kwargs, **kwargs})

    def init_(self) -> EnvCreator:
        """Returns the creator itself."""
        return self

    def __repr__(self) -> str:
        return f"EnvCreator({self.create_env_fn!r}, {self.create_env_kwargs!r})"


def env_creator(fun: Callable[..., Any]) -> EnvCreator:
    """An `EnvCreator` of a function that creates an environment, also as its decorator.

    >>> from engram.envs import GymEnv
    >>> @env_creator
    ... def cartpole():
    ...     return GymEnv("CartPole-v1")
    >>> cartpole().batch_size
    torch.Size([])
    """
    return EnvCreator(fun)
