"""Writers that are killed, stopped and started again, and readers that check every row, each a process of its own.

A program of its own (`python torture.py --rows 20e6`), so that it also runs against builds with planted faults. It
prints one line of JSON: what was done, how fast, how long calls took, and `faults`: what may never be seen. Exit code
1: there were some.

`BufferTorture` writes and samples through the public API; with `--store`, `StoreTorture` appends and gathers rows of
several pages in the native store, where a race is a matter of nanoseconds. Each row's bytes are a function of its lane,
sequence and writer. The processes are forks of a controller with one thread; mapped stores each opens itself, shared
memory comes with the fork.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engram import _native
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from engram.store.locks import LaneLocks
from native.core.support import store
from native.support import numbers_of, row_words, words
from processes.held_lanes import HeldLaneCount, HeldLanes, free_lane, take_lane
from processes.plants import PLANTS
from processes.rows import Faults, Maker, check_rows, check_slices, columns

LENGTH = 8  # of slices
EXTEND = 64
BATCH = 256
DONE: dict[str, Any] = {"slice_len": LENGTH, "traj_key": None}
SEAMS: dict[str, Any] = {"slice_len": LENGTH, "traj_key": "always"}  # one id for all rows: only seams cut
# Whose batches are checked without what their info says: nothing is remembered of them.
WITHOUT_INFO = ("random", "slices", "slices by seams", "sequences")
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(None, 1.0, 1.0, eps=0.0),
    "slices": lambda: SliceSampler(**DONE),
    "slices by seams": lambda: SliceSampler(**SEAMS),
    "slice epochs": lambda: SliceSamplerWithoutReplacement(**SEAMS),
    "prioritized slices": lambda: PrioritizedSliceSampler(None, 1.0, 1.0, eps=0.0, **DONE),
    "sequences": lambda: SequenceSampler(**SEAMS, burn_in=3),
}
USUAL = ["random", "slices", "slices by seams", "prioritized"]


def _ends(storage: Any) -> None:
    """As the end of a writer's process: who takes the lane next is another one, were it this process."""
    storage.lanes.mark_seam()
    storage.release()


class Side:
    """Memory that all processes of a run share: what the controller says, and what writers have done."""

    STOP = 0
    DRAWN, OVERWRITTEN = 1, 2  # batches that samplers have drawn, and rows that went while they were read
    FIELDS = ("returned", "written", "calls", "longest", "cpu_longest", "cpu", "switches", "session", "seams")

    def __init__(self, lanes: int) -> None:
        self._map = mmap.mmap(-1, 1 << 16)
        at = np.frombuffer(self._map, np.int64)
        self.flags = at[:8]
        self.lanes = {name: at[64 * (k + 1) :][:lanes] for k, name in enumerate(self.FIELDS)}


