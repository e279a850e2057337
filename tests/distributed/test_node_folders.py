"""Folders that shards leave in a node's memory are removed when nobody can come back to them, and not before."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts.each import each
from distributed.shards import read_all, rows, shard, write
from engram.data import PrioritizedSampler
from engram.distributed.node_folders import FolderOwner, claim_folder, remove_abandoned_folders
from engram.errors import StorageError
from test_user_paths import PLANTS

HERE, OTHER = "10.0.0.1:6379", "10.0.0.2:6379"


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """A process that would start an actor again."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def began(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])


def left_behind(memory: Path, parent: int | None, cluster: str = OTHER, **changes: Any) -> Path:
    """A folder whose shard was killed."""
    folder = memory / "engram-0123-0"
    owner = FolderOwner.of_this_process(cluster, "a namespace", "engram-0123-0")
    own = (2**22 + 1, 1) if parent is None else (parent, began(parent))
    claim_folder(folder, dataclasses.replace(owner, parent=own, **changes))
    s = shard(scratch_dir=folder)
    write(s, "a", rows(0, 3))
    s.close()
    return folder


def removed(memory: Path, lives: bool = False, grace: float = 0.0) -> list[Path]:
    return remove_abandoned_folders(memory, HERE, lambda owner: lives, grace)


def test_one_of_another_cluster_waits_for_its_node_to_join_again(tmp_path: Path, parent: Any) -> None:
    folder = left_behind(tmp_path, None)
    assert removed(tmp_path, grace=600.0) == []
    long_ago = time.time() - 601
    os.utime(folder / "abandoned", (long_ago, long_ago))
    owner = FolderOwner.of_this_process(OTHER, "a namespace", "engram-0123-0")
    claim_folder(folder, dataclasses.replace(owner, parent=(parent.pid, began(parent.pid))))  # its node is back
    assert removed(tmp_path, grace=600.0) == []
    parent.kill()
    parent.wait()
    assert removed(tmp_path, grace=600.0) == []
    os.utime(folder / "abandoned", (long_ago, long_ago))
    assert removed(tmp_path, grace=600.0) == [folder]


def test_one_of_a_cluster_that_is_gone_is_removed(tmp_path: Path) -> None:
    folder = left_behind(tmp_path, None)
    assert removed(tmp_path) == [folder] and not folder.exists()


def test_one_of_a_cluster_whose_head_was_here_goes_when_that_has_ended(tmp_path: Path, parent: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        cluster = f"127.0.0.1:{head.getsockname()[1]}"
        folder = left_behind(tmp_path, None, cluster)
        assert removed(tmp_path, grace=600.0) == []  # the head lives: the node may join again
    claim_folder(folder, FolderOwner.of_this_process(cluster, "a namespace", "engram-0123-0"))
    assert removed(tmp_path, grace=600.0) == []  # it lives without its head, as a node does for a while
    left_behind(tmp_path, None, cluster)
    assert removed(tmp_path, grace=600.0) == [folder]


@each("cluster", ["", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999999", "no such host.:6379"])
def test_one_of_a_cluster_with_an_address_that_is_none_waits(tmp_path: Path, cluster: str) -> None:
    left_behind(tmp_path, None, cluster)
    assert removed(tmp_path, grace=600.0) == []


def test_one_whose_number_another_process_has_by_now_is_removed(tmp_path: Path, parent: Any) -> None:
    folder = left_behind(tmp_path, parent.pid)
    owner = FolderOwner.of_this_process(OTHER, "a namespace", "engram-0123-0")
    claim_folder(folder, dataclasses.replace(owner, parent=(parent.pid, began(parent.pid) - 1)))
    assert removed(tmp_path) == [folder]


def test_one_whose_actor_may_start_again_stays(tmp_path: Path, parent: Any) -> None:
    folder = left_behind(tmp_path, parent.pid)
    assert removed(tmp_path) == []
    parent.kill()
    parent.wait()
    assert removed(tmp_path) == [folder]


def test_of_its_own_cluster_the_cluster_decides(tmp_path: Path, parent: Any) -> None:
    folder = left_behind(tmp_path, None, HERE)
    assert removed(tmp_path, lives=True) == []
    assert removed(tmp_path, lives=False) == [folder]


def test_one_with_a_living_shard_stays(tmp_path: Path) -> None:
    folder = left_behind(tmp_path, None)
    living = shard(scratch_dir=folder)
    assert removed(tmp_path) == [] and read_all(living) == [0, 1, 2]
    living.close()
    assert removed(tmp_path) == [folder]


def test_one_of_processes_that_cannot_be_seen_stays(tmp_path: Path) -> None:
    left_behind(tmp_path, None, processes="pid:[1]")
    assert removed(tmp_path) == []


@each("owner", [None, "", "{}", '{"cluster": 3}'])
def test_one_of_nobody_knows_whom_stays(tmp_path: Path, owner: str | None) -> None:
    folder = left_behind(tmp_path, None)
    (folder / "owner.json").unlink() if owner is None else (folder / "owner.json").write_text(owner)
    (tmp_path / "another").mkdir()
    assert removed(tmp_path) == [] and folder.exists()


def test_pipes_in_a_nodes_memory_hold_nobody_up(tmp_path):
    """Any user of the machine may put a folder there."""
    for name in ("owner.json", "owner.json.new"):
        folder = tmp_path / f"engram-{name}"
        folder.mkdir()
        os.mkfifo(folder / name)
    assert remove_abandoned_folders(tmp_path, HERE, lambda owner: False) == []
    with pytest.raises(OSError):
        claim_folder(tmp_path / "engram-owner.json.new", FolderOwner.of_this_process(HERE, "a namespace", "a name"))


@each("name", ["shard.json", "shard.lock", "priorities"])
@each("plant", PLANTS)
def test_a_shard_whose_file_is_something_else_says_so_at_once(name, plant, tmp_path):
    plant(tmp_path / name)
    with pytest.raises(OSError if name == "shard.lock" else StorageError, match=name):
        shard(scratch_dir=tmp_path, sampler=PrioritizedSampler(400, 0.6, 0.4))


@each("plant", PLANTS)
def test_the_next_record_of_a_shard_replaces_whatever_has_its_name_but_a_folder(plant, tmp_path):
    plant(tmp_path / "shard.json.new")
    if (tmp_path / "shard.json.new").is_dir():
        with pytest.raises(StorageError, match=r"shard\.json cannot be written"):
            shard(scratch_dir=tmp_path)
    else:
        shard(scratch_dir=tmp_path)
        assert (tmp_path / "shard.json").is_file() and not os.path.lexists(tmp_path / "shard.json.new")
