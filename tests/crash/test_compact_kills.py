"""Writers of a store that keeps each observation once are killed at random moments: readers see no wrong row.

Each row says who wrote it and which step it is; what its observations were follows from these. A unit that two rows
use, a word of a piece that a kill tore, a tail that is not there any more: each shows as another row.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from contracts.children import fork
from contracts.tiers import in_ci, in_turns
from engram.cli import verify
from engram.data import Compact, LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from engram.store.places import LaneCount

SIZE, SMALL = 700, 16  # bytes of a frame; of one that lies in its row
CAPACITY = 240
WRITERS = 3
MANY = 64  # lanes, and as many writers


class Environment:
    """Steps of one writer: stacks in episodes of a few steps, some of which begin with a stack of their own."""

    def __init__(
        self, frames: int, n_steps: int, size: int = SIZE, after: str | tuple[str, str] = ("next", "x")
    ) -> None:
        self.frames, self.n_steps, self.size, self._after = frames, n_steps, size, after

    def rows(self, writer: int, start: int, stop: int) -> TensorDict:
        steps = np.arange(start, stop)
        who = np.full_like(steps, writer)
        x, after = self.observations(who, steps)
        index = {"who": torch.from_numpy(who), "step": torch.from_numpy(steps)}
        rows = TensorDict({**index, "x": torch.from_numpy(x)}, [len(steps)])
        rows[self._after] = torch.from_numpy(after)
        return rows

    def observations(self, who: NDArray[Any], steps: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """X and next.X of these steps: [n, frames, size] each."""
        episode, t = steps // 7, steps % 7
        ends = t + self.n_steps >= 7
        after = self._stacks(who, episode, t + self.n_steps)
        other = ends & (episode % 3 == 0)  # the first observation of the next episode stands there
        after[other] = self._stacks(who, episode + 1, np.zeros_like(t))[other]
        return self._stacks(who, episode, t), after

    def _stacks(self, who: NDArray[Any], episode: NDArray[Any], t: NDArray[Any]) -> NDArray[np.uint8]:
        stacks = np.empty((len(who), self.frames, self.size), np.uint8)
        for j in range(self.frames):
            at = t - (self.frames - 1 - j)
            before = np.where(episode % 3 == 0, 0, np.where(episode % 3 == 1, -at, 0))
            seed = (who * 1_000_003 + episode * 101 + np.maximum(at, 0) + before * (at < 0) * 17).astype(np.uint64)
            stacks[:, j] = _noise(seed, self.size)
            stacks[(at < 0) & (episode % 3 == 2), j] = 0
        return stacks

    def check(self, batch: TensorDict) -> None:
        x, after = self.observations(batch["who"].numpy(), batch["step"].numpy())
        assert np.array_equal(batch["x"].numpy(), x), "an observation is another one"
        assert np.array_equal(batch[self._after].numpy(), after), "a next observation is another one"


def _noise(seed: NDArray[np.uint64], size: int) -> NDArray[np.uint8]:
    """Bytes that only this seed has: [n, size]."""
    words = (seed[:, None] + np.arange(size // 4, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    return (words >> np.uint64(32)).astype(np.uint32).view(np.uint8).reshape(len(seed), size)


def write_for_ever(rb: TensorDictReplayBuffer, environment: Environment, writer: int) -> Any:
    def work() -> None:
        draw, at = random.Random(writer), 0
        for _ in range(10_000_000):
            n = draw.choice([1, 3, 20, 90])
            rb.extend(environment.rows(writer, at, at + n))
            at += n

    return work


def torture(rb: TensorDictReplayBuffer, environment: Environment, writers: int, kills: int) -> int:
    """Kills and replaces writers, between reads that are checked; how many rows were written."""
    draw = random.Random(kills)
    rb.extend(environment.rows(0, 0, 30))
    rb.storage.lanes.release()
    alive = [fork(write_for_ever(rb, environment, n)) for n in range(1, writers + 1)]
    try:
        for kill in range(kills):
            before = rb.write_count
            looks = 0
            while rb.write_count - before < draw.choice([1, 50, 400]) or looks < 2:
                environment.check(rb.sample().exclude("index"))
                looks += 1
            victim = draw.randrange(writers)
            os.kill(alive[victim], signal.SIGKILL)
            assert os.waitpid(alive[victim], 0)[1] == signal.SIGKILL, "a writer ended by itself"
            alive[victim] = fork(write_for_ever(rb, environment, writers + kill + 1))
    finally:
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    environment.check(rb.storage.get(slice(None)).exclude("index"))
    rb.extend(environment.rows(10_000_000, 0, CAPACITY))
    environment.check(rb.storage.get(slice(None)).exclude("index"))
    return rb.write_count


class WriterOnRequest:
    """A process that appends once for each byte that it is sent: of many of them only a few are at work."""

    def __init__(self, rb: TensorDictReplayBuffer, environment: Environment, writer: int) -> None:
        read, self._requests = os.pipe()

        def work() -> None:
            draw, at = random.Random(writer), 0
            while os.read(read, 1):
                n = draw.choice([1, 3, 20, 90])
                rb.extend(environment.rows(writer, at, at + n))
                at += n

        self.pid = fork(work)
        os.close(read)

    def request(self, appends: int) -> None:
        os.write(self._requests, bytes(appends))

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert os.waitpid(self.pid, 0)[1] == signal.SIGKILL, "a writer ended by itself"
        os.close(self._requests)


def torture_many_lanes(rb: TensorDictReplayBuffer, environment: Environment, kills: int) -> Counter[str]:
    """Kills and replaces writers of 64 lanes, of which 6 at a time append; how many kills, looks, rows and lanes."""
    draw, total = random.Random(kills), Counter[str]()
    rb.extend(environment.rows(0, 0, 30))
    rb.storage.lanes.release()
    alive = [WriterOnRequest(rb, environment, n) for n in range(1, MANY + 1)]
    try:
        for writer in alive:  # each in a lane
            writer.request(1)
        for kill in range(kills):
            before, looks = rb.write_count, 0
            asked = draw.sample(range(MANY), 6)
            for n in asked:
                alive[n].request(4)
            while rb.write_count - before < draw.choice([1, 8, 24]) or looks < 2:
                environment.check(rb.sample().exclude("index"))
                looks += 1
            victim = draw.choice(asked)
            alive[victim].kill()
            alive[victim] = WriterOnRequest(rb, environment, MANY + kill + 1)
            total.update(kills=1, looks=looks)
    finally:
        for writer in alive:
            writer.kill()
    total.update(
        rows=rb.write_count, torn=sum(lane["claimed"] > lane["published"] for lane in rb.storage.lanes.counters())
    )
    total.update(lanes=sum(lane["published"] > 0 for lane in rb.storage.lanes.counters()))
    environment.check(rb.storage.get(slice(None)).exclude("index"))
    rb.extend(environment.rows(10_000_000, 0, len(rb)))
    environment.check(rb.storage.get(slice(None)).exclude("index"))
    return total


MEMORY = [("one writer", 1, 1), ("turns", WRITERS, None), ("lanes", WRITERS, 4)]
FILES = [(None, None), ("store", None), ("store", 4)]
SHAPES = [(1, 1, SIZE), (4, 1, SIZE), (3, 3, SIZE), (1, 1, SMALL), (1, 3, SMALL)]


def of_case(value: Any) -> str:
    """The name of a case's memory or shape."""
    if isinstance(value, tuple):
        return value[0] if isinstance(value[0], str) else f"{value[0]} frames of {value[2]} in {value[1]} steps"
    return {False: "shared memory", True: "a folder"}[value]


