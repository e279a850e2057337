"""`kill -9` inside an `extend` into a full ring: of the rows that had returned at most 64 steps are gone, 64 KB of each
environment, the oldest ones; every other is there, whole, and the next writer's first row begins a trajectory."""

from __future__ import annotations

import mmap
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from contracts.kills import killed_after
from contracts.tiers import in_turns
from contracts.waiting import NEVER
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer

PERIOD = 211  # steps after which values repeat; no ring has room for a multiple of it
MOST_STEPS, MOST_BYTES = 64, 64 << 10
OPENED, BEGUN, RETURNED = range(3)  # what a writer reports


class Report:
    """Three numbers that a child stores and that outlive it."""

    def __init__(self) -> None:
        self._words = mmap.mmap(-1, 24)
        for word in range(3):
            self[word] = -1

    def __getitem__(self, word: int) -> int:
        return int(struct.unpack_from("q", self._words, 8 * word)[0])

    def __setitem__(self, word: int, value: int) -> None:
        struct.pack_into("q", self._words, 8 * word, value)


class Steps:
    """Steps of `envs` environments (0: no dimension of environments), each of `words` numbers beside its own."""

    def __init__(self, words: int, envs: int, most: int) -> None:
        self.envs = envs
        self.bytes = 8 * (words + 1)
        at = torch.arange(PERIOD + most).unsqueeze(1) % PERIOD
        self._table = (at + 1) * 1_000_003 + torch.arange(words)
        if envs:
            self._table = self._table + torch.arange(envs).view(-1, 1, 1) * 7_919_000_000_003

    def __call__(self, start: int, stop: int) -> TensorDict:
        """Steps number `start` to `stop`: mostly a view, so that a writer spends its time in `extend`."""
        n = torch.arange(start, stop)
        words = self._table[..., start % PERIOD : start % PERIOD + stop - start, :]
        return TensorDict({"n": n.expand(words.shape[:-1]), "words": words}, words.shape[:-1])

    def check(self, rb: ReplayBuffer, first: int, stop: int) -> None:
        """Fails unless the steps `first` to `stop` are there, each whole, and no others."""
        slots = torch.arange(first, stop) % rb.storage.lanes.store.lane_capacity
        rows = rb[:]
        assert rows.shape[-1] == stop - first
        rows = rows[..., slots.argsort().argsort()]
        for begin in range(first, stop, PERIOD):
            part = slice(begin - first, min(begin + PERIOD, stop) - first)
            wanted = self(begin, min(begin + PERIOD, stop))
            for key in ("n", "words"):
                found = rows[..., part][key]
                assert torch.equal(found, wanted[key]), f"{key}: a step is torn, or not in its place"


class Mapped:
    """A ring in a folder, which nobody has open while a writer is there; with trailers."""

    reopens = True

    def __init__(self, folder: Path, size: int, ndim: int) -> None:
        self.folder = folder
        ReplayBuffer(storage=LazyMemmapStorage(size, scratch_dir=folder, ndim=ndim))
        self._make = lambda: LazyMemmapStorage(size, scratch_dir=folder, ndim=ndim, existsok=True)

    def open(self) -> ReplayBuffer:
        return ReplayBuffer(storage=self._make())

    def close(self, rb: ReplayBuffer) -> None:
        rb.storage.close()


class Shared:
    """A ring in shared memory, which whoever made it goes on using."""

    reopens = False

    def __init__(self, folder: Path, size: int, ndim: int) -> None:
        self._rb = ReplayBuffer(storage=LazyTensorStorage(size, shared=True, ndim=ndim))

    def open(self) -> ReplayBuffer:
        return self._rb

    def close(self, rb: ReplayBuffer) -> None:
        rb.storage.release()


