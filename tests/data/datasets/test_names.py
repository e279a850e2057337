"""Keys of steps and the names of datasets: what is written is read under the same keys, or refused by name."""

import json
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from contracts.each import each
from data.datasets.support import assert_same_bits
from data.datasets.test_minari_arrow import struct
from data.datasets.test_minari_arrow import write as write_arrow
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.data.datasets import (
    iter_hdf5,
    iter_minari,
    iter_parquet,
    read_parquet,
    write_hdf5,
    write_minari,
    write_parquet,
)
from engram.envs import GymEnv
from engram.errors import DatasetError

gymnasium = pytest.importorskip("gymnasium", reason='environments need gymnasium: pip install "engram[gym]"')
h5py = pytest.importorskip("h5py", reason='Minari datasets need h5py: pip install "engram[h5]"')
pa = pytest.importorskip("pyarrow", reason='Parquet needs pyarrow: pip install "engram[parquet]"')
spaces = gymnasium.spaces

BOX = spaces.Box(-1, 1, (2,), np.float32)
FORMATS = {
    "minari": (write_minari, iter_minari),
    "hdf5": (write_hdf5, iter_hdf5),
    "parquet": (write_parquet, iter_parquet),
}


class Sampled(gymnasium.Env):
    """Observations of a space, in episodes of three steps."""

    def __init__(self, observation_space, action_space=BOX):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.t += 1
        return self.observation_space.sample(), 1.0, self.t == 3, False, {}


def steps_of(observations, **root):
    """Three steps of one episode, of observations `[4, ...]` by key."""
    done = torch.tensor([False, False, True]).unsqueeze(-1)
    flags = {"terminated": done, "truncated": torch.zeros_like(done), "done": done.clone()}
    made = TensorDict({"action": torch.arange(3.0), **root, "next": {"reward": torch.ones(3, 1), **flags}}, [3])
    for key, values in observations.items():
        below = key if isinstance(key, tuple) else (key,)
        made[key], made[("next", *below)] = values[:-1], values[1:]
    return made


def observations_at(*keys):
    generator = torch.Generator().manual_seed(0)
    return {key: torch.rand(4, 2, generator=generator) for key in keys}


def written(form, steps, folder, **options):
    """The steps that are read back, without what readers add."""
    write, read = FORMATS[form]
    write(steps, folder / f"steps-{form}", progress=False, **options)
    back = torch.cat(list(read(folder / f"steps-{form}")))
    added = {"done", "terminated", "truncated", ("collector", "traj_ids"), "collector"} - {*steps.keys(True)}
    return back.exclude(*added.intersection(back.keys(True)))


def episode_names(folder):
    """The names of the datasets of the first episode, without rewards and flags."""
    names = []
    with h5py.File(folder / "data/main_data.hdf5") as file:
        file["episode_0"].visititems(
            lambda name, found: names.append(name) if isinstance(found, h5py.Dataset) else None
        )
    return {name for name in names if name.split("/")[0] in ("observations", "actions", "infos")}


def names_of_space(space, role):
    """Minari's names: a Dict's entries are groups of their own name, those of a Tuple are called `_index_0`, ..."""
    if isinstance(space, spaces.Dict):
        parts = [(key, part) for key, part in space.items()]
    elif isinstance(space, spaces.Tuple):
        parts = [(f"_index_{i}", part) for i, part in enumerate(space)]
    else:
        return {role}
    return set().union(*(names_of_space(part, f"{role}/{name}") for name, part in parts))


