"""Faults of others that store frames once, named as they were reported: rows of a compact storage are right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict

from engram.collectors import SyncDataCollector
from engram.compat.cleanrl import PrioritizedReplayBuffer
from engram.data import LazyTensorStorage, TensorDictReplayBuffer
from engram.envs import GymEnv
from engram.envs.transforms import MultiStepTransform

FRAMES, SIDE, LENGTH = 4, 8, 7
Array = np.ndarray[Any, Any]


class Numbers(gymnasium.Env[Array, int]):
    """Stacks of frames, each of which shows its own number: that of the episode, and of the step in it.

    Episodes of `LENGTH` steps; those of even numbers terminate, the others are truncated.
    """

    observation_space = gymnasium.spaces.Box(0, 255, (FRAMES, SIDE, SIDE), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)
    episode = -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        self.episode, self.at = self.episode + 1, 0
        return stack(self.episode, 0), {}

    def step(self, action: int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self.at += 1
        is_over, terminates = self.at == LENGTH, self.episode % 2 == 0
        return stack(self.episode, self.at), 1.0, is_over and terminates, is_over and not terminates, {}


def stack(episode: int, step: int) -> Array:
    """The stack after so many steps of an episode: its first frame is repeated before it."""
    made = np.zeros((FRAMES, SIDE, SIDE), np.uint8)
    for frame, shown in enumerate(range(step - FRAMES + 1, step + 1)):
        made[frame] = 8 * episode + max(shown, 0) + 1
    return made


def collected(steps: int, capacity: int = 200, **settings: Any) -> TensorDictReplayBuffer[Any]:
    """A buffer that stores each observation once, and has the steps that a collector made."""
    storage = LazyTensorStorage(capacity, compact=True)
    rb = TensorDictReplayBuffer(storage=storage, batch_size=64, **settings)
    env = GymEnv(Numbers(), categorical_action_encoding=True)
    for batch in SyncDataCollector(env, frames_per_batch=10, total_frames=steps):
        rb.extend(batch)
    assert storage.compact is not None and storage.compact.frames == {"observation": FRAMES}
    return rb


def numbered(rows: TensorDict) -> Iterator[tuple[int, int, Array, Array]]:
    """Of each row the numbers of its episode and step, and its two stacks."""
    for row in rows:
        shown = int(row["observation"][-1, 0, 0]) - 1
        yield shown // 8, shown % 8, row["observation"].numpy(), row["next", "observation"].numpy()


def test_sb3_issue_934_the_next_observation_of_a_truncated_step_is_its_own() -> None:
    """There it is read from the following row, which belongs to another episode."""
    rows = collected(70)[:]
    truncated = rows[rows["next", "truncated"].flatten()]
    assert len(truncated) == 5
    for episode, step, _, following in numbered(truncated):
        assert step == LENGTH - 1 and np.array_equal(following, stack(episode, LENGTH))


def test_cleanrl_issue_460_a_truncated_episode_lends_no_frame_and_no_reward_to_the_next_one() -> None:
    """There n-step rows cross the truncation, which the flag of terminations does not show."""
    rb = PrioritizedReplayBuffer(200, (FRAMES, SIDE, SIDE), "cpu", 3, 1.0, optimize_memory_usage=True)
    env = Numbers()
    for _ in range(6):
        seen, over = env.reset()[0], False
        while not over:
            following, reward, terminated, truncated, _ = env.step(0)
            rb.add(seen, 0, reward, following, terminated)  # as scripts do: nothing says that it was truncated
            seen, over = following, terminated or truncated
    rows = rb.buffer[:]
    pairs = zip(rows["observation"].numpy(), rows["next"]["observation"].numpy(), rows["next"]["reward"], strict=True)
    for now, following, reward in pairs:
        episode, step = divmod(int(now[-1, 0, 0]) - 1, 8)
        assert np.array_equal(now, stack(episode, step))
        assert np.array_equal(following, stack(episode, min(step + 3, LENGTH)))
        assert float(reward) == min(3, LENGTH - step)


def test_dopamine_issue_213_n_step_rows_have_the_stack_n_steps_later() -> None:
    """There frames of the steps between are mixed up with those of the stack."""
    rb = collected(70, transform=MultiStepTransform(3, 1.0))
    assert rb.storage.compact is not None and rb.storage.compact.n_steps == 3
    rows = rb[:]
    assert len(rows) > 60
    for episode, step, now, following in numbered(rows):
        assert np.array_equal(now, stack(episode, step))
        assert np.array_equal(following, stack(episode, min(step + 3, LENGTH)))


def test_fasttd3_issue_6_no_stack_has_frames_of_two_episodes() -> None:
    """There stacks are made of the newest frames, whichever episode they are of."""
    rb = collected(180, capacity=50)
    torch.manual_seed(0)
    batches = [rb[:], *(rb.sample() for _ in range(20))]
    for episode, step, now, following in (numbers for batch in batches for numbers in numbered(batch)):
        assert np.array_equal(now, stack(episode, step)) and np.array_equal(following, stack(episode, step + 1))
