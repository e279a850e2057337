"""Removed rows where they go: saves keep which they are, exports and adapters of other libraries never hand one out."""

import base64
import json

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

import engram
from contracts.corruption import Forger
from contracts.each import each
from engram import cli, datasets
from engram.cli.conversion import TARGETS
from engram.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ListStorageCheckpointer,
    NestedStorageCheckpointer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    StorageCheckpointerBase,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorageCheckpointer,
)
from engram.errors import CheckpointError, CorruptCheckpointError

EPISODE, CAPACITY = 6, 20


def steps(start, stop):
    n = torch.arange(start, stop).unsqueeze(-1)
    done = n % EPISODE == EPISODE - 1
    following = {
        "observation": n + 1.0,
        "reward": n.float(),
        "done": done,
        "terminated": done,
        "truncated": done & False,
    }
    return TensorDict({"observation": n.float(), "action": n, "next": following}, [stop - start])


def filled(storage=None, **parts):
    """Steps 3 to 22, of which 5, 8, 9 and 20 are removed: at the end, in the middle and near the end of an episode."""
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY) if storage is None else storage, batch_size=64, **parts)
    rb.extend(steps(0, 23))
    rb.remove(lambda rows: torch.isin(rows["action"].flatten(), torch.tensor([5, 8, 9, 20])))
    return rb


LEFT = [n for n in range(3, 23) if n not in (5, 8, 9, 20)]
#: The runs of steps that follow each other in one episode.
RUNS = [[3, 4], [6, 7], [10, 11], [12, 13, 14, 15, 16, 17], [18, 19], [21, 22]]


def numbers(batch):
    return batch["action"].flatten().tolist()


def runs(batch):
    """The steps of each trajectory, told apart by ids, or by flags where there are none."""
    ids = batch.get(("collector", "traj_ids"), None)
    found, before = [], None
    ends = batch["next", "done"].flatten().tolist()
    for k, n in enumerate(numbers(batch)):
        begins = (k == 0 or ends[k - 1]) if ids is None else int(ids[k]) != before
        before = None if ids is None else int(ids[k])
        found[len(found) :] = [[n]] if begins else []
        if not begins:
            found[-1].append(n)
    return found


# ---- exports ----
@each("kind", ["minari", "hdf5", "parquet"])
def test_datasets_leave_removed_rows_out_and_end_episodes_before_them(kind, tmp_path):
    path = tmp_path / {"minari": "set", "hdf5": "set.hdf5", "parquet": "set.parquet"}[kind]
    assert getattr(datasets, f"write_{kind}")(filled(), path) == len(LEFT)
    back = ReplayBuffer(storage=LazyTensorStorage(100))
    getattr(datasets, f"read_{kind}")(path, back)
    assert numbers(back[:]) == LEFT and runs(back[:]) == RUNS
    if kind != "parquet":  # which has ids, and leaves flags as they are
        cut = [n for n, is_cut in zip(numbers(back[:]), back[:]["next", "truncated"].flatten(), strict=True) if is_cut]
        assert cut == [4, 7, 19, 22]  # as where another process had written from there on


@each("to", TARGETS)
def test_convert_leaves_removed_rows_out(to, tmp_path):
    filled(LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "store")).storage.close()
    target = tmp_path / {"hdf5": "set.hdf5", "parquet": "set.parquet"}.get(to, "target")
    if to in ("torchrl", "minari", "hdf5"):  # which say by flags alone where an episode ends
        with pytest.raises(ValueError, match=r"ends: \d trajectories"):
            cli.convert(tmp_path / "store", target, to=to)
    assert cli.convert(tmp_path / "store", target, to=to, drop=["ends"]).rows == len(LEFT)
    assert cli.info(target).rows in (len(LEFT), None)
    shown = cli.head(target, 100)
    assert numbers(shown.batch) == LEFT
    if to in ("store", "checkpoint"):
        back = ReplayBuffer(storage=LazyTensorStorage(100))
        datasets.write_parquet(engram.load(target), tmp_path / "again.parquet")
        datasets.read_parquet(tmp_path / "again.parquet", back)
        assert runs(back[:]) == RUNS


def test_steps_of_several_environments_lose_those_of_one_alone(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(24, ndim=2))
    rb.extend(torch.stack([steps(0, 12), steps(100, 112)]))
    rb.remove(lambda rows: rows["action"].flatten() == 104)
    datasets.write_parquet(rb, tmp_path / "set.parquet")
    back = ReplayBuffer(storage=LazyTensorStorage(100))
    datasets.read_parquet(tmp_path / "set.parquet", back)
    assert numbers(back[:]) == [*range(12), *range(100, 104), *range(105, 112)]
    assert [104 not in run and len(run) for run in runs(back[:])][:2] == [6, 6]


