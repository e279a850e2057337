"""A report of stored rows: facts, plots, images and rows in one HTML file that loads nothing."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Iterable, Iterator
from html import escape as escape_markup
from pathlib import Path

import torch

from engram import __version__
from engram.cli.description import Info, info_of_rows, shown_key
from engram.cli.differences import INDEX
from engram.cli.film import image_keys
from engram.cli.kinds import kind_of, one_snapshot, store_folder
from engram.cli.own_files import REPORT, check_target, write_target
from engram.cli.pixels import image_grid, last_frames, png_of
from engram.cli.plots import (
    LENGTHS,
    RETURNS,
    Series,
    decile_series,
    figure,
    histogram_series,
    import_matplotlib,
    png_of_figure,
    series,
)
from engram.cli.rows import RowsShown, _drawn, _read
from engram.cli.sources import open_rows
from engram.cli.tables import HELD, WRITER_HEAD, facts, writer_rows
from engram.cli.trajectories import read_column, trajectories_of
from engram.data import Storage
from engram.kernel.disk import published_stats
from engram.kernel.tools import human_bytes, user_path, visible

_IMAGES = 16  # rows of which images are shown
_ROWS = 8
_STRIP = 12  # frames of an episode
_MOST_HISTOGRAMS = 24
_SEED = 0

# No script, and a policy by which a browser loads nothing but what is in the page.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="engram {version}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #d5d9e0; --soft: #667; --back: #fff; --front: #16181d; --card: #f6f7f9; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --line: #343a46; --soft: #9aa3b2; --back: #14161b; --front: #e8eaee; --card: #1d2027; }}
}}
body {{ font: 15px/1.5 system-ui, sans-serif; background: var(--back); color: var(--front); margin: 0 auto;
  max-width: 62rem; padding: 1.5rem; }}
h1 {{ font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.1rem; margin: 2rem 0 .6rem; }}
p.soft, figcaption, footer {{ color: var(--soft); }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }}
div.facts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .6rem; margin: 1rem 0; }}
div.fact {{ background: var(--card); border-radius: .5rem; padding: .6rem .8rem; overflow-wrap: anywhere; }}
div.fact b {{ display: block; font-size: .8rem; font-weight: 400; color: var(--soft); }}
div.wide {{ overflow-x: auto; }}
figure {{ margin: 0; }}
img {{ max-width: 100%; background: #fff; border-radius: .5rem; }}
img.pixels {{ image-rendering: pixelated; min-width: min(100%, 24rem); background: none; }}
div.grid {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(20rem, 1fr)); gap: 1rem; }}
footer {{ margin-top: 2rem; font-size: .85rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="soft">{subtitle}</p>
{body}
<footer>{footer}</footer>
</body>
</html>
"""


def report(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    snapshot: str | None = None,
    progress: bool = False,
) -> Path:
    """Writes a page about what is at a path, one HTML file that loads nothing, and returns the file's path.

    It shows what `info` says, returns and lengths of episodes over time, a histogram of each key that holds numbers, a
    film strip of an episode and images of some rows, some rows as a table; of a store whose learner publishes its draws
    (`publish_stats=True`) also the ages of what is drawn, and priorities.

    Args:
        path: a store (which may be in use), a checkpoint, a directory of TorchRL's or a dataset file.
        output: the file; a report of engram's that is there is replaced, in one step. None: `<name>.html` in the
            current directory.
        snapshot: of a checkpoint, another than the current one.
        progress: show how far reading is, if standard error is a terminal.

    Raises:
        ImportError: matplotlib is missing: `pip install "engram[cli]"`.
        FileNotFoundError: there is nothing at the path.
        FileExistsError: something other than a report of engram's is at `output`, or a link.
        ValueError: what is there is nothing that engram reads.
        EngramError: it is damaged.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder))
        >>> _ = rb.extend({"x": torch.rand(50)})
        >>> report(folder, output=folder + "/report.html").read_text()[:15]
        '<!doctype html>'
    """
    import_matplotlib()
    name = user_path(path).absolute().name
    place = user_path(f"{name}.html" if output is None else output)
    check_target(place, REPORT)
    with one_snapshot(path, snapshot) as snapshot, open_rows(path, snapshot, progress=progress) as storage:
        described = info_of_rows(path, storage, snapshot, progress=progress)
        body = "\n".join([*_head(described), *_draws(path), *_sections(storage, progress)])
    page = _PAGE.format(
        version=_escape(__version__), title=_escape(name), body=body,
        subtitle=_escape(f"{described.kind} at {Path(path).absolute()}"),
        footer=_escape(f"engram {__version__}, {time.strftime('%Y-%m-%d %H:%M')}"),
    )  # fmt: skip
    write_target(place, page.encode(), REPORT)
    return place


def _escape(text: str) -> str:
    """Text as HTML; control characters, and those that turn its direction, are made visible."""
    return escape_markup(visible(text))


