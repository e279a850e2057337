"""The contract of storages runs on few of all combinations of settings and data: every pair of them meets."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from contracts.pairwise import pairwise


def _factors(item: pytest.Function) -> dict[str, Hashable]:
    """The test, its parameters, and the settings of its class."""
    test = item.function.__qualname__
    parameters = getattr(item, "callspec", None)
    values = {} if parameters is None else {f"{test} {name}": repr(value) for name, value in parameters.params.items()}
    return {"test": test, **values, **item.cls.settings}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of classes with `settings`: leaves out the combinations whose pairs all occur in others."""
    contract = [item for item in items if hasattr(getattr(item, "cls", None), "settings")]
    spare = set(contract) - {contract[k] for k in pairwise([_factors(item) for item in contract])}
    config.hook.pytest_deselected(items=[item for item in items if item in spare])
    items[:] = [item for item in items if item not in spare]