def test_blocks_of_removed_rows_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("engram.datasets.episodes.block_rows", lambda row_bytes: 3)
    rb = ReplayBuffer(storage=LazyTensorStorage(40))
    rb.extend(steps(0, 36))
    rb.remove(torch.arange(7, 25))
    datasets.write_parquet(rb, tmp_path / "set.parquet")
    back = ReplayBuffer(storage=LazyTensorStorage(100))
    datasets.read_parquet(tmp_path / "set.parquet", back)
    assert runs(back[:]) == [[*range(6)], [6], [*range(25, 30)], [*range(30, 36)]]


def test_where_nothing_is_left_there_is_nothing_to_write(tmp_path):
    rb = filled(LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "store"))
    rb.remove(slice(None))
    with pytest.raises(ValueError, match="all 20 stored rows were removed"):
        datasets.write_parquet(rb, tmp_path / "set.parquet")
    with pytest.raises(ValueError, match="20 steps, which were all removed"):
        cli.convert(tmp_path / "store", tmp_path / "set.parquet")
    assert len(cli.sample(tmp_path / "store", 5).slots) == 0


def test_sample_shows_rows_that_are_left(tmp_path):
    filled().dumps(tmp_path / "saved")
    assert set(numbers(cli.sample(tmp_path / "saved", 200).batch)) == set(LEFT)


def test_a_flattened_storage_has_the_same_rows_removed():
    rb = ReplayBuffer(storage=LazyTensorStorage(24, ndim=2))
    rb.extend(torch.stack([steps(0, 14), steps(100, 114)]))
    rb.remove(lambda rows: (rows["action"].flatten() == 104) | (rows["action"].flatten() == 7))
    flat = ReplayBuffer(storage=rb.storage.flatten(), batch_size=400)
    assert set(numbers(flat.sample())) == set(numbers(rb[:])) - {7, 104} and flat.stats().removed == 2


# ---- checkpoints ----
CHECKPOINTERS = {
    "rows": TensorStorageCheckpointer,
    "flat": FlatStorageCheckpointer,
    "nested": NestedStorageCheckpointer,
    "h5": H5StorageCheckpointer,
    "h5, groups": lambda: H5StorageCheckpointer(group_per_trajectory=True),
}


def features(path):
    [manifest] = path.glob("g-*/manifest.json")
    return json.loads(manifest.read_text())["features"]


@each("form", CHECKPOINTERS)
def test_saves_of_rows_keep_which_were_removed(form, tmp_path):
    rb, twin = filled(), ReplayBuffer(storage=LazyTensorStorage(CAPACITY + 4), batch_size=400)
    rb.storage.checkpointer, twin.storage.checkpointer = CHECKPOINTERS[form](), CHECKPOINTERS[form]()
    rb.dumps(tmp_path / "saved")
    assert "removed" in features(tmp_path / "saved")
    twin.loads(tmp_path / "saved")
    assert twin.stats().removed == 4 and set(numbers(twin.sample())) == set(LEFT)


def test_saves_of_items_and_through_hooks_keep_which_were_removed(tmp_path):
    items = ReplayBuffer(storage=ListStorage(10), batch_size=200)
    items.storage.checkpointer = ListStorageCheckpointer()
    items.extend([{"n": torch.tensor(k)} for k in range(13)])
    items.remove([1, 2, 5])
    items.dumps(tmp_path / "items")
    twin = ReplayBuffer(storage=ListStorage(11), batch_size=200)
    twin.loads(tmp_path / "items")
    assert features(tmp_path / "items") == ["removed"] and set(twin.sample()["n"].tolist()) == {3, 4, 6, 7, 8, 9, 10}
    hooked, other = filled(), ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=400)
    hooked.storage.register_save_hook(lambda rows: rows)
    other.storage.register_load_hook(lambda rows: rows)
    hooked.dumps(tmp_path / "hooked")
    other.loads(tmp_path / "hooked")
    assert features(tmp_path / "hooked") == ["hooks", "removed"] and set(numbers(other.sample())) == set(LEFT)


def test_a_save_of_an_ensemble_has_the_feature_of_a_member(tmp_path):
    members = [filled(), ReplayBuffer(storage=LazyTensorStorage(5))]
    members[1].extend(steps(0, 4))
    ReplayBufferEnsemble(*members[::-1], batch_size=4).dumps(tmp_path / "saved")
    assert features(tmp_path / "saved") == ["removed"]


