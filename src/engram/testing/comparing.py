"""Comparing batches exactly."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor


def assert_equal(found: Any, expected: Any) -> None:
    """The same keys, shapes, dtypes and values, NaN included; a dict may stand for a TensorDict."""
    if isinstance(expected, dict | TensorDictBase):
        assert set(found.keys()) == set(expected.keys())
        for key in expected.keys():  # noqa: SIM118 -- a TensorDict iterates over rows
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected) and len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert found == expected
