"""Encodes TensorDicts in states and lists: their entries as a dict, their batch size, device and names."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict


class TensorDictCodec:
    """Plain TensorDicts, nested ones too. They are loaded on the CPU; one that had a device set has the CPU set."""

    tag = "tensordict"

    def owns(self, value: Any) -> bool:
        return type(value) is TensorDict

    def pack(self, value: Any) -> Any:
        if _exceeds_content(value.values(), value.batch_size):
            raise TypeError(f"a TensorDict of batch size {tuple(value.batch_size)} that holds nothing of it")
        return {
            "batch_size": value.batch_size,
            "device": value.device is not None,
            "names": list(value.names) if value.names and any(value.names) else None,
            "items": dict(value.items()),
        }

    def unpack(self, packed: Any) -> Any:
        if _exceeds_content(packed["items"].values(), packed["batch_size"]):
            raise ValueError(f"a TensorDict of batch size {tuple(packed['batch_size'])} holds nothing of it")
        device = torch.device("cpu") if packed["device"] else None
        return TensorDict(packed["items"], packed["batch_size"], device=device, names=packed["names"])


class NonTensorCodec:
    """`NonTensorData`: one value for a whole batch."""

    tag = "nontensor"

    def owns(self, value: Any) -> bool:
        return type(value) is NonTensorData

    def pack(self, value: Any) -> Any:
        return {"data": value.data, "batch_size": value.batch_size}

    def unpack(self, packed: Any) -> Any:
        return NonTensorData(packed["data"], batch_size=packed["batch_size"])


# A large batch size costs nothing to write, but code that iterates over the TensorDict makes an object for each step.
_MOST_EMPTY = 1 << 24


def _exceeds_content(values: Iterable[Any], batch_size: Iterable[int]) -> bool:
    return math.prod(batch_size) > max(_MOST_EMPTY, _nbytes(values))


def _nbytes(values: Iterable[Any]) -> int:
    return sum(_nbytes(v.values()) if isinstance(v, TensorDict) else getattr(v, "nbytes", 0) for v in values)


CODECS = (TensorDictCodec(), NonTensorCodec())
