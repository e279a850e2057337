"""Trajectories in collected batches: their ids, in one process and over several, and whole trajectories."""

from __future__ import annotations

import fcntl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from engram import _forms as forms
from engram._native import number_trajectories
from engram.collectors.policy_weights import PolicyWeights
from engram.envs.base import mark_truncated
from engram.processes.shared_memory import SharedMemory

Array = np.ndarray[Any, Any]
IDS = ("collector", "traj_ids")
Worker = int


class TrajectoryIds:
    """Gives trajectories the ids 0, 1, 2, ... in the order of their first steps; of equal ones, by environment.

    >>> ids = TrajectoryIds(2)
    >>> ids.number(np.array([[False, True, False], [False, False, True]])).tolist()
    [[0, 0, 2], [1, 1, 1]]
    >>> ids.number(np.zeros((2, 1), dtype=np.bool_)).tolist()
    [[2], [3]]
    """

    def __init__(self, envs: int) -> None:
        self.count = 0
        self._current = np.zeros(envs, dtype=np.int64)
        self._starts_next = np.ones(envs, dtype=np.bool_)

    def restart(self) -> None:
        """Starts a trajectory with the next step of every environment."""
        self._starts_next[:] = True
        self._current[:] = 0  # a loaded state may count from lower ids

    def cut(self, env: int) -> int | None:
        """Starts a trajectory with the next step of an environment; the id of the one that this ends, if any."""
        is_open = not self._starts_next[env]
        self._starts_next[env] = True
        return int(self._current[env]) if is_open else None

    def number(self, done: Array) -> Array:
        """The ids, int64 `[envs, time]`, of steps whose `("next", "done")` is `done`, bool `[envs, time]`."""
        ids = np.empty(done.shape, np.int64)
        self.number_into(ids, done, 0, done.shape[1])
        return ids

    def number_into(self, ids: Array, done: Array, first: int, stop: int) -> None:
        """Writes the ids of the steps [first, stop) into an array `[envs, time]`, as `number`."""
        self.count = number_trajectories(done, self._current, self._starts_next, self.count, ids, first, stop)


class EpisodeSteps:
    """Counts the steps of each environment's episode, over batches.

    >>> steps = EpisodeSteps(2)
    >>> steps.before(np.array([[False, True, False], [False, False, False]])).tolist()
    [[0, 1, 0], [0, 1, 2]]
    >>> steps.before(np.zeros((2, 1), dtype=np.bool_)).tolist()
    [[1], [3]]
    """

    def __init__(self, envs: int) -> None:
        self._made = np.zeros(envs, np.int64)  # steps of the running episode

    def restart(self, envs: Sequence[int] | slice = slice(None)) -> None:
        """The next step of these environments is the first one of an episode."""
        self._made[envs] = 0

    def before(self, done: Array) -> Array:
        """Steps of the episode before each step, int64 `[envs, time]`; `done`, bool, says which end an episode."""
        time = np.arange(done.shape[1])
        begins = np.broadcast_to(-self._made[:, None], done.shape).copy()
        begins[:, 1:] = np.where(done[:, :-1], time[1:], begins[:, 1:])
        counts = time - np.maximum.accumulate(begins, 1)
        self._made = np.where(done[:, -1], 0, counts[:, -1] + 1)
        return counts


class StepTags:
    """The entries under `"collector"` of each step: its trajectory and the policy's version, if tracked."""

    def __init__(
        self, envs: int, weights: PolicyWeights, *, tracks_ids: bool = True, tracks_version: bool = False
    ) -> None:
        self.ids = TrajectoryIds(envs)
        self.weights = weights
        self.cuts: list[tuple[int, int]] = []  # environments and ids of trajectories that broke off between two batches
        self.tracks_ids = tracks_ids
        self.tracks_version = tracks_version

    def cut(self, env: int) -> None:
        """The next step of an environment begins a trajectory, wherever the one before it stopped."""
        broken_off = self.ids.cut(env)
        if broken_off is not None:
            self.cuts.append((env, broken_off))

    def tag(self, done: Array, shape: torch.Size, versions: Callable[[], Array] | None = None) -> dict[str, Array]:
        """Entries int64 `shape` for steps whose `("next", "done")` is `done`, bool `[envs, time]`.

        `versions` gives the versions of the steps, int64 `[envs, time]`, where they are not all the present one.
        """
        ids = self.ids.number(done)
        tags: dict[str, Array] = {"traj_ids": ids.reshape(shape)} if self.tracks_ids else {}
        if self.tracks_version:
            now = np.full(shape, self.weights.version, np.int64)
            tags["policy_version"] = now if versions is None else versions().reshape(shape)
        return tags


