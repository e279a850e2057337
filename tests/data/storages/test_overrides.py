"""Children of our storages that override methods in TorchRL's form: buffers call these."""

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    Writer,
)


def scaled(data, factor):
    """A copy with `x` multiplied, of a batch or a list of items."""
    if isinstance(data, list):
        return [scaled(item, factor) for item in data]
    return data.clone().set("x", data["x"] * factor)


class Doubling:
    """Stores `x` times two, and hands it out halved."""

    def set(self, cursor, data):
        self.sets = [*getattr(self, "sets", []), cursor]
        super().set(cursor, scaled(data, 2.0))

    def get(self, index):
        return scaled(super().get(index), 0.5)


class DoublingTensors(Doubling, LazyTensorStorage):
    pass


class DoublingFile(Doubling, LazyMemmapStorage):
    pass


class DoublingItems(Doubling, ListStorage):
    pass


class GrandChild(DoublingTensors):
    pass


KINDS = [DoublingTensors, DoublingFile, DoublingItems, GrandChild]


def stored(rb):
    """`x` as the storage has it, past the child's `get`."""
    ours = {DoublingItems: ListStorage, DoublingFile: LazyMemmapStorage}.get(type(rb.storage), LazyTensorStorage)
    rows = ours.get(rb.storage, torch.arange(len(rb)))
    return [float(item["x"]) for item in rows]


def steps(first, n):
    return TensorDict({"x": torch.arange(first, first + n, dtype=torch.float)}, [n])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_batches_are_written_by_set_and_read_by_get(kind, buffer):
    arguments = {"alpha": 0.7, "beta": 0.5} if buffer is TensorDictPrioritizedReplayBuffer else {}
    rb = buffer(storage=kind(8), batch_size=32, **arguments)
    rb.extend(steps(0, 5))
    rb.add(steps(5, 1)[0])
    assert stored(rb) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert len(rb.storage.sets) == 2
    assert set(rb.sample()["x"].tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}
    assert float(rb[3]["x"]) == 3.0


@pytest.mark.parametrize("kind", KINDS)
def test_rows_round_the_ring_come_back_as_they_were_written(kind):
    rb = TensorDictReplayBuffer(storage=kind(4), batch_size=64)
    for first in range(0, 21, 3):
        rb.extend(steps(first, 3))
    assert sorted(set(rb.sample()["x"].tolist())) == [17.0, 18.0, 19.0, 20.0]
    rb.extend(steps(100, 9))  # longer than the ring
    assert sorted(set(rb.sample()["x"].tolist())) == [105.0, 106.0, 107.0, 108.0]


