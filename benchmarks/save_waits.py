"""How long clients of a shard wait for their answers while it is saved.

    python -m benchmarks.save_waits                    1.2 GB of rows
    python -m benchmarks.save_waits --gigabytes 0.1 --prioritized

A shard in a process of its own answers calls one at a time, as an actor does. One client writes, a second one draws,
and a third one has all of it saved twice: into an empty folder, and then with what was written since. Each wait is the
time of one call, begun when the one before was answered. Beside them stands what the shard needed for its calls, and
how much of that was CPU time of the thread that answers: the rest of a long call it was not running, on a machine with
fewer cores than work, or it waited for the save.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import pickle
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from tensordict import TensorDict

from engram.data import PrioritizedSampler, RandomSampler
from engram.distributed import ReplayShard, ShardedReplayBuffer, ShardedSettings
from engram.distributed.client import PendingCall, ShardLink

ROW_FLOATS = 256  # of 4 bytes, beside two numbers
BATCH = 256
WRITTEN = 256  # rows of a call


ANSWERED = "answered"  # which asks for `Answered` of all calls


class Answered(NamedTuple):
    """A call that a shard has answered, when it began, and seconds: of the clock, and of CPU."""

    method: str
    began: float
    took: float
    cpu: float


def serve(connections: list[Connection], capacity: int, prioritized: bool, folder: str) -> None:
    """A shard that answers the calls of all connections, one at a time."""
    torch.set_num_threads(1)
    sampler = PrioritizedSampler(capacity, 0.6, 0.4) if prioritized else RandomSampler()
    shard = ReplayShard(capacity, sampler=sampler, scratch_dir=folder)
    answered: list[Answered] = []
    answers: dict[Connection, queue.SimpleQueue[Any]] = {one: queue.SimpleQueue() for one in connections}
    for one, of_one in answers.items():  # a client that does not fetch its answers keeps no other one from theirs
        threading.Thread(target=send, args=(one, of_one), daemon=True).start()
    while connections:
        for connection in wait(connections):
            assert isinstance(connection, Connection)
            try:
                method, arguments = pickle.loads(connection.recv_bytes())  # `recv` shares memory of tensors
            except (EOFError, OSError):
                connections.remove(connection)
                continue
            began, cpu = time.perf_counter(), time.thread_time()
            try:
                answer = answered if method == ANSWERED else getattr(shard, method)(*arguments)
            except Exception as error:
                answer = error
            answered.append(Answered(method, began, time.perf_counter() - began, time.thread_time() - cpu))
            answers[connection].put(answer)
    shard.close()


def send(connection: Connection, answers: queue.SimpleQueue[Any]) -> None:
    """Sends answers until the other end is closed."""
    with contextlib.suppress(OSError):
        while True:
            connection.send_bytes(pickle.dumps(answers.get()))


class Link(ShardLink):
    """Calls over one connection, whose answers come in their order."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.RLock()
        self._pending: list[_Call] = []

    def call(self, method: str, *arguments: Any, answer_bytes: int = 0) -> PendingCall:
        with self._lock:
            self._connection.send_bytes(pickle.dumps((method, arguments)))
            self._pending.append(_Call(self))
            return self._pending[-1]

    def receive(self, timeout: float) -> bool:
        with self._lock:
            if not self._connection.poll(timeout):
                return False
            self._pending.pop(0).answer = (pickle.loads(self._connection.recv_bytes()),)
            return True


class _Call(PendingCall):
    def __init__(self, link: Link) -> None:
        self._link = link
        self.answer: tuple[Any] | None = None

    def result(self, timeout: float) -> Any:
        while self.answer is None:
            if not self._link.receive(timeout):
                raise TimeoutError
        if isinstance(self.answer[0], Exception):
            raise self.answer[0]
        return self.answer[0]

    def has_come(self) -> bool:
        return self.answer is not None or (self._link.receive(0.0) and self.answer is not None)


def client(connection: Connection, prioritized: bool) -> ShardedReplayBuffer:
    """A buffer over the shard at the other end."""
    sampler = PrioritizedSampler(1, 0.6, 0.4) if prioritized else RandomSampler()
    return ShardedReplayBuffer(
        [Link(connection)], ShardedSettings(sampler, batch_size=BATCH, batches_per_call=1, timeout=60.0)
    )


