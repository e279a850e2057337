"""Describes stored steps: keys, rows, bytes, episodes, writers; from headers and manifests, without reading rows."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engram._progress import progress_bar
from engram.cli.kinds import Kind, kind_of, one_snapshot, own_kind, store_folder, stores_below
from engram.cli.returns import NO_ENDS, NO_REWARDS, sum_rewards
from engram.errors import EngramError, StorageError, StorageInUseError
from engram.kernel.disk import (
    ROWS_LOOKED_AT,
    Checkpoint,
    Counters,
    ObservationShares,
    ObservedRows,
    ObservedTrajectories,
    StoreFile,
    WriterShare,
    queue_figures,
    rate_figures,
    writer_shares,
)
from engram.kernel.tools import user_path, visible

if TYPE_CHECKING:
    from engram.cli.trajectories import Trajectories
    from engram.data import Storage

#: Stores of no more rows have their episodes counted without being asked: their flags are read.
_FEW_ROWS = 1 << 20
_ONCE = "each observation is stored once (compact=)"
_TRIES = 500  # while all rows are being replaced: a few seconds

NOT_COUNTED = "episodes were not counted: episodes=True (--episodes) reads the flags of all rows"
UNCOUNTED = (
    "nothing there says how many of these steps were written, these are all that have room: convert(rows=n) (--rows N) "
    "takes the first n"
)


class KeyInfo(NamedTuple):
    """A key of a stored step: its name as a user writes it, the shape of one step, the dtype, bytes of one step."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class LaneInfo(NamedTuple):
    """A lane: its rows (of all environments), steps ever written, seams among its rows, whether a process holds it.

    `held` is None where that cannot be known: in a checkpoint. Where writers move from lane to lane, it says whether
    the one that wrote there last has the store open.
    """

    rows: int
    written: int
    seams: int
    held: bool | None


class Summary(NamedTuple):
    """The least, the mean and the largest of some numbers."""

    least: float
    mean: float
    most: float


