"""What queues did wrong before: rows that go while a batch is read, errors in the middle, and who stands."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from contracts.waiting import comes, seems_alone
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    QueueSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.data.replay_buffers.reading.reader import Member
from engram.transforms import MultiStepTransform


def queue(capacity: int = 6, **options: Any) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=QueueSampler(**options), batch_size=4)
    rb.extend(torch.arange(capacity))
    return rb


def before_next_read(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """Calls `then`, once, when a batch's rows have been chosen and before they are read."""
    removed = Member.removed

    def looked(self: Member, slots: torch.Tensor) -> list[int] | None:
        monkeypatch.setattr(Member, "removed", removed)
        then()
        return self.removed(slots)

    monkeypatch.setattr(Member, "removed", looked)


@pytest.mark.parametrize("return_info", [False, True])
def test_a_row_that_is_removed_before_it_is_read_is_passed(monkeypatch: pytest.MonkeyPatch, return_info: bool) -> None:
    rb = queue()
    before_next_read(monkeypatch, lambda: rb.remove(torch.tensor([1])))
    batch = rb.sample(return_info=return_info)
    assert (batch[0] if return_info else batch).tolist() == [0, 2, 3, 4]
    assert rb.stats().waiting == 1


def test_rows_that_are_overwritten_before_they_are_read_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    rb = queue(full="overwrite")
    before_next_read(monkeypatch, lambda: rb.extend(torch.arange(6, 8)))
    assert rb.sample().tolist() == [2, 3, 4, 5]
    assert (rb.stats().missed, rb.stats().waiting) == (2, 2)


def test_rows_that_go_while_they_are_read_leave_what_is_left_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rb, given, now = queue(), list[float](), [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    where = "engram.data.replay_buffers.buffers.buffer.deadline_of"
    monkeypatch.setattr(where, lambda timeout: (given.append(timeout), now[0] + (0 if len(given) > 1 else timeout))[1])

    def replace() -> None:
        rb.empty()
        now[0] += 400.0

    before_next_read(monkeypatch, replace)
    with pytest.raises(TimeoutError, match="sample waits for 4 more rows"):
        rb.sample(timeout=500.0)
    assert given == [500.0, 100.0]


@pytest.mark.parametrize("loop", [False, True])
def test_rows_that_are_replaced_before_they_are_read_are_not_handed_out(
    monkeypatch: pytest.MonkeyPatch, loop: bool
) -> None:
    rb = queue()

    def replace() -> None:
        rb.empty()
        rb.extend(torch.arange(10, 15))

    before_next_read(monkeypatch, replace)
    assert (next(iter(rb)) if loop else rb.sample()).tolist() == [10, 11, 12, 13]
    assert rb.stats().waiting == 1


def test_a_loop_hands_out_the_rest_that_is_not_too_old_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seems_alone(monkeypatch)
    sampler = QueueSampler(max_staleness=1, version_key="version")
    rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, batch_size=4)
    rb.extend({"x": torch.arange(7), "version": torch.tensor([5, 0, 5, 5, 5, 0, 5])})
    sampler.consumer_version = 6
    batches = [batch["x"].tolist() for batch in itertools.islice(rb, 3)]
    assert batches == [[0, 2, 3, 4], [6]]
    assert (rb.stats().waiting, rb.stats().stale) == (0, 2)


@pytest.mark.parametrize(("removed", "rows"), [([0, 1, 2], 2), (range(6), 6)])
@pytest.mark.parametrize("awaits", [False, True])
def test_removed_rows_that_come_next_make_room(
    monkeypatch: pytest.MonkeyPatch, removed: Sequence[int], rows: int, awaits: bool
) -> None:
    seems_alone(monkeypatch)
    rb = queue()
    rb.remove(torch.tensor(removed))
    if awaits:
        rb.await_room(rows=rows)
    assert rb.extend(torch.arange(6, 6 + rows)).tolist() == list(range(rows))
    batch = next(iter(rb)) if rb.can_sample() else rb.sample(2)
    assert batch.tolist()[:2] == [row for row in range(12) if row >= 6 or row not in removed][:2]


def test_a_batch_of_a_queue_is_of_whole_time_steps() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), sampler=QueueSampler(), batch_size=3)
    rb.extend(torch.arange(8).reshape(2, 4))
    with pytest.raises(ValueError, match="a multiple of 2"):
        rb.sample()
    assert len(rb.sample(6)) == 6


def test_another_buffer_is_told_that_its_queue_was_ended() -> None:
    rb = queue()
    other = ReplayBuffer(storage=rb.storage, sampler=QueueSampler(), batch_size=4)
    rb.end_queue()
    assert not other.can_sample()
    with pytest.raises(RuntimeError, match="no queue any more"):
        other.sample()


