"""Adapters that turn anything that users pass as a policy into one on TensorDicts, and `RandomPolicy`."""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from types import MethodType
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    CudaGraphModule,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from tensordict.nn import (
    InteractionType as ExplorationType,
)
from tensordict.nn import probabilistic as _probabilistic
from tensordict.nn import (
    set_interaction_type as set_exploration_type,
)
from tensordict.nn.probabilistic import interaction_type as exploration_type
from torch import Tensor, nn
from torch.distributions import Distribution

from engram._advice import advised
from engram._checks import attribute
from engram._overrides import overrides
from engram.envs.action_checks import action_keys
from engram.pytree import get_entry, set_entry, to_tensor
from engram.specs import Composite, Spec
from engram.specs.torchrl import stack_members
from engram.transforms.base import IDLE
from engram.transforms.trajectory import InitTracker

INIT = "is_init"  # the mark of the first step of an episode, as recurrent modules read it
Call = Callable[[TensorDictBase], TensorDictBase]
# Options of TensorDictModule, ProbabilisticTensorDictModule and TensorDictSequential that change the result of a call.
MODULE_OPTIONS = ("method", "method_kwargs", "_kwargs", "_get_kwargs", "_out_to_in_map")
DRAW_OPTIONS = ("num_samples", "_generator", "_generator_key")
SEQUENCE_OPTIONS = ("partial_tolerant", "_select_before_return", "return_composite")


def fast_module_call(module: Any) -> Call:
    """A function that does the same as `module(td)` without TensorDictModule's overhead per call.

    A TensorDictModule searches for the package pandas at each call if that is not installed, which takes longer than a
    small network. For modules, and sequences of them, without hooks or overridden methods the inner module is called
    directly, and random draws from a distribution are made here; any other module is returned itself.
    """
    if not isinstance(module, nn.Module) or is_hooked(module):
        return module  # type: ignore[no-any-return]
    forward, state = type(module).forward, vars(module)
    if forward is TensorDictModule.forward:
        return _of_module(module)
    if type(module) is ProbabilisticTensorDictModule:
        return _of_draw(module)
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
    plain = "get_dist_params" not in overrides(type(module), ProbabilisticTensorDictSequential)
    draws = [isinstance(part, ProbabilisticTensorDictModule) for part in parts]
    return plain and draws[-1] and not any(draws[:-1])


def _of_module(module: Any) -> Call:
    state, inner = vars(module), module.module
    is_plain = "_call_module" not in overrides(type(module), TensorDictModule)
    keys = list(module.out_keys_source)
    if not is_plain or any(state.get(name) for name in MODULE_OPTIONS) or state.get("inplace", True) is not True:
        return module  # type: ignore[no-any-return]
    if keys != list(module.out_keys) or "_" in keys or None in list(module.in_keys):
        return module  # type: ignore[no-any-return]
    in_keys = list(module.in_keys)

    def call(td: TensorDictBase) -> TensorDictBase:
        values = [get_entry(td, key) for key in in_keys]  # a tenth of the cost of `td.get`
        if any(type(value) is not Tensor for value in values):
            values = [td.get(key, None) for key in in_keys]
            if any(value is None for value in values):
                return module(td)  # whose error names the key
        for key, value in named_outputs(inner(*values), keys).items():
            set_entry(td, key, value)
        return td

    return call


def _of_draw(module: Any) -> Call:
    state, kind = vars(module), module.distribution_class
    is_known = isinstance(kind, type) and kind.__module__.split(".")[0] in ("torch", "torchrl", "tensordict")
    keys = module.dist_sample_keys
    if not is_known or not issubclass(kind, Distribution) or issubclass(kind, CompositeDistribution) or len(keys) != 1:
        return module  # type: ignore[no-any-return]
    if any(state.get(name) is not None for name in DRAW_OPTIONS):
        return module  # type: ignore[no-any-return]

    def call(td: TensorDictBase) -> TensorDictBase:
        if (exploration_type() or module.default_interaction_type) is not ExplorationType.RANDOM:
            return module(td)
        distribution = module.get_dist(td)
        sample = distribution.rsample() if distribution.has_rsample else distribution.sample()
        set_entry(td, keys[0], sample)
        if module.return_log_prob:
            set_entry(td, module.log_prob_key, distribution.log_prob(sample))
        return td

    return call


