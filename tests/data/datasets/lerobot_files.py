"""Small datasets in LeRobot's format v3, as LeRobot writes them."""

import json

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason='Parquet needs pyarrow: pip install "engram[parquet]"')
pq = pytest.importorskip("pyarrow.parquet")

CAMERA = "observation.images.top"
TASKS = ["pick the cube", "größer machen"]
FEATURES = {
    "observation.state": {"dtype": "float32", "shape": [2], "names": ["x", "y"]},
    "observation.grid": {"dtype": "uint8", "shape": [2, 2], "names": None},
    "action": {"dtype": "float32", "shape": [1], "names": None},
    CAMERA: {"dtype": "video", "shape": [4, 4, 3], "names": ["height", "width", "channels"]},
    **{name: {"dtype": "float32", "shape": [1], "names": None} for name in ("timestamp", "next.reward")},
    **{
        name: {"dtype": "int64", "shape": [1], "names": None}
        for name in ("frame_index", "episode_index", "index", "task_index")
    },
}


def columns_of(lengths):
    """The columns of episodes of these lengths; states count the frames of the dataset."""
    n = sum(lengths)
    frame = np.concatenate([np.arange(length) for length in lengths])
    episode = np.repeat(np.arange(len(lengths)), lengths)
    number = np.arange(n)
    return {
        "observation.state": np.stack([number, -number], 1).astype(np.float32),
        "observation.grid": np.arange(4 * n, dtype=np.uint8).reshape(n, 2, 2),
        "action": number.astype(np.float32) / 2,
        "next.reward": number.astype(np.float32) * 10,
        "timestamp": (frame / 10).astype(np.float32),
        "frame_index": frame,
        "episode_index": episode,
        "index": number,
        "task_index": episode % 2,
    }


def table_of(columns):
    return pa.table({name: pa.array(values.tolist(), _type(values)) for name, values in columns.items()})


def _type(values):
    kind = pa.from_numpy_dtype(values.dtype)
    for size in values.shape[:0:-1]:
        kind = pa.list_(kind, size) if values.ndim == 2 else pa.list_(kind)
    return kind


def write(folder, lengths=(3, 1, 4), files=1, flags=None, features=None, columns=None, **info):
    """A dataset with episodes of these lengths, spread over some files."""
    columns = columns_of(lengths) | (flags or {}) | (columns or {})
    said = FEATURES | {name: {"dtype": "bool", "shape": [1], "names": None} for name in flags or {}} | (features or {})
    described = {
        "codebase_version": "v3.0", "fps": 10, "robot_type": "arm", "total_episodes": len(lengths),
        "total_frames": sum(lengths), "features": said, "video_path": "../../{video_key.__class__}", **info,
    }  # fmt: skip
    (folder / "meta/episodes/chunk-000").mkdir(parents=True)
    (folder / "meta/info.json").write_text(json.dumps(described))
    tasks = {"task_index": [0, 1], "__index_level_0__": TASKS}
    pq.write_table(pa.table(tasks), folder / "meta/tasks.parquet")
    episodes = len(lengths)
    table = {
        "episode_index": list(range(episodes)), "length": list(lengths), "tasks": [[TASKS[0]]] * episodes,
        f"videos/{CAMERA}/chunk_index": [0] * episodes, f"videos/{CAMERA}/file_index": list(range(episodes)),
        f"videos/{CAMERA}/from_timestamp": [7.0 * i for i in range(episodes)],
        "stats/observation.state/min": [[0.0, 0.0]] * episodes,
    }  # fmt: skip
    pq.write_table(pa.table(table), folder / "meta/episodes/chunk-000/file-000.parquet")
    bounds = np.cumsum([0, *(sum(part) for part in np.array_split(np.array(lengths), files))])
    whole = table_of(columns)
    for i in range(files):
        place = folder / f"data/chunk-{i // 2:03d}"
        place.mkdir(parents=True, exist_ok=True)
        pq.write_table(whole.slice(bounds[i], bounds[i + 1] - bounds[i]), place / f"file-{i % 2:03d}.parquet")
    return folder
