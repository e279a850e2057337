"""Each row of a producer is in once and in order, whoever died; and no call reaches another life of a shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.each import each
from contracts.waiting import comes
from distributed.shards import LAYOUT, draw, read, read_all, rows, shard, whole, write
from engram.data import (
    LazyMemmapStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    SamplerWithoutReplacement,
    SliceSampler,
)
from engram.distributed import ReplayShard, pack, unpack
from engram.distributed.producers import STREAMS
from engram.distributed.shard import _block
from engram.errors import IncarnationError, NoFreeLaneError, StorageError, StorageInUseError
from engram.store import files, places
from engram.store.files import FILE_NAME
from engram.store.layout import RowLayout
from engram.store.streams import AdoptedStream


class TestProducers:
    def test_rows_of_each_stay_together_and_in_order(self) -> None:
        s = shard()
        for start in (0, 10, 20):
            write(s, "a", rows(start, start + 10)), write(s, "b", rows(start + 1000, start + 1010))
        assert read(s, "a") == list(range(30)) and read(s, "b") == list(range(1000, 1030))

    def test_rows_that_are_sent_again_are_in_once(self) -> None:
        s = shard()
        assert [write(s, "a", rows(0, 10), first=0).rows for _ in range(3)] == [10] * 3
        assert write(s, "a", rows(5, 15), first=5).rows == 15 and read(s, "a") == list(range(15))

    def test_one_alone_fills_the_shard(self) -> None:
        s = shard(capacity=40)
        for start in range(0, 70, 7):
            write(s, "a", rows(start, start + 7), first=start)
        assert s.join(s.incarnation, "a").rows == 70 and sorted(read_all(s)) == list(range(30, 70))

    def test_rows_after_a_gap_are_refused(self) -> None:
        s = shard()
        write(s, "a", rows(0, 5))
        for first in (6, -1):
            with pytest.raises(ValueError, match="never came"):
                write(s, "a", rows(6, 8), first=first)
        assert read(s, "a") == [0, 1, 2, 3, 4]

    def test_one_that_joins_again_keeps_its_tenancy(self) -> None:
        s = shard()
        tenancy = s.join(s.incarnation, "a")
        write(s, "a", rows(0, 3))
        assert s.join(s.incarnation, "a") == tenancy._replace(rows=3)

    def test_any_number_joins_and_those_that_pause_keep_their_counts_only(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("engram.distributed.producers.LANE_KEPT", -1.0)
        s = shard(capacity=40)
        for k in range(100):
            write(s, f"p{k}", rows(10 * k, 10 * k + 3))
        assert [s.join(s.incarnation, f"p{k}").rows for k in range(100)] == [3] * 100
        assert len(s) == 40 and min(read_all(s)) >= 800
        assert write(s, "p0", rows(1, 6), first=1).rows == 6 and min(read_all(s)) == 3

    def test_one_that_comes_back_to_a_full_table_keeps_its_rows_apart(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The oldest stream that has ended makes room, and it may be that of the producer itself."""
        monkeypatch.setattr("engram.store.streams.MOST_STREAMS", 4)
        s = shard(capacity=400, scratch_dir=tmp_path)
        write(s, "a", rows(0, 5)), s.leave(s.incarnation, "a", s.join(s.incarnation, "a").number)
        for k in range(3):
            s.join(s.incarnation, f"p{k}")
        write(s, "a", rows(5, 10))
        in_before = s.join(s.incarnation, "a")
        s.close()
        again = shard(capacity=400, scratch_dir=tmp_path)
        assert again.join(again.incarnation, "a") == in_before

    def test_a_tenancy_that_ended_is_answered_with_its_count(self) -> None:
        s = shard()
        old = s.join(s.incarnation, "a")
        write(s, "a", rows(0, 3)), s.leave(s.incarnation, "a", old.number), write(s, "b", rows(100, 105))
        for _ in range(2):  # before and after it joins again
            answer = s.extend(s.incarnation, "a", old.number, 3, pack(LAYOUT, rows(3, 9)))
            assert (answer.rows, answer.in_force) == (3, False) and len(s) == 8
            again = s.join(s.incarnation, "a")
            assert again.rows == 0 and again.ended == (old.number, 3) and again.number != old.number

    def test_a_tenancy_of_another_producer_takes_no_rows(self) -> None:
        s = shard()
        tenancy = s.join(s.incarnation, "a")
        for producer, number in (("b", tenancy.number), ("a", tenancy.number + 1)):
            with pytest.raises(ValueError, match="has no tenancy"):
                s.extend(s.incarnation, producer, number, 0, pack(LAYOUT, rows(0, 1)))
        assert len(s) == 0

    def test_one_that_leaves_again_is_told_the_same_count(self) -> None:
        s = shard()
        tenancy = s.join(s.incarnation, "a")
        write(s, "a", rows(0, 3))
        assert [s.leave(s.incarnation, "a", tenancy.number) for _ in range(2)] == [3, 3]
        assert s.facts().producers == ()

    def test_no_slice_goes_from_one_to_the_next(self) -> None:
        s = shard(sampler=SliceSampler(slice_len=4, traj_key="traj"))
        write(s, "a", rows(0, 5)), write(s, "b", rows(100, 105))
        drawn = s.sample(s.incarnation, 400)
        slices = unpack(LAYOUT, drawn.block)["n"].reshape(-1, 4)
        assert bool((slices.diff() == 1).all()) and drawn.totals.draws.share == 2

    @pytest.mark.parametrize("block", [rows(0, 3).exclude("wide"), rows(0, 3).unsqueeze(-1)])
    def test_rows_of_another_layout_are_refused(self, block: Any) -> None:
        s = shard()
        tenancy = s.join(s.incarnation, "a")
        other = RowLayout.of(block.set("more", torch.zeros(*block.batch_size)), 1)
        with pytest.raises(ValueError, match="layout"):
            s.extend(s.incarnation, "a", tenancy.number, 0, pack(other, block))
        assert len(s) == 0

    def test_long_rows_come_and_go(self) -> None:
        s = ReplayShard(100, lanes=2)
        batch = {"n": torch.arange(3), "pixels": torch.randint(0, 256, (3, 5000), dtype=torch.uint8)}
        layout = RowLayout.of(batch, 1)
        s.adopt(s.incarnation, layout.to_bytes())
        tenancy = s.join(s.incarnation, "a")
        for first in (0, 1):
            s.extend(s.incarnation, "a", tenancy.number, first, pack(layout, batch).rest(first))
        back = unpack(layout, s.take(s.incarnation, torch.zeros(3).long(), torch.arange(3)).block)
        assert len(s) == 3 and torch.equal(back["pixels"], batch["pixels"])

    def test_rows_that_the_sampler_cannot_draw_from_are_refused_before_the_first_comes(self) -> None:
        s = ReplayShard(40, sampler=SliceSampler(slice_len=2, traj_key="no such entry"))
        with pytest.raises(KeyError, match="no such entry"):
            s.adopt(s.incarnation, LAYOUT.to_bytes())
        assert s.layout is None

    def test_the_counts_of_the_last_tenancies_that_ended_are_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("engram.store.streams.MOST_STREAMS", 3)
        s = shard()
        numbers = []
        for k in range(5):
            numbers.append(s.join(s.incarnation, f"p{k}").number)
            write(s, f"p{k}", rows(0, k))
            assert s.leave(s.incarnation, f"p{k}", numbers[k]) == k
        assert [s.leave(s.incarnation, f"p{k}", numbers[k]) for k in (2, 3, 4)] == [2, 3, 4]
        with pytest.raises(ValueError, match="has no tenancy"):
            s.leave(s.incarnation, "p0", numbers[0])

    def test_a_name_that_does_not_fit_is_refused(self) -> None:
        s = shard()
        with pytest.raises(ValueError, match="the longest has"):
            s.join(s.incarnation, "x" * 500)
        assert s.facts().producers == ()

    def test_each_is_told_where_its_rows_lie(self) -> None:
        s = shard(capacity=40)
        for start in range(0, 60, 4):
            for k, producer in enumerate("ab"):
                answer = write(s, producer, rows(1000 * k + start, 1000 * k + start + 4), asks_slots=True)
                there = whole(unpack(LAYOUT, _block(s._storage.read_packed(answer.slots).batch)))
                assert there.tolist() == [1000 * k + start + n for n in range(4)]
                again = write(s, producer, rows(1000 * k + start, 1000 * k + start + 4), start, asks_slots=True)
                assert again.slots.tolist() == answer.slots.tolist() and again.rows == answer.rows

    def test_the_place_of_the_next_rows_is_kept_for_who_sends_them(self) -> None:
        s = shard()
        place = write(s, "a", rows(0, 3)).place
        write(s, "b", rows(100, 110))
        slots = write(s, "a", rows(3, 8), asks_slots=True).slots
        assert slots.tolist() == [place.first_slot + (place.sequence + n) % place.capacity for n in range(5)]

    def test_no_more_than_a_quarter_of_the_lanes_is_kept(self) -> None:
        s = shard(capacity=40)
        places = [write(s, f"p{k}", rows(0, 1)).place for k in range(20)]
        assert 0 < sum(place is not None for place in places) <= s._lanes.store.lanes // 4

    def test_a_place_is_kept_for_a_while_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("engram.distributed.producers.LANE_KEPT", 0.0)
        s = shard()
        write(s, "a", rows(0, 3))
        assert comes(lambda: not any(s._lanes.store.lane(lane)["turn"] for lane in range(s._lanes.store.lanes)))

    def test_each_is_told_how_much_it_may_have_on_its_way(self) -> None:
        s = shard()
        alone = write(s, "a", rows(0, 1)).credit
        assert alone * LAYOUT.payload_bytes <= 16 << 20 and write(s, "b", rows(0, 1)).credit == alone // 2


