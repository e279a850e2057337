"""Collectors: environments and policies in, batches out."""

from engram.collectors.sync import Collector, SyncDataCollector
from engram.envs.policies import RandomPolicy

__all__ = ["Collector", "RandomPolicy", "SyncDataCollector"]
