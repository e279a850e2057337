"""What the index of episodes must say, worked out from every step that was ever written."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from engram.data import ListStorage

Found = list[tuple[int, int, int, int]]


class World:
    """A storage with one lane or several, and plain lists of what was written to it."""

    def __init__(self, writers: list[Any], by_id: bool, dtype: torch.dtype) -> None:
        self.writers = writers  # a buffer for each lane
        self.by_id, self.dtype = by_id, dtype
        self.strands = 3 if writers[0].storage.ndim == 2 else 1
        self.values: list[list[list[int]]] = [[] for _ in writers]  # lane, write number, strand
        self.seams: list[set[int]] = [set() for _ in writers]
        self.base = [0] * len(writers)
        self.held: list[int | None] = [None] * len(writers)  # the lane of each writer
        self.left: list[dict[int, int]] = [{} for _ in writers]  # lanes that it gave back, and their ends then
        self.clock, self.newest = 0, [0] * len(writers)  # when the newest row of each lane was written

    @property
    def storage(self) -> Any:
        return self.writers[0].storage

    @property
    def capacity(self) -> int:
        return self.storage.max_size // len(self.writers) // self.strands

    # ---- what happens ----
    def append(self, writer: int, values: list[int]) -> None:
        held = self.held[writer]
        lane = self.lane_to_take(writer) if held is None else held
        steps = [[(v + 7 * strand) % 3 for strand in range(self.strands)] for v in values]
        if not self.by_id:
            steps = [[int(v == 0) for v in step] for step in steps]
        if held is None and self.left[writer].pop(lane, None) != len(self.values[lane]) > self.first(lane):
            self.seams[lane].add(len(self.values[lane]))
        self.held[writer] = lane
        self.values[lane] += steps
        self.newest[lane] = self.clock = self.clock + 1
        self.writers[writer].extend(self.batch(torch.tensor(steps)))

    def lane_to_take(self, writer: int) -> int:
        """The free lane that it gave back last and nobody wrote to since; else the emptiest, else the oldest."""
        free = set(range(len(self.writers))) - {*self.held}
        own = [lane for lane, end in self.left[writer].items() if lane in free and end == len(self.values[lane])]
        rows = {lane: len(self.values[lane]) - self.first(lane) for lane in free}
        return (
            own[-1] if own else min(free, key=lambda lane: (rows[lane], self.newest[lane] if rows[lane] else 0, lane))
        )

    def batch(self, values: Tensor) -> Any:
        """A batch of steps with these flags or ids, [time, strand]."""
        number = torch.arange(len(values)).unsqueeze(1).expand(values.shape)
        data = {"value": values.to(self.dtype).unsqueeze(-1), "n": number, "wide": torch.zeros(*values.shape, 3)}
        whole = TensorDict({"next": data}, values.shape)
        return whole.transpose(0, 1).contiguous() if self.strands > 1 else whole[:, 0]

    def row(self, value: int) -> TensorDict:
        """One step [1]."""
        data = {"value": torch.tensor([[value]]).to(self.dtype), "n": torch.zeros(1).long(), "wide": torch.ones(1, 3)}
        return TensorDict({"next": data}, [1])

    def edit(self, place: int, value: int) -> None:
        """Changes the flag or id of one stored step."""
        stored = range(self.first(0), len(self.values[0]))
        if not stored:
            return
        number, strand = stored[place % len(stored)], place % self.strands
        value = value if self.by_id else int(value == 0)
        self.values[0][number][strand] = value
        slot = torch.tensor([number % self.capacity])
        row = self.row(value)
        if self.strands > 1:
            self.storage[slot, torch.tensor([strand])] = row
        elif isinstance(self.storage, ListStorage):
            self.storage[slot] = [row[0]]
        else:
            self.storage[slot] = row

    def release(self, writer: int) -> None:
        self.writers[writer].storage.release()
        held = self.held[writer]
        if held is not None:
            self.left[writer].pop(held, None)  # so that it is the last
            self.left[writer][held] = len(self.values[held])
        self.held[writer] = None

    def empty(self) -> None:
        self.writers[0].empty()
        self.skip_to(-(-len(self.values[0]) // self.capacity) * self.capacity)

    def skip_to(self, at: int) -> None:
        """Numbers go on from here, and nothing before exists."""
        self.values[0] += [[0] * self.strands] * (at - len(self.values[0]))
        self.base[0], self.seams[0] = at, set()
        self.left[0].clear()

    # ---- what is true then ----
    def first(self, lane: int) -> int:
        return max(self.base[lane], len(self.values[lane]) - self.capacity)

    def trajectories(self) -> Found:
        """(lane, strand, start, length) of each."""
        found = []
        for lane, strand in itertools.product(range(len(self.writers)), range(self.strands)):
            column = [step[strand] for step in self.values[lane]]
            starts = [w for w in range(self.first(lane), len(column)) if self._starts(lane, column, w)]
            ends = [*starts[1:], len(column)]
            found += [(lane, strand, start, end - start) for start, end in zip(starts, ends, strict=False)]
        return found

    def _starts(self, lane: int, column: list[int], w: int) -> bool:
        if w == self.first(lane) or w in self.seams[lane]:
            return True
        return column[w] != column[w - 1] if self.by_id else column[w - 1] != 0

    def steps_of(self, slots: Tensor) -> list[tuple[int, int, int]]:
        """(lane, strand, write number) of the steps in these slots."""
        found = []
        for slot in slots.tolist():
            time, strand = divmod(slot, self.strands)
            lane, place = divmod(time, self.capacity)
            newest = len(self.values[lane]) - 1
            found.append((lane, strand, newest - (newest - place) % self.capacity))
        return found
