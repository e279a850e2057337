"""Specs in TorchRL's modules and losses: its type checks and its registry of action spaces accept the classes of here.

TorchRL is never imported from here. Where somebody else imports it, before or after, the classes are registered then.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_REGISTRY_MODULE = "torchrl.data.utils"  # holds the registry, and imports TorchRL's specs itself


def register_in_torchrl(classes: Mapping[str, type]) -> None:
    """Makes `classes`, by the names that they have in TorchRL too, virtual subclasses of TorchRL's and action spaces.

    At once where torchrl is imported already, else as soon as it is.
    """
    if (module := sys.modules.get(_REGISTRY_MODULE)) is not None:
        _register(classes, module)
    else:
        sys.meta_path.insert(0, _RegisterAfterImport(classes))


def _register(classes: Mapping[str, type], registry: ModuleType) -> None:
    theirs = sys.modules["torchrl.data.tensor_specs"]
    action_spaces = registry.ACTION_SPACE_MAP
    for name, ours in classes.items():
        of_torchrl = getattr(theirs, name)
        of_torchrl.register(ours)
        if of_torchrl in action_spaces:
            action_spaces[ours] = action_spaces[of_torchrl]


class _RegisterAfterImport(MetaPathFinder):
    """Finds no module itself; registers the classes once TorchRL's registry has been imported, and is gone then."""

    def __init__(self, classes: Mapping[str, type]) -> None:
        self._classes = classes

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _REGISTRY_MODULE:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((one for one in others if one is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(self._classes, module)
                sys.meta_path.remove(self)

            vars(spec.loader)["exec_module"] = execute_and_register
        return spec


def stack_members(spec: Any) -> Sequence[Any] | None:
    """The members of a stack of leaf specs, of ours or of TorchRL's class of that name; None for any other spec."""
    if type(spec).__name__ != "Stacked":
        return None
    members: Sequence[Any] = spec.specs if hasattr(spec, "specs") else spec.unbind(spec.stack_dim)
    return members


def torchrl_spec(spec: Any) -> Any:
    """The spec as an object of TorchRL's class of the same name.

    Raises:
        ImportError: torchrl is not imported.
        TypeError: TorchRL has no such class.
    """
    theirs = sys.modules.get("torchrl.data")
    if theirs is None:
        raise ImportError("to_torchrl makes objects of TorchRL's: `import torchrl.data` first (pip install torchrl)")
    kind = getattr(theirs, type(spec).__name__, None)
    if kind is None:
        raise TypeError(f"TorchRL has no spec like {type(spec).__name__}; make one of {theirs.__name__} yourself")
    if spec.dtype is None:
        entries = {key: None if part is None else part.to_torchrl() for key, part in spec.items()}
        return kind(entries, shape=spec.shape, device=spec.device)
    return kind(**spec.domain_arguments(), shape=spec.shape, device=spec.device, dtype=spec.dtype)
