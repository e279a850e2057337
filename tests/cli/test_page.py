"""What docs/command-line.md shows works, in its order."""

import re
from pathlib import Path

from cli.support import store
from cli.test_command import call

PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()


def test_the_commands_and_the_functions_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rb = store(tmp_path, steps=350)  # the last episode has not ended
    Path("store").rename("replay")
    shell, python = (re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) for language in ("console", "python"))
    assert shell is not None and python is not None
    for line in shell[1].strip().splitlines():
        shown = call(*line.removeprefix("$ engram ").split())
        assert shown.exit_code == 0, f"{line}: {shown.output}"
    exec(python[1])
    assert "350 ['observation', " in capsys.readouterr().out and len(rb) == 350
    names = {path.name for path in Path().iterdir()}
    assert {"episodes.png", "histograms.png", "replay.html", "dataset.hdf5", "again"} <= names
