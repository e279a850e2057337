"""To which of several shards a producer writes: where it begins, and where it goes when it has filled its shard.

A *stint* of a producer is its stay in a shard: until that is full, or, if it was full, until each of its rows has been
replaced once. Then it moves on to a shard to which no more producers write than to its own without it, and whose rows
are no newer: one that was filled less often, or as often. So one producer fills all shards in turn, and its oldest rows
go first, while producers that have a shard each stay where they are. Nobody divides trajectories but at these ends: a
stint begins with a seam.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Sequence

from engram.distributed.client import PendingCall, ShardClient, finish_all
from engram.errors import NoFreeLaneError, ShardUnavailableError

_FETCHED = 0.1  # seconds in which an answer that has come is here
_ties = random.Random()  # not that of the program, whose draws stay the same


class ShardStint:
    """The stay of a producer in a shard, which begins now.

    Args:
        goes_on: the producer was there before: it replaces all rows once more.

    Attributes:
        shard: in which it is.
    """

    def __init__(self, shard: ShardClient, goes_on: bool = False) -> None:
        capacity, totals = shard.facts.capacity, shard.totals
        self.shard, self._writes_before = shard, totals.writes
        self._rows = capacity if goes_on or totals.rows >= capacity else capacity - totals.rows
        self._sent = 0

    def note(self, n: int) -> None:
        """Counts rows that were sent."""
        self._sent += n

    @property
    def has_begun(self) -> bool:
        """Whether rows were sent."""
        return self._sent > 0

    @property
    def left(self) -> int:
        """How many rows it may still have; those of other producers in the shard count, as far as it told of them."""
        return max(0, self._rows - max(self._sent, self.shard.totals.writes - self._writes_before))

    @property
    def turns(self) -> int:
        """How often the shard will have been filled when it ends."""
        return (self._writes_before + self._rows) // self.shard.facts.capacity


class Admissions:
    """The shards that were asked to admit a producer, until it has joined them, or they do not know it any more.

    A shard whose answer was lost may have admitted it while it goes to another one. Other producers would keep away
    from such a shard as if it wrote there.

    Args:
        name: of the producer.

    Attributes:
        name: which it has where it is.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._asked: dict[int, tuple[ShardClient, str]] = {}  # and by which name
        self._leaving: dict[int, PendingCall] = {}  # calls that end its part in them

    def ask(self, shard: ShardClient, most: int, deadline: float, name: str) -> int | None:
        """As `ReplayShard.admit`; errors as `ShardClient.ask_once`."""
        self._leaving.pop(shard.number, None)
        self._asked[shard.number] = shard, name
        producers: int | None = shard.ask_once(deadline, "admit", name, most)
        if producers is not None:
            self.forget(shard)
        return producers

    def forget(self, shard: ShardClient) -> None:
        """The producer has joined it, or is not known there."""
        self._asked.pop(shard.number, None)
        self._leaving.pop(shard.number, None)

    def give_back(self, used: Collection[int] = (), deadline: float | None = None) -> None:
        """Ends the producer's part in those that it does not use; one that is away is told at a later call.

        Args:
            used: numbers of the shards that it uses.
            deadline: until when it waits for answers. None: not at all.
        """
        for number, (shard, name) in list(self._asked.items()):
            if shard.is_gone:
                self.forget(shard)
            if number in used or not shard.is_present:
                continue
            call = self._leaving.get(number)
            if call is None:
                call = self._leaving[number] = shard.begin("end_producer", name)
            if deadline is None and not call.has_come():
                continue
            try:
                shard.answer_within(call, max(_FETCHED, 0.0 if deadline is None else deadline - time.monotonic()))
            except ShardUnavailableError:
                del self._leaving[number]
                continue
            except TimeoutError:
                continue
            except NoFreeLaneError:  # another process writes by that name: it is its part
                pass
            self.forget(shard)


def first_shard(admissions: Admissions, present: Sequence[ShardClient], local: Sequence[bool], deadline: float) -> int:
    """The number of the shard that knows a producer, else one of this machine, if any, with the fewest producers.

    Of equal ones that to which the fewest rows were written, else any. A shard that has more producers by now than this
    client knew says so, so that those that begin at once do not all go to one. One that is away is left out.

    Args:
        local: which shards are of this machine.
    """
    known = [shard for shard in present if admissions.name in shard.facts.producers]
    if known:
        return known[0].number
    left = [shard for shard in present if local[shard.number]] or list(present)
    producers = {shard.number: len(shard.facts.producers) for shard in left}
    while len(left) > 1:
        shard = min(left, key=lambda one: (producers[one.number], one.totals.writes, _ties.random(), one.number))
        try:
            found = admissions.ask(shard, producers[shard.number], deadline, admissions.name)
        except ShardUnavailableError:
            left.remove(shard)
            continue
        if found is None:
            return shard.number
        producers[shard.number] = found
    return left[0].number


def next_shard(
    stint: ShardStint, admissions: Admissions, shards: Sequence[ShardClient], deadline: float, name: str
) -> ShardClient | None:
    """The shard to which a producer moves on at the end of a stint, and which has admitted it; None: it stays.

    Only shards that answer are asked. Of several that are as good it is the first, which every producer knows.

    Args:
        shards: its own, and those to which it may go.
        name: which it will have there.
    """
    own = stint.shard
    present = [shard for shard in shards if shard.is_present]
    halfway = time.monotonic() + max(0.0, deadline - time.monotonic()) / 2
    for shard, facts in zip(present, finish_all([(s, s.ask_facts()) for s in present], halfway), strict=True):
        if facts is not None:
            shard.take_facts(facts)
    others = {shard.number: len({*shard.facts.producers} - {admissions.name, name}) for shard in (own, *present)}
    most = others[own.number]
    better = [
        shard for shard in present
        if shard is not own and shard.is_present and others[shard.number] <= most and _turns(shard) <= stint.turns
    ]  # fmt: skip
    for shard in sorted(better, key=lambda one: (_turns(one), others[one.number], one.number)):
        try:
            if admissions.ask(shard, most, deadline, name) is None:
                return shard
        except ShardUnavailableError:
            continue
    return None


def _turns(shard: ShardClient) -> int:
    """How often a shard was filled."""
    return shard.totals.writes // shard.facts.capacity
