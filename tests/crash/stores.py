"""The life of a mapped store in a process that dies at some event, and which rows may be there afterwards.

Events are system calls on its files and stores to counters of its header: `claimed`, `published`, `edits`, `base`, ...
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from crash import tracer
from engram import _native
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from engram.errors import StorageError
from engram.store import files as recovery
from engram.store import header
from engram.testing.helpers import numbers, of_numbers, steps

CAPACITY = 24
PIECE = CAPACITY // 8
CLAIMED, PUBLISHED, BASE, INCARNATION, EDITS = 1024, 1024 + 64, 1024 + 128, 512, 576
REDO, ROW, REMOVED = -1, -2, -3  # the mark of the redo area, a row, a count of removed rows: their places differ

Rows = list[int]


@dataclass
class Step:
    """Something that is done to the store: rows before and after it, and those that may be there in its middle."""

    name: str
    act: Callable[[Any], Any]
    watched: tuple[int, ...]
    before: Rows
    after: Rows
    between: Callable[[Rows], bool]

    def allows(self, found: Rows) -> bool:
        return found in (self.before, self.after) or self.between(found)


def story(root: Path) -> Iterator[Step]:
    """Every kind of change, one after the other; `root / "saved"` is a checkpoint of rows 900 to 909."""

    def extending(rows: Rows, start: int, n: int) -> dict[str, Any]:
        new = list(range(start, start + n))
        whole = rows + new

        def between(found: Rows) -> bool:
            """A prefix of what is written behind a suffix of what was there, less one piece at most."""
            for done in range(n + 1):
                now = rows + new[:done]
                if found == now[len(now) - len(found) :] and len(found) >= min(len(now), CAPACITY) - PIECE:
                    return True
            return False

        return {"before": rows, "after": whole[-CAPACITY:], "between": between}

    def editing(rows: Rows, at: Rows, add: int) -> dict[str, Any]:
        return {"before": rows, "after": [n + add if i in at else n for i, n in enumerate(rows)], "between": _no}

    rows: Rows = []
    made = extending(rows, 0, 5)
    yield Step("make", lambda rb: rb.extend(steps(0, 5)), (), **made)
    rows = made["after"]
    for start, n in ((5, 12), (17, 30)):
        grown = extending(rows, start, n)
        yield Step("extend", lambda rb, a=start, b=n: rb.extend(steps(a, a + b)), (CLAIMED, PUBLISHED, ROW), **grown)
        rows = grown["after"]
    edited = editing(rows, [2, 3, 20], 500)
    yield Step("edit", lambda rb: _replace(rb, [2, 3, 20], 500), (EDITS, REDO, ROW), **edited)
    rows = edited["after"]
    yield Step("flush", lambda rb: rb.storage.flush(), (PUBLISHED,), rows, rows, _no)
    edited = editing(rows, list(range(CAPACITY)), 500)
    yield Step(
        "edit of flushed rows", lambda rb: _replace(rb, list(range(CAPACITY)), 500), (EDITS, REDO, ROW), **edited
    )
    rows = edited["after"]
    yield Step("empty", lambda rb: rb.empty(), (BASE, PUBLISHED, INCARNATION), rows, [], _no)
    grown = extending([], 100, 10)
    yield Step("extend", lambda rb: rb.extend(steps(100, 110)), (CLAIMED, PUBLISHED, ROW), **grown)
    loaded = list(range(900, 910))
    watched = (BASE, PUBLISHED, INCARNATION, ROW)
    yield Step("loads", lambda rb: rb.loads(root / "saved"), watched, grown["after"], loaded, lambda found: not found)
    yield Step("close and open", _reopen, (), loaded, loaded, _no)
    grown = extending(loaded, 910, 30)
    yield Step("extend", lambda rb: rb.extend(steps(910, 940)), (CLAIMED, PUBLISHED, ROW), **grown)
    yield Step("close", lambda rb: rb.storage.close(), (), grown["after"], grown["after"], _no)


def _no(found: Rows) -> bool:
    return False


def _replace(rb: Any, oldest_first: list[int], add: int) -> None:
    """Adds to the numbers of these rows, counted from the oldest; one call for all of them."""
    where = torch.tensor(oldest_first)
    slots = in_time_order(rb)[where]
    rb[slots] = of_numbers(rb[slots]["n"] + add)


def _reopen(rb: Any) -> Any:
    rb.storage.close()
    return None


def in_time_order(rb: Any) -> torch.Tensor:
    lane = rb.storage.lanes.states()[0]
    return torch.arange(lane["first"], lane["published"]) % rb.storage.lanes.store.lane_capacity


def rows_of(rb: Any) -> Rows:
    """Numbers of all rows, oldest first; each is checked to be whole."""
    if not rb.storage.initialized or not len(rb):
        return []
    found: Rows = numbers(rb[in_time_order(rb)])
    return found


def opened(folder: Path) -> Any:
    return ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=folder, existsok=True))


def prepare(root: Path) -> None:
    """The checkpoint that the story loads."""
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    rb.extend(steps(900, 910))
    rb.dumps(root / "saved")


def _seams_bytes(store: Any) -> int:
    return int.from_bytes(bytes(store.memory()[200:208]), "little")


def watch(store: Any, offsets: tuple[int, ...]) -> None:
    memory = store.memory()
    places = {REDO: _native.testing.redo_offset(store), ROW: store.rows_offset + 7 * store.row_stride}
    places[REMOVED] = 1024 + store.lanes * (512 + _seams_bytes(store)) + 16  # of the first lane
    for slot, offset in enumerate(offsets):
        tracer.watch(slot, memory.ctypes.data + places.get(offset, offset))


def live(root: Path, upto: int | None = None) -> None:
    """In the child: the whole story; marks each step that has returned (1, 2, ...)."""
    tracer.start()
    rb = None
    for k, step in enumerate(story(root), 1):
        if rb is None:
            rb = opened(root / "store")
        if rb.storage.initialized:
            watch(rb.storage.lanes.store, step.watched)
        step.act(rb)
        rb = rb if rb.storage.initialized else None
        tracer.mark(k)
        if k == upto:
            return


def check(root: Path, done: int) -> Rows:
    """After a kill with `done` steps returned: the rows that `open` gives are allowed, and writing goes on."""
    all_steps = list(story(root))
    current = all_steps[done] if done < len(all_steps) else None
    try:
        rb = ReplayBuffer.open(root / "store")
    except StorageError as error:
        assert done == 0 and "no store" in str(error), f"after {done} steps: {error}"
        assert not (root / "store").exists() or list((root / "store").iterdir()) == [], "a half store is left"
        return []
    found = rows_of(rb)
    if current is None:
        assert found == all_steps[-1].after
    else:
        assert current.allows(found), f"in {current.name!r}: {found}, before {current.before}"
    count = rb.write_count
    slot = rb.extend(steps(5000, 5002))
    assert rb.write_count == count + 2 and numbers(rb[slot]) == [5000, 5001]
    assert rows_of(rb) == [*found, 5000, 5001][-CAPACITY:]
    rb.storage.close()
    again = ReplayBuffer.open(root / "store")
    assert rows_of(again) == [*found, 5000, 5001][-CAPACITY:] and again.write_count == count + 2
    again.storage.close()
    return found


def fresh(root: Path) -> None:
    shutil.rmtree(root / "store", ignore_errors=True)


def reopening(root: Path, other_boot: bool, seen: Callable[[Any], None] = lambda store: None) -> Callable[[], None]:
    """In a child: opens the store with all stores to its counters watched; `other_boot`: as if the machine had been
    off, so that every row is looked at; `seen` is called with the store before it is mended."""

    class Watching:
        """Stands for `_native`: watches a store from before it is mended."""

        class Store:
            @staticmethod
            def open(fd: int, **how: Any) -> Any:
                store = _native.Store.open(fd, **how)
                watch(store, (BASE, PUBLISHED, EDITS, REDO))
                seen(store)
                return store

        def __getattr__(self, name: str) -> Any:
            return getattr(_native, name)

    def work() -> None:
        header._native = Watching()  # type: ignore[assignment]
        if other_boot:
            recovery.boot_id = lambda: b"another boot id."
        tracer.start()
        rb = ReplayBuffer.open(root / "store")
        rb.storage.close()

    return work
