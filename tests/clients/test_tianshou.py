"""tianshou trains with rows of engram as with its own buffers: the same draws, batches and weights."""

import pickle
from collections.abc import Callable
from typing import Any

import gymnasium
import h5py
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
def test_single_frames_are_stored_once(kind, settings):
    pair = [make(package, kind, **SETTINGS[settings]) for package in (own, ours)]
    fill(pair, OBSERVATIONS["stacked images" if "last images" in settings else "vectors"], 15)
    buffer = pair[1]
    compact = {None if rows.storage.compact is None else rows.storage.compact.keys[0] for rows in buffer.rows}
    assert compact == {"observation" if settings in ("stacks", "last images, both") else None}


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


ONE = [name for name in TRAININGS if name not in VECTOR]


def assert_same_buffers(pair: list[Any]) -> None:
    """The same steps in the same places, episodes, batches, and what the next steps give."""
    index = pair[0].sample_indices(0)
    for key in ("obs", "act", "obs_next", "rew", "done"):
        if hasattr(pair[0], key):
            assert_equal(*(getattr(buffer, key)[index] for buffer in pair), name=key)
    for name in ("last_index", "_size", "_insertion_idx"):
        assert np.array_equal(*(getattr(buffer, name) for buffer in pair)), name
    assert np.array_equal(*(buffer.unfinished_index() for buffer in pair))
    assert_same_batches(pair)
    fill(pair, OBSERVATIONS["vectors"], 7)
    assert_same_batches(pair)


@pytest.mark.parametrize("kind", ONE)
@pytest.mark.parametrize("source", [own, ours], ids=["tianshou's", "ours"])
@pytest.mark.parametrize("settings", ["plain", "stacks", "no next observations"])
@pytest.mark.parametrize(("there", "here"), [(60, 3), (60, 35), (20, 90), (0, 20), (20, 0)])
def test_update_adds_the_steps_of_another_buffer(kind, source, settings, there, here):
    pair = [make(package, kind, **SETTINGS[settings]) for package in (own, ours)]
    others = [package.ReplayBuffer(30, **SETTINGS[settings]) for package in (own, source)]
    fill(pair, OBSERVATIONS["vectors"], here)
    fill(others, OBSERVATIONS["vectors"], there)
    if "Prioritized" in kind and not there:  # tianshou's own never returns
        assert len(pair[1].update(others[1])) == 0
    else:
        assert np.array_equal(*(buffer.update(other) for buffer, other in zip(pair, others, strict=True)))
    assert_same_buffers(pair)


def test_update_with_steps_that_do_not_fit_changes_nothing():
    pair = [make(package, "ReplayBuffer") for package in (own, ours)]
    fill(pair, OBSERVATIONS["vectors"], 5)
    other = make(own, "ReplayBuffer")
    fill([other, make(own, "ReplayBuffer")], OBSERVATIONS["numbers"], 5)
    with pytest.raises(ValueError, match="observation"):
        pair[1].update(other)
    assert_same_buffers(pair)
    with pytest.raises(NotImplementedError):
        make(ours, "VectorReplayBuffer").update(other)


@pytest.mark.parametrize("kind", ["ReplayBuffer", "VectorReplayBuffer"])
@pytest.mark.parametrize("steps", [0, 15, 130])
def test_set_batch_makes_a_batch_the_rows(kind, steps):
    pair = [make(package, kind) for package in (own, ours)]
    fill(pair, OBSERVATIONS["vectors"], steps)
    draw = np.random.default_rng(3)
    batch = Batch(obs=draw.random((40, 3)).astype(np.float32), obs_next=draw.random((40, 3)).astype(np.float32),
                  act=draw.integers(0, 3, 40), rew=draw.random(40), terminated=draw.random(40) < 0.2,
                  truncated=np.zeros(40, bool), policy=Batch(hidden=draw.random((40, 2))),
                  info=Batch(env_id=draw.integers(0, 4, 40)))  # fmt: skip
    batch.done = batch.terminated
    for buffer in pair:
        buffer.set_batch(Batch(batch, copy=True))
    for key in ("obs", "act", "obs_next", "rew"):
        assert_equal(*(getattr(buffer, key) for buffer in pair), name=key)
    assert len(pair[0]) == len(pair[1])
    if steps:
        assert_same_buffers(pair)


