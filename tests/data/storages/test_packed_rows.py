"""Rows that come and go as bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictMaxValueWriter
from engram.store.episodes import EpisodeIndex
from engram.store.layout import RowLayout
from engram.testing import numbers, steps

LAYOUT = RowLayout.of(steps(0, 1), 1)


def shared(capacity: int = 40, lanes: int = 4) -> LazyTensorStorage:
    storage = LazyTensorStorage(capacity, shared=True, lanes=lanes)
    storage.adopt(LAYOUT)
    return storage


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

    def test_a_saved_path_has_strings_and_integers(self) -> None:
        saved = LAYOUT.to_json()
        saved["leaves"][0]["path"] = [2.5]
        with pytest.raises(ValueError, match="a string or an integer"):
            RowLayout.from_json(saved)

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


class TestAppending:
    def test_rows_follow_on_from_lane_to_lane(self) -> None:
        storage = shared()
        slots = [storage.append_packed(LAYOUT.pack(steps(k, k + 7))) for k in range(0, 49, 7)]
        assert torch.cat(slots).tolist() == [k % 40 for k in range(49)]
        assert sorted(numbers(storage[:])) == list(range(9, 49))

    def test_they_are_appended_where_processes_take_turns(self) -> None:
        storage = LazyTensorStorage(10, shared=True)
        storage.adopt(LAYOUT)
        assert storage.append_packed(LAYOUT.pack(steps(0, 3))).tolist() == [0, 1, 2]
        assert numbers(storage[:]) == [0, 1, 2]

    def test_packed_rows_of_another_source_begin_a_trajectory_as_others_do(self) -> None:
        def data(obs: list[float]) -> TensorDict:
            x = torch.tensor(obs)
            done = torch.zeros(len(x), 1, dtype=torch.bool)
            return TensorDict({"obs": x, "next": {"obs": x + 1, "done": done}}, [len(x)])

        layout = RowLayout.of(data([0]), 1)
        lengths = []
        for by_leaf in (None, False, True):
            storage = LazyTensorStorage(20, shared=True, lanes=2)
            rb = ReplayBuffer(storage=storage)
            storage.adopt(layout)
            for batch in (data([0, 1, 2]), data([3, 4]), data([50, 51])):
                if by_leaf is None:
                    rb.extend(batch)
                elif by_leaf:
                    rows = layout.pack(batch)
                    parts = [rows[:, x.offset : x.offset + x.nbytes] for x in layout.leaves]
                    storage.append_leaves(parts)
                else:
                    storage.append_packed(layout.pack(batch))
            lengths.append(EpisodeIndex().trajectories(storage).length.tolist())
        assert lengths == [[5, 2]] * 3


class TestReading:
    def test_rows_are_read_as_bytes_with_their_sequences(self) -> None:
        storage = shared(capacity=20, lanes=2)
        storage.append_packed(LAYOUT.pack(steps(0, 28)))  # lanes of 5
        slots, sequences = torch.tensor([0, 2, 5, 9, 12]), torch.tensor([5, 7, 5, 4, 2])
        rows = storage.read_packed(slots, sequences=True)
        assert rows.sequences.tolist() == sequences.tolist()
        assert numbers(LAYOUT.unpack(rows.batch[0])) == [20, 22, 25, 9, 12]

    def test_leaves_are_read_as_bytes(self) -> None:
        storage, other = shared(), shared()
        storage.append_packed(LAYOUT.pack(steps(0, 5)))
        other.append_leaves(storage.read_packed(torch.arange(5), by_leaf=True).batch)
        assert numbers(other[:]) == [0, 1, 2, 3, 4]

    @each("spoil", [lambda p: p[:-1], lambda p: [*p[:-1], p[-1][:2]], lambda p: p[::-1]])
    def test_leaves_that_do_not_fit_are_refused(self, spoil) -> None:
        storage = shared()
        parts = [torch.zeros(5, leaf.nbytes, dtype=torch.uint8) for leaf in LAYOUT.leaves]
        with pytest.raises(ValueError, match="nothing was written"):
            storage.append_leaves(spoil(parts))
        assert len(storage) == 0

    def test_rows_that_carry_their_own_sequence_are_not_appended_as_bytes(self) -> None:
        storage = LazyTensorStorage(10)
        ReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(rank_key="n")).extend(steps(0, 3))
        rows = torch.zeros(1, storage.layout.payload_bytes, dtype=torch.uint8)
        with pytest.raises(ValueError, match="own sequence"):
            storage.append_packed(rows)

    @each(("lane", "sequences", "env"), [(40, [0], 0), (-1, [0], 0), (0, [-1], 0), (0, [1 << 62], 0), (0, [0], 1)])
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
