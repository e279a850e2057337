"""HDF5 files of datasets: written, and read without trusting what they claim, since they may come from anywhere."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from engram.datasets.atomic_files import path_of
from engram.errors import DatasetError
from engram.kernel.hdf5 import H5Dataset, H5File, import_h5py
from engram.kernel.tools import check_memory, human_bytes, open_regular, parse_bytes
from engram.specs import Text

Array = npt.NDArray[Any]

NEEDED_BY = "reading or writing HDF5 datasets"
_MARK = "engram"  # the attribute of files that engram wrote
_STRING_REFERENCE = np.dtype("V16")  # a string of any length in its dataset: size, place in the file, number


# ---- reading ----
class H5Texts(H5Dataset):
    """A dataset of texts of any length, one a row, as uint8 `[rows, width]`: see `Text`."""

    def __init__(self, dataset: Any, file_type: Any, place: str, width: int, rows_at_once: int) -> None:
        super().__init__(dataset, np.dtype(np.uint8), file_type, place)
        self.shape = (*self.shape, width)
        self._rows_at_once = rows_at_once

    def read(self, *window: slice) -> Array:
        """A new array of the rows that the slice selects. Raises ValueError for a text without a place in `width`."""
        start, stop, _ = window[0].indices(len(self)) if window else (0, len(self), 1)
        rows, width = max(0, stop - start), self.shape[-1]
        check_memory(rows * width, f"a read of {self._place}")
        values = np.empty((rows, width), np.uint8)
        for at in range(start, stop, self._rows_at_once):
            texts = [text.decode() for text in self._strings(at, min(stop, at + self._rows_at_once))]
            try:
                values[at - start : at - start + len(texts)] = Text(width).encode(texts).numpy()
            except ValueError as error:
                raise ValueError(f"{self._place}: {error}") from error
        return values

    def _strings(self, start: int, stop: int) -> Array:
        h5s = import_h5py(NEEDED_BY).h5s
        strings = np.empty(stop - start, text_dtype())
        selection = h5s.create_simple((len(self),))
        selection.select_hyperslab((start,), strings.shape)
        self._dataset.read(h5s.create_simple(strings.shape), selection, strings)
        return strings


class H5Source(H5File):
    """A dataset's file of unknown origin.

    DatasetError, which names file and place, where an entry is not a plain group or dataset.
    """

    own_errors = (DatasetError,)
    allows_more = "; max_row_bytes= allows more"

    def __init__(self, file: Any, path: Path, nbytes: int, allowed: int) -> None:
        super().__init__(file, nbytes)
        self.path, self._allowed = path, allowed
        self._uncached = self._h5.h5p.create(self._h5.h5p.DATASET_ACCESS)
        self._uncached.set_chunk_cache(0, 0, 1.0)

    def wrong(self, place: str, reason: str) -> DatasetError:
        return DatasetError(str(self.path), f"{place} {reason}")

    def _largest_chunk(self, row_bytes: int, filtered: bool) -> int | None:
        return self._allowed if filtered else None  # only filtered chunks are read whole

    def check_row(self, row_bytes: int) -> None:
        """DatasetError where a step takes more memory than is allowed."""
        if row_bytes > self._allowed:
            raise self.wrong(
                "the file", f"has steps of {human_bytes(row_bytes)}; max_row_bytes= allows {human_bytes(self._allowed)}"
            )

    def open(self, group: Any, name: str, place: str) -> Any:
        """As `H5File.open`; chunks of one step are not cached, since each is read once."""
        opened = super().open(group, name, place)
        if self.is_group(opened):
            return opened
        with self.failures(place):
            creation = opened.get_create_plist()
            if creation.get_layout() != self._h5.h5d.CHUNKED or creation.get_chunk()[0] > 1:
                return opened
            del opened  # HDF5 takes the cache settings of the first handle
            return self._h5.h5d.open(group, name.encode(), self._uncached)

    def rows(self, group: Any, name: str, place: str, like: H5Dataset | None = None) -> H5Dataset:
        """Opens a dataset with a value for each step; `like`: of the same dtype and row shape as this one."""
        width = like.shape[-1] if isinstance(like, H5Texts) else 0
        return self.checked_rows(self.open(group, name, place), place, like, text_width=width)

    def checked_rows(self, opened: Any, place: str, like: H5Dataset | None = None, *, text_width: int = 0) -> H5Dataset:
        """An opened entry as a dataset with a value for each step; texts as uint8 of this width, if it is not 0.

        A text's bytes lie elsewhere in the file, where many rows may share them: no more rows are decoded at once than
        fit what a row may take, if each has the whole file.
        """
        if text_width and self._holds_texts(opened):
            with self.failures(place):
                kind = opened.get_type()
                self._check_storage(opened, H5Dataset(opened, _STRING_REFERENCE, kind, place), place)
                at_once = max(1, self._allowed // max(1, self._nbytes))
                dataset: H5Dataset = H5Texts(opened, kind, place, text_width, at_once)
            if len(dataset.shape) != 2:
                raise self.wrong(place, "has texts that are not one a step; exclude= leaves it out")
        else:
            dataset = self.checked(opened, place, like)
        if not dataset.shape:
            raise self.wrong(place, "is a single value, where there should be one a step")
        if like is not None and (dataset.dtype != like.dtype or dataset.shape[1:] != like.shape[1:]):
            raise self.wrong(
                place,
                f"is {dataset.dtype} {list(dataset.shape[1:])} a step, but {like.dtype} {list(like.shape[1:])} before",
            )
        return dataset

    def _holds_texts(self, opened: Any) -> bool:
        """Whether a dataset has strings of any length."""
        if self.is_group(opened):
            return False
        kind = opened.get_type()
        return isinstance(kind, self._h5.h5t.TypeStringID) and bool(kind.is_variable_str())


@contextmanager
def open_foreign(path: Path, max_row_bytes: int | str) -> Iterator[H5Source]:
    """Reads a file of unknown origin; a step, and a compressed chunk, may take `max_row_bytes`.

    Raises:
        FileNotFoundError: there is no such file.
        DatasetError: it is not HDF5.
        ImportError: h5py is missing.
    """
    h5py, allowed = import_h5py(NEEDED_BY), parse_bytes(max_row_bytes, "max_row_bytes")
    with open(open_regular(path, follow_links=True), "rb") as opened:
        try:
            file = h5py.File(path_of(opened), "r", rdcc_nbytes=allowed, rdcc_nslots=101)
        except H5File.FAILURES as error:
            raise DatasetError(str(path), f"this is no HDF5 file, or a damaged one ({error})") from error
        with file:
            yield H5Source(file, path, os.fstat(opened.fileno()).st_size, allowed)


def is_ours(file: BinaryIO) -> bool:
    """Whether engram wrote a dataset's file."""
    try:
        with import_h5py(NEEDED_BY).File(path_of(file), "r") as opened:
            return _MARK in opened.attrs
    except H5File.FAILURES:
        return False