@pytest.mark.parametrize("kind", ["ReplayBuffer", "VectorReplayBuffer"])
def test_a_batch_that_is_no_buffer_is_refused_and_changes_nothing(kind):
    pair = [make(package, kind) for package in (own, ours)]
    fill(pair, OBSERVATIONS["vectors"], 50)
    few, part = Batch(obs=np.zeros(3)), Batch(obs=np.zeros((40, 3)), act=np.zeros(40))
    other = Batch(
        obs=np.zeros((40, 9)), act=np.zeros(40, int), rew=np.zeros(40), obs_next=np.zeros((40, 9)),
        terminated=np.zeros(40, bool), truncated=np.zeros(40, bool),
    )  # fmt: skip
    for error, batch in ((AssertionError, few), (ValueError, part), (ValueError, other)):
        with pytest.raises(error):
            pair[1].set_batch(batch)
    assert_same_buffers(pair)


def test_a_buffer_is_made_from_data_of_a_file(tmp_path):
    draw = np.random.default_rng(3)
    arrays = [draw.random((12, 3)), draw.integers(0, 3, 12), draw.random(12), *(draw.random((3, 12)) < 0.3),
              draw.random((12, 3))]  # fmt: skip
    with h5py.File(tmp_path / "data.hdf5", "w") as file:
        sets = [file.create_dataset(str(i), data=array) for i, array in enumerate(arrays)]
        pair = [package.ReplayBuffer.from_data(*sets) for package in (own, ours)]
        with pytest.raises(AssertionError):
            ours.ReplayBuffer.from_data(sets[0][:5], *sets[1:])
    assert [len(buffer) for buffer in pair] == [12, 12]
    assert_equal(*(buffer[:] for buffer in pair))
    assert_equal(*(buffer[5] for buffer in pair))
    assert_equal(*(buffer.sample(9)[0] for buffer in pair))
    assert len(ours.ReplayBuffer.from_data(*(array[:0] for array in arrays))) == 0


@pytest.mark.parametrize("kind", ONE)
@pytest.mark.parametrize("steps", [8, 40, 55])
def test_dropnull_takes_out_steps_with_nulls(kind, steps):
    buffer, draw = make(ours, kind), np.random.default_rng(3)
    expected = []
    for t in range(steps):
        null = draw.random() < 0.3
        step = Batch(act=t, rew=float(t), terminated=t % 5 == 4, truncated=False, obs_next=np.zeros(2))
        step.obs = np.array([t, np.nan if null and t % 2 else t], float)
        step.info = Batch(x=np.nan if null and not t % 2 else 1.0)
        buffer.add(step)
        expected += [] if null or t < steps - 40 else [t]
    assert buffer.hasnull()
    buffer.dropnull()
    assert not buffer.hasnull() and len(buffer) == len(expected)
    assert buffer.act[: len(buffer)].tolist() == buffer.rew[: len(buffer)].tolist() == expected
    assert buffer.rows[0][:]["action"].tolist() == expected
    for t in range(1000, 1045):  # room for as many as before
        step = Batch(obs=np.zeros(2), act=t, rew=0.0, terminated=False, truncated=False, obs_next=np.zeros(2))
        step.info = Batch(x=1.0)
        place = buffer.add(step)[0]
        assert buffer.act[place] == t
    assert len(buffer) == 40 and set(buffer.sample(300)[1]) <= set(range(40))


def test_dropnull_of_the_last_and_of_all_steps():
    buffer = ours.ReplayBuffer(5)
    step = {"act": 1, "rew": 1.0, "terminated": False, "truncated": False, "obs_next": 0.0}
    ours.ReplayBuffer(5).dropnull()
    for obs in (1.0, np.nan):
        buffer.add(Batch(obs=obs, **step))
    buffer.dropnull()
    assert len(buffer) == 1 and buffer.unfinished_index().tolist() == [0]
    buffer.add(Batch(obs=np.nan, **step))
    buffer.dropnull()
    assert buffer.obs[:1].tolist() == [1.0] and len(buffer) == 1
    buffer.reset()
    buffer.add(Batch(obs=np.nan, **step))
    buffer.dropnull()
    assert len(buffer) == 0 and len(buffer.rows[0]) == 0
    with pytest.raises(NotImplementedError, match="hasnull"):
        make(ours, "VectorReplayBuffer").dropnull()


@pytest.mark.parametrize("kind", TRAININGS)
@pytest.mark.parametrize("steps", [5, 90], ids=["half full", "gone round"])
@pytest.mark.parametrize(("saves", "loads"), [(ours, ours), (ours, own), (own, ours)], ids=["both", "saves", "loads"])
def test_hdf5_files_are_those_of_tianshou(kind, steps, saves, loads, tmp_path):
    pair = [make(package, kind) for package in (own, saves)]
    fill(pair, OBSERVATIONS["vectors"], steps)
    pair[1].save_hdf5(str(tmp_path / "buffer.hdf5"), compression="gzip")
    pair[1] = getattr(loads, kind).load_hdf5(str(tmp_path / "buffer.hdf5"))
    assert type(pair[1]) is getattr(loads, kind)
    if kind in VECTOR:  # whose own parts no longer share memory in a loaded file: as they are in one that was not saved
        assert all(type(a).__name__ == type(b).__name__ for a, b in zip(*(b.buffers for b in pair), strict=True))
    assert_same_buffers(pair)


