"""How many Python functions a save and a load call: each fact is looked up once, and JSON is parsed once."""

from __future__ import annotations

import pytest

from contracts.call_trace import Calls, calls_of, steps
from engram.data import LazyTensorStorage, TensorDictReplayBuffer
from engram.store.layout import RowLayout


def buffer(n: int = 0) -> TensorDictReplayBuffer:
    made = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
    if n:
        made.extend(steps(n))
    return made


def listing(calls: Calls) -> str:
    return f"{sum(calls.values())} calls, most of them {calls.most_common(25)}"


def test_a_save_calls_few_python_functions(tmp_path):
    rb = buffer(64)
    rb.dumps(tmp_path)
    rb.dumps(tmp_path)
    calls = calls_of(lambda: rb.dumps(tmp_path))
    # 40 of them describe the buffer and its parts, from which `load` makes it anew.
    assert 50 < sum(calls.values()) < 300, listing(calls)


@pytest.mark.parametrize("held", [0, 64], ids=["an empty buffer", "a buffer with rows"])
def test_a_load_calls_few_python_functions(tmp_path, held):
    buffer(64).dumps(tmp_path)
    buffer(held).loads(tmp_path)
    rb = buffer(held)
    if held:
        rb.loads(tmp_path)
    calls = calls_of(lambda: rb.loads(tmp_path))
    # 100 of them look at the kinds of the values that were read.
    assert 50 < sum(calls.values()) < 700, listing(calls)


@pytest.mark.parametrize("held", [0, 64], ids=["an empty buffer", "a buffer with rows"])
def test_a_load_parses_the_layout_at_most_once(tmp_path, held, monkeypatch):
    buffer(64).dumps(tmp_path)
    parsed = []
    original = RowLayout.from_json.__func__
    monkeypatch.setattr(
        RowLayout, "from_json", classmethod(lambda cls, state: parsed.append(0) or original(cls, state))
    )
    buffer(held).loads(tmp_path)
    assert len(parsed) <= 1
