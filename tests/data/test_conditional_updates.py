"""`update_if_present`: what was computed from steps goes back to them, and never to others in their places."""

import random
import threading

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from contracts.each import each
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)

pytestmark = pytest.mark.usefixtures("lock_order")

N = 10


def steps(start, stop):
    n = torch.arange(start, stop)
    nested = {"value": n.float().unsqueeze(1), "seen": n.short()}
    return TensorDict({"n": n, "next": nested, "version": torch.zeros(len(n), 1, dtype=torch.int32)}, [len(n)])


STORAGES = {
    "list": lambda: ListStorage(N),
    "rows": lambda: LazyTensorStorage(N),
    "shared": lambda: LazyTensorStorage(N, shared=True),
    "mapped": lambda: LazyMemmapStorage(N),
    "tensors": lambda: TensorStorage(steps(-N, 0)),
}
storages = pytest.mark.parametrize("storage", STORAGES)


def filled(storage, **settings):
    """A buffer of the steps 0 to 9, and their index and generations."""
    rb = TensorDictReplayBuffer(storage=STORAGES[storage](), batch_size=4, **settings)
    index = rb.extend(steps(0, N)) if storage != "tensors" else rb.extend(steps(0, N).set("index", torch.arange(N)))
    return rb, index, rb.writer.generations_of(index)


@pytest.fixture(autouse=True)
def with_an_index(monkeypatch):
    """Tensors that exist have a place for the index only if it is among them."""
    monkeypatch.setitem(
        STORAGES, "tensors", lambda: TensorStorage(steps(-N, 0).set("index", torch.zeros(N, dtype=torch.int64)))
    )


def column(rb, key):
    return [rb[i][key].item() for i in range(len(rb))]


@storages
@pytest.mark.parametrize("form", ["dict", "keys", "TensorDict"])
def test_entries_of_a_patch_are_written_and_all_others_stay(storage, form):
    rb, index, generation = filled(storage)
    value = torch.full((2, 1), 70.0)
    patch = {
        "dict": {"next": {"value": value}},
        "keys": {("next", "value"): value},
        "TensorDict": TensorDict({"next": {"value": value}}, [2]),
    }[form]
    result = rb.update_if_present(index=index[[3, 5]], generation=generation[[3, 5]], patch=patch)
    assert (result.applied, result.updated.tolist()) == (2, [True, True])
    assert column(rb, ("next", "value")) == [0, 1, 2, 70, 4, 70, 6, 7, 8, 9]
    assert column(rb, "n") == column(rb, ("next", "seen")) == column(rb, "index") == list(range(N))
    assert rb.writer.generations_of(index).tolist() == generation.tolist()


@storages
def test_a_step_that_took_the_place_of_another_is_never_patched(storage):
    rb, index, generation = filled(storage)
    rb.extend(steps(100, 104) if storage != "tensors" else steps(100, 104).set("index", torch.zeros(4).long()))
    result = rb.update_if_present(index=index, generation=generation, patch={("next", "value"): torch.ones(N, 1) * 7})
    assert result.stale.tolist() == [True] * 4 + [False] * 6 and (result.stale_count, result.updated_count) == (4, 6)
    assert column(rb, ("next", "value")) == [100, 101, 102, 103] + [7] * 6


@storages
def test_a_patch_that_does_not_fit_is_refused_and_changes_nothing(storage):
    rb, index, generation = filled(storage)
    before, one = [rb[i] for i in range(N)], torch.ones(1, 1)
    for patch, error, words in (
        ({"other": one}, KeyError, "no 'other'"),
        ({"n": torch.ones(1)}, ValueError, "'n' .*float32"),
        ({"n": torch.ones(1, 3, dtype=torch.int64)}, ValueError, "'n' .*3"),
        ({("next", "value"): torch.ones(2, 1)}, ValueError, "2"),
        ({"n": index[:1], "other": one}, KeyError, "no 'other'"),
        ({"version": one.int()}, ValueError, "version_key 'version' may not be in the patch"),
    ):
        with pytest.raises(error, match=words):
            rb.update_if_present(
                index=index[:1], generation=generation[:1], patch=patch, version_key="version", version=3
            )
    for lone in ({"version": 3}, {"version_key": "version"}):
        with pytest.raises(ValueError, match="must be given together"):
            rb.update_if_present(index=index[:1], generation=generation[:1], patch={"n": index[:1]}, **lone)
    with pytest.raises(ValueError, match="does not fit"):  # int32
        rb.update_if_present(
            index=index[:1], generation=generation[:1], patch={"n": index[:1]}, version_key="version", version=1 << 40
        )
    with pytest.raises(KeyError, match="'age'"):
        rb.update_if_present(
            index=index[:1], generation=generation[:1], patch={"n": index[:1]}, version_key="age", version=1
        )
    with pytest.raises(ValueError, match="versions are numbers with an order"):
        rb.update_if_present(
            index=index[:1], generation=generation[:1], patch={"n": index[:1]}, version_key="version", version=1j
        )
    assert all((rb[i] == before[i]).all() for i in range(N))


