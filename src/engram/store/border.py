"""The border between stored and appended steps: whether the first new step continues the newest stored one.

Steps are joined to trajectories by their flags and ids. Two collectors that both count their trajectories from 0, or
two runs of a program, give rows that look joined and are not. So where a batch is appended:

- the newest stored step is done and has the same trajectory id as the first new one: a seam;
- it is not done: the entries that exist both at the root and under `"next"` are compared byte for byte, whatever the
  ids are. One differs: a seam. An entry counts only if it agreed between the last two joined steps, in every
  environment in which they are joined, so that n-step rows and entries that a transform changes on one side only put
  no seams.

Which entries agreed (the *evidence*) is part of the lane's counters in the store and of checkpoints, so that it
outlives those two steps. `border.hpp` does this for packed rows; the classes here for lists of items and for columns.
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
from engram.store.row_form import IDS

_NOT_COMPARED = {"done", "terminated", "truncated", "reward", "traj_ids", "episode", "index", "collector"}
_MAX_ENTRIES = 63  # that are compared; the store has a bit for each
_ARRAYS = np.ndarray | np.generic | bool | int | float | complex
LOOK_BACK = 4096  # steps among which two joined ones are searched


@dataclasses.dataclass(frozen=True)
class Border:
    """Which leaves decide about a seam, as positions in a list of paths.

    Attributes:
        entries: each entry at the root and the same under `"next"`, sorted by name: the same order in every storage.
        done: the flags under `"next"` that end a trajectory.
        either: one set flag is enough (`terminated` and `truncated`); else a step with several is done when all are.
        id: the trajectory's id; None where there is none.
    """

    entries: tuple[tuple[int, int], ...]
    done: tuple[int, ...]
    either: bool
    id: int | None

    @classmethod
    def of(cls, paths: Sequence[KeyPath], forms: Sequence[Any]) -> Border:
        """The border of steps with these paths; only entries of one form (shape and dtype) are compared."""
        at = {path: i for i, path in enumerate(paths)}
        entries = []
        for path, i in sorted(at.items(), key=lambda entry: [(isinstance(part, str), part) for part in entry[0]]):
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
        ids = next((at[path] for path in IDS if path in at), None)
        return cls(tuple(entries[:_MAX_ENTRIES]), tuple(done), either, ids)

    @property
    def decides(self) -> bool:
        """Whether a seam can follow from these entries."""
        return bool(self.entries) or (self.id is not None and bool(self.done))


class ItemBorder:
    """The border of items that are stored one by one.

    Args:
        lanes: counts the items.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._border: Border | None = None
        self._decides = False
        self._paths: list[KeyPath] = []
        self._keys: tuple[Any, ...] = ()

    def begins(self, items: list[Any], capacity: int, rows: Any) -> bool:
        """Whether a trajectory begins at `rows[0]`, which is about to be appended to `items`."""
        if not items:
            return False
        newest = items[self._lanes.next_slot() - 1]
        border = self._border
        if border is None or _keys(newest) != self._keys:
            border = self._update_border(newest)
        if not self._decides:  # as for most items of a list, which are no steps with both sides
            return False
        new = rows[0]
        flags = self._flags(newest)
        if any(flags):
            ended = border.either or all(flags)
            return ended and border.id is not None and self._same(newest, border.id, new, border.id)
        differs = [k for k, (at_root, under_next) in enumerate(border.entries)
                   if not self._same(newest, under_next, new, at_root)]  # fmt: skip
        return bool(differs) and bool(self._evidence(items, capacity, rows) & sum(1 << k for k in differs))

    def _update_border(self, item: Any) -> Border:
        leaves = []
        if has_keys(item):
            try:
                leaves = describe(item, 0)[1]
            except (TypeError, ValueError):
                leaves = []  # an item of objects, which is no step
        before, paths = self._border, [path for path, _ in leaves]
        border = Border.of(paths, [(np.shape(v), getattr(v, "dtype", type(v))) for _, v in leaves])
        if before is not None and [paths[i] for i, _ in border.entries] != [self._paths[i] for i, _ in before.entries]:
            # The evidence is about other entries.
            self._lanes.store.set_border_evidence(0, self._lanes.store.lane(0)["published"] - 1, None)
        self._paths, self._border, self._keys = paths, border, _keys(item)
        self._decides = border.decides
        return border

    def _flags(self, item: Any) -> list[bool]:
        assert self._border is not None
        flags: list[bool] = []
        for i in self._border.done:
            flag = get_entry(item, self._paths[i])
            if isinstance(flag, Tensor) and flag.numel() == 1:
                flags.append(bool(flag))
            elif flag is not None:
                flags += map(bool, np.ravel(flag))
        return flags

    def _same(self, a: Any, i: int, b: Any, j: int) -> bool:
        """Whether entry i of one item equals entry j of another; entries that are missing or no arrays are equal."""
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
        """Whether two consecutive items are of one trajectory by their flags and ids."""
        assert self._border is not None
        i = self._border.id
        return not any(self._flags(before)) and (i is None or self._same(before, i, after, i))

    def _agreeing(self, before: Any, after: Any) -> int:
        """The entries that agree, a bit each."""
        assert self._border is not None
        return sum(1 << k for k, (at_root, under_next) in enumerate(self._border.entries)
                   if self._same(before, under_next, after, at_root))  # fmt: skip

    def _evidence(self, items: list[Any], capacity: int, rows: list[Any]) -> int:
        """The entries, a bit each, that agreed between the last two joined items; without such, the first two new."""
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
    """The names that `Border.of` depends on; two items with the same names have the same border."""
    if type(item) is TensorDict:
        item = item._tensordict
    if not isinstance(item, dict):
        return (type(item),)
    parts: list[Any] = [item, item.get("next"), item.get("collector")]
    inside = [part._tensordict if type(part) is TensorDict else part for part in parts]
    return tuple(tuple(part) if isinstance(part, dict) else type(part) for part in inside)


