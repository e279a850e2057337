"""Every example in a short form: it runs as a user would run it, and its parts do what they say."""

from __future__ import annotations

import re
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


def run(name: str, *arguments: str, cwd: Path) -> str:
    """What an example prints; from another folder."""
    done = finished(Program(EXAMPLES / f"{name}.py", "--seed", "3", *arguments, cwd=cwd), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    return done.stdout


def evaluations(printed: str) -> dict[int, float]:
    """Mean returns by frames."""
    found = re.findall(r"^frames ([\d,]+)  return (-?[\d.]+)$", printed, re.MULTILINE)
    return {int(frames.replace(",", "")): float(score) for frames, score in found}


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


class TestDqn:
    @pytest.mark.deep
    def test_it_goes_on_from_its_checkpoint(self, tmp_path: Path) -> None:
        assert list(evaluations(run("dqn_per", "--frames", "1000", cwd=tmp_path))) == [1_000]
        scores = evaluations(run("dqn_per", "--frames", "2000", "--resume", cwd=tmp_path))
        assert list(scores) == [2_000] and scores[2_000] > 8

    def test_a_checkpoint_has_all_that_draws_depend_on(self, imported: Any, tmp_path: Path) -> None:
        dqn = imported("dqn_per")
        buffers = [dqn.make_buffer(seed) for seed in (1, 2)]
        for batch in dqn.SyncDataCollector(dqn.make_env, None, frames_per_batch=50, total_frames=200):
            buffers[0].extend(batch)
        drawn = buffers[0].sample()
        buffers[0].update_tensordict_priority(drawn.set("td_error", torch.rand(dqn.BATCH)))
        buffers[0].dumps(tmp_path)
        buffers[1].loads(tmp_path)
        first, second = (buffer.sample() for buffer in buffers)
        assert (first == second).all() and len(buffers[1]) == len(buffers[0]) >= 190

    def test_errors_are_those_of_their_definition(self, imported: Any) -> None:
        dqn = imported("dqn_per")
        reward, power = torch.rand(4, 1), torch.tensor([[0.9], [0.5], [0.9], [0.9]])
        terminated = torch.tensor([[False], [False], [True], [False]])
        observation, following = torch.randn(4, 4), torch.randn(4, 4)
        q, target = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        batch = TensorDict(
            {"observation": observation, "action": torch.tensor([0, 1, 1, 0]), "gamma": power,
             "next": {"observation": following, "reward": reward, "terminated": terminated}}, [4],
        )  # fmt: skip
        errors = dqn.td_errors(batch, q, target)
        for i in range(4):
            goal = 0.1 * reward[i, 0]
            if not terminated[i]:
                goal = goal + power[i, 0] * target(following[i])[q(following[i]).argmax()]
            torch.testing.assert_close(errors[i], q(observation[i])[batch["action"][i]] - goal)


class TestSac:
    @pytest.mark.deep
    def test_it_learns_from_random_steps_on(self, tmp_path: Path) -> None:
        (score,) = evaluations(run("sac", "--frames", "1000", cwd=tmp_path)).values()
        assert -2_000 < score < 0

    def test_log_probabilities_are_those_of_the_squashed_gaussian(self, imported: Any) -> None:
        sac = imported("sac")
        actor, observation = sac.Actor(), torch.randn(50, 3)
        action, log_prob = actor.drawn(observation)
        mean, log_std = actor.net(observation).chunk(2, -1)
        squashed = torch.distributions.TransformedDistribution(
            sac.Normal(mean, log_std.exp()), [torch.distributions.TanhTransform()]
        )
        expected = squashed.log_prob(action / sac.LARGEST)
        torch.testing.assert_close(log_prob, expected, rtol=1e-3, atol=1e-3)


class TestPpo:
    @pytest.mark.deep
    def test_it_learns(self, tmp_path: Path) -> None:
        (score,) = evaluations(run("ppo", "--frames", "4096", cwd=tmp_path)).values()
        assert score > 15  # a policy that pushes to one side falls after 9 or 10 steps

    def test_advantages_are_the_sums_of_their_definition(self, imported: Any) -> None:
        ppo = imported("ppo")
        gamma, lambda_, critic = ppo.GAMMA, ppo.LAMBDA, ppo.Agent().critic
        with ppo.SyncDataCollector(ppo.make_env, None, frames_per_batch=800) as collector, torch.no_grad():
            batch = collector.rollout()
            batch["next", "terminated"][::2] = False  # in these environments time is up where episodes end
            found, goal = ppo.advantages(batch, critic)
            value, following = critic(batch["observation"]), critic(batch["next", "observation"])
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
                torch.testing.assert_close(found[env, start], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(goal, found + value)


class TestRecurrentDqn:
    @pytest.mark.deep
    @pytest.mark.parametrize("memory", ["gru", "lstm", "none"])
    def test_it_learns_from_sequences(self, tmp_path: Path, memory: str) -> None:
        (score,) = evaluations(run("recurrent_dqn", "--frames", "2048", "--memory", memory, cwd=tmp_path)).values()
        assert score >= 8

    @pytest.mark.parametrize("memory", ["gru", "lstm"])
    def test_the_collector_carries_the_state_and_the_learner_finds_it_again(self, imported: Any, memory: str) -> None:
        """Run over whole episodes, the network comes to the states that it had when it acted."""
        drqn = imported("recurrent_dqn")
        q = drqn.RecurrentQ(drqn.MEMORIES[memory])
        with drqn.SyncDataCollector(
            drqn.SerialEnv(3, drqn.make_env), drqn.EpsilonGreedy(q), frames_per_batch=120
        ) as collector:
            batch = torch.cat([collector.rollout() for _ in range(3)], 1)
        begins = torch.zeros(3, 120, 1, dtype=torch.bool)
        begins[:, 0] = True
        begins[:, 1:] = batch["next", "done"][:, :-1]
        assert (batch["state"][begins.squeeze(-1)] == 0).all() and begins.sum() > 3
        with torch.no_grad():
            _, states = q.over(batch.set("is_init", begins), torch.full_like(q.zeros(3), torch.nan))
        torch.testing.assert_close(states, batch["next", "state"])

    def test_returns_are_the_sums_of_their_definition(self, imported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The mean of all n-step returns within the trajectory, an n-step return weighing lambda**(n - 1)."""
        drqn = imported("recurrent_dqn")
        for name, value in {"GAMMA": 0.9, "LAMBDA": 0.6, "SCALE": 0.5}.items():
            monkeypatch.setattr(drqn, name, value)
        steps, spans = 7, ((0, 7), (0, 4), (3, 7))  # padding after a pole that fell, and before the start of an episode
        reward, value = torch.randn(3, steps, 1), torch.randn(3, steps, 1)
        terminated = torch.zeros(3, steps, 1, dtype=torch.bool)
        terminated[1, 3:] = True
        row = torch.arange(steps)
        mask = torch.stack([(row >= begin) & (row < end) for begin, end in spans])
        rows = TensorDict(
            {"next": {"reward": reward, "terminated": terminated}, "collector": {"mask": mask}}, [3, steps]
        )
        goals = drqn.returns(rows, value)
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
        drqn = imported("recurrent_dqn")
        observation = torch.randn(1, 2)
        for name, memory in drqn.MEMORIES.items():
            q = drqn.RecurrentQ(memory)
            one, other = (q(observation, torch.randn_like(q.zeros(1)))[0] for _ in range(2))
            assert torch.equal(one, other) is (name == "none")


class TestPixels:
    @pytest.mark.deep
    def test_it_learns_from_stacks_and_stores_each_frame_once(self, tmp_path: Path) -> None:
        printed = run("pixels_dqn", "--frames", "1000", "--capacity", "1000", cwd=tmp_path)
        (score,) = evaluations(printed).values()
        assert -1 <= score <= 1
        (bytes_of_a_step,) = re.findall(r"^([\d,]+) bytes a step", printed, re.MULTILINE)
        assert (
            42 * 42 < int(bytes_of_a_step.replace(",", "")) < 1.6 * 42 * 42
        )  # what ends episodes, and the newest steps

    def test_the_learner_reads_what_the_policy_saw(self, imported: Any) -> None:
        pixels = imported("pixels_dqn")
        buffer = pixels.make_buffer(1_000, seed=0)
        make_env = pixels.partial(pixels.make_env, pixels.FallingBall)
        with pixels.SyncDataCollector(make_env, None, frames_per_batch=50) as collector:
            batches = torch.cat([collector.rollout() for _ in range(4)])
        for batch in batches.split(50):
            buffer.extend(batch)
        drawn = set()
        for _ in range(20):
            sample = buffer.sample()
            assert sample.shape == (pixels.BATCH,)
            drawn |= set(sample["index"].tolist())
            for key in ("observation", ("next", "observation"), "action"):
                assert torch.equal(sample[key], batches[key][sample["index"]]), key
        assert len(drawn) > 150  # beginnings of episodes too
        assert batches["observation"].shape == (200, 4, 42, 42) and batches["observation"].float().std() > 0


class TestOfflineToOnline:
    @pytest.mark.deep
    def test_it_learns_from_a_dataset_that_it_makes_once(self, tmp_path: Path) -> None:
        short = ("--frames", "1000", "--offline-updates", "200")
        first = run("offline_to_online", *short, cwd=tmp_path)
        made = [path.stat().st_mtime_ns for path in sorted((tmp_path / "cartpole").rglob("*.hdf5"))]
        second = run("offline_to_online", *short, cwd=tmp_path)
        assert made == [path.stat().st_mtime_ns for path in sorted((tmp_path / "cartpole").rglob("*.hdf5"))] != []
        for printed in (first, second):
            assert printed.startswith("dataset 10,000 steps") and list(evaluations(printed)) == [0, 1_000]


class TestProcesses:
    @pytest.mark.deep
    def test_actors_write_what_the_learner_samples(self, tmp_path: Path) -> None:
        printed = run("actors_and_learner", "--frames", "1500", cwd=tmp_path)
        counted = re.search(r"^([\d,]+) rows of 2 actors, ([\d,]+) updates$", printed, re.MULTILINE)
        assert counted, printed
        rows, updates = (int(number.replace(",", "")) for number in counted.groups())
        assert 1_500 <= rows <= 1_600 and 250 <= updates <= (rows - 1_000) // 2

    @pytest.mark.deep
    def test_learners_under_torchrun_share_one_store(self, tmp_path: Path) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        command = [*torchrun, str(EXAMPLES / "data_parallel.py"), "--frames", "1200"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        assert list(evaluations(done.stdout)) == [1_000] and "1,200 rows of 2 processes" in done.stdout
