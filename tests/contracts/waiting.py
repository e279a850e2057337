"""How long a test waits for what comes at once where nothing else runs, who waits, and what a process leaves behind."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest
    from _typeshed import HasFileno

#: Seconds after which what a test waits for does not come any more, however many programs run beside it.
NEVER = 120


def allowed(seconds: float) -> float:
    """Seconds that something may take that takes fewer than `seconds` on a machine of its own.

    More, in proportion, where other programs want the same cores.
    """
    with open("/proc/loadavg") as file:
        fields = file.read().split()
    running = max(float(fields[0]), float(fields[3].split("/")[0]))
    return seconds * (2 + 4 * running / len(os.sched_getaffinity(0)))


def comes(what: Callable[[], object], within: float = NEVER) -> bool:
    """Whether `what` becomes true."""
    until = time.monotonic() + within
    while not what():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread that calls something, and what came of it."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def end(thread: threading.Thread) -> None:
    """What a thread does ends, and does not take for ever."""
    thread.join(NEVER)
    assert not thread.is_alive()


def is_taken(lock: Any) -> bool:
    """Whether another thread than this one would wait for a lock now."""

    def waits() -> bool:
        if lock.acquire(blocking=False):
            lock.release()
            return False
        return True

    with ThreadPoolExecutor(1) as another:
        return another.submit(waits).result()


def seems_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on a buffer in private memory takes no thread for one that may sample or write that is there now.

    So a wait that nobody can end is an error at once, whatever threads tests before have left in this process.
    """
    left = set(threading.enumerate()) - {threading.main_thread()}

    def nobody_else(lanes: Any) -> bool:
        others = set(threading.enumerate()) - left - {threading.current_thread()}
        # As the library itself says of its threads, and of those that hand descriptors to other processes.
        return lanes.copied_by_fork and all(t.name.startswith("engram-") or "(_serve)" in t.name for t in others)

    monkeypatch.setattr("engram.data.replay_buffers.buffers.waiting.nobody_else", nobody_else)


def can_be_read(file: int | HasFileno, within: float | None = NEVER) -> bool:
    """Whether a pipe or a socket gets something to read, or its end; None waits for ever."""
    poll = select.poll()  # select.select takes no file numbers from 1,024 on
    poll.register(file, select.POLLIN)
    return bool(poll.poll(None if within is None else within * 1000))


def is_gone(pid: int, within: float = NEVER) -> bool:
    """Whether a process ends."""
    return comes(lambda: not _runs(pid), within)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def has_named_memory(pid: int) -> bool:
    """Whether a process maps what would outlive it."""
    with open(f"/proc/{pid}/maps") as file:
        return any("/dev/shm" in line for line in file)
