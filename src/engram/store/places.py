"""Places for rows: private memory, memory that processes share, files. Each makes a new table there, or opens one."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import json
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

import engram._native as _native
from engram._checks import count
from engram._copies import is_passing_fds
from engram._system import boot_id, parse_bytes
from engram._text import log
from engram.errors import StorageError, StorageInUseError
from engram.specs.tensors import usable_device
from engram.store.columnar_rows import ColumnarRows
from engram.store.compact_rows import CompactRows
from engram.store.files import (
    StoreSession,
    StoreSpec,
    create_named,
    open_shared_memory,
    open_temporary,
    refuse_if_memory_is_short,
)
from engram.store.header import FILE_NAME, StoreFile
from engram.store.lanes import Lanes
from engram.store.layout import ObservationKeys, RowLayout, StoredLayout
from engram.store.locks import LaneLocks
from engram.store.nodes import note_node
from engram.store.packed_rows import PackedRows
from engram.store.rows import READ_ONLY, TableRows, check_envs

NOT_SENT = (
    "which belongs to its process; LazyTensorStorage(shared=True) and LazyMemmapStorage can be sent to others, and "
    "dumps and loads copy any"
)
_MAX_SIZE = 1 << 56
_USUAL_LANES, _MOST_LANES = 64, 256  # more of them cost time at each extend and draw
_LONG_LANE = 1550  # steps, so that a seam cuts at most 2 % of slices of 32 steps
_SHORT_LANE = 1024  # steps: where as many lanes as writers are no shorter, there are no more of them
_MOST_DIMS = 64  # of a batch: more than tensors have
_READ_TRIES = 500  # while rows are being changed in place: about two seconds
_MAX_PAUSE = 0.005  # seconds between two of them
_T = TypeVar("_T")


def checked_max_size(max_size: Any) -> int | None:
    """A number of steps as an int; None: no limit. ValueError: it is none."""
    if max_size is None:
        return None
    steps = count(max_size, "max_size")
    if steps > _MAX_SIZE:
        raise ValueError(f"max_size must be an integer from 1 to 2**56, got {max_size!r}")
    return steps


def memory_device(device: torch.device | str) -> torch.device:
    """The device for rows. ValueError, TypeError: no rows can be kept there."""
    usable = usable_device(device, "device")
    if usable is None or usable.type == "meta":
        raise ValueError(f"device={device!r}: a storage keeps its rows in memory, 'cpu' or that of a GPU")
    return usable


@dataclasses.dataclass(frozen=True)
class LaneCount:
    """So many lanes of a store, in the place of `lanes=n`: as a store has them that exists.

    Attributes:
        writers: n, if known.
        tells_writers: whether a new store tells whose rows it has.
    """

    lanes: int
    writers: int | None = None
    tells_writers: bool = True

    def open(
        self,
        store: _native.Store,
        locks: LaneLocks,
        on_take: Callable[[int | None], None] | None,
        on_exclusive: Callable[[], None] | None,
    ) -> Lanes:
        """The lanes of a store that processes share."""
        return Lanes(store, locks, on_take, on_exclusive, turns=True)

    def __index__(self) -> int:
        """The `lanes=n` of a storage that is as good."""
        return self.lanes if self.writers is None else self.writers


def lanes_for(writers: int, max_size: int) -> int:
    """How many lanes so many writers side by side move between, in a store of about so many steps.

    Example:
        >>> lanes_for(1, 1_000_000), lanes_for(8, 1_000_000), lanes_for(8, 100_000), lanes_for(8, 1000)
        (1, 64, 50, 20)
    """
    if writers == 1:
        return 1
    most = min(_MOST_LANES, max_size)
    if max_size // writers >= _SHORT_LANE:
        most = min(most, max(writers, max_size // _LONG_LANE))
    suitable = min(most, max(2 * writers, min(_USUAL_LANES, max_size // _LONG_LANE)))
    near = [n for n in range(max(2, suitable // 2), min(most, 2 * suitable) + 1) if max_size % n == 0]
    return min(near, key=lambda n: (abs(n - suitable), n), default=max(1, suitable))


def open_lanes(
    store: _native.Store,
    locks: LaneLocks,
    given_lanes: int | LaneCount | None,
    on_take: Callable[[int | None], None] | None = None,
    on_exclusive: Callable[[], None] | None = None,
) -> Lanes:
    """The lanes of a store that processes share, for a storage with these `lanes=`."""
    if isinstance(given_lanes, LaneCount):
        return given_lanes.open(store, locks, on_take, on_exclusive)
    return Lanes(store, locks, on_take, on_exclusive, turns=given_lanes != 1)


class TableSize:
    """How many steps a table has room for, and in how many lanes.

    Args:
        max_size: steps; rounded up to as many for each lane.
        max_bytes: instead, what header and rows may take.
        ndim: batch dimensions of the data.
        lanes: about how many processes append side by side; 1: one does; None: they take turns in one lane.

    Raises:
        ValueError: a setting that is not allowed.
    """

    def __init__(self, max_size: Any, max_bytes: int | str | None, ndim: int, lanes: int | LaneCount | None) -> None:
        size = checked_max_size(max_size)
        if max_size is not None and max_bytes is not None:
            raise ValueError(f"max_size={max_size} and max_bytes={max_bytes!r} were given; give one of them")
        self.max_bytes = None if max_bytes is None else parse_bytes(max_bytes, "max_bytes")
        ndim = count(ndim, "ndim")
        if lanes is not None and not isinstance(lanes, LaneCount):
            lanes = count(lanes, "lanes")
        n = 1 if lanes is None else lanes.lanes if isinstance(lanes, LaneCount) else lanes
        if n > 1 and ndim > 1:
            raise ValueError(f"lanes must be 1 with ndim={ndim}: got {n}")
        self.ndim, self.given_lanes, self.given_size, self._writers = ndim, lanes, size, n
        #: Whether writers of a table of this size move from lane to lane, of which it may have any number.
        self.moves_on = n > 1 and not isinstance(lanes, LaneCount)
        #: How many lanes a new table has; with `max_bytes` at first as many as there are writers.
        self.lanes = n if size is None or isinstance(lanes, LaneCount) else lanes_for(n, size)
        self.max_size = None if size is None else -(-size // self.lanes) * self.lanes

    @property
    def is_given(self) -> bool:
        """Whether a table can be made of it."""
        return self.max_size is not None or self.max_bytes is not None

    def take(self, opened: TableRows) -> None:
        """Takes over the size of rows that were opened as they are."""
        self.ndim, self.lanes = opened.ndim, opened.lanes.store.lanes
        if self.lanes > 1 and not isinstance(self.given_lanes, LaneCount):
            self.given_lanes, self.moves_on = LaneCount(self.lanes), False
        self.max_size = opened.lanes.capacity

    def differences(self, opened: TableRows, place: Place) -> list[str]:
        """What rows that were opened have other than this says."""
        lanes, store, found = opened.lanes, opened.lanes.store, []
        most = max(self.lanes, store.lanes) * lanes.envs
        if self.given_size is not None and lanes.capacity not in range(self.given_size, self.given_size + most):
            found.append(f"room for {lanes.capacity} steps, max_size={self.given_size} was asked for")
        if self.max_size is None and opened.layout is not None:
            wanted = self.lane_capacity(opened.layout, opened.env_shape, place, lanes=store.lanes)
            if store.lane_capacity != wanted:
                found.append(f"{store.total_bytes} bytes, max_bytes={self.max_bytes} was asked for")
        if self.ndim != opened.ndim:
            found.append(f"ndim={opened.ndim}, ndim={self.ndim} was asked for")
        if self.lanes != store.lanes and not (self.moves_on and store.lanes > 1):
            found.append(f"lanes={store.lanes}, lanes={self._writers} was asked for")
        return found

    def fit(
        self,
        layout: RowLayout,
        env_shape: tuple[int, ...],
        place: Place,
        saved_lanes: int = 0,
        observations: ObservationKeys | None = None,
    ) -> tuple[int, int]:
        """The lanes of a new table, and time steps of each.

        Args:
            saved_lanes: of rows that it is made for; 0: for none.
            observations: those that are stored once.

        Raises:
            StorageError: not one step of each lane fits into `max_bytes`.
        """
        lanes = self.lanes
        if self.moves_on and saved_lanes > 1:
            lanes = saved_lanes
        elif self.moves_on and self.max_bytes is not None:
            lanes = lanes_for(lanes, lanes * self.lane_capacity(layout, env_shape, place, None, observations))
        return lanes, self.lane_capacity(layout, env_shape, place, lanes, observations)

    def lane_capacity(
        self,
        layout: RowLayout,
        env_shape: tuple[int, ...],
        place: Place,
        lanes: int | None = None,
        observations: ObservationKeys | None = None,
    ) -> int:
        """Time steps of a lane of a new table. StorageError: not one fits into `max_bytes`."""
        n, envs = self.lanes if lanes is None else lanes, math.prod(env_shape)
        if self.max_bytes is None:
            return math.ceil((self.given_size or self.max_size or 0) / (n * envs))

        def needed(steps: int) -> int:
            return place.bytes_of(NewTable(layout, env_shape, self.ndim, n, steps, self.given_lanes, observations))

        row_bytes = StoredLayout(layout, observations).row_bytes
        fit, too_many = 0, self.max_bytes // max(n * envs * row_bytes, 1) + 1
        while too_many - fit > 1:  # the space between header and rows grows with their number
            steps = (fit + too_many) // 2
            if needed(steps) > self.max_bytes:
                too_many = steps
            else:
                fit = steps
        if not fit:
            raise StorageError(
                f"max_bytes={self.max_bytes} is less than the {needed(1)} bytes that a storage "
                f"of one step{' of each environment' * (envs > 1)}{' in each lane' * (n > 1)} needs"
            )
        return fit

    def arguments(self, made: Lanes | None) -> dict[str, Any]:
        """Those of a constructor for as much room, of which the table may be made already."""
        rest = {"ndim": self.ndim, "lanes": self.given_lanes}
        if made is not None and self.moves_on:
            rest["lanes"] = LaneCount(made.store.lanes, self._writers)
        if self.max_size is None and made is None:
            return {"max_size": None, "max_bytes": self.max_bytes, **rest}
        return {"max_size": made.capacity if self.max_size is None and made is not None else self.max_size, **rest}


class NewTable(NamedTuple):
    """The table that a place is to make."""

    layout: RowLayout
    env_shape: tuple[int, ...]
    ndim: int
    lanes: int
    lane_capacity: int
    given_lanes: int | LaneCount | None
    observations: ObservationKeys | None = None  # that are stored once

    def spec(self, *, trailer: bool = False, with_dimensions: bool = False) -> StoreSpec:
        """The store of such a table; `with_dimensions` for processes that open it knowing nothing else."""
        dimensions = {"inner": list(self.env_shape), "ndim": self.ndim} if with_dimensions else None
        envs = math.prod(self.env_shape)
        extents = self.lanes > 1 and (not isinstance(self.given_lanes, LaneCount) or self.given_lanes.tells_writers)
        spec = self.layout, self.lanes, self.lane_capacity, envs, trailer, dimensions, extents
        return StoreSpec(*spec, observations=self.observations)


def saved_layout(store: _native.Store) -> tuple[StoredLayout, tuple[int, ...], int]:
    """The layout of a store's rows, the shape of its environments, and its ndim; any error: they are damaged."""
    saved = json.loads(store.layout)
    stored, inner, ndim = StoredLayout.from_json(saved), tuple(saved["inner"]), saved["ndim"]
    if any(type(n) is not int for n in (*inner, ndim)) or math.prod(inner) != store.envs or not 0 <= ndim <= _MOST_DIMS:
        raise ValueError(f"its rows are of environments {list(inner)!r:.80} and {ndim!r:.80} dimensions")
    if stored.row_bytes != store.payload_bytes:
        raise ValueError(f"its rows have {stored.row_bytes} bytes, those of the store {store.payload_bytes}")
    return stored, inner, ndim


