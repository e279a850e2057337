"""Children of storages that read and write rows in a form of their own: an edit changes the entries that it names."""

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)


def read(data):
    """Rows as they are handed out: `x` as a third in another dtype, under `x` and `shown`, and without `hidden`."""
    if isinstance(data, list):
        return [read(item) for item in data]
    data = data.exclude("hidden")
    data["x"] = data["shown"] = data["x"].double() / 3
    return data


def written(data):
    """Such rows as they are stored; of most numbers the last bits are others, and `hidden` is made of `x`."""
    if isinstance(data, list):
        return [written(item) for item in data]
    data = data.exclude("shown")
    data["x"] = (data["x"] * 3).float()
    data["hidden"] = data["x"] + 1
    return data


class Reading:
    def get(self, index):
        return read(super().get(index))


class ReadingRows:
    def read(self, *args, **kwargs):
        rows = super().read(*args, **kwargs)
        return rows if rows.batch is None else rows._replace(batch=read(rows.batch))


class ReadingWithSet(Reading):
    def set(self, cursor, data):
        return super().set(cursor, data)


class ReadingWithEveryMethod(ReadingRows):
    def set(self, cursor, data):
        return super().set(cursor, data)

    def check(self, *args, **kwargs):
        return super().check(*args, **kwargs)

    def append(self, *args, **kwargs):
        return super().append(*args, **kwargs)

    def overwrite(self, *args, **kwargs):
        return super().overwrite(*args, **kwargs)


class Converting(Reading):
    def set(self, cursor, data):
        return super().set(cursor, written(data))


ONLY_READING = [Reading, ReadingRows]
MIXINS = [*ONLY_READING, ReadingWithSet, ReadingWithEveryMethod, Converting]
STORAGES = {
    LazyTensorStorage: lambda kind: kind(20),
    LazyMemmapStorage: lambda kind: kind(20),
    TensorStorage: lambda kind: kind(TensorDict({}, [20])),
    ListStorage: lambda kind: kind(20),
    LazyStackStorage: lambda kind: kind(20),
    CompressedListStorage: lambda kind: kind(20),
}
KINDS = [(mixin, storage) for mixin in MIXINS for storage in STORAGES]


def buffer(mixin, storage, **parts):
    name = mixin.__name__ + storage.__name__
    kind = globals().setdefault(name, type(name, (mixin, storage), {"__module__": __name__}))
    return TensorDictReplayBuffer(storage=STORAGES[storage](kind), batch_size=8, **parts)


def steps(mixin, n):
    """Steps in the form in which a child is given them: of all numbers a third of their `x` is inexact."""
    data = TensorDict({"x": 1000 + torch.arange(n) / 7, "a": torch.zeros(n), "hidden": torch.full((n,), -1.0)}, [n])
    return read(data) if mixin is Converting else data


def stored(rb, key):
    """An entry of all rows as they are stored, past the methods of a child."""
    rows = rb.storage.access.table.rows.read(torch.arange(len(rb))).batch
    return torch.stack([row[key] for row in rows]) if isinstance(rows, list) else rows[key]


@each(("mixin", "storage"), KINDS)
@each("form", [dict, TensorDict, list])
def test_conditional_updates_change_only_the_entries_of_the_patch(mixin, storage, form):
    rb = buffer(mixin, storage)
    rb.extend(steps(mixin, 6))
    before, index = stored(rb, "x").clone(), torch.tensor([4, 1])
    patch = {"a": torch.tensor([7.0, 8.0])}
    patch = patch if form is dict else TensorDict(patch, [2])
    result = rb.update_if_present(
        index=index, generation=rb.writer.generations_of(index),
        patch=list(patch.unbind(0)) if form is list else patch,
    )  # fmt: skip
    assert result.applied == 2 and stored(rb, "a").tolist() == [0.0, 8.0, 0.0, 0.0, 7.0, 0.0]
    assert torch.equal(stored(rb, "x"), before)


@each(("mixin", "storage"), KINDS)
def test_versions_are_compared_and_written_with_the_patch_alone(mixin, storage):
    rb = buffer(mixin, storage)
    rb.extend(steps(mixin, 3).set("version", torch.full((3,), 5)))
    before, index = stored(rb, "x").clone(), torch.tensor([0, 1, 2])
    arguments = {"index": index, "generation": rb.writer.generations_of(index), "patch": {"a": torch.ones(3)}}
    result = rb.update_if_present(version_key="version", version=[4, 5, 6], **arguments)
    assert result.updated.tolist() == [False, True, True]
    assert stored(rb, "a").tolist() == [0.0, 1.0, 1.0] and stored(rb, "version").tolist() == [5, 5, 6]
    assert torch.equal(stored(rb, "x"), before)


