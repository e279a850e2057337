"""Our buffers under the trainers of stable-baselines3 and CleanRL, beside the buffers that they stand in for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks import floors
from benchmarks.cases import Row, calling
from benchmarks.data import FRAMES
from benchmarks.libraries import OURS, Call

CAPACITY, BATCH, PIXEL_BATCH = 100_000, 256, 32
THEIRS = "stable-baselines3"
ADD, SAMPLE = {THEIRS: 1}, {THEIRS: 3}
"""How many times faster ours is to be."""


class Setting(NamedTuple):
    """What a buffer of stable-baselines3 is made for."""

    title: str
    envs: int = 1
    dict_observations: bool = False
    n_steps: int = 1


SETTINGS = {
    "1_env": Setting("1 environment"),
    "8_envs": Setting("8 environments", envs=8),
    "dict": Setting("dict observations", dict_observations=True),
    "n_step": Setting("n-step rewards", n_steps=3),
}


def groups(*, quick: bool) -> Iterator[list[Row]]:
    """`add` and `sample` of each adapter."""
    capacity = CAPACITY // 10 if quick else CAPACITY
    yield [row for key, setting in SETTINGS.items() for row in _of_stable_baselines3(key, setting, capacity)]
    yield _of_cleanrl(capacity)
    yield _of_rainbow(1_000 if quick else 10_000)


def _rows(key: str, title: str, makes: dict[str, Callable[[], Any]], step: tuple[Any, ...], note: str) -> list[Row]:
    """A row for `add` of a step, and one for `sample`, from the buffers that are made full."""
    buffers = {name: functools.cache(make) for name, make in makes.items()}

    def adding(name: str) -> Call:
        rb = buffers[name]()
        return lambda: rb.add(*step)

    def sampling(name: str) -> Call:
        rb = buffers[name]()
        return lambda: rb.sample(BATCH)

    verbs = {"add": ("add", adding, ADD), f"sample_{BATCH}": (f"sample({BATCH})", sampling, SAMPLE)}
    return [
        Row(
            f"{key}_{verb}",
            f"{title}: {words}",
            {name: calling(lambda name=name, make=make: make(name)) for name in buffers},
            target=target,
            notes=[note],
        )
        for verb, (words, make, target) in verbs.items()
    ]


def _full(rb: Any, step: tuple[Any, ...]) -> Any:
    for _ in range(rb.buffer_size):
        rb.add(*step)
    return rb


def _of_stable_baselines3(key: str, setting: Setting, capacity: int) -> list[Row]:
    def ours() -> Any:
        from engram.compat.sb3 import ReplayBuffer

        return made(ReplayBuffer, n_steps=setting.n_steps)

    def theirs() -> Any:
        from stable_baselines3.common import buffers

        if setting.n_steps > 1:
            return made(buffers.NStepReplayBuffer, n_steps=setting.n_steps)
        return made(buffers.DictReplayBuffer if setting.dict_observations else buffers.ReplayBuffer)

    def made(kind: Any, **settings: Any) -> Any:
        observations, actions = _spaces(setting.dict_observations)
        return _full(kind(capacity, observations, actions, "cpu", n_envs=setting.envs, **settings), step)

    step = _step(setting.envs, setting.dict_observations)
    title = f"stable-baselines3, {setting.title}"
    return _rows(f"sb3_{key}", title, {OURS: ours, THEIRS: theirs}, step, "as DQN makes it, truncations looked at")


def _of_cleanrl(capacity: int) -> list[Row]:
    def made(kind: Any) -> Any:
        return _full(kind(capacity, *_spaces(False), "cpu", handle_timeout_termination=False), step)

    def ours() -> Any:
        from engram.compat.cleanrl import ReplayBuffer

        return made(ReplayBuffer)

    def theirs() -> Any:
        from stable_baselines3.common.buffers import ReplayBuffer

        return made(ReplayBuffer)

    step = (*_step(1, False)[:-1], {})
    note = "beside stable-baselines3's, of which CleanRL's buffer is a copy (it is in no package), as in dqn.py"
    return _rows("cleanrl", "CleanRL", {OURS: ours, THEIRS: theirs}, step, note)


def _of_rainbow(capacity: int) -> list[Row]:
    """The prioritised buffer for Rainbow; the script's own is in no package."""
    pixels = int(np.prod(FRAMES))
    leaves = {"observation": pixels, "action": 8, "next.observation": pixels, "reward": 4, "terminated": 1}

    @functools.cache
    def full() -> Any:
        from engram.compat.cleanrl import PrioritizedReplayBuffer

        rb = PrioritizedReplayBuffer(capacity, FRAMES, "cpu", n_step=3, gamma=0.99, alpha=0.5)
        while rb.size < capacity:
            rb.add(*step)
        return rb

    def adding() -> Call:
        rb = full()
        return lambda: rb.add(*step)

    def sampling() -> Call:
        rb = full()
        return lambda: rb.sample(PIXEL_BATCH)

    def updating() -> Call:
        rb = full()
        indices, priorities = rb.sample(PIXEL_BATCH).indices, np.ones(PIXEL_BATCH, np.float32)
        return lambda: rb.update_priorities(indices, priorities)

    frame = np.ones((1, *FRAMES), np.uint8)
    step = frame, np.array([1]), np.array([1.0]), frame, np.array([False])
    title = f"CleanRL, Rainbow, {'x'.join(map(str, FRAMES))} uint8"
    return [
        Row("rainbow_add", f"{title}: add", {OURS: calling(adding)}, lambda: floors.scatter(leaves, capacity, 1)),
        Row(
            "rainbow_sample",
            f"{title}: sample({PIXEL_BATCH})",
            {OURS: calling(sampling)},
            lambda: floors.Priorities(leaves, capacity, PIXEL_BATCH).draw,
        ),
        Row("rainbow_update", f"{title}: update_priorities of {PIXEL_BATCH}", {OURS: calling(updating)}),
    ]


def _spaces(dict_observations: bool) -> tuple[Any, Any]:
    from gymnasium import spaces

    box = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    return (spaces.Dict(position=box, goal=box) if dict_observations else box), spaces.Discrete(2)


def _step(envs: int, dict_observations: bool) -> tuple[Any, ...]:
    """Arguments of `add`, as a vector environment gives them."""
    obs = np.random.default_rng(0).random((envs, 4)).astype(np.float32)
    given: Any = {"position": obs, "goal": obs} if dict_observations else obs
    return given, given, np.ones(envs, np.int64), np.ones(envs), np.zeros(envs, np.bool_), [{} for _ in range(envs)]
