"""A buffer beside its oracle: how they are made, and how they are compared."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from engram.data import ReplayBuffer, TensorDictReplayBuffer
from machine.limits import LIMITS
from machine.parts import SAMPLERS, STORAGES, WRITERS, WRITERS_OF_QUEUES
from machine.ring import Ring, Row, Source, Step, as_data, as_steps, priority_of

FORBIDDEN = "immutable"


class Driven(RuleBasedStateMachine):
    """Set what it is made of in a subclass."""

    places: list[tuple[str, int]] = []  # storages, and how many environments: 0 with ndim=1
    sampler_kinds: list[str] = []
    writer_kinds: list[list[str]] = []  # those of one list may follow each other
    limit_kinds: list[str] = ["none"]
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
        storage, self.envs = data.draw(st.sampled_from(self.places))
        self.storage_kind = STORAGES[storage]
        self.buffer = TensorDictReplayBuffer if tensordict else ReplayBuffer
        self.capacity = capacity
        self.source = Source(self.envs, seed)
        self.ring = Ring(capacity, self.envs)
        fitting = [w for w in self.writer_kinds if (not self.envs or takes_envs(w)) and self.samplers_of(w[0])]
        self.writers = data.draw(st.sampled_from(fitting))
        self.writer = WRITERS[self.writers[0]]()
        self.limit = LIMITS[data.draw(st.sampled_from(self.limit_kinds))](self.ring)
        self.sampler = SAMPLERS[data.draw(st.sampled_from(self.samplers_of(self.writers[0])))](self.ring)
        self.sampler.begin()
        self.index_is_stored = self.writer.stores_index
        self.rb = self.make()
        self.ring.seam_comes = True
        self.ever: dict[Row, set[Step]] = {}  # what a batch that was prepared ahead may hold
        self.era = 0  # another number when all rows are others, or elsewhere
        self.taken: Any = None  # the info of the last batch of a queue, and the row behind it
        self.at: Any = None  # a position in a queue, and what it means
        self.sampler.go_on(self.rb)

    def samplers_of(self, writer: str) -> list[str]:
        """Those that go with this writer: rows of a queue come in turn, when they are wanted, and it has no limiter."""
        takes = writer in WRITERS_OF_QUEUES and not self.prefetch and self.limit_kinds == ["none"]
        return [kind for kind in self.sampler_kinds if takes or not SAMPLERS[kind].is_queue]

    def make(self) -> Any:
        """A buffer of a storage that is made with the first of the writers."""
        storage = self.storage_kind.make(
            self.capacity * self.source.columns, self.envs, self.index_is_stored, self.next_folder
        )
        made = self.buffer(storage=storage, **{**self.parts(), "writer": WRITERS[self.writers[0]]().make()})
        made.set_writer(self.writer.make())
        return made

    def parts(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1)
        return {
            "sampler": self.sampler.make(), "writer": self.writer.make(), "generator": generator,
            "prefetch": self.prefetch, "rate_limiter": self.limit.make(),
            "batch_size": 1,  # as one is needed where the last batch of an epoch is dropped
        }  # fmt: skip

    def next_folder(self) -> Path:
        self.folders += 1
        return self.folder / str(self.folders)

    def data(self, columns: list[list[Step]]) -> Any:
        return as_data(columns, self.envs)

    # ---- who waits: an error at once where nobody else has the rows, as there is one thread; else for ever ----
    @property
    def may_wait(self) -> bool:
        return self.sampler.is_queue or self.limit.binds

    @property
    def is_alone(self) -> bool:
        return self.storage_kind.is_private

    def asked(self) -> dict[str, Any]:
        """How batches are asked for."""
        return {"wait": False} if self.may_wait and not self.is_alone else {}

    def wrote_all(self, columns: list[list[Step]]) -> list[int]:
        """Columns were written, as many as there was room for: their slots."""
        where: list[int] = []
        while len(where) < len(columns) and self.limit.may_write() and (fits := self.sampler.room()):
            where += self.wrote(columns[len(where) :][:fits])
            if self.limit.binds:  # it looks before the first row of a batch
                break
        return where

    def write(self, write: Callable[..., Any], columns: list[list[Step]]) -> tuple[Any, list[int]]:
        """Writes, or is held back as it must be: what the call gave, and the slots."""
        if self.writer.forbids:
            self.forbidden(write)
            return None, []
        where = self.wrote_all(columns)
        how = {"timeout": 0} if self.may_wait and not self.is_alone else {}
        if len(where) == len(columns):
            return write(**how), where
        with pytest.raises(TimeoutError if how else RuntimeError, match="waits for"):
            write(**how)
        return None, where

    # ---- what happened ----
    def wrote(self, columns: list[list[Step]]) -> list[int]:
        where, out_of_turn = self.writer.write(self.ring, columns)
        self.limit.written += sum(slot >= 0 for slot in where) * self.source.columns
        self.sampler.wrote([slot for slot in where if slot >= 0 and slot not in out_of_turn])
        self.sampler.replaced(sorted(out_of_turn))
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

    def replaced(self, slots: list[int], columns: list[list[Step]]) -> None:
        for slot, column in zip(slots, columns, strict=True):
            self.ring.replace(slot, column)
        self.sampler.replaced(slots)
        self.forget()

    # ---- what is drawn ----
    def flat(self, rows: list[Row]) -> torch.Tensor:
        return torch.tensor([slot * self.source.columns + env for slot, env in rows])

    def draw(self, n: int) -> list[Row]:
        """A batch, held against the oracle; its rows, none where it is refused as it must be."""
        refusal = self.refusal(n)
        if refusal:
            with pytest.raises((RuntimeError, ValueError), match=refusal):
                self.rb.sample(n, **self.asked())
            return []
        batch, info = self.rb.sample(n, return_info=True, **self.asked())
        self.limit.drawn += n
        found, rows = as_steps(batch), self.rows_of(info["index"])
        assert len(found) == len(rows)
        if self.buffer is TensorDictReplayBuffer:
            assert batch["index"].tolist() == [list(row) if self.envs else row[0] for row in rows]
        if self.prefetch:  # from before the last changes, perhaps
            assert all(step in self.ever[row] for row, step in zip(rows, found, strict=True))
            return rows
        self.sampler.drew(n, rows, info, batch)
        if self.sampler.is_queue:
            self.taken = info, self.sampler.consumed, self.era
        assert [self.ring.step(row) for row in rows] == found
        return rows

    def refusal(self, n: int) -> str | None:
        """What the error says where n rows cannot be drawn now."""
        return self.sampler.refusal(n) if self.limit.may_draw(n) else "sample waits for"

    def rows_of(self, index: Any) -> list[Row]:
        if self.envs:
            return [tuple(row) for row in torch.stack(index, -1).tolist()]
        return [(slot, 0) for slot in index.tolist()]

    def draws_the_same(self, old: Any, twin: Any, n: int) -> None:
        if refusal := self.refusal(n):
            for rb in (old, twin):
                with pytest.raises((RuntimeError, ValueError), match=refusal):
                    rb.sample(n, **self.asked())
            return
        batch, info = old.sample(n, return_info=True)
        drawn: list[Any] = []
        self.rb = _Drawn(twin, drawn, self.rb.storage)
        self.draw(n)
        self.rb = twin
        same, said = drawn[0]
        assert as_steps(batch) == as_steps(same) and set(info) == set(said)
        for key, value in info.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, said[key]), key

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

    @invariant()
    def it_counts_what_the_oracle_counts(self) -> None:
        if self.rb is None or not self.rb.storage.initialized:
            return
        if self.limit.binds:
            assert self.rb.storage.lanes.store.rate_counts[:2] == (self.limit.written, self.limit.drawn)
        if self.sampler.is_queue:
            found = self.rb.stats()
            passed = found.waiting, found.uncommitted, found.missed, found.stale, found.versions[1]
            assert passed == self.sampler.figures()
            assert found.removed == len(self.ring.removed)

    def generations_follow_each_other(self) -> None:
        ring = self.ring
        found = self.rb.storage.lanes.generations(torch.arange(self.capacity * self.source.columns))
        found = found.reshape(self.capacity, -1)
        in_turn = [slot for slot in ring.stored() if slot not in ring.out_of_turn]
        base = int(found[in_turn[0], 0]) - ring.order[in_turn[0]] if in_turn else 0
        for slot, number in enumerate(ring.order):
            if slot in ring.out_of_turn:
                assert found[slot].min() > ring.next + base
            else:
                assert found[slot].tolist() == [-1 if number < 0 else number + base] * self.source.columns
        assert len(set(found[ring.stored(), 0].tolist())) == len(ring.stored())

    def teardown(self) -> None:
        self.rb = None
        gc.collect(0)
        shutil.rmtree(self.folder, ignore_errors=True)


class _Drawn:
    """A buffer that notes what it was asked for."""

    def __init__(self, rb: Any, drawn: list[Any], storage: Any) -> None:
        self._rb, self._drawn, self.storage = rb, drawn, storage

    def sample(self, n: int, **how: Any) -> Any:
        self._drawn.append(self._rb.sample(n, **how))
        return self._drawn[-1]


def takes_envs(writers: list[str]) -> bool:
    return all(WRITERS[kind].takes_envs for kind in writers)
