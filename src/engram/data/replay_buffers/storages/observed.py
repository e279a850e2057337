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
from engram.data.replay_buffers.files import FILE_NAME, open_store
from engram.data.replay_buffers.indexing import Selection
from engram.data.replay_buffers.lanes import Lanes
from engram.data.replay_buffers.layout import RowLayout
from engram.data.replay_buffers.locks import in_use
from engram.data.replay_buffers.rows import RowTable
from engram.data.replay_buffers.storages.base import Checked, Rows
from engram.data.replay_buffers.storages.frozen import FrozenRows
from engram.data.replay_buffers.storages.table import TableStorage
from engram.data.replay_buffers.utils import boot_id
from engram.errors import StorageError, StorageInUseError

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
