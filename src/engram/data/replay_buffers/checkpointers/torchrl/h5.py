"""Steps that TorchRL's H5 checkpointer saved: a group for each trajectory, a dataset for each key."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from engram._hdf5 import H5Reader, open_checked
from engram.data.replay_buffers.checkpointers.torchrl.folders import DTYPES, Bytes, Folder
from engram.data.replay_buffers.checkpointers.torchrl.steps import Leaf, Misfit
from engram.data.replay_buffers.checkpointers.torchrl.trajectories import (
    DONE,
    FULL,
    SHAPE,
    SHIFT,
    Key,
    Numbers,
    Ring,
    Trajectories,
    Written,
    ring_of,
)
from engram.pytree import KeyPath, format_key

_TRAJECTORY, _LENGTH = "traj_", "_len"
_DEEPEST = 64
_COUNT, _FLAG = np.dtype(np.int64), np.dtype(np.bool_)
_Found = dict[KeyPath, tuple[int, tuple[int, ...], np.dtype[np.generic]]]


@contextmanager
def h5_steps(folder: Folder, name: str, ndim: int, known: Collection[KeyPath]) -> Iterator[Written]:
    """The steps of an HDF5 file, which is open inside the block.

    ImportError: h5py is not there. CorruptCheckpointError: this is not such a file.
    """
    with ExitStack() as stack:
        try:
            reader = stack.enter_context(open_checked(stack.enter_context(folder.file(name))))
            steps = _read(folder, name, reader, ndim, known)
        except Misfit:
            raise
        except ValueError as error:
            raise folder.bad(name, str(error)) from None
        yield steps


def _read(folder: Folder, name: str, reader: H5Reader, ndim: int, known: Collection[KeyPath]) -> Written:
    groups = _groups(reader)
    ring = _ring(folder, name, reader, ndim)
    columns = _columns(folder, name, reader, groups)
    done = columns.get((DONE,))
    if done is None or done.leaf.dtype is not torch.bool or done.nbytes != 1 or done.count != ring.steps:
        raise ValueError(f"it has no bool 'done' for each of {ring.steps} steps, which says where trajectories end")
    trajectories = Trajectories.of_flags(ring, done)
    keys = []
    for path, column in columns.items():
        shared = bool((column.lengths != done.lengths).any())
        # Of the last place of a ring that is not full there may be nothing more.
        least = trajectories.needed(ring) if shared else ring.steps
        if not least <= column.count <= (trajectories.values if shared else ring.steps):
            raise ValueError(f"{format_key(path)} has {column.count} values, which are not those of {ring.steps} steps")
        keys.append(Key(column.leaf, column, shared))
    return Written(ring, trajectories, keys, known)


def _groups(reader: H5Reader) -> int:
    names = set(reader.names(""))
    groups = sum(name.startswith(_TRAJECTORY) for name in names)
    wanted = {_LENGTH, SHAPE, FULL, SHIFT} | {f"{_TRAJECTORY}{i}" for i in range(groups)}
    if names != wanted or not groups:
        raise ValueError(f"it holds {sorted(names ^ wanted)[:5]} too much or too little, or no trajectory")
    return groups


def _ring(folder: Folder, name: str, reader: H5Reader, ndim: int) -> Ring:
    dims = reader.said(SHAPE)
    if dims is None or len(dims[0]) != 1 or dims[0][0] > 32:
        raise ValueError(f"{SHAPE} is not a shape")
    said = {
        SHAPE: reader.take(SHAPE, dims[0], _COUNT).tolist(),
        SHIFT: int(reader.take(SHIFT, (), _COUNT)),
        FULL: bool(reader.take(FULL, (), _FLAG)),
    }
    return ring_of(folder, name, said, int(reader.take(_LENGTH, (), _COUNT)), ndim)


def _columns(folder: Folder, name: str, reader: H5Reader, groups: int) -> dict[KeyPath, H5Column]:
    """The keys, which are the same in each trajectory."""
    first: _Found = {}
    _collect(reader, f"{_TRAJECTORY}0", (), first)
    lengths = np.zeros((groups, len(first)), np.int64)
    for number in range(groups):
        found: _Found = {}
        _collect(reader, f"{_TRAJECTORY}{number}", (), found)
        if found.keys() != first.keys() or any(found[path][1:] != first[path][1:] for path in first):
            raise ValueError(f"{_TRAJECTORY}{number} does not hold the same keys as the first trajectory")
        lengths[number] = [found[path][0] for path in first]
    if lengths.size and lengths.max() > 1 << 40:
        raise ValueError("a trajectory is longer than any storage")
    return {
        path: H5Column(folder, name, reader, Leaf(path, DTYPES[f"torch.{dtype.name}"], shape), dtype, lengths[:, i])
        for i, (path, (_, shape, dtype)) in enumerate(first.items())
    }


def _collect(reader: H5Reader, group: str, path: KeyPath, found: _Found) -> None:
    """Datasets below a group: length, shape of an item, dtype."""
    if len(path) > _DEEPEST:
        raise ValueError(f"groups are nested deeper than {_DEEPEST}")
    for name in reader.names(group):
        here, key = f"{group}/{name}", (*path, name)
        said = reader.said(here)
        if said is None:
            _collect(reader, here, key, found)
            continue
        shape, dtype = said
        if not shape or f"torch.{dtype.name}" not in DTYPES or dtype != np.dtype(dtype.name):
            raise ValueError(f"{here} is {dtype} {shape}, which is no tensor of steps")
        found[key] = (shape[0], shape[1:], dtype)


class H5Column:
    """The values of a key, those of one trajectory after the other: each dataset is opened when it is read."""

    def __init__(
        self, folder: Folder, name: str, reader: H5Reader, leaf: Leaf, dtype: np.dtype[np.generic], lengths: Numbers
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
            values = self._reader.part(name, whole, self._dtype, where)
        except ValueError as error:
            raise self._folder.bad(self._name, str(error)) from None
        return np.ascontiguousarray(values).view(np.uint8).reshape(where.stop - where.start, self.nbytes)
