"""Stores in folders that keep each observation once: opened again, looked at, verified, damaged, flushed."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from contracts.children import Child
from contracts.each import each
from engram._native import testing
from engram.cli import info, verify
from engram.data import Compact, LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.errors import StorageError
from engram.store import files, places

COMPACT = Compact("x", frames=4)
SIZE = 5000


def steps(start: int, stop: int) -> TensorDict:
    """Steps of episodes of six steps: one stream of them, however it is cut."""
    numbers = torch.arange(start, stop)
    episode, t = numbers // 6, numbers % 6

    def stacks(episode: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        at = (t.unsqueeze(1) - torch.arange(3, -1, -1)).clamp(min=0)
        seed = episode.unsqueeze(1) * 10 + at
        return ((seed.unsqueeze(-1) * 7919 + torch.arange(SIZE)) * 40_503 >> 5 & 255).to(torch.uint8)

    return TensorDict({"n": numbers, "x": stacks(episode, t), "next": {"x": stacks(episode, t + 1)}}, [stop - start])


def made(folder: Path, n: int = 40, capacity: int = 60, **kwargs: Any) -> TensorDictReplayBuffer:
    storage = LazyMemmapStorage(capacity, scratch_dir=folder, **{"compact": COMPACT, **kwargs})
    rb = TensorDictReplayBuffer(storage=storage, batch_size=16)
    rb.extend(steps(0, n))
    return rb


def flat(steps: TensorDict) -> TensorDict:
    """The same without `"next"`."""
    return TensorDict({"n": steps["n"], "x": steps["x"], "next_x": steps["next", "x"]}, steps.batch_size)


def check(rb: Any) -> int:
    """Compares all rows with what their numbers say; how many there are."""
    rows = rb.storage.get(slice(None))
    expected = torch.cat([steps(n, n + 1) for n in rows["n"].tolist()])
    expected = flat(expected) if "next_x" in rows.keys() else expected
    assert bool((rows.exclude("index") == expected).all())
    return len(rows)


@each("lanes", [None, 1, 4])
def test_a_store_is_opened_again_and_goes_on(tmp_path: Path, lanes: int | None) -> None:
    folder = tmp_path / str(lanes)
    made(folder, lanes=lanes).storage.close()
    for opened in (
        lambda: LazyMemmapStorage.open(folder),
        lambda: LazyMemmapStorage(60, scratch_dir=folder, existsok=True, compact=True, lanes=lanes),
    ):
        rb = TensorDictReplayBuffer(storage=opened(), batch_size=16)
        assert rb.storage.compact == Compact(["x"], {"x": 4}, 1)
        at = int(rb.storage.get(slice(None))["n"].max()) + 1
        rb.extend(steps(at, at + 25))
        check(rb)
        rb.storage.close()
    again = ReplayBuffer.open(folder)
    assert check(again) >= 60 - 15 and again.write_count == 90


def test_a_store_with_other_observations_than_are_asked_for_is_not_opened(tmp_path: Path) -> None:
    made(tmp_path / "compact").storage.close()
    with pytest.raises(StorageError, match="was asked for"):
        LazyMemmapStorage(60, scratch_dir=tmp_path / "compact", existsok=True, compact="n")
    made(tmp_path / "plain", compact=False).storage.close()
    with pytest.raises(StorageError, match="no observations once"):
        LazyMemmapStorage(60, scratch_dir=tmp_path / "plain", existsok=True, compact="x")
    again = LazyMemmapStorage(60, scratch_dir=tmp_path / "plain", existsok=True, compact=True)
    assert again.compact is None and len(again) == 40


def test_a_copy_of_the_file_is_a_store(tmp_path: Path) -> None:
    made(tmp_path / "one").storage.close()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage.open(tmp_path / "two"))
    rb.extend(steps(40, 90))
    assert check(rb) == 60 and check(ReplayBuffer.open(tmp_path / "one")) == 40


def test_a_store_of_flat_rows_is_opened_looked_at_verified_and_saved(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(60, scratch_dir=folder, compact=True), batch_size=16)
    rb.extend(flat(steps(0, 40)))
    observer = ReplayBuffer.open(folder, read_only=True)
    assert check(rb) == check(observer) == 40
    assert [key.key for key in info(folder).keys] == ["n", "x", "next_x", "index"]
    assert "'x' in stacks of 4 frames" in info(folder).notes[0] and verify(folder).ok
    observer.dumps(tmp_path / "saved")
    rb.storage.close()
    again = TensorDictReplayBuffer(storage=LazyMemmapStorage.open(folder), batch_size=16)
    assert again.storage.compact == Compact(["x"], {"x": 4}, 1)
    again.extend(flat(steps(40, 75)))
    assert check(again) == 60
    for compact in (COMPACT, True, False):
        twin = ReplayBuffer(storage=LazyTensorStorage(60, compact=compact))
        twin.loads(tmp_path / "saved")
        assert check(twin) == 40 and (twin.storage.compact is None) == (compact is False)


# ---- who only looks ----
def test_an_observer_sees_rows_whole_while_they_come(tmp_path: Path) -> None:
    rb = made(tmp_path, 7)
    observer = ReplayBuffer.open(tmp_path, read_only=True)
    for start in range(7, 130, 9):
        rb.extend(steps(start, start + 9))
        assert check(observer) == min(60, start + 9)


def test_a_frozen_observer_keeps_the_next_observations_of_its_newest_rows(tmp_path: Path) -> None:
    rb = made(tmp_path, 10)
    observer = ReplayBuffer.open(tmp_path, read_only=True)
    observer.storage.freeze()
    for start in range(10, 50, 8):
        rb.extend(steps(start, start + 8))
    assert check(observer) == 10


def test_a_save_of_an_observer_is_loaded(tmp_path: Path) -> None:
    made(tmp_path / "store")
    observer = ReplayBuffer.open(tmp_path / "store", read_only=True)
    observer.dumps(tmp_path / "saved")
    for compact in (COMPACT, False):
        twin = ReplayBuffer(storage=LazyMemmapStorage(60, scratch_dir=tmp_path / str(compact), compact=compact))
        twin.loads(tmp_path / "saved")
        assert check(twin) == 40
        twin.storage.close()
        assert check(ReplayBuffer.open(tmp_path / str(compact))) == 40
        assert verify(tmp_path / str(compact)).ok


def test_info_describes_a_store(tmp_path: Path) -> None:
    made(tmp_path).storage.close()
    assert [key.key for key in info(tmp_path).keys] == ["n", "x", "next.x", "index"]


# ---- damage ----
def test_verify_finds_what_is_damaged_in_records_units_and_tails(tmp_path: Path) -> None:
    rb = made(tmp_path / "store", 40)
    rb.storage.flush()
    assert verify(tmp_path / "store").ok
    store = rb.storage.lanes.store
    rb.storage.close()
    file = tmp_path / "store" / "rows.engram"
    content = file.read_bytes()
    newest, carried = steps(39, 40), steps(35, 36)["next", "x"][0, 3].numpy().tobytes()
    tail = newest["next", "x"][0].numpy().tobytes()
    places = {
        "a record": content.index(steps(20, 21)["x"][0, 3].numpy().tobytes()),
        "a unit": content.index(carried, store.total_bytes + 40 * SIZE),
        "a tail": content.index(tail[-SIZE:], store.total_bytes),
    }
    for what, at in places.items():
        damaged = bytearray(content)
        damaged[at + 100] ^= 1
        file.write_bytes(damaged)
        result = verify(tmp_path / "store")
        assert not result.ok and len(result.damages) >= 1, what
    file.write_bytes(content)
    assert verify(tmp_path / "store").ok


def test_a_file_that_lacks_its_last_segment_is_refused(tmp_path: Path) -> None:
    made(tmp_path).storage.close()
    file = tmp_path / "rows.engram"
    os.truncate(file, file.stat().st_size - 4096)
    for read_only in (False, True):
        with pytest.raises(StorageError, match="cut short"):
            LazyMemmapStorage.open(tmp_path, read_only=read_only)


@each("what", ["record", "unit"])
def test_rows_that_a_failing_disk_did_not_keep_are_missed_by_the_next_flush(tmp_path: Path, what: str) -> None:
    rb = made(tmp_path / what)
    store = rb.storage.lanes.store
    store.dirty_again([40])
    frame = steps(35, 36)["next", "x"][0, 3] if what == "unit" else steps(20, 21)["x"][0, 3]
    file = tmp_path / what / "rows.engram"
    at = file.read_bytes().index(frame.numpy().tobytes(), store.total_bytes)
    with file.open("r+b") as disk:
        disk.seek(at)
        disk.write(bytes(SIZE))
    with pytest.raises(RuntimeError, match=r"row (20|36) of lane 0 is lost"):
        store.dirty_again([40])


def test_next_observations_of_flushed_rows_are_durable_though_others_follow_while_they_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = made(tmp_path / "store")
    store = rb.storage.lanes.store

    def meanwhile() -> None:
        for at in (40, 41):  # their tails take both places
            rb.extend(steps(at, at + 1))

    assert testing.keep_durable_tails_interrupted(store, meanwhile)
    others = made(tmp_path / "others")
    assert not testing.keep_durable_tails_interrupted(others.storage.lanes.store, lambda: others.extend(steps(40, 100)))
    cut = bytearray((tmp_path / "store" / "rows.engram").read_bytes())
    for slot in (40, 41):
        at = store.rows_offset + slot * store.row_stride
        cut[at : at + store.row_stride] = bytes(store.row_stride)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "rows.engram").write_bytes(cut)
    for module in (files, places):
        monkeypatch.setattr(module, "boot_id", lambda: b"that of the next")
    assert check(ReplayBuffer.open(tmp_path / "cut")) == 40


@each("n_steps", [1, 2, 3])
def test_tails_are_found_after_a_power_cut_whatever_their_words_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_steps: int
) -> None:
    folder = tmp_path / str(n_steps)
    rb = made(folder, compact=Compact("x", frames=4, n_steps=n_steps))
    store = rb.storage.lanes.store
    piece, _, units, _ = json.loads(store.layout)["observations"]["sizes"]
    records = 60 + 3
    owners = 8 * (-(-14 * records // units) + 1)
    words = -(-owners // 64) * 64
    of_tails = store.total_bytes + words + -(-8 * records // 64) * 64
    image = (folder / "rows.engram").read_bytes()
    there = struct.unpack_from(f"<{piece + n_steps}Q", image, of_tails)
    assert {word & 3 for word in there} <= {0, 1, 2} and any(word > 3 for word in there)
    for module in (files, places):
        monkeypatch.setattr(module, "boot_id", lambda: b"that of the next")
    for word in range(2 * n_steps):
        cut = bytearray(image)
        struct.pack_into(f"<{len(there)}Q", cut, of_tails, *[word << 2] * len(there))
        copy = tmp_path / f"cut-{n_steps}-{word}"
        copy.mkdir()
        (copy / "rows.engram").write_bytes(cut)
        again = TensorDictReplayBuffer(storage=LazyMemmapStorage.open(copy))
        assert check(again) == 40
        again.extend(steps(40, 41))
        assert check(again) == 41


# ---- several processes ----
def test_processes_flush_beside_each_other(tmp_path: Path) -> None:
    rb = made(tmp_path, 30, lanes=4)

    def flushes(start: int) -> Callable[[], int]:
        def work() -> int:
            for at in range(start, start + 300, 10):
                rb.extend(steps(at, at + 10))
                rb.storage.flush()
            return start

        return work

    children = [Child(flushes(start)) for start in (1200, 3000)]
    assert [child.result() for child in children] == [1200, 3000]
    check(rb)
    assert verify(tmp_path).ok