__all__ = ["ExplorationType", "exploration_type", "set_exploration_type"]


def own_exploration_type() -> None:
    """Makes the exploration type thread-local: `set_exploration_type` in this thread no longer affects other threads.

    tensordict keeps one type for all threads: without this, an evaluation in one thread would make the policy of
    another deterministic, and two of them could leave a wrong type behind.

    Raises RuntimeError if this release of tensordict keeps the type elsewhere.
    """
    shared = vars(_probabilistic).get("_interaction_type")
    if not isinstance(shared, _TypeOfThreads):
        kind = type(shared)
        if not {"get_mode", "set_mode"} <= vars(kind).keys():
            raise RuntimeError(
                "this release of tensordict keeps its interaction type in another place; use one up to 0.14"
            )
        shared.__class__ = type("ExplorationTypeOfThreads", (_TypeOfThreads, kind), {})  # others hold this object
    _types.own = [None]


class _Types(threading.local):
    own: list[Any] | None = None  # a list with the thread's own type, if it has one


_types = _Types()


class _TypeOfThreads:
    """Replaces tensordict's holder of the exploration type by one with thread-local types."""

    def get_mode(self) -> Any:
        own = _types.own
        return super().get_mode() if own is None else own[0]  # type: ignore[misc]

    def set_mode(self, type: Any) -> None:
        own = _types.own
        if own is None:
            super().set_mode(type)  # type: ignore[misc]
        else:
            own[0] = type


FLAGS = ("done", "terminated", "truncated")
TensorDictPolicy = Callable[[TensorDictBase], TensorDictBase]


@advised
class RandomPolicy:
    """A policy that draws random actions from a spec, with torch's global generator.

    `action_spec` has the batch dimensions of the TensorDicts that the policy gets, or fewer. With `action_key=None` it
    is a Composite with the keys of the actions; a Composite with an entry `action_key` works, too.

    >>> from tensordict import TensorDict
    >>> from engram.specs import Categorical
    >>> RandomPolicy(Categorical(2).expand(3))(TensorDict(batch_size=[3]))["action"].shape
    torch.Size([3])
    """

    def __init__(self, action_spec: Spec, action_key: str | tuple[str, ...] | None = "action") -> None:
        self.action_spec = action_spec
        is_whole = isinstance(action_spec, Composite) and action_key is not None and action_key in action_spec
        self.action_key = None if is_whole else action_key

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        batch_is_in_spec = td.batch_size == self.action_spec.shape[: td.ndim]
        action = self.action_spec.rand(() if batch_is_in_spec else td.batch_size)
        return td.update(action) if self.action_key is None else td.set(self.action_key, action)

    def set_action_spec_from_env(self, env: Any) -> None:
        """Draws actions from the spec of `env` from now on."""
        policy = random_policy(env)
        self.action_spec, self.action_key = policy.action_spec, policy.action_key

    def __repr__(self) -> str:
        return f"RandomPolicy(action_spec={self.action_spec!r})"


def acts_at_random(policy: Any) -> bool:
    """Whether it is `env.rand_step` or `env.rand_action`, of an environment of any library."""
    return isinstance(policy, MethodType) and policy.__name__ in ("rand_step", "rand_action")


def random_policy(env: Any) -> RandomPolicy:
    """The random policy of an environment of any library, with any action keys."""
    keys = written_actions(env)
    if keys == ["action"]:
        return RandomPolicy(env.action_spec)
    only: Any = env.full_action_spec[keys[0]] if len(keys) == 1 else None
    is_tensor = only is not None and stack_members(only) is None  # agents with different specs: a lazy stack
    return RandomPolicy(only, keys[0]) if is_tensor else RandomPolicy(env.full_action_spec, None)


