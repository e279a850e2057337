"""A buffer and its oracle, driven side by side by hypothesis."""

from __future__ import annotations

import contextlib
import gc
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engram.data import ReplayBuffer, TensorDictReplayBuffer
from engram.testing import chi_square
from machine.parts import SAMPLERS, STORAGES, WRITERS
from machine.ring import Ring, Row, Source, Step, as_data, as_steps, priority_of

FORBIDDEN = "immutable"


class BufferMachine(RuleBasedStateMachine):
    """Set what it is made of in a subclass."""

    storage_kinds: list[str] = []
    sampler_kinds: list[str] = []
    writer_kinds: list[str] = []
    envs = 0
    prefetch = 0

    # ---- making ----
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.folders = 0
        self.rb: Any = None

    @initialize(
        data=st.data(),
        capacity=st.one_of(st.integers(1, 6), st.integers(7, 24)),
        seed=st.integers(0, 1000),
        tensordict=st.booleans(),
    )
    def start(self, data: st.DataObject, capacity: int, seed: int, tensordict: bool) -> None:
        self.storage_kind = STORAGES[data.draw(st.sampled_from(self.storage_kinds))]
        self.buffer = TensorDictReplayBuffer if tensordict else ReplayBuffer
        self.capacity = capacity
        self.source = Source(self.envs, seed)
        self.ring = Ring(capacity, self.envs)
        self.writer = WRITERS[self.writer_kinds[0]]()
        self.writer.begin(self.ring)
        self.sampler = SAMPLERS[data.draw(st.sampled_from(self.sampler_kinds))](self.ring)
        self.sampler.begin()
        self.index_is_stored = self.writer.stores_index
        self.rb = self.make()
        self.ring.seam_comes = True
        self.ever: dict[Row, set[Step]] = {}  # what a batch that was prepared ahead may hold

    def make(self) -> Any:
        storage = self.storage_kind.make(
            self.capacity * self.source.columns, self.envs, self.index_is_stored, self.next_folder
        )
        return self.buffer(storage=storage, **self.parts())

    def parts(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1)
        return {
            "sampler": self.sampler.make(), "writer": self.writer.make(), "generator": generator,
            "prefetch": self.prefetch,
        }  # fmt: skip

    def next_folder(self) -> Path:
        self.folders += 1
        return self.folder / str(self.folders)

    def data(self, columns: list[list[Step]]) -> Any:
        return as_data(columns, self.envs)

    # ---- writing ----
    @rule(n=st.one_of(st.integers(1, 4), st.integers(1, 40)), as_list=st.booleans(), cut=st.booleans())
    def extend(self, n: int, as_list: bool, cut: bool) -> None:
        if cut:
            self.source.cut()
        columns = self.source.take(n)
        data = self.data(columns)
        if as_list:
            data = list(data.unbind(1 if self.envs else 0))
        if self.writer.forbids:
            return self.forbidden(lambda: self.rb.extend(data))
        index = self.rb.extend(data)
        where = self.wrote(columns)
        assert index.tolist() == ([[t, e] for t in where for e in range(self.envs)] if self.envs else where)

    @rule()
    def add(self) -> None:
        columns = self.source.take(1)
        step = self.data(columns)[:, 0] if self.envs else self.data(columns)[0]
        if self.writer.forbids:
            return self.forbidden(lambda: self.rb.add(step))
        index = self.rb.add(step)
        (where,) = self.wrote(columns)
        assert (index.tolist() if self.envs else index) == (
            [[where, e] for e in range(self.envs)] if self.envs else where
        )

    def wrote(self, columns: list[list[Step]]) -> list[int]:
        where = self.writer.write(self.ring, columns)
        self.sampler.wrote([slot for slot in where if slot >= 0])
        if self.buffer is TensorDictReplayBuffer:  # which takes priorities from the data
            steps = [((t, e), step) for t, c in zip(where, columns, strict=True) if t >= 0 for e, step in enumerate(c)]
            self.sampler.updated([row for row, _ in steps], [priority_of(step.n) for _, step in steps])
        self.remember()
        return where

    def remember(self) -> None:
        for row in self.ring.rows():
            self.ever.setdefault(row, set()).add(self.ring.step(row))

    def forget(self) -> None:
        self.ever = {}
        self.remember()

    def forbidden(self, change: Any) -> None:
        with pytest.raises(RuntimeError, match=FORBIDDEN):
            change()

    @precondition(lambda self: self.ring.stored())
    @rule(data=st.data(), form=st.sampled_from(["list", "tensor", "negative", "one"]))
    def replace(self, data: st.DataObject, form: str) -> None:
        stored = self.ring.stored()
        places = st.integers(0, len(stored) - 1)
        chosen = [data.draw(places)] if form == "one" else data.draw(st.lists(places, unique=True, min_size=1))
        columns = self.source.take(len(chosen))
        index: Any = [c - len(stored) for c in chosen] if form == "negative" else chosen
        given = self.data(columns)
        if form == "one":
            index, given = chosen[0], given[:, 0] if self.envs else given[0]
        if form == "tensor":
            index = torch.tensor(index)
        if self.writer.forbids:
            return self.forbidden(lambda: self.rb.__setitem__(index, given))
        self.rb[index] = given
        self.replaced([stored[c] for c in chosen], columns)

    def replaced(self, slots: list[int], columns: list[list[Step]]) -> None:
        for slot, column in zip(slots, columns, strict=True):
            self.ring.replace(slot, column)
        self.sampler.replaced(slots)
        self.forget()

    @precondition(lambda self: self.ring.stored() and not self.envs)
    @rule(data=st.data())
    def update_if_present(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(self.ring.stored()), unique=True, min_size=1))
        stale = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
        columns = self.source.take(len(slots))
        generation = self.rb.storage.lanes.generations(torch.tensor(slots)) - torch.tensor(stale) * self.capacity
        values = self.data(columns)
        if self.writer.forbids:
            return self.forbidden(lambda: self.rb.update_if_present(torch.tensor(slots), generation, values))
        done = self.rb.update_if_present(torch.tensor(slots), generation, values)
        assert done.tolist() == [not s for s in stale]
        fresh = [k for k, s in enumerate(stale) if not s]
        self.replaced([slots[k] for k in fresh], [columns[k] for k in fresh])

    @rule(
        what=st.sampled_from(["refused", "refused", "refused", "empty", "empty, count kept"]), beyond=st.integers(0, 60)
    )
    def empty(self, what: str, beyond: int) -> None:
        if what == "refused":
            return self.refused(beyond)
        keep = what == "empty, count kept"
        if self.writer.forbids:
            return self.forbidden(lambda: self.rb.empty(empty_write_count=not keep))
        self.rb.empty(empty_write_count=not keep)
        self.ring.empty(keep)
        self.sampler.emptied()
        self.writer.begin(self.ring)
        self.forget()

    def refused(self, beyond: int) -> None:
        """What does not fit, and what is not there, is refused and changes nothing."""
        if not self.ring.stored() or self.writer.forbids:
            return
        bad = self.data(self.source.take(2))
        bad["obs"] = bad["obs"].double()
        if self.storage_kind is STORAGES["list"]:
            bad = {"a": torch.zeros(2), "b": torch.zeros(3)}
        with pytest.raises((ValueError, TypeError, KeyError)):
            self.rb.extend(bad)
        for index in (len(self.ring.stored()) + beyond, -len(self.ring.stored()) - 1 - beyond):
            with pytest.raises(IndexError):
                self.rb[index]

    # ---- priorities ----
    @precondition(lambda self: self.ring.stored() and self.sampler.has_priorities)
    @rule(data=st.data(), with_generation=st.booleans())
    def update_priority(self, data: st.DataObject, with_generation: bool) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.ring.rows()), min_size=1, max_size=12, unique=True))
        some = st.lists(st.sampled_from([0.0, 1e-3, 0.5, 1.0, 2.5, 7.0]), min_size=len(rows), max_size=len(rows))
        priorities = data.draw(some)
        index = torch.tensor([list(row) if self.envs else row[0] for row in rows])
        generation = None
        if with_generation:
            stale = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
            generation = self.rb.storage.lanes.generations(self.flat(rows)) - torch.tensor(stale) * self.capacity
            kept = [k for k, s in enumerate(stale) if not s]
        else:
            kept = list(range(len(rows)))
        self.rb.update_priority(index, torch.tensor(priorities), generation)
        self.sampler.updated([rows[k] for k in kept], [priorities[k] for k in kept])

    @precondition(lambda self: self.ring.stored() and self.sampler.has_priorities)
    @rule(data=st.data())
    def mark_update(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.ring.rows()), min_size=1, max_size=5, unique=True))
        self.rb.mark_update(torch.tensor([list(row) if self.envs else row[0] for row in rows]))
        self.sampler.marked(rows)

    @precondition(lambda self: self.sampler.has_priorities)
    @rule(beta=st.sampled_from([0.0, 0.4, 1.0]))
    def set_beta(self, beta: float) -> None:
        self.sampler.set_beta(self.rb.sampler, beta)

    def flat(self, rows: list[Row]) -> torch.Tensor:
        return torch.tensor([slot * self.source.columns + env for slot, env in rows])

    # ---- sampling ----
    @rule(data=st.data(), times=st.integers(1, 4))
    def sample(self, data: st.DataObject, times: int) -> None:
        n = data.draw(st.sampled_from(self.sampler.batch_sizes))
        for _ in range(times):
            self.draw(n)

    def draw(self, n: int) -> list[Row]:
        """A batch, held against the oracle; its rows, none where it is refused as it must be."""
        refusal = self.sampler.refusal(n)
        if refusal:
            with pytest.raises((RuntimeError, ValueError), match=refusal):
                self.rb.sample(n)
            return []
        batch, info = self.rb.sample(n, return_info=True)
        found, rows = as_steps(batch), self.rows_of(info["index"])
        assert len(found) == len(rows)
        if self.buffer is TensorDictReplayBuffer:
            assert batch["index"].tolist() == [list(row) if self.envs else row[0] for row in rows]
        if self.prefetch:  # from before the last changes, perhaps
            assert all(step in self.ever[row] for row, step in zip(rows, found, strict=True))
            return rows
        self.sampler.drew(n, rows, info, batch)
        assert [self.ring.step(row) for row in rows] == found
        return rows

    def rows_of(self, index: Any) -> list[Row]:
        if self.envs:
            return [tuple(row) for row in torch.stack(index, -1).tolist()]
        return [(slot, 0) for slot in index.tolist()]

    @precondition(lambda self: self.ring.stored() and not self.prefetch and self.sampler.has_frequencies)
    @rule()
    def what_is_drawn_is_as_frequent_as_it_should_be(self) -> None:
        expected = self.sampler.frequencies()
        if not expected:  # no trajectory is long enough
            return
        rows = self.draw(self.sampler.many())
        counts = dict.fromkeys(expected, 0)
        for unit in self.sampler.units(rows):
            assert expected.get(unit), f"{unit} cannot be drawn"
            counts[unit] += 1
        assert chi_square(list(counts.values()), list(expected.values())) > 1e-9, (counts, expected)

    @precondition(lambda self: self.ring.stored() and self.sampler.may_be_short and not self.prefetch)
    @rule(data=st.data())
    def an_epoch(self, data: st.DataObject) -> None:
        n = data.draw(st.sampled_from(self.sampler.batch_sizes))
        if self.sampler.refusal(n):
            return
        self.draw(n)
        while self.sampler.sure and not self.sampler.ran_out():
            assert not self.rb.sampler.ran_out
            self.draw(n)
        assert self.rb.sampler.ran_out or not self.sampler.sure
        self.draw(n)

    # ---- other parts ----
    @rule(data=st.data())
    def another_sampler(self, data: st.DataObject) -> None:
        self.sampler = SAMPLERS[data.draw(st.sampled_from(self.sampler_kinds))](self.ring)
        self.sampler.begin()
        self.rb.set_sampler(self.sampler.make())

    @rule(data=st.data())
    def another_writer(self, data: st.DataObject) -> None:
        kinds = [WRITERS[k] for k in self.writer_kinds if WRITERS[k].stores_index == self.index_is_stored]
        self.writer = data.draw(st.sampled_from(kinds))()
        self.writer.begin(self.ring)
        self.rb.set_writer(self.writer.make())

    # ---- saving ----
    @precondition(lambda self: not self.writer.forbids)
    @rule(way=st.sampled_from(["dumps", "state_dict", "storage"]), into_used=st.booleans())
    def move_to_a_twin(self, way: str, into_used: bool) -> None:
        twin = self.make()
        if into_used and self.ring.stored():
            twin.extend(self.data(self.source.take(self.capacity + 1)))
            with contextlib.suppress(RuntimeError, ValueError):  # a trajectory may be too short
                twin.sample(self.sampler.batch_sizes[0])
        old, self.rb = self.rb, twin
        if way == "storage":
            old.storage.dumps(self.folder / "storage")
            twin.storage.loads(self.folder / "storage")
            self.sampler.begin()
            twin.set_sampler(self.sampler.make())
            self.writer.begin(self.ring)
            return
        if way == "dumps":
            old.dumps(self.folder / "saved")
            twin.loads(self.folder / "saved")
        else:
            twin.load_state_dict(old.state_dict())
        self.forget()
        for k in (0, -1):
            self.draws_the_same(old, twin, self.sampler.batch_sizes[k])

    def draws_the_same(self, old: Any, twin: Any, n: int) -> None:
        if self.sampler.refusal(n):
            return
        batch, info = old.sample(n, return_info=True)
        drawn: list[Any] = []
        self.rb = _Drawn(twin, drawn)
        self.draw(n)
        self.rb = twin
        same, said = drawn[0]
        assert as_steps(batch) == as_steps(same) and set(info) == set(said)
        for key, value in info.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, said[key]), key

    @precondition(lambda self: self.storage_kind.reopens and not self.prefetch and self.rb.storage.lanes is not None)
    @rule()
    def reopen(self) -> None:
        folder = self.rb.storage.scratch_dir
        self.rb.storage.close()
        self.rb = self.buffer.open(folder, **self.parts())
        self.ring.seam_comes = True
        self.sampler.begin()
        self.writer.begin(self.ring)

    # ---- always ----
    @invariant()
    def it_holds_what_the_oracle_holds(self) -> None:
        if self.rb is None:
            return
        ring, rb, stored = self.ring, self.rb, self.ring.stored()
        assert len(rb) == len(rb.storage) == len(stored) * self.source.columns
        assert (rb.write_count, rb.writer._cursor) == (ring.written * self.source.columns, ring.cursor)
        if not stored:
            return
        whole: Any = rb[:]
        whole = torch.stack(whole) if isinstance(whole, list) else whole
        rows = [(slot, env) for env in range(self.source.columns) for slot in stored]
        assert as_steps(whole.reshape(-1)) == [ring.step(row) for row in rows]
        for k in (0, len(stored) // 2, -1):
            assert as_steps(rb[k].reshape(-1)) == ring.slots[stored[k]]
        with pytest.raises(IndexError):
            rb[len(stored)]
        if self.index_is_stored and self.storage_kind.keeps_index:
            index = whole["index"].reshape(len(rows), -1).tolist()
            assert index == [[slot, env] if self.envs else [slot] for slot, env in rows]
        self.generations_follow_each_other()

    def generations_follow_each_other(self) -> None:
        found = self.rb.storage.lanes.generations(torch.arange(self.capacity * self.source.columns))
        found = found.reshape(self.capacity, -1)
        for slot, number in enumerate(self.ring.order):
            base = int(found[self.ring.stored()[0], 0]) - self.ring.order[self.ring.stored()[0]]
            assert found[slot].tolist() == [-1 if number < 0 else number + base] * self.source.columns

    def teardown(self) -> None:
        self.rb = None
        gc.collect(0)
        shutil.rmtree(self.folder, ignore_errors=True)


class _Drawn:
    """A buffer that notes what it was asked for."""

    def __init__(self, rb: Any, drawn: list[Any]) -> None:
        self._rb, self._drawn = rb, drawn

    def sample(self, n: int, return_info: bool = False) -> Any:
        self._drawn.append(self._rb.sample(n, return_info=True))
        return self._drawn[-1]


def drive(
    examples: int,
    steps: int,
    *,
    storages: list[str],
    samplers: list[str],
    writers: list[str],
    envs: int = 0,
    prefetch: int = 0,
    shrink: bool = True,
) -> None:
    """Runs the machine; fails where the buffer and its oracle differ."""
    made = {
        "storage_kinds": storages, "sampler_kinds": samplers, "writer_kinds": writers, "envs": envs,
        "prefetch": prefetch,
    }  # fmt: skip
    run_state_machine_as_test(
        type("Machine", (BufferMachine,), made),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
