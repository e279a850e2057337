"""Samplers and transforms as users write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engram.data import Storage
from engram.envs.transforms import Transform


class OwnSampler:
    """Draws from torch's global generator; has nothing to save."""

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        if not len(storage):
            raise RuntimeError("nothing to draw")
        return self._index(storage, torch.randint(0, self._rows(storage), (batch_size,)))

    @staticmethod
    def _rows(storage: Storage) -> int:
        return len(storage.lanes or ()) // max(1, len(storage.lanes.states()) if storage.lanes else 1)

    def _index(self, storage: Storage, rows: Tensor) -> tuple[Any, dict[str, Any]]:
        return (rows if storage.ndim == 1 else tuple(storage.from_slots(rows))), {"drawn": rows.clone()}


class OwnSamplerWithState(OwnSampler):
    """Goes through the rows in strides; what it says of its state are its own tensors, as modules do."""

    def __init__(self) -> None:
        self._at = torch.zeros(1, dtype=torch.int64)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        if not len(storage):
            raise RuntimeError("nothing to draw")
        rows = (self._at + torch.arange(batch_size) * 3) % max(1, self._rows(storage))
        self._at += batch_size
        return self._index(storage, rows)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at.copy_(state["at"])


class OwnTransform(Transform):
    """Numbers the writes, and adds up what it reads."""

    inverse_in_order = True

    def __init__(self) -> None:
        super().__init__()
        self._writes = 0
        self._mean = torch.zeros(3)

    def inv(self, batch: Any) -> Any:
        self._writes += 1
        batch = [item.copy() for item in batch] if isinstance(batch, list) else batch.copy()
        for part in batch if isinstance(batch, list) else [batch]:
            observation = part["observation"]
            part["nth"] = torch.full(part.batch_size, self._writes)
            self._mean = self._mean * 0.9 + observation.reshape(-1, 3).mean(0) * 0.1
        return batch

    def forward(self, batch: Any) -> Any:
        for part in batch if isinstance(batch, list) else [batch]:
            part["centred"] = part["observation"] - self._mean
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"writes": self._writes, "mean": self._mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._writes, self._mean = state.get("writes", 0), state.get("mean", torch.zeros(3))
