"""Replay buffers for tianshou's collectors and algorithms."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from tianshou import data
from tianshou.data import Batch
from tianshou.data.batch import create_value

from engram import data as engram_data
from engram.compat.transitions import read_slots
from engram.data import LazyTensorStorage, Storage

#: Where a row has what tianshou calls so.
_ENTRIES = {"obs": ("observation",), "act": ("action",), "obs_next": ("next", "observation")}


class _ReadsRows(data.ReplayBuffer):  # type: ignore[misc]
    """Reads observations and actions from rows; stands behind tianshou's class, which calls it as its parent."""

    rows: list[engram_data.ReplayBuffer]

    def _read(self, index: npt.NDArray[Any]) -> Any:
        """The rows of steps, whatever the shape of their index: each entry `[*index, ...]`."""
        flat, edges = index.reshape(-1), np.asarray(self.subbuffer_edges)
        if len(self.rows) == 1:
            return _arrays_of(read_slots(self.rows[0], flat), index.shape)
        stored = np.array([len(rows) for rows in self.rows])
        if not len(flat):
            return _arrays_of(read_slots(self.rows[int(stored.argmax())], flat), index.shape)
        member = np.searchsorted(edges, flat, side="right") - 1
        unwritten = flat - edges[member] >= stored[member]
        if unwritten.any():
            step, of = flat[unwritten][0], member[unwritten][0]
            raise IndexError(
                f"step {step} has not been written: of steps {edges[of]} to {edges[of + 1] - 1}, those of environment "
                f"{of}, the first {stored[of]} are stored; sample_indices(0) has all that are"
            )
        order = np.argsort(member, kind="stable")
        slots, counts = (flat - edges[member])[order], np.bincount(member, minlength=len(self.rows))
        pieces = np.split(slots, np.cumsum(counts)[:-1])
        parts = [read_slots(rows, piece) for rows, piece in zip(self.rows, pieces, strict=True) if len(piece)]
        back = torch.from_numpy(np.argsort(order))
        return _arrays_of(_map(lambda *read: torch.cat(read)[back], *parts), index.shape)

    def get(self, index: Any, key: str, default_value: Any = None, stack_num: int | None = None) -> Any:
        if key not in _ENTRIES or (key == "obs_next" and not self._save_obs_next):
            return super().get(index, key, default_value, stack_num)
        steps = [self._indices[index]]  # one index stays a number: tianshou's `prev` and `next` take no 0-d arrays
        for _ in range((self.stack_num if stack_num is None else stack_num) - 1):
            steps.insert(0, self.prev(steps[0]))
        stacked = steps[0] if len(steps) == 1 else np.stack(steps, axis=np.ndim(steps[0]))
        return _entry(self._read(np.asarray(stacked)), key)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            index = self.sample_indices(0) if index == slice(None) else self._indices[: len(self)][index]
        index = self._indices[index]
        if self.stack_num == 1 and self._save_obs_next:  # one look at the rows
            row = self._read(np.asarray(index))
            values = {key: _entry(row, key) for key in _ENTRIES}
        else:
            values = {"obs": self.get(index, "obs"), "act": self.get(index, "act", stack_num=1)}
            following = ("obs_next", index) if self._save_obs_next else ("obs", self.next(index))
            values["obs_next"] = self.get(following[1], following[0])
        values |= {key: self.get(index, key, Batch()) for key in ("info", "policy")}
        return Batch(values | {key: self._meta[key][index] for key in set(self._meta.get_keys()) - set(values)})

    def __getattr__(self, key: str) -> Any:
        """`buffer.obs`, `buffer.act`, `buffer.obs_next`: a copy of all rows, zeros where none is stored yet."""
        if key not in _ENTRIES:
            return super().__getattr__(key)
        edges = self.subbuffer_edges[:-1]
        index = np.concatenate([edge + np.arange(len(r)) for edge, r in zip(edges, self.rows, strict=True)])
        if not len(index) or (key == "obs_next" and not self._save_obs_next):
            raise AttributeError(key)
        values = self.get(index, key, stack_num=1)
        everything = create_value(values, self.maxsize, stack=False)
        everything[index] = values
        return everything


