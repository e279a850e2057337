"""Raw values of gymnasium environments: checks against their spaces, and codecs to and from tensors.

Hot loops check the dtype and shape of an array themselves, and call this for everything else.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from engram._checks import attribute
from engram._native import ActionReader, RowCopies, one_hot
from engram._overrides import overrides
from engram.envs.action_checks import ActionCheck
from engram.errors import is_masked
from engram.pytree import Key
from engram.specs import Bounded, Composite, MultiOneHot, OneHot, Spec, Text, Unbounded, spec_from_space
from engram.specs.spaces import for_space_class
from engram.specs.text import bytes_of_text, text_of_bytes

Array = np.ndarray[Any, Any]

BOOL, SINGLE, DOUBLE = np.dtype(np.bool_), np.dtype(np.float32), np.dtype(np.float64)
_NUMBERS = frozenset(
    [bool, int, float, np.bool_, *(np.dtype(code).type for code in ("f2", "f4", "f8"))]
    + [np.dtype(f"{kind}{size}").type for kind in "iu" for size in (1, 2, 4, 8)]
)


class Rewards(NamedTuple):
    """Float32 rewards up to the first invalid one, and the error about that one (None: all are valid)."""

    values: Array
    error: ValueError | None


def array_of(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...], what: str) -> Array:
    """`value` as an array of this dtype and shape; `value` itself if it already is one.

    Lists, tensors and other dtypes are converted if every number is preserved, or rounded to a float of `dtype`. Raises
    ValueError, which begins with `what`, for another shape, for None, text, objects, masked arrays, and for numbers
    that `dtype` cannot hold.
    """
    array = number_array(value, what, shape, dtype)
    if array.shape != shape:
        raise ValueError(
            f"{what} of shape {array.shape}, and its space says {shape}; correct the environment or its space"
        )
    if array.dtype == dtype:
        return array
    return _converted(array, dtype, what)


def check_limits(limits: tuple[Any, Any], array: Array, what: str) -> None:
    """Raises ValueError, which begins with `what`, if a number is below the first limit or above the second."""
    wrong = (array < limits[0]) | (array > limits[1])
    if wrong.any():
        low, high = (np.broadcast_to(limit, array.shape)[wrong][0] for limit in limits)
        raise ValueError(
            f"{what} with {array[wrong][0]!r}, and its space says {low} to {high}; correct the environment or its space"
        )


def number_array(value: Any, what: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """`value` as an array of numbers of any dtype and shape. Raises ValueError, as `array_of`, for other values."""
    if type(value) is np.ndarray and value.dtype.kind in "biuf":
        return value
    if _is_masked(value):
        raise ValueError(
            f"{what} in a masked array, and a buffer has no place for the mask; give a plain array: "
            "array.filled(value), and the mask as another observation"
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
        wrong = (cast != array) | ((cast < 0) != (array < 0))  # the sign changes if large unsigned numbers wrap around
    if wrong.any():
        raise ValueError(
            f"{what} with {array[wrong][0]!r} in {array.dtype}, which {dtype} cannot hold; correct the environment or "
            "its space"
        )
    return cast


def reward_of(value: Any) -> float:
    """A reward as a float in the range of float32. Raises ValueError for anything but one number."""
    if type(value) in _NUMBERS and -1e38 < value < 1e38:
        return float(value)
    what = "the environment gave a reward"
    array = number_array(value, what, (), "float32")
    if array.shape not in ((), (1,)):
        raise ValueError(
            f"{what} of shape {array.shape}, and a reward is one number; correct the environment, or give it a "
            "`reward_space` of that shape"
        )
    _converted(array, np.dtype(np.float32), what)
    return float(array.reshape(()))


def reward_vector(value: Any, shape: tuple[int, ...]) -> Array:
    """Rewards of this shape, float32. Raises ValueError as `array_of`."""
    return array_of(value, SINGLE, shape, "the environment gave a reward")


def rewards_of(values: Sequence[Any]) -> Rewards:
    """The rewards of many steps, each checked as by `reward_of`."""
    if len(values) == 1 and type(values[0]) is float and -1e38 < values[0] < 1e38:
        return Rewards(np.array(values, np.float32), None)  # of small batches: a tenth of the cost
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
    """The rewards `[n]` of environments that step together, float32 if they have that dtype, else float64.

    Raises ValueError for another shape and for values that are not numbers.
    """
    if type(value) is np.ndarray and value.dtype.kind in "biuf" and value.shape == (n,):
        return value.astype(SINGLE if value.dtype == SINGLE else DOUBLE, copy=False)
    return array_of(value, DOUBLE, (n,), "the environments gave rewards")


def narrow_rewards(rows: Array) -> Rewards:
    """Rewards `[calls, n]` of `reward_row` as float32, up to the first call with a reward beyond float32."""
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
    raise AssertionError("a reward is beyond float32")


def flag_of(value: Any, name: str) -> bool:
    """`terminated` or `truncated` of one environment. Raises ValueError for values other than true and false."""
    if value is True or value is False:
        return value
    if type(value) is not np.bool_:
        what = f"the environment gave {name}"
        array = number_array(value, what, (), "bool")
        if array.shape not in ((), (1,)) or array not in (0, 1):
            raise ValueError(f"{what}={value!r:.80}, and it must be True or False; correct the environment")
    return bool(value)


def flag_row(value: Any, n: int, name: str) -> Array:
    """`terminated` or `truncated`, bool `[n]`, of environments that step together."""
    if type(value) is np.ndarray and value.dtype is BOOL and value.shape == (n,):
        return value
    return array_of(value, BOOL, (n,), f"the environments gave {name}")


_NO_ARGMAX = frozenset([torch.bool, torch.uint16, torch.uint32, torch.uint64])  # torch has none for these dtypes
MAX_TABLE = 256  # choices: the table of one-hot rows then takes at most half a megabyte


def numpy_of(value: Tensor) -> Array:
    """The numbers of a tensor; as float32 where NumPy has no such dtype (bfloat16)."""
    value = value.detach().cpu()
    try:
        return cast(Array, value.numpy())
    except TypeError:
        return cast(Array, value.float().numpy())


def require_in_dtype(last: int, space: Any) -> None:
    """Raises ValueError where the largest number of a space is one that its dtype cannot hold."""
    if last > np.iinfo(space.dtype).max:
        raise ValueError(
            f"{space!r} has numbers up to {last}, which its dtype {space.dtype} cannot hold; give it a wider dtype, or "
            "a smaller start"
        )


class SpaceCodec(ABC):
    """Converts the raw values of one gymnasium space to tensors and back."""

    spec: Spec

    @abstractmethod
    def encode_rows(self, raws: Sequence[Any]) -> Any:
        """N raw values as a tensor or TensorDict `[N, *spec.shape]`."""

    @abstractmethod
    def decode_rows(self, value: Any) -> list[Any]:
        """`[N, *spec.shape]` as N raw values, in new memory."""

    @abstractmethod
    def decode_batch(self, value: Any) -> Any:
        """`[..., *spec.shape]` as raw values batched by gymnasium: an array `[..., *raw_shape]`, or Dicts of arrays."""

    @abstractmethod
    def unbatch(self, batch: Any) -> list[Any]:
        """N raw values from `array_of_batch` of each leaf, nested as the space's values, in new memory."""

    def random_rows(self, n: int) -> tuple[Any, list[Any]]:
        """`spec.rand((n,))`, and the same values in raw form."""
        drawn = self.spec.rand((n,))
        return drawn, self.decode_rows(drawn)

    def random_batch(self, shape: Sequence[int]) -> Any:
        """`spec.rand(shape)` as raw values batched by gymnasium."""
        return self.decode_batch(self.spec.rand(shape))

    @abstractmethod
    def keep(self, raw: Any) -> Any:
        """A copy of a raw value; the value itself if it is immutable."""

    def decode_one(self, value: Any) -> Any:
        """`[*spec.shape]` as one raw value."""
        return self.decode_rows(value.unsqueeze(0))[0]

    def quick_decoder(self, check: ActionCheck) -> Callable[[Any], Any]:
        """`decode_one` of an action that `check` quickly finds to be of the space; of others None, or an error."""
        return lambda action: self.decode_one(action) if check.accepts(action) else None

    @property
    def in_one_array(self) -> ArrayCodec | None:
        """This codec, where each raw value is an array or a number, which has a place in one array of them."""
        return None

    def keep_rows(self, raws: list[Any]) -> list[Any]:
        """`keep` of each."""
        return [self.keep(raw) for raw in raws]


