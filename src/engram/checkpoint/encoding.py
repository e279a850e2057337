"""Encodes states of components as JSON and raw bytes, exactly: a value comes back with its type and its bits.

Plain JSON stands for itself; every other value is an object with one key that begins with `$` (`docs/format.md`).
Arrays are written to a binary file, in the order in which they are encoded. No file can name a class of which an
object is made.
"""

from __future__ import annotations

import math
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, Union

import numpy as np
import numpy.typing as npt
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from engram import pytree
from engram._system import check_memory
from engram.checkpoint.reader import BytesInMemory, ChecksummedFile
from engram.errors import CheckpointError

ALIGNMENT = 64
_MOST_COPIED = 1 << 24  # bytes of an array that are made contiguous at once
_SMALL = 1 << 16  # a write for each small array would take longer than all else
_DEEPEST = 100
_DEEPEST_TREE = 4 * _DEEPEST  # of what is read: what `encode` makes of a value has a few levels for each of its own
_WORD = 1 << 63

_OF_THIS_TORCH = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_TORCH_DTYPES: dict[str, torch.dtype] = {
    name: _OF_THIS_TORCH[name]
    for name in [
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    ]
    if name in _OF_THIS_TORCH
}
_TORCH_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}
# not `g` (long double): its bytes differ between machines; nor objects and structures
_NUMPY_DTYPE = re.compile(r"[<>|]([biufcSU]\d+|[mM]8(\[\w+\])?)", re.ASCII)
_MALFORMED = (
    *(TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError, AssertionError, struct.error),
)
_NOT_PORTABLE = ("f16", "c32", "f12", "c24")

Array = Union[torch.Tensor, npt.NDArray[Any], bytes]


class ClassCodec(Protocol):
    """Encodes one more class: as a value that `encode` knows, under a tag of its own."""

    tag: str

    def owns(self, value: Any) -> bool: ...
    def pack(self, value: Any) -> Any: ...
    def unpack(self, packed: Any) -> Any: ...


