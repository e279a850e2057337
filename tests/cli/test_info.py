"""`info`: what is at a path, from headers; it disturbs nobody."""

import functools
import os
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from cli.support import episodes, store
from contracts.children import Child
from engram.cli import description, info, kinds
from engram.cli.tables import show_info
from engram.data import (
    Compact,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.data.datasets import write_hdf5, write_minari, write_parquet
from engram.errors import CheckpointError
from engram.store.places import LaneCount


def test_a_store_in_use_is_described(tmp_path):
    rb = store(tmp_path)
    result = info(tmp_path / "store")
    assert (result.kind, result.rows, result.capacity, result.in_use) == ("store", 300, 1000, True)
    assert [(k.key, k.shape, k.dtype, k.nbytes) for k in result.keys][:2] == [
        ("observation", (3,), "float32", 12),
        ("action", (), "int64", 8),
    ]
    assert result.row_bytes == rb.storage.layout.payload_bytes
    assert result.file_bytes == os.stat(tmp_path / "store" / "rows.engram").st_size


def test_the_file_of_a_store_means_the_store(tmp_path):
    rb = store(tmp_path)
    assert info(tmp_path / "store" / "rows.engram").rows == len(rb)


def test_lanes_say_who_writes_them_and_how_many_seams_they_have(tmp_path):
    rb = store(tmp_path, lanes=LaneCount(2))
    assert [lane.held for lane in info(tmp_path / "store").lanes] == [True, False]
    rb.storage.mark_seam()
    rb.extend(episodes(100))
    lane = info(tmp_path / "store").lanes[0]
    assert (lane.rows, lane.written, lane.seams) == (400, 400, 1)
    rb.storage.close()
    assert [lane.held for lane in info(tmp_path / "store").lanes] == [False, False]


def test_writers_that_move_from_lane_to_lane_are_shown_with_their_share_and_newest_row(tmp_path, capsys):
    rb = store(tmp_path, lanes=4)
    size = len(rb)
    pid = Child(lambda: (rb.extend(episodes(100)), os.getpid())[1]).result()
    rb.extend(episodes(20))
    stats = rb.stats()
    assert [(x.pid, x.rows, x.written) for x in stats.writers] == [(os.getpid(), size + 20, size + 20), (pid, 100, 100)]
    newest = rb.storage.lanes.cursor - 1
    assert stats.writers[0].newest == newest and stats.writers[1].newest not in range(size + 20)
    found = info(tmp_path / "store")
    assert found.writers == stats.writers and found.to_json()["writers"][1]["rows"] == 100
    show_info(found)
    assert re.search(rf"{pid} .*100 .*{100 / (size + 120) * 100:.1f} %", capsys.readouterr().out)


def test_episodes_lengths_and_returns_are_those_of_the_rows(tmp_path):
    rb = store(tmp_path, steps=250)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch has no views of read-only memory, and warns where it makes one
        result = info(tmp_path / "store", returns=True)
    assert (result.episodes, result.lengths, result.returns) == (3, (50, 250 / 3, 100), (50, 250 / 3, 100))
    assert result.episodes == rb.stats().episodes


def test_returns_of_a_ring_that_has_gone_round_are_those_of_the_stored_steps(tmp_path):
    rb = store(tmp_path, capacity=250)
    result = info(tmp_path / "store", returns=True)
    assert (result.rows, result.episodes, result.returns) == (250, 3, (50, 250 / 3, 100))
    assert result.lengths == result.returns and len(rb) == 250


def test_returns_are_those_of_each_environment(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=tmp_path / "store", ndim=2))
    done = torch.zeros(2, 10, 1, dtype=torch.bool)
    done[:, 4] = True
    reward = torch.tensor([1.0, 2.0]).reshape(2, 1, 1).expand(2, 10, 1)
    rb.extend(TensorDict({"next": {"reward": reward, "done": done}}, [2, 10]))
    result = info(tmp_path / "store", returns=True)
    assert (result.rows, result.envs, result.episodes, result.returns) == (20, 2, 4, (5, 7.5, 10))


