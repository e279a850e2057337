"""PrioritizedSampler: contract, probabilities and weights, what new, changed and vanished steps get, updates."""

import copy
import math
import pickle
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from contracts.children import Child
from contracts.each import each
from contracts.waiting import comes
from engram import _native
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.store.places import LaneCount
from engram.testing.helpers import env_steps, numbers, steps
from engram.testing.sampler import SamplerContract
from engram.transforms import RewardScaling

EVERY = slice(None)


class TestPrioritizedSampler(SamplerContract):
    def make(self):
        return PrioritizedSampler(60, alpha=0.7, beta=0.5)


class TestPrioritizedSamplerWithinBuffer(SamplerContract):
    def make(self):
        return PrioritizedSampler(60, alpha=1.0, beta=1.0, max_priority_within_buffer=True)


def buffer(capacity=10, alpha=1.0, beta=1.0, storage=LazyTensorStorage, **kwargs):
    return PrioritizedReplayBuffer(alpha, beta, storage=storage(capacity), batch_size=4, **kwargs)


def priorities(rb, index=EVERY):
    return rb.sampler.priorities(index, storage=rb.storage).tolist()


def chi_square_limit(cells, p=1e-6):
    k = cells - 1
    z = 2**0.5 * torch.erfinv(torch.tensor(1 - 2 * p, dtype=torch.float64)).item()
    return k * (1 - 2 / (9 * k) + z * math.sqrt(2 / (9 * k))) ** 3


# ---- what is drawn ----
@each("alpha, beta, eps", [(0.0, 0.5, 1e-8), (0.5, 1.0, 1e-8), (0.6, 0.4, 1e-8), (1.0, 0.0, 0.1), (1.7, 2.0, 0.5)])
def test_steps_are_drawn_in_proportion_and_weighted_by_the_formula(alpha, beta, eps):
    torch.manual_seed(0)
    p = torch.rand(40, dtype=torch.float64) * 3
    p[7] = 0
    rb = PrioritizedReplayBuffer(alpha, beta, eps, torch.float64, storage=LazyTensorStorage(40))
    index = rb.extend(torch.arange(57))[-40:]
    rb.update_priority(index, p)
    leaf = torch.zeros(40, dtype=torch.float64)
    leaf[index] = (p + eps) ** alpha
    drawn, weights = [], []
    for _ in range(4):
        _, info = rb.sample(250_000, return_info=True)
        drawn.append(info["index"])
        weights.append(info["priority_weight"])
    drawn, weights = torch.cat(drawn), torch.cat(weights)
    expected = leaf / leaf.sum() * len(drawn)
    counts = torch.bincount(drawn, minlength=40)
    common = expected > 5
    statistic = float(((counts - expected) ** 2 / expected)[common].sum())
    assert statistic < chi_square_limit(int(common.sum()))
    assert torch.allclose(weights, (leaf[drawn] / leaf.min()) ** -beta, rtol=3e-7 * (1 + beta), atol=0)


@each("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_weights_have_the_dtype_that_was_asked_for(dtype):
    rb = buffer(dtype=dtype)
    rb.extend(torch.arange(5))
    assert rb.sample(return_info=True)[1]["priority_weight"].dtype == dtype


def test_a_step_of_priority_0_is_not_drawn_and_does_not_count_as_the_smallest():
    rb = buffer(eps=0.0)
    rb.update_priority(rb.extend(torch.arange(5)), torch.tensor([0.0, 2.0, 0.0, 4.0, 0.0]))
    for _ in range(50):
        batch, info = rb.sample(return_info=True)
        assert set(batch.tolist()) <= {1, 3}
        assert info["priority_weight"].tolist() == [1.0 if i == 1 else 0.5 for i in batch.tolist()]


def test_with_another_storage_nothing_is_left_of_the_first_one():
    sampler = PrioritizedSampler(10, 1.0, 1.0)
    first, other = (ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4) for _ in range(2))
    first.update_priority(first.extend(torch.arange(10)), 50.0)
    other.extend(torch.arange(3))
    saved = other.state_dict()["sampler"]
    assert saved["priorities"].tolist() == [1, 1, 1] and saved["max_priority"] == 1
    assert priorities(other) == [1, 1, 1] and sampler.default_priority == 1
    assert priorities(first) == [1] * 10


def test_priorities_that_are_all_0_are_an_error_that_says_what_to_do():
    rb = buffer(eps=0.0)
    rb.update_priority(rb.extend(torch.arange(5)), 0.0)
    with pytest.raises(RuntimeError, match=r"all stored steps are 0.*update_priority"):
        rb.sample()


def test_beta_alpha_and_eps_can_be_changed_on_the_way():
    rb = buffer(eps=0.0)
    rb.update_priority(rb.extend(torch.arange(2)), torch.tensor([1.0, 4.0]))
    seen = {}

    def weight():
        for _ in range(40):
            batch, info = rb.sample(return_info=True)
            seen.update(zip(batch.tolist(), info["priority_weight"].tolist(), strict=True))
        return seen[1]

    assert weight() == 0.25
    rb.sampler.beta = 0.5
    assert weight() == 0.5
    rb.sampler.alpha = 0.5
    assert weight() == pytest.approx(2**-0.5)
    rb.sampler.alpha, rb.sampler.eps, rb.sampler.beta = 1, 2.0, 1
    assert weight() == 0.5
    assert priorities(rb) == [1, 4]


@each("alpha", [0.3, 0.5, 0.6, 1.0])
def test_priorities_as_small_and_as_large_as_floats_are_told_apart(alpha):
    rb = buffer(alpha=alpha, eps=0.0, dtype=torch.float64)
    rb.update_priority(rb.extend(torch.arange(3)), torch.tensor([1e-200, 1e-20, 1e200], dtype=torch.float64))
    assert rb.sample().tolist() == [2] * 4
    rb.update_priority(2, 0)
    _, info = rb.sample(return_info=True)
    assert info["index"].tolist() == [1] * 4
    expected = 1e-20**alpha / 1e-200**alpha if alpha < 1 else 1e180
    assert info["priority_weight"].tolist() == pytest.approx([1 / expected] * 4, rel=1e-4)


# ---- new, changed and vanished steps ----
STORAGES = [ListStorage, LazyTensorStorage, LazyMemmapStorage]


