"""The border between what is stored and what is appended: which entries of a step tell whether the next one follows it.

Steps are joined to trajectories by their flags and ids. Two collectors that both count their trajectories from 0, or two
runs of a program, give rows that look joined and are not. So where a batch meets what is stored:

- the newest step is done and has the same trajectory id as the first new one: a seam;
- it is not done: the entries that stand both at the root and under `"next"` are compared, byte for byte, whatever the
  ids say. One differs: a seam. An entry counts only if it agreed between the last two steps that are joined, so that
  n-step rows and what a transform changes on one side only are joined as ever.

`border.hpp` does this for packed rows; the functions here for lists of items and for columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from engram.data.replay_buffers.trees import Path

_IDS: tuple[Path, ...] = (("collector", "traj_ids"), ("episode",))
_NOT_COMPARED = {"done", "terminated", "truncated", "reward", "traj_ids", "episode", "index", "collector"}
_MOST = 64  # entries that are compared


@dataclasses.dataclass(frozen=True)
class Border:
    """Places in a list of paths.

    Attributes:
        entries: what stands at the root, and the same under `"next"`.
        done: the flags under `"next"` that say that a trajectory ends.
        either: one set flag is enough (`terminated` and `truncated`); else a step with several is done when all are.
        id: the trajectory's id; None where there is none.
    """

    entries: tuple[tuple[int, int], ...]
    done: tuple[int, ...]
    either: bool
    id: int | None

    @classmethod
    def of(cls, paths: Sequence[Path], forms: Sequence[Any]) -> Border:
        """The border of steps with these paths; an entry is compared with one of the same form (shape and dtype)."""
        at = {path: i for i, path in enumerate(paths)}
        entries = []
        for path, i in at.items():
            under_next = at.get(("next", *path))
            if path[:1] == ("next",) or under_next is None or _NOT_COMPARED.intersection(path):
                continue
            if forms[i] == forms[under_next]:
                entries.append((i, under_next))
        flags = [path for path in paths if path[:1] == ("next",)]
        done = [at[("next", "done")]] if ("next", "done") in at else [at[p] for p in flags if p[-1] == "done"]
        either = not done
        if either:
            done = [at[p] for p in flags if p[-1] in ("terminated", "truncated")]
        ids = next((at[path] for path in _IDS if path in at), None)
        return cls(tuple(entries[:_MOST]), tuple(done), either, ids)

    @property
    def says_anything(self) -> bool:
        """Whether steps with these entries can differ at a border."""
        return bool(self.entries) or (self.id is not None and bool(self.done))
