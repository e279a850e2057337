"""`WriterContract`: what every writer must do; `RoundRobinWriterContract`: what those that go round a ring do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from engram.data import LazyTensorStorage, ListStorage, ReplayBuffer
from engram.errors import CorruptCheckpointError
from engram.kernel.replay import as_writer
from engram.testing.helpers import assert_equal, cursor_of, numbers, state_of, steps


class WriterContract:
    """Tests of a class with `write(storage, items, single, time_dim) -> slots`. Inherit, and implement `make`.

    Example:
        >>> class EverySecond(RoundRobinWriter):
        ...     "Stores steps 0, 2, 4, ... of each batch."
        ...     def write(self, storage, items, single, time_dim):
        ...         return super().write(storage, items if single else items[::2], single, time_dim)
        >>> class TestEverySecond(WriterContract):
        ...     drops = True
        ...     def make(self):
        ...         return EverySecond()
    """

    #: Whether it may leave steps out: their index is -1, or there is none for them.
    drops = False

    def make(self) -> Any:
        """A new writer."""
        raise NotImplementedError

    @pytest.fixture(params=[ListStorage, LazyTensorStorage], ids=lambda c: c.__name__)
    def rb(self, request: Any) -> ReplayBuffer:
        return ReplayBuffer(storage=request.param(10), writer=self.make(), batch_size=4)

    def test_what_is_stored_was_written_and_no_step_is_there_twice(self, rb: ReplayBuffer) -> None:
        at = 0
        for n in (1, 3, 7, 9, 10, 11, 2, 30, 4):
            rb.extend(steps(at, at + n))
            at += n
            stored = numbers(rb[:])
            assert len(rb) == len(stored) == len(set(stored)) <= 10 and set(stored) <= set(range(at))
        assert 0 <= (cursor_of(rb) or 0) < 10

    def test_the_indices_that_it_returns_are_where_the_steps_are(self, rb: ReplayBuffer) -> None:
        at = 0
        for n in (3, 4, 6, 25, 1):
            index = rb.extend(steps(at, at + n))
            assert index.dtype == torch.int64 and index.ndim == 1
            if self.drops:
                for slot in {int(i) for i in index if i >= 0}:
                    assert at <= numbers(rb[slot]) < at + n
            else:
                assert len(index) == n
                for slot, number in {int(i): at + k for k, i in enumerate(index)}.items():
                    assert numbers(rb[slot]) == number
            at += n

    def test_add_writes_one_step(self, rb: ReplayBuffer) -> None:
        for n in range(25):
            slot = rb.add(steps(n, n + 1)[0])
            assert isinstance(slot, int)
            assert numbers(rb[slot]) == n if slot >= 0 else self.drops

    def test_alone_with_a_storage_it_writes_what_it_writes_in_a_buffer(self, rb: ReplayBuffer) -> None:
        alone = as_writer(self.make())
        storage = type(rb.storage)(10)
        alone.register_storage(storage)
        assert alone._cursor == 0
        for start, n in ((0, 4), (4, 3), (7, 9), (16, 2)):
            batch, last = steps(start, start + n), steps(100 + start, 101 + start)[0]
            index = alone.extend(batch)
            assert index.dtype == torch.int64 and index.tolist() == rb.extend(batch).tolist()
            added = alone.add(last)
            assert isinstance(added, int) and added == rb.add(last)
            assert numbers(storage[:]) == numbers(rb[:]) and len(storage) == len(rb)
            assert cursor_of(rb) in (None, alone._cursor)

    def test_its_state_is_saved_alone_twice_to_one_path_and_verified(self, tmp_path: Path) -> None:
        writer = as_writer(self.make())
        writer.register_storage(LazyTensorStorage(10))
        writer.extend(steps(0, 4))
        writer.dumps(tmp_path)
        writer.dumps(tmp_path)
        twin = as_writer(self.make())
        twin.loads(tmp_path)
        assert_equal(twin.state_dict(), writer.state_dict())
        manifest = next(tmp_path.glob("g-*/manifest.json"))
        manifest.chmod(0o600)
        manifest.write_bytes(manifest.read_bytes().replace(b"writer", b"wroter", 1))
        with pytest.raises(CorruptCheckpointError):
            twin.loads(tmp_path)

    @pytest.mark.parametrize("way", ["dumps", "state_dict"])
    @pytest.mark.parametrize("order", ["storage first", "writer first", "writer without a buffer"])
    def test_a_state_saved_alone_goes_on_with_its_storage(
        self, rb: ReplayBuffer, tmp_path: Path, way: str, order: str
    ) -> None:
        for n, start in ((4, 0), (9, 100)):
            rb.extend(steps(start, start + n))
            for name, part in (("writer", as_writer(rb.writer)), ("storage", rb.storage)):
                part.dumps(tmp_path / name)
            states = {"writer": as_writer(rb.writer).state_dict(), "storage": rb.storage.state_dict()}
            states = copy.deepcopy(states)
            parts: dict[str, Any] = {"storage": type(rb.storage)(10), "writer": self.make()}
            if order != "writer without a buffer":
                twin = ReplayBuffer(**parts, batch_size=4)
            for name in ("storage", "writer") if order == "storage first" else ("writer", "storage"):
                part = as_writer(parts[name]) if name == "writer" else parts[name]
                if way == "dumps":
                    part.loads(tmp_path / name)
                else:
                    part.load_state_dict(states[name])
                if name == "writer":  # what was loaded is what would be saved
                    assert_equal(part.state_dict(), states[name])
            if order == "writer without a buffer":
                twin = ReplayBuffer(**parts, batch_size=4)
            assert state_of(twin) == state_of(rb)
            more = [steps(50, 55), steps(60, 61), steps(70, 83)]
            assert [twin.extend(batch).tolist() for batch in more] == [rb.extend(batch).tolist() for batch in more]
            assert state_of(twin) == state_of(rb)

    def test_empty_forgets_what_was_written(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 13))
        rb.empty()
        assert len(rb) == 0
        rb.extend(steps(20, 22))
        assert set(numbers(rb[:])) <= {20, 21}

    def test_a_refused_batch_changes_nothing(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 3))
        before = (state_of(rb), numbers(rb[:]))
        with pytest.raises((TypeError, ValueError, KeyError, RuntimeError)):
            rb.extend({"n": torch.zeros(3), "other": torch.zeros(4)})
        assert (state_of(rb), numbers(rb[:])) == before

    @pytest.mark.parametrize("way", ["dumps", "state_dict"])
    def test_a_twin_with_its_state_goes_on_the_same(self, rb: ReplayBuffer, tmp_path: Path, way: str) -> None:
        for n, start in ((4, 0), (9, 100), (2, 200)):
            rb.extend(steps(start, start + n))
            twin = ReplayBuffer(storage=type(rb.storage)(10), writer=self.make(), batch_size=4)
            if way == "dumps":
                rb.dumps(tmp_path)
                twin.loads(tmp_path)
            else:
                twin.load_state_dict(rb.state_dict())
            more = [steps(50, 55), steps(60, 61), steps(70, 83)]
            assert [twin.extend(batch).tolist() for batch in more] == [rb.extend(batch).tolist() for batch in more]
            assert state_of(twin) == state_of(rb)


class RoundRobinWriterContract(WriterContract):
    """Tests of a writer that appends rows, in a full storage over the oldest."""

    def test_the_cursor_is_where_the_next_step_goes(self, rb: ReplayBuffer) -> None:
        cursors = [(rb.writer._cursor, rb.extend(steps(0, n))[0].item()) for n in (3, 4, 6, 25, 1)]
        assert cursors == [(0, 0), (3, 3), (7, 7), (3, 3), (8, 8)]
        assert rb.writer._cursor == 9 and "9" in repr(rb.writer)

    def test_of_more_than_fits_the_last_stay_and_indices_repeat(self, rb: ReplayBuffer) -> None:
        assert rb.extend(steps(0, 25)).tolist() == [*range(10), *range(10), *range(5)]
        assert (rb.writer._cursor, rb.write_count) == (5, 25)
        assert numbers(rb[:]) == [20, 21, 22, 23, 24, 15, 16, 17, 18, 19]

    def test_a_new_writer_goes_on_where_the_old_one_stopped(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 13))
        old = rb.writer
        assert rb.set_writer(self.make()) is old and rb.writer is not old
        assert rb.writer._cursor == 3 and rb.extend(steps(13, 15)).tolist() == [3, 4]

    def test_empty_puts_the_cursor_at_0(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 13))
        rb.empty()
        assert rb.writer._cursor == 0 and rb.extend(steps(0, 2)).tolist() == [0, 1]

    def test_a_refused_batch_moves_no_cursor(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 3))
        with pytest.raises((TypeError, ValueError)):
            rb.extend({"n": torch.zeros(3), "other": torch.zeros(4)})
        assert (rb.writer._cursor, rb.write_count, len(rb)) == (3, 3, 3)