@each("storage", STORAGES)
def test_new_steps_get_the_highest_priority_seen(storage):
    rb = buffer(storage=storage)
    rb.extend(torch.arange(4.0))
    assert priorities(rb) == [1] * 4 and rb.sampler.default_priority == 1
    rb.update_priority(torch.tensor([0, 1]), torch.tensor([5.0, 0.5]))
    rb.extend(torch.arange(4.0))
    assert priorities(rb) == [5, 0.5, 1, 1, 5, 5, 5, 5]
    rb.update_priority(0, 0.1)  # the highest ever seen, stored or not
    rb.add(torch.tensor(9.0))
    assert priorities(rb) == [0.1, 0.5, 1, 1, 5, 5, 5, 5, 5]
    rb.extend(torch.arange(3.0))  # over 0 and 1
    assert priorities(rb) == [5, 5, 1, 1, 5, 5, 5, 5, 5, 5]


def test_new_steps_get_the_highest_priority_that_is_stored_when_they_come():
    rb = buffer(11, max_priority_within_buffer=True)
    for n in range(20):
        index = rb.add(torch.tensor(n))
        before = [21 - k for k in range(max(0, n - 10), n)]
        assert priorities(rb, index) == [max(before, default=1)]
        rb.update_priority(index, 21 - n)
        assert rb.sampler.default_priority == 21 - max(0, n - 10)


def test_among_steps_of_priority_zero_the_highest_is_zero():
    rb = buffer(4, max_priority_within_buffer=True)
    rb.update_priority(rb.extend(torch.arange(2)), 0.0)
    assert rb.sampler.default_priority == 0
    rb.add(torch.tensor(2))
    assert priorities(rb) == [0, 0, 0]
    assert rb.sampler.default_priority == 0


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_within_the_buffer_it_does_not_matter_when_the_sampler_looks(data):
    a, b = (buffer(7, max_priority_within_buffer=True) for _ in range(2))
    for rb in (a, b):
        rb.extend(torch.arange(2))
    for _ in range(data.draw(st.integers(1, 12))):
        n = data.draw(st.integers(0, 9))
        if n:
            for rb in (a, b):
                rb.extend(torch.arange(n))
        elif len(a):
            where, p = data.draw(st.integers(0, len(a) - 1)), data.draw(st.sampled_from([0.0, 0.5, 2.0, 9.0]))
            for rb in (a, b):
                rb.update_priority(where, p)
        if len(a):
            priorities(a)
    assert priorities(a) == priorities(b)
    assert a.sampler.default_priority == b.sampler.default_priority == max(priorities(a), default=1)


def columns(n):
    return TensorStorage(torch.zeros(6))


@each("storage", [*STORAGES, columns])
def test_steps_changed_in_place_get_the_priority_of_new_ones(storage):
    rb = buffer(storage=storage)
    rb.update_priority(rb.extend(torch.arange(6.0)), torch.tensor([3.0, 0.5, 0.5, 0.5, 0.5, 0.5]))
    rb[2] = torch.tensor(50.0)
    rb.storage[4:6] = torch.tensor([51.0, 52.0])
    assert priorities(rb) == [3, 0.5, 3, 0.5, 3, 3]
    rb.mark_update(torch.tensor([1]))
    assert priorities(rb) == [3, 3, 3, 0.5, 3, 3]


def test_more_changes_than_the_log_holds_make_every_step_new():
    rb = buffer(9000)
    rb.update_priority(rb.extend(torch.arange(9000)), 0.5)
    rb.update_priority(0, 7.0)
    rb[:] = torch.arange(9000)
    assert set(priorities(rb)) == {7.0}


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_priorities_are_those_of_a_plain_account(data):
    capacity, account, highest, written = data.draw(st.integers(1, 20)), {}, 1.0, 0
    rb = buffer(capacity, 0.6, 0.4)
    for _ in range(data.draw(st.integers(1, 15))):
        what = data.draw(st.sampled_from(["extend", "update", "edit", "sample", "empty"]))
        if what == "extend":
            n = data.draw(st.integers(1, 50))
            rb.extend(torch.arange(n))
            account.update({(written + k) % capacity: highest for k in range(n)})
            written += n
        elif what == "empty":
            rb.empty()
            account, highest, written = {}, 1.0, 0
        elif account and what == "update":
            at = data.draw(st.lists(st.sampled_from(sorted(account)), min_size=1, max_size=30))
            p = data.draw(st.lists(st.floats(0, 50, width=32), min_size=len(at), max_size=len(at)))
            rb.update_priority(torch.tensor(at), torch.tensor(p))
            account.update(zip(at, p, strict=True))
            highest = max(highest, *p)
        elif account and what == "edit":
            at = data.draw(st.sampled_from(sorted(account)))
            rb[at] = torch.tensor(5)
            account[at] = highest
        elif account:
            _, info = rb.sample(return_info=True)
            leaf = {k: (p + 1e-8) ** 0.6 for k, p in account.items()}
            expected = [(leaf[i] / min(leaf.values())) ** -0.4 for i in info["index"].tolist()]
            assert info["priority_weight"].tolist() == pytest.approx(expected, rel=1e-5)
    assert priorities(rb, torch.arange(capacity)) == [account.get(k, -1) for k in range(capacity)] if written else True


# ---- updates ----
def test_of_a_step_named_twice_the_last_priority_stays():
    rb = buffer()
    rb.extend(torch.arange(5))
    rb.update_priority(torch.tensor([1, 2, 1]), torch.tensor([3.0, 4.0, 0.25]))
    assert priorities(rb) == [1, 0.25, 4, 1, 1]


@each("index", [
    3, torch.tensor([3]), torch.tensor(3), np.int64(3), [3], np.array([3]), torch.tensor([3], dtype=torch.int32),
    (torch.tensor([3]),), slice(3, 4), range(3, 4), torch.tensor([False, False, False, True, False]),
    torch.tensor([[3]]), torch.tensor([0, 3, 0, 3])[1::2],
])  # fmt: skip
@each("priority", [
    2, 2.0, torch.tensor(2), torch.tensor([2.0]), np.float32(2), torch.tensor([[2.0]]), [2],
    torch.tensor([2.0], requires_grad=True), torch.tensor([0 - 2j]).conj().imag,
])  # fmt: skip
def test_indices_and_priorities_come_in_any_form(index, priority):
    rb = buffer()
    rb.extend(torch.arange(5))
    rb.update_priority(index, priority)
    assert priorities(rb) == [1, 1, 1, 2, 1]