@dataclass(frozen=True)
class Info:
    """The result of `info`; None stands for what the header does not say, or what was not asked for.

    Attributes:
        path: the file or folder.
        kind: what it is.
        rows: stored steps, of all environments.
        removed: those of them that were removed, and are not drawn.
        capacity: steps that fit.
        row_bytes: bytes of one step.
        file_bytes: bytes on disk, of all files that belong to it.
        envs: environments of a time step.
        keys: the entries of a step.
        lanes: the lanes.
        writers: of a store whose writers move from lane to lane, those of which it has rows.
        in_use: whether a process has the store open.
        snapshot: the snapshot of a checkpoint that is described.
        parts: the parts of the buffer that were saved, and of what kind each is.
        episodes: trajectories of which steps are stored.
        lengths: of these trajectories, as far as they are stored.
        returns: sums of `("next", "reward")` over these trajectories.
        notes: what else there is to say.
        below: of a folder that is none of these, the stores and checkpoints in it and in its folders.
    """

    path: str
    kind: Kind
    rows: int | None
    capacity: int | None = None
    row_bytes: int | None = None
    file_bytes: int | None = None
    envs: int = 1
    keys: tuple[KeyInfo, ...] = ()
    lanes: tuple[LaneInfo, ...] = ()
    writers: tuple[WriterShare, ...] = ()
    in_use: bool | None = None
    snapshot: str | None = None
    parts: dict[str, str] | None = None
    episodes: int | None = None
    lengths: Summary | None = None
    returns: Summary | None = None
    notes: tuple[str, ...] = ()
    below: tuple[Info, ...] = ()
    removed: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The same as JSON."""
        as_dict = dict(self.__dict__)
        as_dict["keys"] = [{**key._asdict(), "shape": list(key.shape)} for key in self.keys]
        as_dict["lanes"] = [lane._asdict() for lane in self.lanes]
        as_dict["writers"] = [writer._asdict() for writer in self.writers]
        for name in ("lengths", "returns"):
            as_dict[name] = None if as_dict[name] is None else as_dict[name]._asdict()
        as_dict["below"] = [one.to_json() for one in self.below]
        as_dict["notes"] = list(self.notes)
        return as_dict


def info(
    path: str | os.PathLike[str],
    *,
    episodes: bool | None = None,
    returns: bool = False,
    snapshot: str | None = None,
    progress: bool = False,
) -> Info:
    """Describes a store, a checkpoint, a directory of TorchRL's or a dataset file; or all stores and checkpoints below.

    A store may be in use: it is looked at without a lock and without a write. Of all but episodes and returns only
    headers, manifests and file sizes are read; where observations are stored once, also what the newest rows are made
    of, which the notes tell with what would make them smaller.

    Args:
        path: the folder or the file; of a folder that is none of these, the stores and checkpoints in it and in its
            folders are described, in `below`.
        episodes: read the done flags or trajectory ids of all rows and count trajectories. None: where that is quick,
            in a store of up to a million rows.
        returns: also read the rewards.
        snapshot: of a checkpoint, another than the current one.
        progress: show how far reading is, if standard error is a terminal.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: the path holds none of these.
        EngramError: it is damaged.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder))
        >>> done = torch.tensor([0, 0, 1, 0, 0]).bool()
        >>> _ = rb.extend(TensorDict({"n": torch.arange(5), "next": {"done": done}}, [5]))
        >>> described = info(folder)
        >>> described.kind, described.rows, described.episodes, described.lengths
        ('store', 5, 2, Summary(least=2.0, mean=2.5, most=3.0))
        >>> described.keys[0]
        KeyInfo(key='n', shape=(), dtype='int64', nbytes=8)
    """
    if os.path.isdir(user_path(path)) and own_kind(user_path(path)) is None:
        below, is_all = stores_below(path)
        if below:
            return _of_folder(path, below, is_all, bool(episodes), returns)
    kind = kind_of(path)
    if kind == "store":
        return _of_store(path, episodes, returns, progress)
    with one_snapshot(path, snapshot) as snapshot:
        described = _of_files(path, kind, snapshot)
        if not (episodes or returns):
            return described
        with _opened_rows(path, snapshot, progress) as storage:
            return _with_episodes(described, storage, _trajectories_of(storage), returns, progress)


def _of_folder(
    path: str | os.PathLike[str], below: Sequence[tuple[str, Kind]], is_all: bool, episodes: bool, returns: bool
) -> Info:
    """One that is damaged, or being made, does not hide the others."""
    found = []
    for place, kind in below:
        try:
            found.append(info(place, episodes=episodes, returns=returns))
        except (
            EngramError,
            OSError,
            ValueError,
        ) as error:
            found.append(Info(place, kind, None, notes=(str(error),)))
    notes = () if is_all else ("there are more files and folders than were looked through: name one further down",)
    return Info(str(path), "folder", None, notes=notes, below=tuple(found))


def info_of_rows(
    path: str | os.PathLike[str], storage: Storage, snapshot: str | None = None, *, progress: bool = False
) -> Info:
    """The result of `info` with episodes and returns, for a path whose rows are open: all of it from one moment."""
    kind, trajectories = kind_of(path), _trajectories_of(storage)
    if kind == "store":
        with StoreFile(store_folder(path)) as opened:
            described = _of_observed(path, opened, storage, trajectories)
    else:
        described = _of_files(path, kind, snapshot)
    return _with_episodes(described, storage, trajectories, True, progress)


def _of_files(path: str | os.PathLike[str], kind: Kind, snapshot: str | None) -> Info:
    if kind == "checkpoint":
        return _of_checkpoint(path, snapshot)
    return _of_torchrl(path) if kind == "TorchRL directory" else _of_dataset(path, kind)


def shown_key(path: Sequence[Any]) -> str:
    """A key in one word: `obs`, `next.reward`; `tensor` at the root. Control characters are escapes."""
    return visible(".".join(map(str, path))) or "tensor"


def _keys(layout: dict[str, Any]) -> tuple[KeyInfo, ...]:
    """The keys of a row layout, of which this is the JSON. ValueError, KeyError or TypeError where it is malformed."""
    keys = tuple(_key(leaf) for leaf in layout["leaves"])
    hidden = 8 * len(layout.get("hidden", []))
    if max(1, sum(key.nbytes for key in keys) + hidden) != layout["row_bytes"]:
        raise ValueError(f"its keys do not make a row of {layout['row_bytes']} bytes")
    return keys


def _key(leaf: dict[str, Any]) -> KeyInfo:
    dtype, shape = str(leaf["dtype"]), tuple(int(size) for size in leaf["shape"])
    item_bytes = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    return KeyInfo(shown_key(leaf["path"]), shape, dtype, item_bytes * math.prod(shape))


# ---- a store ----
def _of_store(path: str | os.PathLike[str], episodes: bool | None, returns: bool, progress: bool) -> Info:
    with StoreFile.observed(store_folder(path)) as opened:
        try:
            described = _settled(opened.store, lambda: _of_header(path, opened.store, opened))
            rows = described.rows or 0
            if not (returns or (rows <= _FEW_ROWS if episodes is None else episodes)):
                return described if episodes is False else _noting(described, NOT_COUNTED)
            observed = ObservedRows(opened.store)
            with progress_bar(f"reading flags of {path}", rows, progress) as advance:
                counted = observed.trajectories(advance)
            if counted is None:
                return _noting(described, NO_ENDS)
            described = _settled(opened.store, lambda: _of_header(path, opened.store, opened, counted.rows))
            described = replace(described, episodes=len(counted.length), lengths=summary(counted.length))
            return _with_returns_of_store(described, observed, counted, progress) if returns else described
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{opened.path} has no readable layout: {error}") from error


def _with_returns_of_store(
    described: Info, observed: ObservedRows, counted: ObservedTrajectories, progress: bool
) -> Info:
    leaf = observed.outcome("reward")
    if leaf is None:
        return _noting(described, NO_REWARDS)

    def read(lane: int, steps: range) -> npt.NDArray[np.float64]:
        rewards = observed.column(leaf, lane, steps).astype(np.float64)
        summed: npt.NDArray[np.float64] = rewards.reshape(len(steps), described.envs, -1).sum(-1)
        return summed

    with progress_bar(f"reading rewards of {described.path}", described.rows, progress) as advance:
        sums = observed.validated(
            lambda: sum_rewards(counted[:4], read, lambda lane: observed.stored(lane).start, advance)
        )
    return replace(described, returns=summary(sums))


def _of_observed(
    path: str | os.PathLike[str], opened: StoreFile, storage: Storage, trajectories: Trajectories | str
) -> Info:
    """The header's description of the rows in which trajectories were counted, or of the rows that are there now."""
    lanes = storage.lanes
    rows = None if isinstance(trajectories, str) else trajectories.rows or None
    return storage.access.validated(lambda: _of_header(path, lanes.store, opened, rows))


