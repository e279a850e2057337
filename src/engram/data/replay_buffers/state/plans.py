"""How a storage is saved and loaded: a load is a plan, which has verified what it can, and its `commit`."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from engram.errors import CheckpointMisfitError
from engram.store.counters import removed_bits
from engram.store.lanes import Lanes
from engram.store.rows import Checked, Rows


class TooManyRowsError(Exception):
    """A load has more rows than are held aside until all of them are verified."""


class RowsPlan(NamedTuple):
    """A replacement of all rows of a storage, which the caller uses alone.

    Attributes:
        commit: replaces them.
        undo: puts everything back as it was when this was made; None: there was too much to hold.
        replaces_rows: whether there are rows that are lost; else there was nothing to compare other parts with.
        incarnations: what changes when rows are replaced, of each table.
    """

    commit: Callable[[], None]
    undo: Callable[[], None] | None
    replaces_rows: bool
    incarnations: Callable[[], list[tuple[bytes, int]]]

    def run(self) -> None:
        """Commits it; after an error the storage is as it was."""
        try:
            self.commit()
        except BaseException:
            if self.undo is not None:
                self.undo()
            raise


class SavableStorage(Protocol):
    """A storage, as saving and loading use it: the methods and attributes of `Storage` that have these names."""

    mutex: Any
    access: Any
    checkpointer: Any

    @property
    def saved_form(self) -> SavedStorage: ...

    @property
    def max_size(self) -> int | None: ...

    @property
    def lanes(self) -> Lanes: ...

    def __len__(self) -> int: ...

    def check(self, items: Any, single: bool, /) -> Checked: ...

    def append(self, checked: Checked, /) -> Tensor | int: ...

    def read(self, slots: Tensor, /) -> Rows: ...

    def empty(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class _Run(NamedTuple):
    """The rows of a lane, counted as in the storage that was saved, however its sequences were shifted since."""

    rows: int
    end: int
    seams: list[int]


def _run(lane: dict[str, Any]) -> _Run:
    base, origin = lane["base"], lane["origin"]
    end, *seams = [(at - origin) % (1 << 64) for at in (lane["published"], *(s for s in lane["seams"] if s > base))]
    return _Run(lane["published"] - base, end, seams)


class SavedStorage(abc.ABC):
    """A storage, as it is saved and loaded. The caller holds its mutex, and for a load uses it alone."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    @property
    def storage(self) -> Any:
        return self._storage

    def is_empty(self) -> bool:
        """Whether there is nothing that a load would replace."""
        return not len(self._storage)

    def incarnations(self) -> list[tuple[bytes, int]]:
        """What changes when rows are replaced, of each of its tables."""
        store = self._storage.lanes.store
        return [(store.store_id, store.incarnation)]

    @abc.abstractmethod
    def default_checkpointer(self) -> Any:
        """What encodes such a storage for disk, where no other checkpointer is given."""

    @abc.abstractmethod
    def source(self, background: bool) -> Any:
        """What the checkpointer saves: as it is now, though other processes may write.

        In the background this process may write, too; the source then has `left_out` and `close()`.
        """

    def sink(self) -> Any:
        """What the checkpointer fills."""
        return self._storage

    @abc.abstractmethod
    def staging(self) -> Any:
        """Takes a saved state, which the storage gets in `commit()`; None: that is not possible."""

    @abc.abstractmethod
    def restore_point(self) -> Callable[[], None] | None:
        """A function that puts everything back as it is now, after a load that failed; None: too much to hold."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """Rows and counters in memory."""

    def check_fits(self, state: Any) -> None:
        """A CheckpointMisfitError, with every difference, where a state cannot be filled in; changes nothing."""
        try:
            self.check(state)
        except CheckpointMisfitError:
            raise
        except ValueError as error:
            raise CheckpointMisfitError("the state does not fit this storage", [str(error)]) from error

    @abc.abstractmethod
    def check(self, state: Any) -> None:
        """A ValueError where this is not what `state` gave, or does not fit; changes nothing."""

    @abc.abstractmethod
    def fill(self, state: dict[str, Any]) -> None:
        """Replaces everything by a state that fits."""

    def row_form(self) -> Any:
        """What an empty copy must know about the rows before their state is loaded; None: nothing."""
        return None

    def take_row_form(self, form: Any) -> None:
        """Makes room, in an empty copy, for rows of what `row_form` returned."""

    @abc.abstractmethod
    def copy_to(self, other: Any, memo: dict[int, Any]) -> None:
        """Puts a copy of every row into an empty storage with the same arguments."""

    def counters(self) -> dict[str, Any] | None:
        """The counters of the rows, as a RowSource and an ItemSource have them; None: it has no rows of its own."""
        counters: dict[str, Any] = self.source(background=False).counters()
        return counters

    def place_as_saved(self, counters: dict[str, Any]) -> None:
        """After `set` filled the storage, slot by slot, with the rows of these counters: makes these its own.

        The oldest row of a ring that had begun anew is not in slot 0. Rows that `load_state_dict` filled in, or others
        than as many, stay as they are.

        Raises:
            CheckpointMisfitError: the rows are of several lanes or environments.
        """
        own, saved = self.counters(), counters
        if own is None:
            return
        ours, theirs = ([_run(lane) for lane in one["lanes"]] for one in (own, saved))
        first = own["lanes"][0]["base"]
        is_as_saved = ours == theirs and first in (0, saved["lanes"][0]["base"])
        if is_as_saved:
            self._remove_as_saved(own, saved)
        if [run.rows for run in ours] == [run.rows for run in theirs] and not is_as_saved:
            if len(ours) > 1 or saved["envs"] > 1:
                raise CheckpointMisfitError(
                    "rows of several lanes or environments were filled in slot by slot, and nothing says their order: "
                    "save state_dict() of the storage, and load it by load_state_dict"
                )
            if (first % (own["lane_capacity"] or 1), ours[0].end) == (0, ours[0].rows):
                self.recount(saved, saved["lanes"][0]["base"] % (saved["lane_capacity"] or ours[0].rows or 1))

    def _remove_as_saved(self, own: dict[str, Any], saved: dict[str, Any]) -> None:
        """Removes the rows that were removed when these were saved, which `set` does not know; both are counters."""
        lanes = self._storage.lanes
        if not any("removed" in lane for lane in own["lanes"]):
            for i, lane in enumerate(saved["lanes"]):
                lanes.store.restore_removed(i, own["lanes"][i]["base"], removed_bits(lane, saved["envs"]))

    @abc.abstractmethod
    def recount(self, counters: dict[str, Any], oldest: int) -> None:
        """Gives the rows, of which this slot has the oldest, the counters of a storage with as many."""

    def hands_out(self, needs: str) -> bool:
        """Whether a checkpointer finds what it needs here."""
        return hasattr(type(self._storage), needs)

    def plan_load(self, saved: Any) -> RowsPlan:
        """A load of what was saved; over stored rows it is verified before: here, or in `commit` and then read again.

        Errors as `loads`.
        """
        checkpointer = self._storage.checkpointer
        load = functools.partial(saved.load_storage, checkpointer)
        is_empty = self.is_empty()
        staging = None if is_empty else checkpointer.staging(self)
        commit: Callable[[], None] | None = None
        if staging is not None:
            try:
                load(staging)
                commit = staging.commit
            except TooManyRowsError:  # they are verified, and then read a second time
                pass
        if commit is None:
            commit = functools.partial(load, checkpointer.sink(self))
        return RowsPlan(commit, self.restore_point(), not is_empty, self.incarnations)


def has_hooks(checkpointer: Any) -> bool:
    """Whether hooks change what a checkpointer saves or loads."""
    return bool(getattr(checkpointer, "save_hooks", ()) or getattr(checkpointer, "load_hooks", ()))
