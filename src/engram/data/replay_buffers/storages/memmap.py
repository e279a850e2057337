"""Storages in a mapped file: one that writes, and one that only reads what other processes write."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch

from engram._advice import advised
from engram._system import user_path
from engram._text import visible, warn_user
from engram.checkpoint.foreign import has_memory_maps
from engram.data.replay_buffers.state.rows import SavedObservedRows
from engram.data.replay_buffers.storages.tensor import LazyTensorStorage, TableStorage, TensorStorage, table_bytes
from engram.errors import StorageError
from engram.pytree import Key
from engram.store.compact import Compact, as_compact
from engram.store.first_writers import FirstWriters, UnmadeStore
from engram.store.header import FILE_NAME
from engram.store.packed_rows import PackedRows
from engram.store.places import (
    LaneCount,
    NamedFile,
    ObservedFile,
    Place,
    TableSize,
    TemporaryFile,
)
from engram.store.table import Table


class ObservedMemmapStorage(TableStorage):
    """A read-only view of a mapped store that other processes may be writing.

    `LazyMemmapStorage.open(folder, read_only=True)` returns one. The file is mapped read-only, also on a read-only file
    system. It takes no lock and no lane and repairs nothing, so that the writing job may append and use the store
    exclusively as if nobody looked. A read during which rows were changed in place, or all rows replaced (`empty`,
    `loads`), is repeated.

    Raises:
        StorageError: there is no store, its file is damaged, or a process or the machine stopped in the middle of a
            change: open it once for writing, which repairs it.
        StorageInUseError: rows were changed all the time while this process tried to read.
    """

    def __init__(self, scratch_dir: str | os.PathLike[str], *, checkpointer: Any = None) -> None:
        self.scratch_dir, self.read_only = user_path(scratch_dir), True
        self._file = ObservedFile(self.scratch_dir)
        opened = self._file.opened
        size = TableSize(opened.lanes.capacity, None, opened.ndim, None)
        size.take(opened)
        table = Table(size, self._file, opened)
        self._hold(table, checkpointer, functools.partial(SavedObservedRows, table=table), TensorStorage)

    def freeze(self) -> None:
        """Hides the rows that are written from now on, so that several reads and counts are about the same rows.

        Rows that a writer overwrites are gone, as ever: of these there are fewer with time. A read after all rows were
        replaced (`empty`, `loads`) raises a StorageInUseError.

        Example:
            >>> import tempfile
            >>> folder = tempfile.mkdtemp()
            >>> job = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=folder))
            >>> _ = job.extend(torch.arange(4))
            >>> observed = LazyMemmapStorage.open(folder, read_only=True)
            >>> observed.freeze()
            >>> _ = job.extend(torch.arange(4, 6))
            >>> len(observed), observed.get(slice(None)).sum()
            (4, tensor(6))
        """
        self._file.freeze()


@advised
class LazyMemmapStorage(LazyTensorStorage):
    """Packed rows in a mapped file, made at the first write.

    Without `scratch_dir` the file is temporary (in TMPDIR) and goes with the last process that has it open. With
    `scratch_dir` the rows outlive the process: `LazyMemmapStorage.open(dir)` gives them back after a normal exit, a
    crash or `kill -9`, with length, cursor and write count, and goes on writing where they stopped. After a power
    cut every row that comes back is whole and in its place; rows flushed and not overwritten since are there.

    Args:
        max_size: steps that fit. With `ndim=2` it is rounded up to whole rows of environments.
        scratch_dir: a folder for the file.
        ndim: batch dimensions of the data; the last one is time.
        existsok: open the store that is in `scratch_dir` instead of refusing it.
        lanes: about how many processes append side by side; more are welcome. The ring is cut in some dozens of lanes,
            and a writer fills one after the other, each time that with the oldest steps: `max_size` steps are kept,
            whoever writes, and trajectories are cut where a writer moves on. None: any number take turns in one ring,
            an `extend` at a time, and slices end where another process wrote. 1: one process writes.
        device: "cpu" or "auto": a mapped file is memory of the CPU.
        compilable: accepted, without effect.
        auto_cleanup: delete the store in `scratch_dir` when this object is closed or collected, or its process ends (a
            kill leaves it), and the folder, if it was made for it. A store that another process has open then stays,
            and copies that are sent there delete nothing. None, False: it stays. A file without `scratch_dir` always
            goes.
        shared_init: processes that have it (forked, or sent) before the first write share it: the first of them that
            writes makes the file, the others use it. None of those that got it so deletes a store in `scratch_dir`.
        max_bytes: instead of `max_size`, the size that the file may have: a number, "80GB", "512MiB". As many steps as
            fit, which is known at the first write; until then `max_size` is None.
        compact: store observations once, as in a `LazyTensorStorage`; a store that is opened is as it was made.
        take_over: with `existsok`, open a store on a network file system that another node left open. Only where no
            process there uses it any more: rows that it left torn are dropped, as after a power cut.

    Raises:
        ValueError: another device.
        StorageError: there is a store in `scratch_dir` already; or, at the first write and with the numbers, the
            disk cannot hold it.

    Example:
        >>> import tempfile, torch
        >>> from tensordict import TensorDict
        >>> folder = tempfile.mkdtemp()
        >>> rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder))
        >>> _ = rb.extend(TensorDict({"x": torch.arange(6.0)}, [6]))
        >>> rb.storage.close()
        >>> again = LazyMemmapStorage.open(folder)
        >>> len(again), again[-1]["x"]
        (6, tensor(5.))
    """

    def __init__(
        self,
        max_size: int | None = None,
        scratch_dir: str | os.PathLike[str] | None = None,
        ndim: int = 1,
        existsok: bool = False,
        lanes: int | LaneCount | None = None,
        *,
        checkpointer: Any = None,
        device: torch.device | str = "cpu",
        compilable: bool = False,
        auto_cleanup: bool | None = None,
        shared_init: bool = False,
        max_bytes: int | str | None = None,
        take_over: bool = False,
        compact: bool | Key | list[Key] | Compact | None = None,
    ) -> None:
        if str(device) not in ("cpu", "cpu:0", "auto"):
            raise ValueError(
                f"device={device!r}: Memory map device other than CPU is not supported; move batches as they are read: "
                "rb.append_transform(lambda batch: batch.to(device))"
            )
        found = as_compact(compact)
        size = TableSize(max_size, max_bytes, ndim, lanes)
        self.scratch_dir = None if scratch_dir is None else user_path(scratch_dir)
        self._file: NamedFile | None = None
        opened: PackedRows | None = None
        if self.scratch_dir is not None:
            self._file = NamedFile(
                self.scratch_dir, take_over=take_over, auto_cleanup=bool(auto_cleanup), shared_init=shared_init
            )
            opened = _opened(self._file, size, existsok, found)
        if opened is None and not size.is_given:
            raise ValueError("max_size must be given, or max_bytes")
        if opened is not None:
            size.take(opened)
        place = self._file or _temporary(shared_init)
        self._hold_rows(Table(size, place, opened, found, advises=compact is None), checkpointer)

    get = TableStorage.get  # whose argument is `index`

    @classmethod
    def nbytes_for(cls, spec: Any, n: int, *, compact: bool | Key | list[Key] | Compact | None = None) -> int:
        """As `LazyTensorStorage.nbytes_for`, of a store in a folder, whose rows have 16 bytes more, for recovery.

        With `compact` each frame has 24 bytes more besides.
        """
        place = NamedFile(Path(), take_over=False, auto_cleanup=False, shared_init=False)
        return table_bytes(spec, n, place, as_compact(compact))

    @classmethod
    def open(
        cls,
        scratch_dir: str | os.PathLike[str],
        *,
        read_only: bool = False,
        take_over: bool = False,
        checkpointer: Any = None,
    ) -> LazyMemmapStorage | ObservedMemmapStorage:
        """The store in a folder, as it was left.

        Args:
            read_only: only read the rows, which other processes may be writing: an `ObservedMemmapStorage`.
            take_over: open a store on a network file system that another node left open, and does not use any more.

        Raises:
            StorageError: there is none, or its file is damaged.
            StorageInUseError: it is on a network file system, and another node may be using it.
            ValueError: `read_only` and `take_over`.
        """
        folder = user_path(scratch_dir)
        if read_only and take_over:
            raise ValueError("take_over=True opens a store for writing, read_only=True does not; give one of them")
        if read_only:
            return ObservedMemmapStorage(folder, checkpointer=checkpointer)
        return cls(None, scratch_dir=folder, existsok=True, take_over=take_over, checkpointer=checkpointer)

    @property
    def dropped(self) -> int:
        """Rows that a repair dropped when the store was opened."""
        return 0 if self._file is None else self._file.dropped

    # ---- life ----
    def cleanup(self) -> bool:
        """Deletes the store in `scratch_dir` now; this object may be read until it is closed.

        Returns False, and deletes nothing, where there is no store yet, or another process has it open.
        """
        with self.mutex:
            return self._file is not None and self._file.cleanup()


def _temporary(shared_init: bool) -> Place:
    return FirstWriters(TemporaryFile(), UnmadeStore(temporary=True)) if shared_init else TemporaryFile()


def _opened(file: NamedFile, size: TableSize, existsok: bool, compact: Compact | None) -> PackedRows | None:
    """The store that is in a folder; None: there is none, and one can be made."""
    if file.is_made():
        if not existsok:
            raise StorageError(
                f"{file.folder} holds a store already, which is never overwritten by accident: open it with "
                "LazyMemmapStorage.open(...) or existsok=True, or choose another scratch_dir"
            )
        opened = file.open(size)
        has = opened.observations
        wanted = None if compact is None else compact.paths
        if wanted is not None and set(wanted) != set({} if has is None else has.frames):
            file.close()
            raise StorageError(
                f"the store in {file.folder} keeps {'no observations' if has is None else has} once, "
                f"compact={compact!r} was asked for; LazyMemmapStorage.open takes it as it is"
            )
        return opened
    has_maps = has_memory_maps(file.folder)
    place, room = visible(file.folder), "" if size.given_size is None else f" --capacity {size.given_size}"
    reads = (
        f"To go on with its first N steps, `engram convert {place} NEW --to store --rows N{room}`, and "
        f"scratch_dir='NEW'; rb.loads({place!r}) takes over as many as have room, written or not"
    )
    if existsok and not size.is_given:
        missing = f"there is no store in {file.folder} (no file {FILE_NAME}), and no max_size to make one"
        raise StorageError(f"{missing}, but memory-mapped TensorDicts. {reads}" if has_maps else missing)
    if has_maps:
        warn_user(
            f"{place} holds memory-mapped TensorDicts, as TorchRL's LazyMemmapStorage writes them, and no store of "
            f"engram's: an empty one begins there. {reads}"
        )
    return None
