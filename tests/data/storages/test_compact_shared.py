"""Storages that keep each observation once in memory that processes share, or in a temporary file, which grow."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.children import Child
from contracts.each import each
from engram import _native
from engram.data import Compact, LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from engram.errors import StorageError
from engram.store.header import opened_store
from engram.store.observed import ObservedRows

CAPACITY = 200


def strangers(n: int, seed: int, size: int = 4000) -> TensorDict:
    """Steps of which no observation is another one's: each takes units for all of its frames."""
    torch.manual_seed(seed)
    x, after = (torch.randint(0, 256, (n, 4, size), dtype=torch.uint8) for _ in range(2))
    return TensorDict({"x": x, "next": {"x": after}}, [n])


def small(n: int, seed: int) -> TensorDict:
    """The same of small observations, which lie in the rows."""
    torch.manual_seed(seed)
    return TensorDict({"x": torch.rand(n, 3), "next": {"x": torch.rand(n, 3)}}, [n])


def in_memory(**kwargs: Any) -> LazyTensorStorage:
    return LazyTensorStorage(CAPACITY, shared=True, **kwargs)


def in_a_file(**kwargs: Any) -> LazyMemmapStorage:
    return LazyMemmapStorage(CAPACITY, **kwargs)


PLACES = {"shared memory": in_memory, "temporary file": in_a_file}
COMPACT = Compact("x", frames=4)


def buffer(storage: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=storage, batch_size=16)


def rows(rb: Any, index: Any = slice(None)) -> TensorDict:
    stored: TensorDict = rb.storage.get(index).exclude("index")
    return stored


@each("place", list(PLACES))
def test_rows_of_another_process_are_read_from_segments_that_came_after_the_map(place: str) -> None:
    rb = buffer(PLACES[place](compact=COMPACT))
    rb.extend(strangers(1, 0))
    before = rb.storage.nbytes
    written = Child(lambda: len(rb.extend(strangers(40, 1)))).result()
    assert written == 40 and rb.storage.nbytes > before + 40 * 4 * 4000
    assert bool((rows(rb, range(1, 41)) == strangers(40, 1)).all())


@pytest.mark.deep
def test_writers_in_turns_take_no_units_of_each_other() -> None:
    rb = buffer(in_memory(compact=COMPACT))
    rb.extend(strangers(5, 0))
    for turn in range(1, 60):
        work = extending(rb, turn)
        _ = Child(work).result() if turn % 3 else work()
        assert bool((rows(rb, (rb.storage.lanes.next_slots(7) - 7) % CAPACITY) == strangers(7, turn)).all())
    expected = torch.cat([strangers(5, 0), *[strangers(7, turn) for turn in range(1, 60)]])[-CAPACITY:]
    at = (torch.arange(CAPACITY) + rb.writer._cursor) % CAPACITY
    assert bool((rows(rb, at) == expected).all())


def extending(rb: TensorDictReplayBuffer, seed: int) -> Callable[[], None]:
    def work() -> None:
        rb.extend(strangers(7, seed))

    return work


def read_there(connection: Any) -> None:
    """In a spawned process: reads the buffer that comes, writes, and says what it saw."""
    torch.set_num_threads(1)
    rb = connection.recv()
    same = len(rb) == 0 or bool((rows(rb, range(9)) == strangers(9, 0)).all())
    rb.extend(strangers(6, 3))
    connection.send((same, str(rb.storage.compact)))


@pytest.mark.deep
@each("settings", [{"shared": True}, {"shared_init": True}, {"shared": True, "lanes": 2}])
def test_a_storage_is_sent_to_a_spawned_process(settings: dict[str, Any]) -> None:
    rb = buffer(LazyTensorStorage(CAPACITY, compact=COMPACT, **settings))
    if "shared_init" not in settings:
        rb.extend(strangers(9, 0))
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=read_there, args=(there,))
    child.start()
    here.send(rb)
    same, compact = here.recv()
    child.join()
    assert same and compact == str(rb.storage.compact)
    newest = rb.storage.get(slice(None))
    assert any(bool((row["x"] == strangers(6, 3)[0]["x"]).all()) for row in newest)


