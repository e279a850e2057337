"""`head` and `sample`: rows of anything."""

import contextlib
import os
import pty
import re
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict

from cli.support import episodes, store
from cli.test_command import call
from engram.cli import head, sample
from engram.cli.cells import oldest_cells
from engram.data import LazyMemmapStorage, ListStorage, ReplayBuffer
from engram.data.datasets import write_parquet


def test_head_gives_the_oldest_rows_of_a_ring_that_has_gone_round(tmp_path):
    rb = store(tmp_path, capacity=250)  # 300 steps were written
    rows = head(tmp_path / "store", 3)
    assert rows.slots.tolist() == [50, 51, 52] and rows.batch["action"].tolist() == [50, 51, 52]
    assert len(rb) == 250 and len(head(tmp_path / "store", 1000).slots) == 250


def test_sample_draws_stored_rows_and_the_same_ones_with_a_seed(tmp_path):
    store(tmp_path).storage.close()
    rows = sample(tmp_path / "store", 50, seed=3)
    assert torch.equal(rows.batch["action"], rows.slots) and len(rows.slots.unique()) > 10
    assert torch.equal(sample(tmp_path / "store", 50, seed=3).slots, rows.slots)


def test_rows_of_checkpoints_lists_and_datasets(tmp_path):
    rb = store(tmp_path)
    rb.dumps(tmp_path / "saved")
    assert head(tmp_path / "saved", 2).batch["action"].tolist() == [0, 1]
    write_parquet(episodes(), tmp_path / "steps.parquet")
    assert head(tmp_path / "steps.parquet", 2).batch["action"].tolist() == [0, 1]
    items = ReplayBuffer(storage=ListStorage(10))
    items.extend(["a", "b"])
    items.dumps(tmp_path / "items")
    assert head(tmp_path / "items").to_json() == [{"slot": 0, "item": "'a'"}, {"slot": 1, "item": "'b'"}]


def test_an_empty_store_has_no_rows(tmp_path):
    rb = store(tmp_path)
    rb.empty()
    assert len(head(tmp_path / "store").slots) == 0 and len(sample(tmp_path / "store").slots) == 0
    assert "no rows are stored" in call("head", tmp_path / "store").output


def test_a_number_of_rows_below_1_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be 1 or more, got 0"):
        head(tmp_path, 0)


def test_large_leaves_are_summed_up_in_the_table(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    rb.extend({"pixels": torch.arange(2 * 64, dtype=torch.uint8).reshape(2, 8, 8), "reward": torch.tensor([0.5, 1.5])})
    shown = call("head", tmp_path, "-n", 1)
    assert shown.exit_code == 0 and "0.5" in shown.output and "1.5" not in shown.output
    assert "[8, 8] 0 to 63" in shown.output
    assert "slot" in call("sample", tmp_path, "--json").stdout


def test_head_of_a_store_shows_the_cells_of_its_rows_without_torch(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(7, scratch_dir=tmp_path, lanes=1))
    value = torch.rand(11, 2)
    rb.extend({"x": value, "half": value.bfloat16(), "many": torch.arange(110).reshape(11, 10), "b": value[:, 0] > 0.5})
    for n in (1, 5, 100):
        assert oldest_cells(tmp_path, n) == head(tmp_path, n).cells()
    code = (
        "import sys; from engram.cli.cells import oldest_cells; assert len(oldest_cells(sys.argv[1], 3)[1]) == 3; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_head_of_several_environments_shows_the_same_cells(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(30, scratch_dir=tmp_path, ndim=2))
    rb.extend(TensorDict({"x": torch.arange(15).reshape(3, 5)}, [3, 5]))
    for n in (1, 2, 4, 100):
        assert oldest_cells(tmp_path, n) == head(tmp_path, n).cells()


def test_head_of_several_lanes_shows_the_same_cells(tmp_path):
    first, second = (LazyMemmapStorage(30, scratch_dir=tmp_path, lanes=2, existsok=True) for _ in range(2))
    ReplayBuffer(storage=first).extend(TensorDict({"x": torch.arange(5)}, [5]))
    ReplayBuffer(storage=second).extend(TensorDict({"x": torch.arange(9)}, [9]))
    for n in (1, 7, 100):
        assert oldest_cells(tmp_path, n) == head(tmp_path, n).cells()


@pytest.mark.parametrize("columns", [60, 100])
def test_rows_fit_a_narrow_terminal(tmp_path, columns):
    rb = ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=tmp_path))
    rb.extend({f"key {k}": torch.rand(20, 4) for k in range(8)})
    shown = on_a_terminal(["head", str(tmp_path), "-n", "10"], columns)
    assert max(map(len, shown)) <= columns and "…" not in "".join(shown)
    assert sum(line.split()[:1] == ["key"] for line in shown) == 8 and any("rows fit" in line for line in shown)


def on_a_terminal(arguments: list[str], columns: int) -> list[str]:
    """The lines that the command prints on a terminal of so many columns, without styles."""
    pid, screen = pty.fork()
    if pid == 0:  # pragma: no cover
        os.environ.update(TERM="xterm", COLUMNS=str(columns), LINES="50", NO_COLOR="1")
        os.execv(sys.executable, [sys.executable, "-m", "engram.cli", *arguments])
    output = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(screen, 65536):
            output += part
    os.close(screen)
    assert os.waitpid(pid, 0)[1] == 0, output
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.decode()).splitlines()]
