"""Writes the versions that `make oldest` and `make newest` install: the bounds of pyproject.toml, and today's newest.

    python packaging/versions.py oldest     # constraints-oldest.txt
    python packaging/versions.py newest     # constraints-newest.txt

What these packages need is in the files too, so that no release of another project changes what runs on a submission.
torch is that of constraints.txt, which every environment shares. pip chooses for the Python that runs this.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomllib
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
#: Extras that are tried elsewhere: clusters and dm_control take half a gigabyte each, the rest is for developers.
ELSEWHERE = ("ray", "dm-control", "dev", "examples")
HEADS = {
    "oldest": "The lower bounds of pyproject.toml, and the newest releases of what these need that go with them",
    "newest": "The newest releases of what engram needs",
}


def file_of(which: str) -> Path:
    return ROOT / f"constraints-{which}.txt"


def requirements() -> list[Requirement]:
    """What pyproject.toml asks for, but for torch and what is tried elsewhere."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [asked for name, asked in project["optional-dependencies"].items() if name not in ELSEWHERE]
    every = [Requirement(text) for asked in [project["dependencies"], *extras] for text in asked]
    return list({one.name: one for one in every if one.name not in ("engram", "torch")}.values())


def lower_bound(asked: Requirement) -> str:
    (bound,) = (one.version for one in asked.specifier if one.operator == ">=")
    return str(bound)


def with_extras(asked: Requirement) -> str:
    return f"{asked.name}[{','.join(sorted(asked.extras))}]" if asked.extras else asked.name


def bounded(asked: Requirement) -> str:
    return f"{with_extras(asked)}=={lower_bound(asked)}"


def chosen(requests: list[str]) -> dict[str, dict[str, Any]]:
    """The metadata of all that pip would install for these, by name."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    report = subprocess.run([*pip, *requests], check=True, capture_output=True, text=True)
    return {canonicalize_name(one["metadata"]["name"]): one["metadata"] for one in json.loads(report.stdout)["install"]}


def needed(asked: list[Requirement], every: dict[str, dict[str, Any]]) -> list[str]:
    """The names of these and of all that they need, but not of what only torch needs."""
    found: set[str] = set()
    left = list(asked)
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        if name == "torch" or (name in found and not one.extras):
            continue
        found.add(name)
        for text in every[name].get("requires_dist", []):
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *one.extras)):
                left.append(need)
    return sorted(found)


def write(which: str) -> None:
    torch = re.search(r"^torch==.+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
    asked = requirements()
    every = chosen([torch, *(bounded(one) if which == "oldest" else with_extras(one) for one in asked)])
    lines = [f"{name}=={every[name]['version']}" for name in needed(asked, every)]
    about = f"# {HEADS[which]}; `python packaging/versions.py {which}` writes it.\n"
    file_of(which).write_text(about + "\n".join([torch, *lines]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="+", choices=HEADS)
    for which in parser.parse_args().which:
        write(which)
        print(f"{file_of(which).relative_to(ROOT)} is written; `make {which}` tries it", flush=True)


if __name__ == "__main__":
    main()
