"""Replay buffers and their parts.

A part that is public in its package (`samplers`, `storages`, `writers`, ...) is public here and in `engram.data`, too.
"""

from engram._advice import advise_on_names
from engram.data.replay_buffers import samplers, scheduler, storages, utils, writers
from engram.data.replay_buffers.buffers.buffer import ReplayBuffer
from engram.data.replay_buffers.buffers.conditional import UpdateResult
from engram.data.replay_buffers.buffers.ensemble import ReplayBufferEnsemble
from engram.data.replay_buffers.buffers.rate_limiters import MinSize, RateLimiter, SampleToInsertRatio
from engram.data.replay_buffers.buffers.stats import BufferStats
from engram.data.replay_buffers.buffers.tensordict import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
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
from engram.data.replay_buffers.samplers import *  # noqa: F403
from engram.data.replay_buffers.scheduler import *  # noqa: F403
from engram.data.replay_buffers.storages import *  # noqa: F403
from engram.data.replay_buffers.utils import *  # noqa: F403
from engram.data.replay_buffers.writers import *  # noqa: F403
from engram.ted.trajectories import Trajectory, iter_trajectories

__all__ = [
    "BufferStats",
    "FlatStorageCheckpointer",
    "H5StorageCheckpointer",
    "ListStorageCheckpointer",
    "MinSize",
    "NestedStorageCheckpointer",
    "PrioritizedReplayBuffer",
    "RateLimiter",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "SampleToInsertRatio",
    "StorageCheckpointerBase",
    "StorageEnsembleCheckpointer",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorStorageCheckpointer",
    "Trajectory",
    "UpdateResult",
    "iter_trajectories",
]
__all__ += samplers.__all__
__all__ += scheduler.__all__
__all__ += storages.__all__
__all__ += utils.__all__
__all__ += writers.__all__
__all__.remove("Checked")  # of a storage of one's own
__all__.remove("Rows")

advise_on_names(__name__)