class LocalRows:
    """A producer that writes to a shard's store itself."""

    def __init__(self, s: ReplayShard, name: str, number: int) -> None:
        lent = s.lend(s.incarnation, name, number)
        self.storage = LazyMemmapStorage(None, lent.folder, existsok=True)
        assert self.storage.initialized
        self._stream = AdoptedStream(self.storage.lanes, Path(lent.folder) / STREAMS, lent.entry, number)

    def write(self, batch: Any) -> None:
        with self._stream.writing():
            self.storage.append_packed(LAYOUT.pack(batch))


class TestLending:
    """A process of the same machine that writes to its lane itself: another storage object has locks as it does."""

    def lent(self, path: Path, **settings: Any) -> tuple[ReplayShard, Any, LocalRows]:
        s = shard(scratch_dir=path, **settings)
        tenancy = s.join(s.incarnation, "a")
        return s, tenancy, LocalRows(s, "a", tenancy.number)

    def test_what_it_writes_is_counted_and_read(self, tmp_path: Path) -> None:
        s, tenancy, other = self.lent(tmp_path)
        other.write(rows(0, 7))
        other.storage.close()
        assert s.join(s.incarnation, "a") == tenancy._replace(rows=7)
        write(s, "a", rows(5, 9), first=5)
        assert read(s, "a") == list(range(9))

    def test_nobody_else_writes_under_its_name_while_it_lives(self, tmp_path: Path) -> None:
        s, tenancy, other = self.lent(tmp_path)
        for call in (
            lambda: s.join(s.incarnation, "a"),
            lambda: s.leave(s.incarnation, "a", tenancy.number),
            lambda: s.extend(s.incarnation, "a", tenancy.number, 0, pack(LAYOUT, rows(0, 1))),
        ):
            with pytest.raises(NoFreeLaneError, match="'a' is a living process"):
                call()
        write(s, "b", rows(100, 103)), other.write(rows(0, 3))
        other.storage.close()
        assert s.leave(s.incarnation, "a", tenancy.number) == 3 and sorted(read_all(s)) == [0, 1, 2, 100, 101, 102]

    def test_a_shard_that_is_made_again_counts_what_it_writes(self, tmp_path: Path) -> None:
        first, _, other = self.lent(tmp_path)
        other.write(rows(0, 3))
        first.close()
        again = shard(scratch_dir=tmp_path)
        other.write(rows(3, 5))
        other.storage.close()
        assert again.join(again.incarnation, "a").rows == 5 and read(again, "a") == list(range(5))

    def test_its_first_row_does_not_go_on_from_the_producer_s_before(self, tmp_path: Path) -> None:
        s = shard(scratch_dir=tmp_path, sampler=SliceSampler(slice_len=2, traj_key="traj"))
        write(s, "x", rows(0, 3))
        other = LocalRows(s, "a", s.join(s.incarnation, "a").number)
        other.write(rows(100, 103))
        assert s.totals(s.incarnation).draws.share == 2

    def test_a_second_shard_is_refused_beside_it(self, tmp_path: Path) -> None:
        _s, _, _other = self.lent(tmp_path)
        with pytest.raises(NoFreeLaneError, match="another shard"):
            shard(scratch_dir=tmp_path)

    @pytest.mark.parametrize("change", ["empty", "loads"])
    def test_rows_are_not_replaced_while_it_writes(self, tmp_path: Path, change: str) -> None:
        s, _, other = self.lent(tmp_path)
        other.write(rows(0, 3))
        s.dumps(s.incarnation, tmp_path / "saved")
        before = s.incarnation
        with pytest.raises(StorageInUseError):
            s.empty(before) if change == "empty" else s.loads(before, tmp_path / "saved")
        assert s.incarnation == before and read_all(s) == [0, 1, 2]
        other.storage.close()
        s.empty(before) if change == "empty" else s.loads(before, tmp_path / "saved")
        assert write(s, "b", rows(9, 10)).in_force

    def test_rows_of_private_memory_are_not_written_by_others(self) -> None:
        s = shard()
        with pytest.raises(ValueError, match="without a scratch_dir"):
            s.lend(s.incarnation, "a", s.join(s.incarnation, "a").number)