@each(("mixin", "storage"), KINDS)
def test_setting_entries_leaves_all_others_as_they_are(mixin, storage):
    rb = buffer(mixin, storage)
    rb.extend(steps(mixin, 4))
    before = stored(rb, "x").clone()
    rb.set_("a", torch.tensor(1.0)).set_at_("a", torch.tensor([2.0, 3.0]), [1, 3]).set_at_("a", torch.tensor(4.0), 0)
    assert stored(rb, "a").tolist() == [4.0, 2.0, 1.0, 3.0] and torch.equal(stored(rb, "x"), before)
    rb.update_({"a": torch.arange(4.0)})
    assert stored(rb, "a").tolist() == [0.0, 1.0, 2.0, 3.0] and torch.equal(stored(rb, "x"), before)


@each(("mixin", "storage"), [(mixin, storage) for mixin in ONLY_READING for storage in STORAGES])
def test_entries_that_a_child_only_reads_otherwise_are_changed_as_they_are_stored(mixin, storage):
    rb = buffer(mixin, storage)
    rb.extend(steps(mixin, 3))
    index = torch.tensor([1])
    generation = rb.writer.generations_of(index)
    rb.update_if_present(index=index, generation=generation, patch={"x": torch.tensor([9.0])})
    rb.set_at_("hidden", torch.tensor(5.0), 2)
    assert (float(stored(rb, "x")[1]), float(rb[1]["x"]), float(stored(rb, "hidden")[2])) == (9.0, 3.0, 5.0)
    with pytest.raises(KeyError, match="shown"):
        rb.update_if_present(index=index, generation=generation, patch={"shown": torch.tensor([9.0]).double()})


@each("storage", STORAGES)
def test_entries_that_a_child_also_writes_otherwise_are_changed_as_it_writes_them(storage):
    rb = buffer(Converting, storage)
    rb.extend(steps(Converting, 3))
    index = torch.tensor([1])
    rb.update_if_present(
        index=index, generation=rb.writer.generations_of(index), patch={"x": torch.tensor([3.0], dtype=torch.float64)}
    )
    assert float(stored(rb, "x")[1]) == 9.0 and float(rb[1]["x"]) == 3.0
    assert float(stored(rb, "hidden")[1]) == 10.0  # which no row shows: as `set` makes it


@each("mixin", MIXINS)
def test_edits_of_environments_change_only_what_they_name(mixin):
    kind = type("Child", (mixin, LazyTensorStorage), {})
    rb = TensorDictReplayBuffer(storage=kind(12, ndim=2), batch_size=8)
    rb.extend(steps(mixin, 6).reshape(2, 3))
    before, index = stored(rb, "x").clone(), torch.tensor([[1, 0], [2, 1]])
    rb.update_if_present(index=index, generation=rb.writer.generations_of(index), patch={"a": torch.tensor([7.0, 8.0])})
    assert rb[:]["a"].tolist() == [[0.0, 7.0, 0.0], [0.0, 0.0, 8.0]]
    rb.set_at_("a", torch.tensor(5.0), (0, 2)).set_at_("a", torch.tensor([1.0, 2.0]), 0)
    assert rb[:]["a"].tolist() == [[1.0, 7.0, 5.0], [2.0, 0.0, 8.0]]
    assert torch.equal(stored(rb, "x"), before)


@each(("mixin", "storage"), KINDS)
def test_copies_and_saves_have_the_rows_as_they_are_stored(mixin, storage, tmp_path):
    rb = buffer(mixin, storage)
    rb.extend(steps(mixin, 5))
    rb.dumps(tmp_path / "saved")
    loaded, filled = buffer(mixin, storage), buffer(mixin, storage)
    loaded.loads(tmp_path / "saved")
    filled.load_state_dict(rb.state_dict())
    twins = [loaded, filled, copy.deepcopy(rb)]
    for twin in twins if storage is LazyMemmapStorage else [*twins, pickle.loads(pickle.dumps(rb))]:
        assert torch.equal(stored(twin, "x"), stored(rb, "x")) and torch.equal(twin[2]["x"], rb[2]["x"])


@each(("mixin", "storage"), [(mixin, storage) for mixin in ONLY_READING for storage in STORAGES])
def test_writer_that_keeps_the_best_ranks_rows_as_they_are_stored(mixin, storage):
    rb = buffer(mixin, storage, writer=TensorDictMaxValueWriter(rank_key="x"))
    rb.extend(TensorDict({"x": torch.arange(1.0, 21), "a": torch.zeros(20), "hidden": torch.zeros(20)}, [20]))
    rb.set_writer(TensorDictRoundRobinWriter())
    rb.set_writer(TensorDictMaxValueWriter(rank_key="x"))  # which looks at the stored rows
    row = TensorDict({"x": torch.tensor(0.9), "a": torch.zeros(()), "hidden": torch.zeros(())}, [])
    assert rb.add(row) == -1  # it is more than a third of 1
