"""Steps that TorchRL saved by trajectories: by its flat and nested checkpointers, and as HDF5.

The observation that follows a step is that of the next step, so a trajectory has one value more than it has steps, of
the keys that are under `next` too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engram.errors import CheckpointError, CheckpointMisfitError
from engram.interop.torchrl.files import (
    DTYPES,
    META,
    METADATA,
    Bytes,
    Folder,
    SavedKey,
    SavedSteps,
    TensorDictFiles,
    TensorFile,
    capacity_and_length,
)
from engram.kernel.hdf5 import H5Reader
from engram.pytree import KeyPath, format_key

Numbers = npt.NDArray[np.int64]
_Datasets = dict[KeyPath, tuple[int, tuple[int, ...], np.dtype[np.generic]]]
SHIFT, FULL, SHAPE, DONE = "shift", "is_full", "_storage_shape", "done"
FLAGS, REWARDS = (DONE, "terminated", "truncated"), ("reward",)
_NEXT = "next"
_PIECE = 1 << 22
_TRAJECTORY, _LENGTH = "traj_", "_len"
_DEEPEST = 64
_COUNT, _FLAG = np.dtype(np.int64), np.dtype(np.bool_)


class Values(Protocol):
    """Items of one size, one after the other."""

    count: int
    nbytes: int

    def read(self, start: int, stop: int) -> Bytes: ...


class TrajectoryKey(NamedTuple):
    """A saved key. `shared`: it is under `next` too, with the value of the next step; one value more a trajectory."""

    leaf: SavedKey
    values: Values
    shared: bool


class SavedRing(NamedTuple):
    """Size and state of the saved ring: `capacity` steps for each env, oldest first where the ring was full."""

    capacity: int
    length: int
    inner: tuple[int, ...]
    shift: int
    is_full: bool

    @property
    def envs(self) -> int:
        return math.prod(self.inner)

    @property
    def steps(self) -> int:
        return self.envs * self.capacity


def ring_of(folder: Folder, name: str, ring: Mapping[str, Any], length: Any, ndim: int) -> SavedRing:
    """The ring that a directory describes, checked; `name` is the file that describes it."""
    shape = folder.shape(name, ring.get(SHAPE))
    if len(shape) != ndim:
        raise CheckpointMisfitError(f"{folder.path} has steps of shape {list(shape)}, this storage ndim={ndim}")
    capacity, steps = capacity_and_length(folder, name, shape, ndim, length)
    shift, full = folder.count(name, ring.get(SHIFT)), ring.get(FULL)
    if type(full) is not bool or full is not (steps == capacity) or shift > capacity or (not full and shift != steps):
        reason = f"shift {shift} and is_full {full!r:.20} are not those of {steps} steps in {capacity}"
        raise folder.corrupt(name, reason)
    return SavedRing(capacity, steps, tuple(shape[1:]), shift, full)


class SavedTrajectories:
    """Where trajectories begin among the steps, and where among the values; one env after the other."""

    def __init__(self, ring: SavedRing, ends: Numbers, more: npt.NDArray[np.bool_]) -> None:
        self.lengths = np.diff(ends, prepend=-1)
        self.starts = np.concatenate([[0], ends + 1])
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths + more)])

    @classmethod
    def of_flags(cls, ring: SavedRing, done: Values) -> SavedTrajectories:
        """Trajectories end where a flag is set, at the newest step of each env, and with the env. In the last slot of a
        ring that is not full, the end has no value of its own unless the flag there (which was never written) is set.
        """
        flagged = [
            at + np.flatnonzero(done.read(at, min(at + _PIECE, ring.steps))) for at in range(0, ring.steps, _PIECE)
        ]
        starts = np.arange(ring.envs) * ring.capacity
        newest = starts + ring.length - 1
        ended = np.union1d(np.concatenate(flagged), newest[newest >= starts])
        ends = np.union1d(ended, starts + ring.capacity - 1)
        return cls(ring, ends, np.isin(ends, ended))

    @property
    def values(self) -> int:
        return int(self.offsets[-1])

    def needed(self, ring: SavedRing) -> int:
        """The number of values that the stored steps use."""
        last = (ring.envs - 1) * ring.capacity + ring.length
        return int(self.places(last - 1, last)[0]) + 2 if ring.length else 0

    def places(self, start: int, stop: int) -> Numbers:
        """The positions of the values of these steps; the value under `next` is the one after it."""
        at = np.arange(start, stop)
        number = np.searchsorted(self.starts, at, side="right") - 1
        places: Numbers = at - self.starts[number] + self.offsets[number]
        return places


class TrajectorySteps(SavedSteps):
    """Steps that were saved by trajectories, one after the other."""

    def __init__(
        self,
        ring: SavedRing,
        trajectories: SavedTrajectories,
        keys: list[TrajectoryKey],
        buffer_keys: Collection[KeyPath],
    ) -> None:
        self._ring, self._trajectories = ring, trajectories
        self.capacity, self.length, self.inner = ring.capacity, ring.length, ring.inner
        self.cursor = ring.shift % ring.capacity
        self.leaves: list[SavedKey] = []
        self._reads: list[tuple[TrajectoryKey, int | None]] = []  # as `step_keys`
        for key in keys:
            for path, part in step_keys(key.leaf.path, key.shared, buffer_keys):
                self.leaves.append(key.leaf._replace(path=path))
                self._reads.append((key, part))

    def values(self, leaf: int, start: int, stop: int) -> Bytes:
        key, part = self._reads[leaf]
        if part is None:
            return np.zeros((self._ring.envs, stop - start, key.values.nbytes), np.uint8)
        starts = [env * self.capacity + start for env in range(self._ring.envs)]
        return np.stack([self._read(key, part, at, at + stop - start) for at in starts])

    def _read(self, key: TrajectoryKey, part: int, start: int, stop: int) -> Bytes:
        if not key.shared:
            return key.values.read(start, stop)
        places = self._trajectories.places(start, stop) + part
        first, last = int(places[0]), int(places[-1])
        read: Bytes = key.values.read(first, last + 1)[places - first]
        return read


def step_keys(path: KeyPath, shared: bool, buffer_keys: Collection[KeyPath]) -> list[tuple[KeyPath, int | None]]:
    """The keys of a step that a saved key gives values to. 0: its own values; 1: those of the next step; None: zeros.

    Flags and rewards were saved from under `next`; flags of the root, which are lost, are False in a trajectory.
    `buffer_keys` are the keys of the storage that is filled, if it has any yet: they tell which flags there were.
    """
    following = (_NEXT, *path)
    if shared:
        return [(path, 0), (following, 1)]
    under_next = following in buffer_keys if buffer_keys else len(path) == 1 and path[0] in (*FLAGS, *REWARDS)
    if not under_next:
        return [(path, 0)]
    root = path in buffer_keys if buffer_keys else path[0] in FLAGS
    return [(following, 0), (path, None)] if root and path[0] not in REWARDS else [(following, 0)]


def flat_steps(
    folder: Folder, tree: TensorDictFiles, length: Any, ndim: int, buffer_keys: Collection[KeyPath]
) -> TrajectorySteps:
    """The steps that TorchRL's flat and nested checkpointers saved; nested tensors have their lengths in a file."""
    ring = ring_of(folder, METADATA, _added(tree), length, ndim)
    trajectories = SavedTrajectories.of_flags(ring, _flags(folder, tree, ring.steps))
    keys = []
    for tensor in tree.tensors:
        shape = _nested_shape(tensor, trajectories, ring) if tensor.nested else tensor.shape[1:]
        keys.append(_key(tensor, shape, ring.steps, trajectories.values))
    return TrajectorySteps(ring, trajectories, keys, buffer_keys)


