"""What a policy writes besides the action: one tensor for each entry, with a row for each step of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram._native import OutputRecorder
from engram.collectors.stats import StepsWay
from engram.envs.base import stack_steps
from engram.pytree import key_path

FEWEST_ROWS = 64  # of a column whose number of steps is not known before


COLUMNS = StepsWay("columns")


class _Column(NamedTuple):
    """The rows of one entry, `[capacity, *batch_size, ...]`, and the shape of a row."""

    rows: Tensor
    dtype: torch.dtype
    shape: torch.Size

    def array(self) -> np.ndarray[Any, Any] | None:
        """The rows as an array; None where numpy has no such memory or dtype."""
        try:
            return self.rows.numpy()
        except (TypeError, RuntimeError):
            return None


class OutputColumns:
    """The outputs of a policy by step: each `put` copies those of one step into its rows.

    A column is laid out when its entry is first put, with zeros for the steps that have no such entry. What has no
    place in a column (another shape or dtype than before, an entry that is not a tensor) makes all steps TensorDicts,
    which are stacked in the end; `way` says so.

    Args:
        batch_size: the environments; every output begins with these dimensions.
        device: of the TensorDicts with the outputs; None: each tensor has its own.
        capacity: the number of steps, if that is known; more are taken, too.

    >>> columns = OutputColumns(torch.Size([2]), None, capacity=3)
    >>> for step in range(3):
    ...     columns.put(step, {"value": torch.full((2,), float(step))})
    >>> columns.take(3)["value"].tolist()
    [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]
    >>> columns.way
    StepsWay(way='columns', reason='')
    """

    def __init__(self, batch_size: torch.Size, device: torch.device | None, *, capacity: int = FEWEST_ROWS) -> None:
        self._batch_size, self._device = batch_size, device
        self._capacity = max(1, capacity)
        self.clear()

    def clear(self) -> None:
        """Drops all steps; their memory is not written again."""
        self.way = COLUMNS
        self._in_columns = True
        self._columns: dict[Any, _Column] = {}
        self._recorder: OutputRecorder | None = None  # of all columns, where they are arrays on the CPU
        self._length = 0
        self._steps: list[TensorDictBase | None] = []  # used only after a change to TensorDicts

    def put(self, step: int, outputs: Mapping[str, Any]) -> None:
        """Copies the outputs of a step, the entries of a TensorDict `[*batch_size]` at its root; replaces former ones.

        Steps that are left out are zero.
        """
        recorder = self._recorder
        if recorder is None or step >= self._capacity or not recorder.put(step, outputs):
            self._put_entries(step, outputs)
        elif step >= self._length:
            self._length = step + 1

    def put_tensordict(self, step: int, outputs: TensorDictBase, reason: str) -> None:
        """Keeps a copy of the outputs of a step, where `reason` says why they have no place in columns."""
        self._change_to_tensordicts(reason)
        self._put_tensordict(step, outputs)

    def take(self, steps: int) -> TensorDictBase | None:
        """Takes the outputs of the first steps, `[*batch_size, steps]`, out of this; None where there are none.

        The memory is the caller's from then on.
        """
        if not self._length:
            return None
        shape, dim = torch.Size((*self._batch_size, steps)), len(self._batch_size)
        try:
            if not self._in_columns:
                return self._stacked(steps, dim)
            self._grow(steps)
            found = {k: column.rows[:steps].movedim(0, dim).contiguous() for k, column in self._columns.items()}
            return TensorDict(found, shape, device=self._device) if found else None
        finally:
            self.clear()
            self._capacity = steps  # as many as the next batch will have

    def at(self, slots: Tensor, steps: int) -> TensorDictBase | None:
        """A copy of the outputs at `slots`, int64 of any shape: `step * environments + environment`, of so many steps.

        None where there are no outputs.
        """
        if not self._in_columns:
            stacked = self._stacked(steps, 0)
            return None if stacked is None else stacked.reshape(-1)[slots]
        self._grow(steps)
        last = len(self._batch_size)
        found = {key: column.rows.flatten(0, last)[slots] for key, column in self._columns.items()}
        return TensorDict(found, slots.shape, device=self._device) if found else None

    def drop(self, steps: int) -> None:
        """Drops the first steps; those after them are numbered from 0 again."""
        del self._steps[:steps]
        left = max(0, self._length - steps)
        if not left:
            self.clear()
            return
        for column in self._columns.values():
            kept = column.rows[steps : self._length].clone()
            column.rows[:left] = kept
            column.rows[left : self._length] = 0
        self._length = left

    def _grow(self, steps: int) -> None:
        if steps <= self._capacity:
            return
        self._capacity = max(steps, 2 * self._capacity)
        for key, column in self._columns.items():
            rows = column.rows.new_zeros((self._capacity, *column.shape))
            rows[: len(column.rows)] = column.rows
            self._columns[key] = column._replace(rows=rows)
        self._renew_recorder()

    def _put_entries(self, step: int, outputs: Mapping[str, Any]) -> None:
        """`put` of entries that are not all plain tensors on the CPU in the order of the columns."""
        if not self._in_columns:
            return self._put_tensordict(step, self._tensordict_of(outputs))
        if step >= self._capacity:
            self._grow(step + 1)
        columns = self._columns
        for key, value in outputs.items():
            column = columns.get(key)
            if column is None or type(value) is not Tensor:
                return self._put_otherwise(step, outputs)
            if value.dtype != column.dtype or value.shape != column.shape:
                return self._put_otherwise(step, outputs)
            column.rows[step] = value
        self._length = max(self._length, step + 1)

    def _put_otherwise(self, step: int, outputs: Mapping[str, Any]) -> None:
        """`put` of entries that have no column yet, that are nested, or that fit no column."""
        leaves, has_new = dict(leaves_of(outputs, self._batch_size, self._device)), False
        for key, value in leaves.items():
            if (reason := self._misfit(key, value)) is not None:
                self.put_tensordict(step, self._tensordict_of(outputs), reason)
                return
            if key not in self._columns:
                zeros = torch.zeros((self._capacity, *value.shape), dtype=value.dtype, device=value.device)
                self._columns[key] = _Column(zeros, value.dtype, value.shape)
                has_new = True
        for key, value in leaves.items():
            self._columns[key].rows[step] = value
        self._length = max(self._length, step + 1)
        if has_new:
            self._renew_recorder()

    def _renew_recorder(self) -> None:
        arrays = [column.array() for column in self._columns.values()]
        are_arrays = all(array is not None for array in arrays) and all(type(key) is str for key in self._columns)
        self._recorder = OutputRecorder([*self._columns], arrays) if are_arrays and arrays else None

    def _misfit(self, key: Any, value: Any) -> str | None:
        """Why a value has no place in a column; None where it has one."""
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_nested:
            return f"{key!r} is a {type(value).__name__}, and columns are of plain tensors"
        if value.shape[: len(self._batch_size)] != self._batch_size:
            return f"{key!r} {tuple(value.shape)} does not begin with the batch size {tuple(self._batch_size)}"
        column, path = self._columns.get(key), key_path(key)
        if column is None:
            others = [key_path(other) for other in self._columns]
            if any(path[: len(other)] == other[: len(path)] for other in others):
                return f"{key!r} is an entry in one step, and has entries below it in another"
            return None
        found, before = ((one.dtype, tuple(one.shape)) for one in (value, column))
        return None if found == before else f"{key!r} was {before} in the steps before, and is {found}"

    def _change_to_tensordicts(self, reason: str) -> None:
        if not self._in_columns:
            return
        columns, batch_size, device = self._columns, self._batch_size, self._device
        self._steps = [
            TensorDict({key: column.rows[t] for key, column in columns.items()}, batch_size, device=device)
            for t in range(self._length)
        ]
        self.way, self._in_columns, self._columns = StepsWay("tensordicts", reason), False, {}
        self._recorder = None

    def _tensordict_of(self, outputs: Mapping[str, Any]) -> TensorDictBase:
        return TensorDict(dict(outputs), self._batch_size, device=self._device)

    def _put_tensordict(self, step: int, outputs: TensorDictBase) -> None:
        self._steps += [None] * (step + 1 - len(self._steps))
        self._steps[step] = outputs.clone()  # a policy may write into its tensors again
        self._length = len(self._steps)

    def _stacked(self, steps: int, dim: int) -> TensorDictBase | None:
        some = next((outputs for outputs in self._steps if outputs is not None), None)
        if some is None:
            return None
        rows = [*self._steps[:steps], *[None] * (steps - len(self._steps))]
        stacked = stack_steps([some.empty() if outputs is None else outputs for outputs in rows], dim)
        return None if stacked.is_empty() else stacked


def leaves_of(
    entries: Mapping[str, Any], batch_size: torch.Size, device: torch.device | None, above: tuple[str, ...] = ()
) -> Iterator[tuple[Any, Any]]:
    """Entries, and those of TensorDicts of this batch size and device among them: a key at the root is a string."""
    for key, value in entries.items():
        path = (*above, key)
        is_plain = type(value) is TensorDict and not value.is_empty()
        if is_plain and value.batch_size == batch_size and value.device == device:
            yield from leaves_of(dict(value.items()), batch_size, device, path)
        else:
            yield path if above else key, value
