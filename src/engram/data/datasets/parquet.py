"""Leaves of steps as Parquet columns and back, bit by bit."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from engram import pytree
from engram.data.datasets.atomic_files import new_file
from engram.data.datasets.episodes import (
    BLOCK_BYTES,
    TRAJECTORY,
    Block,
    batch_of,
    block_rows,
    check_buffer,
    next_trajectory,
    progress_bar,
    source_of,
    take,
)
from engram.data.datasets.parquet_pages import check_batch, decoded_row_bytes, first_page
from engram.errors import DatasetError
from engram.pytree import Key, KeyPath, TreeSpec
from engram.store.episodes import DONE, IDS
from engram.store.layout import LeafSpec, RowLayout

Array = npt.NDArray[Any]

FORMAT, VERSION = "engram steps", 1
METADATA, HIDDEN = b"engram", b"engram.trajectories"
#: The column that numbers the trajectories of the file.
TRAJECTORIES = "engram.trajectory"
_LONGEST_LIST = 64  # values: longer ones are bytes, which are written and read ten times as fast
_MOST_METADATA = 16 << 20
_RAW = (torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


def library() -> Any:
    """pyarrow, with its Parquet part; an ImportError says how to get it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError('Parquet needs pyarrow: pip install "engram[parquet]"') from error
    return pyarrow


class Column(NamedTuple):
    """A leaf and the column that holds it; None: leaves without bytes have none."""

    leaf: LeafSpec
    name: str
    kind: str  # value, list or bytes; none

    def arrow_type(self) -> Any:
        pa = library()
        if self.kind == "bytes":
            return pa.binary(self.leaf.nbytes)
        value = pa.from_numpy_dtype(np.dtype(str(self.leaf.dtype).removeprefix("torch.")))
        if self.kind == "value":
            return value
        # Never null, and said so: each level that could be costs time and space.
        return pa.list_(pa.field("element", value, nullable=False), math.prod(self.leaf.shape))

    def to_arrow(self, tensor: Tensor) -> Any:
        """A column of `[n, *shape]`."""
        pa = library()
        flat = tensor.contiguous().reshape(-1)
        if self.kind == "bytes":
            raw = flat.view(torch.uint8).numpy()
            return pa.FixedSizeBinaryArray.from_buffers(self.arrow_type(), len(tensor), [None, pa.py_buffer(raw)])
        values = pa.array(flat.numpy())
        return values if self.kind == "value" else pa.FixedSizeListArray.from_arrays(values, type=self.arrow_type())

    def from_arrow(self, found: Any, rows: int) -> Tensor:
        """The reverse: a new tensor `[rows, *shape]`."""
        if self.kind == "none":
            return torch.zeros((rows, *self.leaf.shape), dtype=self.leaf.dtype)
        if self.kind == "bytes":
            size = self.leaf.nbytes
            raw = np.frombuffer(found.buffers()[1], np.uint8, rows * size, found.offset * size).copy()
            return torch.from_numpy(raw).view(self.leaf.dtype).reshape(rows, *self.leaf.shape)
        values = numpy_values(found if self.kind == "value" else found.flatten())
        return torch.from_numpy(values).reshape(rows, *self.leaf.shape)


def columns_of(layout: RowLayout) -> list[Column]:
    """How the leaves of a layout are stored: names are keys joined by dots, each of them once."""
    taken = {TRAJECTORIES}
    columns = []
    for leaf in layout.leaves:
        name = base = ".".join(map(str, leaf.path)) or "value"
        number = 1
        while name in taken:
            number += 1
            name = f"{base}#{number}"
        taken.add(name)
        columns.append(Column(leaf, name, _kind(leaf)))
    return columns


def _kind(leaf: LeafSpec) -> str:
    size = math.prod(leaf.shape)
    if size == 0:
        return "none"
    if leaf.dtype in _RAW or size > _LONGEST_LIST:
        return "bytes"
    return "list" if leaf.shape else "value"


def schema_of(layout: RowLayout, columns: Sequence[Column], numbered: bool) -> Any:
    """The Arrow schema, which says in its metadata what the columns are."""
    pa = library()
    stored = [c for c in columns if c.kind != "none"]
    fields = [pa.field(c.name, c.arrow_type(), nullable=False) for c in stored]
    if numbered:
        fields.append(pa.field(TRAJECTORIES, pa.int64(), nullable=False))
    described = {
        "format": FORMAT,
        "version": VERSION,
        "layout": layout.to_json(),
        "columns": [{"name": c.name, "stored": c.kind} for c in columns],
    }
    return pa.schema(fields, metadata={METADATA: json.dumps(described)})