KEYS = st.sampled_from(["0", "1", "2", "10", "a", "a.b", "observation", "x y", "é"])
SPACES = st.recursive(
    st.just(BOX),
    lambda part: st.one_of(
        st.dictionaries(KEYS, part, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(part, min_size=1, max_size=3).map(lambda parts: spaces.Dict({str(i): p for i, p in enumerate(parts)})),
        st.lists(part, min_size=1, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=6,
)


@pytest.mark.deep
@given(SPACES, SPACES, st.sampled_from(["given", "of the environment", "unknown"]))
@settings(max_examples=40, deadline=None)
def test_the_space_decides_the_names_and_steps_are_read_under_their_keys(tmp_path_factory, observation, action, known):
    folder = tmp_path_factory.mktemp("m")
    env = GymEnv(Sampled(observation, action))
    steps = env.rollout(3)
    options = {
        "given": {"observation_space": observation, "action_space": action},
        "of the environment": {"env": env},
        "unknown": {},
    }[known]
    assert_same_bits(written("minari", steps, folder, **options), steps)
    assert_same_bits(written("hdf5", steps, folder), steps)
    if known != "unknown":
        expected = names_of_space(observation, "observations") | names_of_space(action, "actions")
        assert episode_names(folder / "steps-minari") == expected
        said = json.loads((folder / "steps-minari/data/metadata.json").read_text())
        assert kinds(json.loads(said["observation_space"])) == kinds_of_space(observation)


def kinds(space):
    below = space.get("subspaces", [])
    parts = below.items() if isinstance(below, dict) else enumerate(below)
    return space["type"], {key: kinds(part) for key, part in parts}


def kinds_of_space(space):
    parts = (
        space.items() if isinstance(space, spaces.Dict) else enumerate(space if isinstance(space, spaces.Tuple) else ())
    )
    return type(space).__name__, {key: kinds_of_space(part) for key, part in parts}


@each("form", FORMATS)
@each(
    "keys",
    [
        ["0"],
        ["0", "1"],
        ["0", "2"],
        [("observation", "0"), ("observation", "1")],
        [("observation", "0"), ("observation", "1"), "extra"],
        [("observation", "0", "a"), ("observation", "1")],
        [("a", "0"), ("a", "1"), ("b", "1")],
        ["a.b", ("a", "b")],
        ["observation", "observation.x"],
        [("observation", "a")],
    ],
)
def test_keys_of_steps_without_a_space_are_read_again(tmp_path, form, keys):
    steps = steps_of(observations_at(*keys))
    assert_same_bits(written(form, steps, tmp_path), steps)


ANY_KEY = st.lists(
    st.sampled_from(
        [
            "0",
            "1",
            "a",
            "a.b",
            "x/y",
            "observation",
            "info",
            "action",
            "next",
            "reward",
            "done",
            "terminated",
            "collector",
            "traj_ids",
            "index",
            "episode",
            "_index_0",
            "é",
        ]
    ),
    min_size=1,
    max_size=3,
).map(tuple)


@given(st.sampled_from(list(FORMATS)), st.lists(st.tuples(ANY_KEY, st.booleans()), min_size=1, max_size=4))
@settings(max_examples=80, deadline=None)
def test_steps_of_any_keys_are_read_again_or_refused(tmp_path_factory, form, keys):
    folder = tmp_path_factory.mktemp("m")
    steps = steps_of(observations_at("seen"))
    try:
        for key, is_followed in keys:
            values = torch.rand(4, 2)
            steps[key] = values[:-1]
            if is_followed:
                steps[("next", *key)] = values[1:]
    except KeyError:  # one lies below another
        return
    try:
        back = written(form, steps, folder)
    except DatasetError:
        raise
    except ValueError:
        assert os.listdir(folder) == []
        return
    derived = {"index", "episode", "done", "terminated", "truncated", ("collector", "traj_ids")}
    kept = {key for key in steps.keys(True, True) if form == "parquet" or key not in derived}
    for key in kept:
        assert torch.equal(back[key], steps[key]), key
    assert {*back.keys(True, True)} - derived == kept - derived


@each("form", FORMATS)
def test_numbered_infos_are_read_again_and_keep_their_names(tmp_path, form):
    steps = steps_of(observations_at("observation", ("info", "0"), ("info", "1")))
    assert_same_bits(written(form, steps, tmp_path), steps)
    if form == "minari":
        assert {"infos/0", "infos/1"} < episode_names(tmp_path / "steps-minari")


def test_infos_whose_names_are_those_of_a_tuple_are_read_as_its_numbers(tmp_path):
    steps = steps_of(observations_at("observation", ("info", "0"), ("info", "1")))
    write_minari(steps, tmp_path / "s")
    with h5py.File(tmp_path / "s/data/main_data.hdf5", "r+") as file:
        for number in "01":
            file.move(f"episode_0/infos/{number}", f"episode_0/infos/_index_{number}")
    (episode,) = iter_minari(tmp_path / "s")
    assert torch.equal(episode["next", "info", "1"], steps["next", "info", "1"])


@each("role", ["observation", "action"])
def test_a_dict_that_has_a_key_as_a_tuple_has_is_read_under_this_key(tmp_path, role):
    steps = steps_of(observations_at("0", "a")) if role == "observation" else steps_of(observations_at("a"))
    if role == "action":
        steps["action"] = TensorDict({"0": torch.rand(3, 2), "a": torch.rand(3, 2)}, [3])
    space = spaces.Dict({"0": BOX, "a": BOX})
    write_minari(steps, tmp_path / "s", **{f"{role}_space": space})
    with h5py.File(tmp_path / "s/data/main_data.hdf5", "r+") as file:
        file.move(f"episode_0/{role}s/0", f"episode_0/{role}s/_index_0")
    metadata = tmp_path / "s/data/metadata.json"
    metadata.write_text(metadata.read_text().replace('\\"0\\": {', '\\"_index_0\\": {'))
    (episode,) = iter_minari(tmp_path / "s")
    below = ("action",) if role == "action" else ()
    assert torch.equal(episode[(*below, "_index_0")], steps[(*below, "0")])


def test_a_dict_of_arrow_that_has_a_key_as_a_tuple_has_is_read_under_this_key(tmp_path):
    box = {"type": "Box", "dtype": "float64", "shape": []}
    said = {"type": "Dict", "subspaces": {"_index_0": box, "1": {"type": "Tuple", "subspaces": [box]}}}
    column = struct(**{"_index_0": np.arange(4.0), "1": struct(**{"0": np.arange(4.0) + 10})})
    write_arrow(tmp_path, lengths=(3,), columns={"observations": column}, observation_space=json.dumps(said))
    (episode,) = iter_minari(tmp_path)
    assert episode["_index_0"].tolist() == [0, 1, 2] and episode["1", "0"].tolist() == [10, 11, 12]


def test_a_file_whose_groups_are_a_tuple_beside_a_dict_in_the_metadata_is_read(tmp_path):
    steps = steps_of(observations_at(("observation", "0"), ("observation", "1")))
    write_minari(steps, tmp_path / "s")
    metadata = tmp_path / "s/data/metadata.json"
    said = json.loads(metadata.read_text())
    parts = json.loads(said["observation_space"])["subspaces"]
    said["observation_space"] = json.dumps(
        {"type": "Dict", "subspaces": {str(i): part for i, part in enumerate(parts)}}
    )
    metadata.write_text(json.dumps(said))
    (episode,) = iter_minari(tmp_path / "s")
    assert torch.equal(episode["observation", "1"], steps["observation", "1"])


def test_numbers_that_are_keys_of_dicts_are_read_again_from_parquet(tmp_path):
    buffer, again = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2))
    buffer.extend({"x": torch.arange(3), "more": {0: torch.arange(3.0), 7: torch.ones(3, 2)}})
    write_parquet(buffer, tmp_path / "s")
    assert read_parquet(tmp_path / "s", again) == 3
    assert {*again[:]["more"]} == {0, 7} and torch.equal(again[:]["more"][0], torch.arange(3.0))


# ---- what is refused ----
def test_a_key_that_utf8_cannot_write_is_refused_by_parquet(tmp_path):
    with pytest.raises(ValueError, match=r"ud800'.* cannot be written in UTF-8; nothing was written"):
        write_parquet(steps_of(observations_at("\ud800")), tmp_path / "s")
    assert os.listdir(tmp_path) == []


@each("write", [write_minari, write_hdf5])
@each("name", ["a/b", "/a", "", ".", "_index_0", "_index_", "a\0", "\ud800"])
@each("where", ["observation", "info", "action"])
def test_a_key_that_cannot_be_a_name_is_refused_before_anything_is_written(tmp_path, write, name, where):
    keys = {"observation": ["x", ("group", name)], "info": ["x", ("info", name)], "action": ["x"]}[where]
    steps = steps_of(observations_at(*keys))
    if where == "action":
        steps["action"] = TensorDict({name: torch.zeros(3)}, [3])
    with pytest.raises(ValueError, match=r"cannot be the name of a dataset; nothing was written"):
        write(steps, tmp_path / "s")
    assert os.listdir(tmp_path) == []


@each("write", [write_minari, write_hdf5])
@each(
    ("key", "value", "message"),
    [
        ("e", {}, "'e' has no entries"),
        (("a", "b"), {}, r"\('a', 'b'\) has no entries"),
        ("name", NonTensorData("chess", batch_size=[3]), "'name' is no tensor"),
    ],
)
def test_what_has_no_dataset_is_refused_by_its_key_and_may_be_excluded(tmp_path, write, key, value, message):
    steps = steps_of(observations_at("observation", ("a", "c")))
    steps[key] = TensorDict(value, [3]) if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=f"{message}.*Nothing was written"):
        write(steps, tmp_path / "s")
    assert os.listdir(tmp_path) == []
    assert write(steps, tmp_path / "s", exclude=[key]) == 3


