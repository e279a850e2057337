"""`import clients.chosen_package` makes `rl` the package that RL_PACKAGE names, engram or TorchRL, in this process."""

import importlib
import importlib.util
import os
import sys

PACKAGE = os.environ.get("RL_PACKAGE", "engram")
MODULES = [
    "",
    ".collectors",
    ".collectors.utils",
    ".data",
    ".data.replay_buffers",
    ".data.replay_buffers.samplers",
    ".data.replay_buffers.storages",
    ".data.replay_buffers.writers",
    ".envs",
    ".envs.transforms",
    ".envs.utils",
]

if PACKAGE not in ("engram", "torchrl"):
    raise ValueError(f"RL_PACKAGE is {PACKAGE!r}, allowed are engram and torchrl")
for name in MODULES:
    sys.modules["rl" + name] = importlib.import_module(PACKAGE + name)