def described_columns(schema: Any) -> tuple[RowLayout, list[Column]] | None:
    """What the metadata of a schema say; None: engram did not write the file.

    Raises:
        ValueError: the metadata are damaged, or do not fit the columns.
    """
    text = (schema.metadata or {}).get(METADATA)
    if text is None:
        return None
    if len(text) > _MOST_METADATA:
        raise ValueError(f"has metadata of more than {_MOST_METADATA} bytes")
    try:
        made = json.loads(text)
        if made["format"] != FORMAT or made["version"] != VERSION:
            raise ValueError(f"is {made['format']!r}, version {made['version']!r}; this is for {FORMAT!r}, {VERSION}")
        layout = RowLayout.from_json(made["layout"])
        columns = [Column(x, c["name"], c["stored"]) for x, c in zip(layout.leaves, made["columns"], strict=True)]
        _check_form(layout.root, len(layout.leaves))
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"has metadata that are no description of steps ({error!r})") from error
    wanted = columns_of(layout)
    if columns != wanted:
        raise ValueError("has metadata whose columns are not those of its layout")
    for column in columns:
        if column.kind == "none":
            continue
        at = schema.get_all_field_indices(column.name)
        if len(at) != 1 or not _same_type(schema.field(at[0]).type, column.arrow_type()):
            found = [str(schema.field(i).type) for i in at]
            raise ValueError(f"has the column {column.name!r} as {found}, its metadata ask for {column.arrow_type()}")
    return layout, columns


def _same_type(found: Any, wanted: Any) -> bool:
    pa = library()
    if pa.types.is_fixed_size_list(wanted):
        return bool(
            pa.types.is_fixed_size_list(found)
            and found.list_size == wanted.list_size
            and found.value_type == wanted.value_type
        )
    return bool(found == wanted)


def _check_form(root: TreeSpec, leaves: int) -> None:
    """Each leaf stands in the form once."""
    found: list[int] = []

    def visit(node: TreeSpec) -> None:
        if node.kind == "leaf":
            found.append(node.leaf)
        if node.kind in ("td", "dict") and (
            len(node.keys) != len(node.children) or not all(isinstance(k, str) for k in node.keys)
        ):
            raise ValueError("has metadata whose keys do not fit")
        for child in node.children:
            visit(child)

    visit(root)
    if sorted(found) != list(range(leaves)):
        raise ValueError("has metadata whose form does not fit their leaves")


# ---- files by others ----
def guessed_columns(schema: Any, chosen: Sequence[str] | None) -> list[tuple[KeyPath, str]]:
    """Keys and names of the columns of any file: dots in a name are nested keys.

    Raises:
        ValueError: a column has no numbers, or two are one key.
    """
    names = list(schema.names) if chosen is None else list(chosen)
    missing = [name for name in names if name not in schema.names]
    if missing:
        raise ValueError(f"has no column {missing[0]!r}; it has {schema.names}")
    found: list[tuple[KeyPath, str]] = []
    for name in names:
        path: KeyPath = tuple(name.split("."))
        for other, other_name in found:
            if other[: len(path)] == path or path[: len(other)] == other:
                raise ValueError(
                    f"has the columns {other_name!r} and {name!r}, which would be one key; choose columns="
                )
        if not _has_numbers(schema.field(name).type):
            raise ValueError(
                f"has {name!r} as {schema.field(name).type}; engram reads numbers, bools and lists of them: choose "
                "columns="
            )
        found.append((path, name))
    if not found:
        raise ValueError("has no columns")
    return found


def _has_numbers(kind: Any) -> bool:
    types = library().types
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def tensor_of(found: Any, name: str) -> Tensor:
    """Any column as a new tensor `[n, ...]`; lists become dimensions.

    Raises:
        ValueError: values are missing, or lists differ in length.
    """
    types = library().types
    shape = [len(found)]
    while True:
        if found.null_count:
            raise ValueError(f"has no value in {found.null_count} places of {name!r}")
        kind = found.type
        if types.is_fixed_size_list(kind):
            shape.append(kind.list_size)
        elif types.is_list(kind) or types.is_large_list(kind):
            shape.append(_one_length(found, name))
        else:
            break
        found = found.flatten()
    return torch.from_numpy(numpy_values(found)).reshape(shape)


def _one_length(found: Any, name: str) -> int:
    lengths = np.unique(found.value_lengths().to_numpy(zero_copy_only=False))
    if len(lengths) > 1:
        raise ValueError(
            f"has lists of {lengths[0]} to {lengths[-1]} values in {name!r}; all of a column have one length"
        )
    return int(lengths[0]) if len(lengths) else 0


