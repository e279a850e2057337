"""RandomSampler and SamplerWithoutReplacement: contract, epochs, and statistics at the 1e-6 level."""

import copy
import math
import pickle
import threading
from collections import Counter
from functools import partial
from itertools import permutations

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from contracts.waiting import is_taken
from engram import _native
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from engram.errors import CheckpointMisfitError
from engram.store.places import LaneCount
from engram.testing import SamplerContract, chi_square, env_steps, numbers, steps


class TestRandomSampler(SamplerContract):
    def make(self):
        return RandomSampler()


class TestSamplerWithoutReplacement(SamplerContract):
    def make(self):
        return SamplerWithoutReplacement()


class TestSamplerWithoutReplacementInOrder(SamplerContract):
    def make(self):
        return SamplerWithoutReplacement(drop_last=True, shuffle=False)

    # 4 of 3 stored steps are no full batch
    def test_only_stored_steps_are_drawn_and_info_says_which(self, rb):
        rb.extend(steps(0, 13))
        assert [rb.sample(return_info=True)[1]["index"].tolist() for _ in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


# ---- statistics ----
def assert_uniform(drawn, cells):
    counts = Counter(drawn)
    assert set(counts) <= set(cells)
    assert chi_square([counts[c] for c in cells]) > 1e-6


def filled(path, lanes=1, ndim=1, writes=(30,), capacity=40, lists=False):
    if lanes > 1:  # each object of a store takes a lane of its own, as another process would
        rbs = [
            ReplayBuffer(storage=LazyMemmapStorage(capacity * lanes, path, existsok=True, lanes=lanes)) for _ in writes
        ]
        for k, (rb, n) in enumerate(zip(rbs, writes, strict=True)):
            rb.extend(steps(1000 * k, 1000 * k + n))
        return rbs[0]
    rb = ReplayBuffer(storage=ListStorage(capacity) if lists else LazyTensorStorage(capacity, ndim=ndim))
    for n in writes:
        rb.extend(env_steps(3, 0, n) if ndim == 2 else steps(0, n))
    return rb


BUFFERS = {
    "partly filled": {},
    "full": {"writes": (40,)},
    "wrapped": {"writes": (57,)},
    "one step": {"writes": (1,)},
    "list": {"writes": (57,), "lists": True},
    "environments": {"ndim": 2, "writes": (5,)},
    "environments, wrapped": {"ndim": 2, "writes": (20,)},
    "lanes of different fill": {"lanes": 3, "writes": (5, 57, 17)},
    "an empty lane": {"lanes": 3, "writes": (5, 30)},
}


@each("name", BUFFERS)
def test_random_draws_are_uniform_over_what_is_stored(tmp_path, name):
    torch.manual_seed(0)
    rb = filled(tmp_path, **BUFFERS[name])
    flat = [n for part in numbers(rb[:]) for n in (part if isinstance(part, list) else [part])]
    assert len(set(flat)) == len(rb) == len(flat)
    drawn = numbers(rb.sample(20_000)) + [n for _ in range(400) for n in numbers(rb.sample(5))]
    if len(flat) > 1:
        assert_uniform(drawn, flat)


def test_the_statistics_find_a_small_bias():
    torch.manual_seed(0)
    drawn = torch.randint(40, (110_000,))
    assert_uniform(drawn.tolist(), range(40))
    drawn[:1500] = 7
    with pytest.raises(AssertionError):
        assert_uniform(drawn.tolist(), range(40))


@pytest.mark.deep
def test_successive_draws_are_independent(tmp_path):
    torch.manual_seed(0)
    rb = filled(tmp_path, writes=(9,), capacity=9)
    drawn = numbers(rb.sample(40_000))
    assert_uniform(list(zip(drawn[::2], drawn[1::2], strict=True)), [(a, b) for a in range(9) for b in range(9)])
    first = [numbers(rb.sample(2)) for _ in range(4_000)]
    pairs = [(a[0], b[0]) for a, b in zip(first[::2], first[1::2], strict=True)]
    assert_uniform(pairs, [(a, b) for a in range(9) for b in range(9)])


@pytest.mark.parametrize("n", [2, 3, 4, pytest.param(5, marks=pytest.mark.long)])
def test_every_order_of_a_small_epoch_is_as_likely(n):
    torch.manual_seed(0)
    rb = ReplayBuffer(storage=LazyTensorStorage(n), sampler=SamplerWithoutReplacement())
    rb.extend(torch.arange(n))
    orders = [tuple(rb.sample(n).tolist()) for _ in range(120 * math.factorial(n) + 2000)]
    assert_uniform(orders, list(permutations(range(n))))


def test_every_order_of_a_small_epoch_is_as_likely_across_batches():
    torch.manual_seed(0)
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=SamplerWithoutReplacement())
    rb.extend(torch.arange(6))
    orders = [tuple(rb.sample(3).tolist() + rb.sample(3).tolist()) for _ in range(5000)]
    assert_uniform(orders, list(permutations([2, 3, 4, 5])))


