"""Checkpoint directories and mapped stores as they lie on disk. Needs no torch, whose import takes a second."""

from engram.checkpoint.directory import from_checksummed_json, to_checksummed_json
from engram.checkpoint.reader import Checkpoint
from engram.checkpoint.writer import saving
from engram.store.counters import Counters
from engram.store.header import StoreFile
from engram.store.locks import FirstByte

__all__ = [
    "Checkpoint",
    "Counters",
    "FirstByte",
    "StoreFile",
    "from_checksummed_json",
    "saving",
    "to_checksummed_json",
]
