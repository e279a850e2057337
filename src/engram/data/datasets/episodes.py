"""Which key of an episode (TED) is which dataset of Minari and D4RL files."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TextIO

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram import pytree
from engram.errors import DatasetError
from engram.pytree import Key, KeyPath, as_path, stack
from engram.store.episodes import DONE, IDS, EpisodeIndex
from engram.store.layout import LeafSpec, RowLayout

Array = npt.NDArray[Any]

OBSERVATION: KeyPath = ("observation",)
ACTION: KeyPath = ("action",)
INFO: KeyPath = ("info",)
REWARD: KeyPath = ("next", "reward")
TERMINATED, TRUNCATED = ("next", "terminated"), ("next", "truncated")
TRAJECTORY: KeyPath = ("collector", "traj_ids")
#: What the datasets say in other words (where trajectories start and end), or what belongs to the buffer alone.
IMPLIED: tuple[KeyPath, ...] = (TRAJECTORY, ("episode",), ("index",), ("done",), ("terminated",), ("truncated",), DONE)
_NO_PLACE = (torch.bfloat16, torch.complex64, torch.complex128)
INDEX = "_index_"


class Pair(NamedTuple):
    """A key at the root and what followed it under "next": numbers of leaves; -1: there is none."""

    name: tuple[str, ...]  # of the dataset, below its role
    now: int
    after: int


class Roles:
    """What the leaves of a stored step are to a dataset.

    Raises:
        ValueError: a key has no place in it, or one that it needs is missing; all of them are listed.
    """

    def __init__(self, layout: RowLayout, kind: str, lone_infos: str) -> None:
        self.layout = layout
        self._at = {leaf.path: i for i, leaf in enumerate(layout.leaves)}
        if not all(p and all(isinstance(part, str) for part in p) for p in self._at):
            raise ValueError(f"{kind} is made of TensorDicts or dicts of tensors; nothing was written")
        self._left = [p for p in self._at if p not in IMPLIED]
        self.reward = self._take(REWARD)
        self.terminated, self.truncated, self.done = (self._at.get(p, -1) for p in (TERMINATED, TRUNCATED, DONE))
        self._left = [p for p in self._left if p not in (TERMINATED, TRUNCATED)]
        self.actions = self._names([(p, p[1:], self._at[p], -1) for p in self._taken(lambda p: p[0] == "action")])
        self.infos = self._infos(lone_infos)
        pairs = [p for p in list(self._left) if p[0] != "next" and self._same(p)]
        self._left = [p for p in self._left if p not in pairs and p[1:] not in pairs]
        alone = pairs == [OBSERVATION]
        nested = not alone and all(p[0] == "observation" for p in pairs) and _is_tuple({p[1] for p in pairs})
        cut = 1 if alone or nested else 0
        self.observations = self._names([(p, p[cut:], self._at[p], self._at[following(p)]) for p in pairs])
        self._refuse(kind)

    def leaf(self, at: int) -> LeafSpec:
        return self.layout.leaves[at]

    def _take(self, path: KeyPath) -> int:
        self._left = [p for p in self._left if p != path]
        return self._at.get(path, -1)

    def _taken(self, wanted: Any) -> list[KeyPath]:
        found = [p for p in self._left if wanted(p)]
        self._left = [p for p in self._left if p not in found]
        return found

    def _same(self, path: KeyPath) -> bool:
        other = self._at.get(following(path))
        if other is None:
            return False
        a, b = self.leaf(self._at[path]), self.leaf(other)
        return (a.dtype, a.shape) == (b.dtype, b.shape)

    def _infos(self, lone: str) -> list[Pair]:
        """Infos at both places, or only where `lone` allows it: "now", "after"."""
        names = dict.fromkeys(_at_root(p) for p in self._left if _at_root(p)[:1] == INFO)
        found = []
        for path in names:
            now, after = self._at.get(path, -1), self._at.get(following(path), -1)
            fits = self._same(path) if now >= 0 and after >= 0 else (now >= 0) == (lone == "now")
            if fits:
                found.append((path, path[1:], now, after))
                self._left = [p for p in self._left if p not in (path, ("next", *path))]
        return self._names(found)

    def _names(self, found: Sequence[tuple[KeyPath, KeyPath, int, int]]) -> list[Pair]:
        return [Pair(name, now, after) for name, (_, _, now, after) in zip(_names(found), found, strict=True)]

    def _refuse(self, kind: str) -> None:
        said = [f"{pytree.format_key(p)} has no place in {kind}" for p in self._left]
        if self.reward < 0:
            said.append(f"{pytree.format_key(REWARD)} is missing")
        if not self.actions:
            said.append("'action' is missing")
        if not self.observations:
            said.append("there is no observation: a key at the root and under 'next', of one dtype and shape")
        if self.terminated < 0 and self.done < 0:
            said.append(f"{pytree.format_key(TERMINATED)} is missing")
        for at in (self.terminated, self.truncated, self.done):
            if at >= 0 and (self.leaf(at).nbytes != 1 or self.leaf(at).dtype != torch.bool):
                said.append(f"{pytree.format_key(self.leaf(at).path)} is not one bool a step")
        said += [
            f"{pytree.format_key(x.path)} is {x.dtype}, which {kind} has not"
            for x in self.layout.leaves
            if x.dtype in _NO_PLACE
        ]
        if said:
            raise ValueError(
                "; ".join(said) + ". exclude= leaves keys out; Parquet and checkpoints keep all of them. Nothing was "
                "written"
            )

    # ---- flags of a block of steps ----
    def flags(self, arrays: list[Array], last: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """`terminated` and `truncated`, bool [n]. Steps at `last` end a trajectory: truncated, if nothing else."""
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
        found = arrays[self.reward]
        return found.reshape(len(found)) if self.leaf(self.reward).shape in ((), (1,)) else found


def flag_leaves(terminated: Array, truncated: Array) -> dict[KeyPath, Array]:
    """The six flags of TED, [n, 1] each: a trajectory that is being read has not ended before a step."""
    terminated, truncated = (flag.reshape(-1, 1) for flag in (terminated, truncated))
    zeros = [np.zeros_like(terminated) for _ in range(3)]
    return {
        ("done",): zeros[0], ("terminated",): zeros[1], ("truncated",): zeros[2],
        DONE: terminated | truncated, TERMINATED: terminated, TRUNCATED: truncated,
    }  # fmt: skip


def following(path: KeyPath) -> KeyPath:
    """Where what followed a key of the root is."""
    return ("next", *path)


def _at_root(path: KeyPath) -> KeyPath:
    """Where a key under "next" has its counterpart."""
    return path[1:] if path[0] == "next" else path


def observation_key(name: tuple[str, ...]) -> KeyPath:
    """The key of an observation: a space's own, as `GymEnv` has them; `observation` where it has none."""
    if not name or name[0].startswith(INDEX):
        return (*OBSERVATION, *plain(name))
    return plain(name)


