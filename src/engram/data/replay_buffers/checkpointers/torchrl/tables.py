"""Steps that were saved as one tensor a key: TensorDicts, pytrees, single tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engram.data.replay_buffers.checkpointers.torchrl.folders import Bytes, Column, Folder
from engram.data.replay_buffers.checkpointers.torchrl.memmaps import Saved, Tree
from engram.data.replay_buffers.checkpointers.torchrl.steps import METADATA, Leaf, Steps, lead_of
from engram.errors import CheckpointError
from engram.pytree import KeyPath, format_key

_SINGLE = "_-single-tensor-_"
_MEMMAP = ".memmap"
_DEEPEST = 64


class Table(Steps):
    """Steps in the order of their slots, a file for each key: [capacity, *environments, ...]."""

    def __init__(self, folder: Folder, ndim: int, tensors: list[Saved], tree: Tree, kind: str, length: Any) -> None:
        if not tensors:
            raise CheckpointError(f"{folder.path} holds no tensor")
        lead = tree.batches[()] if () in tree.batches else tensors[0].shape
        self.capacity, self.length = lead_of(folder, METADATA, lead, ndim, length)
        self.inner, self.cursor, self.kind = tuple(lead[1:ndim]), None, kind
        self.leaves: list[Leaf] = []
        self._columns: list[Column] = []
        self._first = 0
        lead = (self.capacity, *self.inner)
        for tensor in tensors:
            if tensor.nested or tensor.shape[:ndim] != lead:
                raise tensor.folder.bad(
                    "meta.json", f"{format_key(tensor.path)} is not of the shape {list(lead)} of the others"
                )
            self.leaves.append(Leaf(tensor.path, tensor.dtype, tensor.shape[ndim:]))
            self._columns.append(tensor.folder.column(tensor.file, tensor.dtype, tensor.shape, 1))
        self.batches = {path: _behind(folder, path, batch, lead) for path, batch in tree.batches.items()}
        self.constants = {**tree.constants, **{p: self._constant(folder, p, v) for p, v in tree.stacks.items()}}

    def begin(self, first: int) -> None:
        self._first = first

    def values(self, leaf: int, start: int, stop: int) -> Bytes:
        column, strands = self._columns[leaf], math.prod(self.inner)
        at, n = (self._first + start) % max(1, self.capacity), stop - start
        read = column.read(at, min(at + n, self.capacity))
        if len(read) < n:  # on from the first slot
            read = np.concatenate([read, column.read(0, n - len(read))])
        values: Bytes = read.reshape(n, strands, column.nbytes // strands).transpose(1, 0, 2)
        return values

    def _constant(self, folder: Folder, path: KeyPath, values: list[Any]) -> Any:
        stored = values[: self.length] if self.length else values[:1]
        for _ in self.inner:
            stored = [value for row in stored if isinstance(row, list) for value in row]
        if not stored or any(value != stored[0] for value in stored):
            raise CheckpointError(
                f"{folder.path}: {format_key(path)} holds values that differ from step to step and are no tensors; "
                "engram reads constants only. Leave the key out and save again"
            )
        return stored[0]


def tensordict_table(folder: Folder, ndim: int, tree: Tree, length: Any) -> Table:
    """What a storage of TensorDicts saved."""
    return Table(folder, ndim, tree.tensors, tree, "td", length)


def pytree_table(folder: Folder, ndim: int, metadata: Any, length: Any) -> Table:
    """What a storage of pytrees saved: the JSON joins keys with dots, the files lie in directories."""
    if not isinstance(metadata, dict):
        raise folder.bad(METADATA, "it does not say which tensors there are")
    places = dict(_files(folder, ()))
    joined: dict[str, KeyPath] = {}
    for path in places:
        if joined.setdefault(".".join(path), path) != path:
            raise folder.bad(METADATA, f"{'.'.join(path)!r} stands for two files")
    unknown = [path for name, path in joined.items() if name not in metadata]
    if unknown:
        raise folder.bad(METADATA, f"it does not say what {'/'.join(unknown[0])}{_MEMMAP} is")
    tensors = []
    for name, said in metadata.items():
        if not isinstance(said, dict):
            raise folder.bad(METADATA, f"{name!r:.80} has no dtype and shape")
        path = joined.get(name, tuple(name.split(".")))
        here = places.get(path, folder)
        dtype, shape = folder.dtype(METADATA, said.get("dtype")), folder.shape(METADATA, said.get("shape"))
        tensors.append(Saved(path, here, f"{path[-1]}{_MEMMAP}", dtype, shape, False))
    return Table(folder, ndim, _numbered(tensors), Tree(), "dict", length)


def _files(folder: Folder, path: KeyPath) -> list[tuple[KeyPath, Folder]]:
    """Paths of the memmaps below a directory, each with the directory that it lies in."""
    if len(path) > _DEEPEST:
        raise folder.bad("", f"directories are nested deeper than {_DEEPEST}")
    found: list[tuple[KeyPath, Folder]] = []
    for name in folder.names():
        if folder.is_folder(name):
            found += _files(folder.folder(name), (*path, name))
        elif name.endswith(_MEMMAP):
            found.append(((*path, name.removesuffix(_MEMMAP)), folder))
        elif path or name != METADATA:
            folder.only({METADATA} if not path else set())
    return found


def _numbered(tensors: list[Saved]) -> list[Saved]:
    """Parts that are numbered from 0 are those of a tuple; a single tensor has no name."""
    if len(tensors) == 1 and tensors[0].path == (_SINGLE,):
        only = tensors[0]
        return [Saved((), only.folder, only.file, only.dtype, only.shape, False)]
    below: dict[KeyPath, set[str]] = {}
    for tensor in tensors:
        for depth, part in enumerate(tensor.path):
            below.setdefault(tensor.path[:depth], set()).add(part)
    tuples = {path for path, parts in below.items() if parts == {str(i) for i in range(len(parts))}}
    made = []
    for t in tensors:
        path = tuple(int(part) if t.path[:depth] in tuples else part for depth, part in enumerate(t.path))
        made.append(Saved(path, t.folder, t.file, t.dtype, t.shape, False))
    return made


def _behind(folder: Folder, path: KeyPath, batch: tuple[int, ...], lead: tuple[int, ...]) -> tuple[int, ...]:
    if batch[: len(lead)] != lead:
        raise folder.bad("meta.json", f"{format_key(path)} has the batch size {list(batch)}, the steps {list(lead)}")
    return batch[len(lead) :]
