"""The spaces of Minari datasets that are written, and values as they have them."""

import json
import os

import numpy as np
import pytest
import torch

from contracts.each import each
from data.datasets.support import steps
from engram.collectors import MultiSyncDataCollector, SyncDataCollector
from engram.data import LazyTensorStorage, ReplayBuffer, Text
from engram.data.datasets import iter_minari, read_minari, write_minari
from engram.envs import GymEnv, ParallelEnv, SerialEnv, TransformedEnv
from engram.envs.transforms import DoubleToFloat, StepCounter, UnsqueezeTransform

gymnasium = pytest.importorskip("gymnasium", reason='environments need gymnasium: pip install "engram[gym]"')
h5py = pytest.importorskip("h5py", reason='Minari datasets need h5py: pip install "engram[h5]"')
spaces = gymnasium.spaces

OBSERVATION = spaces.Dict(
    place=spaces.Box(-2, 3, (2,), np.float64),
    gear=spaces.Discrete(3, start=5),
    grid=spaces.MultiDiscrete([[3, 4], [1, 2]], start=np.array([[1, 1], [0, 0]])),
    flags=spaces.MultiBinary(3),
    text=spaces.Text(6, min_length=0, charset="abö"),
    pair=spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (1,))]),
)
JSON = {
    "place": {"type": "Box", "dtype": "float64", "shape": [2], "low": [-2, -2], "high": [3, 3]},
    "gear": {"type": "Discrete", "dtype": "int64", "start": 5, "n": 3},
    "grid": {"type": "MultiDiscrete", "dtype": "int64", "nvec": [[3, 4], [1, 2]], "start": [[1, 1], [0, 0]]},
    "flags": {"type": "MultiBinary", "n": 3},
    "text": {"type": "Text", "max_length": 6, "min_length": 0, "charset": "abö"},
    "pair": {
        "type": "Tuple",
        "subspaces": [
            {"type": "Discrete", "dtype": "int64", "start": 0, "n": 2},
            {"type": "Box", "dtype": "float32", "shape": [1], "low": [0], "high": [1]},
        ],
    },
}
ACTION = {"type": "Discrete", "dtype": "int64", "start": -1, "n": 4}


class Every(gymnasium.Env):
    """Episodes of 5 steps with an observation space of every kind; keeps the last observations and actions."""

    observation_space = OBSERVATION
    action_space = spaces.Discrete(4, start=-1)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps == 5, False, {}


class Shifted(Every):
    """`Every` with another start of its gears."""

    observation_space = spaces.Dict({**OBSERVATION.spaces, "gear": spaces.Discrete(3, start=7)})


def metadata(folder):
    said = json.loads((folder / "data/metadata.json").read_text())
    return json.loads(said["observation_space"]), json.loads(said["action_space"])


def check_members(folder):
    """Every value in the file is in its space, as gymnasium says."""
    count = 0
    with h5py.File(folder / "data/main_data.hdf5") as file:
        for episode in file.values():
            columns = episode["observations"]
            for i in range(len(columns["gear"])):
                row = {key: columns[key][i] for key in ("place", "gear", "grid", "flags")}
                row["text"] = columns["text"][i].decode()
                row["pair"] = (columns["pair/_index_0"][i], columns["pair/_index_1"][i])
                assert OBSERVATION.contains(row), row
                count += 1
            assert all(Every.action_space.contains(action) for action in episode["actions"][:])
    return count


def environment(kind, categorical=False):
    def make():
        return GymEnv(Every(), categorical_action_encoding=categorical)

    return {
        "single": make,
        "serial": lambda: SerialEnv(2, make),
        "parallel": lambda: ParallelEnv(2, make),
    }[kind]()


