"""What a sampler is, to those who use one, write one, or are a buffer that draws with one."""

from __future__ import annotations

import abc
import contextlib
import copy
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

import engram._native as _native
from engram._advice import advised
from engram._arguments import BUILT_IN, KeepsArguments
from engram._checks import is_integer
from engram._copies import Computed, PartlyCopied, SentByState
from engram._generator import Generator
from engram._overrides import overrides
from engram._system import drawing, fork_registry
from engram.checkpoint.snapshot import load_part, save_part
from engram.data.replay_buffers.samplers.draw import Draw, DrawPlan, EpochName, Index
from engram.data.replay_buffers.samplers.draw import EpochInfo as EpochInfo  # pickled infos name it here
from engram.data.replay_buffers.state.parts import SavedOwnPart, SavedPart, as_saved
from engram.store.indexing import tensor_of, to_slots

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage
    from engram.store.lanes import Lanes

EMPTY = "Cannot sample from an empty storage."


class DrawTotals(NamedTuple):
    """What a sampler draws from in one storage, for who divides draws among several of them.

    Attributes:
        share: of one storage in proportion to the others: how many rows, trajectories or windows are drawn with equal
            probability, or the sum of `(p + eps) ** alpha` over what is drawn by priority.
        lowest: the least `(p + eps) ** alpha` that can be drawn; None: draws are uniform, or there is nothing to draw.
        new_priority: what new rows get; None for samplers without priorities.
    """

    share: float
    lowest: float | None = None
    new_priority: float | None = None


class WorkerShare(NamedTuple):
    """Which of how many worker processes of a data loader this is, and the seed that all of them know."""

    worker: int
    workers: int
    seed: int


class StorageState(PartlyCopied):
    """What a sampler knows of one storage beside its settings: nothing, where an epoch is, or priorities.

    A load never changes one: it gives the sampler another. The caller holds the sampler's lock.
    """

    number: int | None = None  # how many epochs have begun; None: there are none
    restarts: int = 0  # how often it was set anew, and did not go on from its last draw

    def settings(self) -> dict[str, Any]:
        """Those of its settings that decide which rows are drawn."""
        return {}

    def state(self) -> dict[str, Any]:
        """What is saved of it."""
        return {}

    def frozen_state(self) -> dict[str, Any]:
        """The same of this moment, as `SavedPart.frozen_state`."""
        return copy.deepcopy(self.state())

    def check_saved(self, state: dict[str, Any]) -> None:
        """ValueError where a saved state is damaged: no sampler of this kind can have saved it."""

    def misfits(self, state: dict[str, Any]) -> list[str]:
        """What of a saved state that is not damaged does not fit here, beside settings."""
        return []

    def check(self, state: dict[str, Any], storage: Storage) -> None:
        """ValueError where a saved state cannot be one of this storage, which holds rows."""

    def restored(self, state: dict[str, Any]) -> Self:
        """One that goes on from a saved state; this one stays as it is, for a load that fails later."""
        return self

    def rebased(self, incarnation: int, shifts: list[int]) -> Self:
        """This one in a store with this incarnation, whose sequences are lower by `shifts`, one a lane."""
        return self

    def find(self, storage: Storage) -> None:
        """Finds the rows of a state that was loaded alone, where they are there: before others are written."""

    def sync(self, storage: Storage) -> None:
        """Takes in what was written since the last look; ValueError where what was loaded is not of this storage."""

    def origin(self) -> Any:
        """What its epochs go back to: another value once it was set anew, one for epochs that follow each other."""
        return self.restarts

    def cursor(self) -> Any:
        """What a draw changes, for `put_back`; small."""
        return None

    def put_back(self, cursor: Any) -> None:
        """Goes back to where it stood at a cursor, to draw the same again; not where it was set anew since."""

    def empty(self) -> None:
        """Forgets what was stored."""

    def copied(self) -> Self:
        """Another one, for a copy of the sampler: what happens to one leaves the other as it is."""
        return copy.copy(self)


_NO_LOCK = contextlib.nullcontext()  # of a child whose constructor does not call that of its base, until it is used
_NOTHING = StorageState()  # of samplers without one: what they save, if anything, is what their `state_dict` adds

T = TypeVar("T")


