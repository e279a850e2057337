"""Who waits for whom at a store: the bound on draws and writes that its users keep, and how they wait for each other.

The bound and its counts lie in the store (`rate_limit.hpp` has the rule, and what holds whoever is killed), so that
every process that opens the store keeps it, whoever set it. A `RateLimit` is what one of them names. Native writes look
at it by themselves, and leave it to the slower way of writing to wait; draws are counted by the buffer before they are
made.

So it is with a store that is a queue (`queue.hpp`), whose writers wait for room: a `QueueSetting` is what is named.
"""

from __future__ import annotations

import contextlib
import math
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import engram._native as _native
from engram.errors import StorageError
from engram.store.positions import Sessions

if TYPE_CHECKING:
    from engram.store.lanes import Lanes
    from engram.store.rows import TableRows


class RateLimit(NamedTuple):
    """A bound on the rows drawn for each row written.

    Attributes:
        samples_per_insert: rows drawn for each row written.
        min_size: rows that must be stored before one is drawn.
        ahead: rows that samplers may have drawn above that; `inf`: any number.
        behind: rows that samplers may lack before those who write wait; `inf`: they never do.
        widens: whether nobody gave the last two, so that they grow to the largest batch that is asked for.
    """

    samples_per_insert: float
    min_size: int
    ahead: float
    behind: float
    widens: bool

    def is_as(self, other: RateLimit) -> bool:
        """Whether both bind in the same way."""
        if self.widens and other.widens:
            return self[:2] == other[:2]
        return self == other

    def __str__(self) -> str:
        if math.isinf(self.ahead):
            return f"MinSize({self.min_size})"
        behind = "None" if math.isinf(self.behind) else f"{self.behind:g}"
        room = "" if self.widens else f", ahead={self.ahead:g}, behind={behind}"
        return f"SampleToInsertRatio({self.samples_per_insert:g}, min_size_to_sample={self.min_size}{room})"


class QueueSetting(NamedTuple):
    """How a store is a queue.

    Attributes:
        overwrites: whether rows that were not handed out are overwritten where it is full; else writers wait.
        commits: whether rows that were handed out keep their places until they are committed.
    """

    overwrites: bool
    commits: bool

    def __str__(self) -> str:
        full, commit = "overwrite" if self.overwrites else "wait", "manual" if self.commits else "auto"
        return f"QueueSampler(full={full!r}, commit={commit!r})"


def setting_of(lanes: Lanes) -> QueueSetting | None:
    """How a store is a queue; None: it is none."""
    queue = lanes.queue
    return QueueSetting(queue.overwrites, queue.commits) if queue is not None and queue.is_one else None


