"""Changing rows in place: readers beside it, kills inside it, and the log of what changed."""

from __future__ import annotations

import os
import random
import struct
import threading
import time
from pathlib import Path

import pytest
import torch

from contracts.each import each
from contracts.kills import killed_after
from engram import _native
from native.core.support import EDITS, file_store, open_image, store
from native.support import append_words, numbers_of, row_words, slots, words

MARKED = 0x52454430


def edition_rows(numbers: list[int], width: int, edition: int) -> torch.Tensor:
    return row_words(torch.tensor(numbers), width, edition)


def redo_entry(s: _native.Store, physical: list[int], rows: list[bytes], log_head: int) -> bytes:
    """The redo area as it looks when its entry is marked; docs/store-format.md."""
    entry = struct.pack(f"<{len(physical)}Q", *physical) + b"".join(rows)
    fields = struct.pack("<QQQ", len(physical), s.row_stride, log_head)
    return struct.pack("<II", MARKED, _native.testing.crc32c(fields + entry)) + fields + entry


def sealed(s: _native.Store, physical: int, number: int, term: int, payload: bytes) -> bytes:
    crc = _native.testing.crc32c(payload, _native.testing.crc32c(s.store_id))
    crc = _native.testing.crc32c(struct.pack("<QQQ", physical, number, term), crc)
    return payload + struct.pack("<QII", number, term, crc)


