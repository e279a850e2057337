"""Replay buffers for tianshou's collectors and algorithms."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engram import data as engram_data
from engram.compat.transitions import read_slots, refuse_unknown_rules
from engram.data import LazyTensorStorage, Storage
from engram.kernel.tools import packages

with packages("engram.compat.tianshou", "tianshou", tianshou="tianshou"):
    from tianshou import data
    from tianshou.data import Batch
    from tianshou.data.batch import create_value

#: Makes the storage of one ring: called with its size.
MakeStorage: TypeAlias = Callable[[int], Storage]

_COMPACT: MakeStorage = functools.partial(LazyTensorStorage, compact=True)

#: Where a row has what tianshou calls so.
_ENTRIES = {"obs": ("observation",), "act": ("action",), "obs_next": ("next", "observation")}


def refuse_unknown_rules_of(buffers: Sequence[engram_data.ReplayBuffer]) -> None:
    """RuntimeError where draws of tianshou would ignore what one of these asks for."""
    for buffer in buffers:
        refuse_unknown_rules(buffer, "rows")


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
        if not len(self._meta.get_keys()):  # no IndexError, with which NumPy would take a buffer for an empty list
            raise KeyError("nothing has been added to this buffer yet: it has no steps to look at")
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
        """`buffer.obs`, `buffer.act`, `buffer.obs_next`: as `_all_rows`."""
        if key not in _ENTRIES:
            return super().__getattr__(key)
        if (values := self._all_rows(key)) is None:
            raise AttributeError(key)
        return values

    def _all_rows(self, key: str) -> Any:
        """A copy of an entry of all rows, zeros where none is stored yet; None where there are no rows with it."""
        edges = self.subbuffer_edges[:-1]
        index = np.concatenate([edge + np.arange(len(r)) for edge, r in zip(edges, self.rows, strict=True)])
        if not len(index) or (key == "obs_next" and not self._save_obs_next):
            return None
        values = self.get(index, key, stack_num=1)
        everything = create_value(values, self.maxsize, stack=False)
        everything[index] = values
        return everything


if TYPE_CHECKING:
    from tianshou.data import ReplayBuffer as _Behind
else:
    _Behind = object


class _WritesRows(_Behind):  # type: ignore[misc]
    """Writes whole transitions to rows, and what tianshou keeps itself to tianshou; stands before its class."""

    #: tianshou's class of the same name.
    _own: Any
    _meta: Any
    _ep_start_idx: Any

    def add(self, batch: Any, buffer_ids: Any = None) -> Any:
        stacked = buffer_ids is not None or isinstance(self, data.ReplayBufferManager)
        ids = range(len(self.rows)) if buffer_ids is None else self._ids_of(buffer_ids)
        lead, rest = ((len(ids),) if stacked else ()), Batch()
        for key in batch.get_keys():
            rest.__dict__[key] = np.empty((*lead, 1, 0)) if key in _ENTRIES else batch[key]
        row = self._row(batch, lead, self._save_only_last_obs)
        # First: what does not fit is refused here, before anything has changed.
        if len(ids) > 1:  # before the first of them is written; the rows of all rings are of one form
            rows = next((rows for rows in self.rows if len(rows)), self.rows[0])
            rows.storage.check(row, False)
        slots = [self.rows[i].add(_map(operator.itemgetter(k), row) if stacked else row) for k, i in enumerate(ids)]
        result = super().add(rest, buffer_ids)
        self._check_slots(result[0], [int(self.subbuffer_edges[i]) + slot for i, slot in zip(ids, slots, strict=True)])
        return result

    # ---- what tianshou draws, and copies: removed rows would be among it ----
    def sample(self, batch_size: int | None) -> Any:
        refuse_unknown_rules_of(self.rows)
        return super().sample(batch_size)

    def sample_indices(self, batch_size: int | None) -> Any:
        if batch_size != 0:  # 0: all steps, to look at
            refuse_unknown_rules_of(self.rows)
        return super().sample_indices(batch_size)

    def _ids_of(self, buffer_ids: Any) -> npt.NDArray[Any]:
        """Numbers of rings, counted from 0. IndexError: there is no such ring."""
        raise NotImplementedError

    def _row(self, batch: Any, lead: tuple[int, ...], last_obs: bool) -> dict[str, Any]:
        """A batch in the form of rows: arrays `[*lead, ...]`; the last of each stack of observations, or all of it."""
        last = (slice(None),) * len(lead) + (-1,) if last_obs else ()
        terminated, truncated = (np.asarray(batch[k], np.bool_).reshape(*lead, 1) for k in ("terminated", "truncated"))
        following = {
            "reward": np.asarray(batch.rew, np.float64).reshape(*lead, -1),
            "done": terminated | truncated,
            "terminated": terminated,
            "truncated": truncated,
        }
        if self._save_obs_next and "obs_next" in batch.get_keys():
            following["observation"] = _map(lambda obs: np.asarray(obs)[last], batch.obs_next)
        obs = _map(lambda obs: np.asarray(obs)[last], batch.obs)
        return {"observation": obs, "action": _map(np.asarray, batch.act), "next": following}

    def _check_slots(self, steps: Any, slots: Any) -> None:
        if list(slots) != list(steps):
            raise RuntimeError(f"steps {steps} lie in the slots {slots}: somebody else has written to `rows`")

    def reset(self, keep_statistics: bool = False) -> None:
        super().reset(keep_statistics)
        for rows in self.rows:
            rows.empty()
        if "weight" in vars(self):  # priorities: tianshou itself continues to draw rows that it has forgotten
            self.weight[np.arange(self.maxsize)] = 0.0
            self._max_prio = self._min_prio = 1.0

    def set_array_at_key(self, seq: Any, key: str, index: Any = None, default_value: float | None = None) -> None:
        if key in _ENTRIES:
            raise ValueError(f"{key!r} of stored steps cannot be replaced; a hook may add other keys")
        super().set_array_at_key(seq, key, index, default_value)

    # ---- tianshou's files ----
    def save_hdf5(self, path: str, compression: str | None = None) -> None:
        self._as_own().save_hdf5(path, compression)

    @classmethod
    def load_hdf5(cls, path: str, device: str | None = None, *, storage: MakeStorage | None = None) -> Any:
        own = cls._own.load_hdf5(path, device)
        return cls._of_own(own, own._meta, storage)

    def _as_own(self) -> Any:
        """tianshou's own buffer with the same steps. RuntimeError: some of them were removed."""
        refuse_unknown_rules_of(self.rows)
        own = self._own.__new__(self._own)
        meta: Any = vars(self)["_meta"]
        stored = Batch()
        for key in meta.get_keys():
            if key not in _ENTRIES:
                stored.__dict__[key] = meta[key]
            elif (values := self._all_rows(key)) is not None:
                stored.__dict__[key] = values
        own.__dict__.update({k: v for k, v in vars(self).items() if k != "rows"} | {"_meta": stored})
        return own

    @classmethod
    def _of_own(cls, own: Any, steps: Any, storage: MakeStorage | None) -> Any:
        """A buffer of this class with the settings and the record of one of tianshou's own, and these steps."""
        raise NotImplementedError


