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
