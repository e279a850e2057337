"""Collectors: environments and policies in, batches out."""

from engram.collectors.multi_async import MultiaSyncDataCollector
from engram.collectors.multi_sync import MultiSyncDataCollector
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
