"""Specs beside TorchRL's: its type checks, its registry of action spaces and its Composites accept engram's.

A spec of engram in one of TorchRL's Composites (where its environments keep theirs) becomes TorchRL's, and
one of TorchRL's in a Composite of engram becomes engram's. engram never imports TorchRL. Where another package
imports it, before or after, the classes are registered then.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from engram.pytree import to_tensor

_REGISTRY_MODULE = "torchrl.data.utils"  # holds the registry, and imports TorchRL's specs itself
_OWN_CLASSES: dict[str, Any] = {}  # by the names that they have in TorchRL, too


def register_in_torchrl(classes: Mapping[str, type]) -> None:
    """Makes `classes`, by the names that they have in TorchRL too, virtual subclasses of TorchRL's and action spaces.

    At once where torchrl is imported already, else as soon as it is. TorchRL's Composites convert their objects.
    """
    _OWN_CLASSES.update(classes)
    if (module := sys.modules.get(_REGISTRY_MODULE)) is not None:
        _register(classes, module)
    else:
        sys.meta_path.insert(0, _RegisterAfterImport(classes))


def _register(classes: Mapping[str, type], registry: ModuleType) -> None:
    theirs = sys.modules["torchrl.data.tensor_specs"]
    action_spaces = registry.ACTION_SPACE_MAP
    for name, ours in classes.items():
        of_torchrl = vars(theirs)[name]
        of_torchrl.register(ours)
        if of_torchrl in action_spaces:
            action_spaces[ours] = action_spaces[of_torchrl]
    for composite in (theirs.Composite, theirs.StackedComposite):
        composite.__setitem__ = _converting(composite.__setitem__)


def _converting(set_item: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """`__setitem__` of a Composite of TorchRL's that takes specs of here, too."""

    @functools.wraps(set_item)
    def set_converted(self: Any, key: Any, value: Any) -> None:
        set_item(self, key, value.to_torchrl() if isinstance(value, _OWN_CLASSES["TensorSpec"]) else value)

    return set_converted


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
    kind = vars(theirs).get(type(spec).__name__)
    if kind is None:
        raise TypeError(f"TorchRL has no spec like {type(spec).__name__}; make one of {theirs.__name__} yourself")
    if spec.dtype is None:
        entries = {key: None if part is None else part.to_torchrl() for key, part in spec.items()}
        return kind(entries, shape=spec.shape, device=spec.device)
    return kind(**spec.domain_arguments(), shape=spec.shape, device=spec.device, dtype=spec.dtype)


def own_spec(spec: Any) -> Any:
    """`spec`, as a spec of here where it is one of TorchRL's."""
    theirs = sys.modules.get("torchrl.data.tensor_specs")
    is_own = theirs is None or isinstance(spec, _OWN_CLASSES["TensorSpec"]) or not isinstance(spec, theirs.TensorSpec)
    return spec if is_own else spec_from_torchrl(spec)


def spec_from_torchrl(spec: Any) -> Any:
    """A spec of TorchRL's as one of here; of kinds that are not here, an Unbounded of the same shape.

    None for values that are not tensors.
    """
    theirs: Any = sys.modules["torchrl.data.tensor_specs"]
    kinds = _OWN_CLASSES
    if isinstance(spec, theirs.Stacked | theirs.StackedComposite):
        return torch.stack([spec_from_torchrl(one) for one in spec.unbind(spec.dim)], spec.dim)
    if isinstance(spec, theirs.Composite):
        entries = {key: None if part is None else spec_from_torchrl(part) for key, part in spec.items()}
        return kinds["Composite"](entries, shape=spec.shape, device=spec.device)
    if spec.dtype is None:
        return None
    place = {"shape": spec.shape, "device": spec.device, "dtype": spec.dtype}
    mask = {} if getattr(spec, "mask", None) is None else {"mask": spec.mask}  # Bounded and Unbounded have none
    width = spec.shape[-1] if len(spec.shape) else 0
    if isinstance(spec, theirs.Binary) and width == spec.n:
        return kinds["Binary"](spec.n, **place)
    if isinstance(spec, theirs.OneHot):
        return kinds["OneHot"](spec.space.n, **place, **mask)
    if isinstance(spec, theirs.MultiOneHot):
        return kinds["MultiOneHot"](list(spec.nvec), **place, **mask)
    if isinstance(spec, theirs.MultiCategorical):
        nvec = to_tensor(spec.nvec).reshape(-1, width)[0].tolist()
        return kinds["MultiCategorical"](nvec, **place, **mask)
    if isinstance(spec, theirs.Categorical) and spec.space.n >= 1:
        return kinds["Categorical"](spec.space.n, **place, **mask)
    if isinstance(spec, theirs.Binary):
        return kinds["Categorical"](2, **place)
    if isinstance(spec, theirs.Bounded):
        return kinds["Bounded"](spec.space.low, spec.space.high, **place)
    return kinds["Unbounded"](**place)
