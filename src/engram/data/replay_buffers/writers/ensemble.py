"""The writer of several buffers that are sampled together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from engram._overrides import overrides
from engram.data.replay_buffers.state.parts import SavedEnsemble, SavedPart, as_saved
from engram.data.replay_buffers.writers.round_robin import Placing, Writer, as_writer, given_writer

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage


class WriterEnsemble(Writer, built_in=True):
    """The writers of an ensemble's members. Nothing is written through it: write to a member.

    Args:
        writers: one for each member.

    Raises:
        ValueError: no writers.
        TypeError: one of them is no writer.

    Example:
        >>> WriterEnsemble(RoundRobinWriter(), RoundRobinWriter())
        WriterEnsemble(writers=[RoundRobinWriter(cursor=0), RoundRobinWriter(cursor=0)])
    """

    def __init__(self, *writers: Any) -> None:
        super().__init__()
        if not writers:
            raise ValueError("an ensemble needs at least one writer")
        self._writers = [as_writer(writer) for writer in writers]

    @property
    def writers(self) -> list[Any]:
        """The writers of the members."""
        return [given_writer(writer) for writer in self._writers]

    def register_storage(self, storage: Storage) -> None:
        if len(storage) != len(self._writers):
            raise ValueError(f"{len(self._writers)} writers for {len(storage)} storages; give one for each")
        self._storage = storage
        for writer, member in zip(self._writers, storage.storages, strict=True):  # type: ignore[attr-defined]
            writer.register_storage(member)

    def write(self, storage: Storage, items: Any, single: bool, time_dim: int) -> NoReturn:
        raise RuntimeError("an ensemble is not written to: write to a member, as rb[0].extend(...)")

    def __getitem__(self, index: int) -> Any:
        return self.writers[index]

    def __len__(self) -> int:
        return len(self._writers)

    def generations_of(self, index: Any) -> NoReturn:
        """An error: ask the writer of a member."""
        raise RuntimeError("an ensemble has no rows of its own: ask the writer of a member, as rb[0].writer")

    def check_mutable(self, operation: str) -> None:
        for writer in self._writers:
            writer.check_mutable(operation)

    @property  # type: ignore[misc]
    def _cursor(self) -> list[int]:  # type: ignore[override]
        return [writer._cursor for writer in self._writers]

    def empty(self) -> None:
        for writer in self._writers:
            writer.empty()

    @property
    def placing(self) -> Placing:  # type: ignore[override]
        replaces = any(writer.placing is Placing.REPLACING for writer in self._writers)
        return Placing.REPLACING if replaces else Placing.CHOSEN

    @property
    def saved_form(self) -> SavedPart:
        members = [writer.saved_form for writer in self._writers]
        says_its_state = "state_dict" in overrides(type(self), WriterEnsemble)
        kind = SavedEnsemble if says_its_state else _SavedWriters
        return as_saved(kind("writers", self, members=members))

    def state_dict(self) -> dict[str, Any]:
        return {"writers": [{"kind": w.saved_form.kind, "state": w.state_dict()} for w in self._writers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved_form.check_fits(state)
        for writer, saved in zip(self._writers, state["writers"], strict=True):
            writer.load_state_dict(saved["state"])

    def __repr__(self) -> str:
        return f"WriterEnsemble(writers={self.writers})"


class _SavedWriters(SavedEnsemble):
    def state(self, storage: Any) -> Any:
        members = zip(self.members, storage.storages, strict=True)
        return {"writers": [{"kind": one.kind, "state": one.state(rows)} for one, rows in members]}
