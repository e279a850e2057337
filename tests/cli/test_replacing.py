"""What stands at a target is replaced only if engram wrote all of it, in one step; what is not is named."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from cli.support import store
from contracts.children import Child, Signal
from data.datasets.support import steps
from engram import _native, cli
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from engram.data.datasets import write_hdf5, write_minari, write_parquet
from engram.datasets import atomic_files
from engram.store import header, nodes

FORMS = {"store": "store", "checkpoint": "checkpoint", "torchrl": "torchrl", "minari": "minari"}


@pytest.fixture
def source(tmp_path):
    store(tmp_path).storage.close()
    return tmp_path / "store"


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """Every file, link and folder below a folder."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(folder.rglob("*"))
    }


def convert(source, target, form):
    return cli.convert(source, target, to=form, drop=["index"], overwrite=True)


def places(target: Path) -> list[Path]:
    """The folder, and every folder in it."""
    return [target, *(path for path in target.rglob("*") if path.is_dir())]


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_of_engrams_own_is_replaced(form, source, tmp_path):
    for _ in range(2):
        assert convert(source, tmp_path / "target", form).rows == 300
    assert {path.name for path in tmp_path.iterdir()} == {"store", "target"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strange", ["notes.txt", ".hidden", "link"])
def test_a_strangers_file_anywhere_in_the_folder_is_named_and_stays(form, strange, source, tmp_path):
    convert(source, tmp_path / "target", form)
    for place in places(tmp_path / "target"):
        file = place / strange
        if strange == "link":
            file.symlink_to(source)
        else:
            file.write_text("all of it")
        before = contents(tmp_path)
        with pytest.raises(FileExistsError, match=rf"only a .* of engram's is replaced, and this is none.*{strange}"):
            convert(source, tmp_path / "target", form)
        assert contents(tmp_path) == before
        file.unlink()


def test_a_strangers_empty_folder_in_the_target_stays(source, tmp_path):
    convert(source, tmp_path / "target", "checkpoint")
    (tmp_path / "target" / "figures").mkdir()
    with pytest.raises(FileExistsError, match="figures is not part of it"):
        convert(source, tmp_path / "target", "checkpoint")


@pytest.mark.parametrize(
    ("form", "name"),
    [("store", "rows.engram"), ("checkpoint", "CURRENT"), ("checkpoint", "LOCK"), ("torchrl", "buffer_metadata.json")],
)
def test_a_strangers_file_with_the_name_of_one_of_engrams_is_named_and_stays(form, name, source, tmp_path):
    convert(source, tmp_path / "target", form)
    for content in ("all of it", "{}"):
        (tmp_path / "target" / name).write_text(content)
        before = contents(tmp_path)
        with pytest.raises(FileExistsError, match=rf"is replaced, and this is none \(.*{name}"):
            convert(source, tmp_path / "target", form)
        assert contents(tmp_path) == before


def test_a_folder_with_nothing_but_a_strangers_file_of_the_name_current_stays(source, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "CURRENT").write_text("MANIFEST-000004")  # LevelDB's
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match="CURRENT"):
        convert(source, tmp_path / "target", "checkpoint")
    assert contents(tmp_path) == before


def test_a_link_in_the_place_of_a_dataset_s_description_stays(source, tmp_path):
    convert(source, tmp_path / "target", "minari")
    (tmp_path / "target/data/metadata.json").unlink()
    (tmp_path / "target/data/metadata.json").symlink_to(source)
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match=r"metadata.json is not a file"):
        convert(source, tmp_path / "target", "minari")
    assert contents(tmp_path) == before


def test_a_store_that_another_node_has_open_is_not_replaced(source, tmp_path, monkeypatch):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "live"))
    rb.extend(torch.arange(3))
    shutil.copytree(tmp_path / "live", tmp_path / "target")  # locks of one node are unknown in another
    monkeypatch.setattr(_native, "file_system_type", lambda fd: 0x6969)
    monkeypatch.setattr(nodes, "host_id", lambda boot: b"another machine.")
    monkeypatch.setattr(header, "boot_id", lambda: b"another start...")
    before = contents(tmp_path / "target")
    with pytest.raises(FileExistsError, match="another node has it open"):
        convert(source, tmp_path / "target", "store")
    assert contents(tmp_path / "target") == before


@pytest.mark.parametrize("form", ["store", "checkpoint"])
def test_a_file_that_comes_while_the_new_folder_is_written_stays(form, source, tmp_path, monkeypatch):
    convert(source, tmp_path / "target", form)
    exchange = atomic_files._rename_with
    seen = []

    def late(new, path, flag):
        if not seen:
            seen.append((path / "notes.txt").write_text("all of it"))
        return exchange(new, path, flag)

    monkeypatch.setattr(atomic_files, "_rename_with", late)
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match="notes"):
        convert(source, tmp_path / "target", form)
    assert seen and contents(tmp_path) == {**before, "target/notes.txt": b"all of it"}


def test_a_store_that_is_in_use_is_not_replaced(source, tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "target"))
    rb.extend(torch.arange(3))
    with pytest.raises(FileExistsError, match="it is in use"):
        convert(source, tmp_path / "target", "store")
    rb.extend(torch.arange(3))
    rb.storage.close()
    assert len(ReplayBuffer.open(tmp_path / "target")) == 6


