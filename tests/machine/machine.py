"""A buffer and its oracle, driven side by side by hypothesis."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engram.testing import chi_square
from machine.driven import Driven
from machine.parts import SAMPLERS, STORAGES, WRITERS

FORBIDDEN = "immutable"


class BufferMachine(Driven):
    """What can be done to a buffer."""

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

    @precondition(lambda self: self.ring.stored() and not self.envs)
    @rule(data=st.data())
    def update_if_present(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(self.ring.stored()), unique=True, min_size=1))
        stale = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
        columns = self.source.take(len(slots))
        generation = self.rb.storage.lanes.generations(torch.tensor(slots)) - torch.tensor(stale) * self.capacity
        records: Any = {"index": torch.tensor(slots), "generation": generation, "patch": self.data(columns)}
        if self.writer.forbids:
            return self.forbidden(lambda: self.rb.update_if_present(**records))
        done = self.rb.update_if_present(**records)
        assert (done.updated.tolist(), done.stale.tolist()) == ([not s for s in stale], stale)
        assert (done.applied, int(done.rejected.sum())) == (stale.count(False), 0)
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
        self.forget()

    def refused(self, beyond: int) -> None:
        """What does not fit, and what is not there, is refused and changes nothing."""
        if not self.ring.stored() or self.writer.forbids:
            return
        bad = self.data(self.source.take(2))
        bad["obs"] = bad["obs"].double()
        if self.storage_kind is STORAGES["list"]:
            bad = {"a": torch.zeros(2), "b": torch.zeros(3)}
        with pytest.raises((ValueError, TypeError, KeyError, RuntimeError)):  # RuntimeError: without a rank
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

    # ---- sampling ----
    @rule(data=st.data(), times=st.integers(1, 4))
    def sample(self, data: st.DataObject, times: int) -> None:
        n = data.draw(st.sampled_from(self.sampler.batch_sizes))
        for _ in range(times):
            self.draw(n)

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
        self.writer = WRITERS[data.draw(st.sampled_from(self.writers))]()
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
            return
        if way == "dumps":
            old.dumps(self.folder / "saved")
            twin.loads(self.folder / "saved")
        else:
            twin.load_state_dict(old.state_dict())
        self.forget()
        for k in (0, -1):
            self.draws_the_same(old, twin, self.sampler.batch_sizes[k])

    @precondition(lambda self: self.storage_kind.reopens and not self.prefetch and self.rb.storage.initialized)
    @rule()
    def reopen(self) -> None:
        folder = self.rb.storage.scratch_dir
        self.rb.storage.close()
        self.sampler.begin()
        self.rb = self.buffer.open(folder, **self.parts())
        self.ring.seam_comes = True


def drive(
    examples: int,
    steps: int,
    *,
    places: list[tuple[str, int]],
    samplers: list[str],
    writers: list[list[str]],
    prefetch: int = 0,
    shrink: bool = True,
) -> None:
    """Runs the machine; fails where the buffer and its oracle differ."""
    made = {"places": places, "sampler_kinds": samplers, "writer_kinds": writers, "prefetch": prefetch}
    run_machine(type("Machine", (BufferMachine,), made), examples, steps, shrink)


def run_machine(machine: type[RuleBasedStateMachine], examples: int, steps: int, shrink: bool = True) -> None:
    """So many runs of so many steps, the same ones each time; with `shrink` a failure is made small."""
    run_state_machine_as_test(
        machine,
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
