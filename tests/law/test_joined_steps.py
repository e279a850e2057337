"""However rows were made, no slice holds a step whose next observation is not its successor's observation."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.children import Child
from engram.collectors import SyncDataCollector
from engram.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, SliceSampler
from engram.envs import GymEnv, SerialEnv

pytestmark = pytest.mark.quick

CAPACITY, FRAMES, LENGTH = 3000, 8, 6


def collector(seed: int, rb: ReplayBuffer | None = None, total: int = FRAMES * 6, **how: Any) -> SyncDataCollector:
    """Cuts its episodes anywhere: a batch is no whole number of them. Ids count from 0."""
    made = SyncDataCollector(
        how.pop("env", lambda: GymEnv("CartPole-v1")),
        frames_per_batch=FRAMES,
        total_frames=total,
        replay_buffer=rb,
        **how,
    )
    made.set_seed(seed)
    return made


def two_collectors(open_buffer: Callable[[], ReplayBuffer]) -> None:
    rb = open_buffer()
    for seed in range(40):  # each stops in its first or second episode
        for batch in collector(seed, total=FRAMES * 2):
            rb.extend(batch)


def two_collectors_in_turns(open_buffer: Callable[[], ReplayBuffer]) -> None:
    rb = open_buffer()
    for pair in zip(collector(1, total=FRAMES * 40), collector(2, total=FRAMES * 40), strict=True):
        for batch in pair:
            rb.extend(batch)


def step_by_step(open_buffer: Callable[[], ReplayBuffer]) -> None:
    rb = open_buffer()
    for seed in range(20):
        for batch in collector(seed, total=FRAMES * 2):
            for step in batch:
                rb.add(step)


def collectors_that_write(open_buffer: Callable[[], ReplayBuffer]) -> None:
    rb = open_buffer()
    for seed in range(12):
        for _ in collector(seed, rb, total=FRAMES):
            pass
        again = collector(seed, rb, total=FRAMES * 4)
        for k, _ in enumerate(again):
            if k % 2:
                again.reset()


def runs(open_buffer: Callable[[], ReplayBuffer]) -> None:
    for seed in range(20):
        rb = open_buffer()
        for batch in collector(seed, total=FRAMES * 2):
            rb.extend(batch)
        rb.storage.close()


def kills(open_buffer: Callable[[], ReplayBuffer]) -> None:
    for seed in range(10):

        def run(seed: int = seed) -> None:
            rb = open_buffer()
            for k, batch in enumerate(collector(seed)):
                rb.extend(batch)
                if k == 3:
                    os.kill(os.getpid(), 9)

        pid = os.fork()
        if pid == 0:
            try:
                run()
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 9


def threads(open_buffer: Callable[[], ReplayBuffer]) -> None:
    rb = open_buffer()

    def run(seed: int) -> None:
        for batch in collector(seed, total=FRAMES * 20):
            rb.extend(batch)

    started = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


def forks(open_buffer: Callable[[], ReplayBuffer]) -> None:
    rb = open_buffer()
    for seed in range(8):
        for batch in collector(seed, total=FRAMES * 2):
            rb.extend(batch)
        rb.storage.release()

        def run(seed: int = seed) -> None:
            for batch in collector(100 + seed, total=FRAMES * 2):
                rb.extend(batch)

        Child(run).result()


MEMORY: dict[str, Callable[[Path], Callable[[], ReplayBuffer]]] = {
    "memory": lambda path: made(lambda: LazyTensorStorage(CAPACITY)),
    "list": lambda path: made(lambda: ListStorage(CAPACITY)),
    "shared memory": lambda path: made(lambda: LazyTensorStorage(CAPACITY, shared=True)),
    "file": lambda path: made(lambda: LazyMemmapStorage(CAPACITY, scratch_dir=path, existsok=True)),
}


def made(storage: Callable[[], Any]) -> Callable[[], ReplayBuffer]:
    return lambda: ReplayBuffer(storage=storage(), sampler=SliceSampler(slice_len=LENGTH, strict_length=False))


ANYWHERE = [two_collectors, two_collectors_in_turns, step_by_step, collectors_that_write, threads]
WAYS = [(way, kind) for way in ANYWHERE for kind in MEMORY] + [(runs, "file"), (kills, "file")]
#: Each way in one kind of memory.
QUICK = [(way, kind) for k, way in enumerate(ANYWHERE) for kind in [[*MEMORY][k % len(MEMORY)]]] + [(runs, "file")]


@pytest.mark.parametrize(
    ("way", "kind"),
    [each if each in QUICK else pytest.param(*each, marks=pytest.mark.deep) for each in WAYS],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_no_slice_joins_what_does_not_follow(way: Any, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rb = kept(way, MEMORY[kind](tmp_path / "store"))
    check(rb)


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["shared memory", "file"])
def test_no_slice_joins_the_rows_of_a_process_and_of_its_child(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    check(kept(forks, MEMORY[kind](tmp_path / "store")))


def test_no_slice_of_several_environments_joins_what_does_not_follow() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY, ndim=2), sampler=SliceSampler(slice_len=LENGTH))
    for seed in range(10):
        env = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
        for batch in collector(seed, env=env):
            rb.extend(batch)
    check(rb)


def kept(way: Any, open_buffer: Callable[[], ReplayBuffer]) -> ReplayBuffer:
    """The buffer that a way of making rows has filled: the last one that it opened, or the store opened again."""
    opened: list[ReplayBuffer] = []

    def once() -> ReplayBuffer:
        opened.append(open_buffer())
        return opened[-1]

    way(once)
    return opened[-1] if opened and opened[-1].storage.initialized else open_buffer()


def check(rb: ReplayBuffer) -> None:
    assert len(rb) > 200
    for _ in range(20):
        batch, info = rb.sample(100 * LENGTH if rb._sampler.slice_len is None else 600, return_info=True)
        ended = info[("next", "truncated")].reshape(-1) if ("next", "truncated") in info else None
        following, observed = batch["next", "observation"], batch["observation"]
        done = batch["next", "done"].reshape(-1) if ended is None else ended | batch["next", "done"].reshape(-1)
        wrong = (following[:-1] != observed[1:]).any(-1) & ~done[:-1]
        assert not wrong.any(), f"{int(wrong.sum())} of {len(wrong)} steps are followed by others"
