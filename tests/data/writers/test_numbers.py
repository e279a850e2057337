"""Sequences of rows that were written over others out of turn: once given, one never means another row of its slot."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram import _native
from engram.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TED2Flat,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from engram.data.datasets import write_hdf5, write_parquet
from engram.errors import CheckpointMisfitError, StorageError
from engram.store import files
from engram.store.lanes import Lanes
from engram.store.packed_rows import PackedRows

STORAGES: dict[str, Callable[[int, Path], Any]] = {
    "list": lambda n, path: ListStorage(n),
    "memory": lambda n, path: LazyTensorStorage(n),
    "mapped": lambda n, path: LazyMemmapStorage(n, scratch_dir=path),
}


def ranked(*ranks: float) -> TensorDict:
    return TensorDict({"rank": torch.tensor(ranks, dtype=torch.float32)}, [len(ranks)])


def best(storage: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(rank_key="rank"))


def numbers(rb: ReplayBuffer) -> Any:
    return rb.storage.lanes.generations(torch.arange(len(rb))).tolist()


@pytest.fixture(params=STORAGES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    names = iter("abcdefgh")
    return lambda n=4: STORAGES[request.param](n, tmp_path / next(names))


@pytest.fixture
def replaced(make: Any) -> tuple[ReplayBuffer, list[int]]:
    """A buffer in which slots 0 and 2 were replaced, by a writer that is not there any more; the numbers before."""
    rb = best(make())
    rb.extend(ranked(0, 5, 1, 6))
    before = numbers(rb)
    rb.extend(ranked(7, 8))
    rb.set_writer(TensorDictRoundRobinWriter())
    return rb, before


def move(rb: ReplayBuffer, twin: ReplayBuffer, way: str, path: Path) -> None:
    if way == "dumps":
        rb.dumps(path)
        twin.loads(path)
    elif way == "the storage's part":
        rb.dumps(path)
        twin.loads(path, parts=("storage",))
    elif way == "the storage's dumps":
        rb.storage.dumps(path)
        twin.storage.loads(path)
    elif way == "background":
        handle = rb.dumps(path, blocking=False)
        assert handle is not None and handle.result()
        twin.loads(path)
    elif way == "state_dict":
        twin.load_state_dict(rb.state_dict())
    else:
        twin.storage.load_state_dict(rb.storage.state_dict())


WAYS = ["dumps", "the storage's part", "the storage's dumps", "background", "state_dict", "the storage's state_dict"]


@pytest.mark.pairwise
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_row_numbers_belong_to_the_storage_and_move_with_its_rows(
    replaced: Any, make: Any, way: str, used: bool, tmp_path: Path
) -> None:
    rb, before = replaced
    twin = best(make())
    if used:
        twin.extend(ranked(*range(40)))
    twin.set_writer(TensorDictRoundRobinWriter())
    move(rb, twin, way, tmp_path / "saved")
    assert numbers(twin) == numbers(rb)
    done = twin.update_if_present(index=torch.arange(4), generation=torch.tensor(before), patch=ranked(9, 9, 9, 9))
    assert done.updated.tolist() == [False, True, False, True]


@pytest.mark.parametrize("way", WAYS)
def test_row_numbers_continue_after_a_load(replaced: Any, make: Any, way: str, tmp_path: Path) -> None:
    rb, _ = replaced
    twin = best(make())
    twin.set_writer(TensorDictRoundRobinWriter())
    move(rb, twin, way, tmp_path / "saved")
    for one in (rb, twin):
        one.set_writer(TensorDictMaxValueWriter(rank_key="rank"))
        one.extend(ranked(10, 11, 12))
        assert len(set(numbers(one))) == 4
    assert numbers(twin) == numbers(rb)


@pytest.mark.parametrize("way", WAYS)
def test_a_larger_storage_has_them_too(replaced: Any, make: Any, way: str, tmp_path: Path) -> None:
    rb, before = replaced
    larger = best(make(9))
    larger.set_writer(TensorDictRoundRobinWriter())
    move(rb, larger, way, tmp_path / "saved")
    assert numbers(larger) == numbers(rb)
    done = larger.update_if_present(index=torch.arange(4), generation=torch.tensor(before), patch=ranked(9, 9, 9, 9))
    assert done.updated.tolist() == [False, True, False, True]


@each("checkpointer",
    [FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer,
     lambda: H5StorageCheckpointer(group_per_trajectory=True)])  # fmt: skip
def test_every_format_of_a_checkpoint_keeps_them(checkpointer: Any, tmp_path: Path) -> None:
    rb, twin = (best(LazyTensorStorage(4, checkpointer=checkpointer())) for _ in range(2))
    rb.extend(ranked(0, 5, 1, 6))
    rb.extend(ranked(7, 8))
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    assert numbers(twin) == numbers(rb) != [0, 1, 2, 3]


def test_a_row_that_is_changed_in_place_keeps_the_one_that_it_has(make: Any) -> None:
    rb = best(make())
    rb.extend(ranked(0, 5, 1, 6))
    rb.extend(ranked(7))
    before = numbers(rb)
    rb[0:2] = rb[2:4]
    assert numbers(rb) == before


def test_a_row_that_is_appended_over_another_has_the_one_that_the_lane_counts(make: Any) -> None:
    rb = best(make())
    rb.extend(ranked(0, 5, 1, 6))
    rb.extend(ranked(7, 8))
    rb.set_writer(TensorDictRoundRobinWriter())
    rb.extend(ranked(1))
    assert numbers(rb)[0] == 4 and numbers(rb)[2] >= _native.FIRST_REPLACED


class TestOfAStoreThatIsReopened:
    @pytest.fixture
    def store(self, tmp_path: Path) -> tuple[Path, list[int], list[int]]:
        """A folder, and the numbers before and after two rows were replaced."""
        rb = best(LazyMemmapStorage(4, scratch_dir=tmp_path / "store"))
        rb.extend(ranked(0, 5, 1, 6))
        before = numbers(rb)
        rb.extend(ranked(7, 8))
        after = numbers(rb)
        rb.dumps(tmp_path / "saved")
        shutil.copytree(tmp_path / "store", tmp_path / "killed")
        rb.storage.close()
        return tmp_path, before, after

    @pytest.mark.parametrize("how", ["store", "killed"])
    def test_the_rows_bring_them_back(self, store: Any, how: str) -> None:
        path, before, after = store
        rb = ReplayBuffer.open(path / how, writer=TensorDictRoundRobinWriter())
        assert numbers(rb) == after
        done = rb.update_if_present(index=torch.arange(4), generation=torch.tensor(before), patch=ranked(9, 9, 9, 9))
        assert done.updated.tolist() == [False, True, False, True]

    def test_observer_sees_row_numbers(self, store: Any) -> None:
        path, _, after = store
        rb = ReplayBuffer.open(path / "store", read_only=True, batch_size=8)
        _, info = rb.sample(return_info=True)
        assert numbers(rb) == after and info["generation"].tolist() == [after[slot] for slot in info["index"]]

    def test_no_number_is_given_twice_however_often_it_is_opened(self, store: Any) -> None:
        path, before, after = store
        seen = {*enumerate(before), *enumerate(after)}
        for k in range(4):
            rb = ReplayBuffer.open(path / "store", writer=TensorDictMaxValueWriter(rank_key="rank"))
            now = set(enumerate(numbers(rb)))
            if k % 2:
                rb.extend(ranked(20.0 + k))
            else:
                rb.set_writer(TensorDictRoundRobinWriter())
                rb.extend(ranked(30.0 + k))
            assert len(set(numbers(rb))) == 4
            new = set(enumerate(numbers(rb))) - now
            assert len(new) == 1 and not new & seen
            seen |= new
            rb.storage.close()

    def test_none_is_given_twice_where_a_power_cut_has_lost_their_count(self, store: Any) -> None:
        path, _, after = store
        storage = LazyMemmapStorage.open(path / "killed")
        storage.lanes.store.replaced = 0
        rb = best(storage)
        rb.extend(ranked(20, 21, 22, 23))
        assert min(numbers(rb)) > max(after)

    def test_of_a_kill_in_the_middle_of_a_replacement_none_is_lost_and_none_is_given_twice(self, store: Any) -> None:
        path, _, after = store
        rb = best(LazyMemmapStorage.open(path / "killed"))
        native = rb.storage.lanes.store
        # Just before the rows are written: the sequences are taken, whatever happens.
        plan = rb.storage.check(ranked(9), False, 0, "index", torch.tensor([1]))
        write = rb.storage.access.table.rows.prepare_replace(plan, torch.tensor([0]), torch.tensor([1]))
        shutil.copytree(path / "killed", path / "before")
        write()
        shutil.copytree(path / "killed", path / "after")
        seen = {*after, *numbers(rb)}
        assert native.replaced == sum(number >= _native.FIRST_REPLACED for number in seen)
        for name in ("before", "after"):
            again = best(LazyMemmapStorage.open(path / name))
            assert set(numbers(again)) <= seen
            again.extend(ranked(30))
            assert len(set(numbers(again)) - seen) == 1


# ---- they are in no batch ----
def steps(start: int, stop: int) -> TensorDict:
    at = torch.arange(start, stop)
    return TensorDict(
        {
            "observation": at.float().unsqueeze(1),
            "action": at % 3,
            "next": {
                "observation": at.float().unsqueeze(1) + 1,
                "reward": at.float().unsqueeze(1),
                "done": (at % 5 == 4).unsqueeze(1),
                "terminated": (at % 5 == 4).unsqueeze(1),
                "truncated": torch.zeros(len(at), 1, dtype=torch.bool),
            },
        },
        [len(at)],
    )


ROW_STORAGES: dict[str, Callable[[Path], Any]] = {
    "list": lambda path: ListStorage(20),
    "memory": lambda path: LazyTensorStorage(20),
    "shared": lambda path: LazyTensorStorage(20, shared=True),
    "mapped": lambda path: LazyMemmapStorage(20, scratch_dir=path / "store"),
    "temporary": lambda path: LazyMemmapStorage(20),
    "tensors": lambda path: TensorStorage(steps(0, 20).set("index", torch.arange(20))),
}


def filled(storage: Any) -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(), batch_size=8)
    for start in range(0, 60, 15):
        rb.extend(steps(start, start + 15))
    return rb


KEYS = {*steps(0, 1).keys(True, True), "index"}


@each("storage", ROW_STORAGES)
def test_row_numbers_are_in_no_batch(storage: str, tmp_path: Path) -> None:
    rb = filled(ROW_STORAGES[storage](tmp_path))
    assert max(numbers(rb)) >= _native.FIRST_REPLACED
    shown = [rb.sample(), rb.storage.get(3), rb.storage.get(slice(2, 5)), rb.storage.get(torch.tensor([1, 4]))]
    if storage != "list":
        shown += [rb[:], rb[2:5], rb.storage[0:7], rb.storage._storage, next(iter(rb))]
    for batch in shown:
        for one in batch if isinstance(batch, list) else [batch]:
            assert set(one.keys(True, True)) == KEYS


@pytest.mark.parametrize("storage", [name for name in ROW_STORAGES if name != "list"])
def test_row_numbers_are_not_exported(storage: str, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    rb = filled(ROW_STORAGES[storage](tmp_path))
    flat = TED2Flat()(rb[:])
    assert not {key for key in flat.keys(True, True) if "sequence" in str(key)}
    write_hdf5(rb, tmp_path / "steps.h5")
    names: list[str] = []
    with h5py.File(tmp_path / "steps.h5") as file:
        file.visit(names.append)
    assert names and not [name for name in names if "sequence" in name]
    parquet = pytest.importorskip("pyarrow.parquet")
    write_parquet(rb, tmp_path / "steps.parquet")
    columns = parquet.read_schema(tmp_path / "steps.parquet").names
    assert columns and not [name for name in columns if "sequence" in name]


def test_a_key_of_the_data_may_have_their_name(tmp_path: Path) -> None:
    for k, checkpointer in enumerate([None, FlatStorageCheckpointer(), H5StorageCheckpointer()]):
        rb, twin = (best(LazyTensorStorage(3, checkpointer=checkpointer)) for _ in range(2))
        for start in (0, 3):
            rb.extend(ranked(start, start + 1, start + 2).set("sequence", torch.arange(start, start + 3)))
        rb.dumps(tmp_path / str(k))
        twin.loads(tmp_path / str(k))
        assert twin[:]["sequence"].tolist() == rb[:]["sequence"].tolist() == [3, 4, 5]
        assert numbers(twin) == numbers(rb)


# ---- rows that another writer made ----
def made_by_another(storage: Any, **parts: Any) -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(storage=storage, writer=TensorDictRoundRobinWriter(), batch_size=8, **parts)
    rb.extend(steps(0, 25))
    return rb


class TestRowsThatCarryNone:
    @pytest.mark.parametrize("storage", ["list", "memory", "tensors"])
    def test_in_memory_they_are_copied_when_the_first_is_replaced(self, storage: str, tmp_path: Path) -> None:
        rb = made_by_another(ROW_STORAGES[storage](tmp_path))
        before, rows, count = numbers(rb), rb.storage.get(slice(None)), rb.write_count
        rb.set_writer(TensorDictMaxValueWriter())
        assert rb.extend(steps(1, 2)).tolist() == [-1] and numbers(rb) == before
        assert rb.extend(steps(100, 101)).tolist() == [5]
        assert [a == b for a, b in zip(numbers(rb), before, strict=True)] == [slot != 5 for slot in range(20)]
        for slot in range(20):
            expected = steps(100, 101)[0].set("index", torch.tensor(5)) if slot == 5 else rows[slot]
            assert (rb.storage.get(slot) == expected).all()
        assert rb.write_count == count + 1 and rb.writer._cursor == count % 20

    def test_priorities_and_trajectories_stay_when_they_are_copied(self) -> None:
        rb = made_by_another(LazyTensorStorage(20), sampler=PrioritizedSampler(20, 1.0, 1.0, 0.0))
        rb.update_priority(torch.arange(20), torch.arange(20) + 1.0)
        slices = SliceSampler(slice_len=2, end_key=("next", "done"))
        rb.set_writer(TensorDictMaxValueWriter())
        slices.sample(rb.storage, 8)
        rb.extend(steps(100, 101))
        expected = (torch.arange(20) + 1.0).tolist()
        expected[5] = 20.0  # that of new rows
        assert rb.sampler.priorities(torch.arange(20)).tolist() == expected
        index, _ = slices.sample(rb.storage, 200)
        rows = rb.storage.get(index)["observation"].flatten().reshape(-1, 2)
        joined = rows[:, 1] - rows[:, 0] == 1
        assert len(rows) == 100 and (joined | (rows == 100).any(1)).all()

    def test_an_epoch_goes_on_when_they_are_copied(self) -> None:
        rb = made_by_another(LazyTensorStorage(24), sampler=SamplerWithoutReplacement())
        rb.set_writer(TensorDictMaxValueWriter())
        drawn = rb.sample()["index"].tolist()
        rb.extend(steps(100, 101))
        drawn += rb.sample()["index"].tolist() + rb.sample()["index"].tolist()
        assert sorted(drawn) == list(range(24))

    def test_a_save_in_the_background_has_the_rows_of_before_they_were_copied(self, tmp_path: Path) -> None:
        rb = made_by_another(LazyTensorStorage(20))
        rows = rb[:]
        rb.set_writer(TensorDictMaxValueWriter())
        with rb.storage.mutex:
            frozen = rb.storage.saved_form.source(background=True)
        rb.extend(steps(100, 130))
        block = frozen.read_block(0, 5, 25)
        frozen.close()
        twin = LazyTensorStorage(20)
        state = {"layout": frozen.layout_state(), "counters": frozen.counters(), "rows": [torch.from_numpy(block)]}
        twin.load_state_dict(state)
        assert (twin[:] == rows).all() and (rb[:] != rows).any()
        rb.dumps(tmp_path, blocking=False).result()

    @pytest.mark.parametrize("storage", ["shared", "mapped", "temporary"])
    def test_in_a_file_or_shared_they_are_refused_and_the_remedy_helps(self, storage: str, tmp_path: Path) -> None:
        rb = made_by_another(ROW_STORAGES[storage](tmp_path))
        before, rows, count = numbers(rb), rb[:], rb.write_count
        rb.set_writer(TensorDictMaxValueWriter())
        assert rb.extend(steps(1, 2)).tolist() == [-1]
        with pytest.raises(StorageError, match=r"dumps.*loads.*TensorDictMaxValueWriter; nothing was written"):
            rb.extend(steps(100, 103))
        assert numbers(rb) == before and (rb[:] == rows).all() and rb.write_count == count
        rb.dumps(tmp_path / "saved")
        other = {"shared": "shared", "mapped": "temporary", "temporary": "temporary"}[storage]
        remedy = TensorDictReplayBuffer(storage=ROW_STORAGES[other](tmp_path), writer=TensorDictMaxValueWriter())
        remedy.loads(tmp_path / "saved")
        assert numbers(remedy) == before and (remedy[:] == rows).all()
        assert remedy.extend(steps(100, 103)).tolist() == [5, 6, 7]
        assert len(set(numbers(remedy))) == 20

    @each("storage", ["memory", "shared", "mapped", "temporary", "tensors"])
    @each("used", [False, True])
    def test_loaded_into_a_storage_of_this_writer_they_carry_theirs(
        self, storage: str, used: bool, tmp_path: Path
    ) -> None:
        rb = made_by_another(LazyTensorStorage(20))
        rb.dumps(tmp_path / "saved")
        twin = TensorDictReplayBuffer(storage=ROW_STORAGES[storage](tmp_path), writer=TensorDictMaxValueWriter())
        if used:
            twin.extend(steps(0, 60))
        twin.loads(tmp_path / "saved", parts=("storage",))
        assert twin.storage.layout.carries_sequence
        assert numbers(twin) == numbers(rb) and (twin[:] == rb[:]).all()
        assert twin.extend(steps(100, 101)).tolist() == [5]

    @each("storage", ["shared", "mapped", "temporary"])
    @each("way", ["dumps", "state_dict"])
    def test_rows_that_carry_theirs_are_not_loaded_where_they_would_lose_them(
        self, storage: str, way: str, tmp_path: Path
    ) -> None:
        rb = filled(LazyTensorStorage(20))
        other = made_by_another(ROW_STORAGES[storage](tmp_path))
        before, rows = numbers(other), other[:]
        rb.dumps(tmp_path / "saved")
        with pytest.raises(CheckpointMisfitError, match="rows carry sequences of their own there"):
            if way == "dumps":
                other.loads(tmp_path / "saved", parts=("storage",))
            else:
                other.storage.load_state_dict(rb.storage.state_dict())
        assert numbers(other) == before and (other[:] == rows).all()

    @each("storage", ["memory", "shared", "mapped", "temporary", "tensors"])
    def test_rows_of_which_none_was_replaced_are_loaded_anywhere(self, storage: str, tmp_path: Path) -> None:
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), writer=TensorDictMaxValueWriter())
        rb.extend(steps(0, 15))
        other = made_by_another(ROW_STORAGES[storage](tmp_path))
        rb.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved", parts=("storage",))
        assert numbers(other) == list(range(15)) and (other[:] == rb[:]).all()

    def test_a_load_that_fails_brings_back_rows_that_were_copied_for_it(self, tmp_path: Path) -> None:
        saved = filled(LazyTensorStorage(20))
        saved.dumps(tmp_path)
        rb = made_by_another(LazyTensorStorage(20))
        before, rows = numbers(rb), rb[:]

        def refuse(block: Any) -> Any:
            raise RuntimeError("refused")

        rb.register_load_hook(refuse)
        with pytest.raises(RuntimeError, match="refused"):
            rb.loads(tmp_path, parts=("storage",))
        assert numbers(rb) == before and (rb[:] == rows).all()

    def test_the_memory_for_the_copy_is_asked_for_before(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rb = made_by_another(LazyTensorStorage(20))
        rb.set_writer(TensorDictMaxValueWriter())
        before = rb[:]
        monkeypatch.setattr(files, "free_memory", lambda: 1000)
        with pytest.raises(StorageError, match="not enough memory"):
            rb.extend(steps(100, 101))
        assert (rb[:] == before).all() and rb.write_count == 25
        monkeypatch.undo()
        assert rb.extend(steps(100, 101)).tolist() == [5]


def test_rows_of_a_writer_that_replaces_none_carry_none() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(20), writer=RoundRobinWriter())
    rb.extend(steps(0, 5))
    assert not rb.storage.layout.carries_sequence


# ---- planted errors ----
def _shows_sequences(patch: pytest.MonkeyPatch) -> None:
    """Batches have one entry more."""
    read = PackedRows.read

    def shown(self: PackedRows, slots: Any, shape: Any = None, extra: Any = None, numbers: bool = False) -> Any:
        own = self.lanes.generations(slots).reshape((len(slots),) if shape is None else shape)
        return read(self, slots, shape, {**(extra or {}), "sequence": own}, numbers)

    patch.setattr(PackedRows, "read", shown)


def _is_a_key(patch: pytest.MonkeyPatch) -> None:
    """The sequence is a leaf like the others, from the first batch on."""
    check = LazyTensorStorage.check

    def with_key(self: Any, items: Any, *args: Any, **kwargs: Any) -> Any:
        return check(self, items.clone().set("sequence", torch.zeros(items.shape, dtype=torch.int64)), *args, **kwargs)

    patch.setattr(LazyTensorStorage, "check", with_key)


def _fills_nothing(patch: pytest.MonkeyPatch) -> None:
    """`loads` leaves in the place of sequences what was in the memory."""
    put = PackedRows.set_block

    def unfilled(self: PackedRows, lane: int, start: int, rows: Any) -> None:
        offset = self.layout.sequence_offset
        if offset is not None:
            rows = rows.copy()
            rows[..., offset : offset + 8] = 0x7F
        put(self, lane, start, rows)

    patch.setattr(PackedRows, "set_block", unfilled)


def _loses_them_in_place(patch: pytest.MonkeyPatch) -> None:
    overwrite = PackedRows.overwrite_plan

    def lost(self: PackedRows, slots: Any, plan: Any, rows: Any = None) -> None:
        self.prepare_overwrite(slots, plan, torch.arange(len(slots)), 0)() if rows is None else overwrite(
            self, slots, plan, rows
        )

    patch.setattr(PackedRows, "overwrite_plan", lost)


def _copies_without_counters(patch: pytest.MonkeyPatch) -> None:
    """Rows that were copied to carry sequences are those of another store."""
    widened = Lanes.widened

    def other(self: Lanes, store: Any) -> Lanes:
        lane = self.store.lane(0)
        store.begin_restore()
        store.restore_lane(0, lane["first"], lane["published"], lane["origin"])
        store.end_restore()
        return widened(self, store)

    patch.setattr(Lanes, "widened", other)


PLANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Path], None]]] = {
    "sequences in batches": (_shows_sequences, lambda path: unwrap(test_row_numbers_are_in_no_batch)("memory", path)),
    "sequences in what is exported": (
        _is_a_key, lambda path: test_row_numbers_are_not_exported("memory", path)
    ),
    "sequences that loads does not fill": (
        _fills_nothing,
        lambda path: unwrap(TestRowsThatCarryNone.test_loaded_into_a_storage_of_this_writer_they_carry_theirs)(
            TestRowsThatCarryNone(), "memory", False, path
        ),
    ),
    "sequences that are lost by a change in place": (
        _loses_them_in_place,
        lambda path: test_a_row_that_is_changed_in_place_keeps_the_one_that_it_has(lambda: LazyTensorStorage(4)),
    ),
    "priorities that are lost when rows are copied for their sequences": (
        _copies_without_counters,
        lambda path: TestRowsThatCarryNone().test_priorities_and_trajectories_stay_when_they_are_copied(),
    ),
}  # fmt: skip


@pytest.mark.mutant
@pytest.mark.deep
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_error_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, check = PLANTS[name]
    (tmp_path / "sound").mkdir()
    check(tmp_path / "sound")
    plant(monkeypatch)
    (tmp_path / "planted").mkdir()
    with pytest.raises(AssertionError):
        check(tmp_path / "planted")


def test_a_save_of_an_empty_buffer_also_takes_back_how_many_rows_were_replaced(tmp_path):
    """Else the next rows that replace others get other numbers than in the buffer that was saved."""

    def made():
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(8), writer=TensorDictMaxValueWriter(rank_key="rank"), batch_size=4
        )

    def write(rb):
        for rank in range(5):
            rb.extend(TensorDict({"rank": torch.full((8,), float(rank))}, [8]))

    saved, used = made(), made()
    saved.dumps(tmp_path / "saved")
    write(used)
    used.loads(tmp_path / "saved")
    write(saved)
    write(used)
    assert used.storage.lanes.saved_states() == saved.storage.lanes.saved_states()
