"""`publish_stats=True`: what a buffer draws, in a file beside its store, and nothing that its user could notice."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SampleToInsertRatio,
    SliceSampler,
    TensorDictReplayBuffer,
)
from engram.data.replay_buffers.buffers import publishing
from engram.data.replay_buffers.buffers.publishing import draw_chances
from engram.store.published import LearnerFile, published_stats

SECONDS = publishing._SECONDS  # before the tests set it


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_SECONDS", 0.02)


def publishing_buffer(folder: Path, sampler: Any = None, capacity: int = 100) -> TensorDictReplayBuffer:
    storage = LazyMemmapStorage(capacity, scratch_dir=folder)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=8, publish_stats=True)
    rb.extend(TensorDict({"n": torch.arange(50)}, [50]))
    return rb


def wait_for(folder: Path, what: Any) -> Any:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for stats in published_stats(folder):
            if what(stats):
                return stats
        time.sleep(0.01)
    raise AssertionError(f"not published: {published_stats(folder)}")


def test_the_ratio_is_that_of_all_who_sample_where_a_rate_limiter_counts(tmp_path):
    def opened(**options):
        storage = LazyMemmapStorage(100, scratch_dir=tmp_path, shared_init=True, existsok=True)
        return ReplayBuffer(storage=storage, batch_size=8, rate_limiter=SampleToInsertRatio(4.0, 10), **options)

    rb, other = opened(publish_stats=True), opened()
    rb.extend(torch.arange(20))
    rb.sample(), other.sample(), other.sample()
    assert wait_for(tmp_path, lambda stats: stats.batches == 1 and stats.ratio == 24 / 10).pid == os.getpid()


def test_draws_their_ratio_and_ages_are_published(tmp_path):
    rb = publishing_buffer(tmp_path)
    for _ in range(25):
        rb.sample()
    stats = wait_for(tmp_path, lambda stats: stats.batches == 25)
    assert (stats.pid, stats.sampler, stats.batch_size, stats.rows) == (os.getpid(), "RandomSampler", 8, 50)
    assert stats.ratio == 25 * 8 / 50 and stats.effective == pytest.approx(50) and stats.priorities is None
    assert stats.ages[0] == 0 and stats.ages[5] == pytest.approx(25, abs=1) and stats.ages[10] == 49


def test_priorities_count_for_ages_and_effective_rows(tmp_path):
    rb = publishing_buffer(tmp_path, PrioritizedSampler(100, alpha=1.0, beta=1.0, eps=0.0))
    rb.update_priority(torch.arange(50), torch.tensor([0.0] * 40 + [2.0] * 10))
    stats = wait_for(tmp_path, lambda stats: stats.effective is not None and stats.effective < 11)
    assert stats.effective == pytest.approx(10) and stats.ages[10] == 9
    assert stats.priorities.counts[0] == 40 and stats.priorities.counts[-1] == 10


def test_a_sampler_that_does_not_say_how_likely_rows_are_has_no_ages(tmp_path):
    rb = publishing_buffer(tmp_path, SliceSampler(num_slices=2, end_key="n"))
    stats = wait_for(tmp_path, lambda stats: True)
    assert stats.ages is None and stats.effective is None and len(rb) == 50


def test_many_rows_are_looked_at_here_and_there(monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(10_000), sampler=RandomSampler(), batch_size=4)
    rb.extend(torch.arange(9000))
    monkeypatch.setattr(publishing, "_MOST_LOOKED_AT", 100)
    ages, effective, _ = draw_chances(rb.storage, rb.sampler)
    assert effective == pytest.approx(9000) and ages[5] == pytest.approx(4500, rel=0.05)


def test_it_publishes_at_most_once_a_second():
    assert SECONDS == 1.0


def test_batches_are_those_of_a_buffer_that_does_not_publish(tmp_path):
    drawn = []
    for name, published in (("a", True), ("b", False)):
        storage = LazyMemmapStorage(100, scratch_dir=tmp_path / name)
        sampler = PrioritizedSampler(100, alpha=0.7, beta=0.5, max_priority_within_buffer=True)
        rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=8, publish_stats=published)
        rb.set_rng(torch.Generator().manual_seed(0))
        batches = []
        for k in range(30):
            rb.extend(TensorDict({"n": torch.arange(7) + 7 * k}, [7]))
            batch = rb.sample()
            rb.update_priority(batch["index"], 1.0 + batch["n"] % 5)
            batches.append(batch["n"])
            if published and k % 10 == 0:
                time.sleep(0.05)
        drawn.append(torch.stack(batches))
    assert torch.equal(*drawn)


def test_a_storage_without_a_folder_is_refused():
    with pytest.raises(ValueError, match="needs LazyMemmapStorage"):
        ReplayBuffer(storage=LazyTensorStorage(10), publish_stats=True)
    with pytest.raises(ValueError, match="needs LazyMemmapStorage"):
        ReplayBuffer(storage=LazyMemmapStorage(10), publish_stats=True)


@pytest.mark.parametrize("end", ["shutdown", "collected"])
def test_the_file_goes_with_the_buffer(tmp_path, end):
    rb = publishing_buffer(tmp_path)
    wait_for(tmp_path, lambda stats: True)
    if end == "shutdown":
        rb.shutdown()
    else:
        del rb
        gc.collect()
    time.sleep(0.1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.engram"]


@pytest.mark.deep
def test_the_file_goes_with_the_process(tmp_path):
    code = (
        "import sys, torch, time; from engram.data import *; "
        "rb = ReplayBuffer(storage=LazyMemmapStorage(9, scratch_dir=sys.argv[1]), batch_size=2, publish_stats=True); "
        "rb.extend(torch.arange(5)); time.sleep(1.5); "
        "from engram.store.published import published_stats; from pathlib import Path; "
        "assert published_stats(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.engram"]


def test_copies_do_not_publish(tmp_path):
    rb = publishing_buffer(tmp_path)
    for twin in (copy.copy(rb), pickle.loads(pickle.dumps(rb))):
        assert "_publisher" not in vars(twin) and len(twin) == 50
    assert rb._publisher is not None


def test_a_delayed_buffer_publishes_once_it_is_made(tmp_path):
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path)
    rb = ReplayBuffer(storage=storage, batch_size=2, delayed_init=True, publish_stats=True)
    rb.extend(torch.arange(5))
    assert wait_for(tmp_path, lambda stats: stats.rows == 5).batch_size == 2


def test_what_a_killed_learner_published_counts_for_nothing(tmp_path):
    rb = publishing_buffer(tmp_path)
    stats = wait_for(tmp_path, lambda stats: True)
    rb.shutdown()
    left = LearnerFile(tmp_path)
    left.write(stats)
    os.utime(left.path, (time.time() - 60, time.time() - 60))
    assert published_stats(tmp_path) == [] and left.path.exists()
    os.utime(left.path, (time.time() - 7200, time.time() - 7200))
    LearnerFile(tmp_path).remove_forgotten()
    assert not left.path.exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"pid": "x"}', "\x00" * 100, '{"pid": 1e999}'])
def test_a_file_that_is_no_block_counts_for_nothing(tmp_path, content):
    LearnerFile(tmp_path).path.write_text(content)
    assert published_stats(tmp_path) == []


def test_a_pipe_in_the_place_of_a_block_holds_nobody_up(tmp_path):
    os.mkfifo(LearnerFile(tmp_path).path)
    assert published_stats(tmp_path) == []
