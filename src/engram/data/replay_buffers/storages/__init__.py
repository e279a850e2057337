"""Storages, which hold the rows of a buffer."""

from engram.data.replay_buffers.storages.base import Checked, Rows, Storage
from engram.data.replay_buffers.storages.ensemble import StorageEnsemble
from engram.data.replay_buffers.storages.list import ListStorage
from engram.data.replay_buffers.storages.memmap import LazyMemmapStorage
from engram.data.replay_buffers.storages.tensor import LazyTensorStorage, TensorStorage
from engram.data.replay_buffers.storages.variants import CompressedListStorage, LazyStackStorage
from engram.store.compact import Compact

__all__ = [
    "Checked",
    "Compact",
    "CompressedListStorage",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "Rows",
    "Storage",
    "StorageEnsemble",
    "TensorStorage",
]
