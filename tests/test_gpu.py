"""On a GPU: storages draw, save and load the rows that those in main memory do; collectors act and store there."""

import copy
import pickle

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from contracts.each import each
from contracts.ted_rings import ted_steps
from engram.collectors import MultiSyncDataCollector, SyncDataCollector
from engram.compat import cleanrl
from engram.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.envs import GymEnv, SerialEnv
from engram.envs.transforms import (
    CatFrames,
    Compose,
    InitTracker,
    MultiStepTransform,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNorm,
)
from engram.testing import TransformContract
from transforms import test_contracts

GPU = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

TRAJECTORIES = {"traj_key": ("collector", "traj_ids"), "strict_length": False}
SAMPLERS = {
    "uniform": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "prioritised": lambda: PrioritizedSampler(100, alpha=0.7, beta=0.5),
    "slices": lambda: SliceSampler(slice_len=4, **TRAJECTORIES),
    "prioritised slices": lambda: PrioritizedSliceSampler(100, alpha=0.7, beta=0.5, slice_len=4, **TRAJECTORIES),
}


def steps(n, salt=0):
    td = ted_steps(n, salt=salt, length=7.0)
    return td.set("pixels", torch.arange(n * 12, dtype=torch.uint8).reshape(n, 3, 4))


def buffer(device, sampler="uniform", **settings):
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(100, device=device), sampler=SAMPLERS[sampler](), batch_size=32,
        generator=torch.Generator().manual_seed(3), priority_key="error", **settings,
    )  # fmt: skip


def same(one, other):
    """Equal entries, wherever they are."""
    one, other = one.cpu(), other.cpu()
    assert {*one.keys(True, True)} == {*other.keys(True, True)}
    for key in one.keys(True, True):
        torch.testing.assert_close(one[key], other[key], rtol=0, atol=0, equal_nan=True)
    return True


def close(one, other):
    one, other = one.cpu(), other.cpu()
    assert {*one.keys(True, True)} == {*other.keys(True, True)}
    for key in one.keys(True, True):
        torch.testing.assert_close(one[key], other[key], equal_nan=True)
    return True


@each("sampler", SAMPLERS)
def test_a_storage_on_a_gpu_draws_the_rows_that_one_in_main_memory_draws(sampler):
    pair = [buffer("cpu", sampler), buffer(GPU, sampler)]
    for number in range(8):  # more than fit
        data = steps(33, number)
        for rb, device in zip(pair, ("cpu", GPU), strict=True):
            rb.extend(data.to(device) if number % 2 else data)
        for _ in range(3):
            batches = [rb.sample() for rb in pair]
            assert same(*batches) and batches[1]["pixels"].is_cuda
            for rb, batch in zip(pair, batches, strict=True):
                batch["error"] = batch["pixels"].float().mean((1, 2))
                rb.update_tensordict_priority(batch)
    assert same(pair[0][:], pair[1][:])


def test_rows_on_a_gpu_are_replaced_in_place_and_the_first_stay_what_they_are():
    pair = [buffer("cpu"), buffer(GPU)]
    for rb in pair:
        rb.extend(steps(50))
        rb[torch.tensor([3, 40, 7])] = steps(3, 9).to(rb.storage.device)
    assert same(pair[0][:], pair[1][:])
    with pytest.raises(IndexError):
        pair[1][torch.tensor([50], device=GPU)]


@each("where", [GPU, "cpu"])
def test_a_checkpoint_of_a_storage_on_a_gpu_is_loaded_there_and_in_main_memory(where, tmp_path):
    saved = buffer(GPU, "prioritised")
    saved.extend(steps(120))
    saved.update_priority(torch.arange(100, device=GPU), torch.rand(100, device=GPU))
    saved.dumps(tmp_path)
    loaded = buffer(where, "prioritised")
    loaded.loads(tmp_path)
    assert loaded.storage.device.type == torch.device(where).type
    assert same(saved[:], loaded[:]) and same(saved.sample(), loaded.sample())


