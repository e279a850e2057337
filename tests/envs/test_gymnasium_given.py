"""Environments of gymnasium, and functions that make one, where an environment is asked for: as in a `GymEnv`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
import torch

from contracts.each import each
from engram.collectors import Evaluator, MultiSyncDataCollector, SyncDataCollector
from engram.data import LazyTensorStorage, TensorDictReplayBuffer
from engram.envs import GymEnv, ParallelEnv, SerialEnv, StepCounter, TransformedEnv
from engram.envs.utils import check_env_specs

NAME = "CartPole-v1"


def one() -> gymnasium.Env[Any, Any]:
    return gymnasium.make(NAME)


def vector() -> Any:
    return gymnasium.make_vec(NAME, num_envs=3)


def collected(env: Any) -> list[Any]:
    torch.manual_seed(3)
    with SyncDataCollector(env, frames_per_batch=12, total_frames=24) as collector:
        collector.set_seed(5)
        return list(collector)


@each("make", [one, vector])
@each("form", ["an environment", "a function"])
def test_a_collector_collects_from_it_as_from_a_gym_env(make: Callable[[], Any], form: str) -> None:
    found = collected(make if form == "a function" else make())
    expected = collected(GymEnv(make()))
    assert [list(batch.shape) for batch in found] == [list(batch.shape) for batch in expected]
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))


def test_workers_make_it_or_get_copies() -> None:
    for given in (one, [one, one], one(), vector()):
        with MultiSyncDataCollector(given, num_workers=2, frames_per_batch=12, total_frames=12) as collector:
            (batch,) = list(collector)
            assert batch["observation"].shape[-1] == 4


def test_other_environments_are_made_of_it() -> None:
    assert TransformedEnv(one(), StepCounter()).rollout(3)["step_count"].flatten().tolist() == [0, 1, 2]
    assert SerialEnv(2, one).rollout(3)["observation"].shape == (2, 3, 4)
    with contextlib.closing(ParallelEnv(2, one)) as env:
        assert env.rollout(3)["observation"].shape == (2, 3, 4)
    check_env_specs(one())


def test_an_evaluator_evaluates_in_it() -> None:
    evaluator = Evaluator(one(), num_trajectories=1)
    assert evaluator.evaluate()["eval/reward"] >= 1
    evaluator.shutdown()


def test_the_caller_closes_what_it_made() -> None:
    env = one()
    with SyncDataCollector(env, frames_per_batch=4, total_frames=4) as collector:
        list(collector)
    env.reset()
    env.step(0)


def test_rows_of_it_train_a_buffer() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    with SyncDataCollector(one(), frames_per_batch=20, total_frames=40, replay_buffer=rb) as collector:
        list(collector)
    assert len(rb) == 40 and rb.sample()["next", "observation"].shape == (8, 4)


@each("kind", [SerialEnv, ParallelEnv])
def test_environments_that_make_their_own_ask_for_a_function(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"makes its environments itself: give a function .* got a TimeLimit"):
        kind(2, one())


def test_anything_else_is_refused_by_the_three_kinds() -> None:
    with pytest.raises(TypeError, match="an environment of engram, gymnasium or TorchRL, got a int"):
        SerialEnv(1, lambda: 7)


@each("options", [{}, {"num_envs": 2}])
@each("name", ["ALE/Pong-v5", "Nowhere/Thing-v0"])
def test_an_environment_of_an_unknown_namespace_is_answered_by_the_import_that_makes_it_known(
    name: str, options: dict[str, Any]
) -> None:
    package = "ale_py" if name.startswith("ALE") else "the_package"
    with pytest.raises(
        gymnasium.error.NamespaceNotFound, match=rf"pip install .*GymEnv\('{package}:{name}'\) imports it"
    ):
        GymEnv(name, **options)
