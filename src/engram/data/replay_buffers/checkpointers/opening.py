"""Opens what `loads` is given: a checkpoint of engram's own, or a directory of another library's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from engram.data.replay_buffers.checkpointers.snapshot import Snapshot, open_snapshot
from engram.data.replay_buffers.checkpointers.torchrl import TorchrlSaved, is_torchrl, open_torchrl


@contextmanager
def open_saved(path: str | os.PathLike[str], snapshot: str | None = None) -> Iterator[Snapshot | TorchrlSaved]:
    """The state at `path`, of which no part has been read yet; errors as `open_snapshot` and `open_torchrl`."""
    if snapshot is None and is_torchrl(path):
        with open_torchrl(path) as taken:
            yield taken
    else:
        with open_snapshot(path, snapshot) as saved:
            yield saved
