"""Storages in a mapped file: one that writes, and one that only reads what other processes write."""

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor

from engram._system import boot_id
from engram._text import log
from engram.data.replay_buffers.storages.base import Checked, NativeRows
from engram.data.replay_buffers.storages.tensor import LazyTensorStorage, TableStorage, saved_layout
from engram.errors import StorageError, StorageInUseError
from engram.store.files import (
    StoreSession,
    StoreSpec,
    create_named,
    is_passing_fds,
    open_temporary,
)
from engram.store.header import FILE_NAME, StoreFile
from engram.store.indexing import Selection
from engram.store.lanes import Lanes
from engram.store.layout import RowLayout
from engram.store.locks import LaneLocks
from engram.store.nodes import note_node
from engram.store.tables import Rows, RowTable
from engram.store.unmade import UnmadeStore
from engram.store.views import RowSnapshot

_T = TypeVar("_T")
_READ_TRIES = 500  # while rows are being changed in place: about two seconds
_MAX_PAUSE = 0.005  # seconds between two of them
_READ_ONLY = "this buffer was opened with read_only=True: it looks at the rows of others and writes nothing"


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

    read_only = True

    def __init__(self, scratch_dir: str | os.PathLike[str], *, checkpointer: Any = None) -> None:
        self.scratch_dir = Path(scratch_dir)
        opened = StoreFile.observed(self.scratch_dir)
        store, self._fd = opened.store, opened.fd
        store.advise_random()
        try:
            layout, env_shape, ndim = saved_layout(store)
        except (ValueError, KeyError, TypeError) as error:
            opened.close()
            raise StorageError(f"{opened.path} has no readable layout: {error}") from error
        super().__init__(None, ndim, checkpointer)
        self._env_shape, self._n_lanes = env_shape, store.lanes
        lanes = _ObservedLanes(store)
        self._take_table(lanes, RowTable(lanes, layout, mapped=True))
        self._requested_size = self._max_size
        self._frozen_at: int | None = None  # the incarnation of `freeze`

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
        self._frozen_at = None
        self._frozen_at = self._validated(self._freeze_lanes)

    def _freeze_lanes(self) -> int | None:
        if self._lanes is None:
            return None
        self._lanes.store.freeze()
        return self._lanes.store.incarnation

    # ---- reading ----
    def _validated(self, read: Callable[[], _T], errors_only: bool = False) -> _T:
        lanes = self._lanes
        if lanes is None:
            return read()
        for attempt in range(_READ_TRIES):
            before, error = lanes.store.epoch(), None
            if self._frozen_at not in (None, before[0]):
                raise StorageInUseError(
                    f"all rows of the store in {self.scratch_dir} were replaced while it was read; look at it again"
                )
            if errors_only or not any(n % 2 for n in before):
                # Rows that are being changed can cause any error: it counts only if they were not.
                try:
                    result = read()
                    if errors_only:
                        return result
                except (RuntimeError, ValueError, LookupError, ArithmeticError) as raised:
                    error = raised
                if lanes.store.epoch() == before and not any(n % 2 for n in before):
                    if error is not None:
                        raise error
                    return result
            time.sleep(min(_MAX_PAUSE, 1e-5 * attempt))
        raise StorageInUseError(
            f"the rows of the store in {self.scratch_dir} are being changed in place, or were left in the middle of a "
            f"change by a process that died: each of {_READ_TRIES} reads met a change. Try again, or open it once "
            "for writing"
        )

    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        sequences: bool = False,
    ) -> Rows:
        return self._validated(lambda: super(ObservedMemmapStorage, self).read(slots, shape, extra, sequences))

    def _bind(self) -> None:
        """Native calls validate what they read from the `source`; all else is validated or refused here."""
        super()._bind()
        self.native = NativeRows(self.native.source)

    def read_packed(self, slots: Tensor, by_leaf: bool = False, sequences: bool = False) -> Rows:
        table = self._table
        if not isinstance(table, RowTable):
            raise StorageError(f"the storage in {self.scratch_dir} was closed")
        return self._validated(lambda: table.read_packed(slots, by_leaf, sequences))

    def _settled(self, look: Callable[[], _T]) -> _T:
        return self._validated(look)

    def get(self, index: Any) -> Any:
        return self._validated(lambda: super(ObservedMemmapStorage, self).get(index))

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    @property
    def _storage(self) -> Any:
        """A copy of all rows, written or not: torch has no views of read-only memory."""
        return self._validated(lambda: super(ObservedMemmapStorage, self)._storage.clone())

    def rows_to_save(self, background: bool) -> Any:
        if background:
            raise StorageError(f"{_READ_ONLY}, and keeps nothing that others change meanwhile; save with blocking=True")
        table, lanes, layout = self._table, self._lanes, self.layout_state()
        if lanes is None or not isinstance(table, RowTable) or layout is None:
            raise StorageError(f"the store in {self.scratch_dir} has been closed")
        return self._validated(lambda: _ObservedRows(lanes, layout, self.counters(), table.layout))

    # ---- every write is refused ----
    def _make(self, layout: RowLayout, lane_capacity: int) -> NoReturn:
        raise StorageError(_READ_ONLY)

    def check(
        self, items: Any, single: bool, time_dim: int = 0, index_key: str | None = None, index: Tensor | None = None
    ) -> Checked:
        raise StorageError(_READ_ONLY)

    def overwrite(self, slots: Tensor, items: Any, index_key: str | None = None) -> None:
        raise StorageError(_READ_ONLY)

    def _set(self, selection: Selection, items: Any, index_key: str | None) -> None:
        raise StorageError(_READ_ONLY)

    def flush(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Ends the use of the store."""
        with self.mutex:
            if self._lanes is not None:
                self._set_table(None, None)
                os.close(self._fd)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # its constructor failed, or the interpreter ends
            self.close()

    @property
    def _pickled_by_path(self) -> bool:
        return True

    def _opening_arguments(self) -> dict[str, Any]:
        return {"scratch_dir": str(self.scratch_dir.absolute())}


class _ObservedLanes(Lanes):
    """Lanes that this process does not write to."""

    def hold(self, preferred: int | None = None) -> NoReturn:
        raise StorageError(_READ_ONLY)

    @contextlib.contextmanager
    def exclusive(self, operation: str) -> Iterator[None]:
        raise StorageError(_READ_ONLY)
        yield


class _ObservedRows(RowSnapshot):
    """The RowSource of a save: rows of the moment in which it was made; an error where they have changed since."""

    def __init__(self, lanes: Lanes, layout: dict[str, Any], counters: dict[str, Any], row_layout: RowLayout) -> None:
        self._epoch = lanes.store.epoch()
        super().__init__(lanes, layout, counters, row_layout, copy_on_write=False)

    def private_rows(self) -> None:
        """None: another process writes them."""

    def read_block(self, lane: int, start: int, stop: int) -> Any:
        block = super().read_block(lane, start, stop)
        if self._lanes.store.epoch() != self._epoch:
            raise StorageInUseError("rows were changed in place while they were saved; nothing was saved. Try again")
        return block


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
        lanes: how many processes may append side by side, each to a ring of its own of `max_size / lanes` steps: no
            more of one writer are kept. A new writer takes the free lane with the fewest steps. None: any number take
            turns in one ring, an `extend` at a time, and slices end where another process wrote.
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

    _is_mapped: ClassVar[bool] = True

    def __init__(
        self,
        max_size: int | None = None,
        scratch_dir: str | os.PathLike[str] | None = None,
        ndim: int = 1,
        existsok: bool = False,
        lanes: int | None = None,
        *,
        checkpointer: Any = None,
        device: torch.device | str = "cpu",
        compilable: bool = False,
        auto_cleanup: bool | None = None,
        shared_init: bool = False,
        max_bytes: int | str | None = None,
        take_over: bool = False,
    ) -> None:
        if str(device) not in ("cpu", "cpu:0", "auto"):
            raise ValueError(
                f"device={device!r}: Memory map device other than CPU is not supported; move batches as they are read: "
                "rb.append_transform(lambda batch: batch.to(device))"
            )
        TableStorage.__init__(self, max_size, ndim, checkpointer, lanes, max_bytes)
        self.device, self._takes_device = torch.device("cpu"), False
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self._takes_over = take_over
        self._auto_cleanup = bool(auto_cleanup)
        self._makes_folder = self.scratch_dir is not None and not self.scratch_dir.exists()
        self._remove: weakref.finalize[Any, Any] | None = None
        self._session: StoreSession | None = None
        self.dropped = 0
        self._shared_init = shared_init
        if self.scratch_dir is not None and StoreFile.is_in(self.scratch_dir):
            if not existsok:
                raise StorageError(
                    f"{self.scratch_dir} holds a store already, which is never overwritten by accident: open it with "
                    "LazyMemmapStorage.open(...) or existsok=True, or choose another scratch_dir"
                )
            self._open()
        elif max_size is None and max_bytes is None and existsok and self.scratch_dir is not None:
            raise StorageError(
                f"there is no store in {self.scratch_dir} (no file {FILE_NAME}), and no max_size to make one"
            )
        elif max_size is None and max_bytes is None:
            raise ValueError("max_size must be given, or max_bytes")
        elif shared_init and self.scratch_dir is None:
            self._unmade = UnmadeStore(temporary=True)

    get = TableStorage.get  # whose argument is `index`

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
        folder = Path(scratch_dir)
        if read_only and take_over:
            raise ValueError("take_over=True opens a store for writing, read_only=True does not; give one of them")
        if read_only:
            return ObservedMemmapStorage(folder, checkpointer=checkpointer)
        return cls(None, scratch_dir=folder, existsok=True, take_over=take_over, checkpointer=checkpointer)

    # ---- making and opening ----
    def _make(self, layout: RowLayout, lane_capacity: int) -> tuple[Lanes, RowTable]:
        spec = self._spec(layout, lane_capacity, math.prod(self._env_shape))
        if self.scratch_dir is None:
            log.info("mapped storage in a temporary file: %s", spec)
            if self._unmade is not None:
                store, locks = self._unmade.open_or_make(spec)
                store.advise_random()
                return self._table_of_shared(store, locks, layout)
            fd = open_temporary(spec)
            store = spec.create_in(fd)
            store.advise_random()
            lanes = Lanes(store, LaneLocks(fd), turns=self._given_lanes is None)
            return lanes, RowTable(lanes, layout, mapped=True)
        if create_named(self.scratch_dir, spec, _start_header):
            log.info("mapped storage in %s: %s", self.scratch_dir, spec)
        return self._open_file(layout)

    def _spec(self, layout: RowLayout, lane_capacity: int, envs: int) -> StoreSpec:
        named = self.scratch_dir is not None
        dimensions = self._dimensions if named or self._unmade is not None else None
        return StoreSpec(layout, self._n_lanes, lane_capacity, envs, trailer=named, layout_extra=dimensions)

    def _bytes_of(self, layout: RowLayout, lane_capacity: int, envs: int) -> int:
        return self._spec(layout, lane_capacity, envs).total_bytes

    def _open_file(self, layout: RowLayout | None) -> tuple[Lanes, RowTable]:
        """Opens the file, whichever process made it; its layout must be this one."""
        assert self.scratch_dir is not None
        session = StoreSession(self.scratch_dir, self._takes_over)
        try:
            lanes, table = self._table_of(session, layout)
        except BaseException:
            session.locks.close()
            raise
        self._session, self.dropped = session, session.dropped
        if self._auto_cleanup:
            folder = self.scratch_dir.absolute() if self._makes_folder else None
            self._remove = weakref.finalize(self, _remove_store, session, folder, os.getpid())
        return lanes, table

    def _table_of(self, session: StoreSession, layout: RowLayout | None) -> tuple[Lanes, RowTable]:
        assert self.scratch_dir is not None
        try:
            saved, env_shape, ndim = saved_layout(session.store)
            differences = [] if layout is None else layout.differences(saved)
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{self.scratch_dir / FILE_NAME} has no readable layout: {error}") from error
        if layout is None:
            self.ndim, self._env_shape = ndim, env_shape
        elif differences or env_shape != self._env_shape:
            raise StorageError(
                f"another process made a different store in {self.scratch_dir}: {'; '.join(differences)}"
            )
        else:
            saved.take_form(layout)  # which may have a tensorclass, unnamed in the file
        session.store.advise_random()
        turns = self._given_lanes is None
        lanes = Lanes(session.store, session.locks, session.on_take, session.on_exclusive, turns)
        return lanes, RowTable(lanes, saved, mapped=True)

    def _open(self) -> None:
        max_size, ndim, n_lanes = self._max_size, self.ndim, self._n_lanes
        lanes, table = self._open_file(None)
        self._n_lanes = lanes.store.lanes
        if self._n_lanes > 1:
            self._given_lanes = self._n_lanes
        if max_size is not None or self._max_bytes is not None:
            differences = []
            if max_size is not None and lanes.capacity not in range(max_size, max_size + self._n_lanes * lanes.envs):
                differences.append(f"room for {lanes.capacity} steps, max_size={max_size} was asked for")
            if max_size is None and lanes.store.lane_capacity != self._new_lane_capacity(table.layout, lanes.envs):
                differences.append(f"{lanes.store.total_bytes} bytes, max_bytes={self._max_bytes} was asked for")
            if ndim != self.ndim:
                differences.append(f"ndim={self.ndim}, ndim={ndim} was asked for")
            if n_lanes != self._n_lanes:
                differences.append(f"lanes={self._n_lanes}, lanes={n_lanes} was asked for")
            if differences:
                assert lanes.locks is not None
                lanes.locks.close()
                raise StorageError(
                    f"the store in {self.scratch_dir} has {'; '.join(differences)}; "
                    "LazyMemmapStorage.open takes it as it is"
                )
        self._take_table(lanes, table)
        self._requested_size = lanes.capacity

    def _join_made(self) -> None:
        if self.scratch_dir is None:
            super()._join_made()
            return
        with self._make_lock:
            if self._table is None and StoreFile.is_in(self.scratch_dir):
                self._open()

    def _after_fork(self) -> None:
        super()._after_fork()
        if self._shared_init and self._lanes is None:
            self._auto_cleanup = False  # the parent deletes what this process may make

    def _warn_of_copy(self) -> None:
        if self.scratch_dir is None:  # else the first write makes a file that both processes use
            super()._warn_of_copy()

    def _remove_table(self) -> bool:
        # A named file stays: other processes may have it open by now.
        return self.scratch_dir is None and super()._remove_table()

    def _share(self) -> None:
        """Nothing to do: a mapped file is shared."""

    # ---- life ----
    def flush(self) -> None:
        """Makes the rows appended so far survive a power cut. Costs a sync of the disk.

        Raises:
            StorageError: the disk failed, and no row counts as flushed that did not before. The next call writes all
                of them again; it fails, too, where the system has dropped one meanwhile.
        """
        if self._session is not None:
            self._session.flush()

    def close(self) -> None:
        """Syncs the rows and ends the use of the store; what was written is there for `open`."""
        self._shared_init, self._unmade = False, None
        if self._lanes is None:
            return
        with self.mutex:
            try:
                if self._remove is not None:
                    self._remove()
                if self._session is not None:
                    self._session.close()
            finally:
                self._lanes.close()
                self._set_table(None, None)
                self._session = self._remove = None

    def cleanup(self) -> bool:
        """Deletes the store in `scratch_dir` now; this object may be read until it is closed.

        Returns False, and deletes nothing, where there is no store yet, or another process has it open.
        """
        if self._session is None or self.scratch_dir is None:
            return False
        with self.mutex:
            if self._remove is not None:
                self._remove.detach()
                self._remove = None
            folder = self.scratch_dir.absolute() if self._makes_folder else None
            return _remove_store(self._session, folder, os.getpid())

    def _copy_arguments(self) -> dict[str, Any]:
        # A copy's file is temporary: no second store is made in the same folder.
        return {
            **self._size_arguments(), "ndim": self.ndim, "lanes": self._given_lanes, "shared_init": self._shared_init,
        }  # fmt: skip

    @property
    def _pickled_by_path(self) -> bool:
        return self.scratch_dir is not None

    def _opening_arguments(self) -> dict[str, Any] | None:
        if self.scratch_dir is None:
            return None
        folder = {"scratch_dir": str(self.scratch_dir.absolute()), "existsok": True}
        if self.lanes is None and (self._shared_init or not is_passing_fds()):
            return {**self._copy_arguments(), **folder}
        self._made_locks()
        return {**folder, "lanes": self._given_lanes}

    def _sent_arguments(self) -> dict[str, Any]:
        if self.lanes is None and self._unmade is not None:
            return {**self._copy_arguments(), "shared_init": False}
        self._made_locks()
        return {"max_size": self._max_size, "ndim": self.ndim, "lanes": self._given_lanes}

    def _arguments_of_older(self, state: dict[str, Any]) -> dict[str, Any]:
        given = state.get("unmade") or {"scratch_dir": state["scratch_dir"], "lanes": state.get("lanes")}
        return {**given, "existsok": True}


def _remove_store(session: StoreSession, folder: Path | None, process: int) -> bool:
    """Deletes a store that nobody else has open, and its folder where it was made for it; not in a forked child."""
    if os.getpid() != process or not session.remove():
        return False
    if folder is not None:
        with contextlib.suppress(OSError):  # other files are in it
            folder.rmdir()
    return True


def _start_header(store: Any) -> None:
    note_node(store, boot_id())
    store.clean = True  # nothing in it yet
