"""A dataset appears under its name whole, or not at all; and what each format needs is named."""

import io
import os
import sys
import threading
import time

import pytest
import torch

from contracts.children import Child, Signal
from data.datasets.support import assert_same_bits, steps
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.data.datasets import (
    iter_hdf5,
    iter_minari,
    iter_parquet,
    read_parquet,
    write_hdf5,
    write_minari,
    write_parquet,
)
from engram.errors import DatasetError

NEEDS = {"minari": "h5py", "hdf5": "h5py", "parquet": "pyarrow"}
WRITE = {"minari": write_minari, "hdf5": write_hdf5, "parquet": write_parquet}
READ = {"minari": iter_minari, "hdf5": iter_hdf5, "parquet": iter_parquet}


@pytest.fixture(params=WRITE)
def kind(request):
    pytest.importorskip(NEEDS[request.param], reason=f"{request.param} datasets need {NEEDS[request.param]}")
    return request.param


def batches_that_fail():
    yield steps([3, 4])
    raise RuntimeError("the environment broke")


def test_a_write_that_fails_leaves_nothing(kind, tmp_path):
    with pytest.raises(RuntimeError, match="the environment broke"):
        WRITE[kind](batches_that_fail(), tmp_path / "set")
    assert os.listdir(tmp_path) == []


def test_what_is_there_is_only_replaced_on_request(kind, tmp_path):
    old, new = steps([3], seed=1), steps([5], seed=2)
    WRITE[kind](old, tmp_path / "set")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        WRITE[kind](new, tmp_path / "set")
    assert_same_bits(torch.cat(list(READ[kind](tmp_path / "set"))), old)
    with pytest.raises(RuntimeError):
        WRITE[kind](batches_that_fail(), tmp_path / "set", overwrite=True)
    assert_same_bits(torch.cat(list(READ[kind](tmp_path / "set"))), old)
    WRITE[kind](new, tmp_path / "set", overwrite=True)
    assert_same_bits(torch.cat(list(READ[kind](tmp_path / "set"))), new)
    assert os.listdir(tmp_path) == ["set"]


def test_overwriting_removes_nothing_that_is_no_dataset(kind, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "thesis.tex").write_text("all of it")
    with pytest.raises(FileExistsError, match="this is none"):
        WRITE[kind](steps([3]), tmp_path / "set", overwrite=True)
    os.symlink(tmp_path / "set", tmp_path / "link")
    with pytest.raises(FileExistsError, match="this is none"):
        WRITE[kind](steps([3]), tmp_path / "link", overwrite=True)
    assert (tmp_path / "set" / "thesis.tex").read_text() == "all of it"


def test_dataset_created_meanwhile_is_not_replaced(kind, tmp_path):
    def slow():
        yield steps([3], seed=1)
        WRITE[kind](steps([5], seed=2), tmp_path / "set")

    with pytest.raises(FileExistsError):
        WRITE[kind](slow(), tmp_path / "set")
    assert_same_bits(torch.cat(list(READ[kind](tmp_path / "set"))), steps([5], seed=2))


def test_a_killed_write_leaves_no_half_file_and_the_next_one_cleans_up(kind, tmp_path):
    half_way = Signal()

    def batches():
        yield steps([50] * 20)
        half_way.send()
        Signal().wait()

    child = Child(lambda: WRITE[kind](batches(), tmp_path / "set"))
    half_way.wait()
    WRITE[kind](steps([3]), tmp_path / "set")  # beside a living one, which it leaves alone
    assert len(os.listdir(tmp_path)) == 2
    child.kill()
    assert len(os.listdir(tmp_path)) == 2
    assert len(torch.cat(list(READ[kind](tmp_path / "set")))) == 3
    WRITE[kind](steps([4]), tmp_path / "set", overwrite=True)
    assert os.listdir(tmp_path) == ["set"]
    assert len(torch.cat(list(READ[kind](tmp_path / "set")))) == 4


@pytest.mark.parametrize(("kind", "extra"), [("minari", "h5"), ("hdf5", "h5"), ("parquet", "parquet")])
def test_a_missing_package_is_named_with_its_pip_install(kind, extra, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, NEEDS[kind], None)
    (tmp_path / "set").write_bytes(b"")
    with pytest.raises(ImportError, match=rf'pip install "engram\[{extra}\]"'):
        WRITE[kind](steps([3]), tmp_path / "new")
    with pytest.raises(ImportError, match=rf'pip install "engram\[{extra}\]"'):
        next(READ[kind](tmp_path / "set"))
    assert os.listdir(tmp_path) == ["set"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("screen", "progress"), [(Terminal, True), (Terminal, False), (io.StringIO, True)])
def test_a_bar_is_shown_on_a_terminal_unless_it_is_silenced(kind, tmp_path, monkeypatch, screen, progress):
    for name in ("TERM", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stderr", screen())
    WRITE[kind](steps([3]), tmp_path / "set", progress=progress)
    assert ("writing" in sys.stderr.getvalue()) == (screen is Terminal and progress)


def test_writers_of_the_same_process_wait_until_the_dataset_is_written(tmp_path, monkeypatch):
    """A trajectory index and the rows that it names are of one moment."""
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    monkeypatch.setattr("engram.datasets.episodes.BLOCK_BYTES", 200)
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    rb.extend(steps([100]))
    stop = threading.Event()

    def write():
        while not stop.is_set():
            rb.extend(steps([30], seed=3))
            time.sleep(0)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for k in range(5):
            assert write_parquet(rb, tmp_path / f"{k}") == 100
    finally:
        stop.set()
        thread.join()


def flipped(path, read, data, at, bits=0xFF):
    path.write_bytes(data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :])
    rb = ReplayBuffer(storage=LazyTensorStorage(1000))
    try:
        read(path, rb)
    except Exception as error:
        return error
    return rb[:]


def test_a_flipped_byte_of_a_parquet_file_is_an_error_or_changes_nothing(tmp_path):
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    batch = steps([20, 13])
    write_parquet(batch, tmp_path / "s", compression="none")
    data = (tmp_path / "s").read_bytes()
    # Page headers have no checksum: with the right bit wrong, a page has fewer rows, and Arrow does not mind.
    for at, bits in (*((at, 0xFF) for at in range(0, len(data), 53)), *((at, 2) for at in range(1800, 1830))):
        found = flipped(tmp_path / "s", read_parquet, data, at, bits)
        if isinstance(found, Exception):
            assert isinstance(found, DatasetError), (at, found)
        else:
            assert_same_bits(found, batch)


def test_a_wrong_footer_of_a_parquet_file_never_reaches_arrow(tmp_path):
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    write_parquet(steps([5]), tmp_path / "s")
    data = (tmp_path / "s").read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for at in range(start, len(data) - 8, 97):
        assert "its footer is damaged" in str(flipped(tmp_path / "s", read_parquet, data, at))
