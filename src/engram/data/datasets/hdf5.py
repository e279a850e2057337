"""Flat HDF5 files as D4RL has them: one array for each of observations, actions, rewards, terminals, timeouts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from engram.data.datasets.aside import new_file
from engram.data.datasets.flat_steps import FlatSteps, FlatWriter
from engram.data.datasets.h5_files import reading, writing
from engram.data.datasets.progress import progress_bar
from engram.data.datasets.sources import source_of
from engram.data.datasets.taking import check_buffer, next_trajectory, take
from engram.data.replay_buffers.checkpointers.h5 import check_options
from engram.data.replay_buffers.episodes import DONE, Key, path_of


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
    with reading(Path(path)) as source:
        steps = FlatSteps(source, tuple(path_of(key, "exclude") for key in exclude))
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
    with reading(Path(path)) as source:
        yield from FlatSteps(source, tuple(path_of(key, "exclude") for key in exclude)).blocks(batch_size, 0)


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
        writing(made) as opened,
    ):
        writer = FlatWriter(opened, options)
        for block in found.blocks():
            n = writer.write(block)
            total += n
            advance(n)
    return total
