"""How a buffer waits for those who write to its store, or sample from it, and what it says meanwhile."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from engram.data.replay_buffers.samplers.queue import QueueSampler
from engram.store.flow import Flow, RateLimit, limit_of, setting_of
from engram.store.waits import (
    Wait,
    is_let_through,
    let_others_go,
    nobody_else,
    note_waited,
    writers_shown,
)

if TYPE_CHECKING:
    from engram.data.replay_buffers.samplers.base import Sampler
    from engram.data.replay_buffers.samplers.ensemble import SamplerEnsemble
    from engram.data.replay_buffers.storages.base import Storage
    from engram.store.lanes import Lanes

SHUT_DOWN = "this buffer was shut down while it waited"


class Waits:
    """The waits of one buffer.

    Args:
        sampler: says whether a batch can be drawn at all.
        outer: those of an ensemble that this is a member of: what ends them ends these.
    """

    def __init__(self, storage: Storage, sampler: Sampler, outer: Waits | None = None) -> None:
        self._storage, self._sampler, self._outer = storage, sampler, outer
        #: The bound of the rows.
        self.flow: Flow = storage.access.table.flow
        #: Why waits end; "": they go on.
        self.ended = ""
        #: What has ended who filled the buffer in the background; None: nothing.
        self.failure: BaseException | None = None
        #: How many fill the buffer in the background; None: nobody ever did.
        self.filling: int | None = None
        #: Those of the parts that have taken the place of these, where who waits here goes on; None: none have.
        self.successor: Waits | None = None

    # ---- who samples ----
    def take(self, n: int, wait: bool | None, deadline: float | None) -> Callable[[], None] | None:
        """Counts n rows as drawn, as soon as they may be.

        Returns: gives them back where they are not drawn after all; None: nothing was counted.

        Args:
            wait: False: not at all; None: for the bound of the store; True: also until the sampler has a batch.
            deadline: of `time.monotonic`, until then at most; where there is one it waits as for True.

        Raises:
            RuntimeError: with `wait=False`, they may not be drawn now; or they never may.
            TimeoutError: they may not be drawn until then.
            ValueError: no batch of so many rows may ever be drawn.
        """
        limit = self._limit()
        if limit is None and wait is None and deadline is None:
            return None
        for_rows = wait is True or deadline is not None
        self._check_batch(n, limit)
        taken = 0

        def ready() -> bool:
            nonlocal taken
            if self.successor is not None:
                return True
            if for_rows and not self._sampler.can_sample(self._storage, n):
                if (limit := self._limit()) is not None and limit.widens:
                    self._storage.lanes.store.let_write()
                return False
            limit = self._limit()
            self._check_batch(n, limit)  # somebody may have set one that never lets so many be drawn
            taken = 0 if limit is None else self._storage.lanes.store.take_samples(n)
            return taken >= 0

        if wait is False:
            if limit is not None and not ready():
                raise RuntimeError(f"{self._lacks_rows(n)}; wait=False")
        else:
            self._wait(ready, lambda: self._lacks_rows(n), self._no_writer, inserts=False)(deadline)
        if self.successor is not None and taken <= 0:
            return self.successor.take(n, wait, deadline)
        return functools.partial(self._give_back, n) if taken > 0 else None

    def take_next(self, n: int) -> tuple[int, Callable[[], None] | None]:
        """As `take`, for a loop over batches of n: also how many rows the next one has.

        Raises:
            EpochOverError: there are none any more, and nobody can write others.
        """
        return n, self.take(n, None, None)

    def can_take(self, n: int) -> bool:
        """Whether n rows may be drawn now."""
        limit = self._limit()
        if limit is None:
            return True
        if self._batch_is_too_large(n, limit):
            return False
        counts = self._storage.lanes.store.rate_counts
        return counts is None or (counts[2] >= limit.min_size and counts[3] - n >= -self._ahead(n, limit))

    def undo(self, counted: int | Callable[[], None] | None) -> None:
        """Gives back n rows that were counted, or what `take` counted, where they are not drawn after all."""
        if callable(counted):
            counted()
        elif counted:
            self._give_back(counted)

    def _give_back(self, n: int) -> None:
        if self._limit() is not None:
            self._storage.lanes.store.give_back_samples(n)

    def _check_batch(self, n: int, limit: RateLimit | None) -> None:
        if limit is not None and self._batch_is_too_large(n, limit):
            raise ValueError(
                f"a batch of {n} rows is more than {limit} ever lets samplers draw at once: its error_buffer allows "
                f"ahead + behind = {limit.ahead + limit.behind:g}. Make it larger, or the batch smaller"
            )

    @staticmethod
    def _batch_is_too_large(n: int, limit: RateLimit) -> bool:
        return not limit.widens and n > limit.ahead + limit.behind

    @staticmethod
    def _ahead(n: int, limit: RateLimit) -> float:
        return max(limit.ahead, n) if limit.widens else limit.ahead

    # ---- who writes ----
    def await_room(
        self, timeout: float | None = None, what: str = "extend", stop: Callable[[], bool] | None = None, rows: int = 0
    ) -> None:
        """Waits until more rows may be written.

        Args:
            what: who waits, in messages.
            stop: whether the caller has something else to do, and comes again: then it returns.
            rows: for which a queue must have room, or for as many as it ever has. 0: who writes waits for that.

        Raises:
            TimeoutError: they may not be written until then. RuntimeError: they never may.
        """
        self.await_room_until(deadline_of(timeout), what, stop, rows)

    def await_room_until(
        self, deadline: float | None, what: str, stop: Callable[[], bool] | None = None, rows: int = 0
    ) -> None:
        """As `await_room`, until a moment of `time.monotonic`; None: any time."""
        if self._limit() is None and not (rows and self.fills_up()):
            if self.flow.watched is not None and self.fills_up() and (queue := self._storage.lanes.queue) is not None:
                let_others_go(queue)
            return
        if is_let_through() and not rows:
            return

        def ready() -> bool:
            return self.successor is not None or self.has_room(rows) or (stop is not None and stop())

        self._wait(ready, lambda: self._lacks_draws(what, rows), self._no_sampler, inserts=True)(deadline)
        if self.successor is not None:
            self.successor.await_room_until(deadline, what, stop, rows)

    def has_room(self, rows: int = 0) -> bool:
        """Whether more rows may be written now; `rows` as in `await_room`."""
        lanes = self._storage.lanes
        if not lanes.store.is_limited or not lanes.store.may_insert():
            return not lanes.store.is_limited
        if not rows or not self.fills_up():
            return True
        steps = self._steps_of(rows, lanes)
        if self._steps_of_room(lanes) >= steps or (self._pass_removed() and self._steps_of_room(lanes) >= steps):
            return True
        # Else a batch that is waited for, and rows for which there is not room enough, would wait for each other.
        queue = lanes.queue
        return queue is not None and queue.some_reader_waits and self._steps_of_room(lanes) > 0

    # ---- a queue, whose writers wait where it is full ----
    def fills_up(self) -> bool:
        """Whether the storage is a queue whose rows are not overwritten before they were handed out."""
        if conflict := self._storage.access.table.flow.conflict:
            raise ValueError(conflict)
        setting = setting_of(self._storage.lanes)
        return setting is not None and not setting.overwrites

    def await_place(self, deadline: float | None, what: str, done: int, steps: int, incarnation: Any) -> int:
        """Waits until a lane of the queue has room for a part of what is left of so many time steps; returns for how
        many.

        Args:
            incarnation: of the storage when the first of them were written.

        Raises:
            TimeoutError: none has until then. RuntimeError: none ever will, or all rows were replaced meanwhile.
        """
        found = 0

        def room() -> int:
            if self._storage.access.incarnation != incarnation:
                raise RuntimeError(
                    f"all rows of this storage were replaced while {what} waited for room; {_written(done, steps)}"
                )
            queue = self._storage.lanes.queue
            return steps if queue is None or not queue.is_one else int(queue.room)

        def ready() -> bool:
            nonlocal found
            found = room()
            if not found and self._pass_removed():
                found = room()
            if found > 0:
                return True
            queue = self._storage.lanes.queue
            if queue is not None and queue.is_one:
                queue.note_writer_waits()
            return False

        if not ready():
            note_waited()
            lacks = functools.partial(self._lacks_place, what, done, steps)
            self._wait(ready, lacks, self._no_sampler, inserts=True)(deadline)
        return min(steps - done, found)

    def _pass_removed(self) -> bool:
        """Makes room of the queue's next rows where they were removed: there may be too few others for a batch, with
        which they would go. Whether there were any.
        """
        lanes = self._storage.lanes
        queue = lanes.queue
        if queue is None or not queue.is_one or not queue.removed_next:
            return False
        with self._storage.access.table.flow.consuming:
            lanes.begin_taking()
            try:
                queue.pass_removed()
            finally:
                queue.end_turn()
        return True

    def _steps_of(self, rows: int, lanes: Lanes) -> int:
        """The time steps for which a batch of so many rows waits at the most."""
        return min(-(-rows // lanes.envs), lanes.store.lanes * lanes.store.lane_capacity)

    @staticmethod
    def _steps_of_room(lanes: Lanes) -> int:
        queue = lanes.queue
        return 0 if queue is None else int(queue.total_room)

    def _lacks_place(self, what: str, done: int, steps: int) -> str:
        lanes = self._storage.lanes
        queue = lanes.queue
        waiting, kept = (0, 0) if queue is None else (queue.waiting, queue.kept_rows)
        uncommitted = f", {kept:,} were handed out and are not committed" if kept else ""
        return (
            f"{what} waits for room in the queue: {waiting:,} rows wait to be handed out, of {lanes.capacity:,} that "
            f"fit{uncommitted}: the learner is behind, or has ended; {_written(done, steps)}"
        )

    # ---- both ----
    def count_filling(self, begins: bool) -> None:
        """Somebody fills the buffer in the background from now on, or no more."""
        self.filling = (self.filling or 0) + (1 if begins else -1)

    def _nobody_writes(self, lanes: Lanes) -> bool:
        """Whether nobody can write rows any more: as `nobody_else`; or those who filled the buffer in the background
        have ended, and no other process has the rows open.
        """
        has_ended = self.filling == 0 and (lanes.locks is None or not lanes.locks.is_open_elsewhere())
        return has_ended or self._is_alone(lanes)

    @staticmethod
    def _is_alone(lanes: Lanes) -> bool:
        return nobody_else(lanes)

    def _limit(self) -> RateLimit | None:
        """The bound of the rows now. ValueError: this process was told another one than others keep."""
        flow = self.flow
        if flow.watched is None:
            return None
        lanes = self._storage.lanes  # which looks whether another process has made the store
        if flow.conflict:
            raise ValueError(flow.conflict)
        return limit_of(lanes.store)

    def _wait(
        self, ready: Callable[[], bool], lacks: Callable[[], str], hopeless: Callable[[Lanes], str], *, inserts: bool
    ) -> Wait:
        storage, noted = self._storage, b""

        def note(seconds: float) -> None:
            nonlocal noted
            store = storage.lanes.store
            store.note_wait(inserts, int(1e9 * seconds), store.store_id != noted)  # another process may have made one
            noted = store.store_id

        def why_hopeless() -> str:
            lanes = storage.lanes
            return hopeless(lanes) if (self._is_alone if inserts else self._nobody_writes)(lanes) else ""

        return Wait(ready, lacks, why_hopeless, self.why_ended, note)

    def why_ended(self) -> str:
        """Why waits end without what they waited for; "": they go on."""
        if self.failure is not None:
            return f"what filled this buffer in the background has ended with an error: {self.failure!r:.300}"
        return self.ended or ("" if self._outer is None else self._outer.why_ended())

    def _lacks_rows(self, n: int) -> str:
        limit, lanes = self._limit(), self._storage.lanes
        if limit is None or (counts := lanes.store.rate_counts) is None:
            return f"sample waits for rows: {len(lanes):,} are stored, too few for a batch of {n}{writers_shown(lanes)}"
        written, drawn, stored, budget = counts
        if stored < limit.min_size:
            return (
                f"sample waits for {more_rows(limit.min_size - stored)}: {stored:,} of {limit.min_size:,} are there"
                f"{writers_shown(lanes)}"
            )
        lacking_draws = n - self._ahead(n, limit) - budget
        if lacking_draws <= 0:
            stands = (
                ""
                if lanes.store.may_insert()
                else ", and who writes waits for draws: nobody goes on. Make min_size_to_sample, or behind, so large "
                "that there is one among them"
            )
            return (
                f"sample waits for rows: its sampler has no batch of {n} among the {stored:,} rows that are stored"
                f"{stands}{writers_shown(lanes)}"
            )
        lacking = max(1, math.ceil(lacking_draws / limit.samples_per_insert))
        return (
            f"sample waits for {more_rows(lacking)} to be written: {drawn:,} were drawn, and {n} more would be above "
            f"{limit.samples_per_insert:g} x ({written:,} written - {limit.min_size:,}) + {self._ahead(n, limit):g}"
            f"{writers_shown(lanes)}"
        )

    def _lacks_draws(self, what: str, rows: int = 0) -> str:
        if rows and self.fills_up():
            lanes = self._storage.lanes
            return (
                f"{what} waits for room for {self._steps_of(rows, lanes) * lanes.envs:,} rows in the queue, which has "
                f"room for {self._steps_of_room(lanes) * lanes.envs:,}: the learner is behind, or has ended"
            )
        limit, counts = self._limit(), self._storage.lanes.store.rate_counts
        if limit is None or counts is None or math.isinf(limit.behind):  # somebody has ended or changed it just now
            return f"{what} waits"
        written, drawn, _, budget = counts
        return (
            f"{what} waits for {more_rows(math.ceil(budget - limit.behind))} to be drawn: {drawn:,} were, more than "
            f"{limit.behind:g} below {limit.samples_per_insert:g} x ({written:,} written - {limit.min_size:,}); the "
            "learner is behind, or has ended"
        )

    def _no_writer(self, lanes: Lanes) -> str:
        return (
            "Nobody can write them: what filled the buffer in the background has ended, or they would lie in memory of "
            "this process, which has no other thread. Write rows first: `rb.can_sample()` says when a batch can be "
            "drawn, and `sample(timeout=...)` ends by itself"
        )

    def _no_sampler(self, lanes: Lanes) -> str:
        more = "give the rate limiter a larger error_buffer, or behind=None"
        if self.fills_up():
            more = "make the storage larger than what is written before the next batch is taken"
        return (
            "Nobody can draw them: the rows lie in memory of this process, which has no other thread. Sample first "
            f"(`while rb.can_sample(): rb.sample()`), or {more}"
        )


class _FlowOfMembers:
    """What an ensemble looks at before each draw: whether a member's draws are bound."""

    def __init__(self, flows: Sequence[Flow]) -> None:
        self._flows = flows

    @property
    def watched(self) -> _FlowOfMembers | None:
        return self if any(flow.watched is not None for flow in self._flows) else None

    @property
    def is_limited(self) -> bool:
        """False: who writes, writes to a member."""
        return False

    def take_samples(self, n: int) -> int:
        """-1: a member is asked before its rows are drawn, which `WaitsOfMembers.take` does; 0: none is."""
        return -1 if any(flow.watched is not None and flow.limit is not None for flow in self._flows) else 0


