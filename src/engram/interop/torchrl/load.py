"""Loads a directory that TorchRL's `dumps` wrote, without TorchRL and without running anything in it.

`TorchrlDirectory` gives `loads` what a `Snapshot` gives it: plain states of the parts, and rows for the storage.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engram.errors import CheckpointError, CheckpointMisfitError, CorruptCheckpointError
from engram.interop.torchrl.files import (
    META,
    METADATA,
    SUFFIX,
    Bytes,
    Folder,
    SavedKey,
    SavedSteps,
    TensorDictFiles,
    blocks,
    layout_of,
    pytree_steps,
    read_tensordict,
    tensordict_steps,
)
from engram.interop.torchrl.trajectories import SHAPE, flat_steps, h5_steps
from engram.kernel.disk import Checkpoint, StoreFile
from engram.kernel.rows import Receiver, has_memory_maps
from engram.kernel.tools import user_path, visible, warn_user
from engram.pytree import KeyPath

if TYPE_CHECKING:
    from engram.data.replay_buffers.checkpointers import RowSink

    class TableSink(RowSink, Protocol):
        """A storage of packed rows that is filled, and its layout and counters."""

        ndim: int

        def layout_state(self) -> dict[str, Any] | None: ...
        def counters(self) -> dict[str, Any]: ...


Rows = npt.NDArray[Any]

_BUFFER, _PREFETCHED, _STORAGE = "buffer_metadata.json", "prefetch.pkl", "storage"
_NOTHING_PREFETCHED = 64  # bytes that a pickle of an empty queue has at most
_WRITER, _WRITER_FILE, _BEST = "writer", "metadata.json", "current_top_values.memmap"
_SAMPLER, _LIST = "sampler", "_sample_list"
_EPOCH = {"len_storage": torch.int64, "drop_last": torch.bool, "_ran_out": torch.bool}
_GENERATOR, _LARGEST_STATE = "rng_state", 1 << 16


def is_torchrl(path: str | os.PathLike[str]) -> bool:
    """Whether TorchRL's `dumps` of a buffer or a storage wrote this directory, or it has memory-mapped TensorDicts.

    Such are the `scratch_dir` of its LazyMemmapStorage, and what `TensorDict.memmap` writes. False where engram's
    `dumps` wrote it.
    """
    here = os.fspath(user_path(path))
    if not os.path.isdir(here) or Checkpoint(here).has_pointer():
        return False
    storage = os.path.join(here, _STORAGE)
    return (
        os.path.lexists(os.path.join(here, _BUFFER))
        or any(os.path.lexists(os.path.join(place, METADATA)) for place in (here, storage))
        or any(name.endswith(".h5") for name in os.listdir(here))
        or has_memory_maps(here)
    )


@contextmanager
def open_torchrl(
    path: str | os.PathLike[str], receiver: Receiver | None = None, rows: int | None = None
) -> Iterator[TorchrlDirectory]:
    """The directory, for the buffer that loads it; a file is opened when it is needed.

    Args:
        rows: how many steps were written, of all environments, where the files do not say it; None: all that they have
            room for.

    Raises:
        CheckpointError: it holds what engram does not read; the message names the file.
        CorruptCheckpointError: it cannot be what was saved; the message names the file.
    """
    with ExitStack() as stack:
        yield TorchrlDirectory(Folder(os.path.abspath(user_path(path)), stack), stack, receiver, rows)


class TorchrlDirectory:
    """A saved buffer, or its storage alone; `loads` uses it as it uses a `Snapshot`."""

    def __init__(self, folder: Folder, stack: ExitStack, receiver: Receiver | None, rows: int | None) -> None:
        self._folder, self._stack, self._receiver, self._rows = folder, stack, receiver, rows
        self._alone = folder.has(META) or not folder.has(_STORAGE)
        self._storage = folder if self._alone else folder.folder(_STORAGE)
        self._steps: SavedSteps | None = None

    # ---- what `loads` of a buffer calls ----
    def part_states(self, parts: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
        """States for the buffer's parts, and why some of them cannot be taken over."""
        assert self._receiver is not None
        self._warn_of_prefetched()
        states: dict[str, Any] = {}
        refusals: list[str] = []
        readers: dict[str, Callable[[], Any]] = {
            "sampler": functools.partial(self._epoch, self._receiver.storage),
            "writer": self._checked_writer,
        }
        for name in [name for name in readers if name in parts]:
            try:
                states[name] = _translated(name, self._receiver, readers[name]())
            except (ValueError, CheckpointError) as error:
                refusals.append(str(error))
                parts = tuple(part for part in parts if part != name)
        if refusals:
            refusals.append(f"loads(path, parts={parts!r}) takes the rest over")
        if "generator" in parts:
            states["generator"] = {"state": generator_state(self._folder)}
        if "writer" in parts:  # transforms are never saved there
            states["transform"] = {"state": None}
        return states, refusals

    def check_storage(self, checkpointer: Any, sink: Any) -> None:
        """ValueError when the storage cannot take what was saved; changes nothing."""
        with self._as_errors():
            self._transfer(sink).check()

    def load_storage(self, checkpointer: Any, sink: Any) -> None:
        """Fills the storage. One that holds rows is untouched unless everything could be read."""
        with self._as_errors():
            transfer = self._transfer(sink)
            transfer.check()
            if len(sink):
                transfer.read_everything()
            transfer.fill()

    def _transfer(self, sink: TableSink) -> RowTransfer:
        steps = self._open(sink)
        index_key = None if self._receiver is None else self._receiver.index_key
        return RowTransfer(steps, self._position(steps), sink, index_key)

    def saved_steps(self, ndim: int) -> SavedSteps:
        """Keys, capacity and length of the saved steps, from the headers of the files; no step is read.

        Raises:
            CheckpointMisfitError: they were saved with another `ndim`.
        """
        with self._as_errors():
            return self._read(ndim, [])

    def malformed(self, reason: str) -> CorruptCheckpointError:
        """The error for content that cannot be true."""
        return CorruptCheckpointError(self._folder.path, reason)

    # ---- its files ----
    def _open(self, sink: TableSink) -> SavedSteps:
        if not hasattr(sink, "write_block"):
            raise ValueError(
                f"{self._storage.path} holds steps that all have one form; a storage of your own or a ListStorage does "
                "not take them: use a LazyTensorStorage or a LazyMemmapStorage"
            )
        if self._steps is None:
            self._steps = self._read(sink.ndim, _paths(sink.layout_state()))
            if not self._steps.is_counted:
                place, room = visible(self._storage.path), self._steps.length * math.prod(self._steps.inner)
                warn_user(
                    f"{place} has room for {room} steps and does not say how many were written: all are "
                    f"read, also what never was. `engram convert {place} NEW --to store --rows N` takes the first N"
                )
            self._steps.begin(self._position(self._steps).base % self._steps.capacity)
        return self._steps

    def _read(self, ndim: int, buffer_keys: list[KeyPath]) -> SavedSteps:
        folder = self._storage
        _refuse_other_storages(folder)
        files = [name for name in folder.names() if name.endswith(".h5")]
        if self._alone and not files and not folder.has(METADATA):
            return self._mapped_steps(ndim)
        if self._rows is not None:
            raise ValueError(f"{visible(folder.path)} says how many steps it has: rows={self._rows} has no meaning")
        if files:
            if not self._alone:
                folder.only(files[:1])
            steps: SavedSteps = self._stack.enter_context(h5_steps(folder, files[0], ndim, buffer_keys))
            return steps
        metadata = folder.json(METADATA)
        if metadata.get("is_pytree") is True:
            return pytree_steps(folder, ndim, metadata.get("metadata"), metadata.get("len"))
        tree = read_tensordict(folder, (METADATA,))
        if (SHAPE,) not in tree.constants:
            return tensordict_steps(folder, ndim, tree, metadata.get("len"))
        return flat_steps(folder, tree, metadata.get("len"), ndim, buffer_keys)

    def _mapped_steps(self, ndim: int) -> SavedSteps:
        """The steps of memory maps that nobody has counted."""
        folder = self._storage
        if not folder.has(META):
            raise CheckpointError(
                f"{folder.path} holds memory maps (*{SUFFIX}) without a {META}, as TorchRL writes them of data that "
                "are no TensorDict: nothing says their dtypes and shapes. Where you know them, open each with "
                "tensordict.MemoryMappedTensor.from_filename, and extend a buffer by them"
            )
        tree = read_tensordict(folder, (StoreFile.NAME,))
        room = math.prod(tree.batches[()][:ndim])
        rows = room if self._rows is None else self._rows
        if rows is not room and (not isinstance(rows, int) or not 0 < rows <= room):
            raise ValueError(f"{visible(folder.path)} has room for {room} steps, not for rows={rows}")
        steps = tensordict_steps(folder, ndim, tree, rows)
        steps.is_counted = self._rows is not None
        return steps

    @functools.cached_property
    def _writer(self) -> dict[str, Any] | None:
        return None if self._alone else writer_state(self._folder)

    def _checked_writer(self) -> dict[str, Any] | None:
        if not self._alone:
            check_writer(self._folder)
        return self._writer

    def _position(self, steps: SavedSteps) -> RingPosition:
        return RingPosition.of(steps, self._writer, self._folder)

    def _epoch(self, storage: Any) -> SavedEpoch | None:
        epoch = read_epoch(self._folder)
        if epoch is None:
            return None
        with self._as_errors():
            steps = self._open(storage)
        envs, rows = math.prod(steps.inner), None
        if epoch.remaining is not None:
            rows = self._position(steps).sequences(epoch.remaining, steps.capacity, envs)
        return epoch._replace(stored=steps.length * envs, envs=envs, rows=rows)

    def _warn_of_prefetched(self) -> None:
        if self._folder.has(_PREFETCHED) and self._folder.nbytes(_PREFETCHED) > _NOTHING_PREFETCHED:
            path = visible(os.path.join(self._folder.path, _PREFETCHED))
            warnings.warn(
                f"{path} holds batches that were prepared ahead, as a pickle, which engram never opens: they are drawn "
                "anew",
                stacklevel=2,
            )

    @contextmanager
    def _as_errors(self) -> Iterator[None]:
        """Around reads: an error that names or sizes in the files cause is one of the files."""
        try:
            yield
        except (OSError, OverflowError, RecursionError) as error:
            raise CorruptCheckpointError(self._storage.path, f"it cannot be read ({error})") from error