class ColumnBorder:
    """The border of steps that are stored as columns; computed on their device, without waiting for it.

    Args:
        border: the entries that are compared.
        envs: environments of one step.
    """

    def __init__(self, border: Border, envs: int, device: torch.device) -> None:
        self._border = border
        self._envs = envs
        self._device = device
        self.restore(None)

    def restore(self, agreed: int | None) -> None:
        """Takes the evidence of a store: the entries that agreed between the last two joined steps, a bit each."""
        each = [bool((agreed or 0) >> k & 1) for k in range(len(self._border.entries))]
        # bool [1 + entries]: whether two joined steps exist, and for each entry whether it agreed.
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
            new_evidence = self._between(first, second, self._joined(first, second, one))
            agreed = torch.where(self.evidence[0], self.evidence, new_evidence)
        differs = (~self._agree(newest, first) & ~some).any(1)
        return begins | (differs & agreed[1:] & agreed[0]).any()

    def learn(self, newest: list[Tensor], new: list[Tensor], begins: Tensor) -> None:
        """Updates the evidence by the newest step and the first new one; `begins` is what `begins()` returned."""
        if self._border.entries:
            first = [leaf[0] for leaf in new]
            self._learn(newest, first, self._joined(newest, first, (self._envs,)) & ~begins)

    def learn_all(self, steps: list[Tensor], rows: Tensor, cut: Tensor | None = None) -> None:
        """Updates the evidence by the last two joined of some steps.

        Args:
            steps: leaves `[time, *envs, ...]`.
            rows: int64 [n], consecutive ones among these.
            cut: bool [n - 1, 1], the pairs with a seam between them.
        """
        n = len(rows) - 1
        if n < 1 or not self._border.entries:
            return
        joining = {*self._border.done, self._border.id}  # leaves that are read of all steps; others of one pair only

        def select(at: Tensor) -> list[Tensor]:
            return [leaf[at] if i in joining else leaf for i, leaf in enumerate(steps)]

        before, after = rows[:-1], rows[1:]
        joined = self._joined(select(before), select(after), (n, self._envs))
        if cut is not None:
            joined = joined & ~cut
        last = (torch.arange(n, device=self._device) * joined.any(1)).max().reshape(1)
        pair = ([leaf[before[last]][0] for leaf in steps], [leaf[after[last]][0] for leaf in steps])
        self._learn(*pair, joined[last][0])

    def _learn(self, before: list[Tensor], after: list[Tensor], joined: Tensor) -> None:
        self.evidence = torch.where(joined.any(), self._between(before, after, joined), self.evidence)

    def _between(self, before: list[Tensor], after: list[Tensor], joined: Tensor) -> Tensor:
        """The evidence of two consecutive steps that are joined in these environments."""
        agreed = (self._agree(before, after) | ~joined).all(1)
        return torch.cat([joined.any().reshape(1), agreed])

    def _agree(self, before: list[Tensor], after: list[Tensor]) -> Tensor:
        return torch.stack([_equal(before[n], after[r], (self._envs,)) for r, n in self._border.entries])

    def _joined(self, before: list[Tensor], after: list[Tensor], lead: tuple[int, ...]) -> Tensor:
        """Whether steps `[*lead]` are of one trajectory by their flags and ids."""
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
    """bool [*lead]: whether all values behind the leading dimensions are equal; NaN equals NaN."""
    same = a == b
    if a.is_floating_point() or a.is_complex():
        same = same | (a.isnan() & b.isnan())
    return same.reshape(*lead, -1).all(-1)
