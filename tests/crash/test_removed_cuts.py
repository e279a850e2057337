"""Power cuts around removed rows; of each moment everything that the disk may hold is opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from contracts.power import MappedFile
from crash import sessions, stores, tracer
from crash.test_certain_cuts import EVENTS, Machine, mapped
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictMaxValueWriter
from engram.store import files as recovery
from engram.store import places

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(not tracer.can_watch(), reason="stores are watched on x86-64 only"),
]
#: So many rows that their bits lie on another page than the counters.
CAPACITY = 20_480


@pytest.fixture(autouse=True)
def boots(monkeypatch):
    for module in (recovery, places):
        monkeypatch.setattr(module, "boot_id", module.boot_id)


def full(root: Path) -> Machine:
    """A machine with a full store, whose rows are all of edition 1 and on the disk."""
    machine = Machine(root, CAPACITY, 1)
    machine.shape["removes"] = 1
    one, rb = machine.user(1)
    rb.extend(one.batch(CAPACITY, CAPACITY))  # the store was emptied once
    rb.storage.close()
    return machine


def remove(rb: Any, *slots: int) -> None:
    where = torch.tensor(slots)
    with rb.storage.mutex:
        assert rb.storage.lanes.remove(where, rb.storage.lanes.store.generations(where)) == len(slots)


def only_hides(allowed: int) -> Callable[[list[int], Any], None]:
    """Checks that each removed row is of this edition."""

    def check(found: list[int], rb: Any) -> None:
        first = rb.storage.lanes.states()[0]["first"]
        for _, w, _ in sessions.removed_rows(rb, {"lanes": 1, "capacity": CAPACITY, "envs": 1}):
            assert found[w - first] == allowed, f"row {w} of edition {found[w - first]} is hidden: nobody removed it"

    return check


def writes_and_removes(machine: Machine) -> Callable[[], None]:
    def work() -> None:
        tracer.start()
        one, rb = machine.user(2)
        rb.extend(one.batch(2 * CAPACITY, 3))  # over three rows of edition 1
        for slot in (0, 1, 2):
            remove(rb, slot)

    return work


def test_bit_of_a_lost_row_does_not_hide_the_one_that_is_found_in_its_place(ram_path):
    machine = full(ram_path)
    assert machine.cuts(writes_and_removes(machine), only_hides(2)) > 10


def test_bit_of_an_overwritten_row_does_not_hide_the_one_in_its_place_and_flushed_ones_stay(ram_path):
    machine = full(ram_path)
    _, rb = machine.user(1)
    remove(rb, 0, 1, 9)
    rb.storage.close()

    def check(found: list[int], rb: Any) -> None:
        only_hides(1)(found, rb)
        assert rb.storage.lanes.store.removed(torch.tensor([9])) == [0]

    def work() -> None:
        tracer.start()
        one, rb = machine.user(2)
        for w in (2 * CAPACITY, 2 * CAPACITY + 1, 2 * CAPACITY + 2):
            rb.extend(one.batch(w, 1))

    assert machine.cuts(work, check) > 5


def test_bit_that_a_recovery_cleared_does_not_come_back_with_the_next_power_cut(ram_path):
    machine = full(ram_path)
    before = machine.file.read_bytes()
    tracer.run(writes_and_removes(machine), machine.file.parent)
    # Cut when everything but the rows had reached the disk.
    rows_at = int.from_bytes(before[264:272], "little")
    machine.file.write_bytes(machine.file.read_bytes()[:rows_at] + before[rows_at:])

    def opens() -> None:
        sessions._set_boot(5)
        tracer.start()
        one, rb = machine.user(3)
        rb.extend(one.batch(2 * CAPACITY, 1))
        one.say({"written": True})
        rb.extend(one.batch(2 * CAPACITY + 1, 1))

    assert machine.cuts(opens, only_hides(2)) > 5


def test_bits_that_a_load_sets_do_not_hide_rows_from_before_it(ram_path):
    machine = full(ram_path)
    other = sessions.Sessions(machine.file.parent, ram_path / "log", machine.shape, 0, 7)
    saved = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    saved.extend(other.batch(0, 4))
    saved.remove(torch.tensor([1, 2]))
    saved.dumps(ram_path / "saved")

    def loads() -> None:
        tracer.start()
        _, rb = machine.user(2)
        rb.loads(ram_path / "saved")
        remove(rb, 3)

    assert machine.cuts(loads, only_hides(7)) > 5


# ---- rows that replace others out of turn ----
def best_of(folder: Path) -> Any:
    storage = LazyMemmapStorage(8, scratch_dir=folder, existsok=True)
    return ReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter("value"))


def ranked(*values: float) -> TensorDict:
    return TensorDict({"value": torch.tensor(values)}, [len(values)])


@pytest.fixture
def best(ram_path: Path) -> Path:
    """A store of the eight best rows, of which the worst one (0.0) was removed."""
    sessions._set_boot(1)
    rb = best_of(ram_path / "store")
    rb.extend(ranked(*map(float, range(8))))
    rb.remove(0)
    rb.storage.close()
    return ram_path


def replaces(root: Path) -> None:
    rb = best_of(root / "store")
    mapped(rb.storage.lanes.store)
    stores.watch(rb.storage.lanes.store, (stores.REDO, stores.EDITS, stores.REMOVED))
    tracer.start()
    rb.extend(ranked(50.0))
    rb.extend(ranked(60.0))


def check_best(rb: Any) -> float:
    """The row in slot 0: the removed one, or the new one, which nobody removed."""
    value = float(rb.storage.read(torch.tensor([0]))[0]["value"])
    hidden = rb.storage.lanes.store.removed(torch.arange(8)) or []
    assert value in (0.0, 50.0) and set(hidden) <= {0} and (value == 0.0 or hidden == []), (value, hidden)
    assert rb.storage.lanes.store.removed_rows == len(hidden)
    return value


def test_row_that_replaced_a_removed_one_is_not_hidden_after_a_power_cut(best):
    file, seen, images = best / "store" / "rows.engram", set(), 0
    disk = MappedFile(file, 0)

    def heard(call: str, path: str, path2: str, args: list[int]) -> None:
        nonlocal images
        if call == "mark":
            disk.maps.insert(0, args[1])
            return
        disk.heard(call, path, args)
        for image in disk.images():
            if image in seen:
                continue
            seen.add(image)
            folder = best / "image"
            folder.mkdir(exist_ok=True)
            (folder / "rows.engram").write_bytes(image)
            sessions._set_boot(9)
            rb = ReplayBuffer.open(folder)
            check_best(rb)
            rb.storage.close()
            images += 1

    tracer.run(lambda: replaces(best), file.parent, kinds=EVENTS, listen=heard)
    assert images > 10


def test_row_that_replaces_a_removed_one_is_not_hidden_where_the_replacement_was_killed(best):
    file = best / "store" / "rows.engram"
    before, found, at = file.read_bytes(), set(), 1
    while True:
        file.write_bytes(before)
        traced = tracer.run(lambda: replaces(best), file.parent, tracer.KILL, at, kinds=tracer.STORE)
        sessions._set_boot(1)
        rb = ReplayBuffer.open(best / "store")
        if not traced.killed:
            break
        found.add(check_best(rb))
        rb.storage.close()
        at += 1
    assert at > 5 and found == {0.0, 50.0}
