"""Transforms along time: `RewardSum`, `StepCounter`, `InitTracker`, `Reward2GoTransform`, and bounds of trajectories.

A batch `[*lead, T]` is viewed as S environments of T steps. No function loops over rows in Python.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram import _forms as forms
from engram._advice import advised
from engram._arguments import BUILT_IN
from engram._checks import count_or_none
from engram.pytree import (
    MASK,
    Key,
    KeyPath,
    Keys,
    as_key,
    as_path,
    collate_items,
    copy_containers,
    get_entry,
    get_tensor,
    has_batch_size,
    key_path,
    require_tensor,
    set_entry,
    steps_of_padded,
    unstack,
)
from engram.specs import Categorical, Spec, Unbounded
from engram.transforms.base import (
    Deferred,
    Transform,
    WriteRequest,
    has_entries,
    root_key,
    root_pairs,
    select_reset,
    to_device,
)
from engram.transforms.env_specs import RESULT_KEYS, EnvSpecs
from engram.transforms.roles import WARNED, warn_once
from engram.transforms.values import REWARD_KEYS, first_key, rewards_of

DONE_KEYS: tuple[Key, ...] = (("next", "done"), "done")
_IDS: tuple[Key, ...] = (("collector", "traj_ids"), "episode")


class BatchView(NamedTuple):
    """A batch `[*shape]`, whose last dimension is time, viewed as `[S, T]`: S environments of T steps."""

    shape: tuple[int, ...]  # () for a single step

    @property
    def rows(self) -> int:
        """S, the number of environments."""
        return math.prod(self.shape[:-1])

    @property
    def steps(self) -> int:
        """T, the number of steps of each environment."""
        return self.shape[-1] if self.shape else 1

    def split(self, leaf: Tensor, key: Key) -> Tensor:
        """A leaf as [S, T, ...].

        Raises:
            ValueError: it does not have the batch dimensions.
        """
        n = len(self.shape)
        if tuple(leaf.shape[:n]) != tuple(self.shape):
            raise ValueError(f"{key!r} has shape {list(leaf.shape)} in a batch {list(self.shape)}")
        return leaf.reshape(self.rows, self.steps, *leaf.shape[n:])

    def join(self, leaf: Tensor) -> Tensor:
        """A leaf [S, T, ...] in the batch's shape: the reverse of `split`."""
        return leaf.reshape((*self.shape, *leaf.shape[2:]))


class TrajectoryBounds(NamedTuple):
    """The starts and ends of trajectories in a batch; all [S, T]."""

    view: BatchView
    done: Tensor  # flags at the end of each step
    ids: Tensor | None
    starts: Tensor  # whether `is_init` is set
    ends: Tensor  # the last steps of trajectories in the batch

    @property
    def position(self) -> Tensor:
        """int64 [T]."""
        return torch.arange(self.view.steps, device=self.ends.device)

    def first(self) -> Tensor:
        """int64 [S, T]: where in the batch each step's trajectory starts."""
        begins = torch.zeros_like(self.ends)
        begins[:, 1:] = self.ends[:, :-1]
        return torch.where(begins, self.position, 0).cummax(1).values

    def last(self) -> Tensor:
        """int64 [S, T]: where in the batch each step's trajectory ends, or the batch does."""
        far = self.view.steps - 1
        return torch.where(self.ends, self.position, far).flip(1).cummin(1).values.flip(1)


def trajectory_bounds(
    batch: Any,
    who: str,
    done_key: Key | None = None,
    traj_key: Key | None = None,
    mask_key: Key | KeyPath = MASK,
    dims: int | None = None,
) -> TrajectoryBounds:
    """The trajectories of a batch, from done flags (`("next", "done")` or `"done"`), ids, `"is_init"` and a mask.

    `dims` is the number of batch dimensions of a dict.

    Raises:
        KeyError: the batch has no done flags, or none under `done_key`.
    """
    done_key = first_key(batch, DONE_KEYS, who) if done_key is None else done_key
    flag = require_tensor(batch, done_key, who)
    view = view_of(batch, flag, dims)
    done = _flags(view, flag, done_key)
    given_ids = None if traj_key is None else require_tensor(batch, traj_key, who)
    ids = _ids(view, batch) if given_ids is None else view.split(given_ids, str(traj_key)).flatten(1)
    init = get_tensor(batch, "is_init")
    starts = torch.zeros_like(done) if init is None else _flags(view, init, "is_init")
    ends = done.clone()
    if ids is not None:
        ends[:, :-1] |= ids[:, 1:] != ids[:, :-1]
    ends[:, :-1] |= starts[:, 1:]
    is_step = steps_of_padded(batch, (view.rows, view.steps), mask_key)
    if is_step is not None:
        ends |= ~is_step  # each step of padding is a trajectory of its own
        ends[:, :-1] |= ~is_step[:, 1:]
    return TrajectoryBounds(view, done, ids, starts, ends)


