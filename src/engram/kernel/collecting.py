"""Collectors whose workers run elsewhere: their base, the pool of their workers, and their arguments."""

from engram.collectors.makers import makers_of_workers, on_cpu
from engram.collectors.pooled import PooledCollector
from engram.collectors.settings import CollectorSettings
from engram.collectors.stats import EpisodeStats
from engram.collectors.sync import one_of_weights
from engram.processes.pool import WorkerPool
from engram.processes.shared_weights import tensors_of

__all__ = [
    "CollectorSettings",
    "EpisodeStats",
    "PooledCollector",
    "WorkerPool",
    "makers_of_workers",
    "on_cpu",
    "one_of_weights",
    "tensors_of",
]
