"""Rows: where each key lies in one, the lanes that they are written to, the episodes that they form, saved rows."""

from engram.checkpoint.foreign import Receiver
from engram.store.episodes import IDS, EpisodeIndex
from engram.store.lanes import Lanes
from engram.store.layout import LeafSpec, RowLayout
from engram.store.n_step import Following

__all__ = [
    "IDS",
    "EpisodeIndex",
    "Following",
    "Lanes",
    "LeafSpec",
    "Receiver",
    "RowLayout",
]
