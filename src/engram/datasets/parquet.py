"""Parquet datasets: every key of a step is a column, and comes back bit by bit.

The sizes that a file claims are checked before any of it is decoded. A run of equal values takes a few bytes,
whatever its length, and zstd makes as little of equal pages: a file of some hundred bytes can ask for any memory. The
footer says how many values a column has; each page says it again, and how large it is when it is decompressed.
pyarrow trusts the pages, so these are compared with the footer.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from engram import pytree
from engram._progress import progress_bar
from engram.datasets.atomic_files import new_file, path_of, replaceable_file
from engram.datasets.episodes import (
    BLOCK_BYTES,
    DONE,
    MAX_ROW_BYTES,
    TRAJECTORY,
    DatasetSize,
    Marks,
    StepBlock,
    batch_of,
    block_rows,
    check_buffer,
    episode_source,
    ingest,
    is_utf8,
    next_trajectory,
)
from engram.datasets.format import DatasetFormat
from engram.errors import DatasetError
from engram.kernel.rows import IDS, LeafSpec, RowLayout
from engram.kernel.tools import free_memory, human_bytes, open_regular, packages, parse_bytes, user_path
from engram.pytree import Key, KeyPath, TreeSpec
from engram.specs import Text

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_COPIES = 3  # in memory at once: the Arrow array, levels of lists, the tensor
_LEVELS = 4  # bytes that Arrow decodes beside each value of a list
_HEADER, _LONGEST_HEADER = 512, 1 << 20  # bytes read for a page's header, which may hold statistics
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_COUNTS = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}  # the field of a header with the number of values of its page


def decoded_row_bytes(file: BinaryIO, metadata: Any, columns: Collection[str], allowed: int) -> int:
    """The most bytes that a row of these columns has when it is decoded, over the row groups.

    Raises:
        ValueError: a page claims more than the footer; or decoding needs more memory than is free, or more for a row,
            or for a page, than is allowed.
    """
    most, free = 1, free_memory()
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        if row_group.num_rows < 0:
            raise ValueError(f"row group {group} has {row_group.num_rows} rows")
        row = nested = levels = 0
        for i in range(row_group.num_columns):
            column, schema = row_group.column(i), metadata.schema.column(i)
            if not _is_below(column.path_in_schema, columns):
                continue
            place = f"row group {group}, column {column.path_in_schema!r}"
            page = _largest_page(file, column, place)
            nbytes = column.num_values * _width(schema)
            row += -(-nbytes // max(1, row_group.num_rows))
            if schema.max_repetition_level:
                levels += _LEVELS * -(-column.num_values // max(1, row_group.num_rows))
            if page > allowed:
                raise ValueError(f"{place}, has a page of {human_bytes(page)}; {_limit(allowed)}")
            # The footer does not have how the values of lists are spread over the rows: one may have them all.
            nested = max(nested, nbytes if schema.max_repetition_level else 0)
            if free is not None and page > free:
                raise ValueError(f"{place}, has a page of {human_bytes(page)}; {human_bytes(free)} of memory are free")
        if row + levels > allowed:
            raise ValueError(
                f"row group {group} has rows that need {human_bytes(row + levels)} to be decoded; {_limit(allowed)}"
            )
        needed = _COPIES * max(row, nested)
        if free is not None and needed > free:
            raise ValueError(
                f"row group {group} needs {human_bytes(needed)} of memory to be decoded; {human_bytes(free)} are free"
            )
        most = max(most, row)
    return most


def _is_below(path: str, columns: Collection[str]) -> bool:
    """Whether a path in the schema is that of one of these columns: "a.b.list.element" is of "a.b", and of "a"."""
    parts = path.split(".")
    return any(".".join(parts[:n]) in columns for n in range(1, len(parts) + 1))


def _limit(allowed: int) -> str:
    return f"max_row_bytes= allows {human_bytes(allowed)}"


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


Array = npt.NDArray[Any]

FORMAT, VERSION = "engram steps", 1
METADATA, HIDDEN = b"engram", b"engram.trajectories"
#: The column that numbers the trajectories of the file.
TRAJECTORIES = "engram.trajectory"
_LONGEST_LIST = 64  # values: longer ones are bytes, which are written and read ten times as fast
_MAX_METADATA_BYTES = 16 << 20
_RAW = (torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


def import_pyarrow() -> Any:
    """Imports pyarrow with its Parquet part; the ImportError says how to install it."""
    with packages("Parquet", "engram[parquet]", pyarrow="pyarrow"):
        import pyarrow
        import pyarrow.parquet
    return pyarrow


class ParquetColumn(NamedTuple):
    """A leaf and the column that holds it."""

    leaf: LeafSpec
    name: str
    kind: str  # "value", "list" or "bytes"; "none": the leaf has no bytes, and no column

    def arrow_type(self) -> Any:
        """The Arrow type of the column."""
        pa = import_pyarrow()
        if self.kind == "bytes":
            return pa.binary(self.leaf.nbytes)
        value = pa.from_numpy_dtype(np.dtype(str(self.leaf.dtype).removeprefix("torch.")))
        if self.kind == "value":
            return value
        # Declared never null: a level that may be null costs time and space.
        return pa.list_(pa.field("element", value, nullable=False), math.prod(self.leaf.shape))

    def to_arrow(self, tensor: Tensor) -> Any:
        """The Arrow array of a tensor `[n, *shape]`."""
        pa = import_pyarrow()
        flat = tensor.contiguous().reshape(-1)
        if self.kind == "bytes":
            raw = flat.view(torch.uint8).numpy()
            return pa.FixedSizeBinaryArray.from_buffers(self.arrow_type(), len(tensor), [None, pa.py_buffer(raw)])
        values = pa.array(flat.numpy())
        return values if self.kind == "value" else pa.FixedSizeListArray.from_arrays(values, type=self.arrow_type())

    def from_arrow(self, array: Any, rows: int) -> Tensor:
        """The reverse: a new tensor `[rows, *shape]`."""
        if self.kind == "none":
            return torch.zeros((rows, *self.leaf.shape), dtype=self.leaf.dtype, device="cpu")
        if self.kind == "bytes":
            size = self.leaf.nbytes
            pa = import_pyarrow()
            raw = pa.Array.from_buffers(pa.uint8(), rows * size, [None, array.buffers()[1]], offset=array.offset * size)
            return values_of(raw).view(self.leaf.dtype).reshape(rows, *self.leaf.shape)
        values = values_of(array if self.kind == "value" else array.flatten())
        return values.reshape(rows, *self.leaf.shape)


def columns_of(layout: RowLayout) -> list[ParquetColumn]:
    """The columns of a layout: names are keys joined by dots, and unique."""
    used = {TRAJECTORIES}
    columns = []
    for leaf in layout.leaves:
        name = base = ".".join(map(str, leaf.path)) or "value"
        if not is_utf8(name):
            raise ValueError(f"{pytree.format_key(leaf.path)} cannot be written in UTF-8; nothing was written")
        number = 1
        while name in used:
            number += 1
            name = f"{base}#{number}"
        used.add(name)
        columns.append(ParquetColumn(leaf, name, _kind(leaf)))
    return columns


def _kind(leaf: LeafSpec) -> str:
    size = math.prod(leaf.shape)
    if size == 0:
        return "none"
    if leaf.dtype in _RAW or size > _LONGEST_LIST:
        return "bytes"
    return "list" if leaf.shape else "value"


def schema_of(layout: RowLayout, columns: Sequence[ParquetColumn], numbered: bool) -> Any:
    """The Arrow schema, with a description of the columns in its metadata."""
    pa = import_pyarrow()
    stored = [c for c in columns if c.kind != "none"]
    fields = [pa.field(c.name, c.arrow_type(), nullable=False) for c in stored]
    if numbered:
        fields.append(pa.field(TRAJECTORIES, pa.int64(), nullable=False))
    description = {
        "format": FORMAT,
        "version": VERSION,
        "layout": layout.to_json(),
        "columns": [{"name": c.name, "stored": c.kind} for c in columns],
    }
    return pa.schema(fields, metadata={METADATA: json.dumps(description)})


def described_columns(schema: Any) -> tuple[RowLayout, list[ParquetColumn]] | None:
    """Layout and columns from the metadata of a schema; None: engram did not write the file.

    Raises:
        ValueError: the metadata are damaged, or do not fit the columns.
    """
    text = (schema.metadata or {}).get(METADATA)
    if text is None:
        return None
    if len(text) > _MAX_METADATA_BYTES:
        raise ValueError(f"has metadata of more than {_MAX_METADATA_BYTES} bytes")
    try:
        saved = json.loads(text)
        if saved["format"] != FORMAT or saved["version"] != VERSION:
            raise ValueError(
                f"is {saved['format']!r}, version {saved['version']!r}; engram reads {FORMAT!r}, {VERSION}"
            )
        layout = RowLayout.from_json(saved["layout"])
        columns = [
            ParquetColumn(x, c["name"], c["stored"]) for x, c in zip(layout.leaves, saved["columns"], strict=True)
        ]
        _check_structure(layout.root, len(layout.leaves))
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"has metadata that do not describe steps ({error!r})") from error
    if columns != columns_of(layout):
        raise ValueError("has metadata whose columns are not those of its layout")
    for column in columns:
        if column.kind == "none":
            continue
        at = schema.get_all_field_indices(column.name)
        if len(at) != 1 or not _same_type(schema.field(at[0]).type, column.arrow_type()):
            types = [str(schema.field(i).type) for i in at]
            raise ValueError(f"has the column {column.name!r} as {types}, but as {column.arrow_type()} in its metadata")
    return layout, columns


def _same_type(actual: Any, expected: Any) -> bool:
    pa = import_pyarrow()
    if pa.types.is_fixed_size_list(expected):
        return bool(
            pa.types.is_fixed_size_list(actual)
            and actual.list_size == expected.list_size
            and actual.value_type == expected.value_type
        )
    return bool(actual == expected)


def _check_structure(root: TreeSpec, leaves: int) -> None:
    """ValueError unless each leaf stands in the tree once."""
    indices: list[int] = []

    def visit(node: TreeSpec) -> None:
        if node.kind == "leaf":
            indices.append(node.leaf)
        for child in node.children:
            visit(child)

    visit(root)
    if sorted(indices) != list(range(leaves)):
        raise ValueError("has metadata whose tree does not fit their leaves")


# ---- files that engram did not write ----
def foreign_columns(schema: Any, chosen: Sequence[str] | None) -> list[tuple[KeyPath, str]]:
    """Keys and names of the columns: dots in a name make nested keys.

    Raises:
        ValueError: a column holds no numbers, or two become one key.
    """
    names = list(schema.names) if chosen is None else list(chosen)
    missing = [name for name in names if name not in schema.names]
    if missing:
        raise ValueError(f"has no column {missing[0]!r}; it has {schema.names}")
    columns: list[tuple[KeyPath, str]] = []
    for name in names:
        path: KeyPath = tuple(name.split("."))
        for other, other_name in columns:
            if other[: len(path)] == path or path[: len(other)] == other:
                raise ValueError(
                    f"has the columns {other_name!r} and {name!r}, which would be one key; choose columns="
                )
        if not _has_numbers(schema.field(name).type):
            raise ValueError(
                f"has {name!r} as {schema.field(name).type}; engram reads numbers, bools and lists of them: choose "
                "columns="
            )
        columns.append((path, name))
    if not columns:
        raise ValueError("has no columns")
    return columns


def _has_numbers(kind: Any) -> bool:
    types = import_pyarrow().types
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or _is_extension(kind):
        kind = kind.storage_type if _is_extension(kind) else kind.value_type
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_extension(kind: Any) -> bool:
    """Whether a type is an extension that this process knows; of others, Arrow gives the type that is stored."""
    return isinstance(kind, import_pyarrow().BaseExtensionType)


def tensor_of(array: Any, name: str) -> Tensor:
    """A new tensor `[n, ...]` of a column; lists become dimensions.

    Raises:
        ValueError: values are missing, or lists differ in length.
    """
    pa = import_pyarrow()
    types = pa.types
    shape = [len(array)]
    while True:
        if array.null_count:
            raise ValueError(f"has no value in {array.null_count} places of {name!r}")
        kind = array.type
        if isinstance(kind, pa.FixedShapeTensorType):
            if kind.permutation is not None and list(kind.permutation) != sorted(kind.permutation):
                raise ValueError(f"has {name!r} as {kind}, whose dimensions are permuted; write them in their order")
            shape.extend(kind.shape)
            array = array.storage
        elif _is_extension(kind):
            array = array.storage
            continue
        elif types.is_fixed_size_list(kind):
            shape.append(kind.list_size)
        elif types.is_list(kind) or types.is_large_list(kind):
            shape.append(_list_length(array, name))
        else:
            break
        array = array.flatten()
    return values_of(array).reshape(shape)


def _list_length(array: Any, name: str) -> int:
    """The length that all lists of a column have."""
    lengths = np.unique(array.value_lengths().to_numpy(zero_copy_only=False))
    if len(lengths) > 1:
        raise ValueError(
            f"has lists of {lengths[0]} to {lengths[-1]} values in {name!r}; all lists of a column must have one length"
        )
    return int(lengths[0]) if len(lengths) else 0


def values_of(array: Any) -> Tensor:
    """The numbers of an Arrow array that has no other user: a tensor in its memory, without a copy."""
    if import_pyarrow().types.is_boolean(array.type):  # bits
        return torch.from_numpy(array.to_numpy(zero_copy_only=False))
    tensor: Tensor = from_dlpack(array)
    return tensor


# ---- the checksum of the footer ----
_MAGIC = b"PAR1"
_CHECKSUM_MARK = b"ENGRAM-FOOTER-01"
_DIGEST_BYTES = 16


def add_footer_checksum(path: Path) -> None:
    """Inserts the checksum of the footer before the footer."""
    with open(open_regular(path, os.O_RDWR), "r+b") as file:
        at, end = _footer(file)
        file.seek(at)
        file.write(_CHECKSUM_MARK + xxhash.xxh3_128_digest(end) + end)


def check_footer(file: BinaryIO) -> bool:
    """Whether the footer has a checksum, as engram writes one; ValueError where it is wrong, or there is no footer."""
    at, end = _footer(file)
    size = len(_CHECKSUM_MARK) + _DIGEST_BYTES
    file.seek(max(0, at - size))
    checksum = file.read(size)
    has_checksum = checksum.startswith(_CHECKSUM_MARK)
    if has_checksum and checksum[len(_CHECKSUM_MARK) :] != xxhash.xxh3_128_digest(end):
        raise ValueError("its footer is damaged: its checksum does not match")
    return has_checksum


def _footer(file: BinaryIO) -> tuple[int, bytes]:
    """The offset of the footer, and all bytes from there on."""
    size = file.seek(0, 2)
    file.seek(max(0, size - 8))
    last = file.read(8)
    at = size - 8 - int.from_bytes(last[:4], "little")
    if last[4:] != _MAGIC or at < len(_MAGIC):
        raise ValueError("it has no footer, or one that begins outside the file")
    file.seek(at)
    return at, file.read()


_FAILURES = (
    OSError, ValueError, KeyError, IndexError, TypeError, RuntimeError, MemoryError, RecursionError,
    NotImplementedError,
)  # fmt: skip


def read_parquet(
    path: str | os.PathLike[str],
    buffer: Any,
    *,
    columns: Sequence[str] | None = None,
    new_ids: bool = False,
    progress: bool = True,
    max_row_bytes: int | str = MAX_ROW_BYTES,
) -> int:
    """Reads the rows of a Parquet file into a buffer; returns their number.

    Rows are those of `iter_parquet`. They are written in blocks of about 16 MB: where one is refused, those before it
    stay, and nothing of it is written.

    Args:
        path: the file.
        buffer: a buffer whose storage has ndim=1.
        columns: names of the columns to read, of a file that engram did not write.
        new_ids: number the trajectories from above the buffer's own ids instead of keeping the file's ids.
        progress: show a progress bar, if standard error is a terminal.
        max_row_bytes: the most that a row may take while it is decoded, and a page while it is decompressed: bytes, or
            "2GB". A small file may claim a row of any size.

    Raises:
        DatasetError: the file is damaged, a row is too large, or a column holds values that no tensor can; the message
            names file and column, `rows_read` is the number of steps that were written to the buffer.
        ValueError: the file begins with the trajectory id that the buffer ends with: two trajectories would become one.
        ImportError: pyarrow is missing: `pip install "engram[parquet]"`.

    Example:
        >>> import tempfile
        >>> file = tempfile.mkdtemp() + "/steps.parquet"
        >>> follows = {"observation": torch.ones(2, 4), "reward": torch.ones(2, 1), "done": torch.ones(2, 1).bool()}
        >>> steps = TensorDict({"observation": torch.ones(2, 4), "action": torch.ones(2), "next": follows}, [2])
        >>> write_parquet(steps, file)
        2
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> read_parquet(file, rb), rb[:]["next", "done"].flatten().tolist()
        (2, [True, True])
    """
    check_buffer(buffer)
    with open_parquet(user_path(path), columns, max_row_bytes) as file:
        total = file.total
        first = next_trajectory(buffer.storage) if new_ids or file.hidden else None
        blocks = file.blocks(None, first)
        return ingest(_check_first_id(blocks, buffer.storage), buffer, user_path(path), total, progress)


def iter_parquet(
    path: str | os.PathLike[str],
    batch_size: int | None = None,
    *,
    columns: Sequence[str] | None = None,
    max_row_bytes: int | str = MAX_ROW_BYTES,
) -> Iterator[Any]:
    """The rows of a Parquet file in batches `[n]` of `batch_size` rows (None: of about 16 MB).

    Those of a file that engram wrote are what was stored, bit by bit and with the same structure. Where neither flags
    nor ids mark where trajectories end (rows of several environments or writers), `("collector", "traj_ids")` is added.
    Of other files each column is a key; dots in its name make nested keys (`next.reward`), lists become dimensions.

    Raises:
        DatasetError, ImportError: as `read_parquet`.

    Example:
        >>> import tempfile
        >>> file = tempfile.mkdtemp() + "/steps.parquet"
        >>> follows = {"observation": torch.ones(2, 4), "reward": torch.ones(2, 1), "done": torch.ones(2, 1).bool()}
        >>> steps = TensorDict({"observation": torch.ones(2, 4), "action": torch.ones(2), "next": follows}, [2])
        >>> write_parquet(steps, file)
        2
        >>> [len(batch) for batch in iter_parquet(file, 1)]
        [1, 1]
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    with open_parquet(user_path(path), columns, max_row_bytes) as file:
        yield from file.blocks(batch_size, 0 if file.hidden else None)