@pytest.mark.deep
@each("categorical", [False, True])
@each("kind", ["single", "serial", "parallel"])
def test_collectors_dataset_has_the_spaces_of_its_environment(tmp_path, kind, categorical):
    env = environment(kind, categorical)
    collector = SyncDataCollector(env, frames_per_batch=20, total_frames=20)
    assert write_minari(collector, tmp_path / "s") == 20
    env.close()
    assert metadata(tmp_path / "s") == ({"type": "Dict", "subspaces": JSON}, ACTION)
    assert check_members(tmp_path / "s") == 24


def test_collector_of_several_processes_writes_the_spaces_of_its_environments(tmp_path):
    makers = [lambda: GymEnv(Every())] * 2
    collector = MultiSyncDataCollector(makers, frames_per_batch=20, total_frames=20, cat_results="stack")
    try:
        assert write_minari(collector, tmp_path / "s") == 20
    finally:
        collector.shutdown()
    assert metadata(tmp_path / "s") == ({"type": "Dict", "subspaces": JSON}, ACTION)
    assert check_members(tmp_path / "s") == 24


def test_buffer_is_written_with_the_spaces_of_the_environment_and_read_back(tmp_path):
    env = GymEnv(Every())
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    rb.extend(env.rollout(20, break_when_any_done=False))
    assert write_minari(rb, tmp_path / "s", env=env) == 20
    assert check_members(tmp_path / "s") == 24
    again = ReplayBuffer(storage=LazyTensorStorage(100))
    assert read_minari(tmp_path / "s", again) == 20
    a, b = rb[:], again[:]
    assert torch.equal(b["text"], a["text"]) and torch.equal(b["next", "text"], a["next", "text"])
    assert torch.equal(b["gear"], a["gear"].argmax(-1) + 5) and torch.equal(b["action"], a["action"].argmax(-1) - 1)
    assert torch.equal(b["place"], a["place"]) and b["grid"].shape == (20, 2, 2)


def test_entries_that_transforms_changed_have_the_space_of_their_spec(tmp_path):
    env = TransformedEnv(GymEnv(Every()), [DoubleToFloat(in_keys=["place"]), StepCounter()])
    write_minari(env.rollout(5), tmp_path / "s", env=env)
    observation, action = metadata(tmp_path / "s")
    found = observation["subspaces"]
    assert found["place"] == {**JSON["place"], "dtype": "float32"}
    assert found["step_count"]["type"] == "Box" and found["step_count"]["shape"] == [1]
    assert {key: found[key] for key in JSON if key != "place"} == {k: v for k, v in JSON.items() if k != "place"}
    assert action == ACTION
    taller = TransformedEnv(GymEnv("Pendulum-v1"), UnsqueezeTransform(-2, in_keys=["observation"]))
    write_minari(taller.rollout(3), tmp_path / "t", env=taller)
    observation, action = metadata(tmp_path / "t")
    assert observation["shape"] == [1, 3] and action["low"] == [-2] and action["high"] == [2]


def test_environments_that_differ_in_a_start_have_choices_from_zero_on(tmp_path):
    env = SerialEnv(2, [lambda: GymEnv(Every()), lambda: GymEnv(Shifted())])
    batch = env.rollout(5)
    write_minari(batch, tmp_path / "s", env=env)
    assert metadata(tmp_path / "s")[0]["subspaces"]["gear"] == {**JSON["gear"], "start": 0}
    written = torch.cat(list(iter_minari(tmp_path / "s")))
    assert torch.equal(written["gear"], batch["gear"].argmax(-1).flatten())


def test_vector_environment_writes_the_spaces_of_one(tmp_path):
    env = GymEnv("CartPole-v1", num_envs=3)
    write_minari(env.rollout(4), tmp_path / "s", env=env)
    observation, action = metadata(tmp_path / "s")
    assert observation["shape"] == [4] and observation["high"][0] == np.float32(4.8)
    assert action == {"type": "Discrete", "dtype": "int64", "start": 0, "n": 2}


