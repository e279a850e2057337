"""Where a batch meets what is stored: no slice holds a step whose next observation is not its successor's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, SliceSampler, TensorStorage
from engram.store.episodes import EpisodeIndex

CAPACITY = 200


def columns(like: TensorDict | None = None, ndim: int = 1) -> TensorStorage:
    """Room for steps as columns, as on a GPU."""
    storage = TensorStorage(episode(CAPACITY, 0) if like is None else like, ndim=ndim)
    storage.empty()
    return storage


def room_for(rb: ReplayBuffer, like: TensorDict) -> None:
    """Columns have the entries that they were made with."""
    if type(rb.storage) is TensorStorage:
        rb.set_storage(columns(like))


STORAGES: dict[str, Callable[[], Any]] = {
    "memory": lambda: LazyTensorStorage(CAPACITY),
    "shared": lambda: LazyTensorStorage(CAPACITY, shared=True),
    "file": lambda: LazyMemmapStorage(CAPACITY, scratch_dir=tempfile.mkdtemp()),
    "columns": columns,
    "list": lambda: ListStorage(CAPACITY),
}


@pytest.fixture(params=STORAGES)
def rb(request: pytest.FixtureRequest) -> ReplayBuffer:
    return ReplayBuffer(storage=STORAGES[request.param]())


def episode(n: int, start: int, ids: int = 0, done: bool = False, **changes: Any) -> TensorDict:
    """n steps that follow each other: the observation counts up from `start`."""
    t = torch.arange(start, start + n).float().unsqueeze(1)
    flags = torch.zeros(n, 1, dtype=torch.bool)
    flags[-1] = done
    steps = TensorDict(
        {
            "observation": t, "action": t.clone(), "done": torch.zeros(n, 1, dtype=torch.bool),
            "collector": {"traj_ids": torch.full((n,), ids)},
            "next": {"observation": t + 1, "reward": torch.ones(n, 1), "done": flags},
        },
        [n],
    )  # fmt: skip
    for key, value in changes.items():
        steps["next", key] = value
    return steps


def lengths(rb: ReplayBuffer, **settings: Any) -> list[int]:
    return EpisodeIndex(**settings).trajectories(rb.storage).length.tolist()


def write(rb: ReplayBuffer, steps: TensorDict, one_by_one: bool) -> None:
    if one_by_one:
        for step in steps:
            rb.add(step)
    else:
        rb.extend(steps)


@pytest.mark.parametrize("one_by_one", [False, True], ids=["extend", "add"])
def test_steps_that_go_on_are_joined_and_others_are_not(rb: ReplayBuffer, one_by_one: bool) -> None:
    write(rb, episode(10, 0), one_by_one)
    write(rb, episode(5, 10), one_by_one)
    assert lengths(rb) == [15]
    write(rb, episode(8, 500), one_by_one)  # a second collector, which counts its trajectories from 0, too
    assert lengths(rb) == [15, 8]
    write(rb, episode(8, 508), one_by_one)
    assert lengths(rb) == [15, 16]


def test_two_writers_that_take_turns_step_by_step_are_told_apart(rb: ReplayBuffer) -> None:
    rb.extend(episode(4, 0))
    for k in range(6):
        rb.extend(episode(1, 1000 + k))
        rb.extend(episode(1, 4 + k))
    assert lengths(rb) == [4] + [1] * 12


def test_a_done_step_and_a_first_one_of_the_same_id_are_not_joined(rb: ReplayBuffer) -> None:
    rb.extend(episode(6, 0, ids=3, done=True))
    rb.extend(episode(6, 50, ids=3))
    assert lengths(rb) == [6, 6], "by ids"
    rb.extend(episode(6, 90, ids=4))
    assert lengths(rb) == [6, 6, 6]


@pytest.mark.parametrize("at", [4, 5], ids=["the last step before it", "the first step behind it"])
def test_a_border_stays_where_a_step_beside_it_is_written_in_place(rb: ReplayBuffer, at: int) -> None:
    rb.extend(episode(5, 0))
    rb.extend(episode(5, 500))  # of another collector, with the same ids, and no step is done
    index = EpisodeIndex()
    assert index.trajectories(rb.storage).length.tolist() == [5, 5]
    rb[at] = rb[at]
    assert index.trajectories(rb.storage).length.tolist() == [5, 5]


def test_no_slice_joins_steps_of_two_collectors(rb: ReplayBuffer) -> None:
    rb.set_sampler(SliceSampler(slice_len=4))
    for start in range(0, 700, 70):
        rb.extend(episode(9, start))
    if isinstance(rb.storage, ListStorage):
        rb._collate_fn = torch.stack
    slices = rb.sample(4000).reshape(-1, 4)
    assert torch.equal(slices["next", "observation"][:, :-1], slices["observation"][:, 1:])


def n_step(n: int, start: int) -> TensorDict:
    steps = episode(n, start)
    steps["next", "observation"] = steps["observation"] + 3
    return steps


def one_sided(n: int, start: int) -> TensorDict:
    steps = episode(n, start)
    steps["observation"] *= 2
    return steps


def root_repeats_next(n: int, start: int) -> TensorDict:
    steps = episode(n, start)
    steps["observation"] = steps["next", "observation"].clone()
    return steps


def without_next(n: int, start: int) -> TensorDict:
    return episode(n, start).exclude(("next", "observation"))


@pytest.mark.pairwise
@pytest.mark.parametrize("made", [n_step, one_sided, root_repeats_next, without_next])
@pytest.mark.parametrize("one_by_one", [False, True], ids=["extend", "add"])
def test_entries_that_never_match_do_not_cut_trajectories(
    rb: ReplayBuffer, made: Callable[[int, int], TensorDict], one_by_one: bool
) -> None:
    room_for(rb, made(CAPACITY, 0))
    for start in (0, 10, 20):
        write(rb, made(10, start), one_by_one)
    assert lengths(rb) == [30]


def test_of_several_entries_only_those_that_agreed_are_evidence(rb: ReplayBuffer) -> None:
    def steps(n: int, start: int, goal: float, noise: int) -> TensorDict:
        made = episode(n, start)
        made["goal"], made["next", "goal"] = torch.full((n,), goal), torch.full((n,), goal)
        made["noise"], made["next", "noise"] = torch.arange(n) + noise, torch.arange(n) - 1000 - noise
        return made

    room_for(rb, steps(CAPACITY, 0, 1.0, 0))
    rb.extend(steps(5, 0, 1.0, 0))
    rb.extend(steps(5, 5, 1.0, 77))
    assert lengths(rb) == [10]
    rb.extend(steps(5, 10, 2.0, 77))  # the observation goes on; the goal is another one
    assert lengths(rb) == [10, 5]


def test_steps_that_their_ids_part_are_no_evidence(rb: ReplayBuffer) -> None:
    rb.extend(torch.cat([episode(10, 0, ids=0), episode(1, 500, ids=1)]))
    rb.extend(episode(5, 900, ids=1))
    assert lengths(rb) == [10, 1, 5]
    rb.empty()
    rb.extend(episode(1, 0, ids=3))
    rb.extend(torch.cat([episode(1, 700, ids=3), episode(1, 701, ids=4)]))  # they agree, but are not joined
    assert lengths(rb) == [2, 1]


def test_nan_follows_nan(rb: ReplayBuffer) -> None:
    first, second = episode(5, 0), episode(5, 5)
    first["next", "observation"][-1], second["observation"][0] = float("nan"), float("nan")
    rb.extend(first)
    rb.extend(second)
    assert lengths(rb) == [10]


def test_after_empty_and_loads_what_was_evidence_before_says_nothing(rb: ReplayBuffer) -> None:
    rb.extend(episode(10, 0))
    rb.empty()
    rb.extend(n_step(1, 0))
    rb.extend(n_step(1, 50))
    rb.extend(n_step(1, 90))
    assert lengths(rb) == [3]


def test_a_border_of_a_ring_that_has_gone_round_is_seen(rb: ReplayBuffer) -> None:
    for start in range(0, 450, 9):
        rb.extend(episode(9, start + (start >= 441) * 1000))
    assert lengths(rb)[-2:] == [191, 9]


@pytest.mark.parametrize("kind", ["memory", "columns"])
def test_of_several_environments_one_that_does_not_go_on_is_enough(kind: str) -> None:
    def batch(*starts: int) -> TensorDict:
        return torch.stack([episode(5, start) for start in starts])

    there = torch.stack([episode(30, 0)] * 3).transpose(0, 1).contiguous()
    rb = ReplayBuffer(storage=columns(there, ndim=2) if kind == "columns" else LazyTensorStorage(90, ndim=2))
    rb.extend(batch(0, 100, 200))
    rb.extend(batch(5, 105, 205))
    assert lengths(rb) == [10, 10, 10]
    rb.extend(batch(10, 700, 210))
    assert lengths(rb) == [10, 5] * 3


def test_a_checkpoint_keeps_the_seams_of_borders(rb: ReplayBuffer, tmp_path: Any) -> None:
    rb.extend(episode(5, 0))
    rb.extend(episode(5, 60))
    rb.dumps(tmp_path)
    twin = ReplayBuffer(storage=type(rb.storage)(CAPACITY)) if type(rb.storage) is not TensorStorage else rb
    twin.loads(tmp_path)
    assert lengths(twin) == [5, 5]
    twin.extend(episode(5, 65))
    assert lengths(twin) == [5, 10]


@pytest.mark.parametrize("way", ["checkpoint", "state"])
def test_load_knows_entries_that_matched_in_overwritten_steps(rb: ReplayBuffer, way: str, tmp_path: Any) -> None:
    room_for(rb, episode(CAPACITY, 0))
    rb.extend(episode(4, 0))
    for k in range(CAPACITY):  # two writers that take turns: no two steps of the ring are joined
        rb.extend(episode(1, 1000 * (k + 1)))
    twin = ReplayBuffer(storage=type(rb.storage)(episode(CAPACITY, 0)) if type(rb.storage) is TensorStorage else
                        type(rb.storage)(CAPACITY))  # fmt: skip
    if way == "state":
        twin.load_state_dict(rb.state_dict())
    else:
        rb.dumps(tmp_path)
        twin.loads(tmp_path)
    for buffer in (rb, twin):
        buffer.extend(episode(1, 7))
        buffer.extend(episode(2, 90))
        assert lengths(buffer) == [1] * (CAPACITY - 2) + [2]


def test_opened_store_knows_matching_entries(tmp_path: Any) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=tmp_path))
    rb.extend(episode(4, 0))
    for k in range(20):
        rb.extend(episode(1, 1000 * (k + 1)))
    rb.storage.close()
    again = ReplayBuffer.open(tmp_path)
    for start in (5, 50, 500):
        again.extend(episode(1, start))
    assert lengths(again) == [1] * 20


def test_a_storage_that_was_released_and_saved_goes_on_alike_here_and_where_it_is_loaded(rb: ReplayBuffer) -> None:
    room_for(rb, episode(CAPACITY, 0))
    rb.extend(episode(4, 0))
    rb.storage.release()
    twin = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    if isinstance(rb.storage, ListStorage):
        twin = ReplayBuffer(storage=ListStorage(CAPACITY))
    twin.load_state_dict(rb.state_dict())
    for buffer in (rb, twin):
        buffer.extend(episode(3, 4))
        assert lengths(buffer) == [7]


SCALARS: dict[str, Callable[[int], Any]] = {
    "int": int,
    "float": float,
    "numpy's integer": np.int64,
    "list": lambda v: [v, 0],
    "pair": lambda v: (np.full(2, v), v),
}


@each("kind", SCALARS)
def test_observations_of_items_are_compared_whatever_numbers_they_are(kind: str) -> None:
    make, rb = SCALARS[kind], ReplayBuffer(storage=ListStorage(CAPACITY))

    def items(n: int, start: int) -> list[Any]:
        steps = range(start, start + n)
        return [{"observation": make(t), "next": {"observation": make(t + 1), "done": False}} for t in steps]

    rb.extend(items(4, 0))
    rb.extend(items(3, 4))
    assert lengths(rb) == [7]
    rb.extend(items(3, 50))
    rb.add(items(1, 53)[0])
    rb.add(items(1, 90)[0])
    assert lengths(rb) == [7, 4, 1]


def test_items_that_have_other_entries_than_the_first_are_compared_by_their_own() -> None:
    rb = ReplayBuffer(storage=ListStorage(CAPACITY))
    rb.add(TensorDict({"next": {"done": torch.ones(1, dtype=torch.bool)}}))
    rb.extend(episode(4, 0))
    rb.extend(episode(4, 4))
    rb.extend(episode(4, 30))
    assert lengths(rb) == [1, 8, 4]
