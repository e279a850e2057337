"""How often a batch gives the GIL away, counted: beside a busy Python thread each time may cost milliseconds.

The counter stands between extension modules and Python (`LD_PRELOAD`), so each figure is one of a process of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Result, Row, missing, result
from benchmarks.data import cartpole
from benchmarks.libraries import OURS, buffer, replay_buffers

SOURCE = Path(__file__).parents[2] / "tests" / "native" / "counting_gil.c"
ROWS, BATCH, WARM_UP, BATCHES = 10_000, 256, 50, 200
KINDS = {
    "usual": "sample(256)",
    "reuse": "sample(256), reuse_batches=True",
    "both": "sample(256), reuse_batches=True, engram.Generator",
    "prioritized": "prioritised sample(256)",
    "prioritized_both": "prioritised sample(256), reuse_batches=True, engram.Generator",
}
NONE = ("both",)
"""Those that give it away not once."""


def results(*, quick: bool) -> list[Result]:
    """A row for each way to sample."""
    rows = {
        kind: result(
            Row(f"releases_{kind}", f"releases of the GIL, {title}", {}, target={"most": 0} if kind in NONE else {}),
            unit="a batch",
        )
        for kind, title in KINDS.items()
    }
    try:
        for kind, count in _counted().items():
            rows[kind]["contenders"][OURS] = {"median": count}
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        for row in rows.values():
            row["contenders"][OURS] = missing(error)
    return list(rows.values())


def _counted() -> dict[str, float]:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux" or not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        raise RuntimeError("counting needs a C compiler, and a Python whose functions lie in a shared library")
    with tempfile.TemporaryDirectory(prefix="engram-bench-") as folder:
        library = f"{folder}/counting.so"
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", str(SOURCE), "-o", library, "-ldl"], check=True)
        environment = {**os.environ, "LD_PRELOAD": library}
        command = [sys.executable, "-m", "benchmarks.cases.releases"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    counts: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return counts


def main() -> None:
    """In the process of its own: releases a batch of each kind."""
    import engram

    torch.set_num_threads(1)
    releases = ctypes.PyDLL(None).gil_releases
    releases.restype = ctypes.c_long
    counts = {}
    for kind in KINDS:
        settings: dict[str, Any] = {}
        if kind != "prioritized" and kind != "usual":
            settings["reuse_batches"] = True
        if kind.endswith("both"):
            settings["generator"] = engram.Generator(0)
        if kind.startswith("prioritized"):
            settings["sampler"] = replay_buffers(OURS).PrioritizedSampler(ROWS, 0.6, 0.4)
        rb = buffer(OURS, cartpole(ROWS), batch=BATCH, **settings)
        for _ in range(WARM_UP):
            rb.sample()
        before = releases()
        for _ in range(BATCHES):
            rb.sample()
        counts[kind] = (releases() - before) / BATCHES
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
