"""Shared by all dataset formats: the mapping of keys, sources of steps to write, and reading into a buffer.

Steps are episode data (TED): the next observation, reward and flags of a step are under "next".
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram import pytree
from engram._progress import progress_bar
from engram.data import ReplayBuffer, Storage, StorageEnsemble
from engram.errors import DatasetError
from engram.kernel.rows import IDS, EpisodeIndex, LeafSpec, RowLayout, removed_steps, without_removed
from engram.kernel.spaces import LeafSpace
from engram.kernel.tools import open_regular, visible, warn_user
from engram.pytree import Key, KeyPath, as_path, stack, to_tensor

Array = npt.NDArray[Any]

OBSERVATION: KeyPath = ("observation",)
ACTION: KeyPath = ("action",)
INFO: KeyPath = ("info",)
REWARD: KeyPath = ("next", "reward")
DONE, TERMINATED, TRUNCATED = ("next", "done"), ("next", "terminated"), ("next", "truncated")
TRAJECTORY: KeyPath = ("collector", "traj_ids")
#: Keys that are not written: the formats mark the ends of trajectories in their own way, or only a buffer uses them.
IMPLIED: tuple[KeyPath, ...] = (TRAJECTORY, ("episode",), ("index",), ("done",), ("terminated",), ("truncated",), DONE)
#: Keys at the root that no observation has.
NO_OBSERVATIONS = ("next", "done", "terminated", "truncated", "reward", "collector")
_UNSUPPORTED = (torch.bfloat16, torch.complex64, torch.complex128)
INDEX = "_index_"


class DatasetSize(NamedTuple):
    """The size of a dataset according to its header; None: the header does not say it."""

    steps: int | None
    episodes: int | None


class Marks(NamedTuple):
    """The entries of steps that mark ends of trajectories: ids, or None, and flags; one a step."""

    ids: npt.NDArray[Any] | None
    done: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Any, n: int) -> Marks:
        """The marks of n rows; an entry that has not one value a row is ignored."""

        def column(path: KeyPath) -> npt.NDArray[Any] | None:
            values = pytree.get_entry(rows, path)
            is_column = isinstance(values, Tensor) and values.numel() == n
            return values.detach().cpu().reshape(n).numpy() if is_column else None

        key = next((path for path in IDS if pytree.get_entry(rows, path) is not None), None)
        done = column(DONE)
        return cls(None if key is None else column(key), np.zeros(n, np.bool_) if done is None else done != 0)

    def end_before(self, at: Any) -> Any:
        """Whether ids or flags say that a trajectory ends before a step, or before each of some."""
        return self.done[at - 1] if self.ids is None else self.ids[at] != self.ids[at - 1]

    def follow(self, before: Marks) -> bool:
        """Whether they say that one ends between two blocks."""
        if self.ids is None or before.ids is None:
            return bool(before.done[-1])
        return bool(self.ids[0] != before.ids[-1])


class KeyPair(NamedTuple):
    """A key at the root and the same key under "next": indices of leaves; -1 where there is none."""

    name: tuple[str, ...]  # of the dataset, below its role
    root: int
    next: int


class KeyMapping:
    """The role of each leaf of a step in a Minari or flat HDF5 dataset: observation, action, info, reward, flag.

    `spaces`: the spaces of observations and actions by key, as far as they are known: they say which entries are those
    of a Tuple.

    Raises:
        ValueError: the format has no role for a key, or a key that it needs is missing; all of them are listed.
    """

    def __init__(
        self, layout: RowLayout, kind: str, single_infos: str, spaces: Mapping[KeyPath, LeafSpace] | None = None
    ) -> None:
        self.layout, self._spaces = layout, spaces or {}
        self._index = {leaf.path: i for i, leaf in enumerate(layout.leaves)}
        if not all(p and all(isinstance(part, str) for part in p) for p in self._index):
            raise ValueError(
                f"{kind} is written from TensorDicts or dicts of tensors, whose keys are strings; nothing was written"
            )
        self._unmapped = [p for p in self._index if p not in IMPLIED]
        self.reward = self._pop(REWARD)
        self.terminated, self.truncated, self.done = (self._index.get(p, -1) for p in (TERMINATED, TRUNCATED, DONE))
        self._unmapped = [p for p in self._unmapped if p not in (TERMINATED, TRUNCATED)]
        self.actions = self._pairs([(p, self._index[p], -1) for p in self._pop_all("action")], 1)
        self.infos = self._info_pairs(single_infos)
        pairs = [p for p in list(self._unmapped) if p[0] not in NO_OBSERVATIONS and self._same_in_next(p)]
        self._unmapped = [p for p in self._unmapped if _root_key(p) not in pairs]
        cut = 1 if self._is_no_dict(pairs) else 0
        self.observations = self._pairs([(p, self._index[p], self._index[next_key(p)]) for p in pairs], cut)
        self._check(kind)

    def leaf(self, index: int) -> LeafSpec:
        return self.layout.leaves[index]

    def _pop(self, path: KeyPath) -> int:
        """The leaf of a key, which has its role now; -1 where there is none."""
        self._unmapped = [p for p in self._unmapped if p != path]
        return self._index.get(path, -1)

    def _pop_all(self, first: str) -> list[KeyPath]:
        """The keys that begin with `first`, which have their role now."""
        paths = [p for p in self._unmapped if p[0] == first]
        self._unmapped = [p for p in self._unmapped if p not in paths]
        return paths

    def _same_in_next(self, path: KeyPath) -> bool:
        other = self._index.get(next_key(path))
        if other is None:
            return False
        a, b = self.leaf(self._index[path]), self.leaf(other)
        return (a.dtype, a.shape) == (b.dtype, b.shape)

    def _info_pairs(self, single: str) -> list[KeyPair]:
        """Infos that are at the root and under "next", or at one of them, if `single` ("root" or "next") names it."""
        names = dict.fromkeys(_root_key(p) for p in self._unmapped if _root_key(p)[:1] == INFO)
        pairs = []
        for path in names:
            root, after = self._index.get(path, -1), self._index.get(next_key(path), -1)
            fits = self._same_in_next(path) if root >= 0 and after >= 0 else (root >= 0) == (single == "root")
            if fits:
                pairs.append((path, root, after))
                self._unmapped = [p for p in self._unmapped if p not in (path, next_key(path))]
        return self._pairs(pairs, 1)

    def _is_no_dict(self, observations: Sequence[KeyPath]) -> bool:
        """Whether observations, which all lie at or below the key `observation`, are one array or a Tuple."""
        if any(path[:1] != OBSERVATION or self._is_whole_place(path) for path in observations):
            return False
        return list(observations) == [OBSERVATION] or OBSERVATION in self._tuples(observations)

    def _is_whole_place(self, path: KeyPath) -> bool:
        """Whether every part of the key of an observation is a key of its space: the outermost one is a Dict."""
        known = self._spaces.get(path)
        return known is not None and len(known.place) == len(path)

    def _pairs(self, pairs: Sequence[tuple[KeyPath, int, int]], cut: int) -> list[KeyPair]:
        """Pairs under the names of their datasets, from keys and leaves; the first `cut` parts of a key are its role.

        The entries of a Tuple are called `_index_0`, ...
        """
        tuples = self._tuples([path for path, _, _ in pairs])
        named = []
        for path, root, after in pairs:
            for part in path[cut:]:
                _require_name(part, path)
            parts = [f"{INDEX}{part}" if path[:depth] in tuples else part for depth, part in enumerate(path)]
            named.append(KeyPair(tuple(parts[cut:]), root, after))
        return named

    def _tuples(self, paths: Sequence[KeyPath]) -> set[KeyPath]:
        """The groups of keys that are Tuples: their keys are "0", "1", ..., and no space says that they are Dicts.

        Keys at the root, and infos, have no Tuple around them.
        """
        below: dict[KeyPath, set[str]] = {}
        dicts: set[KeyPath] = {()}
        for path in paths:
            known = self._spaces.get(path)
            place = () if known is None else known.place
            for depth, part in enumerate(path):
                below.setdefault(path[:depth], set()).add(part)
                at = depth - len(path) + len(place)
                if path[:1] == INFO or (at >= 0 and isinstance(place[at], str)):
                    dicts.add(path[:depth])
        return {group for group, keys in below.items() if keys == {str(i) for i in range(len(keys))}} - dicts

    def _check(self, kind: str) -> None:
        problems = [f"{pytree.format_key(p)} has no place in {kind}" for p in self._unmapped]
        root = self.layout.root
        empty = [p for p in root.empty_groups() if p != TRAJECTORY[:1]]
        problems += [f"{pytree.format_key(p)} has no entries, which {kind} has no place for" for p in empty]
        others = [p for p, value in root.constants().items() if value is not None]
        problems += [f"{pytree.format_key(p)} is no tensor, and {kind} has nothing else" for p in others]
        if self.reward < 0:
            problems.append(f"{pytree.format_key(REWARD)} is missing")
        if not self.actions:
            problems.append("'action' is missing")
        if not self.observations:
            problems.append("an observation is missing: a key at the root and under 'next', of one dtype and shape")
        if self.terminated < 0 and self.done < 0:
            problems.append(f"{pytree.format_key(TERMINATED)} is missing")
        for flag in (self.terminated, self.truncated, self.done):
            if flag >= 0 and (self.leaf(flag).nbytes != 1 or self.leaf(flag).dtype != torch.bool):
                problems.append(f"{pytree.format_key(self.leaf(flag).path)} is not one bool a step")
        problems += [
            f"{pytree.format_key(x.path)} is {x.dtype}, a dtype that {kind} does not have"
            for x in self.layout.leaves
            if x.dtype in _UNSUPPORTED
        ]
        if problems:
            raise ValueError(
                "; ".join(problems)
                + ". exclude= leaves keys out; Parquet and checkpoints keep all of them. Nothing was "
                "written"
            )

    # ---- values of a block of steps ----
    def flags(self, arrays: list[Array], last: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """`terminated` and `truncated`, bool [n]; steps at `last`, where trajectories end, are one or the other."""
        n = len(arrays[0])
        zeros = np.zeros(n, np.bool_)
        truncated = arrays[self.truncated].reshape(n).copy() if self.truncated >= 0 else zeros.copy()
        if self.terminated >= 0:
            terminated = arrays[self.terminated].reshape(n)
        else:
            terminated = arrays[self.done].reshape(n) & ~truncated
        truncated[last] |= ~terminated[last]
        return terminated, truncated

    def rewards(self, arrays: list[Array]) -> Array:
        """[n]; rewards of several numbers [n, k]."""
        rewards = arrays[self.reward]
        return rewards.reshape(len(rewards)) if self.leaf(self.reward).shape in ((), (1,)) else rewards


def flag_leaves(terminated: Array, truncated: Array) -> dict[KeyPath, Array]:
    """The six flags of TED, [n, 1] each; at the root they are False: no step comes after its trajectory has ended."""
    terminated, truncated = (flag.reshape(-1, 1) for flag in (terminated, truncated))
    zeros = [np.zeros_like(terminated) for _ in range(3)]
    return {
        ("done",): zeros[0], ("terminated",): zeros[1], ("truncated",): zeros[2],
        DONE: terminated | truncated, TERMINATED: terminated, TRUNCATED: truncated,
    }  # fmt: skip


def next_key(path: KeyPath) -> KeyPath:
    """The key under "next" of a key at the root."""
    return ("next", *path)


def _root_key(path: KeyPath) -> KeyPath:
    """The reverse of `next_key`."""
    return path[1:] if path[0] == "next" else path


def observation_key(name: tuple[str, ...]) -> KeyPath:
    """The key of an observation, as `GymEnv` has it: that of a Dict space, `observation` where there are none."""
    if not name or name[0].startswith(INDEX):
        return (*OBSERVATION, *key_of(name))
    return key_of(name)


def key_of(name: tuple[str, ...]) -> KeyPath:
    """Names of datasets as keys: `_index_3` of a Tuple space is the key "3"."""
    return tuple(part.removeprefix(INDEX) if _is_index(part) else part for part in name)


def _is_index(part: str) -> bool:
    return part.startswith(INDEX) and part[len(INDEX) :].isdecimal()


def is_utf8(name: str) -> bool:
    """Whether UTF-8 can write a name: it has no surrogates."""
    return name.encode(errors="ignore").decode() == name


def _require_name(part: str, path: KeyPath) -> None:
    """Raises ValueError where a part of a key cannot be the name of a dataset, or would be read as that of a Tuple."""
    if part in ("", ".") or "/" in part or "\0" in part or part.startswith(INDEX) or not is_utf8(part):
        raise ValueError(f"{pytree.format_key(path)}: {part!r} cannot be the name of a dataset; nothing was written")


def batch_of(leaves: Mapping[KeyPath, Any], n: int) -> TensorDict:
    """A TensorDict [n] with these leaves."""
    nested: dict[str, Any] = {}
    for path, array in leaves.items():
        here = nested
        for part in path[:-1]:
            here = here.setdefault(part, {})
        here[path[-1]] = to_tensor(array)
    return TensorDict(nested, batch_size=[n])


BLOCK_BYTES = 16 << 20
#: The largest row that files of datasets may ask for unless more is allowed; bytes.
MAX_ROW_BYTES = 256 << 20
Ints = npt.NDArray[np.int64]


class StepBlock(NamedTuple):
    """Consecutive steps, and the parts of trajectories that they are."""

    rows: Any  #: a batch [n]
    #: [k, 3], for each part in order: its rows, the steps of its trajectory before it, all steps of its trajectory.
    #: None: the steps have neither done flags nor trajectory ids.
    parts: Ints | None


class EpisodeSource(Protocol):
    """Steps to write to a dataset, trajectory by trajectory."""

    @property
    def total(self) -> int | None:
        """The number of steps, if it is known before they are read."""

    def blocks(self) -> Iterator[StepBlock]:
        """All steps."""


def episode_source(data: Any, end_key: Key, traj_key: Key | None, exclude: Sequence[Key]) -> EpisodeSource:
    """The steps of a buffer, a storage, a batch or an iterable of batches.

    Raises:
        TypeError: an object of another kind.
        ValueError: it has no steps.
    """
    excluded = tuple(as_path(key, "exclude") for key in exclude)
    storage = data.storage if isinstance(data, ReplayBuffer) else data
    if isinstance(storage, StorageEnsemble):
        raise TypeError(f"a {type(data).__name__} has several members: write each of them by itself")
    if isinstance(storage, Storage):
        if not len(storage):
            raise ValueError("there is nothing to write: the buffer is empty")
        if storage.lanes.all_removed:
            raise ValueError(f"there is nothing to write: all {len(storage)} stored rows were removed")
        return StoredSteps(storage, EpisodeIndex(end_key=end_key, traj_key=traj_key), excluded)
    batches = [data] if isinstance(data, TensorDictBase) else data
    if isinstance(batches, dict | Tensor | str) or not isinstance(batches, Iterable):
        raise TypeError(
            f"a dataset is written from a buffer, a storage, a TensorDict or an iterable of TensorDicts, got a "
            f"{type(data).__name__}"
        )
    return CollectedSteps(batches, as_path(end_key, "end_key"), traj_key, excluded)


class StoredSteps:
    """The steps of a storage that were not removed, lane by lane, environment by environment, oldest first.

    A trajectory out of which steps were removed is several: one ends before each gap, another begins behind it.
    """

    def __init__(self, storage: Any, episodes: EpisodeIndex, exclude: tuple[KeyPath, ...]) -> None:
        self._storage, self._episodes, self._exclude = storage, episodes, exclude

    @property
    def total(self) -> int:
        return len(self._storage) - int(self._storage.lanes.store.removed_rows)

    def blocks(self) -> Iterator[StepBlock]:
        """All steps; writers of this process wait until the last block was handed out, as during `dumps`."""
        with self._storage.mutex:
            trajectories, rows, removed = self._counted()
            nothing = np.zeros((0, 2), np.int64)
            for lane, stored in enumerate(rows):
                gone = removed[lane]
                for env in range(self._storage.lanes.envs):
                    own = None if trajectories is None else trajectories.get((lane, env), nothing)
                    left = np.ones(len(stored), np.bool_) if gone is None else ~gone[:, env]
                    yield from self._env_blocks(lane, env, stored, left, own)

    def _counted(self) -> tuple[dict[tuple[int, int], Ints] | None, list[range], list[npt.NDArray[np.bool_] | None]]:
        """Starts and lengths [k, 2] of the trajectories of each lane and environment; None without flags and ids.

        And the sequences of the steps of each lane, of the same moment, and which rows of them were removed.
        """
        store = self._storage.lanes.store
        try:
            trajectories, rows = self._episodes.trajectories_and_rows(self._storage)
        except KeyError:
            rows = [range(lane["first"], lane["published"]) for lane in self._storage.lanes.counters()]
            return None, rows, [removed_steps(store, lane, steps) for lane, steps in enumerate(rows)]
        trajectories, removed = without_removed(store, trajectories, rows)
        lanes, envs, *bounds = (t.numpy() for t in trajectories)
        n = self._storage.lanes.envs
        groups, begins = np.unique(lanes * n + envs, return_index=True)
        order = np.argsort(begins)
        pieces = np.split(np.stack(bounds, 1), np.sort(begins)[1:])
        own = {divmod(int(g), n): piece for g, piece in zip(groups[order], pieces, strict=True)}
        return own, rows, removed

    def _env_blocks(
        self, lane: int, env: int, steps: range, left: npt.NDArray[np.bool_], trajectories: Ints | None
    ) -> Iterator[StepBlock]:
        start, stop = steps.start, steps.stop
        if start >= stop or not left.any():
            return
        n, written = block_rows(self._row_bytes(lane, env, start)), False
        for begin in range(start, stop, n):
            end = min(begin + n, stop)
            rows, missing = self._read(lane, env, begin, end)
            if missing and (written or begin + missing == stop):  # the steps before the gap are written already
                raise RuntimeError(
                    "another process overwrote steps before they were written to the dataset; let it pause, or write "
                    "from a larger buffer"
                )
            if begin + missing == end:
                continue
            if trajectories is not None and not written:
                trajectories = _beginning_at(trajectories, begin + missing)
            written = True
            kept = left[begin + missing - start : end - start]
            if not kept.any():
                continue
            if not kept.all():
                rows = pytree.map_outermost(rows, operator.itemgetter(torch.from_numpy(np.flatnonzero(kept))))
            parts = None if trajectories is None else _parts_within(trajectories, begin + missing, end)
            yield StepBlock(pytree.without_entries(rows, self._exclude), parts)

    def _row_bytes(self, lane: int, env: int, start: int) -> int:
        layout = self._storage.layout
        if layout is None:  # items of this process, which no other process overwrites
            layout = RowLayout.of(self._read(lane, env, start, start + 1)[0], 1)
        payload_bytes: int = layout.payload_bytes
        return payload_bytes

    def _read(self, lane: int, env: int, start: int, stop: int) -> tuple[Any, int]:
        """The rows of these steps, and how many of the first are left out: another process overwrote them."""
        store = self._storage.lanes.store
        times = lane * store.lane_capacity + torch.arange(start, stop, device="cpu") % store.lane_capacity
        rows = self._storage.read(times * store.envs + env)
        missing = max([*(rows.overwritten or ()), *(rows.absent or ())], default=-1) + 1
        if isinstance(rows.batch, list):
            return stack(rows.batch[missing:], 0) if missing < stop - start else [], missing
        left = pytree.map_outermost(rows.batch, lambda part: part[missing:]) if missing else rows.batch
        return left, missing


def _beginning_at(trajectories: Ints, start: int) -> Ints:
    """The trajectories (starts, lengths) without what lies before a step."""
    stops = trajectories.sum(1)
    left = stops > start
    starts = np.maximum(trajectories[left, 0], start)
    return np.stack([starts, stops[left] - starts], 1)


def _parts_within(trajectories: Ints, start: int, stop: int) -> Ints:
    """The parts of trajectories (starts, lengths) that lie in [start, stop), as a `StepBlock` has them."""
    starts = trajectories[:, 0]
    first = np.searchsorted(starts, start, "right") - 1
    inside = trajectories[max(0, first) : np.searchsorted(starts, stop, "left")]
    inside = inside[inside.sum(1) > start]  # between two, steps may have been removed
    begin = np.maximum(inside[:, 0], start)
    return np.stack([np.minimum(inside.sum(1), stop) - begin, begin - inside[:, 0], inside[:, 1]], 1)


class CollectedSteps:
    """The steps of batches `[time]` or `[envs, time]`, as a collector hands them out.

    A trajectory that continues in the next batch is kept in memory until it ends.
    """

    total = None

    def __init__(
        self, batches: Iterable[Any], end_key: KeyPath, traj_key: Key | None, exclude: tuple[KeyPath, ...]
    ) -> None:
        self._batches, self._end_key, self._exclude = batches, end_key, exclude
        ids = IDS if end_key == DONE else ()
        self._id_keys = ids if traj_key is None else (as_path(traj_key, "traj_key"),)
        self._envs: list[_OpenTrajectory] = []

    def blocks(self) -> Iterator[StepBlock]:
        empty = True
        for batch in self._batches:
            if not isinstance(batch, TensorDictBase) or batch.batch_dims == 0:
                raise TypeError(f"a batch is a TensorDict [time] or [envs, time], got {batch!r:.80}")
            rows = batch.reshape(-1, batch.shape[-1])
            if not rows.numel():
                continue
            empty = False
            yield from self._blocks_of(rows)
        if empty:
            raise ValueError("there is nothing to write: no batch had steps")
        for env in self._envs:
            yield from env.finish(self._exclude)

    def _blocks_of(self, rows: Any) -> Iterator[StepBlock]:
        ids, done = self._values(rows, self._id_keys), self._values(rows, (self._end_key,))
        if ids is None and done is None:
            yield StepBlock(pytree.without_entries(rows.reshape(-1), self._exclude), None)
            return
        if not self._envs:
            self._envs = [_OpenTrajectory() for _ in range(len(rows))]
        if len(rows) != len(self._envs):
            raise ValueError(f"a batch has {len(rows)} environments, those before had {len(self._envs)}")
        for e, env in enumerate(self._envs):
            yield from env.add(
                rows[e], None if ids is None else ids[e], None if done is None else done[e], self._exclude
            )

    @staticmethod
    def _values(rows: Any, keys: Sequence[KeyPath]) -> npt.NDArray[Any] | None:
        """The values of the first of these keys that the rows have, one a step."""
        for key in keys:
            values = pytree.get_entry(rows, key)
            if isinstance(values, Tensor):
                if values.numel() != rows.numel():
                    raise ValueError(
                        f"{pytree.format_key(key)} has the shape {list(values.shape)} in a batch {list(rows.shape)}; "
                        "one flag or id a step is needed, which marks where trajectories end"
                    )
                flat: npt.NDArray[Any] = values.detach().cpu().reshape(rows.shape).numpy()
                return flat
        return None


class _OpenTrajectory:
    """The trajectory of one environment that has not ended."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._id: Any = None

    def add(self, rows: Any, ids: Any, done: Any, exclude: tuple[KeyPath, ...]) -> Iterator[StepBlock]:
        """Adds steps; yields the trajectories that are complete with them."""
        if self._held and ids is not None and ids[0] != self._id:
            yield from self.finish(exclude)
        n = len(rows)
        if ids is None:
            ends = np.flatnonzero(done)
        else:
            # As for samplers, a flag inside a trajectory does not end it; one at the end of a batch, where no id
            # follows, does.
            last = [n - 1] if done is not None and done[-1] else []
            ends = np.concatenate([np.flatnonzero(ids[1:] != ids[:-1]), np.array(last, np.int64)])
            self._id = ids[-1]
        if not len(ends):
            self._held.append(rows.clone())
            return
        stop, before = int(ends[-1]) + 1, sum(len(h) for h in self._held)
        whole = torch.cat([*self._held, rows[:stop]]) if self._held else rows[:stop]
        lengths = np.diff(ends + 1 + before, prepend=0)
        self._held = [rows[stop:].clone()] if stop < n else []
        yield StepBlock(pytree.without_entries(whole, exclude), np.stack([lengths, np.zeros_like(lengths), lengths], 1))

    def finish(self, exclude: tuple[KeyPath, ...]) -> Iterator[StepBlock]:
        """The steps that are held, as a trajectory of their own."""
        if self._held:
            rows = torch.cat(self._held)
            self._held = []
            yield StepBlock(pytree.without_entries(rows, exclude), np.array([[len(rows), 0, len(rows)]], np.int64))


