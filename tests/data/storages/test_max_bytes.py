"""Storages whose size is given in bytes."""

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram._system import parse_bytes
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.errors import StorageError

SIZES = {"8GB": 8 * 10**9, "512 MiB": 512 << 20, "1.5kb": 1500, "3 B": 3, "0.1TB": 10**11, " 2TiB ": 2 << 40, 77: 77}
MAKE = {
    "memory": lambda path, **kw: LazyTensorStorage(**kw),
    "shared": lambda path, **kw: LazyTensorStorage(shared=True, **kw),
    "temporary file": lambda path, **kw: LazyMemmapStorage(**kw),
    "named file": lambda path, **kw: LazyMemmapStorage(scratch_dir=path / "store", **kw),
}


def rows(n: int) -> TensorDict:
    return TensorDict({"x": torch.arange(3.0 * n).reshape(n, 3), "y": torch.arange(n)}, [n])


@each("text", SIZES)
def test_sizes_are_read_as_people_write_them(text):
    assert parse_bytes(text, "max_bytes") == SIZES[text]


@each("bad", ["8", "GB", "-1GB", "8 GBit", "", 0, "0GB", True, 1.5, None, "1e3MB"])
def test_invalid_size_is_refused_by_name(bad):
    with pytest.raises((ValueError, TypeError), match="max_bytes"):
        parse_bytes(bad, "max_bytes")


@each("kind", MAKE)
@each("nbytes", [200_000, 345_679, "1MB"])
def test_as_many_steps_fit_as_the_bytes_have_room_for(kind, nbytes, tmp_path):
    storage = MAKE[kind](tmp_path, max_bytes=nbytes)
    assert storage.max_size is None and len(storage) == 0
    rb = ReplayBuffer(storage=storage)
    rb.extend(rows(2))
    limit, capacity = parse_bytes(nbytes, "max_bytes"), storage.max_size
    assert storage.nbytes <= limit
    larger = MAKE[kind](tmp_path / "larger", max_size=capacity + 1)
    ReplayBuffer(storage=larger).extend(rows(2))
    assert larger.nbytes > limit
    rb.extend(rows(capacity + 5))
    assert len(rb) == capacity and storage._is_full


@each("kind", MAKE)
def test_a_size_below_one_step_is_refused_at_the_first_write(kind, tmp_path):
    rb = ReplayBuffer(storage=MAKE[kind](tmp_path, max_bytes=100))
    with pytest.raises(
        StorageError, match=r"max_bytes=100 is less than the \d+ bytes that a storage of one step needs"
    ):
        rb.extend(rows(2))
    assert len(rb) == 0


@pytest.mark.parametrize("cls", [LazyTensorStorage, LazyMemmapStorage])
def test_exactly_one_size_is_given(cls):
    with pytest.raises(ValueError, match="give one of them"):
        cls(100, max_bytes="1MB")
    with pytest.raises(ValueError, match="max_bytes"):
        cls()
    with pytest.raises(ValueError, match="give one of them"):
        ReplayBuffer(100, storage=cls(max_bytes="1MB"))


@each("kind", ["memory", "temporary file", "named file"])
@each("written", [0, 20])
def test_copies_have_as_much_room_and_equal_rows(kind, written, tmp_path):
    rb = TensorDictReplayBuffer(storage=MAKE[kind](tmp_path, max_bytes="200KB"))
    if written:
        rb.extend(rows(written))
    twins = [copy.deepcopy(rb)] + ([pickle.loads(pickle.dumps(rb))] if kind != "named file" else [])
    assert [len(twin) for twin in twins] == [written] * len(twins)
    for buffer in (rb, *twins):
        buffer.extend(rows(9000))
    for twin in twins if written else []:
        assert twin.storage.max_size == rb.storage.max_size and bool((twin[:] == rb[:]).all())


def test_a_checkpoint_goes_into_a_storage_with_as_many_bytes(tmp_path):
    rb, twin, small = (TensorDictReplayBuffer(storage=LazyTensorStorage(max_bytes=n)) for n in (90_000, 90_000, 85_000))
    rb.extend(rows(9000))
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    assert bool((twin[:] == rb[:]).all())
    with pytest.raises(ValueError, match="room for"):
        small.loads(tmp_path)


def test_a_named_store_is_opened_again_with_the_same_size_only(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(max_bytes="1MB", scratch_dir=tmp_path, lanes=2))
    rb.extend(rows(5))
    capacity = rb.storage.max_size
    rb.storage.close()
    again = LazyMemmapStorage(max_bytes="1MB", scratch_dir=tmp_path, existsok=True, lanes=2)
    assert (len(again), again.max_size) == (5, capacity)
    again.close()
    with pytest.raises(StorageError, match="max_bytes=2000000 was asked for"):
        LazyMemmapStorage(max_bytes="2MB", scratch_dir=tmp_path, existsok=True, lanes=2)
    with pytest.raises(StorageError, match=r"lanes=\d+, lanes=1 was asked for"):
        LazyMemmapStorage(max_bytes="1MB", scratch_dir=tmp_path, existsok=True)


def test_environments_priorities_and_the_best_count_with_their_bytes():
    grid = ReplayBuffer(storage=LazyTensorStorage(max_bytes=90_000, ndim=2))
    grid.extend(torch.zeros(3, 4, 5))
    assert grid.storage.nbytes <= 90_000 and grid.storage.max_size % 3 == 0
    drawn = TensorDictReplayBuffer(
        storage=LazyTensorStorage(max_bytes=90_000), sampler=PrioritizedSampler(10, 0.7, 0.5)
    )
    drawn.extend(rows(10))
    with pytest.raises(ValueError, match="max_capacity=10"):
        drawn.extend(rows(1))
    best = TensorDictReplayBuffer(
        storage=LazyTensorStorage(max_bytes=90_000), writer=TensorDictMaxValueWriter(rank_key="y")
    )
    best.extend(rows(9000))
    assert best.storage.nbytes <= 90_000 and len(best) == best.storage.max_size
    assert best[:]["y"].sort().values[0] == 9000 - len(best)
