"""The protocol of a save: one saver, the order in which things reach disk, and what is removed."""

import fcntl
import gc
import json
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
import xxhash

from contracts.corruption import Forger
from contracts.each import each
from contracts.waiting import NEVER
from engram.checkpoint.directory import MARKER, MARKER_CONTENT, from_checksummed_json, to_checksummed_json
from engram.checkpoint.reader import Checkpoint
from engram.checkpoint.writer import saving
from engram.data.replay_buffers.checkpointers import open_snapshot, save_snapshot, verify
from engram.errors import CheckpointError, CorruptCheckpointError


def save(path, value, **options):
    return save_snapshot(path, {"state": {"value": value, "bytes": b"some bytes"}}, **options)


def load(path, snapshot=None):
    with open_snapshot(path, snapshot) as opened:
        return opened.components["state"]["value"]


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def test_a_second_saver_is_refused_at_once(tmp_path):
    save(tmp_path, 1)
    with saving(tmp_path), pytest.raises(CheckpointError, match="another save"):
        save(tmp_path, 2)
    save(tmp_path, 3)
    assert load(tmp_path) == 3


def test_a_second_saver_in_another_thread_is_refused(tmp_path):
    refused = []

    def try_to_save():
        with pytest.raises(CheckpointError, match="another save"):
            save(tmp_path, 2)
        refused.append(True)

    with saving(tmp_path):
        thread = threading.Thread(target=try_to_save)
        thread.start()
        thread.join()
    assert refused


def test_a_dead_savers_lock_is_free_though_a_child_of_its_lives_on(tmp_path):
    ready, tell = os.pipe()
    saver = os.fork()
    if saver == 0:
        with saving(tmp_path):
            grandchild = os.fork()
            if grandchild == 0:
                os.write(tell, str(os.getpid()).encode())
            signal.pause()
    grandchild = int(os.read(ready, 20))
    os.kill(saver, signal.SIGKILL)
    os.waitpid(saver, 0)
    try:
        save(tmp_path, 1)
    finally:
        os.kill(grandchild, signal.SIGKILL)
    assert load(tmp_path) == 1