class Flow:
    """The bound of the rows of a table, as this process knows it. Who tells it something holds the storage's mutex.

    Attributes:
        named: what this process was told; None: it takes over what the store has.
        named_queue: how the store is to be a queue, as this process was told; None: as it is.
        consuming: held by the thread that takes rows out of the queue, or changes what comes next.
        sessions: which of the queue's this process takes part in.
        watched: the store, where its draws may be bound: it is asked (`take_samples`) before each; None: they cannot
            be.
        conflict: why this process may neither write nor sample: others keep another bound than it was told; "".
    """

    def __init__(self) -> None:
        self.named: RateLimit | None = None
        self.named_queue: QueueSetting | None = None
        self.consuming = threading.RLock()
        self.sessions = Sessions()
        self.watched: Any = None
        self.conflict = ""
        self._rows: TableRows
        self._counts_late = False
        self._told: bytes | None = None  # the store that was told the bound

    def use(self, rows: TableRows, *, counts_late: bool) -> None:
        """These are the rows from now on. Errors as `name`.

        Args:
            counts_late: their counters are made when they are asked for, which may not be before there are rows.
        """
        self._rows, self._counts_late, self.conflict = rows, counts_late, ""
        if self.named is not None:
            self._agree(self.named)
        if self.named_queue is not None:
            self._agree_on_queue(self.named_queue)
        self._watch()

    def after_fork(self) -> None:
        """In a child: a lock that no thread of the parent holds."""
        self.consuming = threading.RLock()
        self.sessions.after_fork()

    @property
    def limit(self) -> RateLimit | None:
        """The bound that is kept; None: there is none."""
        return None if self._counts_late and self.named is None else limit_of(self._rows.lanes.store)

    def name(self, limit: RateLimit) -> None:
        """Tells the store the bound of a buffer that uses it.

        Raises:
            ValueError: another buffer of this process, or another process, named another one; or so many rows are never
                stored at once.
            StorageError: the store was made by an engram that had no rate limiter.
        """
        if self.named is not None and not self.named.is_as(limit):
            raise ValueError(
                f"this storage keeps {self.named}, which a buffer of it was made with, and not {limit}: give both the "
                "same, or change it for all by `rb.rate_limiter = ...`"
            )
        self._refuse_both(limit, self.named_queue)
        self._agree(limit)
        self._raise_conflict()
        self.named = limit
        self._watch()

    def _raise_conflict(self) -> None:
        conflict, self.conflict = self.conflict, ""
        if conflict:
            raise ValueError(conflict)

    # ---- a queue ----
    def name_queue(self, setting: QueueSetting) -> None:
        """Makes the store a queue, for a buffer whose sampler takes rows out of one.

        Raises:
            ValueError: another buffer of this process, or another process, named another one; or the store has a rate
                limiter.
            TypeError: the rows are those of a class of a user's own, or of an ensemble.
            StorageError: the store was made by an engram whose stores were no queues, or is open for reading only.
        """
        if self._counts_late:
            raise TypeError(
                "a QueueSampler takes rows out of a storage of the library's own, which knows who waits for whom: of a "
                "class of yours, give the buffer that writes to it another sampler"
            )
        if self.named_queue is not None and self.named_queue != setting:
            raise ValueError(
                f"this storage is a {self.named_queue}, which a buffer of it was made with, and no {setting}: give "
                "both the same, or end it for all by `rb.end_queue()`"
            )
        self._refuse_both(self.named, setting)
        lanes = self._rows.lanes
        if lanes.store.read_only:
            raise StorageError("this store is open for reading only: who writes to it takes rows out of it")
        self._agree_on_queue(setting)
        self._raise_conflict()
        self.named_queue = setting
        self._watch()

    def end_queue(self) -> None:
        """The store is a queue no more, for all its users."""
        lanes = self._rows.lanes
        self.named_queue, self.conflict = None, ""
        if lanes.queue is not None:
            with _settling(lanes):
                lanes.queue.end()
        self._told = None
        self._watch()

    @staticmethod
    def _refuse_both(limit: RateLimit | None, queue: QueueSetting | None) -> None:
        if limit is not None and queue is not None:
            raise ValueError(
                f"a storage has either a rate limiter or is a queue, and this one is to have {limit} and be a {queue}: "
                "in a queue each row is handed out once, and writers wait where it is full. Leave one of them out"
            )

    def _agree_on_queue(self, named: QueueSetting) -> None:
        """As `_agree`."""
        lanes = self._rows.lanes
        if lanes.store.read_only or self._told == lanes.store.store_id:
            return
        queue = lanes.queue
        if queue is None:
            raise StorageError(
                "this store was made by an engram whose stores were no queues: `engram convert` copies its rows to a "
                "new one, out of which each can be handed out once"
            )
        with _settling(lanes):
            kept, limit = setting_of(lanes), limit_of(lanes.store)
            self._refuse_both(limit, named)
            if kept is None or (kept != named and not _is_open_elsewhere(lanes)):
                queue.begin(named.overwrites, named.commits)
            elif kept != named:
                self.conflict = (
                    f"the store is a {kept}, as its other users know, and this process was told that it is a {named}: "
                    "give both the same, or end it for all by `rb.end_queue()`"
                )
                return
        self._told = lanes.store.store_id

    def set(self, limit: RateLimit | None) -> None:
        """Binds draws and writes anew, or no more, for all users of the rows; counts begin anew. Errors as `name`."""
        if limit is None and self._counts_late and self.named is None:
            return
        lanes = self._rows.lanes
        if limit is None and lanes.store.rate_limit is None:
            return
        if lanes.store.read_only:
            raise StorageError("this store is open for reading only: who writes to it sets its rate limiter")
        if limit is not None:
            _check_fits(lanes, limit)
            self._refuse_both(limit, setting_of(lanes))
        with _settling(lanes):
            lanes.store.set_rate_limit(limit)
        self._told = lanes.store.store_id
        self.named, self.conflict = limit, ""
        self._watch()

    def _watch(self) -> None:
        if self._counts_late and self.named is None:
            self.watched = None
            return
        lanes = self._rows.lanes
        store = lanes.store
        # In memory that is private to this process nobody else sets one.
        may_be = store.has_flow and not store.read_only and (store.is_limited or lanes.locks is not None)
        self.watched = _Refusing() if self.conflict else store if may_be else None

    def _agree(self, named: RateLimit) -> None:
        """Tells the store what this process was told, or finds that others keep another bound."""
        lanes = self._rows.lanes
        store = lanes.store
        if store.read_only or self._told == store.store_id:
            return
        _check_fits(lanes, named)
        with _settling(lanes):
            kept = limit_of(store)
            self._refuse_both(named, setting_of(lanes))
            if kept is None or (not kept.is_as(named) and not _is_open_elsewhere(lanes)):
                store.set_rate_limit(named)
            elif not kept.is_as(named):
                self.conflict = (
                    f"the store keeps {kept}, which its other users keep, too, and this process was told {named}: give "
                    "both the same, or change it for all by `rb.rate_limiter = ...`"
                )
                return
        self._told = store.store_id


class _Refusing:
    """What is watched where others keep another bound: the slower ways to draw and to write say so."""

    @property
    def is_limited(self) -> bool:
        return True

    def take_samples(self, n: int) -> int:
        return -1


