"""stable-baselines3 trains with rows of engram as with its own buffers: the same draws, batches and weights."""

import functools
import pickle
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common import buffers
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

import engram.data
from clients.trainings import sb3 as trainings
from engram.compat import transitions
from engram.compat.sb3 import NStepReplayBuffer, ReplayBuffer
from engram.data import Compact, LazyMemmapStorage, MinSize, QueueSampler, SliceSampler
from engram.kernel.replay import read_n_steps

TRAININGS = {"dqn_cartpole": 2000, "sac_pendulum": 300, "td3_dict_in_four_environments": 1200}
BOX = spaces.Box(-1, 1, (3,))
OBSERVATIONS = {
    "box": BOX,
    "pixels": spaces.Box(0, 255, (2, 8, 8), np.uint8),
    "float64": spaces.Box(-1, 1, (3,), np.float64),
    "discrete": spaces.Discrete(5),
    "multi binary": spaces.MultiBinary(4),
    "dict": spaces.Dict(a=BOX, b=spaces.Discrete(3), c=spaces.Box(0, 255, (2, 4, 4), np.uint8)),
}
ACTIONS = {
    "box": spaces.Box(-1, 1, (2, 2)),
    "discrete": spaces.Discrete(4),
    "float64": spaces.Box(-1, 1, (2,), np.float64),
    "multi discrete": spaces.MultiDiscrete([3, 4]),
}


def batched(space: spaces.Space, n: int) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: batched(part, n) for key, part in space.items()}
    return np.stack([space.sample() for _ in range(n)])


def fill(pair: list[Any], observation: spaces.Space, action: spaces.Space, steps: int, n_envs: int) -> None:
    """The same steps into each buffer; some end an episode, and some are truncated, done or not."""
    draw = np.random.default_rng(1)
    observation.seed(1), action.seed(1)
    for _ in range(steps):
        done = draw.random(n_envs) < 0.3
        infos = [{"TimeLimit.truncated": bool(draw.random() < (0.5 if d else 0.2))} for d in done]
        obs, following, act = batched(observation, n_envs), batched(observation, n_envs), batched(action, n_envs)
        reward = draw.random(n_envs)
        for buffer in pair:
            given = (dict(obs), dict(following)) if isinstance(obs, dict) else (obs, following)
            buffer.add(*given, act, reward, done, infos)


ARRAYS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


def assert_same_batches(pair: list[Any], env: Any = None) -> None:
    for seed in range(5):
        batches = []
        for buffer in pair:
            np.random.seed(seed)
            batches.append(buffer.sample(64, env=env))
        assert type(batches[0]) is type(batches[1])
        for name, theirs, ours in zip(batches[0]._fields, *batches, strict=True):
            assert same(theirs, ours), name


@pytest.mark.parametrize("training", TRAININGS)
def test_a_training_ends_with_the_same_weights(training, tell):
    theirs, ours = (
        trainings.outcome(getattr(trainings, training), buffer, TRAININGS[training]) for buffer in (None, ReplayBuffer)
    )
    for name, outcome in {"its own buffer": theirs, "engram": ours}.items():
        cell = f"{outcome['seconds']:.1f} s, return {np.mean(outcome['returns'][-5:]):.0f}"
        tell("stable-baselines3", training, name, cell)
    assert ours["returns"] == theirs["returns"] and ours["weights"] == theirs["weights"]


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("steps", [7, 25], ids=["half full", "gone round"])
def test_batches_are_those_of_its_own_buffer(observation, action, steps):
    spaces_of = OBSERVATIONS[observation], ACTIONS[action]
    kind = buffers.DictReplayBuffer if observation == "dict" else buffers.ReplayBuffer
    pair = [cls(30, *spaces_of, "cpu", n_envs=3) for cls in (kind, ReplayBuffer)]
    fill(pair, *spaces_of, steps=steps, n_envs=3)
    assert [(b.pos, b.full, b.size(), b.buffer_size) for b in pair[1:]] == [
        (b.pos, b.full, b.size(), b.buffer_size) for b in pair[:1]
    ]
    assert_same_batches(pair)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("n_steps", [2, 3, 5])
