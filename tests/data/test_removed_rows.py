"""After `remove` no batch has a removed row, and each other row can come, whatever draws, stores and reads."""

import copy
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from contracts.each import each
from contracts.removed_rows import (
    CAPACITY,
    NEEDED,
    READINGS,
    arguments,
    check,
    filled,
    fronts,
    law,
    numbers,
    places,
    remove_chosen,
    samplers,
    steps,
)
from engram._arguments import BUILT_IN
from engram.data import (
    LazyTensorStorage,
    QueueSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sampler,
    SamplerEnsemble,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.data.replay_buffers.reading.reader import Member
from engram.envs.transforms import CatFrames

SAMPLERS, PLACES, FRONTS = samplers(), places(), fronts()
QUICK = ("LazyTensorStorage", "ListStorage", "lanes", "sample", "prefetch", "iteration")


def deep_but_quick(names):
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.deep) for name in names]


@each("sampler", SAMPLERS)
@pytest.mark.parametrize("place", deep_but_quick(PLACES))
def test_no_sampler_draws_removed_rows_of_any_storage(place, sampler, tmp_path):
    storage = PLACES[place].make(tmp_path)
    check(filled(storage, PLACES[place].envs, sampler=SAMPLERS[sampler]()), READINGS["sample"].batches)


@each("sampler", SAMPLERS)
@pytest.mark.parametrize("reading", deep_but_quick(READINGS))
def test_no_way_to_read_hands_out_removed_rows(reading, sampler, tmp_path):
    how = READINGS[reading]
    storage = (PLACES["named"] if reading == "published" else PLACES["LazyTensorStorage"]).make(tmp_path)
    rb = filled(storage, front=TensorDictReplayBuffer, sampler=SAMPLERS[sampler](), **how.arguments)
    check(rb, how.batches, how.ahead)


@each("front", FRONTS)
def test_no_front_hands_out_removed_rows(front):
    own = {name: value for name, value in NEEDED.items() if name in arguments(FRONTS[front])}
    check(filled(LazyTensorStorage(CAPACITY), front=FRONTS[front], **own), READINGS["sample"].batches)


PLAIN = [sampler for sampler in SAMPLERS if "=" not in sampler]
DIVISIBLE = [s for s in PLAIN if not s.startswith("own") and "Without" not in s]  # draws of an ensemble by shares


# ---- ensembles ----
def ensemble(sampler, front=TensorDictReplayBuffer, **settings):
    """Two buffers with rows of their own; of the second all but two rows are to be removed."""
    one = filled(LazyTensorStorage(CAPACITY), front=front, sampler=SAMPLERS[sampler]())
    other = front(storage=LazyTensorStorage(CAPACITY), sampler=SAMPLERS[sampler](), batch_size=10)
    other.extend(steps(0, 16, 3))
    return ReplayBufferEnsemble(one, other, batch_size=20, **settings), one, other


def remove_of_both(one, other):
    gone, left = remove_chosen(one)
    few = {n for n in numbers(other[:]) if n % 10 > 1}
    other.remove(lambda rows: rows["n"] % 10 > 1)
    return gone | few, left | (numbers(other[:]) - few)


ENSEMBLES = {
    "all": {"sample_from_all": True},
    "read at once": {"sample_from_all": True, "front": ReplayBuffer},
    "chosen": {"p": [0.5, 0.5], "num_buffer_sampled": 1},
    "transform": {"sample_from_all": True, "transform": lambda batch: batch},
    "ahead": {"sample_from_all": True, "prefetch": 2},
    "lists": {"sample_from_all": True, "collate_fn": list},
}


EVEN = [
    s for s in PLAIN if s not in ("FrameStackSampler", "SliceSamplerWithoutReplacement")
]  # members give equal parts


@each("sampler", EVEN)
@pytest.mark.parametrize("kind", ENSEMBLES)
def test_no_ensemble_hands_out_removed_rows(kind, sampler):
    both, one, other = ensemble(sampler, **ENSEMBLES[kind])
    both.sample()
    gone, left = remove_of_both(one, other)
    law(lambda: [both.sample()], gone, left, ahead=3)
    law(lambda: [both.sample(return_info=True)[0]], gone, left, ahead=3)
    assert both.stats().removed == len(gone)


