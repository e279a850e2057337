"""Policies: from an observation to an action, and `RandomPolicy`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType as ExplorationType,
)
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from tensordict.nn import (
    set_interaction_type as set_exploration_type,
)
from tensordict.nn.probabilistic import interaction_type as exploration_type
from torch import Tensor, nn

from engram.specs import Spec
from engram.transforms.base import IDLE

Call = Callable[[TensorDictBase], TensorDictBase]
# Options of TensorDictModule, and of sequences, that change what a call does.
MODULE_OPTIONS = ("method", "method_kwargs", "_kwargs", "_out_to_in_map")
SEQUENCE_OPTIONS = ("partial_tolerant", "_select_before_return", "return_composite")


def fast_module_call(module: Any) -> Call:
    """A function that does the same as `module(td)` without TensorDictModule's overhead per call.

    A TensorDictModule searches for the package pandas at each call if that is not installed, which takes longer than a
    small network. For modules, and sequences of them, without hooks or overridden methods the inner module is called
    directly; any other module is returned itself.
    """
    if not isinstance(module, nn.Module) or is_hooked(module):
        return module  # type: ignore[no-any-return]
    forward, state = type(module).forward, vars(module)
    if forward is TensorDictModule.forward:
        return _of_module(module)
    sequences = (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward)
    parts = state["_modules"].get("module", None)
    has_options = any(state.get(name) for name in SEQUENCE_OPTIONS) or state.get("inplace") is not None
    if forward not in sequences or not isinstance(parts, nn.ModuleList) or has_options:
        return module
    calls = [fast_module_call(part) for part in parts]
    is_probabilistic = forward is ProbabilisticTensorDictSequential.forward
    if is_probabilistic and (not _ends_in_a_draw(module, parts) or not state.get("_requires_sample", True)):
        return module

    def in_turn(td: TensorDictBase) -> TensorDictBase:
        for call in calls:
            td = call(td)
        return td

    return in_turn


def is_hooked(module: Any) -> bool:
    """Whether a module has hooks, or its `forward` or `__call__` was replaced."""
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
    if not is_plain or any(state.get(name) for name in MODULE_OPTIONS) or state.get("inplace", True) is not True:
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


__all__ = ["ExplorationType", "exploration_type", "set_exploration_type"]


FLAGS = ("done", "terminated", "truncated")
TensorDictPolicy = Callable[[TensorDictBase], TensorDictBase]


class RandomPolicy:
    """A policy that draws random actions from a spec, with torch's global generator.

    `action_spec` has the batch dimensions of the TensorDicts that the policy gets, or fewer.

    >>> from tensordict import TensorDict
    >>> from engram.specs import Categorical
    >>> RandomPolicy(Categorical(2).expand(3))(TensorDict(batch_size=[3]))["action"].shape
    torch.Size([3])
    """

    def __init__(self, action_spec: Spec, action_key: str | tuple[str, ...] = "action") -> None:
        self.action_spec = action_spec
        self.action_key = action_key

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        batch_is_in_spec = td.batch_size == self.action_spec.shape[: td.ndim]
        return td.set(self.action_key, self.action_spec.rand(() if batch_is_in_spec else td.batch_size))

    def __repr__(self) -> str:
        return f"RandomPolicy(action_spec={self.action_spec!r})"


class ObservationPolicy:
    """A policy from a module that maps the tensor under `in_key` to the action."""

    def __init__(self, module: Callable[..., Any], in_key: str | tuple[str, ...]) -> None:
        self.module = module
        self.in_key = in_key

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        return td.set("action", self.module(td.get(self.in_key)))


class CallablePolicy:
    """A policy from a callable on TensorDicts, which returns a TensorDict or writes in place and returns None."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._call = function

    def prepare(self) -> None:
        """Chooses the fastest way to call the function; to be called again after hooks may have changed."""
        self._call = fast_module_call(self.function)

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        result = self._call(td)
        result = td if result is None else result
        if not isinstance(result, TensorDictBase) or result.get("action", None) is None:
            kind = f"keys {list(result.keys())}" if isinstance(result, TensorDictBase) else type(result).__name__
            raise TypeError(
                f"a policy must return a TensorDict with an 'action' entry, got {kind}; a function of observation "
                "tensors must be an nn.Module, or be wrapped in TensorDictModule(f, in_keys=[...], out_keys=['action'])"
            )
        return result


