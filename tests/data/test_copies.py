"""`copy.deepcopy` and `pickle` of buffers and storages: equal parts, equal rows, and nothing in common afterwards."""

import copy
import multiprocessing
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from tensordict import TensorDict, tensorclass

from contracts.each import each
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StorageEnsemble,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.data.replay_buffers.state import rows as row_loads
from engram.envs.transforms import MultiStepTransform
from engram.errors import StorageError

N = 60


def rows(n, start=0):
    number = torch.arange(start, start + n)
    done = (number % 7 == 6).unsqueeze(1)
    return TensorDict({"n": number, "id": number // 7, "next": {"reward": torch.ones(n, 1), "done": done}}, [n])


STORAGES = {
    "list": lambda: ListStorage(N),
    "rows": lambda: LazyTensorStorage(N),
    "shared": lambda: LazyTensorStorage(N, shared=True),
    "temporary": lambda: LazyMemmapStorage(N),
    "tensors": lambda: TensorStorage(rows(N)),
}
SLICES = {"slice_len": 4, "traj_key": "id"}
SAMPLERS = {
    "random": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "priorities": lambda: PrioritizedSampler(None, 0.7, 0.5),
    "slices": lambda: SliceSampler(**SLICES),
    "slice epochs": lambda: SliceSamplerWithoutReplacement(**SLICES),
    "prioritized slices": lambda: PrioritizedSliceSampler(None, 0.7, 0.5, **SLICES),
}
WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda thing: pickle.loads(pickle.dumps(thing))}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def used(storage, sampler=RandomSampler, **settings):
    """A buffer in the middle of its life."""
    generator = torch.Generator().manual_seed(5)
    rb = ReplayBuffer(storage=storage, sampler=sampler(), batch_size=8, generator=generator, **settings)
    rb.extend(rows(50))
    rb.sample()
    rb.update_priority(torch.arange(10), torch.rand(10) + 0.5)
    rb.extend(rows(25, 50))
    rb.sample()
    return rb


def plain(value):
    if isinstance(value, TensorDict):
        return plain(value.to_dict())
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in ("incarnation", "log", "session", "store")}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def assert_goes_on_alike(one, other):
    for step in range(3):
        assert plain(one.sample()) == plain(other.sample())
        for rb in (one, other):
            rb.extend(rows(5, 100 * step))
    assert plain(one[:]) == plain(other[:]) and one.write_count == other.write_count


@pytest.mark.pairwise
@ways
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_copy_has_the_same_state_and_goes_on_alike(way, storage, sampler):
    rb = used(STORAGES[storage](), SAMPLERS[sampler])
    made = way(rb)
    assert plain(made.state_dict()) == plain(rb.state_dict())
    assert (made.write_count, made.writer._cursor, made.storage._is_full) == (75 + (storage == "tensors") * N, 15, True)
    assert_goes_on_alike(rb, made)


@ways
@pytest.mark.parametrize("storage", STORAGES)
def test_what_is_written_to_one_is_not_seen_in_the_other(way, storage):
    rb = used(STORAGES[storage]())
    made = way(rb)
    before = plain(rb[:])
    made.extend(rows(N, 1000))
    made.storage.set(0, rows(1, 5000)[0])
    assert plain(rb[:]) == before
    rb.empty()
    assert len(made) == N and int(made[0]["n"]) == 5000


@ways
@pytest.mark.parametrize("storage", [name for name in STORAGES if name != "tensors"])
def test_a_buffer_that_was_never_written_is_copied_with_its_settings(way, storage):
    rb = ReplayBuffer(storage=STORAGES[storage](), batch_size=3)
    made = way(rb)
    assert type(made.storage) is type(rb.storage) and made.storage.max_size == N and len(made) == 0
    made.extend(rows(5))
    assert (len(made), len(rb)) == (5, 0)
    assert getattr(made.storage, "shared", None) == getattr(rb.storage, "shared", None)


