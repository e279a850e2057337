"""The generators of buffers, as they are saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engram._generator import Generator, is_state
from engram._system import set_state, state_of

_KINDS = ("a torch.Generator", "an engram.Generator")


class SavedGenerator:
    """A buffer's own generator, None without one; of an ensemble also those of its members."""

    def __init__(self, own: torch.Generator | Generator | None, members: Sequence[SavedGenerator] = ()) -> None:
        self._own, self._members = own, members

    def state(self) -> Any:
        """Where they stand; None without any."""
        own, members = None if self._own is None else state_of(self._own), [each.state() for each in self._members]
        return own if all(state is None for state in members) else {"own": own, "members": members}

    def load(self, state: Any) -> None:
        """Goes on where a generator stood; without one of its own, or a state, nothing changes."""
        for generator, saved in self._each(state):
            set_state(generator, saved)

    def check(self, state: Any) -> None:
        """An error where `load` would be one."""
        for generator, saved in self._each(state):
            # One of the same kind, which stands anywhere.
            is_ours = isinstance(generator, Generator)
            set_state(Generator() if is_ours else torch.Generator(device=generator.device), saved)

    def differences(self, state: Any) -> list[str]:
        """What of a saved state is not that of these kinds of generators."""
        found = []
        for generator, saved in self._each(state):
            if isinstance(saved, Tensor) and len(saved) >= 16:
                mine, theirs = isinstance(generator, Generator), is_state(saved)
                if mine != theirs:
                    found.append(f"the buffer draws from {_KINDS[mine]} here, from {_KINDS[theirs]} there")
        return found

    def _each(self, state: Any) -> Iterator[tuple[torch.Generator | Generator, Any]]:
        """Each generator of which there is a saved state."""
        several = bool(self._members) and isinstance(state, dict)
        own = state["own"] if several else state
        if self._own is not None and own is not None:
            yield self._own, own
        for member, saved in zip(self._members, state["members"] if several else [], strict=several):
            yield from member._each(saved)