class TestIncarnations:
    @each(
        ("method", "arguments"),
        [
            ("adopt", (b"",)), ("join", ("a",)), ("leave", ("a", 1)), ("extend", ("a", 1, 0, None)), ("totals", ()),
            ("lend", ("a", 1)), ("take", (None, None)), ("draw", (None, 1, 1)), ("sample", (3,)),
            ("update_priority", (None, None, None)), ("empty", ()), ("dumps", ("",)), ("loads", ("",)),
        ],
    )  # fmt: skip
    @each("other", [-1, 1])
    def test_a_call_for_another_is_refused(self, method: str, arguments: tuple[Any, ...], other: int) -> None:
        s = shard()
        write(s, "a", rows(0, 3))
        with pytest.raises(IncarnationError, match="Nothing was changed"):
            getattr(s, method)(s.incarnation + other, *arguments)
        assert read(s, "a") == [0, 1, 2]

    def test_emptying_begins_one_in_which_every_tenancy_has_ended(self) -> None:
        s = shard()
        old = s.join(s.incarnation, "a")
        write(s, "a", rows(0, 3))
        before = s.incarnation
        assert s.empty(before) == s.incarnation > before and len(s) == 0
        assert not s.extend(s.incarnation, "a", old.number, 0, pack(LAYOUT, rows(0, 3))).in_force
        write(s, "a", rows(3, 5))
        assert s.join(s.incarnation, "a").rows == 2 and read(s, "a") == [3, 4]

    def test_loading_begins_one_in_which_every_tenancy_has_ended(self, tmp_path: Path) -> None:
        s = shard()
        write(s, "a", rows(0, 3))
        assert s.dumps(s.incarnation, tmp_path / "saved") == "g-000001"
        old = s.join(s.incarnation, "a")
        write(s, "a", rows(3, 8))
        before = s.incarnation
        assert s.loads(before, tmp_path / "saved", snapshot="g-000001") == s.incarnation > before
        answer = s.extend(s.incarnation, "a", old.number, 8, pack(LAYOUT, rows(8, 9)))
        assert (answer.rows, answer.in_force) == (8, False) and read_all(s) == [0, 1, 2]

    def test_a_new_shard_takes_over_what_was_saved(self, tmp_path: Path) -> None:
        s = shard()
        write(s, "a", rows(0, 3)), write(s, "b", rows(10, 12))
        s.dumps(s.incarnation, tmp_path / "saved")
        new = ReplayShard(400, lanes=4)
        new.loads(new.incarnation, tmp_path / "saved")
        write(new, "c", rows(3, 5))
        assert sorted(read_all(new)) == [0, 1, 2, 3, 4, 10, 11]


