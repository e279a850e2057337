"""Statistics of collecting: frames per second, and returns and lengths of episodes."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from engram._native import add_episodes

Array = np.ndarray[Any, Any]


class StepsWay(NamedTuple):
    """Which way the steps of the last batch went: by "steps", "columns" or "tensordicts", from the fastest on.

    By steps go small batches of one environment: nothing is made for each batch. In columns lie the values of
    environments and what a policy writes besides its action; with TensorDicts one is made for each step. `reason` says
    why no faster way was gone, such as that outputs of the policy change shape; "" where there is none.
    """

    way: str
    reason: str = ""


class _Figures(NamedTuple):
    frames: int
    batches: int
    episodes: int
    steps_per_second: float
    mean_steps_per_second: float
    mean_return: float
    last_return: float
    mean_length: float
    last_length: float


class CollectorStats(_Figures):
    """Figures for a progress bar: `bar.set_postfix(collector.stats._asdict())`.

    Speeds count the time inside the collector, not the time between batches: `steps_per_second` over the last 10
    batches, `mean_steps_per_second` over all. Returns and lengths are those of whole episodes, however many batches
    they stretch over: of the last one that ended, and means over the last 100; NaN before the first has ended.

    Called, as in `collector.stats()`, they are a dict that also has `"way"` and `"reason"`: see `steps_way`.
    """

    steps_way: StepsWay = StepsWay("")  #: which way the steps went; "" where that is not known, as of other processes

    def __call__(self) -> dict[str, Any]:
        """The figures by name, which way the steps went, and why it was no faster one."""
        return {**self._asdict(), "way": self.steps_way.way, "reason": self.steps_way.reason}


class Throughput:
    """Frames per second, over the last batches and over all."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=10)
        self._steps, self._seconds = 0, 0.0

    def add(self, steps: int, seconds: float) -> None:
        """Adds a batch of so many frames, which took so many seconds."""
        self._recent.append((steps, seconds))
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds

    @property
    def recent(self) -> float:
        """Frames per second over the last 10 batches."""
        recent = list(self._recent)  # at once: a thread that collects in the background adds to it
        return _rate(sum(steps for steps, _ in recent), sum(seconds for _, seconds in recent))

    @property
    def mean(self) -> float:
        """Frames per second over all batches."""
        return _rate(self._steps, self._seconds)


class EpisodeStats:
    """Returns and lengths of the last `window` episodes of several environments, from batch to batch.

    >>> episodes = EpisodeStats(1)
    >>> episodes.add(np.array([[1.0, 2.0, 3.0]]), np.array([[False, True, False]]))
    >>> episodes.add(np.array([[4.0]]), np.array([[True]]))
    >>> episodes.count, list(episodes.returns), list(episodes.lengths)
    (2, [3.0, 7.0], [2, 2])
    """

    def __init__(self, envs: int, window: int = 100) -> None:
        self.count = 0
        self.returns: deque[float] = deque(maxlen=window)
        self.lengths: deque[int] = deque(maxlen=window)
        self._window = window
        self._return = np.zeros(envs)
        self._length = np.zeros(envs, dtype=np.int64)

    def restart(self) -> None:
        """Drops the unfinished episodes."""
        self._return[:] = 0
        self._length[:] = 0

    def drop(self, env: int) -> None:
        """Drops the unfinished episode of one environment."""
        self._return[env] = 0
        self._length[env] = 0

    def add(self, reward: Array, done: Array) -> None:
        """Adds steps: `reward` and bool `done`, both `[envs, time]`."""
        reward = reward if reward.dtype == np.float32 else reward.astype(np.float64)
        self.add_part(np.ascontiguousarray(reward), done, 0, done.shape[1])

    def add_part(self, reward: Array, done: Array, first: int, stop: int) -> None:
        """Adds the steps [first, stop) of contiguous arrays `[envs, time]`; rewards are float32 or float64."""
        ended, returns, lengths = add_episodes(reward, done, self._return, self._length, self._window, first, stop)
        if ended:
            self.count += ended
            self.returns.extend(returns)
            self.lengths.extend(lengths)

    def add_batch(self, batch: TensorDictBase) -> None:
        """Adds the steps of a batch `[*envs, time]`; nothing of agents that have rewards and flags in groups."""
        reward, done = batch.get(("next", "reward"), None), batch.get(("next", "done"), None)
        if reward is not None and done is not None:
            self.add(_as_rows(reward, batch.shape, np.add), _as_rows(done, batch.shape, np.logical_or))

    def ended_in(self, batch: TensorDictBase) -> tuple[list[float], list[int]]:
        """Adds the steps of a batch; returns and lengths of the episodes that ended in it (of the last `window`)."""
        since = self.count
        self.add_batch(batch)
        new = min(self.count - since, len(self.returns))
        return list(self.returns)[len(self.returns) - new :], list(self.lengths)[len(self.lengths) - new :]

    def take(self, returns: list[float], lengths: list[int]) -> None:
        """Adds episodes that ended in another process."""
        self.count += len(returns)
        self.returns.extend(returns)
        self.lengths.extend(lengths)

    def state_dict(self) -> dict[str, Any]:
        """The episodes that ended, without the unfinished ones."""
        return {"count": self.count, "returns": list(self.returns), "lengths": list(self.lengths)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after `state`."""
        self.restart()
        self.count = int(state["count"])
        for own, loaded in ((self.returns, state["returns"]), (self.lengths, state["lengths"])):
            own.clear()
            own.extend(loaded)


def collector_stats(
    frames: int, batches: int, episodes: EpisodeStats, throughput: Throughput, way: StepsWay
) -> CollectorStats:
    """Puts all figures together."""
    stats = CollectorStats(
        frames=frames,
        batches=batches,
        episodes=episodes.count,
        steps_per_second=throughput.recent,
        mean_steps_per_second=throughput.mean,
        mean_return=_mean(episodes.returns),
        last_return=_last(episodes.returns),
        mean_length=_mean(episodes.lengths),
        last_length=_last(episodes.lengths),
    )
    stats.steps_way = way
    return stats


def _as_rows(leaf: torch.Tensor, shape: torch.Size, merge: np.ufunc) -> Array:
    """`[*shape, ...]` as an array `[envs, time]`; further dimensions (agents) are merged by `merge`."""
    if leaf.is_cpu and not leaf.requires_grad and leaf.shape == (*shape, 1) and leaf.numel():
        return leaf.numpy().reshape(-1, shape[-1])  # the usual case: a third of the cost
    rows = leaf.detach().cpu().numpy().reshape(shape[:-1].numel(), shape[-1], -1)
    return rows[..., 0] if rows.shape[-1] == 1 else np.asarray(merge.reduce(rows, -1))


def _mean(window: deque[Any]) -> float:
    """The mean; NaN of nothing."""
    values = list(window)  # at once: a thread that collects in the background adds to it
    return sum(values) / len(values) if values else math.nan


def _last(values: deque[Any]) -> float:
    """The last value; NaN of nothing."""
    return values[-1] if values else math.nan


def _rate(steps: int, seconds: float) -> float:
    return steps / seconds if seconds else math.nan
