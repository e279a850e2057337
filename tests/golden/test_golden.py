"""What was once saved is read for ever: every golden checkpoint gives back the buffer that it was made of."""

from __future__ import annotations

import gzip
import inspect
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import engram.data
import engram.envs.transforms
from contracts.each import each
from engram import verify
from engram._native import FIRST_REPLACED
from engram.checkpoint.directory import from_checksummed_json
from engram.cli import verify as verify_store
from engram.data import (
    LazyTensorStorage,
    ReplayBuffer,
    Sampler,
    StorageCheckpointerBase,
    TensorDictMaxValueWriter,
    Writer,
)
from engram.store.header import FILE_NAME
from engram.transforms.base import Transform
from golden.make import BEST_STORE, COMPACT_STORE, DATA, INCREMENTAL, REMOVED_STORE, STORE
from golden.observed import observed, read, unlike
from golden.recipes import CAPACITY, RECIPES
from golden.steps import stacks, steps

# Those whose `state_dict` is there to be overridden, or always empty.
NO_STATE = {"Compose", "Reward2GoTransform", "Transform"}


def expected(name: str, file: str = "expected.npz") -> dict[str, Any]:
    return read(DATA / name / file)


def as_cloned(name: str, folder: Path) -> Path:
    """The checkpoint as a clone or an archive brings it: without file modes, read-only as a whole."""
    shutil.copytree(DATA / name / "checkpoint", folder, copy_function=shutil.copyfile)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "cloned"
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(path.stat().st_mode | stat.S_IWUSR)


@pytest.mark.parametrize("name", RECIPES)
def test_a_checkpoint_gives_back_rows_counters_and_the_batches_that_follow(name: str, folder: Path) -> None:
    recipe = RECIPES[name]
    rb = recipe.fresh()
    rb.loads(as_cloned(name, folder))
    differences = unlike(observed(rb, recipe.batch_size, recipe.more), expected(name))
    if name.endswith("-lanes"):  # the files are of before writers moved from lane to lane: new rows went elsewhere
        differences = [name for name in differences if " later" not in name]
    assert differences == []


@each("name", RECIPES)
def test_a_checkpoint_verifies_and_nothing_is_written_by_that_or_by_loads(name: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in (DATA / name).rglob("*")}
    report = verify(DATA / name / "checkpoint")
    assert report.ok and not report.problems
    RECIPES[name].fresh().loads(DATA / name / "checkpoint")
    assert {path: path.stat().st_mtime_ns for path in (DATA / name).rglob("*")} == before


def test_each_snapshot_of_an_incremental_save_is_read_though_a_clone_has_no_links() -> None:
    for i, snapshot in enumerate(("g-000001", "g-000002")):
        rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
        rb.loads(DATA / INCREMENTAL / "checkpoint", snapshot=snapshot)
        assert unlike(observed(rb, 8), expected(INCREMENTAL, f"expected-{i + 1}.npz")) == []
    chunks = [
        sorted(p.name for p in (DATA / INCREMENTAL / "checkpoint" / s / "storage").iterdir()) for s in snapshots()
    ]
    assert set(chunks[0]) & set(chunks[1]), "the second one took nothing over"


def snapshots() -> tuple[str, str]:
    return "g-000001", "g-000002"


def test_a_mapped_store_is_opened_as_it_was_left(tmp_path: Path) -> None:
    shutil.copytree(DATA / STORE / "scratch", tmp_path / "scratch", copy_function=shutil.copyfile)
    rb = ReplayBuffer.open(tmp_path / "scratch")
    found, before = observed(rb, 8), expected(STORE)
    # Where the next row goes is decided otherwise since writers move from lane to lane.
    assert found.pop("held counts")[:2].tolist() == before.pop("held counts")[:2].tolist()
    assert unlike(found, before) == []
    rb.extend(rb[:3])
    assert rb.write_count == 11
    rb.storage.close()


def test_a_mapped_store_whose_rows_carry_their_sequences_is_opened_as_it_was_left(tmp_path: Path) -> None:
    shutil.copytree(DATA / BEST_STORE / "scratch", tmp_path / "scratch", copy_function=shutil.copyfile)
    rb = ReplayBuffer.open(tmp_path / "scratch", writer=TensorDictMaxValueWriter(("next", "reward")))
    assert unlike(observed(rb, 8), expected(BEST_STORE)) == []
    before = rb.storage.lanes.generations(torch.arange(8))
    assert (before >= FIRST_REPLACED).any()
    replaced = rb.extend(rb[:1].apply(lambda t: t + 100 if t.is_floating_point() else t))
    assert rb.storage.lanes.generations(torch.arange(8))[replaced] > before.max()
    rb.storage.close()


