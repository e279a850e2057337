"""The generators of buffers, as they are saved."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from engram import _forms as forms
from engram._generator import Generator, is_state
from engram._system import set_state, state_of
from engram.data.replay_buffers.state.parts import SavedPart

_KINDS = ("a torch.Generator", "an engram.Generator")
_STATE = forms.nullable(forms.tensor(torch.uint8, ndim=1))
_STATES = forms.record({"own": _STATE, "members": forms.list_of(_STATE)})


class SavedGenerator(SavedPart):
    """A buffer's own generator (`part`); None: it has none."""

    def state(self, storage: Any) -> Any:
        """Where it stands; None without one."""
        return None if self.part is None else state_of(self.part)

    def load(self, state: Any) -> None:
        """Goes on where a generator stood; without one of its own, or a state, nothing changes."""
        if state is not None and self.part is not None:
            set_state(self.part, state)

    def empty(self) -> None:
        """Nothing: it stays where it stands."""

    def check(self, state: Any, storage: Any) -> None:
        if state is not None and self.part is not None:
            # Into one of the same kind, which stands anywhere.
            try:
                set_state(
                    Generator() if isinstance(self.part, Generator) else torch.Generator(device=self.part.device), state
                )
            except RuntimeError as error:  # as torch's generators refuse a state
                raise ValueError(f"the state of the generator is none: {error}") from None

    def differences(self, state: Any) -> list[str]:
        """What of a saved state is not that of this kind of generator."""
        forms.check(_STATE, state, "the state of the generator")
        if self.part is None or state is None or len(state) < 16:
            return []
        mine, theirs = isinstance(self.part, Generator), is_state(state)
        return [] if mine == theirs else [f"the buffer draws from {_KINDS[mine]} here, from {_KINDS[theirs]} there"]

    def restore_point(self) -> Callable[[], None]:
        return functools.partial(self.load, self.state(None))


class SavedGenerators(SavedGenerator):
    """The generator of an ensemble's own, and those of its members."""

    def __init__(
        self, own: torch.Generator | Generator | None, members: Sequence[torch.Generator | Generator | None]
    ) -> None:
        super().__init__(own, None)
        self._own, *self._each = [SavedGenerator(one, None) for one in (own, *members)]

    def state(self, storage: Any) -> Any:
        own, members = self._own.state(storage), [each.state(storage) for each in self._each]
        return own if all(state is None for state in members) else {"own": own, "members": members}

    def load(self, state: Any) -> None:
        for each, saved in self._with_states(state):
            each.load(saved)

    def check(self, state: Any, storage: Any) -> None:
        for each, saved in self._with_states(state):
            each.check(saved, storage)

    def differences(self, state: Any) -> list[str]:
        if isinstance(state, dict):
            forms.check(_STATES, state, "the states of the generators")
            if len(state["members"]) != len(self._each):
                return [f"the ensemble has {len(self._each)} generators here, {len(state['members'])} there"]
        return [difference for each, saved in self._with_states(state) for difference in each.differences(saved)]

    def _with_states(self, state: Any) -> Iterator[tuple[SavedGenerator, Any]]:
        several = isinstance(state, dict)
        yield self._own, state["own"] if several else state
        yield from zip(self._each, state["members"] if several else [], strict=several)