def written_actions(env: Any) -> list[Any]:
    """The keys that a policy must write: one for each action, or only "action" if all are nested below it."""
    keys = action_keys(env)
    return ["action"] if all((key if isinstance(key, str) else key[0]) == "action" for key in keys) else keys


#: Errors of a policy to which `with_entries` adds what the policy got: a key that it lacks, a size that does not fit.
INPUT_ERRORS = (KeyError, IndexError, RuntimeError)


class MissingEntryError(KeyError):
    """A KeyError whose text is its message: that of a KeyError is the message's `repr`, with every quote escaped."""

    def __str__(self) -> str:
        return str(self.args[0])


def with_entries(error: Exception, td: Mapping[Any, Any] | TensorDictBase) -> Exception:
    """The same error, which also says what the policy got; one of another class, or that says it, as it is.

    >>> from tensordict import TensorDict
    >>> with_entries(KeyError("obs"), TensorDict({"observation": torch.zeros(4)}))
    MissingEntryError("obs. The policy got the entries 'observation': float32 [4]")
    """
    said = str(error.args[0]).rstrip(".") if error.args else ""
    if type(error) not in INPUT_ERRORS or _GOT in said:
        return error
    items = td.items(True, True) if isinstance(td, TensorDictBase) else td.items()
    shown = [f"{key!r}: {_form_of(value)}" for key, value in items]
    more = f" and {len(shown) - _MOST_NAMED} more" if len(shown) > _MOST_NAMED else ""
    kind = MissingEntryError if type(error) is KeyError else type(error)
    return kind(f"{said}. {_GOT} {', '.join(shown[:_MOST_NAMED])}{more}")


def _form_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"


_GOT, _MOST_NAMED = "The policy got the entries", 20


class ObservationPolicy:
    """A policy from a module or function that maps the tensors under `in_keys` to the action, and to other outputs.

    With `out_keys` these are the names of what it returns, one of which is `"action"`. Without, of a tuple of two or
    more tensors, the first is the action; the others are `"output1"`, ...
    """

    def __init__(
        self,
        module: Callable[..., Any],
        in_keys: Sequence[Any],
        outputs: int | None = None,
        *,
        out_keys: Sequence[str] | None = None,
    ) -> None:
        self.module = module
        self.in_keys = list(in_keys)
        self.out_keys = None if out_keys is None else list(out_keys)
        self.outputs = outputs if out_keys is None else len(out_keys)  # None until the first call
        #: Whether a tensor that the module returns is the action; else it lacks outputs, and `split` says so.
        self.may_be_action = out_keys is None or len(out_keys) == 1

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        action, others = self.split(self.call(td))
        return td.update(others).set("action", action)

    def call(self, td: TensorDictBase) -> Any:
        """The module's output for the tensors of `td`."""
        try:
            return self.module(*[td.get(key) for key in self.in_keys])
        except INPUT_ERRORS as error:
            raise with_entries(error, td) from error

    def split(self, out: Any) -> tuple[Any, dict[str, Any]]:
        """The action, as the module returned it, and the other outputs.

        Raises TypeError if one of several outputs without names is not a tensor, and ValueError for another number of
        outputs than of names.
        """
        if self.out_keys == ["action"] and not (isinstance(out, tuple) and len(out) > 1):
            return out, {}  # as it is: whoever checks it says best what it is
        if self.out_keys is not None:
            others = named_outputs(out, self.out_keys)
            return others.pop("action"), others
        if not isinstance(out, tuple) or len(out) < 2:
            self.outputs = 1
            return out, {}
        self.outputs = len(out)
        for number, value in enumerate(out):
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"output {number} of the policy is a {type(value).__name__}; a policy on tensors returns the "
                    "action, or a tuple of tensors whose first is the action. TensorDictModule names others"
                )
        return out[0], {f"output{number}": value for number, value in enumerate(out[1:], 1)}


