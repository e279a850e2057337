"""Minari datasets in and out."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from data.datasets.support import assert_same_bits, steps, with_bits
from engram.data import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.data.datasets import iter_minari, read_minari, write_minari
from engram.errors import DatasetError

h5py = pytest.importorskip("h5py", reason='reading Minari datasets needs h5py: pip install "engram[h5]"')

FROM_MINARI = Path(__file__).parent / "files" / "minari-0.5.4"  # what minari itself wrote


def buffer(capacity=1000, **options):
    return ReplayBuffer(storage=LazyTensorStorage(capacity, **options))


def filled(batch, capacity=1000):
    rb = buffer(capacity)
    rb.extend(batch)
    return rb


@pytest.fixture
def dataset(tmp_path):
    """A dataset of three episodes, of 3, 1 and 4 steps."""
    write_minari(steps([3, 1, 4]), tmp_path / "set-v0")
    return tmp_path / "set-v0"


def opened(dataset):
    return h5py.File(dataset / "data" / "main_data.hdf5", "r+")


# ---- what minari wrote ----
def test_a_dataset_that_minari_wrote_is_read_with_its_nested_spaces():
    rb = buffer()
    assert read_minari(FROM_MINARI, rb) == 6
    found = rb[:]
    with h5py.File(FROM_MINARI / "data" / "main_data.hdf5") as file:
        for e in range(2):
            rows, episode = found[3 * e : 3 * e + 3], file[f"episode_{e}"]
            for key, place in {
                ("a",): "a", ("t", "0"): "t/_index_0", ("t", "1"): "t/_index_1", ("t", "2", "z"): "t/_index_2/z",
            }.items():  # fmt: skip
                values = episode["observations"][place][:]
                np.testing.assert_array_equal(rows[key].numpy(), values[:-1])
                np.testing.assert_array_equal(rows[("next", *key)].numpy(), values[1:])
                assert rows[key].numpy().dtype == values.dtype
            np.testing.assert_array_equal(rows["action", "1"].numpy(), episode["actions/_index_1"][:])
            np.testing.assert_array_equal(rows["next", "info", "v"].numpy(), episode["infos/v"][1:])
            np.testing.assert_array_equal(rows["info", "v"].numpy(), episode["infos/v"][:-1])
            assert rows["next", "reward"].flatten().tolist() == episode["rewards"][:].tolist()
            assert rows["next", "terminated"].flatten().tolist() == episode["terminations"][:].tolist()
            assert set(rows["collector", "traj_ids"].tolist()) == {e}


def test_a_dataset_of_minari_is_the_same_after_it_was_written_again(tmp_path):
    rb = buffer()
    read_minari(FROM_MINARI, rb)
    write_minari(rb, tmp_path / "again")
    for a, b in zip(iter_minari(tmp_path / "again"), iter_minari(FROM_MINARI), strict=True):
        assert_same_bits(a, b)
    written, given = (json.loads((p / "data" / "metadata.json").read_text()) for p in (tmp_path / "again", FROM_MINARI))
    assert written["total_steps"] == given["total_steps"] and written["total_episodes"] == given["total_episodes"]
    kinds = [json.loads(m["observation_space"])["subspaces"]["t"]["type"] for m in (written, given)]
    assert kinds == ["Tuple", "Tuple"]


def test_infos_can_be_left_out_and_so_can_single_keys():
    whole, *_ = iter_minari(FROM_MINARI)
    less, *_ = iter_minari(FROM_MINARI, infos=False, exclude=["a"])
    gone = set(whole.keys(True, True)) - set(less.keys(True, True))
    assert gone == {"a", ("next", "a"), *((*n, "info", k) for n in ((), ("next",)) for k in ("i", "v"))}


# ---- round trips ----
def test_whole_episodes_come_back_bit_by_bit(tmp_path):
    batch = with_bits(steps([5, 1, 7]))
    write_minari(filled(batch), tmp_path / "set-v0")
    rb = buffer()
    assert read_minari(tmp_path / "set-v0", rb) == 13
    assert_same_bits(rb[:], batch)


@pytest.mark.deep
@settings(max_examples=20)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), capacity=st.integers(3, 30))
def test_what_a_ring_still_holds_is_written_and_its_last_trajectory_truncated(tmp_path_factory, lengths, capacity):
    path = tmp_path_factory.mktemp("m") / "set-v0"
    batch = steps([*lengths, 4], flagged=True)
    batch = batch[:-2]  # the last one has not ended
    rb = filled(batch, capacity)
    kept = batch[-capacity:].clone()
    kept["next", "truncated"][-1] = kept["next", "done"][-1] = True
    kept["collector", "traj_ids"] -= kept["collector", "traj_ids"][0].clone()
    assert write_minari(rb, path) == len(kept)
    back = torch.cat(list(iter_minari(path)))
    assert_same_bits(back, kept)


@pytest.mark.parametrize("most", [64, 200, 10_000])
def test_blocks_and_whole_reads_give_the_same(tmp_path, monkeypatch, most):
    batch = steps([5, 12, 1, 7])
    monkeypatch.setattr("engram.datasets.episodes.BLOCK_BYTES", most)
    write_minari(filled(batch), tmp_path / "set-v0")
    rb = buffer()
    read_minari(tmp_path / "set-v0", rb)
    assert_same_bits(rb[:], batch)


def test_batches_of_several_environments_are_joined_to_trajectories(tmp_path):
    one, two = steps([4, 6], seed=1), steps([7, 3], seed=2)
    two["collector", "traj_ids"] += 2
    both = torch.stack([one, two])
    write_minari([both[:, :3], both[:, 3:5], both[:, 5:]], tmp_path / "set-v0")
    found = {len(e): e for e in iter_minari(tmp_path / "set-v0")}
    assert set(found) == {4, 6, 7, 3}
    for length, rows in {4: one[:4], 6: one[4:], 7: two[:7], 3: two[7:]}.items():
        assert_same_bits(found[length].exclude("collector"), rows.exclude("collector"))


def test_the_strands_of_a_buffer_with_two_dimensions_are_trajectories_of_their_own(tmp_path):
    one, two = steps([4, 6], seed=1, ids=False), steps([10], seed=2, ids=False)
    rb = buffer(100, ndim=2)
    rb.extend(torch.stack([one, two]))
    write_minari(rb, tmp_path / "set-v0")
    assert [len(e) for e in iter_minari(tmp_path / "set-v0")] == [4, 6, 10]
    assert torch.equal(torch.cat(list(iter_minari(tmp_path / "set-v0")))[10:]["action"], two["action"])


def test_a_list_storage_and_a_tensordict_buffer_are_written_too(tmp_path):
    batch = steps([3, 2])
    listed = ReplayBuffer(storage=ListStorage(100))
    listed.extend(batch)
    keyed = TensorDictReplayBuffer(storage=LazyTensorStorage(100))
    keyed.extend(batch)
    for name, rb in {"listed": listed, "keyed": keyed}.items():
        write_minari(rb, tmp_path / name)
        assert_same_bits(torch.cat(list(iter_minari(tmp_path / name))), batch)


def test_reading_twice_keeps_the_trajectories_apart(dataset):
    rb = buffer()
    read_minari(dataset, rb)
    read_minari(dataset, rb)
    assert rb[:]["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 3, 4, 5, 5, 5, 5]


def test_given_spaces_and_metadata_are_written(tmp_path):
    spaces = pytest.importorskip("gymnasium").spaces
    write_minari(
        steps([3]), tmp_path / "s", dataset_id="a/b-v1", observation_space=spaces.Box(-1, 1, (3,)),
        action_space=spaces.MultiDiscrete([5, 5]), metadata={"author": ["me"]},
    )  # fmt: skip
    found = json.loads((tmp_path / "s" / "data" / "metadata.json").read_text())
    assert (found["dataset_id"], found["author"], found["total_episodes"]) == ("a/b-v1", ["me"], 1)
    assert json.loads(found["action_space"])["nvec"] == [5, 5]
    assert json.loads(found["observation_space"])["high"] == [1, 1, 1]


def test_each_episode_has_its_number_and_its_steps_as_attributes_of_its_group(dataset):
    with opened(dataset) as file:
        found = [dict(file[f"episode_{k}"].attrs) for k in range(3)]
    assert found == [{"id": 0, "total_steps": 3}, {"id": 1, "total_steps": 1}, {"id": 2, "total_steps": 4}]


# ---- what cannot be written ----
def test_keys_without_a_place_are_all_named_and_can_be_left_out(tmp_path):
    batch = steps([3])
    batch["log_prob"], batch["next", "extra"] = torch.zeros(3), torch.zeros(3)
    with pytest.raises(ValueError, match=r"\('next', 'extra'\) has no place.*'log_prob' has no place.*exclude="):
        write_minari(batch, tmp_path / "s")
    assert write_minari(batch, tmp_path / "s", exclude=["log_prob", ("next", "extra")]) == 3


def test_an_observation_that_is_not_the_next_one_is_refused_by_episode_and_step(tmp_path, monkeypatch):
    monkeypatch.setattr("engram.datasets.episodes.BLOCK_BYTES", 100)
    batch = steps([3, 5])
    batch["observation"][5, 1] += 1
    with pytest.raises(ValueError, match="'observation' of step 2 of episode 1"):
        write_minari(filled(batch), tmp_path / "s")
    assert os.listdir(tmp_path) == []


def test_nothing_to_write_and_wrong_arguments_are_errors(tmp_path):
    with pytest.raises(ValueError, match="the buffer is empty"):
        write_minari(buffer(), tmp_path / "s")
    with pytest.raises(ValueError, match="nothing to write"):
        write_minari([], tmp_path / "s")
    with pytest.raises(TypeError, match="got a int"):
        write_minari(3, tmp_path / "s")
    with pytest.raises(ValueError, match="cannot tell where episodes end"):
        write_minari(steps([3], ids=False).exclude(("next", "done")), tmp_path / "s")
    with pytest.raises(ValueError, match="ndim=2"):
        read_minari(FROM_MINARI, buffer(100, ndim=2))
    with pytest.raises(TypeError, match="read into a buffer"):
        read_minari(FROM_MINARI, [])
    assert os.listdir(tmp_path) == []


# ---- files that are not what they should be ----
def change(dataset, damage):
    with opened(dataset) as file:
        damage(file)


def replaced(file, name, values, **options):
    del file[name]
    file.create_dataset(name, data=values, **options)


DAMAGES = {
    "is missing": lambda f: f.__delitem__("episode_1/actions"),
    "does not belong to an episode": lambda f: f.create_dataset("episode_1/extra", data=[1]),
    "which is not an episode": lambda f: f.create_group("stray"),
    "it must have 2": lambda f: replaced(f, "episode_1/observations", np.zeros((1, 3), np.float32)),
    r"float64 \[3\] a step, but float32 \[3\] before": lambda f: replaced(
        f, "episode_1/observations", np.zeros((2, 3))
    ),
    r"float32 \[4\] a step, but float32 \[3\] before": lambda f: replaced(
        f, "episode_1/observations", np.zeros((2, 4), np.float32)
    ),
    "holds objects or strings": lambda f: replaced(f, "episode_1/observations", ["a", "b"]),
    "is a single value": lambda f: replaced(f, "episode_1/actions", 3),
    "where a dataset belongs": lambda f: (f.__delitem__("episode_1/actions"), f.create_group("episode_1/actions")),
    "is a link to somewhere else": lambda f: (
        f.__delitem__("episode_1/actions"),
        f["episode_1"].__setitem__("actions", h5py.ExternalLink("/etc/hostname", "x")),
    ),
    "link to somewhere": lambda f: (
        f.__delitem__("episode_1/actions"),
        f["episode_1"].__setitem__("actions", h5py.SoftLink("/episode_0/actions")),
    ),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_a_wrong_episode_is_named_with_file_and_key_and_earlier_ones_stay(dataset, monkeypatch, said):
    monkeypatch.setattr("engram.datasets.episodes.BLOCK_BYTES", 1)
    change(dataset, DAMAGES[said])
    rb = buffer()
    with pytest.raises(DatasetError, match=said) as caught:
        read_minari(dataset, rb)
    assert "main_data.hdf5" in str(caught.value)
    assert caught.value.rows_read == len(rb) == (0 if "not an episode" in said else 2)
    if "not an episode" not in said:
        assert "episode_1" in str(caught.value) and "2 steps were taken" in str(caught.value)


def test_a_key_that_only_a_later_episode_has_is_named(tmp_path):
    shutil.copytree(FROM_MINARI, tmp_path / "s")
    change(tmp_path / "s", lambda f: f.create_dataset("episode_1/observations/t/more", data=[1, 2, 3, 4]))
    with pytest.raises(DatasetError, match=r"episode_1/observations/t holds \[.*'more'\]"):
        read_minari(tmp_path / "s", buffer())


def test_values_in_other_files_are_never_read(dataset, tmp_path):
    (tmp_path / "secret").write_bytes(bytes(1000))

    def external(file):
        del file["episode_0/actions"]
        file.create_dataset("episode_0/actions", (3, 2), np.int64, external=[(str(tmp_path / "secret"), 0, 48)])

    def virtual(file):
        layout = h5py.VirtualLayout((3, 2), np.int64)
        layout[:] = h5py.VirtualSource(str(tmp_path / "secret"), "x", (3, 2))
        del file["episode_0/actions"]
        file.create_virtual_dataset("episode_0/actions", layout)

    for damage in (external, virtual):
        copy = tmp_path / damage.__name__
        shutil.copytree(dataset, copy)
        change(copy, damage)
        with pytest.raises(DatasetError, match="values in other files"):
            read_minari(copy, buffer())


def test_a_size_that_the_file_does_not_have_is_not_allocated(dataset):
    huge = {"chunks": (1024, 2), "fillvalue": 0}

    def unwritten(file):
        del file["episode_0/actions"]
        file.create_dataset("episode_0/actions", (1 << 40, 2), np.int64, **huge)
        del file["episode_0/rewards"]
        file.create_dataset("episode_0/rewards", (1 << 40,), np.float32, chunks=(1024,), compression="gzip")

    change(dataset, unwritten)
    with pytest.raises(DatasetError, match="but 0 bytes in the file"):
        read_minari(dataset, buffer())


def test_filters_that_would_be_loaded_from_elsewhere_are_refused(dataset):
    def filtered(file):
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((3, 2))
        plist.set_filter(32013, h5py.h5z.FLAG_OPTIONAL, (0,) * 4)
        del file["episode_0/actions"]
        space = h5py.h5s.create_simple((3, 2))
        h5py.h5d.create(file["episode_0"].id, b"actions", h5py.h5t.STD_I64LE, space, plist)

    change(dataset, filtered)
    with pytest.raises(DatasetError, match="32013"):
        read_minari(dataset, buffer())


def test_metadata_that_disagree_or_are_damaged_are_errors(dataset):
    metadata = dataset / "data" / "metadata.json"
    made = json.loads(metadata.read_text())
    for text, said in {
        json.dumps({**made, "total_episodes": 4}): "has 3 episodes, metadata.json says 4",
        "{": "is no JSON",
        "[]": "is no JSON object",
    }.items():
        metadata.write_text(text)
        with pytest.raises(DatasetError, match=said):
            read_minari(dataset, buffer())
    with pytest.raises(FileNotFoundError):
        read_minari(dataset / "nowhere", buffer())


def test_a_key_that_would_hide_another_is_refused(dataset):
    def clash(file):
        for e in range(3):
            values = file[f"episode_{e}/observations"][:]
            del file[f"episode_{e}/observations"]
            file[f"episode_{e}/observations/action"] = values

    change(dataset, clash)
    with pytest.raises(DatasetError, match="would be the key 'action'"):
        read_minari(dataset, buffer())


def test_steps_that_do_not_fit_the_buffer_leave_it_as_it_was(dataset):
    rb = buffer()
    rb.extend(TensorDict({"x": torch.zeros(2)}, [2]))
    with pytest.raises(DatasetError, match="do not fit the buffer"):
        read_minari(dataset, rb)
    assert len(rb) == 2


def test_a_dataset_larger_than_the_buffer_is_read_with_a_warning(dataset):
    rb = buffer(5)
    with pytest.warns(UserWarning, match="has 8 steps, the buffer keeps 5"):
        assert read_minari(dataset, rb) == 8
    assert rb.storage.get(torch.arange(5))["collector", "traj_ids"].sort()[0].tolist() == [1, 2, 2, 2, 2]
