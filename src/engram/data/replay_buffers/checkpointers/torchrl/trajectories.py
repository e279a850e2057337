"""Steps that were saved as trajectories: what a step leads to stands at the root of the step after, so that each
trajectory has one value more than steps, of the keys that are under `next` too."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engram.data.replay_buffers.checkpointers.torchrl.folders import Bytes, Folder
from engram.data.replay_buffers.checkpointers.torchrl.memmaps import META, Saved, Tree
from engram.data.replay_buffers.checkpointers.torchrl.steps import METADATA, Leaf, Misfit, Steps, lead_of
from engram.errors import CheckpointError
from engram.pytree import KeyPath, format_key

Numbers = npt.NDArray[np.int64]
SHIFT, FULL, SHAPE, DONE = "shift", "is_full", "_storage_shape", "done"
FLAGS, REWARDS = (DONE, "terminated", "truncated"), ("reward",)
_NEXT = "next"
_PIECE = 1 << 22


class Values(Protocol):
    """Items of one size, one after the other."""

    count: int
    nbytes: int

    def read(self, start: int, stop: int) -> Bytes: ...


class Key(NamedTuple):
    """A saved key; `shared`: under `next` it is that of the step after, and one value more a trajectory."""

    leaf: Leaf
    values: Values
    shared: bool


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

    @property
    def steps(self) -> int:
        return self.strands * self.capacity


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

    def __init__(self, ring: Ring, ends: Numbers, more: npt.NDArray[np.bool_]) -> None:
        self.lengths = np.diff(ends, prepend=-1)
        self.starts = np.concatenate([[0], ends + 1])
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths + more)])

    @classmethod
    def of_flags(cls, ring: Ring, done: Values) -> Trajectories:
        """They end where a flag is set, and at the newest step of each strand. A strand ends one too, but at the last
        place of a ring that is not full nothing more follows, unless the flag there (which nobody wrote) is set.
        """
        flagged = [
            at + np.flatnonzero(done.read(at, min(at + _PIECE, ring.steps))) for at in range(0, ring.steps, _PIECE)
        ]
        starts = np.arange(ring.strands) * ring.capacity
        newest = starts + ring.length - 1
        ended = np.union1d(np.concatenate(flagged), newest[newest >= starts])
        ends = np.union1d(ended, starts + ring.capacity - 1)
        return cls(ring, ends, np.isin(ends, ended))

    @property
    def values(self) -> int:
        return int(self.offsets[-1])

    def needed(self, ring: Ring) -> int:
        """How many values the stored steps need."""
        last = (ring.strands - 1) * ring.capacity + ring.length
        return int(self.places(last - 1, last)[0]) + 2 if ring.length else 0

    def places(self, start: int, stop: int) -> Numbers:
        """Where the values of steps lie; what followed a step lies behind it."""
        at = np.arange(start, stop)
        number = np.searchsorted(self.starts, at, side="right") - 1
        places: Numbers = at - self.starts[number] + self.offsets[number]
        return places


class Written(Steps):
    """Steps that were saved with trajectories one after the other."""

    def __init__(self, ring: Ring, trajectories: Trajectories, keys: list[Key], known: Collection[KeyPath]) -> None:
        self._ring, self._trajectories = ring, trajectories
        self.capacity, self.length, self.inner = ring.capacity, ring.length, ring.inner
        self.cursor = ring.shift % ring.capacity
        self.leaves: list[Leaf] = []
        self._reads: list[tuple[Key, int | None]] = []  # 0: the values of a step; 1: what followed; None: zeros
        for key in keys:
            for path, part in homes(key.leaf.path, key.shared, known):
                self.leaves.append(key.leaf._replace(path=path))
                self._reads.append((key, part))

    def values(self, leaf: int, start: int, stop: int) -> Bytes:
        key, part = self._reads[leaf]
        if part is None:
            return np.zeros((self._ring.strands, stop - start, key.values.nbytes), np.uint8)
        ages = [strand * self.capacity + start for strand in range(self._ring.strands)]
        return np.stack([self._read(key, part, at, at + stop - start) for at in ages])

    def _read(self, key: Key, part: int, start: int, stop: int) -> Bytes:
        if not key.shared:
            return key.values.read(start, stop)
        places = self._trajectories.places(start, stop) + part
        first, last = int(places[0]), int(places[-1])
        read: Bytes = key.values.read(first, last + 1)[places - first]
        return read


def homes(path: KeyPath, shared: bool, known: Collection[KeyPath]) -> list[tuple[KeyPath, int | None]]:
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


def flat_steps(folder: Folder, tree: Tree, length: Any, ndim: int, known: Collection[KeyPath]) -> Written:
    """What TorchRL's flat and nested checkpointers saved: the same values, nested ones with lengths beside them."""
    ring = ring_of(folder, METADATA, _added(tree), length, ndim)
    trajectories = Trajectories.of_flags(ring, _flags(folder, tree, ring.steps))
    keys = []
    for tensor in tree.tensors:
        shape = _nested_shape(tensor, trajectories, ring) if tensor.nested else tensor.shape[1:]
        keys.append(_key(tensor, shape, ring.steps, trajectories.values))
    return Written(ring, trajectories, keys, known)


def _flags(folder: Folder, tree: Tree, steps: int) -> Values:
    """Where a trajectory ends: a bool for each step."""
    others = [p for p in (*tree.constants, *tree.stacks) if p not in ((SHIFT,), (FULL,), (SHAPE,))]
    if others:
        raise CheckpointError(
            f"{folder.path}: {format_key(others[0])} is no tensor, and does not come with trajectories"
        )
    done = tree.tensor(DONE)
    if done is None or done.dtype is not torch.bool:
        raise CheckpointError(f"{folder.path} has no bools 'done': engram cannot tell where its trajectories end")
    return done.folder.column(done.file, done.dtype, (steps, 1), 1)


def _key(tensor: Saved, shape: tuple[int, ...], steps: int, values: int) -> Key:
    """A key with its file, which has a value a step, or one more a trajectory."""
    folder, item = tensor.folder, math.prod(shape) * tensor.dtype.itemsize
    said = (steps, values) if tensor.nested else tensor.shape[:1]
    fitting = [n for n in said if n in (steps, values) and folder.size(tensor.file, n * item) == n * item]
    if not fitting:
        what = f"{tensor.dtype} {list(tensor.shape)}"
        raise folder.bad(tensor.file, f"it is {what}, which is not of {steps} steps or {values} values")
    column = folder.column(tensor.file, tensor.dtype, (fitting[0], *shape), 1)
    return Key(Leaf(tensor.path, tensor.dtype, shape), column, fitting[0] != steps)


def _nested_shape(tensor: Saved, trajectories: Trajectories, ring: Ring) -> tuple[int, ...]:
    """The shape of one step of a nested tensor, whose lengths are those of the trajectories."""
    folder, name = tensor.folder, tensor.shapes_file
    if len(tensor.shape) != 2 or not 0 < tensor.shape[1] <= 32 or tensor.shape[0] != len(trajectories.lengths):
        raise folder.bad(META, f"{format_key(tensor.path)} does not have {len(trajectories.lengths)} trajectories")
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
