"""The interface of a checkpointer, and the interfaces of storages that it reads and fills."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from engram._overrides import overrides
from engram.checkpoint.by_path import BY_PATH, RestoreByPath, SaveByPath
from engram.checkpoint.reader import SnapshotReader
from engram.checkpoint.writer import SnapshotWriter
from engram.store.layout import RowLayout
from engram.store.snapshots import PrivateRows

Rows = npt.NDArray[np.uint8]


@runtime_checkable
class RowSource(Protocol):
    """A storage that holds packed rows, as it is read by a save, each row once.

    Nothing changes in it meanwhile, except that a lane's `base` may rise to leave out rows that other processes
    overwrote before they were read.
    """

    def layout_state(self) -> dict[str, Any] | None:
        """The layout of a row as JSON; `row_bytes` is its payload without trailer. None before the first write."""

    def counters(self) -> dict[str, Any]:
        """JSON: `{"lane_capacity": int, "envs": int, "lanes": [...]}`, each lane
        `{"base", "published", "origin", "seams": [...], "border": {...}, "replaced": int}`.

        The rows of a lane that exist have the sequences `max(base, published - lane_capacity)` to `published`.
        `published` is a seam where the next writer would enter one. `border` is what is known of entries that go on
        from step to step: `{"looked": sequence, "agreed": bits or None}`. `replaced` counts the
        sequences given to rows that were written over others out of turn.
        """

    def identity(self) -> dict[str, Any]:
        """JSON that says which rows these are: together with a sequence it names a row's bytes, but for edits."""

    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None:
        """Lane and sequence of the rows changed in place since `identity()` was `since`; None if that is not known."""

    def read_block(self, lane: int, start: int, stop: int) -> Rows:
        """Rows `[envs, stop - start, row_bytes]` of one lane, by sequence; valid until the next call."""

    def row_layout(self) -> RowLayout | None:
        """The layout of `layout_state`, with the classes that batches have here; None before the first write."""

    def private_rows(self) -> PrivateRows | None:
        """The rows of a single lane where they lie, for reading without a copy; None: read blocks."""