@each("name, expected", [("max", 6.0), ("min", 1.0), ("mean", 3.0), ("median", 2.0)])
def test_priorities_with_more_dimensions_are_reduced(name, expected):
    rb = buffer(reduction=name)
    rb.extend(torch.arange(5))
    rb.update_priority(torch.tensor([0, 2]), torch.tensor([[[1.0], [2.0], [6.0]], [[2.0], [4.0], [12.0]]]))
    assert priorities(rb) == [expected, 1, expected * 2, 1, 1]


BAD = {
    "negative": (torch.tensor([0, 1]), torch.tensor([2.0, -1.0]), None, ValueError, "-1 at position 1"),
    "negative number": (0, -1, None, ValueError, "0 or more"),
    "nan": (torch.tensor([0, 1]), torch.tensor([2.0, math.nan]), None, ValueError, "nan at position 1"),
    "infinite": (torch.tensor([0, 1]), torch.tensor([2.0, math.inf]), None, ValueError, "inf at position 1"),
    "too large": (torch.tensor([0, 1]), torch.tensor([2.0, 1e300], dtype=torch.float64), None, ValueError, "too large"),
    "complex": (0, torch.tensor(1j), None, ValueError, "real numbers"),
    "fewer": (torch.tensor([0, 1, 2]), torch.tensor([2.0, 2.0]), None, ValueError, r"3 steps .* shape \[2\]"),
    "none": (torch.tensor([0, 1]), torch.ones(0), None, ValueError, "2 steps"),
    "swapped": (torch.tensor([[0, 1, 2], [3, 4, 0]]), torch.ones(3, 2), None, ValueError, "6 steps"),
    "not written": (torch.tensor([0, 6]), torch.tensor([2.0, 2.0]), None, IndexError, "6 has not been written"),
    "outside": (torch.tensor([0, 10]), torch.tensor([2.0, 2.0]), None, IndexError, "10 lies outside 0 to 9"),
    "below": (-1, 2.0, None, IndexError, "-1 lies outside"),
    "far outside": (torch.tensor([1 << 62]), 2.0, None, IndexError, "lies outside"),
    "far outside among others": (torch.tensor([0, 1 << 62]), torch.ones(2), None, IndexError, "lies outside"),
    "below among others": (torch.tensor([0, -(1 << 62)]), torch.ones(2), None, IndexError, "lies outside"),
    "half": (torch.tensor([0.5]), 2.0, None, IndexError, "must be integers"),
    "generations": (torch.tensor([0, 1]), torch.ones(2), torch.tensor([0]), ValueError, "1 generations"),
}  # fmt: skip


@each("name", BAD)
def test_a_bad_update_is_refused_and_changes_nothing(name):
    index, priority, generation, error, said = BAD[name]
    rb = buffer()
    rb.extend(torch.arange(6))
    rb.update_priority(5, 0.5)
    with pytest.raises(error, match=said):
        rb.update_priority(index, priority, generation)
    assert priorities(rb) == [1, 1, 1, 1, 1, 0.5] and rb.sampler.default_priority == 1 and rb.sampler.skipped == 0


def in_another_form(index, priority):
    """The same update by lists, which take the longer way."""
    return index.tolist(), priority if isinstance(priority, float) else priority.tolist()


@each("name", [name for name, case in BAD.items() if case[2] is None and torch.is_tensor(case[0])
                                  and case[0].ndim == 1 and case[0].dtype == torch.int64])  # fmt: skip
def test_plain_tensors_are_refused_in_the_same_words_as_any_other_form(name):
    index, priority, _, error, _ = BAD[name]
    rb = buffer()
    rb.extend(torch.arange(6))
    with pytest.raises(error) as plain:
        rb.update_priority(index, priority)
    with pytest.raises(error) as other:
        rb.update_priority(*in_another_form(index, priority))
    assert str(plain.value) == str(other.value) and priorities(rb) == [1] * 6


@each("alpha", [0.0, 0.5, 0.6, 1.0, 1.7])
@each("dtype", [torch.float32, torch.float64])
def test_plain_tensors_set_what_any_other_form_sets_bit_for_bit(alpha, dtype):
    torch.manual_seed(0)
    plain, other = buffer(300, alpha=alpha, eps=1e-6), buffer(300, alpha=alpha, eps=1e-6)
    for rb in (plain, other):
        rb.extend(torch.arange(200))
    for n in (1, 2, 63, 64, 65, 130, 256):
        index, priority = torch.randint(0, 200, (n,)), torch.rand(n, dtype=dtype) * 3
        priority[0] = 0
        plain.update_priority(index, priority)
        other.update_priority(*in_another_form(index, priority))
        trees = [rb.sampler._sum_tree[torch.arange(200)] for rb in (plain, other)]
        assert torch.equal(*trees) and priorities(plain) == priorities(other)
        assert plain.sampler.default_priority == other.sampler.default_priority


@each("alpha", [0.5, 0.6, 1.0])
def test_a_leaf_has_the_same_bits_whichever_way_it_came(alpha):
    index, priority = torch.arange(150), torch.rand(150, dtype=torch.float64)
    together, single, assigned, loaded = (buffer(150, alpha=alpha) for _ in range(4))
    for rb in (together, single, assigned):
        rb.extend(torch.arange(150))
        rb.update_priority(index, priority)
    for i in range(150):
        single.update_priority(index[i : i + 1], priority[i : i + 1])
    assigned.sampler.alpha = 0.3
    assigned.sampler.alpha = alpha
    loaded.load_state_dict(together.state_dict())
    leaves = [rb.sampler._sum_tree[index].tolist() for rb in (together, single, assigned, loaded)]
    assert leaves[0] == leaves[1] == leaves[2] == leaves[3]


