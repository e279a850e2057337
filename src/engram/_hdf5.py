"""HDF5 files of checkpoints: written block by block, and read without believing anything they claim.

`H5File` has every check that is made of a file: links, external storage, filters, sizes of chunks and of datasets.
`H5Reader` reads the files of checkpoints by path.
"""

from __future__ import annotations

import errno
import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, BinaryIO
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from engram._packages import packages
from engram._system import check_memory
from engram.pytree import KeyPath

Array = npt.NDArray[Any]

_CHUNK_BYTES = 1 << 18  # of the chunks that checkpoints are written in
_LARGEST_RATIO = 1100  # of compression by these filters: deflate's limit is 1032
_GZIP, _SHUFFLE, _FLETCHER32, _LZF = 1, 2, 3, 32000  # the numbers that HDF5 gives its filters
_OPTIONS = ("compression", "compression_opts", "shuffle", "fletcher32")
_COMPRESSIONS = (None, "gzip", "lzf")
_DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")


def import_h5py(needed_by: str = "the H5StorageCheckpointer") -> Any:
    """Imports h5py; the ImportError says how to install it."""
    with packages(needed_by, "engram[h5]", h5py="h5py"):
        import h5py
    return h5py


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Checks `h5_kwargs`, how datasets are compressed; the ValueError says what is allowed."""
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


def join_path(*parts: str | int) -> str:
    """A path in a file of names with any characters; those that HDF5 does not allow are percent-encoded."""
    return "/".join(_escape(str(part)) for part in parts)


def _escape(part: str) -> str:
    if part in ("", "."):
        return "%2E" if part else "%"
    return "".join(c if c not in "/%\0" else quote(c, safe="") for c in part)


def key_json(path: KeyPath) -> str:
    """A key as the attribute `key` of its dataset has it."""
    return json.dumps(list(path))


# ---- reading ----
class H5Dataset:
    """A dataset that was checked: a plain array of numbers that lies in the file and is as large as it claims."""

    def __init__(self, dataset: Any, dtype: np.dtype[Any], file_type: Any, place: str) -> None:
        self._dataset, self.dtype, self.file_type, self._place = dataset, dtype, file_type, place
        self.shape: tuple[int, ...] = dataset.shape

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, *window: slice) -> Array:
        """A new array: of the first dimensions what the slices (of step 1) select, of the others everything."""
        bounds = [part.indices(size)[:2] for part, size in zip(window, self.shape, strict=False)]
        rest = self.shape[len(bounds) :]
        shape = (*(max(0, stop - start) for start, stop in bounds), *rest)
        check_memory(math.prod(shape) * self.dtype.itemsize, f"a read of {self._place}")
        values = np.empty(shape, self.dtype)
        if not values.size:
            return values
        h5s = import_h5py().h5s
        if shape == self.shape:
            self._dataset.read(h5s.ALL, h5s.ALL, values)
        else:
            selection = h5s.create_simple(self.shape)
            selection.select_hyperslab((*(start for start, _ in bounds), *(0 for _ in rest)), shape)
            self._dataset.read(h5s.create_simple(shape), selection, values)
        return values


class H5File(ABC):
    """An open file that is not believed: no link is followed, nothing outside the file is opened, no Python object is
    made, and no memory is allocated because a header claims a size.

    Groups and datasets are h5py's low-level ids, a quarter of the time of its objects where a file has many of them.
    `place` is where something lies, for errors.
    """

    #: What h5py raises for a damaged file.
    FAILURES = (OSError, RuntimeError, KeyError, TypeError, ValueError, OverflowError, MemoryError)
    #: What a block of `failures` may raise as it is; other errors of HDF5 become what `wrong` makes.
    own_errors: tuple[type[Exception], ...] = ()
    #: What an error about a chunk that is too large says to do.
    allows_more = ""

    def __init__(self, file: Any, nbytes: int) -> None:
        self._nbytes, self._h5 = nbytes, import_h5py()
        self.root = file.id

    @abstractmethod
    def wrong(self, place: str, reason: str) -> Exception:
        """The error that says what is wrong with an entry of the file."""

    @abstractmethod
    def _largest_chunk(self, row_bytes: int, filtered: bool) -> int | None:
        """The most bytes that a chunk may have; None: any number."""

    @contextmanager
    def failures(self, place: str) -> Iterator[None]:
        """Turns what h5py raises for a damaged file into an error that names the place."""
        try:
            yield
        except self.own_errors:
            raise
        except self.FAILURES as error:
            raise self.wrong(place, f"cannot be read ({error})") from error

    def names(self, group: Any, place: str) -> list[str]:
        """The names of a group's entries."""
        with self.failures(place):
            return [name.decode() for name in group]

    def count(self, group: Any, place: str) -> int:
        """The number of a group's entries."""
        with self.failures(place):
            return int(group.get_num_objs())

    def open(self, group: Any, name: str, place: str) -> Any:
        """Opens a group or dataset; the link to it is checked first, which may lead to another file."""
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
            opened = self._h5.h5o.open(group, encoded)
            if not isinstance(opened, self._h5.h5g.GroupID | self._h5.h5d.DatasetID):
                raise self.wrong(place, "is neither a group nor a dataset")
            return opened

    def is_group(self, opened: Any) -> bool:
        return isinstance(opened, self._h5.h5g.GroupID)

    def group(self, group: Any, name: str, place: str) -> Any:
        """Opens a group."""
        opened = self.open(group, name, place)
        if not self.is_group(opened):
            raise self.wrong(place, "is a dataset, where a group belongs")
        return opened

    def checked(self, opened: Any, place: str, like: H5Dataset | None = None) -> H5Dataset:
        """What `open` returned, as a dataset that can be read; `like`: a dataset whose dtype may be used again."""
        if self.is_group(opened):
            raise self.wrong(place, "is a group, where a dataset belongs")
        with self.failures(place):
            file_type = opened.get_type()
            same_type = like is not None and file_type.equal(like.file_type)
            dtype = like.dtype if like is not None and same_type else self._dtype(opened, place)
            dataset = H5Dataset(opened, dtype, file_type, place)
            self._check_storage(opened, dataset, place)
            return dataset

    def _dtype(self, opened: Any, place: str) -> np.dtype[Any]:
        """The dtype of a dataset, in the byte order of this machine."""
        dtype: np.dtype[Any] = opened.dtype
        if dtype.str[1:] not in _DTYPES:
            held = "objects or strings of any length" if dtype.kind == "O" else str(dtype)
            raise self.wrong(
                place,
                f"holds {held}, which no tensor does (JPEG images and graphs are not read); exclude= leaves it out",
            )
        native: np.dtype[Any] = dtype.newbyteorder("=")
        return native

    def _check_storage(self, opened: Any, dataset: H5Dataset, place: str) -> None:
        """Values lie in this file, under filters that are safe to run, and take as many bytes as the shape needs."""
        h5d = self._h5.h5d
        creation = opened.get_create_plist()
        layout = creation.get_layout()
        if layout == h5d.VIRTUAL or creation.get_external_count():
            raise self.wrong(place, "has its values in other files, which are not opened")
        chunked = layout == h5d.CHUNKED
        filters = [creation.get_filter(i)[0] for i in range(creation.get_nfilters())] if chunked else []
        if any(number not in (_GZIP, _SHUFFLE, _FLETCHER32, _LZF) for number in filters):
            raise self.wrong(place, f"has the filters {filters}; those that are read: gzip, lzf, shuffle, fletcher32")
        stored = opened.get_storage_size()
        compressed = any(number in (_GZIP, _LZF) for number in filters)
        fits = dataset.nbytes <= stored * (_LARGEST_RATIO if compressed else 1) if chunked else dataset.nbytes == stored
        if stored > self._nbytes or not fits:
            raise self.wrong(place, f"has the shape {list(dataset.shape)}, but {stored} bytes in the file")
        if chunked:
            limit = self._largest_chunk(math.prod(dataset.shape[1:]) * dataset.dtype.itemsize, bool(filters))
            if limit is not None and math.prod(creation.get_chunk()) * dataset.dtype.itemsize > limit:
                raise self.wrong(
                    place, f"has chunks {creation.get_chunk()} of more than {limit} bytes{self.allows_more}"
                )


