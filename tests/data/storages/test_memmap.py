"""LazyMemmapStorage in one process; see test_processes, test_kill and test_space for the rest."""

import logging
import os
import pickle
import time

import pytest
import torch

from contracts.each import each
from data.storages.several_lanes import SeveralLanes
from engram.data import LazyMemmapStorage, ReplayBuffer, SamplerWithoutReplacement
from engram.errors import StorageError, StorageInUseError
from engram.testing import TableContract, env_steps, numbers, state_of, steps


class TestTemporaryFile(TableContract):
    settings = {"kind": "temporary file", "lanes": 1}

    def make(self, capacity, path):
        return LazyMemmapStorage(capacity)


class TestNamedFile(TableContract):
    settings = {"kind": "named file", "lanes": 1}
    fresh = False

    def make(self, capacity, path):
        return LazyMemmapStorage(capacity, scratch_dir=path)

    @pytest.mark.parametrize("sizes", [[4], [10], [7, 7], [25], [3, "empty", 4], [13, "empty", 2, 9]], ids=str)
    def test_a_reopened_store_is_as_it_was_left(self, rb, tmp_path, sizes):
        at = 0
        for n in sizes:
            if n == "empty":
                rb.empty()
            else:
                rb.extend(steps(at, at + n))
                at += n
        was = state_of(rb)
        rb.storage.close()
        again = ReplayBuffer.open(tmp_path / "store", batch_size=4)
        assert state_of(again) == was and again.storage.max_size == 10 and again.storage.dropped == 0
        more = ReplayBuffer(storage=LazyMemmapStorage(20))
        more.load_state_dict(again.state_dict())
        again.extend(steps(100, 104))
        more.extend(steps(100, 104))
        assert again.write_count == more.write_count == was[1] + 4


class TestNamedFileWithLanes(SeveralLanes, TestNamedFile):
    settings = {"kind": "named file", "lanes": "several"}

    def make(self, capacity, path):
        return LazyMemmapStorage(capacity, scratch_dir=path, lanes=2)

    def test_a_pickle_gives_the_rows_back(self, rb, storage):
        rb.extend(steps(0, 13))
        twin = ReplayBuffer(storage=pickle.loads(pickle.dumps(storage)))
        assert numbers(twin[:]) == numbers(rb[:]) and twin.write_count == 13
        assert (rb.writer._cursor, twin.writer._cursor) == (3, 4)  # two writers of one file, each in a lane

    def test_a_reopened_store_is_as_it_was_left(self, rb, tmp_path):
        rb.extend(steps(0, 7))
        rb.storage.close()
        again = ReplayBuffer.open(tmp_path / "store")
        assert len(again) == 7 and numbers(again[:]) == list(range(7)) and again.storage.max_size == 10


def test_a_temporary_file_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rb = ReplayBuffer(storage=LazyMemmapStorage(1000))
    rb.extend(steps(0, 3))
    assert list(tmp_path.iterdir()) == []
    path = os.readlink(f"/proc/self/fd/{rb.storage.lanes.locks.fd}")
    assert path.startswith(str(tmp_path)) and path.endswith("(deleted)")


def test_an_existing_store_is_never_overwritten_by_accident(tmp_path):
    ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path)).extend(steps(0, 3))
    with pytest.raises(StorageError, match=r"existsok=True"):
        LazyMemmapStorage(10, scratch_dir=tmp_path)
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path, existsok=True))
    assert numbers(rb[:]) == [0, 1, 2]


@pytest.mark.parametrize(
    "settings, said", [({"max_size": 20}, "20"), ({"ndim": 2}, "ndim=2"), ({"lanes": 2}, "lanes=2")]
)
def test_a_store_of_other_settings_is_not_opened(tmp_path, settings, said):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    rb.extend(steps(0, 3))
    with pytest.raises(StorageError, match=said):
        LazyMemmapStorage(**{"max_size": 10, **settings}, scratch_dir=tmp_path, existsok=True)
    rb.empty()  # the refused one no longer has the store open