@each("settings, said", [
    ({"alpha": -1}, "alpha"), ({"alpha": math.nan}, "alpha"), ({"beta": -0.1}, "beta"), ({"eps": -1e-9}, "eps"),
    ({"eps": math.inf}, "eps"), ({"alpha": "high"}, "alpha"), ({"reduction": "sum"}, "reduction"),
    ({"dtype": torch.int64}, "dtype"), ({"max_capacity": 0}, "max_capacity"), ({"max_capacity": 1.5}, "max_capacity"),
])  # fmt: skip
def test_bad_settings_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        PrioritizedSampler(**{"max_capacity": 10, "alpha": 0.5, "beta": 0.5, **settings})
    sampler = PrioritizedSampler(10, 0.5, 0.5)
    if said in ("alpha", "beta", "eps"):
        with pytest.raises(ValueError, match=said):
            setattr(sampler, said, settings[said])
        assert getattr(sampler, said) in (0.5, 1e-8)


def test_an_alpha_that_stored_priorities_do_not_bear_is_refused():
    rb = buffer()
    rb.update_priority(rb.extend(torch.arange(5)), 1e200)
    with pytest.raises(ValueError, match="too large"):
        rb.sampler.alpha = 2
    assert rb.sampler.alpha == 1 and rb.sample() is not None


@each("sampler", [PrioritizedSampler, lambda *args: PrioritizedSliceSampler(*args, slice_len=1)])
@each("transform", [None, RewardScaling(0.0, 1.0)])
def test_a_capacity_below_that_of_the_storage_warns_and_what_is_stored_beyond_it_is_refused(sampler, transform):
    def batch(n):
        following = {"done": torch.ones(n, 1, dtype=torch.bool), "reward": torch.ones(n, 1)}
        return TensorDict({"obs": torch.arange(n), "next": following}, [n])

    with pytest.warns(UserWarning, match=r"max_capacity=9 .* 10 steps") as warned:
        rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler(9, 1, 1), batch_size=2, transform=transform)
    assert warned[0].filename == __file__
    rb.extend(batch(8))
    with pytest.raises(ValueError, match=r"max_capacity=9 .* 10 steps"):
        rb.extend(batch(2))
    rb.add(batch(1)[0])
    with pytest.raises(ValueError, match=r"max_capacity=9 .* 10 steps"):
        rb.add(batch(1)[0])
    assert len(rb) == 9 and len(rb.sample()) == 2
    ReplayBuffer(storage=rb.storage).extend(batch(1))  # a buffer with another sampler
    with pytest.raises(ValueError, match=r"max_capacity=9 .* 10 steps"):
        rb.sample()
    with pytest.raises(ValueError, match=r"max_capacity=9 .* 10 steps"):
        ReplayBuffer(storage=rb.storage, sampler=sampler(9, 1, 1))


def test_a_list_without_a_limit_may_be_as_long_as_the_sampler_can_hold():
    unlimited = ReplayBuffer(storage=ListStorage(), sampler=PrioritizedSampler(9, 1, 1), batch_size=2)
    unlimited.extend(list(range(9)))
    unlimited.sample()
    with pytest.raises(ValueError, match=r"max_capacity=9 .* 12 steps"):
        unlimited.extend(list(range(3)))
    assert len(unlimited) == 9 and unlimited.sample() is not None


def test_what_a_storage_rounds_up_is_no_step_beyond_the_capacity():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb = ReplayBuffer(storage=LazyTensorStorage(10, ndim=2), sampler=PrioritizedSampler(10, 1, 1), batch_size=2)
        rb.extend(torch.arange(12).reshape(4, 3))
        rb.extend(torch.arange(12).reshape(4, 3))
        rb.sample()
    assert len(rb) == 12


# ---- the tree, to look at ----
def test_leaves_and_sums_of_the_tree_can_be_looked_at():
    rb = buffer(alpha=0.7, eps=0.5)
    tree = rb.sampler._sum_tree
    assert len(tree) == 0 and tree.query(0, 10) == 0.0
    p = torch.rand(6, dtype=torch.float64)
    rb.update_priority(rb.extend(torch.arange(6)), p)
    leaves = torch.cat([(p + 0.5) ** 0.7, torch.zeros(len(tree) - 6)])
    assert torch.allclose(tree[torch.arange(len(tree))], leaves, rtol=1e-6)
    assert tree[2] == pytest.approx(float(leaves[2]), rel=1e-6) and type(tree[2]) is float
    for a, b in ((0, 6), (2, 5), (3, 3), (4, 100), (5, 2)):
        assert tree.query(a, b) == pytest.approx(float(leaves[a:b].sum()), rel=1e-6)
    rb.sampler.alpha = 1.0
    assert tree[2] == pytest.approx(float(p[2]) + 0.5)
    with pytest.raises(IndexError):
        tree[len(tree)]


def test_the_highest_priority_and_where_it_is_can_be_looked_at():
    rb = buffer()
    assert rb.sampler._max_priority == (1.0, None)
    index = rb.extend(torch.arange(5))
    assert rb.sampler._max_priority == (1.0, 4)
    rb.update_priority(index, torch.tensor([0.1, 3.0, 2.0, 0.5, 0.2]))
    assert rb.sampler._max_priority == (3.0, 1)
    rb.update_priority(torch.tensor([1]), 0.5)
    assert rb.sampler._max_priority == (3.0, None)


def test_a_list_without_limit_grows_with_its_priorities():
    rb = PrioritizedReplayBuffer(1.0, 1.0, storage=ListStorage(), batch_size=3)
    for k in range(12):
        rb.update_priority(rb.extend(list(range(500))), float(k))
    assert priorities(rb) == [float(k) for k in range(12) for _ in range(500)]
    assert rb.sample() is not None


def test_updates_before_anything_is_written_say_so():
    rb = buffer()
    with pytest.raises(IndexError, match="nothing has been written"):
        rb.update_priority(0, 1.0)
    with pytest.raises(RuntimeError, match="storage="):
        PrioritizedSampler(10, 1, 1).priorities(0)


# ---- generations ----
@pytest.mark.parametrize("prefetch", [0, 2])
def test_updates_of_steps_that_were_overwritten_meanwhile_are_skipped_and_counted(prefetch):
    rb = TensorDictPrioritizedReplayBuffer(
        1.0, 1.0, storage=LazyTensorStorage(10), batch_size=10, track_generations=True, prefetch=prefetch
    )
    rb.extend(steps(0, 10))
    batch = rb.sample().set("td_error", torch.full((10,), 0.25))
    rb.extend(steps(10, 14))  # over 0 to 3
    rb.update_tensordict_priority(batch)
    drawn = set(batch["index"].tolist())
    assert priorities(rb) == [0.25 if k in drawn and k > 3 else 1 for k in range(10)]
    assert rb.sampler.skipped == int((batch["index"] < 4).sum())
    rb.empty()
    rb.update_tensordict_priority(batch)  # of steps that are gone: no error
    assert rb.sampler.skipped == 10


