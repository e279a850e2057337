"""Opens the rows of stores, checkpoints, TorchRL's directories and dataset files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engram import pytree
from engram._progress import progress_bar
from engram.cli.kinds import Kind, kind_of, one_snapshot, store_folder
from engram.data import LazyMemmapStorage, LazyTensorStorage, Storage
from engram.datasets import FORMATS
from engram.errors import CheckpointMisfitError, DatasetError
from engram.interop.torchrl.files import SavedSteps, layout_of
from engram.interop.torchrl.load import TorchrlDirectory, open_torchrl
from engram.kernel.replay import saved_storage
from engram.kernel.tools import free_memory

#: Formats of datasets, by what a path that holds one is called.
DATASETS = {one.kind: one for one in FORMATS}


@contextmanager
def torchrl_steps(
    path: str | os.PathLike[str], rows: int | None = None
) -> Iterator[tuple[SavedSteps, int, TorchrlDirectory]]:
    """The steps in a directory of TorchRL's, their `ndim`, which it does not record (the first that fits), and itself.

    `rows` is how many there are, where nothing in the directory says it; None: all that it has room for.
    """
    with open_torchrl(path, rows=rows) as directory:
        try:
            steps, ndim = directory.saved_steps(1), 1
        except CheckpointMisfitError:
            steps, ndim = directory.saved_steps(2), 2
        yield steps, ndim, directory


@contextmanager
def open_rows(
    path: str | os.PathLike[str], snapshot: str | None = None, *, rows: int | None = None, progress: bool = False
) -> Iterator[Storage]:
    """A storage with the rows at a path: a store in place, as an observer; of anything else a copy.

    From a store that a job writes, reading and counting cover the rows of this moment, less those that are
    overwritten meanwhile. A copy is in memory, or in a temporary file (in TMPDIR) where it would take more than half of
    what is free.

    `rows` is as in `torchrl_steps`, and of no meaning elsewhere; `progress` shows that something is being read, if
    standard error is a terminal.

    Raises:
        StorageError, CheckpointError, DatasetError: it cannot be read.
    """
    kind = kind_of(path)
    if kind == "store":
        storage: Any = LazyMemmapStorage.open(store_folder(path), read_only=True)
        storage.freeze()
    else:
        with progress_bar(f"reading {path}", None, progress) as advance, one_snapshot(path, snapshot) as snapshot:
            storage = _copy(path, kind, snapshot, rows, advance)
    try:
        yield storage
    finally:
        storage.close()


def _copy(
    path: str | os.PathLike[str], kind: Kind, snapshot: str | None, rows: int | None, advance: Callable[[int], None]
) -> Storage:
    if kind == "checkpoint":
        storage = saved_storage(path, snapshot, _is_large)
        storage.loads(path, snapshot=snapshot)
        return storage
    if kind == "TorchRL directory":
        with torchrl_steps(path, rows) as (steps, ndim, directory):
            envs = math.prod(steps.inner)
            nbytes = steps.length * envs * layout_of(steps).payload_bytes
            storage = new_storage((steps.capacity if steps.is_counted else steps.length) * envs, nbytes, ndim)
            with storage.access.exclusive("reading"):
                storage.saved_form.plan_load(directory).run()
        return storage
    return _copy_of_dataset(path, kind, advance)


def _copy_of_dataset(path: str | os.PathLike[str], kind: Kind, advance: Callable[[int], None]) -> Storage:
    rows = DATASETS[kind].size(path).steps
    if rows is None:  # the file does not say it: count them first
        rows = sum(len(batch) for batch in DATASETS[kind].batches(path))
    storage: Storage | None = None
    for batch in DATASETS[kind].batches(path):
        storage = storage or new_storage(rows, rows * row_bytes(batch))
        if len(storage) + len(batch) > rows:
            raise DatasetError(
                str(path), f"it was changed while it was read: it has more than the {rows} steps of before"
            )
        storage.append(storage.check(batch, single=False))
        advance(len(batch))
    return storage or LazyTensorStorage(1)


def new_storage(capacity: int, nbytes: int, ndim: int = 1) -> Storage:
    """An empty storage for rows that take `nbytes`: in memory, or in a temporary file where they are large."""
    return (LazyMemmapStorage if _is_large(nbytes) else LazyTensorStorage)(capacity, ndim=ndim)


def row_bytes(batch: Any) -> int:
    """Bytes of a row of a batch."""
    return sum(leaf[:1].nbytes for _, leaf in pytree.describe(batch, 1)[1])


def _is_large(nbytes: int) -> bool:
    """Whether rows of this size are not to be held in memory: they would take more than half of what is free."""
    free = free_memory()
    return free is not None and nbytes > free // 2
