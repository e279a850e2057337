"""Chunks so small that a few rows fill several."""

from __future__ import annotations

import pytest

from engram.data.replay_buffers.checkpointers import objects as list_module
from engram.data.replay_buffers.checkpointers import rows


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", 512)
    monkeypatch.setattr(list_module, "ITEMS_PER_CHUNK", 8)
