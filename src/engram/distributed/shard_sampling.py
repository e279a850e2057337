"""Draws from several shards as from one buffer: which shard gives how many rows, and what these weigh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engram.data import DrawTotals, LazyTensorStorage
from engram.distributed.blocks import Block, goes_by_leaf
from engram.kernel.rows import Lanes

EMPTY = "Cannot sample from empty shards. Add or extend them first."


class SequenceDraw(NamedTuple):
    """Rows that were drawn by their sequences: int64 [n] each."""

    shard: Tensor
    lane: Tensor
    sequence: Tensor


def draw_sequences(ranges: Sequence[Tensor], n: int, generator: torch.Generator | None = None) -> SequenceDraw:
    """n rows drawn uniformly from all shards, with replacement.

    Every row of that moment is as likely as any other, however the shards grow until it is read; one that is
    overwritten by then, or was removed, is drawn again, from newer ranges.

    Args:
        ranges: for each shard int64 [lanes, 2], the oldest sequence of each lane and the one after its newest.

    Raises:
        RuntimeError: no shard has a row.

    Example:
        >>> ranges = [torch.tensor([[0, 3]]), torch.tensor([[10, 12], [7, 7]])]
        >>> drawn = draw_sequences(ranges, 100)
        >>> sorted({(int(s), int(l), int(w)) for s, l, w in zip(*drawn)})
        [(0, 0, 0), (0, 0, 1), (0, 0, 2), (1, 0, 10), (1, 0, 11)]
    """
    lanes = torch.cat(list(ranges)) if ranges else torch.empty((0, 2), dtype=torch.int64, device="cpu")
    counts = (lanes[:, 1] - lanes[:, 0]).clamp(min=0)
    ends = counts.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    if total == 0:
        raise RuntimeError(EMPTY)
    position = torch.randint(total, (n,), generator=generator, device="cpu")
    which = torch.searchsorted(ends, position, right=True)
    sizes = torch.tensor([len(one) for one in ranges], device="cpu")
    shard = torch.arange(len(ranges), device="cpu").repeat_interleave(sizes)[which]
    first_of_shard = (sizes.cumsum(0) - sizes)[shard]
    return SequenceDraw(shard, which - first_of_shard, lanes[which, 0] + position - (ends - counts)[which])


class RowsBySequence(NamedTuple):
    """Rows that were asked for by lane and sequence; `present` (bool [n]): those that are still there, whole, and were
    not removed."""

    block: Block
    slots: Tensor
    present: Tensor


def read_by_sequence(storage: LazyTensorStorage, lane: Tensor, sequence: Tensor) -> RowsBySequence:
    """Rows of a storage by lane and sequence, int64 [n] each.

    Raises:
        IndexError: a lane or a sequence that cannot exist.
    """
    lanes, layout = storage.lanes, storage.layout
    if layout is None:
        raise RuntimeError(EMPTY)
    slots = lanes.slots_of(lane, sequence)
    removed = lanes.store.removed(slots)  # before the read: the bit of a row goes when another one takes its place
    rows = storage.read_packed(slots, goes_by_leaf(layout), sequences=True)
    assert rows.sequences is not None
    present = rows.sequences == sequence
    for gone in (rows.overwritten, rows.absent, removed):
        if gone is not None:
            present[gone] = False
    return RowsBySequence(Block(tuple(part.numpy() for part in rows.batch)), slots, present)


class UniformRows(NamedTuple):
    """Rows that were drawn from one shard: their slots and sequences, int64 [n]."""

    block: Block
    slots: Tensor
    sequence: Tensor


def draw_rows(storage: LazyTensorStorage, n: int, seed: int) -> UniformRows:
    """n rows drawn uniformly from those of a store that were not removed, less what was overwritten meanwhile.

    A row that is gone is left out, and not drawn again: so all others are as likely.
    """
    lanes, layout = storage.lanes, storage.layout
    assert layout is not None
    slots = lanes.uniform(torch.tensor([seed], device="cpu"), n)
    if slots is None:
        slots = torch.empty(0, dtype=torch.int64, device="cpu")
    rows = storage.read_packed(slots, goes_by_leaf(layout), sequences=True)
    assert rows.sequences is not None
    block = Block(tuple(part.numpy() for part in rows.batch))
    gone = [*(rows.overwritten or ()), *(rows.absent or ())]
    if not gone:
        return UniformRows(block, slots, rows.sequences)
    kept = torch.ones(len(slots), dtype=torch.bool, device="cpu")
    kept[gone] = False
    kept_block = Block(tuple(part[kept.numpy()] for part in block.parts))
    return UniformRows(kept_block, slots[kept], rows.sequences[kept])


def lane_ranges(lanes: Lanes) -> Tensor:
    """The oldest sequence of each lane, and the one after its newest: int64 [lanes, 2]."""
    ranges = [(state["first"], max(state["first"], state["published"])) for state in lanes.counters()]
    return torch.tensor(ranges, dtype=torch.int64, device="cpu").reshape(-1, 2)


def divide(shares: Sequence[float], n: int, generator: torch.Generator | None = None) -> Tensor:
    """How many of n independent draws each shard gives, in proportion to its share: int64 [shards].

    Raises:
        RuntimeError: all shares are 0.
        ValueError: a share is negative, NaN or infinite.

    Example:
        >>> divide([1.0, 0.0, 3.0], 1000).tolist()[1]
        0
    """
    weights = torch.tensor(list(shares), dtype=torch.float64, device="cpu")
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        raise ValueError(f"shares are finite and 0 or more, got {list(shares)}")
    ends = weights.cumsum(0)
    if not len(ends) or not ends[-1] > 0:
        raise RuntimeError(EMPTY)
    position = torch.rand(n, dtype=torch.float64, generator=generator, device="cpu") * ends[-1]
    which = torch.searchsorted(ends, position, right=True).clamp(max=int(weights.nonzero()[-1]))
    return which.bincount(minlength=len(weights))


def importance_weights(
    ratios: Sequence[Tensor], totals: Sequence[DrawTotals], shares: Sequence[float], beta: float
) -> list[Tensor]:
    """`(P_i / P_min) ** -beta` of rows that were drawn by priority, P the probability that each was drawn with.

    That is the shard's part of the shares by which draws were divided, times the row's part of what the shard drew
    from; P_min is the least of all rows that could be drawn from any shard.

    Args:
        ratios: for each shard the leaf of its lowest row over that of each drawn row: float64 [n].
        totals: of each shard when it drew.
        shares: by which the draws were divided, which the client remembered from earlier answers.
    """
    whole = sum(shares)
    parts = [
        share / whole * one.lowest / one.share if one.lowest is not None and one.share > 0 else 0.0
        for share, one in zip(shares, totals, strict=True)
    ]
    least = min((part for part in parts if part > 0), default=1.0)
    return [(part / (ratio * least)) ** -beta for part, ratio in zip(parts, ratios, strict=True)]