class H5Reader(H5File):
    """A checkpoint's file, read by paths: every dataset must be of the shape and dtype that the caller expects.

    ValueError where it is not.
    """

    own_errors = (ValueError, MemoryError)

    def __init__(self, file: Any, nbytes: int) -> None:
        super().__init__(file, nbytes)
        self._datasets: dict[str, H5Dataset | None] = {}  # None: checked and read, not kept open
        self._groups: dict[str, Any] = {}

    @classmethod
    @contextmanager
    def opened(cls, file: BinaryIO) -> Iterator[H5Reader]:
        """Reads an open file of a checkpoint; ValueError when it is not HDF5."""
        h5py = import_h5py()
        nbytes = file.seek(0, io.SEEK_END)
        try:
            opened = h5py.File(file, "r")
        except (OSError, RuntimeError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"HDF5 cannot read it ({error})") from error
        with opened:
            yield cls(opened, nbytes)

    def wrong(self, place: str, reason: str) -> ValueError:
        return ValueError(f"{place} {reason}")

    def _largest_chunk(self, row_bytes: int, filtered: bool) -> int:
        return 4 * max(_CHUNK_BYTES, row_bytes)  # four times as large as those that are written

    def expect(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Checks a dataset, which `read` reads then."""
        self._datasets[name] = self._open_dataset(name, shape, dtype)

    def read(self, name: str, window: tuple[slice, ...]) -> Array:
        """Values of a dataset that was expected."""
        dataset = self._datasets[name]
        assert dataset is not None, f"{name} was read as a whole before"
        with self.failures(name):
            return dataset.read(*window)

    def read_whole(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """All values of a dataset that is read once: checked as by `expect`, and not kept open."""
        values = self.read_part(name, shape, dtype, ())
        self._datasets[name] = None
        return values

    def read_part(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], window: tuple[slice, ...]) -> Array:
        """Some values of a dataset, checked as by `expect`; neither kept open nor remembered."""
        with self.failures(name):
            return self._open_dataset(name, shape, dtype).read(*window)

    def names_in(self, group: str) -> list[str]:
        """The names of a group's entries (`""`: the root of the file)."""
        return self.names(self._open_group(group), f"/{group}")

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        """What the header of a dataset claims, unchecked; None: it is a group."""
        opened = self._open(name)
        with self.failures(name):
            return None if self.is_group(opened) else (opened.shape, opened.dtype)

    def check_nothing_else(self) -> None:
        """ValueError when the file holds anything that was not expected."""
        expected: dict[str, set[str]] = {}
        for name in self._datasets:
            parts = name.split("/")
            for depth, part in enumerate(parts):
                expected.setdefault("/".join(parts[:depth]), set()).add(part)
        for group, names in expected.items():
            present = set(self.names_in(group))
            if present != names:
                raise self.wrong(f"/{group}", f"holds {sorted(present - names)[:3]}, which does not belong there")

    def _open_dataset(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> H5Dataset:
        opened = self._open(name)
        if not self.is_group(opened):
            with self.failures(name):
                if opened.shape != shape or opened.dtype != dtype:  # before its storage, and with its byte order
                    raise self.wrong(name, f"is {opened.dtype} {opened.shape}, not {dtype} {shape}")
        return self.checked(opened, name)

    def _open(self, name: str) -> Any:
        """Opens the group or dataset of a path."""
        group, _, last = name.rpartition("/")
        return self.open(self._open_group(group), last, name)

    def _open_group(self, path: str) -> Any:
        """Opens the groups of a path; those of the last one stay open, as the next one often begins the same."""
        before, self._groups = self._groups, {}
        group = self.root
        parts = path.split("/") if path else []
        for depth, part in enumerate(parts):
            place = "/".join(parts[: depth + 1])
            group = before[place] if place in before else self.group(group, part, place)
            self._groups[place] = group
        return group


# ---- writing ----
class _ErrorLatch(io.RawIOBase):
    """A file that keeps its first error and writes nothing after it, but reports success to HDF5.

    HDF5 itself loses errors of objects that it closes later, goes on with the damaged file, and may crash.
    """

    def __init__(self, path: str) -> None:
        self._file = io.FileIO(path, "w+")
        self._error: OSError | None = None

    def check(self) -> None:
        """Raises the first error, if there was any."""
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
    """Writes a checkpoint's file. Names are paths in it; the groups of a path are created with it."""

    def __init__(self, file: Any, disk: _ErrorLatch, options: Mapping[str, Any]) -> None:
        self._file, self._disk, self._options = file, disk, dict(options)

    def set_attributes(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Sets attributes of the file (`/`), a group (created if it is missing) or a dataset."""
        self._disk.check()
        (self._file[name] if name in self._file else self._file.create_group(name)).attrs.update(attributes)

    def create(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], row_dims: int) -> None:
        """Creates a dataset for `write`; its first `row_dims` dimensions are steps."""
        self._disk.check()
        options = dict(self._options)
        if any(options.values()):
            options["chunks"] = _chunks(shape, dtype, row_dims)
        self._file.create_dataset(name, shape, dtype, **options)

    def create_with(self, name: str, values: Array) -> None:
        """Creates a dataset with all its values."""
        self._disk.check()
        options = dict(self._options)
        if any(options.values()):
            options["chunks"] = _chunks(values.shape, values.dtype, 1)
        self._file.create_dataset(name, data=values, **options)

    def write(self, name: str, window: tuple[slice, ...], values: Array) -> None:
        """Writes a part of a dataset."""
        self._disk.check()
        self._file[name][window] = values

    def append(self, name: str, values: Array) -> None:
        """Appends to a dataset; the first call creates it, even without values."""
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
        """Reads rows back that were written."""
        self._disk.check()
        read: Array = self._file[name][start:stop]
        return read

    def replace(self, old: str, new: str) -> None:
        """Deletes `old` and moves `new` to its path."""
        del self._file[old]
        self._file.move(new, old)


@contextmanager
def create_checked(path: str, options: Mapping[str, Any]) -> Iterator[H5Writer]:
    """Writes a checkpoint's file at `path`; OSError when the disk is full or fails."""
    h5py = import_h5py()
    with closing(_ErrorLatch(path)) as disk:
        try:
            with h5py.File(disk, "w") as file:
                yield H5Writer(file, disk, options)
        except Exception as error:
            disk.check()  # what was not written makes HDF5 fail later, in other ways
            if isinstance(error, RuntimeError):
                raise OSError(errno.EIO, f"HDF5 cannot write it ({error})", path) from error
            raise
        disk.check()


def _row_bytes(values: Array) -> int:
    return math.prod(values.shape[1:]) * values.itemsize


def _chunks(shape: tuple[int, ...], dtype: np.dtype[Any], row_dims: int) -> tuple[int, ...] | None:
    row = max(1, math.prod(shape[row_dims:]) * dtype.itemsize)
    steps = max(1, min(shape[row_dims - 1], _CHUNK_BYTES // row))
    return (*(1 for _ in shape[: row_dims - 1]), steps, *shape[row_dims:])