def _settled(store: Any, read: Callable[[], Info]) -> Info:
    """The header's description from before or after all rows are replaced (`empty`, `loads`), never from between."""
    for _ in range(_TRIES):
        incarnation = store.epoch()[0]
        described = read()
        if incarnation % 2 == 0 and store.epoch()[0] == incarnation:
            return described
        time.sleep(0.005)
    raise StorageInUseError("all rows of the store are being replaced; try again when that is done")


def _of_header(path: str | os.PathLike[str], store: Any, opened: StoreFile, rows: list[range] | None = None) -> Info:
    """The header's description; `rows` are the sequences of each lane's rows (None: those that are there now)."""
    layout = json.loads(store.layout)
    lanes = [{**store.lane(i), "seams": store.seams(i)} for i in range(store.lanes)]
    if rows is None:
        rows = [range(lane["first"], lane["published"]) for lane in lanes]
    capacity = store.lanes * store.lane_capacity * store.envs
    notes = (_observations_of_store(layout["observations"], store, capacity),) if "observations" in layout else ()
    if (rate := rate_figures(store)) is not None:
        notes = (*notes, f"rate limiter {rate}")
    if (queue := queue_figures(store)) is not None:
        notes = (*notes, f"queue {queue}")
    return Info(
        path=str(path),
        kind="store",
        rows=store.envs * sum(map(len, rows)),
        removed=store.removed_rows,
        capacity=capacity,
        row_bytes=layout["row_bytes"],
        file_bytes=opened.nbytes,
        envs=store.envs,
        keys=_keys(layout),
        lanes=tuple(_lane(lane, rows[i], store.envs, opened.has_writer(i, store)) for i, lane in enumerate(lanes)),
        writers=writer_shares(store),
        in_use=opened.is_in_use,
        notes=notes,
    )


