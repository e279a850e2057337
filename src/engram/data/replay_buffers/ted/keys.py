"""Which keys of an episode format (TED) are stored once: those at the root whose successor lies under "next"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from engram.data.replay_buffers.trees import Path, show

NEXT = "next"
DONE_KEYS = ("done", "truncated", "terminated")
REWARD_KEYS = ("reward",)
TRAJECTORY_KEYS: tuple[Path, ...] = (("collector", "traj_ids"), ("episode",))

Key = str | tuple[str, ...]


class Leaf(Protocol):
    """What is known of a key: its path, its dtype, and the shape of one step."""

    @property
    def path(self) -> Path: ...
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
                    f"{show(leaves[i].path)} has the shape {list(shape)} for one step: done flags with more dimensions "
                    "than the storage (several agents) do not say where a trajectory ends. Save with the "
                    "TensorStorageCheckpointer, or leave the key out of done_keys"
                )
        return flags

    def ids(self, leaves: Sequence[Leaf]) -> list[int]:
        """The numbers of the leaves that name a trajectory: a change is a boundary."""
        return [i for i, leaf in enumerate(leaves) if leaf.path in TRAJECTORY_KEYS and leaf.nbytes]

    def _is_flag(self, path: Path) -> bool:
        return _matches(path, self.done_keys)

    def _belongs_to_a_step(self, path: Path) -> bool:
        return _matches(path, self.done_keys) or _matches(path, self.reward_keys)


def _matches(path: Path, keys: tuple[Path, ...]) -> bool:
    return bool(path) and any(path == key or (len(key) == 1 and path[-1] == key[0]) for key in keys)


def _keys(name: str, keys: Sequence[Key]) -> tuple[Path, ...]:
    if isinstance(keys, str):
        raise TypeError(f"{name} is a sequence of keys, got the string {keys!r}; pass ({keys!r},)")
    return tuple(as_path(name, key) for key in keys)


def as_path(name: str, key: Key) -> Path:
    """The path of a key: a string or a tuple of strings; anything else is a TypeError that names the argument."""
    path = (key,) if isinstance(key, str) else key
    if not isinstance(path, tuple) or not path or not all(isinstance(part, str) for part in path):
        raise TypeError(f"{name}: a key is a string or a tuple of strings, got {key!r}")
    return path
