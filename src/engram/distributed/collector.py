"""Collecting on the nodes of a Ray cluster: an actor on each of them, which writes into the store of its node."""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from tensordict import TensorDictBase
from torch import nn

from engram.collectors import MultiSyncDataCollector, SyncDataCollector
from engram.distributed.actors import ActorLostError, RayActors
from engram.distributed.ray_buffer import RayReplayBuffer, import_ray
from engram.distributed.weights import WeightsFetcher, WeightsOffer, WeightsPublisher
from engram.envs.utils import ExplorationType
from engram.errors import NoFreeLaneError, ShardGoneError, ShardUnavailableError, WorkerError
from engram.kernel.advice import advised
from engram.kernel.collecting import (
    CollectorSettings,
    EpisodeStats,
    PooledCollector,
    WeightsLayout,
    WorkerPool,
    makers_of_workers,
)
from engram.kernel.tools import count

Device = torch.device | str | int | None

_TRAJECTORY_IDS = ("collector", "traj_ids")
_ID_BITS = 32  # of a trajectory's id that its producer counts; the others are the producer's number
_PRODUCERS = 1 << 31
_MOST_EMPTY_LIVES = 3  # of one collector that died without a batch, in a row: the next one would, too
_PATIENCE = 120.0  # seconds in which the shards tell how many rows of a dead collector are in
_PAUSE = 0.05  # seconds between two tries of that
_CLOSE_TIMEOUT = 5.0
_LOOK_INTERVAL = 0.5  # seconds between two looks at whether a collector hangs
_REPORTS = 400  # a second from all collectors together: each costs the program that has them half a millisecond

