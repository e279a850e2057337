"""What a buffer answers to calls that other libraries' buffers take."""

from __future__ import annotations

import numpy as np
import pytest

from contracts.each import each
from engram.data import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, TensorDictReplayBuffer

VALUES = np.zeros((1, 4)), np.ones((1, 4)), np.zeros(1), np.zeros(1), np.zeros(1), [{}]


@each("method", ["add", "extend"])
@each("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_the_entries_of_a_step_one_by_one_are_answered_by_the_adapter_and_by_the_dict_of_them(kind, method):
    rb = kind(storage=LazyTensorStorage(10))
    with pytest.raises(TypeError, match=rf'{method}\(\) takes .* got 6 values.*"next": .* engram\.compat\.sb3'):
        getattr(rb, method)(*VALUES)
    assert len(rb) == 0


def test_a_flush_of_an_ensemble_flushes_its_members(monkeypatch):
    members = [ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2)]
    flushed = []
    for n, rb in enumerate(members):
        monkeypatch.setattr(rb.storage, "flush", lambda n=n: flushed.append(n))
    ReplayBufferEnsemble(*members, batch_size=4).flush()
    assert flushed == [0, 1]
