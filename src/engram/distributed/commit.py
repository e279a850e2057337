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
from pathlib import Path
from typing import NamedTuple

from engram.distributed.client import ShardClient
from engram.errors import CheckpointError, CheckpointMisfitError, ShardUnavailableError
from engram.kernel.disk import Checkpoint, saving

_FORMAT = "engram shards"
_PAUSE = 0.02  # seconds between two tries with a shard that was away


class ShardSnapshot(NamedTuple):
    """Where a shard's part of a save is, and its name."""

    folder: str
    name: str


def shard_folder(path: str | os.PathLike[str], shard: int) -> str:
    """Where a shard saves its part."""
    return str(Path(path).absolute() / "shards" / str(shard))


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
        calls = [
            (shard, shard.begin("dumps", shard_folder(path, shard.number), oldest[shard.number])) for shard in shards
        ]
        names = [shard.finish(call, deadline) for shard, call in calls]
        writer.body = {"format": _FORMAT, "shards": names}
    return writer.name


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
def saved_shards(
    path: str | os.PathLike[str], shards: int, snapshot: str | None = None
) -> Iterator[list[ShardSnapshot]]:
    """The parts of the save in force, or of the one named; no save removes it inside the block.

    Raises:
        CorruptCheckpointError: it is damaged, or no save of shards.
        CheckpointMisfitError: it is that of another number of shards.
    """
    with _reading_names(path, snapshot) as names:
        if len(names) != shards:
            raise CheckpointMisfitError(f"{path} does not fit", [f"it has {len(names)} shards, this buffer {shards}"])
        yield [ShardSnapshot(shard_folder(path, k), name) for k, name in enumerate(names)]


def load_shards(
    shards: Sequence[ShardClient], path: str | os.PathLike[str], snapshot: str | None, timeout: float
) -> None:
    """Gives every shard its part of a save, after all of them have verified theirs.

    Raises:
        CheckpointError: as `saved_shards`; or a part is damaged or does not fit. Nothing was changed, unless another
            process damaged it after it was verified.
        ShardUnavailableError: a shard is away for that long: others may have loaded. Load again.
    """
    deadline = time.monotonic() + timeout
    with saved_shards(path, len(shards), snapshot) as parts:
        for shard in shards:
            shard.await_presence(deadline)
        for method in ("verify", "loads"):
            try:
                errors = _carried_out(method, list(zip(shards, parts, strict=True)), deadline)
            finally:
                if method == "loads":
                    for shard in shards:
                        shard.forget()
            if errors:
                raise errors[0]


def _carried_out(method: str, todo: list[tuple[ShardClient, ShardSnapshot]], deadline: float) -> list[Exception]:
    """Has each shard do it with its part, once more where it was away meanwhile; returns what they raised."""
    errors: list[Exception] = []
    while todo:
        calls = [(shard, part, shard.begin(method, *part)) for shard, part in todo]
        todo = []
        for shard, part, call in calls:
            try:
                shard.finish(call, deadline)
            except ShardUnavailableError:
                todo.append((shard, part))
            except (CheckpointError, ValueError) as error:
                errors.append(error)
        for shard, _ in todo:
            shard.await_presence(deadline)
        if todo:
            time.sleep(_PAUSE)
    return errors
