"""The same keys in another order are the same rows."""

import pytest
import torch
from tensordict import TensorDict

from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorStorage


def steps(keys: str) -> TensorDict:
    values = {"a": torch.arange(4), "b": torch.arange(4) + 100, "c": torch.arange(4.0), "d": torch.ones(4, 2).half()}
    return TensorDict({key: values[key] for key in keys}, [4])


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage, lambda n: TensorStorage(steps("dbca"))])
def test_a_checkpoint_comes_back_into_a_buffer_that_knows_its_keys_in_another_order(tmp_path, make):
    saved = ReplayBuffer(storage=LazyTensorStorage(4))
    saved.extend(steps("abcd"))
    saved.dumps(tmp_path)
    loaded = ReplayBuffer(storage=make(4))
    if not len(loaded):
        loaded.extend(steps("dbca"))
    loaded.loads(tmp_path)
    assert all((loaded[:][key] == saved[:][key]).all() for key in "abcd")


def test_a_state_in_memory_does_too():
    saved, loaded = ReplayBuffer(storage=LazyTensorStorage(4)), ReplayBuffer(storage=LazyTensorStorage(4))
    saved.extend(steps("abcd"))
    loaded.extend(steps("cdba"))
    loaded.load_state_dict(saved.state_dict())
    assert all((loaded[:][key] == saved[:][key]).all() for key in "abcd")