def _refuse_other_storages(folder: Folder) -> None:
    """Errors that say what to do with the storages that are not read."""
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
    """The keys of a storage that has a layout."""
    return [] if layout is None else [tuple(leaf["path"]) for leaf in layout["leaves"]]


# ---- the files of the parts ----
class RingPosition(NamedTuple):
    """Sequences of the steps: the oldest has `base`, the next one to be written `published`."""

    base: int
    published: int
    origin: int

    @classmethod
    def of(cls, steps: SavedSteps, writer: dict[str, Any] | None, folder: Folder) -> RingPosition:
        """The position that the writer's files and those of the steps give."""
        capacity, length = steps.capacity, steps.length
        cursor, count = length % capacity if steps.cursor is None else steps.cursor, length
        if writer is not None:
            here = folder.folder(_WRITER)
            next_slot = here.count(_WRITER_FILE, writer["cursor"])
            count = here.count(_WRITER_FILE, writer["write_count"])
            if length < capacity and next_slot != length:
                raise CheckpointMisfitError(
                    f"{here.path}/{_WRITER_FILE} says that {next_slot} steps lie in the storage, which holds {length}: "
                    "either its ndim is another one, or its rows are not in the order in which they were written"
                )
            if steps.cursor is not None and next_slot % capacity != cursor:
                raise here.corrupt(_WRITER_FILE, f"its cursor is {next_slot}, the storage's {cursor}")
            cursor = next_slot % capacity
        published = count if count >= length and count % capacity == cursor else length + (cursor - length) % capacity
        return cls(published - length, published, (published - count) % (1 << 64))

    def sequences(self, slots: Rows, capacity: int, envs: int) -> Rows | None:
        """sequence * envs + env of stored rows; None where a slot holds no row, or is named twice."""
        times = slots // envs
        sequences = self.base + (times - self.base) % capacity
        if len(slots) and (slots.min() < 0 or times.max() >= capacity or sequences.max() >= self.published):
            return None
        if len(np.unique(slots)) < len(slots):
            return None
        rows: Rows = sequences * envs + slots % envs
        return rows


