"""What transforms along time share."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.transforms.base import Transform
from engram.transforms.entries import Key, as_key, shallow, stacked, unstacked
from engram.transforms.in_env import Deferred
from engram.transforms.specs import EnvSpecs
from engram.transforms.strands import Strands, Trajectories, trajectories_of
from engram.transforms.writing import Writing

Self = TypeVar("Self", bound="TimedTransform")


class Carried(NamedTuple):
    """What the last written batch leaves for the next one."""

    done: Tensor  # [S]: whether its last step ended a trajectory
    ids: Tensor | None  # [S]: that step's trajectory
    value: Any  # what the transform needs of it


class TimedTransform(Transform):
    """Works along time: on batches `[*, T]` whose last batch dimension is time, never across a trajectory's end.

    Trajectories end at flags (`done_key`; `("next", "done")` if None, or `"done"` in batches without it), where ids
    change (`traj_key`; `("collector", "traj_ids")` or `"episode"` if None and there), and before `"is_init"`.
    A plain dict has the batch dimensions of its flags without their last dimension of 1. Batches without steps are left
    as they are on reading, and an error on writing.

    `forward` takes each batch by itself: rollouts, `rb[:]`, or what slice samplers give. Appended to a buffer with
    `invert=True` it works on what is written, and goes on in the next `extend` or `add` where the last one stopped,
    unless that ended a trajectory or the ids say that another one comes.

    In an environment it goes on from step to step and starts anew where a reset does, so that a rollout has what
    `forward` makes of the rollout of the bare environment. Each environment has a copy of its own.
    """

    stream_in_order = True
    _decisive: tuple[str, ...] = ("in_keys", "out_keys", "done_key", "traj_key")

    def __init__(self, *keys: Any, done_key: Key | None = None, traj_key: Key | None = None) -> None:
        super().__init__(*keys)
        self.done_key = None if done_key is None else as_key(done_key)
        self.traj_key = None if traj_key is None else as_key(traj_key)
        self._carried: Carried | None = None

    def _run(self, batch: Any, trajectories: Trajectories, goes_on: Tensor, before: Any) -> Any:
        """Sets entries in place; returns what to carry on.

        `before` is what the last batch left, of which strands where `goes_on` (bool [S]) are the continuation; None:
        no strand goes on.
        """
        raise NotImplementedError

    def _trajectories(self, batch: Any, dims: int | None = None) -> Trajectories:
        return trajectories_of(batch, type(self).__name__, self.done_key, self.traj_key, dims=dims)

    def _alone(self, batch: Any) -> Any:
        """The batch by itself, in place."""
        if type(batch) is list:
            whole = self._alone(stacked(batch))
            return unstacked(whole, len(batch))
        trajectories = self._trajectories(batch)
        if trajectories.done.numel() == 0:
            return batch
        self._run(batch, trajectories, torch.zeros_like(trajectories.done[:, 0]), None)
        return batch

    def forward(self, batch: Any) -> Any:
        return self._alone(batch)

    # ---- environments ----
    def for_env(self: Self, specs: EnvSpecs) -> Self:
        here = copy.copy(self)
        here._carried = None
        here._start(specs)
        return here

    def _start(self, specs: EnvSpecs) -> None:
        """No episode has begun."""
        raise NotImplementedError

    def _deferred(self, writes: Sequence[Key], *, limit: int | None = None, **settings: Any) -> Deferred:
        """This transform with other `settings`, for whole batches of an environment."""
        of_batches, before = copy.copy(self), None
        vars(of_batches).update(settings, done_key=("next", "done"))

        def apply(batch: TensorDictBase, starts: Tensor) -> None:
            nonlocal before
            ends = torch.zeros_like(starts)
            ends[:, :-1] = starts[:, 1:]
            trajectories = Trajectories(Strands(tuple(batch.batch_size)), ends, None, starts, ends)
            before = of_batches._run_in_env(batch, trajectories, ~starts[:, 0], before)

        return Deferred(tuple(writes), limit, apply)

    def _run_in_env(self, batch: Any, trajectories: Trajectories, goes_on: Tensor, before: Any) -> Any:
        """`_run` on a batch in TED, with every root entry that the transform makes in an environment."""
        return self._run(batch, trajectories, goes_on, before)

    def _inverts(self) -> bool:
        return False

    def stream(self, writing: Writing) -> Writing:
        return self._next_piece(writing)

    def _next_piece(self, writing: Writing) -> Writing:
        """Goes on where the last piece stopped; what is only held back elsewhere leaves nothing behind."""
        if writing.in_place:
            return writing
        if writing.rows_are_trajectories:
            return writing.changed(lambda batch: self._alone(shallow(batch)))
        ordered = writing.in_order()
        items, held, carried = ordered.items, ordered.held, self._carried
        if items is not None:
            items, carried = self._piece(items, carried, writing.batch_dims)
        if held is not None:
            held, _ = self._piece(held, carried, writing.batch_dims)
        self._carried = carried
        return ordered._replace(items=items, held=held).in_form_of(writing)

    def _piece(self, batch: Any, carried: Carried | None, dims: int) -> tuple[Any, Carried]:
        batch = shallow(batch)
        now = self._trajectories(batch, dims)
        if now.done.numel() == 0:
            raise ValueError("nothing to add: the batch has no steps")
        goes_on = torch.zeros_like(now.done[:, 0])
        if carried is not None and carried.done.shape == goes_on.shape:
            goes_on = ~carried.done.to(goes_on.device) & ~now.starts[:, 0]
            if carried.ids is not None and now.ids is not None:
                goes_on = goes_on & (carried.ids.to(goes_on.device) == now.ids[:, 0])
        elif carried is not None:
            carried = None
        with torch.no_grad():  # what is carried on would keep the graph of every batch before
            value = self._run(batch, now, goes_on, None if carried is None else carried.value)
        ids = None if now.ids is None else now.ids[:, -1].clone()
        return batch, Carried(now.done[:, -1].clone(), ids, value)

    # ---- state ----
    def empty(self) -> None:
        self._carried = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self._carried is None else self._carried._asdict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._carried = Carried(**state) if state else None

    def _settings(self) -> dict[str, Any]:
        settings = {"done_key": self.done_key, "traj_key": self.traj_key}
        return {k: v for k, v in settings.items() if v is not None}


def sibling(key: Key, name: str) -> Key:
    """`("next", "reward")` and `"sum"`: `("next", "sum")`."""
    return name if isinstance(key, str) else (*key[:-1], name)
