"""Rows that come and go as bytes, in lanes that one process holds side by side."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictMaxValueWriter
from engram.errors import NoFreeLaneError, StorageError
from engram.store.episodes import EpisodeIndex
from engram.store.layout import RowLayout
from engram.store.places import HeldLaneCount
from engram.testing import numbers, steps

LAYOUT = RowLayout.of(steps(0, 1), 1)


def shared(capacity: int = 40, lanes: int = 4) -> LazyTensorStorage:
    storage = LazyTensorStorage(capacity, shared=True, lanes=HeldLaneCount(lanes))
    storage.adopt(LAYOUT)
    return storage


def opened(folder: Path, lanes: int) -> LazyMemmapStorage:
    return LazyMemmapStorage(None, folder, existsok=True, lanes=HeldLaneCount(lanes))


class TestAdopting:
    def test_a_storage_has_a_layout_before_its_first_row(self, tmp_path: Path) -> None:
        storage = LazyMemmapStorage(10, scratch_dir=tmp_path / "rows", lanes=2)
        storage.adopt(LAYOUT)
        assert storage.layout.key == LAYOUT.key and len(storage) == 0
        storage.close()
        assert LazyMemmapStorage.open(tmp_path / "rows").layout.key == LAYOUT.key

    def test_the_same_layout_again_changes_nothing(self) -> None:
        storage = shared()
        table = storage.lanes
        storage.adopt(RowLayout.from_json(LAYOUT.to_json()))
        assert storage.lanes is table

    def test_another_layout_is_refused_with_each_difference(self) -> None:
        storage = shared()
        other = RowLayout.of({"n": torch.zeros(1), "new": torch.zeros(1)}, 1)
        with pytest.raises(ValueError, match=r"'?obs'? is missing.*new.* is new"):
            storage.adopt(other)
        assert storage.layout.key == LAYOUT.key

    def test_a_storage_of_environments_is_not_made_without_them(self) -> None:
        with pytest.raises(ValueError, match="ndim must be 1"):
            LazyTensorStorage(10, ndim=2).adopt(LAYOUT)

    def test_rows_are_written_to_it_as_to_any_other(self) -> None:
        rb = ReplayBuffer(storage=shared(lanes=1))
        rb.extend(steps(0, 7))
        assert numbers(rb[:]) == list(range(7))


class TestLanes:
    def test_several_are_held_by_one_process(self) -> None:
        storage = shared()
        for lane in range(4):
            storage.lanes.hold_lane(lane)
            storage.append_packed(lane, LAYOUT.pack(steps(10 * lane, 10 * lane + 3)))
        assert sorted(numbers(storage[:])) == [0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32]

    def test_extend_takes_one_that_is_not_held_already(self) -> None:
        storage = shared()
        for lane in (0, 1, 3):
            storage.lanes.hold_lane(lane)
        assert storage.lanes.hold() == 2

    def test_none_is_left_for_extend_where_all_are_held(self) -> None:
        storage = shared(lanes=2)
        storage.lanes.hold_lane(0), storage.lanes.hold_lane(1)
        with pytest.raises(NoFreeLaneError):
            storage.lanes.hold()

    def test_one_of_writers_that_take_turns_or_move_on_is_not_appended_to_by_number(self) -> None:
        for lanes in (None, 2):
            storage = LazyTensorStorage(10, shared=True, lanes=lanes)
            storage.adopt(LAYOUT)
            with pytest.raises(StorageError, match="lane 0 belongs to no process"):
                storage.append_packed(0, LAYOUT.pack(steps(0, 1)))

    def test_extend_takes_the_free_one_with_the_fewest_rows(self) -> None:
        storage = shared(capacity=40, lanes=4)
        for lane, n in enumerate((3, 2, 9, 4)):
            storage.lanes.hold_lane(lane)
            storage.append_packed(lane, LAYOUT.pack(steps(0, n)))
        for lane in (2, 3):
            storage.lanes.release_lane(lane)
        assert storage.lanes.by_room()[:2] == [3, 2] and storage.lanes.hold() == 3  # those that it gave back itself
        storage.lanes.release()
        storage.lanes._ends.clear()  # as another process
        assert storage.lanes.by_room() == [1, 0, 3, 2]

    def test_one_that_extend_uses_is_not_held_twice(self) -> None:
        storage = shared()
        own = storage.lanes.hold()
        with pytest.raises(ValueError, match="extend"):
            storage.lanes.hold_lane(own)

    @pytest.mark.parametrize("lane", [-1, 4])
    def test_one_that_is_not_there_is_refused(self, lane: int) -> None:
        with pytest.raises(IndexError, match="not one of 0 to 3"):
            shared().lanes.hold_lane(lane)

    def test_one_that_another_process_writes_is_refused(self, tmp_path: Path) -> None:
        mine = LazyMemmapStorage(40, scratch_dir=tmp_path / "rows", lanes=HeldLaneCount(4))
        mine.adopt(LAYOUT)
        other = opened(tmp_path / "rows", 4)  # locks of its own, as another process has them
        mine.lanes.hold_lane(2)
        with pytest.raises(NoFreeLaneError, match="lane 2"):
            other.lanes.hold_lane(2)
        mine.lanes.release_lane(2)
        other.lanes.hold_lane(2)
        assert other.lanes.holds(2) and not mine.lanes.holds(2)

    def test_rows_are_not_appended_to_one_that_is_not_held(self) -> None:
        storage = shared()
        with pytest.raises(StorageError, match="does not hold lane 1"):
            storage.append_packed(1, LAYOUT.pack(steps(0, 1)))
        assert len(storage) == 0

    def test_a_forked_process_holds_none_of_its_parents(self) -> None:
        storage = shared()
        storage.lanes.hold_lane(1)
        answer = multiprocessing.get_context("fork").SimpleQueue()

        def child() -> None:
            try:
                storage.lanes.hold_lane(1)
            except NoFreeLaneError:
                answer.put(storage.lanes.holds(1))

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(120)
        assert process.exitcode == 0 and not answer.empty() and answer.get() is False

    def test_the_end_of_a_held_one_is_no_seam_of_a_save(self) -> None:
        storage = shared()
        storage.lanes.hold_lane(1)
        storage.append_packed(1, LAYOUT.pack(steps(0, 3)))
        assert 3 not in storage.lanes.saved_states()[1]["seams"]


class TestSeams:
    DATA = staticmethod(lambda ids: TensorDict({"traj": torch.tensor(ids)}, [len(ids)]))

    def lengths(self, goes_on: bool, tmp_path: Path) -> list[int]:
        layout = RowLayout.of(self.DATA([0]), 1)
        first = LazyMemmapStorage(20, scratch_dir=tmp_path / "rows", lanes=HeldLaneCount(2))
        first.adopt(layout)
        first.lanes.hold_lane(1)
        first.append_packed(1, layout.pack(self.DATA([7, 7, 7])))
        first.close()
        again = opened(tmp_path / "rows", 2)
        again.lanes.hold_lane(1, goes_on=goes_on)
        again.append_packed(1, layout.pack(self.DATA([7, 7])))
        return EpisodeIndex(traj_key="traj").trajectories(again).length.tolist()

    def test_one_stands_where_a_lane_is_taken_over(self, tmp_path: Path) -> None:
        assert self.lengths(False, tmp_path) == [3, 2]

    def test_none_stands_where_its_rows_go_on(self, tmp_path: Path) -> None:
        assert self.lengths(True, tmp_path) == [5]

    def test_packed_rows_of_another_source_begin_a_trajectory_as_others_do(self) -> None:
        def data(obs: list[float]) -> TensorDict:
            x = torch.tensor(obs)
            done = torch.zeros(len(x), 1, dtype=torch.bool)
            return TensorDict({"obs": x, "next": {"obs": x + 1, "done": done}}, [len(x)])

        layout = RowLayout.of(data([0]), 1)
        lengths = []
        for by_leaf in (None, False, True):
            storage = LazyTensorStorage(20, shared=True, lanes=HeldLaneCount(2))
            rb = ReplayBuffer(storage=storage)
            storage.adopt(layout)
            storage.lanes.hold_lane(1)
            for batch in (data([0, 1, 2]), data([3, 4]), data([50, 51])):
                if by_leaf is None:
                    rb.extend(batch)
                elif by_leaf:
                    rows = layout.pack(batch)
                    parts = [rows[:, x.offset : x.offset + x.nbytes] for x in layout.leaves]
                    storage.append_leaves(1, parts)
                else:
                    storage.append_packed(1, layout.pack(batch))
            lengths.append(EpisodeIndex().trajectories(storage).length.tolist())
        assert lengths == [[5, 2]] * 3


class TestReading:
    def test_rows_are_read_as_bytes_with_their_sequences(self) -> None:
        storage = shared(capacity=20)
        storage.lanes.hold_lane(2)
        storage.append_packed(2, LAYOUT.pack(steps(0, 8)))  # a lane has room for 5
        sequences = torch.tensor([3, 5, 7, 1])
        rows = storage.read_packed(storage.lanes.slots_of(2, sequences), sequences=True)
        assert (rows.sequences == sequences).tolist() == [True, True, True, False]
        assert numbers(LAYOUT.unpack(rows.batch[0])[:3]) == [3, 5, 7]

    def test_leaves_are_read_as_bytes(self) -> None:
        storage = shared()
        storage.lanes.hold_lane(0)
        storage.append_packed(0, LAYOUT.pack(steps(0, 5)))
        parts = storage.read_packed(torch.arange(5), by_leaf=True).batch
        other = shared()
        other.lanes.hold_lane(3)
        other.append_leaves(3, parts)
        assert numbers(other[:]) == [0, 1, 2, 3, 4]

    @each("spoil", [lambda p: p[:-1], lambda p: [*p[:-1], p[-1][:2]], lambda p: p[::-1]])
    def test_leaves_that_do_not_fit_are_refused(self, spoil) -> None:
        storage = shared()
        storage.lanes.hold_lane(0)
        parts = [torch.zeros(5, leaf.nbytes, dtype=torch.uint8) for leaf in LAYOUT.leaves]
        with pytest.raises(ValueError, match="nothing was written"):
            storage.append_leaves(0, spoil(parts))
        assert len(storage) == 0

    def test_rows_that_carry_their_own_sequence_are_not_appended_as_bytes(self) -> None:
        storage = LazyTensorStorage(10)
        ReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(rank_key="n")).extend(steps(0, 3))
        rows = torch.zeros(1, storage.layout.payload_bytes, dtype=torch.uint8)
        with pytest.raises(ValueError, match="own sequence"):
            storage.append_packed(storage.lanes.hold(), rows)

    @each(("lane", "sequences", "env"), [(4, [0], 0), (-1, [0], 0), (0, [-1], 0), (0, [1 << 62], 0), (0, [0], 1)])
    def test_rows_that_cannot_exist_have_no_slots(self, lane: int, sequences: list[int], env: int) -> None:
        with pytest.raises(IndexError, match="is not one of"):
            shared().lanes.slots_of(lane, torch.tensor(sequences), env)

    def test_a_saved_snapshot_is_named(self, tmp_path: Path) -> None:
        rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=2, end_key="done"))
        rb.extend(steps(0, 3))
        names = [rb.dumps(tmp_path / "all", keep_last=2), rb.dumps(tmp_path / "all", keep_last=2)]
        assert names == ["g-000001", "g-000002"] and rb.storage.dumps(tmp_path / "rows") == "g-000001"
        rb.extend(steps(3, 5))
        rb.loads(tmp_path / "all", snapshot=names[0])
        assert len(rb) == 3
