"""What users write, as type checkers see it: `make check` runs mypy and pyright over this file; nobody imports it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import assert_type

from engram.collectors import SyncDataCollector
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    Sampler,
    SliceSampler,
    Storage,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.envs import GymEnv
from engram.envs.transforms import Compose, RewardSum, StepCounter


def steps(n: int) -> TensorDict:
    return TensorDict({"observation": torch.zeros(n, 3), "action": torch.zeros(n, 1)}, [n])


def tensordicts() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4, transform=Compose(RewardSum()))
    assert_type(rb.extend(steps(10)), Tensor)
    assert_type(rb.add(steps(1)[0]), int | Tensor)
    assert_type(rb.sample(), TensorDictBase)
    assert_type(rb.sample(8), TensorDictBase)
    assert_type(rb.sample(8, return_info=True), tuple[TensorDictBase, dict[str, Any]])
    assert_type(rb[0], TensorDictBase)
    assert_type(rb[2:5], TensorDictBase)
    assert_type(rb[torch.tensor([1, 2])], TensorDictBase)
    for batch in rb:
        assert_type(batch, TensorDictBase)
        break
    rb[3] = steps(1)[0]
    assert_type(rb.append_transform(StepCounter()), TensorDictReplayBuffer[TensorDictBase])
    assert_type(len(rb), int)
    assert_type(rb.storage, Storage)


def dicts_of_arrays() -> None:
    rb: ReplayBuffer[dict[str, Tensor]] = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    rb.add({"observation": np.zeros(3, np.float32), "reward": 1.0})
    rb.extend([{"observation": np.zeros(3, np.float32), "reward": 1.0} for _ in range(4)])
    assert_type(rb.sample(), dict[str, Tensor])
    batch, info = rb.sample(2, return_info=True)
    assert_type(batch["observation"], Tensor)
    assert_type(info, dict[str, Any])


class Episode:
    def __init__(self, reward: float) -> None:
        self.reward = reward


def objects_of_ones_own() -> None:
    rb: ReplayBuffer[Episode] = ReplayBuffer(storage=ListStorage(10))
    rb.add(Episode(1.0))
    assert_type(rb[0], Episode)


def priorities() -> None:
    sampler = PrioritizedSampler(100, alpha=0.6, beta=0.4)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
    rb.extend(steps(10))
    batch, _ = rb.sample(return_info=True)
    rb.update_priority(batch["index"], torch.ones(4))
    rb.update_tensordict_priority(batch)
    per = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(100))
    assert_type(per.sample(4), TensorDictBase)


class EveryOther(Sampler):
    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        return torch.arange(0, 2 * batch_size, 2) % len(storage), {}


class InheritsFromNothing:
    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        return torch.zeros(batch_size, dtype=torch.int64), {}


def samplers_of_ones_own() -> None:
    ReplayBuffer(storage=LazyTensorStorage(10), sampler=EveryOther())
    ReplayBuffer(storage=LazyTensorStorage(10), sampler=InheritsFromNothing())
    ReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(num_slices=2), transform=lambda batch: batch)


def collecting(path: str) -> None:
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=path), batch_size=32)
    for batch in SyncDataCollector(GymEnv("CartPole-v1"), None, frames_per_batch=100, total_frames=1000):
        assert_type(rb.extend(batch), Tensor)
    rb.dumps(path)
    assert_type(TensorDictReplayBuffer.open(path, batch_size=32), TensorDictReplayBuffer[TensorDictBase])


def mistakes(rb: TensorDictReplayBuffer) -> None:
    rb.sample("four")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    ReplayBuffer(batch_size="four")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    TensorDictReplayBuffer(batchsize=4)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    ReplayBuffer(sampler=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
