"""An ensemble of storages: read in one batch, written one by one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import Tensor

from engram._advice import advised
from engram._copies import CopyForm
from engram.data.replay_buffers.state.members import SavedMembers
from engram.data.replay_buffers.storages.access import Access
from engram.data.replay_buffers.storages.base import Storage, as_storage
from engram.pytree import KeyPath
from engram.store.lanes import Lanes
from engram.store.places import NewTable, Place, TableSize, not_shared
from engram.store.rows import NoRows
from engram.store.table import Table


@advised
class StorageEnsemble(Storage):
    """Several storages: read in one batch, written one by one.

    Args:
        storages: the members.
        transforms: one for each member, applied to its batches; None for nothing.

    Raises:
        ValueError: no members, one of them twice, or another number of transforms.

    Example:
        >>> storage = StorageEnsemble(LazyTensorStorage(10), LazyTensorStorage(20))
        >>> len(storage), storage[1].max_size
        (2, 20)
    """

    def __init__(self, *storages: Storage, transforms: Any = None, checkpointer: Any = None) -> None:
        if not storages:
            raise ValueError("an ensemble needs at least one storage")
        if len({id(storage) for storage in storages}) < len(storages):
            raise ValueError("a storage is a member twice; give it a larger p instead")
        self._storages = [as_storage(storage) for storage in storages]
        self._transforms = [None] * len(storages) if transforms is None else list(transforms)
        if len(self._transforms) != len(storages):
            raise ValueError(
                f"{len(storages)} storages, {len(self._transforms)} transforms; give one for each, or None"
            )
        table = Table(TableSize(None, None, 1, None), _MembersPlaces(self._storages), _MembersRows(self._storages))
        self._hold(table, checkpointer, SavedMembers)
        self.mutex = _Mutexes(self._storages)  # type: ignore[assignment]
        self.access = _MembersAccess(table, self._storages)

    # ---- copies ----
    def _copy_form(self) -> CopyForm:
        parts = type(self), self._storages, self._transforms, self._checkpointer
        return CopyForm(lambda: self.mutex, lambda: (_ensemble, parts))

    # ---- facts ----
    @property
    def initialized(self) -> bool:
        """False: its members are, or are not."""
        return False

    @property
    def _is_full(self) -> bool:
        return all(storage._is_full for storage in self._storages)

    def __len__(self) -> int:
        """The number of members."""
        return len(self._storages)

    @property
    def storages(self) -> list[Storage]:
        """The members."""
        return list(self._storages)

    @property
    def transforms(self) -> list[Any]:
        """The transform of each member's batches; None for nothing."""
        return list(self._transforms)

    # ---- reading ----
    def contains(self, item: Any) -> NoReturn:
        """An error: ask a member."""
        raise _one_member("asked for steps")

    def __getitem__(self, index: Any) -> Any:
        """A member; with a tuple `(member, ...)` rows of it."""
        if isinstance(index, tuple):
            return self._storages[index[0]][index[1:] if len(index) > 2 else index[1]]
        return self._storages[index]

    def get(self, item: Any) -> list[Any]:
        """The rows of several members, each through its transform.

        Args:
            item: a mapping with `"buffer_ids"` (a member for each entry) and `"index"` (an index for each).
        """
        batches = []
        for member, rows in zip(item["buffer_ids"], item["index"], strict=True):
            ids = member.reshape(-1)[0] if isinstance(member, Tensor) else member
            batch = self._storages[int(ids)].get(rows)
            transform = self._transforms[int(ids)]
            batches.append(batch if transform is None else transform(batch))
        return batches

    # ---- writing ----
    def set(self, cursor: Any, data: Any, index_key: str | None = None, *, set_cursor: bool = True) -> NoReturn:
        raise _one_member("written to")

    def add(self, value: Any) -> NoReturn:
        """An error: write to a member."""
        raise _one_member("written to")

    def extend(self, value: Any) -> NoReturn:
        """An error: write to a member."""
        raise _one_member("written to")

    # ---- life ----
    def release(self) -> None:
        for storage in self._storages:
            storage.release()

    def attach(self, buffer: Any) -> None:
        for storage in self._storages:
            storage.attach(buffer)

    def _after_fork(self) -> None:
        self.mutex = _Mutexes(self._storages)  # type: ignore[assignment]

    # ---- checkpoints ----
    def parts(self) -> list[tuple[Any, Any]]:
        """The checkpointer of each member, and what it saves and fills."""
        return [(storage.checkpointer, storage.checkpointer.sink(storage.saved_form)) for storage in self._storages]

    def register_save_hook(self, hook: Any) -> None:
        for storage in self._storages:
            storage.register_save_hook(hook)

    def register_load_hook(self, hook: Any) -> None:
        for storage in self._storages:
            storage.register_load_hook(hook)

    def __repr__(self) -> str:
        members = ", ".join(map(repr, self._storages))
        return f"StorageEnsemble(storages=[{members}], transforms={self._transforms})"


