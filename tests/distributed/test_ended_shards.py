"""Readers and writers beside a shard notice that its process has ended, and go on where it is back."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contracts.waiting import NEVER, comes
from distributed.shards import Link, client, read_all, rows, shard, whole
from engram.data import PrioritizedSampler, RandomSampler
from engram.distributed import RayCollector, RayReplayBuffer, ReplayShard, folder_lock, local, sharded
from engram.distributed.client import PendingCall, ShardClient
from engram.distributed.collector import _CollectorActor, _Member, _Share
from engram.distributed.folder_lock import FolderLock, watch_folder
from engram.distributed.sharded import ShardedReplayBuffer, ShardedSettings
from engram.distributed.weights import WeightsFetcher
from engram.errors import NoFreeLaneError, ShardGoneError, ShardUnavailableError, StorageError

pytestmark = pytest.mark.usefixtures("looks_each_time", "lock_order")
SHORT = 0.01  # seconds that a call waits for a shard that is away


@pytest.fixture
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call looks whether the shard lives, where otherwise one look holds for some milliseconds."""
    monkeypatch.setattr(folder_lock, "_INTERVAL", 0.0)


def beside(folder: Path, n: int = 1, **settings: Any) -> tuple[list[Link], Any]:
    """Shards with ten rows each, and a client that opens their stores."""
    ls = [Link(shard(scratch_dir=folder / str(k))) for k in range(n)]
    writers = [client(ls) for _ in range(n)]  # in turn
    for k, writer in enumerate(writers):
        writer.extend(rows(1000 * k, 1000 * k + 10))
        writer.flush()
    for writer in writers:
        writer.close()
    rb = client(ls, local=[True] * n, **{"timeout": SHORT, "batches_per_call": 1, **settings})
    rb.extend(rows(100, 110))
    rb.sample()
    return ls, rb


def numbers(link: Link) -> list[int]:
    return read_all(link.shard)


def draws_until_refused(rb: Any) -> int:
    """How many batches came before the first that is refused; rounds that were read before may."""
    for n in range(10):
        try:
            whole(rb.sample())
        except ShardUnavailableError:
            return n
    raise AssertionError("batches go on coming from shards that have ended")


@pytest.mark.parametrize("n", [1, 2])
def test_nothing_is_written_or_drawn_while_all_shards_are_away(tmp_path: Path, n: int) -> None:
    ls, rb = beside(tmp_path, n)
    for link in ls:
        link.end()
    for _ in range(2):
        with pytest.raises(ShardUnavailableError):
            rb.extend(rows(110, 120))
        with pytest.raises(ShardUnavailableError):
            rb.flush()
        assert draws_until_refused(rb) == 0  # of rounds that were begun before, too
    assert rb._producer.acknowledged == 10


@pytest.mark.parametrize("n", [1, 2])
def test_a_shard_that_is_made_anew_is_written_and_drawn_beside_it_again(tmp_path: Path, n: int) -> None:
    ls, rb = beside(tmp_path, n)
    for life in range(3):
        for link in ls:
            link.end()
        draws_until_refused(rb)
        for k, link in enumerate(ls):
            link.shard = shard(scratch_dir=tmp_path / str(k))
        at = 110 + 10 * life
        rb.extend(rows(at, at + 10))
        rb.flush()
        whole(rb.sample())
        for link in ls:
            link.calls.clear()
        for _ in range(10):
            whole(rb.sample())
        assert [set(link.calls) for link in ls] == [set()] * n
    assert sorted(x for link in ls for x in numbers(link) if 100 <= x < 1000) == list(range(100, 140))