def test_generations_of_other_forms_are_taken():
    rb = buffer()
    rb.extend(torch.arange(13))
    rb.update_priority([0, 1, 5], [2, 2, 2], [10, 1, 5])
    assert priorities(rb) == [2, 1, 1, 1, 1, 2, 1, 1, 1, 1] and rb.sampler.skipped == 1


# ---- priorities in the data ----
def data(n, **more):
    return TensorDict({"x": torch.arange(n), **more}, [n])


@each("storage", [ListStorage, LazyTensorStorage, LazyMemmapStorage])
def test_priorities_in_the_data_are_those_of_their_steps(storage):
    rb = TensorDictPrioritizedReplayBuffer(1.0, 1.0, storage=storage(10), batch_size=4)
    rb.extend(data(4, td_error=torch.tensor([[4.0], [3.0], [2.0], [1.0]])))
    rb.add(data(6, td_error=torch.arange(6.0).unsqueeze(-1) + 20)[2])
    assert priorities(rb) == [4, 3, 2, 1, 22] and rb.sampler.default_priority == 22
    rb.extend([*data(2, td_error=torch.tensor([[7.0], [8.0]])).unbind(0)])
    assert priorities(rb)[5:] == [7, 8]


def test_of_more_data_than_fit_each_step_keeps_its_own_priority():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), sampler=PrioritizedSampler(10, 1, 1), priority_key="loss", batch_size=4
    )
    rb.extend(data(25, loss=torch.arange(25.0)))
    assert priorities(rb) == rb[:]["x"].tolist() == rb[:]["loss"].tolist()


def test_bad_priorities_in_the_data_are_refused_before_anything_is_written():
    rb = TensorDictPrioritizedReplayBuffer(1.0, 1.0, storage=LazyTensorStorage(10), batch_size=4)
    rb.extend(data(4, td_error=torch.ones(4)))
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="position 2"):
            rb.extend(data(4, td_error=torch.tensor([1.0, 1.0, bad, 1.0])))
        with pytest.raises(ValueError, match="position 0"):
            rb.add(data(4, td_error=torch.full((4,), bad))[0])
    assert len(rb) == rb.write_count == 4


def test_rows_without_a_place_for_priorities_refuse_data_that_have_some():
    rb = TensorDictPrioritizedReplayBuffer(1.0, 1.0, storage=LazyTensorStorage(10), batch_size=4)
    rb.extend(data(4))
    for write, bad in [(rb.extend, data(2, td_error=torch.ones(2))), (rb.add, data(2, td_error=torch.ones(2))[0])]:
        with pytest.raises((ValueError, TypeError), match="td_error"):
            write(bad)
    assert priorities(rb) == [1] * 4


def test_another_storage_may_have_a_place_for_priorities():
    rb = TensorDictPrioritizedReplayBuffer(1.0, 1.0, storage=LazyTensorStorage(10), batch_size=4)
    rb.extend(data(4))
    rb.set_storage(LazyTensorStorage(10))
    rb.extend(data(2, td_error=torch.tensor([2.0, 3.0])))
    rb.extend(data(2, td_error=torch.tensor([4.0, 5.0])))
    assert priorities(rb) == [2, 3, 4, 5]


def test_priorities_in_the_data_of_environments_go_to_their_steps():
    for dim_extend in (None, 0):
        rb = TensorDictPrioritizedReplayBuffer(
            1.0, 1.0, storage=LazyTensorStorage(30, ndim=2), batch_size=4, dim_extend=dim_extend
        )
        batch = env_steps(3, 0, 14)
        batch["td_error"] = batch["n"].float().unsqueeze(-1)
        rb.extend(batch if dim_extend is None else batch.transpose(0, 1))
        rb.add(batch[:, 5])
        slots = torch.cartesian_prod(torch.arange(10), torch.arange(3))
        stored = rb.storage[slots[:, 0], slots[:, 1]]["n"]
        assert priorities(rb, slots) == stored.tolist()


def test_a_sampler_without_priorities_ignores_them():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler(), batch_size=4)
    rb.extend(data(4, td_error=torch.full((4,), -1.0)))
    rb.update_tensordict_priority(rb.sample())


class _OwnPriorities:
    """A sampler of a user's own that takes priorities only when asked."""

    def __init__(self):
        self.given = []

    def sample(self, storage, batch_size):
        return torch.zeros(batch_size, dtype=torch.int64), {}

    def update_priority(self, index, priority, *, storage=None):
        self.given.append(priority)


def test_batches_without_priorities_are_an_error_only_where_the_sampler_takes_some():
    def buffer(sampler):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
        rb.extend(data(4))
        return rb

    plain, own = buffer(RandomSampler()), buffer(_OwnPriorities())
    plain.update_tensordict_priority(plain.sample().exclude("index"))
    ReplayBufferEnsemble(plain, buffer(RandomSampler()), batch_size=4).update_tensordict_priority(plain.sample())
    for sampler in (PrioritizedSampler(10, 1.0, 1.0), _OwnPriorities()):
        rb = buffer(sampler)
        with pytest.raises(KeyError, match="td_error"):
            rb.update_tensordict_priority(rb.sample())
    own.update_tensordict_priority(own.sample().set("td_error", torch.ones(4)))
    assert len(own.sampler.given) == 1


