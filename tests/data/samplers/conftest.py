"""Of the contract of samplers every two of class, test and value meet in the quick cases; the others are long."""

from __future__ import annotations

import pytest

from contracts.pairwise import pairwise
from engram.testing import SamplerContract


def _factors(item: pytest.Function) -> dict[str, str]:
    values = {name: repr(value) for name, value in item.callspec.params.items()}
    return {"class": f"{item.path} {item.cls.__qualname__}", "test": item.originalname, **values}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    contract = [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and isinstance(item.cls, type)
        and issubclass(item.cls, SamplerContract)
        and hasattr(item, "callspec")
        and not item.get_closest_marker("long")
    ]
    for k in set(range(len(contract))) - set(pairwise([_factors(item) for item in contract])):
        contract[k].add_marker("long")
