"""A batch on its way through transforms into a storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tensordict import TensorDictBase
from torch import Tensor

from engram.transforms.entries import is_class, mapped


class Writing(NamedTuple):
    """What is written, and where time runs in it."""

    items: Any  #: None: nothing is to be written now
    batch_dims: int = 1  #: of the storage: 1, or 2 for `[envs, time]`
    time_dim: int = 0
    single: bool = False  #: one step, without a time dimension
    in_place: bool = False  #: replaces stored steps: no next piece of what was written before
    resized: bool = False  #: steps are not those of the caller one by one
    #: Steps that a transform holds back, as they would be written if nothing followed: the buffer checks that they fit.
    held: Any = None

    def changed(self, fn: Callable[[Any], Any]) -> Writing:
        """With `fn` applied to all data."""
        held = None if self.held is None else fn(self.held)
        return self._replace(items=None if self.items is None else fn(self.items), held=held)

    @property
    def rows_are_trajectories(self) -> bool:
        """Whether the data have more batch dimensions than the storage: time then runs within a row."""
        any_data = self.held if self.items is None else self.items
        dims = any_data.batch_dims if isinstance(any_data, TensorDictBase) or is_class(any_data) else 0
        return bool(dims > self.batch_dims - self.single)

    def in_order(self) -> Writing:
        """With time as the last batch dimension, also of one step."""
        last = self.batch_dims - 1
        if self.single:
            w = self.changed(lambda x: mapped(x, lambda t: t.unsqueeze(last), lambda td: td.unsqueeze(last)))
            return w._replace(single=False, time_dim=last)
        if self.time_dim == last:
            return self
        return self.changed(lambda x: _moved(x, self.time_dim, last))._replace(time_dim=last)

    def in_form_of(self, other: Writing) -> Writing:
        """With time where `other` has it: what `in_order` did, undone."""
        if other.single:
            last = self.time_dim
            w = self.changed(lambda x: mapped(x, lambda t: t.select(last, 0), lambda td: td.squeeze(last)))
        elif other.time_dim != self.time_dim:
            w = self.changed(lambda x: _moved(x, self.time_dim, other.time_dim))
        else:
            return self
        return w._replace(single=other.single, time_dim=other.time_dim)


def _moved(batch: Any, source: int, target: int) -> Any:
    def of_tensor(t: Tensor) -> Tensor:
        return t.movedim(source, target)

    def of_batch(td: Any) -> Any:
        order = list(range(td.batch_dims))
        order.insert(target, order.pop(source))
        return td.permute(*order)

    return mapped(batch, of_tensor, of_batch)
