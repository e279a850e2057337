"""Protections taken out, one at a time: `torture.py --plant NAME` must find what they protect from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engram import _native
from processes import held_lanes

_OPTIONS = ["--memory", "shared", "--kills", "--until-fault", "--seconds", "60"]
_TINY, _SMALL = [*_OPTIONS, "--capacity", "128"], [*_OPTIONS, "--capacity", "2000"]


def _no_look_after_the_copy() -> None:
    gather: Callable[..., Any] = _native.Store.gather

    def believing(*args: Any, **kwargs: Any) -> Any:
        batch, _, _, numbers = gather(*args, **kwargs)
        return batch, None, None, numbers

    _native.Store.gather = believing  # type: ignore[method-assign,assignment]


def _no_look_at_slices() -> None:
    _native.SliceBatch.stale = lambda self, store: []  # type: ignore[method-assign,assignment]


def _no_seams() -> None:
    _native.Store.mark_seam = lambda self, lane: None  # type: ignore[method-assign,assignment]


def _no_lock_of_the_lane() -> None:
    held_lanes.take_lane = lambda locks, lane: True


def _no_generations() -> None:
    change: Callable[..., Any] = _native.Priorities.set

    def whatever_is_there(self: Any, store: Any, slots: Any, priorities: Any, generations: Any = None) -> Any:
        return change(self, store, slots, priorities, None)

    _native.Priorities.set = whatever_is_there  # type: ignore[method-assign,assignment]


#: What is taken out, and a run that finds it.
PLANTS: dict[str, tuple[Callable[[], None], list[str]]] = {
    "look after the copy": (_no_look_after_the_copy, [*_TINY, "--kinds", "random"]),
    "look at slices": (_no_look_at_slices, [*_TINY, "--kinds", "slices by seams"]),
    "seams": (_no_seams, [*_SMALL, "--kinds", "slices by seams"]),
    "lock of the lane": (_no_lock_of_the_lane, [*_SMALL, "--kinds", "random"]),
    "generations": (_no_generations, [*_TINY, "--kinds", "prioritized"]),
}
