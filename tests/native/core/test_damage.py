"""Files that somebody edited: opening and using them may raise, and must not touch memory outside."""

from __future__ import annotations

import contextlib
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from engram import _native
from native.core.support import (
    EDITS,
    HEADER_BYTES,
    INCARNATION,
    LANE_BYTES,
    LOG_HEAD,
    append_words,
    file_store,
    open_image,
    slots,
    words,
)

CRC_AT = 300  # of the shape, over the bytes before it
FIELDS = {"features": 16, "lanes": 152, "lane_capacity": 160, "strands": 168, "payload_bytes": 176, "row_stride": 184,
          "seams_offset": 192, "seams_bytes": 200, "layout_bytes": 208, "layout_offset": 216, "log_offset": 224,
          "redo_offset": 232, "redo_bytes": 240, "consumers_offset": 248, "arena_offset": 256, "rows_offset": 264,
          "total_bytes": 272}  # fmt: skip
REFUSED = (RuntimeError, ValueError, MemoryError, IndexError, TypeError, OverflowError)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    code, width = words(3)
    with file_store(tmp_path_factory.mktemp("damage") / "s", width, 20, lanes=2, layout=b'{"x": 1}') as s:
        for lane, n in ((0, 33), (1, 7)):
            append_words(s, code, n, lane)
            s.raise_term(lane)
            s.mark_seam(lane)
            append_words(s, code, 2, lane)
        s.mark_durable([33, 7])
        s.overwrite(slots(0, 21), code.check_list([np.ones((2, 3), np.int64)], 1, 0))
        return s.memory().tobytes()


def resealed(image: bytearray) -> bytearray:
    image[CRC_AT : CRC_AT + 4] = struct.pack("<I", _native.testing.crc32c(bytes(image[:CRC_AT])))
    return image


def use(s: _native.Store) -> None:
    """Everything that one does with a store; errors are answers, crashes are not."""
    code, _ = words(3)
    with contextlib.suppress(*REFUSED):
        s.repair()
    for lane in range(min(s.lanes, 4)):
        for step in (lambda lane=lane: s.lane(lane), lambda lane=lane: s.mark_seam(lane)):
            with contextlib.suppress(*REFUSED):
                step()
    for _ in range(2):
        with contextlib.suppress(*REFUSED):
            drawn = s.uniform(slots(3), 50)
            if drawn is not None:
                s.gather(code, drawn, sequences=True)
                s.generations(drawn)
        with contextlib.suppress(*REFUSED):
            ranges = [(st["first"], min(st["published"] - st["first"], s.lane_capacity)) for st in
                      (s.lane(i) for i in range(s.lanes))]  # fmt: skip
            walk = _native.EpochWalk(s, 1, True, ranges)
            s.gather(code, walk.take(s, 0, 100)[0])
        with contextlib.suppress(*REFUSED):
            s.overwrite(slots(1), code.check_list([np.ones((1, 3), np.int64)], 1, 0))
        with contextlib.suppress(*REFUSED):
            s.log(max(0, s.log_head - 10))
        with contextlib.suppress(*REFUSED):
            append_words(s, code, 5, s.lanes - 1)
        with contextlib.suppress(*REFUSED):
            s.finish_interrupted()
        with contextlib.suppress(*REFUSED):
            s.recover()
    with contextlib.suppress(*REFUSED):
        s.empty(False)
    assert isinstance(s.layout, bytes) and len(s.store_id) == 16


def opened(path: Path, image: bytearray) -> bool:
    try:
        s, fd = open_image(path, image)
    except REFUSED:
        return False
    use(s)
    os.close(fd)
    return True


@pytest.mark.deep
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
def test_every_byte_of_the_header_flipped(tmp_path: Path, image: bytes, every: int) -> None:
    """In CI every seventh: a byte of nearly each field of eight, the next one further on in it."""
    for at in range(0, HEADER_BYTES + 2 * LANE_BYTES + 64, every):
        if at >= HEADER_BYTES and (at - HEADER_BYTES) % LANE_BYTES > 300:
            continue  # unused
        made = bytearray(image)
        made[at] ^= 1 << (at % 8)
        got_in = opened(tmp_path / "s", made)
        assert not (got_in and at < 304), f"byte {at} of the shape was not missed"


def test_every_byte_of_the_layout_flipped(tmp_path: Path, image: bytes) -> None:
    (start,) = struct.unpack_from("<Q", image, FIELDS["layout_offset"])
    for at in range(start, start + 8):
        made = bytearray(image)
        made[at] ^= 4
        with pytest.raises(RuntimeError, match="layout"):
            open_image(tmp_path / "s", made)


@pytest.mark.parametrize("field", FIELDS)
def test_a_shape_that_was_changed_with_its_checksum(tmp_path: Path, image: bytes, field: str) -> None:
    at = FIELDS[field]
    (old,) = struct.unpack_from("<Q", image, at)
    for new in {0, 1, 2, old - 1, old + 1, old + 8, old * 2, old + 4096, 1 << 20, 1 << 32, 1 << 56, 1 << 62, 1 << 63,
                (1 << 64) - 1, (1 << 64) - 8, (1 << 64) - old} - {old}:  # fmt: skip
        made = bytearray(image)
        struct.pack_into("<Q", made, at, new % (1 << 64))
        opened(tmp_path / "s", resealed(made))