def limit_of(store: _native.Store) -> RateLimit | None:
    """The bound that the users of a store keep; None: none.

    Raises:
        StorageError: what the store says is no bound, as of a damaged file.
    """
    kept = store.rate_limit
    if kept is None:
        return None
    ratio, least, ahead, behind, widens = kept
    if not (0 < ratio < math.inf and 0 <= least < math.inf and ahead + behind > 0):
        raise StorageError(
            f"the store's rate limiter is damaged: {ratio:g} samples per insert from {least:g} rows on, {ahead:g} ahead"
            f", {behind:g} behind. Its rows are not: open it without one, and set another by `rb.rate_limiter = ...`"
        )
    return RateLimit(ratio, int(least), ahead, behind, widens)


def _settling(lanes: Lanes) -> contextlib.AbstractContextManager[None]:
    """A block in which no other process decides what all users of these rows keep to."""
    lanes.use()
    return contextlib.nullcontext() if lanes.locks is None else lanes.locks.settling()


def _is_open_elsewhere(lanes: Lanes) -> bool:
    """Whether another process, or another object of this one, uses these lanes."""
    return lanes.locks is not None and lanes.locks.is_open_elsewhere()


def _check_fits(lanes: Lanes, limit: RateLimit) -> None:
    """ValueError where so many rows are never stored at once; StorageError where the store keeps no bound."""
    if limit.min_size > lanes.capacity:
        raise ValueError(
            f"{limit} waits until {limit.min_size:,} rows are stored, and the storage has room for {lanes.capacity:,}: "
            "nobody could ever sample. Make one of them fit the other"
        )
    if not lanes.store.has_flow:
        raise StorageError(
            "this store was made by an engram that had no rate limiter: `engram convert` copies its rows to a new one, "
            "whose users can wait for each other"
        )


class RateFigures(NamedTuple):
    """What a store knows of its bound, and of the waits for it.

    Attributes:
        limit: the bound, as it is written.
        written: rows that were written since the counts began; what was stored then is among them.
        drawn: rows that were drawn since then.
        left: rows that may be drawn before more are written.
        waited_insert_s, waited_sample_s: seconds that those who write, and those who sample, waited, all together.
        samples_per_insert: rows drawn for each row written after those that must be there first; None: there are none.
    """

    limit: str
    written: int
    drawn: int
    left: int
    waited_insert_s: float
    waited_sample_s: float
    samples_per_insert: float | None

    def __str__(self) -> str:
        ratio = self.samples_per_insert
        each = "" if ratio is None else f" ({ratio:.4g} for each after the first)"
        return (
            f"{self.limit}: {self.drawn:,} rows drawn of {self.written:,} written{each}, {self.left:,} more may be "
            f"drawn before the next write; waited {self.waited_insert_s:.1f} s to write, "
            f"{self.waited_sample_s:.1f} s to draw"
        )


def rate_figures(store: _native.Store) -> RateFigures | None:
    """The figures of a store; None: its users keep no bound."""
    limit, counts, waits = limit_of(store), store.rate_counts, store.waits
    if limit is None or counts is None:
        return None
    written, drawn, stored, budget = counts
    room = min(budget + limit.ahead, float(_native.FIRST_REPLACED)) if stored >= limit.min_size else 0.0
    after = written - limit.min_size
    ratio = drawn / after if after > 0 else None
    return RateFigures(str(limit), written, drawn, max(0, math.floor(room)), waits[1] / 1e9, waits[3] / 1e9, ratio)


class QueueFigures(NamedTuple):
    """What a store that is a queue knows of itself, and of the waits for it.

    Attributes:
        queue: how it is one, as it is written.
        waiting: rows that are to be handed out.
        uncommitted: rows that were handed out, and keep their places until they are committed.
        room: rows for which there is room before writers wait; None: they overwrite.
        missed: rows that were overwritten before they were handed out.
        stale: rows that were too old to be handed out.
        consumer_version: the version of the policy that trains.
        waited_insert_s, waited_sample_s: seconds that those who write, and those who sample, waited, all together.
    """

    queue: str
    waiting: int
    uncommitted: int
    room: int | None
    missed: int
    stale: int
    consumer_version: int
    waited_insert_s: float
    waited_sample_s: float

    def __str__(self) -> str:
        room = "overwrites what is not taken" if self.room is None else f"room for {self.room:,} more"
        kept = f", {self.uncommitted:,} are not committed" if self.uncommitted else ""
        passed = f", {self.missed:,} missed, {self.stale:,} too old" if self.missed or self.stale else ""
        return (
            f"{self.queue}: {self.waiting:,} rows wait{kept}, {room}{passed}; waited {self.waited_insert_s:.1f} s to "
            f"write, {self.waited_sample_s:.1f} s to draw"
        )


def queue_figures(store: _native.Store) -> QueueFigures | None:
    """The figures of a store; None: it is no queue."""
    queue = _native.StoreQueue(store) if store.has_flow else None
    if queue is None or not queue.is_one:
        return None
    setting, waits = QueueSetting(queue.overwrites, queue.commits), store.waits
    room = None if setting.overwrites else queue.total_room * store.envs
    return QueueFigures(
        str(setting), queue.waiting, queue.kept_rows, room, queue.missed, queue.stale, queue.consumer_version,
        waits[1] / 1e9, waits[3] / 1e9,
    )  # fmt: skip
