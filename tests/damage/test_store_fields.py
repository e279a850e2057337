"""Every field of a store's file changed, with its checksum and without: errors are answers, crashes are not."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.children import Child
from contracts.corruption import NASTY, exchanged, limit_memory, places
from contracts.each import each
from damage.store_file import BLOCKS, SEAM, Place, StoreImage, damages, declared_fields
from engram import _native
from engram.cli import info, verify
from engram.data import LazyMemmapStorage, ReplayBuffer, SliceSampler
from engram.errors import EngramError
from engram.store.header import FILE_NAME
from engram.testing.helpers import of_numbers, steps

MOST = 1 << 30  # of address space, on top of what the process has
REFUSED = (EngramError, IndexError, ValueError, KeyError, RuntimeError, MemoryError)
CAPACITY, LANES = 40, 2
OTHER_BOOT = b"another boot id."


# ---- the table of fields ----
@pytest.mark.quick
def test_every_field_that_the_source_declares_is_damaged() -> None:
    for block, declared in declared_fields().items():
        known = list(BLOCKS[block][1])
        missing = set(declared) - set(known) - {"geometry", "geometry_lines"}
        assert not missing, f"{block} has {sorted(missing)}: add them to block_fields in bind_testing.hpp"
        assert [name for name in declared if name in known] == known


@pytest.mark.quick
@each("block", BLOCKS)
def test_fields_do_not_overlap_and_lie_within_their_block(block: str) -> None:
    size, fields = BLOCKS[block]
    at = 512 if block == "StoreHeader" else 0  # behind the shape
    for offset, n in fields.values():
        assert offset >= at
        at = offset + n
    assert at <= size and (block in ("StoreHeader", "LaneHeader") or at == size)


@pytest.mark.quick
def test_the_description_of_the_format_has_every_field_where_it_lies() -> None:
    text = (Path(__file__).parents[2] / "docs" / "store-format.md").read_text()
    for block in ("StoreGeometry", "StoreHeader", "LaneHeader"):
        for name, (offset, _) in BLOCKS[block][1].items():
            if "unused" not in name and name != "magic":
                said = rf"\| {offset} \| [^|]*\b({name}|{name.replace('_', ' ')})\b"
                assert re.search(said, text), f"{block}.{name} at {offset}"


# ---- stores to damage ----
@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A store as a process left it that did not close it: rows in both lanes, seams, rows changed in place."""
    folder = tmp_path_factory.mktemp("store")
    storages = [LazyMemmapStorage(CAPACITY * LANES, scratch_dir=folder, lanes=LANES)]
    first = ReplayBuffer(storage=storages[0])
    first.extend(steps(0, 55))
    first.storage.mark_seam()
    first.extend(steps(55, 60))
    first[3] = of_numbers(torch.tensor(700))
    second = ReplayBuffer.open(folder)
    second.extend(steps(0, 7))
    first.storage.flush()
    return (folder / FILE_NAME).read_bytes()


Bases = dict[str, StoreImage]


@pytest.fixture
def bases(content: bytes) -> Bases:
    """The same store closed, left open by this machine, and left open by one that has stopped since: it is scanned."""
    left = StoreImage(content)
    closed, stopped, interrupted = left.copy(), left.copy(), left.copy()
    closed.put(closed.field("StoreHeader", "clean"), 1)
    stopped.put(stopped.field("StoreHeader", "boot_id"), OTHER_BOOT)
    interrupted.mark_redo([3, 4])
    return {"closed": closed, "left open": left, "scanned": stopped, "with an interrupted change": interrupted}


@contextlib.contextmanager
def answers() -> Iterator[None]:
    """A block that may end in an error of ours."""
    with contextlib.suppress(*REFUSED):
        yield


def use(folder: Path) -> bool:
    """Does everything that one does with a store; False: it was refused at the opening."""
    with answers():
        info(folder, returns=True)
    with answers():
        verify(folder)
    with answers():
        read(ReplayBuffer.open(folder, read_only=True, batch_size=8))
    try:
        rb = ReplayBuffer.open(folder, batch_size=8)
    except REFUSED:
        return False
    read(rb)
    for write in (
        lambda: rb.extend(steps(100, 150)),
        lambda: rb.add(steps(0, 1)[0]),
        lambda: rb.__setitem__(0, of_numbers(torch.tensor(9))),
        lambda: rb.dumps(folder / "saved"),
        rb.storage.flush,
        rb.empty,
        lambda: rb.extend(steps(0, 10)),
    ):
        with answers():
            write()
    read(rb)
    with answers():
        rb.storage.close()
    return True


def read(rb: ReplayBuffer[Any]) -> None:
    for look in (
        lambda: len(rb), lambda: rb[:], lambda: rb[-1], lambda: rb.sample(), rb.stats, lambda: repr(rb),
        lambda: rb.storage.lanes.states(), lambda: rb.storage.lanes.log(), rb.state_dict,
        lambda: ReplayBuffer(storage=rb.storage, sampler=SliceSampler(slice_len=2), batch_size=8).sample(),
    ):  # fmt: skip
        with answers():
            look()