def test_of_several_shards_the_others_are_drawn_from_meanwhile(tmp_path: Path) -> None:
    ls, rb = beside(tmp_path, 2, timeout=0.2)
    home = rb._producer.shard.number
    ls[1 - home].end()
    assert {int(x) // 400 for _ in range(20) for x in rb.sample()["index"]} >= {home}
    assert {int(x) // 400 for _ in range(20) for x in rb.sample()["index"]} == {home}
    ls[1 - home].shard = shard(scratch_dir=tmp_path / str(1 - home))
    assert comes(lambda: {int(x) // 400 for x in rb.sample(200)["index"]} == {0, 1})


@pytest.mark.parametrize("n", [1, 2])
def test_shards_that_are_not_started_again_are_an_error_at_once(tmp_path: Path, n: int) -> None:
    ls, rb = beside(tmp_path, n, timeout=1e6)
    for link in ls:
        link.end()
        link.is_gone = True
    calls = (lambda: rb.extend(rows(0, 1)), lambda: [rb.sample() for _ in range(5)], rb.flush, lambda: len(rb))
    for call in (*calls, lambda: rb.dumps(tmp_path / "saved")):
        with pytest.raises(ShardGoneError, match="is not started again") as caught:
            call()
        assert "Nothing was lost" not in str(caught.value)


def test_of_shards_that_are_not_started_again_one_without_rows_does_not_stand_for_them() -> None:
    ls = [Link(shard()) for _ in range(3)]
    for k in range(2):
        writer = client(ls)
        writer.extend(rows(10 * k, 10 * k + 10))
        writer.flush()
    rb = client(ls, timeout=1e6)
    rb.sample()
    for link in ls[:2]:
        link.end()
        link.is_gone = True
    with pytest.raises(ShardGoneError, match="is not started again"):
        for _ in range(100):
            rb.sample()
    writer = client(ls[2:])
    writer.extend(rows(50, 60))
    writer.flush()
    assert {int(n) // 10 for n in whole(rb.sample())} == {5}


@pytest.mark.parametrize("call", ["extend", "sample", "len", "several"])
def test_a_shard_that_is_made_anew_and_cannot_make_its_store_says_why(call: str) -> None:
    ls = [Link(shard()) for _ in range(2 if call == "several" else 1)]
    rb = client(ls, timeout=SHORT)
    rb.extend(rows(0, 10))
    rb.flush()
    rb.sample()

    def adopt(*args: Any) -> None:
        raise StorageError("the disk is full")

    for link in ls:
        link.end()
        link.shard = ReplayShard(400)
        link.shard.adopt = adopt  # type: ignore[method-assign]
    calls = {
        "extend": lambda: [(rb.extend(rows(10, 20)), rb.flush()) for _ in range(10)],
        "sample": lambda: [rb.sample() for _ in range(300)], "len": lambda: len(rb), "several": lambda: len(rb),
    }  # fmt: skip

    def says_why() -> bool:
        try:
            calls[call]()
        except ShardUnavailableError as error:
            return "shard 0 was started again, and cannot make its store: StorageError: the disk is full" in str(error)
        return False

    assert comes(says_why)
    for link in ls:
        del link.shard.adopt
    with pytest.warns(RuntimeWarning, match="came back without 10 rows"):
        rb.extend(rows(20, 30))
        rb.flush()
    assert comes(lambda: bool((whole(rb.sample()) >= 10).all())) and "cannot make" not in rb._shards[0].absence


def test_one_call_that_says_so_of_a_shard_that_is_started_again_is_not_believed(tmp_path: Path) -> None:
    ls, rb = beside(tmp_path, timeout=NEVER)
    ls[0].end()
    ls[0].is_gone = True

    def come_back(method: str) -> None:
        if ls[0].calls.count("facts") == asked + 2:  # the second greeting
            ls[0].shard = shard(scratch_dir=tmp_path / "0")

    asked = ls[0].calls.count("facts")
    ls[0].lose = come_back
    rb.extend(rows(110, 120))
    assert [x for x in numbers(ls[0]) if x >= 100] == list(range(100, 120))


def test_one_greeting_that_two_threads_look_at_is_not_two_that_were_refused() -> None:
    both_look = threading.Barrier(2)

    class Refused(PendingCall):
        def result(self, timeout: float) -> Any:
            both_look.wait()
            raise ShardGoneError("gone")

        def has_come(self) -> bool:
            return True

    class Restarting(Link):
        def call(self, method: str, *arguments: Any, answer_bytes: int = 0) -> PendingCall:
            return waits.pop() if waits else super().call(method, *arguments)

    waits: list[PendingCall] = [Refused()]
    link = Restarting(shard())
    link.silent = True
    one = ShardClient(link, 0)
    threads = [threading.Thread(target=lambda: one.is_present) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not one.is_gone and not one.is_present
    link.silent = False
    assert one.is_present


def test_a_shard_that_comes_back_elsewhere_is_used_there(tmp_path: Path) -> None:
    ls, rb = beside(tmp_path)
    ls[0].end()
    ls[0].shard = shard(scratch_dir=tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match="came back without 20 rows"):
        index = rb.extend(rows(110, 120))
    assert index.tolist() == list(range(10)) and numbers(ls[0]) == list(range(110, 120))
    assert {int(x) // 10 for x in whole(rb.sample())} == {11} and rb.stats().accepted == 20


def test_one_of_several_shards_that_comes_back_on_another_machine_is_called(tmp_path: Path) -> None:
    ls, rb = beside(tmp_path, 2, timeout=0.2)
    other = 1 - rb._producer.shard.number
    ls[other].end()
    assert comes(lambda: {int(x) // 400 for x in rb.sample()["index"]} == {1 - other})
    ls[other].shard = shard()  # whose folder is nowhere here
    writer = client(ls[other : other + 1])
    writer.extend(rows(700, 750))
    writer.flush()
    ls[other].calls.clear()
    assert comes(lambda: bool((whole(rb.sample()) >= 700).any())) and "draw" in ls[other].calls


def test_a_shard_that_comes_back_on_another_machine_is_called(tmp_path: Path) -> None:
    ls, rb = beside(tmp_path)
    ls[0].end()
    ls[0].shard = shard()  # whose folder is nowhere here
    with pytest.warns(RuntimeWarning, match="came back without 20 rows"):
        rb.extend(rows(110, 120))
    rb.flush()
    ls[0].calls.clear()
    assert {int(x) // 10 for x in whole(rb.sample())} == {11} and "draw" in ls[0].calls


def test_rows_are_refused_where_the_folder_was_removed_beneath_a_living_shard(tmp_path: Path) -> None:
    ls, rb = beside(tmp_path)
    away = client(ls)
    away.extend(rows(500, 510))
    away.flush()
    shutil.rmtree(tmp_path / "0")
    with (
        pytest.raises(StorageError, match="would be lost"),
        pytest.warns(UserWarning, match="its rows are lost with this close"),
    ):
        for k in range(200):
            rb.extend(rows(k, k + 1))
    with pytest.raises(StorageError, match="would be lost"):
        away.extend(rows(510, 520))
        away.flush()
    assert all(len(whole(rb.sample())) == 16 for _ in range(100))  # the rows are there, in the shard


def test_a_priority_that_came_with_rows_waits_for_a_shard_that_ends(tmp_path: Path) -> None:
    def sampler() -> PrioritizedSampler:
        return PrioritizedSampler(None, 1.0, 1.0, eps=0.0)

    ls = [Link(shard(scratch_dir=tmp_path, sampler=sampler()))]
    rb = client(ls, local=[True], sampler=sampler(), timeout=SHORT)
    ls[0].lose = lambda method: "call" if method == "update_priority" else None
    index = rb.extend(rows(0, 3), priority=torch.tensor([0.5, 2.0, 4.0]))
    ls[0].end()
    with pytest.raises(ShardUnavailableError):
        rb.flush()
    ls[0].lose = lambda method: None
    ls[0].shard = shard(scratch_dir=tmp_path, sampler=sampler())
    given = ls[0].shard
    assert comes(lambda: rb.flush() or given._sampler.priorities(index, storage=given._storage).tolist() == [0.5, 2, 4])


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_shard_that_is_made_anew_while_its_store_is_opened_for_writing_gets_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_removed: bool
) -> None:
    ls = [Link(shard(scratch_dir=tmp_path / "0"))]
    lives = [1]

    def look(folder: str) -> Any:
        watch = watch_folder(folder)
        if lives.pop() == 1:
            ls[0].end()
            if is_removed:
                shutil.rmtree(folder)
            ls[0].shard = shard(scratch_dir=folder)
            lives.extend([3, 2])
        return watch

    monkeypatch.setattr(local, "watch_folder", look)
    rb = client(ls, local=[True])
    rb.extend(rows(0, 10))
    rb.flush()
    assert numbers(ls[0]) == list(range(10)) and lives == ([3] if is_removed else [3, 2])


@pytest.mark.parametrize("n", [1, 2])
def test_shards_that_end_while_their_stores_are_opened_for_reading_are_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    ls, _ = beside(tmp_path, n)
    rb = client(ls, local=[True] * n, timeout=SHORT)

    def look(folder: str) -> Any:
        watch = watch_folder(folder)
        ls[int(Path(folder).name)].end()
        shutil.rmtree(folder)
        return watch

    monkeypatch.setattr(sharded, "watch_folder", look)
    with pytest.raises(ShardUnavailableError):
        rb.sample()


def test_the_rows_of_a_dead_collector_are_not_waited_for_where_their_shard_is_gone() -> None:
    class Gone:
        asked = 0

        def end_producer(self, name: str, since: int) -> int:
            self.asked += 1
            if self.asked == 1:
                raise ShardGoneError("gone")
            return 3

    collecting = object.__new__(RayCollector)
    collecting.replay_buffer = Gone()
    with pytest.raises(ShardGoneError):
        collecting._rows_of(_Member(list, None, {}, {}, names=("collector 0",)))


def test_a_collector_waits_for_a_shard_that_ends_between_its_rows_and_their_count(tmp_path: Path) -> None:
    class Ending(RayReplayBuffer):
        def __init__(self, link: Link) -> None:
            ShardedReplayBuffer.__init__(self, [link], ShardedSettings(RandomSampler(), timeout=SHORT), local=[True])
            self.link, self.asked = link, 0

        def rows_in(self) -> int:
            self.asked += 1
            if self.asked == 1:
                self.link.end()
            elif self.asked == 2:
                self.link.shard = shard(scratch_dir=tmp_path)
            return super().rows_in()

    collecting = _CollectorActor()
    collecting._config = SimpleNamespace(workers=1, postproc=None)
    collecting._collector = SimpleNamespace(rollout=lambda: rows(0, 10))
    collecting._fetcher, collecting._episodes = WeightsFetcher(), []
    collecting._buffers = [Ending(Link(shard(scratch_dir=tmp_path)))]
    assert collecting.collect(None).frames == 10


@pytest.mark.parametrize(("share", "batches"), [((0.0, 9), 1), ((1e9, 3), 3), ((1e9, 1), 1)])
def test_a_collector_reports_batches_together_and_counts_their_rows_once(share: Any, batches: int) -> None:
    link = Link(shard())

    class Asked(RayReplayBuffer):
        def __init__(self) -> None:
            ShardedReplayBuffer.__init__(self, [link], ShardedSettings(RandomSampler(), timeout=NEVER))
            self.flushed = 0

        def flush(self, timeout: float | None = None) -> None:
            self.flushed += 1
            super().flush(timeout)

    made = iter(range(0, 1000, 10))
    collecting = _CollectorActor()
    collecting._config = SimpleNamespace(workers=1, postproc=None)
    collecting._collector = SimpleNamespace(rollout=lambda: rows(at := next(made), at + 10))
    collecting._fetcher, collecting._episodes = WeightsFetcher(), []
    collecting._buffers = [Asked()]
    for reports in (1, 2):
        report = collecting.collect(None, _Share(*share))
        assert report.batches == batches and report.frames == 10 * batches * reports and report.batch is None
        assert collecting._buffers[0].flushed == reports
    assert numbers(link) == list(range(20 * batches))


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, (2.5, 1 << 60)),
        ({"total_frames": 10**6}, (2.5, 10)),
        ({"total_frames": 10**6, "frames": 500_000}, (2.5, 5)),
        ({"total_frames": 10**6, "frames": 999_000}, (2.5, 1)),
        ({"num_collectors": 2}, (0.005, 1 << 60)),
        ({"_sync": True}, (0.0, 1)),
        ({"replay_buffer": None}, (0.0, 1)),
        ({"_batch_timeout": 5.0}, (0.0, 1)),
    ],
)
def test_the_more_collectors_the_more_batches_are_in_a_report(settings: dict[str, Any], share: Any) -> None:
    collecting = object.__new__(RayCollector)
    usual = {
        "replay_buffer": object(), "_sync": False, "_batch_timeout": None, "num_collectors": 1000, "total_frames": -1,
        "frames": 0, "frames_per_batch": 100, "_members": [],
    }  # fmt: skip
    vars(collecting).update({**usual, **settings})
    seconds, batches = collecting._next_share()
    assert seconds == share[0] and min(batches, 1 << 60) == share[1]


class TestFolderLock:
    def test_it_ends_with_the_process_that_holds_it(self, tmp_path: Path) -> None:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            lock = FolderLock(tmp_path, 0.0)
            os.write(writer, b"x")
            signal.pause()
            lock.close()
        os.read(reader, 1)
        watch = watch_folder(tmp_path)
        assert watch is not None and watch.is_held()
        with pytest.raises(NoFreeLaneError, match="another shard"):
            FolderLock(tmp_path, 0.0)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert not watch.is_held() and watch_folder(tmp_path) is None

    def test_a_forked_child_of_its_holder_does_not_hold_it(self, tmp_path: Path) -> None:
        lock = FolderLock(tmp_path, 0.0)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, b"x")
            signal.pause()
        os.read(reader, 1)
        watch = watch_folder(tmp_path)
        assert watch is not None
        lock.close()
        try:
            assert not watch.is_held()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def test_a_folder_that_was_removed_is_not_held(self, tmp_path: Path) -> None:
        lock = FolderLock(tmp_path, 0.0)
        watch = watch_folder(tmp_path)
        assert watch is not None and watch.is_held() and not lock.is_removed
        shutil.rmtree(tmp_path)
        assert lock.is_removed and not watch.is_held()

    def test_a_look_holds_for_a_moment_and_an_exact_one_does_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(folder_lock, "_INTERVAL", 1e6)
        lock = FolderLock(tmp_path, 0.0)
        watch = watch_folder(tmp_path)
        lock.close()
        assert watch is not None and watch.is_held()
        assert not watch.look() and not watch.is_held()


def test_a_flush_is_refused_though_a_look_was_a_moment_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "_INTERVAL", 1e6)
    ls, rb = beside(tmp_path)
    ls[0].end()
    rb.extend(rows(110, 120))
    with pytest.raises(ShardUnavailableError):
        rb.flush()
    with pytest.raises(ShardUnavailableError):
        rb.extend(rows(120, 130))
