"""The index of stored trajectories: where each starts and ends, for samplers and exports."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

import engram._native as _native
from engram._copies import PartlyCopied
from engram.pytree import SIGNED, Key, KeyPath, as_path, format_key, to_tensor
from engram.store.lanes import Lanes
from engram.store.layout import LeafSpec
from engram.store.packed_rows import NativeCalls
from engram.store.row_form import DONE, IDS

_FLAGS = (torch.bool, torch.uint8, torch.int8)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INT64 = 8  # bytes
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


class StepSource(Protocol):
    """A storage as the index reads it."""

    mutex: Any
    native: NativeCalls

    @property
    def lanes(self) -> Lanes: ...
    def leaf(self, path: KeyPath) -> LeafSpec | None: ...
    def column(self, path: KeyPath, slots: Tensor) -> Tensor: ...


class StoredTrajectories(NamedTuple):
    """Every stored trajectory, lane by lane, environment by environment, oldest first: int64 [n] each.

    `start` is the sequence of the first step that is still stored; its slot is
    `(lane * lane_capacity + start % lane_capacity) * envs + env`.
    """

    lane: Tensor
    env: Tensor
    start: Tensor
    length: Tensor


class _Indexed(NamedTuple):
    """A storage and the native index of its trajectories."""

    steps: Callable[[], Any]  # the storage, while it lives
    lanes: Any
    index: Any
    fetch: Callable[[int, int, int], Any] | None  # None: flags and ids are read from packed rows
    guard: Any


_NONE = _Indexed(lambda: None, None, None, None, None)


class EpisodeIndex(PartlyCopied):
    """The trajectories of a storage, per lane and environment; each call first indexes the steps that are new.

    A done flag ends a trajectory after its step, a change of trajectory id begins one. No trajectory crosses the write
    cursor, a seam (where another process took over), a lane or an environment. Steps that were overwritten shorten the
    oldest trajectory; the running, unfinished one counts as one.

    Args:
        end_key: flags, one a step.
        end_keys: several of them instead, each of which ends a trajectory; those that the steps lack are left out.
        traj_key: ids of any integer dtype, or floats that are whole numbers, one a step. None: `("collector",
            "traj_ids")` or `"episode"` where there is one of them and `end_key` is not changed; else `end_key` decides.
            Where the steps lack the ids that are named here, the flags decide, too, and a warning says so.
        ends, trajectories: flags or ids of a dataset that does not change, in the order of the storage (`[time]`, with
            ndim=2 `[time, envs]`), instead of keys.

    Raises:
        ValueError: more than one of `traj_key`, `ends` and `trajectories`; or `end_key` and `end_keys`.
        KeyError: at a query, the steps have neither ids nor flags.

    Example:
        >>> storage = LazyTensorStorage(10)
        >>> _ = ReplayBuffer(storage=storage).extend({"done": torch.tensor([0, 0, 1, 0]).bool()})
        >>> EpisodeIndex(end_key="done").trajectories(storage).length
        tensor([3, 1])
    """

    _copied_as: ClassVar[Mapping[str, Any]] = {"_indexed": None}

    def __init__(
        self,
        *,
        end_key: Key | None = None,
        end_keys: Sequence[Key] | None = None,
        traj_key: Key | None = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
    ) -> None:
        given = {"traj_key": traj_key, "ends": ends, "trajectories": trajectories}
        if sum(v is not None for v in given.values()) > 1:
            raise ValueError(f"give one of {', '.join(given)}: each of them defines where trajectories end")
        if end_keys is not None and (end_key is not None or isinstance(end_keys, str) or not len(end_keys)):
            raise ValueError(
                f"give end_key, or end_keys, a list of one key or more; got end_key={end_key!r}, end_keys={end_keys!r}"
            )
        self.end_keys = None if end_keys is None else tuple(as_path(key, "end_keys") for key in end_keys)
        self.end_key: KeyPath | None = None
        if self.end_keys is None:
            self.end_key = as_path(DONE if end_key is None else end_key, "end_key")
        self.traj_key = None if traj_key is None else as_path(traj_key, "traj_key")
        self._given = _per_step(ends if trajectories is None else trajectories, trajectories is not None)
        self._given_ids = trajectories is not None
        self._warned = False  # that the steps lack the ids of `traj_key`
        self._indexed: _Indexed | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The constructor's arguments; of `ends` and `trajectories` only which of them was given."""
        given = None if self._given is None else "trajectories" if self._given_ids else "ends"
        several = {} if self.end_keys is None else {"end_keys": self.end_keys}
        return {"end_key": self.end_key, "traj_key": self.traj_key, "boundaries": given, **several}

    # ---- queries; None and empty results where nothing is stored yet ----
    def draw(self, steps: StepSource, rule: _native.SliceRule, seed: Tensor, n: int) -> _native.SliceBatch | None:
        """n slices, uniform over the trajectories that are long enough, then over starts; None: none is long enough."""
        indexed = self._of(steps)
        if indexed is None:
            return None
        index: _native.Episodes = indexed.index
        if indexed.fetch is None:
            return index.draw(indexed.lanes.store, rule, seed, n)
        with indexed.guard:
            return index.draw(indexed.lanes.store, rule, seed, n, indexed.fetch)

    def packed(self, steps: StepSource) -> tuple[_native.Episodes, _native.Store] | None:
        """The native index of a storage, and its store, where flags or ids are read from packed rows.

        None: they are not; or no query has made an index of this storage yet.
        """
        indexed = self._indexed or _NONE
        lanes = indexed.lanes
        if indexed.fetch is not None or indexed.steps() is not steps:
            return None
        return (indexed.index, lanes.store) if lanes is steps.lanes else None

    def draw_starts(
        self, steps: StepSource, priorities: _native.Priorities, rule: _native.SliceRule, seed: Tensor, n: int
    ) -> _native.SliceBatch | None:
        """n slices whose starts are drawn by priority; None: no step may be a start."""
        indexed = self._of(steps)
        if indexed is None:
            return None
        with indexed.guard:
            return priorities.draw_starts(indexed.lanes.store, indexed.index, rule, seed, n, indexed.fetch)

    def poll_starts(self, steps: StepSource, priorities: _native.Priorities, rule: _native.SliceRule) -> None:
        """Takes in what is new, and opens the steps that slices of a rule may start at."""
        indexed = self._of(steps)
        if indexed is not None:
            with indexed.guard:
                priorities.poll_starts(indexed.lanes.store, indexed.index, rule, indexed.fetch)

    def newest(self, steps: StepSource, rule: _native.SliceRule, n: int) -> _native.SliceBatch | None:
        """The n slices that end last, of each environment's newest trajectories; None: none is long enough."""
        newest: _native.SliceBatch | None
        newest = None if self._of(steps) is None else self._query(steps, "newest", rule, n)
        return newest

    def choices(self, steps: StepSource, rule: _native.SliceRule) -> float:
        """How many trajectories that are long enough or, by window, windows there are to draw from."""
        return 0 if self._of(steps) is None else float(self._query(steps, "choices", rule))

    def begin_epoch(self, steps: StepSource, rule: _native.SliceRule, key: int, shuffle: bool) -> _native.SliceEpoch:
        """An epoch over the trajectories that are long enough now."""
        epoch: _native.SliceEpoch = self._query(steps, "begin_epoch", rule, key, shuffle)
        return epoch

    def take(
        self,
        steps: StepSource,
        rule: _native.SliceRule,
        epoch: _native.SliceEpoch,
        position: int,
        seed: Tensor,
        n: int,
        least: int,
    ) -> tuple[_native.SliceBatch, int, bool]:
        """Up to n slices from a position of an epoch on, the position after them, whether `least` more are left."""
        drawn: tuple[_native.SliceBatch, int, bool]
        drawn = self._query(steps, "take", rule, epoch, position, seed, n, least)
        return drawn

    def longest(self, steps: StepSource) -> int:
        """Steps of the longest trajectory; 0 where nothing is stored."""
        return 0 if self._of(steps) is None else int(self._query(steps, "longest"))

    def trajectories(self, steps: StepSource) -> StoredTrajectories:
        """Every stored trajectory."""
        if self._of(steps) is None:
            return StoredTrajectories(*(torch.empty(0, dtype=torch.int64, device="cpu") for _ in range(4)))
        return StoredTrajectories(*self._query(steps, "trajectories"))

    def trajectories_and_rows(self, steps: StepSource) -> tuple[StoredTrajectories, list[range]]:
        """Every stored trajectory, and of each lane the sequences of the steps that they are made of.

        Both are of one moment, whoever writes: no step lies outside of the trajectories, and none in two of them.
        """
        if self._of(steps) is None:
            return self.trajectories(steps), []
        trajectories, ranges = self._query(steps, "trajectories_and_rows")
        return StoredTrajectories(*trajectories), [range(*bounds) for bounds in ranges]

    def _query(self, steps: StepSource, method: str, *args: Any) -> Any:
        indexed = self._of(steps)
        if indexed is None:
            raise RuntimeError("nothing is stored yet: there are no trajectories")
        with indexed.guard:
            return getattr(indexed.index, method)(indexed.lanes.store, *args, fetch=indexed.fetch)

    # ---- where flags and ids come from ----
    def _of(self, steps: StepSource) -> _Indexed | None:
        """A storage with its index, made at the first query; None before the first write."""
        lanes = steps.lanes
        lanes.use()
        indexed = self._indexed or _NONE
        if indexed.steps() is steps and indexed.lanes is lanes:
            return indexed
        if not len(lanes):
            return None  # a list storage has no keys yet
        # One assignment: another thread may query another storage at the same time.
        self._indexed = indexed = self._new_index(steps, lanes)
        return indexed

    def _new_index(self, steps: StepSource, lanes: Lanes) -> _Indexed:
        ref = weakref.ref(steps)
        if self._given is not None:
            index = _native.Episodes(self._given_ids, None, self._given.itemsize)
            return _Indexed(ref, lanes, index, _GivenSteps(self._given, lanes), steps.mutex)
        by_id, leaves = self._leaves(steps)
        leaf = leaves[0]
        is_float = leaf.dtype.is_floating_point  # which must be looked at: the native core compares bytes
        offset = steps.native.offset(leaf.path) if len(leaves) == 1 and not is_float else None
        index = _native.Episodes(by_id, offset, _INT64 if is_float else leaf.itemsize)
        if offset is not None:
            return _Indexed(ref, lanes, index, None, contextlib.nullcontext())
        # Storages without packed rows count a step before they hold it: under their mutex both agree.
        return _Indexed(ref, lanes, index, _StorageSteps(ref, leaves, lanes.store), _Settled(lanes))

    def _leaves(self, steps: StepSource) -> tuple[bool, list[LeafSpec]]:
        """Whether trajectories are told apart by ids, and the leaf with the ids or the leaves with flags."""
        ids = IDS if self.end_key == DONE else ()
        for path in ids if self.traj_key is None else (self.traj_key,):
            leaf = steps.leaf(path)
            if leaf is not None:
                return True, [_checked(leaf, (*_INTEGERS, *_FLOATS), "a trajectory id is an integer")]
        end_keys = self.end_keys or ((self.end_key,) if self.end_key is not None else ())
        flags = [leaf for leaf in map(steps.leaf, end_keys) if leaf is not None]
        named = " or ".join(map(format_key, end_keys))
        if not flags:
            ids = ids if self.traj_key is None else (self.traj_key,)
            raise KeyError(
                f"the stored steps have neither done flags {named} nor trajectory ids "
                f"{' or '.join(map(format_key, ids or IDS))}: say with end_key or traj_key where trajectories end"
            )
        if self.traj_key is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"the stored steps have no trajectory ids {format_key(self.traj_key)}: trajectories end where {named} "
                "says so",
                stacklevel=2,
            )
        return False, [_checked(leaf, _FLAGS, "a flag is a bool") for leaf in flags]


