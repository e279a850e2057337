"""A whole contract in one test, where a test of its own for each of its sentences costs more than what it looks at."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from itertools import product
from typing import Any

import pytest
import torch

#: What a test asks for besides its parameters: by name, how it is made for one test.
Fixtures = Mapping[str, Callable[[], AbstractContextManager[Any]]]


def contracts_in(module: Mapping[str, Any], base: type) -> dict[str, type]:
    """The classes of a module that implement this contract, of which pytest collects no tests by itself."""
    found = {
        name: cls
        for name, cls in module.items()
        if name.startswith("Test") and isinstance(cls, type) and issubclass(cls, base)
    }
    for cls in found.values():
        cls.__test__ = False  # type: ignore[attr-defined]  # what pytest asks
    return found


def assert_contract(contract: Any, fixtures: Fixtures, turn: int | None = None) -> int:
    """Runs the tests of a contract and returns how many passed; the error names each test and case that failed.

    With a `turn`, a number for each contract, only one case of each test: they take turns.
    """
    passed, wrong = 0, list[tuple[str, BaseException]]()
    for name in sorted(name for name in dir(contract) if name.startswith("test_")):
        test = getattr(contract, name)
        cases = list(_cases(test))
        for case in cases if turn is None else [cases[turn % len(cases)]]:
            random.seed(0)
            torch.manual_seed(0)
            try:
                with ExitStack() as stack:
                    for asked in _fixtures_of(test, case):
                        made = stack.enter_context(fixtures[asked]())
                        if asked in inspect.signature(test).parameters:
                            case = {**case, asked: made}
                    test(**case)
                passed += 1
            except pytest.skip.Exception:
                pass
            except (Exception, pytest.fail.Exception) as error:
                wrong.append((f"{name} {case or ''}", error))
    if wrong:
        told = [f"{name}: {type(error).__name__}: {error}" for name, error in wrong]
        raise AssertionError("\n".join([f"{len(wrong)} of {len(wrong) + passed} tests failed", *told])) from wrong[0][1]
    return passed


def _cases(test: Any) -> Iterator[dict[str, Any]]:
    """The product of its parameters."""
    factors = []
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = mark.args
            names = [part.strip() for part in names.split(",")] if isinstance(names, str) else list(names)
            factors.append([dict(zip(names, value if len(names) > 1 else (value,), strict=True)) for value in values])
    for row in product(*factors):
        yield {name: value for part in row for name, value in part.items()}


def _fixtures_of(test: Any, case: Mapping[str, Any]) -> list[str]:
    used = [name for mark in getattr(test, "pytestmark", ()) if mark.name == "usefixtures" for name in mark.args]
    return [*used, *(name for name in inspect.signature(test).parameters if name not in case)]