@pytest.mark.deep
@pytest.mark.parametrize("kills", [8, pytest.param(350, marks=pytest.mark.long)])
@pytest.mark.parametrize(("memory", "shape"), in_turns(MEMORY, SHAPES), ids=of_case)
def test_rows_are_right_whenever_their_writers_are_killed(memory, shape, kills):
    _, writers, lanes = memory
    frames, n_steps, _ = shape
    compact = Compact("x", frames=frames, n_steps=n_steps)
    storage = LazyTensorStorage(CAPACITY, shared=True, lanes=lanes, compact=compact)
    rb = TensorDictReplayBuffer(storage=storage, batch_size=24)
    assert torture(rb, Environment(*shape), writers, kills) > 10 * kills


@pytest.mark.deep
@pytest.mark.parametrize(
    ("after", "folder", "lanes"),
    in_ci(
        [(after, *place) for after in ("next_x", ("next", "x")) for place in FILES],
        [("next_x", "store", 4), (("next", "x"), None, None), (("next", "x"), "store", None)],
    ),
)
def test_rows_of_a_file_are_right_whenever_their_writers_are_killed(ram_path, folder, lanes, after):
    scratch_dir = None if folder is None else ram_path / folder
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=scratch_dir, lanes=lanes, compact=Compact("x", frames=4))
    rb = TensorDictReplayBuffer(storage=storage, batch_size=24)
    assert torture(rb, Environment(4, 1, after=after), WRITERS, 8) > 80
    if scratch_dir is not None:
        assert verify(scratch_dir).ok


@pytest.mark.deep
@pytest.mark.parametrize("kills", [8, pytest.param(350, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("shape", "is_file"),
    in_ci(product(SHAPES, [False, True]), [(SHAPES[0], False), (SHAPES[1], True), (SHAPES[4], False)]),
    ids=of_case,
)
def test_rows_of_64_lanes_are_right_whenever_their_writers_are_killed(ram_path, is_file, shape, kills):
    frames, n_steps, _ = shape
    settings = {"lanes": LaneCount(MANY), "compact": Compact("x", frames=frames, n_steps=n_steps)}
    size = 20 * MANY
    if is_file:
        storage = LazyMemmapStorage(size, scratch_dir=ram_path / "store", **settings)
    else:
        storage = LazyTensorStorage(size, shared=True, **settings)
    rb = TensorDictReplayBuffer(storage=storage, batch_size=96)
    total = torture_many_lanes(rb, Environment(*shape), kills)
    print(dict(total))
    assert total["kills"] == kills and total["lanes"] == MANY
    if is_file:
        assert verify(ram_path / "store").ok
