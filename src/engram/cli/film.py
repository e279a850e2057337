"""A stored episode as a film: its frames one after the other, as a GIF or an MP4."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram import __version__
from engram._progress import progress_bar
from engram.cli.description import KeyInfo, shown_key
from engram.cli.own_files import FILM
from engram.cli.pixels import Image, is_image, last_frames, no_images
from engram.cli.sources import open_rows
from engram.cli.trajectories import Trajectories, read_column, trajectories_of
from engram.data import Storage
from engram.datasets.atomic_files import new_file
from engram.errors import StorageInUseError
from engram.kernel.tools import packages, user_path, visible
from engram.pytree import KeyPath

_AT_ONCE = 256  # frames that are read at once
_LEAST_SIDE = 168  # pixels: smaller frames are enlarged by a whole number
_FORMS = (".gif", ".mp4")


def play(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    episode: int = -1,
    key: str | None = None,
    fps: float = 30.0,
    snapshot: str | None = None,
    progress: bool = False,
) -> Path:
    """Writes a stored episode's frames as a GIF or an MP4, by the suffix of `output`, whose path is returned.

    Of a stack of frames the newest one is shown.

    Args:
        path: a store (which may be in use), a checkpoint, a directory of TorchRL's or a dataset file.
        output: the file, `.gif` or `.mp4`; a GIF of engram's that is there is replaced.
        episode: which one, 0 is the oldest; below 0, from the newest: -1.
        key: of the frames, as `info` shows it; None: the first that holds images.
        fps: frames a second.
        snapshot: of a checkpoint, another than the current one.
        progress: show how far it is, if standard error is a terminal.

    Raises:
        ImportError: a GIF needs Pillow, `pip install "engram[cli]"`; an MP4 imageio, `pip install "engram[video]"`.
        KeyError: no such key holds images; or none does.
        IndexError: there is no such episode.
        ValueError: `output` has another suffix, or no key says where episodes end.
        FileExistsError: something that engram did not write is at `output`, or a link.
        StorageInUseError: its writer overwrote the episode while it was read.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder))
        >>> done = torch.tensor([0, 0, 0, 1]).bool()
        >>> _ = rb.extend(TensorDict({"pixels": torch.zeros(4, 8, 8, dtype=torch.uint8), "next": {"done": done}}, [4]))
        >>> play(folder, folder + "/episode.gif").read_bytes()[:3]
        b'GIF'
    """
    place = user_path(output)
    if place.suffix.lower() not in _FORMS:
        raise ValueError(f"a film is written as {' or '.join(_FORMS)}, got {visible(place.name)}")
    if not fps > 0:
        raise ValueError(f"fps must be above 0, got {fps}")
    write = _import_gif_writer() if place.suffix.lower() == ".gif" else _import_mp4_writer()
    with open_rows(path, snapshot, progress=progress) as storage:
        leaf = _image_key(storage, key)
        lane, env, start, length = _chosen(trajectories_of(storage), episode)
        with (
            new_file(place, True, FILM) as new,
            progress_bar(f"writing {place.name}", length, progress) as advance,
        ):
            write(new, _frames(storage, leaf, lane, env, range(start, start + length), advance), fps)
    return place


def _image_key(storage: Storage, key: str | None) -> KeyPath:
    found = image_keys(storage)
    if not found or (key is not None and key not in found):
        raise KeyError(no_images(key, list(found)))
    return found[next(iter(found)) if key is None else key]


def image_keys(storage: Storage) -> dict[str, KeyPath]:
    """The keys of stored steps that are images, by the name that is shown."""
    leaves = [] if storage.layout is None else storage.layout.leaves
    infos = {x.path: KeyInfo(shown_key(x.path), x.shape, str(x.dtype).removeprefix("torch."), 0) for x in leaves}
    return {info.key: path for path, info in infos.items() if is_image(info)}


def _chosen(trajectories: Trajectories | str, episode: int) -> tuple[int, int, int, int]:
    """Lane, environment, first sequence and length of an episode."""
    if isinstance(trajectories, str):
        raise ValueError(trajectories)
    n = len(trajectories.length)
    if not -n <= episode < n:
        raise IndexError(f"there is no episode {episode}: {n} are stored, 0 is the oldest, -1 the newest")
    lane, env, start, length = (int(column[episode]) for column in trajectories[:4])
    return lane, env, start, length


def _frames(storage: Storage, path: KeyPath, lane: int, env: int, steps: range, advance: Any) -> Iterator[Image]:
    """The newest frame of each step, `[H, W, 3]`, enlarged where it is small."""
    lanes = storage.lanes
    capacity = lanes.store.lane_capacity
    for start in range(steps.start, steps.stop, _AT_ONCE):
        times = torch.arange(start, min(start + _AT_ONCE, steps.stop), device="cpu")
        column = read_column(storage, path, lane * capacity + times % capacity)
        values = column[:, env] if lanes.envs > 1 else column
        if lanes.store.lane(lane)["first"] > start:
            raise StorageInUseError("the job overwrote the episode while it was read; choose a newer one")
        frames = last_frames(values.numpy())
        times_larger = max(1, -(-_LEAST_SIDE // max(frames.shape[1:3])))
        for frame in frames:
            yield np.repeat(np.repeat(frame, times_larger, 0), times_larger, 1)
        advance(len(times))


def _import_gif_writer() -> Any:
    with packages("a GIF", "engram[cli]", Pillow="PIL"):
        from PIL import Image as images

    def write(file: Path, frames: Iterator[Image], fps: float) -> None:
        pictures = (images.fromarray(frame) for frame in frames)
        first = next(pictures)
        first.save(
            file, format="GIF", save_all=True, append_images=pictures, duration=round(1000 / fps), loop=0,
            comment=f"engram {__version__}".encode(),
        )  # fmt: skip

    return write


def _import_mp4_writer() -> Any:
    with packages("an MP4", "engram[video]", imageio="imageio", imageio_ffmpeg="imageio_ffmpeg"):
        import imageio
        import imageio_ffmpeg
    del imageio_ffmpeg  # which imageio uses

    def write(file: Path, frames: Iterator[Image], fps: float) -> None:
        writer: Any = imageio.get_writer(file, format="FFMPEG", fps=fps, macro_block_size=2)
        with writer as film:
            for frame in frames:
                film.append_data(frame)

    return write