def as_policy(policy: Any, env: Any) -> TensorDictPolicy:
    """The policy on TensorDicts for anything that a user may give as a policy of `env`.

    None and `env.rand_step` are random; modules with `in_keys` and plain callables take TensorDicts; any other
    `nn.Module` takes the observation tensor. Raises TypeError for an object that is not callable, and ValueError for a
    module on observations if the environment has several.
    """
    if policy is None:
        return RandomPolicy(env.action_spec)
    if isinstance(policy, RandomPolicy):
        return _expanded(policy, env)
    if getattr(policy, "__name__", None) in ("rand_step", "rand_action") and hasattr(policy, "__self__"):
        return _expanded(RandomPolicy(policy.__self__.action_spec), env)
    if not callable(policy):
        raise TypeError(f"policy must be a callable, an nn.Module or None, got {type(policy).__name__}")
    if isinstance(policy, nn.Module) and not _takes_tensordict(policy):
        return ObservationPolicy(policy, _only_observation(env))
    return CallablePolicy(policy)


def as_observation_policy(policy: TensorDictPolicy) -> ObservationPolicy | None:
    """The policy as a module from one observation to the action; None if it does more than that.

    A TensorDictModule qualifies if it is exactly of that class, reads one key, writes only the action, and has no hooks
    or options.
    """
    if isinstance(policy, ObservationPolicy):
        return policy
    module: Any = policy.function if isinstance(policy, CallablePolicy) else None
    if type(module) is not TensorDictModule or not _is_plain_module(module):
        return None
    return ObservationPolicy(module.module, module.in_keys[0])


def _expanded(policy: RandomPolicy, env: Any) -> RandomPolicy:
    spec, expected = policy.action_spec, env.action_spec.shape
    if spec.shape == expected:
        return policy
    if (*env.batch_size, *spec.shape) != tuple(expected):
        raise ValueError(
            f"the random policy draws actions of shape {tuple(spec.shape)}, the environment takes {tuple(expected)}; "
            "create it with the environment's own action_spec"
        )
    return RandomPolicy(spec.expand(*expected), policy.action_key)


def _is_plain_module(module: Any) -> bool:
    state = vars(module)
    options = [state.get(name) for name in MODULE_OPTIONS]
    keys_fit = len(module.in_keys) == 1 and list(module.out_keys) == ["action"] == list(module.out_keys_source)
    changed = is_hooked(module) or any(options)
    return keys_fit and not changed and state.get("inplace", True) is True and isinstance(module.module, nn.Module)


def _takes_tensordict(module: nn.Module) -> bool:
    if isinstance(module, TensorDictModuleBase) or (hasattr(module, "in_keys") and hasattr(module, "out_keys")):
        return True
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return False
    first = parameters[0] if parameters else None
    return first is not None and (first.name in ("td", "tensordict") or "TensorDict" in str(first.annotation))


def _only_observation(env: Any) -> Any:
    keys = [key for key in _leaf_keys(env.observation_spec) if key not in (*FLAGS, IDLE)]
    if len(keys) != 1:
        raise ValueError(
            f"an nn.Module policy gets one observation, and the environment has {keys}; wrap it in "
            "TensorDictModule(module, in_keys=[...], out_keys=['action'])"
        )
    return keys[0]


def _leaf_keys(spec: Any) -> list[Any]:
    return list(spec.leaves()) if hasattr(spec, "leaves") else list(spec.keys(True, True))


def zero_outputs(policy: TensorDictPolicy, td: TensorDictBase) -> TensorDictBase:
    """Zeros for every entry that `policy` adds to `td` besides the action, under `"next"` too.

    Random steps carry them, so that all batches of a collector have the same keys. The policy is called once, on a
    copy, and torch's random numbers are put back.
    """
    if not isinstance(policy, CallablePolicy):
        return td.empty()
    with torch.random.fork_rng():
        out = policy(td.clone())
    given = set(td.keys(True, True)) | {"action"}
    return out.select(*[key for key in out.keys(True, True) if key not in given]).apply(torch.zeros_like)
