"""TensorDictMaxValueWriter: the best stay, whatever way they came."""

import copy
import math
import threading

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict, tensorclass

from contracts.children import Signal
from contracts.each import each
from contracts.kills import killed_after
from engram import _native
from engram._native import FIRST_REPLACED
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from engram.errors import StorageInUseError
from engram.testing import WriterContract

STORAGES = [ListStorage, LazyTensorStorage, LazyMemmapStorage]


def items(ranks, ids=None):
    """Items of these ranks, whose other values follow from an id."""
    rank = torch.tensor(ranks, dtype=torch.float64)
    ids = torch.arange(len(ranks)) if ids is None else torch.tensor(ids)
    data = {"id": ids, "obs": ids.unsqueeze(-1) + torch.arange(3.0), "next": {"reward": rank.unsqueeze(-1)}}
    return TensorDict(data, [len(ranks)])


def make(storage=LazyTensorStorage, capacity=4, **kwargs):
    return TensorDictReplayBuffer(
        storage=storage(capacity) if isinstance(storage, type) else storage,
        writer=TensorDictMaxValueWriter(**kwargs),
        batch_size=8,
        generator=torch.Generator(),
    )


def held(rb):
    """Id, rank and own index of each slot; fails where a row is made of parts of several."""
    found = []
    for i in range(len(rb)):
        row = rb[i]
        assert row["obs"].tolist() == [row["id"] + k for k in range(3)]
        found.append((int(row["id"]), float(row["next", "reward"]), int(row["index"])))
    return found


@pytest.fixture(params=STORAGES, ids=lambda s: s.__name__)
def rb(request):
    return make(request.param)


class TestContract(WriterContract):
    drops = True

    def make(self):
        return TensorDictMaxValueWriter()


class TestWhatStays:
    def test_the_highest_ranks(self, rb):
        assert rb.extend(items([3.0, 1.0, 2.0, 5.0])).tolist() == [0, 1, 2, 3]
        assert rb.extend(items([0.5, 4.0, 9.0, 2.5], [10, 11, 12, 13])).tolist() == [-1, 1, 2, -1]
        assert held(rb) == [(0, 3.0, 0), (11, 4.0, 1), (12, 9.0, 2), (3, 5.0, 3)]

    def test_an_equal_rank_is_refused_and_of_equal_rows_the_first_goes(self, rb):
        rb.extend(items([1.0, 1.0, 1.0, 1.0]))
        assert rb.add(items([1.0])[0]) == -1
        assert [rb.add(items([2.0])[0]) for _ in range(5)] == [0, 1, 2, 3, -1]

    def test_minus_zero_is_zero_and_infinities_have_their_place(self, rb):
        rb.extend(items([0.0, -0.0, 0.0, 0.0]))
        assert rb.extend(items([-0.0, -math.inf, math.inf, 0.0])).tolist() == [-1, -1, 0, -1]
        assert rb.extend(items([math.inf] * 5)).tolist() == [1, 2, 3, -1, -1]

    def test_a_batch_can_be_larger_than_the_storage(self, rb):
        assert rb.extend(items([float(i) for i in range(11)])).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2]
        assert sorted(i for i, _, _ in held(rb)) == [7, 8, 9, 10]

    def test_of_two_that_replace_one_slot_the_last_stays(self):
        rb = make(capacity=1)
        assert rb.extend(items([1.0, 2.0, 0.0, 3.0])).tolist() == [0, 0, -1, 0]
        assert held(rb) == [(3, 3.0, 0)]

    def test_the_write_count_counts_what_was_stored(self, rb):
        rb.extend(items([3.0, 1.0, 2.0, 5.0, 0.0, 4.0]))
        assert (rb.write_count, len(rb)) == (5, 4)
        rb.add(items([0.0])[0])
        rb.add(items([9.0])[0])
        assert rb.write_count == 6
        rb.empty()
        assert rb.write_count == 0

    def test_without_a_limit_everything_stays(self):
        rb = ReplayBuffer(storage=ListStorage(), writer=TensorDictMaxValueWriter())
        assert rb.extend(items([3.0, 1.0, 2.0])).tolist() == [0, 1, 2] and rb.add(items([0.0])[0]) == 3

    def test_items_of_a_list_may_be_of_any_shape(self):
        rb = ReplayBuffer(storage=ListStorage(2), writer=TensorDictMaxValueWriter("r"), collate_fn=list)
        made = [{"r": torch.ones(n)} for n in (3, 1, 2)]
        assert rb.extend(made).tolist() == [0, 1, 1] and rb.add({"r": 9.0}) == 1
        rb.set_writer(TensorDictMaxValueWriter("r"))
        assert rb.extend(made[:1]).tolist() == [-1] and rb.add({"r": torch.full((5,), 1.0)}) == 0

    def test_items_of_two_shapes_in_one_list_are_ranked_each_by_its_own_values(self):
        rb = ReplayBuffer(storage=ListStorage(2), writer=TensorDictMaxValueWriter("r"), collate_fn=list)
        assert rb.extend([{"r": torch.ones(3)}, {"r": torch.tensor([5.0])}]).tolist() == [0, 1]
        assert rb.extend([{"r": torch.full((2,), 2.0)}, {"r": torch.tensor([0.5])}]).tolist() == [0, -1]

    def test_in_tensors_that_exist(self):
        rb = ReplayBuffer(storage=TensorStorage(items([1.0, 2.0, 3.0])), writer=TensorDictMaxValueWriter())
        assert rb.extend(items([0.0, 5.0, 2.5], [10, 11, 12])).tolist() == [-1, 0, 1]
        assert rb[:]["id"].tolist() == [11, 12, 2]


