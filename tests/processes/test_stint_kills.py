"""Writers that move from lane to lane are killed at any instruction and replaced; a reader believes no wrong row."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch

from contracts.children import Child
from engram import _native
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from engram.store.lanes import Lanes

WRITERS = 4
KINDS = {
    "shared memory": lambda path, n: LazyTensorStorage(n, shared=True, lanes=WRITERS),
    "named file": lambda path, n: LazyMemmapStorage(n, scratch_dir=path / "store", lanes=WRITERS),
}
WORDS = 128  # long rows: so that some writers die while they copy


def rows(stream: int | torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """int64 [n, WORDS]: whose rows they are, their numbers in its stream, and words that follow from these."""
    of = torch.as_tensor(stream).expand(len(number))
    values = ((number * 1_000_003 + of % 100_003) * 31).unsqueeze(1) + torch.arange(WORDS)
    values[:, 0], values[:, 1] = of, number
    return values


def write_for_ever(rb: ReplayBuffer, seed: int) -> None:
    draw, at = random.Random(seed), 0
    rb.storage.lanes.hold()
    stream = rb.storage.lanes.store.writer
    while True:
        n = draw.choice((1, 20, 100, 400))
        rb.extend(rows(stream, torch.arange(at, at + n)))
        at += n
        if draw.randrange(4) == 0:
            time.sleep(5e-5)


def check(rb: ReplayBuffer) -> tuple[int, int]:
    """Reads every lane beside the writers; how many rows were believed, and of how many an extent told the stream."""
    lanes: Lanes = rb.storage.lanes
    store, believed, known = lanes.store, 0, 0
    for lane in range(store.lanes):
        # Extents before and after the rows: of what both have, each row has to be the one that they say.
        before = store.extents(lane)
        state = store.lane(lane)
        sequences = torch.arange(state["first"], state["published"])
        if not len(sequences):
            continue
        slots = lane * store.lane_capacity + sequences % store.lane_capacity
        batch, gone, absent, numbers = rb.storage.read(slots, sequences=True)
        after = store.extents(lane)
        stays = torch.ones(len(slots), dtype=torch.bool)
        stays[list(gone or []) + list(absent or [])] = False
        stays &= numbers == sequences
        mine, at = batch[stays], sequences[stays]
        assert torch.equal(mine, rows(mine[:, 0], mine[:, 1])), f"lane {lane}: torn rows"
        believed += len(mine)
        # A stint that is the newest before and after has not ended meanwhile; others end where the next one begins.
        for k, (start, stream, position) in enumerate(before):
            if before[k] not in after or (k + 1 == len(before) and before[-1] != after[-1]):
                continue
            stop = before[k + 1][0] if k + 1 < len(before) else state["published"]
            of = (at >= start) & (at < stop)
            assert (mine[of][:, 0] == stream).all() and torch.equal(mine[of][:, 1], position + at[of] - start)
            known += int(of.sum())
    return believed, known


def run(rb: ReplayBuffer, kills: int) -> tuple[int, int, int]:
    """Kills so many writers; how many were inside an extend, rows believed, and those whose stream was known."""
    draw, store = random.Random(7), rb.storage.lanes.store
    writers = [Child(lambda k=k: write_for_ever(rb, k)) for k in range(WRITERS)]
    inside = believed = known = 0
    for k in range(kills):
        time.sleep(draw.random() * 0.003)
        if k % 10 == 0:
            counted = check(rb)
            believed, known = believed + counted[0], known + counted[1]
        victim = draw.randrange(WRITERS)
        pid = writers[victim].pid
        writers[victim].kill()
        held = [store.lane(lane)["turn"] & ((1 << _native.PID_BITS) - 1) for lane in range(store.lanes)]
        inside += pid in held
        writers[victim] = Child(lambda k=k: write_for_ever(rb, 1000 + k))
    for writer in writers:
        writer.kill()
    counted = check(rb)
    return inside, believed + counted[0], known + counted[1]


@pytest.mark.deep
@pytest.mark.parametrize("kills", [40, pytest.param(7000, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_writers_that_are_killed_at_any_instruction_tear_and_mix_nothing(kind, kills, tmp_path):
    rb = ReplayBuffer(storage=KINDS[kind](tmp_path, 16 * 256))
    rb.extend(rows(0, torch.arange(1)))
    rb.empty()
    store = rb.storage.lanes.store
    inside, believed, known = run(rb, kills)
    print(f"{kind}: {kills} kills, {inside} inside an extend, {believed} rows believed, {known} by extents")
    assert believed > 1000 * min(kills, 100) / 10 and known > believed / 2
    # Each kill may have cost the rows that one piece was replacing, until the next writer of the lane.
    piece = max(1, min(64, store.lane_capacity // 8))
    assert len(rb) >= rb.storage.max_size - piece * store.lanes
    before = len(rb)
    rb.extend(rows(0, torch.arange(rb.storage.max_size)))
    assert len(rb) == rb.storage.max_size >= before and os.getpid() == store.writer & ((1 << _native.PID_BITS) - 1)