@each("sampler", DIVISIBLE)
def test_shares_of_an_ensemble_are_without_removed_rows(sampler):
    _, one, other = ensemble(sampler)
    before = [rb.sampler.totals(rb.storage).share for rb in (one, other)]
    remove_of_both(one, other)
    after = [rb.sampler.totals(rb.storage).share for rb in (one, other)]
    assert all(now < then for now, then in zip(after, before, strict=True))
    if sampler in ("RandomSampler", "PrioritizedSampler"):
        assert after == pytest.approx([len(rb) - rb.stats().removed for rb in (one, other)])


# ---- other processes, and other buffers ----
@each("sampler", PLAIN)
@pytest.mark.parametrize("place", ["named", "environments, named"])
def test_no_observer_draws_removed_rows(place, sampler, tmp_path):
    rb = filled(PLACES[place].make(tmp_path), PLACES[place].envs)
    folder = rb.storage.scratch_dir
    observer = ReplayBuffer.open(folder, read_only=True, sampler=SAMPLERS[sampler](), batch_size=10)
    observer.sample()
    gone, left = remove_chosen(rb)
    law(lambda: [observer.sample()], gone, left)
    assert observer.stats().removed == len(gone)
    rb.storage.close()
    again = ReplayBuffer.open(folder, sampler=SAMPLERS[sampler](), batch_size=10)
    law(lambda: [again.sample()], gone, left)


@each("sampler", [s for s in EVEN if "Prioritized" not in s])  # which several workers can share
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.deep)])
def test_no_worker_of_a_data_loader_draws_removed_rows(workers, sampler):
    rb = filled(LazyTensorStorage(CAPACITY, shared=True), sampler=SAMPLERS[sampler]())
    dataset = rb.as_iterable_dataset(batches=60)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=dataset.collate)
    gone, left = remove_chosen(rb)
    law(lambda: loader, gone, left)


# ---- a sampler that comes later, or from a state ----
@each("sampler", PLAIN)
def test_no_sampler_that_comes_afterwards_draws_removed_rows(sampler):
    rb = filled(LazyTensorStorage(CAPACITY), sampler=RandomSampler())
    gone, left = remove_chosen(rb)
    rb.set_sampler(SAMPLERS[sampler]())
    law(lambda: [rb.sample()], gone, left)


@each("sampler", [s for s in PLAIN if not s.startswith("own")])
def test_no_sampler_that_is_loaded_draws_removed_rows(sampler, tmp_path):
    rb = filled(LazyTensorStorage(CAPACITY), sampler=SAMPLERS[sampler]())
    rb.sample()
    state = copy.deepcopy(rb.sampler.state_dict())
    rb.sampler.dumps(tmp_path / "sampler")
    gone, left = remove_chosen(rb)
    rb.sample()
    rb.sampler.load_state_dict(state)
    law(lambda: [rb.sample()], gone, left)
    rb.sampler.loads(tmp_path / "sampler")
    law(lambda: [rb.sample()], gone, left)


COPIES = {
    "deepcopy": lambda rb, folder: copy.deepcopy(rb),
    "pickle": lambda rb, folder: pickle.loads(pickle.dumps(rb)),
    "state": lambda rb, folder: _with_state(rb),
    "save": lambda rb, folder: _with_save(rb, folder),
}


def _empty_twin(rb):
    twin = ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY + 3), sampler=copy.deepcopy(rb.sampler), batch_size=10
    )  # sequences change where the capacity is another one
    twin.empty()
    return twin


def _with_state(rb):
    twin = _empty_twin(rb)
    twin.load_state_dict(rb.state_dict())
    return twin


def _with_save(rb, folder):
    rb.dumps(folder / "save")
    twin = _empty_twin(rb)
    twin.loads(folder / "save")
    return twin


@each("sampler", [s for s in PLAIN if not s.startswith("own")])
@pytest.mark.parametrize("way", COPIES)
def test_copies_keep_what_was_removed(way, sampler, tmp_path):
    rb = filled(LazyTensorStorage(CAPACITY), sampler=SAMPLERS[sampler]())
    rb.sample()
    gone, left = remove_chosen(rb)
    twin = COPIES[way](rb, tmp_path)
    assert twin.stats().removed == len(gone)
    law(lambda: [twin.sample()], gone, left)
    law(lambda: [rb.sample()], gone, left)


