"""engram runs on Linux: what it says on another system, and that nothing promises one."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from contracts.each import each
from engram._system import memory_file, seal_size
from engram.data import LazyTensorStorage, ReplayBuffer

ROOT = Path(__file__).parents[1]
OTHERS = re.compile(r"\b((?i:mac ?os|os x|darwin|freebsd)|Windows)\b")


@each("system", ["darwin", "win32", "freebsd14", "cygwin"])
def test_the_import_on_another_system_says_in_a_sentence_what_to_do(system):
    code = f"import sys; sys.platform = {system!r}; import engram"
    command, package = [sys.executable, "-S", "-c", code], {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=package)
    what_to_do = "use WSL 2 (the Linux of Windows), or a Linux container"
    assert done.stderr.splitlines()[-1] == f"ImportError: engram runs on Linux, and this is {system}: {what_to_do}"


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("cmake") is None, reason="the build needs cmake")
def test_a_build_on_another_system_says_so_before_it_compiles(tmp_path):
    there = ["-DCMAKE_SYSTEM_NAME=Darwin", "-DCMAKE_CXX_COMPILER_FORCED=1"]
    done = subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path, *there], capture_output=True, text=True)
    said = " ".join(done.stderr.split())
    assert done.returncode != 0 and "engram runs on Linux, and this is Darwin: use WSL 2" in said


@pytest.mark.skipif(not all(map(shutil.which, ("cmake", "ninja"))), reason="the build needs cmake and ninja")
def test_a_build_without_a_compiler_ends_with_what_to_install(tmp_path):
    """What pip shows of a build is what its backend prints."""
    pytest.importorskip("scikit_build_core", reason="pip gets the backend for itself")
    for tool in ("cmake", "ninja"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    settings = {"build-dir": str(tmp_path / "build")}
    code = f"from scikit_build_core.build import build_wheel; build_wheel({str(tmp_path)!r}, {settings!r})"
    bare = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")} | {"PATH": str(tmp_path)}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=bare, **both)
    said, end = " ".join(done.stdout.split()).split(" *** CMake configuration failed ")
    assert done.returncode == 1 and "no C++ compiler was found: install one, or name one by" in said
    assert end.startswith("engram could not be built here. That needs a C++20 compiler (Debian, Ubuntu: apt-get")
    assert end.endswith(
        "A wheel needs none: `make wheels`, in a clone on a machine with a compiler, puts wheels into dist/."
    )


def test_shared_memory_works_in_a_python_that_was_built_for_an_older_linux(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    fd = memory_file("tried")
    try:
        os.truncate(fd, 8)
        seal_size(fd)
        with pytest.raises(PermissionError):
            os.truncate(fd, 4)
        os.truncate(fd, 16)
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)
    buffer = ReplayBuffer(storage=LazyTensorStorage(4, shared=True), batch_size=2)
    buffer.extend({"x": np.ones(4)})
    assert buffer.sample()["x"].tolist() == [1, 1]


def test_a_memory_file_that_cannot_be_made_is_an_oserror_there(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="Invalid argument"):
        memory_file("n" * 1000)


def texts() -> list[Path]:
    """What people read before they install, and what a build reads."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return [*pages, ROOT / "pyproject.toml", ROOT / "mkdocs.yml", ROOT / "Makefile", *(ROOT / "packaging").glob("*.py")]


def test_no_page_and_no_setting_of_the_build_promises_another_system():
    named = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in texts()
        if path.name != "release-notes.md"  # what was so on its day
        for line in path.read_text().splitlines()
        if OTHERS.search(line.replace("the Linux of Windows", ""))
    ]
    assert not named


@each("line", ["tested on macOS", "macos: arm64", "Operating System :: MacOS", "on Windows, too", "darwin"])
def test_a_promise_of_another_system_is_noticed(line):
    assert OTHERS.search(line)


def test_no_source_has_a_branch_for_another_system():
    branch = re.compile(r"_WIN32|__APPLE__|_MSC_VER|__linux__|sys\.platform|platform\.system\(|os\.name\b")
    files = [*(ROOT / "src" / "native").glob("*.[hc]pp"), *(ROOT / "src" / "engram").rglob("*.py")]
    found = {path.relative_to(ROOT / "src") for path in files if branch.search(path.read_text())}
    assert found == {Path("engram/__init__.py")}, "only the import asks for the system"


def test_the_classifiers_of_systems_are_linux():
    systems = re.findall(r'"Operating System :: (.+)"', (ROOT / "pyproject.toml").read_text())
    assert systems == ["POSIX :: Linux"]


def test_readme_and_the_page_of_the_installation_say_linux():
    for page in ("README.md", "docs/getting-started.md", "docs/versions.md"):
        text = (ROOT / page).read_text()
        assert re.search(r"engram (runs on|needs) Linux", text), page