@pytest.mark.parametrize("handle", [False, True], ids=["time limits are ends", "time limits are none"])
@pytest.mark.parametrize("steps", [7, 10, 25])
def test_n_step_batches_are_those_of_its_own_buffer(n_envs, n_steps, handle, steps):
    settings = {"n_envs": n_envs, "n_steps": n_steps, "gamma": 0.9, "handle_timeout_termination": handle}
    pair = [
        cls(10 * n_envs, BOX, ACTIONS["box"], "cpu", **settings) for cls in (buffers.NStepReplayBuffer, ReplayBuffer)
    ]
    fill(pair, BOX, ACTIONS["box"], steps=steps, n_envs=n_envs)
    assert_same_batches(pair)
    for name in ("dones", "timeouts"):
        assert same(*(getattr(buffer, name) for buffer in pair)), name


def test_truncation_without_done_ends_an_episode_for_every_reader(tmp_path):
    buffer = ReplayBuffer(10, BOX, ACTIONS["discrete"], "cpu", n_steps=3, gamma=1.0)
    for t, truncated in enumerate([False, True, False, False, False]):
        obs = np.full((1, 3), t, np.float32)
        buffer.add(obs, obs + 1, np.zeros(1), np.ones(1), np.zeros(1), [{"TimeLimit.truncated": truncated}])
    buffer.rows.buffer.dumps(tmp_path)
    loaded = ReplayBuffer(10, BOX, ACTIONS["discrete"], "cpu", n_steps=3, gamma=1.0)
    loaded.rows.buffer.loads(tmp_path)
    for one in (buffer, loaded, pickle.loads(pickle.dumps(buffer))):
        batch = one._get_samples(np.arange(5))
        assert batch.rewards.flatten().tolist() == [2, 1, 3, 2, 1] and not batch.dones.any()
        assert not one.dones.any() and one.timeouts[:5].flatten().tolist() == [0, 1, 0, 0, 0]
        rows = engram.data.ReplayBuffer(
            storage=one.rows.buffer.storage, sampler=SliceSampler(slice_len=2), batch_size=64
        )
        starts = rows.sample()["observation"].reshape(-1, 2, 3)[:, 0, 0]
        assert {*starts.tolist()} == {0.0, 2.0, 3.0}


def test_time_limits_count_as_ends_where_they_are_not_handled():
    pair = [cls(30, BOX, ACTIONS["box"], "cpu", handle_timeout_termination=False)
            for cls in (buffers.ReplayBuffer, ReplayBuffer)]  # fmt: skip
    fill(pair, BOX, ACTIONS["box"], steps=20, n_envs=1)
    assert pair[1].sample(200).dones.any() and not pair[1].timeouts.any()
    assert_same_batches(pair)


@pytest.mark.parametrize(("observation", "n_steps"), [("box", 1), ("dict", 1), ("box", 3)])
def test_batches_are_normalised(observation, n_steps):
    space = OBSERVATIONS[observation]
    if observation == "dict":
        space = spaces.Dict(a=BOX, c=spaces.Box(0, 255, (2, 4, 4), np.uint8))

    class Env(gymnasium.Env):
        observation_space, action_space = space, ACTIONS["box"]

        def reset(self, **kwargs):
            return self.observation_space.sample(), {}

        def step(self, action):
            return self.observation_space.sample(), 2.0, False, False, {}

    env = VecNormalize(DummyVecEnv([Env] * 3), norm_obs_keys=["a"] if observation == "dict" else None)
    env.reset()
    for _ in range(10):
        env.step(batched(ACTIONS["box"], 3))
    kinds = buffers.DictReplayBuffer if observation == "dict" else buffers.ReplayBuffer, ReplayBuffer
    if n_steps > 1:
        kinds = buffers.NStepReplayBuffer, NStepReplayBuffer
    pair = [cls(30, space, ACTIONS["box"], "cpu", n_envs=3) for cls in kinds]
    fill(pair, space, ACTIONS["box"], steps=8, n_envs=3)
    assert_same_batches(pair, env)


