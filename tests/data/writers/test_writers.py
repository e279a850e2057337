"""RoundRobinWriter, TensorDictRoundRobinWriter, ImmutableDatasetWriter."""

import pytest
import torch
from tensordict import TensorDict, tensorclass

from contracts.each import each
from engram.data import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from engram.testing import RoundRobinWriterContract, env_steps, numbers, steps


class TestRoundRobinWriter(RoundRobinWriterContract):
    def make(self):
        return RoundRobinWriter()


class TestTensorDictRoundRobinWriter(RoundRobinWriterContract):
    def make(self):
        return TensorDictRoundRobinWriter()

    def test_each_row_stores_its_own_index(self, rb):
        rb.extend(steps(0, 13))
        rb.add(steps(13, 14)[0])
        stored = rb[:]
        index = torch.stack([item["index"] for item in stored]) if isinstance(stored, list) else stored["index"]
        assert index.tolist() == list(range(10)) and index.dtype == torch.int64

    def test_the_callers_data_get_no_index(self, rb):
        data, item = steps(0, 3), steps(3, 4)[0]
        rb.extend(data)
        rb.add(item)
        assert "index" not in data.keys() and "index" not in item.keys()

    def test_an_index_that_the_data_bring_is_replaced(self, rb):
        rb.extend(steps(0, 3).set("index", torch.full((3, 2), 7.0)))
        rb.extend(steps(3, 5))
        rb.add(steps(5, 6)[0].set("index", torch.tensor(99)))
        found = [int(rb[i]["index"]) for i in range(6)]
        assert found == [0, 1, 2, 3, 4, 5]

    def test_replaced_rows_keep_their_own_index(self, rb):
        rb.extend(steps(0, 6))
        rb[2] = steps(50, 51)[0]
        rb[3] = rb[5]
        rb[[0, 4]] = steps(60, 62)
        assert [int(rb[i]["index"]) for i in range(6)] == [0, 1, 2, 3, 4, 5]
        assert numbers(rb[:]) == [60, 1, 50, 5, 61, 5]


def test_each_row_of_several_environments_stores_time_and_environment():
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), writer=TensorDictRoundRobinWriter())
    rb.extend(env_steps(3, 0, 5))
    rb.add(env_steps(3, 5, 6)[:, 0])
    assert rb[:]["index"].shape == (3, 4, 2)
    assert rb[:]["index"].tolist() == [[[t, e] for t in range(4)] for e in range(3)]
    rb[1] = env_steps(3, 50, 51)[:, 0]
    rb[2:4] = env_steps(3, 60, 62)
    assert rb[:]["index"].tolist() == [[[t, e] for t in range(4)] for e in range(3)]


def test_data_without_keys_have_no_place_for_an_index():
    for data in (torch.zeros(3), (torch.zeros(3), torch.zeros(3))):
        rb = ReplayBuffer(storage=LazyTensorStorage(10), writer=TensorDictRoundRobinWriter())
        with pytest.raises(TypeError, match="RoundRobinWriter"):
            rb.extend(data)
        assert not rb.storage.initialized
        assert TensorDictReplayBuffer(storage=LazyTensorStorage(5), writer=RoundRobinWriter()).extend(data).shape == (
            3,
        )


@tensorclass
class Plain:
    x: torch.Tensor


@tensorclass
class WithIndex:
    x: torch.Tensor
    index: torch.Tensor | None = None


def test_a_tensorclass_stores_an_index_where_it_has_a_field_for_it():
    with pytest.raises(TypeError, match="Plain without such a field"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(10)).extend(Plain(torch.arange(3), batch_size=[3]))
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=5)
    rb.extend(WithIndex(torch.arange(3), index=torch.zeros(3, dtype=torch.int64), batch_size=[3]))
    batch = rb.sample()
    assert type(batch) is WithIndex and torch.equal(batch.x, batch.index)


def test_in_a_plain_buffer_a_tensorclass_without_such_a_field_is_stored_without_an_index():
    for storage in (LazyTensorStorage, LazyMemmapStorage, ListStorage):
        rb = ReplayBuffer(storage=storage(10), writer=TensorDictRoundRobinWriter(), batch_size=5)
        rb.extend(Plain(torch.arange(3), batch_size=[3]))
        rb.add(Plain(torch.tensor(3), batch_size=[]))
        rows = rb[:]
        values = [row.x for row in rows] if isinstance(rows, list) else rows.x
        assert [int(x) for x in values] == [0, 1, 2, 3] and type(rb[0]) is Plain


class TestImmutableDatasetWriter:
    @each("storage", [ListStorage(10), LazyTensorStorage(10), LazyMemmapStorage(10), TensorStorage(torch.zeros(10))])
    def test_any_write_is_an_error_and_reading_is_not(self, storage):
        rb = ReplayBuffer(storage=storage, batch_size=3)
        rb.extend(torch.arange(5.0))
        was, count = len(rb), rb.write_count
        rb.set_writer(ImmutableDatasetWriter())
        for write in (
            lambda: rb.extend(torch.zeros(2)),
            lambda: rb.add(torch.zeros(())),
            lambda: rb.__setitem__(0, torch.ones(())),
            lambda: rb.empty(),
            lambda: rb.update_if_present(index=torch.tensor([0]), generation=torch.tensor([0]), patch=torch.ones(1)),
        ):
            with pytest.raises(RuntimeError, match="immutable"):
                write()
        assert (len(rb), rb.write_count) == (was, count) and rb[1] == 1.0
        assert rb.sample().shape == (3,)

    def test_its_cursor_is_the_storages(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(10))
        rb.extend(TensorDict({"x": torch.zeros(3)}, [3]))
        rb.set_writer(ImmutableDatasetWriter())
        assert rb.writer._cursor == 3
