"""Images in rows: which leaves are images, and several of them as one PNG."""

from __future__ import annotations

import math
import struct
import zlib

import numpy as np
import numpy.typing as npt

from engram import __version__
from engram.cli.description import KeyInfo
from engram.kernel.tools import visible

Image = npt.NDArray[np.uint8]

_LEAST_SIDE = 8  # of what is taken for an image: smaller ones are numbers
_GAP = 2  # between two images of a grid
_BACKGROUND = 128


def is_image(key: KeyInfo) -> bool:
    """Whether a step of a key is an image, or several: uint8 `[H, W]`, `[C, H, W]` or `[H, W, C]`, 8 x 8 at least."""
    return key.dtype == "uint8" and _sides(key.shape) is not None


def no_images(key: str | None, found: list[str]) -> str:
    """Why there is no image to show: of a key that holds none (None: of any), where these keys hold some."""
    form = "uint8 [H, W], [C, H, W] or [H, W, C], 8 x 8 at least"
    if not found:
        return f"no key holds images: {form}"
    return f"{visible(key or 'no key')} holds images; those that do: {', '.join(found)}"


def _sides(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Height and width."""
    if len(shape) == 3:
        shape = shape[:2] if _channels_last(shape) else shape[1:]
    return (shape[0], shape[1]) if len(shape) == 2 and min(shape) >= _LEAST_SIDE else None


def _channels_last(shape: tuple[int, ...]) -> bool:
    return shape[2] in (1, 3, 4) and shape[0] not in (1, 3)


def last_frames(values: Image) -> Image:
    """The newest frame of each row: `[rows, *shape]` to `[rows, H, W, 3]`."""
    return _frames(values)[:, -1]


def image_grid(values: Image, in_a_line: int | None = None) -> Image:
    """Images of rows side by side: `[rows, *shape]` to `[height, width, 3]`.

    `in_a_line` steps, or as many as make it about square; grey frames of one step (`[4, H, W]`, a stack) stay side by
    side.

    Raises:
        ValueError: these values are not images.
    """
    shape = values.shape[1:]
    if values.dtype != np.uint8 or _sides(shape) is None:
        raise ValueError(f"{values.dtype} {list(shape)} is not an image: uint8 [H, W], [C, H, W] or [H, W, C] is one")
    frames = _frames(values)  # [rows, frames of a step, H, W, 3]
    n, each, height, width, _ = frames.shape
    columns = each * (in_a_line or max(1, math.ceil(math.sqrt(n / each))))
    lines = math.ceil(n * each / columns)
    size = (lines * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3)
    grid = np.full(size, _BACKGROUND, np.uint8)
    for at, frame in enumerate(frames.reshape(n * each, height, width, 3)):
        top, left = at // columns * (height + _GAP), at % columns * (width + _GAP)
        grid[top : top + height, left : left + width] = frame
    return grid


def _frames(values: Image) -> Image:
    if values.ndim == 3:
        values = values[:, None]
    elif not _channels_last(values.shape[1:]):
        if values.shape[1] != 3:  # grey frames
            return np.repeat(values[..., None], 3, axis=-1)
        values = values.transpose(0, 2, 3, 1)[:, None]
    else:
        values = values[:, None, ..., :3]
    if values.ndim == 4:
        values = values[..., None]
    return np.repeat(values, 3, axis=-1) if values.shape[-1] == 1 else values


def png_of(image: Image) -> bytes:
    """An image `[height, width, 3]` as a PNG file.

    Example:
        >>> png_of(np.zeros((2, 3, 3), np.uint8))[:8]
        b'\\x89PNG\\r\\n\\x1a\\n'
    """
    height, width, _ = image.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each begins with its filter, 0: none
    lines[:, 1:] = image.reshape(height, 3 * width)
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"tEXt", f"Software\0engram {__version__}".encode()),
        (b"IDAT", zlib.compress(lines.tobytes(), 6)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
