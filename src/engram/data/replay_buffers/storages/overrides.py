"""Methods in TorchRL's form that a child of one of our storages overrides: buffers call them.

`set`, `get` and `_empty` are what TorchRL's buffers call of a storage, so its users' children override these. Ours call
`check` and `append`, `read` and `empty`, by native calls where they can. A child that overrides one of the former gets
the latter made of it, when its class is made; no other class pays for that.

What such a `set` hands on, and what such a `get` returns, may have other keys, shapes and dtypes than the buffer's
batches: rows are checked, and the storage made, when they reach the `set` of ours; `leaf` and `column` give the entries
of what `get` returns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from engram import pytree
from engram.pytree import KeyPath, format_key
from engram.store.indexing import stored_slots
from engram.store.layout import LeafSpec
from engram.store.tables import Checked, Rows, expand_slots


class _ToSet(NamedTuple):
    """A batch that will be handed to a `set`."""

    items: Any
    single: bool
    time_dim: int
    index_key: str | None


def route_to_overrides(cls: Any) -> None:
    """Lets buffers call what `cls`, a user's child of one of our storages, overrides in TorchRL's form."""
    own = cls._overrides
    if "set" in own and "check" not in own and "append" not in own:
        _route_writes(cls)
    if "get" in own and "read" not in own:
        _route_reads(cls, own)
    if "_empty" in own and "empty" not in own:
        _route_empty(cls)


def _route_writes(cls: Any) -> None:
    def check(
        self: Any, items: Any, single: bool, time_dim: int = 0, index_key: str | None = None, index: Any = None
    ) -> Checked:
        n = 1 if single else count_steps(items, time_dim)
        if not n:
            raise ValueError("nothing to add: the batch has no steps")
        return Checked(n, _ToSet(items, single, time_dim, index_key))

    def append(self: Any, checked: Checked, most: int | None = None) -> Tensor:
        given = checked.data
        n = checked.steps if most is None else min(most, checked.steps)
        with self.mutex, self._turn(), self._setting_new_rows():
            lanes = self.lanes
            written, following = (0, None) if lanes is None else (lanes.write_count, self._next_steps(n + 1)[n:])
            steps = self._next_steps(n)
            data = given.items
            if not given.single:
                data = data if isinstance(data, list) else pytree.move_dim(data, given.time_dim, 0)
                if n < checked.steps:
                    data = data[:n] if isinstance(data, list) else pytree.select_rows(data, torch.arange(n))
            _set(self, int(steps[0]) if given.single else steps, data, given.index_key)
            lanes = self.lanes
            taken = None if lanes is None or lanes.write_count < written + n * lanes.envs else self._next_steps(1)
            if lanes is None or taken is None or (following is not None and not torch.equal(taken, following)):
                raise RuntimeError(f"{cls.__name__}.set was given {n} steps: it must hand all of them to super().set")
            if following is None:  # only now it is known where the ring ends
                at, room = int(taken), lanes.store.lane_capacity
                steps = at - at % room + (at + torch.arange(-n, 0)) % room
        return torch.as_tensor(expand_slots(steps, lanes.envs))

    def assign(self: Any, index: Any, items: Any, index_key: str | None) -> None:
        with self.mutex:
            _set(self, index, items, index_key)

    def _set(self: Any, index: Any, data: Any, index_key: str | None) -> None:
        before, self._index_key = self._index_key, index_key  # which a `set` in TorchRL's form does not hand on
        try:
            self.set(index, data)
        finally:
            self._index_key = before

    def expect_sequences(self: Any, by_set: bool = False) -> None:
        if not by_set:
            raise TypeError(
                f"{cls.__name__}.set is called for rows that follow on others, and this writer puts rows in the place "
                "of any: use another writer, or override check and overwrite of the storage"
            )
        super(cls, self)._expect_sequences(by_set)

    cls.check, cls.append, cls._assign = check, append, assign
    cls._check_rows = lambda self, items, *args: super(cls, self).check(items, False, 0, *args)
    cls._append_rows = lambda self, checked: super(cls, self).append(checked)
    cls._expect_sequences = expect_sequences
    cls.supports_conditional_update = False


def _route_reads(cls: Any, own: frozenset[str]) -> None:
    def read(
        self: Any,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        sequences: bool = False,
    ) -> Rows:
        with self.mutex:
            counted = self._generations(slots)
            absent = torch.nonzero(counted < 0).reshape(-1).tolist()
            if absent:
                return Rows(None, absent=absent)
            batch = self.get(self.from_slots(slots))
            replaced = torch.nonzero(self._generations(slots) != counted).reshape(-1).tolist()  # by other processes
        if replaced:
            return Rows(None, absent=replaced)
        return rows_of(batch, counted if sequences else None, shape, extra)

    def leaf(self: Any, path: KeyPath) -> LeafSpec | None:
        if not len(self) or self.lanes is None:
            return None
        value = _entry(self.read(stored_slots(self.lanes.store)[:1]).batch, path)
        return None if value is None else LeafSpec(path, value.dtype, tuple(value.shape[1:]))

    def column(self: Any, path: KeyPath, slots: Tensor) -> Tensor:
        lanes = self.lanes
        batch = self.read(torch.as_tensor(expand_slots(slots, lanes.envs))).batch
        if batch is None:  # other processes replace some of them
            replaced: Tensor = super(cls, self).column(path, slots)
            return replaced
        values = _entry(batch, path)
        if values is None:
            raise KeyError(f"the stored steps have no {format_key(path)}")
        return values.reshape(len(slots), *self.env_shape, *values.shape[1:])

    if "column" not in own and "leaf" not in own:
        cls.leaf, cls.column = leaf, column
    cls.read = read
    cls._read_rows = lambda self, *args: super(cls, self).read(*args)
    cls.supports_conditional_update = False


def rows_of(batch: Any, sequences: Tensor | None, shape: tuple[int, ...] | None, extra: dict[str, Any] | None) -> Rows:
    """What a `get` returned, as a `read` returns it: reshaped, with further entries."""
    if isinstance(batch, list):  # which a collate function makes a batch of
        return Rows(batch, sequences=sequences)
    if shape is not None:
        batch = pytree.map_outermost(batch, lambda part: part.reshape(*shape, *part.shape[1:]))
    if extra and pytree.has_keys(batch):
        batch = pytree.copy_containers(batch)
        for key, value in extra.items():
            pytree.set_per_item(batch, key, value, 1 if shape is None else len(shape))
    return Rows(batch, sequences=sequences)


def _entry(batch: Any, path: KeyPath) -> Tensor | None:
    """One entry of a batch, or of each item of a list; None: not all have it."""
    if not isinstance(batch, list):
        value = pytree.get_entry(batch, path)
        return None if value is None else torch.as_tensor(value)
    values = [pytree.get_entry(item, path) for item in batch]
    return None if any(value is None for value in values) else torch.stack([torch.as_tensor(v) for v in values])


def _route_empty(cls: Any) -> None:
    def empty(self: Any, reset_count: bool = True) -> None:
        with self._replacing("empty"):
            self._empty()
            super(cls, self).empty(reset_count)

    cls.empty = empty


def count_steps(items: Any, time_dim: int) -> int:
    """The steps of a batch along the dimension of time; of a list its items."""
    if isinstance(items, list):
        return len(items)
    shape = pytree.shape_of(first_leaf(items)) if not hasattr(items, "shape") else items.shape
    if len(shape) <= time_dim:
        raise ValueError("extend takes a batch, found a single step; use add. Nothing was written")
    return int(shape[time_dim])


def first_leaf(items: Any) -> Any:
    """The first leaf of data; None where they have none."""
    leaves = pytree.describe(items, 0)[1]
    return leaves[0][1] if leaves else None
