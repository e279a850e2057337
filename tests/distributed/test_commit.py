"""Saves of several shards: a load gets all parts of one save, or none."""

from __future__ import annotations

import copy
import itertools
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from contracts.waiting import NEVER
from distributed.shards import Link, client, read_all, rows, shard, write
from engram.checkpoint.writer import SnapshotWriter
from engram.data import PrioritizedSampler, SliceSampler
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


def in_all(rows_of_shards: list[list[int]]) -> list[int]:
    """The rows of all shards, in the order of their numbers."""
    return sorted(itertools.chain.from_iterable(rows_of_shards))


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


@pytest.mark.parametrize("failing", ["begin_save of the last shard", "its answer", "the root"])
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
                fate = "call" if failing == "begin_save of the last shard" else "answer"
                links[2].lose = lambda method, fate=fate: fate if method == "begin_save" else None
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


def test_a_question_for_the_end_of_a_save_that_is_lost_is_asked_again(tmp_path: Path) -> None:
    links, rb = buffer()
    losses = ["call", "answer"]
    links[1].lose = lambda method: losses.pop() if method == "saved" and losses else None
    rb.dumps(tmp_path, timeout=NEVER)
    assert not losses
    before = stored(links)
    rb.empty()
    rb.loads(tmp_path)
    assert stored(links) == before


def test_a_shard_that_begins_another_life_in_the_middle_of_a_save_fails_it(tmp_path: Path) -> None:
    links, rb = buffer()
    rb.dumps(tmp_path)
    before = stored(links)

    def restarts(method: str) -> str | None:
        if method == "saved":
            links[1].lose = lambda _: None
            links[1].shard.empty(links[1].shard.incarnation)
        return None

    links[1].lose = restarts
    with pytest.raises(ShardUnavailableError):
        rb.dumps(tmp_path, timeout=NEVER)
    rb.loads(tmp_path)
    assert stored(links) == before


