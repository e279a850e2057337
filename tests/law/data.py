"""Steps as environments bring them: every value follows from the time and the environment."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

_LENGTHS = [3, 5, 2, 7, 4, 6, 3, 9]
_MOST = 4000


def _episodes(env: int) -> tuple[list[int], list[int], list[bool]]:
    """Of each time step: its episode, its place in it, and whether it is the last one there."""
    ids, places, lasts, k = [], [], [], env
    while len(ids) < _MOST:
        n = _LENGTHS[k % len(_LENGTHS)]
        ids += [k * 8 + env] * n
        places += range(n)
        lasts += [False] * (n - 1) + [True]
        k += 1
    return ids[:_MOST], places[:_MOST], lasts[:_MOST]


_KNOWN = [_episodes(env) for env in range(3)]


def steps(start: int, count: int, envs: int) -> TensorDict:
    """Steps of TED, `[count]`, or `[envs, count]` with environments."""
    rows = [_rows(env, start, count) for env in range(max(envs, 1))]
    return torch.stack(rows) if envs else rows[0]


def _rows(env: int, start: int, count: int) -> TensorDict:
    ids, places, lasts = (torch.tensor(known[start : start + count]) for known in _KNOWN[env])
    time = torch.arange(start, start + count)
    done = lasts.bool().unsqueeze(-1)
    following = _observation(ids, places + 1)
    # Where a step is followed by something else than it says, as after a wrapper's reset.
    following[time % 11 == 3] += 0.25
    reward = ((time * 7919 + env * 31) % 101).float().unsqueeze(-1) / 8
    made = {
        "observation": _observation(ids, places),
        "action": (time * 13 + env) % 5,
        "collector": TensorDict({"traj_ids": ids}, [count]),
        "td_error": (time * 31 % 17).float() / 4,
        "next": TensorDict(
            {
                "observation": following, "reward": reward, "done": done, "terminated": done.clone(),
                "truncated": torch.zeros_like(done),
            },
            [count],
        ),
    }  # fmt: skip
    return TensorDict(made, [count])


def _observation(ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    k = (ids * 16 + places).float()
    return torch.stack([k, (k * 0.7).sin(), -k], -1)


def changed(rows: Any, by: float) -> Any:
    """Stored rows with another reward and observation, to be written in their place."""
    if isinstance(rows, list):
        return [changed(row, by) for row in rows]
    rows = rows.clone()
    rows["next", "reward"] = rows["next", "reward"] + by
    rows["observation"] = rows["observation"] - by
    return rows
