"""Draws by priority: the table of priorities, and the sampler of single steps."""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

import engram._native as _native
from engram import _forms as forms
from engram._advice import advised
from engram._checks import count_or_none
from engram._copies import Computed, CopiedAsPlain
from engram._system import drawing
from engram._text import warn_user
from engram.data.replay_buffers.samplers.base import (
    EMPTY,
    DrawTotals,
    Sampler,
    StateSetting,
    stored_rows,
)
from engram.data.replay_buffers.samplers.draw import Draw, DrawPlan, Index
from engram.data.replay_buffers.samplers.runs import RunSource, Seed, draw_beside_writers
from engram.errors import is_masked, masked_array
from engram.pytree import to_tensor
from engram.store.episodes import EpisodeIndex
from engram.store.indexing import generations_given, named_slots

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage
    from engram.store.lanes import Lanes

_WEIGHTS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_ARRAYS = (Tensor, np.ndarray)  # which the native core reads where they are plain
_REDUCTIONS = ("max", "min", "mean", "median")
_STATE = forms.record(
    {
        "seen": forms.list_of(forms.fields(forms.integer(), forms.integer())),
        "priorities": forms.tensor(torch.float64, torch.float32, ndim=1),
        "skipped": forms.integer(),
        **dict.fromkeys(("max_priority", "latest_priority", "beta"), forms.number),
    },
    {"lane_capacity": forms.nullable(forms.integer(1))},
)


