"""The shares of a program's parts, from a run of its own in which the methods of each part are timed.

Time is counted for the part that was entered last, so that drawing a batch within an update is replay. Environments are
timed by their classes, alike in all libraries; a policy is every call of an `nn.Module` outside of the learner. What
remains is collecting: loops, lists of what was seen, vector wrappers of other libraries, and in a loop by hand also the
writes into its arrays.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from torch import nn

from benchmarks.programs.catch import Catch

ENVIRONMENT, POLICY, LEARNER, REPLAY, COLLECTION = "environment", "policy", "learner", "replay", "collection"
PARTS = (ENVIRONMENT, POLICY, LEARNER, REPLAY, COLLECTION)
ENVIRONMENTS = (TimeLimit, SyncVectorEnv, CartPoleVectorEnv, Catch)
Method = tuple[Any, str]


@dataclass
class Parts:
    """Objects and names of their methods, by part; `iterators` are methods of the replay that return an iterator."""

    learner: list[Method] = field(default_factory=list)
    replay: list[Method] = field(default_factory=list)
    iterators: list[Method] = field(default_factory=list)


class Clock:
    """Counts CPU time for the part that was entered last."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._part, self._since = COLLECTION, time.process_time()

    def enter(self, part: str) -> str:
        """Goes on with `part`; returns the part before."""
        now, before = time.process_time(), self._part
        self.seconds[before] += now - self._since
        self._part, self._since = part, now
        return before

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The function, whose time is that of `part`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._part == part or (part == POLICY and self._part == LEARNER):
                return function(*args, **kwargs)
            before = self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.enter(before)

        return call

    def timed_iterator(self, function: Callable[..., Any], part: str) -> Callable[..., Iterator[Any]]:
        """The function, the steps of whose iterator are of `part`."""

        def call(*args: Any, **kwargs: Any) -> Iterator[Any]:
            items = iter(function(*args, **kwargs))
            step = self.timed(lambda: next(items, None), part)
            return iter(step, None)

        return call


def measured_parts(make: Callable[[], Any]) -> dict[str, float]:
    """The share of each part in one run of the program, which is made with its environments already timed."""
    clock = Clock()
    with ExitStack() as patches:
        for cls in ENVIRONMENTS:
            for name in ("step", "reset"):
                timed = _method(clock.timed(getattr(cls, name), ENVIRONMENT))
                patches.enter_context(mock.patch.object(cls, name, timed))
        program = make()
        parts = program.parts()
        for part, methods in ((LEARNER, parts.learner), (REPLAY, parts.replay)):
            for owner, name in methods:
                patches.enter_context(mock.patch.object(owner, name, clock.timed(getattr(owner, name), part)))
        for owner, name in parts.iterators:
            patches.enter_context(mock.patch.object(owner, name, clock.timed_iterator(getattr(owner, name), REPLAY)))
        patches.enter_context(
            mock.patch.object(nn.Module, "__call__", _method(clock.timed(nn.Module.__call__, POLICY)))
        )
        clock.enter(COLLECTION)
        clock.seconds.clear()
        program.run()
        clock.enter(COLLECTION)
    total = sum(clock.seconds.values())
    return {part: clock.seconds[part] / total for part in PARTS}


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function, so that it is bound to objects of the class."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return method
