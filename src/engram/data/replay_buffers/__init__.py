"""Replay buffers and their parts."""

from engram.data.replay_buffers.buffer import ReplayBuffer
from engram.data.replay_buffers.samplers import RandomSampler, Sampler, SamplerWithoutReplacement
from engram.data.replay_buffers.storages import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    TensorStorage,
)
from engram.data.replay_buffers.tensordict import TensorDictReplayBuffer
from engram.data.replay_buffers.writers import (
    ImmutableDatasetWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)

__all__ = [
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "RandomSampler",
    "ReplayBuffer",
    "RoundRobinWriter",
    "Sampler",
    "SamplerWithoutReplacement",
    "Storage",
    "TensorDictMaxValueWriter",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "Writer",
]