class TestRanks:
    @each(
        ("reduction", "stays"),
        [("sum", [1, 3]), ("mean", [1, 3]), ("max", [1, 2]), ("min", [0, 1]), ("median", [0, 3])],
    )
    def test_several_values_become_one(self, reduction, stays):
        values = torch.tensor([[3.0, 3.0, 3.0], [6.0, 2.0, 2.0], [0.0, 0.0, 9.0], [1.0, 4.0, 5.5]])
        rb = make(capacity=2, rank_key="r", reduction=reduction)
        rb.extend(TensorDict({"r": values, "id": torch.arange(4)}, [4]))
        assert sorted(rb[:]["id"].tolist()) == stays

    def test_a_median_of_an_even_number_is_the_lower_of_the_middle_two(self):
        rb = make(capacity=1, rank_key="r", reduction="median")
        rb.extend(TensorDict({"r": torch.tensor([[2.0, 2.0], [9.0, 1.0]])}, [2]))
        assert rb[0]["r"].tolist() == [2.0, 2.0]

    @each("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.float32])
    def test_any_real_numbers_do(self, dtype):
        rb = make(capacity=2, rank_key="r")
        rb.extend(TensorDict({"r": torch.tensor([0, 1, 0, 1]).to(dtype).requires_grad_(False)}, [4]))
        assert rb[:]["r"].tolist() == [1, 1]

    def test_a_lazily_negated_view_is_what_it_says(self):
        values = torch._neg_view(torch.tensor([1.0, 2.0, 3.0]))
        rb = make(capacity=1, rank_key="r")
        rb.extend(TensorDict({"r": values}, [3]))
        assert rb[0]["r"] == -1.0

    def test_a_nan_is_refused_with_everything_beside_it(self, rb):
        for fill in (0, 4):
            rb.extend(items([5.0] * fill)) if fill else None
            before, count = held(rb), rb.write_count
            with pytest.raises(ValueError, match=r"rank of item 1 is NaN.*nothing was written"):
                rb.extend(items([9.0, math.nan, 9.0]))
            with pytest.raises(ValueError, match="NaN"):
                rb.add(items([math.nan])[0])
            assert (held(rb), rb.write_count) == (before, count)
        assert rb.extend(items([9.0])).tolist() == [0]

    def test_a_batch_that_does_not_fit_changes_neither_rows_nor_order(self):
        rb = make()
        rb.extend(items([1.0, 2.0, 3.0, 4.0]))
        for wrong in (items([9.0, 9.0]).exclude("obs"), items([9.0]).set("obs", torch.zeros(1, 5))):
            with pytest.raises(ValueError, match="obs"):
                rb.extend(wrong)
        assert rb.extend(items([5.0, 6.0])).tolist() == [0, 1] and rb.write_count == 6

    def test_a_missing_key_complex_values_and_data_without_keys_are_refused(self):
        rb = make()
        with pytest.raises(KeyError, match=r"'reward'"):
            rb.extend(items([1.0]).exclude(("next", "reward")).set("next", TensorDict({"id": torch.zeros(1)}, [1])))
        with pytest.raises(KeyError, match="'next', 'reward'"):
            rb.extend(TensorDict({"x": torch.zeros(1)}, [1]))
        for data in (torch.zeros(3), {"x": torch.zeros(3)}, (torch.zeros(3),)):
            for write in (rb.extend, rb.add):
                with pytest.raises(RuntimeError, match="expects data to be a tensor collection"):
                    write(data)
        with pytest.raises(TypeError, match="complex"):
            make(rank_key="r").extend(TensorDict({"r": torch.zeros(2, dtype=torch.complex64)}, [2]))
        assert not rb.storage.initialized

    @pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
    def test_the_current_top_values_are_ranks_and_slots_the_lowest_first(self, storage):
        rb = make(storage(3), rank_key="r")
        assert rb.writer._current_top_values == []
        rb.extend(TensorDict({"r": torch.tensor([3.0, 1.0, 2.0, 5.0])}, [4]))
        assert rb.writer._current_top_values == [(2.0, 2), (3.0, 0), (5.0, 1)]
        rb[2] = TensorDict({"r": torch.tensor(9.0)}, [])
        assert rb.writer._current_top_values == [(3.0, 0), (5.0, 1), (9.0, 2)]

    def test_settings_that_mean_nothing_are_refused(self):
        with pytest.raises(ValueError, match="sum, mean, max, median, min, got 'best'"):
            TensorDictMaxValueWriter(reduction="best")
        with pytest.raises(ValueError, match="rank_key"):
            TensorDictMaxValueWriter(rank_key=())

    def test_several_dimensions_and_lanes_are_refused_and_the_buffer_keeps_its_writer(self):
        with pytest.raises(ValueError, match=r"not compatible with storages with more than one.*ndim=1, got ndim=2"):
            make(LazyTensorStorage(10, ndim=2))
        rb = ReplayBuffer(storage=LazyTensorStorage(10, ndim=2))
        with pytest.raises(ValueError, match="ndim=2"):
            rb.set_writer(TensorDictMaxValueWriter())
        assert type(rb.writer) is RoundRobinWriter
        with pytest.raises(ValueError, match="lanes=1, got"):
            make(LazyTensorStorage(10, shared=True, lanes=2)).extend(items([1.0]))


class TestTheOrderFollowsFromTheRows:
    def test_after_in_place_writes(self, rb):
        rb.extend(items([1.0, 2.0, 3.0, 4.0]))
        rb[0] = items([9.0], [10])[0]
        rb[[2, 3]] = items([0.5, 7.0], [11, 12])
        assert rb.extend(items([0.6, 5.0])).tolist() == [2, 2]

    def test_after_more_in_place_writes_than_the_log_holds(self):
        rb = make(capacity=16)
        rb.extend(items([float(i) for i in range(16)]))
        for _ in range(_native.LOG_ENTRIES // 16 + 1):
            rb[:] = items([float(15 - i) for i in range(16)])
        assert rb.extend(items([20.0, 20.0, 20.0])).tolist() == [15, 14, 13]

    def test_a_row_set_to_nan_goes_first(self, rb):
        rb.extend(items([1.0, 2.0, 3.0, 4.0]))
        rb[2] = items([math.nan], [10])[0]
        assert rb.extend(items([0.0, 0.0])).tolist() == [2, -1]

    def test_in_a_storage_that_another_writer_filled(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(4))
        rb.extend(items([float(i) for i in range(6)]))  # slots 0, 1: 4, 5
        rb.set_writer(TensorDictMaxValueWriter())
        assert rb.extend(items([2.5, 2.6, 9.0])).tolist() == [2, 2, 2] and "index" not in rb[:].keys()
        rb.set_writer(RoundRobinWriter())
        assert rb.extend(items([0.0, 0.0])).tolist() == [2, 3]
        rb.set_writer(TensorDictMaxValueWriter())
        assert rb.extend(items([0.5])).tolist() == [2]

    def test_after_empty(self, rb):
        rb.extend(items([1.0, 2.0, 3.0, 4.0, 5.0]))
        rb.empty()
        assert rb.extend(items([1.0, 0.0, 3.0, 2.0, 0.5])).tolist() == [0, 1, 2, 3, 1]

    def test_in_another_storage(self):
        rb = make()
        rb.extend(items([9.0] * 4))
        rb.set_storage(LazyTensorStorage(4))
        assert rb.extend(items([1.0, 0.0, 3.0, 2.0, 0.5])).tolist() == [0, 1, 2, 3, 1]

    def test_of_a_reopened_store(self, tmp_path):
        rb = make(LazyMemmapStorage(4, scratch_dir=tmp_path))
        rb.extend(items([3.0, 1.0, 2.0, 4.0, 9.0]))
        rb.storage.flush()
        rb.extend(items([8.0]))
        rb.storage.close()
        again = TensorDictReplayBuffer.open(tmp_path, writer=TensorDictMaxValueWriter())
        assert again.write_count == 6 and [r for _, r, _ in held(again)] == [3.0, 9.0, 8.0, 4.0]
        assert again.extend(items([3.5, 3.5, 5.0])).tolist() == [0, -1, 0]
        again.storage.close()

    def test_a_copy_of_the_writer_knows_what_the_rows_say(self):
        rb = make()
        rb.extend(items([1.0, 2.0, 3.0, 4.0, 5.0]))
        assert copy.copy(rb.writer).__getstate__()["_heap"] is None


class TestNumbersOfRows:
    def test_a_row_that_replaced_another_has_a_number_of_its_own(self, rb):
        rb.extend(items([1.0, 2.0, 3.0, 4.0]))
        every = torch.arange(4)
        before = rb.storage.lanes.generations(every)
        rb.extend(items([5.0, 6.0, 7.0]))  # over 0, 1, 2
        after = rb.storage.lanes.generations(every)
        assert (before == after).tolist() == [False, False, False, True] and len(set(after.tolist())) == 4
        _, info = rb.sample(return_info=True)
        assert info["generation"].tolist() == after[info["index"]].tolist()

    def test_a_conditional_write_passes_over_it(self, rb):
        rb.extend(items([1.0, 2.0, 3.0, 4.0]))
        was = rb.storage.lanes.generations(torch.arange(4))
        rb.extend(items([5.0], [10]))
        patch = items([0.0] * 4, [20, 21, 22, 23])
        done = rb.update_if_present(index=torch.arange(4), generation=was, patch=patch)
        assert done.updated.tolist() == [False, True, True, True]
        assert [i for i, _, _ in held(rb)] == [10, 21, 22, 23]

    def test_no_number_comes_twice_in_a_slot_whoever_writes(self, rb):
        seen, every = set(), torch.arange(4)
        number = 0.0
        for turn in range(12):
            rb.set_writer(TensorDictRoundRobinWriter() if turn % 3 == 2 else TensorDictMaxValueWriter())
            for _ in range(3):
                slots = {int(s) for s in rb.extend(items([number, number + 1, number + 2])) if s >= 0}
                number += 3
                now = rb.storage.lanes.generations(every).tolist()
                assert not seen & {(s, now[s]) for s in slots}
                seen |= {(s, now[s]) for s in range(len(rb))}
            if turn == 6:
                rb.empty()

    def test_a_read_gives_each_row_its_own_number_whoever_replaces_it_meanwhile(self):
        rb = make(LazyTensorStorage(64))
        rb.extend(items([0.0] * 64, list(range(64))))
        done, written = threading.Event(), 64

        def replace():
            nonlocal written
            while not done.is_set():
                rb.extend(items([float(written)], [written]))
                written += 1

        thread = threading.Thread(target=replace)
        thread.start()
        try:
            for _ in range(300):
                batch, gone, _, number = rb.storage.read(torch.arange(64), sequences=True)
                if gone is None:
                    ids = batch["id"]
                    expected = torch.where(ids < 64, ids, ids - 64 + FIRST_REPLACED)
                    assert torch.equal(number, expected)
        finally:
            done.set()
            thread.join()


class TestAlone:
    def test_replacing_needs_the_store_alone_and_appending_does_not(self, tmp_path):
        rb = make(LazyMemmapStorage(4, scratch_dir=tmp_path))
        rb.extend(items([1.0, 2.0]))
        other = LazyMemmapStorage.open(tmp_path)
        rb.extend(items([3.0, 4.0]))
        assert rb.extend(items([0.0])).tolist() == [-1]
        with pytest.raises(StorageInUseError, match="TensorDictMaxValueWriter"):
            rb.extend(items([9.0]))
        assert [r for _, r, _ in held(rb)] == [1.0, 2.0, 3.0, 4.0] and rb.write_count == 4
        other.close()
        assert rb.extend(items([9.0, 8.0])).tolist() == [0, 1]
        rb.storage.close()


@pytest.mark.parametrize("storage", STORAGES)
class TestSaving:
    def test_a_twin_goes_on_the_same(self, storage, tmp_path):
        rb, twin = make(storage), make(storage)
        rb.extend(items([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]))
        rb.dumps(tmp_path / "a")
        twin.extend(items([8.0] * 7))
        twin.loads(tmp_path / "a")
        state = rb.state_dict()
        third = make(storage)
        third.load_state_dict(state)
        for more in ([2.5, 9.0, 9.0], [5.5, 7.0, 3.5]):
            assert rb.extend(items(more)).tolist() == twin.extend(items(more)).tolist()
            third.extend(items(more))
            for other in (twin, third):
                assert held(rb) == held(other) and rb.write_count == other.write_count
            batches = [r.sample(return_info=True) for r in (rb, twin, third)]
            for batch, info in batches[1:]:
                assert (batch == batches[0][0]).all() and torch.equal(info["generation"], batches[0][1]["generation"])

    def test_a_larger_twin_takes_the_rows(self, storage, tmp_path):
        rb, twin = make(storage), make(storage, 6)
        rb.extend(items([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]))
        rb.dumps(tmp_path)
        twin.loads(tmp_path)
        assert twin.extend(items([0.0, 0.0, 1.0])).tolist()[:2] == [4, 5] and len(twin) == 6
        assert sorted(r for _, r, _ in held(twin))[:2] == [0.0, 1.0]

    def test_another_rule_does_not_fit(self, storage, tmp_path):
        rb = make(storage)
        rb.extend(items([3.0]))
        rb.dumps(tmp_path)
        with pytest.raises(ValueError, match="reduction='max' here, 'sum' there"):
            make(storage, reduction="max").loads(tmp_path)


def test_it_says_what_it_is():
    rb = make(capacity=3)
    rb.extend(items([1.0, 2.0]))
    assert repr(rb.writer) == ("TensorDictMaxValueWriter(cursor=2, rank_key=('next', 'reward'), reduction='sum')")


@pytest.mark.deep
def test_a_kill_while_rows_are_replaced_leaves_whole_rows(tmp_path):
    busy = Signal()

    def replace_for_ever():
        storage = LazyMemmapStorage(64, scratch_dir=tmp_path)
        rb = TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter("n"))
        for first in range(0, 1 << 40, 16):
            n = torch.arange(first, first + 16)
            rb.extend(TensorDict({"n": n, "obs": n.unsqueeze(-1) + torch.arange(300.0)}, [16]))
            if first == 1600:
                busy.send()

    killed_after(busy.wait, replace_for_ever)
    rb = TensorDictReplayBuffer.open(tmp_path, writer=TensorDictMaxValueWriter("n"))
    rows = rb[:]
    assert len(rows) == 64 and (rows["obs"] == rows["n"].unsqueeze(-1) + torch.arange(300.0)).all()
    assert rows["index"].tolist() == list(range(64))
    # A row and its sequence are of one write: of the first 64 their number, of the others how many have replaced any.
    expected = torch.where(rows["n"] < 64, rows["n"], rows["n"] - 64 + FIRST_REPLACED)
    assert torch.equal(rb.storage.lanes.generations(torch.arange(64)), expected)
    lowest = int(rows["n"].argmin())
    best = TensorDict({"n": torch.tensor([1 << 40]), "obs": torch.zeros(1, 300)}, [1])
    assert rb.extend(best).tolist() == [lowest]
    rb.storage.close()


# ---- against an oracle ----
RANKS = st.sampled_from([-math.inf, -2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf])
OPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), RANKS),
        st.tuples(st.just("extend"), st.lists(RANKS, min_size=1, max_size=12)),
        st.tuples(st.just("set"), st.integers(0, 4), RANKS),
        st.tuples(st.just("empty"), st.booleans()),
        st.tuples(st.just("save")),
        st.tuples(st.just("writer")),
        st.tuples(st.just("ring"), st.lists(RANKS, min_size=1, max_size=3)),
    ),
    max_size=14,
)


