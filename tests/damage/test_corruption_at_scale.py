"""Bytes changed, files cut, lost and exchanged, all of them: never wrong data, no crash, the file named each time."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from contracts.checkpointer import flip, overwrite
from engram import verify
from engram.checkpoint.directory import MARKER, from_checksummed_json, to_checksummed_json
from engram.errors import CorruptCheckpointError
from golden.observed import held, unlike
from golden.recipes import RECIPES

pytestmark = pytest.mark.quick

# For each form a buffer whose sampler, writer or transforms have a state with arrays, too.
KINDS = ["rows-lanes", "flat", "nested", "h5", "h5-groups", "list", "ensemble", "prioritized", "transforms-n-steps"]


class Damaged:
    """Two snapshots of a kind, the second in force, and a buffer that holds something: damage is tried on them."""

    def __init__(self, name: str, path: Path, empty_too: bool) -> None:
        self.path, self._recipe, self.tried = path, RECIPES[name], 0
        rb = self._recipe.fill(self._recipe.fresh())
        rb.dumps(path)
        if self._recipe.more is not None:
            self._recipe.more(rb)
        rb.dumps(path, keep_last=2)
        self._expected = held(rb, "held")
        self._holding = self._recipe.fill(self._recipe.fresh())
        self._before = held(self._holding, "held")
        self._empty_too = empty_too
        self.files = sorted(file for file in path.rglob("*") if file.is_file() and "g-000001" not in file.parts)
        self.files = [file for file in self.files if file.name != "LOCK"]
        self.undamaged()

    def undamaged(self) -> None:
        rb = self._recipe.fresh()
        rb.loads(self.path)
        assert unlike(held(rb, "held"), self._expected) == []
        assert verify(self.path).ok

    def refused(self, *names: Path) -> None:
        """By a buffer that holds something and by an empty one; the error names the file, or one of them."""
        self.tried += 1
        for rb in (self._holding, self._recipe.fresh()) if self._empty_too else (self._holding,):
            before = held(rb, "held")
            with pytest.raises(CorruptCheckpointError) as caught:
                rb.loads(self.path)
            assert any(str(name) in str(caught.value) for name in names), caught.value
            assert unlike(held(rb, "held"), before) == []
        assert unlike(held(self._holding, "held"), self._before) == []

    def verify_names(self, *names: Path) -> None:
        report = verify(self.path)
        assert not report.ok and any(str(name) in str(report) for name in names)

    def data(self) -> list[Path]:
        return [file for file in self.files if "storage" in file.parts and file.stat().st_size]

    def metadata(self) -> list[Path]:
        return [file for file in self.files if file not in self.data() and file.stat().st_size]


@contextmanager
def changed(file: Path) -> Iterator[bytes]:
    """The file's content, which it has again afterwards."""
    content = file.read_bytes()
    # Alone: what is done to this file must not be done to a snapshot that links it.
    file.unlink()
    file.write_bytes(content)
    try:
        yield content
    finally:
        overwrite(file, content)


def every_damage(damaged: Damaged, deep: bool) -> dict[str, int]:
    counts = {}
    for kind in (bytes_of_metadata, bytes_of_data, cut_files, lost_files, exchanged_files, other_snapshots):
        before = damaged.tried
        kind(damaged, deep)
        counts[kind.__name__] = damaged.tried - before
    damaged.undamaged()
    return counts


def bytes_of_metadata(damaged: Damaged, deep: bool) -> None:
    rng = random.Random(0)
    for file in damaged.metadata():
        size = file.stat().st_size
        positions = range(size) if deep else sorted(rng.sample(range(size), min(size, 6)))
        with changed(file):
            for position in positions:
                bit = 1 << rng.randrange(8)
                flip(file, position, bit)
                damaged.refused(file)
                flip(file, position, bit)


