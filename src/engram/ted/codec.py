"""Steps as bytes: where what follows a step is the step after it, and the ways to write that down once.

A column is uint8 [n, nbytes]: one leaf of n steps, strand after strand, each strand oldest first. Bytes are compared,
not numbers: NaN equals the same NaN, and -0.0 is not 0.0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.pytree import Key, KeyPath, as_path, as_tensor, format_key, tensordict_items

Column = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.int64]

_FEW_WORDS = 8


def differs(a: Column, b: Column) -> Mask:
    """bool [n]: whether any byte differs."""
    a, b = _words(a), _words(b)
    width = a.shape[1]
    if not 0 < width <= _FEW_WORDS:
        found: Mask = (a != b).any(axis=1)
        return found
    found = a[:, 0] != b[:, 0]
    for word in range(1, width):  # numpy reduces short rows slowly
        found |= a[:, word] != b[:, word]
    return found


def broken(now: Column, following: Column, ends: Mask) -> Mask:
    """bool [n]: where `following[t]` is not `now[t + 1]`, and where there is no step after it (`ends`)."""
    out: Mask = ends.copy()
    out[:-1] |= differs(following[:-1], now[1:])
    return out


def with_last(now: Column, following: Column, ends: Mask) -> Column:
    """[n + trajectories, nbytes]: the column with what followed the last step of each trajectory put after it."""
    out = np.empty((len(now) + int(ends.sum()), now.shape[1]), np.uint8)
    last = last_places(ends)
    keep = np.ones(len(out), np.bool_)
    keep[last] = False
    out[keep] = now
    out[last] = following[ends]
    return out


def without_last(extended: Column, ends: Mask) -> tuple[Column, Column]:
    """`now` and, but for the exceptions, `following` of a column that `with_last` made."""
    keep = np.ones(len(extended), np.bool_)
    keep[last_places(ends)] = False
    shifted = np.zeros_like(keep)
    shifted[1:] = keep[:-1]  # the value after each step: another step, or the last one's successor
    return extended[keep], extended[shifted]


def last_places(ends: Mask) -> Positions:
    """Where the extra values of `with_last` lie."""
    at = np.flatnonzero(ends)
    return at + np.arange(1, len(at) + 1)


def followed(now: Column, at: Positions, values: Column) -> Column:
    """What follows each step: the step after it, but for the exceptions `at`."""
    out = np.empty_like(now)
    out[:-1] = now[1:]
    out[at] = values
    return out


def strand_ends(strands: int, steps: int) -> Mask:
    """bool [strands * steps]: the newest step of each strand."""
    ends = np.zeros((strands, steps), np.bool_)
    ends[:, -1:] = True
    return ends.reshape(-1)


def trajectory_ends(ends: Mask, flags: list[Column], ids: list[Column]) -> Mask:
    """`ends`, and where a flag is set or an id is another one in the next step."""
    out: Mask = ends.copy()
    for flag in flags:
        out |= flag.any(axis=1)
    for column in ids:
        out[:-1] |= differs(column[:-1], column[1:])
    return out


def run_starts(column: Column) -> Positions:
    """Where the column changes; step 0 is one."""
    start = np.ones(len(column), np.bool_)
    start[1:] = differs(column[1:], column[:-1])
    return np.flatnonzero(start)


def repeat_runs(starts: Positions, values: Column, n: int) -> Column:
    """The column of n steps whose runs begin at `starts`; ValueError when the first step is in none."""
    if n and (not len(starts) or starts[0] != 0):
        raise ValueError("nothing says what value the first step has")
    lengths = np.diff(starts, append=n)
    return np.repeat(values, lengths, axis=0)


def _words(column: Column) -> npt.NDArray[Any]:
    """The same bytes in the widest integers that fit: [n, fewer]."""
    column = np.ascontiguousarray(column)
    nbytes = column.shape[1]
    size = next(size for size in (8, 4, 2, 1) if nbytes % size == 0)
    return column.view(f"u{size}") if nbytes else column


NEXT = "next"
DONE_KEYS = ("done", "truncated", "terminated")
REWARD_KEYS = ("reward",)
TRAJECTORY_KEYS: tuple[KeyPath, ...] = (("collector", "traj_ids"), ("episode",))


class Leaf(Protocol):
    """What is known of a key: its path, its dtype, and the shape of one step."""

    @property
    def path(self) -> KeyPath: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


class StepKeys:
    """Names of the flags and rewards, which belong to one step and are never taken from the step after it.

    Args:
        done_keys: flags, at the root and under "next": a name at any depth, or a tuple for one place.
        reward_keys: rewards, the same.

    Raises:
        TypeError: a key is neither a string nor a tuple of strings.
    """

    def __init__(self, done_keys: Sequence[Key] = DONE_KEYS, reward_keys: Sequence[Key] = REWARD_KEYS) -> None:
        self.done_keys, self.reward_keys = _keys("done_keys", done_keys), _keys("reward_keys", reward_keys)

    def shared(self, leaves: Sequence[Leaf]) -> dict[int, int]:
        """For each leaf under "next" that repeats a leaf of the root one step later: its number, the root's number."""
        by_path = {leaf.path: i for i, leaf in enumerate(leaves)}
        found = {}
        for i, leaf in enumerate(leaves):
            if leaf.path[0] != NEXT or len(leaf.path) < 2 or not leaf.nbytes or self._belongs_to_a_step(leaf.path[1:]):
                continue
            root = by_path.get(leaf.path[1:])
            if root is not None and (leaves[root].dtype, leaves[root].shape) == (leaf.dtype, leaf.shape):
                found[i] = root
        return found

    def flags(self, leaves: Sequence[Leaf]) -> list[int]:
        """The numbers of the flags under "next" that end a trajectory.

        Raises:
            ValueError: a step has several of one flag (multi-agent): where its trajectory ends is not known.
        """
        flags = [i for i, leaf in enumerate(leaves) if leaf.path[0] == NEXT and self._is_flag(leaf.path[1:])]
        for i in flags:
            shape = leaves[i].shape
            if any(size != 1 for size in shape):
                raise ValueError(
                    f"{format_key(leaves[i].path)} has the shape {list(shape)} for one step: done flags with more "
                    "dimensions than the storage (several agents) do not say where a trajectory ends. Save with the "
                    "TensorStorageCheckpointer, or leave the key out of done_keys"
                )
        return flags

    def ids(self, leaves: Sequence[Leaf]) -> list[int]:
        """The numbers of the leaves that name a trajectory: a change is a boundary."""
        return [i for i, leaf in enumerate(leaves) if leaf.path in TRAJECTORY_KEYS and leaf.nbytes]

    def _is_flag(self, path: KeyPath) -> bool:
        return _matches(path, self.done_keys)

    def _belongs_to_a_step(self, path: KeyPath) -> bool:
        return _matches(path, self.done_keys) or _matches(path, self.reward_keys)