@runtime_checkable
class RowSink(Protocol):
    """A storage that takes packed rows, as it is filled by a load."""

    def check_restore(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> None:
        """ValueError that lists every difference when the rows do not fit; changes nothing."""

    def begin_restore(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> None:
        """Checks as above, then empties the store. `layout` None: an empty buffer was saved."""

    def write_block(self, lane: int, start: int, rows: Rows) -> None:
        """Rows `[envs, n, row_bytes]` for sequences from `start`; the array is the caller's after the call."""

    def end_restore(self) -> None:
        """Sets the counters: the rows exist from here on."""

    def abort_restore(self) -> None:
        """Leaves the store empty."""

    def row_layout(self) -> RowLayout | None:
        """The layout of the rows that it holds; None: what is loaded decides it."""

    def __len__(self) -> int: ...


@runtime_checkable
class ItemSource(Protocol):
    """A storage that holds Python objects, as it is read by a save."""

    def items(self) -> list[Any]:
        """The items that exist, oldest first: the first has sequence `max(base, published - lane_capacity)`."""

    def sequences(self) -> list[int]:
        """The sequences that the items carry, in the same order; 0 where an item has the one that its lane counts."""

    def identity(self) -> dict[str, Any]: ...
    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None: ...

    def counters(self) -> dict[str, Any]:
        """As those of a RowSource, with one lane, one environment; `lane_capacity` None: without limit."""


@runtime_checkable
class ItemSink(Protocol):
    """A storage that takes Python objects."""

    def check_restore(self, counters: dict[str, Any]) -> None:
        """ValueError that lists every difference when the items do not fit; changes nothing."""

    def restore_items(self, items: list[Any], counters: dict[str, Any], sequences: list[int]) -> None:
        """Replaces what is stored; the items come oldest first, as from `ItemSource.items`, and so their sequences."""


Source = TypeVar("Source", contravariant=True)
Sink = TypeVar("Sink", contravariant=True)
Hook = Callable[..., Any]
_BY_PATH, _PLANNED = {"dumps", "loads"}, {"plan_save", "plan_restore"}
Self = TypeVar("Self", bound="StorageCheckpointerBase[Any, Any]")


class SavedForm(Protocol):
    """A storage, as it is saved and loaded."""

    @property
    def storage(self) -> Any: ...
    def source(self, background: bool) -> Any: ...
    def sink(self) -> Any: ...
    def staging(self) -> Any: ...


class SavePlan(Protocol):
    """One save of a storage: what was looked up and decided for it, once."""

    @property
    def nbytes(self) -> int:
        """About how many bytes `write` will write: the save is refused where the disk has no room for them."""

    def write(self, writer: SnapshotWriter) -> dict[str, Any]:
        """Writes files below `storage/`. What it returns (JSON) stands in the manifest; `plan_restore` gets it."""


class RestorePlan(Protocol[Sink]):
    """A saved storage: its description in the manifest was read once, and can be true."""

    def check(self, sink: Sink) -> None:
        """ValueError when the sink cannot take what was saved; reads no file, changes nothing."""

    def load(self, sink: Sink) -> None:
        """Checks as above, then fills the sink. One that holds something is untouched unless everything was verified;
        one that is empty may be filled while verifying, and is empty again after an error.
        """


class StorageCheckpointerBase(Generic[Source, Sink]):
    """Writes a storage into a snapshot and reads it back; one kind of storage, one form on disk.

    A checkpointer of one's own defines either of these:

    - `dumps(storage, path)` and `loads(storage, path)`. The first writes a file, or a folder of files, at a path where
      nothing is yet; the snapshot takes these over, with checksums. The second gets a path with the same files, once
      these were compared, and fills the storage, which is empty, by its own methods (`set`, `load_state_dict`, ...).
      Such a checkpointer saves while `dumps` of the buffer waits (`blocking=False` is refused), and all files anew; one
      that is to apply hooks overrides `register_save_hook` and `register_load_hook`, too.
    - `format`, the name of the form, `plan_save` and `plan_restore`, which write and read files one by one.

    Hooks are callables. Save hooks get what users stored: a batch of all rows (TensorDict, tensorclass, dict, tensor;
    of a list storage a list, where its items do not stack) in the order of slots, whose tensors are views of the rows;
    each gets what the one before it returned, and what the last one returns is saved. Load hooks get that, and the
    last one returns the rows. They are not saved: register the inverses of the save hooks before loading.

    - A hook that has the attributes `shift` and `is_full` is told by them, before it is called, where the oldest row
      of a full storage stands (else: how many there are), and whether it is full. Rows of several lanes, and items of
      several steps, come oldest first, and `shift` is 0.
    - A save hook with an argument `path` gets a folder (a `Path`) on the disk of the snapshot, for tensors that are
      too large for memory. It is removed when what was returned has been written.
    - A load hook with an argument `out` gets a batch with room for the rows, which it may fill and return; None of
      items.
    - What save hooks return may have another batch size, and entries that are not tensors: numbers, strings, None, and
      dicts, lists and tuples of these.
    - Writes into what a hook gets change nothing that is stored. It is not called when there are no rows.

    Example:
        >>> import tempfile
        >>> from engram.data import LazyTensorStorage
        >>> storage, twin = LazyTensorStorage(10), LazyTensorStorage(10)
        >>> storage.register_save_hook(lambda pixels: pixels.to(torch.uint8))
        >>> twin.register_load_hook(lambda pixels: pixels.to(torch.float32))
        >>> storage.set(range(3), torch.tensor([7.0, 8.0, 9.0]))
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = storage.dumps(path)
        ...     twin.loads(path)
        >>> twin[:]
        tensor([7., 8., 9.])

        A form of one's own, by two methods:

        >>> class OneFile(StorageCheckpointerBase):
        ...     def dumps(self, storage, path):
        ...         torch.save(storage.state_dict(), path)
        ...
        ...     def loads(self, storage, path):
        ...         storage.load_state_dict(torch.load(path))
        >>> storage.checkpointer, twin.checkpointer = OneFile(), OneFile()
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = storage.dumps(path)
        ...     twin.empty()
        ...     twin.loads(path)
        >>> len(twin)
        3
    """

    format: ClassVar[str] = BY_PATH
    #: The method by which a storage hands out what is saved; storages without it are refused. None: any will do.
    needs: ClassVar[str | None] = None
    save_hooks: list[Hook]
    load_hooks: list[Hook]

    def __new__(cls: type[Self], *args: Any, **kwargs: Any) -> Self:
        own = _own_methods(cls)  # type: ignore[arg-type]
        if not own >= _PLANNED and not own >= _BY_PATH:
            raise TypeError(
                f"{cls.__name__} is no checkpointer: it has to define dumps(storage, path) and loads(storage, path), "
                "or format, plan_save and plan_restore"
            )
        made = super().__new__(cls)
        made.save_hooks, made.load_hooks = [], []
        return made

    @property
    def _by_path(self) -> bool:
        """Whether `dumps` and `loads` of a user's class write and read the files."""
        return not _own_methods(type(self)) >= _PLANNED  # type: ignore[arg-type]

    def register_save_hook(self, hook: Hook) -> None:
        """Adds a callable that gets what is saved, and returns what is saved instead."""
        self._refuse_hooks()
        self.save_hooks.append(hook)

    def register_load_hook(self, hook: Hook) -> None:
        """Adds a callable that gets what was saved, and returns what the storage takes."""
        self._refuse_hooks()
        self.load_hooks.append(hook)

    def _refuse_hooks(self) -> None:
        if self._by_path:
            name = type(self).__name__
            raise ValueError(
                f"dumps and loads of {name} are its own, and call no hooks: change what is saved there, or override "
                f"register_save_hook and register_load_hook of {name} by what keeps hooks for them"
            )

    # ---- what is saved and filled, of a storage as it is saved and loaded ----
    def source(self, form: SavedForm, background: bool = False) -> Any:
        """What `plan_save` gets.

        Raises:
            ValueError: this cannot save in the background.
        """
        if not self._by_path:
            return form.source(background)
        if background:
            raise ValueError(
                f"dumps of {type(self).__name__} reads the storage itself, which may not change meanwhile: save with "
                "blocking=True"
            )
        return form.storage

    def sink(self, form: SavedForm) -> Any:
        """What a plan of `plan_restore` fills."""
        return form.storage if self._by_path else form.sink()

    def staging(self, form: SavedForm) -> Any:
        """What it fills in place of that, where there are rows already; None: nothing can hold what was saved."""
        return None if self._by_path else form.staging()

    def dumps(self, storage: Any, path: str | os.PathLike[str]) -> None:
        """Saves a storage in this form, whatever its own checkpointer is."""
        storage.dumps(path, checkpointer=self)

    def loads(self, storage: Any, path: str | os.PathLike[str]) -> None:
        """Replaces everything in a storage by what `dumps` saved; errors as `Storage.loads`.

        Example:
            >>> import tempfile
            >>> from engram.data import FlatStorageCheckpointer, LazyTensorStorage
            >>> storage, twin, flat = LazyTensorStorage(10), LazyTensorStorage(10), FlatStorageCheckpointer()
            >>> storage.set(range(3), {"obs": torch.arange(3)})
            >>> with tempfile.TemporaryDirectory() as path:
            ...     flat.dumps(storage, path)
            ...     flat.loads(twin, path)
            >>> twin[:]["obs"]
            tensor([0, 1, 2])
        """
        storage.loads(path, checkpointer=self)

    def plan_save(self, source: Source, previous: dict[str, Any] | None = None) -> SavePlan:
        """Plans a save of `source`, which does not change until it is written.

        `previous` is what `SavePlan.write` returned for the current snapshot, whose files `writer.reuse` takes over.
        """
        return SaveByPath(self.dumps, source)

    def plan_restore(self, reader: SnapshotReader, state: dict[str, Any]) -> RestorePlan[Sink]:
        """Plans the load of a storage; `state` is the result of `SavePlan.write`.

        `reader.malformed(...)` is the error for a state that no save can have written. Reads no file.
        """
        return RestoreByPath(self.loads, reader, state)


@functools.cache
def _own_methods(cls: type) -> frozenset[str]:
    return overrides(cls, StorageCheckpointerBase)
