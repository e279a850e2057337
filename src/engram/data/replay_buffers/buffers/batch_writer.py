"""Writing of what `add` and `extend` are given: through inverses of transforms, with priorities that come with it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engram.data.replay_buffers.buffers.waiting import deadline_of
from engram.data.replay_buffers.writers.round_robin import write_plan
from engram.errors import QueueFullError
from engram.pytree import get_entry, part_of, stack, to_tensor
from engram.store.indexing import returned_index
from engram.store.rows import expand_slots
from engram.store.steps import Form
from engram.transforms.base import WriteRequest

if TYPE_CHECKING:
    from engram._native import Plan
    from engram.data.replay_buffers.buffers.waiting import Waits
    from engram.data.replay_buffers.samplers.base import Sampler
    from engram.data.replay_buffers.samplers.draw import DrawPlan
    from engram.data.replay_buffers.storages.base import Storage
    from engram.data.replay_buffers.writers.round_robin import Writer
    from engram.store.layout import RowLayout
    from engram.store.packed_rows import PackedRows
    from engram.transforms.compose import Compose


class GivenPriorities:
    """Priorities that come with the data, as one of their entries, for a sampler that has priorities.

    Args:
        key: of the entry; data without it get the priority of new steps.
    """

    def __init__(self, storage: Storage, sampler: Any, key: Any) -> None:
        self._storage, self._sampler, self._key = storage, sampler, key
        self._of_layout: tuple[Any, bool] = (None, True)  # a layout, and whether it has such an entry

    def are_stored(self) -> bool:
        """Whether the stored steps have such an entry, or there are none yet: else data that have it do not fit."""
        layout = self._storage.layout
        if layout is None:
            return True
        if self._of_layout[0] is not layout:
            path = self._key if isinstance(self._key, tuple) else (self._key,)
            self._of_layout = layout, any(leaf.path == path for leaf in layout.leaves)
        return self._of_layout[1]

    def of(self, items: Any, single: bool, time_dim: int) -> Tensor | None:
        """One for each step, in the order of slots; NaN for items without one; None where no item has any.

        Raises ValueError where they are no priorities.
        """
        if isinstance(items, list):
            each = [self.of(item, True, -1) for item in items]
            if all(p is None for p in each):
                return None
            return torch.cat(
                [torch.tensor([torch.nan], dtype=torch.float64, device="cpu") if p is None else p for p in each]
            )
        given = get_entry(items, self._key)
        if given is None:
            return None
        dims = self._storage.ndim - 1 if single else self._storage.ndim
        value = to_tensor(given)
        if not single and time_dim < value.ndim:
            value = value.movedim(time_dim, 0)
        lead = value.shape[:dims]
        n = lead.numel()
        priorities: Tensor = self._sampler.checked_priorities(value.reshape(n, *value.shape[dims:]), n)
        return priorities

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A block in which steps are written and get their priorities, before anybody else writes."""
        # In the order of those who draw, load and save; a turn, so that the rows are there when they get priorities.
        with self._sampler.lock, self._storage.mutex, self._storage.access.turn():
            yield

    def set(self, slots: Tensor | int, priorities: Tensor) -> None:
        """Gives written steps their priorities. Slot -1: the writer refused the step."""
        at = to_tensor(slots).reshape(-1)
        # Of an item's priorities, one would be made of those of items that are gone.
        if self._storage.access.table.rows.item_shape:
            last = torch.tensor(list({slot: i for i, slot in enumerate(at.tolist())}.values()), device="cpu")
            at, priorities = at[last], priorities[last]
        given = ~priorities.isnan() & (at >= 0)
        self._sampler.update_priority(self._storage.from_slots(at[given]), priorities[given], storage=self._storage)