def test_copies_of_a_buffer_on_a_gpu_have_rows_of_their_own():
    rb = buffer(GPU)
    rb.extend(steps(50))
    for other in (copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        assert other.storage.device.type == GPU and same(rb[:], other[:])
        other.extend(steps(1, 5))
        assert (len(rb), len(other)) == (50, 51)


def test_tensors_of_the_user_on_a_gpu_are_a_storage():
    rb = TensorDictReplayBuffer(storage=TensorStorage(steps(50).to(GPU)), batch_size=16)
    assert len(rb) == 50 and rb.sample()["pixels"].is_cuda


def test_batches_are_prepared_for_a_gpu_while_the_learner_works():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100), batch_size=16, pin_memory=True, prefetch=2, transform=lambda td: td.to(GPU)
    )
    rb.extend(steps(80))
    stored = rb[:]
    for _ in range(10):
        batch = rb.sample()
        assert batch["pixels"].is_cuda
        assert same(batch.exclude("index"), stored[batch["index"].cpu()].exclude("index"))


@each("transform", [None, lambda batch: {**batch, "more": batch["more"].to(GPU)}])
def test_dicts_and_what_is_in_main_memory_beside_a_gpu_are_page_locked(transform):
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=16, pin_memory=True, transform=transform)
    rb.extend({"pixels": np.zeros((50, 3), np.uint8), "more": np.arange(50)})
    batch = rb.sample()
    assert batch["pixels"].is_pinned() and batch["more"].is_cuda == (transform is not None)


def test_returns_of_several_steps_are_added_up_on_a_gpu():
    pair = [buffer(device, transform=MultiStepTransform(n_steps=3, gamma=0.5)) for device in ("cpu", GPU)]
    for rb in pair:
        rb.extend(steps(60).to(rb.storage.device))
    assert len(pair[0]) == len(pair[1]) > 0 and same(pair[0][:], pair[1][:])


def test_an_adapter_puts_its_batches_on_a_gpu():
    pair = [cleanrl.ReplayBuffer(50, Box(-1, 1, (3,)), Discrete(2), device) for device in ("cpu", GPU)]
    for rb in pair:
        np.random.seed(0)
        for k in range(60):
            obs = np.full((1, 3), k / 100, np.float32)
            rb.add(obs, obs + 1, np.array([k % 2]), np.array([float(k)]), np.array([k % 9 == 0]), [{}])
        rb.drawn = rb.sample(32)
    for one, other in zip(pair[0].drawn, pair[1].drawn, strict=True):
        assert other.is_cuda and torch.equal(one, other.cpu())


# ---- transforms ----
CONTRACTS = {
    name: kind
    for name, kind in vars(test_contracts).items()
    if name.startswith("Test") and isinstance(kind, type) and issubclass(kind, TransformContract)
}


@each("contract", CONTRACTS)
def test_a_transform_changes_a_batch_on_a_gpu_as_one_in_main_memory(contract):
    case = CONTRACTS[contract]()
    batch = case.batch(12)
    plain, on_gpu = (case.prepared().forward(batch.clone().to(device)) for device in ("cpu", GPU))
    assert {leaf.device.type for leaf in on_gpu.values(True, True)} == {GPU}
    assert close(plain, on_gpu)


def alternating(td):
    return td.set("action", td["step_count"][..., 0] % 2)


def test_transforms_of_an_environment_on_a_gpu_change_its_steps_as_in_main_memory():
    rollouts = []
    for device in ("cpu", GPU):
        transform = Compose(
            InitTracker(), StepCounter(max_steps=20), RewardSum(), CatFrames(3, dim=-1, in_keys=["observation"]),
            VecNorm(in_keys=["observation"]),
        )  # fmt: skip
        env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True, device=device), transform)
        env.set_seed(2)
        rollouts.append(
            env.rollout(50, lambda td: td.set("action", td["step_count"][..., 0] % 2), break_when_any_done=False)
        )
    assert rollouts[1]["observation"].is_cuda and close(*rollouts)


# ---- collectors ----
class Threshold(nn.Module):
    """Acts by the sign of what it sees, so that it acts alike on all devices; its logits and value are exact there."""

    def forward(self, observation):
        right = (observation[..., :1] + observation[..., 2:3] > 0).long()
        return right.squeeze(-1), torch.cat([observation[..., :1], -observation[..., :1]], -1), right.float()


