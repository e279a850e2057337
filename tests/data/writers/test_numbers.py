"""Numbers of rows that were replaced out of turn: once given, one never means another row of its slot."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
)

STORAGES: dict[str, Callable[[int, Path], Any]] = {
    "list": lambda n, path: ListStorage(n),
    "memory": lambda n, path: LazyTensorStorage(n),
    "mapped": lambda n, path: LazyMemmapStorage(n, scratch_dir=path),
}


def ranked(*ranks: float) -> TensorDict:
    return TensorDict({"rank": torch.tensor(ranks, dtype=torch.float32)}, [len(ranks)])


def best(storage: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(rank_key="rank"))


def numbers(rb: ReplayBuffer) -> Any:
    return rb.storage.lanes.generations(torch.arange(len(rb))).tolist()


@pytest.fixture(params=STORAGES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    names = iter("abcdefgh")
    return lambda n=4: STORAGES[request.param](n, tmp_path / next(names))


@pytest.fixture
def replaced(make: Any) -> tuple[ReplayBuffer, list[int]]:
    """A buffer in which slots 0 and 2 were replaced, by a writer that is not there any more; the numbers before."""
    rb = best(make())
    rb.extend(ranked(0, 5, 1, 6))
    before = numbers(rb)
    rb.extend(ranked(7, 8))
    rb.set_writer(TensorDictRoundRobinWriter())
    return rb, before


def move(rb: ReplayBuffer, twin: ReplayBuffer, way: str, path: Path) -> None:
    if way == "dumps":
        rb.dumps(path)
        twin.loads(path)
    elif way == "the storage's part":
        rb.dumps(path)
        twin.loads(path, parts=("storage",))
    elif way == "the storage's dumps":
        rb.storage.dumps(path)
        twin.storage.loads(path)
    elif way == "background":
        handle = rb.dumps(path, blocking=False)
        assert handle is not None and handle.result()
        twin.loads(path)
    elif way == "state_dict":
        twin.load_state_dict(rb.state_dict())
    else:
        twin.storage.load_state_dict(rb.storage.state_dict())


WAYS = ["dumps", "the storage's part", "the storage's dumps", "background", "state_dict", "the storage's state_dict"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_they_are_the_storages_and_move_with_the_rows(
    replaced: Any, make: Any, way: str, used: bool, tmp_path: Path
) -> None:
    rb, before = replaced
    twin = best(make())
    if used:
        twin.extend(ranked(*range(40)))
    twin.set_writer(TensorDictRoundRobinWriter())
    move(rb, twin, way, tmp_path / "saved")
    assert numbers(twin) == numbers(rb)
    done = twin.update_if_present(torch.arange(4), torch.tensor(before), ranked(9, 9, 9, 9))
    assert done.tolist() == [False, True, False, True]


@pytest.mark.parametrize("way", WAYS)
def test_they_go_on_where_they_stopped(replaced: Any, make: Any, way: str, tmp_path: Path) -> None:
    rb, _ = replaced
    twin = best(make())
    twin.set_writer(TensorDictRoundRobinWriter())
    move(rb, twin, way, tmp_path / "saved")
    for one in (rb, twin):
        one.set_writer(TensorDictMaxValueWriter(rank_key="rank"))
        one.extend(ranked(10, 11, 12))
        assert len(set(numbers(one))) == 4
    assert numbers(twin) == numbers(rb)


@pytest.mark.parametrize("way", WAYS)
def test_a_larger_storage_has_them_too(replaced: Any, make: Any, way: str, tmp_path: Path) -> None:
    rb, before = replaced
    larger = best(make(9))
    larger.set_writer(TensorDictRoundRobinWriter())
    move(rb, larger, way, tmp_path / "saved")
    assert numbers(larger) == numbers(rb)
    done = larger.update_if_present(torch.arange(4), torch.tensor(before), ranked(9, 9, 9, 9))
    assert done.tolist() == [False, True, False, True]


class TestOfAStoreThatIsReopened:
    @pytest.fixture
    def store(self, tmp_path: Path) -> tuple[Path, list[int], list[int]]:
        """A folder, and the numbers before and after two rows were replaced."""
        rb = best(LazyMemmapStorage(4, scratch_dir=tmp_path / "store"))
        rb.extend(ranked(0, 5, 1, 6))
        before = numbers(rb)
        rb.extend(ranked(7, 8))
        after = numbers(rb)
        rb.dumps(tmp_path / "saved")
        shutil.copytree(tmp_path / "store", tmp_path / "killed")
        rb.storage.close()
        return tmp_path, before, after

    @pytest.mark.parametrize("how", ["store", "killed"])
    def test_no_number_of_before_is_valid(self, store: Any, how: str) -> None:
        path, before, after = store
        rb = ReplayBuffer.open(path / how, writer=TensorDictRoundRobinWriter())
        assert not set(numbers(rb)) & {*before, *after}
        assert not rb.update_if_present(torch.arange(4), torch.tensor(before), ranked(9, 9, 9, 9)).any()

    def test_no_number_is_given_twice_however_often_it_is_opened(self, store: Any) -> None:
        path, before, after = store
        seen = {*enumerate(before), *enumerate(after)}
        for k in range(4):
            rb = ReplayBuffer.open(path / "store", writer=TensorDictMaxValueWriter(rank_key="rank"))
            now = set(enumerate(numbers(rb)))
            assert not now & seen
            seen |= now
            if k % 2:
                rb.extend(ranked(20.0 + k))
            else:
                rb.set_writer(TensorDictRoundRobinWriter())
                rb.extend(ranked(30.0 + k))
            assert len(set(numbers(rb))) == 4
            new = set(enumerate(numbers(rb))) - now
            assert len(new) == 1 and not new & seen
            seen |= new
            rb.storage.close()

    def test_a_checkpoint_of_the_other_parts_brings_them_back(self, store: Any) -> None:
        path, _, after = store
        rb = best(LazyMemmapStorage.open(path / "store"))
        rb.loads(path / "saved", parts=("sampler", "writer", "generator"))
        assert numbers(rb) == after

    def test_rows_appended_after_that_checkpoint_have_the_rings(self, store: Any) -> None:
        path, _, after = store
        rb = ReplayBuffer.open(path / "store", writer=TensorDictRoundRobinWriter())
        rb.extend(ranked(50.0))
        ring = numbers(rb)[0]
        rb.set_writer(TensorDictMaxValueWriter(rank_key="rank"))
        rb.loads(path / "saved", parts=("sampler", "writer", "generator"))
        assert numbers(rb) == [ring, *after[1:]]

    def test_a_checkpoint_from_before_other_replacements_does_not(self, store: Any) -> None:
        path, before, after = store
        rb = best(LazyMemmapStorage.open(path / "store"))
        rb.extend(ranked(60.0))
        rb.storage.close()
        rb = best(LazyMemmapStorage.open(path / "store"))
        rb.loads(path / "saved", parts=("sampler", "writer", "generator"))
        assert not set(numbers(rb)) & {*before, *after}

    def test_a_kill_between_the_row_and_its_number_is_no_harm(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rb = best(LazyMemmapStorage(2, scratch_dir=tmp_path / "store"))
        rb.extend(ranked(0, 1))
        before = numbers(rb)
        lanes = rb.storage.lanes
        assert lanes is not None
        monkeypatch.setattr(lanes, "note_replaced", lambda slots: None)
        rb.extend(ranked(5))
        shutil.copytree(tmp_path / "store", tmp_path / "killed")
        again = ReplayBuffer.open(tmp_path / "killed")
        assert not set(numbers(again)) & set(before)
