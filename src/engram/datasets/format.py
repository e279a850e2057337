"""Formats of datasets: `DATASET_FORMAT` in the module of each says how the command line reads and writes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram.datasets.episodes import DatasetSize

HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True)
class DatasetFormat:
    """How the command line knows, reads and writes datasets of a format.

    Attributes:
        kind: what `engram info` calls one: "Minari dataset".
        batches: the steps at a path as batches `[n]`.
        size: steps and episodes at a path, as far as it says them.
        is_folder: whether a folder is one.
        is_file: whether a file is one, by its path and its first eight bytes.
        word: what `convert --to` calls it, "minari"; None: it is not written.
        write: writes steps, for `word`.
        suffixes: of files that `convert` writes in this format without being told.
        is_streamed: whether its keys follow from the format, so that `convert` reads while it writes.
        may_skip_steps: whether `batches` may leave out steps that `size` counts.
        holds_flags_only: whether ends of trajectories are stored as flags of steps only.
    """

    kind: str
    batches: Callable[[AnyPath], Iterator[Any]]
    size: Callable[[AnyPath], DatasetSize]
    is_folder: Callable[[Path], bool] = lambda place: False
    is_file: Callable[[Path, bytes], bool] = lambda place, start: False
    word: str | None = None
    write: Callable[..., int] | None = None
    suffixes: tuple[str, ...] = ()
    is_streamed: bool = True
    may_skip_steps: bool = False
    holds_flags_only: bool = False
