"""The file of a store taken apart: every field by its name, read, changed, and sealed again with the checksum over it.

Where a field lies the core says (`block_fields`), so that one that moves is damaged in its new place.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from engram import _native

HEADER = Path(__file__).parents[2] / "src" / "native" / "header.hpp"

#: Bytes of each block, and offset and bytes of each of its fields.
BLOCKS: dict[str, tuple[int, dict[str, tuple[int, int]]]] = _native.testing.block_fields()
REDO_MARKED = 0x52454430
SEAM = 1 << 63


def declared_fields() -> dict[str, list[str]]:
    """The names of the fields of each block as the source declares them."""
    source = re.sub(r"//[^\n]*", "", HEADER.read_text())
    found = {}
    for block in BLOCKS:
        body = re.search(rf"struct {block} {{(.*?)\n}};", source, re.S)
        assert body is not None, f"{HEADER} declares no {block}"
        text = re.sub(r"union {.*?\n  };", "", body[1], flags=re.S)
        found[block] = []
        for line in text.split(";"):
            if "(" in re.sub(r"alignas\(\d+\)", "", line) or "static" in line or "return" in line:
                continue
            declared = re.match(r"\s*(?:alignas\(\d+\)\s*)?(?:[\w:]+(?:<\w+>)?)\s+(\w.*)", line, re.S)
            if declared is not None:
                found[block] += [re.split(r"\[|\s", name.strip())[0] for name in declared[1].split(",")]
    return found


class Place(NamedTuple):
    """A field of a block in a file: its name, where it lies, and how many bytes it has."""

    name: str
    at: int
    nbytes: int


class StoreImage:
    """The bytes of a store with trailers, and where its blocks and fields lie."""

    def __init__(self, content: bytes) -> None:
        self.content = bytearray(content)
        shape = {name: self.number(Place(name, *place)) for name, place in BLOCKS["StoreGeometry"][1].items()
                 if place[1] <= 8}  # fmt: skip
        self.lanes, self.capacity, self.envs = shape["lanes"], shape["lane_capacity"], shape["envs"]
        self.payload_bytes, self.row_stride = shape["payload_bytes"], shape["row_stride"]
        self.rows_offset, self.redo_offset, self.redo_bytes = (
            shape["rows_offset"], shape["redo_offset"], shape["redo_bytes"],
        )  # fmt: skip
        self.log_offset, self.seams_offset, self.seams_bytes = (
            shape["log_offset"], shape["seams_offset"], shape["seams_bytes"],
        )  # fmt: skip
        self.layout_offset, self.layout_bytes = shape["layout_offset"], shape["layout_bytes"]

    def copy(self) -> StoreImage:
        return StoreImage(self.content)

    # ---- fields ----
    def fields(self, block: str, at: int = 0, label: str = "") -> list[Place]:
        """The fields of a block that begins at a byte."""
        return [Place(f"{label or block}.{name}", at + offset, n) for name, (offset, n) in BLOCKS[block][1].items()]

    def header(self) -> list[Place]:
        """Those of the shape and of the session."""
        return self.fields("StoreGeometry") + self.fields("StoreHeader")

    def lane_fields(self) -> list[Place]:
        """Those of every lane's block."""
        begin, size = BLOCKS["StoreHeader"][0], BLOCKS["LaneHeader"][0]
        return [x for lane in range(self.lanes) for x in self.fields("LaneHeader", begin + lane * size, f"lane {lane}")]

    def trailer_at(self, row: int) -> int:
        return self.rows_offset + (row + 1) * self.row_stride - BLOCKS["Trailer"][0]

    def trailer_fields(self, row: int) -> list[Place]:
        return self.fields("Trailer", self.trailer_at(row), f"trailer {row}")

    def redo_fields(self) -> list[Place]:
        return self.fields("RedoHeader", self.redo_offset)

    def field(self, block: str, name: str, at: int = 0) -> Place:
        return Place(name, at + BLOCKS[block][1][name][0], BLOCKS[block][1][name][1])

    def bytes_of(self, place: Place) -> bytes:
        return bytes(self.content[place.at : place.at + place.nbytes])

    def number(self, place: Place) -> int:
        return int.from_bytes(self.content[place.at : place.at + place.nbytes], "little")

    def put(self, place: Place, value: bytes | int) -> None:
        value = value.to_bytes(place.nbytes, "little") if isinstance(value, int) else value
        assert len(value) == place.nbytes
        self.content[place.at : place.at + place.nbytes] = value

    # ---- checksums ----
    def seal_header(self) -> None:
        crc = self.field("StoreGeometry", "crc")
        self.put(crc, _native.testing.crc32c(bytes(self.content[: crc.at])))

    def seal_layout(self) -> None:
        layout = bytes(self.content[self.layout_offset : self.layout_offset + self.layout_bytes])
        self.put(self.field("StoreGeometry", "layout_crc"), _native.testing.crc32c(layout))
        self.seal_header()

    def seal_row(self, row: int) -> None:
        """Makes the checksum of a row right, whatever its payload and its trailer say."""
        at, begin = self.trailer_at(row), self.rows_offset + row * self.row_stride
        sequence, term = (self.number(self.field("Trailer", x, at)) for x in ("sequence_and_seam", "term"))
        crc = _native.testing.crc32c(self.bytes_of(self.field("StoreGeometry", "store_id")))
        crc = _native.testing.crc32c(bytes(self.content[begin : begin + self.payload_bytes]), crc)
        crc = _native.testing.crc32c(struct.pack("<QQQ", row, sequence, term), crc)
        self.put(self.field("Trailer", "crc", at), crc)

    def mark_redo(self, rows: list[int]) -> None:
        """A whole entry in the redo area, as a change that was interrupted leaves one: these rows as they are."""
        entry = struct.pack(f"<{len(rows)}Q", *rows)
        for row in rows:
            begin = self.rows_offset + row * self.row_stride
            entry += self.content[begin : begin + self.row_stride]
        at = self.redo_offset + BLOCKS["RedoHeader"][0]
        self.content[at : at + len(entry)] = entry
        for name, value in (("state", REDO_MARKED), ("rows", len(rows)), ("row_stride", self.row_stride)):
            self.put(self.field("RedoHeader", name, self.redo_offset), value)
        self.seal_redo(len(entry))

    def seal_redo(self, entry_bytes: int) -> None:
        crc, header = self.field("RedoHeader", "crc", self.redo_offset), BLOCKS["RedoHeader"][0]
        begin, end = crc.at + crc.nbytes, self.redo_offset + header + entry_bytes
        self.put(crc, _native.testing.crc32c(bytes(self.content[begin:end])))


def damages(place: Place, old: bytes, edges: bool = False) -> Iterator[bytes]:
    """Other contents of a field: a bit, neighbours and multiples of its number, the ends of its range, and noise.

    `edges`: those that a missing check lets through first, which are its neighbour, none, and the ends of its range.
    """
    n, value = place.nbytes, int.from_bytes(old, "little")
    top = 1 << 8 * n
    if edges:
        numbers = {0, value + 1, top >> 1, top - 1, *([top - 8, SEAM | 5] if n == 8 else [])}
        yield from (number.to_bytes(n, "little") for number in sorted(x % top for x in numbers) if number != value)
        return
    numbers = {0, 1, 2, top - 1, top >> 1, value ^ 1, value ^ 1 << 8 * n - 1}
    if n <= 8:
        numbers |= {value - 1, value + 1, value + 8, value * 2, value + 4096, 1 << 20, 1 << 32, 1 << 56, 1 << 62,
                    top - 8, top - 64, top - value, SEAM | 5}  # fmt: skip
    else:
        numbers |= {int.from_bytes(b"\xff\x00" * (n // 2), "little"), int.from_bytes(old[::-1], "little")}
    for number in sorted(x % top for x in numbers):
        if number != value:
            yield number.to_bytes(n, "little")
