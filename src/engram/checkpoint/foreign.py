"""Opens the directory that `loads` is given: a checkpoint, or one of the other forms that `engram.interop` reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from engram._providers import PROVIDERS
from engram._system import open_regular
from engram.checkpoint.snapshot import open_snapshot
from engram.errors import CorruptCheckpointError

_MOST_JSON = 1 << 20


class SavedState(Protocol):
    """An open directory, of which no part has been read yet."""

    def part_states(self, parts: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
        """States of a buffer's parts, and why some of them cannot be taken over."""
        ...

    def check_storage(self, checkpointer: Any, sink: Any) -> None:
        """ValueError where the sink cannot take the storage that was saved; changes nothing."""
        ...

    def load_storage(self, checkpointer: Any, sink: Any) -> None:
        """Fills the sink; one that holds rows is untouched unless everything was verified before."""
        ...

    def malformed(self, reason: str) -> CorruptCheckpointError:
        """The error for content that cannot be true."""
        ...


class Part(NamedTuple):
    """A part of the buffer that takes a saved state over, as plain data.

    Attributes:
        kinds: the name of its class, then those of the classes that it inherits from.
        state: its own state, of which it keeps the settings that the other library does not save.
    """

    kinds: tuple[str, ...]
    state: Mapping[str, Any]


class Receiver(NamedTuple):
    """The buffer that loads a directory.

    Attributes:
        storage: what is filled: the storage, or a load of it.
        index_key: the key under which its writer stores each row's index; None: it stores none.
        part: gives the "sampler" or the "writer".
    """

    storage: Any
    index_key: str | None
    part: Callable[[str], Part]


@contextmanager
def open_saved(
    path: str | os.PathLike[str], snapshot: str | None = None, receiver: Receiver | None = None
) -> Iterator[SavedState]:
    """The saved state at `path`; errors as `open_snapshot` and those of the form that it has."""
    for recognises, opener in PROVIDERS["directory_forms"]() if snapshot is None else ():
        if recognises(path):
            with opener(path, receiver) as foreign:
                yield foreign
            return
    with open_snapshot(path, snapshot) as saved:
        yield saved


def has_memory_maps(path: str | os.PathLike[str]) -> bool:
    """Whether a folder has files in which tensordict keeps a memory-mapped TensorDict; False where there is none."""
    try:
        names = os.listdir(path)
        if any(name.endswith(".memmap") for name in names):
            return True
        if "meta.json" not in names:
            return False
        with open(open_regular(os.path.join(path, "meta.json")), "rb") as file:
            return b'"_type"' in file.read(_MOST_JSON)
    except OSError:
        return False
