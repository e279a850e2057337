"""Buffers whose parts are made at their first use: `delayed_init` and `transform_factory`."""

import copy
import functools
import multiprocessing
import os
import pickle
import threading
import warnings

import pytest

from contracts import children
from contracts.each import each
from engram.data import (
    FlatStorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.envs import Compose, RewardScaling
from engram.testing import numbers, steps

pytestmark = pytest.mark.usefixtures("lock_order")


class Made:
    """A factory that counts its calls."""

    def __init__(self, make):
        self.make, self.calls = make, 0

    def __call__(self):
        self.calls += 1
        return self.make()


def ten_steps():
    return LazyTensorStorage(10)


def delayed(cls=ReplayBuffer, storage=ten_steps, **arguments):
    return cls(storage=storage, delayed_init=True, **arguments)


@each(
    ("cls", "arguments"),
    [
        (ReplayBuffer, {}),
        (TensorDictReplayBuffer, {}),
        (PrioritizedReplayBuffer, {"alpha": 0.7, "beta": 0.5}),
        (TensorDictPrioritizedReplayBuffer, {"alpha": 0.7, "beta": 0.5}),
    ],
)
def test_parts_are_made_once_at_the_first_use(cls, arguments):
    storage, writer = Made(ten_steps), Made(RoundRobinWriter)
    rb = delayed(cls, storage, writer=writer, batch_size=4, **arguments)
    assert isinstance(rb, cls) and not rb.initialized and repr(rb) == f"{cls.__name__}(delayed_init=True)"
    assert storage.calls == writer.calls == 0
    rb.extend(steps(0, 3))
    assert type(rb) is cls and rb.initialized and numbers(rb[:]) == [0, 1, 2] and len(rb.sample()) == 4
    assert storage.calls == writer.calls == 1


@each(
    "use",
    [
        len,
        lambda rb: rb.storage,
        lambda rb: rb._storage,
        lambda rb: rb.append_transform(lambda batch: batch),
        lambda rb: setattr(rb, "_transform", Compose()),
        pickle.dumps,
        copy.deepcopy,
    ],
)
def test_any_use_makes_the_parts(use):
    rb = delayed()
    use(rb)
    assert rb.initialized


def test_copies_have_parts_and_rows():
    for copied in (pickle.loads(pickle.dumps(delayed())), copy.deepcopy(delayed())):
        assert type(copied) is ReplayBuffer and copied.initialized
        copied.extend(steps(0, 3))
        assert numbers(copied[:]) == [0, 1, 2]


def test_a_transform_that_is_set_before_the_first_use_stays():
    rb = delayed()
    rb._transform = Compose(RewardScaling(0.0, 2.0))
    assert len(rb.transform.transforms) == 1


def test_a_transform_factory_delays_the_parts_and_makes_the_transform():
    factory = Made(lambda: Compose(RewardScaling(0.0, 2.0)))
    rb = ReplayBuffer(storage=ten_steps, transform_factory=factory)
    assert not rb.initialized and factory.calls == 0
    assert len(rb.transform.transforms) == 1 and factory.calls == 1
    assert ReplayBuffer(storage=ten_steps, transform_factory=factory, delayed_init=False).initialized
    with pytest.raises(TypeError, match="leave one of them out"):
        ReplayBuffer(transform=Compose(), transform_factory=Compose)
    with pytest.raises(TypeError, match="got a int"):
        ReplayBuffer(transform_factory=3)


def test_a_checkpointer_may_be_a_factory():
    rb = ReplayBuffer(storage=ten_steps, checkpointer=FlatStorageCheckpointer)
    assert isinstance(rb.storage.checkpointer, FlatStorageCheckpointer)


def test_parts_that_do_not_fit_are_an_error_at_each_use_until_they_can_be_made():
    fits = []
    rb = delayed(storage=lambda: LazyTensorStorage(10) if fits else 3)
    for _ in range(2):
        with pytest.raises(TypeError, match="storage must be a storage"):
            rb.extend(steps(0, 3))
        assert not rb.initialized
    fits.append(True)
    rb.extend(steps(0, 3))
    assert numbers(rb[:]) == [0, 1, 2]


class NamedBuffer(TensorDictReplayBuffer):
    def __init__(self, name):
        super().__init__(storage=ten_steps, delayed_init=True)
        self.name = name

    def rows(self):
        return len(self)


def test_a_child_may_set_attributes_before_its_parts_are_made():
    rb = NamedBuffer("train")
    assert rb.__dict__["name"] == "train" and not rb.initialized
    assert rb.rows() == 0 and type(rb) is NamedBuffer and rb.name == "train"


def test_an_ensemble_may_be_delayed():
    rb = ReplayBufferEnsemble(delayed(), delayed(), delayed_init=True, batch_size=4)
    assert not rb.initialized
    for member in (rb[0], rb[1]):
        member.extend(steps(0, 3))
    assert rb.sample().shape == (2, 2)


def test_threads_that_use_it_first_at_once_get_the_same_parts():
    all_here, storage = threading.Barrier(4), Made(lambda: LazyTensorStorage(100))
    rb = delayed(storage=storage)

    def write():
        all_here.wait()
        rb.extend(steps(0, 3))

    writers = [threading.Thread(target=write) for _ in range(4)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    assert storage.calls == 1 and len(rb) == 12


def write_three(rb):
    rb.extend(steps(0, 3))


@pytest.mark.long  # tests/processes/test_shared_init.py has it without the delay
def test_a_process_that_it_is_sent_to_writes_the_same_rows():
    rb = delayed(storage=functools.partial(LazyTensorStorage, 10, shared_init=True), sampler=RandomSampler)
    process = multiprocessing.get_context("spawn").Process(target=write_three, args=(rb,))
    process.start()
    process.join()
    assert rb.initialized and numbers(rb[:]) == [0, 1, 2]


@pytest.mark.parametrize(("storage", "warns"), [("memory", True), ("shared", True), ("folder", False)])
def test_a_child_is_warned_that_it_makes_parts_which_its_parent_does_not_see(storage, warns, tmp_path):
    def make():
        if storage == "folder":
            return LazyMemmapStorage(10, scratch_dir=tmp_path / "store", existsok=True)
        return LazyTensorStorage(10, shared_init=storage == "shared")

    rb = delayed(storage=make)

    def work():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rb.extend(steps(0, 3))
        return ["uses a copy of its replay buffer" in str(one.message) for one in caught]

    assert children.Child(work).result() == [True] * warns
    assert len(rb) == (0 if warns else 3)


def test_a_child_forked_while_a_thread_makes_the_parts_makes_its_own():
    begun, go = threading.Event(), threading.Event()

    def transform():
        begun.set()
        assert go.wait(60)
        return RewardScaling(0.0, 1.0)

    rb = TensorDictReplayBuffer(storage=lambda: LazyTensorStorage(10), transform_factory=transform, batch_size=2)
    thread = threading.Thread(target=lambda: rb.extend(steps(0, 4)))
    thread.start()
    assert begun.wait(60)

    def work():
        go.set()
        rb.extend(steps(0, 3))
        assert len(rb) == 3

    pid = children.fork(work, seconds=8)
    go.set()
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0
    assert len(rb) == 4
