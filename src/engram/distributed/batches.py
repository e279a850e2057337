"""Batches from several shards as from one buffer: rows that shards draw ahead, and batches made of them.

A shard answers with rows that it has drawn, and with the *share* `S` of all that it drew them from: its rows, windows
or trajectories, or the sum `(p + eps) ** alpha` of them. A client keeps one answer of each shard. For each row of a
batch it chooses a shard `k` with the probability `S[k] / sum(S)`, the shares being those of the answers that it has,
and takes the next row of that answer. Row `i`, which its shard drew with the probability `p[i] / S[k]`, is so drawn
with `p[i] / sum(S)`: that of one buffer that holds what each shard held when it drew. How much a shard has grown since,
or how many rows were asked of it, has no part in it, so nothing is to be corrected.

That is exact because a share is always that of the rows at hand. Where a shard's answer is used up, no further row is
drawn until its next answer is there, with a share of its own: the choice of a shard is never made before that. (Counts
divided by shares that were known earlier, as of a whole round, would be those of a buffer that is gone: a shard that
grows would give too few rows.) Which answer comes when depends on how many rows were taken, and on time, and never on
what a row holds. Rows that are too old are dropped for their age, rows that were overwritten because they are gone; the
others are as likely.

A weight is `(P_i / P_min) ** -beta` of these probabilities: `sum(S)` cancels, and the least leaf is that of all shards.

So any part of the shards can be asked at any time: those whose rows are few or old. `RowPool` is the native part.
"""

from __future__ import annotations

import collections
import hashlib
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engram.data import PrioritizedSampler, RandomSampler, Sampler, SliceSampler
from engram.distributed.blocks import Block, goes_by_leaf, unpack
from engram.distributed.client import PendingCall, ShardClient, absences, finish_all, raise_if_gone
from engram.distributed.local import LocalReader
from engram.distributed.shard import DrawnRows
from engram.distributed.shard_sampling import EMPTY
from engram.errors import ShardUnavailableError
from engram.kernel.rows import RowLayout, RowPool

_PAUSE = 0.01  # seconds between two looks at shards that are all away
_MOST_EMPTY_ANSWERS = 100  # in a row, whose rows were all overwritten before they were read
_LEAST_AGE, _AGE_PER_SHARD = 0.1, 0.004  # seconds; calls then take a twentieth of a core at most
_EMPTY_AGE = 1.0  # seconds after which a shard that had nothing to draw is asked again at the latest
_MOST_BYTES = 16 << 20  # of rows that are asked of all shards together
_MOST_ANSWER = 3_000_000  # bytes of one answer; Ray carries larger ones through its object stores
_MOST_SPARE = 64 << 10  # bytes of rows that are asked for in case that draws need them
_GROWTH = 4  # how many times as much each call asks for, at first, as the one before
_MADE_WEIGHTS = (torch.float32, torch.float64)  # dtypes in which the pool gives weights
_LEAST_WAIT = 1e-4  # seconds: less takes an answer that has come


class Rows(NamedTuple):
    """Rows from several shards in the order in which they were drawn.

    Attributes:
        batch: in the form of the written data, [n], with what the stream attaches.
        flat_index: int64 [n], `shard * capacity + slot`.
        generation: int64 [n], the sequence of each row.
        weight: importance weights [n], in the sampler's dtype; None: draws are not by priority.
        last: where slices end, bool [n]; mask: False where they are padded, bool [n]; None: there are none.
    """

    batch: Any
    flat_index: Tensor
    generation: Tensor
    weight: Tensor | None
    last: Tensor | None
    mask: Tensor | None


class _Asked(NamedTuple):
    """Rows that a shard was asked for."""

    call: PendingCall
    rows: int
    sent: float
    reads_here: bool


class _Answer(NamedTuple):
    """The rows of a shard that are at hand."""

    drawn: DrawnRows
    number: int  # of answers so far
    first_index: int
    ends: float  # when they are too old


