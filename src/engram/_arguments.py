"""The arguments that parts of a buffer were made with, kept so that a checkpoint can say them."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
import torch
from typing_extensions import Self

from engram import _forms as forms
from engram._advice import refuse_unknown_arguments

_MOST_VALUES = 4096  # of a tensor that is kept
_DEEPEST = 30  # of arguments in arguments
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_PLAIN = (type(None), bool, int, float, str)


#: The classes of parts that are the library's own (`class X(Base, built_in=True)`): loading a state assigns attributes,
#: and changes none in place; an exception at a saved state means that this is damaged; `sample` of a sampler takes the
#: lock, and gives slots where a storage has one dimension. None of this is guaranteed for a class that a user derives
#: from one.
BUILT_IN: set[type] = set()


class Part:
    """A base whose own classes say that they are the library's: `class X(Base, built_in=True)`."""

    def __init_subclass__(cls, *, built_in: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if built_in:
            BUILT_IN.add(cls)


class KeepsArguments(Part):
    """A base whose own classes remember the constructor's arguments as far as they can be saved.

    Functions and other objects are not kept, only what they were.
    """

    _arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    #: The name and place of an argument that is not kept: only a program may choose it, and no file.
    never_saved: ClassVar[tuple[str, int] | None] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if kwargs:
            refuse_unknown_arguments(cls, cls.__init__, kwargs)
        self = super().__new__(cls)
        if cls in BUILT_IN:
            self.__dict__["_arguments"] = tuple(map(_kept, args)), {name: _kept(v) for name, v in kwargs.items()}
        return self


class _NotKept:
    """In the place of an argument that cannot be saved."""

    def __init__(self, what: str) -> None:
        self.what = what


def _kept(value: Any) -> Any:
    """A value as it is kept: what can be saved, and other parts, which describe themselves."""
    if type(value) in _PLAIN or isinstance(value, torch.dtype | KeepsArguments):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple, torch.Size):
        return [*map(_kept, value)] if type(value) is list else tuple(map(_kept, value))
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _kept(member) for key, member in value.items()}
    if type(value) is torch.Tensor and value.numel() <= _MOST_VALUES:
        return value.detach().cpu().clone()
    return _NotKept(f"a {type(value).__name__}" + (f" {value.__name__}" if hasattr(value, "__name__") else ""))


def describe(part: Any) -> dict[str, Any]:
    """A part as a checkpoint describes it: `kind`, and `arguments`, None where it is a class of the user's own."""
    kept = vars(part).get("_arguments") if type(part) in BUILT_IN else None
    arguments = None
    if kept is not None:
        args, kwargs = kept
        arguments = {"args": [*map(_saved, args)], "kwargs": {name: _saved(value) for name, value in kwargs.items()}}
    return {"kind": type(part).__name__, "arguments": arguments}


def _saved(value: Any) -> Any:
    """An argument in a form that can be saved, and that `restored` reads."""
    if isinstance(value, torch.dtype):
        return {"of": "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, KeepsArguments):
        return {"of": "part", "value": describe(value)}
    if isinstance(value, _NotKept):
        return {"of": "missing", "value": value.what}
    if type(value) is dict:
        return {"of": "dict", "value": {key: _saved(member) for key, member in value.items()}}
    if type(value) in (list, tuple):
        return type(value)(map(_saved, value))
    return value


class MissingPartError(Exception):
    """A part cannot be made from its description; the message says why."""


def restored(saved: Any, kinds: dict[str, Any]) -> Any:
    """The part that a description describes.

    Args:
        saved: what `describe` returned, in the form of `DESCRIPTION`.
        kinds: the classes that may be made, by name.

    Raises:
        MissingPartError: it was made with a function or another object that is not saved, or its class is another.
    """
    kind, arguments = saved["kind"], saved["arguments"]
    if kind not in kinds or arguments is None:
        raise MissingPartError(f"{kind}, a class of your own")
    try:
        args = [_value(value, kinds) for value in arguments["args"]]
        kwargs = {name: _value(value, kinds) for name, value in arguments["kwargs"].items()}
    except MissingPartError as error:
        raise MissingPartError(f"{kind}, which was made with {error}") from None
    name, place = kinds[kind].never_saved or (None, len(args))
    if name in kwargs or len(args) > place:
        raise MissingPartError(f"{kind}, which was made with {name}=")
    try:
        return kinds[kind](*args, **kwargs)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise MissingPartError(f"{kind}, whose saved arguments are refused here ({error})") from error


def _value(saved: Any, kinds: dict[str, Any]) -> Any:
    if type(saved) in (list, tuple):
        return type(saved)(_value(member, kinds) for member in saved)
    if type(saved) is not dict:
        return saved
    of, value = saved["of"], saved["value"]
    if of == "dtype":
        return _DTYPES[value]
    if of == "dict":
        return {key: _value(member, kinds) for key, member in value.items()}
    if of == "part":
        return restored(value, kinds)
    raise MissingPartError(value)


def _saved_value(value: Any, depth: int = 0) -> None:
    """The form of what `_saved` returns."""
    if type(value) in _PLAIN:
        return
    if isinstance(value, torch.Tensor):
        forms.tensor()(value)
        if value.numel() > _MOST_VALUES:
            raise forms.WrongFormError(list(value.shape), f"the shape of {_MOST_VALUES} values or fewer")
        return
    if depth > _DEEPEST:
        raise forms.WrongFormError(value, f"nested at most {_DEEPEST} deep")
    below = functools.partial(_saved_value, depth=depth + 1)
    if type(value) in (list, tuple):
        forms.list_of(below)(value)
        return
    forms.record({"of": forms.one_of("dtype", "part", "missing", "dict"), "value": forms.anything})(value)
    of: dict[str, forms.Form] = {
        "dtype": forms.one_of(*_DTYPES),
        "part": functools.partial(_description, depth=depth + 1),
        "missing": forms.text,
        "dict": forms.mapping_of(below),
    }
    forms.record({"value": of[value["of"]]})(value)


def _description(value: Any, depth: int = 0) -> None:
    below = functools.partial(_saved_value, depth=depth)
    arguments = forms.record({"args": forms.list_of(below), "kwargs": forms.mapping_of(below)})
    forms.record({"kind": forms.text, "arguments": forms.nullable(arguments)})(value)


#: The form of what `describe` returns.
DESCRIPTION: forms.Form = _description
