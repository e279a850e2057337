"""The table of streams: how many rows of each are in, whoever dies, and whoever has their lanes by now."""

from __future__ import annotations

import signal
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.children import Child, Signal
from engram import _native
from engram.data import LazyMemmapStorage, LazyTensorStorage
from engram.errors import NoFreeLaneError, StorageError
from engram.store.layout import RowLayout
from engram.store.streams import AdoptedStream, StreamTable
from engram.testing import numbers, steps

LAYOUT = RowLayout.of(steps(0, 1), 1)


def opened(path: Path, size: int | None = 40) -> Any:
    storage = LazyMemmapStorage(size, path / "rows", existsok=True, lanes=4 if size else None)
    storage.adopt(LAYOUT)
    return storage


def append(storage: Any, table: Any, *entry: Any, start: int, stop: int) -> Any:
    with storage.mutex, table.writing(*entry):
        return storage.append_packed(LAYOUT.pack(steps(start, stop)))


def test_several_are_appended_by_one_process_and_counted_each(tmp_path: Path) -> None:
    storage = opened(tmp_path)
    table = StreamTable(storage.lanes, tmp_path / "streams")
    one, two = table.begin("one"), table.begin("two")
    for k in range(0, 60, 3):
        append(storage, table, one, start=k, stop=k + 3), append(storage, table, two, start=1000 + k, stop=1001 + k)
    assert (table.rows(one), table.rows(two), len(storage)) == (60, 20, 40)
    assert sorted(numbers(storage[:]))[-1] == 1057


def test_rows_of_one_go_on_in_its_lane_when_another_process_has_the_table(tmp_path: Path) -> None:
    storage = opened(tmp_path)
    table = StreamTable(storage.lanes, tmp_path / "streams")
    slots = append(storage, table, table.begin("one"), start=0, stop=2)
    table.close(), storage.close()
    storage = opened(tmp_path)
    table = StreamTable(storage.lanes, tmp_path / "streams")
    entry = table.entries["one"]
    table.adopt(entry)
    assert table.rows(entry) == 2 and append(storage, table, entry, start=2, stop=4).tolist() == [
        slots[-1] + 1,
        slots[-1] + 2,
    ]
    assert not any(seam for lane in storage.lanes.states() for seam in lane["seams"] if seam == 2)


@pytest.mark.parametrize("others", [0, 3, 400])
def test_one_whose_process_was_killed_is_counted_though_others_have_written_in_all_lanes(
    tmp_path: Path, others: int
) -> None:
    storage = opened(tmp_path)
    table = StreamTable(storage.lanes, tmp_path / "streams")
    entry, two = table.begin("one"), table.begin("two")
    table.lend(entry)
    written = Signal()

    def write() -> None:
        mine = opened(tmp_path, None)
        stream = AdoptedStream(mine.lanes, tmp_path / "streams", entry.at, entry.number)
        append(mine, stream, start=0, stop=7)
        written.send()
        signal.pause()

    child = Child(write)
    written.wait()
    with pytest.raises(NoFreeLaneError, match="'one' is a living process"):
        table.adopt(entry)
    child.kill()
    for k in range(others):
        append(storage, table, two, start=k, stop=k + 1)
    table.adopt(entry)
    assert table.rows(entry) == 7


def test_a_record_that_was_cut_off_is_that_of_before(tmp_path: Path) -> None:
    storage = opened(tmp_path)
    table = StreamTable(storage.lanes, tmp_path / "streams")
    entry, two = table.begin("one"), table.begin("two")
    append(storage, table, entry, start=0, stop=3)
    counts = []
    for n in range(3, 6):
        append(storage, table, entry, start=n, stop=n + 1)
        whole = (tmp_path / "streams").read_bytes()
        for word in range(14):
            with open(tmp_path / "streams", "r+b", buffering=0) as file:
                file.seek(4096 + 8 * word)
                file.write(b"\xff")
                counts.append(n + 1 - storage.lanes.store.stream_place(entry.at)[4])
                file.seek(0), file.write(whole)
    assert set(counts) == {0, 1}  # the newest copy, or the one of before
    assert table.rows(two) == 0


def test_one_that_ended_has_its_count_and_a_new_one_of_its_name_another_number(tmp_path: Path) -> None:
    storage = LazyTensorStorage(40, shared=True, lanes=4)
    storage.adopt(LAYOUT)
    table = StreamTable(storage.lanes, None)
    old = table.begin("one")
    append(storage, table, old, start=0, stop=5)
    assert table.end(old) == 5 == table.end(old)
    new = table.begin("one")
    assert new.number > old.number and new.before == (old.number, 5) and table.rows(new) == 0
    with pytest.raises(ValueError, match="has a stream already"):
        table.begin("one")


