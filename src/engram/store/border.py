"""The border between what is stored and what is appended: which entries of a step tell whether another follows it.

Steps are joined to trajectories by their flags and ids. Two collectors that both count their trajectories from 0, or
two runs of a program, give rows that look joined and are not. So where a batch meets what is stored:

- the newest step is done and has the same trajectory id as the first new one: a seam;
- it is not done: the entries that stand both at the root and under `"next"` are compared, byte for byte, whatever the
  ids say. One differs: a seam. An entry counts only if it agreed between the last two steps that are joined, in every
  environment in which these are, so that n-step rows and what a transform changes on one side only are joined as ever.

Which entries agreed stands with the lane's counters in the store, and is saved with them: it stays known when the two
steps are gone. `border.hpp` does this for packed rows; the functions here for lists of items and for columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from engram.pytree import KeyPath, describe, get_entry, has_keys
from engram.store.lanes import Lanes

_IDS: tuple[KeyPath, ...] = (("collector", "traj_ids"), ("episode",))
_NOT_COMPARED = {"done", "terminated", "truncated", "reward", "traj_ids", "episode", "index", "collector"}
_MOST = 63  # entries that are compared; the store has a bit for each
_ARRAYS = np.ndarray | np.generic | bool | int | float | complex
LOOK_BACK = 4096  # steps, for two that are joined


@dataclasses.dataclass(frozen=True)
class Border:
    """Places in a list of paths.

    Attributes:
        entries: what stands at the root, and the same under `"next"`; in the order of their names, which is the same
            wherever these steps are kept.
        done: the flags under `"next"` that say that a trajectory ends.
        either: one set flag is enough (`terminated` and `truncated`); else a step with several is done when all are.
        id: the trajectory's id; None where there is none.
    """

    entries: tuple[tuple[int, int], ...]
    done: tuple[int, ...]
    either: bool
    id: int | None

    @classmethod
    def of(cls, paths: Sequence[KeyPath], forms: Sequence[Any]) -> Border:
        """The border of steps with these paths; an entry is compared with one of the same form (shape and dtype)."""
        at = {path: i for i, path in enumerate(paths)}
        entries = []
        for path, i in sorted(at.items()):
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
        self._says_anything = False
        self._paths: list[KeyPath] = []
        self._keys: tuple[Any, ...] = ()

    def begins(self, items: list[Any], capacity: int, rows: list[Any]) -> bool:
        """Whether somebody else's steps begin with `rows[0]`, before it is put behind the newest of `items`."""
        if not items:
            return False
        newest = items[self._lanes.next_slot() - 1]
        border = self._border
        if border is None or _keys(newest) != self._keys:
            border = self._look_at(newest)
        if not self._says_anything:  # most items of a list are no steps with both sides
            return False
        new = rows[0]
        flags = self._flags(newest)
        if any(flags):
            ended = border.either or all(flags)
            return ended and border.id is not None and self._same(newest, border.id, new, border.id)
        differs = [k for k, (at_root, under_next) in enumerate(border.entries)
                   if not self._same(newest, under_next, new, at_root)]  # fmt: skip
        return bool(differs) and bool(self._evidence(items, capacity, rows) & sum(1 << k for k in differs))

    def _look_at(self, item: Any) -> Border:
        found = []
        if has_keys(item):
            try:
                found = describe(item, 0)[1]
            except (TypeError, ValueError):
                found = []  # an item of objects, which are no steps
        before, names = self._border, [path for path, _ in found]
        border = Border.of(names, [(np.shape(v), getattr(v, "dtype", type(v))) for _, v in found])
        if before is not None and [names[i] for i, _ in border.entries] != [self._paths[i] for i, _ in before.entries]:
            # What is known of the entries of other items says nothing of these.
            self._lanes.store.set_border_evidence(0, self._lanes.store.lane(0)["published"] - 1, None)
        self._paths, self._border, self._keys = names, border, _keys(item)
        self._says_anything = border.says_anything
        return border

    def _flags(self, item: Any) -> list[bool]:
        assert self._border is not None
        found: list[bool] = []
        for i in self._border.done:
            flag = get_entry(item, self._paths[i])
            if isinstance(flag, Tensor) and flag.numel() == 1:
                found.append(bool(flag))
            elif flag is not None:
                found += map(bool, np.ravel(flag))
        return found

    def _same(self, a: Any, i: int, b: Any, j: int) -> bool:
        """Whether entry i of one item is entry j of another; what is missing or no array differs from nothing."""
        x, y = get_entry(a, self._paths[i]), get_entry(b, self._paths[j])
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            if x.shape != y.shape or x.dtype != y.dtype or torch.equal(x, y):
                return True
            return bool(_equal(x, y, ()))
        if isinstance(x, _ARRAYS) and isinstance(y, _ARRAYS):
            p, q = np.asarray(x), np.asarray(y)  # a single number is an observation, too
            if p.shape != q.shape or p.dtype != q.dtype or p.dtype.hasobject:
                return True
            return p.tobytes() == q.tobytes()
        return True

    def _joined(self, before: Any, after: Any) -> bool:
        """Whether two items that follow each other are of one trajectory, as far as their flags and ids say."""
        assert self._border is not None
        i = self._border.id
        return not any(self._flags(before)) and (i is None or self._same(before, i, after, i))

    def _agreeing(self, before: Any, after: Any) -> int:
        """The entries that agree, a bit each."""
        assert self._border is not None
        return sum(1 << k for k, (at_root, under_next) in enumerate(self._border.entries)
                   if self._same(before, under_next, after, at_root))  # fmt: skip

    def _evidence(self, items: list[Any], capacity: int, rows: list[Any]) -> int:
        """The entries, a bit each, that agreed between the last two joined items; else between the first two new."""
        store = self._lanes.store
        looked, agreed = store.border_evidence(0)
        lane, seams = store.lane(0), set(store.seams(0))
        newest = lane["published"] - 1
        for k in range(newest, max(lane["first"], looked, newest - LOOK_BACK), -1):
            before, after = items[(k - 1) % capacity], items[k % capacity]
            if k not in seams and self._joined(before, after):
                agreed = self._agreeing(before, after)
                break
        store.set_border_evidence(0, newest, agreed)
        if agreed is not None:
            return agreed
        return self._agreeing(rows[0], rows[1]) if len(rows) > 1 and self._joined(rows[0], rows[1]) else 0