# ---- writing ----
@contextmanager
def create_plain(path: Path) -> Iterator[Any]:
    """Opens a new file of a dataset, an h5py.File; OSError when the disk is full or fails."""
    h5py = import_h5py(NEEDED_BY)
    file = h5py.File(path, "w", libver=("v108", "v108"))  # the newer form of groups takes a quarter of the space
    try:
        file.attrs[_MARK] = "dataset"
        yield file
    except BaseException:
        with contextlib.suppress(*H5File.FAILURES):
            file.close()
        raise
    try:
        file.close()
    except RuntimeError as error:  # what h5py makes of a full disk when it closes
        raise OSError(errno.EIO, f"HDF5 cannot write it ({error})", str(path)) from error


def text_dtype() -> np.dtype[Any]:
    """The dtype of arrays of texts, which become variable-length strings in UTF-8."""
    dtype: np.dtype[Any] = import_h5py(NEEDED_BY).string_dtype()
    return dtype


class H5RowWriter:
    """Writes a dataset of fixed length from its first row to its last; its values are contiguous in the file."""

    def __init__(self, group: Any, name: str, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        h5py = import_h5py(NEEDED_BY)
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
        selection = self._h5s.create_simple(self._shape)
        selection.select_hyperslab((self._at, *(0 for _ in self._shape[1:])), values.shape)
        self._dataset.write(self._h5s.create_simple(values.shape), selection, values)
        self._at += len(values)
