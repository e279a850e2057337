"""Every example in its short form: what it says in the end is so."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from contracts.programs import Program, finished

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """As a user would, from another folder."""
    program = Program(EXAMPLES / f"{name}.py", "--quick", "--seed", "3", *arguments, cwd=cwd)
    return finished(program, timeout=240)


def summary_of(name: str, *arguments: str, cwd: Path) -> dict[str, Any]:
    """What a run says in its last line."""
    done = run(name, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["example"], said["seed"]) == (name, 3)
    assert math.isfinite(said["loss"]) and said["loss"] != 0
    return said


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports an example; torch's threads and random numbers are as they were afterwards."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def module(name: str) -> ModuleType:
        return __import__(name)

    with torch.random.fork_rng():
        threads = torch.get_num_threads()
        yield module
        torch.set_num_threads(threads)


def refusal(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Calls an example that is expected to refuse its arguments before it does anything."""
    monkeypatch.setattr(sys, "argv", [str(module.__file__), "--quick", *arguments])
    with pytest.raises(SystemExit) as error:
        module.main()
    assert error.value.code == 2


class TestPpo:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_every_step_is_learned_from_in_each_epoch(self, tmp_path: Path, workers: int) -> None:
        said = summary_of("ppo_cartpole", "--workers", str(workers), cwd=tmp_path)
        epochs, batches = 4, 4
        assert (said["frames"], said["rows"]) == (2_048, 512)
        assert said["updates"] == batches * epochs * 512 // 256
        assert said["mean_return"] > 15  # a policy that pushes to one side falls after 9 or 10 steps
        assert 9 <= said["training_return"] <= 500

    def test_workers_must_divide_the_environments(self, imported: Any, monkeypatch: Any, capsys: Any) -> None:
        refusal(imported("ppo_cartpole"), monkeypatch, "--workers", "3")
        assert "8 environments" in capsys.readouterr().err

    def test_advantages_are_the_sums_of_their_definition(self, imported: Any) -> None:
        ppo = imported("ppo_cartpole")
        gamma, lambda_ = 0.9, 0.8
        _, critic = ppo.make_networks()
        with ppo.make_collector(ppo.Settings().quick(), None, workers=0) as collector, torch.no_grad():
            batch = collector.rollout()
            batch["next", "terminated"][::2] = False  # in these environments time is up where episodes end
            found, goal = ppo.advantages(batch, critic, gamma, lambda_)
            value, following = critic(batch.clone())["value"], critic(batch["next"].clone())["value"]
        assert batch["next", "done"].any()
        for env in range(batch.shape[0]):
            for start in range(0, batch.shape[1], 7):
                expected, weight = 0.0, 1.0
                for t in range(start, batch.shape[1]):
                    bootstrap = 0.0 if batch["next", "terminated"][env, t] else gamma * following[env, t]
                    expected += weight * (batch["next", "reward"][env, t] + bootstrap - value[env, t])
                    weight *= gamma * lambda_
                    if batch["next", "done"][env, t]:
                        break
                torch.testing.assert_close(found[env, start], expected)
        torch.testing.assert_close(goal, found + value)


class TestSac:
    def test_it_goes_on_from_its_checkpoint(self, tmp_path: Path) -> None:
        first = summary_of("sac_pendulum", "--stop-at", "600", cwd=tmp_path)
        assert (first["frames"], first["rows"], first["updates"], first["resumed_from"]) == (600, 600, 150, 0)
        assert sorted(path.name for path in (tmp_path / "sac-run").iterdir()) == ["000000600"]
        second = summary_of("sac_pendulum", "--resume", cwd=tmp_path)
        assert (second["frames"], second["rows"], second["updates"]) == (700, 700, 250)
        assert second["resumed_from"] == 600
        assert -2_000 < second["mean_return"] < 0

    def test_what_it_saves_is_all_that_learning_needs(self, imported: Any, tmp_path: Path) -> None:
        """The next batches, their weights and the losses are those of the run that was not interrupted."""
        sac = imported("sac_pendulum")
        going = sac.Training(sac.Settings().quick(), 3, tmp_path)
        going.run(stop_at=550)
        resumed = sac.Training(sac.Settings().quick(), 99, tmp_path)
        resumed.resume()
        losses = []
        for training in (going, resumed):
            torch.manual_seed(1)
            training.learn(updates=5)
            losses.append(training.loss)
        assert losses[0] == losses[1]

    def test_there_must_be_something_to_resume(self, imported: Any, monkeypatch: Any, capsys: Any) -> None:
        refusal(imported("sac_pendulum"), monkeypatch, "--resume", "--run-dir", "nowhere")
        assert "no checkpoint in nowhere" in capsys.readouterr().err


