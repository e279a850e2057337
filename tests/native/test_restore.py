"""A load whose disk refuses its rows."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from engram.data import LazyMemmapStorage, ReplayBuffer
from engram.errors import StorageError


def test_a_load_whose_writes_fail_leaves_the_buffer_empty_and_says_why(tmp_path: Path) -> None:
    steps = TensorDict({"x": torch.arange(100_000)}, [100_000])
    rb, twin = (ReplayBuffer(storage=LazyMemmapStorage(100_000, scratch_dir=tmp_path / name)) for name in "ab")
    rb.extend(steps)
    rb.dumps(tmp_path / "saved")
    twin.extend(steps[:10])
    twin.empty()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(StorageError, match=r"cannot be written .*: File too large"):
            twin.loads(tmp_path / "saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(twin) == 0
    twin.loads(tmp_path / "saved")
    assert (twin[:]["x"] == steps["x"]).all()
