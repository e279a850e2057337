"""Death in the middle of a write."""

from __future__ import annotations

import os
import signal
from typing import Any

from torch import Tensor

from engram.data import Storage, TensorDictRoundRobinWriter


class FatalWriter(TensorDictRoundRobinWriter):
    """Writes the first half of a batch; then the process is gone, inside `extend`.

    Big batches go to the file in pieces, and a process that is killed leaves the pieces that it had finished. A batch
    of the demo is one piece, so the pieces are made here: SIGKILL finds the same half in the file in every run.
    """

    def write(self, storage: Storage, items: Any, single: bool, time_dim: int) -> Tensor:
        super().write(storage, items[: len(items) // 2], single, time_dim)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("nobody comes back from SIGKILL")
