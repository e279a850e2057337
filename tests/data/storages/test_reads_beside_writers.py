"""Reads by index while another process overwrites the oldest rows of a full ring: no stored row is missed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engram import _native
from engram.data import LazyMemmapStorage, ReplayBuffer
from engram.data.replay_buffers.storages import access
from engram.store import indexing
from engram.testing.helpers import numbers, steps

CAPACITY, OVERWRITTEN = 64, 6

Read = Callable[[Any], Any]

#: Reads of certain slots, of which one is overwritten.
CERTAIN: dict[str, Read] = {
    "an integer": lambda rb: rb[2],
    "a negative integer": lambda rb: rb[-CAPACITY],
    "a list": lambda rb: rb[[1, 40]],
    "negative integers": lambda rb: rb[[1, -CAPACITY]],
    "a tensor": lambda rb: rb[torch.arange(0, CAPACITY, 5)],
    "a mask": lambda rb: rb[torch.arange(CAPACITY) % 2 == 0],
    "a range": lambda rb: rb[range(10)],
    "whether a step is stored": lambda rb: 2 in rb.storage,
}
READS: dict[str, Read] = {
    **CERTAIN,
    "all rows": lambda rb: rb[:],
    "a slice": lambda rb: rb[0:20],
    "a slice with a step": lambda rb: rb[::3],
    "a key": lambda rb: rb["n"],
    "rows of the storage": lambda rb: rb.storage.get(slice(None)),
    "all rows in order": lambda rb: rb.read_all_in_order(),
}


@pytest.fixture
def job(tmp_path: Path) -> ReplayBuffer[Any]:
    """The buffer of a job, whose ring has gone round."""
    rb = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path))
    rb.extend(steps(0, 2 * CAPACITY))
    return rb


@pytest.fixture(params=["user", "observer"])
def rb(request: pytest.FixtureRequest, job: ReplayBuffer[Any], tmp_path: Path) -> ReplayBuffer[Any]:
    """Another object over the same store."""
    return ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path, read_only=request.param == "observer"))


def begin_overwriting(job: ReplayBuffer[Any]) -> Callable[[], None]:
    """As a writer does before it copies rows; calling the result is what it does after that."""
    store = job.storage.lanes.store
    at = _native.testing.claim(store, 0, OVERWRITTEN)
    return lambda: _native.testing.publish(store, 0, at, OVERWRITTEN)


def text(found: Any) -> str:
    return str(found.to_dict() if hasattr(found, "to_dict") else found)


def test_rows_that_are_overwritten_at_every_try_are_an_error(
    job: ReplayBuffer[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job.storage.access, "beside_writers", lambda read: read()._replace(overwritten=[0]))
    with pytest.raises(RuntimeError, match="overwrite these rows faster than they can be copied"):
        job.storage.get([1, 2])


@pytest.mark.parametrize("read", CERTAIN.values(), ids=CERTAIN)
def test_rows_that_are_being_overwritten_are_waited_for(
    job: ReplayBuffer[Any], rb: ReplayBuffer[Any], read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, end = text(read(rb)), begin_overwriting(job)
    monkeypatch.setattr(indexing.time, "sleep", lambda seconds: end())
    assert text(read(rb)) == expected


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_rows_overwritten_after_the_counters_were_read_are_waited_for(
    job: ReplayBuffer[Any], rb: ReplayBuffer[Any], read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, ends, select = text(read(rb)), list[Callable[[], None]](), access.select

    def select_then_overwrite(*arguments: Any) -> Any:
        selection = select(*arguments)
        if not ends:
            ends.append(begin_overwriting(job))
        return selection

    for module in (access, indexing):
        monkeypatch.setattr(module, "select", select_then_overwrite)
    monkeypatch.setattr(indexing.time, "sleep", lambda seconds: ends[0]())
    assert text(read(rb)) == expected and ends


def test_rows_that_a_dead_writer_left_half_written_are_an_index_error(
    job: ReplayBuffer[Any], rb: ReplayBuffer[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_overwriting(job)
    monkeypatch.setattr(indexing.time, "sleep", lambda seconds: None)
    with pytest.raises(IndexError, match="index 2 has not been written; 58 steps are stored"):
        rb[2]
    assert len(numbers(rb[:])) == CAPACITY - OVERWRITTEN


@pytest.mark.parametrize("index, said", [(CAPACITY, "has not been written"), (-CAPACITY - 1, "out of"),
                                         (torch.ones(CAPACITY + 1).bool(), "does not index")])  # fmt: skip
def test_steps_that_no_ring_holds_are_not_waited_for(
    rb: ReplayBuffer[Any], index: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    monkeypatch.setattr(indexing.time, "sleep", looks.append)
    with pytest.raises(IndexError, match=said):
        rb[index]
    assert len(looks) <= 1


@pytest.mark.parametrize("n", [20, CAPACITY - OVERWRITTEN], ids=["with room left", "being filled"])
def test_steps_beyond_a_ring_that_is_not_full_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path))
    rb.extend(steps(0, n))
    begin_overwriting(rb)  # places of the ring that hold no row yet
    monkeypatch.setattr(indexing.time, "sleep", None)
    for index in (n, -n - 1, [3, n], torch.ones(n + 1).bool()):
        with pytest.raises(IndexError):
            rb[index]
    assert n not in rb.storage and n - 1 in rb.storage
