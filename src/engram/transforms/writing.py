"""A batch on its way through transforms into a storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from engram.transforms.entries import has_batch_dims, mapped

Inverse = Callable[[Any], Any]


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

    def as_steps(self) -> Writing:
        """`in_order`, where the data say what their batch dimensions are; what replaces stored steps stays as it is.

        Raises:
            ValueError: there are no steps.
        """
        if self.in_place or not has_batch_dims(self.items):
            return self
        if 0 in self.items.batch_size:
            raise ValueError("nothing to add: the batch has no steps")
        return self.in_order()

    def inverted(self, inv: Inverse, who: Any, once: Inverse) -> Writing:
        """With an inverse applied, which may make nothing of the data for now (None), fewer steps or more.

        Args:
            who: the transform whose inverse it is.
            once: the same, for data after which nothing comes: it leaves nothing behind.

        Raises:
            TypeError: these replace stored steps, and the inverse gives another number of steps.
        """
        items = self.items
        if items is None and self.held is None:
            return self
        made = items if items is None else (once if self.in_place else inv)(items)
        held = None if self.held is None else once(self.held)
        if made is items and held is self.held:
            return self
        held = None if held is None or 0 in (_sizes(held) or ()) else held
        before, after = _sizes(items), _sizes(made)
        if before == after and made is not None:
            return Writing(made, self.batch_dims, self.time_dim, self.single, self.in_place, self.resized, held)
        if 0 in (after or ()) and 0 not in (before or ()):
            made = None
        written = self._replace(items=made, held=held)
        if not written.steps_differ_from(self):
            return written
        if self.in_place:
            raise TypeError(
                f"{who.kind} makes another number of steps of what is written, so that it cannot replace stored steps; "
                "write to rb.storage, past the transforms"
            )
        return written._replace(resized=True)

    def steps_differ_from(self, other: Writing) -> bool:
        """Whether there are not as many steps here as there."""
        if self.items is None or other.items is None:
            return self.items is not other.items
        mine, its, dims = _sizes(self.items), _sizes(other.items), self.batch_dims - self.single
        return mine is not None and its is not None and mine[:dims] != its[:dims]

    @property
    def rows_are_trajectories(self) -> bool:
        """Whether the data have more batch dimensions than the storage: time then runs within a row."""
        any_data = self.held if self.items is None else self.items
        dims = any_data.batch_dims if has_batch_dims(any_data) else 0
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
        if other.single and not self.single:
            last = self.time_dim
            w = self.changed(lambda x: mapped(x, lambda t: t.select(last, 0), lambda td: td.squeeze(last)))
        elif other.time_dim != self.time_dim:
            w = self.changed(lambda x: _moved(x, self.time_dim, other.time_dim))
        else:
            return self
        return w._replace(single=other.single, time_dim=other.time_dim)


def _sizes(batch: Any) -> tuple[int, ...] | None:
    """Its batch dimensions; None where it does not say what they are."""
    return tuple(batch.batch_size) if has_batch_dims(batch) else None


def _moved(batch: Any, source: int, target: int) -> Any:
    def of_tensor(t: Tensor) -> Tensor:
        return t.movedim(source, target)

    def of_batch(td: Any) -> Any:
        order = list(range(td.batch_dims))
        order.insert(target, order.pop(source))
        return td.permute(*order)

    return mapped(batch, of_tensor, of_batch)
