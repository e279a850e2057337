"""`CompactContract`: a storage that keeps each observation once gives what a plain one gives."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from engram.data import (
    Compact,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    Storage,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.testing.helpers import assert_equal

#: How an environment goes on after the end of an episode. "same step": the row of the last step has the last
#: observation under "next", and the next row begins with the first one. "next step": one more row leads from the last
#: observation to the first one. "lost": rows are missing. "replaced": the first observation stands under "next", too.
AUTORESETS = ("same step", "next step", "lost", "replaced")


class StackedEpisodes:
    """Steps of one environment: stacks of frames whose bytes often coincide, in episodes with ends of all kinds.

    Args:
        draw: decides what happens.
        frames: of a stack, oldest first.
        n_steps: how many steps lie between an observation and its next one.
        flat: whether what came of a step lies beside the rest, observations as `"next_..."`, and not under `"next"`.
    """

    def __init__(self, draw: random.Random, frames: int, n_steps: int = 1, *, flat: bool = False) -> None:
        self._draw, self._frames, self._n_steps, self._flat = draw, frames, n_steps, flat
        self._steps = self._endless(draw.choice(AUTORESETS))

    def step(self) -> TensorDict:
        """The next step."""
        return next(self._steps)

    def _endless(self, autoreset: str) -> Iterator[TensorDict]:
        first = self._first(), self._vector()
        for episode in itertools.count():
            length = self._draw.randint(1, 12)
            seen = [first]
            while len(seen) < length + self._n_steps:
                seen.append(self._moved(seen[-1]))
            first = self._first(), self._vector()  # of the next episode
            for t in range(length):
                ends = t == length - 1
                if autoreset == "lost" and self._draw.random() < 0.2:
                    continue
                replaced = ends and autoreset == "replaced"
                yield self._step(seen[t], first if replaced else seen[t + self._n_steps], episode, ends)
            if autoreset == "next step":
                yield self._step(seen[length], first, episode, False)

    def _step(self, now: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], episode: int, ends: bool) -> TensorDict:
        terminated = ends and self._draw.random() < 0.5
        flags = {"done": ends, "terminated": terminated, "truncated": ends and not terminated}
        step = {"pixels": now[0], "vector": now[1], "action": torch.tensor(self._draw.random())}
        outcome = {
            "reward": torch.tensor([self._draw.random()]),
            **{name: torch.tensor([flag]) for name, flag in flags.items()},
        }
        rows: dict[str, Any] = {**step, "episode": torch.tensor(episode)}
        if self._flat:
            return TensorDict({**rows, "next_pixels": after[0], "next_vector": after[1], **outcome}, [])
        return TensorDict({**rows, "next": {"pixels": after[0], "vector": after[1], **outcome}}, [])

    def _first(self) -> Tensor:
        newest = self._frame()
        older = self._draw.choice([newest, torch.zeros(6, dtype=torch.uint8), self._frame()])
        return torch.stack([older] * (self._frames - 1) + [newest])

    def _frame(self) -> Tensor:
        return torch.full((6,), self._draw.randrange(3 if self._draw.random() < 0.5 else 256), dtype=torch.uint8)

    def _vector(self) -> Tensor:
        return torch.tensor([float(self._draw.randrange(3))] * 5)

    def _moved(self, before: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.cat([before[0][1:], self._frame()[None]]), self._vector()


class TwoBuffers:
    """A buffer with a plain storage and one with a compact one, which are used in the same way and always compared."""

    def __init__(self, contract: CompactContract, draw: random.Random, folder: Path) -> None:
        self._contract, self.draw, self._folder = contract, draw, folder
        self.frames, n_steps = draw.randint(1, 5), draw.choice([1, 1, 1, 3])
        self.ndim = draw.choice([1, 1, 2])
        self._envs = 1 if self.ndim == 1 else draw.randint(1, 3)
        self._flat = draw.random() < 0.4
        self._episodes = [StackedEpisodes(draw, self.frames, n_steps, flat=self._flat) for _ in range(self._envs)]
        self._capacity = draw.randint(2, 40) * self._envs
        self._compact = draw.choice(
            [True, ["pixels"], Compact(["pixels", "vector"], {"pixels": self.frames}, n_steps), Compact(frames=1)]
        )
        self._sampler = draw.choice(self._samplers())
        self._saves = 0
        self.plain, self.compact = self._buffer(False), self._buffer(self._compact)
        self.steps = 0

    def _samplers(self) -> list[Any]:
        slices: dict[str, Any] = {"slice_len": 2, "strict_length": False, "traj_key": "episode"}
        ends = {**slices, "traj_key": None, "end_key": "done" if self._flat else ("next", "done")}
        one: list[Any] = [lambda: PrioritizedSampler(self._capacity, 0.7, 0.5)]
        if self.ndim == 1:
            one += [
                lambda: SliceSampler(**slices),
                lambda: SliceSampler(**ends),
                lambda: SliceSamplerWithoutReplacement(**slices),
                lambda: PrioritizedSliceSampler(self._capacity, 0.7, 0.5, **slices),
            ]
        return [RandomSampler, SamplerWithoutReplacement, *one]

    def _buffer(self, compact: Any) -> TensorDictReplayBuffer:
        self._saves += 1
        storage = self._contract.make(self._capacity, compact, self.ndim, self._folder / f"store{self._saves}")
        return TensorDictReplayBuffer(storage=storage, sampler=self._sampler(), batch_size=4, priority_key="td_error")

    @property
    def both(self) -> tuple[TensorDictReplayBuffer, TensorDictReplayBuffer]:
        return self.plain, self.compact

    def __len__(self) -> int:
        return len(self.plain)

    # ---- what a program does ----
    def extend(self) -> None:
        n = self.draw.randint(1, 2 + self._capacity // self._envs // self.draw.choice([1, 4, 10]))
        envs = [torch.stack([one.step() for _ in range(n)]) for one in self._episodes]
        batch = envs[0] if self.ndim == 1 else torch.stack(envs)
        assert_equal(self.compact.extend(batch), self.plain.extend(batch))

    def add(self) -> None:
        steps = [one.step() for one in self._episodes]
        step = steps[0] if self.ndim == 1 else torch.stack(steps)
        assert_equal(self.compact.add(step), self.plain.add(step))

    def sample(self) -> None:
        if not len(self):
            return
        drawn = []
        for rb in self.both:
            torch.manual_seed(self.steps)
            drawn.append(rb.sample())
        assert_equal(drawn[1], drawn[0])
        if isinstance(self.plain.sampler, PrioritizedSampler):
            for rb, batch in zip(self.both, drawn, strict=True):
                batch["td_error"] = batch["action"]
                rb.update_tensordict_priority(batch)

    def read(self) -> None:
        n = len(self.plain.storage) // self._envs
        if not n:
            return
        some = torch.tensor([self.draw.randrange(n) for _ in range(self.draw.randint(0, 6))], dtype=torch.int64)
        for index in (slice(None), slice(self.draw.randrange(n), None), some, -1, self.draw.randrange(n)):
            assert_equal(self.compact.storage.get(index), self.plain.storage.get(index))

    def edit(self) -> None:
        """Changes stored rows in all that is no observation."""
        n = len(self.plain.storage) // self._envs
        if not n:
            return
        at = torch.tensor(sorted(self.draw.sample(range(n), self.draw.randint(1, n))))
        rows = self.plain.storage.get(at)
        rows["action"] = rows["action"] + 1
        reward = "reward" if self._flat else ("next", "reward")
        rows[reward] = rows[reward] * 2
        for rb in self.both:
            rb.storage.set(at, rows.clone())
        rows["pixels"] = rows["pixels"] + 1
        if self._contract.is_compact(self.compact.storage):
            with pytest.raises(ValueError, match="stored once"):
                self.compact.storage.set(at, rows)

    def empty(self) -> None:
        reset = self.draw.random() < 0.5
        for rb in self.both:
            rb.empty(empty_write_count=reset)

    def save(self) -> None:
        """Saves both, and goes on with one that loaded what the other one saved."""
        way = self.draw.choice(["dumps", "state_dict", "copy"])
        if way == "copy":
            self.plain, self.compact = copy.deepcopy(self.plain), copy.deepcopy(self.compact)
            return
        twins = self._buffer(False), self._buffer(self._compact)
        for twin, rb in zip(twins, (self.compact, self.plain), strict=True):
            if self.draw.random() < 0.5:
                twin.extend(rb.storage.get(slice(None)).exclude("index")) if len(rb) and self.ndim == 1 else None
            if way == "state_dict":
                twin.load_state_dict(rb.state_dict())
                continue
            self._saves += 1
            path = self._folder / f"saved{self._saves}"
            rb.dumps(path)
            twin.loads(path)
        self.plain, self.compact = twins

    def save_beside_writers(self) -> None:
        """Saves both while they go on."""
        if not len(self):
            return
        expected = self.plain.storage.get(slice(None))
        handles: list[Any] = []
        paths: list[Path] = []
        for rb in self.both:
            self._saves += 1
            paths.append(self._folder / f"saved{self._saves}")
            handles.append(rb.dumps(paths[-1], blocking=False))
        for _ in range(3):
            self.extend()
        self.edit()
        for handle, path in zip(handles, paths, strict=True):
            handle.result()
            for compact in (False, self._compact):
                twin = self._buffer(compact)
                twin.loads(path)
                assert_equal(twin.storage.get(slice(None)), expected)

    def compare(self) -> None:
        facts = [(len(rb), rb.write_count, rb.writer._cursor, rb.storage.write_count) for rb in self.both]
        assert facts[0] == facts[1]
        if len(self):
            assert_equal(self.compact.storage.get(slice(None)), self.plain.storage.get(slice(None)))
            lanes = [rb.storage.lanes for rb in self.both]
            assert lanes[0] is not None and lanes[1] is not None
            assert _without_times(lanes[1].states()) == _without_times(lanes[0].states())


def _without_times(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The counters of lanes without when each was written."""
    return [{name: value for name, value in lane.items() if name != "written_at"} for lane in states]