def writer_state(folder: Folder) -> dict[str, Any] | None:
    """`cursor` and `write_count`, and `rank_key` of a max-value writer; None: the writer of an immutable data set."""
    here = folder.folder(_WRITER) if folder.has(_WRITER) else None
    if here is None or not here.has(_WRITER_FILE):
        return None
    state = here.json(_WRITER_FILE)
    for name in ("cursor", "write_count"):
        here.count(_WRITER_FILE, state.get(name))
    return state


def check_writer(folder: Folder) -> None:
    """Refuses a writer's other files, but for the values that a max-value writer ranked, which the rows have too."""
    if folder.has(_WRITER):
        here = folder.folder(_WRITER)
        here.only((_WRITER_FILE, _BEST))
        if not here.has(_WRITER_FILE):
            raise here.corrupt(_WRITER_FILE, "it is missing")


class SavedEpoch(NamedTuple):
    """The state of a sampler without replacement.

    Attributes:
        remaining: int64 [n], the rows or trajectories that the epoch has left; None between two epochs.
        length: how many rows or trajectories an epoch has.
        stored: rows of the storage.
        envs: environments of the storage.
        rows: `remaining` as sequence * envs + env; None where they are not stored rows.
    """

    remaining: Rows | None
    length: int
    drop_last: bool
    ran_out: bool
    stored: int = 0
    envs: int = 1
    rows: Rows | None = None