def test_a_save_without_removed_rows_can_be_read_by_an_older_engram(tmp_path, monkeypatch):
    rb = filled()
    rb.extend(steps(100, 100 + CAPACITY))  # over all of them
    rb.dumps(tmp_path / "saved")
    assert features(tmp_path / "saved") == [] and rb.stats().removed == 0
    filled().dumps(tmp_path / "other")
    monkeypatch.setattr("engram.checkpoint.reader.FEATURES", ("hooks", "observations"))
    engram.load(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="uses 'removed', which this engram does not know"):
        engram.load(tmp_path / "other")


def test_a_save_in_the_background_has_the_rows_that_were_removed_when_it_began(tmp_path):
    rb = filled()
    save = rb.dumps(tmp_path / "saved", blocking=False)
    rb.remove(slice(None))
    save.result()
    twin = engram.load(tmp_path / "saved")
    assert twin.stats().removed == 4 and set(numbers(twin.sample())) <= set(LEFT)


class OneFile(StorageCheckpointerBase):
    """A user's own, which fills the storage step by step."""

    def dumps(self, storage, path):
        torch.save(storage[:].clone(), path)

    def loads(self, storage, path):
        rows = torch.load(path, weights_only=False)
        storage.set(range(len(rows)), rows)


@each("steps_written", [12, 23])
def test_a_checkpointer_that_fills_step_by_step_keeps_which_rows_were_removed(steps_written, tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=400)
    rb.extend(steps(0, steps_written))
    rb.remove([3, 4, 9])
    left = set(numbers(rb.sample()))
    twin = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=400)
    rb.storage.checkpointer, twin.storage.checkpointer = OneFile(), OneFile()
    rb.dumps(tmp_path / "saved")
    assert features(tmp_path / "saved") == ["removed"]
    twin.loads(tmp_path / "saved")
    assert twin.stats().removed == 3 and set(numbers(twin.sample())) == left


def bits(*flags, first=3):
    packed = np.packbits(np.array(flags, np.bool_), bitorder="little").tobytes()
    return {"first": first, "bits": base64.b64encode(packed).decode()}


FORGED = {
    "no base 64": ({"first": 3, "bits": "###"}, "are no base 64"),
    "no text": ({"first": 3, "bits": 7}, "it must be a string"),
    "cut off": (bits(1, 0, 1), "are not those of its rows 3 to 23"),
    "too many": (bits(*[1] * 40), "are not those of its rows 3 to 23"),
    "behind the newest": (bits(*[0] * 20, 1), "bits behind its newest row, 22"),
    "negative": ({**bits(*[1] * 20), "first": -1}, "it must be an integer from 0"),
    "later than the oldest": (bits(*[1] * 19, first=4), "are not those of its rows 3 to 23"),
    "a list": ([], "it must be a dict"),
    "letters of others": ({"first": 3, "bits": "ÿ"}, "are no base 64"),
}


@each("forged", FORGED)
def test_forged_removals_are_refused_and_change_nothing(forged, tmp_path):
    value, words = FORGED[forged]
    filled().dumps(tmp_path / "saved")
    Forger(tmp_path / "saved").edit_state(lambda state: state["counters"]["lanes"][0].update(removed=value))
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=4)
    rb.extend(steps(50, 55))
    with pytest.raises(CorruptCheckpointError, match=words):
        rb.loads(tmp_path / "saved")
    state = filled().state_dict()
    state["storage"]["counters"]["lanes"][0]["removed"] = value
    with pytest.raises(ValueError, match=words):
        rb.load_state_dict(state)
    assert numbers(rb[:]) == [*range(50, 55)] and rb.stats().removed == 0


def test_removals_from_before_the_oldest_row_are_passed_over(tmp_path):
    """As a save has them whose oldest rows other processes overwrote before they were read."""
    rb = filled()
    rb.dumps(tmp_path / "saved")
    forger = Forger(tmp_path / "saved")

    def lose(state):
        state["counters"]["lanes"][0]["base"] = 9

    forger.edit_state(lose)
    for capacity in (CAPACITY, 17):
        twin = ReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=400)
        twin.loads(tmp_path / "saved")
        assert twin.stats().removed == 2 and set(numbers(twin.sample())) == {n for n in LEFT if n >= 9}


