"""Which chunks of the snapshot in force hold, byte for byte, what a save would write again."""

from __future__ import annotations

from typing import Any, Protocol


class Identified(Protocol):
    """A storage that can say what of it has changed."""

    def identity(self) -> dict[str, Any]: ...
    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None: ...


class Unchanged:
    """Rows that have not changed since a snapshot: the same store, and no edit in between.

    Args:
        source: the storage that is being saved.
        previous: what its checkpointer returned for the snapshot in force.
        same: entries of `previous` that must be as they are now: the layout, how rows are cut, the hooks.
    """

    def __init__(self, source: Identified, previous: dict[str, Any] | None, same: dict[str, Any]) -> None:
        self._edited: set[tuple[int, int]] = set()
        self.any = previous is not None and all(previous.get(key) == value for key, value in same.items())
        since = None if previous is None else previous.get("identity")
        if self.any and isinstance(since, dict):
            edited = source.edited(since)
            self.any = edited is not None
            self._edited = set(edited or ())
        else:
            self.any = False

    def holds(self, lane: int, start: int, stop: int) -> bool:
        """Whether none of these write numbers was changed."""
        return self.any and not any(e[0] == lane and start <= e[1] < stop for e in self._edited)
