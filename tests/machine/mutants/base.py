"""How a part is made wrong by one."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

Patch = pytest.MonkeyPatch


class Mutant(NamedTuple):
    """`plant` patches it in; the machine runs with these parts."""

    plant: Callable[[Patch], None]
    storage: str = "memory"
    sampler: str = "random"
    writers: tuple[str, ...] = ("round robin",)
    envs: int = 0
    limit: str = "none"


def around(owner: Any, name: str, changed: Callable[..., Any]) -> Callable[[Patch], None]:
    """Calls `changed(original, self, *args)` in place of a method."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return changed(lambda *a, **k: original(self, *(a or args), **{**kwargs, **k}), self, *args)

    return lambda patch: patch.setattr(owner, name, method)


def is_found(run: Callable[[], None]) -> bool:
    """Whether a run of the machine fails, and not because the mutant itself is broken."""
    try:
        run()
    except (Exception, pytest.fail.Exception) as error:  # a mutant may show itself as any error
        return Path(traceback.extract_tb(error.__traceback__)[-1].filename).parent != Path(__file__).parent
    return False
