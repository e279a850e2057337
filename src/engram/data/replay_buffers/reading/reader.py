"""How buffers and ensembles read batches: draw, read, draw again what was overwritten meanwhile, collate, transform."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

import engram._native as _native
from engram._system import free_memory, human_bytes
from engram.data.replay_buffers.reading.joining import (
    joint_rows,
    joint_transform,
    put_index,
    stack_batches,
    transform_parts,
)
from engram.data.replay_buffers.reading.reuse import PREVENT_REUSE, may_reuse, why_not_reusable
from engram.data.replay_buffers.samplers.base import Sampler, plan_of
from engram.data.replay_buffers.samplers.draw import Draw, EpochName, is_per_row
from engram.data.replay_buffers.samplers.ensemble import SamplerEnsemble, choose_checked, ids_of, joined
from engram.data.replay_buffers.samplers.runs import mark
from engram.data.replay_buffers.storages.base import Storage
from engram.data.replay_buffers.storages.tensor import TableStorage
from engram.errors import OutOfMemoryError
from engram.pytree import (
    KeyPath,
    as_arrays,
    as_leaf,
    clone,
    collate_items,
    get_entry,
    has_keys,
    is_tensorclass,
    no_array_error,
    pinned,
    set_per_item,
)
from engram.store.packed_rows import PackedRows
from engram.transforms.compose import Compose

_ROUNDS = 8  # of drawing again whole batches; then row by row
_DRAWN_BYTES = 64  # that a draw takes for a row: its slot, its slice, its weight
MANY_ROWS = 1 << 20  # smaller batches are tried without a look at what memory is free
BEYOND_MEMORY = 1 << 46  # rows


class EpochOverError(Exception):
    """All that was left of a loop's epoch was overwritten, or drawn by others: there is no further batch."""


#: The epoch of each member of those that were drawn from; None: its sampler has none, or rows of any will do.
DrawnEpochs = dict[int, EpochName | None]
#: Those that a loop is in; None: it has drawn no batch yet.
LoopEpochs = DrawnEpochs | None


def epochs_of(draws: Sequence[Draw]) -> DrawnEpochs:
    """The epoch in which each drawn member was before this batch, unless that began one."""
    return {draw.member: draw.epoch for draw in reversed(draws)}


def check_epochs(loop: LoopEpochs, drawn: DrawnEpochs) -> None:
    """EpochOverError where a batch of these epochs is of one that followed a loop's."""
    for member, name in drawn.items():
        before = (loop or {}).get(member)
        if name is not None and before is not None and name != before and name[0] == before[0]:
            raise EpochOverError


class PreparedRows(NamedTuple):
    """A batch that was drawn, and whose rows threads are copying."""

    rows: _native.PreparedBatch
    incarnations: list[int]  # of the storages when it was drawn
    joint: Compose | None  # the members' transforms, which are applied to all rows at once
    transforms: bool  # whether it goes through transforms when its rows are copied