class Oracle:
    """Rows by slot, in plain Python."""

    def __init__(self, capacity):
        self.capacity, self.rows, self.count, self.cursor = capacity, {}, 0, 0

    def add(self, rank, number):
        if len(self.rows) < self.capacity:
            slot, self.cursor = self.cursor, (self.cursor + 1) % self.capacity
        else:
            slot = min(self.rows, key=lambda s: (self.rows[s][1], s))
            if not rank > self.rows[slot][1]:
                return -1
        self.rows[slot] = (number, rank)
        self.count += 1
        return slot

    def ring(self, rank, number):
        self.rows[self.cursor] = (number, rank)
        slot, self.cursor = self.cursor, (self.cursor + 1) % self.capacity
        self.count += 1
        return slot


@pytest.mark.parametrize("storage", STORAGES)
@given(ops=OPS)
@settings(max_examples=18, deadline=None)
def test_any_sequence_of_writes_leaves_what_an_oracle_has(tmp_path_factory, storage, ops):
    rb, oracle, number, tokens = make(storage, 5), Oracle(5), 0, {}
    for op, *args in ops:
        if op in ("extend", "ring"):
            ids = list(range(number, number + len(args[0])))
            number += len(ids)
            write = oracle.add
            if op == "ring":
                rb.set_writer(TensorDictRoundRobinWriter())
                write = oracle.ring
            made = [write(rank, i) for rank, i in zip(args[0], ids, strict=True)]
            assert rb.extend(items(args[0], ids)).tolist() == made
            rb.set_writer(TensorDictMaxValueWriter()) if op == "ring" else None
        elif op == "add":
            assert rb.add(items(args, [number])[0]) == oracle.add(args[0], number)
            number += 1
        elif op == "set" and args[0] in oracle.rows:
            rb[args[0]] = items(args[1:], [number])[0]
            oracle.rows[args[0]] = (number, args[1])
            tokens.pop(args[0], None)  # an in-place write keeps the row's number
            number += 1
        elif op == "empty":
            rb.empty(args[0])
            oracle.rows, oracle.cursor, oracle.count = {}, 0, 0 if args[0] else oracle.count
        elif op == "save":
            path = tmp_path_factory.mktemp("saved")
            rb.dumps(path)
            was = rb.storage.lanes.generations(torch.arange(len(rb))) if len(rb) else None
            rb = make(storage, 5)
            rb.loads(path)
            assert was is None or torch.equal(was, rb.storage.lanes.generations(torch.arange(len(rb))))
        elif op == "writer":
            rb.set_writer(TensorDictMaxValueWriter())
        assert [(i, r) for i, r, _ in held(rb)] == [oracle.rows[s] for s in sorted(oracle.rows)]
        assert rb.write_count == oracle.count and len(rb) == len(oracle.rows)
        for slot in range(len(rb)):
            generation = int(rb.storage.lanes.generations(torch.tensor([slot]))[0])
            of_row = tokens.setdefault(slot, {})
            assert of_row.setdefault(generation, oracle.rows[slot][0]) == oracle.rows[slot][0]


