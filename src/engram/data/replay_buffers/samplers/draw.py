"""A draw as data: the rows that a sampler chose for one batch, what is said of them, and what makes them stale."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import engram._native as _native
from engram.pytree import KeyPath, to_tensor
from engram.store.episodes import EpisodeIndex

Index = Tensor | tuple[Tensor, ...]
#: The content of an entry ("last", "first", "first if any", "mask" or "slice_id"), and its path.
Mark = tuple[str, KeyPath]
#: Names an epoch of a sampler: its origin, which is another value once the sampler was set anew (emptied, loaded, given
#: another number or length of slices), and a number that is another one for each epoch that follows. A loop over an
#: epoch ends where the number changes, but goes on in the epoch of a sampler that was set anew meanwhile.
EpochName = tuple[Any, int]


class EpochInfo(dict[str, Any]):
    """The info of a batch that belongs to an epoch: a dict that also names the epoch, by a number in this process.

    Rows of such a batch that are overwritten before they are read are drawn again from the same epoch or not at all: a
    row of another epoch could be one that this epoch has already given.
    """

    ids = itertools.count()
    epoch: int | None = None


class DrawPlan(NamedTuple):
    """How a sampler draws from one storage: all that those who read batches of it, or write to it, need to know.

    Attributes:
        draw: draws a batch of n, with all that is needed to read it. The caller holds the sampler's lock.
        update: as `Sampler.update_priority`, under the lock.
        most_rows: the most rows that a batch of n can have: asked before a huge one is drawn. None: not known.
        cursor: what a draw changes, for `put_back`: taken before every batch that is prepared ahead, so small. The
            caller holds the lock.
        put_back: goes back to where the sampler stood at a cursor, to draw the same again.
        takes_lock: whether `draw` takes the lock by itself, which is all that it needs.
        ran_out: whether the epoch of the last draw is over; None: there are no epochs. The caller holds the lock.
        own_info: whether its info has what a sampler of a user's own says of each row, which batches have, too.
        native: draws the rows of a batch inside the one native call that makes it, the same as `draw` would; None: only
            `draw` does. The rows are looked at before it draws and after they were read.
        episodes: the trajectories that it draws from; None: it draws steps.
        is_loose: says whether the rows of a batch do not follow each other in time; None: they do, or it is not known.
        epoch: names the epoch of the last draw; None: there are none that are known. The caller holds the lock.
        can_repeat: whether a draw that is not believed may be made again; an epoch would leave out the rows of the
            first one.
        full_batches: whether batches that are not full are left out.
        check_rows: called before each write with the number of rows: a ValueError where the storage with these would
            hold more than the sampler can. None: it can hold what the storage can.
        takes_priorities: whether the sampler takes the priorities that come with data.
        takes_updates: whether its `update_priority` does anything.
        is_told: whether its `add` and `extend` are called after each write.
    """

    draw: Callable[[int], Draw]
    update: Callable[..., None]
    most_rows: Callable[[int], int | None]
    cursor: Callable[[], Any]
    put_back: Callable[[Any], None]
    takes_lock: bool = True
    ran_out: Callable[[], bool] | None = None
    own_info: bool = False
    native: _native.RowDraw | None = None
    episodes: EpisodeIndex | None = None
    is_loose: Callable[[], bool] | None = None
    epoch: Callable[[], EpochName] | None = None
    can_repeat: bool = False
    full_batches: bool = False
    check_rows: Callable[[int], None] | None = None
    takes_priorities: bool = False
    takes_updates: bool = False
    is_told: bool = False


class Draw:
    """The rows that a sampler drew for one batch, each of them by itself.

    Attributes:
        index: of the rows, as users get it; `slots`, int64 [n], are the same rows.
        info: what is said of the batch.
        seen: what knows which rows of `store` have changed since they were drawn: after a read
            `seen.stale(store, slots)` gives their positions. None: any row may be read that is in a slot.
        again: draws other rows in the same way: a Draw of n, or of fewer.
        rest: up to n slots more of the same epoch; None: lost rows are replaced by any others.
        runs: the slices that rows belong to; None: to none. `marks`: what is marked in their batch, `flags`: keys in
            info and paths in the batch of flags that info gives, too.
        taken: called when the rows were read, with whether all of them are there: they are handed out by that, or it
            raises an error, after which they are drawn anew. None: nobody waits for it.
        epoch: names its epoch; rows of another have no place in its batch. None: any have.
        last: whether it is the last of its epoch; `incarnation`: of the storage before the draw; `member`: which of
            the tables of a batch the rows are of. Readers set them, and `epoch`.
        kind: of the sampler, for errors.
    """

    taken: Callable[[bool], None] | None = None
    epoch: EpochName | None = None
    last: bool = False
    incarnation: int
    member: int = 0
    store: _native.Store
    seen: Any = None
    rest: Callable[[int], Any] | None = None
    runs: _native.SliceBatch | None = None
    marks: tuple[Mark, ...] = ()
    flags: dict[Any, KeyPath]

    def __init__(
        self, index: Index, slots: Tensor, info: dict[Any, Any], kind: str, again: Callable[[int], Any]
    ) -> None:
        self.index, self.slots, self.info, self.kind, self.again = index, slots, info, kind, again

    def lost(self, overwritten: list[int] | None, absent: list[int] | None) -> list[int]:
        """The positions of rows that are not the drawn ones any more, after a read that found these gone."""
        if self.seen is not None:
            overwritten = self.seen.stale(self.store, self.slots) or overwritten
        return [] if overwritten is None and absent is None else sorted({*(overwritten or ()), *(absent or ())})

    def append(self, more: Draw) -> None:
        """Adds the rows of another draw, whose info takes the place of this one's."""
        parts = zip(*(one.index if isinstance(one.index, tuple) else (one.index,) for one in (self, more)), strict=True)
        joined = tuple(map(torch.cat, parts))
        self.index = joined if isinstance(self.index, tuple) else joined[0]
        self.slots, self.info = torch.cat([self.slots, more.slots]), more.info

    def redraw(self, positions: list[int]) -> Draw:
        """The draw with other rows at these positions, whose rows were overwritten; of an epoch it may have fewer.

        The caller holds the sampler's lock.
        """
        positions = [position for position in positions if position < len(self.slots)]
        if self.rest is not None and len(positions) < len(self.slots):
            return self._go_on_in_epoch(self.rest, positions)
        slots, n, done = self.slots.clone(), len(self.slots), 0
        while done < len(positions):  # the last draw of an epoch may give fewer
            fresh = self.again(len(positions) - done)
            self._check(fresh, len(positions))
            at = torch.tensor(positions[done : done + len(fresh.slots)], device="cpu")
            slots[at] = fresh.slots[: len(at)]
            put_rows(self.info, fresh.info, at, n)
            if self.seen is not None:
                self.seen.replace(positions, fresh.seen)
            done += len(at)
        self.slots = slots
        return self

    def _check(self, fresh: Draw, n: int) -> None:
        """RuntimeError for draws of a user's own sampler that cannot take the places of n rows."""
        if self.seen is not None and (fresh.seen is None or len(fresh.slots) != n):
            raise RuntimeError(
                f"{self.kind}.sample returned {len(fresh.slots)} rows and a {type(fresh.info).__name__} where {n} rows "
                "are to be drawn again; it must return as many as it is asked for, and the info of its base"
            )
        if not len(fresh.slots):
            raise RuntimeError(f"{self.kind}.sample returned no slots for {n} rows to be drawn again")

    def _go_on_in_epoch(self, rest: Callable[[int], Tensor], positions: list[int]) -> Draw:
        fresh = self.slots[:0]
        # A child adds entries in `sample` only: with some there are no more rows for this batch.
        if not any(is_per_row(value, len(self.slots)) for value in self.info.values()):
            fresh = rest(len(positions))
        keep = torch.ones(len(self.slots), dtype=torch.bool, device="cpu")
        keep[positions[len(fresh) :]] = False
        slots = self.slots.clone()
        slots[positions[: len(fresh)]] = fresh
        keep_rows(self.info, keep)
        self.slots = slots[keep]
        return self


