"""packaging/other_pythons.py: what it ran is in its table, and what it made is removed, however it ends."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PACKAGING = Path(__file__).parents[1] / "packaging"


@pytest.fixture
def other(monkeypatch, tmp_path):
    """The program in a folder of its own, with this Python as every other one, in which nothing is installed."""
    monkeypatch.syspath_prepend(str(PACKAGING))
    module = importlib.import_module("other_pythons")
    (tmp_path / "constraints.txt").write_text("# A comment\ntorch==2.13.0\nnumpy==2.4.6\nrich==15.0.0\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module.wheels, "interpreter", lambda version: Path(sys.executable))
    monkeypatch.setattr(module, "install", lambda run, python, scratch: python)
    monkeypatch.setattr(sys, "argv", ["other_pythons.py", "3.12"])
    return module


def test_constraints_are_the_tested_versions_with_another_torch_and_without_the_free_packages(other):
    text = other.constraints(other.Run("3.10", "2.6.0", free=("numpy",)))
    assert text == "torch==2.6.0\n# A comment\nrich==15.0.0\n"


def test_a_part_that_fails_is_counted_and_no_other_part_is_left_out(other, monkeypatch, capfd):
    parts = {"scenes": "19 passed, 0 failed", "quick": "=== 1 failed, 5 passed, 2 skipped, 3 errors in 4.00s ==="}
    programs = {name: ("-c", f"print({line!r}); exit({'1 failed' in line})") for name, line in parts.items()}
    monkeypatch.setattr(other, "PARTS", {"quick": programs["quick"], "scenes": programs["scenes"]})
    assert other.main() == 1
    row = capfd.readouterr().out.splitlines()[-1].split()
    assert row[:4] == ["3.12", "2.13.0", "5/4/2", "19/0/0"] and row[-2:] == ["quick", "failed"]


def test_a_python_that_is_not_here_is_a_fault_in_the_table(other, monkeypatch, capfd):
    monkeypatch.setattr(other.wheels, "interpreter", lambda version: None)
    assert other.main() == 1
    assert capfd.readouterr().out.splitlines()[-1].endswith("no such Python on this machine")


@pytest.mark.parametrize("error", [RuntimeError("not installed"), ValueError("a fault"), KeyboardInterrupt()])
def test_the_environment_is_removed_where_its_installation_ends_early(error, other, monkeypatch, tmp_path):
    def fail(run, python, scratch):
        (scratch / "package").mkdir()
        raise error

    monkeypatch.setattr(other, "install", fail)
    if isinstance(error, RuntimeError):
        assert other.main() == 1
    else:
        with pytest.raises(type(error)):
            other.main()
    assert [path.name for path in tmp_path.iterdir()] == ["constraints.txt"]


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_what_runs_and_removes_the_environment(ending, tmp_path):
    code = f"""
        import sys
        from pathlib import Path
        import other_pythons as other
        other.ROOT = Path({str(tmp_path)!r})
        other.wheels.interpreter = lambda version: Path(sys.executable)
        other.install = lambda run, python, scratch: (scratch / "package").mkdir() or python
        other.PARTS = {{"scenes": ("-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)")}}
        sys.argv = ["other_pythons.py", "3.12", "--parts", "scenes"]
        sys.exit(other.main())
    """
    command, settings = [sys.executable, "-c", textwrap.dedent(code)], {**os.environ, "PYTHONPATH": str(PACKAGING)}
    with subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, text=True) as process:
        number = next(int(line) for line in process.stdout if line.strip().isdigit())
        assert list(tmp_path.iterdir())
        process.send_signal(ending)
        assert process.wait(60) == 128 + ending
    assert not list(tmp_path.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