@pytest.mark.parametrize("storage", STORAGES)
def test_a_priority_for_a_row_that_was_replaced_is_skipped(storage):
    rb = TensorDictReplayBuffer(
        storage=storage(4), writer=TensorDictMaxValueWriter(), sampler=PrioritizedSampler(4, 1.0, 0.0), batch_size=4
    )
    rb.extend(items([1.0, 2.0, 3.0, 4.0]))
    rb.sample()
    was = rb.storage.lanes.generations(torch.arange(4))
    rb.extend(items([5.0], [10]))
    now = rb.storage.lanes.generations(torch.arange(4))
    rb.update_priority(torch.arange(4), torch.tensor([7.0, 7.0, 7.0, 7.0]), was)
    assert rb.sampler.priorities(torch.arange(4)).tolist() == [1.0, 7.0, 7.0, 7.0] and rb.sampler.skipped == 1
    rb.update_priority(torch.arange(4), torch.tensor([8.0, 8.0, 8.0, 8.0]), now)
    assert rb.sampler.priorities(torch.arange(4)).tolist() == [8.0] * 4


def test_priorities_that_come_with_the_data_of_a_refused_item_go_nowhere():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter(), sampler=PrioritizedSampler(2, 1.0, 0.0)
    )
    data = items([1.0, 2.0, 0.0, 3.0]).set("td_error", torch.tensor([4.0, 5.0, 6.0, 7.0]))
    assert rb.extend(data).tolist() == [0, 1, -1, 0]
    assert rb.sampler.priorities(torch.arange(2)).tolist() == [7.0, 5.0]


@tensorclass
class Ranked:
    """Has no field for an index."""

    id: torch.Tensor
    rank: torch.Tensor


@each("storage", STORAGES)
def test_items_of_a_tensorclass_without_a_field_for_their_index_are_ranked_and_stored_without_it(storage):
    rb = ReplayBuffer(storage=storage(2), writer=TensorDictMaxValueWriter(rank_key="rank"), batch_size=8)
    ranks = torch.tensor([1.0, 5.0, 0.0, 3.0])
    assert rb.extend(Ranked(torch.arange(4), ranks, batch_size=[4])).tolist() == [0, 1, -1, 0]
    assert rb.add(Ranked(torch.tensor(4), torch.tensor(4.0), batch_size=[])) == 0
    batch = rb.sample()
    assert type(batch) is Ranked and set(batch.id.tolist()) == {1, 4}
    assert rb.writer._current_top_values == [(4.0, 0), (5.0, 1)]
