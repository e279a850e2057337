"""A buffer and its oracle, driven side by side by hypothesis."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
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

from contracts.waiting import seems_alone
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
        index, where = self.write(lambda **how: self.rb.extend(data, **how), columns)
        assert index is None or index.tolist() == (
            [[t, e] for t in where for e in range(self.envs)] if self.envs else where
        )

    @rule()
    def add(self) -> None:
        if self.may_wait and not self.is_alone:
            return  # it has no timeout
        columns = self.source.take(1)
        step = self.data(columns)[:, 0] if self.envs else self.data(columns)[0]
        index, written = self.write(lambda: self.rb.add(step), columns)
        if not written:
            return
        (where,) = written
        assert (index.tolist() if self.envs else index) == (
            [[where, e] for e in range(self.envs)] if self.envs else where
        )

    @precondition(lambda self: self.ring.whole())
    @rule(data=st.data(), form=st.sampled_from(["list", "tensor", "negative", "one"]))
    def replace(self, data: st.DataObject, form: str) -> None:
        stored = self.ring.stored()
        places = st.sampled_from([stored.index(slot) for slot in self.ring.whole()])
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

    @precondition(lambda self: self.ring.whole() and not self.envs)
    @rule(data=st.data())
    def update_if_present(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(self.ring.whole()), unique=True, min_size=1))
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
        self.limit.written = self.limit.drawn = 0
        self.era += 1
        self.forget()

    def refused(self, beyond: int) -> None:
        """What does not fit, and what is not there, is refused and changes nothing."""
        if not self.ring.stored() or self.writer.forbids:
            return
        bad = self.data(self.source.take(2))
        bad["obs"] = bad["obs"].double()
        if self.storage_kind is STORAGES["list"]:
            bad = {"a": torch.zeros(2), "b": torch.zeros(3)}
        how = {"timeout": 0} if self.may_wait else {}
        # RuntimeError: without a rank. TimeoutError: it would wait first.
        with pytest.raises((ValueError, TypeError, KeyError, RuntimeError, TimeoutError)):
            self.rb.extend(bad, **how)
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
    @precondition(lambda self: not self.limit.binds)
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
    @precondition(lambda self: not self.limit.binds)
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

    # ---- a queue, and rows that were removed ----
    def is_queue(self) -> bool:
        return self.sampler.is_queue and self.rb.storage.initialized

    @precondition(is_queue)
    @rule(of_batch=st.booleans(), is_saved=st.booleans())
    def position(self, of_batch: bool, is_saved: bool) -> None:
        """Remembers where the consumer is; with `is_saved` it takes another batch, and then commits that place."""
        self.sampler.take_part()
        if of_batch and self.taken is not None and self.taken[2] == self.era:
            self.at = self.rb.position(self.taken[0]), self.taken[1], self.sampler.version, self.era
        else:
            self.at = self.rb.position(), self.sampler.consumed, self.sampler.version, self.era
        if is_saved:
            self.draw(self.source.columns)
            self.go_to("commit")

    @precondition(lambda self: self.is_queue() and self.at is not None)
    @rule(how=st.sampled_from(["commit", "seek"]))
    def go_to(self, how: str) -> None:
        position, to, version, era = self.at
        use = self.rb.commit if how == "commit" else self.rb.seek
        if era != self.era:
            with pytest.raises(ValueError, match=r"of another store|were replaced since"):
                use(position)
        elif how == "commit":
            self.sampler.take_part()
            use(position)
            self.sampler.committed(to)
        else:
            assert use(position) == self.sampler.sought(to)
            self.sampler.version = version

    @precondition(is_queue)
    @rule()
    def seek_what_was_committed(self) -> None:
        assert self.rb.seek(None) == self.sampler.sought(min(self.sampler.kept, self.sampler.consumed))

    @precondition(is_queue)
    @rule(behind=st.integers(0, 4))
    def train_a_version(self, behind: int) -> None:
        newest = max((step.traj for row in self.ring.rows() for step in [self.ring.step(row)]), default=0)
        self.sampler.version = self.rb.sampler.consumer_version = max(0, newest - behind)

    @precondition(is_queue)
    @rule(n=st.integers(1, 12))
    def ask_for_a_batch(self, n: int) -> None:
        n *= self.source.columns
        if not self.sampler.lost:
            assert self.rb.can_sample(n) == self.sampler.can_sample(n)

    @precondition(lambda self: self.ring.stored() and all(SAMPLERS[k].knows_removed for k in self.sampler_kinds))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.ring.rows()), unique=True, min_size=1, max_size=6))
        index = torch.tensor([list(row) if self.envs else row[0] for row in rows])
        assert self.rb.remove(index) == len(set(rows) - self.ring.removed)
        self.ring.removed |= set(rows)

    # ---- other parts ----
    @rule(data=st.data())
    def another_sampler(self, data: st.DataObject) -> None:
        kinds = self.samplers_of("immutable" if self.writer.forbids else self.writers[0])
        if not kinds:
            return
        if self.sampler.is_queue:
            self.sampler.ended()
            self.rb.end_queue()
        self.sampler = SAMPLERS[data.draw(st.sampled_from(kinds))](self.ring)
        self.sampler.begin()
        self.rb.set_sampler(self.sampler.make())
        self.sampler.go_on(self.rb)

    @rule(data=st.data())
    def another_writer(self, data: st.DataObject) -> None:
        writers = [w for w in self.writers if not (self.sampler.is_queue and WRITERS[w].forbids)]
        self.writer = WRITERS[data.draw(st.sampled_from(writers))]()
        self.rb.set_writer(self.writer.make())

    # ---- saving ----
    @precondition(lambda self: not self.writer.forbids)
    @rule(way=st.sampled_from(["dumps", "state_dict", "storage"]), into_used=st.booleans())
    def move_to_a_twin(self, way: str, into_used: bool) -> None:
        if self.sampler.is_queue and self.sampler.lost:
            self.draw(self.source.columns)  # says so, as a twin does not
        twin = self.make()
        if into_used and self.ring.stored():
            twin.extend(self.data(self.source.take(self.capacity + (0 if self.sampler.is_queue else 1))))
            with contextlib.suppress(RuntimeError, ValueError):  # a trajectory may be too short
                twin.sample(self.sampler.batch_sizes[0], **self.asked())
        old, self.rb = self.rb, twin
        self.era += 1
        self.ring.moved(self.sampler.is_queue)
        if way == "storage":
            old.storage.dumps(self.folder / "storage")
            twin.storage.loads(self.folder / "storage")
            self.sampler.loaded()
            self.sampler.made_anew()
            twin.set_sampler(self.sampler.make())
            self.sampler.go_on(twin)
            return
        if way == "dumps":
            old.dumps(self.folder / "saved")
            twin.loads(self.folder / "saved")
        else:
            twin.load_state_dict(old.state_dict())
        self.forget()
        self.sampler.loaded()
        self.sampler.go_on(twin)
        if self.sampler.is_queue and self.sampler.commits:
            old.seek(None)
        for k in (0, -1):
            self.draws_the_same(old, twin, self.sampler.batch_sizes[k])

    @precondition(lambda self: self.storage_kind.reopens and not self.prefetch and self.rb.storage.initialized)
    @rule()
    def reopen(self) -> None:
        folder = self.rb.storage.scratch_dir
        self.rb.storage.close()
        self.sampler.made_anew()
        self.rb = self.buffer.open(folder, **self.parts())
        self.sampler.go_on(self.rb)
        self.ring.seam_comes = True


def drive(
    examples: int,
    steps: int,
    *,
    places: list[tuple[str, int]],
    samplers: list[str],
    writers: list[list[str]],
    limits: Sequence[str] = ("none",),
    prefetch: int = 0,
    shrink: bool = True,
) -> None:
    """Runs the machine; fails where the buffer and its oracle differ."""
    made = {"places": places, "sampler_kinds": samplers, "writer_kinds": writers, "prefetch": prefetch}
    made["limit_kinds"] = list(limits)
    run_machine(type("Machine", (BufferMachine,), made), examples, steps, shrink)


def run_machine(machine: type[RuleBasedStateMachine], examples: int, steps: int, shrink: bool = True) -> None:
    """So many runs of so many steps, the same ones each time; with `shrink` a failure is made small."""
    with pytest.MonkeyPatch.context() as patch:
        seems_alone(patch)
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
