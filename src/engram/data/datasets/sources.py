"""What is written to a dataset: stored or collected steps, trajectory by trajectory, in blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.data.replay_buffers import trees
from engram.data.replay_buffers.episodes import DONE, IDS, Episodes, Key, path_of
from engram.data.replay_buffers.layout import RowLayout
from engram.data.replay_buffers.stacking import stack_rows
from engram.data.replay_buffers.trees import Path

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
    leave_out = tuple(path_of(key, "exclude") for key in exclude)
    storage = getattr(data, "storage", data)
    if hasattr(storage, "storages"):
        raise TypeError(f"a {type(data).__name__} has several members: write each of them by itself")
    if hasattr(storage, "lanes") and hasattr(storage, "read"):
        if storage.lanes is None or not len(storage):
            raise ValueError("there is nothing to write: the buffer is empty")
        return StoredSteps(storage, Episodes(end_key=end_key, traj_key=traj_key), leave_out)
    batches = [data] if isinstance(data, TensorDictBase) else data
    if isinstance(batches, dict | Tensor | str) or not isinstance(batches, Iterable):
        raise TypeError(
            f"a dataset is written from a buffer, a storage, a TensorDict or an iterable of TensorDicts, got a "
            f"{type(data).__name__}"
        )
    return CollectedSteps(batches, path_of(end_key, "end_key"), traj_key, leave_out)


class StoredSteps:
    """The steps of a storage, lane by lane, strand by strand, oldest first."""

    def __init__(self, storage: Any, episodes: Episodes, leave_out: tuple[Path, ...]) -> None:
        self._storage, self._episodes, self._leave_out = storage, episodes, leave_out

    @property
    def total(self) -> int:
        return len(self._storage)

    def blocks(self) -> Iterator[Block]:
        """Writers of this process wait until the last block was taken, as during `dumps`."""
        with self._storage.mutex:
            found = self._trajectories()
            for lane, state in enumerate(self._storage.lanes.states()):
                for strand in range(self._storage.lanes.strands):
                    mine = found.get((lane, strand), np.zeros((0, 2), np.int64)) if found is not None else None
                    yield from self._run(lane, strand, state["first"], state["published"], mine)

    def _trajectories(self) -> dict[tuple[int, int], Ints] | None:
        """Starts and lengths [k, 2] of each strand; None where nothing says where trajectories end."""
        try:
            found = [t.numpy() for t in self._episodes.trajectories(self._storage)]
        except KeyError:
            return None
        strands = self._storage.lanes.strands
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
            rows = without(self._read(lane, strand, begin, end), self._leave_out)
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
        return stack_rows(rows, 0) if isinstance(rows, list) else rows


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
        self, batches: Iterable[Any], end_key: Path, traj_key: Key | None, leave_out: tuple[Path, ...]
    ) -> None:
        self._batches, self._end_key, self._leave_out = batches, end_key, leave_out
        ids = IDS if end_key == DONE else ()
        self._id_keys = ids if traj_key is None else (path_of(traj_key, "traj_key"),)
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
            yield Block(without(rows.reshape(-1), self._leave_out), None)
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
    def _first(rows: Any, keys: Sequence[Path]) -> npt.NDArray[Any] | None:
        for key in keys:
            found = trees.entry(rows, key)
            if found is not None:
                if found.numel() != rows.numel():
                    raise ValueError(
                        f"{trees.show(key)} has the shape {list(found.shape)} in a batch {list(rows.shape)}; one flag "
                        "or id a step says where trajectories end"
                    )
                flat: npt.NDArray[Any] = found.detach().cpu().reshape(rows.shape).numpy()
                return flat
        return None


class _Strand:
    """One environment, and its trajectory that has not ended."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._id: Any = None

    def take(self, rows: Any, ids: Any, done: Any, leave_out: tuple[Path, ...]) -> Iterator[Block]:
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
        yield Block(without(whole, leave_out), np.stack([lengths, np.zeros_like(lengths), lengths], 1))

    def finish(self, leave_out: tuple[Path, ...]) -> Iterator[Block]:
        """What is held, as a trajectory."""
        if self._held:
            rows = torch.cat(self._held)
            self._held = []
            yield Block(without(rows, leave_out), np.array([[len(rows), 0, len(rows)]], np.int64))


def block_rows(row_bytes: int) -> int:
    """How many steps of this size make a block."""
    return max(1, BLOCK_BYTES // max(1, row_bytes))


def without(batch: Any, paths: tuple[Path, ...]) -> Any:
    """The batch without these keys; ValueError where it has them not."""
    for path in paths:
        if trees.entry(batch, path) is None:
            raise ValueError(f"exclude names {trees.show(path)}, which the steps do not have")
    if not paths:
        return batch
    if isinstance(batch, TensorDictBase):
        return batch.exclude(*paths)
    if isinstance(batch, dict):
        return _pruned(batch, paths)
    raise TypeError(f"exclude is for TensorDicts and dicts; the steps are a {type(batch).__name__}")


def _pruned(batch: dict[str, Any], paths: Sequence[Path]) -> dict[str, Any]:
    kept = {}
    for key, value in batch.items():
        below = [path[1:] for path in paths if path[0] == key]
        if () not in below:
            kept[key] = without(value, tuple(below))
    return kept