class TestOverwriting:
    def test_replaces_the_rows_and_leaves_numbers_and_neighbours(self) -> None:
        code, width = words(4)
        s = store(width, 8)
        append_words(s, code, 12)
        s.overwrite(slots(1, 7), code.check_list([edition_rows([9, 7], 4, 5)], 1, 0))
        rows, _, _, numbers = s.gather(code, slots(*range(8)), sequences=True)
        assert numbers.tolist() == [8, 9, 10, 11, 4, 5, 6, 7]
        assert (rows[0][:, 0] // (1 << 50)).tolist() == [0, 5, 0, 0, 0, 0, 0, 5]
        assert numbers_of(rows[0])[1].all()

    def test_is_entered_in_the_log_and_counts_an_even_number_of_edits(self) -> None:
        code, width = words(1)
        s = store(width, 8)
        append_words(s, code, 8)
        s.overwrite(slots(3, 1), code.check_list([edition_rows([3, 1], 1, 1)], 1, 0))
        assert s.log(0) == [3, 1] and s.log(1) == [1] and s.log_head == 2
        assert s.epoch()[1] == 2

    def test_more_rows_than_the_log_holds_are_noticed_by_who_follows_it(self) -> None:
        code, width = words(1)
        s = store(width, 4)
        append_words(s, code, 4)
        many = torch.arange(_native.LOG_ENTRIES + 1) % 4
        s.overwrite(many, code.check_list([row_words(many, 1)], 1, 0))
        with pytest.raises(IndexError, match="reach back"):
            s.log(0)
        assert s.log(1)[-1] == many[-1] and len(s.log(1)) == _native.LOG_ENTRIES
        with pytest.raises(IndexError):
            s.log(s.log_head + 1)

    def test_slots_of_strands_keep_their_own_rows(self) -> None:
        code, width = words(1)
        s = store(width, 4, strands=3, lanes=2)
        for lane in (0, 1):
            s.append(lane, code.check_list([torch.zeros(4, 3, 1, dtype=torch.int64)], 2, 0))
        s.overwrite(torch.arange(24), code.check_list([torch.arange(24).reshape(24, 1)], 1, 0))
        assert s.gather(code, torch.arange(24))[0][0].flatten().tolist() == list(range(24))

    @each("bad", [-1, 8, 1 << 62, -(1 << 63)])
    def test_slots_outside_the_store_are_refused(self, bad: int) -> None:
        code, width = words(1)
        s = store(width, 8)
        append_words(s, code, 8)
        with pytest.raises(IndexError):
            s.overwrite(slots(0, bad), code.check_list([edition_rows([0, 1], 1, 1)], 1, 0))
        assert s.log_head == 0 and s.gather(code, slots(0))[0][0][0, 0] == 0

    def test_slots_not_yet_written_are_refused(self) -> None:
        code, width = words(1)
        s = store(width, 8)
        append_words(s, code, 3)
        with pytest.raises(IndexError, match="slot 3 has not been written"):
            s.overwrite(slots(2, 3), code.check_list([edition_rows([0, 1], 1, 1)], 1, 0))

    def test_a_row_for_each_slot(self) -> None:
        code, width = words(1)
        s = store(width, 8)
        append_words(s, code, 3)
        with pytest.raises(ValueError, match="one row for each slot"):
            s.overwrite(slots(0), code.check_list([edition_rows([0, 1], 1, 1)], 1, 0))

    def test_a_leaf_outside_the_row_is_refused(self) -> None:
        code, width = words(1)
        s = store(width, 8)
        append_words(s, code, 3)
        wide, _ = words(2)
        with pytest.raises(ValueError, match="outside the row"):
            s.overwrite(slots(0), wide.check_list([torch.zeros(1, 2, dtype=torch.int64)], 1, 0))

    @pytest.mark.deep
    def test_a_thread_that_reads_meanwhile_is_told_that_its_rows_are_gone(self) -> None:
        width, n = 8192, 64  # a batch of 4 MB: its copy releases the GIL
        code, row_bytes = words(width)
        s = store(row_bytes, n)
        append_words(s, code, n)
        plans = [code.check_list([row_words(torch.arange(n), width, e)], 1, 0) for e in (1, 2)]
        done, faults, seen = threading.Event(), [], []

        def read() -> None:
            every = torch.arange(n)
            while not done.is_set():
                rows, missing, unwritten, _ = s.gather(code, every)
                assert missing is None or len(missing) == n
                seen.append(missing is None)
                if missing is None and (unwritten or not numbers_of(rows[0])[1].all()):
                    faults.append("torn")
                if missing is None and len((rows[0][:, 0] // (1 << 50)).unique()) > 1:
                    faults.append("two editions in one batch")

        reader = threading.Thread(target=read)
        reader.start()
        end = time.monotonic() + 150
        while time.monotonic() < end and not faults and seen.count(False) < 5:
            s.overwrite(torch.arange(n), plans[s.epoch()[1] // 2 % 2])
            time.sleep(0)  # lets the reader begin
        done.set()
        reader.join()
        assert not faults
        assert not all(seen), "no edit fell into a read: the race was not run"


class TestKills:
    """The redo area: an entry that was marked is applied at the next open, one that was not never happened."""

    def marked(self, path: Path, torn: bytes = b"", number: int = 2, log_head: int = 1) -> tuple[bytearray, int]:
        code, width = words(4)
        with file_store(path, width, 4) as s:
            append_words(s, code, 4)
            image = bytearray(s.memory().tobytes())
            at = s.rows_offset + 2 * s.row_stride
            row = sealed(s, 2, number, 0, edition_rows([2], 4, 1).numpy().tobytes())
            entry = redo_entry(s, [2], [row], log_head)
            image[_native.testing.redo_offset(s) : _native.testing.redo_offset(s) + len(entry)] = entry
            image[at : at + len(torn)] = torn
            image[EDITS] |= 1  # `edits` is odd
            return image, _native.testing.redo_offset(s)

    def reopened(self, path: Path, image: bytearray) -> tuple[_native.Store, bool]:
        s, fd = open_image(path, image)
        assert s.epoch()[1] % 2 == 1
        finished = s.finish_interrupted()
        os.close(fd)
        assert s.epoch()[1] % 2 == 0
        return s, finished

    @pytest.mark.parametrize("torn", [b"", b"\xff" * 20], ids=["before the row", "inside the row"])
    def test_a_marked_change_is_finished_and_logged(self, tmp_path: Path, torn: bytes) -> None:
        s, finished = self.reopened(tmp_path / "s", self.marked(tmp_path / "s", torn)[0])
        assert finished and _native.testing.is_whole(s, 2)
        assert torch.equal(s.gather(words(4)[0], slots(2))[0][0], edition_rows([2], 4, 1))
        assert s.log(0) == [2]
        assert s.finish_interrupted() is False

    def test_finishing_is_an_edit_to_others_though_a_power_cut_left_the_counter_even(self, tmp_path: Path) -> None:
        image = self.marked(tmp_path / "s")[0]
        image[EDITS] &= 0xFE
        s, fd = open_image(tmp_path / "s", image)
        before = s.epoch()[1]
        assert s.finish_interrupted() and s.epoch()[1] == before + 2
        os.close(fd)

    @each("byte", [4, 8, 16, 24, 32, 40, 60, 80])
    def test_an_entry_that_is_not_whole_is_dropped(self, tmp_path: Path, byte: int) -> None:
        image, at = self.marked(tmp_path / "s")
        image[at + byte] ^= 1
        s, finished = self.reopened(tmp_path / "s", image)
        assert not finished
        assert torch.equal(s.gather(words(4)[0], slots(2))[0][0], edition_rows([2], 4, 0))
        assert s.log_head == 0

    def test_an_entry_that_is_older_than_the_row_is_dropped(self, tmp_path: Path) -> None:
        # After a power cut the mark on the disk may be one that memory had long taken back.
        code, width = words(4)
        with file_store(tmp_path / "s", width, 4) as s:
            append_words(s, code, 4)
            old = sealed(s, 2, 2, 0, edition_rows([2], 4, 1).numpy().tobytes())
            append_words(s, code, 3)
            image = bytearray(s.memory().tobytes())
            entry = redo_entry(s, [2], [old], 1)
            image[_native.testing.redo_offset(s) : _native.testing.redo_offset(s) + len(entry)] = entry
        s, fd = open_image(tmp_path / "s", image)
        s.finish_interrupted()
        os.close(fd)
        assert torch.equal(s.gather(code, slots(2))[0][0], edition_rows([6], 4, 0))

    def test_a_row_of_an_entry_that_lies_outside_changes_nothing(self, tmp_path: Path) -> None:
        code, width = words(4)
        with file_store(tmp_path / "s", width, 4) as s:
            append_words(s, code, 4)
            image = bytearray(s.memory().tobytes())
            entry = redo_entry(s, [1 << 40], [bytes(s.row_stride)], 1)
            image[_native.testing.redo_offset(s) : _native.testing.redo_offset(s) + len(entry)] = entry
        s, fd = open_image(tmp_path / "s", image)
        assert s.finish_interrupted() is False
        os.close(fd)

    @pytest.mark.deep
    def test_a_process_killed_at_any_moment_leaves_whole_rows(self, tmp_path: Path) -> None:
        width, n = 512, 32
        code, row_bytes = words(width)
        path = tmp_path / "s"
        with file_store(path, row_bytes, n) as s:
            append_words(s, code, n)

        def edit_for_ever() -> None:
            fd = os.open(path, os.O_RDWR)
            child = _native.Store.open(fd, os.fstat(fd).st_size)
            for edition in range(1, 1 << 20):
                where = torch.randint(0, n, (8,)).unique()
                child.overwrite(where, code.check_list([row_words(where, width, edition % 50)], 1, 0))

        for _ in range(25):
            killed_after(lambda: time.sleep(random.uniform(0.005, 0.03)), edit_for_ever)
            fd = os.open(path, os.O_RDWR)
            s = _native.Store.open(fd, os.fstat(fd).st_size)
            s.finish_interrupted()
            rows, missing, unwritten, _ = s.gather(code, torch.arange(n))
            os.close(fd)
            found, whole = numbers_of(rows[0])
            assert missing is None and unwritten is None and whole.all() and found.tolist() == list(range(n))
            assert all(_native.testing.is_whole(s, i) for i in range(n))

    def test_flushed_rows_change_on_the_disk_before_the_redo_entry_goes(self, tmp_path: Path) -> None:
        code, width = words(4)
        with file_store(tmp_path / "s", width, 4) as s:
            append_words(s, code, 4)
            s.mark_durable([4])
            s.overwrite(slots(2), code.check_list([edition_rows([2], 4, 1)], 1, 0))
            assert _native.testing.is_whole(s, 2) and s.epoch()[1] == 2