class TestLives:
    def test_one_that_is_made_again_goes_on_where_the_rows_ended(self, tmp_path: Path) -> None:
        first = shard(scratch_dir=tmp_path, sampler=SliceSampler(slice_len=2, traj_key="traj"))
        tenancy = first.join(first.incarnation, "a")
        write(first, "a", rows(0, 3))
        first.close()
        again = shard(scratch_dir=tmp_path, sampler=SliceSampler(slice_len=2, traj_key="traj"))
        assert again.incarnation > first.incarnation
        assert again.join(again.incarnation, "a") == tenancy._replace(rows=3)
        write(again, "a", rows(1, 6), first=1)
        assert read(again, "a") == list(range(6)) and again.totals(again.incarnation).draws.share == 1

    def test_a_producer_that_joined_and_never_wrote_is_told_apart_from_the_one_before(self, tmp_path: Path) -> None:
        first = shard(scratch_dir=tmp_path)
        write(first, "a", rows(0, 3))
        first.join(first.incarnation, "b")
        first.close()
        again = shard(scratch_dir=tmp_path, sampler=SliceSampler(slice_len=2, traj_key="traj"))
        write(again, "b", rows(100, 103))
        assert again.totals(again.incarnation).draws.share == 2

    def test_rows_that_a_power_cut_took_are_not_counted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = shard(scratch_dir=tmp_path)
        tenancy = first.join(first.incarnation, "a")
        write(first, "a", rows(0, 3))
        image = (tmp_path / FILE_NAME).read_bytes()  # the disk got no more of it
        write(first, "a", rows(3, 8))
        first.close()
        (tmp_path / FILE_NAME).write_bytes(image)
        for module in (files, places):
            monkeypatch.setattr(module, "boot_id", lambda: bytes(range(16)))
        again = shard(scratch_dir=tmp_path)
        answer = again.extend(again.incarnation, "a", tenancy.number, 8, pack(LAYOUT, rows(8, 9)))
        assert (answer.rows, answer.in_force) == (3, False) and read_all(again) == [0, 1, 2]

    def test_a_second_one_does_not_get_the_folder_of_a_living_one(self, tmp_path: Path) -> None:
        first = shard(scratch_dir=tmp_path)
        with pytest.raises(NoFreeLaneError):
            shard(scratch_dir=tmp_path)
        write(first, "a", rows(0, 3))
        first.close()
        assert read(shard(scratch_dir=tmp_path), "a") == [0, 1, 2]

    def test_a_record_of_other_rows_gives_nobody_a_count(self, tmp_path: Path) -> None:
        first = shard(scratch_dir=tmp_path / "first")
        tenancy = first.join(first.incarnation, "a")
        write(first, "a", rows(0, 3))
        first.close()
        shard(scratch_dir=tmp_path / "other").close()
        for name in ("shard.json", STREAMS):
            (tmp_path / "first" / name).replace(tmp_path / "other" / name)
        other = shard(scratch_dir=tmp_path / "other")
        again = other.join(other.incarnation, "a")
        assert again.rows == 0 and again.number > tenancy.number and again.ended == (tenancy.number, 0)

    @pytest.mark.parametrize("damage", [lambda b: b[:-5], lambda b: b.replace(b"store", b"stare"), lambda b: b""])
    def test_a_damaged_record_is_an_error(self, tmp_path: Path, damage: Any) -> None:
        first = shard(scratch_dir=tmp_path)
        write(first, "a", rows(0, 3))
        first.close()
        record = tmp_path / "shard.json"
        record.write_bytes(damage(record.read_bytes()))
        with pytest.raises(StorageError, match=r"shard\.json is damaged"):
            shard(scratch_dir=tmp_path)


