"""A device that is not there is told where it is asked for, before anything is made."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from contracts.each import each
from contracts.programs import run_program
from engram.collectors import MultiSyncDataCollector, SyncDataCollector
from engram.data import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, TensorStorage
from engram.envs import GymEnv, ParallelEnv, SerialEnv

MISSING = f"cuda:{torch.cuda.device_count()}"


def cartpole():
    return GymEnv("CartPole-v1")


def never():
    raise AssertionError("the environment was made before the device was looked at")


MAKERS = {
    "LazyTensorStorage": lambda device: LazyTensorStorage(10, device=device),
    "TensorStorage": lambda device: TensorStorage(torch.zeros(3), device=device),
    "GymEnv": lambda device: GymEnv("CartPole-v1", device=device),
    "SerialEnv": lambda device: SerialEnv(2, never, device=device),
    "ParallelEnv": lambda device: ParallelEnv(2, never, device=device),
    "to": lambda device: cartpole().to(device),
    "device": lambda device: SyncDataCollector(never, frames_per_batch=10, device=device),
    "env_device": lambda device: SyncDataCollector(never, frames_per_batch=10, env_device=device),
    "policy_device": lambda device: SyncDataCollector(
        never, nn.Linear(4, 2), frames_per_batch=10, policy_device=device
    ),
    "storing_device": lambda device: SyncDataCollector(never, frames_per_batch=10, storing_device=device),
    "workers": lambda device: MultiSyncDataCollector([never] * 2, frames_per_batch=10, device=device),
    "workers' policies": lambda device: MultiSyncDataCollector([never] * 2, frames_per_batch=10, policy_device=device),
}


@each("name", MAKERS)
@each("device, said", [(MISSING, "CUDA devices"), ("nonsense", "is no device")])
def test_a_device_that_is_not_there_is_an_error_at_once(name, device, said):
    named = name if name.endswith("_device") else "device" if "policies" not in name else "policy_device"
    with pytest.raises(ValueError, match=f"{named}='{device}'.*{said}"):
        MAKERS[name](device)


@pytest.mark.parametrize("make", [LazyTensorStorage, lambda n, device: TensorStorage(torch.zeros(n), device=device)])
def test_a_storage_is_not_made_of_nothing(make):
    with pytest.raises(ValueError, match="device='meta': a storage keeps its rows in memory"):
        make(10, device="meta")


def test_to_an_environment_a_missing_device_changes_nothing():
    env = SerialEnv(2, cartpole)
    before = env.device
    with pytest.raises(ValueError, match="CUDA devices"):
        env.to(MISSING)
    assert env.device == before and env.rollout(2).device == before


@pytest.mark.deep
def test_looking_at_a_device_does_not_initialise_cuda():
    code = (
        "import torch\nfrom engram.data import LazyTensorStorage\n"
        f"try:\n    LazyTensorStorage(10, device={MISSING!r})\nexcept ValueError:\n    pass\n"
        "assert not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()\n"
    )
    run_program(code).check_returncode()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_page_locked_memory_for_no_gpu_is_told():
    with pytest.warns(UserWarning, match="pin_memory=True does nothing here"):
        rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2, pin_memory=True)
    rb.extend(TensorDict({"a": torch.arange(3)}, [3]))
    assert rb.sample()["a"].shape == (2,)
    with pytest.warns(UserWarning, match="pin_memory=True does nothing here"):
        ReplayBufferEnsemble(rb, pin_memory=True)
