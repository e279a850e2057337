"""Members of buffers, storages, checkpointers, samplers and writers that programs written for TorchRL use."""

import copy
import inspect
import pickle

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import (
    CompressedListStorage,
    FlatStorageCheckpointer,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ListStorageCheckpointer,
    NestedStorageCheckpointer,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StorageEnsemble,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorageCheckpointer,
)
from engram.testing import env_steps, numbers, steps

pytestmark = pytest.mark.usefixtures("lock_order")

STORAGES = [ListStorage, LazyTensorStorage, LazyMemmapStorage, LazyStackStorage, CompressedListStorage]


def buffer(sampler=None, **arguments):
    return TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, **arguments)


def of_trajectories(*lengths):
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    return TensorDict({"episode": ids, "n": torch.arange(len(ids))}, [len(ids)])


# ---- buffers ----
def test_next_gives_batches_and_none_at_the_end_of_each_epoch():
    rb = buffer(SamplerWithoutReplacement(shuffle=False), batch_size=2)
    with pytest.raises(RuntimeError, match="empty storage"):
        rb.next()
    rb.extend(steps(0, 3))
    given = [rb.next() for _ in range(4)]
    assert [None if batch is None else numbers(batch) for batch in given] == [[0, 1], [2], None, [0, 1]]
    for copied in (copy.deepcopy(rb), pickle.loads(pickle.dumps(rb)), rb):
        assert numbers(copied.next()) == [2]
    with pytest.raises(RuntimeError, match="Batch_size was not specified"):
        buffer().next()


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_buffer_is_used_as_one_in_another_process_is(prefetch):
    rb = buffer(SamplerWithoutReplacement(shuffle=False), batch_size=2, prefetch=prefetch)
    assert rb.service_backend == "direct" and rb.start() is rb and rb.client() is rb and rb.is_alive
    rb.client().extend(steps(0, 6))
    rb.synchronize()
    assert numbers(rb.sample()) == [0, 1]
    for _ in range(2):
        rb.shutdown(timeout=1.0)
        assert not rb.is_alive
    assert numbers(rb.sample()) == [2, 3] and copy.deepcopy(rb).is_alive


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_write_all_replaces_what_read_all_in_order_gives(cls):
    rb = cls(storage=LazyTensorStorage(10))
    rb.extend(steps(0, 12))
    rb.write_all(steps(50, 60))
    assert numbers(rb.read_all_in_order()) == list(range(50, 60)) and rb.writer._cursor == 2
    rb.write_all(steps(70, 72), end=2)
    assert numbers(rb.read_all_in_order(3)) == [70, 71, 52]
    with pytest.raises(ValueError, match="10 steps are indexed, the data have 3; nothing was written"):
        rb.write_all(steps(0, 3))


@each(
    ("cls", "arguments", "names"),
    [
        (ReplayBuffer, {}, {"add": "data", "extend": "data"}),
        (TensorDictReplayBuffer, {}, {"add": "data", "extend": "tensordicts", "update_tensordict_priority": "data"}),
        (PrioritizedReplayBuffer, {"alpha": 1.0, "beta": 1.0}, {"add": "data", "extend": "data"}),
        (
            TensorDictPrioritizedReplayBuffer,
            {"alpha": 1.0, "beta": 1.0},
            {"add": "data", "extend": "tensordicts", "update_tensordict_priority": "data"},
        ),
    ],
)
def test_data_are_given_under_the_name_that_torchrl_has(cls, arguments, names):
    rb = cls(storage=LazyTensorStorage(10), **arguments)
    assert rb.add(**{names["add"]: steps(0, 1)[0]}) == 0
    assert rb.extend(**{names["extend"]: steps(1, 3)}).tolist() == [1, 2]
    assert numbers(rb[:]) == [0, 1, 2]
    if "update_tensordict_priority" in names:
        rb.update_tensordict_priority(data=rb.sample(2).set("td_error", torch.ones(2)))
    assert list(inspect.signature(cls.extend).parameters)[1:] == [
        names["extend"],
        "others",
        "update_priority",
        "timeout",
    ]


def test_a_prioritized_buffer_has_its_sampler_and_takes_no_other():
    for cls in (PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer):
        rb = cls(alpha=0.7, beta=0.5, sampler=None, sampler_device="cpu", sync=False)
        assert rb.prioritized_sampler is rb.sampler
        with pytest.raises(TypeError, match=r"makes its own sampler; for another one use ReplayBuffer\(sampler=...\)"):
            cls(alpha=0.7, beta=0.5, sampler=RandomSampler())


