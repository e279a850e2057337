"""What changes batches on their way in and out."""

import engram.data.specs  # noqa: F401 -- first: engram.data itself needs a complete engram.transforms.base
from engram.transforms.base import Transform
from engram.transforms.cat_frames import CatFrames
from engram.transforms.compose import Compose
from engram.transforms.history import InitTracker, RewardSum, StepCounter
from engram.transforms.image import GrayScale, Resize, ToTensorImage
from engram.transforms.keys import ExcludeTransform, RenameTransform, SelectTransform
from engram.transforms.multi_step import MultiStepTransform
from engram.transforms.reward_to_go import Reward2GoTransform
from engram.transforms.scale import DTypeCastTransform, ObservationNorm, RewardScaling
from engram.transforms.shape import FlattenObservation, UnsqueezeTransform
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
