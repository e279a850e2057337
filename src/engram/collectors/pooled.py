"""The base of collectors with workers, wherever these run: asking, waiting, replacing, shutting down."""

from __future__ import annotations

import copy
import math
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from engram._advice import advised
from engram.collectors.background import BackgroundCollector
from engram.collectors.stats import EpisodeStats, Throughput
from engram.collectors.sync import one_of_weights
from engram.errors import WorkerError
from engram.processes.pool import WorkerPool
from engram.processes.shared_weights import WeightsLayout
from engram.processes.worker import ERROR_CLOSE_TIMEOUT

_ABANDON_INTERVAL = 0.1  # seconds after which a thread in the background sees that nobody waits for it any more


@advised
class PooledCollector(BackgroundCollector):
    """Base of the collectors with workers: each is asked by a message, and its messages are received in their order."""

    _pool: WorkerPool[Any]
    _policy: Any
    _look_interval = math.inf  # seconds after which it is looked whether a worker hangs, beside its clock
    _error_close_timeout = ERROR_CLOSE_TIMEOUT

    def _count_from_zero(self) -> None:
        self.frames = self.batches = 0
        self._episodes, self._throughput = EpisodeStats(0), Throughput()

    @contextmanager
    def _counted_batch(self) -> Iterator[None]:
        """A block that collects a batch for the caller."""
        self._refuse_beside_background()
        before, began = self.frames, time.perf_counter()
        yield
        self.batches += 1
        self._throughput.add(self.frames - before, time.perf_counter() - began)

    @abstractmethod
    def _receive_message(self, k: int) -> list[Any]:
        """Receives one message of worker k, and returns it if it is an answer; replaces the worker if it has failed."""

    def _only_waits(self, workers: list[int]) -> bool:
        """Whether all that these workers still do is to wait for room in the replay buffer."""
        return False

    @abstractmethod
    def _replace(self, k: int, error: WorkerError) -> None:
        """Starts worker k anew after it has failed or died. Raises `error` where that is not to be."""

    def _wait_for_any(self, workers: list[int]) -> list[int]:
        """Waits until some of the workers have sent a message, or one that hangs in its step was replaced.

        None of them may have: somebody else who was let in has received it.
        """
        background = self._background
        if background is not None:
            background.raise_if_abandoned()  # also where messages come all the time
        interval = self._look_interval if background is None else min(_ABANDON_INTERVAL, self._look_interval)
        while not (ready := self._pool.wait(workers, interval)):
            if background is not None:
                background.raise_if_abandoned()
                if self._only_waits(workers) and background.is_current and background.let_in():
                    return []
            if (late := self._pool.overdue()) is not None:
                self._end_overdue(*late)
                return []
        return ready

    def _end_overdue(self, k: int, reason: str) -> None:
        """Kills a worker that hangs, after what it has sent was received, and replaces it."""
        worker = self._pool.workers[k]
        while self._pool.workers[k] is worker and self._pool.wait([k], 0):
            self._receive_message(k)
        if self._pool.workers[k] is worker:
            try:
                worker.kill(reason)
            except WorkerError as error:
                self._replace(k, error)

    def _ask(self, k: int, message: Any) -> Any:
        """Sends worker k, which does nothing else now, a message and returns its answer, or that of its successor."""
        while True:
            worker = self._pool.workers[k]
            worker.post(message)
            while self._pool.workers[k] is worker:  # else it was replaced, and its successor is asked
                if self._wait_for_any([k]) and (answers := self._receive_message(k)):
                    return answers[0]

    def _policy_on_cpu(self) -> Any:
        """The policy with its tensors in main memory, for processes that do not use a GPU yet."""
        is_module = isinstance(self._policy, nn.Module)
        tensors = WeightsLayout.tensors_of(self._policy).values() if is_module else ()
        is_elsewhere = any(tensor.device.type != "cpu" for tensor in tensors)
        return copy.deepcopy(self._policy).to("cpu") if is_elsewhere else self._policy

    @staticmethod
    def _given_weights(**named: Any) -> dict[str, Tensor] | None:
        """The tensors of an update, under whichever name it was given; None: those of the policy. Errors as
        `one_of_weights`.
        """
        weights = one_of_weights(**named)
        return None if weights is None else WeightsLayout.tensors_of(weights)

    @property
    def is_shut_down(self) -> bool:
        """True after `shutdown`, and after a worker has failed."""
        return self._pool.is_closed

    def _refuse_if_shut_down(self) -> None:
        if self.is_shut_down:
            raise RuntimeError("this collector was shut down; make a new one")

    @contextmanager
    def _shut_down_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._shut_down_quickly()  # a busy worker would answer an earlier request to a later one
            raise

    def _shut_down_quickly(self) -> None:
        """Ends the workers before an error is raised, which does not wait for busy ones."""
        if self._background is not None and not self._background.is_current:
            self._background.abandon()
        self._pool.close(self._error_close_timeout)

    def _stop_background(self, timeout: float) -> None:
        """Ends collecting in the background after the batch that was begun, but waits no longer than that."""
        if self._background is not None:
            try:
                self._background.stop(timeout)
            except TimeoutError:
                self._background.abandon()

    @contextmanager
    def _between_batches(self) -> Iterator[None]:
        with super()._between_batches():
            self._refuse_if_shut_down()
            yield

    def __enter__(self) -> Any:
        return self