class _LearnerPace:
    """How fast batches are taken, and how long shards take to answer, in seconds.

    Attributes:
        batch: from one batch to the next, without what was waited for; None: not known yet.
        answer: from a call to its answer, and somewhat more.
    """

    def __init__(self, shards: int) -> None:
        # Of the time of an answer, where it is not known: so that somebody waits for one now and then, which tells it.
        self._decay = 1 - 0.005 / shards
        self.batch: float | None = None
        self.answer = 0.0
        self._before: float | None = None
        self._waited = 0.0

    def begin_batch(self, now: float) -> None:
        """A batch is asked for."""
        if self._before is not None:
            took = max(1e-6, now - self._before - self._waited)
            if self.batch is None:
                self.batch = took
            else:  # a pause is not a pace
                self.batch += 0.1 * (min(took, 10 * self.batch) - self.batch)
        self._before, self._waited = now, 0.0

    def waited(self, began: float, ended: float, sent: float) -> None:
        """Somebody waited for an answer to calls that were sent then, the last of them."""
        self._waited += ended - began
        wait, took = ended - began, ended - sent
        if wait < max(_LEAST_WAIT, 0.2 * took):  # it had come before: when is not known
            self.answer *= self._decay
        elif took > self.answer:
            self.answer = took
        else:
            self.answer += 0.2 * (took - self.answer)

    @property
    def lead(self) -> float:
        """How long before they are needed rows are asked for."""
        return 2 * self.answer + (self.batch or 0.0)


