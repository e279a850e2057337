"""Entries of batches with keys (TensorDicts, nested dicts, tensorclasses) by possibly nested keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Union

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.errors import is_masked, masked_array

Key = Union[str, tuple[str, ...]]
Keys = Union[Key, Sequence[Key], None]


def as_key(key: Any) -> Key:
    """A key in its one form: a string, or a tuple of two strings or more.

    Raises:
        TypeError: it is neither a string nor a tuple of strings.
    """
    if isinstance(key, str):
        return key
    if isinstance(key, tuple) and key and all(isinstance(part, str) for part in key):
        return key[0] if len(key) == 1 else key
    raise TypeError(f"a key is a string or a tuple of strings, got {key!r}")


def as_keys(keys: Keys) -> list[Key]:
    """A list of keys from a list, one string, or None. A tuple at the root is one nested key."""
    if keys is None:
        return []
    return [as_key(keys)] if isinstance(keys, str | tuple) else [as_key(key) for key in keys]


def path_of(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def is_class(obj: Any) -> bool:
    """Whether it is an instance of a tensorclass."""
    return not isinstance(obj, type) and hasattr(type(obj), "_from_tensordict")


def has_keys(batch: Any) -> bool:
    return isinstance(batch, TensorDictBase | dict) or is_class(batch)


def has_batch_dims(batch: Any) -> bool:
    """Whether it says itself which of its dimensions are those of the batch."""
    return isinstance(batch, TensorDictBase) or is_class(batch)


def find(batch: Any, key: Key) -> Any:
    """The entry, None where there is none. Numbers and numpy arrays come as tensors."""
    for part in path_of(key):
        if isinstance(batch, dict):
            batch = batch.get(part)
        elif isinstance(batch, TensorDictBase) or (is_class(batch) and part in fields(batch)):
            batch = batch.get(part, None)
        else:
            return None
    return as_leaf(batch, key) if isinstance(batch, bool | int | float | np.ndarray | np.generic) else batch


def as_leaf(value: Any, key: Key | None = None) -> Tensor:
    """A number, an array or a tensor as a tensor.

    Raises:
        TypeError: a numpy masked array, whose mask would be lost.
    """
    if is_masked(value):
        raise masked_array("the data" if key is None else repr(key))
    return torch.as_tensor(value)


def get(batch: Any, key: Key, who: str) -> Any:
    """The entry.

    Raises:
        KeyError: there is none; the message names the key, and the keys that exist.
        TypeError: the batch has no keys.
    """
    found = find(batch, key) if has_keys(batch) else None
    if found is None:
        raise missing(batch, [key], who)
    return found


def missing(batch: Any, wanted: Sequence[Key], who: str) -> Exception:
    """The error for an entry that is not there."""
    if not has_keys(batch):
        return TypeError(
            f"{who} works on keys, and a {type(batch).__name__} has none; give it TensorDicts, dicts or tensorclasses, "
            "or use a callable as the transform"
        )
    return KeyError(f"{who} needs the key {' or '.join(map(repr, wanted))}; the batch has {leaf_keys(batch)}")


def put(batch: Any, key: Key, value: Any) -> None:
    """Sets an entry in place; dicts on the way are made.

    Raises:
        KeyError: a tensorclass on the way has no such field.
    """
    *parents, last = path_of(key)
    for part in parents:
        below = batch.get(part) if isinstance(batch, dict) else find(batch, part)
        if below is None and isinstance(batch, dict):
            below = batch[part] = {}
        if below is None or (isinstance(batch, TensorDictBase) and isinstance(below, TensorDictBase)):
            break  # a TensorDict goes on by itself, and makes what it lacks
        batch, key = below, path_of(key)[1:]
    if isinstance(batch, dict):
        batch[last] = value
        return
    if is_class(batch) and path_of(key)[0] not in fields(batch):
        raise KeyError(f"{type(batch).__name__} has no field {path_of(key)[0]!r}; its fields are {fields(batch)}")
    batch.set(key, value)


def drop(batch: Any, key: Key) -> None:
    """Removes an entry in place.

    Raises:
        TypeError: a tensorclass cannot lose a field.
    """
    *parents, last = path_of(key)
    for part in parents:
        batch = batch[part] if isinstance(batch, dict) else batch.get(part)
    if is_class(batch):
        raise TypeError(f"{type(batch).__name__} cannot lose its field {last!r}; store TensorDicts instead")
    batch.pop(last)


def fields(batch: Any) -> list[str]:
    """The fields of a tensorclass."""
    return [field.name for field in dataclasses.fields(batch)]


def children(batch: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(batch, TensorDictBase | dict):
        for key in batch.keys():  # noqa: SIM118 -- a TensorDict iterates over rows
            yield key, batch.get(key)
    else:
        for key in fields(batch):
            yield key, batch.get(key, None)


def leaf_keys(batch: Any) -> list[Key]:
    """The keys of all leaves."""
    found: list[Key] = []
    for key, value in children(batch):
        if has_keys(value):
            found += [(key, *path_of(below)) for below in leaf_keys(value)]
        elif value is not None:
            found.append(key)
    return found


def shallow(batch: Any) -> Any:
    """Containers of its own with the same leaves: entries can be set without the caller's seeing it."""
    if isinstance(batch, dict):
        return {k: shallow(v) for k, v in batch.items()}
    return batch.clone(recurse=False) if isinstance(batch, TensorDictBase) or is_class(batch) else batch


def mapped(batch: Any, of_tensor: Callable[[Tensor], Tensor], of_batch: Callable[[Any], Any]) -> Any:
    """A batch with every outermost TensorDict or tensorclass, and every leaf of dicts and tuples, changed."""
    if isinstance(batch, dict):
        return {k: mapped(v, of_tensor, of_batch) for k, v in batch.items()}
    if isinstance(batch, tuple):
        return tuple(mapped(v, of_tensor, of_batch) for v in batch)
    if isinstance(batch, TensorDictBase) or is_class(batch):
        return of_batch(batch)
    return of_tensor(as_leaf(batch))


def stacked(items: list[Any]) -> Any:
    """A list of items as one batch with a new first dimension."""
    if isinstance(items[0], dict):
        return {k: stacked([item[k] for item in items]) for k in items[0]}
    has_shape = isinstance(items[0], TensorDictBase | Tensor) or is_class(items[0])
    return torch.stack(items if has_shape else [as_leaf(item) for item in items])


def unstacked(batch: Any, n: int) -> list[Any]:
    """The items of a batch along its first dimension."""
    if isinstance(batch, dict):
        parts = {k: unstacked(v, n) for k, v in batch.items()}
        return [{k: v[i] for k, v in parts.items()} for i in range(n)]
    return list(batch.unbind(0))
