"""Flat HDF5 datasets, D4RL's form: every key is one array over all steps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tensordict import TensorDict

from engram import pytree
from engram._progress import progress_bar
from engram.datasets.atomic_files import new_file, replaceable_file
from engram.datasets.episodes import (
    DONE,
    MAX_ROW_BYTES,
    NO_OBSERVATIONS,
    REWARD,
    TRAJECTORY,
    DatasetSize,
    KeyMapping,
    StepBlock,
    batch_of,
    block_rows,
    check_buffer,
    episode_source,
    flag_leaves,
    ingest,
    key_of,
    next_key,
    next_trajectory,
    observation_key,
)
from engram.datasets.format import HDF5_MAGIC, DatasetFormat
from engram.datasets.h5_files import H5Source, create_plain, is_ours, open_foreign
from engram.kernel.hdf5 import H5Dataset, check_options
from engram.kernel.rows import RowLayout
from engram.kernel.tools import user_path
from engram.pytree import Key, KeyPath, as_path

Array = npt.NDArray[Any]

_ROLES = ("observations", "next_observations", "actions", "infos", "next_infos")
_FLAGS = ("terminals", "timeouts")
_CHUNK_BYTES = 1 << 20


class _KeyArray(NamedTuple):
    """A key and the array of the file that holds it."""

    place: str
    key: KeyPath
    array: H5Dataset


class FlatReader:
    """Reads the steps of a file.

    Raises:
        DatasetError: the file is not of this form.
    """

    def __init__(self, source: H5Source, exclude: Sequence[KeyPath]) -> None:
        self._source, self._skipped = source, tuple(exclude)
        names = [n for n in source.names(source.root, "the file") if n != "metadata"]
        for name in ("observations", "actions", "rewards", "terminals"):
            if name not in names:
                raise source.wrong(name, "is missing, which a flat HDF5 dataset has")
        self._columns: list[_KeyArray] = []
        self._flags: dict[str, H5Dataset] = {}
        for name in names:
            self._add(name)
        self._length = len(self._flags["terminals"])
        for column in self._columns:
            if len(column.array) != self._length:
                raise source.wrong(column.place, f"has {len(column.array)} steps, terminals {self._length}")
        self._unpaired = self._observations_without_next()

    def __len__(self) -> int:
        return self._length

    def _add(self, name: str) -> None:
        """Adds an entry of the root: flags, rewards, or the keys of a role."""
        source = self._source
        if name in _FLAGS:
            self._flags[name] = array = source.rows(source.root, name, name)
            if array.dtype.kind not in "biuf" or array.shape[1:] not in ((), (1,)):
                raise source.wrong(name, f"is {array.dtype} {list(array.shape)}, not one flag a step")
            if len(array) != len(self._flags.get(_FLAGS[0], array)):
                raise source.wrong(name, f"has {len(array)} steps, terminals {len(self._flags[_FLAGS[0]])}")
        elif name == "rewards":
            self._columns.append(_KeyArray(name, REWARD, source.rows(source.root, name, name)))
        elif name in _ROLES:
            self._add_below(source.root, (name,))
        elif (name,) not in self._skipped:
            raise source.wrong(
                name, f"is none of {', '.join((*_ROLES, 'rewards', *_FLAGS))}; exclude=[{name!r}] leaves it out"
            )

    def _add_below(self, group: Any, names: tuple[str, ...]) -> None:
        """Adds a dataset, or all datasets of a group."""
        place, key = "/".join(names), _key(names)
        if key in self._skipped or key[key[0] == "next" :] in self._skipped:
            return
        opened = self._source.open(group, names[-1], place)
        if self._source.is_group(opened):
            for child in self._source.names(opened, place):
                self._add_below(opened, (*names, child))
            return
        for other in self._columns:
            if other.key[: len(key)] == key or key[: len(other.key)] == other.key:
                raise self._source.wrong(place, f"would be the key {pytree.format_key(key)}, as {other.place}")
        if key[0] in NO_OBSERVATIONS and not names[0].startswith("next"):
            raise self._source.wrong(place, f"would be the key {pytree.format_key(key)}; exclude= leaves it out")
        self._columns.append(_KeyArray(place, key, self._source.checked_rows(opened, place)))

    def _observations_without_next(self) -> list[_KeyArray]:
        """Observations without a counterpart in next_observations: all of them, or none."""
        keys = {c.key for c in self._columns}
        observations = [c for c in self._columns if c.place.split("/")[0] == "observations"]
        if not observations:
            raise self._source.wrong("observations", "holds nothing")
        absent = [c for c in observations if next_key(c.key) not in keys]
        if absent and len(absent) < len(observations):
            raise self._source.wrong(absent[0].place, "has no counterpart in next_observations, as others have")
        return absent

    # ---- steps ----
    def blocks(self, rows: int | None, first_id: int) -> Iterator[TensorDict]:
        """Batches of `rows` rows of the file (None: of bounded size); trajectories are numbered from `first_id` on."""
        row_bytes = sum(
            c.array.dtype.itemsize * int(np.prod(c.array.shape[1:])) for c in (*self._columns, *self._unpaired)
        )
        self._source.check_row(row_bytes)
        n, trajectory = rows or block_rows(row_bytes), first_id
        for start in range(0, self._length, n):
            stop = min(start + n, self._length)
            batch, ended = self._block(start, stop, trajectory)
            trajectory += ended
            if len(batch):
                yield batch

    def _block(self, start: int, stop: int, trajectory: int) -> tuple[TensorDict, int]:
        """Rows [start, stop) of the file, and how many trajectories end in them."""
        more = min(stop + 1, self._length)  # one step further: its observation is the next one of the last step
        with self._source.failures("the file"):
            terminal, timeout = self._flag("terminals", start, more), self._flag("timeouts", start, more)
            values = {c.key: c.array.read(slice(start, stop)) for c in self._columns}
            after = {c.key: c.array.read(slice(more - 1, more)) for c in self._unpaired} if more > stop else {}
        ends = terminal | timeout
        n = stop - start
        if self._unpaired:
            for key in (c.key for c in self._unpaired):
                values[next_key(key)] = _shifted(values[key], after.get(key), terminal[:n])
        truncated, usable = self._usable_steps(terminal, timeout, n, to_the_end=more == self._length)
        begins = np.concatenate([[False], ends[: n - 1]])
        ids = trajectory + np.cumsum(begins)
        leaves: dict[KeyPath, Array] = {**values, TRAJECTORY: ids.astype(np.int64)}
        reward = leaves[REWARD]
        leaves[REWARD] = reward.reshape(n, 1) if reward.ndim == 1 else reward
        leaves |= flag_leaves(terminal[:n], truncated)
        count = n
        if not usable.all():
            leaves, count = {key: value[usable] for key, value in leaves.items()}, int(usable.sum())
        return batch_of(leaves, count), int(ends[:n].sum())

    def _flag(self, name: str, start: int, stop: int) -> npt.NDArray[np.bool_]:
        array = self._flags.get(name)
        if array is None:
            return np.zeros(stop - start, np.bool_)
        values = array.read(slice(start, stop)).reshape(-1)
        flags: npt.NDArray[np.bool_] = values != 0
        if values.dtype.kind == "f" and (wrong := values[flags & (values != 1)]).size:
            raise self._source.wrong(name, f"is {values.dtype} and holds {wrong[0]}; a flag is 0.0 or 1.0")
        return flags

    def _usable_steps(self, terminal: Array, timeout: Array, n: int, to_the_end: bool) -> tuple[Array, Array]:
        """bool [n] each: `truncated`, and which steps are returned: those whose next observation is in the file."""
        if not self._unpaired:
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
    """The next value of each step: that of the step after it; of a terminal step its own."""
    shifted = np.concatenate([values[1:], values[-1:] if after is None else after])
    shifted[terminal] = values[terminal]
    return shifted


def _key(names: tuple[str, ...]) -> KeyPath:
    """The key that a dataset of the file becomes."""
    role, below = names[0], names[1:]
    lead: KeyPath = ("next",) if role.startswith("next_") else ()
    if role == "actions":
        return ("action", *key_of(below))
    return (*lead, *(("info", *key_of(below)) if role.endswith("infos") else observation_key(below)))


class FlatWriter:
    """Writes blocks of steps to an open file."""

    def __init__(self, file: Any, options: Mapping[str, Any]) -> None:
        self._file, self._options = file, dict(options)
        self._mapping: KeyMapping | None = None

    def write(self, block: StepBlock) -> int:
        """Appends the steps of a block; returns their number."""
        if self._mapping is None:
            self._mapping = KeyMapping(RowLayout.of(block.rows, 1), "a flat HDF5 dataset", single_infos="root")
        if block.parts is None:
            raise ValueError(
                "the steps have neither done flags nor trajectory ids: engram cannot tell where episodes end"
            )
        mapping = self._mapping
        arrays = [t.numpy() for t in mapping.layout.fitting(block.rows, 1)]
        stops = np.cumsum(block.parts[:, 0])
        ends = stops[block.parts[:, 1] + block.parts[:, 0] == block.parts[:, 2]] - 1
        terminated, truncated = mapping.flags(arrays, ends)
        for role, pairs in (
            ("observations", mapping.observations),
            ("infos", mapping.infos),
            ("actions", mapping.actions),
        ):
            for pair in pairs:
                self._append("/".join((role, *pair.name)), arrays[pair.root])
                if pair.next >= 0:
                    self._append("/".join((f"next_{role}", *pair.name)), arrays[pair.next])
        self._append("rewards", mapping.rewards(arrays))
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


def read_hdf5(
    path: str | os.PathLike[str],
    buffer: Any,
    *,
    exclude: Sequence[Key] = (),
    progress: bool = True,
    max_row_bytes: int | str = MAX_ROW_BYTES,
) -> int:
    """Reads the steps of a flat HDF5 file (D4RL's form) into a buffer; returns their number.

    Steps are those of `iter_hdf5`, with trajectory ids above the buffer's own. They are written in blocks of about
    16 MB: where one is refused, those before it stay, and nothing of it is written.

    Args:
        path: the file.
        buffer: a buffer whose storage has ndim=1.
        exclude: keys (as engram has them) to leave out.
        progress: show a progress bar, if standard error is a terminal.
        max_row_bytes: the most that a row may take while it is decoded, and a compressed chunk: bytes, or "2GB".
            A small file may claim a row of any size.

    Raises:
        DatasetError: the file is damaged, not of this form, or a row is too large; the message names file and key,
            `rows_read` is the number of steps that were written to the buffer.
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
    with open_foreign(user_path(path), max_row_bytes) as source:
        steps = FlatReader(source, tuple(as_path(key, "exclude") for key in exclude))
        first = next_trajectory(buffer.storage)
        return ingest(steps.blocks(None, first), buffer, user_path(path), len(steps), progress)


def iter_hdf5(
    path: str | os.PathLike[str],
    batch_size: int | None = None,
    *,
    exclude: Sequence[Key] = (),
    max_row_bytes: int | str = MAX_ROW_BYTES,
) -> Iterator[TensorDict]:
    """The steps of a flat HDF5 file: TED batches `[n]` of `batch_size` rows of the file (None: of about 16 MB).

    `observations` is `observation`, or, if it is a group, keys of their own; `next_observations` is the same under
    `"next"`; so are `infos` and `next_infos` (`("info", ...)`). `terminals` are `terminated`, `timeouts` `truncated`;
    both end a trajectory. Rewards and flags are `[n, 1]`. Trajectories are numbered from 0 in
    `("collector", "traj_ids")`.

    Without `next_observations`, the next observation of a step is that of the row after it. Of the last step of a
    trajectory the file does not have it: where that step is terminal, its own observation is repeated (which no value
    estimate uses); where it is not, the step is left out and the one before it is truncated instead.

    Raises:
        DatasetError, ImportError: as `read_hdf5`.

    Example:
        >>> import tempfile
        >>> file = tempfile.mkdtemp() + "/steps.hdf5"
        >>> follows = {"observation": torch.ones(2, 4), "reward": torch.ones(2, 1), "done": torch.ones(2, 1).bool()}
        >>> steps = TensorDict({"observation": torch.ones(2, 4), "action": torch.ones(2), "next": follows}, [2])
        >>> write_hdf5(steps, file)
        2
        >>> [batch["collector", "traj_ids"].tolist() for batch in iter_hdf5(file, 1)]
        [[0], [1]]
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    with open_foreign(user_path(path), max_row_bytes) as source:
        yield from FlatReader(source, tuple(as_path(key, "exclude") for key in exclude)).blocks(batch_size, 0)


def hdf5_size(path: str | os.PathLike[str]) -> DatasetSize:
    """Rows of a flat HDF5 file, from its header; errors as `read_hdf5`."""
    with open_foreign(user_path(path), MAX_ROW_BYTES) as source:
        return DatasetSize(len(FlatReader(source, ())), None)


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
    step set, which marks its end. Stored rows are written as they are, oldest first (transforms are
    not applied), while writers of this process wait. Trajectory ids, `index`, the flags at the root and
    `("next", "done")` are not written: readers derive them.

    Args:
        source: a buffer or storage; a TensorDict `[time]` or `[envs, time]`, or an iterable of such, as a collector. Of
            an iterable, trajectories are kept in memory until they end.
        path: the file to create.
        h5_kwargs: `compression`, `compression_opts`, `shuffle`, `fletcher32`, as for `H5StorageCheckpointer`.
        exclude: keys to leave out.
        end_key, traj_key: what ends a trajectory, as for `SliceSampler`.
        overwrite: replace the file at `path`, if engram wrote it.
        progress: show a progress bar, if standard error is a terminal.

    Raises:
        ValueError: nothing to write, or keys without a place in this format (all are listed).
        FileExistsError: there is something at `path`.
        ImportError: h5py is missing: `pip install "engram[h5]"`.

    Example:
        >>> import tempfile
        >>> file = tempfile.mkdtemp() + "/steps.hdf5"
        >>> follows = {"observation": torch.ones(2, 4), "reward": torch.ones(2, 1), "done": torch.ones(2, 1).bool()}
        >>> steps = TensorDict({"observation": torch.ones(2, 4), "action": torch.ones(2), "next": follows}, [2])
        >>> write_hdf5(steps, file)
        2
        >>> write_hdf5(steps, file, overwrite=True, h5_kwargs={"compression": "gzip"})
        2
    """
    file, total = user_path(path), 0
    options = check_options(h5_kwargs or {})
    steps = episode_source(source, end_key, traj_key, exclude)
    with (
        new_file(file, overwrite, replaceable_file("an HDF5 dataset of engram's", is_ours)) as new,
        progress_bar(f"writing {file}", steps.total, progress) as advance,
        create_plain(new) as opened,
    ):
        writer = FlatWriter(opened, options)
        for block in steps.blocks():
            n = writer.write(block)
            total += n
            advance(n)
    return total


DATASET_FORMAT = DatasetFormat(
    kind="HDF5 dataset",
    batches=iter_hdf5,
    size=hdf5_size,
    is_file=lambda place, start: start == HDF5_MAGIC,
    word="hdf5",
    write=write_hdf5,
    suffixes=(".hdf5", ".h5"),
    may_skip_steps=True,
    holds_flags_only=True,
)