def _rows_of(lanes: Lanes, stored: StoredLayout, env_shape: tuple[int, ...], ndim: int, *, mapped: bool) -> PackedRows:
    if stored.observations is not None:
        return CompactRows(lanes, stored, mapped, env_shape, ndim)
    return PackedRows(lanes, stored.logical, mapped, env_shape, ndim, stored=stored)


class Place(abc.ABC):
    """Where rows lie."""

    device = torch.device("cpu")

    @abc.abstractmethod
    def make(self, new: NewTable) -> TableRows:
        """The rows of a new table. Raises StorageError, with the numbers, where there is no room for them."""

    def rows_of(self, lanes: Lanes, stored: StoredLayout, env_shape: tuple[int, ...], ndim: int) -> PackedRows:
        """Those of a store that lies here."""
        return _rows_of(lanes, stored, env_shape, ndim, mapped=False)

    def bytes_of(self, new: NewTable) -> int:
        """Bytes of a new table, header and rows."""
        return new.spec().total_bytes

    def note_device(self, leaves: list[Any]) -> None:
        """Called with the leaves of the first batch, whose device may be the rows', too."""

    # ---- other processes ----
    def awaits_others(self) -> bool:
        """Whether another process may make the table that this one uses then."""
        return False

    def find_made(self, size: TableSize) -> TableRows | None:
        """The rows, where another process has made their store."""
        return None

    def making(self) -> AbstractContextManager[object]:
        """A block in which no other process makes the table."""
        return contextlib.nullcontext()

    def is_copied_by_fork(self) -> bool:
        """Whether a child that is forked before the first write gets rows of its own."""
        return True

    def shared(self, made: bool, name: str) -> Place:
        """This place, or one like it whose rows processes share, of a storage of a class of this name.

        Raises:
            ValueError: there is none, or it is too late.
        """
        raise ValueError(
            "the rows are in private memory already: make the storage with shared=True, or call share() before its "
            "first write"
        )

    def unmade(self) -> Any:
        """What processes share until one of them makes the table; None: nothing, or a folder."""
        return None

    # ---- arguments of constructors ----
    @abc.abstractmethod
    def arguments(self, size: TableSize, made: Lanes | None) -> dict[str, Any] | None:
        """Those for a place like this one, for rows that are copied there; None: a copy opens the same file."""

    def opens_path(self) -> bool:
        """Whether any process opens the rows by the name of their file."""
        return False

    def opening_arguments(self, size: TableSize, made: Lanes | None) -> dict[str, Any] | None:
        """Those that open its file in any process; None: it has none with a name."""
        return None

    def sent_arguments(self, size: TableSize, made: Lanes | None) -> dict[str, Any]:
        """Those for a process that shares the rows. StorageError: it cannot; the message goes on from the storage's."""
        raise StorageError(f", {NOT_SENT}")

    # ---- rows that the class of a storage keeps ----
    def keeps_rows(self) -> bool:
        """Whether they are here, and not in a storage of a user's class."""
        return True

    def own_state(self) -> dict[str, Any] | None:
        """What copies have of a storage whose class keeps the rows; None: they are copied otherwise."""
        return None

    def sent_state(self, name: str) -> dict[str, Any] | None:
        """As `own_state`, for another process; StorageError: such a storage, of a class of this name, is not sent."""
        return None

    def take_sent(self, state: dict[str, Any]) -> bool:
        """In a copy of such a storage, or in that process: takes what these gave; False: there is nothing of it."""
        return False

    def check_sending(self) -> None:
        """Called before a storage is sent to another process; an error where it must not be."""

    # ---- life ----
    def can_take_back(self) -> bool:
        """Whether a table that was just made here can be freed: no other process has it yet."""
        return True

    def after_fork(self, made: bool) -> None:
        """In a child."""

    def flush(self) -> None:
        """Makes rows survive a power cut, where they outlive their processes."""

    def close(self) -> bool:
        """Ends the use of a file; returns whether rows are in one, so that the table is gone."""
        return False


