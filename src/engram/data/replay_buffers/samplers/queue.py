"""A sampler that hands out each row once, oldest first."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

import engram._native as _native
from engram._checks import count_or_none, is_integer
from engram.data.replay_buffers.samplers.base import Sampler, WorkerShare
from engram.data.replay_buffers.samplers.draw import Draw, DrawnSequences, DrawPlan, Index
from engram.data.replay_buffers.storages.single_steps import read_leaves
from engram.pytree import as_path, format_key, get_entry, has_keys, to_tensor
from engram.store.flow import QueueSetting
from engram.store.positions import position_at, rows_of

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage
    from engram.store.lanes import Lanes

_MOST_DRAWS_ANEW = 100  # of one batch, whose rows writers overwrite before they are read


class QueueShortError(RuntimeError):
    """Fewer rows wait than are wanted: others took them, or overwrote them, since somebody looked."""


class _Taking(NamedTuple):
    """Rows that a thread has chosen, and has the turn to hand out.

    Attributes:
        thread: which one.
        storage, lanes: of the rows.
        n: how many rows.
        slots, sequences: of each row, int64 [n]; None: no sequences, as no row can be overwritten.
        next: of each lane, the row behind those.
        missed, stale: rows that are passed because they were overwritten, or are too old.
        incarnation: of the storage before they were chosen.
    """

    thread: int
    storage: Storage
    lanes: Lanes
    n: int
    slots: Tensor
    sequences: Tensor | None
    next: list[int]
    missed: int
    stale: int
    incarnation: int


class QueueSampler(Sampler, built_in=True):
    """Hands out each row once, oldest first: the storage is a queue, for all processes that use it.

    A storage of one lane is first in, first out; of several lanes the rows of each come in their order, and of each
    lane its share of what waits. `sample` waits for a whole batch, and `add` and `extend` for room, as rows that were
    not handed out are not overwritten (`full="wait"`). Any number of processes sample: each row goes to one. Buffers of
    the same storage with another sampler draw from all that is stored, and take nothing out.

    The store remembers that it is a queue, whoever opens it, until `rb.end_queue()`. So that no row is overwritten
    before, each process that uses it names it: one function that makes the buffer, called by all.

    `for batch in rb` ends where nobody can write any more, with the rest as a last, shorter batch: a collector in the
    background has ended, or rows are in memory of this process, which has no other thread; and no other process has
    them open.

    Args:
        max_staleness: rows that are older are passed and never handed out: those whose version, at `version_key`, is
            more than so many below `consumer_version`. What it passes is not a random part: long episodes, and those of
            slow actors, are older when they are written. None: no row is too old.
        version_key: where rows have the version of the policy that made them, as collectors with
            `track_policy_version=True` write it.
        full: "wait", or "overwrite": the oldest rows make room for new ones, and those that were not handed out count
            as `missed`.
        commit: "auto": a row is final when it is handed out. "manual": it keeps its place until `rb.commit` or
            `rb.committing` says that it is in the model's checkpoint, and `rb.seek` begins where a checkpoint ends, so
            that each row is trained once, whoever is killed when.

    Raises:
        TypeError: for storages of users' classes, and in an ensemble.
        ValueError: with `prefetch`; other users of the store know it as another queue, or it has a rate limiter.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(6), sampler=QueueSampler(), batch_size=4)
        >>> _ = rb.extend(torch.arange(6))
        >>> rb.sample(), rb.stats().waiting
        (tensor([0, 1, 2, 3]), 2)
        >>> _ = rb.extend(torch.arange(6, 10))  # there is room for them
        >>> rb.sample(), rb.can_sample()
        (tensor([4, 5, 6, 7]), False)
    """

    _copied_as: ClassVar[Mapping[str, Any]] = {
        **Sampler._copied_as, "_taking": None, "_storage": None, "_sought": (), "_version": None,
        "_positions_out": False,
    }  # fmt: skip

    def __init__(
        self,
        max_staleness: int | None = None,
        version_key: Any = ("collector", "policy_version"),
        full: str = "wait",
        commit: str = "auto",
        *,
        compilable: bool = False,
        rank: int = 0,
    ) -> None:
        super().__init__(compilable, rank=rank)
        self.max_staleness = count_or_none(max_staleness, "max_staleness", 0)
        self.version_key = version_key
        self._version_path = as_path(version_key, "version_key")
        if full not in ("wait", "overwrite"):
            raise ValueError(f'full must be "wait" or "overwrite", got {full!r}')
        if commit not in ("auto", "manual"):
            raise ValueError(f'commit must be "auto" or "manual", got {commit!r}')
        self.full, self.commit = full, commit
        self._taking: _Taking | None = None
        self._storage: Storage | None = None
        self._draws_anew = 0
        self._version: int | None = None  # that trains, as was said before there was a store
        self._sought: tuple[Any, ...] = ()  # what `seek` was told before there was a store; (): nothing
        # Whether rows can be overwritten before they are read: what is too old has to be known by its sequence, too.
        self._looks_back = full != "wait" or self.max_staleness is not None or commit == "manual"
        self._positions_out = False  # whether a position was given since the last commit

    @property
    def setting(self) -> QueueSetting:
        """What the store keeps of it."""
        return QueueSetting(self.full == "overwrite", self.commit == "manual")

    @property
    def consumer_version(self) -> int:
        """The version of the policy that trains, from which `max_staleness` counts; the store keeps it for all.

        Collectors set it with `update_policy_weights_`, where they write to a buffer of this storage.
        """
        queue = self._queue()
        return queue.consumer_version if self._version is None else self._version

    @consumer_version.setter
    def consumer_version(self, version: int) -> None:
        if not is_integer(version, 0):
            raise ValueError(f"the version of a policy is an integer of 0 or more, got {version!r:.80}")
        queue = self._queue()
        if self._storage is not None and self._storage.initialized:
            queue.consumer_version, self._version = int(version), None
        else:
            self._version = int(version)

    def _queue(self) -> _native.StoreQueue:
        if self._storage is None:
            raise RuntimeError("this QueueSampler belongs to no buffer yet, whose storage is the queue")
        return _queue_of(self._storage.lanes)

    # ---- drawing ----
    def check_storage(self, storage: Storage) -> None:
        self._storage = storage

    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """As `Sampler.sample`. In a buffer rows are handed out when they were read; else by this call, and who reads
        them has to see to it that nobody writes meanwhile. RuntimeError: fewer wait.
        """
        taking = self._own_taking()
        is_ahead = taking is not None
        if taking is None:
            if not self.take_ahead(storage, batch_size):
                waiting = _queue_of(storage.lanes).waiting
                raise QueueShortError(f"{waiting} rows wait, fewer than a batch of {batch_size}")
            taking = self._taking
            assert taking is not None
        if not is_ahead:
            self._hand_out(True)
        return (storage.from_slots(taking.slots) if storage.ndim > 1 else taking.slots), {}

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        queue = _queue_of(storage.lanes)
        if not queue.is_one or queue.waiting < batch_size:
            return False
        if self.max_staleness is None:
            return True
        try:
            return self.take_ahead(storage, batch_size)
        finally:
            self.put_off()

    def draw_plan(self, storage: Storage) -> DrawPlan:
        return super().draw_plan(storage)._replace(draw=partial(self._draw_ahead, storage), is_loose=_is_loose)

    def _draw_ahead(self, storage: Storage, n: int) -> Draw:
        """The rows that this thread has chosen."""
        taking = self._own_taking()
        if taking is None:
            return self._draw_batch(storage, n)
        if taking.incarnation != storage.access.incarnation:  # all rows were replaced by others
            self._hand_out(False)
        slots = taking.slots
        index = storage.from_slots(slots) if storage.ndim > 1 else slots
        return self._as_taken(Draw(index, slots, {}, "QueueSampler", partial(self._draw_ahead, storage)), taking)

    def as_draw(
        self, storage: Storage, drawn: tuple[Index, dict[Any, Any]], draw: Callable[[int], Draw], batch_size: int
    ) -> Draw:
        made, taking = super().as_draw(storage, drawn, draw, batch_size), self._own_taking()
        return made if taking is None else self._as_taken(made, taking)

    def _as_taken(self, draw: Draw, taking: _Taking) -> Draw:
        draw.store, draw.taken = taking.lanes.store, self._hand_out
        draw.info["position"] = tuple(taking.next)
        if taking.sequences is not None:
            draw.seen = DrawnSequences(taking.sequences)
        return draw

    @staticmethod
    def check_is_queue(storage: Storage) -> None:
        """RuntimeError where somebody has ended the queue."""
        if not _queue_of(storage.lanes).is_one:
            raise RuntimeError(
                "this storage is no queue any more, as `end_queue()` of a buffer that uses it was called: set another "
                "sampler (`rb.set_sampler(RandomSampler())`), or make the buffer anew for another queue"
            )

    def _split_among_workers(self, share: WorkerShare) -> None:
        """Each worker process takes rows of its own out of a store that it shares with the others.

        Raises:
            ValueError: with `commit="manual"`, as no position would be that of the batches that were trained.
            RuntimeError: each has a copy of the rows, and would hand out all of them.
        """
        if self.commit == "manual":
            raise ValueError(
                'a queue with commit="manual" is sampled where the model is trained: workers of a data loader are '
                "ahead of it, so that no position would be that of the model. Use num_workers=0"
            )
        storage = self._storage
        if storage is not None and storage.lanes.copied_by_fork:
            raise RuntimeError(
                "a QueueSampler in the worker processes of a data loader takes rows out of a storage that they share, "
                "and of this one each has a copy, which it would hand out again: make the storage with shared=True "
                "(LazyTensorStorage, LazyMemmapStorage) and write its first batch before the workers are there, or use "
                "num_workers=0"
            )

    # ---- positions ----
    def position(self, storage: Storage, info: dict[str, Any] | None) -> dict[str, Any]:
        """As `ReplayBuffer.position`."""
        if not (info is None or isinstance(info, dict)):
            raise TypeError(
                "position takes the info of a batch, as `batch, info = rb.sample(return_info=True)` gives it, or "
                f"nothing; got a {type(info).__name__}"
            )
        lanes = _made(storage, "position")
        with self._turn(storage, lanes):
            self._take_part(storage, lanes)
            if info is None:
                rows: list[int] = list(_queue_of(lanes).consumed)
            elif "position" in info:
                rows = info["position"]
            else:
                raise ValueError("this info is not of a batch of a queue: it has no entry 'position'")
            position = position_at(lanes, rows)
            self._positions_out = True
        storage.flush()  # else a power cut could give the numbers of these rows to others
        return position

    def commit_rows(self, storage: Storage, position: Any) -> None:
        """As `ReplayBuffer.commit`."""
        lanes = _made(storage, "commit")
        with self._turn(storage, lanes):
            rows = rows_of(lanes, position)
            self._take_part(storage, lanes)
            _queue_of(lanes).let_go(rows)
            self._positions_out = False

    def seek(self, storage: Storage, position: Any) -> int:
        """As `ReplayBuffer.seek`."""
        lanes = storage.lanes
        if not storage.initialized:
            if position is not None and not isinstance(position, dict):
                raise TypeError(
                    f"a position is a dict that rb.position() gave, or None; got a {type(position).__name__}"
                )
            self._sought = (position,)
            return 0
        with self._turn(storage, lanes):
            return self._seek(storage, lanes, position)

    def _seek(self, storage: Storage, lanes: Lanes, position: dict[str, Any] | None) -> int:
        queue = _queue_of(lanes)
        rows = [min(*at) for at in zip(queue.kept, queue.consumed, strict=True)]
        if position is not None:
            rows = rows_of(lanes, position)
        version = None if position is None else position["version"]
        gone = storage.access.table.flow.sessions.begin(lanes, rows, version)
        self._sought, self._positions_out = (), False
        return gone

    def _take_part(self, storage: Storage, lanes: Lanes) -> None:
        """Goes on where `seek` was told to before there was a store, and takes part in the session that is."""
        if self._sought:
            self._seek(storage, lanes, *self._sought)
        if self._version is not None:
            _queue_of(lanes).consumer_version, self._version = self._version, None
        storage.access.table.flow.sessions.check(lanes, joins=self.commit == "manual")

    @contextlib.contextmanager
    def _turn(self, storage: Storage, lanes: Lanes) -> Iterator[None]:
        """A block in which nobody else takes rows, or changes what comes next."""
        lanes.use()
        self._begin_turn(storage, lanes)
        try:
            yield
        finally:
            self._end_turn(storage, _queue_of(lanes))

    @property
    def is_committed_elsewhere(self) -> bool:
        """Whether a position is out, whose commit may come from a thread that saves."""
        return self._positions_out

    # ---- taking rows: `take_ahead`, a draw, `Draw.taken` or `put_off`, by one thread that has the turn meanwhile ----
    def take_ahead(self, storage: Storage, n: int, *, fewer: bool = False) -> bool:
        """Chooses the next n rows for this thread's next draw, or with `fewer` what waits, and keeps the turn until
        they are handed out; False: fewer wait, or none.

        Raises:
            RuntimeError: rows are gone that nobody was to overwrite; the next call goes on without them.
            ValueError: the rows have no version, with `max_staleness`.
            StorageInUseError: another process has been taking a batch for ten seconds.
        """
        self.put_off()
        lanes = storage.lanes
        lanes.use()
        queue = _queue_of(lanes)
        if not (fewer or queue.waiting >= n or queue.just_missed or queue.lags or self._is_to_begin(storage, queue)):
            return False
        self._begin_turn(storage, lanes)
        taking = None
        try:
            taking = self._chosen(storage, lanes, queue, n, fewer)
            self._taking = taking
        finally:
            if taking is None:
                self._end_turn(storage, queue)
        return taking is not None

    def _is_to_begin(self, storage: Storage, queue: _native.StoreQueue) -> bool:
        """Whether this process takes part in no session yet, or not in the one that is."""
        return self.commit == "manual" and storage.access.table.flow.sessions.number != queue.session

    @property
    def taken_ahead(self) -> int:
        """How many rows this thread has chosen."""
        taking = self._own_taking()
        return 0 if taking is None else taking.n

    def put_off(self) -> None:
        """Gives the turn back where this thread has it: what it chose comes next, for whoever takes it."""
        taking = self._own_taking()
        if taking is not None:
            self._taking = None
            self._end_turn(taking.storage, _queue_of(taking.lanes))

    def _hand_out(self, are_whole: bool) -> None:
        """`Draw.taken`, of this thread's draw."""
        taking = self._own_taking()
        if taking is None:  # a child has drawn twice for one batch
            return
        if not are_whole:
            self.put_off()
            self._draws_anew += 1
            if self._draws_anew > _MOST_DRAWS_ANEW:
                self._draws_anew = 0
                raise RuntimeError("writers overwrite the rows of a batch faster than they can be read; sample fewer")
            raise QueueShortError("rows of this batch were overwritten, or removed, before they were read")
        try:
            _queue_of(taking.lanes).hand_out(taking.next, taking.missed, taking.stale)
        finally:
            self._draws_anew = 0
            self.put_off()

    def _own_taking(self) -> _Taking | None:
        taking = self._taking
        return taking if taking is not None and taking.thread == threading.get_ident() else None

    def _begin_turn(self, storage: Storage, lanes: Lanes) -> None:
        self.lock.acquire()
        consuming = storage.access.table.flow.consuming
        try:
            consuming.acquire()
            try:
                lanes.begin_taking()
            except BaseException:
                consuming.release()
                raise
        except BaseException:
            self.lock.release()
            raise

    def _end_turn(self, storage: Storage, queue: _native.StoreQueue) -> None:
        try:
            queue.end_turn()
        finally:
            storage.access.table.flow.consuming.release()
            self.lock.release()

    def _chosen(self, storage: Storage, lanes: Lanes, queue: _native.StoreQueue, n: int, fewer: bool) -> _Taking | None:
        """What this thread, which has the turn, takes; None: fewer rows wait than it wants."""
        if self.full == "wait" and (missed := queue.just_missed):
            queue.hand_out(queue.choose(0)[3], missed, passes=True)
            raise RuntimeError(
                f"{missed} rows were overwritten before they were handed out, though writers are to wait: a process "
                "that did not know the queue wrote to the storage first. Each process names it, by one function that "
                "makes the buffer; the next sample goes on without these rows (`rb.stats().missed`)"
            )
        if not storage.initialized:
            return None
        incarnation = storage.access.incarnation
        self._take_part(storage, lanes)
        skipped, begin = 0, list[int]()
        if self._draws_anew > 1 and self.full != "wait":
            # The oldest rows go as fast as they are read; those behind them stay longer.
            spare = max(0, queue.waiting - n)
            skipped, _, _, begin, before = queue.choose(min(spare, (self._draws_anew - 1) * n))
            skipped += sum(before)
        found, slots, sequences, after, gone = queue.choose(n, self._looks_back, begin)
        missed, stale = sum(gone), 0
        if self.max_staleness is not None and found:
            assert sequences is not None
            first = slots, sequences, after, gone
            slots, sequences, after, missed, stale = self._fresh(storage, lanes, queue, n, first, fewer)
            found = len(slots)
        if found < n and not (fewer and found):
            if stale:
                queue.hand_out(after, missed, stale, passes=True)
            elif queue.lags:
                queue.hand_out(queue.consumed)
            return None
        return _Taking(
            threading.get_ident(), storage, lanes, found, slots, sequences, after, skipped + missed, stale, incarnation
        )

    # ---- rows that are too old ----
    def _fresh(
        self, storage: Storage, lanes: Lanes, queue: _native.StoreQueue, n: int,
        first: tuple[Tensor, Tensor, list[int], list[int]], fewer: bool,
    ) -> tuple[Tensor, Tensor, list[int], int, int]:  # fmt: skip
        """The next n rows that are not too old, or as many as there are; of each lane the row behind them; how many
        before those were overwritten, and how many are passed. Where there are fewer, and they are not taken, only
        what is too old before the first of each lane that is not.
        """
        assert self.max_staleness is not None
        oldest = queue.consumer_version - self.max_staleness
        seen: list[tuple[Tensor, Tensor, Tensor]] = []
        slots, sequences, after, gone = first
        found, missed = 0, sum(gone)
        while True:
            old = self._versions(storage, slots) < oldest
            seen.append((slots, sequences, old))
            found += len(slots) - int(old.sum())
            if found >= n:
                break
            more, slots, some, after, also_gone = queue.choose(n - found, True, after)
            missed += sum(also_gone)
            if not more or some is None:
                break
            sequences = some
        slots, sequences, old = (torch.cat(parts) for parts in zip(*seen, strict=True))
        fresh = ~old
        if found >= n or (fewer and found):
            return slots[fresh], sequences[fresh], after, missed, int(old.sum())
        # The rows of a lane are in their order: what is too old before its first other one goes.
        rows, envs = lanes.store.lane_capacity * lanes.envs, lanes.envs
        lane, number = slots // rows, sequences * envs + slots % envs
        passed, missed, behind = 0, 0, list(queue.consumed)
        for which in torch.unique(lane).tolist():
            here = lane == which
            too_old = int(torch.cumprod(old[here].to(torch.int64), 0).sum())
            if too_old:
                passed, missed = passed + too_old, missed + gone[which]
                behind[which] = int(number[here][too_old - 1]) + 1
        return slots[fresh], sequences[fresh], behind, missed, passed

    def _versions(self, storage: Storage, slots: Tensor) -> Tensor:
        """The version of each row: int64 [n]. ValueError: the rows have none."""
        path = self._version_path
        layout = storage.layout
        values: Any = None
        if layout is None:
            items = storage.read(slots).batch
            entries = [get_entry(item, path) if has_keys(item) else None for item in items]
            if all(entry is not None for entry in entries):
                values = torch.stack([to_tensor(entry) for entry in entries])
        elif path in layout.paths:
            values = read_leaves(storage, slots, (path,)).batch[0]
        if values is None:
            raise ValueError(
                f"max_staleness={self.max_staleness} needs the version of each row, and the stored rows have no "
                f"{format_key(path)}: make the collector with track_policy_version=True, or give version_key="
            )
        versions: Tensor = to_tensor(values)
        if versions.dtype.is_floating_point or versions.numel() != len(slots):
            raise ValueError(
                f"versions are one integer for each row, and {format_key(path)} is {versions.dtype} "
                f"{list(versions.shape[1:])}: of a row of several steps, store the oldest one"
            )
        return versions.reshape(-1).to(torch.int64)

    def versions(self, storage: Storage) -> tuple[int | None, int]:
        """The version of the oldest row that waits (None: there is none, or rows have none), and the consumer's."""
        queue = _queue_of(storage.lanes)
        slots = queue.choose(1)[1]
        try:
            oldest = int(self._versions(storage, slots)[0]) if len(slots) else None
        except ValueError:
            oldest = None
        return oldest, queue.consumer_version

    # ---- state: all of it is the store's ----
    def _config(self) -> dict[str, Any]:
        return {"max_staleness": self.max_staleness, "full": self.full, "commit": self.commit}

    def __repr__(self) -> str:
        defaults = {"max_staleness": None, "full": "wait", "commit": "auto"}
        given = (f"{name}={value!r}" for name, value in self._config().items() if value != defaults[name])
        return f"QueueSampler({', '.join(given)})"


def _queue_of(lanes: Lanes) -> _native.StoreQueue:
    queue = lanes.queue
    assert queue is not None  # the flow of its table has looked
    return queue


def _made(storage: Storage, what: str) -> Lanes:
    """The lanes of a storage that has rows. RuntimeError: nothing was written."""
    lanes = storage.lanes
    if not storage.initialized:
        raise RuntimeError(f"nothing has been written to this storage: there is no {what}")
    return lanes


def _is_loose() -> bool:
    """As `DrawPlan.is_loose`: rows of several lanes, or behind removed ones, do not follow each other."""
    return True