def read_epoch(folder: Folder) -> SavedEpoch | None:
    """The state of a sampler without replacement; None: the sampler had no state.

    Raises:
        ValueError: it is the state of another sampler.
    """
    if not folder.has(_SAMPLER):
        return None
    here = folder.folder(_SAMPLER)
    names = here.names()
    for name in names:
        here.refuse_code(name)
    if META not in names:
        content = ", ".join(names)[:200] or "nothing"
        raise ValueError(
            visible(f"{here.path} is of a sampler whose state engram does not take over; it holds {content}")
        )
    tree = read_tensordict(here)
    shapes = {t.path[0]: (t.dtype, t.shape) for t in tree.tensors if len(t.path) == 1 and t.path != (_LIST,)}
    if shapes != {name: (dtype, ()) for name, dtype in _EPOCH.items()} or not _is_list(tree):
        raise ValueError(
            f"{visible(here.path)} is not the state of a sampler without replacement, the only one that is read"
        )
    length, drop_last, ran_out = (_values(tree, name) for name in _EPOCH)
    remaining = None if tree.tensor(_LIST) is None else _values(tree, _LIST)
    return SavedEpoch(remaining, int(length[0]), bool(drop_last[0]), bool(ran_out[0]))


def _is_list(tree: TensorDictFiles) -> bool:
    tensor = tree.tensor(_LIST)
    if tensor is None:
        return tree.constants == {(_LIST,): None} and not tree.stacks
    return tensor.dtype is torch.int64 and len(tensor.shape) == 1 and not tree.constants and not tree.stacks


def _values(tree: TensorDictFiles, name: str) -> Rows:
    tensor = tree.tensor(name)
    if tensor is None or tensor.nested:
        raise ValueError(f"{name} is missing")
    items = tensor.folder.items(tensor.file, tensor.dtype, (*tensor.shape, 1), len(tensor.shape))
    values: Rows = items.read(0, items.count).reshape(-1)
    return values.view(np.int64) if tensor.dtype is torch.int64 else values != 0


