"""Checkpointers of episode data (TED) that write every observation once: `flat`, and by trajectories `nested`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from engram.checkpoint.protocols import Rows, RowSource
from engram.checkpoint.writer import Block
from engram.data.replay_buffers.state.checkpointers.rows import (
    WHOLE,
    ChunkCodec,
    ChunkedStorageCheckpointer,
    Details,
    SectionReader,
    WholeChunks,
    column_of,
    pack_values,
    positions_block,
    put_column,
    section_bytes,
    unpack_values,
)
from engram.pytree import Key
from engram.store.layout import LayoutState, LeafSpec, RowLayout
from engram.ted import codec as ted_codec
from engram.ted.codec import DONE_KEYS, REWARD_KEYS, Column, Mask, StepKeys


@dataclass(frozen=True)
class EpisodeLayout:
    """The leaves of a row: which of them repeat which one step later, and which say where a trajectory ends."""

    layout: RowLayout
    shared: dict[int, int]
    flags: Sequence[int] = ()
    ids: Sequence[int] = ()

    @classmethod
    def of(cls, layout: LayoutState, keys: StepKeys) -> EpisodeLayout:
        """That of rows which are saved; ValueError: a step has several done flags."""
        parsed = layout.parse()
        return cls(parsed, keys.shared(parsed.leaves), keys.flags(parsed.leaves), keys.ids(parsed.leaves))

    @classmethod
    def saved(cls, layout: LayoutState, state: dict[str, Any]) -> EpisodeLayout:
        """That of rows which were saved, from a manifest; ValueError where it is impossible."""
        parsed = layout.parse()
        shared = {int(i): int(root) for i, root in state["shared"]}
        roots, leaves = set(shared.values()), parsed.leaves
        for i, root in shared.items():
            exist = 0 <= i < len(leaves) and 0 <= root < len(leaves)
            if not exist or i in roots or leaves[i].nbytes != leaves[root].nbytes:
                raise ValueError(f"key {i} cannot be a copy of key {root}")
        if len(roots) < len(shared):
            raise ValueError("two keys are copies of one")
        return cls(parsed, shared)

    @property
    def leaves(self) -> list[tuple[int, LeafSpec]]:
        """The leaves that have bytes, with their numbers."""
        return [(i, leaf) for i, leaf in enumerate(self.layout.stored) if leaf.nbytes]

    @property
    def copy_of(self) -> dict[int, int]:
        """The reverse of `shared`: of a root leaf the leaf under "next" that repeats it."""
        return {root: i for i, root in self.shared.items()}

    @property
    def row_bytes(self) -> int:
        """The bytes of a row without the leaves that repeat others."""
        return self.layout.payload_bytes - sum(self.layout.stored[i].nbytes for i in self.shared)

    @property
    def saved_pairs(self) -> list[list[int]]:
        """`shared` in a manifest."""
        return [[i, root] for i, root in self.shared.items()]

    def trajectory_ends(self, flat: Rows, envs: int, steps: int, cuts: Sequence[int]) -> Mask:
        """bool [rows]: the last steps of trajectories and of environments, and those before each cut."""
        ends = ted_codec.env_ends(envs, steps)
        ends.reshape(envs, steps)[:, [cut - 1 for cut in cuts if cut]] = True
        flags, ids = ([column_of(flat, self.layout.stored[i]) for i in some] for some in (self.flags, self.ids))
        return ted_codec.trajectory_ends(ends, flags, ids)


class FlatChunkCodec(WholeChunks):
    """Writes one section for each leaf.

    A leaf under `next` that its root repeats one step later is written as exceptions: the steps where it does not, and
    their values. Any other leaf is written as all values or as changes, whichever is shorter.
    """

    def __init__(self, episodes: EpisodeLayout) -> None:
        self._episodes, self._shared = episodes, episodes.shared
        self._leaves, self._payload = episodes.layout.stored, episodes.layout.payload_bytes
        self.row_bytes, self.held_bytes = episodes.row_bytes, self._payload

    def state(self) -> dict[str, Any]:
        return {"shared": self._episodes.saved_pairs}

    # ---- saving ----
    def pack(
        self, read: Callable[[int, int], Rows], envs: int, steps: int, cuts: Sequence[int]
    ) -> tuple[Details, list[Block]]:
        flat = read(0, steps).reshape(envs * steps, -1)
        ends = ted_codec.env_ends(envs, steps)
        details: list[int] = []
        blocks: list[Block] = []
        for i, leaf in enumerate(self._leaves):
            column = column_of(flat, leaf)
            root = self._shared.get(i)
            if root is not None:
                at = np.flatnonzero(ted_codec.broken(column_of(flat, self._leaves[root]), column, ends))
                count, sections = len(at), [positions_block(at), column[at]]
            else:
                count, sections = pack_values(column)
            details.append(count)
            blocks += sections
        return tuple(details), blocks

    # ---- loading ----
    def nbytes(self, details: Details, envs: int, steps: int) -> int:
        n = envs * steps
        self._check(details, n)
        return sum(section_bytes(leaf.nbytes, x, n) for leaf, x in zip(self._leaves, details, strict=True))

    def unpack(self, content: Rows, details: Details, envs: int, steps: int, first: int) -> Iterator[tuple[int, Rows]]:
        n, sections = envs * steps, SectionReader(content)
        out = np.zeros((n, self._payload), np.uint8)
        exceptions: dict[int, tuple[ted_codec.Positions, Column]] = {}
        for i, leaf in enumerate(self._leaves):
            if i in self._shared:
                exceptions[i] = sections.positions(details[i], n), sections.values(details[i], leaf.nbytes)
            else:
                put_column(out, leaf, unpack_values(sections, leaf.nbytes, details[i], n))
        for i, (at, values) in exceptions.items():
            check_covered(at, ted_codec.env_ends(envs, steps))
            put_column(
                out, self._leaves[i], ted_codec.followed(column_of(out, self._leaves[self._shared[i]]), at, values)
            )
        yield first, out.reshape(envs, steps, self._payload)[:, first:]

    def _check(self, details: Details, n: int) -> None:
        least = [0 if i in self._shared else WHOLE for i in range(len(self._leaves))]
        if len(details) != len(least) or not all(low <= x <= n for low, x in zip(least, details, strict=True)):
            raise ValueError(f"{details} do not describe {n} rows of {len(least)} keys")


class EpisodeCheckpointer(ChunkedStorageCheckpointer):
    """Saves episode data by a codec that writes every observation once; arguments as FlatStorageCheckpointer."""

    _chunk_codec: ClassVar[type[FlatChunkCodec] | type[NestedChunkCodec]]

    def __init__(self, done_keys: Sequence[Key] = DONE_KEYS, reward_keys: Sequence[Key] = REWARD_KEYS) -> None:
        super().__init__()
        self._keys = StepKeys(done_keys, reward_keys)

    def _codec(self, layout: LayoutState, source: RowSource) -> ChunkCodec:
        return self._chunk_codec(EpisodeLayout.of(layout, self._keys))

    def _saved_codec(self, layout: LayoutState, state: dict[str, Any]) -> ChunkCodec:
        return self._chunk_codec(EpisodeLayout.saved(layout, state))


class FlatStorageCheckpointer(EpisodeCheckpointer):
    """Saves episode data (TED) without the second copy of the observations.

    A key under `next` that is also at the root, of the same dtype and shape, is compared with the root of the step
    after, byte for byte; only what differs is written. Keys on one side alone, flags and rewards are written as they
    are. Values that seldom change are written where they change. What is loaded is what was saved, to the byte.

    Args:
        done_keys: flags, which are never read from the step after: names at any depth, or tuples for one place.
        reward_keys: rewards, the same.

    Raises:
        ValueError: at a save, a step has several done flags (multi-agent); the message names the key.
    """

    format = "flat"
    _chunk_codec = FlatChunkCodec


def check_covered(at: ted_codec.Positions, ends: ted_codec.Mask) -> None:
    """ValueError unless there is an exception at each of `ends`, which no step follows."""
    covered = np.zeros(len(ends), np.bool_)
    covered[at] = True
    if not covered[ends].all():
        raise ValueError("the observation that followed the newest step is missing")


class NestedChunkCodec(WholeChunks):
    """Writes the last steps of the trajectories, then one section for each leaf.

    A root leaf with a copy under `next` has one value more for each trajectory: the one that followed its last step.
    The copy is written as exceptions, for the steps inside trajectories where it differs.
    """

    def __init__(self, episodes: EpisodeLayout) -> None:
        self._episodes, self._shared, self._copy_of = episodes, episodes.shared, episodes.copy_of
        self._leaves, self._payload = episodes.layout.stored, episodes.layout.payload_bytes
        self.row_bytes, self.held_bytes = episodes.row_bytes, self._payload

    def state(self) -> dict[str, Any]:
        episodes = self._episodes
        return {"shared": episodes.saved_pairs, "flags": [*episodes.flags], "ids": [*episodes.ids]}

    # ---- saving ----
    def pack(
        self, read: Callable[[int, int], Rows], envs: int, steps: int, cuts: Sequence[int]
    ) -> tuple[Details, list[Block]]:
        flat = read(0, steps).reshape(envs * steps, -1)
        ends = self._episodes.trajectory_ends(flat, envs, steps, cuts)
        at = np.flatnonzero(ends)
        details: list[int] = [len(at)]
        blocks: list[Block] = [positions_block(at)]
        for i, leaf in enumerate(self._leaves):
            column = column_of(flat, leaf)
            sections: list[Block]
            if i in self._copy_of:
                following = column_of(flat, self._leaves[self._copy_of[i]])
                count, sections = WHOLE, [ted_codec.with_last(column, following, ends)]
            elif i in self._shared:
                count, sections = self._exceptions(column_of(flat, self._leaves[self._shared[i]]), column, ends)
            else:
                count, sections = pack_values(column)
            details.append(count)
            blocks += sections
        return tuple(details), blocks

    @staticmethod
    def _exceptions(now: Column, following: Column, ends: Mask) -> tuple[int, list[Block]]:
        at = np.flatnonzero(ted_codec.broken(now, following, ends) & ~ends)
        return len(at), [positions_block(at), following[at]]

    # ---- loading ----
    def nbytes(self, details: Details, envs: int, steps: int) -> int:
        n = envs * steps
        self._check(details, n)
        longer = details[0] * sum(self._leaves[root].nbytes for root in self._copy_of)
        sections = zip(self._leaves, details[1:], strict=True)
        return 4 * details[0] + longer + sum(section_bytes(leaf.nbytes, count, n) for leaf, count in sections)

    def unpack(self, content: Rows, details: Details, envs: int, steps: int, first: int) -> Iterator[tuple[int, Rows]]:
        n, sections = envs * steps, SectionReader(content)
        ends = np.zeros(n, np.bool_)
        ends[sections.positions(details[0], n)] = True
        if not ends[ted_codec.env_ends(envs, steps)].all():
            raise ValueError("a trajectory goes on from one environment to another")
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
        yield first, out.reshape(envs, steps, self._payload)[:, first:]

    def _check(self, details: Details, n: int) -> None:
        least = [0, *(0 if i in self._shared else WHOLE for i in range(len(self._leaves)))]
        fits = len(details) == len(least) and all(low <= x <= n for low, x in zip(least, details, strict=True))
        if not fits or any(details[root + 1] != WHOLE for root in self._copy_of):
            raise ValueError(f"{details} do not describe {n} rows of {len(self._leaves)} keys")


class NestedStorageCheckpointer(EpisodeCheckpointer):
    """Saves episode data (TED) by trajectories, without the second copy of the observations.

    As the `FlatStorageCheckpointer`, but the observations of a trajectory lie together with what followed its last
    step. A trajectory ends at a flag of `done_keys` under `next`, where its id changes, at a seam, at the
    newest step of its environment, and at the end of a chunk (16 MB of rows), unless whose last step has a flag the
    trajectory goes on in the next chunk.

    Args:
        done_keys: flags, which are never read from the step after: names at any depth, or tuples for one place.
        reward_keys: rewards, the same.

    Raises:
        ValueError: at a save, a step has several done flags (multi-agent); the message names the key.
    """

    format = "nested"
    _chunk_codec = NestedChunkCodec
