"""A mapped store that this process only looks at, beside whoever writes to it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from engram import _native
from engram._system import boot_id
from engram.data.replay_buffers.storages.base import Checked, Rows, log
from engram.data.replay_buffers.storages.tensor import TableStorage
from engram.errors import StorageError, StorageInUseError
from engram.store.files import (
    FILE_NAME,
    Session,
    StoreSize,
    create_named,
    has_store,
    is_sent,
    open_session,
    open_store,
    open_temporary,
    share_descriptor,
    store_of_descriptor,
)
from engram.store.indexing import Selection
from engram.store.lanes import Lanes
from engram.store.layout import RowLayout
from engram.store.locks import LaneLocks, in_use
from engram.store.tables import RowTable
from engram.store.views import FrozenRows

_T = TypeVar("_T")
_TRIES = 500  # of reading what is being changed in place: about two seconds
_LONGEST_PAUSE = 0.005
_NOT_WRITTEN = "this buffer was opened with read_only=True: it looks at the rows of others and writes nothing"


class ObservedMemmapStorage(TableStorage):
    """What `LazyMemmapStorage.open(folder, read_only=True)` gives: the rows of a store that others may be writing.

    The file is mapped read-only, also on a read-only file system. An observer takes no lock and no lane, repairs
    nothing, and is in nobody's way: the job beside it may append, and do what needs the store alone. What was read is
    believed if no row was changed in place meanwhile, and neither `empty` nor `loads` ran; else it is read again.

    Raises:
        StorageError: there is no store, its file is damaged, or it was left in the middle of a change, or by a machine
            that stopped: open it once for writing, which mends it.
        StorageInUseError: rows were changed all the time while this process tried to read.
    """

    read_only = True

    def __init__(self, scratch_dir: str | os.PathLike[str], *, checkpointer: Any = None) -> None:
        self.scratch_dir = Path(scratch_dir)
        store, fd = _observed(self.scratch_dir)
        self._fd = fd
        try:
            made = json.loads(store.layout)
            layout = RowLayout.from_json(made)
            inner, ndim = tuple(int(d) for d in made["inner"]), int(made["ndim"])
        except (ValueError, KeyError, TypeError) as error:
            os.close(fd)
            raise StorageError(f"{self.scratch_dir / FILE_NAME} has no readable layout: {error}") from error
        super().__init__(None, ndim, checkpointer)
        lanes = _ObservedLanes(store)
        lanes.mutex = self.mutex
        self._inner, self._n_lanes = inner, store.lanes
        self._lanes, self._table = lanes, RowTable(lanes, layout, mapped=True)
        self._max_size = self._asked_size = lanes.capacity

    # ---- reading ----
    def believed(self, read: Callable[[], _T], only_errors: bool = False) -> _T:
        lanes = self._lanes
        if lanes is None:
            return read()
        for attempt in range(_TRIES):
            before, error = lanes.store.epoch(), None
            if only_errors or not any(n % 2 for n in before):
                # Of rows that move anything can seem wrong: an error counts only if they stood still.
                try:
                    found = read()
                    if only_errors:
                        return found
                except (RuntimeError, ValueError, LookupError, ArithmeticError) as raised:
                    error = raised
                if lanes.store.epoch() == before and not any(n % 2 for n in before):
                    if error is not None:
                        raise error
                    return found
            time.sleep(min(_LONGEST_PAUSE, 1e-5 * attempt))
        raise StorageInUseError(
            f"the rows of the store in {self.scratch_dir} are being changed in place, or were left in the middle of a "
            f"change by a process that died; nothing could be believed in {_TRIES} tries. Try again, or open it once "
            "for writing"
        )

    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        numbers: bool = False,
    ) -> Rows:
        return self.believed(lambda: super(ObservedMemmapStorage, self).read(slots, shape, extra, numbers))

    def read_with(self, others: list[Any], slots: Tensor, shape: tuple[int, ...], *how: Any, **more: Any) -> None:
        """None: rows of others are read alone."""

    def settled(self, look: Callable[[], _T]) -> _T:
        return self.believed(look)

    def get(self, index: Any) -> Any:
        return self.believed(lambda: super(ObservedMemmapStorage, self).get(index))

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    @property
    def _storage(self) -> Any:
        """A copy of all rows, written or not: a view of a read-only map could not be handed out."""
        return self.believed(lambda: super(ObservedMemmapStorage, self)._storage.clone())

    @contextlib.contextmanager
    def still(self) -> Iterator[Any]:
        table, lanes, layout = self._table, self._lanes, self.layout_state()
        if lanes is None or not isinstance(table, RowTable) or layout is None:
            raise StorageError(f"the store in {self.scratch_dir} has been closed")
        yield self.believed(lambda: _ObservedRows(lanes, layout, self.counters(), table.layout.payload_bytes))

    def freeze(self) -> Any:
        raise StorageError(f"{_NOT_WRITTEN}, and keeps nothing that others change meanwhile; save with blocking=True")

    # ---- nothing is written ----
    def _make(self, layout: RowLayout, lane_capacity: int) -> NoReturn:
        raise StorageError(_NOT_WRITTEN)

    def check(
        self, items: Any, single: bool, time_dim: int = 0, index_key: str | None = None, index: Tensor | None = None
    ) -> Checked:
        raise StorageError(_NOT_WRITTEN)

    def overwrite(self, slots: Tensor, items: Any, index_key: str | None = None) -> None:
        raise StorageError(_NOT_WRITTEN)

    def _set(self, selection: Selection, items: Any, index_key: str | None) -> None:
        raise StorageError(_NOT_WRITTEN)

    def flush(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Ends the use of the store."""
        with self.mutex:
            if self._lanes is not None:
                self._lanes = self._table = None
                os.close(self._fd)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # it was never made, or the interpreter ends
            self.close()

    @property
    def travels_by_path(self) -> bool:
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {"scratch_dir": str(self.scratch_dir.absolute())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["scratch_dir"])  # type: ignore[misc]