# ---- what else decides what a batch has ----
def test_no_stack_of_frames_has_a_removed_row():
    frames = CatFrames(N=3, dim=-1, in_keys=["observation"], out_keys=["stack"])
    transform, sampler = frames.make_rb_transform_and_sampler(batch_size=10)
    rb = filled(LazyTensorStorage(CAPACITY), front=TensorDictReplayBuffer, sampler=sampler, transform=transform)
    gone, left = remove_chosen(rb)
    cut = {
        n for n in left if {n - 1, n - 2} & gone & {m for m in gone if m // 8 == n // 8}
    }  # their stacks have removed frames
    seen = set()
    for _ in range(100):
        batch = rb.sample()
        assert not {int(n) for n in batch["stack"][:, ::3].flatten().tolist()} & gone
        seen |= numbers(batch)
    assert seen == left - cut


@each("sampler", [s for s in PLAIN if not s.startswith("own")])
def test_a_removed_row_is_the_first_that_a_better_one_takes_the_place_of(sampler):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(8), writer=TensorDictMaxValueWriter(), sampler=SAMPLERS[sampler](), batch_size=10
    )
    rb.extend(steps(0, 8))
    rb.remove(torch.tensor([5]))  # the third best
    index = rb.add(steps(-500, -499)[0])  # lower than all that are stored
    assert index == 5 and rb.stats().removed == 0
    if "Slice" not in sampler and "Sequence" not in sampler and "Stack" not in sampler:
        law(lambda: [rb.sample()], {1005}, numbers(rb[:]))
    assert rb.add(steps(-600, -599)[0]) in (None, -1)


def test_a_new_writer_of_the_best_rows_takes_the_place_of_a_removed_one_first():
    storage = LazyTensorStorage(8)
    old, new = (TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter()) for _ in range(2))
    old.extend(steps(0, 8))
    old.remove(torch.tensor([5]))
    assert new.add(steps(-500, -499)[0]) == 5 and new.stats().removed == 0


# ---- the law itself ----
def test_the_law_finds_a_path_that_looks_at_no_bit(monkeypatch):
    rb = filled(LazyTensorStorage(CAPACITY), sampler=SAMPLERS["own"]())
    monkeypatch.setattr(Member, "removed", lambda self, slots: None)
    with pytest.raises(AssertionError, match="were removed"):
        check(rb, READINGS["sample"].batches)


def test_the_law_finds_a_row_that_never_comes():
    with pytest.raises(AssertionError, match="never come"):
        law(lambda: [{"n": torch.tensor([1])}], set(), {1, 2})


def test_a_sampler_that_is_registered_later_is_looked_at():
    class Later(RandomSampler, built_in=True):
        pass

    try:
        assert "Later" in samplers()
        check(filled(LazyTensorStorage(CAPACITY), sampler=samplers()["Later"]()), READINGS["sample"].batches)
    finally:
        BUILT_IN.discard(Later)


def test_every_registered_sampler_can_be_made_here():
    made = {type(make()) for make in SAMPLERS.values()}
    known = {cls for cls in BUILT_IN if issubclass(cls, Sampler) and not cls.__name__.startswith("_")}
    known -= {SamplerEnsemble, QueueSampler}
    assert known <= made, "say in NEEDED what their arguments are"


# ---- a row that goes between the draw and the read ----
class RemovesWhatItDraws:
    """Its rows are removed before they are read, and their places written again."""

    def __init__(self):
        self.rb, self.left = None, 3

    def sample(self, storage, batch_size):
        index = torch.arange(batch_size) % CAPACITY
        if self.left:
            self.left -= 1
            self.rb.remove(index[:2])
        return index, {}


def test_what_is_removed_after_the_draw_is_drawn_again():
    sampler = RemovesWhatItDraws()
    rb = filled(LazyTensorStorage(CAPACITY), sampler=sampler)
    sampler.rb = rb
    with pytest.raises(RuntimeError, match="goes on drawing rows that were removed, such as slot 0"):
        rb.sample()


def test_a_bit_is_looked_at_before_the_rows_are_read(monkeypatch):
    """One that is cleared meanwhile was that of the row that was drawn."""
    rb = filled(LazyTensorStorage(CAPACITY), sampler=SAMPLERS["own, fixed slots"](), collate_fn=lambda batch: batch)
    rb.remove(torch.tensor([0]))
    read = type(rb.storage).read

    def read_beside_a_writer(storage, slots, *rest):
        found = read(storage, slots, *rest)
        if rb.stats().removed:
            rb.extend(steps(100, 100 + CAPACITY))  # every place has another row by now
        return found

    before = numbers(rb[0:1])
    monkeypatch.setattr(type(rb.storage), "read", read_beside_a_writer)
    assert not numbers(rb.sample()) & before