class _OneRing(_WritesRows):
    """A buffer of one ring of rows."""

    def __init__(self, *args: Any, storage: MakeStorage | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows = [_ring(self, storage)]
        if len(self.rows[0]):
            raise ValueError(
                "a storage holds rows already, and tianshou's own record of their episodes is not in it: pass one that "
                "makes new storages, and pickle the buffer to go on with it later"
            )

    def _ids_of(self, buffer_ids: Any) -> npt.NDArray[Any]:
        return np.zeros(len(buffer_ids), np.int64)  # which ids they are does not matter, as in tianshou's class

    @classmethod
    def _of_own(cls, own: Any, steps: Any, storage: MakeStorage | None) -> Any:
        buffer: Any = cls.__new__(cls)
        buffer.__dict__.update(vars(own))
        buffer.rows = [_ring(own, storage)]
        buffer._meta = _without_entries(steps, buffer._save_only_last_obs) if len(steps.get_keys()) else Batch()
        if len(buffer):
            buffer._fill(steps, len(buffer))
        return buffer

    def _fill(self, steps: Any, n: int) -> None:
        """Makes the first n of these steps the rows; the next one goes where tianshou's does."""
        cursor, rows = int(self._insertion_idx), self.rows[0]
        if n < self.maxsize and cursor != n:
            raise ValueError(
                f"{n} of {self.maxsize} steps are stored, and the next goes to {cursor}: these are no ring"
            )
        missing = {"obs", "act", "rew", "terminated", "truncated"} - set(steps.get_keys())
        if missing:
            raise ValueError(f"the batch lacks {sorted(missing)}: rows are whole transitions")
        row = self._row(steps[:n], (n,), last_obs=False)
        if len(rows):
            rows.storage.check(row, False)  # what does not fit is refused while the old rows are there
        rows.empty()
        rows.extend(row)
        if n == self.maxsize and cursor:
            rows.extend(_map(operator.itemgetter(slice(cursor)), row))

    def set_batch(self, batch: Any) -> None:
        """Makes a batch of `maxsize` steps the rows; how many of them count is not changed, as in tianshou's class."""
        before = self._meta
        super().set_batch(batch)
        try:
            self._fill(batch, self.maxsize)
        except BaseException:
            self._meta = before
            raise
        self._meta = _without_entries(batch, self._save_only_last_obs)

    def update(self, buffer: Any) -> Any:
        """Adds all steps of another buffer, of this package or of tianshou; returns where they are."""
        if not len(buffer) or not self.maxsize:
            return np.array([], np.int64)
        source: Any = object.__new__(type(buffer))
        source.__dict__.update(vars(buffer))
        source.stack_num = 1  # all steps, also those whose stack would begin before them
        index = source.sample_indices(0)
        if isinstance(buffer, _WritesRows):
            refuse_unknown_rules_of(buffer.rows)
            row = source._read(index)
        else:
            row = self._row(source._meta[index], (len(index),), last_obs=False)
        if not self._save_obs_next:
            row["next"].pop("observation", None)
        source._meta = _without_entries(source._meta, self._save_only_last_obs)
        slots = self.rows[0].extend(row)  # first: what does not fit is refused here, before anything has changed
        steps = super().update(source)
        self._check_slots(steps, slots.tolist())
        return steps

    def dropnull(self) -> None:
        """Takes out the steps in which some value is None or NaN; those that stay move up, the oldest to the front."""
        if not len(self):
            return
        refuse_unknown_rules_of(self.rows)
        source: Any = object.__new__(type(self))
        source.__dict__.update(vars(self))
        source.stack_num = 1
        index = source.sample_indices(0)
        batch = self._meta[index]
        for key in set(_ENTRIES) & set(batch.get_keys()):
            batch.__dict__[key] = self.get(index, key, stack_num=1)
        nulls = np.zeros(len(index), np.bool_)
        _each(lambda flags: np.logical_or(nulls, flags.reshape(len(index), -1).any(1), out=nulls), batch.isnull())
        kept = index[~nulls]
        row, rest = self._read(kept), self._meta[kept]
        weights = self.weight[kept] if "weight" in vars(self) and len(kept) else None
        before_episode = nulls[: int(np.argmax(index == self._ep_start_idx))]
        self.rows[0].empty()
        if len(kept):
            self.rows[0].extend(row)
            self._meta[np.arange(len(kept))] = rest
        if "weight" in vars(self):
            self.weight[np.arange(self.maxsize)] = 0.0
            if weights is not None:
                self.weight[np.arange(len(kept))] = weights
        self._size, self._insertion_idx = len(kept), len(kept) % self.maxsize
        self.last_index = np.array([max(0, len(kept) - 1)])
        self._ep_start_idx = int((~before_episode).sum()) if self._ep_len else self._insertion_idx


class _Rings(_WritesRows):
    """A buffer of several buffers of one ring."""

    #: The class of these buffers.
    _part: Any

    def _manage(self, above: type, buffers: Sequence[Any]) -> None:
        """Constructs tianshou's manager of these buffers, from the class above this one on."""
        others = [type(buffer) for buffer in buffers if not isinstance(buffer, _OneRing)]
        if others:
            raise TypeError(f"the buffers of a manager are of engram.compat.tianshou, got one of {others[0]}")
        super(above, self).__init__(buffers)  # type: ignore[arg-type]
        self.rows = [buffer.rows[0] for buffer in buffers]

    def _ids_of(self, buffer_ids: Any) -> npt.NDArray[Any]:
        numbers: npt.NDArray[Any] = np.arange(len(self.rows))[np.asarray(buffer_ids)]
        return numbers

    def _set_batch_for_children(self) -> None:
        for buffer, start, stop in zip(self.buffers, self.subbuffer_edges, self.subbuffer_edges[1:], strict=False):
            buffer._meta = self._meta[start:stop]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if len(vars(self)["_meta"].get_keys()):
            self._set_batch_for_children()  # the same memory again, which pickle does not tell

    def set_batch(self, batch: Any) -> None:
        before = self._meta
        super().set_batch(batch)
        try:
            for buffer, start, stop in zip(self.buffers, self.subbuffer_edges, self.subbuffer_edges[1:], strict=False):
                buffer._fill(batch[start:stop], buffer.maxsize)
        except BaseException:
            self._meta = before
            self._set_batch_for_children()
            raise
        self._meta = _without_entries(batch, self._save_only_last_obs)
        self._set_batch_for_children()

    def dropnull(self) -> None:
        raise NotImplementedError("a buffer of several rings drops no steps: look at hasnull() of a batch before add()")

    def _as_own(self) -> Any:
        own = super()._as_own()
        own.__dict__["buffers"] = _array_of([buffer._as_own() for buffer in vars(self)["buffers"]])
        return own

    @classmethod
    def _of_own(cls, own: Any, steps: Any, storage: MakeStorage | None) -> Any:
        buffer: Any = cls.__new__(cls)
        buffer.__dict__.update(vars(own))
        edges = zip(own.buffers, own.subbuffer_edges, own.subbuffer_edges[1:], strict=False)
        kept = bool(len(steps.get_keys()))
        parts = [cls._part._of_own(part, steps[a:b] if kept else Batch(), storage) for part, a, b in edges]
        buffer.buffers, buffer.rows = _array_of(parts), [part.rows[0] for part in parts]
        if kept:
            buffer._meta = _without_entries(steps, buffer._save_only_last_obs)
            buffer._set_batch_for_children()
        return buffer


class ReplayBuffer(_OneRing, _ReadsRows):
    """tianshou's ReplayBuffer with its transitions in rows of engram: `rows`, one engram buffer for each sub-buffer.

    Draws, priorities and the record of episodes are tianshou's own: equal seeds give equal batches. It also keeps
    `info`, `policy` and what hooks add, whose keys may vary. Arguments and methods are those of tianshou's class;
    `save_hdf5` writes files that tianshou's class loads, and `load_hdf5` loads its files: only those that you trust,
    since tianshou's hold pickled objects. `dropnull` leaves the steps in order of time, with room for as many as
    before. An index of a step that was never written is an IndexError, where tianshou's class has zeros.

    With `save_only_last_obs` or `stack_num` the rows have single frames, and each is stored once, `obs_next` included.
    With `ignore_obs_next` there is no `obs_next` in the rows: what follows a step is read from the next one, as there.

    Args:
        storage: makes the storage of a sub-buffer: called with its size. None: in memory.

    Example:
        >>> buffer, no = VectorReplayBuffer(20, buffer_num=2), np.zeros(2, bool)
        >>> step = Batch(obs=np.zeros((2, 3)), act=np.zeros(2), rew=np.ones(2), terminated=no, truncated=no)
        >>> buffer.add(step)[0], len(buffer.rows)
        (array([ 0, 10]), 2)
    """

    _own = data.ReplayBuffer


class PrioritizedReplayBuffer(_OneRing, data.PrioritizedReplayBuffer, _ReadsRows):  # type: ignore[misc]
    """tianshou's PrioritizedReplayBuffer with its transitions in rows, as ReplayBuffer; `reset` forgets priorities."""

    _own = data.PrioritizedReplayBuffer


class ReplayBufferManager(_Rings, data.ReplayBufferManager, _ReadsRows):  # type: ignore[misc]
    """tianshou's ReplayBufferManager of ReplayBuffers of this module, which all begin empty."""

    _own, _part = data.ReplayBufferManager, ReplayBuffer

    def __init__(self, buffer_list: Sequence[ReplayBuffer]) -> None:
        self._manage(_Rings, buffer_list)


class PrioritizedReplayBufferManager(_Rings, data.PrioritizedReplayBufferManager, _ReadsRows):  # type: ignore[misc]
    """tianshou's PrioritizedReplayBufferManager of PrioritizedReplayBuffers of this module, which all begin empty."""

    _own, _part = data.PrioritizedReplayBufferManager, PrioritizedReplayBuffer

    def __init__(self, buffer_list: Sequence[PrioritizedReplayBuffer]) -> None:
        self._manage(_Rings, buffer_list)


class VectorReplayBuffer(_Rings, data.VectorReplayBuffer, _ReadsRows):  # type: ignore[misc]
    """tianshou's VectorReplayBuffer with its transitions in rows, as ReplayBuffer: one ring for each environment."""

    _own, _part = data.VectorReplayBuffer, ReplayBuffer

    def __init__(self, total_size: int, buffer_num: int, **kwargs: Any) -> None:
        self._manage(data.VectorReplayBuffer, _parts(ReplayBuffer, total_size, buffer_num, kwargs))


class PrioritizedVectorReplayBuffer(_Rings, data.PrioritizedVectorReplayBuffer, _ReadsRows):  # type: ignore[misc]
    """tianshou's PrioritizedVectorReplayBuffer with its transitions in rows: one ring for each environment."""

    _own, _part = data.PrioritizedVectorReplayBuffer, PrioritizedReplayBuffer

    def __init__(self, total_size: int, buffer_num: int, **kwargs: Any) -> None:
        parts = _parts(PrioritizedReplayBuffer, total_size, buffer_num, kwargs)
        self._manage(data.PrioritizedVectorReplayBuffer, parts)


class CachedReplayBuffer(data.CachedReplayBuffer, ReplayBufferManager):  # type: ignore[misc]
    """tianshou's CachedReplayBuffer of a ReplayBuffer of this module: whole episodes move to it as they end."""

    _own = data.CachedReplayBuffer

    def __init__(self, main_buffer: ReplayBuffer, cached_buffer_num: int, max_episode_length: int) -> None:
        assert cached_buffer_num > 0, f"cached_buffer_num must be 1 or more, got {cached_buffer_num}"
        assert max_episode_length > 0, f"max_episode_length must be 1 or more, got {max_episode_length}"
        assert type(main_buffer) is ReplayBuffer, f"main_buffer is a ReplayBuffer of this module, got {main_buffer!r}"
        cached = [ReplayBuffer(max_episode_length, **main_buffer.options) for _ in range(cached_buffer_num)]
        ReplayBufferManager.__init__(self, [main_buffer, *cached])
        _name_parts(self)

    def _as_own(self) -> Any:
        own = super()._as_own()
        _name_parts(own)
        return own

    @classmethod
    def _of_own(cls, own: Any, steps: Any, storage: MakeStorage | None) -> Any:
        buffer = super()._of_own(own, steps, storage)
        _name_parts(buffer)
        return buffer


def _ring(of: Any, storage: MakeStorage | None) -> engram_data.ReplayBuffer:
    """The rows of one of tianshou's buffers; None: in memory, each observation once where single frames are stored."""
    if storage is None:
        has_single_frames = of._save_only_last_obs or of.stack_num > 1
        storage = _COMPACT if has_single_frames else LazyTensorStorage
    return engram_data.ReplayBuffer(storage=storage(max(1, int(of.maxsize))))


def _name_parts(buffer: Any) -> None:
    """Sets the attributes of a CachedReplayBuffer, of either library, that name its parts."""
    buffer.main_buffer, buffer.cached_buffers = buffer.buffers[0], buffer.buffers[1:]
    buffer.cached_buffer_num = len(buffer.cached_buffers)


def _without_entries(batch: Any, last_obs: bool) -> Any:
    """The part of a batch of steps that tianshou keeps itself; of the rest, which is in rows, arrays without a value.

    Args:
        last_obs: whether the batch has the last of each stack of observations only.
    """
    lead, rest = len(batch), Batch()
    for key in batch.get_keys():
        stacks = () if key != "act" and last_obs else (1,)
        rest.__dict__[key] = np.empty((lead, *stacks, 0)) if key in _ENTRIES else batch[key]
    return rest


def _parts(kind: Any, total_size: int, number: int, settings: dict[str, Any]) -> list[Any]:
    assert number > 0, f"buffer_num must be 1 or more, got {number}"
    return [kind(math.ceil(total_size / number), **settings) for _ in range(number)]


def _array_of(buffers: list[Any]) -> npt.NDArray[Any]:
    array = np.empty(len(buffers), object)
    for i, buffer in enumerate(buffers):  # one by one: numpy would take what has a length apart
        array[i] = buffer
    return array


def _each(use: Callable[[Any], Any], values: Any) -> None:
    """Calls a function with each array of a nested Batch."""
    for value in values.values():
        if isinstance(value, Batch):
            _each(use, value)
        else:
            use(np.asarray(value))


def _arrays_of(rows: Any, shape: tuple[int, ...]) -> Any:
    return _map(lambda value: value.numpy().reshape((*shape, *value.shape[1:]))[()], rows)


def _entry(row: dict[str, Any], key: str) -> Any:
    value: Any = row
    for part in _ENTRIES[key]:
        value = value.get(part, Batch())
    return _batch(value) if isinstance(value, dict) else value


def _batch(entries: dict[str, Any]) -> Any:
    """The Batch of nested entries as they are: its constructor makes 0-d arrays of NumPy's numbers."""
    batch = Batch()
    for key, value in entries.items():
        batch.__dict__[key] = _batch(value) if isinstance(value, dict) else value
    return batch


def _map(change: Callable[..., Any], first: Any, *others: Any) -> Any:
    """A dict with the results of `change` for the arrays of equally nested dicts or Batches."""
    if isinstance(first, Batch | dict):
        return {key: _map(change, value, *(other[key] for other in others)) for key, value in first.items()}
    return change(first, *others)