class PrivateMemory(Place):
    """Memory of this process alone, or that of a GPU.

    Args:
        device: where rows are; "auto": on the device of the first batch.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._takes_device = str(device) == "auto"
        self.device = memory_device("cpu" if self._takes_device else device)

    def note_device(self, leaves: list[Any]) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self._takes_device and tensors:
            self.device = tensors[0].device

    def make(self, new: NewTable) -> TableRows:
        spec = new.spec()
        if self.device.type != "cpu":
            lanes = Lanes.in_memory(spec.lane_capacity, spec.envs)
            log.info("storage on %s: %s", self.device, spec)
            return ColumnarRows.empty(lanes, spec.layout, new.env_shape, new.ndim, self.device)
        log.info("storage in memory: %s", spec)
        refuse_if_memory_is_short(spec)
        return self.rows_of(Lanes(spec.create(-1)), spec.stored, new.env_shape, new.ndim)

    def bytes_of(self, new: NewTable) -> int:
        if self.device.type == "cpu":
            return super().bytes_of(new)
        return new.lane_capacity * math.prod(new.env_shape) * sum(leaf.nbytes for leaf in new.layout.stored)

    def shared(self, made: bool, name: str) -> Place:
        if made:
            super().shared(made, name)
        if self.device.type != "cpu":
            raise ValueError(f"a storage on {self.device} belongs to one process: sharing needs device='cpu'")
        return SharedMemory()

    def arguments(self, size: TableSize, made: Lanes | None) -> dict[str, Any]:
        device = "auto" if self._takes_device and made is None else str(self.device)
        return {**size.arguments(made), "device": device, "shared": False, "shared_init": False}

    def sent_arguments(self, size: TableSize, made: Lanes | None) -> dict[str, Any]:
        raise StorageError(" whose rows are in private memory: make it with shared=True")


class GivenTensors(Place):
    """Tensors that exist, which are the rows."""

    def __init__(self, data: Any, device: torch.device) -> None:
        self._data, self.device = data, device

    def make(self, new: NewTable) -> NoReturn:
        raise StorageError("the rows of this storage are tensors that were given")

    def shared(self, made: bool, name: str) -> NoReturn:
        raise not_shared("a TensorStorage")

    def arguments(self, size: TableSize, made: Lanes | None) -> dict[str, Any]:
        return {"storage": self._data, "ndim": size.ndim}


class Objects(Place):
    """Objects of this process, which hold their memory themselves.

    Args:
        arguments: those of a constructor for a storage like this one, besides its size.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments

    def make(self, new: NewTable) -> NoReturn:
        raise StorageError("items have no layout that a table could be made for")

    def shared(self, made: bool, name: str) -> NoReturn:
        raise not_shared(name)

    def arguments(self, size: TableSize, made: Lanes | None) -> dict[str, Any] | None:
        return {"max_size": size.max_size, **self._arguments}