def _matches(path: KeyPath, keys: tuple[KeyPath, ...]) -> bool:
    return bool(path) and any(path == key or (len(key) == 1 and path[-1] == key[0]) for key in keys)


def _keys(name: str, keys: Sequence[Key]) -> tuple[KeyPath, ...]:
    if isinstance(keys, str):
        raise TypeError(f"{name} is a sequence of keys, got the string {keys!r}; pass ({keys!r},)")
    return tuple(as_path(key, name) for key in keys)


@dataclasses.dataclass(frozen=True)
class StepLeaf:
    """One key: its path, its dtype, and the shape of one step."""

    path: KeyPath
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def leaves_of(td: TensorDictBase, within: KeyPath = ()) -> list[tuple[KeyPath, Tensor]]:
    """Every tensor with its path; a TypeError names an entry that is none."""
    found: list[tuple[KeyPath, Tensor]] = []
    for key, value in tensordict_items(td):
        if isinstance(value, Tensor):
            found.append(((*within, key), value))
        elif isinstance(value, TensorDictBase):
            found += leaves_of(value, (*within, key))
        else:
            raise TypeError(f"{format_key((*within, key))} is a {type(value).__name__}; only tensors can be converted")
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


def plain(tensor: Tensor, path: KeyPath) -> Tensor:
    """A dense tensor of the CPU; a TypeError names the leaf where there is none."""
    return as_tensor(tensor, path)
