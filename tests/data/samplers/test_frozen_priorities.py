"""A save in the background has the priorities of the moment in which it began, whatever happens since."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.each import each
from engram.data import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)

CAPACITY, ROWS = 4000, 3000


def rows(n: int, start: int = 0) -> Any:
    numbers = torch.arange(start, start + n)
    return {"n": numbers, "traj": numbers // 10}


def prioritized() -> ReplayBuffer[Any]:
    """A buffer whose rows have random priorities, some of them 0."""
    sampler = PrioritizedSampler(None, 0.6, 0.4)
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=sampler, batch_size=64)
    rb.extend(rows(ROWS))
    priorities = torch.rand(ROWS)
    priorities[::7] = 0
    rb.update_priority(torch.arange(ROWS), priorities)
    return rb


def frozen(rb: ReplayBuffer[Any]) -> Any:
    """The sampler's state as a save in the background gets it."""
    return rb.sampler.saved_form.frozen_state(rb.storage)


def update(rb: ReplayBuffer[Any]) -> None:
    rb.update_priority(torch.randint(ROWS, (700,)), torch.rand(700) + 1)


def write(rb: ReplayBuffer[Any]) -> None:
    for start in range(ROWS, ROWS + 2 * CAPACITY, 500):  # over the ring's end
        rb.extend(rows(500, start))
        rb.sample()


def edit(rb: ReplayBuffer[Any]) -> None:
    rb[5:2000:3] = rows(len(range(5, 2000, 3)))
    rb.sample()


def empty(rb: ReplayBuffer[Any]) -> None:
    rb.empty()
    rb.extend(rows(ROWS))
    update(rb)


def change_alpha(rb: ReplayBuffer[Any]) -> None:
    rb.sampler.alpha = 1.0
    rb.sample()


@each("change", [lambda rb: None, update, write, edit, empty, change_alpha])
def test_a_frozen_state_has_the_priorities_of_its_moment(change: Callable[[ReplayBuffer[Any]], None]) -> None:
    rb = prioritized()
    expected, now = rb.sampler.state_dict(), frozen(rb)
    change(rb)
    priorities = now.pop("priorities").read()
    assert torch.equal(priorities, expected.pop("priorities")) and now == expected


def test_of_a_storage_without_limit_too() -> None:
    rb = ReplayBuffer(storage=ListStorage(), sampler=PrioritizedSampler(None, 0.6, 0.4), batch_size=64)
    rb.extend(list(range(900)))
    rb.update_priority(torch.arange(900), torch.rand(900))
    expected, now = rb.sampler.state_dict(), frozen(rb)
    for _ in range(10):
        rb.extend(list(range(500)))
        rb.update_priority(torch.arange(900), torch.rand(900))
    assert torch.equal(now["priorities"].read(), expected["priorities"])


def test_of_several_environments_too() -> None:
    storage = LazyTensorStorage(1500, ndim=2)
    rb = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(None, 0.6, 0.4), batch_size=64)
    for _ in range(2):
        rb.extend({"n": torch.arange(1050).reshape(3, 350)})
    rb.sample()
    slots = torch.stack([torch.arange(1500) // 3, torch.arange(1500) % 3], 1)
    rb.update_priority(slots, torch.rand(1500))
    expected, now = rb.sampler.state_dict(), frozen(rb)
    rb.update_priority(slots, torch.rand(1500))
    rb.extend({"n": torch.arange(300).reshape(3, 100)})
    rb.sample()
    assert torch.equal(now["priorities"].read(), expected["priorities"])


def test_starts_of_slices_too() -> None:
    sampler = PrioritizedSliceSampler(CAPACITY, 0.6, 0.4, slice_len=5, traj_key="traj")
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=sampler, batch_size=50)
    rb.extend(rows(ROWS))
    rb.update_priority(torch.arange(ROWS), torch.rand(ROWS))
    expected, now = rb.sampler.state_dict(), frozen(rb)
    update(rb)
    rb.sample()
    assert torch.equal(now["priorities"].read(), expected["priorities"])


def test_one_save_at_a_time_has_them() -> None:
    rb = prioritized()
    now = frozen(rb)
    with pytest.raises(RuntimeError, match="being saved"):
        frozen(rb)
    del now
    assert len(frozen(rb)["priorities"].read()) == ROWS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_child_leaves_those_of_its_parent_alone() -> None:
    rb = prioritized()
    now = frozen(rb)
    child = os.fork()
    if child == 0:
        os._exit(0 if len(frozen(rb)["priorities"].read()) == ROWS else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(now["priorities"].read()) == ROWS


def test_a_save_in_the_background_comes_back_as_it_was_when_it_began(tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), sampler=PrioritizedSampler(None, 0.6, 0.4), batch_size=64
    )
    rb.extend(rows(ROWS))
    update(rb)
    expected = rb.sampler.state_dict()
    handle = rb.dumps(tmp_path, blocking=False)
    update(rb)
    write(rb)
    handle.result()
    again = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), sampler=PrioritizedSampler(None, 0.6, 0.4), batch_size=64
    )
    again.loads(tmp_path)
    found = again.sampler.state_dict()
    assert torch.equal(found.pop("priorities"), expected.pop("priorities")) and found == expected
    rb.dumps(tmp_path, blocking=False).result()  # nothing is kept of the first one
