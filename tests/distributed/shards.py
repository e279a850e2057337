"""What the tests of shards share: rows with numbers, shards of them, and a client without a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from contracts.waiting import NEVER
from engram.data import RandomSampler
from engram.distributed import ReplayShard, draw_sequences, pack, unpack
from engram.distributed.client import PendingCall, ShardLink
from engram.distributed.sharded import ShardedReplayBuffer, ShardedSettings
from engram.errors import ShardGoneError, ShardUnavailableError
from engram.store.layout import RowLayout


def rows(start: int, stop: int, trajectory: int = 0) -> TensorDict:
    n = torch.arange(start, stop)
    return TensorDict({"n": n, "wide": torch.stack([n * 2.0, -n.double()], -1), "traj": n * 0 + trajectory}, [len(n)])


LAYOUT = RowLayout.of(rows(0, 1), 1)


def shard(capacity: int = 400, **settings: Any) -> ReplayShard:
    new = ReplayShard(capacity, **{"lanes": 4, "idle": 1e9, "timeout": 0.0, **settings})
    new.adopt(new.incarnation, LAYOUT.to_bytes())
    return new


def write(to: ReplayShard, producer: str, batch: TensorDict, first: int | None = None, **more: Any) -> Any:
    """Joins, and appends a batch behind the producer's rows that are in."""
    tenancy = to.join(to.incarnation, producer)
    at = tenancy.rows if first is None else first
    return to.extend(to.incarnation, producer, tenancy.number, at, pack(LAYOUT, batch), **more)


def read(shard: ReplayShard, producer: str) -> list[int]:
    """The numbers of all rows of a producer that are there, oldest first; fails unless every row is whole."""
    table = shard._producers.table
    entry, numbers = table.entries[producer], []
    ranges = shard.ranges(shard.incarnation)[:, 0].tolist()
    for _, lane, sequence, n in sorted(table.places(entry, 0, table.rows(entry))):
        sequences = torch.arange(max(sequence, ranges[lane]), sequence + n)
        taken = shard.take(shard.incarnation, torch.full_like(sequences, lane), sequences)
        assert bool(taken.present.all())
        numbers += whole(unpack(LAYOUT, taken.block)).tolist()
    return numbers


def read_all(shard: ReplayShard) -> list[int]:
    """The numbers of all rows of a shard, lane by lane, the oldest of each first; fails unless every row is whole."""
    numbers = []
    for lane, (first, stop) in enumerate(shard.ranges(shard.incarnation).tolist()):
        sequences = torch.arange(first, stop)
        taken = shard.take(shard.incarnation, torch.full_like(sequences, lane), sequences)
        assert bool(taken.present.all())
        numbers += whole(unpack(LAYOUT, taken.block)).tolist()
    return numbers


def whole(batch: TensorDict) -> torch.Tensor:
    """The numbers of rows; fails unless all values of a row are its own."""
    n = batch["n"]
    assert torch.equal(batch["wide"], torch.stack([n * 2.0, -n.double()], -1))
    return n


def draw(shards: Sequence[ReplayShard], ranges: list[torch.Tensor], n: int) -> tuple[list[int], int]:
    """The numbers of n rows that are drawn uniformly from ranges, those apart that are gone by now, and how many."""
    drawn = draw_sequences(ranges, n)
    numbers: list[int] = []
    for k, one in enumerate(shards):
        mine = drawn.shard == k
        taken = one.take(one.incarnation, drawn.lane[mine], drawn.sequence[mine])
        numbers += whole(unpack(LAYOUT, taken.block))[taken.present].tolist()
    return numbers, n - len(numbers)


class Link(ShardLink):
    """Calls of a shard in this process, which can be lost.

    Attributes:
        shard: None: it is gone.
        lose: of a call's method, whether it is lost: "call": it does not arrive; "answer": it is carried out.
        late: calls are carried out when somebody waits for their answer.
        silent: no call has been answered yet, nor will be while this is set.
        is_gone: the shard, of None, is not started again.
    """

    def __init__(self, shard: ReplayShard | None) -> None:
        self.shard = shard
        self.lose: Callable[[str], str | None] = lambda method: None
        self.calls: list[str] = []
        self.late = self.silent = self.is_gone = False

    def end(self) -> None:
        """Ends the shard as the death of its process does."""
        assert self.shard is not None
        self.shard.close()
        self.shard = None

    def call(self, method: str, *arguments: Any, answer_bytes: int = 0) -> PendingCall:
        if self.late or self.silent:
            return _LateAnswer(self, lambda: self._now(method, *arguments))
        return self._now(method, *arguments)

    def _now(self, method: str, *arguments: Any) -> PendingCall:
        self.calls.append(method)
        fate = self.lose(method)
        if self.shard is None or fate == "call":
            return _Answer(error=(ShardGoneError if self.is_gone else ShardUnavailableError)("gone"))
        try:
            answer = _Answer(getattr(self.shard, method)(*arguments))
        except Exception as error:
            answer = _Answer(error=error)
        return _Answer(error=ShardUnavailableError("lost")) if fate == "answer" else answer


class _LateAnswer(PendingCall):
    def __init__(self, link: Link, call: Callable[[], PendingCall]) -> None:
        self._link, self._call = link, call

    def result(self, timeout: float) -> Any:
        if self._link.silent:
            raise TimeoutError
        return self._call().result(timeout)

    def has_come(self) -> bool:
        return True


class _Answer(PendingCall):
    def __init__(self, answer: Any = None, error: Exception | None = None) -> None:
        self._answer, self._error = answer, error

    def result(self, timeout: float) -> Any:
        if self._error is not None:
            raise self._error
        return self._answer

    def has_come(self) -> bool:
        return True


def client(links: Sequence[ShardLink], **settings: Any) -> ShardedReplayBuffer:
    """A buffer over these links."""
    own = {name: settings.pop(name) for name in ("local", "producer", "generator") if name in settings}
    settings = {"sampler": RandomSampler(), "batch_size": 16, "timeout": NEVER, **settings}
    return ShardedReplayBuffer(links, ShardedSettings(**settings), **own)
