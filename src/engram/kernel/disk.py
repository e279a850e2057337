"""Checkpoint directories and mapped stores as they lie on disk. Needs no torch, whose import takes a second."""

from engram.checkpoint.directory import CheckpointDirectory, from_checksummed_json, to_checksummed_json
from engram.checkpoint.reader import files_of_checkpoint, reading, verify
from engram.checkpoint.writer import saving
from engram.store.counters import Counters
from engram.store.header import StoreFile
from engram.store.locks import FirstByte

__all__ = [
    "CheckpointDirectory",
    "Counters",
    "FirstByte",
    "StoreFile",
    "files_of_checkpoint",
    "from_checksummed_json",
    "reading",
    "saving",
    "to_checksummed_json",
    "verify",
]
