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
        members: the parts that it consists of.
        settings: that a state must have been saved with; `owner` is what has them.
        beside_rows: its state without what follows from the rows, if that is not all that `state_dict` returns.

    It never changes the value of an attribute in place, and an error at a saved state means that this is damaged. A
    part of a user's own keeps to neither: `SavedOwnPart`.
    """

    def __init__(
        self,
        part: Any,
        kind: str | None,
        *,
        members: Sequence[SavedPart] = (),
        settings: Mapping[str, Any] | None = None,
        owner: str = "part",
        beside_rows: dict[str, Any] | None = None,
    ) -> None:
        self.part, self.kind, self.members = part, kind, members
        #: The object that the user gave, if `part` is an adapter of it.
        self.given = part
        self._settings, self._owner, self._beside_rows = settings or {}, owner, beside_rows
        #: Which errors at a saved state say that this is damaged; others are those of a part of a user's own.
        self.damage: type[ValueError] = ValueError
        for member in members:
            if member.damage is not ValueError:
                self.damage = member.damage

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
        return functools.partial(_set_attributes, self.part, dict(vars(self.part)))


class SavedOwnPart(SavedPart):
    """A part of a user's own: a child's, in the form that its parent has, or another object's.

    Args:
        form: how it is saved and loaded; of an object that is no child, this changes nothing of its state.
        given: the user's object, if the form's `part` is an adapter of it.
        has_state: whether it has `state_dict` and `load_state_dict`.
    """

    def __init__(self, form: SavedPart, given: Any = None, *, has_state: bool = True) -> None:
        super().__init__(form.part, form.kind, members=form.members)
        self.given = form.part if given is None else given
        self._form, self._has_state = form, has_state
        self.damage = forms.WrongFormError

    def state(self, storage: Any) -> Any:
        return self._form.state(storage)

    def check_fits(self, state: Any) -> None:
        self._form.check_fits(state)

    def differences(self, state: Any) -> list[str]:
        # An object that is no child has a state of any form.
        return self._form.differences(state) if self.given is self.part else []

    def check(self, state: Any, storage: Any) -> None:
        self._form.check(state, storage)

    def load(self, state: Any) -> None:
        self._form.load(state)

    def empty(self) -> None:
        self._form.empty()

    def rebase(self, storage: Any) -> None:
        self._form.rebase(storage)

    def sync(self, storage: Any) -> None:
        self._form.sync(storage)

    def find(self, storage: Any) -> None:
        self._form.find(storage)

    def _own_restore_point(self) -> Callable[[], None]:
        if self._has_state:
            return functools.partial(_load_again, self.part, self.given, copy.deepcopy(self.part.state_dict()))
        try:
            return functools.partial(_set_attributes, self.given, dict(vars(self.given)))
        except TypeError:  # an object without attributes
            return lambda: None


def as_saved(form: SavedPart) -> SavedPart:
    """How a part is saved and loaded that may be a child of a user's own."""
    return form if type(form.part) in BUILT_IN else SavedOwnPart(form)


class SavedObject(SavedPart):
    """A transform of the library's own that adapts a user's object, whose state is put back by its own methods."""

    def _own_restore_point(self) -> Callable[[], None]:
        return functools.partial(_load_again, self.part, self.given, copy.deepcopy(self.part.state_dict()))


class SavedTransforms(SavedPart):
    """The transforms of a buffer. Where no state was saved, they begin anew."""

    def differences(self, state: Any) -> list[str]:
        return [] if state is None else self.part.differences(state)

    def load(self, state: Any) -> None:
        if state is None:
            self.part.empty()
        else:
            self.part.load_state_dict(state)


def saved_transforms(compose: Compose) -> SavedPart:
    """The transforms of a buffer, as they are saved and loaded."""
    members = [
        saved_transforms(one)
        if isinstance(one, Compose)
        else as_saved((SavedObject if one.adapts_state() else SavedPart)(one, one.kind))
        for one in compose.transforms
    ]
    form = SavedTransforms(compose, None, members=members)
    return form if type(compose) is Compose else as_saved(form)


class SavedTransformsOfEach(SavedPart):
    """The common transform of an ensemble, and those of its members."""

    def __init__(self, each: list[Compose]) -> None:
        super().__init__(each[0], None, members=[saved_transforms(one) for one in each])

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

    def __init__(self, name: str, part: Any, *, members: Sequence[SavedPart], **others: Any) -> None:
        super().__init__(part, type(part).__name__, members=members, owner="ensemble", **others)
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


def _load_again(part: Any, given: Any, state: Any) -> None:
    with logging_errors(given):
        part.load_state_dict(state)


def _set_attributes(part: Any, before: dict[str, Any]) -> None:
    attributes = vars(part)
    attributes.update(before)
    for name in attributes.keys() - before.keys():
        del attributes[name]
