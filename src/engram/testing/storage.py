"""What every storage must do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engram.data import ReplayBuffer, Storage
from engram.testing.numbered import numbers, of_numbers, state_of, steps

INDICES = [
    0, 3, -1, -6, np.int64(2), torch.tensor(4), slice(2, 5), slice(None), slice(None, None, 2), slice(-3, None),
    slice(3, 3), slice(4, 100), range(1, 4), range(-2, 0), range(0), [0, 2], [-1, 1], [],
    torch.tensor([1, 2]), torch.tensor([-1, 0]), torch.tensor([3, 2], dtype=torch.int32), np.array([4, 1]),
    torch.tensor([[0, 1], [2, -1]]), torch.tensor([], dtype=torch.int64), Ellipsis, (slice(1, 3),),
    [True, False, True, False, False, True], np.array([False, True] * 3), torch.tensor([True] * 6),
    torch.zeros(6, dtype=torch.bool),
]  # fmt: skip
REPEATING = [[5, 0, 0], torch.tensor([3, 3]), torch.tensor([[0, 1], [1, -1]]), [-1, 5]]
BAD_INDICES = [
    6, -7, 10, 1000, 2**70, [0, 6], [0, -7], [2**70], torch.tensor([9]), torch.tensor([10**6]), range(5, 8), [True] * 5,
    torch.ones(7, dtype=torch.bool), True, torch.tensor(True), 2.5, [0.5], torch.tensor([1.0]), "n0", (0, 1),
    slice(None, None, -1), {},
]  # fmt: skip


class StorageContract:
    """Of a `Storage`. Inherit, and implement `make`.

    Example:
        >>> class TestMyStorage(StorageContract):
        ...     def make(self, capacity, path):
        ...         return ListStorage(capacity)
    """

    #: Whether it is full when it holds `max_size` steps.
    room_is_max_size = True

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
        for index in (2, slice(None), [2, 3], torch.tensor([True] * 6), Ellipsis):
            for leaf in _leaves(rb[index]):
                leaf.zero_()
        for _ in range(3):
            for leaf in _leaves(rb.sample()):
                leaf.zero_()
        assert numbers(rb[:]) == [0, 1, 2, 3, 4, 5]

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


def _as_numpy(index: Any) -> Any:
    """What means the same to a NumPy array."""
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
