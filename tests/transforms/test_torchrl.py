"""TorchRL's own transforms in our buffers and environments: what is stored, read and stepped is as in its own."""

import copy
import pickle
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import engram.data as ours
import engram.envs as our_envs
from engram.collectors import SyncDataCollector
from engram.errors import CheckpointMisfitError
from engram.testing.helpers import assert_equal
from engram.transforms import Compose

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    theirs = pytest.importorskip("torchrl.data")
    T = pytest.importorskip("torchrl.envs.transforms")
    torchrl_envs = pytest.importorskip("torchrl.envs")

Unbounded = theirs.Unbounded

HALF = (torch.float16, torch.float32)
BOTH = {"in_keys": ["obs"], "in_keys_inv": ["obs"]}
TRANSFORMS = {
    "MultiStepTransform": lambda: T.MultiStepTransform(n_steps=3, gamma=0.9),
    "DTypeCastTransform, in_keys_inv": lambda: T.DTypeCastTransform(*HALF, in_keys_inv=["obs"]),
    "DTypeCastTransform, in_keys": lambda: T.DTypeCastTransform(*HALF, in_keys=["obs"]),
    "DTypeCastTransform": lambda: T.DTypeCastTransform(*HALF),
    "ObservationNorm": lambda: T.ObservationNorm(1.0, 2.0, **BOTH),
    "RenameTransform": lambda: T.RenameTransform(["s"], ["obs"], ["s"], ["obs"]),
    "ExcludeTransform": lambda: T.ExcludeTransform("other", inverse=True),
    "UnsqueezeTransform": lambda: T.UnsqueezeTransform(-1, in_keys=["flat"], in_keys_inv=["column"]),
    "Compose": lambda: T.Compose(T.MultiStepTransform(n_steps=2, gamma=0.5), T.ObservationNorm(1.0, 2.0, **BOTH)),
    "RewardScaling, which only reads": lambda: T.RewardScaling(0.0, 2.0, in_keys=[("next", "reward")]),
}


def steps(n, start=0):
    a = torch.arange(start, start + n).float()
    x, done = a.unsqueeze(-1), (a % 7 == 6).unsqueeze(-1)
    following = {"obs": x + 1, "reward": x + 1, "done": done, "terminated": done.clone()}
    return TensorDict({"obs": x, "other": x * 3, "column": x.clone(), "flat": a, "next": following}, [n])


def filled(library, storage, make, sizes):
    rb = library.TensorDictReplayBuffer(storage=getattr(library, storage)(60), transform=make(), batch_size=4)
    at = 0
    for n in sizes:
        rb.extend(steps(n, at))
        at += n
    return rb


def rows(rb):
    stored = rb._storage[:]
    stored = torch.stack(stored) if isinstance(stored, list) else stored
    return stored.exclude("index")


