"""What the figures were measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = (
    "engram",
    "torch",
    "tensordict",
    "numpy",
    "gymnasium",
    "torchrl",
    "cpprb",
    "tianshou",
    "stable-baselines3",
    "envpool",
)


def facts(folder: Path) -> dict[str, Any]:
    """Commit, CPU, memory, versions, date, and the read-ahead of the device under `folder`."""
    return {
        "commit": commit(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": round(_meminfo("MemTotal") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "read_ahead_kb": read_ahead_kb(folder),
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def commit() -> str | None:
    """The commit that is checked out, with "+" where files differ from it; None outside of a clone."""
    try:
        named = subprocess.run(
            ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return named.stdout.strip()


def available_memory() -> int:
    """Bytes that can be had without swapping."""
    return _meminfo("MemAvailable")


def read_ahead_kb(folder: Path) -> int | None:
    """The kernel's read-ahead for the device that holds `folder`; None where it cannot be told."""
    device = os.stat(folder).st_dev
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for at in (node / "queue", node.resolve().parent / "queue"):  # a partition's queue is that of its disk
        try:
            return int((at / "read_ahead_kb").read_text())
        except (OSError, ValueError):
            continue
    return None


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"{name} is not in /proc/meminfo")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