def model_with(buffer: Any, **kwargs: Any) -> DQN:
    return DQN("MlpPolicy", "CartPole-v1", buffer_size=500, learning_starts=20, seed=1, device="cpu",
               replay_buffer_class=buffer, replay_buffer_kwargs=kwargs)  # fmt: skip


def test_a_replay_buffer_is_saved_and_loaded(tmp_path):
    model = model_with(ReplayBuffer).learn(60)
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    again = model_with(ReplayBuffer)
    again.load_replay_buffer(tmp_path / "buffer.pkl")
    assert (again.replay_buffer.pos, again.replay_buffer.size()) == (60, 60)
    assert_same_batches([model.replay_buffer, again.replay_buffer])
    again.learn(20)
    assert again.replay_buffer.pos == 80 and model.replay_buffer.pos == 60


def test_a_pickle_of_an_earlier_version_is_loaded():
    pair = [ReplayBuffer(30, BOX, ACTIONS["box"], "cpu", n_envs=3) for _ in range(2)]
    fill(pair, BOX, ACTIONS["box"], steps=4, n_envs=3)
    earlier = {"steps", "n_envs", "buffer", "_observation_space", "_action_size", "_action_dtype"}
    for name in vars(pair[1].rows).keys() - earlier:
        delattr(pair[1].rows, name)
    pair[1] = pickle.loads(pickle.dumps(pair[1]))
    fill(pair, BOX, ACTIONS["box"], steps=9, n_envs=3)
    assert_same_batches(pair)


def test_a_training_goes_on_with_the_rows_in_a_file(tmp_path):
    storage = functools.partial(LazyMemmapStorage, scratch_dir=tmp_path / "rows", existsok=True)
    first = model_with(ReplayBuffer, storage=storage).learn(72)
    first.replay_buffer.rows.buffer.storage.close()
    second = model_with(ReplayBuffer, storage=storage)
    assert (second.replay_buffer.pos, second.replay_buffer.full) == (72, False)
    assert second.learn(28).replay_buffer.pos == 100


def test_a_checkpoint_of_the_rows_brings_position_and_batches_back(tmp_path):
    pair = [ReplayBuffer(30, BOX, ACTIONS["box"], "cpu", n_envs=3) for _ in range(2)]
    fill(pair[:1], BOX, ACTIONS["box"], steps=14, n_envs=3)
    pair[0].rows.buffer.dumps(tmp_path)
    pair[1].rows.buffer.loads(tmp_path)
    assert (pair[1].pos, pair[1].full) == (4, True)
    assert_same_batches(pair)


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("steps", [0, 2, 5], ids=["empty", "half full", "gone round"])
def test_arrays_of_all_slots_are_those_of_its_own_buffer(observation, steps):
    kind = buffers.DictReplayBuffer if observation == "dict" else buffers.ReplayBuffer
    for action in ACTIONS.values():
        pair = [cls(9, OBSERVATIONS[observation], action, "cpu", n_envs=3) for cls in (kind, ReplayBuffer)]
        fill(pair, OBSERVATIONS[observation], action, steps=steps, n_envs=3)
        for name in ARRAYS:
            theirs, ours = (getattr(buffer, name) for buffer in pair)
            assert same(theirs, ours), name


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "float16"])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_observations_keep_the_dtype_and_shape_of_their_space(dtype, shape):
    space = spaces.Box(0, 100, shape, np.dtype(dtype))
    pair = [cls(4, space, ACTIONS["discrete"], "cpu", n_envs=2) for cls in (buffers.ReplayBuffer, ReplayBuffer)]
    for steps in (0, 3):
        fill(pair, space, ACTIONS["discrete"], steps=steps, n_envs=2)
        assert same(pair[0].observations, pair[1].observations)
    assert pair[1].sample(2).observations.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("steps", [3, 7], ids=["half full", "gone round"])
