"""Writers that are killed and readers that check every word, each a process of its own, on one shared file.

A program of its own (`python torture.py --seconds 5`), so that it also runs against builds with planted reorderings. It
prints one line of JSON: what was done, and `faults`: what no reader may ever see. Exit code 1: there were some.

The processes are forks of a controller that has one thread and has not opened the store; each opens the file itself.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engram import _native
from engram.store.lanes import Lanes
from engram.store.locks import LaneLocks
from native.support import numbers_of, row_words, store, words

_PAGE = 4096
_STOP, _RETURNED, _WIDTH = 0, 64, 8  # bytes of the side page: stop flag; rows that had returned, for each lane


class Torture:
    """One run.

    Args:
        folder: where the store's file goes.
        lanes, capacity, width: of the store; a row has `width` words of 8 bytes.
        readers: how many processes read. There is a writer for each lane.
        trailer: whether rows carry write number and checksum.
        kills: whether writers are killed at random moments.
    """

    def __init__(
        self, folder: Path, lanes: int, capacity: int, width: int, readers: int, trailer: bool, kills: bool, seed: int
    ) -> None:
        self.path, self.readers, self.kills = folder / "store", readers, kills
        folder.mkdir(exist_ok=True)
        self.width, self.capacity = width, capacity
        self.random = random.Random(seed)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        store(8 * width, capacity, lanes=lanes, trailer=trailer, fd=fd)
        os.close(fd)
        self.lanes = lanes
        self.side = mmap.mmap(-1, _PAGE)
        self.faults: list[str] = []
        self.done = {
            "kills": 0,
            "checks": 0,
            "seams": 0,
            "rounds": 0,
            "rows": 0,
            "missing": 0,
            "unwritten": 0,
            "written": 0,
        }

    def run(self, seconds: float, until_fault: bool) -> None:
        readers = [self._start(self._read, i) for i in range(self.readers)]
        writers = [self._start(self._write, i) for i in range(self.lanes)]
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (self.faults and until_fault):
            if self.kills:
                i = self.random.randrange(len(writers))
                if self.random.random() < 0.8:  # the others die while they take their lane
                    writers[i].wait_for_lane()
                time.sleep(self.random.uniform(0, 0.03))
                writers[i] = self._kill_and_replace(writers[i], i)
            else:
                time.sleep(0.02)
            for child in readers + writers:
                if child.ended():
                    end = 0
        self.side[_STOP] = 1
        for child in readers + writers:
            self._finish(child)
        for lane in range(self.lanes):
            if not self._check_rest(lane):
                self.faults.append(f"lane {lane} is held, and every process has ended")
        self.done["written"] = sum(struct.unpack_from(f"{self.lanes}q", self.side, _RETURNED))

    # ---- the controller ----
    def _start(self, work: Any, i: int) -> _Child:
        return _Child(work, i, self.random.randrange(1 << 60))

    def _kill_and_replace(self, writer: _Child, i: int) -> _Child:
        writer.kill()
        self.done["kills"] += 1
        self.done["seams"] += writer.found_seam()
        lane = writer.lane()
        if lane is not None:
            self.done["checks"] += self._check_rest(lane)
        return self._start(self._write, i)

    def _finish(self, child: _Child) -> None:
        said = child.wait()
        self.faults += said.pop("faults", [])
        for key, value in said.items():
            self.done[key] += value

    def _check_rest(self, lane: int) -> bool:
        """While nobody writes to a lane every row of it is there and whole, and none that had returned is missing.

        False: another writer was quicker to take the lane.
        """
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        s = _native.Store.open(fd, os.fstat(fd).st_size)
        locks = LaneLocks(fd, str(self.path))
        try:
            if not locks.take_lane(lane):
                return False
            state = s.lane(lane)
            returned = struct.unpack_from("q", self.side, _RETURNED + _WIDTH * lane)[0]
            if state["published"] < returned:
                self.faults.append(f"lane {lane}: {returned} rows had returned, {state['published']} are published")
            there = torch.arange(state["first"], state["published"])
            where = there % self.capacity + lane * self.capacity
            rows, missing, unwritten, numbers = s.gather(words(self.width)[0], where, sequences=True)
            if missing or unwritten or not torch.equal(numbers, there):
                self.faults.append(f"lane {lane} at rest: {missing} missing, {unwritten} unwritten")
            self.faults += _wrong(rows[0], numbers, lane, "at rest")
            return True
        finally:
            locks.close()

    # ---- the other processes ----
    def _join(self) -> Lanes:
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        s = _native.Store.open(fd, os.fstat(fd).st_size)
        return Lanes(s, LaneLocks(fd, str(self.path)), on_take=s.raise_term)

    def _write(self, seed: int, say: Any) -> dict[str, Any]:
        lanes, draw = self._join(), random.Random(seed)
        code, _ = words(self.width)
        s, lane = lanes.store, lanes.hold()
        state = s.lane(lane)
        if state["published"] > state["first"] and not s.next_is_seam(lane):
            raise AssertionError(f"lane {lane} was taken at {state['published']} without a seam")
        say(lane, s.next_is_seam(lane))
        while not self.side[_STOP]:
            n = draw.choice((1, 1, 2, 3, 5, self.capacity + 2))
            first = s.lane(lane)["published"]
            rows = row_words(torch.arange(first, first + n), self.width, edition=lane)
            s.append(lane, code.check_list([rows], 1, 0))
            struct.pack_into("q", self.side, _RETURNED + _WIDTH * lane, first + n)
        return {"faults": []}

    def _read(self, seed: int, say: Any) -> dict[str, Any]:
        s, draw = self._join().store, random.Random(seed)
        code, _ = words(self.width)
        done = {"rounds": 0, "rows": 0, "missing": 0, "unwritten": 0}
        faults: list[str] = []
        highest = [0] * self.lanes
        while not self.side[_STOP] and not faults:
            n = draw.choice((1, 8, 32, 128))
            where = s.uniform(torch.tensor([draw.randrange(1 << 62)]), n)
            if where is None:
                continue
            rows, missing, unwritten, numbers = s.gather(code, where, sequences=True)
            bad = {*(missing or ()), *(unwritten or ())}
            keep = torch.tensor([i for i in range(n) if i not in bad], dtype=torch.int64)
            done["rounds"] += 1
            done["rows"] += len(keep)
            done["missing"] += len(missing or ())
            done["unwritten"] += len(unwritten or ())
            for lane in range(self.lanes):
                mine = keep[where[keep] // self.capacity == lane]
                faults += _wrong(rows[0][mine], numbers[mine], lane, "read")
                if not torch.equal(numbers[mine] % self.capacity, where[mine] % self.capacity):
                    faults.append(f"lane {lane}: a number that is not of its slot")
                published = s.lane(lane)["published"]
                if published < highest[lane] or (len(mine) and int(numbers[mine].max()) >= published):
                    faults.append(f"lane {lane}: published is {published}, rows {numbers[mine].tolist()}")
                highest[lane] = published
        return {**done, "faults": faults}


def _wrong(rows: torch.Tensor, numbers: torch.Tensor, lane: int, when: str) -> list[str]:
    found, whole = numbers_of(rows)
    torn = (~whole).nonzero().flatten().tolist()
    other = (whole & ((found != numbers) | (rows[:, 0] // (1 << 50) != lane))).nonzero().flatten().tolist()
    said = [f"{when}: row {int(numbers[i])} of lane {lane} is torn" for i in torn]
    return said + [f"{when}: row {int(numbers[i])} of lane {lane} holds row {int(found[i])}" for i in other]


class _Child:
    """A forked process: what a writer says first (its lane, and whether there is a seam), and at its end (JSON)."""

    def __init__(self, work: Any, i: int, seed: int) -> None:
        self._from, to = os.pipe()
        self._said = b""
        self._over = False
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self._from)
                made = work(seed + i, lambda *said: os.write(to, bytes(said)))
                os.write(to, b"\xff" + json.dumps({**made, "faults": made["faults"][:20]}).encode())
                code = 0
            except BaseException:
                os.write(to, b"\xff" + json.dumps({"faults": [traceback.format_exc()]}).encode())
            finally:
                os._exit(code)
        os.close(to)

    def lane(self) -> int | None:
        """The lane that a writer took, if it lived long enough to say so; the whole of what it said is here."""
        return self._said[0] if self._said[:1] not in (b"", b"\xff") else None

    def found_seam(self) -> int:
        return self._said[1] if self.lane() is not None else 0

    def wait_for_lane(self) -> None:
        if not self._said:
            self._said = os.read(self._from, 2)

    def ended(self) -> bool:
        if not self._over and os.waitpid(self.pid, os.WNOHANG)[0] == self.pid:
            self._over = True
        return self._over

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> dict[str, Any]:
        while chunk := os.read(self._from, 1 << 16):
            self._said += chunk
        if not self._over:
            os.waitpid(self.pid, 0)
        os.close(self._from)
        at = self._said.find(b"\xff")
        return json.loads(self._said[at + 1 :]) if at >= 0 else {}


def main() -> int:
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--seconds", type=float, default=5.0)
    parse.add_argument("--lanes", type=int, default=1)
    parse.add_argument("--capacity", type=int, default=16)
    parse.add_argument("--words", type=int, default=1024)
    parse.add_argument("--readers", type=int, default=1)
    parse.add_argument("--trailer", action="store_true")
    parse.add_argument("--kills", action="store_true")
    parse.add_argument("--until-fault", action="store_true")
    parse.add_argument("--seed", type=int, default=0)
    a = parse.parse_args()
    torch.set_num_threads(1)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        t = Torture(Path(folder), a.lanes, a.capacity, a.words, a.readers, a.trailer, a.kills, a.seed)
        start = time.monotonic()
        t.run(a.seconds, a.until_fault)
        took = round(time.monotonic() - start, 2)
    print(json.dumps({"planted": _native.testing.PLANTED, "seconds": took, **t.done, "faults": t.faults[:20]}))
    return 1 if t.faults else 0


if __name__ == "__main__":
    sys.exit(main())