def plain(name: tuple[str, ...]) -> KeyPath:
    """Names as keys: `_index_3` of a Tuple is the key "3"."""
    return tuple(part.removeprefix(INDEX) if _is_index(part) else part for part in name)


def _is_index(part: str) -> bool:
    return part.startswith(INDEX) and part[len(INDEX) :].isdecimal()


def _is_tuple(keys: set[str]) -> bool:
    return keys == {str(i) for i in range(len(keys))}


def _names(found: Sequence[tuple[KeyPath, KeyPath, int, int]]) -> list[tuple[str, ...]]:
    """Names of datasets: keys "0", "1", ... of one place are a Tuple, whose entries are called `_index_0`, ..."""
    below: dict[KeyPath, set[str]] = {}
    for path, name, _, _ in found:
        for depth, part in enumerate(name):
            if part in ("", ".") or "/" in part or "\0" in part or part.startswith(INDEX):
                raise ValueError(
                    f"{pytree.format_key(path)}: {part!r} cannot be the name of a dataset; nothing was written"
                )
            below.setdefault(name[:depth], set()).add(part)
    tuples = {place for place, keys in below.items() if _is_tuple(keys)}
    return [
        tuple(f"{INDEX}{part}" if name[:depth] in tuples else part for depth, part in enumerate(name))
        for _, name, _, _ in found
    ]


