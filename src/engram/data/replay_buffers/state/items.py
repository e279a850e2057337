"""Items of storages that have no checkpointer of their own, and of list storages: as they are saved and loaded."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from engram import _forms as forms
from engram import pytree
from engram.data.replay_buffers.state.checkpointers.items import ListStorageCheckpointer
from engram.data.replay_buffers.state.plans import SavableStorage, SavedStorage
from engram.errors import CheckpointMisfitError, StorageError
from engram.store.counters import Counters, check_sequences
from engram.store.snapshots import ItemSnapshot

if TYPE_CHECKING:
    from engram.store.items import ItemRows


class StepsAsItems:
    """The steps of a storage as items, for a checkpointer of items; made of the storage's five abstract methods.

    For storages of one dimension and one lane, whose rows carry no sequences of their own.
    """

    def __init__(self, storage: SavableStorage) -> None:
        self._storage = storage

    def __len__(self) -> int:
        return len(self._storage)

    def items(self) -> list[Any]:
        """The steps, oldest first."""
        lanes = self._storage.lanes
        if not len(lanes):
            return []
        if lanes.store.lanes * lanes.envs > 1:
            raise self._needs_checkpointer("several lanes or environments")
        lane, capacity = lanes.store.lane(0), lanes.store.lane_capacity
        sequences = torch.arange(max(lane["base"], lane["first"]), lane["published"], device="cpu")
        return list(pytree.unstack(self._storage.read(sequences % capacity).batch, 0))

    def _needs_checkpointer(self, what: str) -> StorageError:
        return StorageError(f"a {type(self._storage).__name__} with {what} needs a checkpointer of its own")

    def sequences(self) -> list[int]:
        """0 for each step: it has the sequence that its lane counts."""
        lanes = self._storage.lanes
        if lanes.own_sequences is not None:
            raise self._needs_checkpointer("rows that carry sequences")
        return [0] * len(self._storage)

    def counters(self) -> dict[str, Any]:
        storage = self._storage
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
        storage.empty()
        # Slots follow from sequences, which stay where the capacity is the same; else the oldest row is number 0.
        shift = 0 if counters["lane_capacity"] == storage.max_size else lane["base"]
        base, published = lane["base"] - shift, lane["published"] - shift
        first = storage.check(items[0], True) if items else None  # makes a storage that is made at the first write
        lanes = storage.lanes
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


class ItemLoad:
    """The ItemSink of a storage of items: saved ones replace all that it has."""

    def __init__(self, storage: SavableStorage, rows: ItemRows) -> None:
        self._storage, self._rows = storage, rows

    def __len__(self) -> int:
        return len(self._storage)

    def check_restore(self, counters: dict[str, Any]) -> None:
        check_room(self._rows.max_size, counters)

    def restore_items(self, items: list[Any], counters: dict[str, Any], sequences: list[int]) -> None:
        self.check_restore(counters)
        self._rows.restore(items, counters, sequences)

    def abort_restore(self) -> None:
        self._storage.empty()


class StagedItems:
    """The ItemSink of a storage that holds items: takes saved ones, which another sink gets in `commit`."""

    def __init__(self, sink: ItemLoad | StepsAsItems) -> None:
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


class SavedItems(SavedStorage):
    """A storage of items, which are saved and loaded as they are."""

    def __init__(self, storage: SavableStorage, rows: ItemRows) -> None:
        super().__init__(storage)
        self._rows = rows

    def default_checkpointer(self) -> Any:
        return ListStorageCheckpointer()

    def source(self, background: bool) -> ItemSnapshot:
        return ItemSnapshot(self._rows)

    def sink(self) -> ItemLoad:
        return ItemLoad(self._storage, self._rows)

    def staging(self) -> StagedItems:
        return StagedItems(self.sink())

    def restore_point(self) -> Callable[[], None]:
        return self._rows.restore_point()

    def state(self) -> dict[str, Any]:
        rows = self._rows
        items = [pytree.clone(item) for item in rows.items()]
        return {"items": items, "counters": rows.counters(), "sequences": rows.sequences()}

    def check(self, state: Any) -> None:
        check_state(state, self._rows.max_size)

    def recount(self, counters: dict[str, Any], oldest: int) -> None:
        items, sequences = self._rows.items(), self._rows.sequences()
        self._rows.restore(items[oldest:] + items[:oldest], counters, sequences[oldest:] + sequences[:oldest])

    def fill(self, state: dict[str, Any]) -> None:
        items = [pytree.clone(item) for item in state["items"]]
        self.sink().restore_items(items, state["counters"], state["sequences"])

    def copy_to(self, other: Any, memo: dict[int, Any]) -> None:
        state = self._storage.state_dict()  # tensors are copies already; other objects are the stored ones
        items = [
            item if isinstance(item, torch.Tensor) or pytree.has_batch_size(item) else copy.deepcopy(item, memo)
            for item in state["items"]
        ]
        other.load_state_dict({**state, "items": items})

    def hands_out(self, needs: str) -> bool:
        return needs == "items"


_STATE = forms.record({"items": forms.list_of(forms.anything), "counters": forms.anything, "sequences": forms.anything})


def check_state(state: Any, max_size: int | None) -> None:
    """A ValueError where items in memory, with their counters and sequences, do not fit."""
    forms.check(_STATE, state, "the state of the storage")
    counters, n = Counters(state["counters"]), len(state["items"])
    check_sequences(state["sequences"], n)
    if (counters.lanes, counters.rows) != (1, n):
        raise ValueError(f"{n} items do not fit counters of {counters.rows} in {counters.lanes} lanes")
    check_room(max_size, state["counters"])


class SavedSteps(SavedStorage):
    """Any other storage: its steps are saved as items, unless its checkpointer saves it in another way."""

    def default_checkpointer(self) -> Any:
        return ListStorageCheckpointer()

    def source(self, background: bool) -> Any:
        if background:
            kind = type(self._storage).__name__
            raise NotImplementedError(f"a {kind} cannot be saved in the background; use blocking=True")
        return self.sink()

    def sink(self) -> Any:
        needs = getattr(self._storage.checkpointer, "needs", None)
        return self._storage if needs is None or super().hands_out(needs) else StepsAsItems(self._storage)

    def hands_out(self, needs: str) -> bool:
        return needs == "items" or super().hands_out(needs)

    def staging(self) -> StagedItems | None:
        sink = self.sink()
        return StagedItems(sink) if isinstance(sink, StepsAsItems) else None

    def restore_point(self) -> Callable[[], None] | None:
        if self.is_empty():
            empty: Callable[[], None] = self._storage.empty
            return empty
        lanes = self._storage.lanes
        if lanes.store.lanes * lanes.envs > 1 or lanes.own_sequences is not None:
            return None
        steps = StepsAsItems(self._storage)
        return functools.partial(steps.restore_items, steps.items(), steps.counters(), steps.sequences())

    def state(self) -> dict[str, Any]:
        steps = StepsAsItems(self._storage)
        return {"items": steps.items(), "counters": steps.counters(), "sequences": steps.sequences()}

    def check(self, state: Any) -> None:
        check_state(state, self._storage.max_size)

    def counters(self) -> dict[str, Any]:
        return StepsAsItems(self._storage).counters()

    def recount(self, counters: dict[str, Any], oldest: int) -> None:
        steps = StepsAsItems(self._storage)
        items, sequences = steps.items(), steps.sequences()
        steps.restore_items(items[oldest:] + items[:oldest], counters, sequences[oldest:] + sequences[:oldest])

    def fill(self, state: dict[str, Any]) -> None:
        StepsAsItems(self._storage).restore_items(state["items"], state["counters"], state["sequences"])

    def copy_to(self, other: Any, memo: dict[int, Any]) -> None:
        other.load_state_dict(copy.deepcopy(self._storage.state_dict(), memo))


def check_room(max_size: int | None, counters: dict[str, Any]) -> None:
    """A CheckpointMisfitError where saved items do not fit."""
    lane = counters["lanes"][0]
    n = lane["published"] - lane["base"]
    if max_size is not None and n > max_size:
        difference = f"room for {max_size} items here, {n} saved there"
        raise CheckpointMisfitError("the checkpoint does not fit this storage", [difference])
