"""Transforms of batches: in replay buffers on reading and writing, in environments at every step."""

from engram.transforms.base import Transform
from engram.transforms.cat_frames import CatFrames
from engram.transforms.compose import Compose
from engram.transforms.image import GrayScale, Resize, ToTensorImage
from engram.transforms.keys import ExcludeTransform, RenameTransform, SelectTransform
from engram.transforms.multi_step import MultiStepTransform
from engram.transforms.trajectory import InitTracker, Reward2GoTransform, RewardSum, StepCounter
from engram.transforms.values import (
    DTypeCastTransform,
    FlattenObservation,
    ObservationNorm,
    RewardScaling,
    UnsqueezeTransform,
)
from engram.transforms.vec_norm import VecNorm

__all__ = [
    "CatFrames",
    "Compose",
    "DTypeCastTransform",
    "ExcludeTransform",
    "FlattenObservation",
    "GrayScale",
    "InitTracker",
    "MultiStepTransform",
    "ObservationNorm",
    "RenameTransform",
    "Resize",
    "Reward2GoTransform",
    "RewardScaling",
    "RewardSum",
    "SelectTransform",
    "StepCounter",
    "ToTensorImage",
    "Transform",
    "UnsqueezeTransform",
    "VecNorm",
]
