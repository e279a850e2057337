"""Blocks: rows of one layout as bytes, on their way between processes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.kernel.rows import LeafSpec, RowLayout

BY_LEAF_BYTES = 4096  # longer rows travel leaf by leaf, so that a leaf can be used where it lies

Bytes = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows as bytes: one array of whole rows, uint8 [n, row bytes], or one for each leaf, uint8 [n, bytes of the leaf].

    The arrays may be read-only, and may be views of what they were made from.
    """

    parts: tuple[Bytes, ...]

    def __len__(self) -> int:
        return len(self.parts[0]) if self.parts else 0

    @property
    def nbytes(self) -> int:
        """Bytes of its rows."""
        return sum(part.nbytes for part in self.parts)

    @classmethod
    def joined(cls, blocks: Sequence[Block]) -> Block:
        """The rows of some blocks of one layout, one behind the other, in memory of their own."""
        return cls(tuple(map(np.concatenate, zip(*(block.parts for block in blocks), strict=True))))

    def start(self, n: int) -> Block:
        """The first n rows, in the same memory."""
        return Block(tuple(part[:n] for part in self.parts))

    def rest(self, start: int) -> Block:
        """The rows from `start` on, in the same memory."""
        return Block(tuple(part[start:] for part in self.parts))


def goes_by_leaf(layout: RowLayout) -> bool:
    """Whether rows of this layout travel leaf by leaf."""
    return layout.payload_bytes > BY_LEAF_BYTES and len(layout.leaves) > 1


def pack(layout: RowLayout, batch: Any) -> Block:
    """A batch [n] as a block; errors as `RowLayout.plan`.

    Example:
        >>> batch = TensorDict({"x": torch.arange(3.0)}, [3])
        >>> layout = RowLayout.of(batch, 1)
        >>> unpack(layout, pack(layout, batch))["x"]
        tensor([0., 1., 2.])
    """
    if not goes_by_leaf(layout):
        return Block((layout.pack(batch).numpy(),))
    leaves = zip(layout.leaves, layout.fitting(batch, 1), strict=True)
    return Block(tuple(_bytes_of(leaf, values) for leaf, values in leaves))


def unpack(layout: RowLayout, block: Block, extra: dict[str, Any] | None = None) -> Any:
    """The batch [n] of a block, with these entries at its root besides; every leaf of it can be written.

    Leaves of a block that came leaf by leaf are used where they lie, if that memory can be written, else copied.

    Raises:
        ValueError: the block is not one of rows of this layout.
    """
    check(layout, block)
    if not goes_by_leaf(layout):
        return layout.unpack(block.parts[0], extra)
    leaves = [_values_of(leaf, part) for leaf, part in zip(layout.leaves, block.parts, strict=True)]
    return layout.build(leaves, (len(block),), extra)


def check(layout: RowLayout, block: Block) -> None:
    """ValueError where a block is not one of rows of this layout."""
    widths = [leaf.nbytes for leaf in layout.leaves] if goes_by_leaf(layout) else [layout.payload_bytes]
    shapes = [(part.dtype, part.shape) for part in block.parts]
    if shapes != [(np.dtype(np.uint8), (len(block), width)) for width in widths]:
        raise ValueError(
            f"the block is not one of rows of this layout: arrays of uint8 [n, bytes] are needed, of {widths} bytes, "
            f"found {[(str(dtype), list(shape)) for dtype, shape in shapes]}"
        )


def _bytes_of(leaf: LeafSpec, values: Tensor) -> Bytes:
    flat = values.contiguous().reshape(len(values), math.prod(leaf.shape))
    array: Bytes = flat.view(torch.uint8).reshape(len(values), leaf.nbytes).numpy()
    return array


def _values_of(leaf: LeafSpec, part: Bytes) -> Tensor:
    usable = part.flags.writeable and part.flags.c_contiguous and part.ctypes.data % leaf.itemsize == 0
    raw = torch.from_numpy(part if usable else part.copy())
    return raw.reshape(-1).view(leaf.dtype).reshape(len(part), *leaf.shape)