def _checked(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be a finite number of 0 or more, got {value!r}")
    return number


class _Given(NamedTuple):
    """What `update_priority`, or `mark_update` (priority None), was given."""

    index: Any
    priority: Tensor | None
    generation: Any

    def apply_to(self, table: PriorityTable, storage: Storage) -> None:
        """Makes the update. Raises IndexError or ValueError if it does not fit the storage."""
        try:
            if self.priority is None:
                table.mark(self.index, storage)
            else:
                table.update(self.index, self.priority, self.generation, storage)
        except (IndexError, ValueError) as error:
            raise type(error)(
                f"priorities were given before the sampler had a storage, and do not fit this one: {error}"
            ) from error


class DrawnInfo(CopiedAsPlain, dict[str, Any]):
    """The info of a batch that was drawn by priority, which also knows the rows; a copy is a plain dict."""

    __slots__ = ("drawn", "store")
    _plain: ClassVar[Any] = dict
    drawn: _native.DrawnRows
    store: _native.Store


def _copied_state(table: PriorityTable) -> dict[str, Any]:
    """Its state, with memory of its own: shared with another process it would be gone before it arrives."""
    state = table.state()
    return {**state, "priorities": state["priorities"].numpy().copy()}


class PriorityTable(RunSource):
    """A priority for each stored step of one storage, for the sampler that holds it.

    What is written is taken in before the table is used. The caller holds the sampler's lock.

    Args:
        starts_only: draw only steps at which slices can start.
        Others: as PrioritizedSampler.
    """

    _copied_as: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("_priorities", "_storage", "_attached", "_found_in")),
        "_fits": False,
        "_waiting": Computed(_copied_state),
    }

    def __init__(
        self,
        max_capacity: int | None,
        alpha: float,
        beta: float,
        eps: float,
        dtype: torch.dtype,
        reduction: str,
        max_priority_within_buffer: bool,
        starts_only: bool = False,
    ) -> None:
        capacity = count_or_none(max_capacity, "max_capacity")
        if dtype not in _WEIGHTS:
            raise ValueError(f"dtype must be a floating point type for weights ({_WEIGHTS}), got {dtype!r}")
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction must be one of {_REDUCTIONS}, got {reduction!r}")
        self.max_capacity = capacity
        self.dtype = dtype
        self.reduction = reduction
        self.max_priority_within_buffer = bool(max_priority_within_buffer)
        self._starts_only = starts_only
        self._alpha = _checked("alpha", alpha)
        self._eps = _checked("eps", eps)
        self.beta = _checked("beta", beta)
        self._priorities = self._new_priorities()
        self._waiting: dict[str, Any] | None = None  # a loaded state that waits for its storage
        self._found_in: tuple[Any, ...] | None = None  # the store in which its rows were found ahead of their first use
        self._storage: weakref.ref[Storage] | None = None  # the one that was used last
        self._attached: weakref.ref[Storage] | None = None  # that of the buffer which was made last
        self._fits = False  # whether it cannot outgrow `max_capacity`
        self._given: list[_Given] = []  # updates that came before there was a storage

    def _new_priorities(self) -> _native.Priorities:
        return _native.Priorities(self._alpha, self._eps, self.max_priority_within_buffer, self._starts_only)

    # ---- settings ----
    @property
    def alpha(self) -> float:
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        self._use(_checked("alpha", alpha), self._eps)

    @property
    def eps(self) -> float:
        return self._eps

    @eps.setter
    def eps(self, eps: float) -> None:
        self._use(self._alpha, _checked("eps", eps))

    def _use(self, alpha: float, eps: float) -> None:
        self._priorities.use(alpha, eps)
        self._alpha, self._eps = alpha, eps

    @property
    def default_priority(self) -> float:
        return self._priorities.new_priority

    @property
    def skipped(self) -> int:
        return self._priorities.skipped

    def settings_shown(self) -> str:
        """The settings, as the `repr` of samplers shows them."""
        return f"alpha={self._alpha}, beta={self.beta}, eps={self._eps}, reduction={self.reduction}"

    # ---- following a storage ----
    def following(self, storage: Storage, lanes: Lanes) -> _native.Priorities:
        """The priorities of this storage's steps, for as long as the caller holds the lock."""
        last = self._storage
        if last is None or last() is not storage or not self._fits:
            most = _room(self.max_capacity, storage)
            self._storage, self._fits = weakref.ref(storage), most is None
        if lanes.unused_since_fork:  # one call of Python less in each draw
            lanes.use()
        if self._waiting is not None:
            if self._found_in != _store_of_now(lanes):
                self._resume(storage, lanes)
            self._waiting = self._found_in = None
        if self._given:
            given, self._given = self._given, []
            for one in given:
                one.apply_to(self, storage)
        return self._priorities

    def find(self, storage: Storage) -> None:
        """Finds the rows of a loaded state, so that what is written before the first draw is known as newer.

        Where they are loaded after it, they are found again.
        """
        lanes = storage.lanes
        if self._waiting is None or lanes.unused_since_fork or not stored_rows(storage):
            return
        with contextlib.suppress(ValueError):  # rows of another life, before those of the state are loaded
            self._resume(storage, lanes)
            self._found_in = _store_of_now(lanes)

    def find_attached(self) -> None:
        """As `find`, in the storage of the buffer which was made last."""
        storage = None if self._attached is None else self._attached()
        if storage is not None:
            self.find(storage)

    def _resume(self, storage: Storage, lanes: Lanes) -> None:
        saved = self._waiting
        assert saved is not None
        shifts = lanes.shifts_since(saved.get("lane_capacity"))
        saved = {**saved, **_shifted(saved, shifts)} if shifts else saved
        self._priorities.resume(
            lanes.store, [(a, b) for a, b in saved["seen"]], saved["max_priority"], saved["latest_priority"],
            saved["skipped"], saved["priorities"],
        )  # fmt: skip

    def sync(self, storage: Storage) -> None:
        """Takes in what was written since the last look."""
        lanes = storage.lanes
        self.following(storage, lanes).poll(lanes.store)

    def check_storage(self, storage: Storage) -> None:
        """Warns of a storage that holds more steps than `max_capacity`; ValueError where it does so now."""
        self._attached = weakref.ref(storage)
        if _room(self.max_capacity, storage) is not None and storage.max_size is not None:
            warn_user(
                f"max_capacity={self.max_capacity} of the sampler is less than the {storage.max_size} steps that the "
                "storage can hold; what is stored beyond it is refused",
            )

    # ---- priorities ----
    def update(self, index: Any, priority: Any, generation: Any, storage: Storage | None) -> None:
        """As `Sampler.update_priority`."""
        if storage is None and self._newest_storage is None:
            p = _real(priority).clone()  # the caller's may change before they are used
            self._priorities.check(p.reshape(-1).contiguous())
            self._given.append(_Given(copy.deepcopy(index), p, copy.deepcopy(generation)))
            return
        where, lanes = self._stored_in(storage)
        if (
            type(index) in _ARRAYS and type(priority) in _ARRAYS and where.ndim == 1
            and (generation is None or lanes.own_sequences is None) and not where.access.table.rows.item_shape
            and self.following(where, lanes).set(lanes.store, index, priority, generation)
        ):  # fmt: skip
            return
        self._set_any(where, lanes, index, priority, generation)

    def _set_any(self, where: Storage, lanes: Lanes, index: Any, priority: Any, generation: Any) -> None:
        """Sets priorities, whatever form the arguments have."""
        priorities = self.following(where, lanes)
        slots, shape = named_slots(lanes, index, where.env_shape, where.max_size or 0)
        p = _per_step(priority, len(slots), shape, self.reduction)
        if generation is not None:
            generation = generations_given(generation)
            if len(generation) != len(slots):
                raise ValueError(
                    f"{len(slots)} steps are indexed, {len(generation)} generations given; nothing was changed"
                )
        if where.access.table.rows.item_shape:
            slots, p, generation = _one_for_each_item(slots, p, generation, self.reduction)
        if generation is not None:
            generation = lanes.counted(slots, generation).contiguous()
        priorities.set(lanes.store, slots, p, generation)

    def mark(self, index: Any, storage: Storage | None) -> None:
        """As `Sampler.mark_update`."""
        if storage is None and self._newest_storage is None:
            self._given.append(_Given(copy.deepcopy(index), None, None))
            return
        where, lanes = self._stored_in(storage)
        self.following(where, lanes).mark(
            lanes.store, named_slots(lanes, index, where.env_shape, where.max_size or 0)[0]
        )

    def get(self, index: Any, storage: Storage | None) -> Tensor:
        """As `PrioritizedSampler.priorities`."""
        where, lanes = self._stored_in(storage)
        mine = self.following(where, lanes)
        return mine.of(lanes.store, named_slots(lanes, index, where.env_shape, where.max_size or 0)[0])

    def leaves(self, slots: Tensor) -> Tensor:
        """The weights of slots in the draws, `(p + eps) ** alpha`: float64 [n]; 0 where a slot cannot be drawn."""
        where, lanes = self._stored_in(self._newest_storage)
        return self.following(where, lanes).leaves(lanes.store, slots)

    @property
    def slots(self) -> int:
        """How many slots the storage has; 0 before the first one and where nothing was written."""
        storage = self._newest_storage
        return 0 if storage is None or not storage.initialized else storage.lanes.capacity

    @property
    def storage_in_use(self) -> Storage | None:
        """The storage that it was used with last, where it lives; None before the first draw or update."""
        return None if self._storage is None else self._storage()

    @property
    def _newest_storage(self) -> Storage | None:
        """The storage that was used last, or that of a buffer which has not sampled yet."""
        for ref in (self._storage, self._attached):
            storage = None if ref is None else ref()
            if storage is not None:
                return storage
        return None

    def highest(self) -> tuple[float, int | None]:
        """The highest priority so far, and the newest slot that holds it; None where none does any more."""
        if not self.slots:
            return self.default_priority, None
        where, lanes = self._stored_in(self._newest_storage)
        priorities = self.following(where, lanes).of(lanes.store, torch.arange(self.slots, device="cpu"))
        highest = self._priorities.new_priority
        holding = (priorities == highest).nonzero()
        return highest, int(holding[-1]) if len(holding) else None

    def checked(self, priority: Any, n: int) -> Tensor:
        """As `PrioritizedSampler.checked_priorities`."""
        plain = None if priority is None else self._priorities.checked(priority, n)
        if plain is not None:
            return plain
        p = _per_step(priority, n, (n,), self.reduction)
        self._priorities.check(p)
        return p

    def raise_new(self, priority: float, storage: Storage | None) -> None:
        """As `Sampler.raise_new_priority`."""
        if self.max_priority_within_buffer:
            raise ValueError(
                "with max_priority_within_buffer new rows get the highest priority among those that are stored, which "
                "cannot be raised; nothing was changed"
            )
        where, lanes = self._stored_in(storage)
        self.following(where, lanes).raise_new(lanes.store, _checked("priority", priority))

    def totals(self, poll: Callable[[_native.Priorities], None], storage: Storage) -> DrawTotals:
        """As `Sampler.totals`, after `poll` has taken in what it shall see."""
        storage.lanes.use()  # a forked child that only asks is a user, too
        if not stored_rows(storage):
            return DrawTotals(0.0, None, self.default_priority)
        priorities = self.following(storage, storage.lanes)
        poll(priorities)
        total = priorities.total
        return DrawTotals(total, priorities.lowest if total > 0 else None, priorities.new_priority)

    # ---- as a RunSource ----
    def draw_runs(
        self, storage: Storage, episodes: EpisodeIndex, rule: _native.SliceRule, seed: Seed, n: int
    ) -> _native.SliceBatch:
        drawn = seed()

        def draw() -> _native.SliceBatch | None:
            return episodes.draw_starts(storage, self.following(storage, storage.lanes), rule, drawn, n)

        return draw_beside_writers(storage, episodes, rule, draw)

    def run_totals(self, storage: Storage, episodes: EpisodeIndex, rule: _native.SliceRule, newest: bool) -> DrawTotals:
        return self.totals(lambda p: episodes.poll_starts(storage, p, rule) if newest else None, storage)

    def run_entries(self, slices: _native.SliceBatch) -> dict[Any, Any]:
        """The weight of each row's slice, by the priority of its start: [n]."""
        weights = self._priorities.start_weights(slices, self.beta, self.dtype is torch.float64)
        return {"priority_weight": weights.to(self.dtype)}

    def empty(self) -> None:
        """Forgets all priorities."""
        self._priorities.forget()
        self._waiting = self._found_in = None
        self._given = []

    def _stored_in(self, storage: Storage | None) -> tuple[Storage, Lanes]:
        if storage is None:
            storage = self._newest_storage
        if storage is None:
            raise RuntimeError("the sampler has not been used with a storage yet; say which with storage=...")
        lanes = storage.lanes
        if not lanes.store.rows() and not storage.initialized:
            raise IndexError("nothing has been written to this storage yet; extend it first")
        return storage, lanes

    # ---- state ----
    def state(self) -> dict[str, Any]:
        """What a sampler saves of it."""
        return self._state(lambda priorities, store: priorities.state(store))

    def frozen_state(self) -> dict[str, Any]:
        state = self._state(lambda priorities, store: priorities.freeze(store))
        return state if self._waiting is None else copy.deepcopy(state)

    def _state(self, of_rows: Callable[[_native.Priorities, _native.Store], tuple[Any, ...]]) -> dict[str, Any]:
        settings = {**self.settings(), "beta": self.beta}
        storage = self.storage_in_use
        if self._waiting is not None:
            return {**self._waiting, **settings}
        if storage is None or not storage.initialized:
            return {**settings, "seen": [], "max_priority": 1.0, "latest_priority": 1.0, "skipped": 0,
                    "priorities": torch.empty(0, dtype=torch.float64, device="cpu"), "lane_capacity": None}  # fmt: skip
        store = storage.lanes.store
        seen, highest, latest, skipped, priorities = of_rows(self.following(storage, storage.lanes), store)
        return {**settings, "seen": [list(rows) for rows in seen], "max_priority": highest, "latest_priority": latest,
                "skipped": skipped, "priorities": priorities,
                "lane_capacity": store.lane_capacity}  # fmt: skip

    def settings(self) -> dict[str, Any]:
        """The settings that decide which rows are drawn."""
        return {
            "alpha": self._alpha, "eps": self._eps, "reduction": self.reduction,
            "max_priority_within_buffer": self.max_priority_within_buffer,
        }  # fmt: skip

    @staticmethod
    def check_saved(state: dict[str, Any]) -> None:
        """ValueError where a saved state is not one that a table can have."""
        forms.check(_STATE, state, "the state of the sampler")
        for rows in state["seen"]:
            if rows[1] < rows[0]:
                raise ValueError(f"a saved state has priorities of the rows {rows!r:.80}")
        for name in ("beta", "max_priority", "latest_priority"):
            _checked(name, state[name])

    def misfits(self, state: dict[str, Any]) -> list[str]:
        rows, lanes, most = len(state["priorities"]), len(state["seen"]), self.max_capacity
        envs = rows // max(1, sum(b - a for a, b in state["seen"]))
        if most is None or rows < most + max(1, lanes * envs):  # a storage rounds its size up, as in `_room`
            return []
        return [f"the sampler takes {most} steps (max_capacity) here, there are priorities of {rows} there"]

    def check(self, state: dict[str, Any], storage: Storage) -> None:
        """ValueError where a saved state cannot be one of this storage, which holds rows."""
        p, steps = _real(state["priorities"]), sum(b - a for a, b in state["seen"])
        if p.ndim != 1 or len(p) != steps * storage.lanes.envs:
            raise ValueError(f"a saved state has {p.numel()} priorities for {steps} time steps")
        highest = torch.tensor([state["max_priority"], state["latest_priority"]], dtype=torch.float64, device="cpu")
        for values in (p.contiguous(), highest):
            self._priorities.check(values)

    def restored(self, state: dict[str, Any]) -> PriorityTable:
        """A table that goes on from a saved state; this one stays as it is, for a load that fails later."""
        names = ("seen", "max_priority", "latest_priority", "skipped", "priorities")
        waiting = {name: state[name] for name in names}
        waiting["lane_capacity"] = state.get("lane_capacity")  # of the store in which its rows have these sequences
        waiting["priorities"] = state["priorities"].to(torch.float64).contiguous()
        table = self._with_waiting(waiting)
        table.beta = state["beta"]
        table.find_attached()
        return table

    def rebased(self, incarnation: int, shifts: list[int]) -> PriorityTable:
        """This table in a store whose sequences are lower by `shifts`, one a lane."""
        waiting = self._waiting
        if waiting is None:
            return self
        return self._with_waiting({**waiting, **_shifted(waiting, shifts), "lane_capacity": None})

    def _with_waiting(self, waiting: dict[str, Any]) -> PriorityTable:
        table = PriorityTable.__new__(PriorityTable)
        anew = {"_priorities": self._new_priorities(), "_waiting": waiting, "_found_in": None, "_given": []}
        vars(table).update({**vars(self), **anew})
        return table

    def _complete_copy(self) -> None:
        self._priorities = self._new_priorities()
        assert self._waiting is not None
        self._waiting = {**self._waiting, "priorities": torch.from_numpy(self._waiting["priorities"])}
        vars(self).setdefault("_given", [])  # which an earlier version did not have
        if "_beta" in vars(self):  # an earlier version has pickled it
            self.beta = vars(self).pop("_beta")


