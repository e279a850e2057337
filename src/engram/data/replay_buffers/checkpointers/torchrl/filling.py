"""From saved steps to the rows of a storage, block by block."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch

from engram.checkpoint.protocols import RowSink
from engram.data.replay_buffers.checkpointers.torchrl.folders import Bytes
from engram.data.replay_buffers.checkpointers.torchrl.parts import Ages
from engram.data.replay_buffers.checkpointers.torchrl.steps import Leaf, Steps, blocks, layout_of


class TableSink(RowSink, Protocol):
    """A storage of packed rows that says what it is like already."""

    ndim: int

    def layout_state(self) -> dict[str, Any] | None: ...
    def counters(self) -> dict[str, Any]: ...


class Filling:
    """Steps on their way into a storage; where its writer stores each row's own index, with the index it gets there."""

    def __init__(self, steps: Steps, ages: Ages, sink: TableSink, index_key: str | None) -> None:
        self._index = None if index_key is None else _index_leaf(steps, index_key, sink)
        self._steps = steps if self._index is None else _Indexed(steps, self._index)
        self._ages, self._sink = ages, sink
        self._layout = layout_of(self._steps)
        self._state = {**self._layout.to_json(), "strands": list(steps.inner), "ndim": sink.ndim}
        nothing = {"border": {"looked": 0, "agreed": None}, "replaced": 0}
        lane = {"base": ages.base, "published": ages.published, "origin": ages.origin, "seams": [], **nothing}
        strands = math.prod(steps.inner)
        self._counters = {"lane_capacity": steps.capacity, "strands": strands, "lanes": [lane]}

    def check(self) -> None:
        """ValueError that says what does not fit; changes nothing."""
        self._sink.check_restore(self._state, self._counters)

    def read_everything(self) -> None:
        """Reads what `fill` will read: what cannot be read is found while nothing has been changed."""
        for _ in blocks(self._steps, self._layout):
            pass

    def fill(self) -> None:
        """Takes the rows over; the storage is empty after an error."""
        sink = self._sink
        sink.begin_restore(self._state, self._counters)
        try:
            same = sink.counters()["lane_capacity"] == self._steps.capacity
            if isinstance(self._steps, _Indexed):
                self._steps.oldest = self._ages.base % self._steps.capacity if same else 0
            for age, rows in blocks(self._steps, self._layout):
                sink.write_block(0, self._ages.base + age, rows)
            sink.end_restore()
        except BaseException:
            sink.abort_restore()
            raise


class _Indexed(Steps):
    """Steps with their own index: the slot of a step, or [time, environment, ...]."""

    def __init__(self, steps: Steps, index: Leaf) -> None:
        self._steps, self._index = steps, index
        self.kind, self.cursor = steps.kind, steps.cursor
        self.capacity, self.length, self.inner = steps.capacity, steps.length, steps.inner
        self.batches = steps.batches
        self.constants = steps.constants
        self._kept = [i for i, leaf in enumerate(steps.leaves) if leaf.path != index.path]
        self.leaves = [*(steps.leaves[i] for i in self._kept), index]
        self.oldest = 0

    def begin(self, first: int) -> None:
        self._steps.begin(first)

    def values(self, leaf: int, start: int, stop: int) -> Bytes:
        if leaf < len(self._kept):
            return self._steps.values(self._kept[leaf], start, stop)
        strands, n = math.prod(self.inner), stop - start
        places = np.zeros((strands, n, 1 + len(self.inner)), np.int64)
        places[:, :, 0] = (self.oldest + np.arange(start, stop)) % self.capacity
        for dim, one in enumerate(np.unravel_index(np.arange(strands), self.inner) if self.inner else ()):
            places[:, :, 1 + dim] = one[:, None]
        return places.view(np.uint8).reshape(strands, n, -1)


def _index_leaf(steps: Steps, key: str, sink: TableSink) -> Leaf | None:
    """The key that holds each row's own index; None where the steps, or the storage, have no place for it."""
    known = sink.layout_state()
    if (known is not None and [key] not in [leaf["path"] for leaf in known["leaves"]]) or () in [
        leaf.path for leaf in steps.leaves
    ]:
        return None
    return Leaf((key,), torch.int64, () if sink.ndim == 1 else (sink.ndim,))
