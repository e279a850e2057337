"""`engram.Generator`: what it draws, and that a buffer which draws from one goes on where it stood."""

import copy
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

import engram
from contracts.each import each
from engram._copies import passing_fds
from engram.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from engram.errors import CheckpointMisfitError
from engram.testing import chi_square, steps

SAMPLERS = {
    "uniform": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "prioritised": lambda: PrioritizedSampler(None, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=2, end_key="done", strict_length=False),
    "slice epochs": lambda: SliceSamplerWithoutReplacement(slice_len=2, end_key="done", strict_length=False),
}

#: For ever: a seed gives the same batches in every release of this minor version.
PINNED = [814277273372256191, 5310915691172646614, 13116229249406858255]
PINNED_ROWS = [3, 27, 0, 25, 13, 4, 1, 19]


def buffer(name="uniform", generator=None, kind=TensorDictReplayBuffer, **arguments):
    rb = kind(
        storage=LazyTensorStorage(40), sampler=SAMPLERS[name](), batch_size=8,
        generator=engram.Generator(7) if generator is None else generator, **arguments,
    )  # fmt: skip
    data = steps(0, 40)
    data["done"] = torch.arange(40) % 10 == 9
    rb.extend(data)
    return rb


def drawn(rb, n=4):
    return [rb.sample()["index"].tolist() for _ in range(n)]


def ensemble(generator):
    members = [buffer(generator=engram.Generator(k)) for k in range(3)]
    own = engram.Generator(5) if generator else None
    return ReplayBufferEnsemble(*members, batch_size=6, num_buffer_sampled=2, p=[0.2, 0.3, 0.5], generator=own)


def drawn_by_members(rb, n=4):
    return [rb.sample()["index", "buffer_ids"].tolist() for _ in range(n)]


def test_the_numbers_are_those_of_the_seed_for_ever():
    assert [engram.Generator(0).next(), engram.Generator(1).next(), engram.Generator(-1).next()] == PINNED
    assert drawn(buffer(), 1) == [PINNED_ROWS]


def test_the_numbers_are_uniform_and_streams_of_neighbouring_seeds_differ():
    generator = engram.Generator(0)
    numbers = [generator.random() for _ in range(64_000)]
    assert min(numbers) >= 0 and max(numbers) < 1
    assert chi_square(torch.bincount((torch.tensor(numbers, dtype=torch.float64) * 64).long(), minlength=64)) > 1e-6
    pairs = torch.tensor(numbers, dtype=torch.float64).mul(8).long().view(-1, 2)
    assert chi_square(torch.bincount(pairs[:, 0] * 8 + pairs[:, 1], minlength=64)) > 1e-6
    first = torch.tensor([engram.Generator(seed).random() for seed in range(6400)], dtype=torch.float64)
    assert chi_square(torch.bincount((first * 64).long(), minlength=64)) > 1e-6


def test_rows_that_are_drawn_from_it_are_equally_likely():
    rb = buffer()
    assert chi_square(torch.bincount(rb.sample(40_000)["index"], minlength=40)) > 1e-6


@each("name", SAMPLERS)
def test_every_sampler_draws_from_it_alone_and_the_same_again_from_the_same_seed(name):
    before = torch.get_rng_state()
    batches = drawn(buffer(name))
    assert batches == drawn(buffer(name)) != drawn(buffer(name, engram.Generator(8)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("own", [True, False])
def test_ensembles_draw_from_it(own):
    before = torch.get_rng_state()
    torch.manual_seed(0)
    batches = drawn_by_members(ensemble(own))
    torch.manual_seed(0 if not own else 1)
    assert drawn_by_members(ensemble(own)) == batches
    torch.set_rng_state(before)


@each("name", SAMPLERS)
@each("prefetch", [None, 3])
def test_a_loaded_buffer_goes_on_where_the_saved_one_stood(name, prefetch, tmp_path):
    rb = buffer(name, prefetch=prefetch)
    drawn(rb)
    rb.dumps(tmp_path)
    state, expected = rb.state_dict(), drawn(rb)
    for load in (lambda other: other.loads(tmp_path), lambda other: other.load_state_dict(state)):
        other = buffer(name, engram.Generator(99), prefetch=prefetch)
        load(other)
        assert drawn(other) == expected


def test_an_ensemble_that_is_loaded_goes_on_with_the_generators_of_its_members(tmp_path):
    rb = ensemble(True)
    drawn_by_members(rb)
    rb.dumps(tmp_path)
    expected, other = drawn_by_members(rb), ensemble(True)
    other.loads(tmp_path)
    assert drawn_by_members(other) == expected


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_copies_and_pickles_of_a_buffer_go_on_where_it_stood(copied):
    rb = buffer()
    drawn(rb)
    other = copied(rb)
    assert type(other.generator) is engram.Generator
    assert drawn(other) == drawn(rb)


@each("generator", [engram.Generator(5), torch.Generator().manual_seed(5)])
def test_a_buffer_that_another_process_gets_has_a_generator_that_stands_where_this_one_does(generator):
    rb = ReplayBuffer(storage=LazyTensorStorage(20, shared=True), batch_size=8, generator=generator)
    rb.extend(torch.arange(20))
    rb.sample()
    with passing_fds([]) as descriptors:
        packed = bytes(ForkingPickler.dumps(rb))
    with passing_fds(descriptors):
        other = pickle.loads(packed)
    assert type(other.generator) is type(generator) and other.sample().tolist() == rb.sample().tolist()


@each("copied", [copy.copy, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
def test_copies_and_pickles_of_a_generator_stand_where_it_does_and_go_on_alone(copied):
    generator = engram.Generator(3)
    generator.next()
    other = copied(generator)
    assert [other.next() for _ in range(5)] == [generator.next() for _ in range(5)]
    other.next()
    assert not torch.equal(other.get_state(), generator.get_state())


def test_its_state_has_16_bytes_and_is_taken_over_whole_or_not_at_all():
    generator, other = engram.Generator(3), engram.Generator(4)
    generator.next()
    state = generator.get_state()
    assert state.shape == (16,) and state.dtype is torch.uint8
    assert other.set_state(state).next() == generator.next()
    before = other.get_state()
    for wrong in (torch.get_rng_state(), state[:8], state.long(), None):
        with pytest.raises(ValueError, match="16 uint8"):
            other.set_state(wrong)
    assert torch.equal(other.get_state(), before)


@each("seed", [None, 1.5, "1", True])
def test_a_seed_is_an_integer(seed):
    with pytest.raises(TypeError, match="a seed is an integer"):
        engram.Generator(seed)


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_state_of_the_other_kind_of_generator_is_a_difference_and_changes_nothing(ours_first, tmp_path):
    kinds = [engram.Generator(1), torch.Generator().manual_seed(1)]
    saved, other = (buffer(generator=g) for g in (kinds if ours_first else reversed(kinds)))
    saved.dumps(tmp_path)
    before = other.generator.get_state()
    for load in (lambda: other.loads(tmp_path), lambda: other.load_state_dict(saved.state_dict())):
        with pytest.raises(CheckpointMisfitError, match=r"draws from an? (engram|torch).Generator here"):
            load()
    assert torch.equal(other.generator.get_state(), before)
    other.loads(tmp_path, parts=("storage", "sampler", "writer"))


def test_set_rng_takes_it_and_the_generator_that_is_not_used_stays():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    rb.extend(torch.arange(10))
    rb.set_rng(engram.Generator(1))
    first = rb.sample()
    rb.set_rng(engram.Generator(1))
    assert torch.equal(rb.sample(), first) and rb.generator.counter == 1
    rb.set_rng(None)
    rb.sample()
