"""Makes a storage or a whole buffer from what was saved, without the code that saved it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from engram import _forms as forms
from engram import transforms
from engram._arguments import BUILT_IN, DESCRIPTION, MissingPartError, restored
from engram._system import user_path
from engram._text import visible
from engram.checkpoint.directory import HOOKED
from engram.checkpoint.reader import Checkpoint
from engram.checkpoint.snapshot import PART, open_snapshot
from engram.data.replay_buffers import checkpointers, samplers, storages, writers
from engram.data.replay_buffers.buffers.buffer import ReplayBuffer
from engram.data.replay_buffers.buffers.rate_limiters import DESCRIBED_LIMIT, limiter_described
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
from engram.errors import CheckpointError, CheckpointMisfitError
from engram.store.counters import Counters
from engram.store.header import StoreFile
from engram.store.places import LaneCount, memory_device
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

# What a checkpoint may say of a buffer: these names, and values of these kinds. None of them is a path, and none opens,
# takes over or deletes what is there: rows are loaded into memory or a temporary file, whatever the file says.
_SIZE = forms.nullable(forms.integer(1, 1 << 56))
_COMPACT = forms.record(
    {
        "keys": forms.nullable(forms.list_of(forms.path)),
        "frames": forms.list_of(forms.fields(forms.nullable(forms.path), forms.integer(1))),
        "n_steps": forms.nullable(forms.integer(1)),
    }
)
_OF_TABLE: dict[str, forms.Form] = {
    "max_size": _SIZE, "max_bytes": _SIZE, "ndim": forms.integer(1, 64), "lanes": _SIZE, "shared_init": forms.boolean,
    "compact": _COMPACT,
}  # fmt: skip
_DEVICE = forms.nullable(forms.text)
_STORAGE_ARGUMENTS: dict[str, forms.Form] = {
    "LazyTensorStorage": forms.arguments({**_OF_TABLE, "device": _DEVICE, "shared": forms.boolean}),
    "LazyMemmapStorage": forms.arguments(_OF_TABLE),
    "ListStorage": forms.arguments({"max_size": _SIZE, "copy": forms.boolean, "device": _DEVICE}),
    "LazyStackStorage": forms.arguments(
        {"max_size": _SIZE, "stack_dim": forms.integer(-64, 64), "device": _DEVICE},
    ),
    "CompressedListStorage": forms.arguments(
        {
            "max_size": _SIZE, "compression_level": forms.integer(), "device": _DEVICE,
            **dict.fromkeys(("compression_fn", "decompression_fn"), forms.one_of(None)),
        },
    ),
}  # fmt: skip
_SETTINGS = forms.arguments(
    {
        "prefetch": forms.nullable(forms.integer(0, 1 << 20)), "dim_extend": forms.nullable(forms.integer(0, 64)),
        "pin_memory": forms.boolean, "track_generations": forms.boolean, "priority_key": forms.key,
        "rate_limiter": DESCRIBED_LIMIT,
    },
)  # fmt: skip
_OF_STORAGE = forms.record({"kind": forms.text, "arguments": forms.nullable(forms.mapping_of(forms.anything))})
_DESCRIPTION = forms.record(
    {
        "kind": forms.text, "batch_size": forms.nullable(forms.integer(1)), "settings": _SETTINGS,
        "storage": forms.nullable(_OF_STORAGE), "sampler": forms.nullable(DESCRIPTION),
        "transforms": forms.list_of(DESCRIPTION), "missing": forms.list_of(forms.text),
    },
)  # fmt: skip


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
        storage: takes the rows instead of one like that which was saved. Without it mapped rows go to a temporary file,
            as a checkpoint names no place on this machine; a `LazyMemmapStorage(n, scratch_dir=...)` keeps them.
        read_only: of a store, only look at the rows, which another process may be writing.

    Raises:
        CheckpointError: there is no buffer to make: a part was saved alone, or an ensemble of buffers.
        CorruptCheckpointError: a file is not what was saved, or says what no save writes.
        CheckpointMisfitError: the parts do not fit the storage, or each other.
        StorageError: the store is damaged; or there is no room for a storage as large as the saved one.

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
    path = user_path(path)
    if StoreFile.is_in(path):
        if storage is not None or snapshot is not None:
            raise ValueError(
                f"{visible(path)} is a mapped store, which is opened in its place: give no storage and no snapshot"
            )
        return _open_store(path, read_only)
    missing: list[str] = []
    with open_snapshot(path, snapshot) as saved:
        if "writer" not in saved.components or "sampler" not in saved.components:
            raise CheckpointError(f"{path} holds no buffer, but {', '.join(saved.components) or 'a storage'} alone")
        components = {name: saved.component(name) for name in ("sampler", "writer", "transform", "generator")}
        description = saved.component("buffer") if "buffer" in saved.components else None
        try:
            _check_components(components)
            if description is None:
                description = _description_of_older(components["writer"]["kind"], missing)
            elif components["sampler"]["kind"] != "SamplerEnsemble":
                forms.check(_DESCRIPTION, description, "the description of the buffer")
            made = _Parts(description, components["sampler"], components["writer"], missing)
            arguments = _storage_arguments(description["storage"], missing)
        except ValueError as error:
            raise saved.malformed(f"its description of the buffer is malformed: {error}") from error
        name = saved.name
    if storage is None:
        storage = _storage_like(description["storage"], arguments, saved_storage(path, name), missing)
    generator = None if components["generator"]["state"] is None else torch.Generator()
    try:
        buffer = made.buffer(storage, generator)
    except ValueError as error:
        raise CheckpointMisfitError(f"the parts saved in {path} do not fit their storage", [str(error)]) from error
    with buffer._parts.undisturbed():
        loaded = tuple(part for part in PARTS if part not in made.left_out)
        load_buffer(buffer._saved_form, path, name, loaded, made.loadable_states)
    if missing:
        text = visible(f"{path}: not saved, and so missing in this buffer: {'; '.join(missing)}")
        warnings.warn(text, stacklevel=2)
    return buffer


_NAMED = forms.record({"kind": forms.text})
_OF_TRANSFORMS = forms.nullable(forms.record({}, {"transforms": forms.list_of(_NAMED)}))


def _check_components(components: dict[str, Any]) -> None:
    """WrongFormError where what is saved of the parts is not what every save says of them."""
    for name, component in components.items():
        forms.check(PART, component, f"the {name}")
    for name in ("sampler", "writer"):
        forms.check(_NAMED, components[name], f"the {name}")
    forms.check(_OF_TRANSFORMS, components["transform"]["state"], "the state of the transforms")


def _open_store(path: str | os.PathLike[str], read_only: bool) -> Any:
    storage = LazyMemmapStorage.open(path, read_only=read_only)
    layout = storage.layout
    indexed = layout is not None and ("index",) in layout.paths
    return (TensorDictReplayBuffer if indexed else ReplayBuffer)(storage=storage)


_RANK = forms.record({"rank_key": forms.key, "reduction": forms.text})


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
        if (limit := self._settings.pop("rate_limiter", None)) is not None:
            self._settings["rate_limiter"] = limiter_described(limit)
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
        kind, state = saved["kind"], saved["state"]
        if kind in _SAMPLERS:
            forms.check(forms.record({}, dict.fromkeys(_MUTABLE, forms.number)), state, "the state of the sampler")
        try:
            sampler = restored(described or _described_by_state(kind, state), _SAMPLERS)
        except MissingPartError as error:
            missing.append(f"the sampler, {error}; batches are drawn uniformly")
            self.left_out.append("sampler")
            return None
        for name in _MUTABLE:
            if kind in _SAMPLERS and name in state and isinstance(sampler, PrioritizedSampler):
                setattr(sampler, name, state[name])
        return sampler

    def _made_writer(self, saved: dict[str, Any], missing: list[str]) -> Any:
        kind, state = saved["kind"], saved["state"]
        if kind not in _WRITERS:
            missing.append(f"the writer, {kind}, a class of your own")
            self.left_out.append("writer")
            return None
        if kind == "TensorDictMaxValueWriter":
            forms.check(_RANK, state, "the state of the writer")
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
        if not state or "transforms" not in state:
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
def _storage_arguments(described: dict[str, Any] | None, missing: list[str]) -> dict[str, Any] | None:
    """The arguments for a storage of the saved kind; None: they were not saved, or are those of a class of the user's.

    Raises:
        ValueError: one of them is none that a checkpoint may say.
    """
    if described is None or described["kind"] not in _STORAGES or described["arguments"] is None:
        return None
    arguments = {**described["arguments"]}
    forms.check(_STORAGE_ARGUMENTS[described["kind"]], arguments, f"the arguments of the {described['kind']}")
    device = arguments.get("device")
    if device not in (None, "auto") and not _is_seen(device):
        missing.append(f"the device {device} of the storage, which this process does not see")
        arguments["device"] = "cpu"
    return arguments


def _is_seen(device: str) -> bool:
    """Whether rows can be kept on a device."""
    try:
        memory_device(device)
    except ValueError:
        return False
    return True


def _storage_like(
    described: dict[str, Any] | None, arguments: dict[str, Any] | None, empty: Storage, missing: list[str]
) -> Storage:
    """An empty storage of the kind and with the arguments that were saved; else one that takes the rows, `empty`."""
    if described is None or arguments is None:
        if described is not None:
            missing.append(f"the storage, a {described['kind']}, which is a {type(empty).__name__} here")
        return empty
    try:
        storage: Storage = _STORAGES[described["kind"]](**arguments)
    except ValueError as error:
        raise CheckpointError(f"the saved storage cannot be made: {error}; give another one by storage=") from error
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
        except ValueError as error:
            raise reader.malformed(f"its description of the rows is malformed: {error}") from error


_ROWS = forms.record(
    {"counters": forms.anything},
    {"layout": forms.nullable(forms.record({}, {"ndim": forms.integer(1, 64), "row_bytes": forms.integer()}))},
)


def _storage_for(kind: str, state: dict[str, Any], in_file: Callable[[int], bool]) -> Storage:
    forms.check(_ROWS, state, "the state of the storage")
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
