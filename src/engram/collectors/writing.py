"""Writing a collector's batches into a replay buffer."""

from __future__ import annotations

import contextlib
from typing import Any

from tensordict import TensorDictBase


class BufferWriter:
    """Writes batches into `replay_buffer`, in the shape that its storage has.

    Where its trajectories begin anew there is a seam before the next row: whoever wrote before, no slice joins rows of
    both. Steps that the buffer's transforms hold back are written before that.
    """

    def __init__(self, replay_buffer: Any) -> None:
        self.replay_buffer = replay_buffer
        self._begins = True

    def restart(self) -> None:
        """The next batch continues nothing that was written before."""
        self._begins = True

    def write(self, batch: TensorDictBase) -> None:
        """Adds a batch `[*envs, time]`; where the storage has one dimension, one environment after the other."""
        storage = getattr(self.replay_buffer, "storage", None)
        batch = _in_the_shape_of(storage, batch)
        if not self._begins:
            self.replay_buffer.extend(batch)
            return
        with getattr(storage, "mutex", contextlib.nullcontext()):  # no other thread's row gets in between
            flush = getattr(type(self.replay_buffer), "flush_transforms", None)
            if flush is not None:
                flush(self.replay_buffer)
            mark = getattr(type(storage), "mark_seam", None)  # a buffer of somebody else's may have no such thing
            if mark is not None:
                mark(storage)
            self.replay_buffer.extend(batch)
        self._begins = False


def _in_the_shape_of(storage: Any, batch: TensorDictBase) -> TensorDictBase:
    ndim = getattr(storage, "ndim", None)
    if ndim == 1 and batch.ndim > 1:
        return batch.reshape(-1)
    return batch.reshape(-1, batch.shape[-1]) if ndim == 2 and batch.ndim != 2 else batch
