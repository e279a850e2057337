"""Batches from several shards as from one buffer: rounds of many batches a call, on their way ahead, and merged."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engram.data import DrawTotals, PrioritizedSampler, RandomSampler, Sampler, SliceSampler
from engram.distributed.blocks import Block
from engram.distributed.client import PendingCall, ShardClient, finish_all, raise_if_gone
from engram.distributed.local import LocalReader
from engram.distributed.shard import DrawnRows, ShardTotals
from engram.distributed.shard_sampling import divide, importance_weights
from engram.errors import ShardUnavailableError

_AHEAD = 2  # rounds on their way
_PAUSE = 0.01  # seconds between two looks at shards that are all away
_MOST_EMPTY_ROUNDS = 100  # in a row, whose rows were all overwritten before they were read


class Rows(NamedTuple):
    """Rows from several shards in the order in which they were drawn.

    Attributes:
        flat_index: int64 [n], `shard * capacity + slot`.
        generation: int64 [n], the sequence of each row.
        weight: importance weights, float64 [n]; None: draws are not by priority.
        last: where slices end, bool [n]; mask: False where they are padded, bool [n]; None: there are none.
    """

    block: Block
    flat_index: Tensor
    generation: Tensor
    weight: Tensor | None
    last: Tensor | None
    mask: Tensor | None

    def part(self, start: int, stop: int) -> Rows:
        """Rows `start` to `stop`, in the same memory."""
        block = Block(tuple(part[start:stop] for part in self.block.parts))
        return Rows(block, *(None if x is None else x[start:stop] for x in self[1:]))  # type: ignore[arg-type]


class _Part(NamedTuple):
    """One shard's part of a round."""

    shard: int
    where: Tensor  # positions of its rows in the round, int64 [n]
    share: float  # by which draws were divided
    call: PendingCall


class _Round(NamedTuple):
    rows: int
    parts: list[_Part]
    others: list[tuple[float, DrawTotals]]  # shares of shards that were asked for nothing, and what they hold