class GivenRoom(PrivateMemory):
    """Private memory for as many steps as the batch size of a TensorDict says: `[time, *environments]`."""

    def __init__(self, data: Any, lead: tuple[int, ...], device: torch.device | str) -> None:
        super().__init__(device)
        self._data, self._lead = data, lead

    def make(self, new: NewTable) -> TableRows:
        check_envs(new.env_shape, self._lead[1:])
        return super().make(new)

    def shared(self, made: bool, name: str) -> NoReturn:
        raise not_shared("a TensorStorage")

    def arguments(self, size: TableSize, made: Lanes | None) -> dict[str, Any]:
        return {"storage": self._data, "ndim": size.ndim}

    def sent_arguments(self, size: TableSize, made: Lanes | None) -> dict[str, Any]:
        raise StorageError(f", {NOT_SENT}")


class SharedMemory(Place):
    """Memory that other processes see and write, too."""

    def make(self, new: NewTable) -> PackedRows:
        spec = new.spec()
        log.info("storage in shared memory: %s", spec)
        return _made_in(open_shared_memory(spec), spec, new, self)

    def shared(self, made: bool, name: str) -> Place:
        return self

    def arguments(self, size: TableSize, made: Lanes | None) -> dict[str, Any]:
        return {**self.sent_arguments(size, made), "shared_init": False}

    def sent_arguments(self, size: TableSize, made: Lanes | None) -> dict[str, Any]:
        return {**size.arguments(made), "device": str(self.device), "shared": True}


