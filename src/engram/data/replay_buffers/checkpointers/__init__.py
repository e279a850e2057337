"""Checkpointers: how storages reach disk and come back.

`save_snapshot` and `open_snapshot` are what a buffer's `dumps` and `loads` call; `verify` checks a directory."""

from engram.data.replay_buffers.checkpointers.base import (
    ItemSink,
    ItemSource,
    RowSink,
    RowSource,
    StorageCheckpointerBase,
)
from engram.data.replay_buffers.checkpointers.ensemble import (
    StorageEnsembleCheckpointer,
)
from engram.data.replay_buffers.checkpointers.flat import (
    FlatStorageCheckpointer,
)
from engram.data.replay_buffers.checkpointers.h5_checkpointer import (
    H5StorageCheckpointer,
)
from engram.data.replay_buffers.checkpointers.list import (
    ListStorageCheckpointer,
)
from engram.data.replay_buffers.checkpointers.nested import (
    NestedStorageCheckpointer,
)
from engram.data.replay_buffers.checkpointers.snapshot import (
    Snapshot,
    open_snapshot,
    save_snapshot,
)
from engram.data.replay_buffers.checkpointers.tensor import (
    TensorStorageCheckpointer,
)
from engram.data.replay_buffers.checkpointers.verification import (
    VerificationReport,
    verify,
)

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