class Clock:
    """How long calls take: wall clock, this process's own time, and how often it went to sleep."""

    def __init__(self) -> None:
        self.calls = self.longest = self.cpu_longest = self.cpu = 0
        self._slept = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw

    def __call__(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        wall, cpu = time.monotonic_ns(), time.process_time_ns()
        made = work(*args, **kwargs)
        took = time.process_time_ns() - cpu
        self.cpu, self.cpu_longest = self.cpu + took, max(self.cpu_longest, took)
        self.longest = max(self.longest, time.monotonic_ns() - wall)
        self.calls += 1
        return made

    @property
    def switches(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - self._slept


class Torture:
    """The controller of one run; the options are those of `main`. Subclasses say what the processes do."""

    #: Before a writer is killed: how often it is let take its lane first; after it: how often all is checked at rest.
    LET_TAKE_ITS_LANE, CHECK_AFTER_KILLS = 0.0, 0.3

    def __init__(self, folder: Path, options: Any) -> None:
        self.o, self.folder = options, folder / "store"
        self.lanes = options.writers
        self.lane_capacity = options.capacity // options.writers
        self.random = random.Random(options.seed)
        self.side = Side(self.lanes)
        self.sessions = 0
        self.faults = Faults()
        self.done: dict[str, Any] = {"kills": 0, "stops": 0, "checks": 0}
        self.calls: dict[str, float] = {"longest_sample_ms": 0.0, "longest_sample_cpu_ms": 0.0, "sample_switches": 0}
        self._make_store()

    def _make_store(self) -> None:
        raise NotImplementedError

    def _fill(self) -> None:
        """Once around every lane, for samplers that run alone."""
        raise NotImplementedError

    def _write(self, session: int, seed: int) -> dict[str, Any]:
        """Until the end of the run."""
        raise NotImplementedError

    def _sample(self, which: int) -> dict[str, Any]:
        """Until the end of the run; checks what it reads."""
        raise NotImplementedError

    def _check_rest(self) -> dict[str, Any]:
        """Of a lane to which nobody writes every row is there and whole, and none that had returned is missing."""
        raise NotImplementedError

    def _session(self) -> int:
        self.sessions += 1
        return self.sessions

    def run(self) -> None:
        o = self.o
        self.started = time.monotonic()
        if not o.writers_only and o.samplers_only:
            self._fill()
        readers = [] if o.writers_only else [Child(lambda k=k: self._sample(k)) for k in range(o.samplers)]
        writers = [] if o.samplers_only else [self._writer() for _ in range(self.lanes)]
        end = time.monotonic() + o.seconds
        while self._goes_on(end) and not (self.faults and o.until_fault) and self.written() < o.rows:
            if any(child.ended() for child in readers + writers):
                break
            if o.kills and writers:
                self._disturb(writers)
            else:
                time.sleep(0.02)
        self.side.flags[Side.STOP] = 1
        self.seconds = time.monotonic() - self.started
        for child in readers + writers:
            self._finish(child)
        self._last_checks()

    def _goes_on(self, end: float) -> bool:
        """Until the time is over and enough was done; twenty times as long where other programs have the cores."""
        done = {
            "kills": self.done["kills"], "rows": self.written(), "seams": int(self.side.lanes["seams"].sum()),
            "batches": int(self.side.flags[Side.DRAWN]), "missing": int(self.side.flags[Side.OVERWRITTEN]),
        }  # fmt: skip
        least = dict(part.split("=") for part in self.o.at_least.split(",") if part)
        enough = all(done[name] >= int(n) for name, n in least.items())
        return time.monotonic() < (end if enough else self.started + 20 * self.o.seconds)

    def written(self) -> int:
        return int(self.side.lanes["returned"].sum())

    def _writer(self) -> Child:
        session, seed = self._session(), self.random.randrange(1 << 60)
        return Child(lambda: self._write(session, seed), session)

    def _disturb(self, writers: list[Child]) -> None:
        k, draw = self.random.randrange(len(writers)), self.random.random()
        if self.random.random() < self.LET_TAKE_ITS_LANE:
            while writers[k].session not in self.side.lanes["session"] and not writers[k].ended():
                time.sleep(0.001)
        time.sleep(self.random.uniform(0, 0.04))
        if draw < self.o.stops:
            self.done["stops"] += 1
            os.kill(writers[k].pid, signal.SIGSTOP)
            time.sleep(self.random.choice((0.01, 0.1, 1.0)))
            os.kill(writers[k].pid, signal.SIGCONT)
            return
        writers[k].kill()
        self.done["kills"] += 1
        if self.random.random() < self.CHECK_AFTER_KILLS:
            self._take(Child(self._check_rest).wait(300))
        writers[k] = self._writer()

    def _take(self, said: dict[str, Any]) -> None:
        self.faults += said.pop("faults", [])
        for key, value in said.items():
            if key in self.calls and key != "sample_switches":
                self.calls[key] = max(self.calls[key], value)
            elif key in self.calls:
                self.calls[key] += value
            else:
                self.done[key] = self.done.get(key, 0) + value

    def _finish(self, child: Child) -> None:
        said = child.wait(300)
        if not said:
            self.faults.append("a process did not end: it waits for something")
        self._take(said)

    def _last_checks(self) -> None:
        said = Child(self._check_rest).wait(300)
        free = said.get("checks", 0)
        if free != self.lanes:
            self.faults.append(f"{self.lanes} lanes, {free} free, and every process has ended")
        self._take(said)


class BufferTorture(Torture):
    """Buffers over one storage, with samplers of every kind."""

    def _make_store(self) -> None:
        size = self.lanes * self.lane_capacity
        if self.o.memory == "shared":
            storage: Any = LazyTensorStorage(size, shared=True, lanes=HeldLaneCount(self.lanes))
        else:
            storage = LazyMemmapStorage(size, scratch_dir=self.folder, lanes=HeldLaneCount(self.lanes))
        rb = ReplayBuffer(storage=storage)
        rb.extend(Maker(0, self._session()).rows(0, 1))
        self.storage = storage if self.o.memory == "shared" else None
        if self.storage is None:
            storage.close()
        else:
            _ends(storage)

    def join(self, sampler: Any = None) -> ReplayBuffer:
        """In a child: a buffer over the store."""
        storage = self.storage
        if storage is None:
            storage = LazyMemmapStorage(None, self.folder, existsok=True, lanes=HeldLaneCount(self.lanes))
        return ReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH)

    def _fill(self) -> None:
        rb = self.join()
        maker = Maker(rb.storage.lanes.hold(), self._session())
        for _ in range(0, self.lane_capacity, EXTEND):
            rb.extend(maker.rows(rb.storage.lanes.states()[maker.lane]["published"], EXTEND))
        if self.storage is None:
            rb.storage.close()
        else:
            _ends(self.storage)

    def _check_rest(self) -> dict[str, Any]:
        rb, faults, checks = self.join(), Faults(), 0
        lanes = rb.storage.lanes
        lanes.use()
        for lane in range(self.lanes):
            if not take_lane(lanes.locks, lane):
                continue
            checks += 1
            state, returned = lanes.states()[lane], int(self.side.lanes["returned"][lane])
            faults.check(
                state["published"] >= returned,
                f"lane {lane}: {returned} rows had returned, {state['published']} are published",
            )
            there = torch.arange(state["first"], state["published"])
            slots = there % self.lane_capacity + lane * self.lane_capacity
            if len(slots):
                batch, gone, absent, numbers = rb.storage.read(slots, sequences=True)
                faults.check(gone is None and absent is None, f"lane {lane} at rest: {gone} {absent} are not there")
                faults.check((numbers == there).numpy(), f"lane {lane} at rest: other rows than {there[:3]} ...")
                check_rows(faults, batch, numbers, slots, self.lane_capacity, "at rest")
                self._check_seams(faults, columns(batch), state)
            free_lane(lanes.locks, lane)
        return {"faults": list(faults), "checks": checks}

    @staticmethod
    def _check_seams(faults: Faults, c: dict[str, np.ndarray], state: dict[str, Any]) -> None:
        change = c["n"][1:][np.diff(c["session"]) != 0].tolist()
        faults.check(set(change) <= set(state["seams"]), f"writers change at {change[:5]}, seams {state['seams'][:5]}")

    def _write(self, session: int, seed: int) -> dict[str, Any]:
        rb, draw, clock = self.join(), random.Random(seed), Clock()
        lanes = rb.storage.lanes
        lane = lanes.hold()
        maker, at = Maker(lane, session), lanes.states()[lane]["published"]
        sizes = (EXTEND,) if self.o.steady else (EXTEND, EXTEND, EXTEND, 1, 7, 300, self.lane_capacity // 5)
        mine = {name: values[lane : lane + 1] for name, values in self.side.lanes.items()}
        while not self.side.flags[Side.STOP]:
            n = draw.choice(sizes)
            rows = maker.rows(at, n)
            clock(rb.extend, rows)
            at += n
            mine["returned"][0] = at
            for name in ("longest", "cpu_longest"):
                mine[name][0] = max(mine[name][0], getattr(clock, name))
            mine["calls"][0] += 1
            mine["written"][0] += n
            if clock.calls % 256 == 0:
                mine["switches"][0] += clock.switches
                mine["cpu"][0] += clock.cpu
                clock = Clock()
        return {"faults": []}

    def _sample(self, which: int) -> dict[str, Any]:
        torch.manual_seed(self.o.seed + which)
        first = self.join()
        names = self.o.kinds.split(",")
        readers = [_Reader(name, ReplayBuffer(storage=first.storage, sampler=SAMPLERS[name](), batch_size=BATCH),
                           self.lane_capacity) for name in names]  # fmt: skip
        clock, faults = Clock(), Faults()
        started = time.monotonic()
        while not self.side.flags[Side.STOP] and not faults:
            for reader in readers:
                for k in range(8):
                    reader.batch(clock, faults, k % self.o.check_every == 0)
                    self.side.flags[Side.DRAWN] = clock.calls
        seconds = time.monotonic() - started
        return {
            "faults": list(faults), "batches": clock.calls, "batches_per_s": clock.calls / seconds,
            "us_of_own_time_a_batch": clock.cpu / 1e3 / clock.calls / self.o.samplers,
            **{f"batches of {r.name}": r.batches for r in readers if len(readers) > 1},
            "epochs": sum(r.epochs for r in readers), "updates": sum(r.updates for r in readers),
            "longest_sample_ms": clock.longest / 1e6, "longest_sample_cpu_ms": clock.cpu_longest / 1e6,
            "sample_switches": clock.switches,
        }  # fmt: skip


class _Reader:
    """One buffer of a sampling process, and what must be true of its batches."""

    def __init__(self, name: str, rb: ReplayBuffer, lane_capacity: int) -> None:
        self.name, self.rb, self.lane_capacity = name, rb, lane_capacity
        self.batches = self.epochs = self.updates = 0
        self._epoch_of, self._seen = -1, set[tuple[int, int]]()
        self._outrun = True

    def batch(self, clock: Clock, faults: Faults, check: bool) -> None:
        lanes = self.rb.storage.lanes
        before = [lane["published"] for lane in lanes.states()]
        # Every other batch is asked for without its info: such a one comes from one native call.
        is_plain = self.name in WITHOUT_INFO and self.batches % 2 == 1
        try:
            batch, info = (clock(self.rb.sample), {}) if is_plain else clock(self.rb.sample, return_info=True)
        except RuntimeError as error:
            # At the start there may be no row yet, or no trajectory that is long enough.
            if "empty storage" not in str(error) and "no trajectory" not in str(error):
                raise
            return
        self.batches += 1
        if is_plain:
            self._check_plain(faults, batch)
            return
        # Whether rows were replaced more than once between the draw and the read, as a sampler that has to wait sees.
        now = [lane["published"] for lane in lanes.states()]
        self._outrun = not any(before) or any(b - a > self.lane_capacity // 2 for a, b in zip(before, now, strict=True))
        if "epochs" in self.name:
            self._epoch(faults, batch, info)
        if check:
            self._check(faults, batch, info)
        if "prioritized" in self.name and self.batches % 4 == 0:
            self._update(batch, info)

    def _check(self, faults: Faults, batch: Any, info: dict[str, Any]) -> None:
        check_rows(faults, batch, info.get("generation"), info["index"], self.lane_capacity, self.name)
        self._check_stretches(faults, batch)
        if "prioritized" in self.name:
            self._weights(faults, batch, info)

    def _check_plain(self, faults: Faults, batch: Any) -> None:
        check_rows(faults, batch, None, None, self.lane_capacity, f"{self.name} without info")
        self._check_stretches(faults, batch)

    def _check_stretches(self, faults: Faults, batch: Any) -> None:
        if "slice" in self.name:
            check_slices(faults, batch, LENGTH, self.name in ("slices", "prioritized slices"), self.name)
        if self.name == "sequences":
            mask = batch["collector", "mask"]
            for row, there in zip(batch.reshape(-1, LENGTH), mask.reshape(-1, LENGTH), strict=True):
                check_slices(faults, row[there], int(there.sum()), False, self.name)

    def _epoch(self, faults: Faults, batch: Any, info: dict[str, Any]) -> None:
        """No row (no first row of a trajectory's slice) twice in an epoch."""
        c = columns(batch)
        rows = list(zip(c["lane"].tolist(), c["n"].tolist(), strict=True))
        if info.epoch != self._epoch_of:  # type: ignore[attr-defined]
            self._epoch_of, self._seen, self.epochs = info.epoch, set(), self.epochs + 1  # type: ignore[attr-defined]
        twice = [row for row in rows if row in self._seen]
        faults.check(not twice and len(set(rows)) == len(rows), f"{self.name}: rows twice in an epoch: {twice[:3]}")
        self._seen.update(rows)

    # ---- priorities: powers of two, a function of the row ----
    @staticmethod
    def _priority(n: np.ndarray, lane: np.ndarray) -> np.ndarray:
        made: np.ndarray = np.exp2((n + lane) % 7 % 5 - 1.0)
        return made

    def _update(self, batch: Any, info: dict[str, Any]) -> None:
        p = self._priority(batch["n"].numpy(), batch["lane"].numpy()).astype(np.float32)
        index, n = info["index"], info.get("generation", batch["n"])
        self.rb.update_priority(index, torch.from_numpy(p), generation=n)
        self.updates += 1

    def _weights(self, faults: Faults, batch: Any, info: dict[str, Any]) -> None:
        """A row's weight is lowest priority / its own: that of `_priority`, or a new row's (8, or 1 at first).

        One that replaced the drawn row whole before it was read has the weight of that row.
        """
        step = LENGTH if "slice" in self.name else 1
        w, n, lane = (v.numpy()[::step] for v in (info["priority_weight"], batch["n"], batch["lane"]))
        new = self.rb.sampler.default_priority
        p, before = self._priority(n, lane), self._priority(n - self.lane_capacity, lane)
        lows = (0.5, 1.0, 2.0, 4.0, 8.0)
        right = [(w * new == low) | (w * p == low) | (w * before == low) | (w == low) for low in lows]
        # Rows that were drawn again may have another lowest priority than the others: it can be overwritten meanwhile.
        fits = any((a | b).all() for a in right for b in right)
        if self.lane_capacity > 400 and not self._outrun:
            faults.check(fits, f"{self.name}: weights {w[:5]}, priorities {p[:5]} or {new}")
        self._stored(faults, info["index"], batch["lane"].numpy(), new)

    def _stored(self, faults: Faults, slots: torch.Tensor, lane: np.ndarray, new: float) -> None:
        """What the sampler has for rows that stayed while it was asked."""
        lanes, sampler = self.rb.storage.lanes, self.rb.sampler
        g = lanes.generations(slots)
        found = sampler.priorities(slots, storage=self.rb.storage).numpy()
        stayed = ((lanes.generations(slots) == g) & (g >= 0)).numpy()
        p = self._priority(g.numpy(), lane)
        right = (found == p) | (found == new) | (found == 1) | ~stayed
        at = np.flatnonzero(~right)[:5]
        faults.check(right, f"{self.name}: rows {g.numpy()[at]} of priorities {p[at]} have {found[at]}")


class StoreTorture(Torture):
    """The native store itself: rows of `--words` words, which are appended and gathered without a buffer."""

    LET_TAKE_ITS_LANE, CHECK_AFTER_KILLS = 0.8, 1.0

    def _make_store(self) -> None:
        fd = os.open(self.folder, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        store(8 * self.o.words, self.lane_capacity, lanes=self.lanes, trailer=self.o.trailer, fd=fd)
        os.close(fd)

    def _join(self) -> HeldLanes:
        fd = os.open(self.folder, os.O_RDWR | os.O_CLOEXEC)
        opened = _native.Store.open(fd, os.fstat(fd).st_size)
        return HeldLanes(opened, LaneLocks(fd, str(self.folder)), opened.raise_term)

    def _check_rest(self) -> dict[str, Any]:
        lanes, faults, checks = self._join(), Faults(), 0
        for lane in range(self.lanes):
            if not take_lane(lanes.locks, lane):
                continue
            checks += 1
            state, returned = lanes.store.lane(lane), int(self.side.lanes["returned"][lane])
            faults.check(
                state["published"] >= returned,
                f"lane {lane}: {returned} rows had returned, {state['published']} are published",
            )
            there = torch.arange(state["first"], state["published"])
            slots = there % self.lane_capacity + lane * self.lane_capacity
            rows, gone, absent, numbers = lanes.store.gather(words(self.o.words)[0], slots, sequences=True)
            right = not gone and not absent and torch.equal(numbers, there)
            faults.check(right, f"lane {lane} at rest: {gone} missing, {absent} unwritten")
            self._check_words(faults, rows[0], numbers, lane, "at rest")
            free_lane(lanes.locks, lane)
        return {"faults": list(faults), "checks": checks}

    def _write(self, session: int, seed: int) -> dict[str, Any]:
        lanes, draw = self._join(), random.Random(seed)
        code, _ = words(self.o.words)
        opened, lane = lanes.store, lanes.hold()
        state, seam = opened.lane(lane), opened.next_is_seam(lane)
        if state["published"] > state["first"] and not seam:
            raise AssertionError(f"lane {lane} was taken at {state['published']} without a seam")
        self.side.lanes["seams"][lane] += seam
        self.side.lanes["session"][lane] = session
        while not self.side.flags[Side.STOP]:
            n = draw.choice((1, 1, 2, 3, 5, self.lane_capacity + 2))
            first = opened.lane(lane)["published"]
            rows = row_words(torch.arange(first, first + n), self.o.words, edition=lane)
            if opened.append(lane, code.check_list([rows], 1, 0)) is None:  # rows of an earlier writer leave the lane
                lanes.evictions.warn(lane, len(lanes), lanes.capacity)
                opened.append(lane, code.check_list([rows], 1, 0))
            self.side.lanes["returned"][lane] = first + n
        return {"faults": []}

    def _sample(self, which: int) -> dict[str, Any]:
        opened, draw, faults = self._join().store, random.Random(self.o.seed + which), Faults()
        code, _ = words(self.o.words)
        done = {"batches": 0, "read": 0, "missing": 0, "unwritten": 0}
        highest = [0] * self.lanes
        while not self.side.flags[Side.STOP] and not faults:
            n = draw.choice((1, 8, 32, 128))
            slots = opened.uniform(torch.tensor([draw.randrange(1 << 62)]), n)
            if slots is None:
                continue
            rows, gone, absent, numbers = opened.gather(code, slots, sequences=True)
            bad = {*(gone or ()), *(absent or ())}
            keep = torch.tensor([i for i in range(n) if i not in bad], dtype=torch.int64)
            done["batches"] += 1
            done["read"] += len(keep)
            done["missing"] += len(gone or ())
            self.side.flags[Side.DRAWN], self.side.flags[Side.OVERWRITTEN] = done["batches"], done["missing"]
            done["unwritten"] += len(absent or ())
            for lane in range(self.lanes):
                mine = keep[slots[keep] // self.lane_capacity == lane]
                self._check_words(faults, rows[0][mine], numbers[mine], lane, "read")
                in_its_slot = torch.equal(numbers[mine] % self.lane_capacity, slots[mine] % self.lane_capacity)
                faults.check(in_its_slot, f"lane {lane}: a number that is not of its slot")
                published = opened.lane(lane)["published"]
                right = published >= highest[lane] and not (len(mine) and int(numbers[mine].max()) >= published)
                faults.check(right, f"lane {lane}: published is {published}, rows {numbers[mine].tolist()}")
                highest[lane] = published
        return {**done, "faults": list(faults)}

    @staticmethod
    def _check_words(faults: Faults, rows: torch.Tensor, numbers: torch.Tensor, lane: int, when: str) -> None:
        holds, whole = numbers_of(rows)
        right = (holds == numbers) & (rows[:, 0] // (1 << 50) == lane)
        faults.check(whole.numpy(), f"{when}: rows {numbers[~whole].tolist()} of lane {lane} are torn")
        other = whole & ~right
        what = f"{when}: rows {numbers[other].tolist()} of lane {lane} hold {holds[other].tolist()}"
        faults.check(not other.any(), what)


class Child:
    """A forked process; what it returns comes back as JSON."""

    def __init__(self, work: Callable[[], dict[str, Any]], session: int = 0) -> None:
        self.session = session
        self._from, to = os.pipe()
        self._over = False
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._from)
                made = work()
                os.write(to, json.dumps({**made, "faults": made["faults"][:20]}).encode())
            except BaseException:
                os.write(to, json.dumps({"faults": [traceback.format_exc()]}).encode())
            finally:
                os._exit(0)
        os.close(to)

    def ended(self) -> bool:
        if not self._over and os.waitpid(self.pid, os.WNOHANG)[0] == self.pid:
            self._over = True
        return self._over

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait(300)

    def wait(self, seconds: float) -> dict[str, Any]:
        """What it returned; {} if it was killed, or does not end."""
        said, end = b"", time.monotonic() + seconds
        os.set_blocking(self._from, False)
        while not self.ended() and time.monotonic() < end:
            said += self._read()
            time.sleep(0.001)
        said += self._read()
        if not self._over:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._from)
        return json.loads(said) if said else {}

    def _read(self) -> bytes:
        try:
            return os.read(self._from, 1 << 20)
        except BlockingIOError:
            return b""


def options() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "--store", {"action": "store_true", "help": "the native store without buffers"}
    yield "--words", {"type": int, "default": 1024, "help": "of a row, with --store: two pages"}
    yield "--trailer", {"action": "store_true", "help": "rows have a checksum, with --store"}
    yield "--memory", {"choices": ("mapped", "shared"), "default": "mapped"}
    yield "--folder", {"default": "/dev/shm" if os.access("/dev/shm", os.W_OK) else None}
    yield "--writers", {"type": int, "default": 4}
    yield "--samplers", {"type": int, "default": 2}
    yield "--capacity", {"type": int, "default": 100_000}
    yield "--rows", {"type": float, "default": float("inf"), "help": "end after so many"}
    yield "--seconds", {"type": float, "default": 1e9}
    yield "--at-least", {"default": "", "help": "go on until so much was done, as kills=4,rows=1000,batches=60"}
    yield "--kinds", {"default": ",".join(USUAL), "help": f"of samplers: {', '.join(SAMPLERS)}"}
    yield "--kills", {"action": "store_true"}
    yield "--stops", {"type": float, "default": 0.2, "help": "of the disturbances so many only stop a writer"}
    yield "--steady", {"action": "store_true", "help": f"extend({EXTEND}) only"}
    yield "--check-every", {"type": int, "default": 1}
    yield "--writers-only", {"action": "store_true"}
    yield "--samplers-only", {"action": "store_true"}
    yield "--until-fault", {"action": "store_true"}
    yield "--plant", {"choices": (*PLANTS, ""), "default": "", "help": "a protection that is taken out"}
    yield "--seed", {"type": int, "default": 0}


def main() -> int:
    parse = argparse.ArgumentParser(description=__doc__)
    for name, how in options():
        parse.add_argument(name, **how)
    o = parse.parse_args()
    torch.set_num_threads(1)
    if o.plant:
        PLANTS[o.plant][0]()
    with tempfile.TemporaryDirectory(dir=o.folder) as folder:
        t = (StoreTorture if o.store else BufferTorture)(Path(folder), o)
        t.run()
    side = t.side.lanes
    writes = {
        "rows": t.written(), "extends": int(side["calls"].sum()),
        "rows_per_s": round(int(side["written"].sum()) / t.seconds),
        "longest_extend_ms": side["longest"].max() / 1e6, "longest_extend_cpu_ms": side["cpu_longest"].max() / 1e6,
        "extend_switches": int(side["switches"].sum()),
        "us_of_own_time_an_extend": round(side["cpu"].sum() / 1e3 / max(1, side["calls"].sum()), 2),
    }  # fmt: skip
    seconds, seams = round(t.seconds, 2), int(side["seams"].sum())
    said = {
        "planted": _native.testing.PLANTED or o.plant,
        "seconds": seconds,
        "seams": seams,
        **writes,
        **t.done,
        **t.calls,
    }
    print(json.dumps({**said, "faults": t.faults[:20]}))
    return 1 if t.faults else 0


if __name__ == "__main__":
    sys.exit(main())
