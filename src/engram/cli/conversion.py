"""Converts stored episodes from one form to another: stores, checkpoints, TorchRL's directories, dataset files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from engram import __version__, pytree
from engram._progress import progress_bar
from engram.cli.description import shown_key
from engram.cli.kinds import Kind, kind_of, one_snapshot
from engram.cli.own_files import BUFFER, replaceable_folder
from engram.cli.rows import _oldest_first
from engram.cli.sources import DATASETS, new_storage, open_rows, row_bytes
from engram.cli.trajectories import read_column, trajectories_of
from engram.data import LazyMemmapStorage, ReplayBuffer, Storage, TensorDictReplayBuffer
from engram.data.replay_buffers.checkpointers import open_snapshot
from engram.datasets import FORMATS
from engram.datasets.atomic_files import new_folder
from engram.datasets.episodes import DONE, TERMINATED, TRUNCATED, Marks, StepBlock, episode_source
from engram.kernel.rows import IDS, removed_steps
from engram.kernel.tools import user_path, visible
from engram.pytree import KeyPath

#: The kinds that can be written, by the words of `--to`.
TARGETS: dict[str, Kind] = {
    "store": "store",
    "checkpoint": "checkpoint",
    "torchrl": "TorchRL directory",
    **{one.word: one.kind for one in FORMATS if one.word is not None},
}
_SUFFIXES = {suffix: one.word for one in FORMATS for suffix in one.suffixes}
INDEX = "index"
_ROOT_FLAGS: tuple[KeyPath, ...] = (("done",), ("terminated",), ("truncated",))
ENDS = "ends"  # in `drop`: ends of trajectories that no key says
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Conversion:
    """The result of `convert`.

    Attributes:
        source, target: the paths.
        kind: what was written.
        rows: steps.
        nbytes: bytes of the files at the target.
        dropped: keys that were left out, because `drop` names them.
        notes: what the rows do not carry with them.
    """

    source: str
    target: str
    kind: Kind
    rows: int
    nbytes: int
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The same as JSON."""
        return dict(self.__dict__)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str | None = None,
    drop: Sequence[str] = (),
    capacity: int | None = None,
    rows: int | None = None,
    snapshot: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Conversion:
    """Writes the steps at a path in another form, trajectory by trajectory, oldest first, without removed ones.

    An error names everything that the new form cannot hold, and nothing is written; `drop` leaves it out by name. The
    target appears whole or not at all. Steps of several environments or writers follow one another.

    Args:
        source: a store (which may be in use), a checkpoint, a directory of TorchRL's or a dataset file.
        target: the folder or file to make.
        to: "store", "checkpoint", "torchrl", "minari", "hdf5" (as D4RL has it) or "parquet"; None: by the suffix of
            the target, `.hdf5`, `.h5` or `.parquet`.
        drop: keys to leave out, as `info` shows them (a key of several entries stands for all of them); "ends":
            that trajectories have not ended, or end where no flag and no id says so.
        capacity: of a store or a checkpoint, the steps that it has room for; None: those that are written.
        rows: of a source that has only room for steps, and does not say how many were written (a `scratch_dir` of
            TorchRL's LazyMemmapStorage): how many, the first of them; None: all.
        snapshot: of a checkpoint, another than the current one.
        overwrite: replace what is at the target, if engram wrote it, all of it is of the same kind, and unused.
        progress: show how far it is, if standard error is a terminal.

    Raises:
        ValueError: the target cannot hold something (all of it is listed), there are no steps, `to` is missing, or
            `rows` is given for a source that says it, or is none that it has room for.
        KeyError: `drop` names something that is not there.
        FileExistsError: there is something at the target; with `overwrite`, the message names what is not replaced.
        EngramError: the source is damaged.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder + "/store"))
        >>> done = torch.tensor([0, 0, 1, 0, 0]).bool()
        >>> _ = rb.extend(TensorDict({"n": torch.arange(5), "next": {"done": done}}, [5]))
        >>> converted = convert(folder + "/store", folder + "/saved", to="checkpoint")
        >>> converted.kind, converted.rows
        ('checkpoint', 5)
    """
    kind, place = _kind_to_write(target, to), user_path(target)
    with ExitStack() as stack:
        snapshot = stack.enter_context(one_snapshot(source, snapshot))
        data = stack.enter_context(_opened(source, snapshot, rows, progress))
        dropped, ends_dropped = _dropped(data, drop)
        problems = _unheld(data, kind, dropped, ends_dropped)
        if problems:
            raise ValueError(
                f"a {kind} cannot hold all of {visible(source)}: {'; '.join(problems)}. Nothing was written; "
                "drop=[...] (--drop KEY) leaves out what you name"
            )
        written = _written(kind, _Request(data, place, dropped, capacity, overwrite, progress))
        notes = _notes(source, data, kind, snapshot)
    files = [file for file in place.rglob("*") if file.is_file()] if place.is_dir() else [place]
    return Conversion(
        str(source), str(target), kind, written, sum(file.stat().st_size for file in files),
        (*map(shown_key, dropped), *([ENDS] if ends_dropped else [])), notes,
    )  # fmt: skip


