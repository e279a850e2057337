"""A client of one shard, over any transport: how long it waits, and sending again what was lost."""

from __future__ import annotations

import abc
import collections
import itertools
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engram import __version__
from engram.distributed.blocks import Block
from engram.distributed.producers import PLACE_HOLDS, Place, Tenancy
from engram.distributed.shard import Acknowledgement, DrawnRows, ShardFacts, ShardTotals, TakenRows
from engram.errors import IncarnationError, ShardGoneError, ShardUnavailableError
from engram.kernel.tools import log

_MOST_CALLS = 32  # of `extend`, without their acknowledgement
_PAUSE = 0.01  # seconds between two looks at a shard that is away
_QUIET = 1.0  # seconds that a call waits for a shard before it says so in the log
_MOST_HELD = 512 << 10  # bytes of rows that wait for those that are on their way, to be sent in one call
_LONGEST_HELD = 0.005  # seconds
_TRIES = 3  # to send rows whose call or answer was lost, before somebody who asks for their index gets none


class PendingCall(abc.ABC):
    """The answer to a call of a shard, which may be on its way."""

    @abc.abstractmethod
    def result(self, timeout: float) -> Any:
        """The answer; what the shard raised is raised here.

        Raises:
            ShardUnavailableError: the shard, or its way here, was lost; whether it carried the call out is not known.
            ShardGoneError: the shard was lost, and is not started again.
            TimeoutError: it has not come within so many seconds; it still may.
        """

    @abc.abstractmethod
    def has_come(self) -> bool:
        """Whether `result` would not wait."""


class ShardLink(abc.ABC):
    """Carries calls to one shard. Calls of one process arrive in their order, or not at all.

    Several threads may call.

    Attributes:
        place: of the shard, in words for messages, as ", on 10.0.0.7"; "": it is not known.
    """

    place = ""

    @abc.abstractmethod
    def call(self, method: str, *arguments: Any, answer_bytes: int = 0) -> PendingCall:
        """Begins a call of a method of `ReplayShard`; raises nothing.

        Args:
            answer_bytes: about how many the arrays of the answer have, which decides how it travels; 0: few.
        """


