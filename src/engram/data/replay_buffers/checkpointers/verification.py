"""`verify(path)`: compares every file of a checkpoint with its checksum and reports damage."""

from __future__ import annotations

import os
from dataclasses import dataclass

from engram.data.replay_buffers.checkpointers.directory import CURRENT, MANIFEST, CheckpointDirectory, Pointer
from engram.data.replay_buffers.checkpointers.reading import SnapshotGoneError, SnapshotReader
from engram.errors import CheckpointError, CorruptCheckpointError


@dataclass(frozen=True)
class SnapshotReport:
    """The result for one snapshot: how many files and bytes were compared, and what is damaged."""

    name: str
    in_force: bool
    files: int
    nbytes: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        state = "whole" if self.ok else "; ".join(self.problems)
        return (
            f"{self.name}{' (in force)' if self.in_force else ''}: {self.files} files, {self.nbytes:,} bytes, {state}"
        )


@dataclass(frozen=True)
class VerificationReport:
    """The result of `verify`: a report for each snapshot, newest first, and problems of the directory itself."""

    path: str
    snapshots: tuple[SnapshotReport, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the current snapshot can be loaded."""
        return not self.problems and any(report.in_force and report.ok for report in self.snapshots)

    @property
    def newest_whole(self) -> str | None:
        return next((report.name for report in self.snapshots if report.ok), None)

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.path}: {'whole' if self.ok else 'DAMAGED'}", *self.problems, *map(str, self.snapshots)]
        )


def verify(path: str | os.PathLike[str]) -> VerificationReport:
    """Compares every file of every snapshot at `path` with its checksum; damage is reported, not raised.

    Changes nothing; saves may run at the same time.

    Raises:
        CheckpointError: there is no checkpoint at `path`.
    """
    directory = CheckpointDirectory(os.path.abspath(os.fspath(path)))
    if not os.path.isdir(directory.root):
        raise CheckpointError(f"no checkpoint at {directory.root}: there is no such directory")
    pointer, problems = _pointer(directory)
    if pointer is None and not problems and not directory.snapshots():
        raise CheckpointError(f"no checkpoint at {directory.root}: there is no {directory.path(CURRENT)}")
    names = directory.snapshots()
    if pointer is not None and pointer.snapshot not in names and os.path.isdir(directory.path(pointer.snapshot)):
        names = [pointer.snapshot, *names]  # its marker is damaged, which the report says
    every = [_report(directory, name, pointer) for name in names]
    reports = tuple(report for report in every if report is not None)
    if pointer is not None and not any(report.in_force for report in reports) and directory.current() == pointer:
        problems = (*problems, f"{directory.path(CURRENT)} names {pointer.snapshot}, which is not there")
    return VerificationReport(directory.root, reports, problems)


def _pointer(directory: CheckpointDirectory) -> tuple[Pointer | None, tuple[str, ...]]:
    try:
        return directory.current(), ()
    except CorruptCheckpointError as error:
        return None, (str(error),)


def _report(directory: CheckpointDirectory, name: str, pointer: Pointer | None) -> SnapshotReport | None:
    """The report for one snapshot; None where a save removed it, or has not finished it."""
    in_force = pointer is not None and pointer.snapshot == name
    if not in_force and not os.path.lexists(directory.path(name, MANIFEST)):
        return None
    try:
        reader = SnapshotReader(directory, name, pointer.manifest if in_force and pointer else None)
    except SnapshotGoneError:
        return None
    except CheckpointError as error:
        return SnapshotReport(name, in_force, 0, 0, (str(error),))
    with reader:
        problems = tuple(problem for file in reader.files for problem in _problems(reader, file))
        nbytes = sum(record.nbytes for record in reader.files.values())
        return SnapshotReport(name, in_force, len(reader.files), nbytes, problems)


def _problems(reader: SnapshotReader, file: str) -> list[str]:
    try:
        reader.check([file])
    except CorruptCheckpointError as error:
        return [str(error)]
    return []
