"""The border between what is stored and what is appended: which entries of a step tell whether another follows it.

Steps are joined to trajectories by their flags and ids. Two collectors that both count their trajectories from 0, or
two runs of a program, give rows that look joined and are not. So where a batch meets what is stored:

- the newest step is done and has the same trajectory id as the first new one: a seam;
- it is not done: the entries that stand both at the root and under `"next"` are compared, byte for byte, whatever the
  ids say. One differs: a seam. An entry counts only if it agreed between the last two steps that are joined, so that
  n-step rows and what a transform changes on one side only are joined as ever.

`border.hpp` does this for packed rows; the functions here for lists of items and for columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.data.replay_buffers.lanes import Lanes
from engram.data.replay_buffers.trees import Path, describe, entry

_IDS: tuple[Path, ...] = (("collector", "traj_ids"), ("episode",))
_NOT_COMPARED = {"done", "terminated", "truncated", "reward", "traj_ids", "episode", "index", "collector"}
_MOST = 64  # entries that are compared
_LOOK_BACK = 4096  # steps, for two that are joined


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


class ItemBorder:
    """The border of items that are kept one by one: `begins` says whether a trajectory begins at a new item.

    Args:
        lanes: counts the items.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._border: Border | None = None
        self._paths: list[Path] = []
        self._incarnation = -1
        self._looked = 0  # of items up to this write number is known which entries agree
        self._agreed: set[int] | None = None

    def begins(self, items: list[Any], capacity: int, rows: list[Any]) -> bool:
        """Whether somebody else's steps begin with `rows[0]`, before it is put behind the newest of `items`."""
        if not items:
            return False
        newest, new = items[self._lanes.next_slot() - 1], rows[0]
        border = self._border or self._look_at(newest)
        if not border.says_anything:
            return False
        flags = self._flags(newest)
        if any(flags):
            ended = border.either or all(flags)
            return ended and border.id is not None and self._same(newest, border.id, new, border.id)
        differs = [k for k, (at_root, under_next) in enumerate(border.entries)
                   if not self._same(newest, under_next, new, at_root)]  # fmt: skip
        return bool(differs) and not self._evidence(items, capacity, rows).isdisjoint(differs)

    def _look_at(self, item: Any) -> Border:
        found = []
        if isinstance(item, dict | TensorDictBase) or hasattr(type(item), "_from_tensordict"):
            try:
                found = describe(item, 0)[1]
            except (TypeError, ValueError):
                found = []  # an item of objects, which are no steps
        self._paths = [path for path, _ in found]
        self._border = Border.of(self._paths, [(np.shape(v), getattr(v, "dtype", type(v))) for _, v in found])
        return self._border

    def _flags(self, item: Any) -> list[bool]:
        assert self._border is not None
        found: list[bool] = []
        for i in self._border.done:
            flag = entry(item, self._paths[i])
            if isinstance(flag, Tensor) and flag.numel() == 1:
                found.append(bool(flag))
            elif flag is not None:
                found += map(bool, np.ravel(flag))
        return found

    def _same(self, a: Any, i: int, b: Any, j: int) -> bool:
        """Whether entry i of one item is entry j of another; what is missing or no array differs from nothing."""
        x, y = entry(a, self._paths[i]), entry(b, self._paths[j])
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            if x.shape != y.shape or x.dtype != y.dtype or torch.equal(x, y):
                return True
            return bool(_equal(x, y, ()))
        if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
            return x.tobytes() == y.tobytes()
        return True

    def _joined(self, before: Any, after: Any) -> bool:
        """Whether two items that follow each other are of one trajectory, as far as their flags and ids say."""
        assert self._border is not None
        i = self._border.id
        return not any(self._flags(before)) and (i is None or self._same(before, i, after, i))

    def _agreeing(self, before: Any, after: Any) -> set[int]:
        assert self._border is not None
        return {k for k, (at_root, under_next) in enumerate(self._border.entries)
                if self._same(before, under_next, after, at_root)}  # fmt: skip

    def _evidence(self, items: list[Any], capacity: int, rows: list[Any]) -> set[int]:
        """The entries that agreed between the last two joined items: of those that are stored, else of the new ones."""
        store = self._lanes.store
        if store.incarnation != self._incarnation:
            self._incarnation, self._looked, self._agreed = store.incarnation, 0, None
        lane, seams = store.lane(0), set(store.seams(0))
        newest = lane["published"] - 1
        for k in range(newest, max(lane["first"], self._looked, newest - _LOOK_BACK), -1):
            before, after = items[(k - 1) % capacity], items[k % capacity]
            if k not in seams and self._joined(before, after):
                self._agreed = self._agreeing(before, after)
                break
        self._looked = newest
        if self._agreed is not None:
            return self._agreed
        return self._agreeing(rows[0], rows[1]) if len(rows) > 1 and self._joined(rows[0], rows[1]) else set()


