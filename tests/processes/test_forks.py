"""Forks while threads draw: a generator's mutex, which torch holds without the GIL, is never inherited locked."""

import os
import signal
import threading
import time

import pytest
import torch
from tensordict import TensorDict

from contracts.children import Child, alone_after_fork
from contracts.each import each
from engram._system import drawing
from engram.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("lock_order")]

SLICES = {"slice_len": 4, "traj_key": "id"}
SAMPLERS = {
    "random": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(None, 1.0, 1.0),
    "slices": lambda: SliceSampler(**SLICES),
    "slice epochs": lambda: SliceSamplerWithoutReplacement(**SLICES),
    "prioritized slices": lambda: PrioritizedSliceSampler(None, 1.0, 1.0, **SLICES),
    "sequences": lambda: SequenceSampler(**SLICES),
}


def buffer(sampler, generator=None, prefetch=None):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(1000), sampler=sampler(), batch_size=8, generator=generator, prefetch=prefetch
    )
    rb.extend(TensorDict({"n": torch.arange(200), "id": torch.arange(200) // 20}, [200]))
    return rb


def test_a_fork_waits_until_no_thread_draws():
    generator = torch.Generator().manual_seed(0)
    rb, inside = buffer(RandomSampler, generator), threading.Event()
    much = torch.empty(30_000_000, dtype=torch.int64)

    def draw():
        with drawing:
            inside.set()
            much.random_(generator=generator)  # without the GIL, the generator's mutex in hand

    thread = threading.Thread(target=draw)
    thread.start()
    inside.wait()
    time.sleep(0.02)
    child = Child(lambda: rb.sample()["n"].shape[0], seconds=100)
    thread.join()
    assert child.result() == 8


@each("sampler", [*SAMPLERS, "ensemble"])
def test_every_draw_is_made_where_a_fork_waits_for_it(sampler):
    if sampler == "ensemble":
        rb = ReplayBufferEnsemble(buffer(RandomSampler), buffer(RandomSampler), batch_size=8)
    else:
        rb = buffer(SAMPLERS[sampler])
    with drawing:
        thread = threading.Thread(target=rb.sample)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive(), "it drew while a fork would have thought that nobody does"
    thread.join(100)
    assert not thread.is_alive()


def forks(times, prefetch, own):
    """Forks while threads sample and write; how many children could not use the buffer."""
    generator = torch.Generator().manual_seed(3) if own else None
    rb, stop = buffer(RandomSampler, generator, prefetch), threading.Event()
    more = TensorDict({"n": torch.arange(100), "id": torch.arange(100) // 20}, [100])

    def use(what):
        while not stop.is_set():
            what()

    work = [rb.sample, rb.sample, lambda: rb.extend(more), lambda: rb[:10]]
    threads = [threading.Thread(target=use, args=(w,), daemon=True) for w in work]
    for thread in threads:
        thread.start()
    failed = 0
    for _ in range(times):
        pid = os.fork()
        if pid == 0:
            try:
                alone_after_fork(100)
                rb.extend(more[:5])
                rb.sample()
                rb.empty()
                os._exit(len(rb))
            finally:
                os._exit(3)
        failed += os.waitpid(pid, 0)[1] != 0
    stop.set()
    for thread in threads:
        thread.join()
    return failed


@pytest.mark.deep
@pytest.mark.parametrize("times", [12, pytest.param(60, marks=pytest.mark.long)])
def test_forked_children_use_the_buffer_while_threads_draw(times):
    assert forks(times, None, own=True) == 0


@pytest.mark.long
@pytest.mark.parametrize("prefetch", [None, 3])
@pytest.mark.parametrize("own", [True, False])
def test_in_thousands_of_forks_no_child_waits_for_ever(prefetch, own):
    assert forks(1500, prefetch, own) == 0


def test_a_fork_from_a_signal_handler_inside_a_draw_does_not_wait_for_itself():
    rb = buffer(RandomSampler)
    children = []
    before = signal.signal(signal.SIGUSR1, lambda *_: children.append(Child(lambda: len(rb.sample()), seconds=100)))
    try:
        with drawing:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0)
        assert [child.result() for child in children] == [8]
    finally:
        signal.signal(signal.SIGUSR1, before)
