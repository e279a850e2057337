"""Episode data (TED) that stores every observation once: flat, as trajectories, and as HDF5 has it."""

from engram.ted.codec import DONE_KEYS, REWARD_KEYS, StepKeys
from engram.ted.conversions import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested

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
