"""The differences of two stores, checkpoints or datasets: keys, parts, rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram._progress import progress_bar
from engram.cli.description import shown_key
from engram.cli.kinds import kind_of, one_snapshot, store_folder
from engram.cli.sources import open_rows
from engram.data import Storage
from engram.data.replay_buffers.checkpointers import open_snapshot
from engram.pytree import describe, to_tensor

Slots = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

SEQUENCE, AGE = "sequence", "age"
INDEX = "index"  # the key of the slot, in rows of TensorDict buffers
_ROWS_AT_ONCE = 1 << 14
_PROBED = 100  # rows, to see which are the same ones
_MOST_RANGES = 5  # of slots that are named
_MOST_LINES = 20  # about one part


class KeyDifference(NamedTuple):
    """A key whose values differ: in how many rows, and in which, in words: `3, 7 to 9`."""

    key: str
    rows: int
    which: str


@dataclass(frozen=True)
class Differences:
    """The result of `diff`; "a" and "b" are the first and the second path.

    Attributes:
        a, b: the paths.
        equal: whether they hold the same: keys, rows and, of two checkpoints, parts.
        compared: rows that both have.
        by: whether rows were compared by "sequence", their number in their lane, or by "age", the oldest first.
        rows: of these, those of which some value differs.
        only_a, only_b: rows that only one of them has.
        keys: lines about keys that only one has, or of which dtype or shape differ.
        parts: lines about parts of a buffer whose settings or state differ.
        values: the keys whose values differ.
        notes: what was not compared.
    """

    a: str
    b: str
    equal: bool
    compared: int
    by: str
    rows: int
    only_a: int
    only_b: int
    keys: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    values: tuple[KeyDifference, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The same as JSON."""
        return {**self.__dict__, "values": [value._asdict() for value in self.values]}


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    by: str | None = None,
    snapshot_a: str | None = None,
    snapshot_b: str | None = None,
    progress: bool = False,
) -> Differences:
    """Compares what is at two paths: keys, rows bit by bit, and of two checkpoints all parts and their state.

    Rows are compared with those of the same number in their lane, as in two snapshots of one run, or the oldest with
    the oldest, as in a copy, which counts its rows anew: whichever makes more rows equal. In a copy `"index"`, a row's
    place, is not compared. Two snapshots of one checkpoint are compared by giving its path twice.

    Args:
        a, b: stores (which may be in use), checkpoints, directories of TorchRL's or dataset files.
        by: "sequence" or "age" instead of what makes more rows equal.
        snapshot_a, snapshot_b: of a checkpoint, another snapshot than the current one.
        progress: show how far it is, if standard error is a terminal.

    Raises:
        FileNotFoundError: there is nothing at a path.
        ValueError: what is there is nothing that engram reads, or its rows cannot be compared in this way.
        EngramError: it is damaged.

    Example:
        >>> import tempfile
        >>> a, b = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend({"n": torch.arange(5), "x": torch.zeros(5)})
        >>> _ = rb.dumps(a)
        >>> rb[3] = {"n": torch.tensor(9), "x": torch.tensor(0.0)}
        >>> _ = rb.dumps(b)
        >>> diff(a, b).values
        (KeyDifference(key='n', rows=1, which='3'),)
    """
    if by not in (None, SEQUENCE, AGE):
        raise ValueError(f"by is {SEQUENCE!r} or {AGE!r}, got {by!r}")
    with ExitStack() as stack:
        snapshot_a, snapshot_b = (stack.enter_context(one_snapshot(*x)) for x in ((a, snapshot_a), (b, snapshot_b)))
        one = stack.enter_context(open_rows(a, snapshot_a, progress=progress))
        # Opened twice, a store that a job writes would be read at two moments.
        other = one if _is_same_store(a, b) else stack.enter_context(open_rows(b, snapshot_b, progress=progress))
        comparison = _Comparison(one, other, by)
        with progress_bar(f"comparing {a} and {b}", comparison.total, progress) as advance:
            for n in comparison.run():
                advance(n)
        keys, values = comparison.key_lines(), comparison.values()
        parts, notes = _part_differences(a, b, snapshot_a, snapshot_b)
    equal = not (keys or parts or comparison.rows or comparison.only_a or comparison.only_b)
    return Differences(
        str(a), str(b), equal, comparison.compared, comparison.by, comparison.rows, comparison.only_a,
        comparison.only_b, keys, parts, values, (*notes, *comparison.notes),
    )  # fmt: skip


