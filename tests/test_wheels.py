"""packaging/wheels.py: what is passed on has our licence and those of what the core is built with."""

from __future__ import annotations

import importlib
import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from contracts.each import each

ROOT = Path(__file__).parents[1]
HELD = {
    "LICENSE": (ROOT / "LICENSE").read_bytes(),
    **{f"LICENSES/{path.name}": path.read_bytes() for path in (ROOT / "LICENSES").iterdir()},
}


@pytest.fixture
def wheels(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    return importlib.import_module("wheels")


def archive(folder: Path, kind: str, files: dict[str, bytes], named: list[str]) -> Path:
    """An sdist or a wheel with these licences, whose metadata name those."""
    said = "".join(["Metadata-Version: 2.4\n", *(f"License-File: {name}\n" for name in named), "\nA text\n"]).encode()
    if kind == "wheel":
        path, about = folder / "engram-0.1.0-py3-none-any.whl", "engram-0.1.0.dist-info"
        with zipfile.ZipFile(path, "w") as wheel:
            for name, content in {"METADATA": said, **{f"licenses/{n}": c for n, c in files.items()}}.items():
                wheel.writestr(f"{about}/{name}", content)
        return path
    path = folder / "engram-0.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as sdist:
        for name, content in {"PKG-INFO": said, **files}.items():
            about_file = tarfile.TarInfo(f"engram-0.1.0/{name}")
            about_file.size = len(content)
            sdist.addfile(about_file, io.BytesIO(content))
    return path


@each("kind", ["sdist", "wheel"])
def test_archive_without_a_licence_or_its_name_or_with_another_text_is_refused(kind, wheels, tmp_path):
    wheels.check_licenses(archive(tmp_path, kind, HELD, list(HELD)))
    for name in HELD:
        others = {other: content for other, content in HELD.items() if other != name}
        for files, named in ((others, HELD), ({**HELD, name: b""}, HELD), (HELD, others)):
            with pytest.raises(SystemExit, match=f"has no {name}: license-files"):
                wheels.check_licenses(archive(tmp_path, kind, files, list(named)))


def test_each_foreign_part_of_the_core_has_its_licence():
    parts = {path.stem for path in (ROOT / "src/native/third_party").iterdir()}
    parts |= {"nanobind", "robin_map"}  # which nanobind brings, and links
    assert parts == {Path(name).stem for name in HELD} - {"LICENSE"}
    includes = "\n".join(path.read_text() for path in (ROOT / "src/native").glob("*.[hc]pp"))
    assert {include.split("/")[0] for include in re.findall(r"#include <(\w+/\S+)>", includes)} == {"nanobind", "sys"}