def whole_trajectories(blocks: Iterable[TensorDict]) -> Iterator[TensorDict]:
    """The trajectories of blocks of consecutive steps, each whole, told apart by their ids."""
    held: list[TensorDict] = []
    for block in blocks:
        lengths = torch.unique_consecutive(block[TRAJECTORY], return_counts=True)[1].tolist()
        for part in block.split(lengths):
            if held and int(held[-1][TRAJECTORY][-1]) != int(part[TRAJECTORY][0]):
                yield torch.cat(held)
                held = []
            held.append(part)
    if held:
        yield torch.cat(held)


def _uncut(blocks: Iterable[Any]) -> Iterator[Any]:
    """Blocks of the same steps none of which ends within a trajectory, where steps have ids.

    One is kept until the next is there, as the last trajectory of a file, which may have no end, must not be alone.
    """
    whole: list[Any] = []
    open_parts: list[Any] = []
    for block in blocks:
        ids = block.get(TRAJECTORY, None) if isinstance(block, TensorDictBase) else None
        if ids is None:
            yield block
            continue
        ids = ids.reshape(-1)
        before = open_parts[-1].get(TRAJECTORY).reshape(-1)[-1:] if open_parts else ids[:1]
        borders = (torch.cat([before, ids[:-1]]) != ids).nonzero().flatten()
        if len(borders):
            yield from whole
            last = int(borders[-1])
            whole, open_parts = [torch.cat([*open_parts, block[:last]])], [block[last:]]
        else:
            open_parts.append(block)
    if open_parts:
        yield torch.cat([*whole, *open_parts])


