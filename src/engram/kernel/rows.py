"""Rows: where each key lies in one, the lanes that they are written to, the episodes that they form, saved rows."""

from engram._generator import draw_slots_by_numpy
from engram.checkpoint.foreign import Receiver
from engram.store.episodes import EpisodeIndex
from engram.store.held_lanes import HeldLanes
from engram.store.lanes import Lanes
from engram.store.layout import LeafSpec, RowLayout
from engram.store.n_step import NSteps
from engram.store.places import HeldLaneCount
from engram.store.row_form import IDS

__all__ = [
    "IDS",
    "EpisodeIndex",
    "HeldLaneCount",
    "HeldLanes",
    "Lanes",
    "LeafSpec",
    "NSteps",
    "Receiver",
    "RowLayout",
    "draw_slots_by_numpy",
]
