"""What `loads` sees of a directory that TorchRL's `dumps` wrote: the same as of a snapshot of engram's own."""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from engram.checkpoint.directory import CURRENT
from engram.data.replay_buffers.checkpointers.torchrl.filling import Filling, TableSink
from engram.data.replay_buffers.checkpointers.torchrl.folders import Folder
from engram.data.replay_buffers.checkpointers.torchrl.h5 import h5_steps
from engram.data.replay_buffers.checkpointers.torchrl.memmaps import read_tree
from engram.data.replay_buffers.checkpointers.torchrl.parts import (
    Ages,
    check_writer,
    generator_state,
    sampler_state,
    writer_state,
)
from engram.data.replay_buffers.checkpointers.torchrl.steps import METADATA, Steps
from engram.data.replay_buffers.checkpointers.torchrl.tables import pytree_table, tensordict_table
from engram.data.replay_buffers.checkpointers.torchrl.trajectories import SHAPE, flat_steps
from engram.errors import CheckpointError, CorruptCheckpointError
from engram.pytree import KeyPath

_BUFFER, _PREFETCHED, _STORAGE = "buffer_metadata.json", "prefetch.pkl", "storage"
_NOTHING_PREFETCHED = 64  # bytes that a pickle of an empty queue has at most


def is_torchrl(path: str | os.PathLike[str]) -> bool:
    """Whether TorchRL's `dumps` of a buffer or a storage wrote this directory, and not engram's."""
    here = os.fspath(path)
    if not os.path.isdir(here) or os.path.lexists(os.path.join(here, CURRENT)):
        return False
    storage = os.path.join(here, _STORAGE)
    return (
        os.path.lexists(os.path.join(here, _BUFFER))
        or any(os.path.lexists(os.path.join(place, METADATA)) for place in (here, storage))
        or any(name.endswith(".h5") for name in os.listdir(here))
    )


@contextmanager
def open_torchrl(path: str | os.PathLike[str]) -> Iterator[TorchrlSaved]:
    """The directory; nothing in it is opened before it is asked for.

    CheckpointError: it holds what is not read. CorruptCheckpointError: it cannot be what was saved. Both name the file.
    """
    with ExitStack() as stack:
        yield TorchrlSaved(Folder(os.path.abspath(os.fspath(path)), stack), stack)


