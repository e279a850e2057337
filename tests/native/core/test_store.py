"""Stores: rings against a plain-Python oracle, bounds, counters, seams, epochs and walks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.each import each
from engram import _native
from native.core.support import (
    HEADER_BYTES,
    INCARNATION,
    LANE_BYTES,
    STORE_ID,
    append_strands,
    append_words,
    codec,
    file_store,
    numbers_of,
    open_image,
    slots,
    store,
    words,
)


class TestTheRing:
    @settings(max_examples=60, deadline=None)
    @given(
        capacity=st.integers(1, 40), lanes=st.integers(1, 3), strands=st.integers(1, 3), trailer=st.booleans(),
        batches=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 90)), max_size=8),
    )  # fmt: skip
    def test_holds_what_a_list_would(
        self, capacity: int, lanes: int, strands: int, trailer: bool, batches: list[tuple[int, int]]
    ) -> None:
        code, width = words(2)
        s = store(width, capacity, lanes=lanes, strands=strands, trailer=trailer)
        written = [0] * lanes
        for lane, n in ((lane % lanes, n) for lane, n in batches):
            made = append_strands(s, code, n, lane)
            assert made.tolist() == [lane * capacity + (written[lane] + i) % capacity for i in range(n)]
            written[lane] += n
        expected, generations = [], []
        for lane in range(lanes):
            for slot in range(capacity):
                held = [w for w in range(max(0, written[lane] - capacity), written[lane]) if w % capacity == slot]
                generations += [held[0] if held else -1] * strands
                expected += [held[0] * strands + e if held else None for e in range(strands)]
        every = np.arange(capacity * lanes * strands)
        rows, missing, unwritten, numbers = s.gather(code, every, sequences=True)
        assert missing is None
        assert (unwritten or []) == [i for i, w in enumerate(expected) if w is None]
        assert s.generations(every).tolist() == generations
        found, whole = numbers_of(rows[0])
        there = [i for i, w in enumerate(expected) if w is not None]
        assert whole[there].all() and found[there].tolist() == [expected[i] for i in there]
        assert numbers[there].tolist() == [generations[i] for i in there]
        assert s.rows() == len(there) and s.steps_written() == sum(written)
        assert [s.cursor(lane) for lane in range(lanes)] == [w % capacity for w in written]

    @each("n", [1, 7, 8, 9, 100])
    def test_a_batch_larger_than_the_lane_is_written_through(self, n: int) -> None:
        code, width = words(3)
        s = store(width, 7)
        append_words(s, code, n)
        assert s.lane(0)["published"] == n and s.rows() == min(n, 7)
        found, whole = numbers_of(s.gather(code, np.arange(n)[-7:] % 7)[0][0])
        assert whole.all() and found.tolist() == list(range(n))[-7:]

    def test_a_claim_that_was_never_published_hides_what_it_would_replace(self) -> None:
        code, width = words(1)
        s = store(width, 8)
        append_words(s, code, 10)
        at = _native.testing.claim(s, 0, 3)
        assert at == 10 and s.generations(np.arange(8)).tolist() == [8, 9, -1, -1, -1, 5, 6, 7]
        assert s.gather(code, slots(2, 5))[2] == [0]
        append_words(s, code, 1)
        assert s.generations(np.arange(8)).tolist() == [8, 9, 10, -1, -1, 5, 6, 7]


class TestBounds:
    @pytest.mark.parametrize("bad", [-1, 12, 1 << 40, -(1 << 63), (1 << 63) - 1])
    def test_slots_outside_the_store_are_refused(self, bad: int) -> None:
        code, width = words(1)
        s = store(width, 2, lanes=2, strands=3)
        for use in (
            lambda: s.gather(code, slots(0, bad)), lambda: s.generations(slots(bad)),
        ):  # fmt: skip
            with pytest.raises(IndexError, match="0 to 11"):
                use()

    @pytest.mark.parametrize("lane", [2, 1 << 40])
    def test_lanes_that_do_not_exist_are_refused(self, lane: int) -> None:
        code, width = words(1)
        s = store(width, 2, lanes=2, trailer=True)
        plan = code.check_list([np.zeros((1, 1), np.int64)], 1, 0)
        for use in (
            lambda: s.append(lane, plan), lambda: s.lane(lane), lambda: s.cursor(lane),
            lambda: _native.testing.claim(s, lane, 1), lambda: _native.testing.publish(s, lane, 0, 1),
            lambda: s.mark_seam(lane), lambda: s.raise_term(lane), lambda: s.restore_lane(lane, 0, 0, 0),
            lambda: s.seams(lane), lambda: s.set_seams(lane, 0, 0, []), lambda: s.next_is_seam(lane),
            lambda: s.advance(lane, 1),
            lambda: s.put(lane, 0, np.zeros((1, 1, width), np.uint8)),
        ):  # fmt: skip
            with pytest.raises(IndexError, match="of 2"):
                use()

    @each("bad", [
        [0], np.zeros(1), np.zeros(1, np.int32), np.zeros((2, 3), np.int64).T, None, b"12345678", np.arange(8)[::2],
        np.frombuffer(bytes(17), np.uint8)[1:].view(np.int64),
    ])  # fmt: skip
    def test_only_contiguous_int64_slots_are_taken(self, bad: object) -> None:
        code, width = words(1)
        with pytest.raises(TypeError):
            store(width, 8).gather(code, bad)

    def test_sizes_beyond_all_memory_are_refused_before_they_wrap_around(self) -> None:
        code, width = words(1)
        s = store(width, 8)
        append_words(s, code, 8)
        for n in (1 << 61, 1 << 60, (1 << 64) - 1, 1 << 47):
            with pytest.raises(MemoryError):
                s.uniform(slots(1), n)
        with pytest.raises(ValueError, match="negative or too large"):
            s.gather(code, slots(0, 1), (-1, -2))
        with pytest.raises(ValueError, match="differ"):
            s.gather(code, slots(0, 1), (1 << 33, 1 << 33))
        with pytest.raises(ValueError, match="differ"):
            s.gather(code, slots(0, 1), (3,))
        with pytest.raises(ValueError, match="no seed"):
            s.uniform(slots(), 1)

    def test_rows_are_removed_from_lanes_that_are_there(self) -> None:
        code, width = words(1)
        s = store(width, 8)
        append_words(s, code, 8)
        for change in (s.begin_removing, s.end_removing):
            with pytest.raises(IndexError, match="lane 7 of 1"):
                change(7)

    @each("bad", [
        (0, 1, 1, 8, 8, False), (4097, 1, 1, 8, 8, False), (1, 0, 1, 8, 8, False), (1, 1, 0, 8, 8, False),
        (1, 1, 1, 8, 4, False), (1, 1, 1, 8, 128, False), (1, 1, 1, 8, 24, False), (1, 1 << 57, 1, 8, 8, False),
        (4, 1 << 63, 1 << 63, 8, 8, False), (1, 1, 1 << 57, 8, 8, False), (1, 1, 1, (1 << 64) - 1, 8, True),
        (1, 1, 1, 0, 8, True), (1, 1 << 50, 1 << 10, 8, 8, False),
    ])  # fmt: skip
    def test_shapes_that_no_store_has_are_refused(self, bad: tuple[int, ...]) -> None:
        with pytest.raises(ValueError):
            _native.Store.create(-1, *bad, b"", STORE_ID)
        with pytest.raises(ValueError):
            _native.Store.size_needed(*bad, 0)
        with pytest.raises(ValueError, match="store_id"):
            _native.Store.create(-1, 1, 1, 1, 8, 8, False, b"", b"short")

    def test_files_that_are_too_short_are_refused(self, tmp_path: Path) -> None:
        fd = os.open(tmp_path / "s", os.O_RDWR | os.O_CREAT)
        with pytest.raises(ValueError, match="smaller"):
            _native.Store.create(fd, 1, 8, 1, 8, 8, False, b"", STORE_ID)
        for size in (0, 100, 1 << 20):
            with pytest.raises(RuntimeError, match="shorter"):
                _native.Store.open(fd, size)
        os.close(fd)
        with pytest.raises(RuntimeError, match="cannot stat"):
            _native.Store.open(fd, 1 << 20)

    def test_memory_that_cannot_be_mapped_is_an_error(self) -> None:
        with pytest.raises(MemoryError, match=r"no memory to map \d{16,} bytes"):
            store(1 << 20, 1 << 30)

    @each("alignment", [8, 16, 32, 64])
    def test_every_leaf_can_be_viewed_in_place(self, alignment: int) -> None:
        for trailer in (False, True):
            s = store(24, 100, alignment=alignment, trailer=trailer)
            assert s.rows_offset % 4096 == 0 and s.row_stride % alignment == 0
            assert s.row_stride >= 24 + 16 * trailer

    def test_the_memory_outlives_the_store(self) -> None:
        code, width = words(1)
        s = store(width, 8)
        append_words(s, code, 8)
        memory, total = s.memory(), s.total_bytes
        del s
        assert memory.shape == (total,) and int(memory[:8].view(np.uint64)[0]) != 0


class TestCounters:
    def test_empty_moves_to_the_next_turn_and_keeps_counting(self) -> None:
        code, width = words(1)
        s = store(width, 8)
        append_words(s, code, 11)
        before = s.incarnation
        s.empty(False)
        assert (s.rows(), s.cursor(0), s.steps_written()) == (0, 0, 11)
        assert s.incarnation == before + 2
        assert s.generations(np.arange(8)).tolist() == [-1] * 8
        append_words(s, code, 2)
        assert s.generations(slots(0, 1)).tolist() == [16, 17] and s.steps_written() == 13
        s.empty(True)
        assert (s.rows(), s.steps_written()) == (0, 0)

    def test_restored_lanes_show_their_rows_and_seams(self) -> None:
        code, width = words(1)
        s = store(width, 8)
        append_words(s, code, 8)
        s.begin_restore()
        assert s.rows() == 0 and s.incarnation % 2 == 1
        s.set_seams(0, 3, 8, [5])
        s.restore_lane(0, 3, 8, 1)
        s.end_restore()
        assert s.incarnation % 2 == 0
        assert s.seams(0) == [5] and s.rows() == 5 and s.steps_written() == 7
        assert numbers_of(s.gather(code, slots(3, 7))[0][0])[0].tolist() == [3, 7]
        with pytest.raises(ValueError, match="base"):
            s.restore_lane(0, 9, 8, 0)

    @pytest.mark.parametrize("reset", [False, True])
    def test_a_kill_between_any_two_stores_of_empty_is_mended(self, tmp_path: Path, reset: bool) -> None:
        # A debugger could stop `empty` at each store; here every subset of its stores stands for the moments between.
        code, width = words(1)
        with file_store(tmp_path / "s", width, 8, lanes=2) as s:
            for lane in (0, 1):
                append_words(s, code, 11, lane)
            before = bytearray(s.memory().tobytes())
            s.empty(reset)
            after = bytearray(s.memory().tobytes())
        moving = (1 << 63) | 16
        count = 0 if reset else 11
        order = [("durable", count), ("base", moving), ("origin", None), ("claimed", None), ("published", None),
                 ("base", 16), ("durable", 16)]  # fmt: skip
        offset = {"claimed": 0, "published": 64, "base": 128, "origin": 192, "durable": 200}
        for lane in (0, 1):
            for steps in range(len(order) + 1):
                image = bytearray(before)
                image[INCARNATION] |= 1  # the incarnation is odd
                for done in range(lane):
                    at = HEADER_BYTES + LANE_BYTES * done
                    image[at : at + LANE_BYTES] = after[at : at + LANE_BYTES]
                for name, value in order[:steps]:
                    at = HEADER_BYTES + LANE_BYTES * lane + offset[name]
                    image[at : at + 8] = after[at : at + 8] if value is None else value.to_bytes(8, "little")
                s, fd = open_image(tmp_path / "s", image)
                assert len(s.uniform(slots(0), 4) if s.rows() else ()) in (0, 4)
                s.repair()
                assert s.rows() == 0 and [s.cursor(0), s.cursor(1)] == [0, 0]
                assert s.steps_written() in {0, 11, 22} and s.incarnation % 2 == 0
                assert reset or s.steps_written() == 22
                for n in (0, 1):
                    append_words(s, code, 3, n)
                assert s.rows() == 6
                os.close(fd)

    def test_a_kill_inside_loads_leaves_an_empty_store(self) -> None:
        code, width = words(1)
        s = store(width, 8, lanes=2)
        append_words(s, code, 8)
        s.begin_restore()
        s.restore_lane(0, 0, 5, 0)
        s.repair()
        assert s.rows() == 0 and s.incarnation % 2 == 0
        append_words(s, code, 2)
        assert s.rows() == 2

    def test_mending_a_sound_store_changes_nothing(self) -> None:
        code, width = words(1)
        s = store(width, 8, lanes=2)
        append_words(s, code, 11, 1)
        s.mark_seam(1)
        before = s.memory().tobytes()
        s.repair()
        assert s.memory().tobytes() == before


class TestSeams:
    def test_one_stands_at_the_next_row_and_goes_with_the_row_before_it(self) -> None:
        code, width = words(1)
        s = store(width, 8)
        s.mark_seam(0)
        assert s.seams(0) == [] and not s.next_is_seam(0)  # nothing before it
        append_words(s, code, 3)
        s.mark_seam(0)
        s.mark_seam(0)
        assert s.seams(0) == [3] and s.next_is_seam(0)
        append_words(s, code, 2)
        assert s.seams(0) == [3] and not s.next_is_seam(0)
        s.mark_seam(0)
        assert s.seams(0) == [3, 5]
        append_words(s, code, 7)
        assert s.seams(0) == [5]
        append_words(s, code, 8)
        assert s.seams(0) == []

    @pytest.mark.parametrize("payload", [True, False], ids=["bits", "a list"])
    def test_there_is_room_for_one_at_every_row(self, payload: bool) -> None:
        code, width = words(1)
        s = store(width if payload else 0, 1000)
        for i in range(2500):
            s.mark_seam(0)
            append_words(s, code, 1) if payload else s.advance(0, 1)
            first = s.lane(0)["first"]
            assert s.rows() == min(i + 1, 1000) and s.lane(0)["base"] == 0
            if i % 100 == 0 or 990 < i < 1010:
                assert s.seams(0) == list(range(first + 1, i + 1))

    @given(
        capacity=st.integers(1, 200),
        appends=st.lists(st.tuples(st.integers(1, 150), st.booleans()), max_size=30),
        loaded=st.none() | st.tuples(st.integers(0, 500), st.integers(0, 200), st.sets(st.integers(0, 700))),
    )
    def test_bits_and_a_list_agree_with_a_set(
        self, capacity: int, appends: list[tuple[int, bool]], loaded: tuple[int, int, set[int]] | None
    ) -> None:
        code, width = words(1)
        for s in (store(width, capacity), store(0, capacity)):
            published, seams = 0, set[int]()
            if loaded is not None:
                base, published = loaded[0], loaded[0] + min(loaded[1], capacity)
                seams = {w for w in loaded[2] if base < w <= published}
                s.begin_restore()
                s.set_seams(0, base, published, sorted(loaded[2] & set(range(base, published + 1))))
                s.restore_lane(0, base, published, 0)
                s.end_restore()
            for n, mark in appends:
                if mark and s.rows():
                    s.mark_seam(0)
                    seams.add(published)
                append_words(s, code, n) if s.payload_bytes else s.advance(0, n)
                published += n
                first = s.lane(0)["first"]
                assert s.seams(0) == sorted(w for w in seams if first < w)


class TestWalks:
    def test_every_row_once_and_overwritten_ones_skipped(self) -> None:
        code, width = words(1)
        s = store(width, 50, lanes=2, strands=2)
        append_strands(s, code, 70, 0)
        append_strands(s, code, 20, 1)
        ranges = [(s.lane(i)["first"], s.lane(i)["published"] - s.lane(i)["first"]) for i in (0, 1)]
        for shuffle in (True, False):
            walk = _native.EpochWalk(s, 7, shuffle, ranges)
            assert len(walk) == 140
            made, position = [], 0
            while position < len(walk):
                found, position = walk.take(s, position, 33)
                made += found.tolist()
            assert sorted(made) == list(range(140)) and (made == sorted(made)) is not shuffle
        append_strands(s, code, 10, 0)  # overwrites time slots 20 to 29
        found, position = walk.take(s, 0, 1000)
        assert position == 140 and set(range(140)) - set(found.tolist()) == set(range(40, 60))
        assert walk.take(s, 140, 5)[0].tolist() == []

    def test_a_walk_over_another_store_or_too_many_rows_is_refused(self) -> None:
        _, width = words(1)
        s = store(width, 8, lanes=2)
        with pytest.raises(ValueError, match="each lane"):
            _native.EpochWalk(s, 0, True, [(0, 8)])
        with pytest.raises(ValueError, match="longer"):
            _native.EpochWalk(s, 0, True, [(0, 8), (0, 9)])
        walk = _native.EpochWalk(s, 0, True, [(0, 8), (0, 8)])
        with pytest.raises(ValueError, match="another store"):
            walk.take(store(width, 8), 0, 8)


class TestMappedFiles:
    def test_pages_are_asked_for_only_while_that_pays(self) -> None:
        code, width = words(512)
        with tempfile.TemporaryDirectory() as folder, file_store(Path(folder) / "s", width, 2000) as s:
            append_words(s, code, 2000)
            s.sync_header()
            fd = os.open(Path(folder) / "s", os.O_RDWR)
            os.fsync(fd)
            opened = _native.Store.open(fd, os.fstat(fd).st_size)
            opened.advise_random()
            for _ in range(12):
                where = np.random.randint(0, 2000, 256)
                rows, missing, unwritten, _ = opened.gather(code, where, mapped=True)
                assert missing is None and unwritten is None and numbers_of(rows[0])[0].tolist() == where.tolist()
            assert _native.testing.reads_ahead(opened) is False  # all of it is in memory
            os.close(fd)

    def test_a_store_is_reopened_as_it_was_left(self, tmp_path: Path) -> None:
        code, width = words(2)
        with file_store(tmp_path / "s", width, 8, layout=b'{"a": 1}', lanes=2) as s:
            append_words(s, code, 11, 1)
            s.boot_id, s.clean = bytes(range(16)), True
            fd = os.open(tmp_path / "s", os.O_RDWR)
            t = _native.Store.open(fd, os.fstat(fd).st_size)
            assert (t.layout, t.store_id, t.boot_id, t.clean) == (b'{"a": 1}', STORE_ID, bytes(range(16)), True)
            assert t.lane(1) == s.lane(1) and t.row_stride == s.row_stride and _native.testing.has_trailer(t)
            append_words(t, code, 1, 1)  # one memory
            assert s.lane(1)["published"] == 12
            os.close(fd)
        with pytest.raises(ValueError, match="16 bytes"):
            s.boot_id = b"x"

    def test_private_memory_has_no_trailers_to_recover(self) -> None:
        s = store(8, 4)
        with pytest.raises(ValueError, match="without trailers"):
            s.recover()
        with pytest.raises(IndexError):
            _native.testing.is_whole(s, 0)
        with pytest.raises(ValueError, match="each lane"):
            s.mark_durable([1, 2])


def test_two_leaves_of_one_row_come_from_the_same_row() -> None:
    code, width = codec(("i8", (5,)), ("i4", ()), ("u1", (3,)))
    s = store(width, 100)
    n = np.arange(250)
    leaves = [np.repeat(n[:, None], 5, 1), n.astype("i4"), np.repeat((n % 256).astype("u1")[:, None], 3, 1)]
    s.append(0, code.check_list(leaves, 1, 0))
    a, b, c = s.gather(code, np.random.randint(0, 100, 1000))[0]
    assert np.array_equal(a[:, 0], b) and np.array_equal(b % 256, c[:, 0])
