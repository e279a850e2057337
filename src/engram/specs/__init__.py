"""Specs: the shape, dtype, device and domain of a tensor, from which random values can be drawn.

A spec is immutable, except that entries may be added to a `Composite`. `shape` is the whole shape of a tensor, with
batch dimensions first. All draws come from torch's global generator.
"""

from engram.specs.spaces import space_from_spec, spec_from_space
from engram.specs.tensors import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Spec,
    Unbounded,
)

__all__ = [
    "Binary",
    "Bounded",
    "Categorical",
    "Composite",
    "MultiCategorical",
    "MultiOneHot",
    "OneHot",
    "Spec",
    "Unbounded",
    "space_from_spec",
    "spec_from_space",
]
