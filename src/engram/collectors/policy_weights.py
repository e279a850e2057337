"""The weights of the policy that acts, and their version: both change together, and never during an action."""

from __future__ import annotations

import copy
import operator
import threading
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from engram._system import fork_registry

State = Mapping[str, Any]
_LARGEST_VERSION = torch.iinfo(torch.int64).max  # rows have it as int64
_PATIENCE = 0.1  # seconds that an update waits for a call of the policy, before it is left to the next call


class _Update(NamedTuple):
    """An update that was asked for during a batch: its values (None: none) and its version."""

    state: State | None
    version: int


class PolicyWeights:
    """A policy, its copy on another device where it has to act there, and the version of the weights that act.

    `policy` is the user's own object (`is_shared`) unless its parameters live elsewhere than `device`, or a factory
    made it (`is_own`). Weights of a shared policy change between two of its calls, those of a copy between two batches.

    A rollout collects between `begin_batch` and `end_batch`. It holds `call_lock` during each call of the policy, and
    the version of that call's rows is the one that `begin_call` returns.
    """

    def __init__(self, original: Any, device: torch.device | None, *, is_own: bool = False) -> None:
        self._original = original
        self.policy = original
        self.is_shared = not is_own
        if device is not None and isinstance(original, nn.Module) and not _lives_on(original, device):
            self.policy = copy.deepcopy(original).to(device)
            self.is_shared = False
        self.version = 0  #: of the weights that act
        self.newest_version = 0  #: of the last update, in use or not
        self._pending: _Update | None = None
        self._collecting: int | None = None  # the thread that is in the middle of a batch
        self._renew_locks()
        _live.add(self)

    def _renew_locks(self) -> None:
        self.call_lock = threading.Lock()
        self._lock = threading.RLock()  # of all below but the policy's calls; reentrant for hooks of `load_state_dict`

    def after_fork(self) -> None:
        """In a forked process no other thread collects or updates."""
        self._renew_locks()
        if self._collecting != threading.get_ident():
            self._collecting = None

    def begin_batch(self) -> None:
        """This thread collects a batch: updates of a copy, and those of this thread, wait for a later moment."""
        with self._lock:
            if self._pending is not None:
                self._take_over()
            self._collecting = threading.get_ident()

    def end_batch(self) -> None:
        """The batch is collected: updates that waited are taken over."""
        with self._lock:
            self._collecting = None
            if self._pending is not None:
                self._take_over()

    def begin_call(self) -> int:
        """The version that acts in the policy call that follows, after an update for which that call waits."""
        if self._pending is not None and self.is_shared:
            self._take_over()
        return self.version

    def update(self, weights: Any = None, version: int | None = None) -> None:
        """Copies weights into the policy that acts: the original's, or a state dict, module or TensorDict of them.

        `version` is one more than the last, unless given. Waits for a call of a shared policy to end; where this is
        asked for by the call itself, or the call does not end (it may wait for a lock that the caller of this has), the
        update follows it.

        Raises TypeError for a policy without weights and a version that is not an integer, ValueError for weights of
        another policy and a version out of range; nothing is changed then.
        """
        version = version_argument(version)
        state = self._values_of(weights)
        may_load = self.is_shared and state is not None and self._may_load_now()
        try:
            self._change(state, version, may_load=may_load)
        finally:
            if may_load:
                self.call_lock.release()

    def _may_load_now(self) -> bool:
        """Takes `call_lock`, and returns True; False where the thread that collects will load the update itself."""
        while self._collecting != threading.get_ident():
            if self.call_lock.acquire(timeout=_PATIENCE):
                return True
            if self._collecting is not None:
                break
        return False

    def _change(self, state: State | None, version: int | None, *, may_load: bool) -> None:
        with self._lock:
            version = self.newest_version + 1 if version is None else version
            if state is None and self._pending is not None:
                state = self._pending.state
            if may_load or self._collecting is None or (self.is_shared and state is None):
                self._load(state, version)
            else:
                self._pending = _Update(None if state is None else copied_weights(state), version)
            self.newest_version = version

    def _load(self, state: State | None, version: int) -> None:
        if state is not None:
            self.policy.load_state_dict(state)
        self.version, self._pending = version, None

    def _take_over(self) -> None:
        with self._lock:
            if self._pending is not None:
                self._load(*self._pending)

    def restore(self, state: State | None, version: int) -> None:
        """Loads a policy's state (None: it stays) and its version; updates that wait are dropped."""
        is_in_call = self._collecting == threading.get_ident()  # the policy itself may ask for this
        with nullcontext() if is_in_call else self.call_lock, self._lock:
            self._load(state, version)
            self.newest_version = version

    def state_dict(self) -> dict[str, Any] | None:
        """The state of the policy that acts; None for a policy that is not a module."""
        return self.policy.state_dict() if isinstance(self.policy, nn.Module) else None

    def _values_of(self, weights: Any) -> State | None:
        """The values of an update by their names; None where the policy has them already."""
        if weights is None and self.policy is self._original:
            return None
        if not isinstance(self.policy, nn.Module):
            raise TypeError(f"the policy is a {type(self.policy).__name__} and has no weights; give an nn.Module")
        state, own = state_of_weights(self._original if weights is None else weights), self.policy.state_dict()
        # An extra state, which TensorDicts and shared memory do not have, stays.
        state = {**{name: value for name, value in own.items() if not isinstance(value, Tensor)}, **state}
        # Before the first value is copied: torch would copy all that fit, and raise then.
        refuse_other_weights(state, own)
        return None if all(_is_same_memory(state.get(name), value) for name, value in own.items()) else state


