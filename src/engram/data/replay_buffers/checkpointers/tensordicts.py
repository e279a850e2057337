"""TensorDicts in states and lists: written as the dict of their entries, their batch size, device and names."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorData, TensorDict


class TensorDictCodec:
    """Plain TensorDicts, nested ones included. On loading they lie on the CPU; a device set there comes back as cpu."""

    tag = "tensordict"

    def owns(self, value: Any) -> bool:
        return type(value) is TensorDict

    def pack(self, value: Any) -> Any:
        return {
            "batch_size": value.batch_size,
            "device": value.device is not None,
            "names": list(value.names) if value.names and any(value.names) else None,
            "items": dict(value.items()),
        }

    def unpack(self, packed: Any) -> Any:
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


CODECS = (TensorDictCodec(), NonTensorCodec())
