"""Collectors step environments with a policy and hand out batches, or write them into a replay buffer."""

from engram._advice import advise_on_names
from engram.collectors.evaluator import Evaluator
from engram.collectors.multi import MultiaSyncDataCollector, MultiCollector, MultiSyncDataCollector
from engram.collectors.sync import Collector, SyncDataCollector
from engram.envs.policies import RandomPolicy

MultiSyncCollector = MultiSyncDataCollector
MultiAsyncCollector = MultiaSyncDataCollector
AsyncCollector = aSyncDataCollector = MultiaSyncDataCollector  # of one function that makes environments: one worker

__all__ = [
    "AsyncCollector",
    "Collector",
    "Evaluator",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "RandomPolicy",
    "SyncDataCollector",
    "aSyncDataCollector",
]

advise_on_names(__name__)
