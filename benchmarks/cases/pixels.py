"""Sampling frames: 14 MB a batch, from a buffer that no cache holds; by one thread, by two, in two, and ahead.

And stacks of four frames that are stored one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks import floors
from benchmarks.cases import Row, calling
from benchmarks.data import PIXEL_LEAVES, pixels
from benchmarks.libraries import Call, Cpprb, StableBaselines3, Tianshou, buffer, replay_buffers, steps_of
from benchmarks.timing import Turn, at_once, repeat

BATCH, THREADS = 256, 2
STACK, PAIRS, EPISODE = 4, 32, 200
CLONE = "floor, a clone"
"""Of as many bytes, by torch, with one thread."""


def groups(*, quick: bool) -> Iterator[list[Row]]:
    """`sample(256)` of 2 x 4x84x84 uint8."""
    capacity = 1000 if quick else 4000
    data = pixels(capacity)
    fixed = steps_of(data)

    def sampling(library: str, **settings: Any) -> Call:
        rb = buffer(library, data, batch=BATCH, **settings)
        return lambda: rb.sample(BATCH)

    yield [
        Row(
            "sample_pixels",
            "sample(256) of 2 x 4x84x84 uint8",
            {
                "engram": calling(lambda: sampling("engram")),
                "torchrl": calling(lambda: sampling("torchrl")),
                "cpprb": calling(lambda: Cpprb(data).sample(BATCH)),
                "tianshou": calling(lambda: Tianshou(*fixed).sample(BATCH)),
                "stable-baselines3": calling(lambda: StableBaselines3(*fixed).sample(BATCH)),
                CLONE: calling(_cloning),
            },
            floor=lambda: floors.gather(PIXEL_LEAVES, capacity, BATCH),
            target={CLONE: 1 / 1.05},
            beside=True,
            notes=[f"{capacity:,} rows"],
        ),
        Row(
            "sample_pixels_threads",
            f"the same after torch.set_num_threads({THREADS})",
            {
                "engram": lambda: _with_threads(sampling("engram")),
                "torchrl": lambda: _with_threads(sampling("torchrl")),
                CLONE: calling(_cloning),
            },
            target={CLONE: 1 / 0.6},
        ),
        Row(
            "sample_pixels_at_once",
            f"the same, a batch of each of {THREADS} threads that sample one buffer",
            {
                "engram": lambda: at_once(sampling("engram"), THREADS),
                "torchrl": lambda: at_once(sampling("torchrl"), THREADS),
            },
            target={"own": 1.0},
            own_of="sample_pixels",
            notes=["seconds of all by batches of all: 1x its own is the rate of one thread"],
        ),
        Row(
            "sample_pixels_prefetch",
            "the same, prefetch=3, a learner that does nothing between batches",
            {"engram": calling(lambda: sampling("engram", prefetch=3))},
            target={"own": 1.1},
            own_of="sample_pixels",
        ),
    ]

    game = _Frames(2 * capacity)
    yield [
        Row(
            "sample_stacked_pairs",
            "sample(32) of stacks of four 84x84 frames, before and after the step; frames stored one by one",
            {
                "engram": calling(lambda: _stacking(game)),
                "cpprb": calling(lambda: _stacking_cpprb(game)),
                "NumPy": calling(lambda: _stacking_arrays(game)),
            },
            target={"NumPy": 0.3},
            notes=[f"{2 * capacity:,} steps, episodes of {EPISODE}"],
        )
    ]


class _Frames:
    """Steps of a game, `[n]`: single frames, uint8, before and after each, and where episodes end."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.frames = np.random.default_rng(0).integers(0, 256, (n + 1, 84, 84), np.uint8)
        self.ends = np.arange(n) % EPISODE == EPISODE - 1


def _stacking(game: _Frames) -> Call:
    """Our recipe: `CatFrames` makes a sampler that draws a step with the frames before it, and stacks them."""
    from engram.envs.transforms import CatFrames

    data = replay_buffers("engram")
    frames, ends = torch.from_numpy(game.frames).unsqueeze(1), torch.from_numpy(game.ends).unsqueeze(1)
    following = {"pixels": frames[1:], "reward": torch.zeros(game.n, 1), "terminated": ends, "done": ends}
    steps = TensorDict({"pixels": frames[:-1], "action": torch.zeros(game.n).long(), "next": following}, [game.n])
    cat = CatFrames(STACK, dim=-3, in_keys=["pixels"], out_keys=["stack"])
    transform, sampler = cat.make_rb_transform_and_sampler(PAIRS, weight="steps")
    rb = data.TensorDictReplayBuffer(
        storage=data.LazyTensorStorage(game.n), sampler=sampler, transform=transform, batch_size=PAIRS
    )
    rb.extend(steps)
    return lambda: rb.sample()


def _stacking_cpprb(game: _Frames) -> Call:
    """cpprb keeps one frame a step, of stacks whose last dimension is the frames."""
    import cpprb

    env = {"obs": {"shape": (84, 84, STACK), "dtype": np.uint8}, "act": {"dtype": np.int64}, "rew": {}, "done": {}}
    rb = cpprb.ReplayBuffer(game.n, env, next_of="obs", stack_compress="obs")
    for t, stack, following in _stacks(game):
        rb.add(obs=stack, act=0, rew=0.0, next_obs=following, done=game.ends[t])
        if game.ends[t]:
            rb.on_episode_end()
    return lambda: rb.sample(PAIRS)


def _stacks(game: _Frames) -> Iterator[tuple[int, Any, Any]]:
    """Each step with its two stacks, as an environment would give them, `[84, 84, STACK]`."""
    for t in range(game.n):
        start = t // EPISODE * EPISODE
        pair = (np.maximum(np.arange(last - STACK + 1, last + 1), start) for last in (t, t + 1))
        stack, following = (np.ascontiguousarray(game.frames[places].transpose(1, 2, 0)) for places in pair)
        yield t, stack, following


def _stacking_arrays(game: _Frames) -> Call:
    """Dopamine's scheme: one array of frames, and both stacks by their places in it."""
    numbers, back = np.random.default_rng(0), np.arange(1 - STACK, 1)
    actions, rewards = np.zeros(game.n, np.int64), np.zeros(game.n, np.float32)
    starts = np.arange(game.n) // EPISODE * EPISODE

    def sample() -> Any:
        steps = numbers.integers(0, game.n, PAIRS)
        before = np.maximum(steps[:, None] + back, starts[steps][:, None])
        after = np.maximum(steps[:, None] + 1 + back, starts[steps][:, None])
        return game.frames[before], game.frames[after], actions[steps], rewards[steps], game.ends[steps]

    return sample


def _cloning() -> Call:
    """A copy of the bytes of a batch into new memory."""
    frames: list[Any] = list(pixels(BATCH).flatten_keys(".").values())
    return lambda: [leaf.clone() for leaf in frames]


def _with_threads(call: Call) -> Turn:
    """A turn in which torch may use several threads."""
    once = repeat(call)

    def turn(n: int) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(THREADS)
        try:
            return once(n)
        finally:
            torch.set_num_threads(before)

    return turn
