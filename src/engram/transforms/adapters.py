"""Adapters: callables, and objects in TorchRL's form, as transforms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from engram import _forms as forms
from engram._overrides import overrides
from engram.pytree import Key, as_keys, copy_containers, has_batch_size, require_tensor, set_entry
from engram.transforms.base import (
    UNUSED,
    InvertedTransform,
    StreamTraits,
    Transform,
    TransformStep,
    Unused,
    WriteRequest,
    attributes_of,
    copies,
)
from engram.transforms.env_specs import EnvSpecs, bounds_of, specs_by_trial
from engram.transforms.roles import IN_BUFFERS, Role
from engram.transforms.torchrl import TorchRLTransform

_INVERSES = ("inv", "_inv_call", "_inv_apply_transform")
_OF_STATE = ("state_dict", "load_state_dict")


class CallableTransform(Transform, built_in=True):
    """A callable as a transform: on reading, or with `invert` on writing."""

    def __init__(self, fn: Callable[[Any], Any], invert: bool = False) -> None:
        self.fn = fn
        self.invert = invert

    def forward(self, batch: Any) -> Any:
        return batch if self.invert else self.fn(batch)

    def inv(self, tensordict: Any) -> Any:
        return self.fn(tensordict) if self.invert else tensordict

    def _inverts(self) -> bool:
        return self.invert

    def env_steps(self) -> list[TransformStep]:
        return [calls._replace(returns_own_tensors=False) for calls in super().env_steps()]

    def roles(self) -> Role:
        return Role.WRITING if self.invert else Role.READING | Role.ENVIRONMENT

    def __repr__(self) -> str:
        return f"{getattr(self.fn, '__name__', self.fn)}{' (on writing)' if self.invert else ''}"


class ForeignTransform(Transform, built_in=True):
    """An object with an inverse as a transform: the object is called on reading, its inverse on writing.

    The inverse is its `inv`, which gets the caller's batch; else its `_inv_call`, which gets a shallow copy; else
    its `_inv_apply_transform`, which computes `in_keys_inv` from `out_keys_inv`. It may return None, fewer steps or
    more than it got: it then holds steps back. `add` passes a TensorDict as a batch of one step; time is the last batch
    dimension of TensorDicts.

    The buffer makes one write at a time. An object declares what lasts from one write to the next by `state_dict` and
    `load_state_dict`, a module also by `get_extra_state` and `set_extra_state`. What is declared is saved with the
    buffer and put back after a refused write (where a module's class has none of these, its buffers are). If the object
    holds steps back, it is reset when the buffer is emptied or sent to a process. Other attributes that the inverse
    sets are kept as they are: not saved (a save warns of them), not put back, not reset.

    In an environment the inverse is applied to the action, and must return valid actions of the environment.

    Raises:
        TypeError: the object has no inverse that can be called, or cannot be called itself.
    """

    _has_memory = True

    def roles(self) -> Role:
        return IN_BUFFERS | Role.ENVIRONMENT  # it does not say

    def __init__(self, transform: Any) -> None:
        name, methods = type(transform).__name__, _methods(transform)
        if not methods.keys() & {"__call__", "forward"}:
            raise TypeError(f"a {name} has an inverse for writing, and for reading neither `forward` nor `__call__`")
        self.transform = transform
        self._inverse = next(name for name in _INVERSES if name in methods)
        if self._inverse == "_inv_apply_transform" and not hasattr(transform, "in_keys_inv"):
            raise TypeError(
                f"a {name} has `_inv_apply_transform`, and no `in_keys_inv` that it could change: give it these, "
                "`_inv_call` or `inv`"
            )
        self._of_tensordicts = "_inv_call" in methods  # an object in TorchRL's form
        self._has_state = self._inverts() and len(_methods(transform, _OF_STATE)) == len(_OF_STATE)
        # Whether that is all of it: a module's `state_dict` has its tensors, and whatever its class adds.
        own = overrides(type(transform), nn.Module) if isinstance(transform, nn.Module) else {"state_dict"}
        self._says_all = self._has_state and not own.isdisjoint(("state_dict", "get_extra_state"))

    # ---- reading ----
    def forward(self, batch: Any) -> Any:
        if type(batch) is list and self._of_tensordicts:
            return [self.forward(item) for item in batch]
        return self.transform(batch) if callable(self.transform) else self.transform.forward(batch)

    # ---- writing ----
    def _inverts(self) -> bool:
        return _has_inverse(self.transform)

    @property
    def stream(self) -> StreamTraits:
        inverts = self._inverts()
        return StreamTraits(inverse_is_ordered=inverts, forward_is_ordered=True, flushes_all=not inverts)

    def inv(self, tensordict: Any) -> Any:
        if not self._inverts():
            return tensordict
        if self._of_tensordicts and not has_batch_size(tensordict):
            raise TypeError(
                f"{self.kind} takes TensorDicts, and a {type(tensordict).__name__} is written: write TensorDicts, or "
                "use a transform of engram.envs"
            )
        if self._inverse == "inv":
            return self.transform.inv(tensordict)
        tensordict = copy_containers(tensordict)
        return self.transform._inv_call(tensordict) if self._inverse == "_inv_call" else self._by_key_inv(tensordict)

    def _by_key_inv(self, batch: Any) -> Any:
        stored, given = _inverse_keys(self.transform)
        values = [self.transform._inv_apply_transform(require_tensor(batch, key, self.kind)) for key in given]
        for key, value in zip(stored, values, strict=True):
            set_entry(batch, key, value)
        return batch

    def inverse_stream(self, writing: WriteRequest) -> WriteRequest:
        return super().inverse_stream(writing) if self._inverts() else writing

    # ---- state: what the object's `state_dict` returns ----
    @property
    def _owner(self) -> Any:
        return self.transform

    def _declares_state(self) -> bool:
        return bool(self.get_extra_state())

    def _keep_unused(self) -> None:
        vars(self)[UNUSED] = Unused(self.remember(), attributes_of(self.transform))

    def lost_attributes(self) -> list[str]:
        return [] if self._says_all or self._unused is None else self._unused.changed(self.transform)

    def remember(self) -> Any:
        if self._says_all:
            return copy.deepcopy(self.transform.state_dict())
        return [copies(module._buffers) for module in self._modules_of_object()]

    def undo(self, before: Any) -> None:
        if self._says_all:
            self.transform.load_state_dict(before)
            return
        for module, tensors in zip(self._modules_of_object(), before, strict=False):
            module._buffers.update(tensors)

    def _modules_of_object(self) -> list[nn.Module]:
        return [*self.transform.modules()] if self._has_state and isinstance(self.transform, nn.Module) else []

    def get_extra_state(self) -> dict[str, Any]:
        if not self._has_state:
            return {}
        state = self.transform.state_dict()
        return {"object": copy.deepcopy(state)} if state else {}

    def set_extra_state(self, state: Any) -> None:
        super().set_extra_state(state)
        if self._unused is None:
            self._keep_unused()
        if "object" in state:
            self.transform.load_state_dict(copy.deepcopy(state["object"]))
        elif self._declares_state() and self._unused is not None:
            self.undo(copy.deepcopy(self._unused.state))

    def adapts_state(self) -> bool:
        return self._has_state

    def state_is_optional(self) -> bool:
        # Tensors that it was made with are settings, as of the library's own.
        unused = self._unused
        return unused is None or (not self._says_all and all(map(_are_equal, unused.state, self.remember())))

    def differences(self, state: dict[str, Any]) -> list[str]:
        different = super().differences(state)
        if "object" not in state:
            return different
        if not self._has_state:
            return [*different, f"{self.kind} has no state_dict here, and had one there"]
        return (
            [*different, *self._other_tensors(state["object"])] if isinstance(self.transform, nn.Module) else different
        )

    def _other_tensors(self, saved: Any) -> list[str]:
        """The reasons why a module cannot load a state."""
        forms.check(forms.mapping_of(forms.anything), saved, f"the state of {self.kind}")
        own = self.transform.state_dict()
        if own.keys() != saved.keys():
            return [f"{self.kind} has {', '.join(own) or 'no tensors'} here, {', '.join(saved) or 'none'} there"]
        tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
        for name in tensors:
            forms.check(forms.tensor(), saved[name], f"{name} in the state of {self.kind}")
        return [
            f"{self.kind} has {name} {list(value.shape)} here, {list(saved[name].shape)} there"
            for name, value in tensors.items()
            if value.shape != saved[name].shape
        ]

    def state_settings(self) -> dict[str, Any]:
        return {}

    @property
    def kind(self) -> str:
        return type(self.transform).__name__

    # ---- environments ----
    def env_steps(self) -> list[TransformStep]:
        return [calls._replace(returns_own_tensors=False) for calls in super().env_steps()]

    def for_env(self, specs: EnvSpecs) -> Transform:
        kind: Any = type(self.transform)
        root = _root_in_torchrl(kind)
        return self if root is None else TorchRLTransform(self.transform, root)

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        changed = specs_by_trial(self, specs)
        if self._inverts():
            self._try_actions(specs)
        return changed

    def _try_actions(self, specs: EnvSpecs) -> None:
        """Raises TypeError if the inverse does not return valid actions of the environment."""
        for action in (specs.action.zero(), *(bounds_of(specs.action) or ())):
            try:
                inverted = copy.deepcopy(self)._inv_call(specs.blank(stepped=False).set("action", action.clone()))
            except Exception as error:
                raise TypeError(f"{self._no_action} ({error!r:.200})") from error
            inner = inverted.get("action", None) if isinstance(inverted, TensorDictBase) else None
            if inner is None or not specs.action.is_in(inner):
                raise TypeError(self._no_action)

    @property
    def _no_action(self) -> str:
        return (
            f"{self.kind} does not turn actions of the environment into such actions, and has no spec of the actions "
            "that it takes: use a transform of engram.envs.transforms with `in_keys_inv`, or a subclass of Transform "
            "with `transform_action_spec`; append a transform for replay buffers to the buffer"
        )

    def __repr__(self) -> str:
        return repr(self.transform)


def as_transform(transform: Any, invert: bool = False) -> Transform:
    """Converts a Transform, a callable or an object with an inverse into a Transform.

    Raises:
        TypeError: the object is not callable, is a class, or has an inverse that is not callable.
    """
    if isinstance(transform, Transform):
        is_own = transform.library_class() is Transform  # the others are warned of where they are used
        if is_own and transform.names_no_entry_to_invert() and not transform.in_keys:
            raise TypeError(
                f"{transform.kind} has `_inv_apply_transform`, and neither `in_keys_inv` nor `in_keys` that it could "
                "change: give it these, `_inv_call` or `inv`"
            )
        return InvertedTransform(transform) if invert else transform
    has_inverse = not _methods(transform).keys().isdisjoint(_INVERSES)
    if isinstance(transform, type) and (has_inverse or issubclass(transform, Transform)):
        raise TypeError(
            f"a transform is an object, and {transform.__name__} is a class: give {transform.__name__}(...)"
        )
    if has_inverse:
        return InvertedTransform(ForeignTransform(transform)) if invert else ForeignTransform(transform)
    if callable(transform):
        return CallableTransform(transform, invert)
    raise TypeError(f"a transform is a Transform or a callable, got a {type(transform).__name__}")


def _methods(
    transform: Any, names: tuple[str, ...] = ("__call__", "forward", *_INVERSES)
) -> dict[str, Callable[..., Any]]:
    """Those of a user's object that an adapter may call."""
    given = ((name, getattr(transform, name, None)) for name in names)
    return {name: method for name, method in given if callable(method)}


def _inverse_keys(transform: Any) -> tuple[list[Key], list[Key]]:
    """The keys that `_inv_apply_transform` writes, and those that it reads."""
    stored = as_keys(transform.in_keys_inv)
    given = getattr(transform, "out_keys_inv", None)
    return stored, as_keys(given) or stored


def _has_inverse(transform: Any) -> bool:
    """Whether the inverse changes anything: all TorchRL transforms have one, but most do nothing."""
    kind: Any = type(transform)
    root = _root_in_torchrl(kind)
    if root is None:
        return True
    if (parts := getattr(transform, "transforms", None)) is not None:
        return any(_has_inverse(part) for part in parts)
    return bool(transform.in_keys_inv) or not overrides(kind, root).isdisjoint(("inv", "_inv_call"))


def _are_equal(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> bool:
    pairs = [(a[name], b.get(name)) for name in a]
    return len(a) == len(b) and all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


@lru_cache(maxsize=128)
def _root_in_torchrl(kind: type) -> Any:
    """The base class of TorchRL's transforms; None if `kind` is not one of them."""
    of_torchrl = (c for c in reversed(kind.__mro__) if c.__module__.partition(".")[0] == "torchrl")
    return next((c for c in of_torchrl if "_inv_call" in vars(c)), None)
