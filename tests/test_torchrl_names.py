"""Arguments and members of TorchRL's classes (`torchrl_names.txt`): each is here, or is refused with advice.

A line of the list names a class or function, and then what classes of TorchRL 0.14 have that engram's did not have when
the list was made: constructor arguments ("init lacks"), members, and arguments of methods.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import engram.collectors
import engram.data
import engram.envs
import engram.specs
from contracts.each import each
from engram._advice import ARGUMENTS, _Absent

LIST = Path(__file__).with_name("torchrl_names.txt")


class Line(NamedTuple):
    arguments: list[str]
    members: list[str]
    methods: dict[str, list[str]]


def names_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def lines() -> Iterator[tuple[str, Line]]:
    for line in LIST.read_text().splitlines():
        owner, rest = line.split(": ", 1)
        arguments = re.search(r"init lacks \[(.*?)\]", rest) or (re.match(r"lacks \[(.*?)\]", rest))
        members = re.search(r"lacks members \[(.*?)\]", rest)
        methods = re.search(r"methods lacking args \[(.*)\]", rest)
        yield (
            owner,
            Line(
                names_in(arguments[1]) if arguments else [],
                names_in(members[1]) if members else [],
                {name: names_in(args) for name, args in re.findall(r"(\w+)\((.*?)\)", methods[1])} if methods else {},
            ),
        )


NAMES = dict(lines())
CLASSES = [name for name in NAMES if not name.endswith("()")]


def public(name: str) -> Any:
    modules = (engram.data, engram.envs, engram.collectors, engram.specs)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def bound_names(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def advice_on_argument(cls: type, argument: str) -> tuple[tuple[Any, ...], str] | None:
    tables = (ARGUMENTS.get(owner.__name__, {}) for owner in cls.__mro__)
    return next((table[argument] for table in tables if argument in table), None)


def test_the_list_is_read():
    assert "service_backend" in NAMES["ReplayBuffer"].arguments
    assert "query" in NAMES["ReplayBuffer"].members


@each("name", [name for name in CLASSES if NAMES[name].arguments])
def test_a_constructor_takes_an_argument_or_refuses_it_with_advice(name):
    cls = public(name)
    for argument in NAMES[name].arguments:
        if argument in bound_names(cls.__init__):
            continue
        advice = advice_on_argument(cls, argument)
        assert advice, f"{name}({argument}=) is not known"
        allowed, instead = advice
        if allowed:
            with pytest.raises(TypeError, match=re.escape(instead)):
                cls(**{argument: object()})


source_of = functools.cache(inspect.getsource)


def is_set_on_objects(cls: type, member: str) -> bool:
    """Whether a method of the class sets such an attribute."""
    own = [owner for owner in cls.__mro__ if owner.__module__.startswith("engram.")]
    return any(re.search(rf"\bself\.{member}\b[^\n=(\[]*=(?!=)", source_of(owner)) for owner in own)


@each("name", [name for name in CLASSES if NAMES[name].members])
def test_a_member_is_there_or_an_attribute_error_advises(name):
    cls = public(name)
    for member in NAMES[name].members:
        found = next((vars(owner)[member] for owner in cls.__mro__ if member in vars(owner)), None)
        if isinstance(found, _Absent):
            assert not hasattr(cls, member)
            continue
        assert found is not None or hasattr(cls, member) or is_set_on_objects(cls, member), f"{name}.{member}"


@each("name", [name for name in NAMES if NAMES[name].methods or name.endswith("()")])
def test_a_method_takes_its_arguments_by_name(name):
    line = NAMES[name]
    if name.endswith("()"):
        assert set(line.arguments) <= bound_names(public(name.removesuffix("()")))
    for method, arguments in line.methods.items():
        missing = set(arguments) - bound_names(getattr(public(name), method))
        assert not missing, f"{name}.{method} does not take {sorted(missing)}"