def test_it_is_shared_before_its_first_write_as_well() -> None:
    rb = buffer(LazyTensorStorage(CAPACITY, compact=COMPACT)).share()
    rb.extend(strangers(3, 0))
    assert Child(lambda: len(rb.extend(strangers(2, 1)))).result() == 2
    assert bool((rows(rb) == torch.cat([strangers(3, 0), strangers(2, 1)])).all())


# ---- a full disk ----
@contextmanager
def no_longer_files(fd: int) -> Iterator[None]:
    """A block in which files do not grow beyond the length of this one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(fd).st_size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@each("place, lanes", [("shared memory", None), ("temporary file", None), ("shared memory", 2)])
def test_where_the_file_cannot_grow_nothing_is_claimed_and_it_goes_on_when_there_is_room(
    place: str, lanes: int | None
) -> None:
    rb = buffer(PLACES[place](compact=COMPACT, lanes=lanes))
    rb.extend(strangers(3, 0))
    states, stored = rb.storage.lanes.states(), rows(rb)
    with no_longer_files(rb.storage.lanes.locks.fd):
        with pytest.raises(StorageError, match=r"cannot grow by .* Nothing was written"):
            rb.extend(strangers(100, 1))
        for lane, before in zip(rb.storage.lanes.states(), states, strict=True):
            assert lane == before
        assert bool((rows(rb) == stored).all())
    slots = rb.extend(strangers(60, 1))
    assert bool((rows(rb, slots) == strangers(60, 1)).all())


def test_a_full_disk_is_an_error_and_no_bus_error(
    mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = mount("14m")
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    rb = buffer(in_a_file(compact=COMPACT))
    rb.extend(strangers(3, 0))
    (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - (600 << 10)))
    written = 0
    with pytest.raises(StorageError, match="No space left"):
        while written < 40:
            rb.extend(strangers(4, written))
            written += 4
    assert len(rb) == 3 + written
    assert bool((rows(rb, range(3)) == strangers(3, 0)).all())
    (disk / "filler").unlink()
    assert bool((rows(rb, rb.extend(strangers(4, 99))) == strangers(4, 99)).all())


# ---- files and words that are not as they were written ----
def test_a_file_that_was_cut_short_is_an_error_and_no_bus_error() -> None:
    rb = buffer(in_a_file(compact=COMPACT))
    rb.extend(strangers(60, 0))
    fd, store = rb.storage.lanes.locks.fd, rb.storage.lanes.store
    os.ftruncate(fd, store.total_bytes + store.observation_bytes - 4096)
    for use in (rb.sample, lambda: rb.extend(strangers(1, 1)), lambda: rb.storage.get(slice(None))):
        with pytest.raises(StorageError, match="cut short"):
            use()


@pytest.mark.deep
@each("steps, compact", [(strangers, COMPACT), (strangers, Compact("x", frames=1)), (small, True)])
def test_forged_words_crash_no_reader(steps: Callable[[int, int], TensorDict], compact: Any) -> None:
    rb = buffer(in_memory(compact=compact))
    rb.extend(steps(80, 0))
    fd, store = rb.storage.lanes.locks.fd, rb.storage.lanes.store
    end = store.total_bytes + store.observation_bytes
    draw = random.Random(0)

    def read_forged() -> int:
        reads = 0
        for _ in range(30):
            for _ in range(300):
                low = store.rows_offset if draw.random() < 0.3 else store.total_bytes
                at = draw.randrange(low, draw.choice([end, min(end, store.total_bytes + 20_000)])) & ~7
                word = draw.choice(
                    [draw.getrandbits(64), draw.getrandbits(12), (1 << 64) - 1, 1, draw.getrandbits(20) << 8]
                )
                os.pwrite(fd, word.to_bytes(8, "little"), at)
            reads += len(rows(rb)) + len(rb.sample())
        return reads

    assert Child(read_forged).result() == 30 * (80 + 16)


def test_a_segment_that_a_lane_is_said_to_have_is_not_read_where_the_file_does_not_reach() -> None:
    rb = buffer(in_memory(compact=COMPACT))
    rb.extend(strangers(80, 0))
    fd, store = rb.storage.lanes.locks.fd, rb.storage.lanes.store
    said = np.frombuffer(os.pread(fd, store.observation_bytes, store.total_bytes), np.uint64)
    taken = int(np.argmax(said == 0))
    words = taken + int(np.argmax(said[taken:] != 0))
    assert (said[:taken] == 1).all() and (said[words + 1 : words + 80] % 4 == 2).all(), "owners, then words with units"
    os.pwrite(fd, np.ones(words - taken - 8, np.uint64).tobytes(), store.total_bytes + 8 * taken)
    newest = int((said[words : words + 80] >> 8).max())
    draw = np.random.default_rng(0)

    def read_forged() -> int:
        reads = 0
        for _ in range(20):
            heads = draw.integers(newest, 10 * newest, 80).astype(np.uint64)
            forged = heads << np.uint64(8) | said[words : words + 80] & np.uint64(255)
            os.pwrite(fd, forged.tobytes(), store.total_bytes + 8 * words)
            reads += len(rows(rb))
        return reads

    assert Child(read_forged).result() == 20 * 80


def test_a_store_is_not_written_to_before_it_is_known_what_lies_beside_its_rows() -> None:
    rb = buffer(in_memory(compact=COMPACT))
    rb.extend(strangers(3, 0))
    fd = rb.storage.lanes.locks.fd
    store = _native.Store.open(fd)
    with pytest.raises(ValueError, match="not known yet"):
        store.empty(False)
    sizes = _native.Store.observation_sizes(1, CAPACITY, 1, store.payload_bytes, 8, False, 1, [(4, 4000)])
    for wrong in range(4):
        others = tuple(size + (i == wrong) for i, size in enumerate(sizes))
        with pytest.raises(RuntimeError, match="lie elsewhere"):
            store.keep_observations(1, [(4, 4000)], None, others)
    piece, places, units, sure = sizes
    impossible = [(p, places, units) for p in (0, 2 * piece, 1 << 60)]
    impossible += [(piece, p, units) for p in (0, 1, 2 * piece, 1 << 60)]
    impossible += [(piece, places, n) for n in (0, (1 << 20) // 4008 + 1, 1 << 20, 1 << 60)]
    for others in impossible:
        for pages in range(-40, 200):
            with pytest.raises(RuntimeError, match="lie elsewhere"):
                store.keep_observations(1, [(4, 4000)], None, (*others, sure + 4096 * pages))
    store.keep_observations(1, [(4, 4000)], None, sizes)
    with pytest.raises(ValueError, match="made for them"):
        store.keep_observations(1, [(4, 4000)], None, sizes)


@each("steps, compact", [(strangers, COMPACT), (small, True)])
def test_who_only_looks_sees_observations_as_columns(steps: Callable[[int, int], TensorDict], compact: Any) -> None:
    rb = buffer(in_memory(compact=compact))
    rb.extend(steps(30, 0))
    observed = ObservedRows(opened_store(rb.storage.lanes.locks.fd, read_only=True))
    for path in (("x",), ("next", "x")):
        leaf = observed.leaf(path)
        assert leaf is not None
        seen = observed.column(leaf, 0, range(4, 29))
        assert np.array_equal(seen[:, 0], steps(30, 0)[4:29][path])
    index = observed.leaf(("index",))
    assert index is not None and observed.column(index, 0, range(30)).reshape(-1).tolist() == list(range(30))


def test_the_file_has_the_bytes_that_the_storage_says() -> None:
    rb = buffer(in_memory(compact=COMPACT))
    for seed in range(6):
        rb.extend(strangers(20, seed))
        assert os.fstat(rb.storage.lanes.locks.fd).st_size == rb.storage.nbytes