def named_outputs(out: Any, keys: Sequence[str]) -> dict[str, Any]:
    """What a TensorDictModule sets under its `out_keys`, of what the module in it has returned.

    Raises ValueError for another number of outputs than of keys.
    """
    if isinstance(out, (dict, TensorDictBase)) and all(key in out for key in keys):
        out = tuple(out[key] for key in keys)
    values = out if isinstance(out, tuple) else () if out is None else (out,)
    if len(values) != len(keys):
        raise ValueError(f"the policy's module returned {len(values)} values for its out_keys {list(keys)}")
    return {k: v if isinstance(v, Tensor) else TensorDict.from_any(v) for k, v in zip(keys, values, strict=True)}


class ModuleKeys(NamedTuple):
    """The entries of its input that a module reads, and those that it writes."""

    read: frozenset[Any]
    written: frozenset[Any]


class _Forms(NamedTuple):
    """How a function on TensorDicts may be called: see `fast_module_call`, `as_observation_policy`, `module_keys`."""

    call: Call
    on_observations: ObservationPolicy | None
    keys: ModuleKeys | None


_MOST_COPIED = 64  # members of an attribute: with more it is the user's own, and decides nothing


class _ModuleState:
    """What decides the forms of a module: the attributes of those on TensorDicts in it, and which modules it has."""

    def __init__(self, module: nn.Module) -> None:
        self._kinds: list[tuple[nn.Module, type, Any]] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []  # as they are, and as they were
        self._members: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for member in module.modules():
            if isinstance(member, TensorDictModuleBase | nn.ModuleList):
                self._kinds.append((member, type(member), type(member).forward))
                self._attributes.append((vars(member), _copied_attributes(member)))
            else:
                self._members.append((member._modules, dict(member._modules)))

    def is_current(self) -> bool:
        """Whether nothing has changed since."""
        for member, kind, forward in self._kinds:
            if type(member) is not kind or kind.forward is not forward:
                return False
        try:
            for now, before in self._attributes:
                before["training"] = now["training"]  # decides nothing here
                if now != before:
                    return False
            return all(now == before for now, before in self._members)
        except Exception:  # arrays and TensorDicts are not simply equal; nor are members of the user's own
            return False


