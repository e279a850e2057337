"""Entries of gymnasium's `info` as observations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from engram.data.specs import Spec, Unbounded
from engram.envs.gym_codecs import Key, Leaf, LeafCodec
from engram.envs.gym_values import array_of, plain_array

Array = np.ndarray[Any, Any]
InfoKeys = Sequence[Key] | Mapping[Key, Spec]


class _Like(NamedTuple):
    dtype: Any
    shape: tuple[int, ...]


class InfoReader:
    """Reads some entries of `info`: arrays in the order of `leaves`, zeros where an entry is missing.

    A key that is a tuple leads through nested dicts. Raises ValueError for a value that does not fit its spec.

    >>> reader = InfoReader({"lives": Unbounded((), dtype=torch.int64)})
    >>> reader.read({"lives": 3}), reader.read({})
    ((array(3),), (array(0),))
    """

    def __init__(self, specs: Mapping[Key, Spec]) -> None:
        self._columns = [(_path(key), *_raw(key, spec)) for key, spec in specs.items()]
        self.leaves = [
            Leaf(key, (1, index), LeafCodec(spec, _Like(*self._columns[index][1:])))
            for index, (key, spec) in enumerate(specs.items())
        ]

    def read(self, info: Mapping[str, Any]) -> tuple[Array, ...]:
        """One array per leaf, from the `info` of one environment."""
        return tuple(_fitted(_found(info, path), dtype, shape, path) for path, dtype, shape in self._columns)

    def read_batch(self, infos: Mapping[str, Any], n: int) -> tuple[Array, ...]:
        """One array `[n, ...]` per leaf, from the `infos` of a vector environment."""
        return tuple(self._batched(infos, n, *column) for column in self._columns)

    def _batched(
        self, infos: Mapping[str, Any], n: int, path: tuple[str, ...], dtype: Any, shape: tuple[int, ...]
    ) -> Array:
        values = _found(infos, path)
        has = _found(infos, (*path[:-1], f"_{path[-1]}"))
        if values is None:
            return np.zeros((n, *shape), dtype)
        if getattr(values, "dtype", np.dtype(float)).hasobject:  # gymnasium has no array for such values
            return np.stack([_fitted(value, dtype, shape, path) for value in values])
        column = _fitted(values, dtype, (n, *shape), path)
        if has is not None:
            column[~np.asarray(has)] = 0
        return column

    def stepping(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`step` of one environment with pairs (observation, entries) for observations."""

        def step_with_info(action: Any) -> Any:
            observation, reward, terminated, truncated, info = step(action)
            return (observation, self.read(info)), reward, terminated, truncated, info

        return step_with_info


def reader_of(
    keys: InfoKeys | None, probe: Callable[[], Sequence[Mapping[str, Any]]], batch_dims: int
) -> InfoReader | None:
    """The reader of `keys`; without specs they are taken from what `probe` gives, which is not called otherwise.

    Raises KeyError for a key that was not there, TypeError for a value that is no array of numbers.
    """
    if not keys:
        return None
    if isinstance(keys, Mapping):
        return InfoReader(keys)
    if isinstance(keys, str):
        raise TypeError(f"info_keys must be a list of keys or a mapping from keys to specs, got {keys!r}: [{keys!r}]?")
    infos = probe()
    return InfoReader({key: _spec_seen(key, infos, batch_dims) for key in keys})


def _spec_seen(key: Key, infos: Sequence[Mapping[str, Any]], batch_dims: int) -> Spec:
    values = [value for info in infos if (value := _found(info, _path(key))) is not None]
    if not values:
        seen = sorted({str(name) for info in infos for name in info})
        raise KeyError(
            f"info has no {key!r} after a reset and a step, it has {seen}; if it comes later, give its spec: "
            f"info_keys={{{key!r}: Unbounded(shape, dtype=...)}}"
        )
    array = np.asarray(values[0])
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"info[{key!r}] is {values[0]!r}, which has no tensor form; leave it out, or give a spec of numbers: "
            f"info_keys={{{key!r}: Unbounded(shape, dtype=...)}}"
        )
    return Unbounded(array.shape[batch_dims:], dtype=torch.from_numpy(np.zeros(0, array.dtype)).dtype)


def _path(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _raw(key: Key, spec: Spec) -> tuple[Any, tuple[int, ...]]:
    if spec.dtype is None:
        raise TypeError(f"info_keys[{key!r}] must be the spec of one tensor, got {spec}; name its entries by tuples")
    return torch.zeros(0, dtype=spec.dtype).numpy().dtype, tuple(spec.shape)


def _found(info: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        info = info.get(step, None) if isinstance(info, Mapping) else None
    return info


def _fitted(value: Any, dtype: Any, shape: tuple[int, ...], path: tuple[str, ...]) -> Array:
    if value is None:
        return np.zeros(shape, dtype)
    what = f"info{list(path)} is {value!r:.80}, a value"
    array = plain_array(value, what, shape, dtype)
    if array.size == math.prod(shape):
        array = array.reshape(shape)  # a number where the spec says [1], or the reverse
    return np.array(array_of(array, dtype, shape, what))