def test_places_in_a_large_permutation_are_uniform():
    n, places = 70_000, []
    for key in range(3000):
        places += [p * 50 // n for p in _native.testing.permutation(key * 7919, n, 17, 2)]
    assert_uniform(places, range(50))


# ---- epochs ----
@each("name", BUFFERS)
@each("shuffle", [True, False])
def test_every_step_is_drawn_once_in_each_epoch(tmp_path, name, shuffle):
    rb = filled(tmp_path, **BUFFERS[name])
    rb.set_sampler(SamplerWithoutReplacement(shuffle=shuffle))
    stored = sorted(n for part in numbers(rb[:]) for n in (part if isinstance(part, list) else [part]))
    for _ in range(3):
        seen = []
        while len(seen) < len(stored):
            seen += numbers(rb.sample(7))
        assert sorted(seen) == stored


@pytest.mark.parametrize("drop_last, sizes", [(False, [4, 4, 2]), (True, [4, 4])])
def test_an_epoch_of_10_in_batches_of_4(drop_last, sizes):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(drop_last), batch_size=4)
    rb.extend(torch.arange(10))
    for _ in range(3):
        batches = [batch.tolist() for batch in rb]
        assert [len(b) for b in batches] == sizes
        assert len({n for b in batches for n in b}) == sum(sizes)
    for k in range(6):
        assert len(rb.sample()) == sizes[k % len(sizes)]


def test_in_order_means_in_the_order_of_slots():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=4)
    rb.extend(torch.arange(13))
    assert [batch.tolist() for batch in rb] == [[10, 11, 12, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("make", [SamplerWithoutReplacement, partial(SliceSamplerWithoutReplacement, slice_len=1)])
def test_any_value_that_is_true_or_false_is_a_setting_of_epochs(make):
    sampler = make(shuffle=0, drop_last=1)
    assert (sampler.shuffle, sampler.drop_last) == (False, True)
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
    rb.extend(TensorDict({"episode": torch.arange(10)}, [10]))
    assert [len(batch) for batch in rb] == [4, 4]
    sampler.shuffle, sampler.drop_last = 1, None
    assert sampler.shuffle is True and sampler.drop_last is False
    assert sum(len(batch) for batch in rb) == 10


def test_what_a_copy_of_a_sampler_draws_leaves_the_epoch_of_the_other_where_it_is():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=3)
    rb.extend(torch.arange(10))
    rb.sample()
    twin = ReplayBuffer(storage=rb.storage, sampler=copy.copy(rb.sampler), batch_size=3)
    assert [twin.sample().tolist() for _ in range(2)] == [[3, 4, 5], [6, 7, 8]]
    assert rb.sample().tolist() == [3, 4, 5]


def test_a_copy_of_a_sampler_waits_for_a_thread_that_changes_what_it_holds():
    sampler, copies = SamplerWithoutReplacement(shuffle=True), []
    thread = threading.Thread(target=lambda: copies.append(copy.copy(sampler)))
    with sampler.lock:  # as in every draw
        thread.start()
        thread.join(0.1)
        sampler.shuffle = False
    thread.join()
    assert copies[0].shuffle is False


def test_steps_appended_in_an_epoch_join_the_next_one():
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SamplerWithoutReplacement(), batch_size=4)
    rb.extend(torch.arange(10))
    first = rb.sample().tolist()
    rb.extend(torch.arange(10, 16))
    first += rb.sample().tolist() + rb.sample().tolist()
    assert sorted(first) == list(range(10))
    assert sorted(n for batch in rb for n in batch.tolist()) == list(range(16))