# ---- what can be sampled ----
@each(
    ("sampler", "expected"),
    [
        (RandomSampler, [False, True, True, True]),
        (SamplerWithoutReplacement, [False, True, True, True]),
        (lambda: SamplerWithoutReplacement(drop_last=True), [False, False, True, True]),
        (lambda: SamplerWithoutReplacement(world_size=7), [False, False, True, True]),
        (lambda: PrioritizedSampler(10, 0.7, 0.5), [False, True, True, True]),
        (lambda: SliceSampler(slice_len=3, traj_key="episode"), [False, False, True, True]),
        (lambda: SliceSampler(num_slices=3, traj_key="episode"), [False, True, True, True]),
        (lambda: SliceSampler(slice_len=3, traj_key="episode", strict_length=False), [False, True, True, True]),
        (lambda: SequenceSampler(slice_len=3, traj_key="episode"), [False, False, True, True]),
        (lambda: PrioritizedSliceSampler(10, 0.7, 0.5, slice_len=3, traj_key="episode"), [False, False, True, True]),
        (lambda: SliceSamplerWithoutReplacement(slice_len=3, traj_key="episode"), [False, False, True, True]),
        (
            lambda: SliceSamplerWithoutReplacement(slice_len=3, traj_key="episode", drop_last=True),
            [False, False, False, True],
        ),
    ],
)
def test_can_sample_is_true_where_sample_gives_a_batch(sampler, expected):
    for written, can in zip(((), (2, 2), (2, 2, 3), (2, 2, 3, 3)), expected, strict=True):
        rb = buffer(sampler(), batch_size=6)
        if written:
            rb.extend(of_trajectories(*written))
        assert rb.can_sample() is can
        if can:
            rb.sample()
        else:
            with pytest.raises((RuntimeError, ValueError)):
                rb.sample()


def test_can_sample_needs_a_batch_size_that_the_sampler_takes():
    rb = buffer(SliceSampler(slice_len=3, traj_key="episode"))
    with pytest.raises(RuntimeError, match="batch_size not specified"):
        rb.can_sample()
    with pytest.raises(ValueError, match="no multiple of slice_len=3"):
        rb.can_sample(7)


def test_an_ensemble_can_sample_when_each_member_that_is_drawn_can():
    members = [buffer(), buffer()]
    always, first = (ReplayBufferEnsemble(*members, p=p, batch_size=4) for p in (None, [1.0, 0.0]))
    members[0].extend(steps(0, 3))
    assert (always.can_sample(), first.can_sample()) == (False, True)
    members[1].extend(steps(0, 3))
    assert always.can_sample()


def test_an_ensemble_routes_nothing_and_takes_weights_as_p():
    with pytest.raises(TypeError, match=r"write to a member, as rb\[0\].extend"):
        ReplayBufferEnsemble(buffer(), buffer(), routing_key="env")
    with pytest.raises(TypeError, match=r"one weight for each of 2 members, got 'sampleable'; can_sample"):
        ReplayBufferEnsemble(buffer(), buffer(), p="sampleable")
    assert ReplayBufferEnsemble(buffer(), buffer(), routing_key=None, routing_dim=None).batch_size is None


class Every:
    """A sampler of a user's own."""

    def sample(self, storage, batch_size):
        return torch.zeros(batch_size, dtype=torch.int64), {}


class EveryFrom(Every):
    def can_sample(self, storage, batch_size):
        return len(storage) >= batch_size


def test_user_sampler_decides_what_it_can_sample():
    for sampler, expected in ((Every(), [False, True, True]), (EveryFrom(), [False, False, True])):
        rb, can = buffer(sampler, batch_size=4), []
        for n in (0, 2, 2):
            if n:
                rb.extend(steps(0, n))
            can.append(rb.can_sample())
        assert can == expected


# ---- samplers and writers ----
def test_a_sampler_needs_no_word_of_what_was_written():
    for sampler in (RandomSampler(), PrioritizedSampler(10, 1.0, 1.0), SamplerEnsemble(RandomSampler())):
        sampler.add(3)
        sampler.extend(torch.arange(3))
    assert PrioritizedSampler(10, 1.0, 1.0).max_size == 10
    assert PrioritizedSampler(10, 1.0, 1.0, device=torch.device("cpu")).max_capacity == 10


def test_arguments_of_slice_samplers_that_change_nothing_are_taken():
    without_effect = {"compile": {"fullgraph": True}, "use_gpu": True, "step_key": "step"}
    for sampler in (
        SliceSampler(slice_len=2, fragmented=False, **without_effect),
        SliceSamplerWithoutReplacement(slice_len=2, **without_effect),
        SequenceSampler(slice_len=2, **without_effect),
        PrioritizedSliceSampler(10, 1.0, 1.0, slice_len=2, **without_effect),
    ):
        assert sampler.slice_len == 2
    with pytest.raises(TypeError, match=r"LazyTensorStorage\(lanes=n\)"):
        SliceSampler(slice_len=2, fragmented=True)


