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
from collections.abc import Sequence

from engram.distributed.client import ShardClient, finish_all
from engram.errors import ShardUnavailableError

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
    def left(self) -> int:
        """How many rows it may still have; those of other producers in the shard count, as far as it told of them."""
        return max(0, self._rows - max(self._sent, self.shard.totals.writes - self._writes_before))

    @property
    def turns(self) -> int:
        """How often the shard will have been filled when it ends."""
        return (self._writes_before + self._rows) // self.shard.facts.capacity


def first_shard(name: str, present: Sequence[ShardClient], local: Sequence[bool], deadline: float) -> int:
    """The number of the shard that knows a producer, else one of this machine, if any, with the fewest producers.

    Of equal ones that to which the fewest rows were written, else any. A shard that has more producers by now than this
    client knew says so, so that those that begin at once do not all go to one. One that is away is left out.

    Args:
        local: which shards are of this machine.
    """
    known = [shard for shard in present if name in shard.facts.producers]
    if known:
        return known[0].number
    left = [shard for shard in present if local[shard.number]] or list(present)
    producers = {shard.number: len(shard.facts.producers) for shard in left}
    while len(left) > 1:
        shard = min(left, key=lambda one: (producers[one.number], one.totals.writes, _ties.random(), one.number))
        try:
            found = shard.ask_once(deadline, "admit", name, producers[shard.number])
        except ShardUnavailableError:
            left.remove(shard)
            continue
        if found is None:
            return shard.number
        producers[shard.number] = found
    return left[0].number


def next_shard(stint: ShardStint, name: str, shards: Sequence[ShardClient], deadline: float) -> ShardClient | None:
    """The shard to which a producer moves on at the end of a stint, and which it has joined; None: it stays.

    Only shards that answer are asked. Of several that are as good it is the first, which every producer knows.

    Args:
        name: of the producer, in each of its shards.
        shards: its own, and those to which it may go.
    """
    own = stint.shard
    present = [shard for shard in shards if shard.is_present]
    halfway = time.monotonic() + max(0.0, deadline - time.monotonic()) / 2
    for shard, facts in zip(present, finish_all([(s, s.ask_facts()) for s in present], halfway), strict=True):
        if facts is not None:
            shard.take_facts(facts)
    others = {shard.number: len({*shard.facts.producers} - {name}) for shard in (own, *present)}
    most = others[own.number]
    better = [
        shard for shard in present
        if shard is not own and shard.is_present and others[shard.number] <= most and _turns(shard) <= stint.turns
    ]  # fmt: skip
    for shard in sorted(better, key=lambda one: (_turns(one), others[one.number], one.number)):
        try:
            if shard.ask_once(deadline, "admit", name, most) is None:
                return shard
        except ShardUnavailableError:
            continue
    return None


def _turns(shard: ShardClient) -> int:
    """How often a shard was filled."""
    return shard.totals.writes // shard.facts.capacity