class Member:
    """A table that batches are read from: a buffer has one, an ensemble one of each of its members.

    Args:
        transform: what its rows go through before those of other members join them; None: nothing.
        collate_fn: makes a batch of a list of rows; None: they are read as a batch.
        attach: from a batch's index and info, entries to add at its root; None for none.
        with_generation: where entries are added, also add each row's sequence.
    """

    def __init__(
        self,
        storage: Storage,
        sampler: Sampler,
        transform: Compose | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        attach: Callable[[Any, dict[str, Any]], dict[str, Any] | None] | None = None,
        *,
        with_generation: bool = False,
    ) -> None:
        self.storage = storage
        self.sampler = sampler
        self.transform = Compose() if transform is None else transform
        self.collate_fn = collate_fn
        self.with_generation = with_generation
        self.plan = plan = plan_of(sampler, storage)
        #: Whether batches get the entries that a sampler of a user's own has for each row in its info.
        self.attaches_info = attach is not None and plan.own_info
        self.attach = partial(_attach_per_row, attach) if attach is not None and plan.own_info else attach
        self.draws = 0  # so far: who undoes one must know that it was the last
        self._draws_plainly = plan.takes_lock and not storage.read_only
        self._items = storage.access.item_reader
        self._stacks_items = collate_fn is collate_items

    def transformed(self, batch: Any) -> Any:
        """A batch of its rows after its transform."""
        return self.transform.read(batch, int(self.is_loose)) if self.transform.transforms else batch

    @property
    def is_loose(self) -> bool:
        """Whether the rows of a batch do not follow each other in time."""
        return self.plan.is_loose is not None and self.plan.is_loose()

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a batch, with its index and info; of lists on average."""
        return _DRAWN_BYTES + self.storage.access.table.rows.row_bytes

    def entries(self, index: Any, info: dict[str, Any]) -> dict[str, Any]:
        """What batches get at their root."""
        return {} if self.attach is None else self.attach(index, info) or {}

    def native_draw(self) -> _native.RowDraw | None:
        """What draws the rows of a batch in the native call that makes it; None where a batch takes more than that.

        A table, which is made later, says by `native` whether the call can read it.
        """
        storage, plan = self.storage, self.plan
        reads_plainly = storage.ndim == 1 and isinstance(storage, TableStorage) and self.collate_fn is None
        entries_are_ours = self.attach is None or self.attach is index_and_weight
        if not (reads_plainly and entries_are_ours):
            return None
        draw = plan.native
        # Where only the store's counters are asked, another process may be replacing what else would be read.
        return None if draw is None or (storage.read_only and not draw.asks_counters_only) else draw

    # ---- drawing ----
    def _is_over(self) -> bool:
        """Whether the epoch of the last draw is over."""
        return self.plan.ran_out is not None and self.plan.ran_out()

    def draw(self, n: int) -> Draw:
        """Draws n rows. Somebody else may empty or replace the rows: the read finds out which exist."""
        storage, sampler = self.storage, self.sampler
        if self._draws_plainly:
            self.draws += 1
            incarnation = storage.access.incarnation
            plain = self.plan.draw(n)
            plain.incarnation = incarnation
            return plain
        with sampler.lock:  # samplers have state: one draw at a time
            self.draws += 1
            incarnation = storage.access.incarnation  # before the draw: a load that comes in between makes us draw anew
            draw: Draw
            if storage.read_only:
                draw = storage.access.validated(lambda: self.plan.draw(n), errors_only=not self.plan.can_repeat)
            else:
                draw = self.plan.draw(n)
            draw.last, draw.incarnation = self._is_over(), incarnation
            if self.plan.epoch is not None:
                draw.epoch = self.plan.epoch()
        return draw

    def draw_exactly(self, n: int) -> Draw:
        """Draws n rows, over the end of an epoch if need be: members of an ensemble give equal parts of a batch."""
        sampler = self.sampler
        with sampler.lock:
            draw = self.draw(n)
            draw.rest = None  # a row that is lost is replaced, by one of the next epoch if need be
            while not draw.info and len(draw.slots) < n:
                more = self.draw(n - len(draw.slots))
                if not len(more.slots):
                    raise RuntimeError(
                        f"{sampler!r} drew {len(draw.slots)} rows of the {n} that each member gives to a batch, and "
                        "then none; a sampler without rows to draw raises a RuntimeError, others draw some"
                    )
                draw.last = draw.last or more.last
                draw.append(more)
        return draw

    # ---- reading what was drawn ----
    def read(self, draw: Draw, generations: bool) -> tuple[Any, dict[str, Any]] | None:
        """The rows of a draw as a batch, and its info; None: all rows of the storage were replaced by others since, or
        all of a draw of an epoch, which is to be undone.
        """
        attach, index, info = self.attach, draw.index, draw.info
        extra = None if attach is None else attach(index, info)
        read = self._read_rows(draw, extra, generations, self._stacks_items)
        if read is None:
            return None
        batch, lost, _, generation = read
        if draw.taken is not None:
            draw.taken(not lost)
        elif lost:
            again = self._read_again(draw, lost, generations)
            if again is None:
                return None
            draw, batch, generation = again
            index, info = draw.index, draw.info
            extra = None if attach is None else attach(index, info)
            if self._items is None:  # items get them when they are one batch
                for key, value in (extra or {}).items():
                    set_per_item(batch, key, value)
        collate = self.collate_fn
        if collate is not None and type(batch) is list:
            batch, collate = self._collate_items(collate, batch, extra), None
        if draw.runs is not None:
            info.update(mark(batch, draw.marks, draw.runs, draw.flags))
        if collate is not None and self._items is None:  # items are a batch by now, with these entries
            batch = collate(batch)
        if generation is not None and self.with_generation:
            info["index_generation"] = generation
            if extra is not None:
                put_generation(batch, generation)
        if self.attaches_info:
            # Of slices that the library drew, batches have what is marked in them; the rest is of a child's own.
            own = info if draw.runs is None else {key: value for key, value in info.items() if key != "slice_id"}
            put_info(batch, own, len(index[0] if isinstance(index, tuple) else index))
        info["index"] = index
        if generation is not None:
            info["generation"] = generation
        return batch, info

    def _read_rows(
        self, draw: Draw, extra: dict[str, Any] | None, generations: bool, collated: bool
    ) -> tuple[Any, list[int] | None, list[int] | None, Tensor | None] | None:
        """Rows, the positions of those that do not exist any more or do not yet, of the latter alone, and generations.

        None: all rows of the storage have been replaced by others since they were drawn.
        """
        storage = self.storage
        removed = self.removed(draw.slots)  # before the read: the bit of a row goes when another one takes its place
        # Positional: the hot path.
        items = self._items
        if items is None:
            batch, overwritten, absent, generation = storage.read(draw.slots, None, extra, generations)
        elif collated:
            batch, overwritten, absent, generation = items.read_batch(draw.slots, extra, generations)
        else:
            batch, overwritten, absent, generation = items.read_own(draw.slots, generations, may_reuse())
        if storage.access.incarnation != draw.incarnation:
            return None
        is_whole = overwritten is None and absent is None and draw.seen is None
        lost = None if is_whole else draw.lost(overwritten, absent)
        if removed:  # whatever a sampler draws, no batch has a removed row
            lost = sorted({*(lost or ()), *removed})
        return batch, lost, absent, generation

    def removed(self, slots: Tensor) -> list[int] | None:
        """The positions of rows that were removed; None: there are none."""
        store = self.storage.lanes.store
        return store.removed(slots) if store.removals else None

    def _read_again(self, draw: Draw, lost: list[int], generations: bool) -> tuple[Draw, Any, Tensor | None] | None:
        """Draw, batch and generations with other rows at the positions whose rows do not exist any more.

        None: as `read`.
        """
        storage, sampler, incarnation = self.storage, self.sampler, draw.incarnation
        for attempt in range(1000):
            # After some rounds one row at a time: a whole batch may be too slow for writers of a small ring.
            with sampler.lock:
                if storage.access.incarnation != incarnation:
                    return None
                if draw.epoch is not None and len(lost) >= len(draw.slots):
                    return None
                self.draws += 1
                for part in [lost] if attempt < _ROUNDS else [[i] for i in reversed(lost)]:
                    anew, last = draw.rest is not None and len(part) >= len(draw.slots), draw.last
                    draw = draw.redraw(part)
                    draw.last = last or (anew and self._is_over())  # the rows are those of another draw
            draw.incarnation = incarnation
            read = self._read_rows(draw, None, generations, False)
            if read is None:
                return None
            batch, now_lost, absent, generation = read
            if now_lost:
                lost = now_lost
            else:
                draw.index = storage.from_slots(draw.slots)
                return draw, batch, generation
        if absent is not None:
            raise IndexError(
                f"{draw.kind}.sample returns slot {int(draw.slots[absent[0]])}, which holds no row; {len(storage)} "
                "are stored"
            )
        if bool((removed := storage.is_removed(draw.index)).any()):
            raise RuntimeError(
                f"{draw.kind}.sample goes on drawing rows that were removed, such as slot "
                f"{int(draw.slots[removed][0])}; `storage.is_removed(index)` says which were"
            )
        raise RuntimeError("writers overwrite the rows of this batch faster than they can be read; sample fewer")

    def _collate_items(self, collate: Callable[[Any], Any], items: list[Any], extra: dict[str, Any] | None) -> Any:
        if self._items is None and not self._stacks_items:
            items = [clone(item) for item in items]  # which a collate function of the user's own may change
        batch = collate(items)
        if isinstance(batch, TensorDictBase | dict):
            for key, value in (extra or {}).items():
                set_per_item(batch, key, value)
        return batch


class BatchReader:
    """Turns draws into batches: of one table `[rows]`, of several `[members, rows]`. Any number of threads may use it.

    Args:
        transform: what whole batches go through.
        chooser: draws the members of each batch, which give equal parts of it; None: there is one table.
        chooses_natively: whether native code may ask the chooser, as what it says needs no check.
        collate_fn: makes a batch of the list of the members' batches; they are stacked if None.
        reuse: batches may be read into tensors of earlier ones that nobody has any more.
    """

    def __init__(
        self,
        members: Sequence[Member],
        transform: Compose,
        *,
        chooser: SamplerEnsemble | None = None,
        chooses_natively: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        reuse: bool = False,
    ) -> None:
        self.members = members
        self.sampler: Sampler = members[0].sampler if chooser is None else chooser
        self.transform = transform
        self.pin_memory = pin_memory
        self.collate_fn: Any = members[0].collate_fn if chooser is None else collate_fn
        self._storage = members[0].storage
        self._chooser = chooser
        self._chooses_natively = chooses_natively
        self._has_epochs = any(member.plan.epoch is not None for member in members)
        # The one table, where a batch is what it gives: nothing is noted of a draw, or done with the batch.
        plain = chooser is None and not self._has_epochs and not pin_memory
        self._plain = members[0] if plain else None
        self._joined = () if chooser is None else members  # each through its own transform before
        self._attaches = all(member.attach is not None for member in members)
        # Whether rows of all members can go straight into one batch.
        alike = all((member.attach is None) == (members[0].attach is None) for member in members)
        plainly = all(member.collate_fn is None and not member.attaches_info for member in members)
        self._reads_at_once = chooser is not None and alike and plainly and collate_fn is None
        if any(member.with_generation for member in members):  # then batches have it, whichever members they are of
            for member in members:
                member.with_generation = True
        self._maker = maker = self._native_maker(PREVENT_REUSE if reuse and why_not_reusable() is None else None)
        # Nothing that has this reader, which would be a cycle.
        self.make = None if maker is None or self._has_epochs or chooser is not None else maker.sample
        #: The members' sources when they were last looked at, and the same where rows of all go into one batch.
        self._joint_sources: tuple[list[Any], list[Any] | None] = [], None

    def _native_maker(self, reuse: Any) -> _native.BatchMaker | None:
        """What makes whole batches in one native call; None where a batch takes more than that.

        This is the one place where it is decided: when the parts are put together, and by what they are. Transforms are
        applied to what comes out.
        """
        if self.pin_memory or not (self._chooser is None or (self._reads_at_once and self._chooses_natively)):
            return None
        draws = []
        for member in self.members:
            draw = member.native_draw()
            if draw is None or not (self._chooser is None or draw.joins):
                return None
            draws.append((draw, member.sampler))
        index, weight = ("index", "index"), ("priority_weight", "weight")
        entries = [index, weight] if self._attaches else []
        forms: list[list[tuple[str | None, Any]]] = [[*entries]]
        if self._chooser is not None:
            group = ("index", [index, ("buffer_ids", "member")])
            # The second is that of batches which the members' transforms still have to change.
            forms = [[*entries[1:], group], [*entries, (None, "index"), (None, "member")]]
        maker = _native.BatchMaker(draws, self._chooser, forms, reuse)
        return maker if maker.is_made_here else None

    @property
    def lock(self) -> Any:
        """Held by whoever draws or changes the sampler."""
        return self.sampler.lock

    def check_room(self, n: int) -> None:
        """OutOfMemoryError where a batch of n rows cannot be held, before anything is drawn."""
        rows = self.members[0].plan.most_rows(n) if self._chooser is None and n < BEYOND_MEMORY else n
        if rows is not None:
            refuse_if_too_many(rows, max(member.row_bytes for member in self.members), n)

    # ---- whole batches ----
    def batch(self, n: int, only_native: bool = False, epochs: LoopEpochs = None) -> Any:
        """A batch of n as `sample` gives it, without its info and generations; where it can be, in one call.

        With `only_native` None where it cannot be, or would not be of these epochs.
        """
        if self._maker is not None:
            sources = self._sources() if self._joined else self._storage.native.source
            if sources is not None:
                make = self.make
                if make is None or self.transform.transforms:
                    batch = self._make(sources, n, False, epochs)
                else:
                    batch = make(sources, n)
                if batch is not None:
                    return batch
        return None if only_native else self.sample(n, generations=False)[0]

    def arrays(self, n: int) -> Any:
        """A batch of n as `sample` gives it, with dicts for TensorDicts and arrays for tensors.

        Raises:
            TypeError: an entry has a dtype that numpy does not have; nothing is drawn where no transform may cast it.
        """
        if not self._transforms():
            self._refuse_dtypes_without_array()
            if self._maker is not None and (sources := self._sources()) is not None:
                batch = self.make(sources, n, True) if self.make else self._make(sources, n, True)
                if batch is not None:
                    return batch
        return as_arrays(self.batch(n))

    def _refuse_dtypes_without_array(self) -> None:
        for member in self.members:
            layout = member.storage.layout if member.collate_fn is None and self.collate_fn is None else None
            for leaf in () if layout is None else layout.leaves:
                if leaf.dtype is torch.bfloat16:
                    raise no_array_error(leaf.path)

    def _sources(self) -> Any:
        """What the native call reads rows from; None: it cannot."""
        if self._chooser is None:
            return self._storage.native.source
        sources = [member.storage.native.source for member in self.members]
        before, joint = self._joint_sources
        if sources != before:
            joint = sources if None not in sources and self._joint_rows(self.members) is not None else None
            self._joint_sources = sources, joint
        return joint

    @staticmethod
    def _joint_rows(members: Sequence[Member]) -> list[PackedRows] | None:
        return joint_rows([member.storage for member in members])

    def _transforms(self) -> bool:
        """Whether there are any transforms, of members or of whole batches."""
        return bool(self.transform.transforms) or any(member.transform.transforms for member in self._joined)

    def _joint_transform(self, members: Sequence[Member]) -> Compose | None:
        """What may be applied to the rows of these members at once; None: each one's part is changed by itself."""
        return joint_transform(members[0].storage, [member.transform for member in members])

    def incarnations(self) -> list[int]:
        """Of the storages: what is another number after all rows were replaced."""
        return [member.storage.access.incarnation for member in self.members]

    def _make(self, sources: Any, n: int, as_numpy: bool = False, epochs: LoopEpochs = None) -> Any:
        """A batch in one native call and the transforms; None: it takes more than that.

        Then epochs go on with the same rows, and so they do where there is no memory for the batch or for what
        transforms make of it.
        """
        assert self._maker is not None
        joint, incarnations, before, batch = None, None, None, None
        if self._joined and any(member.transform.transforms for member in self._joined):
            joint = self._joint_transform(self._joined)
            if joint is None:
                return None
        if joint is not None or self.transform.transforms:
            incarnations = self.incarnations()
        try:
            if not self._has_epochs:
                batch = (self.make or self._maker.sample)(sources, n, as_numpy, 0 if joint is None else 1)
            else:
                member = self.members[0]  # those of several do not join
                # Held until the rows are copied: nobody draws the rows behind those that are to be drawn again.
                with member.sampler.lock:
                    if epochs is not None and epochs != self.epochs():
                        return None
                    member.draws = draws = member.draws + 1
                    before = draws, [member.plan.cursor()]
                    try:
                        batch = self._maker.sample(sources, n, as_numpy)
                    finally:
                        if batch is None:
                            self._undo_draw(before)
            if batch is None or incarnations is None:
                return batch
            batch = self._change(batch, joint)
        except MemoryError:
            self._undo_draw(before)
            raise
        return batch if self.incarnations() == incarnations else None  # else transforms may have learnt of other rows

    def _change(self, batch: Any, joint: Compose | None) -> Any:
        """A batch of the native call after all transforms, with `joint` for all members."""
        if joint is not None:
            batch, index, ids = batch
            batch = joint.forward(batch)
            put_index(batch, index, ids)
        return self._transformed(batch) if self.transform.transforms else batch

    def _transformed(self, batch: Any) -> Any:
        """A whole batch after the transform."""
        loose = any(member.is_loose for member in self.members)
        return self.transform.read(batch, 0 if not loose else 1 if self._chooser is None else 2)

    def sample(self, n: int, generations: bool) -> tuple[Any, dict[str, Any]]:
        """A batch of n and its info."""
        member = self._plain
        if member is None or self.transform.transforms:
            return self._draw_and_read(n, generations)[0]
        batch_and_info = None
        while batch_and_info is None:
            batch_and_info = member.read(member.draw(n), generations)
        return batch_and_info

    def next(self, n: int, generations: bool, epochs: LoopEpochs = None) -> tuple[Any, bool, LoopEpochs]:
        """A loop's next batch of n, whether it is the last of its epoch, and the epochs that the loop is in now.

        Args:
            epochs: those that it was in after its last batch; None: this is its first.

        Raises:
            EpochOverError: its epoch is over, as all that was left of it was overwritten.
        """
        now = self.epochs() if epochs is None and self._has_epochs and self._chooser is None else epochs
        batch = None if generations else self.batch(n, True, now)
        if batch is not None:  # the native call leaves the last of an epoch to the sampler, and begins none
            return batch, False, now
        (batch, _), last, drawn = self._draw_and_read(n, generations, epochs)
        return batch, last, {**(epochs or {}), **drawn}

    def epochs(self) -> DrawnEpochs:
        """The epoch of each member's last draw."""
        return {i: None if member.plan.epoch is None else member.plan.epoch() for i, member in enumerate(self.members)}

    def are_set_anew(self, drawn: DrawnEpochs) -> bool:
        """Whether a sampler was set anew since it drew in one of these epochs."""
        now = self.epochs() if self._has_epochs else {}
        return any(name is not None and (now[member] or name)[0] != name[0] for member, name in drawn.items())

    # ---- whole batches ahead, for `Prefetcher` ----
    @property
    def copies_only(self) -> bool:
        """Whether batches of which no details are wanted come from `prepare`, and `finish` takes no time."""
        return self._maker is not None and not self._transforms()

    def prepare(self, n: int, threads: _native.CopyThreads) -> PreparedRows | None:
        """A batch whose rows these threads copy from now on, for `finish`; None where `draw` and `read` must be used.

        The caller holds the lock, and puts the sampler back where this is None or an error.
        """
        if self._maker is None or (sources := self._sources()) is None:
            return None
        joint, transforms = None, self._transforms()
        if any(member.transform.transforms for member in self._joined):
            joint = self._joint_transform(self._joined)
            if joint is None:
                return None
        self.members[0].draws += 1
        incarnations = self.incarnations()
        rows = self._maker.prepare(sources, n, threads, 0 if joint is None else 1)
        return None if rows is None else PreparedRows(rows, incarnations, joint, transforms)

    def finish(self, batch: Any, prepared: PreparedRows) -> Any:
        """The batch as it is handed out; None: all rows have been replaced by others since it was drawn."""
        batch = self._change(batch, prepared.joint)
        return batch if self.incarnations() == prepared.incarnations else None

    # ---- step by step: this says what a batch is ----
    def draw(self, n: int) -> list[Draw]:
        """Draws n rows of one table, or members, and rows of each."""
        if self._chooser is None:
            return [self.members[0].draw(n)]
        with self.lock:
            ids, rows = choose_checked(self._chooser, n)
            draws = [self.members[i].draw_exactly(rows) for i in ids]
        for i, draw in zip(ids, draws, strict=True):
            draw.member = i
        return draws

    def _draw_and_read(
        self, n: int, generations: bool, epochs: LoopEpochs = None
    ) -> tuple[tuple[Any, dict[str, Any]], bool, DrawnEpochs]:
        """A batch and its info, whether it is the last of an epoch, which goes on with the same rows where there is no
        memory for it, and the epochs that it is of. EpochOverError: as `next`.
        """
        for attempt in itertools.count():
            before = None
            try:
                if not self._has_epochs:
                    draws = self.draw(n)
                elif self._chooser is None:
                    [member] = self.members
                    with member.sampler.lock:
                        before = member.draws + 1, [member.plan.cursor()]
                        draws = self._draw_in(epochs, before[1], n)
                else:
                    with self.lock:
                        cursors = self.cursor()
                        try:
                            draws = self._draw_in(epochs, cursors, n)
                        finally:
                            before = self._draws(), cursors
                drawn = epochs_of(draws) if self._has_epochs else {}
                if attempt >= _ROUNDS:  # writers overwrite whole batches: rows of any epoch will do
                    for draw in draws:
                        draw.epoch = None
                batch_and_info = self.read(draws, generations)
            except MemoryError:
                self._undo_draw(before)
                raise
            if batch_and_info is not None:
                last = draws[0].last if self._chooser is None else any(draw.last for draw in draws)
                return batch_and_info, last, drawn
            self._undo_draw(before)  # members whose rows are still there give the same again
        raise AssertionError

    def _draw_in(self, epochs: LoopEpochs, cursors: list[Any], n: int) -> list[Draw]:
        """As `draw`, for a loop that is in these epochs: where they are over, the samplers stay where they were."""
        draws = self.draw(n)
        try:
            check_epochs(epochs, epochs_of(draws))
        except EpochOverError:
            self.put_back(cursors)
            raise
        return draws

    def cursor(self) -> list[Any]:
        """What a draw changes in the members' samplers, for `put_back`. The caller holds the lock."""
        cursors = []
        for member in self.members:
            with member.sampler.lock:
                cursors.append(member.plan.cursor())
        return cursors

    def put_back(self, cursors: list[Any]) -> None:
        """Puts the members' samplers back to where they stood at a cursor, to draw the same again."""
        for member, cursor in zip(self.members, cursors, strict=True):
            member.plan.put_back(cursor)

    def _draws(self) -> int:
        return sum([member.draws for member in self.members])

    def _undo_draw(self, before: tuple[int, Any] | None) -> None:
        """After a batch that there was no memory for: an epoch goes on with the rows that were drawn for it.

        Unless another thread has drawn meanwhile: then they are left out.
        """
        if before is not None:
            with self.lock:
                if self._draws() == before[0]:
                    self.put_back(before[1])

    def read(self, draws: list[Draw], generations: bool) -> tuple[Any, dict[str, Any]] | None:
        """The batch of what was drawn, and its info; None: all rows of a storage were replaced by others since then."""
        if self._chooser is None:
            batch_and_info = self.members[0].read(draws[0], generations)
            if not (self.transform.transforms or self.pin_memory):
                return batch_and_info
        else:
            batch_and_info = self._read_at_once(draws, generations) or self._read_one_by_one(draws, generations)
        if batch_and_info is None:
            return None
        batch, info = batch_and_info
        if self.transform.transforms:
            batch = self._transformed(batch)
        # What transforms have learnt may be that of other rows, and so may a part be that was read before another one.
        if any(self.members[draw.member].storage.access.incarnation != draw.incarnation for draw in draws):
            return None
        return (pinned(batch) if self.pin_memory else batch), info

    def _read_at_once(self, draws: list[Draw], generations: bool) -> tuple[Any, dict[str, Any]] | None:
        """Reads the rows of all members straight into one batch; None where it takes more than that."""
        if not self._reads_at_once or any(draw.runs is not None for draw in draws):
            return None
        members = [self.members[draw.member] for draw in draws]
        index_and_ids = _native.joint_index([draw.index for draw in draws], [draw.member for draw in draws])
        if index_and_ids is None:
            return None
        index, buffer_ids = index_and_ids
        info = joined([draw.info for draw in draws])
        extra = members[0].entries(index, info) if self._attaches else {}
        rows = self._joint_rows(members)
        if rows is None or any(member.removed(draw.slots) for member, draw in zip(members, draws, strict=True)):
            return None  # each member draws anew what was removed
        shape = tuple(index.shape)
        entries_of_parts: list[Any] | None = None
        joint = None
        if any(member.transform.transforms for member in members):
            joint = self._joint_transform(members)
            if joint is None:
                entries_of_parts = [
                    member.entries(draw.index, draw.info) or None for member, draw in zip(members, draws, strict=True)
                ]
        if joint is None:
            extra.pop("index", None)
        read = rows[0].read_many(rows[1:], index, shape, extra or None, generations, entries_of_parts)
        batch, generation = read.batch, read.sequences
        if read.overwritten is not None or read.absent is not None:
            return None  # rows that are gone are drawn anew by their own member
        if any(draw.lost(None, None) for draw in draws):
            return None
        parts = read.parts or []
        if generation is not None:
            info["generation"] = generation.view(shape)
            if members[0].with_generation:
                info["index_generation"] = info["generation"]
                if self._attaches:
                    put_generation(batch, info["generation"], 2)
                    for part, of_part in zip(parts, info["generation"], strict=False):
                        put_generation(part, of_part)
        info["index"], info["buffer_ids"] = index, buffer_ids
        if joint is not None:
            batch = joint.forward(batch)
        elif parts:
            batch = transform_parts(batch, parts, [member.transformed for member in members])
        put_index(batch, index, buffer_ids)
        return batch, info

    def _read_one_by_one(self, draws: list[Draw], generations: bool) -> tuple[Any, dict[str, Any]] | None:
        batches, infos = [], []
        for draw in draws:
            member = self.members[draw.member]
            batch_and_info = member.read(draw, generations)
            if batch_and_info is None:
                return None
            batch, info = batch_and_info
            batch = member.transformed(batch)
            if isinstance(info["index"], tuple):
                info["index"] = torch.stack(info["index"], -1)
            batches.append(batch)
            infos.append(info)
        info = joined(infos)
        info["buffer_ids"] = ids_of([draw.member for draw in draws], len(infos[0]["index"]))
        if self.collate_fn is not None:
            return self.collate_fn(batches), info
        batch = stack_batches(batches)
        if self._attaches or not isinstance(batch, dict):
            put_index(batch, info["index"], info["buffer_ids"])
        return batch, info


