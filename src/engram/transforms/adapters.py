"""Adapters: callables, and objects in TorchRL's form, as transforms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tensordict import TensorDictBase

from engram._overrides import overrides
from engram.pytree import Key, as_keys, copy_containers, has_batch_size, require_tensor, set_entry
from engram.transforms.base import InvertedTransform, StreamTraits, Transform, TransformStep, WriteRequest
from engram.transforms.env_specs import EnvSpecs, bounds_of, specs_by_trial
from engram.transforms.roles import IN_BUFFERS, Role
from engram.transforms.torchrl import TorchRLTransform

_INVERSES = ("inv", "_inv_call", "_inv_apply_transform")


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

    The buffer makes one write at a time. After a refused write it restores the object's attributes (also those of
    modules in a module; but not tensors that were changed in place). If the object holds steps back, attributes that
    its inverse has changed are reset when the buffer is emptied or sent to a process, and are saved with the buffer if
    they consist of tensors, TensorDicts, numbers and strings.

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

    # ---- state ----
    @property
    def _owner(self) -> Any:
        return self.transform

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


def _methods(transform: Any) -> dict[str, Callable[..., Any]]:
    """Those of a user's object that an adapter may call."""
    given = ((name, getattr(transform, name, None)) for name in ("__call__", "forward", *_INVERSES))
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


@lru_cache(maxsize=128)
def _root_in_torchrl(kind: type) -> Any:
    """The base class of TorchRL's transforms; None if `kind` is not one of them."""
    of_torchrl = (c for c in reversed(kind.__mro__) if c.__module__.partition(".")[0] == "torchrl")
    return next((c for c in of_torchrl if "_inv_call" in vars(c)), None)
