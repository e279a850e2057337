"""Hooks of checkpointers: what users stored passes save hooks on its way to disk, and load hooks on its way back.

Without hooks a checkpointer writes and reads its own form. What save hooks made of the rows has any form, so that it is
written as one encoded value (`docs/format.md`, "Content that save hooks made").
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

from engram import pytree
from engram._system import advise_disk, check_memory, map_privately
from engram._text import log, visible
from engram.checkpoint.directory import HOOKED, HOOKS, from_json, to_json
from engram.checkpoint.encoding import CONTENT_CODECS, EncodedArrays, Encoder, decode, plain_content, tensor_bytes
from engram.checkpoint.protocols import (
    Hook,
    ItemSink,
    ItemSource,
    RestorePlan,
    Rows,
    RowSink,
    RowSource,
    SavePlan,
    StorageCheckpointerBase,
)
from engram.checkpoint.reader import JSON_AS_OBJECTS, BytesInMemory, SnapshotReader
from engram.checkpoint.writer import SnapshotWriter
from engram.errors import CheckpointError, CheckpointMisfitError
from engram.store.counters import Counters, check_sequences
from engram.store.layout import LayoutState, RowLayout

_TEXT, _ARRAYS = "storage/hooked.json", "storage/hooked.bin"
_BLOCK_BYTES = 1 << 24
_IN_MEMORY_BYTES = 1 << 24  # rows that are copied to memory, not to a file

Checkpointer = StorageCheckpointerBase[Any, Any]


# ---- a save or a load, with and without hooks ----
class StorageSave(Protocol):
    """The save of a storage: its entry in the manifest is what `write` returns."""

    @property
    def nbytes(self) -> int: ...
    def write(self, writer: SnapshotWriter) -> dict[str, Any]: ...


def save_through_hooks(checkpointer: Checkpointer, source: Any, previous: Any) -> StorageSave:
    """The save of `source`; `previous` is the storage's entry in the manifest of the current snapshot, or None."""
    if checkpointer.save_hooks:
        if not isinstance(source, RowSource | ItemSource):
            raise _no_rows(source)
        if Counters(source.counters()).rows:
            return _RowSave(checkpointer, source) if isinstance(source, RowSource) else _ItemSave(checkpointer, source)
    same_form = isinstance(previous, dict) and previous.get("format") == checkpointer.format
    before = previous.get("state") if same_form else None
    return _PlainSave(checkpointer, checkpointer.plan_save(source, before if isinstance(before, dict) else None))


def load_through_hooks(checkpointer: Checkpointer, reader: SnapshotReader, entry: dict[str, Any]) -> RestorePlan[Any]:
    """The load of a storage, of which `entry` stands in the manifest.

    Raises:
        CheckpointMisfitError: a checkpointer of another form saved it.
    """
    form, state = entry["format"], entry["state"]
    if form == HOOKED:
        return _HookedLoad(checkpointer, reader, state)
    if form != checkpointer.format:
        raise CheckpointMisfitError(
            f"the storage in {reader.path('')} was saved as {form!r}, {type(checkpointer).__name__} reads "
            f"{checkpointer.format!r}; use the checkpointer that saved it"
        )
    plan = checkpointer.plan_restore(reader, state)
    return _PlainLoad(checkpointer, plan) if checkpointer.load_hooks else plan


def _no_rows(storage: Any) -> TypeError:
    return TypeError(
        f"hooks need a storage with all methods of a RowSource and RowSink, or of an ItemSource and ItemSink; a "
        f"{type(storage).__name__} lacks some"
    )


class _PlainSave:
    """A save without hooks."""

    def __init__(self, checkpointer: Checkpointer, plan: SavePlan) -> None:
        self._format, self._plan, self.nbytes = checkpointer.format, plan, plan.nbytes

    def write(self, writer: SnapshotWriter) -> dict[str, Any]:
        return {"format": self._format, "state": self._plan.write(writer)}


# ---- what hooks get ----
class Order(NamedTuple):
    """How rows stand in what hooks get: the oldest is at `oldest`; hooks are told `shift` and `is_full`."""

    oldest: int
    shift: int
    is_full: bool


