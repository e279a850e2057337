"""Saves that are killed: whatever the moment, the next load finds exactly the old state or the new one."""

import os
import random
import signal
import time

import numpy as np
import pytest
import torch

from contracts.checkpointer import RowRings
from engram.data.replay_buffers.checkpointers import (
    TensorStorageCheckpointer,
    open_snapshot,
    rows,
    save_snapshot,
    verify,
)
from engram.errors import CheckpointError

RANDOM_KILLS = int(os.environ.get("ENGRAM_TEST_KILLS", "200"))
CALLS = (
    "open",
    "link",
    "write",
    "fsync",
    "replace",
    "mkdir",
    "unlink",
    "rmdir",
    "close",
    "fchmod",
    "scandir",
    "posix_fadvise",
)


class Counted(RowRings):
    """Rings whose rows are all a function of one number."""

    def __init__(self, number: int, size: int = 64) -> None:
        super().__init__(lane_capacity=size, lanes=2, strands=2, row_bytes=1024)
        self.memory[:] = np.arange(self.memory.size, dtype=np.uint32).reshape(self.memory.shape) * (number + 7) >> 8
        self.written = number > 0
        for lane in self.lanes:
            lane["published"] = number * size // 3


class Growing(RowRings):
    """Rings of one store that has gone on a bit at each number: a later save takes chunks over."""

    def __init__(self, number: int, size: int = 64) -> None:
        super().__init__(lane_capacity=size, lanes=2, strands=2, row_bytes=1024)
        self.written, self.name = number > 0, "the store"
        for lane in self.lanes:
            lane["published"] = number * (size // 16)
        for w in range(self.first(0), self.lanes[0]["published"]):
            self.memory[:, :, w % size] = np.arange(w, w + 1024, dtype=np.uint32).astype(np.uint8)


KINDS = [Counted, Growing]


def save(path, number, size=64, kind=Counted):
    components = {"sampler": {"number": number, "tree": torch.full((1000,), float(number))}}
    save_snapshot(path, components, (TensorStorageCheckpointer(), kind(number, size)), keep_last=1 + number % 2)


def state_at(path, size=64, kind=Counted):
    """The number that was saved, after a check that every part belongs to it; 0 when there is no checkpoint."""
    rings = kind(0, size)
    try:
        with open_snapshot(path) as opened:
            opened.load_storage(TensorStorageCheckpointer(), rings)
            sampler = opened.components["sampler"]
    except CheckpointError as error:
        assert "no checkpoint" in str(error)
        return 0
    number = sampler["number"]
    assert torch.equal(sampler["tree"], torch.full((1000,), float(number)))
    assert rings.contents() == kind(number, size).contents()
    return number


def in_child(action):
    """Runs `action` in a forked child that it may kill; True when it came to its end."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL)
    return status == 0


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 1 << 15)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_before_any_system_call_a_save_leaves_the_old_state_or_the_new(ram_path, kind):
    def save_killed_at(call, number):
        left = [call]

        def counted(real):
            def wrapper(*arguments, **options):
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return real(*arguments, **options)

            return wrapper

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        save(ram_path, number, kind=kind)

    number, call, finished = 0, 0, False
    while not finished:
        finished = in_child(lambda n=number + 1, c=call: save_killed_at(c, n))
        found = state_at(ram_path, kind=kind)
        assert found in (number, number + 1)
        # a first save that is killed early leaves the path without a checkpoint for the next kill, too
        number, call = found, call + 1
    assert call > 60 and found == number
    assert verify(ram_path).ok


def killed_save(path, number, after, kind):
    """Kills a child `after` seconds into a save; whether the save had come to its end, and the seconds it lived."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(tell, b"!")
        save(path, number, size=512, kind=kind)
        os._exit(0)
    os.read(ready, 1)
    began = time.perf_counter()
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(ready)
    os.close(tell)
    assert status in (0, signal.SIGKILL)
    return status == 0, time.perf_counter() - began


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_random_moments_a_save_leaves_the_old_state_or_the_new(tmp_path, kind):
    duration = sorted(killed_save(tmp_path, number, None, kind)[1] for number in range(1, 6))[2]
    number, outcomes = 5, {"old": 0, "new": 0, "finished": 0}
    for k in range(RANDOM_KILLS):
        finished, _ = killed_save(tmp_path, number + 1, duration * 1.5 * (k + random.random()) / RANDOM_KILLS, kind)
        found = state_at(tmp_path, size=512, kind=kind)
        assert found in (number, number + 1)
        outcomes["finished" if finished else "old" if found == number else "new"] += 1
        number = found
    print(f"{RANDOM_KILLS} kills over {duration * 1000:.0f} ms of a save: {outcomes}")
    assert outcomes["old"] > RANDOM_KILLS // 50  # a busy machine moves the moments, so no more can be asked for
    assert len(list(tmp_path.glob("g-*"))) <= 4
    save(tmp_path, 1000, size=512, kind=kind)
    assert state_at(tmp_path, size=512, kind=kind) == 1000


@pytest.mark.quick
def test_a_reader_that_is_killed_blocks_no_save(tmp_path):
    save(tmp_path, 1)
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        with open_snapshot(tmp_path):
            os.write(tell, b"!")
            signal.pause()
    os.read(ready, 1)
    save(tmp_path, 2)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    save(tmp_path, 4)
    assert [entry.name for entry in tmp_path.glob("g-*")] == ["g-000003"]