class SharedCounter:
    """A number that several processes count up; a process that is killed while it does so blocks no other.

    >>> counter = SharedCounter()
    >>> counter.take(3), counter.take(1)
    (0, 3)
    """

    def __init__(self, first: int = 0) -> None:
        self._memory = SharedMemory()
        self._memory.allocate([8])
        self._value[0] = first

    @property
    def _value(self) -> Any:
        return self._memory.bytes.view(np.int64)

    def take(self, n: int) -> int:
        """Counts up by n, and returns the first of the n numbers that are now the caller's."""
        fcntl.lockf(self._memory, fcntl.LOCK_EX)  # the kernel releases it when its holder dies
        try:
            first = self.value
            self._value[0] = first + n
            return first
        finally:
            fcntl.lockf(self._memory, fcntl.LOCK_UN)

    @property
    def value(self) -> int:
        """The next number."""
        return int(self._value[0])


class GlobalTrajectoryIds:
    """Gives the trajectories of several workers, each of which counts its own, ids in the order of their first steps.

    `take(n)` reserves n ids and returns the first. Batches that are numbered together began together: of their new
    trajectories the earlier gets the smaller id; of equal ones that of the worker, then environment, before.
    """

    def __init__(self, take: Callable[[int], int]) -> None:
        self._take = take
        self._global_ids: dict[Worker, dict[int, int]] = {}  # by the worker's own id

    def forget(self) -> None:
        """Forgets the workers' ids: their next trajectories are new ones."""
        self._global_ids.clear()

    def own(self, worker: Worker) -> list[int]:
        """The ids, as the worker counts them, of the trajectories in its last batch."""
        return list(self._global_ids.get(worker, {}))

    def current(self, worker: Worker) -> list[int]:
        """The ids of the trajectories in the worker's last batch."""
        return list(self._global_ids.get(worker, {}).values())

    def number(self, batches: Sequence[tuple[Worker, TensorDictBase]]) -> None:
        """Replaces the ids, int64 `[*, time]`, of each worker's batch, in the batch."""
        seen = [(worker, batch, *_first_steps(batch)) for worker, batch in batches]
        new = [
            (time, place, int(own), worker)
            for place, (worker, _, ids, times, _) in enumerate(seen)
            for own, time in zip(ids, times, strict=True)
            if int(own) not in self._global_ids.get(worker, {})
        ]
        first = self._take(len(new))
        reserved = {(worker, own): first + k for k, (_, _, own, worker) in enumerate(sorted(new))}
        for worker, batch, ids, _, inverse in seen:
            before = self._global_ids.get(worker, {})
            # a trajectory that is not in this batch has ended: a running environment is in every batch
            self._global_ids[worker] = {int(i): reserved.get((worker, int(i)), before.get(int(i), -1)) for i in ids}
            replaced = np.array([self._global_ids[worker][int(i)] for i in ids], np.int64)
            batch.set(IDS, torch.from_numpy(replaced[inverse.reshape(-1)]).reshape(batch.shape))


def _first_steps(batch: TensorDictBase) -> tuple[Any, Any, Any]:
    """The ids in a batch, the time of the first step of each, and which of the ids each step has."""
    ids, first, inverse = np.unique(batch.get(IDS).cpu().numpy(), return_index=True, return_inverse=True)
    return ids, first % batch.shape[-1], inverse


