"""A policy that reads what the environment does not give, or has another input size, is told what it gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from contracts.each import each
from engram.collectors import SyncDataCollector
from engram.envs import GymEnv, SerialEnv
from engram.envs.policies import with_entries

ENVS: dict[str, Callable[[], Any]] = {
    "one": lambda: GymEnv("CartPole-v1", categorical_action_encoding=True),
    "a vector": lambda: GymEnv("CartPole-v1", num_envs=2, categorical_action_encoding=True),
    "several": lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)),
}


def module(key: str, size: int) -> TensorDictModule:
    return TensorDictModule(nn.Linear(size, 2), in_keys=[key], out_keys=["action"])


def reads(key: str) -> Callable[[TensorDictBase], TensorDictBase]:
    return lambda td: td.set("action", td[key].sum(-1).long())


POLICIES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a module by name": (lambda: module("obs", 4), KeyError, "obs"),
    "modules in turn": (lambda: TensorDictSequential(module("obs", 4)), KeyError, "obs"),
    "a function": (lambda: reads("obs"), KeyError, "obs"),
    "another size, by name": (lambda: module("observation", 8), RuntimeError, "shapes cannot be multiplied"),
    "another size": (lambda: nn.Linear(8, 2), RuntimeError, "shapes cannot be multiplied"),
    "an index": (lambda: lambda td: td.set("action", td["observation"][..., 7]), IndexError, "out of bounds"),
}


def collect(env: Any, policy: Any, frames: int) -> None:
    with SyncDataCollector(env, policy, frames_per_batch=frames, total_frames=40) as collector:
        list(collector)


@each("name", POLICIES)
@each("env", ENVS)
@each("use", ["a collector", "a collector of single rows", "a rollout"])
def test_the_error_names_the_entries_that_it_got(name: str, env: str, use: str) -> None:
    make, kind, said = POLICIES[name]
    with pytest.raises(
        kind, match=rf"(?s){said}.*The policy got the entries .*'observation': float32 \[.*4\]"
    ) as raised:
        if use == "a rollout":
            ENVS[env]().rollout(3, make())
        else:
            collect(ENVS[env](), make(), 20 if use == "a collector" else 2)
    assert str(raised.value).count("The policy got") == 1 and type(raised.value.__cause__) is kind


@each("error", [ValueError("mine"), torch.OutOfMemoryError("full"), AssertionError()])
def test_errors_of_other_kinds_stay_as_they_are(error: Exception) -> None:
    assert with_entries(error, TensorDict()) is error


def test_many_entries_are_counted() -> None:
    told = str(with_entries(RuntimeError("wrong"), TensorDict({str(n): torch.zeros(1) for n in range(50)})))
    assert told.count("float32") == 20 and told.endswith(" and 30 more")