class BatchStream:
    """Batches of one size, drawn from all shards that answer as from one buffer.

    Uniform draws: each shard draws its part from the ranges by which the client divided them, however it has grown
    since; rows that were overwritten meanwhile are left out, so the others are as likely. Draws by priority, and of
    slices: each shard draws its part, in proportion to what it held at its last answer.

    A round is many batches, as a call costs as much as some of them. The first one is one batch, each one after it
    twice as many as the one before, up to `batches_per_call`.

    Args:
        sampler: which says how shards draw.
        batch_size: rows of a batch; a multiple of the slices' length.
        row_bytes: of the layout.
        timeout: seconds that a batch may wait. A shard that has not answered after half of them, while there are
            others with rows, is left out until it does, and the rest is drawn from those.
        before_round: called before the calls of a round are made, with the time until which it may wait.
        readers: of uniform draws, those of shards whose stores are on this machine, by the shards' numbers.
    """

    def __init__(
        self,
        shards: Sequence[ShardClient],
        sampler: Sampler,
        batch_size: int,
        *,
        row_bytes: int,
        batches_per_call: int,
        timeout: float,
        generator: torch.Generator | None = None,
        before_round: Callable[[float], None] = lambda deadline: None,
        readers: Mapping[int, LocalReader] | None = None,
    ) -> None:
        self._before_round = before_round
        self._readers = dict(readers or {})
        self._left: set[int] = set()  # of the readers' shards, those that have ended, and may come back
        self._shards = shards
        self.batch_size = batch_size
        self._per_call = batches_per_call
        self._timeout = timeout
        self._generator = generator
        self._by_sequence = type(sampler) is RandomSampler
        self._sampler = sampler
        self._row_bytes = row_bytes + 16  # with its slot and sequence
        if isinstance(sampler, PrioritizedSampler):
            self._row_bytes += 8  # its weight
        self._unit = 1
        if isinstance(sampler, SliceSampler):
            self._row_bytes += 10  # its slice, and the marks of that
            if not sampler.pad_output and (not sampler.strict_length or any(sampler.span)):
                raise ValueError(
                    "batches from shards are cut from rounds of many, so slices must have one length: use "
                    "pad_output=True, or strict_length=True and span=False"
                )
            self._unit = sampler.slice_len or 1
        if batch_size % self._unit:
            raise ValueError(f"batch_size={batch_size} is no multiple of slice_len={self._unit}; choose one that is")
        self._growth = 1
        self._rounds: collections.deque[_Round] = collections.deque()
        self._ready: Rows | None = None
        self._at = 0  # the next of them

    def next(self, deadline: float | None = None) -> Rows:
        """The next batch, by `timeout` or until `deadline`.

        Raises:
            RuntimeError: there is nothing to draw; or a shard says why it cannot.
            ShardUnavailableError: no shard that has rows answers.
        """
        deadline = time.monotonic() + self._timeout if deadline is None else deadline
        empty_rounds = 0
        while self._ready is None or len(self._ready.flat_index) - self._at < self.batch_size:
            try:
                while len(self._rounds) < _AHEAD:
                    self._rounds.append(self._begin(deadline))
            except RuntimeError:
                if not self._rounds:
                    raise
            fresh = self._finish(self._rounds.popleft(), deadline)
            if fresh is not None:
                self._ready = fresh if self._ready is None else _joined(self._ready.part(self._at, 1 << 62), fresh)
                self._at = 0
                continue
            empty_rounds += 1
            if empty_rounds > _MOST_EMPTY_ROUNDS:
                raise RuntimeError("writers overwrite rows faster than they can be fetched; use larger shards")
        start = self._at
        self._at += self.batch_size
        return self._ready.part(start, self._at)

    # ---- a round ----
    def _begin(self, deadline: float) -> _Round:
        present = self._present(deadline)
        self._before_round(deadline)
        n = self.batch_size * self._growth
        self._growth = min(self._per_call, 2 * self._growth)
        return self._divided(present, n)

    def _check_readers(self) -> None:
        """Counts shards whose process has ended as away; one that is back with another store is asked from then on."""
        for k, reader in list(self._readers.items()):
            if reader.is_live:
                self._left.discard(k)
            elif k not in self._left:
                self._left.add(k)
                self._shards[k].forget()
            elif self._shards[k].is_present:
                del self._readers[k]

    def _present(self, deadline: float) -> list[int]:
        while True:
            self._check_readers()
            present = [k for k, shard in enumerate(self._shards) if shard.is_present]
            if len(present) == len(self._shards) or any(self._has_rows(k) for k in present):
                return present
            raise_if_gone(self._shards)
            if time.monotonic() > deadline:
                raise ShardUnavailableError("no shard that has rows answers; try again")
            time.sleep(_PAUSE)

    def _has_rows(self, shard: int) -> bool:
        return self._share(self._totals(shard)) > 0

    def _divided(self, present: list[int], n: int) -> _Round:
        totals = [self._totals(k) for k in present]
        shares = [self._share(one) for one in totals]
        units = n // self._unit
        counts = divide(shares, units, self._generator)
        owner = torch.arange(len(present)).repeat_interleave(counts)
        if len(present) > 1:
            owner = owner[torch.randperm(units, generator=self._generator)]
        parts, others = [], []
        for at, k in enumerate(present):
            mine = (owner == at).nonzero().flatten()
            if not len(mine):
                others.append((shares[at], totals[at].draws))
                continue
            where = mine if self._unit == 1 else (mine.unsqueeze(1) * self._unit + torch.arange(self._unit)).flatten()
            if self._by_sequence:
                seed = int(torch.randint(1 << 62, (), generator=self._generator))
                reader, ranges = self._readers.get(k), totals[at].ranges
                if reader is not None:
                    call = reader.draw(ranges, len(where), seed)
                else:
                    answer_bytes = len(where) * self._row_bytes
                    call = self._shards[k].begin("draw", ranges, len(where), seed, answer_bytes=answer_bytes)
            else:
                call = self._shards[k].begin("sample", len(where), answer_bytes=len(where) * self._row_bytes)
            parts.append(_Part(k, where, shares[at], call))
        return _Round(n, parts, others)

    def _totals(self, shard: int) -> ShardTotals:
        """The contents of a shard at its last answer; of one that is read here, the present contents."""
        totals, reader = self._shards[shard].totals, self._readers.get(shard)
        return totals if reader is None else totals._replace(ranges=reader.ranges())

    def _share(self, totals: ShardTotals) -> float:
        if self._by_sequence:
            return float((totals.ranges[:, 1] - totals.ranges[:, 0]).sum())
        return totals.draws.share

    def _finish(self, a_round: _Round, deadline: float) -> Rows | None:
        """The rows of a round; None: none came."""
        calls = [(self._shards[part.shard], part.call) for part in a_round.parts]
        came = finish_all(calls, self._patience(deadline))
        # The others' rows are as they are without a shard that is away.
        answers = [(part, answer) for part, answer in zip(a_round.parts, came, strict=True) if answer is not None]
        if not answers:
            return None
        drawn = [answer for _, answer in answers]
        weights: Sequence[Tensor | None] = [None] * len(drawn)
        if isinstance(self._sampler, PrioritizedSampler):
            nothing = torch.empty(0, dtype=torch.float64)
            ratios = [answer.ratio for answer in drawn] + [nothing] * len(a_round.others)
            held = [answer.totals.draws for answer in drawn] + [one for _, one in a_round.others]
            shares = [part.share for part, _ in answers] + [share for share, _ in a_round.others]
            weights = importance_weights(ratios, held, shares, float(self._sampler.beta))[: len(drawn)]
        together = zip(answers, weights, strict=True)
        return _merge(a_round.rows, [self._drawn(part, answer, weight) for (part, answer), weight in together])

    def _patience(self, deadline: float) -> float:
        """Until when to wait for a round: with several shards there is time left to draw from the others."""
        if len(self._shards) == 1:
            return deadline
        with_rows = sum(not shard.is_awaited and self._share(shard.totals) > 0 for shard in self._shards)
        return min(deadline, time.monotonic() + self._timeout / 2) if with_rows > 1 else deadline

    def _drawn(self, part: _Part, answer: DrawnRows, weight: Tensor | None) -> tuple[Tensor, Rows]:
        index = part.shard * self._shards[part.shard].facts.capacity + answer.slots
        last = None if answer.last is None else answer.last.flatten()
        where = part.where[: len(answer.slots)]  # rows that were gone are left out; of slices it is all, or none
        return where, Rows(answer.block, index, answer.generation, weight, last, answer.mask)


