"""Environments: TensorDicts in, TensorDicts out."""

from engram._advice import advise_on_names
from engram.envs.base import EnvBase, step_mdp
from engram.envs.checks import check_env_specs
from engram.envs.creator import EnvCreator
from engram.envs.gym import GymEnv
from engram.envs.libs import DMControlEnv, GymWrapper, gym_backend, set_gym_backend
from engram.envs.parallel import ParallelEnv
from engram.envs.policies import ExplorationType, RandomPolicy, exploration_type, set_exploration_type
from engram.envs.serial import SerialEnv
from engram.envs.transformed import TransformedEnv
from engram.transforms import (
    CatFrames,
    CatTensors,
    ClipTransform,
    Compose,
    DoubleToFloat,
    DTypeCastTransform,
    EndOfLifeTransform,
    ExcludeTransform,
    FlattenObservation,
    GrayScale,
    InitTracker,
    MultiStepTransform,
    NextStateReconstructor,
    NoopResetEnv,
    ObservationNorm,
    RenameTransform,
    Resize,
    Reward2GoTransform,
    RewardScaling,
    RewardSum,
    SelectTransform,
    SignTransform,
    StepCounter,
    TensorDictPrimer,
    ToTensorImage,
    TrajCounter,
    Transform,
    UnsqueezeTransform,
    VecNorm,
)

__all__ = [
    "CatFrames",
    "CatTensors",
    "ClipTransform",
    "Compose",
    "DMControlEnv",
    "DTypeCastTransform",
    "DoubleToFloat",
    "EndOfLifeTransform",
    "EnvBase",
    "EnvCreator",
    "ExcludeTransform",
    "ExplorationType",
    "FlattenObservation",
    "GrayScale",
    "GymEnv",
    "GymWrapper",
    "InitTracker",
    "MultiStepTransform",
    "NextStateReconstructor",
    "NoopResetEnv",
    "ObservationNorm",
    "ParallelEnv",
    "RandomPolicy",
    "RenameTransform",
    "Resize",
    "Reward2GoTransform",
    "RewardScaling",
    "RewardSum",
    "SelectTransform",
    "SerialEnv",
    "SignTransform",
    "StepCounter",
    "TensorDictPrimer",
    "ToTensorImage",
    "TrajCounter",
    "Transform",
    "TransformedEnv",
    "UnsqueezeTransform",
    "VecNorm",
    "check_env_specs",
    "exploration_type",
    "gym_backend",
    "set_exploration_type",
    "set_gym_backend",
    "step_mdp",
]

advise_on_names(__name__)
