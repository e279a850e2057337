"""Checkpoint directories and mapped stores as they lie on disk. Needs no torch, whose import takes a second."""

from engram.checkpoint.directory import DocumentFile
from engram.checkpoint.reader import Checkpoint
from engram.checkpoint.writer import saving
from engram.store.counters import Counters
from engram.store.flow import QueueFigures, RateFigures, queue_figures, rate_figures
from engram.store.header import StoreFile
from engram.store.locks import FirstByte
from engram.store.observation_shares import ROWS_LOOKED_AT, ObservationShares
from engram.store.observed import ObservedLeaf, ObservedRows, ObservedTrajectories
from engram.store.published import Histogram, LearnerStats, is_learner_file, published_stats
from engram.store.writers import WriterShare, writer_shares

__all__ = [
    "ROWS_LOOKED_AT",
    "Checkpoint",
    "Counters",
    "DocumentFile",
    "FirstByte",
    "Histogram",
    "LearnerStats",
    "ObservationShares",
    "ObservedLeaf",
    "ObservedRows",
    "ObservedTrajectories",
    "QueueFigures",
    "RateFigures",
    "StoreFile",
    "WriterShare",
    "is_learner_file",
    "published_stats",
    "queue_figures",
    "rate_figures",
    "saving",
    "writer_shares",
]
