"""What `remove` is given, and what it refuses."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.errors import NoFreeLaneError


def filled(n: int = 8, **settings: object) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=200, **settings)  # type: ignore[arg-type]
    rb.extend(TensorDict({"x": torch.arange(n)}, [n]))
    return rb


def drawn(rb: ReplayBuffer) -> set[int]:
    return set(rb.sample()["x"].tolist())


def test_a_store_with_one_writer_lets_no_other_process_remove(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path, lanes=1))
    rb.extend(torch.arange(8))
    other = ReplayBuffer.open(tmp_path)
    with pytest.raises(NoFreeLaneError, match="only that process removes rows"):
        other.remove([1])
    assert rb.remove([2]) == 1 == rb.stats().removed


@pytest.mark.parametrize("settings", [{"shared": True, "lanes": 2}, {"ndim": 2}])
def test_a_new_row_of_a_users_writer_is_drawn_where_one_was_removed(settings: dict[str, object]) -> None:
    shape = [1, 8] if "ndim" in settings else [8]
    rb = ReplayBuffer(storage=LazyTensorStorage(16, **settings), batch_size=200)  # type: ignore[arg-type]
    rb.extend(TensorDict({"x": torch.arange(8).reshape(shape)}, shape))
    rb.remove((torch.tensor([2]), torch.tensor([0])) if "ndim" in settings else [2])
    with rb.storage.access.setting_new_rows():
        rb.storage.set(torch.tensor([2]), TensorDict({"x": torch.full([1, *shape[:-1]], 99)}, [1, *shape[:-1]]))
    assert 99 in drawn(rb) and rb.stats().removed == 0


@pytest.mark.parametrize("item", [lambda i: {"x": torch.tensor(i), "y": torch.zeros(i)}, lambda i: {"x": i}])
def test_a_predicate_looks_at_an_entry_of_items_of_any_form(item) -> None:
    rb = ReplayBuffer(storage=ListStorage(10), batch_size=200, collate_fn=lambda items: items)
    rb.extend([item(i) for i in range(6)])
    assert rb.remove(lambda rows: rows["x"] > 3) == 2
    assert {int(one["x"]) for one in rb.sample()} == {0, 1, 2, 3}


def test_what_a_load_brings_while_a_predicate_runs_is_not_removed(tmp_path: Path) -> None:
    other = filled()
    other.set_("x", torch.arange(100, 108))
    other.dumps(tmp_path / "saved")
    rb = filled()

    def choose(rows):
        mask = rows["x"] > 3
        loader = threading.Thread(target=rb.loads, args=(tmp_path / "saved",))
        loader.start()
        loader.join()
        return mask

    assert rb.remove(choose) == 0 and drawn(rb) == set(range(100, 108))


def test_a_predicate_that_changes_what_it_is_given_changes_no_choice() -> None:
    rb = filled()

    def choose(rows):
        rows.index.fill_(0)
        rows.generation.fill_(0)
        return rows["x"] == 5

    assert rb.remove(choose) == 1 and drawn(rb) == set(range(8)) - {5}


def test_a_predicate_sees_no_row_that_was_removed_before() -> None:
    rb = filled()
    rb.remove([2, 3])
    seen = []
    rb.remove(lambda rows: (seen.extend(rows["x"].tolist()), rows["x"] < 0)[1])
    assert seen == [0, 1, 4, 5, 6, 7]


@pytest.mark.parametrize("generation", [[1.9], [True], {}, ["1"], float("nan")])
def test_generations_that_are_no_integers_are_refused(generation: object) -> None:
    rb = filled()
    with pytest.raises(TypeError, match=r"generations are sequences, int64.*nothing was changed"):
        rb.remove([1], generation=generation)
    assert rb.stats().removed == 0


@pytest.mark.parametrize("index", [torch.ones(8, dtype=torch.bool), [1.5]])
def test_is_removed_takes_no_masks_and_no_floats_for_slots(index: object) -> None:
    rb = filled()
    rb.remove([1])
    with pytest.raises(IndexError, match="one of integers"):
        rb.storage.is_removed(index)


@pytest.mark.parametrize("gone", [0, 1])
def test_prioritised_slices_say_that_what_is_left_has_no_slice(gone: int) -> None:
    sampler = PrioritizedSliceSampler(10, 0.7, 0.5, slice_len=2, traj_key="e")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
    rb.extend(TensorDict({"e": torch.zeros(2, dtype=torch.int64)}, [2]))
    rb.remove([gone])
    with pytest.raises(RuntimeError, match="every slice that can be drawn has rows that were removed"):
        rb.sample()


@pytest.mark.parametrize("looks", [False, True])
def test_new_rows_get_the_highest_priority_of_those_that_are_left(looks: bool) -> None:
    sampler = PrioritizedSampler(10, 1.0, 0.5, max_priority_within_buffer=True)
    rb = filled(4, sampler=sampler)
    rb.update_priority(torch.arange(4), torch.tensor([100.0, 1, 1, 1]))
    rb.remove([0])
    if looks:
        rb.sample()
    rb.extend(TensorDict({"x": torch.tensor([9])}, [1]))
    assert sampler.priorities([4], storage=rb.storage).tolist() == pytest.approx([1.0])
