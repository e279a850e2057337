"""LeRobot datasets in."""

import json

import numpy as np
import pytest
import torch

from contracts.each import each
from data.datasets.lerobot_files import CAMERA, TASKS, columns_of, write
from engram import pytree
from engram.data import LazyTensorStorage, ReplayBuffer, SliceSampler, Text
from engram.data.datasets import iter_lerobot, lerobot_info, read_lerobot
from engram.errors import DatasetError

pa = pytest.importorskip("pyarrow", reason='Parquet needs pyarrow: pip install "engram[parquet]"')
pq = pytest.importorskip("pyarrow.parquet")


def read(folder, **options):
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    n = read_lerobot(folder, rb, **options)
    assert n == len(rb)
    return rb[:]


@each("files", [1, 2, 3])
@each("block", [1, 100, 1 << 20])
def test_steps_have_the_observation_of_the_frame_after_within_their_episode(tmp_path, monkeypatch, files, block):
    monkeypatch.setattr("engram.datasets.episodes.BLOCK_BYTES", block)
    found = read(write(tmp_path, files=files))
    columns = columns_of((3, 1, 4))
    assert found["observation", "state"][:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert found["next", "observation", "state"][:, 0].tolist() == [1, 2, 2, 3, 5, 6, 7, 7]
    assert found["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    np.testing.assert_array_equal(found["observation", "grid"].numpy(), columns["observation.grid"])
    np.testing.assert_array_equal(found["action"].numpy(), columns["action"].reshape(-1, 1))
    np.testing.assert_array_equal(found["next", "reward"].numpy(), columns["next.reward"].reshape(-1, 1))
    for name in ("timestamp", "frame_index", "episode_index", "task_index"):
        np.testing.assert_array_equal(found[name].numpy(), columns[name])
    assert "index" not in found.keys()


def flags_of(batch):
    return ["".join("tc"[i] if row[i] else "-" for i in (0, 1)) for row in zip(
        batch["next", "terminated"].flatten().tolist(), batch["next", "truncated"].flatten().tolist(), strict=True
    )]  # fmt: skip


@each("block", [1, 1 << 20])
@each(
    ("last_step", "states", "flags"),
    [
        ("truncated", [0, 1, 2, 3, 4, 5, 6, 7], ["--", "--", "-c", "-c", "--", "--", "--", "-c"]),
        ("terminated", [0, 1, 2, 3, 4, 5, 6, 7], ["--", "--", "t-", "t-", "--", "--", "--", "t-"]),
        ("drop", [0, 1, 4, 5, 6], ["--", "-c", "--", "--", "-c"]),
    ],
)
def test_last_frame_without_a_flag_is_read_as_the_caller_says(tmp_path, monkeypatch, block, last_step, states, flags):
    monkeypatch.setattr("engram.datasets.episodes.BLOCK_BYTES", block)
    found = read(write(tmp_path), last_step=last_step)
    assert (found["observation", "state"][:, 0].tolist(), flags_of(found)) == (states, flags)
    assert torch.equal(found["next", "done"], found["next", "terminated"] | found["next", "truncated"])
    assert not found["done"].any()


def test_flags_of_the_dataset_are_kept(tmp_path):
    done = np.array([0, 0, 1, 0, 0, 0, 0, 1], bool)
    folder = write(tmp_path, flags={"next.done": done})
    assert flags_of(read(folder)) == ["--", "--", "t-", "-c", "--", "--", "--", "t-"]
    found = read(folder, last_step="drop")
    assert found["observation", "state"][:, 0].tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert flags_of(read(folder, last_step="terminated", exclude=[("next", "done")]))[3] == "t-"


def test_truncated_frame_of_the_dataset_is_never_terminated(tmp_path):
    truncated = np.array([0, 0, 1, 0, 0, 0, 0, 0], bool)
    found = read(write(tmp_path, flags={"next.truncated": truncated, "next.done": truncated}), last_step="terminated")
    assert flags_of(found) == ["--", "--", "-c", "t-", "--", "--", "--", "t-"]


def test_tasks_are_texts_of_one_width(tmp_path):
    folder = write(tmp_path)
    texts = read(folder)["task"]
    assert texts.dtype == torch.uint8 and texts.shape == (8, len(TASKS[1].encode()))
    assert Text(texts.shape[1]).decode(texts[3]) == TASKS[1] and Text(texts.shape[1]).decode(texts[4]) == TASKS[0]
    assert lerobot_info(folder).tasks == {0: TASKS[0], 1: TASKS[1]}
    assert "task" not in read(folder, exclude=["task"]).keys()


def test_tasks_of_a_named_index_are_found(tmp_path):
    folder = write(tmp_path)
    pq.write_table(pa.table({"task": TASKS, "task_index": [1, 0]}), folder / "meta/tasks.parquet")
    assert lerobot_info(folder).tasks == {1: TASKS[0], 0: TASKS[1]}


def test_video_frames_are_references(tmp_path):
    folder = write(tmp_path)
    found, camera = read(folder), ("observation", "images", "top")
    assert found[(*camera, "file_index")].tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    np.testing.assert_allclose(found[(*camera, "timestamp")].numpy(), [0, 0.1, 0.2, 7, 14, 14.1, 14.2, 14.3], rtol=1e-6)
    following = found[("next", *camera, "timestamp")].numpy()
    np.testing.assert_allclose(following, [0.1, 0.2, 0.2, 7, 14.1, 14.2, 14.3, 14.3], rtol=1e-6)
    assert lerobot_info(folder).video_file(CAMERA, 0, 2) == folder / f"videos/{CAMERA}/chunk-000/file-002.mp4"
    with pytest.raises(KeyError, match=r"has no video 'action'"):
        lerobot_info(folder).video_file("action", 0, 0)
    assert ("observation", "images") not in read(folder, exclude=[("observation", "images")]).keys(True)


@pytest.mark.parametrize("name", ["../../../outside", "/etc", "a/b"])
def test_no_video_is_named_outside_of_the_dataset(tmp_path, name):
    folder = write(tmp_path)
    said = json.loads((folder / "meta/info.json").read_text())
    said["features"][name] = {"dtype": "video", "shape": [3, 4, 4]}
    (folder / "meta/info.json").write_text(json.dumps(said))
    with pytest.raises(DatasetError, match="a video whose name is none of a folder"):
        read(folder)
    with pytest.raises(KeyError, match="has no video"):
        lerobot_info(folder).video_file(name, 0, 0)


def test_episodes_come_one_by_one_and_slices_keep_to_them(tmp_path, monkeypatch):
    monkeypatch.setattr("engram.datasets.episodes.BLOCK_BYTES", 300)
    folder = write(tmp_path, files=2)
    assert [len(episode) for episode in iter_lerobot(folder)] == [3, 1, 4]
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=3), batch_size=60)
    assert read_lerobot(folder, rb) == 8 and read_lerobot(folder, rb) == 8
    drawn = rb.sample()["collector", "traj_ids"].reshape(-1, 3)
    assert (drawn == drawn[:, :1]).all() and set(drawn[:, 0].tolist()) <= {0, 2, 3, 5}


