"""Pipes, sockets, devices and folders where a file belongs: at a path that a command is given, and inside it."""

import shutil

import pytest

from cli.support import store
from contracts.each import each
from engram import cli
from engram.data.datasets import write_hdf5, write_minari, write_parquet
from engram.errors import EngramError
from test_user_paths import PLANTS

READERS = {
    "info": cli.info,
    "verify": cli.verify,
    "head": cli.head,
    "sample": cli.sample,
    "diff": lambda path: cli.diff(path, path),
    "plot": lambda path: cli.plot(path, output=path.parent / "out.png"),
    "play": lambda path: cli.play(path, path.parent / "out.gif"),
    "report": lambda path: cli.report(path, output=path.parent / "out.html"),
    "convert": lambda path: cli.convert(path, path.parent / "out", to="checkpoint"),
}


@pytest.fixture
def planted(tmp_path):
    """Puts something else in the place of a file."""

    def plant(make, file):
        file.unlink()
        make(file)

    return plant


@each("plant", [plant for plant in PLANTS if plant.__name__ != "mkdir"])
@each("reader", READERS)
def test_a_path_that_is_no_file_is_refused_at_once(reader, plant, tmp_path):
    plant(tmp_path / "it")
    with pytest.raises((OSError, ValueError)):
        READERS[reader](tmp_path / "it")
    assert not (tmp_path / "out").exists()


def is_refused(path, form) -> bool:
    """Whether `head` refuses it, or `verify` says that it is damaged, by an error that the command shows."""
    try:
        cli.head(path)
        return form != "torchrl" and not cli.verify(path).ok  # which has no checksums
    except (EngramError, OSError, ValueError):
        return True


@pytest.mark.parametrize("plant", PLANTS)
def test_files_inside_of_what_is_read_are_refused_at_once(plant, tmp_path, planted):
    rb = store(tmp_path)
    rb.dumps(tmp_path / "checkpoint")
    rb.storage.close()
    cli.convert(tmp_path / "checkpoint", tmp_path / "torchrl", to="torchrl")
    cli.convert(tmp_path / "checkpoint", tmp_path / "minari", to="minari", drop=["index"])
    for form in ("store", "checkpoint", "torchrl", "minari"):
        names = [file.relative_to(tmp_path / form) for file in (tmp_path / form).rglob("*") if file.is_file()]
        for name in names:
            copy = shutil.copytree(tmp_path / form, tmp_path / "copy")
            planted(plant, copy / name)
            needed = name.name not in ("LOCK", "buffer_metadata.json") and name.parts[0] != "writer"
            assert is_refused(copy, form) or not needed, name
            shutil.rmtree(copy)


@each("plant", PLANTS)
@each(
    ("write", "name"), [(write_parquet, "it.parquet"), (write_hdf5, "it.hdf5"), (write_minari, "it"), (cli.report, "")]
)
def test_nothing_but_a_file_of_its_own_is_written_over(write, name, plant, tmp_path):
    rb = store(tmp_path)
    plant(tmp_path / (name or "it.html"))
    with pytest.raises(FileExistsError, match="this is none"):
        if write is cli.report:
            cli.report(tmp_path / "store", output=tmp_path / "it.html")
        else:
            write(rb, tmp_path / name, exclude=["index"], overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"store", name or "it.html"}