def index_and_weight(index: Any, info: dict[str, Any]) -> dict[str, Any]:
    """The entries that samples of TensorDict buffers have at their root."""
    entries: dict[str, Any] = {"index": torch.stack(index, -1) if isinstance(index, tuple) else index}
    if "priority_weight" in info:
        entries["priority_weight"] = info["priority_weight"]
    return entries


def _attach_per_row(
    attach: Callable[[Any, dict[str, Any]], dict[str, Any] | None], index: Any, info: dict[str, Any]
) -> dict[str, Any]:
    """What `attach` gives of the info of a user's own sampler, as tensors, where it has a value for each row."""
    n = len(index[0] if isinstance(index, tuple) else index)
    leaves = ((key, _per_row_leaf(value, (key,), n)) for key, value in (attach(index, info) or {}).items())
    return {key: leaf for key, leaf in leaves if leaf is not None}


def _per_row_leaf(value: Any, path: KeyPath, n: int) -> Any:
    """An entry of an info as batches of n rows hold it; None: it has no value for each row, or none of a tensor."""
    if isinstance(value, list) or not is_per_row(value, n):
        return None
    with contextlib.suppress(TypeError):
        return as_leaf(value, path)
    return None


_NOT_OF_SAMPLERS = ("index", "generation", "index_generation", "buffer_ids")  # entries that only buffers give


