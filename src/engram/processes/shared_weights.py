"""A policy's weights as a block of bytes, which may lie in shared memory: written by one process, read by others."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from tensordict import TensorDictBase
from torch import Tensor, nn

from engram.processes.shared_memory import SharedMemory

Bytes = np.ndarray[Any, Any]

_HEADER = 64  # bytes: version, checksum, number of updates
_ALIGNED = 64
_READ_TIMEOUT = 5.0  # seconds


class WeightsEntry(NamedTuple):
    """One tensor of a block.

    Attributes:
        start: its first byte.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class WeightsLayout:
    """Where each of some named tensors lies in a block of bytes.

    >>> layout = WeightsLayout({"w": torch.ones(2), "steps": torch.tensor(3)})
    >>> block = layout.pack({"w": torch.zeros(2), "steps": torch.tensor(4)})
    >>> block.nbytes, layout.views(block)["steps"].item()
    (72, 4)
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.entries: list[WeightsEntry] = []
        end = 0
        for name, tensor in state.items():
            start = -(-end // _ALIGNED) * _ALIGNED
            self.entries.append(WeightsEntry(name, tensor.dtype, tuple(tensor.shape), start))
            end = start + self.entries[-1].nbytes
        self.nbytes = end

    @staticmethod
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

    def pack(self, state: Mapping[str, Tensor]) -> Bytes:
        """The values in a new block, uint8 [nbytes], wherever the tensors are; errors as `refuse_others`."""
        block = np.zeros(self.nbytes, np.uint8)
        self.pack_into(block, state)
        return block

    def pack_into(self, block: Bytes, state: Mapping[str, Tensor]) -> None:
        """Overwrites the values in a block; errors as `refuse_others`, which are raised before that."""
        self.refuse_others(state)
        for name, view in self.views(block).items():
            view.copy_(state[name])

    def views(self, block: Bytes) -> dict[str, Tensor]:
        """The tensors in a block, which share its memory."""
        whole = torch.from_numpy(block)
        return {
            entry.name: whole[entry.start : entry.start + entry.nbytes].view(entry.dtype).reshape(entry.shape)
            for entry in self.entries
        }

    def refuse_others(self, state: Mapping[str, Tensor]) -> None:
        """ValueError for weights of other names, shapes or dtypes."""
        allowed = {entry.name: (entry.dtype, entry.shape) for entry in self.entries}
        given = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
        differing = [name for name in {**allowed, **given} if allowed.get(name) != given.get(name)]
        if differing:
            raise ValueError(
                "these weights are not those of the policy.\n"
                + "\n".join(
                    f"  {name}: found {given.get(name)}, allowed {allowed.get(name)}" for name in differing[:10]
                )
            )


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
        self._layout = WeightsLayout(state)
        self._memory = SharedMemory()
        self._memory.allocate([_HEADER + self._layout.nbytes])
        self._version = -1
        self.write(state)
        self._header[2] = 0

    @property
    def _header(self) -> Bytes:
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
        payload = self._memory.bytes[_HEADER:]
        self._layout.pack_into(payload, state)
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
                return self._layout.views(payload)
            time.sleep(0.0005)
        raise TimeoutError(f"the shared weights were being written at every attempt to read them for {_READ_TIMEOUT} s")


def _checksum(payload: Bytes, version: int) -> int:
    return xxhash.xxh3_64_intdigest(payload.data, seed=version)
