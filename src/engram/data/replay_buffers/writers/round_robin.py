"""Which slots to write."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage


class Writer(abc.ABC):
    """Decides where new rows go."""

    #: The key under which each row also stores its own index; None: it does not.
    index_key: str | None = None

    def __init__(self) -> None:
        self._storage: Storage | None = None

    def register_storage(self, storage: Storage) -> None:
        """Writes to this storage from now on."""
        self._storage = storage

    @abc.abstractmethod
    def write(self, storage: Storage, items: Any, single: bool, time_dim: int) -> Tensor | int:
        """Checks and writes a batch (or one step, `single`); returns slots, int64 [steps * strands]; -1: not written.

        Raises:
            ValueError, TypeError: the batch does not fit; nothing was written.
        """

    def allow(self, what: str) -> None:
        """Called before stored rows are changed or forgotten; raises where this writer forbids it."""

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}(cursor={self._cursor})"


class RoundRobinWriter(Writer):
    """Writes behind the newest row; in a full storage over the oldest.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), writer=RoundRobinWriter())
        >>> rb.extend(torch.arange(25))[-5:], rb.writer._cursor
        (tensor([0, 1, 2, 3, 4]), 5)
    """

    def write(self, storage: Storage, items: Any, single: bool, time_dim: int) -> Tensor | int:
        return storage.append(storage.check(items, single, time_dim, self.index_key))


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """The same, and each row also stores its own slot under `"index"`."""

    index_key = "index"


class ImmutableDatasetWriter(Writer):
    """For data that must not change: any write is an error."""

    def write(self, storage: Storage, items: Any, single: bool, time_dim: int) -> Tensor | int:
        raise self._refusal("writing")

    def allow(self, what: str) -> None:
        raise self._refusal(what)

    def _refusal(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"this buffer is an immutable dataset (ImmutableDatasetWriter), which {what} would change. "
            "set_writer(RoundRobinWriter()) makes it writable"
        )
