"""Samplers that draw every stored step with equal probability, with replacement or in epochs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor
from typing_extensions import Self

import engram._native as _native
from engram._checks import count
from engram._system import drawing
from engram.data.replay_buffers.samplers.base import (
    DrawTotals,
    Sampler,
    StateSetting,
    WorkerShare,
    has_rows,
    nothing_left,
    rows_left,
)
from engram.data.replay_buffers.samplers.draw import Draw, DrawPlan, EpochInfo, Index
from engram.data.replay_buffers.samplers.epochs import RowEpochs
from engram.data.replay_buffers.samplers.epochs import no_lanes as _no_lanes  # noqa: F401 - earlier pickles name it here
from engram.data.replay_buffers.state.parts import SavedPart

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage
    from engram.store.lanes import Lanes


class RandomSampler(Sampler, built_in=True):
    """Uniform over everything stored, with replacement.

    Args:
        rank: of several learners with one seed, which one this is: `dist.get_rank()`. Each draws other rows.
        replacement: False makes a `SamplerWithoutReplacement`, which takes the further arguments.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler(), batch_size=3)
        >>> _ = rb.extend(torch.arange(5))
        >>> rb.sample().shape
        torch.Size([3])
    """

    def __new__(cls, *args: Any, replacement: bool = True, **settings: Any) -> Self:
        if replacement or cls is not RandomSampler:
            return super().__new__(cls, *args, **settings)
        compilable = dict(zip(("compilable",), args, strict=False))
        return SamplerWithoutReplacement(**compilable, **settings)  # type: ignore[return-value]  # TorchRL's form

    def __init__(self, compilable: bool = False, *, replacement: bool = True, rank: int = 0) -> None:
        if not replacement:
            kind = type(self).__name__
            raise TypeError(f"a {kind} draws with replacement; one of SamplerWithoutReplacement does not")
        super().__init__(compilable, rank=rank)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        lanes = storage.lanes
        with self.lock:
            slots = lanes.uniform(self._draw_seed(storage, lanes), batch_size)
        if slots is None:
            raise nothing_left(storage)
        return (storage.from_slots(slots) if storage.ndim > 1 else slots), {}

    def draw_plan(self, storage: Storage) -> DrawPlan:
        plan = super().draw_plan(storage)
        return plan._replace(native=_native.UniformDraw(self, drawing), is_loose=lambda: True)

    def totals(self, storage: Storage, batch_size: int | None = None, *, newest: bool = True) -> DrawTotals:
        return DrawTotals(float(rows_left(storage)))

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        return super().can_sample(storage, batch_size) and rows_left(storage) > 0

    def draw_weights(self, storage: Storage, slots: Tensor) -> Tensor:
        return torch.ones(len(slots), dtype=torch.float64, device="cpu")


class SamplerWithoutReplacement(Sampler, built_in=True):
    """Epochs: every stored step once, then all over again.

    Rows appended during an epoch join the next one; rows overwritten meanwhile are skipped. The order is a
    pseudorandom permutation that needs no memory of the size of the data.

    Several learners, as `torchrun` starts them, share the epochs of one permutation: each gives the `rank`-th part of
    it, and no two give the same row. All make equally many steps: of n rows n % world_size are left out of an epoch,
    others of each. That needs the same stored rows in every learner, and the same batch size.

    Args:
        drop_last: leave out a last batch that is not full.
        shuffle: in random order; else in the order of slots.
        rank, world_size: which of how many learners this is: `dist.get_rank()`, `dist.get_world_size()`.
        seed: with several learners, what their permutations are made from, and the number of the epoch; the same in
            all of them. With one, permutations come from the generator as all draws.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4)
        >>> _ = rb.extend(torch.arange(10))
        >>> [len(batch) for batch in rb]
        [4, 4, 2]
        >>> for rank in range(2):
        ...     _ = rb.set_sampler(SamplerWithoutReplacement(shuffle=False, rank=rank, world_size=2))
        ...     print([batch.tolist() for batch in rb])
        [[0, 1, 2, 3], [4]]
        [[5, 6, 7, 8], [9]]
    """

    def __init__(
        self,
        drop_last: bool = False,
        shuffle: bool = True,
        *,
        compilable: bool = False,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(compilable)
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank must be 0 to world_size - 1 = {world_size - 1}, got {rank}: learners share each epoch, and "
                "world_size= says in how many parts it is cut"
            )
        self.rank, self.world_size, self.seed = int(rank), int(world_size), int(seed)
        self._worker: WorkerShare | None = None  # in a worker process that has a part of each epoch
        self._least_parts = self.world_size  # in how many parts an epoch is cut
        self.storage_state = RowEpochs(shuffle, drop_last)

    storage_state: RowEpochs
    drop_last = StateSetting[bool]("Whether a last batch that is not full is left out.", checked=bool)
    shuffle = StateSetting[bool]("In random order; else in the order of slots.", checked=bool)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        with self.lock:
            return self._draw(storage, batch_size)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        begin, end = self._share(rows_left(storage))
        return end - begin >= (batch_size if self.drop_last else 1)

    def _draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        lanes = storage.lanes
        if not (len(lanes) or has_rows(storage, lanes)) or lanes.all_removed:
            raise nothing_left(storage)
        if self._least_parts > 1:
            self._check_share(batch_size, rows_left(storage))
        epochs = self.storage_state
        if epochs.drop_last and batch_size > (left := rows_left(storage)):
            raise ValueError(
                f"batch_size={batch_size} is greater than the storage capacity that is in use, {left} steps, and "
                "drop_last leaves out batches that are not full; sample fewer"
            )
        share = self._share if self._least_parts > 1 else None
        for _ in range(100):  # an epoch can be over before it gave a row, when writers overwrite all of it
            epochs.go_on(storage, lanes, partial(self._next_key, storage, lanes), share)
            info = EpochInfo()
            info.epoch = epochs.id
            slots = epochs.take(lanes, batch_size)
            epochs.ran_out = epochs.is_over(lanes, batch_size)
            if epochs.ran_out:
                epochs.end()
            if len(slots) and not (epochs.drop_last and len(slots) < batch_size):
                return (storage.from_slots(slots) if storage.ndim > 1 else slots), info
        raise RuntimeError("writers overwrite the rows of every epoch before they can be read; use RandomSampler")

    def draw_weights(self, storage: Storage, slots: Tensor) -> Tensor:
        return torch.ones(len(slots), dtype=torch.float64, device="cpu")

    def draw_plan(self, storage: Storage) -> DrawPlan:
        plan = super().draw_plan(storage)
        return plan._replace(
            most_rows=lambda n: min(n, rows_left(storage)), full_batches=self.drop_last,
            native=_native.EpochDraw(partial(self._running, storage)), is_loose=lambda: self.shuffle,
        )  # fmt: skip

    def _running(self, storage: Storage) -> tuple[_native.EpochWalk, dict[str, Any]] | None:
        """The order of the running epoch, and what has its `position`; None: `sample` draws.

        A batch of it is not the last, or `sample` draws it.
        """
        epochs = self.storage_state
        epoch, walk, lanes = epochs.epoch, epochs.walk, storage.lanes
        if epoch is None or type(walk) is not _native.EpochWalk or epochs.lanes() is not lanes:
            return None
        if self._least_parts > 1:  # it is over before the walk is
            return None
        if epoch["incarnation"] != lanes.store.incarnation:
            return None
        epochs.ran_out = False
        return walk, epochs.place

    @property
    def _sample_list(self) -> Tensor | None:
        """The slots that are left of the epoch, in their order: int64; None before the first one, empty after a last
        batch. It is made at each look, in time that grows with the epoch.
        """
        with self.lock:
            return self.storage_state.rest()

    def as_draw(self, storage: Storage, *drawn: Any) -> Draw:
        draw = super().as_draw(storage, *drawn)
        # A child of a user's own may give another info.
        if isinstance(draw.info, EpochInfo) and not self.storage_state.drop_last:
            draw.rest = partial(self._draw_more, storage, draw.info.epoch)
        return draw

    def _draw_more(self, storage: Storage, epoch: int | None, n: int) -> Tensor:
        return self.storage_state.take_more(storage.lanes, epoch, n)

    # ---- parts of one permutation ----
    def _next_key(self, storage: Storage, lanes: Lanes) -> int:
        """What the next epoch's permutation is made from."""
        seed = self.seed if self.world_size > 1 else None if self._worker is None else self._worker.seed
        return int(self._draw_seed(storage, lanes)) if seed is None else _key_of(seed, self.storage_state.number)

    def _share(self, rows: int) -> tuple[int, int]:
        """The positions of a permutation of so many rows at which this one's part begins and ends."""
        each = rows // self.world_size
        worker, of = (0, 1) if self._worker is None else self._worker[:2]
        return self.rank * each + each * worker // of, self.rank * each + each * (worker + 1) // of

    def _check_share(self, batch_size: int, rows: int) -> None:
        """ValueError where this one's part of the epoch of so many rows gives no batch."""
        begin, end = self._share(rows)
        if end - begin < (batch_size if self.drop_last else 1):
            raise ValueError(
                f"{rows} stored steps in {self._least_parts} parts are too few for "
                f"{f'full batches of {batch_size}' if self.drop_last else 'one in each'}; "
                "use fewer learners or workers, or smaller batches"
            )

    def _split_among_workers(self, share: WorkerShare) -> None:
        with self.lock:
            self.empty()
            self._worker, self._least_parts = share, self.world_size * share.workers

    def set_epoch(self, epoch: int) -> None:
        """With several learners: the next epoch is the one of this number, the same in all of them."""
        number = count(epoch, "epoch", 0)
        with self.lock:
            self.empty()
            self.storage_state.number = number

    @property
    def ran_out(self) -> bool:
        return self.storage_state.ran_out

    def state_dict(self) -> dict[str, Any]:
        with self.lock:
            state = super().state_dict()
            return state if self.world_size == 1 else {**state, "number": self.storage_state.number}

    @property
    def saved_form(self) -> SavedPart:
        form = super().saved_form
        if self.world_size > 1:  # who does not know of parts would go through all of the permutation
            form.kind = f"{form.kind} of several learners"
        return form

    @classmethod
    def _of_earlier_pickle(cls, attributes: dict[str, Any]) -> None:
        if "storage_state" not in attributes:
            attributes["storage_state"] = RowEpochs.of_earlier_pickle(attributes)

    def _config(self) -> dict[str, Any]:
        parts = {"rank": self.rank, "world_size": self.world_size, "seed": self.seed} if self.world_size > 1 else {}
        return {**super()._config(), **parts}

    def __repr__(self) -> str:
        part = f", rank={self.rank}, world_size={self.world_size}" if self.world_size > 1 else ""
        return f"{type(self).__name__}(drop_last={self.drop_last}, shuffle={self.shuffle}{part})"


def _key_of(seed: int, number: int) -> int:
    """The key of a permutation, the same in every process and version: 0 to 2**63 - 1."""
    return xxhash.xxh3_64_intdigest(f"engram epoch {seed} {number}".encode()) >> 1
