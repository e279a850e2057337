"""Transforms of batches: in replay buffers on reading and writing, in environments at every step."""

from engram.transforms.actions import ActionScaling, FrameSkipTransform
from engram.transforms.base import Transform
from engram.transforms.cat_frames import CatFrames
from engram.transforms.compose import Compose
from engram.transforms.horizon import RandomTruncationTransform, TargetReturn
from engram.transforms.image import CenterCrop, GrayScale, Resize, ToTensorImage
from engram.transforms.keys import ExcludeTransform, RenameTransform, SelectTransform
from engram.transforms.multi_step import MultiStepTransform
from engram.transforms.next_state import NextStateReconstructor
from engram.transforms.resets import EndOfLifeTransform, NoopResetEnv, TensorDictPrimer, TrajCounter
from engram.transforms.subsequences import RandomCropTensorDict
from engram.transforms.trajectory import InitTracker, Reward2GoTransform, RewardSum, StepCounter
from engram.transforms.values import (
    CatTensors,
    ClipTransform,
    DoubleToFloat,
    DTypeCastTransform,
    FlattenObservation,
    ObservationNorm,
    RewardClipping,
    RewardScaling,
    SignTransform,
    UnsqueezeTransform,
)
from engram.transforms.vec_norm import VecNorm, VecNormV2

__all__ = [
    "ActionScaling",
    "CatFrames",
    "CatTensors",
    "CenterCrop",
    "ClipTransform",
    "Compose",
    "DTypeCastTransform",
    "DoubleToFloat",
    "EndOfLifeTransform",
    "ExcludeTransform",
    "FlattenObservation",
    "FrameSkipTransform",
    "GrayScale",
    "InitTracker",
    "MultiStepTransform",
    "NextStateReconstructor",
    "NoopResetEnv",
    "ObservationNorm",
    "RandomCropTensorDict",
    "RandomTruncationTransform",
    "RenameTransform",
    "Resize",
    "Reward2GoTransform",
    "RewardClipping",
    "RewardScaling",
    "RewardSum",
    "SelectTransform",
    "SignTransform",
    "StepCounter",
    "TargetReturn",
    "TensorDictPrimer",
    "ToTensorImage",
    "TrajCounter",
    "Transform",
    "UnsqueezeTransform",
    "VecNorm",
    "VecNormV2",
]
