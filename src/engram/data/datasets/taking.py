"""From a dataset into a buffer, block by block."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from engram.data.datasets.progress import progress_bar
from engram.data.datasets.roles import TRAJECTORY
from engram.errors import DatasetError

_IDS_AT_ONCE = 1 << 20


def check_buffer(buffer: Any) -> None:
    """TypeError or ValueError where steps that follow each other cannot be written to a buffer."""
    storage = getattr(buffer, "storage", None)
    if storage is None or not hasattr(buffer, "extend"):
        raise TypeError(f"a dataset is read into a buffer, got a {type(buffer).__name__}")
    if storage.ndim != 1:
        raise ValueError(
            f"the buffer's storage has ndim={storage.ndim}, whose batches are [envs, time]; the steps of a dataset "
            "come one after the other: read into a storage with ndim=1"
        )


def take(blocks: Iterable[Any], buffer: Any, path: Any, total: int | None, shown: bool) -> int:
    """Extends a buffer by each block; returns the number of steps.

    Raises:
        DatasetError: with the number of steps that were taken; nothing of the block that failed is.
    """
    room = buffer.storage.max_size
    if total is not None and room is not None and total > room:
        warnings.warn(f"{path} has {total} steps, the buffer keeps {room}: the last ones stay", stacklevel=3)
    rows = 0
    with progress_bar(f"reading {path}", total, shown) as advance:
        try:
            for block in blocks:
                _extend(buffer, block, path)
                rows += len(block)
                advance(len(block))
        except DatasetError as error:
            raise DatasetError(error.file, error.reason, rows) from error.__cause__
    return rows


def _extend(buffer: Any, block: Any, path: Any) -> None:
    try:
        buffer.extend(block)
    except (ValueError, TypeError) as error:
        raise DatasetError(str(path), f"its steps do not fit the buffer: {error}") from error


def next_trajectory(storage: Any) -> int:
    """A trajectory id larger than those that are stored: steps of a dataset never go on a stored trajectory."""
    if storage.lanes is None or not len(storage) or storage.leaf(TRAJECTORY) is None:
        return 0
    highest = -1
    with storage.mutex:
        store = storage.lanes.store
        for lane, state in enumerate(storage.lanes.states()):
            for start in range(state["first"], state["published"], _IDS_AT_ONCE):
                numbers = torch.arange(start, min(start + _IDS_AT_ONCE, state["published"]))
                slots = lane * store.lane_capacity + numbers % store.lane_capacity
                highest = max(highest, int(storage.column(TRAJECTORY, slots).max()))
    return highest + 1
