"""A memory control group for a child process, so that data larger than memory can be had on any machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")
ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A group whose processes have `limit` bytes together, page cache included; PermissionError without the rights."""
    with _hierarchy() as (root, file):
        group = root / f"engram-bench-{os.getpid()}"
        try:
            group.mkdir()
            (group / file).write_text(str(limit))
        except OSError as error:
            raise PermissionError(f"no rights to make a memory control group ({error})") from error
        try:
            yield group
        finally:
            group.rmdir()


def inside(group: Path, command: list[str]) -> list[str]:
    """The same command, started inside the group: its shell enters before the program exists."""
    return ["sh", "-c", ENTER, str(group), *command]


@contextmanager
def _hierarchy() -> Iterator[tuple[Path, str]]:
    """Where groups are made, and the file of the limit: version 1, version 2, or a version 1 mounted for us."""
    if (V1 / "memory.limit_in_bytes").exists():
        yield V1, "memory.limit_in_bytes"
    elif "memory" in _read(V2 / "cgroup.subtree_control").split():
        yield V2, "memory.max"
    else:
        with _mounted() as root:
            yield root, "memory.limit_in_bytes"


@contextmanager
def _mounted() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="engram-bench-cgroup-"))
    mount = ["mount", "-t", "cgroup", "-o", "memory", "cgroup", str(root)]
    try:
        if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
            raise PermissionError("there is no memory control group here, and no right to mount one")
        try:
            yield root
        finally:
            subprocess.run(["umount", str(root)], check=False)
    finally:
        root.rmdir()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
