"""What every writer that goes round the ring must do. Inherit, and implement `make`."""

from __future__ import annotations

import pytest
import torch

from contracts.steps import numbers, steps
from engram.data import LazyTensorStorage, ListStorage, ReplayBuffer


class WriterContract:
    def make(self):
        raise NotImplementedError

    @pytest.fixture(params=[ListStorage, LazyTensorStorage], ids=lambda c: c.__name__)
    def rb(self, request):
        return ReplayBuffer(storage=request.param(10), writer=self.make(), batch_size=4)

    def test_the_cursor_is_where_the_next_step_goes(self, rb):
        cursors = [(rb.writer._cursor, rb.extend(steps(0, n))[0].item()) for n in (3, 4, 6, 25, 1)]
        assert cursors == [(0, 0), (3, 3), (7, 7), (3, 3), (8, 8)]
        assert rb.writer._cursor == 9 and "9" in repr(rb.writer)

    def test_of_more_than_fits_the_last_stay_and_indices_repeat(self, rb):
        assert rb.extend(steps(0, 25)).tolist() == [*range(10), *range(10), *range(5)]
        assert (rb.writer._cursor, rb.write_count) == (5, 25)
        assert numbers(rb[:]) == [20, 21, 22, 23, 24, 15, 16, 17, 18, 19]

    def test_a_new_writer_goes_on_where_the_old_one_stopped(self, rb):
        rb.extend(steps(0, 13))
        old = rb.writer
        assert rb.set_writer(self.make()) is old and rb.writer is not old
        assert rb.writer._cursor == 3 and rb.extend(steps(13, 15)).tolist() == [3, 4]

    def test_empty_puts_the_cursor_at_0(self, rb):
        rb.extend(steps(0, 13))
        rb.empty()
        assert rb.writer._cursor == 0 and rb.extend(steps(0, 2)).tolist() == [0, 1]

    def test_a_refused_batch_moves_no_cursor(self, rb):
        rb.extend(steps(0, 3))
        with pytest.raises((TypeError, ValueError)):
            rb.extend({"n": torch.zeros(3), "other": torch.zeros(4)})
        assert (rb.writer._cursor, rb.write_count, len(rb)) == (3, 3, 3)

    def test_its_state_can_be_saved(self, rb):
        rb.writer.load_state_dict(rb.writer.state_dict())
