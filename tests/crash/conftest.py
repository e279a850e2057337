"""A place in memory for saves that are traced, and chunks so small that a few rows fill several."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engram.data.replay_buffers.checkpointers import list as list_module
from engram.data.replay_buffers.checkpointers import tensor as tensor_module


@pytest.fixture
def ram_path() -> Iterator[Path]:
    """A folder that is quick to sync."""
    root = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=root) as path:
        yield Path(path).resolve()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_module, "CHUNK_BYTES", 512)
    monkeypatch.setattr(list_module, "ITEMS_PER_CHUNK", 8)