def test_a_checkpoint_that_is_being_saved_or_read_is_not_replaced(source, tmp_path):
    from engram.checkpoint.reader import Checkpoint
    from engram.checkpoint.writer import saving

    convert(source, tmp_path / "target", "checkpoint")
    for use in (saving, lambda path: Checkpoint(path).reading()):
        with use(tmp_path / "target"), pytest.raises(FileExistsError, match="it is being saved or read"):
            convert(source, tmp_path / "target", "checkpoint")
    convert(source, tmp_path / "target", "checkpoint")


def test_a_report_replaces_a_report_and_nothing_else(source, tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(torch.arange(3))
    rb.dumps(tmp_path / "saved")
    (tmp_path / "thesis.tex").write_text("all of it")
    (tmp_path / "page.html").write_text("<!doctype html><p>mine")
    (tmp_path / "empty").touch()
    (tmp_path / "link.html").symlink_to("page.html")
    (tmp_path / "dangling.html").symlink_to("nowhere")
    os.link(tmp_path / "page.html", tmp_path / "second.html")
    targets = ["thesis.tex", "page.html", "empty", "link.html", "dangling.html", "second.html", "saved/CURRENT",
               "saved/LOCK", "store/rows.engram", "saved/g-000001/manifest.json"]  # fmt: skip
    before = contents(tmp_path)
    writers = (cli.report, lambda path, output: cli.plot(path, ["action"], output=output))
    for k, name in enumerate(targets):
        for write in writers if k < 2 else writers[k % 2 :][:1]:  # each is refused the first two, then they take turns
            with pytest.raises(FileExistsError, match="is replaced, and this is none"):
                write(source, output=tmp_path / name)
    assert contents(tmp_path) == before
    for _ in range(2):
        cli.report(source, output=tmp_path / "report.html")
        cli.plot(source, ["action"], output=tmp_path / "plot.png")
    (tmp_path / "linked.html").symlink_to("report.html")
    with pytest.raises(FileExistsError, match="it is a symbolic link"):
        cli.report(source, output=tmp_path / "linked.html")
    with pytest.raises(FileExistsError):
        cli.plot(source, ["action"], output=tmp_path / "report.html")
    with pytest.raises(FileExistsError):
        cli.report(source, output=tmp_path / "plot.png")


@pytest.mark.parametrize(("write", "suffix"), [(write_parquet, "parquet"), (write_hdf5, "hdf5")])
def test_datasets_replace_what_engram_wrote_and_nothing_else(write, suffix, tmp_path):
    h5py, pa = pytest.importorskip("h5py"), pytest.importorskip("pyarrow")
    target = tmp_path / f"set.{suffix}"
    if suffix == "hdf5":
        with h5py.File(target, "w") as file:
            file["weights"] = [1.0]
    else:
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.table({"results": [1.0]}), target)
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match="engram did not write it"):
        write(steps([3]), target, overwrite=True)
    assert contents(tmp_path) == before
    target.unlink()
    for n in (3, 4):
        assert write(steps([n]), target, overwrite=True) == n


def test_a_parquet_file_that_another_program_made_of_one_of_engrams_is_not_replaced(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    write_parquet(steps([3]), tmp_path / "ours.parquet")
    parquet.write_table(parquet.read_table(tmp_path / "ours.parquet"), tmp_path / "theirs.parquet")
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match="engram did not write it"):
        write_parquet(steps([3]), tmp_path / "theirs.parquet", overwrite=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("write", [write_parquet, write_hdf5, write_minari])
def test_a_target_is_refused_before_anything_is_read(write, tmp_path):
    (tmp_path / "target").write_text("all of it")
    read = []
    batches = (read.append(n) or steps([3]) for n in range(2))
    with pytest.raises(FileExistsError):
        write(batches, tmp_path / "target", overwrite=True)
    for draw in (cli.report, cli.plot):
        with pytest.raises(FileExistsError):
            draw(tmp_path / "nothing", output=tmp_path / "target")
    assert not read and [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("name", [".target.notes.engram-tmp", ".target.0123456789ab.backup.engram-tmp"])
def test_folders_that_only_look_like_leftovers_stay(name, tmp_path):
    (tmp_path / name).mkdir()
    write_minari(steps([3]), tmp_path / "target")
    assert (tmp_path / name).is_dir()


@pytest.mark.deep
@pytest.mark.parametrize("form", FORMS)
def test_a_conversion_that_is_killed_at_its_rename_leaves_the_old_or_the_new(form, source, tmp_path):
    convert(source, tmp_path / "target", form)
    for after in (False, True):
        arrived = Signal()

        def killed(after=after, arrived=arrived):
            exchange = atomic_files._rename_with

            def stop(new, path, flag):
                done = exchange(new, path, flag) if after else False
                arrived.send()
                Signal().wait()
                return done

            atomic_files._rename_with = stop
            convert(source, tmp_path / "target", form)

        child = Child(killed)
        arrived.wait()
        child.kill()
        assert len(cli.head(tmp_path / "target", 1000).slots) == 300
    convert(source, tmp_path / "target", form)
    assert {path.name for path in tmp_path.iterdir()} == {"store", "target"}
