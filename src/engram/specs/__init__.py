"""Specs: the shape, dtype, device and domain of a tensor, from which random values can be drawn.

A spec is immutable, except that entries may be added to a `Composite`. `shape` is the whole shape of a tensor, with
batch dimensions first. All draws come from torch's global generator.
"""

from engram.specs.composite import Composite
from engram.specs.spaces import space_from_spec, spec_from_space
from engram.specs.stacked import Stacked, StackedComposite
from engram.specs.tensors import (
    Binary,
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Spec,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
)
from engram.specs.text import Text
from engram.specs.torchrl import register_in_torchrl

TensorSpec = Spec
register_in_torchrl(
    {
        "TensorSpec": Spec,
        "Unbounded": Unbounded,
        "Bounded": Bounded,
        "Categorical": Categorical,
        "Binary": Binary,
        "MultiCategorical": MultiCategorical,
        "OneHot": OneHot,
        "MultiOneHot": MultiOneHot,
        "Composite": Composite,
        "Stacked": Stacked,
        "StackedComposite": StackedComposite,
    }
)

__all__ = [
    "Binary",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Categorical",
    "Composite",
    "MultiCategorical",
    "MultiOneHot",
    "OneHot",
    "Spec",
    "Stacked",
    "StackedComposite",
    "TensorSpec",
    "Text",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
    "space_from_spec",
    "spec_from_space",
]