def _is_same_store(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> bool:
    return all(kind_of(path) == "store" for path in (a, b)) and os.path.samefile(store_folder(a), store_folder(b))


# ---- rows ----
class _Pairs(NamedTuple):
    """Slots of rows that are compared with each other, int64 [n] of each storage, and how many rows are left over."""

    a: Slots
    b: Slots
    only_a: int
    only_b: int

    @classmethod
    def by_age(cls, a: Storage, b: Storage, rows_a: list[range], rows_b: list[range]) -> _Pairs:
        one, other = _slots_of_all(a, rows_a), _slots_of_all(b, rows_b)
        n = min(len(one), len(other))
        return cls(one[:n], other[:n], len(one) - n, len(other) - n)

    @classmethod
    def by_sequence(cls, a: Storage, b: Storage, rows_a: list[range], rows_b: list[range]) -> _Pairs | None:
        """Rows of one sequence; None where lanes or environments are others."""
        if not (a.initialized and b.initialized) or _shape(a) != _shape(b):
            return None
        both = [range(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(rows_a, rows_b, strict=True)]
        one, other = _slots_of_all(a, both), _slots_of_all(b, both)
        only_a, only_b = (sum(map(len, rows)) * a.lanes.envs - len(one) for rows in (rows_a, rows_b))
        return cls(one, other, only_a, only_b)

    def probe(self) -> _Pairs:
        """A few of them, all over the storages."""
        at = np.unique(np.linspace(0, len(self.a) - 1, _PROBED).astype(np.int64)) if len(self.a) else self.a
        return self._replace(a=self.a[at], b=self.b[at])


class _Comparison:
    """Compares the rows of two storages, a block after the other."""

    def __init__(self, a: Storage, b: Storage, by: str | None) -> None:
        self._a, self._b = a, b
        rows = _stored(a), _stored(b)
        age, sequence = _Pairs.by_age(a, b, *rows), _Pairs.by_sequence(a, b, *rows)
        if by == SEQUENCE and sequence is None:
            raise ValueError(f"the lanes or environments of a and b differ: rows can be compared by {AGE} only")
        # A copy counts its rows anew: which rows correspond follows from their values.
        if by is None and sequence is not None:
            by = SEQUENCE if self._equal(sequence.probe()) >= self._equal(age.probe()) else AGE
        self.by = AGE if sequence is None or by == AGE else SEQUENCE
        self._pairs = age if sequence is None or by == AGE else sequence
        self.only_a, self.only_b = self._pairs.only_a, self._pairs.only_b
        self.total = len(self._pairs.a)
        self.compared = self.rows = 0
        self.notes: tuple[str, ...] = ()
        self._differing: dict[str, list[Slots]] = {}

    def _equal(self, pairs: _Pairs) -> int:
        """How many of these pairs are equal."""
        if not len(pairs.a):
            return 0
        rows_a, rows_b = self._a.read(torch.from_numpy(pairs.a)), self._b.read(torch.from_numpy(pairs.b))
        differs = np.zeros(len(pairs.a), bool)
        for key, different in _differing(rows_a.batch, rows_b.batch, len(pairs.a)):
            if key != INDEX:  # it is the place, not the row
                differs |= different
        return int((~differs).sum())

    def key_lines(self) -> tuple[str, ...]:
        """Keys that only one has, or of which dtype or shape differ."""
        a, b = ({shown_key(x.path): x for x in s.layout.leaves} if s.layout else {} for s in (self._a, self._b))
        lines = [f"{key} is only in a" for key in a if key not in b]
        lines += [f"{key} is only in b" for key in b if key not in a]
        lines += [
            f"{key} is {_form(a[key])} in a, {_form(b[key])} in b"
            for key in a
            if key in b and _form(a[key]) != _form(b[key])
        ]
        if (self._a.layout is None) != (self._b.layout is None) and len(self._a) and len(self._b):
            lines.append("the steps of one are items of any form, those of the other have keys")
        return tuple(lines)

    def run(self) -> Iterator[int]:
        """Compares all rows; yields the number of each block."""
        overwritten = 0
        for start in range(0, self.total, _ROWS_AT_ONCE):
            slots_a, slots_b = (x[start : start + _ROWS_AT_ONCE] for x in (self._pairs.a, self._pairs.b))
            rows_a, rows_b = (s.read(torch.from_numpy(x)) for s, x in ((self._a, slots_a), (self._b, slots_b)))
            still = np.ones(len(slots_a), bool)
            for rows in (rows_a, rows_b):
                for gone in (rows.overwritten, rows.absent):
                    if gone is not None:
                        still[gone] = False
            overwritten += int((~still).sum())
            named = slots_a if self.by == SEQUENCE else np.arange(start, start + len(slots_a))
            any_key = np.zeros(len(slots_a), bool)
            for key, differs in _differing(rows_a.batch, rows_b.batch, len(slots_a)):
                if key == INDEX and self.by == AGE:
                    continue
                differs &= still
                any_key |= differs
                if differs.any():
                    self._differing.setdefault(key, []).append(named[differs])
            self.rows += int(any_key.sum())
            self.compared += int(still.sum())
            yield len(slots_a)
        if overwritten:
            self.notes = (f"{overwritten} rows were overwritten by their writer before they could be compared",)

    def values(self) -> tuple[KeyDifference, ...]:
        every = {key: np.concatenate(parts) for key, parts in self._differing.items()}
        return tuple(KeyDifference(key, len(which), _ranges(np.sort(which))) for key, which in every.items())


def _shape(storage: Storage) -> tuple[int, int]:
    return storage.lanes.store.lanes, storage.lanes.envs


def _stored(storage: Storage) -> list[range]:
    """The sequences of the time steps that each lane holds."""
    return [range(state["first"], state["published"]) for state in storage.lanes.states()]


def _slots_of_all(storage: Storage, rows: list[range]) -> Slots:
    """The slots of time steps with these sequences of each lane, of all environments, oldest first."""
    slots = [np.zeros(0, np.int64)]
    for lane, stored in enumerate(rows):
        capacity, envs = storage.lanes.store.lane_capacity, storage.lanes.envs
        times = lane * capacity + np.arange(stored.start, stored.stop) % capacity
        slots.append((times[:, None] * envs + np.arange(envs)).reshape(-1))
    return np.concatenate(slots)


def _form(leaf: Any) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"


def _differing(a: Any, b: Any, n: int) -> Iterator[tuple[str, Flags]]:
    """Each key of both, with which rows differ: bool [n]."""
    if isinstance(a, list) or isinstance(b, list):
        pairs = zip(a, b, strict=True)  # a batch of rows is a sequence of them, too
        yield "item", np.array([not _same(x, y) for x, y in pairs], bool)
        return
    one, other = (dict(describe(batch, 1)[1]) for batch in (a, b))
    for path, value in one.items():
        if path in other:
            x, y = to_tensor(value), to_tensor(other[path])
            if (x.dtype, x.shape) == (y.dtype, y.shape) and x.numel():
                yield shown_key(path), (_bytes(x, n) != _bytes(y, n)).any(1).numpy()


def _bytes(values: Tensor, n: int) -> Tensor:
    """The values of each row bit by bit, so that NaN equals NaN: uint8 [n, bytes]."""
    return values.contiguous().reshape(n, -1).view(torch.uint8)


def _same(a: Any, b: Any) -> bool:
    """Whether two items are the same, to the last bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and (not a.numel() or torch.equal(_bytes(a, 1), _bytes(b, 1)))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, Mapping | TensorDictBase):
        keys = list(a.keys())
        return set(map(str, keys)) == set(map(str, b.keys())) and all(_same(a[key], b[key]) for key in keys)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _ranges(which: Slots) -> str:
    """Sorted numbers in words: `3, 7 to 9`, and how many more."""
    ends = np.flatnonzero(np.diff(which) != 1)
    pairs = list(zip(which[np.r_[0, ends + 1]].tolist(), which[np.r_[ends, len(which) - 1]].tolist(), strict=True))
    words = [str(start) if start == stop else f"{start} to {stop}" for start, stop in pairs[:_MOST_RANGES]]
    more = sum(stop - start + 1 for start, stop in pairs[_MOST_RANGES:])
    return ", ".join(words) + (f" and {more:,} more" if more else "")


# ---- parts of checkpoints ----
def _part_differences(
    a: str | os.PathLike[str], b: str | os.PathLike[str], snapshot_a: str | None, snapshot_b: str | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Lines about parts that differ, and about what was not compared."""
    checkpoints = [kind_of(path) == "checkpoint" for path in (a, b)]
    if not all(checkpoints):
        return (), ("parts of a buffer were not compared: only one has them",) if any(checkpoints) else ()
    one, other = _parts(a, snapshot_a), _parts(b, snapshot_b)
    lines = []
    for name in {**one, **other}:
        if name not in one or name not in other:
            lines.append(f"{name} is only in {'a' if name in one else 'b'}")
            continue
        of_part = list(_tree_differences(name, one[name], other[name]))
        lines += of_part[:_MOST_LINES]
        if len(of_part) > _MOST_LINES:
            lines.append(f"{name}: {len(of_part) - _MOST_LINES} more differences")
    return tuple(lines), ()


def _parts(path: str | os.PathLike[str], snapshot: str | None) -> dict[str, Any]:
    with open_snapshot(path, snapshot) as saved:
        return {name: saved.component(name) for name in saved.components}


def _tree_differences(at: str, a: Any, b: Any) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            if key not in a or key not in b:
                yield f"{at}.{key} is only in {'a' if key in a else 'b'}"
            else:
                yield from _tree_differences(f"{at}.{key}", a[key], b[key])
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for number, pair in enumerate(zip(a, b, strict=True)):
            yield from _tree_differences(f"{at}[{number}]", *pair)
    elif isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype:
        if not _same(a, b):
            n = a.numel()
            yield f"{at}: {int((_bytes(a, n) != _bytes(b, n)).any(1).sum())} of {n} numbers differ"
    elif not _same(a, b):
        yield f"{at} is {_short(a)} in a, {_short(b)} in b"


def _short(value: Any) -> str:
    return f"{_form(value)}" if isinstance(value, Tensor | np.ndarray) else f"{value!r:.60}"