def _head(described: Info) -> Iterator[str]:
    cells = [f'<div class="fact"><b>{_escape(name)}</b>{_escape(value)}</div>' for name, value in facts(described)]
    yield f'<div class="facts">{"".join(cells)}</div>'
    for note in described.notes:
        yield f'<p class="soft">{_escape(note)}</p>'
    if described.keys:
        rows = [(k.key, str(list(k.shape)), k.dtype, human_bytes(k.nbytes)) for k in described.keys]
        yield "<h2>Keys</h2>" + _table(("key", "shape of a step", "dtype", "bytes"), rows)
    if described.lanes:
        lanes: list[tuple[str, ...]] = [
            (str(i), f"{lane.rows:,}", f"{lane.written:,}", f"{lane.seams:,}")
            + ((HELD[lane.held],) if described.in_use is not None else ())
            for i, lane in enumerate(described.lanes)
        ]
        head = ("lane", "rows", "steps ever written", "seams", "writer")
        yield "<h2>Lanes</h2>" + _table(head[: len(lanes[0])], lanes)
    if described.writers:
        yield "<h2>Writers</h2>" + _table(WRITER_HEAD, writer_rows(described))


def _sections(storage: Storage, progress: bool) -> Iterator[str]:
    if not len(storage):
        yield '<p class="soft">No rows are stored.</p>'
        return
    if storage.layout is not None:
        episodes = [drawn for name in (RETURNS, LENGTHS) for drawn in _drawable(storage, name, progress)]
        if episodes:
            yield "<h2>Episodes, oldest first</h2>" + _image(png_of_figure(figure(episodes)), "returns and lengths")
    yield from _film_strips(storage)
    rows = _read(storage, lambda: _drawn(storage, _IMAGES, torch.Generator().manual_seed(_SEED)))
    for key in rows.images():
        caption = f"{key}: {len(rows.slots)} rows drawn at random"
        yield f"<h2>Images: {_escape(key)}</h2>" + _image(rows.to_png(key), caption, "pixels")
    if storage.layout is not None:
        yield from _histograms(storage, set(rows.images()), progress)
    few = RowsShown(rows.slots[:_ROWS], rows.batch[:_ROWS]) if isinstance(rows.batch, list) else rows
    head, cells = few.cells()
    yield "<h2>Rows drawn at random</h2>" + _table(head, cells[:_ROWS])


def _drawable(storage: Storage, name: str, progress: bool) -> Iterator[Series]:
    """The values of a key to plot; none where they cannot be drawn."""
    try:
        yield series(storage, name, progress)
    except ValueError:  # no episodes, no rewards, complex numbers
        return


def _film_strips(storage: Storage) -> Iterator[str]:
    """Frames of the longest stored episode, evenly spread from its first to its last, for each key that is an image."""
    keys = image_keys(storage)
    trajectories = trajectories_of(storage) if keys else "none"
    if isinstance(trajectories, str) or not len(trajectories.length):
        return
    capacity, envs = storage.lanes.store.lane_capacity, storage.lanes.envs
    longest = int(trajectories.length.argmax())
    lane, env, start, length = (int(column[longest]) for column in trajectories[:4])
    steps = start + torch.linspace(0, length - 1, min(_STRIP, length), dtype=torch.float64, device="cpu").round().long()
    for name, path in keys.items():
        column = read_column(storage, path, lane * capacity + steps % capacity)
        frames = last_frames((column[:, env] if envs > 1 else column).numpy())
        caption = f"{name}: {len(frames)} of the {length} steps of the longest stored episode"
        strip = png_of(image_grid(frames, len(frames)))
        yield f"<h2>Film strip: {_escape(name)}</h2>" + _image(strip, caption, "pixels")


def _histograms(storage: Storage, images: set[str], progress: bool) -> Iterator[str]:
    """Of numbers; flags are not drawn: two bars say less than their count."""
    assert storage.layout is not None
    names = [shown_key(leaf.path) for leaf in storage.layout.leaves if leaf.nbytes and leaf.dtype != torch.bool]
    figures = []
    for name in [name for name in names if name not in images and name != INDEX][:_MOST_HISTOGRAMS]:
        for drawn in _drawable(storage, name, progress):
            figures.append(_image(png_of_figure(figure([drawn], histogram=True, width=4.0, height=2.2)), name))
    if figures:
        yield f'<h2>How often each value is stored</h2><div class="grid">{"".join(figures)}</div>'


def _draws(path: str | os.PathLike[str]) -> Iterator[str]:
    """What learners publish of their draws from a store: ages and priorities."""
    learners = published_stats(store_folder(path)) if kind_of(path) == "store" else []
    for learner in learners:
        figures = []
        if learner.ages is not None:
            drawn = decile_series(f"age of what is drawn, process {learner.pid}", learner.ages)
            figures.append(_image(png_of_figure(figure([drawn], width=4.0, height=2.2)), "age of what is drawn"))
        if learner.priorities is not None:
            drawn = histogram_series("weight in draws", *learner.priorities)
            pictured = png_of_figure(figure([drawn], histogram=True, width=4.0, height=2.2))
            figures.append(_image(pictured, "priorities, as they weigh in draws"))
        if figures:
            title = _escape(f"Draws of process {learner.pid}: {learner.sampler}")
            yield f'<h2>{title}</h2><div class="grid">{"".join(figures)}</div>'


def _image(png: bytes, caption: str, css: str = "") -> str:
    data = base64.b64encode(png).decode()
    return (
        f'<figure><img class="{css}" alt="{_escape(caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{_escape(caption)}</figcaption></figure>"
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = "".join(f"<th>{_escape(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{_escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>'
