"""Children of our storages that override methods in TorchRL's form: buffers call these."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
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


@each("kind", KINDS)
@each("buffer", [ReplayBuffer, TensorDictReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_batches_are_written_by_set_and_read_by_get(kind, buffer):
    arguments = {"alpha": 0.7, "beta": 0.5} if buffer is TensorDictPrioritizedReplayBuffer else {}
    rb = buffer(storage=kind(8), batch_size=32, **arguments)
    rb.extend(steps(0, 5))
    rb.add(steps(5, 1)[0])
    assert stored(rb) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert len(rb.storage.sets) == 2
    assert set(rb.sample()["x"].tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}
    assert float(rb[3]["x"]) == 3.0


@each("kind", KINDS)
def test_rows_round_the_ring_come_back_as_they_were_written(kind):
    rb = TensorDictReplayBuffer(storage=kind(4), batch_size=64)
    for first in range(0, 21, 3):
        rb.extend(steps(first, 3))
    assert sorted(set(rb.sample()["x"].tolist())) == [17.0, 18.0, 19.0, 20.0]
    rb.extend(steps(100, 9))  # longer than the ring
    assert sorted(set(rb.sample()["x"].tolist())) == [105.0, 106.0, 107.0, 108.0]


@each("kind", KINDS)
def test_assignment_calls_set_once(kind):
    rb = TensorDictReplayBuffer(storage=kind(8), batch_size=4)
    rb.extend(steps(0, 4))
    rb.storage.sets.clear()
    rb[1] = steps(50, 1)[0]
    assert rb.storage.sets == [1]
    assert stored(rb) == [0.0, 100.0, 4.0, 6.0]


@each("kind", KINDS)
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


@each("kind", KINDS)
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


@pytest.mark.parametrize("kind", [DoublingTensors, DoublingFile])
def test_a_row_of_another_form_is_refused(kind):
    rb = ReplayBuffer(storage=kind(8), writer=RoundRobinWriter(), batch_size=4)
    rb.extend(steps(0, 3))
    with pytest.raises((ValueError, TypeError, KeyError)):
        rb.extend(TensorDict({"x": torch.zeros(3, 2)}, [3]))
    with pytest.raises(ValueError, match="nothing to add"):
        rb.extend(steps(0, 0))
    rb.extend(steps(3, 2))
    assert stored(rb) == [0.0, 2.0, 4.0, 6.0, 8.0]


class Narrow:
    """Stores `x` as bytes and one entry more; hands it out as `wide`, and `t` as `trajectory`."""

    def set(self, cursor, data):
        super().set(cursor, [narrow(item) for item in data] if isinstance(data, list) else narrow(data))

    def get(self, index):
        rows = super().get(index)
        return [wide(item) for item in rows] if isinstance(rows, list) else wide(rows)


def narrow(data):
    return data.clone().set("x", data["x"].to(torch.uint8)).set("more", torch.ones(data.shape))


def wide(rows):
    rows = rows.clone()
    rows["wide"], rows["trajectory"] = rows.pop("x").float(), rows.pop("t")
    return rows


class NarrowTensors(Narrow, LazyTensorStorage):
    pass


class NarrowFile(Narrow, LazyMemmapStorage):
    pass


class NarrowItems(Narrow, ListStorage):
    pass


NARROW = [(NarrowTensors, LazyTensorStorage), (NarrowFile, LazyMemmapStorage), (NarrowItems, ListStorage)]


@each(("kind", "ours"), NARROW)
@each("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_what_a_set_hands_on_is_what_is_stored(kind, ours, buffer):
    rb = buffer(storage=kind(6), batch_size=16)
    rb.extend(steps(0, 3).set("t", torch.zeros(3)))
    rb.add(steps(3, 1).set("t", torch.zeros(1))[0])
    rb.extend(steps(10, 8).set("t", torch.zeros(8)))  # longer than the ring
    rb[0] = steps(50, 1).set("t", torch.zeros(1))[0]
    rows = ours.get(rb.storage, torch.arange(6))
    assert {row["x"].dtype for row in rows} == {torch.uint8}
    assert [int(row["x"]) for row in rows] == [50, 13, 14, 15, 16, 17]
    assert set(rb.sample()["wide"].tolist()) <= {50.0, 13.0, 14.0, 15.0, 16.0, 17.0}


@each(("kind", "ours"), NARROW)
def test_samplers_look_at_the_entries_that_get_hands_out(kind, ours):
    rb = TensorDictReplayBuffer(
        storage=kind(20), sampler=SliceSampler(slice_len=3, traj_key="trajectory"), batch_size=12
    )
    rb.extend(steps(0, 10).set("t", torch.arange(10) // 5))
    sample = rb.sample()
    trajectories, x = sample["trajectory"].reshape(4, 3), sample["wide"].reshape(4, 3)
    assert torch.equal(trajectories[:, :1].expand(4, 3), trajectories)
    assert torch.equal(x[:, 1:] - x[:, :-1], torch.ones(4, 2))


def test_a_first_batch_longer_than_a_ring_of_environments_says_where_it_went():
    data = TensorDict({"x": torch.arange(18.0).reshape(2, 9)}, [2, 9])
    rb, plain = (ReplayBuffer(storage=kind(12, ndim=2)) for kind in (DoublingTensors, LazyTensorStorage))
    assert torch.equal(rb.extend(data), plain.extend(data))
    assert torch.equal(rb[:]["x"], plain[:]["x"])
    assert torch.equal(rb.extend(data[:, :2]), plain.extend(data[:, :2]))


def test_one_step_of_all_environments_is_written_by_set():
    rb, plain = (ReplayBuffer(storage=kind(6, ndim=2)) for kind in (DoublingTensors, LazyTensorStorage))
    for i in range(5):
        step = TensorDict({"x": torch.tensor([float(i), 10.0 + i])}, [2])
        assert torch.equal(rb.add(step), plain.add(step))
    assert torch.equal(rb[:]["x"], plain[:]["x"])


class Checking(LazyTensorStorage):
    """Overrides one of our five methods."""

    def check(self, items, single, time_dim=0, index_key=None, index=None):
        return super().check(items, single, time_dim, index_key, index)


@each("kind", [*KINDS, Checking])
def test_dropped_storage_is_freed_without_the_garbage_collector(kind):
    rb = ReplayBuffer(storage=kind(10), batch_size=2)
    rb.extend(TensorDict({"x": torch.arange(4.0)}, [4]))
    rb.sample()
    alive = weakref.ref(rb.storage)
    gc.disable()
    try:
        del rb
        assert alive() is None
    finally:
        gc.enable()


class CheckedDoubling(DoublingTensors):
    """Adds one of our methods to a class that has `set` and `get`."""

    def check(self, items, single, time_dim=0, index_key=None, index=None):
        return super().check(items, single, time_dim, index_key, index)

    def read(self, slots, shape=None, extra=None, sequences=False):
        return super().read(slots, shape, extra, sequences)


def test_set_and_get_of_a_parent_are_called_beside_methods_that_a_child_adds():
    rb = ReplayBuffer(storage=CheckedDoubling(10), batch_size=4)
    rb.extend(TensorDict({"x": torch.ones(4)}, [4]))
    assert len(rb.storage.sets) == 1
    assert rb.sample()["x"].tolist() == [1.0] * 4 and stored(rb) == [2.0] * 4


@pytest.mark.parametrize("ours", [ListStorage, LazyTensorStorage, LazyMemmapStorage])
def test_replace_of_a_child_is_called_by_a_writer_that_keeps_the_best(ours):
    class Noting(ours):
        def replace(self, checked, rows, slots):
            self.replaced = [*getattr(self, "replaced", []), *slots.tolist()]
            super().replace(checked, rows, slots)

    rb = TensorDictReplayBuffer(storage=Noting(3), writer=TensorDictMaxValueWriter(rank_key="x"), batch_size=8)
    rb.extend(steps(0, 3))
    rb.extend(steps(7, 2))
    assert rb.storage.replaced == [0, 1]
    assert sorted(float(row["x"]) for row in rb.storage.get(torch.arange(3))) == [2.0, 7.0, 8.0]


def test_replace_of_a_child_is_called_for_new_rows_that_a_writer_sets():
    class Noting(ListStorage):
        replaced = 0

        def replace(self, *args):
            self.replaced += 1
            super().replace(*args)

    rb = ReplayBuffer(storage=Noting(8), writer=CursorWriter(), batch_size=4)
    rb.extend(steps(0, 3))
    rb.writer.at = 1
    rb.extend(steps(50, 1))
    assert rb.storage.replaced == 1 and float(rb[1]["x"]) == 50.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", [dict, TensorDict])
def test_conditional_updates_are_written_by_set(kind, form):
    rb = TensorDictReplayBuffer(storage=kind(8), batch_size=4)
    rb.extend(steps(0, 4))
    rb.storage.sets.clear()
    index, patch = torch.tensor([1, 3]), {"x": torch.tensor([50.0, 60.0])}
    result = rb.update_if_present(
        index=index,
        generation=rb.writer.generations_of(index),
        patch=patch if form is dict else TensorDict(patch, [2]),
    )
    assert rb.storage.supports_conditional_update and result.applied == 2 and len(rb.storage.sets) == 1
    assert stored(rb) == [0.0, 100.0, 4.0, 120.0] and rb[index[1]]["x"] == 60.0


def test_conditional_updates_of_environments_are_written_by_set():
    rb = TensorDictReplayBuffer(storage=DoublingTensors(6, ndim=2), batch_size=16)
    rb.extend(TensorDict({"x": torch.arange(6.0).reshape(2, 3)}, [2, 3]))
    index = torch.tensor([[1, 0], [2, 1]])
    generations = rb.writer.generations_of(index)
    rb.update_if_present(index=index, generation=generations, patch={"x": torch.tensor([50.0, 60.0])})
    assert rb[:]["x"].tolist() == [[0.0, 50.0, 2.0], [3.0, 4.0, 60.0]]


def test_child_that_overrides_set_and_overwrite_writes_updates_by_overwrite():
    class Both(DoublingTensors):
        def overwrite(self, slots, items, index_key=None):
            super().overwrite(slots, scaled(items, 3.0), index_key)

    rb = TensorDictReplayBuffer(storage=Both(4), batch_size=4)
    rb.extend(steps(0, 4))
    index = torch.tensor([2])
    patch = TensorDict({"x": torch.tensor([5.0])}, [1])
    rb.update_if_present(index=index, generation=rb.writer.generations_of(index), patch=patch)
    assert stored(rb) == [0.0, 2.0, 15.0, 6.0]


# ---- trajectories ----
class Cut:
    """Hands out rows of one trajectory as trajectories of three steps."""

    def get(self, index):
        return cut(super().get(index))


class CutRows:
    def read(self, *args, **kwargs):
        rows = super().read(*args, **kwargs)
        return rows if rows.batch is None else rows._replace(batch=cut(rows.batch))


class CutColumn:
    def column(self, path, slots):
        values = super().column(path, slots)
        return slots // 3 if path == ("t",) else values


def cut(rows):
    if isinstance(rows, list):
        return [cut(row) for row in rows]
    rows = rows.clone()
    rows["t"] = rows["x"].long() // 3
    return rows


OF_CUT_ROWS = [
    (mixin, ours) for mixin in (Cut, CutRows) for ours in (LazyTensorStorage, LazyMemmapStorage, ListStorage)
]


@each(("mixin", "ours"), [*OF_CUT_ROWS, (CutColumn, LazyTensorStorage), (CutColumn, LazyMemmapStorage)])
@each("first", [torch.int64, torch.uint8, torch.float16, torch.complex64])
def test_trajectories_are_those_that_a_child_hands_out(mixin, ours, first):
    rb = TensorDictReplayBuffer(
        storage=type("Child", (mixin, ours), {})(30), sampler=SliceSampler(slice_len=3, traj_key="t"), batch_size=12
    )
    zeros = {"first": torch.zeros(30, dtype=first), "t": torch.zeros(30, dtype=torch.int64)}
    rb.extend(TensorDict({**zeros, "x": torch.arange(30.0)}, [30]))
    assert rb.stats().episodes == 10
    x = rb.sample()["x"].reshape(4, 3)
    assert torch.equal(x[:, 0] % 3, torch.zeros(4)) and torch.equal(x[:, 2] - x[:, 0], torch.full((4,), 2.0))


class Counting:
    """Notes how many rows are read at once."""

    most = 0

    def get(self, index):
        self.most = max(self.most, len(index))
        return super().get(index)


@each("ours", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_trajectories_of_many_rows_are_read_in_parts(ours):
    rb = TensorDictReplayBuffer(
        storage=type("Child", (Counting, ours), {})(4000),
        sampler=SliceSampler(slice_len=3, traj_key="t"),
        batch_size=12,
    )
    rb.extend(steps(0, 4000).set("t", torch.arange(4000) // 5))
    assert rb.stats().episodes == 800 and rb.storage.most < 1000


# ---- where rows go ----
class Setting:
    def set(self, cursor, data):
        return super().set(cursor, data)


class SettingOneByOne:
    def set(self, cursor, data):
        for step, row in zip(cursor.tolist(), data, strict=True):
            super().set(step, row)


class SettingTensors(Setting, LazyTensorStorage):
    pass


class SettingFile(Setting, LazyMemmapStorage):
    pass


class SettingOneByOneTensors(SettingOneByOne, LazyTensorStorage):
    pass


@each("n", [1, 9, 10, 11, 25, 40, 95])
@each("make", [
    lambda ours, kind: kind(40, shared=True, lanes=2) if ours is LazyTensorStorage else kind(40, lanes=2),
    lambda ours, kind: kind(40, shared=True, lanes=3) if ours is LazyTensorStorage else kind(40, lanes=3),
    lambda ours, kind: kind(max_bytes="200KB"), lambda ours, kind: kind(40),
])  # fmt: skip
@each(("ours", "kind"), [(LazyTensorStorage, SettingTensors), (LazyMemmapStorage, SettingFile)])
def test_the_first_rows_that_set_writes_are_where_the_index_says(ours, kind, make, n):
    plain, rb = (ReplayBuffer(storage=make(ours, one), writer=RoundRobinWriter()) for one in (ours, kind))
    for first in (0, 100):
        index = rb.extend(steps(first, n))
        assert torch.equal(index, plain.extend(steps(first, n)))
        last = index[-min(n, rb.storage.lanes.capacity) :]
        assert torch.equal(rb.storage.get(last)["x"], steps(first, n)["x"][-len(last) :])


def test_rows_that_set_hands_on_one_by_one_are_where_the_index_says():
    rb = ReplayBuffer(storage=SettingOneByOneTensors(40, shared=True, lanes=2), writer=RoundRobinWriter())
    for first in (0, 30, 60):
        index = rb.extend(steps(first, 30))
        assert torch.equal(rb.storage.get(index)["x"], steps(first, 30)["x"])


@each("kind", [*KINDS, SettingTensors, SettingFile])
def test_assigning_to_a_step_that_is_not_stored_is_an_error_and_appends_nothing(kind):
    rb = ReplayBuffer(storage=kind(8), writer=RoundRobinWriter(), batch_size=4)
    rb.extend(steps(0, 4))
    for index, n in ((4, None), ([3, 4], 2), (torch.tensor([4, 5]), 2), (slice(2, 6), 4)):
        with pytest.raises((IndexError, ValueError), match=r"not been written|nothing was written"):
            rb[index] = steps(50, 1)[0] if n is None else steps(50, n)
    with pytest.raises(IndexError, match="has not been written"):
        rb.storage.overwrite(torch.tensor([4]), steps(50, 1))
    assert len(rb) == 4
    rb.storage.set(4, steps(4, 1)[0])  # which appends
    assert len(rb) == 5
