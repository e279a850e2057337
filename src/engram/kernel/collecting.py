"""Arguments, counts and statistics of collectors, for collectors that run elsewhere."""

from engram.collectors.background import BackgroundCollector
from engram.collectors.multi import ABANDON_INTERVAL, makers_of_workers, on_cpu
from engram.collectors.settings import CollectorSettings, Device
from engram.collectors.stats import CollectorStats, EpisodeStats, Throughput, collector_stats
from engram.collectors.sync import one_of_weights
from engram.collectors.trajectories import IDS as TRAJECTORY_IDS
from engram.processes.restarts import seed_after
from engram.processes.shared_weights import tensors_of

__all__ = [
    "ABANDON_INTERVAL",
    "TRAJECTORY_IDS",
    "BackgroundCollector",
    "CollectorSettings",
    "CollectorStats",
    "Device",
    "EpisodeStats",
    "Throughput",
    "collector_stats",
    "makers_of_workers",
    "on_cpu",
    "one_of_weights",
    "seed_after",
    "tensors_of",
]
