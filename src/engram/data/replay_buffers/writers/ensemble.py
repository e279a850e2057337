"""The writers of several buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from engram.data.replay_buffers.writers.round_robin import Writer

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage


class WriterEnsemble(Writer):
    """The writers of an ensemble's members. Nothing is written through it: write to a member.

    Args:
        writers: one for each member.

    Raises:
        ValueError: no writers.

    Example:
        >>> WriterEnsemble(RoundRobinWriter(), RoundRobinWriter())
        WriterEnsemble(writers=[RoundRobinWriter(cursor=0), RoundRobinWriter(cursor=0)])
    """

    def __init__(self, *writers: Writer) -> None:
        super().__init__()
        if not writers:
            raise ValueError("an ensemble needs at least one writer")
        self.writers = list(writers)

    def register_storage(self, storage: Storage) -> None:
        if len(storage) != len(self.writers):
            raise ValueError(f"{len(self.writers)} writers for {len(storage)} storages; give one for each")
        self._storage = storage
        for writer, member in zip(self.writers, storage.storages, strict=True):  # type: ignore[attr-defined]
            writer.register_storage(member)

    def write(self, storage: Storage, items: Any, single: bool, time_dim: int) -> NoReturn:
        raise RuntimeError("an ensemble is not written to: write to a member, as rb[0].extend(...)")

    def __getitem__(self, index: int) -> Writer:
        return self.writers[index]

    def __len__(self) -> int:
        return len(self.writers)

    def allow(self, what: str) -> None:
        for writer in self.writers:
            writer.allow(what)

    @property
    def _cursor(self) -> list[int]:  # type: ignore[override]
        return [writer._cursor for writer in self.writers]

    def empty(self) -> None:
        for writer in self.writers:
            writer.empty()

    def state_dict(self) -> dict[str, Any]:
        return {"writers": [{"kind": type(w).__name__, "state": w.state_dict()} for w in self.writers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        different = self.differences(state)
        if different:
            raise ValueError("; ".join(different))
        for writer, saved in zip(self.writers, state["writers"], strict=True):
            writer.load_state_dict(saved["state"])

    def differences(self, state: dict[str, Any]) -> list[str]:
        """What of a saved state does not fit these writers."""
        saved = state["writers"]
        if len(saved) != len(self.writers):
            return [f"the ensemble has {len(self.writers)} writers here, {len(saved)} there"]
        said = []
        for i, (writer, one) in enumerate(zip(self.writers, saved, strict=True)):
            kind, state_there = one["kind"], one["state"]
            if kind != type(writer).__name__:
                said.append(f"writer {i} is a {type(writer).__name__} here, a {kind} there")
            elif hasattr(writer, "differences"):
                said += [f"member {i}: {what}" for what in writer.differences(state_there)]
        return said

    def __repr__(self) -> str:
        return f"WriterEnsemble(writers={self.writers})"
