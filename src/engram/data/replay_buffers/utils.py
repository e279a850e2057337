"""The conversions of episode data (TED), where trajectories end, and the usual flags, where users look for them."""

from engram.ted import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested
from engram.ted.trajectories import find_start_stop_traj

#: The flags of a step that its environment sets, by their usual names.
DEFAULT_DONE_KEYS = ("done", "truncated", "terminated")

__all__ = [
    "DEFAULT_DONE_KEYS",
    "Flat2TED",
    "H5Combine",
    "H5Split",
    "Nested2TED",
    "TED2Flat",
    "TED2Nested",
    "find_start_stop_traj",
]
