"""HDF5 files as checkpoints need them: plain datasets written block by block, and believed only when they are that."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from engram._system import check_memory
from engram.errors import DatasetError
from engram.pytree import KeyPath

Array = npt.NDArray[Any]

_CHUNK_BYTES = 1 << 18
_GZIP, _SHUFFLE, _FLETCHER32, _LZF = 1, 2, 3, 32000  # the numbers that HDF5 gives its filters
_OPTIONS = ("compression", "compression_opts", "shuffle", "fletcher32")
_COMPRESSIONS = (None, "gzip", "lzf")


def library(needed_by: str = "the H5StorageCheckpointer") -> Any:
    """The h5py package; an ImportError says how to get it."""
    try:
        import h5py
    except ImportError as error:
        raise ImportError(f'{needed_by} needs h5py: pip install "engram[h5]"') from error
    return h5py


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """How datasets are compressed, as h5py takes it; a ValueError says what is allowed."""
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise ValueError(f"h5_kwargs takes {', '.join(_OPTIONS)}; found {', '.join(map(repr, unknown))}")
    compression = options.get("compression")
    if compression not in _COMPRESSIONS:
        raise ValueError(
            f"h5_kwargs: compression is 'gzip', 'lzf' or None, which every HDF5 tool reads; found {compression!r}"
        )
    level = options.get("compression_opts")
    if level is not None and (compression != "gzip" or type(level) is not int or not 0 <= level <= 9):
        raise ValueError(f"h5_kwargs: compression_opts is a level from 0 to 9 of gzip; found {level!r}")
    return dict(options)


def place(*parts: str | int) -> str:
    """A path in the file, made of names that may hold anything: `%` and two digits stand for what HDF5 cannot have."""
    return "/".join(_name(str(part)) for part in parts)


def _name(part: str) -> str:
    if part in ("", "."):
        return "%2E" if part else "%"
    return "".join(c if c not in "/%\0" else quote(c, safe="") for c in part)


def key_text(path: KeyPath) -> str:
    return json.dumps(list(path))


class _SteadyFile(io.RawIOBase):
    """A file that never fails in the eyes of HDF5, which loses errors of objects that it closes later, goes on with a
    damaged file, and may crash. The first error is kept; nothing is written after it.
    """

    def __init__(self, path: str) -> None:
        self._file = io.FileIO(path, "w+")
        self._error: OSError | None = None

    def check(self) -> None:
        """Raises the error that there was."""
        if self._error is not None:
            raise self._error

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        try:
            while self._error is None and len(left):
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            self._error = error
        return memoryview(data).nbytes

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        try:
            return self._file.readinto(view) or 0
        except OSError as error:
            self._error = self._error or error
            view[:] = bytes(len(view))
            return len(view)

    def truncate(self, size: int | None = None) -> int:
        try:
            if self._error is None:
                return self._file.truncate(size)
        except OSError as error:
            self._error = error
        return size or 0

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


class H5Writer:
    """A new file. Names are paths in it; groups are made on the way."""

    def __init__(self, file: Any, disk: _SteadyFile, options: Mapping[str, Any]) -> None:
        self._file, self._disk, self._options = file, disk, dict(options)

    def describe(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Attributes of the file (`/`), a group or a dataset."""
        self._disk.check()
        (self._file[name] if name in self._file else self._file.create_group(name)).attrs.update(attributes)

    def make(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], row_dims: int) -> None:
        """A dataset of this size; its first `row_dims` dimensions are steps."""
        self._disk.check()
        options = dict(self._options)
        if any(options.values()):
            options["chunks"] = _chunks(shape, dtype, row_dims)
        self._file.create_dataset(name, shape, dtype, **options)

    def put(self, name: str, values: Array) -> None:
        """A dataset that is written in one go."""
        self._disk.check()
        options = dict(self._options)
        if any(options.values()):
            options["chunks"] = _chunks(values.shape, values.dtype, 1)
        self._file.create_dataset(name, data=values, **options)

    def write(self, name: str, where: tuple[Any, ...], values: Array) -> None:
        self._disk.check()
        self._file[name][where] = values

    def append(self, name: str, values: Array) -> None:
        """Adds to a dataset that grows; the first call makes it, even with nothing to add."""
        self._disk.check()
        if name not in self._file:
            chunks = (max(1, min(len(values) or 64, _CHUNK_BYTES // max(1, _row_bytes(values)))), *values.shape[1:])
            self._file.create_dataset(
                name, data=values, maxshape=(None, *values.shape[1:]), chunks=chunks, **self._options
            )
        elif len(values):
            dataset = self._file[name]
            before = len(dataset)
            dataset.resize(before + len(values), axis=0)
            dataset[before:] = values

    def read(self, name: str, start: int, stop: int) -> Array:
        self._disk.check()
        read: Array = self._file[name][start:stop]
        return read

    def replace(self, old: str, new: str) -> None:
        """Puts `new` in the place of `old`, which is dropped."""
        del self._file[old]
        self._file.move(new, old)


@contextmanager
def create_checked(path: str, options: Mapping[str, Any]) -> Iterator[H5Writer]:
    """Writes a file at `path`; OSError when the disk is full or fails."""
    h5py = library()
    with closing(_SteadyFile(path)) as disk:
        try:
            with h5py.File(disk, "w") as file:
                yield H5Writer(file, disk, options)
        except Exception as error:
            disk.check()  # what was not written makes HDF5 fail later, in other ways
            if isinstance(error, RuntimeError):
                raise OSError(errno.EIO, f"HDF5 cannot write it ({error})", path) from error
            raise
        disk.check()


class H5Reader:
    """A file that is not believed: every object that is read must be a plain dataset of the type and shape expected.

    ValueError: it is not. No link is followed, no object of Python made, and nothing outside the file is opened.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._seen: dict[str, Any] = {}
        self._groups: dict[str, Any] = {}

    def expect(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """The dataset at `name`, checked from the root on."""
        with _as_value_errors():
            dataset = self._walk(name)
            if dataset.dtype.kind == "O" or dataset.shape != shape or dataset.dtype != dtype:
                raise ValueError(f"{name} is {dataset.dtype} {dataset.shape}, not {dtype} {shape}")
            _check_storage(name, dataset, shape, dtype)
            self._seen[name] = dataset

    def read(self, name: str, where: Any) -> Array:
        """Values of a dataset that was expected."""
        with _as_value_errors():
            dataset = self._seen[name]
            check_memory(_selected(dataset.shape, where) * dataset.dtype.itemsize, name)
            read: Array = dataset[where]
            return read

    def take(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """All values of a dataset that is read once: checked as by `expect`, and not kept open."""
        self.expect(name, shape, dtype)
        values = self.read(name, ())
        self._seen[name] = None
        return values

    def names(self, group: str) -> list[str]:
        """What a group holds (`""`: the root of the file)."""
        with _as_value_errors():
            return list((self._walk(group, to_group=True) if group else self._file).keys())

    def said(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        """Shape and dtype that a dataset claims; None: it is a group. What it holds is checked by `expect`."""
        with _as_value_errors():
            found = self._walk(name, to_group=None)
            return (found.shape, found.dtype) if hasattr(found, "dtype") else None

    def part(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], where: slice) -> Array:
        """Some values of a dataset, checked as by `expect`, and not kept open."""
        self.expect(name, shape, dtype)
        values = self.read(name, where)
        del self._seen[name]
        return values

    def nothing_else(self) -> None:
        """ValueError when the file holds anything that was not expected."""
        wanted: dict[str, set[str]] = {}
        for name in self._seen:
            parts = name.split("/")
            for depth, part in enumerate(parts):
                wanted.setdefault("/".join(parts[:depth]), set()).add(part)
        with _as_value_errors():
            for group, names in wanted.items():
                found = set((self._file[group] if group else self._file).keys())
                if found != names:
                    raise ValueError(f"/{group} holds {sorted(found - names)[:3]}, which does not belong there")

    def _walk(self, name: str, to_group: bool | None = False) -> Any:
        h5py = library()
        wanted = {False: h5py.Dataset, True: h5py.Group, None: (h5py.Dataset, h5py.Group)}[to_group]
        here, parts = self._file, name.split("/")
        before, self._groups = self._groups, {}  # those of the last walk: many groups are never open at once
        for depth, part in enumerate(parts):
            so_far = "/".join(parts[: depth + 1])
            if so_far in before:
                here = self._groups[so_far] = before[so_far]
                continue
            links = here.id.links
            # Asked of the link, not of what it leads to, which may be another file.
            if not links.exists(part.encode()) or links.get_info(part.encode()).type != h5py.h5l.TYPE_HARD:
                raise ValueError(f"{so_far} is missing, or a link to somewhere else")
            here = here[part]
            if not isinstance(here, wanted if depth == len(parts) - 1 else h5py.Group):
                raise ValueError(f"{so_far} is a {type(here).__name__}")
            if depth < len(parts) - 1:
                self._groups[so_far] = here
        return here


@contextmanager
def open_checked(file: BinaryIO) -> Iterator[H5Reader]:
    """Reads an open file; ValueError when it is not HDF5."""
    h5py = library()
    with _as_value_errors():
        opened = h5py.File(file, "r")
    with opened:
        yield H5Reader(opened)


@contextmanager
def _as_value_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"HDF5 cannot read it ({error})") from error


def _check_storage(name: str, dataset: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    creation = dataset.id.get_create_plist()
    if dataset.is_virtual or creation.get_external_count():
        raise ValueError(f"{name} has its values in other files")
    filters = [creation.get_filter(i)[0] for i in range(creation.get_nfilters())]
    if any(number not in (_GZIP, _SHUFFLE, _FLETCHER32, _LZF) for number in filters):
        raise ValueError(f"{name} has filters ({filters}) other than gzip, lzf, shuffle and fletcher32")
    row = math.prod(shape[1:]) * dtype.itemsize
    if dataset.chunks is not None and math.prod(dataset.chunks) * dtype.itemsize > 4 * max(_CHUNK_BYTES, row):
        raise ValueError(f"{name} has chunks of {dataset.chunks}, larger than this version writes")
    if dataset.chunks is None and dataset.id.get_storage_size() != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} is not as long as its shape {shape} says")


def _selected(shape: tuple[int, ...], where: Any) -> int:
    """How many values a selection has."""
    parts = where if isinstance(where, tuple) else (where,)
    sizes = [
        len(range(*part.indices(size))) if isinstance(part, slice) else np.size(part)
        for size, part in zip(shape, parts, strict=False)
    ]
    return math.prod(sizes) * math.prod(shape[len(sizes) :])


def _row_bytes(values: Array) -> int:
    return math.prod(values.shape[1:]) * values.itemsize


def _chunks(shape: tuple[int, ...], dtype: np.dtype[Any], row_dims: int) -> tuple[int, ...] | None:
    row = max(1, math.prod(shape[row_dims:]) * dtype.itemsize)
    steps = max(1, min(shape[row_dims - 1], _CHUNK_BYTES // row))
    return (*(1 for _ in shape[: row_dims - 1]), steps, *shape[row_dims:])


NEEDED_BY = "reading or writing HDF5 datasets"
_MOST_RATIO = 1100  # no filter of these makes less of more: deflate's limit is 1032
_MOST_CHUNK = 1 << 28  # bytes of a compressed chunk, which is read whole
_DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
_FAILURES = (OSError, RuntimeError, KeyError, TypeError, ValueError, OverflowError, MemoryError)


class H5Array:
    """A plain dataset that was looked at and is what it says."""

    def __init__(self, dataset: Any, dtype: np.dtype[Any], file_type: Any) -> None:
        self._dataset, self.dtype, self.file_type = dataset, dtype, file_type
        self.shape: tuple[int, ...] = dataset.shape

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> Array:
        """Rows [start, stop) as a new array."""
        h5s = library(NEEDED_BY).h5s
        check_memory((stop - start) * math.prod(self.shape[1:]) * self.dtype.itemsize, f"a read of {stop - start} rows")
        made = np.empty((stop - start, *self.shape[1:]), self.dtype)
        if not made.size:
            return made
        if (start, stop) == (0, len(self)):
            self._dataset.read(h5s.ALL, h5s.ALL, made)
            return made
        there = h5s.create_simple(self.shape)
        there.select_hyperslab((start, *(0 for _ in self.shape[1:])), made.shape)
        self._dataset.read(h5s.create_simple(made.shape), there, made)
        return made


class H5Source:
    """An open file. DatasetError, which names file and place, where something is not a plain group or dataset."""

    def __init__(self, file: Any, path: Path) -> None:
        self.path = path
        self._size = path.stat().st_size
        self._h5 = library(NEEDED_BY)
        self.root = file.id

    def wrong(self, place: str, reason: str) -> DatasetError:
        return DatasetError(str(self.path), f"{place} {reason}")

    def names(self, group: Any, place: str) -> list[str]:
        """What is in a group."""
        with self.failures(place):
            return [name.decode() for name in group]

    def count(self, group: Any) -> int:
        return int(group.get_num_objs())

    def open(self, group: Any, name: str, place: str) -> Any:
        """A group or dataset; the link is looked at first, as what it leads to may be another file."""
        with self.failures(place):
            encoded = name.encode()
            try:
                link = group.links.get_info(encoded).type
            except (KeyError, RuntimeError):
                if group.links.exists(encoded):
                    raise
                raise self.wrong(place, "is missing") from None
            if link != self._h5.h5l.TYPE_HARD:
                raise self.wrong(place, "is a link to somewhere else, which is not followed")
            found = self._h5.h5o.open(group, encoded)
            if not isinstance(found, self._h5.h5g.GroupID | self._h5.h5d.DatasetID):
                raise self.wrong(place, "is neither a group nor a dataset")
            return found

    def is_group(self, found: Any) -> bool:
        return isinstance(found, self._h5.h5g.GroupID)

    def group(self, group: Any, name: str, place: str) -> Any:
        found = self.open(group, name, place)
        if not self.is_group(found):
            raise self.wrong(place, "is a dataset, where a group belongs")
        return found

    def array(self, group: Any, name: str, place: str, like: H5Array | None = None) -> H5Array:
        """A dataset of rows; `like`: of the same dtype and row shape as this one."""
        return self.as_array(self.open(group, name, place), place, like)

    def as_array(self, dataset: Any, place: str, like: H5Array | None = None) -> H5Array:
        """What was opened, as a dataset of rows."""
        if self.is_group(dataset):
            raise self.wrong(place, "is a group, where a dataset belongs")
        with self.failures(place):
            file_type = dataset.get_type()
            known = like is not None and file_type.equal(like.file_type)
            dtype = like.dtype if like is not None and known else self._dtype(dataset, place)
            found = H5Array(dataset, dtype, file_type)
            if not found.shape:
                raise self.wrong(place, "is a single value, where there should be one a step")
            if like is not None and (dtype != like.dtype or found.shape[1:] != like.shape[1:]):
                raise self.wrong(
                    place,
                    f"is {dtype} {list(found.shape[1:])} a step, but {like.dtype} {list(like.shape[1:])} before",
                )
            self._check_storage(dataset, found, place)
            return found

    def _dtype(self, dataset: Any, place: str) -> np.dtype[Any]:
        dtype: np.dtype[Any] = dataset.dtype
        if dtype.str[1:] not in _DTYPES:
            said = "objects or strings of any length" if dtype.kind == "O" else str(dtype)
            raise self.wrong(
                place,
                f"holds {said}, which no tensor does (texts, JPEG images and graphs are not read); exclude= leaves it "
                "out",
            )
        native: np.dtype[Any] = dtype.newbyteorder("=")
        return native

    def _check_storage(self, dataset: Any, found: H5Array, place: str) -> None:
        """Sizes are those of the file: nothing is allocated because a header says so."""
        h5d = self._h5.h5d
        creation = dataset.get_create_plist()
        kind = creation.get_layout()
        if kind == h5d.VIRTUAL or creation.get_external_count():
            raise self.wrong(place, "has its values in other files, which are not opened")
        filters = [creation.get_filter(i)[0] for i in range(creation.get_nfilters())] if kind == h5d.CHUNKED else []
        if any(number not in (_GZIP, _SHUFFLE, _FLETCHER32, _LZF) for number in filters):
            raise self.wrong(place, f"has the filters {filters}; those that are read: gzip, lzf, shuffle, fletcher32")
        nbytes = math.prod(found.shape) * found.dtype.itemsize
        stored = dataset.get_storage_size()
        packed = any(number in (_GZIP, _LZF) for number in filters)
        if stored > self._size or nbytes > stored * (_MOST_RATIO if packed else 1):
            raise self.wrong(place, f"has the shape {list(found.shape)}, but {stored} bytes in the file")
        if filters and math.prod(creation.get_chunk()) * found.dtype.itemsize > _MOST_CHUNK:
            raise self.wrong(place, f"has compressed chunks {creation.get_chunk()} of more than {_MOST_CHUNK} bytes")

    @contextmanager
    def failures(self, place: str) -> Iterator[None]:
        """What HDF5 makes of a damaged file, as a DatasetError."""
        try:
            yield
        except DatasetError:
            raise
        except _FAILURES as error:
            raise self.wrong(place, f"cannot be read ({error})") from error


@contextmanager
def open_foreign(path: Path) -> Iterator[H5Source]:
    """An open file.

    Raises:
        FileNotFoundError: there is none.
        DatasetError: it is not HDF5.
        ImportError: h5py is missing.
    """
    h5py = library(NEEDED_BY)
    if not path.is_file():
        raise FileNotFoundError(2, "there is no such file", str(path))
    try:
        file = h5py.File(path, "r", rdcc_nbytes=_MOST_CHUNK, rdcc_nslots=101)
    except _FAILURES as error:
        raise DatasetError(str(path), f"this is no HDF5 file, or a damaged one ({error})") from error
    with file:
        yield H5Source(file, path)


@contextmanager
def create_plain(path: Path) -> Iterator[Any]:
    """A new file, as h5py gives it; OSError when the disk is full or fails."""
    h5py = library(NEEDED_BY)
    file = h5py.File(path, "w", libver=("v108", "v108"))  # the newer form of groups takes a quarter of the space
    try:
        yield file
    except BaseException:
        with contextlib.suppress(*_FAILURES):
            file.close()
        raise
    try:
        file.close()
    except RuntimeError as error:  # what h5py makes of a full disk when it closes
        raise OSError(5, f"HDF5 cannot write it ({error})", str(path)) from error


class H5Rows:
    """A dataset of a length that is known, written in order. Values are contiguous in the file."""

    def __init__(self, group: Any, name: str, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        h5py = library(NEEDED_BY)
        self._h5s, self._shape, self._at = h5py.h5s, (rows, *shape), 0
        kind = h5py.h5t.py_create(dtype, logical=True)
        self._dataset = h5py.h5d.create(group, name.encode(), kind, h5py.h5s.create_simple(self._shape))

    def write(self, values: Array) -> None:
        """The next rows."""
        values = np.ascontiguousarray(values)
        if not values.size:
            return
        if values.shape == self._shape:
            self._dataset.write(self._h5s.ALL, self._h5s.ALL, values)
            return
        there = self._h5s.create_simple(self._shape)
        there.select_hyperslab((self._at, *(0 for _ in self._shape[1:])), values.shape)
        self._dataset.write(self._h5s.create_simple(values.shape), there, values)
        self._at += len(values)
