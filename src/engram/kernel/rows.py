"""Rows: where each key lies in one, the lanes that they are written to, the episodes that they form, saved rows."""

from engram.checkpoint.foreign import ForeignForm, Part, Receiver, register_form
from engram.checkpoint.protocols import RowSink
from engram.checkpoint.snapshot import open_snapshot
from engram.store.episodes import DONE, IDS, EpisodeIndex, StoredTrajectories
from engram.store.lanes import Lanes
from engram.store.layout import LayoutState, LeafSpec, RowLayout

__all__ = [
    "DONE",
    "IDS",
    "EpisodeIndex",
    "ForeignForm",
    "Lanes",
    "LayoutState",
    "LeafSpec",
    "Part",
    "Receiver",
    "RowLayout",
    "RowSink",
    "StoredTrajectories",
    "open_snapshot",
    "register_form",
]
