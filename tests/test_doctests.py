"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil

import numpy as np
import pytest
import tensordict
import torch

import engram
import engram.data
from contracts.each import each

#: Modules that adapt to a library which tests are not installed with.
NEEDS = {"engram.compat.sb3": "stable_baselines3", "engram.compat.tianshou": "tianshou"}
MODULES = sorted(m.name for m in pkgutil.walk_packages(engram.__path__, "engram.") if not m.name.startswith("engram._"))


def names() -> dict[str, object]:
    """What examples may use without importing it."""
    known = {name: getattr(engram.data, name) for name in engram.data.__all__}
    transforms = importlib.import_module("engram.transforms")
    known |= {name: getattr(transforms, name) for name in transforms.__all__}
    return known | {"torch": torch, "np": np, "TensorDict": tensordict.TensorDict}


@pytest.mark.parametrize("module", NEEDS)
def test_the_examples_of_an_adapter_are_true(module):
    pytest.importorskip(NEEDS[module], reason="installed for `make interop`, which tries its module in trainings")
    assert_examples(module)


@each("module", [module for module in MODULES if module not in NEEDS])
def test_the_examples_of_a_module_are_true(module):
    assert_examples(module)


def assert_examples(module):
    found = importlib.import_module(module)
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for test in finder.find(found, module, globs={**names(), **vars(found)}):
        if test.examples:
            torch.manual_seed(0)  # for each example by itself: they do not hang on their order
            runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [m for m in MODULES if m not in NEEDS]
    counts = {m: sum(len(t.examples) for t in finder.find(importlib.import_module(m), m)) for m in modules}
    assert sum(counts.values()) > 40 and counts["engram.data.replay_buffers.buffers.buffer"] > 0
