"""Collecting in worker processes: a batch from all of them at a time, or from whichever has one."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import nn

from engram._advice import advised
from engram._checks import count, count_or_none
from engram.collectors.joining import ONE_BATCH, WorkerLayout, joined, layout_of, padded, refuse_other_layout
from engram.collectors.makers import (
    devices_of_workers,
    makers_of_workers,
    one_for_each,
    only_device,
    with_own_seed,
)
from engram.collectors.policy_weights import version_argument
from engram.collectors.pooled import PooledCollector
from engram.collectors.settings import CollectorSettings, Device, checked_postproc
from engram.collectors.sync import (
    NOTHING_WAITS,
    buffer_writer,
    to_storing_device,
    validate_state,
    validate_waiting,
)
from engram.collectors.trajectories import (
    IDS,
    GlobalTrajectoryIds,
    SharedCounter,
    TrajectoryAssembler,
)
from engram.collectors.utils import split_trajectories
from engram.collectors.worker import (
    AwaitsRoom,
    BatchReady,
    Call,
    Collect,
    CollectorProcess,
    Hello,
    Predecessor,
    SharedBatchReader,
    Stop,
    WorkerCalls,
    WorkerConfig,
    WroteFrames,
    run_worker,
)
from engram.data.replay_buffers.buffers.buffer import ReplayBuffer, sent_to_writers
from engram.envs.base import with_time_named
from engram.envs.policies import ExplorationType, acts_at_random
from engram.errors import WorkerError
from engram.processes.pool import Processes, WorkerPool
from engram.processes.restarts import Restarts, validate_restarts
from engram.processes.shared_weights import SharedWeights, WeightsLayout
from engram.processes.timeouts import validate_timeout
from engram.processes.worker import (
    CLOSE_TIMEOUT,
    CloudpickleWrapper,
)
from engram.specs.spaces import EncodedSpaces, HasSpaces, common_spaces


class Arrived(NamedTuple):
    """A batch that worker `worker` has handed over; `begins`: the first one of a worker that was replaced."""

    worker: int
    batch: TensorDictBase | WroteFrames
    begins: bool = False

    @property
    def frames(self) -> int:
        """The number of its frames."""
        return self.batch.frames if isinstance(self.batch, WroteFrames) else self.batch.numel()


@dataclass
class Member:
    """The record of a worker, over all its lives.

    Attributes:
        frames, envs: of each of its batches; known after its Hello.
        pending: batches that it was asked for and has not sent.
        collected: the frames that it has handed over.
        seed: arguments of the last `set_seed`.
        id_offset: added to the ids that it counts, which begin anew in its successor.
        begins: whether its next batch is the first of a successor.
        first_steps: of an unfinished batch.
        awaits_room: whether all that is left of its batch is to be written, for which the buffer has no room yet.
    """

    config: WorkerConfig
    reader: SharedBatchReader = field(default_factory=SharedBatchReader)
    frames: int = 0
    envs: int = 0
    pending: int = 0
    collected: int = 0
    seed: tuple[int, bool] | None = None
    id_offset: int = 0
    begins: bool = False
    first_steps: TensorDictBase | WroteFrames | None = None
    awaits_room: bool = False


@advised
class MultiCollector(PooledCollector, HasSpaces):
    """Base of the collectors with worker processes; see `MultiSyncDataCollector`.

    `MultiCollector(..., sync=True)` (the default) makes a `MultiSyncDataCollector`, with `sync=False` a
    `MultiaSyncDataCollector`.
    """

    _ahead = 1  # batches that a worker may have collected or begun before they are handed out
    _can_be_stopped = False  # whether a batch is collected in pieces

    def __new__(cls, *args: Any, sync: bool = True, **kwargs: Any) -> Any:
        return super().__new__(
            (MultiSyncDataCollector if sync else MultiaSyncDataCollector) if cls is MultiCollector else cls
        )

    def __init__(
        self,
        create_env_fn: Callable[..., Any] | Sequence[Callable[..., Any]],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        frames_per_batch: int | Sequence[int] | None = None,
        total_frames: int | None = -1,
        num_workers: int | None = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        device: Device | Sequence[Device] = None,
        storing_device: Device | Sequence[Device] = None,
        policy_device: Device | Sequence[Device] = None,
        env_device: Device | Sequence[Device] = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        reset_when_done: bool = True,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        split_trajs: bool = False,
        trajs_per_batch: int | None = None,
        traj_format: str | None = None,
        set_truncated: bool = False,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        replay_buffer: Any = None,
        update_at_each_batch: bool = False,
        track_policy_version: bool = False,
        init_fn: Callable[[], Any] | None = None,
        pre_collect_hook: Callable[[], Any] | None = None,
        post_collect_hook: Callable[[TensorDictBase], Any] | None = None,
        auto_register_policy_transforms: bool | None = None,
        compile_policy: bool | Mapping[str, Any] | None = None,
        cudagraph_policy: bool | Mapping[str, Any] | None = None,
        no_cuda_sync: bool = False,
        compact_obs: bool = False,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        start_method: str | None = None,
        timeout: float | None = None,
        restarts: int = 0,
        preemptive_threshold: float | None = None,
        cat_results: str | int | None = None,
        sync: bool | None = None,
    ) -> None:
        name = type(self).__name__
        if sync is not None and sync != isinstance(self, MultiSyncDataCollector):
            raise TypeError(f"a {name} has sync={not sync}; leave it out, or make a MultiCollector(sync={sync})")
        if cat_results not in (None, "stack"):
            raise ValueError(f"cat_results can only be used with MultiSyncDataCollector; a {name} joins no batches")
        validate_threshold(preemptive_threshold)
        validate_timeout(timeout)
        validate_restarts(restarts)
        makers, policy_makers = makers_of_workers(create_env_fn, create_env_kwargs, policy, policy_factory, num_workers)
        if update_at_each_batch and policy_factory is not None:
            raise ValueError("update_at_each_batch=True takes weights from the policy; policy_factory leaves none here")
        num_sub_threads, num_threads = (
            count(num_sub_threads, "num_sub_threads"),
            count_or_none(num_threads, "num_threads"),
        )
        frames_of_workers = self._frames_of_workers(frames_per_batch, len(makers))
        least = min(frames_per_batch) if isinstance(frames_per_batch, Sequence) else frames_per_batch
        settings = CollectorSettings.of(locals(), frames_per_batch=least)
        self.set_truncated = set_truncated
        self._trajs_per_batch, self._assembler = settings.trajs_per_batch or 0, TrajectoryAssembler()
        self._first_layout: WorkerLayout | None = None  # of the first batch of steps for whole trajectories
        self.traj_format = traj_format or "padded"
        self.pre_collect_hook, self.post_collect_hook = pre_collect_hook, post_collect_hook
        self._pads_trajectories = settings.pads_trajectories
        if num_sub_threads > 1 and start_method == "fork":
            raise ValueError(
                f"num_sub_threads={num_sub_threads}: torch's threads may hang after a fork; leave start_method out"
            )
        self.num_workers = len(makers)
        self.storing_device = only_device(devices_of_workers("storing_device", storing_device, device, len(makers)))
        policy_devices = devices_of_workers("policy_device", policy_device, device, len(makers))
        env_devices = devices_of_workers("env_device", env_device, device, len(makers))
        self.postproc, self.split_trajs = checked_postproc(postproc), split_trajs
        self._update_at_each_batch = update_at_each_batch
        self.replay_buffer = replay_buffer
        self._writer = None if replay_buffer is None else buffer_writer(replay_buffer)
        self._awaited = replay_buffer if isinstance(replay_buffer, ReplayBuffer) else None
        self._waits_for_copies = not no_cuda_sync
        self._is_finishing = False  # no batches are asked for
        self._failure: WorkerError | None = None  # to be raised once the batches that came before it are handed out
        self._is_attached = False
        self._should_attach()  # raises its errors before there are processes
        self.total_frames = settings.total_frames
        self.init_random_frames = settings.init_random_frames or 0
        self.requested_frames_per_batch = None if isinstance(frames_per_batch, Sequence) else settings.frames_per_batch
        self._count_from_zero()
        self._set_policy(policy)
        self._limit_threads(num_threads)
        self._pool = WorkerPool(
            Processes(run_worker, "spawn" if num_sub_threads > 1 and start_method is None else start_method),
            [f"worker {k} of {name}" for k in range(self.num_workers)],
            timeout=timeout,
        )
        self._restarts = Restarts(restarts)
        self._workers = self._pool.workers
        calls = WorkerCalls(*map(_sendable, (init_fn, pre_collect_hook, post_collect_hook)))
        of_workers = zip(makers, policy_makers, frames_of_workers, policy_devices, env_devices, strict=True)
        configs = [
            WorkerConfig(
                make_env=CloudpickleWrapper(make_env),
                policy_factory=_sendable(make_policy),
                settings=settings.share(self.num_workers, frames, policy_device=policy_on, env_device=env_on),
                can_be_stopped=self._can_be_stopped,
                batches_in_memory=self._ahead + 1,
                calls=calls,
                threads=num_sub_threads,
            )
            for make_env, make_policy, frames, policy_on, env_on in of_workers
        ]
        self._start(configs)
        settings.warn_of_remainder(self.frames_per_batch)

    def _limit_threads(self, num_threads: int | None) -> None:
        before = torch.get_num_threads()
        self._restore_threads = weakref.finalize(self, torch.set_num_threads, before)
        if num_threads is None:
            self._restore_threads.detach()
        else:
            torch.set_num_threads(num_threads)

    # ---- starting ----
    def _set_policy(self, policy: Any) -> None:
        if acts_at_random(policy):
            policy = None  # of an environment in this process: those of the workers act at random, too
        self._policy = policy
        self._questions = threading.RLock()  # one caller at a time asks the workers
        self._weights_lock = threading.Lock()  # one writer at a time: `update_at_each_batch` may run in the background
        self._factory_state: dict[str, Any] | None = None  # of the policy that a factory made for the first worker
        self._is_updated = False  # whether workers have other weights than those that they began with
        self._weights = SharedWeights(WeightsLayout.tensors_of(policy)) if isinstance(policy, nn.Module) else None

    def _frames_of_workers(self, frames_per_batch: int | Sequence[int] | None, n: int) -> Sequence[int | None]:
        """The frames of each worker's batch; None: as many as a worker wants."""
        frames = one_for_each("frames_per_batch", frames_per_batch, n)
        return [count_or_none(of_one, "frames_per_batch") for of_one in frames]

    def _start(self, configs: Sequence[WorkerConfig]) -> None:
        self._members = [Member(config) for config in configs]
        self._ids = SharedCounter()
        self._global_ids = GlobalTrajectoryIds(self._ids.take)
        self._arrived: deque[Arrived] = deque()
        with self._shut_down_on_error():
            for k in range(self.num_workers):
                self._start_worker(k)
            while missing := [k for k, member in enumerate(self._members) if not member.frames]:
                for k in self._pool.wait(missing):
                    self._receive_message(k)
            self._share_weights_of_factory()
        self.frames_per_batch = self._frames_of_batch()
        if self.requested_frames_per_batch is None:
            self.requested_frames_per_batch = self.frames_per_batch

    def _start_worker(self, k: int, predecessor: Predecessor | None = None) -> None:
        """Starts the process of worker k."""
        policy = None if self._policy is None else CloudpickleWrapper(self._policy_on_cpu())
        config = self._members[k].config._replace(policy=policy, weights=self._weights, predecessor=predecessor)
        self._pool.start(k, config)

    def _greet(self, k: int, hello: Hello) -> None:
        """Notes the sizes of a worker that is ready. Raises RuntimeError where a successor has other ones."""
        member = self._members[k]
        if member.frames and (member.frames, member.envs) != (hello.frames, hello.envs):
            raise RuntimeError(
                f"worker {k} was replaced, and the environment that it made has batches of {hello.frames} frames over "
                f"{hello.envs} environments; the one before had {member.frames} over {member.envs}"
            )
        member.frames, member.envs = hello.frames, hello.envs
        if k == 0 and self._factory_state is None:
            self._factory_state = hello.policy_state

    def _share_weights_of_factory(self) -> None:
        """Makes the shared weights for policies that workers made themselves, which keep their own until an update."""
        if self._factory_state is None:
            return
        self._weights = SharedWeights(WeightsLayout.tensors_of(self._factory_state))
        for k, worker in enumerate(list(self._workers)):
            try:
                worker.send(Call(CollectorProcess.attach_weights, (self._weights,), is_question=False))
            except WorkerError as error:
                self._replace(k, error)

    @abstractmethod
    def _frames_of_batch(self) -> int:
        """The number of frames that one iteration hands out."""

    # ---- collecting ----
    def rollout(self) -> TensorDictBase | None:
        """The next batch, whatever `total_frames` says; None where it went into the replay buffer.

        Raises WorkerError with the traceback of a worker that failed, after which the collector is shut down, and
        RuntimeError after `shutdown` and while it collects in the background. Batches that workers had sent before one
        failed come first, a batch of one worker at a time; with a replay buffer they are written, and the error is
        raised at once.
        """
        with self._counted_batch():
            if self._failure is None:
                self._refuse_if_shut_down()
                self._await_room()
                with self._shut_down_on_error():
                    if self._update_at_each_batch:
                        self.update_policy_weights_()
                    try:
                        batch = self._next_trajectories() if self._trajs_per_batch else self._next()
                    except WorkerError as error:
                        self._end_with(error)
            if self._failure is not None:
                batch = self._next_after_failure()
        if batch is None or self.replay_buffer is not None:
            return None
        if self.storing_device is not None:
            batch = to_storing_device(batch, self.storing_device, waits=self._waits_for_copies)
        if self.split_trajs or self._pads_trajectories:
            batch = split_trajectories(batch)
        batch = with_time_named(batch)
        return batch if self.postproc is None else self.postproc(batch)

    @abstractmethod
    def _next(self) -> TensorDictBase | None:
        """Collects the next batch; None where it is in the replay buffer."""

    @abstractmethod
    def _next_results(self) -> list[Arrived]:
        """Collects steps for `trajs_per_batch`: what was handed over, by worker."""

    def _next_trajectories(self) -> TensorDictBase | None:
        while self._assembler.count < self._trajs_per_batch:
            self._assemble(self._next_results())
        return self._take_trajectories()

    def _assemble(self, results: Sequence[Arrived]) -> None:
        """Numbers batches that began together, and adds their steps to the trajectories."""
        batches = [(k, batch) for k, batch, _ in results if not isinstance(batch, WroteFrames)]
        self._global_ids.number(batches)
        in_order = [batch.reshape(-1, batch.shape[-1]) for _, batch in batches]
        for k, batch in batches:  # steps of all workers, and of all batches, wait in one TensorDict
            layout = k, layout_of(batch)
            self._first_layout = self._first_layout or layout
            refuse_other_layout(self._first_layout, layout)
        if len({batch.shape[-1] for batch in in_order}) == 1:  # in the order of time over all
            self._assembler.add(torch.cat(in_order))
        else:
            for batch in in_order:
                self._assembler.add(batch)

    def _assemble_arrived(self) -> None:
        self._assemble(self._arrived)
        self._arrived.clear()

    def _take_trajectories(self) -> TensorDictBase | None:
        steps = self._assembler.take(min(self._trajs_per_batch, self._assembler.count))
        self.frames += steps.numel()
        if self._writer is None:
            return steps
        self._store(steps)
        return None

    def _end_with(self, failure: WorkerError) -> None:
        """Ends the workers, where one has failed for good, after what they have sent is received."""
        self._receive_arrived()
        self._failure = failure
        self._shut_down_quickly()

    def _next_after_failure(self) -> TensorDictBase | None:
        """The next batch that came before a worker failed; after the last one, raises the failure."""
        failure, self._arrived = self._failure, deque(sorted(self._arrived, key=lambda result: result.worker))
        if self._trajs_per_batch:
            self._assemble_arrived()
            while self._assembler.count:
                if (trajectories := self._take_trajectories()) is not None:
                    return trajectories
        while self._arrived:
            if (batch := self._take_first()) is not None:
                return self._as_handed_out(batch)
        assert failure is not None
        self._failure = None
        raise failure

    def _take_first(self) -> TensorDictBase | None:
        """The batch that came first; None where it is in the replay buffer."""
        result = self._arrived.popleft()
        self._seam_before([result])
        self.frames += result.frames
        if isinstance(result.batch, WroteFrames):
            return None
        self._global_ids.number([(result.worker, result.batch)])
        if self._writer is None:
            return result.batch
        self._store(result.batch)
        return None

    def _as_handed_out(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch of one worker, in the form in which batches are handed out."""
        return batch

    def _receive_arrived(self) -> None:
        """Receives the batches that workers have sent already, where one has failed."""
        for k, member in enumerate(self._members):
            with contextlib.suppress(WorkerError):  # the first failure is raised, not the others
                while member.pending and self._pool.wait([k], 0):
                    if isinstance(message := self._workers[k].receive(), BatchReady):
                        self._receive_batch(k, message)
        for k, member in enumerate(self._members):
            if member.first_steps is not None:
                self._arrived.append(Arrived(k, member.first_steps, member.begins))
                member.first_steps = None

    @property
    def _is_anything_pending(self) -> bool:
        return any(member.pending for member in self._members)

    def _post_collect(self, k: int) -> None:
        self._members[k].pending += 1
        self._workers[k].post(Collect())

    def _wait(self) -> None:
        """Waits until workers have sent batches, and receives them."""
        for k in self._wait_for_any([k for k, member in enumerate(self._members) if member.pending]):
            self._receive_message(k)

    def _receive_message(self, k: int) -> list[Any]:
        try:
            message = self._workers[k].receive()
            if isinstance(message, BatchReady):
                self._receive_batch(k, message)
                return []
        except WorkerError as error:
            self._replace(k, error)
            return []
        if isinstance(message, AwaitsRoom):
            self._members[k].awaits_room = True
            return []
        if isinstance(message, Hello):
            self._greet(k, message)
            return []
        return [message]

    def _only_waits(self, workers: list[int]) -> bool:
        return all(self._members[k].awaits_room for k in workers)

    def _receive_batch(self, k: int, message: BatchReady) -> None:
        member, batch = self._members[k], message.batch
        member.pending -= 1
        member.awaits_room = False
        self._episodes.take(message.returns, message.lengths)
        member.begins = member.begins or message.begins
        if isinstance(batch, WroteFrames):
            member.collected += batch.frames
        else:
            batch = member.reader.take(batch)
            member.collected += batch.numel()
            if member.id_offset:
                batch.set(IDS, batch.get(IDS) + member.id_offset)
        if member.first_steps is not None:
            batch, member.first_steps = joined(member.first_steps, batch), None
        if message.is_last and self._restarts.left and self._missing_steps(member, batch):
            member.first_steps = batch
            member.pending += 1  # its successor makes the rest
        else:
            self._arrived.append(Arrived(k, batch, member.begins))
            member.begins = False
        if message.is_last:
            self._workers[k].receive()  # raises the worker's error

    def _missing_steps(self, member: Member, batch: TensorDictBase | WroteFrames) -> int:
        """How many steps of each environment a batch that was cut short lacks; 0 where batches may be short."""
        if self._can_be_stopped or self._trajs_per_batch:
            return 0
        frames = batch.frames if isinstance(batch, WroteFrames) else batch.numel()
        return (member.frames - frames) // member.envs

    # ---- replacing workers ----
    def _replace(self, k: int, error: WorkerError) -> None:
        """Starts worker k anew. All that it had sent was received; it is asked again for the batches that it owes."""
        member = self._members[k]
        while True:
            self._restarts.use(error, self._workers[k].pid)
            self._pool.end(k)  # another process can have its lane now
            self._cut(k)
            member.reader, member.awaits_room = SharedBatchReader(), False
            make_env = with_own_seed(member.config.make_env.function)  # else the same episodes would come again
            member.config = member.config._replace(make_env=CloudpickleWrapper(make_env))
            seed = member.seed
            predecessor = Predecessor(
                member.collected,
                None if seed is None else (self._pool.seed_of(k, seed[0]), seed[1]),
                has_own_weights=member.config.policy_factory is not None and not self._is_updated,
            )
            self._start_worker(k, predecessor)
            try:
                if self._is_attached:
                    self._attach_worker(k)
                break
            except WorkerError as next_error:
                error = next_error
        for i in range(member.pending):
            first_steps = member.first_steps if i == 0 else None
            self._workers[k].post(Collect(None if first_steps is None else self._missing_steps(member, first_steps)))

    def _cut(self, k: int) -> None:
        """Makes sure that nothing which comes from worker k is joined with what came from it before."""
        if self._trajs_per_batch:
            self._assemble_arrived()
            self._assembler.cut(self._global_ids.current(k))
        member = self._members[k]
        batches = [member.first_steps, *(result.batch for result in self._arrived if result.worker == k)]
        ids = [
            int(batch.get(IDS).max()) for batch in batches if batch is not None and not isinstance(batch, WroteFrames)
        ]
        member.id_offset = max([-1, *ids, *self._global_ids.own(k)]) + 1
        member.begins = member.begins or member.first_steps is None

    # ---- the replay buffer ----
    def _store(self, batch: TensorDictBase) -> None:
        """Writes a batch of workers that do not write into the buffer themselves."""
        assert self._writer is not None
        self._writer.write(batch if self.postproc is None else self.postproc(with_time_named(batch)))

    def _seam_before(self, results: Sequence[Arrived]) -> None:
        """Marks a seam before the first batch of a worker that was replaced: it continues nothing."""
        if self._writer is not None and any(result.begins for result in results):
            self._writer.restart()

    def _should_attach(self) -> bool:
        """Whether to give the buffer to the workers now: they do not have it yet, and its storage can be shared."""
        buffer = self.replay_buffer
        is_ours = isinstance(buffer, ReplayBuffer)
        if self._is_attached or self.postproc is not None or self._trajs_per_batch or not is_ours:
            return False
        if not buffer.transform.stream.flushes_all:
            return False  # the steps that they hold back for a worker would be lost with it
        return sent_to_writers(buffer) is not None and can_be_shared(buffer.storage, self.num_workers)

    def _attach(self) -> None:
        """Gives the buffer to the workers; all batches that they have sent are written by now."""
        self._is_attached = True  # before a worker may have to be replaced
        for k in range(self.num_workers):
            try:
                self._attach_worker(k)
            except WorkerError as error:
                self._replace(k, error)

    def _attach_worker(self, k: int) -> None:
        self.replay_buffer.storage.release()  # a worker may need its lane
        buffer = sent_to_writers(self.replay_buffer)
        self._workers[k].send(Call(CollectorProcess.attach_buffer, (buffer, self._ids), is_question=False))

    def _report_filling(self, begins: bool) -> None:
        # Idle workers that have the storage open could write, for all that a loop over a queue knows.
        if not begins and self._is_attached and self._has_all_frames and not self._is_anything_pending:
            for k in range(self.num_workers):
                with contextlib.suppress(WorkerError):  # one that has died has nothing open
                    self._request(k, CollectorProcess.detach_buffer)
            self._is_attached = False
        super()._report_filling(begins)

    # ---- weights, seeds, states ----
    @property
    def policy_version(self) -> int:
        """The number of calls of `update_policy_weights_`, counted on from a loaded state."""
        return 0 if self._weights is None else self._weights.version

    def frames_per_batch_worker(self, *, worker_idx: int | None = None) -> int:
        """The frames of the batch of a worker (None: the first)."""
        return self._members[worker_idx or 0].frames

    def update_policy_weights_(
        self,
        policy_weights: Any = None,
        *,
        policy_or_weights: Any = None,
        weights: Any = None,
        policy: Any = None,
        weights_dict: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        worker_ids: None = None,
        version: int | None = None,
    ) -> None:
        """Updates the weights of the workers, from their next batch on, and raises `policy_version` (to `version`).

        None takes them from the policy that the collector was made with; otherwise a state dict, a module, or a
        TensorDict of parameters; `policy_or_weights`, `weights`, `policy` and `weights_dict["policy"]` are other names.
        Nothing is pickled: they are copied into memory that all workers share. Raises TypeError without weights,
        ValueError for those of another policy, another `model_id` than "policy", and for `worker_ids`,
        and either for a `version` that is not an integer from 0 to below 2**63.
        """
        self._raise_background_failure()
        version = version_argument(version)
        tensors = self._given_weights(
            policy_weights=policy_weights,
            policy_or_weights=policy_or_weights,
            weights=weights,
            policy=policy,
            weights_dict=weights_dict,
            model_id=model_id,
            worker_ids=worker_ids,
        )
        if self._weights is not None:
            if tensors is None and self._policy is None:
                raise TypeError("policy_factory made the policies of the workers; give the weights to update them with")
            if tensors is None:
                tensors = WeightsLayout.tensors_of(self._policy)
            with self._weights_lock:
                self._weights.write(tensors, version=version)
                self._is_updated = True
            self._note_newest_version(self.policy_version)
        elif tensors is not None:
            raise TypeError(f"the policy is a {type(self._policy).__name__} and has no weights; give an nn.Module")

    def encoded_spaces(self) -> EncodedSpaces:
        """The specs of observations and actions of a worker, and the gymnasium spaces that all workers have."""
        with self._asking(), self._shut_down_on_error():
            members: list[EncodedSpaces] = [
                self._request(k, CollectorProcess.encoded_spaces) for k in range(self.num_workers)
            ]
        return members[0]._replace(spaces=common_spaces(members))

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """The next reset of each environment starts from a seed of its own; returns the first that is free.

        With `static_seed` the environments of all workers start from `seed`, which is returned.
        """
        with self._asking(), self._shut_down_on_error():
            for k in range(self.num_workers):
                self._members[k].seed = seed, static_seed
                seed = self._request(k, CollectorProcess.set_seed, seed, static_seed)
        return seed

    def reset(self, reset_idx: Sequence[bool] | None = None) -> None:
        """Resets every environment of the workers before their next batch, or of those where `reset_idx` holds.

        Trajectories that have not ended are left unfinished. Batches that a worker had begun before stay as they are.

        Args:
            reset_idx: one flag for each worker; None: all.

        Raises:
            ValueError: another number of flags. Nothing is reset.
        """
        chosen = [True] * self.num_workers if reset_idx is None else [bool(flag) for flag in reset_idx]
        if len(chosen) != self.num_workers:
            raise ValueError(f"reset_idx has {len(chosen)} flags for {self.num_workers} workers; give one for each")
        with self._asking(), self._shut_down_on_error():
            for k in range(self.num_workers):
                if chosen[k]:
                    self._request(k, CollectorProcess.reset)
                    self._drop_unfinished(k)

    def _drop_unfinished(self, k: int) -> None:
        """Drops the steps of worker k's trajectories that have not ended, which go on nowhere."""
        if self._trajs_per_batch:
            self._assemble_arrived()
            self._assembler.drop(self._global_ids.current(k))

    def state_dict(self) -> dict[str, Any]:
        """Counters, and the states of the workers' collectors, with the weights of the last update.

        Batches that were not handed out are not part of it. With `trajs_per_batch` the whole trajectories that wait
        are, under "waiting". A worker that was replaced counts on from the one before; how many restarts are left is
        not part of it.
        """
        with self._asking():
            with self._shut_down_on_error():
                states = [self._request(k, CollectorProcess.state) for k in range(self.num_workers)]
            waiting = {}
            if self._trajs_per_batch:
                self._assemble_arrived()
                waiting = {"waiting": self._assembler.state_dict()}
            counts = {"frames": self.frames, "batches": self.batches, "trajectories": self._ids.value}
            return {**counts, "episodes": self._episodes.state_dict(), "workers": states, **waiting}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on after `state_dict`: every environment starts a new trajectory; batches not handed out are dropped.

        The workers, and the policy that the collector was made with, have its weights then; an earlier update is
        void. Raises ValueError for a state of another kind of collector or policy, of another number of workers, or of
        other environments, with nothing changed.
        """
        with self._asking():
            own = self._factory_state
            if self._weights is not None and own is None:
                own = self._policy.state_dict()
            validate_states(state_dict, self.num_workers, own)
            validate_waiting(state_dict, self._trajs_per_batch)
            self._validate_random_states(state_dict["workers"])
            parts = self._with_newest_weights(state_dict["workers"])
            with self._shut_down_on_error():
                for k, part in enumerate(parts):
                    self._request(k, CollectorProcess.load_state, part)
            self._arrived.clear()
            self._assembler.load_state_dict(state_dict.get("waiting", NOTHING_WAITS))
            for member, part in zip(self._members, parts, strict=True):
                member.collected = int(part["stepped"])
            self._global_ids.forget()
            if self._writer is not None:
                self._writer.restart()
            self.frames, self.batches = int(state_dict["frames"]), int(state_dict["batches"])
            self._episodes.load_state_dict(state_dict["episodes"])
            missing = int(state_dict["trajectories"]) - self._ids.value
            if missing > 0:
                self._ids.take(missing)

    def _validate_random_states(self, parts: Sequence[dict[str, Any]]) -> None:
        with self._shut_down_on_error():
            refusals = [
                f"worker {k}: {why}"
                for k, part in enumerate(parts)
                if "env_random_state" in part
                and (why := self._request(k, CollectorProcess.refusal, part["env_random_state"])) is not None
            ]
        if refusals:
            raise ValueError("the state is not of these environments.\n  " + "\n  ".join(refusals))

    def _with_newest_weights(self, parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The states of the workers, all with the newest weights among them, which become the shared ones."""
        if self._weights is None:
            return list(parts)
        newest = max(parts, key=lambda part: part["policy_version"])
        version, weights = newest["policy_version"], newest["policy_state_dict"]
        if self._factory_state is None:
            self._policy.load_state_dict(weights)
            own = WeightsLayout.tensors_of(self._policy)
        else:
            made = WeightsLayout.tensors_of(self._factory_state)
            own = {key: weights[key].to(value.dtype) for key, value in made.items()}
        self._weights.write(own, version=version)
        self._is_updated = True
        return [{**part, "policy_version": version, "policy_state_dict": weights} for part in parts]

    def _request(self, k: int, method: Callable[..., Any], *args: Any) -> Any:
        """The result of a method of worker k's process; batches that come before it are received."""
        member = self._members[k]
        # A large message would wait for a worker that waits to send a large batch.
        while member.pending and not member.awaits_room:
            if self._wait_for_any([k]):
                self._receive_message(k)
        return self._ask(k, Call(method, args))

    def shutdown(self, timeout: float | None = None, close_env: bool = True, *, raise_on_error: bool = True) -> None:
        """Ends the workers in a bounded time. A second call does nothing.

        In the background, batches that were begun are waited for, but no longer than `timeout` seconds (None: 5); what
        comes later is lost. The workers' environments are closed, whatever `close_env` says. With `raise_on_error` an
        error that has ended collecting in the background, and was not raised yet, is raised when all is done.
        """
        self._stop_background(CLOSE_TIMEOUT if timeout is None else timeout)
        self._pool.close()
        self._restore_threads()
        if raise_on_error:
            self._raise_background_failure()

    def _shut_down_quickly(self) -> None:
        self._restore_threads()
        super()._shut_down_quickly()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """As `_between_batches`, for one caller at a time: an answer of a worker is that to the caller's question."""
        with self._between_batches(), self._questions:
            self._refuse_if_shut_down()  # by an error of the caller before
            yield

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


@advised
class MultiSyncDataCollector(MultiCollector):
    """Worker processes that collect at the same time; each batch has the frames of all, with the same weights.

    Workers wait while the caller has the batch, as on-policy learning needs it. A batch is `[workers, *]` where `*` is
    the shape of one worker's: `[time]`, or `[envs, time]`; `frames_per_batch` counts all workers and is rounded up to
    whole rows. Trajectory ids count over all workers in the order of the steps. Batches come through shared memory.

    Args:
        create_env_fn: a callable for each worker that makes its environment (lambdas too), or one and `num_workers`.
            An environment instead is pickled, and each worker gets a copy: the first one goes on with its random
            numbers, the others, and those of workers that are replaced, have seeds drawn from torch's generator.
        policy: as in `SyncDataCollector`. Each worker has a copy; `update_policy_weights_` brings them up to date.
        policy_factory: makes the policy in each worker, or a list with one for each, instead of `policy`.
        frames_per_batch, total_frames: over all workers. The first may be left out beside `trajs_per_batch`, or be a
            list, of the frames of each worker's batch.
        num_workers: how many, where a single callable is given.
        create_env_kwargs: keyword arguments of `create_env_fn`, or a list of them with one for each worker.
        device, storing_device, policy_device, env_device: as in `SyncDataCollector`, or a list with one for each
            worker.
        max_frames_per_traj, reset_at_each_iter, reset_when_done, exploration_type, postproc, split_trajs,
        auto_register_policy_transforms, compile_policy, cudagraph_policy, no_cuda_sync, compact_obs: as in
            `SyncDataCollector`.
        set_truncated: as in `SyncDataCollector`, at the end of each worker's batch.
        init_random_frames: over all workers.
        trajs_per_batch: batches are so many whole trajectories of all workers, as in `SyncDataCollector`; what is left
            over waits for the next batch.
        traj_format: as in `SyncDataCollector`.
        replay_buffer: gets each batch; iterating then yields None. Workers write into it themselves where its storage
            is shared (`shared=True`, or mapped) and not for one writer (`lanes=1`); else the batches come here first.
            With a `rate_limiter` workers begin their batches as soon as samplers leave room, and write them as a whole.
        update_at_each_batch: calls `update_policy_weights_()` before each batch.
        track_policy_version: int64 `("collector", "policy_version")` says which weights acted.
        preemptive_threshold: a fraction of the workers, 0 to 1: when so many (one at least) have their batch, the
            others hand out what they have. Missing steps are zeros, and `("collector", "mask")` says which are steps.
            None: all wait.
        cat_results: "stack" (or None), or the dimension along which the workers' batches are put one after the other.
        init_fn: called first in each worker.
        pre_collect_hook, post_collect_hook: called in each worker before a batch of it, and with the batch as it was
            collected, once it is handed over; the batch counts also where the second one fails.
        num_threads: torch's threads in this process while the collector lives; None: as they are.
        num_sub_threads: torch's threads in each worker; with several, workers are not forked.
        start_method: "fork", "spawn" or "forkserver"; None: fork unless CUDA is in use.
        timeout: seconds that one step or one reset of an environment may last, making it apart; of environments that
            step together, one of all. Then its worker is killed, whatever it does, and the WorkerError names the
            worker, the environment in it and the step, counted from 1. None: any time.
        restarts: how many workers, over all, may be replaced that fail (an exception in the environment or the policy),
            die or hang, also while they make their environment. Each is a RuntimeWarning that says which, how, and how
            many restarts are left; the next failure after the last one is the WorkerError. See below.

    A worker that is replaced costs its open episodes and the steps of a batch that it had not handed over yet; after an
    exception the steps before it are handed over. Rows that were handed out or written stay, and no row comes twice.
    The new process makes the batch anew, or its rest: batches have the frames of all workers whatever happens. It
    begins with a reset, with new trajectory ids and a seam in the replay buffer; within a batch, the last step before
    the failure is marked `truncated`. With `trajs_per_batch` the steps of open trajectories that had been handed over
    end there, truncated. It calls `init_fn` and `policy_factory` anew, and has the weights of the last update (with
    `policy_factory`, before the first one, those that it made), its random frames behind it, and, after `set_seed`,
    seeds that follow from the seed of the worker and the number of its restarts. A worker that is killed while it
    writes into the buffer itself leaves rows there that `frames` does not count; those that a transform of the buffer
    holds back are lost.

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
        frames_per_batch: int | Sequence[int] | None = None,
        preemptive_threshold: float | None = None,
        cat_results: str | int | None = "stack",
        **kwargs: Any,
    ) -> None:
        cat_results = "stack" if cat_results is None else cat_results
        if cat_results != "stack" and (not isinstance(cat_results, int) or isinstance(cat_results, bool)):
            raise ValueError(f'cat_results must be "stack" or a dimension, got {cat_results!r}')
        validate_threshold(preemptive_threshold)
        self._cat_results = cat_results
        self._threshold = preemptive_threshold
        self._can_be_stopped = preemptive_threshold is not None
        self._is_stopped = False  # whether the workers that have no batch yet were told to hand out what they have
        super().__init__(create_env_fn, policy, frames_per_batch=frames_per_batch, **kwargs)

    def _frames_of_workers(self, frames_per_batch: int | Sequence[int] | None, n: int) -> Sequence[int | None]:
        if isinstance(frames_per_batch, int):
            frames_per_batch = -(-frames_per_batch // n)
        return super()._frames_of_workers(frames_per_batch, n)

    def _frames_of_batch(self) -> int:
        return sum(member.frames for member in self._members)

    def _next(self) -> TensorDictBase | None:
        if self._should_attach():
            self._attach()
        return self._combine(self._next_results())

    def _next_results(self) -> list[Arrived]:
        self._is_stopped = False
        for k in range(self.num_workers):
            self._post_collect(k)
        share = 1 if self._threshold is None else self._threshold
        enough = max(1, math.ceil(share * self.num_workers))
        while self._is_anything_pending:
            self._wait()
            if sum(not member.pending for member in self._members) >= enough and not self._is_stopped:
                self._is_stopped = True
                self._stop_the_others()
        results = sorted(self._arrived, key=lambda result: result.worker)
        self._arrived.clear()
        return results

    def _stop_the_others(self) -> None:
        for worker, member in zip(self._workers, self._members, strict=True):
            if member.pending:
                worker.post(Stop())

    def _replace(self, k: int, error: WorkerError) -> None:
        super()._replace(k, error)
        if self._is_stopped and self._members[k].pending:
            self._workers[k].post(Stop())

    def _combine(self, results: list[Arrived]) -> TensorDictBase | None:
        self._seam_before(results)
        batches = [(k, batch) for k, batch, _ in results if not isinstance(batch, WroteFrames)]
        self.frames += sum(result.frames for result in results)
        self._global_ids.number(batches)
        in_order = [batch for _, batch in batches]
        for k, batch in batches[1:]:
            refuse_other_layout((batches[0][0], layout_of(in_order[0])), (k, layout_of(batch)))
        if self.replay_buffer is not None:
            have_one_shape = len({batch.shape for batch in in_order}) == 1
            if have_one_shape:
                in_order = [torch.stack(in_order).reshape(-1, in_order[0].shape[-1])]  # [workers * envs, time]
            for batch in in_order:
                self._store(batch)
            return None
        self._refuse_other_shapes(batches)
        return self._join(in_order)

    def _refuse_other_shapes(self, batches: Sequence[tuple[int, TensorDictBase]]) -> None:
        """Raises ValueError for batches of two workers of which stacking, or `cat_results`, makes no batch."""
        (j, first), *others = batches
        varying = {first.ndim - 1} if self._threshold is not None else set[int]()  # those are padded
        if self._cat_results != "stack":
            varying.add(int(self._cat_results) % first.ndim)
        for k, batch in others:
            pairs = enumerate(zip(first.shape, batch.shape, strict=False))
            if batch.ndim != first.ndim or any(a != b for dim, (a, b) in pairs if dim not in varying):
                raise ValueError(
                    f"the batches of workers {j} and {k} do not go into one: they have the shapes {list(first.shape)} "
                    f"and {list(batch.shape)}. {ONE_BATCH}"
                )

    def _join(self, batches: list[TensorDictBase]) -> TensorDictBase:
        if self._threshold is not None:
            longest = max(batch.shape[-1] for batch in batches)
            batches = [padded(batch, longest) for batch in batches]
        return torch.stack(batches) if self._cat_results == "stack" else torch.cat(batches, int(self._cat_results))

    def _as_handed_out(self, batch: TensorDictBase) -> TensorDictBase:
        return self._join([batch])


class MultiaSyncDataCollector(MultiCollector):
    """Worker processes that collect all the time; each batch is one worker's, in the order in which they are ready.

    A worker goes on while its batch waits and while the caller learns, up to two batches ahead: a batch may have been
    made with weights that are two updates old; one batch, where a `rate_limiter` of the replay buffer has those who
    write wait. Batches are `[time]`, or `[envs, time]`, of
    `frames_per_batch` frames, rounded up to whole rows. Trajectory ids count in the order in which batches are handed
    out. Batches that were collected at the end and not handed out are lost.

    Args:
        create_env_fn: a callable for each worker that makes its environment (lambdas too), or one and `num_workers`.
            An environment instead is pickled, and each worker gets a copy: the first one goes on with its random
            numbers, the others, and those of workers that are replaced, have seeds drawn from torch's generator.
        policy: as in `SyncDataCollector`. Each worker has a copy; `update_policy_weights_` brings them up to date.
        frames_per_batch: of one worker's batch, or a list with one for each.
        preemptive_threshold, cat_results="stack": without effect, as no batches are joined.
        total_frames: over all workers.
        num_workers, device, storing_device, policy_device, env_device, max_frames_per_traj, init_random_frames,
        reset_at_each_iter, exploration_type, postproc, split_trajs, trajs_per_batch, replay_buffer,
        update_at_each_batch, track_policy_version, start_method, timeout, restarts, and the others:
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
        return max(member.frames for member in self._members)

    def _next(self) -> TensorDictBase | None:
        attaches = self._should_attach()  # asked once: another thread may write the first rows now
        if attaches and not self._arrived and not self._is_anything_pending:
            self._attach()
            attaches = False
        if not self._is_finishing and not attaches:  # else all are written before new ones are begun
            self._request_batches()
        while not self._arrived:
            self._wait()
        return self._take_first()

    def _next_results(self) -> list[Arrived]:
        if not self._is_finishing:
            self._request_batches()
        if not self._arrived:
            self._wait()
        results = list(self._arrived)[:1]
        if results:
            self._arrived.popleft()
        return results

    def _request_batches(self) -> None:
        # Nobody counts what is begun: a second batch would have room that the first one takes.
        ahead = 1 if self._is_bounded else self._ahead
        for k, member in enumerate(self._members):
            waiting = sum(1 for result in self._arrived if result.worker == k)
            for _ in range(ahead - member.pending - waiting):
                if self._has_enough_under_way():
                    return
                self._post_collect(k)

    @property
    def _is_bounded(self) -> bool:
        """Whether a rate limiter has those who write wait, or a queue; `MinSize` does not."""
        return self._awaited is not None and self._awaited.holds_writers_back

    def _has_enough_under_way(self) -> bool:
        """Whether no more batches are begun: what is in the buffer counts, and `total_frames` are not to be exceeded.

        How many steps whole trajectories take is not known before.
        """
        if not self.is_running() or self.total_frames < 0 or self._trajs_per_batch:
            return False
        waiting = sum(result.frames for result in self._arrived)
        pending = sum(member.pending * member.frames for member in self._members)
        return self.total_frames <= self.frames + waiting + pending

    def _finish_batches(self) -> None:
        self._is_finishing = True
        try:
            while self._arrived or self._is_anything_pending:
                self._finish_steps() if self._trajs_per_batch else self.rollout()
        finally:
            self._is_finishing = False

    def _finish_steps(self) -> None:
        """Receives steps that were begun for `trajs_per_batch`; those of whole trajectories wait for their batch."""
        with self._shut_down_on_error():
            try:
                self._assemble(self._next_results())
            except WorkerError as error:
                self._end_with(error)
        if self._failure is not None:
            self._next_after_failure()


def validate_threshold(preemptive_threshold: float | None) -> None:
    """Raises ValueError for a number that is not a fraction."""
    if preemptive_threshold is not None and not 0 <= preemptive_threshold <= 1:
        raise ValueError(f"preemptive_threshold must be in [0, 1], or None, got {preemptive_threshold}")


def _sendable(function: Callable[..., Any] | None) -> CloudpickleWrapper | None:
    return None if function is None else CloudpickleWrapper(function)


def can_be_shared(storage: Any, num_workers: int) -> bool:
    """Whether workers can write into `storage`. Raises ValueError where it is for one writer."""
    lanes = storage.lanes
    if lanes.locks is None:
        return False  # without a layout yet, or in private memory
    if storage.ndim > 1 and num_workers > 1:
        return False  # such a storage has one lane
    if num_workers > 1 and not (lanes.takes_turns or lanes.moves_on):
        raise ValueError(
            f"{num_workers} workers write to the replay buffer, and its storage has lanes=1, which is for one writer; "
            f"make it with lanes={num_workers}"
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
