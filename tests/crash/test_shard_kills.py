"""A shard's process that is killed again and again while rows are on their way: each is in once, and in order."""

from __future__ import annotations

import pickle
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from distributed.shards import LAYOUT, read, rows, shard, whole
from engram.data import RandomSampler
from engram.distributed import pack
from engram.distributed.client import PendingCall, Producer, ShardClient, ShardLink
from engram.distributed.sharded import ShardedReplayBuffer, ShardedSettings
from engram.errors import ShardUnavailableError

SERVER = """
    import os, pickle, signal, socket, sys
    from multiprocessing.connection import Connection
    from engram.distributed import ReplayShard

    way = socket.socket(socket.AF_UNIX)
    way.connect({address!r})
    connection = Connection(way.detach())
    shard = ReplayShard({capacity}, lanes=4, idle=1e9, scratch_dir={folder!r})
    events, dies_at, is_saving = 0, None, False

    def count(event, arguments):  # of what a save does with files
        global events
        if is_saving and (event == "open" or event.startswith("os.")):
            events += 1
            if events == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    while True:
        method, arguments = pickle.loads(connection.recv_bytes())  # `send` would share the memory of tensors
        if method == "die_at":
            (dies_at,) = arguments
            continue
        if method == "events":
            connection.send_bytes(pickle.dumps(events))
            continue
        if method == "begin_save":
            is_saving, events = True, 0
        try:
            answer = getattr(shard, method)(*arguments)
        except Exception as error:
            answer = error
        connection.send_bytes(pickle.dumps(answer))
"""


class ProcessLink(ShardLink):
    """Calls of a shard in a process that is started again after it died."""

    def __init__(self, start: Callable[[], tuple[Any, Connection]]) -> None:
        self._start = start
        self.program, self._connection = start()
        self._waiting: list[_Call] = []
        self.starts = 1
        self._lock = threading.RLock()  # producers send rows that they held from other threads

    def call(self, method: str, *arguments: Any, answer_bytes: int = 0) -> PendingCall:
        with self._lock:
            return self._call(method, *arguments)

    def _call(self, method: str, *arguments: Any) -> PendingCall:
        if self.program.poll() is not None and method == "facts":
            self._fail()
            self.program, self._connection = self._start()
            self.starts += 1
        pending = _Call(self)
        self._waiting.append(pending)
        try:
            self._connection.send_bytes(pickle.dumps((method, arguments)))
        except OSError:
            self._fail()
        return pending

    def die_at(self, event: int) -> None:
        """The process is to kill itself at the event given, 1 or more, of the next save."""
        self._connection.send_bytes(pickle.dumps(("die_at", (event,))))

    def receive(self, timeout: float) -> None:
        """Takes the next answer in, or the end of the process."""
        with self._lock:
            try:
                if self._connection.poll(timeout):
                    answer = self._connection.recv_bytes()
                    self._waiting.pop(0).answer = pickle.loads(answer)
            except (EOFError, OSError):
                self._fail()

    def _fail(self) -> None:
        for pending in self._waiting:
            pending.answer = ShardUnavailableError("the process is gone")
        self._waiting.clear()


_NONE_YET = object()


class _Call(PendingCall):
    def __init__(self, link: ProcessLink) -> None:
        self._link, self.answer = link, _NONE_YET

    def result(self, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while self.answer is _NONE_YET:
            left = deadline - time.monotonic()
            self._link.receive(max(0.0, left))
            if self.answer is _NONE_YET and left <= 0:
                raise TimeoutError
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def has_come(self) -> bool:
        return self.answer is not _NONE_YET


@pytest.fixture
def link(script: Any, ram_path: Path) -> Iterator[ProcessLink]:
    address = str(ram_path / "way")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()

    def start() -> tuple[Any, Connection]:
        program = script(SERVER, address=address, capacity=400_000, folder=str(ram_path / "shard"))
        listener.settimeout(120)
        return program, Connection(listener.accept()[0].detach())

    yield ProcessLink(start)
    listener.close()


@pytest.mark.parametrize("kills", [6, pytest.param(12, marks=pytest.mark.long)])
def test_each_row_is_in_once_and_in_order(link: ProcessLink, ram_path: Path, kills: int) -> None:
    rng = random.Random(0)
    client = ShardClient(link, 0)
    client.ask(time.monotonic() + 120, "adopt", LAYOUT.to_bytes())
    client.layout = LAYOUT.to_bytes()
    client.forget()
    producers, sent = [Producer(client, name, 300.0) for name in "ab"], [0, 0]
    while link.starts <= kills:
        for _ in range(rng.randrange(1, 12)):
            k, n = rng.randrange(2), rng.choice([1, 7, 500, 4000])
            if sent[k] + n <= 90_000:
                producers[k].extend(pack(LAYOUT, rows(sent[k], sent[k] + n, k)))
                sent[k] += n
        if rng.random() < 0.3:
            producers[0].flush()
        time.sleep(rng.random() * 0.004)
        link.program.kill()
    for producer in producers:
        producer.flush()
    assert [producer.acknowledged for producer in producers] == sent
    link.program.kill()
    link.program.wait()
    left = shard(400_000, scratch_dir=ram_path / "shard")
    assert min(sent) > 1000 * kills
    for producer, n in zip("ab", sent, strict=True):
        assert read(left, producer) == list(range(n))


@pytest.mark.parametrize("saves", [12, pytest.param(60, marks=pytest.mark.long)])
def test_a_save_of_shards_that_is_killed_is_not_in_force(link: ProcessLink, ram_path: Path, saves: int) -> None:
    rng = random.Random(1)
    rb = ShardedReplayBuffer([link], ShardedSettings(RandomSampler(), batch_size=16, timeout=300.0))
    rb.extend(rows(0, 1000))
    rb.dumps(ram_path / "saved")
    saved, killed = 1000, 0
    for k in range(saves):
        events = link.call("events").result(300.0) if k % 2 else 0  # of the save before, which was finished
        rb.extend(rows(1000 * k + 1000, 1000 * k + 2000))
        rb.flush()
        written = len(rb)
        if k % 2:
            link.die_at(rng.randrange(events) + 1)
        try:
            rb.dumps(ram_path / "saved", timeout=300.0)
            saved = written
        except ShardUnavailableError:
            killed += 1
        rb.loads(ram_path / "saved")
        assert len(rb) == saved and bool((whole(rb.sample()) < 1000 * saves + 1000).all())
        rb.empty()
        rb.loads(ram_path / "saved")
        assert len(rb) == saved
    # A save in the background has other events each time: it may have ended before, and the kill have met a load.
    assert link.starts - 1 >= killed >= saves // 4