def _flags(folder: Folder, tree: TensorDictFiles, steps: int) -> Values:
    """A bool for each step: whether a trajectory ends there."""
    others = [p for p in (*tree.constants, *tree.stacks) if p not in ((SHIFT,), (FULL,), (SHAPE,))]
    if others:
        raise CheckpointError(
            f"{folder.path}: {format_key(others[0])} is not a tensor, and does not come with trajectories"
        )
    done = tree.tensor(DONE)
    if done is None or done.dtype is not torch.bool:
        raise CheckpointError(f"{folder.path} has no bools 'done': engram cannot tell where its trajectories end")
    return done.folder.items(done.file, done.dtype, (steps, 1), 1)


def _key(tensor: TensorFile, shape: tuple[int, ...], steps: int, values: int) -> TrajectoryKey:
    """A key and its file, which has a value for each step, or one more for each trajectory."""
    folder, item = tensor.folder, math.prod(shape) * tensor.dtype.itemsize
    counts = (steps, values) if tensor.nested else tensor.shape[:1]
    fitting = [n for n in counts if n in (steps, values) and folder.size(tensor.file, n * item) == n * item]
    if not fitting:
        what = f"{tensor.dtype} {list(tensor.shape)}"
        raise folder.corrupt(tensor.file, f"it is {what}, which is not of {steps} steps or {values} values")
    column = folder.items(tensor.file, tensor.dtype, (fitting[0], *shape), 1)
    return TrajectoryKey(SavedKey(tensor.path, tensor.dtype, shape), column, fitting[0] != steps)


