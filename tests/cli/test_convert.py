"""`convert`: the same steps and episodes in another form, or a refusal that names what would be lost."""

import json

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from cli.support import episodes, store
from cli.test_command import call
from contracts.each import each
from data.datasets.support import assert_same_bits
from engram.cli import convert, diff, head, info, verify
from engram.cli.conversion import TARGETS
from engram.cli.main import FORMS
from engram.cli.sources import open_rows
from engram.data import FlatStorageCheckpointer, LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from engram.data.datasets import iter_lerobot, iter_parquet
from engram.errors import DatasetError

SUFFIX = {"hdf5": ".hdf5", "parquet": ".parquet"}


def test_the_command_offers_what_the_function_writes():
    assert tuple(TARGETS) == FORMS


@each("to", TARGETS)
def test_steps_and_episodes_go_to_each_form_and_back(tmp_path, to):
    rb = store(tmp_path, steps=550, capacity=450)  # a ring that has gone round, whose first episode is cut
    target = tmp_path / f"target{SUFFIX.get(to, '')}"
    marks_ends = to in ("hdf5", "minari")  # of every trajectory: the running one is truncated there
    if marks_ends:
        rb.storage.set(99, rb[99].set(("next", "truncated"), torch.tensor([True])))
        rb.storage.set(99, rb[99].set(("next", "done"), torch.tensor([True])))
    result = convert(tmp_path / "store", target, to=None if to in SUFFIX else to)
    assert (result.kind, result.rows) == (TARGETS[to], 450) == (info(target).kind, len(rb))
    back = tmp_path / "back"
    convert(target, back, to="store", drop=[] if marks_ends else ["index"])
    differences = diff(tmp_path / "store", back)
    assert differences.rows == 0 and differences.compared == 450
    assert info(back).lengths == info(tmp_path / "store").lengths and info(back).episodes == 5
    assert to == "torchrl" or verify(target).ok


@each("saved_as", ["checkpoint", "flat", "several writers", "torchrl", "parquet"])
def test_rows_too_large_for_memory_are_copied_through_a_temporary_file(tmp_path, monkeypatch, saved_as):
    monkeypatch.setattr("engram.cli.sources.free_memory", lambda: 1000)
    rb = store(tmp_path, lanes=2) if saved_as == "several writers" else store(tmp_path)
    source = tmp_path / f"source{SUFFIX.get(saved_as, '')}"
    if saved_as in ("torchrl", "parquet"):
        convert(tmp_path / "store", source, to=saved_as)
    else:
        if saved_as == "flat":
            rb.storage.checkpointer = FlatStorageCheckpointer()
        rb.dumps(source)
    with open_rows(source) as storage:
        assert isinstance(storage, LazyMemmapStorage) and len(storage) == 300
    convert(source, tmp_path / "saved", to="checkpoint", drop=["index"] if saved_as == "torchrl" else [])
    differences = diff(source, tmp_path / "saved")
    assert differences.rows == 0 and differences.compared == 300


def test_steps_whose_observations_are_stored_once_go_to_each_form_as_others_do(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(400, compact=True))
    rb.extend(episodes(300))
    rb.dumps(tmp_path / "saved")
    plain = store(tmp_path)
    plain.storage.flush()
    assert diff(tmp_path / "store", tmp_path / "saved").rows == 0
    for to in ("store", "checkpoint", "torchrl", "parquet", "minari", "hdf5"):
        target = tmp_path / f"target-{to}{SUFFIX.get(to, '')}"
        assert convert(tmp_path / "saved", target, to=to).rows == 300
        differences = diff(tmp_path / "saved", target)
        assert differences.rows == 0 and differences.compared == 300


def test_trajectories_that_only_a_seam_ends_stay_apart(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=tmp_path / "store"))
    for _ in range(3):
        rb.extend(episodes(50))  # none has ended
        rb.storage.mark_seam()
    assert info(tmp_path / "store").episodes == 3
    for to in ("store", "checkpoint", "parquet", "minari", "hdf5"):
        target = tmp_path / f"to_{to}{SUFFIX.get(to, '')}"
        convert(tmp_path / "store", target, to=to, drop=["ends"] if to in ("minari", "hdf5") else [])
        assert info(target, episodes=True).episodes == 3, to
    convert(tmp_path / "to_parquet.parquet", tmp_path / "again", to="store")
    assert info(tmp_path / "again").episodes == 3


