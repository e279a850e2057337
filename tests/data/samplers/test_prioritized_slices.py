"""PrioritizedSliceSampler: starts by priority among the steps at which a slice fits, and nowhere else."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from contracts.children import Child
from contracts.each import each
from data.samplers.test_slices import SliceContract
from data.samplers.test_uniform import assert_uniform
from engram import _native
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)


class TestPrioritizedSliceSampler(SliceContract):
    def make(self):
        return PrioritizedSliceSampler(None, 0.7, 0.9, slice_len=2, end_key="done", truncated_key=None)


def make(length=3, alpha=1.0, beta=1.0, capacity=None, **kwargs):
    settings = {"slice_len": length, "end_key": "end", "truncated_key": None, **kwargs}
    return PrioritizedSliceSampler(capacity, alpha, beta, **settings)


def buffer(capacity=20, storage=LazyTensorStorage, **kwargs):
    return ReplayBuffer(storage=storage(capacity), sampler=make(**kwargs))


def data(ends, start=0):
    end = torch.tensor(ends, dtype=torch.bool)
    return TensorDict({"n": torch.arange(start, start + len(end)), "end": end}, [len(end)])


def rows_by_age(rb):
    """Slots of the stored steps of a ring, oldest first."""
    lane = rb.storage.lanes.states()[0]
    return [w % rb.storage.max_size for w in range(lane["first"], lane["published"])]


def valid_starts(rb, length, strict=True, span=(0, 0)):
    """The slots at which slices can start, each with the number of steps that follow it in its trajectory."""
    slots = rows_by_age(rb)
    stored = rb[torch.tensor(slots)]
    ends = [bool(step["end"]) for step in (stored if isinstance(stored, list) else stored.unbind(0))]
    found, begin = {}, 0
    for i in range(len(slots)):
        stop = next((k + 1 for k in range(i, len(slots)) if ends[k]), len(slots))
        fits = stop - i >= length - span[1] or i == begin
        if fits and (stop - begin >= length or not strict):
            found[slots[i]] = stop - i, i == begin
        begin = i + 1 if ends[i] else begin
    return found


def check(rb, length, slices=40, alpha=1.0, beta=1.0, eps=1e-8, strict=True, span=(0, 0)):
    """A batch against what the stored flags and the priorities say."""
    starts = valid_starts(rb, length, strict, span)
    if not starts:
        with pytest.raises(RuntimeError, match=r"no trajectory has|empty"):
            rb.sample(slices * length)
        return []
    batch, info = rb.sample(slices * length, return_info=True)
    p = rb.sampler.priorities(torch.tensor(list(starts)), storage=rb.storage)
    leaf = dict(zip(starts, ((p + eps) ** alpha).tolist(), strict=True))
    first = []
    slots = rows_by_age(rb)
    for k in range(int(info["slice_id"].max()) + 1):
        mine = info["slice_id"] == k
        index = info["index"][mine].tolist()
        at = slots.index(index[0])
        assert index == slots[at : at + len(index)] and index[0] in leaf
        left, is_first = starts[index[0]]
        whole = min(length, left)
        assert len(index) == whole or (is_first and min(length - span[0], left) <= len(index) < whole)
        assert not batch["end"][mine][:-1].any()
        expected = (leaf[index[0]] / min(leaf.values())) ** -beta
        assert info["priority_weight"][mine].tolist() == pytest.approx([expected] * len(index), rel=1e-5)
        first.append(index[0])
    return first


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_starts_are_those_of_a_plain_account_whatever_is_written(data_):
    capacity, length = data_.draw(st.integers(3, 25)), data_.draw(st.integers(1, 5))
    strict = data_.draw(st.booleans())
    span = data_.draw(st.tuples(st.integers(0, length - 1), st.integers(0, length - 1)))
    rb = buffer(capacity, length=length, strict_length=strict, span=span)
    for _ in range(data_.draw(st.integers(1, 12))):
        what = data_.draw(st.sampled_from(["extend", "extend", "update", "edit", "sample", "empty"]))
        if what == "extend":
            rb.extend(data(data_.draw(st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=30))))
        elif what == "empty":
            rb.empty()
        elif len(rb) and what == "update":
            slots = rows_by_age(rb)
            at = data_.draw(st.lists(st.sampled_from(slots), min_size=1, max_size=9))
            rb.update_priority(torch.tensor(at), torch.rand(len(at)) * 3)
        elif len(rb) and what == "edit":
            at = data_.draw(st.sampled_from(rows_by_age(rb)))
            rb[at] = data([data_.draw(st.booleans())])[0]
        elif len(rb):
            check(rb, length, 8, strict=strict, span=span)
    if len(rb):
        check(rb, length, strict=strict, span=span)


@each("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_starts_are_drawn_in_proportion_among_those_that_fit(storage):
    torch.manual_seed(0)
    rb = buffer(30, storage, alpha=0.6, beta=0.4)
    ends = [(k % 7 == 6) for k in range(47)]
    index = rb.extend(data(ends))[-30:]
    rb.update_priority(index, torch.rand(30) * 4)
    starts = list(valid_starts(rb, 3))
    p = (rb.sampler.priorities(torch.tensor(starts)) + 1e-8) ** 0.6
    draws = 60_000
    found = rb.sample(draws * 3)
    first = found["n"].reshape(-1, 3)[:, 0]
    counts = torch.bincount(first % 30, minlength=30)
    expected = p / p.sum() * draws
    assert counts.sum() == counts[torch.tensor(starts)].sum()
    statistic = float(((counts[torch.tensor(starts)] - expected) ** 2 / expected).sum())
    k, z = len(starts) - 1, 4.7534
    assert statistic < k * (1 - 2 / (9 * k) + z * math.sqrt(2 / (9 * k))) ** 3


@each("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_only_shorter_trajectories_are_short_slices_and_these_are_whole(storage):
    torch.manual_seed(0)
    rb = buffer(100, storage, length=5, strict_length=False)
    index = rb.extend(data([k == 19 or k == 22 for k in range(27)]))  # of 20, 3 and, running, 4 steps
    rb.update_priority(index, torch.rand(27) * 4)
    p = rb.sampler.priorities(torch.arange(27))
    batch, info = rb.sample(5 * 20_000, return_info=True)
    lengths = torch.bincount(info["slice_id"])
    first = batch["n"][lengths.cumsum(0) - lengths]
    starts = [*range(16), 20, 23]
    assert lengths.tolist() == [{20: 3, 23: 4}.get(n, 5) for n in first.tolist()]
    counts, expected = torch.bincount(first, minlength=27)[starts], p[starts] / p[starts].sum() * 20_000
    assert counts.sum() == 20_000 and float(((counts - expected) ** 2 / expected).sum()) < 17 + 5 * math.sqrt(34)


def test_first_step_of_a_short_trajectory_stays_a_start_while_the_ring_overwrites_it():
    rb = buffer(8, length=5, strict_length=False)
    rb.extend(data([0] * 3 + [1] + [0] * 4))
    for n in range(8, 30):
        assert set(check(rb, 5, 40, strict=False)) == set(valid_starts(rb, 5, strict=False))
        rb.add(data([n % 6 == 0], n)[0])


def test_a_step_becomes_a_start_when_its_slice_is_there_and_not_before():
    rb = buffer(20, length=4)
    rb.extend(data([0, 0, 0]))
    with pytest.raises(RuntimeError, match=r"no trajectory has 4 steps; the longest .* 3"):
        rb.sample(4)
    for n in range(3, 12):
        rb.add(data([0], n)[0])
        assert set(check(rb, 4, 200)) == set(range(n - 2))


def test_starts_follow_flags_that_are_changed_in_place():
    rb = buffer(12)
    rb.extend(data([0] * 10))
    assert set(check(rb, 3, 200)) == set(range(8))
    rb[4] = data([1], 4)[0]
    assert set(check(rb, 3, 200)) == {0, 1, 2, 5, 6, 7}
    rb[4] = data([0], 4)[0]
    assert set(check(rb, 3, 200)) == set(range(8))


def test_a_trajectory_that_another_process_left_does_not_go_on(tmp_path):
    storage = LazyMemmapStorage(20, tmp_path, lanes=1)
    other = ReplayBuffer(storage=storage, sampler=make(3))
    other.extend(data([0] * 5))
    storage.release()

    def work():
        ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path)).extend(data([0] * 5))

    Child(work).result()
    batch = other.sample(300)
    assert set(batch["n"].reshape(-1, 3)[:, 0].tolist()) == {0, 1, 2} and len(other) == 10
    found = other.sample(600, return_info=True)[1]["index"].reshape(-1, 3)[:, 0]
    assert set(found.tolist()) == {0, 1, 2, 5, 6, 7}


def test_environments_have_starts_of_their_own():
    rb = ReplayBuffer(storage=LazyTensorStorage(30, ndim=2), sampler=make(3))
    n = torch.arange(3).unsqueeze(1) * 1000 + torch.arange(14)
    rb.extend(TensorDict({"n": n, "end": n % 5 == 0}, [3, 14]))
    expected = {int(row[t]) for row in n for t in range(4, 12) if not bool((row[t : t + 2] % 5 == 0).any())}
    batch, info = rb.sample(900, return_info=True)
    slices = batch["n"].reshape(-1, 3)
    assert set(slices[:, 0].tolist()) == expected and (slices.diff() == 1).all()
    rb.update_priority((torch.tensor([7]), torch.tensor([1])), 1e12)  # step 1007
    t, env = info["index"]
    assert 1007 in expected and bool((rb.sample(30)["n"].reshape(-1, 3)[:, 0] == 1007).all()) and len(t) == len(env)


def test_the_length_of_slices_may_change_from_batch_to_batch():
    rb = buffer(20, length=None, slice_len=None, num_slices=200)
    rb.extend(data([0, 0, 0, 0, 1, 0, 0, 1]))
    for length in (2, 5, 3, 1, 2):
        batch = rb.sample(200 * length)
        starts = {row[0] for row in batch["n"].reshape(200, length).tolist()}
        assert starts <= set(valid_starts(rb, length))


def test_priorities_that_are_all_0_say_so_and_not_that_slices_are_too_long():
    rb = buffer(eps=0.0)
    rb.update_priority(rb.extend(data([0] * 6)), 0.0)
    with pytest.raises(RuntimeError, match="priorities of all stored steps are 0"):
        rb.sample(3)


def test_slices_that_lost_a_row_are_replaced_with_their_weights():
    rb = buffer(10, eps=0.0)
    rb.update_priority(rb.extend(data([0] * 10)), torch.tensor([8.0] + [2.0] * 9))
    draw = rb.sampler.draw_plan(rb.storage).draw(90)
    slots, info = draw.slots, draw.info
    _native.testing.claim(rb.storage.lanes.store, 0, 1)
    places = (slots == 0).nonzero().flatten().tolist()
    again = draw.redraw(places).slots
    assert places and 0 not in again.tolist()
    assert info["priority_weight"].tolist() == [1.0] * 90


def test_updates_in_samples_and_data_reach_the_starts():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=make(2, eps=0.0), batch_size=8)
    steps = data([0, 0, 0, 0, 1, 0, 0, 1])
    steps["td_error"] = torch.tensor([0.0, 0, 3, 0, 9, 0, 0, 9])
    rb.extend(steps)
    batch = rb.sample()
    assert batch["n"].reshape(-1, 2).tolist() == [[2, 3]] * 4 and batch["priority_weight"].tolist() == [1] * 8
    batch["td_error"] = torch.zeros(8)
    rb.update_priority(5, 1.0)
    rb.update_tensordict_priority(batch)
    assert rb.sample()["n"].reshape(-1, 2).tolist() == [[5, 6]] * 4


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_saved_state_goes_on_the_same(tmp_path, prefetch):
    def twin():
        return ReplayBuffer(
            storage=LazyTensorStorage(20), sampler=make(3, 0.6, 0.4), generator=torch.Generator(), batch_size=9,
            prefetch=prefetch,
        )  # fmt: skip

    rb = twin()
    for k in range(5):
        index = rb.extend(data([j % 5 == 4 for j in range(9)], 9 * k))
        rb.update_priority(index, torch.rand(9))
        rb.sample()
        rb.dumps(tmp_path / str(k))
        other = twin()
        other.loads(tmp_path / str(k))
        third = pickle.loads(pickle.dumps(rb.sampler))
        (a, ia), (b, ib) = rb.sample(return_info=True), other.sample(return_info=True)
        assert torch.equal(a["n"], b["n"]) and torch.equal(ia["priority_weight"], ib["priority_weight"])
        assert torch.equal(third.priorities(slice(None), storage=rb.storage), rb.sampler.priorities(slice(None)))


@each("settings, said", [
    ({"span": 3}, "span"), ({"span": (False, -1)}, "span"), ({"alpha": -1.0}, "alpha"),
    ({"length": 0}, "slice_len"),
    ({"capacity": 0}, "max_capacity"), ({"num_slices": 3}, "exactly one"),
])  # fmt: skip
def test_bad_settings_are_refused(settings, said):
    with pytest.raises((ValueError, TypeError), match=said):
        make(**settings)


def test_a_trajectory_that_was_overwritten_to_too_few_steps_has_no_starts_even_where_they_may_be_cut():
    rb = buffer(10, length=4, span=(False, 2))
    rb.extend(data([0, 0, 0, 0, 0, 1]))
    assert set(check(rb, 4, 200, span=(0, 2))) == {0, 1, 2, 3, 4}
    rb.extend(data([0, 0, 0, 0, 0, 0]))  # over steps 0 and 1: of the first trajectory four are left
    assert set(check(rb, 4, 200, span=(0, 2))) == {2, 3, 4} | {6, 7, 8, 9, 0}
    rb.extend(data([0]))
    assert set(check(rb, 4, 200, span=(0, 2))) == {6, 7, 8, 9, 0, 1}


def test_the_running_trajectory_may_become_long_enough_again():
    rb = buffer(6, length=4, span=(False, True))
    rb.extend(data([0, 0, 0, 0, 0, 0]))
    assert set(check(rb, 4, 100, span=(0, 3))) == set(range(6))
    rb.extend(data([0, 0, 1, 0]))
    assert set(check(rb, 4, 100, span=(0, 3))) == {4, 5, 0, 1, 2}
    rb.extend(data([0, 0, 0, 1, 0, 0]))
    assert set(check(rb, 4, 100, span=(0, 3))) == {4, 5, 0, 1}


def test_a_slice_from_the_first_step_is_cut_uniformly_and_starts_keep_their_probabilities():
    torch.manual_seed(0)
    rb = buffer(20, length=4, span=(2, False))
    rb.update_priority(rb.extend(data([0, 0, 0, 0, 0, 1])), torch.tensor([2.0, 1, 1, 1, 1, 1]))
    batch, info = rb.sample(40_000, return_info=True)
    lengths = torch.bincount(info["slice_id"])
    first = batch["n"][lengths.cumsum(0) - lengths]
    assert_uniform(lengths[first == 0].tolist(), [2, 3, 4])
    twice_as_likely = torch.where(torch.rand(len(first)) < 0.5, 3, 0)
    assert_uniform(torch.where(first == 0, twice_as_likely, first).tolist(), [0, 1, 2, 3])
    assert bool((lengths[first > 0] == 4).all())


def test_short_slices_by_priority_can_be_padded_behind():
    rb = buffer(20, length=4, span=(False, True), pad_output=True, truncated_key="cut")
    rb.update_priority(rb.extend(data([0, 0, 0, 0, 1])), torch.tensor([0.0, 0, 0, 1, 0]))
    batch = rb.sample(4)
    assert batch["n"].tolist() == [3, 4, 4, 4] and batch["collector", "mask"].tolist() == [True, True, False, False]
    assert batch["cut"].flatten().tolist() == [False, True, False, False]


def test_it_says_what_it_is():
    assert repr(make(4)).startswith("PrioritizedSliceSampler(slice_len=4, strict_length=True, alpha=1.0")
