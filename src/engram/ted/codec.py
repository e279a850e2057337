"""Episode data (TED) as columns of bytes, and encodings that store an observation once instead of twice.

A column is uint8 [n, nbytes]: one leaf of n steps, one environment after the other, each oldest first. Bytes are
compared, not numbers: NaN equals the same NaN, and -0.0 is not 0.0.
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

from engram.pytree import Key, KeyPath, as_path, as_tensor, format_key, is_tensorclass, tensordict_items

Column = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.int64]

_FEW_WORDS = 8


def differs(a: Column, b: Column) -> Mask:
    """bool [n]: whether any byte differs."""
    a, b = _words(a), _words(b)
    width = a.shape[1]
    if not 0 < width <= _FEW_WORDS:
        rows: Mask = (a != b).any(axis=1)
        return rows
    different: Mask = a[:, 0] != b[:, 0]
    for word in range(1, width):  # NumPy reduces short rows slowly
        different |= a[:, word] != b[:, word]
    return different


def broken(now: Column, following: Column, ends: Mask) -> Mask:
    """bool [n]: where `following[t]` is not `now[t + 1]`, and at `ends`, where no step comes after."""
    out: Mask = ends.copy()
    out[:-1] |= differs(following[:-1], now[1:])
    return out


def with_last(now: Column, following: Column, ends: Mask) -> Column:
    """[n + trajectories, nbytes]: the column, and after each trajectory's last step the value that followed it."""
    out = np.empty((len(now) + int(ends.sum()), now.shape[1]), np.uint8)
    last = last_places(ends)
    keep = np.ones(len(out), np.bool_)
    keep[last] = False
    out[keep] = now
    out[last] = following[ends]
    return out


def without_last(extended: Column, ends: Mask) -> tuple[Column, Column]:
    """The reverse of `with_last`: `now`, and `following` except where it is not the next step's value."""
    keep = np.ones(len(extended), np.bool_)
    keep[last_places(ends)] = False
    shifted = np.zeros_like(keep)
    shifted[1:] = keep[:-1]  # the value after each step: another step, or the last one's successor
    return extended[keep], extended[shifted]


def last_places(ends: Mask) -> Positions:
    """The positions of the additional values of `with_last`."""
    at = np.flatnonzero(ends)
    return at + np.arange(1, len(at) + 1)


def followed(now: Column, at: Positions, values: Column) -> Column:
    """The value that follows each step: that of the step after it, except at the positions `at`."""
    out = np.empty_like(now)
    out[:-1] = now[1:]
    out[at] = values
    return out


def env_ends(envs: int, steps: int) -> Mask:
    """bool [envs * steps]: the newest step of each environment."""
    ends = np.zeros((envs, steps), np.bool_)
    ends[:, -1:] = True
    return ends.reshape(-1)


def trajectory_ends(ends: Mask, flags: list[Column], ids: list[Column]) -> Mask:
    """bool [n]: `ends`, and the steps where a flag is set or after which an id changes."""
    out: Mask = ends.copy()
    for flag in flags:
        out |= flag.any(axis=1)
    for column in ids:
        out[:-1] |= differs(column[:-1], column[1:])
    return out


def run_starts(column: Column) -> Positions:
    """The steps at which a run of equal values starts; step 0 is one."""
    start = np.ones(len(column), np.bool_)
    start[1:] = differs(column[1:], column[:-1])
    return np.flatnonzero(start)


def repeat_runs(starts: Positions, values: Column, n: int) -> Column:
    """The column of n steps whose runs begin at `starts`; ValueError when the first one is not 0."""
    if n and (not len(starts) or starts[0] != 0):
        raise ValueError("the value of the first step is missing")
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


class LeafLike(Protocol):
    """Path, dtype and shape of one step of a key; a `StepLeaf` here, a `LeafSpec` of a storage elsewhere."""

    @property
    def path(self) -> KeyPath: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


