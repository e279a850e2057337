"""Storages that a user's own code writes at a path and reads from there: its files become files of the snapshot."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engram import _forms as forms
from engram._text import visible
from engram.checkpoint.directory import is_file_name
from engram.checkpoint.reader import SnapshotReader
from engram.checkpoint.writer import SnapshotWriter
from engram.store.counters import Counters

BY_PATH = "files"  # the name of this form

_PLACE = "storage/own"
_STATE = forms.record({"files": forms.list_of(forms.text), "counters": forms.nullable(forms.anything)})


class SaveByPath:
    """One save, by a function that writes a storage to a file, or a folder of files, at the path that it gets."""

    nbytes = 0  # which nobody knows

    def __init__(self, dumps: Callable[[Any, Path], object], storage: Any) -> None:
        self._dumps, self._storage = dumps, storage

    def write(self, writer: SnapshotWriter) -> dict[str, Any]:
        with writer.scratch_folder() as scratch:
            place = Path(scratch) / "own"
            self._dumps(self._storage, place)
            files = {_PLACE if file == place else f"{_PLACE}/{file.relative_to(place)}": file for file in _files(place)}
            if not files:
                raise ValueError("dumps of the checkpointer wrote no file at the path that it was given")
            for name, file in sorted(files.items()):
                if not is_file_name(name):
                    raise ValueError(
                        f"dumps of the checkpointer wrote a file {visible(str(file.relative_to(scratch)))}: names "
                        "consist of letters, digits, '_', '-' and '.', and do not begin with a dot"
                    )
                with writer.written_by_path(name) as path:
                    os.replace(file, path)
        return {"files": sorted(files), "counters": self._storage.saved_form.counters()}


class RestoreByPath:
    """One load, by a function that reads what is at the path that it gets and fills the sink, a storage, empty then."""

    def __init__(self, loads: Callable[[Any, Path], object], reader: SnapshotReader, state: dict[str, Any]) -> None:
        self._loads, self._reader = loads, reader
        try:
            forms.check(_STATE, state, "its description of the files")
        except ValueError as error:
            raise reader.malformed(str(error)) from error
        self._files: list[str] = state["files"]
        self._counters = state["counters"]
        try:
            if self._counters is not None:
                Counters(self._counters)
        except ValueError as error:
            raise reader.malformed(f"its counters are malformed: {error}") from error
        for name in self._files:
            if name not in reader.files or not (name == _PLACE or name.startswith(f"{_PLACE}/")):
                raise reader.malformed(f"it has no file {visible(name)} of the checkpointer's")

    def check(self, sink: Any) -> None:
        """Nothing can be said before it is read."""

    def load(self, sink: Any) -> None:
        self._reader.check(self._files)
        if len(sink):
            sink.empty()
        self._loads(sink, Path(self._reader.path(_PLACE)))
        if self._counters is not None and len(sink):
            sink.saved_form.place_as_saved(self._counters)


def _files(place: Path) -> list[Path]:
    """The regular files at a path, or below it."""
    files, below = [], [place] if place.exists() or place.is_symlink() else []
    while below:
        one = below.pop()
        if one.is_dir() and not one.is_symlink():
            below += one.iterdir()
        elif one.is_file() and not one.is_symlink():
            files.append(one)
        else:
            raise ValueError(
                f"dumps of the checkpointer wrote {visible(one.name)}, which is neither a file nor a folder"
            )
    return files