def test_steps_without_flags_have_no_episodes_and_it_says_so(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    rb.extend(torch.arange(5))
    result = info(tmp_path)
    assert result.episodes is None and result.keys[0].key == "tensor"
    assert "no key says where episodes end" in result.notes[0]


def test_the_store_can_be_used_exclusively_meanwhile(tmp_path):
    rb = store(tmp_path)
    before = (tmp_path / "store" / "rows.engram").read_bytes()
    info(tmp_path / "store", returns=True)
    assert (tmp_path / "store" / "rows.engram").read_bytes() == before
    rb[0] = rb[1]
    rb.empty()
    assert info(tmp_path / "store").rows == 0


def test_a_header_is_read_again_while_all_rows_are_replaced(tmp_path, monkeypatch):
    native = store(tmp_path).storage.lanes.store
    steps = [native.begin_restore, native.end_restore, lambda: None]  # `loads` begins, and ends
    original = description._of_header

    def beside_a_load(*args):
        steps.pop(0)()
        return original(*args)

    monkeypatch.setattr(description, "_of_header", beside_a_load)
    info(tmp_path / "store", episodes=False)
    assert not steps


def test_a_checkpoint_is_described_by_its_manifest(tmp_path):
    rb = store(tmp_path)
    rb.dumps(tmp_path / "saved")
    for rows in (tmp_path / "saved" / "g-000001" / "storage").iterdir():
        rows.chmod(0)  # no row is read
    result = info(tmp_path / "saved")
    assert (result.kind, result.rows, result.capacity, result.snapshot) == ("checkpoint", 300, 1000, "g-000001")
    assert result.parts["storage"] == "rows" and result.parts["sampler"] == "RandomSampler"
    assert result.keys == info(tmp_path / "store").keys and result.lanes[0].held is None


@pytest.mark.parametrize("format_name", ["Flat", "Nested", "H5"])
def test_returns_of_a_checkpoint_in_any_format_are_read_from_it(tmp_path, format_name):
    data = __import__("engram.data").data
    storage = LazyTensorStorage(1000, checkpointer=getattr(data, f"{format_name}StorageCheckpointer")())
    rb = ReplayBuffer(storage=storage)
    rb.extend(episodes())
    rb.dumps(tmp_path)
    assert info(tmp_path, returns=True).returns == (100, 100, 100)


def test_a_store_in_use_says_which_observations_it_has_once_and_what_its_rows_are_made_of(tmp_path, capsys):
    rb = store(tmp_path, compact=Compact("observation", frames=3))
    shares = rb.stats().compact
    assert shares.same == 1 and shares.advice is not None
    assert info(tmp_path / "store").notes == (f"each observation is stored once (compact=): {shares}",)
    show_info(info(tmp_path / "store"))
    shown = " ".join(capsys.readouterr().out.split())
    assert "of next observations 100.0% are those of the row behind" in shown and "with ndim=2" in shown


def test_a_store_whose_rows_share_no_observation_says_what_would_make_it_smaller(tmp_path):
    rb = store(tmp_path, compact=Compact("observation", n_steps=7))
    rb.storage.close()
    note = info(tmp_path / "store").notes[0]
    assert "0.0% are those of the row 7 rows behind" in note and "say compact=Compact(n_steps=1)" in note


def test_a_store_without_rows_says_which_observations_it_has_once_and_its_bytes_a_step(tmp_path):
    rb = store(tmp_path, compact=Compact("observation", frames=3))
    rb.empty()
    once = "each observation is stored once (compact=): observation (3 frames); "
    assert info(tmp_path / "store").notes == (f"{once}{rb.stats().compact.bytes_per_step:,.0f} bytes a step",)


def test_a_checkpoint_says_which_observations_it_has_once(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(400, compact=Compact("observation", frames=3, n_steps=2)))
    rb.extend(episodes())
    rb.dumps(tmp_path)
    assert info(tmp_path).notes == (
        "each observation is stored once (compact=): observation (3 frames), of 2-step rows",
    )


def test_checkpoints_of_lists_ensembles_and_single_parts_are_described(tmp_path):
    items = ReplayBuffer(storage=ListStorage(10))
    items.extend(["a", "b"])
    items.dumps(tmp_path / "items")
    assert (info(tmp_path / "items").rows, info(tmp_path / "items").capacity) == (2, 10)
    members = [ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2) for _ in range(2)]
    for n, member in enumerate(members):
        member.extend(torch.arange(n + 1))
    ReplayBufferEnsemble(*members).dumps(tmp_path / "ensemble")
    assert info(tmp_path / "ensemble").rows == 3
    assert "2 members" in info(tmp_path / "ensemble").notes[0]
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.sampler.dumps(tmp_path / "sampler")
    assert info(tmp_path / "sampler").parts == {"sampler": "RandomSampler"}
    with pytest.raises(CheckpointError, match="holds no rows"):
        info(tmp_path / "sampler", episodes=True)