def generator_state(folder: Folder) -> torch.Tensor | None:
    """The state of the buffer's own generator; None: it had none."""
    if not folder.has(_GENERATOR):
        return None
    here = folder.folder(_GENERATOR)
    tree = read_tensordict(here)
    tensor = tree.tensor(_GENERATOR)
    if tensor is None or tensor.dtype is not torch.uint8 or len(tensor.shape) != 1 or tensor.shape[0] > _LARGEST_STATE:
        raise here.corrupt(META, "it does not hold the state of a generator")
    items = here.items(tensor.file, tensor.dtype, tensor.shape, 1)
    state = torch.from_numpy(items.read(0, items.count).reshape(-1))
    try:
        torch.Generator().set_state(state)
    except RuntimeError as error:
        raise CheckpointError(f"{here.path} is not the state of a generator of the CPU ({error})") from None
    return state


# ---- states of engram's parts, made of what TorchRL saved ----
def _translated(name: str, receiver: Receiver, saved: Any) -> dict[str, Any]:
    """The state for a part, in the form that engram's checkpoints have; a ValueError says why there is none."""
    by_kind, otherwise = _TRANSLATIONS[name]
    (kind, *parents), own = receiver.part(name)
    translate = next((by_kind[one] for one in (kind, *parents) if one in by_kind), otherwise)
    return {"kind": kind, "state": translate(kind, own, saved)}


def _row_epoch(kind: str, own: Mapping[str, Any], saved: SavedEpoch | None) -> dict[str, Any]:
    if saved is None:
        raise ValueError(f"the sampler is a {kind} here, one without a state was saved")
    epoch = None
    # In TorchRL rows that were added during an epoch end it.
    if saved.remaining is not None and saved.length == saved.stored:
        if saved.rows is None:
            raise ValueError("the epoch there names rows that are not stored, or one of them twice")
        epoch = _listed_epoch(saved.rows, saved.envs)
    shuffle = own["shuffle"]
    return {"epoch": epoch, "ran_out": saved.ran_out, "shuffle": shuffle, "drop_last": saved.drop_last}


def _listed_epoch(rows: Rows, envs: int) -> dict[str, Any]:
    """An epoch whose rows are listed, as a sampler keeps it: sequence * envs + env of rows of the first lane."""
    first = int(rows.min()) // envs if len(rows) else 0
    count = int(rows.max()) // envs + 1 - first if len(rows) else 0
    listed = torch.from_numpy(rows.copy())
    return {
        "key": 0, "ranges": [[first, count]], "position": 0, "incarnation": None, "ring": max(1, count), "moved": [0],
        "listed": listed, "envs": envs,
    }  # fmt: skip


def _slice_epoch(kind: str, own: Mapping[str, Any], saved: SavedEpoch | None) -> dict[str, Any]:
    if saved is None:
        raise ValueError(f"the sampler is a {kind} here, one without a state was saved")
    if saved.remaining is not None and len(saved.remaining) != saved.length:
        raise ValueError("an epoch of slices had begun there: which trajectories are left is not said")
    # What TorchRL saves says nothing of the other settings: they are those of the sampler here.
    return {**own, "epoch": None, "ran_out": saved.ran_out, "drop_last": saved.drop_last}


def _no_sampler_state(kind: str, own: Mapping[str, Any], saved: SavedEpoch | None) -> dict[str, Any]:
    if saved is not None or own:
        other = "one without a state" if saved is None else "one without replacement"
        raise ValueError(f"the sampler is a {kind} here, {other} was saved")
    return {}


def _rank_of_writer(kind: str, own: Mapping[str, Any], saved: dict[str, Any] | None) -> dict[str, Any]:
    if saved is None or "rank_key" not in saved:
        raise ValueError(f"the writer is a {kind} here, one that keeps the newest was saved")
    key = saved["rank_key"]
    path = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, list) else key
    return {"rank_key": path, "reduction": own["reduction"]}  # the order follows from the rows


def _no_writer_state(kind: str, own: Mapping[str, Any], saved: dict[str, Any] | None) -> dict[str, Any]:
    best = saved is not None and "rank_key" in saved
    if best or own:
        other = "one that keeps the best" if best else "one without a state"
        raise ValueError(f"the writer is a {kind} here, {other} was saved")
    return {}


