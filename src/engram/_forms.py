"""The forms of values that were saved: of which kind, and in which range, each of them may be.

A form is called with a value, and raises a WrongFormError where it is another one.
"""

from __future__ import annotations

import itertools
import reprlib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Form: TypeAlias = Callable[[Any], None]

MOST_COUNTED = (1 << 62) - 1  # sequences, and whatever counts rows, are below 2**62
_DEEPEST = 100
_PLAIN = (type(None), bool, int, float, str)


class WrongFormError(ValueError):
    """A value that was saved is of another kind, or lies in another range, than it can have been saved with."""

    def __init__(self, value: Any, allowed: str) -> None:
        self._place, self._is_wrong = "", f"is {shown(value)}; it must be {allowed}"
        super().__init__(f"a saved value {self._is_wrong}")

    def within(self, place: str) -> WrongFormError:
        """The same error of a value that stands at a place; returns itself."""
        self._place = f"{place}{self._place}"
        return self

    def named(self, name: str) -> WrongFormError:
        """The same error of a value that stands in what has this name; returns itself."""
        place = self._place.removeprefix(".")
        self.args = (f"{f'{place} in {name}' if place else name} {self._is_wrong}",)
        return self


def check(form: Form, value: Any, name: str) -> None:
    """Raises a WrongFormError, which has the name, where a value has another form."""
    try:
        form(value)
    except WrongFormError as error:
        raise error.named(name) from None


def shown(value: Any) -> str:
    """A value of any size and depth on one short line."""
    return f"{' '.join(reprlib.repr(value).split()):.80}"


def anything(value: Any) -> None:
    """Any value."""


def boolean(value: Any) -> None:
    """A bool."""
    if type(value) is not bool:
        raise WrongFormError(value, "a bool")


def text(value: Any) -> None:
    """A string."""
    if type(value) is not str:
        raise WrongFormError(value, "a string")


def text_or_integer(value: Any) -> None:
    """A string or an int: a step of a path."""
    if type(value) not in (str, int):
        raise WrongFormError(value, "a string or an integer")


def number(value: Any) -> None:
    """An int or a float."""
    if type(value) not in (int, float):
        raise WrongFormError(value, "a number")


def key(value: Any) -> None:
    """A key of a TensorDict."""
    parts = value if isinstance(value, tuple | list) else (value,)
    if set(map(type, parts)) != {str}:
        raise WrongFormError(value, "a key, or a tuple of keys")


def path(value: Any) -> None:
    """The steps of a key of a TensorDict."""
    if not isinstance(value, list | tuple) or set(map(type, value)) != {str}:
        raise WrongFormError(value, "a list of keys")


def plain(value: Any, depth: int = 0) -> None:
    """None, a bool, a number, a string, and lists, tuples and dicts of these."""
    if type(value) in _PLAIN:
        return
    if not isinstance(value, list | tuple | dict):
        raise WrongFormError(value, "a number, a string, a bool, None, or consist of such")
    if depth > _DEEPEST:
        raise WrongFormError(value, f"nested at most {_DEEPEST} deep")
    at: Any = None
    try:
        for at, member in value.items() if isinstance(value, dict) else enumerate(value):
            if type(at) not in _PLAIN:
                raise WrongFormError(member, "under a string or a number")
            plain(member, depth + 1)
    except WrongFormError as error:
        raise error.within(f".{at}" if isinstance(value, dict) else f"[{at}]") from None


def integer(least: int = 0, most: int = MOST_COUNTED) -> Form:
    """An int in a range."""

    def form(value: Any) -> None:
        if type(value) is not int or not least <= value <= most:
            raise WrongFormError(value, f"an integer from {least} to {most}")

    return form


def one_of(*values: Any) -> Form:
    """One of some values."""

    def form(value: Any) -> None:
        for one in values:
            if type(value) is type(one) and value == one:
                return
        raise WrongFormError(value, " or ".join(map(repr, values)))

    return form


def nullable(form: Form) -> Form:
    """None, or a value of a form."""

    def nullable_form(value: Any) -> None:
        if value is not None:
            form(value)

    return nullable_form


def list_of(form: Form, length: int | None = None) -> Form:
    """A list, or a tuple, of values of one form; of so many, if `length` says it."""
    return _list(itertools.repeat(form), "a list" if length is None else f"a list of {length}", length)


def fields(*forms: Form) -> Form:
    """A list, or a tuple, of as many values, each of its own form."""
    return _list(forms, f"a list of {len(forms)}", len(forms))


def _list(forms: Iterable[Form], allowed: str, length: int | None) -> Form:
    def form(value: Any) -> None:
        if not isinstance(value, list | tuple) or length not in (None, len(value)):
            raise WrongFormError(value, allowed)
        done = 0
        try:
            for member, form_of_member in zip(value, forms, strict=False):
                form_of_member(member)
                done += 1
        except WrongFormError as error:
            raise error.within(f"[{done}]") from None

    return form


def record(required: dict[str, Form], optional: dict[str, Form] | None = None) -> Form:
    """A dict that has the required entries, and may have the optional ones; all others are passed over."""
    entries = {**required, **(optional or {})}

    def form(value: Any) -> None:
        if not isinstance(value, dict):
            raise WrongFormError(value, "a dict")
        name = ""
        try:
            for name, form_of_entry in entries.items():
                if name in value:
                    form_of_entry(value[name])
        except WrongFormError as error:
            raise error.within(f".{name}") from None
        if missing := [name for name in required if name not in value]:
            raise WrongFormError(value, f"a dict with {', '.join(map(repr, missing))}")

    return form


def arguments(allowed: dict[str, Form]) -> Form:
    """A dict of arguments by name: any of those that are allowed, and no others."""
    entries = record({}, allowed)

    def form(value: Any) -> None:
        entries(value)
        for name in value:
            if name not in allowed:
                raise WrongFormError(name, f"one of {', '.join(allowed)}").within(f".{shown(name)}")

    return form


def mapping_of(form: Form) -> Form:
    """A dict from strings to values of one form."""

    def mapping_form(value: Any) -> None:
        if not isinstance(value, dict) or not set(map(type, value)) <= {str}:
            raise WrongFormError(value, "a dict from strings")
        at = ""
        try:
            for name, member in value.items():
                at = name
                form(member)
        except WrongFormError as error:
            raise error.within(f".{at}") from None

    return mapping_form


def tensor(*dtypes: torch.dtype, ndim: int | None = None) -> Form:
    """A dense tensor with memory of one of these dtypes, of any if there are none."""

    def form(value: Any) -> None:
        torch: Any = sys.modules.get("torch")  # which is there where there is a tensor, and takes a second to load
        fits = torch is not None and isinstance(value, torch.Tensor)
        fits = fits and value.layout is torch.strided and not value.is_meta
        if not fits or (dtypes and value.dtype not in dtypes) or ndim not in (None, value.ndim):
            kinds = f" {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}" if dtypes else ""
            raise WrongFormError(value, f"a tensor{kinds}{'' if ndim is None else f' of {ndim} dimensions'}")

    return form
