"""Collecting on the nodes of a Ray cluster: an actor on each of them, which writes into the store of its node."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from tensordict import TensorDictBase
from torch import nn

from engram.collectors import MultiSyncDataCollector, SyncDataCollector
from engram.distributed.ray_buffer import RayReplayBuffer, import_ray
from engram.distributed.weights import WeightsFetcher, WeightsOffer, WeightsPublisher
from engram.envs.utils import ExplorationType
from engram.errors import NoFreeLaneError, ShardGoneError, ShardUnavailableError, WorkerError
from engram.kernel.advice import advised
from engram.kernel.collecting import (
    ABANDON_INTERVAL,
    TRAJECTORY_IDS,
    BackgroundCollector,
    CollectorSettings,
    CollectorStats,
    Device,
    EpisodeStats,
    Throughput,
    collector_stats,
    makers_of_workers,
    on_cpu,
    one_of_weights,
    seed_after,
    tensors_of,
)

_ID_BITS = 32  # of a trajectory's id that its producer counts; the others are the producer's number
_PRODUCERS = 1 << 31
_MOST_EMPTY_LIVES = 3  # of one collector that died without a batch, in a row: the next one would, too
_PATIENCE = 120.0  # seconds in which the shards tell how many rows of a dead collector are in
_PAUSE = 0.05  # seconds between two tries of that
_CLOSE_TIMEOUT = 5.0
_LOOK_INTERVAL = 0.5  # seconds between two looks at whether a collector hangs

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _Config:
    """What one life of a collector begins with.

    Attributes:
        workers: 1: the environment is stepped by the actor itself.
        names: of its producers, one for each worker, which no other life has.
        first_producer: the number of the first of them, in the high bits of trajectory ids.
    """

    make_env: Callable[[], Any]
    policy_factory: Callable[[], Any] | None
    settings: dict[str, Any]
    workers: int
    postproc: Callable[[TensorDictBase], TensorDictBase] | None
    replay_buffer: RayReplayBuffer | None
    names: tuple[str, ...]
    first_producer: int
    seed: tuple[int, bool] | None


class _Report(NamedTuple):
    """What a collector says after a batch.

    Attributes:
        frames: how many it has collected in this life; with a replay buffer, how many of its rows are in.
        batch: None where it is in the replay buffer.
        returns, lengths: of the episodes that ended in it.
    """

    frames: int
    batch: TensorDictBase | None
    returns: list[float]
    lengths: list[int]


class _CollectorActor:
    """A collector in a process of its own, perhaps with workers, and their producers."""

    def begin(self, config: _Config, policy: Any) -> int:
        """Makes environments and policies; returns the frames of a batch."""
        torch.set_num_threads(1)
        self._config, self._fetcher = config, WeightsFetcher()
        arguments = {"policy_factory": config.policy_factory, "track_policy_version": True, **config.settings}
        self._collector: Any
        if config.workers == 1:
            self._collector = SyncDataCollector(config.make_env, policy, **arguments)
        else:
            makers = [config.make_env] * config.workers
            self._collector = MultiSyncDataCollector(makers, policy, **arguments)
        if config.seed is not None:
            self._collector.set_seed(*config.seed)
        self._episodes: list[EpisodeStats] = []
        self._frames = 0
        buffer = config.replay_buffer
        self._buffers = [] if buffer is None else [buffer.producing_as(name) for name in config.names]
        return int(self._collector.frames_per_batch)

    def place(self) -> tuple[str, int]:
        """Its node, and its process."""
        return str(import_ray().get_runtime_context().get_node_id()), os.getpid()

    def set_seed(self, seed: int, static_seed: bool) -> int:
        return int(self._collector.set_seed(seed, static_seed))

    def state_dict(self) -> dict[str, Any]:
        """The state of the collector inside."""
        state: dict[str, Any] = self._collector.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], names: tuple[str, ...], first_producer: int) -> None:
        """Goes on after a state, as other producers: what follows continues no trajectory that was written before."""
        self._collector.load_state_dict(state)
        before, buffer = self._buffers, self._config.replay_buffer
        self._config = dataclasses.replace(self._config, names=names, first_producer=first_producer)
        self._buffers = [] if buffer is None else [buffer.producing_as(name) for name in names]
        self._episodes, self._frames, self._fetcher = [], 0, WeightsFetcher()
        for one in before:
            _close_producer(one)

    def collect(self, offer: WeightsOffer | None) -> _Report:
        """Collects a batch with the newest weights, and writes it, where there is a replay buffer."""
        weights = self._fetcher.fetch(offer)
        if weights is not None:
            self._collector.update_policy_weights_(weights, version=self._fetcher.version)
        batch = self._collector.rollout()
        parts = [batch] if self._config.workers == 1 else list(batch.unbind(0))
        before = [episodes.count for episodes in self._episodes]
        for k, part in enumerate(parts):
            self._add_producer(part, k)
        self._note_episodes(parts)
        if self._config.postproc is not None:
            parts = [self._config.postproc(part) for part in parts]
        returns, lengths = self._ended_since(before)
        if not self._buffers:
            batch = parts[0] if self._config.workers == 1 else torch.stack(parts)
            self._frames += batch.numel()
            return _Report(self._frames, batch, returns, lengths)
        for buffer, part in zip(self._buffers, parts, strict=False):  # fewer parts: a worker has failed
            _until_shard_answers(functools.partial(buffer.extend, part.reshape(-1)))
        for buffer in self._buffers:
            _until_shard_answers(buffer.flush)
        rows = sum(_until_shard_answers(buffer.rows_in) for buffer in self._buffers)
        return _Report(rows, None, returns, lengths)

    def _add_producer(self, part: TensorDictBase, worker: int) -> None:
        """Makes trajectory ids those of this producer."""
        ids = part.get(TRAJECTORY_IDS, None)
        if ids is not None:
            producer = (self._config.first_producer + worker) % _PRODUCERS
            part.set(TRAJECTORY_IDS, ids + (producer << _ID_BITS))

    def _note_episodes(self, parts: Sequence[TensorDictBase]) -> None:
        for k, part in enumerate(parts):
            if len(self._episodes) <= k:
                self._episodes.append(EpisodeStats(part.shape[:-1].numel()))
            self._episodes[k].add_batch(part)

    def _ended_since(self, before: list[int]) -> tuple[list[float], list[int]]:
        returns: list[float] = []
        lengths: list[int] = []
        for k, episodes in enumerate(self._episodes):
            new_returns, new_lengths = episodes.latest(before[k] if k < len(before) else 0)
            returns, lengths = returns + new_returns, lengths + new_lengths
        return returns, lengths

    def close(self) -> None:
        """Ends workers, and gives the lanes back, after the steps that transforms hold back are in."""
        self._collector.shutdown(raise_on_error=False)
        for buffer in self._buffers:
            _close_producer(buffer)


def _close_producer(buffer: RayReplayBuffer) -> None:
    """Writes what its transforms hold back, and gives its lane back, as soon as its shard answers."""
    if buffer.transform.can_flush:
        _until_shard_answers(buffer.flush_transforms)
    _until_shard_answers(buffer.flush)
    buffer.close()


def _until_shard_answers(call: Callable[[], T]) -> T:
    """Calls again while the shard is away: its rows are kept, or were not sent. ShardGoneError: it is for good."""
    while True:
        try:
            return call()
        except ShardGoneError:
            raise
        except ShardUnavailableError:
            continue


@dataclasses.dataclass
class _Life:
    """One collector from its beginning to its death: an actor, and what is known of it."""

    actor: Any
    placed: Any  # the reference of what `place` returns: its process runs
    begun: Any  # the reference of what `begin` returns
    names: tuple[str, ...]
    frames: int = 0  # of it that are counted
    batches: int = 0
    busy_since: float | None = None  # when it was asked for what it does now; None: nobody has looked yet
    has_begun: bool = False  # as far as anybody has looked


class _Overdue(Exception):
    """A collector did not end a batch in time."""


@advised
class RayCollector(BackgroundCollector):
    """Collectors on the nodes of a Ray cluster, used as one that collects here.

    Each collector is an actor, and may have workers inside. With a `RayReplayBuffer` it writes into the store of its
    node, each worker into a lane of its own, so that nothing is sent; iterating then yields None, as with all
    collectors. Without one, batches come here.

    A collector that dies, alone or with its node, is made anew, with a RuntimeWarning. It goes on where its rows ended,
    with new trajectories and a seam before them: the lane has counted which rows are in, so `frames` has each row of
    the replay buffer once, whenever it died. What it had not written is collected anew, and what its transforms held
    back is lost. With `batch_timeout` one that hangs is ended and made anew in the same way.

    Args:
        create_env_fn: makes the environment of a collector, or a list with one for each.
        policy: as `SyncDataCollector`; each collector has a copy.
        policy_factory: makes the policy in each collector (or a list), instead of `policy`.
        frames_per_batch: with `sync`, over all collectors, rounded up to whole rows; else of one collector's batch.
        total_frames: over all collectors. -1: no end.
        create_env_kwargs: keyword arguments of `create_env_fn`, or a list of them with one for each collector.
        device, storing_device, env_device, policy_device, max_frames_per_traj, reset_at_each_iter, exploration_type,
            pre_collect_hook, post_collect_hook: as `SyncDataCollector`, in each collector.
        init_random_frames: over all collectors.
        postproc: called on the batch of each worker, where it was collected.
        collector_kwargs: further arguments of the collectors inside, `SyncDataCollector` or (with several workers)
            `MultiSyncDataCollector`; or a list of them with one for each.
        num_workers_per_collector: processes that step environments in each collector.
        sync: True: a batch is one of all collectors with the same weights, who wait while the caller has it. False:
            collectors go on, and a batch is one of whoever has it first.
        ray_init_config: arguments of `ray.init`, where Ray has not been started.
        remote_configs: options of the actors, as `ray.remote` takes them, or a list with one for each. Unless they
            name a `scheduling_strategy`, collectors go to the nodes of the buffer's shards first, then to others, in
            turn. `{"num_cpus": 1}`.
        num_collectors: how many, where a single `create_env_fn` is given.
        batch_timeout: seconds that one collector may take for a batch, or for making its environments, from when it is
            asked and its process runs: one that hangs longer, wherever it does, is ended and made anew. It must be
            longer than a shard may be away, for which collectors wait. None: no limit. (A limit for each step, of the
            workers inside: `collector_kwargs={"timeout": ...}`.)
        update_after_each_batch: calls `update_policy_weights_()` before each batch.
        replay_buffer: a `RayReplayBuffer`, with a lane for each worker and for each other writer. Its transforms run
            in the collectors; where they hold steps back, `frames` counts the rows that are in.
        use_env_creator, trust_policy, no_cuda_sync, use_buffers: accepted without effect.

    `("collector", "policy_version")` of each frame says which weights acted. The upper 31 bits of trajectory ids are
    the number of the worker, over all lives.

    Raises:
        ImportError: without Ray.
        ValueError, TypeError: arguments that cannot work.
        WorkerError: an environment or a policy failed, with its traceback; or one collector died, or hung, again and
            again before its first batch. All are ended then.

    Example:
        >>> collector = RayCollector(
        ...     make_env, policy, frames_per_batch=1000, total_frames=1_000_000, num_collectors=8, replay_buffer=rb
        ... )  # doctest: +SKIP
        >>> for _ in collector:  # doctest: +SKIP
        ...     train(rb.sample())
        ...     collector.update_policy_weights_()
    """

    def __init__(
        self,
        create_env_fn: Callable[..., Any] | Sequence[Callable[..., Any]],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        device: Device = None,
        storing_device: Device = None,
        env_device: Device = None,
        policy_device: Device = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_workers_per_collector: int = 1,
        sync: bool = False,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_collectors: int | None = None,
        batch_timeout: float | None = None,
        update_after_each_batch: bool = False,
        replay_buffer: RayReplayBuffer | None = None,
        pre_collect_hook: Callable[[], Any] | None = None,
        post_collect_hook: Callable[[TensorDictBase], Any] | None = None,
        use_env_creator: bool = False,
    ) -> None:
        makers, policy_makers = makers_of_workers(
            create_env_fn, create_env_kwargs, policy, policy_factory, num_collectors
        )
        n = len(makers)
        settings = CollectorSettings.of(locals(), replay_buffer=None)
        if isinstance(num_workers_per_collector, bool) or num_workers_per_collector < 1:
            raise ValueError(f"num_workers_per_collector must be 1 or more, got {num_workers_per_collector}")
        if replay_buffer is not None and not isinstance(replay_buffer, RayReplayBuffer):
            raise TypeError(
                f"a {type(replay_buffer).__name__} lies in this process, and collectors on other nodes cannot write "
                "to it; make a RayReplayBuffer, or leave replay_buffer out and extend it with each batch"
            )
        if update_after_each_batch and not isinstance(policy, nn.Module):
            raise ValueError("update_after_each_batch=True takes weights from the policy; give an nn.Module")
        self._batch_timeout = _checked_timeout(batch_timeout)
        self._settings = dataclasses.replace(
            settings, frames_per_batch=-(-frames_per_batch // n) if sync else frames_per_batch, total_frames=-1
        )
        self._hooks = {"pre_collect_hook": pre_collect_hook, "post_collect_hook": post_collect_hook}
        self._kwargs = _one_for_each("collector_kwargs", collector_kwargs, n)
        options = _one_for_each("remote_configs", remote_configs, n)
        self._makers, self._policy_makers, self._policy = makers, policy_makers, policy
        self._workers, self.postproc, self._sync = num_workers_per_collector, postproc, sync
        self.replay_buffer, self._update_after_each_batch = replay_buffer, update_after_each_batch
        self._random_frames = -(-(settings.init_random_frames or 0) // n)
        self.num_collectors, self.total_frames = n, settings.total_frames
        self.requested_frames_per_batch = frames_per_batch
        self.frames = self.batches = 0
        self._weights = WeightsPublisher(tensors_of(policy) if isinstance(policy, nn.Module) else None)
        self._episodes, self._throughput = EpisodeStats(0), Throughput()
        self._name, self._next_producer = f"collector-{secrets.token_hex(6)}", secrets.randbelow(_PRODUCERS)
        self._collected = [0] * n  # by collector, over all lives
        self._lives_begun, self._empty_lives = [0] * n, [0] * n
        self._seeds: list[tuple[int, bool] | None] = [None] * n
        self._pending: dict[Any, int] = {}  # calls of `collect`, and whose they are
        self._arrived: deque[tuple[int, _Report]] = deque()
        self._is_shut_down = False
        if not import_ray().is_initialized():
            import_ray().init(**(ray_init_config or {}))
        self._options = _placed([{"num_cpus": 1, **one} for one in options], replay_buffer)
        self._sent_policy = None if policy is None else import_ray().put(on_cpu(policy))
        self._lives = [self._begin_life(k) for k in range(n)]
        with self._shut_down_on_error():
            frames = [self._answer_of_begin(k) for k in range(n)]
        self.frames_per_batch = sum(frames) if sync else max(frames)
        settings.warn_of_remainder(self.frames_per_batch)

    # ---- lives ----
    def _begin_life(self, k: int) -> _Life:
        life = self._lives_begun[k]
        self._lives_begun[k] += 1
        names = self._names(k)
        seed = self._seeds[k]
        config = _Config(
            make_env=self._makers[k], policy_factory=self._policy_makers[k],
            settings={
                **self._settings.arguments(), **self._hooks, **self._kwargs[k],
                "init_random_frames": max(0, self._random_frames - self._collected[k]),
            },
            workers=self._workers, postproc=self.postproc, replay_buffer=self.replay_buffer, names=names,
            first_producer=self._next_producer,
            seed=None if seed is None or not life else (seed_after(seed[0], life), seed[1]),
        )  # fmt: skip
        self._next_producer = (self._next_producer + self._workers) % _PRODUCERS
        # Ray itself does not restart it: first is counted what the life before has written.
        actor = import_ray().remote(**{**self._options[k], "max_restarts": 0})(_CollectorActor).remote()
        return _Life(actor, actor.place.remote(), actor.begin.remote(config, self._sent_policy), names)

    def _names(self, k: int) -> tuple[str, ...]:
        """Of the producers of a collector's newest life, which no other has."""
        life = self._lives_begun[k] - 1
        return tuple(f"{self._name}-{k}-{life}-{worker}" for worker in range(self._workers))

    def _answer_of_begin(self, k: int) -> int:
        while True:
            try:
                return int(self._answer(k, self._lives[k].begun))
            except _Overdue as error:
                self._end(k)
                self._replace(k, error)
            except import_ray().exceptions.RayTaskError as error:
                raise self._failed(k, error) from error.cause
            except import_ray().exceptions.RayActorError as error:
                self._replace(k, error)

    def _answer(self, k: int, reference: Any) -> Any:
        """What a collector answers to a call that was just made.

        Raises:
            _Overdue: it takes longer than `batch_timeout`.
        """
        self._lives[k].busy_since = None
        while not import_ray().wait([reference], timeout=self._interval())[0]:
            if self._background is not None:
                self._background.raise_if_abandoned()
            self._refuse_overdue(k, reference)
        return import_ray().get(reference)

    def _interval(self) -> float | None:
        """Seconds between two looks at whether a collector hangs, or the caller has given up."""
        intervals = [] if self._background is None else [ABANDON_INTERVAL]
        if self._batch_timeout is not None:
            intervals.append(min(_LOOK_INTERVAL, self._batch_timeout / 4))
        return min(intervals, default=None)

    def _refuse_overdue(self, k: int, reference: Any) -> None:
        """_Overdue for a collector that has been busy with a call for too long.

        The time begins when its process runs, and anew when it has made its environments.
        """
        life, now = self._lives[k], time.monotonic()
        if self._batch_timeout is None:
            return
        if not life.has_begun and _has_come(life.begun):
            life.has_begun, life.busy_since = True, None
        if life.busy_since is None:
            life.busy_since = now if life.has_begun or _has_come(life.placed) else None
        elif now - life.busy_since > self._batch_timeout and not _has_come(reference):
            what = "a batch" if life.has_begun else "making its environments"
            raise _Overdue(f"{what} did not end within batch_timeout={self._batch_timeout:g} seconds")

    def _end(self, k: int) -> None:
        """Ends the process of a collector, whatever it does."""
        import_ray().kill(self._lives[k].actor)

    def _failed(self, k: int, error: Any) -> WorkerError:
        return WorkerError(f"collector {k} of {type(self).__name__}", str(error))

    def _replace(self, k: int, error: BaseException) -> None:
        """Counts what a collector that died has written, and begins its next life."""
        life = self._lives[k]
        written = 0 if self.replay_buffer is None else self._rows_of(life)
        self._count(k, max(0, written - life.frames))
        self._empty_lives[k] = 0 if life.batches or written else self._empty_lives[k] + 1
        if self._empty_lives[k] >= _MOST_EMPTY_LIVES:
            raise WorkerError(
                f"collector {k} of {type(self).__name__}",
                f"it died {self._empty_lives[k]} times before its first batch, at last so:\n{error}",
            ) from error
        why = f"was ended, as {error}," if isinstance(error, _Overdue) else f"died ({type(error).__name__})"
        warnings.warn(
            f"collector {k} of {type(self).__name__} {why} after {self._collected[k]} frames, and is made anew; its "
            "open episodes are lost",
            RuntimeWarning,
            stacklevel=2,
        )
        self._lives[k] = self._begin_life(k)

    def _rows_of(self, life: _Life) -> int:
        """Ends the tenancies of a dead collector; returns how many of its rows are in."""
        assert self.replay_buffer is not None
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                return sum(self.replay_buffer.end_producer(name) for name in life.names)
            except ShardGoneError:
                raise
            except (NoFreeLaneError, ShardUnavailableError):  # its process is just ending; the shard comes back
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE)

    def _count(self, k: int, frames: int) -> None:
        self.frames += frames
        self._collected[k] += frames

    # ---- collecting ----
    def rollout(self) -> TensorDictBase | None:
        """The next batch, whatever `total_frames` says; None where it went into the replay buffer.

        With `sync`, `[collectors * workers, *]`; else `[*]` of one collector, `[workers, *]` where it has several.

        Raises:
            WorkerError: an environment or a policy failed; the collector is shut down.
            RuntimeError: after `shutdown`, and while it collects in the background.
        """
        self._refuse_beside_background()
        self._refuse_if_shut_down()
        before, began = self.frames, time.perf_counter()
        with self._shut_down_on_error():
            if self._update_after_each_batch:
                self.update_policy_weights_()
            reports = self._next_of_all() if self._sync else [self._next_of_any()]
        self.batches += 1
        self._throughput.add(self.frames - before, time.perf_counter() - began)
        if self.replay_buffer is not None:
            return None
        batches = [report.batch for _, report in sorted(reports, key=lambda one: one[0]) if report.batch is not None]
        if not self._sync:
            return batches[0]
        if self._workers > 1:
            return torch.cat(batches)
        return torch.stack(batches)

    def _next_of_all(self) -> list[tuple[int, _Report]]:
        for k in range(self.num_collectors):
            if k not in self._pending.values():
                self._post(k)
        while self._pending:
            self._take_one()
        reports = list(self._arrived)
        self._arrived.clear()
        return reports

    def _next_of_any(self) -> tuple[int, _Report]:
        for k in range(self.num_collectors):
            if k not in self._pending.values() and (not self._pending or self._is_more_needed()):
                self._post(k)
        while not self._arrived:
            self._take_one()
        k, report = self._arrived.popleft()
        if self._is_more_needed():  # before the caller has the batch
            self._post(k)
        return k, report

    def _is_more_needed(self) -> bool:
        on_their_way = len(self._pending) * self.frames_per_batch
        return self.total_frames < 0 or self.frames + on_their_way < self.total_frames

    def _post(self, k: int) -> None:
        self._lives[k].busy_since = None
        self._pending[self._lives[k].actor.collect.remote(self._weights.offer)] = k

    def _take_one(self) -> None:
        """Waits for the next report; a collector that has died, or hangs, is replaced, and asked again."""
        done: list[Any] = []
        while not done:
            if self._background is not None:
                self._background.raise_if_abandoned()
            self._replace_overdue()  # also while others come all the time
            done, _ = import_ray().wait(list(self._pending), num_returns=1, timeout=self._interval())
        k = self._pending.pop(done[0])
        try:
            report: _Report = import_ray().get([self._lives[k].begun, done[0]])[1]
        except import_ray().exceptions.RayTaskError as error:
            raise self._failed(k, error) from error.cause
        except import_ray().exceptions.RayError as error:  # the actor, its node, or the batch on its way
            import_ray().kill(self._lives[k].actor)
            self._replace(k, error)
            self._post(k)
            return
        life = self._lives[k]
        life.batches += 1
        self._count(k, report.frames - life.frames)
        life.frames = report.frames
        self._episodes.take(report.returns, report.lengths)
        self._arrived.append((k, report))

    def _replace_overdue(self) -> None:
        """Ends collectors that hang; those that follow are asked again."""
        for reference, k in list(self._pending.items()) if self._batch_timeout is not None else []:
            try:
                self._refuse_overdue(k, reference)
            except _Overdue as error:
                del self._pending[reference]
                self._end(k)
                self._replace(k, error)
                self._post(k)

    def _finish_batches(self) -> None:
        """Waits for what collectors were asked for; batches that are handed out stay for the next `rollout`."""
        while self._pending:
            self._take_one()
        if self.replay_buffer is not None:
            self._arrived.clear()

    @property
    def stats(self) -> CollectorStats:
        """Frames, speed, and returns and lengths of the last episodes of all collectors, for a progress bar."""
        return collector_stats(self.frames, self.batches, self._episodes, self._throughput)

    @property
    def remote_collectors(self) -> list[Any]:
        """The actors, as they are now."""
        return [life.actor for life in self._lives]

    # ---- weights and seeds ----
    @property
    def policy_version(self) -> int:
        """The number of calls of `update_policy_weights_`."""
        return self._weights.version

    def update_policy_weights_(self, policy_weights: Any = None, *, policy_or_weights: Any = None) -> None:
        """Updates the weights of all collectors, from the next batch on that each is asked for.

        None takes them from the policy that this was made with; otherwise a state dict, a module, or a TensorDict of
        parameters; `policy_or_weights` is a second name. They become one block in Ray's object store, which each node
        fetches once; nothing waits for it.

        Raises:
            TypeError: without weights.
            ValueError: those of another policy.
        """
        self._raise_background_failure()
        weights = one_of_weights(policy_weights=policy_weights, policy_or_weights=policy_or_weights)
        if weights is None and not isinstance(self._policy, nn.Module):
            raise TypeError(f"the policy is a {type(self._policy).__name__} and has no weights; give an nn.Module")
        self._weights.publish(tensors_of(self._policy if weights is None else weights))

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """The next reset of each environment starts from a seed of its own; returns the first that is free.

        With `static_seed` all start from `seed`, which is returned. A collector that is made anew has seeds that follow
        from its seed and the number of its lives.
        """
        with self._between_batches(), self._shut_down_on_error():
            self._finish_batches()
            for k in range(self.num_collectors):
                self._seeds[k] = (seed, static_seed)
                seed = self._seed_one(k, seed, static_seed)
        return seed

    def _seed_one(self, k: int, seed: int, static_seed: bool) -> int:
        return int(self._ask(k, lambda life: life.actor.set_seed.remote(seed, static_seed)))

    def _ask(self, k: int, make_call: Callable[[_Life], Any]) -> Any:
        """The answer of a collector that does nothing else now; of its next life where it dies."""
        while True:
            try:
                return self._answer(k, make_call(self._lives[k]))
            except _Overdue as error:
                self._end(k)
                self._replace(k, error)
            except import_ray().exceptions.RayTaskError as error:
                raise self._failed(k, error) from error.cause
            except import_ray().exceptions.RayError as error:
                self._replace(k, error)

    # ---- state ----
    def state_dict(self) -> dict[str, Any]:
        """Counters, the newest weights with their version, and the states of the collectors inside.

        Batches that were not handed out are not part of it; with a replay buffer all rows of `frames` are in it then.
        """
        with self._between_batches(), self._shut_down_on_error():
            self._finish_batches()
            states = [self._ask(k, lambda life: life.actor.state_dict.remote()) for k in range(self.num_collectors)]
            weights = self._weights.newest()
            if weights is None and isinstance(self._policy, nn.Module):  # those that all lives begin with
                weights = {name: t.clone() for name, t in tensors_of(import_ray().get(self._sent_policy)).items()}
            waiting = sum(report.batch.numel() for _, report in self._arrived if report.batch is not None)
            return {
                "frames": self.frames - waiting, "batches": self.batches, "episodes": self._episodes.state_dict(),
                "policy_version": self.policy_version, "weights": weights, "collectors": states,
                "collected": list(self._collected),
            }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on after `state_dict`: every environment starts a new trajectory; batches not handed out are dropped.

        All collectors, and the policy that this was made with, have its weights then, under their version. Rows that
        were written stay in the replay buffer; those that follow have lanes of their own.

        Raises:
            ValueError: a state of another kind or number of collectors, or of another policy. Nothing was changed.
            WorkerError: it does not fit the environments or the policies of the collectors, which are ended then.
        """
        state = dict(state_dict)
        weights = self._validated_weights(state)
        with self._between_batches(), self._shut_down_on_error():
            self._finish_batches()
            self._arrived.clear()
            if weights is not None:
                if isinstance(self._policy, nn.Module):
                    self._policy.load_state_dict({**self._policy.state_dict(), **weights})
                self._weights.publish(weights, int(state["policy_version"]))
            else:
                self._weights.offer = None  # the states of the collectors have theirs
            for k, part in enumerate(state["collectors"]):
                self._load_one(k, part)
            self._collected = [int(n) for n in state["collected"]]
            self.frames, self.batches = int(state["frames"]), int(state["batches"])
            self._episodes.load_state_dict(state["episodes"])

    def _load_one(self, k: int, part: dict[str, Any]) -> None:
        self._lives_begun[k] += 1  # so that no other producer has these names
        names = self._names(k)
        first, self._next_producer = self._next_producer, (self._next_producer + self._workers) % _PRODUCERS
        self._ask(k, lambda life: life.actor.load_state_dict.remote(part, names, first))
        self._lives[k] = dataclasses.replace(self._lives[k], names=names, frames=0)

    def _validated_weights(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        names = {"frames", "batches", "episodes", "policy_version", "weights", "collectors", "collected"}
        if missing := names - set(state):
            raise ValueError(
                f"the state is not that of a RayCollector, it lacks {sorted(missing)}; nothing was changed"
            )
        if len(state["collectors"]) != self.num_collectors or len(state["collected"]) != self.num_collectors:
            raise ValueError(
                f"the state is of {len(state['collectors'])} collectors, this has {self.num_collectors}; make it with "
                "as many. Nothing was changed"
            )
        if state["weights"] is None:
            return None
        self._weights.refuse_others(state["weights"])
        return dict(state["weights"])

    # ---- life ----
    @property
    def is_shut_down(self) -> bool:
        """True after `shutdown`, and after a collector has failed."""
        return self._is_shut_down

    def _refuse_if_shut_down(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("this collector was shut down; make a new one")

    def shutdown(self, timeout: float | None = None, close_env: bool = True, *, raise_on_error: bool = True) -> None:
        """Ends the collectors; the replay buffer stays. A second call does nothing.

        Batches that were begun are waited for, but no longer than `timeout` seconds (None: 5), and counted.
        Environments are closed, whatever `close_env` says.
        """
        deadline = time.monotonic() + (_CLOSE_TIMEOUT if timeout is None else timeout)
        if self._background is not None:
            try:
                self._background.stop(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                self._background.abandon()
        if not self._is_shut_down:
            self._is_shut_down = True
            self._take_begun(deadline)
            self._end_actors(deadline)
        if raise_on_error:
            self._raise_background_failure()

    def _take_begun(self, deadline: float) -> None:
        """Counts batches that come until then."""
        if self.replay_buffer is None or not self._pending:
            return
        done, _ = import_ray().wait(
            list(self._pending), num_returns=len(self._pending), timeout=max(0.0, deadline - time.monotonic())
        )
        for reference in done:
            k = self._pending.pop(reference)
            with contextlib.suppress(import_ray().exceptions.RayError):  # it is counted below
                report: _Report = import_ray().get(reference)
                self._count(k, report.frames - self._lives[k].frames)
                self._lives[k].frames = report.frames

    def _end_actors(self, deadline: float) -> None:
        """Closes the collectors, and counts rows of those who had not reported them."""
        closing = [life.actor.close.remote() for life in self._lives]
        import_ray().wait(closing, num_returns=len(closing), timeout=max(0.1, deadline - time.monotonic()))
        for k, life in enumerate(self._lives):
            import_ray().kill(life.actor)
            if self.replay_buffer is not None:
                self._count(k, max(0, self._rows_of(life) - life.frames))
        self._pending.clear()

    @contextlib.contextmanager
    def _shut_down_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._background is not None and not self._background.is_current:
                self._background.abandon()
            self._is_shut_down = True
            for life in self._lives:
                import_ray().kill(life.actor)
            self._pending.clear()
            raise

    @contextlib.contextmanager
    def _between_batches(self) -> Iterator[None]:
        with super()._between_batches():
            self._refuse_if_shut_down()
            yield

    def __enter__(self) -> RayCollector:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.shutdown(raise_on_error=kind is None)

    def __repr__(self) -> str:
        return (
            f"RayCollector(num_collectors={self.num_collectors}, frames_per_batch={self.frames_per_batch}, "
            f"total_frames={self.total_frames}, frames={self.frames})"
        )


def _has_come(reference: Any) -> bool:
    """Whether a call has been answered, or failed; nothing is fetched."""
    return bool(import_ray().wait([reference], timeout=0, fetch_local=False)[0])


def _checked_timeout(timeout: float | None) -> float | None:
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float)):
        raise TypeError(f"batch_timeout is a number of seconds, or None, got a {type(timeout).__name__}")
    if timeout is not None and not 0 < timeout < float("inf"):
        raise ValueError(f"batch_timeout must be more than 0 seconds, or None for no limit, got {timeout}")
    return timeout


def _one_for_each(name: str, given: Any, n: int) -> list[dict[str, Any]]:
    each = [dict(given or {})] * n if given is None or isinstance(given, Mapping) else [dict(one) for one in given]
    if len(each) != n:
        raise ValueError(f"{name} has {len(each)} entries for {n} collectors; give one for each, or one for all")
    return each


def _placed(options: list[dict[str, Any]], buffer: RayReplayBuffer | None) -> list[dict[str, Any]]:
    """The options of each collector, with a node: those of the shards first, then others, in turn."""
    strategy = import_ray().util.scheduling_strategies.NodeAffinitySchedulingStrategy
    shard_nodes = [] if buffer is None else list(dict.fromkeys(buffer.nodes))
    placed: list[dict[str, Any]] = []
    for k, one in enumerate(options):
        needed = {**one.get("resources", {}), "CPU": one["num_cpus"]}
        fitting = [
            node["NodeID"]
            for node in import_ray().nodes()
            if node["Alive"] and all(node["Resources"].get(what, 0) >= much for what, much in needed.items())
        ]
        nodes = [*(node for node in shard_nodes if node in fitting), *(n for n in fitting if n not in shard_nodes)]
        if "scheduling_strategy" in one or not nodes:
            placed.append(one)
        else:  # soft: a node that is gone may be replaced by another one
            placed.append({**one, "scheduling_strategy": strategy(nodes[k % len(nodes)], soft=True)})
    return placed
