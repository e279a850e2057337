"""Several storages, read together."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import Tensor

from engram.data.replay_buffers.storages.base import Checked, Rows, Storage
from engram.data.replay_buffers.storages.staging import StagedParts
from engram.errors import CheckpointMisfitError, differences_of
from engram.store.files import is_sent
from engram.store.indexing import Selection
from engram.store.lanes import Lanes
from engram.store.views import FrozenParts

_MISFIT = "the state does not fit this ensemble"


class StorageEnsemble(Storage):
    """Several storages, read together; written to one by one, each by itself.

    Args:
        storages: the members.
        transforms: what batches of each member go through, None for nothing; one for each member.

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
        self._members = list(storages)
        self._transforms = [None] * len(storages) if transforms is None else list(transforms)
        if len(self._transforms) != len(storages):
            raise ValueError(
                f"{len(storages)} storages, {len(self._transforms)} transforms; give one for each, or None"
            )
        super().__init__(None, checkpointer)
        self.mutex = _Mutexes(self._members)  # type: ignore[assignment]

    # ---- copies ----
    @property
    def travels_by_path(self) -> bool:
        return any(storage.travels_by_path for storage in self._members)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if is_sent():
            return object.__reduce_ex__(self, protocol)
        return _ensemble, (type(self), self._members, self._transforms, self._checkpointer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        make, parts = self.__reduce_ex__(4)
        memo[id(self)] = made = make(*copy.deepcopy(parts, memo))
        return made

    # ---- facts ----
    @property
    def storages(self) -> list[Storage]:
        """The members."""
        return list(self._members)

    @property
    def transforms(self) -> list[Any]:
        """What batches of each member go through; None for nothing."""
        return list(self._transforms)

    @property
    def lanes(self) -> Lanes | None:
        """None: each member has counters of its own."""
        return None

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes for storage in self._members)

    @property
    def _storage(self) -> list[Any]:
        return [storage._storage for storage in self._members]

    @property
    def _is_full(self) -> bool:
        return all(storage._is_full for storage in self._members)

    def __len__(self) -> int:
        """The number of members."""
        return len(self._members)

    # ---- reading ----
    def __getitem__(self, index: Any) -> Any:
        """A member; with a tuple `(member, ...)` rows of it."""
        if isinstance(index, tuple):
            return self._members[index[0]][index[1:] if len(index) > 2 else index[1]]
        return self._members[index]

    def get(self, index: Any) -> list[Any]:
        """The rows of several members, each through its transform.

        Args:
            index: a mapping with `"buffer_ids"` (a member for each entry) and `"index"` (an index for each).
        """
        batches = []
        for member, rows in zip(index["buffer_ids"], index["index"], strict=True):
            ids = member.reshape(-1)[0] if isinstance(member, Tensor) else member
            batch = self._members[int(ids)].get(rows)
            transform = self._transforms[int(ids)]
            batches.append(batch if transform is None else transform(batch))
        return batches

    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        numbers: bool = False,
    ) -> Rows:
        raise self._one_member("read")

    def leaf(self, path: Any) -> NoReturn:
        raise self._one_member("leaf")

    def column(self, path: Any, slots: Tensor) -> NoReturn:
        raise self._one_member("column")

    # ---- writing ----
    def check(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._one_member("written to")

    def append(self, checked: Checked, most: int | None = None) -> NoReturn:
        raise self._one_member("written to")

    def replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> NoReturn:
        raise self._one_member("written to")

    def overwrite(self, slots: Tensor, items: Any, index_key: str | None = None) -> NoReturn:
        raise self._one_member("written to")

    def set(self, index: Any, items: Any, index_key: str | None = None) -> NoReturn:
        raise self._one_member("written to")

    def _set(self, selection: Selection, items: Any, index_key: str | None) -> NoReturn:
        raise self._one_member("written to")

    @staticmethod
    def _one_member(what: str) -> RuntimeError:
        return RuntimeError(f"an ensemble is not {what} as a whole: use a member, as storage[0]")

    # ---- life ----
    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for storage in self._members:
                held.enter_context(storage.alone(what))
            yield

    @contextlib.contextmanager
    def replacing(self, what: str) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for storage in self._members:
                held.enter_context(storage.alone(what))
            for storage in self._members:  # when nothing can refuse any more
                held.enter_context(storage.replacing(what))
            yield

    @property
    def is_empty(self) -> bool:
        return all(storage.is_empty for storage in self._members)

    def empty(self, reset_count: bool = True) -> None:
        with self.replacing("empty"):
            for storage in self._members:
                storage.empty(reset_count)

    def attach(self, buffer: Any) -> None:
        for storage in self._members:
            storage.attach(buffer)

    def flush(self) -> None:
        for storage in self._members:
            storage.flush()

    def release(self) -> None:
        for storage in self._members:
            storage.release()

    def close(self) -> None:
        for storage in self._members:
            storage.close()

    def after_fork(self) -> None:
        self.mutex = _Mutexes(self._members)  # type: ignore[assignment]

    # ---- checkpoints ----
    def _default_checkpointer(self) -> Any:
        from engram.data.replay_buffers.checkpointers.ensemble import StorageEnsembleCheckpointer

        return StorageEnsembleCheckpointer()

    def parts(self) -> list[tuple[Any, Storage]]:
        """Each member behind its checkpointer."""
        return [(storage.checkpointer, storage) for storage in self._members]

    def freeze(self) -> FrozenParts:
        return FrozenParts([(storage.checkpointer, storage.freeze()) for storage in self._members])

    @contextlib.contextmanager
    def still(self) -> Iterator[FrozenParts]:
        with contextlib.ExitStack() as stack:
            yield FrozenParts(
                [(storage.checkpointer, stack.enter_context(storage.still())) for storage in self._members]
            )

    def register_save_hook(self, hook: Any) -> None:
        for storage in self._members:
            storage.register_save_hook(hook)

    def register_load_hook(self, hook: Any) -> None:
        for storage in self._members:
            storage.register_load_hook(hook)

    def state_dict(self) -> dict[str, Any]:
        return {"members": [storage.state_dict() for storage in self._members]}

    def check_state(self, state: dict[str, Any]) -> None:
        if len(state["members"]) != len(self):
            raise CheckpointMisfitError(_MISFIT, [f"{len(self)} members here, {len(state['members'])} there"])
        said: list[str] = []
        for i, (storage, saved) in enumerate(zip(self._members, state["members"], strict=True)):
            try:
                storage.check_state(saved)
            except ValueError as error:
                said += [f"member {i}: {what}" for what in differences_of(error)]
        if said:
            raise CheckpointMisfitError(_MISFIT, said)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state(state)
        with self.replacing("load_state_dict"):
            for storage, saved in zip(self._members, state["members"], strict=True):
                storage.load_state_dict(saved)

    def staging(self) -> StagedParts | None:
        staged = [storage.staging() for storage in self._members]
        return None if None in staged else StagedParts([m.checkpointer for m in self._members], staged)

    def kept(self) -> Callable[[], None] | None:
        undone = [storage.kept() for storage in self._members]
        if None in undone:
            return None

        def bring_back() -> None:
            for undo in undone:
                undo()  # type: ignore[misc]

        return bring_back

    def hand_over(self, sampler: Any) -> None:
        for storage, one in zip(self._members, sampler._members, strict=True):
            storage.hand_over(one)

    def __repr__(self) -> str:
        members = ", ".join(map(repr, self._members))
        return f"StorageEnsemble(storages=[{members}], transforms={self._transforms})"


def _ensemble(cls: Any, members: list[Storage], transforms: list[Any], checkpointer: Any) -> Any:
    return cls(*members, transforms=transforms, checkpointer=checkpointer)


class _Mutexes:
    """The mutexes of all members as one."""

    def __init__(self, storages: list[Storage]) -> None:
        self._storages = sorted(storages, key=id)  # one order for all ensembles, so that none waits for another
        self._held = threading.local()

    def __enter__(self) -> None:
        taken = contextlib.ExitStack()
        for storage in self._storages:
            taken.enter_context(storage.mutex)
        self._held.stack = [*getattr(self._held, "stack", []), taken]

    def __exit__(self, *error: object) -> None:
        self._held.stack.pop().close()
