"""Torch with and without the exchange API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor

from engram import _native
from native.support import EXCHANGE


@pytest.fixture
def without_exchange() -> Iterator[None]:
    """What a torch without the DLPack exchange API sees."""
    _native.use_torch(Tensor, None)
    yield
    _native.use_torch(Tensor, EXCHANGE)
