"""The rows of a store as somebody sees them who only looks: keys, trajectories, counters, without torch."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

import engram._native as _native
from engram.errors import StorageError, StorageInUseError
from engram.store.row_form import IDS, following_paths, outcome_path, stored_offsets

_T = TypeVar("_T")

_TRIES = 500  # while rows are changed in place or replaced: a few seconds
_PAUSE = 0.005
_FLAGS = ("bool", "uint8", "int8")
_AT_ONCE = 1 << 16  # steps of which flags are read at once


class ObservedLeaf(NamedTuple):
    """A leaf of a row: its key, its dtype as the layout names it, the shape of a step, where it lies in the row."""

    path: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return self.itemsize * math.prod(self.shape)


class ObservedTrajectories(NamedTuple):
    """Every stored trajectory, lane by lane, environment by environment, oldest first: int64 [n] each.

    `rows` are the sequences of the steps of each lane that they are made of.
    """

    lane: npt.NDArray[np.int64]
    env: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    rows: list[range]


class ObservedRows:
    """Rows of a store that is mapped read-only. Of steps that are overwritten while they are read, values may be any.

    Raises:
        StorageError: the layout cannot be read.
    """

    def __init__(self, store: _native.Store) -> None:
        self.store = store
        try:
            self.leaves = _leaves(json.loads(store.layout))
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"the store has no readable layout: {error}") from error

    def leaf(self, path: tuple[Any, ...]) -> ObservedLeaf | None:
        """The leaf with this key."""
        return next((leaf for leaf in self.leaves if leaf.path == path), None)

    def outcome(self, name: str) -> ObservedLeaf | None:
        """The leaf with what came of a step: `("next", name)`, or `name` in flat rows (`outcome_path`)."""
        return self.leaf(outcome_path([leaf.path for leaf in self.leaves], name))

    def stored(self, lane: int) -> range:
        """The sequences of the steps that a lane has now."""
        state = self.store.lane(lane)
        return range(state["first"], state["published"])

    def column(self, leaf: ObservedLeaf, lane: int, steps: range) -> npt.NDArray[Any]:
        """One leaf of a lane's steps: [steps, envs, *shape]. Of bfloat16, which NumPy does not have, as float32."""
        store = self.store
        store.check_file()
        if leaf.offset >= store.payload_bytes:  # it is stored once, beside the rows
            bytes_of = store.observation_column(lane, steps.start, len(steps), leaf.offset, leaf.nbytes)
            return _typed(bytes_of, leaf.dtype).reshape(len(steps), store.envs, *leaf.shape)
        capacity, stride = store.lane_capacity, store.row_stride
        start = store.memory()[store.rows_offset + lane * store.envs * capacity * stride + leaf.offset :]
        rows = np.lib.stride_tricks.as_strided(
            start, (store.envs, capacity, leaf.nbytes), (capacity * stride, stride, 1), writeable=False
        )
        at, n = steps.start % capacity, len(steps)
        parts = [rows[:, at : at + n], rows[:, : max(0, at + n - capacity)]]
        values = np.ascontiguousarray(np.concatenate(parts, axis=1).swapaxes(0, 1))
        return _typed(values, leaf.dtype).reshape(n, store.envs, *leaf.shape)

    def begins(self, lane: int, steps: range) -> npt.NDArray[np.bool_] | None:
        """Which of a lane's steps begin a trajectory: bool [steps, envs]; None where no key says it.

        The first one begins one where the step before it is not stored.
        """
        bounds = self.boundaries(lane, steps)
        return None if bounds is None else bounds[0]

    def boundaries(self, lane: int, steps: range) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]] | None:
        """As `begins`, and before which of these steps another trajectory ended, and was not merely cut: by its flag,
        or by an id that changes within the rows of one writer.
        """
        by_id = next((leaf for path in IDS if (leaf := self.leaf(path)) is not None), None)
        flag = self.outcome("done")
        if flag is not None and (flag.nbytes != flag.itemsize or flag.dtype not in _FLAGS):
            flag = None
        if (flag is None) if by_id is None else not _is_one_integer(by_id):
            return None
        before = min(max(self.stored(lane).start, steps.start - 1), steps.start)
        is_cut = np.zeros((len(steps), self.store.envs), bool)
        is_cut[:1] = before == steps.start  # the step before the first one is not stored
        for seam in self.store.seams(lane):
            if steps.start <= seam < steps.stop:
                is_cut[seam - steps.start] = True

        def read(leaf: ObservedLeaf) -> npt.NDArray[Any]:
            values = self.column(leaf, lane, range(before, steps.stop)).reshape(-1, self.store.envs)
            return np.concatenate([values[:1], values]) if before == steps.start else values

        ended: npt.NDArray[np.bool_] = np.zeros_like(is_cut)
        if flag is not None:
            ended = read(flag)[:-1] != 0
            ended[:1] &= before < steps.start
        if by_id is None:
            return is_cut | ended, ended
        ids = read(by_id)
        changes: npt.NDArray[np.bool_] = ids[1:] != ids[:-1]
        return is_cut | changes, ended if flag is not None else changes & ~is_cut

    def trajectories(self, advance: Callable[[int], None] = lambda steps: None) -> ObservedTrajectories | None:
        """Every stored trajectory of this moment; None where no key says where they end. Reads the flags of all steps.

        The write cursor and seams cut them, too, as in the `EpisodeIndex` of a sampler.

        Raises:
            StorageInUseError: rows were changed in place, or replaced, all the time.
        """
        return self.validated(lambda: self._trajectories(advance))

    def _trajectories(self, advance: Callable[[int], None]) -> ObservedTrajectories | None:
        columns: tuple[list[Any], ...] = ([], [], [], [])
        rows = []
        for lane in range(self.store.lanes):
            stored, parts = self.stored(lane), []
            for start in range(stored.start, stored.stop, _AT_ONCE):
                steps = range(start, min(start + _AT_ONCE, stored.stop))
                part = self.begins(lane, steps)
                if part is None:
                    return None
                parts.append(part)
                advance(len(steps))
            first = min(max(stored.start, self.stored(lane).start), stored.stop)  # less what was overwritten meanwhile
            rows.append(range(first, stored.stop))
            if not len(rows[-1]):
                continue
            begins = np.concatenate(parts)[first - stored.start :]
            begins[0] = True
            env, at = np.nonzero(begins.T)
            stops = np.append(at[1:], 0)
            stops[np.append(env[1:] != env[:-1], True)] = len(begins)
            values = (np.full(len(at), lane), env, at + first, stops - at)
            for column, value in zip(columns, values, strict=True):
                column.append(value.astype(np.int64))
        none = np.zeros(0, np.int64)
        lanes, envs, starts, lengths = (np.concatenate([none, *column]) for column in columns)
        return ObservedTrajectories(lanes, envs, starts, lengths, rows)

    def validated(self, read: Callable[[], _T]) -> _T:
        """What `read` returns, of a moment in which nobody changed stored rows in place or replaced all of them.

        Raises:
            StorageInUseError: there was no such moment.
        """
        for _ in range(_TRIES):
            before = self.store.epoch()
            if not any(n % 2 for n in before):
                result = read()
                if self.store.epoch() == before:
                    return result
            time.sleep(_PAUSE)
        raise StorageInUseError("rows of the store are being changed or replaced; try again when that is done")


