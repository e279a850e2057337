"""`StorageContract`: what every storage must do; `TableContract`, `StrandsContract`: what those of packed rows and of
several environments must do besides."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import load
from engram.data import ReplayBuffer, SamplerWithoutReplacement, Storage, TensorDictReplayBuffer
from engram.data.replay_buffers.storages import Rows
from engram.errors import StorageError
from engram.testing.helpers import env_steps, numbers, of_numbers, state_of, steps

INDICES: list[Any] = [
    0, 3, -1, -6, np.int64(2), torch.tensor(4), slice(2, 5), slice(None), slice(None, None, 2), slice(-3, None),
    slice(3, 3), slice(4, 100), range(1, 4), range(-2, 0), range(0), [0, 2], [-1, 1], [],
    torch.tensor([1, 2]), torch.tensor([-1, 0]), torch.tensor([3, 2], dtype=torch.int32), np.array([4, 1]),
    torch.tensor([[0, 1], [2, -1]]), torch.tensor([], dtype=torch.int64), Ellipsis, (slice(1, 3),),
    [True, False, True, False, False, True], np.array([False, True] * 3), torch.tensor([True] * 6),
    torch.zeros(6, dtype=torch.bool),
]  # fmt: skip
REPEATING: list[Any] = [[5, 0, 0], torch.tensor([3, 3]), torch.tensor([[0, 1], [1, -1]]), [-1, 5]]
BAD_INDICES: list[Any] = [
    6, -7, 10, 1000, 2**70, [0, 6], [0, -7], [2**70], torch.tensor([9]), torch.tensor([10**6]), range(5, 8), [True] * 5,
    torch.ones(7, dtype=torch.bool), True, torch.tensor(True), 2.5, [0.5], torch.tensor([1.0]), "n0", (0, 1),
    slice(None, None, -1), {},
]  # fmt: skip


class StorageContract:
    """Tests of a `Storage`. Inherit, and implement `make`.

    Example:
        >>> class TestMyStorage(StorageContract):
        ...     def make(self, capacity, path):
        ...         return ListStorage(capacity)
    """

    #: Whether it is full when it holds `max_size` steps.
    room_is_max_size = True
    #: Whether `engram.load`, which calls no code of your own, gives its steps back as they were written.
    is_rebuilt = True

    def make(self, capacity: int, path: Any) -> Storage:
        """An empty storage with room for `capacity` steps; `path` is where it may keep files."""
        raise NotImplementedError

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Any:
        return self.make(10, tmp_path / "store")

    @pytest.fixture
    def rb(self, storage: Any) -> Any:
        return ReplayBuffer(storage=storage, batch_size=4)

    # ---- empty ----
    def test_a_new_storage_holds_nothing(self, rb: ReplayBuffer, storage: Any) -> None:
        assert (len(rb), len(storage), rb.write_count, rb.writer._cursor, storage._is_full) == (0, 0, 0, 0, False)

    def test_nothing_can_be_read_or_replaced_in_an_empty_storage(self, rb: ReplayBuffer) -> None:
        for index in (0, -1, [0]):
            with pytest.raises(IndexError):
                rb[index]
            with pytest.raises(IndexError):
                rb[index] = steps(0, 1)[0]
        with pytest.raises(RuntimeError, match=r"Cannot sample from an empty storage\."):
            rb.sample()

    def test_a_storage_says_what_it_is(self, storage: Any) -> None:
        assert type(storage).__name__ in repr(storage) and str(storage.max_size) in repr(storage)

    def test_a_storage_knows_its_size_in_bytes(self, rb: ReplayBuffer, storage: Any) -> None:
        rb.extend(steps(0, 3))
        assert storage.nbytes >= 3 * sum(v.numel() * v.itemsize for v in steps(0, 1).values(True, True))

    # ---- writing ----
    def test_extend_returns_the_indices_of_its_steps(self, rb: ReplayBuffer) -> None:
        assert rb.extend(steps(0, 4)).tolist() == [0, 1, 2, 3]
        assert rb.extend(steps(4, 6)).tolist() == [4, 5]
        assert numbers(rb[:]) == [0, 1, 2, 3, 4, 5] and (len(rb), rb.write_count, rb.writer._cursor) == (6, 6, 6)

    def test_add_is_extend_of_one(self, rb: ReplayBuffer) -> None:
        assert [rb.add(steps(n, n + 1)[0]) for n in range(12)] == [*range(10), 0, 1]
        assert numbers(rb[:]) == [10, 11, *range(2, 10)] and (rb.write_count, rb.writer._cursor) == (12, 2)

    def test_a_list_is_a_list_of_items(self, rb: ReplayBuffer) -> None:
        assert rb.extend(list(steps(0, 4).unbind(0))).tolist() == [0, 1, 2, 3]
        assert numbers(rb[:]) == [0, 1, 2, 3]

    def test_of_more_than_fits_the_last_stay_and_indices_repeat(self, rb: ReplayBuffer) -> None:
        assert rb.extend(steps(0, 25)).tolist() == [*range(10), *range(10), *range(5)]
        assert (rb.writer._cursor, rb.write_count, len(rb), rb.storage._is_full) == (5, 25, 10, self.room_is_max_size)
        assert numbers(rb[:]) == [20, 21, 22, 23, 24, 15, 16, 17, 18, 19]

    def test_writing_goes_round_the_ring(self, rb: ReplayBuffer) -> None:
        stored: list[int | None] = [None] * 10
        at = 0
        for n in (1, 3, 7, 9, 10, 11, 2, 30, 4):
            slots = rb.extend(steps(at, at + n)).tolist()
            assert slots == [w % 10 for w in range(at, at + n)]
            for w in range(at, at + n):
                stored[w % 10] = w
            at += n
            assert numbers(rb[:]) == [w for w in stored if w is not None]
            assert (len(rb), rb.write_count, rb.writer._cursor) == (min(at, 10), at, at % 10)

    def test_what_the_caller_does_to_its_data_later_changes_nothing(self, rb: ReplayBuffer) -> None:
        data, item = steps(0, 3), steps(3, 4)[0]
        rb.extend(data)
        rb.add(item)
        for td in (data, item):
            td["obs"].zero_()
            td["n"].fill_(7)
        assert numbers(rb[:]) == [0, 1, 2, 3]

    # ---- reading ----
    def test_an_index_means_what_it_means_to_numpy(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 6))
        for index in INDICES + REPEATING:
            expected = np.arange(6)[_as_numpy(index)]
            for batch in (rb[index], rb.storage[index], rb.storage.get(index)):
                assert np.array_equal(np.reshape(numbers(batch), expected.shape), expected), f"index {index!r}"

    def test_a_bad_index_is_an_index_error_and_changes_nothing(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 6))
        for index in BAD_INDICES:
            if not isinstance(index, str):
                with pytest.raises(IndexError):
                    rb[index]
                    pytest.fail(f"index {index!r} was read")
            with pytest.raises(IndexError):
                rb[index] = steps(50, 51)[0]
                pytest.fail(f"index {index!r} was written")
            assert numbers(rb[:]) == [0, 1, 2, 3, 4, 5], f"index {index!r}"

    def test_an_index_error_says_which_index_and_how_many_steps_there_are(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 6))
        with pytest.raises(IndexError, match=r"index 7 .*6"):
            rb[7]
        with pytest.raises(IndexError, match="7"):
            rb[[1, 7]]

    def test_after_the_ring_is_full_indices_are_slots(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 13))
        assert numbers(rb[0]) == 10 and numbers(rb[3]) == 3 and numbers(rb[-1]) == 9
        assert numbers(rb[[2, 3]]) == [12, 3] and numbers(rb[2:4]) == [12, 3]

    def test_what_is_read_is_a_copy(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 6))
        indices: list[Any] = [2, slice(None), [2, 3], torch.tensor([True] * 6), ...]
        for index in indices:
            for leaf in _leaves(rb[index]):
                leaf.zero_()
        for _ in range(3):
            for leaf in _leaves(rb.sample()):
                leaf.zero_()
        assert numbers(rb[:]) == [0, 1, 2, 3, 4, 5]

    def test_rows_are_read_by_slot(self, rb: ReplayBuffer, storage: Any) -> None:
        rb.extend(steps(0, 6))
        slots = torch.tensor([4, 1])
        rows = storage.read(slots, sequences=True)
        assert isinstance(rows, Rows) and numbers(rows.batch) == [4, 1]
        assert rows.overwritten is None and rows.absent is None
        assert rows.sequences is not None and torch.equal(rows.sequences, storage.lanes.generations(slots))

    def test_slots_without_a_row_are_named(self, rb: ReplayBuffer, storage: Any) -> None:
        rb.extend(steps(0, 6))
        rb.empty()
        rb.extend(steps(6, 9))
        assert storage.read(torch.tensor([2, 8, 1])).absent == [1]

    # ---- replacing ----
    def test_stored_steps_can_be_replaced_by_any_index_that_names_them_once(self, rb: ReplayBuffer) -> None:
        for index in INDICES:
            rb.empty()
            rb.extend(steps(0, 6))
            where, expected = _as_numpy(index), np.arange(6)
            chosen = np.array(expected[where])
            expected[where] += 50
            rb[index] = self.shaped(torch.as_tensor(chosen + 50))
            assert numbers(rb[:]) == expected.tolist(), f"index {index!r}"
            assert (len(rb), rb.write_count, rb.writer._cursor) == (6, 6, 6)

    def shaped(self, n: torch.Tensor) -> Any:
        """Data of these numbers as they are given to `rb[...] = ...`."""
        return of_numbers(n)

    def test_replacing_refuses_another_number_of_steps(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 6))
        with pytest.raises(ValueError, match="3"):
            rb[0:2] = steps(50, 53)
        assert numbers(rb[:]) == [0, 1, 2, 3, 4, 5]

    # ---- set ----
    def test_set_on_the_slots_that_follow_appends_and_makes_the_storage_first(self, storage: Any) -> None:
        storage.empty()
        last = len(storage.lanes)
        for index, n in ((range(3), 3), (3, None), ([4, 5], 2), (torch.tensor([6, 7]), 2), (torch.tensor(8), None)):
            data = steps(last, last + 1)[0] if n is None else steps(last, last + n)
            storage.set(index, data)
            last += n or 1
            assert len(storage) == storage.write_count == last
            assert numbers(storage.get(torch.arange(last))) == list(range(last))
        storage[9] = steps(9, 10)[0]
        assert storage._is_full or not self.room_is_max_size

    def test_set_replaces_what_is_stored_and_appends_the_rest(self, rb: ReplayBuffer, storage: Any) -> None:
        rb.extend(steps(0, 4))
        storage.set([1, 3, 4], steps(50, 53))
        assert numbers(storage.get(torch.arange(5))) == [0, 50, 2, 51, 52]
        storage.set([8 - 8, 5, 6], steps(60, 63))
        assert numbers(storage.get(torch.arange(7))) == [60, 50, 2, 51, 52, 61, 62]
        assert (len(rb), rb.write_count, rb.writer._cursor) == (7, 7, 7)
        storage.set(range(7), steps(0, 7))
        assert numbers(rb[:]) == [0, 1, 2, 3, 4, 5, 6] and rb.write_count == 7

    def test_set_refuses_a_gap_and_another_number_of_steps_and_changes_nothing(
        self, rb: ReplayBuffer, storage: Any
    ) -> None:
        for index in (range(1, 3), 5, [0, 2]):
            with pytest.raises(IndexError, match="has not been written"):
                storage.set(index, steps(0, 2) if index != 5 else steps(0, 1)[0])
        rb.extend(steps(0, 4))
        before = state_of(rb)
        bad: list[Any] = [[0, 5], [5, 4], range(5, 7), torch.tensor([3, 6]), [4, 40]]
        for index in bad:
            with pytest.raises(IndexError, match="has not been written"):
                storage.set(index, steps(0, 2))
        bad = [[3, 4, 5], range(2, 5), range(4, 7)]
        for index in bad:
            with pytest.raises(ValueError):
                storage.set(index, steps(0, 2))
        with pytest.raises((TypeError, ValueError, KeyError)):
            storage.set([3, 4], {"n": torch.zeros(2), "other": torch.zeros(3)})
        assert state_of(rb) == before

    def test_a_full_storage_is_replaced_in_place_by_set(self, rb: ReplayBuffer, storage: Any) -> None:
        rb.extend(steps(0, 13))
        storage.set([3, 4], steps(50, 52))
        assert numbers(rb[:]) == [10, 11, 12, 50, 51, 5, 6, 7, 8, 9] and (rb.write_count, rb.writer._cursor) == (13, 3)

    # ---- empty ----
    def test_empty_forgets_everything(self, rb: ReplayBuffer, storage: Any) -> None:
        rb.extend(steps(0, 13))
        rb.empty()
        assert (len(rb), rb.write_count, rb.writer._cursor, storage._is_full) == (0, 0, 0, False)
        for index in (0, -1, [0], torch.tensor([5])):
            with pytest.raises(IndexError):
                rb[index]
        assert numbers(rb[:]) == numbers(rb[[]]) == []
        assert rb.extend(steps(20, 24)).tolist() == [0, 1, 2, 3]
        assert numbers(rb[:]) == [20, 21, 22, 23]

    def test_empty_can_keep_the_write_count(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 13))
        rb.empty(empty_write_count=False)
        assert (len(rb), rb.write_count, rb.writer._cursor) == (0, 13, 0)
        rb.extend(steps(0, 2))
        assert rb.write_count == 15

    def test_generations_never_go_back(self, rb: ReplayBuffer, storage: Any) -> None:
        seen = -1
        for round_ in range(4):
            rb.extend(steps(0, 7))
            generations = storage.lanes.generations(torch.arange(7))
            assert (generations > seen if round_ else generations >= 0).all() or rb.write_count != 7
            if round_ % 2:
                seen = int(storage.lanes.generations(torch.arange(10)).max())
                rb.empty()
                assert (storage.lanes.generations(torch.arange(10)) == -1).all()

    # ---- saving ----
    @pytest.mark.parametrize("sizes", [[], [4], [10], [7, 7], [25], [3, "empty", 4], [13, "empty", 2, 9]], ids=str)
    @pytest.mark.parametrize("way", ["dumps", "state_dict", "storage"])
    def test_a_saved_state_is_the_same_in_a_twin(
        self, rb: ReplayBuffer, tmp_path: Path, sizes: list[Any], way: str
    ) -> None:
        twin = ReplayBuffer(storage=self.make(10, tmp_path / "twin"), batch_size=4)
        at = 0
        for n in sizes:
            if n == "empty":
                rb.empty()
            else:
                rb.extend(steps(at, at + n))
                at += n
        _move(rb, twin, way, tmp_path / "saved")
        assert state_of(twin) == state_of(rb)
        for b in (rb, twin):
            b.extend(steps(100, 104))
        assert state_of(twin) == state_of(rb)
        torch.manual_seed(0)
        expected = numbers(rb.sample())
        torch.manual_seed(0)
        assert numbers(twin.sample()) == expected

    def test_what_is_loaded_replaces_what_was_there(self, rb: ReplayBuffer, tmp_path: Path) -> None:
        twin = ReplayBuffer(storage=self.make(10, tmp_path / "twin"), batch_size=4)
        twin.extend(steps(500, 513))
        rb.extend(steps(0, 6))
        _move(rb, twin, "dumps", tmp_path / "saved")
        assert state_of(twin) == state_of(rb)

    def test_a_larger_storage_takes_what_a_smaller_one_saved(self, rb: ReplayBuffer, tmp_path: Path) -> None:
        larger = ReplayBuffer(storage=self.make(20, tmp_path / "twin"), batch_size=4)
        rb.extend(steps(0, 13))
        _move(rb, larger, "dumps", tmp_path / "saved")
        assert numbers(larger[:]) == [*range(3, 13)] and larger.write_count == 13
        larger.extend(steps(13, 15))
        assert numbers(larger[:]) == [*range(3, 15)]

    def test_a_smaller_storage_refuses_what_does_not_fit_and_stays_as_it_was(
        self, rb: ReplayBuffer, tmp_path: Path
    ) -> None:
        smaller = ReplayBuffer(storage=self.make(5, tmp_path / "twin"), batch_size=4)
        smaller.extend(steps(50, 53))
        rb.extend(steps(0, 8))
        rb.dumps(tmp_path / "saved")
        with pytest.raises(ValueError, match="8"):
            smaller.loads(tmp_path / "saved")
        with pytest.raises(ValueError, match="8"):
            smaller.load_state_dict(rb.state_dict())
        assert numbers(smaller[:]) == [50, 51, 52] and smaller.write_count == 3

    # ---- copies; a StorageError says that it has none ----
    def test_a_deep_copy_has_rows_of_its_own(self, rb: ReplayBuffer, storage: Any) -> None:
        rb.extend(steps(0, 13))
        twin = _copied(copy.deepcopy, storage)
        assert type(twin.storage) is type(storage) and twin.storage.max_size == storage.max_size
        before = state_of(rb)
        assert state_of(twin) == before
        twin.extend(steps(50, 53))
        assert state_of(rb) == before and numbers(twin[:]) == [10, 11, 12, 50, 51, 52, 6, 7, 8, 9]
        rb.extend(steps(13, 15))
        assert numbers(twin[:]) == [10, 11, 12, 50, 51, 52, 6, 7, 8, 9]

    def test_a_pickle_gives_the_rows_back(self, rb: ReplayBuffer, storage: Any) -> None:
        rb.extend(steps(0, 13))
        twin = _copied(lambda part: pickle.loads(pickle.dumps(part)), storage)
        assert type(twin.storage) is type(storage) and twin.storage.max_size == storage.max_size
        assert state_of(twin) == state_of(rb)

    def test_a_deep_copy_of_an_empty_storage_can_be_written_to(self, storage: Any) -> None:
        twin = _copied(copy.deepcopy, storage)
        assert len(twin) == 0 and twin.storage.max_size == storage.max_size
        twin.extend(steps(0, 13))
        assert numbers(twin[:]) == [10, 11, 12, *range(3, 10)] and len(storage) == 0

    def test_load_makes_a_buffer_with_the_rows(self, rb: ReplayBuffer, tmp_path: Path) -> None:
        rb.extend(steps(0, 13))
        rb.dumps(tmp_path / "saved")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it names what a checkpoint cannot have, such as a class of your own
            again = load(tmp_path / "saved")
        assert (len(again), again.write_count, again.writer._cursor) == (len(rb), 13, 3)
        if self.is_rebuilt:
            assert numbers(again[:]) == numbers(rb[:])


def _copied(copied: Callable[[Any], Any], storage: Any) -> ReplayBuffer:
    """A buffer of a copy."""
    try:
        twin = copied(storage)
    except StorageError as error:
        pytest.skip(f"it has no copies: {error}")
    return ReplayBuffer(storage=twin, batch_size=4)


def _as_numpy(index: Any) -> Any:
    """The index as NumPy has it."""
    if isinstance(index, list | range):
        index = np.asarray(index) if len(index) else np.zeros(0, int)
    return index.numpy() if isinstance(index, torch.Tensor) else index


def _leaves(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, list):
        return [leaf for item in batch for leaf in _leaves(item)]
    return list(batch.values(True, True))


def _move(rb: ReplayBuffer, twin: ReplayBuffer, way: str, path: Any) -> None:
    if way == "dumps":
        rb.dumps(path)
        twin.loads(path)
    elif way == "state_dict":
        twin.load_state_dict(rb.state_dict())
    else:
        rb.storage.dumps(path)
        twin.storage.loads(path)


class StrandsContract:
    """Tests of a storage of several environments, whose data are `[envs, time]`. Inherit, and implement `make`."""

    def make(self, capacity: int, path: Any, ndim: int = 2) -> Storage:
        """An empty storage with room for `capacity` steps; `path` is where it may keep files."""
        raise NotImplementedError

    @pytest.fixture
    def rb(self, tmp_path: Path) -> Any:
        return ReplayBuffer(storage=self.make(100, tmp_path / "store"), batch_size=5)

    def test_capacity_rounds_up_to_whole_rows_of_environments(self, rb: ReplayBuffer) -> None:
        assert rb.storage.max_size == 100
        rb.extend(env_steps(3, 0, 8))
        assert rb.storage.max_size == 102 and rb.storage._storage.batch_size == (34, 3)

    def test_one_environment_is_a_dimension_too(self, rb: ReplayBuffer) -> None:
        rb.extend(env_steps(1, 0, 8))
        assert rb.storage._storage.batch_size == (100, 1) and rb.storage[2:5].batch_size == (3, 1)
        assert numbers(rb[2:5]) == [[2, 3, 4]] and numbers(rb.storage[2:5]) == [[2], [3], [4]]

    def test_extend_returns_time_and_environment_of_each_step(self, rb: ReplayBuffer) -> None:
        index = rb.extend(env_steps(3, 0, 2))
        assert index.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
        assert (len(rb), rb.write_count, rb.writer._cursor) == (6, 6, 2)
        assert torch.as_tensor(rb.add(env_steps(3, 2, 3)[:, 0])).tolist() == [[2, 0], [2, 1], [2, 2]]
        assert numbers(rb[:]) == [[0, 1, 2], [1000, 1001, 1002], [2000, 2001, 2002]]

    def test_reading_gives_environments_by_time(self, rb: ReplayBuffer) -> None:
        rb.extend(env_steps(3, 0, 8))
        whole = np.array([[1000 * e + t for t in range(8)] for e in range(3)])
        for index in (
            slice(None),
            slice(2, 5),
            [1, 3],
            [],
            torch.tensor([0, -1]),
            torch.tensor([True, False] * 4),
            range(2),
        ):
            where = np.asarray(index) if isinstance(index, list | range) else index
            where = where.numpy() if isinstance(where, torch.Tensor) else where
            expected = whole[:, where.astype(int) if isinstance(where, np.ndarray) and not where.size else where]
            assert np.array_equal(np.reshape(numbers(rb[index]), expected.shape), expected), index
        assert numbers(rb[3]) == [3, 1003, 2003] and numbers(rb[-1]) == [7, 1007, 2007]

    def test_a_tuple_goes_on_into_environments_and_time(self, rb: ReplayBuffer) -> None:
        rb.extend(env_steps(3, 0, 8))
        assert numbers(rb[1, 2]) == 1002 and numbers(rb[:, 2:4]) == [[2, 3], [1002, 1003], [2002, 2003]]
        assert numbers(rb[2, [0, 7]]) == [2000, 2007] and numbers(rb[0]) == [0, 1000, 2000]
        with pytest.raises(IndexError):
            rb[3, 0]

    def test_the_storage_takes_indices_as_samplers_give_them(self, rb: ReplayBuffer) -> None:
        rb.extend(env_steps(3, 0, 8))
        batch, info = rb.sample(50, return_info=True)
        assert isinstance(info["index"], tuple) and len(info["index"]) == 2
        assert numbers(rb.storage[info["index"]]) == numbers(batch)
        assert numbers(batch) == (info["index"][0] + 1000 * info["index"][1]).tolist()

    def test_time_goes_round_the_ring_for_all_environments_at_once(self, rb: ReplayBuffer) -> None:
        index = rb.extend(env_steps(3, 0, 40))
        assert index.shape == (120, 2) and index[-1].tolist() == [5, 2]
        assert (rb.writer._cursor, rb.write_count, len(rb), rb.storage._is_full) == (6, 120, 102, True)
        times = [34, 35, 36, 37, 38, 39, *range(6, 34)]
        assert numbers(rb[:]) == [[1000 * e + t for t in times] for e in range(3)]

    def test_time_can_be_the_first_dimension(self, tmp_path: Path) -> None:
        rb = ReplayBuffer(storage=self.make(100, tmp_path / "other"), dim_extend=0)
        rb.extend(env_steps(3, 0, 8).transpose(0, 1))
        assert rb.storage.max_size == 102 and rb[:].shape == (8, 3)
        assert numbers(rb[1:3]) == [[1, 1001, 2001], [2, 1002, 2002]]

    def test_time_steps_can_be_replaced(self, rb: ReplayBuffer) -> None:
        rb.extend(env_steps(3, 0, 8))
        rb[2] = of_numbers(torch.tensor([50, 51, 52]))
        rb[4:6] = of_numbers(torch.tensor([[60, 61], [62, 63], [64, 65]]))
        assert numbers(rb[2]) == [50, 51, 52] and numbers(rb[4:6]) == [[60, 61], [62, 63], [64, 65]]
        rb.storage[torch.tensor([7]), torch.tensor([1])] = of_numbers(torch.tensor([70]))
        assert numbers(rb[7]) == [7, 70, 2007] and numbers(rb[3]) == [3, 1003, 2003]

    def test_a_tuple_replaces_what_it_reads(self, rb: ReplayBuffer) -> None:
        rb.extend(env_steps(3, 0, 8))
        for _ in range(2):
            rb[1, 4] = of_numbers(torch.tensor(50))
            rb[2, 1:3] = of_numbers(torch.tensor([60, 61]))
            rb[:2, 6] = of_numbers(torch.tensor([70, 71]))
            rb[[0, 2], [7, 0]] = of_numbers(torch.tensor([80, 81]))
            assert numbers(rb[1, 4]) == 50 and numbers(rb[2, 1:3]) == [60, 61] and numbers(rb[:2, 6]) == [70, 71]
            assert numbers(rb[0, 7]) == 80 and numbers(rb[2, 0]) == 81
            assert sum(n >= 50 for row in numbers(rb[:]) for n in row if n < 1000) == 7
            rb.extend(env_steps(3, 8, 13))  # and where the ring has gone round
            rb[:] = env_steps(3, 0, len(rb) // 3)
        before = state_of(rb)
        for bad in ((0, 99), (3, 0), (0, 0, 0)):
            with pytest.raises(IndexError):
                rb[bad] = of_numbers(torch.tensor(5))
        with pytest.raises(ValueError):
            rb[0, :2] = of_numbers(torch.tensor([1, 2, 3]))
        assert state_of(rb) == before

    def test_other_environments_are_refused(self, rb: ReplayBuffer) -> None:
        rb.extend(env_steps(3, 0, 8))
        was = state_of(rb)
        for bad in (env_steps(4, 0, 8), env_steps(3, 0, 1)[:, 0], env_steps(3, 0, 0)):
            with pytest.raises(ValueError):
                rb.extend(bad)
        with pytest.raises(ValueError, match="2"):
            rb.add(env_steps(2, 0, 1)[:, 0])
        assert state_of(rb) == was

    def test_data_without_environments_are_refused_before_anything_is_made(self, rb: ReplayBuffer) -> None:
        with pytest.raises(ValueError, match="2 batch dimensions"):
            rb.extend(of_numbers(torch.arange(5)))
        assert not rb.storage.initialized

    def test_a_list_of_time_steps_is_stacked(self, rb: ReplayBuffer) -> None:
        rb.extend([env_steps(3, t, t + 1)[:, 0] for t in range(4)])
        assert numbers(rb[:]) == [[1000 * e + t for t in range(4)] for e in range(3)]

    def test_samples_say_where_they_are_from(self, tmp_path: Path) -> None:
        rb = TensorDictReplayBuffer(storage=self.make(100, tmp_path / "td"), batch_size=16, track_generations=True)
        rb.extend(env_steps(3, 0, 40))
        batch, info = rb.sample(return_info=True)
        assert batch["index"].shape == (16, 2) and torch.equal(batch["index"], torch.stack(info["index"], -1))
        time = batch["n"] % 1000
        assert torch.equal(batch["index"][:, 0], time % 34) and torch.equal(batch["index"][:, 1], batch["n"] // 1000)
        assert torch.equal(batch["generation"], time)
        assert torch.equal(rb[:]["index"][1, 5], torch.tensor([5, 1]))

    def test_an_epoch_gives_every_step_of_every_environment_once(self, tmp_path: Path) -> None:
        sampler = SamplerWithoutReplacement()
        rb = ReplayBuffer(storage=self.make(100, tmp_path / "epoch"), sampler=sampler, batch_size=7)
        rb.extend(env_steps(3, 0, 40))
        seen = [n for batch in rb for n in numbers(batch)]
        assert sorted(seen) == sorted(1000 * e + t for e in range(3) for t in range(6, 40))

    @pytest.mark.parametrize("way", ["dumps", "state_dict"])
    @pytest.mark.parametrize("sizes", [[], [8], [40], [20, 20]], ids=str)
    def test_a_saved_state_is_the_same_in_a_twin(
        self, rb: ReplayBuffer, tmp_path: Path, sizes: list[Any], way: str
    ) -> None:
        twin = ReplayBuffer(storage=self.make(100, tmp_path / "twin"), batch_size=5)
        at = 0
        for n in sizes:
            rb.extend(env_steps(3, at, at + n))
            at += n
        if way == "dumps":
            rb.dumps(tmp_path / "saved")
            twin.loads(tmp_path / "saved")
        else:
            twin.load_state_dict(rb.state_dict())
        assert state_of(twin) == state_of(rb) and twin.storage.max_size == rb.storage.max_size

    def test_a_checkpoint_of_other_environments_is_refused(self, rb: ReplayBuffer, tmp_path: Path) -> None:
        other = ReplayBuffer(storage=self.make(100, tmp_path / "other"))
        other.extend(env_steps(4, 0, 2))
        rb.extend(env_steps(3, 0, 2))
        rb.dumps(tmp_path / "saved")
        with pytest.raises(ValueError, match=r"\[4\].*\[3\]"):
            other.loads(tmp_path / "saved")
        assert len(other) == 8

    def test_three_dimensions_are_two_of_environments_and_time(self, tmp_path: Path) -> None:
        rb = ReplayBuffer(storage=self.make(60, tmp_path / "three", ndim=3), batch_size=9)
        data = of_numbers(torch.arange(2 * 3 * 4).reshape(2, 3, 4))
        index = rb.extend(data)
        assert index.shape == (24, 3) and index[0].tolist() == [0, 0, 0] and index[-1].tolist() == [3, 1, 2]
        assert rb.storage.max_size == 60 and rb.storage._storage.batch_size == (10, 2, 3)
        assert numbers(rb[:]) == numbers(data) and numbers(rb[3]) == numbers(data[..., 3])
        batch, info = rb.sample(return_info=True)
        assert len(info["index"]) == 3 and numbers(rb.storage[info["index"]]) == numbers(batch)
        rb[1] = of_numbers(torch.arange(100, 106).reshape(2, 3))
        assert numbers(rb[1]) == [[100, 101, 102], [103, 104, 105]]
        rb[2:4] = of_numbers(torch.arange(200, 212).reshape(2, 3, 2))
        assert numbers(rb[2:4]) == torch.arange(200, 212).reshape(2, 3, 2).tolist()
        rb.add(of_numbers(torch.arange(300, 306).reshape(2, 3)))
        assert numbers(rb[-1]) == [[300, 301, 302], [303, 304, 305]]
        with pytest.raises(ValueError):
            rb.extend(of_numbers(torch.arange(24).reshape(3, 2, 4)))
        twin = ReplayBuffer(storage=self.make(60, tmp_path / "twin", ndim=3), batch_size=9)
        twin.load_state_dict(rb.state_dict())
        assert numbers(twin[:]) == numbers(rb[:])


EXOTIC = ["sparse", "sparse_csr", "meta", "nested", "quantised", "FakeTensor"]


def exotic(kind: str) -> Any:
    """A tensor of three steps that is not plain memory."""
    if kind == "FakeTensor":
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            return torch.zeros(3, 3)
    if kind == "nested":
        return torch.nested.nested_tensor([torch.zeros(3)] * 3)
    if kind == "quantised":
        return torch.quantize_per_tensor(torch.zeros(3, 3), 0.1, 0, torch.quint8)
    if kind == "meta":
        return torch.zeros(3, 3, device="meta")
    return torch.zeros(3, 3).to_sparse() if kind == "sparse" else torch.zeros(3, 3).to_sparse_csr()


class TableContract(StorageContract):
    """Tests of a storage whose first batch decides the layout of all rows. Inherit, and implement `make`."""

    #: Whether `make` gives a storage whose layout the first batch decides.
    fresh = True

    def test_the_first_batch_decides_the_layout(self, rb: ReplayBuffer, storage: Any) -> None:
        rb.extend(steps(0, 3))
        paths = {leaf.path: (leaf.dtype, leaf.shape) for leaf in storage.layout.leaves}
        assert paths == {
            ("n",): (torch.int64, ()),
            ("obs",): (torch.float32, (3,)),
            ("done",): (torch.bool, (1,)),
            ("next", "reward"): (torch.float64, (1,)),
            ("next", "small"): (torch.int8, ()),
        }

    def test_a_slice_of_the_storage_is_a_live_view(self, rb: ReplayBuffer, storage: Any) -> None:
        for before in (0, 13):
            rb.empty()
            rb.extend(steps(100, 100 + before)) if before else None
            rb.extend(steps(0, 6))
            view = storage[2:5]
            now = numbers(view)
            rb[2:5] = steps(70, 73)
            assert numbers(view) == [70, 71, 72] != now
            assert view["obs"].data_ptr() == storage[2:5]["obs"].data_ptr()
        assert storage._storage.batch_size == (storage.max_size,)

    def _refused(self, rb: ReplayBuffer, data: Any, error: type[Exception], *words: Any) -> None:
        storage: Any = rb.storage
        before = (rb.write_count, numbers(rb[:]), storage.layout)
        for write in (lambda: rb.extend(data), lambda: rb.add(data[0]), lambda: rb.__setitem__(slice(0, 3), data)):
            with pytest.raises(error) as raised:
                write()
            for word in words:
                assert re.search(word, str(raised.value)), str(raised.value)
        assert (rb.write_count, numbers(rb[:]), storage.layout) == before
        rb.extend(steps(5, 7))
        assert numbers(rb[:]) == [*before[1], 5, 6]

    def test_a_missing_leaf_is_refused_by_name(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 5))
        self._refused(rb, steps(0, 3).exclude(("next", "reward")), ValueError, r"\('next', 'reward'\)", "missing")

    def test_a_new_leaf_is_refused_by_name(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 5))
        self._refused(rb, steps(0, 3).set("extra", torch.zeros(3)), ValueError, "'extra'", "not in this storage")

    def test_another_dtype_is_refused_by_name(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 5))
        data = steps(0, 3).set("obs", torch.zeros(3, 3, dtype=torch.float64))
        self._refused(rb, data, ValueError, "'obs'", "float32", "float64")

    def test_another_shape_is_refused_by_name(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 5))
        self._refused(rb, steps(0, 3).set("obs", torch.zeros(3, 4)), ValueError, "'obs'", r"\[3\]", r"\[4\]")

    def test_a_tensor_where_a_group_was_is_refused_by_name(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 5))
        self._refused(rb, steps(0, 3).set("next", torch.zeros(3)), ValueError, "'next'", "found a Tensor")

    @pytest.mark.parametrize("kind", EXOTIC)
    def test_exotic_tensors_are_a_type_error_that_names_the_leaf(self, rb: ReplayBuffer, kind: str) -> None:
        rb.extend(dict(steps(0, 5).exclude("next", "done").items()))
        data = {"n": torch.arange(3), "obs": exotic(kind)}
        with pytest.raises(TypeError, match=f"'obs' is a .*{kind}"):
            rb.extend(data)
        with pytest.raises(TypeError, match=f"'obs' is a .*{kind}"):
            ReplayBuffer(storage=self.make(10, None)).extend(data) if self.fresh else rb.extend(data)
        assert len(rb) == 5

    def test_tensors_inside_vmap_are_a_type_error_that_names_the_leaf(self, rb: ReplayBuffer) -> None:
        rb.extend({"n": torch.arange(5), "obs": torch.zeros(5, 3)})
        with pytest.raises(TypeError, match=r"'obs' is a functorch"):
            torch.vmap(lambda x: rb.extend({"n": torch.arange(3), "obs": x}) * 1.0)(torch.zeros(2, 3, 3))
        assert len(rb) == 5

    def test_views_of_any_kind_are_stored_by_value(self, rb: ReplayBuffer) -> None:
        rb.extend({"c": torch.zeros(1, 2, dtype=torch.complex64), "x": torch.zeros(1, 4), "s": torch.zeros(1, 3, 2)})
        c = torch.tensor([[1 + 2j, 3 - 4j]]).conj()
        assert c.is_conj()
        x = torch.arange(8.0).reshape(1, 8)[:, ::2]
        s = torch.arange(6.0).reshape(1, 2, 3).transpose(1, 2).requires_grad_()
        rb.extend({"c": c, "x": x, "s": s})
        rb.extend({"c": c.imag.neg().to(torch.complex64), "x": torch.ones(1).expand(1, 4), "s": -s})
        assert rb[1]["c"].tolist() == c[0].tolist() and rb[1]["x"].tolist() == [0, 2, 4, 6]
        assert torch.equal(rb[1]["s"], s[0].detach()) and not rb[1]["s"].requires_grad
        assert rb[2]["x"].tolist() == [1] * 4 and torch.equal(rb[2]["s"], -s[0].detach())

    def test_a_batch_without_steps_is_refused(self, rb: ReplayBuffer) -> None:
        nothing: list[Any] = [steps(0, 0), []]
        for data in nothing:
            with pytest.raises(ValueError, match="nothing to add"):
                rb.extend(data)
        rb.extend(steps(0, 3))
        for data in nothing:
            with pytest.raises(ValueError, match="nothing to add"):
                rb.extend(data)
        assert len(rb) == 3

    def test_leaves_of_different_lengths_are_refused(self, rb: ReplayBuffer) -> None:
        rb.extend(dict(steps(0, 5).exclude("next", "done").items()))
        with pytest.raises(ValueError, match=r"'obs'.*4.*3"):
            rb.extend({"n": torch.arange(3), "obs": torch.zeros(4, 3)})
        assert len(rb) == 5

    def test_of_a_step_that_is_named_twice_the_last_counts(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 5))
        rb[[1, 1]] = steps(50, 52)
        assert numbers(rb[:]) == [0, 51, 2, 3, 4]
        rb[torch.tensor([0, 4, -1])] = steps(60, 63)
        assert numbers(rb[:]) == [60, 51, 2, 3, 62]

    def test_one_step_replaces_all_that_are_indexed(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 5))
        rb[1:4] = steps(50, 51)[0]
        assert numbers(rb[:]) == [0, 50, 50, 50, 4]

    def test_numpy_arrays_and_numbers_are_stored(self, rb: ReplayBuffer) -> None:
        rb.extend({"a": np.arange(6, dtype=np.int32).reshape(3, 2), "b": np.array([1, 2, 3], np.float32)})
        rb.add({"a": np.array([7, 8], np.int32), "b": 4})
        assert rb[:]["a"].tolist() == [[0, 1], [2, 3], [4, 5], [7, 8]] and rb[:]["b"].tolist() == [1, 2, 3, 4]
        for bad in ({"a": np.array(["x", "y"]), "b": 1.0}, {"a": np.array([None, 1]), "b": 1.0}):
            with pytest.raises(TypeError, match="'a'"):
                rb.add(bad)

    def test_a_number_that_its_leaf_cannot_hold_is_refused(self, rb: ReplayBuffer) -> None:
        rb.extend({"a": torch.zeros(2, dtype=torch.int8), "d": torch.zeros(2, dtype=torch.bool)})
        with pytest.raises(ValueError, match=r"'a'.*300"):
            rb.add({"a": 300, "d": True})
        with pytest.raises(ValueError, match="'d'"):
            rb.add({"a": 1, "d": 2})
        with pytest.raises(ValueError, match="'a'"):
            rb.add({"a": 1.5, "d": True})
        assert len(rb) == 2

    def test_data_of_dtypes_that_fill_rows_unevenly_come_back(self, rb: ReplayBuffer) -> None:
        dtypes = [
            torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
            torch.float32, torch.float64, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
        ]  # fmt: skip
        bits = torch.randint(0, 2, (7, 3))
        data = TensorDict({str(d): bits.to(d) for d in dtypes} | {"none": torch.zeros(7, 0)}, [7])
        rb.extend(data)
        for index in (slice(None), torch.arange(7)):
            batch = rb[index]
            for d in dtypes:
                assert batch[str(d)].dtype == d and torch.equal(batch[str(d)].to(torch.int64), bits)
        assert batch["none"].shape == (7, 0)
