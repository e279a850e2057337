"""Steps that were saved as trajectories: what a step leads to stands at the root of the step after, so that each
trajectory has one value more than steps of the keys that are under `next` too. Flat: trajectories one after the other;
nested: the same with their lengths beside them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engram.data.replay_buffers.checkpointers.torchrl.folders import Bytes, Column, Folder
from engram.data.replay_buffers.checkpointers.torchrl.memmaps import META, Saved, Tree
from engram.data.replay_buffers.checkpointers.torchrl.steps import METADATA, Leaf, Misfit, Steps, lead_of
from engram.data.replay_buffers.trees import Path, show
from engram.errors import CheckpointError

Numbers = npt.NDArray[np.int64]
SHIFT, FULL, SHAPE, DONE = "shift", "is_full", "_storage_shape", "done"
FLAGS, REWARDS = (DONE, "terminated", "truncated"), ("reward",)
_NEXT = "next"
_PIECE = 1 << 22


class Ring(NamedTuple):
    """How the steps lie: every strand has `capacity` of them, oldest first where the ring was full."""

    capacity: int
    length: int
    inner: tuple[int, ...]
    shift: int
    is_full: bool

    @property
    def strands(self) -> int:
        return math.prod(self.inner)


def ring_of(folder: Folder, name: str, said: Mapping[str, Any], length: Any, ndim: int) -> Ring:
    """Checks what a directory says of its ring; `name` is the file that says it."""
    shape = folder.shape(name, said.get(SHAPE))
    if len(shape) != ndim:
        raise Misfit(f"{folder.path} has steps of shape {list(shape)}, this storage ndim={ndim}")
    capacity, steps = lead_of(folder, name, shape, ndim, length)
    shift, full = folder.count(name, said.get(SHIFT)), said.get(FULL)
    if type(full) is not bool or full is not (steps == capacity) or shift > capacity or (not full and shift != steps):
        raise folder.bad(name, f"shift {shift} and is_full {full!r:.20} are not those of {steps} steps in {capacity}")
    return Ring(capacity, steps, tuple(shape[1:]), shift, full)


class Trajectories:
    """Where trajectories begin, among steps and among values, strand after strand."""

    def __init__(self, ring: Ring, lengths: Numbers, more: Numbers) -> None:
        self.lengths, self.steps = lengths, ring.strands * ring.capacity
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        self.offsets = np.concatenate([[0], np.cumsum(lengths + more)])
        ends = np.arange(1, ring.strands + 1) * ring.capacity
        possible = len(lengths) <= ends[-1] and ((lengths > 0) & (lengths <= ring.capacity)).all()
        if not possible or self.starts[-1] != ends[-1] or not np.isin(ends, self.starts).all():
            raise ValueError(f"its trajectories are not those of {ring.strands} x {ring.capacity} steps")
        if not np.isin(more, (0, 1)).all() or (self.starts[:-1][more == 0] % ring.capacity < ring.length).any():
            raise ValueError("it does not hold what followed the last step of each trajectory")

    @property
    def values(self) -> int:
        return int(self.offsets[-1])

    def places(self, start: int, stop: int) -> Numbers:
        """Where the values of steps lie; what followed a step lies behind it."""
        at = np.arange(start, stop)
        number = np.searchsorted(self.starts, at, side="right") - 1
        places: Numbers = at - self.starts[number] + self.offsets[number]
        return places


class Written(Steps):
    """Steps that were saved as files with trajectories one after the other."""

    def __init__(
        self, ring: Ring, trajectories: Trajectories, found: list[tuple[Path, Column, Leaf]], known: Collection[Path]
    ) -> None:
        self._ring, self._trajectories = ring, trajectories
        self.capacity, self.length, self.inner = ring.capacity, ring.length, ring.inner
        self.cursor = ring.shift % ring.capacity
        self.leaves: list[Leaf] = []
        self._reads: list[tuple[Column | None, int]] = []  # and 0 for the values of a step, 1 for what followed
        self._shared: set[Column] = set()
        for path, column, leaf in found:
            shared = column.count == trajectories.values != trajectories.steps
            if shared:
                self._shared.add(column)
            for place, part in homes(path, shared, known):
                self.leaves.append(leaf._replace(path=place))
                self._reads.append((None if part is None else column, part or 0))

    def values(self, leaf: int, start: int, stop: int) -> Bytes:
        column, part = self._reads[leaf]
        if column is None:
            size = math.prod(self.leaves[leaf].shape) * self.leaves[leaf].dtype.itemsize
            return np.zeros((self._ring.strands, stop - start, size), np.uint8)
        ages = [strand * self.capacity + start for strand in range(self._ring.strands)]
        return np.stack([self._read(column, part, at, at + stop - start) for at in ages])

    def _read(self, column: Column, part: int, start: int, stop: int) -> Bytes:
        if column not in self._shared:
            return column.read(start, stop)
        places = self._trajectories.places(start, stop) + part
        read: Bytes = column.read(int(places[0]), int(places[-1]) + 1)[places - places[0]]
        return read


def homes(path: Path, shared: bool, known: Collection[Path]) -> list[tuple[Path, int | None]]:
    """Which keys of a step a saved key stands for: 0, its values; 1, those that follow; None: zeros.

    Flags and rewards were taken from under `next`; flags of the root, which are lost, are False in a trajectory.
    `known` are the keys of the storage that takes them, if it has any yet: they say which ones there were.
    """
    following = (_NEXT, *path)
    if shared:
        return [(path, 0), (following, 1)]
    taken = following in known if known else len(path) == 1 and path[0] in (*FLAGS, *REWARDS)
    if not taken:
        return [(path, 0)]
    root = path in known if known else path[0] in FLAGS
    return [(following, 0), (path, None)] if root and path[0] not in REWARDS else [(following, 0)]


def flat_steps(folder: Folder, tree: Tree, length: Any, ndim: int, known: Collection[Path]) -> Written:
    """What TorchRL's flat and nested checkpointers saved: the same values, nested ones with lengths beside them."""
    ring = ring_of(folder, METADATA, _added(tree), length, ndim)
    trajectories = _of_flags(ring, _flags(folder, tree, ring.strands * ring.capacity))
    found = []
    for tensor in tree.tensors:
        shape = _nested_shape(tensor, trajectories, ring) if tensor.nested else tensor.shape[1:]
        column = _column(tensor, shape, (trajectories.steps, trajectories.values))
        found.append((tensor.path, column, Leaf(tensor.path, tensor.dtype, shape)))
    return Written(ring, trajectories, found, known)