@pytest.mark.parametrize("shuffle", [True, False])
def test_steps_overwritten_in_an_epoch_are_skipped(shuffle):
    for seed in range(20):
        torch.manual_seed(seed)
        sampler = SamplerWithoutReplacement(shuffle=shuffle)
        rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=3)
        rb.extend(torch.arange(10))
        seen = rb.sample().tolist()
        rb.extend(torch.arange(10, 14))
        while not sampler.ran_out:
            seen += rb.sample().tolist()
        assert sorted(set(seen) | set(range(4))) == list(range(10)) and len(seen) == len(set(seen))
        assert sorted(n for batch in rb for n in batch.tolist()) == list(range(4, 14))


def test_an_epoch_that_is_overwritten_whole_ends_and_the_next_begins():
    for drop_last in (False, True):
        sampler = SamplerWithoutReplacement(drop_last)
        rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=3)
        rb.extend(torch.arange(10))
        rb.sample()
        rb.extend(torch.arange(10, 22))
        assert rb.sample().min() >= 12


def test_a_batch_larger_than_what_is_stored_is_the_whole_epoch_or_an_error():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement())
    rb.extend(torch.arange(6))
    assert sorted(rb.sample(8).tolist()) == list(range(6))
    other = ReplayBuffer(storage=rb.storage, sampler=SamplerWithoutReplacement(drop_last=True), batch_size=8)
    with pytest.raises(ValueError, match=r"batch_size=8 is greater than the storage capacity that is in use, 6 steps"):
        other.sample()
    assert len(other.sample(6)) == 6


@pytest.mark.parametrize(
    "sampler", [SamplerWithoutReplacement, lambda **how: SliceSamplerWithoutReplacement(slice_len=2, **how)]
)
def test_batches_that_are_all_full_need_a_size_that_the_storage_can_hold(sampler):
    with pytest.raises(ValueError, match="predictable batch-size"):
        ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler(drop_last=True))
    with pytest.raises(ValueError, match="batch_size=12 is greater than the storage capacity of 10"):
        ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler(drop_last=True), batch_size=12)
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    old = rb.sampler
    with pytest.raises(ValueError, match="predictable batch-size"):
        rb.set_sampler(sampler(drop_last=True))
    assert rb.sampler is old
    ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler(drop_last=True), batch_size=10)
    ReplayBuffer(storage=ListStorage(), sampler=sampler(drop_last=True), batch_size=10)
    ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler(), batch_size=12)


def test_members_made_of_parts_know_the_batch_size_of_their_ensemble():
    def parts():
        return {
            "storages": [LazyTensorStorage(10) for _ in range(2)], "writers": [RoundRobinWriter() for _ in range(2)],
            "samplers": [SamplerWithoutReplacement(drop_last=True) for _ in range(2)],
        }  # fmt: skip

    with pytest.raises(ValueError, match="predictable batch-size"):
        ReplayBufferEnsemble(**parts())
    rb = ReplayBufferEnsemble(**parts(), batch_size=6)
    for k in range(2):
        rb[k].extend(torch.arange(7))
    assert rb.sample().shape == (2, 3)


@each("shuffle", [True, False])
@each("ndim", [1, 2])
def test_remaining_rows_of_an_epoch_can_be_read(shuffle, ndim):
    sampler = SamplerWithoutReplacement(shuffle=shuffle)
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=ndim), sampler=sampler, batch_size=5)
    assert sampler._sample_list is None
    rb.extend(torch.arange(12) if ndim == 1 else torch.arange(12).reshape(6, 2).T)
    assert sampler._sample_list is None
    for left in (7, 2, 0, 7):
        before = sampler._sample_list
        batch = rb.sample()
        assert len(sampler._sample_list) == left and sampler._sample_list.dtype is torch.int64
        if before is not None and len(before):
            assert batch.tolist() == before[:5].tolist() and sampler._sample_list.tolist() == before[5:].tolist()
    left = sampler._sample_list
    other = ReplayBuffer(storage=LazyTensorStorage(12, ndim=ndim), sampler=SamplerWithoutReplacement(shuffle=shuffle))
    other.load_state_dict(rb.state_dict())
    assert torch.equal(other.sampler._sample_list, left)
    assert pickle.loads(pickle.dumps(sampler))._sample_list is None


