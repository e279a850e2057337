"""What everybody must know alike of rows, whether with torch or without: where leaves lie, where trajectories end."""

from __future__ import annotations

from collections.abc import Sequence

#: The flag that says where trajectories end, and keys that may hold their ids: the first that rows have counts.
DONE: tuple[str, ...] = ("next", "done")
IDS: tuple[tuple[str, ...], ...] = (("collector", "traj_ids"), ("episode",))


def packed_offsets(sizes: Sequence[tuple[int, int]]) -> list[int]:
    """Where each leaf begins in a packed row, from the bytes of one of its items and of all: largest items first.

    Leaves with items of one size lie in their own order.

    >>> packed_offsets([(1, 1), (4, 12), (8, 8)])
    [20, 8, 0]
    """
    offsets, at = [0] * len(sizes), 0
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i][0]):
        offsets[i] = at
        at += sizes[i][1]
    return offsets
