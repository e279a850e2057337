"""Collecting in this process: which loop an environment gets, and the collector that runs it.

Here is also what collectors of both kinds do with settings, states, weights and buffers.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram import _forms as forms
from engram._advice import SignatureOfInit, advised
from engram._providers import PROVIDERS
from engram.collectors.background import BackgroundCollector
from engram.collectors.gym_rollout import GymRollout
from engram.collectors.policy_weights import PolicyWeights, shapes_of
from engram.collectors.rollout import (
    BatchSteps,
    ColumnPlaces,
    Rollout,
    RolloutResult,
    Steps,
    TensorDictRollout,
    is_cpu,
    is_environment,
    random_state_of,
)
from engram.collectors.settings import CollectorSettings, Device, checked_postproc, storage_ndim
from engram.collectors.stats import EpisodeStats, StepsWay, Throughput
from engram.collectors.step_rollout import StepRollout
from engram.collectors.trajectories import EpisodeSteps, StepTags, TrajectoryAssembler, waiting_steps
from engram.collectors.utils import split_trajectories
from engram.collectors.vector_rollout import VectorRollout
from engram.data import ReplayBuffer
from engram.data.replay_buffers.buffers.batch_writer import ColumnRows
from engram.envs.base import EnvBase, mark_truncated, with_time_named
from engram.envs.engines import Autoreset, HasEngines
from engram.envs.frame_stacks import StackingEngine, can_stack
from engram.envs.from_torchrl import as_env
from engram.envs.gym import in_gym_env
from engram.envs.policies import (
    CallablePolicy,
    ExplorationType,
    ObservationPolicy,
    RandomPolicy,
    TensorDictPolicy,
    as_policy,
    compiled_policy,
    cudagraph_policy,
    module_keys,
    observation_keys,
    require_first_marks,
    set_exploration_type,
    transforms_of,
)
from engram.envs.transformed import TransformedEnv
from engram.processes.timeouts import CallTimer, TimedEnv, reject_timeout
from engram.pytree import key_path
from engram.specs.spaces import EncodedSpaces, HasSpaces
from engram.specs.tensors import usable_device
from engram.store.waits import let_through
from engram.transforms.base import Deferred, FrameStacks
from engram.transforms.trajectory import StepCounter


def make_rollout(
    env: Any,
    policy: TensorDictPolicy,
    tags: StepTags,
    *,
    max_frames_per_traj: int | None,
    reset_when_done: bool = True,
    clock: CallTimer | None = None,
) -> Rollout:
    """The fastest rollout that `env` allows.

    That is with raw values, as a vector or one environment after the other; the same below transforms that can be
    applied to whole batches; or through its TensorDict interface. Steps and resets are entered in `clock`.

    Raises ValueError where environments that reset themselves are to go without resets.
    """
    choice = _Choice(policy, tags, clock, reset_when_done)
    if not reset_when_done:
        engine = env.vector_engine() if isinstance(env, EnvBase) else None
        if engine is not None and engine.autoreset is not Autoreset.DISABLED:
            raise ValueError("reset_when_done=False: these environments reset themselves; make them without autoreset")
        return choice.by_tensordicts(env, max_frames_per_traj)
    fast = choice.by_raw_values(env, max_frames_per_traj)
    if fast is None:
        fast = choice.with_deferred_transforms(env, max_frames_per_traj)
    return choice.by_tensordicts(env, max_frames_per_traj) if fast is None else fast


class _Choice(NamedTuple):
    """Makes each kind of rollout, with the settings that they share."""

    policy: TensorDictPolicy
    tags: StepTags
    clock: CallTimer | None
    resets: bool

    def by_tensordicts(self, env: Any, max_frames: int | None) -> Rollout:
        """A rollout through the TensorDict interface, which every environment has."""
        return TensorDictRollout(
            env,
            self.policy,
            self.tags,
            max_frames_per_traj=max_frames,
            reset_when_done=self.resets,
            clock=self.clock,
        )

    def by_raw_values(self, env: Any, max_frames: int | None, stacks: Sequence[FrameStacks] = ()) -> Rollout | None:
        """A rollout with raw values, of which frames are stacked; None where the environment has none, or where it is
        not in main memory.
        """
        engine = env.vector_engine() if isinstance(env, EnvBase) else None
        engines: Any = env.engines() if isinstance(env, HasEngines) else None
        clock = self.clock
        if engine is not None and is_cpu(env.device) and not stacks:
            timed: Any = engine if clock is None else TimedEnv(engine, clock, 0)
            bare = engine.bare_steps() if clock is None else None
            return VectorRollout(env, timed, self.policy, self.tags, max_frames_per_traj=max_frames, bare=bare)
        if engines is not None and is_cpu(env.device):
            if clock is not None:
                engines = [TimedEnv(engine, clock, i) for i, engine in enumerate(engines)]
            for stack in stacks:
                if not can_stack(engines[0], stack):
                    return None
                engines = [StackingEngine(engine, stack) for engine in engines]
            rollout = GymRollout(env, engines, self.policy, self.tags, max_frames_per_traj=max_frames)
            if env.batch_size or stacks:
                return rollout
            return StepRollout(env, engines[0], self.policy, self.tags, rollout, max_frames_per_traj=max_frames)
        return None

    def with_deferred_transforms(self, env: Any, max_frames: int | None) -> Rollout | None:
        """A rollout with transforms of whole batches, and stacks of raw frames.

        None where another transform, or the policy, needs every step.
        """
        transforms = env.deferrable_transforms() if isinstance(env, TransformedEnv) else None
        if transforms is None or not is_cpu(env.device):
            return None
        stacks, plan = [], []
        for one in transforms:
            stack, deferred = one.frame_stacks(), one.deferred()
            if stack is not None:
                stacks.append(stack)
            elif deferred is not None:
                plan.append(deferred)
            else:
                return None
        written = {key for deferred in plan for key in deferred.writes}
        if written & {key for stack in stacks for pair in stack.pairs for key in pair}:
            return None
        used = _keys_used_by(self.policy)
        if plan and (used is None or used & written):
            return None
        limits = [n for n in (max_frames, *(deferred.limit for deferred in plan)) if n is not None]
        base, least = env.base_env, min(limits, default=None)
        if isinstance(base, TransformedEnv) and base.deferrable_transforms() is not None:
            below = None if stacks else self.with_deferred_transforms(base, least)
        else:
            below = self.by_raw_values(base, least, stacks)
        if below is None:
            return None
        return DeferredTransformRollout(env, below, plan, self.tags, lambda: self.by_tensordicts(env, max_frames))


class DeferredTransformRollout:
    """Steps the environment below with raw values, and applies the transforms to its batches.

    Key by key the same as `TensorDictRollout`, which takes over for good, with new trajectories, once the environment
    has other transforms.
    """

    def __init__(
        self, env: Any, below: Rollout, plan: list[Deferred], tags: StepTags, make_fallback: Callable[[], Rollout]
    ) -> None:
        self._env, self._below, self._plan, self._tags = env, below, plan, tags
        self._make_fallback = make_fallback
        self._fallback: Rollout | None = None
        self._transforms = _transforms_of(env)
        self.is_random = below.is_random
        self.restart()

    @property
    def steps_way(self) -> StepsWay:
        return (self._below if self._fallback is None else self._fallback).steps_way

    def restart(self) -> None:
        self._below.restart()
        self._begins: Tensor | None = None  # bool [N]: whose next frame follows a reset; None: all
        if self._fallback is not None:
            self._fallback.restart()

    def collect(self, steps: int, *, random_steps: int) -> RolloutResult:
        if self._fallback is None and _transforms_of(self._env) != self._transforms:
            self._tags.ids.restart()
            self._fallback = self._make_fallback()
        if self._fallback is not None:
            return self._fallback.collect(steps, random_steps=random_steps)
        try:
            collected, error = self._below.collect(steps, random_steps=random_steps)
            if self._plan:
                collected = BatchSteps(self._applied(collected.batch()))
        except BaseException:
            self.restart()
            raise
        if error is not None:
            self.restart()
        return RolloutResult(collected, error)

    def _applied(self, batch: TensorDictBase) -> TensorDictBase:
        """Changes a batch as the transforms do."""
        done = batch.get(("next", "done")).reshape(-1, batch.shape[-1])
        starts = torch.ones_like(done)
        starts[:, 1:] = done[:, :-1]
        if self._begins is not None:
            starts[:, 0] = self._begins
            starts[[env for env, _ in self._tags.cuts], 0] = True
        self._begins = done[:, -1].clone()
        for deferred in self._plan:
            deferred.apply(batch, starts)
        return batch


def _transforms_of(env: Any) -> list[Any]:
    """The transforms of an environment and of those below it: which they are, their limits, and what is stacked."""
    transforms = env.deferrable_transforms() if isinstance(env, TransformedEnv) else None
    if transforms is None:
        return []
    now = [(id(one), one.max_steps if isinstance(one, StepCounter) else one.frame_stacks()) for one in transforms]
    return [now, *_transforms_of(env.base_env)]


def _keys_used_by(policy: TensorDictPolicy) -> set[Any] | None:
    """The entries that a policy reads or writes; None where they are not known."""
    if isinstance(policy, RandomPolicy):
        return set()
    if isinstance(policy, ObservationPolicy):
        return set(policy.in_keys)
    keys = module_keys(policy)
    return None if keys is None else {*keys.read, *keys.written}


ROWS_FOR_TRAJECTORIES = 32  # stepped at a time with `trajs_per_batch`, where `frames_per_batch` is not given
NOTHING_WAITS: dict[str, Any] = {"lengths": [], "steps": {}}  # the state of a `TrajectoryAssembler`
COUNTERS = ("frames", "stepped", "batches", "trajectories", "policy_version")


@advised
class SyncDataCollector(BackgroundCollector, HasSpaces):
    """Steps an environment with a policy and hands out batches in TED.

    A batch is `[time]` for a single environment, `[*batch_size, time]` for several, with `frames_per_batch` frames
    rounded up to whole rows (3 environments, 22 frames: 3 x 8). Episodes go on from one batch to the next;
    `("collector", "traj_ids")`, int64, numbers them 0, 1, 2, ... in time order. Iterating ends after `total_frames`
    (-1: never).

    Args:
        create_env_fn: an environment, which stays the caller's to close, or a callable that makes one; gymnasium's, and
            vectors of these, are wrapped in a `GymEnv`.
        policy: a callable on TensorDicts, a TensorDictModule, a module or function whose parameters have the names of
            observations, an `nn.Module` on the only observation, `env.rand_step`, or None for random actions. Of
            several tensors in a tuple the first is the action, the others are `"output1"`, ... It runs
            under `torch.no_grad`. A policy may keep the TensorDict that it gets: what it finds there later is
            what it found then. It may write into the tensors that it gets, batches have what the environment gave; its
            outputs are copied at each step.
        policy_factory: makes the policy, instead of `policy`; it is the collector's own then.
        frames_per_batch: frames of one batch, over all environments; may be left out beside `trajs_per_batch`.
        total_frames: where to stop (-1 or None: never); if it does not divide, a warning, and the last batch is whole.
        create_env_kwargs: keyword arguments of `create_env_fn`.
        backend, num_workers: with "process" the result is a `MultiSyncDataCollector` of so many workers (1 if None), or
            with `sync=False` a `MultiaSyncDataCollector`, whose arguments the others then are.
        device: what `storing_device`, `policy_device` and `env_device` are unless they are given.
        max_frames_per_traj: the step at which an episode is cut: `truncated` is set and the environment reset; None, 0
            and -1: no step. Batches then have `step_count`, int64, the steps of the episode before this one, and under
            `next` with it, unless the environment gives an entry of this name. What cannot be reset without the others
            (vector environments that only reset themselves) is stepped to the end of its episode instead, without
            frames of these steps; when all wait for that, all are reset.
        init_random_frames: so many frames, rounded up to whole rows, have random actions; None, 0 and -1: none.
        reset_at_each_iter: every batch starts with a reset.
        reset_when_done: False leaves it to the environment what follows the end of an episode; a trajectory is then all
            that comes between two resets.
        postproc: called on each batch; its result is handed out.
        split_trajs: batches are `[trajectories, longest]`, padded, with `("collector", "mask")`.
        trajs_per_batch: batches are so many whole trajectories, in the order in which they ended, padded like those of
            `split_trajs` (in a replay buffer: one after the other, without padding). `total_frames` counts the frames
            handed out. Steps are made `frames_per_batch` at a time (32 rows unless given), and what is left over waits
            for the next batch. Early batches have more short trajectories: those end first.
        traj_format: with `trajs_per_batch`: "padded" (None), or "cat", one after the other, `[steps]`, without padding.
        set_truncated: the last step of each batch is marked `truncated` and `done` where it is not `terminated`. That
            says where the batch was cut; the episode itself goes on, with its id.
        return_same_td: one TensorDict is handed out again and again, its tensors overwritten by each batch.
        track_traj_ids: False leaves `("collector", "traj_ids")` out of the batches.
        track_policy_version: int64 `("collector", "policy_version")` says which policy acted: 0, and one more
            after each `update_policy_weights_`.
        exploration_type: how stochastic policies act.
        pre_collect_hook, post_collect_hook: called before each batch, and with each batch after `postproc`, once it is
            in the replay buffer if there is one.
        auto_register_policy_transforms: appends to the environment's transforms what the policy's modules (recurrent
            ones) need: what their `make_tensordict_primer()` returns, and an `InitTracker` where they read `"is_init"`.
        compile_policy: the policy acts under `torch.compile`; a dict gives its arguments.
        cudagraph_policy: a policy on a GPU acts in a `tensordict.nn.CudaGraphModule`; a dict gives its arguments.
            Without effect on the CPU.
        replay_buffer: gets each batch by `extend`; iterating then yields None. A buffer whose storage has one
            dimension gets the steps of several environments one environment after the other. With a `rate_limiter`
            a batch is begun as soon as samplers leave room, and then written as a whole.
        no_cuda_sync: copies to `storing_device` are not waited for.
        compact_obs: True leaves the observations under `next` out of the batches. Those after the last step of a batch
            and of an episode are in no batch then; the storages' `compact=` saves as much memory and keeps them.
        timeout: None; for an environment that may hang, take a collector with worker processes (TypeError).
        use_buffers, trust_policy, local_init_rb, extend_buffer=True, backend="direct": accepted without effect; what
            other releases' collectors have besides is a TypeError that says what to use instead.

    Gymnasium environments, alone, in a `SerialEnv` or stepped together, are stepped with raw values; tensors are made
    once a batch. Values of an environment must be of its spaces: a ValueError names the key otherwise.
    Actions are compared with the action space before each step: numbers beyond it, vectors that are not one-hot, and
    NaN, are errors of the policy, which name the entry, the environment and the step. A Box's bounds are left to the
    environment.

    After an error in the environment or the policy, the rows that every environment had stepped before it are a batch,
    shorter than others (of whole trajectories: those that had ended). Without a replay buffer it is handed out, and the
    error is raised in the next call or iteration; with one it is written, and the error is raised at once. An interrupt
    is raised at once, so that its rows are lost where there is no buffer; an error of `postproc` or of the buffer loses
    the batch that it was given. Whatever it was, what is collected next begins new trajectories.

    Raises ValueError and TypeError for arguments that cannot work, when it is made.

    >>> from engram.envs import GymEnv
    >>> with SyncDataCollector(lambda: GymEnv("CartPole-v1"), frames_per_batch=200, total_frames=400) as collector:
    ...     for batch in collector:
    ...         print(batch.shape, batch["action"].shape)
    torch.Size([200]) torch.Size([200, 2])
    torch.Size([200]) torch.Size([200, 2])
    >>> collector.stats.frames
    400
    """

    def __new__(cls, *args: Any, backend: str | None = None, num_workers: int | None = None, **kwargs: Any) -> Any:
        if backend != "process" or cls is not SyncDataCollector:
            return super().__new__(cls)
        # Of another class, Python does not call `__init__` again.
        return PROVIDERS["multi_collector"]()(*args, num_workers=num_workers, **kwargs)

    __signature__ = SignatureOfInit()

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        frames_per_batch: int | None = None,
        total_frames: int | None = -1,
        create_env_kwargs: Mapping[str, Any] | None = None,
        device: Device = None,
        storing_device: Device = None,
        policy_device: Device = None,
        env_device: Device = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        reset_when_done: bool = True,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        split_trajs: bool = False,
        trajs_per_batch: int | None = None,
        traj_format: str | None = None,
        set_truncated: bool = False,
        return_same_td: bool = False,
        track_traj_ids: bool = True,
        track_policy_version: bool = False,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        replay_buffer: Any = None,
        pre_collect_hook: Callable[[], Any] | None = None,
        post_collect_hook: Callable[[TensorDictBase], Any] | None = None,
        auto_register_policy_transforms: bool | None = None,
        compile_policy: bool | Mapping[str, Any] | None = None,
        cudagraph_policy: bool | Mapping[str, Any] | None = None,
        no_cuda_sync: bool = False,
        compact_obs: bool = False,
        timeout: None = None,
    ) -> None:
        reject_timeout(timeout, "SyncDataCollector")
        settings = CollectorSettings.of(locals())
        self.exploration_type = exploration_type
        self._switch = exploration_type, set_exploration_type(exploration_type)  # made once: a batch may be one step
        self.reset_at_each_iter, self.reset_when_done = reset_at_each_iter, reset_when_done
        self.postproc = checked_postproc(postproc)
        self.replay_buffer = replay_buffer
        self._writer = None if replay_buffer is None else buffer_writer(replay_buffer)
        self._awaited = replay_buffer if isinstance(replay_buffer, ReplayBuffer) else None
        self.pre_collect_hook, self.post_collect_hook = pre_collect_hook, post_collect_hook
        self._compile_policy, self._cudagraph_policy = compile_policy, cudagraph_policy
        self._failure: BaseException | None = None  # to be raised before anything else is collected
        self._no_grad = torch.no_grad()
        self.set_truncated, self._waits_for_copies = set_truncated, not no_cuda_sync
        self._trajs_per_batch, self._assembler = settings.trajs_per_batch or 0, TrajectoryAssembler()
        self.traj_format = traj_format or "padded"
        self._splits = settings.pads_trajectories and replay_buffer is None
        self._same_td: TensorDictBase | None = None
        self.return_same_td = return_same_td
        self.storing_device = device_argument("storing_device", storing_device, device)
        self.policy_device = device_argument("policy_device", policy_device, device)
        device_of_env = device_argument("env_device", env_device, device)
        self.init_random_frames = settings.init_random_frames or 0
        self.compact_obs = compact_obs
        policy = made_policy(policy, policy_factory)
        self._weights = PolicyWeights(policy, self.policy_device, is_own=policy_factory is not None)
        makes_env = not is_environment(create_env_fn)
        if create_env_kwargs and not makes_env:
            raise TypeError("create_env_kwargs are arguments of a callable that makes the environment; got one made")
        self.env: Any = in_gym_env(create_env_fn(**(create_env_kwargs or {})) if makes_env else create_env_fn)
        self._finalizer = weakref.finalize(self, self.env.close) if makes_env else None
        try:
            if auto_register_policy_transforms:
                self.env = with_transforms_of_policy(self.env, policy)
            if device_of_env is not None:
                self.env.to(device_of_env)
            self._set_sizes(settings)
            self._tags = StepTags(
                self._width, self._weights, tracks_ids=track_traj_ids, tracks_version=track_policy_version
            )
            self.max_frames_per_traj = settings.max_frames_per_traj
            self._episode_steps = None if self.max_frames_per_traj is None else EpisodeSteps(self._width)
            self._rollout = self._make_rollout()
        except BaseException:
            self.shutdown()
            raise
        self._episodes, self._throughput = EpisodeStats(self._width), Throughput()
        self.broken_off: list[int] = []  #: environments whose trajectories broke off between the last two batches
        self._stepped = 0
        self.frames = 0
        self.batches = 0
        self.is_shut_down = False

    def _set_sizes(self, settings: CollectorSettings) -> None:
        self._width = self.env.batch_size.numel()
        self.requested_frames_per_batch = settings.frames_per_batch or ROWS_FOR_TRAJECTORIES * self._width
        self._steps = -(-self.requested_frames_per_batch // self._width)
        self.frames_per_batch = self._steps * self._width
        self.total_frames = settings.total_frames
        settings.warn_of_remainder(self.frames_per_batch)

    def _make_rollout(self, clock: CallTimer | None = None) -> Rollout:
        require_first_marks(self._weights.policy, self.env)
        policy = as_policy(self._weights.policy, self.env)
        if self._compile_policy:
            policy = compiled_policy(policy, _options(self._compile_policy))
        if self._cudagraph_policy and not is_cpu(self.policy_device):
            policy = cudagraph_policy(policy, _options(self._cudagraph_policy))
        self._prepare = policy.prepare if isinstance(policy, CallablePolicy) else _nothing
        policy = policy_on_device(policy, self.policy_device, self.env)
        return make_rollout(
            self.env,
            policy,
            self._tags,
            max_frames_per_traj=self.max_frames_per_traj,
            reset_when_done=self.reset_when_done,
            clock=clock,
        )

    @property
    def _steps_way(self) -> StepsWay:
        return self._rollout.steps_way

    @property
    def policy(self) -> Any:
        """The policy that collects: the caller's own, or its copy on `policy_device`."""
        return self._weights.policy

    @property
    def policy_version(self) -> int:
        """The number of calls of `update_policy_weights_`."""
        return self._weights.newest_version

    def set_post_collect_hook(self, hook: Callable[[TensorDictBase], Any] | None) -> None:
        """Sets `post_collect_hook`, from the next batch on."""
        self.post_collect_hook = hook

    def rollout(self) -> TensorDictBase | None:
        """The next batch, whatever `total_frames` says; None where it went into the replay buffer.

        Raises RuntimeError after `shutdown` and while it collects in the background, and what an environment or the
        policy raised: at once where nothing was stepped before or the rows went into the replay buffer, else in the
        call after the one that handed them out.
        """
        if self._background is not None:
            self._refuse_beside_background()
        if self.is_shut_down:
            self._refuse_if_shut_down()
        if self._failure is not None:
            self._raise_failure()
        if self._awaited is not None and not self._awaited.has_room_for(self.frames_per_batch):
            self._await_room()
        try:
            batch = self._next_batch()
        except BaseException as error:
            self._reset()  # a batch is lost: no trajectory may go on across the gap
            failure, self._failure = self._failure, None
            if failure is not None and failure is not error:
                raise error from failure
            raise
        if self._failure is not None:
            self._reset()
            if batch is None:
                self._raise_failure()
        return batch

    def _refuse_if_shut_down(self) -> None:
        if self.is_shut_down:
            raise RuntimeError("this collector was shut down; make a new one")

    @property
    def failure(self) -> BaseException | None:
        """The error of an environment or the policy after the last batch's steps, which the next `rollout` raises."""
        return self._failure

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _next_batch(self) -> TensorDictBase | None:
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        steps = BatchSteps(self._collect_trajectories()) if self._trajs_per_batch else self._collect_batch()
        self.frames += steps.shape.numel()
        self.batches += 1
        if self._writer is not None and self.postproc is None and self.post_collect_hook is None:
            self._writer.write_steps(steps)
            return None
        batch = with_time_named(split_trajectories(steps.batch()) if self._splits else steps.batch())
        if self.return_same_td:
            batch = self._into_same_td(batch)
        if self.postproc is not None:
            batch = self.postproc(batch)
        if self._writer is not None:
            self._writer.write(batch)
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return batch if self._writer is None else None

    def _collect_trajectories(self) -> TensorDictBase:
        while self._assembler.count < self._trajs_per_batch and self._failure is None:
            self._assembler.add(self._collect_batch().batch())
        if self._failure is not None and self._assembler.count == 0:
            raise self._failure
        return self._assembler.take(min(self._trajs_per_batch, self._assembler.count))

    def _into_same_td(self, batch: TensorDictBase) -> TensorDictBase:
        if self._failure is not None:
            return batch  # a shorter one
        self._same_td = batch if self._same_td is None else self._same_td.update_(batch)
        return self._same_td

    def _collect_batch(self) -> Steps:
        if self.reset_at_each_iter:
            self._reset()
        start = time.perf_counter()
        random_frames = max(0, self.init_random_frames - self._stepped)
        steps, self._failure = self._collect_steps(random_steps=-(-random_frames // self._width))
        if self._failure is not None and self._writer is None and not isinstance(self._failure, Exception):
            raise self._failure  # an interrupt is never held back
        cuts = self._tags.cuts
        self.broken_off = [env for env, _ in cuts]
        if cuts:
            self._end_broken_off()
        if self._episode_steps is not None:
            steps.count_steps(self._episode_steps)
        frames = steps.shape.numel()
        self._stepped += frames
        if self.reset_when_done:
            steps.count_episodes(self._episodes)
        if self.set_truncated or self.compact_obs or self.storing_device is not None:
            steps = BatchSteps(self._changed(steps.batch()))
        self._throughput.add(frames, time.perf_counter() - start)
        return steps

    def _changed(self, batch: TensorDictBase) -> TensorDictBase:
        """A batch as `set_truncated`, `compact_obs` and `storing_device` have it."""
        if self.set_truncated:
            truncate_last_step(batch)
        if self.compact_obs:
            batch = without_next_observations(batch, self.env)
        return to_storing_device(batch, self.storing_device, waits=self._waits_for_copies)

    def _end_broken_off(self) -> None:
        """Ends trajectories whose last step was handed out before the environment had to be replaced."""
        for env, traj_id in self._tags.cuts:
            self._episodes.drop(env)
            self._assembler.cut([traj_id])
            if self._episode_steps is not None:
                self._episode_steps.restart([env])
        self._tags.cuts.clear()
        if self._writer is not None:
            self._writer.restart()

    def _collect_steps(self, *, random_steps: int) -> RolloutResult:
        if self._rollout.is_random:  # no policy: the switches would cost as much as four steps of CartPole
            return self._rollout.collect(self._steps, random_steps=random_steps)
        self._prepare()
        self._weights.begin_batch()
        try:
            with self._no_grad, self._exploration():
                return self._rollout.collect(self._steps, random_steps=random_steps)
        finally:
            self._weights.end_batch()

    def _exploration(self) -> set_exploration_type:
        """A block in which policies act as `exploration_type` says."""
        kind, switch = self._switch
        if kind is not self.exploration_type:
            kind = self.exploration_type
            switch = set_exploration_type(kind)
            self._switch = kind, switch
        return switch

    def reset(self, index: None = None) -> None:
        """Resets every environment before the next batch; trajectories that have not ended are left unfinished.

        Raises ValueError for an `index`: some environments alone cannot be reset.
        """
        if index is not None:
            raise ValueError(f"a collector resets all of its environments; leave index={index!r:.60} out")
        with self._between_batches():
            self._reset()

    def _reset(self) -> None:
        self._rollout.restart()
        self._tags.ids.restart()
        self._tags.cuts.clear()
        self._episodes.restart()
        if self._episode_steps is not None:
            self._episode_steps.restart()
        self._assembler.restart()
        if self._writer is not None:
            self._writer.restart()

    def update_policy_weights_(
        self,
        policy_weights: Any = None,
        *,
        policy_or_weights: Any = None,
        worker_ids: None = None,
        version: int | None = None,
    ) -> None:
        """Updates the weights of the policy that acts, and raises `policy_version` (to `version`, if given).

        None takes them from the policy that the collector was made with, where it collects with a copy on another
        device. Otherwise a state dict, a module, or a TensorDict of parameters; `policy_or_weights` is a second name.

        Any thread may call this at any time: weights and version change together. Those of the caller's own policy
        change between two of its calls (this waits for the present one; where the policy itself asks for the update,
        or its call does not end, the update follows the call); those of a policy of the collector's own between two
        batches, for which a copy of them waits. An optimizer that writes into the caller's own policy does so whenever
        it wants: do that in `with collector.pause():`, and call this without weights inside. Another collector with the
        same policy object does not take part in all that: pause it, too.

        Raises TypeError without weights, ValueError for those of another policy, and either for a `version` that is no
        integer from 0 to below 2**63; nothing is changed then.
        """
        self._raise_background_failure()
        weights = one_of_weights(
            policy_weights=policy_weights, policy_or_weights=policy_or_weights, worker_ids=worker_ids
        )
        self._weights.update(weights, version)
        self._note_newest_version(self._weights.newest_version)

    def encoded_spaces(self) -> EncodedSpaces:
        """The specs of observations and actions, and the gymnasium spaces behind them, which `write_minari` writes."""
        try:
            env = as_env(self.env, "SyncDataCollector")
        except TypeError:  # an environment of another kind, of which only steps are known
            return EncodedSpaces({}, 0, {})
        return env.encoded_spaces()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """The next reset of each environment starts from `seed`, `seed + 1`, ...; returns the first that is free.

        With `static_seed` every environment starts from `seed`, which is returned; see `EnvBase.set_seed`. Vector
        environments that reset themselves take seeds when all are reset: at the beginning, and after `reset`.
        """
        with self._between_batches():
            return int(self.env.set_seed(seed, static_seed=True) if static_seed else self.env.set_seed(seed))

    def state_dict(self) -> dict[str, Any]:
        """Counters, ended episodes, and the states of the policy and of the environments' random numbers, if any.

        With `trajs_per_batch` also the whole trajectories that wait for the next batch, under "waiting".
        Unfinished episodes are not part of it: a collector that loads the state begins new ones, with the random
        numbers that this collector would use next. Where this one is reset at that point too (`reset`, or
        `reset_at_each_iter`), both give the same batches from there on. Random actions come from torch's global
        generator, which is the caller's to save.
        """
        with self._between_batches():
            return self._state_dict()

    def _state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "frames": self.frames,
            "stepped": self._stepped,
            "batches": self.batches,
            "trajectories": self._tags.ids.count,
            "policy_version": self._weights.version,
            "episodes": self._episodes.state_dict(),
        }
        weights, numbers = self._weights.state_dict(), random_state_of(self.env)
        if weights is not None:
            state["policy_state_dict"] = weights
        if self._trajs_per_batch:
            state["waiting"] = self._assembler.state_dict()
        return state if numbers is None else {**state, "env_random_state": numbers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on after `state_dict`: counters and policy are those, and every environment starts a new trajectory.

        Raises ValueError for a state of another kind of collector or policy, with nothing changed.
        """
        with self._between_batches():
            self._load_state_dict(state_dict)

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        validate_state(state, self._weights.state_dict())
        validate_waiting(state, self._trajs_per_batch)
        if "env_random_state" in state:
            self.env.set_random_state(state["env_random_state"])
        self._weights.restore(state.get("policy_state_dict"), state["policy_version"])
        self._reset()
        self._assembler.load_state_dict(state.get("waiting", NOTHING_WAITS))
        self.frames, self._stepped, self.batches = state["frames"], state["stepped"], state["batches"]
        self._tags.ids.count = state["trajectories"]
        self._episodes.load_state_dict(state["episodes"])

    def shutdown(self, timeout: float | None = None, close_env: bool = True, *, raise_on_error: bool = True) -> None:
        """Ends collecting, and closes the environment if the collector made it. A second call does nothing.

        In the background a batch that was begun is stepped and written first (TimeoutError where that takes longer than
        `timeout` seconds). `close_env=False` leaves the environment open. With `raise_on_error` an error that has ended
        collecting in the background, and was not raised yet, is raised when all is done.
        """
        if self._background is not None:
            self._background.stop(timeout)
        self.is_shut_down = True
        if self._finalizer is not None:
            self._finalizer() if close_env else self._finalizer.detach()
        if raise_on_error:
            self._raise_background_failure()

    def __enter__(self) -> SyncDataCollector:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.shutdown(raise_on_error=kind is None)  # else one of the background is in the log only

    def __repr__(self) -> str:
        return (
            f"SyncDataCollector({self.env!r}, frames_per_batch={self.frames_per_batch}, "
            f"total_frames={self.total_frames}, frames={self.frames})"
        )


Collector = SyncDataCollector


def truncate_last_step(batch: TensorDictBase) -> None:
    """Marks the last step as truncated and done where it is not terminated, also for agents with flags of their own."""
    mark_truncated(batch, (*(slice(None) for _ in batch.shape[1:]), -1))


def without_next_observations(batch: TensorDictBase, env: Any) -> TensorDictBase:
    """`batch` without the observations under `next`; rewards, flags and what a policy wrote there stay."""
    keys = [("next", *key_path(key)) for key in observation_keys(env)]
    return batch.exclude(*keys, ("next", "step_count"))


def one_of_weights(
    *,
    weights_dict: Mapping[str, Any] | None = None,
    model_id: str | None = None,
    worker_ids: Any = None,
    **named: Any,
) -> Any:
    """The weights, which have several names; None: those of the policy that a collector was made with.

    Raises:
        TypeError: two of the names are given.
        ValueError: weights of another model than "policy", or for some of the workers.
    """
    others = {*(weights_dict or {}), "policy" if model_id is None else model_id} - {"policy"}
    if others:
        raise ValueError(f"a collector has the weights of its 'policy', and none of {sorted(others)}")
    if worker_ids is not None:
        raise ValueError("workers share the weights: all of them get the update; leave worker_ids out")
    if weights_dict:
        named["weights_dict"] = weights_dict["policy"]
    given = {name: weights for name, weights in named.items() if weights is not None}
    if len(given) > 1:
        raise TypeError(f"{' and '.join(given)} are two names of one argument; give one")
    return next(iter(given.values()), None)


def made_policy(policy: Any, policy_factory: Callable[[], Any] | None) -> Any:
    """The policy, or what its factory makes. Raises TypeError for both, and for a factory that is none."""
    if policy_factory is None:
        return policy
    if policy is not None:
        raise TypeError("policy_factory makes the policy: it cannot be used with policy; give one of them")
    if not callable(policy_factory):
        raise TypeError(f"policy_factory must be a callable without arguments, got {type(policy_factory).__name__}")
    return policy_factory()


def with_transforms_of_policy(env: Any, policy: Any) -> Any:
    """`env` with the transforms that modules of the policy (recurrent ones) need, if there are any.

    Raises TypeError for an environment of another library that takes no transforms.
    """
    needed = transforms_of(policy, env)
    if needed and isinstance(env, EnvBase) and not isinstance(env, TransformedEnv):
        return TransformedEnv(env, needed)
    for transform in needed:
        if not hasattr(env, "append_transform"):
            raise TypeError(
                f"auto_register_policy_transforms=True: a {type(env).__name__} has no append_transform; wrap it in the "
                "TransformedEnv of its library"
            )
        env.append_transform(transform)
    return env


def _nothing() -> None:
    pass


def _options(setting: bool | Mapping[str, Any]) -> Mapping[str, Any]:
    return setting if isinstance(setting, Mapping) else {}


_NUMBERS = forms.list_of(forms.number)
_EPISODES = forms.record({"count": forms.integer(), "returns": _NUMBERS, "lengths": _NUMBERS})


def validate_state(state: Any, policy_state: Mapping[str, Any] | None) -> None:
    """Raises ValueError for anything but a collector's state whose policy has the same entries as `policy_state`."""
    if not isinstance(state, Mapping):
        raise ValueError(f"a collector's state is a dict, got {type(state).__name__}")
    for key in COUNTERS:
        if not isinstance(state.get(key), int) or state[key] < 0:
            raise ValueError(f"a collector's state has a number {key!r} of 0 or more, got {state.get(key)!r}")
    forms.check(forms.record({"episodes": _EPISODES}), dict(state), "a collector's state")
    shapes, allowed = shapes_of(state.get("policy_state_dict")), shapes_of(policy_state)
    if shapes != allowed:
        raise ValueError(
            f"the state's policy is not this collector's.\n  found:   {shapes}\n  allowed: {allowed}\n"
            "  Make the collector with a policy of the same parameters."
        )
    for name, value in (state.get("policy_state_dict") or {}).items():
        if policy_state and isinstance(policy_state[name], Tensor) and not isinstance(value, Tensor):
            raise ValueError(f"the policy's {name!r} is a tensor, got a {type(value).__name__}")


def validate_waiting(state: Mapping[str, Any], trajs_per_batch: int) -> None:
    """Raises ValueError where waiting trajectories are damaged, or belong to a collector with `trajs_per_batch`."""
    waiting = state.get("waiting", NOTHING_WAITS)
    if len(waiting_steps(waiting)) and not trajs_per_batch:
        raise ValueError(
            f"{len(waiting['lengths'])} whole trajectories wait in the state for their batch, and would be lost here; "
            "make the collector with trajs_per_batch"
        )


class BufferWriter:
    """Writes batches into `replay_buffer`, in the shape that its storage has.

    Where new trajectories begin it marks a seam before the next row, so that no sampled slice joins it with a row that
    anybody wrote before. Steps that the buffer's transforms hold back are written before the seam. With a rate limiter
    nothing waits here: a collector waits before it begins a batch, where it can be paused and nothing is lost. So it
    does for room in a queue; what others take of that meanwhile is waited for here.
    """

    def __init__(self, replay_buffer: ReplayBuffer[Any]) -> None:
        self.replay_buffer = replay_buffer
        self._needs_seam = True
        self._rows: ColumnRows | None = None  # those that were written last
        self._places = ColumnPlaces(())  # where columns are, in their order

    def restart(self) -> None:
        """Marks a seam before the next batch: it continues nothing that was written before."""
        self._needs_seam = True

    def write(self, batch: TensorDictBase) -> None:
        """Adds a batch `[*envs, time]`; where the storage has one dimension, one environment after the other."""
        storage = self.replay_buffer.storage
        batch = _with_ndim(batch, storage.ndim)
        if not self._needs_seam:
            with let_through():
                self.replay_buffer.extend(batch)
            return
        # No row of another thread between seam and batch; but nobody waits for the mutex while `extend` waits for room.
        with contextlib.nullcontext() if self.replay_buffer.fills_up else storage.mutex, let_through():
            self.replay_buffer.flush_transforms()
            storage.mark_seam()
            self._needs_seam = False  # who restarts it while `extend` waits wants another one
            self.replay_buffer.extend(batch)

    def flush(self) -> None:
        """Writes the steps that the buffer's transforms hold back."""
        with let_through():
            self.replay_buffer.flush_transforms()

    def write_steps(self, steps: Steps) -> None:
        """As `write`; makes no batch where columns can be copied into the rows of the storage."""
        if self._needs_seam or not self._append_columns(steps):
            self.write(with_time_named(steps.batch()))

    def _append_columns(self, steps: Steps) -> bool:
        """Writes columns, if there are some and the buffer takes them; else nothing was written."""
        rows = self.replay_buffer.column_rows
        if rows is None:
            return False
        if self._rows is not rows:
            self._rows, self._places = rows, ColumnPlaces(rows.paths, rows.index_path)
        return steps.append_to(rows, self._places)


class OtherBufferWriter(BufferWriter):
    """The same for a buffer of another library, which has no seams and holds nothing back."""

    def __init__(self, replay_buffer: Any) -> None:
        super().__init__(replay_buffer)
        self._ndim = storage_ndim(replay_buffer)

    def write(self, batch: TensorDictBase) -> None:
        self.replay_buffer.extend(batch if self._ndim is None else _with_ndim(batch, self._ndim))

    def write_steps(self, steps: Steps) -> None:
        self.write(with_time_named(steps.batch()))


def buffer_writer(replay_buffer: Any) -> BufferWriter:
    """A writer into a buffer of this library or of another."""
    return (BufferWriter if isinstance(replay_buffer, ReplayBuffer) else OtherBufferWriter)(replay_buffer)


def _with_ndim(batch: TensorDictBase, ndim: int) -> TensorDictBase:
    if ndim == 1 and batch.ndim > 1:
        return batch.reshape(-1)
    return batch.reshape(-1, batch.shape[-1]) if ndim == 2 and batch.ndim != 2 else batch


def device_argument(name: str, device: Device, default: Device) -> torch.device | None:
    """The device of the argument `name`; where it is None, that of the argument `device`, which is `default`.

    Raises:
        ValueError: there is no such device here.
    """
    return usable_device(default, "device") if device is None else usable_device(device, name)


def policy_on_device(policy: TensorDictPolicy, policy_device: torch.device | None, env: Any) -> TensorDictPolicy:
    """`policy` as a function of TensorDicts of `env`, which is called with copies on `policy_device`."""
    env_device = env.device
    is_same = policy_device is None or policy_device == env_device or (is_cpu(policy_device) and is_cpu(env_device))
    if is_same or isinstance(policy, RandomPolicy):
        return policy
    target = env_device or torch.device("cpu")

    def call(td: TensorDictBase) -> TensorDictBase:
        out = policy(td.to(policy_device)).to(target)
        return out if env_device is not None else out.clear_device_()

    return CallablePolicy(call)


def to_storing_device(batch: TensorDictBase, device: torch.device | None, *, waits: bool) -> TensorDictBase:
    """`batch` on `device` (None: where it is); without waiting, a copy to or from a GPU may still be under way."""
    if device is None:
        return batch
    return batch.to(device) if waits else batch.to(device, non_blocking=True)