def _leaves(layout: dict[str, Any]) -> list[ObservedLeaf]:
    """The leaves of a layout's JSON, with their places: those of the largest items lie first, each dtype in order.

    Observations that are stored once lie behind the row.
    """
    leaves = [
        ObservedLeaf(tuple(leaf["path"]), str(leaf["dtype"]), tuple(map(int, leaf["shape"])), 0)
        for leaf in layout["leaves"]
    ]
    sizes = [(leaf.itemsize, leaf.nbytes) for leaf in leaves]
    sizes += [(8, 8)] * len(layout.get("hidden", []))  # behind the others of eight bytes
    if max(1, sum(nbytes for _, nbytes in sizes)) != layout["row_bytes"]:
        raise ValueError(f"its keys do not make a row of {layout['row_bytes']} bytes")
    said = layout.get("observations") or {"keys": [], "in_row": None}
    paths = [leaf.path for leaf in leaves]
    following, behind = following_paths(paths), []
    for key in said["keys"]:
        x = tuple(key["path"])
        behind += [following[x]] if said["in_row"] else [x, following[x]]
    if said["in_row"]:
        sizes.append((1, 1))  # the word
    offsets, _ = stored_offsets(sizes, [paths.index(path) for path in behind])
    return [leaf._replace(offset=at) for leaf, at in zip(leaves, offsets, strict=False)]


def _is_one_integer(leaf: ObservedLeaf) -> bool:
    return leaf.nbytes == leaf.itemsize and leaf.dtype != "bfloat16" and np.dtype(leaf.dtype).kind in "iu"


def _typed(values: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[Any]:
    """Bytes [..., n] as numbers of a dtype."""
    if dtype == "bfloat16":
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return values.view(np.dtype(dtype))