def test_files_reach_disk_before_current_moves_and_the_move_before_old_ones_go(tmp_path, monkeypatch):
    save(tmp_path, 1)
    events = []
    fsync, replace, unlink = os.fsync, os.replace, os.unlink

    def log(kind, path):
        events.append((kind, os.path.relpath(path, tmp_path)))

    monkeypatch.setattr(os, "fsync", lambda fd: (log("sync", os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (log("move", b), replace(a, b))[1])
    monkeypatch.setattr(os, "unlink", lambda path, **options: (log("remove", path), unlink(path, **options))[1])
    save(tmp_path, 2)
    moved = events.index(("move", "CURRENT"))
    synced_before = {path for kind, path in events[:moved] if kind == "sync"}
    new = {f"g-000002/{name}" for name in (MARKER, "manifest.json", "components/state.bin")}
    assert synced_before == {"CURRENT.new", ".", "g-000002", "g-000002/components"} | new
    assert events[moved + 1] == ("sync", ".")
    assert all(kind == "remove" and path.startswith("g-000001/") for kind, path in events[moved + 2 :])
    assert not any(kind == "remove" for kind, _ in events[:moved])


def test_keep_last_keeps_so_many_and_the_newest(tmp_path):
    for value in range(5):
        save(tmp_path, value, keep_last=3)
    assert names(tmp_path) == ["CURRENT", "LOCK", "g-000003", "g-000004", "g-000005"]
    assert [load(tmp_path, f"g-{number:06d}") for number in (3, 4, 5)] == [2, 3, 4]
    save(tmp_path, 5)
    assert names(tmp_path) == ["CURRENT", "LOCK", "g-000006"]


def test_a_save_that_fails_leaves_as_many_as_are_to_be_kept(tmp_path):
    for value in range(3):
        save(tmp_path, value, keep_last=3)
    with pytest.raises(KeyboardInterrupt), saving(tmp_path, keep_last=3):
        raise KeyboardInterrupt
    assert names(tmp_path) == ["CURRENT", "LOCK", "g-000001", "g-000002", "g-000003"]


@pytest.mark.parametrize("keep_last", [0, -1])
def test_keep_last_below_one_is_refused(tmp_path, keep_last):
    with pytest.raises(ValueError, match="keep_last"):
        save(tmp_path, 1, keep_last=keep_last)


def test_a_snapshot_being_read_is_not_removed(tmp_path):
    save(tmp_path, 1)
    with open_snapshot(tmp_path) as opened:
        save(tmp_path, 2)
        save(tmp_path, 3)
        assert opened.components["state"]["value"] == 1
        assert names(tmp_path) == ["CURRENT", "LOCK", "g-000001", "g-000003"]
    save(tmp_path, 4)
    assert names(tmp_path) == ["CURRENT", "LOCK", "g-000004"]


def test_readers_beside_a_saver_always_find_a_whole_state(ram_path):
    save(ram_path, 0)
    stop = threading.Event()
    found, failed = [], []

    def read():
        try:
            while not stop.is_set():
                found.append(load(ram_path))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    values, until = 0, time.monotonic() + NEVER
    while values < 149 or (len(found) < 3 and time.monotonic() < until):
        values += 1
        save(ram_path, values)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed and len(found) > 2 and load(ram_path) == values


def test_leftovers_of_killed_saves_are_removed_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    unfinished, empty, beyond = tmp_path / "g-000002", tmp_path / "g-000003", tmp_path / "g-000004"
    unfinished.mkdir()
    (unfinished / MARKER).write_bytes(MARKER_CONTENT[:10])
    (unfinished / "storage").mkdir()
    (unfinished / "storage" / "rows.bin").write_bytes(b"part")
    empty.mkdir()
    beyond.mkdir()
    (beyond / MARKER).write_bytes(MARKER_CONTENT)
    (beyond / "manifest.json").write_text("never pointed to")
    foreign = tmp_path / "g-000005"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    for name in ("notes.txt", "g-7", "g-000009.txt"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "g-000008").symlink_to(foreign)
    assert save(tmp_path, 2) == "g-000006"
    kept = ["CURRENT", "LOCK", "g-000005", "g-000006", "g-000008", "g-000009.txt", "g-7", "notes.txt"]
    assert names(tmp_path) == kept
    assert (foreign / "thesis.tex").read_text() == "mine"


def test_finished_snapshots_are_kept_while_current_cannot_be_read(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "CURRENT").write_text("garbage")
    with pytest.raises(RuntimeError, match="stopped"), saving(tmp_path):
        raise RuntimeError("stopped")
    assert load(tmp_path, "g-000001") == 1


def test_without_current_the_newest_finished_snapshot_stays_until_a_save_succeeds(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2, keep_last=2)
    (tmp_path / "CURRENT").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint.*CURRENT.*snapshot='g-000002'"):
        load(tmp_path)
    with pytest.raises(RuntimeError, match="stopped"), saving(tmp_path):
        raise RuntimeError("stopped")
    assert names(tmp_path) == ["LOCK", "g-000002"] and load(tmp_path, "g-000002") == 2
    save(tmp_path, 3)
    assert load(tmp_path) == 3 and names(tmp_path) == ["CURRENT", "LOCK", "g-000003"]


def test_a_current_that_is_not_ours_is_not_replaced(tmp_path):
    (tmp_path / "CURRENT").write_text("MANIFEST-000004\n")
    with pytest.raises(CheckpointError, match="not written by engram"):
        save(tmp_path, 1)
    assert (tmp_path / "CURRENT").read_text() == "MANIFEST-000004\n"


def test_an_error_of_another_process_says_which_file_is_damaged():
    told = {"file": "a", "reason": "b", "advice": "c", "newest_whole": "d"}
    error = CorruptCheckpointError(**told)
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert {name: getattr(one, name) for name in told} == told and one.args == ("a", "b", "c", "d")


def test_an_exception_inside_a_save_leaves_nothing(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(KeyboardInterrupt), saving(tmp_path) as writer:
        writer.write_file("a/b/c.bin", [b"part"])
        raise KeyboardInterrupt
    assert names(tmp_path) == ["CURRENT", "LOCK", "g-000001"] and load(tmp_path) == 1


@each("name", ["../x", "/etc/x", "a/../x", "", "a//b", ".x", "a/.x", "manifest.json", MARKER, "twice"])
def test_a_file_name_that_leaves_the_snapshot_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="not a name"), saving(tmp_path) as writer:
        writer.write_file("twice", [])
        writer.write_file(name, [b""])


def test_more_files_than_may_be_open_can_be_written(ram_path):
    with saving(ram_path) as writer:
        for number in range(200):
            writer.write_file(f"f{number}", [b"a", np.arange(3), memoryview(b"b")])
    assert verify(ram_path).ok


def test_no_descriptors_or_locks_remain(tmp_path):
    gc.collect()  # what earlier tests left open is not closed in the middle of this one
    before = os.listdir("/proc/self/fd")
    save(tmp_path, 1)
    load(tmp_path)
    with pytest.raises(RuntimeError), saving(tmp_path) as writer:
        writer.write_file("x", [b"part"])
        raise RuntimeError
    with pytest.raises(CheckpointError):
        load(tmp_path, "g-000099")
    assert len(os.listdir("/proc/self/fd")) == len(before)
    with open(tmp_path / "LOCK") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_file_that_is_cut_while_its_snapshot_is_open_is_named_with_both_sizes(tmp_path):
    with saving(tmp_path) as writer:
        writer.write_file("a.bin", [b"abc"])
    with Checkpoint(tmp_path).reading() as reader:
        os.truncate(tmp_path / "g-000001" / "a.bin", 2)
        with pytest.raises(CorruptCheckpointError, match=r"a\.bin is damaged: it has 2 bytes, 3 were saved"):
            reader.read_into("a.bin", np.empty(3, np.uint8))


def test_the_bytes_of_a_checkpoint_are_those_of_the_format(tmp_path):
    with saving(tmp_path) as writer:
        writer.write_file("a.bin", [b"abc"])
        writer.body["n"] = 1
    manifest = (tmp_path / "g-000001" / "manifest.json").read_bytes()
    head = (
        b'{"format":"engram snapshot","version":1,"features":[],"snapshot":"g-000001",'
        b'"files":{"a.bin":{"nbytes":3,"xxh3_128":"'
        + xxhash.xxh3_128(b"abc").hexdigest().encode()
        + b'"}},"body":{"n":1}'
    )
    assert manifest == head + b',"xxh3_128":"' + xxhash.xxh3_128(head).hexdigest().encode() + b'"}\n'
    current = json.loads((tmp_path / "CURRENT").read_bytes())
    assert list(current) == ["format", "version", "snapshot", "manifest", "xxh3_128"]
    assert current["manifest"] == xxhash.xxh3_128(manifest).hexdigest()
    assert (tmp_path / "g-000001" / "a.bin").read_bytes() == b"abc"
    assert (tmp_path / "g-000001" / MARKER).read_bytes() == MARKER_CONTENT


def test_a_newer_format_is_refused_by_its_version(tmp_path, monkeypatch):
    from engram.checkpoint import writer as commit

    monkeypatch.setattr(commit, "VERSION", 2)
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="format version 2"):
        load(tmp_path)


@each(
    ("features", "error", "said"),
    [
        (["ragged rows", "more"], CheckpointError, "uses 'ragged rows', 'more', which this engram does not know"),
        (None, CorruptCheckpointError, "does not list the features"),
        (["a", 1], CorruptCheckpointError, "does not list the features"),
        ("all", CorruptCheckpointError, "does not list the features"),
    ],
)
def test_a_snapshot_that_uses_what_is_not_known_here_is_refused_by_name(tmp_path, features, error, said):
    save(tmp_path, 1)
    manifest = tmp_path / "g-000001" / "manifest.json"
    document = from_checksummed_json(manifest.read_bytes())
    document.pop("features")
    manifest.chmod(0o644)
    manifest.write_bytes(to_checksummed_json(document if features is None else {**document, "features": features}))
    with pytest.raises(error, match=said):
        load(tmp_path, "g-000001")


def test_a_manifest_whose_json_is_nested_too_deeply_is_damaged(tmp_path):
    save(tmp_path, 1)
    deep = b"[" * 100_000 + b"]" * 100_000
    Forger(tmp_path).write_text(lambda text: text.replace(b'"features":', b'"deep":' + deep + b',"features":', 1))
    with pytest.raises(CorruptCheckpointError, match="its JSON is nested too deeply"):
        load(tmp_path)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()])
def test_loading_where_nothing_was_saved_says_so(tmp_path, make):
    path = tmp_path / "nothing"
    make(path)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load(path)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        verify(path)


@each("name", ["..", "/etc", "g-000001/..", "CURRENT"])
def test_a_snapshot_name_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="not the name of a snapshot"):
        load(tmp_path, name)


def test_a_file_that_the_manifest_does_not_list_is_not_read(tmp_path):
    with saving(tmp_path):
        pass
    (tmp_path / "g-000001" / "extra").write_bytes(b"")
    with pytest.raises(CheckpointError, match="does not list"), Checkpoint(tmp_path).reading() as reader:
        reader.open("extra")
