"""Buffers with every kind of sampler, sent to other processes in every way, where they follow all lanes.

Each process fills one lane and begins another: row n of writer k is in slot k * ROWS + n.
"""

from __future__ import annotations

import multiprocessing as mp

import pytest
import torch

from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
)
from processes.rows import Faults, Maker, check_rows, check_slices, columns
from processes.torture import LENGTH, SAMPLERS

LANE = 250
ROWS = 2 * LANE  # room for them in the lanes of one writer
STORES = {
    "shared memory": lambda path: LazyTensorStorage(2 * ROWS, shared=True, lanes=2),
    "temporary file": lambda path: LazyMemmapStorage(2 * ROWS, lanes=2),
    "named file": lambda path: LazyMemmapStorage(2 * ROWS, scratch_dir=path, lanes=2),
}


def sampled(rb, name):
    """What is wrong with batches, and the writers of whom rows came."""
    faults, writers = Faults(), set()
    for _ in range(40):
        batch, info = rb.sample(return_info=True)
        index, generation = info["index"], info.get("generation")
        if generation is not None:  # each lane counts by itself
            generation = generation + index % ROWS // LANE * LANE
        check_rows(faults, batch, generation, index, ROWS, name)
        if "slice" in name:
            check_slices(faults, batch, LENGTH, name in ("slices", "prioritized slices"), name)
        writers |= set(columns(batch)["lane"].tolist())
    return list(faults), sorted(writers)


def work(connection):
    """In the other process: for each buffer that comes, what it reads, before and after it has written."""
    torch.set_num_threads(1)
    while True:
        got = connection.recv()
        if got is None:
            return
        try:
            name, session, rb = got
            if "prioritized" in name:  # such samplers are not sent: each process has its own
                rb.set_sampler(SAMPLERS[name]())
            before = sampled(rb, name)
            rb.extend(Maker(1, session).rows(0, 300))
            connection.send((before, sampled(rb, name)))
            connection.recv()
            rb.storage.close()
        except BaseException as error:
            connection.send(repr(error))


@pytest.fixture(scope="module", params=["fork", "spawn"])
def other(request):
    context = mp.get_context(request.param)
    here, there = context.Pipe()
    process = context.Process(target=work, args=(there,), daemon=True)
    process.start()
    yield here
    here.send(None)
    process.join(300)
    assert process.exitcode == 0


@pytest.mark.pairwise
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_buffer_that_was_sent_reads_and_writes_and_its_sampler_follows_both_writers(name, store, other, tmp_path):
    rb = TensorDictReplayBuffer(storage=STORES[store](tmp_path), sampler=SAMPLERS[name](), batch_size=64)
    rb.set_writer(ReplayBuffer(storage=LazyTensorStorage(1)).writer)
    rb.extend(Maker(0, 1).rows(0, 300))
    rb.sample()
    sent = rb
    if "prioritized" in name:
        with pytest.raises(RuntimeError, match="cannot be shared between processes"):
            other.send((name, 2, rb))
        sent = TensorDictReplayBuffer(storage=rb.storage, writer=rb.writer, batch_size=64)
    other.send((name, 2, sent))
    assert other.poll(300)
    said = other.recv()
    assert not isinstance(said, str), said
    before, after = said
    assert before == ([], [0]) and len(rb.storage.lanes.counters()) == 4
    assert after == ([], [0, 1]) and sampled(rb, name) == ([], [0, 1])
    other.send("go on")
    rb.storage.close()


def test_ensembles_of_buffers_that_others_write_follow_each_member(other, tmp_path):
    members = [ReplayBuffer(storage=STORES["shared memory"](None), batch_size=32) for _ in range(2)]
    for member in members:
        member.extend(Maker(0, 1).rows(0, 100))
    both = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=64)
    both.sample()
    for member in members:
        other.send(("random", 2, member))
        assert other.poll(300) and not isinstance(other.recv(), str)
        other.send("go on")
    writers = torch.cat([both.sample()["lane"] for _ in range(20)], -1)
    assert [set(row) for row in writers.tolist()] == [{0, 1}, {0, 1}]


def by_queue(queue, said):
    name, rb = queue.get(timeout=300)
    said.put(sampled(rb, name))


def test_a_buffer_goes_through_a_queue():
    context = mp.get_context("fork")
    queue, said = context.Queue(), context.Queue()
    process = context.Process(target=by_queue, args=(queue, said))
    process.start()
    rb = ReplayBuffer(storage=STORES["shared memory"](None), sampler=SAMPLERS["slices"](), batch_size=64)
    rb.extend(Maker(0, 1).rows(0, 300))
    queue.put(("slices", rb))
    assert said.get(timeout=300) == ([], [0])
    process.join(300)
    assert process.exitcode == 0
