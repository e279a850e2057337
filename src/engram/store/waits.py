"""How somebody waits for others at a store, who can end that, and what is said meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import engram._native as _native
from engram._text import warn_user

if TYPE_CHECKING:
    from engram.store.lanes import Lanes

_PAUSE = 5e-5  # seconds that a wait sleeps between two looks, rising as this share of what it has lasted up to
_PAUSE_SHARE = 0.05
_LONGEST_PAUSE = 2e-3
_FIRST_WARNING = 10.0  # seconds
_NEXT_WARNINGS = 60.0
_LET_OTHERS_GO = 2e-4  # seconds that a writer who has not waited for room leaves to those who do
_NOTED_EACH = 0.5  # seconds of a wait are added to the store's


class HopelessError(RuntimeError):
    """Nobody can end a wait."""


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.is_let_through = False
        self.also: Callable[[], object] | None = None
        self.has_waited = False


_of_thread = _OfThread()


@contextlib.contextmanager
def let_through() -> Iterator[None]:
    """A block in which writes of this thread do not wait: who writes there has looked before it made the rows."""
    before, _of_thread.is_let_through = _of_thread.is_let_through, True
    try:
        yield
    finally:
        _of_thread.is_let_through = before


def is_let_through() -> bool:
    return _of_thread.is_let_through


def let_others_go(queue: _native.StoreQueue) -> None:
    """Before a write to a queue: a moment for those who wait for room, unless this thread has just waited itself.

    Else a writer that is back at once would take all room, and those that look now and then would find none.
    """
    if queue.some_writer_waits and not _of_thread.has_waited:
        time.sleep(_LET_OTHERS_GO)
    _of_thread.has_waited = False


def note_waited() -> None:
    """This thread waits for room in a queue."""
    _of_thread.has_waited = True


@contextlib.contextmanager
def while_waiting(also: Callable[[], object]) -> Iterator[None]:
    """A block in whose waits this thread calls a function again and again, whose errors end them."""
    before, _of_thread.also = _of_thread.also, also
    try:
        yield
    finally:
        _of_thread.also = before


class Wait(NamedTuple):
    """How somebody waits, and what is said of it.

    Attributes:
        ready: whether it is over; what it found is the result of the wait.
        lacks: says who waits for what.
        hopeless: why nobody can end it, and what to do; "": somebody may.
        ended: why it ends without what it waited for; "": it goes on.
        note: is told the seconds that it lasts, some at a time.
    """

    ready: Callable[[], bool]
    lacks: Callable[[], str]
    hopeless: Callable[[], str]
    ended: Callable[[], str]
    note: Callable[[float], None]

    def __call__(self, deadline: float | None) -> None:
        """Waits until it is `ready`.

        What a thread has to do while it waits (`while_waiting`) it does.

        Raises:
            TimeoutError: it is not until `deadline`, of `time.monotonic`.
            RuntimeError: it has ended; or, without a deadline, it never will be.
        """
        if self.ready():
            return
        began = noted = time.monotonic()
        warning = began + _FIRST_WARNING
        self.note(0.0)
        try:
            while True:
                now = time.monotonic()
                if ended := self.ended():
                    raise RuntimeError(ended)
                if deadline is None and (reason := self.hopeless()):
                    raise HopelessError(f"{self.lacks()}. {reason}")
                if (also := _of_thread.also) is not None:
                    also()
                if deadline is not None and now >= deadline:
                    raise TimeoutError(self.lacks())
                if now >= warning:
                    warn_user(f"{now - began:.0f} s by now: {self.lacks()}", RuntimeWarning)
                    warning = now + _NEXT_WARNINGS
                if now - noted > _NOTED_EACH:
                    self.note(now - noted)
                    noted = now
                # Longer the longer it lasts, and the same for all that wait since the same event.
                pause = min(max(_PAUSE, (now - began) * _PAUSE_SHARE), _LONGEST_PAUSE)
                time.sleep(pause if deadline is None else max(0.0, min(pause, deadline - now)))
                if self.ready():
                    return
        finally:
            self.note(time.monotonic() - noted)


def nobody_else(lanes: Lanes) -> bool:
    """Whether these rows are in memory of this process alone, which has no other thread that could do something."""
    others = (t for t in threading.enumerate() if t is not threading.current_thread())
    return lanes.copied_by_fork and not any(t.is_alive() and not _only_serves(t.name) for t in others)


def _only_serves(thread: str) -> bool:
    """Whether a thread of this name is one of ours that use no buffer by themselves, or hands descriptors to other
    processes (`multiprocessing.resource_sharer`)."""
    return thread.startswith("engram-") or thread.endswith("(_serve)")


def writers_shown(lanes: Lanes) -> str:
    """The processes that wrote last, and whether they live; "" where the store does not tell."""
    store, locks = lanes.store, lanes.locks
    if locks is None:
        return ""
    seen: dict[int, tuple[float, bool]] = {}
    for lane in range(store.lanes):
        if not (number := store.last_writer(lane)):
            continue
        pid, at = number & ((1 << _native.PID_BITS) - 1), store.lane(lane)["written_at"] / 1e9
        lives = number == store.writer or locks.is_writer_alive(number >> _native.PID_BITS)
        before = seen.get(pid, (0.0, False))
        seen[pid] = max(before[0], at), before[1] or lives
    now = time.time()
    shown = []
    for pid, (at, lives) in seen.items():
        ago = f" wrote {max(0.0, now - at):.1f} s ago" if at else ""
        shown.append(f"process {pid}{ago if lives else ' has ended'}" + ("" if ago or not lives else " is there"))
    return f"; writers: {', '.join(shown)}" if shown else "; no process has written to it yet"
