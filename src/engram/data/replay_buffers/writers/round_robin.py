"""What a writer is, and those that write behind the newest row."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage


class Writer(abc.ABC):
    """Decides where new rows go.

    A writer of your own is a class with `write(storage, items, single, time_dim) -> slots`; it need not inherit from
    this one. It may also have any of `index_key`, `register_storage`, `check_mutable`, `empty`, `state_dict` and
    `load_state_dict`, as they are described here.
    """

    #: The key under which each row also stores its own index; None: it does not.
    index_key: str | None = None

    #: Whether it is one of the library's own classes, which assign their attributes and never change them in place.
    #: Of a child that a user writes this need not hold, whatever its base.
    _built_in = False

    def __init_subclass__(cls, *, built_in: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._built_in = built_in

    def __init__(self) -> None:
        self._storage: Storage | None = None

    def register_storage(self, storage: Storage) -> None:
        """Writes to this storage from now on."""
        self._storage = storage

    @abc.abstractmethod
    def write(self, storage: Storage, items: Any, single: bool, time_dim: int) -> Tensor | int:
        """Checks a batch (or one step, `single`) and writes it; returns slots, int64 [steps * environments]; -1: not
        written.

        Raises:
            ValueError, TypeError: the batch does not fit; nothing was written.
        """

    def check_mutable(self, operation: str) -> None:
        """Called before stored rows are changed or forgotten.

        Raises:
            RuntimeError: this writer forbids it.
        """

    @property
    def _cursor(self) -> int:
        """Where the next row goes, along the first dimension."""
        lanes = None if self._storage is None else self._storage.lanes
        return 0 if self._storage is None or lanes is None else self._storage._settled(lambda: lanes.cursor)

    def empty(self) -> None:
        """Forgets what was written."""

    def state_dict(self) -> dict[str, Any]:
        """What must be saved; the cursor belongs to the storage's counters."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state."""

    # ---- between the parts of a buffer ----
    @property
    def _given(self) -> Any:
        """The object that the user gave: this one, or the one that is adapted."""
        return self

    @property
    def _kind(self) -> str:
        """The name that its state is saved under."""
        return type(self).__name__

    @property
    def _members(self) -> list[Writer]:
        """The writers that it consists of."""
        return []

    def _differences(self, state: dict[str, Any]) -> list[str]:
        """What of a saved state does not fit this writer."""
        return []

    def __repr__(self) -> str:
        return f"{type(self).__name__}(cursor={self._cursor})"


class _AdaptedWriter(Writer):
    """A writer of a user's own that is no `Writer`, with what it leaves out."""

    def __init__(self, writer: Any) -> None:
        super().__init__()
        self._own = writer
        self.index_key = getattr(writer, "index_key", None)

    @property
    def _given(self) -> Any:
        return self._own

    @property
    def _kind(self) -> str:
        return type(self._own).__name__

    def register_storage(self, storage: Storage) -> None:
        super().register_storage(storage)
        self._call("register_storage", storage)

    def write(self, storage: Storage, items: Any, single: bool, time_dim: int) -> Tensor | int:
        slots: Tensor | int = self._own.write(storage, items, single, time_dim)
        return slots

    def check_mutable(self, operation: str) -> None:
        self._call("check_mutable", operation)

    def empty(self) -> None:
        self._call("empty")

    def state_dict(self) -> dict[str, Any]:
        return self._call("state_dict") or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._call("load_state_dict", state)

    def _call(self, name: str, *args: Any) -> Any:
        method = getattr(self._own, name, None)
        return None if method is None else method(*args)

    def __repr__(self) -> str:
        return repr(self._own)


def as_writer(writer: Any) -> Writer:
    """A Writer from what a user gave.

    Raises:
        TypeError: it has no method `write`.
    """
    if isinstance(writer, Writer):
        return writer
    if isinstance(writer, type) or not callable(getattr(writer, "write", None)):
        kind = writer.__name__ if isinstance(writer, type) else f"a {type(writer).__name__}"
        raise TypeError(f"a writer is an object with write(storage, items, single, time_dim) -> slots, got {kind}")
    return _AdaptedWriter(writer)


class RoundRobinWriter(Writer, built_in=True):
    """Writes behind the newest row; in a full storage over the oldest.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), writer=RoundRobinWriter())
        >>> rb.extend(torch.arange(25))[-5:], rb.writer._cursor
        (tensor([0, 1, 2, 3, 4]), 5)
    """

    def write(self, storage: Storage, items: Any, single: bool, time_dim: int) -> Tensor | int:
        return storage.append(storage.check(items, single, time_dim, self.index_key))


class TensorDictRoundRobinWriter(RoundRobinWriter, built_in=True):
    """A RoundRobinWriter under which each row also stores its own slot, under `"index"`."""

    index_key = "index"


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