# ---- adapters ----
def transitions(buffer, n=8):
    for k in range(n):
        obs = np.full((1, 3), k, np.float32)
        buffer.add(obs, obs + 1, np.zeros((1, 1)), np.ones(1), np.zeros(1), [{}])


BOX, ACTION = spaces.Box(-9, 9, (3,)), spaces.Box(-1, 1, (1,))
REFUSED = r"1 of the stored rows were removed .*another library.*`rows"


def test_buffers_of_cleanrl_refuse_to_sample_or_leave_removed_rows_out():
    from engram.compat.cleanrl import PrioritizedReplayBuffer
    from engram.compat.cleanrl import ReplayBuffer as Ours

    buffer = Ours(10, BOX, ACTION, "cpu", handle_timeout_termination=False)
    transitions(buffer)
    buffer.rows.buffer.remove((2, 0))
    with pytest.raises(RuntimeError, match=REFUSED):
        buffer.sample(4)
    by_priority = PrioritizedReplayBuffer(10, (3,), "cpu", 1, 0.9, observation_dtype=np.float32)
    for k in range(8):
        by_priority.add(np.full(3, k, np.float32), 0, 1.0, np.full(3, k + 1, np.float32), False)
    by_priority.buffer.remove([2])
    assert 2 not in by_priority.sample(300).indices  # engram's own sampler draws there


@each("index", [[2], 2, torch.tensor([1, 2, 3]), (1, 2, 3), (torch.tensor([1]),)])
def test_rows_of_several_environments_are_named_by_time_and_environment(index):
    rb = ReplayBuffer(storage=LazyTensorStorage(24, ndim=2))
    rb.extend(torch.stack([steps(0, 12), steps(100, 112)]))
    with pytest.raises(IndexError, match=r"a tuple \(time, env\) or ends in a dimension of 2, found .*nothing was"):
        rb.remove(index)
    assert rb.stats().removed == 0
    assert rb.remove((2, 1)) == rb.remove(torch.tensor([[3, 0]])) == 1


# ---- updates ----
@each("storage", [lambda: LazyTensorStorage(CAPACITY), lambda: ListStorage(CAPACITY)])
def test_update_if_present_takes_removed_rows_for_stale(storage):
    rb = TensorDictReplayBuffer(storage=storage(), writer=TensorDictRoundRobinWriter(), batch_size=64)
    index = rb.extend(TensorDict({"n": torch.arange(5)}, [5]))
    generation = rb.writer.generations_of(index)
    rb.remove(index[1:3], generation=generation[1:3])
    result = rb.update_if_present(index=index, generation=generation, patch={"n": torch.full((5,), 9)})
    assert result.stale.tolist() == [False, True, True, False, False] and result.applied == 3
    assert [int(row["n"]) for row in rb[:]] == [9, 1, 2, 9, 9]
    version = rb.update_if_present(index=index[1:2], generation=generation[1:2], patch={"n": torch.tensor([9])})
    assert version.stale_count == 1 and version.version_rejected_count == 0


@each("with_generation", [False, True])
def test_update_priority_skips_removed_rows_and_counts_them(with_generation):
    rb = TensorDictPrioritizedReplayBuffer(1.0, 1.0, storage=LazyTensorStorage(CAPACITY), batch_size=400)
    index = rb.extend(TensorDict({"n": torch.arange(6)}, [6]))
    generation = rb.writer.generations_of(index)
    rb.remove([2, 3])
    given = {"generation": generation} if with_generation else {}
    rb.update_priority(index, torch.tensor([1.0, 2.0, 100.0, 100.0, 3.0, 4.0]), **given)
    assert rb.sampler.skipped == 2 and rb.sampler.priorities(index).tolist() == [1, 2, -1, -1, 3, 4]
    assert set(rb.sample()["n"].tolist()) <= {0, 1, 4, 5}
    rb.extend(TensorDict({"n": torch.arange(20, 20 + CAPACITY)}, [CAPACITY]))
    assert (rb.sampler.priorities(torch.arange(CAPACITY)) == 4).all()  # what was skipped raised no highest one


@each("ways", ["rb[i] = x", "storage.set"])
def test_a_removed_row_that_is_changed_in_place_stays_removed(ways):
    rb = filled()
    slot = int((rb[:]["action"].flatten() == 8).nonzero())
    row = rb[slot].clone().set("action", torch.tensor([800]))
    if ways == "rb[i] = x":
        rb[slot] = row
    else:
        rb.storage.set(slot, row)
    assert rb.stats().removed == 4 and set(numbers(rb.sample())) <= set(LEFT)