def _written(kind: Kind, request: _Request) -> int:
    try:
        return _WRITERS[kind](request)
    except ValueError as error:
        if "exclude=" not in str(error):
            raise
        raise ValueError(f"{error}. As drop=[...], or --drop KEY, names them here") from error


def _kind_to_write(target: str | os.PathLike[str], to: str | None) -> Kind:
    name = _SUFFIXES.get(user_path(target).suffix) if to is None else to.lower()
    if name not in TARGETS:
        raise ValueError(
            f"to={to!r} is none of {', '.join(TARGETS)}"
            if to is not None
            else f"the suffix of {visible(target)} does not say what to write: give to= (--to), one of "
            f"{', '.join(TARGETS)}"
        )
    return TARGETS[name]


# ---- the stream of episodes ----
class _Data(NamedTuple):
    """The steps to convert: those of a storage, or of a dataset, whose batches are read while they are written."""

    steps: Callable[[], Any]
    storage: Storage | None
    first: Any  #: a batch of one step, which says the keys
    total: int


@contextmanager
def _opened(source: str | os.PathLike[str], snapshot: str | None, rows: int | None, progress: bool) -> Iterator[_Data]:
    """Opens the source. Dataset files are streamed: their keys follow from their format. Others may hold any keys."""
    kind = kind_of(source)
    if rows is not None and kind != "TorchRL directory":
        raise ValueError(f"{visible(source)} is a {kind}, which says how many steps it has: rows={rows} has no meaning")
    form = DATASETS.get(kind)
    if form is not None and form.is_streamed:
        batches = form.batches
        first, total = next(batches(source), None), form.size(source).steps
        if first is None:
            raise ValueError(f"{visible(source)} holds no steps: there is nothing to write")
        if total is None or form.may_skip_steps:
            total = sum(len(batch) for batch in batches(source))
        yield _Data(lambda: batches(source), None, first[:1], total)
        return
    with open_rows(source, snapshot, rows=rows, progress=progress) as storage:
        if not len(storage) or storage.lanes.all_removed:
            which = "no steps" if not len(storage) else f"{len(storage)} steps, which were all removed"
            raise ValueError(f"{visible(source)} holds {which}: there is nothing to write")
        if storage.layout is None:
            raise ValueError(
                f"{visible(source)} holds items of any form, not steps with keys: only checkpoints hold those"
            )
        first = storage.read(_oldest_first(storage, 1)[:1]).batch
        yield _Data(lambda: storage, storage, first, len(storage) - storage.lanes.store.removed_rows)


def _paths(data: _Data) -> list[KeyPath]:
    return [path for path, _ in pytree.describe(data.first, 1)[1]]


def _dropped(data: _Data, drop: Sequence[str]) -> tuple[tuple[KeyPath, ...], bool]:
    """The keys that `drop` names, and whether it names the ends of trajectories.

    Raises:
        KeyError: it names something that is not there.
    """
    form = pytree.describe(data.first, 1)[0]
    paths, dropped = [*_paths(data), *form.constants(), *form.empty_groups()], []
    for name in drop:
        if name == ENDS:
            continue
        named = [p for p in paths if shown_key(p) == name or shown_key(p).startswith(f"{name}.")]
        if not named:
            raise KeyError(f"there is no key {name!r} to drop; there are {', '.join(map(shown_key, paths))}")
        dropped += named
    return tuple(dict.fromkeys(dropped)), ENDS in drop


# ---- what a form cannot hold ----
def _unheld(data: _Data, kind: Kind, dropped: tuple[KeyPath, ...], ends_dropped: bool) -> list[str]:
    """Descriptions of everything that the target form cannot hold."""
    rest = pytree.without_entries(data.first, dropped) if dropped else data.first
    paths = [path for path, _ in pytree.describe(rest, 1)[1]]
    if kind == "TorchRL directory":
        problems = _unheld_by_torchrl(rest)
        if data.storage is not None and not ends_dropped:
            hidden = _Ends(data.storage).hidden()
            problems += [f"{ENDS}: {hidden} trajectories end where neither a flag nor an id says so"] if hidden else []
        return problems
    if kind in DATASETS and DATASETS[kind].holds_flags_only and data.storage is not None:
        problems = _unheld_flags(data.storage, paths)
        unfinished = 0 if ends_dropped else _Ends(data.storage).open()
        if unfinished:
            problems.append(f"{ENDS}: {unfinished} trajectories have not ended, and would be marked as truncated")
        return problems
    return []


