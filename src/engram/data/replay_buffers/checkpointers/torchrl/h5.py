"""Steps that TorchRL's H5 checkpointer saved: a group for each trajectory, a dataset for each key."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from engram.data.replay_buffers.checkpointers.h5 import H5Reader, reading
from engram.data.replay_buffers.checkpointers.torchrl.folders import DTYPES, Bytes, Folder
from engram.data.replay_buffers.checkpointers.torchrl.steps import Leaf, Misfit, Steps
from engram.data.replay_buffers.checkpointers.torchrl.trajectories import (
    DONE,
    FULL,
    SHAPE,
    SHIFT,
    Numbers,
    Ring,
    Trajectories,
    homes,
    ring_of,
)
from engram.data.replay_buffers.trees import Path, show
from engram.errors import CheckpointError

_TRAJECTORY, _LENGTH = "traj_", "_len"
_MOST_DEEP = 64
_Keys = dict[Path, tuple[int, tuple[int, ...], np.dtype[Any]]]
_COUNT, _FLAG = np.dtype(np.int64), np.dtype(np.bool_)


class H5Steps(Steps):
    """Steps in an open file; datasets are opened when their values are asked for, and closed again."""

    def __init__(self, folder: Folder, name: str, reader: H5Reader, ndim: int, known: Collection[Path]) -> None:
        self._folder, self._name, self._reader = folder, name, reader
        self._ring = self._read_ring(ndim)
        ring = self._ring
        self.capacity, self.length, self.inner = ring.capacity, ring.length, ring.inner
        self.cursor = ring.shift % ring.capacity
        keys = self._keys()
        lengths, more = self._lengths(keys)
        self._trajectories = Trajectories(ring, lengths, more.max(0))
        self._lengths_of = dict(zip(keys, lengths + more, strict=True))
        self.leaves: list[Leaf] = []
        self._reads: list[tuple[Path | None, int]] = []  # and 0 for the values of a step, 1 for what followed
        for (path, (_, shape, dtype)), longer in zip(keys.items(), more, strict=True):
            for place, part in homes(path, bool(longer.any()), known):
                self.leaves.append(Leaf(place, DTYPES[f"torch.{dtype.name}"], shape))
                self._reads.append((None if part is None else path, part or 0))
        self._kinds = {path: (shape, dtype) for path, (_, shape, dtype) in keys.items()}

    def values(self, leaf: int, start: int, stop: int) -> Bytes:
        path, part = self._reads[leaf]
        size = self.leaves[leaf].dtype.itemsize * int(np.prod(self.leaves[leaf].shape, dtype=object))
        out = np.zeros((self._ring.strands, stop - start, size), np.uint8)
        if path is not None and size:
            for strand in range(self._ring.strands):
                at = strand * self.capacity
                self._fill(out[strand], path, part, at + start, at + stop)
        return out

    def _fill(self, out: Bytes, path: Path, part: int, start: int, stop: int) -> None:
        shape, dtype = self._kinds[path]
        starts = self._trajectories.starts
        number = int(np.searchsorted(starts, start, side="right")) - 1
        at = start
        while at < stop:
            until = min(stop, int(starts[number + 1]))
            begin, n = at - int(starts[number]) + part, until - at
            whole = (int(self._lengths_of[path][number]), *shape)
            read = self._part(f"{_TRAJECTORY}{number}/{'/'.join(path)}", whole, dtype, slice(begin, begin + n))
            out[at - start : until - start] = np.ascontiguousarray(read).view(np.uint8).reshape(n, -1)
            at, number = until, number + 1

    def _part(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], where: slice) -> Any:
        try:
            return self._reader.part(name, shape, dtype, where)
        except ValueError as error:
            raise self._folder.bad(self._name, str(error)) from None

    def _read_ring(self, ndim: int) -> Ring:
        reader = self._reader
        names = reader.names("")
        groups = [name for name in names if name.startswith(_TRAJECTORY)]
        wanted = {_LENGTH, SHAPE, FULL, SHIFT} | {f"{_TRAJECTORY}{i}" for i in range(len(groups))}
        if set(names) != wanted:
            raise ValueError(f"it holds {sorted(set(names) ^ wanted)[:5]} too much or too little")
        self._groups = len(groups)
        dims = reader.said(SHAPE)
        shape = reader.take(SHAPE, (dims[0][0] if dims and len(dims[0]) == 1 and dims[0][0] <= 32 else 1,), _COUNT)
        said = {
            SHAPE: shape.tolist(),
            SHIFT: int(reader.take(SHIFT, (), _COUNT)),
            FULL: bool(reader.take(FULL, (), _FLAG)),
        }
        return ring_of(self._folder, self._name, said, int(reader.take(_LENGTH, (), _COUNT)), ndim)

    def _keys(self) -> _Keys:
        """Keys of the first trajectory: its length, and shape and dtype of a step."""
        found: _Keys = {}
        if not self._groups:
            raise CheckpointError(f"{self._folder.path}/{self._name} holds no trajectory")
        self._collect(f"{_TRAJECTORY}0", (), found)
        if (DONE,) not in found:
            raise CheckpointError(
                f"{self._folder.path}/{self._name} has no 'done' to tell the steps of a trajectory by"
            )
        return found

    def _collect(self, group: str, path: Path, found: _Keys) -> None:
        if len(path) > _MOST_DEEP:
            raise ValueError(f"groups are nested deeper than {_MOST_DEEP}")
        for name in self._reader.names(group):
            here, key = f"{group}/{name}", (*path, name)
            said = self._reader.said(here)
            if said is None:
                self._collect(here, key, found)
                continue
            shape, dtype = said
            if not shape or f"torch.{dtype.name}" not in DTYPES or dtype != np.dtype(dtype.name):
                raise ValueError(f"{show(key)} is {dtype} {shape}, which is no tensor of steps")
            found[key] = (shape[0], shape[1:], dtype)

    def _lengths(self, keys: _Keys) -> tuple[Numbers, Numbers]:
        """Steps of each trajectory, and for each key and trajectory how many values it has more."""
        own = np.zeros((len(keys), self._groups), np.int64)
        for number in range(self._groups):
            group = f"{_TRAJECTORY}{number}"
            found: _Keys = {}
            self._collect(group, (), found)
            if found.keys() != keys.keys() or any(found[path][1:] != keys[path][1:] for path in keys):
                raise ValueError(f"{group} does not hold the same keys as the first trajectory")
            own[:, number] = [found[path][0] for path in keys]
        lengths = own[list(keys).index((DONE,))]
        more = own - lengths
        longer = more.any(1)
        if longer.any() and (more[longer] != more[longer][0]).any():
            raise ValueError("the trajectories of its keys have different lengths")
        return lengths, more


@contextmanager
def h5_steps(folder: Folder, name: str, ndim: int, known: Collection[Path]) -> Iterator[H5Steps]:
    """The steps of an HDF5 file, which is open inside the block."""
    with ExitStack() as stack:
        try:
            reader = stack.enter_context(reading(stack.enter_context(folder.file(name))))
            steps = H5Steps(folder, name, reader, ndim, known)
        except Misfit:
            raise
        except ValueError as error:
            raise folder.bad(name, str(error)) from None
        yield steps
