"""Checkpointers of a user's that write a storage to a path, and read it there, in their own `dumps` and `loads`."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import engram
from contracts.corruption import NASTY, Forger, exchanged, places, without
from contracts.each import each
from contracts.pairwise import pairwise_product
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    StorageCheckpointerBase,
    StorageEnsemble,
    TensorDictReplayBuffer,
)
from engram.errors import CheckpointError, CheckpointMisfitError, CorruptCheckpointError

ROOM = 20
STORAGES: dict[str, Callable[[int], Any]] = {
    "tensors": LazyTensorStorage,
    "compact": lambda n: LazyTensorStorage(n, compact=True),
    "mapped": LazyMemmapStorage,
    "list": ListStorage,
}


class Slots(StorageCheckpointerBase):
    """A folder with what is in the slots, filled in slot by slot."""

    def dumps(self, storage: Any, path: Path) -> None:
        path.mkdir()
        (path / "parts").mkdir()
        torch.save(storage.get(slice(None)), path / "parts" / "rows.pt")
        (path / "count.txt").write_text(str(len(storage.get(slice(None)))))

    def loads(self, storage: Any, path: Path) -> None:
        rows = torch.load(path / "parts" / "rows.pt", weights_only=False)
        assert int((path / "count.txt").read_text()) == len(rows)
        storage.set(range(len(rows)), rows)


class State(StorageCheckpointerBase):
    """One file with the storage's state."""

    def __init__(self) -> None:  # as programs have it that do not call the parent's
        self.saves = 0

    def dumps(self, storage: Any, path: Path) -> None:
        torch.save(storage.state_dict(), path)
        self.saves += 1

    def loads(self, storage: Any, path: Path) -> None:
        storage.load_state_dict(torch.load(path, weights_only=False))


def buffer(storage: Any, checkpointer: Any = None) -> TensorDictReplayBuffer:
    storage.checkpointer = checkpointer
    return TensorDictReplayBuffer(storage=storage, batch_size=4, sampler=PrioritizedSampler(50, 0.6, 0.4))


def step(i: int) -> TensorDict:
    return TensorDict({"obs": torch.tensor([i]), "next": {"obs": torch.tensor([i + 1])}}, [])


def written(rb: TensorDictReplayBuffer, n: int) -> TensorDictReplayBuffer:
    """With steps of which each has another priority, and a seam after the third and the third last."""
    for i in range(n):
        rb.add(step(i))
        if i in (2, n - 3):
            rb.storage.mark_seam()
    rb.update_priority(torch.arange(len(rb)), 1.0 + torch.arange(len(rb)))
    return rb


def content(rb: TensorDictReplayBuffer) -> Any:
    rows = rb.storage.get(range(len(rb)))
    steps = [int(row["obs"]) for row in rows] if isinstance(rows, list) else rows["obs"].flatten().tolist()
    (lane,) = rb.storage.state_dict()["counters"]["lanes"]
    return steps, lane, str(rb.sampler.state_dict()["priorities"])


LOADS = (STORAGES, [Slots, State], [1, 5, ROOM, 33, 2 * ROOM], [ROOM, 50])


@each(("storage", "own", "n", "room"), pairwise_product(*LOADS))
def test_a_load_gives_what_our_own_checkpointers_give(
    tmp_path: Path, storage: str, own: type[Any], n: int, room: int
) -> None:
    assert_equal_loads(tmp_path, storage, own, n, room)


@pytest.mark.deep
@each(("storage", "own", "n", "room"), product(*LOADS))
def test_a_load_of_any_combination_gives_what_our_own_checkpointers_give(
    tmp_path: Path, storage: str, own: type[Any], n: int, room: int
) -> None:
    assert_equal_loads(tmp_path, storage, own, n, room)


def assert_equal_loads(tmp_path: Path, storage: str, own: type[Any], n: int, room: int) -> None:
    found = []
    for made, place in ((own, "own"), (lambda: None, "ours")):
        written(buffer(STORAGES[storage](ROOM), made()), n).dumps(tmp_path / place)
        twin = buffer(STORAGES[storage](room), made())
        for _ in range(2):  # into an empty storage, and over rows
            twin.loads(tmp_path / place)
            found.append(content(twin))
            twin.extend(torch.stack([step(100 + i) for i in range(3)]))
            found.append(content(twin)[:2])
        assert engram.verify(tmp_path / place).ok
    assert found[:4] == found[4:] and found[:2] == found[2:4]


@pytest.mark.deep
@each("own", [Slots, State])
def test_a_forged_description_of_the_files_is_a_checkpoint_error_and_changes_nothing(
    tmp_path: Path, own: type[Any]
) -> None:
    written(buffer(LazyTensorStorage(ROOM), own()), 33).dumps(tmp_path)
    forger = Forger(tmp_path)
    body, refused = forger.document["body"], 0
    for at in places(body["storage"], ()):
        for value in [*NASTY, KeyError]:
            made = without(body["storage"], at) if value is KeyError else exchanged(body["storage"], at, value)
            forger.write({**forger.document, "body": {**body, "storage": made}})
            rb = written(buffer(LazyTensorStorage(ROOM), own()), 4)
            try:
                rb.loads(tmp_path)
            except CheckpointError:
                refused += 1
                assert len(rb) == 4
    assert refused > 100


