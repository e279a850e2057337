"""LeRobot datasets (format v3): Parquet files of frames, and tables of features, tasks and episodes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import Tensor

from engram import pytree
from engram.datasets.episodes import (
    DONE,
    MAX_ROW_BYTES,
    OBSERVATION,
    REWARD,
    TERMINATED,
    TRAJECTORY,
    TRUNCATED,
    DatasetSize,
    batch_of,
    block_rows,
    check_buffer,
    flag_leaves,
    ingest,
    next_key,
    next_trajectory,
    read_json_object,
    whole_trajectories,
)
from engram.datasets.format import DatasetFormat
from engram.datasets.parquet import column_names, open_parquet, read_texts
from engram.errors import DatasetError
from engram.kernel.tools import human_bytes, parse_bytes, user_path
from engram.pytree import Key, KeyPath, as_path
from engram.specs import Text

INFO = Path("meta") / "info.json"
LastStep = Literal["truncated", "terminated", "drop"]
Ints = npt.NDArray[np.int64]

_LAST_STEPS = ("truncated", "terminated", "drop")
_TASKS, _EPISODES = Path("meta") / "tasks.parquet", Path("meta") / "episodes"
_FILE = re.compile(r"chunk-(\d+)/file-(\d+)\.parquet")
_EPISODE, _FRAME, _TIME, _TASK = "episode_index", "frame_index", "timestamp", "task_index"
_INDEX = "index"  # of a frame in the dataset
_RANGE = ("dataset_from_index", "dataset_to_index")  # of the frames of an episode, where the table has them
_SCALARS = (_EPISODE, _FRAME, _TIME, _TASK)  # one number a frame, without a dimension
_VIDEO_PLACES = ("chunk_index", "file_index", "from_timestamp")
_FLAGS = {".".join(path): path for path in (TERMINATED, TRUNCATED, DONE)}
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.bool, *_INTEGERS, torch.float16, torch.float32, torch.float64)}
_RESERVED: tuple[KeyPath, ...] = (("task",), ("done",), ("terminated",), ("truncated",), ("collector",))


class LeRobotInfo(NamedTuple):
    """The tables of a dataset: what `meta/` says of its frames."""

    folder: Path
    fps: float | None
    robot_type: str | None
    frames: int
    episodes: int
    features: Mapping[str, Mapping[str, Any]]  #: of each feature its `dtype`, `shape` and `names`
    tasks: Mapping[int, str]  #: the text of each `task_index`

    def video_file(self, feature: str, chunk_index: int, file_index: int) -> Path:
        """The file of a video, of which the rows have the numbers.

        Raises:
            KeyError: the dataset has no video of this name.
        """
        if self.features.get(feature, {}).get("dtype") != "video" or "/" in feature or feature in (".", ".."):
            raise KeyError(f"{self.folder} has no video {feature!r}")
        folder = self.folder / "videos" / feature / f"chunk-{int(chunk_index):03d}"
        return folder / f"file-{int(file_index):03d}.mp4"


class Feature(NamedTuple):
    """A feature of a frame that is a column of numbers, and the key that it becomes."""

    name: str
    path: KeyPath
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class VideoPlace(NamedTuple):
    """Where the frames of a video feature are, one entry an episode."""

    path: KeyPath
    chunk: Tensor
    file: Tensor
    start: Tensor  # seconds in the file at which the episode begins


Columns = dict[str, Tensor]


class LeRobotReader:
    """Reads the frames of a dataset as steps, each with the frame after it.

    Raises:
        DatasetError: a table is missing or damaged, or a feature cannot be stored in a row.
    """

    def __init__(
        self, path: str | os.PathLike[str], exclude: Sequence[Key], last_step: LastStep, max_row_bytes: int | str
    ) -> None:
        if last_step not in _LAST_STEPS:
            raise ValueError(f"last_step is one of {', '.join(map(repr, _LAST_STEPS))}, got {last_step!r}")
        self._folder, self._last_step = user_path(path), last_step
        self._excluded = tuple(as_path(key, "exclude") for key in exclude)
        self._allowed = parse_bytes(max_row_bytes, "max_row_bytes")
        self.info = _read_info(self._folder, self._allowed)
        self._features = self._numeric_features()
        self._ids, self._lengths, self._videos = self._read_episodes()
        self._tasks = {} if self._is_excluded(("task",)) else dict(self.info.tasks)
        self._text_width = max((len(text.encode(errors="replace")) for text in self._tasks.values()), default=0)
        row = sum(f.nbytes * (1 + _is_observation(f.path)) for f in self._features) + self._text_width
        if row > self._allowed:
            raise DatasetError(
                str(self._folder),
                f"has steps of {human_bytes(row)}; max_row_bytes= allows {human_bytes(self._allowed)}",
            )
        self._block_rows = block_rows(row)

    # ---- tables ----
    def _is_excluded(self, path: KeyPath) -> bool:
        return any(path[: len(key)] == key for key in self._excluded)

    def _wrong(self, file: Path, reason: str) -> DatasetError:
        return DatasetError(str(self._folder / file), reason)

    def _numeric_features(self) -> list[Feature]:
        """The features that are read from columns; those that only tell the frames apart are read in any case."""
        features, used = [], list(_RESERVED)
        for name, said in self.info.features.items():
            path: KeyPath = tuple(name.split("."))
            if name == _INDEX or (self._is_excluded(path) and name not in _SCALARS):
                continue
            problem = _problem_of(path, said)
            clash = [key for key in used if key[: len(path)] == path or path[: len(key)] == key]
            if clash:
                problem = f"which would be a key beside {pytree.format_key(clash[0])}"
            if problem:
                raise self._wrong(
                    INFO, f"has the feature {name!r}, {problem}; exclude=[{pytree.format_key(path)}] leaves it out"
                )
            used += [path, next_key(path)] if _is_observation(path) else [path]
            if said["dtype"] != "video":
                shape = () if name in _SCALARS else tuple(said["shape"])
                features.append(Feature(name, path, _DTYPES[said["dtype"]], shape))
        # `frame_index` is looked at where it is there: the table of episodes says which frame is which.
        missing = [name for name in (_EPISODE, _TASK, _TIME) if name not in {f.name for f in features}]
        if missing:
            raise self._wrong(INFO, f"has no feature {missing[0]!r}, which every LeRobot dataset has")
        return features

    def _read_episodes(self) -> tuple[Ints, Ints, list[VideoPlace]]:
        """Numbers and lengths of the episodes, and where the frames of their videos are."""
        videos = [
            (name, tuple(name.split(".")))
            for name, said in self.info.features.items()
            if said["dtype"] == "video" and not self._is_excluded(tuple(name.split(".")))
        ]
        names = [_EPISODE, "length", *(f"videos/{name}/{place}" for name, _ in videos for place in _VIDEO_PLACES)]
        files = _numbered_files(self._folder, _EPISODES)
        if all(set(_RANGE) <= {*column_names(self._folder / file)} for file in files):
            names += _RANGE
        parts = [
            [_number_each(block, name, file) for name in names]
            for file in files
            for block in _blocks_of(self._folder / file, names, self._allowed)
        ]
        if not parts:
            raise self._wrong(_EPISODES, f"has no episodes, {INFO} says {self.info.episodes}")
        table = dict(zip(names, (torch.cat(column) for column in zip(*parts, strict=True)), strict=True))
        ids, lengths = table[_EPISODE].numpy(), table["length"].numpy()
        if (np.diff(ids) <= 0).any() or (lengths < 0).any():
            raise self._wrong(
                _EPISODES, "has episodes that are not in the order of their numbers, or of negative length"
            )
        for what, said, found in (
            ("episodes", self.info.episodes, len(ids)),
            ("frames", self.info.frames, int(lengths.sum())),
        ):
            if said != found:
                raise self._wrong(_EPISODES, f"has {found} {what}, {INFO} says {said}")
        for name, bound in zip(_RANGE, (np.cumsum(lengths) - lengths, np.cumsum(lengths)), strict=True):
            wrong = np.flatnonzero(table[name].numpy() != bound) if name in table else np.zeros(0, np.int64)
            if len(wrong):
                i = int(wrong[0])
                raise self._wrong(
                    _EPISODES,
                    f"has {name} {int(table[name][i])} of episode {ids[i]}; with the lengths before it is {bound[i]}",
                )
        return ids, lengths, [VideoPlace(path, *_video_columns(table, name)) for name, path in videos]

    # ---- frames ----
    def blocks(self, first_id: int) -> Iterator[TensorDict]:
        """All steps, in batches of bounded size; episodes are numbered from `first_id` on."""
        return (steps for steps in self._blocks(first_id) if len(steps))

    def _blocks(self, first_id: int) -> Iterator[TensorDict]:
        held: Columns = {}
        for columns in self._frames():
            frames = {name: torch.cat([held[name], values]) for name, values in columns.items()} if held else columns
            # Two frames wait: the one after a step has its observation, the one after that says whether it is the last.
            ready = max(0, len(frames[_EPISODE]) - 2)
            if ready:
                yield self._steps(frames, ready, first_id)
            held = {name: values[ready:].clone() for name, values in frames.items()}
        if held:
            yield self._steps(held, len(held[_EPISODE]), first_id)

    def episodes(self) -> Iterator[TensorDict]:
        """The episodes, each whole, numbered from 0."""
        return whole_trajectories(self.blocks(0))

    def _frames(self) -> Iterator[Columns]:
        """The columns of all frames, in blocks; `episode` is the place of a frame's episode in the table."""
        is_numbered = _INDEX in self.info.features and not self._is_excluded((_INDEX,))
        names = [*(feature.name for feature in self._features), *([_INDEX] if is_numbered else [])]
        stops, start = np.cumsum(self._lengths), 0
        for file in _numbered_files(self._folder, Path("data")):
            for block in _blocks_of(self._folder / file, names, self._allowed):
                for rows in block.split(self._block_rows):
                    columns = {f.name: self._values(rows, f, file) for f in self._features}
                    frames = np.arange(start, start + len(rows))
                    if is_numbered:
                        self._check_index(_number_each(rows, _INDEX, file).numpy(), frames, file)
                    columns["episode"] = torch.from_numpy(self._checked_episodes(columns, frames, stops, file))
                    start += len(rows)
                    yield columns
        if start != self.info.frames:
            raise self._wrong(Path("data"), f"holds {start} frames, {INFO} says {self.info.frames}")

    def _values(self, rows: TensorDict, feature: Feature, file: Path) -> Tensor:
        values: Tensor = rows[feature.path]
        shape = tuple(values.shape[1:])
        if values.dtype != feature.dtype or (shape != feature.shape and {shape, feature.shape} != {(), (1,)}):
            raise self._wrong(
                file,
                f"has {feature.name!r} as {str(values.dtype)[6:]} {list(shape)}; {INFO} says "
                f"{str(feature.dtype)[6:]} {list(feature.shape)}",
            )
        return values.reshape(len(rows), *feature.shape)

    def _checked_episodes(self, columns: Columns, frames: Ints, stops: Ints, file: Path) -> Ints:
        """The places of the frames' episodes in the table; DatasetError where the frames are not those that it says."""
        if len(frames) and frames[-1] >= self.info.frames:
            raise self._wrong(file, f"has more frames than the {self.info.frames} of {INFO}")
        episode: Ints = np.searchsorted(stops, frames, "right")
        number, place = self._ids[episode], frames - (stops - self._lengths)[episode]
        given = columns[_FRAME].numpy() if _FRAME in columns else place
        wrong = np.flatnonzero((columns[_EPISODE].numpy() != number) | (given != place))
        if len(wrong):
            i = int(wrong[0])
            raise self._wrong(
                file,
                f"has frame {int(given[i])} of episode {int(columns[_EPISODE][i])} where {_EPISODES} has "
                f"frame {place[i]} of episode {number[i]}",
            )
        return episode

    def _check_index(self, index: Ints, frames: Ints, file: Path) -> None:
        """DatasetError where the frames are not numbered one after the other."""
        wrong = np.flatnonzero(index != frames)
        if len(wrong):
            i = int(wrong[0])
            raise self._wrong(
                file, f"has {_INDEX} {index[i]} in frame {frames[i]} of the dataset; exclude=['index'] passes over it"
            )

    def _steps(self, frames: Columns, n: int, first_id: int) -> TensorDict:
        """The first `n` frames as steps; those behind them are looked at only."""
        last = torch.ones(len(frames[_EPISODE]), dtype=torch.bool, device="cpu")
        last[:-1] = frames["episode"][1:] != frames["episode"][:-1]
        terminated, truncated, kept = self._ends(frames, last)
        now = torch.nonzero(kept[:n]).flatten()
        after = torch.where(last, 0, 1)[now] + now  # an episode's last frame has none after it
        leaves: dict[KeyPath, Any] = {}
        for feature in self._features:
            if feature.name in _FLAGS or self._is_excluded(feature.path):
                continue
            values = frames[feature.name]
            leaves[feature.path] = values[now].reshape(len(now), 1) if feature.path == REWARD else values[now]
            if _is_observation(feature.path):
                leaves[next_key(feature.path)] = values[after]
        for video in self._videos:
            for of, place in ((now, lambda path: path), (after, next_key)):
                episode = frames["episode"][of]
                leaves[place((*video.path, "chunk_index"))] = video.chunk[episode]
                leaves[place((*video.path, "file_index"))] = video.file[episode]
                leaves[place((*video.path, _TIME))] = video.start[episode] + frames[_TIME][of]
        if not self._is_excluded(("task",)):
            leaves["task",] = self._texts(frames[_TASK][now].numpy())
        leaves |= flag_leaves(terminated[now].numpy(), truncated[now].numpy())
        leaves[TRAJECTORY] = frames["episode"][now] + first_id
        return batch_of(leaves, len(now))

    def _ends(self, frames: Columns, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`terminated` and `truncated` of the frames, and which of them are steps; bool [n] each."""
        none = torch.zeros_like(last)
        flags = {path: frames[name].reshape(-1).bool() for name, path in _FLAGS.items() if name in frames}
        truncated = flags.get(TRUNCATED, none).clone()
        terminated = flags.get(TERMINATED, flags.get(DONE, none) & ~truncated).clone()
        if self._last_step == "terminated":
            return terminated | (last & ~truncated), truncated, ~none
        unknown = last & ~terminated  # the observation after it is in no file
        if self._last_step == "truncated":
            return terminated, truncated | unknown, ~none
        truncated[:-1] |= unknown[1:] & ~last[:-1] & ~terminated[:-1]
        return terminated, truncated, ~unknown

    def _texts(self, tasks: Ints) -> Tensor:
        """The texts of tasks as uint8 [n, width]."""
        numbers, where = np.unique(tasks, return_inverse=True)
        absent = [int(number) for number in numbers if int(number) not in self._tasks]
        if absent:
            raise self._wrong(_TASKS, f"has no task {absent[0]}, which frames have as their {_TASK!r}")
        try:
            texts = Text(max(1, self._text_width)).encode([self._tasks[int(number)] for number in numbers])
        except ValueError as error:
            raise self._wrong(_TASKS, f"{error}; exclude=['task'] leaves the texts out") from error
        return texts[torch.from_numpy(where)]


def _problem_of(path: KeyPath, said: Mapping[str, Any]) -> str | None:
    """Why a feature cannot be read."""
    if said["dtype"] == "video" and "/" in ".".join(path):
        return "a video whose name is none of a folder"
    if said["dtype"] not in (*_DTYPES, "video"):
        return f"whose dtype is {said['dtype']!r}: engram reads numbers and bools, and videos as references"
    if path in _FLAGS.values() and math.prod(said["shape"]) != 1:
        return "which is not one flag a frame"
    return None


def _is_observation(path: KeyPath) -> bool:
    return path[:1] == OBSERVATION


def _video_columns(table: Columns, name: str) -> tuple[Tensor, Tensor, Tensor]:
    chunk, file, start = (table[f"videos/{name}/{place}"] for place in _VIDEO_PLACES)
    return chunk, file, start.double()


def _number_each(block: TensorDict, name: str, file: Path) -> Tensor:
    """A column of numbers, one a row: int64, but for times. Floats that are whole numbers are numbers, too."""
    values: Tensor = block[tuple(name.split("."))]
    is_time = name.endswith("timestamp") and values.is_floating_point()
    if values.shape != block.shape or not (is_time or torch.equal(values.long().to(values.dtype), values)):
        raise DatasetError(
            str(file), f"has {name!r} as {str(values.dtype)[6:]} {list(values.shape[1:])}, not one whole number"
        )
    return values if is_time else values.long()


def _blocks_of(file: Path, names: Sequence[str], allowed: int) -> Iterator[TensorDict]:
    with open_parquet(file, names, allowed) as opened:
        yield from opened.blocks(None, None)


def _numbered_files(folder: Path, below: Path) -> list[Path]:
    """The files `chunk-000/file-000.parquet`, ... of a folder, in the order of their numbers."""
    numbered = []
    for path in (folder / below).glob("chunk-*/file-*.parquet"):
        match = _FILE.fullmatch(path.relative_to(folder / below).as_posix())
        if match:
            numbered.append((int(match[1]), int(match[2]), path.relative_to(folder)))
    if not numbered:
        raise DatasetError(str(folder / below), "holds no file chunk-*/file-*.parquet")
    return [path for *_, path in sorted(numbered)]


def _read_info(folder: Path, allowed: int) -> LeRobotInfo:
    if not (folder / INFO).is_file():
        raise FileNotFoundError(2, f"there is no LeRobot dataset ({INFO})", str(folder))
    said, file = read_json_object(folder / INFO), str(folder / INFO)
    version = said.get("codebase_version")
    if not isinstance(version, str) or not version.startswith("v3."):
        raise DatasetError(
            file, f"says codebase_version {version!r}; engram reads v3.0: convert the dataset with LeRobot's script"
        )
    features = said.get("features")
    if not isinstance(features, dict) or not all(_is_feature(one) for one in features.values()):
        raise DatasetError(file, "has no 'features', each with dtype and shape")
    frames, episodes = said.get("total_frames"), said.get("total_episodes")
    if not (type(frames) is int and frames >= 0 and type(episodes) is int and episodes >= 0):
        raise DatasetError(file, f"says total_frames {frames!r} and total_episodes {episodes!r}, which are not counts")
    # pandas wrote the texts, which are the index of its table, with or without a name
    tasks = read_texts(folder / _TASKS, _TASK, ("task", "__index_level_0__"), allowed)
    return LeRobotInfo(folder, said.get("fps"), said.get("robot_type"), frames, episodes, features, tasks)


def _is_feature(said: Any) -> bool:
    shape = said.get("shape") if isinstance(said, dict) else None
    return (
        isinstance(shape, list | tuple)
        and all(type(size) is int and size >= 0 for size in shape)
        and isinstance(said.get("dtype"), str)
    )


def read_lerobot(
    path: str | os.PathLike[str],
    buffer: Any,
    *,
    last_step: LastStep = "truncated",
    exclude: Sequence[Key] = (),
    progress: bool = True,
    max_row_bytes: int | str = MAX_ROW_BYTES,
) -> int:
    """Reads the frames of a LeRobot dataset into a buffer; returns the number of steps.

    Steps are those of `iter_lerobot`, with trajectory ids above the buffer's own. They are written in blocks of about
    16 MB: where one is refused, those before it stay, and nothing of it is written.

    Args:
        path: the dataset's folder, with `meta` and `data` in it, in the format v3.
        buffer: a buffer whose storage has ndim=1.
        last_step: what an episode's last frame is, unless the dataset says that it is terminated. The observation after
            it is in no file. "truncated", "terminated": it is a step, and the next observation is its own; "drop": it
            is left out, and the one before it is truncated.
        exclude: keys (as engram has them) to leave out; a key of several entries stands for all of them.
        progress: show a progress bar, if standard error is a terminal.
        max_row_bytes: the most that a row may take while it is decoded, and a page while it is decompressed: bytes, or
            "2GB".

    Raises:
        DatasetError: a file is missing, damaged or does not fit the others, or a feature has no numbers, bools or
            videos; the message names file and feature, `rows_read` is the number of steps that were written to the
            buffer.
        FileNotFoundError: there is no LeRobot dataset.
        ImportError: pyarrow is missing: `pip install "engram[parquet]"`.

    Example:
        >>> import json, pathlib, tempfile
        >>> import pyarrow, pyarrow.parquet
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> frames = {"action": [0.5, 1.5, 2.5], "timestamp": [0.0, 0.1, 0.0], "frame_index": [0, 1, 0]}
        >>> frames |= {"episode_index": [0, 0, 1], "task_index": [0, 0, 0], "observation.state": [[1.0], [2.0], [3.0]]}
        >>> kinds = {name: "int64" if name.endswith("index") else "float64" for name in frames}
        >>> features = {name: {"dtype": kind, "shape": [1]} for name, kind in kinds.items()}
        >>> said = {"codebase_version": "v3.0", "total_frames": 3, "total_episodes": 2, "features": features}
        >>> tables = {"data": frames, "meta/episodes": {"episode_index": [0, 1], "length": [2, 1]}}
        >>> files = {f"{name}/chunk-000/file-000.parquet": table for name, table in tables.items()}
        >>> files["meta/tasks.parquet"] = {"task_index": [0], "task": ["push"]}
        >>> for name, table in files.items():
        ...     (folder / name).parent.mkdir(parents=True, exist_ok=True)
        ...     pyarrow.parquet.write_table(pyarrow.table(table), folder / name)
        >>> (folder / "meta/info.json").write_text(json.dumps(said)) > 0
        True
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> read_lerobot(folder, rb), rb[:]["next", "observation", "state"].flatten().tolist()
        (3, [2.0, 2.0, 3.0])
    """
    check_buffer(buffer)
    reader = LeRobotReader(path, exclude, last_step, max_row_bytes)
    blocks = reader.blocks(next_trajectory(buffer.storage))
    return ingest(blocks, buffer, user_path(path), reader.info.frames, progress)


def iter_lerobot(
    path: str | os.PathLike[str],
    *,
    last_step: LastStep = "truncated",
    exclude: Sequence[Key] = (),
    max_row_bytes: int | str = MAX_ROW_BYTES,
) -> Iterator[TensorDict]:
    """The episodes of a LeRobot dataset, one after the other: TED batches `[steps]`.

    Dots in a feature's name make nested keys: `("observation", "state")`, `"action"`, `("next", "reward")`.
    Observations are under `"next"`, too, as the frame after has them. A video is a reference: `chunk_index`,
    `file_index` and `timestamp` (seconds in the file) under its key; `lerobot_info(path).video_file` names the file.
    `"task"` is the task's text, uint8 `[steps, width]`, which `engram.data.Text(width).decode` reads. Episodes are
    numbered from 0 in `("collector", "traj_ids")`. The feature `index` is left out: buffers have one of their own.

    Raises:
        DatasetError, FileNotFoundError, ImportError: as `read_lerobot`.

    Example:
        >>> import json, pathlib, tempfile
        >>> import pyarrow, pyarrow.parquet
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> frames = {"action": [0.5, 1.5, 2.5], "timestamp": [0.0, 0.1, 0.0], "frame_index": [0, 1, 0]}
        >>> frames |= {"episode_index": [0, 0, 1], "task_index": [0, 0, 0], "observation.state": [[1.0], [2.0], [3.0]]}
        >>> kinds = {name: "int64" if name.endswith("index") else "float64" for name in frames}
        >>> features = {name: {"dtype": kind, "shape": [1]} for name, kind in kinds.items()}
        >>> said = {"codebase_version": "v3.0", "total_frames": 3, "total_episodes": 2, "features": features}
        >>> tables = {"data": frames, "meta/episodes": {"episode_index": [0, 1], "length": [2, 1]}}
        >>> files = {f"{name}/chunk-000/file-000.parquet": table for name, table in tables.items()}
        >>> files["meta/tasks.parquet"] = {"task_index": [0], "task": ["push"]}
        >>> for name, table in files.items():
        ...     (folder / name).parent.mkdir(parents=True, exist_ok=True)
        ...     pyarrow.parquet.write_table(pyarrow.table(table), folder / name)
        >>> (folder / "meta/info.json").write_text(json.dumps(said)) > 0
        True
        >>> from engram.data import Text
        >>> [Text(4).decode(episode["task"]) for episode in iter_lerobot(folder)]
        [['push', 'push'], ['push']]
    """
    yield from LeRobotReader(path, exclude, last_step, max_row_bytes).episodes()


def lerobot_info(path: str | os.PathLike[str], *, max_row_bytes: int | str = MAX_ROW_BYTES) -> LeRobotInfo:
    """The tables of a LeRobot dataset: features, tasks, the place of its videos; errors as `read_lerobot`.

    `lerobot_info(path).tasks[0]` is the text of task 0, `.video_file(name, chunk_index, file_index)` a file of a video.
    """
    return _read_info(user_path(path), parse_bytes(max_row_bytes, "max_row_bytes"))


def lerobot_size(path: str | os.PathLike[str]) -> DatasetSize:
    """Frames and episodes of a dataset; errors as `read_lerobot`."""
    info = lerobot_info(path)
    return DatasetSize(info.frames, info.episodes)


DATASET_FORMAT = DatasetFormat(
    kind="LeRobot dataset",
    batches=iter_lerobot,
    size=lerobot_size,
    is_folder=lambda place: (place / INFO).is_file(),
)
