"""Which slots to read."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage

Index = Tensor | tuple[Tensor, ...]

EMPTY = "Cannot sample from an empty storage."


class Sampler(abc.ABC):
    """Chooses which stored steps a batch is made of.

    A sampler of your own is a class with `sample(storage, batch_size) -> (index, info)`.

    Draws come from torch's global generator, or from the buffer's own where it has one.
    """

    def __init__(self) -> None:
        self._generator: torch.Generator | None = None
        self._seed = torch.empty(1, dtype=torch.int64)
        # While a view of it lives, `random_` releases the GIL once instead of four times (torch 2.13).
        self._seed_view = self._seed.view(1)

    @abc.abstractmethod
    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Slots to read: int64 [batch_size] (a tuple (time, strand) of such with ndim=2), and what there is to say.

        Raises:
            RuntimeError: the storage is empty.
        """

    def use_generator(self, generator: torch.Generator | None) -> None:
        """Draws from this generator from now on; None: torch's global one."""
        self._generator = generator

    def draw_seed(self) -> Tensor:
        """int64 [1] from the generator; the same tensor at every call."""
        return self._seed.random_(generator=self._generator)

    def empty(self) -> None:
        """Forgets what was stored."""

    @property
    def ran_out(self) -> bool:
        """Whether an epoch has just ended."""
        return False

    # ---- state ----
    def state_dict(self) -> dict[str, Any]:
        """What must be saved for the draws to go on as they would have."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state."""

    def differences(self, state: dict[str, Any]) -> list[str]:
        """What of a saved state does not fit this sampler."""
        return []

    def __getstate__(self) -> dict[str, Any]:
        # The generator comes with its buffer. Tensors that are sent to another process stay shared with it.
        return {k: v for k, v in self.__dict__.items() if k not in ("_generator", "_seed")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Sampler.__init__(self)
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