@pytest.mark.parametrize("copied", [lambda one: one, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_priorities_given_before_the_first_draw_are_those_of_it(copied):
    sampler, given = PrioritizedSampler(10, 1.0, 1.0), torch.tensor([0.0, 5.0, 3.0])
    sampler.extend(torch.arange(4))
    sampler.update_priority(torch.arange(3), given)
    sampler.update_priority(3, 0.0)
    sampler.update_priority(range(2, 3), 0.0)
    given.fill_(9.0)
    sampler = copied(sampler)
    storage = LazyTensorStorage(10)
    storage.set(range(4), data(4))
    assert set(sampler.sample(storage, 20)[0].tolist()) == {1}
    assert sampler.priorities(range(4)).tolist() == [0.0, 5.0, 0.0, 0.0]
    storage.set(range(4, 5), data(1))
    assert sampler.priorities([4]).tolist() == [5.0]


def test_marks_given_before_the_first_draw_take_their_turn():
    sampler, storage = PrioritizedSampler(10, 1.0, 1.0), LazyTensorStorage(10)
    sampler.update_priority(range(3), 0.5)
    sampler.mark_update(range(1, 2))
    storage.set(range(3), data(3))
    assert sampler.priorities(range(3), storage=storage).tolist() == [0.5, 1.0, 0.5]


def test_priorities_given_before_the_first_draw_are_those_of_starts_of_slices():
    sampler = PrioritizedSliceSampler(10, 1.0, 1.0, slice_len=2, traj_key="traj", truncated_key=None)
    sampler.update_priority(range(6), torch.tensor([0.0, 0, 0, 0, 1, 0]))
    storage = LazyTensorStorage(10)
    storage.set(range(6), TensorDict({"traj": torch.zeros(6, dtype=torch.int64)}, [6]))
    index = sampler.sample(storage, 4)[0]
    assert (index[0] if isinstance(index, tuple) else index).tolist() == [4, 5, 4, 5]


def test_priorities_given_to_the_sampler_of_a_buffer_are_set_at_once():
    rb = PrioritizedReplayBuffer(1.0, 1.0, storage=LazyTensorStorage(10))
    rb.extend(data(3))
    rb.sampler.update_priority(range(3), 2.0)
    assert rb.sampler.priorities(range(3)).tolist() == [2.0] * 3
    with pytest.raises(IndexError, match="has not been written"):
        rb.sampler.update_priority([5], 2.0)


def test_priorities_that_no_step_can_have_are_refused_before_the_first_draw():
    sampler, storage = PrioritizedSampler(10, 1.0, 1.0), LazyTensorStorage(10)
    for bad in (-1.0, float("nan"), [1.0, float("inf")]):
        with pytest.raises(ValueError, match="priorit"):
            sampler.update_priority([0, 1], bad)
    sampler.update_priority([0, 7], 2.0)
    storage.set(range(3), data(3))
    with pytest.raises(IndexError, match=r"before the sampler had a storage, .*index 7 has not been written"):
        sampler.sample(storage, 4)
    assert sampler.priorities(range(3), storage=storage).tolist() == [1.0] * 3
    sampler.sample(storage, 4)


# ---- several dimensions, lanes, processes ----
def test_environments_have_priorities_of_their_own():
    rb = PrioritizedReplayBuffer(1.0, 1.0, eps=0.0, storage=LazyTensorStorage(30, ndim=2), batch_size=50)
    index = rb.extend(env_steps(3, 0, 14))
    rb.update_priority(index, 0)
    rb.update_priority((torch.tensor([4]), torch.tensor([2])), 5.0)
    rb.update_priority(torch.tensor([[7, 0], [2, 1]]), torch.tensor([5.0, 10.0]))
    for _ in range(5):
        _, info = rb.sample(return_info=True)
        drawn = set(zip(*(part.tolist() for part in info["index"]), strict=True))
        assert drawn <= {(4, 2), (7, 0), (2, 1)}
        assert set(info["priority_weight"].tolist()) <= {1.0, 0.5}
    with pytest.raises(IndexError, match="ndim=2"):
        rb.update_priority(torch.tensor([1, 2, 3]), 1.0)


def test_a_capacity_that_the_storage_rounds_up_fits():
    sampler = PrioritizedSampler(100, 1, 1)
    rb = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2), sampler=sampler, batch_size=4)
    rb.extend(env_steps(3, 0, 40))
    assert rb.storage.max_size == 102 and rb.sample() is not None


