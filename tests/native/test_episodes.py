"""The native index and slices: what is refused before memory is touched, trajectories, marks."""

import numpy as np
import pytest
import torch

from contracts.each import each
from engram import _native
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.store.episodes import EpisodeIndex


def stored(n=10, capacity=10):
    """A buffer with trajectories of 4, 3 and the rest."""
    rb = ReplayBuffer(storage=LazyTensorStorage(capacity))
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[3] = done[6] = True
    rb.extend({"done": done, "x": torch.arange(float(n))})
    return rb.storage


def test_a_flag_outside_the_rows_is_refused():
    store, seed, rule = stored().lanes.store, torch.tensor([1]), _native.SliceRule(1, 1)
    for offset, size in ((store.payload_bytes, 1), (store.payload_bytes - 3, 4), (2**63, 8), (2**64 - 1, 1)):
        index = _native.Episodes(False, offset, size)
        with pytest.raises(ValueError, match="lies outside the rows"):
            index.draw(store, rule, seed, 1)
    with pytest.raises(ValueError, match="1, 2, 4 or 8 bytes"):
        _native.Episodes(False, 0, 3)
    with pytest.raises(ValueError, match="must be fetched"):
        _native.Episodes(False, None, 1).draw(store, rule, seed, 1)
    counters = _native.Store.create(-1, 1, 10, 1, 0, 8, False, b"", bytes(16))
    with pytest.raises(ValueError, match="lies outside the rows"):
        _native.Episodes(False, 0, 1).draw(counters, rule, seed, 1)


def test_what_is_fetched_must_have_the_size_of_the_rows():
    store, index = stored().lanes.store, _native.Episodes(False, None, 8)
    for wrong in (np.zeros(9), np.zeros(10, np.int32), np.zeros((10, 2))[:, 0], [0] * 10, None):
        with pytest.raises(ValueError, match="contiguous array"):
            index.trajectories(store, fetch=lambda lane, start, stop, wrong=wrong: wrong)


@each("rule", [(0, 1), (4, 0), (4, 1, 4), (4, 1, 0, 4)])
def test_rules_whose_windows_may_hold_no_row_are_refused(rule):
    with pytest.raises(ValueError, match="at least one row"):
        _native.SliceRule(*rule)


def test_a_rule_of_windows_longer_than_any_memory_is_refused():
    with pytest.raises(ValueError, match=f"a slice of {2**60} rows is longer than any memory"):
        _native.SliceRule(2**60, 1)


@each(("length", "least", "before", "after"), [(4, 3, 0, 0), (4, 1, 2, 0), (4, 2, 0, 1), (9, 1, 4, 3)])
def test_windows_can_only_be_drawn_by_a_rule_that_leaves_each_trajectory_one(length, least, before, after):
    with pytest.raises(ValueError, match="each trajectory that is long enough has a window"):
        _native.SliceRule(length, least, before, after, by_window=True)
    _native.SliceRule(length, least, before, after)
    _native.SliceRule(length, least + 1, before, after, by_window=True)


def test_a_batch_beyond_any_memory_is_refused():
    index, storage = EpisodeIndex(end_key="done"), stored()
    batch = index.draw(storage, _native.SliceRule(2**45, 1, pad=True), torch.tensor([1]), 2**20)
    for rows in (batch.slots, batch.ids, batch.mask, batch.last):
        with pytest.raises(MemoryError):
            rows()


def slices_of_all(storage, length, least=1, first=0):
    """A slice of each trajectory that is long enough, from the `first` of them on, oldest first."""
    index, rule = EpisodeIndex(end_key="done"), _native.SliceRule(length, least)
    epoch = index.begin_epoch(storage, rule, 0, False)
    return index.take(storage, rule, epoch, first, torch.tensor([1]), len(epoch), 1)[0]


def test_trajectories_and_slices_of_them_go_round_the_ring():
    storage = stored(14)  # rows 4 to 13: 3 of one trajectory, 7 of another
    there = EpisodeIndex(end_key="done").trajectories(storage)
    assert (there.start.tolist(), there.length.tolist()) == ([4, 7], [3, 7])
    batch = slices_of_all(storage, 7)
    assert batch.slots().tolist() == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3] and batch.ids().tolist() == [0] * 3 + [1] * 7
    assert batch.last().flatten().nonzero().flatten().tolist() == [2, 9]
    assert batch.first().flatten().nonzero().flatten().tolist() == [0, 3]


def test_marks_go_into_plain_bools_of_the_batchs_length_alone():
    batch = slices_of_all(stored(), 4, 4)
    flags = torch.zeros(4, 2, dtype=torch.bool)
    assert batch.mark_last(flags) and flags.tolist() == [[False] * 2] * 3 + [[True] * 2]
    for wrong in (torch.zeros(5).bool(), torch.zeros(4), torch.zeros(2, 4).bool().t(), torch.tensor(True), [1]):
        assert not batch.mark_last(wrong) and not batch.mark_first(wrong)


def test_other_slices_take_the_places_of_those_that_exist():
    storage = stored()
    old, fresh = slices_of_all(storage, 10), slices_of_all(storage, 10, first=2)
    assert old.replaced([1], fresh).slots().tolist() == [0, 1, 2, 3, 7, 8, 9, 7, 8, 9]
    with pytest.raises(IndexError):
        old.replaced([3], fresh)
    with pytest.raises(ValueError, match="one fresh slice"):
        old.replaced([0, 1], fresh)


def test_an_epoch_of_another_store_is_refused():
    index, storage, rule = EpisodeIndex(end_key="done"), stored(), _native.SliceRule(1, 1)
    for counts, lasts, said in (
        ([1, 1], [0, 0], "another store"),
        ([2**60], [1], "beyond"),
        ([1], [1, 2], "each environment"),
    ):
        with pytest.raises(ValueError, match=said):
            epoch = _native.SliceEpoch(1, True, counts, lasts)
            index.take(storage, rule, epoch, 0, torch.tensor([1]), 1, 1)
    for counts, last in (([1], 2**62), ([10**6], 5), ([3], -(2**62))):  # what a damaged state could say
        epoch = _native.SliceEpoch(1, False, counts, [last])
        for position in (0, 5, 2**63):
            slices, _, _ = index.take(storage, rule, epoch, position, torch.tensor([1]), 5, 1)
            assert all(slot in range(10) for slot in slices.slots().tolist())


def test_the_running_trajectory_is_long_enough_again_when_its_writer_has_written():
    store = _native.Store.create(-1, 1, 10, 1, 0, 8, False, b"", bytes(16))
    index, rule, seed = _native.Episodes(True, None, 8), _native.SliceRule(8, 8), torch.tensor([1])

    def fetch(lane, start, stop):
        return np.zeros(stop - start, np.int64)

    for _ in range(3):
        _native.testing.publish(store, 0, _native.testing.claim(store, 0, 10), 10)
        assert index.draw(store, rule, seed, 2, fetch) is not None
        at = _native.testing.claim(store, 0, 5)
        assert index.draw(store, rule, seed, 2, fetch) is None
        _native.testing.publish(store, 0, at, 5)
        assert index.draw(store, rule, seed, 2, fetch) is not None


def test_a_seed_is_an_int64_tensor():
    index, storage, rule = EpisodeIndex(end_key="done"), stored(), _native.SliceRule(1, 1)
    for wrong in (torch.tensor([1.0]), torch.tensor(1), [1]):
        with pytest.raises(TypeError):
            index.draw(storage, rule, wrong, 1)
    with pytest.raises(ValueError, match="no seed"):
        index.draw(storage, rule, torch.empty(0, dtype=torch.int64), 1)
