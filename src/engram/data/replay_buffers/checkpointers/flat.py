"""Episode data (TED) on disk without the second copy of the observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engram.data.replay_buffers.checkpointers.base import Rows
from engram.data.replay_buffers.checkpointers.commit import Block
from engram.data.replay_buffers.checkpointers.packing import (
    WHOLE,
    ChunkCodec,
    Details,
    SectionReader,
    column_of,
    pack_values,
    positions_block,
    put_column,
    section_bytes,
    unpack_values,
)
from engram.data.replay_buffers.checkpointers.tensor import ChunkedStorageCheckpointer
from engram.data.replay_buffers.layout import LayoutState, RowLayout
from engram.data.replay_buffers.ted import steps as st
from engram.data.replay_buffers.ted.keys import DONE_KEYS, REWARD_KEYS, Key, StepKeys
from engram.data.replay_buffers.ted.steps import Column


class FlatChunkCodec:
    """One section a leaf. A leaf under `next` that its root repeats a step later: the steps where it does not, and
    their values. Any other: its values, or where they change and the new values, whichever is shorter.
    """

    def __init__(self, layout: RowLayout, shared: dict[int, int]) -> None:
        self._leaves, self._payload = layout.leaves, layout.payload_bytes
        self._shared = shared
        self.row_bytes = self._payload - sum(self._leaves[i].nbytes for i in shared)

    def state(self) -> dict[str, Any]:
        return {"shared": [[i, root] for i, root in self._shared.items()]}

    # ---- saving ----
    def pack(self, rows: Rows, cuts: Sequence[int]) -> tuple[Details, list[Block]]:
        strands, steps, _ = rows.shape
        flat = rows.reshape(strands * steps, -1)
        ends = st.strand_ends(strands, steps)
        details: list[int] = []
        blocks: list[Block] = []
        for i, leaf in enumerate(self._leaves):
            column = column_of(flat, leaf)
            root = self._shared.get(i)
            if root is not None:
                at = np.flatnonzero(st.broken(column_of(flat, self._leaves[root]), column, ends))
                count, made = len(at), [positions_block(at), column[at]]
            else:
                count, made = pack_values(column)
            details.append(count)
            blocks += made
        return tuple(details), blocks

    # ---- loading ----
    def nbytes(self, details: Details, strands: int, steps: int) -> int:
        n = strands * steps
        self._check(details, n)
        return sum(section_bytes(leaf.nbytes, x, n) for leaf, x in zip(self._leaves, details, strict=True))

    def unpack(self, content: Rows, details: Details, strands: int, steps: int) -> Rows:
        n, sections = strands * steps, SectionReader(content)
        out = np.zeros((n, self._payload), np.uint8)
        exceptions: dict[int, tuple[st.Positions, Column]] = {}
        for i, leaf in enumerate(self._leaves):
            if i in self._shared:
                exceptions[i] = sections.positions(details[i], n), sections.values(details[i], leaf.nbytes)
            else:
                put_column(out, leaf, unpack_values(sections, leaf.nbytes, details[i], n))
        for i, (at, values) in exceptions.items():
            _check_covered(at, st.strand_ends(strands, steps))
            put_column(out, self._leaves[i], st.followed(column_of(out, self._leaves[self._shared[i]]), at, values))
        return out.reshape(strands, steps, self._payload)

    def _check(self, details: Details, n: int) -> None:
        least = [0 if i in self._shared else WHOLE for i in range(len(self._leaves))]
        if len(details) != len(least) or not all(low <= x <= n for low, x in zip(least, details, strict=True)):
            raise ValueError(f"{details} do not say how {n} rows of {len(least)} keys are stored")


class FlatStorageCheckpointer(ChunkedStorageCheckpointer):
    """Saves steps of TED without the second copy of their observations.

    A key under `next` that is also at the root, of the same dtype and shape, is compared with the root of the step
    after, byte for byte; only what differs is written. Keys on one side alone, flags and rewards are written as they
    are. Values that seldom change are written where they change. What is loaded is what was saved, to the byte.

    Args:
        done_keys: flags, which are never taken from the step after: names at any depth, or tuples for one place.
        reward_keys: rewards, the same.

    Raises:
        ValueError: at a save, a step has several done flags (multi-agent); the message names the key.
    """

    format = "flat"

    def __init__(self, done_keys: Sequence[Key] = DONE_KEYS, reward_keys: Sequence[Key] = REWARD_KEYS) -> None:
        super().__init__()
        self._keys = StepKeys(done_keys, reward_keys)

    def _codec(self, layout: LayoutState) -> ChunkCodec:
        made = layout.parse()
        self._keys.flags(made.leaves)  # for its error
        return FlatChunkCodec(made, self._keys.shared(made.leaves))

    def _saved_codec(self, layout: LayoutState, state: dict[str, Any]) -> ChunkCodec:
        made = layout.parse()
        return FlatChunkCodec(made, shared_of(made, state))


def shared_of(layout: RowLayout, state: dict[str, Any]) -> dict[int, int]:
    """Which leaf repeats which, as a manifest says; a ValueError says that it cannot be."""
    shared = {int(i): int(root) for i, root in state["shared"]}
    roots = set(shared.values())
    for i, root in shared.items():
        known = 0 <= i < len(layout.leaves) and 0 <= root < len(layout.leaves)
        if not known or i in roots or layout.leaves[i].nbytes != layout.leaves[root].nbytes:
            raise ValueError(f"key {i} cannot be a copy of key {root}")
    if len(roots) < len(shared):
        raise ValueError("two keys are copies of one")
    return shared


def _check_covered(at: st.Positions, ends: st.Mask) -> None:
    given = np.zeros(len(ends), np.bool_)
    given[at] = True
    if not given[ends].all():
        raise ValueError("nothing says what followed the newest step")