def batch_of(leaves: Mapping[KeyPath, Any], n: int) -> TensorDict:
    """A TensorDict [n] with these leaves."""
    nested: dict[str, Any] = {}
    for path, array in leaves.items():
        here = nested
        for part in path[:-1]:
            here = here.setdefault(part, {})
        here[path[-1]] = torch.as_tensor(array)
    return TensorDict(nested, batch_size=[n])


BLOCK_BYTES = 16 << 20
Ints = npt.NDArray[np.int64]


class Block(NamedTuple):
    """Steps that follow each other, and the trajectories that they are of."""

    rows: Any  #: a batch [n]
    #: [k, 3], in order: how many of the rows are of a trajectory, how many steps it had before, how many it has in
    #: all. None: the steps have neither done flags nor trajectory ids.
    parts: Ints | None


class Source(Protocol):
    """Something that has steps."""

    @property
    def total(self) -> int | None: ...
    def blocks(self) -> Iterator[Block]: ...


def source_of(data: Any, end_key: Key, traj_key: Key | None, exclude: Sequence[Key]) -> Source:
    """The steps of a buffer, a storage, a batch or an iterable of batches.

    Raises:
        TypeError: it is none of these.
        ValueError: there is no step.
    """
    leave_out = tuple(as_path(key, "exclude") for key in exclude)
    storage = getattr(data, "storage", data)
    if hasattr(storage, "storages"):
        raise TypeError(f"a {type(data).__name__} has several members: write each of them by itself")
    if hasattr(storage, "lanes") and hasattr(storage, "read"):
        if storage.lanes is None or not len(storage):
            raise ValueError("there is nothing to write: the buffer is empty")
        return StoredSteps(storage, EpisodeIndex(end_key=end_key, traj_key=traj_key), leave_out)
    batches = [data] if isinstance(data, TensorDictBase) else data
    if isinstance(batches, dict | Tensor | str) or not isinstance(batches, Iterable):
        raise TypeError(
            f"a dataset is written from a buffer, a storage, a TensorDict or an iterable of TensorDicts, got a "
            f"{type(data).__name__}"
        )
    return CollectedSteps(batches, as_path(end_key, "end_key"), traj_key, leave_out)


class StoredSteps:
    """The steps of a storage, lane by lane, strand by strand, oldest first."""

    def __init__(self, storage: Any, episodes: EpisodeIndex, leave_out: tuple[KeyPath, ...]) -> None:
        self._storage, self._episodes, self._leave_out = storage, episodes, leave_out

    @property
    def total(self) -> int:
        return len(self._storage)

    def blocks(self) -> Iterator[Block]:
        """Writers of this process wait until the last block was taken, as during `dumps`."""
        with self._storage.mutex:
            found = self._trajectories()
            for lane, state in enumerate(self._storage.lanes.states()):
                for strand in range(self._storage.lanes.envs):
                    mine = found.get((lane, strand), np.zeros((0, 2), np.int64)) if found is not None else None
                    yield from self._run(lane, strand, state["first"], state["published"], mine)

    def _trajectories(self) -> dict[tuple[int, int], Ints] | None:
        """Starts and lengths [k, 2] of each strand; None where nothing says where trajectories end."""
        try:
            found = [t.numpy() for t in self._episodes.trajectories(self._storage)]
        except KeyError:
            return None
        strands = self._storage.lanes.envs
        groups, begins = np.unique(found[0] * strands + found[1], return_index=True)
        order = np.argsort(begins)
        pieces = np.split(np.stack(found[2:], 1), np.sort(begins)[1:])
        return {divmod(int(g), strands): piece for g, piece in zip(groups[order], pieces, strict=True)}

    def _run(self, lane: int, strand: int, start: int, stop: int, found: Ints | None) -> Iterator[Block]:
        if start >= stop:
            return
        n = block_rows(RowLayout.of(self._read(lane, strand, start, start + 1), 1).payload_bytes)
        for begin in range(start, stop, n):
            end = min(begin + n, stop)
            rows = pytree.without_entries(self._read(lane, strand, begin, end), self._leave_out)
            yield Block(rows, None if found is None else _within(found, begin, end))

    def _read(self, lane: int, strand: int, start: int, stop: int) -> Any:
        store = self._storage.lanes.store
        times = lane * store.lane_capacity + torch.arange(start, stop) % store.lane_capacity
        rows, gone, absent, _ = self._storage.read(times * store.envs + strand)
        if gone is not None or absent is not None:
            raise RuntimeError(
                "another process overwrote steps before they were written to the dataset; let it pause, or write from "
                "a larger buffer"
            )
        return stack(rows, 0) if isinstance(rows, list) else rows


