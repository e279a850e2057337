"""Either of the two packages that a client may choose, and the sentences that a line of a client's code stands for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

#: The parts that both packages have under one name.
PARTS = ("data", "envs", "collectors")


@dataclass(frozen=True)
class Package:
    """`rl.data`, `rl.envs` and `rl.collectors` of one of them; `rl.module("data.replay_buffers")` is any other."""

    name: str

    def module(self, path: str) -> ModuleType:
        return importlib.import_module(f"{self.name}.{path}")

    def __getattr__(self, part: str) -> Any:
        if part not in PARTS:
            raise AttributeError(part)
        return self.module(part)


@dataclass(frozen=True)
class Sentence:
    """One sentence of what clients rely on, and the lines of a client that rely on it."""

    text: str
    lines: Callable[[Package], None]
    #: Why TorchRL's own does not do it, where it does not.
    not_in_torchrl: str | None


SENTENCES: list[Sentence] = []


def sentence(text: str, *, not_in_torchrl: str | None = None) -> Callable[[Callable[[Package], None]], Callable]:
    """Registers a function that takes a `Package` and raises where the sentence is not true of it."""

    def register(lines: Callable[[Package], None]) -> Callable[[Package], None]:
        SENTENCES.append(Sentence(text, lines, not_in_torchrl))
        return lines

    return register
