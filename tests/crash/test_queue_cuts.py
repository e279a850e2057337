"""Power cuts around a queue: of the store the disk has each page as at any moment since its sync; it has the model.

After any of them the learner goes on from its checkpoint: no row comes twice, none that was flushed is left out, and
what is written then comes, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts.children import Signal, fork
from contracts.each import each
from contracts.power import MappedFile
from crash import sessions, stores, tracer
from crash.test_queue_lines import SESSION, TURN, flow_at, lane_flow_at
from engram.data import LazyMemmapStorage, QueueSampler, ReplayBuffer
from engram.store import files as recovery
from engram.store import places
from engram.store.places import LaneCount

pytestmark = [
    pytest.mark.skipif(not tracer.can_watch(), reason="stores are watched on x86-64 only"),
    pytest.mark.filterwarnings("ignore:sample was called with batch_size=:UserWarning"),
]

MODE = 2  # a word of `Flow`
WRITERS = 1024 + 336  # where the first lane counts its writers


@pytest.fixture(autouse=True)
def boots(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (recovery, places):
        monkeypatch.setattr(module, "boot_id", module.boot_id)


def rows(ids: Iterable[int], width: int) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64).unsqueeze(1) * 1000 + torch.arange(width)


def ids(batch: Tensor) -> list[int]:
    first = batch[:, :1]
    assert torch.equal(batch, first + torch.arange(batch.shape[1])), "a torn row"
    found: list[int] = (first[:, 0] // 1000).tolist()
    return found


def opened(folder: Path, shape: dict[str, Any]) -> ReplayBuffer:
    lanes = 1 if shape["lanes"] == 1 else LaneCount(shape["lanes"])
    storage = LazyMemmapStorage(shape["lanes"] * shape["capacity"], scratch_dir=folder, existsok=True, lanes=lanes)
    return ReplayBuffer(storage=storage, sampler=QueueSampler(commit=shape["commit"]), batch_size=4)


def drained(rb: ReplayBuffer) -> list[int]:
    found: list[int] = []
    while waiting := rb.stats().waiting:
        found += ids(rb.sample(min(waiting, 5)))
    return found


class Life:
    """In the child: somebody who writes to the queue and trains a model with it. Lines of JSON say what is done."""

    def __init__(self, folder: Path, log: Path, shape: dict[str, Any], seed: int, saved: dict[str, Any]) -> None:
        self._shape, self._folder, self._log = shape, folder, log.open("a")
        self._random, self._next, self._saved = random.Random(seed), seed * 10_000, saved
        self._model: list[int] = []
        self._open()

    def _open(self) -> None:
        self._rb = opened(self._folder, self._shape)
        if self._shape["commit"] == "manual":
            self._model = list(self._saved["model"])
            assert self._rb.seek(self._saved["position"]) == 0
        if not self._rb.storage.initialized:
            return
        memory = self._rb.storage.lanes.store.memory()
        tracer.mark(sessions.MAPPED, memory.ctypes.data)
        cursors = lane_flow_at(memory)
        for slot, offset in enumerate((stores.CLAIMED, flow_at(memory, SESSION), cursors, cursors + 8)):
            tracer.watch(slot, memory.ctypes.data + offset)

    def run(self, changes: int) -> None:
        for _ in range(changes):
            what = self._random.random()
            if what < 0.4 or not self._rb.storage.initialized:
                self._extend()
            elif what < 0.7:
                self._sample()
            elif what < 0.78:
                self._flush()
            elif what < 0.95:
                self._save(self._random.random() < 0.8)
            elif what < 0.975:
                self._rb.storage.close()
                self._say(flushed=True)
                self._open()
            elif self._shape["commit"] == "manual":
                assert self._rb.seek(self._saved["position"]) == 0
                self._model = list(self._saved["model"])
        self._rb.storage.close()

    def _extend(self) -> None:
        n = self._random.choice((1, 2, 3, self._shape["capacity"] // 2))
        new = list(range(self._next, self._next + n))
        self._next += n
        try:
            self._rb.extend(rows(new, self._shape["width"]), timeout=0)
        except TimeoutError as error:
            first = str(error).partition("first ")[2].partition(" of")[0]
            new = new[: int(first or 0)]
        self._say(wrote=new)

    def _sample(self) -> None:
        n = min(self._rb.stats().waiting, self._random.choice((1, 2, 5)))
        if n:
            self._say(samples=True)
            self._model += ids(self._rb.sample(n))
            self._say(model=self._model)

    def _flush(self) -> None:
        self._rb.storage.flush()
        self._say(flushed=True)

    def _save(self, commits: bool) -> None:
        if self._shape["commit"] == "auto":
            return
        position = self._rb.position()
        self._saved = {"model": list(self._model), "position": position}
        self._say(saved=self._saved)
        if commits:
            self._rb.commit(position)

    def _say(self, **what: Any) -> None:
        self._log.write(json.dumps(what) + "\n")
        self._log.flush()
        tracer.mark(1)


class Cuts:
    """Runs lives of a queue one after the other, cuts the power at events, and goes on from what may be left."""

    FLUSHES = True  # whether `position` waits for the disk

    def __init__(self, root: Path, shape: dict[str, Any], seed: int, each: float = 0.2) -> None:
        self.root, self.shape, self._each, self._seed = root, shape, each, seed
        self.random = random.Random(seed)
        self.saved: dict[str, Any] = {"model": [], "position": None}
        self._wrote: list[int] = []
        self._model: list[int] = []
        self._durable: set[int] = set()
        self._samples = False
        self.images, self.came = 0, 0
        self._generation = 0
        root.mkdir(exist_ok=True)
        sessions._set_boot(0)
        rb = opened(root / "store", shape)
        if shape.get("begins_late"):  # the disk may know nothing of a queue yet when its rows are taken
            rb.end_queue()
        rb.extend(rows([1], shape["width"]))
        self._wrote, self._durable = [1], {1}
        rb.storage.close()

    def life(self, changes: int = 40) -> None:
        self._generation += 1
        generation, folder, log = self._generation, self.root / "store", self.root / "log"
        log.write_text("")
        self._lines, self._samples, self._model = 0, False, list(self.saved["model"])
        self.disk = MappedFile(folder / "rows.engram", self._seed * 100 + generation)
        seed = self._seed * 100 + generation

        def work() -> None:
            sessions._set_boot(generation)
            tracer.start()
            Life(folder, log, self.shape, seed, self.saved).run(changes)

        traced = tracer.run(work, folder, kinds=tracer.SYNC | tracer.STORE, listen=self._event)
        assert not traced.killed

    def _event(self, call: str, path: str, path2: str, args: list[int]) -> None:
        if call == "mark" and args[0] == sessions.MAPPED:
            self.disk.maps.insert(0, args[1])
            return
        self.disk.heard(call, path, args)
        if call == "mark":
            lines = (self.root / "log").read_text().splitlines()
            for line in lines[self._lines :]:
                self._hear(json.loads(line))
            self._lines = len(lines)
        if self.random.random() < self._each:
            self._check(self.disk.image()).storage.close()

    def _hear(self, said: dict[str, Any]) -> None:
        self._wrote += said.get("wrote", [])
        self._samples = said.get("samples", False)
        self._model = said.get("model", self._model)
        if said.get("flushed"):
            self._durable |= set(self._wrote)
        if "saved" in said:
            self.saved = said["saved"]
            self._durable |= set(self._wrote if self.FLUSHES else ())

    def _check(self, image: bytes) -> ReplayBuffer:
        """Opens what is left and goes on: the buffer, of which all rows were taken that the model has not."""
        folder = self.root / "image"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "rows.engram").write_bytes(image)
        sessions._set_boot(self._generation + 1)
        is_manual = self.shape["commit"] == "manual"
        if self.saved["position"] is not None:
            plain = ReplayBuffer.open(folder)
            assert plain.storage.lanes.queue.is_one, "the store is no queue any more"
            for kept, saved in zip(plain.storage.lanes.queue.kept, self.saved["position"]["rows"], strict=True):
                assert kept <= saved, "rows may be overwritten that the model was not trained with"
            plain.storage.close()
        rb = opened(folder, self.shape)
        if is_manual:
            assert rb.seek(self.saved["position"]) == 0, "rows are gone that the model was not trained with"
        came = drained(rb)
        assert len(set(came)) == len(came), "a row comes twice"
        if is_manual:
            assert not set(came) & set(self.saved["model"]), "a row comes that the model was trained with"
        trained = self.saved["model"] if is_manual else self._model
        if is_manual or not self._samples:
            gone = self._durable - set(came) - set(trained)
            assert not gone, f"the rows {sorted(gone)} were flushed, and do not come"
        self.images, self.came = self.images + 1, self.came + len(came)
        if is_manual:
            rb.commit(rb.position())
        else:  # as a learner does: it lets go what another one has handed out before the cut
            with contextlib.suppress(RuntimeError):
                rb.sample(1, wait=False)
        new = list(range(9_000_000, 9_000_000 + self.shape["capacity"]))
        rb.extend(rows(new, self.shape["width"]), timeout=0)
        assert sorted(drained(rb)) == new, "rows that were written after the power cut do not come"
        return rb

    def cut(self) -> None:
        """The store is what a cut at the end of a life left."""
        image = self.disk.image()
        rb = self._check(image)
        rb.storage.close()
        (self.root / "store" / "rows.engram").write_bytes(image)
        # What was not flushed may be lost; what is there now was flushed by the close.
        sessions._set_boot(self._generation + 1)
        rb, is_manual = opened(self.root / "store", self.shape), self.shape["commit"] == "manual"
        if is_manual:
            rb.seek(self.saved["position"])
        self._wrote = drained(rb)
        if is_manual:
            rb.seek(self.saved["position"])
        else:  # they are handed out
            self._wrote = []
        self._durable = {*self._wrote, *self.saved["model"]}
        rb.storage.close()


# ---- what may be left, made by hand ----
def image_of(root: Path, image: bytes | bytearray) -> Path:
    folder = root / "image"
    folder.mkdir()
    (folder / "rows.engram").write_bytes(image)
    sessions._set_boot(1)
    return folder


@pytest.fixture
def trained(ram_path: Path) -> tuple[ReplayBuffer, dict[str, Any]]:
    """A queue whose rows were all trained and committed, and the position behind them."""
    sessions._set_boot(0)
    rb = opened(ram_path / "store", BY_HAND)
    rb.seek(None)
    rb.extend(rows(range(4), BY_HAND["width"]))
    assert ids(rb.sample(4)) == [0, 1, 2, 3]
    with rb.committing() as position:
        pass
    return rb, position


BY_HAND = {"lanes": 1, "capacity": 4, "width": 600, "commit": "manual"}


@pytest.mark.quick
def test_rows_in_the_places_of_trained_ones_are_lost_and_their_numbers_are_given_to_no_others(
    ram_path: Path, trained: tuple[ReplayBuffer, dict[str, Any]]
) -> None:
    rb, position = trained
    file = ram_path / "store" / "rows.engram"
    image = bytearray(file.read_bytes())
    rb.extend(rows(range(4, 8), BY_HAND["width"]))
    store, after = rb.storage.lanes.store, file.read_bytes()
    for slot in (1, 2, 3):  # half of each had reached the disk
        begin = store.rows_offset + slot * store.row_stride
        image[begin : begin + 800] = after[begin : begin + 800]
    rb = opened(image_of(ram_path, image), BY_HAND)
    rb.extend(rows([8, 9], BY_HAND["width"]))  # an actor that is there before the learner
    assert rb.seek(position) == 0
    assert drained(rb) == [8, 9]


@pytest.mark.quick
def test_a_consumer_of_before_the_power_cut_is_none_whose_number_another_process_has_now(
    ram_path: Path, trained: tuple[ReplayBuffer, dict[str, Any]]
) -> None:
    rb, _ = trained
    rb.extend(rows([4], BY_HAND["width"]))
    image = bytearray((ram_path / "store" / "rows.engram").read_bytes())
    memory, queue = rb.storage.lanes.store.memory(), rb.storage.lanes.queue
    image[WRITERS : WRITERS + 8] = bytes(8)
    turn = flow_at(memory, TURN)
    image[turn : turn + 8] = queue.session_owner.to_bytes(8, "little")
    folder = image_of(ram_path, image)
    begun, ends = Signal(), Signal()

    def acts() -> None:
        sessions._set_boot(1)
        other = opened(folder, BY_HAND)
        other.extend(rows([5], BY_HAND["width"]))
        begun.send()
        ends.wait()

    first = opened(folder, BY_HAND)
    pid = fork(acts)
    begun.wait()
    with pytest.raises(RuntimeError, match="is told first which rows the model has"):
        first.sample(1)
    assert first.seek(None) == 0 and drained(first) == [4, 5]
    ends.send()
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.quick
def test_what_is_written_comes_where_the_disk_did_not_know_the_queue_yet_whose_rows_are_lost(ram_path: Path) -> None:
    shape = {"lanes": 1, "capacity": 24, "width": 40, "commit": "auto"}
    sessions._set_boot(0)
    rb = opened(ram_path / "store", shape)
    rb.extend(rows(range(4), shape["width"]))
    assert ids(rb.sample(4)) == [0, 1, 2, 3]
    store, image = rb.storage.lanes.store, bytearray((ram_path / "store" / "rows.engram").read_bytes())
    mode = flow_at(store.memory(), MODE)
    image[mode : mode + 8] = bytes(8)
    lost = store.rows_offset + store.row_stride
    image[lost : lost + 3 * store.row_stride] = bytes(3 * store.row_stride)
    rb = opened(image_of(ram_path, image), shape)
    rb.extend(rows([4, 5, 6], shape["width"]))
    assert drained(rb) == [4, 5, 6]


# ---- what may be left, at random ----
SHAPES = [
    {"lanes": 1, "capacity": 24, "width": 4, "commit": "manual"},
    {"lanes": 1, "capacity": 12, "width": 600, "commit": "manual"},
    {"lanes": 3, "capacity": 12, "width": 20, "commit": "manual"},
    {"lanes": 9, "capacity": 8, "width": 60, "commit": "manual"},
    {"lanes": 1, "capacity": 24, "width": 40, "commit": "auto"},
    {"lanes": 9, "capacity": 8, "width": 60, "commit": "auto"},
    {"lanes": 1, "capacity": 24, "width": 40, "commit": "manual", "begins_late": True},
    {"lanes": 9, "capacity": 8, "width": 60, "commit": "auto", "begins_late": True},
    {"lanes": 1, "capacity": 100, "width": 40, "commit": "auto", "begins_late": True},
]


def cuts(path: Path, shape: dict[str, Any], seed: int, lives: int, each: float) -> Cuts:
    done = Cuts(path, shape, seed, each)
    for _ in range(lives):
        done.life()
        done.cut()
    return done


@pytest.mark.quick
@each("shape", SHAPES)
def test_after_a_power_cut_each_row_comes_that_the_model_has_not(ram_path: Path, shape: dict[str, Any]) -> None:
    done = cuts(ram_path / "p", shape, 1, 2, 0.2)
    assert done.images > 10 and done.came > 20


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s.values())))
def test_after_thousands_of_power_cuts_each_row_comes_that_the_model_has_not(
    ram_path: Path, shape: dict[str, Any]
) -> None:
    images, came = 0, 0
    for seed in range(20):
        done = cuts(ram_path / f"p{seed}", shape, seed, 3, 0.5)
        images, came = images + done.images, came + done.came
    print(f"{shape}: {images} images, {came} rows came")
    assert images > 1000


@pytest.mark.mutant
def test_a_position_that_does_not_wait_for_the_disk_names_rows_that_are_lost(
    ram_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LazyMemmapStorage, "flush", lambda self: None)
    monkeypatch.setattr(Life, "_flush", lambda self: None)
    monkeypatch.setattr(Cuts, "FLUSHES", False)
    with pytest.raises(ValueError, match="lies beyond the rows of the store"):
        for seed in range(20):
            cuts(ram_path / f"p{seed}", SHAPES[0], seed, 1, 0.5)