def first_of(read: Callable[[Any], Any], otherwise: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`read`, and `otherwise` for what it returns None for."""

    def value_of(action: Any) -> Any:
        value = read(action)
        return otherwise(action) if value is None else value

    return value_of


class ArrayCodec(SpaceCodec):
    """The codec of a space whose raw values are arrays of one dtype and shape.

    `limits`: the smallest and the largest raw value that `encode` accepts, `[*raw_shape]`; None: no limits.
    """

    limits: tuple[Any, Any] | None = None

    def __init__(self, spec: Spec, space: Any) -> None:
        self.spec = spec
        self.raw_dtype = np.dtype(np.dtype(space.dtype).type)  # in native byte order, which every space takes
        self.raw_shape = tuple(space.shape)

    def encode(self, raw: np.ndarray[Any, Any]) -> Tensor:
        """`[..., *raw_shape]` as `[..., *spec.shape]`; may share memory."""
        try:
            return torch.from_numpy(raw)
        except ValueError:  # negative strides, as those of a flipped image
            return torch.from_numpy(raw.copy())

    def row_encoder(self, rows: Array) -> Callable[[int], Tensor]:
        """A function from a number to `encode` of that row of `rows`, in memory of its own."""
        if self.is_plain:
            return RowCopies(rows).row
        encode: Callable[[Array], Tensor] = self.encode  # of the others, in new memory
        return lambda number: encode(rows[number])

    def array(self, value: Any, shape: tuple[int, ...], what: str) -> Array:
        """Raw values as an array of this shape. Raises ValueError, which begins with `what`, for all others."""
        array = array_of(value, self.raw_dtype, shape, what)
        if self.limits is not None:
            check_limits(self.limits, array, what)
        return array

    def decode(self, value: Tensor) -> Any:
        """The reverse of `encode`: a new array."""
        batch = value.shape[: value.ndim - self.spec.ndim]
        return numpy_of(value).astype(self.raw_dtype).reshape((*batch, *self.raw_shape))

    def raw_of(self, array: Array) -> Array:
        """`decode` for numbers that are known to be in the space."""
        batch = array.shape[: array.ndim - self.spec.ndim]
        return array.astype(self.raw_dtype).reshape((*batch, *self.raw_shape))

    def action_reader(self, batch_size: Sequence[int]) -> Callable[[Any], Any] | None:
        """A function that makes a new raw array of an action `[*batch_size, *spec.shape]`; None: there is no fast one.

        It returns None for all but plain tensors of the spec's dtype whose numbers are in the space.
        """
        shape = (*batch_size, *self.raw_shape)
        is_box = isinstance(self.spec, Bounded | Unbounded) and type(self) is ArrayCodec
        if not is_box or not shape or tuple(self.spec.shape) != self.raw_shape or self.raw_dtype.kind not in "iuf":
            return None
        return ActionReader(np.empty(shape, self.raw_dtype), 0, 0).read

    def unstacked(self, raws: Array) -> list[Any]:
        """A new array `[N, *raw_shape]` as N raw values."""
        return [np.asarray(row) for row in raws]

    def decode_batch(self, value: Tensor) -> Any:
        return np.asarray(self.decode(value))

    def array_of_batch(self, batch: Any) -> Array:
        """Raw values batched by gymnasium as one array `[n, *raw_shape]`; may be `batch` itself."""
        return np.asarray(batch)

    def unbatch(self, batch: Any) -> list[Any]:
        return self.unstacked(batch.copy())

    @property
    def is_plain(self) -> bool:
        """Whether the tensor equals the raw array."""
        return "encode" not in overrides(type(self), ArrayCodec)

    def encode_rows(self, raws: Sequence[Any]) -> Tensor:
        rows = np.asarray(raws, dtype=self.raw_dtype)
        return self.encode(rows.reshape((len(raws), *self.raw_shape)))

    def decode_rows(self, value: Tensor) -> list[Any]:
        return self.unstacked(self.decode(value))

    def decode_one(self, value: Tensor) -> Any:
        return self.decode(value)

    def quick_decoder(self, check: ActionCheck) -> Callable[[Any], Any]:
        array_of, raw_of, read = check.array_of, self.raw_of, self.action_reader(())

        def decoded(action: Any) -> Any:
            array = array_of(action)
            return None if array is None else raw_of(array)

        return decoded if read is None else first_of(read, decoded)

    @property
    def in_one_array(self) -> ArrayCodec | None:
        return self

    @property
    def is_raw(self) -> bool:
        """Whether a tensor has the very numbers of the raw array, in its dtype."""
        return self.is_plain

    def keep(self, raw: Any) -> Any:
        return raw.copy()


class DiscreteCodec(ArrayCodec):
    """The codec of Discrete: integers from `start` on, of the space's dtype, as categories or one-hot vectors."""

    def __init__(self, space: Any, categorical: bool) -> None:
        self._n = int(space.n)
        super().__init__(spec_from_space(space, categorical), space)
        self._number = self.raw_dtype.type
        self._first = self._number(space.start)
        self.start = int(self._first.astype(np.int64))  # of uint64 the same bits
        last = int(self._first) + self._n - 1
        require_in_dtype(last, space)
        #: Whether a raw value differs from its choice, in number or dtype.
        self._is_converted = self.start != 0 or self.raw_dtype != np.int64
        self._one_hot = self.spec if isinstance(self.spec, OneHot) else None
        if self._one_hot is not None:
            self.limits = int(self._first), last

    def encode(self, raw: np.ndarray[Any, Any]) -> Tensor:
        if self._one_hot is None:
            return self._choice_of(raw)
        if self._n <= MAX_TABLE:
            with contextlib.suppress(IndexError):  # a choice beyond the space: raises below
                return one_hot(np.asarray(raw, np.int64, order="C"), self.start, self._n)
        return self._one_hot.encode(self._choice_of(raw))

    def _choice_of(self, raw: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.asarray(np.subtract(raw.astype(np.int64), self.start)))

    def decode(self, value: Tensor) -> Any:
        choice = self._to_choice(value.detach())
        if choice.dtype is not torch.int64 or not choice.is_cpu:  # two conversions, each as slow as this check
            choice = choice.long().cpu()
        return self._raw_of_choice(choice.numpy()) if self._is_converted else choice.numpy().copy()

    def _raw_of_choice(self, choice: Array) -> Array:
        """Raw values of choices (int64), in new memory."""
        raws: Array = choice.astype(self.raw_dtype, copy=False) + self._first
        return raws

    def raw_of(self, array: Array) -> Array:
        choice = array.astype(np.int64) if self._one_hot is None else array.argmax(-1)
        return self._raw_of_choice(choice) if self._is_converted else choice

    def action_reader(self, batch_size: Sequence[int]) -> Callable[[Any], Any] | None:
        if self._one_hot is not None or not batch_size or self.raw_dtype != np.int64:
            return None
        return ActionReader(np.empty(tuple(batch_size), np.int64), self._n, self.start).read

    def unstacked(self, raws: Array) -> list[Any]:
        return list(raws)

    def _to_choice(self, value: Tensor) -> Tensor:
        if self._one_hot is None:
            return value
        return (value.byte() if value.dtype in _NO_ARGMAX else value).argmax(-1)

    def decode_one(self, value: Tensor) -> Any:
        """The value as a number of NumPy, which gymnasium checks faster than an `int`."""
        raw = self._number((value if self._one_hot is None else self._to_choice(value)).item())
        return raw + self._first if self._is_converted else raw

    def quick_decoder(self, check: ActionCheck) -> Callable[[Any], Any]:
        return self._found_in_tables if self._n <= MAX_TABLE else SpaceCodec.quick_decoder(self, check)

    @property
    def is_raw(self) -> bool:
        return self._one_hot is None and self.start == 0 and self.raw_dtype == np.int64

    def _found_in_tables(self, value: Tensor) -> Any:
        """`decode_one` of a choice found in the tables; None if the value needs a full check."""
        if self._one_hot is None:
            return self._raw_by_item.get(value.item())
        table = self._raw_by_row.get(value.dtype)
        if table is None:
            dtype = value.numpy().dtype
            rows = zip(np.eye(self._n, dtype=dtype), self._raw_by_item.values(), strict=True)
            table = {row.tobytes(): raw for row, raw in rows}
            self._raw_by_row[value.dtype] = table
        return table.get(value.numpy().tobytes())  # a third of the cost of `argmax` and `item`

    def keep(self, raw: Any) -> Any:
        return raw

    def unbatch(self, batch: Any) -> list[Any]:
        return list(batch)

    def keep_rows(self, raws: list[Any]) -> list[Any]:
        return raws

    def random_rows(self, n: int) -> tuple[Tensor, list[Any]]:
        choice = torch.randint(self._n, (n,), device="cpu")  # the same draw as by the spec
        if self._n > MAX_TABLE:
            encoded = choice if self._one_hot is None else self._one_hot.encode(choice)
            return encoded, list(self._raw_of_choice(choice.numpy()))
        raws = self._raw_by_choice.take(choice.numpy()).tolist()
        if self._one_hot is None:
            return choice, raws
        return torch.from_numpy(self._hot_by_choice.take(choice.numpy(), 0)), raws

    def random_batch(self, shape: Sequence[int]) -> Any:
        choice = torch.randint(self._n, tuple(shape), device="cpu").numpy()  # the same draw as by the spec
        return self._raw_of_choice(choice) if self._is_converted else choice

    @cached_property
    def _raw_by_choice(self) -> np.ndarray[Any, Any]:
        """Raw values by choice, created once: creating each anew is five times slower."""
        return np.array(list(self._raw_of_choice(np.arange(self._n))), dtype=object)

    @cached_property
    def _raw_by_item(self) -> dict[Any, Any]:
        """Raw values by choice."""
        return dict(enumerate(self._raw_by_choice.tolist()))

    @cached_property
    def _raw_by_row(self) -> dict[torch.dtype, dict[bytes, Any]]:
        """For each dtype, raw values by the bytes of their one-hot vectors."""
        return {}

    @cached_property
    def _hot_by_choice(self) -> np.ndarray[Any, Any]:
        return np.eye(self._n, dtype=np.int64)


class MultiDiscreteCodec(ArrayCodec):
    """The codec of MultiDiscrete: arrays of integers, as a vector of categories or of concatenated one-hot vectors."""

    def __init__(self, space: Any, categorical: bool) -> None:
        super().__init__(spec_from_space(space, categorical), space)
        self._one_hot = self.spec if isinstance(self.spec, MultiOneHot) else None
        start, nvec = attribute(space, "start"), np.asarray(space.nvec, self.raw_dtype)
        first = np.zeros_like(nvec) if start is None else np.asarray(start, self.raw_dtype)
        require_in_dtype(max(int(low) + int(n) - 1 for low, n in zip(first.flat, nvec.flat, strict=True)), space)
        self.start = first.astype(np.int64)  # of uint64 the same bits
        if self._one_hot is not None:
            self.limits = first, first + (nvec - 1)

    def encode(self, raw: np.ndarray[Any, Any]) -> Tensor:
        shape = raw.shape[: raw.ndim - len(self.raw_shape)]
        choice = torch.from_numpy((raw.astype(np.int64) - self.start).reshape((*shape, -1)))
        return choice if self._one_hot is None else self._one_hot.encode(choice)

    def decode(self, value: Tensor) -> Any:
        choice = value.detach() if self._one_hot is None else self._one_hot.decode(value.detach())
        raw = choice.long().cpu().numpy().reshape((*choice.shape[:-1], *self.raw_shape))
        return (raw + self.start).astype(self.raw_dtype)

    def raw_of(self, array: Array) -> Array:
        shape = array.shape[:-1]
        if self._one_hot is None:
            choice = array.astype(np.int64)
        else:  # each row has a one for each variable, in order
            nvec = self._one_hot.nvec
            places = array.reshape(-1, array.shape[-1]).nonzero()[1].reshape(-1, len(nvec))
            choice = places - np.cumsum([0, *nvec[:-1]])
        return (choice.reshape((*shape, *self.raw_shape)) + self.start).astype(self.raw_dtype)


class TextCodec(ArrayCodec):
    """The codec of a space of texts, which are encoded as uint8 `[width]`: see `Text`."""

    spec: Text

    def __init__(self, space: Any) -> None:
        spec = spec_from_space(space)
        assert isinstance(spec, Text)
        self.spec = spec
        self.raw_dtype, self.raw_shape = np.dtype(np.uint8), (spec.width,)

    def array(self, value: Any, shape: tuple[int, ...], what: str) -> Array:
        if isinstance(value, np.ndarray) and value.dtype == self.raw_dtype:
            return super().array(value, shape, what)
        texts = np.asarray(value, dtype=object)
        wrong = [text for text in texts.reshape(-1) if not isinstance(text, str)]
        if wrong or texts.shape != shape[:-1]:
            found = wrong[0] if wrong else value
            raise ValueError(
                f"{what} of {type(found).__name__} {found!r:.80}, and its space says text; correct the environment"
            )
        return self._rows(texts.reshape(-1), what).reshape(shape)

    def _rows(self, texts: Sequence[Any] | Array, what: str) -> Array:
        return np.array([bytes_of_text(text, self.spec.width, what) for text in texts], np.uint8)

    def raw_of(self, array: Array) -> Any:
        return text_of_bytes(array) if array.ndim == 1 else array

    def unstacked(self, raws: Array) -> list[Any]:
        return [text_of_bytes(row) for row in raws]

    def decode_one(self, value: Tensor) -> Any:
        return text_of_bytes(self.decode(value))

    def decode_batch(self, value: Tensor) -> Any:
        return _nested_texts(self.decode(value))

    def array_of_batch(self, batch: Any) -> Array:
        return self._rows(batch, "the value")

    @property
    def in_one_array(self) -> ArrayCodec | None:
        return None

    def encode_rows(self, raws: Sequence[Any]) -> Tensor:
        return torch.from_numpy(self._rows(raws, "the value").reshape(len(raws), self.spec.width))

    def keep(self, raw: Any) -> Any:
        return raw


def _nested_texts(rows: Array) -> Any:
    """Texts of bytes `[..., width]`, in a tuple for each batch dimension."""
    return text_of_bytes(rows) if rows.ndim == 1 else tuple([_nested_texts(row) for row in rows])


class NestedCodec(SpaceCodec):
    """The codec of a Dict or Tuple of spaces, as a TensorDict; the keys of a Tuple are "0", "1", ..."""

    def __init__(self, parts: Mapping[Any, SpaceCodec], build: Callable[[dict[Any, Any]], Any]) -> None:
        self.parts = dict(parts)
        self._build = build
        self.spec = Composite({str(key): part.spec for key, part in self.parts.items()})

    def encode_rows(self, raws: Sequence[Any]) -> TensorDict:
        columns = {str(k): part.encode_rows([raw[k] for raw in raws]) for k, part in self.parts.items()}
        return TensorDict(columns, batch_size=[len(raws)])

    def decode_rows(self, value: Any) -> list[Any]:
        columns = [part.decode_rows(value.get(str(key))) for key, part in self.parts.items()]
        return [self._build(dict(zip(self.parts, row, strict=True))) for row in zip(*columns, strict=True)]

    def decode_batch(self, value: Any) -> Any:
        return self._build({key: part.decode_batch(value.get(str(key))) for key, part in self.parts.items()})

    def unbatch(self, batch: Any) -> list[Any]:
        columns = [part.unbatch(batch[key]) for key, part in self.parts.items()]
        return [self._build(dict(zip(self.parts, row, strict=True))) for row in zip(*columns, strict=True)]

    def keep(self, raw: Any) -> Any:
        return self._build({key: part.keep(raw[key]) for key, part in self.parts.items()})


class SpaceLeaf(NamedTuple):
    """One array of a raw value: its key in the TensorDict, its path in the raw value, its codec."""

    key: Key
    path: tuple[Any, ...]
    codec: ArrayCodec

    def pick(self, raw: Any) -> Any:
        """The array of this leaf in a raw value."""
        for step in self.path:
            raw = raw[step]
        return raw

    def value(self, raw: Any) -> Array:
        """This leaf of one environment's observation. Raises ValueError for another dtype or shape than the space's."""
        return self._checked(raw, self.codec.raw_shape, 0)

    def rows(self, raw: Any, n: int) -> Array:
        """This leaf of `n` environments' observations, `[n, *raw_shape]`. Raises ValueError as `value`."""
        return self._checked(raw, (n, *self.codec.raw_shape), n)

    def _checked(self, raw: Any, shape: tuple[int, ...], n: int) -> Array:
        key, path, codec = self
        array = raw
        try:
            for step in path:
                array = array[step]
            is_plain = type(array) is np.ndarray and array.dtype is codec.raw_dtype and array.shape == shape
            if is_plain and codec.limits is None:
                return cast(Array, array)
            what = f"the {n} environments gave observations" if n else "the environment gave an observation"
            return codec.array(array, shape, f"{what} {key!r}")
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"the environment gave an observation {raw!r:.80}, which has no {key!r}; correct the environment"
            ) from error


