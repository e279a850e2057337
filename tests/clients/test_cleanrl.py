"""CleanRL's scripts train with rows of engram as with the buffer that they import: the same losses and returns."""

import subprocess
import sys

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common import buffers

from clients.test_sb3 import ACTIONS, BOX, OBSERVATIONS, STACKS, fill, fill_with_stacks
from clients.trainings import cleanrl as dqn
from engram.compat.cleanrl import ReplayBuffer


def test_a_training_has_the_same_losses_and_returns(tell):
    theirs, ours = (dqn.main(cls, 3000) for cls in (buffers.ReplayBuffer, ReplayBuffer))
    for name, outcome in {"its own buffer": theirs, "engram": ours}.items():
        tell("CleanRL", "dqn.py, CartPole", name, f"{outcome['seconds']:.1f} s, {len(outcome['losses'])} equal losses")
    assert ours["losses"] == theirs["losses"] and ours["returns"] == theirs["returns"] and len(ours["losses"]) > 100


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("handle", [False, True])
def test_batches_are_those_of_the_buffer_that_scripts_import(observation, handle):
    kind = buffers.DictReplayBuffer if observation == "dict" else buffers.ReplayBuffer
    pair = [
        cls(30, OBSERVATIONS[observation], ACTIONS["box"], "cpu", n_envs=3, handle_timeout_termination=handle)
        for cls in (kind, ReplayBuffer)
    ]
    fill(pair, OBSERVATIONS[observation], ACTIONS["box"], steps=14, n_envs=3)
    assert (pair[1].pos, pair[1].full, pair[1].size()) == (4, True, 10)
    for seed in range(5):
        batches = []
        for buffer in pair:
            np.random.seed(seed)
            batches.append(buffer.sample(64))
        for name, ours in batches[1]._asdict().items():
            theirs = getattr(batches[0], name)
            pairs = [(ours[k], theirs[k]) for k in theirs] if isinstance(theirs, dict) else [(ours, theirs)]
            assert all(a.dtype == b.dtype and a.equal(b) for a, b in pairs), name


def test_infos_of_gymnasiums_vector_environments_are_understood():
    buffer = ReplayBuffer(10, BOX, spaces.Discrete(2), "cpu", n_envs=2)
    step = np.zeros((2, 3)), np.zeros((2, 3)), np.zeros(2), np.zeros(2), np.ones(2)
    buffer.add(*step, {"TimeLimit.truncated": np.array([True, False])})
    buffer.add(*step, {})
    assert {*buffer.sample(100).dones.flatten().tolist()} == {0.0, 1.0}


def test_reset_forgets_everything_and_extend_adds():
    buffer = ReplayBuffer(10, BOX, spaces.Discrete(2), "cpu", handle_timeout_termination=False)
    steps = np.zeros((4, 1, 3))
    buffer.extend(steps, steps, np.zeros((4, 1)), np.arange(4.0)[:, None], np.zeros((4, 1)), [{}] * 4)
    assert buffer.size() == 4 and {*buffer.sample(100).rewards.flatten().tolist()} == {0.0, 1.0, 2.0, 3.0}
    buffer.reset()
    with pytest.raises(ValueError):
        buffer.sample(1)


def test_it_needs_no_stable_baselines3():
    code = (
        "import sys; sys.modules['stable_baselines3'] = None; import engram.compat.cleanrl as c; print(c.ReplayBuffer)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "engram.compat.cleanrl.ReplayBuffer" in done.stdout


@pytest.mark.parametrize("handle", [False, True])
def test_a_script_that_asks_for_shared_observations_gets_the_batches_of_one_that_does_not(handle):
    pair = [
        ReplayBuffer(
            40, STACKS, spaces.Discrete(4), "cpu", optimize_memory_usage=once, handle_timeout_termination=handle
        )
        for once in (False, True)
    ]
    fill_with_stacks(pair, 50)
    batches = []
    for buffer in pair:
        np.random.seed(0)
        batches.append(buffer.sample(200))
    assert all(a.equal(b) for a, b in zip(*batches, strict=True)) and batches[1].dones.any() != handle
    assert [buffer.rows.buffer.storage.compact is not None for buffer in pair] == [False, True]
