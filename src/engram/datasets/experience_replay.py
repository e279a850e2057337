"""Replay buffers over the files of a dataset: `MinariExperienceReplay`, `D4RLExperienceReplay`."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, pad_sequence

from engram.data import ImmutableDatasetWriter, LazyMemmapStorage, TensorDictReplayBuffer
from engram.datasets.episodes import MAX_ROW_BYTES, TRAJECTORY, whole_trajectories
from engram.datasets.h5_files import open_foreign
from engram.datasets.hdf5 import FlatReader, iter_hdf5
from engram.datasets.minari import _open_episodes, iter_minari
from engram.errors import DatasetError
from engram.kernel.tools import packages, user_path

PathLike = str | os.PathLike[str]


class DatasetReplay(TensorDictReplayBuffer):
    """A buffer of all steps of a dataset, which cannot be written; its rows are in a temporary file.

    Subclasses say where a dataset lies and how it is read.
    """

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None,
        *,
        root: PathLike | None,
        download: bool | str,
        sampler: Any,
        writer: Any,
        collate_fn: Callable[[Any], Any] | None,
        pin_memory: bool,
        prefetch: int | None,
        transform: Any,
        split_trajs: bool,
    ) -> None:
        self.dataset_id = dataset_id
        self.root = user_path(root) if root is not None else self._default_root()
        if download and (download == "force" or self._locate() is None):
            self._download(force=download == "force")
        path = self._locate()
        if path is None:
            raise FileNotFoundError(2, f"there is no dataset {dataset_id!r} in this folder; give root=", str(self.root))
        self.data_path = path
        padded = _padded(list(whole_trajectories(self._blocks()))) if split_trajs else None
        capacity = self._step_count() if padded is None else len(padded)
        super().__init__(
            storage=LazyMemmapStorage(max(1, capacity)),
            sampler=sampler,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            batch_size=batch_size,
        )
        rows = 0
        for block in self._blocks() if padded is None else [padded]:
            rows += len(block)
            if rows > capacity:
                raise DatasetError(str(path), f"has more than the {capacity} steps that its metadata say")
            self.extend(block)
        if rows == 0:
            raise DatasetError(str(path), "has no steps")
        self.set_writer(ImmutableDatasetWriter() if writer is None else writer)
        if transform is not None:  # not before: what is stored are the values of the files
            self.append_transform(transform)

    @abstractmethod
    def _default_root(self) -> Path:
        """The folder of all datasets where none is given."""

    @abstractmethod
    def _locate(self) -> Path | None:
        """The file or folder that is read; None if it does not exist."""

    @abstractmethod
    def _download(self, *, force: bool) -> None:
        """Gets the dataset into `root`, or raises an error that says how the user does that."""

    @abstractmethod
    def _step_count(self) -> int:
        """The number of steps, or a little more."""

    @abstractmethod
    def _blocks(self) -> Iterator[TensorDictBase]:
        """The steps in order, `[time]`, with trajectory numbers."""


def _padded(trajectories: list[TensorDictBase]) -> TensorDictBase:
    """`[trajectories, longest]`; the mask (bool) says which steps are real."""
    if not trajectories:
        return TensorDict(batch_size=[0, 0])
    lengths = torch.tensor([len(one) for one in trajectories], device="cpu")
    batch: TensorDictBase = pad_sequence(trajectories)
    return batch.set(("collector", "mask"), torch.arange(batch.shape[1], device="cpu") < lengths.unsqueeze(1))


class MinariExperienceReplay(DatasetReplay):
    """The steps of a Minari dataset as a replay buffer: every sampler and transform works, writing is refused.

    Steps are those of `iter_minari`; `"episode"` (int64) is the number of the episode, for `SliceSampler`.

    Args:
        dataset_id: the dataset's name, "D4RL/door/human-v2": its folder in `root`.
        batch_size: rows of a sample.
        root: the folder of all datasets, or the dataset's own. None: `MINARI_DATASETS_PATH`, else Minari's own
            `~/.minari/datasets`.
        download: get a dataset that is missing with the package minari ("force": in any case); False: never.
        sampler, collate_fn, pin_memory, prefetch: as in TensorDictReplayBuffer.
        writer: `ImmutableDatasetWriter()` unless given.
        transform: applied on reading only; the rows hold the values of the files.
        split_trajs: an item is a whole trajectory, padded to the longest, with `("collector", "mask")`.
        load_from_local_minari: without effect: Minari's own folder is where datasets are looked for.

    Raises:
        FileNotFoundError: there is no such dataset, and `download=False`.
        ImportError: h5py is missing, or the dataset and minari are.
        DatasetError: as `iter_minari`.

    Example:
        >>> import tempfile
        >>> from engram.data.datasets import write_minari
        >>> root = tempfile.mkdtemp()
        >>> done = torch.tensor([[False], [True]])
        >>> follows = {"observation": torch.ones(2, 4), "reward": torch.ones(2, 1), "terminated": done, "done": done}
        >>> steps = TensorDict({"observation": torch.ones(2, 4), "action": torch.ones(2), "next": follows}, [2])
        >>> write_minari(steps, root + "/pole-v0")
        2
        >>> MinariExperienceReplay("pole-v0", batch_size=3, root=root).sample()["next", "reward"].shape
        torch.Size([3, 1])
    """

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        root: PathLike | None = None,
        download: bool | str = True,
        sampler: Any = None,
        writer: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        split_trajs: bool = False,
        load_from_local_minari: bool = False,
    ) -> None:
        super().__init__(
            dataset_id,
            batch_size,
            root=root,
            download=download,
            sampler=sampler,
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
            split_trajs=split_trajs,
        )

    def _default_root(self) -> Path:
        given = os.environ.get("MINARI_DATASETS_PATH")
        return user_path(given) if given else Path.home() / ".minari" / "datasets"

    def _locate(self) -> Path | None:
        folders = (self.root / self.dataset_id, self.root)
        return next((folder for folder in folders if (folder / "data").is_dir()), None)

    def _download(self, *, force: bool) -> None:
        needed_by = (
            f"there is no dataset {self.dataset_id!r} in {self.root} (put the dataset's folder there, and say "
            "download=False, or have it downloaded): the download"
        )
        with packages(needed_by, "minari", minari="minari"):
            import minari
        before = os.environ.get("MINARI_DATASETS_PATH")
        os.environ["MINARI_DATASETS_PATH"] = str(self.root)
        try:
            minari.download_dataset(self.dataset_id, force_download=force)
        finally:
            del os.environ["MINARI_DATASETS_PATH"]
            if before is not None:
                os.environ["MINARI_DATASETS_PATH"] = before

    def _step_count(self) -> int:
        with _open_episodes(self.data_path, True, ()) as (episodes, total):
            return sum(part.steps for part in episodes.parts(None)) if total is None else total

    def _blocks(self) -> Iterator[TensorDictBase]:
        for block in iter_minari(self.data_path):
            yield block.set("episode", block.get(TRAJECTORY).clone())


class D4RLExperienceReplay(DatasetReplay):
    """The steps of a D4RL file as a replay buffer: every sampler and transform works, writing is refused.

    Steps are those of `iter_hdf5`: without `next_observations` in the file, the last step of a trajectory that is only
    cut is left out, and the one before it is truncated.

    Args:
        dataset_id: the file's name, without `.hdf5` or with it: "hopper-medium-v2".
        batch_size: rows of a sample.
        root: the folder of the file, or the file. None: D4RL's own, `D4RL_DATASET_DIR`, else `~/.d4rl/datasets`.
        download: files are never downloaded; with False, a missing file is said without that hint.
        sampler, collate_fn, pin_memory, prefetch: as in TensorDictReplayBuffer.
        writer: `ImmutableDatasetWriter()` unless given.
        transform: applied on reading only; the rows hold the values of the files.
        split_trajs: an item is a whole trajectory, padded to the longest, with `("collector", "mask")`.
        use_truncated_as_done: False: `("next", "done")` is `("next", "terminated")`.
        direct_download: without effect.
        from_env, terminate_on_end, env_kwargs: what D4RL's own package does with a file.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError: `from_env=True`, `terminate_on_end=True`, or other keywords, which need D4RL's own package.
        DatasetError, ImportError: as `iter_hdf5`.

    Example:
        >>> import tempfile
        >>> from engram.data.datasets import write_hdf5
        >>> root = tempfile.mkdtemp()
        >>> follows = {"observation": torch.ones(2, 4), "reward": torch.ones(2, 1), "done": torch.ones(2, 1).bool()}
        >>> steps = TensorDict({"observation": torch.ones(2, 4), "action": torch.ones(2), "next": follows}, [2])
        >>> write_hdf5(steps, root + "/hopper-medium-v2.hdf5")
        2
        >>> len(D4RLExperienceReplay("hopper-medium-v2", batch_size=3, root=root))
        2
    """

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        sampler: Any = None,
        writer: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        split_trajs: bool = False,
        from_env: bool = False,
        use_truncated_as_done: bool = True,
        direct_download: bool | None = None,
        terminate_on_end: bool | None = None,
        download: bool | str = True,
        root: PathLike | None = None,
        **env_kwargs: Any,
    ) -> None:
        if from_env or terminate_on_end or env_kwargs:
            given = [
                name for name, is_set in (("from_env", from_env), ("terminate_on_end", terminate_on_end)) if is_set
            ]
            raise TypeError(
                f"{', '.join([*given, *env_kwargs])}: only D4RL's own package does that; read the file itself, without "
                "these arguments"
            )
        self._use_truncated_as_done = use_truncated_as_done
        super().__init__(
            dataset_id,
            batch_size,
            root=root,
            download=download,
            sampler=sampler,
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
            split_trajs=split_trajs,
        )

    def _default_root(self) -> Path:
        given = os.environ.get("D4RL_DATASET_DIR")
        return user_path(given) if given else Path.home() / ".d4rl" / "datasets"

    def _locate(self) -> Path | None:
        name = self.dataset_id.removesuffix(".hdf5")
        files = (self.root, *(self.root / f"{one}.hdf5" for one in (name, name.replace("-", "_", 1))))
        return next((file for file in files if file.is_file()), None)

    def _download(self, *, force: bool) -> None:
        raise FileNotFoundError(
            2,
            f"D4RL's files are not downloaded: get {self.dataset_id}.hdf5 yourself, and give its folder as root=; "
            "there is none in",
            str(self.root),
        )

    def _step_count(self) -> int:
        with open_foreign(self.data_path, MAX_ROW_BYTES) as source:
            return len(FlatReader(source, ()))

    def _blocks(self) -> Iterator[TensorDictBase]:
        for block in iter_hdf5(self.data_path):
            if not self._use_truncated_as_done:
                block.set(("next", "done"), block.get(("next", "terminated")).clone())
            yield block
