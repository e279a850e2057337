"""Replay buffers, their parts, and specs."""

import importlib
import sys
from typing import Any

from tensordict import TensorDict

from engram._advice import absent_name
from engram.data.replay_buffers import (
    BufferStats,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    ListStorageCheckpointer,
    NestedStorageCheckpointer,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    StorageCheckpointerBase,
    StorageEnsembleCheckpointer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorageCheckpointer,
    Trajectory,
    UpdateResult,
    iter_trajectories,
)
from engram.data.replay_buffers.buffers.rate_limiters import MinSize, RateLimiter, SampleToInsertRatio
from engram.data.replay_buffers.samplers import (
    DrawTotals,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    QueueSampler,
    RandomSampler,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from engram.data.replay_buffers.scheduler import (
    LambdaScheduler,
    LinearScheduler,
    ParameterScheduler,
    SchedulerList,
    StepScheduler,
)
from engram.data.replay_buffers.storages import (
    Compact,
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    StorageEnsemble,
    TensorStorage,
)
from engram.data.replay_buffers.utils import (
    DEFAULT_DONE_KEYS,
    Flat2TED,
    H5Combine,
    H5Split,
    Nested2TED,
    TED2Flat,
    TED2Nested,
    find_start_stop_traj,
)
from engram.data.replay_buffers.writers import (
    ImmutableDatasetWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
    WriterEnsemble,
)
from engram.specs import (
    Binary,
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Spec,
    Stacked,
    StackedComposite,
    TensorSpec,
    Text,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
    space_from_spec,
    spec_from_space,
)
from engram.transforms.multi_step import MultiStep

__all__ = [
    "DEFAULT_DONE_KEYS",
    "Binary",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "BufferStats",
    "Categorical",
    "Compact",
    "Composite",
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
    "MinSize",
    "MultiCategorical",
    "MultiOneHot",
    "MultiStep",
    "Nested2TED",
    "NestedStorageCheckpointer",
    "OneHot",
    "ParameterScheduler",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "QueueSampler",
    "RandomSampler",
    "RateLimiter",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "RoundRobinWriter",
    "SampleToInsertRatio",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SchedulerList",
    "SequenceSampler",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Spec",
    "Stacked",
    "StackedComposite",
    "StepScheduler",
    "Storage",
    "StorageCheckpointerBase",
    "StorageEnsemble",
    "StorageEnsembleCheckpointer",
    "TED2Flat",
    "TED2Nested",
    "TensorDict",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorSpec",
    "TensorStorage",
    "TensorStorageCheckpointer",
    "Text",
    "Trajectory",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
    "UpdateResult",
    "Writer",
    "WriterEnsemble",
    "find_start_stop_traj",
    "iter_trajectories",
    "space_from_spec",
    "spec_from_space",
]


#: Classes of a layer above, by their modules; the first one loads torch.distributed.rpc.
_FROM_ABOVE = {
    "RemoteTensorDictReplayBuffer": "engram.distributed.rpc",
    "RayReplayBuffer": "engram.distributed.ray_buffer",
}


def __getattr__(name: str) -> Any:
    if name in _FROM_ABOVE:
        return getattr(importlib.import_module(_FROM_ABOVE[name]), name)
    raise absent_name(__name__, name, sys._getframe(1))
