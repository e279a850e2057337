"""TorchRL's own transforms in our buffers: what is stored and read is what its buffers store and read."""

import warnings

import pytest
import torch
from tensordict import TensorDict

import engram.data as ours
from engram.envs import GymEnv, TransformedEnv
from engram.testing.helpers import assert_equal
from engram.transforms import Compose

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    theirs = pytest.importorskip("torchrl.data")
    T = pytest.importorskip("torchrl.envs.transforms")

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


def test_one_step_after_the_other_is_held_back_and_saved(tmp_path):
    def make():
        transform = Compose(T.ObservationNorm(1.0, 2.0, **BOTH), T.MultiStepTransform(n_steps=3, gamma=0.9))
        return ours.TensorDictReplayBuffer(storage=ours.LazyTensorStorage(60), transform=transform)

    rb, twin, whole = make(), make(), make()
    found = [rb.add(steps(1, i)[0]) for i in range(5)]
    assert [getattr(index, "shape", index) for index in found[:3]] == [(0,)] * 3 and found[3:] == [0, 1]
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    for buffer in (rb, twin):
        buffer.extend(steps(6, 5))
    whole.extend(steps(11))
    assert_equal(rows(twin), rows(rb))
    assert_equal(rows(whole), rows(rb))
    with pytest.raises(TypeError, match="MultiStepTransform holds steps back"):
        rb.flush_transforms()
    rb.empty()
    assert rb.extend(steps(2)).shape == (0,)


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


def test_in_environments_actions_go_through_the_inverse_or_are_refused():
    cast = T.DTypeCastTransform(torch.float32, torch.float64, in_keys=["observation"], in_keys_inv=["action"])
    env = TransformedEnv(GymEnv("Pendulum-v1"), cast)
    td = env.reset()
    assert env.step(td.set("action", torch.ones(1, dtype=torch.float64)))["next", "observation"].dtype == torch.float64
    for transform in (T.ActionDiscretizer(3), T.MultiStepTransform(n_steps=2, gamma=0.5)):
        with pytest.raises(TypeError, match=f"{type(transform).__name__} does not turn actions of the environment"):
            TransformedEnv(GymEnv("Pendulum-v1"), transform)