class _Settled:
    """The lanes' mutex, held after pending seams were computed."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def __enter__(self) -> None:
        self._mutex = self._lanes.mutex
        self._mutex.acquire()
        self._lanes.pending_borders.settle(self._lanes.mutex)

    def __exit__(self, *_: object) -> None:
        self._mutex.release()


class _StorageSteps:
    """Fetches ids, or flags of one leaf or several, with the methods of a storage."""

    def __init__(self, steps: Callable[[], Any], leaves: list[LeafSpec], store: _native.Store) -> None:
        self._steps, self._paths = steps, [leaf.path for leaf in leaves]
        self._capacity, self._envs = store.lane_capacity, store.envs

    def __call__(self, lane: int, start: int, stop: int) -> Any:
        slots = lane * self._capacity + torch.arange(start, stop, device="cpu") % self._capacity
        values = [self._steps().column(path, slots).reshape(stop - start, self._envs) for path in self._paths]
        if len(values) == 1:
            return _as_array(_whole(values[0], format_key(self._paths[0])))
        return _as_array(torch.stack([value != 0 for value in values]).any(0))


class _GivenSteps:
    """Fetches flags or ids that the user gave."""

    def __init__(self, given: Tensor, lanes: Lanes) -> None:
        state = lanes.counters()
        steps = sum(lane["published"] - lane["first"] for lane in state)
        envs = lanes.envs
        if len(state) > 1 or given.numel() != steps * envs:
            raise ValueError(
                f"ends or trajectories have {given.numel()} entries, but {steps * envs} steps are stored in "
                f"{len(state)} lane(s); they are for a dataset in one lane that does not change"
            )
        self._values = _as_array(given.reshape(steps, envs))
        self._first, self._stop = state[0]["first"], state[0]["published"]

    def __call__(self, lane: int, start: int, stop: int) -> Any:
        if start < self._first or stop > self._stop:
            raise RuntimeError(
                "steps were written after ends or trajectories were given to the sampler; they are for a dataset that "
                "does not change: use end_key or traj_key"
            )
        return self._values[start - self._first : stop - self._first]


def _checked(leaf: LeafSpec, dtypes: tuple[torch.dtype, ...], rule: str) -> LeafSpec:
    if leaf.dtype not in dtypes or leaf.nbytes != leaf.itemsize:
        raise ValueError(
            f"{format_key(leaf.path)} is {leaf.dtype} {list(leaf.shape)} a step; {rule}, and one a step (agents and "
            "groups have flags of their own: name one for the whole environment; batches [envs, time] are steps of a "
            "storage with ndim=2, and items of many steps each without)"
        )
    return leaf


def _per_step(given: Tensor | None, ids: bool) -> Tensor | None:
    if given is None:
        return None
    given = to_tensor(given).detach().cpu()
    if ids:
        given = _whole(given, "trajectories")
    if given.dtype not in (_INTEGERS if ids else _FLAGS):
        raise ValueError(f"{'trajectories are integers' if ids else 'ends are bools'}, got {given.dtype}")
    return given.clone()


def _whole(values: Tensor, what: str) -> Tensor:
    """Ids; floats as int64. ValueError where one of them is no whole number."""
    if not values.is_floating_point():
        return values
    whole = values.to(torch.int64)
    wrong = values[whole.to(values.dtype) != values]
    if len(wrong):
        raise ValueError(f"{what} has {wrong[0].item()}; a trajectory id is a whole number, the same in all its steps")
    return whole


def _as_array(values: Tensor) -> Any:
    """Contiguous bytes that the native core reads by size."""
    values = values.detach().cpu().contiguous()
    return np.ascontiguousarray(values.view(SIGNED.get(values.dtype, values.dtype)).numpy())
