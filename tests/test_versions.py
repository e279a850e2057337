"""The versions that `make oldest` and `make newest` install, and what is said of them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DIGITS = r"[\d.]*\d"
#: Packages whose lower bound is not in constraints-oldest.txt; docs/versions.md says so of each.
ELSEWHERE = {"torch", "ray", "shimmy"}


def pins(file: str) -> dict[str, str]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def bounds() -> dict[str, str]:
    """The lower bounds of pyproject.toml for those who use engram, by name."""
    project = (ROOT / "pyproject.toml").read_text().split("[project]")[1].split("[project.scripts]")[0]
    project = re.sub(r"^(dev|examples) = .*$", "", project, flags=re.MULTILINE)
    found = re.findall(rf'"([A-Za-z0-9_-]+)(?:\[[a-z-]+\])?>=({DIGITS})"', project)
    return {name.replace("_", "-"): bound for name, bound in found}


def test_every_lower_bound_is_what_the_oldest_versions_are():
    oldest = pins("constraints-oldest.txt")
    assert set(bounds()) >= {"numpy", "tensordict", "h5py", "pyarrow", "imageio", "pytest"}
    for name, bound in bounds().items():
        if name not in ELSEWHERE:
            assert re.fullmatch(rf"{re.escape(bound)}(\.0)*", oldest[name]), (name, oldest[name])


def test_newest_versions_are_not_older_than_the_tested_ones():
    def numbers(version):
        return [int(part) for part in re.findall(r"\d+", version)]

    newest, tested = pins("constraints-newest.txt"), pins("constraints.txt")
    for name in bounds().keys() & newest.keys():
        if name in tested:
            assert numbers(newest[name]) >= numbers(tested[name]), name


@pytest.mark.parametrize("file", ["constraints-oldest.txt", "constraints-newest.txt"])
def test_oldest_and_newest_run_with_the_tested_torch(file):
    assert pins(file)["torch"] == pins("constraints.txt")["torch"]


def test_page_and_readme_name_the_versions_that_are_tried():
    page, readme = (ROOT / "docs/versions.md").read_text(), (ROOT / "README.md").read_text()
    columns = [pins(f"constraints{kind}.txt") for kind in ("-oldest", "", "-newest")]
    for name in bounds().keys() - ELSEWHERE:
        versions = [column.get(name, "any") for column in columns]
        assert f"| {name} | {versions[0]} | {versions[1]} | {versions[2]} |" in page, (name, versions)
    for name in ELSEWHERE - {"torch"}:
        assert f"- {name} {bounds()[name]}" in page, name
    for name in ("tensordict", "numpy"):
        assert f"{name} {columns[0][name]} and {columns[2][name]}" in readme, name
    assert f"torch {columns[1]['torch']}" in readme


def test_every_run_with_another_python_or_torch_is_in_the_page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    runs = importlib.import_module("other_pythons").RUNS
    page = (ROOT / "docs/versions.md").read_text()
    for run in runs:
        assert f"| {run.python} | {run.torch} | " in page, run
    assert any(run.torch.startswith(f"{bounds()['torch']}.") for run in runs)