def put_info(batch: Any, info: dict[str, Any], n: int) -> None:
    """Puts the entries of an info that have a value for each of n rows, as tensors or arrays, into a batch with keys.

    What the batch has under the same key stays; what it cannot hold is in the info only.
    """
    if not has_keys(batch) or is_tensorclass(batch):
        return
    if isinstance(batch, TensorDictBase) and batch.batch_size[:1] != (n,):  # a collate function has made another shape
        return
    for key, value in info.items():
        path = key if isinstance(key, tuple) else (key,)
        if key in _NOT_OF_SAMPLERS or not (path and all(isinstance(part, str) for part in path)):
            continue
        leaf = _per_row_leaf(value, path, n)
        if leaf is not None and _is_free(batch, path):
            set_per_item(batch, path, leaf)


def _is_free(batch: Any, path: KeyPath) -> bool:
    """Whether an entry can be added at a path: there is none, nor one without keys on the way to it."""
    for i in range(1, len(path)):
        holder = get_entry(batch, path[:i])
        if holder is not None and (not has_keys(holder) or is_tensorclass(holder)):
            return False
    return get_entry(batch, path) is None


def put_generation(batch: Any, generation: Tensor, lead: int = 1) -> None:
    """Puts the generation `[*lead]` of each row into a batch, under both names that readers of batches know."""
    set_per_item(batch, "generation", generation, lead)
    set_per_item(batch, "index_generation", generation, lead)


def refuse_if_too_many(rows: int, row_bytes: int, batch_size: int) -> None:
    """OutOfMemoryError where so many rows, of a batch of this size, do not fit into the memory that is free."""
    free = free_memory()
    if rows >= BEYOND_MEMORY or (free is not None and rows * row_bytes > free):
        of_free = "" if free is None else f", {human_bytes(free)} are free"
        raise OutOfMemoryError(
            f"batch_size={batch_size} needs {human_bytes(rows * row_bytes)}{of_free}; sample fewer. Nothing was drawn"
        )
