"""Exact conversions of episode data (TED) in TensorDicts to forms that hold every observation once, and back.

In TED an observation is in two places: under `next` in one step, and at the root of the step after it. The conversions
keep the one at the root, and of those under `next` only what differs, byte for byte, from the root of the next step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.pytree import Key, KeyPath, as_path, format_key
from engram.ted import codec as ted_codec
from engram.ted.codec import (
    DONE_KEYS,
    NEXT,
    REWARD_KEYS,
    Column,
    Mask,
    StepKeys,
    StepLeaf,
    as_bytes,
    column_of,
    leaves_of,
    plain,
    tensor_of,
    tensordict_of,
)

EXCEPTIONS = "exceptions"
BATCH_SIZE = "batch_size"
TRAJECTORY = "trajectory_"

Entries = dict[KeyPath, Tensor]
_Columns = dict[KeyPath, tuple[Column, StepLeaf, ted_codec.Positions]]


class Conversion:
    """Settings of the conversions: which keys are flags and rewards, and the names of the entries they add.

    Args:
        done_key: where a trajectory ends, beside the `done_keys` under `next`.
        shift_key: name of the entry with the slot of the oldest step.
        is_full_key: name of the entry that says whether the ring was full.
        done_keys: flags, which are never read from the step after.
        reward_keys: rewards, the same.
    """

    def __init__(
        self,
        done_key: Key = (NEXT, "done"),
        shift_key: str = "shift",
        is_full_key: str = "is_full",
        done_keys: Sequence[Key] = DONE_KEYS,
        reward_keys: Sequence[Key] = REWARD_KEYS,
    ) -> None:
        self.done_key = as_path(done_key, "done_key")
        self.shift_key, self.is_full_key = shift_key, is_full_key
        self.keys = StepKeys(done_keys, reward_keys)
        self.added = (shift_key, is_full_key, BATCH_SIZE, EXCEPTIONS)
        if len(set(self.added)) < len(self.added) or NEXT in self.added:
            raise ValueError(f"the names {self.added} and 'next' must differ from each other")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(done_key={self.done_key}, shift_key={self.shift_key!r})"


class _SplitConversion(Conversion):
    """A conversion of steps, whose order is an argument of the call, or told to it as a save hook by its attributes."""

    def __init__(
        self,
        done_key: Key = (NEXT, "done"),
        shift_key: str = "shift",
        is_full_key: str = "is_full",
        done_keys: Sequence[Key] = DONE_KEYS,
        reward_keys: Sequence[Key] = REWARD_KEYS,
    ) -> None:
        super().__init__(done_key, shift_key, is_full_key, done_keys, reward_keys)
        #: Where the oldest step of a full ring lies, and whether the ring is full: what calls use that do not say it.
        self.shift, self.is_full = 0, False

    def _columns(self, td: Any, shift: int | None, is_full: bool | None) -> _StepColumns:
        steps = tensordict_of(td)
        return _StepColumns(
            self, steps, self.shift if shift is None else shift, self.is_full if is_full is None else is_full
        )


class _StepColumns:
    """The steps of a TensorDict, oldest first, as columns of bytes."""

    def __init__(self, conversion: Conversion, td: TensorDictBase, shift: int, is_full: bool) -> None:
        batch_size = tuple(td.batch_size)
        if not batch_size:
            raise ValueError("TED has a time dimension, the last of the batch size; this TensorDict has batch size []")
        if not 0 <= shift <= batch_size[-1]:
            raise ValueError(f"shift is a number of steps from 0 to {batch_size[-1]}, got {shift}")
        leaves = [(path, plain(value, path)) for path, value in leaves_of(td)]
        reserved = [path for path, _ in leaves if path[0] in conversion.added]
        if reserved:
            raise ValueError(
                f"{format_key(reserved[0])} is the name of an entry that the conversion adds; rename it, or "
                "pass another name"
            )
        dims = len(batch_size)
        self.batch_size = batch_size
        self.leaves = [StepLeaf(path, value.dtype, tuple(value.shape[dims:])) for path, value in leaves]
        self.columns = [column_of(value, dims, shift if is_full else 0) for _, value in leaves]
        self.env_ends = ted_codec.env_ends(math.prod(batch_size[:-1]), batch_size[-1])
        self.shared = conversion.keys.shared(self.leaves)
        self.extra: Entries = {
            (conversion.shift_key,): torch.tensor(shift, device="cpu"),
            (conversion.is_full_key,): torch.tensor(is_full, device="cpu"),
            (BATCH_SIZE,): torch.tensor(batch_size, device="cpu"),
        }

    def trajectory_ends(self, conversion: Conversion) -> Mask:
        """bool [n]: the last steps of trajectories."""
        flags = set(conversion.keys.flags(self.leaves))
        flags |= {
            i for i, leaf in enumerate(self.leaves) if leaf.path == conversion.done_key and math.prod(leaf.shape) == 1
        }
        columns, ids = self.columns, conversion.keys.ids(self.leaves)
        return ted_codec.trajectory_ends(self.env_ends, [columns[i] for i in sorted(flags)], [columns[i] for i in ids])

    def exceptions(self, elsewhere: Mask | None = None) -> Entries:
        """Entries for the steps whose `next` is not the root of the step after, without those marked in `elsewhere`."""
        entries: Entries = {}
        for i, root in self.shared.items():
            mask = ted_codec.broken(self.columns[root], self.columns[i], self.env_ends)
            if elsewhere is not None:
                mask &= ~elsewhere
            step, value = _exception_keys(self.leaves[root].path)
            entries[step] = torch.from_numpy(np.flatnonzero(mask))
            entries[value] = tensor_of(self.columns[i][mask], self.leaves[i])
        return entries

    def trajectories(self, ends: Mask) -> Iterator[tuple[StepLeaf, Column, bool]]:
        """Leaves and columns, without copies under `next`; of roots that have one, with one value more a trajectory."""
        following = {root: i for i, root in self.shared.items()}
        for i, leaf in enumerate(self.leaves):
            if i in following:
                yield leaf, ted_codec.with_last(self.columns[i], self.columns[following[i]], ends), True
            elif i not in self.shared:
                yield leaf, self.columns[i], False


class _ConvertedEntries:
    """The entries of a converted TensorDict: those that the conversion added, and the rest in `entries`."""

    def __init__(self, conversion: Conversion, entries: Entries) -> None:
        try:
            self.batch_size = tuple(int(size) for size in entries.pop((BATCH_SIZE,)))
            shift, full = int(entries.pop((conversion.shift_key,))), bool(entries.pop((conversion.is_full_key,)))
        except KeyError as error:
            raise ValueError(f"{format_key(error.args[0])} is missing: no conversion made this TensorDict") from None
        self.shift = shift if full else 0
        self.exceptions: dict[KeyPath, tuple[Tensor, Tensor]] = {}
        for path in [p for p in entries if p[0] == EXCEPTIONS and p[-1] == "step"]:
            step, value = _exception_keys(path[1:-1])
            self.exceptions[path[1:-1]] = (entries.pop(step), entries.pop(value))
        self.entries = entries
        self.steps = math.prod(self.batch_size)

    def exceptions_of(self, root: KeyPath, leaf: StepLeaf) -> tuple[ted_codec.Positions, Column]:
        """Positions and values of the exceptions of a root key."""
        step, value = self.exceptions[root]
        at = step.numpy()
        if len(at) and not 0 <= at.min() <= at.max() < self.steps:
            raise ValueError(f"the exceptions of {format_key(root)} name steps outside of the data")
        return at, as_bytes(value, len(at), leaf.nbytes)

    def build(self, columns: dict[KeyPath, tuple[Column, StepLeaf]]) -> TensorDict:
        """The steps with these columns, in the order of their slots."""
        return _tensordict(
            {p: tensor_of(c, leaf, self.batch_size, self.shift) for p, (c, leaf) in columns.items()}, self.batch_size
        )


class TED2Flat(_SplitConversion):
    """Steps with every key once: `next` keys that the root repeats are left out, but for the exceptions.

    The result has batch size []. Its keys keep the shape [*batch, ...] and come oldest step first. `exceptions` holds
    for each key that was left out `step` (int64, counted over the flattened batch) and `value`: the last step of each
    trajectory and of the data, and wherever the rule does not hold. `Flat2TED()` undoes it exactly.

    Raises:
        TypeError: an entry is not a dense tensor; the message names it.
        ValueError: an entry has the name of one that is added.

    Example:
        >>> x = torch.arange(5.0)
        >>> ted = TensorDict({"x": x[:4], "next": {"x": x[1:], "done": torch.zeros(4, 1).bool()}}, [4])
        >>> flat = TED2Flat()(ted)
        >>> flat["x"], flat["exceptions", "x", "value"]
        (tensor([0., 1., 2., 3.]), tensor([4.]))
        >>> bool((Flat2TED()(flat) == ted).all())
        True
    """

    def __call__(self, td: TensorDictBase, shift: int | None = None, is_full: bool | None = None) -> TensorDict:
        """Converts rows in the order of their slots; in a ring that is full the oldest lies at `shift`."""
        columns = self._columns(td, shift, is_full)
        entries = columns.extra | columns.exceptions()
        for i, leaf in enumerate(columns.leaves):
            if i not in columns.shared:
                entries[leaf.path] = tensor_of(columns.columns[i], leaf, columns.batch_size)
        return _tensordict(entries, ())


class Flat2TED(Conversion):
    """Undoes `TED2Flat`: the steps in the order of their slots.

    Raises:
        ValueError: the TensorDict was not made by `TED2Flat`.
    """

    def __call__(self, td: TensorDictBase) -> TensorDict:
        converted = _ConvertedEntries(self, dict(leaves_of(td)))
        dims = len(converted.batch_size)
        steps: dict[KeyPath, tuple[Column, StepLeaf]] = {}
        for path, value in converted.entries.items():
            leaf = StepLeaf(path, value.dtype, tuple(value.shape[dims:]))
            steps[path] = as_bytes(value, converted.steps, leaf.nbytes), leaf
        for root in converted.exceptions:
            column, leaf = steps[root]
            following = (NEXT, *root)
            steps[following] = ted_codec.followed(column, *converted.exceptions_of(root, leaf)), leaf
        return converted.build(steps)


class TED2Nested(_SplitConversion):
    """Trajectories as nested (jagged) tensors: keys [trajectories, steps, ...], observations with one step more.

    A trajectory ends where a flag of `done_keys` is set under `next`, where its id changes, and at the newest step of
    its environment. The additional observation is the one that followed the last step. `exceptions` is as in
    `TED2Flat`, for steps inside trajectories.

    Raises:
        TypeError: an entry is not a dense tensor; the message names it.
        ValueError: an entry has the name of one that is added, or a step has several done flags.

    Example:
        >>> x, done = torch.arange(5.0), torch.tensor([[False], [True], [False], [False]])
        >>> ted = TensorDict({"x": x[:4], "next": {"x": x[1:], "done": done}}, [4])
        >>> [trajectory.tolist() for trajectory in TED2Nested()(ted)["x"].unbind()]
        [[0.0, 1.0, 2.0], [2.0, 3.0, 4.0]]
    """

    def __call__(self, td: TensorDictBase, shift: int | None = None, is_full: bool | None = None) -> TensorDict:
        """Converts rows in the order of their slots; in a ring that is full the oldest lies at `shift`."""
        columns = self._columns(td, shift, is_full)
        ends = columns.trajectory_ends(self)
        starts = _starts(ends)
        longer = starts + np.arange(len(starts))
        entries = columns.extra | columns.exceptions(ends)
        for leaf, column, extended in columns.trajectories(ends):
            offsets = torch.from_numpy(longer if extended else starts)
            entries[leaf.path] = torch.nested.nested_tensor_from_jagged(tensor_of(column, leaf), offsets)
        return _tensordict(entries, ())


class Nested2TED(Conversion):
    """Undoes `TED2Nested`: the steps in the order of their slots.

    Raises:
        ValueError: the TensorDict was not made by `TED2Nested`.
    """

    def __call__(self, td: TensorDictBase) -> TensorDict:
        converted = _ConvertedEntries(self, dict(leaves_of(td)))
        columns: _Columns = {}
        for path, value in converted.entries.items():
            values, offsets = value.values(), value.offsets()  # type: ignore[attr-defined]
            leaf = StepLeaf(path, values.dtype, tuple(values.shape[1:]))
            columns[path] = as_bytes(values, len(values), leaf.nbytes), leaf, offsets.numpy()
        return _of_trajectories(converted, columns)


class H5Split(_SplitConversion):
    """One entry for each trajectory, `trajectory_00000000` and so on, like groups of HDF5; keys as in `TED2Nested`.

    Raises:
        TypeError, ValueError: as `TED2Nested`.

    Example:
        >>> x, done = torch.arange(5.0), torch.tensor([[False], [True], [False], [False]])
        >>> ted = TensorDict({"x": x[:4], "next": {"x": x[1:], "done": done}}, [4])
        >>> split = H5Split()(ted)
        >>> split["trajectory_00000001", "x"]
        tensor([2., 3., 4.])
        >>> bool((H5Combine()(split) == ted).all())
        True
    """

    def __call__(self, td: TensorDictBase, shift: int | None = None, is_full: bool | None = None) -> TensorDict:
        """Converts rows in the order of their slots; in a ring that is full the oldest lies at `shift`."""
        columns = self._columns(td, shift, is_full)
        ends = columns.trajectory_ends(self)
        if not len(ends):
            raise ValueError("the data have no steps, so there is no trajectory to hold their keys")
        starts = _starts(ends)
        entries = columns.extra | columns.exceptions(ends)
        for leaf, column, extended in columns.trajectories(ends):
            lengths = np.diff(starts) + (1 if extended else 0)
            for number, part in enumerate(torch.split(tensor_of(column, leaf), lengths.tolist())):
                key = (f"{TRAJECTORY}{number:08d}", *leaf.path)
                entries[key] = part
        return _tensordict(entries, ())


class H5Combine(Conversion):
    """Undoes `H5Split`: the steps in the order of their slots.

    Raises:
        ValueError: the TensorDict was not made by `H5Split`.
    """

    def __call__(self, td: TensorDictBase) -> TensorDict:
        converted = _ConvertedEntries(self, dict(leaves_of(td)))
        parts: dict[KeyPath, list[tuple[str, Tensor]]] = {}
        for path, value in converted.entries.items():
            parts.setdefault(path[1:], []).append((path[0], value))
        columns: _Columns = {}
        for path, named in parts.items():
            values = [value for _, value in sorted(named, key=lambda entry: entry[0])]
            leaf = StepLeaf(path, values[0].dtype, tuple(values[0].shape[1:]))
            whole = np.concatenate([as_bytes(value, len(value), leaf.nbytes) for value in values])
            columns[path] = whole, leaf, np.cumsum([0, *map(len, values)])
        return _of_trajectories(converted, columns)


def _of_trajectories(converted: _ConvertedEntries, columns: _Columns) -> TensorDict:
    """The steps of trajectories whose values lie one after the other, each column with its offsets."""
    steps: dict[KeyPath, tuple[Column, StepLeaf]] = {}
    for path, (column, leaf, offsets) in columns.items():
        extra = np.arange(len(offsets)) if path in converted.exceptions else 0
        starts = offsets - extra
        if len(starts) == 0 or starts[0] or starts[-1] != converted.steps or (np.diff(starts) <= 0).any():
            raise ValueError(f"the trajectories of {format_key(path)} do not have {converted.steps} steps together")
        if path not in converted.exceptions:
            steps[path] = column, leaf
            continue
        ends = np.zeros(converted.steps, np.bool_)
        ends[starts[1:] - 1] = True
        now, following = ted_codec.without_last(column, ends)
        at, values = converted.exceptions_of(path, leaf)
        following[at] = values
        next_path = (NEXT, *path)
        steps[path], steps[next_path] = (now, leaf), (following, leaf)
    return converted.build(steps)


def _exception_keys(root: KeyPath) -> tuple[KeyPath, KeyPath]:
    return (EXCEPTIONS, *root, "step"), (EXCEPTIONS, *root, "value")


def _starts(ends: Mask) -> ted_codec.Positions:
    """int64 [trajectories + 1]: where each begins, and where the last one ends."""
    return np.concatenate(([0], np.flatnonzero(ends) + 1))


def _tensordict(entries: Entries, batch_size: tuple[int, ...]) -> TensorDict:
    td = TensorDict({}, batch_size)
    for path, value in entries.items():
        td.set(path, value)
    return td
