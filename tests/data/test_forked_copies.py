"""Forked children are told, as those that are spawned are, that rows in private memory do not travel."""

import os
import time
import warnings

import torch
from tensordict import TensorDict

from contracts.children import Child, alone_after_fork
from contracts.each import each
from engram.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, TensorStorage

STEPS = TensorDict({"n": torch.arange(20)}, [20])
PRIVATE = {
    "list": lambda: ListStorage(100),
    "rows": lambda: LazyTensorStorage(100),
}
USES = {
    "extend": lambda rb: rb.extend(STEPS),
    "add": lambda rb: rb.add(STEPS[0]),
    "sample": lambda rb: rb.sample(4),
    "len": lambda rb: len(rb),
    "index": lambda rb: rb[3],
    "in place": lambda rb: rb.storage.set(3, STEPS[4]),
}


def buffer(storage, written=True):
    rb = ReplayBuffer(storage=storage, batch_size=4)
    if written:
        rb.extend(STEPS)
    return rb


def counters(rb):
    return rb.storage.saved_form.sink().counters()


def told(work):
    """How often the work is warned of a copy in a forked child."""

    def listen():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
        return [str(w.message) for w in caught if "forked" in str(w.message)]

    return Child(listen).result()


@each("use", USES)
@each("storage", PRIVATE)
def test_a_child_that_uses_a_copy_is_told_and_pointed_to_shared(storage, use):
    rb = buffer(PRIVATE[storage]())
    said = told(lambda: USES[use](rb))
    assert len(said) == 1 and "shared=True" in said[0] and str(os.getpid()) in said[0]


def test_a_child_that_reads_tensors_of_the_users_own_is_told():
    rb = buffer(TensorStorage(STEPS), written=False)
    assert len(told(lambda: rb.sample(4))) == 1


def test_a_child_is_told_once_for_all_its_buffers():
    one, other = buffer(ListStorage(100)), buffer(LazyTensorStorage(100))
    assert len(told(lambda: [one.extend(STEPS), other.extend(STEPS), one.sample(), len(other)])) == 1


@each("use", ["extend", "add", "len"])
@each("make", [
    lambda: LazyTensorStorage(100), lambda: LazyTensorStorage(100, shared=True), lambda: LazyMemmapStorage(100)
])  # fmt: skip
def test_a_child_of_before_the_first_write_is_told_that_it_has_a_buffer_of_its_own(make, use):
    rb = buffer(make(), written=False)
    assert len(told(lambda: USES[use](rb))) == 1


def test_no_warning_where_rows_are_shared_between_processes(tmp_path):
    shared = [buffer(LazyTensorStorage(100, shared=True, lanes=2)), buffer(LazyMemmapStorage(100, lanes=2))]
    shared.append(buffer(LazyMemmapStorage(100, scratch_dir=tmp_path, lanes=2), written=False))
    assert told(lambda: [(rb.extend(STEPS), rb.sample(), len(rb)) for rb in shared]) == []


def test_a_child_that_makes_or_only_has_a_buffer_is_not_told():
    _had = buffer(LazyTensorStorage(100)), buffer(ListStorage(100)), buffer(LazyTensorStorage(100), written=False)
    assert told(lambda: buffer(LazyTensorStorage(100)).sample()) == []


def test_a_child_that_saves_what_it_was_given_is_not_told_and_saves_the_state_of_its_parent(tmp_path):
    rb = buffer(LazyTensorStorage(100))
    assert told(lambda: rb.dumps(tmp_path / "child")) == []
    other = buffer(LazyTensorStorage(100), written=False)
    other.loads(tmp_path / "child")
    assert counters(other) == counters(rb)


def test_whose_parent_has_ended_is_alone_with_its_copy():
    rb = buffer(LazyTensorStorage(100))
    said, saying = os.pipe()
    waited, waiting = os.pipe()
    between = os.fork()
    if between == 0:
        parent = os.getpid()
        if os.fork() == 0:
            try:
                alone_after_fork(300)
                os.close(waiting)
                os.read(waited, 1)  # until the one between is ending
                while os.getppid() == parent:  # it closes its files a moment before it has ended
                    time.sleep(0.001)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    rb.extend(STEPS)
                os.write(saying, b"%d" % len([w for w in caught if "forked" in str(w.message)]))
            finally:
                os._exit(0)
        os._exit(0)
    os.waitpid(between, 0)
    os.close(waiting)
    os.close(saying)
    assert os.read(said, 10) == b"0"


def test_a_copy_goes_on_where_the_parent_stood():
    rb = buffer(LazyTensorStorage(100))
    child = Child(lambda: [rb.extend(STEPS), counters(rb)][1]).result()
    rb.extend(STEPS)
    assert child == counters(rb)
