"""Save hooks with `shift` and `is_full` are told where the oldest row is, whatever is saved and in which form."""

import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    ReplayBuffer,
    TensorStorageCheckpointer,
)


class Hook:
    shift = is_full = None

    def __init__(self):
        self.calls = []

    def __call__(self, data):
        self.calls.append((self.shift, self.is_full))
        return data


class Half:
    is_full = None

    def __call__(self, data):
        return data


def steps(n):
    return TensorDict(
        {"x": torch.arange(n), "next": {"x": torch.arange(1, n + 1), "done": torch.zeros(n, 1).bool()}}, [n]
    )


@each("n", [3, 10, 13, 25])
@each("storage, checkpointer", [
    (LazyTensorStorage, TensorStorageCheckpointer), (LazyMemmapStorage, FlatStorageCheckpointer),
    (LazyTensorStorage, NestedStorageCheckpointer), (LazyTensorStorage, H5StorageCheckpointer), (ListStorage, None),
])  # fmt: skip
def test_hooks_are_told_the_cursor_first(storage, checkpointer, n, tmp_path):
    rb = ReplayBuffer(storage=storage(10), checkpointer=None if checkpointer is None else checkpointer())
    whole, half, plain = Hook(), Half(), lambda data: data
    for hook in (whole, half, plain):
        rb.register_save_hook(hook)
    rb.extend(steps(n))
    rb.dumps(tmp_path)
    expected = (rb.writer._cursor, rb.storage._is_full)
    assert expected == (n % 10, n >= 10) and set(whole.calls) == {expected} and half.is_full == expected[1]
    assert not hasattr(half, "shift") and not hasattr(plain, "shift")
    rb.extend(steps(1))
    rb.dumps(tmp_path)
    assert (whole.shift, whole.is_full) == (rb.writer._cursor, rb.storage._is_full) == ((n + 1) % 10, n >= 10)


def test_a_list_without_limit_is_never_full(tmp_path):
    rb, hook = ReplayBuffer(storage=ListStorage()), Hook()
    rb.register_save_hook(hook)
    rb.extend(list(range(7)))
    rb.dumps(tmp_path)
    assert (hook.shift, hook.is_full) == (7, False)
