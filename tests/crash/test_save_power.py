"""Power cuts during saves: whatever of the unsynced files and names is lost, a load finds a whole state.

A save that has returned is what is found; the old state or the new one while it runs; and nothing that a killed save
left unsynced costs the state when the next save cleans up.
"""

from __future__ import annotations

import errno
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from contracts.power import Folder
from crash import buffers, tracer
from crash.buffers import KINDS, STYLES, print_of
from crash.saves import Watched
from engram.errors import CheckpointError

_SAVED = 1


class PowerCuts:
    """Saves under the tracer, and images of what a cut at each of their calls may leave."""

    def __init__(self, watched: Watched, root: Path, seed: int, each: float) -> None:
        self.watched, self.path, self.root = watched, buffers.fresh(root / "p"), root
        self.random, self._each, self._seed = random.Random(seed), each, seed
        self.found: Counter[str] = Counter()
        self.images = 0
        self.allowed: set[bytes] = set()

    def save(self, kill_after_move: int | None = None) -> None:
        """The watched save, cut at any of its calls; killed at the n-th call after CURRENT was moved, if asked for."""
        w = self.watched

        def work() -> None:
            rb = buffers.begun(w.kind, w.style, self.path)
            tracer.start()
            tracer.mark(0)
            buffers.save(rb, self.path, w.style)
            tracer.mark(_SAVED)

        self.allowed = {w.old, w.new}
        at = 0 if kill_after_move is None else self._after_move(work) + kill_after_move
        buffers.fresh(self.path)
        self._run(work, at, self.event)

    def _after_move(self, work: object) -> int:
        calls: list[str] = []

        def listen(call: str, path: str, path2: str, args: list[int]) -> None:
            if call != "mark":
                calls.append(call)

        tracer.run(work, self.path, listen=listen)  # type: ignore[arg-type]
        return len(calls) - calls[::-1].index("rename")

    def save_next(self) -> None:
        """Another buffer's save behind a save that was killed: it cleans up, and may be cut, too."""
        w = self.watched
        self.allowed |= {w.later_print}

        def work() -> None:
            tracer.start()
            w.later.dumps(self.path)
            tracer.mark(_SAVED + 1)

        self._run(work, 0, self.event)

    def _run(self, work: object, at: int, listen: object) -> None:
        self._pending: str | None = None
        what = tracer.KILL if at else tracer.NOTHING
        self._syncs, self._fails = 0, 0
        tracer.run(work, self.path, what, at, listen=listen)  # type: ignore[arg-type]

    def fail_twice(self, sync: int) -> int:
        """The watched save, whose `sync`-th sync fails and, when it is made again, its first; then once more. How often
        it failed."""
        w = self.watched

        def work() -> int:
            rb = buffers.begun(w.kind, w.style, self.path)
            failed = 0
            tracer.start()
            tracer.mark(0)
            for _ in range(3):
                try:
                    rb.dumps(self.path)
                except CheckpointError as error:
                    assert "Input/output error" in str(error)
                    failed += 1
                else:
                    break
            tracer.mark(_SAVED)
            return failed

        self.allowed = {w.old, w.new}
        self._pending, self._syncs, self._fails = None, 0, sync
        what = tracer.FAIL_TWO_SYNCS
        traced = tracer.run(work, self.path, what, sync, error=errno.EIO, listen=self.event)
        return int(traced.result)

    def event(self, call: str, path: str, path2: str, args: list[int]) -> None:
        if call == "mark" and args[0] == 0:
            self.folder = Folder(self.path, self._seed)
            self._last = "", ""
            return
        if self._pending is not None:
            self.folder.synced(self._pending)
            self._pending = None
        self.folder.look(*self._last)
        self._last = call, path
        if call == "mark":
            self.allowed = {self.watched.new if args[0] == _SAVED else self.watched.later_print}
            self._each, before = 1.0, self._each
        if self.random.random() < self._each:
            self.check()
        if call == "mark":
            self._each = before
        if call in ("fsync", "fdatasync"):
            self._syncs += 1
            if self._fails <= self._syncs <= self._fails + 1 and self._fails:
                self.folder.sync_failed(path)
            else:
                self._pending = path

    def check(self) -> None:
        image = self.root / "image"
        shutil.rmtree(image, ignore_errors=True)
        self.folder.image(image)
        found = print_of(image, self.watched.kind)
        assert found in self.allowed, "neither the old state nor the new one"
        names = {self.watched.old: "old", self.watched.new: "new"}
        self.found[names.get(found, "later")] += 1
        self.images += 1
        if self.images % 10 == 0:
            self.watched.later.dumps(image)
            assert print_of(image, self.watched.kind) == self.watched.later_print
            buffers.check_foreign(image)


