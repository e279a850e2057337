"""The files of TorchRL's directories: folders, TensorDicts as files, and the steps that lie in them by columns.

Nothing in them has a checksum, and nothing is believed: names, dtypes, shapes and sizes are checked before memory is
taken, no link is followed, no class is looked up, and no pickle is opened.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import torch

from engram.errors import CheckpointError, CheckpointMisfitError, CorruptCheckpointError
from engram.kernel.rows import LeafSpec, RowLayout
from engram.kernel.tools import check_memory, open_regular
from engram.pytree import KeyPath, TreeSpec, format_key

META, METADATA = "meta.json", "storage_metadata.json"
SUFFIX = ".memmap"  # of a tensor's file
_SHAPES = ".shape.memmap"
_SINGLE = "_-single-tensor-_"
_TENSORDICT = "<class 'tensordict._td.TensorDict'>"
_CONSTANT = "<class 'tensordict.tensorclass.NonTensorData'>"
_CONSTANTS = "<class 'tensordict.tensorclass.NonTensorStack'>"
_OWN = ("shape", "device", "_type")
_DEEPEST = 64

Bytes = npt.NDArray[np.uint8]

_MOST_JSON = 1 << 24
_MOST_ITEMS = 1 << 56
_MOST_DIMS = 32
_BLOCK_BYTES = 1 << 21  # that stay in the cache on their way
_CODE = (".pkl", ".pickle", ".pt", ".pth")

DTYPES: dict[str, torch.dtype] = {
    str(dtype): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
        torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    )
}  # fmt: skip


class Folder:
    """An open directory that another program wrote: no link is followed, and files are sized before they are read.

    Errors name the file: a CorruptCheckpointError what cannot be true, a CheckpointError what engram does not read.

    What is opened is closed with `stack`.
    """

    def __init__(self, path: str, stack: ExitStack, fd: int | None = None) -> None:
        self.path, self._stack = path, stack
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if fd is None else fd
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened ({error.strerror})") from error
        stack.callback(os.close, self._fd)

    def names(self) -> list[str]:
        """Names of its files and folders, without hidden ones."""
        return sorted(name for name in os.listdir(self._fd) if not name.startswith("."))

    def has(self, name: str) -> bool:
        return name in os.listdir(self._fd)

    def nbytes(self, name: str) -> int:
        """Size of a file that is not opened."""
        try:
            return os.stat(_plain(name), dir_fd=self._fd, follow_symlinks=False).st_size
        except (OSError, ValueError) as error:
            raise self.corrupt(name, f"it cannot be found ({error})") from None

    def size(self, name: str, nothing: int) -> int:
        """Size of a file; where `nothing` is 0, the file may be missing."""
        return self.nbytes(name) if nothing or self.has(name) else 0

    def is_folder(self, name: str) -> bool:
        """Whether it is a directory, and not a link to one."""
        return self.has(name) and stat.S_ISDIR(os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mode)

    def folder(self, name: str) -> Folder:
        try:
            fd = os.open(_plain(name), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        except (OSError, ValueError) as error:
            raise self.corrupt(name, f"it is not a directory, or a link to one ({error})") from None
        return Folder(os.path.join(self.path, name), self._stack, fd)

    def only(self, expected: Collection[str]) -> None:
        """Refuses files that are not expected: their content would be lost silently."""
        for name in self.names():
            if name not in expected:
                self.refuse_code(name)
                raise self.corrupt(name, "nothing in the directory's JSON files says what it is")

    def refuse_code(self, name: str) -> None:
        if name.endswith(_CODE):
            raise CheckpointError(
                f"{os.path.join(self.path, name)} is a pickle, which runs code when it is read: engram opens none. "
                "Save the buffer again without what is in it (data that are tensors, numbers and strings need none)"
            )

    def json(self, name: str) -> dict[str, Any]:
        """A small JSON file that holds an object."""
        with self.file(name) as file:
            if os.fstat(file.fileno()).st_size > _MOST_JSON:
                raise self.corrupt(name, f"it has more than {_MOST_JSON} bytes")
            text = file.read(_MOST_JSON)
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.corrupt(name, f"it is not JSON ({error})") from None
        if not isinstance(content, dict):
            raise self.corrupt(name, "it does not hold a JSON object")
        return content

    def file(self, name: str) -> BinaryIO:
        try:
            return open(open_regular(_plain(name), dir_fd=self._fd), "rb", buffering=0)
        except (OSError, ValueError) as error:
            raise self.corrupt(name, f"it cannot be opened ({error})") from None

    def items(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], lead: int) -> ItemFile:
        """A file of values in C order, as items: the dimensions after the first `lead` are one item."""
        count, item = math.prod(shape[:lead]), math.prod(shape[lead:]) * dtype.itemsize
        if not count * item:
            return ItemFile(-1, os.path.join(self.path, name), count, item)
        file = self._stack.enter_context(self.file(name))
        size = os.fstat(file.fileno()).st_size
        if size != count * item:
            raise self.corrupt(name, f"it has {size} bytes, {count * item} are {dtype} {list(shape)}")
        return ItemFile(file.fileno(), os.path.join(self.path, name), count, item)

    def dtype(self, name: str, value: Any) -> torch.dtype:
        """The dtype of this name; `name` is the file that gives it."""
        dtype: torch.dtype | None = DTYPES.get(value) if isinstance(value, str) else None
        if dtype is None:
            raise self.corrupt(name, f"{value!r:.80} is not a dtype that engram stores ({', '.join(DTYPES)})")
        return dtype

    def shape(self, name: str, value: Any) -> tuple[int, ...]:
        """A shape; `name` is the file that gives it."""
        if not isinstance(value, list) or len(value) > _MOST_DIMS or any(type(d) is not int or d < 0 for d in value):
            raise self.corrupt(name, f"{value!r:.80} is not a shape")
        if math.prod(max(1, d) for d in value) > _MOST_ITEMS:
            raise self.corrupt(name, f"{value!r:.80} is larger than any storage")
        return tuple(value)

    def count(self, name: str, value: Any) -> int:
        """A number of steps; `name` is the file that gives it."""
        if type(value) is not int or not 0 <= value <= _MOST_ITEMS:
            raise self.corrupt(name, f"{value!r:.80} is not a count")
        return value

    def corrupt(self, name: str, reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(os.path.join(self.path, name), reason)


class ItemFile:
    """A file of items of one size, one after the other; its size was checked."""

    def __init__(self, fd: int, path: str, count: int, nbytes: int) -> None:
        self._fd, self._path, self.count, self.nbytes = fd, path, count, nbytes

    def read(self, start: int, stop: int) -> Bytes:
        """uint8 [stop - start, nbytes]."""
        check_memory((stop - start) * self.nbytes, self._path)
        out = np.empty((stop - start, self.nbytes), np.uint8)
        view, at = out.reshape(-1).data, start * self.nbytes
        while len(view):
            try:
                got = os.preadv(self._fd, [view[: 1 << 30]], at)
            except OSError as error:
                raise CorruptCheckpointError(self._path, f"it cannot be read ({error.strerror})") from error
            if not got:
                raise CorruptCheckpointError(self._path, f"it ends at byte {at}; it was longer before")
            view, at = view[got:], at + got
        return out


def _plain(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not a name of a file")
    return name


@dataclasses.dataclass(frozen=True)
class TensorFile:
    """A tensor's file, with the dtype and shape that the JSON gives it. `nested`: shapes of its parts are in a file."""

    path: KeyPath
    folder: Folder
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nested: bool

    @property
    def shapes_file(self) -> str:
        return self.file.removesuffix(SUFFIX) + _SHAPES