def test_a_patch_is_checked_where_no_step_is_left_too():
    rb, index, _ = filled("rows")
    for patch in ({"other": torch.ones(N)}, {"n": torch.ones(N)}, {"n": torch.ones(3).long()}):
        with pytest.raises((KeyError, ValueError)):
            rb.update_if_present(index=index, generation=index * 0 + 77, patch=patch)


@storages
def test_an_older_version_is_rejected_and_a_newer_one_is_written_with_the_patch(storage):
    rb, index, generation = filled(storage)

    def update(version, **more):
        patch = {"n": index * 0 + int(torch.as_tensor(version).max())}
        result = rb.update_if_present(
            index=index, generation=generation, patch=patch, version_key="version", version=version, **more
        )
        return result.updated.tolist()

    assert all(update(3)) and column(rb, "version") == [3] * N
    assert not any(update(2)) and column(rb, "n") == [3] * N
    assert all(update(3)) and not any(update(3, require_newer=True))
    versions = torch.tensor([4, 1] * 5)
    assert update(versions, require_newer=True) == [True, False] * 5
    assert column(rb, "version") == [4, 3] * 5 == column(rb, "n")
    assert update([5, 1] * 5) == [True, False] * 5 and column(rb, "version") == [5, 3] * 5


@storages
def test_of_records_for_one_step_each_sees_what_the_one_before_left(storage):
    rb, index, generation = filled(storage)
    same = index[[2, 2, 2, 2, 4]]
    result = rb.update_if_present(
        index=same, generation=generation[[2, 2, 2, 2, 4]], patch={"n": torch.tensor([10, 20, 30, 40, 50])},
        version_key="version", version=torch.tensor([5, 4, 7, 7, 1]), require_newer=True,
    )  # fmt: skip
    assert result.updated.tolist() == [True, False, True, False, True]
    assert result.rejected.tolist() == [False, True, False, True, False] and result.version_rejected_count == 2
    assert (rb[2]["n"], rb[2]["version"], rb[4]["n"]) == (30, 7, 50)
    plain = rb.update_if_present(index=same, generation=generation[same], patch={"n": torch.arange(5)})
    assert plain.applied == 5 and (rb[2]["n"], rb[4]["n"]) == (3, 4)


def test_every_record_is_in_one_mask():
    rb, index, generation = filled("rows")
    rb.extend(steps(50, 53))
    version = torch.tensor([-1, 1] * 5)
    result = rb.update_if_present(
        index=index, generation=generation, patch={"n": index + 90}, version_key="version", version=version
    )
    masks = torch.stack([result.updated, result.stale, result.rejected])
    assert masks.sum(0).tolist() == [1] * N and masks.sum(1).tolist() == [4, 3, 3] == [
        result.applied, result.stale_count, result.version_rejected_count,
    ]  # fmt: skip


def test_row_refused_by_the_writer_is_stale():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter(rank_key="n"))
    index = rb.extend(steps(3, 6).flip(0))
    assert index.tolist() == [0, 1, -1]
    generation = rb.writer.generations_of(index)
    assert generation.tolist() == [0, 1, -1]
    result = rb.update_if_present(index=index, generation=generation, patch={("next", "seen"): index.short()})
    assert result.stale.tolist() == [False, False, True]


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_steps_of_environments_are_known_by_both_numbers(storage):
    rb = TensorDictReplayBuffer(storage=storage(12, ndim=2), batch_size=4)
    index = rb.extend(TensorDict({"n": torch.arange(12).view(3, 4)}, [3, 4]))
    generation = rb.writer.generations_of(index)
    assert generation.shape == (12,) and torch.equal(generation, rb.writer.generations_of(tuple(index.unbind(-1))))
    assert rb.writer.generations_of(index.view(3, 4, 2)).shape == (3, 4)
    rb.extend(TensorDict({"n": torch.arange(20, 23).view(3, 1)}, [3, 1]))
    result = rb.update_if_present(index=index, generation=generation, patch={"n": torch.arange(12) + 50})
    assert result.stale.sum() == 3 and sorted(rb[:]["n"].flatten().tolist()) == [20, 21, 22, *range(53, 62)]