def test_remaining_trajectories_of_an_epoch_can_be_read():
    sampler = SliceSamplerWithoutReplacement(slice_len=1, traj_key="episode")
    rb = ReplayBuffer(storage=LazyTensorStorage(12), sampler=sampler, batch_size=2)
    rb.extend({"episode": torch.arange(5)})
    assert sampler._sample_list is None
    seen = rb.sample()["episode"].tolist()
    left = sampler._sample_list.tolist()
    assert sorted(seen + left) == list(range(5)) and rb.sample()["episode"].tolist() == left[:2]
    rb.sample()
    assert sampler._sample_list.tolist() == []


@each("make", [SamplerWithoutReplacement, partial(SliceSamplerWithoutReplacement, num_slices=1)])
def test_no_thread_draws_while_it_is_read_what_is_left_of_an_epoch(make, monkeypatch):
    sampler, taken = make(), []
    monkeypatch.setattr(type(sampler.storage_state), "rest", lambda epochs: taken.append(is_taken(sampler.lock)))
    assert sampler._sample_list is None and taken == [True]


class SaysWhoWaits(RandomSampler):
    """A sampler that notes whether other threads can draw while its state is read or replaced."""

    def __init__(self):
        super().__init__()
        self.taken = []

    def state_dict(self):
        self.taken.append(is_taken(self.lock))
        return {}

    def load_state_dict(self, state):
        self.taken.append(is_taken(self.lock))


def test_no_thread_draws_while_a_sampler_is_saved_or_loaded_alone(tmp_path):
    sampler = SaysWhoWaits()
    sampler.dumps(tmp_path)
    saved = len(sampler.taken)
    sampler.loads(tmp_path)
    assert 0 < saved < len(sampler.taken) and all(sampler.taken)


def test_one_stored_step_can_be_sampled():
    sampler, storage = RandomSampler(), LazyTensorStorage(4)
    rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=2)
    assert not sampler.can_sample(storage, 2)
    rb.extend(torch.arange(1))
    assert sampler.can_sample(storage, 2) and rb.sample().tolist() == [0, 0]
    rb.set_sampler(PrioritizedSampler(4, 1.0, 1.0))
    rb.update_priority(0, 0.25)
    assert rb.sampler.can_sample(storage, 2) and rb.sample().tolist() == [0, 0]


def test_empty_ends_the_epoch():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4)
    rb.extend(torch.arange(10))
    rb.sample()
    rb.empty()
    rb.extend(torch.arange(20, 25))
    assert sorted(n for batch in rb for n in batch.tolist()) == list(range(20, 25))


def test_a_saved_epoch_of_other_settings_is_refused_and_nothing_changes(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4)
    rb.extend(torch.arange(10))
    rb.dumps(tmp_path / "saved")
    for sampler, said in ((SamplerWithoutReplacement(drop_last=True), "drop_last"), (RandomSampler(), "RandomSampler")):
        other = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
        other.extend(torch.arange(50, 53))
        for load in (lambda rb=other: rb.loads(tmp_path / "saved"), lambda r=other: r.load_state_dict(rb.state_dict())):
            with pytest.raises(ValueError, match=said):
                load()
        assert other[:].tolist() == [50, 51, 52]


@each("wrong", [[5, 7, 9], torch.tensor([5.0, 7.0, 9.0]), torch.tensor([[5, 7, 9]])])
def test_rows_that_a_saved_epoch_lists_are_a_vector_of_int64(wrong):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=2)
    rb.extend(torch.arange(10))
    rb.sample()
    state = rb.sampler.state_dict()
    state["epoch"].update(position=0, listed=torch.tensor([5, 7, 9]), envs=1)
    rb.sampler.load_state_dict(state)
    assert rb.sample().tolist() == [5, 7]
    state["epoch"]["listed"] = wrong
    with pytest.raises(CheckpointMisfitError, match=r"epoch\.listed in the state of the sampler .* tensor int64 of 1"):
        rb.sampler.load_state_dict(state)
    assert rb.sample().tolist() == [9]


