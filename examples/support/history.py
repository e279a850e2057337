"""What happened in a run, in frames: the same seed gives the same history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

_KEPT = ("evaluations", "episodes", "killed_at", "resumed_from", "updates")


class Episodes:
    """Adds up rewards, over batches, to the returns of whole episodes."""

    def __init__(self) -> None:
        self._return_so_far = 0.0

    def ended_in(self, batch: TensorDictBase) -> list[float]:
        """Returns of the episodes that ended in a batch `[time]`."""
        following, ended = batch["next"], []
        for reward, done in zip(
            following["reward"].flatten().tolist(), following["done"].flatten().tolist(), strict=True
        ):
            self._return_so_far += reward
            if done:
                ended.append(self._return_so_far)
                self._return_so_far = 0.0
        return ended


class History:
    """Collects what training processes tell."""

    def __init__(self) -> None:
        self.episodes: list[tuple[int, float]] = []  # frame, return while exploring
        self.evaluations: list[tuple[int, float]] = []  # frame, mean return of the greedy policy
        self.killed_at = self.resumed_from = self.updates = 0
        self.sample_us = 0.0

    @property
    def last_score(self) -> float:
        """The newest evaluation; minus infinity before the first."""
        return self.evaluations[-1][1] if self.evaluations else float("-inf")

    def add(self, what: str, facts: dict[str, Any]) -> None:
        """Takes in one message of a training process."""
        if what == "progress":
            self.episodes += [(facts["frames"], score) for score in facts["episodes"]]
            self.updates = facts["updates"]
            self.sample_us = facts["sample_us"] or self.sample_us
        elif what == "evaluation":
            self.evaluations.append((facts["frames"], facts["score"]))

    def save(self, path: Path) -> None:
        """As JSON, without times of the clock."""
        path.write_text(json.dumps({name: getattr(self, name) for name in _KEPT}) + "\n")

    @classmethod
    def load(cls, path: Path) -> History:
        """What `save` wrote."""
        history, saved = cls(), json.loads(path.read_text())
        for name in _KEPT:
            setattr(history, name, saved[name])
        return history
