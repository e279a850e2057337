"""Data on their way into a table: one step, or a batch of steps, in the form that users gave."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

import engram._native as _native
from engram import pytree
from engram.store.layout import NO_TENSOR, RowLayout


class Form(NamedTuple):
    """How data lie that native calls check and append at once (`PackedRows.push`); the fields are those of `Steps`.

    A buffer has two: that of one step, and that of a batch.
    """

    lead: int
    time: int
    index_key: str | None = None


class Steps(NamedTuple):
    """Data that are written. Made once, where they come in: by `check` and `set` of a storage.

    Native calls that check and append at once (`PackedRows.push`) take the same data without it.

    Attributes:
        items: in the form in which they came.
        lead: how many of their first dimensions are no part of a row.
        time: which of these is time; the others are of environments. -1: none is, all rows are of one time step.
        index_key: where each row also stores its own index; None: nowhere.
        own_index: that index, int64 [steps]; None: the one that `append` will give.

    Example:
        >>> steps = Steps.given({"x": torch.zeros(3, 4, 2)}, False, 1, ndim=2)
        >>> steps.shape, steps.times, steps.env_shape
        ((3, 4), 4, (3,))
    """

    items: Any
    lead: int = 1
    time: int = 0
    index_key: str | None = None
    own_index: Tensor | None = None

    @classmethod
    def given(
        cls,
        items: Any,
        single: bool,
        time_dim: int = 0,
        index_key: str | None = None,
        index: Tensor | None = None,
        *,
        ndim: int = 1,
    ) -> Steps:
        """From the arguments of `check`, for a table with so many batch dimensions."""
        return cls(items, ndim - 1, -1, index_key, index) if single else cls(items, ndim, time_dim, index_key, index)

    @property
    def arguments(self) -> tuple[Any, bool, int, str | None, Tensor | None]:
        """Those of `check`."""
        return self.items, self.is_single, self.time, self.index_key, self.own_index

    @property
    def is_single(self) -> bool:
        """Whether they are one time step, without a dimension for time."""
        return self.time < 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions that are no part of a row. ValueError: the data have fewer, or no tensor."""
        shape = getattr(self.items, "shape", None)
        if shape is None:
            _, leaves = pytree.describe(self.items, self.lead)
            if not leaves:
                raise ValueError(NO_TENSOR)
            shape = pytree.shape_of(leaves[0][1])
        if len(shape) < self.lead:
            raise ValueError(f"the data have shape {list(shape)}; this storage takes {self.lead} batch dimensions")
        return tuple(shape[: self.lead])

    @property
    def times(self) -> int:
        """How many time steps they are."""
        return 1 if self.is_single else self.shape[self.time]

    @property
    def env_shape(self) -> tuple[int, ...]:
        """The dimensions of environments."""
        return tuple(d for i, d in enumerate(self.shape) if i != self.time)

    def with_one_env_dim(self) -> Steps:
        """The same with the dimensions of environments as one, before time or behind it.

        Raises:
            ValueError: time is neither the first nor the last dimension.
        """
        if self.time not in (-1, 0, self.lead - 1):
            raise ValueError(f"time must be the first or the last batch dimension, got {self.time} of {self.lead}")
        envs = len(self.env_shape)
        if envs < 2:
            return self
        first = 1 if self.time == 0 else 0
        merged = pytree.flatten_dims(self.items, first, first + envs - 1)
        return self._replace(items=merged, lead=self.lead - envs + 1, time=min(self.time, 1))

    def plan(
        self, layout: RowLayout, extra: tuple[str, Any] | None = None, codec: _native.Codec | None = None
    ) -> _native.Plan:
        """As `RowLayout.plan`."""
        plan: _native.Plan = layout.plan(self.items, self.lead, self.time, extra, codec)
        return plan

    def time_first(self) -> Any:
        """The data with time as the first dimension; lists and single steps as they are."""
        return self.items if self.is_single or type(self.items) is list else pytree.move_dim(self.items, self.time, 0)