def parquet_size(path: str | os.PathLike[str]) -> DatasetSize:
    """Rows of a Parquet file, from its footer; errors as `read_parquet`."""
    with open_parquet(user_path(path), None, MAX_ROW_BYTES) as file:
        return DatasetSize(file.total, None)


def write_parquet(
    source: Any,
    path: str | os.PathLike[str],
    *,
    compression: str = "zstd",
    exclude: Sequence[Key] = (),
    end_key: Key = DONE,
    traj_key: Key | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> int:
    """Writes steps as a Parquet file; returns their number.

    The file appears whole or not at all. Every key is a column: numbers as they are, short vectors as lists of fixed
    size, images and dtypes that Parquet does not have as bytes of fixed size; the schema's metadata describe
    them. Stored rows are written as they are, oldest first, lane by lane and environment by environment (transforms are
    not applied), while writers of this process wait. The column `engram.trajectory` numbers trajectories.

    Args:
        source: a buffer or storage; a TensorDict `[time]` or `[envs, time]`, or an iterable of such, as a collector. Of
            an iterable, trajectories are kept in memory until they end.
        path: the file to create.
        compression: `"zstd"`, `"snappy"`, `"lz4"`, `"gzip"` or `"none"`.
        exclude: keys to leave out.
        end_key, traj_key: what ends a trajectory, as for `SliceSampler`.
        overwrite: replace the file at `path`, if engram wrote it.
        progress: show a progress bar, if standard error is a terminal.

    Raises:
        ValueError: nothing to write.
        FileExistsError: there is something at `path`.
        ImportError: pyarrow is missing: `pip install "engram[parquet]"`.

    Example:
        >>> import tempfile
        >>> file = tempfile.mkdtemp() + "/steps.parquet"
        >>> follows = {"observation": torch.ones(2, 4), "reward": torch.ones(2, 1), "done": torch.ones(2, 1).bool()}
        >>> steps = TensorDict({"observation": torch.ones(2, 4), "action": torch.ones(2), "next": follows}, [2])
        >>> write_parquet(steps, file)
        2
        >>> import pyarrow.parquet
        >>> pyarrow.parquet.read_schema(file).names
        ['observation', 'action', 'next.observation', 'next.reward', 'next.done', 'engram.trajectory']
    """
    if compression not in ("zstd", "snappy", "lz4", "gzip", "none"):
        raise ValueError(f"compression is 'zstd', 'snappy', 'lz4', 'gzip' or 'none', got {compression!r}")
    import_pyarrow()
    steps = episode_source(source, end_key, traj_key, exclude)
    with (
        new_file(user_path(path), overwrite, replaceable_file("a Parquet file of engram's", _is_ours)) as new,
        progress_bar(f"writing {path}", steps.total, progress) as advance,
    ):
        writer = _ParquetWriter(new, compression)
        try:
            for block in steps.blocks():
                advance(writer.write(block))
            rows = writer.finish()
        finally:
            writer.close()
        add_footer_checksum(new)
    return rows


def _is_ours(file: BinaryIO) -> bool:
    """Whether `write_parquet` wrote a file; other programs copy its metadata into files of theirs, not the checksum."""
    try:
        if not check_footer(file):
            return False
        with import_pyarrow().parquet.ParquetFile(path_of(file)) as opened:
            return METADATA in (opened.schema_arrow.metadata or {})
    except _FAILURES:
        return False


class _ParquetWriter:
    """Writes blocks of steps, about one row group for each."""

    def __init__(self, path: Path, compression: str) -> None:
        self._path, self._compression = path, compression
        self._file: Any = None
        self._layout: RowLayout | None = None
        self._columns: list[ParquetColumn] = []
        self._held: list[Any] = []
        self._held_bytes = 0
        self._rows = 0
        self._numbered = False
        self._trajectories = 0
        self._hidden = False
        self._last: Marks | None = None  # of the last block

    def write(self, block: StepBlock) -> int:
        """Takes steps; how many."""
        if self._layout is None:
            self._begin(block)
        assert self._layout is not None
        if (block.parts is not None) != self._numbered:
            raise ValueError("some of the steps have done flags or trajectory ids, others do not")
        tensors = self._layout.fitting(block.rows, 1)
        arrays = [c.to_arrow(t) for c, t in zip(self._columns, tensors, strict=True) if c.kind != "none"]
        if block.parts is not None:
            arrays.append(import_pyarrow().array(self._trajectory_numbers(block.parts)))
            self._note_unmarked_ends(block)
        table = import_pyarrow().table(arrays, schema=self._file.schema)
        self._rows += table.num_rows
        self._held.append(table)
        self._held_bytes += table.num_rows * self._layout.payload_bytes
        if self._held_bytes >= BLOCK_BYTES:
            self._flush()
        return int(table.num_rows)

    def _begin(self, block: StepBlock) -> None:
        """Creates the file, with columns as the first block has them."""
        self._layout = RowLayout.of(block.rows, 1)
        self._columns = columns_of(self._layout)
        self._numbered = block.parts is not None
        if not self._numbered and all(c.kind == "none" for c in self._columns):
            raise ValueError("there is nothing to write: the steps have no bytes")
        # No dictionaries, which ask whether floats are equal, and no statistics: neither is worth its time here.
        self._file = import_pyarrow().parquet.ParquetWriter(
            self._path,
            schema_of(self._layout, self._columns, self._numbered),
            compression=self._compression,
            use_dictionary=[TRAJECTORIES],
            write_statistics=[TRAJECTORIES],
            write_page_checksum=True,
        )

    def _trajectory_numbers(self, parts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The number of each step's trajectory."""
        first = self._trajectories - int(parts[0, 1] > 0)
        self._trajectories = first + len(parts)
        return np.repeat(np.arange(first, self._trajectories), parts[:, 0])

    def _note_unmarked_ends(self, block: StepBlock) -> None:
        """Sets `_hidden` where a trajectory ends with neither a flag nor a new id."""
        assert block.parts is not None
        n = int(block.parts[:, 0].sum())
        marks = Marks.of(block.rows, n)
        if self._last is not None and block.parts[0, 1] == 0:
            self._hidden |= not marks.follow(self._last)
        self._hidden |= not bool(marks.end_before(np.cumsum(block.parts[:-1, 0])).all())
        self._last = marks

    def _flush(self) -> None:
        table = import_pyarrow().concat_tables(self._held)
        self._file.write_table(table, row_group_size=max(1, table.num_rows))
        self._held, self._held_bytes = [], 0

    def finish(self) -> int:
        """Writes the last row group; returns the number of steps in the file."""
        if self._held:
            self._flush()
        self._file.add_key_value_metadata({HIDDEN: json.dumps({"hidden": self._hidden})})
        return self._rows

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@contextmanager
def _failures(path: Path) -> Iterator[None]:
    """Turns what pyarrow raises for a damaged file, and ValueErrors of the checks, into a DatasetError."""
    try:
        yield
    except DatasetError:
        raise
    except _FAILURES as error:
        raise DatasetError(str(path), f"{error}" if str(error)[:3] == "has" else f"cannot be read ({error})") from error


def _check_sizes(file: Any, size: int) -> None:
    """ValueError unless all columns lie inside a file of `size` bytes."""
    for group in range(file.metadata.num_row_groups):
        row_group = file.metadata.row_group(group)
        for i in range(row_group.num_columns):
            column = row_group.column(i)
            start = first_page(column)
            stop = start + column.total_compressed_size
            if start < 0 or column.total_compressed_size < 0 or stop > size + (1 << 16):
                raise ValueError(f"row group {group}, column {column.path_in_schema!r}, lies outside the file")


class ParquetReader:
    """Reads an open file; DatasetError where it is damaged."""

    def __init__(self, path: Path, file: Any, pages: BinaryIO, columns: Sequence[str] | None, allowed: int) -> None:
        self._path, self._file = path, file
        with _failures(self._path):
            _check_sizes(file, os.fstat(pages.fileno()).st_size)
            schema = file.schema_arrow
            described = described_columns(schema)
            self._layout: RowLayout | None = None if described is None else described[0]
            self._columns: list[ParquetColumn] = [] if described is None else described[1]
            if described is not None and columns is not None:
                raise ValueError("was written by engram and is read whole; columns= is for other files")
            self._foreign = foreign_columns(schema, columns) if described is None else []
            self._numbered = described is not None and TRAJECTORIES in schema.names
            hidden = (file.metadata.metadata or {}).get(HIDDEN, b"{}")
            self.hidden = self._numbered and bool(json.loads(hidden).get("hidden", False))
            self.total: int = file.metadata.num_rows
            self._row_bytes = decoded_row_bytes(pages, file.metadata, self._names(), allowed)

    def blocks(self, rows: int | None, first_id: int | None) -> Iterator[Any]:
        """All rows in batches; with `first_id`, trajectories are numbered from there on."""
        n = rows or self._block_rows()
        with _failures(self._path):
            check_batch(min(n, self.total), self._row_bytes)
        batches = self._file.iter_batches(batch_size=n, columns=self._names())
        left = self.total
        while True:
            with _failures(self._path):
                batch = next(batches, None)
                left -= 0 if batch is None else batch.num_rows
                if left < 0 or (batch is None and left):  # a damaged page may just have fewer rows
                    raise ValueError(f"has {self.total - left} rows or more, its footer says {self.total}")
                steps = None if batch is None else self._steps(batch, first_id)
            if steps is None:
                return
            yield steps

    def _names(self) -> list[str]:
        """Names of the columns that are read."""
        names = [c.name for c in self._columns if c.kind != "none"] or [name for _, name in self._foreign]
        return [*names, TRAJECTORIES] if self._numbered else names

    def _block_rows(self) -> int:
        if self._layout is not None:
            return block_rows(max(self._layout.payload_bytes, self._row_bytes))
        return min(1 << 16, block_rows(self._row_bytes))

    def _steps(self, batch: Any, first_id: int | None) -> Any:
        """The steps of an Arrow batch, as they were stored."""
        rows = batch.num_rows
        if self._layout is None:
            leaves = {path: tensor_of(batch.column(name), name) for path, name in self._foreign}
            return batch_of(leaves, rows)
        at = {name: i for i, name in enumerate(batch.schema.names)}
        absent = [name for name, i in at.items() if batch.column(i).null_count]
        if absent:
            raise ValueError(f"has no value in some places of {absent[0]!r}")
        tensors = [c.from_arrow(batch.column(at[c.name]) if c.kind != "none" else None, rows) for c in self._columns]
        steps = pytree.unflatten(self._layout.root, tensors, (rows,), None)
        if first_id is not None and self._numbered:
            ids = batch.column(at[TRAJECTORIES]).to_numpy(zero_copy_only=False) + first_id
            steps.set(TRAJECTORY, torch.from_numpy(ids))
        return steps


@contextmanager
def open_parquet(path: Path, columns: Sequence[str] | None, max_row_bytes: int | str) -> Iterator[ParquetReader]:
    """Opens a file: all of it, or these columns of one that engram did not write; errors as `read_parquet`."""
    allowed = parse_bytes(max_row_bytes, "max_row_bytes")
    with _arrow_file(path) as (pages, file):
        yield ParquetReader(path, file, pages, columns, allowed)


@contextmanager
def _arrow_file(path: Path, **options: Any) -> Iterator[tuple[BinaryIO, Any]]:
    """The bytes of a file, and the file as pyarrow opens it once its footer is checked."""
    parquet = import_pyarrow().parquet
    with open(open_regular(path, follow_links=True), "rb") as pages:
        try:
            check_footer(pages)
            file = parquet.ParquetFile(
                path_of(pages), pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True, **options
            )
        except _FAILURES as error:
            raise DatasetError(str(path), f"this is no Parquet file, or a damaged one ({error})") from error
        with file:
            yield pages, file


@contextmanager
def open_arrow(path: Path) -> Iterator[Any]:
    """Opens an Arrow IPC file, which is mapped: pyarrow's reader of its batches; DatasetError where it is damaged."""
    pa = import_pyarrow()
    with (
        open(open_regular(path, follow_links=True), "rb") as file,
        _failures(path),
        pa.memory_map(path_of(file)) as mapped,
        pa.ipc.open_file(mapped) as reader,
    ):
        yield reader


def arrow_children(kind: Any) -> list[Any]:
    """The fields of a struct; none of other types."""
    return list(kind) if import_pyarrow().types.is_struct(kind) else []


def is_fixed_list(kind: Any) -> bool:
    """Whether a type is a list of fixed size."""
    return bool(import_pyarrow().types.is_fixed_size_list(kind))


def has_fixed_numbers(kind: Any) -> bool:
    """Whether a type is a number or bool, or a list of fixed size of them."""
    if is_fixed_list(kind):
        kind = kind.value_type
    return not import_pyarrow().types.is_nested(kind) and _has_numbers(kind)


def has_texts(kind: Any) -> bool:
    """Whether a type is text."""
    types = import_pyarrow().types
    return bool(types.is_string(kind) or types.is_large_string(kind))


def arrow_bytes(kind: Any) -> int:
    """Bytes of one value of a type that `has_fixed_numbers`, as a tensor has them."""
    if is_fixed_list(kind):
        return int(kind.list_size) * arrow_bytes(kind.value_type)
    return -(-int(kind.bit_width) // 8)


def arrow_column(reader: Any, names: Sequence[str], kind: Any, path: Path) -> Any:
    """A column of all batches of an Arrow file, which is in the structs of these names.

    Raises:
        DatasetError: it is missing, or of another type than `kind`.
    """
    with _failures(path):
        array = reader.read_all().column(names[0]).combine_chunks()
        array.validate()
        for name in names[1:]:
            if array.null_count:
                raise ValueError(f"has no value in {array.null_count} places of {name!r}")
            array = array.field(name)
        if array.type != kind:
            raise ValueError(f"has {'.'.join(names)!r} as {array.type}; the first episode has {kind}")
        return array


def arrow_values(array: Any, path: Path) -> Array:
    """The numbers of a column, in memory of their own."""
    with _failures(path):
        return np.array(tensor_of(array, "a column").numpy())


def arrow_texts(array: Any, width: int, name: str, path: Path) -> Array:
    """The texts of a column as uint8 [n, width].

    Raises:
        DatasetError: a value is missing, is no UTF-8, or is longer.
    """
    with _failures(path):
        array.validate(full=True)
        if array.null_count:
            raise ValueError(f"has no value in {array.null_count} places of {name!r}")
        try:
            texts: Array = Text(width).encode(array.to_pylist()).numpy()
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from error
        return texts


def column_names(path: Path) -> list[str]:
    """The names of a Parquet file's columns; DatasetError where it is damaged."""
    with _arrow_file(path) as (_, file), _failures(path):
        return [str(name) for name in file.schema_arrow.names]


def read_texts(path: Path, number: str, texts: Sequence[str], allowed: int) -> dict[int, str]:
    """The texts of a file by their numbers: `number` is a column, the first of `texts` that is there another.

    Raises:
        DatasetError: the file is damaged, has no such columns, more than `allowed` bytes in them, or two texts of one
            number.
    """
    types = import_pyarrow().types
    with _arrow_file(path) as (_, file), _failures(path):
        names = file.schema_arrow.names
    text = next((name for name in texts if name in names), None)
    if text is None or number not in names:
        raise DatasetError(str(path), f"has no columns {number!r} and {texts[0]!r}; it has {names}")
    # As a dictionary, a text that many rows repeat is in memory once.
    with _arrow_file(path, read_dictionary=[text]) as (pages, file), _failures(path):
        _check_sizes(file, os.fstat(pages.fileno()).st_size)
        schema = file.schema_arrow
        kind = schema.field(text).type
        if not types.is_dictionary(kind) or not types.is_integer(schema.field(number).type):
            raise ValueError(
                f"has {number!r} as {schema.field(number).type} and {text!r} as {kind}, not number and text"
            )
        decoded_row_bytes(pages, file.metadata, (number, text), allowed)
        found: dict[int, str] = {}
        nbytes = 0
        for batch in file.iter_batches(batch_size=1024, columns=[number, text]):
            nbytes += batch.nbytes
            if nbytes > allowed:
                raise ValueError(f"has texts of {human_bytes(nbytes)} or more; {_limit(allowed)}")
            numbers, values = batch.column(number), batch.column(text)
            if numbers.null_count or values.null_count:
                raise ValueError(f"has no value in some places of {number!r} or {text!r}")
            words = values.dictionary.to_pylist()
            places = values.indices.to_pylist()
            for key, at in zip(numbers.to_pylist(), places, strict=True):
                if found.setdefault(key, words[at]) != words[at]:
                    raise ValueError(f"has two values of {text!r} for {number!r} {key}")
        return found


def _check_first_id(blocks: Iterator[Any], storage: Any) -> Iterator[Any]:
    """The blocks; ValueError where the first one would continue the last stored trajectory."""
    first = True
    for block in blocks:
        if first and len(storage):
            _check_ids(block, storage)
        first = False
        yield block


def _check_ids(block: Any, storage: Any) -> None:
    for path in IDS:
        ids = pytree.get_entry(block, path)
        if ids is None or storage.leaf(path) is None:
            continue
        with storage.mutex:
            cursor = storage.lanes.cursor
            last = storage.column(
                path, torch.tensor([(cursor - 1) % (storage.lanes.store.lane_capacity)], device="cpu")
            )
        if int(last.reshape(-1)[0]) == int(ids.reshape(-1)[0]):
            raise ValueError(
                f"the buffer ends with the trajectory {int(last.reshape(-1)[0])}, the file begins with one of the same "
                "id: the two would become one trajectory. Pass new_ids=True to number those of the file anew; nothing "
                "was read"
            )
        return


DATASET_FORMAT = DatasetFormat(
    kind="Parquet file",
    batches=iter_parquet,
    size=parquet_size,
    is_file=lambda place, start: start[:4] == b"PAR1",
    word="parquet",
    write=write_parquet,
    suffixes=(".parquet",),
    is_streamed=False,
)
