"""A store on a network file system has one node at a time: warnings, refusals, and what follows a node that stopped."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from contracts.each import each
from engram import _native
from engram.cli import verify
from engram.data import LazyMemmapStorage, ReplayBuffer
from engram.errors import StorageError, StorageInUseError
from engram.store import files, header, nodes, places
from engram.testing.helpers import numbers, steps

NFS, EXT4, OVERLAY, TMPFS = 0x6969, 0xEF53, 0x794C7630, 0x01021994
TAKE_OVER = "take_over=True"

pytestmark = pytest.mark.filterwarnings("ignore:.* lies on :RuntimeWarning")


class Node(NamedTuple):
    """What a process of a machine reads about it."""

    boot: bytes
    host: bytes


FIRST = Node(b"boot of the 1st.", b"host of the 1st.")
SECOND = Node(b"boot of the 2nd.", b"host of the 2nd.")

Run = Callable[..., None]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Goes on as a process of this node, where all files lie on a file system of this type."""

    def go_on(node: Node, kind: int = NFS) -> None:
        monkeypatch.setattr(_native, "file_system_type", lambda fd: kind)
        monkeypatch.setattr(nodes, "host_id", lambda boot: node.host)
        for module in (files, header, places):
            monkeypatch.setattr(module, "boot_id", lambda: node.boot)

    return go_on


def make(folder: Path) -> ReplayBuffer[Any]:
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder))
    rb.extend(steps(0, 20))
    return rb


def seen_from_elsewhere(folder: Path) -> Path:
    """The same bytes under another path, whose file no process has locked: locks of one node are unknown in another."""
    return Path(shutil.copytree(folder, folder.with_name("elsewhere")))


@pytest.fixture
def left(tmp_path: Path, on: Run) -> Path:
    """A store that the first node has written and not closed, as another one sees it."""
    on(FIRST)
    make(tmp_path / "store")
    return seen_from_elsewhere(tmp_path / "store")


# ---- the warning ----
@pytest.mark.parametrize("kind", nodes.NETWORK_FILE_SYSTEMS)
def test_opening_a_store_for_writing_on_a_network_file_system_warns(on: Run, tmp_path: Path, kind: int) -> None:
    on(FIRST, kind)
    said = rf"lies on {nodes.NETWORK_FILE_SYSTEMS[kind]}: .*one node at a time.*{TAKE_OVER}"
    with pytest.warns(RuntimeWarning, match=said):
        make(tmp_path).storage.close()
    with pytest.warns(RuntimeWarning, match=said):
        LazyMemmapStorage.open(tmp_path)


@pytest.mark.parametrize("kind", [EXT4, OVERLAY, TMPFS, 0])
def test_a_local_file_system_is_no_reason_to_warn(on: Run, tmp_path: Path, kind: int) -> None:
    on(FIRST, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tmp_path).storage.close()
        LazyMemmapStorage.open(tmp_path)


def test_an_observer_and_a_temporary_file_are_no_reason_to_warn(on: Run, tmp_path: Path) -> None:
    on(FIRST)
    make(tmp_path).storage.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LazyMemmapStorage.open(tmp_path, read_only=True)
        ReplayBuffer(storage=LazyMemmapStorage(100)).extend(steps(0, 20))


def test_the_type_of_a_file_system_is_that_of_statfs(tmp_path: Path) -> None:
    with open("/proc/self/status") as proc, open(tmp_path / "file", "w") as file:
        assert _native.file_system_type(proc.fileno()) == 0x9FA0  # PROC_SUPER_MAGIC
        assert _native.file_system_type(file.fileno()) not in (0, 0x9FA0)
    assert _native.file_system_type(-1) == 0


# ---- which node ----
def test_another_node_is_refused_while_the_first_may_live_and_changes_no_byte(on: Run, left: Path) -> None:
    before = (left / "rows.engram").read_bytes()
    on(SECOND)
    for open_it in (
        lambda: LazyMemmapStorage.open(left),
        lambda: LazyMemmapStorage(100, scratch_dir=left, existsok=True),
        lambda: ReplayBuffer.open(left),
        lambda: ReplayBuffer.open(left, read_only=True),
        lambda: verify(left),
    ):
        with pytest.raises(StorageInUseError, match=f"lies on NFS, and another node has it open.*{TAKE_OVER}"):
            open_it()
    assert (left / "rows.engram").read_bytes() == before


def test_a_node_that_has_not_written_yet_keeps_others_out_too(on: Run, tmp_path: Path) -> None:
    on(FIRST)
    make(tmp_path / "store").storage.close()
    idle = LazyMemmapStorage.open(tmp_path / "store")
    copy = seen_from_elsewhere(tmp_path / "store")
    on(SECOND)
    with pytest.raises(StorageInUseError):
        LazyMemmapStorage.open(copy)
    on(FIRST)
    idle.close()


def test_after_a_clean_close_any_node_opens_it(on: Run, tmp_path: Path) -> None:
    on(FIRST)
    make(tmp_path).storage.close()
    for node, start in ((SECOND, 20), (FIRST, 30)):
        on(node)
        rb = ReplayBuffer.open(tmp_path)
        assert numbers(rb[:]) == list(range(start))
        rb.extend(steps(start, start + 10))
        rb.storage.close()


