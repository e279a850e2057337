"""A shard's store on this machine, opened beside its process: rows that are written and drawn without a call."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from engram.data.replay_buffers.samplers import DrawTotals
from engram.data.replay_buffers.storages import LazyMemmapStorage
from engram.data.replay_buffers.storages.memmap import ObservedMemmapStorage
from engram.distributed.blocks import Block
from engram.distributed.client import PendingCall, ShardClient
from engram.distributed.shard import DrawnRows, Tenancy
from engram.distributed.shard_sampling import draw_rows, lane_ranges


class LocalProducer:
    """A producer that writes to its lane of a shard's store itself; used as `Producer`.

    What it wrote is in when `extend` returns, and stays in if this process or the shard's dies.
    """

    def __init__(self, shard: ShardClient, name: str, timeout: float) -> None:
        self.shard = shard
        self.name = name
        self.timeout = timeout
        self._tenancy: Tenancy | None = None
        self._storage: LazyMemmapStorage | None = None
        self._before = 0  # rows of tenancies before

    @property
    def unacknowledged(self) -> int:
        """0: rows are in at once."""
        return 0

    @property
    def acknowledged(self) -> int:
        """How many rows of this producer are in, over all tenancies of this object."""
        if self._tenancy is None or self._storage is None or self._storage.lanes is None:
            return self._before
        published = int(self._storage.lanes.store.lane(self._tenancy.lane)["published"])
        return self._before + published - self._tenancy.begin

    def extend(self, block: Block, new_priority: float | None = None, deadline: float | None = None) -> Tensor:
        """Appends rows; returns their slots, int64 [n]. Errors as `Producer.extend`, and `append_packed`."""
        if self._storage is None:
            self.open(deadline)
        storage, tenancy = self._storage, self._tenancy
        assert storage is not None and tenancy is not None
        if len(block.parts) > 1:
            return storage.append_leaves(tenancy.lane, list(block.parts))
        return storage.append_packed(tenancy.lane, block.parts[0])

    def open(self, deadline: float | None = None) -> None:
        """Gets the lane, if it has none yet, and opens the store; errors as `Producer.open`."""
        if self._storage is not None:
            return
        deadline = time.monotonic() + self.timeout if deadline is None else deadline
        tenancy: Tenancy = self.shard.ask(deadline, "join", self.name)
        folder = self.shard.ask(deadline, "lend", self.name, tenancy.number)
        storage = LazyMemmapStorage(None, folder, existsok=True, lanes=self.shard.facts.lanes)
        try:
            assert storage.lanes is not None
            storage.lanes.hold_lane(tenancy.lane, goes_on=tenancy.rows > 0)
        except BaseException:
            storage.close()
            raise
        self._tenancy, self._storage = tenancy, storage

    def flush(self, timeout: float | None = None) -> None:
        """Nothing to do."""

    def release(self) -> None:
        """Closes the store; the tenancy goes on, and so does the next `extend`."""
        if self._storage is not None:
            self._storage.close()
            self._storage = None

    def leave(self) -> None:
        """Gives the lane back; errors as `ShardClient.ask`."""
        self.release()
        if self._tenancy is not None:
            tenancy, self._tenancy = self._tenancy, None
            deadline = time.monotonic() + self.timeout
            self._before += int(self.shard.ask(deadline, "leave", self.name, tenancy.number))


class LocalReader:
    """Draws rows of a shard's store itself; its actor is not asked. Batches of it are merged as those of calls.

    Raises:
        StorageError: the store cannot be opened.
    """

    def __init__(self, shard: ShardClient, folder: str) -> None:
        self._shard = shard
        self._storage = ObservedMemmapStorage(folder)

    def ranges(self) -> Tensor:
        """What the shard holds now: int64 [lanes, 2], as `ShardTotals` has it."""
        return lane_ranges(self._storage.lanes)

    def draw(self, ranges: Tensor, n: int, seed: int) -> PendingCall:
        """As `ReplayShard.draw`; the rows are read when the answer is asked for."""
        return _LocalDraw(lambda: self._draw(ranges, n, seed))

    def _draw(self, ranges: Tensor, n: int, seed: int) -> DrawnRows:
        rows = draw_rows(self._storage, ranges, n, seed)
        totals = self._shard.totals
        newest, writes = self.ranges(), self._storage.write_count
        share = DrawTotals(float((newest[:, 1] - newest[:, 0]).sum()))
        return DrawnRows(*rows, None, None, None, None, totals._replace(ranges=newest, writes=writes, draws=share))

    def close(self) -> None:
        self._storage.close()


class _LocalDraw(PendingCall):
    def __init__(self, draw: Callable[[], DrawnRows]) -> None:
        self._draw = draw

    def result(self, timeout: float) -> DrawnRows:
        return self._draw()

    def has_come(self) -> bool:
        return True
