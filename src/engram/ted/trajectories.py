"""Trajectories in flat data: where each of them begins and ends, and one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from engram._text import warn_user
from engram.pytree import (
    Key,
    KeyPath,
    as_path,
    as_tensor,
    format_key,
    get_entry,
    has_batch_size,
    map_outermost,
    steps_of_padded,
    to_tensor,
)
from engram.store.row_form import IDS

_IDS: tuple[KeyPath, ...] = (IDS[0], ("traj_ids",), *IDS[1:])
_ENDS: tuple[KeyPath, ...] = tuple(
    (*at, flag) for at in (("next",), ()) for flag in ("done", "truncated", "terminated")
)


def find_start_stop_traj(
    *,
    trajectory: Tensor | None = None,
    end: Tensor | None = None,
    at_capacity: bool,
    cursor: int | Tensor | range | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the trajectories of a ring of steps begin and end: the first step, the last step, and the length of each.

    Args:
        trajectory: the trajectory of each step, [time, *envs]; where it changes another one begins. Or
        end: bool [time, *envs], whether a trajectory ends with the step.
        at_capacity: the ring is full, so the first step follows the last one. If not, a trajectory ends with the last.
        cursor: the newest step of a full ring, behind which the oldest one stands: a trajectory ends there. Of a range
            or a tensor, which were written last, the last one counts.
        device: of the results; that of the input if None.

    Returns:
        int64 [n, dimensions], [n, dimensions] and [n], environment by environment in the order of the last steps. A
        trajectory that goes on at the beginning of the ring has its first step behind its last one.

    Raises:
        TypeError: not exactly one of `trajectory` and `end` is given.
        RuntimeError: there are no steps.
        IndexError: the cursor lies outside of them.

    Example:
        >>> end = torch.tensor([0, 1, 0, 0, 1, 0]).bool()
        >>> start, stop, length = find_start_stop_traj(end=end, at_capacity=True, cursor=2)
        >>> start.flatten().tolist(), stop.flatten().tolist(), length.tolist()
        ([5, 2, 3], [1, 2, 4], [3, 1, 2])
    """
    if (trajectory is None) == (end is None):
        raise TypeError("give exactly one of trajectory and end, which say where trajectories end")
    steps = to_tensor(end if trajectory is None else trajectory)
    if not steps.ndim or not len(steps):
        raise RuntimeError(f"no trajectory begins or ends in an empty input, of shape {list(steps.shape)}")
    ends = (steps != steps.roll(-1, 0)) if end is None else steps.bool().clone()
    if not at_capacity:
        ends[-1] = True
    elif cursor is not None:
        ends[_position(cursor)] = True
    ends[-1] |= ~ends.any(0)  # one trajectory all around: it has to end somewhere
    backwards = tuple(reversed(range(ends.ndim)))
    stop = ends.permute(backwards).nonzero().flip(-1)
    return _with_starts(stop, ends.shape, steps.device if device is None else torch.device(device))


def _position(cursor: int | Tensor | range) -> int:
    if isinstance(cursor, range):
        return cursor[-1]
    return int(to_tensor(cursor).flatten()[-1])