def _keys(item: Any) -> tuple[Any, ...]:
    """The names by which `Border.of` could choose otherwise: an item may have others than the one before it."""
    if type(item) is TensorDict:
        item = item._tensordict
    if not isinstance(item, dict):
        return (type(item),)
    parts: list[Any] = [item, item.get("next"), item.get("collector")]
    inside = [part._tensordict if type(part) is TensorDict else part for part in parts]
    return tuple(tuple(part) if isinstance(part, dict) else type(part) for part in inside)


class ColumnBorder:
    """The border of steps that are kept as columns; works on their device and does not wait for it.

    Args:
        border: the entries that are compared.
        envs: environments of one step.
    """

    def __init__(self, border: Border, envs: int, device: torch.device) -> None:
        self._border = border
        self._envs = envs
        self._device = device
        self.recall(None)

    def recall(self, agreed: int | None) -> None:
        """Goes on from what a store knows: the entries that agreed between the last two joined steps, a bit each."""
        each = [bool((agreed or 0) >> k & 1) for k in range(len(self._border.entries))]
        # bool [1 + entries]: whether there were two, and of each entry whether it agreed.
        self.evidence = torch.tensor([agreed is not None, *each], device=self._device)

    def begins(self, newest: list[Tensor], new: list[Tensor]) -> Tensor:
        """Whether a trajectory begins at the first new step: bool [] on the device.

        Args:
            newest: leaves `[*envs, ...]` of the newest step.
            new: leaves `[time, *envs, ...]`.
        """
        one = (self._envs,)
        some, every = self._done(newest, one)
        first = [leaf[0] for leaf in new]
        begins = torch.zeros((), dtype=torch.bool, device=self._device)
        if self._border.id is not None:
            i = self._border.id
            begins = (every & _equal(newest[i], first[i], one)).any()
        if not self._border.entries:
            return begins
        agreed = self.evidence
        if len(new[0]) > 1:
            second = [leaf[1] for leaf in new]
            found = self._between(first, second, self._joined(first, second, one))
            agreed = torch.where(self.evidence[0], self.evidence, found)
        differs = (~self._agree(newest, first) & ~some).any(1)
        return begins | (differs & agreed[1:] & agreed[0]).any()

    def learn(self, newest: list[Tensor], new: list[Tensor], begins: Tensor) -> None:
        """Takes in the newest step and the first new one, of which `begins` was said."""
        if self._border.entries:
            first = [leaf[0] for leaf in new]
            self._learn(newest, first, self._joined(newest, first, (self._envs,)) & ~begins)

    def learn_all(self, steps: list[Tensor], rows: Tensor, cut: Tensor | None = None) -> None:
        """Takes in the last two joined of some steps.

        Args:
            steps: leaves `[time, *envs, ...]`.
            rows: int64 [n], which of these follow each other.
            cut: bool [n - 1, 1], the pairs between which a seam stands.
        """
        n = len(rows) - 1
        if n < 1 or not self._border.entries:
            return
        asked = {*self._border.done, self._border.id}  # who is joined is asked of all, what they are of one pair

        def told(at: Tensor) -> list[Tensor]:
            return [leaf[at] if i in asked else leaf for i, leaf in enumerate(steps)]

        before, after = rows[:-1], rows[1:]
        joined = self._joined(told(before), told(after), (n, self._envs))
        if cut is not None:
            joined = joined & ~cut
        last = (torch.arange(n, device=self._device) * joined.any(1)).max().reshape(1)
        pair = ([leaf[before[last]][0] for leaf in steps], [leaf[after[last]][0] for leaf in steps])
        self._learn(*pair, joined[last][0])

    def _learn(self, before: list[Tensor], after: list[Tensor], joined: Tensor) -> None:
        self.evidence = torch.where(joined.any(), self._between(before, after, joined), self.evidence)

    def _between(self, before: list[Tensor], after: list[Tensor], joined: Tensor) -> Tensor:
        """What two steps say that follow each other and are joined in these of the environments."""
        agreed = (self._agree(before, after) | ~joined).all(1)
        return torch.cat([joined.any().reshape(1), agreed])

    def _agree(self, before: list[Tensor], after: list[Tensor]) -> Tensor:
        return torch.stack([_equal(before[n], after[r], (self._envs,)) for r, n in self._border.entries])

    def _joined(self, before: list[Tensor], after: list[Tensor], lead: tuple[int, ...]) -> Tensor:
        """Whether steps `[*lead]` are of one trajectory, as far as their flags and ids say."""
        joined = ~self._done(before, lead)[0]
        if self._border.id is not None:
            i = self._border.id
            joined = joined & _equal(before[i], after[i], lead)
        return joined

    def _done(self, steps: list[Tensor], lead: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Whether some, and whether all of the flags of steps `[*lead]` are set."""
        if not self._border.done:
            never = torch.zeros(lead, dtype=torch.bool, device=self._device)
            return never, never
        flags = torch.cat([steps[i].reshape(*lead, -1).bool() for i in self._border.done], -1)
        some = flags.any(-1)
        return some, some if self._border.either else flags.all(-1)


def _equal(a: Tensor, b: Tensor, lead: tuple[int, ...]) -> Tensor:
    """bool [*lead]: whether all that stands behind the leading dimensions is the same, NaN where NaN is."""
    same = a == b
    if a.is_floating_point() or a.is_complex():
        same = same | (a.isnan() & b.isnan())
    return same.reshape(*lead, -1).all(-1)
