"""A load of a storage's rows in two phases: a plan, which has verified what it can, and its `commit`."""

from __future__ import annotations

from collections.abc import Callable


class RowsPlan:
    """A replacement of all rows of a storage, which the caller uses alone.

    Attributes:
        is_committed: whether other rows have taken the place of those of before.
        undo: puts everything back as it was when this was made; None: there was too much to hold.
    """

    def __init__(self, fill: Callable[[], None], undo: Callable[[], None] | None) -> None:
        self._fill = fill
        self.is_committed = False
        self.undo = undo

    def commit(self) -> None:
        self._fill()
        self.is_committed = True

    def run(self) -> None:
        """Commits it; after an error the storage is as it was."""
        try:
            self.commit()
        except BaseException:
            if self.undo is not None:
                self.undo()
            raise
