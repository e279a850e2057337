"""Checkpoints of a whole training: what the buffer saves, and beside it what the learner needs, in force together."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from engram.data import ReplayBuffer


def save(folder: Path, frames: int, buffer: ReplayBuffer, state: dict[str, Any]) -> None:
    """Writes `folder/frames` aside and moves it into place when it is whole; older ones go."""
    aside, older = folder / "being-written", sorted(folder.glob("[0-9]*"))
    shutil.rmtree(aside, ignore_errors=True)
    buffer.dumps(aside / "buffer")  # makes the folder, and is on disk when it returns
    with open(aside / "learner.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(aside, folder / f"{frames:09d}")
    for path in older:
        shutil.rmtree(path)


def newest(folder: Path) -> Path:
    """The checkpoint to resume from. Raises FileNotFoundError if there is none."""
    whole = sorted(folder.glob("[0-9]*"))
    if not whole:
        raise FileNotFoundError(f"no checkpoint in {folder}: it was killed before the first one was saved")
    return whole[-1]


def learner_state(checkpoint: Path) -> dict[str, Any]:
    """What `save` got as `state`: tensors, numbers and containers; nothing else is read from a file."""
    return torch.load(checkpoint / "learner.pt", weights_only=True)