class SumTreeView:
    """The sum tree of a sampler as it is now, to look at: `tree[slot]` and sums of ranges of slots."""

    def __init__(self, sampler: PrioritizedSampler) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        with self._sampler.lock:
            return self._sampler.storage_state.slots

    def __getitem__(self, index: Any) -> Any:
        """The leaf of a slot, `(p + eps) ** alpha`, a float; float64 [n] of int64 [n]."""
        slots = to_tensor(index, dtype=torch.int64)
        with self._sampler.lock:
            leaves = self._sampler.storage_state.leaves(slots.reshape(-1))
        return leaves.reshape(slots.shape) if slots.ndim else float(leaves)

    def query(self, begin: int, end: int) -> float:
        """The sum of the leaves of the slots `begin` to `end - 1`."""
        begin, end = max(int(begin), 0), min(int(end), len(self))
        return float(self[torch.arange(begin, end, device="cpu")].sum()) if begin < end else 0.0


@advised
class PrioritizedSampler(Sampler, built_in=True):
    """Draws a step with probability proportional to `(p + eps) ** alpha` (Schaul et al., 2016), with replacement.

    `info["priority_weight"]` holds `(P_i / P_min) ** -beta`, [batch], P_min over all stored steps that can be drawn.
    New steps, and steps that were changed in place, get the highest priority seen so far, which is 1.0 at first; steps
    that are overwritten lose theirs. Priorities follow one storage: used with another one, the sampler starts anew.
    Probabilities and weights are computed as float64, with the same bits on every machine.

    Args:
        max_capacity: the most steps that a storage may hold with which it is used; None: any. A buffer whose storage
            can hold more warns when it is made, and refuses steps beyond it.
        alpha: how much priorities count; 0: uniform.
        beta: how much weights correct for it; 1: fully. May be assigned at any time.
        eps: added to each priority. `alpha` and `eps`, too, may be assigned at any time.
        dtype: of the weights.
        reduction: of priorities with more dimensions than the index: "max", "min", "mean" or "median".
        max_priority_within_buffer: new steps get the highest priority among the steps that are stored when they come.
        device: None and "cpu" are accepted: priorities are kept in memory.

    Raises:
        ValueError: a setting that is not allowed.

    Example:
        >>> sampler = PrioritizedSampler(10, alpha=1.0, beta=1.0)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
        >>> index = rb.extend(torch.arange(5))
        >>> rb.update_priority(index, torch.tensor([0.0, 0.0, 3.0, 0.0, 0.0]))
        >>> rb.sample().tolist()
        [2, 2, 2, 2]
    """

    def __init__(
        self,
        max_capacity: int | None,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        *,
        compilable: bool = False,
        rank: int = 0,
    ) -> None:
        super().__init__(compilable, rank=rank)
        self.storage_state = PriorityTable(max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer)

    storage_state: PriorityTable
    alpha = StateSetting[float]("How much priorities count. Assigning it takes time in proportion to the storage.")
    beta = StateSetting[float]("How much weights correct for the priorities.", checked=partial(_checked, "beta"))
    eps = StateSetting[float]("What is added to each priority. Assigning it takes time in proportion to the storage.")
    max_capacity = StateSetting[int | None]("The most steps that a storage may hold; None: any.")
    dtype = StateSetting[torch.dtype]("Of the weights.")
    reduction = StateSetting[str]("Of priorities with more dimensions than the index.")
    max_priority_within_buffer = StateSetting[bool](
        "Whether new steps get the highest priority among those that are stored, and not of all that were.",
    )
    default_priority = StateSetting[float]("The priority that new steps get.")
    max_size = StateSetting[int | None]("As `max_capacity`.", "max_capacity")
    skipped = StateSetting[int]("Updates of steps that were not stored any more, which changed nothing.")

    @property
    def _sum_tree(self) -> SumTreeView:
        """The tree that it draws from, of the storage that was used last."""
        return SumTreeView(self)

    @property
    def _max_priority(self) -> tuple[float, int | None]:
        """The priority that new steps get, and the newest slot that has it; None where none has it."""
        with self.lock:
            return self.storage_state.highest()

    # ---- sampling ----
    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        lanes = storage.lanes
        with self.lock:
            drawn = self._draw_steps(storage, lanes, batch_size)
        if drawn is None:
            raise RuntimeError(f"{EMPTY} Add or extend it first.")
        slots, weights, rows = drawn
        info = DrawnInfo()
        info["priority_weight"] = weights
        info.drawn, info.store = rows, lanes.store
        return (storage.from_slots(slots) if storage.ndim > 1 else slots), info

    def _draw_steps(self, storage: Storage, lanes: Lanes, n: int) -> tuple[Tensor, Tensor, _native.DrawnRows] | None:
        table = self.storage_state
        seed = self._draw_seed(storage, lanes)
        priorities = table.following(storage, lanes)
        dtype, beta = table.dtype, table.beta
        wide = dtype is torch.float64
        drawn = priorities.draw(lanes.store, seed, n, beta, wide)
        if drawn is None:
            drawn = lanes.retry_draw(lambda: priorities.draw(lanes.store, seed, n, beta, wide))
            if drawn is None:
                return None
        slots, weights, rows = drawn
        return slots, weights if weights.dtype is dtype else weights.to(dtype), rows

    def draw_plan(self, storage: Storage) -> DrawPlan:
        dtype, native = self.storage_state.dtype, None
        if dtype is torch.float32 or dtype is torch.float64:
            native = _native.PriorityDraw(self, drawing, partial(self._follow, storage), dtype is torch.float64)
        limited = _room(self.storage_state.max_capacity, storage) is not None
        check_rows = partial(self._check_rows, storage) if limited else None
        plan = super().draw_plan(storage)
        return plan._replace(
            native=native, check_rows=check_rows, is_loose=lambda: True, takes_priorities=True, takes_updates=True
        )

    def _follow(self, storage: Storage) -> tuple[_native.Priorities, float, bool] | None:
        """Priorities of the storage's steps, beta, and whether weights are float64; None: `sample` draws."""
        table, lanes = self.storage_state, storage.lanes
        dtype = table.dtype
        if not lanes.store.rows() or (dtype is not torch.float32 and dtype is not torch.float64):
            return None
        return table.following(storage, lanes), table.beta, dtype is torch.float64

    def as_draw(self, *drawn: Any) -> Draw:
        draw = super().as_draw(*drawn)
        if type(draw.info) is DrawnInfo:  # a child of a user's own may give another info
            # A row that came in the place of the one that was drawn would have that one's weight.
            draw.seen, draw.store = draw.info.drawn, draw.info.store
        return draw

    # ---- priorities: those of the table, under the lock ----
    def update_priority(
        self, index: Any, priority: Any, *, generation: Any = None, storage: Storage | None = None
    ) -> None:
        with self.lock:
            self.storage_state.update(index, priority, generation, storage)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        with self.lock:
            self.storage_state.mark(index, storage)

    def priorities(self, index: Any, *, storage: Storage | None = None) -> Tensor:
        """The priorities of stored steps as they were given: float64 [n]; -1 where a slot holds no step, or a removed
        one.

        Raises:
            IndexError: an index lies outside the storage.
        """
        with self.lock:
            return self.storage_state.get(index, storage)

    def totals(self, storage: Storage, batch_size: int | None = None, *, newest: bool = True) -> DrawTotals:
        with self.lock:
            return self.storage_state.totals(lambda p: p.poll(_store_of(storage)) if newest else None, storage)

    def draw_weights(self, storage: Storage, slots: Tensor) -> Tensor | None:
        with self.lock:
            lanes = storage.lanes
            if self.storage_state.storage_in_use is not storage:
                return None  # before the first draw or update: a look is no use
            return self.storage_state.following(storage, lanes).leaves(lanes.store, slots)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        return self.totals(storage, batch_size).share > 0

    def raise_new_priority(self, priority: float, *, storage: Storage | None = None) -> None:
        with self.lock:
            self.storage_state.raise_new(priority, storage)

    def checked_priorities(self, priority: Any, n: int) -> Tensor:
        """Priorities of n steps, reduced to one for each: float64 [n].

        Raises:
            ValueError: one is negative, NaN or infinite, or there is not one for each step.
        """
        return self.storage_state.checked(priority, n)

    def check_storage(self, storage: Storage) -> None:
        self.storage_state.check_storage(storage)
        with self.lock:
            self.storage_state.find(storage)

    def _check_rows(self, storage: Storage, rows: int) -> None:
        """As `DrawPlan.check_rows`."""
        _room(self.storage_state.max_capacity, storage, rows)

    def _check_sending(self) -> None:
        raise RuntimeError(
            f"a {type(self).__name__} cannot be shared between processes: each would go on with priorities of its own, "
            "and no update would reach the other. Send the storage (rb.storage), and give the buffer there a sampler "
            "of its own; pickle and copy.deepcopy make copies"
        )

    @classmethod
    def _of_earlier_pickle(cls, attributes: dict[str, Any]) -> None:
        if "storage_state" not in attributes:
            attributes["storage_state"] = attributes.pop("_table")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.storage_state.settings_shown()})"