def _within(found: Ints, start: int, stop: int) -> Ints:
    """The parts of trajectories (starts, lengths) that lie in [start, stop)."""
    first = np.searchsorted(found[:, 0], start, "right") - 1
    mine = found[max(0, first) : np.searchsorted(found[:, 0], stop, "left")]
    begin = np.maximum(mine[:, 0], start)
    parts = np.stack([np.minimum(mine.sum(1), stop) - begin, begin - mine[:, 0], mine[:, 1]], 1)
    return parts


class CollectedSteps:
    """The steps of batches `[time]` or `[envs, time]`, as a collector hands them out.

    A trajectory that goes on in the next batch is kept in memory until it ends.
    """

    total = None

    def __init__(
        self, batches: Iterable[Any], end_key: KeyPath, traj_key: Key | None, leave_out: tuple[KeyPath, ...]
    ) -> None:
        self._batches, self._end_key, self._leave_out = batches, end_key, leave_out
        ids = IDS if end_key == DONE else ()
        self._id_keys = ids if traj_key is None else (as_path(traj_key, "traj_key"),)
        self._open: list[_Strand] = []

    def blocks(self) -> Iterator[Block]:
        some = False
        for batch in self._batches:
            if not isinstance(batch, TensorDictBase) or batch.batch_dims == 0:
                raise TypeError(f"a batch is a TensorDict [time] or [envs, time], got {batch!r:.80}")
            rows = batch.reshape(-1, batch.shape[-1])
            if not rows.numel():
                continue
            some = True
            yield from self._blocks_of(rows)
        if not some:
            raise ValueError("there is nothing to write: there was no batch with steps")
        for strand in self._open:
            yield from strand.finish(self._leave_out)

    def _blocks_of(self, rows: Any) -> Iterator[Block]:
        ids, done = self._first(rows, self._id_keys), self._first(rows, (self._end_key,))
        if ids is None and done is None:
            yield Block(pytree.without_entries(rows.reshape(-1), self._leave_out), None)
            return
        if not self._open:
            self._open = [_Strand() for _ in range(len(rows))]
        if len(rows) != len(self._open):
            raise ValueError(f"a batch has {len(rows)} environments, those before had {len(self._open)}")
        for e, strand in enumerate(self._open):
            yield from strand.take(
                rows[e], None if ids is None else ids[e], None if done is None else done[e], self._leave_out
            )

    @staticmethod
    def _first(rows: Any, keys: Sequence[KeyPath]) -> npt.NDArray[Any] | None:
        for key in keys:
            found = pytree.get_entry(rows, key)
            if found is not None:
                if found.numel() != rows.numel():
                    raise ValueError(
                        f"{pytree.format_key(key)} has the shape {list(found.shape)} in a batch {list(rows.shape)}; "
                        "one flag or id a step says where trajectories end"
                    )
                flat: npt.NDArray[Any] = found.detach().cpu().reshape(rows.shape).numpy()
                return flat
        return None


