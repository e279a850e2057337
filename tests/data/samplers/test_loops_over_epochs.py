"""Loops over the epochs of a buffer whose rows are overwritten between two batches, or before a batch is read."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from engram.data import (
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
)
from engram.data.replay_buffers.reading import prefetch
from engram.data.replay_buffers.reading.reader import Member

CAPACITY = 12


class OwnEpochs(SamplerWithoutReplacement):
    """A sampler that a user derives from ours."""


@pytest.fixture(params=[0, 1])
def ahead(request, monkeypatch):
    """How many batches are prepared ahead."""
    monkeypatch.setattr(prefetch, "PAYS_FROM_S", 0)
    return request.param


def rows(kind=SamplerWithoutReplacement, **settings):
    sampler = kind(shuffle=False)
    return ReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=sampler, batch_size=4, **settings)


def slices(**settings):
    sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="id", shuffle=False)
    return ReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=sampler, batch_size=4, **settings)


def filled(rb, start=0):
    """The buffer after all its rows were replaced by those numbered from `start` on, in trajectories of three."""
    step = torch.arange(start, start + CAPACITY)
    rb.extend(TensorDict({"step": step, "id": step // 3}, [CAPACITY]))
    return rb


def numbers(batch):
    return batch["step"].flatten().tolist()


def assert_one_epoch(rb, make):
    """A loop gives each row (of slices, each trajectory) once."""
    found = [n for batch in rb for n in numbers(batch)]
    assert len(set(found)) == len(found) == (CAPACITY if make is rows else 2 * CAPACITY // 3)


def overwrite_while_it_is_read(rb, monkeypatch, start):
    """All rows are replaced while those of the next batch are copied, none of which is whole then."""
    read = Member._read_rows

    def read_and_overwrite(member, draw, *settings):
        monkeypatch.setattr(Member, "_read_rows", read)
        batch, _, absent, generation = read(member, draw, *settings)
        filled(rb, start)
        return batch, list(range(len(draw.slots))), absent, generation

    monkeypatch.setattr(Member, "_read_rows", read_and_overwrite)


@pytest.mark.parametrize("make", [rows, slices])
def test_loop_ends_where_the_rest_of_its_epoch_was_overwritten(make, ahead):
    rb = filled(make(prefetch=ahead))
    seen = []
    for batch in rb:
        seen += numbers(batch)
        if len(seen) == 4:
            filled(rb, 60)
    assert 4 <= len(seen) <= 4 * (1 + ahead) and max(seen) < CAPACITY
    assert_one_epoch(rb, make)


@pytest.mark.parametrize("settings", [{}, {"drop_last": True}])
@pytest.mark.parametrize("kind", [SamplerWithoutReplacement, OwnEpochs])
def test_loop_with_other_settings_ends_where_the_rest_of_its_epoch_was_overwritten(kind, settings):
    rb = filled(rows(lambda **order: kind(**order, **settings)))
    for i, batch in enumerate(rb):
        assert i == 0 and max(numbers(batch)) < CAPACITY
        filled(rb, 60)
    assert_one_epoch(rb, rows)


def test_loop_over_an_ensemble_ends_where_the_rest_of_an_epoch_was_overwritten():
    both = [filled(rows()), filled(rows())]
    rb = ReplayBufferEnsemble(*both, sample_from_all=True, batch_size=8)
    for i, batch in enumerate(rb):
        assert i == 0 and max(numbers(batch)) < CAPACITY
        filled(both[1], 60)
    assert sorted(n for batch in rb for n in batch["step"][1].tolist()) == list(range(60, 68))


def test_loop_ends_where_a_batch_beside_it_began_another_epoch():
    rb = filled(rows())
    for i, _ in enumerate(rb):
        assert i == 0
        for _ in range(3):
            rb.sample()
    assert numbers(rb.sample()) == [4, 5, 6, 7]


@pytest.mark.parametrize(("make", "seen"), [(rows, 1), (rows, 2), (slices, 1)])
def test_batch_that_was_overwritten_whole_has_no_rows_of_the_next_epoch(make, seen, monkeypatch):
    rb = filled(make(track_generations=True))  # whose batches are drawn and read one after the other
    for i, batch in enumerate(rb):
        assert max(numbers(batch)) < CAPACITY
        if i + 1 == seen:
            overwrite_while_it_is_read(rb, monkeypatch, 60)
    assert i + 1 == seen
    assert_one_epoch(rb, make)


@pytest.mark.parametrize("make", [rows, slices])
def test_batch_of_its_own_that_was_overwritten_whole_is_the_first_of_the_next_epoch(make, monkeypatch):
    rb = filled(make(track_generations=True))  # whose batches are drawn and read one after the other
    rb.sample()
    overwrite_while_it_is_read(rb, monkeypatch, 60)
    first = numbers(rb.sample())
    rest = [n for batch in rb for n in numbers(batch)]
    assert len(first) == 4 and min(first + rest) >= 60 and not set(first) & set(rest)
    assert len(first + rest) == (CAPACITY if make is rows else 2 * CAPACITY // 3)


def set_anew(rb, how):
    sampler = rb.sampler
    if how == "load_state_dict":
        sampler.load_state_dict(sampler.state_dict() | {"epoch": None, "ran_out": False})
    elif how == "empty":
        sampler.empty()
    else:
        sampler.set_epoch(5)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize(
    ("make", "how"),
    [(rows, "load_state_dict"), (rows, "empty"), (rows, "set_epoch"), (slices, "load_state_dict"), (slices, "empty")],
)
def test_loop_gives_a_whole_epoch_after_its_sampler_was_set_anew(make, how, depth, monkeypatch):
    monkeypatch.setattr(prefetch, "PAYS_FROM_S", 0)
    rb = filled(make(prefetch=depth))
    for _ in range(3):
        next(iter(rb))
        set_anew(rb, how)
        assert_one_epoch(rb, make)


@pytest.mark.parametrize("make", [rows, slices])
def test_loop_goes_on_with_the_rows_that_are_stored_after_its_buffer_was_emptied(make, ahead):
    rb = filled(make(prefetch=ahead))
    loop = iter(rb)
    next(loop)
    rb.empty()
    filled(rb, 60)
    found = [n for batch in loop for n in numbers(batch)]
    assert min(found) >= 60 and len(found) == (CAPACITY if make is rows else 2 * CAPACITY // 3)
    assert {n // 3 for n in found} == {20, 21, 22, 23}


def test_loop_goes_on_with_slices_of_another_length():
    rb = filled(slices())
    loop = iter(rb)
    next(loop)
    rb.sampler.slice_len = 1
    assert sorted(n // 3 for batch in loop for n in numbers(batch)) == [0, 1, 2, 3]


def test_loop_ends_where_its_epoch_was_overwritten_also_after_another_generator(ahead):
    rb = filled(rows(prefetch=ahead))
    loop = iter(rb)
    next(loop)
    rb.set_rng(torch.Generator())
    filled(rb, 60)
    assert list(loop) == []
