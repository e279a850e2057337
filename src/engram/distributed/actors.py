"""Actors of a Ray cluster as the workers of a pool: each answers its calls in their order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from engram.distributed.ray_buffer import import_ray
from engram.errors import WorkerError

BATCH = "a batch"


class ActorLostError(WorkerError):
    """The process of an actor, or its node, has died, or it was ended; `how` says it in words."""

    def __init__(self, worker: str, how: str, error: object) -> None:
        super().__init__(worker, reason=how)
        self.how, self.why = how, error


class RayWorker:
    """An actor, and the calls of it that have not been answered."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self.actor = name, actor
        self._placed = actor.place.remote()  # it has an answer once the process runs
        self._calls: deque[tuple[Any, str]] = deque()
        self._since: float | None = None  # when its present activity was first seen

    def post(self, call: Callable[[Any], Any], what: str = BATCH) -> None:
        """Makes a call: `call` is given the actor. `what` names it where it takes too long."""
        self._calls.append((call(self.actor), what))

    @property
    def is_asked(self) -> bool:
        """Whether it owes an answer."""
        return bool(self._calls)

    def next_call(self) -> Any:
        """The reference of the next answer."""
        return self._calls[0][0]

    def receive(self) -> Any:
        """Waits for the next answer.

        Raises:
            WorkerError: the call failed, with its traceback.
            ActorLostError: there is no actor any more, or its answer was lost on the way.
        """
        reference, _ = self._calls.popleft()
        self._since = None
        try:
            return import_ray().get(reference)
        except import_ray().exceptions.RayTaskError as error:
            raise WorkerError(self.name, str(error)) from error.cause
        except import_ray().exceptions.RayError as error:
            raise ActorLostError(self.name, f"died ({type(error).__name__})", error) from error

    def reading(self) -> tuple[float, str] | None:
        """As of a `Worker`: the time begins at the first look at a running process, and anew with each call."""
        if not self._calls or has_come(self.next_call()) or not has_come(self._placed):
            return None
        if self._since is None:
            self._since = time.monotonic()
        return time.monotonic() - self._since, self._calls[0][1]

    def kill(self, reason: str) -> NoReturn:
        """Ends its process, even a busy or hanging one."""
        self.close(0.0)
        raise ActorLostError(self.name, f"was ended, as {reason},", reason)

    def close(self, timeout: float) -> None:
        """Ends its process at once."""
        import_ray().kill(self.actor)


class RayActors:
    """The transport to actors of a class, which has the methods `place` and `close`.

    A worker is started with the options of its actor.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._ready: list[Any] = []  # answers that had come at the last look, which costs as much for one as for all

    def start(self, name: str, args: Sequence[Any], *, before: RayWorker | None, life: int, timed: bool) -> RayWorker:
        """Makes an actor. Ray itself does not restart it: first is counted what the one before has written."""
        return RayWorker(name, import_ray().remote(**{**args[0], "max_restarts": 0})(self._kind).remote())

    def wait_for_any(self, workers: Sequence[RayWorker], timeout: float | None) -> list[RayWorker]:
        """Waits for answers."""
        calls = {worker.next_call(): worker for worker in workers if worker.is_asked}
        if not calls:
            return []
        self._ready = [reference for reference in self._ready if reference in calls]
        if not self._ready:
            self._ready, rest = import_ray().wait(list(calls), num_returns=1, timeout=timeout)
            if self._ready and rest:
                self._ready += import_ray().wait(rest, num_returns=len(rest), timeout=0)[0]
        return [calls[reference] for reference in self._ready[:1]]

    def close_all(self, workers: Iterable[RayWorker], timeout: float) -> None:
        """Has actors close themselves for so many seconds (0: not at all), then ends their processes."""
        if not import_ray().is_initialized():
            return
        workers = list(workers)
        if timeout:
            closing = [worker.actor.close.remote() for worker in workers]
            import_ray().wait(closing, num_returns=len(closing), timeout=timeout)
        for worker in workers:
            worker.close(0.0)


def has_come(reference: Any) -> bool:
    """Whether a call has been answered, or failed; nothing is fetched."""
    return bool(import_ray().wait([reference], timeout=0, fetch_local=False)[0])
