"""A buffer's whole state as one snapshot: the states of its components and the rows of its storage."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from engram import _forms as forms
from engram.checkpoint.directory import REMOVED, to_json
from engram.checkpoint.encoding import CODECS, EncodedArrays, Encoder, decode
from engram.checkpoint.hooks import load_through_hooks, save_through_hooks
from engram.checkpoint.protocols import RestorePlan, StorageCheckpointerBase
from engram.checkpoint.reader import Checkpoint, SnapshotReader
from engram.checkpoint.writer import SnapshotWriter, saving
from engram.errors import CheckpointError, CheckpointMisfitError, CorruptCheckpointError
from engram.store.layout import MalformedLayoutError

_COMPONENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,239}", re.ASCII)  # that can be a file's


def save_snapshot(
    path: str | os.PathLike[str],
    components: Mapping[str, Any],
    storage: tuple[StorageCheckpointerBase[Any, Any], Any] | None = None,
    *,
    keep_last: int = 1,
    began: Callable[[SnapshotWriter], None] | None = None,
) -> str:
    """Saves states of components and a storage (its checkpointer, its source) at `path`; returns the snapshot's name.

    `components` maps names (letters, digits, `_`, `-`, `.`) to states as `encoding.encode` takes them. All of them are
    encoded before anything is written. Errors as those of `writer.saving`; TypeError for what cannot be encoded.
    The caller keeps components and source still until this returns. `began` is called when the path is ours.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     name = save_snapshot(path, {"writer": {"cursor": 5}})
    ...     with open_snapshot(path) as snapshot:
    ...         print(snapshot.name, snapshot.components["writer"])
    g-000001 {'cursor': 5}
    """
    trees, arrays = _encode_components(components)
    nbytes = len(to_json(trees)) + sum([some.nbytes for some in arrays.values()])
    with saving(path, keep_last=keep_last) as writer:
        if began is not None:
            began(writer)
        plan = None if storage is None else save_through_hooks(*storage, writer.previous.get("storage"))
        writer.need(nbytes if plan is None else nbytes + plan.nbytes)
        for name, some in arrays.items():
            if not some.empty:
                writer.write_file(_blob_file(name), some.blocks())
        entry = None if plan is None else plan.write(writer)
        if _has_removed(entry):
            writer.features.add(REMOVED)
        writer.body = {"components": trees, "storage": entry}
    return writer.name


def _has_removed(entry: Any) -> bool:
    """Whether the entry of a storage in a manifest, or of a member of it, says of rows that they were removed."""
    state = entry.get("state") if isinstance(entry, dict) else None
    if not isinstance(state, dict):
        return False
    counters, members = state.get("counters"), state.get("members")
    lanes = counters.get("lanes") if isinstance(counters, dict) else None
    if isinstance(lanes, list) and any(isinstance(lane, dict) and "removed" in lane for lane in lanes):
        return True
    return isinstance(members, list) and any(map(_has_removed, members))


class SavedPart(Protocol):
    """A part of a buffer that is saved alone."""

    part: Any  # has `state_dict` and `load_state_dict`
    kind: str | None  # that its state is saved under
    damage: type[ValueError]  # which errors at a saved state say that this is damaged

    def differences(self, state: Any) -> list[str]: ...

    def load(self, state: Any) -> None: ...


#: The state of a part as a checkpoint has it, with the name that it is saved under where it has one.
PART = forms.record({"state": forms.anything}, {"kind": forms.nullable(forms.text)})


def save_part(path: str | os.PathLike[str], name: str, part: SavedPart) -> None:
    """Saves the state of one part as a snapshot of its own, as `save_snapshot` does."""
    save_snapshot(path, {name: {"kind": part.kind, "state": part.part.state_dict()}})


def load_part(path: str | os.PathLike[str], name: str, part: SavedPart) -> None:
    """Gives a part the state that `save_part` saved.

    Raises:
        CorruptCheckpointError: a file is not what was saved, or cannot be the state of a part of the library's.
        CheckpointMisfitError: the state is that of another kind of part, or does not fit this one.
    """
    with open_snapshot(path) as saved:
        body = saved.component(name)
        with as_damage(saved.malformed, "such a part", part.damage):
            forms.check(PART, body, f"the {name}")
            kind, state = body.get("kind"), body["state"]
            different = [f"a {part.kind} here, a {kind} there"] if kind != part.kind else part.differences(state)
        if different:
            raise CheckpointMisfitError(f"{path} does not fit this {name}", different)
        part.load(state)


@contextmanager
def as_damage(
    malformed: Callable[[str], Exception], owner: str, damage: type[ValueError] = ValueError
) -> Iterator[None]:
    """Around a look at a state whose checksums are right: one that `owner` cannot have saved is reported as damage.

    Args:
        damage: the errors that say so; the library's own classes raise a ValueError for nothing else.
    """
    try:
        yield
    except CheckpointError:
        raise
    except damage as error:
        raise malformed(f"a state in it cannot be that of {owner}: {error}") from error


@contextmanager
def open_snapshot(path: str | os.PathLike[str], snapshot: str | None = None) -> Iterator[Snapshot]:
    """The current snapshot at `path`, or the one named; no save removes it inside the block.

    Errors as those of `reader.reading`. The order that leaves a buffer untouched when anything is wrong: read the
    components that are needed (each is verified), check that they fit, `check_storage`, `load_storage`, then set them.
    """
    with Checkpoint(path).reading(snapshot) as reader:
        yield Snapshot(reader)


class Snapshot:
    """An open snapshot. `components` reads and verifies a state when it is looked up."""

    def __init__(self, reader: SnapshotReader) -> None:
        self.name = reader.name
        self.components: Mapping[str, Any] = _Components(reader)
        self._reader = reader
        self._plan: tuple[StorageCheckpointerBase[Any, Any], RestorePlan[Any]] | None = None

    @property
    def storage_format(self) -> str | None:
        """The `format` of the checkpointer that wrote the storage; None when no storage was saved."""
        storage = self._storage()
        return None if storage is None else str(storage["format"])

    def component(self, name: str) -> Any:
        """The state of a component; CheckpointError where there is none of this name."""
        if name not in self.components:
            saved = ", ".join(self.components) or "none"
            raise CheckpointError(f"{self._reader.path('')} holds no {name}; its components are {saved}")
        return self.components[name]

    def malformed(self, reason: str) -> CorruptCheckpointError:
        """The error for a snapshot whose checksums are right and whose content cannot be true."""
        return self._reader.malformed(reason)

    def part_states(self, parts: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
        """States of a buffer's parts as they were saved; and, for other formats, why parts cannot be taken over."""
        states: dict[str, Any] = {
            name: self.component(name) for name in ("sampler", "writer", "generator") if name in parts
        }
        if "writer" in parts:
            states["transform"] = self.component("transform")
        return states, []

    def check_storage(self, checkpointer: StorageCheckpointerBase[Any, Any], sink: Any) -> None:
        """ValueError where the sink cannot take the storage that was saved; changes nothing."""
        with self._as_malformed():
            self._restore_plan(checkpointer).check(sink)

    def load_storage(self, checkpointer: StorageCheckpointerBase[Any, Any], sink: Any) -> None:
        """Fills the sink. One that holds rows is untouched unless everything was verified before; an empty one is
        empty again after an error.
        """
        with self._as_malformed():
            self._restore_plan(checkpointer).load(sink)

    def _restore_plan(self, checkpointer: StorageCheckpointerBase[Any, Any]) -> RestorePlan[Any]:
        """The plan to load the storage: made once for this checkpointer, however often it is checked and loaded."""
        if self._plan is None or self._plan[0] is not checkpointer:
            self._plan = checkpointer, load_through_hooks(checkpointer, self._reader, self._storage_entry())
        return self._plan[1]

    @contextmanager
    def _as_malformed(self) -> Iterator[None]:
        """Around uses of the saved layout: one that cannot be a layout is damage, not a difference."""
        try:
            yield
        except MalformedLayoutError as error:
            raise self.malformed(str(error)) from error

    def verify(self) -> None:
        """Compares every file with its checksum; a CorruptCheckpointError names the first that differs."""
        self._reader.check()

    def _storage_entry(self) -> dict[str, Any]:
        storage = self._storage()
        if storage is None:
            raise CheckpointMisfitError(f"{self._reader.path('')} holds no storage; load the other parts only")
        return storage

    def _storage(self) -> dict[str, Any] | None:
        storage = self._reader.body.get("storage")
        whole = isinstance(storage, dict) and {"format", "state"} <= storage.keys()
        if storage is not None and not (whole and isinstance(storage["state"], dict)):
            raise self.malformed("it does not say how the storage was saved")
        return storage