class _Paused:
    """The disk of saves that are under way: it stops before a snapshot is in force, until it is told to go on."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.reached, self.goes_on = threading.Event(), threading.Event()
        commit = SnapshotWriter.commit

        def paused(writer: SnapshotWriter) -> None:
            if Path(writer._directory.root) == folder:
                self.reached.set()
                assert self.goes_on.wait(NEVER)
            commit(writer)

        patch.setattr(SnapshotWriter, "commit", paused)


def test_shards_are_written_and_drawn_from_while_they_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links, rb = buffer()
    before, paused = stored(links), _Paused(monkeypatch, tmp_path / "shards" / "2")  # the last that begins
    saving = threading.Thread(target=rb.dumps, args=(tmp_path,))
    saving.start()
    assert paused.reached.wait(NEVER)
    rb.extend(rows(500, 900))
    rb.flush()
    assert len(rb) == 420 and len(rb.sample()) == 16 and len(client(links).sample()) == 16
    paused.goes_on.set()
    saving.join()
    rb.loads(tmp_path)
    assert stored(links) == before


def test_a_save_waits_for_another_one_of_the_same_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links, rb = buffer()
    paused = _Paused(monkeypatch, tmp_path / "a" / "shards" / "1")
    first = threading.Thread(target=rb.dumps, args=(tmp_path / "a",))
    first.start()
    assert paused.reached.wait(NEVER)
    asked = threading.Event()
    links[1].lose = lambda method: asked.set() if method == "begin_save" else None
    second = threading.Thread(target=rb.dumps, args=(tmp_path / "b",))
    second.start()
    assert asked.wait(NEVER) and second.is_alive()
    paused.goes_on.set()
    first.join(), second.join()
    for name in "ab":
        rb.loads(tmp_path / name)
        assert len(rb) == 30


def test_a_save_that_does_not_end_in_time_is_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, rb = buffer()
    paused = _Paused(monkeypatch, tmp_path / "shards" / "1")
    with pytest.raises(ShardUnavailableError, match="not saved in time"):
        rb.dumps(tmp_path, timeout=0.2)
    paused.goes_on.set()
    with pytest.raises(CheckpointError):
        rb.loads(tmp_path)


def _fail_at(root: Path) -> Any:
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


def prioritized(n: int) -> tuple[list[Link], Any]:
    """Shards that draw by priority, with a producer each, whose rows have priorities that their numbers tell."""
    links = [Link(shard(sampler=PrioritizedSampler(400, 0.7, 0.4))) for _ in range(n)]
    for k in range(n):
        rb = client(links, sampler=PrioritizedSampler(400, 0.7, 0.4))
        rb.extend(rows(100 * k, 100 * k + 50), priority=1.0 + torch.arange(100.0 * k, 100 * k + 50))
        rb.extend(rows(100 * k + 50, 100 * k + 55))
        rb.flush()
    return links, rb


def priorities(one: ReplayShard) -> dict[int, float]:
    """The priority of each row of a shard, by its number."""
    stored = (one._lanes.generations(torch.arange(one.capacity)) >= 0).nonzero().flatten()
    return dict(
        zip(
            one._storage.get(stored)["n"].tolist(),
            one._sampler.priorities(stored, storage=one._storage).tolist(),
            strict=True,
        )
    )


@pytest.mark.parametrize(("saved", "loaded"), [(3, 1), (1, 3), (3, 2), (2, 5), (4, 4)])
class TestAnotherNumberOfShards:
    def test_each_row_comes_into_one_and_they_get_equally_many(self, tmp_path: Path, saved: int, loaded: int) -> None:
        links, rb = buffer(saved)
        rb.dumps(tmp_path)
        others = [Link(ReplayShard(400, lanes=4, timeout=0.0)) for _ in range(loaded)]
        other = client(others)
        other.loads(tmp_path)
        now = stored(others)
        assert in_all(now) == in_all(stored(links)) and len(other) == 10 * saved
        assert max(map(len, now)) - min(map(len, now)) <= 1
        other.extend(rows(500, 510))
        assert len(other) == 10 * saved + 10 and len(other.sample()) == 16

    def test_rows_keep_their_priorities(self, tmp_path: Path, saved: int, loaded: int) -> None:
        links, rb = prioritized(saved)
        rb.dumps(tmp_path)
        before = {n: p for link in links for n, p in priorities(link.shard).items()}
        others = [Link(shard(sampler=PrioritizedSampler(400, 0.7, 0.4))) for _ in range(loaded)]
        other = client(others, sampler=PrioritizedSampler(400, 0.7, 0.4))
        other.loads(tmp_path)
        now = {n: p for link in others for n, p in priorities(link.shard).items()}
        assert now == pytest.approx(before) and len(now) == 55 * saved
        highest = {one.shard._new_priority for one in others if len(one.shard)}
        assert max(highest) == pytest.approx(max(link.shard._new_priority for link in links))
        assert len(other.sample()) == 16

    def test_trajectories_stay_apart(self, tmp_path: Path, saved: int, loaded: int) -> None:
        sampler = SliceSampler(slice_len=5, traj_key="traj")
        links = [Link(shard(sampler=copy.deepcopy(sampler))) for _ in range(saved)]
        for k in range(4 * saved):  # of equal ids, in one lane after the other
            one = client(links, sampler=sampler, producer=f"{k}")
            one.extend(rows(100 * k, 100 * k + 10))
            one.close()
        one.dumps(tmp_path)
        others = [Link(shard(sampler=copy.deepcopy(sampler))) for _ in range(loaded)]
        other = client(others, sampler=sampler, batch_size=50)
        other.loads(tmp_path)
        drawn = set()
        for _ in range(60):
            for piece in other.sample()["n"].reshape(-1, 5).tolist():
                assert piece == list(range(piece[0], piece[0] + 5)) and piece[0] % 100 <= 5
                drawn.add(piece[0])
        assert len(drawn) > 4 * saved

    def test_a_load_is_repeated_where_a_shard_was_away(self, tmp_path: Path, saved: int, loaded: int) -> None:
        links, rb = buffer(saved)
        rb.dumps(tmp_path)
        others = [Link(shard()) for _ in range(loaded)]
        methods = ["verify_pieces", "load_pieces"] if saved != loaded else ["verify", "loads"]
        losses = [(method, fate) for method in methods for fate in ("call", "answer")]
        others[0].lose = lambda method: losses.pop(0)[1] if losses and losses[0][0] == method else None
        client(others).loads(tmp_path, timeout=NEVER)
        assert not losses and in_all(stored(others)) == in_all(stored(links))


def test_a_full_buffer_fits_into_another_number_of_shards_of_the_same_room(tmp_path: Path) -> None:
    links = [Link(shard(400)) for _ in range(2)]
    for k in range(2):
        rb = client(links).producing_as(str(k))  # who stays in its shard
        rb.extend(rows(1000 * k, 1000 * k + 700))
        rb.flush()
    rb.dumps(tmp_path)
    others = [Link(shard(200)) for _ in range(4)]
    client(others).loads(tmp_path)
    assert in_all(stored(others)) == [*range(300, 700), *range(1300, 1700)]


def test_what_does_not_fit_into_another_number_of_shards_changes_nothing(tmp_path: Path) -> None:
    _, rb = buffer(3)
    rb.dumps(tmp_path)
    small = [Link(shard(8)) for _ in range(2)]
    client(small).extend(rows(0, 1))
    with pytest.raises(CheckpointMisfitError, match=r"room for \d+ rows in 2 shards here, 30 rows saved there"):
        client(small).loads(tmp_path)
    by_priority = [Link(shard(sampler=PrioritizedSampler(400, 0.7, 0.4))) for _ in range(2)]
    client(by_priority).extend(rows(0, 1))
    with pytest.raises(CheckpointMisfitError, match="PrioritizedSampler here, a RandomSampler there"):
        client(by_priority).loads(tmp_path)
    narrow = [Link(ReplayShard(400, timeout=0.0)) for _ in range(2)]
    client(narrow).extend(TensorDict({"n": torch.arange(1)}, [1]))
    with pytest.raises(CheckpointMisfitError, match="wide"):
        client(narrow).loads(tmp_path)
    file = next(f for f in (tmp_path / "shards" / "2").rglob("*.bin"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    two = [Link(shard()) for _ in range(2)]
    client(two).extend(rows(0, 1))
    with pytest.raises(CorruptCheckpointError):
        client(two).loads(tmp_path)
    for some in (small, by_priority, narrow, two):
        assert sum(len(link.shard) for link in some) == 1


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
