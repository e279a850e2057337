"""Priorities of stored steps, for samplers that draw by them."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engram import _native
from engram.data.replay_buffers.samplers.base import EMPTY, Index, Sampler, check_counts, put_rows
from engram.errors import is_masked, masked_array
from engram.store.indexing import select, tensor_of, to_slots

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage
    from engram.store.lanes import Lanes

_WEIGHTS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_REDUCTIONS = ("max", "min", "mean", "median")
_SAVED = ("alpha", "eps", "reduction", "max_priority_within_buffer")


class HasPriorities(Sampler):
    """Keeps a priority for each step of the storage that is sampled from."""

    #: Whether only steps at which slices can start are drawn.
    _starts_only = False

    def _set_up(
        self,
        max_capacity: int | None,
        alpha: float,
        beta: float,
        eps: float,
        dtype: torch.dtype,
        reduction: str,
        max_priority_within_buffer: bool,
    ) -> None:
        if max_capacity is not None and (
            isinstance(max_capacity, bool) or not hasattr(max_capacity, "__index__") or int(max_capacity) < 1
        ):
            raise ValueError(f"max_capacity must be a positive integer or None, got {max_capacity!r}")
        if dtype not in _WEIGHTS:
            raise ValueError(f"dtype must be a floating point type for weights ({_WEIGHTS}), got {dtype!r}")
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction must be one of {_REDUCTIONS}, got {reduction!r}")
        self.max_capacity = None if max_capacity is None else int(max_capacity)
        self.dtype = dtype
        self.reduction = reduction
        self.max_priority_within_buffer = bool(max_priority_within_buffer)
        self._alpha = _checked("alpha", alpha)
        self._eps = _checked("eps", eps)
        self.beta = beta
        self._priorities = self._made()
        self._restored: dict[str, Any] | None = None  # a state that waits for its storage
        self._storage: weakref.ref[Storage] | None = None  # the one that was used last
        self._fits = False  # whether it will not outgrow `max_capacity`: it has a limit

    def _made(self) -> _native.Priorities:
        return _native.Priorities(self._alpha, self._eps, self.max_priority_within_buffer, self._starts_only)

    # ---- settings ----
    @property
    def alpha(self) -> float:
        """How much priorities count. Assigning it takes time in proportion to the storage."""
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        self._use(_checked("alpha", alpha), self._eps)

    @property
    def eps(self) -> float:
        """What is added to each priority. Assigning it takes time in proportion to the storage."""
        return self._eps

    @eps.setter
    def eps(self, eps: float) -> None:
        self._use(self._alpha, _checked("eps", eps))

    def _use(self, alpha: float, eps: float) -> None:
        with self.lock:
            self._priorities.use(alpha, eps)
            self._alpha, self._eps = alpha, eps

    @property
    def beta(self) -> float:
        """How much weights correct for the priorities."""
        return self._beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._beta = _checked("beta", beta)

    @property
    def default_priority(self) -> float:
        """The priority that new steps get."""
        return self._priorities.new_priority

    @property
    def skipped(self) -> int:
        """Updates of steps that were not stored any more, which changed nothing."""
        return self._priorities.skipped

    def follow(self, storage: Storage) -> None:
        with self.lock:
            if storage.lanes is not None:
                self._following(storage, storage.lanes).poll(storage.lanes.store)

    def _following(self, storage: Storage, lanes: Lanes) -> _native.Priorities:
        """The priorities of this storage's steps. The caller holds the lock as long as it uses them."""
        last = self._storage
        if last is None or last() is not storage or not self._fits:
            self.check_storage(storage)
            self._storage, self._fits = weakref.ref(storage), storage.max_size is not None
        if lanes.unused_since_fork:
            lanes.join_after_fork()
        if self._restored is not None:
            self._resume(lanes)
        return self._priorities

    def _resume(self, lanes: Lanes) -> None:
        saved = self._restored
        assert saved is not None
        self._priorities.resume(
            lanes.store, [(a, b) for a, b in saved["seen"]], saved["max_priority"], saved["latest_priority"],
            saved["skipped"], saved["priorities"],
        )  # fmt: skip
        self._restored = None

    def check_storage(self, storage: Storage) -> None:
        lanes = storage.lanes
        size = storage.max_size if storage.max_size is not None else len(storage)
        # A storage rounds its size up to whole lanes and to whole rows of environments.
        rounding = 0 if lanes is None else lanes.store.lanes * lanes.envs - 1
        if self.max_capacity is not None and size - rounding > self.max_capacity:
            raise ValueError(
                f"max_capacity={self.max_capacity} of the sampler is less than the {size} steps of the storage; "
                f"make it PrioritizedSampler(max_capacity={size}, ...)"
            )

    # ---- priorities ----
    def update_priority(
        self, index: Any, priority: Any, *, generation: Any = None, storage: Storage | None = None
    ) -> None:
        """Sets priorities of stored steps; of a step named twice the last one stays.

        Args:
            index: int, int64 [n], a tuple (time, env) of such or [n, 2] with ndim=2, a slice, a bool mask.
            priority: a number, or a tensor of one number for each step. With more dimensions than the index it is
                reduced over them (`reduction`).
            generation: int64 [n], write numbers as `info["generation"]` has them: where a slot holds another step by
                now, the update is left out and counted in `skipped`.
            storage: of the steps; the one that was sampled last if None.

        Raises:
            ValueError: a priority is negative, NaN or infinite, or sizes differ. Nothing is changed.
            IndexError: an index lies outside the storage, or has not been written (with generations it is skipped).

        Where whole trajectories are stored as items, what is given for an item's steps is reduced to one priority.
        """
        with self.lock:
            where, lanes = self._stored_in(storage)
            mine = self._following(where, lanes)
            if (
                type(index) is Tensor and type(priority) is Tensor and where.ndim == 1
                and (generation is None or lanes.own_sequences is None) and not where._item_shape
                and mine.set(lanes.store, index, priority, generation)
            ):  # fmt: skip
                return
            self._set_any(where, lanes, index, priority, generation)

    def _set_any(self, where: Storage, lanes: Lanes, index: Any, priority: Any, generation: Any) -> None:
        """Sets priorities, whatever form the arguments have."""
        slots, shape = self._slots(where, lanes, index)
        p = self._per_step(priority, len(slots), shape)
        if generation is not None:
            generation = _whole_numbers(generation)
            if len(generation) != len(slots):
                raise ValueError(
                    f"{len(slots)} steps are indexed, {len(generation)} generations given; nothing was changed"
                )
        if where._item_shape:
            slots, p, generation = _one_for_each_item(slots, p, generation, self.reduction)
        if generation is not None:
            generation = lanes.counted(slots, generation).contiguous()
        self._priorities.set(lanes.store, slots, p, generation)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Gives stored steps the priority of new ones.

        Raises:
            IndexError: an index lies outside the storage or has not been written.
        """
        with self.lock:
            where, lanes = self._stored_in(storage)
            self._following(where, lanes).mark(lanes.store, self._slots(where, lanes, index)[0])

    def priorities(self, index: Any, *, storage: Storage | None = None) -> Tensor:
        """The priorities of stored steps as they were given: float64 [n]; -1 where a slot holds no step.

        Raises:
            IndexError: an index lies outside the storage.
        """
        with self.lock:
            where, lanes = self._stored_in(storage)
            mine = self._following(where, lanes)
            return mine.of(lanes.store, self._slots(where, lanes, index)[0])

    def checked_priorities(self, priority: Any, n: int) -> Tensor:
        """Priorities of n steps, reduced to one for each: float64 [n].

        Raises:
            ValueError: one is negative, NaN or infinite, or there is not one for each step.
        """
        p = self._per_step(priority, n, (n,))
        self._priorities.check(p)
        return p

    def _stored_in(self, storage: Storage | None) -> tuple[Storage, Lanes]:
        if storage is None:
            storage = None if self._storage is None else self._storage()
        if storage is None:
            raise RuntimeError("the sampler has not been used with a storage yet; say which with storage=...")
        lanes = storage.lanes
        if lanes is None:
            raise IndexError("nothing has been written to this storage yet; extend it first")
        return storage, lanes

    def _slots(self, storage: Storage, lanes: Lanes, index: Any) -> tuple[Tensor, tuple[int, ...]]:
        """Slots of an index, and its shape."""
        given = index if isinstance(index, Tensor) else None
        if isinstance(index, slice | range) or (given is not None and given.dtype == torch.bool):
            found = select(lanes.store, index, storage.env_shape)
            return found.slots, found.shape
        parts = [tensor_of(i) for i in index] if isinstance(index, tuple) else [tensor_of(index)]
        if any(p.dtype == torch.bool or p.is_floating_point() or p.is_complex() for p in parts):
            raise IndexError(f"indices must be integers, found {[p.dtype for p in parts]}; nothing was changed")
        given = parts[0]
        if storage.env_shape and not isinstance(index, tuple) and given.shape[-1:] != (storage.ndim,):
            raise IndexError(
                f"with ndim={storage.ndim} an index is a tuple (time, env) or ends in a dimension of {storage.ndim}, "
                f"found shape {list(given.shape)}; nothing was changed"
            )
        slots = to_slots(tuple(parts) if isinstance(index, tuple) else given, storage.env_shape, storage.max_size or 0)
        shape = tuple(given.shape)
        return slots, shape[:-1] if storage.env_shape and not isinstance(index, tuple) else shape

    def _per_step(self, priority: Any, n: int, shape: tuple[int, ...]) -> Tensor:
        p = _real(priority)
        if p.numel() == 1:
            p = p.reshape(1).expand(n)
        elif tuple(p.shape[: len(shape)]) == shape and p.ndim > len(shape) and p.numel():
            p = _reduced(p.reshape(n, -1), self.reduction)
        elif tuple(p.shape) not in (shape, (n,)):
            raise ValueError(
                f"{n} steps are indexed, the priorities have shape {list(p.shape)}; nothing was changed. Give one "
                "number for each step, or a single one for all"
            )
        return p.reshape(-1).contiguous()

    def empty(self) -> None:
        with self.lock:
            self._priorities.forget()
            self._restored = None

    # ---- state ----
    def state_dict(self) -> dict[str, Any]:
        with self.lock:
            settings = {**self._decisive(), "beta": self._beta}
            storage = None if self._storage is None else self._storage()
            if self._restored is not None:
                return {**self._restored, **settings}
            if storage is None or storage.lanes is None:
                return {**settings, "seen": [], "max_priority": 1.0, "latest_priority": 1.0, "skipped": 0,
                        "priorities": torch.empty(0, dtype=torch.float64)}  # fmt: skip
            seen, highest, latest, skipped, p = self._following(storage, storage.lanes).state(storage.lanes.store)
        return {**settings, "seen": [list(rows) for rows in seen], "max_priority": highest, "latest_priority": latest,
                "skipped": skipped, "priorities": p}  # fmt: skip

    def _decisive(self) -> dict[str, Any]:
        return {**super()._decisive(), **{name: getattr(self, name) for name in _SAVED}}

    def differences(self, state: dict[str, Any]) -> list[str]:
        if type(state["seen"]) is not list or not isinstance(state["priorities"], Tensor):
            raise ValueError("a saved state has no priorities")
        for rows in state["seen"]:
            check_counts(rows)
            if len(rows) != 2 or rows[1] < rows[0]:
                raise ValueError(f"a saved state has priorities of the rows {rows!r:.80}")
        check_counts([state["skipped"]])
        for name in ("beta", "max_priority", "latest_priority"):
            _checked(name, state[name])
        return super().differences(state)

    def check_state(self, state: dict[str, Any], storage: Storage) -> None:
        super().check_state(state, storage)
        if storage.lanes is None:
            return
        p, steps = _real(state["priorities"]), sum(b - a for a, b in state["seen"])
        if p.ndim != 1 or len(p) != steps * storage.lanes.envs:
            raise ValueError(f"a saved state has {p.numel()} priorities for {steps} time steps")
        highest = torch.tensor([state["max_priority"], state["latest_priority"]], dtype=torch.float64)
        for values in (p.contiguous(), highest):
            self._priorities.check(values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = ("seen", "max_priority", "latest_priority", "skipped", "priorities")
        restored = {name: state[name] for name in names}
        restored["priorities"] = state["priorities"].to(torch.float64).contiguous()
        with self.lock:
            super().load_state_dict(state)
            self.beta = state["beta"]
            # What it was goes on to be that of the old object: where the load fails, nothing has happened to it.
            self._priorities, self._restored = self._made(), restored

    def adopt(self, incarnation: int, shifts: list[int]) -> None:
        """After `loads`: the priorities go on in a store that counts anew."""
        with self.lock:
            if self._restored is not None:
                self._restored = {**self._restored, **_shifted(self._restored, shifts)}

    def position(self) -> None:
        """Nothing: a draw changes the generator alone."""

    def rewind(self, position: None) -> None:
        pass

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_priorities": None, "_storage": None, "_restored": self._sent()}

    def _sent(self) -> dict[str, Any]:
        """The state, with memory of its own: shared with another process it would be gone before it arrives."""
        state = self.state_dict()
        return {**state, "priorities": state["priorities"].numpy().copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._priorities = self._made()
        assert self._restored is not None
        self._restored = {**self._restored, "priorities": torch.from_numpy(self._restored["priorities"])}


def _shifted(saved: dict[str, Any], shifts: list[int]) -> dict[str, Any]:
    """Rows and priorities of a state, for lanes whose write numbers are lower by this much."""
    seen, p = saved["seen"], saved["priorities"]
    strands, kept, at = len(p) // max(1, sum(b - a for a, b in seen)), [], 0
    for (a, b), shift in zip(seen, shifts, strict=False):
        # Rows that were overwritten between the state and the save of the rows have no numbers here.
        kept.append(p[at + (min(max(a, shift), b) - a) * strands : at + (b - a) * strands])
        at += (b - a) * strands
    numbered = [[max(a, s) - s, max(b, s) - s] for (a, b), s in zip(seen, shifts, strict=False)]
    return {"priorities": torch.cat(kept) if kept else p[:0], "seen": numbered}


def _checked(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be a finite number of 0 or more, got {value!r}")
    return number


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


def _whole_numbers(generation: Any) -> Tensor:
    """Write numbers of any form: int64 [n]."""
    try:
        given = torch.as_tensor(generation).cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        given = None
    if given is None or given.dtype == torch.bool or given.is_floating_point() or given.is_complex():
        raise TypeError(
            f"generations are write numbers, int64, as info['generation'] has them, found a "
            f"{type(generation).__name__}: {generation!r:.80}; nothing was changed"
        )
    return given.to(torch.int64).reshape(-1)


def _reduced(p: Tensor, reduction: str) -> Tensor:
    """One number for each row of [n, k]."""
    if reduction == "max":
        return p.amax(1)
    if reduction == "min":
        return p.amin(1)
    return p.mean(1) if reduction == "mean" else p.median(1).values


class DrawnInfo(dict[str, Any]):
    """What is said of a batch of rows that were drawn by priority, and which rows these are; a copy is a plain dict."""

    __slots__ = ("drawn", "store")
    drawn: _native.DrawnRows
    store: _native.Store

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class PrioritizedSampler(HasPriorities):
    """Draws a step with probability proportional to `(p + eps) ** alpha` (Schaul et al., 2016), with replacement.

    `info["priority_weight"]` holds `(P_i / P_min) ** -beta`, [batch], P_min over all stored steps that can be drawn.
    New steps, and steps that were changed in place, get the highest priority seen so far, which is 1.0 at first; steps
    that are overwritten lose theirs. Priorities follow one storage: used with another one, the sampler starts anew.
    Probabilities and weights have the precision of a float32, weights of dtype float64 that of a float64.

    Args:
        max_capacity: the largest storage that it may be used with; None: any.
        alpha: how much priorities count; 0: uniform.
        beta: how much weights correct for it; 1: fully. May be assigned at any time.
        eps: added to each priority.
        dtype: of the weights.
        reduction: of priorities with more dimensions than the index: "max", "min", "mean" or "median".
        max_priority_within_buffer: new steps get the highest priority among the steps that are stored when they come.

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
    ) -> None:
        super().__init__()
        self._set_up(max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer)

    # ---- sampling ----
    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        lanes = storage.lanes
        with self.lock:
            drawn = None if lanes is None else self._draw(self._following(storage, lanes), storage, lanes, batch_size)
        if drawn is None or lanes is None:
            raise RuntimeError(f"{EMPTY} Add or extend it first.")
        slots, weights, rows = drawn
        info = DrawnInfo()
        info["priority_weight"] = weights
        info.drawn, info.store = rows, lanes.store
        return (storage.from_slots(slots) if storage.ndim > 1 else slots), info

    def _draw(
        self, priorities: _native.Priorities, storage: Storage, lanes: Lanes, n: int
    ) -> tuple[Tensor, Tensor, _native.DrawnRows] | None:
        seed, wide = self.draw_seed(storage), self.dtype is torch.float64
        drawn = priorities.draw(lanes.store, seed, n, self._beta, wide)
        if drawn is None:
            drawn = lanes.retry_draw(lambda: priorities.draw(lanes.store, seed, n, self._beta, wide))
            if drawn is None:
                return None
        slots, weights, rows = drawn
        return slots, weights if weights.dtype is self.dtype else weights.to(self.dtype), rows

    # ---- after the read: a row that came in the place of the one that was drawn would have that one's weight ----
    def replaced(self, storage: Storage, slots: Tensor, info: dict[str, Any]) -> list[int] | None:
        if type(info) is not DrawnInfo:
            return None  # a sampler of the user's own says something else of its rows
        stale: Any = info.drawn.stale(info.store, slots)
        return stale  # type: ignore[no-any-return]

    def redraw(self, storage: Storage, slots: Tensor, info: dict[str, Any], places: list[int]) -> Tensor:
        if type(info) is not DrawnInfo:
            return super().redraw(storage, slots, info, places)
        index, fresh = self.sample(storage, len(places))
        assert type(fresh) is DrawnInfo
        slots, at = slots.clone(), torch.tensor(places)
        slots[at] = to_slots(index, storage.env_shape, storage.max_size or 0)
        put_rows(info, fresh, at, len(slots))
        info.drawn.replace(places, fresh.drawn)
        return slots

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)}" for name in ("alpha", "beta", "eps", "reduction"))
        return f"{type(self).__name__}({settings})"