def test_an_empty_buffer_is_saved_and_loaded(tmp_path):
    make(ours, "ReplayBuffer").save_hdf5(str(tmp_path / "a.hdf5"))
    pair = [make(own, "ReplayBuffer"), ours.ReplayBuffer.load_hdf5(str(tmp_path / "a.hdf5"), storage=LazyMemmapStorage)]
    assert isinstance(pair[1].rows[0].storage, LazyMemmapStorage)
    fill(pair, OBSERVATIONS["vectors"], 5)
    assert_same_buffers(pair)


def cached(package: Any) -> Any:
    return package.CachedReplayBuffer(package.ReplayBuffer(30, stack_num=2), 4, 9)


def fill_cached(pair: list[Any], steps: int) -> None:
    draw = np.random.default_rng(steps)
    for _ in range(steps):
        ids = np.sort(draw.choice(4, draw.integers(1, 5), replace=False))
        n = len(ids)
        batch = Batch(
            obs=draw.random((n, 3)), obs_next=draw.random((n, 3)), act=np.arange(n), rew=draw.random(n),
            terminated=draw.random(n) < 0.3, truncated=np.zeros(n, bool), info=Batch(a=draw.random(n)),
        )  # fmt: skip
        results = [buffer.add(Batch(batch, copy=True), ids) for buffer in pair]
        assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("steps", [3, 60])
@pytest.mark.parametrize("way", ["as it is", "pickled", "hdf5"])
def test_a_cached_buffer_moves_whole_episodes_to_its_main_buffer(steps, way, tmp_path):
    pair = [cached(package) for package in (own, ours)]
    fill_cached(pair, steps)
    if way == "pickled":
        pair[1] = pickle.loads(pickle.dumps(pair[1]))
    elif way == "hdf5":
        pair[1].save_hdf5(str(tmp_path / "buffer.hdf5"))
        pair[1] = ours.CachedReplayBuffer.load_hdf5(str(tmp_path / "buffer.hdf5"))
    fill_cached(pair, 20)
    assert pair[1].main_buffer is pair[1].buffers[0] and isinstance(pair[1].main_buffer, ours.ReplayBuffer)
    assert [len(b) for b in pair[0].buffers] == [len(b) for b in pair[1].buffers] == [len(r) for r in pair[1].rows]
    assert_same_batches(pair)
    index = pair[0].main_buffer.sample_indices(0)
    assert_equal(*(buffer.main_buffer[index] for buffer in pair))
    for buffer in pair:
        buffer.reset()
    fill_cached(pair, 15)
    assert_same_batches(pair)


def test_parts_of_a_cached_buffer_that_do_not_go_are_refused():
    for wrong in (lambda p: (p.ReplayBuffer(5), 0, 3), lambda p: (p.ReplayBuffer(5), 1, 0),
                  lambda p: (p.PrioritizedReplayBuffer(5, 0.6, 0.4), 1, 3)):  # fmt: skip
        for package in (own, ours):
            with pytest.raises(AssertionError):
                package.CachedReplayBuffer(*wrong(package))
    with pytest.raises(TypeError, match=r"engram.compat.tianshou"):
        ours.ReplayBufferManager([own.ReplayBuffer(3)])
    for kind in VECTOR:
        with pytest.raises(AssertionError):
            getattr(ours, kind)(10, 0)


@pytest.mark.parametrize("kind", ["ReplayBuffer", "PrioritizedReplayBuffer"])
def test_a_manager_of_buffers_of_different_sizes(kind):
    pair = []
    for package in (own, ours):
        prio = {"alpha": 0.6, "beta": 0.4} if "Prioritized" in kind else {}
        pair.append(getattr(package, f"{kind}Manager")([getattr(package, kind)(n, **prio) for n in (5, 9, 3, 12)]))
    fill(pair, OBSERVATIONS["vectors"], 6)
    assert_same_batches(pair)
    fill(pair, OBSERVATIONS["vectors"], 40)
    assert_same_buffers(pair)
    if kind == "ReplayBuffer":
        for theirs, mine in zip(*(buffer.buffers for buffer in pair), strict=True):
            assert_equal(theirs[:], mine[:])
            assert np.array_equal(theirs.obs, mine.obs)


