"""What importing engram loads, and what it says where an optional package is missing."""

import json
import subprocess
import sys

import pytest

CORE = "numpy, tensordict, torch, xxhash"
# Packages are hidden after tensordict is loaded, which needs cloudpickle itself.
WITHOUT = f"""
import importlib, io, json, pkgutil, sys
import {CORE}
for package in ("cloudpickle", "gymnasium", "h5py", "matplotlib", "pyarrow", "rich"):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
    sys.modules[package] = None

import engram
modules = [module.name for module in pkgutil.walk_packages(engram.__path__, "engram.")]
for name in modules:
    # Adapters import the library that they adapt to; `GymEnv` loads engram.envs.gym_make.
    if not name.startswith(("engram.testing", "engram.compat.")) and name != "engram.envs.gym_make":
        importlib.import_module(name)

from engram.collectors import MultiSyncDataCollector
from engram.data import Bounded, space_from_spec
from engram._progress import progress_bar
from engram.envs import GymEnv, ParallelEnv

calls = {{
    "GymEnv": lambda: GymEnv("CartPole-v1"),
    "space_from_spec": lambda: space_from_spec(Bounded(-1, 1, (2,))),
    "ParallelEnv": lambda: ParallelEnv(2, lambda: None),
    "MultiSyncDataCollector": lambda: MultiSyncDataCollector([lambda: None], frames_per_batch=10, total_frames=10),
}}
errors = {{}}
for name, call in calls.items():
    try:
        call()
    except ImportError as error:
        errors[name] = str(error)

class Terminal(io.StringIO):
    def isatty(self):
        return True

sys.stderr = Terminal()
with progress_bar("reading set", 2_000, True) as advance:
    advance(100)
print(json.dumps([modules, errors, sys.stderr.getvalue()]))
"""
INSTALL = {
    "GymEnv": 'GymEnv needs gymnasium: pip install "engram[gym]"',
    "space_from_spec": 'space_from_spec needs gymnasium: pip install "engram[gym]"',
    "ParallelEnv": 'a worker process needs cloudpickle: pip install "engram[workers]"',
    "MultiSyncDataCollector": 'a worker process needs cloudpickle: pip install "engram[workers]"',
}
"""The files of HDF5, Minari and Parquet have tests of their own that say the same."""


def output_of(code: str) -> str:
    """Of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.deep
def test_importing_loads_the_four_packages_of_the_core_and_no_other():
    code = f"""if True:
        import importlib, sys, {CORE}
        before = set(sys.modules)
        for name in ("engram.data", "engram.envs", "engram.collectors"):
            importlib.import_module(name)
            packages = {{name.split(".")[0] for name in set(sys.modules) - before}}
            print(sorted(packages - set(sys.stdlib_module_names) - {{"numpy", "tensordict", "torch", "xxhash"}}))
    """
    assert output_of(code).splitlines() == ["['engram']"] * 3


@pytest.fixture(scope="module")
def without():
    """Without any optional package: the modules, the errors of what needs one, and a line of progress."""
    return json.loads(output_of(WITHOUT))


@pytest.mark.deep
def test_every_module_is_imported_without_the_optional_packages(without):
    assert {"engram.data", "engram.envs", "engram.collectors", "engram.datasets"} <= set(without[0])


@pytest.mark.deep
@pytest.mark.parametrize("name", INSTALL)
def test_what_needs_a_missing_package_says_how_to_install_it(without, name):
    assert without[1][name] == INSTALL[name]


@pytest.mark.deep
def test_without_rich_progress_is_a_line_of_text(without):
    assert without[2].startswith("\rreading set: 0 of 2,000 steps") and without[2].endswith(" \r")