@dataclasses.dataclass
class TensorDictFiles:
    """A TensorDict as a directory: tensors, constants, constants that vary along the batch (`stacks`), batch sizes."""

    tensors: list[TensorFile] = dataclasses.field(default_factory=list)
    constants: dict[KeyPath, Any] = dataclasses.field(default_factory=dict)
    stacks: dict[KeyPath, list[Any]] = dataclasses.field(default_factory=dict)
    batches: dict[KeyPath, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def tensor(self, *path: str) -> TensorFile | None:
        return next((t for t in self.tensors if t.path == path), None)


def read_tensordict(folder: Folder, beside: tuple[str, ...] = ()) -> TensorDictFiles:
    """A directory as its `meta.json` describes it; `beside` are other files that may be in it. Reads no values.

    Raises:
        CorruptCheckpointError: it cannot be true.
        CheckpointError: it holds what engram does not read: pickles, unknown classes.
    """
    tree = TensorDictFiles()
    _read(folder, (), tree, beside)
    return tree


def _read(folder: Folder, path: KeyPath, tree: TensorDictFiles, beside: tuple[str, ...]) -> None:
    if len(path) > _DEEPEST:
        raise folder.corrupt(META, f"keys are nested deeper than {_DEEPEST}")
    meta = folder.json(META)
    kind = meta.get("_type")
    if kind != _TENSORDICT:
        return _read_class(folder, path, tree, beside, meta)
    tree.batches[path] = folder.shape(META, meta.get("shape"))
    files = _by_key(folder)
    used = {META, *beside}
    for key, entry in meta.items():
        if key in _OWN and not isinstance(entry, dict):
            continue
        if not isinstance(entry, dict):
            raise folder.corrupt(META, f"{key!r:.80} is neither a tensor nor a directory")
        used |= _entry(folder, (*path, key), entry, files, tree)
    folder.only(used)


def _read_class(
    folder: Folder, path: KeyPath, tree: TensorDictFiles, beside: tuple[str, ...], meta: dict[str, Any]
) -> None:
    """Reads the fields of a tensorclass as a TensorDict; its name is not looked up."""
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
    """The file or directory of each key."""
    names: dict[str, str] = {}
    for name in folder.names():
        key = unquote(name.removesuffix(SUFFIX))
        if name.endswith(_SHAPES) or (name == META and not folder.is_folder(name)):
            continue
        if key in names:
            raise folder.corrupt(name, f"{names[key]} is the same key")
        names[key] = name
    return names


def _entry(
    folder: Folder, path: KeyPath, entry: dict[str, Any], files: dict[str, str], tree: TensorDictFiles
) -> set[str]:
    """Adds one entry of `meta.json` to the tree; returns the names of its files."""
    name = files.get(path[-1], f"{path[-1]}{SUFFIX}")
    if "type" not in entry:
        dtype, shape = folder.dtype(META, entry.get("dtype")), folder.shape(META, entry.get("shape"))
        nested = entry.get("is_nested")
        if type(nested) is not bool:
            raise folder.corrupt(META, f"{format_key(path)} does not say whether it is nested")
        tree.tensors.append(TensorFile(path, folder, name, dtype, shape, nested))
        return {name, tree.tensors[-1].shapes_file} if nested else {name}
    below = folder.folder(name)
    if entry["type"] == "NonTensorData":
        tree.constants[path] = _constant(below, _CONSTANT)
    elif entry["type"] == "NonTensorStack":
        values = _constant(below, _CONSTANTS)
        if not isinstance(values, list):
            raise below.corrupt(META, "it does not hold a list")
        tree.stacks[path] = values
    else:
        _read(below, path, tree, ())
    return {name}


def _constant(folder: Folder, kind: str) -> Any:
    """A value that is written in the JSON itself."""
    folder.only({META})
    meta = folder.json(META)
    if meta.get("_type") != kind or "data" not in meta:
        raise CheckpointError(
            f"{folder.path} holds {meta.get('_type')!r:.120} without a JSON value; engram reads constants that are JSON"
        )
    return meta["data"]


class SavedKey(NamedTuple):
    """A key of saved steps: its dtype, and the shape of one step."""

    path: KeyPath
    dtype: torch.dtype
    shape: tuple[int, ...]


class SavedSteps(ABC):
    """Steps as they were saved, oldest first: step 0 is the oldest."""

    leaves: list[SavedKey]
    constants: Mapping[KeyPath, Any] = MappingProxyType({})
    batches: Mapping[KeyPath, tuple[int, ...]] = MappingProxyType({})  # of (sub-)dicts, after those of the steps
    kind: str = "td"  # of the root and its dicts; else "dict"
    capacity: int  # time steps
    length: int
    is_counted: bool = True  # whether it is known how many steps were written, and not only how many have room
    inner: tuple[int, ...]  # the environments
    cursor: int | None  # the slot of the next step; None: the writer's files say it

    def begin(self, first: int) -> None:
        """Sets the slot of the oldest step, for files in the order of slots."""
        return

    @abstractmethod
    def values(self, leaf: int, start: int, stop: int) -> Bytes:
        """Values of a key, of the steps `start` to `stop`: uint8 [envs, stop - start, bytes]."""


def capacity_and_length(folder: Folder, name: str, shape: tuple[int, ...], ndim: int, length: Any) -> tuple[int, int]:
    """Capacity and length in time steps; the data begin with `shape` and hold `length` steps of all environments."""
    if len(shape) < ndim:
        raise CheckpointMisfitError(f"{folder.path} has steps of shape {list(shape)}, this storage ndim={ndim}")
    envs = math.prod(shape[1:ndim])
    steps = folder.count(name, length)
    if not shape[0]:
        raise folder.corrupt(name, "its capacity is 0 steps")
    if not envs or steps % envs or steps // envs > shape[0]:
        raise CheckpointMisfitError(
            f"{folder.path}: {steps} steps do not lie in {list(shape[:ndim])}; they have another ndim"
        )
    return shape[0], steps // envs


def layout_of(steps: SavedSteps) -> RowLayout:
    """The layout of a row that holds one of these steps."""
    root = _Branch()
    for number, leaf in enumerate(steps.leaves):
        root.put(leaf.path, TreeSpec("leaf", leaf=number))
    for path, value in steps.constants.items():
        root.put(path, TreeSpec("constant", constant=value))
    for path in steps.batches:
        root.branch(path)
    specs = [LeafSpec(*leaf) for leaf in steps.leaves]
    return RowLayout(root.node(steps.kind, steps.batches, ()), specs)


class _Branch:
    """A dict of the layout's form, while its entries are being added."""

    def __init__(self) -> None:
        self._below: dict[Any, _Branch | TreeSpec] = {}
        self._alone: TreeSpec | None = None

    def put(self, path: KeyPath, node: TreeSpec) -> None:
        if not path:
            self._alone = node
            return
        first, *rest = path
        if rest:
            self.branch((first,)).put(tuple(rest), node)
        else:
            self._below[first] = node

    def branch(self, path: KeyPath) -> _Branch:
        if not path:
            return self
        below = self._below.setdefault(path[0], _Branch())
        if isinstance(below, TreeSpec):
            raise ValueError(f"{path[0]!r} is a tensor and a dict")
        return below.branch(path[1:])

    def node(self, kind: str, batches: Mapping[KeyPath, tuple[int, ...]], path: KeyPath) -> TreeSpec:
        if self._alone is not None:
            return self._alone
        below, numbered = list(self._below.items()), all(type(k) is int for k in self._below)
        if numbered:
            below.sort()
        children = tuple(b if isinstance(b, TreeSpec) else b.node(kind, batches, (*path, k)) for k, b in below)
        if below and numbered:
            return TreeSpec("tuple", children=children)
        return TreeSpec(kind, keys=tuple(k for k, _ in below), children=children, batch=batches.get(path, ()))


def blocks(steps: SavedSteps, layout: RowLayout) -> Iterator[tuple[int, Bytes]]:
    """First step and packed rows of each block, oldest first: uint8 [envs, n, row bytes]. Valid until the next."""
    envs = math.prod(steps.inner)
    most = max(1, min(steps.length, _BLOCK_BYTES // (envs * layout.payload_bytes)))
    memory = np.zeros((envs, most, layout.payload_bytes), np.uint8)  # fresh pages cost more than the copy
    for start in range(0, steps.length, most):
        stop = min(steps.length, start + most)
        rows = memory[:, : stop - start]
        for number, leaf in enumerate(layout.leaves):
            values = steps.values(number, start, stop)
            if leaf.dtype is torch.bool:  # a byte that is neither 0 nor 1 is not a bool
                values = (values != 0).view(np.uint8)
            rows[:, :, leaf.offset : leaf.offset + leaf.nbytes] = values
        yield start, rows


class ColumnSteps(SavedSteps):
    """Steps in the order of their slots, with one file for each key: [capacity, *environments, ...]."""

    def __init__(
        self, folder: Folder, ndim: int, tensors: list[TensorFile], tree: TensorDictFiles, kind: str, length: Any
    ) -> None:
        if not tensors:
            raise CheckpointError(f"{folder.path} holds no tensor")
        lead = tree.batches[()] if () in tree.batches else tensors[0].shape
        self.capacity, self.length = capacity_and_length(folder, METADATA, lead, ndim, length)
        self.inner, self.cursor, self.kind = tuple(lead[1:ndim]), None, kind
        self.leaves: list[SavedKey] = []
        self._columns: list[ItemFile] = []
        self._first = 0
        lead = (self.capacity, *self.inner)
        for tensor in tensors:
            if tensor.nested or tensor.shape[:ndim] != lead:
                raise tensor.folder.corrupt(
                    META, f"{format_key(tensor.path)} is not of the shape {list(lead)} of the others"
                )
            self.leaves.append(SavedKey(tensor.path, tensor.dtype, tensor.shape[ndim:]))
            self._columns.append(tensor.folder.items(tensor.file, tensor.dtype, tensor.shape, 1))
        self.batches = {path: self._inner_batch(folder, path, lead, tree) for path in tree.batches}
        self.constants = {**tree.constants, **{p: self._constant(folder, p, v) for p, v in tree.stacks.items()}}

    def begin(self, first: int) -> None:
        self._first = first

    def values(self, leaf: int, start: int, stop: int) -> Bytes:
        column, envs = self._columns[leaf], math.prod(self.inner)
        at, n = (self._first + start) % max(1, self.capacity), stop - start
        read = column.read(at, min(at + n, self.capacity))
        if len(read) < n:  # on from the first slot
            read = np.concatenate([read, column.read(0, n - len(read))])
        values: Bytes = read.reshape(n, envs, column.nbytes // envs).transpose(1, 0, 2)
        return values

    def _inner_batch(
        self, folder: Folder, path: KeyPath, lead: tuple[int, ...], tree: TensorDictFiles
    ) -> tuple[int, ...]:
        """The batch dimensions of a (sub-)dict after those of the steps, which all that is in it has."""
        batch, above = tree.batches[path], tree.batches.get(path[:-1], lead) if path else lead
        if batch[: len(above)] != above:
            raise folder.corrupt(
                META, f"{format_key(path)} has the batch size {list(batch)}, what it is in {list(above)}"
            )
        inner = batch[len(lead) :]
        for leaf in self.leaves:
            if leaf.path[: len(path)] == path and leaf.shape[: len(inner)] != inner:
                shape = [*lead, *leaf.shape]
                raise folder.corrupt(META, f"{format_key(leaf.path)} has the shape {shape} in a batch of {list(batch)}")
        return inner

    def _constant(self, folder: Folder, path: KeyPath, values: list[Any]) -> Any:
        stored = values[: self.length] if self.length else values[:1]
        for _ in self.inner:
            stored = [value for row in stored if isinstance(row, list) for value in row]
        if not stored or any(value != stored[0] for value in stored):
            raise CheckpointError(
                f"{folder.path}: {format_key(path)} holds values that differ from step to step and are not tensors; "
                "engram reads constants only. Leave the key out and save again"
            )
        return stored[0]


def tensordict_steps(folder: Folder, ndim: int, tree: TensorDictFiles, length: Any) -> ColumnSteps:
    """The steps of a storage of TensorDicts."""
    return ColumnSteps(folder, ndim, tree.tensors, tree, "td", length)


def pytree_steps(folder: Folder, ndim: int, metadata: Any, length: Any) -> ColumnSteps:
    """The steps of a storage of pytrees: its JSON joins keys with dots, its files lie in directories."""
    if not isinstance(metadata, dict):
        raise folder.corrupt(METADATA, "it does not say which tensors there are")
    places = dict(_files(folder, ()))
    joined: dict[str, KeyPath] = {}
    for path in places:
        if joined.setdefault(".".join(path), path) != path:
            raise folder.corrupt(METADATA, f"{'.'.join(path)!r} stands for two files")
    unknown = [path for name, path in joined.items() if name not in metadata]
    if unknown:
        raise folder.corrupt(METADATA, f"it does not say what {'/'.join(unknown[0])}{SUFFIX} is")
    tensors = []
    for name, entry in metadata.items():
        if not isinstance(entry, dict):
            raise folder.corrupt(METADATA, f"{name!r:.80} has no dtype and shape")
        path = joined.get(name, tuple(name.split(".")))
        here = places.get(path, folder)
        dtype, shape = folder.dtype(METADATA, entry.get("dtype")), folder.shape(METADATA, entry.get("shape"))
        tensors.append(TensorFile(path, here, f"{path[-1]}{SUFFIX}", dtype, shape, False))
    return ColumnSteps(folder, ndim, _numbered(tensors), TensorDictFiles(), "dict", length)


def _files(folder: Folder, path: KeyPath) -> list[tuple[KeyPath, Folder]]:
    """The path of each tensor file below a directory, and the directory that holds it."""
    if len(path) > _DEEPEST:
        raise folder.corrupt("", f"directories are nested deeper than {_DEEPEST}")
    files: list[tuple[KeyPath, Folder]] = []
    for name in folder.names():
        if folder.is_folder(name):
            files += _files(folder.folder(name), (*path, name))
        elif name.endswith(SUFFIX):
            files.append(((*path, name.removesuffix(SUFFIX)), folder))
        elif path or name != METADATA:
            folder.only({METADATA} if not path else set())
    return files


def _numbered(tensors: list[TensorFile]) -> list[TensorFile]:
    """The tensors with the indices of tuples as numbers: keys "0", "1", ... are a tuple. A single tensor has no key."""
    if len(tensors) == 1 and tensors[0].path == (_SINGLE,):
        only = tensors[0]
        return [TensorFile((), only.folder, only.file, only.dtype, only.shape, False)]
    below: dict[KeyPath, set[str]] = {}
    for tensor in tensors:
        for depth, part in enumerate(tensor.path):
            below.setdefault(tensor.path[:depth], set()).add(part)
    tuples = {path for path, parts in below.items() if parts == {str(i) for i in range(len(parts))}}
    renamed = []
    for t in tensors:
        path = tuple(int(part) if t.path[:depth] in tuples else part for depth, part in enumerate(t.path))
        renamed.append(TensorFile(path, t.folder, t.file, t.dtype, t.shape, False))
    return renamed
