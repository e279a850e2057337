"""The demo in its short form, and the ledger that it rests on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from contracts.programs import Program, finished
from engram.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return finished(Program(EXAMPLES / "dqn_cartpole.py", "--quick", *arguments), timeout=240)


class TestDemo:
    def test_it_is_killed_and_resumes_without_a_loss(self, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        done = run_demo("--run-dir", str(folder), "--seed", "3")
        assert done.returncode == 0, done.stdout + done.stderr
        history = json.loads((folder / "history.json").read_text())
        assert (history["killed_at"], history["resumed_from"]) == (950, 600)
        assert history["evaluations"][-1][0] > history["killed_at"]
        assert "NO" not in done.stdout and "\x1b" not in done.stdout
        assert (folder / "learning_curve.png").stat().st_size > 10_000

    def test_a_folder_of_somebody_else_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("years of work")
        done = run_demo("--run-dir", str(tmp_path))
        assert done.returncode == 2 and "--run-dir" in done.stderr
        assert (tmp_path / "thesis.txt").read_text() == "years of work"
        (tmp_path / ".engram-demo").touch()  # now it is the folder of an earlier run, to which a file was added
        done = run_demo("--run-dir", str(tmp_path))
        assert done.returncode == 2 and "thesis.txt was not made by this demo" in done.stderr
        assert (tmp_path / "thesis.txt").read_text() == "years of work"


class TestReturns:
    """What the demo learns from: slices that are drawn from rows as they were collected."""

    GAMMA, SCALE, STEPS = 0.9, 0.1, 3

    @pytest.fixture(autouse=True)
    def _examples_on_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(EXAMPLES))

    def test_each_row_has_the_return_of_its_definition(self) -> None:
        """Also at the end of an episode that fell, of one whose time was up, of one that was killed, and the newest."""
        from dqn_cartpole import make_sampler
        from support.dqn import returns

        episode = torch.tensor([0] * 4 + [1] * 5 + [2] * 2 + [3] * 6)
        reward, value = torch.arange(1.0, 18.0), torch.arange(100.0, 117.0)
        terminated, truncated = torch.zeros(17, 1, dtype=torch.bool), torch.zeros(17, 1, dtype=torch.bool)
        terminated[3] = truncated[8] = True
        following = {
            "reward": reward.unsqueeze(-1), "terminated": terminated, "truncated": truncated,
            "done": terminated | truncated,
        }  # fmt: skip
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(30), sampler=make_sampler(self.STEPS), batch_size=500 * self.STEPS
        )
        buffer.extend(TensorDict({"collector": {"traj_ids": episode}, "next": following}, [17]))
        slices = buffer.sample().reshape(-1, self.STEPS)
        rows = slices["index"]
        goals = returns(slices, value[rows[:, -1]], self.GAMMA, self.SCALE)
        for first, goal in zip(rows[:, 0].tolist(), goals.tolist(), strict=True):
            inside = [t for t in range(first, min(first + self.STEPS, 17)) if episode[t] == episode[first]]
            expected = sum(self.SCALE * reward[t] * self.GAMMA**k for k, t in enumerate(inside))
            if not terminated[inside[-1]]:
                expected += self.GAMMA ** len(inside) * value[inside[-1]]
            assert goal == pytest.approx(float(expected), rel=1e-5)
        assert set(rows[:, 0].tolist()) == set(range(17))


class TestLedger:
    """Every loss that the demo claims to see, made on purpose."""

    CAPACITY = 20

    @pytest.fixture(autouse=True)
    def _examples_on_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(EXAMPLES))

    def written(self, folder: Path, batches: int = 3) -> tuple[TensorDictReplayBuffer, Path]:
        """A buffer with batches of 8 steps, all in the ledger."""
        from support.ledger import Ledger

        storage = LazyMemmapStorage(self.CAPACITY, scratch_dir=folder / "rows")
        buffer, ledger = TensorDictReplayBuffer(storage=storage), Ledger(folder / "ledger")
        for _ in range(batches):
            batch = TensorDict({"x": torch.randn(8, 3), "next": {"done": torch.zeros(8, 1, dtype=torch.bool)}}, [8])
            ledger.announce(batch)
            buffer.extend(batch)
            ledger.returned(buffer.write_count)
        return buffer, folder / "ledger"

    def failed(self, ledger: Path, buffer: TensorDictReplayBuffer) -> set[str]:
        from support.ledger import verify

        return {check.what for check in verify(ledger, buffer) if not check.holds}

    @pytest.mark.quick
    @each("batches", [1, 2, 3, 7])
    def test_a_whole_buffer_passes_before_and_after_it_went_round(self, tmp_path: Path, batches: int) -> None:
        buffer, ledger = self.written(tmp_path, batches)
        assert self.failed(ledger, buffer) == set()

    def test_a_changed_byte_is_seen(self, tmp_path: Path) -> None:
        buffer, ledger = self.written(tmp_path)
        row = buffer[3].exclude("index")
        row["next", "done"] = ~row["next", "done"]
        buffer[3] = row.set("index", torch.tensor(3))
        assert self.failed(ledger, buffer) == {"rows intact", "checksum of all rows"}

    @pytest.mark.quick
    def test_a_missing_extend_is_seen(self, tmp_path: Path) -> None:
        from support.ledger import Ledger

        buffer, ledger = self.written(tmp_path)
        writer = Ledger(ledger)
        writer.announce(buffer[:8])
        writer.returned(buffer.write_count + 8)
        assert "write count" in self.failed(ledger, buffer)

    def test_rows_that_nobody_wrote_are_seen(self, tmp_path: Path) -> None:
        buffer, ledger = self.written(tmp_path)
        buffer.extend(buffer[:1].exclude("index"))
        assert {"write count", "rows intact"} <= self.failed(ledger, buffer)

    def test_a_prefix_of_an_interrupted_extend_may_be_there(self, tmp_path: Path) -> None:
        from support.ledger import Ledger

        buffer, ledger = self.written(tmp_path)
        batch = buffer[:8].exclude("index").clone()
        Ledger(ledger).announce(batch)
        assert self.failed(ledger, buffer) == set()
        buffer.extend(batch[:5])
        assert self.failed(ledger, buffer) == set()

    def test_after_a_resume_the_rest_of_an_interrupted_extend_is_void(self, tmp_path: Path) -> None:
        from support.ledger import Ledger

        buffer, ledger = self.written(tmp_path)
        batch, other = (buffer[:8].exclude("index").clone() for _ in range(2))
        other["x"] += 1
        writer = Ledger(ledger)
        writer.announce(batch)
        buffer.extend(batch[:5])
        writer.found(buffer.write_count)
        writer.announce(other)
        buffer.extend(other)
        writer.returned(buffer.write_count)
        assert self.failed(ledger, buffer) == set()
