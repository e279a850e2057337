"""Opens the directory that `loads` is given: a checkpoint of engram's, or one that another library wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engram.checkpoint.snapshot import Snapshot, open_snapshot
from engram.errors import CheckpointError
from engram.interop.torchrl.load import Part, Receiver, TorchrlDirectory, is_torchrl, open_torchrl

__all__ = ["Part", "Receiver", "as_damage", "open_saved"]

# Errors that a state which no part of engram's has made can cause where it is looked at.
_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RuntimeError)


@contextmanager
def open_saved(
    path: str | os.PathLike[str], snapshot: str | None = None, receiver: Receiver | None = None
) -> Iterator[Snapshot | TorchrlDirectory]:
    """The saved state at `path`, of which no part has been read yet; errors as `open_snapshot` and `open_torchrl`.

    `receiver` is the buffer that loads it; None: a storage loads its rows alone.
    """
    if snapshot is None and is_torchrl(path):
        with open_torchrl(path, receiver) as directory:
            yield directory
    else:
        with open_snapshot(path, snapshot) as saved:
            yield saved


@contextmanager
def as_damage(malformed: Callable[[str], Exception]) -> Iterator[None]:
    """Around looks at states whose checksums are right: what cannot be true there, somebody has made up."""
    try:
        yield
    except CheckpointError:
        raise
    except _MALFORMED as error:
        raise malformed(f"a state in it cannot be that of this buffer ({error!r})") from error
