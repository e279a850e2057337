"""Incremental saves: which chunks of the current snapshot hold, byte for byte, what a save would write again."""

from __future__ import annotations

from typing import Any, Protocol


class TracksChanges(Protocol):
    """A storage that can say which of its rows were changed in place."""

    def identity(self) -> dict[str, Any]: ...
    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None: ...


class ReusableChunks:
    """Tells which rows have not changed since a snapshot: the same store, and no edit in between.

    `any` is False where none can be told to be unchanged.

    Args:
        source: the storage that is being saved.
        previous: what its checkpointer returned for the current snapshot.
        same: entries of `previous` that must be as they are now: the layout, how rows are cut, the hooks.
    """

    def __init__(self, source: TracksChanges, previous: dict[str, Any] | None, same: dict[str, Any]) -> None:
        since = None if previous is None else previous.get("identity")
        comparable = previous is not None and isinstance(since, dict) and same.items() <= previous.items()
        edited = source.edited(since) if comparable and since is not None else None
        self.any = edited is not None
        self._edited = set(edited or ())

    def unchanged(self, lane: int, start: int, stop: int) -> bool:
        """Whether no row of the lane with a write number from `start` to `stop` was changed."""
        return self.any and not (self._edited and any(e[0] == lane and start <= e[1] < stop for e in self._edited))