def space_leaves(codec: SpaceCodec, key: tuple[str, ...] = (), path: tuple[Any, ...] = ()) -> list[SpaceLeaf]:
    """The leaves of a codec, in the order of its space."""
    if isinstance(codec, NestedCodec):
        return [leaf for k, part in codec.parts.items() for leaf in space_leaves(part, (*key, str(k)), (*path, k))]
    assert isinstance(codec, ArrayCodec)
    return [SpaceLeaf(key if len(key) > 1 else key[0], path, codec)]


def nest_like(leaves: Sequence[SpaceLeaf], values: Sequence[Any]) -> Any:
    """Nests the values of leaves as a raw value: Dicts for names in the leaves' paths, Tuples for numbers.

    >>> from gymnasium.spaces import Dict, Discrete, Tuple
    >>> space = Tuple([Discrete(2), Dict(a=Discrete(2))])
    >>> nest_like(space_leaves(codec_for(space), ("observation",)), [1, 2])
    (1, {'a': 2})
    """
    return _nested([leaf.path for leaf in leaves], list(values))


def _nested(paths: list[tuple[Any, ...]], values: list[Any]) -> Any:
    if paths == [()]:
        return values[0]
    groups: dict[Any, tuple[list[Any], list[Any]]] = {}
    for path, value in zip(paths, values, strict=True):
        inner = groups.setdefault(path[0], ([], []))
        inner[0].append(path[1:])
        inner[1].append(value)
    built = {name: _nested(*inner) for name, inner in groups.items()}
    return tuple(built.values()) if all(type(name) is int for name in built) else built


