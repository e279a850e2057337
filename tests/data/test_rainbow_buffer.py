"""`compat.cleanrl.PrioritizedReplayBuffer`: n-step returns within an episode, draws and weights by priority."""

import functools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from clients.trainings import rainbow
from engram.compat.cleanrl import PrioritizedReplayBuffer, ReplayBuffer
from engram.data import Compact, LazyMemmapStorage
from engram.testing import chi_square

TERMINATED, SAID, SEEN = "terminated", "truncated, as add is told", "truncated, as the next observation shows"


class Step(NamedTuple):
    obs: int
    reward: float
    following: int
    terminated: bool
    truncated: bool


def steps_of(episodes: list[tuple[int, str]]) -> list[list[Step]]:
    """Episodes of these lengths and ends, of numbered observations, and each step's part in them."""
    number, made = 0, []
    for length, end in episodes:
        steps = []
        for t in range(length):
            last = t == length - 1
            steps.append(Step(number, number % 7 - 2.5, number + 1, last and end == TERMINATED, last and end == SAID))
            number += 1
        if end == SEEN:
            number += 1  # the next episode begins with another observation
        made.append(steps)
    return made


def transitions(episodes: list[list[Step]], n: int, gamma: float) -> list[tuple[int, float, int, bool]]:
    """What must be stored, in order: observation, return, the observation after it, whether that one is terminal."""
    rows = []
    for steps in episodes:
        for start in range(len(steps)):
            window = steps[start : start + n]
            if len(window) == n or window[-1].terminated:
                returned = sum(gamma**k * step.reward for k, step in enumerate(window))
                rows.append((window[0].obs, np.float32(returned), window[-1].following, window[-1].terminated))
    return rows


def small(capacity: int = 100, n: int = 3, gamma: float = 0.9, **settings) -> PrioritizedReplayBuffer:
    return PrioritizedReplayBuffer(capacity, (2,), "cpu", n, gamma, observation_dtype=np.float32, **settings)


def add(rb: PrioritizedReplayBuffer, step: Step) -> None:
    obs, following = (np.full((1, 2), value, np.float32) for value in (step.obs, step.following))
    rb.add(obs, np.array([step.obs]), np.array([step.reward]), following, np.array([step.terminated]), step.truncated)
    obs[:] = following[:] = -1  # an environment's own arrays, which its next step overwrites


def filled(rb: PrioritizedReplayBuffer, transitions: int) -> PrioritizedReplayBuffer:
    for number in range(transitions + 2):
        add(rb, Step(number, 1.0, number + 1, False, False))
    return rb


EPISODES = st.lists(st.tuples(st.integers(1, 8), st.sampled_from([TERMINATED, SAID, SEEN])), min_size=1, max_size=6)


@given(EPISODES, st.integers(1, 5), st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.integers(3, 60), st.booleans())
def test_stored_transitions_are_those_of_a_plain_loop_over_each_episode(episodes, n, gamma, capacity, once):
    made, rb = steps_of(episodes), small(capacity, n, gamma, optimize_memory_usage=once)
    for steps in made:
        for step in steps:
            add(rb, step)
    expected = transitions(made, n, gamma)
    assert rb.size == min(len(expected), capacity)
    for number in range(max(len(expected) - capacity, 0), len(expected)):
        row = rb.buffer[number % capacity]
        obs, returned, following, terminated = expected[number]
        assert row["observation"].tolist() == [obs, obs] and row["action"].tolist() == [obs]
        assert row["next"]["reward"].tolist() == [returned] and row["next"]["terminated"].tolist() == [terminated]
        assert row["next"]["observation"].tolist() == [following, following]


def test_steps_with_observations_that_do_not_follow_store_nothing_and_the_error_says_why():
    rb = small()
    for number in range(0, 50, 2):
        add(rb, Step(number, 1.0, number + 1, False, False))
    with pytest.raises(ValueError, match="next_obs of the one before as obs"):
        rb.sample(1)


