"""Collectors: environments and policies in, batches out."""

from engram.collectors.multi import MultiaSyncDataCollector, MultiSyncDataCollector
from engram.collectors.sync import Collector, SyncDataCollector
from engram.envs.policies import RandomPolicy

MultiSyncCollector = MultiSyncDataCollector
MultiAsyncCollector = MultiaSyncDataCollector

__all__ = [
    "Collector",
    "MultiAsyncCollector",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "RandomPolicy",
    "SyncDataCollector",
]