_Translate = Callable[[str, Mapping[str, Any], Any], dict[str, Any]]
# For each part the kinds that have a state of their own, and what holds for all others.
_TRANSLATIONS: dict[str, tuple[dict[str, _Translate], _Translate]] = {
    "sampler": (
        {"SamplerWithoutReplacement": _row_epoch, "SliceSamplerWithoutReplacement": _slice_epoch},
        _no_sampler_state,
    ),
    "writer": ({"TensorDictMaxValueWriter": _rank_of_writer}, _no_writer_state),
}


# ---- rows ----
class RowTransfer:
    """Copies saved steps into a storage; each row gets its new index where the writer stores one."""

    def __init__(self, steps: SavedSteps, position: RingPosition, sink: TableSink, index_key: str | None) -> None:
        self._index = None if index_key is None else _index_leaf(steps, index_key, sink)
        self._steps = steps if self._index is None else _StepsWithIndex(steps, self._index)
        self._position, self._sink = position, sink
        self._layout = layout_of(self._steps)
        self._state = {**self._layout.to_json(), "envs": list(steps.inner), "ndim": sink.ndim}
        nothing = {"seams": [], "border": {"looked": 0, "agreed": None}, "replaced": 0}
        lane = {"base": position.base, "published": position.published, "origin": position.origin, **nothing}
        envs = math.prod(steps.inner)
        self._counters = {"lane_capacity": steps.capacity, "envs": envs, "lanes": [lane]}

    def check(self) -> None:
        """ValueError that lists what does not fit; changes nothing."""
        self._sink.check_restore(self._state, self._counters)

    def read_everything(self) -> None:
        """Reads everything that `fill` will read, so that a file that cannot be read is an error before the load."""
        for _ in blocks(self._steps, self._layout):
            pass

    def fill(self) -> None:
        """Replaces the rows of the storage, which is empty after an error."""
        sink = self._sink
        sink.begin_restore(self._state, self._counters)
        try:
            same = sink.counters()["lane_capacity"] == self._steps.capacity
            if isinstance(self._steps, _StepsWithIndex):
                self._steps.oldest = self._position.base % self._steps.capacity if same else 0
            for step, rows in blocks(self._steps, self._layout):
                sink.write_block(0, self._position.base + step, rows)
            sink.end_restore()
        except BaseException:
            sink.abort_restore()
            raise


class _StepsWithIndex(SavedSteps):
    """Steps with one more key, their own index: the slot of a step, or [time, environment, ...]."""

    def __init__(self, steps: SavedSteps, index: SavedKey) -> None:
        self._steps, self._index = steps, index
        self.kind, self.cursor = steps.kind, steps.cursor
        self.capacity, self.length, self.inner = steps.capacity, steps.length, steps.inner
        self.batches = steps.batches
        self.constants = steps.constants
        self._others = [i for i, leaf in enumerate(steps.leaves) if leaf.path != index.path]
        self.leaves = [*(steps.leaves[i] for i in self._others), index]
        self.oldest = 0

    def begin(self, first: int) -> None:
        self._steps.begin(first)

    def values(self, leaf: int, start: int, stop: int) -> Bytes:
        if leaf < len(self._others):
            return self._steps.values(self._others[leaf], start, stop)
        envs, n = math.prod(self.inner), stop - start
        places = np.zeros((envs, n, 1 + len(self.inner)), np.int64)
        places[:, :, 0] = (self.oldest + np.arange(start, stop)) % self.capacity
        for dim, one in enumerate(np.unravel_index(np.arange(envs), self.inner) if self.inner else ()):
            places[:, :, 1 + dim] = one[:, None]
        return places.view(np.uint8).reshape(envs, n, -1)


def _index_leaf(steps: SavedSteps, key: str, sink: TableSink) -> SavedKey | None:
    """The key of each row's own index; None where the steps are single tensors, or the storage has no such key."""
    if () in [leaf.path for leaf in steps.leaves]:
        return None
    layout = sink.layout_state()
    if layout is not None and [key] not in [leaf["path"] for leaf in layout["leaves"]]:
        return None
    return SavedKey((key,), torch.int64, () if sink.ndim == 1 else (sink.ndim,))
