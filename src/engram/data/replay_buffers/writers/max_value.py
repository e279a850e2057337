"""A writer that keeps the best."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

import engram._native as _native
from engram import _forms as forms
from engram import pytree
from engram._advice import advised
from engram.data.replay_buffers.writers.round_robin import Placing, SavedWriter, Writer
from engram.errors import StorageInUseError
from engram.store.indexing import stored_slots
from engram.store.layout import is_lazy

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Checked, Storage

REDUCTIONS = ("sum", "mean", "max", "median", "min")
_NATIVE = (torch.float32, torch.float64, torch.int64)
_PIECE = 1 << 20  # rows whose ranks are read at once
_RANKS = forms.record({"ranks": forms.tensor(torch.float64, ndim=1), "slots": forms.tensor(torch.int64, ndim=1)})


def _path_of(rank_key: str | tuple[str, ...]) -> tuple[str, ...]:
    return (rank_key,) if isinstance(rank_key, str) else tuple(rank_key)


def _settings_of(writer: TensorDictMaxValueWriter) -> dict[str, Any]:
    """Those that a state must have been saved with."""
    return {"rank_key": _path_of(writer.rank_key), "reduction": writer.reduction}


class _SavedRanks(SavedWriter):
    """A writer that keeps the best, as it is saved and loaded."""

    def __init__(
        self, part: Any, kind: str | None, *, beside_rows: dict[str, Any] | None = None, **others: Any
    ) -> None:
        settings = _settings_of(part)
        beside_rows = None if beside_rows is None else {**settings, **beside_rows}
        super().__init__(part, kind, settings=settings, beside_rows=beside_rows, **others)

    def differences(self, state: Any) -> list[str]:
        different = super().differences(state)
        if "ranks" in state:
            forms.check(_RANKS, state, "the state of the writer")
            if len(state["ranks"]) != len(state["slots"]):
                raise ValueError(f"a saved writer has {len(state['ranks'])} ranks for {len(state['slots'])} slots")
        return different


@advised
class TensorDictMaxValueWriter(Writer, built_in=True):
    """Keeps the items of the highest rank: in a full storage an item replaces the lowest one, or is refused (index -1).

    The lowest is that of the lowest rank, among equal ones that of the lowest index, and gives way only to a higher
    rank. A batch acts exactly as its items one by one. The order follows from the stored rows alone: after `loads`,
    `open`, `rb[i] = ...` or `set_writer` it is what the rows say. `write_count` counts items that were stored. Each
    row also stores its own index under `"index"`, where its data have a place for it, and carries a sequence of its own
    once it has replaced another one, so that a `generation` never means another row.

    Replacing needs the storage alone, and one dimension (`ndim=1`, `lanes=1`). Rows in memory that another writer made
    are copied once to make room for their sequences, when the first of them is replaced. In a LazyMemmapStorage with a
    `scratch_dir` it waits for the disk when it meets rows that were flushed: twice for each 64 KB that a call replaces.

    Args:
        rank_key: where an item's rank is; ranks are float64. NaN is refused; infinities have their place.
        reduction: how several values of an item become one rank: sum, mean, max, median (the lower of the middle
            two), min.
        track_generations: batches say the generation of each row, as with `ReplayBuffer(track_generations=True)`.

    Raises:
        ValueError: an unknown reduction; the storage has several dimensions; a rank is NaN (nothing is written then).
        KeyError: a TensorDict or tensorclass has no `rank_key`; nothing is written.
        RuntimeError: other data have no `rank_key`; nothing is written.
        StorageError: rows would be replaced that another writer made, in a file or in shared memory: `dumps` them, and
            `loads` that into a storage that is made with this writer. Nothing is written.

    Example:
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter(rank_key="r"))
        >>> rb.extend(TensorDict({"r": torch.tensor([1.0, 5.0, 0.0, 3.0])}, [4]))
        tensor([ 0,  1, -1,  0])
        >>> rb[:]["r"]
        tensor([3., 5.])
    """

    _copied_as: ClassVar[dict[str, Any]] = {"_heap": None}  # it follows from the rows

    index_key = "index"
    placing = Placing.REPLACING
    _saved_as = _SavedRanks

    def __init__(
        self,
        rank_key: str | tuple[str, ...] = ("next", "reward"),
        reduction: str = "sum",
        *,
        track_generations: bool = False,
        compilable: bool = False,
    ) -> None:
        super().__init__(compilable)
        self.tracks_generations = track_generations
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
        self._path = _path_of(rank_key)
        if not self._path or not all(isinstance(key, str) for key in self._path):
            raise ValueError(f"rank_key must be a key or a tuple of keys, got {rank_key!r}")
        self.rank_key = rank_key
        self.reduction = reduction
        self._heap: _native.RankHeap | None = None
        self._loaded: tuple[Tensor, Tensor] | None = None  # ranks and slots that a state had, until there are rows

    def register_storage(self, storage: Storage) -> None:
        if storage.ndim != 1:
            raise ValueError(
                "TensorDictMaxValueWriter replaces items one by one and is not compatible with storages with more than "
                f"one dimension: it needs ndim=1, got ndim={storage.ndim}; store whole trajectories as items, or "
                "flatten the data"
            )
        super().register_storage(storage)
        storage.access.expect_sequences()

    # ---- writing ----
    def write(self, storage: Storage, items: Any, single: bool, time_dim: int) -> Tensor | int:
        values = self._values(items, single)
        self._loaded = None  # from now on there are rows
        if storage.max_size is None:  # without limit everything stays
            return storage.append(storage.check(items, single, time_dim, self._index_key_of(items)))
        with storage.access.turn():  # what is stored is ranked, and no other process may add to it
            return self._write(storage, items, values, single, time_dim)

    def _write(self, storage: Storage, items: Any, values: Tensor, single: bool, time_dim: int) -> Tensor | int:
        heap = self._following(storage)
        slots, appended, rows, targets = heap.place(storage.lanes.store, values, self.reduction)
        with contextlib.ExitStack() as alone:
            try:
                if rows is not None:
                    storage.access.carry_sequences()  # before the check, which is against the layout
                lanes = storage.lanes
                checked = storage.check(items, single, time_dim, self._index_key_of(items), slots)
                self._check_shape(storage, checked, slots)
                if storage.lanes is not lanes:  # the check has made them, or found those of another process
                    alone.enter_context(storage.access.turn())
                    if len(storage):
                        raise StorageInUseError(
                            "another process made this store and wrote to it meanwhile; nothing was written here. "
                            "Write these items again"
                        )
                if rows is not None:
                    alone.enter_context(storage.access.exclusive("replacing rows (TensorDictMaxValueWriter)"))
            except BaseException:
                heap.undo()
                raise
            try:
                self._store(storage, checked, slots, appended, rows, targets)
            except BaseException:
                heap.forget()
                raise
        return int(slots[0]) if single else slots

    def _store(self, storage: Storage, checked: Checked, slots: Tensor, appended: int, rows: Any, targets: Any) -> None:
        lanes = storage.lanes
        assert self._heap is not None
        replace = None
        if rows is not None:  # all memory first: a batch is written whole or not at all
            replace = storage.access.prepare_replace(checked, rows, targets)
        if appended:
            storage.append(checked, appended)
        if replace is not None:
            replace()
            lanes.store.count_replaced(slots[appended:])
        self._heap.written(lanes.store)

    def _index_key_of(self, items: Any) -> str | None:
        """The key of the index, where the data have a place for it: a tensorclass needs a field of that name."""
        return None if pytree.is_tensorclass(items) and not hasattr(items, self.index_key) else self.index_key

    def _check_shape(self, storage: Storage, checked: Checked, slots: Tensor) -> None:
        if checked.steps != len(slots):
            raise ValueError(f"{len(slots)} ranks for {checked.steps} items; nothing was written")
        if storage.lanes.store.lanes > 1:
            raise ValueError(f"TensorDictMaxValueWriter needs a storage with lanes=1, got {storage.lanes.store.lanes}")

    # ---- ranks ----
    def get_insert_index(self, data: Any) -> int | None:
        """The slot that an item would get now; None: it would be left out. Nothing is changed.

        Raises:
            RuntimeError: there is no registered storage.
            KeyError: the item has no rank.
        """
        storage, values = self._registered(), self._values(data, True)
        with storage.mutex:
            if storage.max_size is None:
                return int(storage.access.table.lanes.next_slots(1)[0])
            heap = self._following(storage)
            slots, *_ = heap.place(storage.lanes.store, values, self.reduction)
            heap.undo()
        return None if slots[0] < 0 else int(slots[0])

    def _following(self, storage: Storage) -> _native.RankHeap:
        """The heap of what is stored now; rows that it has not seen, or that changed, are looked at."""
        heap = self._heap
        if heap is None or heap.capacity != storage.max_size:
            heap = self._heap = _native.RankHeap(storage.max_size or 0)
        if storage.lanes.store.lanes > 1:
            raise ValueError(f"TensorDictMaxValueWriter needs a storage with lanes=1, got {storage.lanes.store.lanes}")
        behind = heap.behind(storage.lanes.store)
        if behind is not None:
            try:
                for slots in torch.split(behind, _PIECE):
                    heap.put(slots, self._stored(storage, slots), self.reduction)
                    storage.lanes.note_sequences(slots)
            except BaseException:
                heap.forget()
                raise
        return heap

    @property
    def _current_top_values(self) -> list[tuple[float, int]]:
        """Rank and slot of each stored item, the lowest rank first; a view, made anew at each look."""
        ranks, slots = self._ranks()
        return sorted(zip(ranks.tolist(), slots.tolist(), strict=True))

    def _ranks(self) -> tuple[Tensor, Tensor]:
        """The rank of each stored item, float64 [n], and its slot, int64 [n]; without any, those that were loaded."""
        storage, nothing = (
            self._storage,
            (torch.empty(0, dtype=torch.float64, device="cpu"), torch.empty(0, dtype=torch.int64, device="cpu")),
        )
        if storage is None or not len(storage):
            return self._loaded or nothing
        with storage.mutex:
            slots, ranks = stored_slots(storage.lanes.store), list[float]()
            for part in torch.split(slots, _PIECE):
                if len(part):
                    ranks += _native.ranks(self._stored(storage, part), self.reduction)
        return torch.tensor(ranks, dtype=torch.float64, device="cpu"), slots

    def _values(self, items: Any, single: bool) -> Tensor:
        """What the ranks are made of: [items, ...]."""
        if isinstance(items, list):
            return self._stacked([self._entry(item) for item in items])
        values = self._numbers(self._entry(items))
        if single:
            return values.unsqueeze(0)
        if values.ndim == 0:
            raise ValueError(f"{pytree.format_key(self._path)} has no dimension for the items of a batch; use add")
        return values

    def _entry(self, items: Any) -> Any:
        found = pytree.get_entry(items, self._path)
        if found is not None:
            return found
        rank = f"the rank {pytree.format_key(self._path)} is not in the data"
        if pytree.has_batch_size(items):
            raise KeyError(f"{rank}, whose keys are {sorted(map(str, items.keys()))}; nothing was written")
        raise RuntimeError(
            f"TensorDictMaxValueWriter expects data to be a tensor collection (a TensorDict or tensorclass), or a dict "
            f"with a rank: got a {type(items).__name__}, and {rank}. Nothing was written"
        )

    def _stored(self, storage: Storage, slots: Tensor) -> Tensor:
        """The same of stored rows, in the form in which others are written over them."""
        rows = storage if storage.access.writes_as_read else storage.access.table.rows
        if rows.leaf(self._path) is None:
            raise KeyError(f"the rank {pytree.format_key(self._path)} is not in the stored rows")
        try:
            return self._numbers(rows.column(self._path, slots))
        except RuntimeError:  # items of a list storage may have different shapes
            if len(slots) == 1:
                raise
            one_by_one = [slots[i : i + 1] for i in range(len(slots))]
            ranks = [_native.ranks(self._numbers(rows.column(self._path, s)), self.reduction) for s in one_by_one]
            return torch.tensor(ranks, dtype=torch.float64, device="cpu")

    def _numbers(self, leaf: Any) -> Tensor:
        plain = type(leaf) is Tensor and leaf.is_cpu and leaf.layout is torch.strided and not is_lazy(leaf)
        if plain and leaf.dtype in _NATIVE and leaf.is_contiguous():
            as_it_is: Tensor = leaf  # the native core reads it so
            return as_it_is
        values = pytree.as_tensor(leaf, self._path)
        if values.dtype.is_complex:
            raise TypeError(
                f"{pytree.format_key(self._path)} is {values.dtype}: complex numbers have no order to rank by"
            )
        return (values if values.dtype in _NATIVE else values.double()).contiguous()

    def _stacked(self, leaves: list[Any]) -> Tensor:
        """Leaves of single items, which may have different shapes, as [items, ...]."""
        values = [self._numbers(leaf) for leaf in leaves]
        if len({(v.shape, v.dtype) for v in values}) == 1:
            return torch.stack(values)
        ranks = [_native.ranks(v.unsqueeze(0), self.reduction)[0] for v in values]
        return torch.tensor(ranks, dtype=torch.float64, device="cpu")

    # ---- state ----
    def _empty(self) -> None:
        super()._empty()
        self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """Settings, cursor, and the rank and slot of each stored item."""
        ranks, slots = self._ranks()
        return {**super().state_dict(), **_settings_of(self), "ranks": ranks, "slots": slots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved_form.check_fits(state)
        super().load_state_dict(state)
        self._loaded = (state["ranks"].clone(), state["slots"].clone()) if "ranks" in state else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(cursor={self._cursor}, rank_key={self.rank_key!r}, reduction={self.reduction!r})"