def view_of(batch: Any, flag: Any, dims: int | None) -> BatchView:
    """The batch dimensions; those of a dict are the first `dims` of its flags, or all but a last one of 1."""
    if has_batch_size(batch):
        return BatchView(tuple(batch.batch_size))
    shape = tuple(flag.shape)
    if dims is not None:
        return BatchView(shape[:dims])
    # Flags end in a dimension of 1.
    return BatchView(shape[:-1] if len(shape) > 1 and shape[-1] == 1 else shape)


def _flags(view: BatchView, flag: Tensor, key: Key) -> Tensor:
    split = view.split(flag, key).to(torch.bool)
    return split.flatten(2).any(-1) if split.ndim > 2 else split


def _ids(view: BatchView, batch: Any) -> Tensor | None:
    for key in _IDS:
        ids = get_tensor(batch, key)
        if isinstance(ids, Tensor) and ids.numel() == view.rows * view.steps and _are_whole(ids):
            return ids.reshape(view.rows, view.steps)
    return None


def _are_whole(ids: Tensor) -> bool:
    """Whether these are numbers of trajectories, of whatever dtype; others under such a key are not."""
    return not ids.is_floating_point() or bool((ids == ids.trunc()).all())


# By doubling: after k rounds each step holds the sum of up to 2**k steps of its trajectory. Differences of prefix sums
# would cancel, and divisions by powers of gamma overflow.
def running_sum(x: Tensor, first: Tensor) -> Tensor:
    """[S, T, F]: sums from the first step of each trajectory up to each step; `first` as `Trajectories.first`."""
    behind = torch.arange(x.shape[1], device=x.device) - first
    reach, most = 1, int(behind.max())
    while reach <= most:
        is_within = (behind[:, reach:] >= reach).unsqueeze(-1)
        x = torch.cat([x[:, :reach], x[:, reach:] + torch.where(is_within, x[:, :-reach], 0)], 1)
        reach *= 2
    return x


def discounted_to_go(x: Tensor, last: Tensor, gamma: float) -> Tensor:
    """[S, T, F]: `x[t] + gamma * x[t + 1] + ...` to the end of each trajectory; `last` as `Trajectories.last`."""
    ahead = last - torch.arange(x.shape[1], device=x.device)
    reach, most, weight = 1, int(ahead.max()), gamma
    while reach <= most:
        is_within = (ahead[:, :-reach] >= reach).unsqueeze(-1)
        x = torch.cat([x[:, :-reach] + weight * torch.where(is_within, x[:, reach:], 0), x[:, -reach:]], 1)
        reach, weight = 2 * reach, weight * weight
    return x


def flatten_for_sum(x: Tensor) -> Tensor:
    """[S, T, F] in a dtype that sums are computed in."""
    x = x.reshape(*x.shape[:2], math.prod(x.shape[2:]))
    if x.dtype in (torch.float16, torch.bfloat16):
        return x.to(torch.float32)
    return x if x.is_floating_point() else x.to(torch.int64)


Self = TypeVar("Self", bound="TrajectoryTransform")


class CarryOver(NamedTuple):
    """The state that a transform keeps from a written batch to continue in the next one."""

    done: Tensor  # [S]: whether its last step ended a trajectory, or is padding
    ids: Tensor | None  # [S]: that step's trajectory
    value: Any  # what `_run` returned


_CARRY_OVER = forms.record(
    {"done": forms.tensor(torch.bool, ndim=1), "ids": forms.nullable(forms.tensor(ndim=1)), "value": forms.anything}
)


