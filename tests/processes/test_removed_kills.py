"""Processes that write and remove are killed at any instruction: no removed row is drawn, no other one is hidden."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contracts.children import Child
from contracts.each import each
from engram import _native
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer

WORKERS, CAPACITY = 3, 4 * 512
STREAM = 1 << 24  # numbers of the rows of one process

KINDS = {
    "turns in a file": lambda path: LazyMemmapStorage(CAPACITY, scratch_dir=path / "store", existsok=True),
    "stints in a file": lambda path: LazyMemmapStorage(CAPACITY, scratch_dir=path / "store", existsok=True, lanes=4),
    "turns in shared memory": lambda path: LazyTensorStorage(CAPACITY, shared=True),
    "stints in shared memory": lambda path: LazyTensorStorage(CAPACITY, shared=True, lanes=4),
}


class Oracle:
    """What processes say before and after each removal: numbers of rows, in files that outlive whoever is killed.

    Each writes its own: a kill may cut its last word short.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._read: dict[str, int] = {}
        self.begun: set[int] = set()  # rows that somebody has begun to remove
        self.done: set[int] = set()  # rows whose removal was acknowledged

    def writer(self, stream: int) -> Callable[[str, list[int]], None]:
        file = (self._folder / str(stream)).open("wb", buffering=0)

        def say(what: str, rows: list[int]) -> None:
            file.write(struct.pack(f"<{len(rows) + 1}q", len(rows) * 2 + (what == "done"), *rows))

        return say

    def hear(self) -> None:
        for path in self._folder.iterdir():
            at = self._read.get(path.name, 0)
            if path.stat().st_size > at:
                with path.open("rb") as file:
                    file.seek(at)
                    self._read[path.name] = at + self._take(file.read())

    def _take(self, said: bytes) -> int:
        """Takes what was said whole; how many bytes of it."""
        words, at = struct.unpack_from(f"<{len(said) // 8}q", said), 0
        while at < len(words) and at + 1 + words[at] // 2 <= len(words):
            rows = words[at + 1 : at + 1 + words[at] // 2]
            (self.done if words[at] % 2 else self.begun).update(rows)
            at += 1 + len(rows)
        return 8 * at


def work(rb: ReplayBuffer, stream: int, say: Callable[[str, list[int]], None]) -> None:
    """Writes and removes for ever."""
    draw, at = random.Random(stream), stream * STREAM
    while True:
        n = draw.choice((1, 8, 50))
        rb.extend({"number": torch.arange(at, at + n)})
        at += n
        for _ in range(draw.choice((0, 1, 3))):
            batch, info = rb.sample(draw.choice((1, 4, 16)), return_info=True)
            rows = sorted(set(batch["number"].tolist()))
            say("begun", rows)
            rb.remove(info["index"], generation=info["generation"])
            say("done", rows)


def stored(rb: ReplayBuffer) -> tuple[np.ndarray, np.ndarray]:
    """Beside writers: the numbers of rows that stayed stored while it looked, and which of them are removed."""
    store = rb.storage.lanes.store
    slots = torch.arange(store.lanes * store.lane_capacity)
    before = store.generations(slots)
    number = rb.storage.read(torch.where(before >= 0, slots, slots[before >= 0][0]))[0]["number"]
    removed = np.zeros(len(slots), bool)
    removed[store.removed(slots) or []] = True
    stays = ((store.generations(slots) == before) & (before >= 0)).numpy()
    return number.numpy()[stays], removed[stays]


def check(rb: ReplayBuffer, oracle: Oracle, known: set[int] | None = None) -> tuple[int, int]:
    """Whether rows are drawn or hidden as the oracle says; how many are, and how many of those are removed."""
    oracle.hear()
    done = set(oracle.done) if known is None else known  # acknowledged before the rows are looked at
    drawn = rb.sample(256)["number"].tolist()
    assert not done.intersection(drawn), "a removed row was drawn"
    number, removed = stored(rb)
    oracle.hear()
    assert not done.intersection(number[~removed].tolist()), "a removed row can be drawn"
    assert oracle.begun.issuperset(number[removed].tolist()), "a row is hidden that nobody removed"
    return len(number), int(removed.sum())


def check_counts(rb: ReplayBuffer) -> None:
    """Where nobody else writes any more: counts are those of the bits, once the turns of the dead are taken."""
    lanes, store = rb.storage.lanes, rb.storage.lanes.store
    rows = store.lane_capacity
    one_of_each = torch.arange(store.lanes) * rows
    with rb.storage.mutex:
        assert lanes.remove(one_of_each, torch.full_like(one_of_each, -2)) == 0
    bits = sum(
        int(np.unpackbits(np.frombuffer(store.removed_bits(i, s["first"], s["published"]), np.uint8)).sum())
        for i, s in enumerate(store.lane(k) for k in range(store.lanes))
    )
    every = len(store.removed(torch.arange(store.lanes * store.lane_capacity)) or [])
    # A bit of a row that a dead writer had claimed stays until the row after it comes; it is of no row.
    assert store.removed_rows == every and bits <= every
    drawable = rb.sample(64 * CAPACITY)["number"].unique()
    number, removed = stored(rb)
    assert set(drawable.tolist()) == set(number[~removed].tolist()), "a row that is left was never drawn"


def run(kind: str, path: Path, kills: int) -> dict[str, int]:
    opened: Callable[[Path], Any] = KINDS[kind]
    rb = ReplayBuffer(storage=opened(path))
    rb.extend({"number": torch.arange(CAPACITY)})
    rb.storage.release()
    oracle, draw, streams = Oracle(path / "oracle"), random.Random(7), iter(range(1, 1 << 30))
    store = rb.storage.lanes.store
    in_file = "file" in kind

    def worker() -> Child:
        stream = next(streams)

        def life() -> None:
            mine = ReplayBuffer(storage=opened(path)) if in_file and stream % 2 else rb
            work(mine, stream, oracle.writer(stream))

        return Child(life)

    def fresh() -> Any:
        """In another process, which opens the store; in shared memory, which joins it."""
        other = ReplayBuffer(storage=opened(path)) if in_file else rb
        return check(other, oracle)

    figures = {"kills": 0, "inside": 0, "looked at": 0, "removed": 0}
    workers = [worker() for _ in range(WORKERS)]
    for k in range(kills):
        time.sleep(draw.random() * 0.004)
        victim = draw.randrange(WORKERS)
        pid = workers[victim].pid
        workers[victim].kill()
        holders = [store.lane(lane)["turn"] & ((1 << _native.PID_BITS) - 1) for lane in range(store.lanes)]
        figures["kills"] += 1
        figures["inside"] += pid in holders
        for rows, removed in (check(rb, oracle), Child(fresh).result()) if k % 4 == 0 else (check(rb, oracle),):
            figures["looked at"] += rows
            figures["removed"] += removed
        if k % 16 == 15:
            for one in workers:
                if one is not workers[victim]:
                    one.kill()
            figures["kills"] += WORKERS - 1
            check(rb, oracle)
            Child(lambda: check_counts(ReplayBuffer(storage=opened(path)) if in_file else rb)).result()
            check(rb, oracle)
            workers = [worker() for _ in range(WORKERS)]
        else:
            workers[victim] = worker()
    for one in workers:
        one.kill()
    check_counts(rb)
    return figures


@pytest.mark.deep
@each("kind", KINDS)
def test_after_kills_no_removed_row_is_drawn_and_no_other_row_is_hidden(kind, tmp_path):
    figures = run(kind, tmp_path, 16)
    assert figures["removed"] > 100


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_after_hundreds_of_kills_no_removed_row_is_drawn_and_no_other_row_is_hidden(kind, tmp_path):
    figures = run(kind, tmp_path, 230)
    print(f"{kind}: {figures}")
    assert figures["kills"] > 250 and figures["removed"] > 1000