def run_and_kill(work: Callable[[], Any], report: Report, draw: random.Random) -> None:
    """Runs `work` in a child; kills it at a random moment of one of its `extend`s, or a little later."""

    def wait() -> None:
        end = time.monotonic() + NEVER
        while report[OPENED] < 0 and time.monotonic() < end:
            time.sleep(0.0002)
        time.sleep(draw.uniform(0, 0.02))
        end = time.monotonic() + 2.0
        while report[BEGUN] <= report[RETURNED] and time.monotonic() < end:
            pass
        end = time.monotonic() + draw.choice((0.0002, 0.002, 0.02)) * draw.random()
        while report[BEGUN] > report[RETURNED] and time.monotonic() < end:
            pass

    killed_after(wait, work)


def kill_writers(ring: Any, make: Steps, capacity: int, most: int, kills: int, seed: int) -> tuple[int, int, int]:
    """Kills so many writers, and more until enough of them were in an `extend`.

    Returns the most steps that were missing after one, how many kills fell into an `extend`, and how many cost steps.
    """
    draw = random.Random(seed)
    rb = ring.open()
    rb.extend(make(0, capacity))
    ring.close(rb)
    begins, left = {0}, capacity
    worst, inside, cost = 0, 0, 0
    for kill in range(20 * kills):
        if kill >= kills and inside >= kills // 4:
            break
        report = Report()

        def write(report: Report = report, seed: int = draw.getrandbits(30)) -> None:
            sizes = random.Random(seed)
            mine = ring.open()
            at = mine.storage.lanes.states()[0]["published"]
            report[RETURNED] = at
            report[OPENED] = at
            while True:
                n = sizes.choice((sizes.randint(1, 20), sizes.randint(1, most // 3), most, most))
                batch = make(at, at + n)
                report[BEGUN] = at + n
                mine.extend(batch)
                at += n
                report[RETURNED] = at

        run_and_kill(write, report, draw)
        rb = ring.open()
        lane = rb.storage.lanes.states()[0]
        first, published = lane["first"], lane["published"]
        assert report[RETURNED] <= published <= max(report[BEGUN], report[RETURNED])
        missing = first - max(0, published - capacity)
        worst = max(worst, missing)
        inside += report[BEGUN] > report[RETURNED]
        cost += missing > 0
        assert 0 <= missing <= MOST_STEPS and missing * make.bytes <= MOST_BYTES, f"{missing} of {capacity} are gone"
        make.check(rb, first, published)
        # A writer that was killed before its first steps were there did not begin anything.
        begins = {at for at in begins | {report[OPENED]} if first < at < published}
        assert {at for at in lane["seams"] if at < published} == begins
        rb.extend(make(published, published + 1))
        now = rb.storage.lanes.states()[0]
        # Where the dead writer has not written, who has the ring in its memory all the time goes on with its own, or
        # begins a trajectory where the dead one had the turn already.
        if ring.reopens or published > left or published in now["seams"]:
            begins.add(published)
        assert now["published"] == published + 1 and (published in now["seams"]) == (published in begins)
        left = published + 1
        make.check(rb, now["first"], published + 1)
        ring.close(rb)
    return worst, inside, cost


# Values of 8 bytes beside the number, environments, steps that the ring has room for, and the longest batch.
SHAPES = {
    "88 bytes": (10, 0, 2000, 1000),
    "88 bytes, batches longer than the ring": (10, 0, 700, 1000),
    "88 bytes of 64 environments": (10, 64, 600, 700),
    "8 KB": (1023, 0, 250, 300),
    "8 KB of 64 environments": (1023, 64, 80, 100),
}


@pytest.mark.parametrize(("ring", "shape"), in_turns([Mapped, Shared], SHAPES))
@pytest.mark.parametrize("kills", [8, pytest.param(250, marks=pytest.mark.long)])
def test_a_kill_in_a_full_ring_costs_a_piece(tmp_path: Path, ring: Any, shape: str, kills: int) -> None:
    words, envs, capacity, most = SHAPES[shape]
    make = Steps(words, envs, max(capacity, most))
    made = ring(tmp_path, capacity * max(1, envs), 2 if envs else 1)
    worst, inside, cost = kill_writers(made, make, capacity, most, kills, seed=kills)
    print(f"{ring.__name__}, {shape}: {kills} kills, {inside} in an extend, {cost} cost steps, at most {worst}")
    assert inside >= kills // 4