class TrajectoryTransform(Transform, built_in=True):
    """Base class of transforms along time: they take batches `[*, T]` and never cross a trajectory's end.

    Trajectories end at done flags (`done_key`; `("next", "done")` if None, or `"done"` in batches without it), where
    ids change (`traj_key`; if None `("collector", "traj_ids")` or `"episode"`, if the batch has them), before
    `"is_init"`, and at padding, where `("collector", "mask")` is False. The batch dimensions of a plain dict are those
    of its flags without a last dimension of 1. Batches without steps stay unchanged on reading, and are an error on
    writing.

    `forward` treats each batch separately: rollouts, `rb[:]`, or batches of slice samplers. Appended to a buffer with
    `invert=True` it transforms written data, and the next `extend` or `add` continues where the last one
    stopped, unless that ended a trajectory, the trajectory ids differ, or `flush_transforms()` was called between them,
    as a collector does before its first batch. A run that numbers its trajectories as the one before calls it, too.

    In an environment it continues from step to step and restarts at resets, so that a rollout equals `forward` of
    the base environment's rollout. Each environment has its own copy.
    """

    forward_in_order = True
    _state_settings: tuple[str, ...] = ("in_keys", "out_keys", "done_key", "traj_key")
    #: Where episodes of an environment begin.
    reset_keys: Sequence[Key] = ("_reset",)

    def __init__(self, *keys: Any, done_key: Key | None = None, traj_key: Key | None = None) -> None:
        super().__init__(*keys)
        self.done_key = None if done_key is None else as_key(done_key)
        self.traj_key = None if traj_key is None else as_key(traj_key)
        self._carry_over: CarryOver | None = None

    @property
    def needs_order(self) -> bool:
        return True

    def _run(self, batch: Any, trajectories: TrajectoryBounds, continues: Tensor, before: Any) -> Any:
        """Sets entries in place; returns the value to continue with in the next batch.

        `before` is the value of the last batch, which environments continue where `continues` (bool [S]) holds; None:
        no environment does.
        """
        raise NotImplementedError

    def _trajectories(self, batch: Any, dims: int | None = None) -> TrajectoryBounds:
        return trajectory_bounds(batch, type(self).__name__, self.done_key, self.traj_key, dims=dims)

    def _transform_whole(self, batch: Any) -> Any:
        """Changes a batch in place that continues nothing; a list of items is stacked before and unstacked after."""
        if type(batch) is list:
            return unstack(self._transform_whole(collate_items(batch)), 0)
        trajectories = self._trajectories(batch)
        if trajectories.done.numel() == 0:
            return batch
        self._run(batch, trajectories, torch.zeros_like(trajectories.done[:, 0]), None)
        return batch

    def forward(self, batch: Any) -> Any:
        return self._transform_whole(batch)

    # ---- environments ----
    def for_env(self: Self, specs: EnvSpecs) -> Self:
        own = copy.copy(self)
        vars(own).update(self._env_state(specs), _carry_over=None)
        return own

    def _env_state(self, specs: EnvSpecs) -> dict[str, Any]:
        """The attributes that are the state of an environment, as they are before its first reset."""
        raise NotImplementedError

    def _deferred(self, writes: Sequence[Key], *, limit: int | None = None, **settings: Any) -> Deferred:
        """This transform with changed `settings`, for whole batches of an environment."""
        of_batches, before = copy.copy(self), None
        vars(of_batches).update(settings, done_key=("next", "done"))

        def apply(batch: TensorDictBase, starts: Tensor) -> None:
            nonlocal before
            ends = torch.zeros_like(starts)
            ends[:, :-1] = starts[:, 1:]
            trajectories = TrajectoryBounds(BatchView(tuple(batch.batch_size)), ends, None, starts, ends)
            before = of_batches._run_in_env(batch, trajectories, ~starts[:, 0], before)

        return Deferred(tuple(writes), limit, apply)

    def _run_in_env(self, batch: Any, trajectories: TrajectoryBounds, continues: Tensor, before: Any) -> Any:
        """`_run` on a batch in TED, with every root entry that the transform makes in an environment."""
        return self._run(batch, trajectories, continues, before)

    def _inverts(self) -> bool:
        return False

    def forward_stream(self, writing: WriteRequest) -> WriteRequest:
        return self._continue_stream(writing)

    def _continue_stream(self, writing: WriteRequest) -> WriteRequest:
        """Continues from the last write; steps held back by another transform have no effect."""
        if writing.in_place:
            return writing
        if writing.rows_are_trajectories:
            return writing.changed(lambda batch: self._transform_whole(copy_containers(batch)))
        ordered = writing.in_order()
        items, held, carried = ordered.items, ordered.held, self._carry_over
        if items is not None:
            items, carried = self._transform_piece(items, carried, writing.batch_dims)
        if held is not None:
            held, _ = self._transform_piece(held, carried, writing.batch_dims)
        self._carry_over = carried
        return ordered._replace(items=items, held=held).in_form_of(writing)

    def _transform_piece(self, batch: Any, carried: CarryOver | None, dims: int) -> tuple[Any, CarryOver]:
        batch = copy_containers(batch)
        now = self._trajectories(batch, dims)
        if now.done.numel() == 0:
            raise ValueError("nothing to add: the batch has no steps")
        continues = torch.zeros_like(now.done[:, 0])
        if carried is not None and carried.done.shape == continues.shape:
            continues = ~carried.done.to(continues.device) & ~now.starts[:, 0]
            if carried.ids is not None and now.ids is not None:
                continues = continues & (carried.ids.to(continues.device) == now.ids[:, 0])
        elif carried is not None:
            carried = None
        with torch.no_grad():  # the value would otherwise keep the graph of all earlier batches
            value = self._run(batch, now, continues, None if carried is None else carried.value)
        ids = None if now.ids is None else now.ids[:, -1].clone()
        return batch, CarryOver(now.ends[:, -1].clone(), ids, value)

    def end_trajectories(self) -> None:
        if self._carry_over is not None:
            self._carry_over = self._carry_over._replace(done=torch.ones_like(self._carry_over.done))

    # ---- state ----
    def empty(self) -> None:
        self._carry_over = None

    def get_extra_state(self) -> dict[str, Any]:
        return {} if self._carry_over is None else self._carry_over._asdict()

    def set_extra_state(self, state: Any) -> None:
        self._carry_over = CarryOver(state["done"], state["ids"], state["value"]) if state else None

    def _state_form(self) -> forms.Form:
        """The form of a state of a class of the library's own."""
        return _CARRY_OVER

    def _value_form(self) -> forms.Form:
        """The form of what its `_run` returns."""
        return forms.one_of(None)

    def differences(self, state: dict[str, Any]) -> list[str]:
        different = super().differences(state)
        own = state.keys() - {"parameters", "buffers"}
        if not own or type(self) not in BUILT_IN:  # a user's class may have another state
            return different
        forms.check(self._state_form(), state, f"the state of {self.kind}")
        if "done" in own:
            forms.check(forms.record({"value": self._value_form()}), state, f"the state of {self.kind}")
            sizes = {t.shape[:1] for t in _tensors_in([state["done"], state["ids"], state["value"]])}
            if len(sizes) > 1:
                raise ValueError(f"the state of {self.kind} is of {' or '.join(str(n[0]) for n in sizes)} environments")
        return different

    def _settings(self) -> dict[str, Any]:
        settings = {"done_key": self.done_key, "traj_key": self.traj_key}
        return {k: v for k, v in settings.items() if v is not None}


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(member)