def numpy_values(found: Any) -> Array:
    """An Arrow array of numbers as a new numpy array."""
    values: Array = found.to_numpy(zero_copy_only=False)
    return values if values.flags.writeable and values.flags.owndata else values.copy()


_MAGIC = b"PAR1"
_SEAL = b"ENGRAM-FOOTER-01"
_DIGEST_BYTES = 16


def seal(path: Path) -> None:
    """Puts the footer's hash before it."""
    with open(path, "r+b") as file:
        at, end = _footer(file)
        file.seek(at)
        file.write(_SEAL + xxhash.xxh3_128_digest(end) + end)


def check(path: Path) -> None:
    """ValueError where the file has no footer, or has one that is sealed and not what it was."""
    with open(path, "rb") as file:
        at, end = _footer(file)
        size = len(_SEAL) + _DIGEST_BYTES
        file.seek(max(0, at - size))
        sealed = file.read(size)
    if sealed.startswith(_SEAL) and sealed[len(_SEAL) :] != xxhash.xxh3_128_digest(end):
        raise ValueError("its footer is not the one that was written")


def _footer(file: BinaryIO) -> tuple[int, bytes]:
    """Where the footer begins, and all bytes from there on."""
    size = file.seek(0, 2)
    file.seek(max(0, size - 8))
    last = file.read(8)
    at = size - 8 - int.from_bytes(last[:4], "little")
    if last[4:] != _MAGIC or at < len(_MAGIC):
        raise ValueError("it has no footer that lies in it")
    file.seek(at)
    return at, file.read()


_FAILURES = (OSError, ValueError, KeyError, TypeError, RuntimeError, MemoryError, RecursionError, NotImplementedError)


def read_parquet(
    path: str | os.PathLike[str],
    buffer: Any,
    *,
    columns: Sequence[str] | None = None,
    new_ids: bool = False,
    progress: bool = True,
) -> int:
    """Takes the rows of a Parquet file into a buffer; returns their number.

    Rows are those of `iter_parquet`. They are written in blocks of about 16 MB: where one is refused, those before it
    stay, and it leaves nothing behind.

    Args:
        path: the file.
        buffer: with a storage of ndim=1.
        columns: names of the columns to read, of a file that engram did not write.
        new_ids: number the trajectories on from the buffer's own instead of keeping the file's ids.
        progress: show a bar, if there is a terminal.

    Raises:
        DatasetError: the file is damaged, or a column holds what no tensor does; the message names file and column,
            `rows_read` says how many steps were taken in.
        ValueError: the file begins with the trajectory id that the buffer ends with: two trajectories would become one.
        ImportError: pyarrow is missing: `pip install "engram[parquet]"`.
    """
    check_buffer(buffer)
    with _opened(Path(path), columns) as file:
        total = file.total
        first = next_trajectory(buffer.storage) if new_ids or file.hidden else None
        blocks = file.blocks(None, first)
        return take(_apart(blocks, buffer.storage), buffer, Path(path), total, progress)


def iter_parquet(
    path: str | os.PathLike[str], batch_size: int | None = None, *, columns: Sequence[str] | None = None
) -> Iterator[Any]:
    """The rows of a Parquet file in batches `[n]` of `batch_size` rows (None: of about 16 MB).

    Of a file that engram wrote they are what was stored, bit by bit and in the form it had. Where that says nothing of
    the end of a trajectory (rows of several environments or writers, without ids), `("collector", "traj_ids")` does.
    Of other files each column is a key; dots in its name make nested ones (`next.reward`), lists become dimensions.

    Raises:
        DatasetError, ImportError: as `read_parquet`.
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    with _opened(Path(path), columns) as file:
        yield from file.blocks(batch_size, 0 if file.hidden else None)


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
    size, images and dtypes that Parquet has not as bytes of fixed size; the schema's metadata say which. Stored rows
    are written as they are, oldest first, lane by lane and environment by environment (transforms are not applied),
    while writers of this process wait. The column `engram.trajectory` numbers trajectories.

    Args:
        source: a buffer or storage; a TensorDict `[time]` or `[envs, time]`, or an iterable of such, as a collector. Of
            an iterable, trajectories are kept in memory until they end.
        path: the file to make.
        compression: `"zstd"`, `"snappy"`, `"lz4"`, `"gzip"` or `"none"`.
        exclude: keys to leave out.
        end_key, traj_key: what ends a trajectory, as for `SliceSampler`.
        overwrite: replace the file at `path`.
        progress: show a bar, if there is a terminal.

    Raises:
        ValueError: nothing to write.
        FileExistsError: there is something at `path`.
        ImportError: pyarrow is missing: `pip install "engram[parquet]"`.
    """
    if compression not in ("zstd", "snappy", "lz4", "gzip", "none"):
        raise ValueError(f"compression is 'zstd', 'snappy', 'lz4', 'gzip' or 'none', got {compression!r}")
    library()
    found = source_of(source, end_key, traj_key, exclude)
    with (
        new_file(Path(path), overwrite) as made,
        progress_bar(f"writing {path}", found.total, progress) as advance,
    ):
        writer = _Writer(made, compression)
        try:
            for block in found.blocks():
                writer.write(block)
                advance(len(block.rows))
            rows = writer.finish()
        finally:
            writer.close()
        seal(made)
    return rows


