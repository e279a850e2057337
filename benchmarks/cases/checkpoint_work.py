"""What the checkpoint case runs: a save, a load, and the plain copies and reads of the same bytes beside them."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict

from benchmarks.cases.mapped import drop_from_cache
from benchmarks.data import cartpole_chunks
from benchmarks.libraries import replay_buffers

COPIED, READ = 1 << 20, 1 << 22
STORAGES = {"memory": "LazyTensorStorage", "mapped": "LazyMemmapStorage"}
PAGE = os.sysconf("SC_PAGE_SIZE")


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call, with no collection of garbage in it."""
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    try:
        work()
        return time.perf_counter() - start
    finally:
        gc.enable()


class Saved:
    """A full buffer of CartPole steps of one library, and its checkpoint below `folder`."""

    def __init__(self, library: str, storage: str, rows: int, folder: Path, form: str = "Tensor") -> None:
        self.library, self.storage, self.rows, self.form = library, storage, rows, form
        self.path = folder / f"{library}-{storage}-{form}"
        self.rb = self.empty()
        for chunk in cartpole_chunks(rows):
            self.rb.extend(chunk)

    def empty(self) -> Any:
        """A buffer of the same shape that holds nothing."""
        data = replay_buffers(self.library)
        storage = getattr(data, STORAGES[self.storage])(self.rows)
        storage.checkpointer = getattr(data, f"{self.form}StorageCheckpointer")()
        return data.ReplayBuffer(storage=storage, batch_size=256)

    def save(self) -> float:
        """Seconds of a full save: nothing lies there before."""
        shutil.rmtree(self.path, ignore_errors=True)
        return timed(lambda: self.rb.dumps(self.path))

    def save_more(self, steps: TensorDict) -> float:
        """Seconds of the save after these steps were appended to what lies there."""
        self.rb.extend(steps)
        return timed(lambda: self.rb.dumps(self.path))

    def load(self, *, cold: bool) -> float:
        """Seconds of a load into an empty buffer."""
        rb = self.empty()
        self.cache(cold)
        wake(2 * self.nbytes)  # the page cache's, and what is read into
        return timed(lambda: rb.loads(self.path))

    def read(self, *, cold: bool, fresh: bool) -> float:
        """Seconds of reading the checkpoint's files: into new memory that takes them all, or into the same 4 MB."""
        self.cache(cold)
        wake(2 * self.nbytes)  # the page cache's, and what is read into
        return timed(lambda: read_files(self.path, fresh))

    def cache(self, cold: bool) -> None:
        """Takes the files out of the page cache, or brings them in."""
        if cold:
            drop_from_cache(self.path)
        else:
            read_files(self.path, fresh=False)

    def write_store(self) -> float:
        """Seconds of writing as many bytes as a mapped store of these rows has to a new file; nothing is synced."""
        rows, target = memoryview(self.rb.storage.lanes.store.memory()), self.path.with_suffix(".store")
        wake(2 * len(rows))
        block = bytes(rows[:COPIED])

        def work() -> None:
            with open(target, "wb", buffering=0) as file:
                for start in range(0, len(rows), COPIED):
                    file.write(block[: len(rows) - start])

        try:
            return timed(work)
        finally:
            target.unlink(missing_ok=True)

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoint's files."""
        return size(self.path)

    def copy(self, nbytes: int) -> float:
        """Seconds of writing this many bytes out of the memory of the rows to a file, and fsync."""
        rows = memoryview(self.rb.storage.lanes.store.memory())[:nbytes]
        target = self.path.with_suffix(".copy")

        def work() -> None:
            with open(target, "wb", buffering=0) as file:
                for start in range(0, nbytes, COPIED):
                    file.write(rows[start : start + COPIED])
                os.fsync(file.fileno())

        try:
            return timed(work)
        finally:
            target.unlink(missing_ok=True)


def wake(nbytes: int) -> None:
    """Takes memory and gives it back, so that whatever is timed next finds the same: a virtual machine may have lent
    memory that lies free to others, and to get it back costs more than any copy into it.
    """
    np.empty(nbytes, np.uint8).fill(1)


def size(folder: Path) -> int:
    """Bytes of the files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def read_files(folder: Path, fresh: bool) -> None:
    """Read every file below `folder` from front to back."""
    whole = memoryview(np.empty(size(folder) if fresh else READ, np.uint8))
    at = 0
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        with open(path, "rb", buffering=0) as file:
            while got := file.readinto(whole[at : at + READ] if fresh else whole):
                at += got if fresh else 0


def latencies(rb: Any, steps: TensorDict, go_on: Callable[[], bool]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each `extend` and of each `sample` that follow each other for as long as `go_on` says."""
    extends, samples = [], []
    clock = time.perf_counter
    while go_on():
        start = clock()
        rb.extend(steps)
        middle = clock()
        rb.sample()
        extends.append(middle - start)
        samples.append(clock() - middle)
    return np.array(extends), np.array(samples)


@contextmanager
def memory_peak() -> Iterator[list[int]]:
    """Bytes of memory of its own that this process had at most inside the block, above what it had before."""
    before, ended = _own_memory(), threading.Event()
    peak = [0]

    def watch() -> None:
        while not ended.wait(0.002):
            peak[0] = max(peak[0], _own_memory() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def _own_memory() -> int:
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * PAGE


def real_cartpole(n: int) -> TensorDict:
    """`n` steps of CartPole under a random policy, whose episodes end where they end."""
    collectors, envs = (importlib.import_module(f"engram.{name}") for name in ("collectors", "envs"))
    with collectors.SyncDataCollector(envs.GymEnv("CartPole-v1"), frames_per_batch=n, total_frames=n) as collector:
        batch: TensorDict = next(iter(collector)).clone()
    return batch


def pixel_steps(n: int, *, episode: int = 200) -> TensorDict:
    """`n` steps of 84 x 84 frames of noise, which nothing can compress, in episodes of one length."""
    import torch

    time = torch.arange(n)
    done = (time % episode == episode - 1).unsqueeze(-1)
    frames = torch.randint(0, 256, (n + n // episode + 1, 84, 84), dtype=torch.uint8)
    at = time + time // episode  # each episode has one frame more than steps
    no = torch.zeros(n, 1, dtype=torch.bool)
    following = {"pixels": frames[at + 1], "reward": torch.rand(n, 1), "done": done, "truncated": done.clone()}
    root = {"pixels": frames[at], "action": torch.randint(0, 6, (n,)), "done": no, "truncated": no.clone()}
    following["terminated"], root["terminated"] = no.clone(), no.clone()
    return TensorDict({**root, "next": following}, batch_size=[n])


def break_rule(steps: TensorDict, key: str) -> TensorDict:
    """The same steps; in one of a thousand what follows is not what the next step begins with."""
    import torch

    broken = steps.clone()
    n = len(steps)
    at = torch.randperm(n, generator=torch.Generator().manual_seed(0))[: n // 1000]
    broken["next", key][at] = broken["next", key][at] + 1
    return broken