_UNLIMITED = sys.maxsize

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _Config:
    """The configuration of one life of a collector.

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
    """A collector's message after a batch.

    Attributes:
        frames: how many it has collected in this life; with a replay buffer, how many of its rows are in.
        batch: None where it is in the replay buffer.
        returns, lengths: of the episodes that ended in it.
        batches: how many it is about.
        stints: of each producer the number of its stint, and how many rows of those before are in.
    """

    frames: int
    batch: TensorDictBase | None
    returns: list[float]
    lengths: list[int]
    batches: int = 1
    stints: tuple[tuple[int, int], ...] = ()


class _Share(NamedTuple):
    """How much a collector does before it reports: batches for so many seconds, `batches` at most, and one at least."""

    seconds: float
    batches: int


_ONE_BATCH = _Share(0.0, 1)


class _Begun(NamedTuple):
    """A collector has made its environments; the frames of its batches."""

    frames: int


class _CollectorActor:
    """A collector in a process of its own, perhaps with workers, and their producers."""

    def begin(self, config: _Config, policy: Any) -> _Begun:
        """Makes environments and policies."""
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
        self._buffers = [] if buffer is None else _producers_of(buffer, config.names)
        return _Begun(int(self._collector.frames_per_batch))

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
        self._buffers = [] if buffer is None else _producers_of(buffer, names)
        self._episodes, self._frames, self._fetcher = [], 0, WeightsFetcher()
        for one in before:
            _close_producer(one)

    def collect(self, offer: WeightsOffer | None, share: _Share = _ONE_BATCH) -> _Report:
        """Collects batches with the newest weights, and writes them, where there is a replay buffer; else it is one."""
        until = time.monotonic() + share.seconds
        weights = self._fetcher.fetch(offer)
        if weights is not None:
            self._collector.update_policy_weights_(weights, version=self._fetcher.version)
        batch, returns, lengths = self._collect_one()
        if batch is not None:
            self._frames += batch.numel()
            return _Report(self._frames, batch, returns, lengths)
        batches = 1
        while batches < share.batches and time.monotonic() < until:
            _, more_returns, more_lengths = self._collect_one()
            returns, lengths, batches = returns + more_returns, lengths + more_lengths, batches + 1
        for buffer in self._buffers:
            _until_shard_answers(buffer.flush)
        rows = sum(_until_shard_answers(buffer.rows_in) for buffer in self._buffers)
        stints = tuple(_until_shard_answers(buffer.stint) for buffer in self._buffers)
        return _Report(rows, None, returns, lengths, batches, stints)

    def _collect_one(self) -> tuple[TensorDictBase | None, list[float], list[int]]:
        """A batch, or None where it went to the replay buffer; returns and lengths of the episodes that ended in it."""
        batch = self._collector.rollout()
        parts = [batch] if self._config.workers == 1 else list(batch.unbind(0))
        for k, part in enumerate(parts):
            self._add_producer(part, k)
        returns, lengths = self._ended_in(parts)
        if self._config.postproc is not None:
            parts = [self._config.postproc(part) for part in parts]
        if not self._buffers:
            return parts[0] if self._config.workers == 1 else torch.stack(parts), returns, lengths
        for buffer, part in zip(self._buffers, parts, strict=False):  # fewer parts: a worker has failed
            _until_shard_answers(functools.partial(buffer.extend, part.reshape(-1)))
        return None, returns, lengths

    def _add_producer(self, part: TensorDictBase, worker: int) -> None:
        """Makes trajectory ids those of this producer."""
        ids = part.get(_TRAJECTORY_IDS, None)
        if ids is not None:
            producer = (self._config.first_producer + worker) % _PRODUCERS
            part.set(_TRAJECTORY_IDS, ids + (producer << _ID_BITS))

    def _ended_in(self, parts: Sequence[TensorDictBase]) -> tuple[list[float], list[int]]:
        """Returns and lengths of the episodes that ended in the batch of each worker."""
        returns: list[float] = []
        lengths: list[int] = []
        for k, part in enumerate(parts):
            if len(self._episodes) <= k:
                self._episodes.append(EpisodeStats(part.shape[:-1].numel()))
            ended = self._episodes[k].ended_in(part)
            returns, lengths = returns + ended[0], lengths + ended[1]
        return returns, lengths

    def close(self) -> None:
        """Ends workers, and leaves the shards, after the steps that transforms hold back are in."""
        self._collector.shutdown(raise_on_error=False)
        for buffer in self._buffers:
            _close_producer(buffer)


def _producers_of(buffer: RayReplayBuffer, names: Sequence[str]) -> list[RayReplayBuffer]:
    """A client for each worker. They move on over the shards: nobody continues their work under these names."""
    return [buffer.producing_as(name, moves_on=True) for name in names]


def _close_producer(buffer: RayReplayBuffer) -> None:
    """Writes what its transforms hold back, and leaves its shard, as soon as that answers."""
    if buffer.transform.stream.flushes_all:
        _until_shard_answers(buffer.flush_transforms)
    _until_shard_answers(buffer.flush)
    buffer.close()


def _until_shard_answers(call: Callable[[], T]) -> T:
    """Calls again while the shard is away: its rows are kept, or were not sent. ShardGoneError: it is gone."""
    while True:
        try:
            return call()
        except ShardGoneError:
            raise
        except ShardUnavailableError:
            continue


@dataclasses.dataclass
class _Member:
    """One of the collectors, over all its lives, which are those of an actor each.

    Attributes:
        settings: arguments of the collector inside.
        options: of its actors.
        seed: of its environments.
        collected: frames, over all lives.
        lives: how many have begun.
        empty_lives: of the last ones, how many have ended before their first batch.
        batch_frames: of its batches; 0: it has never begun.
        names: of the producers of this life.
        frames: of this life, as far as they are counted.
        stints: as the last report of this life has them.
        batches: of this life.
        asked: how many batches it was asked for; 0: it owes none.
    """

    make_env: Callable[[], Any]
    policy_factory: Callable[[], Any] | None
    settings: Mapping[str, Any]
    options: Mapping[str, Any]
    seed: tuple[int, bool] | None = None
    collected: int = 0
    lives: int = 0
    empty_lives: int = 0
    batch_frames: int = 0
    names: tuple[str, ...] = ()
    frames: int = 0
    stints: tuple[tuple[int, int], ...] = ()
    batches: int = 0
    asked: int = 0

    @property
    def is_asked(self) -> bool:
        """Whether it owes batches."""
        return self.asked > 0


@advised
class RayCollector(PooledCollector):
    """Collectors on the nodes of a Ray cluster, used as one that collects here.

    Each collector is an actor, and may have workers inside. With a `RayReplayBuffer` it writes into the store of its
    node, each worker by itself, so that nothing is sent, and moves on to other shards when that is full, unless each
    has a writer of its own; iterating then yields None, as with all collectors. Without one, batches come here.

    A collector that dies, alone or with its node, is made anew, with a RuntimeWarning. It continues where its rows
    ended, with new trajectories and a seam before them: the shard has counted which rows are in, so `frames` has each
    row of the replay buffer once, whenever it died. Steps that it had not written are collected anew; those that its
    transforms held back are lost. With `batch_timeout` one that hangs is ended and made anew in the same way.

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
        sync: True: a batch is one of all collectors with the same weights, which wait while the caller has it. False:
            collectors continue meanwhile, and a batch is that of the collector which finishes first. With a
            `replay_buffer`, n collectors report 400 times a second together: those whose batches are shorter than
            n / 400 seconds make several before each report, with the same weights. With `batch_timeout` each is
            reported.
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
        replay_buffer: a `RayReplayBuffer`. Its transforms run
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

    _error_close_timeout = 0.0  # their processes are ended at once

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
        num_workers_per_collector = count(num_workers_per_collector, "num_workers_per_collector")
        if replay_buffer is not None and not isinstance(replay_buffer, RayReplayBuffer):
            raise TypeError(
                f"a {type(replay_buffer).__name__} lies in this process, and collectors on other nodes cannot write "
                "to it; make a RayReplayBuffer, or leave replay_buffer out and extend it with each batch"
            )
        if update_after_each_batch and not isinstance(policy, nn.Module):
            raise ValueError("update_after_each_batch=True takes weights from the policy; give an nn.Module")
        if (batch_timeout := _checked_timeout(batch_timeout)) is not None:
            self._look_interval = min(_LOOK_INTERVAL, batch_timeout / 4)
        self._settings = dataclasses.replace(
            settings, frames_per_batch=-(-frames_per_batch // n) if sync else frames_per_batch, total_frames=-1
        )
        self._hooks = {"pre_collect_hook": pre_collect_hook, "post_collect_hook": post_collect_hook}
        kwargs = _one_for_each("collector_kwargs", collector_kwargs, n)
        options = _one_for_each("remote_configs", remote_configs, n)
        self._policy = policy
        self._workers, self.postproc, self._sync = num_workers_per_collector, postproc, sync
        self._batch_timeout = batch_timeout
        self.replay_buffer, self._update_after_each_batch = replay_buffer, update_after_each_batch
        self._random_frames = -(-(settings.init_random_frames or 0) // n)
        self.num_collectors, self.total_frames = n, settings.total_frames
        self.requested_frames_per_batch = frames_per_batch
        self._count_from_zero()
        self._weights = WeightsPublisher(WeightsLayout.tensors_of(policy) if isinstance(policy, nn.Module) else None)
        self._name, self._next_producer = f"collector-{secrets.token_hex(6)}", secrets.randbelow(_PRODUCERS)
        self._arrived: deque[tuple[int, _Report]] = deque()
        if not import_ray().is_initialized():
            import_ray().init(**(ray_init_config or {}))
        placed = _placed([{"num_cpus": 1, **one} for one in options], replay_buffer)
        each = zip(makers, policy_makers, kwargs, placed, strict=True)
        self._members = [_Member(make, make_policy, own, where) for make, make_policy, own, where in each]
        self._sent_policy = None if policy is None else import_ray().put(self._policy_on_cpu())
        self._pool = WorkerPool(
            RayActors(_CollectorActor), [f"collector {k} of {type(self).__name__}" for k in range(n)],
            timeout=batch_timeout, argument="batch_timeout={:g} seconds", close_timeout=0.0,
        )  # fmt: skip
        with self._shut_down_on_error():
            for k in range(n):
                self._begin_life(k)
            while missing := [k for k, member in enumerate(self._members) if not member.batch_frames]:
                for k in self._wait_for_any(missing):
                    self._receive_message(k)
        frames = [member.batch_frames for member in self._members]
        self.frames_per_batch = sum(frames) if sync else max(frames)
        settings.warn_of_remainder(self.frames_per_batch)

    # ---- lives ----
    def _begin_life(self, k: int) -> None:
        """Begins the first life of a collector, or the next one."""
        member = self._members[k]
        names, first = self._new_names(k)
        member.names, member.frames, member.batches, member.stints = names, 0, 0, ()
        seed = member.seed
        config = _Config(
            make_env=member.make_env, policy_factory=member.policy_factory,
            settings={
                **self._settings.arguments(), **self._hooks, **member.settings,
                "init_random_frames": max(0, self._random_frames - member.collected),
            },
            workers=self._workers, postproc=self.postproc, replay_buffer=self.replay_buffer, names=names,
            first_producer=first,
            seed=None if seed is None else (self._pool.seed_of(k, seed[0]), seed[1]),
        )  # fmt: skip
        self._pool.start(k, member.options)
        begin = functools.partial(_begin, config, self._sent_policy)
        self._pool.workers[k].post(begin, "making its environments")

    def _new_names(self, k: int) -> tuple[tuple[str, ...], int]:
        """New names for the producers of a collector's next life, and the number of the first of them."""
        member, first = self._members[k], self._next_producer
        names = tuple(f"{self._name}-{k}-{member.lives}-{worker}" for worker in range(self._workers))
        member.lives += 1
        self._next_producer = (first + self._workers) % _PRODUCERS
        return names, first

    def _replace(self, k: int, error: WorkerError) -> None:
        """Counts what a collector that died, or hung, has written, begins its next life, and asks it again."""
        assert isinstance(error, ActorLostError)
        member = self._members[k]
        self._pool.end(k)
        written = 0 if self.replay_buffer is None else self._rows_of(member)
        self._count(member, max(0, written - member.frames))
        member.empty_lives = 0 if member.batches or written else member.empty_lives + 1
        if member.empty_lives >= _MOST_EMPTY_LIVES:
            raise WorkerError(
                error.worker, f"it died {member.empty_lives} times before its first batch, at last so:\n{error.why}"
            ) from error
        warnings.warn(
            f"{error.worker} {error.how} after {member.collected} frames, and is made anew; its open episodes are lost",
            RuntimeWarning,
            stacklevel=2,
        )
        self._begin_life(k)
        if member.is_asked:
            member.asked = 1
            self._post(k)

    def _rows_of(self, member: _Member) -> int:
        """Ends the tenancies of a dead collector; returns how many of its rows are in."""
        assert self.replay_buffer is not None
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                stints = member.stints or ((0, 0),) * len(member.names)
                each = zip(member.names, stints, strict=True)
                return sum(rows + self.replay_buffer.end_producer(name, number) for name, (number, rows) in each)
            except ShardGoneError:
                raise
            except (NoFreeLaneError, ShardUnavailableError):  # its process is just ending; the shard comes back
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE)

    def _count(self, member: _Member, frames: int) -> None:
        self.frames += frames
        member.collected += frames

    # ---- collecting ----
    def rollout(self) -> TensorDictBase | None:
        """The next batch, whatever `total_frames` says; None where it went into the replay buffer.

        With `sync`, `[collectors * workers, *]`; else `[*]` of one collector, `[workers, *]` where it has several.

        Raises:
            WorkerError: an environment or a policy failed; the collector is shut down.
            RuntimeError: after `shutdown`, and while it collects in the background.
        """
        with self._counted_batch():
            self._refuse_if_shut_down()
            with self._shut_down_on_error():
                if self._update_after_each_batch:
                    self.update_policy_weights_()
                reports = self._next_of_all() if self._sync else [self._next_of_any()]
        if self.replay_buffer is not None:
            return None
        batches = [report.batch for _, report in sorted(reports, key=lambda one: one[0]) if report.batch is not None]
        if not self._sync:
            return batches[0]
        if self._workers > 1:
            return torch.cat(batches)
        return torch.stack(batches)

    def _next_of_all(self) -> list[tuple[int, _Report]]:
        for k, member in enumerate(self._members):
            if not member.is_asked:
                self._ask_for_batch(k)
        while asked := self._asked():
            self._take_from(asked)
        reports = list(self._arrived)
        self._arrived.clear()
        return reports

    def _next_of_any(self) -> tuple[int, _Report]:
        if not self._arrived:
            for k, member in enumerate(self._members):
                if not member.is_asked and (not self._asked() or self._is_more_needed()):
                    self._ask_for_batch(k)
        while not self._arrived:
            self._take_from(self._asked())
        k, report = self._arrived.popleft()
        if not self._members[k].is_asked and self._is_more_needed():  # before the caller has the batch
            self._ask_for_batch(k)
        return k, report

    def _is_more_needed(self) -> bool:
        return self.total_frames < 0 or self.frames + self._on_their_way() < self.total_frames

    def _on_their_way(self) -> int:
        """Frames that were asked for."""
        return self.frames_per_batch * sum(member.asked for member in self._members)

    def _next_share(self) -> _Share:
        """What a collector is asked for: one batch where somebody waits for each, else some; fewer when few are left.

        So the program that has a thousand collectors hears as many reports as that of a few.
        """
        if self._sync or self.replay_buffer is None or self._batch_timeout is not None:
            return _ONE_BATCH
        seconds = self.num_collectors / _REPORTS
        if self.total_frames < 0:
            return _Share(seconds, _UNLIMITED)
        left = self.total_frames - self.frames - self._on_their_way()
        return _Share(seconds, max(1, left // (self.frames_per_batch * self.num_collectors)))

    def _asked(self) -> list[int]:
        """The collectors that owe a batch."""
        return [k for k, member in enumerate(self._members) if member.is_asked]

    def _ask_for_batch(self, k: int) -> None:
        share = self._next_share()
        self._members[k].asked = 1 if share.batches == _UNLIMITED else share.batches
        self._post(k, share)

    def _post(self, k: int, share: _Share = _ONE_BATCH) -> None:
        offer = self._weights.offer
        self._pool.workers[k].post(lambda actor: actor.collect.remote(offer, share))

    def _take_from(self, asked: list[int]) -> None:
        """Waits for the next reports."""
        for k in self._wait_for_any(asked):
            self._receive_message(k)

    def _wait_for_any(self, workers: list[int]) -> list[int]:
        if (late := self._pool.overdue()) is not None:  # also while others come all the time
            self._end_overdue(*late)
            return []
        return super()._wait_for_any(workers)

    def _receive_message(self, k: int) -> list[Any]:
        try:
            answer = self._pool.workers[k].receive()
        except ActorLostError as error:
            self._replace(k, error)
            return []
        member = self._members[k]
        if isinstance(answer, _Begun):
            member.batch_frames = answer.frames
        elif isinstance(answer, _Report):
            self._note(member, answer)
            self._arrived.extend([(k, answer)] * answer.batches)
        else:
            return [answer]
        return []

    def _note(self, member: _Member, report: _Report) -> None:
        member.asked, member.batches = 0, member.batches + report.batches
        self._count(member, report.frames - member.frames)
        member.frames, member.stints = report.frames, report.stints
        self._episodes.take(report.returns, report.lengths)

    def _finish_batches(self) -> None:
        """Waits for what collectors were asked for; batches that are handed out stay for the next `rollout`."""
        while asked := self._asked():
            self._take_from(asked)
        if self.replay_buffer is not None:
            self._arrived.clear()

    @property
    def remote_collectors(self) -> list[Any]:
        """The actors, as they are now."""
        return [worker.actor for worker in self._pool.workers]

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
        tensors = self._given_weights(policy_weights=policy_weights, policy_or_weights=policy_or_weights)
        if tensors is None and not isinstance(self._policy, nn.Module):
            raise TypeError(f"the policy is a {type(self._policy).__name__} and has no weights; give an nn.Module")
        self._weights.publish(WeightsLayout.tensors_of(self._policy) if tensors is None else tensors)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """The next reset of each environment starts from a seed of its own; returns the first that is free.

        With `static_seed` all start from `seed`, which is returned. A collector that is made anew has seeds that follow
        from its seed and the number of its lives.
        """
        with self._between_batches(), self._shut_down_on_error():
            self._finish_batches()
            for k in range(self.num_collectors):
                self._members[k].seed = (seed, static_seed)
                seed = self._seed_one(k, seed, static_seed)
        return seed

    def _seed_one(self, k: int, seed: int, static_seed: bool) -> int:
        return int(self._ask(k, lambda actor: actor.set_seed.remote(seed, static_seed)))

    # ---- state ----
    def state_dict(self) -> dict[str, Any]:
        """Counters, the newest weights with their version, and the states of the collectors inside.

        Batches that were not handed out are not part of it; with a replay buffer all rows of `frames` are in it then.
        """
        with self._between_batches(), self._shut_down_on_error():
            self._finish_batches()
            states = [self._ask(k, lambda actor: actor.state_dict.remote()) for k in range(self.num_collectors)]
            weights = self._weights.newest()
            if weights is None and isinstance(self._policy, nn.Module):  # those that all lives begin with
                sent = WeightsLayout.tensors_of(import_ray().get(self._sent_policy))
                weights = {name: tensor.clone() for name, tensor in sent.items()}
            waiting = sum(report.batch.numel() for _, report in self._arrived if report.batch is not None)
            return {
                "frames": self.frames - waiting, "batches": self.batches, "episodes": self._episodes.state_dict(),
                "policy_version": self.policy_version, "weights": weights, "collectors": states,
                "collected": [member.collected for member in self._members],
            }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on after `state_dict`: every environment starts a new trajectory; batches not handed out are dropped.

        All collectors, and the policy that this was made with, have its weights then, under their version. Rows that
        were written stay in the replay buffer; those that follow are other producers.

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
            for member, collected in zip(self._members, state["collected"], strict=True):
                member.collected = int(collected)
            self.frames, self.batches = int(state["frames"]), int(state["batches"])
            self._episodes.load_state_dict(state["episodes"])

    def _load_one(self, k: int, part: dict[str, Any]) -> None:
        names, first = self._new_names(k)
        self._ask(k, lambda actor: actor.load_state_dict.remote(part, names, first))
        self._members[k].names, self._members[k].frames, self._members[k].stints = names, 0, ()

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
    def shutdown(self, timeout: float | None = None, close_env: bool = True, *, raise_on_error: bool = True) -> None:
        """Ends the collectors; the replay buffer stays. A second call does nothing.

        Batches that were begun are waited for, but no longer than `timeout` seconds (None: 5), and counted.
        Environments are closed, whatever `close_env` says.
        """
        deadline = time.monotonic() + (_CLOSE_TIMEOUT if timeout is None else timeout)
        self._stop_background(max(0.0, deadline - time.monotonic()))
        if not self.is_shut_down:
            self._take_begun(deadline)
            self._pool.close(max(0.1, deadline - time.monotonic()))
            if self.replay_buffer is not None:
                for member in self._members:  # rows that collectors had not reported
                    self._count(member, max(0, self._rows_of(member) - member.frames))
        if raise_on_error:
            self._raise_background_failure()

    def _take_begun(self, deadline: float) -> None:
        """Counts batches that come until then."""
        while self.replay_buffer is not None and (asked := self._asked()):
            ready = self._pool.wait(asked, max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for k in ready:
                try:
                    answer = self._pool.workers[k].receive()
                except WorkerError:  # what it has written is counted by its rows
                    self._members[k].asked = 0
                    continue
                if isinstance(answer, _Report):
                    self._note(self._members[k], answer)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.shutdown(raise_on_error=kind is None)

    def __repr__(self) -> str:
        return (
            f"RayCollector(num_collectors={self.num_collectors}, frames_per_batch={self.frames_per_batch}, "
            f"total_frames={self.total_frames}, frames={self.frames})"
        )


def _checked_timeout(timeout: float | None) -> float | None:
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float)):
        raise TypeError(f"batch_timeout is a number of seconds, or None, got a {type(timeout).__name__}")
    if timeout is not None and not 0 < timeout < float("inf"):
        raise ValueError(f"batch_timeout must be more than 0 seconds, or None for no limit, got {timeout}")
    return timeout


def _begin(config: _Config, policy: Any, actor: Any) -> Any:
    return actor.begin.remote(config, policy)


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
