"""The members of an ensemble of storages, as they are saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from engram import _forms as forms
from engram.data.replay_buffers.state.checkpointers.members import StorageEnsembleCheckpointer
from engram.data.replay_buffers.state.plans import SavedStorage
from engram.errors import CheckpointMisfitError, differences_of
from engram.store.snapshots import EnsembleSnapshot

_MISFIT = "the state does not fit this ensemble"


class SavedMembers(SavedStorage):
    """An ensemble: each member is saved and loaded in its own way."""

    def default_checkpointer(self) -> Any:
        return StorageEnsembleCheckpointer()

    def is_empty(self) -> bool:
        return all(member.saved_form.is_empty() for member in self._storage.storages)

    def incarnations(self) -> list[tuple[bytes, int]]:
        return [one for member in self._storage.storages for one in member.saved_form.incarnations()]

    def source(self, background: bool) -> EnsembleSnapshot:
        return EnsembleSnapshot(
            [(m.checkpointer, m.checkpointer.source(m.saved_form, background)) for m in self._storage.storages]
        )

    def staging(self) -> StagedMembers | None:
        members = self._storage.storages
        staged = [m.checkpointer.staging(m.saved_form) for m in members]
        return None if None in staged else StagedMembers([m.checkpointer for m in members], staged)

    def restore_point(self) -> Callable[[], None] | None:
        points = [member.saved_form.restore_point() for member in self._storage.storages]
        if None in points:
            return None

        def restore() -> None:
            for restore_member in points:
                restore_member()

        return restore

    def state(self) -> dict[str, Any]:
        return {"members": [member.state_dict() for member in self._storage.storages]}

    def check(self, state: Any) -> None:
        forms.check(forms.record({"members": forms.list_of(forms.anything)}), state, "the state of the ensemble")
        members, saved = self._storage.storages, state["members"]
        if len(saved) != len(members):
            raise CheckpointMisfitError(_MISFIT, [f"{len(members)} members here, {len(saved)} there"])
        differences: list[str] = []
        for i, (member, one) in enumerate(zip(members, saved, strict=True)):
            try:
                member.saved_form.check(one)
            except ValueError as error:
                differences += [f"member {i}: {difference}" for difference in differences_of(error)]
        if differences:
            raise CheckpointMisfitError(_MISFIT, differences)

    def counters(self) -> None:
        return None

    def recount(self, counters: dict[str, Any], oldest: int) -> None:
        raise TypeError("an ensemble has no rows of its own")

    def fill(self, state: dict[str, Any]) -> None:
        for member, saved in zip(self._storage.storages, state["members"], strict=True):
            member.load_state_dict(saved)

    def copy_to(self, other: Any, memo: dict[int, Any]) -> None:
        other.load_state_dict(copy.deepcopy(self._storage.state_dict(), memo))


class StagedMembers:
    """Holds saved states for the members of an ensemble, which get them in `commit`."""

    def __init__(self, checkpointers: list[Any], staged: list[Any]) -> None:
        self._checkpointers, self._staged = checkpointers, staged

    def parts(self) -> list[tuple[Any, Any]]:
        return list(zip(self._checkpointers, self._staged, strict=True))

    def __len__(self) -> int:
        return len(self._staged)

    def commit(self) -> None:
        for one in self._staged:
            one.commit()