def attack(path: Path, images: Iterator[tuple[str, StoreImage]]) -> list[str]:
    """Uses each image in a child, which may die without harm; returns what was opened, by name."""

    def all_of_them() -> list[str]:
        limit_memory(MOST)
        warnings.simplefilter("ignore")
        opened = []
        folder = path / "attacked"
        for name, image in images:
            folder.mkdir(exist_ok=True)
            (folder / FILE_NAME).write_bytes(image.content)
            (path / "last").write_text(name)
            try:
                if use(folder):
                    opened.append(name)
            except BaseException as error:
                raise AssertionError(f"{name}: {error!r}") from error
        return opened

    try:
        return Child(all_of_them, seconds=300).result()  # type: ignore[no-any-return]
    except AssertionError as error:
        raise AssertionError(f"{(path / 'last').read_text()}: {error}") from error


#: Values of each field: those at the edges in CI, all of them at night.
VALUES = pytest.mark.parametrize("edges", [True, pytest.param(False, marks=pytest.mark.long)], ids=["edges", "all"])


def changed(
    bases: Bases,
    of: Callable[[StoreImage], list[Place]],
    edges: bool,
    seal: Callable[[StoreImage], None] | None = None,
) -> Iterator[tuple[str, StoreImage]]:
    """Each base with each damage to each of these fields."""
    for base, image in bases.items():
        for place in of(image):
            for value in damages(place, image.bytes_of(place), edges):
                made = image.copy()
                made.put(place, value)
                if seal is not None:
                    seal(made)
                yield f"{base}: {place.name} = {value.hex()}", made


def one(bases: Bases, name: str) -> Bases:
    return {name: bases[name]}


# ---- the header ----
#: With a right checksum these say something else that can be true.
FREE = ("store_id", "crc")


@VALUES
def test_a_shape_that_was_changed_is_refused(bases: Bases, ram_path: Path, edges: bool) -> None:
    def shape(image: StoreImage) -> list[Place]:
        return image.fields("StoreGeometry")

    assert attack(ram_path, changed(one(bases, "closed"), shape, edges)) == []


@VALUES
def test_a_shape_that_was_changed_with_its_checksum_is_refused(bases: Bases, ram_path: Path, edges: bool) -> None:
    def shape(image: StoreImage) -> list[Place]:
        return [x for x in image.fields("StoreGeometry") if not x.name.endswith(FREE)]

    opened = attack(ram_path, changed(one(bases, "closed"), shape, edges, StoreImage.seal_header))
    # Rings of other lengths whose rows take as many pages can be true.
    assert all(".lane_capacity " in name for name in opened) and len(opened) < 8, opened


def test_another_store_id_with_its_checksum_makes_no_row_whole(bases: Bases, ram_path: Path) -> None:
    image = bases["scanned"]
    image.put(image.field("StoreGeometry", "store_id"), bytes(16))
    image.seal_header()
    (ram_path / FILE_NAME).write_bytes(image.content)
    assert len(ReplayBuffer.open(ram_path)) == 0


@VALUES
@pytest.mark.parametrize("base", ["closed", "left open", "scanned", "with an interrupted change"])
def test_fields_of_the_session_take_any_value(bases: Bases, ram_path: Path, base: str, edges: bool) -> None:
    attack(ram_path, changed(one(bases, base), lambda image: image.fields("StoreHeader"), edges))