def sums_form(in_keys: Sequence[Key]) -> forms.Form:
    """The form of one sum for each of `in_keys`, or for the one reward that a batch has: `[S, F]`."""
    return forms.list_of(forms.tensor(ndim=2), max(1, len(in_keys)))


def sibling_key(key: Key, name: str) -> Key:
    """The key of the entry `name` beside `key`: `("next", "sum")` beside `("next", "reward")`."""
    return name if isinstance(key, str) else (*key[:-1], name)


def _sum_key(key: Key) -> Key:
    """The key of the sum of a reward: `"episode_reward"` beside `"reward"`."""
    return sibling_key(key, f"episode_{key_path(key)[-1]}")


def end_episodes(following: TensorDictBase, over: Tensor, groups: Sequence[Key]) -> TensorDictBase:
    """Marks a step truncated and done where `over` (bool `[*batch, 1]`) holds, also the flags of groups of agents."""
    for group in groups:
        flags = following.get(group)
        done, truncated = flags.get("done"), flags.get("truncated")
        mine = over.reshape(*over.shape[:-1], *[1] * (done.ndim - over.ndim + 1))
        flags.set("truncated", truncated | mine).set("done", done | mine)
    truncated = following.get("truncated")
    return following.set("truncated", truncated | over).set("done", following.get("done") | over)


