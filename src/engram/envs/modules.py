"""Calling TensorDictModules without what their own calls do besides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn

Call = Callable[[TensorDictBase], TensorDictBase]
# Options of TensorDictModule, and of sequences, that make their call another than the plain one.
OPTIONS = ("method", "method_kwargs", "_kwargs", "_out_to_in_map")
WHOLE = ("partial_tolerant", "_select_before_return", "return_composite")


def direct_call(module: Any) -> Call:
    """A function that does what `module(td)` does, and looks nothing up.

    A TensorDictModule searches for the package pandas at each call where that is not installed, which takes longer
    than a small network. Modules, and sequences of them, that nobody has hooked or changed are called through; others
    are returned as they are.
    """
    if not isinstance(module, nn.Module) or is_hooked(module):
        return module  # type: ignore[no-any-return]
    forward, state = type(module).forward, vars(module)
    if forward is TensorDictModule.forward:
        return _of_module(module)
    sequences = (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward)
    parts = state["_modules"].get("module", None)
    has_options = any(state.get(name) for name in WHOLE) or state.get("inplace") is not None
    if forward not in sequences or not isinstance(parts, nn.ModuleList) or has_options:
        return module
    calls = [direct_call(part) for part in parts]
    is_probabilistic = forward is ProbabilisticTensorDictSequential.forward
    if is_probabilistic and (not _ends_in_a_draw(module, parts) or not state.get("_requires_sample", True)):
        return module

    def in_turn(td: TensorDictBase) -> TensorDictBase:
        for call in calls:
            td = call(td)
        return td

    return in_turn


def is_hooked(module: Any) -> bool:
    """Whether somebody hooked or replaced a module's call."""
    state = vars(module)
    hooks = any(value for name, value in state.items() if name.endswith("_hooks") and name.startswith("_"))
    return hooks or "forward" in state or "__call__" in state


def _ends_in_a_draw(module: Any, parts: nn.ModuleList) -> bool:
    plain = type(module).get_dist_params is ProbabilisticTensorDictSequential.get_dist_params
    draws = [isinstance(part, ProbabilisticTensorDictModule) for part in parts]
    return plain and draws[-1] and not any(draws[:-1])


def _of_module(module: Any) -> Call:
    state, inner = vars(module), module.module
    is_plain = type(module)._call_module is TensorDictModule._call_module and isinstance(inner, nn.Module)
    keys = list(module.out_keys_source)
    if not is_plain or any(state.get(name) for name in OPTIONS) or state.get("inplace", True) is not True:
        return module  # type: ignore[no-any-return]
    if keys != list(module.out_keys) or "_" in keys or None in list(module.in_keys):
        return module  # type: ignore[no-any-return]
    in_keys = list(module.in_keys)

    def call(td: TensorDictBase) -> TensorDictBase:
        values = [td.get(key, None) for key in in_keys]
        if any(value is None for value in values):
            return module(td)  # whose error names the key
        out = inner(*values)
        if isinstance(out, (dict, TensorDictBase)) and all(key in out for key in keys):
            out = tuple(out[key] for key in keys)
        for key, value in zip(keys, out if isinstance(out, tuple) else (out,), strict=True):
            td.set(key, value if isinstance(value, Tensor) else TensorDict.from_any(value))
        return td

    return call