def test_assignments_to_arrays_change_the_rows(steps, tmp_path):
    pair = [cls(15, BOX, ACTIONS["discrete"], "cpu", n_envs=3) for cls in (buffers.ReplayBuffer, ReplayBuffer)]
    fill(pair, BOX, ACTIONS["discrete"], steps=steps, n_envs=3)
    for buffer in pair:
        rewards = buffer.rewards
        rewards[:3] = rewards[:3] * 10
        buffer.dones[2] = True
        buffer.timeouts[1, 2] = 1
        buffer.observations[0, 1] = 7
        buffer.next_observations[1, 0, 2] = -7
        assert rewards[0, 0] == buffer.rewards[0, 0]
    assert_same_batches(pair)
    for name in ARRAYS:
        assert same(*(getattr(buffer, name) for buffer in pair)), name
    assert type(pair[1].rewards.sum()) is type(pair[0].rewards.sum()) and type(pair[1].rewards + 1) is np.ndarray
    assert pair[1].rows.buffer.storage[:]["next"]["done"][2].all()
    pair[1].rows.buffer.dumps(tmp_path)


def test_assignments_that_reach_no_row_are_refused():
    buffer = ReplayBuffer(9, BOX, ACTIONS["discrete"], "cpu", n_envs=3)
    fill([buffer], BOX, ACTIONS["discrete"], steps=2, n_envs=3)
    before = np.array(buffer.rewards)
    with pytest.raises(IndexError, match="written"):
        buffer.rewards[1:] = 5
    with pytest.raises(ValueError, match="read-only"):
        buffer.rewards[0][0] = 5
    assert same(np.array(buffer.rewards), before)


def test_reset_forgets_everything():
    pair = [cls(9, BOX, ACTIONS["box"], "cpu") for cls in (buffers.ReplayBuffer, ReplayBuffer)]
    fill(pair, BOX, ACTIONS["box"], steps=12, n_envs=1)
    for buffer in pair:
        buffer.reset()
        assert (buffer.pos, buffer.full, buffer.size()) == (0, False, 0)
        with pytest.raises(ValueError):
            buffer.sample(1)
    fill(pair, BOX, ACTIONS["box"], steps=4, n_envs=1)
    assert_same_batches(pair)


@pytest.mark.parametrize("observation", ["box", "dict", "pixels"])
@pytest.mark.parametrize("n_envs", [1, 2])
def test_an_empty_buffer_that_is_said_to_be_full_is_full_of_zeros(observation, n_envs):
    space = OBSERVATIONS[observation]
    classes = (buffers.DictReplayBuffer if observation == "dict" else buffers.ReplayBuffer, ReplayBuffer)
    pair = [cls(9 * n_envs, space, ACTIONS["discrete"], "cpu", n_envs=n_envs) for cls in classes]
    for buffer in pair:
        buffer.pos, buffer.full = 0, False
        assert buffer.size() == 0
        buffer.full = True
    assert (pair[1].pos, pair[1].full, pair[1].size()) == (0, True, 9)
    assert_same_batches(pair)
    fill(pair, space, ACTIONS["discrete"], steps=4, n_envs=n_envs)
    assert_same_batches(pair)


def test_where_something_was_added_position_and_fullness_follow_from_that():
    buffer = ReplayBuffer(9, BOX, ACTIONS["box"], "cpu")
    fill([buffer], BOX, ACTIONS["box"], steps=4, n_envs=1)
    buffer.pos, buffer.full = 4, False
    for name, value in (("pos", 3), ("full", True)):
        with pytest.raises(AttributeError, match=f"{name} follows from what was added, and cannot be set where"):
            setattr(buffer, name, value)
    assert (buffer.pos, buffer.full) == (4, False)


