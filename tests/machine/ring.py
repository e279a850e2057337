"""What a buffer holds, as plain Python: a ring of time steps, each a column of one step for each environment."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from tensordict import TensorDict

from engram.testing import numbers, of_numbers

Row = tuple[int, int]  # time slot and environment


class Step(NamedTuple):
    """One step: every value of its row follows from these."""

    n: int
    done: bool
    traj: int


def value_of(n: int) -> float:
    """The rank of a step for writers that keep the best; some are equal."""
    return float(n * 7919 % 101 // 3)


def priority_of(n: int) -> float:
    """The priority that a step brings along."""
    return n * 31 % 17 / 4


def is_init(n: int) -> bool:
    """The flag of a step that is said to begin a trajectory."""
    return n % 5 == 0


def as_data(columns: list[list[Step]], envs: int) -> TensorDict:
    """Columns as users give them: [envs, time], with envs=0 [time]."""
    n = torch.tensor([[s.n for s in column] for column in columns])
    done = torch.tensor([[s.done for s in column] for column in columns])
    traj = torch.tensor([[s.traj for s in column] for column in columns])
    n, done, traj = (t.T.contiguous() if envs else t[:, 0] for t in (n, done, traj))
    data = of_numbers(n)
    data["traj"], data["value"] = traj, torch.tensor([value_of(int(k)) for k in n.flatten()]).reshape(n.shape)
    data["td_error"] = torch.tensor([priority_of(int(k)) for k in n.flatten()]).reshape(n.shape)
    data["next", "done"], data["next", "terminated"] = done[..., None], done[..., None].clone()
    data["next", "truncated"] = torch.zeros_like(done[..., None])
    data["is_init"] = torch.tensor([is_init(int(k)) for k in n.flatten()]).reshape(*n.shape, 1)
    return data


def as_steps(batch: TensorDict) -> list[Step]:
    """The steps of a batch [n]; fails where a row is made of parts of several."""
    n = numbers(batch)
    assert batch["value"].tolist() == [value_of(k) for k in n], "value: a step is made of parts of several"
    done = batch["next", "terminated"].squeeze(-1).tolist()
    return [Step(*parts) for parts in zip(n, done, batch["traj"].tolist(), strict=True)]


class Source:
    """Steps as environments bring them: numbered, in trajectories of all lengths."""

    def __init__(self, envs: int, seed: int) -> None:
        self.columns = max(envs, 1)
        self._random = random.Random(seed)
        self._n = self._trajs = 0
        self._now = [(0, 0)] * self.columns  # id, and how many steps are left

    def take(self, count: int) -> list[list[Step]]:
        """The next `count` time steps."""
        return [[self._step(env) for env in range(self.columns)] for _ in range(count)]

    def cut(self) -> None:
        """The trajectories end here, and no flag says so: the id does."""
        self._now = [(traj, 0) for traj, _ in self._now]

    def _step(self, env: int) -> Step:
        traj, left = self._now[env]
        if not left:
            self._trajs += 1
            traj, left = self._trajs, self._random.choice([1, 2, 2, 3, 4, 5, 9])
        self._now[env] = (traj, left - 1)
        self._n += 1
        return Step(self._n - 1, left == 1, traj)


class Ring:
    """The stored columns. Slots are filled in order, so that the stored ones are 0, 1, 2, ..."""

    def __init__(self, capacity: int, envs: int) -> None:
        self.capacity, self.envs = capacity, envs
        self.slots: list[list[Step] | None] = [None] * capacity
        self.order: list[int] = [-1] * capacity  # write numbers
        self.next = 0
        self.cursor = self.written = 0
        self.seams: set[int] = set()  # no trajectory goes on over these write numbers
        self.seam_comes = False
        self.out_of_turn: set[int] = set()  # slots whose columns have write numbers of their own
        self.removed: set[Row] = set()
        self.base = 0  # the write number of the first row since all rows were replaced
        self.was_queue = False  # whether the store has ever been one
        self.counts = 0, 0, 0  # of the queue that it was last: rows missed, rows that were too old, the version

    def append(self, columns: list[list[Step]]) -> list[int]:
        """Stores columns behind the newest one; the slots."""
        if self.seam_comes:
            self.seams.add(self.next)
            self.seam_comes = False
        where = []
        for column in columns:
            slot = self.next % self.capacity
            self.slots[slot], self.order[slot] = column, self.next
            self.out_of_turn.discard(slot)
            self.removed -= {(slot, env) for env in range(len(column))}
            where.append(slot)
            self.next += 1
            self.written += 1
        self.cursor = self.next % self.capacity
        return where

    def replace(self, slot: int, column: list[Step]) -> None:
        """Another column, in place."""
        self.slots[slot] = column

    def replace_out_of_turn(self, slot: int, column: list[Step]) -> None:
        """Another column for one that is stored, which counts as written."""
        self.slots[slot] = column
        self.written += 1
        self.out_of_turn.add(slot)

    def empty(self, keep_count: bool) -> None:
        self.slots, self.order = [None] * self.capacity, [-1] * self.capacity
        self.next = -(-self.next // self.capacity) * self.capacity
        self.base, self.cursor = self.next, 0
        self.out_of_turn, self.removed = set(), set()
        self.written = self.written if keep_count else 0

    def moved(self, as_queue: bool) -> None:
        """Another storage has these rows now, which has been a queue or not."""
        if not as_queue:
            self.was_queue, self.counts = False, (0, 0, 0)
        self.base = min((self.order[slot] for slot in self.stored()), default=self.next)

    def stored(self) -> list[int]:
        return [slot for slot, column in enumerate(self.slots) if column is not None]

    def whole(self) -> list[int]:
        """Those of which no row was removed."""
        return sorted(set(self.stored()) - {slot for slot, _ in self.removed})

    def rows(self) -> list[Row]:
        """All stored rows in the order of slots."""
        return [(slot, env) for slot in self.stored() for env in range(max(self.envs, 1))]

    def step(self, row: Row) -> Step:
        column = self.slots[row[0]]
        assert column is not None, f"nothing is stored in slot {row[0]}"
        return column[row[1]]

    def trajectories(self, by_id: bool) -> list[list[Row]]:
        """Rows of each stored piece of a trajectory, in the order of time."""
        in_time = sorted(self.stored(), key=lambda slot: self.order[slot])
        found: list[list[Row]] = []
        for env in range(max(self.envs, 1)):
            last: Step | None = None
            for slot in in_time:
                step = self.step((slot, env))
                new = last is None or (step.traj != last.traj if by_id else last.done)
                if new or self.order[slot] in self.seams:
                    found.append([])
                found[-1].append((slot, env))
                last = step
        return found
