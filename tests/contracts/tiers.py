"""Which cases run in CI and which at night, and the order of quick and deep tests in one run: quick ones first."""

from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any, TypeVar

import pytest

Item = TypeVar("Item")


def in_ci(cases: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    """The cases for `parametrize`: those that are kept stay in their tier, the others are long."""
    every, some = list(cases), list(kept)
    assert some and all(case in every for case in some), f"{some} are not among {every}"
    return _marked(every, some, pytest.mark.long)


def in_quick(cases: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    """The cases for `parametrize`: those that are kept stay in their tier, the others are deep.

    For cases that are alike, as seeds of one program: `make test` has some, and CI all.
    """
    every, some = list(cases), list(kept)
    assert some and all(case in every for case in some), f"{some} are not among {every}"
    return _marked(every, some, pytest.mark.deep)


def _marked(cases: list[Any], kept: list[Any], mark: pytest.MarkDecorator) -> list[Any]:
    return [
        case if case in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for case in cases
    ]


def in_turns(*factors: Collection[Any]) -> list[Any]:
    """All rows of a product; CI has those in which the values of each factor take turns, so that every value is in one.

    Fewer than pairs: for factors that have nothing to do with each other.
    """
    values = [list(factor) for factor in factors]
    turns = range(max(map(len, values)))
    return in_ci(product(*values), [tuple(each[k % len(each)] for each in values) for k in turns])


def in_tiers(quick: Sequence[Item], deep: Sequence[Item], longest: Sequence[Item], workers: int) -> list[Item]:
    """The order of all tests for pytest-xdist's `worksteal`, which gives each worker an equal part of the list.

    Each part is quick tests, some of the longest deep ones, and other deep ones: quick tests come first on every
    worker, and at the end no worker waits for a long test of another. Parts keep neighbours together, as tests of a
    file share fixtures. `longest` are some of `deep`.
    """
    first = set(longest)
    rest = [item for item in deep if item not in first]
    order: list[Item] = []
    left, quick_begin = len(quick) + len(deep), 0
    for worker in range(workers):
        size = left // (workers - worker)
        left -= size
        slow = [*longest[worker::workers], *rest[len(rest) * worker // workers : len(rest) * (worker + 1) // workers]]
        quick_end = len(quick) if worker == workers - 1 else quick_begin + max(0, size - len(slow))
        order += [*quick[quick_begin:quick_end], *slow]
        quick_begin = quick_end
    return order
