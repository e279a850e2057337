"""Names of files, keys and values that hold escape sequences are shown, and act on no terminal."""

import json

import pytest
import torch
from tensordict import TensorDict
from typer.testing import CliRunner

from engram import cli
from engram.cli.main import command
from engram.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from engram.data.datasets import write_hdf5, write_minari, write_parquet

#: Clears the screen, sets the title, turns the direction, ends the line, is markup of rich, and what a pager acts on.
KEY = "k\x1b[2J\x1b]0;title\x07\u202e\u2028\x9b31m\x7f\r\b\n[bold]b[link=http:evil]l\\[red]$x_{$"
MARKUP = "[bold]b[link=http:evil]l\\[red]$x_{$"
#: What a terminal that gets it acts on; rich's own styles are other sequences.
ACTING = ("\x1b[2J", "\x1b]", "\x07", "\u202e", "\u2028", "\x9b", "\x7f", "\r", "\b", "\x1b[31m")


def steps(n: int = 20) -> TensorDict:
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[4::5] = True
    number = torch.arange(n + 1.0)[:, None]
    following = {KEY: number[1:], "reward": torch.ones(n, 1), "done": done, "terminated": done}
    pixels = torch.randint(0, 256, (n, 16, 16), dtype=torch.uint8)
    return TensorDict({KEY: number[:n], "action": torch.arange(n), f"pixels{KEY}": pixels, "next": {**following}}, [n])


def flat() -> TensorDict:
    """Of a form that every dataset has a place for."""
    rows = steps().select("action", "next").exclude(("next", KEY))
    observation = torch.arange(21.0)[:, None]
    rows["observation"], rows["next", "observation"] = observation[:20], observation[1:]
    rows["info", KEY] = rows["next", "info", KEY] = torch.ones(20, 1)
    rows["next", "truncated"] = torch.zeros(20, 1, dtype=torch.bool)
    return rows


def make_store(path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=path))
    rb.extend(steps())
    rb.storage.close()


def make_checkpoint(path, storage=LazyTensorStorage):
    rb = ReplayBuffer(storage=storage(100))
    rb.extend(steps())
    rb.dumps(path)


def make_torchrl(path):
    write_parquet(steps(), path.with_name("source.parquet"))
    cli.convert(path.with_name("source.parquet"), path, to="torchrl")


MAKERS = {
    "store": make_store,
    "checkpoint": make_checkpoint,
    "list checkpoint": lambda path: make_checkpoint(path, ListStorage),
    "torchrl": make_torchrl,
    "parquet": lambda path: write_parquet(steps(), path),
    "hdf5": lambda path: write_hdf5(flat(), path),
    "minari": lambda path: write_minari(flat(), path),
}


#: One of each way that names come in; the others are long.
TIERS = {"store": (), **dict.fromkeys(("parquet", "checkpoint", "hdf5"), pytest.mark.deep)}


@pytest.fixture(params=[pytest.param(name, marks=TIERS.get(name, pytest.mark.long)) for name in MAKERS])
def hostile(request, tmp_path):
    """A path of such a name that holds such keys."""
    folder = tmp_path / KEY
    folder.mkdir()
    MAKERS[request.param](folder / "it")
    return folder / "it"


def call(*arguments, color=False):
    return CliRunner(env={"FORCE_COLOR": "1" if color else None, "COLUMNS": "80"}).invoke(
        command(), [str(argument) for argument in arguments]
    )


def assert_harmless(text: str) -> None:
    styled = text.replace("\r\x1b[2K", "").replace("\r\x1b[1A", "")  # progress, of rich
    assert [part for part in ACTING if part in styled] == []


def calls(path):
    out = path.parent / "out"
    yield from ([name, path] for name in ("info", "verify", "head", "sample"))
    yield "info", path, "--returns"
    yield "diff", path, path
    yield "plot", path, "-o", out.with_suffix(".png")
    yield "plot", path, "no such key", "-o", out.with_suffix(".png")
    yield "head", path, "--png", out.with_suffix(".grid.png")
    yield "head", path, "--png", out.with_suffix(".grid.png"), "--key", KEY
    yield "report", path, "-o", out.with_suffix(".html")
    yield "convert", path, out, "--to", "hdf5"
    yield "convert", path, out, "--to", "checkpoint", "--drop", "no such key"
    yield "convert", path, out, "--to", "store"
    yield "info", path.with_name(KEY)


@pytest.mark.parametrize("color", [False, True])
def test_no_command_prints_what_a_terminal_acts_on(hostile, color, monkeypatch):
    for arguments in calls(hostile):
        if color and arguments[0] in ("report", "plot", "convert"):  # without styles
            continue
        shown = call(*arguments, color=color)
        assert shown.exit_code in (0, 1, 2) and not isinstance(shown.exception, KeyError), (arguments, shown.exception)
        assert_harmless(shown.output + shown.stderr)
        if shown.exit_code == 2 and not color:
            assert shown.stderr.count("\n") == 1, shown.stderr
    if not color and "key " in call("info", hostile).output:
        assert MARKUP in call("info", hostile).output


def test_json_is_ascii_and_has_the_names_that_are_shown(hostile):
    shown = call("info", hostile, "--json").stdout
    assert shown.isascii() and "\x7f" not in shown
    assert all(key["key"].isprintable() for key in json.loads(shown)["keys"])


@pytest.mark.deep
def test_a_report_and_a_plot_show_the_names(hostile):
    page = cli.report(hostile, output=hostile.parent / "report.html").read_text()
    assert_harmless(page)
    names = [key.key for key in cli.info(hostile).keys]
    if names:
        assert (
            cli.plot(hostile, [n for n in names if not n.startswith("pixels")], output=hostile.parent / "names.png")
            .stat()
            .st_size
        )
    for name in ("link=", "<script"):
        assert f"[{name}" not in page or "<a " not in page


def test_the_names_that_info_shows_are_those_that_others_take(tmp_path):
    make_store(tmp_path / "it")
    name = cli.info(tmp_path / "it").keys[0].key
    converted = cli.convert(tmp_path / "it", tmp_path / "new", to="store", drop=[name])
    assert converted.dropped == (name,) and name not in [key.key for key in cli.info(tmp_path / "new").keys]
