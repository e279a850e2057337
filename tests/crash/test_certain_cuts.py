"""Power cuts at moments that need a protection of their own; of these everything that the disk may hold is opened."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.power import PAGE, MappedFile
from crash import sessions, stores, tracer
from engram.data import ReplayBuffer
from engram.errors import StorageError
from engram.store import files as recovery
from engram.store import places

EVENTS = tracer.SYNC | tracer.STORE
CLEAN = 336  # where the header says that its last user closed the store


@pytest.fixture(autouse=True)
def boots(monkeypatch):
    for module in (recovery, places):
        monkeypatch.setattr(module, "boot_id", module.boot_id)


def mapped(store: Any) -> None:
    """In the child: tells where the store lies, so that it is known which pages a sync means."""
    tracer.mark(sessions.MAPPED, store.memory().ctypes.data)


class Machine:
    """A store of one lane whose power is cut at every event of a process, in every way."""

    def __init__(self, root: Path, capacity: int, width: int) -> None:
        self.root, self.shape = root, {"lanes": 1, "capacity": capacity, "envs": 1, "width": width}
        self.file = root / "store" / "rows.engram"
        sessions.make(root, self.shape)
        self._disk: MappedFile | None = None

    def user(self, edition: int) -> tuple[sessions.Sessions, Any]:
        """Somebody whose rows are of this edition, and the store, opened."""
        one = sessions.Sessions(self.file.parent, self.root / "log", self.shape, 0, edition)
        return one, one.open()

    def dies(self, work: Callable[[], None], at: int) -> None:
        """Runs it in a process that is killed at this store (1, 2, ...) to what it watches."""
        assert tracer.run(work, self.file.parent, tracer.KILL, at, kinds=tracer.STORE).killed

    def cuts(
        self,
        work: Callable[[], None],
        check: Callable[[list[int], Any], None],
        fails: tuple[int, ...] = (),
        stored: Callable[[bytes], None] = lambda image: None,
    ) -> int:
        """Runs it in a process; `check` gets editions, oldest first, and the buffer, of all that may be left. How many.

        The syncs `fails` (two that follow each other; 1, 2, ...) fail; `stored` gets what the disk may hold at each
        store to what is watched.
        """
        disk, seen, syncs = MappedFile(self.file, 0), set(), 0

        def heard(call: str, path: str, path2: str, args: list[int]) -> None:
            nonlocal syncs
            if call == "mark":
                disk.maps.insert(0, args[1])
                return
            syncs += call.endswith("sync")
            if syncs in fails and call.endswith("sync"):
                return
            disk.heard(call, path, args)
            for image in disk.images():
                if call == "store":
                    stored(image)
                if image not in seen:
                    seen.add(image)
                    rb = self._opened(image)
                    [found] = sessions.editions(rb, self.shape)
                    check([found[w] for w in sorted(found)], rb)
                    rb.storage.close()

        what = (tracer.FAIL_TWO_SYNCS, fails[0]) if fails else (tracer.NOTHING, 0)
        tracer.run(work, self.file.parent, *what, error=errno.EIO, kinds=EVENTS, listen=heard)
        return len(seen)

    def _opened(self, image: bytes) -> Any:
        folder = self.root / "image"
        folder.mkdir(exist_ok=True)
        (folder / "rows.engram").write_bytes(image)
        sessions._set_boot(9)
        return ReplayBuffer.open(folder)


pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(not tracer.can_watch(), reason="stores are watched on x86-64 only"),
]


def test_no_trajectory_goes_on_from_a_dead_writer_to_the_next_although_the_seam_was_lost(ram_path):
    machine = Machine(ram_path, 16, 509)  # rows of one page
    one, rb = machine.user(1)
    rb.extend(one.batch(16, 4))  # the store was emptied once
    # Dies when it has written a row whole and not published it.
    before = machine.file.read_bytes()[:PAGE]
    rb.extend(one.batch(20, 1))
    left = before + machine.file.read_bytes()[PAGE:]
    machine.file.unlink()
    machine.file.write_bytes(left)
    both = 0

    def life() -> None:
        two, store = machine.user(2)
        stores.watch(store.storage.lanes.store, (stores.CLAIMED, stores.PUBLISHED))
        tracer.start()
        store.extend(two.batch(20, 2))

    def check(editions: list[int], store: Any) -> None:
        nonlocal both
        state = store.storage.lanes.states()[0]
        for k, (a, b) in enumerate(itertools.pairwise(editions), state["first"] + 1):
            if a != b:
                both += 1
                assert k in state["seams"], f"no seam at {k} in rows of the writers {editions}"

    assert machine.cuts(life, check) > 10 and both > 2


def test_a_change_of_flushed_rows_that_a_kill_interrupted_is_on_the_disk_before_its_mark_goes(ram_path):
    machine = Machine(ram_path, 8, 600)  # rows go on from one page to the next
    one, rb = machine.user(1)
    rb.extend(one.batch(8, 8))
    rb.storage.close()

    def change() -> None:
        two, store = machine.user(2)
        stores.watch(store.storage.lanes.store, (stores.REDO,))
        tracer.start()
        store[2:4] = two.batch(10, 2)

    machine.dies(change, 2)  # the mark is the second half of these 8 bytes, the checksum the first to be stored
    changed = 0

    def check(editions: list[int], store: Any) -> None:
        nonlocal changed
        assert editions in ([1] * 8, [1, 1, 2, 2, 1, 1, 1, 1])
        changed += editions[2] == 2

    assert machine.cuts(stores.reopening(ram_path, False, mapped), check) > 2 and changed > 2


def test_after_a_power_cut_in_a_recovery_the_next_one_finds_the_same_rows(ram_path):
    machine = Machine(ram_path, 8, 600)
    one, rb = machine.user(1)
    rb.extend(one.batch(8, 13))
    left = bytearray(machine.file.read_bytes())  # nobody has closed it
    store = rb.storage.lanes.store
    left[store.rows_offset + 3 * store.row_stride] ^= 1  # row 19
    machine.file.unlink()
    machine.file.write_bytes(left)
    found = []

    def check(editions: list[int], store: Any) -> None:
        state = store.storage.lanes.states()[0]
        found.append((state["first"], state["published"], state["seams"]))

    assert machine.cuts(stores.reopening(ram_path, True, mapped), check) > 1
    assert len({str(one) for one in found}) == 1 and found[0][:2] == (20, 21), found


def test_a_store_whose_first_sync_failed_is_not_changed_before_the_disk_knows_that_it_is_in_use(ram_path):
    machine = Machine(ram_path, 12, 20)
    one, rb = machine.user(1)
    rb.extend(one.batch(12, 18))
    rb.storage.close()
    changes = 0

    def life() -> None:
        two, store = machine.user(2)
        tracer.start()
        for _ in range(2):
            with pytest.raises(StorageError, match="Input/output error"):
                store.extend(two.batch(30, 1))
        stores.watch(store.storage.lanes.store, (stores.REDO, stores.ROW))
        store[2:4] = two.batch(26, 2)

    def stored(image: bytes) -> None:
        nonlocal changes
        changes += 1
        assert image[CLEAN : CLEAN + 4] == bytes(4), "it is changed, and the disk may say that all was closed"

    machine.cuts(life, lambda editions, store: None, fails=(1, 2), stored=stored)
    assert changes > 0


@pytest.mark.parametrize("fails", [(2, 3), (3, 4)], ids=["redo", "rows"])
def test_a_change_of_flushed_rows_whose_sync_fails_twice_is_torn_by_no_power_cut(ram_path, fails):
    machine = Machine(ram_path, 8, 600)  # rows go on from one page to the next
    one, rb = machine.user(1)
    rb.extend(one.batch(8, 8))
    rb.storage.close()
    changed = 0

    def change() -> None:
        two, store = machine.user(2)
        stores.watch(store.storage.lanes.store, (stores.REDO,))
        tracer.start()
        for _ in range(2):
            with pytest.raises(StorageError, match="Input/output error"):
                store[2:4] = two.batch(10, 2)
        store[2:4] = two.batch(10, 2)
        assert (store[2:4]["n"] == two.batch(10, 2)["n"]).all()

    def check(editions: list[int], store: Any) -> None:
        nonlocal changed
        assert editions in ([1] * 8, [1, 1, 2, 2, 1, 1, 1, 1])
        changed += editions[2] == 2

    assert machine.cuts(change, check, fails=fails) > 2 and changed > 2
