"""engram: experience replay and data collection for reinforcement learning.

Nothing heavy is imported here: `import engram.data`, `import engram.collectors`, `import engram.envs` do that.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if sys.platform == "win32":
    raise ImportError("engram runs on Linux and macOS; on Windows use the Linux subsystem (WSL 2)")

if TYPE_CHECKING:
    from engram.data.replay_buffers.checkpointers import VerificationReport

__version__ = "0.1.0"
__all__ = ["__version__", "verify"]


def verify(path: str | os.PathLike[str]) -> VerificationReport:
    """Compares every file of every snapshot in a checkpoint directory with its checksum.

    Example:
        >>> import tempfile, torch
        >>> from engram.data import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(5))
        >>> path = tempfile.mkdtemp()
        >>> rb.dumps(path)
        >>> verify(path).ok
        True
    """
    from engram.data.replay_buffers.checkpointers import verify as verify_snapshots

    return verify_snapshots(path)