class TestPriorities:
    """Of a shard that is made anew in the folder of one that died: nothing is saved at its end."""

    def shard(self, path: Path, **settings: Any) -> ReplayShard:
        sampler = PrioritizedSampler(None, 1.0, 1.0, eps=0.0)
        return shard(scratch_dir=path, **{"capacity": 80, "sampler": sampler, **settings})

    def made_anew(self, s: ReplayShard, path: Path, **settings: Any) -> ReplayShard:
        s.close()
        return self.shard(path, **settings)

    def priorities(self, s: ReplayShard, slots: list[int]) -> list[float]:
        return s._sampler.priorities(torch.tensor(slots), storage=s._storage).tolist()  # type: ignore[attr-defined]

    def update(self, s: ReplayShard, slots: list[int], priorities: list[float], generation: Any = None) -> None:
        generation = None if generation is None else torch.tensor(generation)
        s.update_priority(s.incarnation, torch.tensor(slots), torch.tensor(priorities).double(), generation)

    def test_they_come_back_with_their_rows(self, tmp_path: Path) -> None:
        s = self.shard(tmp_path)
        write(s, "a", rows(0, 10)), write(s, "b", rows(100, 110))
        self.update(s, [1, 3, 11], [0.5, 2.0, 0.0])
        self.update(s, [3, 12], [4.0, 0.25], [3, 2])
        before = s.totals(s.incarnation).draws
        s = self.made_anew(s, tmp_path)
        assert self.priorities(s, [1, 3, 11, 12]) == [0.5, 4.0, 0.0, 0.25]
        assert s.totals(s.incarnation).draws.lowest == before.lowest

    def test_rows_that_were_given_none_have_the_highest(self, tmp_path: Path) -> None:
        s = self.shard(tmp_path)
        write(s, "a", rows(0, 3))
        self.update(s, [0], [7.0])
        s = self.made_anew(s, tmp_path)
        assert s.totals(s.incarnation).draws.new_priority == 7.0 and self.priorities(s, [0, 1, 2]) == [7.0] * 3
        write(s, "a", rows(3, 4))
        assert self.priorities(s, [3]) == [7.0]

    def test_a_row_does_not_get_that_of_the_row_before_in_its_slot(self, tmp_path: Path) -> None:
        s = self.shard(tmp_path, capacity=20)
        write(s, "a", rows(0, 20))  # the shard is full
        self.update(s, list(range(20)), [0.5] * 20)
        write(s, "a", rows(20, 25))
        sequences = s._lanes.generations(torch.tensor([0, 1, 9])).tolist()
        self.update(s, [0, 1, 9], [0.25] * 3, [0, *sequences[1:]])  # the first one is gone
        s = self.made_anew(s, tmp_path, capacity=20)
        assert self.priorities(s, [0, 1, 2, 8, 9]) == [1.0, 0.25, 1.0, 0.5, 0.25]

    @pytest.mark.parametrize("change", ["empty", "loads"])
    def test_those_of_replaced_rows_do_not_come_back(self, tmp_path: Path, change: str) -> None:
        s = self.shard(tmp_path / "rows")
        write(s, "a", rows(0, 5))
        self.update(s, [0, 1], [0.5, 2.0])
        s.dumps(s.incarnation, tmp_path / "saved")
        self.update(s, [0, 1], [0.125, 0.125])
        if change == "empty":
            s.empty(s.incarnation)
            write(s, "a", rows(0, 5))
        else:
            s.loads(s.incarnation, tmp_path / "saved")
        before = self.priorities(s, [0, 1, 2])
        assert before == ([1.0] * 3 if change == "empty" else [0.5, 2.0, 1.0])
        s = self.made_anew(s, tmp_path / "rows")
        assert self.priorities(s, [0, 1, 2]) == before

    def test_after_a_power_cut_that_took_rows_all_are_as_new(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        s = self.shard(tmp_path)
        write(s, "a", rows(0, 5))
        image = (tmp_path / FILE_NAME).read_bytes()  # the disk got no more of it
        write(s, "a", rows(5, 8))
        self.update(s, [0, 1, 6], [0.5, 2.0, 0.25])
        s.close()
        (tmp_path / FILE_NAME).write_bytes(image)
        for module in (files, places):
            monkeypatch.setattr(module, "boot_id", lambda: bytes(range(16)))
        s = self.shard(tmp_path)
        write(s, "b", rows(10, 14))
        assert set(self.priorities(s, list(range(5)))) == {1.0} and s.totals(s.incarnation).draws.lowest == 1.0

    def test_a_record_that_was_cut_off_is_none(self, tmp_path: Path) -> None:
        s = self.shard(tmp_path)
        write(s, "a", rows(0, 5))
        self.update(s, [0, 1], [0.5, 0.25])
        s._priorities._records["next"][1] = 0  # type: ignore[union-attr]  # as its process was killed there
        s = self.made_anew(s, tmp_path)
        assert self.priorities(s, [0, 1]) == [0.5, 1.0]

    def test_a_file_of_another_size_is_an_error(self, tmp_path: Path) -> None:
        s = self.shard(tmp_path)
        write(s, "a", rows(0, 5))
        s.close()
        (tmp_path / "priorities").write_bytes(b"x")
        with pytest.raises(StorageError, match="delete it"):
            self.shard(tmp_path)

    def test_those_of_slices_come_back(self, tmp_path: Path) -> None:
        def sampler() -> PrioritizedSliceSampler:
            return PrioritizedSliceSampler(None, 1.0, 1.0, eps=0.0, slice_len=2, traj_key="traj")

        s = self.shard(tmp_path, sampler=sampler())
        write(s, "a", rows(0, 4))
        self.update(s, [0, 1, 2], [0.0, 3.0, 0.0])
        s = self.made_anew(s, tmp_path, sampler=sampler())
        drawn = s.sample(s.incarnation, 20)
        assert unpack(LAYOUT, drawn.block)["n"].tolist() == [1, 2] * 10


class TestTaking:
    def test_rows_that_were_overwritten_are_not_present(self) -> None:
        s = shard(capacity=40)
        write(s, "a", rows(0, 42))
        lane = s._lanes.store.lane_capacity
        taken = s.take(s.incarnation, torch.zeros(4).long(), torch.tensor([0, 1, lane, lane + 2]))
        assert taken.present.tolist() == [False, False, True, False]

    def test_a_slot_without_a_row_is_not_the_first_row(self) -> None:
        s = shard()
        write(s, "a", rows(0, 1))
        taken = s.take(s.incarnation, torch.tensor([0, 1]), torch.tensor([0, 0]))
        assert taken.present.tolist() == [True, False]

    @each(("lane", "sequence"), [(400, 0), (-1, 0), (0, -1)])
    def test_what_cannot_exist_is_refused(self, lane: int, sequence: int) -> None:
        s = shard()
        write(s, "a", rows(0, 1))
        with pytest.raises(IndexError):
            s.take(s.incarnation, torch.tensor([lane]), torch.tensor([sequence]))

    def test_nothing_is_drawn_from_empty_shards(self) -> None:
        shards = [shard(), shard()]
        with pytest.raises(RuntimeError, match="empty"):
            draw(shards, [s.ranges(s.incarnation) for s in shards], 3)


class TestSettings:
    def test_a_sampler_with_epochs_is_refused(self) -> None:
        with pytest.raises(TypeError, match="cannot be divided"):
            shard(sampler=SamplerWithoutReplacement())

    def test_slices_have_a_length(self) -> None:
        with pytest.raises(ValueError, match="num_slices"):
            shard(sampler=SliceSampler(num_slices=4))

    def test_the_highest_priority_is_that_of_all_shards(self) -> None:
        with pytest.raises(ValueError, match="over several shards"):
            shard(sampler=PrioritizedSampler(None, 1.0, 1.0, max_priority_within_buffer=True))

    def test_a_layout_comes_first(self) -> None:
        s = ReplayShard(10)
        with pytest.raises(RuntimeError, match="adopt one first"):
            s.join(s.incarnation, "a")
        with pytest.raises(RuntimeError, match="adopt one first"):
            s.extend(s.incarnation, "a", 0, 0, pack(LAYOUT, rows(0, 1)))
