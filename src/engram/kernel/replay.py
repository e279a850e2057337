"""Behind a buffer: reading batches, adapters of users' parts, looks at stored rows, time steps without an index."""

from engram._arguments import describe
from engram.data.replay_buffers.buffers.rebuild import saved_storage
from engram.data.replay_buffers.buffers.stats import stored_trajectories
from engram.data.replay_buffers.reading.reader import Member
from engram.data.replay_buffers.samplers.base import as_sampler
from engram.data.replay_buffers.samplers.slices import mark_rows
from engram.data.replay_buffers.state.buffers import SaveHandle
from engram.data.replay_buffers.storages.single_steps import append_step, read_leaves, read_n_steps
from engram.data.replay_buffers.writers.round_robin import as_writer, write_plan
from engram.transforms.base import WriteRequest
from engram.transforms.roles import IN_BUFFERS, warn_if_idle

__all__ = [
    "IN_BUFFERS",
    "Member",
    "SaveHandle",
    "WriteRequest",
    "append_step",
    "as_sampler",
    "as_writer",
    "describe",
    "mark_rows",
    "read_leaves",
    "read_n_steps",
    "saved_storage",
    "stored_trajectories",
    "warn_if_idle",
    "write_plan",
]