class WaitsOfMembers(Waits):
    """The waits of an ensemble: each member's bound counts, and holds, what is drawn from it.

    Args:
        storage: a `StorageEnsemble`.
        prefetch: whether batches are prepared ahead.
    """

    def __init__(self, storage: Any, sampler: SamplerEnsemble, prefetch: bool) -> None:
        super().__init__(storage, sampler)
        self._ensemble, self._prefetch = sampler, prefetch
        for member in sampler.members:
            if isinstance(member, QueueSampler):
                raise TypeError(
                    "a QueueSampler takes rows out of one storage, and is no member of an ensemble: sample that buffer "
                    "by itself"
                )
        members = zip(storage.storages, sampler.members, strict=True)
        self._of_members = [Waits(*member, self) for member in members]
        self.flow: Any = _FlowOfMembers([waits.flow for waits in self._of_members])

    def fills_up(self) -> bool:
        return False  # no member is written to by the ensemble

    def take(self, n: int, wait: bool | None, deadline: float | None) -> Callable[[], None] | None:
        if self.flow.watched is None or not self.flow.take_samples(n):
            return super().take(n, wait, deadline)
        if self._prefetch:
            raise ValueError(
                "an ensemble of buffers with rate limiters draws each batch when it is wanted: make it without prefetch"
            )
        with self._ensemble.lock:
            ids, each = self._ensemble.choose_ahead(n)
        taken = contextlib.ExitStack()

        def forget() -> None:
            with self._ensemble.lock:
                self._ensemble.forget_ahead()

        taken.callback(forget)
        try:
            for i, parts in sorted(Counter(ids).items()):
                if give_back := self._of_members[i].take(parts * each, wait, deadline):
                    taken.callback(give_back)
        except BaseException:
            taken.close()
            raise
        return taken.close

    def can_take(self, n: int) -> bool:
        parts = self._ensemble.num_buffer_sampled
        most = n // parts if self._ensemble.sample_from_all else n  # all parts may be of one member
        weights = self._ensemble.p or [1.0] * len(self._of_members)
        return all(waits.can_take(most) for waits, weight in zip(self._of_members, weights, strict=True) if weight > 0)

    def _limit(self) -> RateLimit | None:
        return None


def _written(done: int, steps: int) -> str:
    return f"the first {done:,} of {steps:,} time steps were written" if done else "nothing was written"


def more_rows(n: int) -> str:
    return f"{n:,} more row{'' if n == 1 else 's'}"


def deadline_of(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise ValueError(f"timeout must be seconds, 0 or more, got {timeout!r}")
    return time.monotonic() + timeout
