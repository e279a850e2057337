"""The command `engram`: what it prints, and its exit codes."""

import builtins
import json
import subprocess
import sys
import warnings

import pytest
from typer.testing import CliRunner

from cli.support import store
from engram.cli import info, main, verify
from engram.cli.main import command, run


def call(*arguments: object):
    return CliRunner().invoke(command(), [str(argument) for argument in arguments])


def test_info_shows_rows_and_keys(tmp_path):
    rb = store(tmp_path)
    shown = call("info", tmp_path / "store")
    assert shown.exit_code == 0 and len(rb) == 300
    assert "300 of 1,000 (30%)" in shown.output and "next.reward" in shown.output and "a process" in shown.output


def test_warnings_are_one_line_on_standard_error(monkeypatch, capsys):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(main, "command", lambda: lambda: warnings.warn("a row\nis \x1b[2J"))
    run()
    assert capsys.readouterr().err == "engram: warning: a row\\nis \\x1b[2J\n"


def test_a_key_error_is_shown_as_its_text_without_quotes(capsys):
    with pytest.raises(SystemExit), main._errors_shown():
        raise KeyError("the rows have no 'x'")
    assert capsys.readouterr().err == "engram: the rows have no 'x'\n"


def test_json_has_everything_that_the_function_returns(tmp_path):
    store(tmp_path).storage.close()
    assert json.loads(call("info", tmp_path / "store", "--json").stdout) == info(tmp_path / "store").to_json()
    assert json.loads(call("verify", tmp_path / "store", "--json").stdout)["checked"] == "300 rows"
    assert verify(tmp_path / "store").to_json()["ok"] is True


def test_damage_is_exit_code_1(tmp_path):
    rb = store(tmp_path)
    native = rb.storage.lanes.store
    with open(tmp_path / "store" / "rows.engram", "r+b") as file:
        file.seek(native.rows_offset)
        file.write(b"\xff")
    shown = call("verify", tmp_path / "store")
    assert shown.exit_code == 1 and "slot 0, lane 0" in shown.output and "DAMAGED" in shown.output


def test_what_cannot_be_done_is_exit_code_2_and_one_line(tmp_path):
    shown = call("info", tmp_path / "nothing")
    assert shown.exit_code == 2 and shown.stdout == ""
    assert shown.stderr.startswith("engram: ") and "no such file" in shown.stderr and shown.stderr.count("\n") == 1


def test_a_store_and_a_checkpoint_are_described_and_verified_without_loading_torch(tmp_path):
    """Its import takes longer than all the rest."""
    rb = store(tmp_path)
    rb.dumps(tmp_path / "saved")
    code = """if True:
        import sys
        from engram import cli
        for path in sys.argv[1:]:
            cli.info(path, episodes=False), cli.verify(path)
        print("torch" in sys.modules, "tensordict" in sys.modules)
    """
    paths = [str(tmp_path / "store"), str(tmp_path / "saved")]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True)
    assert done.stdout == "False False\n", done.stderr
    assert len(rb) == 300


def test_without_typer_it_says_what_to_install(monkeypatch, capsys):
    original = builtins.__import__

    def without_typer(name, *rest):
        if name == "typer":
            raise ModuleNotFoundError("No module named 'typer'", name="typer")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_typer)
    with pytest.raises(SystemExit, match="2"):
        run()
    assert 'the command line needs typer: pip install "engram[cli]"' in capsys.readouterr().err
