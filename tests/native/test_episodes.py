"""The native index and slices: what is refused before memory is touched, bounds of trajectories, marks."""

import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize("rule", [(0, 1), (4, 0), (4, 1, 4), (4, 1, 0, 4)])
def test_rules_whose_windows_may_hold_no_row_are_refused(rule):
    with pytest.raises(ValueError, match="at least one row"):
        _native.SliceRule(*rule)


def test_a_rule_of_windows_longer_than_any_memory_is_refused():
    with pytest.raises(ValueError, match=f"a slice of {2**60} rows is longer than any memory"):
        _native.SliceRule(2**60, 1)


@pytest.mark.parametrize(
    ("length", "least", "before", "after"), [(4, 3, 0, 0), (4, 1, 2, 0), (4, 2, 0, 1), (9, 1, 4, 3)]
)
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


def native_index(storage):
    leaf = storage.leaf(("done",))
    return _native.Episodes(False, leaf.offset, leaf.itemsize)


def test_bounds_and_slices_from_given_starts():
    whole = stored(14)  # rows 4 to 13: 3 of one trajectory, 7 of another
    index, store = native_index(whole), whole.lanes.store
    start, stop = index.bounds(store, torch.tensor([4, 6, 7, 0, 3]))
    assert (start.tolist(), stop.tolist()) == ([4, 4, 7, 7, 7], [7, 7, 14, 14, 14])
    batch, absent = index.starting_at(store, _native.SliceRule(4, 1), torch.tensor([5, 9]))
    assert batch.slots().tolist() == [5, 6, 9, 0, 1, 2] and batch.ids().tolist() == [0, 0, 1, 1, 1, 1] and not absent
    assert batch.last().flatten().tolist() == [False, True, False, False, False, True]
    assert batch.first().flatten().tolist() == [True, False, True, False, False, False]
    held = stored(8, 20)
    index, half = native_index(held), held.lanes.store
    assert index.bounds(half, torch.tensor([7, 8, 19]))[0].tolist() == [7, -1, -1]
    assert index.starting_at(half, _native.SliceRule(4, 1), torch.tensor([8, 7]))[1] == [0]
    for slot in (20, -1, 2**62):
        with pytest.raises(IndexError, match="outside 0 to 19"):
            index.bounds(half, torch.tensor([slot]))
        with pytest.raises(IndexError, match="outside 0 to 19"):
            index.starting_at(half, _native.SliceRule(4, 1), torch.tensor([slot]))


def test_marks_go_into_plain_bools_of_the_batchs_length_alone():
    storage = stored()
    batch, _ = native_index(storage).starting_at(storage.lanes.store, _native.SliceRule(3, 1), torch.tensor([0]))
    flags = torch.zeros(3, 2, dtype=torch.bool)
    assert batch.mark_last(flags) and flags.tolist() == [[False] * 2] * 2 + [[True] * 2]
    for wrong in (torch.zeros(4).bool(), torch.zeros(3), torch.zeros(2, 3).bool().t(), torch.tensor(True), [1]):
        assert not batch.mark_last(wrong) and not batch.mark_first(wrong)


def test_other_slices_take_the_places_of_those_that_exist():
    storage, rule = stored(), _native.SliceRule(2, 1)
    index, store = native_index(storage), storage.lanes.store
    old, _ = index.starting_at(store, rule, torch.tensor([0, 1, 2]))
    fresh, _ = index.starting_at(store, rule, torch.tensor([7]))
    assert old.replaced([1], fresh).slots().tolist() == [0, 1, 7, 8, 2, 3]
    with pytest.raises(IndexError):
        old.replaced([3], fresh)
    with pytest.raises(ValueError, match="one fresh slice"):
        old.replaced([0, 1], fresh)


def test_an_epoch_of_another_store_is_refused():
    index, storage, rule = EpisodeIndex(end_key="done"), stored(), _native.SliceRule(1, 1)
    for counts, lasts, said in (
        ([1, 1], [0, 0], "another store"),
        ([2**60], [1], "beyond"),
        ([1], [1, 2], "each strand"),
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
        store.publish(0, store.claim(0, 10), 10)
        assert index.draw(store, rule, seed, 2, fetch) is not None
        at = store.claim(0, 5)
        assert index.draw(store, rule, seed, 2, fetch) is None
        store.publish(0, at, 5)
        assert index.draw(store, rule, seed, 2, fetch) is not None


def test_a_seed_and_slots_are_int64_tensors():
    index, storage, rule = EpisodeIndex(end_key="done"), stored(), _native.SliceRule(1, 1)
    for wrong in (torch.tensor([1.0]), torch.tensor(1), [1]):
        with pytest.raises(TypeError):
            index.draw(storage, rule, wrong, 1)
        with pytest.raises(TypeError):
            native_index(storage).bounds(storage.lanes.store, wrong)
    with pytest.raises(ValueError, match="no seed"):
        index.draw(storage, rule, torch.empty(0, dtype=torch.int64), 1)
