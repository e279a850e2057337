"""`add` and `extend` check and append in one native call; the two calls that it stands for are the oracle."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from contracts.ted_rings import ted_steps
from crash.buffers import _flat
from engram import _native
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictReplayBuffer,
)

CAPACITY = 50


class Twins:
    """Two buffers of the same parts, one of which checks and appends in two calls."""

    def __init__(self, kind: type[ReplayBuffer], storage: Any, **parts: Any) -> None:
        self.fast, self.slow = kind(storage=storage(), **parts), kind(storage=storage(), **parts)
        self.slow._parts.batch_writer.pushes = False

    def write(self, name: str, data: Any, *copied: Any) -> Any:
        """What `add` or `extend` returned, or the error; the same of both."""
        outcomes = [_outcome(getattr(rb, name), data) for rb in (self.fast, self.slow)]
        assert outcomes[0] == outcomes[1], (outcomes, data)
        self.check()
        return outcomes[0]

    def check(self) -> None:
        states = []
        for rb in (self.fast, self.slow):
            lanes = rb.storage.lanes
            rows = _flat(rb[:]) if len(rb) else b""
            states.append((len(rb), rb.write_count, rows, lanes.saved_states()))
        assert states[0] == states[1]


def _outcome(write: Any, data: Any) -> Any:
    try:
        index = write(data)
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        return type(error), str(error)
    return (type(index), index.tolist(), index.dtype) if isinstance(index, torch.Tensor) else (type(index), index)


def numpy_of(data: Any) -> Any:
    return {key: numpy_of(value) if hasattr(value, "keys") else value.numpy() for key, value in data.items()}


def as_items(data: TensorDict, form: str) -> list[Any]:
    items = list(data.unbind(0))
    if form == "dict":
        return [item.to_dict() for item in items]
    if form == "numpy":
        return [numpy_of(item) for item in items]
    return [item.clone() for item in items]


class Steps:
    """Batches of steps that go on where the last one ended, or begin anew."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.at = rng, 0
        self.runs = [ted_steps(150, salt=[salt], length=7.0) for salt in range(2)]

    def take(self, n: int) -> TensorDict:
        if self.rng.random() < 0.2 or self.at + n > 150:
            self.runs, self.at = self.runs[::-1], 0
        self.at += n
        return self.runs[0][self.at - n : self.at]


def bad(rng: random.Random, batch: TensorDict) -> Any:
    """A batch that does not fit."""
    key = rng.choice([k for k in batch.keys() if k != "next"])
    change = rng.randrange(5)
    if change == 0:
        return batch.exclude(key)
    if change == 1:
        return batch.clone().set("new", torch.zeros(batch.shape))
    if change == 2:
        return {**batch.to_dict(), key: batch[key].to(torch.float16)}
    if change == 3:
        return {**batch.to_dict(), key: "text"}
    return batch[:0]


STORAGES = {
    "memory": lambda: LazyTensorStorage(CAPACITY),
    "shared": lambda: LazyTensorStorage(CAPACITY, shared=True),
    "mapped": lambda: LazyMemmapStorage(CAPACITY),
}


@each("kind", [ReplayBuffer, TensorDictReplayBuffer])
@each("storage", STORAGES)
@each("form", ["td", "dict", "numpy"])
def test_random_writes_are_those_of_the_two_calls(kind: Any, storage: str, form: str) -> None:
    rng = random.Random(f"{kind.__name__} {storage} {form}")
    twins, steps = Twins(kind, STORAGES[storage]), Steps(rng)
    for _ in range(12):
        batch = steps.take(rng.choice([1, 2, 5, 30, 60]))
        data = batch if form == "td" else batch.to_dict() if form == "dict" else numpy_of(batch)
        turn = rng.randrange(6)
        if turn == 0:
            for item in as_items(batch[:3], form):
                twins.write("add", item)
        elif turn == 1:
            twins.write("extend", as_items(batch, form))
        elif turn == 2:
            twins.write("extend", bad(rng, batch))
        elif turn == 3:
            items = as_items(batch, form)
            items[rng.randrange(len(items))] = bad(rng, batch)
            twins.write("extend", items)
        else:
            twins.write("extend", data)


@each("change", ["missing", "new", "missing inside", "new inside", "another for one that is missing"])
@each("form", ["td", "dict"])
def test_other_keys_than_those_of_the_layout_are_refused(change: str, form: str) -> None:
    def step() -> dict[str, Any]:
        return {"a": torch.zeros(1), "b": {"c": torch.zeros(1), "d": torch.zeros(1)}}

    def shaped(data: dict[str, Any]) -> Any:
        return TensorDict(data, [1]) if form == "td" else data

    twins, data = Twins(TensorDictReplayBuffer, lambda: LazyTensorStorage(CAPACITY)), step()
    twins.write("extend", shaped(step()))
    inner = data["b"] if "inside" in change else data
    if "missing" in change:
        del inner["a" if inner is data else "c"]
    if "missing" not in change or "another" in change:
        inner["e"] = torch.zeros(1)
    assert twins.write("extend", shaped(data))[0] is ValueError
    assert twins.write("extend", [shaped(step())[0] if form == "td" else step(), shaped(data)])[0] is RuntimeError