class _Writer:
    """Steps on their way into a file, a row group for about each block."""

    def __init__(self, path: Path, compression: str) -> None:
        self._path, self._compression = path, compression
        self._file: Any = None
        self._layout: RowLayout | None = None
        self._columns: list[Column] = []
        self._held: list[Any] = []
        self._held_bytes = 0
        self._rows = 0
        self._numbered = False
        self._numbers = 0
        self._hidden = False
        self._last: tuple[Any, bool] | None = None  # the last step's id, and whether it has a flag

    def write(self, block: Block) -> None:
        if self._layout is None:
            self._begin(block)
        assert self._layout is not None
        if (block.parts is not None) != self._numbered:
            raise ValueError("some of the steps have done flags or trajectory ids, others have not")
        tensors = self._layout.fitting(block.rows, 1)
        arrays = [c.to_arrow(t) for c, t in zip(self._columns, tensors, strict=True) if c.kind != "none"]
        if block.parts is not None:
            arrays.append(library().array(self._number(block.parts)))
            self._look(block)
        table = library().table(arrays, schema=self._file.schema)
        self._rows += table.num_rows
        self._held.append(table)
        self._held_bytes += table.num_rows * self._layout.payload_bytes
        if self._held_bytes >= BLOCK_BYTES:
            self._flush()

    def _begin(self, block: Block) -> None:
        self._layout = RowLayout.of(block.rows, 1)
        self._columns = columns_of(self._layout)
        self._numbered = block.parts is not None
        if not self._numbered and all(c.kind == "none" for c in self._columns):
            raise ValueError("there is nothing to write: the steps have no bytes")
        # No dictionaries, which ask whether floats are equal, and no statistics: neither is worth its time here.
        self._file = library().parquet.ParquetWriter(
            self._path,
            schema_of(self._layout, self._columns, self._numbered),
            compression=self._compression,
            use_dictionary=[TRAJECTORIES],
            write_statistics=[TRAJECTORIES],
            write_page_checksum=True,
        )

    def _number(self, parts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The number of each step's trajectory."""
        first = self._numbers - int(parts[0, 1] > 0)
        self._numbers = first + len(parts)
        return np.repeat(np.arange(first, self._numbers), parts[:, 0])

    def _look(self, block: Block) -> None:
        """Whether some trajectory ends without a flag or a new id that says so."""
        assert block.parts is not None
        n = int(block.parts[:, 0].sum())
        ids = next((x for x in (pytree.get_entry(block.rows, p) for p in IDS) if x is not None), None)
        done = pytree.get_entry(block.rows, DONE)
        ids = None if ids is None or ids.numel() != n else ids.detach().cpu().reshape(n).numpy()
        done = np.zeros(n, bool) if done is None or done.numel() != n else done.detach().cpu().reshape(n).numpy() != 0
        if self._last is not None and block.parts[0, 1] == 0:
            before, flagged = self._last
            self._hidden |= not (flagged if ids is None else before != ids[0])
        begins = np.cumsum(block.parts[:-1, 0])
        shown = done[begins - 1] if ids is None else ids[begins] != ids[begins - 1]
        self._hidden |= not bool(shown.all())
        self._last = (None if ids is None else ids[-1], bool(done[-1]))

    def _flush(self) -> None:
        table = library().concat_tables(self._held)
        self._file.write_table(table, row_group_size=max(1, table.num_rows))
        self._held, self._held_bytes = [], 0

    def finish(self) -> int:
        """Writes what is held; returns how many steps there are."""
        if self._held:
            self._flush()
        self._file.add_key_value_metadata({HIDDEN: json.dumps({"hidden": self._hidden})})
        return self._rows

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _File:
    """An open file. DatasetError where it is not what it should be."""

    def __init__(self, path: Path, file: Any, columns: Sequence[str] | None) -> None:
        self._path, self._file = path, file
        with self._failures():
            self._check_sizes()
            schema = file.schema_arrow
            described = described_columns(schema)
            self._layout: RowLayout | None = None if described is None else described[0]
            self._columns: list[Column] = [] if described is None else described[1]
            if described is not None and columns is not None:
                raise ValueError("was written by engram and is read whole; columns= is for other files")
            self._guessed = guessed_columns(schema, columns) if described is None else []
            self._numbered = described is not None and TRAJECTORIES in schema.names
            hidden = (file.metadata.metadata or {}).get(HIDDEN, b"{}")
            self.hidden = self._numbered and bool(json.loads(hidden).get("hidden", False))
            self.total: int = file.metadata.num_rows
            with open(path, "rb") as pages:
                self._row_bytes = decoded_row_bytes(pages, file.metadata, self._names())

    def _check_sizes(self) -> None:
        """Columns lie inside the file."""
        size, metadata = self._path.stat().st_size, self._file.metadata
        for group in range(metadata.num_row_groups):
            found = metadata.row_group(group)
            for i in range(found.num_columns):
                column = found.column(i)
                start = first_page(column)
                stop = start + column.total_compressed_size
                if start < 0 or column.total_compressed_size < 0 or stop > size + (1 << 16):
                    raise ValueError(f"row group {group}, column {column.path_in_schema!r}, lies outside the file")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except DatasetError:
            raise
        except _FAILURES as error:
            raise DatasetError(
                str(self._path), f"{error}" if str(error)[:3] == "has" else f"cannot be read ({error})"
            ) from error

    def blocks(self, rows: int | None, first_id: int | None) -> Iterator[Any]:
        """Batches; with `first_id`, trajectories are numbered from there on."""
        n = rows or self._block_rows()
        with self._failures():
            check_batch(min(n, self.total), self._row_bytes)
        batches = self._file.iter_batches(batch_size=n, columns=self._names())
        left = self.total
        while True:
            with self._failures():
                batch = next(batches, None)
                left -= 0 if batch is None else batch.num_rows
                if left < 0 or (batch is None and left):  # a damaged page may just have fewer rows
                    raise ValueError(f"has {self.total - left} rows or more, its footer says {self.total}")
                made = None if batch is None else self._made(batch, first_id)
            if made is None:
                return
            yield made

    def _names(self) -> list[str]:
        """The columns that are read."""
        names = [c.name for c in self._columns if c.kind != "none"] or [name for _, name in self._guessed]
        return [*names, TRAJECTORIES] if self._numbered else names

    def _block_rows(self) -> int:
        if self._layout is not None:
            return block_rows(max(self._layout.payload_bytes, self._row_bytes))
        return min(1 << 16, block_rows(self._row_bytes))

    def _made(self, batch: Any, first_id: int | None) -> Any:
        rows = batch.num_rows
        if self._layout is None:
            leaves = {path: tensor_of(batch.column(name), name) for path, name in self._guessed}
            return batch_of(leaves, rows)
        at = {name: i for i, name in enumerate(batch.schema.names)}
        absent = [name for name, i in at.items() if batch.column(i).null_count]
        if absent:
            raise ValueError(f"has no value in some places of {absent[0]!r}")
        tensors = [c.from_arrow(batch.column(at[c.name]) if c.kind != "none" else None, rows) for c in self._columns]
        made = pytree.unflatten(self._layout.root, tensors, (rows,), None)
        if first_id is not None and self._numbered:
            ids = batch.column(at[TRAJECTORIES]).to_numpy(zero_copy_only=False) + first_id
            made.set(TRAJECTORY, torch.from_numpy(ids))
        return made


@contextmanager
def _opened(path: Path, columns: Sequence[str] | None) -> Iterator[_File]:
    parquet = library().parquet
    if not path.is_file():
        raise FileNotFoundError(2, "there is no such file", str(path))
    try:
        check(path)
        file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True)
    except _FAILURES as error:
        raise DatasetError(str(path), f"this is no Parquet file, or a damaged one ({error})") from error
    with file:
        yield _File(path, file, columns)


def _apart(blocks: Iterator[Any], storage: Any) -> Iterator[Any]:
    """The blocks; ValueError where the first one would go on the last trajectory that is stored."""
    first = True
    for block in blocks:
        if first and storage.lanes is not None and len(storage):
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
            last = storage.column(path, torch.tensor([(cursor - 1) % (storage.lanes.store.lane_capacity)]))
        if int(last.reshape(-1)[0]) == int(ids.reshape(-1)[0]):
            raise ValueError(
                f"the buffer ends with the trajectory {int(last.reshape(-1)[0])}, the file begins with one of the same "
                "id: they would become one. new_ids=True numbers those of the file anew; nothing was read"
            )
        return