def test_who_waits_for_rows_of_a_queue_that_ends_is_told() -> None:
    rb = queue()
    rb.sample()
    other = ReplayBuffer(storage=rb.storage, sampler=QueueSampler(), batch_size=4)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(each.sample, wait=True, timeout=60) for each in (rb, other)]
        assert comes(lambda: rb.storage.lanes.store.waits[2] == 2)
        rb.end_queue()
        assert len(waiting[0].result()) == 4  # drawn uniformly, as its own buffer was told
        with pytest.raises(RuntimeError, match="no queue any more"):
            waiting[1].result()


def test_workers_of_a_data_loader_hand_out_no_copies() -> None:
    rb = queue()
    loader = DataLoader(rb.as_iterable_dataset(), batch_size=None, num_workers=1)
    with pytest.raises(RuntimeError, match="shared=True"):
        next(iter(loader))


def test_a_dataset_of_a_queue_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seems_alone(monkeypatch)
    assert [batch.tolist() for batch in queue().as_iterable_dataset(batches=9)] == [[0, 1, 2, 3], [4, 5]]


def test_workers_of_a_data_loader_share_a_queue() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8, shared=True), sampler=QueueSampler(), batch_size=2)
    rb.extend(torch.arange(8))
    loader = DataLoader(rb.as_iterable_dataset(batches=4), batch_size=None, num_workers=2)
    assert sorted(row for batch in loader for row in batch.tolist()) == list(range(8))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_a_copy_of_a_queue_goes_on_where_it_was(copied: Callable[[ReplayBuffer], ReplayBuffer]) -> None:
    rb = queue()
    assert rb.sample().tolist() == [0, 1, 2, 3]
    other = copied(rb)
    other.extend(torch.arange(6, 8))
    assert other.sample().tolist() == [4, 5, 6, 7]
    assert rb.stats().waiting == 2


def test_rows_that_wait_for_room_get_the_priorities_that_come_with_them(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(12, scratch_dir=tmp_path, shared_init=True, existsok=True, lanes=3)
    rb = ReplayBuffer(storage=storage, sampler=QueueSampler(), batch_size=2)
    sampler = PrioritizedSampler(12, 1.0, 1.0, 0.0)
    other = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=2, priority_key="p")
    other.extend(TensorDict({"x": torch.arange(2.0), "p": torch.arange(2.0) + 1}, [2]))
    n = torch.arange(2.0, 16.0)
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(other.extend, TensorDict({"x": n, "p": n + 1}, [14]))
        while not writing.done():
            with contextlib.suppress(TimeoutError):
                rb.sample(timeout=0.05)
        index = writing.result()
    newest = dict(zip(index.tolist(), n.tolist(), strict=True))
    at = torch.tensor(list(newest))
    assert other[at]["x"].tolist() == list(newest.values())
    assert (sampler.priorities(at, storage=storage) - other[at]["x"]).tolist() == [1.0] * len(at)


def test_data_that_a_full_queue_refuses_leave_transforms_as_before() -> None:
    transform = MultiStepTransform(n_steps=3, gamma=0.5)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6), sampler=QueueSampler(), batch_size=2, transform=transform)
    rb.extend(steps_of_time(8))
    with pytest.raises(TimeoutError, match="nothing was written"):
        rb.extend(steps_of_time(4, 8), timeout=0)
    found = [row for _ in range(3) for row in rb.sample()["obs"].tolist()]
    rb.extend(steps_of_time(4, 8))
    assert found + [row for _ in range(2) for row in rb.sample()["obs"].tolist()] == list(range(10))


def steps_of_time(n: int, first: int = 0) -> TensorDict:
    t = torch.arange(first, first + n).float()
    off = torch.zeros(n, 1, dtype=torch.bool)
    reward = t.reshape(n, 1)
    then = TensorDict({"obs": t + 1, "reward": reward, "done": off, "terminated": off.clone()}, [n])
    return TensorDict({"obs": t, "next": then}, [n])


@pytest.mark.parametrize("kind", ["removed", "too old"])
def test_a_full_queue_without_a_batch_is_an_error_and_a_loop_takes_what_is_there(kind: str) -> None:
    sampler = QueueSampler(max_staleness=1, version_key="version")
    rb = ReplayBuffer(storage=LazyTensorStorage(6), sampler=sampler, batch_size=4)
    versions = torch.full((6,), 5)
    if kind == "too old":
        versions[1:4] = 0
    rb.extend({"x": torch.arange(6), "version": versions})
    if kind == "removed":
        rb.remove(torch.arange(1, 4))
    sampler.consumer_version = 5
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(rb.extend, {"x": torch.arange(6, 10), "version": torch.full((4,), 5)}, timeout=60)
        with pytest.raises(RuntimeError, match="The queue is full, and has no batch of 4"):
            rb.sample()
        batches = [batch["x"].tolist() for batch in itertools.islice(rb, 2)]
        writing.result()
    assert batches == [[0, 4, 5], [6, 7, 8, 9]]