def bytes_of_data(damaged: Damaged, deep: bool) -> None:
    rng = random.Random(1)
    files = damaged.data()
    total = sum(file.stat().st_size for file in files)
    count = 10_000 if deep else 24
    for file in files:
        with changed(file):
            size = file.stat().st_size
            for _ in range(max(1, count * size // total)):
                position, bit = rng.randrange(size), 1 << rng.randrange(8)
                flip(file, position, bit)
                damaged.refused(file)
                flip(file, position, bit)


def cut_files(damaged: Damaged, deep: bool) -> None:
    for file in [*damaged.metadata(), *damaged.data()]:
        with changed(file) as content:
            size, cuts = len(content), 100 if deep else 3
            for at in sorted({size * i // cuts for i in range(cuts)} | {size - 1}):
                overwrite(file, content[:at])
                damaged.refused(file)
            overwrite(file, content + b"\0")
            damaged.refused(file)


def lost_files(damaged: Damaged, deep: bool) -> None:
    for file in [*damaged.metadata(), *damaged.data()]:
        if file.name == "CURRENT":
            continue  # without it there is no checkpoint, which is another error
        with changed(file):
            file.unlink()
            damaged.refused(file)
            damaged.verify_names(file)
            file.mkdir()
            damaged.refused(file)
            file.rmdir()
            file.touch()


def exchanged_files(damaged: Damaged, deep: bool) -> None:
    """Each file for each other one, and for the one of the same name in the snapshot before."""
    files = [file for file in damaged.files if file.stat().st_size]
    pairs = [(a, b) for a in files for b in files if a < b and a.read_bytes() != b.read_bytes()]
    for a, b in pairs if deep else random.Random(2).sample(pairs, min(len(pairs), 12)):
        with changed(a) as one, changed(b) as other:
            overwrite(a, other)
            overwrite(b, one)
            damaged.refused(a, b)
            damaged.verify_names(a, b)
    for file in files:
        older = Path(str(file).replace("g-000002", "g-000001"))
        if older != file and older.exists() and older.read_bytes() != file.read_bytes() and file.name != MARKER:
            with changed(file):
                overwrite(file, older.read_bytes())
                damaged.refused(file)
                damaged.verify_names(file)


def other_snapshots(damaged: Damaged, deep: bool) -> None:
    current, first, second = (damaged.path / name for name in ("CURRENT", "g-000001", "g-000002"))
    with changed(current) as content:
        document = {key: value for key, value in from_checksummed_json(content).items() if key != "xxh3_128"}
        for name in ("g-000001", "g-000003", "g-999999"):
            overwrite(current, to_checksummed_json({**document, "snapshot": name}))
            damaged.refused(current, first / "manifest.json")
    aside = damaged.path / "aside"
    shutil.move(first, aside)
    shutil.move(second, first)
    damaged.refused(current)  # the one that it names is not there
    shutil.move(aside, second)
    damaged.refused(second / "manifest.json")  # each under the other's name
    shutil.move(second, aside)
    shutil.move(first, second)
    shutil.move(aside, first)


@pytest.mark.deep
@pytest.mark.parametrize("name", KINDS)
def test_damage_of_every_kind_is_noticed_and_named(name: str, ram_path: Path) -> None:
    counts = every_damage(Damaged(name, ram_path / "checkpoint", empty_too=True), deep=False)
    assert all(counts.values()), counts


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_every_byte_of_the_metadata_and_ten_thousand_of_the_data_are_noticed(name: str, ram_path: Path) -> None:
    counts = every_damage(Damaged(name, ram_path / "checkpoint", empty_too=False), deep=True)
    print(f"{name}: {counts}")
    assert counts["bytes_of_data"] > 9000


def test_a_damaged_marker_is_named_by_verify(ram_path: Path) -> None:
    damaged = Damaged("rows", ram_path / "checkpoint", empty_too=True)
    marker = ram_path / "checkpoint" / "g-000002" / MARKER
    with changed(marker):
        flip(marker, 3)
        damaged.verify_names(marker)
        damaged.refused(marker)
