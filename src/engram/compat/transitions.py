"""Transitions of several environments side by side, as trainers of other libraries write them and read them back."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engram.data import LazyTensorStorage, ReplayBuffer, RoundRobinWriter, Storage
from engram.kernel.replay import append_step, as_writer, read_leaves, read_n_steps, write_plan
from engram.kernel.rows import NSteps, draw_slots_by_numpy
from engram.kernel.tools import packages
from engram.pytree import KeyPath, get_entry, to_tensor

with packages("engram.compat", "engram[gym]", gymnasium="gymnasium"):
    from gymnasium import spaces

#: Makes a storage: called with the number of steps of all environments together, `ndim=2`, and `compact=True` where
#: observations are to be stored once.
MakeStorage: TypeAlias = Callable[..., Storage]

_ZEROS_AT_ONCE = 1024  # time steps
_FLAGS = ("done", "reported_done", "terminated", "truncated")
Slots: TypeAlias = npt.NDArray[Any] | Tensor


def refuse_unknown_rules(buffer: ReplayBuffer, name: str) -> None:
    """RuntimeError where rows of a buffer, the attribute `name`, were removed, or where its users wait for each other:
    draws of others know nothing of either.
    """
    store = buffer.storage.lanes.store
    if store.is_limited and store.rate_limit is None:
        raise RuntimeError(
            "the store is a queue, whose rows are handed out once, and batches are drawn here by the generator of "
            f"another library, which knows nothing of it. Sample the engram buffer itself, `{name}`, or end the queue: "
            f"`{name}.end_queue()`"
        )
    if store.is_limited:
        raise RuntimeError(
            f"the store keeps a rate limiter, {buffer.rate_limiter}, and batches are drawn here by the generator of "
            f"another library, which knows nothing of it. Sample the engram buffer itself, `{name}`, or end the "
            f"limiter: `{name}.rate_limiter = None`"
        )
    if store.removals and (removed := store.removed_rows):
        raise RuntimeError(
            f"{removed} of the stored rows were removed (ReplayBuffer.remove), and batches are drawn here by the "
            "generator of another library, which would draw them, too. Sample the engram buffer itself, "
            f"`{name}`, which leaves them out; or fill a new buffer with the rows that are left"
        )


class Transitions(NamedTuple):
    """Steps of one environment each: tensors `[n, ...]`, observations in the form of their space.

    Attributes:
        terminated: float32 [n, 1]: 1 where nothing comes after the step.
    """

    observation: Any
    action: Tensor
    reward: Tensor
    next_observation: Any
    terminated: Tensor


class TransitionRows:
    """A ring of `steps` time steps of `n_envs` environments, in an engram `buffer` under the usual keys.

    Trainers may call a step truncated that they do not call done. `("next", "done")` is `done | truncated`, where
    every reader of engram ends an episode; `("next", "reported_done")` is the flag that the trainer gave.

    Args:
        observation_space, action_space: of one environment, as gymnasium has them: a Dict, or one with a shape and a
            dtype. Observations are stored as their space has them, actions as vectors.
        compact: store each observation once, whatever steps share it.
    """

    def __init__(
        self,
        steps: int,
        n_envs: int,
        observation_space: Any,
        action_space: Any,
        storage: MakeStorage = LazyTensorStorage,
        compact: bool = False,
    ) -> None:
        self.steps = steps
        self.n_envs = n_envs
        options = {"compact": True} if compact else {}
        self.buffer = ReplayBuffer(storage=storage(steps * n_envs, ndim=2, **options))
        self._observation_space = observation_space
        self._action_size = math.prod(action_space.shape)
        self._action_dtype = np.dtype(np.float32 if action_space.dtype == np.float64 else action_space.dtype)

    # ---- where the ring stands: the storage's counters say it ----
    @property
    def position(self) -> int:
        """The time slot that the next step goes to."""
        return self.buffer.write_count // self.n_envs % self.steps

    @property
    def is_full(self) -> bool:
        return len(self.buffer) == self.steps * self.n_envs

    # ---- what follows from the spaces; pickles of earlier versions do not have it ----
    @functools.cached_property
    def _not_truncated(self) -> npt.NDArray[np.bool_]:
        return np.zeros(self.n_envs, np.bool_)

    @functools.cached_property
    def _observation_paths(self) -> list[KeyPath]:
        return _paths_of(self._observation_space)

    @functools.cached_property
    def _now(self) -> tuple[KeyPath, ...]:
        """The entries of a step itself."""
        return (*(("observation", *path) for path in self._observation_paths), ("action",), ("next", "reward"))

    @functools.cached_property
    def _then(self) -> tuple[KeyPath, ...]:
        """The entries of what follows on a step."""
        return (*(("next", "observation", *path) for path in self._observation_paths), ("next", "terminated"))

    # ---- writing ----
    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, truncated: Any = None) -> None:
        """Stores one time step: arrays `[n_envs, ...]`; an episode ends where it is done or truncated.

        Args:
            truncated: None: no environment is.
        """
        over = terminated = done
        if truncated is None:
            truncated = self._not_truncated
        else:
            done, truncated = np.asarray(done, np.bool_).reshape(-1), np.asarray(truncated, np.bool_).reshape(-1)
            over, terminated = done | truncated, done & ~truncated
        step = {
            "observation": obs,
            "action": action,
            "next": {
                "observation": next_obs,
                "reward": reward,
                "done": over,
                "reported_done": done,
                "terminated": terminated,
                "truncated": truncated,
            },
        }
        buffer = self.buffer
        storage, writer = buffer.storage, buffer.writer
        if type(writer) is RoundRobinWriter and append_step(storage, step):
            return
        buffer.await_room()
        with storage.mutex:
            write_plan(as_writer(writer)).write(storage, self._converted(step), True, -1)

    def fill_with_zeros(self) -> None:
        """Stores steps of zeros until it is full; nothing was stored before."""
        zero, observation = np.zeros((self.n_envs, self._action_size)), _zeros(self._observation_space, self.n_envs)
        flags = dict.fromkeys(_FLAGS, self._not_truncated)
        following = {"observation": observation, "reward": np.zeros(self.n_envs), **flags}
        step = self._converted({"observation": observation, "action": zero, "next": following})
        for done in range(0, self.steps, _ZEROS_AT_ONCE):
            n = min(_ZEROS_AT_ONCE, self.steps - done)
            self.buffer.extend(_repeated(step, n))

    def _converted(self, step: dict[str, Any]) -> dict[str, Any]:
        """A step whose arrays have the shapes and dtypes of the rows."""
        following = step["next"]
        flags = {key: self._per_env(following[key], np.bool_) for key in _FLAGS}
        return {
            "observation": self._observations(step["observation"], self._observation_space),
            "action": np.asarray(step["action"], self._action_dtype).reshape(self.n_envs, self._action_size),
            "next": {
                "observation": self._observations(following["observation"], self._observation_space),
                "reward": self._per_env(following["reward"], np.float32),
                **flags,
            },
        }

    # ---- reading ----
    def draw(self, n: int) -> Tensor:
        """The slots of n rows, int64 [n]: time slots and then environments, as `np.random.randint` draws them.

        Raises:
            ValueError: nothing is stored.
            RuntimeError: rows were removed.
        """
        refuse_unknown_rules(self.buffer, "rows.buffer")
        return draw_slots_by_numpy(n, len(self.buffer) // self.n_envs, self.n_envs)

    def draw_environments(self, times: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The slots of time slots, int64 [n], each of an environment that NumPy's generator draws; errors as `draw`."""
        refuse_unknown_rules(self.buffer, "rows.buffer")
        if self.n_envs == 1:  # a draw of one of one takes no random number
            return times
        envs = np.random.randint(0, high=self.n_envs, size=len(times))
        return times * self.n_envs + envs

    def transitions(self, slots: Slots, last: Slots | None = None) -> Transitions:
        """The transitions in slots, int64 [n].

        Args:
            last: what follows is that of these rows, of which `n_steps` says where they are.

        Raises:
            IndexError: one that has not been written.
        """
        now, then = self._now, self._then
        if last is None:
            columns = self.columns(slots, (*now, *then))
        else:
            columns = [*self.columns(slots, now), *self.columns(last, then)]
        n = len(self._observation_paths)
        observation, action, reward, following, terminated = (
            columns[:n], columns[n], columns[n + 1], columns[n + 2 : -1], columns[-1],
        )  # fmt: skip
        return Transitions(
            self._rebuilt(observation), action, reward, self._rebuilt(following), terminated.to(torch.float32)
        )

    def n_steps(self, slots: Slots, discounts: npt.NDArray[np.float32]) -> NSteps:
        """The rewards of the steps in slots, int64 [n], and of those that follow on each, and the returns of these.

        Args:
            discounts: `powers` of gamma for so many steps.

        Raises:
            IndexError: one that has not been written.
        """
        return read_n_steps(self.buffer.storage, slots, discounts)

    def n_step_transitions(self, slots: Slots, discounts: npt.NDArray[np.float32]) -> tuple[Transitions, NSteps]:
        """As `transitions`, with what follows on the last of n steps; and as `n_steps`, of the same rows."""
        storage = self.buffer.storage
        while True:
            with storage.mutex:  # other threads wait; what other processes write between the reads shows in the count
                written = storage.write_count
                steps = self.n_steps(slots, discounts)
                batch = self.transitions(slots, steps.last)
                if storage.write_count == written:
                    return batch, steps

    def columns(self, slots: Slots, paths: tuple[KeyPath, ...]) -> list[Tensor]:
        """Entries of the rows in slots, int64 [n]: a tensor [n, ...] for each path.

        Raises:
            IndexError: one that has not been written.
        """
        storage = self.buffer.storage
        rows = read_leaves(storage, slots, paths)
        if rows.absent is None and rows.overwritten is None:
            leaves: list[Tensor] = rows.batch
            return leaves
        whole = storage.get(storage.from_slots(to_tensor(slots)))  # which names what is absent, and reads again
        return [get_entry(whole, path) for path in paths]

    def _rebuilt(self, leaves: list[Tensor]) -> Any:
        """Observations of these leaves, in the form of their space."""
        if self._observation_paths == [()]:
            return leaves[0]
        observation: dict[str, Any] = {}
        for path, leaf in zip(self._observation_paths, leaves, strict=True):
            node = observation
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = leaf
        return observation

    # ---- all time slots ----
    def all_observations(self, *path: str) -> Any:
        """Observations under this path at all time slots: `[steps, n_envs, ...]`, a dict of these for a Dict space."""
        return self._all_parts((*path, "observation"), self._observation_space)

    def all_actions(self) -> StoredEntry:
        """Actions at all time slots: `[steps, n_envs, action_size]`."""
        return self._all(("action",), (self._action_size,), self._action_dtype)

    def all_numbers(self, key: str) -> StoredEntry:
        """The entry `("next", key)`, of one number, at all time slots: float32 `[steps, n_envs]`."""
        return self._all(("next", key), (), np.dtype(np.float32))

    def _all_parts(self, path: KeyPath, space: Any) -> Any:
        if isinstance(space, Mapping):
            return {key: self._all_parts((*path, key), part) for key, part in space.items()}
        return self._all(path, shape_of(space), space.dtype)

    def _all(self, path: KeyPath, shape: tuple[int, ...], dtype: np.dtype[Any]) -> StoredEntry:
        array = np.zeros((0 if self.is_full else self.steps, self.n_envs, *shape), dtype)
        if len(self.buffer):
            stored = get_entry(self.buffer.storage[:], path).numpy()
            stored = stored.reshape(*stored.shape[:2], *shape)
            if self.is_full:
                array = stored.astype(dtype, copy=False)
            else:
                array[: len(stored)] = stored
        return StoredEntry.of(array, functools.partial(self._change, path))

    def _change(self, path: KeyPath, slots: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        """Stores other values of one entry, [n, ...], in the rows of these slots."""
        storage, at = self.buffer.storage, torch.from_numpy(slots)
        with storage.mutex:
            rows = read_slots(self.buffer, slots)
            entry = get_entry(rows, path)
            entry.copy_(torch.from_numpy(values).reshape(entry.shape))
            following = rows["next"]
            following["done"] = following["reported_done"] | following["truncated"]
            following["terminated"] = following["reported_done"] & ~following["truncated"]
            storage.set(storage.from_slots(at), rows)

    def _per_env(self, value: Any, dtype: Any) -> npt.NDArray[Any]:
        return np.asarray(value, dtype).reshape(self.n_envs, 1)

    def _observations(self, value: Any, space: Any) -> Any:
        """Observations of all environments in the shapes and dtypes of their space."""
        if isinstance(space, Mapping):
            return {key: self._observations(value[key], part) for key, part in space.items()}
        array, shape = np.asarray(value, space.dtype), (self.n_envs, *shape_of(space))
        if (
            array.ndim > 1
            and (len(shape) > 2 or array.shape[0] != self.n_envs)
            and not _same_but_for_ones(array, shape)
        ):
            raise ValueError(f"observations of shape {array.shape} for {self.n_envs} environments of {shape[1:]}")
        return array.reshape(shape)


def _zeros(space: Any, n_envs: int) -> Any:
    """Observations of this space that are zeros."""
    if isinstance(space, Mapping):
        return {key: _zeros(part, n_envs) for key, part in space.items()}
    return np.zeros((n_envs, *shape_of(space)), space.dtype)


def _repeated(values: Any, n: int) -> Any:
    """One time step `[n_envs, ...]` n times: `[n_envs, n, ...]`."""
    if isinstance(values, Mapping):
        return {key: _repeated(part, n) for key, part in values.items()}
    array = np.asarray(values)[:, None]
    return np.broadcast_to(array, (array.shape[0], n, *array.shape[2:]))


def _same_but_for_ones(array: npt.NDArray[Any], shape: tuple[int, ...]) -> bool:
    return [n for n in array.shape if n != 1] == [n for n in shape if n != 1]


class StoredEntry(np.ndarray[Any, Any]):
    """One entry at all time slots, `[steps, n_envs, ...]`: 0 where nothing is stored. A copy until all are stored.

    `entry[index] = value` changes the stored rows; parts of it are for reading.

    Raises:
        IndexError: a value for a step that has not been written.
    """

    _change: Callable[[npt.NDArray[Any], npt.NDArray[Any]], None] | None = None  # None: a part, or computed from one

    @classmethod
    def of(cls, array: npt.NDArray[Any], change: Callable[[npt.NDArray[Any], npt.NDArray[Any]], None]) -> StoredEntry:
        entry = array.view(cls)
        entry._change = change
        entry.flags.writeable = False
        return entry

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return np.asarray(array)[()]

    def __setitem__(self, index: Any, value: Any) -> None:
        if self._change is None:
            super().__setitem__(index, value)
            return
        rows = self.shape[0] * self.shape[1]
        changed = np.array(self)
        changed[index] = value
        slots = np.flatnonzero((changed != np.asarray(self)).reshape(rows, -1).any(1))
        if len(slots):
            self._change(slots, changed.reshape(rows, *self.shape[2:])[slots])
            self.flags.writeable = True
            super().__setitem__(index, value)
            self.flags.writeable = False


def read_slots(buffer: ReplayBuffer, slots: npt.NDArray[Any]) -> Any:
    """The rows of slots, int64 [n]. IndexError: one that has not been written."""
    storage, at = buffer.storage, torch.from_numpy(slots)
    rows = storage.read(at)
    if rows.absent is None and rows.overwritten is None:
        return rows.batch
    return storage.get(storage.from_slots(at))  # which names what is absent, and reads again


def _paths_of(space: Any) -> list[KeyPath]:
    """Where the arrays of an observation are: `[()]` where it is one."""
    if not isinstance(space, Mapping):
        return [()]
    return [(key, *path) for key, part in space.items() for path in _paths_of(part)]


@functools.lru_cache(16)
def powers(gamma: float, n_steps: int) -> npt.NDArray[np.float32]:
    """The discounts of so many steps, and of what comes after them: float32 [n_steps + 1]."""
    made: npt.NDArray[np.float32] = gamma ** np.arange(n_steps + 1, dtype=np.float32)
    made.flags.writeable = False
    return made


def on_device(part: Any, device: torch.device) -> Any:
    """A tensor, or a dict of them, on a device; None is None."""
    if isinstance(part, dict):
        return {key: on_device(value, device) for key, value in part.items()}
    return part if part is None else part.to(device)


def shape_of(space: Any) -> tuple[int, ...]:
    """The shape of one observation: that of its space; (1,) for a Discrete one."""
    shape: tuple[int, ...] = (1,) if isinstance(space, spaces.Discrete) else space.shape
    return shape


def truncations(infos: Sequence[Mapping[str, Any]], n_envs: int) -> npt.NDArray[np.bool_] | None:
    """Whether each environment is cut off, [n_envs]: its info's "TimeLimit.truncated", a flag or an array of one.

    One info of several environments may hold an array with the flag of each, and a single flag counts for all. None:
    no environment is.
    """
    for info in infos:  # the usual step: a loop takes a fifth of the time of an array
        flag = info.get("TimeLimit.truncated", False)
        if flag is not False and flag is not np.False_:
            break
    else:
        if len(infos) == n_envs:
            return None
    flags = np.array([info.get("TimeLimit.truncated", False) for info in infos], np.bool_)
    if flags.size not in (1, n_envs) or not len(infos):
        raise ValueError(
            f"infos hold {flags.size} values of 'TimeLimit.truncated' for {n_envs} environments: pass one info for each"
        )
    return np.broadcast_to(flags.reshape(-1), n_envs)
