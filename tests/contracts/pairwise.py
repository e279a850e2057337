"""Fewer combinations of settings, in which every two values still meet."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(rows: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Which of these rows to keep so that every pair of values that one of them holds is held by one that is kept.

    A row has a value for each of its factors; rows that are not possible are left out by whoever calls. Greedy: the
    row with the most new pairs is next, and of equal ones that whose pairs were held least often.
    """
    pairs = [list(combinations(sorted(row.items(), key=lambda factor: factor[0]), 2)) for row in rows]
    held: Counter[Hashable] = Counter()

    def rank(k: int) -> tuple[int, int, int]:
        return -sum(not held[pair] for pair in pairs[k]), sum(held[pair] for pair in pairs[k]), k

    # Ranks only grow while rows are kept: the first of the queue is the best once its own rank is up to date.
    queue, keep = [rank(k) for k in range(len(rows))], []
    heapify(queue)
    while queue:
        k = heappop(queue)[-1]
        new = rank(k)
        if new[0] and queue and new > queue[0]:
            heappush(queue, new)
        elif new[0]:
            keep.append(k)
            held.update(pairs[k])
    return sorted(keep)


def pairwise_product(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Of the product of these factors' values: few rows, in which every two values still meet."""
    rows = list(product(*map(list, factors)))
    places = product(*(range(len(list(values))) for values in factors))
    return [rows[k] for k in pairwise([{str(f): place for f, place in enumerate(row)} for row in places])]


def in_turns(values: Iterable[Any], settings: Sequence[tuple[Any, ...]], keep: int = 1) -> list[Any]:
    """Each value with each of these settings: so many of them with `make test`, in turns, and the others long."""
    return [
        pytest.param(value, *setting, marks=[pytest.mark.long] * ((turn - at * keep) % len(settings) >= keep))
        for at, value in enumerate(values)
        for turn, setting in enumerate(settings)
    ]
