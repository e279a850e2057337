"""A policy's weights in shared memory: written by one process, read by its workers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from tensordict import TensorDictBase
from torch import Tensor, nn

from engram.processes.shared_memory import SharedMemory

_HEADER = 64  # bytes: version, checksum, number of updates
_ALIGNED = 64
_READ_TIMEOUT = 5.0  # seconds


class SharedWeights:
    """Named tensors in shared memory; pickled to another process, it is the same memory.

    Versions may be any numbers, also one that was there before: `updates` says whether there is something to read.
    There is one writer. A reader never blocks it and never returns a half-written version: its copy must match the
    checksum beside the version number.

    >>> weights = SharedWeights({"w": torch.ones(2)})
    >>> weights.write({"w": torch.zeros(2)})
    >>> weights.version, weights.read()["w"].tolist()
    (1, [0.0, 0.0])
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._entries = []
        end = _HEADER
        for name, tensor in state.items():
            self._entries.append((name, tensor.dtype, tuple(tensor.shape), end))
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
        self._memory = SharedMemory()
        self._memory.allocate([end])
        self._version = -1
        self.write(state)
        self._header[2] = 0

    @property
    def _header(self) -> np.ndarray[Any, Any]:
        return self._memory.bytes[:_HEADER].view(np.uint64)

    @property
    def version(self) -> int:
        """The version of the last `write` (the first is 0); it may still be being written."""
        return int(self._header[0])

    @property
    def updates(self) -> int:
        """How often `write` was called and has ended."""
        return int(self._header[2])

    def write(self, state: Mapping[str, Tensor], *, version: int | None = None) -> None:
        """Overwrites the values; their `version` is one more than the last, unless given.

        Raises ValueError for other names, shapes or dtypes.
        """
        _refuse_others(self._entries, state)
        payload = self._memory.bytes[_HEADER:]
        views = _views(self._entries, payload)
        for name, view in views.items():
            view.copy_(state[name])
        self._version = self._version + 1 if version is None else version
        self._header[0], self._header[1] = self._version, _checksum(payload, self._version)
        self._header[2] += np.uint64(1)  # last: a reader that sees it reads no earlier values

    def read(self) -> dict[str, Tensor]:
        """A copy of the newest complete version; `read_version` is its number, `read_updates` that of its update.

        Raises TimeoutError where writes follow each other so closely that none is read complete for 5 seconds.
        """
        until = time.monotonic() + _READ_TIMEOUT
        while time.monotonic() < until:
            updates = self.updates  # first: of values that are newer it is too small, and they are read once more
            version, checksum = int(self._header[0]), int(self._header[1])
            payload = self._memory.bytes[_HEADER:].copy()
            if _checksum(payload, version) == checksum:
                self.read_version, self.read_updates = version, updates
                return _views(self._entries, payload)
            time.sleep(0.0005)
        raise TimeoutError(f"the shared weights were being written at every attempt to read them for {_READ_TIMEOUT} s")


def tensors_of(weights: Any) -> dict[str, Tensor]:
    """The tensors of a module, a state dict or a TensorDict of parameters, by the names of a state dict.

    Raises TypeError for anything else.
    """
    if isinstance(weights, nn.Module):
        weights = weights.state_dict()
    elif isinstance(weights, TensorDictBase):
        weights = dict(weights.flatten_keys(".").items())
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights are a module, a state dict or a TensorDict, got a {type(weights).__name__}")
    return {str(name): value.detach() for name, value in weights.items() if isinstance(value, Tensor)}


def _views(entries: list[Any], payload: np.ndarray[Any, Any]) -> dict[str, Tensor]:
    block = torch.from_numpy(payload)
    views = {}
    for name, dtype, shape, start in entries:
        size = torch.Size(shape).numel() * dtype.itemsize
        views[name] = block[start - _HEADER : start - _HEADER + size].view(dtype).reshape(shape)
    return views


def _checksum(payload: np.ndarray[Any, Any], version: int) -> int:
    return xxhash.xxh3_64_intdigest(payload.data, seed=version)


def _refuse_others(entries: list[Any], state: Mapping[str, Tensor]) -> None:
    expected = {name: (dtype, shape) for name, dtype, shape, _ in entries}
    given = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    if expected != given:
        differing = [name for name in {**expected, **given} if expected.get(name) != given.get(name)]
        raise ValueError(
            "these weights are not those of the policy.\n"
            + "\n".join(f"  {name}: found {given.get(name)}, allowed {expected.get(name)}" for name in differing[:10])
        )
