"""Power cuts around a queue: of the store the disk has each page as at any moment since its sync; it has the model.

After any of them the learner goes on from its checkpoint: no row comes twice, none that was flushed is left out, and
what is written then comes, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts.children import Signal, fork
from crash import sessions, tracer
from crash.test_queue_lines import TURN, flow_at
from engram.data import LazyMemmapStorage, QueueSampler, ReplayBuffer
from engram.store import files as recovery
from engram.store import places
from engram.store.places import LaneCount

pytestmark = [
    pytest.mark.skipif(not tracer.can_watch(), reason="stores are watched on x86-64 only"),
    pytest.mark.filterwarnings("ignore:sample was called with batch_size=:UserWarning"),
]

MODE = 2  # a word of `Flow`
WRITERS = 1024 + 336  # where the first lane counts its writers


@pytest.fixture(autouse=True)
def boots(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (recovery, places):
        monkeypatch.setattr(module, "boot_id", module.boot_id)


def rows(ids: Iterable[int], width: int) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64).unsqueeze(1) * 1000 + torch.arange(width)


def ids(batch: Tensor) -> list[int]:
    first = batch[:, :1]
    assert torch.equal(batch, first + torch.arange(batch.shape[1])), "a torn row"
    found: list[int] = (first[:, 0] // 1000).tolist()
    return found


def opened(folder: Path, shape: dict[str, Any]) -> ReplayBuffer:
    lanes = 1 if shape["lanes"] == 1 else LaneCount(shape["lanes"])
    storage = LazyMemmapStorage(shape["lanes"] * shape["capacity"], scratch_dir=folder, existsok=True, lanes=lanes)
    return ReplayBuffer(storage=storage, sampler=QueueSampler(commit=shape["commit"]), batch_size=4)


def drained(rb: ReplayBuffer) -> list[int]:
    found: list[int] = []
    while waiting := rb.stats().waiting:
        found += ids(rb.sample(min(waiting, 5)))
    return found


# ---- what may be left, made by hand ----
def image_of(root: Path, image: bytes | bytearray) -> Path:
    folder = root / "image"
    folder.mkdir()
    (folder / "rows.engram").write_bytes(image)
    sessions._set_boot(1)
    return folder


@pytest.fixture
def trained(ram_path: Path) -> tuple[ReplayBuffer, dict[str, Any]]:
    """A queue whose rows were all trained and committed, and the position behind them."""
    sessions._set_boot(0)
    rb = opened(ram_path / "store", BY_HAND)
    rb.seek(None)
    rb.extend(rows(range(4), BY_HAND["width"]))
    assert ids(rb.sample(4)) == [0, 1, 2, 3]
    with rb.committing() as position:
        pass
    return rb, position


BY_HAND = {"lanes": 1, "capacity": 4, "width": 600, "commit": "manual"}


@pytest.mark.quick
def test_rows_in_the_places_of_trained_ones_are_lost_and_their_numbers_are_given_to_no_others(
    ram_path: Path, trained: tuple[ReplayBuffer, dict[str, Any]]
) -> None:
    rb, position = trained
    file = ram_path / "store" / "rows.engram"
    image = bytearray(file.read_bytes())
    rb.extend(rows(range(4, 8), BY_HAND["width"]))
    store, after = rb.storage.lanes.store, file.read_bytes()
    for slot in (1, 2, 3):  # half of each had reached the disk
        begin = store.rows_offset + slot * store.row_stride
        image[begin : begin + 800] = after[begin : begin + 800]
    rb = opened(image_of(ram_path, image), BY_HAND)
    rb.extend(rows([8, 9], BY_HAND["width"]))  # an actor that is there before the learner
    assert rb.seek(position) == 0
    assert drained(rb) == [8, 9]


@pytest.mark.quick
def test_a_consumer_of_before_the_power_cut_is_none_whose_number_another_process_has_now(
    ram_path: Path, trained: tuple[ReplayBuffer, dict[str, Any]]
) -> None:
    rb, _ = trained
    rb.extend(rows([4], BY_HAND["width"]))
    image = bytearray((ram_path / "store" / "rows.engram").read_bytes())
    memory, queue = rb.storage.lanes.store.memory(), rb.storage.lanes.queue
    image[WRITERS : WRITERS + 8] = bytes(8)
    turn = flow_at(memory, TURN)
    image[turn : turn + 8] = queue.session_owner.to_bytes(8, "little")
    folder = image_of(ram_path, image)
    begun, ends = Signal(), Signal()

    def acts() -> None:
        sessions._set_boot(1)
        other = opened(folder, BY_HAND)
        other.extend(rows([5], BY_HAND["width"]))
        begun.send()
        ends.wait()

    first = opened(folder, BY_HAND)
    pid = fork(acts)
    begun.wait()
    with pytest.raises(RuntimeError, match="is told first which rows the model has"):
        first.sample(1)
    assert first.seek(None) == 0 and drained(first) == [4, 5]
    ends.send()
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.quick
def test_what_is_written_comes_where_the_disk_did_not_know_the_queue_yet_whose_rows_are_lost(ram_path: Path) -> None:
    shape = {"lanes": 1, "capacity": 24, "width": 40, "commit": "auto"}
    sessions._set_boot(0)
    rb = opened(ram_path / "store", shape)
    rb.extend(rows(range(4), shape["width"]))
    assert ids(rb.sample(4)) == [0, 1, 2, 3]
    store, image = rb.storage.lanes.store, bytearray((ram_path / "store" / "rows.engram").read_bytes())
    mode = flow_at(store.memory(), MODE)
    image[mode : mode + 8] = bytes(8)
    lost = store.rows_offset + store.row_stride
    image[lost : lost + 3 * store.row_stride] = bytes(3 * store.row_stride)
    rb = opened(image_of(ram_path, image), shape)
    rb.extend(rows([4, 5, 6], shape["width"]))
    assert drained(rb) == [4, 5, 6]
