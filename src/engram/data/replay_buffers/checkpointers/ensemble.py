"""An ensemble of storages on disk: each member as its own checkpointer writes it, in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from engram.checkpoint.protocols import StorageCheckpointerBase
from engram.checkpoint.reader import SnapshotReader
from engram.checkpoint.writer import SnapshotWriter
from engram.errors import CheckpointMisfitError, differences_of
from engram.store.layout import MalformedLayoutError

_MISFIT = "the checkpoint does not fit this ensemble"

Part = tuple[StorageCheckpointerBase[Any, Any], Any]  # a checkpointer and the storage that it saves


class Parts(Protocol):
    """An ensemble, as it is saved and loaded."""

    def parts(self) -> list[Part]:
        """Each member behind its checkpointer."""


class StorageEnsembleCheckpointer(StorageCheckpointerBase[Parts, Parts]):
    """Saves the members of a StorageEnsemble. Hooks are the members'."""

    format = "ensemble"
    needs = "parts"

    def register_save_hook(self, hook: Any) -> None:
        raise ValueError("an ensemble saves nothing by itself: register hooks with its members")

    register_load_hook = register_save_hook

    def nbytes(self, source: Parts, previous: dict[str, Any] | None = None) -> int:
        parts = source.parts()
        before = _before(parts, previous)
        return sum(one.nbytes(storage, old) for (one, storage), old in zip(parts, before, strict=True))

    def dumps(self, source: Parts, writer: SnapshotWriter, previous: dict[str, Any] | None = None) -> dict[str, Any]:
        parts, members = source.parts(), []
        for i, ((checkpointer, storage), old) in enumerate(zip(parts, _before(parts, previous), strict=True)):
            state = checkpointer.dumps(storage, _Folder(writer, i), old)  # type: ignore[arg-type]
            members.append({"format": checkpointer.format, "state": state})
        return {"members": members}

    def check(self, sink: Parts, reader: SnapshotReader, state: dict[str, Any]) -> None:
        parts, saved = sink.parts(), _members(reader, state)
        if len(parts) != len(saved):
            raise CheckpointMisfitError(_MISFIT, [f"{len(parts)} members here, {len(saved)} there"])
        said: list[str] = []
        for i, ((checkpointer, storage), one) in enumerate(zip(parts, saved, strict=True)):
            if checkpointer.format != one["format"]:
                said.append(
                    f"member {i} was saved as {one['format']!r}, its checkpointer reads {checkpointer.format!r}"
                )
                continue
            try:
                checkpointer.check(storage, _Folder(reader, i), one["state"])  # type: ignore[arg-type]
            except MalformedLayoutError:
                raise
            except ValueError as error:
                said += [f"member {i}: {what}" for what in differences_of(error)]
        if said:
            raise CheckpointMisfitError(_MISFIT, said)

    def loads(self, sink: Parts, reader: SnapshotReader, state: dict[str, Any]) -> None:
        self.check(sink, reader, state)
        if any(len(storage) for _, storage in sink.parts()):
            # One damaged file must leave every member as it was.
            reader.check(name for name in reader.files if name.startswith(_FOLDER))
        loaded = []
        try:
            for i, ((checkpointer, storage), one) in enumerate(zip(sink.parts(), _members(reader, state), strict=True)):
                checkpointer.loads(storage, _Folder(reader, i), one["state"])  # type: ignore[arg-type]
                loaded.append(storage)
        except BaseException:
            for storage in loaded:
                # Without rows, and without a layout where it had none before.
                (getattr(storage, "abort_restore", None) or storage.empty)()
            raise


def _before(parts: list[Part], previous: dict[str, Any] | None) -> list[dict[str, Any] | None]:
    """What each member's checkpointer said of the snapshot in force."""
    saved = previous.get("members") if previous is not None else None
    if not isinstance(saved, list) or len(saved) != len(parts):
        return [None] * len(parts)
    return [
        one["state"] if isinstance(one, dict) and one.get("format") == checkpointer.format else None
        for (checkpointer, _), one in zip(parts, saved, strict=True)
    ]


_FOLDER = "member-"


class _Folder:
    """A snapshot's reader or writer as a member sees it: its files lie in its own folder."""

    def __init__(self, snapshot: Any, member: int) -> None:
        self._snapshot = snapshot
        self._below = f"{_FOLDER}{member:05d}/"

    # ---- writing ----
    def write_file(self, name: str, blocks: Iterable[Any]) -> None:
        self._snapshot.write_file(self._below + name, blocks)

    def written_by_path(self, name: str) -> AbstractContextManager[str]:
        made: AbstractContextManager[str] = self._snapshot.written_by_path(self._below + name)
        return made

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

    def ask_for(self, name: str) -> None:
        self._snapshot.ask_for(self._below + name)

    def check(self, names: Iterable[str] | None = None) -> None:
        self._snapshot.check(self._below + name for name in (self.files if names is None else names))

    def path(self, name: str) -> str:
        return str(self._snapshot.path(self._below + name))

    def malformed(self, reason: str) -> Exception:
        made: Exception = self._snapshot.malformed(f"{self._below}: {reason}")
        return made


def _members(reader: SnapshotReader, state: dict[str, Any]) -> list[dict[str, Any]]:
    members = state.get("members") if isinstance(state, dict) else None
    if not isinstance(members, list) or not all(
        isinstance(m, dict) and {"format", "state"} <= m.keys() for m in members
    ):
        raise reader.malformed("its description of the members is malformed")
    return members
