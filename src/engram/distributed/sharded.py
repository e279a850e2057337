"""A replay buffer over shards, over any transport."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from engram import pytree
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SliceSampler,
    Storage,
    TensorDictReplayBuffer,
)
from engram.distributed.batches import BatchStream, Rows
from engram.distributed.blocks import Block, pack
from engram.distributed.client import Producer, ShardClient, ShardLink, absences, finish_all, raise_if_gone
from engram.distributed.commit import load_shards, save_shards
from engram.distributed.folder_lock import FolderWatch, watch_folder
from engram.distributed.local import LocalProducer, LocalReader, ShardMovedError, await_shard
from engram.distributed.priority_updates import Priorities, PriorityUpdates
from engram.distributed.shard import ReplayShard
from engram.distributed.shard_choice import Admissions, ShardStint, first_shard, next_shard
from engram.envs.transforms import Compose
from engram.errors import ShardGoneError, ShardUnavailableError, StorageError
from engram.kernel.replay import IN_BUFFERS, WriteRequest, mark_rows, warn_if_idle
from engram.kernel.rows import RowLayout
from engram.kernel.tools import ReadAsMapping, count, warn_user
from engram.pytree import to_tensor

_STINT = ", stint "  # in the name of a producer, before the number of its stint
_PAUSE = 0.01  # seconds between two looks at shards that are all away


class _Counts(NamedTuple):
    rows: int
    capacity: int
    writes: int
    accepted: int
    draws: int
    unacknowledged: int
    away: tuple[int, ...]


class ShardedStats(ReadAsMapping, _Counts):
    """The state of a buffer over shards in numbers; there may be more fields later. Read as a mapping as `BufferStats`.

    Attributes:
        rows: stored steps, as far as shards that are away had told.
        capacity: steps that fit.
        writes: steps ever written, by whomever.
        accepted: rows of this object that are in, over all lanes that it had; of one that took the name of a producer
            that died, also what that had written to its last lane.
        draws: batches that this object has handed out.
        unacknowledged: rows that this object has written and that are on their way.
        away: numbers of the shards that do not answer.
    """

    def by_name(self) -> dict[str, Any]:
        """What the mapping has: the fields, and TorchRL's names."""
        return {**self._asdict(), "size": self.rows, "write_count": self.writes}


class Timeouts(NamedTuple):
    """How many seconds a RayReplayBuffer or an RpcReplayBuffer waits for shards that do not answer.

    Attributes:
        answer: `sample`, `len`, `stats` and others that only read.
        extend: `extend`, `add`, `flush` and `close`, whose rows are for one shard.
        start: a new RayReplayBuffer, for the processes of its shards, which import torch; and `attach`.

    Example:
        >>> Timeouts.of(5.0), Timeouts.of(60.0).extend, Timeouts.of(Timeouts(extend=600.0)).answer
        (Timeouts(answer=5.0, extend=30.0, start=120.0), 60.0, 1.0)
    """

    answer: float = 1.0
    extend: float = 30.0
    start: float = 120.0

    @classmethod
    def of(cls, timeout: float | Timeouts) -> Timeouts:
        """Those that are meant by `timeout=`, where a number is that of answers, and the least one for `extend`.

        Raises:
            ValueError: one of them is not more than 0.
        """
        given = timeout if isinstance(timeout, Timeouts) else cls(timeout, max(timeout, cls().extend))
        for name, seconds in given._asdict().items():
            if not seconds > 0:
                raise ValueError(f"timeout must be more than 0 seconds, got {seconds} for {name}")
        return cls(*map(float, given))


class ShardedSettings(NamedTuple):
    """How a client of shards writes and draws.

    Attributes:
        sampler: which says how shards draw; its `beta` is that of the weights, and may be set at any time.
        attaches: whether batches carry their index.
        extend_timeout: seconds that calls which write wait; None: `timeout`.
        Others: as `RayReplayBuffer`.
    """

    sampler: Sampler
    transform: Any = None
    batch_size: int | None = None
    attaches: bool = True
    priority_key: str = "td_error"
    batches_per_call: int | None = None
    timeout: float = 1.0
    max_batch_age: float | None = None
    extend_timeout: float | None = None

    def check(self) -> None:
        """ValueError: a number that is not allowed; what, and what is."""
        if self.batches_per_call is not None:
            count(self.batches_per_call, "batches_per_call")
        if self.max_batch_age is not None and not self.max_batch_age >= 0:
            raise ValueError(f"max_batch_age must be 0 or more seconds, got {self.max_batch_age}")
        if not self.timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds, got {self.timeout}")

    @property
    def writing_timeout(self) -> float:
        """Seconds that calls which write wait."""
        return self.timeout if self.extend_timeout is None else self.extend_timeout


