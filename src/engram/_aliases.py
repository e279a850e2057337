"""Modules under the paths where users of other libraries look for them.

An alias is the module that it stands for: `engram.data.tensor_specs is engram.data.specs`. Type checkers, which read
files, know the paths of files only; `engram/data/datasets.pyi` is one for them.

Example:
    >>> from engram.envs.transforms.rb_transforms import MultiStepTransform
    >>> from engram.data.tensor_specs import Bounded
    >>> from engram.collectors.collectors import SyncDataCollector
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ALIASES = {
    "engram.collectors.collectors": "engram.collectors",
    "engram.collectors.distributed": "engram.distributed",
    "engram.collectors.distributed.ray": "engram.distributed",
    "engram.data.datasets": "engram.datasets",
    "engram.data.datasets.d4rl": "engram.datasets",
    "engram.data.datasets.minari_data": "engram.datasets",
    "engram.data.postprocs": "engram.data",
    "engram.data.postprocs.postprocs": "engram.data",
    "engram.data.replay_buffers.checkpointing": "engram.data.replay_buffers.state.buffers",  # in pickles of 0.1
    "engram.data.replay_buffers.ray_buffer": "engram.distributed",
    "engram.data.replay_buffers.replay_buffers": "engram.data.replay_buffers",
    # Modules that pickles of 0.1 name.
    "engram.data.replay_buffers.buffer": "engram.data.replay_buffers.buffers.buffer",
    "engram.data.replay_buffers.checkpointers.ensemble": "engram.data.replay_buffers.state.checkpointers.members",
    "engram.data.replay_buffers.checkpointers.objects": "engram.data.replay_buffers.state.checkpointers.items",
    "engram.data.replay_buffers.checkpointers.rows": "engram.data.replay_buffers.state.checkpointers.rows",
    "engram.data.replay_buffers.checkpointers.ted": "engram.data.replay_buffers.state.checkpointers.ted",
    "engram.data.replay_buffers.checkpointers.ted_h5": "engram.data.replay_buffers.state.checkpointers.ted_h5",
    "engram.data.replay_buffers.conditional": "engram.data.replay_buffers.buffers.conditional",
    "engram.data.replay_buffers.dataset": "engram.data.replay_buffers.buffers.dataset",
    "engram.data.replay_buffers.delayed": "engram.data.replay_buffers.buffers.delayed",
    "engram.data.replay_buffers.ensemble": "engram.data.replay_buffers.buffers.ensemble",
    "engram.data.replay_buffers.parts": "engram.data.replay_buffers.buffers.parts",
    "engram.data.replay_buffers.schedulers": "engram.data.replay_buffers.scheduler",
    "engram.data.replay_buffers.stats": "engram.data.replay_buffers.buffers.stats",
    "engram.data.replay_buffers.tensordict": "engram.data.replay_buffers.buffers.tensordict",
    "engram.data.replay_buffers.trajectories": "engram.ted.trajectories",
    "engram.data.tensor_specs": "engram.data.specs",
    "engram.envs.batched_envs": "engram.envs",
    "engram.envs.common": "engram.envs",
    "engram.envs.creator": "engram.envs.env_creator",  # in pickles of 0.1
    "engram.envs.transforms.gym_transforms": "engram.envs.transforms",
    "engram.envs.transforms.rb_transforms": "engram.envs.transforms",
    "engram.envs.transforms.transforms": "engram.envs.transforms",
    "engram.envs.transforms.vecnorm": "engram.envs.transforms",
    "engram.envs.vec_envs": "engram.envs",
}


class AliasFinder(MetaPathFinder):
    """Finds aliases, and modules below them, which are those below their targets."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("engram."):
            return None
        module = ALIASES.get(fullname)
        if module is None:
            parent, _, name = fullname.rpartition(".")
            if parent not in ALIASES:
                return None
            module = f"{ALIASES[parent]}.{name}"
            if importlib.util.find_spec(module) is None:
                return None
        return ModuleSpec(fullname, _AliasLoader(module))


class _AliasLoader(Loader):
    def __init__(self, target: str) -> None:
        self._target = target

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self._target)  # which the import statement then takes


def install() -> None:
    """Makes `import` find the aliases."""
    # First: below an alias of a package, other finders would load the package's files a second time.
    sys.meta_path.insert(0, AliasFinder())
