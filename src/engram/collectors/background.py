"""Collecting in a thread into a replay buffer, while the caller samples from it and trains."""

from __future__ import annotations

import atexit
import math
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from tensordict import TensorDictBase

from engram._advice import advised
from engram._system import fork_registry, notice_fork
from engram._text import log
from engram.collectors.stats import CollectorStats, EpisodeStats, StepsWay, Throughput, collector_stats
from engram.data import ReplayBuffer
from engram.envs.policies import own_exploration_type
from engram.processes.worker import CLOSE_TIMEOUT
from engram.store.waits import while_waiting

_PATIENCE = 10.0  # seconds that a caller who has held the thread waits for its turn, while others hold it


class AwaitRoom(Protocol):
    """`ReplayBuffer.await_room`."""

    def __call__(self, *, stop: Callable[[], bool]) -> None: ...


class Abandoned(BaseException):
    """Raised in the thread where it waits for workers that the caller does not wait for any more."""


class BackgroundThread:
    """Calls `collect` in a thread until it returns False; pauses and ends between two calls.

    `finish` completes what `collect` has begun ahead; it is called before each pause and at the end. Before each call
    `room` is asked what waits until there is room for it (None: there is): then the thread is between two calls, and
    it leaves the wait, to which it comes back, for whoever pauses or ends it. All are methods of a collector, which the
    thread does not keep alive. An error, also of the wait, ends the thread, is logged at once, and is raised by
    `raise_failure`; `report` gets it, too, and None as soon as it is raised. `report_filling` is told that it
    begins, and ends.
    """

    def __init__(
        self,
        collect: Callable[[], bool],
        finish: Callable[[], None],
        room: Callable[[], AwaitRoom | None],
        report: Callable[[BaseException | None], None],
        report_filling: Callable[[bool], None],
        name: str,
    ) -> None:
        self._collect, self._finish = weakref.WeakMethod(collect), weakref.WeakMethod(finish)
        self._room = weakref.WeakMethod(room)
        self._report = weakref.WeakMethod(report)
        self._report_filling = weakref.WeakMethod(report_filling)
        self._name = name
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.after_fork()
        _live.add(self)

    def after_fork(self) -> None:
        """In a process that was forked the thread does not run."""
        self._turn = threading.Condition()
        self._thread = None
        # By hold, the thread that waits for this one to pause, or runs while it is paused.
        self._holds: dict[object, int] = {}
        self._had: set[int] = set()  # threads that have held this one since its last turn
        self._is_between = True  # between two calls, or not running
        self._is_active = self._is_stopping = self._is_abandoned = False

    @property
    def is_active(self) -> bool:
        """Whether the thread will collect more."""
        notice_fork()  # in a child it does not run
        return self._is_active

    @property
    def is_current(self) -> bool:
        """Whether it is this thread that asks."""
        return self._thread is threading.current_thread()

    def start(self) -> None:
        """Starts the thread; does nothing while it runs."""
        notice_fork()
        with self._turn:
            if self._is_active:
                return
            if self._thread is not None:
                self._thread.join()  # it needs nothing any more that is held here
            # A daemon: the interpreter waits for other threads before it would ask this one to end.
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._is_stopping, self._is_between, self._is_active = False, False, True
            try:
                self._thread.start()
            except Exception:  # the system has no room for a thread
                self._thread, self._is_between, self._is_active = None, True, False
                self._turn.notify_all()
                raise

    @contextmanager
    def held(self) -> Iterator[None]:
        """Waits until the thread is between two calls, and keeps it there; after it the thread has a turn.

        (A caller that holds it again and again would otherwise be back before the thread has woken, and several such
        callers would relieve each other. One that comes again waits for the turn, but not for ever: who holds the
        thread may be waiting for it.)
        """
        if self.is_current:
            yield
            return
        notice_fork()
        hold, me = object(), threading.get_ident()
        try:
            with self._turn:
                if me not in self._holds.values():
                    self._turn.wait_for(lambda: not self._is_active or me not in self._had, _PATIENCE)
                self._holds[hold] = me
                self._had.add(me)
                self._turn.wait_for(lambda: self._is_between)
            yield
        finally:
            with self._turn:
                self._holds.pop(hold, None)  # in a process that was forked inside it is not there
                if not self._holds:
                    self._had.clear()
                    if self._is_active:
                        self._is_between = False
                self._turn.notify_all()

    def stop(self, timeout: float | None = None) -> None:
        """Ends the thread after its current call. Raises TimeoutError where that takes longer than `timeout` s."""
        notice_fork()
        with self._turn:
            self._is_stopping = True
            self._turn.notify_all()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive():
            raise TimeoutError(f"{self._name} was still in the middle of a batch after {timeout} s")

    def abandon(self, timeout: float | None = None) -> None:
        """As `stop`, but ends the thread as soon as it waits for workers."""
        self._is_abandoned = True
        self.stop(timeout)

    def raise_if_abandoned(self) -> None:
        """Raises Abandoned in this thread after `abandon`."""
        if self._is_abandoned and self.is_current:
            raise Abandoned

    def raise_failure(self) -> None:
        """Raises the error that has ended the thread, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            self._call_report(None)
            raise failure

    def _run(self) -> None:
        own_exploration_type()
        self._call_report_filling(True)
        try:
            while self._may_collect() and (collect := self._collect()) is not None and self._call(collect):
                del collect  # the caller may drop the collector
            self._call_finish()
        except Abandoned:
            pass
        except BaseException as error:  # whatever it was, the caller's next call raises it
            self._failure = error
            log.error("%s has ended with an error, which the next call raises", self._name, exc_info=error)
            self._call_report(error)
        finally:
            self._call_report_filling(False)
            with self._turn:
                self._is_between, self._is_active = True, False
                self._turn.notify_all()

    def _call(self, collect: Callable[[], bool]) -> bool:
        with while_waiting(self.let_in):
            return collect()

    def let_in(self) -> bool:
        """Where a call waits in its middle, for room in a queue that others took: whoever pauses the thread gets it,
        and whoever ends it does not wait (what was not written then is lost). Whether somebody paused it.
        """
        if self._is_stopping:
            raise Abandoned
        if not self._holds:
            return False
        self._stand()
        return True

    def _may_collect(self) -> bool:
        """Waits until nobody holds the thread, and there is room for a batch; False: it is to end."""
        self._give_way()
        while not self._is_stopping and (await_room := self._call_room()) is not None:
            await_room(stop=self._is_wanted)
            self._give_way()
        return not self._is_stopping

    def _is_wanted(self) -> bool:
        """Whether there is something else to do than to wait for room."""
        return bool(self._holds) or self._is_stopping or self._collect() is None

    def _give_way(self) -> None:
        if self._holds or self._is_stopping:
            self._call_finish()
            self._stand()

    def _stand(self) -> None:
        """Lets those have the thread who hold it."""
        with self._turn:
            self._is_between = bool(self._holds)
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._is_stopping or not self._is_between)
            self._is_between = False

    def _call_room(self) -> AwaitRoom | None:
        room = self._room()
        return None if room is None else room()

    def _call_report_filling(self, begins: bool) -> None:
        if (report := self._report_filling()) is not None:
            report(begins)

    def _call_report(self, failure: BaseException | None) -> None:
        if (report := self._report()) is not None:
            report(failure)

    def _call_finish(self) -> None:
        if (finish := self._finish()) is not None:
            finish()


_live: weakref.WeakSet[BackgroundThread] = fork_registry(BackgroundThread.after_fork)


@atexit.register  # after the import of `engram.processes.worker`, so that threads end before workers do
def _stop_at_exit() -> None:
    for thread in list(_live):
        try:
            thread.abandon(CLOSE_TIMEOUT)
        except TimeoutError as error:
            log.warning("%s", error)


@advised
class BackgroundCollector:
    """Base of the collectors: with a replay buffer they can collect while the caller does other things.

    While one does (`start`), a batch after the other is written into the buffer until there are `total_frames`, and
    `rollout` and iterating raise RuntimeError. Methods of the state (`state_dict`, `set_seed`, `reset`, ...) wait
    until the batch that is being collected is written. An error of an environment, the policy or the buffer is logged
    at once and raised by the next call of the collector; the next write, batch, `len` or `write_count` of the buffer
    raises a RuntimeError whose cause it is. Python's threads take turns: see to it that the buffer is
    sampled in batches that are worth it.
    """

    total_frames: int
    frames: int
    batches: int
    frames_per_batch: int
    replay_buffer: Any
    _awaited: ReplayBuffer[Any] | None = None  # the buffer, where batches wait for its samplers before they are begun
    _background: BackgroundThread | None = None
    _failure: BaseException | None = None  # to be raised by the next call
    _episodes: EpisodeStats
    _throughput: Throughput
    _trajs_per_batch = 0

    @abstractmethod
    def rollout(self) -> Any:
        """Collects the next batch."""

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        """Collects a batch at a time until there are `total_frames`."""
        while self._failure is not None or self.total_frames < 0 or self.frames < self.total_frames:
            yield self.rollout()

    def iterator(self) -> Iterator[Any]:
        """As `iter(collector)`."""
        return iter(self)

    @property
    def stats(self) -> CollectorStats:
        """Frames, speed, and returns and lengths of the last episodes, of all workers, for a progress bar.

        Speeds count the time in which the caller waits for a batch. `collector.stats()` is a dict of them, which also
        says which way the steps of the last batch went ("steps", "columns" or "tensordicts"), and why no faster one.

        >>> from engram.collectors import SyncDataCollector
        >>> from engram.envs import GymEnv
        >>> collector = SyncDataCollector(GymEnv("CartPole-v1"), frames_per_batch=1)
        >>> _ = collector.rollout()
        >>> collector.stats.frames, collector.stats()["way"]
        (1, 'steps')
        """
        return collector_stats(self.frames, self.batches, self._episodes, self._throughput, self._steps_way)

    @property
    def _steps_way(self) -> StepsWay:
        """Which way the steps of the last batch went; "" where that is not known."""
        return StepsWay("", "the steps are made in other processes")

    @property
    def trajs_per_batch(self) -> int | None:
        """The number of whole trajectories in a batch; None where batches are so many frames."""
        return self._trajs_per_batch or None

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """The number of updates of the policy's weights."""

    def get_policy_version(self) -> int:
        """`policy_version`."""
        return self.policy_version

    def next(self) -> Any:
        """The next batch, as a loop over the collector gives it; StopIteration after `total_frames`."""
        return next(iter(self))

    @abstractmethod
    def shutdown(self, timeout: float | None = None, close_env: bool = True, *, raise_on_error: bool = True) -> None:
        """Ends collecting."""

    def start(self) -> None:
        """Starts to collect into the replay buffer, in the background; does nothing where it does already.

        A single collector steps in a thread, one with workers asks them for batches. A policy that is the caller's own
        object acts with the weights that it has at each step; a copy (`policy_device`, `policy_factory`, worker
        processes) with those of the last `update_policy_weights_`, from the next batch on.

        Raises RuntimeError without a replay buffer and after `shutdown`.

        >>> from engram.collectors import SyncDataCollector
        >>> from engram.data import LazyTensorStorage, ReplayBuffer
        >>> from engram.envs import GymEnv
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
        >>> collector = SyncDataCollector(
        ...     lambda: GymEnv("CartPole-v1"), frames_per_batch=50, total_frames=200, replay_buffer=rb
        ... )
        >>> collector.start()
        >>> while collector.is_running():
        ...     with collector.pause():
        ...         batch = rb.sample() if len(rb) else None
        >>> collector.async_shutdown()
        >>> collector.frames, len(rb)
        (200, 200)
        """
        self._raise_background_failure()
        if self.replay_buffer is None:
            raise RuntimeError("collecting in the background fills a replay buffer; give replay_buffer=")
        self._refuse_if_shut_down()
        if self._background is None:
            name = f"the background thread of {type(self).__name__}"
            self._background = BackgroundThread(
                self._collect_next,
                self._finish_batches,
                self._room_for_next,
                self._report_failure,
                self._report_filling,
                name,
            )
        self._background.start()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """`with collector.pause():` a block in which nothing is collected; begun batches are in the buffer.

        Between two pauses at least a batch is collected, if the replay buffer's rate limiter leaves room for one.
        """
        with self._between_batches():
            yield

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Waits until the batches that were begun are in the buffer, and shuts down; `frames` is then what it got.

        Raises the error that has ended collecting, if there was one; TimeoutError where it takes longer than `timeout`
        seconds (None: any time).
        """
        if self._background is not None:
            self._background.stop(timeout)
        self.shutdown(close_env=close_env)

    def is_running(self) -> bool:
        """Whether it collects in the background: True from `start` to `total_frames`, an error, or the end."""
        return self._background is not None and self._background.is_active

    def __len__(self) -> int:
        """The number of batches of `total_frames`. Raises TypeError where that is not known."""
        if self.total_frames < 0 or self._trajs_per_batch:
            raise TypeError("the number of batches is not known without total_frames, or with trajs_per_batch")
        return math.ceil(self.total_frames / self.frames_per_batch)

    def __bool__(self) -> bool:
        return True

    @abstractmethod
    def _refuse_if_shut_down(self) -> None:
        """Raises RuntimeError after `shutdown`."""

    def _collect_next(self) -> bool:
        """Collects a batch in the background; False where there is nothing left to do."""
        if self._has_all_frames:
            return False
        self.rollout()
        return True

    @property
    def _has_all_frames(self) -> bool:
        return 0 <= self.total_frames <= self.frames

    # ---- room in the buffer, where a rate limiter is, or a queue ----
    def _room_for_next(self) -> AwaitRoom | None:
        """In the background: what waits until the next batch may be begun; None: it may, or there is none."""
        return None if self._has_all_frames else self._room()

    def _room(self) -> AwaitRoom | None:
        """What waits until batches may be begun; None: they may."""
        buffer, rows = self._awaited, self.frames_per_batch
        return None if buffer is None or buffer.has_room_for(rows) else partial(buffer.await_room, rows=rows)

    def _note_newest_version(self, version: int) -> None:
        """Tells a queue which version of the policy trains by now: from it `max_staleness` counts."""
        if self._awaited is not None:
            self._awaited.note_policy_version(version)

    def _await_room(self) -> None:
        """Waits until a batch may be begun; the background thread, which must not wait in a call, has done so."""
        if self._background is not None and self._background.is_current:
            return
        if (await_room := self._room()) is not None:
            await_room(stop=self._refuse_shut_down)

    def _refuse_shut_down(self) -> bool:
        self._refuse_if_shut_down()  # by another thread
        return False

    def _report_failure(self, failure: BaseException | None) -> None:
        """Tells the replay buffer of the error that has ended collecting, and None when it is raised."""
        if isinstance(self.replay_buffer, ReplayBuffer):
            self.replay_buffer.report_failure(failure)

    def _report_filling(self, begins: bool) -> None:
        """Tells the replay buffer that it is filled in the background from now on, or no more."""
        if isinstance(self.replay_buffer, ReplayBuffer):
            self.replay_buffer.report_filling(begins)

    def _finish_batches(self) -> None:
        """Waits for batches that were begun ahead."""

    def _refuse_beside_background(self) -> None:
        """Raises the error that ended collecting in the background, and RuntimeError while it runs."""
        if self._background is None or self._background.is_current:
            return
        if self._background.is_active:
            raise RuntimeError("this collector is collecting in the background: sample from its replay buffer")
        self._background.raise_failure()

    def _raise_background_failure(self) -> None:
        if self._background is not None and not self._background.is_current:
            self._background.raise_failure()

    @contextmanager
    def _between_batches(self) -> Iterator[None]:
        """Nothing is collected in the background while this is held."""
        if self._background is None:
            yield
            return
        with self._background.held():
            self._raise_background_failure()
            yield