@each("kind", [ReplayBuffer, TensorDictReplayBuffer])
@each("time_dim", [0, 1])
def test_environments_by_time(kind: Any, time_dim: int) -> None:
    twins = Twins(kind, lambda: LazyTensorStorage(30, ndim=2), dim_extend=time_dim)
    for n in (1, 4, 12, 2):
        shape = (n, 3) if time_dim == 0 else (3, n)
        data = TensorDict({"x": torch.randn(*shape, 2), "n": torch.arange(3 * n).view(shape)}, shape)
        twins.write("extend", data)
        twins.write("extend", numpy_of(data))
        step = data[0] if time_dim == 0 else data[:, 0]
        twins.write("add", step.clone())
        twins.write("extend", [step, step + 1])
        twins.write("extend", data[:, :2] if time_dim == 0 else data[:2])  # other environments
    assert len(twins.fast) == 30


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_whole_trajectories_as_items(kind: Any) -> None:
    twins = Twins(kind, lambda: LazyTensorStorage(9))
    with pytest.warns(UserWarning, match="ndim=2"):
        twins.write("extend", TensorDict({"n": torch.arange(12).view(3, 4)}, [3, 4]))
    for n in (2, 8):
        data = TensorDict({"n": torch.arange(4 * n).view(n, 4)}, [n, 4])
        twins.write("extend", data)
        twins.write("extend", list(data.unbind(0)))
        twins.write("add", data[0].clone())
        twins.write("extend", [data[0], TensorDict({"n": data["n"][1]}, [])])  # another batch size: does not stack


NUMBERS = [1, -1, 1 << 40, 1 << 80, True, 1.5, 1e300, float("nan"), 2j, np.float32(2), np.int64(3), np.float64(0.1)]


@each("dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.bool])
@each("default", [torch.float32, torch.float64, torch.float16])
def test_numbers_in_items_are_of_the_dtype_that_tensors_of_them_have(dtype: torch.dtype, default: torch.dtype) -> None:
    torch.set_default_dtype(default)
    try:
        twins = Twins(ReplayBuffer, lambda: LazyTensorStorage(CAPACITY))
        twins.write("extend", {"a": torch.zeros(2, dtype=dtype)})
        for number in NUMBERS:
            twins.write("extend", [{"a": number}])
            twins.write("extend", [{"a": torch.zeros((), dtype=dtype)}, {"a": number}])
            twins.write("extend", [{"a": number}, {"a": 1}])
            twins.write("add", {"a": number})
    finally:
        torch.set_default_dtype(torch.float32)


def awkward() -> dict[str, Any]:
    """Columns of three steps that are no plain memory, or no plain tensors."""
    complex_ = torch.randn(3, 2, dtype=torch.complex64)
    return {
        "transposed": torch.randn(2, 3).t(),
        "flipped": np.random.default_rng(0).random((3, 2), dtype=np.float32)[::-1, ::-1],
        "every second": torch.randn(6, 4)[::2, ::2],
        "expanded": torch.randn(2).expand(3, 2),
        "negative": complex_.conj().imag,
        "gradient": torch.randn(3, 2, requires_grad=True),
        "computed": torch.randn(3, 2, requires_grad=True) * 2,
        "parameter": torch.nn.Parameter(torch.randn(3, 2)),
        "a list": [[1.0, 2.0]] * 3,
        "masked": np.ma.masked_array(np.zeros((3, 2), np.float32), True),
        "big endian": np.ones((3, 2), ">f4"),
        "meta": torch.zeros(3, 2, device="meta"),
        "sparse": torch.zeros(3, 2).to_sparse(),
    }


@each("form", awkward())
def test_awkward_leaves_are_stored_or_refused_as_ever(form: str) -> None:
    with torch.inference_mode(form == "transposed"):
        value = awkward()[form]
    twins = Twins(TensorDictReplayBuffer, lambda: LazyTensorStorage(CAPACITY))
    twins.write("extend", {"a": torch.zeros(3, 2)})
    twins.write("extend", {"a": value})
    twins.write("add", {"a": value[0]})
    twins.write("extend", [{"a": part} for part in value])
    twins.write("extend", [{"a": torch.zeros(2)}, {"a": value[1]}, {"a": np.zeros(2, np.float32)}])


def test_priorities_that_come_with_the_data_take_the_other_way() -> None:
    parts = {"sampler": PrioritizedSampler(CAPACITY, 1.0, 1.0, 0.0), "batch_size": 4}
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), **parts)
    for first in (1.0, 11.0):
        data = TensorDict({"n": torch.arange(10), "td_error": torch.arange(first, first + 10)}, [10])
        rb.extend(data)
        rb.extend(list(data.unbind(0)))
    tree = [rb._sampler._sum_tree[i] for i in range(40)]
    assert tree == [float(i) for i in [*range(1, 11), *range(1, 11), *range(11, 21), *range(11, 21)]]


