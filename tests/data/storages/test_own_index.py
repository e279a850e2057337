"""The index that rows store of themselves: that of the slots that they get, however long before they were checked."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    Storage,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.store.layout import RowLayout
from native.core.support import store


def of_memory(**settings: Any) -> Callable[[], Storage]:
    return lambda: LazyTensorStorage(12, **settings)


def of_columns() -> Storage:
    return TensorStorage(TensorDict({"x": torch.zeros(12), "index": torch.arange(12)}, [12]))


def of_objects() -> Storage:
    """Whose items are no rows, as the first of them has no tensor."""
    storage = ListStorage(12)
    storage.append(storage.check({"x": "none"}, True, 0, "index"))
    return storage


STORAGES = [
    of_memory(),
    of_memory(shared=True),
    of_memory(shared=True, lanes=3),
    of_columns,
    lambda: LazyMemmapStorage(12),
    lambda: ListStorage(12),
    of_objects,
    lambda: CompressedListStorage(12),
]


def rows_at(storage: Storage, slots: torch.Tensor) -> Any:
    rows = storage.get(slots)
    return torch.stack([TensorDict(row) for row in rows]) if isinstance(rows, list) else rows


def numbers(*values: float) -> TensorDict:
    return TensorDict({"x": torch.tensor(values)}, [len(values)])


@each("make", STORAGES)
def test_steps_that_are_checked_before_others_are_appended_store_the_index_that_they_get(
    make: Callable[[], Storage],
) -> None:
    storage = make()
    storage.append(storage.check(numbers(0.0), False, 0, "index"))
    early, late = (storage.check(numbers(*x), False, 0, "index") for x in ([1.0, 2.0], [3.0, 4.0, 5.0]))
    slots = [storage.append(late), storage.append(early)]
    for at, x in zip(slots, ([3.0, 4.0, 5.0], [1.0, 2.0]), strict=True):
        rows = rows_at(storage, at)
        assert torch.equal(rows["index"], at) and rows["x"].tolist() == x


@each("envs", [(2,), (2, 3)])
def test_so_do_those_of_several_environments(envs: tuple[int, ...]) -> None:
    ndim = 1 + len(envs)
    storage = LazyTensorStorage(24, ndim=ndim, shared=True)

    def checked(first: int) -> Any:
        x = torch.arange(first, first + 2 * torch.Size(envs).numel()).reshape(*envs, 2)
        return storage.check(TensorDict({"x": x}, [*envs, 2]), False, ndim - 1, "index")

    early, late = checked(0), checked(100)
    storage.append(late), storage.append(early)
    rb = ReplayBuffer(storage=storage)
    for time, first in ((0, 100), (2, 0)):
        rows = rb[time : time + 2]
        assert rows["x"].min() == first and tuple(rows["index"].shape) == (*envs, 2, ndim)
        for *env, step in itertools.product(*map(range, (*envs, 2))):
            assert rows["index"][(*env, step)].tolist() == [time + step, *env]


@each("make", [of_memory(), of_columns, lambda: ListStorage(12), lambda: CompressedListStorage(12)])
def test_steps_that_replace_others_store_the_index_of_these(make: Callable[[], Storage]) -> None:
    storage = make()
    rb = TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(rank_key="x"))
    rb.extend(numbers(*map(float, range(1, 13))))
    checked = storage.check(numbers(50.0, 51.0), False, 0, "index")
    storage.replace(checked, torch.tensor([1, 0]), torch.tensor([7, 3]))
    rows = rows_at(storage, torch.tensor([3, 7]))
    assert rows["index"].tolist() == [3, 7] and rows["x"].tolist() == [50.0, 51.0]


@each("make", [of_memory(), of_columns, lambda: ListStorage(12)])
def test_a_step_that_replaces_several_others_stores_the_index_of_each(make: Callable[[], Storage]) -> None:
    storage = make()
    rb = TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(rank_key="x"))
    rb.extend(numbers(*map(float, range(1, 13))))
    checked = storage.check(numbers(50.0, 51.0), False, 0, "index")
    storage.replace(checked, torch.tensor([1, 0, 1]), torch.tensor([7, 3, 0]))
    rows = rows_at(storage, torch.tensor([0, 3, 7]))
    assert rows["index"].tolist() == [0, 3, 7] and rows["x"].tolist() == [51.0, 50.0, 51.0]


def test_an_index_of_other_environments_is_refused() -> None:
    layout = RowLayout.of({"x": torch.zeros(3), "index": torch.zeros(3, 2, dtype=torch.int64)}, 1)
    s, checked = store(layout.payload_bytes, 12), layout.codec.check({"x": torch.zeros(3)}, 1, 0, ("index", None))
    assert checked is not None
    with pytest.raises(ValueError, match="of other environments"):
        s.append(0, checked)
    assert s.lane(0)["published"] == 0


def test_environments_that_a_store_does_not_have_are_refused() -> None:
    s = store(8, 12, strands=6)
    for shape in ([5], [0], [2, 2], [], [2**32, 2**32, 6]):
        with pytest.raises(ValueError, match="not the environments"):
            s.env_shape = shape
    s.env_shape = [2, 3]
    assert list(s.env_shape) == [2, 3]