def test_an_older_snapshot_can_be_named(tmp_path):
    rb = store(tmp_path)
    rb.dumps(tmp_path / "saved", keep_last=2)
    rb.extend(episodes(100))
    rb.dumps(tmp_path / "saved", keep_last=2)
    assert info(tmp_path / "saved").rows == 400
    assert info(tmp_path / "saved", snapshot="g-000001").rows == 300


@pytest.mark.parametrize(
    ("write", "name", "kind", "counted"),
    [
        (write_minari, "dataset", "Minari dataset", 3),
        (write_hdf5, "flat.hdf5", "HDF5 dataset", None),
        (write_parquet, "steps.parquet", "Parquet file", None),
    ],
)
def test_a_dataset_file_is_described(tmp_path, write, name, kind, counted):
    write(episodes(), tmp_path / name)
    result = info(tmp_path / name)
    assert (result.kind, result.rows, result.episodes) == (kind, 300, counted)
    assert "observation" in [key.key for key in result.keys] and result.file_bytes > 0
    assert info(tmp_path / name, returns=True).returns == (100, 100, 100)


def test_a_path_without_anything_to_describe_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        info(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"is none of: a store"):
        info(tmp_path)
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"is none of: a store"):
        info(tmp_path / "array.npy")


@pytest.mark.parametrize("ids", [False, True], ids=["flags", "ids"])
def test_flat_rows_have_episodes_and_returns_too(tmp_path, ids):
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path / "store"))
    done = torch.arange(30) % 10 == 9
    step = {"obs": torch.rand(30, 3), "reward": torch.ones(30), "next_obs": torch.rand(30, 3), "done": done}
    rb.extend({**step, "episode": torch.arange(30) // 15} if ids else step)
    rb.dumps(tmp_path / "saved")
    for path in (tmp_path / "store", tmp_path / "saved"):
        found = info(path, returns=True)
        assert found.episodes == (2 if ids else 3) and found.returns == ((15, 15, 15) if ids else (10, 10, 10))


def runs(folder, seeds=3):
    for seed in range(seeds):
        rb = store(folder / "runs" / str(seed), steps=20 + seed, capacity=100)
        rb.dumps(folder / "runs" / str(seed) / "checkpoint")
        rb.storage.close()
    (folder / "runs" / ".hidden").mkdir()
    (folder / "runs" / "0" / "loop").symlink_to(folder / "runs")
    return folder / "runs"


def test_rows_that_a_writer_replaces_out_of_turn_have_the_keys_of_other_rows(tmp_path):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), writer=TensorDictMaxValueWriter(rank_key="x"))
    rb.extend(TensorDict({"x": torch.arange(4.0)}, [4]))
    rb.dumps(tmp_path)
    assert [key.key for key in info(tmp_path).keys] == ["x", "index"]


def test_a_folder_above_lists_the_stores_and_checkpoints_below(tmp_path, capsys):
    found = info(runs(tmp_path))
    assert found.kind == "folder" and found.rows is None and found.notes == ()
    assert [(one.path.removeprefix(f"{tmp_path}/runs/"), one.kind, one.rows) for one in found.below] == [
        (f"{seed}/{name}", kind, 20 + seed)
        for seed in range(3)
        for name, kind in (("checkpoint", "checkpoint"), ("store", "store"))
    ]
    assert [one["kind"] for one in found.to_json()["below"]] == ["checkpoint", "store"] * 3
    show_info(found)
    assert re.findall(r"\d/(?:checkpoint|store)", capsys.readouterr().out) == [
        os.path.relpath(one.path, found.path) for one in found.below
    ]


def test_one_that_is_damaged_does_not_hide_the_others(tmp_path):
    folder = runs(tmp_path, seeds=2)
    (folder / "0" / "store" / "rows.engram").write_bytes(b"torn")
    damaged = [one for one in info(folder).below if one.rows is None]
    assert [one.path for one in damaged] == [str(folder / "0" / "store")] and "rows.engram" in damaged[0].notes[0]


def test_a_search_that_ends_early_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(description, "stores_below", functools.partial(kinds.stores_below, most=5))
    assert "more files and folders" in info(runs(tmp_path)).notes[0]


def test_other_commands_name_one_of_them(tmp_path):
    with pytest.raises(ValueError, match=r"Below it are 6, which `engram info` lists: .*/0/checkpoint"):
        kinds.kind_of(runs(tmp_path))


def test_the_list_needs_no_torch(tmp_path):
    look = f"len(info({str(runs(tmp_path))!r}).below)"
    code = f"import sys; from engram.cli import info; print({look}, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "6 False\n"
