"""Writers that go round the ring, and one that refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from engram.data.replay_buffers.writers.base import Writer

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage


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
