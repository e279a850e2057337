"""Checkpointers: how storages reach disk and come back.

`save_snapshot` and `open_snapshot` are what a buffer's `dumps` and `loads` call; `verify` checks a directory."""

from engram.checkpoint.protocols import ItemSink, ItemSource, RowSink, RowSource, StorageCheckpointerBase
from engram.checkpoint.reader import VerificationReport, verify
from engram.checkpoint.snapshot import Snapshot, open_snapshot, save_snapshot
from engram.data.replay_buffers.state.checkpointers.items import ListStorageCheckpointer
from engram.data.replay_buffers.state.checkpointers.members import (
    StorageEnsembleCheckpointer,
)
from engram.data.replay_buffers.state.checkpointers.rows import TensorStorageCheckpointer
from engram.data.replay_buffers.state.checkpointers.ted import FlatStorageCheckpointer, NestedStorageCheckpointer
from engram.data.replay_buffers.state.checkpointers.ted_h5 import H5StorageCheckpointer

__all__ = [
    "FlatStorageCheckpointer",
    "H5StorageCheckpointer",
    "ItemSink",
    "ItemSource",
    "ListStorageCheckpointer",
    "NestedStorageCheckpointer",
    "RowSink",
    "RowSource",
    "Snapshot",
    "StorageCheckpointerBase",
    "StorageEnsembleCheckpointer",
    "TensorStorageCheckpointer",
    "VerificationReport",
    "open_snapshot",
    "save_snapshot",
    "verify",
]