class EncodedArrays:
    """The arrays of encoded values, for the binary file: each at a multiple of 64 bytes, little-endian, C order."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.empty = True
        self._arrays: list[Array] = []

    def add(self, array: Array, nbytes: int) -> dict[str, int]:
        """Adds an array; returns its place in the file. Its bytes are read when `blocks` yields them, not here."""
        at = _aligned(self.nbytes)
        self._arrays.append(array)
        self.empty = False
        self.nbytes = at + nbytes
        return {"at": at, "nbytes": nbytes}

    def blocks(self) -> Iterator[bytes | npt.NDArray[Any]]:
        """The bytes of the file, one array after the other; small arrays are joined."""
        position, small = 0, bytearray()
        for array in self._arrays:
            small += bytes(_aligned(position) - position)
            position = _aligned(position)
            for piece in _pieces(array):
                block = tensor_bytes(piece)
                nbytes = len(block) if isinstance(block, bytes) else block.nbytes
                position += nbytes
                if nbytes < _SMALL:
                    small += block if isinstance(block, bytes) else block.tobytes()
                if nbytes >= _SMALL or len(small) >= _SMALL:
                    yield bytes(small)
                    small.clear()
                if nbytes >= _SMALL:
                    yield block
        if small:
            yield bytes(small)


def encode(value: Any, arrays: EncodedArrays, codecs: tuple[ClassCodec, ...] = (), place: str = "state") -> Any:
    """Encodes a value as JSON and adds its arrays to `arrays`. A TypeError names the place of what cannot be saved.

    dict, OrderedDict, list, tuple, str, int, float, bool, None, bytes, `torch.Size`, tensors of any dense dtype and
    device, numpy arrays and scalars, and what `codecs` add; subclasses of these are refused, as they would come back
    as something else. Gradients are not kept.

    >>> encode({"epoch": 3, "rate": (0.5, float("inf"))}, EncodedArrays())
    {'epoch': 3, 'rate': {'$tuple': [0.5, {'$float': '7ff0000000000000'}]}}
    """
    return Encoder(codecs).encode(value, arrays, place)


def decode(tree: Any, file: ChecksummedFile | BytesInMemory | None, codecs: tuple[ClassCodec, ...] = ()) -> Any:
    """Decodes what `encode` returned; tensors and arrays are new and writable. A ValueError says what is malformed.

    `file` is read from start to end; the caller compares its checksum then, before the value is used.
    """
    try:
        return _Decoder(file, codecs).decode(tree)
    except (CheckpointError, MemoryError):
        raise
    except RecursionError:
        raise ValueError("a state in it is nested too deeply") from None
    except _MALFORMED as error:
        raise ValueError(f"a state in it is malformed ({error!r})") from error


class Encoder:
    """Encodes any number of values, as `encode`.

    Args:
        plain: what is encoded in place of a value of another class; that value itself where it is to be refused.
    """

    def __init__(self, codecs: tuple[ClassCodec, ...], plain: Callable[[Any], Any] = lambda value: value) -> None:
        self._codecs, self._plain = codecs, plain
        self._by_type: dict[type, Callable[[Any, str, int], Any]] = {
            int: self._int,
            float: self._float,
            str: self._str,
            bytes: self._bytes,
            list: self._list,
            tuple: lambda value, place, depth: {"$tuple": self._list(value, place, depth)},
            torch.Size: lambda value, place, depth: {"$size": list(value)},
            dict: self._dict,
            OrderedDict: lambda value, place, depth: {"$ordered": self._pairs(value, place, depth)},
            torch.Tensor: self._tensor,
            np.ndarray: self._array,
        }

    def encode(self, value: Any, arrays: EncodedArrays, place: str) -> Any:
        """Encodes a value as JSON and adds its arrays to `arrays`."""
        self._encoded_arrays = arrays
        return self._encode(value, place, 0)

    def _encode(self, value: Any, place: str, depth: int) -> Any:
        if depth > _DEEPEST:
            raise TypeError(f"{place[:80]}...: nested more than {_DEEPEST} deep, or a container that contains itself")
        if value is None or type(value) is bool or (type(value) is str and value.isascii()):
            return value
        encoder = self._by_type.get(type(value))
        if encoder is not None:
            return encoder(value, place, depth)
        if isinstance(value, np.generic):
            return self._scalar(value, place)
        for codec in self._codecs:
            if codec.owns(value):
                return {f"${codec.tag}": self._encode(codec.pack(value), place, depth + 1)}
        plain = self._plain(value)
        if plain is not value:
            return self._encode(plain, place, depth + 1)
        raise TypeError(
            f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved; "
            "use tensors, numpy arrays, numbers, strings, bytes, None, and dicts, lists and tuples of these"
        )

    def _int(self, value: int, place: str, depth: int) -> Any:
        return value if -_WORD <= value < _WORD else {"$int": hex(value)}

    def _float(self, value: float, place: str, depth: int) -> Any:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}

    def _str(self, value: str, place: str, depth: int) -> Any:
        try:
            value.encode()
        except UnicodeEncodeError:  # two lone surrogates side by side would come back from JSON as one character
            return {"$str": value.encode("utf-8", "surrogatepass").hex()}
        return value

    def _bytes(self, value: bytes, place: str, depth: int) -> Any:
        return {"$bytes": self._encoded_arrays.add(value, len(value))}

    def _list(self, value: list[Any] | tuple[Any, ...], place: str, depth: int) -> list[Any]:
        return [self._encode(member, f"{place}[{i}]", depth + 1) for i, member in enumerate(value)]

    def _dict(self, value: dict[Any, Any], place: str, depth: int) -> Any:
        for key in value:
            if type(key) is not str or not key.isprintable() or key.startswith("$"):
                return {"$dict": self._pairs(value, place, depth)}
        encoded = {}
        for key, member in value.items():
            as_is = member is None or type(member) is bool or (type(member) is str and member.isascii())
            if as_is and depth < _DEEPEST:  # without a call for each: a buffer's description has many of them
                encoded[key] = member
            else:
                encoded[key] = self._encode(member, f"{place}[{key!r}]", depth + 1)
        return encoded

    def _pairs(self, value: dict[Any, Any], place: str, depth: int) -> list[Any]:
        pairs = []
        for key, member in value.items():
            if not _is_key(key):
                raise TypeError(f"{place} has the key {key!r}; keys are str, int, float, bool, None, bytes and tuples")
            within = f"{place}[{key!r}]"
            pairs.append([self._encode(key, within, depth + 1), self._encode(member, within, depth + 1)])
        return pairs

    def _tensor(self, value: torch.Tensor, place: str, depth: int) -> Any:
        if value.is_nested and NESTED in self._codecs:
            return {f"${NESTED.tag}": self._encode(NESTED.pack(value), place, depth + 1)}
        if value.layout != torch.strided or value.dtype not in _TORCH_NAMES or value.is_meta or value.is_nested:
            raise TypeError(
                f"{place} is a {value.dtype} tensor with layout {value.layout} on {value.device}, "
                "which cannot be saved; only dense tensors with memory of their own can"
            )
        blob = self._encoded_arrays.add(value, value.numel() * value.element_size())
        return {"$tensor": {"dtype": _TORCH_NAMES[value.dtype], "shape": list(value.shape), **blob}}

    def _array(self, value: npt.NDArray[Any], place: str, depth: int) -> Any:
        dtype = value.dtype.str
        if _NUMPY_DTYPE.fullmatch(dtype) is None or dtype[1:] in _NOT_PORTABLE or value.dtype.fields is not None:
            raise TypeError(f"{place} is a numpy array of {value.dtype}, which cannot be saved; use numbers or text")
        return {"$array": {"dtype": dtype, "shape": list(value.shape), **self._encoded_arrays.add(value, value.nbytes)}}

    def _scalar(self, value: np.generic, place: str) -> Any:
        array = np.asarray(value)
        if array.dtype.kind in "SU" and array[()] != value:
            raise TypeError(f"{place} is a numpy string that ends in NUL, which numpy arrays drop; use a str or bytes")
        return {"$scalar": self._array(array, place, 0)["$array"]}


class _Decoder:
    def __init__(self, file: ChecksummedFile | BytesInMemory | None, codecs: tuple[ClassCodec, ...]) -> None:
        self._file, self._codecs = file, codecs
        self._depth = 0
        self._by_tag: dict[str, Callable[[Any], Any]] = {
            "$int": lambda body: int(body, 16),
            "$float": lambda body: struct.unpack(">d", bytes.fromhex(body))[0],
            "$str": lambda body: bytes.fromhex(body).decode("utf-8", "surrogatepass"),
            "$bytes": lambda body: self._take(body).numpy().tobytes(),
            "$tuple": lambda body: tuple(self.decode(member) for member in _a_list(body)),
            "$size": lambda body: torch.Size(_shape(body)),
            "$dict": lambda body: dict(self._pairs(body)),
            "$ordered": lambda body: OrderedDict(self._pairs(body)),
            "$tensor": self._tensor,
            "$array": self._array,
            "$scalar": lambda body: self._array(body)[()],
        }

    def decode(self, tree: Any) -> Any:
        if not isinstance(tree, dict | list):
            return tree
        self._depth += 1
        if self._depth > _DEEPEST_TREE:
            raise ValueError(f"a state in it is nested more than {_DEEPEST_TREE} deep")
        try:
            if isinstance(tree, list):
                return [self.decode(member) for member in tree]
            if len(tree) == 1:
                ((tag, body),) = tree.items()
                if tag.startswith("$"):
                    return self._by_tag[tag](body) if tag in self._by_tag else self._unpack(tag, body)
            decoded = {}
            for key, member in tree.items():
                decoded[key] = self.decode(member)
            return decoded
        finally:
            self._depth -= 1

    def _unpack(self, tag: str, body: Any) -> Any:
        for codec in self._codecs:
            if tag == f"${codec.tag}":
                return codec.unpack(self.decode(body))
        raise KeyError(tag)

    def _pairs(self, body: Any) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(member)) for key, member in _a_list(body)]

    def _tensor(self, body: dict[str, Any]) -> torch.Tensor:
        dtype, shape = _TORCH_DTYPES[body["dtype"]], _shape(body["shape"])
        _check_size(shape, dtype.itemsize, body["nbytes"])
        return self._take(body).view(dtype).reshape(shape)

    def _array(self, body: dict[str, Any]) -> npt.NDArray[Any]:
        name, shape = body["dtype"], _shape(body["shape"])
        if _NUMPY_DTYPE.fullmatch(name) is None:
            raise ValueError(f"a state in it has the dtype {name!r}")
        dtype = np.dtype(name)
        if not dtype.itemsize:  # numpy would make it larger, whatever the shape
            raise ValueError(f"a state in it has the dtype {name!r}, whose items have no bytes")
        _check_size(shape, dtype.itemsize, body["nbytes"])
        content: npt.NDArray[Any] = self._take(body).numpy()
        return content.view(dtype).reshape(shape) if len(content) else np.empty(shape, dtype)

    def _take(self, body: dict[str, Any]) -> torch.Tensor:
        """Reads the next bytes of the file into new memory, after it was checked that the file has as many."""
        at, nbytes = body["at"], body["nbytes"]
        if self._file is None or at != _aligned(self._file.position):
            raise ValueError("a state in it refers to bytes that are not the next ones of its file")
        padding = at - self._file.position
        if not 0 <= nbytes <= self._file.remaining - padding:
            raise ValueError(f"a state in it has {nbytes} bytes, more than are left in its file")
        if isinstance(self._file, BytesInMemory):
            self._file.skip(padding)
            return torch.from_numpy(self._file.view(nbytes))
        check_memory(nbytes, "a state in it")
        self._file.skip(padding)
        content = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._file.take(content.numpy())
        return content


def _pieces(array: Array) -> Iterator[Array]:
    """An array in parts of which none needs much memory to become contiguous, in C order."""
    large = isinstance(array, torch.Tensor) and array.numel() * array.element_size() > _MOST_COPIED
    if not isinstance(array, torch.Tensor) or not large or array.is_contiguous():
        yield array
        return
    per_part = max(1, _MOST_COPIED * len(array) // (array.numel() * array.element_size()))
    for part in torch.split(array, per_part):
        yield from _pieces(part[0] if len(part) == 1 else part)


def tensor_bytes(array: Array) -> bytes | npt.NDArray[Any]:
    if isinstance(array, bytes):
        return array
    if isinstance(array, torch.Tensor):
        if array.numel() == 0:
            return b""
        flat = array.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        if flat.stride() != (1,):  # "contiguous" with one element, but not to `view`
            flat = flat.clone(memory_format=torch.contiguous_format)
        array = flat.view(torch.uint8).numpy()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.nbytes else b""


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_key(member) for member in key)
    return type(key) in (str, int, float, bool, bytes, type(None))


def _a_list(body: Any) -> list[Any]:
    if not isinstance(body, list):
        raise ValueError("a state in it is malformed (a list is missing)")
    return body


def _shape(body: Any) -> list[int]:
    if not all(type(size) is int and size >= 0 for size in _a_list(body)):
        raise ValueError(f"a state in it has the shape {body!r}")
    return list(body)


def _check_size(shape: list[int], itemsize: int, nbytes: Any) -> None:
    if type(nbytes) is not int or math.prod(shape) * itemsize != nbytes:
        raise ValueError(f"a state in it has {nbytes!r} bytes for shape {shape} of {itemsize} bytes each")


class TensorDictCodec:
    """Plain TensorDicts, nested ones too. They are loaded on the CPU; one that had a device set has the CPU set."""

    tag = "tensordict"

    def owns(self, value: Any) -> bool:
        return type(value) is TensorDict

    def pack(self, value: Any) -> Any:
        if _exceeds_content(value.values(), value.batch_size):
            raise TypeError(f"a TensorDict of batch size {tuple(value.batch_size)} that holds nothing of it")
        return {
            "batch_size": value.batch_size,
            "device": value.device is not None,
            "names": list(value.names) if value.names and any(value.names) else None,
            "items": dict(value.items()),
        }

    def unpack(self, packed: Any) -> Any:
        if _exceeds_content(packed["items"].values(), packed["batch_size"]):
            raise ValueError(f"a TensorDict of batch size {tuple(packed['batch_size'])} holds nothing of it")
        device = torch.device("cpu") if packed["device"] else None
        return TensorDict(packed["items"], packed["batch_size"], device=device, names=packed["names"])


class LazyStackCodec:
    """Lazy stacks of TensorDicts, whose members may differ in keys and shapes."""

    tag = "lazystack"

    def owns(self, value: Any) -> bool:
        return type(value) is LazyStackedTensorDict

    def pack(self, value: Any) -> Any:
        return {"stack_dim": value.stack_dim, "members": list(value.tensordicts)}

    def unpack(self, packed: Any) -> Any:
        members, dim = packed["members"], packed["stack_dim"]
        if type(dim) is not int or not members or not all(isinstance(one, TensorDictBase) for one in members):
            raise ValueError(f"a state in it has a lazy stack of {len(members)} along dimension {dim!r}")
        if not 0 <= dim <= members[0].ndim:
            raise ValueError(f"a state in it has a lazy stack along dimension {dim} of {members[0].ndim + 1}")
        return LazyStackedTensorDict(*members, stack_dim=dim)


class NonTensorCodec:
    """`NonTensorData`: one value for a whole batch."""

    tag = "nontensor"

    def owns(self, value: Any) -> bool:
        return type(value) is NonTensorData

    def pack(self, value: Any) -> Any:
        return {"data": value.data, "batch_size": value.batch_size}

    def unpack(self, packed: Any) -> Any:
        return NonTensorData(packed["data"], batch_size=packed["batch_size"])


# A large batch size costs nothing to write, but code that iterates over the TensorDict makes an object for each step.
_MOST_EMPTY = 1 << 24


def _exceeds_content(values: Iterable[Any], batch_size: Iterable[int]) -> bool:
    return math.prod(batch_size) > max(_MOST_EMPTY, _nbytes(values))


def _nbytes(values: Iterable[Any]) -> int:
    return sum(_nbytes(v.values()) if isinstance(v, TensorDict) else _nbytes_of(v) for v in values)


def _nbytes_of(value: Any) -> int:
    if isinstance(value, LazyStackedTensorDict):
        return _nbytes(part for member in value.tensordicts for part in _parts_of(member))
    return value.nbytes if isinstance(value, torch.Tensor | np.ndarray) else 0


def _parts_of(member: Any) -> Iterable[Any]:
    return [member] if isinstance(member, LazyStackedTensorDict) else member.values()


CODECS = (TensorDictCodec(), LazyStackCodec(), NonTensorCodec())


class NonTensorStackCodec:
    """Stacks of `NonTensorData` of different values."""

    tag = "nontensorstack"

    def owns(self, value: Any) -> bool:
        return type(value) is NonTensorStack

    def pack(self, value: Any) -> Any:
        return {"stack_dim": value.stack_dim, "members": list(value.tensordicts)}

    def unpack(self, packed: Any) -> Any:
        members, dim = packed["members"], packed["stack_dim"]
        stackable = bool(members) and all(isinstance(one, NonTensorData | NonTensorStack) for one in members)
        if type(dim) is not int or not stackable:
            raise ValueError(f"a state in it has a stack of {len(members)} values along dimension {dim!r}")
        if not 0 <= dim <= members[0].ndim:
            raise ValueError(f"a state in it has a stack of values along dimension {dim} of {members[0].ndim + 1}")
        return NonTensorStack(*members, stack_dim=dim)


class NestedTensorCodec:
    """Nested tensors: jagged ones as values and offsets, others by their members."""

    tag = "nested"

    def owns(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_nested

    def pack(self, value: Any) -> Any:
        jagged = value.layout is torch.jagged
        if jagged and value.lengths() is None and value._ragged_idx == 1:
            return {"values": value.values(), "offsets": value.offsets()}
        return {"jagged": jagged, "members": list(value.unbind(0))}

    def unpack(self, packed: Any) -> Any:
        if "values" not in packed:
            layout = torch.jagged if packed["jagged"] else torch.strided
            return torch.nested.as_nested_tensor(packed["members"], layout=layout)
        values, offsets = packed["values"], packed["offsets"]
        rising = offsets.dtype in (torch.int64, torch.int32) and offsets.ndim == 1 and len(offsets) > 0
        if not rising or offsets[0] or offsets[-1] != len(values) or (offsets.diff() < 0).any():
            raise ValueError("a state in it has a nested tensor whose offsets do not rise from 0 to its values' number")
        return torch.nested.nested_tensor_from_jagged(values, offsets)


NESTED = NestedTensorCodec()
#: For what save hooks return, which may hold more than states of components.
CONTENT_CODECS = (*CODECS, NonTensorStackCodec(), NESTED)


def plain_content(value: Any) -> Any:
    """Tensors and TensorDicts of other classes as plain ones over the same memory, which is what is saved of them."""
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor)
    if pytree.is_tensorclass(value):
        return value._tensordict
    if isinstance(value, TensorDictBase):
        return TensorDict(dict(value.items()), value.batch_size, device=value.device)
    return value