class CompactContract:
    """Tests of a storage with `compact=`. Inherit, and implement `make`.

    Example:
        >>> class TestCompactInMemory(CompactContract):
        ...     def make(self, capacity, compact, ndim, path):
        ...         return LazyTensorStorage(capacity, ndim=ndim, compact=compact)
    """

    #: How many random programs are run, and how many things each does.
    programs = 40
    length = 30
    #: Bytes that an observation may take, as a multiple of one frame's, in a storage of a thousand steps.
    frame_bytes = 1.3

    def make(self, capacity: int, compact: Any, ndim: int, path: Any) -> Storage:
        """An empty storage with room for `capacity` steps; `compact=False`: a plain one. `path`: for files."""
        raise NotImplementedError

    def is_compact(self, storage: Any) -> bool:
        """Whether the rows of a storage are without the observations."""
        return bool(storage.compact)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "program" in metafunc.fixturenames:
            metafunc.parametrize("program", range(self.programs))

    def test_a_random_program_gives_the_same_as_with_a_plain_storage(self, program: int, tmp_path: Path) -> None:
        two = TwoBuffers(self, random.Random(program), tmp_path)
        usual = [two.extend, two.extend, two.add, two.sample, two.sample, two.read, two.edit]
        for _ in range(self.length):
            two.steps += 1
            two.draw.choice([*usual, *usual, two.empty, two.save, two.save_beside_writers])()
            two.compare()

    def test_an_observation_takes_the_bytes_of_a_frame(self, tmp_path: Path) -> None:
        frames = torch.randint(0, 256, (1004, 84, 84), dtype=torch.uint8)
        pixels = frames.unfold(0, 4, 1).movedim(-1, 1)
        storage = self.make(1000, True, 1, tmp_path / "store")
        rb = ReplayBuffer(storage=storage)
        rb.extend(TensorDict({"pixels": pixels[:1000], "next": {"pixels": pixels[1:]}}, [1000]))
        assert storage.nbytes / 1000 < self.frame_bytes * 84 * 84
        assert torch.equal(storage.get(range(1000))["next", "pixels"], pixels[1:])

    def test_a_writer_that_replaces_rows_out_of_turn_is_refused(self, tmp_path: Path) -> None:
        storage = self.make(10, True, 1, tmp_path / "store")
        with pytest.raises(TypeError, match="compact="):
            TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(rank_key="reward"))

    def test_entries_that_are_no_observations_are_refused(self, tmp_path: Path) -> None:
        for key in ("reward", "done", ("next", "pixels"), "episode"):
            with pytest.raises(ValueError, match="compact="):
                self.make(10, [key], 1, tmp_path / "store")

    def test_steps_without_the_observation_are_refused_and_nothing_is_made(self, tmp_path: Path) -> None:
        storage = self.make(10, ["pixels"], 1, tmp_path / "store")
        step = TensorDict({"pixels": torch.zeros(3, 4, 6), "next": {"pixels": torch.zeros(3, 4, 7)}}, [3])
        for steps, words in ((step, "one shape"), (step.exclude("next"), "'next'")):
            with pytest.raises(ValueError, match=words):
                ReplayBuffer(storage=storage).extend(steps)
        assert len(storage) == 0 and storage.nbytes == 0

    def test_arrays_and_lists_of_steps_are_taken_as_well(self, tmp_path: Path) -> None:
        frames = np.arange(23 * 6, dtype=np.float32).reshape(23, 6)
        pixels = np.stack([frames[i : i + 4] for i in range(20)])
        storage = self.make(40, Compact("pixels", 4), 1, tmp_path / "store")
        rb = ReplayBuffer(storage=storage)
        rb.extend({"pixels": pixels[:10], "next": {"pixels": pixels[1:11]}})
        rb.extend([{"pixels": pixels[i], "next": {"pixels": pixels[i + 1]}} for i in range(10, 19)])
        assert np.array_equal(storage.get(range(19))["next"]["pixels"], pixels[1:])
