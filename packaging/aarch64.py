"""Compiles the native core for aarch64 and runs tests/native/core with it under qemu, on Debian or Ubuntu on x86-64.

    apt-get install qemu-user g++-aarch64-linux-gnu
    make test-aarch64                 # minutes; a Python of aarch64 with NumPy is fetched into build/aarch64, once

qemu on x86-64 keeps x86-64's order of stores: this shows that the core compiles and computes the same, and nothing of
its fences (docs/memory-model.md).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "aarch64"
SYSTEM, PACKAGES, OURS = BUILD / "system", BUILD / "packages", BUILD / "ours"
DEBIAN = ("python3", "libpython3-dev", "libstdc++6")
TESTED_WITH = ("numpy", "xxhash", "pytest", "hypothesis", "typing_extensions")
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = "-std=c++20 -O3 -fPIC -fvisibility=hidden -fno-strict-aliasing -fno-math-errno -ffp-contract=off -DNDEBUG"


def fetch_system() -> None:
    """Debian's Python of aarch64, unpacked into a folder: the system's own list of packages stays as it is."""
    lists, cache = BUILD / "lists", BUILD / "cache"
    (lists / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (cache / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    (lists / "status").touch()
    settings = {
        "Dir::State": lists,
        "Dir::State::status": lists / "status",
        "Dir::Cache": cache,
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
    }
    apt = ["apt-get", "-q", "--no-install-recommends", *(f"-o{name}={value}" for name, value in settings.items())]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "--download-only", "--yes", "install", *DEBIAN], check=True)
    for package in sorted((cache / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, SYSTEM], check=True)


def fetch_packages(version: str) -> None:
    """What the tests need, for a Python of this version."""
    platforms = [f"--platform=manylinux{tag}_aarch64" for tag in ("2014", "_2_17", "_2_27", "_2_28")]
    python = ["--python-version", version, "--implementation", "cp"]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--only-binary", ":all:", "--target", PACKAGES]
    subprocess.run([*pip, *platforms, *python, "-c", ROOT / "constraints.txt", *TESTED_WITH], check=True)


def compile_core(version: str) -> None:
    import nanobind

    parts = Path(nanobind.include_dir()).parent
    include = SYSTEM / "usr" / "include"
    folders = ["-isystem", include / f"python{version}", "-idirafter", include]
    folders += ["-isystem", parts / "include", "-isystem", parts / "ext" / "robin_map" / "include"]
    sources = [*sorted((ROOT / "src" / "native").glob("*.cpp")), parts / "src" / "nb_combined.cpp"]
    shutil.rmtree(OURS, ignore_errors=True)
    shutil.copytree(ROOT / "src" / "engram", OURS / "engram", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    module = OURS / "engram" / f"_native.cpython-{version.replace('.', '')}-aarch64-linux-gnu.so"
    subprocess.run([COMPILER, *FLAGS.split(), "-shared", *folders, "-o", module, *sources], check=True)


def main() -> None:
    missing = [tool for tool in (COMPILER, EMULATOR, "apt-get", "dpkg-deb") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(
            f"{', '.join(missing)} not found: apt-get install qemu-user g++-aarch64-linux-gnu (Debian, Ubuntu)"
        )
    if not (SYSTEM / "usr" / "bin" / "python3").exists():
        fetch_system()
    python = (SYSTEM / "usr" / "bin" / "python3").resolve()
    version = python.name.removeprefix("python")
    if not PACKAGES.exists():
        fetch_packages(version)
    compile_core(version)
    paths = os.pathsep.join(map(str, (OURS, PACKAGES, ROOT / "tests")))
    flags = ["-q", "-p", "no:cacheprovider", "-m", "not long and not deep", "--hang-timeout=0", "-o", "pythonpath="]
    done = subprocess.run(
        [EMULATOR, "-L", SYSTEM, python, "-m", "pytest", *flags, "tests/native/core", *sys.argv[1:]],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
