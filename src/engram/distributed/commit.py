"""Saves of all shards together: each saves its part, then a root names them all, so that a load gets all or none.

    <path>/CURRENT, <path>/g-000007/        the root: a snapshot whose body has the name of each shard's snapshot
    <path>/shards/0/CURRENT, g-000009/ ...  the first shard's own checkpoint, as `ReplayBuffer.dumps` makes one

A shard keeps every snapshot from the oldest one on that a root names. A save that is killed leaves the root as it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from engram.distributed.client import PendingCall, ShardClient
from engram.distributed.resharding import divide_saved
from engram.errors import CheckpointError, CheckpointMisfitError, ShardUnavailableError
from engram.kernel.disk import Checkpoint, saving
from engram.kernel.tools import user_path

_FORMAT = "engram shards"
_PAUSE = 0.02  # seconds between two tries with a shard that was away
_LONGEST_PAUSE = 0.25  # seconds between two questions whether a shard has saved


class ShardSnapshot(NamedTuple):
    """Where a shard's part of a save is, and its name."""

    folder: str
    name: str


def shard_folder(path: str | os.PathLike[str], shard: int) -> str:
    """Where a shard saves its part."""
    return str(user_path(path).absolute() / "shards" / str(shard))


def save_shards(shards: Sequence[ShardClient], path: str | os.PathLike[str], keep_last: int, timeout: float) -> str:
    """Saves all shards, and puts them in force together; returns the name of the root's snapshot.

    Raises:
        ShardUnavailableError: a shard is away, or has not saved within so many seconds.
        CheckpointError: one cannot save, or another save runs here. The save before it is still in force.
    """
    deadline = time.monotonic() + timeout
    with saving(path, keep_last=keep_last) as writer:
        oldest = _oldest_named(path, len(shards))
        for shard in shards:
            shard.await_presence(deadline)
        saves = [_ShardSave(shard, shard_folder(path, shard.number), oldest[shard.number]) for shard in shards]
        pause = _PAUSE
        while any(not save.name for save in saves):
            waiting = [save for save in saves if not save.name]
            for save in waiting:
                save.ask()
            for save in waiting:
                save.take_answer(deadline)
            if not all(save.name for save in waiting):
                time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
                pause = min(1.5 * pause, _LONGEST_PAUSE)
        writer.body = {"format": _FORMAT, "shards": [save.name for save in saves]}
    return writer.name


class _ShardSave:
    """A save that one shard makes in the background, after one that it may be making for somebody else.

    Attributes:
        name: of the snapshot, when it is made.
    """

    def __init__(self, shard: ShardClient, folder: str, oldest: str | None) -> None:
        self._shard, self._folder, self._oldest = shard, folder, oldest
        self._number: int | None = None
        self._incarnation = 0  # of the shard, when the save was begun
        self._call: PendingCall | None = None
        self.name = ""

    def ask(self) -> None:
        """Asks the shard to begin, or whether the save has ended."""
        if self._number is None:
            self._incarnation = self._shard.totals.incarnation
            self._call = self._shard.begin("begin_save", self._folder, self._oldest)
        else:
            self._call = self._shard.begin("saved", self._number)

    def take_answer(self, deadline: float) -> None:
        """Waits for the shard's answer; a question that was lost is asked again.

        Raises:
            ShardUnavailableError: nothing is known until then; or it is not known whether the save was begun, or the
                shard has begun another life, and with it forgotten the save.
            CheckpointError: the save failed.
        """
        assert self._call is not None
        try:
            answer = self._shard.finish(self._call, deadline)
        except ShardUnavailableError:
            if self._number is None:
                raise
            self._shard.await_presence(deadline)
            if self._shard.totals.incarnation != self._incarnation:
                raise
            answer = None
        if self._number is None:
            self._number = answer
        else:
            self.name = answer or ""
        if not self.name and time.monotonic() > deadline:
            raise ShardUnavailableError(f"shard {self._shard.number} has not saved in time")