def _nested_shape(tensor: TensorFile, trajectories: SavedTrajectories, ring: SavedRing) -> tuple[int, ...]:
    """The shape of one step of a nested tensor, whose lengths are those of the trajectories."""
    folder, name = tensor.folder, tensor.shapes_file
    if len(tensor.shape) != 2 or not 0 < tensor.shape[1] <= 32 or tensor.shape[0] != len(trajectories.lengths):
        raise folder.corrupt(META, f"{format_key(tensor.path)} does not have {len(trajectories.lengths)} trajectories")
    column = folder.items(name, torch.int64, tensor.shape, 1)
    shapes = column.read(0, column.count).view(np.int64).reshape(tensor.shape)
    stored = trajectories.starts[:-1] % ring.capacity < ring.length
    more = (shapes[:, 0] - trajectories.lengths)[stored]
    if (shapes[:, 1:] != shapes[0, 1:]).any() or (more != more[:1]).any() or not np.isin(more, (0, 1)).all():
        raise folder.corrupt(name, "its lengths are not those of the trajectories that 'done' ends")
    return folder.shape(name, shapes[0, 1:].tolist())


def _added(tree: TensorDictFiles) -> dict[str, Any]:
    """The entries that TorchRL's conversion adds to the data."""
    return {name: tree.constants.get((name,)) for name in (SHIFT, FULL, SHAPE)}


@contextmanager
def h5_steps(folder: Folder, name: str, ndim: int, buffer_keys: Collection[KeyPath]) -> Iterator[TrajectorySteps]:
    """The steps that TorchRL's H5 checkpointer saved: a group for each trajectory, a dataset for each key.

    The file is open inside the block.

    Raises:
        ImportError: h5py is not installed.
        CorruptCheckpointError: this is not such a file.
    """
    with ExitStack() as stack:
        try:
            reader = stack.enter_context(H5Reader.opened(stack.enter_context(folder.file(name))))
            steps = _h5_file(folder, name, reader, ndim, buffer_keys)
        except CheckpointMisfitError:
            raise
        except ValueError as error:
            raise folder.corrupt(name, str(error)) from None
        yield steps


def _h5_file(
    folder: Folder, name: str, reader: H5Reader, ndim: int, buffer_keys: Collection[KeyPath]
) -> TrajectorySteps:
    groups = _groups(reader)
    ring = _ring(folder, name, reader, ndim)
    values_of = _h5_values(folder, name, reader, groups)
    done = values_of.get((DONE,))
    if done is None or done.leaf.dtype is not torch.bool or done.nbytes != 1 or done.count != ring.steps:
        raise ValueError(f"it has no bool 'done' for each of {ring.steps} steps, which says where trajectories end")
    trajectories = SavedTrajectories.of_flags(ring, done)
    keys = []
    for path, column in values_of.items():
        shared = bool((column.lengths != done.lengths).any())
        # The last slot of a ring that is not full may have no value.
        least = trajectories.needed(ring) if shared else ring.steps
        if not least <= column.count <= (trajectories.values if shared else ring.steps):
            raise ValueError(f"{format_key(path)} has {column.count} values, which are not those of {ring.steps} steps")
        keys.append(TrajectoryKey(column.leaf, column, shared))
    return TrajectorySteps(ring, trajectories, keys, buffer_keys)


def _groups(reader: H5Reader) -> int:
    names = set(reader.names_in(""))
    groups = sum(name.startswith(_TRAJECTORY) for name in names)
    expected = {_LENGTH, SHAPE, FULL, SHIFT} | {f"{_TRAJECTORY}{i}" for i in range(groups)}
    if names != expected or not groups:
        raise ValueError(f"it holds {sorted(names ^ expected)[:5]} too much or too little, or no trajectory")
    return groups


