"""Which slots to write."""

from engram.data.replay_buffers.writers.ensemble import WriterEnsemble
from engram.data.replay_buffers.writers.max_value import TensorDictMaxValueWriter
from engram.data.replay_buffers.writers.round_robin import (
    ImmutableDatasetWriter,
    RoundRobinWriter,
    TensorDictRoundRobinWriter,
    Writer,
)

__all__ = [
    "ImmutableDatasetWriter",
    "RoundRobinWriter",
    "TensorDictMaxValueWriter",
    "TensorDictRoundRobinWriter",
    "Writer",
    "WriterEnsemble",
]