@pytest.mark.parametrize(("kind", "style"), [("tensor", "incremental"), ("h5", "background")])
def test_after_a_power_cut_a_load_finds_a_whole_state(ram_path, kind, style):
    cuts = PowerCuts(Watched.make(kind, style, ram_path), ram_path, seed=1, each=0.15 if kind == "tensor" else 0.05)
    cuts.save()
    assert cuts.images > 5 and cuts.found["new"]


def test_what_a_killed_save_had_not_synced_costs_no_state_when_the_next_one_cleans_up(ram_path):
    watched = Watched.make("tensor", "full", ram_path)
    for seed in range(2):
        cuts = PowerCuts(watched, ram_path, seed, each=0.1)
        cuts.save(kill_after_move=1)
        cuts._each = 0.3
        cuts.save_next()
        assert cuts.found["later"] or cuts.found["new"]


def fail_twice(watched, root, syncs, each):
    found = Counter[str]()
    for sync in syncs:
        cuts = PowerCuts(watched, root, seed=sync, each=each)
        assert cuts.fail_twice(sync) == 2, sync
        found += cuts.found
    return found


def test_a_save_whose_syncs_fail_twice_costs_no_state_and_none_is_believed_that_failed(ram_path):
    watched = Watched.make("tensor", "incremental", ram_path, tracer.SYNC)
    last = watched.calls  # the move of CURRENT, in its folder
    found = fail_twice(watched, ram_path, (1, last // 2, last - 1, last), each=0.05)
    assert found["old"] and found["new"]


@pytest.mark.deep
@pytest.mark.parametrize("every", [3, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_sync_of_a_save_fails_twice(ram_path, kind, every):
    """So many of the syncs of files, each in its turn, and those of the folders, which are the last ones."""
    watched = Watched.make(kind, STYLES[len(kind) % 2], ram_path, tracer.SYNC)
    last = watched.calls
    ends = (last - 2, last - 1, last) if every > 3 else (last,)
    found = fail_twice(watched, ram_path, [*range(1, last - 2, 1 + last // every), *ends], each=0.01)
    assert found["new"]


def test_a_new_folder_whose_name_failed_twice_to_reach_the_disk_holds_the_save_that_succeeds(ram_path):
    path, at = ram_path / "above" / "p", 0
    folder = Folder(ram_path, 0)
    last = "", ""

    def work() -> int:
        rb = buffers.begun("list", "full", ram_path / "other")
        failed = 0
        tracer.start()
        for _ in range(3):
            try:
                rb.dumps(path)
            except CheckpointError:
                failed += 1
        return failed

    def event(call: str, name: str, name2: str, args: list[int]) -> None:
        nonlocal at, last
        folder.look(*last)
        if last[0] == "fsync":
            at += 1
            folder.sync_failed(last[1]) if at in (1, 2) else folder.synced(last[1])
        last = call, name

    assert tracer.run(work, ram_path, tracer.FAIL_TWO_SYNCS, 1, error=errno.EIO, listen=event).result == 2
    event("", "", "", [])
    for k in range(20):
        folder.image(ram_path / f"image{k}")
        assert print_of(ram_path / f"image{k}" / "above" / "p", "list")


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_power_cuts(ram_path, kind):
    found, images = Counter[str](), 0
    for style in STYLES:
        watched = Watched.make(kind, style, ram_path)
        for seed in range(4):
            cuts = PowerCuts(watched, ram_path, seed, each=0.25)
            cuts.save()
            after = PowerCuts(watched, ram_path, seed + 100, each=0.2)
            after.save(kill_after_move=seed)
            after.save_next()
            images += cuts.images + after.images
            found += cuts.found + after.found
    print(f"{kind}: {images} images: {dict(found)}")
    assert images > 500
