"""Samplers that draw every stored step with equal probability, with replacement or in epochs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from engram import _native
from engram._system import drawing
from engram.data.replay_buffers.samplers.base import (
    EMPTY,
    DrawTotals,
    Sampler,
    WorkerShare,
    check_counts,
    check_epoch,
    check_full_batches,
    stored_rows,
)
from engram.data.replay_buffers.samplers.draw import Draw, EpochInfo, Index

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage
    from engram.store.lanes import Lanes


def check_list(rows: Any) -> None:
    """ValueError where what a saved epoch has for its list of rows is not one."""
    if not isinstance(rows, Tensor) or rows.dtype is not torch.int64 or rows.ndim != 1:
        raise ValueError(f"a saved epoch lists its rows as {rows!r:.80}")


class ExplicitOrder:
    """The order of an epoch whose rows are listed one by one; rows that are gone are left out."""

    def __init__(self, listed: Tensor, envs: int, moved: int = 0) -> None:
        self._rows, self._envs, self._moved = listed.numpy(), envs, moved

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, store: _native.Store, position: int, n: int, stop: int) -> tuple[Tensor, int]:
        """Up to n slots from `position` on and before `stop`, and the position after them."""
        lane, slots, stop = store.lane(0), np.empty(0, np.int64), min(stop, len(self._rows))
        while position < stop and len(slots) < n:
            rows = self._rows[position : min(position + n, stop)]
            sequences = rows // self._envs - self._moved
            exist = np.flatnonzero((sequences >= lane["first"]) & (sequences < lane["published"]))[: n - len(slots)]
            full = len(slots) + len(exist) == n
            position = position + int(exist[-1]) + 1 if full and len(exist) else min(position + n, stop)
            more = sequences[exist] % store.lane_capacity * self._envs + rows[exist] % self._envs
            slots = np.concatenate([slots, more])
        return torch.from_numpy(slots), position


class RandomSampler(Sampler, built_in=True):
    """Uniform over everything stored, with replacement.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler(), batch_size=3)
        >>> _ = rb.extend(torch.arange(5))
        >>> rb.sample().shape
        torch.Size([3])
    """

    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        lanes = storage.lanes
        with self.lock:
            slots = None if lanes is None else lanes.uniform(self._draw_seed(storage, lanes), batch_size)
        if slots is None:
            raise RuntimeError(f"{EMPTY} Add or extend it first.")
        return (storage.from_slots(slots) if storage.ndim > 1 else slots), {}

    def _native_draw(self, storage: Storage) -> _native.RowDraw:
        return _native.UniformDraw(self, drawing)

    def totals(self, storage: Storage, batch_size: int | None = None, *, newest: bool = True) -> DrawTotals:
        return DrawTotals(float(stored_rows(storage)))


def _no_lanes() -> None:
    """Where there are none yet."""


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

    _copied_as: ClassVar[Mapping[str, Any]] = {**Sampler._copied_as, "_walk": None, "_lanes": _no_lanes}

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
            raise ValueError(f"rank must be 0 to world_size - 1 = {world_size - 1}, got {rank}")
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.rank, self.world_size, self.seed = int(rank), int(world_size), int(seed)
        self._number = 0  # of the next epoch, where permutations come from a seed
        self._worker: WorkerShare | None = None  # in a worker process that has a part of each epoch
        self._least_parts = self.world_size  # in how many parts an epoch is cut
        self._stop = 0  # where this one's part of the epoch ends
        self._epoch: dict[str, Any] | None = None  # all that is saved
        self._walk: _native.EpochWalk | ExplicitOrder | None = None
        self._store_id: bytes | None = None  # of the store that the epoch is about; None: the next one
        self._is_loaded = False  # and nobody has said where its rows are now
        self._lanes: Callable[[], Lanes | None] = _no_lanes  # of that store, while it lives
        self._ran_out = False
        self._epoch_id = -1  # in this process

    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        with self.lock:
            return self._draw(storage, batch_size)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        begin, end = self._share(len(storage))
        return end - begin >= (batch_size if self.drop_last else 1)

    def _draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        lanes = storage.lanes
        if lanes is None or not (len(lanes) or len(storage)):
            raise RuntimeError(f"{EMPTY} Add or extend it first.")
        if self._least_parts > 1:
            self._check_share(batch_size, len(lanes))
        if self.drop_last and batch_size > len(lanes):
            raise ValueError(
                f"batch_size={batch_size} is greater than the storage capacity that is in use, {len(lanes)} steps, and "
                "drop_last leaves out batches that are not full; sample fewer"
            )
        for _ in range(100):  # an epoch can be over before it gave a row, when writers overwrite all of it
            self._begin_if_needed(storage, lanes)
            assert self._epoch is not None and self._walk is not None
            info = EpochInfo()
            info.epoch = self._epoch_id
            slots, position = self._walk.take(lanes.store, self._epoch["position"], batch_size, self._stop)
            self._epoch["position"] = position
            self._ran_out = self._over(lanes, batch_size)
            if self._ran_out:
                self._epoch = self._walk = None
            if len(slots) and not (self.drop_last and len(slots) < batch_size):
                return (storage.from_slots(slots) if storage.ndim > 1 else slots), info
        raise RuntimeError("writers overwrite the rows of every epoch before they can be read; use RandomSampler")

    def _native_draw(self, storage: Storage) -> _native.RowDraw:
        return _native.EpochDraw(partial(self._running, storage))

    def _running(self, storage: Storage) -> tuple[_native.EpochWalk, dict[str, Any]] | None:
        """The walk of the epoch that is running, and the epoch, whose position moves; None: `sample` draws.

        A batch of it is not the last, or `sample` draws it.
        """
        epoch, walk, lanes = self._epoch, self._walk, self._lanes()
        if epoch is None or type(walk) is not _native.EpochWalk or lanes is None or lanes is not storage.lanes:
            return None
        if self._least_parts > 1:  # it is over before the walk is
            return None
        if epoch["incarnation"] != lanes.store.incarnation:
            return None
        self._ran_out = False
        return walk, epoch

    def _check_batch_size(self, batch_size: int | None, storage: Storage) -> None:
        if self.drop_last:
            check_full_batches(batch_size, storage)

    def _max_rows(self, storage: Storage, batch_size: int) -> int:
        return min(batch_size, stored_rows(storage))

    @property
    def _sample_list(self) -> Tensor | None:
        """The slots that are left of the epoch, in their order: int64; None before the first one, empty after a last
        batch. It is made at each look, in time that grows with the epoch.
        """
        with self.lock:
            walk, epoch, lanes = self._walk, self._epoch, self._lanes()
            if walk is None or epoch is None or lanes is None:
                return torch.empty(0, dtype=torch.int64) if self._ran_out else None
            return walk.take(lanes.store, epoch["position"], len(walk), self._stop)[0]

    def _draw_batch(self, storage: Storage, batch_size: int) -> Draw:
        draw = super()._draw_batch(storage, batch_size)
        if isinstance(draw.info, EpochInfo) and not self.drop_last:  # a child of a user's own may give another info
            draw.rest = partial(self._draw_more, storage, draw.info.epoch)
        return draw

    def _draw_more(self, storage: Storage, epoch: int | None, n: int) -> Tensor:
        """Up to n more rows of this epoch, such that a last batch remains, which says that it is the last."""
        lanes = storage.lanes
        if lanes is not None and self._walk is not None and self._epoch is not None and self._epoch_id == epoch:
            drawn, position = self._walk.take(lanes.store, self._epoch["position"], n, self._stop)
            rest, _ = self._walk.take(lanes.store, position, 1, self._stop)
            if len(rest):
                self._epoch["position"] = position
                return drawn
        return torch.empty(0, dtype=torch.int64)

    def _begin_if_needed(self, storage: Storage, lanes: Lanes) -> None:
        self._place(storage, lanes)
        epoch = self._epoch if self._goes_on(lanes) else None
        self._store_id = lanes.store.store_id
        if epoch is None:
            existing = [[s["first"], s["published"] - s["first"]] for s in lanes.counters()]
            key = self._next_key(storage, lanes) if self.shuffle else 0
            epoch = {
                "key": key, "ranges": existing, "position": 0, "incarnation": lanes.store.incarnation,
                "ring": lanes.store.lane_capacity, "moved": [0] * len(existing),
            }  # fmt: skip
            if self._least_parts > 1:
                rows = sum(max(0, n) for _, n in existing) * lanes.envs
                epoch["position"], epoch["stop"] = self._share(rows)
            self._number += 1
            self._walk = None
        self._resume(lanes, epoch)
        self._epoch = epoch

    # ---- parts of one permutation ----
    def _next_key(self, storage: Storage, lanes: Lanes) -> int:
        """What the next epoch's permutation is made from."""
        if self.world_size > 1:
            return _key_of(self.seed, self._number)
        return (
            int(self._draw_seed(storage, lanes)) if self._worker is None else _key_of(self._worker.seed, self._number)
        )

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
        check_counts([epoch])
        with self.lock:
            self.empty()
            self._number = epoch

    def _place(self, storage: Storage, lanes: Lanes) -> None:
        """Finds the rows of an epoch that was loaded alone in the store of its storage."""
        if self._is_loaded and self._epoch is not None:
            self._rebase(lanes.store.incarnation, storage._shifts_since(self._epoch.get("lane_capacity")))

    def _goes_on(self, lanes: Lanes) -> bool:
        """Whether the epoch is one of this store."""
        epoch, same_store = self._epoch, self._store_id in (None, lanes.store.store_id)
        return same_store and epoch is not None and bool(epoch["incarnation"] == lanes.store.incarnation)

    def _resume(self, lanes: Lanes, epoch: dict[str, Any]) -> None:
        if self._walk is not None:
            return
        epoch["lane_capacity"] = lanes.store.lane_capacity
        if "listed" in epoch:
            self._walk = ExplicitOrder(epoch["listed"], lanes.envs, *epoch["moved"][:1])
        else:
            ranges = [(first, max(0, rows)) for first, rows in epoch["ranges"]]
            # A store with more lanes than the one that was saved: they are not in the epoch.
            more = lanes.store.lanes - len(ranges)
            self._walk = _native.EpochWalk(
                lanes.store, epoch["key"], self.shuffle, ranges + [(0, 0)] * more, epoch["ring"],
                epoch["moved"] + [0] * more,
            )  # fmt: skip
        self._stop = epoch.get("stop", len(self._walk))
        self._epoch_id = next(EpochInfo.ids)
        self._lanes = weakref.ref(lanes)

    def _over(self, lanes: Lanes, batch_size: int) -> bool:
        """Whether nothing (or, with drop_last, no full batch) is left of the epoch."""
        assert self._walk is not None and self._epoch is not None
        left = self._stop - self._epoch["position"]
        if left >= batch_size and not self._some_overwritten(lanes):
            return False
        rest, _ = self._walk.take(lanes.store, self._epoch["position"], batch_size if self.drop_last else 1, self._stop)
        return len(rest) < (batch_size if self.drop_last else 1)

    def _some_overwritten(self, lanes: Lanes) -> bool:
        assert self._epoch is not None
        lanes_then = zip(self._epoch["ranges"], self._epoch["moved"], strict=True)
        return any(lanes.store.lane(i)["first"] + moved > first for i, ((first, _), moved) in enumerate(lanes_then))

    def empty(self) -> None:
        with self.lock:
            self._epoch = self._walk = None
            self._ran_out = False

    @property
    def ran_out(self) -> bool:
        return self._ran_out

    def state_dict(self) -> dict[str, Any]:
        with self.lock:
            epoch = None if self._epoch is None else {**self._epoch, "ranges": [list(r) for r in self._epoch["ranges"]]}
            state = {"epoch": epoch, "ran_out": self._ran_out, **self._config()}
            return state if self.world_size == 1 else {**state, "number": self._number}

    @property
    def _kind(self) -> str:
        # Another kind: who does not know of parts would go through all of the permutation.
        return super()._kind + (" of several learners" if self.world_size > 1 else "")

    def _config(self) -> dict[str, Any]:
        parts = {"rank": self.rank, "world_size": self.world_size, "seed": self.seed} if self.world_size > 1 else {}
        return {"shuffle": self.shuffle, "drop_last": self.drop_last, **parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self.lock:
            super().load_state_dict(state)
            self._epoch, self._walk, self._store_id = state["epoch"] and {**state["epoch"]}, None, None
            self._is_loaded = True
            self._ran_out = bool(state["ran_out"])
            self._number = state.get("number", self._number)

    def _get_cursor(self) -> Any:
        epoch = self._epoch
        return epoch, epoch and epoch["position"], self._walk, self._ran_out, self._stop, self._number, self._is_loaded

    def _set_cursor(self, cursor: Any) -> None:
        epoch, at, walk, ran_out, stop, number, is_loaded = cursor
        with self.lock:
            self._epoch, self._walk, self._ran_out = epoch and {**epoch, "position": at}, walk, ran_out
            self._stop, self._number, self._is_loaded = stop, number, is_loaded

    def _differences(self, state: dict[str, Any]) -> list[str]:
        epoch = state["epoch"] or {}
        if "listed" in epoch:
            check_epoch(state, "position", "envs")
            check_list(epoch["listed"])
        else:
            check_epoch(state, "position", "incarnation")
        if epoch:
            _check_ranges(epoch)
        if self.world_size > 1:
            check_counts([state["number"], *([epoch["stop"]] if epoch else [])])
        return super()._differences(state)

    def _check_state(self, state: dict[str, Any], storage: Storage) -> None:
        lanes, epoch = storage.lanes, state["epoch"]
        if lanes is None or epoch is None:
            return
        if len(epoch["ranges"]) > lanes.store.lanes or any(n > lanes.store.lane_capacity for _, n in epoch["ranges"]):
            raise ValueError("a saved epoch has more rows than this storage")
        if "listed" in epoch and epoch["envs"] != lanes.envs:
            raise ValueError(f"a saved epoch has {epoch['envs']} environments, this storage {lanes.envs}")

    def _sync(self, storage: Storage) -> None:
        # An epoch that was loaded, and that cannot be one of this store, is an error now and not at the next batch.
        lanes = storage.lanes
        with self.lock:
            if lanes is not None:
                self._place(storage, lanes)
            if lanes is not None and self._epoch is not None and self._goes_on(lanes):
                self._resume(lanes, self._epoch)

    def _rebase(self, incarnation: int, shifts: list[int]) -> None:
        with self.lock:
            self._is_loaded = False
            if self._epoch is None:
                return
            self._walk = None
            moved = [m + sum(shifts[i : i + 1]) for i, m in enumerate(self._epoch["moved"])]
            self._epoch = {**self._epoch, "incarnation": incarnation, "moved": moved}

    def __repr__(self) -> str:
        part = f", rank={self.rank}, world_size={self.world_size}" if self.world_size > 1 else ""
        return f"{type(self).__name__}(drop_last={self.drop_last}, shuffle={self.shuffle}{part})"


def _key_of(seed: int, number: int) -> int:
    """The key of a permutation, the same in every process and version: 0 to 2**63 - 1."""
    return xxhash.xxh3_64_intdigest(f"engram epoch {seed} {number}".encode()) >> 1


def _check_ranges(epoch: dict[str, Any]) -> None:
    """ValueError where the rows of a saved epoch cannot exist."""
    ring, ranges, moved = epoch["ring"], epoch["ranges"], epoch["moved"]
    check_counts(moved)
    check_counts([ring], least=1)
    for lane in ranges:
        check_counts(lane)
        if len(lane) != 2 or lane[1] > ring:
            raise ValueError(f"a saved epoch has the range {lane!r:.80}")
    if len(moved) != len(ranges):
        raise ValueError(f"a saved epoch of {len(ranges)} lanes has moved by {moved!r:.80}")
