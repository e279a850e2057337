"""Prefetch whose threads are done whenever a step ends: what a batch holds must not hang on the scheduler."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterator
from typing import Any

_running: list[concurrent.futures.Future[Any]] = []


class PromptPool(concurrent.futures.ThreadPoolExecutor):
    """Knows what it was given."""

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        future = super().submit(*args, **kwargs)
        _running.append(future)
        return future


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """A block after which nothing is being prepared."""
    yield
    while _running:
        concurrent.futures.wait([_running.pop()])