class ColumnRows:
    """Rows of a storage to which a batch is appended as columns: an array or tensor `[*batch, ...]` for each leaf.

    Attributes:
        paths: of the leaves, in the order of the columns.
        index_path: the leaf in which rows store their own index, whose column is ignored; None: there is none.
        ndim: the batch dimensions of the columns.
    """

    def __init__(self, storage: Storage, layout: RowLayout, form: Form) -> None:
        self.layout, self._storage, self._form = layout, storage, form
        self.paths = [leaf.path for leaf in layout.leaves]
        self.index_path = None if form.index_key is None else (form.index_key,)
        self.ndim = form.lead
        self._columns: list[Any] | None = None  # those of which parts were appended last
        self._checked: Plan | None = None

    def append(self, columns: list[Any]) -> bool:
        """Writes a batch behind the newest row. False: nothing was written, because it is not of this layout, ..."""
        storage = self._storage
        with storage.mutex:
            native, layout = storage.native, storage.layout
            if native.push is None or native.appended is None or layout is not self.layout:
                return False
            return native.appended.push_columns(columns, self._form)

    def append_part(self, columns: list[Any], first: int, steps: int) -> bool:
        """As `append`, of so many steps of columns `[time, ...]`, which are arrays, and one list from call to call."""
        storage = self._storage
        with storage.mutex:
            native, layout = storage.native, storage.layout
            rows = native.appended
            if native.push is None or rows is None or layout is not self.layout:
                return False
            if columns is not self._columns:
                self._check(columns, rows)
            return self._checked is not None and rows.push_part(self._checked, first, steps)

    def _check(self, columns: list[Any], rows: PackedRows) -> None:
        lead = (1,) * (self.ndim - 1)
        shaped = [None if column is None else column.reshape(*lead, *column.shape) for column in columns]
        self._checked = rows.plan_columns(shaped, self._form)
        self._columns = columns