def test_opening_says_what_is_wrong(tmp_path):
    with pytest.raises(StorageError, match="no store"):
        LazyMemmapStorage.open(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="no store"):
        ReplayBuffer.open(tmp_path)
    with pytest.raises(ValueError, match="max_size"):
        LazyMemmapStorage(None)


@each("damage", [b"", b"x", b"x" * 5000, "cut", "header", "layout"])
def test_a_damaged_file_is_refused_and_not_changed(tmp_path, damage):
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path)
    ReplayBuffer(storage=storage).extend(steps(0, 3))
    storage.close()
    file = tmp_path / "rows.engram"
    whole = file.read_bytes()
    at = whole.index(b'"leaves"')
    damaged = {
        "cut": whole[:-4096],
        "header": whole[:24] + b"\xff" + whole[25:],
        "layout": whole[:at] + b"#leaves#" + whole[at + 8 :],
    }
    bad = damaged[damage] if isinstance(damage, str) else damage
    file.write_bytes(bad)
    with pytest.raises(StorageError, match=r"rows\.engram"):
        LazyMemmapStorage.open(tmp_path)
    assert file.read_bytes() == bad
    file.write_bytes(whole)
    assert len(LazyMemmapStorage.open(tmp_path)) == 3


def test_making_a_store_logs_where_it_is(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "engram"):
        ReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=tmp_path / "a" / "b")).extend(steps(0, 3))
    assert str(tmp_path / "a" / "b") in caplog.text and "1000 steps" in caplog.text and "KB" in caplog.text


def test_a_second_object_in_the_same_process_sees_the_same_rows(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    rb.extend(steps(0, 3))
    other = ReplayBuffer.open(tmp_path)
    rb.extend(steps(3, 5))
    assert numbers(other[:]) == [0, 1, 2, 3, 4]
    with pytest.raises(StorageInUseError):
        rb.empty()
    other.storage.close()
    rb.empty()


def test_a_buffer_that_is_dropped_gives_its_store_back_without_a_garbage_collection(tmp_path):
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(10, scratch_dir=tmp_path), sampler=SamplerWithoutReplacement(), prefetch=2
    )
    rb.extend(steps(0, 3))
    rb.sample(2)
    del rb
    again, until = ReplayBuffer.open(tmp_path), time.monotonic() + 100
    while True:
        try:
            again[0] = steps(7, 8)[0]
            break
        except StorageInUseError:  # a thread is still reading the batch after that one
            assert time.monotonic() < until
            time.sleep(0.001)
    assert numbers(again[:]) == [7, 1, 2]


def test_after_close_the_next_write_opens_a_named_store_again(tmp_path):
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path)
    rb = ReplayBuffer(storage=storage)
    rb.extend(steps(0, 3))
    storage.close()
    storage.close()
    assert len(rb) == 0
    rb.extend(steps(3, 5))
    assert numbers(rb[:]) == [0, 1, 2, 3, 4]


def test_a_reopened_store_of_environments_keeps_their_shape(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path, ndim=2))
    rb.extend(env_steps(3, 0, 40))
    rb.storage.close()
    again = ReplayBuffer.open(tmp_path)
    assert again.storage.ndim == 2 and again.storage.max_size == 102 and again[:].shape == (3, 34)
    assert state_of(again)[1:3] == (120, 6)
    again.extend(env_steps(3, 40, 42))
    assert numbers(again[6]) == [40, 1040, 2040]


def test_flush_costs_nothing_but_time(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    rb.storage.flush()
    rb.extend(steps(0, 3))
    rb.storage.flush()
    assert rb.storage.lanes.states()[0]["durable"] == 3
    assert torch.equal(rb[:]["n"], torch.arange(3))


def test_a_store_that_is_only_changed_is_not_clean_before_it_is_closed(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    rb.extend(torch.arange(5))
    rb.storage.close()
    again = LazyMemmapStorage.open(tmp_path)
    assert again.lanes.store.clean
    again[2] = torch.tensor(7)
    assert not again.lanes.store.clean
    again.close()
    reopened = LazyMemmapStorage.open(tmp_path)
    assert reopened.lanes.store.clean
    assert reopened[2] == 7