@pytest.mark.parametrize("storage", ["ListStorage", "LazyTensorStorage"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_is_stored_is_what_torchrl_stores(name, storage):
    for sizes in ((1, 1, 5, 3, 10), (14,), (2,) * 7):
        expected, rb = (filled(library, storage, TRANSFORMS[name], sizes) for library in (theirs, ours))
        assert len(rb) == len(expected)
        assert_equal(rows(rb).to_dict(), rows(expected).to_dict())
        rb.sample()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_is_read_is_what_torchrl_reads(name):
    expected, rb = (filled(library, "LazyTensorStorage", TRANSFORMS[name], (9, 5)) for library in (theirs, ours))
    assert_equal(rb[:].exclude("index").to_dict(), expected[:].exclude("index").to_dict())


def test_one_step_after_the_other_is_held_back_and_a_save_warns_of_the_last(tmp_path):
    def make():
        transform = Compose(T.ObservationNorm(1.0, 2.0, **BOTH), T.MultiStepTransform(n_steps=3, gamma=0.9))
        return ours.TensorDictReplayBuffer(storage=ours.LazyTensorStorage(60), transform=transform)

    rb, twin, whole = make(), make(), make()
    found = [rb.add(steps(1, i)[0]) for i in range(5)]
    assert [getattr(index, "shape", index) for index in found[:3]] == [(0,)] * 3 and found[3:] == [0, 1]
    with pytest.warns(UserWarning, match=r"MultiStepTransform has changed _buffer \(a TensorDict\).* cannot be saved"):
        rb.dumps(tmp_path)
    twin.loads(tmp_path)
    assert_equal(rows(twin), rows(rb))
    assert twin.extend(steps(2, 5)).shape == (0,), "its transform begins anew"
    rb.extend(steps(6, 5))
    whole.extend(steps(11))
    assert_equal(rows(whole), rows(rb))
    with pytest.raises(TypeError, match="MultiStepTransform holds steps back"):
        rb.flush_transforms()


def test_its_tensors_are_saved_and_count_where_they_have_changed(tmp_path):
    def make(transform=None):
        return ours.TensorDictReplayBuffer(storage=ours.LazyTensorStorage(60), transform=transform)

    rb, twin = (make(T.ObservationNorm(loc, 2.0, **BOTH)) for loc in (1.0, 5.0))
    rb.extend(steps(3))
    rb.dumps(tmp_path / "as made")
    make().loads(tmp_path / "as made")
    rb.transform[0].transform.loc += 1
    rb.dumps(tmp_path / "changed")
    twin.loads(tmp_path / "changed")
    assert float(twin.transform[0].transform.loc) == 2
    with pytest.raises(CheckpointMisfitError, match="the state of a ObservationNorm was saved"):
        make().loads(tmp_path / "changed")


@pytest.mark.parametrize("dim_extend", [0, 1])
def test_environments_side_by_side(dim_extend):
    rb = ours.TensorDictReplayBuffer(
        storage=ours.LazyTensorStorage(20, ndim=2),
        transform=T.MultiStepTransform(n_steps=2, gamma=0.5),
        dim_extend=dim_extend,
    )
    data = torch.stack([steps(4), steps(4, 7)]).contiguous()
    assert rb.extend(data if dim_extend else data.transpose(0, 1).contiguous()).shape == (4, 2)
    reward = rb.storage.get(slice(None))["next", "reward"].squeeze(-1)
    assert reward.tolist() == [[2.0, 12.5], [3.5, 14.0]]


# ---- in environments ----
class Sums(gym.Env):
    """Adds its actions up; every second step costs one of three lives, and the last of them the episode."""

    observation_space = gym.spaces.Box(0, 100, (4,), np.float32)

    class Emulator:
        count = 3

        def lives(self):
            return self.count

    def __init__(self, space):
        self.action_space, self.ale = space, self.Emulator()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.ale.count, self.state = 0, 3, np.arange(4, dtype=np.float32)
        return self.state.copy(), {}

    def step(self, action):
        self.steps += 1
        self.ale.count -= self.steps % 2 == 0
        self.state = (self.state + np.sum(action) / 3 + 0.5).astype(np.float32)
        return self.state.copy(), float(np.sum(action)) + self.steps - 2, self.ale.count == 0, False, {}


BOX, CHOICE = gym.spaces.Box(-2, 2, (1,), np.float32), gym.spaces.Discrete(3)
ON = {"in_keys": ["observation"]}
IN_ENVIRONMENTS = {
    "ActionDiscretizer": (BOX, lambda: T.ActionDiscretizer(3)),
    "ActionScaling": (BOX, lambda: T.ActionScaling()),
    "BinarizeReward": (BOX, lambda: T.BinarizeReward()),
    "CatFrames": (BOX, lambda: T.CatFrames(N=3, dim=-1, **ON)),
    "CatTensors": (BOX, lambda: T.CatTensors(**ON, out_key="vector")),
    "Compose": (BOX, lambda: T.Compose(T.StepCounter(4), T.RewardSum(), T.InitTracker(), T.TargetReturn(10.0))),
    "DTypeCastTransform": (BOX, lambda: T.DTypeCastTransform(torch.float32, torch.float64, **ON)),
    "DiscreteActionProjection": (CHOICE, lambda: T.DiscreteActionProjection(3, 5)),
    "EndOfLifeTransform": (CHOICE, lambda: T.EndOfLifeTransform()),
    "FrameSkipTransform": (BOX, lambda: T.FrameSkipTransform(3)),
    "NoopResetEnv": (CHOICE, lambda: T.NoopResetEnv(3, random=False)),
    "ObservationNorm": (BOX, lambda: T.ObservationNorm(1.0, 2.0, **ON)),
    "RenameTransform": (BOX, lambda: T.RenameTransform(["observation"], ["state"])),
    "RewardClipping": (BOX, lambda: T.RewardClipping(-1, 1)),
    "StepCounter": (BOX, lambda: T.StepCounter(4)),
    "TensorDictPrimer": (BOX, lambda: T.TensorDictPrimer(h=Unbounded((2,)), default_value=1.0, expand_specs=True)),
    "TimeMaxPool": (BOX, lambda: T.TimeMaxPool(**ON, T=2)),
    "TrajCounter": (BOX, lambda: T.TrajCounter()),
    "VecNormV2": (BOX, lambda: T.VecNormV2(**ON)),
}
FOR_SINGLE_ONES = {"NoopResetEnv", "EndOfLifeTransform"}


def rollout_in(library, name, envs):
    space, make = IN_ENVIRONMENTS[name]

    def base():
        return library.GymWrapper(Sums(space)) if library is torchrl_envs else library.GymEnv(Sums(space))

    env = library.TransformedEnv(library.SerialEnv(envs, base) if envs else base(), make())
    generator = torch.Generator().manual_seed(0)
    spec = env.action_spec

    def act(td):
        if spec.dtype.is_floating_point:
            return td.set("action", torch.rand(spec.shape, generator=generator) * 2 - 1)
        width = spec.shape[-1]
        choice = torch.randint(0, width if width > 1 else 3, spec.shape[:-1], generator=generator)
        one_hot = torch.nn.functional.one_hot(choice, width) if width > 1 else choice.unsqueeze(-1)
        return td.set("action", one_hot.to(spec.dtype))

    torch.manual_seed(0)
    return env, env.rollout(9, act, break_when_any_done=False)


@pytest.mark.parametrize("name", IN_ENVIRONMENTS)
@pytest.mark.parametrize("envs", [0, 2])
def test_in_environments_its_transforms_give_what_they_give_in_its_own(name, envs):
    if envs and name in FOR_SINGLE_ONES:
        pytest.skip("it is for single environments")
    _, expected = rollout_in(torchrl_envs, name, envs)
    env, rollout = rollout_in(our_envs, name, envs)
    assert set(rollout.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        torch.testing.assert_close(rollout[key], expected[key], msg=str(key))
    fake = env.fake_tensordict()
    for key in fake.keys(True, True):
        step = rollout[..., 0][key]
        assert (step.shape, step.dtype) == (fake[key].shape, fake[key].dtype), key


def test_what_a_policy_writes_reaches_the_next_step_through_a_primer_of_torchrls():
    def act(td):
        td["action"] = torch.zeros(1)
        return td.set(("next", "h"), td["h"] + 1)

    primer = T.TensorDictPrimer(h=Unbounded((2,)))
    env = our_envs.TransformedEnv(our_envs.GymEnv(Sums(BOX)), T.Compose(T.InitTracker(), primer))
    with SyncDataCollector(env, act, frames_per_batch=8) as collector:
        batch = collector.rollout()
    assert batch["h"][:, 0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert batch["is_init"].flatten().tolist() == [step in (0, 6) for step in range(8)]


def test_in_environments_what_cannot_be_honoured_is_refused_by_its_name():
    for transform in (
        T.MultiStepTransform(n_steps=2, gamma=0.5),
        T.ExcludeTransform("truncated"),
    ):
        with pytest.raises(TypeError, match=type(transform).__name__):
            our_envs.TransformedEnv(our_envs.GymEnv("Pendulum-v1"), transform)


def test_deltas_of_observations_are_refused_by_what_stores_each_once():
    with pytest.raises(TypeError, match=r"NextObservationDelta .*compact=True"):
        our_envs.TransformedEnv(our_envs.GymEnv("Pendulum-v1"), T.NextObservationDelta())


def test_an_environment_with_one_of_its_transforms_can_be_sent_and_copied():
    env = our_envs.TransformedEnv(our_envs.GymEnv(Sums(BOX)), T.Compose(T.StepCounter(4), T.RewardSum()))
    expected = env.rollout(6, break_when_any_done=False)["step_count"]
    for twin in (pickle.loads(pickle.dumps(env)), copy.deepcopy(env)):
        assert_equal(twin.rollout(6, break_when_any_done=False)["step_count"], expected)


def test_in_environments_actions_go_through_the_inverse():
    cast = T.DTypeCastTransform(torch.float32, torch.float64, in_keys=["observation"], in_keys_inv=["action"])
    env = our_envs.TransformedEnv(our_envs.GymEnv("Pendulum-v1"), cast)
    td = env.reset()
    assert env.action_spec.dtype is torch.float64
    assert env.step(td.set("action", torch.ones(1, dtype=torch.float64)))["next", "observation"].dtype == torch.float64
