"""Replay buffers and their parts."""

from engram._advice import advise_on_names
from engram.data.replay_buffers.buffer import (
    ReplayBuffer,
)
from engram.data.replay_buffers.checkpointers import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    ListStorageCheckpointer,
    NestedStorageCheckpointer,
    StorageCheckpointerBase,
    StorageEnsembleCheckpointer,
    TensorStorageCheckpointer,
)
from engram.data.replay_buffers.conditional import UpdateResult
from engram.data.replay_buffers.ensemble import (
    ReplayBufferEnsemble,
)
from engram.data.replay_buffers.samplers import (
    DrawTotals,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from engram.data.replay_buffers.schedulers import (
    LambdaScheduler,
    LinearScheduler,
    ParameterScheduler,
    SchedulerList,
    StepScheduler,
)
from engram.data.replay_buffers.stats import BufferStats
from engram.data.replay_buffers.storages import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    StorageEnsemble,
    TensorStorage,
)
from engram.data.replay_buffers.tensordict import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.data.replay_buffers.trajectories import Trajectory, find_start_stop_traj, iter_trajectories
from engram.data.replay_buffers.utils import (
    DEFAULT_DONE_KEYS,
    Flat2TED,
    H5Combine,
    H5Split,
    Nested2TED,
    TED2Flat,
    TED2Nested,
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
    "DEFAULT_DONE_KEYS",
    "BufferStats",
    "CompressedListStorage",
    "DrawTotals",
    "Flat2TED",
    "FlatStorageCheckpointer",
    "H5Combine",
    "H5Split",
    "H5StorageCheckpointer",
    "ImmutableDatasetWriter",
    "LambdaScheduler",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "LinearScheduler",
    "ListStorage",
    "ListStorageCheckpointer",
    "Nested2TED",
    "NestedStorageCheckpointer",
    "ParameterScheduler",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "RoundRobinWriter",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SchedulerList",
    "SequenceSampler",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StepScheduler",
    "Storage",
    "StorageCheckpointerBase",
    "StorageEnsemble",
    "StorageEnsembleCheckpointer",
    "TED2Flat",
    "TED2Nested",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "TensorStorageCheckpointer",
    "Trajectory",
    "UpdateResult",
    "Writer",
    "WriterEnsemble",
    "find_start_stop_traj",
    "iter_trajectories",
]

advise_on_names(__name__)
