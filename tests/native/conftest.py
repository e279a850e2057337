"""Torch with and without the exchange API."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from engram import _native

if os.environ.get("ENGRAM_SANITIZED") and "sanitized" not in _native.__file__:
    raise pytest.UsageError(f"the sanitized build was asked for, and {_native.__file__} was found")


@pytest.fixture
def without_exchange() -> Iterator[None]:
    """What a torch without the DLPack exchange API sees."""
    from engram.store.layout import use_torch  # late: the tests in `core` run where there is no torch

    use_torch(None)
    yield
    use_torch()
