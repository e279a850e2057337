"""Items of storages that have no checkpointer of their own, and of list storages: as they are saved and loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engram import pytree
from engram.errors import CheckpointMisfitError, StorageError

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage


class StepsAsItems:
    """The steps of a storage as items, for a checkpointer of items; made of the storage's five abstract methods.

    For storages of one dimension and one lane, whose rows carry no sequences of their own.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __len__(self) -> int:
        return len(self._storage)

    def items(self) -> list[Any]:
        """The steps, oldest first."""
        lanes = self._storage.lanes
        if lanes is None or not len(lanes):
            return []
        if lanes.store.lanes * lanes.envs > 1:
            raise self._needs_checkpointer("several lanes or environments")
        lane, capacity = lanes.store.lane(0), lanes.store.lane_capacity
        sequences = torch.arange(max(lane["base"], lane["first"]), lane["published"])
        return list(pytree.unstack(self._storage.read(sequences % capacity).batch, 0))

    def _needs_checkpointer(self, what: str) -> StorageError:
        return StorageError(f"a {type(self._storage).__name__} with {what} needs a checkpointer of its own")

    def sequences(self) -> list[int]:
        """0 for each step: it has the sequence that its lane counts."""
        lanes = self._storage.lanes
        if lanes is not None and lanes.own_sequences is not None:
            raise self._needs_checkpointer("rows that carry sequences")
        return [0] * len(self._storage)

    def counters(self) -> dict[str, Any]:
        storage = self._storage
        if storage.lanes is None:
            border = {"looked": 0, "agreed": None}
            empty = {"base": 0, "published": 0, "origin": 0, "seams": [], "border": border, "replaced": 0}
            return {"lane_capacity": storage.max_size, "envs": 1, "lanes": [empty]}
        return {"lane_capacity": storage.max_size, "envs": 1, "lanes": storage.lanes.saved_states()}

    def identity(self) -> dict[str, Any]:
        return {}

    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None:
        return None

    def check_restore(self, counters: dict[str, Any]) -> None:
        check_room(self._storage.max_size, counters)

    def abort_restore(self) -> None:
        self._storage.empty()

    def restore_items(self, items: list[Any], counters: dict[str, Any], sequences: list[int]) -> None:
        self.check_restore(counters)
        if any(sequences):
            raise self._needs_checkpointer("rows that carry sequences")
        storage, lane = self._storage, counters["lanes"][0]
        with storage._replacing("loads"):
            storage.empty()
            # Slots follow from sequences, which stay where the capacity is the same; else the oldest row is number 0.
            shift = 0 if counters["lane_capacity"] == storage.max_size else lane["base"]
            base, published = lane["base"] - shift, lane["published"] - shift
            first = storage.check(items[0], True) if items else None  # makes a storage that is made at the first write
            lanes = storage.lanes
            if lanes is None:
                return
            lanes.hold()  # as the writer of what is loaded: trajectories go on
            lanes.store.begin_restore()
            lanes.store.restore_lane(0, base, base, (lane["origin"] - shift) % (1 << 64))
            lanes.store.end_restore()
            for i, item in enumerate(items):
                storage.append(first if i == 0 and first is not None else storage.check(item, True))
            seams = [seam - shift for seam in lane["seams"] if seam > lane["base"]]
            lanes.store.begin_restore()
            lanes.store.set_seams(0, base, published, seams)
            lanes.restore_lane(0, lane, shift)
            lanes.store.end_restore()


class StagedItems:
    """The ItemSink of a storage that holds rows: takes a saved state, which the storage gets in `commit`."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink

    def __len__(self) -> int:
        return 0  # filling this destroys nothing

    def check_restore(self, counters: dict[str, Any]) -> None:
        self._sink.check_restore(counters)

    def restore_items(self, items: list[Any], counters: dict[str, Any], sequences: list[int]) -> None:
        self._items, self._counters, self._sequences = items, counters, sequences

    def abort_restore(self) -> None:
        self._items = []

    def commit(self) -> None:
        self._sink.restore_items(self._items, self._counters, self._sequences)


def check_room(max_size: int | None, counters: dict[str, Any]) -> None:
    """A CheckpointMisfitError where saved items do not fit."""
    lane = counters["lanes"][0]
    n = lane["published"] - lane["base"]
    if max_size is not None and n > max_size:
        difference = f"room for {max_size} items here, {n} saved there"
        raise CheckpointMisfitError("the checkpoint does not fit this storage", [difference])