def _room(max_capacity: int | None, storage: Storage, more: int = 0) -> int | None:
    """The most steps that a storage may hold, where it could hold more; ValueError where it does, with `more` steps."""
    if max_capacity is None:
        return None
    lanes = storage.lanes
    # A storage rounds its size up to whole lanes and to whole rows of environments.
    most = max_capacity + lanes.store.lanes * lanes.envs - 1
    if storage.max_size is not None and storage.max_size <= most:
        return None
    rows = stored_rows(storage) + more
    if rows > most:
        raise ValueError(
            f"max_capacity={max_capacity} of the sampler is less than the {rows} steps of the storage; make "
            f"it PrioritizedSampler(max_capacity={rows}, ...) or more"
        )
    return most


def _per_step(priority: Any, n: int, shape: tuple[int, ...], reduction: str) -> Tensor:
    """One priority for each of n steps that an index of this shape names: float64 [n]."""
    p = _real(priority)
    if p.numel() == 1:
        p = p.reshape(1).expand(n)
    elif tuple(p.shape[: len(shape)]) == shape and p.ndim > len(shape) and p.numel():
        p = _reduced(p.reshape(n, -1), reduction)
    elif tuple(p.shape) not in (shape, (n,)):
        raise ValueError(
            f"{n} steps are indexed, the priorities have shape {list(p.shape)}; nothing was changed. Give one "
            "number for each step, or a single one for all"
        )
    return p.reshape(-1).contiguous()