def policy():
    return TensorDictSequential(
        TensorDictModule(Threshold(), in_keys=["observation"], out_keys=["action", "logits", "state_value"])
    )


def cartpole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def collected(make_env, **settings):
    torch.manual_seed(7)  # random actions
    collector = SyncDataCollector(make_env, policy(), frames_per_batch=60, **settings)
    collector.set_seed(4)
    with collector:
        return torch.cat([collector.rollout() for _ in range(4)], -1)


SETTINGS = {
    "the policy": {"policy_device": GPU},
    "the policy and the batches": {"policy_device": GPU, "storing_device": GPU},
    "batches that are not waited for": {"policy_device": GPU, "storing_device": GPU, "no_cuda_sync": True},
    "the policy as a CUDA graph": {"policy_device": GPU, "cudagraph_policy": True},
    "everything": {"device": GPU},
    "the first steps random": {"policy_device": GPU, "init_random_frames": 60},
}
ENVIRONMENTS = {
    "one": cartpole,
    "in series": lambda: SerialEnv(3, cartpole),
    "a vector": lambda: GymEnv("CartPole-v1", num_envs=3, categorical_action_encoding=True),
}


@each("environment", ENVIRONMENTS)
@each("on_gpu", SETTINGS)
def test_a_collector_with_a_gpu_gives_the_rows_that_one_without_gives(environment, on_gpu):
    settings = SETTINGS[on_gpu]
    torch.cuda.synchronize()
    random = {name: settings[name] for name in ("init_random_frames",) if name in settings}
    without, on = collected(ENVIRONMENTS[environment], **random), collected(ENVIRONMENTS[environment], **settings)
    torch.cuda.synchronize()
    assert on["logits"].is_cuda == ("storing_device" in settings or "device" in settings)
    assert same(without, on)


def test_workers_act_on_a_gpu_and_learn_the_weights_of_the_learner():
    linear = nn.Linear(4, 2)
    module = TensorDictSequential(
        TensorDictModule(linear, in_keys=["observation"], out_keys=["logits"]),
        TensorDictModule(lambda x: x.argmax(-1), in_keys=["logits"], out_keys=["action"]),
    )
    collector = MultiSyncDataCollector(
        [cartpole] * 2, module, frames_per_batch=40, total_frames=120, policy_device=GPU, storing_device=GPU,
        update_at_each_batch=True,
    )  # fmt: skip
    seen = []
    for batch in collector:
        assert batch["logits"].is_cuda
        seen.append(torch.equal(batch["action"], batch["logits"].argmax(-1)))
        with torch.no_grad():
            linear.bias += 1
    collector.shutdown()
    assert seen == [True] * 3


def test_a_learner_on_a_gpu_trains_from_what_a_collector_stores_there():
    value = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)).to(GPU)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(500, device=GPU), sampler=PrioritizedSampler(500, alpha=0.6, beta=0.4), batch_size=32,
        priority_key="error",
    )  # fmt: skip
    optimizer = torch.optim.Adam(value.parameters(), 1e-3)
    acting = TensorDictSequential(
        TensorDictModule(value, in_keys=["observation"], out_keys=["values"]),
        TensorDictModule(lambda x: x.argmax(-1), in_keys=["values"], out_keys=["action"]),
    )
    before = [p.detach().clone() for p in value.parameters()]
    collector = SyncDataCollector(
        cartpole, acting, frames_per_batch=25, total_frames=750, policy_device=GPU, storing_device=GPU, replay_buffer=rb
    )
    for _ in collector:
        batch = rb.sample()
        assert all(leaf.is_cuda for leaf in batch.exclude("index").values(True, True))
        following = batch["next"]
        with torch.no_grad():
            target = following["reward"][:, 0] + 0.99 * value(following["observation"]).amax(-1) * (
                ~following["terminated"][:, 0]
            )
        error = value(batch["observation"]).gather(-1, batch["action"][:, None])[:, 0] - target
        loss = (batch["priority_weight"].to(GPU) * error**2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch["error"] = error.detach().abs()
        rb.update_tensordict_priority(batch)
    assert len(rb) == 500 and torch.isfinite(loss)
    assert all(not torch.equal(*pair) for pair in zip(before, value.parameters(), strict=True))
    assert isinstance(rb[:], TensorDict)
