"""What `set` of a storage does: it replaces rows that are stored, and appends those that follow directly on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engram import pytree
from engram.pytree import to_tensor
from engram.store.indexing import last_of_each, select
from engram.store.rows import Checked
from engram.store.steps import Steps
from engram.store.table import Replacing, Table


class _Methods(Protocol):
    """What a `set` writes by: a table, or methods of a user's child."""

    def fit(self, steps: Steps) -> Checked: ...
    def append(self, checked: Checked, most: int | None = None) -> Tensor | int: ...
    def prepare_replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> Callable[[], None]: ...
    def overwrite(self, slots: Tensor, steps: Steps) -> None: ...


class SetPlan(NamedTuple):
    """The time steps that a `set` writes.

    Attributes:
        steps: int64 [n].
        stored: bool [n], of the steps that hold rows: these are replaced, the others appended.
        rows: a batch with a row for each.
        as_new: whether what is replaced makes way for new rows, which get sequences of their own.
    """

    steps: Tensor
    stored: Tensor
    rows: Any
    as_new: bool


class RowSetter:
    """Writes at any index of a table; the caller holds its mutex.

    Args:
        inner: what writes, of a user's class; None: the rows of the table, which may become others for their sequences.
    """

    def __init__(self, table: Table, inner: _Methods | None, replacing: Replacing) -> None:
        self._table, self._inner, self._replacing = table, inner, replacing

    def set(self, cursor: Any, given: Steps, *, new_rows: bool) -> Tensor | int | None:
        """Writes rows; with `new_rows` those that take the place of others are new ones, too.

        Returns the slots of those that are appended; None: there are none.
        """
        index = self._as_new_steps(cursor, given.items) if isinstance(cursor, slice) else cursor
        plan = self._plan(index, given.items, new_rows)
        if plan is not None:
            return self._run(plan, given, new_rows)
        self.replace(index, given)
        if new_rows and (steps := _listed_steps(index)) is not None:
            self._forget_removed(steps)
        return None

    def _plan(self, index: Any, data: Any, new_rows: bool) -> SetPlan | None:
        """Which steps are replaced and which appended; None: the index is one of stored rows."""
        table, steps = self._table, _listed_steps(index)
        if steps is None:
            return None
        stored, following = self._are_stored(steps), table.lanes.next_slots(len(steps))
        if new_rows and torch.equal(steps, following):
            stored[:] = False  # round the ring: the newest rows take the place of the oldest
        # A new row can take the place of any stored one where that gets a sequence of its own.
        as_new = new_rows and table.replaces_rows and table.rows.ndim == 1
        as_new = as_new and table.lanes.store.lanes == 1
        if bool(stored.all()) and not as_new:
            return None
        rows = self._for_steps(data, len(steps), np.ndim(index) == 0 and not isinstance(index, slice | range))
        goes_round = not bool(stored.any()) and torch.equal(steps, following)  # and may come to a step again
        if not goes_round and (last := last_of_each(steps)) is not None:
            steps, stored, rows = steps[last], stored[last], pytree.select_rows(rows, last)
        new = steps[~stored]
        differs = new != following[: len(new)]
        if bool(differs.any()):
            raise IndexError(
                f"index {new[differs][0]} has not been written, and does not follow directly on the "
                f"{len(table.lanes)} stored steps: the next is {following[: len(new)][differs][0]}. Nothing was written"
            )
        return SetPlan(steps, stored, rows, as_new)

    def _for_steps(self, items: Any, steps: int, at_one: bool) -> Any:
        """Data for so many time steps (`at_one`: the index is an int): one step is repeated."""
        rows = self._table.rows
        if at_one:
            return rows.each(items, (), 1, rows.ndim - 1)
        return rows.each(rows.as_batch(items, 0), (steps,), steps)

    def _run(self, plan: SetPlan, given: Steps, new_rows: bool) -> Tensor | int | None:
        steps, stored, rows, as_new = plan
        replaces, appends = bool(stored.any()), not bool(stored.all())
        if appends:
            new = pytree.select_rows(rows, ~stored) if replaces else rows
            checked = (self._inner or self._table.rows).fit(given._replace(items=new, lead=self._table.rows.ndim))
            if checked.steps != len(steps) - int(stored.sum()):
                raise ValueError(f"{len(steps)} steps are indexed, the data have others; nothing was written")
        if replaces:
            replaced = pytree.select_rows(rows, stored) if appends else rows
            (self._replace_by_new if as_new else self.replace)(steps[stored], given._replace(items=replaced))
            if new_rows and not as_new:
                self._forget_removed(steps[stored])
        return (self._inner or self._table.rows).append(checked) if appends else None

    def _forget_removed(self, steps: Tensor) -> None:
        """Rows of these time steps are new ones: none of them was removed."""
        lanes = self._table.lanes
        if lanes.store.removed_rows:
            slots = (steps.reshape(-1, 1) * lanes.envs + torch.arange(lanes.envs, device="cpu")).reshape(-1)
            with lanes.exclusive("replacing rows"):
                lanes.store.note_edits(slots, True)

    def replace(self, index: Any, steps: Steps) -> None:
        """Replaces stored rows in place: they are the same steps with other values."""
        table = self._table
        with table.lanes.exclusive("changing stored rows"):
            selection, rows = select(table.lanes.store, index, table.rows.env_shape), table.rows
            slots = selection.slots
            if selection.shape == () and rows.overwrite_one(slots, steps):
                return
            items = rows.each(steps.items, selection.shape, len(slots))
            if (last := last_of_each(slots)) is not None:  # of a row that is named twice the last counts
                slots, items = slots[last], pytree.select_rows(items, last)
            (self._inner or self._table.rows).overwrite(slots, steps._replace(items=items, own_index=slots))

    def _replace_by_new(self, slots: Tensor, steps: Steps) -> None:
        """Puts new rows in the place of stored ones: each gets a sequence of its own."""
        table = self._table
        table.carry_sequences(self._replacing)
        checked = (self._inner or self._table.rows).fit(steps._replace(lead=self._table.rows.ndim, own_index=slots))
        if checked.steps != len(slots):
            raise ValueError(f"{len(slots)} steps are indexed, the data have {checked.steps}; nothing was written")
        with table.exclusive("replacing rows"):
            (self._inner or self._table.rows).prepare_replace(checked, torch.arange(len(slots), device="cpu"), slots)()
            table.lanes.store.count_replaced(slots)

    def _are_stored(self, steps: Tensor) -> Tensor:
        """Which of these time steps hold rows: bool [n]. IndexError: one lies outside the storage."""
        lanes = self._table.lanes
        room = lanes.capacity // lanes.envs
        if bool((steps >= room).any()):
            raise IndexError(
                f"index {int(steps.max())} has not been written, and lies outside the {room} steps that the storage "
                "has room for; nothing was written"
            )
        return lanes.store.generations(steps * lanes.envs) >= 0

    def _as_new_steps(self, index: slice, items: Any) -> slice | range:
        """A slice as a range of time steps where it has as many of these as the data, and not all are stored."""
        table = self._table
        start, stop = index.start or 0, table.max_size if index.stop is None else index.stop
        if type(start) is not int or type(stop) is not int or index.step not in (None, 1):
            return index
        if not 0 <= start < stop or stop - start != _length(items):
            return index
        is_single = not isinstance(items, list) and bool(len(table.lanes)) and table.rows.is_single(items)
        if is_single or (table.max_size is not None and stop > table.max_size):
            return index
        steps = range(start, stop)
        return index if bool(self._are_stored(torch.tensor(steps, device="cpu")).all()) else steps


def _length(items: Any) -> int | None:
    """The length of a sequence or of the first dimension of a batch; None of a single step."""
    if isinstance(items, list | tuple | range):
        return len(items)
    shape = getattr(items, "shape", None)
    if shape is None:
        leaves = pytree.describe(items, 0)[1]
        shape = pytree.shape_of(leaves[0][1] if leaves else None)
    return int(shape[0]) if len(shape) else None


def _listed_steps(index: Any) -> Tensor | None:
    """The time steps of an int, or of a range, list, array or tensor of ints from 0 on; None: it is another index."""
    if isinstance(index, range):
        index = list(index)
    if isinstance(index, bool | np.bool_ | tuple | slice | str) or index is None or index is ...:
        return None
    try:
        steps = to_tensor(index)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    if steps.dtype == torch.bool or steps.is_floating_point() or steps.is_complex() or steps.ndim > 1:
        return None
    steps = steps.reshape(-1).cpu().to(torch.int64)
    return steps if len(steps) and int(steps.min()) >= 0 else None
