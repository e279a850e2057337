"""What a gymnasium environment gives, compared with what its space says: numbers of a dtype and shape, and flags.

Hot loops compare the dtype and the shape of an array themselves, and come here with everything else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from engram.errors import is_masked

Array = np.ndarray[Any, Any]

BOOL, SINGLE, DOUBLE = np.dtype(np.bool_), np.dtype(np.float32), np.dtype(np.float64)
_NUMBERS = frozenset(
    [bool, int, float, np.bool_, *(np.dtype(code).type for code in ("f2", "f4", "f8"))]
    + [np.dtype(f"{kind}{size}").type for kind in "iu" for size in (1, 2, 4, 8)]
)


class Rewards(NamedTuple):
    """Float32 rewards up to the first one that is no number, and the error about that one (None: all are numbers)."""

    values: Array
    error: ValueError | None


def array_of(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...], what: str) -> Array:
    """`value` as an array of that dtype and shape; `value` itself where it is one.

    Lists, tensors and other dtypes are converted where every number stays what it is, or is rounded to a float of
    `dtype`. Raises ValueError, which begins with `what`, for another shape, for None, text, objects, masked arrays, and
    for numbers that have no place in `dtype`.
    """
    array = plain_array(value, what, shape, dtype)
    if array.shape != shape:
        raise ValueError(
            f"{what} of shape {array.shape}, and its space says {shape}; correct the environment or its space"
        )
    if array.dtype == dtype:
        return array
    return _converted(array, dtype, what)


def refuse_beyond(limits: tuple[Any, Any], array: Array, what: str) -> None:
    """Raises ValueError, which begins with `what`, where a number is below the first limit or above the second."""
    wrong = (array < limits[0]) | (array > limits[1])
    if wrong.any():
        low, high = (np.broadcast_to(limit, array.shape)[wrong][0] for limit in limits)
        raise ValueError(
            f"{what} with {array[wrong][0]!r}, and its space says {low} to {high}; correct the environment or its space"
        )


def plain_array(value: Any, what: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """`value` as an array of numbers of any kind and shape. Raises ValueError, as `array_of`, for what is none."""
    if type(value) is np.ndarray and value.dtype.kind in "biuf":
        return value
    if _is_masked(value):
        raise ValueError(
            f"{what} in a masked array, and a buffer has no place for the mask; give a plain array: "
            "array.filled(value), or the mask as an observation of its own"
        )
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors of a GPU or with a gradient
        raise ValueError(
            f"{what} that is no array of numbers: {value!r:.80} ({error}); its space says {dtype} {shape}"
        ) from error
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"{what} of {type(value).__name__} {value!r:.80}, of shape {array.shape} and dtype {array.dtype}, and its "
            f"space says {dtype} {shape}; correct the environment or its space"
        )
    return array


def _is_masked(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_is_masked(part) for part in value)
    return is_masked(value)


def _converted(array: Array, dtype: np.dtype[Any], what: str) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
    if dtype.kind == "f":
        wrong = np.isinf(cast)
        if wrong.any():
            wrong &= np.isfinite(array)
    else:
        wrong = (cast != array) | ((cast < 0) != (array < 0))  # the latter: numbers that came round to the same bits
    if wrong.any():
        raise ValueError(
            f"{what} with {array[wrong][0]!r} in {array.dtype}, which {dtype} cannot hold; correct the environment or "
            "its space"
        )
    return cast


def reward_of(value: Any) -> float:
    """One reward, which fits float32. Raises ValueError for what is not one number."""
    if type(value) is float and -1e38 < value < 1e38:
        return value
    what = "the environment gave a reward"
    array = plain_array(value, what, (), "float32")
    if array.shape not in ((), (1,)):
        raise ValueError(f"{what} of shape {array.shape}, and a reward is one number; correct the environment")
    _converted(array, np.dtype(np.float32), what)
    return float(array.reshape(()))


def rewards_of(values: Sequence[Any]) -> Rewards:
    """The rewards of many steps, each as `reward_of` takes it."""
    if _NUMBERS.issuperset(map(type, values)):
        with np.errstate(over="ignore"), contextlib.suppress(OverflowError):
            column = np.fromiter(values, np.float32, len(values))  # a third of the cost of an array of a list
            if not np.isinf(column).any():
                return Rewards(column, None)
    column = np.empty(len(values), np.float32)
    for i, value in enumerate(values):
        try:
            column[i] = reward_of(value)
        except ValueError as error:
            return Rewards(column[:i], error)
    return Rewards(column, None)


def reward_row(value: Any, n: int) -> Array:
    """The rewards `[n]` of environments that step together, float32 where they are that, else float64.

    Raises ValueError for another shape and for what are no numbers.
    """
    if type(value) is np.ndarray and value.dtype.kind in "biuf" and value.shape == (n,):
        return value.astype(SINGLE if value.dtype == SINGLE else DOUBLE, copy=False)
    return array_of(value, DOUBLE, (n,), "the environments gave rewards")


def narrow_rewards(rows: Array) -> Rewards:
    """Rewards `[calls, n]` of `reward_row` as float32, up to the first call with one beyond float32."""
    if rows.dtype == SINGLE:
        return Rewards(rows, None)
    with np.errstate(over="ignore"):
        cast = rows.astype(np.float32)
    infinite = np.isinf(cast)
    if not infinite.any():
        return Rewards(cast, None)
    wrong = (infinite & np.isfinite(rows)).any(-1)
    if not wrong.any():
        return Rewards(cast, None)
    first = int(wrong.argmax())
    try:
        _converted(rows[first], np.dtype(np.float32), "the environments gave rewards")
    except ValueError as error:
        return Rewards(cast[:first], error)
    raise AssertionError("one of them was found wrong")


def flag_of(value: Any, name: str) -> bool:
    """`terminated` or `truncated` of one environment. Raises ValueError for what is neither true nor false."""
    if value is True or value is False:
        return value
    if type(value) is not np.bool_:
        what = f"the environment gave {name}"
        array = plain_array(value, what, (), "bool")
        if array.shape not in ((), (1,)) or array not in (0, 1):
            raise ValueError(f"{what}={value!r:.80}, and it must be True or False; correct the environment")
    return bool(value)


def flag_row(value: Any, n: int, name: str) -> Array:
    """`terminated` or `truncated`, bool `[n]`, of environments that step together."""
    if type(value) is np.ndarray and value.dtype is BOOL and value.shape == (n,):
        return value
    return array_of(value, BOOL, (n,), f"the environments gave {name}")
