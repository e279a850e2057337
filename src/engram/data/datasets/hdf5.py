"""The arrays of a flat HDF5 file, block by block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tensordict import TensorDict

from engram import pytree
from engram._hdf5 import H5Array, H5Source, check_options, create_plain, open_foreign
from engram.data.datasets.atomic_files import new_file
from engram.data.datasets.episodes import (
    REWARD,
    TRAJECTORY,
    Block,
    Roles,
    batch_of,
    block_rows,
    check_buffer,
    flag_leaves,
    following,
    next_trajectory,
    observation_key,
    plain,
    progress_bar,
    source_of,
    take,
)
from engram.pytree import Key, KeyPath, as_path
from engram.store.episodes import DONE
from engram.store.layout import RowLayout

Array = npt.NDArray[Any]

_ROLES = ("observations", "next_observations", "actions", "infos", "next_infos")
_FLAGS = ("terminals", "timeouts")
_CHUNK_BYTES = 1 << 20


class _Column(NamedTuple):
    place: str
    key: KeyPath
    array: H5Array


class FlatSteps:
    """The steps of a file.

    Raises:
        DatasetError: the file is not of this form.
    """

    def __init__(self, source: H5Source, exclude: Sequence[KeyPath]) -> None:
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
                raise self._source.wrong(place, f"would be the key {pytree.format_key(key)}, as {other.place}")
        if key[0] in ("next", "done", "terminated", "truncated", "reward", "collector") and not names[0].startswith(
            "next"
        ):
            raise self._source.wrong(place, f"would be the key {pytree.format_key(key)}; exclude= leaves it out")
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
        leaves: dict[KeyPath, Array] = {**values, TRAJECTORY: ids.astype(np.int64)}
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


def _key(names: tuple[str, ...]) -> KeyPath:
    role, below = names[0], names[1:]
    lead: KeyPath = ("next",) if role.startswith("next_") else ()
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


def read_hdf5(path: str | os.PathLike[str], buffer: Any, *, exclude: Sequence[Key] = (), progress: bool = True) -> int:
    """Takes the steps of a flat HDF5 file (D4RL's form) into a buffer; returns their number.

    Steps are those of `iter_hdf5`, with trajectory ids that go on behind the buffer's own. They are written in blocks
    of about 16 MB: where one is refused, those before it stay, and it leaves nothing behind.

    Args:
        path: the file.
        buffer: with a storage of ndim=1.
        exclude: keys (as engram has them) to leave out.
        progress: show a bar, if there is a terminal.

    Raises:
        DatasetError: the file is damaged or not of this form; the message names file and key, `rows_read` says how many
            steps were taken in.
        ImportError: h5py is missing: `pip install "engram[h5]"`.

    Example:
        >>> import tempfile
        >>> file = tempfile.mkdtemp() + "/steps.hdf5"
        >>> follows = {"observation": torch.ones(2, 4), "reward": torch.ones(2, 1), "done": torch.ones(2, 1).bool()}
        >>> steps = TensorDict({"observation": torch.ones(2, 4), "action": torch.ones(2), "next": follows}, [2])
        >>> write_hdf5(steps, file)
        2
        >>> read_hdf5(file, ReplayBuffer(storage=LazyTensorStorage(100)))
        2
    """
    check_buffer(buffer)
    with open_foreign(Path(path)) as source:
        steps = FlatSteps(source, tuple(as_path(key, "exclude") for key in exclude))
        first = next_trajectory(buffer.storage)
        return take(steps.blocks(None, first), buffer, Path(path), len(steps), progress)


def iter_hdf5(
    path: str | os.PathLike[str], batch_size: int | None = None, *, exclude: Sequence[Key] = ()
) -> Iterator[TensorDict]:
    """The steps of a flat HDF5 file: TED batches `[n]` of `batch_size` rows of the file (None: of about 16 MB).

    `observations` is `observation`, or, if it is a group, keys of their own; `next_observations` is the same under
    `"next"`; so are `infos` and `next_infos` (`("info", ...)`). `terminals` are `terminated`, `timeouts` `truncated`;
    both end a trajectory. Rewards and flags are `[n, 1]`. Trajectories are numbered from 0 in
    `("collector", "traj_ids")`.

    Without `next_observations` a step is followed by the next one's observation. Nothing says what followed the last
    step of a trajectory: where it is terminal, its own observation is repeated (no value is taken of it); where it is
    not, the step is left out and the one before it is truncated instead.

    Raises:
        DatasetError, ImportError: as `read_hdf5`.
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    with open_foreign(Path(path)) as source:
        yield from FlatSteps(source, tuple(as_path(key, "exclude") for key in exclude)).blocks(batch_size, 0)


def write_hdf5(
    source: Any,
    path: str | os.PathLike[str],
    *,
    h5_kwargs: Mapping[str, Any] | None = None,
    exclude: Sequence[Key] = (),
    end_key: Key = DONE,
    traj_key: Key | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> int:
    """Writes steps as a flat HDF5 file with `next_observations`; returns their number.

    The file appears whole or not at all. A trajectory that has not ended is written with the `timeouts` of its last
    step set: nothing else says that it stops there. Stored rows are written as they are, oldest first (transforms are
    not applied), while writers of this process wait. Trajectory ids, `index`, the flags at the root and
    `("next", "done")` are not written: they follow from the rest.

    Args:
        source: a buffer or storage; a TensorDict `[time]` or `[envs, time]`, or an iterable of such, as a collector. Of
            an iterable, trajectories are kept in memory until they end.
        path: the file to make.
        h5_kwargs: `compression`, `compression_opts`, `shuffle`, `fletcher32`, as for `H5StorageCheckpointer`.
        exclude: keys to leave out.
        end_key, traj_key: what ends a trajectory, as for `SliceSampler`.
        overwrite: replace the file at `path`.
        progress: show a bar, if there is a terminal.

    Raises:
        ValueError: nothing to write, or keys without a place in this format (all are listed).
        FileExistsError: there is something at `path`.
        ImportError: h5py is missing: `pip install "engram[h5]"`.
    """
    file, total = Path(path), 0
    options = check_options(h5_kwargs or {})
    found = source_of(source, end_key, traj_key, exclude)
    with (
        new_file(file, overwrite) as made,
        progress_bar(f"writing {file}", found.total, progress) as advance,
        create_plain(made) as opened,
    ):
        writer = FlatWriter(opened, options)
        for block in found.blocks():
            n = writer.write(block)
            total += n
            advance(n)
    return total
