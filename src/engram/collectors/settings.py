"""The settings of collectors as data: validated once, and sent to the worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, fields, replace
from typing import Any

import torch

from engram._checks import attribute, count_or_none
from engram._text import warn_user
from engram.envs.policies import ExplorationType
from engram.transforms import Transform
from engram.transforms.roles import Role, warn_if_idle

Device = torch.device | str | int | None


#: The least value of each number of something; total_frames may be -1, too.
_COUNTS = {
    "frames_per_batch": 1, "total_frames": 1, "max_frames_per_traj": 1, "init_random_frames": 0, "trajs_per_batch": 1,
}  # fmt: skip


def _checked(name: str, value: Any) -> Any:
    """The value of a setting; a number of something is an int."""
    if name not in _COUNTS or (name == "total_frames" and value == -1):
        return value
    return count_or_none(value, name, _COUNTS[name])


@dataclass(frozen=True)
class CollectorSettings:
    """The arguments that all collectors share, see `SyncDataCollector`; None stands for no number.

    Functions, environments and the replay buffer are not among them: all of this can be sent to another process.

    Raises:
        ValueError: a setting that cannot work, here or with this replay buffer.

    >>> settings = CollectorSettings.of({"frames_per_batch": 8, "max_frames_per_traj": -1, "policy": None})
    >>> settings.arguments()
    {'frames_per_batch': 8}
    >>> CollectorSettings(frames_per_batch=8, trajs_per_batch=0)
    Traceback (most recent call last):
        ...
    ValueError: trajs_per_batch must be an integer of 1 or more, got 0
    """

    frames_per_batch: int | None = None
    total_frames: int = -1
    device: Device = None
    storing_device: Device = None
    policy_device: Device = None
    env_device: Device = None
    max_frames_per_traj: int | None = None
    init_random_frames: int | None = None
    reset_at_each_iter: bool = False
    reset_when_done: bool = True
    split_trajs: bool = False
    trajs_per_batch: int | None = None
    traj_format: str | None = None
    set_truncated: bool = False
    return_same_td: bool = False
    track_traj_ids: bool = True
    track_policy_version: bool = False
    exploration_type: ExplorationType = ExplorationType.RANDOM
    auto_register_policy_transforms: bool | None = None
    compile_policy: bool | Mapping[str, Any] | None = None
    cudagraph_policy: bool | Mapping[str, Any] | None = None
    no_cuda_sync: bool = False
    compact_obs: bool = False
    replay_buffer: InitVar[Any] = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any], **other: Any) -> CollectorSettings:
        """The settings among the arguments of a collector, of which `other` replaces some."""
        names = {*(field.name for field in fields(cls)), "replay_buffer"}
        given = {name: value for name, value in {**arguments, **other}.items() if name in names}
        for name in ("max_frames_per_traj", "init_random_frames"):
            given[name] = None if given.get(name) in (None, 0, -1) else given[name]
        if given.get("total_frames") is None:
            given["total_frames"] = -1
        return cls(**{name: _checked(name, value) for name, value in given.items()})

    def __post_init__(self, replay_buffer: Any) -> None:
        self._validate_counts()
        self._validate_batches(replay_buffer)
        self._validate_trajectories(replay_buffer)

    def _validate_counts(self) -> None:
        if self.frames_per_batch is None and self.trajs_per_batch is None:
            raise ValueError("frames_per_batch says how many frames a batch has; give it, or trajs_per_batch")
        for name in _COUNTS:
            _checked(name, vars(self)[name])

    def _validate_batches(self, replay_buffer: Any) -> None:
        if self.split_trajs and replay_buffer is not None:
            raise ValueError("split_trajs=True would write padding into the replay buffer; leave it out")
        if self.return_same_td and (self.split_trajs or self.trajs_per_batch is not None or replay_buffer is not None):
            raise ValueError(
                "return_same_td=True needs batches of one shape that are handed out; leave out split_trajs, "
                "trajs_per_batch and replay_buffer"
            )
        if self.max_frames_per_traj is not None and not self.reset_when_done:
            raise ValueError("max_frames_per_traj ends episodes by resets; leave out reset_when_done=False")

    def _validate_trajectories(self, replay_buffer: Any) -> None:
        by_trajectories = self.trajs_per_batch is not None
        if by_trajectories and (
            self.split_trajs or self.set_truncated or self.reset_at_each_iter or not self.reset_when_done
        ):
            raise ValueError(
                "trajs_per_batch gives whole trajectories, one a row, and goes on where it stopped; leave out "
                "split_trajs, set_truncated, reset_at_each_iter and reset_when_done"
            )
        if by_trajectories and (storage_ndim(replay_buffer) or 1) > 1:
            raise ValueError("trajs_per_batch writes steps one after the other; give a storage with ndim=1")
        if self.traj_format not in (None, "padded", "cat"):
            raise ValueError(f"traj_format must be 'padded' or 'cat', got {self.traj_format!r}")
        if self.traj_format is not None and not by_trajectories:
            raise ValueError("traj_format is the form of whole trajectories; give trajs_per_batch, or leave it out")
        if not self.track_traj_ids and (self.split_trajs or by_trajectories):
            raise ValueError(
                "trajectories are told apart by their ids: split_trajs and trajs_per_batch need track_traj_ids=True"
            )

    @property
    def pads_trajectories(self) -> bool:
        """Whether batches that are handed out have one trajectory a row, padded."""
        return self.split_trajs or (self.trajs_per_batch is not None and self.traj_format != "cat")

    def arguments(self) -> dict[str, Any]:
        """The arguments of a collector that has these settings, without those that have their default."""
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in vars(self).items() if value != defaults[name]}

    def only_steps(self, frames_per_batch: int) -> CollectorSettings:
        """The settings of a collector whose batches, of so many frames, its owner hands out in its own way."""
        return replace(
            self,
            frames_per_batch=frames_per_batch,
            total_frames=-1,
            split_trajs=False,
            trajs_per_batch=None,
            traj_format=None,
            set_truncated=False,
        )

    def share(
        self, workers: int, frames_per_batch: int | None, *, policy_device: Device, env_device: Device
    ) -> CollectorSettings:
        """The settings of one of so many workers, with devices of its own."""
        return replace(
            self,
            frames_per_batch=frames_per_batch,
            init_random_frames=-(-(self.init_random_frames or 0) // workers) or None,
            device=None,
            storing_device=None,
            policy_device=policy_device,
            env_device=env_device,
        )

    def warn_of_remainder(self, frames_per_batch: int) -> None:
        """Warns where the last of such batches goes beyond `total_frames`, on the line that made the collector."""
        if self.trajs_per_batch is None and self.total_frames > 0 and self.total_frames % frames_per_batch:
            rounded_up = -(-self.total_frames // frames_per_batch) * frames_per_batch
            warn_user(
                f"total_frames={self.total_frames} is not a multiple of the {frames_per_batch} frames of a batch; "
                f"{rounded_up} frames will be collected",
            )


def storage_ndim(replay_buffer: Any) -> int | None:
    """The dimensions of the storage of a buffer of any library; None where it does not say."""
    ndim: int | None = attribute(replay_buffer, "storage.ndim")
    return ndim


def checked_postproc(postproc: Any) -> Any:
    """`postproc` of a collector; warns of a transform that changes nothing of collected batches."""
    if isinstance(postproc, Transform):
        warn_if_idle(postproc, Role.READING, "as a collector's postproc")
    return postproc
