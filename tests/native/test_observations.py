"""Observations that are stored once are read byte for byte as they were appended, whatever the environment did."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import engram._native as _native
from contracts.each import each
from contracts.tiers import in_quick
from engram._native import testing

Array = np.ndarray[Any, Any]
Stacks = tuple[Array, Array]  # X and next.X


class StoredWhole:
    """Both stacks of each row, as they were appended."""

    def __init__(self, frame_bytes: list[int], frames: int) -> None:
        self.rows: dict[tuple[int, int], list[list[Stacks]]] = {}
        self.widths = [frames * n for n in frame_bytes]

    def extend(self, lane: int, keys: list[Stacks]) -> None:
        for env in range(keys[0][0].shape[1]):
            for step in range(len(keys[0][0])):
                row = [(x[step, env].copy(), after[step, env].copy()) for x, after in keys]
                self.rows.setdefault((lane, env), []).append(row)


class Episodes:
    """Steps of one environment whose bytes often coincide, with ends and resets of all kinds."""

    def __init__(self, draw: random.Random, frames: int, frame_bytes: list[int], ahead: int) -> None:
        self.draw, self.frames, self.sizes, self.ahead = draw, frames, frame_bytes, ahead
        self._stacks: list[list[Array]] = []

    def _frame(self, size: int) -> Array:
        if self.draw.random() < 0.2:
            return np.zeros(size, np.uint8)
        return np.full(size, self.draw.randrange(3) if self.draw.random() < 0.5 else self.draw.randrange(256), np.uint8)

    def _first(self) -> list[Array]:
        kind = self.draw.randrange(3)
        stacks = []
        for size in self.sizes:
            newest = self._frame(size)
            older = [(newest, np.zeros(size, np.uint8), self._frame(size))[kind] for _ in range(self.frames - 1)]
            stacks.append(np.concatenate([*older, newest]))
        return stacks

    def _moved(self, stacks: list[Array]) -> list[Array]:
        return [np.concatenate([s[size:], self._frame(size)]) for s, size in zip(stacks, self.sizes, strict=True)]

    def steps(self, n: int) -> list[Stacks]:
        """n steps: [n, frames * bytes] of each key, before and after."""
        rows: list[list[Stacks]] = []
        while len(rows) < n:
            if not self._stacks or self.draw.random() < 0.2:
                self._stacks = [self._first()]
            while len(self._stacks) <= self.ahead:
                self._stacks.append(self._moved(self._stacks[-1]))
            after = self._stacks[self.ahead]
            if self.draw.random() < 0.1:
                after = self._first() if self.draw.random() < 0.5 else self._moved(self._stacks[0])
            rows.append([(x, y) for x, y in zip(self._stacks[0], after, strict=True)])
            self._stacks.pop(0)
        keys = range(len(self.sizes))
        return [(np.stack([row[k][0] for row in rows]), np.stack([row[k][1] for row in rows])) for k in keys]


@pytest.mark.parametrize("seed", in_quick(range(120), range(24)))
def test_random_programs_read_what_was_appended(seed: int) -> None:
    draw = random.Random(seed)
    frames, ahead, lanes, envs = draw.randint(1, 5), draw.choice([1, 1, 3]), draw.choice([1, 1, 3]), draw.choice([1, 2])
    capacity = draw.randint(1, 39)
    sizes = [draw.randint(1, 40) for _ in range(draw.choice([1, 1, 2]))]
    piece = draw.randint(1, max(1, capacity // 2))
    stored = testing.Observations(lanes, envs, capacity, ahead, piece, [(frames, n) for n in sizes])
    whole = StoredWhole(sizes, frames)
    sources = {(lane, env): Episodes(draw, frames, sizes, ahead) for lane in range(lanes) for env in range(envs)}
    for _ in range(20):
        lane, n = draw.randrange(lanes), draw.randint(1, 12)
        of_envs = [sources[lane, env].steps(n) for env in range(envs)]
        keys = [
            (np.stack([one[k][0] for one in of_envs], 1), np.stack([one[k][1] for one in of_envs], 1))
            for k in range(len(sizes))
        ]
        stored.extend(lane, keys)
        whole.extend(lane, keys)
        _assert_equal(stored, whole, lanes, envs, capacity, draw)


def _assert_equal(stored: Any, whole: StoredWhole, lanes: int, envs: int, capacity: int, draw: random.Random) -> None:
    wanted = []
    for lane in range(lanes):
        published = stored.published(lane)
        wanted += [(lane, env, w) for env in range(envs) for w in range(max(0, published - capacity), published)]
    draw.shuffle(wanted)
    out = [tuple(np.full((len(wanted), width), 7, np.uint8) for _ in range(2)) for width in whole.widths]
    assert stored.read(wanted, out) == 0
    for i, (lane, env, w) in enumerate(wanted):
        for k, (x, after) in enumerate(whole.rows[lane, env][w]):
            np.testing.assert_array_equal(out[k][0][i], x, err_msg=f"X of key {k}, row {lane, env, w}")
            np.testing.assert_array_equal(out[k][1][i], after, err_msg=f"next.X of key {k}, row {lane, env, w}")


_WITHOUT_MEMORY = """
import resource
import numpy as np
from engram._native import testing

