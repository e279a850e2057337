"""Where a ring stands, and what was saved of a buffer's other parts: plain facts, which samplers and writers make their
own state of."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from engram.data.replay_buffers.checkpointers.torchrl.folders import Folder
from engram.data.replay_buffers.checkpointers.torchrl.memmaps import META, Tree, read_tree
from engram.data.replay_buffers.checkpointers.torchrl.steps import Misfit, Steps
from engram.errors import CheckpointError

_WRITER, _WRITER_FILE, _BEST = "writer", "metadata.json", "current_top_values.memmap"
_SAMPLER, _LIST = "sampler", "_sample_list"
_EPOCH = {"len_storage": torch.int64, "drop_last": torch.bool, "_ran_out": torch.bool}
_GENERATOR, _LARGEST_STATE = "rng_state", 1 << 16


class Ages(NamedTuple):
    """Write numbers of the steps: the oldest has `base`, the next one to come `published`."""

    base: int
    published: int
    origin: int

    @classmethod
    def of(cls, steps: Steps, writer: dict[str, Any] | None, folder: Folder) -> Ages:
        """What the writer and the steps say together."""
        capacity, length = steps.capacity, steps.length
        cursor, count = length % capacity if steps.cursor is None else steps.cursor, length
        if writer is not None:
            here = folder.folder(_WRITER)
            there, count = here.count(_WRITER_FILE, writer["cursor"]), here.count(_WRITER_FILE, writer["write_count"])
            if length < capacity and there != length:
                raise Misfit(
                    f"{here.path}/{_WRITER_FILE} says that {there} steps lie in the storage, which holds {length}: "
                    "either its ndim is another one, or its rows are not in the order in which they were written"
                )
            if steps.cursor is not None and there % capacity != cursor:
                raise here.bad(_WRITER_FILE, f"its cursor is {there}, the storage's {cursor}")
            cursor = there % capacity
        published = count if count >= length and count % capacity == cursor else length + (cursor - length) % capacity
        return cls(published - length, published, (published - count) % (1 << 64))

    def numbered(self, rows: np.ndarray[Any, Any], capacity: int, strands: int) -> np.ndarray[Any, Any] | None:
        """Write number times strands plus strand, of slots of stored rows; None where they are not that."""
        times = rows // strands
        numbers = self.base + (times - self.base) % capacity
        if len(rows) and (rows.min() < 0 or times.max() >= capacity or numbers.max() >= self.published):
            return None
        if len(np.unique(rows)) < len(rows):
            return None
        found: np.ndarray[Any, Any] = numbers * strands + rows % strands
        return found


def writer_state(folder: Folder) -> dict[str, Any] | None:
    """`cursor`, `write_count`, and `rank_key` of a writer that keeps the best; None: an immutable data set has none."""
    here = folder.folder(_WRITER) if folder.has(_WRITER) else None
    if here is None or not here.has(_WRITER_FILE):
        return None
    said = here.json(_WRITER_FILE)
    for name in ("cursor", "write_count"):
        here.count(_WRITER_FILE, said.get(name))
    return said


def check_writer(folder: Folder) -> None:
    """Refuses what a writer saved beside its counters, but for the values of the best, which the rows have too."""
    if folder.has(_WRITER):
        here = folder.folder(_WRITER)
        here.only((_WRITER_FILE, _BEST))
        if not here.has(_WRITER_FILE):
            raise here.bad(_WRITER_FILE, "it is missing")


def sampler_state(folder: Folder) -> dict[str, Any] | None:
    """`remaining` (int64, or None between epochs), `length`, `drop_last`, `ran_out`; None: a sampler without a state.

    ValueError: the state of another sampler.
    """
    if not folder.has(_SAMPLER):
        return None
    here = folder.folder(_SAMPLER)
    names = here.names()
    for name in names:
        here.refuse_code(name)
    if META not in names:
        found = ", ".join(names)[:200] or "nothing"
        raise ValueError(f"{here.path} is of a sampler whose state engram does not take over; it holds {found}")
    tree = read_tree(here)
    shapes = {t.path[0]: (t.dtype, t.shape) for t in tree.tensors if len(t.path) == 1 and t.path != (_LIST,)}
    if shapes != {name: (dtype, ()) for name, dtype in _EPOCH.items()} or not _is_list(tree):
        raise ValueError(f"{here.path} is not the state of a sampler without replacement, the only one that is read")
    length, drop_last, ran_out = (_numbers(tree, name) for name in _EPOCH)
    remaining = None if tree.tensor(_LIST) is None else _numbers(tree, _LIST)
    return {
        "remaining": remaining,
        "length": int(length[0]),
        "drop_last": bool(drop_last[0]),
        "ran_out": bool(ran_out[0]),
    }


def _is_list(tree: Tree) -> bool:
    found = tree.tensor(_LIST)
    if found is None:
        return tree.constants == {(_LIST,): None} and not tree.stacks
    return found.dtype is torch.int64 and len(found.shape) == 1 and not tree.constants and not tree.stacks


def _numbers(tree: Tree, name: str) -> np.ndarray[Any, Any]:
    tensor = tree.tensor(name)
    if tensor is None or tensor.nested:
        raise ValueError(f"{name} is missing")
    column = tensor.folder.column(tensor.file, tensor.dtype, (*tensor.shape, 1), len(tensor.shape))
    values: np.ndarray[Any, Any] = column.read(0, column.count).reshape(-1)
    return values.view(np.int64) if tensor.dtype is torch.int64 else values != 0


def generator_state(folder: Folder) -> torch.Tensor | None:
    """The state of the buffer's own generator; None: it had none."""
    if not folder.has(_GENERATOR):
        return None
    here = folder.folder(_GENERATOR)
    tree = read_tree(here)
    found = tree.tensor(_GENERATOR)
    if found is None or found.dtype is not torch.uint8 or len(found.shape) != 1 or found.shape[0] > _LARGEST_STATE:
        raise here.bad(META, "it does not hold the state of a generator")
    column = here.column(found.file, found.dtype, found.shape, 1)
    state = torch.from_numpy(column.read(0, column.count).reshape(-1))
    try:
        torch.Generator().set_state(state)
    except RuntimeError as error:
        raise CheckpointError(f"{here.path} is not the state of a generator of the CPU ({error})") from None
    return state
