"""The checkpointer of a StorageEnsemble: each member's own checkpointer writes it, to a folder of its own."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from engram.checkpoint.directory import HOOKED
from engram.checkpoint.hooks import load_through_hooks, save_through_hooks
from engram.checkpoint.protocols import RestorePlan, SavePlan, StorageCheckpointerBase
from engram.checkpoint.reader import SnapshotReader
from engram.checkpoint.writer import SnapshotWriter
from engram.errors import CheckpointMisfitError, differences_of
from engram.store.layout import MalformedLayoutError

_MISFIT = "the checkpoint does not fit this ensemble"

Part = tuple[StorageCheckpointerBase[Any, Any], Any]  # a checkpointer and the storage that it saves


@runtime_checkable
class Parts(Protocol):
    """The members of an ensemble, for saving and loading."""

    def parts(self) -> list[Part]:
        """Each member, with its checkpointer."""


class StorageEnsembleCheckpointer(StorageCheckpointerBase[Parts, Parts]):
    """Saves the members of a StorageEnsemble. Hooks are the members'."""

    format = "ensemble"
    needs = "parts"

    def register_save_hook(self, hook: Any) -> None:
        raise ValueError("an ensemble saves nothing by itself: register hooks with its members")

    register_load_hook = register_save_hook

    def plan_save(self, source: Parts, previous: dict[str, Any] | None = None) -> SavePlan:
        return _EnsembleSavePlan(source.parts(), previous)

    def plan_restore(self, reader: SnapshotReader, state: dict[str, Any]) -> RestorePlan[Parts]:
        return _EnsembleRestorePlan(reader, state)


class _EnsembleSavePlan:
    """One save of every member."""

    def __init__(self, parts: list[Part], previous: dict[str, Any] | None) -> None:
        before = _before(parts, previous)
        self._plans = [save_through_hooks(*part, old) for part, old in zip(parts, before, strict=True)]

    @property
    def nbytes(self) -> int:
        return sum(plan.nbytes for plan in self._plans)

    def write(self, writer: SnapshotWriter) -> dict[str, Any]:
        return {"members": [plan.write(_Folder(writer, i)) for i, plan in enumerate(self._plans)]}  # type: ignore[arg-type]


class _EnsembleRestorePlan:
    """One load of every member; the plan of a member is made with the checkpointer that reads it."""

    def __init__(self, reader: SnapshotReader, state: dict[str, Any]) -> None:
        self._reader, self._members = reader, _members(reader, state)
        self._plans: dict[int, tuple[Any, RestorePlan[Any]]] = {}

    def check(self, sink: Parts) -> None:
        parts = sink.parts()
        if len(parts) != len(self._members):
            raise CheckpointMisfitError(
                _MISFIT, [f"this ensemble has {len(parts)} members, the checkpoint {len(self._members)}"]
            )
        differences: list[str] = []
        for i, ((checkpointer, storage), member) in enumerate(zip(parts, self._members, strict=True)):
            if member["format"] not in (checkpointer.format, HOOKED):
                differences.append(
                    f"member {i} was saved as {member['format']!r}, its checkpointer reads {checkpointer.format!r}"
                )
                continue
            try:
                self._plan(i, checkpointer).check(storage)
            except MalformedLayoutError:
                raise
            except ValueError as error:
                differences += [f"member {i}: {what}" for what in differences_of(error)]
        if differences:
            raise CheckpointMisfitError(_MISFIT, differences)

    def load(self, sink: Parts) -> None:
        self.check(sink)
        if any(len(storage) for _, storage in sink.parts()):
            # One damaged file must leave every member as it was.
            self._reader.check(name for name in self._reader.files if name.startswith(_FOLDER))
        loaded = []
        try:
            for i, (checkpointer, storage) in enumerate(sink.parts()):
                self._plan(i, checkpointer).load(storage)
                loaded.append(storage)
        except BaseException:
            for storage in loaded:
                _abort(storage)
            raise

    def _plan(self, i: int, checkpointer: StorageCheckpointerBase[Any, Any]) -> RestorePlan[Any]:
        """The plan of a member, made by this checkpointer."""
        if i not in self._plans or self._plans[i][0] is not checkpointer:
            folder: Any = _Folder(self._reader, i)
            self._plans[i] = checkpointer, load_through_hooks(checkpointer, folder, self._members[i])
        return self._plans[i][1]


def _abort(sink: Any) -> None:
    """Leaves a sink without rows, and without a layout where it had none."""
    if isinstance(sink, Parts):
        for _, member in sink.parts():
            _abort(member)
    else:
        sink.abort_restore()


def _before(parts: list[Part], previous: dict[str, Any] | None) -> list[Any]:
    """The entry of each member in the current snapshot."""
    saved = previous.get("members") if previous is not None else None
    if not isinstance(saved, list) or len(saved) != len(parts):
        return [None] * len(parts)
    return saved


_FOLDER = "member-"


class _Folder:
    """A snapshot's reader or writer for one member, whose files lie in its own folder."""

    def __init__(self, snapshot: Any, member: int) -> None:
        self._snapshot = snapshot
        self._below = f"{_FOLDER}{member:05d}/"

    # ---- writing ----
    def write_file(self, name: str, blocks: Iterable[Any]) -> None:
        self._snapshot.write_file(self._below + name, blocks)

    def written_by_path(self, name: str) -> AbstractContextManager[str]:
        path: AbstractContextManager[str] = self._snapshot.written_by_path(self._below + name)
        return path

    def scratch_folder(self) -> AbstractContextManager[str]:
        folder: AbstractContextManager[str] = self._snapshot.scratch_folder()
        return folder

    @property
    def features(self) -> set[str]:
        features: set[str] = self._snapshot.features
        return features

    def need(self, nbytes: int) -> None:
        self._snapshot.need(nbytes)

    def reuse(self, *names: str) -> bool:
        return bool(self._snapshot.reuse(*(self._below + name for name in names)))

    # ---- reading ----
    @property
    def files(self) -> dict[str, Any]:
        n = len(self._below)
        return {name[n:]: record for name, record in self._snapshot.files.items() if name.startswith(self._below)}

    def nbytes(self, name: str) -> int:
        return int(self._snapshot.nbytes(self._below + name))

    def open(self, name: str) -> Any:
        return self._snapshot.open(self._below + name)

    def verified(self, name: str) -> Any:
        return self._snapshot.verified(self._below + name)

    def read_into(self, name: str, buffer: Any) -> None:
        self._snapshot.read_into(self._below + name, buffer)

    def mapped(self, name: str) -> Any:
        return self._snapshot.mapped(self._below + name)

    def read_ahead(self, name: str) -> None:
        self._snapshot.read_ahead(self._below + name)

    def check(self, names: Iterable[str] | None = None) -> None:
        self._snapshot.check(self._below + name for name in (self.files if names is None else names))

    def path(self, name: str) -> str:
        return str(self._snapshot.path(self._below + name))

    def malformed(self, reason: str) -> Exception:
        error: Exception = self._snapshot.malformed(f"{self._below}: {reason}")
        return error


def _members(reader: SnapshotReader, state: dict[str, Any]) -> list[dict[str, Any]]:
    members = state.get("members") if isinstance(state, dict) else None
    if not isinstance(members, list) or not all(
        isinstance(m, dict) and {"format", "state"} <= m.keys() for m in members
    ):
        raise reader.malformed("its description of the members is malformed")
    return members
