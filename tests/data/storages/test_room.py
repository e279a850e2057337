"""A TensorStorage around a TensorDict without entries, which the first write fills; lists that do not stack."""

import copy

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer, TensorStorage
from engram.testing import StorageContract, env_steps, numbers, steps


class TestRoom(StorageContract):
    def make(self, capacity, path):
        return TensorStorage(TensorDict({}, [capacity]))


def test_environments_are_those_of_the_room():
    rb = ReplayBuffer(storage=TensorStorage(TensorDict({}, [5, 2]), ndim=2))
    assert (len(rb), rb.storage.max_size) == (0, 10)
    with pytest.raises(ValueError, match=r"environments of shape \[3\], this storage \[2\]"):
        rb.extend(env_steps(3, 0, 2))
    assert not rb.storage.initialized
    rb.extend(env_steps(2, 0, 4))
    assert numbers(copy.deepcopy(rb)[:]) == numbers(rb[:]) == [[0, 1, 2, 3], [1000, 1001, 1002, 1003]]


def test_what_is_no_room_is_refused():
    with pytest.raises(ValueError, match="non-null"):
        TensorStorage(None)
    for room in (TensorDict({}, []), TensorDict({}, [0])):
        with pytest.raises(ValueError, match="no room"):
            TensorStorage(room)
    for room in (TensorDict({}, [4]), torch.zeros(4)):
        with pytest.raises(ValueError, match="max_size=5"):
            TensorStorage(room, max_size=5)


@each(
    "items",
    [
        [TensorDict({"a": torch.zeros(3)}, []), TensorDict({"a": torch.zeros(4)}, [])],
        [{"a": torch.zeros(3)}, {"a": torch.zeros(4)}],
        [{"a": torch.zeros(3)}, {"a": torch.zeros(3).double()}],
        [{"a": torch.zeros(3)}, {"b": torch.zeros(3)}],
        [torch.zeros(3), torch.zeros(4)],
    ],
)
def test_a_list_that_does_not_stack_is_a_runtime_error_that_names_the_item(items):
    for cls in (ReplayBuffer, TensorDictReplayBuffer):
        rb = cls(storage=LazyTensorStorage(10))
        with pytest.raises(RuntimeError, match=r"does not stack.*item 1"):
            rb.extend(items)
        assert len(rb) == 0
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(steps(0, 2))
    with pytest.raises(RuntimeError, match=r"does not stack.*item 3"):
        rb.extend([steps(0, 1)[0]] * 3 + [TensorDict({"n": torch.zeros(2)}, [])])
    assert numbers(rb[:]) == [0, 1]