def test_lanes_that_a_stream_keeps_are_not_those_of_others(tmp_path: Path) -> None:
    storage = opened(tmp_path)
    table = StreamTable(storage.lanes, tmp_path / "streams")
    one, two = table.begin("one"), table.begin("two")
    table.keep_place(one, True)
    slots = append(storage, table, one, start=0, stop=2)
    lane, sequence, _ = table.kept_place(one)
    append(storage, table, two, start=100, stop=190)
    other = opened(tmp_path, None)
    other.append_packed(LAYOUT.pack(steps(200, 290)))
    assert numbers(storage[slots]) == [0, 1] and sequence == 2
    table.give_back(one)
    assert table.kept_place(one) is None
    append(storage, table, two, start=300, stop=390)
    assert storage.lanes.store.lane(lane)["published"] > 2


@pytest.mark.parametrize("spoil", [b"", b"engram streams 0"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, spoil: bytes) -> None:
    storage = opened(tmp_path)
    StreamTable(storage.lanes, tmp_path / "streams").close()
    data = (tmp_path / "streams").read_bytes()
    (tmp_path / "streams").write_bytes(spoil + data[len(spoil) :] if spoil else spoil)
    with pytest.raises(StorageError, match="delete it"):
        StreamTable(storage.lanes, tmp_path / "streams")


def forged(table: Path, at: int, **changed: Any) -> None:
    """Changes an entry of a table, whose checksums are right afterwards."""
    data = bytearray(table.read_bytes())
    start = 4096 + 512 * at
    words = [list(struct.unpack_from("<7Q", data, start + 56 * copy)) for copy in range(2)]
    stream, before, rows, length = struct.unpack_from("<QQQH", data, start + 132)
    name = changed.get("name", bytes(data[start + 158 : start + 158 + length]))
    stream = changed.get("stream", stream)
    about = struct.pack("<QQQH", stream, before, rows, len(name)) + name
    data[start + 128 : start + 132 + len(about)] = struct.pack("<I", zlib.crc32(about)) + about
    for copy in range(2):
        if words[copy][0]:
            words[copy][1] = stream
            words[copy][6] = _native.testing.crc32c(struct.pack("<6Q", *words[copy][:6])) | 1 << 32
            struct.pack_into("<7Q", data, start + 56 * copy, *words[copy])
    table.write_bytes(data)


@pytest.mark.parametrize("changed", [{"name": b"\xff\xfeone"}, {"stream": (1 << 40) - 1 << 24}])
def test_a_forged_entry_is_a_damaged_table(tmp_path: Path, changed: dict[str, Any]) -> None:
    storage = opened(tmp_path)
    table = StreamTable(storage.lanes, tmp_path / "streams")
    append(storage, table, table.begin("one"), start=0, stop=2)
    table.close(), storage.close()
    forged(tmp_path / "streams", 0, **changed)
    storage = opened(tmp_path)
    with pytest.raises(StorageError, match=r"streams is damaged.*entry 0: .*delete it"):
        StreamTable(storage.lanes, tmp_path / "streams")


def test_a_number_far_above_the_store_s_own_is_not_given_again_and_found_at_once(tmp_path: Path) -> None:
    storage = opened(tmp_path)
    table = StreamTable(storage.lanes, tmp_path / "streams")
    table.begin("one")
    table.close(), storage.close()
    forged(tmp_path / "streams", 0, stream=1 << 62)
    storage = opened(tmp_path)
    table = StreamTable(storage.lanes, tmp_path / "streams")
    assert table.entries["one"].number == 1 << 38 and table.begin("two").number == (1 << 38) + 1


def test_a_store_whose_numbers_are_used_up_has_no_other_writer(tmp_path: Path) -> None:
    store = opened(tmp_path).lanes.store
    for above in ((1 << 40) - 1, (1 << 64) - 1):
        with pytest.raises(ValueError, match="no number left"):
            store.new_writer(0, 1, above)
    assert store.new_writer(0, 1, 7) >> 24 == 8 and store.new_writer(0, 1) >> 24 == 9


@pytest.mark.parametrize("entry", [-1, 1 << 40])
def test_an_entry_that_is_not_there_is_refused(tmp_path: Path, entry: int) -> None:
    storage = opened(tmp_path)
    StreamTable(storage.lanes, tmp_path / "streams")
    for call in (storage.lanes.store.stream_place, storage.lanes.store.adopt_stream):
        with pytest.raises((IndexError, TypeError)):
            call(entry)


def test_a_store_without_a_table_has_no_entries() -> None:
    storage = LazyTensorStorage(40, shared=True, lanes=4)
    storage.adopt(LAYOUT)
    storage.append_packed(LAYOUT.pack(steps(0, 1)))
    with pytest.raises(IndexError, match="no such entry"):
        storage.lanes.store.adopt_stream(0)
    assert torch.equal(storage.read_packed(torch.arange(1)).batch[0], LAYOUT.pack(steps(0, 1)))
