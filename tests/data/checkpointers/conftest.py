"""Places to save to: one in memory for tests that save often, small disks that can be filled."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest


@pytest.fixture
def ram_path() -> Iterator[Path]:
    """A directory that is quick to sync."""
    root = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=root) as path:
        yield Path(path)


@contextmanager
def _mounted(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a disk of the size given, such as "1m"."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    with ExitStack() as stack:
        yield lambda size: stack.enter_context(_mounted(tmp_path / "disk", size))
