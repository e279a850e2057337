"""The arrays of a flat HDF5 file, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tensordict import TensorDict

from engram.data.datasets.h5_files import H5Array, H5Source
from engram.data.datasets.roles import (
    REWARD,
    TRAJECTORY,
    Roles,
    batch_of,
    flag_leaves,
    following,
    observation_key,
    plain,
)
from engram.data.datasets.sources import Block, block_rows
from engram.data.replay_buffers import trees
from engram.data.replay_buffers.layout import RowLayout
from engram.data.replay_buffers.trees import Path

Array = npt.NDArray[Any]

_ROLES = ("observations", "next_observations", "actions", "infos", "next_infos")
_FLAGS = ("terminals", "timeouts")
_CHUNK_BYTES = 1 << 20


class _Column(NamedTuple):
    place: str
    key: Path
    array: H5Array


class FlatSteps:
    """The steps of a file.

    Raises:
        DatasetError: the file is not of this form.
    """

    def __init__(self, source: H5Source, exclude: Sequence[Path]) -> None:
        self._source, self._skipped = source, tuple(exclude)
        there = [n for n in source.names(source.root, "the file") if n != "metadata"]
        for name in ("observations", "actions", "rewards", "terminals"):
            if name not in there:
                raise source.wrong(name, "is missing, which a flat HDF5 dataset has")
        self._columns: list[_Column] = []
        self._flags: dict[str, H5Array] = {}
        for name in there:
            self._look(name)
        self._length = len(self._flags["terminals"])
        for column in self._columns:
            if len(column.array) != self._length:
                raise source.wrong(column.place, f"has {len(column.array)} steps, terminals {self._length}")
        self._shared = self._without_next()

    def __len__(self) -> int:
        return self._length

    def _look(self, name: str) -> None:
        source = self._source
        if name in _FLAGS:
            self._flags[name] = array = source.array(source.root, name, name)
            if array.dtype.kind not in "biu" or array.shape[1:] not in ((), (1,)):
                raise source.wrong(name, f"is {array.dtype} {list(array.shape)}, not one flag a step")
            if len(array) != len(self._flags.get(_FLAGS[0], array)):
                raise source.wrong(name, f"has {len(array)} steps, terminals {len(self._flags[_FLAGS[0]])}")
        elif name == "rewards":
            self._columns.append(_Column(name, REWARD, source.array(source.root, name, name)))
        elif name in _ROLES:
            self._walk(source.root, (name,))
        elif (name,) not in self._skipped:
            raise source.wrong(
                name, f"is none of {', '.join((*_ROLES, 'rewards', *_FLAGS))}; exclude=[{name!r}] leaves it out"
            )

    def _walk(self, group: Any, names: tuple[str, ...]) -> None:
        place, key = "/".join(names), _key(names)
        if key in self._skipped or key[key[0] == "next" :] in self._skipped:
            return
        opened = self._source.open(group, names[-1], place)
        if self._source.is_group(opened):
            for child in self._source.names(opened, place):
                self._walk(opened, (*names, child))
            return
        for other in self._columns:
            if other.key[: len(key)] == key or key[: len(other.key)] == other.key:
                raise self._source.wrong(place, f"would be the key {trees.show(key)}, as {other.place}")
        if key[0] in ("next", "done", "terminated", "truncated", "reward", "collector") and not names[0].startswith(
            "next"
        ):
            raise self._source.wrong(place, f"would be the key {trees.show(key)}; exclude= leaves it out")
        self._columns.append(_Column(place, key, self._source.as_array(opened, place)))

    def _without_next(self) -> list[_Column]:
        """Observations of which the file does not say what followed."""
        keys = {c.key for c in self._columns}
        mine = [c for c in self._columns if c.place.split("/")[0] == "observations"]
        if not mine:
            raise self._source.wrong("observations", "holds nothing")
        absent = [c for c in mine if following(c.key) not in keys]
        if absent and len(absent) < len(mine):
            raise self._source.wrong(absent[0].place, "has no counterpart in next_observations, as others have")
        return absent

    # ---- steps ----
    def blocks(self, rows: int | None, first_id: int) -> Iterator[TensorDict]:
        row_bytes = sum(
            c.array.dtype.itemsize * int(np.prod(c.array.shape[1:])) for c in (*self._columns, *self._shared)
        )
        n, number = rows or block_rows(row_bytes), first_id
        for start in range(0, self._length, n):
            stop = min(start + n, self._length)
            made, ended = self._block(start, stop, number)
            number += ended
            if len(made):
                yield made

    def _block(self, start: int, stop: int, number: int) -> tuple[TensorDict, int]:
        more = min(stop + 1, self._length)  # one step further: it says what followed the last one
        with self._source.failures("the file"):
            terminal, timeout = self._flag("terminals", start, more), self._flag("timeouts", start, more)
            values = {c.key: c.array.read(start, stop) for c in self._columns}
            after = {c.key: c.array.read(more - 1, more) for c in self._shared} if more > stop else {}
        ends = terminal | timeout
        n = stop - start
        if self._shared:
            for key in (c.key for c in self._shared):
                values[following(key)] = _shifted(values[key], after.get(key), terminal[:n])
        truncated, kept = self._kept(terminal, timeout, n, to_the_end=more == self._length)
        begins = np.concatenate([[False], ends[: n - 1]])
        ids = number + np.cumsum(begins)
        leaves: dict[Path, Array] = {**values, TRAJECTORY: ids.astype(np.int64)}
        reward = leaves[REWARD]
        leaves[REWARD] = reward.reshape(n, 1) if reward.ndim == 1 else reward
        leaves |= flag_leaves(terminal[:n], truncated)
        count = n
        if not kept.all():
            leaves, count = {key: value[kept] for key, value in leaves.items()}, int(kept.sum())
        return batch_of(leaves, count), int(ends[:n].sum())

    def _flag(self, name: str, start: int, stop: int) -> npt.NDArray[np.bool_]:
        array = self._flags.get(name)
        if array is None:
            return np.zeros(stop - start, np.bool_)
        flags: npt.NDArray[np.bool_] = array.read(start, stop).reshape(-1) != 0
        return flags

    def _kept(self, terminal: Array, timeout: Array, n: int, to_the_end: bool) -> tuple[Array, Array]:
        """What is truncated, and which steps stay: not those of which nobody knows what followed."""
        if not self._shared:
            return timeout[:n], np.ones(n, np.bool_)
        dropped = timeout & ~terminal
        if to_the_end:
            dropped[-1] |= not terminal[-1]
        ends = terminal | timeout
        before_dropped = np.zeros(n, np.bool_)
        m = len(dropped) - 1
        before_dropped[:m] = dropped[1 : m + 1] & ~ends[:m]
        return timeout[:n] | before_dropped, ~dropped[:n]


def _shifted(values: Array, after: Array | None, terminal: Array) -> Array:
    """What followed each step: the next one's value; of a terminal step its own."""
    shifted = np.concatenate([values[1:], values[-1:] if after is None else after])
    shifted[terminal] = values[terminal]
    return shifted


