"""Saves of several shards: a load gets all parts of one save, or none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from contracts.each import each
from contracts.waiting import NEVER
from distributed.shards import Link, client, read_all, rows, shard, write
from engram.distributed import ReplayShard
from engram.errors import CheckpointError, CheckpointMisfitError, CorruptCheckpointError, ShardUnavailableError

# Nothing is lost here, and none is said to be.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def buffer(n: int = 3) -> tuple[list[Link], Any]:
    """Shards with a producer each, and a client."""
    links = [Link(shard()) for _ in range(n)]
    for k in range(n):
        rb = client(links)
        rb.extend(rows(100 * k, 100 * k + 10))
        rb.flush()
    return links, rb


def stored(links: list[Link]) -> list[list[int]]:
    return [read_all(link.shard) for link in links]


def test_what_was_saved_comes_back_in_shards_that_are_new(tmp_path: Path) -> None:
    links, rb = buffer()
    assert rb.dumps(tmp_path) == "g-000001"
    others = [Link(ReplayShard(400, lanes=4, timeout=0.0)) for _ in range(3)]
    other = client(others)
    other.loads(tmp_path)
    assert stored(others) == stored(links) and len(other) == 30 and len(other.sample()) == 16
    other.extend(rows(500, 510))
    assert len(other) == 40


def test_rows_since_are_forgotten(tmp_path: Path) -> None:
    links, rb = buffer()
    before = stored(links)
    rb.dumps(tmp_path)
    rb.extend(rows(500, 510))
    rb.sample()
    rb.loads(tmp_path)
    assert stored(links) == before and bool((rb.sample()["n"] < 500).all())


@pytest.mark.parametrize("failing", ["dumps of the last shard", "its answer", "the root"])
def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: Any, failing: str) -> None:
    links, rb = buffer()
    before = stored(links)
    rb.dumps(tmp_path)
    for k in range(3):  # however often
        rb.extend(rows(500 + k, 501 + k))
        rb.flush()
        with monkeypatch.context() as patch:
            if failing == "the root":
                patch.setattr("engram.checkpoint.writer.SnapshotWriter.commit", _fail_at(tmp_path))
            else:
                fate = "call" if failing == "dumps of the last shard" else "answer"
                links[2].lose = lambda method, fate=fate: fate if method == "dumps" else None
            with pytest.raises(CheckpointError if failing == "the root" else ShardUnavailableError):
                rb.dumps(tmp_path, timeout=NEVER)
            links[2].lose = lambda method: None
    rb.loads(tmp_path)
    assert stored(links) == before
    rb.extend(rows(500, 501))
    assert rb.dumps(tmp_path) > "g-000001"
    rb.empty()
    rb.loads(tmp_path)
    assert len(rb) == 31


def _fail_at(root: Path) -> Any:
    from engram.checkpoint.writer import SnapshotWriter

    commit = SnapshotWriter.commit

    def fail(writer: Any) -> None:
        if writer._directory.root == str(root):
            raise CheckpointError("the disk is full")
        commit(writer)

    return fail


def test_older_saves_stay_as_long_as_they_are_to(tmp_path: Path) -> None:
    _, rb = buffer()
    names = []
    for k in range(4):
        rb.extend(rows(500 + k, 501 + k))
        names.append(rb.dumps(tmp_path, keep_last=2))
    rb.loads(tmp_path, snapshot=names[2])
    assert len(rb) == 33
    rb.loads(tmp_path)
    assert len(rb) == 34
    with pytest.raises(CheckpointError):
        rb.loads(tmp_path, snapshot=names[0])


def test_damage_of_one_part_changes_nothing(tmp_path: Path) -> None:
    links, rb = buffer()
    rb.dumps(tmp_path)
    for link in links:
        write(link.shard, "another", rows(500, 510))
    before = stored(links)
    file = next(f for f in (tmp_path / "shards" / "2").rglob("*.bin"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptCheckpointError):
        rb.loads(tmp_path)
    assert stored(links) == before


def test_a_part_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    links, rb = buffer()
    rb.dumps(tmp_path)
    before = stored(links)
    shutil.rmtree(tmp_path / "shards" / "1")
    with pytest.raises(CheckpointError):
        rb.loads(tmp_path)
    assert stored(links) == before


def test_another_number_of_shards_does_not_fit(tmp_path: Path) -> None:
    buffer()[1].dumps(tmp_path)
    with pytest.raises(CheckpointMisfitError, match="3 shards, this buffer 2"):
        buffer(2)[1].loads(tmp_path)


def test_a_save_of_one_buffer_is_none_of_shards(tmp_path: Path) -> None:
    links, rb = buffer(1)
    links[0].shard.dumps(links[0].shard.incarnation, tmp_path)
    with pytest.raises(CorruptCheckpointError, match="not a save of shards"):
        rb.loads(tmp_path)


@each("fate", ["call", "answer"])
@each("method", ["verify", "loads"])
def test_a_shard_that_was_away_in_the_middle_of_a_load_loads_when_it_is_back(
    tmp_path: Path, method: str, fate: str
) -> None:
    links, rb = buffer()
    before = stored(links)
    rb.dumps(tmp_path)
    rb.extend(rows(500, 510))
    losses = [method]
    links[1].lose = lambda called: fate if called in losses and not losses.remove(called) else None
    rb.loads(tmp_path, timeout=NEVER)
    assert not losses and stored(links) == before and len(rb.sample()) == 16
