"""What the tests of the command line look into."""

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from engram.data import LazyMemmapStorage, TensorDictReplayBuffer


def episodes(steps: int = 300, length: int = 100) -> TensorDict:
    """Episodes of one length, whose rewards are 1."""
    done = torch.zeros(steps, 1, dtype=torch.bool)
    done[length - 1 :: length] = True
    observation = torch.arange(steps * 3.0).reshape(steps, 3)
    following = {
        "observation": observation + 3, "reward": torch.ones(steps, 1), "done": done, "terminated": done,
        "truncated": torch.zeros_like(done),
    }  # fmt: skip
    return TensorDict({"observation": observation, "action": torch.arange(steps), "next": following}, [steps])


def store(folder: Path, steps: int = 300, capacity: int = 1000, **options: Any) -> TensorDictReplayBuffer:
    """A buffer over a mapped store in `folder / "store"`, which holds `episodes`."""
    storage = LazyMemmapStorage(capacity, scratch_dir=folder / "store", **options)
    rb = TensorDictReplayBuffer(storage=storage, batch_size=8)
    rb.extend(episodes(steps))
    return rb