@ways
@pytest.mark.parametrize("storage", STORAGES)
def test_storages_are_copied_alone(way, storage):
    rb = used(STORAGES[storage]())
    made = way(rb.storage)
    assert plain(made.state_dict()) == plain(rb.storage.state_dict()) and made is not rb.storage


@ways
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_environments_keep_their_shape(way, storage):
    rb = ReplayBuffer(storage=storage(30, ndim=2), batch_size=4)
    rb.extend(TensorDict({"n": torch.arange(3 * 14).view(3, 14)}, [3, 14]))
    made = way(rb)
    assert plain(made[:]) == plain(rb[:]) and made[:].shape == rb[:].shape and made.storage.ndim == 2


@ways
def test_lanes_of_several_writers_are_copied(way):
    rb = ReplayBuffer(storage=LazyTensorStorage(60, shared=True, lanes=2), batch_size=4)
    rb.extend(rows(10))
    other = ReplayBuffer(storage=pickle.loads(bytes(ForkingPickler.dumps(rb.storage))))
    other.extend(rows(7, 100))
    made = way(rb)
    assert (
        sorted(plain(made[:])["n"]) == [*range(10), *range(100, 107)]
        and made.storage.lanes.store.lanes == rb.storage.lanes.store.lanes > 1
    )


@tensorclass
class Step:
    n: torch.Tensor


@ways
@pytest.mark.parametrize("storage", ["list", "rows", "temporary"])
def test_rows_keep_their_class(way, storage):
    rb = ReplayBuffer(storage=STORAGES[storage](), batch_size=4)
    rb.extend(Step(n=torch.arange(5), batch_size=[5]))
    made = way(rb)
    assert type(made[2]) is Step and type(made.sample()) is Step


def generations(rb):
    return rb.storage.lanes.generations(torch.arange(len(rb))).tolist()


@ways
def test_the_best_rows_stay_the_best(way):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), writer=TensorDictMaxValueWriter(rank_key="n"), batch_size=4)
    rb.extend(rows(30))
    made = way(rb)
    for buffer in (rb, made):
        buffer.extend(rows(5, 18))
    assert sorted(plain(made[:])["n"]) == sorted(plain(rb[:])["n"])
    assert all(len(set(sequences)) == 10 for sequences in (generations(made), generations(rb)))
    assert generations(made) == generations(rb)


@ways
def test_steps_that_transforms_hold_back_are_copied(way):
    rb = ReplayBuffer(storage=LazyTensorStorage(N), transform=MultiStepTransform(n_steps=3, gamma=0.5))
    rb.extend(rows(4))
    made = way(rb)
    assert [len(b.flush_transforms()) for b in (made, rb)] == [len(rb) and 2, 2] and plain(made[:]) == plain(rb[:])


@ways
def test_batches_that_were_prepared_ahead_are_drawn_by_the_copy_too(way):
    rb = used(LazyTensorStorage(N), SamplerWithoutReplacement, prefetch=3)
    made = way(rb)
    assert [plain(rb.sample()) for _ in range(5)] == [plain(made.sample()) for _ in range(5)]


@ways
def test_ensembles_are_copied_with_their_members(way):
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(N), batch_size=4) for _ in range(2)]
    for k, member in enumerate(members):
        member.extend(rows(20, 100 * k))
    rb = ReplayBufferEnsemble(*members, batch_size=8, p=[1, 3], generator=torch.Generator().manual_seed(0))
    rb.sample()
    made = way(rb)
    assert plain(made.sample()) == plain(rb.sample())
    assert made.storage[0] is made[0].storage and made.storage[0] is not rb.storage[0]
    made[0].extend(rows(3))
    assert (len(made.storage[0]), len(rb.storage[0])) == (23, 20)


@ways
def test_ensembles_of_storages_are_copied(way):
    members = [used(LazyTensorStorage(N)).storage, used(ListStorage(N)).storage]
    made = way(StorageEnsemble(*members))
    assert [len(m) for m in made.storages] == [N, N] and made[0] is not members[0]


