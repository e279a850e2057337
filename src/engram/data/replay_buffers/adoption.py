"""How a buffer takes a saved state over: in one step for everybody else, and not at all where a part refuses."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

from engram.interop.open import as_damage
from engram.transforms.compose import Compose

log = logging.getLogger("engram")

Malformed = Callable[[str], Exception]


def adopt(
    buffer: Any, wanted: dict[str, Any], fill: Callable[[], None] | None, malformed: Malformed | None = None
) -> None:
    """Takes states over that were found to fit. The caller holds the buffer still, and its storage alone.

    What a user's own part can refuse comes before the rows that it would destroy; an error leaves the buffer as it was.

    Args:
        fill: replaces the rows of the storage; None: they stay.
        malformed: makes the error for a state that turns out to be impossible when the rows are there.
    """
    storage = buffer.storage
    before = _Before(buffer, rows_too=fill is not None)
    with storage.mutex if fill is None else storage.replacing("loads"):
        try:
            fills_first = fill is not None and storage.is_empty
            if fill is not None and fills_first:
                fill()
                before.filled = True
                check_sampler(buffer, wanted, malformed)  # now that there is something to compare it with
            _load_parts(buffer, wanted)
            if fill is not None and not fills_first:
                fill()
                before.filled = True
            _join(buffer, wanted, rows_too=fill is not None)
        except BaseException:
            before.bring_back()
            raise


def take_over(buffer: Any, wanted: dict[str, Any]) -> None:
    """Brings a new buffer, which has its rows already, to these states of its parts."""
    _load_parts(buffer, wanted)
    _join(buffer, wanted, rows_too=True)


def _load_parts(buffer: Any, wanted: dict[str, Any]) -> None:
    for name, part in (("sampler", buffer.sampler), ("writer", buffer.writer)):
        if name in wanted and hasattr(part, "load_state_dict"):
            part.load_state_dict(wanted[name]["state"])
    if "transform" in wanted:
        _load_transforms(buffer.saved_transform, wanted["transform"]["state"])
    if "generator" in wanted:
        buffer.restore_generator(wanted["generator"]["state"])


def _load_transforms(transform: Compose, state: dict[str, Any] | None) -> None:
    """What transforms had learnt and held back there; where nothing was saved, nothing of before is carried on."""
    if state is None:
        transform.empty()
    else:
        transform.load_state_dict(state)


def _join(buffer: Any, wanted: dict[str, Any], rows_too: bool) -> None:
    """Brings rows and parts together."""
    storage, sampler = buffer.storage, buffer.sampler
    if "numbers" in wanted:  # states in memory have them with the rows
        numbers = wanted["numbers"]
        storage.restore_numbers(_of_earlier_versions(wanted) if numbers is None else numbers, rows_too)
    if rows_too:
        storage.hand_over(sampler)
    if hasattr(sampler, "follow"):
        sampler.follow(storage)


def _of_earlier_versions(wanted: dict[str, Any]) -> Any:
    """Numbers of replaced rows, which are the storage's, as writers that keep the best once saved them."""
    state = wanted["writer"]["state"] if "writer" in wanted else None
    return state.get("numbers") if isinstance(state, dict) else None


class _Before:
    """What a buffer was before a load."""

    def __init__(self, buffer: Any, rows_too: bool) -> None:
        self.filled = False  # set when other rows have taken the place of those of before
        self._buffer = buffer
        self._rows_too = rows_too
        self._incarnations = _incarnations(buffer.storage)
        self._generator = buffer.generator_state()
        parts = [buffer.sampler, buffer.writer, buffer.saved_transform]
        self._parts = [_Part(part) for whole in parts for part in _with_members(whole)]
        self._undo = buffer.storage.kept() if rows_too else None
        # With rows that come back under another incarnation goes a sampler that is told so.
        keeps_state = self._undo is not None and hasattr(buffer.sampler, "state_dict")
        self._sampler = copy.deepcopy(buffer.sampler.state_dict()) if keeps_state else None

    def bring_back(self) -> None:
        """Makes the buffer what it was."""
        storage, sampler = self._buffer.storage, self._buffer.sampler
        touched = self._rows_too and (self.filled or _incarnations(storage) != self._incarnations)
        if touched and self._undo is None:
            if not self.filled:
                self._forget()
            return  # else: what was loaded stays, which is whole
        for part in self._parts:
            part.bring_back()
        self._buffer.restore_generator(self._generator)
        if not touched or self._undo is None:
            return
        with _tried(storage):
            self._undo()
        if self._sampler is not None and hasattr(sampler, "load_state_dict"):
            with _tried(sampler):
                sampler.load_state_dict(self._sampler)
                storage.hand_over(sampler)

    def _forget(self) -> None:
        """The rows went in the middle of being replaced."""
        self._buffer.saved_transform.empty()
        for part in (self._buffer.sampler, self._buffer.writer):
            if hasattr(part, "empty"):
                part.empty()


class _Part:
    """A part of a buffer as it is now: its attributes, and of one of a user's own also what it would save."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self._attributes = dict(vars(part)) if hasattr(part, "__dict__") else {}
        both = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
        self._saves = both and not _ours(part)
        self._state = copy.deepcopy(part.state_dict()) if self._saves else None

    def bring_back(self) -> None:
        if self._saves:
            with _tried(self._part):
                self._part.load_state_dict(self._state)
                return
        # Ours never change the value of an attribute: they give it another one.
        mine = vars(self._part) if self._attributes else {}
        mine.update(self._attributes)
        for name in mine.keys() - self._attributes.keys():
            del mine[name]


@contextlib.contextmanager
def _tried(part: Any) -> Iterator[None]:
    """A part's way back after an error, which is the one that is raised."""
    try:
        yield
    except Exception:
        log.exception("after a load that failed, a %s cannot go back to its state of before", type(part).__name__)


def _incarnations(storage: Any) -> list[int | None]:
    """What changes when rows are replaced, of a storage or of each of an ensemble's."""
    members = getattr(storage, "storages", [storage])
    return [None if one.lanes is None else one.lanes.store.incarnation for one in members]


def _with_members(part: Any) -> Iterator[Any]:
    """A sampler, writer or transform, and those that it is made of."""
    yield part
    for name in ("samplers", "writers", "transforms"):
        members = vars(part).get(name) if hasattr(part, "__dict__") else None
        for member in members if isinstance(members, list) else []:
            yield from _with_members(member)


def _ours(part: Any) -> bool:
    return type(part).__module__.split(".")[0] == "engram"


def check_sampler(buffer: Any, wanted: dict[str, Any], malformed: Malformed | None) -> None:
    """An error where a sampler's state cannot be that of the rows."""
    storage, sampler = buffer.storage, buffer.sampler
    several = storage.lanes is None and hasattr(storage, "storages")
    if "sampler" in wanted and (several or storage.lanes is not None) and hasattr(sampler, "check_state"):
        with looking_at(sampler, malformed):
            sampler.check_state(wanted["sampler"]["state"], storage)


def looking_at(part: Any, malformed: Malformed | None) -> contextlib.AbstractContextManager[None]:
    """Around looks at a part's state: what ours run into there is damage, what a user's own raises is its own error."""
    if malformed is None or not all(map(_ours, _with_members(part) if part is not None else ())):
        return contextlib.nullcontext()
    return as_damage(malformed)
