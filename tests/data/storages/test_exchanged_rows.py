"""Rows of a table that are exchanged while somebody writes or reads: for room for their sequences, or by `close`."""

import copy
import threading

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from contracts.waiting import is_taken
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
    Writer,
)


class OverTheFirst(Writer):
    """Writes each batch over the first rows, by `set` of the storage, as writers of TorchRL do."""

    def add(self, data):
        self._storage.set(0, data)
        return 0

    def extend(self, data):
        index = torch.arange(len(data))
        self._storage.set(index, data)
        return index

    def _empty(self):
        pass


def rows(*x):
    return TensorDict({"x": torch.tensor(x)}, [len(x)])


def room(n):
    return TensorStorage(TensorDict({}, [n]))


@each("make", [LazyTensorStorage, room])
def test_a_writer_replaces_rows_that_were_written_without_sequences(make):
    storage = make(5)
    ReplayBuffer(storage=storage).extend(rows(0, 1, 2))
    rb = ReplayBuffer(storage=storage, writer=OverTheFirst())
    rb.extend(rows(10, 11))
    rb.add(rows(20)[0])
    assert storage.get(range(3))["x"].tolist() == [20, 11, 2] and storage.write_count == 6


@pytest.mark.filterwarnings("ignore:compact=")
@each("make", [LazyTensorStorage, LazyMemmapStorage])
def test_rows_without_anything_to_store_once_are_replaced_in_place_and_copied(make):
    rb = ReplayBuffer(storage=make(5, compact=True), writer=OverTheFirst())
    for first in (0, 10, 20):
        rb.extend(rows(first, first + 1))
    twin = copy.deepcopy(rb)
    assert rb[:]["x"].tolist() == twin[:]["x"].tolist() == [20, 21]


def got_after(storage, change, index):
    """What a thread gets at an index that waits for the storage's mutex while this one changes it."""
    got, waits = [], threading.Event()

    class Mutex:
        """Tells that somebody comes to it."""

        def __enter__(self):
            waits.set()
            return storage.mutex.__enter__()

        def __exit__(self, *error):
            return storage.mutex.__exit__(*error)

    def get():
        try:
            got.append(storage.get(index)["x"].tolist())
        except IndexError as error:
            got.append(error)

    table = storage.access.table
    with storage.mutex:
        table.mutex = Mutex()
        reader = threading.Thread(target=get)
        reader.start()
        waits.wait()
        table.mutex = storage.mutex
        change()
    reader.join()
    return got[0]


def written(make, n):
    storage = make(n)
    ReplayBuffer(storage=storage).extend(rows(0, 1, 2))
    return storage


def test_a_get_that_waited_reads_the_rows_that_replaced_those_of_before():
    storage = written(LazyTensorStorage, 3)
    rb = TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(rank_key="x"))
    assert got_after(storage, lambda: rb.extend(rows(100)), range(3)) == [100, 1, 2]


def test_a_get_that_waited_finds_no_rows_of_a_storage_that_was_closed():
    storage = written(LazyMemmapStorage, 5)
    assert isinstance(got_after(storage, storage.close, range(3)), IndexError)
    storage = written(LazyMemmapStorage, 5)

    def close_and_write():
        storage.close()
        storage.append(storage.check(rows(50, 51), False))

    assert got_after(storage, close_and_write, range(2)) == [50, 51]


@each("make", [LazyTensorStorage, LazyMemmapStorage])
def test_no_other_thread_writes_while_one_has_the_rows_to_itself(make):
    storage = written(make, 5)
    with storage.access.exclusive("a test"):
        assert is_taken(storage.mutex)
    assert not is_taken(storage.mutex)