def test_shapes_whose_products_wrap_around(tmp_path: Path, image: bytes) -> None:
    for lanes, capacity, strands, payload in (
        (2, 1 << 63, 1 << 63, 24), (2, 1 << 62, 1 << 2, 24), (2, 20, 1, (1 << 64) - 7), (4096, 1 << 58, 1 << 58, 24),
        (2, 1 << 55, 1, 24), (2, 20, 1 << 60, 24), (2, 20, 1, 0), (2, 20, 1, 1 << 50),
    ):  # fmt: skip
        made = bytearray(image)
        struct.pack_into("<QQQQ", made, FIELDS["lanes"], lanes, capacity, strands, payload)
        assert not opened(tmp_path / "s", resealed(made))


def test_versions_features_and_ids(tmp_path: Path, image: bytes) -> None:
    block = HEADER_BYTES + LANE_BYTES + 256
    for at, new, said in (
        (0, b"NOT", "first bytes"), (8, b"\x01", "version 1"), (12, b"\x02", "version 2 of its lanes' blocks"),
        (block, b"\x07", "the block of lane 1 has version 7"),
        (16, b"\x29", r"the feature without a name \(bit 5\)"), (24, b"traiLers", "contradicts"),
        (16, b"\x29\0\0\0\0\0\0\0trailers,flow,arena", r"the feature 'arena' \(bit 5\).*newer"),
        (16, b"\x20\0\0\0\0\0\0\0\xff\0", r"the feature '\?' \(bit 5\)"),
    ):  # fmt: skip
        made = bytearray(image)
        made[at : at + len(new)] = new
        with pytest.raises(RuntimeError, match=said):
            open_image(tmp_path / "s", resealed(made))


def test_a_flipped_bit_of_the_shape_is_told_from_a_forged_one(tmp_path: Path, image: bytes) -> None:
    made = bytearray(image)
    made[FIELDS["row_stride"]] ^= 1  # the row's stride
    with pytest.raises(RuntimeError, match="the header's checksum"):
        open_image(tmp_path / "s", made)
    with pytest.raises(RuntimeError, match="contradicts"):
        open_image(tmp_path / "s", resealed(made))


def test_counters_that_promise_more_rows_than_there_is_room_for_draw_no_slot_outside(
    tmp_path: Path, image: bytes
) -> None:
    made = bytearray(image)
    struct.pack_into("<Q", made, HEADER_BYTES, 0)  # claimed
    struct.pack_into("<Q", made, HEADER_BYTES + 64, 1_000_007)  # published
    s, fd = open_image(tmp_path / "s", made)
    assert s.lane(0)["published"] - s.lane(0)["first"] == 20
    drawn = s.uniform(slots(1), 5000)
    assert int(drawn.min()) >= 0 and int(drawn.max()) < 40
    os.close(fd)


@pytest.mark.deep
def test_counters_of_all_kinds(tmp_path: Path, image: bytes) -> None:
    draw = random.Random(0)
    extremes = [0, 1, 19, 20, 21, 35, (1 << 63) - 1, 1 << 63, (1 << 63) | 5, (1 << 64) - 1, (1 << 64) - 20, 1 << 40]
    for _ in range(300):
        made = bytearray(image)
        for _ in range(draw.randrange(1, 5)):
            lane, counter = draw.randrange(2), draw.choice([0, 64, 128, 192, 200, 208])
            value = draw.choice([draw.randrange(60), draw.choice(extremes), draw.getrandbits(64)])
            struct.pack_into("<Q", made, HEADER_BYTES + lane * LANE_BYTES + counter, value)
        for at in (INCARNATION, EDITS, LOG_HEAD):
            if draw.random() < 0.3:
                struct.pack_into("<Q", made, at, draw.choice(extremes))
        assert opened(tmp_path / "s", made)


def test_redo_areas_of_all_kinds(tmp_path: Path, image: bytes) -> None:
    draw = random.Random(1)
    (redo,) = struct.unpack_from("<Q", image, FIELDS["redo_offset"])
    (stride,) = struct.unpack_from("<Q", image, FIELDS["row_stride"])
    for _ in range(100):
        rows = draw.choice([0, 1, 2, 500, 1 << 20, 1 << 61, (1 << 64) - 1])
        entry = draw.randbytes(min(rows, 500) * (8 + stride))
        if draw.random() < 0.5 and rows < 500:
            entry = struct.pack(f"<{rows}Q", *[draw.choice([0, 39, 40, 1 << 63])] * rows) + entry[8 * rows :]
        fields = struct.pack("<QQQ", rows, draw.choice([stride, stride, 0, 1 << 63]), draw.getrandbits(64))
        made = bytearray(image)
        area = struct.pack("<II", 0x52454430, _native.testing.crc32c(fields + entry)) + fields + entry
        made[redo : redo + len(area)] = area
        made = made[: len(image)]
        assert opened(tmp_path / "s", made)


def test_files_cut_short(tmp_path: Path, image: bytes) -> None:
    for size in [*range(0, 3000, 131), 4096, 8192, len(image) // 2, len(image) - 4096, len(image) - 1]:
        assert not opened(tmp_path / "s", bytearray(image[:size]))


def test_rows_of_noise(tmp_path: Path, image: bytes) -> None:
    draw = random.Random(2)
    (rows,) = struct.unpack_from("<Q", image, FIELDS["rows_offset"])
    for _ in range(50):
        made = bytearray(image)
        for _ in range(draw.randrange(1, 200)):
            made[draw.randrange(rows, len(made))] = draw.randrange(256)
        assert opened(tmp_path / "s", made)


def test_a_header_that_changes_while_the_store_is_open(tmp_path: Path, image: bytes) -> None:
    s, fd = open_image(tmp_path / "s", bytearray(image))
    os.pwrite(fd, b"\xff" * 128, 16)
    assert (s.lanes, s.lane_capacity) == (2, 20)
    use(s)
    os.close(fd)
