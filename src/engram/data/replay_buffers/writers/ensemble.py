"""The writer of several buffers that are sampled together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from engram._overrides import overrides
from engram.data.replay_buffers.writers.round_robin import Writer, as_writer

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
        return [writer._given for writer in self._writers]

    @property
    def _members(self) -> list[Writer]:
        return self._writers

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
    def _needs_storage_alone(self) -> bool:
        return any(writer._needs_storage_alone for writer in self._writers)

    def state_dict(self) -> dict[str, Any]:
        return {"writers": [{"kind": w._kind, "state": w.state_dict()} for w in self._writers]}

    def _state_beside_rows(self) -> dict[str, Any]:
        if "state_dict" in overrides(type(self), WriterEnsemble):
            return self.state_dict()
        return {"writers": [{"kind": w._kind, "state": w._state_beside_rows()} for w in self._writers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        different = self._differences(state)
        if different:
            raise ValueError("; ".join(different))
        for writer, saved in zip(self._writers, state["writers"], strict=True):
            writer.load_state_dict(saved["state"])

    def _differences(self, state: dict[str, Any]) -> list[str]:
        saved = state["writers"]
        if len(saved) != len(self._writers):
            return [f"the ensemble has {len(self._writers)} writers here, {len(saved)} there"]
        differences = []
        for i, (writer, one) in enumerate(zip(self._writers, saved, strict=True)):
            kind, member_state = one["kind"], one["state"]
            if kind != writer._kind:
                differences.append(f"writer {i} is a {writer._kind} here, a {kind} there")
            else:
                differences += [f"member {i}: {what}" for what in writer._differences(member_state)]
        return differences

    def __repr__(self) -> str:
        return f"WriterEnsemble(writers={self.writers})"
