"""Rows whose bytes are a function of lane, write number and writer, and what may be said of batches of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

WORDS = 6
PERIOD = 4096  # rows of a writer, after which the lengths of its episodes repeat
_LENGTHS = np.random.default_rng(5).integers(1, 40, 4096)


def _pattern() -> tuple[np.ndarray, np.ndarray]:
    """For each row of a period: its episode, and whether that ends with it."""
    stops = np.cumsum(_LENGTHS)
    stops = np.append(stops[stops < PERIOD], PERIOD)
    episode = np.searchsorted(stops, np.arange(PERIOD), side="right")
    done = np.zeros(PERIOD, bool)
    done[stops - 1] = True
    return episode, done


_EPISODE, _DONE = _pattern()
_EPISODES = int(_EPISODE[-1]) + 1
_MIX = np.array([0x1E3779B97F4A7C15, 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D], np.int64)
_PLACES = np.arange(1, WORDS + 1, dtype=np.int64) * np.int64(0x1B03738712FAD5C9)


def _words(n: np.ndarray, lane: Any, session: Any, i: np.ndarray) -> np.ndarray:
    """int64 [..., WORDS]: each word says all four numbers."""
    with np.errstate(over="ignore"):
        key = (n * _MIX[0]) ^ (np.asarray(lane) * _MIX[1] + np.asarray(session) * _MIX[2] + i)
        mixed = key[..., None] * _PLACES
        return mixed ^ (mixed >> 29)


def _observation(session: Any, i: np.ndarray) -> np.ndarray:
    """int64 [..., 2]: what a row has as its observation, and the row before under `next`."""
    return _words(i, 0, session, i)[..., :2]


def episode_of(session: Any, i: np.ndarray) -> np.ndarray:
    return np.asarray(session) * (1 << 32) + i // PERIOD * _EPISODES + _EPISODE[i % PERIOD]


class Maker:
    """Makes the rows of one writer, in memory that is used again for batches of the same length.

    Args:
        lane: where they go.
        session: a number that no other writer has.
    """

    def __init__(self, lane: int, session: int) -> None:
        self.lane, self.session, self.written = lane, session, 0
        self._kept: dict[int, tuple[TensorDict, dict[str, np.ndarray]]] = {}

    def rows(self, first: int, n: int) -> TensorDict:
        """The next n rows, which get the write numbers from `first` on."""
        if n not in self._kept:
            self._kept[n] = self._empty(n)
        batch, at = self._kept[n]
        i = np.arange(self.written, self.written + n)
        at["i"][:] = i
        at["n"][:] = number = np.arange(first, first + n)
        at["episode"][:] = episode_of(self.session, i)
        at["done"][:, 0] = _DONE[i % PERIOD]
        at["words"][:] = _words(number, self.lane, self.session, i)
        at["observation"][:], at["after"][:] = _observation(self.session, i), _observation(self.session, i + 1)
        self.written += n
        return batch

    def _empty(self, n: int) -> tuple[TensorDict, dict[str, np.ndarray]]:
        integers = {k: np.zeros(n, np.int64) for k in ("n", "i", "lane", "session", "episode", "always")}
        at = {**integers, "words": np.zeros((n, WORDS), np.int64), "done": np.zeros((n, 1), bool)}
        at.update(observation=np.zeros((n, 2), np.int64), after=np.zeros((n, 2), np.int64))
        at["lane"][:], at["session"][:] = self.lane, self.session
        made = {k: torch.from_numpy(v) for k, v in at.items()}
        after = {"done": made.pop("done"), "observation": made.pop("after")}
        return TensorDict({**made, "next": after}, [n]), at


class Faults(list[str]):
    """What should not be."""

    def check(self, right: Any, what: str) -> None:
        if not np.all(right) and len(self) < 50:
            self.append(what)


def columns(batch: Any) -> dict[str, np.ndarray]:
    keys = ("n", "i", "lane", "session", "episode", "words")
    return {k: batch[k].numpy() for k in keys}


def check_rows(faults: Faults, batch: Any, generation: Any, index: Any, lane_capacity: int, when: str) -> None:
    """Every row is whole, and the one that it is said to be."""
    c = columns(batch)
    whole = (c["words"] == _words(c["n"], c["lane"], c["session"], c["i"])).all(-1)
    whole &= c["episode"] == episode_of(c["session"], c["i"])
    whole &= (batch["observation"].numpy() == _observation(c["session"], c["i"])).all(-1)
    whole &= (batch["next", "observation"].numpy() == _observation(c["session"], c["i"] + 1)).all(-1)
    bad = np.flatnonzero(~whole)
    faults.check(whole, f"{when}: torn rows {[(int(c['lane'][k]), int(c['n'][k])) for k in bad[:3]]}")
    if generation is not None:
        other = np.flatnonzero(c["n"] != generation.numpy())
        faults.check(not len(other), f"{when}: rows {c['n'][other[:3]]} have the numbers {generation[other[:3]]}")
    if index is not None:
        slot = c["lane"] * lane_capacity + c["n"] % lane_capacity
        faults.check(slot == index.numpy(), f"{when}: rows that are not in their slots")


def check_slices(faults: Faults, batch: Any, length: int, by_done: bool, when: str) -> None:
    """Each slice is a stretch of one writer's rows; with `by_done` of one episode."""
    c = {k: v.reshape(-1, length, *v.shape[1:]) for k, v in columns(batch).items()}
    for key, step in (("n", 1), ("i", 1), ("lane", 0), ("session", 0)):
        wrong = (np.diff(c[key], axis=1) != step).any(1)
        faults.check(~wrong, f"{when}: a slice goes from {key} to {key}: {c[key][wrong][:1]}")
    if by_done:
        faults.check(np.diff(c["episode"], axis=1) == 0, f"{when}: a slice goes over the end of an episode")
