"""Codecs for the rows of a chunk: as they are, or every observation once (`flat`, `nested`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from engram.data.replay_buffers.checkpointers.base import Rows
from engram.data.replay_buffers.checkpointers.commit import Block
from engram.data.replay_buffers.layout import LeafSpec
from engram.data.replay_buffers.ted import steps as st
from engram.data.replay_buffers.ted.steps import Column, Positions

Details = tuple[int, ...]
WHOLE = -1  # in place of a number of values: every value is there


class ChunkCodec(Protocol):
    """Encodes the rows of a chunk as the content of its file, and decodes them.

    `details` are numbers that the manifest has for a chunk; the size of its file follows from them.
    """

    @property
    def row_bytes(self) -> int:
        """About how many bytes of a file a row takes."""

    def state(self) -> dict[str, Any]:
        """JSON that `loads` needs, and that must be the same for a file to be taken over by the next save."""

    def pack(self, rows: Rows, cuts: Sequence[int]) -> tuple[Details, list[Block]]:
        """Details and content of rows `[strands, steps, row_bytes]`; no trajectory goes on across one of `cuts`."""

    def nbytes(self, details: Details, strands: int, steps: int) -> int:
        """The size of a file; ValueError when these details cannot be."""

    def unpack(self, content: Rows, details: Details, strands: int, steps: int) -> Rows:
        """Rows `[strands, steps, row_bytes]`, valid as long as `content` is; ValueError when they cannot be."""


class RawChunkCodec:
    """Rows as they are."""

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes

    def state(self) -> dict[str, Any]:
        return {}

    def pack(self, rows: Rows, cuts: Sequence[int]) -> tuple[Details, list[Block]]:
        return (), [rows]

    def nbytes(self, details: Details, strands: int, steps: int) -> int:
        if details:
            raise ValueError(f"rows as they are have no details, found {details}")
        return strands * steps * self.row_bytes

    def unpack(self, content: Rows, details: Details, strands: int, steps: int) -> Rows:
        return content.reshape(strands, steps, self.row_bytes)


class SectionReader:
    """Reads the sections of a file's content, from start to end."""

    def __init__(self, content: Rows) -> None:
        self._content, self._at = content, 0

    def values(self, count: int, nbytes: int) -> Rows:
        """uint8 [count, nbytes]."""
        return self._take(count * nbytes).reshape(count, nbytes)

    def positions(self, count: int, below: int) -> Positions:
        """int64 [count]: rising positions of steps; a ValueError says that they are not."""
        positions = self._take(4 * count).view("<u4").astype(np.int64)
        if count and (positions[-1] >= below or (np.diff(positions) <= 0).any()):
            raise ValueError("positions of steps do not rise, or go beyond the last step")
        return positions

    def _take(self, nbytes: int) -> Rows:
        section = self._content[self._at : self._at + nbytes]
        if len(section) != nbytes:
            raise ValueError("its content is shorter than its details say")
        self._at += nbytes
        return section


def positions_block(positions: Positions) -> Block:
    return positions.astype("<u4")


def column_of(flat: Rows, leaf: LeafSpec) -> Column:
    """uint8 [n, nbytes]: a leaf of rows [n, row_bytes], copied."""
    return np.ascontiguousarray(flat[:, leaf.offset : leaf.offset + leaf.nbytes])


def put_column(flat: Rows, leaf: LeafSpec, column: Column) -> None:
    """The reverse."""
    flat[:, leaf.offset : leaf.offset + leaf.nbytes] = column


def pack_values(column: Column) -> tuple[int, list[Block]]:
    """Every value, or the steps where it changes and the new values: how many, or WHOLE, and the shorter of the two."""
    starts = st.run_starts(column)
    if section_bytes(column.shape[1], len(starts), len(column)) >= column.size:
        return WHOLE, [column]
    return len(starts), [positions_block(starts), column[starts]]


def unpack_values(sections: SectionReader, nbytes: int, count: int, n: int) -> Column:
    """The column of n steps that `pack_values` packed."""
    if count == WHOLE:
        return sections.values(n, nbytes)
    return st.repeat_runs(sections.positions(count, n), sections.values(count, nbytes), n)


def section_bytes(nbytes: int, count: int, n: int) -> int:
    """Size of a section of `count` positions and values, or of all n values."""
    return n * nbytes if count == WHOLE else count * (4 + nbytes)