class ColumnBorder:
    """The border of steps that are kept as columns; works on their device and does not wait for it.

    Args:
        border: the entries that are compared.
        envs: shape of the environments of one step.
    """

    def __init__(self, border: Border, envs: tuple[int, ...], device: torch.device) -> None:
        self._border = border
        self._envs = envs
        self._device = device
        self.forget()

    def forget(self) -> None:
        """What is stored is others' by now."""
        # Whether there were two joined steps, and which entries agreed between the last ones: [envs], [entries, envs].
        self._known = torch.zeros(self._envs, dtype=torch.bool, device=self._device)
        self._agreed = torch.zeros((len(self._border.entries), *self._envs), dtype=torch.bool, device=self._device)

    def begins(self, newest: list[list[Tensor]], cut: Tensor | bool, new: list[Tensor]) -> Tensor | None:
        """Whether a trajectory begins at the first new step: bool [] on the device; None: it does not.

        Args:
            newest: leaves `[*envs, ...]` of the newest steps, the newest first: none, one or two of them.
            cut: whether a seam stands at the newest.
            new: leaves `[time, *envs, ...]`.
        """
        if not newest or not self._border.says_anything:
            return None
        some, every = self._done(newest[0])
        first = [leaf[0] for leaf in new]
        begins = torch.zeros((), dtype=torch.bool, device=self._device)
        if self._border.id is not None:
            i = self._border.id
            begins = (every & _equal(newest[0][i], first[i], self._envs)).any()
        if not self._border.entries:
            return begins
        if len(newest) > 1:
            self._learn(newest[1], newest[0], ~torch.as_tensor(cut, device=self._device))
        if len(new[0]) > 1:
            self._learn(first, [leaf[1] for leaf in new], ~self._known, known=False)
        return begins | (~self._agree(newest[0], first) & self._agreed & ~some).any()

    def _learn(self, before: list[Tensor], after: list[Tensor], joined: Tensor, known: bool = True) -> None:
        """Which entries agree between two steps that follow each other, where they are joined."""
        joined = joined & ~self._done(before)[0]
        if self._border.id is not None:
            i = self._border.id
            joined = joined & _equal(before[i], after[i], self._envs)
        self._agreed = torch.where(joined, self._agree(before, after), self._agreed)
        if known:
            self._known = self._known | joined

    def _agree(self, before: list[Tensor], after: list[Tensor]) -> Tensor:
        return torch.stack([_equal(before[n], after[r], self._envs) for r, n in self._border.entries])

    def _done(self, step: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Whether some, and whether all of a step's flags are set: bool [*envs]."""
        if not self._border.done:
            never = torch.zeros(self._envs, dtype=torch.bool, device=self._device)
            return never, never
        flags = torch.cat([step[i].reshape(*self._envs, -1).bool() for i in self._border.done], -1)
        some = flags.any(-1)
        return some, some if self._border.either else flags.all(-1)


def _equal(a: Tensor, b: Tensor, lead: tuple[int, ...]) -> Tensor:
    """bool [*lead]: whether all that stands behind the leading dimensions is the same, NaN where NaN is."""
    same = a == b
    if a.is_floating_point() or a.is_complex():
        same = same | (a.isnan() & b.isnan())
    return same.reshape(*lead, -1).all(-1)
