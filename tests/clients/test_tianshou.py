"""tianshou trains with rows of engram as with its own buffers: the same draws, batches and weights."""

import pickle
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tianshou import data as own
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.data import Batch, Collector
from tianshou.data.collector import EpisodeRolloutHookMCReturn
from tianshou.env import DummyVectorEnv

import engram.compat.tianshou as ours
from clients.trainings import tianshou as dqn
from engram.data import LazyMemmapStorage, LazyTensorStorage

PACKAGES = {"its own buffer": own, "engram": ours}
TRAININGS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "VectorReplayBuffer": (lambda p: p.VectorReplayBuffer(2000, 5), 5),
    "PrioritizedVectorReplayBuffer": (lambda p: p.PrioritizedVectorReplayBuffer(2000, 5, alpha=0.6, beta=0.4), 5),
    "ReplayBuffer": (lambda p: p.ReplayBuffer(900), 1),
    "PrioritizedReplayBuffer": (lambda p: p.PrioritizedReplayBuffer(900, alpha=0.6, beta=0.4), 1),
}
VECTOR = [name for name in TRAININGS if "Vector" in name]
OBSERVATIONS = {
    "vectors": lambda draw, n: draw.random((n, 3)).astype(np.float32),
    "numbers": lambda draw, n: draw.integers(0, 9, n),
    "stacked images": lambda draw, n: draw.integers(0, 255, (n, 4, 6, 6)).astype(np.uint8),
    "batches": lambda draw, n: Batch(a=draw.random((n, 2)), b=Batch(c=draw.integers(0, 9, (n, 1)))),
}
SETTINGS = {
    "plain": {},
    "stacks": {"stack_num": 3, "sample_avail": True},
    "no next observations": {"ignore_obs_next": True},
    "last images": {"save_only_last_obs": True, "ignore_obs_next": True, "stack_num": 4},
    "last images, both": {"save_only_last_obs": True},
}


def make(package: Any, kind: str, **settings: Any) -> Any:
    size = {"total_size": 40, "buffer_num": 4} if kind in VECTOR else {"size": 40}
    prio = {"alpha": 0.6, "beta": 0.4} if "Prioritized" in kind else {}
    return getattr(package, kind)(**size, **prio, **settings)


def fill(pair: list[Any], observe: Any, steps: int, keys: tuple[str, ...] = ()) -> None:
    """The same steps into each buffer; of vector buffers each time some environments."""
    draw = np.random.default_rng(1)
    for _ in range(steps):
        ids = np.sort(draw.choice(4, draw.integers(1, 5), replace=False)) if hasattr(pair[0], "buffers") else None
        n = 1 if ids is None else len(ids)
        steps_of = Batch(
            obs=observe(draw, n), obs_next=observe(draw, n), act=draw.integers(0, 3, n), rew=draw.random(n),
            terminated=draw.random(n) < 0.2, truncated=draw.random(n) < 0.1, info=Batch(env_id=np.arange(n)),
            policy=Batch(hidden=draw.random((n, 2))),
        )  # fmt: skip
        results = [b.add(steps_of[0] if ids is None else steps_of, *([] if ids is None else [ids])) for b in pair]
        assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


def assert_equal(theirs: Any, mine: Any, name: str = "") -> None:
    if isinstance(theirs, Batch):
        assert set(theirs.get_keys()) == set(mine.get_keys()), name
        for key in theirs.get_keys():
            assert_equal(theirs[key], mine[key], f"{name}.{key}")
    else:
        theirs, mine = np.asarray(theirs), np.asarray(mine)
        assert theirs.dtype == mine.dtype and np.array_equal(theirs, mine), name


def assert_same_batches(pair: list[Any]) -> None:
    for n in (7, 0, None):
        batches = []
        for buffer in pair:
            np.random.seed(5)
            buffer._random_state.seed(5)
            for part in getattr(buffer, "buffers", []):
                part._random_state.seed(5)
            batches.append(buffer.sample(n))
        assert np.array_equal(batches[0][1], batches[1][1])
        assert_equal(batches[0][0], batches[1][0])


@pytest.mark.parametrize("kind", TRAININGS)
def test_a_training_ends_with_the_same_weights(kind, tell):
    buffer, environments = TRAININGS[kind]
    outcomes = {name: dqn.main(lambda p=p: buffer(p), environments, 1) for name, p in PACKAGES.items()}
    theirs, mine = outcomes.values()
    tell(
        "tianshou", f"DQN, 3 steps, CartPole, {kind}", "engram", f"equal weights, test return {mine['returns'][-1]:.0f}"
    )
    assert mine["returns"] == theirs["returns"] and mine["weights"] == theirs["weights"]
    assert type(mine["buffer"]) is getattr(ours, kind)


