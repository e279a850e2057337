"""Plots of returns, episode lengths and any key of what is stored."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engram import __version__
from engram._progress import progress_bar
from engram.cli.description import shown_key
from engram.cli.own_files import PICTURE, check_target, write_target
from engram.cli.returns import NO_REWARDS
from engram.cli.sources import open_rows
from engram.cli.trajectories import column_blocks, episode_returns, has_rewards, trajectories_of
from engram.data import Storage
from engram.kernel.tools import packages, user_path
from engram.pytree import KeyPath

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Numbers = npt.NDArray[np.float64]

RETURNS, LENGTHS = "returns", "lengths"
_ROWS_AT_ONCE = 1 << 14
_MOST_POINTS = 1000  # of a line: of more values each point is the mean of several, within a band of least and largest
_MOST_LINES = 8  # of a key with several numbers: of more, their mean
_BINS = 60


class Series(NamedTuple):
    """Values to plot, `[points, lines]`: of the values that make a point the mean, the least and the largest."""

    name: str
    x_label: str
    x: Numbers
    mean: Numbers
    least: Numbers
    most: Numbers
    counts: Numbers  #: a histogram of all values
    edges: Numbers


def plot(
    path: str | os.PathLike[str],
    what: Sequence[str] = (RETURNS, LENGTHS),
    *,
    output: str | os.PathLike[str] | None = None,
    histogram: bool = False,
    snapshot: str | None = None,
    progress: bool = False,
) -> Path:
    """Draws values of what is at a path into a PNG, a panel for each, and returns the file's path.

    Of many values each point is the mean of several, in a band from the least to the largest.

    Args:
        path: a store (which may be in use), a checkpoint, a directory of TorchRL's or a dataset file.
        what: "returns" and "lengths" of episodes, oldest first, or keys as `info` shows them: "next.reward".
        output: the file; a picture of engram's that is there is replaced; None: `<name>.png` in the current directory.
        histogram: how often each value stands there, instead of values over time.
        snapshot: of a checkpoint, another than the current one.
        progress: show how far reading is, if standard error is a terminal.

    Raises:
        ImportError: matplotlib is missing: `pip install "engram[cli]"`.
        FileNotFoundError: there is nothing at the path.
        FileExistsError: something that engram did not draw is at `output`, or a link.
        KeyError: the rows have no such key.
        ValueError: there is nothing to draw, or the path holds nothing that engram reads.
        EngramError: it is damaged.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder))
        >>> _ = rb.extend({"x": torch.rand(50)})
        >>> plot(folder, ["x"], output=folder + "/x.png").stat().st_size > 1000
        True
    """
    if isinstance(what, str) or not what:
        raise ValueError(f"what is a list of names, as ['returns', 'next.reward'], got {what!r}")
    import_matplotlib()
    place = user_path(f"{user_path(path).absolute().name}.png" if output is None else output)
    check_target(place, PICTURE)
    with open_rows(path, snapshot, progress=progress) as storage:
        drawn = [series(storage, name, progress) for name in what]
    write_target(place, png_of_figure(figure(drawn, histogram)), PICTURE)
    return place


# ---- values ----
def series(storage: Storage, name: str, progress: bool = False) -> Series:
    """The values of one panel.

    Raises:
        KeyError: the rows have no such key.
        ValueError: there are none to draw.
    """
    if storage.layout is None:
        raise ValueError("there is nothing to draw: no rows, or steps that are items of any form")
    if name in (RETURNS, LENGTHS) and all(shown_key(leaf.path) != name for leaf in storage.layout.leaves):
        return _of_episodes(storage, name, progress)
    leaf = next((leaf for leaf in storage.layout.leaves if shown_key(leaf.path) == name), None)
    if leaf is None:
        names = ", ".join([RETURNS, LENGTHS, *(shown_key(leaf.path) for leaf in storage.layout.leaves)])
        raise KeyError(f"the rows have no {name!r}; there are {names}")
    if leaf.dtype.is_complex:
        raise ValueError(f"{name} is {leaf.dtype}: complex numbers are not drawn")
    return _of_key(storage, name, leaf.path, progress)


def _of_episodes(storage: Storage, name: str, progress: bool) -> Series:
    trajectories = trajectories_of(storage)
    if isinstance(trajectories, str):
        raise ValueError(f"there are no {name} to draw: {trajectories}")
    if name == LENGTHS:
        values = trajectories.length.numpy().astype(np.float64)
    elif has_rewards(storage):
        with progress_bar("reading rewards", storage.shape[0], progress) as advance:
            values = episode_returns(storage, trajectories, advance)
    else:
        raise ValueError(NO_REWARDS)
    values = values[np.isfinite(values)]
    if not len(values):
        raise ValueError(f"there are no {name} to draw: no episodes are stored")
    drawn = _summed_up(name, "episode", len(values), lambda: iter([values[:, None]]))
    assert drawn is not None
    return drawn


def _of_key(storage: Storage, name: str, path: KeyPath, progress: bool) -> Series:
    lanes = storage.lanes
    rows = [range(lane["first"], lane["published"]) for lane in lanes.counters()]
    steps = sum(map(len, rows))
    if not steps:
        raise ValueError(f"there is no {name} to draw: no rows are stored")
    with progress_bar(f"reading {name}", 2 * steps, progress) as advance:
        drawn = _summed_up(name, "stored step, oldest first", steps, lambda: _blocks(storage, path, rows, advance))
    if drawn is None:
        raise ValueError(f"there is no {name} to draw: all rows were overwritten by their writer before they were read")
    return drawn


def _blocks(storage: Storage, path: KeyPath, rows: list[range], advance: Callable[[int], None]) -> Iterator[Numbers]:
    """A key of these rows of each lane, oldest first: `[steps, lines]` a block."""
    for column, gone in column_blocks(storage, path, rows, _ROWS_AT_ONCE):
        values = column.double().flatten(1).cpu().numpy() if column.ndim > 1 else column.double().cpu().numpy()[:, None]
        yield values if values.shape[1] <= _MOST_LINES else values.mean(1, keepdims=True)
        advance(len(values) + gone)


def _summed_up(name: str, x_label: str, n: int, blocks: Callable[[], Iterator[Numbers]]) -> Series | None:
    """Summarises up to n values: buckets over time, and a histogram; reads the blocks twice. None: there are none."""
    size = max(1, -(-n // _MOST_POINTS))  # values of a bucket
    total = least = most = np.zeros((0, 0))
    at, low, high = 0, np.inf, -np.inf
    for block in blocks():
        if not total.size:
            total = np.zeros((-(-n // size), block.shape[1]))
            least, most = np.full_like(total, np.inf), np.full_like(total, -np.inf)
        bucket = (at + np.arange(len(block))) // size
        np.add.at(total, bucket, block)
        np.minimum.at(least, bucket, block)
        np.maximum.at(most, bucket, block)
        finite = block[np.isfinite(block)]
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
        at += len(block)
    if not at:
        return None
    points = -(-at // size)  # a writer may have overwritten some before they were read
    counts, edges = np.zeros(_BINS), np.linspace(*_span(low, high), _BINS + 1)
    for block in blocks():
        finite = block[np.isfinite(block)]
        counts += np.histogram(np.clip(finite, edges[0], edges[-1]), edges)[0]
    each = np.minimum(size, at - size * np.arange(points)).clip(1)
    x = size * np.arange(points) + (each - 1) / 2
    return Series(name, x_label, x, total[:points] / each[:, None], least[:points], most[:points], counts, edges)


def histogram_series(name: str, edges: Sequence[float], counts: Sequence[float]) -> Series:
    """A histogram that exists, to be drawn."""
    none = np.zeros((0, 1))
    return Series(name, "", np.zeros(0), none, none, none, np.array(counts), np.array(edges))


def decile_series(name: str, deciles: Sequence[float]) -> Series:
    """Deciles of numbers, to be drawn over their share."""
    values = np.array(deciles)[:, None]
    share = np.linspace(0, 100, len(deciles))
    return Series(name, "percent of draws", share, values, values, values, np.zeros(1), np.zeros(2))


def _span(low: float, high: float) -> tuple[float, float]:
    """The ends of a histogram."""
    if low > high:
        return 0.0, 1.0  # no finite value
    return (low, high) if low < high else (low - 0.5, high + 0.5)


# ---- drawing ----
def import_matplotlib() -> Any:
    """The package matplotlib.

    Raises:
        ImportError: it is missing.
    """
    with packages("a plot", "engram[cli]", matplotlib="matplotlib"):
        import matplotlib.figure
    return matplotlib


def figure(drawn: Sequence[Series], histogram: bool = False, *, width: float = 7.0, height: float = 2.6) -> Figure:
    """A figure with a panel of this size (in inches) for each of them."""
    fig: Figure = import_matplotlib().figure.Figure(figsize=(width, height * len(drawn)), layout="constrained")
    for axes, one in zip(np.atleast_1d(fig.subplots(len(drawn), 1)), drawn, strict=True):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if histogram:
            axes.stairs(one.counts, one.edges, fill=True, alpha=0.8)
            axes.set_xlabel(_label(one.name))
            axes.set_ylabel("how often")
            continue
        for line in range(one.mean.shape[1]):
            label = f"[{line}]" if one.mean.shape[1] > 1 else None
            marker = "." if len(one.x) < 50 else None
            (drawn_line,) = axes.plot(one.x, one.mean[:, line], linewidth=1.2, marker=marker, label=label)
            if one.mean.shape[1] == 1:
                axes.fill_between(
                    one.x, one.least[:, line], one.most[:, line], alpha=0.2, color=drawn_line.get_color(), linewidth=0
                )
        if one.mean.shape[1] > 1:
            axes.legend(fontsize="small", ncols=4)
        axes.set_xlabel(one.x_label)
        axes.set_ylabel(_label(one.name))
    return fig


def _label(name: str) -> str:
    """A name that is shown as it is: what lies between two dollar signs would be typeset."""
    return name.replace("$", r"\$")


def png_of_figure(fig: Figure, *, transparent: bool = False) -> bytes:
    """A figure as a PNG file."""
    import io

    file = io.BytesIO()
    fig.savefig(file, format="png", dpi=110, transparent=transparent, metadata={"Software": f"engram {__version__}"})
    return file.getvalue()