@pytest.mark.parametrize("writer", [RoundRobinWriter, TensorDictRoundRobinWriter])
def test_write_at_replaces_steps_and_appends_behind_them(writer):
    writer, storage = writer(), LazyTensorStorage(10)
    writer.register_storage(storage)
    writer.extend(data=steps(0, 3))
    assert writer.write_at(torch.tensor([0, 2]), steps(50, 52)).tolist() == [0, 2]
    assert writer.write_at(3, steps(60, 61)[0]) == 3
    assert numbers(storage[:]) == [50, 1, 51, 60] and writer._cursor == 4
    assert writer.index_key is None or storage[:]["index"].tolist() == [0, 1, 2, 3]
    with pytest.raises(IndexError):
        writer.write_at(7, steps(60, 61)[0])


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_max_value_writer_says_where_an_item_would_go(storage):
    writer, storage = TensorDictMaxValueWriter(rank_key="n"), storage(3)
    with pytest.raises(RuntimeError, match="no storage to write to"):
        writer.get_insert_index(steps(0, 1)[0])
    writer.register_storage(storage)
    assert writer.get_insert_index(steps(5, 6)[0]) == 0
    writer.extend(data=steps(5, 8))
    for _ in range(2):
        assert [writer.get_insert_index(steps(n, n + 1)[0]) for n in (1, 9)] == [None, 0]
    assert writer.add(data=steps(9, 10)[0]) == 0


# ---- storages ----
@each("storage", STORAGES)
def test_contains_says_of_each_index_whether_it_is_stored(storage):
    storage = storage(10)
    assert not storage.contains(0) and storage.contains(torch.tensor([[0]])).tolist() == [[False]]
    storage.set(cursor=range(5), data=steps(0, 5), set_cursor=False)
    assert len(storage) == 5 and storage.contains(3) and storage.contains([1, 4]) and not storage.contains(7)
    index = torch.tensor([[4, 5, 9, 12], [-1, -5, -6, 0]])
    assert storage.contains(index).tolist() == [[i in storage for i in row] for row in index.tolist()]
    assert storage.contains(torch.tensor(4)).shape == ()


def test_contains_with_environments_takes_time_and_environment():
    storage = LazyTensorStorage(6, ndim=2)
    ReplayBuffer(storage=storage).extend(env_steps(2, 0, 2))
    index = torch.tensor([[0, 1], [1, 0], [2, 0], [0, 2]])
    assert storage.contains(index).tolist() == [True, True, False, False]


@each("storage", STORAGES)
@each(("save", "load"), [("dumps", "loads"), ("dump", "load"), ("save", "load")])
def test_a_storage_is_saved_under_each_name(tmp_path, storage, save, load):
    written, read = storage(10), storage(10)
    written.set(range(3), steps(0, 3))
    getattr(written, save)(tmp_path)
    getattr(read, load)(tmp_path)
    assert numbers(read[:]) == [0, 1, 2]


@each(
    ("checkpointer", "storage"),
    [
        (TensorStorageCheckpointer, LazyTensorStorage),
        (FlatStorageCheckpointer, LazyTensorStorage),
        (NestedStorageCheckpointer, LazyMemmapStorage),
        (ListStorageCheckpointer, ListStorage),
    ],
)
def test_a_checkpointer_saves_a_storage_and_leaves_it_its_own(tmp_path, checkpointer, storage):
    written, read = storage(10), storage(10)
    written.set(range(3), steps(0, 3))
    own = written.checkpointer
    checkpointer().dumps(written, tmp_path / "saved")
    checkpointer().loads(read, tmp_path / "saved")
    assert numbers(read[:]) == [0, 1, 2] and written.checkpointer is own


def test_a_checkpointer_of_another_kind_of_storage_is_refused(tmp_path):
    storage = ListStorage(10)
    storage.set(range(3), steps(0, 3))
    own = storage.checkpointer
    with pytest.raises(TypeError, match="cannot save a ListStorage"):
        FlatStorageCheckpointer().dumps(storage, tmp_path)
    assert storage.checkpointer is own


@each("item", [torch.zeros(2), {"a": (torch.zeros(2), "text")}, steps(0, 1)[0]])
def test_a_list_storage_with_a_device_moves_what_is_written(item):
    storage = ListStorage(10, device="meta")
    for _ in range(2):  # a new item, then another in its place
        storage.set(0, item)
        stored = storage[0]
        value = stored if isinstance(stored, torch.Tensor) else next(iter(stored.values()))
        assert (value[0] if isinstance(value, tuple) else value).device.type == "meta"
    assert copy.deepcopy(storage).device == torch.device("meta")
    assert ListStorage(10).device is None


def test_an_ensemble_of_storages_is_not_written_to():
    storage = StorageEnsemble(LazyTensorStorage(10), LazyTensorStorage(10))
    for call in (lambda: storage.add(1), lambda: storage.extend([1]), lambda: storage.contains(1)):
        with pytest.raises(RuntimeError, match=r"use a member, as storage\[0\]"):
            call()
    assert not storage.supports_conditional_update and storage[0].supports_conditional_update


def test_a_compressed_storage_counts_its_bytes():
    storage = CompressedListStorage(10)
    storage.set(0, torch.zeros(1000))
    assert 0 < storage.bytes() == storage.nbytes < 1000
