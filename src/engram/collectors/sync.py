"""Collecting in this process."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase

from engram.collectors.raw import GymRoller
from engram.collectors.stepped import TensorDictRoller
from engram.collectors.trajectories import TrajectoryIds
from engram.collectors.utils import split_trajectories
from engram.collectors.weights import PolicyWeights
from engram.envs.exploration import ExplorationType, set_exploration_type
from engram.envs.policies import CallablePolicy, RandomPolicy, TensorDictPolicy, as_policy

Device = torch.device | str | int | None


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
        frames_per_batch: frames of one batch, over all environments.
        total_frames: where to stop; if it does not divide, a warning, and the last batch is whole.
        device: what `storing_device`, `policy_device` and `env_device` are unless they are given.
        max_frames_per_traj: the step at which an episode is cut: `truncated` is set and the environment reset.
        init_random_frames: so many frames, rounded up to whole rows, have random actions.
        reset_at_each_iter: every batch starts with a reset.
        postproc: called on each batch; its result is handed out.
        split_trajs: batches are `[trajectories, longest]`, padded, with `("collector", "mask")`.
        exploration_type: how stochastic policies act.
        replay_buffer: gets each batch by `extend`; iterating then yields None. A buffer whose storage has one
            dimension gets the steps of several environments one environment after the other.

    Gymnasium environments, alone or in a `SerialEnv`, are stepped with raw values; tensors are made once a batch.
    Raises ValueError and TypeError for arguments that cannot work, when it is made.

    >>> from engram.envs import GymEnv
    >>> with SyncDataCollector(lambda: GymEnv("CartPole-v1"), frames_per_batch=200, total_frames=400) as collector:
    ...     for batch in collector:
    ...         print(batch.shape, batch["action"].shape)
    torch.Size([200]) torch.Size([200, 2])
    torch.Size([200]) torch.Size([200, 2])
    """

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
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
    ) -> None:
        refuse_bad_settings(frames_per_batch, total_frames, max_frames_per_traj, init_random_frames)
        if split_trajs and replay_buffer is not None:
            raise ValueError("split_trajs=True would write padding into the replay buffer; leave it out")
        makes_env = not hasattr(create_env_fn, "step")
        self.env = create_env_fn() if makes_env else create_env_fn
        self._finalizer = weakref.finalize(self, self.env.close) if makes_env else None
        self._place(device, storing_device, policy_device, env_device)
        self._weights = PolicyWeights(policy, self._policy_device)
        self._exploration_type = exploration_type
        self._reset_at_each_iter = reset_at_each_iter
        self._postproc, self._split_trajs, self._replay_buffer = postproc, split_trajs, replay_buffer
        self._init_random_frames = init_random_frames or 0
        self._set_sizes(frames_per_batch, total_frames)
        self._ids = TrajectoryIds(self._width)
        self._roller = self._make_roller(max_frames_per_traj)
        self.frames = 0
        self.batches = 0
        self.is_shut_down = False

    def _place(self, device: Device, storing: Device, policy: Device, env: Device) -> None:
        if (env_device := _first(env, device)) is not None:
            self.env.to(env_device)
        self._storing_device = _first(storing, device)
        self._policy_device = _first(policy, device)

    def _set_sizes(self, frames_per_batch: int, total_frames: int) -> None:
        self._width = self.env.batch_size.numel()
        self._steps = -(-frames_per_batch // self._width)
        self.requested_frames_per_batch = frames_per_batch
        self.frames_per_batch = self._steps * self._width
        self.total_frames = total_frames
        if total_frames > 0 and total_frames % self.frames_per_batch:
            whole = -(-total_frames // self.frames_per_batch) * self.frames_per_batch
            warnings.warn(
                f"total_frames={total_frames} is not a multiple of the {self.frames_per_batch} frames of a batch; "
                f"{whole} frames will be collected",
                stacklevel=3,
            )

    def _make_roller(self, max_frames_per_traj: int | None) -> GymRoller | TensorDictRoller:
        policy = self._with_devices(as_policy(self._weights.policy, self.env))
        engines = getattr(self.env, "engines", lambda: None)()
        if engines is not None and _is_cpu(self.env.device):
            return GymRoller(self.env, engines, policy, max_frames_per_traj, self._ids)
        return TensorDictRoller(self.env, policy, max_frames_per_traj, self._ids)

    def _with_devices(self, policy: TensorDictPolicy) -> TensorDictPolicy:
        ours, theirs = self._policy_device, self.env.device
        if isinstance(policy, RandomPolicy) or ours is None or ours == theirs or (_is_cpu(ours) and _is_cpu(theirs)):
            return policy
        home = theirs or torch.device("cpu")

        def on_policy_device(td: TensorDictBase) -> TensorDictBase:
            out = policy(td.to(ours)).to(home)
            return out if theirs is not None else out.clear_device_()

        return CallablePolicy(on_policy_device)

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        while self.total_frames < 0 or self.frames < self.total_frames:
            yield self.rollout()

    def rollout(self) -> TensorDictBase | None:
        """The next batch, whatever `total_frames` says; None where it went into the replay buffer.

        Raises RuntimeError after `shutdown`.
        """
        if self.is_shut_down:
            raise RuntimeError("this collector was shut down; make a new one")
        batch = self._collected()
        self.frames += self.frames_per_batch
        self.batches += 1
        if self._split_trajs:
            batch = split_trajectories(batch)
        if self._postproc is not None:
            batch = self._postproc(batch)
        if self._replay_buffer is None:
            return batch
        self._replay_buffer.extend(_in_the_shape_of(self._replay_buffer, batch))
        return None

    def _collected(self) -> TensorDictBase:
        if self._reset_at_each_iter:
            self._restart()
        random_left = max(0, self._init_random_frames - self.frames)
        random_steps = min(self._steps, -(-random_left // self._width))
        try:
            batch = self._rolled(random_steps)
        except BaseException:
            self._ids.restart()
            raise
        return batch if self._storing_device is None else batch.to(self._storing_device)

    def _rolled(self, random_steps: int) -> TensorDictBase:
        if self._roller.is_random:  # no policy: the two switches would cost as much as four steps of CartPole
            return self._roller.roll(self._steps, random_steps)
        with torch.no_grad(), set_exploration_type(self._exploration_type):
            return self._roller.roll(self._steps, random_steps)

    def _restart(self) -> None:
        self._roller.restart()
        self._ids.restart()

    def update_policy_weights_(self, policy_weights: Any = None) -> None:
        """Brings the weights of the collecting policy up to date.

        None takes them from the policy that the collector was made with, where it collects with a copy on another
        device. Otherwise a state dict, a module, or a TensorDict of parameters. Raises TypeError without weights.
        """
        self._weights.update(policy_weights)

    def set_seed(self, seed: int) -> int:
        """The next reset of each environment starts from `seed`, `seed + 1`, ...; returns the first that is free."""
        return int(self.env.set_seed(seed))

    def state_dict(self) -> dict[str, Any]:
        """Counters and the policy's state. What environments are in the middle of is not part of it."""
        state: dict[str, Any] = {"frames": self.frames, "batches": self.batches, "trajectories": self._ids.count}
        weights = self._weights.state_dict()
        return state if weights is None else {**state, "policy_state_dict": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after `state`: counters and policy are those, and every environment starts a new trajectory."""
        if "policy_state_dict" in state:
            self._weights.update(state["policy_state_dict"])
        self.frames, self.batches = int(state["frames"]), int(state["batches"])
        self._restart()
        self._ids.count = int(state["trajectories"])

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


def refuse_bad_settings(
    frames_per_batch: int, total_frames: int, max_frames_per_traj: int | None, init_random_frames: int | None
) -> None:
    if frames_per_batch < 1:
        raise ValueError(f"frames_per_batch must be 1 or more, got {frames_per_batch}")
    if total_frames < 1 and total_frames != -1:
        raise ValueError(f"total_frames must be 1 or more, or -1 for no end, got {total_frames}")
    if max_frames_per_traj is not None and max_frames_per_traj < 1:
        raise ValueError(f"max_frames_per_traj must be 1 or more, or None, got {max_frames_per_traj}")
    if init_random_frames is not None and init_random_frames < 0:
        raise ValueError(f"init_random_frames must be 0 or more, or None, got {init_random_frames}")


def _first(*devices: Device) -> torch.device | None:
    return next((torch.device(device) for device in devices if device is not None), None)


def _is_cpu(device: torch.device | None) -> bool:
    return device is None or device.type == "cpu"


def _in_the_shape_of(replay_buffer: Any, batch: TensorDictBase) -> TensorDictBase:
    ndim = getattr(getattr(replay_buffer, "storage", None), "ndim", None)
    return batch.reshape(-1) if ndim == 1 and batch.ndim > 1 else batch