def test_extend_adds_step_after_step():
    buffer = ReplayBuffer(9, BOX, ACTIONS["box"], "cpu")
    steps = np.zeros((4, 1, 3), np.float32)
    buffer.extend(steps, steps, np.zeros((4, 1, 2, 2)), np.arange(4.0)[:, None], np.zeros((4, 1)), [[{}]] * 4)
    assert buffer.rewards[:4, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("infos", [
    [{"TimeLimit.truncated": np.array([True])}], [{"TimeLimit.truncated": np.array(True)}],
    [{"TimeLimit.truncated": np.array([True, False])}], [{"TimeLimit.truncated": True}], [{}, {"other": 1}],
])  # fmt: skip
def test_truncations_may_be_arrays(infos):
    n_envs = 1 if np.size(infos[0].get("TimeLimit.truncated", 0)) == 1 and len(infos) == 1 else 2
    pair = [cls(8, BOX, ACTIONS["discrete"], "cpu", n_envs=n_envs) for cls in (buffers.ReplayBuffer, ReplayBuffer)]
    for buffer in pair:
        obs = np.zeros((n_envs, 3), np.float32)
        buffer.add(obs, obs, np.zeros((n_envs, 1)), np.ones(n_envs), np.ones(n_envs), infos)
    assert same(pair[0].timeouts, pair[1].timeouts)
    assert_same_batches(pair)


def test_infos_of_another_number_of_environments_are_refused():
    buffer, obs = ReplayBuffer(9, BOX, ACTIONS["box"], "cpu", n_envs=3), np.zeros((3, 3), np.float32)
    for infos in ([], [{}, {}], [{"TimeLimit.truncated": np.array([True, False])}]):
        with pytest.raises(ValueError, match=r"'TimeLimit.truncated' for 3 environments"):
            buffer.add(obs, obs, np.zeros((3, 4)), np.ones(3), np.ones(3), infos)
    assert buffer.pos == 0


def test_an_n_step_buffer_of_that_name_has_its_defaults():
    theirs, ours = (cls(9, BOX, ACTIONS["box"], "cpu") for cls in (buffers.NStepReplayBuffer, NStepReplayBuffer))
    assert (theirs.n_steps, theirs.gamma) == (ours.n_steps, ours.gamma) == (3, 0.99)


def test_a_training_that_asks_for_shared_observations_goes_on_after_a_second_learn():
    outcomes = []
    for cls in (buffers.ReplayBuffer, ReplayBuffer):
        model = DQN("MlpPolicy", "CartPole-v1", buffer_size=30, learning_starts=5, seed=1, device="cpu",
                    replay_buffer_class=cls, optimize_memory_usage=True,
                    replay_buffer_kwargs={"handle_timeout_termination": False})  # fmt: skip
        model.learn(24)
        with pytest.warns(UserWarning, match="last trajectory"):
            model.learn(12)
        outcomes.append(model.replay_buffer)
    for name in ("dones", "rewards", "actions"):
        assert same(*(getattr(buffer, name) for buffer in outcomes)), name
    draws = []
    for buffer in outcomes:
        np.random.seed(3)
        draws.append(buffer.sample(20))
    assert same(draws[0].observations, draws[1].observations) and same(draws[0].dones, draws[1].dones)


STACKS = spaces.Box(0, 255, (4, 8, 8), np.uint8)


def fill_with_stacks(pair: list[Any], steps: int, n_envs: int = 1) -> None:
    """Stacks of four frames as an environment gives them; episodes of twelve steps end by a time limit."""
    draw = np.random.default_rng(1)
    frames = draw.integers(0, 256, (2 * steps, n_envs, 1, 8, 8)).astype(np.uint8)
    following = np.repeat(frames[0], 4, 1)
    for step in range(steps):
        obs = np.repeat(frames[steps + step], 4, 1) if step % 12 == 0 else following
        following = np.concatenate([obs[:, 1:], frames[step]], 1)
        done = np.full(n_envs, step % 12 == 11)
        infos = [{"TimeLimit.truncated": bool(d)} for d in done]
        rest = draw.integers(0, 4, (n_envs, 1)), draw.random(n_envs), done, infos
        for buffer in pair:
            buffer.add(obs, following, *rest)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"n_steps": 3, "gamma": 0.9}], ids=["1 step", "3 steps"])