@each("form", FORMATS)
def test_a_group_whose_entries_are_all_excluded_is_left_out(tmp_path, form):
    steps = steps_of(observations_at("observation", ("a", "b", "c")))
    back = written(form, steps, tmp_path, exclude=[("a", "b", "c"), ("next", "a", "b", "c")])
    assert_same_bits(back, steps.exclude("a", ("next", "a")))
    assert "a" not in back.keys() and "a" not in back["next"].keys()


@each(
    ("keys", "space", "message"),
    [
        ([("observation", "0")], spaces.Dict({"0": BOX}), r"has '0'; the observations are \('observation', '0'\)"),
        (["0"], spaces.Tuple([BOX]), r"has \('observation', '0'\); the observations are '0'"),
        (["0"], BOX, "has 'observation'; the observations are '0'"),
        (["a"], spaces.Dict({"a": BOX, "e": spaces.Dict({})}), "has a Dict without entries"),
        (["a"], spaces.Dict({"a": spaces.Tuple([])}), "has a Tuple without entries"),
        (["a/b"], spaces.Dict({"a/b": BOX}), "'a/b' cannot be the name of a dataset"),
        (["1"], spaces.Dict({1: BOX, "1": BOX}), "has two keys that are called '1'"),
    ],
)
def test_a_space_that_the_steps_do_not_have_is_refused(tmp_path, keys, space, message):
    with pytest.raises(ValueError, match=message):
        write_minari(steps_of(observations_at(*keys)), tmp_path / "s", observation_space=space)
    assert os.listdir(tmp_path) == []


def test_keys_of_a_dict_that_are_numbers_are_written_as_text(tmp_path):
    space = spaces.Dict({0: BOX, 1: BOX})
    steps = GymEnv(Sampled(space)).rollout(3)
    assert_same_bits(written("minari", steps, tmp_path, observation_space=space), steps)
    assert episode_names(tmp_path / "steps-minari") == {"observations/0", "observations/1", "actions"}


def test_an_environment_with_two_keys_of_one_name_is_refused():
    with pytest.raises(ValueError, match="has two keys that are called '1'"):
        GymEnv(Sampled(spaces.Dict({1: BOX, "1": BOX})))
