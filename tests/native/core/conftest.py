"""The tests of this folder need numpy and no torch: wheels are tried with them on Pythons without a torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from native.core.support import use_arrays


@pytest.fixture(autouse=True, scope="module")
def arrays_for_tensors() -> Iterator[None]:
    """The core returns arrays, and whatever it returned before to the tests of other folders."""
    use_arrays()
    yield
    layout = sys.modules.get("engram.store.layout")
    if layout is not None:
        layout.use_torch()