def test_observations_that_are_not_numbers_follow_each_other():
    rb = PrioritizedReplayBuffer(10, (1,), "cpu", 2, 0.9, observation_dtype=np.float32)
    for _ in range(4):
        rb.add(np.full(1, np.nan, np.float32), 0, 1.0, np.full(1, np.nan, np.float32), False)
    assert rb.size == 3


def test_batches_have_the_fields_shapes_and_dtypes_that_the_script_reads():
    rb = PrioritizedReplayBuffer(50, (4, 84, 84), torch.device("cpu"), 3, 0.99, 0.5, 0.4, 1e-6)
    frames = np.random.default_rng(0).integers(0, 255, (12, 1, 4, 84, 84), np.uint8)
    for t in range(11):
        rb.add(frames[t], np.array([t]), np.array([1.0]), frames[t + 1], np.array([False]))
    data = rb.sample(32)
    assert data.observations.dtype is data.next_observations.dtype is torch.uint8
    start = data.actions[:, 0].numpy()
    assert np.array_equal(data.observations.numpy(), frames[start, 0])
    assert np.array_equal(data.next_observations.numpy(), frames[start + 3, 0])
    assert data.actions.dtype is torch.int64 and data.indices.dtype == np.int64 and data.indices.shape == (32,)
    for values in (data.rewards, data.dones, data.weights):
        assert values.dtype is torch.float32 and values.shape == (32, 1)


def test_what_a_script_leaves_out_is_as_in_the_buffer_of_cleanrl():
    sampler = small().sampler
    assert (sampler.alpha, sampler.beta, sampler.eps) == (0.6, 0.4, 1e-6)


def test_observations_are_stored_once_where_a_script_asks_for_that():
    space = spaces.Box(0, 255, (4, 8, 8), np.uint8)
    buffers = [ReplayBuffer(10, space, spaces.Discrete(2), "cpu", optimize_memory_usage=once) for once in (False, True)]
    assert [rb.rows.buffer.storage.compact is not None for rb in buffers] == [False, True]


def test_batches_are_put_on_the_device():
    rb = filled(PrioritizedReplayBuffer(9, (2,), "meta", 3, 0.9, observation_dtype=np.float32), 5)
    data = rb.sample(4)
    tensors = [part for part in data if isinstance(part, torch.Tensor)]
    assert len(tensors) == 6 and {part.device.type for part in tensors} == {"meta"} and data.indices.shape == (4,)


def test_a_row_takes_two_observations_and_less_than_a_hundred_bytes():
    rb = PrioritizedReplayBuffer(2000, (4, 84, 84), "cpu", 1, 0.99)
    rb.add(np.zeros((4, 84, 84), np.uint8), 0, 0.0, np.zeros((4, 84, 84), np.uint8), False)
    assert rb.buffer.storage.nbytes / 2000 < 2 * 4 * 84 * 84 + 100


def test_draws_are_as_often_as_priorities_say():
    rb = filled(small(alpha=0.7, eps=0.1), 20)
    priorities = np.linspace(0, 5, 20)
    rb.update_priorities(np.arange(20), -priorities)  # an error has a sign, a priority has none
    torch.manual_seed(0)
    counts = np.bincount(np.concatenate([rb.sample(64).indices for _ in range(400)]), minlength=20)
    shares = (priorities + 0.1) ** 0.7
    assert chi_square(counts.tolist(), (shares / shares.sum()).tolist()) > 1e-6


def test_weights_correct_for_priorities_as_far_as_beta_says():
    rb = filled(small(alpha=0.5, eps=0.0), 20)
    priorities = np.random.default_rng(0).random(20) + 0.1
    rb.update_priorities(np.arange(20), priorities)
    for beta in (0.0, 0.4, 1.0):
        rb.beta = beta
        data = rb.sample(2)  # most often without the row of the lowest priority
        weights = (1 / priorities[data.indices] ** 0.5) ** beta
        np.testing.assert_allclose(data.weights[:, 0], weights / weights.max(), rtol=1e-5)
        assert rb.beta == beta