frames, size, rows = 4, 20_000, 32
stored = testing.Observations(1, 1, rows, 1, 1, [(frames, size)])  # each step is a piece
batches = np.random.default_rng(0).integers(0, 255, (12, 2, 4, 1, frames * size), np.uint8)  # that never agree
out = [np.empty((rows, frames * size), np.uint8) for _ in range(2)]
stored.extend(0, [(batches[0, 0], batches[0, 1])])
limits = resource.getrlimit(resource.RLIMIT_DATA)
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + (1 << 20), limits[1]))
written, refused = 1, 0
for batch in batches[1:]:
    try:
        stored.extend(0, [(batch[0], batch[1])])
        written += 1
    except MemoryError:
        refused += 1
resource.setrlimit(resource.RLIMIT_DATA, limits)
assert refused > 0 and stored.published(0) == 4 * written, (refused, written)
assert stored.read([(0, 0, w) for w in range(4 * written)], [tuple(out)]) == 0
for stacks, whole in zip(out, (batches[:written, 0], batches[:written, 1])):
    assert np.array_equal(stacks[: 4 * written], whole.reshape(-1, frames * size))
stored.extend(0, [(batches[11, 0], batches[11, 1])])
assert stored.read([(0, 0, 4 * written + w) for w in range(4)], [tuple(out)]) == 0
assert np.array_equal(out[1][:4], batches[11, 1].reshape(-1, frames * size))
print("went on")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory as Linux has them")
def test_steps_for_which_there_is_no_memory_are_refused_and_nothing_changes() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT_MEMORY], capture_output=True, text=True, check=False)
    assert done.stdout == "went on\n", done.stderr


def test_frames_of_long_episodes_are_stored_once() -> None:
    frames, size, steps = 4, 7056, 2000
    stored = testing.Observations(1, 1, steps, 1, 1, [(frames, size)])
    shown = np.random.default_rng(0).integers(0, 255, (steps + frames, size), np.uint8)
    stacks = np.stack([shown[w : w + frames].reshape(1, -1) for w in range(steps + 1)])
    stored.extend(0, [(stacks[:-1], stacks[1:])])
    assert stored.bytes / steps < 1.02 * size


@each("in_a_folder", [False, True])
@each("lanes", [1, 10, 125])
def test_lanes_of_a_million_rows_have_little_besides(lanes: int, in_a_folder: bool) -> None:
    """Pixels of Atari in episodes of 20 steps: a frame more for each episode, and whole segments of such frames."""
    steps, size, row = 1_000_000 // lanes, 84 * 84, 24 if in_a_folder else 8
    keys = [(4, size)]
    _, _, units, sure = _native.Store.observation_sizes(
        lanes, steps, 1, row - 16 * in_a_folder, 8, in_a_folder, 1, keys
    )
    segment = -(-(units * (8 + size + 24 * in_a_folder) + 1) // 4096) * 4096
    taken = -(-(steps // 20 + 2) // units) * segment
    assert row + sure / 1e6 + taken / steps <= 7500


def test_rows_of_other_shapes_are_refused() -> None:
    stored = testing.Observations(1, 2, 8, 1, 2, [(3, 5)])
    good, bad = np.zeros((4, 2, 15), np.uint8), np.zeros((4, 2, 14), np.uint8)
    for x, after in ((bad, bad), (good, bad), (good, good[:3])):
        with pytest.raises(ValueError, match="steps"):
            stored.extend(0, [(x, after)])
    with pytest.raises(ValueError, match="each key"):
        stored.extend(1, [(good, good)])
    stored.extend(0, [(good, good)])
    with pytest.raises(IndexError):
        stored.read([(0, 0, 4)], [(np.zeros((1, 15), np.uint8), np.zeros((1, 15), np.uint8))])
