"""Sessions of a mapped store at random, and what must be true of any image that a power cut leaves of it.

Rows say where they belong: number = edition * 10^7 + strand * 10^6 + write number.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from contracts.power import MappedFile
from crash import stores, tracer
from engram.data import Compact, LazyMemmapStorage, ReplayBuffer
from engram.store import files as recovery
from engram.store import places
from engram.store.places import LaneCount

MAPPED = 1 << 40  # a mark that says where the store is mapped
NUMBERS, STRANDS = 10**6, 10**7
Row = tuple[int, int, int]  # lane, number, environment


def rows(numbers: Tensor, width: int) -> TensorDict:
    return TensorDict({"n": numbers, "pad": numbers.unsqueeze(-1) * 1000 + torch.arange(width)}, numbers.shape)


def observed(made: Tensor, shape: dict[str, int]) -> tuple[Tensor, Tensor]:
    """X and next.X of the steps that were made with these numbers: `shape["frames"]` frames of episodes of five steps.

    Those of other editions agree nowhere; the first stack of an episode is one of zeros, of equal frames, or of others.
    """
    k, t = shape["frames"], made % 5
    episode = made - t

    def stacks(t: Tensor, of: Tensor) -> Tensor:
        at = t.unsqueeze(-1) - torch.arange(k - 1, -1, -1)
        kind = (of // 5 % 3).unsqueeze(-1)
        seed = of.unsqueeze(-1) * 7 + torch.where((at < 0) & (kind == 1), 1000 - at, at.clamp(min=0))
        frames = ((seed.unsqueeze(-1) + 1) * 1_000_003 + torch.arange(shape["size"])) * 40_503 >> 7 & 255
        return torch.where(((at < 0) & (kind == 2)).unsqueeze(-1), 0, frames).to(torch.uint8)

    after = stacks(t + shape["n_steps"], episode)
    other = ((t + shape["n_steps"] > 4) & (made % 2 == 0)).reshape(*t.shape, 1, 1)
    return stacks(t, episode), torch.where(other, stacks(torch.zeros_like(t), episode + 3), after)


class Sessions:
    """In the child: what is done to the store. Before and after each thing a line of JSON says what."""

    def __init__(self, folder: Path, log: Path, shape: dict[str, int], seed: int, edition: int) -> None:
        self.folder, self._log, self.shape = folder, log.open("a"), shape
        self.random, self.edition = random.Random(seed), edition

    def open(self) -> Any:
        s = self.shape
        storage = LazyMemmapStorage(
            s["lanes"] * s["capacity"] * s["envs"], scratch_dir=self.folder, existsok=True,
            lanes=1 if s["lanes"] == 1 else LaneCount(s["lanes"]), ndim=1 if s["envs"] == 1 else 2,
            compact=Compact("x", s["frames"], s["n_steps"]) if "frames" in s else False,
        )  # fmt: skip
        if storage.initialized:
            tracer.mark(MAPPED, storage.lanes.store.memory().ctypes.data)
            watched = (stores.CLAIMED, stores.ROW, stores.REMOVED, stores.REDO)
            stores.watch(storage.lanes.store, watched if "removes" in s else (*watched[:2], stores.EDITS, stores.REDO))
        return ReplayBuffer(storage=storage)

    def run(self, changes: int) -> None:
        users = [self.open() for _ in range(self.shape["lanes"])]
        self.say({"opened": True})
        for _ in range(changes):
            what = self.random.random()
            if "removes" in self.shape and self.random.random() < 0.4:
                self.remove(self.random.choice(users))
            elif what < 0.5:
                self.extend(self.random.choice(users))
            elif what < 0.65:
                self.say({"flush": "begins"})
                users[0].storage.flush()
                self.say({"flush": "done"})
            elif what < 0.75:
                self.random.choice(users).storage.release()  # who writes there next takes it over
            else:
                self.alone(users, what)
        for user in users:
            user.storage.close()
        self.say({"flush": "done"})

    def extend(self, rb: Any) -> None:
        s = self.shape
        n = self.random.choice((1, 2, 3, s["capacity"] // 3, s["capacity"] + 1))
        lanes, capacity = rb.storage.lanes, s["capacity"]
        going = Counter((lanes.next_slots(n) // capacity).tolist())  # how many steps go to each lane
        self.edition += 1
        numbers = []
        for lane, steps in going.items():  # in the order in which they are filled
            first = lanes.states()[lane]["published"]
            self.say({"extend": lane, "first": first, "n": steps, "edition": self.edition})
            numbers.append(torch.arange(first, first + steps))
        rb.extend(self.batch_of(torch.cat(numbers)))
        for lane in going:
            self.say({"extended": lane})

    def remove(self, rb: Any) -> None:
        lane, envs = self.random.randrange(self.shape["lanes"]), self.shape["envs"]
        store, capacity = rb.storage.lanes.store, self.shape["capacity"]
        state = rb.storage.lanes.states()[lane]
        there = [(w, env) for w in range(state["first"], state["published"]) for env in range(envs)]
        if not there:
            return
        new = there[-8:] if self.random.random() < 0.5 else there  # rows that no flush has seen
        chosen = self.random.sample(new, min(len(new), self.random.choice((1, 2, 8))))
        self.say({"remove": lane, "rows": chosen})
        slots = torch.tensor([(w % capacity + lane * capacity) * envs + env for w, env in chosen])
        with rb.storage.mutex:
            rb.storage.lanes.remove(slots, store.generations(slots))
        self.say({"removed": lane})

    def batch(self, first: int, n: int) -> TensorDict:
        return self.batch_of(torch.arange(first, first + n))

    def batch_of(self, numbers: Tensor) -> TensorDict:
        numbers = numbers + self.edition * STRANDS
        if self.shape["envs"] > 1:
            numbers = numbers + torch.arange(self.shape["envs"]).unsqueeze(1) * NUMBERS
        batch = rows(numbers, self.shape["width"])
        if "frames" in self.shape:
            x, after = observed(numbers, self.shape)
            batch.update({"made": numbers, "x": x, "next": {"x": after}})
        return batch

    def alone(self, users: list[Any], what: float) -> None:
        """What needs the store alone: everybody else closes it, which syncs nothing that they have not written."""
        for k in range(1, len(users)):
            users[k].storage.close()
        rb = users[0]
        if what < 0.9:
            self.edit(rb)
        elif what < 0.93:
            self.say({"empty": "begins"})
            rb.empty()
            self.say({"empty": "done"})
        elif what < 0.96:
            rb.dumps(self.folder.parent / "saved")
            self.extend(rb)
            self.say({"loads": "begins"})
            rb.loads(self.folder.parent / "saved")
            self.say({"loads": "done"})
        else:
            rb.storage.close()
            self.say({"flush": "done"})
            users[0] = self.open()
            self.say({"opened": True})
        for k in range(1, len(users)):
            users[k] = self.open()

    def edit(self, rb: Any) -> None:
        lane = self.random.randrange(self.shape["lanes"])
        state, capacity = rb.storage.lanes.states()[lane], self.shape["capacity"]
        there = range(state["first"], state["published"])
        if not there:
            return
        chosen = self.random.sample(there, min(len(there), self.random.choice((1, 2, 8))))
        self.edition += 1
        self.say({"edit": lane, "numbers": chosen, "edition": self.edition})
        slots = torch.tensor([w % capacity + lane * capacity for w in chosen])
        numbers = torch.tensor(chosen) + self.edition * STRANDS
        if self.shape["envs"] > 1:
            numbers = numbers + torch.arange(self.shape["envs"]).unsqueeze(1) * NUMBERS
        batch = rows(numbers, self.shape["width"])
        rb[slots] = rb[slots].update(batch) if "frames" in self.shape else batch  # observations stay as they are
        self.say({"edited": lane})

    def say(self, what: dict[str, Any]) -> None:
        self._log.write(json.dumps(what) + "\n")
        self._log.flush()
        tracer.mark(1)


class Promise:
    """What `open` must give back at a moment, from what the sessions have said so far."""

    def __init__(self, shape: dict[str, int]) -> None:
        lanes = range(shape["lanes"])
        self.shape = shape
        self.ever: list[dict[int, set[int]]] = [{} for _ in lanes]  # editions that a write number ever had
        self.now: list[dict[int, set[int]]] = [{} for _ in lanes]  # those that it may have if it is durable
        self.published = [0 for _ in lanes]
        self.durable: list[range] = [range(0) for _ in lanes]
        self._claimed = [0 for _ in lanes]
        self._doing: dict[str, Any] = {}
        #: Rows (lane, number, environment) with the editions in which they may be removed, must be, and must be on
        #: the disk.
        self.may_be: dict[Row, set[int]] = {}
        self._removed: set[Row] = set()
        self.removed: set[Row] = set()

    def hear(self, said: dict[str, Any]) -> None:
        if "extend" in said:
            lane, first, n = said["extend"], said["first"], said["n"]
            for w in range(first, first + n):
                self.ever[lane].setdefault(w, set()).add(said["edition"])
                self.now[lane][w] = {said["edition"]}
            self._claimed[lane] = first + n
            low = max(self.durable[lane].start, first + n - self.shape["capacity"])
            self.durable[lane] = range(low, max(low, self.durable[lane].stop))
            for rows in (self._removed, self.removed):
                rows -= {row for row in rows if row[0] == lane and row[1] < low}
        elif "edit" in said:
            for w in said["numbers"]:
                self.ever[said["edit"]].setdefault(w, set()).add(said["edition"])
                for env in range(self.shape["envs"]):  # it stays removed
                    row = (said["edit"], w, env)
                    if self.now[said["edit"]][w] & self.may_be.get(row, set()):
                        self.may_be[row].add(said["edition"])
                self.now[said["edit"]][w].add(said["edition"])
        elif "remove" in said:
            for w, env in said["rows"]:
                self.may_be.setdefault((said["remove"], w, env), set()).update(self.now[said["remove"]][w])
        elif "removed" in said:
            self._removed |= {(said["removed"], w, env) for w, env in self._doing["rows"]}
        elif "extended" in said:
            self.published[said["extended"]] = self._claimed[said["extended"]]
        elif "edited" in said:
            lane, edition = said["edited"], self._doing["edition"]
            for w in self._doing["numbers"]:
                self.now[lane][w] = {edition}
        elif said.get("flush") == "done":
            for lane, published in enumerate(self.published):
                low = max(self._floor[lane], self._claimed[lane] - self.shape["capacity"])
                self.durable[lane] = range(low, max(low, published))
            self.removed = {row for row in self._removed if row[1] in self.durable[row[0]]}
        elif "begins" in (said.get("empty"), said.get("loads")):
            self.durable = [range(0) for _ in self.durable]
            self.removed, self._removed = set(), set()
        elif "done" in (said.get("empty"), said.get("loads")):
            self._look = True
        self._doing = said

    def start(
        self, states: list[dict[str, Any]], found: list[dict[int, int]], durable: bool, removed: set[Row] = frozenset()
    ) -> None:
        """The counters and rows of a store that was opened, or emptied, or loaded: they are what is there now."""
        self._removed, self.removed = set(removed), set()
        for lane, w, env in removed:
            self.may_be.setdefault((lane, w, env), set()).add(found[lane][w])
        self._floor = [s["first"] for s in states]
        self.published = [s["published"] for s in states]
        self._claimed = [s["claimed"] for s in states]
        for lane, there in enumerate(found):
            for w, edition in there.items():
                self.ever[lane].setdefault(w, set()).add(edition)
                self.now[lane][w] = {edition}
        if durable:
            self.durable = [range(s["first"], s["published"]) for s in states]

    _look = False
    _floor: list[int]


def editions(rb: Any, shape: dict[str, int]) -> list[dict[int, int]]:
    """The edition of each write number of each lane; every row is checked to be whole and in its place."""
    found: list[dict[int, int]] = []
    lanes = rb.storage.lanes
    for lane, state in enumerate(lanes.states()):
        there = torch.arange(state["first"], state["published"])
        found.append({})
        if not len(there):
            continue
        got = rb.storage.read(
            ((there % shape["capacity"] + lane * shape["capacity"]).unsqueeze(1) * shape["envs"]
             + torch.arange(shape["envs"])).reshape(-1)
        )[0]  # fmt: skip
        n = got["n"].reshape(len(there), shape["envs"])
        assert torch.equal(got["pad"], rows(got["n"], shape["width"])["pad"]), "a torn row"
        assert torch.equal(n % NUMBERS, there.unsqueeze(1).expand_as(n)), "a row in the wrong place"
        if "frames" in shape:
            x, after = observed(got["made"], shape)
            assert torch.equal(got["x"], x), "an observation of another row"
            assert torch.equal(got["next", "x"], after), "a next observation of another row"
            assert torch.equal(got["made"] % STRANDS, got["n"] % STRANDS), "observations of another place"
        assert torch.equal(n // NUMBERS % 10, torch.arange(shape["envs"]).expand_as(n)), "another strand's row"
        found[-1] = dict(zip(there.tolist(), (n[:, 0] // STRANDS).tolist(), strict=True))
    return found


def removed_rows(rb: Any, shape: dict[str, int]) -> set[Row]:
    """Lane, number and environment of the rows that are removed; their count is checked."""
    store, rows, envs = rb.storage.lanes.store, set(), shape["envs"]
    per_lane = shape["capacity"] * envs
    hidden = store.removed(torch.arange(shape["lanes"] * per_lane)) or []
    assert store.removed_rows == len(hidden), "the count of removed rows is not that of their bits"
    generations = store.generations(torch.tensor(hidden, dtype=torch.int64)).tolist()
    for slot, w in zip(hidden, generations, strict=True):
        assert w >= 0, f"slot {slot} holds no row, and is removed"
        rows.add((slot // per_lane, w, slot % envs))
    return rows


class PowerCuts:
    """Runs sessions under the tracer, cuts the power at events, and opens what is left."""

    def __init__(self, root: Path, shape: dict[str, int], seed: int, each: float) -> None:
        self.root, self.shape, self.seed, self._each = root, shape, seed, each
        self.random = random.Random(seed)
        self.promise = Promise(shape)
        self.images = 0
        self.rows: Counter[str] = Counter()
        self._lines = 0

    def session(self, generation: int, changes: int = 25) -> None:
        """One process, from opening the store in `root / "store"` to its end."""
        folder, log = self.root / "store", self.root / "log"
        log.write_text("")
        self._lines, self._generation, self._log = 0, generation, log
        self.disk = MappedFile(folder / "rows.engram", self.seed * 100 + generation)

        def life() -> None:
            _set_boot(generation)
            sessions = Sessions(folder, log, self.shape, self.seed * 100 + generation, generation * 1000)
            tracer.start()
            sessions.run(changes)

        kinds = tracer.SYNC | tracer.STORE
        traced = tracer.run(life, folder, kinds=kinds, listen=self.event)
        assert not traced.killed

    def event(self, call: str, path: str, path2: str, args: list[int]) -> None:
        if call == "mark" and args[0] == MAPPED:
            self.disk.maps.insert(0, args[1])
            return
        self.disk.heard(call, path, args)
        if call == "mark":
            self._hear()
        if self.random.random() < self._each:
            self.check(self.disk.image())

    def _hear(self) -> None:
        lines = self._log.read_text().splitlines()
        for line in lines[self._lines :]:
            self.promise.hear(json.loads(line))
        self._lines = len(lines)
        if self.promise._look:
            self.promise._look = False
            states, found, removed = self._states()
            self.promise.start(states, found, durable=False, removed=removed)

    def _states(self) -> tuple[list[dict[str, Any]], list[dict[int, int]], set[Row]]:
        """Of the living store, read from a copy of its file."""
        rb = self._opened((self.root / "store" / "rows.engram").read_bytes(), self._generation)
        state = rb.storage.lanes.states(), editions(rb, self.shape), removed_rows(rb, self.shape)
        rb.storage.close()
        return state

    def check(self, image: bytes) -> None:
        rb = self._opened(image, self._generation + 1)
        states, found, removed = rb.storage.lanes.states(), editions(rb, self.shape), removed_rows(rb, self.shape)
        rb.storage.close()
        self.images += 1
        for lane, w, env in removed:
            edition, allowed = found[lane][w], self.promise.may_be.get((lane, w, env), set())
            assert edition in allowed, f"row {w}, {env} of lane {lane} is hidden, and nobody removed it"
        back = self.promise.removed - removed
        assert not back, f"rows {sorted(back)[:5]} were removed and flushed, and are back"
        self.rows["removed"] += len(removed)
        self.rows["removed and flushed"] += len(self.promise.removed)
        for lane, there in enumerate(found):
            for w, edition in there.items():
                assert edition in self.promise.ever[lane].get(w, ()), f"row {w} of lane {lane} was never that"
            for w in self.promise.durable[lane]:
                assert w in there, f"durable row {w} of lane {lane} is gone: {states[lane]}, {self.promise.durable}"
                assert there[w] in self.promise.now[lane][w], f"durable row {w} of lane {lane} is an old one"
            self.rows["durable"] += len(self.promise.durable[lane])
            self.rows["found"] += len(there)

    def cut(self) -> None:
        """The store is what a cut at the end of the session left, opened by the next generation."""
        image = self.disk.image()
        self.check(image)
        (self.root / "store" / "rows.engram").write_bytes(image)
        rb = self._opened(image, self._generation + 1)
        found, removed = editions(rb, self.shape), removed_rows(rb, self.shape)
        self.promise.start(rb.storage.lanes.states(), found, durable=False, removed=removed)
        rb.storage.close()

    def _opened(self, image: bytes, generation: int) -> Any:
        folder = self.root / "image"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "rows.engram").write_bytes(image)
        _set_boot(generation)
        return ReplayBuffer.open(folder)


def _set_boot(generation: int) -> None:
    recovery.boot_id = places.boot_id = lambda: f"boot {generation:011d}".encode()  # type: ignore[assignment]


def make(root: Path, shape: dict[str, int]) -> None:
    """A store without rows."""
    _set_boot(0)
    sessions = Sessions(root / "store", root / "log", shape, 0, 0)
    rb = sessions.open()
    rb.extend(sessions.batch(0, 1))
    rb.empty()
    rb.storage.close()
