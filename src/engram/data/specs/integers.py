"""Integers of any dtype as int64 of the same order: torch compares and adds no unsigned ones but bytes."""

from __future__ import annotations

import torch
from torch import Tensor

LOWEST, HIGHEST = -(2**63), 2**63 - 1
_LARGEST_DOUBLE = 2.0**63 - 1024  # below 2 ** 63


def ordered(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` on its way to the integer `dtype`, as int64 of the same order; floats are rounded, NaN is 0.

    What int64 (uint64 for that dtype) cannot hold becomes its nearest value; other dtypes do not limit anything here.

    >>> ordered(torch.tensor([0.6, -1e30, float("nan")]), torch.int64).tolist()
    [1, -9223372036854775808, 0]
    """
    to_unsigned = dtype is torch.uint64
    if value.dtype.is_floating_point:
        number = value.double().nan_to_num(0.0).round()
        number = number.clamp(min=0) - 2.0**63 if to_unsigned else number
        return torch.where(number >= 2.0**63, HIGHEST, number.clamp(LOWEST, _LARGEST_DOUBLE).long())
    if value.dtype is torch.uint64:
        bits = value.view(torch.int64)
        return bits ^ LOWEST if to_unsigned else torch.where(bits < 0, HIGHEST, bits)
    number = value.long()
    return number.clamp(min=0) ^ LOWEST if to_unsigned else number


def restored(number: Tensor, dtype: torch.dtype) -> Tensor:
    """The reverse of `ordered`, for numbers that `dtype` has."""
    return (number ^ LOWEST).view(torch.uint64) if dtype is torch.uint64 else number.to(dtype)


def limits(dtype: torch.dtype) -> tuple[int, int]:
    """The first and the last integer of `dtype`, as `ordered` gives them."""
    if dtype is torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return (LOWEST, HIGHEST) if dtype is torch.uint64 else (info.min, info.max)
