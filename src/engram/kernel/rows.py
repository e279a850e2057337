"""Rows: where each key lies in one, the lanes that they are written to, the episodes that they form, saved rows."""

from engram._generator import draw_slots_by_numpy
from engram._native import RowPool, copy_updates, divide_updates
from engram.checkpoint.foreign import Receiver, has_memory_maps
from engram.store.episodes import EpisodeIndex
from engram.store.lanes import Lanes
from engram.store.layout import LeafSpec, RowLayout
from engram.store.n_step import NSteps
from engram.store.removed import removed_steps, without_removed
from engram.store.row_form import IDS, outcome_path
from engram.store.streams import AdoptedStream, StreamEntry, StreamTable

__all__ = [
    "IDS",
    "AdoptedStream",
    "EpisodeIndex",
    "Lanes",
    "LeafSpec",
    "NSteps",
    "Receiver",
    "RowLayout",
    "RowPool",
    "StreamEntry",
    "StreamTable",
    "copy_updates",
    "divide_updates",
    "draw_slots_by_numpy",
    "has_memory_maps",
    "outcome_path",
    "removed_steps",
    "without_removed",
]