def order_of(counters: dict[str, Any], single_steps: bool) -> Order:
    """The order of slots of one lane of steps; else oldest first: several lanes, or items of several steps each."""
    checked, capacity = Counters(counters), counters["lane_capacity"]
    sizes = [checked.stop(lane) - checked.first(lane) for lane in range(checked.lanes)]
    is_full = bool(capacity) and all(size == capacity for size in sizes)
    if len(sizes) != 1 or not single_steps:
        return Order(0, 0, is_full)
    if is_full or (capacity and checked.first(0) % capacity + sizes[0] > capacity):
        return Order(checked.stop(0) % capacity, checked.stop(0) % capacity, True)
    return Order(0, sizes[0], False)


def _apply(hooks: list[Hook], value: Any, order: Order, what: str, **offered: Callable[[], Any]) -> Any:
    """`value` after the hooks. Of `offered` a hook gets the results that it has arguments for."""
    for hook in hooks:
        for name, told in (("shift", order.shift), ("is_full", order.is_full)):
            if hasattr(hook, name):  # as hooks of TorchRL's, and of users who know these
                setattr(hook, name, told)
        value = hook(value, **{name: make() for name, make in offered.items() if _takes(hook, name)})
        if value is None:
            name = visible(f"{hook!r:.80}")
            raise TypeError(f"the {what} hook {name} returned None; a hook returns what is to be used instead")
    return value


def _takes(hook: Hook, name: str) -> bool:
    """Whether a hook has an argument of this name, beside the first one, which its user has not given yet."""
    if isinstance(hook, functools.partial) and name in hook.keywords:
        return False
    try:
        _, *others = inspect.signature(hook).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == name and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in others)


class _HeldRows:
    """Rows that do not change, as hooks get them: uint8 [envs, n, bytes], in the order that `order` says."""

    def __init__(
        self, rows: Rows, layout: RowLayout, env_shape: tuple[int, ...], counters: dict[str, Any], order: Order
    ) -> None:
        self._rows, self._layout, self._env_shape = rows, layout, env_shape
        self.counters, self.order, self.steps = counters, order, rows.shape[1]

    def batch(self) -> Any:
        """The stored steps, `[*envs, n]`, without a copy; writes into them change no stored row."""
        lead, by_env = (*self._env_shape, self.steps), torch.from_numpy(self._rows)
        rows = by_env.view(*lead, by_env.shape[-1])
        leaves = []
        for leaf in self._layout.leaves:
            raw = rows[..., leaf.offset : leaf.offset + leaf.nbytes]
            if not leaf.nbytes:
                leaves.append(torch.zeros((*lead, *leaf.shape), dtype=leaf.dtype, device="cpu"))
            else:
                leaves.append(raw.view(leaf.dtype).view(*lead, *leaf.shape))
        return self._layout.build(leaves, lead)

    def sequences(self) -> Tensor | None:
        """int64 [envs, n]: the sequences that the rows carry; None where they carry none."""
        at = self._layout.sequence_offset
        return None if at is None else torch.from_numpy(self._rows)[..., at : at + 8].view(torch.int64)[..., 0]


