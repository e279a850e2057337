"""Specs: the shape, dtype, device and domain of a tensor, and what can be drawn from it.

A spec is a value: nothing changes it after it exists (`Composite` may be given more entries). `shape` is the whole
shape of a tensor, with batch dimensions first. All draws come from torch's global generator.
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