class BatchStream:
    """Batches of one size, drawn from all shards that answer as from one buffer (see the module).

    A shard is asked for as many rows as the learner takes of it, at its pace, until they would be too old, and again
    shortly before these are used up. The first call asks for one batch, each one after it for four times as many.

    Args:
        sampler: which says how shards draw.
        batch_size: rows of a batch; a multiple of the slices' length.
        layout: of the rows.
        batches_per_call: at most so many batches are asked for in a call; None: as many as may be.
        max_batch_age: seconds; rows whose call is longer ago are not used, unless a batch has just waited for them.
            None: 0.1, and 0.004 more for each shard.
        timeout: seconds that a batch may wait. A shard that has not answered after half of them, while there are
            others with rows, is left out until it does, and the rest is drawn from those.
        before_round: called from time to time before calls are made, with the time until which it may wait.
        readers: of uniform draws, those of shards whose stores are on this machine, by the shards' numbers.
        attaches: whether batches have their index as an entry, and where draws are by priority their weights and
            generations.
    """

    def __init__(
        self,
        shards: Sequence[ShardClient],
        sampler: Sampler,
        batch_size: int,
        layout: RowLayout,
        *,
        batches_per_call: int | None = None,
        max_batch_age: float | None = None,
        timeout: float,
        generator: torch.Generator | None = None,
        before_round: Callable[[float], None] = lambda deadline: None,
        readers: Mapping[int, LocalReader] | None = None,
        attaches: bool = False,
    ) -> None:
        self.batch_size = batch_size
        self._layout, self._attaches = layout, attaches
        self._shards, self._sampler = shards, sampler
        self._before_round = before_round
        self._readers = dict(readers or {})
        self._timeout = timeout
        self._by_sequence = type(sampler) is RandomSampler
        self._row_bytes = layout.payload_bytes + 16  # with its slot and sequence
        self._codec = None if goes_by_leaf(layout) else layout.batch_codec
        self._prioritized = sampler if isinstance(sampler, PrioritizedSampler) else None
        if self._prioritized is not None:
            self._row_bytes += 8  # its weight
            if self._prioritized.dtype not in _MADE_WEIGHTS:
                self._codec = None
        self._unit = 1
        if isinstance(sampler, SliceSampler):
            self._row_bytes += 10  # its slice, and the marks of that
            if not sampler.pad_output and (not sampler.strict_length or any(sampler.span)):
                raise ValueError(
                    "batches from shards are made of what each shard drew, so slices must have one length: use "
                    "pad_output=True, or strict_length=True and span=False"
                )
            self._unit = sampler.slice_len or 1
        if batch_size % self._unit:
            raise ValueError(f"batch_size={batch_size} is no multiple of slice_len={self._unit}; choose one that is")
        self._most_age = _LEAST_AGE + _AGE_PER_SHARD * len(shards) if max_batch_age is None else max_batch_age
        self._most_batches = max(1.0, _MOST_BYTES / (batch_size * self._row_bytes))
        if batches_per_call is not None:
            self._most_batches = min(self._most_batches, batches_per_call)
        self._seed = int(torch.randint(1 << 62, (), generator=generator, device="cpu"))
        widths = [leaf.nbytes for leaf in layout.leaves] if goes_by_leaf(layout) else [layout.payload_bytes]
        self._pool = RowPool(len(shards), self._unit, widths, self._seed)
        self._pace = _LearnerPace(len(shards))
        self._answers: dict[int, _Answer] = {}  # which the pool has
        self._asked: dict[int, collections.deque[_Asked]] = collections.defaultdict(collections.deque)
        self._missing: set[int] = set()  # shards that answer, and of which no answer is at hand
        self._away = set(range(len(shards)))  # that did not answer
        self._shares = [0.0] * len(shards)  # at the last answer of each; 0 for those that are away
        self._share, self._sharers = 0.0, 0  # the sum of these, and how many are not 0
        self._calls = [0] * len(shards)  # made so far
        self._calls_of_round, self._round_is_due = 0, True  # calls since `before_round` was called
        # A heap: when rows get too old, or nearly so; the number of their answer, and its shard.
        self._due: list[tuple[float, int, int]] = []
        self._numbers = itertools.count()  # of answers
        self._oldest = -math.inf  # when calls whose rows may be used were sent

    def next(self, deadline: float | None = None) -> Rows:
        """The next batch, by `timeout` or until `deadline`.

        Raises:
            RuntimeError: there is nothing to draw; or a shard says why it cannot.
            ShardUnavailableError: no shard that has rows answers.
        """
        now = time.monotonic()
        deadline = now + self._timeout if deadline is None else deadline
        self._pace.begin_batch(now)
        self._oldest = now - self._most_age
        if self._round_is_due:
            self._calls_of_round, self._round_is_due = 0, False
            self._before_round(deadline)
        if self._readers:
            self._check_readers()
        if self._due and self._due[0][0] <= now:
            self._drop_old(now)
        if self._away:
            self._take_back()
        pool = self._pool
        if not pool.total:  # shards that had nothing may have rows by now
            for k in list(self._answers):
                self._drop(k)
        if low := pool.low():  # where rows that are asked for ahead would be too old
            self._ask_again(low)
        self._supply(deadline)
        rows = self._batch(deadline)
        if self._pace.lead < self._most_age and (low := pool.low()):
            self._ask_again(low)
        return rows

    # ---- batches ----
    def _batch(self, deadline: float) -> Rows:
        pool, n, codec = self._pool, self.batch_size, self._codec
        if codec is None and (run := pool.take_run(n)) is not None:
            return self._part(self._answers[run[0]], run[1], run[1] + n)
        pool.begin(n)
        empty_answers = 0
        while (used_up := pool.fill()) is not None:
            self._missing.add(used_up)
            self._supply(deadline)
            answer = self._answers.get(used_up)
            is_empty = answer is not None and self._shares[used_up] > 0 and not len(answer.drawn.slots)
            empty_answers = empty_answers + 1 if is_empty else 0
            if empty_answers > _MOST_EMPTY_ANSWERS:
                raise RuntimeError("writers overwrite rows faster than they can be fetched; use larger shards")
        prioritized = self._prioritized
        beta = None if prioritized is None else float(prioritized.beta)
        wide = codec is None or (prioritized is not None and prioritized.dtype is torch.float64)
        taken = pool.take(codec, self._attaches, beta, wide)
        return Rows(*taken) if codec is not None else self._unpacked(*taken)

    def _part(self, answer: _Answer, start: int, stop: int) -> Rows:
        """Rows of one answer, in its memory."""
        drawn = answer.drawn
        parts = [part[start:stop] for part in drawn.block.parts]
        index = drawn.slots[start:stop]
        index = index + answer.first_index if answer.first_index else index
        weight = None
        if drawn.ratio is not None and self._prioritized is not None:
            weight = drawn.ratio[start:stop] ** float(self._prioritized.beta)
        last = None if drawn.last is None else drawn.last.flatten()[start:stop]
        mask = None if drawn.mask is None else drawn.mask[start:stop]
        return self._unpacked(parts, index, drawn.generation[start:stop], weight, last, mask)

    def _unpacked(
        self,
        parts: Any,
        index: Tensor,
        generation: Tensor,
        weight: Tensor | None,
        last: Tensor | None,
        mask: Tensor | None,
    ) -> Rows:
        """Rows whose batch Python makes of bytes."""
        entries = {"index": index}
        if weight is not None and self._prioritized is not None:
            weight = weight.to(self._prioritized.dtype)
            entries |= {"generation": generation, "priority_weight": weight}
        block = Block(tuple(map(np.asarray, parts)))
        batch = unpack(self._layout, block, entries if self._attaches else None)
        return Rows(batch, index, generation, weight, last, mask)

    # ---- rows at hand ----
    def _supply(self, deadline: float) -> None:
        """Waits until every shard that answers has said what it holds; errors as `next`."""
        while True:
            if self._missing:
                self._fetch(deadline)
            if self._pool.total > 0:
                return
            if not self._away and not self._missing:
                raise RuntimeError(EMPTY)
            self._take_back()
            if self._missing:
                continue
            away = [self._shards[k] for k in sorted(self._away)]
            raise_if_gone(away)  # the others have no rows
            if time.monotonic() > deadline:
                raise ShardUnavailableError(f"no shard that has rows answers; try again{absences(away)}")
            time.sleep(_PAUSE)

    def _fetch(self, deadline: float) -> None:
        """Takes in answers of the shards that are missing; those that were not asked, or too early, are asked now."""
        missing = sorted(self._missing)
        for k in missing:
            calls = self._asked[k]
            while calls and calls[0].sent < self._oldest:
                calls.popleft()
            if not calls:
                self._ask(k)
        asked_for = {k: self._asked[k].popleft() for k in missing if self._asked[k]}
        began, patience = time.monotonic(), self._patience(deadline)
        answers = finish_all([(self._shards[k], asked.call) for k, asked in asked_for.items()], patience)
        ended = time.monotonic()
        sent = [asked.sent for asked in asked_for.values() if not asked.reads_here]
        if sent:
            self._pace.waited(began, ended, max(sent))
        for (k, asked), answer in zip(asked_for.items(), answers, strict=True):
            if answer is None:
                self._lose(k)
            else:
                self._take_in(k, answer, ended if asked.reads_here else asked.sent)

    def _patience(self, deadline: float) -> float:
        """Until when to wait for answers: with several shards there is time left to draw from the others."""
        if len(self._shards) == 1:
            return deadline
        return min(deadline, time.monotonic() + self._timeout / 2) if self._sharers > 1 else deadline

    def _take_in(self, k: int, drawn: DrawnRows, sent: float) -> None:
        totals = drawn.totals.draws
        first_index = k * self._shards[k].facts.capacity
        ends = sent + (self._most_age if totals.share > 0 else min(self._most_age, _EMPTY_AGE))
        answer = _Answer(drawn, next(self._numbers), first_index, ends)
        last = None if drawn.last is None else drawn.last.flatten()
        self._set_share(k, totals.share)
        if totals.share > 0:
            self._pool.put(
                k, totals.share, totals.lowest, drawn.block.parts, drawn.slots, drawn.generation, drawn.ratio, last,
                drawn.mask, first_index, self._low(k, len(drawn.slots)),
            )  # fmt: skip
        else:
            self._pool.drop(k)
        self._answers[k] = answer
        self._missing.discard(k)
        if ends < math.inf:
            lead = self._pace.lead
            heapq.heappush(self._due, (ends - lead if lead < self._most_age else ends, answer.number, k))

    def _drop(self, k: int) -> None:
        """Uses a shard's answer no longer; it needs another one."""
        self._pool.drop(k)
        self._answers.pop(k, None)
        self._missing.add(k)

    def _lose(self, k: int) -> None:
        """Counts a shard as away: batches come from the others until it answers again."""
        self._pool.drop(k)
        self._answers.pop(k, None)
        self._asked[k].clear()
        self._missing.discard(k)
        self._set_share(k, 0.0)
        self._away.add(k)

    def _check_readers(self) -> None:
        """Counts shards of this machine whose process has ended as away, with what was read of them."""
        for k, reader in self._readers.items():
            if k not in self._away and not reader.is_live:
                self._shards[k].forget()
                self._lose(k)

    def _set_share(self, k: int, share: float) -> None:
        self._share += share - self._shares[k]
        self._sharers += (share > 0) - (self._shares[k] > 0)
        self._shares[k] = share

    def _take_back(self) -> None:
        """Counts the shards that answer again as present."""
        for k in list(self._away):
            if self._shards[k].is_present:
                self._away.discard(k)
                self._missing.add(k)
                self._set_share(k, self._shards[k].totals.draws.share)
                reader = self._readers.get(k)
                if reader is not None and not reader.is_live:  # it is back with another store
                    del self._readers[k]

    def _drop_old(self, now: float) -> None:
        """Drops rows that are too old, and asks for others in place of those that are nearly so."""
        nearly = []
        while self._due and self._due[0][0] <= now:
            _, number, k = heapq.heappop(self._due)
            answer = self._answers.get(k)
            if answer is None or answer.number != number:
                continue
            if answer.ends <= now:
                self._drop(k)
            else:
                heapq.heappush(self._due, (answer.ends, number, k))
                nearly.append(k)
        self._ask_again(nearly)

    # ---- asking ----
    def _ask_again(self, shards: Iterable[int]) -> None:
        """Asks shards for rows that are needed soon."""
        for k in shards:
            if k in self._readers or not self._shards[k].is_present:
                continue
            if not self._asked[k]:
                self._ask(k)
            if len(self._asked[k]) == 1 and self._at_hand(k) <= self._needed(k, 2 * self._pace.answer):
                self._ask(k)  # of small answers two are on their way

    def _ask(self, k: int) -> None:
        reader, shard = self._readers.get(k), self._shards[k]
        if not shard.is_present:
            return self._lose(k)
        n = self._rows_to_ask(k)
        self._calls[k] += 1
        self._calls_of_round += 1
        self._round_is_due = self._calls_of_round >= len(self._shards) - len(self._away)
        if reader is not None:
            call = reader.draw(n, self._seed_of_call(k))
        elif self._by_sequence:
            call = shard.begin("draw", n, self._seed_of_call(k), answer_bytes=n * self._row_bytes)
        else:
            call = shard.begin("sample", n, answer_bytes=n * self._row_bytes)
        self._asked[k].append(_Asked(call, n, time.monotonic(), reader is not None))
        return None

    def _seed_of_call(self, k: int) -> int:
        """A seed that depends on what the shard was asked before, and on no other shard."""
        text = b"%d %d %d" % (self._seed, k, self._calls[k])
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2

    def _units_of_batch(self, k: int) -> float:
        """How many units of a batch a shard gives on average."""
        return self.batch_size // self._unit * self._shares[k] / self._share if self._share > 0 else 0.0

    def _rows_to_ask(self, k: int) -> int:
        """As many rows as are expected to be used before they are too old, and some more: draws vary."""
        batches = min(self._most_batches, float(_GROWTH) ** min(self._calls[k], 15))
        if self._pace.batch is not None:
            batches = min(batches, max(1.0, (self._most_age - self._pace.lead) / self._pace.batch))
        of_batch = self._units_of_batch(k)
        batches = min(batches, max(1.0, _MOST_ANSWER / max(1.0, of_batch * self._unit * self._row_bytes)))
        if len(self._shards) == 1:  # whole batches, which are not copied
            return self.batch_size * int(batches)
        expected = of_batch * batches
        spread = 3.5 * math.sqrt(expected) + 3  # seldom are so many more needed
        if spread * self._unit * self._row_bytes > _MOST_SPARE:
            spread = 2 * math.sqrt(expected)
        return self._unit * math.ceil(max(1.0, expected + spread))

    def _low(self, k: int, rows: int) -> int:
        """With how many rows left a shard is asked again."""
        needed = self._needed(k, self._pace.lead)
        return int(min(rows, needed + 2 * math.sqrt(needed * self._unit)))

    def _needed(self, k: int, seconds: float) -> float:
        """How many rows of a shard are used in so many seconds."""
        batches = 1.0 if self._pace.batch is None else seconds / self._pace.batch
        return self._unit * self._units_of_batch(k) * batches

    def _at_hand(self, k: int) -> int:
        """How many rows of a shard are here or on their way."""
        return self._pool.left(k) + sum(asked.rows for asked in self._asked[k])
