"""Specs, under the path where users look for them."""

from engram.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Spec,
    Stacked,
    StackedComposite,
    TensorSpec,
    Unbounded,
    space_from_spec,
    spec_from_space,
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
    "Stacked",
    "StackedComposite",
    "TensorSpec",
    "Unbounded",
    "space_from_spec",
    "spec_from_space",
]