class DrawnSequences:
    """What knows which of the rows that were drawn by lane and sequence have been replaced since: `Draw.seen`.

    Args:
        sequences: of the draw's rows, int64 [n]; `Lanes.slots_of` gives their slots.
    """

    def __init__(self, sequences: Tensor) -> None:
        self.sequences = sequences

    def stale(self, store: _native.Store, slots: Tensor) -> list[int] | None:
        """The positions of rows whose slots hold others, or none, by now; None: there are none."""
        return (store.generations(slots) != self.sequences).nonzero().flatten().tolist() or None

    def replace(self, positions: list[int], fresh: DrawnSequences) -> None:
        """Other rows were drawn for those at these positions."""
        self.sequences = self.sequences.index_copy(0, torch.tensor(positions, device="cpu"), fresh.sequences)


def put_rows(info: dict[str, Any], fresh: dict[str, Any], at: Tensor, n: int) -> None:
    """Puts the info of rows that were drawn again at their positions (int64) in the info of a batch of n rows."""
    for key, value in fresh.items():
        old: Any = info.get(key)
        if not is_per_row(old, n) or not is_per_row(value) or len(value) < len(at):
            continue
        if isinstance(old, Tensor):
            info[key] = old.index_copy(0, at, to_tensor(value[: len(at)]).to(old))
        else:
            info[key] = old.copy()
            for place, one in zip(at.tolist(), value, strict=False):
                info[key][place] = one


def keep_rows(info: dict[str, Any], keep: Tensor) -> None:
    """Leaves rows out of the info of a batch, whose rows to keep are True: bool [n]."""
    for key, value in list(dict.items(info)):
        if is_per_row(value, len(keep)):
            rows = keep.nonzero().flatten()
            info[key] = [value[i] for i in rows.tolist()] if isinstance(value, list) else value[rows]


def is_per_row(value: Any, n: int | None = None) -> bool:
    """Whether an entry of an info has a value for each row: a tensor, array or list; with n: of so many."""
    sized = isinstance(value, list) or (isinstance(value, Tensor | np.ndarray) and value.ndim > 0)
    return sized and (n is None or len(value) == n)
