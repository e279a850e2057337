"""Episode data (TED) that stores every observation once: flat, as trajectories, and as HDF5 has it."""

from engram.data.replay_buffers.ted.hooks import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested
from engram.data.replay_buffers.ted.keys import DONE_KEYS, REWARD_KEYS, StepKeys

__all__ = [
    "DONE_KEYS",
    "REWARD_KEYS",
    "Flat2TED",
    "H5Combine",
    "H5Split",
    "Nested2TED",
    "StepKeys",
    "TED2Flat",
    "TED2Nested",
]
