"""The examples of the adapters are true, where the libraries that they adapt to are installed."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["cleanrl", "sb3", "tianshou"])
def test_the_examples_of_an_adapter_are_true(module):
    adapter = importlib.import_module(f"engram.compat.{module}")
    results = doctest.testmod(adapter, extraglobs=vars(adapter), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0 and results.attempted > 0
