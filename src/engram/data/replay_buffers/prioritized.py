"""Replay buffers that draw in proportion to priorities: wiring, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engram.data.replay_buffers.buffer import ReplayBuffer
from engram.data.replay_buffers.samplers.prioritized import PrioritizedSampler
from engram.data.replay_buffers.storages.base import Storage
from engram.data.replay_buffers.tensordict import TensorDictReplayBuffer


class PrioritizedReplayBuffer(ReplayBuffer):
    """A ReplayBuffer with a `PrioritizedSampler`.

    Args:
        alpha, beta, eps, dtype, reduction, max_priority_within_buffer: as PrioritizedSampler.
        Others: as ReplayBuffer, but there is no `sampler`.

    Example:
        >>> rb = PrioritizedReplayBuffer(0.7, 0.9, storage=LazyTensorStorage(10), batch_size=4)
        >>> index = rb.extend(torch.arange(5))
        >>> rb.update_priority(index, torch.tensor([0.1, 2.0, 0.1, 0.1, 0.1]))
        >>> batch, info = rb.sample(return_info=True)
        >>> info["priority_weight"].shape
        torch.Size([4])
    """

    def __init__(
        self,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        *,
        capacity: int | None = None,
        storage: Storage | Callable[[], Storage] | None = None,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        **kwargs: Any,
    ) -> None:
        sampler = PrioritizedSampler(None, alpha, beta, eps, dtype, reduction, max_priority_within_buffer)
        super().__init__(capacity, storage=storage, sampler=sampler, **_without_sampler(kwargs))


class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """A TensorDictReplayBuffer with a `PrioritizedSampler`: samples carry `"index"` and `"priority_weight"`.

    Args:
        alpha, beta, eps, dtype, reduction, max_priority_within_buffer: as PrioritizedSampler.
        priority_key: where priorities are, in data that are written and in batches that come back.
        Others: as TensorDictReplayBuffer, but there is no `sampler`.

    Example:
        >>> rb = TensorDictPrioritizedReplayBuffer(0.7, 0.9, storage=LazyTensorStorage(10), batch_size=4)
        >>> _ = rb.extend(TensorDict({"obs": torch.arange(5.0), "td_error": torch.ones(5)}, [5]))
        >>> batch = rb.sample()
        >>> batch["td_error"] = (batch["obs"] - 2).abs() * batch["priority_weight"]
        >>> rb.update_tensordict_priority(batch)
    """

    def __init__(
        self,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        priority_key: str = "td_error",
        reduction: str = "max",
        dtype: torch.dtype = torch.float,
        *,
        capacity: int | None = None,
        storage: Storage | Callable[[], Storage] | None = None,
        max_priority_within_buffer: bool = False,
        **kwargs: Any,
    ) -> None:
        sampler = PrioritizedSampler(None, alpha, beta, eps, dtype, reduction, max_priority_within_buffer)
        others = _without_sampler(kwargs)
        super().__init__(capacity, storage=storage, sampler=sampler, priority_key=priority_key, **others)


def _without_sampler(kwargs: dict[str, Any]) -> dict[str, Any]:
    if "sampler" in kwargs:
        raise TypeError("a prioritized buffer makes its own sampler; for another one use ReplayBuffer(sampler=...)")
    return kwargs
