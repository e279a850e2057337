"""The kinds of stored steps, and recognising them; does not load torch for stores and checkpoints, the usual ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from engram.kernel.disk import Checkpoint, StoreFile
from engram.kernel.tools import open_regular, user_path, visible

#: The kinds of a path: "store", "checkpoint", "TorchRL directory", or the `kind` of a format of datasets.
Kind: TypeAlias = str


def kind_of(path: str | os.PathLike[str]) -> Kind:
    """The kind of a path: a store or a checkpoint of engram's, another library's directory, or a dataset file.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: it is none of these.
        OSError: it is a pipe, a socket or a device, or cannot be opened.
    """
    place = user_path(path)
    if not place.exists():
        raise FileNotFoundError(2, "there is no such file or directory", str(path))
    kind = _kind_of_folder(place) if place.is_dir() else _kind_of_file(place)
    if kind is None:
        raise ValueError(
            f"{visible(path)} is none of: a store (a folder with {StoreFile.NAME}), a checkpoint (a folder with "
            "CURRENT), a directory that TorchRL's dumps wrote, a folder of memory-mapped TensorDicts, a Minari or "
            "LeRobot dataset, a flat HDF5 file, a Parquet file"
        )
    return kind


def _kind_of_folder(place: Path) -> Kind | None:
    if StoreFile.is_in(place):
        return "store"
    directory = Checkpoint(place)
    if directory.has_pointer() or directory.snapshots():
        return "checkpoint"
    # Late: they load torch.
    from engram.datasets import FORMATS
    from engram.interop.torchrl.load import is_torchrl

    kind = next((one.kind for one in FORMATS if one.is_folder(place)), None)
    return "TorchRL directory" if kind is None and is_torchrl(place) else kind


def _kind_of_file(place: Path) -> Kind | None:
    if place.name == StoreFile.NAME:
        return "store"
    with open(open_regular(place, follow_links=True), "rb") as file:
        start = file.read(8)
    from engram.datasets import FORMATS  # late: it loads torch

    return next((one.kind for one in FORMATS if one.is_file(place, start)), None)


def store_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of a store, from its path or that of the store's file."""
    place = user_path(path)
    return place if place.is_dir() else place.absolute().parent


@contextmanager
def one_snapshot(path: str | os.PathLike[str], snapshot: str | None = None) -> Iterator[str | None]:
    """A block that reads one snapshot of a checkpoint, which no save removes meanwhile: yields the snapshot's name.

    Yields None for every other kind.

    Raises:
        CheckpointError: there is no such snapshot.
    """
    if kind_of(path) != "checkpoint":
        yield None
        return
    with Checkpoint(path).reading(snapshot) as reader:
        yield reader.name
