"""What a writer is, and those that write behind the newest row."""

from __future__ import annotations

import enum
import functools
import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from engram import _forms as forms
from engram._advice import advised
from engram._arguments import BUILT_IN, Part
from engram._copies import PartlyCopied, SentByState
from engram._overrides import overrides
from engram.checkpoint.snapshot import load_part, save_part
from engram.data.replay_buffers.state.parts import SavedOwnPart, SavedPart, as_saved
from engram.pytree import move_dim, to_tensor
from engram.store.indexing import generations_at, returned_index, to_slots
from engram.store.rows import expand_slots

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage


class Placing(enum.Enum):
    """Where a writer puts rows."""

    CHOSEN = enum.auto()  #: where its `write` says
    BEHIND = enum.auto()  #: behind the newest: `write` is `check` and `append`, for which a storage has a shorter way
    REPLACING = enum.auto()  #: in the place of any other row, for which no other process may have the storage open


class WritePlan(NamedTuple):
    """How a buffer writes with a writer.

    Attributes:
        write: as `Writer.write`.
        is_behind: whether it is `check` and `append`, for which a storage has a shorter way.
    """

    write: Callable[[Storage, Any, bool, int], Tensor | int]
    is_behind: bool = False


class SavedWriter(SavedPart):
    """A writer, as it is saved and loaded."""

    def differences(self, state: Any) -> list[str]:
        different = super().differences(state)
        if self._beside_rows is not None:  # else a child says itself what its state is
            forms.check(forms.record({}, {"cursor": forms.integer()}), state, "the state of the writer")
        return different