def test_observations_stored_once_are_read_as_its_buffer_without_that_setting_reads_them(n_envs, settings):
    """The draws leave a step out there, so these are all steps."""
    kind = buffers.NStepReplayBuffer if settings else buffers.ReplayBuffer
    pair = [kind(40 * n_envs, STACKS, ACTIONS["discrete"], "cpu", n_envs=n_envs, **settings)]
    pair.append(
        ReplayBuffer(40 * n_envs, STACKS, ACTIONS["discrete"], "cpu", n_envs, optimize_memory_usage=True, **settings)
    )
    for steps in (25, 50):
        fill_with_stacks(pair, steps, n_envs)
        batches = []
        for buffer in pair:
            np.random.seed(3)
            batches.append(buffer._get_samples(np.arange(buffer.size())))
        for name, theirs, ours in zip(batches[0]._fields, *batches, strict=True):
            assert same(theirs, ours), name
        assert same(pair[0].next_observations, pair[1].next_observations)
    assert pair[1].rows.buffer.storage.compact == Compact(["observation"], {"observation": 4}, 1)


def test_dict_observations_are_stored_once_and_their_other_entries_change():
    space = spaces.Dict(pixels=STACKS, vector=BOX)
    pair = [buffers.DictReplayBuffer(30, space, ACTIONS["box"], "cpu")]
    pair.append(ReplayBuffer(30, space, ACTIONS["box"], "cpu", optimize_memory_usage=True))
    fill(pair, space, ACTIONS["box"], steps=25, n_envs=1)
    for buffer in pair:
        buffer.rewards[3] = 7.0
    assert all(same(getattr(pair[0], name), getattr(pair[1], name)) for name in ARRAYS)
    with pytest.raises(ValueError, match="stored once"):
        pair[1].observations["pixels"][2] = 0


def test_a_saved_buffer_that_stores_observations_once_goes_on():
    buffer = ReplayBuffer(30, STACKS, ACTIONS["discrete"], "cpu", optimize_memory_usage=True)
    fill_with_stacks([buffer], 35)
    pair = [buffer, pickle.loads(pickle.dumps(buffer))]
    assert_same_batches(pair)
    fill_with_stacks(pair, 10)
    assert_same_batches(pair)


def test_settings_that_cannot_be_honoured_are_refused():
    with pytest.raises(ValueError, match="n_steps must be 1 or more"):
        ReplayBuffer(9, BOX, ACTIONS["box"], n_steps=0)
    with pytest.raises(TypeError, match="n_sampled_goal"):
        ReplayBuffer(9, BOX, ACTIONS["box"], n_sampled_goal=4)
    buffer = ReplayBuffer(9, BOX, ACTIONS["box"])
    with pytest.raises(AttributeError, match="follows from what was added"):
        buffer.pos = 1


def test_a_step_that_does_not_fit_is_refused_and_changes_nothing():
    buffer = ReplayBuffer(9, BOX, ACTIONS["box"], "cpu", n_envs=2)
    with pytest.raises(ValueError):
        buffer.add(np.zeros((3, 3)), np.zeros((2, 3)), np.zeros((2, 4)), np.zeros(2), np.zeros(2), [{}, {}])
    assert buffer.pos == 0


