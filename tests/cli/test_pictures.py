"""`plot`, `report`, and images of rows."""

import re
import zlib

import numpy as np
import pytest
import torch

from cli.support import store
from cli.test_command import call
from contracts.each import each
from engram.cli import head, plot, report
from engram.cli.pixels import image_grid, png_of
from engram.cli.plots import figure, series
from engram.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


# ---- plots ----
def test_returns_lengths_and_keys_are_panels_of_one_file(tmp_path):
    store(tmp_path)
    one = plot(tmp_path / "store", ["returns"], output=tmp_path / "one.png")
    three = plot(tmp_path / "store", ["returns", "lengths", "next.observation"], output=tmp_path / "three.png")
    assert size_of(three.read_bytes())[1] == 3 * size_of(one.read_bytes())[1]
    histogram = plot(tmp_path / "store", ["action"], output=tmp_path / "h.png", histogram=True)
    assert histogram.read_bytes() != plot(tmp_path / "store", ["action"], output=tmp_path / "l.png").read_bytes()


def test_a_point_of_many_values_is_their_mean_between_the_least_and_the_largest():
    rb = ReplayBuffer(storage=LazyTensorStorage(5000))
    rb.extend({"x": torch.arange(6000.0)})  # the oldest is 1000
    drawn = series(rb.storage, "x")
    assert drawn.mean.shape == (1000, 1) and drawn.mean[0, 0] == 1002 and drawn.x[0] == 2
    assert (drawn.least[0, 0], drawn.most[0, 0], drawn.most[-1, 0]) == (1000, 1004, 5999)
    assert drawn.counts.sum() == 5000 and (drawn.edges[0], drawn.edges[-1]) == (1000, 5999)
    (band,) = figure([drawn]).axes[0].collections
    assert band.get_paths()[0].get_extents().extents.tolist() == [2, 1000, 4997, 5999]


def test_every_number_of_a_short_vector_is_a_line_and_a_long_one_is_its_mean():
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend({"x": torch.arange(6.0).reshape(2, 3), "y": torch.arange(20.0).reshape(2, 10)})
    assert series(rb.storage, "x").mean.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert series(rb.storage, "y").mean.tolist() == [[4.5], [14.5]]


def test_values_that_are_not_finite_are_left_out_of_histograms():
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend({"x": torch.tensor([1.0, float("nan"), float("inf"), 2.0])})
    drawn = series(rb.storage, "x")
    assert drawn.counts.sum() == 2 and (drawn.edges[0], drawn.edges[-1]) == (1, 2)


def test_what_cannot_be_drawn_is_refused_and_leaves_no_file(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "store"))
    rb.extend({"x": torch.zeros(3), "z": torch.zeros(3, dtype=torch.complex64)})
    for what, error, text in (
        ("y", KeyError, "the rows have no 'y'; there are returns, lengths, x, z"),
        ("returns", ValueError, "there are no returns to draw: no key says where episodes end"),
        ("z", ValueError, "complex numbers are not drawn"),
    ):
        with pytest.raises(error, match=text):
            plot(tmp_path / "store", [what], output=tmp_path / "p.png")
    with pytest.raises(ValueError, match="what is a list of names"):
        plot(tmp_path / "store", "x")
    assert not (tmp_path / "p.png").exists()


def test_returns_are_refused_where_rows_have_no_rewards_or_no_episode_is_stored():
    done = torch.tensor([False, True])
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend({"x": torch.arange(2), "done": done})
    with pytest.raises(ValueError, match="there are no returns: rows have neither"):
        series(rb.storage, "returns")
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend({"reward": torch.full((2,), torch.nan), "done": done})
    with pytest.raises(ValueError, match="there are no returns to draw: no episodes are stored"):
        series(rb.storage, "returns")


def test_the_command_prints_the_file(tmp_path):
    store(tmp_path)
    shown = call("plot", tmp_path / "store", "lengths", "-o", tmp_path / "p.png")
    assert shown.exit_code == 0 and shown.stdout.split() == [str(tmp_path / "p.png")]


# ---- images ----
@each(
    ("shape", "size"),
    [
        ((8, 10), (34, 18)),  # three columns, two lines, two pixels between them
        ((1, 8, 10), (34, 18)),
        ((3, 8, 10), (34, 18)),
        ((8, 10, 3), (34, 18)),
        ((4, 8, 10), (94, 28)),  # a stack: its frames side by side, two stacks in a line
    ],
)
def test_images_of_rows_are_a_grid(shape, size):
    values = np.random.default_rng(0).integers(0, 256, (5, *shape), dtype=np.uint8)
    grid = image_grid(values)
    assert grid.shape == (size[1], size[0], 3)
    first = {2: values[0], 3: values[0][0] if shape[0] != 8 else values[0][..., 0]}[len(shape)]
    assert np.array_equal(grid[:8, :10, 0], first)


def test_a_png_has_the_pixels():
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    png = png_of(image)
    assert size_of(png) == (7, 5)
    at = png.index(b"IDAT")
    length = int.from_bytes(png[at - 4 : at], "big")
    lines = np.frombuffer(zlib.decompress(png[at + 4 : at + 4 + length]), np.uint8).reshape(5, 22)
    assert np.array_equal(lines[:, 1:].reshape(5, 7, 3), image) and not lines[:, 0].any()


def test_head_writes_the_images_of_a_key(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "store"))
    rb.extend({"small": torch.zeros(4, 3), "pixels": torch.zeros(4, 8, 8, dtype=torch.uint8)})
    assert call("head", tmp_path / "store", "--png", tmp_path / "p.png").exit_code == 0
    assert size_of((tmp_path / "p.png").read_bytes()) == (18, 18)
    with pytest.raises(KeyError, match="small holds images; those that do: pixels"):
        head(tmp_path / "store").to_png("small")


# ---- the page ----
@pytest.mark.deep
def test_a_report_stands_alone(tmp_path):
    rb = store(tmp_path)
    pixels = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "pixels"))
    pixels.extend({"frame": torch.zeros(4, 16, 16, dtype=torch.uint8), "x": torch.zeros(4)})
    page = report(tmp_path / "store", output=tmp_path / "a.html").read_text()
    assert len(rb) == 300 and "300 of 1,000 (30%)" in page and "next.reward" in page and "returns" in page
    assert (
        "Images" not in page and "Images: frame" in report(tmp_path / "pixels", output=tmp_path / "b.html").read_text()
    )
    # Nothing is loaded from anywhere, and the page says so to the browser.
    assert "default-src 'none'" in page and "<script" not in page and "url(" not in page and "http" not in page[1000:]
    assert set(re.findall(r'(?:src|href)="(\w+:[\w/]*)', page)) == {"data:image/png"}


def test_names_and_values_are_text_in_a_report(tmp_path):
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend(["<script>alert(1)</script>"])
    rb.dumps(tmp_path / "a <b>")
    page = report(tmp_path / "a <b>", output=tmp_path / "r.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page and "a &lt;b&gt;" in page


def test_a_report_of_an_empty_store_says_that_it_is_empty(tmp_path):
    rb = store(tmp_path)
    rb.empty()
    assert "No rows are stored." in report(tmp_path / "store", output=tmp_path / "r.html").read_text()
    assert call("report", tmp_path / "store", "-o", tmp_path / "r.html").exit_code == 0