class TestDrqn:
    def test_it_learns_from_sequences(self, tmp_path: Path) -> None:
        said = summary_of("drqn_slices", cwd=tmp_path)
        assert (said["frames"], said["rows"], said["memory"]) == (2_048, 2_048, True)
        assert said["updates"] == 72 and said["mean_return"] >= 8

    def test_the_collector_carries_the_state_and_the_learner_finds_it_again(self, imported: Any) -> None:
        """Run over whole episodes, the network comes to the states that it had when it acted."""
        drqn = imported("drqn_slices")
        q = drqn.RecurrentQ(first_value=0.0, has_memory=True)
        with drqn.SyncDataCollector(
            drqn.SerialEnv(3, drqn.make_env), drqn.EpsilonGreedy(q), frames_per_batch=120
        ) as collector:
            batch = torch.cat([collector.rollout() for _ in range(3)], 1)
        begins = torch.zeros(3, 120, 1, dtype=torch.bool)
        begins[:, 0] = True
        begins[:, 1:] = batch["next", "done"][:, :-1]
        assert (batch["hidden"][begins.squeeze(-1)] == 0).all() and begins.sum() > 3
        with torch.no_grad():
            _, states = q.over(batch.set("is_init", begins), torch.full((3, drqn.HIDDEN), torch.nan))
        torch.testing.assert_close(states, batch["next", "hidden"])

    def test_returns_are_the_sums_of_their_definition(self, imported: Any) -> None:
        """The mean of all n-step returns within the trajectory, an n-step return weighing lambda**(n - 1)."""
        drqn = imported("drqn_slices")
        settings = drqn.Settings(gamma=0.9, lambda_=0.6, reward_scale=0.5)
        steps, spans = 7, ((0, 7), (0, 4), (3, 7))  # padding after a pole that fell, and before the start of an episode
        reward, value = torch.randn(3, steps, 1), torch.randn(3, steps, 1)
        terminated = torch.zeros(3, steps, 1, dtype=torch.bool)
        terminated[1, 3:] = True
        row = torch.arange(steps)
        mask = torch.stack([(row >= begin) & (row < end) for begin, end in spans])
        rows = TensorDict(
            {"next": {"reward": reward, "terminated": terminated}, "collector": {"mask": mask}}, [3, steps]
        )
        goals = drqn.returns(rows, value, settings)
        for i, (begin, end) in enumerate(spans):
            for start in range(begin, end):
                expected, weight, total = 0.0, 1.0, 0.0
                for t in range(start, end):
                    total += 0.9 ** (t - start) * 0.5 * reward[i, t]
                    bootstrapped = total + 0.9 ** (t - start + 1) * value[i, t] * ~terminated[i, t]
                    last = t == end - 1
                    expected += (weight if last else 0.4 * weight) * bootstrapped
                    weight *= 0.6
                torch.testing.assert_close(goals[i, start], expected)

    def test_without_memory_one_observation_is_all_that_counts(self, imported: Any) -> None:
        drqn = imported("drqn_slices")
        observation, hidden = torch.randn(2), torch.randn(2, drqn.HIDDEN)
        for has_memory in (True, False):
            q = drqn.RecurrentQ(first_value=0.0, has_memory=has_memory)
            (one, _), (other, _) = (q(observation, state) for state in hidden)
            assert torch.equal(one, other) is not has_memory


class TestPixels:
    def test_it_learns_from_stacks_and_stores_single_frames(self, tmp_path: Path) -> None:
        said = summary_of("pixels_dqn", cwd=tmp_path)
        assert (said["frames"], said["rows"], said["updates"]) == (400, 400, 100)
        assert 2 * 42 * 42 < said["bytes_per_step"] < 3 * 42 * 42  # before and after the step, and little else
        assert -1 <= said["mean_return"] <= 1

    def test_the_learner_reads_what_the_policy_saw(self, imported: Any) -> None:
        pixels = imported("pixels_dqn")
        settings = pixels.Settings().quick()
        buffer = pixels.make_buffer(settings, seed=0)
        with pixels.SyncDataCollector(pixels.make_env, None, frames_per_batch=50) as collector:
            batches = torch.cat([collector.rollout() for _ in range(4)])
        for batch in batches.split(50):
            buffer.extend(pixels.to_store(batch))
        drawn = set()
        for _ in range(20):
            sample = buffer.sample()
            assert sample.shape == (settings.batch_size,)
            drawn |= set(sample["index"].tolist())
            for key in ("observation", ("next", "observation"), "action"):
                assert torch.equal(sample[key], batches[key][sample["index"]]), key
        assert len(drawn) > 150  # beginnings of episodes too
        assert batches["observation"].float().std() > 0
