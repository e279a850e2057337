"""TensorDicts of steps as columns of bytes, and back."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

from engram.data.replay_buffers.ted.steps import Column
from engram.data.replay_buffers.trees import Path, as_tensor, show, sorted_items


@dataclasses.dataclass(frozen=True)
class StepLeaf:
    """One key: its path, its dtype, and the shape of one step."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def leaves_of(td: TensorDictBase, within: Path = ()) -> list[tuple[Path, Tensor]]:
    """Every tensor with its path; a TypeError names an entry that is none."""
    found: list[tuple[Path, Tensor]] = []
    for key, value in sorted_items(td):
        if isinstance(value, Tensor):
            found.append(((*within, key), value))
        elif isinstance(value, TensorDictBase) and not is_tensorclass(value):
            found += leaves_of(value, (*within, key))
        else:
            raise TypeError(f"{show((*within, key))} is a {type(value).__name__}; only tensors can be converted")
    return found


def column_of(tensor: Tensor, batch_dims: int, shift: int) -> Column:
    """uint8 [n, nbytes]: the steps, strand after strand, each strand begun `shift` steps later, where it is oldest."""
    lead, shape = tensor.shape[:batch_dims], tensor.shape[batch_dims:]
    nbytes = math.prod(shape) * tensor.element_size()
    return _rolled(as_bytes(tensor, math.prod(lead), nbytes), tuple(lead), -shift)


def _rolled(column: Column, lead: tuple[int, ...], shift: int) -> Column:
    if not shift or not column.size:
        return column
    strands = column.reshape(-1, lead[-1], column.shape[1])
    return np.roll(strands, shift, axis=1).reshape(column.shape)


def as_bytes(tensor: Tensor, n: int, nbytes: int) -> Column:
    """uint8 [n, nbytes] over the memory of a tensor, or a copy."""
    flat = tensor.contiguous().reshape(-1)
    if not flat.numel():
        return np.empty((n, nbytes), np.uint8)
    if flat.stride() != (1,):  # one element with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().reshape(n, nbytes)


def tensor_of(column: Column, leaf: StepLeaf, lead: tuple[int, ...] | None = None, shift: int = 0) -> Tensor:
    """The tensor [*lead, *shape] with these bytes; `lead` None: as many steps as there are. Undoes `column_of`."""
    lead = (len(column),) if lead is None else lead
    made = torch.empty((*lead, *leaf.shape), dtype=leaf.dtype)
    if made.numel():
        made.view(-1).view(torch.uint8).numpy()[:] = _rolled(column, lead, shift).reshape(-1)
    return made


def plain(tensor: Tensor, path: Path) -> Tensor:
    """A dense tensor of the CPU; a TypeError names the leaf where there is none."""
    return as_tensor(tensor, path)