def test_steps_of_another_process_come_with_the_highest_priority_and_take_it_when_they_go(tmp_path):
    def write(n):
        def work():
            other = ReplayBuffer(storage=LazyMemmapStorage(40, tmp_path, existsok=True, lanes=LaneCount(2)))
            other.extend(torch.arange(n))

        Child(work).result()

    rb = PrioritizedReplayBuffer(1.0, 1.0, storage=LazyMemmapStorage(40, tmp_path, lanes=LaneCount(2)), batch_size=8)
    rb.update_priority(rb.extend(torch.arange(5)), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    write(8)
    assert priorities(rb, torch.arange(40)) == [1, 2, 3, 4, 5, *[-1] * 15, *[5] * 8, *[-1] * 12]
    rb.update_priority(torch.arange(20, 28), 0.5)
    write(27)  # the lanes are filled, the first one before
    assert priorities(rb, torch.arange(40)) == [1, 2, 3, 4, 5, *[5] * 15, *[0.5] * 8, *[5] * 12]
    write(26)  # and replaced, in the order in which they were taken: 0 to 19, then 20 to 25
    assert priorities(rb, torch.arange(40)) == [*[5] * 26, 0.5, 0.5, *[5] * 12]
    rb.update_priority(torch.arange(20), 0.0)
    assert {int(i) for _ in range(20) for i in rb.sample(return_info=True)[1]["index"]} <= set(range(20, 40))


def test_a_step_that_is_being_overwritten_cannot_be_drawn_any_more():
    rb = buffer()
    rb.extend(torch.arange(10))
    rb.update_priority(0, 1e9)
    assert rb.sample().tolist() == [0] * 4
    _native.testing.claim(rb.storage.lanes.store, 0, 1)  # as a writer in another process that has begun to replace it
    assert priorities(rb, torch.arange(10)) == [-1, *[1] * 9]
    for _ in range(20):
        assert 0 not in rb.sample().tolist()
    rb.update_priority(torch.tensor([0, 1]), 2.0)  # it was there a moment ago
    assert rb.sampler.skipped == 1 and priorities(rb, torch.tensor([0, 1])) == [-1, 2]


def test_rows_that_vanish_while_they_are_read_are_replaced_with_their_weights():
    rb = buffer(eps=0.0)
    rb.update_priority(rb.extend(torch.arange(10)), torch.tensor([8.0] + [2.0] * 9))
    draw = rb.sampler.draw_plan(rb.storage).draw(30)
    slots, info = draw.slots, draw.info
    _native.testing.claim(rb.storage.lanes.store, 0, 1)
    places = (slots == 0).nonzero().reshape(-1).tolist()
    again = draw.redraw(places).slots
    assert places and 0 not in again.tolist()
    assert [info["priority_weight"][i].item() for i in places] == [1.0] * len(places)
    assert torch.equal(again[slots != 0], slots[slots != 0])


class Overtaken(PrioritizedSampler):
    """Lets somebody else act between its draw and the read."""

    meanwhile = None

    def sample(self, storage, batch_size):
        drawn = super().sample(storage, batch_size)
        act, self.meanwhile = self.meanwhile, None
        if act is not None:
            act()
        return drawn


def overtaken(kind, capacity=10, **kwargs):
    """A full buffer of ten steps by number: 9 has the lowest priority, 3 by far the highest."""
    cls = TensorDictReplayBuffer if kind is LazyTensorStorage else ReplayBuffer
    rb = cls(storage=kind(capacity), sampler=Overtaken(None, 1.0, 1.0, 0.0), batch_size=64, **kwargs)
    index = rb.extend(steps(0, 10))
    rb.update_priority(index, torch.tensor([1.0, 1, 1, 100, 1, 1, 1, 1, 1, 0.001]))
    return rb


def replace_the_first(rb, at=(0, 1, 2, 3)):
    """Steps 10 to 13 in the places of 0 to 3, the last of them with another priority than step 3 had."""
    rb.extend(steps(10, 14))
    rb.update_priority(torch.tensor(at), torch.tensor([2.0, 2, 2, 1]))


EVERY_PRIORITY = {**dict.fromkeys([4, 5, 6, 7, 8, 13], 1.0), **dict.fromkeys([10, 11, 12], 2.0), 9: 0.001}


@each("prefetch", [None, 1])
@each("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage, "columns"])
def test_a_row_that_came_in_the_place_of_the_drawn_one_never_has_its_weight(kind, prefetch):
    torch.manual_seed(0)
    if kind == "columns":
        kind = lambda n: TensorStorage(steps(-10, 0))  # noqa: E731
    rb = overtaken(kind, prefetch=prefetch)
    rb.sampler.meanwhile = lambda: replace_the_first(rb)
    batch, info = rb.sample(return_info=True)
    came = numbers(batch)
    expected = [0.001 / EVERY_PRIORITY[n] for n in came]
    assert info["priority_weight"].tolist() == pytest.approx(expected)
    assert [n % 10 for n in came] == info["index"].tolist()
    if kind is LazyTensorStorage:
        assert torch.equal(batch["priority_weight"], info["priority_weight"])


def test_a_row_that_was_changed_in_place_after_its_draw_never_has_the_weight_of_before():
    torch.manual_seed(0)
    rb = overtaken(LazyTensorStorage)

    def change():
        rb[3] = steps(13, 14)[0]
        rb.update_priority(torch.tensor([3]), torch.tensor([1.0]))

    rb.sampler.meanwhile = change
    batch, info = rb.sample(return_info=True)
    priorities_of = {**dict.fromkeys([0, 1, 2, 4, 5, 6, 7, 8, 13], 1.0), 9: 0.001}
    expected = [0.001 / priorities_of[n] for n in numbers(batch)]
    assert info["priority_weight"].tolist() == pytest.approx(expected)


def test_rows_that_are_overtaken_again_while_they_are_drawn_again_are_looked_at_again():
    torch.manual_seed(0)
    rb = overtaken(LazyTensorStorage)
    rb.update_priority(slice(None), torch.ones(10))

    def later():
        rb.extend(steps(14, 18))
        rb.update_priority(torch.tensor([4, 5, 6, 7]), torch.full((4,), 4.0))

    def first():
        replace_the_first(rb)
        rb.sampler.meanwhile = later

    rb.sampler.meanwhile = first
    batch, info = rb.sample(return_info=True)
    assert min(numbers(batch)) >= 8
    weights = dict(zip(numbers(batch), info["priority_weight"].tolist(), strict=True))
    assert {round(w, 4) for n, w in weights.items() if n >= 14} <= {0.25}
    assert {round(w, 4) for n, w in weights.items() if n in (8, 9, 13)} <= {1.0}
    assert {round(w, 4) for n, w in weights.items() if n in (10, 11, 12)} <= {0.5}


def test_environments_steps_that_were_replaced_after_their_draw_are_drawn_again():
    torch.manual_seed(0)
    sampler = Overtaken(None, 1.0, 1.0, 0.0)
    rb = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), sampler=sampler, batch_size=64)
    index = rb.extend(env_steps(2, 0, 4))
    rb.update_priority(index, torch.tensor([1.0, 100, 1, 1, 1, 1, 1, 1]))

    def replace_the_first_time():
        rb.extend(env_steps(2, 4, 5))
        rb.update_priority(torch.tensor([[0, 0], [0, 1]]), torch.tensor([1.0, 2.0]))

    sampler.meanwhile = replace_the_first_time
    batch, info = rb.sample(return_info=True)
    expected = [0.5 if n == 1004 else 1.0 for n in numbers(batch)]
    assert 1004 in numbers(batch) and info["priority_weight"].tolist() == expected


def test_a_step_that_a_better_one_replaced_after_its_draw_never_has_the_weight_of_before():
    torch.manual_seed(0)
    sampler = Overtaken(None, 1.0, 1.0, 0.0)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(3), sampler=sampler, writer=TensorDictMaxValueWriter("rank"), batch_size=64
    )
    index = rb.extend(TensorDict({"rank": torch.arange(3.0)}, [3]))
    rb.update_priority(index, torch.tensor([50.0, 1.0, 1.0]))

    def replace_the_worst():
        rb.update_priority(rb.extend(TensorDict({"rank": torch.tensor([7.0])}, [1])), 2.0)

    sampler.meanwhile = replace_the_worst
    batch = rb.sample()
    assert set(batch["rank"].tolist()) == {1.0, 2.0, 7.0}
    assert batch["priority_weight"].tolist() == [0.5 if rank == 7 else 1.0 for rank in batch["rank"].tolist()]


@pytest.mark.parametrize("prefetch", [None, 1])
def test_members_of_an_ensemble_draw_again_what_was_replaced_after_its_draw(prefetch):
    torch.manual_seed(0)
    members = [overtaken(LazyTensorStorage), overtaken(LazyTensorStorage)]
    both = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=128, prefetch=prefetch)
    members[1].sampler.meanwhile = lambda: replace_the_first(members[1])
    batch, info = both.sample(return_info=True)
    assert 3 in numbers(batch)[0]
    expected = [0.001 / EVERY_PRIORITY[n] for n in numbers(batch)[1]]
    assert info["priority_weight"][1].tolist() == pytest.approx(expected)


