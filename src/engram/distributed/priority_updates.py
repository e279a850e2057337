"""Priorities on their way to shards: they wait for shards that are away, and are sent again where a call was lost."""

from __future__ import annotations

import collections
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engram.distributed.client import PendingCall, ShardClient, finish_all
from engram.kernel.rows import copy_updates, divide_updates
from engram.kernel.tools import warn_user

_MOST_CALLS = 16  # that set priorities, without their answer
_ANY_INDEX = 1 << 62  # below which an index may lie, as far as is known before a shard has answered
_MOST_WAITING = 1 << 18  # priorities that wait for shards that are away


class Priorities(NamedTuple):
    """Priorities, float64 [n], of rows by flat index and generation, int64 [n]; generation None: of any row there.

    `came_with_rows`: they are set only for rows that have had none.
    """

    flat_index: Tensor
    priority: Tensor
    generation: Tensor | None
    came_with_rows: bool = False

    @property
    def kind(self) -> tuple[bool, bool]:
        """Priorities of the same kind can be sent in one call."""
        return self.generation is not None, self.came_with_rows

    def part(self, where: Any) -> Priorities:
        generation = None if self.generation is None else self.generation[where]
        return self._replace(flat_index=self.flat_index[where], priority=self.priority[where], generation=generation)

    def plain(self) -> Priorities:
        """The same as plain tensors on the CPU, in memory of their own, without gaps."""
        flat_index, priority, generation = (
            None if one is None else torch.from_numpy(one.detach().cpu().resolve_neg().numpy().copy())
            for one in (self.flat_index, self.priority, self.generation)
        )
        assert flat_index is not None and priority is not None
        return self._replace(flat_index=flat_index, priority=priority, generation=generation)

    def last(self, n: int) -> Priorities:
        return self.part(slice(max(0, len(self.flat_index) - n), None))

    def rows(self) -> list[tuple[int, int | None]]:
        """The flat index and the generation of each row."""
        generations = [None] * len(self.flat_index) if self.generation is None else self.generation.tolist()
        return list(zip(self.flat_index.tolist(), generations, strict=True))

    def without(self, rows: set[tuple[int, int | None]]) -> Priorities:
        """The priorities of all other rows than these."""
        others = [(index, g) not in rows and (index, None) not in rows for index, g in self.rows()]
        return self.part(torch.tensor(others, dtype=torch.bool, device="cpu"))


