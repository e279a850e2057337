"""Whose rows a store has, as far as its lanes tell."""

from __future__ import annotations

from typing import NamedTuple

import engram._native as _native


class WriterShare(NamedTuple):
    """One writer's rows in a store that several write to.

    Attributes:
        pid: of its process, which may have ended; 0: rows of which the store does not tell any more whose they are.
        rows: how many are stored.
        written: how many it ever wrote; with `pid` 0: `rows`.
        newest: the slot of its newest one.
    """

    pid: int
    rows: int
    written: int
    newest: int


class _Stream(NamedTuple):
    rows: int = 0
    written: int = 0
    newest: int = -1


def writer_shares(store: _native.Store) -> tuple[WriterShare, ...]:
    """The writers of a store of several lanes, those with the most rows first; () where it does not tell."""
    if not store.keeps_extents:
        return ()
    streams: dict[int, _Stream] = {}
    for i in range(store.lanes):
        lane, extents = store.lane(i), store.extents(i)
        start = lane["first"]
        known = extents[0][0] if extents else lane["published"]
        _count(streams, 0, start, min(known, lane["published"]), None, i, store.lane_capacity)
        for k, (first, stream, position) in enumerate(extents):
            stop = extents[k + 1][0] if k + 1 < len(extents) else lane["published"]
            _count(streams, stream, max(first, start), stop, position + stop - first, i, store.lane_capacity)
    mask = (1 << _native.PID_BITS) - 1
    shares = [WriterShare(stream & mask, *of) for stream, of in streams.items() if of.rows]
    return tuple(sorted(shares, key=lambda share: -share.rows))


def _count(
    streams: dict[int, _Stream], stream: int, start: int, stop: int, written: int | None, lane: int, capacity: int
) -> None:
    """Adds the rows [start, stop) of a lane to those of a stream, of which they are the last of `written`."""
    if stop <= start:
        return
    of = streams.get(stream, _Stream())
    total = of.rows + stop - start if written is None else written
    newest = lane * capacity + (stop - 1) % capacity if total > of.written else of.newest
    streams[stream] = _Stream(of.rows + stop - start, max(of.written, total), newest)
