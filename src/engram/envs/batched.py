"""Several environments that are stepped together, with raw values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from engram.envs.gym_codecs import Codec, Leaf

Array = np.ndarray[Any, Any]


class Autoreset(Enum):
    """When an environment whose episode has ended starts the next one, as gymnasium's vector environments name it."""

    DISABLED = "the caller resets it before the next step"
    SAME_STEP = "in the step that ends it; its last observation comes beside"
    NEXT_STEP = "in the call after, whose action it ignores"


class BatchStep(NamedTuple):
    """What one call of `BatchEngine.step` gives; arrays may be overwritten by the next call.

    `observation` is what the environments show now, batched as gymnasium batches (arrays `[n, ...]`, Dicts of them,
    Tuples of them). `reward` `[n]`, `terminated` and `truncated` bool `[n]`. `last` (SAME_STEP): for each environment
    whose episode ended, its number and the raw last observation of the old episode. `idle` (NEXT_STEP): bool `[n]`,
    where this was a reset and no step; None: nowhere.
    """

    observation: Any
    reward: Array
    terminated: Array
    truncated: Array
    last: Sequence[tuple[int, Any]] = ()
    idle: Array | None = None


class BatchEngine(ABC):
    """`n` environments with the same spaces, stepped together.

    `action` and `leaves` are those of one environment. `leaf.pick` works on batched observations as on single ones.
    """

    n: int
    action: Codec
    leaves: list[Leaf]
    autoreset: Autoreset
    can_reset_some: bool

    @abstractmethod
    def seed(self, seed: int) -> None:
        """The next reset of all starts environment i from `seed + i`."""

    @abstractmethod
    def reset(self, mask: Array | None = None) -> Any:
        """The batched observations after a reset of all, or of those where `mask` (bool `[n]`) holds.

        What stands in the other rows is not to be read.
        Raises ValueError for a mask where `can_reset_some` is False.
        """

    @abstractmethod
    def step(self, actions: Any) -> BatchStep:
        """One step of each. `actions` are batched as gymnasium batches: see `Codec.decode_batch`."""

    def close(self) -> None:
        """Releases what the environments hold."""
