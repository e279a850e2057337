"""A checkpointer as a user writes it: a format, and what is planned for a save and for a load."""

import numpy as np
import pytest

from contracts.checkpointer import CheckpointerContract, RowRings
from contracts.each import each
from engram.data import LazyTensorStorage, ReplayBuffer, StorageCheckpointerBase
from engram.testing.helpers import state_of, steps


class Whole(StorageCheckpointerBase):
    """Saves the rows of each lane as one file."""

    format = "whole"
    needs = "read_block"

    def plan_save(self, source, previous=None):
        return WholeSave(source)

    def plan_restore(self, reader, state):
        return WholeRestore(reader, state)


class WholeSave:
    def __init__(self, source):
        self._source, self._layout, self._counters = source, source.layout_state(), source.counters()
        row_bytes = 0 if self._layout is None else self._layout["row_bytes"]
        self._spans = [
            (max(lane["base"], lane["published"] - self._counters["lane_capacity"]), lane["published"])
            for lane in self._counters["lanes"]
        ]
        self.nbytes = sum(stop - start for start, stop in self._spans) * self._counters["envs"] * row_bytes

    def write(self, writer):
        for lane, (start, stop) in enumerate([] if self._layout is None else self._spans):
            writer.write_file(f"storage/{lane}.bin", [self._source.read_block(lane, start, stop)])
        return {"layout": self._layout, "counters": self._counters, "spans": [list(span) for span in self._spans]}


class WholeRestore:
    def __init__(self, reader, state):
        self._reader, self._layout, self._counters = reader, state["layout"], state["counters"]
        self._spans = state["spans"] if self._layout is not None else []

    def check(self, sink):
        sink.check_restore(self._layout, self._counters)

    def load(self, sink):
        self.check(sink)
        blocks = [self._rows(lane, stop - start) for lane, (start, stop) in enumerate(self._spans)]
        sink.begin_restore(self._layout, self._counters)
        for lane, ((start, _), rows) in enumerate(zip(self._spans, blocks, strict=True)):
            sink.write_block(lane, start, rows)
        sink.end_restore()

    def _rows(self, lane, steps):
        rows = np.empty((self._counters["envs"], steps, self._layout["row_bytes"]), np.uint8)
        self._reader.read_into(f"storage/{lane}.bin", rows.reshape(-1))
        return rows


class TestWhole(CheckpointerContract):
    def make(self):
        return Whole()

    def make_filled(self, salt=0):
        rings = RowRings(lanes=2, strands=3)
        rings.append(0, 130, salt)
        rings.append(1, 7, salt)
        return rings

    def make_empty(self):
        return RowRings(lanes=2, strands=3)

    def make_misfit(self):
        rings = RowRings(lanes=2, strands=3, row_bytes=8)
        rings.append(0, 5)
        return rings


@each("held", [0, 20])
@each("blocking", [True, False])
def test_a_buffer_is_saved_and_loaded_with_it(tmp_path, held, blocking):
    rb, twin = (ReplayBuffer(storage=LazyTensorStorage(60), checkpointer=Whole()) for _ in range(2))
    rb.extend(steps(0, 90))
    handle = rb.dumps(tmp_path, blocking=blocking)
    if not blocking:
        handle.result()
    if held:
        twin.extend(steps(500, 500 + held))
    twin.loads(tmp_path)
    assert state_of(twin) == state_of(rb)


def test_a_checkpointer_without_plans_cannot_be_made():
    class Half(StorageCheckpointerBase):
        format = "half"

    with pytest.raises(TypeError, match="plan_restore"):
        Half()