def _copied_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module, with copies of lists and dicts, but for those of tensors and long ones."""

    def is_copied(name: str, value: Any) -> bool:
        is_short = isinstance(value, dict | list | set) and len(value) <= _MOST_COPIED
        return is_short and name not in ("_parameters", "_buffers")

    return {name: copy(value) if is_copied(name, value) else value for name, value in vars(module).items()}


class CallablePolicy:
    """A policy from a callable on TensorDicts, which returns a TensorDict or writes in place and returns None."""

    def __init__(self, function: Callable[..., Any], action_keys: Sequence[Any] = ("action",)) -> None:
        self.function = function
        self._call = function
        self.action_keys = action_keys
        self._state: _ModuleState | None = None  # of the module whose forms are known
        self._forms = _Forms(function, None, None)

    def prepare(self) -> None:
        """Selects the fastest way to call the function; call it again after hooks may have changed."""
        self._call = self.forms().call

    def forms(self) -> _Forms:
        """What the function may be called as now: hooks come and go."""
        function = self.function
        if isinstance(function, nn.Module) and (self._state is None or not self._state.is_current()):
            self._state = None
            self._forms = _Forms(fast_module_call(function), _on_observations(function), _keys_of(function))
            self._state = _ModuleState(function)
        return self._forms

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        try:
            result = self._call(td)
        except INPUT_ERRORS as error:
            raise with_entries(error, td) from error
        result = td if result is None else result
        if not isinstance(result, TensorDictBase) or any(_is_missing(result, key) for key in self.action_keys):
            kind = f"keys {list(result.keys())}" if isinstance(result, TensorDictBase) else type(result).__name__
            raise TypeError(
                f"a policy must return a TensorDict with {_entries(self.action_keys)}, got {kind}; a function of "
                "observation tensors must have parameters with the names of the observations, be an nn.Module, or be "
                "wrapped in TensorDictModule(f, in_keys=[...], out_keys=['action'])"
            )
        return result


def _is_missing(td: TensorDictBase, key: Any) -> bool:
    try:
        return get_entry(td, key) is None
    except RuntimeError:  # agents' values of different shapes cannot be stacked
        return False


def _entries(keys: Sequence[Any]) -> str:
    return f"an {keys[0]!r} entry" if len(keys) == 1 else f"the entries {list(keys)}"


def as_policy(policy: Any, env: Any, *, trusted: bool = False) -> TensorDictPolicy:
    """Converts any supported form of a policy of `env` into a policy on TensorDicts.

    None and `env.rand_step` are random; modules with `in_keys` take TensorDicts. Other modules and functions whose
    parameters have the names of observations get these as tensors; else an `nn.Module` gets the only observation, and a
    function the TensorDict; with `trusted` all get the TensorDict. Raises TypeError for an object that is not callable,
    and ValueError for a module whose parameters do not name one of several observations.
    """
    if policy is None:
        return random_policy(env)
    if isinstance(policy, RandomPolicy):
        return _expanded(policy, env)
    if acts_at_random(policy):
        return _expanded(random_policy(policy.__self__), env)
    if not callable(policy):
        raise TypeError(f"policy must be a callable, an nn.Module or None, got {type(policy).__name__}")
    is_module = isinstance(policy, nn.Module)
    if trusted or (is_module and _takes_tensordict(policy)):
        return CallablePolicy(policy, written_actions(env))
    named = _observations_by_name(policy.forward if is_module else policy, env)
    if named or is_module:
        return ObservationPolicy(policy, named or [_only_observation(env)])
    return CallablePolicy(policy, written_actions(env))


class RecordedActions:
    """A policy that replays a list of actions, one a call.

    Takes the first `max_steps` of `actions`: TensorDicts with the entries of actions, or tensors, arrays or numbers for
    the only action. Raises ValueError if there are none, beside another policy, or where a call of `step` may only
    reset.
    """

    def __init__(self, actions: Iterable[Any], max_steps: int, env: Any, policy: Any) -> None:
        if policy is not None:
            raise ValueError("a rollout takes a policy or actions, not both: leave one out")
        if IDLE in env.observation_spec:
            raise ValueError("actions are one a step, and steps of this environment may only reset; pass a policy")
        self._actions = list(itertools.islice(iter(actions), max_steps))
        if not self._actions:
            raise ValueError("actions is empty: give one action a step")
        self._specs, self._taken = env.full_action_spec.leaves(), 0

    def __len__(self) -> int:
        return len(self._actions)

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        action = self._actions[self._taken]
        self._taken += 1
        if isinstance(action, TensorDictBase):
            return td.update(action.select(*self._specs, strict=False).clone())  # the environment may write into it
        if len(self._specs) != 1:
            raise ValueError(
                f"there are several actions, {list(self._specs)}: give a TensorDict with them for each step"
            )
        [(key, spec)] = self._specs.items()
        if not isinstance(action, Tensor):
            action = to_tensor(action)
            if action.is_floating_point() == spec.dtype.is_floating_point:
                action = action.to(spec.dtype)
        return td.set(key, action.to(td.device or action.device, copy=True))


def on_device_of(policy: Any, act: TensorDictPolicy) -> TensorDictPolicy:
    """`act` with its input moved to the device of `policy`'s parameters, and its result moved back.

    `act` itself unless `policy` is an `nn.Module` with parameters or buffers.
    """
    owned = itertools.chain(policy.parameters(), policy.buffers()) if isinstance(policy, nn.Module) else ()
    first = next(iter(owned), None)
    if first is None:
        return act

    def act_there(td: TensorDictBase) -> TensorDictBase:
        result = act(td.to(first.device)).to(td.device or "cpu")
        return result if td.device is not None else result.clear_device_()

    return act_there


def compiled_policy(policy: TensorDictPolicy, options: Mapping[str, Any]) -> TensorDictPolicy:
    """`policy` compiled by `torch.compile(..., **options)`; a random policy unchanged."""
    return _with_function(policy, lambda function: torch.compile(function, **options))


def cudagraph_policy(policy: TensorDictPolicy, options: Mapping[str, Any]) -> TensorDictPolicy:
    """`policy` in a `CudaGraphModule(..., **options)`; a random policy unchanged."""
    return _with_function(policy, lambda function: CudaGraphModule(function, **options))


def _with_function(policy: TensorDictPolicy, wrap: Callable[[Any], Any]) -> TensorDictPolicy:
    if isinstance(policy, ObservationPolicy):
        return ObservationPolicy(wrap(policy.module), policy.in_keys, policy.outputs)
    if isinstance(policy, CallablePolicy):
        return CallablePolicy(wrap(policy.function), policy.action_keys)
    return policy


def as_observation_policy(policy: TensorDictPolicy) -> ObservationPolicy | None:
    """The policy as a module from observations to the action and other outputs; None where it may be something else.

    A TensorDictModule qualifies if it is exactly of that class, has no hooks or options, and writes `"action"` and
    other entries at the root.
    """
    if isinstance(policy, CallablePolicy):
        return policy.forms().on_observations
    return policy if isinstance(policy, ObservationPolicy) else None


def _on_observations(module: Any) -> ObservationPolicy | None:
    if type(module) is not TensorDictModule or not _is_plain_module(module):
        return None
    return ObservationPolicy(module.module, module.in_keys, out_keys=module.out_keys)


def module_keys(policy: TensorDictPolicy) -> ModuleKeys | None:
    """What a policy reads and writes where it is a module on TensorDicts; None where it may read anything.

    That is known where all modules in it are classes of tensordict and have no hooks.
    """
    return policy.forms().keys if isinstance(policy, CallablePolicy) else None


def _keys_of(module: Any) -> ModuleKeys | None:
    if not isinstance(module, TensorDictModuleBase):
        return None
    for member in module.modules():
        if isinstance(member, TensorDictModuleBase):
            is_known = type(member).__module__.split(".")[0] == "tensordict" and not is_hooked(member)
            if not is_known or vars(member).get("_generator_key") is not None:  # an entry that no key names
                return None
    return ModuleKeys(frozenset(module.in_keys), frozenset(module.out_keys))


def _expanded(policy: RandomPolicy, env: Any) -> RandomPolicy:
    spec = policy.action_spec
    if policy.action_key is not None and isinstance(spec, Composite):  # with other keys than "action"
        whole: Any = env.full_action_spec
        if list(_leaf_keys(spec)) == list(_leaf_keys(whole)):
            policy = RandomPolicy(spec, None)
    expected = env.action_spec.shape if policy.action_key is not None else env.full_action_spec.shape
    if spec.shape == expected:
        return policy
    if (*env.batch_size, *spec.shape) != tuple(expected):
        raise ValueError(
            f"the random policy draws actions of shape {tuple(spec.shape)}, the environment takes {tuple(expected)}; "
            "create it with the environment's own action_spec"
        )
    return RandomPolicy(spec.expand(*expected), policy.action_key)


def _is_plain_module(module: Any) -> bool:
    state, keys = vars(module), list(module.out_keys)
    if is_hooked(module) or any(state.get(name) for name in MODULE_OPTIONS) or state.get("inplace", True) is not True:
        return False
    at_root = all(isinstance(key, str) and key not in ("_", "next", *FLAGS) for key in keys)
    distinct = len({*keys, *module.in_keys}) == len(keys) + len(module.in_keys)
    return at_root and distinct and "action" in keys and keys == list(module.out_keys_source)


def _takes_tensordict(module: nn.Module) -> bool:
    if isinstance(module, TensorDictModuleBase) or (hasattr(module, "in_keys") and hasattr(module, "out_keys")):
        return True
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return False
    first = parameters[0] if parameters else None
    return first is not None and (first.name in ("td", "tensordict") or "TensorDict" in str(first.annotation))


def _observations_by_name(function: Callable[..., Any], env: Any) -> list[str]:
    """The observations named by a function's first parameters; empty if it requires further parameters."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    observations, names = observation_keys(env), list[str]()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for place, parameter in enumerate(parameters):
        if place == len(names) and parameter.kind in positional and parameter.name in observations:
            names.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind in (*positional, parameter.KEYWORD_ONLY):
            return []
    return names