class PriorityUpdates:
    """The priorities that a client sets in its shards.

    `give` and `begin` may be called by any thread, all else by one at a time.
    """

    def __init__(self, shards: Sequence[ShardClient]) -> None:
        self._shards = shards
        self._known_capacity: int | None = None
        self._given: collections.deque[Priorities] = collections.deque()  # by any thread
        self._waiting: list[Priorities] = []  # older ones, which wait for shards that are away
        self._sent: collections.deque[tuple[ShardClient, PendingCall, Priorities]] = collections.deque()
        self._dropped: dict[int, int] = {}  # priorities, by shard, that no warning has named yet
        self._warned_of: dict[int, int] = {}  # by shard, the outage in which priorities were dropped

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to send, and no answer is awaited."""
        return not (self._given or self._waiting or self._sent)

    @property
    def is_due(self) -> bool:
        """Whether some are to be sent, or many calls have not been answered."""
        return bool(self._given or self._waiting or len(self._sent) > _MOST_CALLS)

    def give(self, at: Tensor, priorities: Tensor, generations: Tensor | None) -> None:
        """Takes copies of priorities of rows, to be sent later.

        Raises:
            IndexError: an index lies outside the buffer, as far as that is known.
        """
        capacity = self._capacity()
        end = len(self._shards) * capacity if capacity is not None else _ANY_INDEX
        copied = copy_updates(at, priorities, generations, end)
        if copied is None:  # one lies outside, or they are no plain tensors
            outside = at[(at < 0) | (at >= end)]
            if outside.numel():
                raise IndexError(f"index {int(outside[0])} is not one of 0 to {end - 1}; nothing was changed")
            copied = Priorities(at, priorities, generations).plain()[:3]
        self._given.append(Priorities(*copied))
        if capacity is None:
            self._drop_oldest()

    def send(self, deadline: float, rows_are_sent: Callable[[], bool]) -> None:
        """Sends the priorities to the shards that are there.

        Args:
            rows_are_sent: False: another thread is sending rows, of which priorities may be: they are sent next time.
        """
        if self.is_idle:
            return
        capacity = self._capacity()
        self._waiting += [self._given.popleft() for _ in range(len(self._given))]
        if capacity is None or not rows_are_sent():
            return
        self._settle(_MOST_CALLS, deadline)
        waiting, self._waiting = self._waiting, []
        for (_, came_with_rows), some in itertools.groupby(waiting, lambda one: one.kind):
            outside, parts = divide_updates([one[:3] for one in some], capacity, len(self._shards))
            self._warn_of_outside(outside)
            for number, columns in parts:
                shard, part = self._shards[number], Priorities(*columns, came_with_rows)
                if shard.is_present:
                    self.begin(shard, part)
                else:
                    self._keep(shard, part)
        self._warn_of_dropped()

    def flush(self, deadline: float, rows_are_sent: Callable[[], bool]) -> None:
        """Sends all of them, and waits until they are set; errors as `send`, and of a shard that refuses some."""
        self.send(deadline, rows_are_sent)
        self._settle(0, deadline)

    def begin(self, shard: ShardClient, part: Priorities) -> None:
        """Sends priorities of rows of one shard, and does not wait for its answer."""
        slots = part.flat_index - shard.number * shard.facts.capacity
        call = shard.begin("update_priority", slots, part.priority, part.generation, part.came_with_rows)
        self._sent.append((shard, call, part))

    def discard(self) -> None:
        """Forgets those that were not sent: their rows are being replaced."""
        self._waiting.clear()
        self._given.clear()

    def drop(self) -> None:
        """Forgets the priorities that wait, with a warning."""
        n = sum(len(one.flat_index) for one in (*self._waiting, *self._given))
        self.discard()
        if n:
            warnings.warn(
                f"{n} priorities were not sent, as their shards did not answer: those rows keep the ones that they had",
                RuntimeWarning,
                stacklevel=2,
            )

    def _drop_oldest(self) -> None:
        """Keeps no more priorities than may wait for shards none of which has ever answered."""
        n, most = 0, max(1, _MOST_WAITING - sum(len(one.flat_index) for one in self._waiting))
        while len(self._given) > 1 and sum(len(one.flat_index) for one in list(self._given)) > most:
            n += len(self._given.popleft().flat_index)
        if n:
            warn_user(
                f"the oldest {n} priorities were dropped, as no shard has answered yet: up to {_MOST_WAITING} wait",
                RuntimeWarning,
            )

    def _capacity(self) -> int | None:
        """How many rows each shard has room for, found without waiting; None: no shard has ever answered."""
        if self._known_capacity is None:
            known = (shard.facts.capacity for shard in self._shards if shard.is_known or shard.is_present)
            self._known_capacity = next(known, None)
        return self._known_capacity

    def _settle(self, most: int, deadline: float) -> None:
        """Waits until all but the last `most` calls are answered.

        Raises:
            IndexError, ValueError: a shard refused one of them; all others were looked at.
        """
        n = max(0, len(self._sent) - most)
        sent = [self._sent.popleft() for _ in range(n)]
        newer, self._waiting = self._waiting, []
        refused: Exception | None = None
        try:
            answers = finish_all([(shard, call) for shard, call, _ in sent], deadline)
        except (IndexError, ValueError) as error:  # of one of them; the others are looked at by themselves
            refused, answers = error, []
            for shard, call, _ in sent:
                try:
                    answers += finish_all([(shard, call)], deadline)
                except (IndexError, ValueError) as error:
                    answers.append(error)
        if any(answer is None for answer in answers):
            self._keep_lost(sent, answers)
        self._waiting += newer
        self._warn_of_dropped()
        if refused is not None:
            raise refused

    def _keep_lost(self, sent: list[tuple[ShardClient, PendingCall, Priorities]], answers: list[Any]) -> None:
        """Keeps priorities whose calls were lost, less those of rows that were sent newer ones since."""
        calls = [(shard, part, answer is None) for (shard, _, part), answer in zip(sent, answers, strict=True)]
        calls += [(shard, part, False) for shard, _, part in list(self._sent)]
        lost: list[tuple[ShardClient, Priorities]] = []
        newer: dict[int, set[tuple[int, int | None]]] = {}  # rows, by shard
        for shard, part, is_lost in reversed(calls):
            rows = newer.setdefault(shard.number, set())
            if is_lost:
                lost.append((shard, part.without(rows)))
            rows.update(part.rows())
        for shard, part in reversed(lost):
            self._keep(shard, part)

    def _keep(self, shard: ShardClient, lost: Priorities) -> None:
        """Sends priorities again when their shard is back; without generations they might be of other rows by then."""
        room = 0
        if lost.generation is not None:
            room = max(0, _MOST_WAITING - sum(len(one.flat_index) for one in self._waiting))
            self._waiting.append(lost.last(room))
        dropped = max(0, len(lost.flat_index) - room)
        if dropped:
            self._dropped[shard.number] = self._dropped.get(shard.number, 0) + dropped

    def _warn_of_outside(self, n: int) -> None:
        if n:
            warnings.warn(
                f"{n} priorities were dropped: their indices, given before any shard had answered, are outside of the "
                "buffer",
                RuntimeWarning,
                stacklevel=2,
            )

    def _warn_of_dropped(self) -> None:
        """Warns of dropped priorities: once for each shard and outage."""
        dropped, self._dropped = self._dropped, {}
        for number, n in dropped.items():
            outage = self._shards[number].outages
            if self._warned_of.get(number) != outage:
                self._warned_of[number] = outage
                warnings.warn(
                    f"{n} priorities of rows of shard {number} were dropped, and so may be more while it does not "
                    f"answer: give update_priority the generations of the rows, and up to {_MOST_WAITING} wait for it",
                    RuntimeWarning,
                    stacklevel=2,
                )