@advised
class Writer(SentByState, PartlyCopied, Part):
    """Decides where new rows go. It needs no buffer: after `register_storage`, `add` and `extend` write.

    A writer of your own is a class with `write(storage, items, single, time_dim) -> slots`; it need not inherit from
    this one. It may also have any of `index_key`, `register_storage`, `check_mutable`, `empty`, `state_dict` and
    `load_state_dict`, as they are described here.

    Or it is a class with `add(item) -> int` and `extend(items) -> slots` in TorchRL's form, which call `set` of the
    storage that they were registered with, `self._storage`; in a child of this class `self._cursor` is theirs to set.
    In a buffer what such a writer sets is a new row, also where it takes the place of another.

    Args:
        compilable: accepted, without effect: under `torch.compile` each write is a graph break.

    Example:
        >>> writer = RoundRobinWriter()
        >>> writer.register_storage(LazyTensorStorage(10))
        >>> writer.add(torch.tensor(1.0)), writer.extend(torch.zeros(2)), writer._cursor
        (0, tensor([1, 2]), 3)
    """

    #: The key under which each row also stores its own index; None: it does not.
    index_key: str | None = None
    #: Whether batches of its buffer say the generation of each row, as with `ReplayBuffer(track_generations=True)`.
    tracks_generations: bool = False
    #: Where it puts rows, and whom else that concerns.
    placing: ClassVar[Placing] = Placing.CHOSEN

    # How it is saved and loaded.
    _saved_as: ClassVar[type[SavedWriter]] = SavedWriter
    # Of the class: a child's constructor need not call this one's.
    _storage: Storage | None = None
    _own_cursor: int | None = None  # that a child has set
    _loaded_cursor = 0  # that a state had, for as long as there are no rows

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        own = overrides(cls, Writer)
        if "write" not in own and not own >= {"add", "extend"}:
            raise TypeError(
                f"Can't instantiate abstract class {cls.__name__}, which needs write, or both add and extend: "
                "it has no write"
            )
        return super().__new__(cls)

    def __init__(self, compilable: bool = False) -> None:
        pass

    def register_storage(self, storage: Storage) -> None:
        """Writes to this storage from now on."""
        self._storage = storage
        if self._sets_rows:
            if not self._has_own_cursor:
                self._own_cursor = storage.lanes.cursor
            if storage.ndim == 1:
                storage.access.expect_sequences(by_set=True)
            self._storage = storage.access.for_own_writers(storage)

    # ---- without a buffer ----
    def add(self, data: Any) -> int | Tensor:
        """Stores one step in the registered storage; returns its index as `ReplayBuffer.add` does: an int.

        Raises:
            RuntimeError: there is no registered storage.
            ValueError, TypeError: the step does not fit. Nothing is changed.
        """
        storage = self._registered()
        with storage.mutex:
            slots = self.write(storage, data, True, -1)
        index: int | Tensor = returned_index(slots, storage.ndim, storage.env_shape, single=True)
        return index

    def extend(self, data: Any) -> Tensor:
        """Stores a batch of steps; returns their indices as `ReplayBuffer.extend` does: int64 [n].

        A list is a list of items; time is the last batch dimension. Errors as `add`; also RuntimeError where a list
        does not stack.
        """
        storage = self._registered()
        time_dim = storage.ndim - 1
        data = storage.access.table.rows.as_batch(data, time_dim)
        with storage.mutex:
            slots = self.write(storage, data, False, time_dim)
        index: Tensor = returned_index(slots, storage.ndim, storage.env_shape, single=False)
        return index

    def _registered(self) -> Storage:
        if self._storage is None:
            raise RuntimeError(
                f"this {type(self).__name__} has no storage to write to: register_storage(storage) first"
            )
        return self._storage

    def write(self, storage: Storage, items: Any, single: bool, time_dim: int) -> Tensor | int:
        """Checks a batch (or one step, `single`) and writes it; returns slots, int64 [steps * environments]; -1: not
        written.

        A child that has `add` and `extend` needs none: this one calls them.

        Raises:
            ValueError, TypeError: the batch does not fit; nothing was written.
        """
        return _write_by_set(self, storage, items, single, time_dim)

    @property
    def _sets_rows(self) -> bool:
        """Whether it is a child that has `add` and `extend` in place of `write`."""
        return "write" not in overrides(type(self), Writer)

    def check_mutable(self, operation: str) -> None:
        """Called before stored rows are changed or forgotten.

        Raises:
            RuntimeError: this writer forbids it.
        """

    def generations_of(self, index: Any) -> Tensor:
        """The generation of the row that is in each place now, int64 in the shape of the index; -1: there is none.

        It is the row's write number: a place has another one as soon as another row is in it. With ndim=2 an index is
        [..., 2], or a tuple of times and environments. Asking costs nothing where `track_generations` is off.

        Raises:
            RuntimeError: the writer belongs to no storage yet.
            IndexError: a place that the storage does not have.

        Example:
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
            >>> index = rb.extend(torch.arange(5))
            >>> index, rb.writer.generations_of(index), rb.writer.generations_of(2)
            (tensor([0, 1, 2, 0, 1]), tensor([3, 4, 2, 3, 4]), tensor(2))
        """
        storage = self._storage
        if storage is None:
            raise RuntimeError("this writer belongs to no storage: give it to a buffer, or register_storage(storage)")
        return generations_at(storage.lanes, storage.env_shape, storage.max_size, index)

    @property
    def _cursor(self) -> int:
        """Where the next row goes, along the first dimension. A writer of your own may keep one of its own here."""
        if self._own_cursor is not None:
            return self._own_cursor
        storage = self._storage
        if storage is None or (self._loaded_cursor and not len(storage)):
            return self._loaded_cursor
        return storage.access.settled(lambda: storage.lanes.cursor)

    @_cursor.setter
    def _cursor(self, cursor: int) -> None:
        if type(self) in BUILT_IN:
            raise AttributeError(
                f"the cursor of a {type(self).__name__} is where the storage's counters say that the next row goes; a "
                "writer that chooses its own slots is a class with `add` and `extend`"
            )
        self._own_cursor = int(cursor)

    @property
    def _has_own_cursor(self) -> bool:
        """Whether it is a child that keeps a cursor of its own: it has set it, or has a plain attribute for it."""
        return self._own_cursor is not None or type(inspect.getattr_static(type(self), "_cursor")) is int

    def empty(self) -> None:
        """Forgets what was written."""
        self._empty()

    def _empty(self) -> None:
        """What `empty` does; by this name a child may have it, too."""
        self._loaded_cursor = 0
        if self._has_own_cursor:
            self._cursor = 0

    def state_dict(self) -> dict[str, Any]:
        """What must be saved, and where the next row goes.

        The cursor belongs to the storage's counters, unless a child has its own: it goes on with its storage.
        """
        return {"cursor": self._cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state; the storage may get its rows before or after.

        Raises:
            CheckpointMisfitError: it is no state of such a writer. Nothing is changed. It is a ValueError, too.
        """
        self.saved_form.check_fits(state)
        if "cursor" not in state:
            return
        if self._sets_rows or self._has_own_cursor:
            self._cursor = int(state["cursor"])
        else:
            self._loaded_cursor = int(state["cursor"])

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Saves this writer alone, as a snapshot of JSON that replaces the last one there.

        The rows are the storage's, which has a `dumps` of its own; the two may be loaded in any order.

        Raises:
            CheckpointError: it cannot be written; the last snapshot is as it was.

        Example:
            >>> import tempfile
            >>> folder = tempfile.mkdtemp()
            >>> writer = TensorDictMaxValueWriter(rank_key="score")
            >>> writer.dumps(folder)
            >>> writer.loads(folder)
        """
        save_part(path, "writer", self.saved_form)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Takes over what `dumps` saved.

        Raises:
            CorruptCheckpointError: a file is not what was saved.
            CheckpointMisfitError: another kind of writer was saved, or one with other settings. Nothing is changed.
        """
        load_part(path, "writer", self.saved_form)

    @property
    def saved_form(self) -> SavedPart:
        """This writer, as it is saved and loaded with a buffer."""
        kind = type(self)
        if kind in BUILT_IN:
            return self._saved_as(self, kind.__name__, owner="writer", beside_rows={})
        ours = next(parent for parent in kind.__mro__ if parent is Writer or parent in BUILT_IN)
        if "state_dict" in overrides(kind, ours):  # a child that says itself what its state is
            return as_saved(self._saved_as(self, kind.__name__, owner="writer"))
        beside_rows = {"cursor": self._cursor} if self._has_own_cursor else {}
        return as_saved(self._saved_as(self, kind.__name__, owner="writer", beside_rows=beside_rows))

    def _check_sending(self) -> None:
        if self.placing is Placing.REPLACING:
            raise RuntimeError(
                f"a {type(self).__name__} cannot be shared between processes: it replaces rows one by one, which needs "
                "the storage alone. Send the storage (rb.storage) to those who read; pickle and copy.deepcopy make "
                "copies"
            )

    def _complete_copy(self) -> None:
        own = vars(self).get("_own_cursor")
        if own is not None and type(inspect.getattr_static(type(self), "_cursor")) is int:
            self._cursor = vars(self).pop("_own_cursor")  # as pickles of before have it

    def __repr__(self) -> str:
        return f"{type(self).__name__}(cursor={self._cursor})"


def write_plan(writer: Writer) -> WritePlan:
    """How a buffer writes with a writer, which may be a child of a user's own."""
    kind = type(writer)
    if kind in BUILT_IN:
        # A child that does not say where it puts rows may have another `write`.
        return WritePlan(writer.write, vars(kind).get("placing") is Placing.BEHIND)
    # The `add` and `extend` of a child change what its parent's do, and call these.
    definer = next(vars(parent) for parent in kind.__mro__ if vars(parent).keys() & {"write", "add", "extend"})
    if "write" in definer or "write" not in overrides(kind, Writer):
        return WritePlan(writer.write)
    return WritePlan(functools.partial(_write_by_overrides, writer))


def _write_by_set(self: Any, storage: Storage, items: Any, single: bool, time_dim: int) -> Tensor | int:
    """`write` of a writer that has `add` and `extend`, and calls `set` of its storage in them."""
    if not single and storage.ndim > 1:
        items = move_dim(items, time_dim, 0)
    with storage.access.setting_new_rows():
        index = self.add(items) if single else self.extend(items)
    if single and storage.ndim == 1:
        return int(index)
    times = to_tensor(index, dtype=torch.int64).reshape(-1)
    return expand_slots(times, storage.lanes.envs)


def _write_by_overrides(self: Any, storage: Storage, items: Any, single: bool, time_dim: int) -> Tensor | int:
    """`write` of a writer that has an `add` or `extend` of its own around that of a parent which has a `write`."""
    if single:
        index = self.add(items)
    else:
        index = self.extend(move_dim(items, time_dim, storage.ndim - 1) if storage.ndim > 1 else items)
    return index if type(index) is int else to_slots(index, storage.env_shape, storage.max_size or 0)


class _AdaptedWriter(Writer, built_in=True):
    """A writer of a user's own that is no `Writer`, with what it leaves out."""

    def __init__(self, writer: Any) -> None:
        super().__init__()
        self._own = writer
        self.index_key = _optional(writer, "index_key")
        self.tracks_generations = bool(_optional(writer, "tracks_generations"))

    @property
    def _sets_rows(self) -> bool:
        return not callable(_optional(self._own, "write"))

    @property
    def own(self) -> Any:
        return self._own

    @property
    def saved_form(self) -> SavedPart:
        has_state = None not in (_optional(self._own, "state_dict"), _optional(self._own, "load_state_dict"))
        return SavedOwnPart(SavedPart(self, type(self._own).__name__), self._own, has_state=has_state)

    def register_storage(self, storage: Storage) -> None:
        super().register_storage(storage)
        self._call("register_storage", storage)

    def write(self, storage: Storage, items: Any, single: bool, time_dim: int) -> Tensor | int:
        if self._sets_rows:
            return _write_by_set(self._own, storage, items, single, time_dim)
        slots: Tensor | int = self._own.write(storage, items, single, time_dim)
        return slots

    def check_mutable(self, operation: str) -> None:
        self._call("check_mutable", operation)

    def empty(self) -> None:
        self._call("_empty" if _optional(self._own, "empty") is None else "empty")

    def state_dict(self) -> dict[str, Any]:
        return self._call("state_dict") or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._call("load_state_dict", state)

    def _call(self, name: str, *args: Any) -> Any:
        method = _optional(self._own, name)
        return None if method is None else method(*args)

    def __repr__(self) -> str:
        return repr(self._own)


def as_writer(writer: Any) -> Writer:
    """A Writer from what a user gave.

    Raises:
        TypeError: it has no method `write`, nor `add` and `extend`.
    """
    if isinstance(writer, Writer):
        return writer
    if isinstance(writer, type) or not has_writing_methods(writer):
        kind = writer.__name__ if isinstance(writer, type) else f"a {type(writer).__name__}"
        raise TypeError(
            "a writer is an object with write(storage, items, single, time_dim) -> slots, or with add(item) and "
            f"extend(items), got {kind}"
        )
    return _AdaptedWriter(writer)


def given_writer(writer: Writer) -> Any:
    """The object that the user gave: this one, or the one that is adapted."""
    return writer.own if type(writer) is _AdaptedWriter else writer


def _optional(writer: Any, name: str) -> Any:
    """An attribute that a writer of a user's own may leave out; None: it does."""
    return getattr(writer, name, None)


def has_writing_methods(writer: Any) -> bool:
    """Whether an object has what makes it a writer."""
    return any(all(callable(_optional(writer, name)) for name in names) for names in (("write",), ("add", "extend")))


@advised
class RoundRobinWriter(Writer, built_in=True):
    """Writes behind the newest row; in a full storage over the oldest.

    Args:
        track_generations: batches say the generation of each row, as with `ReplayBuffer(track_generations=True)`.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), writer=RoundRobinWriter())
        >>> rb.extend(torch.arange(25))[-5:], rb.writer._cursor
        (tensor([0, 1, 2, 3, 4]), 5)
    """

    placing = Placing.BEHIND

    def __init__(self, compilable: bool = False, *, track_generations: bool = False) -> None:
        super().__init__(compilable)
        self.tracks_generations = track_generations

    def write_at(self, index: Any, data: Any) -> Any:
        """Writes steps in the places of others, or in those that follow; returns the index. Errors as `Storage.set`.

        Example:
            >>> writer, storage = RoundRobinWriter(), LazyTensorStorage(10)
            >>> writer.register_storage(storage)
            >>> _ = writer.extend(torch.zeros(3)), writer.write_at([1, 2], torch.ones(2))
            >>> storage[:]
            tensor([0., 1., 1.])
        """
        self._registered().set(index, data, self.index_key)
        return index

    def write(self, storage: Storage, items: Any, single: bool, time_dim: int) -> Tensor | int:
        return storage.append(storage.check(items, single, time_dim, self.index_key))


class TensorDictRoundRobinWriter(RoundRobinWriter, built_in=True):
    """A RoundRobinWriter under which each row also stores its own slot, under `"index"`.

    Rows of a tensorclass without such a field are stored without it.
    """

    index_key = "index"
    placing = Placing.BEHIND


class ImmutableDatasetWriter(Writer, built_in=True):
    """For data that must not change: any write is an error."""

    def write(self, storage: Storage, items: Any, single: bool, time_dim: int) -> Tensor | int:
        raise self._refusal("writing")

    def check_mutable(self, operation: str) -> None:
        raise self._refusal(operation)

    def _refusal(self, operation: str) -> RuntimeError:
        return RuntimeError(
            f"this buffer is an immutable dataset (ImmutableDatasetWriter), which {operation} would change. "
            "set_writer(RoundRobinWriter()) makes it writable"
        )
