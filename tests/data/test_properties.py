"""Whatever is done to a buffer, in whatever order, it holds what a list of Python numbers would hold."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.testing import numbers, of_numbers


class Oracle:
    """A ring of time steps; each is a list with one number for each environment."""

    def __init__(self, capacity: int, envs: int) -> None:
        self.capacity, self.envs = capacity, envs
        self.slots: list[list[int] | None] = [None] * capacity
        self.generations: list[int] = [-1] * capacity
        self.cursor = self.steps_written = 0
        self.seen: set[int] = set()
        self.epoch: set[int] = set()  # numbers that may still come in this epoch

    def write(self, columns: list[list[int]]) -> list[int]:
        where = []
        for column in columns:
            self.slots[self.cursor] = column
            where.append(self.cursor)
            self.cursor = (self.cursor + 1) % self.capacity
            self.steps_written += 1
        return where

    def stored(self) -> list[int]:
        return [slot for slot, column in enumerate(self.slots) if column is not None]

    def all_numbers(self) -> set[int]:
        return {n for column in self.slots if column is not None for n in column}


class BufferMachine(RuleBasedStateMachine):
    """Set `storages` and `envs` in a subclass."""

    storages: list[str] = []
    envs = 0

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.folders = 0

    @initialize(
        data=st.data(), capacity=st.integers(1, 11), sampler=st.sampled_from(["random", "epoch", "last dropped"])
    )
    def start(self, data, capacity, sampler):
        self.kind = data.draw(st.sampled_from(self.storages))
        self.buffer = data.draw(st.sampled_from([ReplayBuffer, TensorDictReplayBuffer]))
        self.capacity, self.sampler = capacity, sampler
        self.columns = 1 if not self.envs else self.envs
        self.number = 0
        self.oracle = Oracle(capacity, self.columns)
        self.rb = self.make()
        self.last = -1

    def make(self):
        total = self.capacity * self.columns
        ndim = 2 if self.envs else 1
        storage = {
            "list": lambda: ListStorage(total),
            "memory": lambda: LazyTensorStorage(total, ndim=ndim),
            "shared": lambda: LazyTensorStorage(total, ndim=ndim, shared=True),
            "temporary": lambda: LazyMemmapStorage(total, ndim=ndim),
            "named": lambda: LazyMemmapStorage(total, scratch_dir=self.next_folder(), ndim=ndim),
            "tensors": self.tensors,
        }[self.kind]()
        return self.buffer(storage=storage, sampler=self.make_sampler(), generator=torch.Generator().manual_seed(1))

    def tensors(self):
        from engram.testing import of_numbers as make

        shape = (self.capacity, self.envs) if self.envs else (self.capacity,)
        data = make(torch.zeros(shape, dtype=torch.int64))
        if self.buffer is TensorDictReplayBuffer:
            data["index"] = torch.zeros((*shape, 2) if self.envs else shape, dtype=torch.int64)
        storage = TensorStorage(data, ndim=2 if self.envs else 1)
        storage.empty()
        return storage

    def make_sampler(self):
        if self.sampler == "random":
            return RandomSampler()
        return SamplerWithoutReplacement(drop_last=self.sampler == "last dropped")

    def next_folder(self):
        self.folders += 1
        return self.folder / str(self.folders)

    def new_columns(self, n):
        made = [[self.number + t * self.columns + e for e in range(self.columns)] for t in range(n)]
        self.number += n * self.columns
        return made

    def batch(self, columns):
        """Columns as users give them: [envs, time], or [time]."""
        n = torch.tensor(columns).reshape(len(columns), self.columns)
        return of_numbers(n.T.contiguous() if self.envs else n[:, 0])

    # ---- writing ----
    @rule(n=st.one_of(st.integers(1, 4), st.integers(1, 40)), as_list=st.booleans())
    def extend(self, n, as_list):
        columns = self.new_columns(n)
        data = self.batch(columns)
        if as_list:
            data = list(data.unbind(1 if self.envs else 0))
        index = self.rb.extend(data)
        where = self.oracle.write(columns)
        expected = [[slot, e] for slot in where for e in range(self.columns)] if self.envs else where
        assert index.tolist() == expected

    @rule()
    def add(self):
        columns = self.new_columns(1)
        data = self.batch(columns)
        index = self.rb.add(data[:, 0] if self.envs else data[0])
        (where,) = self.oracle.write(columns)
        assert (index.tolist() if self.envs else index) == (
            [[where, e] for e in range(self.columns)] if self.envs else where
        )

    @precondition(lambda self: self.oracle.stored())
    @rule(data=st.data())
    def replace(self, data):
        stored = self.oracle.stored()
        chosen = data.draw(st.lists(st.integers(0, len(stored) - 1), unique=True, max_size=len(stored)))
        columns = self.new_columns(len(chosen))
        form = data.draw(st.sampled_from(["list", "tensor", "negative", "one"]))
        if form == "one":
            chosen, columns = [data.draw(st.integers(0, len(stored) - 1))], self.new_columns(1)
            given_ = self.batch(columns)
            self.rb[chosen[0]] = given_[:, 0] if self.envs else given_[0]
        elif not chosen:
            return
        else:
            # Stored slots are 0, 1, 2, ...: a place among them is a slot.
            index = [c - len(stored) for c in chosen] if form == "negative" else chosen
            self.rb[torch.tensor(index) if form == "tensor" else index] = self.batch(columns)
        for place, column in zip(chosen, columns, strict=True):
            self.oracle.slots[stored[place]] = column

    @rule(keep=st.booleans())
    def empty(self, keep):
        self.rb.empty(empty_write_count=not keep)
        self.oracle.slots = [None] * self.oracle.capacity
        self.oracle.cursor = 0
        if not keep:
            self.oracle.steps_written = 0

    @rule(data=st.data())
    def refused(self, data):
        if not self.oracle.stored():
            return
        if self.kind == "list":
            bad = {"a": torch.zeros(2), "b": torch.zeros(3)}
        else:
            bad = self.batch(self.new_columns(2))
            bad["obs"] = bad["obs"].double()
        with pytest.raises((ValueError, TypeError)):
            self.rb.extend(bad)
        beyond = data.draw(st.integers(len(self.oracle.stored()), 60))
        with pytest.raises(IndexError):
            self.rb[beyond]
        with pytest.raises(IndexError):
            self.rb[-beyond - 1]

    # ---- reading ----
    @rule(n=st.integers(1, 12))
    def sample(self, n):
        if not self.oracle.stored():
            with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
                self.rb.sample(n)
            return
        if self.sampler == "last dropped" and n > len(self.rb):
            with pytest.raises(ValueError, match="drop_last"):
                self.rb.sample(n)
            return
        batch, info = self.rb.sample(n, return_info=True)
        found = numbers(batch)
        assert set(found) <= self.oracle.all_numbers()
        assert len(found) == n or (self.sampler == "epoch" and 0 < len(found) <= n)
        if self.sampler != "random":
            assert len(set(found)) == len(found)
        index = torch.stack(info["index"], -1).tolist() if self.envs else [[i, 0] for i in info["index"].tolist()]
        assert [self.oracle.slots[slot][env] for slot, env in index] == found
        if self.buffer is TensorDictReplayBuffer:
            assert batch["index"].tolist() == (index if self.envs else [slot for slot, _ in index])

    @precondition(lambda self: self.oracle.stored() and self.sampler == "epoch")
    @rule(n=st.integers(1, 7))
    def an_epoch(self, n):
        self.rb.set_sampler(self.make_sampler())
        seen = []
        while not self.rb.sampler.ran_out:
            seen += numbers(self.rb.sample(n))
        assert sorted(seen) == sorted(self.oracle.all_numbers())

    # ---- saving ----
    @rule(way=st.sampled_from(["dumps", "state_dict", "storage"]), into_used=st.booleans())
    def move_to_a_twin(self, way, into_used):
        twin = self.make()
        if into_used and len(self.rb):
            twin.extend(self.batch(self.new_columns(self.capacity + 1)))
        if way == "dumps":
            self.rb.dumps(self.folder / "saved")
            twin.loads(self.folder / "saved")
        elif way == "state_dict":
            twin.load_state_dict(self.rb.state_dict())
        else:
            self.rb.storage.dumps(self.folder / "storage")
            twin.storage.loads(self.folder / "storage")
            self.rb = twin
            return
        if len(self.rb):
            n = min(3, len(self.rb))
            assert numbers(self.rb.sample(n)) == numbers(twin.sample(n))
        self.rb = twin

    @precondition(lambda self: self.kind == "named" and self.rb.storage.lanes is not None)
    @rule()
    def reopen(self):
        folder = self.rb.storage.scratch_dir
        self.rb.storage.close()
        self.rb = self.buffer.open(folder, sampler=self.make_sampler(), generator=torch.Generator().manual_seed(1))

    # ---- always ----
    @invariant()
    def it_holds_what_the_oracle_holds(self):
        if not hasattr(self, "rb"):
            return
        oracle, rb = self.oracle, self.rb
        stored = oracle.stored()
        assert len(rb) == len(rb.storage) == len(stored) * self.columns
        assert rb.write_count == oracle.steps_written * self.columns
        assert rb.writer._cursor == oracle.cursor
        if not stored:
            return
        assert stored == list(range(len(stored)))
        columns = [oracle.slots[s] for s in stored]
        expected = [list(row) for row in zip(*columns, strict=True)] if self.envs else [c[0] for c in columns]
        assert numbers(rb[:]) == expected
        for k in (0, len(stored) // 2, -1):
            assert numbers(rb[k]) == (columns[k] if self.envs else columns[k][0])
        with pytest.raises(IndexError):
            rb[len(stored)]
        generations = rb.storage.lanes.generations(torch.arange(self.capacity * self.columns)).reshape(-1, self.columns)
        assert ((generations >= 0).all(1) == torch.tensor([c is not None for c in oracle.slots])).all()
        order = generations[:, 0][: len(stored)]
        newest = (oracle.cursor - 1) % self.capacity
        assert order[newest] == order.max() and sorted((order - order.min()).tolist()) == list(range(len(stored)))
        if self.buffer is TensorDictReplayBuffer and self.kind != "list":
            index = rb[:]["index"]
            assert (index[0, :, 0] if self.envs else index).tolist() == stored

    def teardown(self):
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.mark.parametrize("storage", ["list", "memory", "shared", "temporary", "named", "tensors"])
@pytest.mark.parametrize("envs", [0, 2])
def test_a_buffer_holds_what_a_list_would_hold(storage, envs):
    if storage == "list" and envs:
        return  # lists have no environments
    check(storage, envs, examples=12, steps=25)


@pytest.mark.long
@pytest.mark.parametrize("storage", ["list", "memory", "shared", "temporary", "named", "tensors"])
@pytest.mark.parametrize("envs", [0, 2])
def test_a_buffer_holds_what_a_list_would_hold_for_long(storage, envs):
    if storage == "list" and envs:
        return
    check(storage, envs, examples=250, steps=50)


def check(storage, envs, examples, steps):
    class Machine(BufferMachine):
        pass

    Machine.storages, Machine.envs = [storage], envs
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
