"""Epochs of rows and of trajectories: what is left of the running one, and how it is saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

import engram._native as _native
from engram import _forms as forms
from engram.data.replay_buffers.samplers.base import StorageState, has_rows
from engram.data.replay_buffers.samplers.draw import EpochInfo
from engram.data.replay_buffers.samplers.runs import RunSource, Seed, nothing_to_draw
from engram.store.episodes import EpisodeIndex

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage
    from engram.store.lanes import Lanes

_COUNT, _FROM_ONE = forms.integer(), forms.integer(1)
_EPOCH = {"position": _COUNT, "key": forms.integer(0, (1 << 64) - 1)}
_STORE = {"lane_capacity": forms.nullable(_FROM_ONE)}
_RANGES = {"ring": _FROM_ONE, "ranges": forms.list_of(forms.fields(_COUNT, _COUNT)), "moved": forms.list_of(_COUNT)}
_OF_ROWS = forms.record({**_EPOCH, **_RANGES, "incarnation": _COUNT}, {**_STORE, "stop": _COUNT})
_OF_LISTED_ROWS = forms.record(
    {**_EPOCH, **_RANGES, "listed": forms.tensor(torch.int64, ndim=1), "envs": _FROM_ONE},
    {**_STORE, "stop": _COUNT, "incarnation": forms.nullable(_COUNT)},
)
_LASTS = forms.list_of(forms.integer(-1))
_OF_TRAJECTORIES = forms.record(
    {**_EPOCH, "incarnation": _COUNT, "min_length": _COUNT, "counts": forms.list_of(_COUNT), "lasts": _LASTS}, _STORE
)

_EARLIER = {
    "_store_id": "_store_id", "_is_loaded": "_is_loaded", "_ran_out": "ran_out", "_epoch_id": "id", "_stop": "stop",
    "_number": "number", "_drawn_epoch_id": "drawn",
}  # fmt: skip


class Epochs(StorageState):
    """The epochs of one storage; of what, the child says. The caller holds the sampler's lock.

    Attributes:
        shuffle: whether an epoch is in random order.
        drop_last: whether a last batch that is not full is left out.
        epoch: what is saved of the running epoch beside its position, never changed in place; None: the next draw
            begins one.
        place: its `position`, how much of it was drawn: all that a draw of native code changes.
        walk: its order, in this process; None: to be made of what is saved.
        id: names it in this process.
        number: how many epochs have begun: that of the next one, where permutations come from a seed.
        ran_out: whether the last draw was the last of its epoch.
        restarts: how often it was emptied, loaded or told to go on elsewhere.
    """

    _copied_as: ClassVar[Mapping[str, Any]] = {"walk": None}

    number: int = 0  # of pickles that lack it

    def __init__(self, shuffle: bool, drop_last: bool) -> None:
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self.epoch: dict[str, Any] | None = None
        self.place = {"position": 0}
        self.walk: Any = None
        self.id = -1
        self.number = self.restarts = 0
        self.ran_out = False
        self._store_id: bytes | None = None  # of the store that the epoch is about; None: the next one
        self._is_loaded = False  # and nobody has said where its rows are now

    @classmethod
    def of_earlier_pickle(cls, attributes: dict[str, Any]) -> Self:
        """The epochs of a sampler whose pickle has them as attributes of its own, which are taken out."""
        epochs = cls(attributes.pop("shuffle"), attributes.pop("drop_last"))
        epoch = attributes.pop("_epoch")
        for name in [name for name in _EARLIER if name in attributes]:
            setattr(epochs, _EARLIER[name], attributes.pop(name))
        for name in {"_walk", "_lanes"} & attributes.keys():
            del attributes[name]
        epochs._begin(epoch)
        return epochs

    def _begin(self, epoch: dict[str, Any] | None) -> None:
        """Goes on with an epoch as it is saved, or with none."""
        self.epoch = epoch and {name: value for name, value in epoch.items() if name != "position"}
        self.place["position"] = epoch["position"] if epoch else 0
        self.walk = None

    def end(self) -> None:
        """The next draw begins an epoch."""
        self.epoch = self.walk = None

    def is_running(self, id: int | None) -> bool:
        """Whether the epoch of this number is the running one."""
        return self.epoch is not None and self.walk is not None and self.id == id

    def find_loaded(self, storage: Storage, store: _native.Store) -> None:
        """Finds the rows of an epoch that was loaded alone in the store of its storage."""
        if self._is_loaded and self.epoch is not None:
            self._move(store.incarnation, storage.lanes.shifts_since(self.epoch.get("lane_capacity")))

    def goes_on(self, store: _native.Store) -> bool:
        """Whether the epoch is one of this store."""
        epoch, same_store = self.epoch, self._store_id in (None, store.store_id)
        return same_store and epoch is not None and bool(epoch["incarnation"] == store.incarnation)

    def _move(self, incarnation: int, shifts: list[int]) -> None:
        """Goes on in a store with this incarnation, whose sequences are lower by `shifts`, one a lane."""
        self._is_loaded = False
        if self.epoch is not None:
            self.epoch, self.walk = {**self._moved(self.epoch, shifts), "incarnation": incarnation}, None

    def _moved(self, epoch: dict[str, Any], shifts: list[int]) -> dict[str, Any]:
        """An epoch whose rows have sequences that are lower by this much."""
        raise NotImplementedError

    def _make_walk(self, lanes: Lanes) -> None:
        """Makes the order of the running epoch from what is saved of it; ValueError where it is not of this store."""
        raise NotImplementedError

    def resume(self, lanes: Lanes) -> None:
        """Makes the order of an epoch that goes on in this store, where it is not made."""
        if self.walk is None and self.epoch is not None:
            self._make_walk(lanes)
            self.epoch = {**self.epoch, "lane_capacity": lanes.store.lane_capacity}
            self.id = next(EpochInfo.ids)

    # ---- state ----
    def settings(self) -> dict[str, Any]:
        return {"shuffle": self.shuffle, "drop_last": self.drop_last}

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch and {**self.epoch, "position": self.place["position"]}, "ran_out": self.ran_out}

    def restored(self, state: dict[str, Any]) -> Self:
        made = self._twin()
        made._begin(state["epoch"])
        made._store_id, made._is_loaded, made.ran_out = None, True, bool(state["ran_out"])
        made.restarts += 1
        return made

    def rebased(self, incarnation: int, shifts: list[int]) -> Self:
        made = self._twin()
        made.restarts += 1
        made._move(incarnation, shifts)
        return made

    def sync(self, storage: Storage) -> None:
        # An epoch that was loaded, and that cannot be one of this store, is an error now and not at the next batch.
        lanes = storage.lanes
        twin = self._twin()  # after an error this one is as it was
        twin.find_loaded(storage, lanes.store)
        if twin.goes_on(lanes.store):
            twin.resume(lanes)
        self.put_back(twin.cursor())

    def cursor(self) -> tuple[Any, ...]:
        # Not `vars`: an object whose `vars` were asked for finds its attributes more slowly from then on.
        return (
            self.epoch, self.place["position"], self.walk, self.id, self.number, self.ran_out, self._store_id,
            self._is_loaded, self.restarts,
        )  # fmt: skip

    def put_back(self, cursor: tuple[Any, ...]) -> None:
        if cursor[-1] == self.restarts:
            self._stand_at(cursor)

    def _stand_at(self, cursor: tuple[Any, ...]) -> None:
        (
            self.epoch, position, self.walk, self.id, self.number, self.ran_out, self._store_id, self._is_loaded,
            self.restarts,
        ) = cursor  # fmt: skip
        self.place = {"position": position}

    def empty(self) -> None:
        self.end()
        self.restarts += 1
        self.ran_out = False

    def copied(self) -> Self:
        made = super().copied()
        made.place = {**self.place}
        return made

    def _twin(self) -> Self:
        twin = type(self)(self.shuffle, self.drop_last)
        twin.restarts = self.restarts
        twin.put_back(self.cursor())
        return twin


def no_lanes() -> None:
    """Where there are none yet."""


def _part(lanes: Lanes, epoch: dict[str, Any], share: Callable[[int], Any]) -> tuple[int, int]:
    """The positions of an epoch that begins from and up to which rows are drawn; all parts are equally many rows."""
    store, ranges = lanes.store, [(first, max(0, n)) for first, n in epoch["ranges"]]
    rows, removed = sum(n for _, n in ranges) * lanes.envs, store.removed_rows
    begin, stop = share(max(0, rows - removed))
    if not removed:
        return begin, stop
    walk = _native.EpochWalk(store, epoch["key"], bool(epoch["key"]), ranges, epoch["ring"])
    return tuple(walk.take(store, 0, left)[1] if left else 0 for left in (begin, stop))  # type: ignore[return-value]


class RowEpochs(Epochs):
    """Epochs of rows: `ranges` of sequences, one a lane, or `listed` ones.

    Attributes:
        stop: the position at which this sampler's part of the epoch ends.
        lanes: gives those of the store that the epoch is about, while it lives.
    """

    _copied_as: ClassVar[Mapping[str, Any]] = {**Epochs._copied_as, "lanes": no_lanes}

    walk: _native.EpochWalk | ExplicitOrder | None

    def __init__(self, shuffle: bool, drop_last: bool) -> None:
        super().__init__(shuffle, drop_last)
        self.stop = 0
        self.lanes: Callable[[], Lanes | None] = no_lanes

    def go_on(self, storage: Storage, lanes: Lanes, key: Callable[[], int], share: Callable[[int], Any] | None) -> None:
        """Begins an epoch over the rows that exist, where none is running in this store.

        Args:
            key: gives what its permutation is made from.
            share: from the number of rows that are left, the part of them that is drawn: from and up to the how-manieth
                in the epoch's order; None: all are.
        """
        if self._is_loaded:
            self.find_loaded(storage, lanes.store)
        goes_on = self.goes_on(lanes.store)
        self._store_id = lanes.store.store_id
        if not goes_on:
            existing = [[s["first"], s["published"] - s["first"]] for s in lanes.counters()]
            epoch = {
                "key": key() if self.shuffle else 0, "ranges": existing, "position": 0,
                "incarnation": lanes.store.incarnation, "ring": lanes.store.lane_capacity, "moved": [0] * len(existing),
            }  # fmt: skip
            if share is not None:
                epoch["position"], epoch["stop"] = _part(lanes, epoch, share)
            self.number += 1
            self._begin(epoch)
        if self.walk is None:
            self.resume(lanes)

    def take(self, lanes: Lanes, n: int) -> Tensor:
        """The next n slots of the running epoch, or the last ones of it."""
        assert self.walk is not None
        slots, self.place["position"] = self.walk.take(lanes.store, self.place["position"], n, self.stop)
        return slots

    def is_over(self, lanes: Lanes, n: int) -> bool:
        """Whether nothing (or, with `drop_last`, no full batch of n) is left of the running epoch."""
        assert self.walk is not None
        least = n if self.drop_last else 1
        if self.stop - self.place["position"] >= n and not self._some_gone(lanes):
            return False
        return len(self.walk.take(lanes.store, self.place["position"], least, self.stop)[0]) < least

    def take_more(self, lanes: Lanes, id: int | None, n: int) -> Tensor:
        """Up to n more slots of this epoch, such that a last batch remains, which says that it is the last."""
        if self.walk is not None and self.is_running(id):
            drawn, position = self.walk.take(lanes.store, self.place["position"], n, self.stop)
            if len(self.walk.take(lanes.store, position, 1, self.stop)[0]):
                self.place["position"] = position
                return drawn
        return torch.empty(0, dtype=torch.int64, device="cpu")

    def rest(self) -> Tensor | None:
        """The slots that are left of the epoch, in their order; None before the first one, empty after a last batch."""
        lanes = self.lanes()
        if self.walk is None or self.epoch is None or lanes is None:
            return torch.empty(0, dtype=torch.int64, device="cpu") if self.ran_out else None
        return self.walk.take(lanes.store, self.place["position"], len(self.walk), self.stop)[0]

    def _some_gone(self, lanes: Lanes) -> bool:
        """Whether rows of the epoch were overwritten since it began, or rows were removed."""
        assert self.epoch is not None
        if lanes.store.removed_rows:
            return True
        lanes_then = zip(self.epoch["ranges"], self.epoch["moved"], strict=True)
        return any(lanes.store.lane(i)["first"] + moved > first for i, ((first, _), moved) in enumerate(lanes_then))

    def _moved(self, epoch: dict[str, Any], shifts: list[int]) -> dict[str, Any]:
        return {**epoch, "moved": [moved + sum(shifts[i : i + 1]) for i, moved in enumerate(epoch["moved"])]}

    def _make_walk(self, lanes: Lanes) -> None:
        assert self.epoch is not None
        epoch = self.epoch
        if "listed" in epoch:
            self.walk = ExplicitOrder(epoch["listed"], lanes.envs, *epoch["moved"][:1])
        else:
            ranges = [(first, max(0, rows)) for first, rows in epoch["ranges"]]
            # A store with more lanes than the one that was saved: they are not in the epoch.
            more = lanes.store.lanes - len(ranges)
            self.walk = _native.EpochWalk(
                lanes.store,
                epoch["key"],
                bool(epoch["key"]),  # `shuffle` may have been set since it began
                ranges + [(0, 0)] * more,
                epoch["ring"],
                epoch["moved"] + [0] * more,
            )
        self.stop = epoch.get("stop", len(self.walk))
        self.lanes = weakref.ref(lanes)

    # ---- state ----
    def cursor(self) -> tuple[Any, ...]:
        return (
            self.stop, self.lanes, self.epoch, self.place["position"], self.walk, self.id, self.number, self.ran_out,
            self._store_id, self._is_loaded, self.restarts,
        )  # fmt: skip

    def _stand_at(self, cursor: tuple[Any, ...]) -> None:
        self.stop, self.lanes = cursor[:2]
        super()._stand_at(cursor[2:])

    def state(self) -> dict[str, Any]:
        state = super().state()
        if state["epoch"]:
            state["epoch"]["ranges"] = [list(rows) for rows in state["epoch"]["ranges"]]
        return state

    def restored(self, state: dict[str, Any]) -> Self:
        made = super().restored(state)
        made.number = state.get("number", self.number)
        return made

    def check_saved(self, state: dict[str, Any]) -> None:
        epoch = state.get("epoch")
        is_listed = isinstance(epoch, dict) and "listed" in epoch
        _check_epoch(state, _OF_LISTED_ROWS if is_listed else _OF_ROWS)
        if epoch is not None:
            _check_ranges(epoch)
        if state.get("world_size", 1) != 1:  # an epoch of several learners ends where this one's part of it does
            forms.check(forms.record({"number": _COUNT}), state, "the state of the sampler")
            forms.check(forms.nullable(forms.record({"stop": _COUNT})), epoch, "the state of the sampler.epoch")

    def check(self, state: dict[str, Any], storage: Storage) -> None:
        lanes, epoch = storage.lanes, state["epoch"]
        if epoch is None:
            return
        if len(epoch["ranges"]) > lanes.store.lanes or any(n > lanes.store.lane_capacity for _, n in epoch["ranges"]):
            raise ValueError("a saved epoch has more rows than this storage")
        if "listed" in epoch and epoch["envs"] != lanes.envs:
            raise ValueError(f"a saved epoch has {epoch['envs']} environments, this storage {lanes.envs}")


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
            places = sequences % store.lane_capacity * self._envs + rows % self._envs
            there = (sequences >= lane["first"]) & (sequences < lane["published"])
            if removed := store.removed(torch.from_numpy(places)):
                there[removed] = False
            exist = np.flatnonzero(there)[: n - len(slots)]
            full = len(slots) + len(exist) == n
            position = position + int(exist[-1]) + 1 if full and len(exist) else min(position + n, stop)
            more = places[exist]
            slots = np.concatenate([slots, more])
        return torch.from_numpy(slots), position


def _gives(storage: Storage, episodes: EpisodeIndex, rule: _native.SliceRule, n: int) -> bool:
    """Whether an epoch that begins now gives n slices without removed rows."""
    walk, seed = episodes.begin_epoch(storage, rule, 0, False), torch.zeros(1, dtype=torch.int64, device="cpu")
    return episodes.take(storage, rule, walk, 0, seed, 0, n)[2]


class SliceEpochs(Epochs, RunSource):
    """Epochs of trajectories, by their counts and the newest step of each environment.

    Attributes:
        drawn: the `id` of the epoch of the last draw.
        least_steps: of a trajectory of the last epoch.
    """

    walk: _native.SliceEpoch | None
    least_steps: int = 0  # of pickles that lack it

    def __init__(self, shuffle: bool, drop_last: bool) -> None:
        super().__init__(shuffle, drop_last)
        self.drawn, self.least_steps = -1, 0

    def go_on(
        self,
        storage: Storage,
        lanes: Lanes,
        episodes: EpisodeIndex,
        rule: _native.SliceRule,
        key: Callable[[], int],
    ) -> int:
        """Begins an epoch over the trajectories that are long enough, where none is running in this store.

        Returns:
            how many trajectories it has; 0: none is long enough, and nothing has changed.
        """
        self.find_loaded(storage, lanes.store)
        fits = self.goes_on(lanes.store) and self.epoch is not None and self.epoch["min_length"] == rule.min_length
        self._store_id = lanes.store.store_id
        if not fits:
            number = key() if self.shuffle else 0
            walk = episodes.begin_epoch(storage, rule, number, self.shuffle)
            if not len(walk):
                return 0
            self.place["position"], self.walk, self.id, self.number = 0, walk, next(EpochInfo.ids), self.number + 1
            self.least_steps = rule.min_length
            self.epoch = {
                "key": number, "incarnation": lanes.store.incarnation, "min_length": rule.min_length,
                "counts": walk.counts, "lasts": walk.lasts, "lane_capacity": lanes.store.lane_capacity,
            }  # fmt: skip
        self.resume(lanes)
        assert self.walk is not None
        return len(self.walk)

    def origin(self) -> Any:
        return self.restarts, self.least_steps

    # ---- as a RunSource ----
    @property
    def full_batches(self) -> bool:
        return self.drop_last

    def draw_runs(
        self, storage: Storage, episodes: EpisodeIndex, rule: _native.SliceRule, seed: Seed, n: int
    ) -> _native.SliceBatch:
        lanes = storage.lanes
        if not (len(lanes) or has_rows(storage, lanes)):
            raise nothing_to_draw(storage, episodes, rule)
        for _ in range(100):  # an epoch can be over before it gave a slice, when writers overwrite all of it
            size = self.go_on(storage, lanes, episodes, rule, lambda: int(seed()))
            if not size:
                raise nothing_to_draw(storage, episodes, rule)
            if self.drop_last and n > size:
                raise ValueError(
                    f"a batch is {n} slices, but only {size} trajectories have {rule.min_length} steps, and "
                    "drop_last leaves out batches that are not full; sample fewer"
                )
            slices = self._take(storage, episodes, rule, seed(), n)
            if len(slices) == n or (len(slices) and not self.drop_last):
                return slices
        least = n if self.drop_last else 1
        if lanes.store.removed_rows and not _gives(storage, episodes, rule, least):
            raise RuntimeError(
                f"an epoch has fewer than {least} slices without rows that were removed; use shorter slices, "
                f"{'sample fewer, ' if least > 1 else ''}or store more rows"
            )
        raise RuntimeError("writers overwrite the trajectories of an epoch before they can be read; use SliceSampler")

    def _take(
        self, storage: Storage, episodes: EpisodeIndex, rule: _native.SliceRule, seed: Tensor, n: int
    ) -> _native.SliceBatch:
        """The next n slices of the running epoch, or the last ones, with which it ends."""
        assert self.walk is not None
        least = n if self.drop_last else 1
        slices, self.place["position"], more = episodes.take(
            storage, rule, self.walk, self.place["position"], seed, n, least
        )
        self.drawn, self.ran_out = self.id, not more
        if self.ran_out:
            self.end()
        return slices

    def more_runs(
        self, storage: Storage, episodes: EpisodeIndex, rule: _native.SliceRule, seed: Seed, n: int, epoch: int
    ) -> _native.SliceBatch | None:
        if self.walk is None or not self.is_running(epoch):
            return None
        slices, position, more = episodes.take(storage, rule, self.walk, self.place["position"], seed(), n, 1)
        if not more:
            return None
        self.place["position"] = position
        return slices

    def can_draw_runs(self, storage: Storage, episodes: EpisodeIndex, rule: _native.SliceRule, n: int) -> bool:
        lanes, choices = storage.lanes, episodes.choices(storage, rule)
        if not self.drop_last or choices >= n or not lanes.store.removed_rows:
            return choices >= n if self.drop_last else choices > 0
        return choices > 0 and _gives(storage, episodes, rule, n)  # a trajectory that has lost some windows counts less

    def most_rows_of_runs(self, n: int, length: int, stored: int) -> int:
        return min(n * length, stored)  # each trajectory once

    def run_info(self, entries: dict[Any, Any]) -> EpochInfo:
        info = EpochInfo(entries)
        info.epoch = self.drawn
        return info

    def rest(self) -> Tensor | None:
        """The trajectories that are left of the epoch, in their order; None before the first one, empty after it."""
        if self.walk is None or self.epoch is None:
            return torch.empty(0, dtype=torch.int64, device="cpu") if self.ran_out else None
        return self.walk.rest(self.place["position"])

    def _moved(self, epoch: dict[str, Any], shifts: list[int]) -> dict[str, Any]:
        lasts = epoch["lasts"]
        if shifts:
            envs = max(1, len(lasts) // len(shifts))
            lasts = [max(-1, last - shifts[k // envs]) for k, last in enumerate(lasts)]
        return {**epoch, "lasts": lasts}

    def _make_walk(self, lanes: Lanes) -> None:
        assert self.epoch is not None
        store, epoch = lanes.store, self.epoch
        _check_trajectories(store, epoch)
        # A store with more lanes than the one that was saved: they are not in the epoch.
        rest = store.lanes * store.envs - len(epoch["counts"])
        counts, lasts = epoch["counts"] + [0] * rest, epoch["lasts"] + [-1] * rest
        self.walk = _native.SliceEpoch(epoch["key"], bool(epoch["key"]), counts, lasts)

    # ---- state ----
    def check_saved(self, state: dict[str, Any]) -> None:
        _check_epoch(state, _OF_TRAJECTORIES)
        epoch = state["epoch"]
        if epoch is not None and len(epoch["counts"]) != len(epoch["lasts"]):
            raise ValueError("a saved epoch does not have a last step for each environment")

    def check(self, state: dict[str, Any], storage: Storage) -> None:
        if state["epoch"] is not None:
            _check_trajectories(storage.lanes.store, state["epoch"])


# ---- what is refused ----
def check_full_batches(batch_size: int | None, storage: Storage) -> None:
    """ValueError where batches that are all full (`drop_last`) cannot be had from a storage, or of a size not known."""
    if batch_size is None:
        raise ValueError(
            "a sampler with drop_last=True needs a predictable batch-size, the buffer has none: pass batch_size to the "
            "buffer's constructor"
        )
    if storage.max_size is not None and batch_size > storage.max_size:
        raise ValueError(
            f"batch_size={batch_size} is greater than the storage capacity of {storage.max_size} steps: no batch would "
            "ever be full; make the batch smaller, or leave out drop_last"
        )


def _check_epoch(state: dict[str, Any], form: forms.Form) -> None:
    """WrongFormError where a saved state does not hold an epoch of a form, or none."""
    saved = forms.record({"epoch": forms.nullable(form), "ran_out": forms.boolean}, {"number": _COUNT})
    forms.check(saved, state, "the state of the sampler")


def _check_ranges(epoch: dict[str, Any]) -> None:
    """ValueError where the rows of a saved epoch cannot exist."""
    ring, ranges, moved = epoch["ring"], epoch["ranges"], epoch["moved"]
    for lane in ranges:
        if lane[1] > ring:
            raise ValueError(f"a saved epoch has the range {lane!r:.80}")
    if len(moved) != len(ranges):
        raise ValueError(f"a saved epoch of {len(ranges)} lanes has moved by {moved!r:.80}")


def _check_trajectories(store: _native.Store, epoch: dict[str, Any]) -> None:
    """ValueError where a saved epoch has trajectories that this store cannot have."""
    if any(count > store.lane_capacity for count in epoch["counts"]):
        raise ValueError(f"an epoch of {max(epoch['counts'])} trajectories is not one of this storage")
    if len(epoch["counts"]) > store.lanes * store.envs:
        raise ValueError(f"an epoch of {len(epoch['counts'])} environments is not one of this storage")
