"""Sending a store to another process, where the rows stay where they are, and what is copied with its rows instead.

`pickle` and `copy` make copies; what `multiprocessing` sends, or who has said `carried_by`, travels as the same rows.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import reduction
from typing import Any

from engram import _native
from engram.data.replay_buffers.layout import RowLayout
from engram.data.replay_buffers.locks import LaneLocks

_carriers = threading.local()


@contextmanager
def carried_by(descriptors: list[int]) -> Iterator[list[int]]:
    """Who sends descriptors by its own means: what is pickled in here adds them, what is unpickled takes them."""
    before = getattr(_carriers, "descriptors", None)
    _carriers.descriptors = descriptors
    try:
        yield descriptors
    finally:
        _carriers.descriptors = before


def sends(cls: type) -> None:
    """Objects of a class travel by their `__getstate__` when they are sent to a process, whatever `pickle` does."""
    reduction.ForkingPickler.register(cls, _as_sent)


def _as_sent(part: Any) -> Any:
    return object.__reduce_ex__(part, 4)


def is_sent() -> bool:
    """Whether what is being pickled here is carried to another process."""
    return getattr(_carriers, "descriptors", None) is not None


class _Carried:
    """The place of a descriptor among those that are carried."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        return os.dup(_carriers.descriptors[self._place])


def share_descriptor(fd: int) -> Any:
    """An object that gives another process the same file: its `detach()` there is a descriptor.

    It travels through `multiprocessing`'s own channels, or by who has said `carried_by`.
    """
    carried = getattr(_carriers, "descriptors", None)
    if carried is None:
        return reduction.DupFd(fd)
    carried.append(fd)
    return _Carried(len(carried) - 1)


def store_of_descriptor(handle: Any) -> tuple[_native.Store, LaneLocks, RowLayout]:
    """The store behind a descriptor that has arrived, through a description of its own."""
    inherited = handle.detach()
    fd = os.open(f"/proc/self/fd/{inherited}", os.O_RDWR | os.O_CLOEXEC)
    os.close(inherited)
    try:
        store = _native.Store.open(fd)
    except BaseException:
        os.close(fd)
        raise
    return store, LaneLocks(fd), RowLayout.from_json(json.loads(store.layout))