def _unheld_by_torchrl(rows: Any) -> list[str]:
    if not isinstance(rows, TensorDictBase) or type(rows) is not TensorDict:
        return [f"the steps are a {type(rows).__name__}, and it is written from TensorDicts"]
    constants = pytree.describe(rows, 1)[0].constants()
    return [f"{shown_key(path)}: a constant" for path in constants]


class _Ends:
    """The ends of a storage's trajectories, as its steps mark them, in the order in which trajectories are written."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        counted = trajectories_of(storage, DONE, left_only=True)
        columns = [torch.empty(0, dtype=torch.int64, device="cpu")] * 4 if isinstance(counted, str) else counted[:4]
        self._lane, self._env, self._start, self._length = (values.numpy() for values in columns)

    def hidden(self) -> int:
        """How many trajectories, of those that others follow, end where neither a flag nor an id says so."""
        if len(self._lane) < 2:
            return 0
        ids = next((path for path in IDS if self._storage.leaf(path) is not None), None)
        if ids is not None:
            numbers = self._values(ids, self._start)
            return int((numbers[1:] == numbers[:-1]).sum())
        return int((self._values(DONE, self._last)[:-1] == 0).sum())

    def open(self) -> int:
        """How many have not ended: their last stored step has no flag."""
        ended = np.zeros(len(self._length), bool)
        for path in (DONE, TERMINATED, TRUNCATED):
            leaf = self._storage.leaf(path)
            if leaf is not None and leaf.nbytes == leaf.itemsize:
                ended |= self._values(path, self._last) != 0
        return int((~ended).sum())

    @property
    def _last(self) -> Any:
        return self._start + self._length - 1

    def _values(self, path: KeyPath, sequences: Any) -> Any:
        """One number of a key for each trajectory, of the step with that sequence."""
        lanes = self._storage.lanes
        capacity = lanes.store.lane_capacity
        column = read_column(self._storage, path, torch.from_numpy(self._lane * capacity + sequences % capacity))
        which = torch.arange(len(self._lane), device="cpu"), torch.from_numpy(self._env), 0
        return column.reshape(len(self._lane), lanes.envs, -1)[which].numpy()


def _unheld_flags(storage: Storage, paths: Sequence[KeyPath]) -> list[str]:
    """The keys that readers would derive differently; keys that they derive are not written."""
    problems = []
    lanes = storage.lanes
    for lane, state in enumerate(lanes.states()):
        for begin in range(state["first"], state["published"], _ROWS_AT_ONCE):
            sequences = torch.arange(begin, min(begin + _ROWS_AT_ONCE, state["published"]), device="cpu")
            slots = lane * lanes.store.lane_capacity + sequences % lanes.store.lane_capacity
            gone = removed_steps(lanes.store, lane, range(begin, begin + len(sequences)))

            def column(path: KeyPath, slots: torch.Tensor = slots, gone: Any = gone) -> Any:
                values = read_column(storage, path, slots).numpy() != 0
                return values if gone is None else values.reshape(*gone.shape, -1)[~gone]

            for path in _ROOT_FLAGS:
                if path in paths and column(path).any():
                    problems.append(f"{shown_key(path)} is set in some steps, and would be read as False")
            if {DONE, TERMINATED}.issubset(paths):
                ends = column(TERMINATED) | (column(TRUNCATED) if TRUNCATED in paths else False)
                if (column(DONE) & ~ends).any() and TRUNCATED in paths:
                    problems.append(f"{shown_key(DONE)} is set where neither terminated nor truncated is")
                if (ends & ~column(DONE)).any():
                    problems.append(f"{shown_key(DONE)} is not set where terminated or truncated is")
    return list(dict.fromkeys(problems))


def _notes(source: str | os.PathLike[str], data: _Data, kind: Kind, snapshot: str | None) -> tuple[str, ...]:
    notes = []
    if kind == "TorchRL directory":
        notes.append("it says no batch size, which TorchRL's loads takes over: call sample(n) there")
    if data.storage is not None and data.storage.lanes.envs > 1:
        notes.append(f"the steps of {data.storage.lanes.envs} environments follow one another now")
    if kind_of(source) == "checkpoint":
        with open_snapshot(source, snapshot) as saved:
            if saved.components:
                notes.append(f"rows alone: the state of {', '.join(saved.components)} stays in {visible(source)}")
    return tuple(notes)


# ---- writing ----
class _Request(NamedTuple):
    """The arguments of a writer of one kind."""

    data: _Data
    target: Path
    dropped: tuple[KeyPath, ...]
    capacity: int | None
    overwrite: bool
    progress: bool

    def blocks(self) -> Iterator[StepBlock]:
        return episode_source(self.data.steps(), DONE, None, self.dropped).blocks()

    def folder(self, kind: Kind) -> Any:
        """A block in which the target's folder is made, which appears at its end."""
        return new_folder(self.target, self.overwrite, replaceable_folder(kind))

    def bar(self) -> Any:
        return progress_bar(f"writing {self.target}", self.data.total, self.progress)

    def buffer(self, storage: Any) -> ReplayBuffer[Any]:
        """A buffer that writes to a storage; one that numbers its rows, where the source was one."""
        indexed = (INDEX,) in _paths(self.data) and (INDEX,) not in self.dropped
        return TensorDictReplayBuffer(storage=storage) if indexed else ReplayBuffer(storage=storage)