def test_ends_that_no_flag_says_are_refused_where_the_form_has_no_place_for_them(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=tmp_path / "store"))
    for _ in range(3):
        rb.extend(episodes(50))
        rb.storage.mark_seam()
    with pytest.raises(ValueError, match=r"ends: 2 trajectories end where neither a flag nor an id says so"):
        convert(tmp_path / "store", tmp_path / "rl", to="torchrl")
    assert not (tmp_path / "rl").exists()
    with pytest.raises(ValueError, match=r"ends: 3 trajectories have not ended, and would be marked as truncated"):
        convert(tmp_path / "store", tmp_path / "steps.hdf5")
    assert convert(tmp_path / "store", tmp_path / "rl", to="torchrl", drop=["ends"]).dropped == ("ends",)


def test_environments_follow_one_another_and_stay_apart(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=tmp_path / "store", ndim=2))
    x = torch.arange(20).reshape(2, 10)
    rb.extend(TensorDict({"x": x, "next": {"done": torch.zeros(2, 10, 1, dtype=torch.bool)}}, [2, 10]))
    result = convert(tmp_path / "store", tmp_path / "flat", to="store")
    assert "2 environments follow one another" in result.notes[0]
    assert head(tmp_path / "flat", 20).batch["x"].tolist() == list(range(20))
    assert info(tmp_path / "flat").episodes == 2


@pytest.mark.parametrize("to", ["hdf5", "minari"])
def test_a_key_without_a_place_is_named_and_may_be_dropped(tmp_path, to):
    rb = ReplayBuffer(storage=LazyMemmapStorage(400, scratch_dir=tmp_path / "store"))
    rb.extend(episodes().set("policy_version", torch.arange(300)))
    target = tmp_path / f"target{SUFFIX.get(to, '')}"
    with pytest.raises(ValueError, match=r"'policy_version' has no place .* As drop=\[...\], or --drop KEY"):
        convert(tmp_path / "store", target, to=to)
    assert not target.exists()
    result = convert(tmp_path / "store", target, to=to, drop=["policy_version"])
    assert (result.rows, result.dropped) == (300, ("policy_version",))


def test_groups_without_entries_and_constants_are_named_and_may_be_dropped(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(400, scratch_dir=tmp_path / "store"))
    rb.extend(episodes().set("empty", TensorDict({}, [300])).set("game", NonTensorData("chess", batch_size=[300])))
    with pytest.raises(ValueError, match=r"'empty' has no entries.*'game' is no tensor.*--drop KEY"):
        convert(tmp_path / "store", tmp_path / "steps.hdf5")
    result = convert(tmp_path / "store", tmp_path / "steps.hdf5", drop=["empty", "game"])
    assert (result.rows, result.dropped) == (300, ("empty", "game"))


def test_flags_that_a_reader_would_derive_otherwise_are_named(tmp_path):
    steps = episodes()
    steps["done"] = torch.ones(300, 1, dtype=torch.bool)
    steps["next", "done"] = torch.zeros(300, 1, dtype=torch.bool)
    ReplayBuffer(storage=LazyMemmapStorage(400, scratch_dir=tmp_path / "store")).extend(steps)
    with pytest.raises(ValueError, match=r"done is set in some steps.*next\.done is not set where terminated"):
        convert(tmp_path / "store", tmp_path / "steps.hdf5")
    assert convert(tmp_path / "store", tmp_path / "steps.hdf5", drop=["done", "next.done"]).rows == 300


def test_dicts_go_where_they_have_a_place(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "store"))
    rb.extend({"a": torch.arange(5), "b": {"c": torch.ones(5, 2)}})
    for to in ("store", "checkpoint", "parquet"):
        convert(tmp_path / "store", tmp_path / f"to_{to}", to=to)
        assert diff(tmp_path / "store", tmp_path / f"to_{to}").equal
    with pytest.raises(ValueError, match="the steps are a dict, and it is written from TensorDicts"):
        convert(tmp_path / "store", tmp_path / "rl", to="torchrl")