# ---- lanes, seams, the log ----
@VALUES
@pytest.mark.parametrize("base", ["closed", "left open", "scanned", "with an interrupted change"])
def test_fields_of_lanes_take_any_value(bases: Bases, ram_path: Path, base: str, edges: bool) -> None:
    def fields(image: StoreImage) -> list[Place]:
        every = image.lane_fields()
        lane = list(bases).index(base) % LANES  # the lanes take turns in CI
        return every[lane * len(every) // LANES : (lane + 1) * len(every) // LANES] if edges else every

    opened = attack(ram_path, changed(one(bases, base), fields, edges))
    assert not [name for name in opened if ".version " in name]


@pytest.mark.parametrize("images", [60, pytest.param(300, marks=pytest.mark.long)])
def test_several_fields_at_once_take_any_value(bases: Bases, ram_path: Path, images: int) -> None:
    draw = random.Random(0)

    def damaged() -> Iterator[tuple[str, StoreImage]]:
        for k in range(images):
            base = draw.choice(list(bases))
            made = bases[base].copy()
            fields = [*made.fields("StoreHeader"), *made.lane_fields(), *made.redo_fields()]
            for place in draw.sample(fields, draw.randrange(2, 6)):
                made.put(place, draw.choice(list(damages(place, made.bytes_of(place)))))
            yield f"{k}, {base}", made

    attack(ram_path, damaged())


def test_seams_and_the_log_take_any_value(bases: Bases, ram_path: Path) -> None:
    draw = random.Random(1)

    def images() -> Iterator[tuple[str, StoreImage]]:
        for base, image in bases.items():
            for k in range(30):
                made = image.copy()
                for lane in range(made.lanes):
                    seams = Place("seams", made.seams_offset + lane * made.seams_bytes, made.seams_bytes)
                    made.put(
                        seams, draw.choice([b"\0", b"\xff"]) * seams.nbytes if k < 5 else draw.randbytes(seams.nbytes)
                    )
                entry = Place("log", made.log_offset + 8 * draw.randrange(4), 8)
                made.put(entry, draw.choice([0, 79, 80, 1 << 40, SEAM, (1 << 64) - 1, draw.getrandbits(64)]))
                yield f"{base}: seams {k}", made

    attack(ram_path, images())


# ---- rows ----
@VALUES
@pytest.mark.parametrize("sealed", [False, True], ids=["", "sealed"])
def test_trailers_take_any_value(bases: Bases, ram_path: Path, sealed: bool, edges: bool) -> None:
    rows = [0, 3, 19, CAPACITY - 1, CAPACITY, CAPACITY + 6, 2 * CAPACITY - 1]

    def trailers(image: StoreImage) -> list[Place]:
        fields = [place for row in rows for place in image.trailer_fields(row)]
        return [place for place in fields if not (sealed and place.name.endswith("crc"))]

    def seal(image: StoreImage) -> None:
        for row in rows:
            image.seal_row(row)

    attack(ram_path, changed(one(bases, "scanned"), trailers, edges, seal if sealed else None))


def test_a_row_whose_trailer_does_not_fit_it_is_dropped_by_a_scan(bases: Bases, ram_path: Path) -> None:
    image = bases["scanned"]
    place = image.trailer_fields(CAPACITY)[0]  # of the second lane's first row
    image.put(place, image.number(place) ^ SEAM)
    (ram_path / FILE_NAME).write_bytes(image.content)
    storage = LazyMemmapStorage.open(ram_path)
    assert storage.dropped == 1 and storage.initialized
    image.seal_row(CAPACITY)  # a forged seam is a seam
    storage.close()
    (ram_path / FILE_NAME).write_bytes(image.content)
    assert LazyMemmapStorage.open(ram_path).dropped == 0


# ---- the redo area ----
@VALUES
@pytest.mark.parametrize("sealed", [False, True], ids=["", "sealed"])
def test_the_redo_area_takes_any_value(bases: Bases, ram_path: Path, sealed: bool, edges: bool) -> None:
    entry = 2 * (8 + bases["closed"].row_stride)

    def fields(image: StoreImage) -> list[Place]:
        header = [x for x in image.redo_fields() if not (sealed and x.name.endswith("crc"))]
        begin = image.redo_offset + BLOCKS["RedoHeader"][0]
        return [*header, Place("redo row 0", begin, 8), Place("redo row 1", begin + 8, 8)]

    def seal(image: StoreImage) -> None:
        image.seal_redo(entry)

    attack(ram_path, changed(one(bases, "with an interrupted change"), fields, edges, seal if sealed else None))


def test_an_interrupted_change_of_more_rows_than_it_has_room_for_is_none(bases: Bases, ram_path: Path) -> None:
    def images() -> Iterator[tuple[str, StoreImage]]:
        image = bases["closed"]
        most = (image.redo_bytes - BLOCKS["RedoHeader"][0]) // (8 + image.row_stride)
        for rows in ([0] * most, [79] * most, [80], [1 << 63], [3, 3, 3]):
            made = image.copy()
            begin = made.redo_offset + BLOCKS["RedoHeader"][0]
            made.mark_redo([row % 80 for row in rows])
            made.content[begin : begin + 8 * len(rows)] = struct.pack(f"<{len(rows)}Q", *rows)
            made.seal_redo(len(rows) * (8 + made.row_stride))
            yield f"redo of {len(rows)} rows, {rows[0]}", made

    attack(ram_path, images())


# ---- the layout ----
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_every_value_of_the_layout_exchanged(content: bytes, ram_path: Path, every: int) -> None:
    """With checksums that are right: a store that somebody made so. In CI each place has a quarter of the values."""
    image = StoreImage(content)
    layout = json.loads(content[image.layout_offset : image.layout_offset + image.layout_bytes])

    def files() -> Iterator[tuple[str, StoreImage]]:
        for k, at in enumerate(places(layout)):
            for value in NASTY[k % every :: every]:
                made = json.dumps(exchanged(layout, at, value)).encode()
                fd = os.memfd_create("engram")
                shape = (LANES, CAPACITY, 1, image.payload_bytes, 8, True)
                os.ftruncate(fd, _native.Store.size_needed(*shape, len(made)))
                store = _native.Store.create(fd, *shape, made, bytes(16))
                store.clean = True
                yield f"layout {at} = {value!r:.40}", StoreImage(os.pread(fd, store.total_bytes, 0))
                os.close(fd)

    attack(ram_path, files())