def test_one_hot_vectors_and_texts_of_given_spaces_become_their_values(tmp_path):
    env = GymEnv(Every())
    batch = env.rollout(5)
    write_minari(batch, tmp_path / "s", observation_space=OBSERVATION, action_space=spaces.Discrete(4, start=-1))
    assert metadata(tmp_path / "s") == ({"type": "Dict", "subspaces": JSON}, ACTION)
    assert check_members(tmp_path / "s") == 6


def test_without_an_environment_values_are_written_as_stored(tmp_path):
    batch = GymEnv("CartPole-v1").rollout(3)
    write_minari(batch, tmp_path / "s")
    assert metadata(tmp_path / "s")[1]["type"] == "Box"
    (episode,) = iter_minari(tmp_path / "s")
    assert torch.equal(episode["action"], batch["action"])


def test_postproc_of_a_collector_may_change_entries(tmp_path):
    def widened(batch):
        return batch.apply(lambda leaf: leaf.double() if leaf.shape[-1] == 4 else leaf)

    env = GymEnv("CartPole-v1")
    collector = SyncDataCollector(env, frames_per_batch=10, total_frames=10, postproc=widened)
    write_minari(collector, tmp_path / "s")
    observation, action = metadata(tmp_path / "s")
    assert observation["dtype"] == "float64" and action["type"] == "Discrete"


def test_steps_that_are_not_of_the_environment_or_space_are_refused(tmp_path):
    cart = GymEnv("CartPole-v1")
    batch = cart.rollout(3)
    path = tmp_path / "s"
    with pytest.raises(TypeError, match=r"env is an environment or a collector of engram's, got a .*GymEnv\(env\)"):
        write_minari(batch, path, env=cart.gym_env)
    with pytest.raises(ValueError, match=r"'observation' is float32 \[4\], the environment has float32 \[3\]"):
        write_minari(batch, path, env=GymEnv("Pendulum-v1"))
    with pytest.raises(ValueError, match=r"has 'flags', 'gear'.*; the observations are 'observation'"):
        write_minari(batch, path, observation_space=OBSERVATION)
    with pytest.raises(ValueError, match=r"'observation' is float32 \[4\], which is not of the space Box\("):
        write_minari(batch, path, observation_space=spaces.Box(-1, 1, (3,)))
    with pytest.raises(ValueError, match=r"'action' is int64 \[2\], which is not of the space Discrete\(3\)"):
        write_minari(batch, path, action_space=spaces.Discrete(3))
    with pytest.raises(TypeError, match="has no tensor form, as its values have any length"):
        write_minari(batch, path, action_space=spaces.Sequence(spaces.Discrete(2)))
    blank = batch.clone()
    blank["action"][1] = 0
    with pytest.raises(ValueError, match=r"'action' has a value that is not one-hot"):
        write_minari(blank, path, env=cart)
    numbers = steps([3])
    with pytest.raises(ValueError, match=r"'action' has the value \d, which is not of the space MultiDiscrete"):
        write_minari(numbers, path, action_space=spaces.MultiDiscrete([1, 1]))
    texts = GymEnv(Every())
    wrong = texts.rollout(3)
    wrong["text"][0] = 255
    with pytest.raises(ValueError, match=r"'text' has the bytes .* which are not text in UTF-8"):
        write_minari(wrong, path, env=texts)
    assert os.listdir(tmp_path) == []


def test_space_of_texts_without_a_length_is_written_as_text(tmp_path):
    class Mission(spaces.Space):
        def __init__(self):
            super().__init__(dtype=str)

        def sample(self, mask=None, probability=None):
            return "go to the red ball"

        def contains(self, x):
            return isinstance(x, str)

    class Missions(Every):
        observation_space = spaces.Dict(mission=Mission())

    env = GymEnv(Missions())
    write_minari(env.rollout(5), tmp_path / "s", env=env)
    assert metadata(tmp_path / "s")[0]["subspaces"]["mission"]["max_length"] == 256
    (episode,) = iter_minari(tmp_path / "s")
    assert Text(256).decode(episode["next", "mission"]) == ["go to the red ball"] * 5