def test_any_objects_of_a_list_are_copied_deeply():
    rb = ReplayBuffer(storage=ListStorage(5), collate_fn=list)
    rb.extend([{"a": [1]}, "text"])
    made = copy.deepcopy(rb)
    made[:][0]["a"].append(2)
    made.storage._storage[0]["a"].append(3)
    assert rb[0] == {"a": [1]}


def test_hooks_and_checkpointers_are_parts(tmp_path):
    rb = used(LazyTensorStorage(N))
    called = []
    rb.register_save_hook(lambda state: called.append(1) or state)
    made = copy.deepcopy(rb)
    assert made.storage.checkpointer is not rb.storage.checkpointer
    made.dumps(tmp_path)
    assert type(made.storage.checkpointer) is type(rb.storage.checkpointer)
    assert len(made.storage.checkpointer.save_hooks) == 1


def test_rows_are_copied_block_by_block(monkeypatch):
    monkeypatch.setattr(row_loads, "_COPY_BLOCK_BYTES", 100)
    rb = used(LazyMemmapStorage(N))
    monkeypatch.setattr(LazyMemmapStorage, "state_dict", None)  # which would hold them all in memory
    assert plain(copy.deepcopy(rb.storage)[:]) == plain(rb.storage[:])


# ---- stores with a folder ----
def test_a_pickle_of_a_named_store_keeps_its_path(tmp_path):
    rb = used(LazyMemmapStorage(N, scratch_dir=tmp_path))
    data = pickle.dumps(rb)
    assert len(data) < 20_000
    rb.extend(rows(3, 500))
    made = pickle.loads(data)
    assert made.storage.scratch_dir == tmp_path and plain(made[:]) == plain(rb[:]) and made.write_count == 78
    made.storage.close()
    rb.extend(rows(1))


def test_a_pickle_of_a_named_store_without_rows_keeps_its_path(tmp_path):
    data = pickle.dumps(ReplayBuffer(storage=LazyMemmapStorage(N, scratch_dir=tmp_path / "store")))
    made = pickle.loads(data)
    assert made.storage.max_size == N and not (tmp_path / "store").exists()
    made.extend(rows(3))
    made.storage.close()
    assert len(pickle.loads(data)) == 3  # somebody has made it meanwhile


def test_a_deep_copy_of_a_named_store_has_a_temporary_file(tmp_path):
    rb = used(LazyMemmapStorage(N, scratch_dir=tmp_path), lambda: PrioritizedSampler(None, 0.7, 0.5))
    made = copy.deepcopy(rb)
    assert made.storage.scratch_dir is None and [p.name for p in tmp_path.iterdir()] == ["rows.engram"]
    assert plain(made.state_dict()) == plain(rb.state_dict())
    assert_goes_on_alike(rb, made)


# ---- sending ----
@each("storage, said", [
    ("list", "Cannot share a storage of type ListStorage"),
    ("tensors", "Cannot share a storage of type TensorStorage"),
    ("rows", r"Cannot share a storage of type LazyTensorStorage.* shared=True"),
])  # fmt: skip
def test_what_is_sent_to_a_process_is_not_copied(storage, said):
    rb = used(STORAGES[storage]())
    for part in (rb, rb.storage):
        with pytest.raises(StorageError, match=said):
            ForkingPickler.dumps(part)


@pytest.mark.parametrize("storage", ["shared", "temporary"])
def test_what_was_not_written_is_not_sent(storage):
    with pytest.raises(StorageError, match="has not been initialized"):
        ForkingPickler.dumps(ReplayBuffer(storage=STORAGES[storage]()))


@pytest.mark.parametrize("storage", ["shared", "temporary"])
def test_what_is_sent_has_the_same_rows(storage):
    rb = used(STORAGES[storage]())
    made = pickle.loads(bytes(ForkingPickler.dumps(rb)))
    rb.extend(rows(2, 900))
    assert plain(made[:]) == plain(rb[:])


