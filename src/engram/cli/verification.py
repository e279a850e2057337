"""Compares every checksum at a path with the bytes, and says which file, and which rows, are damaged."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from engram._progress import progress_bar
from engram.cli.kinds import Kind, kind_of, store_folder
from engram.errors import CheckpointError, DatasetError, StorageError, StorageInUseError
from engram.kernel.disk import Checkpoint, StoreFile
from engram.kernel.tools import user_path, visible

_ROWS_AT_ONCE = 1 << 16  # rows of a lane, in one native call
_TRIES = 500  # while rows are being changed in place


class Damage(NamedTuple):
    """A damaged file, the reason, and the rows that it held, where they are known."""

    file: str
    reason: str
    rows: str = ""


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes:
        path, kind: what was looked at.
        ok: whether it can be used as it is: nothing is damaged; of a checkpoint, nothing of the snapshot in force.
        nbytes: bytes that were compared with checksums.
        checked: what was compared, in words.
        damages: what is damaged.
        newest_whole: of a checkpoint, the newest snapshot whose files are all as they were saved.
    """

    path: str
    kind: Kind
    ok: bool
    nbytes: int
    checked: str
    damages: tuple[Damage, ...] = ()
    newest_whole: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The same as JSON."""
        return {**self.__dict__, "damages": [damage._asdict() for damage in self.damages]}


def verify(path: str | os.PathLike[str], *, progress: bool = False) -> Verification:
    """Reads everything at a path and compares it with its checksums. Damage is reported, not raised.

    Of a store each row is compared with its own checksum, beside the job that writes it; of a checkpoint each file of
    each snapshot; of a dataset all steps are read, with the checksums that its format has. Nothing is changed.

    Args:
        path: the folder or the file.
        progress: show how far it is, if standard error is a terminal.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: what is there is nothing that engram reads, or (a directory of TorchRL's) it has no checksums.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder))
        >>> _ = rb.extend(torch.arange(10))
        >>> result = verify(folder)
        >>> result.ok, result.checked
        (True, '10 rows')
    """
    kind = kind_of(path)
    if kind == "store":
        return _verify_store(path, progress)
    if kind == "checkpoint":
        return _verify_checkpoint(path, progress)
    if kind == "TorchRL directory":
        raise ValueError(
            f"{visible(path)} was written by TorchRL or tensordict, which keep no checksums: nothing to compare"
        )
    return _verify_dataset(path, kind, progress)


# ---- a store ----
def _verify_store(path: str | os.PathLike[str], progress: bool) -> Verification:
    folder = store_folder(path)
    file = str(folder / StoreFile.NAME)
    try:
        opened = StoreFile.observed(folder)
    except StorageInUseError:
        raise
    except StorageError as error:
        return Verification(str(path), "store", False, 0, "the header", (Damage(file, str(error)),))
    results: list[_Checked] = []
    with opened:
        store = opened.store
        pieces = _pieces(store)
        total = store.envs * sum(stop - start for _, start, stop in pieces)
        with progress_bar(f"verifying {path}", total, progress) as advance:

            def check(piece: tuple[int, int, int]) -> None:
                lane, start, stop = piece
                results.append(_check_rows(store, lane, start, stop))
                advance((stop - start) * store.envs)

            # While one thread waits for the disk, the other one computes; neither holds the GIL.
            with ThreadPoolExecutor(2, thread_name_prefix="engram-read") as pool:
                deque(pool.map(check, pieces), maxlen=0)
    results.sort()
    damages = [_damaged_row(file, store, part.lane, *at) for part in results for at in part.damaged]
    rows = sum(part.rows for part in results)
    return Verification(str(path), "store", not damages, rows * store.row_stride, f"{rows:,} rows", tuple(damages))


class _Checked(NamedTuple):
    """Rows of a lane that were compared: where they begin, how many, sequence and environment of the damaged ones."""

    lane: int
    start: int
    rows: int
    damaged: list[tuple[int, int]]


def _pieces(store: Any) -> list[tuple[int, int, int]]:
    """Lane, start and stop of the rows that are compared in one call: of all that are stored now."""
    steps = max(1, _ROWS_AT_ONCE // store.envs)
    pieces = []
    for lane in range(store.lanes):
        state = store.lane(lane)
        for start in range(state["first"], state["published"], steps):
            pieces.append((lane, start, min(start + steps, state["published"])))
    return pieces


def _check_rows(store: Any, lane: int, start: int, stop: int) -> _Checked:
    """Compares rows with their checksums.

    Raises:
        StorageInUseError: rows were changed in place, or all rows replaced, each time that they were read.
    """
    for _ in range(_TRIES):
        before = store.epoch()
        checked, damaged = store.check_rows(lane, start, stop)
        if not damaged or (store.epoch() == before and not any(count % 2 for count in before)):
            return _Checked(lane, start, checked, damaged)
        time.sleep(0.005)
    raise StorageInUseError("rows of the store are being changed in place all the time; try again")


def _damaged_row(file: str, store: Any, lane: int, sequence: int, env: int) -> Damage:
    step = lane * store.lane_capacity + sequence % store.lane_capacity
    slot = f"slot {step}" if store.envs == 1 else f"slot {step * store.envs + env} (environment {env})"
    return Damage(file, "a row does not have the bytes that its checksum was made of", f"{slot}, lane {lane}")


# ---- a checkpoint ----
def _verify_checkpoint(path: str | os.PathLike[str], progress: bool) -> Verification:
    with progress_bar(f"verifying {path}", None, progress) as advance:
        report = Checkpoint(path).verify(lambda name: advance(1))
    damages = [Damage(report.path, problem) for problem in report.problems]
    for snapshot in report.snapshots:
        folder = os.path.join(report.path, snapshot.name)
        if len(snapshot.damaged) != len(snapshot.problems):  # its manifest is damaged: no file could be looked at
            damages += [Damage(folder, problem) for problem in snapshot.problems]
            continue
        rows = _rows_of_files(report.path, snapshot.name) if snapshot.damaged else {}
        for file, problem in zip(snapshot.damaged, snapshot.problems, strict=True):
            damages.append(Damage(os.path.join(folder, file), problem, rows.get(file, "")))
    files, nbytes = sum(s.files for s in report.snapshots), sum(s.nbytes for s in report.snapshots)
    checked = f"{files} files in {len(report.snapshots)} snapshot{'' if len(report.snapshots) == 1 else 's'}"
    return Verification(str(path), "checkpoint", report.ok, nbytes, checked, tuple(damages), report.newest_whole)


def _rows_of_files(path: str, name: str) -> dict[str, str]:
    """A description of the steps in each file of rows of a snapshot."""
    try:
        with Checkpoint(path).reading(name) as reader:
            storage = reader.body.get("storage") or {}
            chunks = {(c[0], c[1]): c for c in storage["state"]["chunks"] if isinstance(c, list)}
            return {file: _in_words(file, chunks) for file in reader.files}
    except (CheckpointError, KeyError, TypeError, IndexError):  # removed by a save, or of a form without chunks
        return {}


def _in_words(file: str, chunks: dict[tuple[int, int], list[int]]) -> str:
    match = re.search(r"rows-(\d+)-(\d+)\.bin$", file)
    chunk = None if match is None else chunks.get((int(match[1]), int(match[2])))
    return "" if chunk is None else f"steps {chunk[2]} to {chunk[3] - 1} of lane {chunk[0]}"


# ---- a dataset ----
def _verify_dataset(path: str | os.PathLike[str], kind: Kind, progress: bool) -> Verification:
    from engram.cli.sources import DATASETS  # late: it loads torch

    place, steps = user_path(path), 0
    try:
        with progress_bar(f"reading {path}", DATASETS[kind].size(path).steps, progress) as advance:
            for batch in DATASETS[kind].batches(path):
                steps += len(batch)
                advance(len(batch))
    except DatasetError as error:
        return Verification(
            str(path), kind, False, 0, f"{steps:,} steps before the damage",
            (Damage(error.file, error.reason, f"after step {steps}"),),
        )  # fmt: skip
    files = [file for file in place.rglob("*") if file.is_file()] if place.is_dir() else [place]
    return Verification(str(path), kind, True, sum(file.stat().st_size for file in files), f"{steps:,} steps read")
