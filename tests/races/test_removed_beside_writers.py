"""A removed row that is replaced in the very moment in which it is read is in no batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from engram.data import LazyTensorStorage, ReplayBuffer, Sampler

pytestmark = pytest.mark.quick


class FirstSlot(Sampler):
    """A user's sampler that looks at nothing."""

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        return torch.zeros(batch_size, dtype=torch.int64), {}


def test_removed_row_whose_bit_is_cleared_after_it_was_read_is_not_in_the_batch(monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=FirstSlot(), batch_size=1)
    rb.extend(TensorDict({"n": torch.arange(4)}, [4]))
    rb.remove(0)
    read, reads = rb.storage.read, []

    def read_then_replaced(*args: Any) -> Any:
        reads.append(read(*args))
        if len(reads) == 1:  # the row was read whole, and looked at; now another one takes its place
            rb.extend(TensorDict({"n": torch.tensor([4])}, [1]))
        return reads[-1]

    monkeypatch.setattr(rb.storage, "read", read_then_replaced)
    assert rb.sample()["n"].tolist() == [4]
    assert reads[0].batch["n"].tolist() == [0]
