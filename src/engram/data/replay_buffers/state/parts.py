"""How a sampler, a writer, transforms and generators are saved and loaded beside the rows of their buffer."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from engram import _forms as forms
from engram._arguments import BUILT_IN
from engram._text import log
from engram.checkpoint.snapshot import PART
from engram.errors import CheckpointMisfitError
from engram.transforms.compose import Compose


class SavedPart:
    """A part of a buffer, as it is saved and loaded. The caller holds the buffer still.

    Args:
        part: has `state_dict` and `load_state_dict`.
        kind: the name that its state is saved under; None: it is saved without one, and fits by its content.
        is_ours: whether its class is the library's own. Such a part never changes the value of an attribute in place,
            and an error at a saved state means that the state is damaged. A child that a user writes keeps to neither.
        given: the user's object, if `part` is an adapter of it.
        members: the parts that it consists of.
        settings: that a state must have been saved with; `owner` is what has them.
        beside_rows: its state without what follows from the rows, if that is not all that `state_dict` returns.
        has_state: whether the user's object has `state_dict` and `load_state_dict`.
    """

    def __init__(
        self,
        part: Any,
        kind: str | None,
        *,
        is_ours: bool,
        given: Any = None,
        members: Sequence[SavedPart] = (),
        settings: Mapping[str, Any] | None = None,
        owner: str = "part",
        beside_rows: dict[str, Any] | None = None,
        has_state: bool = True,
    ) -> None:
        self.part, self.kind, self.is_ours = part, kind, is_ours
        self.given = part if given is None else given
        self.members = members
        #: Whether it and the parts that it consists of are of the library's own classes.
        self.all_ours: bool = is_ours and (not members or all(member.all_ours for member in members))
        self._settings, self._owner, self._beside_rows = settings or {}, owner, beside_rows
        self._has_state = has_state

    # ---- saving ----
    def state(self, storage: Any) -> Any:
        """Its state beside the rows of this storage, with what was written so far."""
        return self.part.state_dict() if self._beside_rows is None else self._beside_rows

    def frozen_state(self, storage: Any) -> Any:
        """The same of this moment, in memory of its own, for a thread that saves it later.

        What is long may be a snapshot, in place of a tensor, that the thread reads (`PrioritySnapshot`).
        """
        return copy.deepcopy(self.state(storage))

    # ---- loading ----
    def check_fits(self, state: Any) -> None:
        """A CheckpointMisfitError, with every reason, where a state cannot be loaded; changes nothing."""
        try:
            different = self.differences(state)
        except ValueError as error:
            different = [str(error)]
        if different:
            raise CheckpointMisfitError(f"the state does not fit this {self._owner}", different)

    def differences(self, state: Any) -> list[str]:
        """What of a saved state does not fit this part; changes nothing.

        Raises:
            ValueError: no such part can have saved it.
        """
        if self.is_ours or self._settings:
            forms.check(
                forms.record({}, dict.fromkeys(self._settings, forms.plain)), state, f"the state of the {self._owner}"
            )
        return [
            f"the {self._owner} has {name}={mine!r} here, {state.get(name)!r} there"
            for name, mine in self._settings.items()
            if name not in state or state[name] != mine
        ]

    def check(self, state: Any, storage: Any) -> None:
        """A ValueError where a state without differences cannot be one of this storage; changes nothing.

        Called before the rows are replaced by those that were saved with it.
        """

    def load(self, state: Any) -> None:
        """Goes on from a state that fits."""
        self.part.load_state_dict(state)

    def empty(self) -> None:
        """Forgets what was stored."""
        self.part.empty()

    def rebase(self, storage: Any) -> None:
        """After a load with the rows: goes on with their sequences in this storage (`storage.lanes.shifts`)."""

    def sync(self, storage: Any) -> None:
        """Takes in what was written since it last looked: after a load."""

    def find(self, storage: Any) -> None:
        """Finds the rows of a state that was loaded alone, where they are there: before others are written."""

    def restore_point(self) -> Callable[[], None]:
        """A function that puts the part, with its members, back as it is now."""
        points = [self._own_restore_point(), *[member.restore_point() for member in self.members]]

        def restore() -> None:
            for point in points:
                point()

        return restore

    def _own_restore_point(self) -> Callable[[], None]:
        if self._has_state and not self.is_ours:
            return functools.partial(self._load_again, copy.deepcopy(self.part.state_dict()))
        try:
            return functools.partial(_set_attributes, self.given, dict(vars(self.given)))
        except TypeError:  # an object without attributes
            return lambda: None

    def _load_again(self, state: Any) -> None:
        with logging_errors(self.given):
            self.part.load_state_dict(state)


class SavedTransforms(SavedPart):
    """The transforms of a buffer. Where no state was saved, they begin anew."""

    def differences(self, state: Any) -> list[str]:
        return [] if state is None else self.part.differences(state)

    def load(self, state: Any) -> None:
        if state is None:
            self.part.empty()
        else:
            self.part.load_state_dict(state)


def saved_transforms(compose: Compose) -> SavedTransforms:
    """The transforms of a buffer, as they are saved and loaded."""
    members: list[SavedPart] = []
    for one in compose.transforms:
        alone = SavedPart(one, one.kind, is_ours=type(one) in BUILT_IN)
        members.append(saved_transforms(one) if isinstance(one, Compose) else alone)
    return SavedTransforms(compose, None, is_ours=type(compose) in BUILT_IN, members=members)


class SavedTransformsOfEach(SavedPart):
    """The common transform of an ensemble, and those of its members."""

    def __init__(self, each: list[Compose]) -> None:
        super().__init__(each[0], None, is_ours=True, members=[saved_transforms(one) for one in each])

    def state(self, storage: Any) -> Any:
        return {"each": [each.state(storage) for each in self.members]}

    def differences(self, state: Any) -> list[str]:
        if state is None:
            return []
        forms.check(forms.record({}, {"each": forms.list_of(forms.anything)}), state, "the state of the transforms")
        saved = state.get("each", [])
        if len(saved) != len(self.members):
            here, there = len(self.members) - 1, len(saved) - 1
            return [f"the ensemble has transforms of {here} members here, of {there} there"]
        return [what for mine, one in zip(self.members, saved, strict=True) for what in mine.differences(one)]

    def load(self, state: Any) -> None:
        for i, each in enumerate(self.members):
            each.load(None if state is None else state["each"][i])

    def empty(self) -> None:
        for each in self.members:
            each.empty()


class SavedEnsemble(SavedPart):
    """A part that consists of one for each member of an ensemble of buffers.

    Args:
        name: the entry of its state that has those of the members: `"samplers"`, `"writers"`.
        Others: as SavedPart.
    """

    def __init__(self, name: str, part: Any, *, is_ours: bool, members: Sequence[SavedPart], **others: Any) -> None:
        super().__init__(part, type(part).__name__, is_ours=is_ours, members=members, owner="ensemble", **others)
        self._name = name

    def differences(self, state: Any) -> list[str]:
        forms.check(forms.record({self._name: forms.list_of(PART)}), state, f"the state of the {self._owner}")
        saved = state[self._name]
        if len(saved) != len(self.members):
            return [f"the ensemble has {len(self.members)} {self._name} here, {len(saved)} there"]
        differences = super().differences(state)
        for i, (member, one) in enumerate(zip(self.members, saved, strict=True)):
            kind, member_state = one.get("kind"), one["state"]
            if kind != member.kind:
                differences.append(f"{self._name[:-1]} {i} is a {member.kind} here, a {kind} there")
            else:
                differences += [f"member {i}: {what}" for what in member.differences(member_state)]
        return differences

    def check(self, state: Any, storage: Any) -> None:
        for member, one, rows in zip(self.members, state[self._name], storage.storages, strict=True):
            if rows.lanes is not None:
                member.check(one["state"], rows)

    def rebase(self, storage: Any) -> None:
        for member, rows in self._with_storages(storage):
            member.rebase(rows)

    def sync(self, storage: Any) -> None:
        for member, rows in self._with_storages(storage):
            member.sync(rows)

    def find(self, storage: Any) -> None:
        for member, rows in self._with_storages(storage):
            member.find(rows)

    def _with_storages(self, storage: Any) -> Iterator[tuple[SavedPart, Any]]:
        yield from zip(self.members, storage.storages, strict=True)


@contextmanager
def logging_errors(part: Any) -> Iterator[None]:
    """Around a part's way back after an error, which is the one that is raised."""
    try:
        yield
    except Exception:
        kind = type(part).__name__
        log.exception("after a load that failed, a %s cannot go back to its state of before", kind)


def _set_attributes(part: Any, before: dict[str, Any]) -> None:
    attributes = vars(part)
    attributes.update(before)
    for name in attributes.keys() - before.keys():
        del attributes[name]
