"""`make instructions`: when counts fail, and when they are not compared."""

import importlib.util
from pathlib import Path

import pytest

_FILE = Path(__file__).parents[1] / "benchmarks" / "instructions.py"


@pytest.fixture(scope="module")
def instructions():
    spec = importlib.util.spec_from_file_location("benchmarks_instructions", _FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def counted(count=1000, cpu="x86_64 GenuineIntel 306c3", name="extend(64)"):
    return {"machine": {"cpu": cpu, "torch": "2.13.0"}, "instructions": {name: count}}


@pytest.mark.parametrize(("count", "fails"), [(1000, False), (1030, False), (1031, True), (500, False)])
def test_count_more_than_three_percent_above_the_file_fails(instructions, count, fails):
    assert bool(instructions.compare(counted(count), counted(), must_compare=True)) == fails


def test_call_missing_from_the_file_fails(instructions):
    assert "add" in instructions.compare(counted(name="add"), counted(), must_compare=False)


def test_other_emulated_cpu_fails_with_the_command_only_where_counts_must_be_compared(instructions, capsys):
    elsewhere = counted(9000, cpu="x86_64 GenuineIntel 206a7")
    assert instructions.compare(elsewhere, counted(), must_compare=False) == ""
    assert "not compared" in capsys.readouterr().out
    assert "make instructions UPDATE=1" in instructions.compare(elsewhere, counted(), must_compare=True)


def test_file_names_the_emulated_cpu_and_not_the_machine(instructions):
    kept = instructions.json.loads(instructions.KEPT.read_text())
    assert kept["machine"]["cpu"].startswith("x86_64 GenuineIntel 306c3 ")