@advised
class RewardSum(TrajectoryTransform, built_in=True):
    """Adds up the rewards of each trajectory so far, this step's included, as `episode_reward` beside each reward.

    Args:
        in_keys: rewards; `("next", "reward")` if None, or `"reward"` in batches without it.
        out_keys: their sums; `"episode_reward"` in the place of `"reward"` if None.
        done_key, traj_key: where trajectories end; see TrajectoryTransform.

    Without `in_keys` these are all rewards of an environment, those of groups of agents, too, and in a batch that has
    none at its root those of groups: `("agents", "episode_reward")` beside `("agents", "reward")`. In an environment
    the sums are 0 at resets.
    TorchRL's `reset_keys=["_reset"]` and `reward_spec=False` are accepted without effect.
    Sums of integers are int64. Trajectories, and carrying on between writes: see TrajectoryTransform.

    Example:
        >>> done = torch.tensor([[False], [True], [False]])
        >>> batch = {"next": {"reward": torch.ones(3, 1), "done": done}}
        >>> RewardSum()(batch)["next"]["episode_reward"].flatten()
        tensor([1., 2., 1.])
    """

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, *, done_key: Key | None = None, traj_key: Key | None = None
    ) -> None:
        super().__init__(in_keys, [] if in_keys is None else out_keys, done_key=done_key, traj_key=traj_key)
        if in_keys is not None and out_keys is None:
            self.out_keys = [sibling_key(key, f"episode_{key_path(key)[-1]}") for key in self.in_keys]
        if in_keys is None and out_keys is not None:
            raise ValueError("RewardSum with out_keys needs in_keys")

    def _pairs(self, batch: Any) -> list[tuple[Key, Key]]:
        if self.in_keys:
            return super()._pairs(batch)
        return [(key, _sum_key(key)) for key in rewards_of(batch, "RewardSum")]

    def has_changed(self, batch: Any) -> bool | None:
        rewards = [key for key in REWARD_KEYS if get_entry(batch, key) is not None][:1]
        return has_entries(batch, self.out_keys or [_sum_key(key) for key in rewards])

    _sum_along = staticmethod(running_sum)

    def _value_form(self) -> forms.Form:
        return sums_form(self.in_keys)

    # ---- environments ----
    @cached_property
    def _env_pairs(self) -> list[tuple[Key, Key]]:
        return root_pairs(self.in_keys, self.out_keys) if self.in_keys else [("reward", "episode_reward")]

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        if replaced := [target for _, target in self._env_pairs if target in (*RESULT_KEYS, *specs.result_keys)]:
            raise ValueError(f"RewardSum would replace {replaced}; give it out_keys of its own in an environment")
        return specs.with_entries({target: self._sum_spec(specs.entry(source)) for source, target in self._env_pairs})

    def _sum_spec(self, spec: Any) -> Spec:
        return Unbounded(spec.shape, spec.device, spec.dtype if spec.dtype.is_floating_point else torch.int64)

    _of: list[Any]  # the specs of the rewards
    _sums: list[Tensor]

    def _env_state(self, specs: EnvSpecs) -> dict[str, Any]:
        pairs = self._env_pairs if self.in_keys else [(key, _sum_key(key)) for key in specs.reward_keys]
        specs.require([source for source, _ in pairs], "RewardSum")
        rewards: list[Any] = [specs.entry(source) for source, _ in pairs]
        return {"_env_pairs": pairs, "_of": rewards, "_sums": [as_sum_dtype(spec.zero()) for spec in rewards]}

    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        device = fresh.get("done").device
        self._sums = [select_reset(td, torch.zeros_like(old, device=device), old) for old in self._sums]
        for (_, target), total, spec in zip(self._env_pairs, self._sums, self._of, strict=True):
            fresh.set(target, self._shown(total, spec.dtype))
        return fresh

    @staticmethod
    def _shown(total: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy: the sum is continued in place, and the caller may write into the result."""
        return total.to(dtype, copy=True) if dtype.is_floating_point else total.clone()

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        for i, (source, target) in enumerate(self._env_pairs):
            reward = following.get(source)
            total = self._sums[i] = to_device(self._sums[i], reward.device).add_(reward)
            following.set(target, self._shown(total, reward.dtype))
        return following

    def deferred(self) -> Deferred | None:
        if type(self) is not RewardSum or not self._env_pairs:
            return None
        sources, targets = zip(*self._env_pairs, strict=True)
        in_keys, out_keys = ([("next", *key_path(key)) for key in keys] for keys in (sources, targets))
        return self._deferred(targets, in_keys=in_keys, out_keys=out_keys, _sum_along=_sum_in_order)

    def _run_in_env(self, batch: Any, trajectories: TrajectoryBounds, continues: Tensor, before: Any) -> Any:
        left = self._run(batch, trajectories, continues, before)
        for i, (_, target) in enumerate(self._env_pairs):
            total = require_tensor(batch, ("next", *key_path(target)), "RewardSum")
            after = trajectories.view.split(total, target).flatten(2)
            so_far = torch.zeros_like(after)
            so_far[:, 1:] = after[:, :-1]
            if before is not None:
                so_far[:, 0] = before[i]
            set_entry(batch, target, so_far.masked_fill_(trajectories.starts.unsqueeze(-1), 0).reshape(total.shape))
        return left

    def _run(self, batch: Any, trajectories: TrajectoryBounds, continues: Tensor, before: Any) -> Any:
        first, left = trajectories.first(), []
        for i, (source, target) in enumerate(self._pairs(batch)):
            reward = require_tensor(batch, source, "RewardSum")
            split = trajectories.view.split(reward, source)
            x = flatten_for_sum(split)
            if before is not None:
                x = x.clone()
                x[:, 0] += torch.where(continues.unsqueeze(-1), before[i].to(x.device), 0)
            total = self._sum_along(x, first)
            left.append(total[:, -1].clone())
            dtype = reward.dtype if reward.is_floating_point() else torch.int64
            set_entry(batch, target, trajectories.view.join(total.reshape(split.shape).to(dtype)))
        return left


@advised
class StepCounter(TrajectoryTransform, built_in=True):
    """Counts steps within each trajectory: `step_count` 0, 1, 2, ... and, one higher, `("next", "step_count")`.

    Args:
        max_steps: steps with this count and above are marked truncated, and with `update_done` done; in an environment
            also for groups of agents with flags of their own.
        truncated_key: the flag's name beside the done flag.
        step_count_key: the count's name, int64 with the shape of the flags.
        update_done: whether `max_steps` also sets the done flag.
        done_key, traj_key: where trajectories end; see TrajectoryTransform.

    Trajectories, and carrying on between writes: see TrajectoryTransform.

    Example:
        >>> done = torch.tensor([[False], [False], [True], [False]])
        >>> batch = StepCounter()({"next": {"done": done}})
        >>> batch["step_count"].flatten(), batch["next"]["step_count"].flatten()
        (tensor([0, 1, 2, 0]), tensor([1, 2, 3, 1]))
    """

    def __init__(
        self,
        max_steps: int | None = None,
        truncated_key: str = "truncated",
        step_count_key: str = "step_count",
        update_done: bool = True,
        *,
        done_key: Key | None = None,
        traj_key: Key | None = None,
    ) -> None:
        super().__init__(done_key=done_key, traj_key=traj_key)
        self.max_steps = count_or_none(max_steps, "max_steps")
        self.truncated_key, self.step_count_key = truncated_key, step_count_key
        self.update_done = update_done

    def has_changed(self, batch: Any) -> bool | None:
        return has_entries(batch, [self.step_count_key])

    @property
    def step_count_keys(self) -> list[Key]:
        """The key of the count, in a list."""
        return [self.step_count_key]

    @property
    def done_keys(self) -> list[Key]:
        """The key of the done flag, in a list."""
        return ["done" if self.done_key is None else self.done_key]

    @property
    def truncated_keys(self) -> list[Key]:
        """The key of the flag that `max_steps` sets, in a list."""
        return [sibling_key(self.done_keys[0], self.truncated_key)]

    @property
    def terminated_keys(self) -> list[Key]:
        """The key of the terminated flag, in a list."""
        return [sibling_key(self.done_keys[0], "terminated")]

    # ---- environments ----
    def for_env(self, specs: EnvSpecs) -> StepCounter:
        if self.max_steps is not None and (self.truncated_key != "truncated" or not self.update_done):
            raise ValueError(
                "in an environment done is terminated or truncated: max_steps needs truncated_key='truncated' and "
                f"update_done=True, got {self.truncated_key!r} and {self.update_done}"
            )
        return super().for_env(specs)

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        return specs.with_entries({self.step_count_key: Unbounded(specs.done.shape, specs.done.device, torch.int64)})

    _count: Tensor | None
    _most: int  # an upper bound of the counts, which avoids reading them

    _groups: Sequence[Key] = ()  # of agents with flags of their own

    def _env_state(self, specs: EnvSpecs) -> dict[str, Any]:
        return {"_count": None, "_most": 0, "_groups": specs.groups}

    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        zero = torch.zeros_like(fresh.get("done"), dtype=torch.int64)
        self._most = 0 if td.get("_reset", None) is None else self._most
        self._count = select_reset(td, zero, self._count)
        return fresh.set(self.step_count_key, self._count.clone())

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        done = following.get("done")
        if self._count is None:
            self._count = torch.zeros_like(done, dtype=torch.int64)
        self._count = to_device(self._count, done.device).add_(1)
        self._most += 1
        following.set(self.step_count_key, self._count.clone())
        if self.max_steps is not None and self._most >= self.max_steps:
            end_episodes(following, self._count >= self.max_steps, self._groups)
            self._most = int(self._count.max())
        return following

    def deferred(self) -> Deferred | None:
        if type(self) is not StepCounter or self._groups:
            return None
        return self._deferred([self.step_count_key], limit=self.max_steps, max_steps=None)

    def _run(self, batch: Any, trajectories: TrajectoryBounds, continues: Tensor, before: Any) -> Any:
        done_key = self.done_key or first_key(batch, DONE_KEYS, "StepCounter")
        done = require_tensor(batch, done_key, "StepCounter")
        first = trajectories.first()
        count = trajectories.position - first
        if before is not None:
            offset = torch.where(continues, before.to(count.device), 0).unsqueeze(-1)
            count = count + torch.where(first == 0, offset, 0)
        shaped = trajectories.view.join(count)
        shaped = shaped.reshape(*shaped.shape, *[1] * (done.ndim - shaped.ndim)).expand(done.shape).contiguous()
        set_entry(batch, self.step_count_key, shaped)
        if done_key[0] == "next":
            set_entry(batch, ("next", self.step_count_key), shaped + 1)
        if self.max_steps is not None:
            self._truncate(batch, shaped + 1 >= self.max_steps, done_key)
        return count[:, -1] + 1

    def _value_form(self) -> forms.Form:
        return forms.tensor(torch.int64, ndim=1)

    def _truncate(self, batch: Any, over: Tensor, done_key: Key) -> None:
        truncated_key = sibling_key(done_key, self.truncated_key)
        truncated = get_tensor(batch, truncated_key)
        set_entry(batch, truncated_key, over if truncated is None else truncated | over)
        if self.update_done:
            set_entry(batch, done_key, require_tensor(batch, done_key, "StepCounter") | over)

    def _settings(self) -> dict[str, Any]:
        return {"max_steps": self.max_steps, **super()._settings()}


class InitTracker(TrajectoryTransform, built_in=True):
    """Marks the first step of each trajectory and of the batch: `is_init`, bool with the shape of the flags.

    Args:
        init_key: the key of the mark.
        done_key, traj_key: where trajectories end; see TrajectoryTransform.

    On writing (see TrajectoryTransform) the first step of a batch is marked only where a trajectory starts.

    Example:
        >>> done = torch.tensor([[False], [True], [False]])
        >>> InitTracker()({"next": {"done": done}})["is_init"].flatten()
        tensor([ True, False,  True])
    """

    def __init__(self, init_key: Key = "is_init", *, done_key: Key | None = None, traj_key: Key | None = None) -> None:
        super().__init__(done_key=done_key, traj_key=traj_key)
        self.init_key = as_key(init_key)

    # ---- environments ----
    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        mark = Categorical(2, specs.done.shape, specs.done.device, torch.bool)
        return specs.with_entries({root_key(self.init_key): mark})

    def has_changed(self, batch: Any) -> bool | None:
        return has_entries(batch, [self.init_key])

    @property
    def init_keys(self) -> list[Key]:
        """The key of the mark, in a list."""
        return [self.init_key]

    def root_entries(self) -> list[Key]:
        """The key of the mark in an environment."""
        return [root_key(self.init_key)]

    def _env_state(self, specs: EnvSpecs) -> dict[str, Any]:
        return {}

    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        done = fresh.get("done")
        return fresh.set(root_key(self.init_key), select_reset(td, torch.ones_like(done), torch.zeros_like(done)))

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        return following.set(root_key(self.init_key), torch.zeros_like(following.get("done")))

    def deferred(self) -> Deferred | None:
        if type(self) is not InitTracker:
            return None
        return self._deferred(self.root_entries(), init_key=root_key(self.init_key))

    def _run_in_env(self, batch: Any, trajectories: TrajectoryBounds, continues: Tensor, before: Any) -> Any:
        set_entry(batch, ("next", *key_path(self.init_key)), torch.zeros_like(batch.get(("next", "done"))))
        return self._run(batch, trajectories, continues, before)

    def _run(self, batch: Any, trajectories: TrajectoryBounds, continues: Tensor, before: Any) -> Any:
        done = require_tensor(batch, self.done_key or first_key(batch, DONE_KEYS, "InitTracker"), "InitTracker")
        init = trajectories.first() == trajectories.position
        init[:, 0] = ~continues if before is not None else True
        shaped = trajectories.view.join(init)
        shaped = shaped.reshape(*shaped.shape, *[1] * (done.ndim - shaped.ndim)).expand(done.shape)
        set_entry(batch, self.init_key, shaped.contiguous())
        return True

    def _value_form(self) -> forms.Form:
        return forms.one_of(True)

    def _settings(self) -> dict[str, Any]:
        return {"init_key": self.init_key, **super()._settings()}


def _sum_in_order(x: Tensor, first: Tensor) -> Tensor:
    """`running_sum` by adding one step after another, as an environment does: equal to the last bit."""
    sums = x.numpy().copy()
    starts = (first == torch.arange(x.shape[1], device="cpu")).numpy()
    for row, is_start in zip(sums, starts, strict=True):
        bounds = [*np.flatnonzero(is_start).tolist(), len(row)]
        for start, stop in pairwise(bounds):
            np.add.accumulate(row[start:stop], axis=0, out=row[start:stop])
    return torch.from_numpy(sums)


def as_sum_dtype(value: Tensor) -> Tensor:
    """A tensor in the dtype for its sums."""
    if value.dtype in (torch.float16, torch.bfloat16):
        return value.to(torch.float32)
    return value if value.is_floating_point() else value.to(torch.int64)


@advised
class Reward2GoTransform(TrajectoryTransform, built_in=True):
    """The discounted sum of rewards from each step to its trajectory's end, as `reward_to_go`.

    Args:
        gamma: the discount, 0 to 1.
        in_keys: rewards; `("next", "reward")` if None, or `"reward"` in batches without it.
        out_keys: the keys of the sums; `"reward_to_go"` if None.
        done_key, traj_key: where trajectories end; see TrajectoryTransform. `"done"` means `("next", "done")` where the
            batch has it: the flag of the step itself, not of the step before.

    In a buffer that it was appended to before the first `extend`, `inv` computes it when steps are written, from each
    batch by itself: extend by whole trajectories. Steps after the last end in a batch count the rewards up to the end
    of the batch, with a warning; a batch without any end is an error. `read_minari` and `read_hdf5` extend such a
    buffer by whole trajectories.

    Of rows that were written without it, it computes it on reading, from the steps that the batch has: draw slices. A
    slice that ends before its episode lacks the rewards behind it, of which it warns once; so it does at an end by
    truncation, which looks the same. With `invert=True` it always computes it on reading, and not on writing.

    Raises:
        ValueError: no trajectory ends in a batch that is written.

    Example:
        >>> done = torch.tensor([[False], [True]])
        >>> batch = {"next": {"reward": torch.ones(2, 1), "done": done}}
        >>> Reward2GoTransform(gamma=0.5)(batch)["reward_to_go"].flatten()
        tensor([1.5000, 1.0000])
    """

    inverse_in_order = True
    forward_in_order = False

    def __init__(
        self,
        gamma: float = 1.0,
        in_keys: Keys = None,
        out_keys: Keys = None,
        done_key: Key | None = None,
        *,
        traj_key: Key | None = None,
    ) -> None:
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must be 0 to 1, got {gamma}")
        outs = "reward_to_go" if out_keys is None else out_keys
        super().__init__(["reward"] if in_keys is None else in_keys, outs, done_key=done_key, traj_key=traj_key)
        self.gamma = float(gamma)
        self._finds_reward = in_keys is None

    def for_env(self, specs: EnvSpecs) -> Any:
        raise TypeError(
            "Reward2GoTransform needs later rewards, which an environment does not have yet: append it to the replay "
            "buffer, or call its inv on a rollout"
        )

    # ---- reading ----
    def has_written(self, batch: Any) -> bool | None:
        return has_entries(batch, self.out_keys)

    def forward(self, batch: Any) -> Any:
        return batch if self.has_written(batch) else self.inv_alone(batch)

    def inv_alone(self, batch: Any) -> Any:
        if type(batch) is list:
            return unstack(self.forward(collate_items(batch)), 0) if batch else batch
        trajectories = self._bounds(batch)
        if trajectories.done.numel():
            self._run(batch, trajectories, torch.zeros_like(trajectories.done[:, 0]), None)
            self._warn_of_cut(batch, trajectories)
        return batch

    def _warn_of_cut(self, batch: Any, trajectories: TrajectoryBounds) -> None:
        """Warns of trajectories in a batch behind which their episode goes on, or may do so."""
        if WARNED in vars(self):
            return  # what follows takes some time
        done_key, view = self._done_key(batch) or first_key(batch, DONE_KEYS, "Reward2GoTransform"), trajectories.view
        truncated, terminated = (
            None if (flag := get_tensor(batch, sibling_key(done_key, name))) is None else _flags(view, flag, name)
            for name in ("truncated", "terminated")
        )
        is_over = trajectories.done if truncated is None else trajectories.done & ~truncated
        is_over = is_over if terminated is None else is_over | terminated
        last = trajectories.ends.clone()
        last[:, -1] = True
        is_step = steps_of_padded(batch, (view.rows, view.steps))
        last = last if is_step is None else last & is_step
        if cut := int((last & ~is_over).sum()):
            warn_once(
                self,
                f"reward_to_go is the sum of the rewards that a batch has, and {cut} of the {int(last.sum())} "
                "trajectories in this one end before their episode, or by truncation: where rewards follow, they are "
                "missing. Append Reward2GoTransform before the first extend, and extend by whole trajectories, or draw "
                "slices of whole episodes",
            )

    # ---- writing ----
    def inv(self, tensordict: Any) -> Any:
        return self._transform_whole(tensordict if type(tensordict) is list else copy_containers(tensordict))

    def inverse_stream(self, writing: WriteRequest) -> WriteRequest:
        return self._continue_stream(writing)

    @property
    def takes_whole_trajectories(self) -> bool:
        return True

    def changes_writes(self) -> bool:
        return True

    def forward_stream(self, writing: WriteRequest) -> WriteRequest:
        return writing

    def _pairs(self, batch: Any) -> list[tuple[Key, Key]]:
        if not self._finds_reward:
            return super()._pairs(batch)
        return [(key, self._key_of(key)) for key in rewards_of(batch, "Reward2GoTransform")]

    def _key_of(self, reward: Key) -> Key:
        """The key of the sum: at the root, or in the reward's group."""
        group = [name for name in key_path(reward)[:-1] if name != "next"]
        return (*group, *key_path(self.out_keys[0])) if group else self.out_keys[0]

    def _done_key(self, batch: Any) -> Key | None:
        done_key = self.done_key
        if done_key is None:
            return None
        return first_key(batch, (("next", *as_path(done_key)), done_key), "Reward2GoTransform")

    def _bounds(self, batch: Any, dims: int | None = None) -> TrajectoryBounds:
        return trajectory_bounds(batch, "Reward2GoTransform", self._done_key(batch), self.traj_key, dims=dims)

    def _trajectories(self, batch: Any, dims: int | None = None) -> TrajectoryBounds:
        """Those of a batch that is written."""
        trajectories = self._bounds(batch, dims)
        if trajectories.done.numel() and not bool(trajectories.ends.any()):
            raise ValueError(
                "no trajectory ends in this batch, so that the rewards to come are not known; extend by whole "
                "trajectories, or mark the last step truncated and done"
            )
        if trajectories.done.numel() and not bool(trajectories.ends[:, -1].all()):
            warn_once(
                self,
                "reward_to_go is the sum of the rewards that a batch has, and the last trajectory of this one does not "
                "end in it: the rewards that follow are missing. Extend by whole trajectories",
            )
        return trajectories

    def _run(self, batch: Any, trajectories: TrajectoryBounds, continues: Tensor, before: Any) -> Any:
        last = trajectories.last()
        for source, target in self._pairs(batch):
            reward = require_tensor(batch, source, "Reward2GoTransform")
            split = trajectories.view.split(reward, source)
            x = flatten_for_sum(split)
            x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
            to_go = discounted_to_go(x, last, self.gamma).reshape(split.shape)
            dtype = reward.dtype if reward.is_floating_point() else to_go.dtype
            set_entry(batch, target, trajectories.view.join(to_go.to(dtype)))
        return None

    # Batches are independent: there is no state.
    def get_extra_state(self) -> dict[str, Any]:
        return {}

    def _state_form(self) -> forms.Form:
        return forms.one_of({})

    def _settings(self) -> dict[str, Any]:
        return {"gamma": self.gamma, **super()._settings()}
