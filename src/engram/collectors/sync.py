"""Collecting in this process."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from engram.collectors.asking import ask
from engram.collectors.devices import Device, first_device, on_device, stored
from engram.collectors.rolled import Rolled
from engram.collectors.rollers import Roller, roller_for
from engram.collectors.settings import refuse_bad_settings, refuse_bad_state
from engram.collectors.stats import CollectorStats, Episodes, Speed, stats_of
from engram.collectors.trajectories import FrameMarks
from engram.collectors.utils import split_trajectories
from engram.collectors.weights import PolicyWeights
from engram.collectors.whole import WholeTrajectories
from engram.collectors.writing import BufferWriter
from engram.envs.policies import ExplorationType, as_policy, set_exploration_type
from engram.processes.timeouts import CallTimer, reject_timeout

ROWS_IN_SEARCH = 32  # at a time, while whole trajectories are looked for


class SyncDataCollector:
    """Steps an environment with a policy and hands out batches in TED.

    A batch is `[time]` for a single environment, `[*batch_size, time]` for several, with `frames_per_batch` frames
    rounded up to whole rows (3 environments, 22 frames: 3 x 8). Episodes go on from one batch to the next;
    `("collector", "traj_ids")`, int64, numbers them 0, 1, 2, ... in time order. Iterating ends after `total_frames`
    (-1: never).

    Args:
        create_env_fn: an environment, which stays the caller's to close, or a callable that makes one.
        policy: a callable on TensorDicts, a TensorDictModule, an `nn.Module` from the observation tensor to the action,
            `env.rand_step`, or None for random actions. It runs under `torch.no_grad`.
        frames_per_batch: frames of one batch, over all environments; may be left out beside `trajs_per_batch`.
        total_frames: where to stop; if it does not divide, a warning, and the last batch is whole.
        device: what `storing_device`, `policy_device` and `env_device` are unless they are given.
        max_frames_per_traj: the step at which an episode is cut: `truncated` is set and the environment reset.
        init_random_frames: so many frames, rounded up to whole rows, have random actions.
        reset_at_each_iter: every batch starts with a reset.
        reset_when_done: False leaves it to the environment what follows the end of an episode; a trajectory is then all
            that comes between two resets.
        postproc: called on each batch; its result is handed out.
        split_trajs: batches are `[trajectories, longest]`, padded, with `("collector", "mask")`.
        trajs_per_batch: batches are so many whole trajectories, in the order in which they ended, padded like those of
            `split_trajs` (in a replay buffer: one after the other, without padding). `total_frames` counts the frames
            handed out. Steps are made `frames_per_batch` at a time (32 rows unless given), and what is left over waits
            for the next batch. Early batches have more short trajectories: those end first.
        set_truncated: the last step of each batch is marked `truncated` and `done` where it is not `terminated`. That
            says where the batch was cut; the episode itself goes on, with its id.
        return_same_td: one TensorDict is handed out again and again, its tensors overwritten by each batch.
        track_policy_version: int64 `("collector", "policy_version")` says which policy acted: 0, and one more
            after each `update_policy_weights_`.
        exploration_type: how stochastic policies act.
        replay_buffer: gets each batch by `extend`; iterating then yields None. A buffer whose storage has one
            dimension gets the steps of several environments one environment after the other.
        no_cuda_sync: copies to `storing_device` are not waited for.
        timeout: None; for an environment that may hang, take a collector with worker processes (TypeError).

    Gymnasium environments, alone, in a `SerialEnv` or stepped together, are stepped with raw values; tensors are made
    once a batch. What an environment gives must be of its spaces: a ValueError names the key otherwise.

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

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        frames_per_batch: int | None = None,
        total_frames: int = -1,
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
        set_truncated: bool = False,
        return_same_td: bool = False,
        track_policy_version: bool = False,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        replay_buffer: Any = None,
        no_cuda_sync: bool = False,
        timeout: None = None,
    ) -> None:
        reject_timeout(timeout, "SyncDataCollector")
        refuse_bad_settings(
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            max_frames_per_traj=max_frames_per_traj,
            init_random_frames=init_random_frames,
            trajs_per_batch=trajs_per_batch,
            split_trajs=split_trajs,
            return_same_td=return_same_td,
            set_truncated=set_truncated,
            reset_at_each_iter=reset_at_each_iter,
            reset_when_done=reset_when_done,
            replay_buffer=replay_buffer,
        )
        self._exploration_type = exploration_type
        self._reset_at_each_iter, self._reset_when_done = reset_at_each_iter, reset_when_done
        self._postproc, self._split_trajs = postproc, split_trajs
        self._writer = None if replay_buffer is None else BufferWriter(replay_buffer)
        self._failure: BaseException | None = None  # to be raised before anything else is collected
        self._set_truncated, self._waits = set_truncated, not no_cuda_sync
        self._trajs_per_batch, self._whole = trajs_per_batch or 0, WholeTrajectories()
        self._own: TensorDictBase | None = None
        self._return_same_td = return_same_td
        self._storing_device = first_device("storing_device", storing_device, device)
        self._policy_device = first_device("policy_device", policy_device, device)
        place = first_device("env_device", env_device, device)
        self._init_random_frames = init_random_frames or 0
        self._weights = PolicyWeights(policy, self._policy_device)
        makes_env = isinstance(create_env_fn, type) or not hasattr(create_env_fn, "step")
        self.env = create_env_fn() if makes_env else create_env_fn
        self._finalizer = weakref.finalize(self, self.env.close) if makes_env else None
        try:
            if place is not None:
                self.env.to(place)
            self._set_sizes(frames_per_batch, total_frames)
            self._marks = FrameMarks(self._width, tracks_version=track_policy_version)
            self._limit = max_frames_per_traj
            self._roller = self._make_roller()
        except BaseException:
            self.shutdown()
            raise
        self._episodes, self._speed = Episodes(self._width), Speed()
        self._stepped = 0
        self.frames = 0
        self.batches = 0
        self.is_shut_down = False

    def _set_sizes(self, frames_per_batch: int | None, total_frames: int) -> None:
        self._width = self.env.batch_size.numel()
        self.requested_frames_per_batch = frames_per_batch or ROWS_IN_SEARCH * self._width
        self._steps = -(-self.requested_frames_per_batch // self._width)
        self.frames_per_batch = self._steps * self._width
        self.total_frames = total_frames
        if total_frames > 0 and total_frames % self.frames_per_batch and not self._trajs_per_batch:
            whole = -(-total_frames // self.frames_per_batch) * self.frames_per_batch
            warnings.warn(
                f"total_frames={total_frames} is not a multiple of the {self.frames_per_batch} frames of a batch; "
                f"{whole} frames will be collected",
                stacklevel=3,
            )

    def _enter_steps_in(self, clock: CallTimer) -> None:
        """From the first one on, steps and resets of the environment are entered in `clock`, for a worker's owner."""
        self._roller = self._make_roller(clock)

    def _make_roller(self, clock: CallTimer | None = None) -> Roller:
        policy = as_policy(self._weights.policy, self.env)
        self._prepare = getattr(policy, "prepare", lambda: None)
        policy = on_device(policy, self._policy_device, self.env)
        return roller_for(
            self.env, policy, self._limit, self._marks, reset_when_done=self._reset_when_done, clock=clock
        )

    @property
    def policy(self) -> Any:
        """The policy that collects: the caller's own, or its copy on `policy_device`."""
        return self._weights.policy

    @property
    def policy_version(self) -> int:
        """How often `update_policy_weights_` was called."""
        return self._marks.version

    @property
    def stats(self) -> CollectorStats:
        """Frames, speed, and returns and lengths of the last episodes, for a progress bar."""
        return stats_of(self.frames, self.batches, self._episodes, self._speed)

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        while self._failure is not None or self.total_frames < 0 or self.frames < self.total_frames:
            yield self.rollout()

    def rollout(self) -> TensorDictBase | None:
        """The next batch, whatever `total_frames` says; None where it went into the replay buffer.

        Raises RuntimeError after `shutdown`, and what an environment or the policy raised: at once where nothing was
        stepped before or the rows went into the replay buffer, else in the call after the one that handed them out.
        """
        if self.is_shut_down:
            raise RuntimeError("this collector was shut down; make a new one")
        self._raise_failure()
        try:
            batch = self._rolled_out()
        except BaseException as error:
            self.reset()  # a batch is lost: no trajectory may go on across the gap
            failure, self._failure = self._failure, None
            if failure is not None and failure is not error:
                raise error from failure
            raise
        if self._failure is not None:
            self.reset()
            if batch is None:
                self._raise_failure()
        return batch

    @property
    def failure(self) -> BaseException | None:
        """What the next `rollout` raises, as an environment or the policy did after the steps of the last batch."""
        return self._failure

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _rolled_out(self) -> TensorDictBase | None:
        batch = self._whole_trajectories() if self._trajs_per_batch else self._collected()
        self.frames += batch.numel()
        self.batches += 1
        if self._split_trajs or (self._trajs_per_batch and self._writer is None):
            batch = split_trajectories(batch)
        if self._return_same_td:
            batch = self._in_own(batch)
        if self._postproc is not None:
            batch = self._postproc(batch)
        if self._writer is None:
            return batch
        self._writer.write(batch)
        return None

    def _whole_trajectories(self) -> TensorDictBase:
        while self._whole.count < self._trajs_per_batch and self._failure is None:
            self._whole.add(self._collected())
        if self._failure is not None and self._whole.count == 0:
            raise self._failure
        return self._whole.take(min(self._trajs_per_batch, self._whole.count))

    def _in_own(self, batch: TensorDictBase) -> TensorDictBase:
        if self._failure is not None:
            return batch  # a shorter one
        self._own = batch if self._own is None else self._own.update_(batch)
        return self._own

    def _collected(self) -> TensorDictBase:
        if self._reset_at_each_iter:
            self.reset()
        start = time.perf_counter()
        batch, self._failure = self._rolled(-(-max(0, self._init_random_frames - self._stepped) // self._width))
        if self._failure is not None and self._writer is None and not isinstance(self._failure, Exception):
            raise self._failure  # an interrupt waits for nobody
        self._stepped += batch.numel()
        self._note_episodes(batch)
        if self._set_truncated:
            _mark_last_step(batch)
        batch = stored(batch, self._storing_device, waits=self._waits)
        self._speed.add(batch.numel(), time.perf_counter() - start)
        return batch

    def _rolled(self, random_steps: int) -> Rolled:
        if self._roller.is_random:  # no policy: the two switches would cost as much as four steps of CartPole
            return self._roller.roll(self._steps, random_steps)
        self._prepare()
        with torch.no_grad(), set_exploration_type(self._exploration_type):
            return self._roller.roll(self._steps, random_steps)

    def _note_episodes(self, batch: TensorDictBase) -> None:
        following = batch.get("next")
        reward, done = following.get("reward", None), following.get("done", None)
        if reward is not None and done is not None and self._reset_when_done:  # others keep theirs in groups of agents
            self._episodes.add(as_rows(reward, batch.shape, np.add), as_rows(done, batch.shape, np.logical_or))

    def reset(self) -> None:
        """The next batch starts with a reset of every environment; trajectories that have not ended never will."""
        self._roller.restart()
        self._marks.ids.restart()
        self._episodes.restart()
        self._whole.restart()
        if self._writer is not None:
            self._writer.restart()

    def update_policy_weights_(self, policy_weights: Any = None, *, version: int | None = None) -> None:
        """Brings the weights of the collecting policy up to date, and raises `policy_version` (to `version`, if given).

        None takes them from the policy that the collector was made with, where it collects with a copy on another
        device. Otherwise a state dict, a module, or a TensorDict of parameters. Raises TypeError without weights.
        """
        self._weights.update(policy_weights)
        self._marks.version = self._marks.version + 1 if version is None else version

    def set_seed(self, seed: int) -> int:
        """The next reset of each environment starts from `seed`, `seed + 1`, ...; returns the first that is free.

        Vector environments that reset themselves take seeds when all are reset: at the beginning, and after `reset`.
        """
        return int(self.env.set_seed(seed))

    def state_dict(self) -> dict[str, Any]:
        """Counters, ended episodes, the policy's state, and the environments' random numbers where they can be told.

        What environments are in the middle of is not part of it: whoever loads the state begins new episodes, with the
        random numbers that this collector would use next. Where this one is reset at that point too (`reset`, or
        `reset_at_each_iter`), both give the same batches from there on. Random actions come from torch's global
        generator, which is the caller's to save.
        """
        state: dict[str, Any] = {
            "frames": self.frames,
            "stepped": self._stepped,
            "batches": self.batches,
            "trajectories": self._marks.ids.count,
            "policy_version": self._marks.version,
            "episodes": self._episodes.state_dict(),
        }
        weights, numbers = self._weights.state_dict(), ask(self.env, "random_state")
        if weights is not None:
            state["policy_state_dict"] = weights
        return state if numbers is None else {**state, "env_random_state": numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after `state`: counters and policy are those, and every environment starts a new trajectory.

        Raises ValueError for a state of another kind of collector or policy, with nothing changed.
        """
        refuse_bad_state(state, self._weights.state_dict())
        if "env_random_state" in state:
            self.env.set_random_state(state["env_random_state"])
        if "policy_state_dict" in state:
            self._weights.update(state["policy_state_dict"])
        self.reset()
        self._whole.clear()
        self.frames, self._stepped, self.batches = state["frames"], state["stepped"], state["batches"]
        self._marks.ids.count, self._marks.version = state["trajectories"], state["policy_version"]
        self._episodes.load_state_dict(state["episodes"])

    def shutdown(self) -> None:
        """Ends collecting, and closes the environment if the collector made it. A second call does nothing."""
        self.is_shut_down = True
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> SyncDataCollector:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return (
            f"SyncDataCollector({self.env!r}, frames_per_batch={self.frames_per_batch}, "
            f"total_frames={self.total_frames}, frames={self.frames})"
        )


Collector = SyncDataCollector


def _mark_last_step(batch: TensorDictBase) -> None:
    time_dim, following = batch.ndim - 1, batch.get("next")
    if following.get("terminated", None) is None:
        following.set("terminated", following.get("done").clone())
    if following.get("truncated", None) is None:  # some environments know no truncation
        following.set("truncated", torch.zeros_like(following.get("done")))
    done, terminated, truncated = (
        batch.get(("next", key)).select(time_dim, -1) for key in ("done", "terminated", "truncated")
    )
    truncated |= ~terminated
    done |= truncated


def as_rows(leaf: torch.Tensor, shape: torch.Size, merge: np.ufunc) -> np.ndarray[Any, Any]:
    """`[*shape, ...]` as an array `[envs, time]`; further dimensions, of agents, are merged."""
    rows = leaf.detach().cpu().numpy().reshape(shape[:-1].numel(), shape[-1], -1)
    return rows[..., 0] if rows.shape[-1] == 1 else np.asarray(merge.reduce(rows, -1))