def test_a_group_of_keys_is_dropped_by_its_name_and_an_unknown_one_is_refused(tmp_path):
    store(tmp_path)
    result = convert(tmp_path / "store", tmp_path / "steps.parquet", drop=["next"])
    assert len(result.dropped) == 5 and "next.reward" in result.dropped
    with pytest.raises(KeyError, match="there is no key 'nxt' to drop; there are observation"):
        convert(tmp_path / "store", tmp_path / "other.parquet", drop=["nxt"])


def test_what_is_at_the_target_is_replaced_only_where_it_was_asked_for(tmp_path):
    store(tmp_path)
    target = tmp_path / "saved"
    convert(tmp_path / "store", target, to="checkpoint", capacity=500)
    assert info(target).capacity == 500
    with pytest.raises(FileExistsError, match="overwrite=True"):
        convert(tmp_path / "store", target, to="checkpoint")
    with pytest.raises(FileExistsError, match="this is none"):
        convert(tmp_path / "store", target, to="store", overwrite=True)
    convert(tmp_path / "store", target, to="checkpoint", overwrite=True)
    assert info(target).capacity == 300


def test_a_dataset_that_is_damaged_leaves_nothing_behind(tmp_path):
    store(tmp_path)
    file = tmp_path / "steps.parquet"
    convert(tmp_path / "store", file)
    content = bytearray(file.read_bytes())
    content[200] ^= 255
    file.write_bytes(content)
    with pytest.raises(DatasetError):
        convert(file, tmp_path / "again", to="store")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.parquet", "store"]


def test_the_state_of_parts_that_stays_behind_is_named(tmp_path):
    store(tmp_path).dumps(tmp_path / "saved")
    notes = convert(tmp_path / "saved", tmp_path / "steps.parquet").notes
    assert notes[0].startswith("rows alone: the state of ") and "sampler" in notes[0]


def test_a_directory_of_torchrl_comes_with_the_note_that_it_has_no_batch_size(tmp_path):
    store(tmp_path)
    noted = "it says no batch size, which TorchRL's loads takes over: call sample(n) there"
    assert convert(tmp_path / "store", tmp_path / "rl", to="torchrl").notes == (noted,)
    assert convert(tmp_path / "store", tmp_path / "saved", to="checkpoint").notes == ()


def test_nothing_to_write_items_and_an_unknown_form_are_refused(tmp_path):
    rb = store(tmp_path)
    rb.empty()
    with pytest.raises(ValueError, match="holds no steps"):
        convert(tmp_path / "store", tmp_path / "steps.parquet")
    items = ReplayBuffer(storage=ListStorage(10))
    items.extend(["a", "b"])
    items.dumps(tmp_path / "items")
    with pytest.raises(ValueError, match="items of any form"):
        convert(tmp_path / "items", tmp_path / "steps.parquet")
    with pytest.raises(ValueError, match=r"the suffix of .* does not say what to write"):
        convert(tmp_path / "store", tmp_path / "other")
    with pytest.raises(ValueError, match="to='zarr' is none of store, checkpoint"):
        convert(tmp_path / "store", tmp_path / "other", to="zarr")


def test_the_command_says_what_it_wrote(tmp_path):
    store(tmp_path)
    shown = call("convert", tmp_path / "store", tmp_path / "steps.parquet", "--drop", "next", "--json")
    assert shown.exit_code == 0 and json.loads(shown.stdout)["rows"] == 300
    again = call("convert", tmp_path / "store", tmp_path / "steps.parquet")
    assert again.exit_code == 2 and "it exists already" in again.stderr
    assert "300 rows" in call("convert", tmp_path / "store", tmp_path / "saved", "--to", "checkpoint").output


def test_lerobot_dataset_is_described_verified_and_converted(tmp_path):
    lerobot_files = pytest.importorskip("data.datasets.lerobot_files")
    folder = lerobot_files.write(tmp_path / "arm")
    described = info(folder)
    assert (described.kind, described.rows, described.episodes) == ("LeRobot dataset", 8, 3)
    assert verify(folder).ok
    assert convert(folder, tmp_path / "arm.parquet").rows == 8
    assert convert(folder, tmp_path / "saved", to="checkpoint").rows == 8
    assert_same_bits(torch.cat(list(iter_parquet(tmp_path / "arm.parquet"))), torch.cat(list(iter_lerobot(folder))))