def test_every_feature_can_be_left_out(tmp_path):
    folder = write(tmp_path)
    keys = [path for path, _ in pytree.describe(read(folder), 1)[1] if path[0] != "next"]
    for key in keys:
        if key not in (("done",), ("terminated",), ("truncated",), ("collector", "traj_ids")):
            assert key not in read(folder, exclude=[key[:2]]).keys(True)


def swapped(name, a, b):
    columns = columns_of((3, 1, 4))
    columns[name][[a, b]] = columns[name][[b, a]]
    return {name: columns[name]}


@each(("given", "said"),
    [
        ({"codebase_version": "v2.1"}, r"info\.json: says codebase_version 'v2\.1'; engram reads v3\.0"),
        ({"total_frames": 9}, r"meta/episodes: has 8 frames, meta/info\.json says 9"),
        ({"total_episodes": 2}, r"meta/episodes: has 3 episodes, meta/info\.json says 2"),
        ({"total_frames": -1}, r"says total_frames -1 and total_episodes 3"),
        ({"features": {"action": {"dtype": "float64", "shape": [1]}}}, r"file-000\.parquet: has 'action' as float32 "),
        ({"features": {"action": {"dtype": "float32", "shape": [2]}}}, r"float32 \[\]; meta/info\.json says .* \[2\]"),
        ({"features": {"gone": {"dtype": "int8", "shape": [1]}}}, r"file-000\.parquet: has no column 'gone'"),
        ({"features": {"x": {"dtype": "image", "shape": [1]}}}, r"'x', whose dtype is 'image'.*exclude=\['x'\]"),
        ({"features": {"task": {"dtype": "int8", "shape": [1]}}}, r"'task', which would be a key beside 'task'"),
        ({"features": {"action.x": {"dtype": "int8", "shape": [1]}}}, r"'action\.x', which would be a key beside 'act"),
        ({"features": {"next.done": {"dtype": "bool", "shape": [2]}}}, r"'next\.done', which is not one flag a frame"),
        ({"features": {"x": 3}}, r"info\.json: has no 'features', each with dtype and shape"),
        ({"columns": swapped("episode_index", 2, 3)}, r"frame 2 of episode 1 where meta/episodes has frame 2 of epis"),
        ({"columns": swapped("frame_index", 5, 6)}, r"frame 2 of episode 2 where meta/episodes has frame 1 of epis"),
        ({"columns": swapped("index", 1, 2)}, r"has index 2 in frame 1 of the dataset; exclude=\['index'\] passes"),
        ({"columns": {"task_index": np.full(8, 5)}}, r"tasks\.parquet: has no task 5, which frames have"),
    ])  # fmt: skip
