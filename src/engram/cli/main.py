"""The command `engram`: its arguments, and how results are shown.

Exit codes: 0 done; 1 something is damaged, or two things differ; 2 it could not be done, and standard error says why.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram import __version__, cli
from engram.cli import tables, terminal
from engram.cli.cells import oldest_cells
from engram.cli.kinds import kind_of
from engram.errors import EngramError
from engram.kernel.tools import packages

if TYPE_CHECKING:
    import typer

    from engram.cli.rows import RowsShown

DONE, DIFFERENT, FAILED = 0, 1, 2
FORMS = ("store", "checkpoint", "torchrl", "minari", "hdf5", "parquet")  # that `convert` writes

# Errors that a path, a snapshot or an installation can cause. Any other is a fault of engram: its traceback is shown.
_EXPECTED = (EngramError, OSError, ValueError, TypeError, LookupError, ImportError, MemoryError)


def run() -> None:
    """The console script; ends the process with its exit code."""
    try:
        app = command()
    except ImportError as error:
        terminal.print_error(str(error))
        raise SystemExit(FAILED) from None
    warnings.showwarning = lambda message, *where, **more: terminal.print_error(f"warning: {message}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # letters that the terminal does not have
    app()


def command() -> typer.Typer:
    """The typer application with every command.

    Raises:
        ImportError: typer is not installed.
    """
    with packages("the command line", "engram[cli]", rich="rich", typer="typer"):
        import rich
        import typer
    del rich
    app = typer.Typer(
        name="engram",
        help="Look into stores, checkpoints and dataset files. A store may be in use: nothing is locked or changed.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    as_json = typer.Option(False, "--json", help="Print JSON.")
    of_snapshot = typer.Option(None, "--snapshot", help="Of a checkpoint, another snapshot than the current one.")
    a_path = typer.Argument(..., help="A store, a checkpoint, a directory of TorchRL's or a dataset file.")

    @app.callback(invoke_without_command=True)
    def main(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
        if version:
            terminal.print_plain(__version__)
            raise typer.Exit(DONE)

    @app.command("info")
    def info_command(
        path: str = a_path,
        episodes: bool = typer.Option(False, "--episodes", help="Count episodes: reads the flags of all rows."),
        returns: bool = typer.Option(False, "--returns", help="Sum rewards over episodes: reads all rewards."),
        snapshot: str = of_snapshot,
        json: bool = as_json,
    ) -> None:
        """Shows keys, shapes, dtypes, rows, bytes, lanes, writers; from headers, unless more is asked for."""
        with _errors_shown():
            result = cli.info(path, episodes=episodes or None, returns=returns, snapshot=snapshot, progress=not json)
        _show(result.to_json() if json else None, lambda: tables.show_info(result))

    stores_to_watch = typer.Argument(..., help="Stores, or patterns of such in quotes: 'runs/*/replay'.")

    @app.command("top")
    def top_command(
        paths: list[str] = stores_to_watch,
        every: float = typer.Option(1.0, "--every", help="Seconds between two looks."),
        count: int = typer.Option(None, "-n", help="How many looks; without end."),
        json: bool = typer.Option(False, "--json", help="Print a line of JSON for each look."),
    ) -> None:
        """What goes on in stores, refreshed: rows, rates by writer, episodes, returns, what learners draw."""
        with _errors_shown(), suppress(KeyboardInterrupt):
            looks = islice(cli.top(paths, every=every), count)
            if json:
                for stores in looks:
                    terminal.print_json_line([now.to_json() for now in stores])
                return
            with terminal.live_screen() as show:
                for stores in looks:
                    show(tables.activity_lines(stores))

    @app.command("verify")
    def verify_command(path: str = a_path, json: bool = as_json) -> None:
        """Compares everything with its checksums; lists damaged files and rows; exit code 1 if there are any."""
        with _errors_shown():
            result = cli.verify(path, progress=not json)
        _show(result.to_json() if json else None, lambda: tables.show_verification(result))
        raise typer.Exit(DONE if result.ok else DIFFERENT)

    @app.command("diff")
    def diff_command(
        a: str = a_path,
        b: str = typer.Argument(..., help="The path to compare it with."),
        by: str = typer.Option(None, "--by", help="sequence or age, instead of what makes more rows equal."),
        snapshot_a: str = typer.Option(None, "--snapshot-a", help="Of a checkpoint, another snapshot of A."),
        snapshot_b: str = typer.Option(None, "--snapshot-b", help="The same of B."),
        json: bool = as_json,
    ) -> None:
        """Lists the differences of two paths: keys, rows, parts of checkpoints; exit code 1 if there are any."""
        with _errors_shown():
            result = cli.diff(a, b, by=by, snapshot_a=snapshot_a, snapshot_b=snapshot_b, progress=not json)
        _show(result.to_json() if json else None, lambda: tables.show_differences(result))
        raise typer.Exit(DONE if result.equal else DIFFERENT)

    how_many = typer.Option(10, "-n", help="How many rows.")
    to_png = typer.Option(None, "--png", help="Write the rows' images to this file, as a grid.")
    of_key = typer.Option(None, "--key", help="Which key's images; the first that holds some.")

    def show_rows(result: RowsShown, png: str | None, key: str | None, json: bool) -> None:
        with _errors_shown():
            if png is not None:
                result.save_png(png, key)
        _show(result.to_json() if json else None, lambda: tables.show_rows(result.cells()))

    @app.command("head")
    def head_command(
        path: str = a_path,
        n: int = how_many,
        snapshot: str = of_snapshot,
        png: str = to_png,
        key: str = of_key,
        json: bool = as_json,
    ) -> None:
        """The oldest rows, as a table; of large leaves shape, least and largest number."""
        if png is None and not json:
            with _errors_shown():
                if kind_of(path) == "store":  # without torch
                    tables.show_rows(oldest_cells(path, n))
                    return
        with _errors_shown():
            result = cli.head(path, n, snapshot=snapshot, progress=not json)
        show_rows(result, png, key, json)

    @app.command("sample")
    def sample_command(
        path: str = a_path,
        n: int = how_many,
        seed: int = typer.Option(None, "--seed", help="For the same rows again."),
        snapshot: str = of_snapshot,
        png: str = to_png,
        key: str = of_key,
        json: bool = as_json,
    ) -> None:
        """Rows drawn uniformly, as a table."""
        with _errors_shown():
            result = cli.sample(path, n, seed=seed, snapshot=snapshot, progress=not json)
        show_rows(result, png, key, json)

    names_to_plot = typer.Argument(None, help="returns, lengths, or keys; returns and lengths by default.")
    keys_to_drop = typer.Option([], "--drop", help="A key to leave out; may be given several times.")

    @app.command("plot")
    def plot_command(
        path: str = a_path,
        what: list[str] = names_to_plot,
        output: str = typer.Option(None, "-o", "--output", help="The PNG; <name>.png by default."),
        histogram: bool = typer.Option(False, "--histogram", help="How often each value stands there."),
        snapshot: str = of_snapshot,
        json: bool = as_json,
    ) -> None:
        """Returns, lengths or any key over time, or as histograms: a PNG."""
        with _errors_shown():
            names = what or ["returns", "lengths"]
            file = cli.plot(path, names, output=output, histogram=histogram, snapshot=snapshot, progress=not json)
        _show(
            {"file": str(file), "nbytes": file.stat().st_size} if json else None,
            lambda: terminal.print_plain(str(file)),
        )

    @app.command("play")
    def play_command(
        path: str = a_path,
        episode: int = typer.Option(-1, "--episode", help="Which one: 0 is the oldest, -1 the newest."),
        output: str = typer.Option(None, "-o", "--output", help="The .gif or .mp4 to write; <name>.gif by default."),
        gif: str = typer.Option(None, "--gif", help="The same, a GIF."),
        mp4: str = typer.Option(None, "--mp4", help="The same, an MP4; needs engram's extra 'video'."),
        key: str = of_key,
        fps: float = typer.Option(30.0, "--fps", help="Frames a second."),
        snapshot: str = of_snapshot,
        json: bool = as_json,
    ) -> None:
        """Writes a stored episode's frames as a film."""
        with _errors_shown():
            given = [name for name in (output, gif, mp4) if name is not None]
            if len(given) > 1:
                raise ValueError("give one of -o, --gif and --mp4")
            film = given[0] if given else f"{Path(path).absolute().name}.gif"
            file = cli.play(path, film, episode=episode, key=key, fps=fps, snapshot=snapshot, progress=not json)
        _show(
            {"file": str(file), "nbytes": file.stat().st_size} if json else None,
            lambda: terminal.print_plain(str(file)),
        )

    @app.command("convert")
    def convert_command(
        source: str = a_path,
        target: str = typer.Argument(..., help="The folder or file to make."),
        to: str = typer.Option(None, "--to", help=f"{', '.join(FORMS)}; or by the suffix."),
        drop: list[str] = keys_to_drop,
        capacity: int = typer.Option(None, "--capacity", help="Of a store or checkpoint: how many steps fit."),
        rows: int = typer.Option(None, "--rows", help="Of memory-mapped TensorDicts: how many steps were written."),
        snapshot: str = of_snapshot,
        overwrite: bool = typer.Option(False, "--overwrite", help="Replace the target, if engram wrote all of it."),
        json: bool = as_json,
    ) -> None:
        """Writes the same steps in another form; what that cannot hold is named, and nothing is written."""
        with _errors_shown():
            result = cli.convert(
                source, target, to=to, drop=drop, capacity=capacity, rows=rows, snapshot=snapshot,
                overwrite=overwrite, progress=not json,
            )  # fmt: skip
        _show(result.to_json() if json else None, lambda: tables.show_conversion(result))

    @app.command("report")
    def report_command(
        path: str = a_path,
        output: str = typer.Option(None, "-o", "--output", help="The HTML file; <name>.html by default."),
        snapshot: str = of_snapshot,
        json: bool = as_json,
    ) -> None:
        """Writes one self-contained HTML page: keys, lanes, plots, images, rows."""
        with _errors_shown():
            file = cli.report(path, output=output, snapshot=snapshot, progress=not json)
        _show(
            {"file": str(file), "nbytes": file.stat().st_size} if json else None,
            lambda: terminal.print_plain(str(file)),
        )

    return app


@contextmanager
def _errors_shown() -> Iterator[None]:
    """A block whose expected errors are printed as one line, without a traceback."""
    try:
        yield
    except _EXPECTED as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        terminal.print_error(str(text))
        raise SystemExit(FAILED) from None


def _show(as_json: Any, show: Callable[[], None]) -> None:
    if as_json is None:
        show()
    else:
        terminal.print_json(as_json)