def _merge(n: int, parts: list[tuple[Tensor, Rows]]) -> Rows | None:
    """The rows of a round's parts in the order of their positions, without gaps; None: there are none."""
    parts = [(at, rows) for at, rows in parts if len(at)]
    if not parts:
        return None
    if len(parts) == 1 and len(parts[0][0]) == n:
        return parts[0][1]
    where = torch.cat([at for at, _ in parts])
    places = [at for at, _ in parts]
    if len(where) < n:
        came = torch.zeros(n, dtype=torch.int64)
        came[where] = 1
        rank = came.cumsum(0) - 1
        places = [rank[at] for at in places]
    blocks = []
    for k in range(len(parts[0][1].block.parts)):
        each = [rows.block.parts[k] for _, rows in parts]
        out = np.empty((len(where), each[0].shape[1]), np.uint8)
        for place, one in zip(places, each, strict=True):
            out[place.numpy()] = one
        blocks.append(out)

    def column(k: int) -> Any:
        tensors: list[Any] = [rows[k] for _, rows in parts]
        if any(one is None for one in tensors):
            return None
        out = torch.empty(len(where), dtype=tensors[0].dtype)
        for place, one in zip(places, tensors, strict=True):
            out[place] = one
        return out

    return Rows(Block(tuple(blocks)), *(column(k) for k in range(1, len(Rows._fields))))


def _joined(first: Rows, second: Rows) -> Rows:
    """The rows of both, one behind the other."""
    if not len(first.flat_index):
        return second
    parts = zip(first.block.parts, second.block.parts, strict=True)
    block = Block(tuple(np.concatenate(pair) for pair in parts))

    def column(a: Any, b: Any) -> Any:
        return None if a is None or b is None else torch.cat([a, b])

    return Rows(block, *(column(a, b) for a, b in zip(first[1:], second[1:], strict=True)))