def test_a_mapped_store_with_removed_rows_is_opened_as_it_was_left(tmp_path: Path) -> None:
    packed = (DATA / REMOVED_STORE / f"{FILE_NAME}.gz").read_bytes()
    (tmp_path / FILE_NAME).write_bytes(gzip.decompress(packed))
    rb = ReplayBuffer.open(tmp_path)
    found, before = observed(rb, 8), expected(REMOVED_STORE)
    gone = torch.from_numpy(before.pop("removed"))
    assert found.pop("held counts")[:2].tolist() == before.pop("held counts")[:2].tolist()  # as above
    assert unlike(found, before) == []
    assert torch.equal(rb.storage.is_removed(torch.arange(12)), gone) and rb.stats().removed == int(gone.sum()) > 1
    drawn = rb.sample(500, return_info=True)[1]["index"].unique()
    assert torch.equal(drawn, torch.arange(12)[~gone])
    rb.extend(steps(40, 12).select("obs", "action", "next"))
    assert rb.stats().removed == 0
    rb.storage.close()


def test_a_checkpoint_with_removed_rows_gives_them_back_as_removed() -> None:
    rb = RECIPES["rows-removed"].fresh()
    rb.loads(DATA / "rows-removed" / "checkpoint")
    n = rb.sample(500)["obs"][:, 0]
    for w in (17, 18, CAPACITY - 1, CAPACITY + 5, CAPACITY + 9):
        assert not (n == w / 8).any()
    assert rb.stats().removed == 5
    rb.extend(steps(2 * CAPACITY, CAPACITY))
    assert rb.stats().removed == 0


def test_a_mapped_store_with_observations_stored_once_is_opened_as_it_was_left(tmp_path: Path) -> None:
    packed = (DATA / COMPACT_STORE / f"{FILE_NAME}.gz").read_bytes()
    (tmp_path / FILE_NAME).write_bytes(gzip.decompress(packed))
    rb = ReplayBuffer.open(tmp_path)
    assert unlike(observed(rb, 8), expected(COMPACT_STORE)) == []
    for start, n in ((54, 1), (55, 19), (74, 2)):
        rb.extend(stacks(start, n, n_steps=3))
        rows = rb.storage.get(range(CAPACITY))
        whole = torch.cat([stacks(w, 1, n_steps=3) for w in sequences(start + n)])
        assert (rows["pixels"] == whole["pixels"]).all()
        assert (rows["next", "pixels"] == whole["next", "pixels"]).all()
    rb.storage.close()
    assert verify_store(tmp_path).ok


def sequences(written: int) -> list[int]:
    """Of the row in each slot."""
    return [written - 1 - (written - 1 - slot) % CAPACITY for slot in range(CAPACITY)]


def test_a_checkpoint_that_git_could_change_would_be_noticed() -> None:
    """Line ends, above all: the folder says that none of its files is text."""
    assert (DATA / ".gitattributes").read_text() == "* -text -diff\n"


def test_all_together_are_small() -> None:
    assert sum(file.stat().st_size for file in DATA.rglob("*") if file.is_file()) < 1_000_000


# ---- that there is one of every kind ----
def kinds_in(tree: Any) -> Iterator[str]:
    """Names of the parts whose states are in a component's tree."""
    if isinstance(tree, dict):
        if type(tree.get("kind")) is str and "state" in tree:
            yield tree["kind"].removeprefix("inverted ")  # appended with `invert=True`
        for value in tree.values():
            yield from kinds_in(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from kinds_in(value)


def formats_in(storage: Any) -> Iterator[str]:
    yield storage["format"]
    for member in storage["state"].get("members", []):
        yield from formats_in(member)


@pytest.fixture(scope="module")
def covered() -> tuple[set[str], set[str]]:
    kinds: set[str] = set()
    formats: set[str] = set()
    for manifest in DATA.glob("*/checkpoint/g-*/manifest.json"):
        body = from_checksummed_json(manifest.read_bytes())["body"]
        kinds |= set(kinds_in(body["components"]))
        formats |= set(formats_in(body["storage"]))
    return kinds, formats


def public(base: type) -> list[type]:
    """Every class of a kind that users can name."""
    names = {**vars(engram.data), **vars(engram.data.replay_buffers.checkpointers), **vars(engram.envs.transforms)}
    found = {c for c in names.values() if isinstance(c, type) and issubclass(c, base) and not inspect.isabstract(c)}
    return sorted(found - {base}, key=lambda c: c.__name__)


def test_every_public_checkpointer_has_a_golden_file(covered: tuple[set[str], set[str]]) -> None:
    assert {c.format for c in public(StorageCheckpointerBase)} - covered[1] == set()


@pytest.mark.parametrize("base", [Sampler, Writer])
def test_every_public_sampler_and_writer_has_a_golden_file(base: type, covered: tuple[set[str], set[str]]) -> None:
    assert len(public(base)) > 4
    assert {c.__name__ for c in public(base)} - covered[0] == set()


def test_every_public_transform_with_state_has_a_golden_file(covered: tuple[set[str], set[str]]) -> None:
    with_state = {c.__name__ for c in public(Transform) if c.state_dict is not Transform.state_dict}
    assert with_state - NO_STATE - covered[0] == set()


def test_there_is_a_golden_file_for_each_recipe_and_a_recipe_for_each_golden_file() -> None:
    assert {entry.name for entry in os.scandir(DATA) if entry.is_dir()} == {
        *RECIPES,
        INCREMENTAL,
        STORE,
        BEST_STORE,
        COMPACT_STORE,
        REMOVED_STORE,
    }
