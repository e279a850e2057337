"""How often a batch gives the GIL away: beside a busy Python thread each time may cost milliseconds."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("counting_gil.c")

SAMPLING = """
import ctypes, json
import torch
from tensordict import TensorDict
import engram
from engram.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

releases = ctypes.PyDLL(None).gil_releases
releases.restype = ctypes.c_long


def per_batch(kind, **arguments):
    rb = kind(storage=LazyTensorStorage(1000), batch_size=64, **arguments)
    entries = {"obs": torch.randn(1000, 4), "n": torch.arange(1000), "done": torch.zeros(1000, 1, dtype=torch.bool)}
    rb.extend(TensorDict(entries, [1000]))
    for _ in range(20):
        rb.sample()
    before = releases()
    for _ in range(100):
        rb.sample()
    return (releases() - before) / 100


kinds = {"ReplayBuffer": ReplayBuffer, "TensorDictReplayBuffer": TensorDictReplayBuffer}
print(json.dumps({name: {
    "usual": per_batch(kind),
    "reuse": per_batch(kind, reuse_batches=True),
    "generator": per_batch(kind, generator=engram.Generator(0)),
    "both": per_batch(kind, generator=engram.Generator(0), reuse_batches=True),
} for name, kind in kinds.items()}))
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    if "ENGRAM_SANITIZED" in os.environ:
        pytest.skip("the sanitizers' libraries are loaded ahead of all others")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux" or not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        pytest.skip("counting needs a C compiler, and a Python whose functions lie in a shared library")
    made = tmp_path_factory.mktemp("gil") / "counting_gil.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(made), "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(made)}
    command = [sys.executable, "-c", SAMPLING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["ReplayBuffer", "TensorDictReplayBuffer"])
def test_a_uniform_batch_gives_the_gil_away_not_once_with_reuse_and_a_generator_of_ours(counted, kind):
    assert counted[kind]["both"] == 0


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["ReplayBuffer", "TensorDictReplayBuffer"])
def test_without_them_torch_gives_it_away_at_each_draw_and_each_end_of_a_tensor(counted, kind):
    assert counted[kind]["reuse"] >= 1
    assert counted[kind]["generator"] >= 3
    assert counted[kind]["usual"] > counted[kind]["generator"]