def _refuses(instead: str) -> Any:
    """A method that says what to do instead."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(instead)

    return refuse


class _WritesRows:
    """Writes whole transitions to rows, and what tianshou keeps itself to tianshou; stands before its class."""

    def __init__(self, *args: Any, storage: Callable[[int], Storage] = LazyTensorStorage, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        me: Any = self
        me.rows = [engram_data.ReplayBuffer(storage=storage(int(size))) for size in np.diff(me.subbuffer_edges)]
        if any(len(rows) for rows in me.rows):
            raise ValueError(
                "a storage holds rows already, and tianshou's own record of their episodes is not in it: pass one that "
                "makes new storages, and pickle the buffer to go on with it later"
            )

    def add(self, batch: Any, buffer_ids: Any = None) -> Any:
        me: Any = self
        stacked = buffer_ids is not None or isinstance(self, data.ReplayBufferManager)
        ids = range(len(me.rows)) if buffer_ids is None else buffer_ids
        lead, rest = ((len(ids),) if stacked else ()), Batch()
        for key in batch.get_keys():
            rest.__dict__[key] = np.empty((*lead, 1, 0)) if key in _ENTRIES else batch[key]
        row = self._row(batch, lead)
        # First: what does not fit is refused here, before anything has changed.
        slots = [me.rows[i].add(_map(operator.itemgetter(k), row) if stacked else row) for k, i in enumerate(ids)]
        result = super().add(rest, buffer_ids)  # type: ignore[misc]
        if [int(me.subbuffer_edges[i]) + slot for i, slot in zip(ids, slots, strict=True)] != list(result[0]):
            raise RuntimeError(f"steps {result[0]} lie in the slots {slots}: somebody else has written to `rows`")
        return result

    def _row(self, batch: Any, lead: tuple[int, ...]) -> dict[str, Any]:
        """A batch in the form of rows: arrays `[*lead, ...]`."""
        me: Any = self
        last = (slice(None),) * len(lead) + (-1,) if me._save_only_last_obs else ()
        terminated, truncated = (np.asarray(batch[k], np.bool_).reshape(*lead, 1) for k in ("terminated", "truncated"))
        following = {
            "reward": np.asarray(batch.rew, np.float64).reshape(*lead, -1),
            "done": terminated | truncated,
            "terminated": terminated,
            "truncated": truncated,
        }
        if me._save_obs_next and "obs_next" in batch.get_keys():
            following["observation"] = _map(lambda obs: np.asarray(obs)[last], batch.obs_next)
        obs = _map(lambda obs: np.asarray(obs)[last], batch.obs)
        return {"observation": obs, "action": _map(np.asarray, batch.act), "next": following}

    def reset(self, keep_statistics: bool = False) -> None:
        super().reset(keep_statistics)  # type: ignore[misc]
        me: Any = self
        for rows in me.rows:
            rows.empty()
        if isinstance(self, data.PrioritizedReplayBuffer):  # which itself goes on drawing what it has forgotten
            me.weight[np.arange(me.maxsize)] = 0.0
            me._max_prio = me._min_prio = 1.0

    def set_array_at_key(self, seq: Any, key: str, index: Any = None, default_value: float | None = None) -> None:
        if key in _ENTRIES:
            raise ValueError(f"{key!r} of stored steps cannot be replaced; a hook may add other keys")
        super().set_array_at_key(seq, key, index, default_value)  # type: ignore[misc]

    update = _refuses("rows cannot be moved over from another buffer: add() its steps to this one")
    set_batch = _refuses("a batch cannot take the place of the rows: add() its steps")
    dropnull = _refuses("stored rows cannot be taken out: look at hasnull() of a batch before it is added")
    save_hdf5 = _refuses("pickle the whole buffer, rows and all; or `dumps` each of `rows`, without tianshou's part")
    load_hdf5: Any = classmethod(_refuses("load them with tianshou's class, and add() its steps to this one"))
    from_data = load_hdf5


class ReplayBuffer(_WritesRows, _ReadsRows):
    """tianshou's ReplayBuffer with its transitions in rows of engram: `rows`, one engram buffer for each sub-buffer.

    Draws, priorities and the record of episodes are tianshou's own: equal seeds give equal batches. It also keeps
    `info`, `policy` and what hooks add, whose keys may vary. Arguments are those of tianshou's class. Pickle works;
    `update`, `set_batch`, `from_data`, `dropnull` and HDF5 are a NotImplementedError that says what to do instead. An
    index of a step that was never written is an IndexError, where tianshou's class has zeros.

    Args:
        storage: makes the storage of a sub-buffer: called with its size.

    Example:
        >>> buffer, no = VectorReplayBuffer(20, buffer_num=2), np.zeros(2, bool)
        >>> step = Batch(obs=np.zeros((2, 3)), act=np.zeros(2), rew=np.ones(2), terminated=no, truncated=no)
        >>> buffer.add(step)[0], len(buffer.rows)
        (array([ 0, 10]), 2)
    """


class VectorReplayBuffer(_WritesRows, data.VectorReplayBuffer, _ReadsRows):  # type: ignore[misc]
    """tianshou's VectorReplayBuffer with its transitions in rows, as ReplayBuffer: one ring for each environment."""


class PrioritizedReplayBuffer(_WritesRows, data.PrioritizedReplayBuffer, _ReadsRows):  # type: ignore[misc]
    """tianshou's PrioritizedReplayBuffer with its transitions in rows, as ReplayBuffer; `reset` forgets priorities."""


class PrioritizedVectorReplayBuffer(_WritesRows, data.PrioritizedVectorReplayBuffer, _ReadsRows):  # type: ignore[misc]
    """tianshou's PrioritizedVectorReplayBuffer with its transitions in rows: one ring for each environment."""


def _arrays_of(rows: Any, shape: tuple[int, ...]) -> Any:
    return _map(lambda value: value.numpy().reshape((*shape, *value.shape[1:]))[()], rows)


def _entry(row: dict[str, Any], key: str) -> Any:
    value: Any = row
    for part in _ENTRIES[key]:
        value = value.get(part, Batch())
    return Batch(value) if isinstance(value, dict) else value


def _map(change: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Of equally nested dicts or Batches, a dict of what `change` makes of their arrays."""
    if isinstance(first, Batch | dict):
        return {key: _map(change, value, *(other[key] for other in others)) for key, value in first.items()}
    return change(first, *others)
