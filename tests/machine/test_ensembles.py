"""Ensembles against an oracle, at random; and ensembles that are wrong."""

from __future__ import annotations

import gc
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engram.data import ReplayBuffer, ReplayBufferEnsemble, TensorDictReplayBuffer
from engram.testing import chi_square
from machine.machine import run_machine
from machine.mutants.base import is_found
from machine.mutants.ensembles import ENSEMBLE_MUTANTS
from machine.parts import SAMPLERS, STORAGES
from machine.ring import Ring, Row, Source, as_data, as_steps, priority_of

# ---- an ensemble beside an oracle of each member ----
SIZES = [2, 4, 5, 12]


class Member(NamedTuple):
    storage: str
    ring: Ring
    source: Source
    sampler: Any


class EnsembleMachine(RuleBasedStateMachine):
    """What can be done to an ensemble and its members."""

    prefetch = 0

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.folders = 0
        self.rb: Any = None

    @initialize(
        data=st.data(), tensordict=st.booleans(), p=st.sampled_from([None, (1, 1), (3, 1), (0, 2)]), all_=st.booleans()
    )
    def start(self, data: st.DataObject, tensordict: bool, p: Any, all_: bool) -> None:
        self.buffer = TensorDictReplayBuffer if tensordict else ReplayBuffer
        self.p, self.all = (None if all_ else p), all_
        self.members = []
        for k in range(2):
            ring = Ring(data.draw(st.integers(1, 12)), 0)
            sampler = SAMPLERS[data.draw(st.sampled_from(["random", "priorities", "priorities as they are"]))](ring)
            sampler.begin()
            storage = data.draw(st.sampled_from(["memory", "temporary", "named", "tensors", "shared", "list"]))
            self.members.append(Member(storage, ring, Source(0, seed=k), sampler))
        self.rb = self.make()

    def make(self) -> Any:
        parts = []
        for member in self.members:
            kind = STORAGES[member.storage]
            storage = kind.make(member.ring.capacity, 0, self.buffer is TensorDictReplayBuffer, self.next_folder)
            parts.append(self.buffer(storage=storage, sampler=member.sampler.make()))
        generator = torch.Generator().manual_seed(1)
        settings = {"sample_from_all": True} if self.all else {"p": self.p}
        return ReplayBufferEnsemble(*parts, generator=generator, **settings)

    def next_folder(self) -> Path:
        self.folders += 1
        return self.folder / str(self.folders)

    # ---- writing ----
    @rule(which=st.integers(0, 1), n=st.integers(1, 20))
    def extend(self, which: int, n: int) -> None:
        member = self.members[which]
        columns = member.source.take(n)
        where = member.ring.append(columns)
        assert self.rb[which].extend(as_data(columns, 0)).tolist() == where
        member.sampler.wrote(where)
        if self.buffer is TensorDictReplayBuffer:
            priorities = [priority_of(column[0].n) for column in columns]
            member.sampler.updated([(slot, 0) for slot in where], priorities)

    @rule(which=st.integers(0, 1), data=st.data())
    def replace(self, which: int, data: st.DataObject) -> None:
        member = self.members[which]
        if member.ring.stored():
            slot = data.draw(st.sampled_from(member.ring.stored()))
            (column,) = member.source.take(1)
            self.rb[which][slot] = as_data([column], 0)[0]
            member.ring.replace(slot, column)
            member.sampler.replaced([slot])

    @rule()
    def writing_to_the_ensemble_is_refused(self) -> None:
        data = as_data(self.members[0].source.take(1), 0)
        for write in (lambda: self.rb.extend(data), lambda: self.rb.add(data[0])):
            with pytest.raises(RuntimeError, match="write to a member"):
                write()

    @rule(what=st.sampled_from(["nothing", "nothing", "first", "second", "all"]))
    def empty(self, what: str) -> None:
        emptied = {"nothing": [], "first": [0], "second": [1], "all": [0, 1]}[what]
        if what == "all":
            self.rb.empty()
        for k in emptied:
            if what != "all":
                self.rb[k].empty()
            self.members[k].ring.empty(False)
            self.members[k].sampler.emptied()

    # ---- sampling ----
    def all_hold_something(self) -> bool:
        return all(member.ring.stored() for member in self.members)

    @precondition(all_hold_something)
    @rule(n=st.sampled_from(SIZES), times=st.integers(1, 3))
    def sample(self, n: int, times: int) -> None:
        for _ in range(times):
            self.draw(self.rb, n)

    def draw(self, rb: Any, n: int) -> Any:
        """A batch, held against each member's oracle; the members that it came from."""
        if n % 2:
            with pytest.raises(ValueError, match="does not divide"):
                rb.sample(n)
            return []
        batch, info = rb.sample(n, return_info=True)
        ids = info["buffer_ids"].tolist()
        assert len(ids) == len(batch) == 2 and all(row == [row[0]] * (n // 2) for row in ids)
        drawn = [row[0] for row in ids]
        for k, which in enumerate(drawn):
            member, part = self.members[which], batch[k]
            said = {key: value[k] for key, value in info.items()}
            rows: list[Row] = [(slot, 0) for slot in said["index"].tolist()]
            member.sampler.drew(n // 2, rows, said, part if said.get("priority_weight") is not None else {})
            assert as_steps(part) == [member.ring.step(row) for row in rows]
        assert drawn == [0, 1] if self.all else all(self.p is None or self.p[k] for k in drawn)
        self.last = batch, info
        return drawn

    @precondition(all_hold_something)
    @rule()
    def members_are_drawn_as_often_as_they_should_be(self) -> None:
        drawn = [which for _ in range(60) for which in self.draw(self.rb, 2)]
        expected = self.p if self.p and not self.all else (1, 1)
        assert chi_square([drawn.count(0), drawn.count(1)], expected) > 1e-9

    @precondition(all_hold_something)
    @rule(priorities=st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0]), min_size=4, max_size=4))
    def update_what_was_drawn(self, priorities: list[float]) -> None:
        drawn = self.draw(self.rb, 4)
        _, info = self.last
        self.rb.update_priority(info, torch.tensor(priorities).reshape(2, 2))
        for k, which in enumerate(drawn):
            rows = [(slot, 0) for slot in info["index"][k].tolist()]
            self.members[which].sampler.updated(rows, priorities[2 * k : 2 * k + 2])

    @precondition(lambda self: not self.all)
    @rule(p=st.sampled_from([(1, 1), (3, 1), (0, 2), (1, 0)]))
    def set_p(self, p: tuple[int, int]) -> None:
        self.rb.sampler.p = self.p = p

    # ---- saving ----
    @rule(way=st.sampled_from(["dumps", "state_dict"]), into_used=st.booleans())
    def move_to_a_twin(self, way: str, into_used: bool) -> None:
        twin = self.make()
        if into_used:
            for k, member in enumerate(self.members):
                if member.ring.stored():
                    twin[k].extend(as_data(member.source.take(3), 0))
        if way == "dumps":
            self.rb.dumps(self.folder / "saved")
            twin.loads(self.folder / "saved")
        else:
            twin.load_state_dict(self.rb.state_dict())
        if self.all_hold_something():
            for n in (2, 12):
                assert self.draw(self.rb, n) == self.draw(twin, n)
        self.rb = twin

    # ---- always ----
    @invariant()
    def members_hold_what_their_oracles_hold(self) -> None:
        if self.rb is None:
            return
        assert len(self.rb) == 2 and self.rb.write_count == sum(member.ring.written for member in self.members)
        assert self.rb.writer._cursor == [member.ring.cursor for member in self.members]
        for rb, member in zip((self.rb[0], self.rb[1]), self.members, strict=True):
            stored = member.ring.stored()
            assert (len(rb), rb.writer._cursor) == (len(stored), member.ring.cursor)
            if stored:
                whole = rb[:]
                found = as_steps(torch.stack(whole) if isinstance(whole, list) else whole)
                assert found == [member.ring.step((slot, 0)) for slot in stored]

    def teardown(self) -> None:
        self.rb = self.last = None
        gc.collect(0)
        shutil.rmtree(self.folder, ignore_errors=True)


# ---- the tests ----
pytestmark = pytest.mark.quick


@pytest.mark.deep
def test_an_ensemble_is_what_plain_python_would_be():
    run_machine(EnsembleMachine, 20, 25)


@pytest.mark.long
def test_an_ensemble_is_what_plain_python_would_be_for_long():
    run_machine(EnsembleMachine, 1000, 40)


@pytest.mark.deep
@pytest.mark.mutant
@pytest.mark.parametrize("name", ENSEMBLE_MUTANTS)
def test_the_machine_finds(monkeypatch, name):
    ENSEMBLE_MUTANTS[name](monkeypatch)
    assert is_found(lambda: run_machine(EnsembleMachine, 400, 30, shrink=False))
