"""The code on the pages of the documentation, as programs: a page's blocks, one after the other, are one program."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from contracts.programs import Program, finished

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"command-line.md"}  # its code runs in tests/cli, with a store that is there
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name not in ELSEWHERE)]

#: Packages that only the environment of the benchmarks has.
PEERS = ("torchrl", "stable_baselines3", "tianshou", "cpprb", "flashbax", "jax")
#: The package that only the environment of the tests on a cluster has.
CLUSTER = ("ray",)

_BLOCK = re.compile(r"^( *)```(python|bash)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each block of Python or of a shell."""
    without_margin = []
    for margin, language, text in _BLOCK.findall(page.read_text()):
        without_margin.append((language, "".join(line.removeprefix(margin) for line in text.splitlines(keepends=True))))
    return without_margin


def imports_any(page: Path, packages: tuple[str, ...]) -> bool:
    """Whether the page's code imports one of the packages."""
    line = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(packages)})\b", re.MULTILINE)
    return any(line.search(text) for language, text in blocks(page) if language == "python")


def pages(with_peers: bool, on_cluster: bool = False) -> list[str]:
    """Pages with code, by their paths in the repository: those that one environment can run."""
    return [
        str(page.relative_to(ROOT))
        for page in PAGES
        if blocks(page) and (imports_any(page, PEERS), imports_any(page, CLUSTER)) == (with_peers, on_cluster)
    ]


def _program(page: Path) -> list[tuple[str, str]]:
    """The page's blocks, those of Python that follow each other in one piece."""
    pieces: list[tuple[str, str]] = []
    for language, text in blocks(page):
        if language == "python" and pieces and pieces[-1][0] == "python":
            pieces[-1] = ("python", pieces[-1][1] + "\n" + text)
        else:
            pieces.append((language, text))
    return pieces


#: The command, with an output of its own: that of the template may be a file, which a pipe is not.
_COMMAND = """
import runpy, sys
sys.stdout = open(1, "w", closefd=False)
runpy.run_module("engram.cli", run_name="__main__")
"""


def run_page(path: str, folder: Path) -> None:
    """Runs a page's code in an empty folder; fails where a reader would be left with an error.

    Python that stands between two blocks of a shell is a program of its own. Of a shell, `engram` is run, and `make`
    must have the target; the rest (`pip install`) is for the reader's machine.
    """
    for number, (language, text) in enumerate(_program(ROOT / path)):
        if language == "python":
            script = folder / f"page_{number}.py"
            script.write_text(text)
            _run_python(script, text, path, folder)
            continue
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["engram"]:
                command = folder / "command.py"
                command.write_text(_COMMAND)
                _check(finished(Program(command, *words[1:], cwd=folder)), path)
            elif words[:1] == ["make"]:
                done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
                assert done.returncode == 0, f"{path}: `{line}`: {done.stderr}"


def _run_python(script: Path, text: str, path: str, folder: Path) -> None:
    """From a template that has imported torch and engram, but for code that may miss an import of a part of engram."""
    if re.search(r"^\s*(import|from) (engram\b(?!.* import)|ray\b)", text, re.MULTILINE):
        _run([sys.executable, script.name], path, folder)
    else:
        _check(finished(Program(script, cwd=folder)), path)


def _run(command: list[str], path: str, folder: Path) -> None:
    _check(subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300), path)


def _check(done: subprocess.CompletedProcess[str], path: str) -> None:
    assert done.returncode == 0, f"{path}: {shlex.join(done.args)}:\n{done.stdout}\n{done.stderr}"


def added_lines(page: str, program: str) -> list[str]:
    """The lines that the page's diffs add, and that the program does not have."""
    written = {line.strip() for line in Path(program).read_text().splitlines()}
    diffs = re.findall(r"^```diff\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    added = [line[1:].strip() for diff in diffs for line in diff.splitlines() if line.startswith("+")]
    assert added, f"{page} changes no line"
    return [line for line in added if line not in written]
