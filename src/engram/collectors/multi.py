"""Collecting in worker processes: a batch from all of them at a time, or from whichever has one."""

from __future__ import annotations

import contextlib
import copy
import math
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from engram.collectors.stats import CollectorStats, EpisodeStats, Throughput, collector_stats
from engram.collectors.sync import (
    BufferWriter,
    Device,
    device_argument,
    validate_counts,
    validate_state,
    warn_of_remainder,
)
from engram.collectors.trajectories import GlobalTrajectoryIds, SharedCounter
from engram.collectors.utils import split_trajectories
from engram.collectors.worker import (
    AttachBuffer,
    BatchReady,
    Collect,
    GetState,
    Hello,
    LoadState,
    SetSeed,
    SharedBatchReader,
    Stop,
    ValidateState,
    WorkerConfig,
    WroteFrames,
    run_worker,
)
from engram.envs.policies import ExplorationType
from engram.errors import WorkerError
from engram.processes.shared_weights import SharedWeights, tensors_of
from engram.processes.timeouts import CallTimer, Timeout, validate_timeout
from engram.processes.worker import ERROR_CLOSE_TIMEOUT, CloudpickleWrapper, Worker, close_all, wait_for_any

Arrived = tuple[int, "TensorDictBase | WroteFrames"]


class MultiCollector:
    """Base of the collectors with worker processes; see `MultiSyncDataCollector`."""

    _ahead = 1  # batches that a worker may have collected or begun before they are handed out
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
        makers = env_makers(create_env_fn, num_workers)
        validate_counts(
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            max_frames_per_traj=max_frames_per_traj,
            init_random_frames=init_random_frames,
        )
        if split_trajs and replay_buffer is not None:
            raise ValueError("split_trajs=True would write padding into the replay buffer; leave it out")
        self.num_workers = len(makers)
        self._storing_device = device_argument("storing_device", storing_device, device)
        devices = {
            "policy_device": device_argument("policy_device", policy_device, device),
            "env_device": device_argument("env_device", env_device, device),
        }
        self._postproc, self._split_trajs = postproc, split_trajs
        self._update_at_each_batch = update_at_each_batch
        self._replay_buffer = replay_buffer
        self._writer = None if replay_buffer is None else BufferWriter(replay_buffer)
        self._failure: WorkerError | None = None  # to be raised once the batches that came before it are handed out
        self._is_attached = False
        self._should_attach()  # raises its errors before there are processes
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

    # ---- starting ----
    def _set_policy(self, policy: Any) -> None:
        if getattr(policy, "__name__", None) in ("rand_step", "rand_action") and hasattr(policy, "__self__"):
            policy = None  # of an environment in this process: those of the workers act at random, too
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
        configs = [
            WorkerConfig(
                make_env=CloudpickleWrapper(make),
                policy=policy,
                weights=self._weights,
                settings=settings,
                can_be_stopped=self._can_be_stopped,
                batches_in_memory=self._ahead + 1,
                clock=clock,
            )
            for make, clock in zip(makers, clocks, strict=True)
        ]
        self._workers: list[Worker] = []
        self._finalizer = weakref.finalize(self, close_all, self._workers)
        self._finalizer.atexit = False  # `engram.processes.worker` has its own at exit, with a shorter timeout
        self._readers = [SharedBatchReader() for _ in makers]
        self._episodes, self._throughput = EpisodeStats(0), Throughput()
        self._ids = SharedCounter()
        self._global_ids = GlobalTrajectoryIds(self._ids.take)
        self._arrived: deque[Arrived] = deque()
        self._pending = [0] * len(makers)  # by worker: batches that it was asked for and has not sent
        with self._shut_down_on_error():
            for k, config in enumerate(configs):
                name = f"worker {k} of {type(self).__name__}"
                self._workers.append(Worker(run_worker, [config], name=name, start_method=start_method))
            hellos: list[Hello] = [worker.receive() for worker in self._workers]
        self._frames = [hello.frames for hello in hellos]
        self.frames_per_batch = self._frames_of_batch()
        warn_of_remainder(self.total_frames, self.frames_per_batch, stacklevel=5)

    @abstractmethod
    def _frames_of_batch(self) -> int:
        """The number of frames that one iteration hands out."""

    # ---- collecting ----
    def __iter__(self) -> Iterator[TensorDictBase | None]:
        while self._failure is not None or self.total_frames < 0 or self.frames < self.total_frames:
            yield self.rollout()

    def rollout(self) -> TensorDictBase | None:
        """The next batch, whatever `total_frames` says; None where it went into the replay buffer.

        Raises WorkerError with the traceback of a worker that failed, after which the collector is shut down, and
        RuntimeError after `shutdown`. Batches that workers had sent before one failed come first, a batch of one worker
        at a time; with a replay buffer they are written, and the error is raised at once.
        """
        before, began = self.frames, time.perf_counter()
        if self._failure is None:
            self._refuse_if_shut_down()
            with self._shut_down_on_error():
                if self._update_at_each_batch:
                    self.update_policy_weights_()
                try:
                    batch = self._next()
                except WorkerError as error:
                    self._receive_arrived()
                    self._failure = error
                    self._shut_down_quickly()
        if self._failure is not None:
            batch = self._next_after_failure()
        self.batches += 1
        self._throughput.add(self.frames - before, time.perf_counter() - began)
        if batch is None or self._replay_buffer is not None:
            return None
        if self._storing_device is not None:
            batch = batch.to(self._storing_device)
        if self._split_trajs:
            batch = split_trajectories(batch)
        return batch if self._postproc is None else self._postproc(batch)

    @abstractmethod
    def _next(self) -> TensorDictBase | None:
        """Collects the next batch; None where it is in the replay buffer."""

    def _next_after_failure(self) -> TensorDictBase | None:
        """The next batch that came before a worker failed; after the last one, raises the failure."""
        failure, self._arrived = self._failure, deque(sorted(self._arrived, key=lambda result: result[0]))
        while self._arrived:
            k, batch = self._arrived.popleft()
            if isinstance(batch, WroteFrames):
                self.frames += batch.frames
                continue
            self.frames += batch.numel()
            self._global_ids.number([(k, batch)])
            if self._writer is None:
                return self._as_handed_out(batch)
            self._store(batch)
        assert failure is not None
        self._failure = None
        raise failure

    def _as_handed_out(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch of one worker, in the form in which batches are handed out."""
        return batch

    def _receive_arrived(self) -> None:
        """Receives the batches that workers have sent already, where one has failed."""
        for k, worker in enumerate(self._workers):
            with contextlib.suppress(WorkerError):  # the first failure is raised, not the others
                while self._pending[k] and wait_for_any([worker], 0):
                    self._receive_batch(k, worker.receive())

    def _post_collect(self, k: int, times: int = 1) -> None:
        for _ in range(times):
            self._pending[k] += 1
            self._workers[k].post(Collect())

    def _wait(self) -> None:
        """Waits until workers have sent batches, and receives them."""
        waiting = [worker for worker, pending in zip(self._workers, self._pending, strict=True) if pending]
        for worker in self._wait_for_any(waiting):
            self._receive_batch(self._workers.index(worker), worker.receive())

    def _wait_for_any(self, workers: list[Worker]) -> list[Worker]:
        """Waits until some of the workers have sent a message. Raises WorkerError where one hangs in its step."""
        if self._timeout is None:
            return wait_for_any(workers)
        while not (ready := wait_for_any(workers, self._timeout.remaining() + 0.001)):
            if (late := self._timeout.overdue()) is not None:
                self._workers[late[0]].kill(late[1])
        return ready

    def _receive_batch(self, k: int, message: BatchReady) -> None:
        self._pending[k] -= 1
        self._episodes.take(message.returns, message.lengths)
        batch = message.batch
        self._arrived.append((k, batch if isinstance(batch, WroteFrames) else self._readers[k].take(batch)))
        if message.is_last:
            self._workers[k].receive()  # raises the worker's error

    def _receive_answer(self, k: int) -> Any:
        """The next message of worker k that is no batch; batches before it are received."""
        while self._wait_for_any([self._workers[k]]) and isinstance(message := self._workers[k].receive(), BatchReady):
            self._receive_batch(k, message)
        return message

    # ---- the replay buffer ----
    def _store(self, batch: TensorDictBase) -> None:
        """Writes a batch of a worker that does not write into the buffer itself."""
        assert self._writer is not None
        self._writer.write(batch if self._postproc is None else self._postproc(batch))

    def _should_attach(self) -> bool:
        """Whether to give the buffer to the workers now: they do not have it yet, and its storage can be shared."""
        storage = getattr(self._replay_buffer, "storage", None)
        if self._is_attached or self._postproc is not None or storage is None:
            return False
        transform = getattr(self._replay_buffer, "transform", None)
        if transform is not None and not transform.can_flush:
            return False  # the steps that they hold back for a worker would be lost with it
        return can_be_shared(storage, self.num_workers)

    def _attach(self) -> None:
        """Gives the buffer to the workers; all batches that they have sent are written by now."""
        self._replay_buffer.storage.release()  # they need all lanes
        for worker in self._workers:
            worker.send(AttachBuffer(self._replay_buffer, self._ids))
        self._is_attached = True

    # ---- weights, seeds, states ----
    @property
    def policy_version(self) -> int:
        """The number of calls of `update_policy_weights_`, counted on from a loaded state."""
        return 0 if self._weights is None else self._weights.version

    @property
    def stats(self) -> CollectorStats:
        """Frames, speed, and returns and lengths of the last episodes of all workers, for a progress bar.

        Speeds count the time in which the caller waits for a batch.
        """
        return collector_stats(self.frames, self.batches, self._episodes, self._throughput)

    def update_policy_weights_(self, policy_weights: Any = None) -> None:
        """Updates the weights of the workers, from their next batch on.

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
        with self._shut_down_on_error():
            for k in range(self.num_workers):
                seed = self._request(k, SetSeed(seed))
        return seed

    def state_dict(self) -> dict[str, Any]:
        """Counters, and the states of the workers' collectors, with the weights of the last update.

        Batches that were not handed out are not part of it.
        """
        self._refuse_if_shut_down()
        with self._shut_down_on_error():
            states = [self._request(k, GetState()) for k in range(self.num_workers)]
        counts = {"frames": self.frames, "batches": self.batches, "trajectories": self._ids.value}
        return {**counts, "episodes": self._episodes.state_dict(), "workers": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after `state`: every environment starts a new trajectory; batches not handed out are dropped.

        The workers, and the policy that the collector was made with, have its weights then; an earlier update is
        void. Raises ValueError for a state of another kind of collector or policy, of another number of workers, or of
        other environments, with nothing changed.
        """
        self._refuse_if_shut_down()
        validate_states(state, self.num_workers, self._policy.state_dict() if self._weights is not None else None)
        self._validate_random_states(state["workers"])
        parts = self._with_newest_weights(state["workers"])
        with self._shut_down_on_error():
            for k, part in enumerate(parts):
                self._request(k, LoadState(part))
        self._arrived.clear()
        self._global_ids.forget()
        if self._writer is not None:
            self._writer.restart()
        self.frames, self.batches = int(state["frames"]), int(state["batches"])
        self._episodes.load_state_dict(state["episodes"])
        missing = int(state["trajectories"]) - self._ids.value
        if missing > 0:
            self._ids.take(missing)

    def _validate_random_states(self, parts: Sequence[dict[str, Any]]) -> None:
        with self._shut_down_on_error():
            questions = [
                (k, ValidateState(part["env_random_state"]))
                for k, part in enumerate(parts)
                if "env_random_state" in part
            ]
            refusals = [f"worker {k}: {why}" for k, one in questions if (why := self._request(k, one)) is not None]
        if refusals:
            raise ValueError("the state is not of these environments.\n  " + "\n  ".join(refusals))

    def _with_newest_weights(self, parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The states of the workers, all with the newest weights among them, which become the shared ones."""
        if self._weights is None:
            return list(parts)
        newest = max(parts, key=lambda part: part["policy_version"])
        version, weights = newest["policy_version"], newest["policy_state_dict"]
        self._policy.load_state_dict(weights)
        self._weights.write(tensors_of(self._policy), version=version)
        return [{**part, "policy_version": version, "policy_state_dict": weights} for part in parts]

    def _request(self, k: int, message: Any) -> Any:
        self._workers[k].send(message)
        return self._receive_answer(k)

    @property
    def is_shut_down(self) -> bool:
        """True after `shutdown`, and after a worker has failed."""
        return not self._finalizer.alive

    def shutdown(self) -> None:
        """Ends the workers in a bounded time. A second call does nothing."""
        self._finalizer()

    @contextmanager
    def _shut_down_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._shut_down_quickly()  # a busy worker would answer an earlier request to a later one
            raise

    def _shut_down_quickly(self) -> None:
        """Ends the workers before an error is raised, which does not wait for busy ones."""
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
            self._shut_down_quickly()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_workers={self.num_workers}, frames_per_batch={self.frames_per_batch}, "
            f"total_frames={self.total_frames}, frames={self.frames})"
        )


class MultiSyncDataCollector(MultiCollector):
    """Worker processes that collect at the same time; each batch has the frames of all, with the same weights.

    Workers wait while the caller has the batch, as on-policy learning needs it. A batch is `[workers, *]` where `*` is
    the shape of one worker's: `[time]`, or `[envs, time]`; `frames_per_batch` counts all workers and is rounded up to
    whole rows. Trajectory ids count over all workers in the order of the steps. Batches come through shared memory.

    Args:
        create_env_fn: a callable for each worker that makes its environment (lambdas too), or one and `num_workers`.
        policy: as in `SyncDataCollector`. Each worker has a copy; `update_policy_weights_` brings them up to date.
        frames_per_batch, total_frames: over all workers.
        num_workers: how many, where a single callable is given.
        device, storing_device, policy_device, env_device: as in `SyncDataCollector`.
        max_frames_per_traj, reset_at_each_iter, exploration_type, postproc, split_trajs: as in `SyncDataCollector`.
        init_random_frames: over all workers.
        replay_buffer: gets each batch; iterating then yields None. Workers write into it themselves where its storage
            is shared (`shared=True`, or mapped) and has a lane for each; else the batches come here first.
        update_at_each_batch: calls `update_policy_weights_()` before each batch.
        track_policy_version: int64 `("collector", "policy_version")` says which weights acted.
        preemptive_threshold: a fraction of the workers, in (0, 1]: when so many have their batch, the others hand out
            what they have. Missing steps are zeros, and `("collector", "mask")` says which are steps. None: all wait.
        cat_results: "stack", or the dimension along which the workers' batches are put one after the other.
        start_method: "fork", "spawn" or "forkserver"; None: fork unless CUDA is in use.
        timeout: seconds that one step or one reset of an environment may last, making it apart; of environments that
            step together, one of all. Then its worker is killed, whatever it does, and the WorkerError names the
            worker, the environment in it and the step, counted from 1. None: any time.

    Raises:
        ValueError, TypeError: arguments that cannot work.
        WorkerError: a worker failed, with its traceback, or hung; all are ended then. What workers had handed over, the
            rows that the failing one had stepped before included, is handed out first, `[1, *]` for one worker at a
            time, or written; what others were in the middle of is lost.

    >>> from engram.envs import GymEnv
    >>> make = lambda: GymEnv("CartPole-v1")
    >>> with MultiSyncDataCollector([make, make], frames_per_batch=200, total_frames=400) as collector:
    ...     for batch in collector:
    ...         print(batch.shape)
    torch.Size([2, 100])
    torch.Size([2, 100])
    """

    def __init__(
        self,
        create_env_fn: Callable[[], Any] | Sequence[Callable[[], Any]],
        policy: Any = None,
        *,
        frames_per_batch: int,
        preemptive_threshold: float | None = None,
        cat_results: str | int = "stack",
        **kwargs: Any,
    ) -> None:
        if cat_results != "stack" and (not isinstance(cat_results, int) or isinstance(cat_results, bool)):
            raise ValueError(f'cat_results must be "stack" or a dimension, got {cat_results!r}')
        if preemptive_threshold is not None and not 0 < preemptive_threshold <= 1:
            raise ValueError(f"preemptive_threshold must be in (0, 1], or None, got {preemptive_threshold}")
        self._cat_results = cat_results
        self._threshold = preemptive_threshold
        self._can_be_stopped = preemptive_threshold is not None
        super().__init__(create_env_fn, policy, frames_per_batch=frames_per_batch, **kwargs)

    def _frames_of_worker(self, frames_per_batch: int) -> int:
        return -(-frames_per_batch // self.num_workers)

    def _frames_of_batch(self) -> int:
        return sum(self._frames)

    def _next(self) -> TensorDictBase | None:
        if self._should_attach():
            self._attach()
        for k in range(self.num_workers):
            self._post_collect(k)
        enough = self.num_workers if self._threshold is None else math.ceil(self._threshold * self.num_workers)
        is_stopped = False
        while any(self._pending):
            self._wait()
            if len(self._arrived) >= enough and not is_stopped:
                self._stop_the_others()
                is_stopped = True
        results = sorted(self._arrived, key=lambda result: result[0])
        self._arrived.clear()
        return self._combine(results)

    def _stop_the_others(self) -> None:
        for worker, pending in zip(self._workers, self._pending, strict=True):
            if pending:
                worker.post(Stop())

    def _combine(self, results: list[Any]) -> TensorDictBase | None:
        batches = [(k, batch) for k, batch in results if not isinstance(batch, WroteFrames)]
        self.frames += sum(x.frames if isinstance(x, WroteFrames) else x.numel() for _, x in results)
        self._global_ids.number(batches)
        in_order = [batch for _, batch in batches]
        if self._replay_buffer is not None:
            have_one_shape = len({batch.shape for batch in in_order}) == 1
            for batch in (
                [torch.stack(in_order).flatten(0, -2)] if have_one_shape else in_order
            ):  # [workers * envs, time]
                self._store(batch)
            return None
        return self._join(in_order)

    def _join(self, batches: list[TensorDictBase]) -> TensorDictBase:
        if self._threshold is not None:
            longest = max(batch.shape[-1] for batch in batches)
            batches = [_padded(batch, longest) for batch in batches]
        return torch.stack(batches) if self._cat_results == "stack" else torch.cat(batches, int(self._cat_results))

    def _as_handed_out(self, batch: TensorDictBase) -> TensorDictBase:
        return self._join([batch])


def _padded(batch: TensorDictBase, length: int) -> TensorDictBase:
    """`[*, time]` padded with zeros to `[*, length]`, with a mask of the steps."""
    time, ndim = batch.shape[-1], batch.ndim
    mask = torch.zeros((*batch.shape[:-1], length), dtype=torch.bool)
    mask[..., :time] = True
    if time < length:

        def pad(leaf: torch.Tensor) -> torch.Tensor:
            rest = leaf.new_zeros((*batch.shape[:-1], length - time, *leaf.shape[ndim:]))
            return torch.cat([leaf, rest], ndim - 1)

        batch = batch.apply(pad, batch_size=[*batch.shape[:-1], length])
    return batch.set(("collector", "mask"), mask)


class MultiaSyncDataCollector(MultiCollector):
    """Worker processes that collect all the time; each batch is one worker's, in the order in which they are ready.

    A worker goes on while its batch waits and while the caller learns, up to two batches ahead: a batch may have been
    made with weights that are two updates old. Batches are `[time]`, or `[envs, time]`, of
    `frames_per_batch` frames, rounded up to whole rows. Trajectory ids count in the order in which batches are handed
    out. What is collected at the end and was not handed out is lost.

    Args:
        create_env_fn: a callable for each worker that makes its environment (lambdas too), or one and `num_workers`.
        policy: as in `SyncDataCollector`. Each worker has a copy; `update_policy_weights_` brings them up to date.
        frames_per_batch: of one worker's batch.
        total_frames: over all workers.
        num_workers, device, storing_device, policy_device, env_device, max_frames_per_traj, init_random_frames,
        reset_at_each_iter, exploration_type, postproc, split_trajs, replay_buffer, update_at_each_batch,
        track_policy_version, start_method, timeout:
            as in `MultiSyncDataCollector`.

    Raises:
        ValueError, TypeError: arguments that cannot work.
        WorkerError: a worker failed, with its traceback, or hung; all are ended then. What workers had handed over, the
            rows that the failing one had stepped before included, is handed out first, or written.

    >>> from engram.envs import GymEnv
    >>> make = lambda: GymEnv("CartPole-v1")
    >>> with MultiaSyncDataCollector([make, make], frames_per_batch=200, total_frames=400) as collector:
    ...     for batch in collector:
    ...         print(batch.shape)
    torch.Size([200])
    torch.Size([200])
    """

    _ahead = 2

    def _frames_of_batch(self) -> int:
        return max(self._frames)

    def _next(self) -> TensorDictBase | None:
        if self._should_attach() and not self._arrived and not any(self._pending):
            self._attach()
        if not self._should_attach():  # else all batches are written before new ones are begun
            self._request_batches()
        while not self._arrived:
            self._wait()
        k, batch = self._arrived.popleft()
        if isinstance(batch, WroteFrames):
            self.frames += batch.frames
            return None
        self.frames += batch.numel()
        self._global_ids.number([(k, batch)])
        if self._replay_buffer is None:
            return batch
        self._store(batch)
        return None

    def _request_batches(self) -> None:
        for k, pending in enumerate(self._pending):
            waiting = sum(1 for worker, _ in self._arrived if worker == k)
            self._post_collect(k, self._ahead - pending - waiting)


def env_makers(create_env_fn: Any, num_workers: int | None) -> list[Callable[[], Any]]:
    """Returns a callable for each worker. Raises ValueError for a wrong number of them, TypeError for no callables."""
    makers = [create_env_fn] * (num_workers or 1) if callable(create_env_fn) else list(create_env_fn)
    if not makers or (num_workers is not None and len(makers) != num_workers):
        raise ValueError(
            f"{len(makers)} environments to make and num_workers={num_workers}; give a callable for each worker, or "
            "a single one and num_workers of 1 or more"
        )
    for maker in makers:
        if not callable(maker) or hasattr(maker, "step"):
            raise TypeError(
                f"each worker makes its own environment: give callables that do, got a {type(maker).__name__}"
            )
    return makers


def on_cpu(policy: Any) -> Any:
    """The policy with its tensors in main memory, for processes that do not use a GPU yet."""
    is_elsewhere = isinstance(policy, nn.Module) and any(p.device.type != "cpu" for p in tensors_of(policy).values())
    return copy.deepcopy(policy).to("cpu") if is_elsewhere else policy


def can_be_shared(storage: Any, num_workers: int) -> bool:
    """Whether workers can write into `storage`. Raises ValueError where only its number of lanes is too small."""
    lanes = getattr(storage, "lanes", None)
    if lanes is None or getattr(lanes, "locks", None) is None:
        return False  # without a layout yet, or in private memory
    if storage.ndim > 1 and num_workers > 1:
        return False  # such a storage has one lane
    if lanes.store.lanes < num_workers:
        raise ValueError(
            f"{num_workers} workers write to the replay buffer, and its storage has lanes={lanes.store.lanes}; make it "
            f"with lanes={num_workers}, one for each"
        )
    return True


def validate_states(state: Any, num_workers: int, policy_state: Mapping[str, Any] | None) -> None:
    """Raises ValueError for anything but a state of a collector with `num_workers` workers and such a policy.

    Whether the environments can load its random state is for the workers to say.
    """
    if isinstance(state, Mapping) and not isinstance(state.get("workers"), (list, tuple)):
        raise ValueError(
            "the state of a collector with worker processes has 'workers', a list with a state of each; found "
            f"{sorted(map(str, state))}. Load it into a collector of the class that it was saved by"
        )
    validate_state({"stepped": 0, "policy_version": 0, **state} if isinstance(state, Mapping) else state, None)
    if len(state["workers"]) != num_workers:
        raise ValueError(
            f"the state is of {len(state['workers'])} workers, and this collector has {num_workers}; "
            "make it with as many"
        )
    for k, part in enumerate(state["workers"]):
        try:
            validate_state(part, policy_state)
        except ValueError as error:
            raise ValueError(f"the state of worker {k}: {error}") from None