@pytest.mark.parametrize("how", [
    lambda path: ReplayBuffer.open(path, take_over=True),
    lambda path: ReplayBuffer(storage=LazyMemmapStorage.open(path, take_over=True)),
    lambda path: ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=path, existsok=True, take_over=True)),
])  # fmt: skip
def test_a_node_that_stopped_is_followed_by_an_argument_and_its_torn_rows_are_dropped(
    on: Run, left: Path, how: Callable[[Path], ReplayBuffer[Any]]
) -> None:
    on(FIRST)
    store = header.StoreFile.observed(left).store
    with open(left / "rows.engram", "r+b") as file:
        file.seek(store.rows_offset + 19 * store.row_stride)
        file.write(b"\xff" * 8)
    on(SECOND)
    rb = how(left)
    assert rb.storage.dropped == 1 and numbers(rb[:]) == list(range(19))
    rb.extend(steps(19, 25))
    rb.storage.close()
    on(FIRST)
    assert numbers(ReplayBuffer.open(left)[:]) == list(range(25))


def test_a_node_whose_store_was_taken_over_writes_no_more_to_it(on: Run, tmp_path: Path) -> None:
    on(FIRST)
    rb = make(tmp_path)
    store = rb.storage.lanes.store
    store.boot_id, store.host_id = SECOND  # what the node that takes it over writes
    rb.storage.release()
    with pytest.raises(StorageInUseError, match="another node has it open"):
        rb.extend(steps(20, 25))
    with pytest.raises(StorageInUseError, match="another node has it open"):
        rb.storage.close()
    on(SECOND)
    store = header.StoreFile.observed(tmp_path).store
    assert not store.clean and store.rows() == 20


def test_a_node_that_has_started_again_finds_its_rows(on: Run, left: Path) -> None:
    on(FIRST._replace(boot=b"a later boot id."))
    assert numbers(ReplayBuffer.open(left)[:]) == list(range(20))


def test_containers_of_one_node_share_its_boot_whatever_they_know_of_its_hardware(on: Run, left: Path) -> None:
    on(FIRST._replace(host=SECOND.host))
    assert numbers(ReplayBuffer.open(left)[:]) == list(range(20))


def test_nodes_that_are_told_apart_by_their_boots_alone_are_two(on: Run, left: Path) -> None:
    on(Node(SECOND.boot, bytes(16)))
    with pytest.raises(StorageInUseError):
        ReplayBuffer.open(left)


def test_a_store_of_an_older_engram_opens_as_before(on: Run, left: Path) -> None:
    on(FIRST)
    rb = ReplayBuffer.open(left)
    rb.storage.lanes.store.host_id = bytes(16)
    older = shutil.copytree(left, left.with_name("older"))
    on(SECOND)
    assert numbers(ReplayBuffer.open(older)[:]) == list(range(20))


def test_a_disk_that_was_moved_to_another_machine_opens_as_before(on: Run, left: Path) -> None:
    on(SECOND, EXT4)
    with pytest.raises(StorageError, match="Open it once for writing"):
        ReplayBuffer.open(left, read_only=True)
    assert numbers(ReplayBuffer.open(left)[:]) == list(range(20))


def test_taking_over_what_is_only_read_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    for open_it in (LazyMemmapStorage.open, ReplayBuffer.open):
        with pytest.raises(ValueError, match="give one of them"):
            open_it(tmp_path, read_only=True, take_over=True)


# ---- the host id ----
def test_the_host_id_is_that_of_the_hardware_and_the_same_after_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = []
    for number in (
        "8f14e45f-ceea-467a-9575-1e2b1a3c4d5e",
        "8F14E45F-CEEA-467A-9575-1E2B1A3C4D5E\n",
        "c9f0f895-fb98-4b1c",
    ):
        (tmp_path / "uuid").write_text(number)
        monkeypatch.setattr(nodes, "_HARDWARE", (str(tmp_path / "none"), str(tmp_path / "uuid")))
        ids += [nodes.host_id(FIRST.boot), nodes.host_id(SECOND.boot)]
    assert ids[0] == ids[1] == ids[2] == ids[3] != ids[4] == ids[5] and {len(i) for i in ids} == {16}


@each("number", [
    None, "", "00000000-0000-0000-0000-000000000000", "FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF",
    "03000200-0400-0500-0006-000700080009", "\0\xff\n",
])  # fmt: skip
def test_without_a_number_of_the_hardware_the_host_id_is_that_of_the_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str | None
) -> None:
    if number is not None:
        (tmp_path / "uuid").write_text(number)
    monkeypatch.setattr(nodes, "_HARDWARE", (str(tmp_path / "uuid"),))
    assert nodes.host_id(FIRST.boot) == nodes.host_id(FIRST.boot) != nodes.host_id(SECOND.boot) != bytes(16)
    assert nodes.host_id(bytes(16)) == bytes(16)


def test_the_header_says_which_node_wrote(on: Run, tmp_path: Path) -> None:
    on(FIRST, EXT4)
    store = make(tmp_path).storage.lanes.store
    assert (store.boot_id, store.host_id) == FIRST
    with pytest.raises(ValueError, match="16 bytes"):
        store.host_id = b"short"