def _to_store(request: _Request) -> int:
    with request.folder("store") as folder, request.bar() as advance:
        storage = LazyMemmapStorage(request.capacity or request.data.total, scratch_dir=folder)
        rows = _extend(request.buffer(storage), request.blocks(), advance)
        storage.close()
    return rows


def _to_checkpoint(request: _Request) -> int:
    with request.folder("checkpoint") as folder, request.bar() as advance:
        rows = request.capacity or request.data.total
        buffer = request.buffer(new_storage(rows, min(rows, request.data.total) * row_bytes(request.data.first)))
        rows = _extend(buffer, request.blocks(), advance)
        buffer.dumps(folder)
    return rows


def _extend(buffer: ReplayBuffer[Any], blocks: Iterator[StepBlock], advance: Callable[[int], None]) -> int:
    """Writes every step to a buffer, whose trajectories end where those of the blocks do."""
    rows, last = 0, None
    for block in blocks:
        n = _length(block.rows)
        marks = Marks.of(block.rows, n)
        begin = 0
        for at in _beginnings(block):
            if not (marks.end_before(at) if at else last is None or marks.follow(last)):
                if at:
                    buffer.extend(_slice(block.rows, begin, at))
                buffer.storage.mark_seam()
                begin = at
        buffer.extend(_slice(block.rows, begin, n))
        last = marks
        rows += n
        advance(n)
    return rows


def _beginnings(block: StepBlock) -> list[int]:
    """The steps of a block at which trajectories begin."""
    if block.parts is None:
        return []
    begins = np.concatenate([[0], np.cumsum(block.parts[:-1, 0])])
    return [int(at) for at in begins[block.parts[:, 1] == 0]]


def _length(rows: Any) -> int:
    return int(pytree.describe(rows, 1)[1][0][1].shape[0])


def _slice(rows: Any, start: int, stop: int) -> Any:
    return pytree.map_outermost(rows, lambda leaf: leaf[start:stop], lambda batch: batch[start:stop])


def _to_torchrl(request: _Request) -> int:
    total, rows = request.data.total, 0
    with request.folder("TorchRL directory") as folder, request.bar() as advance:
        mapped: Any = None
        for block in request.blocks():
            if mapped is None:
                like = block.rows[:1].expand(total).memmap_like
                mapped = like(prefix=folder / "storage")
            n = len(block.rows)
            for key in block.rows.keys(include_nested=True, leaves_only=True):
                values = torch.arange(rows, rows + n, device="cpu") if key == INDEX else block.rows[key]
                mapped[key][rows : rows + n].copy_(values)
            rows += n
            advance(n)
        if rows < total:  # its writer overwrote some before they were read: the files have no room for others
            (folder / "storage").rename(folder / "longer")
            shorter = mapped[:1].clone().expand(rows).memmap_like(prefix=folder / "storage")
            for key in mapped.keys(include_nested=True, leaves_only=True):
                shorter[key].copy_(mapped[key][:rows])
            shutil.rmtree(folder / "longer")
        _write_json(folder / "storage" / "storage_metadata.json", {"metadata": {}, "is_pytree": False, "len": rows})
        _write_json(folder / "writer" / "metadata.json", {"cursor": 0, "write_count": rows})
        about = {"generator": f"engram {__version__}", "batch_size": None, "consume_after_n_samples": None}
        _write_json(folder / BUFFER, about)
        (folder / "sampler").mkdir()
    return rows


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


def _dataset_writer(write: Callable[..., int]) -> Callable[[_Request], int]:
    def write_dataset(request: _Request) -> int:
        return write(
            request.data.steps(), request.target, exclude=request.dropped, overwrite=request.overwrite,
            progress=request.progress,
        )  # fmt: skip

    return write_dataset


_WRITERS: dict[Kind, Callable[[_Request], int]] = {
    "store": _to_store,
    "checkpoint": _to_checkpoint,
    "TorchRL directory": _to_torchrl,
    **{one.kind: _dataset_writer(one.write) for one in FORMATS if one.write is not None},
}
