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


def following_paths(paths: Collection[tuple[Any, ...]]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """Each entry that rows have before and after a step, with where they have the one after it.

    That is under `"next"`, or, where no key is under it, beside the entry as `"next_..."`.

    >>> following_paths([("obs",), ("action",), ("next", "obs"), ("next_obs",)])
    {('obs',): ('next', 'obs')}
    >>> following_paths([("obs",), ("next_obs",), ("seen", "x"), ("next_seen", "x"), ("me", "y"), ("me", "next_y")])
    {('obs',): ('next_obs',), ('seen', 'x'): ('next_seen', 'x'), ('me', 'y'): ('me', 'next_y')}
    """
    known = frozenset(paths)
    if any(path[:1] == ("next",) for path in paths):
        return {path: after for path in paths if path[:1] != ("next",) and (after := ("next", *path)) in known}
    beside = {path: found for path in paths if (found := _beside(path, known)) is not None}
    later = set(beside.values())  # of obs, next_obs and next_next_obs the first two are a pair
    first: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # of each entry that follows, the one before it
    for path, after in beside.items():
        if path not in later:
            first.setdefault(after, path)
    return {path: after for after, path in first.items()}


def _beside(path: tuple[Any, ...], paths: Collection[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """Which of the paths is this one with `next_` before one of its names."""
    for i, part in enumerate(path):
        after = (*path[:i], f"next_{part}", *path[i + 1 :])
        if isinstance(part, str) and after in paths:
            return after
    return None


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