class _RowFile:
    """Room for rows, uint8 [envs, n, bytes of a row, aligned]: few in memory, many in a file without a name."""

    def __init__(self, layout: RowLayout, envs: int, steps: int, folder: str | None) -> None:
        self.stride = -(-layout.payload_bytes // layout.alignment) * layout.alignment
        self._shape, self._row_bytes = (envs, steps, self.stride), layout.payload_bytes
        self._nbytes = math.prod(self._shape)
        in_memory = self._nbytes <= _IN_MEMORY_BYTES
        self._memory = np.zeros(self._shape, np.uint8) if in_memory else None
        self._file = None if in_memory else tempfile.TemporaryFile(dir=folder, prefix="engram-", buffering=0)  # noqa: SIM115

    def put(self, at: int, rows: Rows) -> None:
        """Writes rows [envs, k, bytes] to positions from `at` on; several threads may, to others each."""
        if self._memory is not None:
            self._memory[:, at : at + rows.shape[1], : self._row_bytes] = rows
            return
        assert self._file is not None
        if self.stride > self._row_bytes:
            rows = np.pad(rows, ((0, 0), (0, 0), (0, self.stride - self._row_bytes)))
        for env in range(self._shape[0]):
            _write_at(self._file.fileno(), (env * self._shape[1] + at) * self.stride, rows[env])
        advise_disk(self._file.fileno(), "DONTNEED")

    def put_from(self, begin: int, first: int, n: int, oldest: int, rows: Rows) -> None:
        """As `put`, of a ring at `begin`: the `first`-th oldest of its `n` rows and those after it; the oldest is at
        `oldest`.
        """
        at = (first + oldest) % n
        before_wrap = min(rows.shape[1], n - at)
        self.put(begin + at, rows[:, :before_wrap])
        if before_wrap < rows.shape[1]:
            self.put(begin, rows[:, before_wrap:])

    def rows(self) -> Rows:
        """All rows; changes of them stay in this process's memory."""
        if self._memory is not None:
            return self._memory
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size < self._nbytes:
            os.ftruncate(self._file.fileno(), self._nbytes)
        return map_privately(self._file.fileno(), self._nbytes).reshape(self._shape)

    def room(self) -> Rows:
        """Memory for all rows that a hook may fill: of a file, so that much of it can be on disk."""
        if self._memory is not None:
            return self._memory
        assert self._file is not None
        os.posix_fallocate(self._file.fileno(), 0, self._nbytes)  # a full disk is an error here, and a crash later
        return np.memmap(self._file, np.uint8, "r+", shape=self._shape).view(np.ndarray)


def _write_at(fd: int, at: int, rows: Rows) -> None:
    view = np.ascontiguousarray(rows).reshape(-1).data
    while len(view):
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done


def _hold(source: RowSource, layout: RowLayout, folder: str) -> tuple[_HeldRows, Callable[[], None]]:
    """The rows of a storage while they are saved, and a check that they have not changed until then.

    They are seen where they lie if no other process, and no thread beside a save in the background, can write there;
    else they are copied to `folder`, without those that others overwrite meanwhile.
    """
    counters = json_copy(source.counters())
    checked, order = Counters(counters), order_of(counters, single_steps=not layout.within)
    env_shape = tuple((source.layout_state() or {}).get("envs", []))
    first, n = (checked.first(0), checked.stop(0) - checked.first(0)) if checked.lanes else (0, 0)
    capacity = counters["lane_capacity"]
    if checked.lanes == 1 and not layout.within and (not order.is_full or n == capacity):
        private = source.private_rows()
        if private is not None:
            start = 0 if order.is_full else first % capacity
            in_place = private.rows[:, start : start + n]
            return _HeldRows(in_place, layout, env_shape, counters, order), private.check
    rows = _copied(source.read_block, layout, counters, order.oldest, folder)
    left = json_copy(source.counters())
    if left != counters:  # others have overwritten the oldest rows before they were read
        read = functools.partial(_read_copied, rows, checked, order.oldest, layout.payload_bytes)
        rows, order = _copied(read, layout, left, 0, folder), Order(0, 0, False)
        if checked.lanes == 1 and not layout.within:
            order = Order(0, rows.shape[1], False)
    return _HeldRows(rows, layout, env_shape, left, order), lambda: None


def _copied(
    read: Callable[[int, int, int], Rows], layout: RowLayout, counters: dict[str, Any], oldest: int, folder: str
) -> Rows:
    """Copies of the rows that `counters` count, one lane after the other, the oldest of a single one at `oldest`."""
    checked, begin = Counters(counters), 0
    sizes = [checked.stop(lane) - checked.first(lane) for lane in range(checked.lanes)]
    file = _RowFile(layout, checked.envs, sum(sizes), folder)
    for lane, size in enumerate(sizes):
        first = checked.first(lane)
        for start, stop in _blocks(first, checked.stop(lane), checked.envs * layout.payload_bytes):
            rows = read(lane, start, stop)
            _check_block(rows, (checked.envs, stop - start, layout.payload_bytes))
            file.put_from(begin, start - first, size, oldest, rows)
        begin += size
    return file.rows()


def _read_copied(rows: Rows, counters: Counters, oldest: int, row_bytes: int, lane: int, start: int, stop: int) -> Rows:
    """Rows of a lane, by sequence, of what `_copied` returned."""
    begin = sum(counters.stop(i) - counters.first(i) for i in range(lane))
    first, size = counters.first(lane), counters.stop(lane) - counters.first(lane)
    found: Rows = rows[:, begin + (np.arange(start - first, stop - first) + oldest) % size, :row_bytes]
    return found


def _check_block(rows: Rows, expected: tuple[int, ...]) -> None:
    if rows.dtype != np.uint8 or rows.shape != expected:
        raise ValueError(f"the storage gave a block of {rows.dtype} {rows.shape}, expected uint8 {expected}")


def _blocks(start: int, stop: int, bytes_per_step: int) -> Iterator[tuple[int, int]]:
    steps = max(1, _BLOCK_BYTES // max(1, bytes_per_step))
    for begin in range(start, stop, steps):
        yield begin, min(begin + steps, stop)


def items_as_batch(items: list[Any]) -> Any:
    """Copies of items as one batch `[n, ...]`, where they are TensorDicts, tensors, or dicts and tuples of tensors
    that stack; else a list of them. TensorDicts that differ in keys or shapes are a lazy stack.
    """
    kinds = set(map(type, items))
    if len(kinds) == 1 and all(isinstance(leaf, Tensor) for leaf in _leaves(items[0])):
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            return pytree.stack(items, 0)
    copies = [pytree.clone(item) for item in items]
    if all(isinstance(item, TensorDictBase) for item in items):
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            return LazyStackedTensorDict.lazy_stack(copies, 0)
    return copies


def _has_steps(item: Any) -> bool:
    """Whether an item is a TensorDict, or of a tensorclass, with batch dimensions: it may hold several steps."""
    is_batch = isinstance(item, TensorDictBase) or pytree.is_tensorclass(item)
    return is_batch and len(item.batch_size) > 0


def _leaves(item: Any) -> list[Any]:
    try:
        return [value for _, value in pytree.describe(item, 0)[1]]
    except (TypeError, ValueError):
        return [None]


# ---- content that save hooks made ----
def _write_content(writer: SnapshotWriter, content: Any, sequences: Tensor | list[int] | None) -> None:
    arrays = EncodedArrays()
    encoder = Encoder(CONTENT_CODECS, plain_content)
    tree = {
        "content": encoder.encode(content, arrays, "what the save hooks returned"),
        "sequences": encoder.encode(sequences, arrays, "sequences"),
    }
    text = to_json(tree)
    writer.need(len(text) + arrays.nbytes)
    writer.write_file(_TEXT, [text])
    writer.write_file(_ARRAYS, arrays.blocks())
    writer.features.add(HOOKS)


def _read_content(reader: SnapshotReader) -> tuple[Any, Any]:
    """The content that `_write_content` wrote, verified; large arrays are read when they are used."""
    check_memory(JSON_AS_OBJECTS * reader.nbytes(_TEXT), _TEXT)
    text = np.empty(reader.nbytes(_TEXT), np.uint8)
    reader.read_into(_TEXT, text)
    arrays = BytesInMemory(reader.mapped(_ARRAYS))
    try:
        tree = decode(from_json(text.tobytes()), arrays, CONTENT_CODECS)
        return tree["content"], tree["sequences"]
    except (KeyError, TypeError, ValueError) as error:
        raise reader.malformed(f"{_TEXT}: {error}") from error


def json_copy(value: Any) -> Any:
    """A copy as JSON has it: the storage's own objects may change before the manifest is written."""
    return from_json(to_json(value))


class _Save:
    """One save of a storage through hooks."""

    def __init__(self, checkpointer: Checkpointer, source: Any) -> None:
        self._checkpointer, self._source = checkpointer, source
        self._hooks = list(checkpointer.save_hooks)

    def _entry(self, kind: str, counters: dict[str, Any], order: Order, **more: Any) -> dict[str, Any]:
        about = {"kind": kind, "saved_by": self._checkpointer.format, "save_hooks": len(self._hooks)}
        return {"format": HOOKED, "state": {**about, "counters": counters, "order": order._asdict(), **more}}

    def _applied(self, value: Any, order: Order, folder: str) -> Any:
        return _apply(self._hooks, value, order, "save", path=lambda: _made(Path(folder) / "hooks"))


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


class _RowSave(_Save):
    """One save of rows through hooks."""

    @property
    def nbytes(self) -> int:
        """The bytes of the rows; the size of what hooks make of them is known later."""
        layout = self._source.row_layout()
        return 0 if layout is None else Counters(self._source.counters()).rows * int(layout.payload_bytes)

    def write(self, writer: SnapshotWriter) -> dict[str, Any]:
        layout = self._source.row_layout()
        with writer.scratch_folder() as folder:
            rows, check = _hold(self._source, layout, folder)
            if not rows.steps:  # others have overwritten all of them meanwhile
                return _PlainSave(self._checkpointer, self._checkpointer.plan_save(self._source)).write(writer)
            content = self._applied(rows.batch(), rows.order, folder)
            is_class = pytree.is_tensorclass(content)
            _write_content(writer, content, rows.sequences())
            check()
            del content  # it may lie in the folder
        saved_layout = json_copy(self._source.layout_state())
        return self._entry("rows", rows.counters, rows.order, layout=saved_layout, tensorclass=is_class)


class _ItemSave(_Save):
    """One save of items through hooks."""

    nbytes = 0  # known when the hooks have returned

    def write(self, writer: SnapshotWriter) -> dict[str, Any]:
        items, sequences = self._source.items(), self._source.sequences()
        counters = json_copy(self._source.counters())
        if Counters(counters).rows != len(items) or Counters(counters).lanes != 1:
            raise ValueError(f"the storage gave {len(items)} items, its counters say {Counters(counters).rows}")
        order = order_of(counters, single_steps=not any(map(_has_steps, items)))
        with writer.scratch_folder() as folder:
            by_slot = [*items[len(items) - order.oldest :], *items[: len(items) - order.oldest]]
            content = self._applied(items_as_batch(by_slot), order, folder)
            is_class = pytree.is_tensorclass(content)
            _write_content(writer, content, sequences if any(sequences) else None)
            del content
        return self._entry("items", counters, order, tensorclass=is_class)


# ---- loading ----
class _SavedRows(NamedTuple):
    """The layout and counters of rows that pass load hooks."""

    layout: LayoutState
    counters: dict[str, Any]
    order: Order

    @property
    def env_shape(self) -> tuple[int, ...]:
        return tuple(self.layout["envs"])

    @property
    def lead(self) -> tuple[int, ...]:
        """The batch dimensions of the rows."""
        return (*self.env_shape, Counters(self.counters).rows // max(1, math.prod(self.env_shape)))


class _FittedRows(NamedTuple):
    """Content that can be stored."""

    layout: LayoutState
    leaves: list[Tensor]  #: of `layout`, [*envs, n, ...] each
    sequences: Tensor | None  #: [envs, n]


class _Load:
    """One load of a storage through hooks; `save_hooks` is how many changed what was saved."""

    def __init__(self, checkpointer: Checkpointer, save_hooks: int) -> None:
        self._hooks, self._save_hooks = list(checkpointer.load_hooks), save_hooks

    def _fit_rows(self, content: Any, sequences: Tensor | None, saved: _SavedRows, sink: RowSink) -> _FittedRows:
        """Content after the hooks, as rows; a CheckpointMisfitError where it is not rows, or does not fit the sink."""
        here = sink.row_layout()
        content = _apply(self._hooks, content, saved.order, "load", out=lambda: _room(here, saved))
        dims = len(saved.lead)
        try:
            made = RowLayout.of(content, dims)
            leaves = made.fitting(content, dims)
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise self._misfit(content, f"steps of the shape {list(saved.lead)}", f" ({error})") from error
        if any(tuple(leaf.shape[:dims]) != saved.lead for leaf in leaves):
            raise self._misfit(content, f"steps of the shape {list(saved.lead)}")
        layout, stored = saved.layout, saved.layout.parse()
        by_path = {leaf.path: tensor for leaf, tensor in zip(made.leaves, leaves, strict=True)}
        if {(x.path, x.dtype, x.shape) for x in made.leaves} == {(x.path, x.dtype, x.shape) for x in stored.leaves}:
            leaves = [by_path[leaf.path] for leaf in stored.leaves]
        else:
            made = made if sequences is None else made.with_sequence()
            layout = LayoutState({**made.to_json(), "envs": list(saved.env_shape), "ndim": dims})
        sink.check_restore(layout, saved.counters)
        return _FittedRows(layout, leaves, sequences)

    def _fit_items(self, content: Any, counters: dict[str, Any], order: Order, sink: ItemSink) -> list[Any]:
        """Content after the hooks, as items of their own memory, oldest first; errors as `_fit_rows`."""
        content, n = _apply(self._hooks, content, order, "load", out=lambda: None), Counters(counters).rows
        try:
            items = pytree.unstack(content, 0)
        except (ValueError, TypeError, RuntimeError) as error:
            raise self._misfit(content, f"{n} items", f" ({error})") from error
        if len(items) != n:
            raise self._misfit(content, f"{n} items")
        sink.check_restore(counters)
        return [pytree.clone(item) for item in (*items[order.oldest :], *items[: order.oldest])]

    def _misfit(self, content: Any, expected: str, why: str = "") -> CheckpointMisfitError:
        found = _in_words(content)
        if self._hooks:
            what = f"{_hooks(len(self._hooks), 'load')} made {found} of what was saved, this storage takes {expected}"
            return CheckpointMisfitError(f"{what}{why}; {_hooks(self._save_hooks, 'save')} had changed it at the save")
        return CheckpointMisfitError(
            f"{_hooks(self._save_hooks, 'save')} made {found} of what was saved, this storage takes {expected}{why}; "
            "register the load hook that undoes it (register_load_hook) before loads"
        )


class _HookedLoad(_Load):
    """One load of content that save hooks made."""

    def __init__(self, checkpointer: Checkpointer, reader: SnapshotReader, state: dict[str, Any]) -> None:
        self._reader = reader
        try:
            super().__init__(checkpointer, int(state["save_hooks"]))
            self._kind, self._counters, self._class = state["kind"], state["counters"], bool(state["tensorclass"])
            order, checked = state["order"], Counters(self._counters)
            self._order = Order(order["oldest"], order["shift"], order["is_full"])
            n = sum(checked.stop(lane) - checked.first(lane) for lane in range(checked.lanes))
            whole = [type(x) is int and 0 <= x <= n for x in self._order[:2]]
            if self._kind not in ("rows", "items") or not all(whole) or type(self._order.is_full) is not bool:
                raise ValueError("it does not say what its content is, and in which order")
            if self._order.oldest and checked.lanes != 1:
                raise ValueError("rows of several lanes come oldest first")
            if self._kind == "rows":
                self._saved = _SavedRows(LayoutState(state["layout"]), self._counters, self._order)
                checked.check_envs(self._saved.layout)
                self._saved.layout.parse()  # for its errors
                if len(self._saved.env_shape) + 1 != state["layout"]["ndim"]:
                    raise ValueError("its environments are not those of its dimensions")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise reader.malformed(f"its description of what save hooks made is malformed ({error!r})") from error
        for name in (_TEXT, _ARRAYS):
            reader.nbytes(name)

    def check(self, sink: Any) -> None:
        """With load hooks, which run in `load`, only whether rows or items are taken here."""
        self._check_kind(sink)
        if not self._hooks:
            self._fit(sink)

    def _check_kind(self, sink: Any) -> None:
        if not isinstance(sink, RowSink | ItemSink):
            raise _no_rows(sink)
        taken = "rows" if isinstance(sink, RowSink) else "items"
        if taken != self._kind:
            raise CheckpointMisfitError(f"{self._kind} were saved, through hooks; this storage takes {taken}")

    def load(self, sink: Any) -> None:
        self._check_kind(sink)
        fill = self._fit(sink)
        if not self._hooks:
            log.warning(
                "%s changed what was saved in %s, and no load hook is registered: what comes back is what the save "
                "hooks made",
                _hooks(self._save_hooks, "save"),
                self._reader.path(""),
            )
        fill()

    def _fit(self, sink: Any) -> Callable[[], None]:
        """Reads the content and compares it with the sink; the result fills the sink."""
        content, sequences = _read_content(self._reader)
        if self._kind == "rows":
            sequences = self._row_sequences(sequences)
            content = _as_class(content, sink.row_layout()) if self._class else content
            rows = self._fit_rows(content, sequences, self._saved, sink)
            return functools.partial(_write_rows, sink, rows, self._counters, self._order.oldest)
        items = self._fit_items(content, self._counters, self._order, sink)
        sequences = [0] * len(items) if sequences is None else sequences
        try:
            check_sequences(sequences, len(items))
        except ValueError as error:
            raise self._reader.malformed(f"{_TEXT}: {error}") from error
        return functools.partial(sink.restore_items, items, self._counters, sequences)

    def _row_sequences(self, sequences: Any) -> Tensor | None:
        envs, n = self._counters["envs"], self._saved.lead[-1]
        carried = self._saved.layout.parse().carries_sequence
        fits = isinstance(sequences, Tensor) and sequences.dtype == torch.int64 and sequences.shape == (envs, n)
        if not (fits if carried else sequences is None):
            raise self._reader.malformed(f"{_TEXT}: its sequences are not those of its rows")
        found: Tensor | None = sequences
        return found


class _PlainLoad(_Load):
    """One load, through load hooks, of rows or items that no save hook changed."""

    def __init__(self, checkpointer: Checkpointer, plan: RestorePlan[Any]) -> None:
        super().__init__(checkpointer, 0)
        self._plan = plan

    def check(self, sink: Any) -> None:
        """Not what the hooks make, which run in `load`: that is compared there, before anything changes."""
        if not isinstance(sink, RowSink | ItemSink):
            raise _no_rows(sink)

    def load(self, sink: Any) -> None:
        self.check(sink)
        if isinstance(sink, RowSink):
            collected = _RowCollector(sink.row_layout())
            self._plan.load(collected)
            saved = collected.saved
            if saved is None:
                self._plan.load(sink)
                return
            rows = collected.rows(saved)
            fitted = self._fit_rows(rows.batch(), rows.sequences(), saved, sink)
            _write_rows(sink, fitted, saved.counters, saved.order.oldest)
            return
        items = _ItemCollector()
        self._plan.load(items)
        if not items.items:
            self._plan.load(sink)
            return
        order = order_of(items.counters, single_steps=not any(map(_has_steps, items.items)))
        n = len(items.items)
        by_slot = [*items.items[n - order.oldest :], *items.items[: n - order.oldest]]
        fitting = self._fit_items(items_as_batch(by_slot), items.counters, order, sink)
        sink.restore_items(fitting, items.counters, items.sequences)


class _RowCollector:
    """A RowSink that holds verified rows for load hooks."""

    saved: _SavedRows | None = None  #: None: there are no rows

    def __init__(self, like: RowLayout | None) -> None:
        self._like = like

    def __len__(self) -> int:
        return 0

    def row_layout(self) -> RowLayout | None:
        return None

    def check_restore(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> None:
        pass

    def begin_restore(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> None:
        checked = Counters(counters)
        if layout is None or not checked.rows:
            return
        state = layout if isinstance(layout, LayoutState) else LayoutState(layout)
        order = order_of(counters, not state.parse(self._like).within)
        self.saved, self._counters = _SavedRows(state, counters, order), checked
        with _file_errors():
            self._file = _RowFile(state.parse(), checked.envs, self.saved.lead[-1], None)

    def write_block(self, lane: int, start: int, rows: Rows) -> None:
        if self.saved is None:
            return
        sizes = [self._counters.stop(i) - self._counters.first(i) for i in range(lane + 1)]
        first = start - self._counters.first(lane)
        with _file_errors():
            self._file.put_from(sum(sizes[:-1]), first, sizes[-1], self.saved.order.oldest, rows)

    def end_restore(self) -> None:
        pass

    def abort_restore(self) -> None:
        self.saved = None

    def rows(self, saved: _SavedRows) -> _HeldRows:
        return _HeldRows(self._file.rows(), saved.layout.parse(), saved.env_shape, saved.counters, saved.order)


class _ItemCollector:
    """An ItemSink that holds verified items for load hooks."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def __len__(self) -> int:
        return 0

    def check_restore(self, counters: dict[str, Any]) -> None:
        pass

    def restore_items(self, items: list[Any], counters: dict[str, Any], sequences: list[int]) -> None:
        self.items, self.counters, self.sequences = items, counters, sequences


@contextlib.contextmanager
def _file_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            "rows that pass load hooks wait in a temporary file, and that cannot be written "
            f"({error.strerror}); set TMPDIR to a place with room for all of them"
        ) from error


def _room(here: RowLayout | None, saved: _SavedRows) -> Any:
    """Room for the rows in the form in which the storage holds them, or in which they were saved."""
    layout = saved.layout.parse() if here is None else here
    with _file_errors():
        file = _RowFile(layout, saved.counters["envs"], saved.lead[-1], None)
        return _HeldRows(file.room(), layout, saved.env_shape, saved.counters, saved.order).batch()


def _write_rows(sink: RowSink, rows: _FittedRows, counters: dict[str, Any], oldest: int) -> None:
    """Fills a sink with rows, of which the oldest of a single lane is at `oldest`."""
    layout, checked, begin = rows.layout.parse(), Counters(counters), 0
    time = len(rows.layout["envs"])
    sink.begin_restore(rows.layout, counters)
    try:
        for lane in range(checked.lanes):
            first, size = checked.first(lane), checked.stop(lane) - checked.first(lane)
            for start, stop in _blocks(first, first + size, checked.envs * layout.payload_bytes):
                at, n = (start - first + oldest) % size, stop - start
                out = np.zeros((checked.envs, n, layout.payload_bytes), np.uint8)
                for place, source, count in ((0, at, min(n, size - at)), (size - at, 0, n - (size - at))):
                    if count > 0:
                        _pack(out[:, place : place + count], layout, rows, time, begin + source)
                sink.write_block(lane, start, out)
            begin += size
        sink.end_restore()
    except BaseException:
        sink.abort_restore()
        raise


def _pack(out: Rows, layout: RowLayout, rows: _FittedRows, time: int, start: int) -> None:
    """Fills rows `[envs, n, bytes]` with the steps from `start` on."""
    envs, n, _ = out.shape
    columns = list(zip(layout.leaves, (leaf.narrow(time, start, n) for leaf in rows.leaves), strict=True))
    if rows.sequences is not None:
        columns.append((layout.stored[-1], rows.sequences.narrow(1, start, n)))
    for leaf, column in columns:
        if leaf.nbytes:
            raw = np.asarray(tensor_bytes(column)).reshape(envs, n, leaf.nbytes)
            out[..., leaf.offset : leaf.offset + leaf.nbytes] = raw


def _as_class(content: Any, layout: RowLayout | None) -> Any:
    """A TensorDict as the tensorclass whose rows are stored here, if it has the fields."""
    cls = None if layout is None else layout.root.cls
    if cls is None or not isinstance(content, TensorDictBase):
        return content
    try:
        return cls.from_tensordict(content)  # type: ignore[attr-defined]
    except (TypeError, ValueError, KeyError, RuntimeError):
        return content


def _hooks(n: int, what: str) -> str:
    return f"{n or 'no'} {what} hook{'' if n == 1 else 's'}"


def _in_words(content: Any) -> str:
    kind = type(content).__name__
    if isinstance(content, Tensor) or pytree.has_batch_size(content):
        return f"a {kind} of shape {list(content.shape)}"
    return f"a {kind} of {len(content)}" if isinstance(content, list | tuple | dict) else f"a {kind}"