def test_tables_that_do_not_fit_are_named(tmp_path, given, said):
    with pytest.raises(DatasetError, match=said):
        read(write(tmp_path, **given))


def test_numbers_of_frames_are_passed_over_where_index_is_left_out(tmp_path):
    assert len(read(write(tmp_path, columns=swapped("index", 1, 2)), exclude=["index"])) == 8


def test_dataset_without_frame_index_is_read(tmp_path):
    whole = read(write(tmp_path))
    info = json.loads((tmp_path / "meta/info.json").read_text())
    del info["features"]["frame_index"]
    (tmp_path / "meta/info.json").write_text(json.dumps(info))
    file = tmp_path / "data/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["frame_index"]), file)
    assert (read(tmp_path) == whole.exclude("frame_index")).all()


EPISODES = "meta/episodes/chunk-000/file-000.parquet"


def test_numbers_of_episodes_in_whole_floats_are_read(tmp_path):
    said = {"episode_index": {"dtype": "float32", "shape": [1], "names": None}}
    numbers = columns_of((3, 1, 4))["episode_index"].astype(np.float32)
    file = write(tmp_path, features=said, columns={"episode_index": numbers}) / EPISODES
    table = pq.read_table(file)
    at = table.column_names.index("episode_index")
    pq.write_table(table.set_column(at, "episode_index", pa.array([0.0, 1.0, 2.0])), file)
    assert read(tmp_path)["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    pq.write_table(table.set_column(at, "episode_index", pa.array([0.0, 1.5, 2.0])), file)
    with pytest.raises(DatasetError, match=r"has 'episode_index' as float64 .*, not one whole number"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("begins", "stops", "said"),
    [
        ([0, 3, 4], [3, 4, 8], None),
        ([0, 2, 4], [3, 4, 8], "dataset_from_index 2 of episode 1; with the lengths before it is 3"),
        ([0, 3, 4], [3, 5, 8], "dataset_to_index 5 of episode 1; with the lengths before it is 4"),
    ],
)
def test_ranges_of_episodes_that_overlap_are_named(tmp_path, begins, stops, said):
    file = write(tmp_path) / EPISODES
    table = pq.read_table(file).append_column("dataset_from_index", pa.array(begins))
    pq.write_table(table.append_column("dataset_to_index", pa.array(stops)), file)
    if said is None:
        assert len(read(tmp_path)) == 8
    else:
        with pytest.raises(DatasetError, match=said):
            read(tmp_path)


def test_table_of_episodes_without_rows_is_named(tmp_path):
    file = write(tmp_path) / EPISODES
    pq.write_table(pq.read_table(file).slice(0, 0), file)
    with pytest.raises(DatasetError, match=r"meta/episodes: has no episodes, meta/info\.json says 3"):
        read(tmp_path)


def test_task_with_two_texts_is_named(tmp_path):
    tasks = pa.table({"task": TASKS, "task_index": [0, 0]})
    pq.write_table(tasks, write(tmp_path) / "meta/tasks.parquet")
    with pytest.raises(DatasetError, match=r"tasks\.parquet: has two values of 'task' for 'task_index' 0"):
        read(tmp_path)


def test_table_of_tasks_without_their_numbers_is_named(tmp_path):
    pq.write_table(pa.table({"task": TASKS}), write(tmp_path) / "meta/tasks.parquet")
    with pytest.raises(
        DatasetError, match=r"tasks\.parquet.*has no columns 'task_index' and 'task'; it has \['task'\]"
    ):
        read(tmp_path)


def test_more_frames_than_the_dataset_says_are_refused(tmp_path):
    write(tmp_path)
    (file,) = (tmp_path / "data").rglob("*.parquet")
    table = pq.read_table(file)
    pq.write_table(pa.concat_tables([table, table.slice(0, 1)]), file)
    with pytest.raises(DatasetError, match=r"has more frames than the 8 of meta/info\.json"):
        read(tmp_path, exclude=["index"])


@pytest.mark.parametrize("gone", ["meta/tasks.parquet", "meta/episodes/chunk-000/file-000.parquet"])
def test_missing_table_is_named(tmp_path, gone):
    (write(tmp_path) / gone).unlink()
    with pytest.raises((DatasetError, FileNotFoundError), match=r"tasks\.parquet|meta/episodes: holds no file"):
        read(tmp_path)


def test_missing_file_of_frames_leaves_those_before_it(tmp_path):
    (write(tmp_path, files=3) / "data/chunk-001/file-000.parquet").unlink()
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    with pytest.raises(DatasetError, match=r"data: holds 4 frames, meta/info\.json says 8") as caught:
        read_lerobot(tmp_path, rb)
    assert caught.value.rows_read == len(rb) == 2


def test_large_texts_and_rows_are_refused_unless_allowed(tmp_path):
    folder = write(tmp_path)
    tasks = pa.table({"task_index": np.arange(2), "task": pa.array(["x" * 300_000, "y"])})
    pq.write_table(tasks, folder / "meta/tasks.parquet")
    assert read(folder, max_row_bytes="1MB")["task"].shape == (8, 300_000)
    with pytest.raises(DatasetError, match=r"tasks\.parquet.*max_row_bytes= allows 100 KB"):
        read(folder, max_row_bytes="100KB")
    with pytest.raises(DatasetError, match=r"data/chunk-000|has steps of .* allows 20 bytes|allows 20"):
        read(folder, max_row_bytes=20, exclude=["task"])


def test_folder_without_a_dataset_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no LeRobot dataset \(meta/info\.json\)"):
        read(tmp_path)
    with pytest.raises(ValueError, match=r"last_step is one of 'truncated', 'terminated', 'drop', got 'cut'"):
        read(tmp_path, last_step="cut")
