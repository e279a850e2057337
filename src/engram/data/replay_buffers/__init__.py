"""Replay buffers and their parts."""

from engram.data.replay_buffers.buffer import (
    ReplayBuffer,
)
from engram.data.replay_buffers.ensemble import (
    ReplayBufferEnsemble,
)
from engram.data.replay_buffers.prioritized import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
)
from engram.data.replay_buffers.samplers import (
    PrioritizedSampler,
    RandomSampler,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from engram.data.replay_buffers.storages import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    StorageEnsemble,
    TensorStorage,
)
from engram.data.replay_buffers.tensordict import (
    TensorDictReplayBuffer,
)
from engram.data.replay_buffers.writers import (
    ImmutableDatasetWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
    WriterEnsemble,
)

__all__ = [
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "RandomSampler",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "RoundRobinWriter",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SequenceSampler",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Storage",
    "StorageEnsemble",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "Writer",
    "WriterEnsemble",
]