class _ObservedLanes(Lanes):
    """Lanes of which this process holds none."""

    def hold(self) -> NoReturn:
        raise StorageError(_NOT_WRITTEN)

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        raise StorageError(_NOT_WRITTEN)
        yield


class _ObservedRows(FrozenRows):
    """The RowSource of a save: what is read of it is of the moment in which it was made, or an error."""

    def __init__(self, lanes: Lanes, layout: dict[str, Any], counters: dict[str, Any], row_bytes: int) -> None:
        self._epoch = lanes.store.epoch()
        super().__init__(lanes, layout, counters, row_bytes, beside=False)

    def read_block(self, lane: int, start: int, stop: int) -> Any:
        block = super().read_block(lane, start, stop)
        if self._lanes.store.epoch() != self._epoch:
            raise StorageInUseError("rows were changed in place while they were saved; nothing was saved. Try again")
        return block


def _observed(folder: Path) -> tuple[_native.Store, int]:
    """The store in a folder, mapped read-only, and its descriptor."""
    path = folder / FILE_NAME
    fd, _ = open_store(folder, os.O_RDONLY)
    try:
        store = _native.Store.open(fd, read_only=True)
        _refuse_unmended(store, fd, path)
    except (RuntimeError, ValueError) as error:
        os.close(fd)
        raise StorageError(f"{path} cannot be opened: {error}") from error
    except BaseException:
        os.close(fd)
        raise
    store.advise_random()
    return store, fd


def _refuse_unmended(store: _native.Store, fd: int, path: Path) -> None:
    """A store that was left in the middle of something is mended by who writes to it, not by who looks at it."""
    now = boot_id()
    used = in_use(fd)
    known = any(now) and any(store.boot_id)
    stopped = not store.clean and (store.boot_id != now if known else not used)
    halfway = store.interrupted or any(n % 2 for n in store.epoch())
    if stopped or (halfway and not used):
        why = "the machine stopped while it was written" if stopped else "a process died in the middle of a change"
        raise StorageError(f"{path}: {why}. Open it once for writing, which mends it")