def _observations_of_store(said: dict[str, Any], store: Any, capacity: int) -> str:
    """Says which observations a store has once, its bytes a step, and what the newest rows are made of."""
    frames: dict[Any, int] = {shown_key(key["path"]): key["frames"] for key in said["keys"]}
    nbytes = (store.total_bytes + store.observation_bytes) / capacity
    if store.observation_kinds(ROWS_LOOKED_AT)[0] == 0:  # no row tells anything yet
        return f"{_stored_once(list(frames.items()), said['n_steps'])}; {nbytes:,.0f} bytes a step"
    return f"{_ONCE}: {ObservationShares.of(store, frames, said['n_steps'], nbytes)}"


def _lane(state: dict[str, Any], rows: range, envs: int, held: bool | None) -> LaneInfo:
    seams = sum(rows.start < seam < rows.stop for seam in state["seams"])
    return LaneInfo(len(rows) * envs, (rows.stop - state["origin"]) % (1 << 64), seams, held)


# ---- a checkpoint ----
def _of_checkpoint(path: str | os.PathLike[str], snapshot: str | None) -> Info:
    with Checkpoint(path).reading(snapshot) as reader:
        components, saved = reader.body.get("components", {}), reader.body.get("storage")
        described = Info(
            path=str(path),
            kind="checkpoint",
            rows=None,
            file_bytes=sum(record.nbytes for record in reader.files.values()),
            snapshot=reader.name,
        )
        try:
            parts = {name: str(tree.get("kind", "")) for name, tree in components.items()}
            if saved is None:
                return replace(described, parts=parts)
            described = replace(described, parts={"storage": _form_of(saved), **parts})
            return _of_saved_rows(described, saved["state"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise reader.malformed(f"its description of what was saved is malformed ({error!r})") from error


def _form_of(saved: dict[str, Any]) -> str:
    """The form of saved rows; of what save hooks made of them also how many there were."""
    state, n = saved["state"], saved["state"].get("save_hooks")
    if n is None:
        return str(saved["format"])
    return f"{state['saved_by']}, changed by {n} save hook{'' if n == 1 else 's'}"


def _of_saved_rows(described: Info, state: dict[str, Any]) -> Info:
    if "members" in state:  # an ensemble
        members = [_of_saved_rows(described, member["state"]) for member in state["members"]]
        rows, removed = sum(one.rows or 0 for one in members), sum(one.removed or 0 for one in members)
        note = f"an ensemble of {len(members)} members with {', '.join(str(m.rows) for m in members)} rows"
        return _noting(replace(described, rows=rows, removed=removed), note)
    if "counters" not in state:
        return described
    counters = Counters(state["counters"])
    capacity, envs = state["counters"]["lane_capacity"], counters.envs
    layout = state.get("layout")
    lanes = [
        _lane(lane, range(counters.first(i), counters.stop(i)), envs, None)
        for i, lane in enumerate(state["counters"]["lanes"])
    ]
    described = replace(
        described,
        rows=counters.rows,
        removed=counters.removed,
        capacity=None if capacity is None else capacity * envs * counters.lanes,
        row_bytes=None if layout is None else layout["row_bytes"],
        envs=envs,
        keys=() if layout is None else _keys(layout),
        lanes=tuple(lanes),
    )
    if "observations" not in state:
        return described
    return _noting(described, _observations(described.keys, state["observations"]))


def _observations(keys: tuple[KeyInfo, ...], saved: dict[str, Any]) -> str:
    """Says which observations a checkpoint has once. LookupError, TypeError or ValueError where that is malformed."""
    return _stored_once([(keys[x].key, frames) for x, _, frames in saved["keys"]], saved["n_steps"])


def _stored_once(stacks: Sequence[tuple[str, int]], n: int) -> str:
    names = [f"{key} ({frames} frames)" if frames > 1 else key for key, frames in stacks]
    n_steps = f", of {n}-step rows" if n > 1 else ""
    return f"{_ONCE}: {', '.join(names)}{n_steps}"


# ---- files of others: their readers load torch ----
def _of_torchrl(path: str | os.PathLike[str]) -> Info:
    from engram.cli.sources import torchrl_steps
    from engram.interop.torchrl.files import layout_of

    with torchrl_steps(path) as (steps, _, _):
        layout, envs = layout_of(steps), math.prod(steps.inner)
        return Info(
            path=str(path),
            kind="TorchRL directory",
            rows=steps.length * envs,
            capacity=steps.capacity * envs,
            row_bytes=layout.payload_bytes,
            file_bytes=_bytes_below(user_path(path)),
            envs=envs,
            keys=_keys(layout.to_json()),
            notes=() if steps.is_counted else (UNCOUNTED,),
        )


def _of_dataset(path: str | os.PathLike[str], kind: Kind) -> Info:
    from engram.cli.sources import DATASETS
    from engram.kernel.rows import RowLayout

    size, place = DATASETS[kind].size(path), user_path(path)
    first = next(iter(DATASETS[kind].batches(path)), None)
    layout = None if first is None else RowLayout.of(first, 1)
    return Info(
        path=str(path),
        kind=kind,
        rows=size.steps,
        row_bytes=None if layout is None else layout.payload_bytes,
        file_bytes=_bytes_below(place) if place.is_dir() else place.stat().st_size,
        keys=() if layout is None else _keys(layout.to_json()),
        episodes=size.episodes,
        notes=("keys are those that the file's steps have in engram",),
    )


def _bytes_below(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


# ---- episodes: what is late here loads torch ----
def _opened_rows(path: str | os.PathLike[str], snapshot: str | None, progress: bool) -> AbstractContextManager[Storage]:
    from engram.cli.sources import open_rows

    return open_rows(path, snapshot, progress=progress)


def _trajectories_of(storage: Storage) -> Trajectories | str:
    from engram.cli.trajectories import trajectories_of

    return trajectories_of(storage)


def _with_episodes(
    described: Info, storage: Storage, trajectories: Trajectories | str, returns: bool, progress: bool
) -> Info:
    from engram.cli.trajectories import episode_returns, has_rewards

    if isinstance(trajectories, str):
        return _noting(described, trajectories)
    length = trajectories.length.numpy()
    described = replace(described, episodes=len(length), lengths=summary(length))
    if not returns:
        return described
    if not has_rewards(storage):
        return _noting(described, NO_REWARDS)
    with progress_bar(f"reading rewards of {described.path}", storage.shape[0], progress) as advance:
        return replace(described, returns=summary(episode_returns(storage, trajectories, advance)))


def summary(values: npt.NDArray[Any]) -> Summary | None:
    """Of numbers, NaN apart; None where there are none."""
    values = values[~np.isnan(values)]
    return Summary(float(values.min()), float(values.mean()), float(values.max())) if len(values) else None


def _noting(described: Info, note: str) -> Info:
    return replace(described, notes=(*described.notes, note))