def _store_of_now(lanes: Lanes) -> tuple[Any, ...]:
    """What is another one after all rows were replaced."""
    return lanes.store.store_id, lanes.store.incarnation


def _store_of(storage: Storage) -> _native.Store:
    return storage.lanes.store


def _shifted(saved: dict[str, Any], shifts: list[int]) -> dict[str, Any]:
    """Rows and priorities of a state, for lanes whose sequences are lower by this much."""
    seen, p = saved["seen"], saved["priorities"]
    envs, parts, at = len(p) // max(1, sum(b - a for a, b in seen)), [], 0
    for (a, b), shift in zip(seen, shifts, strict=False):
        # Rows that were overwritten between the state and the save of the rows have no sequence here.
        parts.append(p[at + (min(max(a, shift), b) - a) * envs : at + (b - a) * envs])
        at += (b - a) * envs
    shifted = [[max(a, s) - s, max(b, s) - s] for (a, b), s in zip(seen, shifts, strict=False)]
    return {"priorities": torch.cat(parts) if parts else p[:0], "seen": shifted}


def _real(priority: Any) -> Tensor:
    """Priorities of any form as float64, of their shape."""
    if is_masked(priority):
        raise masked_array("priority")
    try:
        if not isinstance(priority, Tensor):
            p = torch.from_numpy(np.array(priority))
        elif priority.layout is torch.strided:
            p = priority.detach().cpu().resolve_neg()
        else:
            raise TypeError(f"a {priority.layout} tensor")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(
            f"priorities are a number, or a dense tensor, array or list of numbers, found a {type(priority).__name__}: "
            f"{priority!r:.80}; nothing was changed"
        ) from None
    if p.is_complex():
        raise ValueError(f"priorities are real numbers, found {p.dtype}; nothing was changed")
    return p.to(torch.float64)


def _one_for_each_item(
    slots: Tensor, p: Tensor, generation: Tensor | None, reduction: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of items that are whole trajectories: what is given for each of their steps, reduced to one for each item.

    An item is a slot, and a generation where they are given.
    """
    which = slots.unsqueeze(1) if generation is None else torch.stack([slots, generation], 1)
    items, item = which.unique(dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
    counts = item.bincount(minlength=len(items)).tolist()
    parts = p[item.argsort(stable=True)].split(counts)  # type: ignore[no-untyped-call]
    reduced = torch.cat([_reduced(part.unsqueeze(0), reduction) for part in parts]) if counts else p
    return items[:, 0].contiguous(), reduced, None if generation is None else items[:, 1].contiguous()


def _reduced(p: Tensor, reduction: str) -> Tensor:
    """One number for each row of [n, k]."""
    if reduction == "max":
        return p.amax(1)
    if reduction == "min":
        return p.amin(1)
    return p.mean(1) if reduction == "mean" else p.median(1).values
