"""Replay buffers and their parts."""

from engram._advice import advise_on_names
from engram.data.replay_buffers import samplers, storages, writers
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
from engram.data.replay_buffers.samplers import *  # noqa: F403 -- its `__all__` is the one list
from engram.data.replay_buffers.schedulers import (
    LambdaScheduler,
    LinearScheduler,
    ParameterScheduler,
    SchedulerList,
    StepScheduler,
)
from engram.data.replay_buffers.stats import BufferStats
from engram.data.replay_buffers.storages import *  # noqa: F403 -- its `__all__` is the one list
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
from engram.data.replay_buffers.writers import *  # noqa: F403 -- its `__all__` is the one list

__all__ = [
    "DEFAULT_DONE_KEYS",
    "BufferStats",
    "Flat2TED",
    "FlatStorageCheckpointer",
    "H5Combine",
    "H5Split",
    "H5StorageCheckpointer",
    "LambdaScheduler",
    "LinearScheduler",
    "ListStorageCheckpointer",
    "Nested2TED",
    "NestedStorageCheckpointer",
    "ParameterScheduler",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "SchedulerList",
    "StepScheduler",
    "StorageCheckpointerBase",
    "StorageEnsembleCheckpointer",
    "TED2Flat",
    "TED2Nested",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorStorageCheckpointer",
    "Trajectory",
    "UpdateResult",
    "find_start_stop_traj",
    "iter_trajectories",
]
__all__ += samplers.__all__
__all__ += storages.__all__
__all__ += writers.__all__
__all__.remove("Checked")  # for storages of a user's own: in `storages` alone
__all__.remove("Rows")
__all__.sort(key=lambda name: (not name.isupper(), name))  # constants first

advise_on_names(__name__)
