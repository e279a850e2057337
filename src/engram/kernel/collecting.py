"""Collectors whose workers run elsewhere: their base, the pool of their workers, and their arguments."""

from engram.collectors.makers import makers_of_workers
from engram.collectors.pooled import PooledCollector
from engram.collectors.settings import CollectorSettings
from engram.collectors.stats import EpisodeStats
from engram.processes.pool import WorkerPool
from engram.processes.shared_weights import WeightsLayout

__all__ = [
    "CollectorSettings",
    "EpisodeStats",
    "PooledCollector",
    "WeightsLayout",
    "WorkerPool",
    "makers_of_workers",
]