@pytest.mark.parametrize("kind", TRAININGS)
@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("steps", [5, 90], ids=["half full", "gone round"])
def test_batches_are_those_of_its_own_buffer(kind, observation, steps):
    pair = [make(package, kind) for package in (own, ours)]
    fill(pair, OBSERVATIONS[observation], steps)
    assert len(pair[0]) == len(pair[1]) > 0
    assert_same_batches(pair)
    index = pair[0].sample_indices(0)
    for name in ("prev", "next"):
        assert np.array_equal(*(getattr(buffer, name)(index) for buffer in pair))
    assert np.array_equal(*(buffer.unfinished_index() for buffer in pair))
    nothing = [] if "Prioritized" in kind else [index[:0]]  # of which tianshou asks the highest weight
    for i in (index[0], *nothing, index[:3], index[:4].reshape(2, 2), *([] if steps == 5 else [slice(1, 4)])):
        assert_equal(*(buffer[i] for buffer in pair))
    for key in ("obs", "act", "obs_next", "rew", "done", "info"):
        stored = [getattr(buffer, key)[index] for buffer in pair]
        assert_equal(*stored, name=key)
    assert not pair[1].hasnull()


@pytest.mark.parametrize("kind", ["ReplayBuffer", "VectorReplayBuffer"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("steps", [15, 90], ids=["half full", "gone round"])
def test_stacks_and_what_is_left_out_are_as_in_its_own_buffer(kind, settings, steps):
    observation = "stacked images" if "last images" in settings else "vectors"
    pair = [make(package, kind, **SETTINGS[settings]) for package in (own, ours)]
    fill(pair, OBSERVATIONS[observation], steps)
    assert_same_batches(pair)


@pytest.mark.parametrize("kind", TRAININGS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("steps", [15, 90], ids=["half full", "gone round"])
def test_steps_of_any_index_are_as_in_its_own_buffer(kind, settings, steps):
    observation = "stacked images" if "last images" in settings else "vectors"
    pair = [make(package, kind, **SETTINGS[settings]) for package in (own, ours)]
    fill(pair, OBSERVATIONS[observation], steps)
    edges = pair[1].subbuffer_edges[:-1]
    stored = np.concatenate([edge + np.arange(len(r)) for edge, r in zip(edges, pair[1].rows, strict=True)])
    first, last = int(stored[0]), int(stored[-1])
    indices: list[Any] = [first, stored[0], stored[:1], stored[:3], slice(None)]
    if steps == 90:  # else tianshou's own slices are of steps that were never written
        indices += [slice(0, 2), slice(-2, None), slice(None, None, -3)]
    if "Prioritized" not in kind:  # whose weights are found by arrays of 0 and more only
        indices += [[first], [first, last]] + ([-1, -40, [-1, 0]] if steps == 90 else [])
    for index in indices:
        for buffer in pair:
            buffer._random_state.seed(5)
        assert_equal(*(buffer[index] for buffer in pair), name=repr(index))


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("kind", VECTOR)
def test_a_vector_buffer_of_one_environment_takes_batches_of_one(kind, last_only):
    prio = {"alpha": 0.6, "beta": 0.4} if "Prioritized" in kind else {}
    pair = [getattr(package, kind)(10, 1, save_only_last_obs=last_only, **prio) for package in PACKAGES.values()]
    draw = np.random.default_rng(3)
    for _ in range(4):
        step = Batch(
            obs=draw.random((1, 2, 3)), obs_next=draw.random((1, 2, 3)), act=np.array([1]), rew=np.ones(1),
            terminated=np.zeros(1, bool), truncated=np.zeros(1, bool),
        )  # fmt: skip
        for buffer in pair:
            buffer.add(Batch(step))
    theirs, mine = (buffer[:] for buffer in pair)
    for key in ("obs", "obs_next", "act"):
        assert np.shape(theirs[key]) == np.shape(mine[key]) and np.array_equal(theirs[key], mine[key])


def test_a_step_that_was_never_written_is_named():
    buffer = make(ours, "VectorReplayBuffer", ignore_obs_next=True)
    none = np.zeros(1, bool)
    buffer.add(Batch(obs=np.ones((1, 3)), act=none, rew=np.ones(1), terminated=none, truncated=none), [2])
    assert buffer[20].obs.tolist() == [1, 1, 1] and len(buffer[[]].obs) == 0
    for index, environment in ((0, 0), (21, 2), ([20, -1], 3)):
        with pytest.raises(IndexError, match=f"those of environment {environment}, the first [01] are stored"):
            buffer[index]


@pytest.mark.parametrize("kind", ["PrioritizedReplayBuffer", "PrioritizedVectorReplayBuffer"])
def test_priorities_decide_the_draws_as_in_its_own_buffer(kind):
    pair = [make(package, kind) for package in (own, ours)]
    fill(pair, OBSERVATIONS["vectors"], 60)
    for buffer in pair:
        buffer.set_beta(0.7)
        buffer.update_weight(np.arange(10), torch.arange(10.0))
    assert_same_batches(pair)
    fill(pair, OBSERVATIONS["vectors"], 3)
    assert_same_batches(pair)


@pytest.mark.parametrize("kind", TRAININGS)
def test_a_pickled_buffer_goes_on_as_the_one_that_was_pickled(kind):
    buffer = make(ours, kind)
    pair = [make(own, kind), buffer]
    fill(pair, OBSERVATIONS["vectors"], 30)
    pair[1] = pickle.loads(pickle.dumps(pair[1]))
    assert_same_batches(pair)
    fill(pair, OBSERVATIONS["vectors"], 30)
    assert_same_batches(pair)


@pytest.mark.parametrize("kind", TRAININGS)
def test_reset_forgets_every_step(kind):
    pair = [make(package, kind) for package in (own, ours)]
    fill(pair, OBSERVATIONS["vectors"], 30)
    for buffer in pair:
        buffer.reset()
    assert len(pair[1]) == 0 and all(len(rows) == 0 for rows in pair[1].rows)
    fill(pair, OBSERVATIONS["vectors"], 5)
    if "Prioritized" not in kind:  # whose priorities tianshou keeps
        assert_same_batches(pair)


@pytest.mark.parametrize("kind", [name for name in TRAININGS if "Prioritized" in name])
def test_steps_that_reset_forgot_are_not_drawn(kind):
    """Those of tianshou draw them: they keep the priorities."""
    pair = [make(package, kind) for package in (own, ours)]
    fill(pair, OBSERVATIONS["vectors"], 60)
    for buffer in pair:
        buffer.reset()
    fill(pair, OBSERVATIONS["vectors"], 2)
    assert set(buffer.sample(200)[1]) <= set(buffer.sample_indices(0))


def test_rows_hold_whole_transitions_of_each_environment():
    buffer = make(ours, "VectorReplayBuffer", storage=LazyMemmapStorage)
    pair = [make(own, "VectorReplayBuffer"), buffer]
    fill(pair, OBSERVATIONS["vectors"], 60)
    assert all(isinstance(rows.storage, LazyMemmapStorage) for rows in buffer.rows)
    row = buffer.rows[2][:]
    assert np.array_equal(row["observation"].numpy(), pair[0].obs[20:30])
    assert np.array_equal(row["next"]["reward"].numpy()[:, 0], pair[0].rew[20:30])


def test_hooks_that_add_keys_at_the_end_of_an_episode_work():
    class Always(torch.nn.Module):
        def forward(self, obs, state=None, info=None):
            return torch.tensor([[1.0, 0.0]]).expand(len(obs), 2), state

    env = gymnasium.make("CartPole-v1")
    policy = DiscreteQLearningPolicy(model=Always(), action_space=env.action_space)
    pair = [make(package, "VectorReplayBuffer") for package in (own, ours)]
    for buffer in pair:
        envs = DummyVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4)
        envs.seed(3)
        collector = Collector(policy, envs, buffer, on_episode_done_hook=EpisodeRolloutHookMCReturn())
        collector.reset()
        collector.collect(n_episode=4)
    assert "full_episode_mc_return" in pair[1][:].get_keys()
    assert_same_batches(pair)


def test_what_rows_cannot_do_is_refused():
    buffer = make(ours, "ReplayBuffer")
    fill([buffer, make(own, "ReplayBuffer")], OBSERVATIONS["vectors"], 5)
    before = buffer[:].obs
    for call in (
        lambda: buffer.update(buffer), lambda: buffer.set_batch(buffer[:]), buffer.dropnull,
        lambda: buffer.save_hdf5("x.hdf5"), lambda: ours.ReplayBuffer.load_hdf5("x.hdf5"),
        lambda: ours.ReplayBuffer.from_data(),
        lambda: buffer.set_array_at_key(np.zeros(5), "obs"),
    ):  # fmt: skip
        with pytest.raises((NotImplementedError, ValueError), match=r"row|rows|steps"):
            call()
    assert np.array_equal(buffer[:].obs, before)
    used = LazyTensorStorage(40)
    used.set(range(3), torch.zeros(3))
    with pytest.raises(ValueError, match="holds rows already"):
        make(ours, "ReplayBuffer", storage=lambda size: used)


@pytest.mark.parametrize("kind", ["ReplayBuffer", "VectorReplayBuffer"])
def test_a_step_that_does_not_fit_is_refused_and_changes_nothing(kind):
    pair = [make(package, kind) for package in (own, ours)]
    fill(pair, OBSERVATIONS["vectors"], 5)
    lead = (4,) if kind in VECTOR else ()
    other = Batch(obs=np.zeros((*lead, 9)), act=np.zeros(lead), rew=np.zeros(lead), terminated=np.zeros(lead, bool),
                  truncated=np.zeros(lead, bool), obs_next=np.zeros((*lead, 9)))  # fmt: skip
    with pytest.raises(ValueError, match="observation"):
        pair[1].add(other)
    assert_same_batches(pair)


def test_steps_that_others_put_into_the_rows_are_noticed():
    pair = [make(package, "ReplayBuffer") for package in (own, ours)]
    fill(pair, OBSERVATIONS["vectors"], 5)
    pair[1].rows[0].add(pair[1].rows[0][0])
    with pytest.raises(RuntimeError, match="somebody else has written"):
        fill(pair, OBSERVATIONS["vectors"], 1)
