"""`torch.set_default_device`: the library's own tensors lie where it needs them, batches where their storage says."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils._device import _device_constructors

import engram
from contracts.each import each
from engram.collectors import SyncDataCollector
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from engram.envs import GymEnv, MultiStepTransform, RewardSum, SerialEnv, StepCounter, TransformedEnv, VecNorm

SOURCES = Path(engram.__file__).parent
#: Functions of torch that make tensors on the default device where they are not told another.
MAKERS = {function.__name__ for function in _device_constructors()} - {"from_file"}
STEPS = 20


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """With a default device on which nothing that is computed has a value, as a GPU that this machine lacks."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def steps() -> TensorDict:
    numbers = torch.arange(float(STEPS), device="cpu").unsqueeze(-1)
    ends = torch.arange(STEPS, device="cpu").unsqueeze(-1) % 5 == 4
    after = {"obs": numbers + 1, "reward": torch.ones(STEPS, 1, device="cpu"), "done": ends}
    return TensorDict({"obs": numbers, "next": after}, [STEPS])


BUFFERS: dict[str, Callable[[], dict[str, Any]]] = {
    "uniform": dict,
    "priorities": lambda: {"sampler": PrioritizedSampler(100, 0.6, 0.4)},
    "slices": lambda: {"sampler": SliceSampler(num_slices=2, strict_length=False)},
    "epochs": lambda: {"sampler": SamplerWithoutReplacement()},
    "n steps": lambda: {"transform": MultiStepTransform(3, 0.9)},
    "a list": lambda: {"storage": ListStorage(100)},
    "stored once": lambda: {"storage": LazyTensorStorage(100, compact=True)},
    "a store": lambda: {"storage": LazyMemmapStorage(100)},
    "prefetch": lambda: {"prefetch": 2},
}


@pytest.mark.usefixtures("elsewhere")
@each("name", BUFFERS)
def test_a_buffer_does_what_it_does_without_one(name: str, tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(**{"storage": LazyTensorStorage(100), "batch_size": 8, **BUFFERS[name]()})
    rb.extend(steps())
    rb.add(steps()[0])
    batch, info = rb.sample(return_info=True)
    assert {value.device.type for value in batch.values(True, True)} == {"cpu"}
    if "priority_weight" in info:
        rb.update_priority(info["index"], [0.5] * 8)
    for index in (slice(None), [1, 2], 1):
        rows = rb[index]
        assert isinstance(rows, list) or rows["obs"].device.type == "cpu"
    if name != "stored once":
        rb[[1, 2]] = rb[[3, 4]] if name == "n steps" else steps()[3:5]
    rb.dumps(tmp_path)
    rb.loads(tmp_path)
    rb.load_state_dict(rb.state_dict())
    assert torch.isfinite(rb.sample()["obs"]).all()


ENVS: dict[str, Callable[[], Any]] = {
    "an environment": lambda: GymEnv("Pendulum-v1"),
    "a vector": lambda: GymEnv("CartPole-v1", num_envs=2),
    "several": lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")),
    "transforms": lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter(30)).append_transform(RewardSum()),
    "statistics": lambda: TransformedEnv(GymEnv("Pendulum-v1"), VecNorm(in_keys=["observation"])),
}


@pytest.mark.usefixtures("elsewhere")
@each("name", ENVS)
def test_environments_and_collectors_do_what_they_do_without_one(name: str) -> None:
    rolled = ENVS[name]().rollout(12)
    assert {value.device.type for value in rolled.values(True, True)} == {"cpu"}
    with SyncDataCollector(ENVS[name](), frames_per_batch=20, total_frames=40, device="cpu") as collector:
        for batch in collector:
            assert torch.isfinite(batch["observation"]).all()


def calls_without_device(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and (node.func.value.id, node.func.attr in MAKERS) == ("torch", True)
            and not any(keyword.arg in ("device", None) for keyword in node.keywords)
        ):
            yield f"{file.relative_to(SOURCES)}:{node.lineno}: torch.{node.func.attr}"


@pytest.mark.deep
def test_every_tensor_that_the_library_makes_is_told_its_device() -> None:
    files = [file for file in SOURCES.rglob("*.py") if "testing" not in file.parts]
    found = [call for file in files for call in calls_without_device(file)]
    assert len(files) > 200 and found == [], "say device=, or use engram.pytree.to_tensor"
