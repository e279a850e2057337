"""Checks of the sizes that a Parquet file claims, before any of it is decoded.

A run of equal values takes a few bytes, whatever its length, and zstd makes as little of equal pages: a file of some
hundred bytes can ask for any memory. The footer says how many values a column has; each page says it again, and how
large it is when it is decompressed. pyarrow trusts the pages, so these are compared with the footer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, BinaryIO

from engram._system import free_memory, human_bytes

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_COPIES = 3  # in memory at once: the Arrow array, levels of lists, the tensor
_HEADER, _LONGEST_HEADER = 512, 1 << 20  # bytes read for a page's header, which may hold statistics
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_COUNTS = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}  # the field of a header with the number of values of its page


def decoded_row_bytes(file: BinaryIO, metadata: Any, columns: Collection[str]) -> int:
    """The most bytes that a row of these columns has when it is decoded, over the row groups.

    Raises:
        ValueError: a page claims more than the footer; or decoding needs more memory than is free.
    """
    most, free = 1, free_memory()
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        if row_group.num_rows < 0:
            raise ValueError(f"row group {group} has {row_group.num_rows} rows")
        row = nested = 0
        for i in range(row_group.num_columns):
            column, schema = row_group.column(i), metadata.schema.column(i)
            if column.path_in_schema.split(".")[0] not in columns and column.path_in_schema not in columns:
                continue
            place = f"row group {group}, column {column.path_in_schema!r}"
            page = _largest_page(file, column, place)
            nbytes = column.num_values * _width(schema)
            row += -(-nbytes // max(1, row_group.num_rows))
            # The footer does not have how the values of lists are spread over the rows: one may have them all.
            nested = max(nested, nbytes if schema.max_repetition_level else 0)
            if free is not None and page > free:
                raise ValueError(f"{place}, has a page of {human_bytes(page)}; {human_bytes(free)} of memory are free")
        needed = _COPIES * max(row, nested)
        if free is not None and needed > free:
            raise ValueError(
                f"row group {group} needs {human_bytes(needed)} of memory to be decoded; {human_bytes(free)} are free"
            )
        most = max(most, row)
    return most


def check_batch(rows: int, row_bytes: int) -> None:
    """ValueError where a batch of so many rows does not fit in memory."""
    free, needed = free_memory(), _COPIES * rows * row_bytes
    if free is not None and needed > free:
        raise ValueError(
            f"has rows of {human_bytes(row_bytes)}: a batch of {rows} needs {human_bytes(needed)} of memory, and "
            f"{human_bytes(free)} are free; use a smaller batch_size"
        )


def first_page(column: Any) -> int:
    """The offset of the first page of a column of a row group."""
    at: int = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < at:
        return int(column.dictionary_page_offset)
    return at


def _width(column: Any) -> int:
    """Bytes of a decoded value."""
    if column.physical_type == "FIXED_LEN_BYTE_ARRAY":
        return max(1, int(column.length))
    return _WIDTHS.get(column.physical_type, 16)


def _largest_page(file: BinaryIO, column: Any, place: str) -> int:
    """The decompressed size of a column's largest page, from the headers of all of them."""
    at = first_page(column)
    stop, seen, largest = at + column.total_compressed_size, 0, 0
    while seen < column.num_values:
        header, length = _page_header(file, at, place)
        kind, size, packed = (_count(header.get(field), place) for field in (1, 2, 3))
        counted = header.get(_COUNTS.get(kind, -1))
        values = _count(counted.get(1), place) if isinstance(counted, dict) else 0
        largest = max(largest, size)
        if kind in (_DATA, _DATA_V2):
            if not values:
                raise ValueError(f"{place}, has a page without values")
            seen += values
        at += length + packed
        if seen > column.num_values or at > stop + (1 << 16):
            raise ValueError(f"{place}, has pages that hold more than its footer says")
    return largest


def _count(value: Any, place: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{place}, has a page with a damaged header")
    return value


def _page_header(file: BinaryIO, at: int, place: str) -> tuple[dict[int, Any], int]:
    """The header of the page at an offset: its fields by their numbers, and its length."""
    size = _HEADER
    while True:
        file.seek(at)
        data = file.read(size)
        try:
            return _Compact(data).struct()
        except IndexError:
            if len(data) < size or size >= _LONGEST_HEADER:
                raise ValueError(f"{place}, has a page whose header is cut short") from None
            size = min(size * 8, _LONGEST_HEADER)


class _Compact:
    """Thrift's compact protocol, as far as headers of pages need it; an IndexError where the bytes end before."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def struct(self) -> tuple[dict[int, Any], int]:
        return self._struct(0), self._at

    def _struct(self, depth: int) -> dict[int, Any]:
        if depth > 8:
            raise ValueError("has a page whose header is nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while kind := self._byte():
            number = number + (kind >> 4) if kind >> 4 else self._zigzag()
            fields[number] = self._value(kind & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._zigzag()
        if kind == 7:
            return self._skip(8)
        if kind == 8:
            return self._skip(self._varint())
        if kind == 12:
            return self._struct(depth + 1)
        raise ValueError("has a page with a damaged header")  # lists and maps, which page headers do not have

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _skip(self, n: int) -> None:
        self._at += n
        if self._at > len(self._data):
            raise IndexError

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("has a page with a damaged header")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
