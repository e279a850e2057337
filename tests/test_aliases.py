"""Paths under which modules are known elsewhere are those modules."""

import importlib
import subprocess
import sys

import pytest

from contracts.each import each
from engram import envs
from engram._aliases import ALIASES
from engram.envs import GymEnv

WHERE_USERS_LOOK = {
    "collectors.collectors": "SyncDataCollector MultiSyncDataCollector MultiaSyncDataCollector RandomPolicy",
    "collectors.distributed": "RayCollector",
    "collectors.distributed.ray": "RayCollector",
    "data": "RayReplayBuffer RemoteTensorDictReplayBuffer TensorDict",
    "data.datasets.d4rl": "D4RLExperienceReplay",
    "data.datasets.minari_data": "MinariExperienceReplay",
    "data.postprocs": "MultiStep",
    "data.postprocs.postprocs": "MultiStep",
    "data.replay_buffers.ray_buffer": "RayReplayBuffer",
    "data.replay_buffers.replay_buffers": "ReplayBuffer TensorDictReplayBuffer TensorDictPrioritizedReplayBuffer",
    "data.tensor_specs": "BoxList Bounded CategoricalBox Composite ContinuousBox OneHot TensorSpec",
    "envs.batched_envs": "ParallelEnv SerialEnv",
    "envs.common": "EnvBase",
    "envs.env_creator": "EnvCreator",
    "envs.libs.gym": "GymEnv GymWrapper set_gym_backend",
    "envs.transforms.gym_transforms": "NoopResetEnv EndOfLifeTransform",
    "envs.transforms.rb_transforms": "MultiStepTransform",
    "envs.transforms.transforms": "TransformedEnv Compose StepCounter RewardSum",
    "envs.transforms.vecnorm": "VecNorm",
    "envs.vec_envs": "ParallelEnv SerialEnv",
}


@each("module", WHERE_USERS_LOOK)
def test_names_are_where_users_look_for_them(module):
    found = importlib.import_module(f"engram.{module}")
    for name in WHERE_USERS_LOOK[module].split():
        assert isinstance(getattr(found, name), type)


def test_env_creator_is_the_function_whatever_is_imported():
    importlib.import_module("engram.envs.env_creator")
    assert isinstance(envs.env_creator(GymEnv), envs.EnvCreator)


@each("alias", ALIASES)
def test_alias_is_the_module_that_it_stands_for(alias):
    target = importlib.import_module(ALIASES[alias])
    assert importlib.import_module(alias) is target and target.__name__ == ALIASES[alias]


def test_modules_below_an_alias_are_not_loaded_twice():
    below = importlib.import_module("engram.collectors.distributed.collector")
    assert below is importlib.import_module("engram.distributed.collector")
    with pytest.raises(ModuleNotFoundError, match=r"engram\.collectors\.distributed\.nothing"):
        importlib.import_module("engram.collectors.distributed.nothing")


@pytest.mark.deep
def test_aliases_can_be_what_a_program_imports_first():
    code = "; ".join(f"import {alias}" for alias in reversed(ALIASES)) + "; print(engram.envs.common.EnvBase.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("EnvBase\n", "")
