"""An epoch that goes on in a storage of another capacity: what has come does not come again, the rest comes once."""

from __future__ import annotations

import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram.data import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
)


def moved(saved: ReplayBuffer, rb: ReplayBuffer, through_files: bool) -> ReplayBuffer:
    """The buffer `rb` after it has taken over what `saved` is."""
    if through_files:
        with tempfile.TemporaryDirectory() as path:
            saved.dumps(path)
            rb.loads(path)
    else:
        rb.load_state_dict(saved.state_dict())
    return rb


class Ring:
    """What is stored, oldest first, and what of its epoch has not come, as plain lists say it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: list[list[int]] = []
        self.left: set[int] = set()

    def write(self, step: list[int]) -> None:
        self.held = [*self.held, step][-self.capacity :]

    @property
    def rows(self) -> set[int]:
        return {n for step in self.held for n in step}

    def draw(self, found: list[int], ended: bool) -> None:
        if not self.left & self.rows:  # where all of its rest was overwritten, the next epoch begins
            self.left = self.rows
        assert len(set(found)) == len(found) and set(found) <= self.left, "it came already, or is not of this epoch"
        assert set(found) <= self.rows, "it has been overwritten"
        self.left -= set(found)
        assert ended != bool(self.left & self.rows), "it never came, or the epoch does not end"


@pytest.mark.deep
@settings(max_examples=30)
@given(data=st.data())
def test_an_epoch_goes_on_in_a_storage_of_another_capacity(data):
    envs, items = data.draw(st.sampled_from([(1, False), (1, True), (3, False)]))
    shuffle, batch_size = data.draw(st.booleans()), data.draw(st.integers(1, 6))

    def made(capacity: int) -> ReplayBuffer:
        storage = LazyTensorStorage(capacity * envs, ndim=1 if envs == 1 else 2)
        sampler = SamplerWithoutReplacement(shuffle=shuffle)
        return ReplayBuffer(storage=ListStorage(capacity) if items else storage, sampler=sampler, batch_size=batch_size)

    ring, time = Ring(data.draw(st.integers(1, 10))), 0
    rb = made(ring.capacity)

    def write(n: int) -> None:
        nonlocal time
        new = torch.arange(time, time + n).unsqueeze(0) * 10 + torch.arange(envs).unsqueeze(1)
        rb.extend(list(new[0]) if items else new[0] if envs == 1 else new)
        time += n
        for step in new.T.tolist():
            ring.write(step)

    def draw() -> None:
        found = torch.as_tensor(rb.sample()).reshape(-1).tolist()
        ring.draw(found, rb.sampler.state_dict()["epoch"] is None)

    def room() -> int:
        held = len(ring.held)
        return data.draw(st.sampled_from([n for n in (held, held + 1, ring.capacity, 2 * held, 25) if n >= held]))

    write(data.draw(st.integers(1, 25)))
    for what in data.draw(st.lists(st.sampled_from(["draw", "draw", "write", "load"]), max_size=8)):
        if what == "draw":
            draw()
        elif what == "write":
            write(data.draw(st.integers(1, 3)))
        else:
            ring.capacity = room()
            rb = moved(rb, made(ring.capacity), data.draw(st.booleans()))
    while ring.left & ring.rows:
        draw()


@settings(max_examples=20)
@given(data=st.data())
def test_an_epoch_of_trajectories_goes_on_in_a_storage_of_another_capacity(data):
    def made(capacity: int) -> ReplayBuffer:
        sampler = SliceSamplerWithoutReplacement(
            slice_len=1, traj_key="traj", strict_length=False, shuffle=shuffle
        )  # fmt: skip
        return ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=batch_size)

    batch_size, shuffle = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    ring, trajectory = Ring(data.draw(st.integers(1, 10))), 0
    rb = made(ring.capacity)

    def write(lengths: list[int]) -> None:
        nonlocal trajectory
        for n in lengths:
            ids = torch.full((n,), trajectory)
            rb.extend(TensorDict({"traj": ids}, [n]))
            for _ in range(n):
                ring.write([trajectory])
            trajectory += 1

    def draw() -> None:
        found = rb.sample()["traj"].tolist()
        ring.draw(found, rb.sampler.state_dict()["epoch"] is None)

    def room() -> int:
        held = len(ring.held)
        return data.draw(st.sampled_from([n for n in (held, held + 1, ring.capacity, 2 * held, 25) if n >= held]))

    lengths = st.lists(st.integers(1, 4), min_size=1, max_size=6)
    write(data.draw(lengths))
    for what in data.draw(st.lists(st.sampled_from(["draw", "draw", "write", "load"]), max_size=8)):
        if what == "draw":
            draw()
        elif what == "write":
            write(data.draw(lengths)[:2])
        else:
            ring.capacity = room()
            rb = moved(rb, made(ring.capacity), data.draw(st.booleans()))
    while ring.left & ring.rows:
        draw()


@pytest.mark.parametrize("name", ["ring", "moved"])
def test_an_epoch_that_does_not_say_of_which_capacity_is_refused(name):
    saved = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4)
    saved.extend(torch.arange(17))
    saved.sample()
    state = saved.state_dict()
    del state["sampler"]["epoch"][name]
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4)
    with pytest.raises((ValueError, KeyError)):
        rb.load_state_dict(state)
    assert not len(rb)