def _oldest_named(path: str | os.PathLike[str], shards: int) -> list[str | None]:
    """The oldest snapshot of each shard that any root names, which must stay; None: none is named."""
    oldest: list[str | None] = [None] * shards
    for root in Checkpoint(path).snapshots():
        try:
            with _reading_names(path, root) as found:
                names = found
        except CheckpointError:  # unfinished or damaged: it cannot be loaded
            continue
        for k, name in enumerate(names[:shards]):
            now = oldest[k]
            oldest[k] = name if now is None or (len(name), name) < (len(now), now) else now  # numbers that rise
    return oldest


@contextmanager
def _reading_names(path: str | os.PathLike[str], snapshot: str | None) -> Iterator[list[str]]:
    """The name of each shard's snapshot in the save in force, or in the one named, which no save removes meanwhile."""
    with Checkpoint(path).reading(snapshot) as reader:
        names = reader.body.get("shards")
        is_list = isinstance(names, list) and all(map(Checkpoint.is_name, names))
        if reader.body.get("format") != _FORMAT or not is_list:
            raise reader.malformed(
                "it is not a save of shards together; one of a single buffer is loaded by ReplayBuffer.loads"
            )
        assert isinstance(names, list)
        yield names


@contextmanager
def saved_shards(path: str | os.PathLike[str], snapshot: str | None = None) -> Iterator[list[ShardSnapshot]]:
    """The parts of the save in force, or of the one named; no save removes it inside the block.

    Raises:
        CorruptCheckpointError: it is damaged, or no save of shards.
    """
    with _reading_names(path, snapshot) as names:
        yield [ShardSnapshot(shard_folder(path, k), name) for k, name in enumerate(names)]


def load_shards(
    shards: Sequence[ShardClient], path: str | os.PathLike[str], snapshot: str | None, timeout: float
) -> None:
    """Gives every shard its part of a save, after all of them have verified theirs.

    Of a save of another number of shards each gets an equal number of rows (`divide_saved`).

    Raises:
        CheckpointError: as `saved_shards`; or a part is damaged or does not fit. Nothing was changed, unless another
            process damaged it after it was verified.
        ShardUnavailableError: a shard is away for that long: others may have loaded. Load again.
    """
    deadline = time.monotonic() + timeout
    with saved_shards(path, snapshot) as parts:
        for shard in shards:
            shard.await_presence(deadline)
        methods, todo = ("verify", "loads"), list[tuple[ShardClient, tuple[Any, ...]]](zip(shards, parts, strict=False))
        if len(parts) != len(shards):
            methods, pieces = ("verify_pieces", "load_pieces"), divide_saved(parts, len(shards))
            todo = [(shard, (some,)) for shard, some in zip(shards, pieces, strict=True)]
            _check_room(path, shards, [sum(piece.stop - piece.start for piece in some) for some in pieces])
        for method in methods:
            try:
                errors = _carried_out(method, todo, deadline)
            finally:
                if method == methods[1]:
                    for shard in shards:
                        shard.forget()
            if errors:
                raise errors[0]
        for shard in shards:
            shard.await_presence(deadline)  # so that what is known of its rows is of the life that it has begun


def _check_room(path: str | os.PathLike[str], shards: Sequence[ShardClient], rows: Sequence[int]) -> None:
    room = sum(shard.facts.capacity for shard in shards)
    if any(n > shard.facts.capacity for shard, n in zip(shards, rows, strict=True)):
        raise CheckpointMisfitError(
            f"{path} does not fit", [f"room for {room} rows in {len(shards)} shards here, {sum(rows)} rows saved there"]
        )


def _carried_out(method: str, todo: list[tuple[ShardClient, tuple[Any, ...]]], deadline: float) -> list[Exception]:
    """Has each shard do it with its arguments, once more where it was away meanwhile; returns what they raised."""
    errors: list[Exception] = []
    while todo:
        calls = [(shard, arguments, shard.begin(method, *arguments)) for shard, arguments in todo]
        todo = []
        for shard, arguments, call in calls:
            try:
                shard.finish(call, deadline)
            except ShardUnavailableError:
                todo.append((shard, arguments))
            except (CheckpointError, ValueError) as error:
                errors.append(error)
        for shard, _ in todo:
            shard.await_presence(deadline)
        if todo:
            time.sleep(_PAUSE)
    return errors