class StateSetting(Generic[T]):
    """An attribute of a sampler that is one of what it knows of its storage.

    Args:
        name: of the attribute there; None: the same.
        checked: makes of what is assigned the value that it has; None: any is one.
    """

    def __init__(self, doc: str, name: str | None = None, checked: Callable[[Any], T] | None = None) -> None:
        self.__doc__ = doc
        self._name = name or ""
        self._checked = checked

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = self._name or name

    def __get__(self, sampler: Any, owner: type | None = None) -> T:
        value: Any = self if sampler is None else getattr(sampler.storage_state, self._name)
        return value  # type: ignore[no-any-return]

    def __set__(self, sampler: Any, value: T) -> None:
        with sampler.lock:
            setattr(sampler.storage_state, self._name, value if self._checked is None else self._checked(value))


def _copied_state(sampler: Sampler) -> StorageState:
    with sampler.lock:
        return sampler.storage_state.copied()


@advised
class Sampler(SentByState, PartlyCopied, KeepsArguments, abc.ABC):
    """Chooses which stored steps a batch is made of.

    A sampler of your own is a class with `sample(storage, batch_size) -> (index, info)`; it need not inherit from this
    one. It may also have any of `add`, `extend`, `can_sample`, `update_priority`, `mark_update`, `check_storage`,
    `use_generator`, `empty`, `totals`, `raise_new_priority`, `ran_out`, `state_dict` and `load_state_dict`, as they are
    described here; those that it leaves out do nothing. One with `checked_priorities`, as `PrioritizedSampler` has it,
    is given the priorities that come with data.

    Draws come from torch's global generator, or from the buffer's own where it has one. Every sampler takes
    `compilable=`, without effect: under `torch.compile` each draw is a graph break; and `rank=`, the number of this
    process among several learners, which from one seed draw other rows at each rank. At rank 0 draws are as without.
    """

    # The generator comes with its buffer. Tensors that are sent to another process stay shared with it.
    _copied_as: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("lock", "_generator", "_seed", "_seed_view")),
        "storage_state": Computed(_copied_state),
    }
    storage_state: StorageState = _NOTHING
    # Brings the attributes of a sampler that an earlier version pickled to their present form; None: they have it.
    _of_earlier_pickle: ClassVar[Any] = None
    _rank = 0  # the number of this process among several learners
    #: Held by whoever draws, changes what decides the draws, or reads it. Taken before a storage's mutex.
    lock: Any = _NO_LOCK

    def __init__(self, compilable: bool = False, *, rank: int = 0) -> None:
        if not is_integer(rank, 0):
            raise ValueError(
                f"rank is the number of this process, 0 or more, as dist.get_rank() gives it; got {rank!r}"
            )
        if rank:  # not of a copy, which has that of its original
            self._rank = int(rank)
        self.lock = threading.RLock()
        _live.add(self)
        self._generator: torch.Generator | Generator | None = None
        self._seed = torch.empty(1, dtype=torch.int64, device="cpu")
        # While a view of it lives, `random_` releases the GIL once instead of four times (torch 2.13).
        self._seed_view = self._seed.view(1)

    # ---- drawing ----
    @abc.abstractmethod
    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Index of the rows to read, int64 [batch_size] (with ndim=2 a tuple (time, env) of such), and an info dict.

        A sampler of your own may return integers of any dtype, as a tensor, array or list, and fewer rows or more;
        buffers refuse floats, masks, and slots that the storage does not have. What its info has for each row is in the
        batches of TensorDict buffers, too; the `slice_id` of a base that draws slices only where `slice_key` puts it.

        Raises:
            RuntimeError: the storage is empty.
        """

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether `sample` would draw such a batch now: steps are stored, where it needs them whole trajectories."""
        return bool(len(storage))

    @property
    def ran_out(self) -> bool:
        """Whether an epoch has just ended."""
        return False

    def add(self, index: Any) -> None:
        """For samplers of your own: called with the slot of a step that their buffer has just stored.

        The library's own samplers do nothing here: the next draw takes in what is new.
        """

    def extend(self, index: Any) -> None:
        """As `add`, with the index of several steps, as `extend` of the buffer returns it."""

    def use_generator(self, generator: torch.Generator | Generator | None) -> None:
        """Draws from this generator from now on; None: torch's global one."""
        self._generator = generator

    def check_storage(self, storage: Storage) -> None:
        """Called when a buffer puts the two together. ValueError: the sampler cannot be used with this storage."""

    def empty(self) -> None:
        """Forgets what was stored."""
        self._empty()

    def _empty(self) -> None:
        """What `empty` does; by this name a child may have it, too."""
        with self.lock:
            self.storage_state.empty()

    def totals(self, storage: Storage, batch_size: int | None = None, *, newest: bool = True) -> DrawTotals:
        """What it draws from in this storage: several storages are drawn from as one where each gets its share.

        Args:
            batch_size: of the draws, for samplers with `num_slices`.
            newest: take in what was written since the last draw; False: as that one saw it.

        Raises:
            TypeError: a sampler whose draws cannot be divided among storages, such as one with epochs.

        Example:
            >>> sampler = RandomSampler()
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler)
            >>> _ = rb.extend(torch.arange(5))
            >>> sampler.totals(rb.storage).share
            5.0
        """
        raise TypeError(
            f"draws of a {type(user_object(self)).__name__} cannot be divided among several storages; RandomSampler, "
            "PrioritizedSampler, SliceSampler and PrioritizedSliceSampler can"
        )

    def draw_weights(self, storage: Storage, slots: Tensor) -> Tensor | None:
        """How likely stored rows are drawn, up to a common factor: float64 [n] of int64 [n]; None: it is not known.

        For `publish_stats`; 0 where a slot cannot be drawn. A child that draws otherwise defines it anew.
        """
        return None

    def raise_new_priority(self, priority: float, *, storage: Storage | None = None) -> None:
        """New rows get at least this priority from now on; a sampler without priorities ignores it.

        For several storages that are drawn from as one, in which new rows get the highest priority of all.

        Raises:
            ValueError: it is negative, NaN, infinite or too large for alpha; or new rows get the highest priority
                among those that are stored (`max_priority_within_buffer`). Nothing is changed.
            RuntimeError, IndexError: the sampler has no storage yet, or that has no rows.
        """

    # ---- priorities ----
    def update_priority(
        self, index: Any, priority: Any, *, generation: Any = None, storage: Storage | None = None
    ) -> None:
        """Sets priorities of stored steps; a sampler without priorities ignores it.

        Args:
            index: int, int64 [n], a tuple (time, env) of such or [n, 2] with ndim=2, a slice, a bool mask.
            priority: a number, or a tensor of one number for each step. With more dimensions than the index it is
                reduced over them (`reduction`).
            generation: int64 [n], as `info["generation"]` has it: where a slot holds another step by now, the update is
                left out and counted in `skipped`.
            storage: of the steps; if None the one that was sampled last, or that of the buffer. Without one the update
                is kept, and made before the first draw, where it is an error if it does not fit the storage.

        Where whole trajectories are stored as items, what is given for an item's steps is reduced to one priority. Of a
        step that is named twice the last priority stays.

        Raises:
            ValueError: a priority is negative, NaN or infinite, or sizes differ. Nothing is changed.
            IndexError: an index lies outside the storage, or has not been written (with generations it is skipped).
        """

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Gives stored steps the priority of new ones, as they have changed; a sampler without priorities ignores it.

        Raises:
            IndexError: an index lies outside the storage or has not been written.
        """

    # ---- state ----
    def state_dict(self) -> dict[str, Any]:
        """What must be saved for the draws to go on as they would have, with the storage as it is now.

        Saved and loaded alone, it goes on when its storage has these rows again, which may be loaded before or after.
        """
        with self.lock:
            return {**self._config(), **self.storage_state.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state.

        Raises:
            CheckpointMisfitError: it is no state of such a sampler, or that of one with other settings; every
                difference is listed, and nothing is changed. It is a ValueError, too.
        """
        with self.lock:
            self.saved_form.check_fits(state)
            self.storage_state = self.storage_state.restored(state)

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Saves this sampler alone, without rows, as a snapshot (JSON, and a file of tensors) that replaces the last.

        Raises:
            CheckpointError: it cannot be written; the last snapshot is as it was.

        Example:
            >>> import tempfile
            >>> folder = tempfile.mkdtemp()
            >>> sampler = PrioritizedSampler(100, alpha=0.7, beta=0.5)
            >>> sampler.dumps(folder)
            >>> sampler.beta = 0.9
            >>> sampler.loads(folder)
            >>> sampler.beta
            0.5
        """
        with self.lock:
            save_part(path, "sampler", self.saved_form)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Takes over what `dumps` saved; the storage must hold the rows that it held then, or get them before the next
        draw.

        Raises:
            CorruptCheckpointError: a file is not what was saved.
            CheckpointMisfitError: another kind of sampler was saved, or one with other settings. Nothing is changed.
        """
        with self.lock:
            load_part(path, "sampler", self.saved_form)

    @property
    def saved_form(self) -> SavedPart:
        """This sampler, as it is saved and loaded with a buffer."""
        form = SavedPart if self.storage_state is _NOTHING else _SavedSampler
        return as_saved(form(self, type(self).__name__, settings=self._config(), owner="sampler"))

    def draw_plan(self, storage: Storage) -> DrawPlan:
        """How it draws from a storage, for the buffer that puts the two together."""
        has_epochs = self.storage_state.number is not None
        return DrawPlan(
            partial(self._draw_batch, storage), self.update_priority, _rows_of_batch,
            partial(_cursor, self), partial(_put_back, self),
            takes_lock=not has_epochs, ran_out=partial(_ran_out, self) if has_epochs else None,
            epoch=partial(_epoch_of, self) if has_epochs else None,
        )  # fmt: skip

    # ---- between the parts of a buffer: drawing ----
    def _draw_batch(self, storage: Storage, batch_size: int) -> Draw:
        """Draws a batch, with all that is needed to read it."""
        drawn = self.sample(storage, batch_size)
        return self.as_draw(storage, drawn, partial(self._draw_batch, storage), batch_size)

    def as_draw(
        self, storage: Storage, drawn: tuple[Index, dict[Any, Any]], draw: Callable[[int], Draw], batch_size: int
    ) -> Draw:
        """What `sample` returned for this batch size, with all that is needed to read it; `draw` draws others."""
        index, info = drawn
        slots = index if type(index) is Tensor else to_slots(index, storage.env_shape, storage.max_size or 0)
        return Draw(index, slots, info, type(user_object(self)).__name__, draw)

    def _split_among_workers(self, share: WorkerShare) -> None:
        """Called in a worker process of a data loader, which draws with a copy of this sampler.

        Each worker draws by itself; where a sampler has epochs, gives its part of them.

        Raises:
            RuntimeError: it cannot be told apart from the copies of the other workers.
        """
        self._check_sending()

    def _draw_seed(self, storage: Storage, lanes: Lanes) -> Tensor:
        """int64 [1] from the generator; the same tensor at every call. `lanes` are the storage's.

        Raises RuntimeError for an empty storage, before anything is drawn.
        """
        if not (len(lanes) or has_rows(storage, lanes)):
            raise RuntimeError(f"{EMPTY} Add or extend it first.")
        generator, seed = self._generator, self._seed
        if isinstance(generator, Generator):
            generator.write_seed(seed)
        else:
            with drawing:
                seed = seed.random_(generator=generator)
        return seed.fill_(_native.seed_of_rank(int(seed), self._rank)) if self._rank else seed

    def _config(self) -> dict[str, Any]:
        """Settings that decide which rows are drawn. They are saved, and a state is only loaded where they are the
        same; those that say in which form rows are handed out are the constructor's alone.
        """
        return self.storage_state.settings()

    def _complete_copy(self) -> None:
        Sampler.__init__(self)
        if self._of_earlier_pickle is not None:
            self._of_earlier_pickle(vars(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def refuse_several_epochs(sampler: Sampler, share: WorkerShare) -> None:
    """RuntimeError where each of several workers would draw the whole epochs of its copy of this sampler."""
    if share.workers > 1:
        raise RuntimeError(
            f"every worker of this data loader would give all of the epochs of a {type(sampler).__name__}; use "
            "num_workers=1, or a SamplerWithoutReplacement, of whose epochs each worker gives a part"
        )


def _rows_of_batch(n: int) -> int:
    return n


def _ran_out(sampler: Sampler) -> bool:
    return sampler.ran_out


def _epoch_of(sampler: Sampler) -> EpochName:
    state = sampler.storage_state
    return state.origin(), state.number or 0


def _cursor(sampler: Sampler) -> Any:
    """As `DrawPlan.cursor`."""
    state = sampler.storage_state
    # Which may hold tensors that draws change in place.
    return copy.deepcopy(sampler.state_dict()) if state is _NOTHING else (state, state.cursor())


def _put_back(sampler: Sampler, cursor: Any) -> None:
    """As `DrawPlan.put_back`."""
    if sampler.storage_state is _NOTHING:
        return sampler.load_state_dict(cursor)
    state, place = cursor
    with sampler.lock:
        if state is sampler.storage_state:  # else another one was loaded since, which goes on from where it stands
            state.put_back(place)


class _SavedSampler(SavedPart):
    """A sampler that knows something of its storage, as it is saved and loaded."""

    def state(self, storage: Any) -> Any:
        self.sync(storage)
        return self.part.state_dict()

    def frozen_state(self, storage: Any) -> Any:
        self.sync(storage)
        with self.part.lock:
            return {**copy.deepcopy(dict(self._settings)), **self.part.storage_state.frozen_state()}

    def differences(self, state: Any) -> list[str]:
        different = super().differences(state)
        if not different:
            self.part.storage_state.check_saved(state)
            different = self.part.storage_state.misfits(state)
        return different

    def check(self, state: Any, storage: Any) -> None:
        if storage.initialized:
            self.part.storage_state.check(state, storage)

    def rebase(self, storage: Any) -> None:
        lanes, sampler = storage.lanes, self.part
        if storage.initialized:
            with sampler.lock:
                sampler.storage_state = sampler.storage_state.rebased(lanes.store.incarnation, lanes.shifts)

    def sync(self, storage: Any) -> None:
        if storage.initialized:
            with self.part.lock:
                self.part.storage_state.sync(storage)

    def find(self, storage: Any) -> None:
        with self.part.lock:
            self.part.storage_state.find(storage)


class _AdaptedSampler(Sampler, built_in=True):
    """A sampler of a user's own that is no `Sampler`, with what it leaves out."""

    def __init__(self, sampler: Any) -> None:
        super().__init__()
        self._own = sampler

    @property
    def _has(self) -> frozenset[str]:
        """Those of the members that a user's own sampler may leave out that it has by now."""
        return frozenset(name for name in _OPTIONAL if getattr(self._own, name, None) is not None)

    @property
    def given(self) -> Any:
        """The object that the user gave."""
        return self._own

    @property
    def saved_form(self) -> SavedPart:
        has_state = {"state_dict", "load_state_dict"} <= self._has
        return SavedOwnPart(SavedPart(self, type(self._own).__name__), self._own, has_state=has_state)

    def draw_plan(self, storage: Storage) -> DrawPlan:
        has = self._has
        plan = super().draw_plan(storage)._replace(most_rows=_unknown_rows, can_repeat="ran_out" not in has)
        return _own_plan(plan, self, storage, has)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        drawn: tuple[Index, dict[str, Any]] = self._own.sample(storage, batch_size)
        return drawn

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        own: bool | None = self._call("can_sample", storage, batch_size)
        return super().can_sample(storage, batch_size) if own is None else own

    @property
    def ran_out(self) -> bool:
        return bool(getattr(self._own, "ran_out", False))  # which it may have from its first draw on

    def use_generator(self, generator: torch.Generator | Generator | None) -> None:
        self._call("use_generator", generator)

    def check_storage(self, storage: Storage) -> None:
        self._call("check_storage", storage)

    def empty(self) -> None:
        self._call("empty")

    def add(self, index: Any) -> None:
        self._call("add", index)

    def extend(self, index: Any) -> None:
        self._call("extend", index)

    def update_priority(self, index: Any, priority: Any, **more: Any) -> None:
        self._call("update_priority", index, priority, **more)

    def mark_update(self, index: Any, **more: Any) -> None:
        self._call("mark_update", index, **more)

    def totals(self, storage: Storage, batch_size: int | None = None, **more: Any) -> DrawTotals:
        own: DrawTotals | None = self._call("totals", storage, batch_size, **more)
        return super().totals(storage, batch_size) if own is None else own

    def raise_new_priority(self, priority: float, **more: Any) -> None:
        self._call("raise_new_priority", priority, **more)

    def checked_priorities(self, priority: Any, n: int) -> Tensor:
        checked: Tensor = self._own.checked_priorities(priority, n)
        return checked

    def state_dict(self) -> dict[str, Any]:
        return self._call("state_dict") or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._call("load_state_dict", state)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method = getattr(self._own, name, None)
        return None if method is None else method(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self._own)


_OPTIONAL = (
    *("can_sample", "use_generator", "check_storage", "empty", "add", "extend", "update_priority", "mark_update"),
    *("totals", "raise_new_priority", "checked_priorities", "ran_out", "state_dict", "load_state_dict"),
)


def _unknown_rows(n: int) -> None:
    """As `DrawPlan.most_rows`."""


def user_object(sampler: Sampler) -> Any:
    """The object that the user gave: the sampler, or the one that it adapts."""
    return sampler.given if isinstance(sampler, _AdaptedSampler) else sampler


def as_sampler(sampler: Any) -> Sampler:
    """A Sampler from what a user gave.

    Raises:
        TypeError: it has no method `sample`.
    """
    if isinstance(sampler, Sampler):
        if sampler.lock is _NO_LOCK:
            Sampler.__init__(sampler)
        return sampler
    if isinstance(sampler, type) or not callable(getattr(sampler, "sample", None)):
        kind = sampler.__name__ if isinstance(sampler, type) else f"a {type(sampler).__name__}"
        raise TypeError(f"a sampler is an object with sample(storage, batch_size) -> (index, info), got {kind}")
    return _AdaptedSampler(sampler)


def plan_of(sampler: Sampler, storage: Storage) -> DrawPlan:
    """How a sampler draws from a storage, which may be a child of a user's own: what it returns is checked."""
    plan = sampler.draw_plan(storage)
    return plan if type(sampler) in BUILT_IN else _own_plan(plan, sampler, storage, overrides(type(sampler), Sampler))


def _own_plan(plan: DrawPlan, sampler: Sampler, storage: Storage, own: frozenset[str]) -> DrawPlan:
    """The plan of a sampler of a user's own, which has these members in place of those of `Sampler`, or beside them.

    It draws under its lock, one draw at a time; what it says of an epoch, of priorities and of rows is asked of itself.
    """
    return plan._replace(
        draw=partial(_draw_checked, sampler, storage), update=partial(_update_own, sampler),
        native=None, is_loose=None, takes_lock=False, own_info=True,
        ran_out=partial(_ran_out, sampler), takes_priorities="checked_priorities" in own,
        takes_updates="update_priority" in own, is_told="add" in own or "extend" in own,
    )  # fmt: skip


def _update_own(sampler: Sampler, index: Any, priority: Any, *, generation: Any, storage: Storage) -> None:
    # A sampler of a user's own may take no generation: it is only given where there is one.
    given = {} if generation is None else {"generation": generation}
    with sampler.lock:
        sampler.update_priority(index, priority, **given, storage=storage)


# ---- what a sampler of a user's own returns ----
def _draw_checked(sampler: Sampler, storage: Storage, batch_size: int) -> Draw:
    """The draw of a sampler of a user's own; errors as `checked_draw`."""
    drawn = sample_checked(sampler, storage, batch_size)
    return sampler.as_draw(storage, drawn, partial(_draw_checked, sampler, storage), batch_size)


def sample_checked(sampler: Sampler, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
    """What `sample` returns, in the form that the library's own samplers give it; errors as `checked_draw`."""
    return checked_draw(sampler.sample(storage, batch_size), storage, type(user_object(sampler)).__name__)


def checked_draw(drawn: Any, storage: Storage, kind: str) -> tuple[Index, dict[str, Any]]:
    """Index and info that a sampler of this kind returned, as int64 [n] (with ndim=2 a tuple of such) and a dict.

    Both have memory of their own: a sampler may go on with its tensors while the batch is read.

    Raises:
        TypeError: it returned no pair of an index and a dict.
        RuntimeError: nothing was ever written to the storage.
        IndexError: the index is not one of integers, has another shape, or names slots that the storage does not have.
    """
    if not isinstance(drawn, tuple | list) or len(drawn) != 2 or not isinstance(drawn[1], dict):
        raise TypeError(
            f"{kind}.sample must return (index, info): integers [n] and a dict, which may be empty; it returned "
            f"{_shown(drawn)}"
        )
    lanes = storage.lanes
    if not storage.initialized:
        raise RuntimeError(f"{EMPTY} Add or extend it first.")
    sizes = (lanes.capacity // lanes.envs, *storage.env_shape)
    parts = _parts(drawn[0], len(sizes), f"{kind}.sample")
    for part, size, name in zip(parts, sizes, ("slot", *["environment"] * len(storage.env_shape)), strict=True):
        outside = part[(part < 0) | (part >= size)]
        if len(outside):
            raise IndexError(f"{kind}.sample returned the {name} {int(outside[0])}; there are 0 to {size - 1}")
    return (parts[0] if len(parts) == 1 else tuple(parts)), _copied(drawn[1])


def _parts(index: Any, ndim: int, who: str) -> list[Tensor]:
    """The `ndim` parts of an index, int64 [n] each."""
    allowed = "int64 [n]" if ndim == 1 else f"a tuple of {ndim} int64 [n], or int64 [n, {ndim}]"
    given = [index]
    if isinstance(index, tuple) or (ndim > 1 and isinstance(index, list) and _are_arrays(index)):
        given = list(index)
    found = [_integers(one, who, allowed) for one in given]
    if len(found) == 1 and found[0].ndim == 2 and found[0].shape[1] == ndim:
        found = list(found[0].unbind(1))
    shapes = {tuple(part.shape) for part in found}
    if len(found) != ndim or len(shapes) != 1 or found[0].ndim != 1:
        shown = [list(part.shape) for part in found]
        raise IndexError(
            f"{who} returned an index of shape {shown[0] if len(shown) == 1 else shown}; it must be {allowed}"
            + ("" if ndim == 1 else ", as storage.from_slots(slots) gives it")
        )
    return [part.clone(memory_format=torch.contiguous_format) for part in found]


def _integers(part: Any, who: str, allowed: str) -> Tensor:
    if not isinstance(part, Tensor | np.ndarray | list | range | np.generic | int):
        raise IndexError(f"{who} returned an index that is a {type(part).__name__}; it must be {allowed}")
    try:
        value = tensor_of(part)
    except IndexError as error:
        raise IndexError(f"{who} returned an index that is none: {error}") from None
    if value.dtype == torch.bool:
        raise IndexError(f"{who} returned a mask, bool {list(value.shape)}; mask.nonzero() has its slots")
    if value.is_floating_point() or value.is_complex() or value.is_quantized:
        raise IndexError(
            f"{who} returned an index of {value.dtype}; slots are integers, as torch.randint(len(storage), (n,)) draws "
            "them"
        )
    if value.layout is not torch.strided or value.is_meta:
        raise IndexError(f"{who} returned an index without plain memory ({value.layout}, {value.device})")
    return value.detach().to("cpu", torch.int64).as_subclass(Tensor)


def _are_arrays(parts: list[Any]) -> bool:
    return all(isinstance(part, Tensor | np.ndarray) and part.ndim for part in parts)


def _copied(info: dict[str, Any]) -> dict[str, Any]:
    """The info with its tensors and arrays copied; one that knows more than its entries stays the same object."""
    fresh = {key: _copy(value) for key, value in dict.items(info)}
    if type(info) is dict:
        return fresh
    dict.update(info, fresh)
    return info


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {[type(one).__name__ for one in value[:4]]}"
    return f"a {type(value).__name__}"


# ---- states ----
def stored_rows(storage: Storage) -> int:
    """How many rows there are, of all environments."""
    return storage.lanes.store.rows()


def has_rows(storage: Storage, lanes: Lanes) -> bool:
    """Whether rows are stored in these lanes, the storage's; where a load is replacing them, at its end."""
    return lanes.any_rows() or (storage.initialized and len(storage) > 0)


def rows_left(storage: Storage) -> int:
    """How many of the stored rows were not removed."""
    store = storage.lanes.store
    return max(0, store.rows() - store.removed_rows)


def nothing_left(storage: Storage) -> RuntimeError:
    """The error of a draw where no row is stored, or all were removed."""
    lanes = storage.lanes
    if lanes.all_removed:
        return RuntimeError(f"all {lanes.store.rows()} stored rows were removed; add or extend it first")
    return RuntimeError(f"{EMPTY} Add or extend it first.")


def _renew_lock(sampler: Sampler) -> None:
    sampler.lock = threading.RLock()  # a thread of the parent may hold the old one


_live: weakref.WeakSet[Sampler] = fork_registry(_renew_lock)
