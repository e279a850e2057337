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
        below, _ = stores_below(place) if place.is_dir() else ([], True)
        more = f". Below it are {len(below)}, which `engram info` lists: {visible(below[0][0])}" if below else ""
        raise ValueError(
            f"{visible(path)} is none of: a store (a folder with {StoreFile.NAME}), a checkpoint (a folder with "
            "CURRENT), a directory that TorchRL's dumps wrote, a folder of memory-mapped TensorDicts, a Minari or "
            f"LeRobot dataset, a flat HDF5 file, a Parquet file{more}"
        )
    return kind


def own_kind(folder: Path) -> Kind | None:
    """Whether a folder is a store or a checkpoint of engram's; None: neither."""
    if StoreFile.is_in(folder):
        return "store"
    directory = Checkpoint(folder)
    return "checkpoint" if directory.has_pointer() or directory.snapshots() else None


def stores_below(folder: str | os.PathLike[str], most: int = 100_000) -> tuple[list[tuple[str, Kind]], bool]:
    """The stores and checkpoints below a folder that is none, by path, and whether all of it was looked at.

    Links are not followed, hidden folders and what lies in stores and checkpoints not looked at. After `most` files and
    folders the search ends.
    """
    found: list[tuple[str, Kind]] = []
    folders, looked = [os.fspath(user_path(folder))], 0
    while folders and looked < most:
        above = folders.pop()
        try:
            with os.scandir(above) as entries:
                below = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
                looked += len(below)
        except OSError:  # it may not be read, or is gone
            continue
        for path in below:
            if os.path.basename(path).startswith("."):
                continue
            if (kind := own_kind(Path(path))) is not None:
                found.append((path, kind))
            else:
                folders.append(path)
    return sorted(found), not folders


def _kind_of_folder(place: Path) -> Kind | None:
    if (own := own_kind(place)) is not None:
        return own
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