class _Components(Mapping[str, Any]):
    def __init__(self, reader: SnapshotReader) -> None:
        self._reader = reader
        self._trees: dict[str, Any] = reader.body.get("components", {})
        if not isinstance(self._trees, dict):
            raise reader.malformed("its components are not named states")
        for name in self._trees:
            if not _COMPONENT_NAME.fullmatch(name):
                raise reader.malformed("its components are not named states")
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._decoded:
            self._decoded[name] = _read_component(self._reader, name, self._trees[name])
        return self._decoded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._trees)

    def __len__(self) -> int:
        return len(self._trees)


def _encode_components(components: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, EncodedArrays]]:
    """Each component's state as JSON, and its arrays."""
    encoder, trees, arrays = Encoder(CODECS), {}, {}
    for name, state in components.items():
        if not isinstance(name, str) or not _COMPONENT_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name for a component; use letters, digits, '_', '-' and '.'")
        arrays[name] = EncodedArrays()
        trees[name] = encoder.encode(state, arrays[name], name)
    return trees, arrays


def _read_component(reader: SnapshotReader, name: str, tree: Any) -> Any:
    blob_file = _blob_file(name)
    try:
        if blob_file not in reader.files:
            return decode(tree, None, CODECS)
        with reader.open(blob_file) as file:
            state = decode(tree, file, CODECS)
            file.finish()
            return state
    except ValueError as error:
        raise reader.malformed(f"component {name}: {error}") from error


def _blob_file(name: str) -> str:
    return f"components/{name}.bin"
