"""Slices in epochs: each trajectory once, then all over again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from engram import _native
from engram.data.replay_buffers.samplers.base import EpochInfo, Index, check_counts, check_epoch, stored_rows
from engram.data.replay_buffers.samplers.slices import SliceSampler
from engram.data.replay_buffers.utils import slots_tensor

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage


class SliceSamplerWithoutReplacement(SliceSampler):
    """Epochs over trajectories: a slice of each one that is long enough, at a start drawn uniformly.

    Trajectories that become long enough during an epoch join the next one; those that are overwritten, or have become
    too short, are skipped. The last batch of an epoch may have fewer slices.

    Args:
        drop_last: leave out a last batch that is not full.
        shuffle: trajectories in random order; else lane by lane, strand by strand, oldest first.
        Others: as SliceSampler; there is no `weight`.

    Raises:
        TypeError: a `weight`.

    Example:
        >>> sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode", shuffle=False)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> _ = rb.extend(TensorDict({"episode": torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])}, [8]))
        >>> [batch["episode"].tolist() for batch in rb]
        [[0, 0, 1, 1], [2, 2]]
    """

    def __init__(self, *, drop_last: bool = False, shuffle: bool = True, **slices: Any) -> None:
        if "weight" in slices:
            raise TypeError("an epoch has each trajectory once: there is no weight; use SliceSampler")
        super().__init__(**slices)
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._epoch: dict[str, Any] | None = None  # all that is saved
        self._walk: _native.SliceEpoch | None = None
        self._store_id: bytes | None = None  # of the store that the epoch is about; None: the next one
        self._ran_out = False
        self._number = self._drawn_from = -1  # of the epoch, and of that of the last draw, in this process

    def _said(self, storage: Storage, slices: _native.SliceBatch) -> tuple[Index, dict[str, Any]]:
        index, said = super()._said(storage, slices)
        info = EpochInfo(said)
        info.epoch = self._drawn_from
        return index, info

    def most_rows(self, storage: Storage, batch_size: int) -> int:
        return min(batch_size, stored_rows(storage))

    def redraw(self, storage: Storage, slots: Tensor, info: dict[str, Any], places: list[int]) -> Tensor:
        """Slices of other trajectories of the same epoch; where it has no more, the batch has fewer slices."""
        slices, ids = info["slices"], info["slice_id"]
        which = sorted({int(ids[place]) for place in places if place < len(ids)})
        epoch = getattr(info, "epoch", None)
        if self.drop_last or epoch is None or len(which) == len(slices):
            return super().redraw(storage, slots, info, places)
        with self.lock:
            fresh = self._more(storage, slices.rule, epoch, len(which))
        done = 0 if fresh is None else len(fresh)
        if fresh is not None:
            slices = slices.replaced(which[:done], fresh)
        slices = slices.without(which[done:])
        info.update(super()._said(storage, slices)[1])
        return slots_tensor(slices.slots())

    def _more(self, storage: Storage, rule: _native.SliceRule, epoch: int, n: int) -> _native.SliceBatch | None:
        """Up to n more slices of this epoch, such that a last batch remains, which says that it is the last."""
        now, walk = self._epoch, self._walk
        if now is None or walk is None or self._number != epoch:
            return None
        made, position, more = self.episodes.take(storage, rule, walk, now["position"], self.draw_seed(storage), n, 1)
        if not more:
            return None
        now["position"] = position
        return made

    def _slices(self, storage: Storage, rule: _native.SliceRule, n: int) -> _native.SliceBatch:
        for _ in range(100):  # an epoch can be over before it gave a slice, when writers overwrite all of it
            epoch, walk = self._begin_if_needed(storage, rule)
            if self.drop_last and n > len(walk):
                raise ValueError(
                    f"{n} slices are wanted, but only {len(walk)} trajectories have {rule.min_length} steps, and "
                    "drop_last leaves out batches that are not full; sample fewer"
                )
            slices, position, more = self.episodes.take(
                storage, rule, walk, epoch["position"], self.draw_seed(storage), n, n if self.drop_last else 1
            )
            epoch["position"] = position
            self._drawn_from, self._ran_out = self._number, not more
            if self._ran_out:
                self._epoch = self._walk = None
            if len(slices) == n or (len(slices) and not self.drop_last):
                return slices
        raise RuntimeError("writers overwrite the trajectories of an epoch before they can be read; use SliceSampler")

    def _begin_if_needed(self, storage: Storage, rule: _native.SliceRule) -> tuple[dict[str, Any], _native.SliceEpoch]:
        lanes = storage.lanes
        if lanes is None or not (len(lanes) or len(storage)):
            raise self._nothing(storage, rule)
        store, epoch = lanes.store, self._epoch
        fits = self._goes_on(store) and epoch is not None and epoch["min_length"] == rule.min_length
        self._store_id = store.store_id
        if not fits or epoch is None:
            key = int(self.draw_seed(storage)) if self.shuffle else 0
            walk = self.episodes.begin_epoch(storage, rule, key, self.shuffle)
            if not len(walk):
                raise self._nothing(storage, rule)
            epoch = {
                "key": key, "position": 0, "incarnation": store.incarnation, "min_length": rule.min_length,
                "counts": walk.counts, "lasts": walk.lasts,
            }  # fmt: skip
            self._walk, self._number = walk, next(EpochInfo.numbers)
        self._epoch = epoch
        return epoch, self._resumed(store, epoch)

    def _goes_on(self, store: _native.Store) -> bool:
        """Whether the epoch is one of this store."""
        epoch, known = self._epoch, self._store_id in (None, store.store_id)
        return known and epoch is not None and bool(epoch["incarnation"] == store.incarnation)

    def _resumed(self, store: _native.Store, epoch: dict[str, Any]) -> _native.SliceEpoch:
        if self._walk is None:
            self._check_epoch(store, epoch)
            # A store with more lanes than the one that was saved: they are not in the epoch.
            rest = store.lanes * store.strands - len(epoch["counts"])
            counts, lasts = epoch["counts"] + [0] * rest, epoch["lasts"] + [-1] * rest
            self._walk = _native.SliceEpoch(epoch["key"], self.shuffle, counts, lasts)
            self._number = next(EpochInfo.numbers)
        return self._walk

    def follow(self, storage: Storage) -> None:
        # An epoch that was loaded, and that cannot be one of this store, is an error now and not at the next batch.
        lanes = storage.lanes
        with self.lock:
            if lanes is not None and self._epoch is not None and self._goes_on(lanes.store):
                self._resumed(lanes.store, self._epoch)

    def empty(self) -> None:
        with self.lock:
            self._epoch = self._walk = None
            self._ran_out = False

    @property
    def ran_out(self) -> bool:
        return self._ran_out

    # ---- state ----
    def state_dict(self) -> dict[str, Any]:
        with self.lock:
            epoch = None if self._epoch is None else {**self._epoch}
            return {"epoch": epoch, "ran_out": self._ran_out, **self._decisive()}

    def _decisive(self) -> dict[str, Any]:
        return {**super()._decisive(), "shuffle": self.shuffle, "drop_last": self.drop_last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self.lock:
            super().load_state_dict(state)
            self._epoch, self._walk, self._store_id = state["epoch"] and {**state["epoch"]}, None, None
            self._ran_out = bool(state["ran_out"])

    def differences(self, state: dict[str, Any]) -> list[str]:
        check_epoch(state, "position", "incarnation", "min_length")
        if state["epoch"]:
            check_counts(state["epoch"]["counts"])
            check_counts(state["epoch"]["lasts"], least=-1)
            if len(state["epoch"]["counts"]) != len(state["epoch"]["lasts"]):
                raise ValueError("a saved epoch does not have a last step for each strand")
        return super().differences(state)

    def check_state(self, state: dict[str, Any], storage: Storage) -> None:
        super().check_state(state, storage)
        if storage.lanes is not None and state["epoch"] is not None:
            self._check_epoch(storage.lanes.store, state["epoch"])

    @staticmethod
    def _check_epoch(store: _native.Store, epoch: dict[str, Any]) -> None:
        if any(count > store.lane_capacity for count in epoch["counts"]):
            raise ValueError(f"an epoch of {max(epoch['counts'])} trajectories is not one of this storage")
        if len(epoch["counts"]) > store.lanes * store.strands:
            raise ValueError(f"an epoch of {len(epoch['counts'])} strands is not one of this storage")

    def position(self) -> Any:
        return self._epoch and {**self._epoch}, self._walk, self._ran_out

    def rewind(self, position: Any) -> None:
        epoch, walk, ran_out = position
        with self.lock:
            self._epoch, self._walk, self._ran_out = epoch and {**epoch}, walk, ran_out

    def adopt(self, incarnation: int, shifts: list[int]) -> None:
        """After `loads`: the epoch goes on in a store that counts anew."""
        with self.lock:
            if self._epoch is not None and shifts:
                strands = max(1, len(self._epoch["lasts"]) // len(shifts))
                lasts = [max(-1, last - shifts[k // strands]) for k, last in enumerate(self._epoch["lasts"])]
                self._epoch = {**self._epoch, "incarnation": incarnation, "lasts": lasts}
                self._walk = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_walk": None}

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, drop_last={self.drop_last}, shuffle={self.shuffle})"
