"""A load of a storage's rows in two phases: a plan, which has verified what it can, and its `commit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class RowsPlan(NamedTuple):
    """A replacement of all rows of a storage, which the caller uses alone.

    Attributes:
        commit: replaces them.
        undo: puts everything back as it was when this was made; None: there was too much to hold.
    """

    commit: Callable[[], None]
    undo: Callable[[], None] | None

    def run(self) -> None:
        """Commits it; after an error the storage is as it was."""
        try:
            self.commit()
        except BaseException:
            if self.undo is not None:
                self.undo()
            raise
