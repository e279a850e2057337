"""The generators of buffers, as they are saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engram._generator import Generator, is_state
from engram._system import set_state, state_of

_KINDS = ("a torch.Generator", "an engram.Generator")


class SavedGenerator(NamedTuple):
    """A buffer's own generator; None: it has none."""

    own: torch.Generator | Generator | None

    def state(self) -> Any:
        """Where it stands; None without one."""
        return None if self.own is None else state_of(self.own)

    def load(self, state: Any) -> None:
        """Goes on where a generator stood; without one of its own, or a state, nothing changes."""
        if state is not None and self.own is not None:
            set_state(self.own, state)

    def check(self, state: Any) -> None:
        """An error where `load` would be one."""
        if state is not None and self.own is not None:
            # Into one of the same kind, which stands anywhere.
            is_ours = isinstance(self.own, Generator)
            set_state(Generator() if is_ours else torch.Generator(device=self.own.device), state)

    def differences(self, state: Any) -> list[str]:
        """What of a saved state is not that of this kind of generator."""
        if self.own is None or not isinstance(state, Tensor) or len(state) < 16:
            return []
        mine, theirs = isinstance(self.own, Generator), is_state(state)
        return [] if mine == theirs else [f"the buffer draws from {_KINDS[mine]} here, from {_KINDS[theirs]} there"]


class SavedGenerators(NamedTuple):
    """The generator of an ensemble's own, and those of its members, which are buffers."""

    own: SavedGenerator
    members: Sequence[Any]

    def state(self) -> Any:
        own, members = self.own.state(), [each._saved_generator.state() for each in self.members]
        return own if all(state is None for state in members) else {"own": own, "members": members}

    def load(self, state: Any) -> None:
        for each, saved in self._each(state):
            each.load(saved)

    def check(self, state: Any) -> None:
        for each, saved in self._each(state):
            each.check(saved)

    def differences(self, state: Any) -> list[str]:
        return [difference for each, saved in self._each(state) for difference in each.differences(saved)]

    def _each(self, state: Any) -> Iterator[tuple[Any, Any]]:
        several = isinstance(state, dict)
        yield self.own, state["own"] if several else state
        for each, saved in zip(self.members, state["members"] if several else [], strict=several):
            yield each._saved_generator, saved
