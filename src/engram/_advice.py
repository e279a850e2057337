"""Names of TorchRL that this library does not have, and what to use instead of each.

`@advised` puts them into a class: an argument that would change nothing here is accepted, any other is a TypeError with
advice, and reading a member is an AttributeError with advice (`hasattr` is False).

Example:
    >>> from engram.data import ReplayBuffer
    >>> ReplayBuffer(service_backend="direct").query
    Traceback (most recent call last):
        ...
    AttributeError: 'ReplayBuffer' object has no attribute 'query': choose from `rb[:]`; a later release has it
    >>> ReplayBuffer(service_backend="ray")
    Traceback (most recent call last):
        ...
    TypeError: ReplayBuffer(service_backend='ray'): allowed are None and 'direct'; use RayReplayBuffer
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tensordict import TensorDict

_Class = TypeVar("_Class", bound=type)
_ANY: tuple[Any, ...] = ()  # every value of the argument is accepted and changes nothing

#: By class: the values of an argument that are accepted without effect, and what to do instead of giving another.
ARGUMENTS: dict[str, dict[str, tuple[tuple[Any, ...], str]]] = {
    # ---- specs ----
    "Composite": {
        "data_cls": ((None, TensorDict), "values are TensorDicts: convert them by data_cls.from_tensordict(value)"),
        "step_mdp_static": ((False,), "keep entries that no step changes out of step_mdp by its exclude arguments"),
    },
    "MultiCategorical": {"remove_singleton": ((True, False), "values have the spec's shape: squeeze them yourself")},
    "OneHot": {"use_register": ((False,), "encode the number of a choice; keep other names of it in a dict")},
    "MultiOneHot": {"use_register": ((False,), "encode the numbers of choices; keep other names of them in a dict")},
    # ---- buffers and their parts ----
    "ReplayBuffer": {"service_backend": ((None, "direct"), "use RayReplayBuffer")},
    # ---- environments ----
    # ---- transforms ----
    # ---- collectors ----
}

#: By class, whose subclasses inherit them: members, and what to use instead.
MEMBERS: dict[str, dict[str, str]] = {
    # ---- specs ----
    "Spec": {
        "memoize_encode": "encode has no table to fill: leave the call out",
        "erase_memoize_cache": "encode has no table to fill: leave the call out",
        "make_neg_dim": "sizes are known here: leave the call out",
        "implements_for_spec": "torch.stack takes specs, other functions of torch do not",
    },
    # ---- buffers and their parts ----
    "ReplayBuffer": {"query": "choose from `rb[:]`; a later release has it"},
    # ---- environments ----
    # ---- transforms ----
    # ---- collectors ----
}


def advised(cls: _Class) -> _Class:
    """A class decorator: gives the class the advice that the tables above have under its name."""
    if arguments := ARGUMENTS.get(cls.__name__):
        cls.__init__ = _accepting(cls.__init__, cls.__name__, arguments)  # type: ignore[misc]
    for name, instead in MEMBERS.get(cls.__name__, {}).items():
        if name in vars(cls):
            raise TypeError(f"{cls.__name__} has {name!r}: delete the advice")
        setattr(cls, name, _Absent(name, instead))
    return cls


def absent_member(owner: type, name: str) -> AttributeError:
    """The error of a class that has a `__getattr__` of its own, for a name that this did not find."""
    found = next((vars(cls)[name] for cls in owner.__mro__ if name in vars(cls)), None)
    return found.error(owner) if isinstance(found, _Absent) else AttributeError(_has_no(owner, name))


def _has_no(owner: type, name: str) -> str:
    return f"{owner.__name__!r} object has no attribute {name!r}"


class _Absent:
    """A class attribute that is not there: it may be set on an object and overridden in a subclass."""

    def __init__(self, name: str, instead: str) -> None:
        self.name, self.instead = name, instead

    def error(self, owner: type) -> AttributeError:
        return AttributeError(f"{_has_no(owner, self.name)}: {self.instead}")

    def __get__(self, instance: Any, owner: type) -> Any:
        raise self.error(owner)


def _accepting(
    init: Callable[..., None], name: str, arguments: Mapping[str, tuple[tuple[Any, ...], str]]
) -> Callable[..., None]:
    """A constructor that also takes the arguments without effect."""

    @functools.wraps(init)
    def accepting(self: Any, *args: Any, **kwargs: Any) -> None:
        for argument in arguments.keys() & kwargs.keys():
            allowed, instead = arguments[argument]
            value = kwargs.pop(argument)
            if allowed and not any(value is one or value == one for one in allowed if type(value) is type(one)):
                choices = " and ".join(map(repr, allowed))
                verb = "is" if len(allowed) == 1 else "are"
                raise TypeError(f"{name}({argument}={value!r:.60}): allowed {verb} {choices}; {instead}")
        init(self, *args, **kwargs)

    return accepting
