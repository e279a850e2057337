"""Powers of priorities and weights: their bits, which no machine changes, and how exact they are."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from contracts.each import each
from engram import _native

BITS = [
    (0.5, 0.6, "0x1.51cb453b9536cp-1"),
    (2.0, 0.6, "0x1.8406003b2ae5cp+0"),
    (1e-08, 0.6, "0x1.09e6a4f05e62bp-16"),
    (1.00000001, 0.6, "0x1.00000019c511ep+0"),
    (0.25000001, 0.6, "0x1.bdb8ce6136bb8p-2"),
    (5.25, 0.7, "0x1.989f2b2b66742p+1"),
    (3.0, 0.3333333333333333, "0x1.7137449123ef6p+0"),
    (0.1, 0.3, "0x1.009b9cf334253p-1"),
    (7.0, 0.9, "0x1.70c7dd621687ep+2"),
    (123456.789, 0.45, "0x1.87080fe1ad232p+7"),
    (1e-300, 0.6, "0x1.0991a9bfa5910p-598"),
    (1e300, 0.6, "0x1.ed8d34e54728fp+597"),
    (5e-324, 0.6, "0x1.8406003b2aecdp-645"),
    (2.2250738585072014e-308, 0.7, "0x1.8406003b2af33p-716"),
    (1.7976931348623157e308, 0.2, "0x1.bdb8cdadbe15ep+204"),
    (3e-310, 0.9, "0x1.8652e7473d211p-926"),
    (0.7071067811865476, 0.6, "0x1.9fdf8bcce533ep-1"),
    (1.4142135623730951, 0.6, "0x1.3b2c47bff8329p+0"),
    (0.9999999999999999, 0.6, "0x1.fffffffffffffp-1"),
    (1.0000000000000002, 0.6, "0x1.0000000000001p+0"),
    (12.5, -0.4, "0x1.74d9ff19cfeffp-2"),
    (1.5, -1.0, "0x1.5555555555555p-1"),
    (1000000.0, -0.73, "0x1.5db204b82f565p-15"),
    (1e250, -0.4, "0x1.bff2ee48e04ccp-333"),
    (3.5, 1.5, "0x1.a310ccf3b3760p+2"),
    (0.3, 2.0, "0x1.70a3d70a3d70ap-4"),
    (9.0, 3.7, "0x1.a83c5c5339431p+11"),
    (1.1, 100.0, "0x1.aea4e6126bb95p+13"),
    (0.23796462709189137, 0.7, "0x1.76d9d93b74f9fp-2"),
    (0.36995516654807925, 0.123, "0x1.c50e724a52289p-1"),
    (0.625720304108054, 0.6, "0x1.82744b001aebap-1"),
    (0.6055995301393269, 0.123, "0x1.e15ea6ebdef78p-1"),
    (0.25935401432800764, 0.7, "0x1.8e214fc87c728p-2"),
    (0.1917441039952995, 0.123, "0x1.a1df99d30050ep-1"),
    (0.5409738856290388, 0.123, "0x1.dabbfd96cee1fp-1"),
    (0.39713457702896093, 0.7, "0x1.0c3de27006819p-1"),
    (0.23192200537667162, 0.7, "0x1.70298d2fc72fap-2"),
    (0.8680453071432968, 0.123, "0x1.f72a5084f6964p-1"),
    (0.7412518562014903, 0.6, "0x1.abcefbac11d4bp-1"),
    (0.15939993976228117, 0.6, "0x1.543ef09f307dap-2"),
]
"""x, y and x to the power y, each within 2 ulp (2 |y| ulp where |y| is above 1) of the exact one."""


def ways(x: list[float] | npt.NDArray[np.float64], y: float) -> list[list[float]]:
    """Powers by the loop for this processor, one by one, 2, 4 and 8 at a time, and compiled for fused sums."""
    return _native.testing.all_powers(np.asarray(x, dtype=np.float64), y)


def some(n: int, low: float = -40, high: float = 40) -> npt.NDArray[np.float64]:
    return np.exp2(np.random.default_rng(n).uniform(low, high, n))


@each(("x", "y", "bits"), BITS)
def test_bits_are_the_same_on_every_machine(x: float, y: float, bits: str) -> None:
    for way in ways([x] * 17, y):
        assert {power.hex() for power in way} == {bits}


@each("y", [0.6, 0.7, -0.4, 1 / 3, 2.5])
def test_one_at_a_time_and_any_number_at_once_give_the_same_bits(y: float) -> None:
    x = some(90, -1074, 1000)
    whole = ways(x, y)
    assert all(way == whole[0] for way in whole)
    for n in range(41):
        for start in range(9):
            for way in ways(x[start : start + n], y):
                assert way == whole[0][start : start + n]


@each("y", [0.1, 0.3, 0.6, 0.9, 0.999, -0.4, -1.0, 1.7, 3.0, -8.0])
def test_powers_are_within_some_ulp(y: float) -> None:
    for x in (some(4000), some(4001, -1, 1), some(4002, -120, 120)):
        exact = np.array([math.pow(one, y) for one in x])  # itself within 1 ulp
        assert np.all(np.abs(ways(x, y)[0] - exact) <= (1 + 2 * max(1, abs(y))) * np.spacing(exact))


@each("y", [0.3, 0.6, 1.5, 40.0, 1e300, -0.4, -1.5, -40.0, -1e300])
def test_zero_infinity_one_and_what_is_too_small_or_too_large(y: float) -> None:
    infinite, zero = (math.inf, 0.0) if y > 0 else (0.0, math.inf)
    for way in ways([0.0, math.inf, 1.0], y):
        assert way == [zero, infinite, 1.0]
    if abs(y) >= 40:
        for way in ways([1e-200, 1e200], y):
            assert way == [zero, infinite]


def test_the_smallest_numbers_have_powers_too() -> None:
    x = np.array([5e-324, 1e-320, 3e-310, 2.2250738585072014e-308])
    for way in ways(x, 0.5):
        assert np.allclose(way, np.sqrt(x), rtol=1e-15, atol=0)
    for way in ways([1e160, 1e150], -1.97):  # the first one's lies below the smallest normal number
        assert way == pytest.approx([1e160**-1.97, 1e150**-1.97], rel=1e-14, abs=5e-324)


def test_anything_to_the_power_0_is_1() -> None:
    for way in ways([0.0, 5e-324, 0.3, 1e300, math.inf], 0.0):
        assert way == [1.0] * 5
