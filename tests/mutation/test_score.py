"""Planting at import, what tests reach, runs in forks, and the comparison of two scores."""

from __future__ import annotations

import array
import dataclasses
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from mutation import reach, runs
from mutation.candidates import candidates
from mutation.score import Result, compare

SOURCE = """
from __future__ import annotations
def larger(a, b):
    if a > b:
        return a
    return b
"""


@pytest.fixture
def hook(tmp_path, monkeypatch):
    """`hook(MUTANT=..., ...)` is a module of the source above, imported as in a process with these variables."""
    file = tmp_path / "engram" / "larger.py"
    file.parent.mkdir()
    file.write_text(SOURCE)

    def load(**names):
        for name, value in names.items():
            monkeypatch.setenv(f"ENGRAM_{name}", str(value))
        monkeypatch.setattr("sys.meta_path", [])
        spec = importlib.util.spec_from_file_location("hook_of_a_trial", runs.HOOK / "sitecustomize.py")
        site = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(site)
        loader = site._Loader("engram.larger", str(file))
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader("engram.larger", loader))
        exec(loader.get_code("engram.larger"), module.__dict__)
        return module

    return load


def test_mutant_is_planted_into_the_module_and_not_into_its_file(hook, tmp_path):
    (m,) = [m for m in candidates(tmp_path) if m.kind == "comparison swapped"]
    planted = {"file": m.file, "start": m.start, "end": m.end, "new": m.new}
    module = hook(MUTANT=json.dumps(planted), PLANTED=tmp_path / "planted")
    assert module.larger(1, 2) == 1 and (tmp_path / "planted").exists()
    assert (tmp_path / "engram" / "larger.py").read_text() == SOURCE


def test_statements_with_mutants_are_noted_when_they_run(hook, tmp_path):
    places, of_mutant = reach.places([m for m in candidates(tmp_path) if m.file.startswith("engram")])
    (tmp_path / "sites").write_text(json.dumps(places))
    (tmp_path / "hits").write_bytes(bytes(len(set(of_mutant.values()))))
    names = {"SITES": tmp_path / "sites", "HITS": tmp_path / "hits"}
    for module in (hook(**names), hook(**names)):  # the second one from the compiled code that the first has left
        assert (tmp_path / "hits").read_bytes() == b"\0"
        assert module.larger(1, 2) == 2
        assert (tmp_path / "hits").read_bytes() == b"\1"
        (tmp_path / "hits").write_bytes(b"\0")


def test_import_is_reached_by_all_tests_of_a_module_and_failing_tests_kill_nothing(tmp_path):
    (tmp_path / "engram").mkdir()
    text = "LIMIT = 8\n\ndef inside(a):\n    return a > LIMIT\n\ndef other(a):\n    return a < 1\n"
    (tmp_path / "engram" / "a.py").write_text(text)
    mutants = candidates(tmp_path)
    lines = reach.places(mutants)[0]["engram/a.py"]
    (limit, inside, other) = (lines[line] for line in ("1", "4", "7"))
    recorded = [
        ("", 0.0, True, [limit]),
        ("t/test_a.py::slow", 2.0, True, [inside]),
        ("t/test_a.py::failing", 0.1, False, [inside, other]),
        ("t/test_b.py::quick", 1.0, True, [inside]),
        ("t/test_c.py::elsewhere", 0.5, True, []),
    ]
    tests = [(name, took, passed, array.array("I", places).tobytes()) for name, took, passed, places in recorded]
    (tmp_path / "t.pickle").write_bytes(pickle.dumps(tests))
    known = reach.Reach(mutants, [tmp_path])
    found = {m.line: known.of(m) for m in mutants}
    assert found == {1: ["t/test_b.py::quick", "t/test_a.py::slow"], 4: found[1], 7: []}
    assert known.limit(found[1]) > 5 * 3.0


RUNS = """
import sys
from pathlib import Path
from mutation import runs

runs.PRELOADED = ("pytest",)
folder, said = Path(sys.argv[1]), []

def job(text, seconds):
    file = folder / f"test_{len(said)}.py"
    file.write_text(text)
    said.append((yield runs.Run(["-c", f"{folder}/pytest.ini", str(file)], {}, seconds, file.with_suffix(".log"))))

jobs = [("def test(): pass", 60), ("def test(): assert 0", 60), ("import signal; signal.pause()", 0.5)]
runs.finish((job(*each) for each in jobs), workers=1)
print(said)
"""


@pytest.mark.deep
def test_run_in_a_fork_passes_fails_or_is_ended(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]")
    env = {**os.environ, "PYTHONPATH": str(Path(reach.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", RUNS, str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.stdout == "[0, 1, None]\n", done.stderr


def result(number, fate="killed", package="store"):
    return Result(package, f"engram/{package}/a.py", "f", "boundary off by one", "a < b", "a <= b", fate, "", number)


def test_comparison_fails_where_a_kill_is_lost_or_a_share_falls(capsys):
    before = [result("1"), result("2"), result("3", "survived")]
    assert compare(before, before)
    assert compare([result("1"), result("4"), result("3", "killed by timeout")], before)
    assert not compare([result("1"), dataclasses.replace(before[1], fate="survived"), result("3")], before)
    assert not compare([result("1"), result("4", "survived"), before[2]], before)
    shown = capsys.readouterr().out
    assert "the share fell" in shown and "no longer killed: 1" in shown and "no longer there: 1" in shown
