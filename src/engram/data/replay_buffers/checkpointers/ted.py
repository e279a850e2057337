"""Episode data (TED) on disk without the second copy of the observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engram.checkpoint.protocols import Rows
from engram.checkpoint.writer import Block
from engram.data.replay_buffers.checkpointers.rows import (
    WHOLE,
    ChunkCodec,
    ChunkedStorageCheckpointer,
    Details,
    SectionReader,
    column_of,
    pack_values,
    positions_block,
    put_column,
    section_bytes,
    unpack_values,
)
from engram.pytree import Key
from engram.store.layout import LayoutState, RowLayout
from engram.ted import codec as ted_codec
from engram.ted.codec import DONE_KEYS, REWARD_KEYS, Column, Mask, StepKeys


class FlatChunkCodec:
    """One section a leaf. A leaf under `next` that its root repeats a step later: the steps where it does not, and
    their values. Any other: its values, or where they change and the new values, whichever is shorter.
    """

    def __init__(self, layout: RowLayout, shared: dict[int, int]) -> None:
        self._leaves, self._payload = layout.stored, layout.payload_bytes
        self._shared = shared
        self.row_bytes = self._payload - sum(self._leaves[i].nbytes for i in shared)

    def state(self) -> dict[str, Any]:
        return {"shared": [[i, root] for i, root in self._shared.items()]}

    # ---- saving ----
    def pack(self, rows: Rows, cuts: Sequence[int]) -> tuple[Details, list[Block]]:
        strands, steps, _ = rows.shape
        flat = rows.reshape(strands * steps, -1)
        ends = ted_codec.strand_ends(strands, steps)
        details: list[int] = []
        blocks: list[Block] = []
        for i, leaf in enumerate(self._leaves):
            column = column_of(flat, leaf)
            root = self._shared.get(i)
            if root is not None:
                at = np.flatnonzero(ted_codec.broken(column_of(flat, self._leaves[root]), column, ends))
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
        exceptions: dict[int, tuple[ted_codec.Positions, Column]] = {}
        for i, leaf in enumerate(self._leaves):
            if i in self._shared:
                exceptions[i] = sections.positions(details[i], n), sections.values(details[i], leaf.nbytes)
            else:
                put_column(out, leaf, unpack_values(sections, leaf.nbytes, details[i], n))
        for i, (at, values) in exceptions.items():
            _check_covered(at, ted_codec.strand_ends(strands, steps))
            put_column(
                out, self._leaves[i], ted_codec.followed(column_of(out, self._leaves[self._shared[i]]), at, values)
            )
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


def _check_covered(at: ted_codec.Positions, ends: ted_codec.Mask) -> None:
    given = np.zeros(len(ends), np.bool_)
    given[at] = True
    if not given[ends].all():
        raise ValueError("nothing says what followed the newest step")


class NestedChunkCodec:
    """The last steps of the trajectories, then one section a leaf. A leaf that `next` repeats has one value more a
    trajectory, what followed its last step; its copy under `next` only the steps inside a trajectory that differ.
    """

    def __init__(
        self, layout: RowLayout, shared: dict[int, int], flags: Sequence[int] = (), ids: Sequence[int] = ()
    ) -> None:
        self._leaves, self._payload = layout.stored, layout.payload_bytes
        self._shared, self._flags, self._ids = shared, flags, ids
        self._copy_of = {root: i for i, root in shared.items()}
        self.row_bytes = self._payload - sum(self._leaves[i].nbytes for i in shared)

    def state(self) -> dict[str, Any]:
        return {"shared": [[i, root] for i, root in self._shared.items()], "flags": [*self._flags], "ids": [*self._ids]}

    # ---- saving ----
    def pack(self, rows: Rows, cuts: Sequence[int]) -> tuple[Details, list[Block]]:
        flat = rows.reshape(rows.shape[0] * rows.shape[1], -1)
        ends = self._trajectory_ends(flat, rows.shape[0], rows.shape[1], cuts)
        at = np.flatnonzero(ends)
        details: list[int] = [len(at)]
        blocks: list[Block] = [positions_block(at)]
        for i, leaf in enumerate(self._leaves):
            column = column_of(flat, leaf)
            made: list[Block]
            if i in self._copy_of:
                following = column_of(flat, self._leaves[self._copy_of[i]])
                count, made = WHOLE, [ted_codec.with_last(column, following, ends)]
            elif i in self._shared:
                count, made = self._exceptions(column_of(flat, self._leaves[self._shared[i]]), column, ends)
            else:
                count, made = pack_values(column)
            details.append(count)
            blocks += made
        return tuple(details), blocks

    def _trajectory_ends(self, flat: Rows, strands: int, steps: int, cuts: Sequence[int]) -> Mask:
        ends = ted_codec.strand_ends(strands, steps)
        ends.reshape(strands, steps)[:, [cut - 1 for cut in cuts]] = True
        flags, ids = ([column_of(flat, self._leaves[i]) for i in some] for some in (self._flags, self._ids))
        return ted_codec.trajectory_ends(ends, flags, ids)

    @staticmethod
    def _exceptions(now: Column, following: Column, ends: Mask) -> tuple[int, list[Block]]:
        at = np.flatnonzero(ted_codec.broken(now, following, ends) & ~ends)
        return len(at), [positions_block(at), following[at]]

    # ---- loading ----
    def nbytes(self, details: Details, strands: int, steps: int) -> int:
        n = strands * steps
        self._check(details, n)
        longer = details[0] * sum(self._leaves[root].nbytes for root in self._copy_of)
        sections = zip(self._leaves, details[1:], strict=True)
        return 4 * details[0] + longer + sum(section_bytes(leaf.nbytes, count, n) for leaf, count in sections)

    def unpack(self, content: Rows, details: Details, strands: int, steps: int) -> Rows:
        n, sections = strands * steps, SectionReader(content)
        ends = np.zeros(n, np.bool_)
        ends[sections.positions(details[0], n)] = True
        if not ends[ted_codec.strand_ends(strands, steps)].all():
            raise ValueError("a trajectory goes on from one strand to another")
        out = np.zeros((n, self._payload), np.uint8)
        exceptions: dict[int, tuple[ted_codec.Positions, Column]] = {}
        for i, leaf in enumerate(self._leaves):
            if i in self._copy_of:
                now, following = ted_codec.without_last(sections.values(n + details[0], leaf.nbytes), ends)
                put_column(out, leaf, now)
                put_column(out, self._leaves[self._copy_of[i]], following)
            elif i in self._shared:
                count = details[i + 1]
                exceptions[i] = sections.positions(count, n), sections.values(count, leaf.nbytes)
            else:
                put_column(out, leaf, unpack_values(sections, leaf.nbytes, details[i + 1], n))
        for i, (at, values) in exceptions.items():
            out[at, self._leaves[i].offset : self._leaves[i].offset + self._leaves[i].nbytes] = values
        return out.reshape(strands, steps, self._payload)

    def _check(self, details: Details, n: int) -> None:
        least = [0, *(0 if i in self._shared else WHOLE for i in range(len(self._leaves)))]
        fits = len(details) == len(least) and all(low <= x <= n for low, x in zip(least, details, strict=True))
        if not fits or any(details[root + 1] != WHOLE for root in self._copy_of):
            raise ValueError(f"{details} do not say how {n} rows of {len(self._leaves)} keys are stored")


class NestedStorageCheckpointer(ChunkedStorageCheckpointer):
    """Saves steps of TED as trajectories, without the second copy of their observations.

    As the `FlatStorageCheckpointer`, but the observations of a trajectory lie together with what followed its last
    step. A trajectory ends at a flag of `done_keys` under `next`, where its id changes, at a seam, with its strand, and
    with a chunk (16 MB of rows): after a chunk it goes on in the next one unless its last step has a flag.

    Args:
        done_keys: flags, which are never taken from the step after: names at any depth, or tuples for one place.
        reward_keys: rewards, the same.

    Raises:
        ValueError: at a save, a step has several done flags (multi-agent); the message names the key.
    """

    format = "nested"

    def __init__(self, done_keys: Sequence[Key] = DONE_KEYS, reward_keys: Sequence[Key] = REWARD_KEYS) -> None:
        super().__init__()
        self._keys = StepKeys(done_keys, reward_keys)

    def _codec(self, layout: LayoutState) -> ChunkCodec:
        made = layout.parse()
        keys = self._keys
        return NestedChunkCodec(made, keys.shared(made.leaves), keys.flags(made.leaves), keys.ids(made.leaves))

    def _saved_codec(self, layout: LayoutState, state: dict[str, Any]) -> ChunkCodec:
        made = layout.parse()
        return NestedChunkCodec(made, shared_of(made, state))
