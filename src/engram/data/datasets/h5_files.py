"""HDF5 files by others, read with nothing believed; and written dataset by dataset.

h5py's own objects cost 0.3 ms a dataset, and a Minari episode has half a dozen: its low-level calls are used instead.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engram.data.replay_buffers.checkpointers.h5 import library
from engram.data.replay_buffers.utils import check_memory
from engram.errors import DatasetError

Array = npt.NDArray[Any]

NEEDED_BY = "reading or writing HDF5 datasets"
_GZIP, _SHUFFLE, _FLETCHER32, _LZF = 1, 2, 3, 32000  # the numbers that HDF5 gives its filters
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
def reading(path: Path) -> Iterator[H5Source]:
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
def writing(path: Path) -> Iterator[Any]:
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
