"""Disks that fail at any call of a save: an error that says so, the last good state whole, the buffer still usable.

Every write, sync, open, rename, ... of full, incremental and background saves fails once, whoever makes it.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from crash import buffers, tracer
from crash.buffers import MAKERS, grow, print_of
from crash.saves import Watched
from crash.test_save_kills import ALL, ONE_STYLE
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.errors import CheckpointError
from engram.testing.helpers import steps

#: What carries bytes to the disk: an error here can never be passed over.
CARRIES = tracer.WRITE | tracer.SIZE | tracer.SYNC
OTHERS = tracer.OPEN | tracer.NAME | tracer.READ | tracer.STAT | tracer.OTHER | tracer.MAP
ERRORS = [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT]

pytestmark = pytest.mark.filterwarnings("ignore:.*older snapshots could not be removed")


def fail_at(watched: Watched, path: Path, calls: range, what: int, kinds: int) -> Counter[str]:
    """Lets each of these calls fail, with one error after the other; what came of it."""
    outcomes: Counter[str] = Counter()
    for k, at in enumerate(calls):
        code = ERRORS[k % len(ERRORS)]
        traced, said, found = watched.failed(path, what, at, code, kinds)
        where = f"call {at}, {traced.call} of {traced.path}: {said!r}"
        if what in (tracer.FAIL, tracer.FAIL_FROM_HERE) and kinds == CARRIES and traced.done:
            assert said and str(path) in said and os.strerror(code) in said, where
        if not said:
            assert found == "new", where
        outcomes[f"{'error' if said else 'saved'}, {found}"] += 1
    return outcomes


@pytest.mark.parametrize(("kind", "style"), ONE_STYLE)
def test_a_write_or_sync_that_fails_is_an_error_and_the_last_state_stays(ram_path, kind, style):
    watched = Watched.make(kind, style, ram_path, CARRIES)
    step = watched.calls // 2
    outcomes = fail_at(watched, ram_path / "p", range(1 + len(kind) % step, watched.calls, step), tracer.FAIL, CARRIES)
    assert set(outcomes) <= {"error, old", "error, new"}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "style"), ALL)
def test_each_write_or_sync_that_fails_is_an_error_and_the_last_state_stays(ram_path, kind, style):
    watched = Watched.make(kind, style, ram_path, CARRIES)
    calls = range(1, watched.calls + 2, 1 + watched.calls // 150)
    once = fail_at(watched, ram_path / "p", calls, tracer.FAIL, CARRIES)
    for_good = fail_at(watched, ram_path / "p", calls[::5], tracer.FAIL_FROM_HERE, CARRIES)
    print(f"{kind}, {style}: {watched.calls} writes and syncs: {dict(once)}; failing from there on: {dict(for_good)}")
    assert once["error, old"] > 5


@pytest.mark.long
@pytest.mark.parametrize(("kind", "style"), ALL)
def test_any_other_call_that_fails_is_an_error_or_no_harm(ram_path, kind, style):
    watched = Watched.make(kind, style, ram_path, OTHERS)
    outcomes = fail_at(watched, ram_path / "p", range(1, watched.calls + 2), tracer.FAIL, OTHERS)
    closed = Watched.make(kind, style, ram_path, tracer.CLOSE)
    outcomes += fail_at(closed, ram_path / "p", range(1, closed.calls + 2), tracer.FAIL, tracer.CLOSE)
    print(f"{kind}, {style}: {watched.calls + closed.calls} other calls: {dict(outcomes)}")


def test_a_disk_that_does_not_say_what_is_there_costs_no_state(ram_path):
    watched = Watched.make("best", "full", ram_path, tracer.STAT)
    outcomes = fail_at(watched, ram_path / "p", range(1, watched.calls + 1), tracer.FAIL, tracer.STAT)
    assert outcomes["error, old"]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "style"), ALL)
def test_short_writes_and_interrupted_calls_go_unnoticed(ram_path, kind, style):
    watched = Watched.make(kind, style, ram_path, tracer.WRITE)
    calls = range(1, watched.calls + 1, 1 + watched.calls // 60)
    short = fail_at(watched, ram_path / "p", calls, tracer.SHORTEN, tracer.WRITE)
    assert set(short) == {"saved, new"}
    interrupted: Counter[str] = Counter()
    for at in calls:
        _, said, found = watched.failed(ram_path / "p", tracer.FAIL, at, errno.EINTR, tracer.WRITE)
        interrupted[f"{'error' if said else 'saved'}, {found}"] += 1
    print(f"{kind}, {style}: {watched.calls} writes shortened: {dict(short)}; interrupted: {dict(interrupted)}")
    assert set(interrupted) == {"saved, new"}


@pytest.mark.parametrize("kind", ["tensor", "h5"])
def test_a_short_or_interrupted_write_goes_unnoticed(ram_path, kind):
    watched = Watched.make(kind, "full", ram_path, tracer.WRITE)
    for what, at, code in ((tracer.SHORTEN, 3, 0), (tracer.FAIL, 4, errno.EINTR)):
        traced, said, found = watched.failed(ram_path / "p", what, at, code, tracer.WRITE)
        assert traced.done and said == "" and found == "new"


def test_no_call_that_fails_makes_a_save_remove_a_snapshot_that_is_to_stay(ram_path):
    kinds = OTHERS | CARRIES
    path = ram_path / "p"

    def saved(number: int) -> None:
        rb = ReplayBuffer(storage=LazyTensorStorage(20))
        rb.extend(steps(0, number))
        tracer.start()
        try:
            rb.dumps(path, keep_last=3)
        except CheckpointError:
            pass

    def kept() -> list[int]:
        rb, found = ReplayBuffer(storage=LazyTensorStorage(20)), []
        for snapshot in sorted(path.glob("g-*")):
            if (snapshot / "manifest.json").exists() and (snapshot / "ENGRAM-SNAPSHOT").exists():
                rb.loads(path, snapshot=snapshot.name)
                found.append(len(rb))
        return found

    for number in (1, 2, 3):
        tracer.run(lambda n=number: saved(n), path)
    calls = tracer.run(lambda: saved(4), path, kinds=kinds).counted
    at, number = 1, 4
    while at < calls:
        traced = tracer.run(lambda n=number: saved(n % 20 + 1), path, tracer.FAIL, at, error=errno.EIO, kinds=kinds)
        found = kept()
        assert len(found) >= 3, (at, traced.call, traced.path, found)
        number, at = number + 1, at + 9


@pytest.mark.parametrize("kind", ["tensor", "h5", "list"])
def test_a_disk_that_fills_up_says_so_and_the_buffer_goes_on(mount, kind):
    path = mount("256k")
    rb = MAKERS[kind]()
    grow(rb, 1)
    rb.dumps(path / "saved")
    before = print_of(path / "saved", kind)
    used = os.statvfs(path)
    (path / "ballast").write_bytes(bytes((used.f_bavail - 2) * used.f_bsize))
    grow(rb, 2)
    for blocking in (True, False):
        with pytest.raises(CheckpointError, match=r"bytes.* free"):
            handle = rb.dumps(path / "saved", blocking=blocking)
            assert handle is not None and handle.result(60)
        assert print_of(path / "saved", kind) == before
    (path / "ballast").unlink()
    rb.dumps(path / "saved")
    assert print_of(path / "saved", kind) != before
    subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)
    after = print_of(path / "saved", kind)
    grow(rb, 3)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        rb.dumps(path / "saved")
    assert print_of(path / "saved", kind) == after


def test_a_folder_that_may_not_be_written_is_an_error_and_the_state_stays(ram_path):
    ram_path.chmod(0o755)
    path = buffers.fresh(ram_path / "p")
    rb = MAKERS["tensor"]()
    grow(rb, 1)
    rb.dumps(path)
    before = print_of(path, "tensor")

    def work() -> str:
        if os.geteuid() == 0:  # who may write anywhere
            os.setresuid(65534, 65534, 65534)
        try:
            rb.dumps(path)
        except CheckpointError as error:
            return str(error)
        return ""

    for folder in (path, *path.glob("g-*")):
        folder.chmod(0o555)
    (path / "LOCK").chmod(0o666)
    said = tracer.run(work, path).result
    for folder in (path, *path.glob("g-*")):
        folder.chmod(0o755)
    assert str(path) in said and "Permission denied" in said
    assert print_of(path, "tensor") == before
    rb.dumps(path)