def _one_member(what: str) -> RuntimeError:
    return RuntimeError(f"an ensemble is not {what} as a whole: use a member, as storage[0]")


class _MembersAccess(Access):
    """The locks of all members."""

    def __init__(self, table: Table, storages: list[Storage]) -> None:
        super().__init__(table)
        self._storages = storages

    @contextlib.contextmanager
    def exclusive(self, operation: str) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for storage in sorted(self._storages, key=id):
                held.enter_context(storage.mutex)
            for storage in self._storages:
                held.enter_context(storage.access.exclusive(operation))
            yield

    @contextlib.contextmanager
    def replacing(self, operation: str) -> Iterator[None]:
        with self.exclusive(operation), contextlib.ExitStack() as held:
            for storage in self._storages:  # after the last one that may be refused
                held.enter_context(storage.access.replacing(operation))
            yield


class _MembersPlaces(Place):
    """The places of all members."""

    def __init__(self, storages: list[Storage]) -> None:
        self._storages = storages

    def make(self, new: NewTable) -> NoReturn:
        raise _one_member("written to")

    def keeps_rows(self) -> bool:
        return False

    def shared(self, made: bool, name: str) -> NoReturn:
        raise not_shared(name)

    def opens_path(self) -> bool:
        return any(storage.access.table.place.opens_path() for storage in self._storages)

    def arguments(self, size: TableSize, made: Lanes | None) -> None:
        """None: its members are copied."""

    def flush(self) -> None:
        for storage in self._storages:
            storage.flush()

    def close(self) -> bool:
        for storage in self._storages:
            storage.close()
        return False


class _MembersRows(NoRows):
    """The rows of all members, which are not read or written as a whole."""

    replaces_in_place = False

    def __init__(self, storages: list[Storage]) -> None:
        super().__init__(Lanes.in_memory(1), _refused)  # lanes that count nothing: each member has its own
        self._storages = storages

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return sum(storage.nbytes for storage in self._storages)

    def view(self, steps: range | None = None) -> list[Any]:
        return [storage._storage for storage in self._storages]

    def leaf(self, path: KeyPath) -> NoReturn:
        raise _refused("leaf")

    def clear(self, reset_count: bool = True) -> None:
        for storage in self._storages:
            storage.empty(reset_count)


def _refused(method: str) -> RuntimeError:
    return _one_member("read" if method in ("read", "column", "leaf") else "written to")


def _ensemble(cls: Any, members: list[Storage], transforms: list[Any], checkpointer: Any) -> Any:
    return cls(*members, transforms=transforms, checkpointer=checkpointer)


class _HeldMutexes(threading.local):
    stack: list[contextlib.ExitStack] = []


class _Mutexes:
    """The mutexes of all members as one."""

    def __init__(self, storages: list[Storage]) -> None:
        self._storages = sorted(storages, key=id)  # one order for all ensembles, so that they cannot deadlock
        self._held = _HeldMutexes()

    def __enter__(self) -> None:
        mutexes = contextlib.ExitStack()
        for storage in self._storages:
            mutexes.enter_context(storage.mutex)
        self._held.stack = [*self._held.stack, mutexes]

    def __exit__(self, *error: object) -> None:
        self._held.stack.pop().close()