class ShardedReplayBuffer:
    """A client of a buffer whose rows lie in several shards: writes to one at a time, and draws from all.

    Args:
        links: what carries calls to each shard.
        local: which shards' stores can be opened here.
        producer: this client's name among producers; None: one of its own.
        moves_on: whether it moves on over all shards; None: if it has no name of its choice.
        generator: of this client's draws; None: torch's global one.
    """

    def __init__(
        self,
        links: Sequence[ShardLink],
        settings: ShardedSettings,
        *,
        local: Sequence[bool] | None = None,
        producer: str | None = None,
        moves_on: bool | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._settings, self._generator = settings, generator
        self._links = list(links)
        self._local = [False] * len(links) if local is None else list(local)
        transform = settings.transform
        self._transform = Compose(*([] if transform is None else [transform]))
        warn_if_idle(self._transform, IN_BUFFERS, "in a replay buffer")
        self._prioritized = settings.sampler if isinstance(settings.sampler, PrioritizedSampler) else None
        self._writing = threading.RLock()  # of what is written; taken before the other one
        self._lock = threading.RLock()  # of draws: they do not wait for a shard to which another thread writes
        self._shards = [ShardClient(link, number) for number, link in enumerate(links)]
        self._name = producer or f"{os.uname().nodename}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        # Under a name of its choice others may go on with its work, by its count in one shard. One that moves on has
        # another name in each stint, so that each has a count, which a shard tells when the producer has died.
        self._moves_on = (producer is None if moves_on is None else moves_on) and len(links) > 1
        self._names_stints = self._moves_on and producer is not None
        self._stint_number = 0
        self._admissions = Admissions(self._name)
        self._stint: ShardStint | None = None  # of the producer; None: it stays in its shard
        self._producer: Producer | LocalProducer | None = None
        self._next: Producer | LocalProducer | None = None  # that has joined the shard to which it moves on
        self._left: list[Producer | LocalProducer] = []  # of stints before, whose shards have not answered since
        self._accepted_before = 0  # rows of producers before
        self._layout: RowLayout | None = None
        self._stream: BatchStream | None = None
        self._beside: ReplayBuffer[Any] | None = None  # that reads the store of the only shard
        self._watch: FolderWatch | None = None  # of that
        self._readers: dict[int, LocalReader] = {}  # of stores on this machine, where there are several shards
        self._updates = PriorityUpdates(self._shards)  # given without the lock, and sent under it
        self._draws = 0

    # ---- writing ----
    def extend(self, data: Any, *, priority: Any = None) -> Tensor:
        """Stores a batch of steps; returns their indices, int64 [n]: `shard * capacity of a shard + slot`.

        Rows go to one shard, on their way beside each other, and those of several calls together where they come faster
        than it answers; `flush` waits until they are in. When that shard is full they go on in another one that has no
        more producers, so that one client fills all shards; with `producing_as` they stay. The index of a row is that
        of another row where the shard was lost, with all that it held, or was not to be had, before the row came.

        Args:
            priority: of the steps, a number or one for each, for a sampler with priorities; None: that of new rows. It
                goes with the rows, however often they are sent, and is set once: it never takes the place of a newer
                one. On the machine of the only shard it goes behind them, in a call of its own.

        Raises:
            ValueError, TypeError: the batch does not fit; the message names the leaf. Or a priority is negative, NaN or
                infinite, sizes differ, or the sampler draws without priorities. Nothing is changed.
            ShardUnavailableError: the shard, which is named, was away for `extend_timeout`, and there is no room for
                more rows on their way: these were not sent.
        """
        batch = pytree.stack(data, 0) if type(data) is list else data
        return self._write(WriteRequest(batch, 1, 0, single=False), priority=priority)

    def add(self, data: Any, *, priority: Any = None) -> int | Tensor:
        """Stores one step; returns its index. Errors and `priority` as `extend`, which is much faster for many."""
        index = self._write(WriteRequest(pytree.stack([data], 0), 1, 0, single=False), priority=priority)
        return int(index) if len(index) == 1 else index

    def flush_transforms(self) -> Tensor:
        """Writes the steps that transforms hold back, as `ReplayBuffer.flush_transforms`; returns their indices.

        `close` does so, too. Errors as `extend`; TypeError: a transform cannot give them back.
        """
        return self._write(WriteRequest(None, 1, 0), flushed=True)

    def _write(self, request: WriteRequest, flushed: bool = False, priority: Any = None) -> Tensor:
        with self._writing:
            deadline = self._writing_deadline()
            transform = self._transform
            before = transform.remember() if transform.stream.inverse_is_ordered else None
            try:
                if transform.transforms:
                    request = transform.flush(request) if flushed else transform.inverse_stream(request)
                batch = request.items
                if batch is None:  # a transform holds all of it back
                    return torch.empty(0, dtype=torch.int64, device="cpu")
                block = pack(self._layout or RowLayout.of(batch, 1), batch)
                given = None if priority is None else self._priorities_of(request, priority, len(block))
                self._adopt_layout_of(batch, deadline)
                self._send_updates_beside_rows(deadline)
                index = self._send(block, given, deadline)
            except BaseException:
                if before is not None:
                    transform.undo(before)
                raise
            return index

    def _priorities_of(self, request: WriteRequest, priority: Any, n: int) -> Tensor:
        """The priorities that came with n steps: float64 [n]. ValueError: they are wrong, or cannot come with them."""
        if self._prioritized is None:
            name = type(self._settings.sampler).__name__
            raise ValueError(f"priority= was given, and {name} draws without priorities: leave it out")
        if request.resized or self._transform.stream.inverse_is_ordered:
            raise ValueError(
                "priority= was given beside a transform that writes other steps than came: call update_priority with "
                "the index that extend returns"
            )
        return self._prioritized.checked_priorities(priority, n).clone()  # they may wait, and the caller change them

    def _send(self, block: Block, priority: Tensor | None, deadline: float) -> Tensor:
        """Gives rows to this object's producer, in pieces where its stint in a shard ends before them."""
        parts: list[Tensor] = []
        sent, n = 0, len(block)
        while True:
            end = self._end_of_part(sent, n, deadline)
            if end > sent or not n:
                given = None if priority is None else priority[sent:end]
                try:
                    parts.append(self._send_part(block.start(end).rest(sent), given, deadline, goes_on=sent > 0))
                except ShardUnavailableError as error:
                    if sent:
                        raise type(error)(f"{error}. The first {sent} of {n} steps were sent") from error
                    raise
                if self._stint is not None:
                    self._stint.note(end - sent)
                sent = end
            if sent == n:
                self._give_admissions_back()
                return parts[0] if len(parts) == 1 else torch.cat(parts)
            self._move_on(deadline)

    def _end_of_part(self, sent: int, n: int, deadline: float) -> int:
        """How many of n rows, of which some were sent, are to be in the shards up to the one of now."""
        shard, stint = self._own_producer(deadline).shard, self._stint
        if stint is None or stint.left >= n - sent:
            return n
        if not self._opens_next(stint, deadline):
            self._stint = ShardStint(shard, goes_on=True)
            return n
        if self._names_stints and not stint.has_begun and not stint.left:  # of others: each stint has rows of its own
            self._stint = stint = ShardStint(shard)
        return min(n, sent + stint.left)

    def _send_part(self, block: Block, priority: Tensor | None, deadline: float, goes_on: bool) -> Tensor:
        """Gives rows to the producer, or where its shard is back with another store, to a new one."""
        try:
            return self._send_by(self._own_producer(deadline), block, priority, deadline, goes_on)
        except ShardMovedError:
            self._leave_moved_shard()
            return self._send_by(self._own_producer(deadline), block, priority, deadline, goes_on)

    def _opens_next(self, stint: ShardStint, deadline: float) -> bool:
        """Whether there is a shard to move on to; this object's next producer has joined it then."""
        if self._next is not None:
            return True
        left = {one.shard.number for one in self._left}  # where it is known by its name still
        shards = [shard for shard in self._shards if shard.number not in left]
        name = self._stint_name(self._stint_number + 1)
        try:
            shard = next_shard(stint, self._admissions, shards, deadline, name)
            if shard is None:
                return False
            producer = self._new_producer(shard, name)
            producer.open(deadline)
        except ShardUnavailableError:
            return False
        self._next = producer
        return True

    def _move_on(self, deadline: float) -> None:
        """Begins a stint in the next shard, and leaves the one before when its rows are in, now or later.

        One whose stints have names stays until they are in.
        """
        assert self._producer is not None and self._next is not None
        if self._names_stints:
            try:
                self._producer.flush(deadline - time.monotonic())
            except ShardUnavailableError:
                self._stint = ShardStint(self._producer.shard, goes_on=True)
                return
        self._left.append(self._producer)
        self._producer, self._next = self._next, None
        self._stint_number += 1
        self._admissions.name = self._producer.name
        self._stint = ShardStint(self._producer.shard)
        with contextlib.suppress(ShardUnavailableError):
            self._leave_before(deadline)

    def _give_admissions_back(self) -> None:
        """Lets shards forget this object that may have admitted it and that it does not use; waits for none."""
        used = [*self._producers, *([] if self._next is None else [self._next])]
        for producer in used:
            if producer.has_joined:
                self._admissions.forget(producer.shard)
        self._admissions.give_back({producer.shard.number for producer in used})

    def _leave_before(self, deadline: float) -> None:
        """Ends what is left of stints before; errors as `Producer.leave`."""
        while self._left:
            try:
                self._left[0].leave(deadline)
            except ShardGoneError:  # it is told once: this object has another shard by now
                self._end(self._left.pop(0))
                raise
            self._end(self._left.pop(0))

    def _send_by(
        self,
        producer: Producer | LocalProducer,
        block: Block,
        priority: Tensor | None,
        deadline: float,
        goes_on: bool = False,
    ) -> Tensor:
        first = producer.shard.number * producer.shard.facts.capacity
        if isinstance(producer, Producer):
            return first + producer.extend(block, self._highest_new_priority(), deadline, priority, goes_on)
        slots = producer.extend(block, deadline)
        if priority is not None:  # with generations: sent again where the call is lost, and never set for other rows
            given = Priorities(first + slots, priority, producer.generations(slots), came_with_rows=True)
            self._updates.begin(producer.shard, given)
        return first + slots

    def _leave_moved_shard(self) -> None:
        producer, self._producer, self._stint = self._producer, None, None
        if isinstance(producer, LocalProducer):
            producer.abandon()
            self._end(producer)

    def _end(self, producer: Producer | LocalProducer) -> None:
        """Counts the rows of a producer that is used no longer."""
        self._accepted_before += producer.acknowledged

    def _deadline(self) -> float:
        """Until when a call that begins now may wait: one for all that it waits for."""
        return time.monotonic() + self._settings.timeout

    def _writing_deadline(self) -> float:
        return time.monotonic() + self._settings.writing_timeout

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all rows of this object are in, and then until its priorities are set, as `flush_priorities`.

        Raises:
            ShardUnavailableError: rows are not in within so many seconds (`extend_timeout` of the buffer); they are
                kept, and sent again.
        """
        deadline = time.monotonic() + (self._settings.writing_timeout if timeout is None else timeout)
        with self._writing:
            self._leave_before(deadline)
            if self._producer is not None:
                self._producer.flush(timeout)
            self._flush_updates(deadline)

    def _flush_updates(self, deadline: float) -> None:
        """Sends the priorities that wait, and waits until they are set; but not for a thread that draws until then."""
        if self._updates.is_idle:
            return
        if self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            try:
                self._updates.flush(deadline, self._rows_are_sent)
            finally:
                self._lock.release()

    def _rows_are_sent(self) -> bool:
        """Sends the rows that are held back; False: another thread is just about to send them."""
        producer = self._producer
        return not isinstance(producer, Producer) or producer.send_held()

    def producing_as(self, name: str, *, moves_on: bool = False) -> Self:
        """A client of the same rows that writes under a name of its own choice.

        A process that continues the work of one that died takes its name, and with it its count: what is in already
        (`rows_in`) is not written again. No two living clients may have one name. Steps that its transforms hold back
        are its own.

        Args:
            moves_on: it moves on over all shards, as a client without a name. Then nobody can continue its work;
                `end_producer` counts what one that died has written since its last `stint`.
        """
        twin = copy.copy(self)
        ShardedReplayBuffer.__init__(
            twin, self._links, self._settings_of_another(), local=self._local, producer=name, moves_on=moves_on,
            generator=self._generator,
        )  # fmt: skip
        return twin

    def _settings_of_another(self) -> ShardedSettings:
        """The settings for another client: with the transforms of now, and none of the steps that they hold back."""
        transform = self._transform
        if transform.stream.inverse_is_ordered:
            with self._writing:
                transform = copy.deepcopy(transform)
            transform.empty()
        return self._settings._replace(transform=transform if transform.transforms else None)

    def rows_in(self) -> int:
        """How many rows of this client's name are in, since it joined its shard; 0: none ever came.

        `stats().accepted` counts on over all its shards; so does this, of a client with a name of its choice that moves
        on.

        Raises:
            ShardUnavailableError: the shard does not answer.
        """
        with self._writing:
            deadline = self._writing_deadline()
            if not any(shard.facts.layout for shard in self._all_present(deadline)):
                return 0
            try:
                self._own_producer(deadline).open()
            except ShardMovedError:
                self._leave_moved_shard()
                self._own_producer(deadline).open()
            assert self._producer is not None
            if self._names_stints:
                return self._accepted_before + sum(one.acknowledged for one in self._producers)
            return self._producer.acknowledged

    def stint(self) -> tuple[int, int]:
        """Of a client with a name that moves on: the number of its stint, and how many rows of those before are in."""
        with self._writing:
            rows = self.rows_in()
            return self._stint_number, rows - (0 if self._producer is None else self._producer.in_tenancy)

    def end_producer(self, name: str, since: int | None = None) -> int:
        """Ends what a producer that has died has in shards; returns how many of its rows are in. May be repeated.

        Rows of it that are still on their way are refused from now on. Those that it wrote in an earlier life, before
        it was ended under the same name, may be counted again: give each life a name of its own.

        Args:
            since: the number of a stint of a producer that moves on: the rows of this one, and of those after it, are
                counted.

        Raises:
            ShardUnavailableError: a shard does not answer, and it may be that of the producer.
            NoFreeLaneError: the producer lives, and writes by itself on the machine of the shard.
        """
        with self._writing:
            rows = self._end_in_all(name if since is None else _name_of_stint(name, since))
            if since is not None and len(self._shards) > 1:
                number = since + 1
                while more := self._end_in_all(_name_of_stint(name, number), name):
                    rows, number = rows + more, number + 1
            return rows

    def _end_in_all(self, name: str, producer: str | None = None) -> int:
        """Ends a name in all shards; returns how many rows it has in its last tenancy in each.

        Args:
            producer: of which all stints are ended, also in shards that admitted it without its knowledge.
        """
        rows, deadline = 0, self._deadline()
        for shard in self._shards:
            shard.forget()  # its producers may have changed since it was greeted
            facts = shard.await_presence(deadline)
            for other in facts.producers if producer is not None else ():
                if other == producer or other.startswith(f"{producer}{_STINT}"):
                    shard.ask(deadline, "end_producer", other)
            rows += shard.ask(deadline, "end_producer", name)
        return rows

    def _all_present(self, deadline: float, *, awaits_all: bool = False) -> list[ShardClient]:
        """The shards that answer; waits until one does, and half of the time for those that never have, or for all.

        Raises:
            ShardUnavailableError: none answers.
        """
        now = time.monotonic()
        halfway = now + (deadline - now) / 2
        while True:
            present = [shard for shard in self._shards if shard.is_present]
            absent = [
                shard for shard in self._shards
                if shard.is_awaited and (awaits_all or not shard.is_known) and not shard.is_gone
            ]  # fmt: skip
            raise_if_gone(self._shards)
            if present and (time.monotonic() >= halfway or not absent):
                return present
            if time.monotonic() >= deadline:
                raise ShardUnavailableError(
                    f"no shard answers; they are asked again at each call{absences(self._shards)}"
                )
            time.sleep(_PAUSE)

    def _own_producer(self, deadline: float) -> Producer | LocalProducer:
        if self._producer is None:
            present = self._all_present(deadline, awaits_all=True)  # else all would go to the shard that answers first
            shard = self._shards[first_shard(self._admissions, present, self._local, deadline)]
            self._producer = self._new_producer(shard, self._admissions.name)
            self._stint = ShardStint(shard) if self._moves_on else None
        return self._producer

    def _stint_name(self, number: int) -> str:
        return _name_of_stint(self._name, number) if self._names_stints else self._name

    def _new_producer(self, shard: ShardClient, name: str) -> Producer | LocalProducer:
        # Over several shards new rows get the highest priority of all, which only calls tell.
        by_itself = self._is_here(shard) and (self._prioritized is None or len(self._shards) == 1)
        kind = LocalProducer if by_itself else Producer
        return kind(shard, name, self._settings.writing_timeout)

    def _is_here(self, shard: ShardClient) -> bool:
        """Whether a shard that answers lives on this machine, in a folder that can be opened."""
        folder = shard.facts.folder
        watch = watch_folder(folder) if self._local[shard.number] and folder is not None else None
        if watch is not None:
            watch.close()
        return watch is not None

    def _adopt_layout_of(self, batch: Any, deadline: float) -> None:
        """Tells all shards the layout, which the first batch decides."""
        if self._layout is None:
            layout = RowLayout.of(batch, 1)
            for shard in self._shards:
                shard.ask(deadline, "adopt", layout.to_bytes())
                shard.layout = layout.to_bytes()
                shard.forget()  # what it says of itself has changed
            self._layout = layout

    def _known_layout(self, deadline: float) -> RowLayout:
        """The layout of the rows that are there.

        Raises:
            RuntimeError: no rows are stored.
        """
        if self._layout is None:
            saved = self._saved_layout(deadline) or self._saved_layout(deadline, again=True)
            if saved is None:
                raise RuntimeError("Cannot sample from an empty buffer. Add or extend it first.")
            self._layout = RowLayout.from_bytes(saved)
            for shard in self._shards:
                shard.layout = saved
        return self._layout

    def _saved_layout(self, deadline: float, again: bool = False) -> bytes | None:
        """The layout that shards know, asked for again if none did: another client may have decided it since."""
        present = self._all_present(deadline)
        for shard in present if again else []:
            shard.forget()
            with contextlib.suppress(ShardUnavailableError):
                shard.await_presence(deadline)
        return next((s.facts.layout for s in self._shards if s.is_present and s.facts.layout), None)

    # ---- sampling ----
    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """A batch, drawn from all shards that answer; with `return_info` also its info.

        Raises:
            RuntimeError: no batch size here or in the constructor; nothing is stored.
            ShardUnavailableError: no shard that has rows answers within `timeout`.
        """
        n = self._settings.batch_size if batch_size is None else batch_size
        if n is None:
            raise RuntimeError(
                "batch_size not specified: give one to sample(batch_size) or to the buffer's constructor"
            )
        deadline = self._deadline()
        if self._beside is None and (self._stream is None or self._stream.batch_size != n):
            self._flush_before(deadline)
        with self._lock:
            if self._watch is not None and not self._watch.is_held():
                self._await_beside(self._watch, deadline)
            beside = self._beside or self._open_beside(deadline)
            if beside is not None:
                self._draws += 1
                return beside.sample(n, return_info)
            if self._stream is None or self._stream.batch_size != n:
                now = time.monotonic()
                self._refresh(now + (deadline - now) / 2)  # with time left to draw from those that answer
                self._stream = self._new_stream(n, self._known_layout(deadline))
            rows = self._stream.next(deadline)
            self._draws += 1
            batch, info = self._batch_of(rows)
        return (batch, info) if return_info else batch

    def _flush_before(self, deadline: float) -> None:
        """Waits for the rows of this object, which shall be drawn; `stats` says which are not in by then."""
        if not self._unacknowledged:
            return
        if self._writing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            try:
                # With time left for what the caller wants of the other shards.
                with contextlib.suppress(ShardUnavailableError):
                    self.flush((deadline - time.monotonic()) / 2)
            finally:
                self._writing.release()

    def __iter__(self) -> Iterator[Any]:
        """Batches without end."""
        while True:
            yield self.sample()

    def _new_stream(self, n: int, layout: RowLayout) -> BatchStream:
        return BatchStream(
            self._shards, self._settings.sampler, n, layout, batches_per_call=self._settings.batches_per_call,
            max_batch_age=self._settings.max_batch_age, timeout=self._settings.timeout, generator=self._generator,
            before_round=self._send_updates, readers=self._open_readers(), attaches=self._settings.attaches,
        )  # fmt: skip

    def _open_readers(self) -> dict[int, LocalReader]:
        """Readers of the stores that lie on this machine, of shards that draw uniformly; others are asked."""
        if type(self._settings.sampler) is not RandomSampler:
            return {}
        for number, reader in list(self._readers.items()):
            if not reader.is_live:
                reader.close()
                del self._readers[number]
        for shard in self._shards:
            folder = shard.facts.folder if self._local[shard.number] and shard.is_present else None
            if folder is not None and shard.facts.layout is not None and shard.number not in self._readers:
                watch = watch_folder(folder)
                if watch is None:
                    continue
                try:
                    self._readers[shard.number] = LocalReader(shard, folder, watch)
                except StorageError:
                    if watch.look():
                        raise
                    watch.close()  # it has just ended, and its folder was removed
        return self._readers

    def _open_beside(self, deadline: float) -> ReplayBuffer[Any] | None:
        """A buffer that reads the store of the only shard, where that lies on this machine and has rows."""
        if self._prioritized is not None or self._local != [True]:
            return None
        folder = self._shards[0].await_presence(deadline).folder
        if folder is None or self._shards[0].facts.layout is None:
            self._refresh(deadline)
            folder = self._shards[0].facts.folder
        if folder is None or self._shards[0].facts.layout is None:
            return None
        watch = watch_folder(folder)
        if watch is None:
            return None
        try:
            storage = LazyMemmapStorage.open(folder, read_only=True)
        except StorageError:
            if watch.look():
                raise
            watch.close()
            return None  # it has just ended, and its folder was removed
        kind = TensorDictReplayBuffer if self._settings.attaches else ReplayBuffer
        self._beside = kind(
            storage=storage, sampler=self._settings.sampler, transform=self._transform, generator=self._generator
        )  # fmt: skip
        self._watch = watch
        return self._beside

    def _await_beside(self, watch: FolderWatch, deadline: float) -> None:
        """Waits until the only shard is back; where it is with another store, that is opened, or asked, from then on.

        Errors as `ShardClient.await_presence`.
        """
        try:
            await_shard(self._shards[0], watch, deadline, self._beside.write_count if self._beside is not None else 0)
        except ShardMovedError:
            self._stop_drawing()

    def _batch_of(self, rows: Rows) -> tuple[Any, dict[str, Any]]:
        sampler, batch = self._settings.sampler, rows.batch
        info: dict[str, Any] = {"index": rows.flat_index, "generation": rows.generation}
        if rows.weight is not None:
            info["priority_weight"] = rows.weight
        if rows.last is not None and isinstance(sampler, SliceSampler):
            mark_rows(batch, sampler, rows.last, rows.mask)
        if self._transform.transforms:
            batch = self._transform.read(batch, int(not isinstance(sampler, SliceSampler)))
        return batch, info

    # ---- priorities ----
    def update_priority(self, index: Any, priority: Any, generation: Any = None) -> None:
        """Sets priorities of stored rows: they go with the next rows or the next round of batches, and with `flush`.

        It waits for nothing. What is known only when a shard has answered is looked at then: until one has, an index
        outside the buffer is dropped later, with a RuntimeWarning.

        Args:
            index: int64 [n], as `extend` and batches give it.
            priority: a number, or one for each row.
            generation: int64 [n], as batches and infos have it: where another row is by then, it is left out.

        Raises:
            ValueError: a priority is negative, NaN or infinite, or sizes differ. Nothing is changed.
            IndexError: an index lies outside the buffer.
        """
        if self._prioritized is None:
            return
        at = _as_column(index)
        priorities = self._prioritized.checked_priorities(priority, len(at))
        generations = None if generation is None else _as_column(generation)
        if generations is not None and len(generations) != len(at):
            raise ValueError(f"{len(generations)} generations came with {len(at)} indices; nothing was changed")
        self._updates.give(at, priorities, generations)

    def update_tensordict_priority(self, data: Any) -> None:
        """Sets the priorities of a batch's rows from `data[priority_key]`; errors as `update_priority`, KeyError.

        For samplers without priorities there is nothing to do, whatever keys the batch has.
        """
        if self._prioritized is None:
            return
        generation = data["generation"] if "generation" in data.keys() else None  # noqa: SIM118 -- a TensorDict iterates over rows
        self.update_priority(data["index"], data[self._settings.priority_key], generation)

    def flush_priorities(self) -> None:
        """Sends the priorities that wait, and waits until they are set, for `timeout` at most.

        Those of shards that are away wait until these are back, if they came with generations; others are dropped,
        with a RuntimeWarning.
        """
        with self._lock:
            self._updates.flush(self._deadline(), self._rows_are_sent)

    def _send_updates(self, deadline: float) -> None:
        self._updates.send(deadline, self._rows_are_sent)

    def _send_updates_beside_rows(self, deadline: float) -> None:
        """Sends the priorities that wait before new rows go; a thread that draws just now sends them itself."""
        if self._updates.is_due and self._lock.acquire(blocking=False):
            try:
                now = time.monotonic()
                self._send_updates(now + (deadline - now) / 2)  # with time left for the rows
            except (IndexError, ValueError) as error:  # these rows have no part in it
                warn_user(f"priorities that were given before were refused: {error}", RuntimeWarning)
            finally:
                self._lock.release()

    def _highest_new_priority(self) -> float | None:
        if self._prioritized is None or len(self._shards) == 1:
            return None
        known = [s.totals.draws.new_priority for s in self._shards if s.is_present]
        return max((one for one in known if one is not None), default=None)

    # ---- facts ----
    def _refresh(self, deadline: float) -> None:
        """Asks every shard that answers what it holds."""
        finish_all([(shard, shard.begin("totals")) for shard in self._all_present(deadline)], deadline)

    def stats(self) -> ShardedStats:
        """Numbers of the buffer, after the rows of this object are in; shards that are away count as they had told.

        Raises:
            ShardUnavailableError: no shard has answered within `timeout`.
        """
        deadline = self._deadline()
        self._flush_before(deadline)
        with self._lock:
            self._refresh(deadline)
            totals = [shard.totals for shard in self._shards if shard.is_known]
            rows = sum(one.rows for one in totals)
            away = tuple(shard.number for shard in self._shards if not shard.is_present)
            capacity = sum(shard.facts.capacity for shard in self._shards if shard.is_known)
            accepted = self._accepted_before + sum(one.acknowledged for one in self._producers)
            writes = sum(one.writes for one in totals)
            return ShardedStats(rows, capacity, writes, accepted, self._draws, self._unacknowledged, away)

    @property
    def _producers(self) -> list[Producer | LocalProducer]:
        """The one of now, and those of stints before that are not ended yet."""
        return [*self._left, *([] if self._producer is None else [self._producer])]

    @property
    def _unacknowledged(self) -> int:
        return sum(one.unacknowledged for one in self._producers)

    def __len__(self) -> int:
        """Stored steps."""
        return self.stats().rows

    @property
    def write_count(self) -> int:
        """Steps ever written."""
        return self.stats().writes

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch where `sample` does not say it."""
        return self._settings.batch_size

    @property
    def sampler(self) -> Sampler:
        """The sampler that decides how shards draw; its `beta` may be set at any time."""
        return self._settings.sampler

    @property
    def transform(self) -> Compose:
        """The transforms that are applied to batches."""
        return self._transform

    def append_transform(self, transform: Any) -> Self:
        """Adds a transform at the end."""
        with self._writing, self._lock:
            self._transform.append(transform)
            self._stop_drawing()
        warn_if_idle(self._transform[-1], IN_BUFFERS, "in a replay buffer")
        return self

    # ---- life ----
    def empty(self) -> None:
        """Forgets every row of every shard, and steps that transforms of this object hold back.

        Producers continue.

        Raises:
            ShardUnavailableError: a shard is away; some may have been emptied.
            StorageInUseError: a producer on the machine of a shard writes to it: let it leave first.
        """
        with self._writing, self._lock:
            deadline = self._deadline()
            self._before_replacing()
            for shard in self._shards:
                shard.ask_once(deadline, "empty")
                shard.forget()
            for shard in self._shards:
                shard.await_presence(deadline)  # so that what is known of its rows is of the life that it has begun

    def dumps(self, path: str | os.PathLike[str], *, keep_last: int = 1, timeout: float = 3600.0) -> str:
        """Saves all shards and puts the save in force as a whole; returns the snapshot's name.

        Shards write beside each other, each from its machine: the path must be that of one folder for all of them.
        They answer meanwhile, and other threads write and draw. Rows of this object are in it; those of others as far
        as their shard had them when its save began. Steps that transforms hold back are not.

        Args:
            keep_last: how many saves stay.
            timeout: seconds that it may take.

        Raises:
            ShardUnavailableError: a shard is away, or has not saved in time.
            CheckpointError: a shard cannot save, or another save runs here. The save before it is still in force.
        """
        with self._writing, self._lock:
            self.flush()
            self.flush_priorities()
        return save_shards(self._shards, path, keep_last, timeout)

    def loads(self, path: str | os.PathLike[str], *, snapshot: str | None = None, timeout: float = 3600.0) -> None:
        """Takes over what `dumps` saved, or one of its older saves, into all shards, after all have verified theirs.

        A save of another number of shards is divided: each row comes into one shard, with its priority, and shards get
        equally many. Trajectories stay whole, but for one less than there are shards.

        Raises:
            CheckpointError: nothing was saved there; or it is damaged, or does not fit. Nothing was changed.
            ShardUnavailableError: a shard is away for so long: others may have loaded. Load again.
            StorageInUseError: a producer on the machine of a shard writes to it: let it leave first.
        """
        with self._writing, self._lock:
            self._before_replacing()
            load_shards(self._shards, path, snapshot, timeout)
            self._layout = None

    def _before_replacing(self) -> None:
        """Lets go of what this client has of rows that are about to be replaced."""
        if self._producer is not None:
            self._leave_all()
            self._end_producing()
        self._transform.empty()
        self._updates.discard()
        self._stop_drawing()

    def _leave_all(self) -> None:
        """Ends this object's part in all shards, when its rows are in."""
        deadline = self._writing_deadline()
        self._leave_before(deadline)
        for producer in (self._next, self._producer):
            if producer is not None:
                producer.leave(deadline)

    def _end_producing(self) -> None:
        for producer in self._producers:
            self._end(producer)
        self._producer = self._next = self._stint = None
        self._left = []
        self._admissions.give_back(deadline=self._deadline())

    def _stop_drawing(self) -> None:
        """Drops batches that are on their way."""
        self._stream = None
        for reader in self._readers.values():
            reader.close()
        self._readers = {}
        if self._beside is not None:
            self._beside.storage.close()
            self._beside = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def close(self) -> None:
        """Waits until the rows of this object are in, and leaves its shard; steps that were held back go in first.

        Raises:
            ShardUnavailableError: they are not within `extend_timeout`: those that are not in are lost.
            TypeError: a transform cannot give back the steps that it holds; those are lost.
        """
        with self._writing, self._lock:
            self._stop_drawing()
            try:
                if self._transform.stream.inverse_is_ordered:
                    self.flush_transforms()
            finally:
                try:
                    self.flush()
                    self._leave_all()
                    self._flush_updates(self._deadline())  # those whose shard has answered only now
                finally:
                    self._end_producing()
                    self._updates.drop()


def _as_column(numbers: Any) -> Tensor:
    """Whole numbers as int64 [n]."""
    if type(numbers) is Tensor and numbers.dtype is torch.int64 and numbers.ndim == 1:
        return numbers
    return to_tensor(numbers, dtype=torch.int64).reshape(-1)


def _name_of_stint(name: str, number: int) -> str:
    """The name of a producer in one of its stints, where each has one."""
    return f"{name}{_STINT}{number}" if number else name


def arguments_of_shards(storage: Any, shards: int, lanes: int, sampler: Sampler, transform: Any) -> dict[str, Any]:
    """The arguments of each `ReplayShard` of a buffer.

    Args:
        storage: says for how many rows all shards shall have room, and which observations they store once; or makes
            one that does.

    Raises:
        TypeError, ValueError: it says no room, or is not an empty one of steps; a sampler that no shard can have.
    """
    lanes = count(lanes, "lanes")
    made = storage if isinstance(storage, Storage) else storage()
    if not isinstance(made, Storage):
        raise TypeError(f"storage must be a Storage or make one, got a {type(made).__name__}")
    if made.max_size is None or made.max_size < 1:
        raise ValueError("the storage needs a max_size: it says how many rows all shards have room for")
    if made.ndim != 1:
        raise ValueError(f"shards hold steps of one environment each: ndim must be 1, it is {made.ndim}")
    if len(made):
        raise ValueError(f"the storage holds {len(made)} rows, which would not be in the shards: give an empty one")
    compact = made.compact if isinstance(made, LazyTensorStorage) else None
    horizon = Compose(*([] if transform is None else [transform])).stream.horizon
    if compact is not None and compact.n_steps is None and horizon > 1:
        compact = dataclasses.replace(compact, n_steps=horizon)
    arguments: dict[str, Any] = {
        "capacity": -(-made.max_size // shards),
        "lanes": lanes,
        "sampler": sampler,
        "compact": compact,
    }
    ReplayShard(**{**arguments, "sampler": copy.deepcopy(sampler)}).close()  # its errors are raised here
    return arguments
