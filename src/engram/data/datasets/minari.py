"""Minari datasets: a folder with `data/main_data.hdf5`, a group an episode, and `data/metadata.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from engram.data.datasets.aside import new_folder
from engram.data.datasets.h5_files import reading, writing
from engram.data.datasets.minari_episodes import Episodes, together
from engram.data.datasets.minari_writing import EpisodeWriter
from engram.data.datasets.progress import progress_bar
from engram.data.datasets.sources import source_of
from engram.data.datasets.spaces import dumped, space_json
from engram.data.datasets.taking import check_buffer, next_trajectory, take
from engram.data.replay_buffers.episodes import DONE, Key, path_of
from engram.errors import DatasetError

FILE, METADATA = "main_data.hdf5", "metadata.json"
_LAYOUT_OF = "0.5.4"  # the Minari whose files these are like
_MOST_METADATA = 64 << 20


def read_minari(
    path: str | os.PathLike[str], buffer: Any, *, infos: bool = True, exclude: Sequence[Key] = (), progress: bool = True
) -> int:
    """Takes the episodes of a Minari dataset into a buffer; returns the number of steps.

    Steps are those of `iter_minari`, with trajectory ids that go on behind the buffer's own. They are written in blocks
    of about 16 MB: where one is refused, those before it stay, and it leaves nothing behind.

    Args:
        path: the dataset's folder, the `data` folder in it, or `main_data.hdf5`.
        buffer: with a storage of ndim=1.
        infos: take `infos` in, too.
        exclude: keys (as engram has them) to leave out.
        progress: show a bar, if there is a terminal.

    Raises:
        DatasetError: a file is damaged, or an episode has other keys, shapes or dtypes than the first; the message
            names file, episode and key, `rows_read` says how many steps were taken in.
        ImportError: h5py is missing: `pip install "engram[h5]"`.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/pole-v0"
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> done = torch.tensor([[False], [True]])
        >>> follows = {"observation": torch.ones(2, 4), "reward": torch.ones(2, 1), "terminated": done, "done": done}
        >>> steps = TensorDict({"observation": torch.ones(2, 4), "action": torch.ones(2), "next": follows}, [2])
        >>> write_minari(steps, folder)
        2
        >>> read_minari(folder, rb), rb[:]["next", "terminated"].flatten().tolist()
        (2, [False, True])
    """
    check_buffer(buffer)
    with _opened(path, infos, exclude) as (episodes, total):
        first = next_trajectory(buffer.storage)
        return take(episodes.blocks(first), buffer, episodes.path, total, progress)


def iter_minari(
    path: str | os.PathLike[str], *, infos: bool = True, exclude: Sequence[Key] = ()
) -> Iterator[TensorDict]:
    """The episodes of a Minari dataset, one after the other: TED batches `[steps]`.

    The T + 1 observations are the root's (the first T) and those under `"next"` (the last T); so are `infos`, as
    `("info", ...)`. `observation` is a Box's key, those of a Dict are its own, those of a Tuple `("observation", "0")`
    and so on. Rewards and flags are `[T, 1]`; values and dtypes are those of the file. Episodes are numbered from 0 in
    `("collector", "traj_ids")`.

    Raises:
        DatasetError, ImportError: as `read_minari`.
    """
    with _opened(path, infos, exclude) as (episodes, _):
        for number, piece in enumerate(episodes.pieces(None)):
            yield together(episodes.roles, [piece], [number])


class _opened:
    """The episodes of a dataset and the number of their steps, for a `with`."""

    def __init__(self, path: str | os.PathLike[str], infos: bool, exclude: Sequence[Key]) -> None:
        self._file = _find(Path(path))
        self._metadata = _read_metadata(self._file.with_name(METADATA))
        self._infos, self._exclude = infos, tuple(path_of(key, "exclude") for key in exclude)

    def __enter__(self) -> tuple[Episodes, int | None]:
        self._context = reading(self._file)
        source = self._context.__enter__()
        try:
            episodes = Episodes(source, self._infos, self._exclude)
            wanted = self._metadata.get("total_episodes")
            if wanted is not None and wanted != len(episodes):
                raise DatasetError(str(self._file), f"has {len(episodes)} episodes, {METADATA} says {wanted}")
        except BaseException:
            self._context.__exit__(None, None, None)
            raise
        total = self._metadata.get("total_steps")
        return episodes, total if type(total) is int else None

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def _find(path: Path) -> Path:
    for file in (path / "data" / FILE, path / FILE, path):
        if file.is_file():
            return file
    if (path / "data" / METADATA).is_file():
        raise DatasetError(str(path), f"there is no data/{FILE}: only Minari's HDF5 format is read, not Arrow")
    raise FileNotFoundError(2, f"there is no Minari dataset (data/{FILE})", str(path))


def _read_metadata(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    if file.stat().st_size > _MOST_METADATA:
        raise DatasetError(str(file), f"is longer than {_MOST_METADATA} bytes")
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DatasetError(str(file), f"is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise DatasetError(str(file), "is no JSON object")
    return found


def write_minari(
    source: Any,
    path: str | os.PathLike[str],
    *,
    dataset_id: str | None = None,
    observation_space: Any = None,
    action_space: Any = None,
    metadata: Mapping[str, Any] | None = None,
    exclude: Sequence[Key] = (),
    end_key: Key = DONE,
    traj_key: Key | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> int:
    """Writes trajectories as a Minari dataset; returns the number of steps.

    The folder appears whole or not at all. A trajectory is an episode; one that has not ended is written with its last
    step truncated, as Minari does. Stored rows are written as they are, oldest first (transforms are not applied),
    while writers of this process wait. Trajectory ids, `index`, the flags at the root and `("next", "done")` are not
    written: they follow from the rest.

    Args:
        source: a buffer or storage; a TensorDict `[time]` or `[envs, time]`, or an iterable of such, as a collector. Of
            an iterable, trajectories are kept in memory until they end.
        path: the folder to make.
        dataset_id: Minari's name of it; the folder's name.
        observation_space, action_space: gymnasium's; else the widest that hold the stored values.
        metadata: more entries for `metadata.json`: `author`, `description`, `env_spec` (a string of JSON), ...
        exclude: keys to leave out.
        end_key, traj_key: what ends a trajectory, as for `SliceSampler`.
        overwrite: replace the Minari dataset at `path`.
        progress: show a bar, if there is a terminal.

    Raises:
        ValueError: nothing to write, keys without a place in this format (all are listed), or an observation that is
            not the one after the step before.
        FileExistsError: there is something at `path`.
        ImportError: h5py is missing: `pip install "engram[h5]"`.
    """
    folder, total = Path(path), 0
    found = source_of(source, end_key, traj_key, exclude)
    spaces = {"observation_space": observation_space, "action_space": action_space}
    given = {name: space_json(space) for name, space in spaces.items() if space is not None}
    with (
        new_folder(folder, overwrite, _is_dataset) as made,
        progress_bar(f"writing {folder}", found.total, progress) as advance,
    ):
        (made / "data").mkdir()
        with writing(made / "data" / FILE) as file:
            writer = EpisodeWriter(file.id)
            for block in found.blocks():
                total += writer.write(block, advance)
        described = {
            "total_episodes": writer.episodes,
            "total_steps": total,
            "data_format": "hdf5",
            "jpeg_encoding": False,
            **{name: dumped(space) for name, space in {**writer.spaces(), **given}.items()},
            "dataset_size": round((made / "data" / FILE).stat().st_size / 1e6, 1),
            "dataset_id": folder.name if dataset_id is None else dataset_id,
            "minari_version": _LAYOUT_OF,
            **(metadata or {}),
        }
        (made / "data" / METADATA).write_text(json.dumps(described))
    return total


def _is_dataset(path: Path) -> bool:
    return {p.name for p in path.iterdir()} == {"data"} and (path / "data" / METADATA).is_file()