class BatchWriter:
    """Writes data into a storage as a buffer does; `BatchReader` is its counterpart.

    Args:
        plan: how the sampler draws from the storage.
        transform: the inverses of its transforms are applied to the data.
        time_dim: the dimension of a batch that is time.
        priorities: what becomes of priorities in the data; None: they are entries as any other.
        waits: wait for those who sample, before each write.
    """

    def __init__(
        self,
        storage: Storage,
        writer: Writer,
        sampler: Sampler,
        plan: DrawPlan,
        transform: Compose,
        time_dim: int,
        priorities: GivenPriorities | None,
        waits: Waits,
    ) -> None:
        self._storage, self._writer, self._sampler, self._time_dim = storage, writer, sampler, time_dim
        self._check_rows, self._tells_sampler = plan.check_rows, plan.is_told
        self._write_rows, is_behind = write_plan(writer)
        #: Whether the storage may check and append in one call, if no priorities come with the data.
        self.pushes = is_behind and self._check_rows is None and not self._tells_sampler
        #: How one step lies that is written, and a batch.
        self.form_of_step = Form(storage.ndim - 1, -1, writer.index_key)
        self.form = Form(storage.ndim, time_dim, writer.index_key)
        self.transform = transform
        self.priorities = priorities
        self._waits = waits
        self._column_rows: ColumnRows | None = None
        self._makings = 0  # of data that ordered transforms changed and that were written without their lock

    def write(
        self, data: Any, *, single: bool, update_priority: bool | None = None, timeout: float | None = None
    ) -> Any:
        """Writes one step or a batch; returns what `add` or `extend` do. If it is refused, transforms are as before.

        Raises:
            TimeoutError: those who sample are too far behind for longer than `timeout` seconds.
        """
        deadline = deadline_of(timeout)
        self._waits.await_room_until(deadline, "add" if single else "extend")
        if self.transform.transforms:
            return self._write_through(data, single, update_priority, deadline)
        time_dim = -1 if single else self._time_dim
        batch = self.as_batch(data, time_dim) if type(data) is list and not single else data
        priorities = None if update_priority is False else self._priorities_of(batch, single, time_dim)
        slots = self._append(batch, single, time_dim, priorities, deadline)
        return self._index_of(slots, single)

    @property
    def column_rows(self) -> ColumnRows | None:
        """The rows to which columns can be appended as they are; None where `write` does more than that."""
        given, layout = self.priorities, self._storage.layout
        native = self._storage.native
        if layout is None or native.push is None or not self.pushes or self.transform.transforms:
            return None
        if given is not None and given.are_stored():
            return None
        rows = self._column_rows
        if rows is None or rows.layout is not layout:
            rows = self._column_rows = ColumnRows(self._storage, layout, self.form)
        return rows

    def flush(self) -> Any:
        """Writes the steps that transforms hold back; returns their indices."""
        transform, storage = self.transform, self._storage
        self._waits.await_room(what="flush_transforms")
        _, slots = self._made(lambda: transform.flush(WriteRequest(None, storage.ndim, storage.ndim - 1)))
        return self._index_of(slots, False)

    def in_place(self, items: Any) -> Any:
        """Data that replace stored steps, as transforms store them: they follow nothing that was written before."""
        transform, storage = self.transform, self._storage
        if not transform.transforms:
            return items
        if not transform.stream.inverse_is_ordered:
            return transform.inverse_stream(WriteRequest(items, storage.ndim, self._time_dim, in_place=True)).items
        with storage.mutex:
            if type(items) is list:
                items = stack(items, self._time_dim)
            before = transform.remember()
            try:
                return transform.inverse_stream(WriteRequest(items, storage.ndim, self._time_dim, in_place=True)).items
            except BaseException:
                transform.undo(before)
                raise

    def as_batch(self, items: list[Any], time_dim: int) -> Any:
        """A list of items as one batch; storages of items take the list."""
        return self._storage.access.table.rows.as_batch(items, time_dim)

    def _write_through(self, items: Any, single: bool, update_priority: bool | None, deadline: float | None) -> Any:
        transform, storage = self.transform, self._storage
        if not transform.stream.inverse_is_ordered:
            made = transform.inverse_stream(WriteRequest(items, storage.ndim, self._time_dim, single))
            slots = self._write_made(made, update_priority, deadline)
        else:

            def make() -> WriteRequest:
                batch = stack(items, self._time_dim) if type(items) is list else items
                return transform.inverse_stream(WriteRequest(batch, storage.ndim, self._time_dim, single))

            made, slots = self._made(make, update_priority, deadline)
        return self._index_of(slots, made.single and not made.resized)

    def _made(
        self, make: Callable[[], WriteRequest], update_priority: bool | None = None, deadline: float | None = None
    ) -> tuple[WriteRequest, Any]:
        """What transforms make of data, and the slots to which it was written, before anybody else writes. Where it is
        refused, transforms are as before.

        In a queue that may be full what they make is written when they are done, without their lock. Where nothing of
        it is, transforms are as before, too, unless they have changed other data since.
        """
        transform = self.transform
        with self._writing():
            before = transform.remember()
            try:
                made = make()
                if not self._waits.fills_up():
                    return made, self._write_made(made, update_priority)
            except BaseException:
                transform.undo(before)
                raise
            self._makings = number = self._makings + 1
        done = [0]
        try:
            return made, self._write_made(made, update_priority, deadline, done)
        except BaseException:
            with self._writing():
                if not done[0] and number == self._makings:
                    transform.undo(before)
            raise

    def _write_made(
        self,
        made: WriteRequest,
        update_priority: bool | None = None,
        deadline: float | None = None,
        done: list[int] | None = None,
    ) -> Any:
        """Writes what transforms made of the data, if anything; returns slots. `done`: as `_append`."""
        items, time_dim = made.items, -1 if made.single else made.time_dim
        if made.held is not None:
            # What waits in a transform must fit, too: an error later would belong to somebody else's data.
            self._writer.check_mutable("extend")
            self._storage.check(made.held, single=made.single, time_dim=time_dim, index_key=self._writer.index_key)
        if items is None:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        if type(items) is list:
            items = self.as_batch(items, time_dim)
        priorities = None if update_priority is False else self._priorities_of(items, made.single, time_dim)
        return self._append(items, made.single, time_dim, priorities, deadline, done)

    def _append(
        self,
        items: Any,
        single: bool,
        time_dim: int,
        priorities: Tensor | None,
        deadline: float | None,
        done: list[int] | None = None,
    ) -> Any:
        """Writes steps with their priorities; returns slots. Of a queue it waits for room, outside of all locks.

        `done`: is told how many steps were written by now, where it waits.
        """
        try:
            with self._storage.mutex if priorities is None else self._writing():
                return self._append_now(items, single, time_dim, priorities)
        except QueueFullError as full:
            return self._append_rest(full, items, single, time_dim, priorities, deadline, [0] if done is None else done)

    def _append_rest(
        self, full: QueueFullError, items: Any, single: bool, time_dim: int, priorities: Tensor | None,
        deadline: float | None, written: list[int],
    ) -> Any:  # fmt: skip
        """As `_append`, where the queue had no room for all of them: a part at a time."""
        steps, done, envs = full.steps, full.done, math.prod(self._storage.env_shape)
        slots, what = [self._written_of(full)], "add" if single else "extend"
        incarnation = self._storage.access.incarnation
        while done < steps:
            written[0] = done
            n = self._waits.await_place(deadline, what, done, steps, incarnation)
            part = items if single else part_of(items, time_dim, done, done + n)
            own = None if priorities is None else priorities[done * envs : (done + n) * envs]
            try:
                with self._storage.mutex if own is None else self._writing():
                    slots.append(to_tensor(self._append_now(part, single, time_dim, own)).reshape(-1))
                done += n
            except QueueFullError as again:  # another writer took the room, or some of it
                slots.append(self._written_of(again))
                done += again.done
        return int(slots[-1]) if single and envs == 1 else torch.cat(slots)

    def _written_of(self, full: QueueFullError) -> Tensor:
        """The slots of what was written before a queue was full."""
        if not full.done:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        return to_tensor(expand_slots(to_tensor(full.slots)[: full.done], self._storage.lanes.envs))

    def _append_now(self, items: Any, single: bool, time_dim: int, priorities: Tensor | None) -> Any:
        """Writes steps with their priorities; returns slots. The caller holds the mutex."""
        storage = self._storage
        if self._check_rows is not None:
            checked = storage.check(items, single=single, time_dim=time_dim, index_key=self._writer.index_key)
            self._check_rows(checked.steps * math.prod(storage.env_shape))
        try:
            slots = self._write_rows(storage, items, single, time_dim)
        except QueueFullError as full:
            if priorities is not None and full.done:
                self._set_priorities(written := self._written_of(full), priorities[: len(written)])
            raise
        if priorities is not None:
            self._set_priorities(slots, priorities)
        return slots

    def _set_priorities(self, slots: Any, priorities: Tensor) -> None:
        assert self.priorities is not None
        self.priorities.set(slots, priorities)

    def _priorities_of(self, items: Any, single: bool, time_dim: int) -> Tensor | None:
        given = self.priorities
        return given.of(items, single, time_dim) if given is not None and given.are_stored() else None

    def _writing(self) -> contextlib.AbstractContextManager[Any]:
        given = self.priorities
        return self._storage.mutex if given is None or not given.are_stored() else given.writing()

    def _index_of(self, slots: Any, single: bool) -> Any:
        """What `add` or `extend` returns; a sampler of the user's own is told it."""
        storage = self._storage
        index = returned_index(slots, storage.ndim, storage.env_shape, single=single)
        if self._tells_sampler:
            with self._sampler.lock:
                if type(index) is int:
                    self._sampler.add(index)
                elif len(index):
                    self._sampler.extend(index)
        return index