def _flags(folder: Folder, tree: Tree, steps: int) -> Column:
    """Where a trajectory ends: a bool for each step."""
    others = [p for p in (*tree.constants, *tree.stacks) if p not in ((SHIFT,), (FULL,), (SHAPE,))]
    if others:
        raise CheckpointError(f"{folder.path}: {show(others[0])} is no tensor, and does not come with trajectories")
    done = tree.tensor(DONE)
    if done is None or done.dtype is not torch.bool:
        raise CheckpointError(f"{folder.path} has no bools 'done': engram cannot tell where its trajectories end")
    return done.folder.column(done.file, done.dtype, (steps, 1), 1)


def _column(tensor: Saved, shape: tuple[int, ...], counts: tuple[int, int]) -> Column:
    """The file of a key, which has a value a step, or one more a trajectory."""
    folder, item = tensor.folder, math.prod(shape) * tensor.dtype.itemsize
    said = counts if tensor.nested else tensor.shape[:1]
    count = next((n for n in said if n in counts and folder.size(tensor.file, n * item) == n * item), None)
    if count is None:
        raise folder.bad(
            tensor.file, f"it is {tensor.dtype} {list(tensor.shape)}, not of {counts[0]} steps or {counts[1]} values"
        )
    return folder.column(tensor.file, tensor.dtype, (count, *shape), 1)


def _of_flags(ring: Ring, done: Column) -> Trajectories:
    steps = ring.strands * ring.capacity
    flagged = [
        at + np.flatnonzero(done.read(at, min(at + _PIECE, steps))) for at in range(0, steps, _PIECE)
    ]  # fmt: skip
    starts = np.arange(ring.strands) * ring.capacity
    # The newest step of a strand ends a trajectory; the last place of a ring that is not full only if it says so.
    newest = starts + (ring.capacity if ring.is_full else ring.length) - 1
    ended = np.union1d(np.concatenate(flagged), newest[newest >= starts])
    ends = np.union1d(ended, starts + ring.capacity - 1)
    return Trajectories(ring, np.diff(ends, prepend=-1), np.isin(ends, ended).astype(np.int64))


def _nested_shape(tensor: Saved, trajectories: Trajectories, ring: Ring) -> tuple[int, ...]:
    """The shape of one step of a nested tensor, whose lengths are those of the trajectories."""
    folder, name = tensor.folder, tensor.shapes_file
    if len(tensor.shape) != 2 or not 0 < tensor.shape[1] <= 32 or tensor.shape[0] != len(trajectories.lengths):
        raise folder.bad(META, f"{show(tensor.path)} does not have {len(trajectories.lengths)} trajectories")
    column = folder.column(name, torch.int64, tensor.shape, 1)
    shapes = column.read(0, column.count).view(np.int64).reshape(tensor.shape)
    stored = trajectories.starts[:-1] % ring.capacity < ring.length
    more = (shapes[:, 0] - trajectories.lengths)[stored]
    if (shapes[:, 1:] != shapes[0, 1:]).any() or (more != more[:1]).any() or not np.isin(more, (0, 1)).all():
        raise folder.bad(name, "its lengths are not those of the trajectories that 'done' ends")
    return folder.shape(name, shapes[0, 1:].tolist())


def _added(tree: Tree) -> dict[str, Any]:
    """What the conversion adds, which is no data."""
    return {name: tree.constants.get((name,)) for name in (SHIFT, FULL, SHAPE)}