def test_what_is_said_of_a_batch_is_copied_and_sent_as_a_plain_dict():
    rb = overtaken(LazyTensorStorage)
    _, info = rb.sample(return_info=True)
    for copied in (pickle.loads(pickle.dumps(info)), copy.deepcopy(info)):
        assert type(copied) is dict and torch.equal(copied["priority_weight"], info["priority_weight"])


def test_threads_write_sample_and_update_at_once():
    rb = TensorDictPrioritizedReplayBuffer(
        0.6, 0.4, storage=LazyTensorStorage(50), batch_size=16, track_generations=True, prefetch=2
    )
    rb.extend(steps(0, 30))
    failed, stop = [], threading.Event()

    def repeat(work):
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            failed.append(error)

    def learn():
        batch = rb.sample()
        rb.update_tensordict_priority(batch.set("td_error", torch.rand(16)))

    threads = [threading.Thread(target=repeat, args=(w,)) for w in (learn, learn, lambda: rb.extend(steps(0, 7)))]
    for t in threads:
        t.start()
    time.sleep(0.4)
    comes(lambda: failed or rb.write_count >= 100)
    stop.set()
    for t in threads:
        t.join()
    assert not failed
    found = torch.tensor(priorities(rb))
    assert len(found) == 50 and (found >= 0).all() and (found <= 1).all()


# ---- state ----
def test_a_state_goes_on_in_a_store_of_another_capacity_bit_for_bit(tmp_path):
    rb = buffer(16, 0.6, 0.4, generator=torch.Generator().manual_seed(0))
    rb.extend(torch.arange(16 * 3 + 5))
    rb.update_priority(torch.arange(16), torch.rand(16))
    rb.extend(torch.arange(100, 103))
    rb.sampler.beta = 0.9
    rb[4] = torch.tensor(200)
    rb.dumps(tmp_path / "saved")
    for capacity in (16, 23):
        twin = buffer(capacity, 0.6, 0.4, generator=torch.Generator())
        twin.extend(torch.arange(50, 50 + capacity))
        twin.update_priority(0, 99.0)
        twin.loads(tmp_path / "saved")
        assert twin.sampler.beta == 0.9
        mine = dict(zip(rb[:].tolist(), priorities(rb), strict=True))
        assert dict(zip(twin[:].tolist(), priorities(twin), strict=True)) == mine
        assert twin.sampler.default_priority == rb.sampler.default_priority
    twin = buffer(16, 0.6, 0.4, generator=torch.Generator())
    twin.loads(tmp_path / "saved")
    for _ in range(5):
        (a, ia), (b, ib) = rb.sample(return_info=True), twin.sample(return_info=True)
        assert a.tolist() == b.tolist() and torch.equal(ia["priority_weight"], ib["priority_weight"])
        for one in (rb, twin):
            one.update_priority(ia["index"], a % 7)
            one.extend(torch.arange(3))


def test_a_change_right_after_loading_makes_a_step_new(tmp_path):
    rb = buffer()
    rb.update_priority(rb.extend(torch.arange(5)), 0.5)
    rb.dumps(tmp_path / "saved")
    rb.loads(tmp_path / "saved")
    rb[3] = torch.tensor(7)
    assert priorities(rb) == [0.5, 0.5, 0.5, 1, 0.5]


def test_a_state_is_as_large_as_what_is_stored(tmp_path):
    rb = buffer(100_000)
    rb.extend(torch.arange(5))
    assert len(rb.sampler.state_dict()["priorities"]) == 0  # nothing was looked at yet
    rb.sample()
    assert len(rb.sampler.state_dict()["priorities"]) == 5


def test_the_state_of_the_sampler_alone_goes_on_with_the_same_store():
    rb = buffer()
    rb.update_priority(rb.extend(torch.arange(13)), torch.arange(13.0))
    state = rb.sampler.state_dict()
    rb.update_priority(torch.arange(10), 50.0)
    other = PrioritizedSampler(10, 1.0, 1.0)
    other.load_state_dict(state)
    rb.set_sampler(other)
    rb.extend(torch.arange(2))
    assert priorities(rb) == [10, 11, 12, 12, 12, 5, 6, 7, 8, 9]


def test_a_state_of_other_settings_is_refused(tmp_path):
    rb = buffer()
    rb.extend(torch.arange(5))
    rb.dumps(tmp_path / "saved")
    for change in ({"alpha": 0.5}, {"eps": 0.1}, {"reduction": "min"}, {"max_priority_within_buffer": True}):
        other = PrioritizedReplayBuffer(**{"alpha": 1.0, "beta": 1.0, "storage": LazyTensorStorage(10), **change})
        with pytest.raises(ValueError, match=next(iter(change))):
            other.loads(tmp_path / "saved")
        with pytest.raises(ValueError, match=next(iter(change))):
            other.sampler.load_state_dict(rb.sampler.state_dict())


@each("change", [
    {"priorities": torch.tensor([1.0, -1.0, 1.0])}, {"priorities": torch.tensor([1.0, math.nan, 1.0])},
    {"priorities": torch.ones(2)}, {"seen": [[3, 0]]}, {"max_priority": math.inf}, {"max_priority": -1.0},
    {"seen": [[0, 1 << 60]]},
])  # fmt: skip
def test_a_state_that_makes_no_sense_is_refused(change):
    rb = buffer()
    rb.extend(torch.arange(3))
    rb.sample()
    sampler = PrioritizedSampler(10, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"saved|priority|numbers of rows"):
        sampler.load_state_dict({**rb.sampler.state_dict(), **change})
        sampler.sample(rb.storage, 2)


def test_a_prioritized_buffer_makes_its_own_sampler():
    for cls in (PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer):
        with pytest.raises(TypeError, match="makes its own sampler"):
            cls(1.0, 1.0, storage=LazyTensorStorage(10), sampler=RandomSampler())
        rb = cls(alpha=0.7, beta=0.9, capacity=30)
        assert type(rb.sampler) is PrioritizedSampler and rb.storage.max_size == 30