class StepKeys:
    """Names of the flags and rewards, which belong to one step and are never read from the step after it.

    Args:
        done_keys: flags, at the root and under "next": a name at any depth, or a tuple for one place.
        reward_keys: rewards, the same.

    Raises:
        TypeError: a key is neither a string nor a tuple of strings.
    """

    def __init__(self, done_keys: Sequence[Key] = DONE_KEYS, reward_keys: Sequence[Key] = REWARD_KEYS) -> None:
        self.done_keys, self.reward_keys = _keys("done_keys", done_keys), _keys("reward_keys", reward_keys)

    def shared(self, leaves: Sequence[LeafLike]) -> dict[int, int]:
        """Indices of leaves under "next" that the root repeats one step later, and of those root leaves."""
        by_path = {leaf.path: i for i, leaf in enumerate(leaves)}
        shared = {}
        for i, leaf in enumerate(leaves):
            if leaf.path[0] != NEXT or len(leaf.path) < 2 or not leaf.nbytes or self._belongs_to_a_step(leaf.path[1:]):
                continue
            root = by_path.get(leaf.path[1:])
            if root is not None and (leaves[root].dtype, leaves[root].shape) == (leaf.dtype, leaf.shape):
                shared[i] = root
        return shared

    def flags(self, leaves: Sequence[LeafLike]) -> list[int]:
        """Indices of the flags under "next" that end a trajectory.

        Raises:
            ValueError: a step has several of one flag (multi-agent), which do not mark where its trajectory ends.
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

    def ids(self, leaves: Sequence[LeafLike]) -> list[int]:
        """Indices of the leaves with trajectory ids: a change of them ends a trajectory."""
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


def tensordict_of(steps: Any) -> TensorDictBase:
    """Steps that are a TensorDict or a tensorclass, as a TensorDict; TypeError for others."""
    if isinstance(steps, TensorDictBase):
        return steps
    if is_tensorclass(steps):
        entries: TensorDictBase = steps._tensordict
        return entries
    raise TypeError(f"episode data (TED) are a TensorDict or a tensorclass, found a {type(steps).__name__}")


def leaves_of(td: TensorDictBase, within: KeyPath = ()) -> list[tuple[KeyPath, Tensor]]:
    """Every tensor with its path; TypeError where an entry is not a tensor."""
    leaves: list[tuple[KeyPath, Tensor]] = []
    for key, value in tensordict_items(td):
        if isinstance(value, Tensor):
            leaves.append(((*within, key), value))
        elif isinstance(value, TensorDictBase):
            leaves += leaves_of(value, (*within, key))
        else:
            raise TypeError(f"{format_key((*within, key))} is a {type(value).__name__}; only tensors can be converted")
    return leaves


def column_of(tensor: Tensor, batch_dims: int, shift: int) -> Column:
    """uint8 [n, nbytes]: the steps, environment after environment, each from its oldest on, which is at `shift`."""
    lead, shape = tensor.shape[:batch_dims], tensor.shape[batch_dims:]
    nbytes = math.prod(shape) * tensor.element_size()
    return _rolled(as_bytes(tensor, math.prod(lead), nbytes), tuple(lead), -shift)


def _rolled(column: Column, lead: tuple[int, ...], shift: int) -> Column:
    if not shift or not column.size:
        return column
    envs = column.reshape(-1, lead[-1], column.shape[1])
    return np.roll(envs, shift, axis=1).reshape(column.shape)


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
    tensor = torch.empty((*lead, *leaf.shape), dtype=leaf.dtype, device="cpu")
    if tensor.numel():
        tensor.view(-1).view(torch.uint8).numpy()[:] = _rolled(column, lead, shift).reshape(-1)
    return tensor


def plain(tensor: Tensor, path: KeyPath) -> Tensor:
    """A dense tensor on the CPU; TypeError, with the name of the leaf, for others."""
    return as_tensor(tensor, path)
