"""What clients rely on when several processes write to one buffer."""

import multiprocessing
import warnings
from collections.abc import Callable

import torch
from tensordict import TensorDict

from clients.packages import Package, sentence
from contracts.waiting import NEVER


def _in_a_child(work: Callable[[], object]) -> None:
    """Runs `work` in a forked process."""

    def run() -> None:
        torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            work()

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(NEVER)
    assert child.exitcode == 0


def _steps(first: int, n: int) -> TensorDict:
    """Steps of one long trajectory."""
    done = torch.zeros(n, 1, dtype=torch.bool)
    return TensorDict({"n": torch.arange(first, first + n), "next": {"done": done}}, [n])


@sentence("Parent and child that both `extend` one mapped store, made as usual, interleave in one ring")
def parent_and_child_write_one_mapped_ring(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyMemmapStorage(100), shared=True)
    rb.extend(_steps(0, 3))
    _in_a_child(lambda: rb.extend(_steps(100, 4)))
    index = rb.extend(_steps(3, 2))
    assert torch.as_tensor(index).tolist() == [7, 8] and len(rb) == 9
    assert rb[:]["n"].tolist() == [0, 1, 2, 100, 101, 102, 103, 3, 4]


@sentence(
    "Parent and child that both `extend` one store in shared memory interleave in one ring",
    not_in_torchrl="its tensors are private unless the storage is made with shared_init=True",
)
def parent_and_child_write_one_shared_ring(rl: Package) -> None:
    rb = rl.data.TensorDictReplayBuffer(storage=rl.data.LazyTensorStorage(20), shared=True, batch_size=16)
    rb.extend(_steps(0, 8))
    _in_a_child(lambda: [rb.extend(_steps(100 + 8 * k, 8)) for k in range(2)])
    rb.extend(_steps(8, 2))
    assert len(rb) == 20  # 26 were written to 20 places: the oldest six have gone
    assert sorted(rb[:]["n"].tolist()) == [6, 7, 8, 9, *range(100, 116)]
    batch = rb.sample()
    assert torch.equal(rb[batch["index"]]["n"], batch["n"])


@sentence(
    "No slice goes on from one process's `extend` to another's, whatever flags and ids say",
    not_in_torchrl="its slices go by flags and ids only",
)
def no_slice_has_steps_of_two_processes(rl: Package) -> None:
    sampler = rl.data.SliceSampler(slice_len=3, end_key=("next", "done"), traj_key=None)
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyMemmapStorage(100), sampler=sampler, batch_size=120, shared=True)
    rb.extend(_steps(0, 5))
    _in_a_child(lambda: rb.extend(_steps(100, 5)))
    rb.extend(_steps(5, 5))
    n = rb.sample()["n"].reshape(-1, 3)
    assert torch.equal(n[:, 1:], n[:, :-1] + 1)


@sentence(
    "The second process that writes is told, once, what slices longer than one `extend` need",
    not_in_torchrl="it has one ring only, and says nothing",
)
def the_second_writer_is_warned(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyMemmapStorage(100), shared=True)
    rb.extend(_steps(0, 3))

    def write_twice() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rb.extend(_steps(3, 3))
            rb.extend(_steps(6, 3))
        messages = [str(warning.message) for warning in caught]
        assert sum("slices longer than one extend" in message and "lanes=n" in message for message in messages) == 1

    _in_a_child(write_twice)


@sentence(
    "With `lanes=n` any number of processes write side by side, `max_size` steps are kept, and the oldest go first",
    not_in_torchrl="its storages take no `lanes`",
)
def lanes_together_are_one_ring(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyMemmapStorage(400, lanes=2))
    rb.extend(_steps(0, 70))
    for k in range(1, 12):
        _in_a_child(lambda k=k: rb.extend(_steps(70 * k, 70)))
    kept = set(rb[:]["n"].tolist())
    assert len(rb) == len(kept) == 400 and max(kept) == 839
    assert min(kept) >= 840 - 400 - 2 * 100  # as far as the lengths of lanes, a quarter of it here, allow


@sentence(
    "`lanes=1` allows one process to write, and a second one is told", not_in_torchrl="its storages take no `lanes`"
)
def one_lane_has_one_writer(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyMemmapStorage(100, lanes=1))
    rb.extend(_steps(0, 3))

    def refused() -> None:
        try:
            rb.extend(_steps(3, 3))
        except RuntimeError as error:
            assert "lanes" in str(error)
        else:
            raise AssertionError("two processes write to one lane")

    _in_a_child(refused)


@sentence("`shared_init=True`: processes that got a storage before its first write share it; the first writer makes it")
def the_first_writer_makes_the_storage(rl: Package) -> None:
    for kind in (rl.data.LazyTensorStorage, rl.data.LazyMemmapStorage):
        rb = rl.data.ReplayBuffer(storage=kind(20, shared_init=True), shared=True, batch_size=4)
        for k in range(2):
            _in_a_child(lambda k=k, rb=rb: rb.extend(_steps(10 * k, 3)))
        assert len(rb) == 6 and rb[:]["n"].tolist() == [0, 1, 2, 10, 11, 12]
        rb.extend(_steps(50, 2))
        assert len(rb) == 8 and set(rb.sample()["n"].tolist()) <= {0, 1, 2, 10, 11, 12, 50, 51}
