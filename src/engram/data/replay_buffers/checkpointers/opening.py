"""Opens what `loads` is given: a checkpoint of engram's own, or a directory of another library's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engram.checkpoint.snapshot import Snapshot, open_snapshot
from engram.data.replay_buffers.checkpointers.torchrl import TorchrlSaved, is_torchrl, open_torchrl
from engram.errors import CheckpointError

# What looking at a state that no part of ours has made runs into.
_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RuntimeError)


@contextmanager
def open_saved(path: str | os.PathLike[str], snapshot: str | None = None) -> Iterator[Snapshot | TorchrlSaved]:
    """The state at `path`, of which no part has been read yet; errors as `open_snapshot` and `open_torchrl`."""
    if snapshot is None and is_torchrl(path):
        with open_torchrl(path) as taken:
            yield taken
    else:
        with open_snapshot(path, snapshot) as saved:
            yield saved


@contextmanager
def as_damage(malformed: Callable[[str], Exception]) -> Iterator[None]:
    """Around looks at states whose bytes are whole: where they cannot be, somebody made them, checksums and all."""
    try:
        yield
    except CheckpointError:
        raise
    except _MALFORMED as error:
        raise malformed(f"a state in it cannot be that of this buffer ({error!r})") from error
