"""A shard's store on this machine, opened beside its process: rows that are written and drawn without a call.

The store outlives its shard's process, so each use first looks whether that lives (`FolderWatch`, which may be 5 ms
late), and `flush` does so again: rows that no shard would serve are neither written nor drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from engram.data import LazyMemmapStorage, RandomSampler
from engram.distributed.blocks import Block
from engram.distributed.client import PendingCall, ShardClient
from engram.distributed.folder_lock import FolderWatch, watch_folder
from engram.distributed.producers import STREAMS, LentStream, Tenancy
from engram.distributed.shard import DrawnRows
from engram.distributed.shard_sampling import draw_rows
from engram.errors import ShardUnavailableError, StorageError
from engram.kernel.rows import AdoptedStream


class ShardMovedError(ShardUnavailableError):
    """A shard has come back elsewhere, with another store than the one that is open here."""


def await_shard(shard: ShardClient, watch: FolderWatch, deadline: float, written: int = 0) -> None:
    """Waits until the shard is back in the folder that it has left.

    Args:
        written: rows that the shard had, as `ShardClient.forget`.

    Raises:
        ShardUnavailableError: it is not until then; ShardGoneError: it never will be.
        ShardMovedError: it is back elsewhere.
    """
    shard.forget(written)
    shard.await_presence(deadline)
    if not watch.look():
        raise ShardMovedError(
            f"shard {shard.number} is back with another store than the one that was open here: on another machine, or "
            "its folder was removed"
        )


class LocalProducer:
    """A producer that writes to a shard's store itself; used as `Producer`.

    Its rows are in when `extend` returns, and stay in if this process or the shard's dies. While the shard is away
    nothing is written.
    """

    def __init__(self, shard: ShardClient, name: str, timeout: float) -> None:
        self.shard = shard
        self.name = name
        self.timeout = timeout
        self._tenancy: Tenancy | None = None
        self._storage: LazyMemmapStorage | None = None
        self._stream: AdoptedStream | None = None  # of the storage
        self._watch: FolderWatch | None = None  # beside the storage
        self._before = 0  # rows of tenancies before

    @property
    def has_joined(self) -> bool:
        """Whether it has a tenancy, as far as it knows."""
        return self._tenancy is not None

    @property
    def unacknowledged(self) -> int:
        """0: rows are in at once."""
        return 0

    @property
    def acknowledged(self) -> int:
        """How many rows of this producer are in, over all tenancies of this object."""
        return self._before + self.in_tenancy

    @property
    def in_tenancy(self) -> int:
        """How many of these are of the tenancy."""
        return 0 if self._stream is None else self._stream.rows

    def extend(self, block: Block, deadline: float | None = None) -> Tensor:
        """Appends rows; returns their slots, int64 [n]. Errors as `Producer.extend`, `append_packed`, and `open`.

        The caller lets one thread at a time in: nobody else has this storage.
        """
        self.open(deadline)
        storage, stream = self._storage, self._stream
        assert storage is not None and stream is not None
        with stream.writing():
            if len(block.parts) > 1:
                return storage.append_leaves(list(block.parts))
            return storage.append_packed(block.parts[0])

    def generations(self, slots: Tensor) -> Tensor:
        """The sequences of the rows in slots of the open store, int64 [n]."""
        assert self._storage is not None
        return self._storage.lanes.generations(slots)

    def open(self, deadline: float | None = None) -> None:
        """Joins, if it has not yet, and opens the store, whose shard lives then; errors as `Producer.open`.

        ShardMovedError: the shard has another store by now.
        """
        if self._watch is not None and self._watch.is_held():
            return
        deadline = time.monotonic() + self.timeout if deadline is None else deadline
        if self._watch is not None and self._storage is not None:
            await_shard(self.shard, self._watch, deadline, self._storage.write_count)
            return
        while not self._open_now(deadline):
            pass

    def _open_now(self, deadline: float) -> bool:
        """Joins and opens the store; False: the shard has ended meanwhile, and is back. Errors as `open`."""
        tenancy: Tenancy
        tenancy, life = self.shard.ask_with_life(deadline, "join", self.name)
        try:
            call = self.shard.begin("lend", self.name, tenancy.number, life=life)
            lent: LentStream = self.shard.finish(call, deadline)
        except ShardUnavailableError:
            if time.monotonic() > deadline:
                raise
            return False
        watch = watch_folder(lent.folder)
        if watch is None:
            raise ShardMovedError(f"shard {self.shard.number} does not live in {lent.folder} on this machine")
        incarnation = self.shard.totals.incarnation
        try:
            storage = LazyMemmapStorage(None, lent.folder, existsok=True)
            try:
                stream = AdoptedStream(storage.lanes, Path(lent.folder) / STREAMS, lent.entry, tenancy.number)
            except BaseException:
                storage.close()
                raise
        except StorageError:  # of one that has ended the rows may be served by calls again, the folder removed
            watch.close()
            self.shard.forget()
            if self.shard.await_presence(deadline).totals.incarnation == incarnation:
                raise
            return False
        self._tenancy, self._storage, self._stream, self._watch = tenancy, storage, stream, watch
        return True

    def flush(self, timeout: float | None = None) -> None:
        """Waits until the shard lives in which the rows are; errors as `Producer.flush`."""
        if self._storage is not None and self._watch is not None and not self._watch.look():
            try:
                self.open(time.monotonic() + (self.timeout if timeout is None else timeout))
            except ShardMovedError:  # `ShardClient` has warned of rows that are lost with the other store
                self.abandon()

    def release(self) -> None:
        """Closes the store; the tenancy stays, and the next `extend` opens the store again."""
        if self._storage is not None:
            self._storage.close()
        if self._watch is not None:
            self._watch.close()
        self._storage = self._stream = self._watch = None

    def abandon(self) -> None:
        """Closes a store that is not the shard's any more, and with which the tenancy has ended."""
        self._before = self.acknowledged
        self._tenancy = None
        self.release()

    def leave(self, deadline: float | None = None) -> None:
        """Ends the tenancy, within `timeout` or until `deadline`; errors as `flush`, and `ShardClient.ask`."""
        deadline = time.monotonic() + self.timeout if deadline is None else deadline
        self.flush(deadline - time.monotonic())
        self.release()
        if self._tenancy is not None:
            tenancy, self._tenancy = self._tenancy, None
            self._before += int(self.shard.ask(deadline, "leave", self.name, tenancy.number))