class TrajectoryAssembler:
    """Takes batches `[*, time]` with trajectory ids, and gives whole trajectories in the order in which they ended.

    Of those that ended at one step, the first environment's comes first.

    >>> from tensordict import TensorDict
    >>> def batch(ids, done):
    ...     tags = {"collector": {"traj_ids": torch.tensor(ids)}, "next": {"done": torch.tensor(done).unsqueeze(-1)}}
    ...     return TensorDict(tags, batch_size=[2, 2])
    >>> whole = TrajectoryAssembler()
    >>> whole.add(batch([[0, 0], [1, 2]], [[False, False], [True, False]]))
    >>> whole.add(batch([[0, 3], [2, 2]], [[True, False], [False, True]]))
    >>> whole.count, whole.take(2)["collector", "traj_ids"].tolist()
    (3, [1, 0, 0, 0])
    """

    def __init__(self) -> None:
        self._steps: TensorDictBase | None = None
        self._ids = np.zeros(0, np.int64)
        self._ended: deque[int] = deque()
        self._handed_out: list[int] = []  # dropped at the next batch: to move the rest for each would cost more
        self._sort()

    @property
    def count(self) -> int:
        """The number of trajectories that have ended and were not handed out."""
        return len(self._ended)

    def restart(self) -> None:
        """Drops the trajectories that have not ended."""
        self._select(np.isin(self._ids, list(self._ended)))

    def clear(self) -> None:
        """Drops everything."""
        self._ended.clear()
        self.restart()

    def drop(self, ids: Sequence[int]) -> None:
        """Drops those of these trajectories that have not ended."""
        self._select(~np.isin(self._ids, sorted({*ids, *self._handed_out} - set(self._ended))))

    def cut(self, ids: Sequence[int]) -> None:
        """Ends trajectories that go on nowhere: the last step of each is marked truncated. Skips those that ended."""
        for traj_id in sorted(set(ids) - set(self._ended) - set(self._handed_out)):
            steps = np.flatnonzero(self._ids == traj_id)
            if self._steps is not None and len(steps):
                mark_truncated(self._steps, int(steps[-1]))
                self._ended.append(traj_id)

    def state_dict(self) -> dict[str, Any]:
        """The trajectories that have ended and were not handed out: `lengths`, and `steps`, nested dicts of tensors."""
        if not self._ended or self._steps is None:
            return {"lengths": [], "steps": {}}
        order, lengths = self._rows_of(list(self._ended))
        return {"lengths": lengths, "steps": self._steps[torch.from_numpy(order)].to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Drops everything, and holds the trajectories of a `state_dict`."""
        self.clear()
        lengths = state["lengths"]
        if lengths:
            self._steps = waiting_steps(state)
            self._ids = self._steps.get(IDS).cpu().numpy().astype(np.int64)
            self._ended.extend(self._ids[np.cumsum(lengths) - 1].tolist())
            self._sort()

    def add(self, batch: TensorDictBase) -> None:
        """Adds a batch."""
        if self._handed_out:
            self._select(~np.isin(self._ids, self._handed_out))
        ids = batch.get(("collector", "traj_ids")).reshape(-1, batch.shape[-1]).cpu().numpy()
        done = batch.get(("next", "done")).reshape(*ids.shape, -1).any(-1).cpu().numpy()
        steps = batch.reshape(-1)
        self._steps = steps if self._steps is None else torch.cat([self._steps, steps])
        self._ids = np.concatenate([self._ids, ids.reshape(-1)])
        self._ended.extend(ids.T[done.T].tolist())
        self._sort()

    def take(self, count: int) -> TensorDictBase:
        """The next `count` trajectories, one after the other, `[steps]`. Raises ValueError where fewer have ended."""
        if count > self.count or self._steps is None:
            raise ValueError(f"{count} trajectories were asked for, and {self.count} have ended")
        chosen = [self._ended.popleft() for _ in range(count)]
        self._handed_out.extend(chosen)
        return self._steps[torch.from_numpy(self._rows_of(chosen)[0])]

    def _rows_of(self, chosen: list[int]) -> tuple[Array, list[int]]:
        """Where the steps of these trajectories are, one after the other, and how many each has."""
        starts, stops = self._sorted_ids.searchsorted(chosen), self._sorted_ids.searchsorted(chosen, "right")
        return np.concatenate([self._order[a:b] for a, b in zip(starts, stops, strict=True)]), (stops - starts).tolist()

    def _select(self, mask: Array) -> None:
        if self._steps is not None:
            self._steps = self._steps[torch.from_numpy(mask)] if mask.any() else None
        self._ids = self._ids[mask]
        self._handed_out.clear()
        self._sort()

    def _sort(self) -> None:
        # The steps of one trajectory come in the order of time: one environment made them.
        self._order = self._ids.argsort(kind="stable")
        self._sorted_ids = self._ids[self._order]


def _steps(value: Any) -> None:
    """The form of steps: nested dicts of tensors."""
    form = forms.mapping_of(_steps) if isinstance(value, dict) else forms.tensor()
    form(value)


_LENGTHS = forms.list_of(forms.integer(1, 1 << 40))
_WAITING = forms.record({"lengths": _LENGTHS, "steps": forms.mapping_of(_steps)})


def waiting_steps(state: Any) -> TensorDictBase:
    """The steps in a `TrajectoryAssembler.state_dict`. Raises ValueError for anything else."""
    forms.check(_WAITING, state, "the waiting trajectories of a state")
    lengths, steps = state["lengths"], state["steps"]
    total = sum(lengths)
    try:
        rows = TensorDict.from_dict(dict(steps), batch_size=[total], auto_batch_size=False)
    except RuntimeError as error:
        raise ValueError(f"the waiting trajectories of a state have {total} steps: {error}") from None
    if total and not all(isinstance(rows.get(key, None), torch.Tensor) for key in (IDS, ("next", "done"))):
        raise ValueError("the waiting trajectories of a state have no trajectory ids or no 'done'")
    return rows