def test_files_that_were_changed_are_found_before_they_are_read(tmp_path: Path) -> None:
    rb = written(buffer(LazyTensorStorage(ROOM), Slots()), 9)
    rb.dumps(tmp_path)
    file = tmp_path / "g-000001" / "storage" / "own" / "count.txt"
    os.chmod(file, 0o644)
    file.write_text("3")
    with pytest.raises(CorruptCheckpointError, match=r"count\.txt"):
        rb.loads(tmp_path)
    assert len(rb) == 9


def test_a_load_that_fails_changes_nothing(tmp_path: Path) -> None:
    class Fails(Slots):
        def loads(self, storage: Any, path: Path) -> None:
            super().loads(storage, path)
            raise RuntimeError("half done")

    written(buffer(LazyTensorStorage(ROOM), Slots()), 9).dumps(tmp_path)
    for n in (0, 13):
        rb = buffer(LazyTensorStorage(ROOM), Fails())
        rb = written(rb, n) if n else rb
        before = content(rb) if n else None
        with pytest.raises(RuntimeError, match="half done"):
            rb.loads(tmp_path)
        assert len(rb) == n and (content(rb) if n else None) == before


def test_members_of_an_ensemble_may_have_such_checkpointers(tmp_path: Path) -> None:
    def made(values: list[int]) -> StorageEnsemble:
        members = [LazyTensorStorage(9), LazyTensorStorage(9)]
        members[0].checkpointer = Slots()
        for member, value in zip(members, values, strict=True):
            member.set(range(3), torch.full((3,), value))
        return StorageEnsemble(*members)

    made([1, 2]).dumps(tmp_path)
    other = made([3, 4])
    other.loads(tmp_path)
    assert [member[:].tolist() for member in other.storages] == [[1] * 3, [2] * 3]


def test_slots_of_several_environments_are_not_put_into_some_order(tmp_path: Path) -> None:
    def written() -> ReplayBuffer:
        rb = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
        rb.storage.checkpointer = Slots()
        for first in (0, 8):
            rb.extend(torch.arange(first, first + 6).reshape(2, 3))
        return rb

    written().dumps(tmp_path)
    twin = written()
    with pytest.raises(CheckpointMisfitError, match="nothing says their order: save state_dict"):
        twin.loads(tmp_path)
    assert (twin[:] == written()[:]).all()


def test_it_does_not_save_in_the_background(tmp_path: Path) -> None:
    rb = written(buffer(LazyTensorStorage(ROOM), Slots()), 9)
    with pytest.raises(ValueError, match=r"dumps of Slots reads the storage itself.*blocking=True"):
        rb.dumps(tmp_path, blocking=False)


def test_hooks_that_nobody_calls_are_refused() -> None:
    storage = LazyTensorStorage(9)
    storage.checkpointer = Slots()
    for register in (storage.register_save_hook, storage.register_load_hook):
        with pytest.raises(ValueError, match="dumps and loads of Slots are its own, and call no hooks"):
            register(lambda rows: rows)


@each(
    "write, says",
    [
        (lambda path: None, "wrote no file"),
        (lambda path: path.mkdir(), "wrote no file"),
        (lambda path: os.symlink("/etc/hostname", path), "neither a file nor a folder"),
        (lambda path: (path.mkdir(), (path / "a b").write_text("x")), "own/a b: names consist of"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(tmp_path: Path, write: Callable[[Path], Any], says: str) -> None:
    class Writes(Slots):
        def dumps(self, storage: Any, path: Path) -> None:
            write(path)

    rb = written(buffer(LazyTensorStorage(ROOM), Writes()), 9)
    with pytest.raises(ValueError, match=says):
        rb.dumps(tmp_path)
    assert not (tmp_path / "CURRENT").exists()


def test_another_checkpointer_does_not_read_them(tmp_path: Path) -> None:
    written(buffer(LazyTensorStorage(ROOM), Slots()), 9).dumps(tmp_path)
    with pytest.raises(CheckpointMisfitError, match="saved as 'files', TensorStorageCheckpointer reads 'rows'"):
        buffer(LazyTensorStorage(ROOM)).loads(tmp_path)


def test_a_class_with_one_of_the_methods_is_no_checkpointer() -> None:
    class Half(StorageCheckpointerBase):
        def dumps(self, storage: Any, path: Path) -> None: ...

    with pytest.raises(TypeError, match=r"Half is no checkpointer: it has to define dumps\(storage, path\) and loads"):
        Half()