class LocalReader:
    """Draws rows of a shard's store itself; its actor is not asked. Batches of it are merged as those of calls.

    Raises:
        StorageError: the store cannot be opened.
    """

    def __init__(self, shard: ShardClient, folder: str, watch: FolderWatch) -> None:
        self._shard = shard
        self._watch = watch
        self._storage: Any = LazyMemmapStorage.open(folder, read_only=True)
        self._sampler = RandomSampler()  # which says what is drawn from

    @property
    def is_live(self) -> bool:
        """Whether the shard's process lives in this store, or did a moment ago."""
        return self._watch.is_held()

    def draw(self, n: int, seed: int) -> PendingCall:
        """As `ReplayShard.draw`; the rows are read when the answer is asked for."""
        return _LocalDraw(lambda: self._draw(n, seed))

    def _draw(self, n: int, seed: int) -> DrawnRows:
        if not self.is_live:
            raise ShardUnavailableError(f"the process of shard {self._shard.number} has ended")
        drawn = draw_rows(self._storage, n, seed)
        rows, writes = len(self._storage), self._storage.write_count
        totals = self._shard.totals._replace(rows=rows, writes=writes, draws=self._sampler.totals(self._storage))
        return DrawnRows(*drawn, None, None, None, None, totals)

    def close(self) -> None:
        self._storage.close()
        self._watch.close()


class _LocalDraw(PendingCall):
    def __init__(self, draw: Callable[[], DrawnRows]) -> None:
        self._draw = draw

    def result(self, timeout: float) -> DrawnRows:
        return self._draw()

    def has_come(self) -> bool:
        return True
