"""What slices say in the batch: their ends, their beginnings, which rows are padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram import _native
from engram.data.replay_buffers.trees import Path, entry, show


def has_keys(batch: Any) -> bool:
    """Whether entries can be read from a batch by key."""
    kind = type(batch)
    return kind in (TensorDict, dict) or isinstance(batch, TensorDictBase) or hasattr(kind, "_from_tensordict")


def mark_last(batch: Any, path: Path, slices: _native.SliceBatch) -> Tensor:
    """True at each slice's last step, in place; a leaf that is not there is added: bool [n, 1]."""
    return _marked(batch, path, slices.mark_last, slices.last)


def mark_first(batch: Any, path: Path, slices: _native.SliceBatch) -> Tensor:
    """True at each slice's first step, in place; a leaf that is not there is added: bool [n, 1]."""
    return _marked(batch, path, slices.mark_first, slices.first)


def _marked(batch: Any, path: Path, mark: Callable[[Any], bool], flags: Callable[[], Tensor]) -> Tensor:
    leaf: Tensor | None = entry(batch, path)
    if leaf is None:
        leaf = flags()
        put(batch, path, leaf)
    elif not mark(leaf):
        leaf[flags().flatten().to(leaf.device)] = 1
    return leaf


def put(batch: Any, path: Path, value: Tensor) -> None:
    """One more entry at a path; dictionaries on the way are made.

    Raises:
        TypeError: a tensorclass has no such field.
    """
    if isinstance(batch, dict):
        for key in path[:-1]:
            batch = batch.setdefault(key, {})
        batch[path[-1]] = value
        return
    value = value if batch.device is None else value.to(batch.device)
    try:
        batch.set(path, value)
    except (AttributeError, KeyError, ValueError) as error:
        raise TypeError(
            f"a {type(batch).__name__} has no place for {show(path)}, where slices are marked: {error}; add it, or "
            "pass None for this key"
        ) from error
