"""Sending a store without a name to another process: its descriptor travels, the rows stay where they are."""

from __future__ import annotations

import json
import os
from multiprocessing import reduction
from typing import Any

from engram import _native
from engram.data.replay_buffers.layout import RowLayout
from engram.data.replay_buffers.locks import LaneLocks


def share_descriptor(fd: int) -> Any:
    """An object that gives another process the same file, through `multiprocessing`'s own channels."""
    return reduction.DupFd(fd)


def store_of_descriptor(handle: Any) -> tuple[_native.Store, LaneLocks, RowLayout]:
    """The store behind a descriptor that has arrived, through a description of its own."""
    inherited = handle.detach()
    fd = os.open(f"/proc/self/fd/{inherited}", os.O_RDWR | os.O_CLOEXEC)
    os.close(inherited)
    store = _native.Store.open(fd, os.fstat(fd).st_size)
    return store, LaneLocks(fd), RowLayout.from_json(json.loads(store.layout))
