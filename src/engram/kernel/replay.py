"""Behind a buffer: reading batches, adapters of users' parts, looks at stored rows."""

from engram.data.replay_buffers.buffers.rebuild import saved_storage
from engram.data.replay_buffers.buffers.stats import stored_trajectories
from engram.data.replay_buffers.reading.reader import Member
from engram.data.replay_buffers.samplers.base import as_sampler
from engram.data.replay_buffers.samplers.slices import mark_rows
from engram.data.replay_buffers.writers.round_robin import as_writer
from engram.transforms.base import WriteRequest

__all__ = [
    "Member",
    "WriteRequest",
    "as_sampler",
    "as_writer",
    "mark_rows",
    "saved_storage",
    "stored_trajectories",
]
