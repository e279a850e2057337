"""Replay over several machines."""

from engram.distributed.blocks import Block, pack, unpack
from engram.distributed.collector import RayCollector
from engram.distributed.producers import Tenancy
from engram.distributed.ray_buffer import RayReplayBuffer
from engram.distributed.shard import (
    Acknowledgement,
    DrawnRows,
    ReplayShard,
    ShardFacts,
    ShardTotals,
    TakenRows,
)
from engram.distributed.shard_sampling import SequenceDraw, divide, draw_sequences, importance_weights
from engram.distributed.sharded import ShardedReplayBuffer, ShardedSettings, ShardedStats, Timeouts

__all__ = [
    "Acknowledgement",
    "Block",
    "DrawnRows",
    "RayCollector",
    "RayReplayBuffer",
    "ReplayShard",
    "SequenceDraw",
    "ShardFacts",
    "ShardTotals",
    "ShardedReplayBuffer",
    "ShardedSettings",
    "ShardedStats",
    "TakenRows",
    "Tenancy",
    "Timeouts",
    "divide",
    "draw_sequences",
    "importance_weights",
    "pack",
    "unpack",
]