@pytest.mark.parametrize("stored", [0, 1])
def test_images_with_their_axes_in_another_order_are_refused(stored):
    buffer = ReplayBuffer(9, OBSERVATIONS["pixels"], ACTIONS["discrete"], "cpu", n_envs=2)
    rest = np.zeros(2), np.zeros(2), np.zeros(2), [{}, {}]
    images = np.zeros((2, 2, 8, 8), np.uint8)
    for _ in range(stored):
        buffer.add(images, images, *rest)
    for given in ((np.moveaxis(images, 1, 3).copy(), images), (images, images.reshape(8, 8, 2, 2))):
        with pytest.raises(ValueError, match="observations of shape"):
            buffer.add(*given, *rest)
    assert buffer.pos == stored


@pytest.mark.parametrize("writes_from", ["another thread", "another process"])
def test_an_n_step_batch_is_of_rows_that_were_stored_together(writes_from, monkeypatch):
    reads = []

    def with_steps_behind(*args):
        """Steps come between the returns and the observations."""
        found = read_n_steps(*args)
        reads.append(found)
        if len(reads) == 3:
            return found
        if writes_from == "another thread":
            writer = threading.Thread(target=write)
            writer.start()
            writer.join(0.05)
        else:  # those of this thread wait for nothing either
            write()
        return found

    def write():
        t = buffer.rows.buffer.write_count
        obs = np.full((1, 3), t)
        buffer.add(obs, obs + 1, np.zeros((1, 4)), np.array([t]), np.array([False]), [{}])

    buffer = NStepReplayBuffer(2, BOX, ACTIONS["box"], "cpu", n_steps=2, gamma=1.0)
    for _ in range(3):
        write()
    monkeypatch.setattr(transitions, "read_n_steps", with_steps_behind)
    batch = buffer.sample(20)
    assert len(reads) == (1 if writes_from == "another thread" else 3)
    first, following = batch.observations[:, :1], batch.next_observations[:, :1]
    assert batch.rewards.tolist() == [[sum(range(int(a), int(b)))] for a, b in zip(first, following, strict=True)]


@pytest.mark.parametrize(
    "options", [{}, {"n_steps": 3}, {"optimize_memory_usage": True, "handle_timeout_termination": False}, {"n_envs": 2}]
)
def test_samples_are_refused_beside_removed_rows(options):
    n_envs = options.get("n_envs", 1)
    buffer = ReplayBuffer(20, BOX, ACTIONS["box"], "cpu", **options)
    fill([buffer], BOX, ACTIONS["box"], steps=8, n_envs=n_envs)
    buffer.sample(4)
    assert buffer.rows.buffer.remove((2, 0)) == 1
    with pytest.raises(RuntimeError, match=r"1 of the stored rows were removed .*another library.*`rows\.buffer`"):
        buffer.sample(4)
    assert len(buffer.rows.buffer.sample(4)["action"]) == 4


def test_samples_are_refused_where_the_rows_have_a_rate_limiter():
    buffer = ReplayBuffer(20, BOX, ACTIONS["box"], "cpu")
    fill([buffer], BOX, ACTIONS["box"], steps=8, n_envs=1)
    buffer.rows.buffer.rate_limiter = MinSize(4)
    with pytest.raises(RuntimeError, match=r"rate limiter, MinSize\(4\).*`rows\.buffer\.rate_limiter = None`"):
        buffer.sample(4)
    buffer.rows.buffer.rate_limiter = None
    assert len(buffer.sample(4).rewards) == 4


def test_samples_are_refused_where_the_rows_are_a_queue():
    buffer = ReplayBuffer(20, BOX, ACTIONS["box"], "cpu")
    fill([buffer], BOX, ACTIONS["box"], steps=8, n_envs=1)
    buffer.rows.buffer.set_sampler(QueueSampler())
    with pytest.raises(RuntimeError, match=r"the store is a queue.*`rows\.buffer\.end_queue\(\)`"):
        buffer.sample(4)
    buffer.rows.buffer.end_queue()
    assert len(buffer.sample(4).rewards) == 4