def codec_for(space: Any, *, categorical: bool = False) -> SpaceCodec:
    """The codec of a gymnasium space; `categorical` says how Discrete and MultiDiscrete are encoded.

    Raises TypeError for spaces without a fixed shape (Graph, Sequence, OneOf), ValueError for those whose dtype cannot
    hold their numbers.

    >>> import gymnasium
    >>> codec = codec_for(gymnasium.spaces.Discrete(3, start=1))
    >>> codec.encode_rows([1, 3]).tolist(), codec.decode_rows(torch.tensor([[0, 1, 0]]))
    ([[1, 0, 0], [0, 0, 1]], [np.int64(2)])
    """
    codec: SpaceCodec = for_space_class(space, _MAKERS)(space, categorical)
    return codec


def action_codec_for(space: Any, *, categorical: bool) -> SpaceCodec:
    """`codec_for` of an action space. Raises TypeError where a part of it is a Dict or Tuple without entries."""
    codec = codec_for(space, categorical=categorical)
    require_entries(codec, space)
    return codec


def require_entries(codec: SpaceCodec, space: Any) -> None:
    """Raises TypeError where a part of `space` is a Dict or Tuple without entries."""
    if isinstance(codec, NestedCodec):
        if not codec.parts:
            raise TypeError(
                f"the action space has a {type(space).__name__} without entries, which has no tensor form; leave it "
                "out by a wrapper (gymnasium.wrappers.TransformAction)"
            )
        for key, part in codec.parts.items():
            require_entries(part, space[key])


def _tuple_codec(space: Any, categorical: bool) -> SpaceCodec:
    parts = {index: codec_for(part, categorical=categorical) for index, part in enumerate(space.spaces)}
    return NestedCodec(parts, lambda row: tuple(row.values()))


def _dict_codec(space: Any, categorical: bool) -> SpaceCodec:
    return NestedCodec({k: codec_for(part, categorical=categorical) for k, part in space.spaces.items()}, dict)


_MAKERS: dict[str, Callable[[Any, bool], SpaceCodec]] = {
    "Box": lambda space, categorical: ArrayCodec(spec_from_space(space), space),
    "Discrete": DiscreteCodec,
    "MultiDiscrete": MultiDiscreteCodec,
    "MultiBinary": lambda space, categorical: ArrayCodec(spec_from_space(space), space),
    "Dict": _dict_codec,
    "Tuple": _tuple_codec,
    "Text": lambda space, categorical: TextCodec(space),
}
