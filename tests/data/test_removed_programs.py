"""Random programs of writes, removals, changes and copies: what can be drawn is what a few lines of Python say."""

import copy
import pickle
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

CAPACITY = 7
DRAWS = 300  # of which a row that can come is missing once in 10 ** 18 times

STORAGES = {
    "private": lambda: LazyTensorStorage(CAPACITY),
    "shared": lambda: LazyTensorStorage(CAPACITY, shared=True),
    "mapped": lambda: LazyMemmapStorage(CAPACITY),
    "list": lambda: ListStorage(CAPACITY),
}
SLOTS = st.lists(st.integers(0, CAPACITY - 1), max_size=CAPACITY)
STEPS = st.one_of(
    st.tuples(st.just("extend"), st.integers(1, CAPACITY + 3)),
    st.tuples(st.just("add"), st.just(0)),
    st.tuples(st.just("remove"), SLOTS),
    st.tuples(st.just("remove with generation"), SLOTS),
    st.tuples(st.just("remove where"), st.integers(2, 4)),
    st.tuples(st.just("priorities"), SLOTS),
    st.tuples(st.just("patch"), SLOTS),
    st.tuples(st.just("set"), st.integers(0, CAPACITY - 1)),
    st.tuples(st.just("copy"), st.sampled_from(["deepcopy", "pickle", "state", "save"])),
    st.tuples(st.just("sampler"), st.just(0)),
    st.tuples(st.just("empty"), st.just(0)),
)


class Row:
    """What is in a slot."""

    def __init__(self, n, generation):
        self.n, self.generation, self.removed = n, generation, False


class Programs:
    """A buffer, and beside it a dict of its slots."""

    def __init__(self, storage):
        self.make, self.rows, self.written, self.number = storage, {}, 0, 0
        self.rb = self.buffer()
        self.seen = {}  # slot -> a generation that was seen there once

    def buffer(self):
        return TensorDictReplayBuffer(
            storage=self.make(), sampler=PrioritizedSampler(None, 0.7, 0.5), writer=self.writer(), batch_size=DRAWS
        )

    writer = TensorDictRoundRobinWriter

    def batch(self, n):
        self.number += n
        return TensorDict({"n": torch.arange(self.number - n, self.number)}, [n])

    def put(self, n):
        self.rows[self.written % CAPACITY] = Row(n, None)
        self.written += 1

    # ---- steps ----
    def step(self, name, value):
        getattr(self, name.replace(" ", "_"))(value)

    def extend(self, n):
        batch = self.batch(n)
        self.rb.extend(batch)
        for number in batch["n"].tolist():
            self.put(number)

    def add(self, _):
        self.rb.add(self.batch(1)[0])
        self.put(self.number - 1)

    def stored(self, slots):
        return [slot for slot in slots if slot in self.rows]

    def take_out(self, slots):
        chosen = {slot for slot in self.stored(slots) if not self.rows[slot].removed}
        for slot in chosen:
            self.rows[slot].removed = True
        return len(chosen)

    def remove(self, slots):
        if slots := self.stored(slots):
            assert self.rb.remove(torch.tensor(slots)) == self.take_out(slots)

    def remove_with_generation(self, slots):
        slots = self.stored(slots)
        if not slots:
            return
        now = self.rb.writer.generations_of(torch.tensor(slots)).tolist()
        asked = [self.seen.get(slot, own) for slot, own in zip(slots, now, strict=True)]
        still = [slot for slot, own, then in zip(slots, now, asked, strict=True) if own == then]
        assert self.rb.remove(torch.tensor(slots), generation=torch.tensor(asked)) == self.take_out(still)
        self.seen.update(zip(slots, now, strict=True))

    def remove_where(self, divisor):
        chosen = [slot for slot, row in self.rows.items() if row.n % divisor == 0]
        assert self.rb.remove(lambda rows: rows["n"] % divisor == 0) == self.take_out(chosen)

    def priorities(self, slots):
        if slots := self.stored(dict.fromkeys(slots)):
            before = self.rb.sampler.skipped
            self.rb.update_priority(torch.tensor(slots), torch.linspace(1, 2, len(slots)))
            skipped = self.rb.sampler.skipped - before
            assert skipped == sum(self.rows[slot].removed for slot in slots)

    def patch(self, slots):
        if not (slots := self.stored(dict.fromkeys(slots))):
            return
        index = torch.tensor(slots)
        new = self.batch(len(slots))
        generation = self.rb.writer.generations_of(index)
        result = self.rb.update_if_present(index=index, generation=generation, patch={"n": new["n"]})
        assert result.stale.tolist() == [self.rows[slot].removed for slot in slots]
        for slot, n in zip(slots, new["n"].tolist(), strict=True):
            if not self.rows[slot].removed:
                self.rows[slot].n = n

    def set(self, slot):
        if slot in self.rows:
            row = self.rb[slot].clone()
            row["n"] = self.batch(1)["n"][0]
            self.rb[slot] = row
            self.rows[slot].n = self.number - 1

    def copy(self, way):
        if way == "deepcopy":
            twin = copy.deepcopy(self.rb)
        elif way == "pickle" and not self.shares_with_copies:
            twin = pickle.loads(pickle.dumps(self.rb))
        elif way == "save":
            with tempfile.TemporaryDirectory() as folder:
                self.rb.dumps(folder)
                twin = self.buffer()
                twin.loads(folder)
        else:
            twin = self.buffer()
            twin.load_state_dict(self.rb.state_dict())
        self.rb = twin

    shares_with_copies = False

    def sampler(self, _):
        self.rb.set_sampler(PrioritizedSampler(None, 0.7, 0.5))

    def empty(self, _):
        self.rb.empty()
        self.rows, self.written, self.seen = {}, 0, {}

    # ---- what holds after each ----
    def check(self):
        left = {row.n for row in self.rows.values() if not row.removed}
        assert self.rb.stats().removed == sum(row.removed for row in self.rows.values())
        assert len(self.rb) == len(self.rows)
        uniform = ReplayBuffer(storage=self.rb.storage, sampler=RandomSampler(), batch_size=DRAWS)
        for rb in (self.rb, uniform):
            assert _drawn(lambda rb=rb: rb.sample()) == left
            assert _drawn(lambda rb=rb: rb.sample(return_info=True)[0]) == left


