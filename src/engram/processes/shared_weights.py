"""A policy's weights in shared memory: written by the owner, read by its workers, pickled once."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from tensordict import TensorDictBase
from torch import Tensor, nn

from engram.store.files import share_fd

_HEADER = 64  # bytes: version, checksum
_ALIGNED = 64
_PATIENCE = 5.0  # seconds that a reader tries to find the weights at rest


class SharedWeights:
    """Tensors by name, in memory that processes share; sent to another process, it is the same memory.

    There is one writer. A reader never waits for it and never believes a half-written version: what it has copied must
    have the checksum that stands beside the version number.

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
        self._fd = os.memfd_create("engram-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, end)
        self._map_all()
        self._version = -1
        self.write(state)

    def _map_all(self) -> None:
        memory = mmap.mmap(self._fd, os.fstat(self._fd).st_size)
        self._bytes = np.frombuffer(memory, np.uint8)
        self._header = self._bytes[:_HEADER].view(np.uint64)

    @property
    def version(self) -> int:
        """That of the last `write`, 0 before the second; may be one that is being written."""
        return int(self._header[0])

    def write(self, state: Mapping[str, Tensor], version: int | None = None) -> None:
        """Puts new values in the place of the old ones; their `version` is one more than the last, unless given.

        Raises ValueError for other names, shapes or dtypes.
        """
        _refuse_others(self._entries, state)
        payload = self._bytes[_HEADER:]
        views = _views(self._entries, payload)
        for name, view in views.items():
            view.copy_(state[name])
        self._version = self._version + 1 if version is None else version
        self._header[0], self._header[1] = self._version, _checksum(payload, self._version)

    def read(self) -> dict[str, Tensor]:
        """A copy of the newest version that is whole; `read_version` says which.

        Raises TimeoutError where the writer does not come to rest for seconds.
        """
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            version, checksum = int(self._header[0]), int(self._header[1])
            payload = self._bytes[_HEADER:].copy()
            if _checksum(payload, version) == checksum:
                self.read_version = version
                return _views(self._entries, payload)
            time.sleep(0.0005)
        raise TimeoutError(f"the shared weights were not at rest for {_PATIENCE} s")

    def __getstate__(self) -> dict[str, Any]:
        return {"entries": self._entries, "descriptor": share_fd(self._fd), "version": self._version}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._entries, self._version = state["entries"], state["version"]
        self._fd = state["descriptor"].detach()
        self._map_all()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)


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
    found = {}
    for name, dtype, shape, start in entries:
        size = torch.Size(shape).numel() * dtype.itemsize
        found[name] = block[start - _HEADER : start - _HEADER + size].view(dtype).reshape(shape)
    return found


def _checksum(payload: np.ndarray[Any, Any], version: int) -> int:
    return xxhash.xxh3_64_intdigest(payload.data, seed=version)


def _refuse_others(entries: list[Any], state: Mapping[str, Tensor]) -> None:
    known = {name: (dtype, shape) for name, dtype, shape, _ in entries}
    given = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    if known != given:
        odd = [name for name in {**known, **given} if known.get(name) != given.get(name)]
        raise ValueError(
            "these weights are not those of the policy.\n"
            + "\n".join(f"  {name}: found {given.get(name)}, allowed {known.get(name)}" for name in odd[:10])
        )