@pytest.mark.parametrize("form", [list, torch.tensor, lambda values: torch.tensor(values, requires_grad=True)])
def test_priorities_are_taken_in_any_form(form):
    rb = filled(small(), 4)
    rb.update_priorities(torch.tensor([3, 1]), form([-2.0, 0.5]))
    assert rb.sampler.priorities(range(4)).tolist() == [1.0, 0.5, 1.0, 2.0]


def test_a_new_transition_has_the_highest_priority_so_far():
    rb = filled(small(), 10)
    rb.update_priorities([3], np.array([7.0]))
    rb.update_priorities([3], np.array([0.5]))
    add(rb, Step(12, 1.0, 13, False, False))
    assert rb.sampler.priorities([2, 3, 10]).tolist() == [1.0, 0.5, 7.0]


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"obs": np.zeros((3, 2), np.float32)}, ValueError, "obs must have shape"),
        ({"next_obs": np.zeros(3, np.float32)}, ValueError, "next_obs must have shape"),
        ({"obs": np.zeros(2, np.complex64)}, TypeError, "set observation_dtype"),
        ({"reward": np.zeros(3)}, ValueError, "reward must be one number"),
        ({"action": np.array([0.5])}, TypeError, "integer"),
        ({"done": np.zeros(0)}, ValueError, "done must be one number"),
        ({"truncated": np.zeros(2)}, ValueError, "truncated must be one number"),
    ],
)
def test_a_step_that_is_not_of_one_environment_is_refused_and_changes_nothing(changed, error, words):
    rb = filled(small(), 3)
    step = {"obs": np.full(2, 5.0, np.float32), "action": 1, "reward": 1.0, "next_obs": np.ones(2, np.float32)}
    with pytest.raises(error, match=words):
        rb.add(**{**step, "done": True, **changed})
    rb.add(**step, done=True)
    assert rb.size == 6 and rb.buffer[5]["next"]["reward"].tolist() == [1.0]


@pytest.mark.parametrize("settings", [{"n": 0}, {"gamma": 1.5}, {"alpha": -1.0}, {"beta": -1.0}, {"eps": np.nan}])
def test_settings_that_are_not_allowed_are_refused(settings):
    with pytest.raises(ValueError):
        small(**settings)


def test_transitions_and_priorities_outlive_the_process(tmp_path):
    in_a_file = functools.partial(LazyMemmapStorage, scratch_dir=tmp_path / "rows", existsok=True)
    rb = filled(small(storage=in_a_file), 10)
    rb.update_priorities(np.arange(10), np.arange(10.0))
    rb.buffer.dumps(tmp_path / "saved")
    other = small()
    other.buffer.loads(tmp_path / "saved")
    assert other.size == 10 and other.sampler.priorities(range(10)).tolist() == list(range(10))


@pytest.mark.deep
def test_a_small_rainbow_learns_the_value_of_each_step():
    outcome = rainbow.main(PrioritizedReplayBuffer, 1200)
    to_the_reward = torch.tensor([3, 2, 1, 0])
    assert (outcome["values"][:, 1] - 0.9**to_the_reward).abs().max() < 0.05


def test_frames_of_n_step_rows_are_stored_once():
    frames = np.random.default_rng(0).integers(0, 256, (1_000, 12, 12)).astype(np.uint8)
    pair = [PrioritizedReplayBuffer(900, (4, 12, 12), "cpu", 3, 0.9, optimize_memory_usage=x) for x in (True, False)]
    for t in range(900):
        step = frames[t : t + 4], 0, 1.0, frames[t + 1 : t + 5], t % 300 == 299
        for rb in pair:
            rb.add(*step)
    once, plain = (rb.buffer.storage for rb in pair)
    assert once.compact == Compact(["observation"], {"observation": 4}, 3) and plain.compact is None
    rows, same_rows = once[:], plain[:]
    assert all(rows[key].equal(same_rows[key]) for key in ("observation", "action"))
    assert all(rows["next"][key].equal(value) for key, value in same_rows["next"].items())
    assert pair[0].buffer.stats().compact.same > 0.98