def test_what_rows_cannot_do_is_refused():
    buffer = make(ours, "ReplayBuffer")
    with pytest.raises(KeyError, match="nothing has been added"):
        buffer[0]
    fill([buffer, make(own, "ReplayBuffer")], OBSERVATIONS["vectors"], 5)
    before = buffer[:].obs
    with pytest.raises(ValueError, match="steps"):
        buffer.set_array_at_key(np.zeros(5), "obs")
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


BAD_ADDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "no such ring": ([0, 1, 7], {}),
    "fewer observations than rings": ([0, 1, 2], {"obs": np.zeros((2, 3), np.float32)}),
    "fewer actions than rings": ([0, 1, 2], {"act": np.zeros(2, np.int64)}),
    "one action of three is no number": ([0, 1, 2], {"act": np.array([1, 2, "x"], object)}),
}


@pytest.mark.parametrize("bad", BAD_ADDS)
@pytest.mark.parametrize("kind", VECTOR)
def test_refused_steps_of_several_rings_are_written_to_none_of_them(kind, bad):
    pair = [make(package, kind) for package in (own, ours)]
    fill(pair, OBSERVATIONS["vectors"], 5)
    ids, changes = BAD_ADDS[bad]
    obs = np.zeros((3, 3), np.float32)
    step = {"obs": obs, "obs_next": obs, "act": np.zeros(3, np.int64), "rew": np.zeros(3)}
    ends = {"terminated": np.zeros(3, bool), "truncated": np.zeros(3, bool)}
    before = [len(rows) for rows in pair[1].rows]
    with pytest.raises((IndexError, ValueError, TypeError)):
        pair[1].add(Batch(step | ends | changes), buffer_ids=ids)
    assert [len(rows) for rows in pair[1].rows] == before
    fill(pair, OBSERVATIONS["vectors"], 5)
    assert_same_batches(pair)


def test_ring_numbers_count_from_the_end_as_in_its_own_buffer():
    step = Batch(
        obs=np.zeros((2, 3)),
        act=np.zeros(2),
        rew=np.arange(2.0),
        terminated=np.zeros(2, bool),
        truncated=np.zeros(2, bool),
    )
    theirs, mine = (make(package, "VectorReplayBuffer").add(step, buffer_ids=[-1, 0])[0] for package in (own, ours))
    assert theirs.tolist() == mine.tolist() == [30, 0]


def test_single_ring_takes_a_step_of_any_buffer_id():
    step = Batch(
        obs=np.zeros((1, 3)), act=np.zeros(1), rew=np.ones(1), terminated=np.zeros(1, bool), truncated=np.zeros(1, bool)
    )
    theirs, mine = (make(package, "ReplayBuffer").add(step, buffer_ids=[3])[0] for package in (own, ours))
    assert theirs.tolist() == mine.tolist() == [0]


def test_nested_number_of_one_step_has_the_type_of_its_own_buffer():
    step = Batch(obs=np.zeros(3), act=Batch(a=2), rew=1.0, terminated=False, truncated=False, obs_next=np.zeros(3))
    pair = [make(package, "ReplayBuffer") for package in (own, ours)]
    for buffer in pair:
        buffer.add(step)
    assert type(pair[0][0].act.a) is type(pair[1][0].act.a) is np.int64


def test_steps_that_others_put_into_the_rows_are_noticed():
    pair = [make(package, "ReplayBuffer") for package in (own, ours)]
    fill(pair, OBSERVATIONS["vectors"], 5)
    pair[1].rows[0].add(pair[1].rows[0][0])
    with pytest.raises(RuntimeError, match="somebody else has written"):
        fill(pair, OBSERVATIONS["vectors"], 1)


@pytest.mark.parametrize("kind", TRAININGS)
def test_samples_and_copies_are_refused_beside_removed_rows(kind, tmp_path):
    buffer = make(ours, kind)
    fill([buffer, make(ours, kind)], OBSERVATIONS["vectors"], steps=20)
    buffer.sample(4)
    assert buffer.rows[0].remove([2]) == 1
    uses = [
        lambda: buffer.sample(4),
        lambda: buffer.sample(0),
        lambda: buffer.sample_indices(4),
        lambda: buffer.save_hdf5(str(tmp_path / "buffer.hdf5")),
    ]
    if kind not in VECTOR:
        uses += [buffer.dropnull, lambda: make(ours, kind).update(buffer)]
    for use in uses:
        with pytest.raises(RuntimeError, match=r"1 of the stored rows were removed .*another library.*`rows`"):
            use()
    assert len(buffer[:]) == len(buffer) > 0 and not (tmp_path / "buffer.hdf5").exists()
