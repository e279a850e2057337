"""Rows of a save of some shards, for another number of shards: each row goes to one of them, with its priority.

The rows of a save have an order: shard by shard, lane by lane, the oldest of a lane first. New shards get equal parts
of it, so that trajectories stay whole but for those, one less than there are shards, in which a part ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engram.data import PrioritizedSampler, ReplayBuffer, Sampler
from engram.errors import CheckpointMisfitError
from engram.kernel.disk import Checkpoint, Counters
from engram.kernel.replay import saved_storage
from engram.kernel.rows import RowLayout, removed_steps
from engram.kernel.tools import forms

_BLOCK_BYTES = 16 << 20  # of rows that are copied together


class SavedPiece(NamedTuple):
    """Some rows of what one shard saved, which one shard loads.

    Attributes:
        folder, snapshot: where the shard has saved them.
        start, stop: which of its rows, in their order.
    """

    folder: str
    snapshot: str
    start: int
    stop: int


class Run(NamedTuple):
    """Rows that follow each other in the lane in which they were saved.

    Attributes:
        batch: a TensorDict of them.
        priority: float64 [n]; None: draws are not by priority.
        begins: whether the first of them continues nothing before it.
    """

    batch: Any
    priority: Tensor | None
    begins: bool


_STORAGE = forms.record({"state": forms.record({"counters": forms.anything, "layout": forms.anything})})
_SAMPLER = forms.record({"sampler": forms.record({"kind": forms.text})})
_BODY = forms.record({"storage": _STORAGE, "components": _SAMPLER})


def divide_saved(saved: Sequence[tuple[str, str]], shards: int) -> list[tuple[SavedPiece, ...]]:
    """What each of so many shards loads of a save, whose parts are folders and snapshots."""
    counts = [_saved_rows(*part) for part in saved]
    ends = list(itertools.accumulate(counts))
    total = sum(counts)
    cuts = [total * k // shards for k in range(shards + 1)]
    return [
        tuple(
            SavedPiece(*part, max(first, end - n) - (end - n), min(stop, end) - (end - n))
            for part, n, end in zip(saved, counts, ends, strict=True)
            if max(first, end - n) < min(stop, end)
        )
        for first, stop in itertools.pairwise(cuts)
    ]


def _saved_rows(folder: str, snapshot: str) -> int:
    with Checkpoint(folder).reading(snapshot) as reader:
        try:
            forms.check(_BODY, reader.body, "its body")
            return Counters(reader.body["storage"]["state"]["counters"]).rows
        except ValueError as error:
            raise reader.malformed(f"its description of the rows is malformed: {error}") from error


def check_piece(piece: SavedPiece, layout: RowLayout | None, sampler: Sampler) -> None:
    """Verifies that a piece is whole, and fits a shard with this layout and sampler.

    Raises:
        CorruptCheckpointError: a file is not what was saved.
        CheckpointMisfitError: the rows have another layout, or another kind of sampler drew from them.
    """
    with Checkpoint(piece.folder).reading(piece.snapshot) as reader:
        reader.check()
        try:
            forms.check(_BODY, reader.body, "its body")
            saved = RowLayout.from_json(reader.body["storage"]["state"]["layout"])
            kind = reader.body["components"]["sampler"]["kind"]
        except ValueError as error:
            raise reader.malformed(f"its description of the rows is malformed: {error}") from error
    differences = [] if layout is None else layout.differences(saved)
    if kind != type(sampler).__name__:
        differences.append(f"the sampler is a {type(sampler).__name__} here, a {kind} there")
    if differences:
        raise CheckpointMisfitError(f"{piece.folder} does not fit this shard", differences)


class LoadedPiece:
    """The rows of a piece, in memory.

    Args:
        sampler: of the kind that was saved; it is not changed.

    Errors as `ReplayBuffer.loads`.

    Attributes:
        layout: of the rows.
        new_priority: what rows without one get; None: draws are not by priority.
    """

    def __init__(self, piece: SavedPiece, sampler: Sampler) -> None:
        storage = saved_storage(piece.folder, piece.snapshot)
        ReplayBuffer(storage=storage, sampler=sampler).loads(
            piece.folder, snapshot=piece.snapshot, parts=("storage", "sampler")
        )
        self._piece, self._storage, self._sampler = piece, storage, sampler
        assert storage.layout is not None
        self.layout: RowLayout = storage.layout
        self._lanes = storage.lanes
        self.new_priority = sampler.totals(storage).new_priority

    def runs(self) -> Iterator[Run]:
        """The rows of the piece that were not removed, in their order; behind removed ones another run begins."""
        before = 0  # rows of lanes before
        most = max(1, _BLOCK_BYTES // max(1, self.layout.payload_bytes))
        for lane, state in enumerate(self._lanes.states()):
            base, stop = state["base"], state["published"]
            first = base + max(0, self._piece.start - before)
            last = base + min(stop - base, self._piece.stop - before)
            before += stop - base
            if first >= last:
                continue
            borders = {first, *(seam for seam in state["seams"] if first < seam < last), last}
            removed = removed_steps(self._lanes.store, lane, range(first, last))
            gone = np.zeros(last - first, np.bool_) if removed is None else removed[:, 0]
            borders.update((np.flatnonzero(np.diff(gone)) + 1 + first).tolist())
            for begin, end in itertools.pairwise(sorted(borders)):
                for at in range(begin, end if not gone[begin - first] else begin, most):
                    yield self._run(lane, at, min(at + most, end), begins=at == begin)

    def _run(self, lane: int, start: int, stop: int, begins: bool) -> Run:
        slots = self._lanes.slots_of(lane, torch.arange(start, stop, device="cpu"))
        priority = None
        if isinstance(self._sampler, PrioritizedSampler):
            priority = self._sampler.priorities(slots, storage=self._storage)
        return Run(self._storage.get(slots), priority, begins)

    def close(self) -> None:
        """Frees the memory."""
        self._storage.close()