@pytest.mark.parametrize("kind", KINDS)
def test_assignment_calls_set_once(kind):
    rb = TensorDictReplayBuffer(storage=kind(8), batch_size=4)
    rb.extend(steps(0, 4))
    rb.storage.sets.clear()
    rb[1] = steps(50, 1)[0]
    assert rb.storage.sets == [1]
    assert stored(rb) == [0.0, 100.0, 4.0, 6.0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_of_the_user_is_called_once(kind):
    storage = kind(8)
    storage.set(range(3), steps(0, 3))
    storage.set(3, steps(3, 1)[0])
    assert len(storage.sets) == 2
    assert len(storage) == 4


class CursorWriter(Writer):
    """In TorchRL's form: it sets the rows itself."""

    def __init__(self):
        super().__init__()
        self.at = 0

    def add(self, data):
        self.extend(data.unsqueeze(0))
        return self.at - 1

    def extend(self, data):
        index = torch.arange(self.at, self.at + len(data)) % self._storage.max_size
        self._storage.set(index, data)
        self.at += len(data)
        return index


@pytest.mark.parametrize("kind", KINDS)
def test_writers_in_torchrls_form_call_set_once(kind):
    rb = ReplayBuffer(storage=kind(8), writer=CursorWriter(), batch_size=4)
    rb.extend(steps(0, 3))
    assert len(rb.storage.sets) == 1
    assert stored(rb) == [0.0, 2.0, 4.0]
    rb.writer.at = 1
    rb.extend(steps(50, 1))  # in the place of another row
    assert len(rb.storage.sets) == 2
    assert stored(rb) == [0.0, 100.0, 4.0]


def test_writers_that_keep_the_best_are_refused():
    with pytest.raises(TypeError, match="use another writer"):
        TensorDictReplayBuffer(storage=DoublingTensors(2), writer=TensorDictMaxValueWriter(rank_key="x"))


def test_environments_by_time_are_written_by_set():
    rb = TensorDictReplayBuffer(storage=DoublingTensors(6, ndim=2), batch_size=16)
    data = TensorDict({"x": torch.arange(6.0).reshape(2, 3)}, [2, 3])
    rb.extend(data)
    assert set(rb.sample()["x"].tolist()) <= set(range(6))
    assert torch.equal(LazyTensorStorage.get(rb.storage, slice(None))["x"], 2 * data["x"].T)


@pytest.mark.parametrize("prefetch", [None, 2])
def test_slices_come_by_get(prefetch):
    rb = TensorDictReplayBuffer(
        storage=DoublingTensors(20), sampler=SliceSampler(slice_len=3, traj_key="t"), batch_size=12, prefetch=prefetch
    )
    rb.extend(steps(0, 10).set("t", torch.zeros(10, dtype=torch.int64)))
    for _ in range(5):
        x = rb.sample()["x"].reshape(4, 3)
        assert torch.equal(x[:, 1:] - x[:, :-1], torch.ones(4, 2))


def test_epochs_come_by_get():
    rb = ReplayBuffer(storage=DoublingTensors(6), sampler=SamplerWithoutReplacement(), batch_size=3)
    rb.extend(steps(0, 6))
    assert sorted(torch.cat([rb.sample()["x"], rb.sample()["x"]]).tolist()) == list(range(6))


def test_members_of_an_ensemble_are_read_by_get():
    members = [TensorDictReplayBuffer(storage=DoublingTensors(4)), TensorDictReplayBuffer(storage=LazyTensorStorage(4))]
    for member in members:
        member.extend(steps(3, 1))
    ensemble = ReplayBufferEnsemble(*members, batch_size=8, p=[0.5, 0.5])
    assert set(ensemble.sample()["x"].reshape(-1).tolist()) == {3.0}


@pytest.mark.parametrize("kind", [DoublingTensors, DoublingFile, DoublingItems])
def test_copies_and_checkpoints_keep_rows_as_they_are_stored(kind, tmp_path):
    rb = TensorDictReplayBuffer(storage=kind(8), batch_size=16)
    rb.extend(steps(0, 4))
    rb.dumps(tmp_path / "saved")
    twin = TensorDictReplayBuffer(storage=kind(8), batch_size=16)
    twin.loads(tmp_path / "saved")
    for other in (twin, copy.deepcopy(rb)):
        assert stored(other) == stored(rb)
        assert set(other.sample()["x"].tolist()) <= {0.0, 1.0, 2.0, 3.0}
    if kind is DoublingTensors:
        assert stored(pickle.loads(pickle.dumps(rb))) == stored(rb)


class Dropping(LazyTensorStorage):
    def set(self, cursor, data):
        super().set(cursor[:-1], data[:-1])


def test_a_set_that_leaves_rows_out_is_an_error():
    rb = ReplayBuffer(storage=Dropping(8), batch_size=4)
    with pytest.raises(RuntimeError, match=r"Dropping\.set was given 3 steps: it must hand all of them to super"):
        rb.extend(steps(0, 3))


class Refusing(LazyTensorStorage):
    def set(self, cursor, data):
        raise ValueError("not today")


def test_a_set_that_raises_writes_nothing():
    rb = ReplayBuffer(storage=Refusing(8), batch_size=4)
    with pytest.raises(ValueError, match="not today"):
        rb.extend(steps(0, 3))
    assert len(rb) == 0


class Forgetting(LazyTensorStorage):
    forgotten = 0

    def _empty(self):
        self.forgotten += 1
        super()._empty()


def test_emptying_a_buffer_calls_empty_of_the_storage():
    rb = ReplayBuffer(storage=Forgetting(8), batch_size=4)
    rb.extend(steps(0, 3))
    rb.empty()
    assert (rb.storage.forgotten, len(rb)) == (1, 0)
    rb.extend(steps(0, 2))
    assert len(rb) == 2


def test_a_row_of_another_form_is_refused_before_set_is_called():
    rb = ReplayBuffer(storage=DoublingTensors(8), writer=RoundRobinWriter(), batch_size=4)
    rb.extend(steps(0, 3))
    rb.storage.sets.clear()
    with pytest.raises((ValueError, TypeError, KeyError)):
        rb.extend(TensorDict({"x": torch.zeros(3, 2)}, [3]))
    assert rb.storage.sets == []