def _only_observation(env: Any) -> Any:
    keys = observation_keys(env)
    if len(keys) != 1:
        raise ValueError(
            f"an nn.Module policy whose parameters have other names gets one observation, and the environment has "
            f"{keys}; name its parameters so, or wrap it in TensorDictModule(module, in_keys=[...], "
            "out_keys=['action'])"
        )
    return keys[0]


def transforms_of(policy: Any, env: Any) -> list[Any]:
    """The transforms that modules of a policy (recurrent ones) need, of the library of `env`.

    An `InitTracker` for each mark of first steps that they read and the environment lacks, and their primers.
    """
    modules = list(policy.modules()) if isinstance(policy, nn.Module) else []
    makers = [getattr(module, "make_tensordict_primer", None) for module in modules]
    primers = [make() for make in makers if make is not None]
    marks = _missing_marks(policy, env)
    if not marks:
        return primers
    root = type(env).__module__.partition(".")[0]
    tracker: Any = sys.modules["torchrl.envs"].InitTracker if root == "torchrl" else InitTracker
    return [*(tracker(init_key=key) for key in marks), *primers]


def require_first_marks(policy: Any, env: Any) -> None:
    """Raises KeyError for a policy that reads marks of first steps which the environment does not make."""
    if marks := _missing_marks(policy, env):
        raise KeyError(
            f"the policy reads {marks[0]!r}, which marks the first step of each episode, and this environment does not "
            f"make it: use TransformedEnv(env, InitTracker({'' if marks[0] == INIT else repr(marks[0])})), or give the "
            "collector auto_register_policy_transforms=True"
        )