_live: weakref.WeakSet[PolicyWeights] = fork_registry(PolicyWeights.after_fork)


def version_argument(version: Any) -> int | None:
    """The version of an update, or None. TypeError: it is not an integer; ValueError: it is outside 0 to 2**63 - 1."""
    if version is None:
        return None
    try:
        number = operator.index(version)
    except TypeError:
        raise TypeError(f"the version of weights is an integer, got {version!r:.80}") from None
    if not 0 <= number <= _LARGEST_VERSION:
        raise ValueError(f"the version of weights must be 0 or more, and below 2**63; got {number}")
    return number


def refuse_other_weights(state: State, own: State) -> None:
    """Raises ValueError for values of other names or shapes than `own`, and for what should be a tensor and is none."""
    if any(is_lazy(value) for value in own.values()):
        return  # it has no shapes yet
    found, allowed = shapes_of(state), shapes_of(own)
    if found != allowed:
        raise ValueError(f"these weights are not those of the policy.\n  found:   {found}\n  allowed: {allowed}")
    for name, value in own.items():
        if isinstance(value, Tensor) and not isinstance(state[name], Tensor):
            raise ValueError(f"the policy's {name!r} is a tensor, got a {type(state[name]).__name__}")


def shapes_of(state: State | None) -> dict[str, Any] | None:
    """The shape of each value, `()` where it has none."""
    if state is None:
        return None
    return {key: tuple(value.shape) if isinstance(value, Tensor | np.ndarray) else () for key, value in state.items()}


def _lives_on(module: nn.Module, device: torch.device) -> bool:
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    return all(own.type == device.type and device.index in (None, own.index) for own in devices)


def state_of_weights(weights: Any) -> State:
    """The values of a module, a state dict or a TensorDict of parameters, by their names. TypeError for others."""
    if isinstance(weights, TensorDictBase):
        return {key: value.detach() for key, value in weights.flatten_keys(".").items()}
    if isinstance(weights, nn.Module):
        return weights.state_dict()
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights are a module, a state dict or a TensorDict, got a {type(weights).__name__}")
    return weights


def copied_weights(state: State) -> State:
    """Copies of values, which do not change any more."""
    values = {name: value.detach() if isinstance(value, Tensor) else value for name, value in state.items()}
    return copy.deepcopy(values)


def _is_same_memory(value: Any, own: Any) -> bool:
    """Whether both are one tensor: copied onto itself, it could undo what an optimizer writes meanwhile."""
    if not isinstance(value, Tensor) or not isinstance(own, Tensor) or is_lazy(own):
        return False
    if own.layout is not torch.strided or value.layout is not torch.strided:
        return False
    place = [(one.device, one.data_ptr(), one.dtype, one.shape, one.stride()) for one in (value, own)]
    return place[0] == place[1]
