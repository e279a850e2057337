"""Methods in TorchRL's form that a child of one of our storages overrides: buffers call them.

`set`, `get` and `_empty` are what TorchRL's buffers call of a storage, so its users' children override these. Ours call
`check` and `append`, `read` and `empty`, by native calls where they can. A child that overrides one of the former gets
the latter made of it, when its class is made; no other class pays for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engram import pytree
from engram.store.tables import Rows, expand_slots


class Checked(NamedTuple):
    """A batch that fits the storage and can be written: `steps` time steps."""

    steps: int
    data: Any


class _ToSet(NamedTuple):
    """A checked batch that will be handed to a `set`."""

    items: Any
    single: bool
    time_dim: int
    index_key: str | None
    plan: Checked  #: as the storage itself would write it


def route_to_overrides(cls: Any, ours: Any) -> None:
    """Lets buffers call what `cls`, a user's child of `ours`, overrides of its methods in TorchRL's form."""

    own = {name for kind in cls.__mro__[: cls.__mro__.index(ours)] for name in vars(kind)}
    if "set" in own and "check" not in own and "append" not in own:
        _route_writes(cls)
    if "get" in own and "read" not in own:
        _route_reads(cls)
    if "_empty" in own and "empty" not in own:
        _route_empty(cls)
    if own & {"get", "read", "column", "leaf"}:
        cls._row_table = cls._row_source = property(lambda self: None)  # else native calls read packed rows
        cls._read_many = lambda self, *args, **kwargs: None


def _route_writes(cls: Any) -> None:
    def check(
        self: Any, items: Any, single: bool, time_dim: int = 0, index_key: str | None = None, index: Any = None
    ) -> Checked:
        plan = super(cls, self).check(items, single, time_dim, index_key, index)
        return Checked(plan.steps, _ToSet(items, single, time_dim, index_key, plan))

    def append(self: Any, checked: Checked, most: int | None = None) -> Tensor:
        given = checked.data
        n = checked.steps if most is None else min(most, checked.steps)
        with self.mutex, self._setting_new_rows():
            following, lanes = self._next_steps(n + 1), self.lanes
            steps, written = following[:n], lanes.write_count
            data = given.items
            if not given.single:
                data = data if isinstance(data, list) else pytree.move_dim(data, given.time_dim, 0)
                if n < checked.steps:
                    data = data[:n] if isinstance(data, list) else pytree.select_rows(data, torch.arange(n))
            _set(self, int(steps[0]) if given.single else steps, data, given.index_key)
            if lanes.write_count < written + n * lanes.envs or not torch.equal(self._next_steps(1), following[n:]):
                raise RuntimeError(f"{cls.__name__}.set was given {n} steps: it must hand all of them to super().set")
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

    def prepare_replace(self: Any, checked: Checked, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        write: Callable[[], None] = super(cls, self)._prepare_replace(checked.data.plan, rows, slots)  # in a `set`
        return write

    def expect_sequences(self: Any, by_set: bool = False) -> None:
        if not by_set:
            raise TypeError(
                f"{cls.__name__}.set is called for rows that follow on others, and this writer puts rows in the place "
                "of any: use another writer, or override check and overwrite of the storage"
            )
        super(cls, self)._expect_sequences(by_set)

    cls.check, cls.append, cls._assign = check, append, assign
    cls._append_rows = lambda self, checked: super(cls, self).append(checked.data.plan)
    cls._expect_sequences, cls._prepare_replace = expect_sequences, prepare_replace
    cls.supports_conditional_update = False


def _route_reads(cls: Any) -> None:
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


def _route_empty(cls: Any) -> None:
    def empty(self: Any, reset_count: bool = True) -> None:
        with self._replacing("empty"):
            self._empty()
            super(cls, self).empty(reset_count)

    cls.empty = empty
