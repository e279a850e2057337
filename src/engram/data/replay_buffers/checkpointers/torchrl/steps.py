"""What every form of saved steps gives: leaves, how many steps there are, where the ring stands, and values."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from engram.data.replay_buffers.checkpointers.torchrl.folders import Bytes, Folder
from engram.pytree import KeyPath, TreeSpec
from engram.store.layout import LeafSpec, RowLayout

METADATA = "storage_metadata.json"
_BLOCK_BYTES = 1 << 21  # that stay in the cache on their way


class Misfit(ValueError):
    """The steps are whole, and not those of a storage like this one."""


class Leaf(NamedTuple):
    """A key of the steps, and what one step has there."""

    path: KeyPath
    dtype: torch.dtype
    shape: tuple[int, ...]


class Steps(ABC):
    """Steps as they were saved. Ages count from the oldest stored step on."""

    leaves: list[Leaf]
    constants: Mapping[KeyPath, Any] = MappingProxyType({})
    batches: Mapping[KeyPath, tuple[int, ...]] = MappingProxyType({})  # of (sub-)dicts, behind those of the steps
    kind: str = "td"  # of the root and its dicts; else "dict"
    capacity: int  # time steps
    length: int
    inner: tuple[int, ...]  # the environments
    cursor: int | None  # where the next step goes; None: the writer knows

    def begin(self, first: int) -> None:
        """Says in which slot the oldest step lies, for files that are in the order of slots."""
        return

    @abstractmethod
    def values(self, leaf: int, start: int, stop: int) -> Bytes:
        """Of the steps of these ages: uint8 [strands, stop - start, bytes]."""


def lead_of(folder: Folder, name: str, shape: tuple[int, ...], ndim: int, length: Any) -> tuple[int, int]:
    """Capacity and length in time steps, of what begins with `shape` and holds `length` steps of all environments."""
    if len(shape) < ndim:
        raise Misfit(f"{folder.path} has steps of shape {list(shape)}, this storage ndim={ndim}")
    strands = math.prod(shape[1:ndim])
    steps = folder.count(name, length)
    if not shape[0]:
        raise folder.bad(name, "a ring of no steps")
    if not strands or steps % strands or steps // strands > shape[0]:
        raise Misfit(f"{folder.path}: {steps} steps do not lie in {list(shape[:ndim])}; they have another ndim")
    return shape[0], steps // strands


def layout_of(steps: Steps) -> RowLayout:
    """The layout of a row that holds such a step."""
    root = _Branch()
    for number, leaf in enumerate(steps.leaves):
        root.put(leaf.path, TreeSpec("leaf", leaf=number))
    for path, value in steps.constants.items():
        root.put(path, TreeSpec("constant", constant=value))
    for path in steps.batches:
        root.branch(path)
    specs = [LeafSpec(*leaf) for leaf in steps.leaves]
    return RowLayout(root.node(steps.kind, steps.batches, ()), specs)


class _Branch:
    """A dict of the form, while it is being put together."""

    def __init__(self) -> None:
        self._below: dict[Any, _Branch | TreeSpec] = {}
        self._alone: TreeSpec | None = None

    def put(self, path: KeyPath, node: TreeSpec) -> None:
        if not path:
            self._alone = node
            return
        self.branch(path[:-1])._below[path[-1]] = node

    def branch(self, path: KeyPath) -> _Branch:
        if not path:
            return self
        below = self._below.setdefault(path[0], _Branch())
        if isinstance(below, TreeSpec):
            raise ValueError(f"{path[0]!r} is a tensor and a dict")
        return below.branch(path[1:])

    def node(self, kind: str, batches: Mapping[KeyPath, tuple[int, ...]], path: KeyPath) -> TreeSpec:
        if self._alone is not None:
            return self._alone
        below, numbered = list(self._below.items()), all(type(k) is int for k in self._below)
        if numbered:
            below.sort()
        children = tuple(b if isinstance(b, TreeSpec) else b.node(kind, batches, (*path, k)) for k, b in below)
        if below and numbered:
            return TreeSpec("tuple", children=children)
        return TreeSpec(kind, keys=tuple(k for k, _ in below), children=children, batch=batches.get(path, ()))


def blocks(steps: Steps, layout: RowLayout) -> Iterator[tuple[int, Bytes]]:
    """Ages and packed rows, oldest first: uint8 [strands, n, row bytes], valid until the next ones are asked for."""
    strands = math.prod(steps.inner)
    most = max(1, min(steps.length, _BLOCK_BYTES // (strands * layout.payload_bytes)))
    memory = np.zeros((strands, most, layout.payload_bytes), np.uint8)  # fresh pages cost more than the copy
    for start in range(0, steps.length, most):
        stop = min(steps.length, start + most)
        rows = memory[:, : stop - start]
        for number, leaf in enumerate(layout.leaves):
            values = steps.values(number, start, stop)
            if leaf.dtype is torch.bool:  # a byte that is neither 0 nor 1 is no bool
                values = (values != 0).view(np.uint8)
            rows[:, :, leaf.offset : leaf.offset + leaf.nbytes] = values
        yield start, rows
