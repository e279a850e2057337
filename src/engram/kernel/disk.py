"""Checkpoint directories and mapped stores as they lie on disk. Needs no torch, whose import takes a second."""

from engram.checkpoint.directory import (
    CURRENT,
    HOOKED,
    CheckpointDirectory,
    from_checksummed_json,
    is_snapshot_name,
    to_checksummed_json,
)
from engram.checkpoint.reader import SnapshotReader, SnapshotReport, files_of_checkpoint, in_parallel, reading, verify
from engram.checkpoint.writer import saving
from engram.store.counters import Counters
from engram.store.header import FILE_NAME, has_store, observe_store, open_store, refuse_used
from engram.store.locks import FirstByte, has_writer, is_open_elsewhere

__all__ = [
    "CURRENT",
    "FILE_NAME",
    "HOOKED",
    "CheckpointDirectory",
    "Counters",
    "FirstByte",
    "SnapshotReader",
    "SnapshotReport",
    "files_of_checkpoint",
    "from_checksummed_json",
    "has_store",
    "has_writer",
    "in_parallel",
    "is_open_elsewhere",
    "is_snapshot_name",
    "observe_store",
    "open_store",
    "reading",
    "refuse_used",
    "saving",
    "to_checksummed_json",
    "verify",
]