PRIORITIES = ("priorities", "prioritized slices")


@each("sampler", SAMPLERS)
@each("alone", [False, True])
def test_priorities_stay_in_their_process(sampler, alone):
    rb = used(STORAGES["shared"](), SAMPLERS[sampler])
    part = rb.sampler if alone else rb
    if sampler not in PRIORITIES:
        assert pickle.loads(bytes(ForkingPickler.dumps(part))) is not part
        return
    with pytest.raises(RuntimeError, match="cannot be shared between processes"):
        ForkingPickler.dumps(part)
    assert len(pickle.loads(bytes(ForkingPickler.dumps(rb.storage)))) == N


@each("kind", ["buffer", "writer", "child", "ensemble", "ensemble of samplers"])
def test_what_would_drift_apart_is_not_sent(kind):
    writer = {"child": OwnBest}.get(kind, TensorDictMaxValueWriter)(rank_key="n")
    rb = ReplayBuffer(storage=LazyTensorStorage(10, shared=True), writer=writer, batch_size=4)
    rb.extend(rows(30))
    plain_one = used(STORAGES["shared"]())
    sent = {
        "writer": rb.writer,
        "ensemble": ReplayBufferEnsemble(plain_one, rb),
        "ensemble of samplers": ReplayBufferEnsemble(
            plain_one, used(STORAGES["shared"](), lambda: PrioritizedSampler(None, 0.7, 0.5))
        ),
    }.get(kind, rb)
    with pytest.raises(RuntimeError, match="cannot be shared between processes"):
        ForkingPickler.dumps(sent)


def test_a_process_that_would_get_a_copy_does_not_start():
    process = multiprocessing.get_context("spawn").Process(target=print, args=(used(STORAGES["rows"]()),))
    with pytest.raises(RuntimeError, match="Cannot share a storage of type"):
        process.start()


class OwnBest(TensorDictMaxValueWriter):
    """Of a user's own."""


# ---- states ----
def test_a_state_has_the_batch_size_and_gives_it_back():
    rb = used(LazyTensorStorage(N))
    state = rb.state_dict()
    assert state["_batch_size"] == 8
    made = ReplayBuffer(storage=LazyTensorStorage(N), batch_size=3)
    made.load_state_dict(state)
    assert made.batch_size == 8 and len(made.sample()) == 8
    made.load_state_dict({**state, "_batch_size": None})
    assert made.batch_size == 8
    with pytest.raises(ValueError, match="batch_size"):
        made.load_state_dict({**state, "_batch_size": -1})
    del state["_batch_size"]  # of an earlier version
    made.load_state_dict(state)
    assert made.batch_size == 8


@ways
@pytest.mark.parametrize("storage", ["list", "rows", "shared", "temporary"])
def test_seams_between_writers_are_copied(way, storage):
    rb = used(STORAGES[storage](), lambda: SliceSampler(slice_len=2, traj_key="id"))
    rb.empty()
    rb.extend(rows(4).set("id", torch.zeros(4, dtype=torch.int64)))
    rb.storage.mark_seam()
    rb.extend(rows(4).set("id", torch.zeros(4, dtype=torch.int64)))
    made = way(rb)
    assert made.stats().episodes == rb.stats().episodes == 2
    starts = {int(slot) % 4 for _ in range(20) for slot in made.sample(return_info=True)[1]["index"][::2]}
    assert starts == {0, 1, 2}  # none begins at the last step before the seam


class Own(LazyTensorStorage):
    """Of a user's own."""


@ways
def test_classes_of_a_users_own_are_copied_and_sent_as_ours(way):
    rb = used(Own(N))
    assert type(way(rb).storage) is Own
    with pytest.raises(StorageError, match="Cannot share a storage of type Own"):
        ForkingPickler.dumps(rb)
