"""Collecting in worker processes."""

from __future__ import annotations

import contextlib
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from engram.collectors.devices import Device, first_device
from engram.collectors.multi_settings import can_be_shared, makers_of, on_cpu, warn_of_remainder
from engram.collectors.multi_state import refuse_bad_states
from engram.collectors.multi_worker import (
    Attach,
    Collect,
    Collected,
    Load,
    Ready,
    Seed,
    State,
    Task,
    Try,
    Wrote,
    work,
)
from engram.collectors.numbering import Numbering, SharedCount
from engram.collectors.settings import refuse_bad_counts
from engram.collectors.shelf import ShelfReader
from engram.collectors.stats import CollectorStats, Episodes, Speed, stats_of
from engram.collectors.utils import split_trajectories
from engram.collectors.writing import BufferWriter
from engram.envs.policies import ExplorationType
from engram.errors import WorkerError
from engram.processes.shared_weights import SharedWeights, tensors_of
from engram.processes.timeouts import CallTimer, Timeout, validate_timeout
from engram.processes.worker import ERROR_CLOSE_TIMEOUT, CloudpickleWrapper, Worker, close_all, wait_for_any

Arrived = tuple[int, "TensorDictBase | Wrote"]


class MultiCollector:
    """What the collectors with worker processes have in common; see `MultiSyncDataCollector`."""

    _ahead = 1  # batches that a worker may have collected or begun before they are taken
    _can_be_stopped = False  # whether a batch is collected in pieces

    def __init__(
        self,
        create_env_fn: Callable[[], Any] | Sequence[Callable[[], Any]],
        policy: Any = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        num_workers: int | None = None,
        device: Device = None,
        storing_device: Device = None,
        policy_device: Device = None,
        env_device: Device = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        split_trajs: bool = False,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        replay_buffer: Any = None,
        update_at_each_batch: bool = False,
        track_policy_version: bool = False,
        start_method: str | None = None,
        timeout: float | None = None,
    ) -> None:
        validate_timeout(timeout)
        makers = makers_of(create_env_fn, num_workers)
        refuse_bad_counts(frames_per_batch, total_frames, max_frames_per_traj, init_random_frames)
        if split_trajs and replay_buffer is not None:
            raise ValueError("split_trajs=True would write padding into the replay buffer; leave it out")
        self.num_workers = len(makers)
        self._storing_device = first_device("storing_device", storing_device, device)
        devices = {
            "policy_device": first_device("policy_device", policy_device, device),
            "env_device": first_device("env_device", env_device, device),
        }
        self._postproc, self._split_trajs = postproc, split_trajs
        self._update_at_each_batch = update_at_each_batch
        self._replay_buffer = replay_buffer
        self._writer = None if replay_buffer is None else BufferWriter(replay_buffer)
        self._failure: WorkerError | None = None  # to be raised when what came before it was handed out
        self._is_attached = False
        self._is_to_be_attached()  # for its errors, before there are processes
        self.total_frames = total_frames
        self.requested_frames_per_batch = frames_per_batch
        self.frames = self.batches = 0
        self._set_policy(policy)
        settings = {
            "frames_per_batch": self._frames_of_worker(frames_per_batch),
            **devices,
            "max_frames_per_traj": max_frames_per_traj,
            "init_random_frames": -(-(init_random_frames or 0) // self.num_workers),
            "reset_at_each_iter": reset_at_each_iter,
            "exploration_type": exploration_type,
            "track_policy_version": track_policy_version,
        }
        self._start(makers, settings, start_method, timeout)

    # ---- making ----
    def _set_policy(self, policy: Any) -> None:
        if getattr(policy, "__name__", None) in ("rand_step", "rand_action") and hasattr(policy, "__self__"):
            policy = None  # of an environment that stays here: the workers' own do the same
        self._policy = policy
        self._weights = SharedWeights(tensors_of(policy)) if isinstance(policy, nn.Module) else None

    def _frames_of_worker(self, frames_per_batch: int) -> int:
        return frames_per_batch

    def _start(
        self,
        makers: list[Callable[[], Any]],
        settings: dict[str, Any],
        start_method: str | None,
        timeout: float | None,
    ) -> None:
        policy = None if self._policy is None else CloudpickleWrapper(on_cpu(self._policy))
        clocks = [None if timeout is None else CallTimer() for _ in makers]
        self._timeout = None if timeout is None else Timeout(timeout, [clock for clock in clocks if clock is not None])
        tasks = [
            Task(
                CloudpickleWrapper(make), policy, self._weights, settings, self._can_be_stopped, self._ahead + 1, clock
            )
            for make, clock in zip(makers, clocks, strict=True)
        ]
        self._workers: list[Worker] = []
        self._finalizer = weakref.finalize(self, close_all, self._workers)
        self._finalizer.atexit = False  # `engram.processes.worker` has its own, with less patience
        self._shelves = [ShelfReader() for _ in makers]
        self._episodes, self._speed = Episodes(0), Speed()
        self._ids = SharedCount()
        self._numbering = Numbering(self._ids.take)
        self._arrived: deque[Arrived] = deque()
        self._owed = [0] * len(makers)  # batches asked for that have not come
        with self._ended_by_errors():
            for k, task in enumerate(tasks):
                name = f"worker {k} of {type(self).__name__}"
                self._workers.append(Worker(work, [task], name=name, start_method=start_method))
            ready: list[Ready] = [worker.receive() for worker in self._workers]
        self._frames = [r.frames for r in ready]
        self.frames_per_batch = self._frames_of_batch()
        warn_of_remainder(self.total_frames, self.frames_per_batch)

    @abstractmethod
    def _frames_of_batch(self) -> int:
        """Frames that one round of the iteration hands out."""

    # ---- collecting ----
    def __iter__(self) -> Iterator[TensorDictBase | None]:
        while self._failure is not None or self.total_frames < 0 or self.frames < self.total_frames:
            yield self.rollout()

    def rollout(self) -> TensorDictBase | None:
        """The next batch, whatever `total_frames` says; None where it went into the replay buffer.

        Raises WorkerError with the traceback of a worker that failed, after which the collector is shut down, and
        RuntimeError after `shutdown`. What workers had handed over before one failed comes first, a batch of one worker
        at a time; with a replay buffer it is written, and the error raised at once.
        """
        before, began = self.frames, time.perf_counter()
        if self._failure is None:
            self._refuse_if_shut_down()
            with self._ended_by_errors():
                if self._update_at_each_batch:
                    self.update_policy_weights_()
                try:
                    batch = self._next()
                except WorkerError as error:
                    self._take_what_came()
                    self._failure = error
                    self._end_quickly()
        if self._failure is not None:
            batch = self._left_over()
        self.batches += 1
        self._speed.add(self.frames - before, time.perf_counter() - began)
        if batch is None or self._replay_buffer is not None:
            return None
        if self._storing_device is not None:
            batch = batch.to(self._storing_device)
        if self._split_trajs:
            batch = split_trajectories(batch)
        return batch if self._postproc is None else self._postproc(batch)

    @abstractmethod
    def _next(self) -> TensorDictBase | None:
        """The next batch; None if there is nothing to hand out."""

    def _left_over(self) -> TensorDictBase | None:
        """A batch that came before a worker failed; raises the failure after the last one."""
        failure, self._arrived = self._failure, deque(sorted(self._arrived, key=lambda result: result[0]))
        while self._arrived:
            k, batch = self._arrived.popleft()
            if isinstance(batch, Wrote):
                self.frames += batch.frames
                continue
            self.frames += batch.numel()
            self._numbering.number([(k, batch)])
            if self._writer is None:
                return self._as_whole(batch)
            self._store(batch)
        assert failure is not None
        self._failure = None
        raise failure

    def _as_whole(self, batch: TensorDictBase) -> TensorDictBase:
        """One worker's batch in the form in which batches are handed out."""
        return batch

    def _take_what_came(self) -> None:
        """Takes the batches that workers have handed over, where one has failed and nobody is waited for any more."""
        for k, worker in enumerate(self._workers):
            with contextlib.suppress(WorkerError):  # one failure is told already
                while self._owed[k] and wait_for_any([worker], 0):
                    self._take(k, worker.receive())

    def _ask(self, k: int, times: int = 1) -> None:
        for _ in range(times):
            self._owed[k] += 1
            self._workers[k].post(Collect())

    def _wait(self) -> None:
        """Waits for messages, and takes the batches among them."""
        waiting = [worker for worker, owed in zip(self._workers, self._owed, strict=True) if owed]
        for worker in self._heard(waiting):
            self._take(self._workers.index(worker), worker.receive())

    def _heard(self, workers: list[Worker]) -> list[Worker]:
        """Waits until some of the workers have something to say. Raises WorkerError where one hangs in its step."""
        if self._timeout is None:
            return wait_for_any(workers)
        while not (heard := wait_for_any(workers, self._timeout.remaining() + 0.001)):
            if (late := self._timeout.overdue()) is not None:
                self._workers[late[0]].kill(late[1])
        return heard

    def _take(self, k: int, message: Collected) -> None:
        self._owed[k] -= 1
        self._episodes.take(message.returns, message.lengths)
        batch = message.batch
        self._arrived.append((k, batch if isinstance(batch, Wrote) else self._shelves[k].take(batch)))
        if message.is_last:
            self._workers[k].receive()  # which raises what it failed with

    def _answer(self, k: int) -> Any:
        """The worker's next message that is no batch."""
        while self._heard([self._workers[k]]) and isinstance(message := self._workers[k].receive(), Collected):
            self._take(k, message)
        return message

    # ---- the replay buffer ----
    def _store(self, batch: TensorDictBase) -> None:
        """Writes a batch that a worker handed out before it had the buffer."""
        assert self._writer is not None
        self._writer.write(batch if self._postproc is None else self._postproc(batch))

    def _is_to_be_attached(self) -> bool:
        """Whether the workers could write to the buffer themselves: its layout comes with the first batch."""
        storage = getattr(self._replay_buffer, "storage", None)
        if self._is_attached or self._postproc is not None or storage is None:
            return False
        transform = getattr(self._replay_buffer, "transform", None)
        if transform is not None and not transform.can_flush:
            return False  # what they hold back for a worker would end with it
        return can_be_shared(storage, self.num_workers)

    def _attach(self) -> None:
        """Hands the buffer to the workers, none of which has a batch that was not written yet."""
        self._replay_buffer.storage.release()  # they need all lanes
        for worker in self._workers:
            worker.send(Attach(self._replay_buffer, self._ids))
        self._is_attached = True

    # ---- the rest ----
    @property
    def policy_version(self) -> int:
        """How often `update_policy_weights_` was called, counted on from a loaded state."""
        return 0 if self._weights is None else self._weights.version

    @property
    def stats(self) -> CollectorStats:
        """Frames, speed, and returns and lengths of the last episodes of all workers, for a progress bar.

        Speeds count the time in which the caller waits for a batch.
        """
        return stats_of(self.frames, self.batches, self._episodes, self._speed)

    def update_policy_weights_(self, policy_weights: Any = None) -> None:
        """Brings the workers' weights up to date, from their next batch on.

        None takes them from the policy that the collector was made with; otherwise a state dict, a module, or a
        TensorDict of parameters. Nothing is pickled: they are copied into shared memory. Raises TypeError without
        weights, ValueError for those of another policy.
        """
        if self._weights is not None:
            self._weights.write(tensors_of(self._policy if policy_weights is None else policy_weights))
        elif policy_weights is not None:
            raise TypeError(f"the policy is a {type(self._policy).__name__} and has no weights; give an nn.Module")

    def set_seed(self, seed: int) -> int:
        """The next reset of each environment starts from a seed of its own; returns the first that is free."""
        self._refuse_if_shut_down()
        with self._ended_by_errors():
            for k in range(self.num_workers):
                seed = self._asked(k, Seed(seed))
        return seed

    def state_dict(self) -> dict[str, Any]:
        """Counters, and the states of the workers' collectors, with the weights of the last update.

        Batches that nobody has taken are not part of it.
        """
        self._refuse_if_shut_down()
        with self._ended_by_errors():
            states = [self._asked(k, State()) for k in range(self.num_workers)]
        counts = {"frames": self.frames, "batches": self.batches, "trajectories": self._ids.value}
        return {**counts, "episodes": self._episodes.state_dict(), "workers": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after `state`: every environment starts a new trajectory; batches that nobody has taken are dropped.

        Its weights are then the workers' and those of the policy that the collector was made with; an update of before
        is void. Raises ValueError for a state of another kind of collector or policy, of another number of workers, or
        of other environments, with nothing changed.
        """
        self._refuse_if_shut_down()
        refuse_bad_states(state, self.num_workers, self._policy.state_dict() if self._weights is not None else None)
        self._refuse_bad_random_states(state["workers"])
        parts = self._with_newest_weights(state["workers"])
        with self._ended_by_errors():
            for k, part in enumerate(parts):
                self._asked(k, Load(part))
        self._arrived.clear()
        self._numbering.forget()
        if self._writer is not None:
            self._writer.restart()
        self.frames, self.batches = int(state["frames"]), int(state["batches"])
        self._episodes.load_state_dict(state["episodes"])
        missing = int(state["trajectories"]) - self._ids.value
        if missing > 0:
            self._ids.take(missing)

    def _refuse_bad_random_states(self, parts: Sequence[dict[str, Any]]) -> None:
        with self._ended_by_errors():
            tried = [(k, Try(part["env_random_state"])) for k, part in enumerate(parts) if "env_random_state" in part]
            refusals = [f"worker {k}: {refusal}" for k, one in tried if (refusal := self._asked(k, one)) is not None]
        if refusals:
            raise ValueError("the state is not of these environments.\n  " + "\n  ".join(refusals))

    def _with_newest_weights(self, parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The workers' states with the same weights, which are the shared ones now."""
        if self._weights is None:
            return list(parts)
        newest = max(parts, key=lambda part: part["policy_version"])
        version, weights = newest["policy_version"], newest["policy_state_dict"]
        self._policy.load_state_dict(weights)
        self._weights.write(tensors_of(self._policy), version)
        return [{**part, "policy_version": version, "policy_state_dict": weights} for part in parts]

    def _asked(self, k: int, message: Any) -> Any:
        self._workers[k].send(message)
        return self._answer(k)

    @property
    def is_shut_down(self) -> bool:
        """Whether `shutdown` was called, or a worker has failed."""
        return not self._finalizer.alive

    def shutdown(self) -> None:
        """Ends the workers, in a bounded time. A second call does nothing."""
        self._finalizer()

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._end_quickly()  # whoever is in the middle of something would answer a question of before
            raise

    def _end_quickly(self) -> None:
        """Ends the workers where there is an error to be told, which does not wait for one that is busy."""
        if self._finalizer.detach() is not None:
            close_all(self._workers, ERROR_CLOSE_TIMEOUT)

    def _refuse_if_shut_down(self) -> None:
        if self.is_shut_down:
            raise RuntimeError("this collector was shut down; make a new one")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.shutdown()
        else:
            self._end_quickly()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_workers={self.num_workers}, frames_per_batch={self.frames_per_batch}, "
            f"total_frames={self.total_frames}, frames={self.frames})"
        )
