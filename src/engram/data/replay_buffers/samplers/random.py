"""Samplers that draw every stored step with equal probability, with replacement or in epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engram import _native
from engram.data.replay_buffers.samplers.base import (
    EMPTY,
    EpochInfo,
    Index,
    Sampler,
    check_counts,
    check_epoch,
    stored_rows,
)

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

    def take(self, store: _native.Store, position: int, n: int) -> tuple[Tensor, int]:
        """Up to n slots from `position` on, and the position after them."""
        lane, slots = store.lane(0), np.empty(0, np.int64)
        while position < len(self._rows) and len(slots) < n:
            rows = self._rows[position : position + n]
            sequences = rows // self._envs - self._moved
            exist = np.flatnonzero((sequences >= lane["first"]) & (sequences < lane["published"]))[: n - len(slots)]
            full = len(slots) + len(exist) == n
            position = position + int(exist[-1]) + 1 if full and len(exist) else min(position + n, len(self._rows))
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


class SamplerWithoutReplacement(Sampler, built_in=True):
    """Epochs: every stored step once, then all over again.

    Rows appended during an epoch join the next one; rows overwritten meanwhile are skipped. The order is a
    pseudorandom permutation that needs no memory of the size of the data.

    Args:
        drop_last: leave out a last batch that is not full.
        shuffle: in random order; else in the order of slots.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4)
        >>> _ = rb.extend(torch.arange(10))
        >>> [len(batch) for batch in rb]
        [4, 4, 2]
    """

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        super().__init__()
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._epoch: dict[str, Any] | None = None  # all that is saved
        self._walk: _native.EpochWalk | ExplicitOrder | None = None
        self._store_id: bytes | None = None  # of the store that the epoch is about; None: the next one
        self._ran_out = False
        self._epoch_id = -1  # in this process

    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        with self.lock:
            return self._draw(storage, batch_size)

    def _draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        lanes = storage.lanes
        if lanes is None or not (len(lanes) or len(storage)):
            raise RuntimeError(f"{EMPTY} Add or extend it first.")
        if self.drop_last and batch_size > len(lanes):
            raise ValueError(
                f"batch_size={batch_size} is larger than the {len(lanes)} stored steps, and drop_last leaves out "
                "batches that are not full; sample fewer"
            )
        for _ in range(100):  # an epoch can be over before it gave a row, when writers overwrite all of it
            self._begin_if_needed(storage, lanes)
            assert self._epoch is not None and self._walk is not None
            info = EpochInfo()
            info.epoch = self._epoch_id
            slots, position = self._walk.take(lanes.store, self._epoch["position"], batch_size)
            self._epoch["position"] = position
            self._ran_out = self._over(lanes, batch_size)
            if self._ran_out:
                self._epoch = self._walk = None
            if len(slots) and not (self.drop_last and len(slots) < batch_size):
                return (storage.from_slots(slots) if storage.ndim > 1 else slots), info
        raise RuntimeError("writers overwrite the rows of every epoch before they can be read; use RandomSampler")

    def _max_rows(self, storage: Storage, batch_size: int) -> int:
        return min(batch_size, stored_rows(storage))

    def _redraw(self, storage: Storage, slots: Tensor, info: dict[str, Any], positions: list[int]) -> Tensor:
        """Other rows of the same epoch for those that were lost; where it has no more, the batch has fewer rows."""
        positions = [position for position in positions if position < len(slots)]
        epoch = info.epoch if isinstance(info, EpochInfo) else None
        if self.drop_last or epoch is None or len(positions) == len(slots):
            return super()._redraw(storage, slots, info, positions)
        with self.lock:
            fresh = self._draw_more(storage, epoch, len(positions))
        keep = torch.ones(len(slots), dtype=torch.bool)
        keep[positions[len(fresh) :]] = False
        slots = slots.clone()
        slots[positions[: len(fresh)]] = fresh
        return slots[keep]

    def _draw_more(self, storage: Storage, epoch: int, n: int) -> Tensor:
        """Up to n more rows of this epoch, such that a last batch remains, which says that it is the last."""
        lanes = storage.lanes
        if lanes is not None and self._walk is not None and self._epoch is not None and self._epoch_id == epoch:
            drawn, position = self._walk.take(lanes.store, self._epoch["position"], n)
            rest, _ = self._walk.take(lanes.store, position, 1)
            if len(rest):
                self._epoch["position"] = position
                return drawn
        return torch.empty(0, dtype=torch.int64)

    def _begin_if_needed(self, storage: Storage, lanes: Lanes) -> None:
        epoch = self._epoch if self._goes_on(lanes) else None
        self._store_id = lanes.store.store_id
        if epoch is None:
            existing = [[s["first"], s["published"] - s["first"]] for s in lanes.states()]
            key = int(self._draw_seed(storage, lanes)) if self.shuffle else 0
            epoch = {
                "key": key, "ranges": existing, "position": 0, "incarnation": lanes.store.incarnation,
                "ring": lanes.store.lane_capacity, "moved": [0] * len(existing),
            }  # fmt: skip
            self._walk = None
        self._resume(lanes, epoch)
        self._epoch = epoch

    def _goes_on(self, lanes: Lanes) -> bool:
        """Whether the epoch is one of this store."""
        epoch, same_store = self._epoch, self._store_id in (None, lanes.store.store_id)
        return same_store and epoch is not None and bool(epoch["incarnation"] == lanes.store.incarnation)

    def _resume(self, lanes: Lanes, epoch: dict[str, Any]) -> None:
        if self._walk is not None:
            return
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
        self._epoch_id = next(EpochInfo.ids)

    def _over(self, lanes: Lanes, batch_size: int) -> bool:
        """Whether nothing (or, with drop_last, no full batch) is left of the epoch."""
        assert self._walk is not None and self._epoch is not None
        left = len(self._walk) - self._epoch["position"]
        if left >= batch_size and not self._some_overwritten(lanes):
            return False
        rest, _ = self._walk.take(lanes.store, self._epoch["position"], batch_size if self.drop_last else 1)
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
            return {"epoch": epoch, "ran_out": self._ran_out, **self._config()}

    def _config(self) -> dict[str, Any]:
        return {"shuffle": self.shuffle, "drop_last": self.drop_last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self.lock:
            super().load_state_dict(state)
            self._epoch, self._walk, self._store_id = state["epoch"] and {**state["epoch"]}, None, None
            self._ran_out = bool(state["ran_out"])

    def _get_cursor(self) -> Any:
        epoch = self._epoch
        return epoch, epoch and epoch["position"], self._walk, self._ran_out

    def _set_cursor(self, cursor: Any) -> None:
        epoch, at, walk, ran_out = cursor
        with self.lock:
            self._epoch, self._walk, self._ran_out = epoch and {**epoch, "position": at}, walk, ran_out

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_walk": None}

    def _differences(self, state: dict[str, Any]) -> list[str]:
        epoch = state["epoch"] or {}
        if "listed" in epoch:
            check_epoch(state, "position", "envs")
            check_list(epoch["listed"])
        else:
            check_epoch(state, "position", "incarnation")
        if epoch:
            _check_ranges(epoch)
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
            if lanes is not None and self._epoch is not None and self._goes_on(lanes):
                self._resume(lanes, self._epoch)

    def _rebase(self, incarnation: int, shifts: list[int]) -> None:
        with self.lock:
            if self._epoch is None:
                return
            self._walk = None
            moved = [m + sum(shifts[i : i + 1]) for i, m in enumerate(self._epoch["moved"])]
            self._epoch = {**self._epoch, "incarnation": incarnation, "moved": moved}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(drop_last={self.drop_last}, shuffle={self.shuffle})"


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
