"""Recognises files and folders that engram wrote: only these are replaced.

The name of a file is not enough: other programs have files of the name CURRENT, and TorchRL itself writes the same
folders as `convert`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from engram.cli.kinds import Kind, kind_of
from engram.cli.sources import torchrl_steps
from engram.datasets.atomic_files import Replaceable, new_file, refuse_existing, replaceable_file
from engram.errors import EngramError
from engram.kernel.disk import Checkpoint, StoreFile, is_learner_file
from engram.kernel.tools import open_regular

_BEGINNING = 4096  # bytes, in which the mark of a file lies

#: The file that marks a directory that `convert` wrote for TorchRL, and the first bytes of this file.
BUFFER, CONVERTED = "buffer_metadata.json", b'{"generator": "engram '


def _begins(magic: bytes, mark: bytes) -> Callable[[BinaryIO], bool]:
    def begins(file: BinaryIO) -> bool:
        start = file.read(_BEGINNING)
        return start.startswith(magic) and mark in start

    return begins


REPORT = replaceable_file(
    "a report of engram's", _begins(b"<!doctype html>", b'<meta name="generator" content="engram ')
)
FILM = replaceable_file("a GIF that engram made", _begins(b"GIF89a", b"engram "))
PICTURE = replaceable_file("a picture that engram drew", _begins(b"\x89PNG", b"tEXtSoftware\0engram "))


def check_target(path: Path, replaceable: Replaceable) -> None:
    """Raises FileExistsError where a path, to be given to `write_target`, holds anything else."""
    refuse_existing(path, True, replaceable)


def write_target(path: Path, content: bytes, replaceable: Replaceable) -> None:
    """Writes a file, or replaces one, whole and in one step; errors as `check_target`."""
    with new_file(path, True, replaceable) as new:
        new.write_bytes(content)


def replaceable_folder(kind: Kind) -> Replaceable:
    """A folder of one kind that holds nothing else and is not in use."""

    def refusal(path: Path) -> str | None:
        try:
            if path.is_symlink() or not path.is_dir() or kind_of(path) != kind:
                return f"it is no {kind}"
            return _REFUSALS[kind](path)
        except (EngramError, OSError, ValueError) as error:
            return str(error)

    return Replaceable(f"a {kind} of engram's", refusal)


def _store_refusal(path: Path) -> str | None:
    StoreFile.refuse_used(path)
    return _other_than(path, {StoreFile.NAME, *(name for name, _ in _entries(path) if is_learner_file(name))})


def _checkpoint_refusal(path: Path) -> str | None:
    return _other_than(path, Checkpoint(path).files())


def _torchrl_refusal(path: Path) -> str | None:
    if not _is_converted(path / BUFFER):
        return f"{BUFFER} does not say that engram wrote it"
    with torchrl_steps(path) as (steps, _, _):  # refuses all but hidden files that the JSON files do not name
        del steps
    own = {"storage", "sampler", "writer", "writer/metadata.json", BUFFER}
    other = _other_than(path, own | {name for name, _ in _entries(path) if name.startswith("storage/")})
    hidden = [name for name, _ in _entries(path / "storage") if Path(name).name.startswith(".")]
    return other or (f"storage/{hidden[0]} is not part of it" if hidden else None)


def _is_converted(file: Path) -> bool:
    with open(open_regular(file), "rb") as opened:
        return opened.read(_BEGINNING).startswith(CONVERTED)


def _other_than(path: Path, own: set[str]) -> str | None:
    """A sentence that names an entry below a folder that is not among these."""
    other = next((name for name, is_link in _entries(path) if name not in own or is_link), None)
    return None if other is None else f"{other} is not part of it"


def _entries(path: Path, below: str = "") -> Iterator[tuple[str, bool]]:
    """The name of everything below a folder, and whether it is a link, which is not followed."""
    with os.scandir(path) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        yield below + entry.name, entry.is_symlink()
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(Path(entry.path), f"{below}{entry.name}/")


_REFUSALS: dict[Kind, Callable[[Path], str | None]] = {
    "store": _store_refusal,
    "checkpoint": _checkpoint_refusal,
    "TorchRL directory": _torchrl_refusal,
}