class Caller(threading.Thread):
    """Calls again and again, and keeps how long each call took and when it began."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call, self._ends = call, threading.Event()
        self.calls: list[tuple[float, float]] = []

    def run(self) -> None:
        while not self._ends.is_set():
            began = time.perf_counter()
            self._call()
            self.calls.append((began, time.perf_counter() - began))

    def end(self) -> None:
        self._ends.set()
        self.join()

    def waits(self, begin: float, end: float) -> list[float]:
        """Of the calls that were on their way at some moment of that time."""
        return [took for began, took in self.calls if began < end and began + took > begin]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--prioritized", action="store_true")
    parser.add_argument("--folder", default=None, help="where it saves; a temporary folder")
    args = parser.parse_args()
    capacity = int(args.gigabytes * 1e9) // (4 * ROW_FLOATS + 16)
    rows = TensorDict(
        {"n": torch.arange(WRITTEN), "traj": torch.zeros(WRITTEN, dtype=torch.int64),
         "obs": torch.randn(WRITTEN, ROW_FLOATS)}, [WRITTEN],
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory(dir=args.folder) as saved:
        pairs = [multiprocessing.Pipe() for _ in range(3)]
        context = multiprocessing.get_context("spawn")
        ends = [far for _, far in pairs]
        process = context.Process(target=serve, args=(ends, capacity, args.prioritized, str(Path(memory) / "shard")))
        process.start()
        for end in ends:
            end.close()
        writer, reader, saver = (client(near, args.prioritized) for near, _ in pairs)
        for _ in range(capacity // WRITTEN + 1):
            writer.extend(rows)
        writer.flush()

        def write() -> None:
            writer.extend(rows)
            writer.flush()

        callers = [Caller(write), Caller(reader.sample)]
        for caller in callers:
            caller.start()
        time.sleep(2.0)
        began = time.perf_counter()
        phases = [("before", began - 2.0, began)]
        print(f"load average {os.getloadavg()[0]:.1f}. Before: {report(callers, began - 2.0, began)}", flush=True)
        for what in ("into an empty folder", "what was written since"):
            began = time.perf_counter()
            saver.dumps(saved)
            ended = time.perf_counter()
            time.sleep(2.0)  # until calls that were on their way have been answered
            print(f"a save of {args.gigabytes:g} GB, {what}, {ended - began:.2f} s: {report(callers, began, ended)}",
                  flush=True)  # fmt: skip
            phases.append((what, began, ended))
        for caller in callers:
            caller.end()
        answered = Link(pairs[2][0]).call(ANSWERED).result(60.0)
        for what, began, ended in phases:
            print(f"the shard, {what}: {report_shard(answered, began, ended)}", flush=True)
        writer.close(), reader.close(), saver.close()
        for near, _ in pairs:
            near.close()
        process.join()


def report(callers: list[Caller], begin: float, end: float) -> str:
    """The waits of that time."""
    texts = []
    for who, caller in zip(("a writer", "a reader"), callers, strict=True):
        waits = sorted(1000 * wait for wait in caller.waits(begin, end))
        most, middle = waits[-1], waits[len(waits) // 2]
        of_1000 = waits[min(len(waits) - 1, len(waits) * 999 // 1000)]
        texts.append(f"{who} waited {most:.1f} ms at most, {of_1000:.1f} (99.9 %), {middle:.1f} (50 %) of {len(waits)}")
    return ", ".join(texts)


def report_shard(answered: list[Answered], begin: float, end: float) -> str:
    """The shard's calls of that time that took longest, by the clock and by CPU."""
    calls = [one for one in answered if begin < one.began + one.took and one.began < end]

    def text(one: Answered) -> str:
        return f"{one.method} {1000 * one.took:.1f} ms with {1000 * one.cpu:.1f} of CPU"

    longest = sorted(calls, key=lambda one: -one.took)[:3]
    return f"{', '.join(map(text, longest))}; most CPU: {text(max(calls, key=lambda one: one.cpu))} ({len(calls)})"


if __name__ == "__main__":
    main()