def _missing_marks(policy: Any, env: Any) -> list[Any]:
    """The keys "is_init", at the root or nested, that a policy reads and the environment's resets do not have."""
    if not isinstance(policy, nn.Module):
        return []
    readers = [policy] if isinstance(policy, TensorDictModuleBase) else policy.modules()
    modules = [module for module in readers if isinstance(module, TensorDictModuleBase)]
    keys = [key for module in modules for key in attribute(module, "in_keys") or ()]  # a user's class may have none
    marks = list(dict.fromkeys(key for key in keys if key == INIT or (isinstance(key, tuple) and key[-1] == INIT)))
    return [key for key in marks if key not in observation_keys(env)] if marks else marks


def observation_keys(env: Any) -> list[Any]:
    """The keys of an environment's observations, of any library."""
    return [key for key in _leaf_keys(env.observation_spec) if key not in (*FLAGS, IDLE)]


def _leaf_keys(spec: Any) -> list[Any]:
    return list(spec.leaves()) if isinstance(spec, Composite) else list(spec.keys(True, True))


def zero_outputs(policy: TensorDictPolicy, td: TensorDictBase) -> TensorDictBase:
    """Zeros for every entry that `policy` adds to `td` besides the action, under `"next"` too.

    Random steps contain them, so that all batches of a collector have the same keys. The policy is called once, on a
    copy, and torch's random state is restored.
    """
    if not isinstance(policy, CallablePolicy | ObservationPolicy):
        return td.empty()
    with torch.random.fork_rng():
        copy = td.clone()
        out = policy(copy) if isinstance(policy, CallablePolicy) else copy.update(policy.split(policy.call(copy))[1])
    given = set(td.keys(True, True)) | {"action"}
    return out.select(*[key for key in out.keys(True, True) if key not in given]).apply(torch.zeros_like)