@tensorclass
class Step:
    n: torch.Tensor
    value: torch.Tensor


@each("storage", ["list", "rows", "mapped"])
def test_steps_of_a_class_keep_it(storage):
    rb = ReplayBuffer(storage=STORAGES[storage]())
    index = rb.extend(Step(n=torch.arange(3), value=torch.zeros(3), batch_size=[3]))
    rb.update_if_present(index=index, generation=rb.writer.generations_of(index), patch={"value": torch.arange(3.0)})
    assert [(type(rb[i]), rb[i].n.item(), rb[i].value.item()) for i in range(3)] == [(Step, i, i) for i in range(3)]


def test_dicts_with_tuples_in_them_are_patched_too():
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    index = rb.extend({"pair": (torch.zeros(3), torch.arange(3)), "n": torch.arange(3)})
    rb.update_if_present(index=index[1:], generation=np.array([1, 2]), patch={"n": torch.tensor([7, 8])})
    assert rb[:]["n"].tolist() == [0, 7, 8] and rb[:]["pair"][1].tolist() == [0, 1, 2]


@each("on", ["buffer", "writer", "buffer, then another writer"])
def test_tracking_is_one_switch_wherever_it_is(on):
    writer = TensorDictRoundRobinWriter(track_generations=on == "writer")
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(N), writer=writer, batch_size=6, track_generations=on != "writer"
    )
    if on == "buffer, then another writer":
        rb.set_writer(TensorDictRoundRobinWriter())
    assert rb.writer.tracks_generations
    rb.extend(steps(0, 13))
    batch, info = rb.sample(return_info=True)
    for one in (batch["generation"], batch["index_generation"], info["generation"], info["index_generation"]):
        assert torch.equal(one, batch["n"])
    assert all("index_generation" in next(iter(rb)).keys() for _ in range(2))


def test_without_the_switch_batches_say_no_generations_and_the_writer_knows_them():
    rb, _, generation = filled("rows")
    assert not rb.writer.tracks_generations and "generation" not in rb.sample().keys()
    assert "index_generation" not in rb.sample(return_info=True)[1] and generation.tolist() == list(range(N))


def test_members_of_an_ensemble_say_generations_under_both_names():
    members = [
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(N), writer=TensorDictRoundRobinWriter(track_generations=True), batch_size=4
        )
        for _ in range(2)
    ]
    for member in members:
        member.extend(steps(0, 13))
    both = ReplayBufferEnsemble(*members, batch_size=8, track_generations=True)
    batch, info = both.sample(return_info=True)
    assert torch.equal(batch["index_generation"], batch["n"]) and torch.equal(info["index_generation"], batch["n"])
    with pytest.raises(RuntimeError, match="writer of a member"):
        both.writer.generations_of(0)


def test_generations_have_the_shape_of_the_index():
    writer = RoundRobinWriter()
    with pytest.raises(RuntimeError, match="no storage"):
        writer.generations_of(0)
    rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=writer)
    assert writer.generations_of([0, 3]).tolist() == [-1, -1]
    rb.extend(torch.arange(6))
    assert writer.generations_of(1) == 5 and writer.generations_of(1).shape == ()
    assert writer.generations_of(torch.tensor([[0, 1], [2, -1]])).tolist() == [[4, 5], [2, -1]]
    with pytest.raises(IndexError):
        writer.generations_of(4)


def test_beside_a_thread_that_writes_no_other_step_is_ever_patched():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(N), batch_size=4, track_generations=True)
    rb.extend(steps(0, N))
    stop = threading.Event()

    def write():
        at = N
        while not stop.is_set():
            rb.extend(steps(at, at + 3))
            at += 3

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(200):
            batch = rb.sample()
            rb.update_if_present(
                index=batch["index"],
                generation=batch["generation"],
                patch={("next", "value"): -batch["n"].float()[:, None]},
            )
            if random.random() < 0.1:
                rows = rb[:]
                assert torch.equal(rows["next", "value"].abs().flatten(), rows["n"].float())
    finally:
        stop.set()
        thread.join()
    rows = rb[:]
    assert torch.equal(rows["next", "value"].abs().flatten(), rows["n"].float())
