"""Makes a storage or a whole buffer from what was saved, without the code that saved it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from engram import transforms
from engram._arguments import BUILT_IN, MissingPartError, restored
from engram._text import visible
from engram.checkpoint.directory import HOOKED
from engram.checkpoint.reader import Checkpoint
from engram.checkpoint.snapshot import open_snapshot
from engram.data.replay_buffers import checkpointers, samplers, storages, writers
from engram.data.replay_buffers.buffers.buffer import ReplayBuffer
from engram.data.replay_buffers.buffers.tensordict import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.data.replay_buffers.checkpointers import (
    ListStorageCheckpointer,
    StorageCheckpointerBase,
    StorageEnsembleCheckpointer,
)
from engram.data.replay_buffers.samplers import PrioritizedSampler, Sampler, SamplerEnsemble
from engram.data.replay_buffers.state.buffers import PARTS, load_buffer
from engram.data.replay_buffers.storages import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    StorageEnsemble,
    TensorStorage,
)
from engram.data.replay_buffers.writers import Writer, WriterEnsemble
from engram.errors import CheckpointError
from engram.store.counters import Counters
from engram.store.header import StoreFile
from engram.store.places import LaneCount
from engram.transforms.base import InvertedTransform, Transform


def _by_name(package: ModuleType, base: type, *others: type) -> dict[str, Any]:
    """The classes that a package of parts offers, but for the base and others that cannot be made anew."""
    offered = {name: vars(package)[name] for name in package.__all__}
    return {
        name: kind
        for name, kind in offered.items()
        if isinstance(kind, type) and issubclass(kind, base) and kind not in (base, *others)
    }


# What may be made, by the names that a checkpoint has for it: classes of the library's own alone.
_CHECKPOINTERS: dict[str, Any] = {
    kind.format: kind for kind in _by_name(checkpointers, StorageCheckpointerBase, StorageEnsembleCheckpointer).values()
}
_STORAGES = _by_name(storages, Storage, StorageEnsemble, TensorStorage)
_SAMPLERS = _by_name(samplers, Sampler, SamplerEnsemble)
_WRITERS = _by_name(writers, Writer, WriterEnsemble)
_TRANSFORMS: dict[str, Any] = {
    name: kind
    for name, kind in {**transforms.__dict__, "InvertedTransform": InvertedTransform}.items()
    if isinstance(kind, type) and issubclass(kind, Transform) and kind in BUILT_IN
}
# Each with the base whose constructor takes any sampler.
_BUFFERS: dict[str, tuple[Any, Any]] = {
    "ReplayBuffer": (ReplayBuffer, ReplayBuffer),
    "TensorDictReplayBuffer": (TensorDictReplayBuffer, TensorDictReplayBuffer),
    "PrioritizedReplayBuffer": (PrioritizedReplayBuffer, ReplayBuffer),
    "TensorDictPrioritizedReplayBuffer": (TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer),
}
_MUTABLE = ("alpha", "beta", "eps")  # settings of samplers that users change after they were made


def load(
    path: str | os.PathLike[str],
    *,
    snapshot: str | None = None,
    storage: Storage | None = None,
    read_only: bool = False,
) -> Any:
    """The buffer that was saved at a path, made anew: storage, sampler, writer, transforms, batch size, and its state.

    No code of who saved it is needed. What cannot be saved, functions, hooks, and parts of classes of one's own, is
    left out, and one warning names all of it. A mapped store holds rows alone: its buffer has the default parts.

    Args:
        path: a checkpoint that a buffer's `dumps` wrote, or the folder of a mapped store.
        snapshot: of a checkpoint, another than the current one.
        storage: takes the rows instead of one like that which was saved (mapped rows go to a temporary file).
        read_only: of a store, only look at the rows, which another process may be writing.

    Raises:
        CheckpointError: there is no buffer to make: a part was saved alone, or an ensemble of buffers.
        CorruptCheckpointError: a file is not what was saved.
        StorageError: the store is damaged.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp()
        >>> sampler = SliceSampler(slice_len=2, traj_key="episode")
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=8)
        >>> _ = rb.extend(TensorDict({"obs": torch.arange(6.0), "episode": torch.zeros(6, dtype=torch.int64)}, [6]))
        >>> _ = rb.dumps(path)
        >>> again = load(path)
        >>> again.sampler, again.batch_size, len(again)
        (SliceSampler(slice_len=2, strict_length=True, span=(False, False)), 8, 6)
    """
    if StoreFile.is_in(Path(path)):
        if storage is not None or snapshot is not None:
            raise ValueError(
                f"{visible(path)} is a mapped store, which is opened in its place: give no storage and no snapshot"
            )
        return _open_store(path, read_only)
    missing: list[str] = []
    with open_snapshot(path, snapshot) as saved:
        if "writer" not in saved.components or "sampler" not in saved.components:
            raise CheckpointError(f"{path} holds no buffer, but {', '.join(saved.components) or 'a storage'} alone")
        name, parts = saved.name, {part: saved.component(part) for part in ("sampler", "writer")}
        has_generator = saved.component("generator")["state"] is not None
        description = saved.component("buffer") if "buffer" in saved.components else None
        if description is None:
            description = _description_of_older(parts["writer"]["kind"], missing)
        try:
            made = _Parts(description, parts["sampler"], parts["writer"], missing)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise saved.malformed(f"its description of the buffer is malformed ({error!r})") from error
    if storage is None:
        storage = _storage_like(description, path, name, missing)
    buffer = made.buffer(storage, torch.Generator() if has_generator else None)
    with buffer._parts.undisturbed():
        loaded = tuple(part for part in PARTS if part not in made.left_out)
        load_buffer(buffer._saved_form, Path(path), name, loaded, made.loadable_states)
    if missing:
        text = visible(f"{path}: not saved, and so missing in this buffer: {'; '.join(missing)}")
        warnings.warn(text, stacklevel=2)
    return buffer


def _open_store(path: str | os.PathLike[str], read_only: bool) -> Any:
    storage = LazyMemmapStorage.open(path, read_only=read_only)
    layout = storage.layout
    indexed = layout is not None and ("index",) in layout.paths
    return (TensorDictReplayBuffer if indexed else ReplayBuffer)(storage=storage)


class _Parts:
    """The parts of a saved buffer, made anew; what cannot be made is added to `missing`."""

    def __init__(
        self, description: dict[str, Any], sampler: dict[str, Any], writer: dict[str, Any], missing: list[str]
    ) -> None:
        kind, base = description["kind"], _base_of(writer["kind"])
        if sampler["kind"] == "SamplerEnsemble":
            raise CheckpointError(
                "an ensemble of buffers was saved: make its members and the ensemble, and call its loads(path)"
            )
        if kind not in _BUFFERS:
            missing.append(f"the class {kind} of the buffer, which is a {base} here")
            kind = base
        self.left_out: list[str] = []
        self._cls, self._base = _BUFFERS[kind]
        self._batch_size = description["batch_size"]
        self._settings = {**description["settings"]}
        if not issubclass(self._cls, TensorDictReplayBuffer):
            self._settings.pop("priority_key", None)
        missing += description["missing"]
        self._sampler = self._made_sampler(description["sampler"], sampler, missing)
        self._writer = self._made_writer(writer, missing)
        self._transforms: list[Transform] = []
        self._missing_kinds: list[str] = []
        for number, saved in enumerate(description["transforms"]):
            try:
                self._transforms.append(restored(saved, _TRANSFORMS))
            except MissingPartError as error:
                missing.append(f"transform {number}, {error}")
                self._missing_kinds.append(saved["kind"])

    def _made_sampler(self, described: dict[str, Any] | None, saved: dict[str, Any], missing: list[str]) -> Any:
        state = saved["state"]
        try:
            sampler = restored(described or _described_by_state(saved["kind"], state), _SAMPLERS)
        except MissingPartError as error:
            missing.append(f"the sampler, {error}; batches are drawn uniformly")
            self.left_out.append("sampler")
            return None
        for name in _MUTABLE:
            if name in state and isinstance(sampler, PrioritizedSampler):
                setattr(sampler, name, state[name])
        return sampler

    def _made_writer(self, saved: dict[str, Any], missing: list[str]) -> Any:
        kind, state = saved["kind"], saved["state"]
        if kind not in _WRITERS:
            missing.append(f"the writer, {kind}, a class of your own")
            self.left_out.append("writer")
            return None
        if kind == "TensorDictMaxValueWriter":
            return _WRITERS[kind](rank_key=state["rank_key"], reduction=state["reduction"])
        return _WRITERS[kind]()

    def buffer(self, storage: Storage, generator: torch.Generator | None) -> Any:
        """The buffer, without rows."""
        buffer = self._cls.__new__(self._cls)
        self._base.__init__(
            buffer, storage=storage, sampler=self._sampler, writer=self._writer, batch_size=self._batch_size,
            transform=transforms.Compose(*self._transforms), generator=generator, **self._settings,
        )  # fmt: skip
        return buffer

    def loadable_states(self, states: dict[str, Any]) -> dict[str, Any]:
        """The saved states without those of transforms that are missing."""
        state = states.get("transform", {}).get("state")
        if not state:
            return states
        # The n-th of a kind would be another one where one of that kind is missing.
        kinds = {
            transform.kind for transform in self._transforms if type(transform).__name__ not in self._missing_kinds
        }
        entries = [entry for entry in state["transforms"] if entry["kind"] in kinds]
        return {**states, "transform": {"state": {"transforms": entries} if entries else {}}}


def _base_of(writer: str) -> str:
    """The kind of buffer that has such a writer by default."""
    return "TensorDictReplayBuffer" if writer.startswith("TensorDict") else "ReplayBuffer"


def _description_of_older(writer: str, missing: list[str]) -> dict[str, Any]:
    """What can be said of a buffer whose checkpoint does not describe it: engram 0.1 before `load` wrote these."""
    missing.append("the batch size, transforms and other settings, which an older engram did not save")
    return {
        "kind": _base_of(writer),
        "batch_size": None,
        "settings": {},
        "storage": None,
        "sampler": None,
        "transforms": [],
        "missing": [],
    }


def _described_by_state(kind: str, state: dict[str, Any]) -> dict[str, Any]:
    """A sampler, as far as its state says what it was made with."""
    names = {
        "RandomSampler": (),
        "SamplerWithoutReplacement": ("drop_last", "shuffle"),
        "PrioritizedSampler": ("alpha", "beta", "eps", "reduction", "max_priority_within_buffer"),
        "SliceSampler": ("num_slices", "slice_len", "strict_length", "span", "weight", "traj_key"),
    }
    if kind not in names or state.get("boundaries") is not None:
        return {"kind": kind, "arguments": None}
    kwargs = {name: state[name] for name in names[kind] if state.get(name) is not None}
    if "traj_key" not in kwargs:
        kwargs |= {name: state[name] for name in ("end_key", "end_keys") if state.get(name) is not None}
    return {"kind": kind, "arguments": {"args": [None] if kind.startswith("Prioritized") else [], "kwargs": kwargs}}


# ---- the storage ----
def _storage_like(
    description: dict[str, Any], path: str | os.PathLike[str], snapshot: str, missing: list[str]
) -> Storage:
    """An empty storage of the kind and with the arguments that were saved."""
    empty, described = saved_storage(path, snapshot), description["storage"]
    if described is None or described["kind"] not in _STORAGES or described["arguments"] is None:
        if described is not None:
            missing.append(f"the storage, a {described['kind']}, which is a {type(empty).__name__} here")
        return empty
    arguments = {**described["arguments"]}
    device = arguments.get("device", "cpu")
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        missing.append(f"the device {device} of the storage, which this process does not see")
        arguments["device"] = "cpu"
    storage: Storage = _STORAGES[described["kind"]](**arguments)
    storage.checkpointer = empty.checkpointer
    return storage


def saved_storage(
    path: str | os.PathLike[str], snapshot: str | None = None, in_file: Callable[[int], bool] = lambda nbytes: False
) -> Storage:
    """An empty storage that takes the rows of a checkpoint: `storage.loads(path)` reads them.

    It is in memory, or in a temporary file if `in_file` says so of the bytes that its rows take.

    Raises:
        CheckpointError: there is no checkpoint, it holds no rows, or those of several storages.
    """
    with Checkpoint(path).reading(snapshot) as reader:
        saved = reader.body.get("storage")
        if not isinstance(saved, dict):
            raise CheckpointError(f"{path} holds no rows: a part of a buffer was saved there alone")
        kind, state = saved.get("format"), saved.get("state")
        if kind == HOOKED and isinstance(state, dict):
            kind = state.get("saved_by")
        if kind not in _CHECKPOINTERS or not isinstance(state, dict):
            raise CheckpointError(
                f"the rows in {path} were saved as {kind!r}; of {', '.join(map(repr, sorted(_CHECKPOINTERS)))} a "
                "storage can be made. Make the one that was saved, and call its loads(path)"
            )
        try:
            return _storage_for(kind, state, in_file)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise reader.malformed(f"its description of the rows is malformed ({error!r})") from error


def _storage_for(kind: str, state: dict[str, Any], in_file: Callable[[int], bool]) -> Storage:
    counters, layout = Counters(state["counters"]), state.get("layout") or {}
    capacity, lanes = state["counters"]["lane_capacity"], max(1, counters.lanes)
    if kind == ListStorageCheckpointer.format:
        return ListStorage(capacity)
    # Nothing was ever written where the capacity is 0: then any storage takes it.
    rows, ndim, checkpointer = max(1, capacity * counters.envs * lanes), layout.get("ndim", 1), _CHECKPOINTERS[kind]()
    as_saved = LaneCount(lanes) if lanes > 1 else None
    if in_file(counters.rows * layout.get("row_bytes", 0)):
        return LazyMemmapStorage(rows, ndim=ndim, lanes=as_saved, checkpointer=checkpointer)
    return LazyTensorStorage(rows, ndim=ndim, shared=lanes > 1, lanes=as_saved or 1, checkpointer=checkpointer)
