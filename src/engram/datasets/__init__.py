"""Datasets in and out of buffers, and as buffers: Minari, flat HDF5 (D4RL), Parquet; LeRobot's are read.

Users import it as `engram.data.datasets`. `docs/datasets.md` says where each key goes.
"""

from engram.datasets import hdf5, lerobot, minari, parquet
from engram.datasets.experience_replay import D4RLExperienceReplay, MinariExperienceReplay
from engram.datasets.hdf5 import (
    iter_hdf5,
    read_hdf5,
    write_hdf5,
)
from engram.datasets.lerobot import (
    LeRobotInfo,
    iter_lerobot,
    lerobot_info,
    read_lerobot,
)
from engram.datasets.minari import (
    iter_minari,
    read_minari,
    write_minari,
)
from engram.datasets.parquet import (
    iter_parquet,
    read_parquet,
    write_parquet,
)
from engram.kernel.advice import advise_on_names

__all__ = [
    "D4RLExperienceReplay",
    "LeRobotInfo",
    "MinariExperienceReplay",
    "iter_hdf5",
    "iter_lerobot",
    "iter_minari",
    "iter_parquet",
    "lerobot_info",
    "read_hdf5",
    "read_lerobot",
    "read_minari",
    "read_parquet",
    "write_hdf5",
    "write_minari",
    "write_parquet",
]

#: How the command line knows them: the first one that says it is at a path.
FORMATS = (minari.DATASET_FORMAT, lerobot.DATASET_FORMAT, hdf5.DATASET_FORMAT, parquet.DATASET_FORMAT)

advise_on_names(__name__, known_as="engram.data.datasets")
