"""The data of the golden checkpoints: a function of the step number alone, without any random number."""

from __future__ import annotations

import torch
from tensordict import TensorDict

EPISODE = 7  # steps; the last of them is done


def steps(start: int, n: int, exceptions: bool = False) -> TensorDict:
    """TED `[n]`: steps `start` to `start + n` of one stream of episodes."""
    t = torch.arange(start, start + n)
    obs = torch.stack([t / 8, -t / 4, t % 5 + 0.5], 1)
    following = torch.stack([(t + 1) / 8, -(t + 1) / 4, (t + 1) % 5 + 0.5], 1)
    done = (t % EPISODE == EPISODE - 1).unsqueeze(1)
    following[done.squeeze(1), 0] += 100  # a reset: what followed is not what comes next
    if exceptions:
        following[t % 11 == 3] = torch.tensor([float("nan"), -0.0, 1.0])
    never = torch.zeros_like(done)
    return TensorDict(
        {
            "obs": obs, "action": t % 3, "done": never, "terminated": never, "truncated": never,
            "collector": {"traj_ids": t // EPISODE},
            "next": {
                "obs": following, "reward": (t % 4).float().unsqueeze(1), "done": done, "terminated": done,
                "truncated": never,
            },
        },
        [n],
    )  # fmt: skip


def strands(start: int, n: int, envs: int = 3) -> TensorDict:
    """TED `[envs, n]`: each environment is in another place of the stream."""
    return torch.stack([steps(start + 1000 * env, n, exceptions=True) for env in range(envs)])


def stacks(start: int, n: int, frames: int = 4, n_steps: int = 1) -> TensorDict:
    """`[n]` steps with stacks of the newest frames, whose episodes begin and end in several ways."""
    pixels, following = [], []
    for t in range(start, start + n):
        episode, age = divmod(t, EPISODE)
        left = EPISODE - 1 - age
        pixels.append(_stack(episode, age, frames))
        following.append(_stack(episode, age + min(n_steps, left + 1), frames))
        if t % 17 == 5:
            following[-1] = 255 - following[-1]  # what no other row has
    t = torch.arange(start, start + n)
    return TensorDict(
        {
            "pixels": torch.stack(pixels), "action": t % 3,
            "next": {"pixels": torch.stack(following), "reward": (t % 4).float().unsqueeze(1)},
        },
        [n],
    )  # fmt: skip


def _stack(episode: int, age: int, frames: int) -> torch.Tensor:
    """Before an episode's first frame come, in turn, that one, zeros, and others."""
    before = [torch.full((2, 3), _pixel(episode, 0)), torch.zeros(2, 3), torch.full((2, 3), _pixel(episode, -9))]
    ages = range(age - frames + 1, age + 1)
    shown = [before[episode % 3] if i < 0 else torch.full((2, 3), _pixel(episode, i)) for i in ages]
    return torch.stack(shown).to(torch.uint8)


def _pixel(episode: int, age: int) -> int:
    return (episode * 37 + age * 11 + 100) % 256
