"""Every command is an observer: the job that has the store open goes on as if nobody looked."""

import contextlib

import pytest

from cli.support import episodes, store
from contracts.each import each
from engram.cli import convert, diff, head, info, plot, report, sample, top, verify
from engram.data import LazyMemmapStorage

COMMANDS = {
    "info": lambda store, out: info(store, episodes=True, returns=True),
    "verify": lambda store, out: verify(store),
    "diff": lambda store, out: diff(store, store),
    "head": lambda store, out: head(store),
    "sample": lambda store, out: sample(store),
    "plot": lambda store, out: plot(store, ["action"], output=out / "p.png"),
    "report": lambda store, out: report(store, output=out / "r.html"),
    "top": lambda store, out: [next(looks) for looks in [top(store, every=0.05)] for _ in range(2)],
    "convert": lambda store, out: convert(store, out / "copy", to="store"),
}


@each("command", COMMANDS)
def test_a_command_changes_no_byte_of_a_store_in_use(tmp_path, command):
    rb = store(tmp_path)
    file = tmp_path / "store" / "rows.engram"
    before, names = file.read_bytes(), sorted(path.name for path in file.parent.iterdir())
    COMMANDS[command](tmp_path / "store", tmp_path)
    assert file.read_bytes() == before and sorted(path.name for path in file.parent.iterdir()) == names
    rb.extend(episodes(100))
    assert len(rb) == 400


def test_the_job_may_change_and_empty_its_store_while_somebody_reads_it(tmp_path):
    rb = store(tmp_path)
    with contextlib.closing(LazyMemmapStorage.open(tmp_path / "store", read_only=True)) as observed:
        assert len(observed) == 300
        rb[0] = rb[1]
        assert observed.get(0)["action"] == 1
        rb.empty()
        assert len(observed) == 0
        rb.extend(episodes(100))
        assert len(observed) == 100


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[pytest.mark.long] * (name in ("plot", "report"))) for name in COMMANDS]
)
def test_a_store_that_may_only_be_read_is_enough(tmp_path, command):
    store(tmp_path).storage.close()
    file = tmp_path / "store" / "rows.engram"
    file.chmod(0o444)
    file.parent.chmod(0o555)
    try:
        COMMANDS[command](tmp_path / "store", tmp_path)
    finally:
        file.parent.chmod(0o755)