class TorchrlSaved:
    """A directory of a buffer, or of its storage alone."""

    def __init__(self, folder: Folder, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._alone = not folder.has(_STORAGE)
        self._storage = folder if self._alone else folder.folder(_STORAGE)
        self._steps: Steps | None = None
        self._index_key: str | None = None

    # ---- what a buffer's `loads` asks for ----
    def wanted(self, parts: tuple[str, ...], owners: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """States for a buffer's parts, and what of them cannot be taken over."""
        self._index_key = getattr(owners["writer"], "index_key", None)
        self._warn_of_prefetched()
        states: dict[str, Any] = {}
        said: list[str] = []
        read: dict[str, Callable[[], Any]] = {
            "sampler": functools.partial(self._sampler, owners["storage"]),
            "writer": self._checked_writer,
        }
        for name in [name for name in read if name in parts]:
            try:
                states[name] = _state_for(owners[name], read[name]())
            except (ValueError, CheckpointError) as error:
                said.append(str(error))
                parts = tuple(part for part in parts if part != name)
        if said:
            said.append(f"loads(path, parts={parts!r}) takes the rest over")
        if "generator" in parts:
            states["generator"] = {"state": generator_state(self._folder)}
        if "writer" in parts:  # transforms are never saved there
            states["transform"] = {"state": None}
        return states, said

    def check_storage(self, checkpointer: Any, sink: Any) -> None:
        """ValueError when the storage cannot take what was saved; changes nothing."""
        with self._as_errors():
            self._filling(sink).check()

    def load_storage(self, checkpointer: Any, sink: Any) -> None:
        """Fills the storage. One that holds rows is untouched unless everything could be read."""
        with self._as_errors():
            filling = self._filling(sink)
            filling.check()
            if len(sink):
                filling.read_everything()
            filling.fill()

    def _filling(self, sink: TableSink) -> Filling:
        steps = self._open(sink)
        return Filling(steps, self._ages(steps), sink, self._index_key)

    def malformed(self, reason: str) -> CorruptCheckpointError:
        """An error of what stands in it."""
        return CorruptCheckpointError(self._folder.path, reason)

    # ---- what there is ----
    def _open(self, sink: TableSink) -> Steps:
        if not hasattr(sink, "write_block"):
            raise ValueError(
                f"{self._storage.path} holds steps that all have one form; a {type(sink).__name__} does not take them: "
                "use a LazyTensorStorage or a LazyMemmapStorage"
            )
        if self._steps is None:
            self._steps = self._read(sink.ndim, _paths(sink.layout_state()))
            self._steps.begin(self._ages(self._steps).base % self._steps.capacity)
        return self._steps

    def _read(self, ndim: int, known: list[KeyPath]) -> Steps:
        folder = self._storage
        _refuse_others(folder)
        files = [name for name in folder.names() if name.endswith(".h5")]
        if files:
            if not self._alone:
                folder.only(files[:1])
            steps: Steps = self._stack.enter_context(h5_steps(folder, files[0], ndim, known))
            return steps
        said = folder.json(METADATA)
        if said.get("is_pytree") is True:
            return pytree_table(folder, ndim, said.get("metadata"), said.get("len"))
        tree = read_tree(folder, (METADATA,))
        if (SHAPE,) not in tree.constants:
            return tensordict_table(folder, ndim, tree, said.get("len"))
        return flat_steps(folder, tree, said.get("len"), ndim, known)

    @functools.cached_property
    def _writer(self) -> dict[str, Any] | None:
        return None if self._alone else writer_state(self._folder)

    def _checked_writer(self) -> dict[str, Any] | None:
        if not self._alone:
            check_writer(self._folder)
        return self._writer

    def _ages(self, steps: Steps) -> Ages:
        return Ages.of(steps, self._writer, self._folder)

    def _sampler(self, storage: Any) -> dict[str, Any] | None:
        found = sampler_state(self._folder)
        if found is None:
            return None
        with self._as_errors():
            steps = self._open(storage)
        strands, remaining = math.prod(steps.inner), found["remaining"]
        numbered = None if remaining is None else self._ages(steps).numbered(remaining, steps.capacity, strands)
        return {**found, "stored": steps.length * strands, "strands": strands, "rows": numbered}

    def _warn_of_prefetched(self) -> None:
        if self._folder.has(_PREFETCHED) and self._folder.nbytes(_PREFETCHED) > _NOTHING_PREFETCHED:
            warnings.warn(
                f"{os.path.join(self._folder.path, _PREFETCHED)} holds batches that were prepared ahead, as a pickle, "
                "which engram never opens: they are drawn anew",
                stacklevel=2,
            )

    @contextmanager
    def _as_errors(self) -> Iterator[None]:
        """What the system or torch say of names and sizes that stand in the files is an error of the files."""
        try:
            yield
        except (OSError, OverflowError, RecursionError) as error:
            raise CorruptCheckpointError(self._storage.path, f"it cannot be read ({error})") from error


def _state_for(owner: Any, found: Any) -> dict[str, Any]:
    """A part's own state, made of what was saved of its like."""
    if not hasattr(owner, "state_of_torchrl"):
        raise ValueError(f"a {type(owner).__name__} has no `state_of_torchrl` to take a state over with")
    return {"kind": type(owner).__name__, "state": owner.state_of_torchrl(found)}


def _refuse_others(folder: Folder) -> None:
    if folder.has("compressed_data"):
        raise CheckpointError(
            f"{folder.path} is a compressed list, which engram does not read: how its items are decompressed "
            "is not said there. Save the same items from a LazyTensorStorage instead"
        )
    if folder.has("metadata.json") and not folder.has(METADATA):
        member = os.path.join(folder.path, "0")
        raise CheckpointError(
            f"{folder.path} is an ensemble; load its members one by one: rb[0].storage.loads({member!r})"
        )
    for name in folder.names():
        folder.refuse_code(name)


def _paths(layout: dict[str, Any] | None) -> list[KeyPath]:
    """The keys of a storage that knows them already."""
    return [] if layout is None else [tuple(leaf["path"]) for leaf in layout["leaves"]]