class _File(Place):
    """A file that is mapped, so that reading rows may wait for a disk."""

    def rows_of(self, lanes: Lanes, stored: StoredLayout, env_shape: tuple[int, ...], ndim: int) -> PackedRows:
        lanes.store.advise_random()
        return _rows_of(lanes, stored, env_shape, ndim, mapped=True)


class TemporaryFile(_File):
    """A file in TMPDIR that goes with the last process that has it open."""

    def make(self, new: NewTable) -> PackedRows:
        spec = new.spec()
        log.info("mapped storage in a temporary file: %s", spec)
        return _made_in(open_temporary(spec), spec, new, self)

    def shared(self, made: bool, name: str) -> Place:
        return self

    def arguments(self, size: TableSize, made: Lanes | None) -> dict[str, Any]:
        return {**size.arguments(made), "shared_init": False}

    def sent_arguments(self, size: TableSize, made: Lanes | None) -> dict[str, Any]:
        return size.arguments(made)

    def close(self) -> bool:
        return True


class NamedFile(_File):
    """A file in a folder, which stays.

    Args:
        take_over: open a store on a network file system that another node left open.
        auto_cleanup: delete it when this object is closed or collected, or its process ends.
        shared_init: whether other processes, which were given the folder, too, may make it first, and it is theirs as
            much as this one's. A file that they make without it is found as well.
    """

    def __init__(self, folder: Path, *, take_over: bool, auto_cleanup: bool, shared_init: bool) -> None:
        self.folder = folder
        self._takes_over, self._auto_cleanup, self._shared_init = take_over, auto_cleanup, shared_init
        self._is_closed = False
        self._makes_folder = not folder.exists()
        self._removal: weakref.finalize[Any, Any] | None = None
        self._session: StoreSession | None = None
        #: Rows that a repair dropped when it was opened.
        self.dropped = 0

    def make(self, new: NewTable) -> PackedRows:
        spec = self._spec(new)
        if create_named(self.folder, spec, _start_header):
            log.info("mapped storage in %s: %s", self.folder, spec)
        return self._opened(new, None, new.given_lanes)

    def _spec(self, new: NewTable) -> StoreSpec:
        return new.spec(trailer=True, with_dimensions=True)

    def bytes_of(self, new: NewTable) -> int:
        return self._spec(new).total_bytes

    def is_made(self) -> bool:
        """Whether there is a store."""
        return StoreFile.is_in(self.folder)

    def open(self, size: TableSize) -> PackedRows:
        """The store that is there. StorageError: it is damaged, or of another size than was asked for."""
        return self._opened(None, size if size.is_given else None, size.given_lanes)

    def _opened(self, new: NewTable | None, size: TableSize | None, given_lanes: int | LaneCount | None) -> PackedRows:
        """Opens the file, whichever process made it; its layout must be the new one, its size the given one."""
        session = StoreSession(self.folder, self._takes_over)
        try:
            opened = self._rows_of(session, new, given_lanes)
            differences = [] if size is None else size.differences(opened, self)
            if differences:
                raise StorageError(
                    f"the store in {self.folder} has {'; '.join(differences)}; LazyMemmapStorage.open takes it as it is"
                )
        except BaseException:
            session.locks.close()
            raise
        self._session, self.dropped = session, session.dropped
        if self._auto_cleanup:
            self._removal = weakref.finalize(self, _remove_store, session, self._own_folder(), os.getpid())
        return opened

    def _own_folder(self) -> Path | None:
        return self.folder.absolute() if self._makes_folder else None

    def _rows_of(self, session: StoreSession, new: NewTable | None, given_lanes: int | LaneCount | None) -> PackedRows:
        try:
            saved, env_shape, ndim = saved_layout(session.store)
            differences = [] if new is None else new.layout.differences(saved.logical)
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{self.folder / FILE_NAME} has no readable layout: {error}") from error
        if new is not None:
            if differences or env_shape != new.env_shape:
                raise StorageError(f"another process made a different store in {self.folder}: {'; '.join(differences)}")
            saved.logical.take_form(new.layout)  # which may have a tensorclass, unnamed in the file
            ndim = new.ndim
        lanes = open_lanes(session.store, session.locks, given_lanes, session.on_take, session.on_exclusive)
        return self.rows_of(lanes, saved, env_shape, ndim)

    def awaits_others(self) -> bool:
        return not self._is_closed

    def find_made(self, size: TableSize) -> PackedRows | None:
        return self.open(size) if not self._is_closed and self.is_made() else None

    def is_copied_by_fork(self) -> bool:
        return False

    def shared(self, made: bool, name: str) -> Place:
        return self

    def arguments(self, size: TableSize, made: Lanes | None) -> dict[str, Any]:
        # A copy's file is temporary: no second store is made in the same folder.
        return {**size.arguments(made), "shared_init": self._shared_init}

    def opens_path(self) -> bool:
        return True

    def opening_arguments(self, size: TableSize, made: Lanes | None) -> dict[str, Any]:
        folder = {"scratch_dir": str(self.folder.absolute()), "existsok": True}
        if made is None and (self._shared_init or not is_passing_fds()):
            return {**size.arguments(made), "shared_init": self._shared_init, **folder}
        locks_of(made)
        return {**folder, "lanes": size.given_lanes}

    # ---- life ----
    def can_take_back(self) -> bool:
        return False  # other processes may have it open by now

    def after_fork(self, made: bool) -> None:
        if self._shared_init and not made:
            self._auto_cleanup = False  # the parent deletes what this process may make

    def flush(self) -> None:
        if self._session is not None:
            self._session.flush()

    def close(self) -> bool:
        self._is_closed, self._shared_init = True, False
        session, self._session = self._session, None
        removal, self._removal = self._removal, None
        if removal is not None:
            removal()
        if session is not None:
            session.close()
        return True

    def cleanup(self) -> bool:
        """Deletes the store now, unless another process has it open or there is none; returns whether it did."""
        if self._session is None:
            return False
        if self._removal is not None:
            self._removal.detach()
            self._removal = None
        return _remove_store(self._session, self._own_folder(), os.getpid())


