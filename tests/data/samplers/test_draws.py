"""Draws of rows that are named by lane and sequence."""

from __future__ import annotations

import pytest
import torch

from engram.data import LazyTensorStorage, ReplayBuffer
from engram.data.replay_buffers.samplers.draw import Draw, DrawnSequences


@pytest.fixture
def rb():
    rb = ReplayBuffer(storage=LazyTensorStorage(8))
    rb.extend(torch.arange(10))
    return rb


def draw_of(rb, sequences, others=()):
    """A draw of these rows, for which these others are drawn when they are lost."""
    lanes, sequences = rb.storage.lanes, torch.tensor(sequences)
    slots = lanes.slots_of(0, sequences)
    draw = Draw(slots, slots, {"sequence": sequences}, "a test", lambda n: draw_of(rb, list(others[:n])))
    draw.store, draw.seen = lanes.store, DrawnSequences(sequences)
    return draw


def test_rows_that_are_stored_are_not_stale(rb):
    draw = draw_of(rb, [2, 9, 5])
    assert draw.seen.stale(draw.store, draw.slots) is None and draw.lost(None, None) == []
    assert rb.storage[draw.slots].tolist() == [2, 9, 5]


def test_rows_that_were_overwritten_before_the_draw_are_stale(rb):
    draw = draw_of(rb, [1, 4, 0])
    assert draw.seen.stale(draw.store, draw.slots) == [0, 2]


def test_slots_without_a_row_are_stale():
    rb = ReplayBuffer(storage=LazyTensorStorage(8))
    rb.extend(torch.arange(3))
    draw = draw_of(rb, [1, 5])
    assert draw.seen.stale(draw.store, draw.slots) == [1]


def test_rows_that_are_overwritten_after_the_draw_are_lost_and_others_take_their_places(rb):
    draw = draw_of(rb, [2, 6, 3, 7], others=[8, 9])
    rb.extend(torch.arange(10, 12))
    assert draw.lost(None, None) == [0, 2]
    again = draw.redraw([0, 2])
    assert again.lost(None, None) == []
    assert rb.storage[again.slots].tolist() == [8, 6, 9, 7]
    assert again.info["sequence"].tolist() == again.seen.sequences.tolist() == [8, 6, 9, 7]