@pytest.mark.parametrize("sampler", [SamplerWithoutReplacement, RandomSampler])
def test_no_draw_looks_at_the_seam_of_every_row(monkeypatch, sampler):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler(), batch_size=4)
    rb.extend(torch.arange(10))
    monkeypatch.setattr(type(rb.storage.lanes), "states", lambda lanes: pytest.fail("it did"))
    assert [len(rb.sample()) for _ in range(3)][:2] == [4, 4]


def test_an_epoch_takes_no_memory_of_the_size_of_the_data():
    import tracemalloc

    rb = ReplayBuffer(storage=LazyTensorStorage(3_000_000), sampler=SamplerWithoutReplacement(), batch_size=64)
    rb.extend(torch.zeros(3_000_000, dtype=torch.int8))
    from resource import RUSAGE_SELF, getrusage

    rb.sample()
    before = getrusage(RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    rb.sampler.empty()
    for _ in range(100):
        rb.sample()
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 3000  # KB


def test_an_epoch_whose_oldest_rows_were_overwritten_is_loaded_into_lanes_of_any_length(tmp_path):
    saved = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4)
    saved.extend(torch.arange(10))
    saved.sample()
    saved.extend(torch.arange(10, 15))
    saved.dumps(tmp_path)
    for capacity, lanes in ((10, 1), (20, 1), (20, 2), (60, 3)):
        storage = LazyTensorStorage(capacity, lanes=LaneCount(lanes), shared=lanes > 1)
        rb = ReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(), batch_size=4)
        rb.extend(torch.arange(100, 103))
        rb.loads(tmp_path)
        drawn = [n for batch in rb for n in batch.tolist()]
        assert len(rb) == 10 and len(set(drawn)) == len(drawn) and set(drawn) <= set(range(5, 15))


@pytest.mark.parametrize("sampler", [RandomSampler, lambda: PrioritizedSampler(1, 0.5, 0.5)])
def test_a_ring_of_one_row_never_looks_empty_while_it_is_written(sampler):
    rb = ReplayBuffer(storage=LazyTensorStorage(1), sampler=sampler(), batch_size=2)
    rb.extend(torch.zeros(1))
    store = rb.storage.lanes.store
    at = _native.testing.claim(store, 0, 1)
    threading.Timer(0.002, lambda: _native.testing.publish(store, 0, at, 1)).start()
    assert len(rb.sample()) == 2
    rb.empty()
    with pytest.raises(RuntimeError, match="empty storage"):
        rb.sample()


@each("way", ["deepcopy", "state"])
@each("shuffle", [True, False])
@each("kind", [SamplerWithoutReplacement, SliceSamplerWithoutReplacement])
def test_shuffle_that_is_set_in_an_epoch_counts_from_the_next_one(kind, shuffle, way):
    slices = {} if kind is SamplerWithoutReplacement else {"slice_len": 2, "traj_key": "episode"}
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(12), sampler=kind(shuffle=shuffle, **slices), batch_size=4)
    rb.extend(TensorDict({"x": torch.arange(12), "episode": torch.arange(12) // 2}, [12]))
    given = rb.sample()["x"].tolist()
    rb.sampler.shuffle = not shuffle
    if way == "deepcopy":
        rb = copy.deepcopy(rb)
    else:
        rb.load_state_dict(rb.state_dict())
    for _ in range(2):
        given += rb.sample()["x"].tolist()
    assert sorted(given) == list(range(12))


def test_random_sampler_without_replacement_is_the_one_of_that_name():
    for place in ((), (False,)):
        sampler = RandomSampler(*place, replacement=False, drop_last=True)
        assert type(sampler) is SamplerWithoutReplacement and sampler.drop_last
    assert type(RandomSampler(replacement=True)) is RandomSampler

    class Own(RandomSampler):
        pass

    assert type(Own(replacement=True)) is Own
    with pytest.raises(TypeError, match="a Own draws with replacement; one of SamplerWithoutReplacement does not"):
        Own(replacement=False)
