"""How a buffer that takes rows out of a queue waits for them: a batch is chosen by waiting for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engram.data.replay_buffers.buffers.waiting import Waits, more_rows
from engram.data.replay_buffers.reading.reader import EpochOverError
from engram.data.replay_buffers.samplers.queue import QueueSampler
from engram.store.flow import Flow, RateLimit
from engram.store.waits import HopelessError, writers_shown

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage


class _FlowOfQueue:
    """What a buffer whose sampler takes rows out of a queue looks at before each draw: that it has to take them."""

    @property
    def watched(self) -> _FlowOfQueue:
        return self

    @property
    def is_limited(self) -> bool:
        return True

    def take_samples(self, n: int) -> int:
        """-1: `QueueWaits.take` chooses the rows."""
        return -1


class QueueWaits(Waits):
    """The waits of a buffer that takes rows out of a queue: a batch is chosen by waiting for it.

    Args:
        prefetch: whether batches are prepared ahead.
    """

    def __init__(self, storage: Storage, sampler: QueueSampler, prefetch: bool) -> None:
        if prefetch:
            raise ValueError(
                "a QueueSampler takes each batch out of the queue when it is wanted: make the buffer without prefetch"
            )
        super().__init__(storage, sampler)
        self._queue_sampler = sampler
        self._of_table: Flow = self.flow
        self.flow: Any = _FlowOfQueue()
        with storage.mutex:
            self._of_table.name_queue(sampler.setting)

    def take(self, n: int, wait: bool | None, deadline: float | None) -> Callable[[], None] | None:
        sampler, storage = self._queue_sampler, self._storage
        if self._of_table.conflict:
            raise ValueError(self._of_table.conflict)
        if n > storage.lanes.capacity:
            raise ValueError(
                f"a batch of {n:,} rows is more than the queue has room for, {storage.lanes.capacity:,}: it would "
                "never be there. Make the storage larger, or the batch smaller"
            )
        if n % (envs := storage.lanes.envs):
            raise ValueError(
                f"a queue hands out whole time steps, which have {envs} rows here, one of each environment: a batch of "
                f"{n:,} rows ends in the middle of one. Make it a multiple of {envs}"
            )

        def ready() -> bool:
            if self.successor is not None:
                return True
            sampler.check_is_queue(storage)
            if sampler.take_ahead(storage, n):
                return True
            if why := self._why_full():
                raise RuntimeError(why)
            queue = storage.lanes.queue
            if queue is not None and queue.is_one:
                queue.note_reader_waits()
            return False

        if self.successor is None and ready():
            return sampler.put_off
        if wait is False:
            if not ready():
                raise RuntimeError(f"{self._lacks_rows(n)}; wait=False")
        else:
            for_rows = self._wait(ready, lambda: self._lacks_rows(n), self._no_writer, inserts=False)
            for_rows._replace(hopeless=lambda: for_rows.hopeless() or self._why_stuck(n))(deadline)
        if self.successor is not None:
            sampler.put_off()
            return self.successor.take(n, wait, deadline)
        return sampler.put_off

    def take_next(self, n: int) -> tuple[int, Callable[[], None] | None]:
        while True:
            try:
                return super().take_next(n)
            except HopelessError:
                sampler = self._queue_sampler
                if sampler.take_ahead(self._storage, n, fewer=True):
                    return sampler.taken_ahead, sampler.put_off
                if self._nobody_writes(self._storage.lanes):
                    raise EpochOverError from None

    def can_take(self, n: int) -> bool:
        return True  # as the sampler says

    def _why_stuck(self, n: int) -> str:
        """Why neither who samples goes on nor who writes; "": they do."""
        queue = self._storage.lanes.queue
        if queue is None or queue.overwrites:
            return ""
        before = queue.consumed
        if queue.total_room or queue.removed_next or self._queue_sampler.can_sample(self._storage, n):
            return ""
        if queue.total_room or queue.consumed != before:  # somebody takes rows, who makes room
            return ""
        return (
            f"The queue is full, and has no batch of {n:,} rows: behind rows that wait are others that were removed, "
            "or are too old, and keep their places until those are taken. Sample fewer, or make the storage larger"
        )

    def _limit(self) -> RateLimit | None:
        return None

    def _lacks_rows(self, n: int) -> str:
        lanes = self._storage.lanes
        queue = lanes.queue
        waiting, kept = (0, 0) if queue is None else (queue.waiting, queue.kept_rows)
        left = max(1, n - waiting)
        if waiting >= n:
            return (
                f"sample waits for rows that are not too old: {waiting:,} wait, of which fewer than {n:,} are not"
                f"{writers_shown(lanes)}"
            )
        also = f"; {kept:,} of {lanes.capacity:,} wait for commit()" if kept else ""
        if self._queue_sampler.max_staleness is not None and queue is not None and queue.stale:
            also += f"; {queue.stale:,} were too old"
        ends = "" if lanes.locks is None else ". Rows that are left can be taken by a smaller batch"
        return f"sample waits for {more_rows(left)}: {waiting:,} of {n:,} are there{also}{writers_shown(lanes)}{ends}"

    def _why_full(self) -> str:
        """Why no row can be written before this process commits; "": some can, or others commit."""
        lanes, sampler = self._storage.lanes, self._queue_sampler
        queue = lanes.queue
        if queue is None or not (queue.commits and queue.kept_rows and not queue.room):
            return ""
        if sampler.is_committed_elsewhere or (lanes.locks is not None and lanes.locks.is_open_elsewhere()):
            return ""
        if lanes.locks is None and not self._is_alone(lanes):
            return ""
        return (
            f"sample waits for rows, and there is no room for any: {queue.kept_rows:,} of {lanes.capacity:,} rows were "
            "handed out and wait for commit(), which nobody else calls. Save the model and commit more often "
            "(`with rb.committing() as position`), or make the storage larger"
        )