class LazyMemmapStorage(TableStorage):
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
        lanes: how many processes may append.

    Raises:
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
        max_size: int | None,
        scratch_dir: str | os.PathLike[str] | None = None,
        ndim: int = 1,
        existsok: bool = False,
        lanes: int = 1,
        *,
        checkpointer: Any = None,
    ) -> None:
        super().__init__(max_size, ndim, checkpointer, lanes)
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self._session: Session | None = None
        self.dropped = 0
        if self.scratch_dir is not None and has_store(self.scratch_dir):
            if not existsok:
                raise StorageError(
                    f"{self.scratch_dir} holds a store already, which is never overwritten by accident: open it with "
                    "LazyMemmapStorage.open(...) or existsok=True, or choose another scratch_dir"
                )
            self._open()
        elif max_size is None and existsok and self.scratch_dir is not None:
            raise StorageError(
                f"there is no store in {self.scratch_dir} (no file {FILE_NAME}), and no max_size to make one"
            )
        elif max_size is None:
            raise ValueError("max_size must be given")

    @classmethod
    def open(
        cls, scratch_dir: str | os.PathLike[str], *, read_only: bool = False, checkpointer: Any = None
    ) -> LazyMemmapStorage | ObservedMemmapStorage:
        """The store in a folder, as it was left.

        Args:
            read_only: look at the rows only, beside whoever writes: an `ObservedMemmapStorage`.

        Raises:
            StorageError: there is none, or its file is damaged.
        """
        folder = Path(scratch_dir)
        if read_only:
            return ObservedMemmapStorage(folder, checkpointer=checkpointer)
        return cls(None, scratch_dir=folder, existsok=True, checkpointer=checkpointer)

    # ---- making and opening ----
    def _make(self, layout: RowLayout, lane_capacity: int) -> tuple[Lanes, RowTable]:
        strands = 1
        for d in self._inner:
            strands *= d
        size = StoreSize(layout, self._n_lanes, lane_capacity, strands, trailer=self.scratch_dir is not None)
        if self.scratch_dir is None:
            fd = open_temporary(size)
            log.info("mapped storage in a temporary file: %s", size)
            store = size.create_in(fd)
            store.advise_random()
            lanes = Lanes(store, LaneLocks(fd))
            return lanes, RowTable(lanes, layout, mapped=True)
        with_extras = _Extras(size, self._inner, self.ndim)
        if create_named(self.scratch_dir, with_extras.size, _start_header):
            log.info("mapped storage in %s: %s", self.scratch_dir, size)
        return self._join(layout)

    def _join(self, layout: RowLayout | None) -> tuple[Lanes, RowTable]:
        """Opens the file, whoever made it; its layout must be this one."""
        assert self.scratch_dir is not None
        session = open_session(self.scratch_dir)
        try:
            lanes, table = self._joined(session, layout)
        except BaseException:
            session.locks.close()
            raise
        self._session, self.dropped = session, session.dropped
        return lanes, table

    def _joined(self, session: Session, layout: RowLayout | None) -> tuple[Lanes, RowTable]:
        assert self.scratch_dir is not None
        try:
            made = json.loads(session.store.layout)
            found = RowLayout.from_json(made)
            inner, ndim = tuple(int(d) for d in made["inner"]), int(made["ndim"])
            different = [] if layout is None else layout.differences(found)
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{self.scratch_dir / FILE_NAME} has no readable layout: {error}") from error
        if layout is None:
            self.ndim, self._inner = ndim, inner
        elif different or inner != self._inner:
            raise StorageError(f"another process made a different store in {self.scratch_dir}: {'; '.join(different)}")
        if layout is not None:
            found.take_form(layout)  # it may know a tensorclass, which no file names
        session.store.advise_random()
        lanes = Lanes(session.store, session.locks, on_take=session.on_take, on_alone=session.on_alone)
        return lanes, RowTable(lanes, found, mapped=True)

    def _open(self) -> None:
        asked, asked_ndim, asked_lanes = self._max_size, self.ndim, self._n_lanes
        lanes, table = self._join(None)
        self._n_lanes = lanes.store.lanes
        if asked is not None:
            said = []
            if lanes.capacity not in range(asked, asked + self._n_lanes * lanes.strands):
                said.append(f"room for {lanes.capacity} steps, max_size={asked} was asked for")
            if asked_ndim != self.ndim:
                said.append(f"ndim={self.ndim}, ndim={asked_ndim} was asked for")
            if asked_lanes != self._n_lanes:
                said.append(f"lanes={self._n_lanes}, lanes={asked_lanes} was asked for")
            if said:
                assert lanes.locks is not None
                lanes.locks.close()
                raise StorageError(
                    f"the store in {self.scratch_dir} has {'; '.join(said)}; LazyMemmapStorage.open takes it as it is"
                )
        lanes.mutex = self.mutex
        self._lanes, self._table = lanes, table
        self._max_size = self._asked_size = lanes.capacity

    def _tell_of_copy(self) -> None:
        if self.scratch_dir is None:  # else whoever writes first makes the file for all
            super()._tell_of_copy()

    def _unmake(self) -> bool:
        # A named file stays: other processes may have it open by now.
        return self.scratch_dir is None and super()._unmake()

    # ---- life ----
    def flush(self) -> None:
        """Rows appended so far survive a power cut. Costs a sync of the disk.

        Raises:
            StorageError: the disk failed, and no row counts as flushed that did not before. The next call writes all
                of them again; it fails, too, where the system has dropped one meanwhile.
        """
        if self._session is not None:
            self._session.flush()

    def close(self) -> None:
        """Syncs the rows and ends the use of the store; what was written is there for `open`."""
        if self._lanes is None:
            return
        with self.mutex:
            try:
                if self._session is not None:
                    self._session.close()
            finally:
                self._lanes.close()
                self._lanes = self._table = self._session = None

    def settings(self) -> dict[str, Any]:
        """A copy's file is temporary: no second store is made in the same folder."""
        return {"max_size": self._asked_size, "ndim": self.ndim, "lanes": self._n_lanes}

    @property
    def travels_by_path(self) -> bool:
        return self.scratch_dir is not None

    def __getstate__(self) -> dict[str, Any]:
        if self.scratch_dir is not None and self._lanes is None and not is_sent():
            return {"unmade": {**self.settings(), "scratch_dir": str(self.scratch_dir.absolute())}}
        if self._lanes is None or self._lanes.locks is None:
            raise StorageError(
                "the storage has not been initialized: write its first batch before sending it to another process"
            )
        state: dict[str, Any] = {"inner": self._inner, "ndim": self.ndim}
        if self.scratch_dir is not None:
            return {**state, "scratch_dir": str(self.scratch_dir.absolute())}
        return {**state, "descriptor": share_descriptor(self._lanes.locks.fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "unmade" in state:
            self.__init__(**state["unmade"], existsok=True)  # type: ignore[misc]
            return
        if "scratch_dir" in state:
            self.__init__(None, scratch_dir=state["scratch_dir"], existsok=True)  # type: ignore[misc]
            return
        store, locks, layout = store_of_descriptor(state["descriptor"])
        self.__init__(store.lanes * store.lane_capacity, ndim=state["ndim"])  # type: ignore[misc]
        store.advise_random()
        lanes = Lanes(store, locks)
        lanes.mutex = self.mutex
        self._n_lanes, self._inner, self._lanes = store.lanes, state["inner"], lanes
        self._table = RowTable(lanes, layout, mapped=True)
        self._max_size = self._asked_size = lanes.capacity


class _Extras:
    """The size of a named store, whose layout also says how its dimensions are meant."""

    def __init__(self, size: StoreSize, inner: tuple[int, ...], ndim: int) -> None:
        made = {**json.loads(size.layout_bytes), "inner": list(inner), "ndim": ndim}
        size.layout_bytes = json.dumps(made, separators=(",", ":")).encode()
        self.size = size


def _start_header(store: Any) -> None:
    store.boot_id = boot_id()
    store.clean = True  # nothing in it yet