def test_rows_store_the_index_that_they_get_round_the_ring_and_in_any_place_of_a_batch() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(7))
    rb.extend({"n": torch.arange(2)})
    for data in ({"n": torch.arange(6)}, {"n": torch.arange(3), "index": "anything"}, [{"n": torch.tensor(5)}] * 4):
        index = rb.extend(data)
        assert torch.equal(rb[index]["index"], index)
    assert rb.add({"n": torch.tensor(3)}) == 1 and int(rb[1]["index"]) == 1


class Writes:
    """Garbage that writes a row when it is collected."""

    def __init__(self, rb: ReplayBuffer) -> None:
        self.rb, self.itself = rb, self

    def __del__(self) -> None:
        self.rb.add({"n": torch.tensor(-1)})


def test_an_append_by_a_finaliser_in_the_middle_of_another_one_takes_rows_of_its_own() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5000))
    rb.extend({"n": torch.arange(2)})
    thresholds, inside = gc.get_threshold(), 0
    try:
        for k in range(60):
            Writes(rb)
            gc.set_threshold(gc.get_count()[0] + 1 + k % 20)
            before, index = rb.write_count, rb.extend({"n": torch.arange(100 * k, 100 * k + 10)})
            inside += rb.write_count > before + 10
            gc.set_threshold(0)
            rows = rb[index]
            assert torch.equal(rows["index"], index) and rows["n"].tolist() == list(range(100 * k, 100 * k + 10))
    finally:
        gc.set_threshold(*thresholds)
    assert inside and torch.equal(rb[:]["index"], torch.arange(len(rb)))


def test_a_list_that_shrinks_while_it_is_looked_at_is_refused_or_written_whole() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    rb.extend({"n": torch.zeros(2)})
    items: list[Any] = []

    class Key(str):
        __slots__ = ()

        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            del items[2:]
            return str(self) == other

    items += [{"n": torch.tensor(1.0)}, {Key("n"): torch.tensor(2.0)}, {"n": torch.tensor(3.0)}]
    items.append({"n": torch.tensor(4.0)})
    rb.extend(items)
    assert rb[2:]["n"].tolist() in ([1.0, 2.0], [1.0, 2.0, 3.0, 4.0])


class Recorded(LazyTensorStorage):
    def check(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = [*getattr(self, "seen", []), "check"]
        return super().check(*args, **kwargs)


class Noting(RoundRobinWriter):
    def write(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = [*getattr(self, "seen", []), "write"]
        return super().write(*args, **kwargs)


def test_a_storage_or_writer_with_methods_of_its_own_is_called() -> None:
    rb = ReplayBuffer(storage=Recorded(10), writer=Noting())
    for _ in range(3):
        rb.extend(torch.arange(2))
    assert rb.storage.seen == ["check"] * 3 and rb.writer.seen == ["write"] * 3
    rb.set_writer(RoundRobinWriter())
    rb.add(torch.tensor(1))
    assert rb.storage.seen == ["check"] * 4


def test_bad_arguments_of_the_native_call_are_errors() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"n": torch.zeros(2)})
    store, codec, data = rb.storage.lanes.store, rb.storage.layout.codec, {"n": torch.zeros(2)}
    other = ReplayBuffer(storage=LazyTensorStorage(10))
    other.extend({"n": torch.zeros(2, 50)})
    for error, arguments in (
        (IndexError, (store, codec, 1, data, 1, 0)),
        (ValueError, (store, codec, 0, data, 1, 1)),
        (ValueError, (store, codec, 0, data, 3, 0)),
        (ValueError, (store, codec, 0, data, 1, 0, 0)),  # this leaf is no index
        (ValueError, (store, codec, 0, data, 1, 0, 9)),
        (ValueError, (store, other.storage.layout.codec, 0, data, 1, 0)),  # its rows are longer
    ):
        with pytest.raises(error):
            _native.push(*arguments)
    assert _native.push(store, codec, 0, [], 1, 0, 1, 32) is None and len(rb) == 2
