"""A TensorDict as a directory: `meta.json` says which keys there are; a tensor is a file, a sub-dict a directory."""

from __future__ import annotations

import dataclasses
import re
from typing import Any
from urllib.parse import unquote

import torch

from engram.data.replay_buffers.checkpointers.torchrl.folders import Folder
from engram.errors import CheckpointError
from engram.pytree import KeyPath, format_key

META = "meta.json"
_SUFFIX, _SHAPES = ".memmap", ".shape.memmap"
_TENSORDICT = "<class 'tensordict._td.TensorDict'>"
_CONSTANT = "<class 'tensordict.tensorclass.NonTensorData'>"
_CONSTANTS = "<class 'tensordict.tensorclass.NonTensorStack'>"
_OWN = ("shape", "device", "_type")
_DEEPEST = 64


@dataclasses.dataclass(frozen=True)
class Saved:
    """A tensor: where its file lies, and what it is said to hold. `nested`: its parts' shapes lie in a file, too."""

    path: KeyPath
    folder: Folder
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nested: bool

    @property
    def shapes_file(self) -> str:
        return self.file.removesuffix(_SUFFIX) + _SHAPES


@dataclasses.dataclass
class Tree:
    """What a directory holds: tensors, constants (`[value]`, or values along the batch), batch sizes of (sub-)dicts."""

    tensors: list[Saved] = dataclasses.field(default_factory=list)
    constants: dict[KeyPath, Any] = dataclasses.field(default_factory=dict)
    stacks: dict[KeyPath, list[Any]] = dataclasses.field(default_factory=dict)
    batches: dict[KeyPath, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def tensor(self, *path: str) -> Saved | None:
        return next((t for t in self.tensors if t.path == path), None)


def read_tree(folder: Folder, beside: tuple[str, ...] = ()) -> Tree:
    """The directory as it describes itself; `beside` are other files that lie in it. No value is read.

    CorruptCheckpointError, CheckpointError: it cannot be, or holds what is not read (pickles, unknown classes).
    """
    tree = Tree()
    _read(folder, (), tree, beside)
    return tree


def _read(folder: Folder, path: KeyPath, tree: Tree, beside: tuple[str, ...]) -> None:
    if len(path) > _DEEPEST:
        raise folder.bad(META, f"keys are nested deeper than {_DEEPEST}")
    meta = folder.json(META)
    kind = meta.get("_type")
    if kind != _TENSORDICT:
        return _read_class(folder, path, tree, beside, meta)
    tree.batches[path] = folder.shape(META, meta.get("shape"))
    files = _by_key(folder)
    used = {META, *beside}
    for key, said in meta.items():
        if key in _OWN and not isinstance(said, dict):
            continue
        if not isinstance(said, dict):
            raise folder.bad(META, f"{key!r:.80} is neither a tensor nor a directory")
        used |= _entry(folder, (*path, key), said, files, tree)
    folder.only(used)


def _read_class(folder: Folder, path: KeyPath, tree: Tree, beside: tuple[str, ...], meta: dict[str, Any]) -> None:
    """A tensorclass, whose name means nothing here: its fields are read as a TensorDict."""
    kind = meta.get("_type")
    if meta.keys() != {"_type"} or not isinstance(kind, str) or not re.fullmatch(r"<class '[^']+'>", kind):
        raise CheckpointError(
            f"{folder.path} holds {kind!r:.120}; engram reads TensorDicts, and tensorclasses whose fields are tensors. "
            "Store plain TensorDicts (td.contiguous() of a lazy stack) and save again"
        )
    if not folder.has("_tensordict"):
        raise CheckpointError(f"{folder.path} holds {kind}, which engram does not know")
    folder.only({META, "_tensordict", *beside})
    _read(folder.folder("_tensordict"), path, tree, ())


def _by_key(folder: Folder) -> dict[str, str]:
    """Names of files and directories by the key that they belong to."""
    found: dict[str, str] = {}
    for name in folder.names():
        key = unquote(name.removesuffix(_SUFFIX))
        if name.endswith(_SHAPES) or (name == META and not folder.is_folder(name)):
            continue
        if key in found:
            raise folder.bad(name, f"{found[key]} is the same key")
        found[key] = name
    return found


def _entry(folder: Folder, path: KeyPath, said: dict[str, Any], files: dict[str, str], tree: Tree) -> set[str]:
    """Takes one entry in; returns the names that belong to it."""
    name = files.get(path[-1], f"{path[-1]}{_SUFFIX}")
    if "type" not in said:
        dtype, shape = folder.dtype(META, said.get("dtype")), folder.shape(META, said.get("shape"))
        nested = said.get("is_nested")
        if type(nested) is not bool:
            raise folder.bad(META, f"{format_key(path)} does not say whether it is nested")
        tree.tensors.append(Saved(path, folder, name, dtype, shape, nested))
        return {name, tree.tensors[-1].shapes_file} if nested else {name}
    below = folder.folder(name)
    if said["type"] == "NonTensorData":
        tree.constants[path] = _constant(below, _CONSTANT)
    elif said["type"] == "NonTensorStack":
        values = _constant(below, _CONSTANTS)
        if not isinstance(values, list):
            raise below.bad(META, "it does not hold a list")
        tree.stacks[path] = values
    else:
        _read(below, path, tree, ())
    return {name}


def _constant(folder: Folder, kind: str) -> Any:
    """A value that stands in the JSON itself."""
    folder.only({META})
    meta = folder.json(META)
    if meta.get("_type") != kind or "data" not in meta:
        raise CheckpointError(
            f"{folder.path} holds {meta.get('_type')!r:.120} without a JSON value; engram reads constants that are JSON"
        )
    return meta["data"]