def _key(names: tuple[str, ...]) -> Path:
    role, below = names[0], names[1:]
    lead: Path = ("next",) if role.startswith("next_") else ()
    if role == "actions":
        return ("action", *plain(below))
    return (*lead, *(("info", *plain(below)) if role.endswith("infos") else observation_key(below)))


class FlatWriter:
    """Writes blocks of steps to an open file."""

    def __init__(self, file: Any, options: Mapping[str, Any]) -> None:
        self._file, self._options = file, dict(options)
        self._roles: Roles | None = None

    def write(self, block: Block) -> int:
        """Appends the steps of a block; returns their number."""
        if self._roles is None:
            self._roles = Roles(RowLayout.of(block.rows, 1), "a flat HDF5 dataset", lone_infos="now")
        if block.parts is None:
            raise ValueError("the steps have neither done flags nor trajectory ids: where episodes end is not known")
        roles = self._roles
        arrays = [t.numpy() for t in roles.layout.fitting(block.rows, 1)]
        stops = np.cumsum(block.parts[:, 0])
        ends = stops[block.parts[:, 1] + block.parts[:, 0] == block.parts[:, 2]] - 1
        terminated, truncated = roles.flags(arrays, ends)
        for role, pairs in (("observations", roles.observations), ("infos", roles.infos), ("actions", roles.actions)):
            for pair in pairs:
                self._append("/".join((role, *pair.name)), arrays[pair.now])
                if pair.after >= 0:
                    self._append("/".join((f"next_{role}", *pair.name)), arrays[pair.after])
        self._append("rewards", roles.rewards(arrays))
        self._append("terminals", terminated)
        self._append("timeouts", truncated)
        return len(terminated)

    def _append(self, name: str, values: Array) -> None:
        if name not in self._file:
            row = max(1, values.itemsize * int(np.prod(values.shape[1:])))
            shape = values.shape[1:]
            chunks = None if 0 in shape else (max(1, _CHUNK_BYTES // row), *shape)
            self._file.create_dataset(
                name, (0, *shape), values.dtype, maxshape=(None, *shape), chunks=chunks, **self._options
            )
        dataset = self._file[name]
        before = len(dataset)
        dataset.resize(before + len(values), axis=0)
        if values.size:
            dataset[before:] = values