def block_rows(row_bytes: int) -> int:
    """The number of steps of this size that make a block."""
    return max(1, BLOCK_BYTES // max(1, row_bytes))


_MAX_JSON_BYTES = 64 << 20


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is no file.

    Raises:
        DatasetError: it is too long, or holds something else.
    """
    try:
        with open(open_regular(file, follow_links=True), "rb") as opened:
            text = opened.read(_MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        return {}
    if len(text) > _MAX_JSON_BYTES:
        raise DatasetError(str(file), f"is longer than {_MAX_JSON_BYTES} bytes")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatasetError(str(file), f"is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise DatasetError(str(file), "is no JSON object")
    return found


_IDS_AT_ONCE = 1 << 20


def check_buffer(buffer: Any) -> None:
    """TypeError or ValueError where a buffer does not take batches `[time]`."""
    if not isinstance(buffer, ReplayBuffer):
        raise TypeError(f"a dataset is read into a buffer, got a {type(buffer).__name__}")
    if buffer.storage.ndim != 1:
        raise ValueError(
            f"the buffer's storage has ndim={buffer.storage.ndim}, whose batches are [envs, time]; the steps of a "
            "dataset come one after the other: read into a storage with ndim=1"
        )


def ingest(blocks: Iterable[Any], buffer: Any, path: Any, total: int | None, shown: bool) -> int:
    """Writes blocks to a buffer; returns the number of steps.

    Raises:
        DatasetError: with the number of steps that were written; the block that failed wrote none.
    """
    capacity = buffer.storage.max_size
    if total is not None and capacity is not None and total > capacity:
        text = f"{visible(path)} has {total} steps, the buffer keeps {capacity}: only the last ones stay"
        warn_user(text)
    rows = 0
    with progress_bar(f"reading {path}", total, shown) as advance:
        try:
            for block in _uncut(blocks) if buffer.transform.takes_whole_trajectories else blocks:
                _extend(buffer, block, path)
                steps = _steps_of(block)
                rows += steps
                advance(steps)
        except DatasetError as error:
            raise DatasetError(error.file, error.reason, rows) from error.__cause__
    return rows


def _steps_of(block: Any) -> int:
    """The number of steps in a block: a dict's or a tuple's length is the number of its entries."""
    return len(block) if isinstance(block, TensorDictBase) else len(pytree.describe(block, 1)[1][0][1])


def _extend(buffer: Any, block: Any, path: Any) -> None:
    try:
        buffer.extend(block)
    except (ValueError, TypeError) as error:
        raise DatasetError(str(path), f"its steps do not fit the buffer: {error}") from error


def next_trajectory(storage: Any) -> int:
    """A trajectory id above those in the storage: no step of a dataset continues a stored trajectory."""
    if not len(storage) or storage.leaf(TRAJECTORY) is None:
        return 0
    highest = -1
    with storage.mutex:
        store = storage.lanes.store
        for lane, state in enumerate(storage.lanes.states()):
            for start in range(state["first"], state["published"], _IDS_AT_ONCE):
                sequences = torch.arange(start, min(start + _IDS_AT_ONCE, state["published"]), device="cpu")
                slots = lane * store.lane_capacity + sequences % store.lane_capacity
                highest = max(highest, int(storage.column(TRAJECTORY, slots).max()))
    return highest + 1