class ShardClient:
    """A shard as one client sees it: in which life it is, whether it answers, and what it held at its last answer.

    Several threads may use it: one that waits for an answer does not keep the others from theirs.

    Args:
        number: of the shard, for messages.
    """

    def __init__(self, link: ShardLink, number: int) -> None:
        self.number = number
        #: How messages call it.
        self.name = f"shard {number}{link.place}"
        self._link = link
        self._lock = threading.RLock()  # guards the known facts; never held while waiting for the shard
        self._facts: ShardFacts | None = None
        self._greeting: PendingCall | None = self._greet()  # pending while the shard's incarnation is unknown
        self._written = 0  # rows that it has ever had, as far as answers say
        self._gone = ""  # why it will never answer
        self._may_be_gone = False  # by the last greeting
        self._adopting: PendingCall | None = None  # of one that came back without a layout
        self._trouble = ""  # why it has none still
        self._totals: ShardTotals | None = None
        #: How often it stopped to answer.
        self.outages = 0
        #: Of the rows: a shard that comes back without one gets it. None: not known yet.
        self.layout: bytes | None = None

    def _greet(self) -> PendingCall:
        return self._link.call("facts", __version__)

    @property
    def is_present(self) -> bool:
        """Whether it answers, as far as is known without waiting.

        Raises:
            ShardVersionError: it runs another version of engram; so do all calls of it.
        """
        if self._greeting is not None:
            self._look(0.0)
        return self._greeting is None

    @property
    def is_awaited(self) -> bool:
        """Whether it did not answer a call, and has not been heard of since."""
        return self._greeting is not None

    @property
    def is_gone(self) -> bool:
        """Whether it is known never to answer again."""
        return bool(self._gone)

    @property
    def is_in_trouble(self) -> bool:
        """Whether it has said why it cannot serve."""
        return bool(self._trouble)

    @property
    def is_known(self) -> bool:
        """Whether it has ever answered."""
        return self._facts is not None

    @property
    def facts(self) -> ShardFacts:
        """The facts that the shard gave when it was last greeted.

        Raises:
            ShardUnavailableError: it never answered.
        """
        if self._facts is None:
            raise ShardUnavailableError(f"{self.name} has not answered yet")
        return self._facts

    @property
    def totals(self) -> ShardTotals:
        """The shard's contents at its last answer; errors as `facts`."""
        return self.facts.totals if self._totals is None else self._totals

    def await_presence(self, deadline: float) -> ShardFacts:
        """Waits until it answers.

        Raises:
            ShardUnavailableError: it has not until then.
            ShardGoneError: it never will; at once.
        """
        quiet_until = time.monotonic() + _QUIET
        while self._greeting is not None:
            left = deadline - time.monotonic()
            self._look(max(0.0, min(left, _QUIET)))
            if self._greeting is not None and quiet_until <= time.monotonic() < deadline:
                self._say_that_it_is_waited_for(deadline)
                quiet_until = deadline
            if self._greeting is not None and self._gone:
                raise ShardGoneError(
                    f"{self.name} has ended and is not started again: {self._gone}. Its rows in the memory of "
                    "a machine are lost; those in a scratch_dir are there for a new buffer with the same one, and "
                    "`loads` brings back what was saved"
                )
            if self._greeting is not None and left <= 0:
                raise ShardUnavailableError(
                    f"{self.absence}; it is asked again at each call. Which of its rows are there it says when it is "
                    "back"
                )
            if self._greeting is not None:
                time.sleep(min(_PAUSE, max(0.0, left)))
        return self.facts

    @property
    def absence(self) -> str:
        """In words, that it is away, and why as far as that is known."""
        if self._trouble:
            return f"{self.name} was started again, and cannot make its store: {self._trouble}"
        return f"{self.name} does not answer"

    def _say_that_it_is_waited_for(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        log.warning("%s; waiting for it, %.3g seconds more at most", self.absence, left)

    def _look(self, timeout: float) -> None:
        """Takes in what it says of itself, if that has come within so many seconds."""
        greeting = self._greeting
        if greeting is None:  # another thread has just done so
            return
        try:
            facts: ShardFacts = greeting.result(timeout)
        except ShardUnavailableError as error:
            with self._lock:
                if self._greeting is greeting:
                    self._take_in_refusal(error)
            return
        except TimeoutError:
            return
        with self._lock:
            if self._greeting is greeting:
                self._take_in(facts)

    def _take_in_refusal(self, error: ShardUnavailableError) -> None:
        """Only a second greeting in a row, begun after the first was refused, is believed that the shard is gone.

        One that was on its way while the shard's node died may be told so, too, of a shard that is started again.
        """
        is_gone = isinstance(error, ShardGoneError)
        self._gone = str(error) if is_gone and self._may_be_gone else ""
        self._may_be_gone = is_gone
        self._greeting = self._greet()

    def _take_in(self, facts: ShardFacts) -> None:
        if facts.layout is None and self.layout is not None:
            self._trouble = self._refusal_of_layout()
            self._adopting = self._link.call("adopt", facts.totals.incarnation, self.layout)
            self._greeting = self._greet()  # which comes after it
            return
        self._greeting, self._gone, self._may_be_gone = None, "", False
        self._adopting, self._trouble = None, ""
        before, written = self._facts, facts.totals.writes
        if before is not None and self.totals.incarnation == facts.totals.incarnation:
            self._facts = facts  # as it was when it was greeted: answers since then are newer
            return
        if before is not None and facts.replaced <= before.replaced and written < self._written:
            warnings.warn(
                f"{self.name} came back without {self._written - written} rows that it had: they were in the "
                "memory of a machine that is gone, or not yet on the disk at a power cut. All others are there",
                RuntimeWarning,
                stacklevel=2,
            )
        self._facts, self._written = facts, written
        self._totals = facts.totals

    def _refusal_of_layout(self) -> str:
        """Why it did not take the layout that it was told, if it said so; that call was made before the greeting."""
        if self._adopting is None:
            return ""
        try:
            self._adopting.result(0.0)
        except (IncarnationError, ShardUnavailableError, TimeoutError):  # it has begun another life since
            return ""
        except Exception as error:  # whatever it is, the shard has no store
            return f"{type(error).__name__}: {error}"
        return ""

    def ask_facts(self) -> PendingCall:
        """Asks a shard that answers what it says of itself now, for `take_facts`."""
        return self._greet()

    def take_facts(self, facts: ShardFacts) -> None:
        """Takes in what it said; one that has begun another life is greeted anew."""
        if facts.totals.incarnation != self.totals.incarnation:
            self._lose()
            return
        with self._lock:
            self._facts, self._totals = facts, facts.totals
            self._written = max(self._written, facts.totals.writes)

    # ---- calls ----
    def begin(self, method: str, *arguments: Any, answer_bytes: int = 0, life: int | None = None) -> PendingCall:
        """Begins a call in the life that is known, or in this one; `answer_bytes` as `ShardLink.call`."""
        life = self.totals.incarnation if life is None else life
        return self._link.call(method, life, *arguments, answer_bytes=answer_bytes)

    def finish(self, call: PendingCall, deadline: float) -> Any:
        """The answer of a call.

        Raises:
            ShardUnavailableError: it does not answer until then, or has begun another life: whether it carried the
                call out is not known. It counts as away until it has answered again.
        """
        left = max(0.0, deadline - time.monotonic())
        if left > _QUIET:
            try:
                return self.answer_within(call, _QUIET)
            except ShardUnavailableError:
                raise
            except TimeoutError:
                self._say_that_it_is_waited_for(deadline)
                left = max(0.0, deadline - time.monotonic())
        try:
            return self.answer_within(call, left)
        except ShardUnavailableError:
            raise
        except TimeoutError as error:
            self._lose()
            raise ShardUnavailableError(f"{self.name} does not answer") from error

    def answer_within(self, call: PendingCall, timeout: float) -> Any:
        """The answer of a call, which may be waited for again.

        Raises:
            TimeoutError: it has not come within so many seconds.
            ShardUnavailableError: it will not come; as `finish`.
        """
        try:
            answer = call.result(timeout)
        except IncarnationError as error:
            self._lose()
            raise ShardUnavailableError(f"{self.name} has begun another life: {error}") from error
        except ShardUnavailableError as error:
            self._lose()
            raise ShardUnavailableError(f"{self.name} does not answer: {error}") from error
        totals = answer.totals if isinstance(answer, Acknowledgement | TakenRows | DrawnRows) else answer
        if isinstance(totals, ShardTotals):
            with self._lock:
                self._totals = totals
                self._written = max(self._written, totals.writes)
        return answer

    def ask(self, deadline: float, method: str, *arguments: Any) -> Any:
        """The answer of a call that may be made twice: it is made again, where it or its answer was lost.

        Errors as `await_presence`.
        """
        return self.ask_with_life(deadline, method, *arguments)[0]

    def ask_with_life(self, deadline: float, method: str, *arguments: Any) -> tuple[Any, int]:
        """The same, and the incarnation that answered."""
        while True:
            self.await_presence(deadline)
            life = self.totals.incarnation
            try:
                return self.finish(self.begin(method, *arguments, life=life), deadline), life
            except ShardUnavailableError:
                if time.monotonic() > deadline:
                    raise

    def ask_once(self, deadline: float, method: str, *arguments: Any) -> Any:
        """The answer of a call that is made once; errors as `finish`, and `await_presence`."""
        self.await_presence(deadline)
        return self.finish(self.begin(method, *arguments), deadline)

    def forget(self, written: int = 0) -> None:
        """Greets it anew at the next use: it has ended, or begun another life, as this client knows without a call.

        Args:
            written: how many rows it has ever had, as far as the caller has seen.
        """
        with self._lock:
            self._written = max(self._written, written)
        self._lose()

    def _lose(self) -> None:
        with self._lock:
            if self._greeting is None:
                self.outages += 1
                self._greeting = self._greet()


def raise_if_gone(shards: Sequence[ShardClient]) -> None:
    """ShardGoneError where none of these shards, of which there is one at least, will ever answer again."""
    if all(shard.is_gone for shard in shards):
        shards[0].await_presence(0.0)


def absences(shards: Iterable[ShardClient]) -> str:
    """What is known of why shards are away, for the end of a message; "": nothing."""
    return "".join(f". {shard.absence}" for shard in shards if shard.is_in_trouble)


def finish_all(calls: Sequence[tuple[ShardClient, PendingCall]], deadline: float) -> list[Any]:
    """The answers of calls of several shards, which wait beside each other; None for a shard that is away.

    They are looked at in turn, so one that does not come takes no time from the others; and a shard that has not
    answered an earlier call is not waited for again. Errors of a shard are raised here.
    """
    answers: list[Any] = [None] * len(calls)
    waiting, patience = list(range(len(calls))), _PAUSE
    while waiting:
        is_last, still = time.monotonic() >= deadline, []
        for k in waiting:
            shard, call = calls[k]
            left = 0.0 if shard.is_awaited else max(0.0, deadline - time.monotonic())
            try:
                answers[k] = shard.answer_within(call, left if len(waiting) == 1 else min(patience, left))
            except ShardUnavailableError:
                continue
            except TimeoutError:
                if is_last:
                    shard.forget()
                if not shard.is_awaited:
                    still.append(k)
        waiting, patience = still, 2 * patience  # longer each time: one that is fetched is not begun again and again
    return answers


class _Rows(NamedTuple):
    block: Block
    priority: Tensor | None  # float64 [n]; NaN: none was given

    @classmethod
    def joined(cls, some: Sequence[_Rows]) -> _Rows:
        if len(some) == 1:
            return some[0]
        priorities = None
        if any(rows.priority is not None for rows in some):
            none = torch.full((max(len(rows.block) for rows in some),), torch.nan, dtype=torch.float64, device="cpu")
            priorities = torch.cat([none[: len(r.block)] if r.priority is None else r.priority for r in some])
        return cls(Block.joined([rows.block for rows in some]), priorities)

    def rest(self, start: int) -> _Rows:
        return _Rows(self.block.rest(start), None if self.priority is None else self.priority[start:])


class _SentBlock(NamedTuple):
    first: int  # the number of its first row in the tenancy
    rows: _Rows
    call: PendingCall | None  # None: it was lost, and is sent again
    began: float  # when it was sent
    asks_slots: bool


class Producer:
    """One producer's rows on their way to one shard: each is stored once and in order, whichever process dies.

    Calls are on their way beside each other; what was not acknowledged is kept, and sent again after the shard was
    away. A shard that lost the tenancy gives a new one, in which the rest is sent. Where rows come faster than calls
    are answered, some are held for a few milliseconds and sent together, as a call costs as much as thousands of rows.
    As long as the shard has told of late where the next rows go, nobody waits for an answer to learn that.

    Args:
        name: that no other producer has. A producer that continues the work of one that died takes its name.
        timeout: seconds that a call may wait.
    """

    def __init__(self, shard: ShardClient, name: str, timeout: float) -> None:
        self.shard = shard
        self.name = name
        self.timeout = timeout
        self._tenancy: Tenancy | None = None
        self._life = 0  # of the shard, that gave it
        self._sent: collections.deque[_SentBlock] = collections.deque()
        self._next = 0  # the number of the next row in the tenancy
        self._acknowledged = 0
        self._credit = 0
        self._before = 0  # acknowledged rows of tenancies before
        self._lock = threading.RLock()  # of all this: rows that are held are sent by a thread of their own
        self._held: list[_Rows] = []  # which follow on those that were sent
        self._held_bytes = 0
        self._held_priority: float | None = None
        self._place: Place | None = None  # of the next row
        self._place_ends = 0.0  # when it is not certain any more
        self._told: Tensor | None = None  # the slots of the last rows of which they were asked
        self._waits_until: float | None = None  # with what is to be sent again, as the shard has said
        self._timer: threading.Timer | None = None

    @property
    def has_joined(self) -> bool:
        """Whether it has a tenancy, as far as it knows."""
        return self._tenancy is not None

    @property
    def in_tenancy(self) -> int:
        """How many of `acknowledged` are of the tenancy."""
        return self._acknowledged

    @property
    def acknowledged(self) -> int:
        """How many rows this producer's shard has acknowledged, over all tenancies of this object."""
        return self._before + self._acknowledged

    @property
    def unacknowledged(self) -> int:
        """How many rows are on their way."""
        return self._next - self._acknowledged

    def extend(
        self,
        block: Block,
        new_priority: float | None = None,
        deadline: float | None = None,
        priority: Tensor | None = None,
        goes_on: bool = False,
    ) -> Tensor:
        """Sends rows; returns the slots of the shard that they go to, int64 [n].

        It waits where too many rows are on their way (`Acknowledgement.credit`), for `timeout` or until `deadline`.

        Args:
            new_priority, priority: as `ReplayShard.extend`.
            goes_on: others of the same call were sent: these follow them without waiting, however many they are.

        Raises:
            ShardUnavailableError: the shard is away, and it cannot wait for it longer: these rows were not sent. Those
                before them are kept, and go in when it is back.
        """
        deadline = time.monotonic() + self.timeout if deadline is None else deadline
        with self._lock:
            if self._tenancy is None:
                self._join(deadline)
            while self._sent and not goes_on and not self._may_send(len(block)):
                self._send_held()
                self._settle(deadline, (len(self._sent) + 1) // 2)  # fewer waits, each of which costs as much as a call
            self._look_for_place(len(block))
            slots = self._next_slots(len(block))
            self._send_or_hold(block, new_priority, priority, asks_slots=slots is None)
            return self._slots_told(deadline, len(block)) if slots is None else slots

    def _look_for_place(self, n: int) -> None:
        """Takes in what answers that have come say of the place of n rows, where it is not known."""
        if self._sent and not self._knows_place(n) and not self._held:
            newest = self._sent[-1].call
            if newest is not None and newest.has_come():
                self._hear(len(self._sent), time.monotonic())

    def _knows_place(self, n: int) -> bool:
        return self._place is not None and n <= self._place.rows and time.monotonic() < self._place_ends

    def _next_slots(self, n: int) -> Tensor | None:
        """The slots of the next n rows; None: they are known when the rows are in."""
        place = self._place
        if place is None or not self._knows_place(n):
            self._place = None
            return None
        self._place = place._replace(sequence=place.sequence + n, rows=place.rows - n)
        at = place.sequence % place.capacity
        if at + n <= place.capacity:
            return torch.arange(place.first_slot + at, place.first_slot + at + n, device="cpu")
        return place.first_slot + torch.arange(at, at + n, device="cpu") % place.capacity

    def _slots_told(self, deadline: float, n: int) -> Tensor:
        """The slots of the n rows that were sent last, when they are in."""
        self._told = None
        try:
            for _ in range(_TRIES):
                if self._sent:
                    self._settle(deadline)
        except ShardUnavailableError:  # the rows are kept, and sent again; where they will lie nobody knows
            pass
        return torch.zeros(n, dtype=torch.int64, device="cpu") if self._told is None else self._told[-n:].clamp(min=0)

    def send_held(self) -> bool:
        """Sends rows that are held; False, and nothing is done, while another thread writes."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._send_held()
        finally:
            self._lock.release()
        return True

    def open(self, deadline: float | None = None) -> None:
        """Joins, if it has not yet: from then on `acknowledged` says what is in. Errors as `extend`."""
        with self._lock:
            if self._tenancy is None:
                self._join(time.monotonic() + self.timeout if deadline is None else deadline)

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all rows are in.

        Raises:
            ShardUnavailableError: they are not within so many seconds; those that are missing are kept.
        """
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        with self._lock:
            self._send_held()
            while self._sent:
                self._settle(deadline)

    def leave(self, deadline: float | None = None) -> None:
        """Ends the tenancy, when all rows are in, for `timeout` or until `deadline`; errors as `flush`."""
        deadline = time.monotonic() + self.timeout if deadline is None else deadline
        with self._lock:
            self._send_held()
            while self._sent:
                self._settle(deadline)
            while self._tenancy is not None:
                try:  # the answer may be lost, and the tenancy have ended: that is told again, and no new one is begun
                    count = int(self.shard.ask(deadline, "leave", self.name, self._tenancy.number))
                except ValueError:  # it has begun another life, without this tenancy
                    self._join(deadline)
                    while self._sent:
                        self._settle(deadline)
                    continue
                self._end(max(count, self._acknowledged))

    # ---- inside ----
    def _send_or_hold(
        self, block: Block, new_priority: float | None, priority: Tensor | None, asks_slots: bool
    ) -> None:
        """Sends rows, or holds them while others are on their way: of a producer that is slower none is ever held."""
        if self._held_bytes + block.nbytes > _MOST_HELD:
            self._send_held()
        self._held_bytes += block.nbytes
        # Rows that travel leaf by leaf may lie in the caller's memory, which may change before they are stored.
        self._held.append(_Rows(block if len(block.parts) == 1 else Block.joined([block]), priority))
        if new_priority is not None:
            self._held_priority = max(new_priority, self._held_priority or 0.0)
        self._next += len(block)
        if asks_slots:
            return self._send_held(asks_slots)
        if len(self._held) > 1:
            return
        newest = self._sent[-1].call if self._sent else None
        if newest is None or block.nbytes > _MOST_HELD or newest.has_come():
            self._send_held()
        elif self._timer is None:
            self._timer = threading.Timer(_LONGEST_HELD, self._send_after_a_while)
            self._timer.daemon = True
            self._timer.start()

    def _send_after_a_while(self) -> None:
        with self._lock:
            self._timer = None
            self._send_held()

    def _send_held(self, asks_slots: bool = False) -> None:
        """Sends the rows that are held, in one call."""
        if not self._held:
            return
        held, self._held, self._held_bytes = self._held, [], 0
        new_priority, self._held_priority = self._held_priority, None
        rows = _Rows.joined(held)
        self._send(self._next - len(rows.block), rows, new_priority, asks_slots)

    def _may_send(self, n: int) -> bool:
        is_lost = self._sent[0].call is None
        on_their_way = self._next - self._acknowledged
        return not is_lost and len(self._sent) < _MOST_CALLS and on_their_way + n <= self._credit

    def _send(self, first: int, rows: _Rows, new_priority: float | None = None, asks_slots: bool = False) -> None:
        assert self._tenancy is not None
        more = (rows.priority, asks_slots) if asks_slots else () if rows.priority is None else (rows.priority,)
        began = time.monotonic()
        # Another thread may know already that the shard has begun another life, which did not give this tenancy.
        call = self.shard.begin(
            "extend", self.name, self._tenancy.number, first, rows.block, new_priority, *more, life=self._life
        )
        self._sent.append(_SentBlock(first, rows, call, began, asks_slots))

    def _settle(self, deadline: float, calls: int | None = None) -> None:
        """Waits for the acknowledgements of the oldest calls (None: of all); sends again what was lost."""
        calls = len(self._sent) if calls is None else calls
        while self._sent[0].call is not None:
            if self._hear(calls, deadline):
                return
            until = self._waits_until
            if until is not None and until <= deadline:
                time.sleep(max(0.0, until - time.monotonic()))
                self._send_again()
                continue
            if until is not None or time.monotonic() > deadline:
                self.shard.await_presence(deadline)
                why = "rows for it were lost on their way each time" if until is None else (
                    "rows for it need room that it keeps for a moment for others, longer than this call may wait: they "
                    "are kept, and go in later"
                )  # fmt: skip
                raise ShardUnavailableError(f"{self.shard.name} answers, and {why}")
            break
        self._join(deadline)

    def _hear(self, calls: int, deadline: float) -> bool:
        """Waits for the acknowledgements of the oldest calls; False: they were lost, or refused, or it has to wait."""
        self._waits_until = None
        try:
            answer = self._acknowledgement_of(calls, deadline)
        except ShardUnavailableError:
            self._lose()
            return False
        except BaseException:
            self._lose()
            raise
        if answer.wait is not None:
            self._waits_until = time.monotonic() + answer.wait
        if answer.wait is not None or not answer.in_force:
            self._lose()
            return False
        self._take_in(answer, [self._sent.popleft() for _ in range(calls)][-1])
        return True

    def _send_again(self) -> None:
        """Makes all calls again, in the same tenancy; rows that are in are left out there."""
        waiting, self._sent = self._sent, collections.deque()
        for sent in waiting:
            self._send(sent.first, sent.rows, asks_slots=sent.asks_slots)

    def _take_in(self, answer: Acknowledgement, sent: _SentBlock) -> None:
        self._acknowledged, self._credit = answer.rows, answer.credit
        if answer.slots is not None:
            self._told = answer.slots
        on_their_way = self._next - (sent.first + len(sent.rows.block))
        self._place = None
        if answer.place is not None and answer.place.rows >= on_their_way:
            place, self._place_ends = answer.place, sent.began + PLACE_HOLDS
            self._place = place._replace(sequence=place.sequence + on_their_way, rows=place.rows - on_their_way)

    def _acknowledgement_of(self, calls: int, deadline: float) -> Acknowledgement:
        """The answer of the last of the oldest calls. It counts the rows of the calls before it, too."""
        *before, last = (sent.call for sent in itertools.islice(self._sent, calls))
        assert last is not None
        try:
            answer: Acknowledgement = self.shard.finish(last, deadline)
        except ShardUnavailableError:
            raise
        except Exception:
            for call in before:  # the first one that was refused says why
                assert call is not None
                self.shard.finish(call, deadline)
            raise
        return answer

    def _lose(self) -> None:
        """Nothing is known of the calls that are on their way: they are made again."""
        self._sent = collections.deque(sent._replace(call=None) for sent in self._sent)
        self._place = None

    def _join(self, deadline: float) -> None:
        """Gets a tenancy, or the one that it has, and sends again what is not in."""
        before = self._tenancy
        tenancy = self._ask_to_join(deadline)
        if before is None:
            count = 0
            self._next = tenancy.rows
            self._acknowledged, self._tenancy = tenancy.rows, tenancy
        elif tenancy.number == before.number and tenancy.rows >= self._acknowledged:
            count, self._acknowledged = tenancy.rows, tenancy.rows
        else:
            if tenancy.number == before.number:  # a power cut took rows that were acknowledged
                self.shard.ask(deadline, "leave", self.name, tenancy.number)
                tenancy = self._ask_to_join(deadline)
                count = self._acknowledged
            else:
                ended = tenancy.ended
                told = ended is not None and ended[0] == before.number
                count = max(self._acknowledged, ended[1] if told and ended is not None else 0)
            self._before += count
            # The remaining rows get new numbers, from where the old tenancy ended.
            self._sent = collections.deque(sent._replace(first=sent.first - count, call=None) for sent in self._sent)
            self._next -= count
            count, self._tenancy, self._acknowledged = tenancy.rows, tenancy, tenancy.rows
        waiting, self._sent = self._sent, collections.deque()
        for sent in waiting:
            # Rows that are in go along where they came with priorities: the shard may have ended between the two.
            known = max(0, (count if sent.rows.priority is None else 0) - sent.first)
            rest = sent.rows.rest(known) if known else sent.rows
            if len(rest.block):
                self._send(sent.first + known, rest, asks_slots=sent.asks_slots)

    def _ask_to_join(self, deadline: float) -> Tenancy:
        tenancy: Tenancy
        tenancy, self._life = self.shard.ask_with_life(deadline, "join", self.name)
        return tenancy

    def _end(self, count: int) -> None:
        self._before += count
        self._tenancy, self._next, self._acknowledged = None, 0, 0