def _made_in(fd: int, spec: StoreSpec, new: NewTable, place: Place) -> PackedRows:
    """The rows of a store that is made in an open file, which other processes may open."""
    lanes = open_lanes(spec.create_in(fd), LaneLocks(fd), new.given_lanes)
    return place.rows_of(lanes, spec.stored, new.env_shape, new.ndim)


def not_shared(name: str) -> ValueError:
    """Other processes cannot see the rows of a storage of this kind."""
    return ValueError(
        f"shared=True needs LazyTensorStorage or LazyMemmapStorage, whose rows processes can share, not {name}"
    )


def locks_of(lanes: Lanes | None) -> LaneLocks:
    """The locks of a table that processes share. StorageError: there is no table yet."""
    if lanes is None or lanes.locks is None:
        raise StorageError(
            "the storage has not been initialized: write its first batch before sending it to another process, or "
            "make it with shared_init=True"
        )
    return lanes.locks


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


class ObservedFile(_File):
    """A store in a folder, which other processes may be writing and this one only reads.

    Raises:
        StorageError: there is no store, or its file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = StoreFile.observed(folder)
        self._closer = weakref.finalize(self, os.close, file.fd)
        try:
            stored, env_shape, ndim = saved_layout(file.store)
        except (ValueError, KeyError, TypeError) as error:
            self._closer()
            raise StorageError(f"{file.path} has no readable layout: {error}") from error
        self.lanes = ObservedLanes(file.store, folder)
        #: What is in the store.
        self.opened = self.rows_of(self.lanes, stored, env_shape, ndim)

    def freeze(self) -> None:
        """Hides the rows that are written from now on; there are none once it is closed."""
        if self._closer.alive:
            self.lanes.freeze()

    def make(self, new: NewTable) -> NoReturn:
        raise StorageError(READ_ONLY)

    def arguments(self, size: TableSize, made: Lanes | None) -> None:
        """None."""

    def opens_path(self) -> bool:
        return True

    def opening_arguments(self, size: TableSize, made: Lanes | None) -> dict[str, Any]:
        return {"scratch_dir": str(self.folder.absolute())}

    def close(self) -> bool:
        self._closer()
        return True


class ObservedLanes(Lanes):
    """Lanes that this process does not write to."""

    def __init__(self, store: _native.Store, folder: Path) -> None:
        super().__init__(store)
        self._folder = folder
        self._frozen_at: int | None = None  # the incarnation of `freeze`

    def hold(self) -> NoReturn:
        raise StorageError(READ_ONLY)

    @contextlib.contextmanager
    def exclusive(self, operation: str) -> Iterator[None]:
        raise StorageError(READ_ONLY)
        yield

    def freeze(self) -> None:
        """Hides the rows that are written from now on."""
        self._frozen_at = None
        self._frozen_at = self.validated(self._freeze)

    def _freeze(self) -> int:
        self.store.freeze()
        return self.store.incarnation

    def validated(self, read: Callable[[], _T], errors_only: bool = False) -> _T:
        for attempt in range(_READ_TRIES):
            before, error = self.store.epoch(), None
            if self._frozen_at not in (None, before[0]):
                raise StorageInUseError(
                    f"all rows of the store in {self._folder} were replaced while it was read; look at it again"
                )
            if errors_only or not any(n % 2 for n in before):
                # Rows that are being changed can cause any error: it counts only if they were not.
                try:
                    result = read()
                    if errors_only:
                        return result
                except (RuntimeError, ValueError, LookupError, ArithmeticError) as raised:
                    error = raised
                if self.store.epoch() == before and not any(n % 2 for n in before):
                    if error is not None:
                        raise error
                    return result
            time.sleep(min(_MAX_PAUSE, 1e-5 * attempt))
        raise StorageInUseError(
            f"the rows of the store in {self._folder} are being changed in place, or were left in the middle of a "
            f"change by a process that died: each of {_READ_TRIES} reads met a change. Try again, or open it once "
            "for writing"
        )
