"""What collectors must give, by a loop written with gymnasium alone; and policies to give it with."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn.functional import one_hot

from engram.envs import EnvBase

WORLDS = [(3, 1, 4), (2, 5), (1,)]


class Rule(nn.Module):
    """A deterministic policy: action = (time left + total) mod 3, one-hot or not."""

    def __init__(self, hot=True):
        super().__init__()
        self.hot = hot

    def forward(self, observation):
        choice = observation.sum(-1).long() % 3
        return one_hot(choice, 3) if self.hot else choice


class Proxy(EnvBase):
    """An environment that is not known to be gymnasium's: it is stepped through TensorDicts."""

    def __init__(self, env):
        super().__init__(env.observation_spec, env.action_spec, batch_size=env.batch_size)
        self.inner = env

    def _reset(self, mask):
        blank = self.observation_spec.zero().update(self.full_done_spec.zero())
        return self.inner.reset(None if mask is None else blank.set("_reset", mask))

    def _step(self, td):
        return self.inner.step(td.copy())["next"]

    def _set_seed(self, seed):
        self.inner.set_seed(seed)


def reference(worlds, batches, steps, limit=None, choose=lambda state: int(state.sum()) % 3):
    """What a collector whose policy is `choose` must give, `[envs, time]` for each batch, by gymnasium alone."""
    states, ages, ids, count = [None] * len(worlds), [0] * len(worlds), [None] * len(worlds), 0
    for number in range(batches):
        rows = {}
        for _ in range(steps):
            for e, world in enumerate(worlds):
                if states[e] is None:
                    states[e] = world.reset(seed=e if ids[e] is None else None)[0].copy()
                    ages[e], ids[e], count = 0, count, count + 1
            for e, world in enumerate(worlds):
                action = choose(states[e])
                following, reward, terminated, truncated, _ = world.step(action)
                following, ages[e] = following.copy(), ages[e] + 1
                truncated = truncated or ages[e] == limit
                row = {
                    "observation": states[e],
                    "action": np.eye(3, dtype=np.int64)[action],
                    **dict.fromkeys(("done", "terminated", "truncated"), np.array([False])),
                    ("collector", "traj_ids"): np.int64(ids[e]),
                    ("next", "observation"): following,
                    ("next", "reward"): np.array([reward], dtype=np.float32),
                    ("next", "done"): np.array([terminated or truncated]),
                    ("next", "terminated"): np.array([terminated]),
                    ("next", "truncated"): np.array([truncated]),
                }
                if limit is not None:
                    row["step_count"] = np.array([ages[e] - 1])
                    row["next", "step_count"] = np.array([ages[e]])
                rows.setdefault(e, []).append(row)
                states[e] = None if terminated or truncated else following
        keys = rows[0][0]
        yield {k: torch.tensor(np.array([[row[k] for row in rows[e]] for e in rows])) for k in keys}
        del number


def assert_same(batch, expected):
    assert set(batch.keys(True, True)) == set(expected)
    for key, value in expected.items():
        assert batch.get(key).dtype == value.dtype, key
        assert torch.equal(batch.get(key), value), key


def on_tensordicts(td):
    return td.set("action", Rule()(td["observation"]))


def remembering(td):
    memory = td.get("memory", torch.zeros(*td.batch_size, 1))
    td = on_tensordicts(td).set("seen", memory * 2)
    return td.set(("next", "memory"), memory + 1)
