"""What everybody must know alike of rows, whether with torch or without: where leaves lie, where trajectories end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

#: The flag that says where trajectories end, and keys that may hold their ids: the first that rows have counts.
DONE: tuple[str, ...] = ("next", "done")
IDS: tuple[tuple[str, ...], ...] = (("collector", "traj_ids"), ("episode",))


def outcome_path(paths: Collection[tuple[Any, ...]], name: str) -> tuple[str, ...]:
    """Where rows hold what came of a step, as `"done"`: under `"next"`, or beside the rest where no key is under it.

    >>> outcome_path([("done",), ("next", "done")], "done")
    ('next', 'done')
    >>> outcome_path([("obs",), ("next_obs",), ("done",)], "done")
    ('done',)
    """
    is_flat = (name,) in paths and not any(path[0] == "next" for path in paths)
    return (name,) if is_flat else ("next", name)


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


def stored_offsets(sizes: Sequence[tuple[int, int]], behind: Sequence[int]) -> tuple[list[int], int]:
    """As `packed_offsets`, where leaves of these numbers lie behind the row, one after the other; and the row's bytes.

    >>> stored_offsets([(1, 1), (4, 12), (8, 8), (8, 8)], [3, 1])
    ([8, 17, 0, 9], 9)
    """
    inside = [i for i in range(len(sizes)) if i not in behind]
    offsets, row_bytes = [0] * len(sizes), max(1, sum(sizes[i][1] for i in inside))
    for i, at in zip(inside, packed_offsets([sizes[i] for i in inside]), strict=True):
        offsets[i] = at
    end = row_bytes
    for i in behind:
        offsets[i] = end
        end += sizes[i][1]
    return offsets, row_bytes