def _with_starts(stop: Tensor, shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """First steps, last steps and lengths from the last steps [n, dimensions], sorted by environment, then time."""
    envs = torch.zeros(len(stop), dtype=torch.int64, device=stop.device)
    for dim, size in zip(range(len(shape) - 1, 0, -1), reversed(shape[1:]), strict=True):
        envs = envs * size + stop[:, dim]
    time, before = stop[:, 0], stop[:, 0].roll(1)
    first = envs != envs.roll(1)
    first[0] = True
    counts = torch.bincount(first.cumsum(0) - 1)
    last = time[counts.cumsum(0) - 1]  # of each environment: what its first trajectory follows, all around
    before[first] = last
    start = stop.clone()
    start[:, 0] = (before + 1) % shape[0]
    length = (time - start[:, 0]) % shape[0] + 1
    return start.to(device), stop.to(device), length.to(device)


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """The steps of one trajectory, in the order of time, as `iter_trajectories` gives them."""

    data: Any

    def __len__(self) -> int:
        return self.length

    @property
    def length(self) -> int:
        """The number of its steps."""
        return int(_first_leaf_length(self.data))

    @property
    def batch_size(self) -> torch.Size:
        """`[length]`."""
        return torch.Size([self.length])

    @property
    def total_reward(self) -> Tensor:
        """The sum of `("next", "reward")`. Raises KeyError where the steps have none."""
        reward = get_entry(self.data, ("next", "reward"))
        if reward is None:
            raise KeyError("the steps have no ('next', 'reward') to sum")
        return as_tensor(reward, ("next", "reward")).sum()


def iter_trajectories(data: Any, trajectory_key: Key | None = None) -> Iterator[Trajectory]:
    """The trajectories of flat steps, one after the other: runs of one id, or up to and with a step that ends one.

    Args:
        data: a TensorDict, tensorclass or dict of steps in the order of time, [steps]: what `rb[:]` gives, or a
            collector for one environment.
        trajectory_key: where ids are. If None, `("collector", "traj_ids")`, `"traj_ids"` or `"episode"`, the first that
            is there; else the flags `done`, `truncated` or `terminated` under `next` or at the root say where a
            trajectory ends, with a warning, as they say nothing about one that was cut off.

    Padding (`("collector", "mask")` is False) is left out, and a trajectory ends at it.

    Raises:
        ValueError: the data have more than one batch dimension.
        KeyError: there are neither ids nor flags.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(TensorDict({"x": torch.arange(5), "episode": torch.tensor([0, 0, 1, 1, 1])}, [5]))
        >>> [trajectory.data["x"].tolist() for trajectory in iter_trajectories(rb[:], "episode")]
        [[0, 1], [2, 3, 4]]
    """
    if has_batch_size(data) and len(data.batch_size) != 1:
        raise ValueError(
            f"iter_trajectories takes data with a single batch dimension, the steps, got {list(data.batch_size)}; "
            "reshape(-1) makes one of environments that follow each other"
        )
    ends = _ends(data, trajectory_key)
    is_step = steps_of_padded(data, ends.shape)
    if is_step is not None:
        is_step = is_step.cpu()
        ends = ends.cpu()
        ends[:-1] |= ~is_step[1:]
        ends, data = ends[is_step], map_outermost(data, lambda part: part[is_step])
    return _cut(data, ends)


def _cut(data: Any, ends: Tensor) -> Iterator[Trajectory]:
    start = 0
    for stop in (ends.nonzero().flatten() + 1).tolist():
        yield Trajectory(map_outermost(data, lambda part, rows=slice(start, stop): part[rows]))  # type: ignore[misc]
        start = stop


def _ends(data: Any, trajectory_key: Key | None) -> Tensor:
    """bool [steps]: whether a trajectory ends with a step; the last one ends one."""
    ids = _ids(data, trajectory_key)
    if ids is not None:
        ends = torch.ones(len(ids), dtype=torch.bool, device="cpu")
        ends[:-1] = _any_of_step(ids[1:] != ids[:-1])
        return ends
    flags = [(path, as_tensor(get_entry(data, path), path)) for path in _ENDS if get_entry(data, path) is not None]
    flags = [(path, flag) for path, flag in flags if path[:-1] == flags[0][0][:-1]]
    if not flags:
        raise KeyError(
            "the data have no trajectory ids "
            f"({', '.join(map(format_key, _IDS))}) and no flags ({', '.join(map(format_key, _ENDS))}): say with "
            "trajectory_key where ids are"
        )
    warn_user(
        f"the data have no trajectory ids, so trajectories end where {', '.join(format_key(p) for p, _ in flags)} say "
        "so: one that was cut off is joined with the next. Store ids, or give trajectory_key",
    )
    ends = torch.stack([_any_of_step(flag.bool()) for _, flag in flags]).any(0)
    if len(ends):
        ends[-1] = True
    return ends


def _any_of_step(flags: Tensor) -> Tensor:
    """Flags bool [steps, ...] as one for each step."""
    return flags.flatten(1).any(1) if flags.ndim > 1 else flags


def _ids(data: Any, trajectory_key: Key | None) -> Tensor | None:
    paths = _IDS if trajectory_key is None else (as_path(trajectory_key, "trajectory_key"),)
    for path in paths:
        value = get_entry(data, path)
        if value is not None:
            return as_tensor(value, path)
    if trajectory_key is not None:
        raise KeyError(f"the data have no {format_key(paths[0])}, the trajectory_key")
    return None


def _first_leaf_length(data: Any) -> int:
    if has_batch_size(data):
        return int(data.batch_size[0])
    value = next(iter(data.values()))
    return _first_leaf_length(value) if isinstance(value, dict) else len(value)