def _drawn(sample):
    try:
        return set(sample()["n"].flatten().tolist())
    except RuntimeError as error:
        assert "removed" in str(error) or "empty storage" in str(error)
        return set()


class BestPrograms(Programs):
    """The same where a full storage keeps the best: a removed row goes first, then the lowest."""

    def writer(self):
        return TensorDictMaxValueWriter(rank_key="n")

    def batch(self, n):
        self.number += n
        order = torch.arange(self.number - n, self.number) * 37 % 101  # no order in time
        return TensorDict({"n": order}, [n])

    def put(self, n):
        if len(self.rows) < CAPACITY:
            self.rows[len(self.rows)] = Row(n, None)
            return
        lowest = min(self.rows, key=lambda slot: (-1 if self.rows[slot].removed else self.rows[slot].n, slot))
        if self.rows[lowest].removed or n > self.rows[lowest].n:
            self.rows[lowest] = Row(n, None)

    def extend(self, n):
        for _ in range(n):
            self.add(0)

    def add(self, _):
        batch = self.batch(1)
        self.rb.add(batch[0])
        self.put(int(batch["n"]))

    def set(self, slot):
        """Not here: what stands in a slot decides the order."""

    patch = set


def _run(kind, storage, program):
    torch.manual_seed(0)
    one = kind(STORAGES[storage])
    one.shares_with_copies = storage in ("shared", "mapped")  # a pickle of these is the same memory
    for name, value in program:
        one.step(name, value)
        one.check()


@pytest.mark.parametrize("storage", STORAGES)
@settings(max_examples=30)
@given(program=st.lists(STEPS, min_size=3, max_size=14))
def test_what_can_be_drawn_is_what_was_written_and_not_removed(storage, program):
    _run(Programs, storage, [("extend", 4), *program])


@pytest.mark.parametrize("storage", STORAGES)
@settings(max_examples=30)
@given(program=st.lists(STEPS, min_size=3, max_size=14))
def test_beside_a_writer_that_keeps_the_best_removed_rows_go_first(storage, program):
    _run(BestPrograms, storage, [("extend", CAPACITY), *program])


@pytest.mark.deep
@pytest.mark.parametrize("kind", [Programs, BestPrograms])
@pytest.mark.parametrize("storage", STORAGES)
@settings(max_examples=60)
@given(program=st.lists(STEPS, min_size=10, max_size=40))
def test_long_programs_do_the_same(storage, kind, program):
    _run(kind, storage, [("extend", 4), *program])


@pytest.mark.parametrize("kind", [Programs, BestPrograms])
def test_the_programs_find_what_they_were_not_told(kind):
    one = kind(STORAGES["private"])
    one.extend(CAPACITY)
    one.rb.remove([2])
    with pytest.raises(AssertionError):
        one.check()
    one.take_out([2])
    one.check()
    one.add(0)
    one.rows = {slot: copy.copy(row) for slot, row in one.rows.items()}
    one.rows[2].removed = not one.rows[2].removed
    with pytest.raises(AssertionError):
        one.check()
