"""A save that is watched by the tracer, and what must be true of its path whatever happened to it."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crash import buffers, tracer
from crash.buffers import LATER, MAKERS, grow, print_of
from engram import verify
from engram.errors import CheckpointError


@dataclass
class Watched:
    """One kind of buffer, one style of save, and the states that a load may find."""

    kind: str
    style: str
    old: bytes
    new: bytes
    calls: int
    later: Any  # a buffer that saves next, and the state that this gives
    later_print: bytes
    listing: list[str]  # after that save

    @classmethod
    def make(cls, kind: str, style: str, root: Path, kinds: int = tracer.CALLS) -> Watched:
        path = buffers.fresh(root / "sound")

        def sound() -> tuple[bytes, bytes]:
            rb = buffers.begun(kind, style, path)
            old = print_of(path, kind)
            tracer.start()
            buffers.save(rb, path, style)
            tracer.stop()
            return old, print_of(path, kind)

        traced = tracer.run(sound, path, kinds=kinds)
        old, new = traced.result
        assert old != new and print_of(path, kind) == new
        later = MAKERS[kind]()
        for stage in range(1, LATER + 1):
            grow(later, stage)
        later.dumps(path)
        names = buffers.own_names(path)
        assert len(names) == 3
        return cls(kind, style, old, new, traced.counted, later, print_of(path, kind), names)

    def killed(self, path: Path, what: int, at: int, kinds: int = tracer.CALLS) -> tuple[tracer.Traced, str]:
        """What came of a kill, after a check of all that must hold; "old" or "new": the state that was found."""
        buffers.fresh(path)
        traced = tracer.run(self._work(path), path, what, at, kinds=kinds)
        found = self.state(path)
        self.check_next_save(path)
        return traced, found

    def state(self, path: Path) -> str:
        """Which of the two states `path` holds, whole."""
        found = print_of(path, self.kind)
        assert found in (self.old, self.new), "neither the old state nor the new one"
        assert verify(path).ok
        buffers.check_foreign(path)
        return "new" if found == self.new else "old"

    def check_next_save(self, path: Path) -> None:
        """It works, and of all that lay there it leaves only what others put there."""
        self.later.dumps(path)
        assert print_of(path, self.kind) == self.later_print
        names = buffers.own_names(path)
        assert len(names) == 3 and names[:2] == ["CURRENT", "LOCK"], names
        snapshot = path / names[2]
        files = [str(f.relative_to(snapshot)) for f in snapshot.rglob("*") if f.is_file()]
        named = json.loads((snapshot / "manifest.json").read_text())["files"]
        assert sorted(files) == sorted([*named, "manifest.json", "ENGRAM-SNAPSHOT"])
        buffers.check_foreign(path)

    def _work(self, path: Path) -> Callable[[], str]:
        def work() -> str:
            rb = buffers.begun(self.kind, self.style, path)
            tracer.start()
            buffers.save(rb, path, self.style)
            return "saved"

        return work

    def failed(self, path: Path, what: int, at: int, error: int, kinds: int) -> tuple[tracer.Traced, str, str]:
        """What came of a failing call: the trace, the error's text ("" for none), and the state that was found."""
        buffers.fresh(path)
        aside = path.with_name("aside")
        shutil.rmtree(aside, ignore_errors=True)

        def work() -> str:
            rb = buffers.begun(self.kind, self.style, path)
            before = _held()
            said = ""
            tracer.start()
            try:
                buffers.save(rb, path, self.style)
            except CheckpointError as problem:
                said = str(problem)
            tracer.stop()
            after = _held()
            assert kinds == tracer.CLOSE or after == before, f"a thread, a file or a lock is left: {before} {after}"
            shutil.copytree(path, aside)
            if what == tracer.FAIL_FROM_HERE or said:
                grow(rb, 5)  # the buffer goes on as if nothing had been
            rb.dumps(path)
            assert print_of(path, self.kind)
            assert len(buffers.own_names(path)) == 3, "the next save left something"
            return said

        traced = tracer.run(work, path, what, at, error=error, kinds=kinds)
        names = buffers.own_names(aside)
        assert {n for n in names if not n.startswith("g-")} == {"CURRENT", "LOCK"}, names
        found = self.state(aside)
        buffers.check_foreign(path)
        return traced, traced.result, found


def _held() -> tuple[Any, ...]:
    """What a process holds: its threads and open files."""
    for thread in threading.enumerate():
        if thread.name == "engram-save":
            thread.join(100)  # `result` returns a moment before its thread ends
    files = sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd))
    return threading.active_count(), [f for f in files if not f.startswith("/proc")]


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