def _ring(folder: Folder, name: str, reader: H5Reader, ndim: int) -> SavedRing:
    dims = reader.shape_and_dtype(SHAPE)
    if dims is None or len(dims[0]) != 1 or dims[0][0] > 32:
        raise ValueError(f"{SHAPE} is not a shape")
    ring = {
        SHAPE: reader.read_whole(SHAPE, dims[0], _COUNT).tolist(),
        SHIFT: int(reader.read_whole(SHIFT, (), _COUNT)),
        FULL: bool(reader.read_whole(FULL, (), _FLAG)),
    }
    return ring_of(folder, name, ring, int(reader.read_whole(_LENGTH, (), _COUNT)), ndim)


def _h5_values(folder: Folder, name: str, reader: H5Reader, groups: int) -> dict[KeyPath, H5Values]:
    """The keys, which must be the same in each trajectory."""
    first: _Datasets = {}
    _collect(reader, f"{_TRAJECTORY}0", (), first)
    lengths = np.zeros((groups, len(first)), np.int64)
    for number in range(groups):
        datasets: _Datasets = {}
        _collect(reader, f"{_TRAJECTORY}{number}", (), datasets)
        if datasets.keys() != first.keys() or any(datasets[path][1:] != first[path][1:] for path in first):
            raise ValueError(f"{_TRAJECTORY}{number} does not hold the same keys as the first trajectory")
        lengths[number] = [datasets[path][0] for path in first]
    if lengths.size and lengths.max() > 1 << 40:
        raise ValueError("a trajectory is longer than any storage")
    return {
        path: H5Values(folder, name, reader, SavedKey(path, DTYPES[f"torch.{dtype.name}"], shape), dtype, lengths[:, i])
        for i, (path, (_, shape, dtype)) in enumerate(first.items())
    }


def _collect(reader: H5Reader, group: str, path: KeyPath, datasets: _Datasets) -> None:
    """Adds the datasets below a group: length, shape of an item, dtype."""
    if len(path) > _DEEPEST:
        raise ValueError(f"groups are nested deeper than {_DEEPEST}")
    for name in reader.names_in(group):
        here, key = f"{group}/{name}", (*path, name)
        form = reader.shape_and_dtype(here)
        if form is None:
            _collect(reader, here, key, datasets)
            continue
        shape, dtype = form
        if not shape or f"torch.{dtype.name}" not in DTYPES or dtype != np.dtype(dtype.name):
            raise ValueError(f"{here} is {dtype} {shape}, which is not a tensor of steps")
        datasets[key] = (shape[0], shape[1:], dtype)


class H5Values:
    """The values of a key, one trajectory after the other; a trajectory's dataset is opened when it is read."""

    def __init__(
        self, folder: Folder, name: str, reader: H5Reader, leaf: SavedKey, dtype: np.dtype[np.generic], lengths: Numbers
    ) -> None:
        self._folder, self._name, self._reader, self._dtype = folder, name, reader, dtype
        self.leaf, self.lengths = leaf, lengths
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self.count = int(self._starts[-1])
        self.nbytes = math.prod(leaf.shape) * dtype.itemsize

    def read(self, start: int, stop: int) -> Bytes:
        """uint8 [stop - start, nbytes]."""
        out = np.zeros((stop - start, self.nbytes), np.uint8)
        number, at = int(np.searchsorted(self._starts, start, side="right")) - 1, start
        while at < stop and self.nbytes:
            begin, until = int(self._starts[number]), min(stop, int(self._starts[number + 1]))
            if until > at:
                out[at - start : until - start] = self._part(number, slice(at - begin, until - begin))
            at, number = until, number + 1
        return out

    def _part(self, number: int, where: slice) -> Bytes:
        whole = (int(self.lengths[number]), *self.leaf.shape)
        name = "/".join((f"{_TRAJECTORY}{number}", *self.leaf.path))
        try:
            values = self._reader.read_part(name, whole, self._dtype, (where,))
        except ValueError as error:
            raise self._folder.corrupt(self._name, str(error)) from None
        return np.ascontiguousarray(values).view(np.uint8).reshape(where.stop - where.start, self.nbytes)