class _Strand:
    """One environment, and its trajectory that has not ended."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._id: Any = None

    def take(self, rows: Any, ids: Any, done: Any, leave_out: tuple[KeyPath, ...]) -> Iterator[Block]:
        """The trajectories that are complete now."""
        if self._held and ids is not None and ids[0] != self._id:
            yield from self.finish(leave_out)
        n = len(rows)
        if ids is None:
            ends = np.flatnonzero(done)
        else:
            # A flag inside a trajectory is no end, as for samplers; at the end of a batch it is one: nothing follows.
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
        yield Block(pytree.without_entries(whole, leave_out), np.stack([lengths, np.zeros_like(lengths), lengths], 1))

    def finish(self, leave_out: tuple[KeyPath, ...]) -> Iterator[Block]:
        """What is held, as a trajectory."""
        if self._held:
            rows = torch.cat(self._held)
            self._held = []
            yield Block(pytree.without_entries(rows, leave_out), np.array([[len(rows), 0, len(rows)]], np.int64))


def block_rows(row_bytes: int) -> int:
    """How many steps of this size make a block."""
    return max(1, BLOCK_BYTES // max(1, row_bytes))


_SECONDS_APART = 0.1


@contextmanager
def progress_bar(what: str, total: int | None, shown: bool) -> Iterator[Callable[[int], None]]:
    """Gives a function that counts steps; the count appears on standard error if that is a terminal, and `shown`.

    It is a bar where rich is installed (`pip install "engram[progress]"`), else a line of text.
    """
    if not shown:
        yield lambda steps: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        with _progress_line(what, total, sys.stderr) as advance:
            yield advance
        return
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda steps: bar.advance(task, steps)


@contextmanager
def _progress_line(what: str, total: int | None, screen: TextIO | None) -> Iterator[Callable[[int], None]]:
    if screen is None or not screen.isatty():
        yield lambda steps: None
        return
    line, count, next_time = "", 0, 0.0

    def advance(steps: int) -> None:
        nonlocal line, count, next_time
        count += steps
        if time.monotonic() < next_time:
            return
        next_time = time.monotonic() + _SECONDS_APART
        line = f"{what}: {count:,} steps" if total is None else f"{what}: {count:,} of {total:,} steps"
        print(f"\r{line}", end="", file=screen, flush=True)

    advance(0)
    try:
        yield advance
    finally:
        print(f"\r{' ' * len(line)}\r", end="", file=screen, flush=True)


_IDS_AT_ONCE = 1 << 20


def check_buffer(buffer: Any) -> None:
    """TypeError or ValueError where steps that follow each other cannot be written to a buffer."""
    storage = getattr(buffer, "storage", None)
    if storage is None or not hasattr(buffer, "extend"):
        raise TypeError(f"a dataset is read into a buffer, got a {type(buffer).__name__}")
    if storage.ndim != 1:
        raise ValueError(
            f"the buffer's storage has ndim={storage.ndim}, whose batches are [envs, time]; the steps of a dataset "
            "come one after the other: read into a storage with ndim=1"
        )


def take(blocks: Iterable[Any], buffer: Any, path: Any, total: int | None, shown: bool) -> int:
    """Extends a buffer by each block; returns the number of steps.

    Raises:
        DatasetError: with the number of steps that were taken; nothing of the block that failed is.
    """
    room = buffer.storage.max_size
    if total is not None and room is not None and total > room:
        warnings.warn(f"{path} has {total} steps, the buffer keeps {room}: the last ones stay", stacklevel=3)
    rows = 0
    with progress_bar(f"reading {path}", total, shown) as advance:
        try:
            for block in blocks:
                _extend(buffer, block, path)
                rows += len(block)
                advance(len(block))
        except DatasetError as error:
            raise DatasetError(error.file, error.reason, rows) from error.__cause__
    return rows


def _extend(buffer: Any, block: Any, path: Any) -> None:
    try:
        buffer.extend(block)
    except (ValueError, TypeError) as error:
        raise DatasetError(str(path), f"its steps do not fit the buffer: {error}") from error


def next_trajectory(storage: Any) -> int:
    """A trajectory id larger than those that are stored: steps of a dataset never go on a stored trajectory."""
    if storage.lanes is None or not len(storage) or storage.leaf(TRAJECTORY) is None:
        return 0
    highest = -1
    with storage.mutex:
        store = storage.lanes.store
        for lane, state in enumerate(storage.lanes.states()):
            for start in range(state["first"], state["published"], _IDS_AT_ONCE):
                numbers = torch.arange(start, min(start + _IDS_AT_ONCE, state["published"]))
                slots = lane * store.lane_capacity + numbers % store.lane_capacity
                highest = max(highest, int(storage.column(TRAJECTORY, slots).max()))
    return highest + 1
