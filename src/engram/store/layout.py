"""The layout of a packed row: where each key is; made from the first batch, immutable, kept as JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

import engram._native as _native
from engram import _forms as forms
from engram import pytree
from engram.pytree import KeyPath, TreeSpec
from engram.store.row_form import following_paths, packed_offsets, stored_offsets


def _lazy_mask() -> int:
    """The bits of a dispatch key set that negative and conjugate views have and other tensors have not."""
    plain = torch.zeros(1, dtype=torch.complex64, device="cpu")
    views = (plain.conj(), plain.conj().imag)
    usual = torch._C._dispatch_keys(plain).raw_repr()
    return sum({torch._C._dispatch_keys(v).raw_repr() & ~usual for v in views})


def is_lazy(t: Tensor) -> bool:
    """`is_neg() or is_conj()`, without releasing the GIL: beside a busy thread that costs milliseconds."""
    return torch._C._dispatch_keys(t).raw_repr() & _LAZY_MASK != 0


_LAZY_MASK = 0  # not known: an older torch
try:
    _LAZY_MASK = _lazy_mask()
except AttributeError:

    def is_lazy(t: Tensor) -> bool:
        return t.is_neg() or t.is_conj()


_CPU = torch.device("cpu")

# DLPack's (type code, bits) of each dtype that a row may have.
_DLPACK: dict[torch.dtype, tuple[int, int]] = {
    torch.int8: (0, 8), torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64),
    torch.uint8: (1, 8), torch.uint16: (1, 16), torch.uint32: (1, 32), torch.uint64: (1, 64),
    torch.float16: (2, 16), torch.float32: (2, 32), torch.float64: (2, 64), torch.bfloat16: (4, 16),
    torch.complex64: (5, 64), torch.complex128: (5, 128), torch.bool: (6, 8),
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _DLPACK.items()}
_MAX_ROW_BYTES = 1 << 40  # the native core counts in 64 bits
_NAMES = {str(d).removeprefix("torch."): d for d in _DLPACK}
_LEAF = forms.record(
    {
        "path": forms.list_of(forms.text_or_integer),
        "dtype": forms.one_of(*_NAMES),
        "shape": forms.list_of(forms.integer()),
    }
)
_SAVED = forms.record(
    {"root": forms.anything, "leaves": forms.list_of(_LEAF), "row_bytes": forms.integer()}, {"hidden": forms.plain}
)


_EXCHANGE_API = getattr(Tensor, "__dlpack_c_exchange_api__", None)  # an older torch has none


def has_exchange_api() -> bool:
    """Whether this torch has the DLPack C exchange API."""
    return _EXCHANGE_API is not None


def use_torch(exchange_api: Any = _EXCHANGE_API) -> None:
    """Tells the native core how to read and make tensors: through the DLPack C exchange API, or (None) in Python."""
    _native.use_torch(Tensor, exchange_api, is_lazy, _describe, _over)
    if exchange_api is not None:
        use_dispatch_keys()


def use_dispatch_keys() -> bool:
    """Has the native core look at the dispatch keys of tensors itself; False: it cannot find them in this torch."""
    if not _LAZY_MASK:
        return False
    numbers, complex_numbers = torch.zeros(3, device="cpu"), torch.zeros(2, dtype=torch.complex64, device="cpu")
    with torch.inference_mode():
        inference = torch.zeros(2, device="cpu")
    tensors = [
        numbers, numbers[1:], numbers.detach(), torch.zeros(2, requires_grad=True, device="cpu"),
        torch.zeros(0, device="cpu"), inference, torch.zeros(2, 3, dtype=torch.int64, device="cpu").T,
        torch.from_numpy(np.zeros(2)), complex_numbers, complex_numbers.conj(),
        complex_numbers.conj().imag, torch.view_as_real(complex_numbers), torch._neg_view(numbers),
    ]  # fmt: skip
    keys = [torch._C._dispatch_keys(t).raw_repr() for t in tensors]
    return _native.use_dispatch_keys([(t, t._cdata, k) for t, k in zip(tensors, keys, strict=True)], _LAZY_MASK)


def _describe(t: Tensor) -> tuple[int, int, int, tuple[int, ...]] | None:
    """Address, DLPack dtype code and bits, shape and strides of a plain CPU tensor; None for any other."""
    code = _DLPACK.get(t.dtype)
    if code is None or t.layout is not torch.strided or t.device != _CPU:
        return None
    try:
        return t.data_ptr(), *code, (*t.shape, *t.stride())
    except RuntimeError:  # of functorch: it has no memory of its own
        return None


def _over(memory: np.ndarray[Any, Any], code: int, bits: int, shape: list[int]) -> Tensor:
    """A tensor over the bytes of an array."""
    return torch.from_numpy(memory).view(_DTYPES[code, bits]).reshape(shape)


use_torch()


class MalformedLayoutError(ValueError):
    """JSON that should describe a row layout does not."""


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """One leaf: its key, its dtype, the shape of one step, and where it starts in the row (bytes)."""

    path: KeyPath
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0
    hidden: bool = False  # it belongs to the row, and to no batch

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @functools.cached_property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


NO_TENSOR = "nothing to store: the data hold no tensor"
#: The sequence of a row that was written over another one out of turn; 0: the row has the one that its lane counts.
SEQUENCE = LeafSpec(("sequence",), torch.int64, (), hidden=True)
#: What tells where the next observation of an earlier row is, in rows that hold their observations.
WORD = LeafSpec(("word",), torch.uint8, (), hidden=True)
_MOST_IN_ROW = 512  # bytes of observations: larger ones have a column of their own


def specs_of(entries: Sequence[tuple[KeyPath, Any]], batch_dims: int) -> list[LeafSpec]:
    """The leaves of a row, from those of a batch whose first `batch_dims` dimensions are not part of a step.

    Raises:
        ValueError, TypeError: one cannot be stored, or there is none.
    """
    if not entries:
        raise ValueError(NO_TENSOR)
    leaves = []
    for path, value in entries:
        tensor = pytree.as_tensor(value, path)
        if tensor.dtype not in _DLPACK:
            raise TypeError(
                f"{pytree.format_key(path)} has dtype {tensor.dtype}; a row holds {', '.join(sorted(_NAMES))}"
            )
        if tensor.ndim < batch_dims:
            raise ValueError(
                f"{pytree.format_key(path)} has shape {list(tensor.shape)}, but the batch has {batch_dims} "
                "dimensions" + _list_advice(path)
            )
        leaves.append(LeafSpec(path, tensor.dtype, tuple(tensor.shape[batch_dims:])))
    return leaves


class LayoutState(dict[str, Any]):
    """A saved layout as JSON, and the `RowLayout` that it describes: parsed once in a load.

    `observations`: those that the storage which was saved kept once; None: it kept none so, or it is not known.
    """

    observations: ObservationKeys | None = None
    _parsed: RowLayout | None = None

    def parse(self, like: RowLayout | None = None) -> RowLayout:
        """The layout; `like` itself where that is the one, which takes no memory. Errors as `RowLayout.from_json`."""
        if self._parsed is None:
            same = like is not None and like.to_json().items() <= self.items()
            self._parsed = like if same else RowLayout.from_json(self)
        assert self._parsed is not None
        return self._parsed


class RowLayout:
    """The leaves of one stored step, packed: largest items first, so that every one can be viewed in place.

    `leaves` are those of a batch. With `carries_sequence` a row has one more, `SEQUENCE`, which no batch shows.

    Example:
        >>> layout = RowLayout.of(TensorDict({"a": torch.zeros(3, 4), "done": torch.zeros(3, 1).bool()}, [3]), 1)
        >>> [(leaf.path, leaf.offset) for leaf in layout.leaves], layout.payload_bytes
        ([(('a',), 0), (('done',), 16)], 17)
    """

    def __init__(self, root: TreeSpec, leaves: list[LeafSpec], carries_sequence: bool = False) -> None:
        if not leaves:
            raise ValueError(NO_TENSOR)
        self.take_root(root)
        #: Every leaf of a row: those of a batch, then the hidden one.
        self.stored = _packed([*leaves, SEQUENCE] if carries_sequence else leaves)
        self.leaves = [leaf for leaf in self.stored if not leaf.hidden]
        self.carries_sequence = carries_sequence
        self.paths = frozenset([leaf.path for leaf in self.leaves])  # read by each write
        self.payload_bytes = max(1, _row_bytes(self.stored))
        self.alignment = max(8, *[leaf.dtype.itemsize for leaf in self.stored])
        self.plain = root.is_plain() and _builds_tensordicts()
        self.codec = _codec(self)

    def take_root(self, root: TreeSpec) -> None:
        """Gives batches this form, which must have the same leaves."""
        self.root = root
        self.within = root.within  # read by each read of rows
        self._json: bytes | None = None

    @property
    def batch_codec(self) -> Any:
        """A codec that makes a batch of rows, in native code; None: Python has a part in it (`build`)."""
        return self.codec if self.plain and not self.within else None

    def item_codec(self, device: torch.device | None) -> Any:
        """A codec of items, which are built again as they were; their TensorDicts have this device, or None."""
        return _codec(self, {"_device": device}, of_items=True)

    def with_sequence(self) -> RowLayout:
        """The layout of the same steps, whose rows carry their own sequence."""
        return self if self.carries_sequence else RowLayout(self.root, self.leaves, carries_sequence=True)

    @property
    def sequence_offset(self) -> int | None:
        """Where a row carries its own sequence; None: it does not."""
        return self.stored[-1].offset if self.carries_sequence else None

    @classmethod
    def of(cls, batch: Any, batch_dims: int) -> RowLayout:
        """The layout of a batch whose first `batch_dims` dimensions are not part of a step."""
        root, entries = pytree.describe(batch, batch_dims)
        return cls(root, specs_of(entries, batch_dims))

    # ---- batches in ----
    def plan(
        self,
        batch: Any,
        batch_dims: int,
        time_dim: int,
        extra: tuple[str, Any] | None = None,
        codec: _native.Codec | None = None,
    ) -> Any:
        """Checks every leaf of a batch against the layout; nothing moves yet.

        Args:
            batch: the data.
            batch_dims: how many of its first dimensions are not part of a step: 0, 1 or 2.
            time_dim: which of them is time; the other one counts environments.
            extra: a key of the root and its value, the rows' own index, used instead of the batch's own.
            codec: of the rows that are written, where their leaves lie elsewhere than in packed rows (`StoredLayout`).

        Raises:
            ValueError: a leaf is missing, new, or has another shape or dtype; the message names it.
            TypeError: a leaf is no plain tensor; the message names it.
        """
        codec = self.codec if codec is None else codec
        plan = codec.check(batch, batch_dims, time_dim, extra) if self.plain else None
        if plan is not None:
            return plan
        batch = batch if extra is None else pytree.with_entry(batch, *extra)
        tensors = [tensor.contiguous() for tensor in self.fitting(batch, batch_dims)]
        plan = codec.check_list(tensors, batch_dims, time_dim)
        if plan is None:
            raise TypeError("the native core cannot read this batch; please report it with the batch's printout")
        return plan

    def fitting(self, batch: Any, batch_dims: int) -> list[Tensor]:
        """The leaves as plain CPU tensors; errors as `plan`."""
        tensors: list[Tensor] = []
        for leaf, value in zip(self.leaves, pytree.flatten(self.root, batch), strict=True):
            tensor = self._fitting(leaf, value, batch_dims)
            if tensors and tensor.shape[:batch_dims] != tensors[0].shape[:batch_dims]:
                raise ValueError(
                    f"{pytree.format_key(leaf.path)} has the batch dimensions {list(tensor.shape[:batch_dims])}, "
                    f"other leaves {list(tensors[0].shape[:batch_dims])}; nothing was written"
                )
            tensors.append(tensor)
        return tensors

    @staticmethod
    def _fitting(leaf: LeafSpec, value: Any, batch_dims: int) -> Tensor:
        tensor = pytree.as_tensor(value, leaf.path)
        if not isinstance(value, Tensor | np.ndarray | np.generic):
            tensor = _number(value, tensor, leaf)
        if tensor.dtype != leaf.dtype:
            raise ValueError(
                f"{pytree.format_key(leaf.path)} is {leaf.dtype} in this storage, found {tensor.dtype}; "
                "convert it. Nothing was written"
            )
        if tensor.ndim < batch_dims or tuple(tensor.shape[batch_dims:]) != leaf.shape:
            raise ValueError(
                f"{pytree.format_key(leaf.path)} has the shape {list(leaf.shape)} for one step in this storage, found "
                f"{list(tensor.shape[batch_dims:])} (of {list(tensor.shape)}){_dims_advice(leaf, tensor, batch_dims)}. "
                "Nothing was written"
            )
        return tensor

    # ---- rows as bytes, as they lie in a store ----
    @functools.cached_property
    def raw_codec(self) -> Any:
        """A codec of whole rows, for lists of one array: uint8 [n, payload_bytes]."""
        return _raw_codec([(self.payload_bytes, 0)])

    @functools.cached_property
    def list_codec(self) -> Any:
        """As `codec`, of lists of the leaves."""
        return _codec(self, is_list=True)

    @functools.cached_property
    def raw_leaf_codec(self) -> Any:
        """A codec of the bytes of each leaf, for lists with an array for each of `leaves`: uint8 [n, nbytes]."""
        return _raw_codec([(leaf.nbytes, leaf.offset) for leaf in self.leaves])

    def pack(self, batch: Any) -> Tensor:
        """A batch [n] as rows, uint8 [n, payload_bytes]; errors as `plan`.

        Example:
            >>> batch = TensorDict({"a": torch.tensor([1, 2]), "b": torch.tensor([True, False])}, [2])
            >>> layout = RowLayout.of(batch, 1)
            >>> layout.pack(batch).tolist()
            [[1, 0, 0, 0, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 0, 0, 0, 0]]
        """
        rows: Tensor = _native.pack(self.plan(batch, 1, 0), self.payload_bytes)
        return rows

    def unpack(self, rows: Tensor | np.ndarray[Any, Any], extra: dict[str, Any] | None = None) -> Any:
        """The batch [n] that was packed, in memory of its own, with these entries at its root besides.

        Raises:
            ValueError: the rows have another length, or their bytes do not lie side by side.
        """
        given: Any = rows
        if self.batch_codec is not None:
            return _native.unpack(self.batch_codec, given, extra)
        batch: Any = _native.unpack(self.codec, given)
        return self._with_entries(batch if self.plain else self.build(batch, (len(rows),)), extra)

    # ---- batches out ----
    def build(self, leaves: list[Tensor], lead: tuple[int, ...], extra: dict[str, Any] | None = None) -> Any:
        """The batch with these leaves, in the form of the written data; `extra`: with these entries at its root."""
        return self._with_entries(pytree.unflatten(self.root, leaves, lead, _CPU), extra)

    @staticmethod
    def _with_entries(batch: Any, extra: dict[str, Any] | None) -> Any:
        for key, value in (extra or {}).items():
            pytree.set_entry(batch, key, value)
        return batch

    # ---- on disk ----
    def to_json(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.to_bytes())  # the caller's own, to the last list
        return state

    @functools.cached_property
    def key(self) -> bytes:
        """Equal for two layouts if their rows are, byte for byte."""
        return self.to_bytes()

    def to_bytes(self) -> bytes:
        """The JSON of `to_json`."""
        if self._json is None:
            state = {
                "root": self.root.to_json(),
                "leaves": [
                    {"path": list(x.path), "dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}
                    for x in self.leaves
                ],
                **({"hidden": [SEQUENCE.path[0]]} if self.carries_sequence else {}),
                "row_bytes": self.payload_bytes,
            }
            self._json = json.dumps(state, separators=(",", ":")).encode()
        return self._json

    @classmethod
    def from_bytes(cls, saved: bytes) -> RowLayout:
        """Reads what `to_bytes` wrote; errors as `from_json`."""
        return cls.from_json(json.loads(saved))

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> RowLayout:
        """Reads what `to_json` wrote; a ValueError where it is something else."""
        try:
            forms.check(_SAVED, saved, "a layout")
            leaves = [LeafSpec(tuple(x["path"]), _NAMES[x["dtype"]], tuple(x["shape"])) for x in saved["leaves"]]
            root = TreeSpec.from_json(saved["root"])
            if not _belong_together(root, leaves) or _row_bytes(leaves) > _MAX_ROW_BYTES:
                raise MalformedLayoutError("this is no row layout: its form and its leaves do not belong together")
            layout = cls(root, leaves, carries_sequence=_is_sequence(saved.get("hidden", [])))
        except MalformedLayoutError:
            raise
        except ValueError as error:
            raise MalformedLayoutError(f"this is no row layout: {error}") from error
        if saved["row_bytes"] != layout.payload_bytes:
            raise MalformedLayoutError(
                f"the layout's leaves need {layout.payload_bytes} bytes, it says {saved['row_bytes']}"
            )
        return layout

    def differences(self, other: RowLayout) -> list[str]:
        """One line for each difference; empty where the rows are the same."""
        if other is self:
            return []
        mine, theirs = ({x.path: x for x in layout.leaves} for layout in (self, other))
        lines = [f"{pytree.format_key(p)} is missing" for p in mine if p not in theirs]
        lines += [f"{pytree.format_key(p)} is new" for p in theirs if p not in mine]
        for path in mine.keys() & theirs.keys():
            a, b = mine[path], theirs[path]
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                lines.append(
                    f"{pytree.format_key(path)} is {a.dtype} {list(a.shape)} here, {b.dtype} {list(b.shape)} there"
                )
        return lines + _constant_differences(self.root.constants(), other.root.constants())

    @functools.cached_property
    def following(self) -> dict[KeyPath, KeyPath]:
        """Each entry that rows have before and after a step, with the one after it (`following_paths`)."""
        return following_paths([leaf.path for leaf in self.leaves])

    def following_of(self, observations: ObservationKeys) -> dict[KeyPath, KeyPath]:
        """The same of these observations; KeyError where rows have none."""
        return {path: self.following[path] for path in observations.frames}

    def order_in(self, other: RowLayout) -> Any:
        """int64 [payload_bytes]: the position, in a row of `other`, of each byte of a row of this layout.

        Both have the same leaves; -1 for bytes of a sequence that only ours carry. None: they are in the same order.
        """
        theirs = {(leaf.path, leaf.hidden): leaf.offset for leaf in other.stored}
        if self.payload_bytes == other.payload_bytes and all(
            theirs.get((leaf.path, leaf.hidden)) == leaf.offset for leaf in self.stored
        ):
            return None
        order = np.full(self.payload_bytes, -1)
        for leaf in self.stored:
            at = theirs.get((leaf.path, leaf.hidden))
            if at is not None:
                order[leaf.offset : leaf.offset + leaf.nbytes] = at + np.arange(leaf.nbytes)
        return order

    def take_form(self, other: RowLayout) -> None:
        """Gives batches the form of a layout with the same leaves: its classes, and its order of keys."""
        numbers = {leaf.path: i for i, leaf in enumerate(self.leaves)}
        self.take_root(other.root.renumbered([numbers[leaf.path] for leaf in other.leaves]))


class ObservationKeys(NamedTuple):
    """Which observations a store keeps once: the next one of a row is mostly that of a row behind it.

    Attributes:
        frames: of each key's observation, how many frames it is a stack of; 1: it is no stack.
        n_steps: how far behind a row the one lies whose observation is mostly its next one.
    """

    frames: dict[KeyPath, int]
    n_steps: int = 1

    def __repr__(self) -> str:
        """Each key with its frames, as `repr` of a storage shows them."""
        keys = ", ".join(f"{pytree.format_key(path)}: {n}" for path, n in self.frames.items())
        return f"{{{keys}}}" + (f" in {self.n_steps} steps" if self.n_steps > 1 else "")


class StoredLayout:
    """Where the leaves of a row lie in a store that keeps its bytes.

    `RowLayout` is the row that batches, packed rows, checkpoints and other processes see; this is the one in memory or
    in a file.

    Args:
        logical: the rows.
        observations: those that are not in the stored row, but once beside it. For codecs they lie behind it: each
            key's, and under "next" its next one.
        apart: of a store that outlives its processes: small observations lie beside the rows, too, as each of them
            then says of which row it is.

    Example:
        >>> layout = RowLayout.of(TensorDict({"a": torch.zeros(3, 4), "done": torch.zeros(3, 1).bool()}, [3]), 1)
        >>> stored = StoredLayout(layout)
        >>> stored.row_bytes, stored.offset(layout.leaves[1])
        (17, 16)
    """

    def __init__(self, logical: RowLayout, observations: ObservationKeys | None = None, *, apart: bool = False) -> None:
        self.logical, self.observations = logical, observations
        #: Of each observation that is stored once, where the rows have its next one.
        self.following = {} if observations is None else logical.following_of(observations)
        pairs = list(self.following.items())
        #: Whether a row holds its observations, and only the next ones lie elsewhere.
        self.holds_observations = bool(pairs) and not apart and self._are_small(observations)
        self._observed = [path for pair in pairs for path in (pair[1:] if self.holds_observations else pair)]
        #: Bytes of a stored row, without its trailer, and what rows are aligned to.
        self.row_bytes, self.alignment = logical.payload_bytes, logical.alignment
        self._offsets = {(leaf.path, leaf.hidden): leaf.offset for leaf in logical.stored}
        if pairs:
            leaves = [*logical.stored, WORD] if self.holds_observations else logical.stored
            numbers = {(leaf.path, leaf.hidden): i for i, leaf in enumerate(leaves)}
            behind = [numbers[path, False] for path in self._observed]
            offsets, self.row_bytes = stored_offsets([(leaf.itemsize, leaf.nbytes) for leaf in leaves], behind)
            self.alignment = max([8, *(leaf.itemsize for i, leaf in enumerate(leaves) if i not in behind)])
            self._offsets = {leaf: offsets[i] for leaf, i in numbers.items()}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> StoredLayout:
        """The layout of the rows of a store, of which this is the JSON (`StoreSpec`); a ValueError where it is none."""
        logical, observed = RowLayout.from_json(saved), saved.get("observations")
        if observed is None:
            return cls(logical)
        try:
            found = {tuple(key["path"]): key["frames"] for key in observed["keys"]}
            keys = ObservationKeys(found, observed["n_steps"])
            stored = cls(logical, keys, apart=observed["in_row"] is None)
            same = stored.observations_json(observed["sizes"]) == observed
        except (KeyError, TypeError, AttributeError, StopIteration, ArithmeticError) as error:
            raise MalformedLayoutError(f"these are no observations of its rows: {error!r}") from error
        if not same:
            raise MalformedLayoutError("its observations are not as its rows have them")
        return stored

    def observations_json(self, sizes: Sequence[int]) -> dict[str, Any]:
        """What a store's header says of the observations that it keeps beside its rows.

        Args:
            sizes: of the memory where they are (`Store.observation_sizes`).
        """
        assert self.observations is not None
        keys = [
            {"path": list(path), "frames": n, "frame_bytes": nbytes}
            for path, (n, nbytes) in zip(self.observations.frames, self.frames, strict=True)
        ]
        in_row = None if self.in_row is None else [self.in_row[0], self.in_row[1]]
        return {"keys": keys, "n_steps": self.observations.n_steps, "in_row": in_row, "sizes": list(sizes)}

    def _leaf(self, path: KeyPath) -> LeafSpec:
        return next(leaf for leaf in self.logical.leaves if leaf.path == path)

    @functools.cached_property
    def codec(self) -> _native.Codec:
        """Reads and writes the stored leaves of batches."""
        codec: _native.Codec = _codec(self.logical, offsets=self._offsets) if self._observed else self.logical.codec
        return codec

    @functools.cached_property
    def list_codec(self) -> _native.Codec:
        """As `codec`, of lists of the leaves."""
        codec: _native.Codec = _codec(self.logical, offsets=self._offsets, is_list=True)
        return codec

    @functools.cached_property
    def raw_leaf_codec(self) -> _native.Codec:
        """A codec of the bytes of each leaf, for lists with an array for each leaf of a row: uint8 [n, nbytes]."""
        codec: _native.Codec = _raw_codec([(leaf.nbytes, self.offset(leaf)) for leaf in self.logical.leaves])
        return codec

    def _are_small(self, observations: ObservationKeys | None) -> bool:
        frames = {} if observations is None else observations.frames
        return max(frames.values()) == 1 and sum(self._leaf(path).nbytes for path in frames) <= _MOST_IN_ROW

    @property
    def in_row(self) -> tuple[int, list[int]] | None:
        """Where a row that holds its observations has its word, and each key's; None: it does not."""
        if self.observations is None or not self.holds_observations:
            return None
        return self.offset(WORD), [self.offset(self._leaf(path)) for path in self.observations.frames]

    @property
    def frames(self) -> list[tuple[int, int]]:
        """Of each key that is stored once: the frames of an observation, and the bytes of a frame."""
        frames = {} if self.observations is None else self.observations.frames
        return [(n, self._leaf(path).nbytes // n) for path, n in frames.items()]

    @functools.cached_property
    def key(self) -> bytes:
        """Equal for two layouts if their stored rows are, byte for byte."""
        frames = {} if self.observations is None else self.observations.frames
        return self.logical.key + repr((list(frames.items()), self.in_row)).encode() if frames else self.logical.key

    def leaf_at(self, offset: int) -> LeafSpec:
        """The leaf that starts there in a stored row, or behind it."""
        return next(leaf for leaf in self.logical.leaves if self.offset(leaf) == offset and leaf.nbytes)

    def offset(self, leaf: LeafSpec) -> int:
        """Where a leaf starts in a stored row (bytes)."""
        return self._offsets[leaf.path, leaf.hidden]

    def views(
        self, memory: Any, rows_offset: int, row_stride: int, lead: tuple[int, ...], steps: tuple[int, ...]
    ) -> Any:
        """Live views of stored rows: leaf [*lead, ...] with a stride of `steps` rows along each dimension of `lead`."""
        raw = torch.from_numpy(memory)
        leaves = []
        for leaf in self.logical.leaves:
            strides = [row_stride * s // leaf.itemsize for s in steps] + _contiguous(leaf.shape)
            at = (rows_offset + self.offset(leaf)) // leaf.itemsize
            leaves.append(_typed(raw, leaf.dtype).as_strided((*lead, *leaf.shape), strides, at))
        return self.logical.build(leaves, lead)


def _list_advice(path: KeyPath) -> str:
    """Advice for an entry that is a list or tuple, whose members are leaves of their own."""
    if not path or not isinstance(path[-1], int):
        return ""
    return (
        f": {pytree.format_key(path[:-1])} is a list or tuple, and each of its members is an entry of its own; for one "
        "entry with a value for each step give a tensor or an array"
    )


def _dims_advice(leaf: LeafSpec, tensor: Tensor, batch_dims: int) -> str:
    """Advice for data of which only the batch dimensions do not fit."""
    lead = tensor.ndim - len(leaf.shape)
    if lead < 0 or tuple(tensor.shape[lead:]) != leaf.shape:
        return ""
    if lead > batch_dims == 0:
        return "; a batch of steps is for extend"
    if lead == 0:
        return "; one step is for add"
    advice = f": reshape the batch, or store it with ndim={lead}" if lead > batch_dims else ""
    return f", which has {lead} batch dimensions instead of {batch_dims}{advice}"


def _is_sequence(hidden: Any) -> bool:
    """Whether the hidden leaves that a layout names are the one that there is."""
    if hidden == []:
        return False
    if hidden == [SEQUENCE.path[0]]:
        return True
    raise MalformedLayoutError(
        f"this is no row layout that this engram knows: its rows have the hidden entries {hidden!r:.200}; if a newer "
        "engram wrote them, read them with that one"
    )


def _constant_differences(mine: dict[KeyPath, Any], theirs: dict[KeyPath, Any]) -> list[str]:
    lines = [f"{pytree.format_key(p)} is missing" for p in mine if p not in theirs]
    lines += [f"{pytree.format_key(p)} is new" for p in theirs if p not in mine]
    both = [p for p in mine if p in theirs and mine[p] != theirs[p]]
    return lines + [f"{pytree.format_key(p)} is the constant {mine[p]!r} here, {theirs[p]!r} there" for p in both]


def _belong_together(root: TreeSpec, leaves: list[LeafSpec]) -> bool:
    """Whether a form has these leaves, and each (sub-)dict the batch dimensions of what is in it."""
    if root.paths() != [leaf.path for leaf in leaves]:
        return False
    for path, batch in root.batches().items():
        for leaf in leaves:
            if leaf.path[: len(path)] == path and leaf.shape[: len(batch)] != batch:
                return False
    return True


def _row_bytes(leaves: list[LeafSpec]) -> int:
    return sum([leaf.nbytes for leaf in leaves])


def _packed(leaves: list[LeafSpec]) -> list[LeafSpec]:
    """The leaves in their own order, with offsets in the order of item sizes."""
    offsets = packed_offsets([(leaf.itemsize, leaf.nbytes) for leaf in leaves])
    return [dataclasses.replace(leaf, offset=at) for leaf, at in zip(leaves, offsets, strict=True)]


def _codec(
    layout: RowLayout,
    attributes: dict[str, Any] | None = None,
    offsets: dict[tuple[KeyPath, bool], int] | None = None,
    *,
    is_list: bool = False,
    of_items: bool = False,
) -> Any:
    """A codec of rows of this layout, whose leaves may lie at other offsets."""
    at = {} if offsets is None else offsets
    specs = [(*_DLPACK[x.dtype], x.shape, at.get((x.path, x.hidden), x.offset)) for x in layout.leaves]
    tree = layout.root.native() if layout.plain and not is_list else None
    template = _template()
    if template is not None:
        template |= attributes or {}
    sequence = layout.sequence_offset
    return _native.Codec(specs, tree, TensorDict, template, torch.Size, np.ndarray, np.generic, sequence, of_items)


def _raw_codec(leaves: list[tuple[int, int]]) -> Any:
    """A codec of bytes: how many of each leaf, and where they lie in a row."""
    specs = [(*_DLPACK[torch.uint8], (nbytes,), offset) for nbytes, offset in leaves]
    return _native.Codec(specs, None, TensorDict, None, torch.Size, np.ndarray, np.generic)


def _template() -> dict[str, Any] | None:
    """The attributes of a TensorDict as its constructor sets them; None if they are not all plain values."""
    empty = TensorDict({}, batch_size=[0], device=_CPU)
    template = {sys.intern(k): v for k, v in vars(empty).items()}
    own_types = {"_tensordict": dict, "_batch_size": torch.Size}
    for name, kind in own_types.items():
        if type(template.get(name)) is not kind:
            return None
    plain = (type(None), bool, torch.device)
    return template if all(isinstance(v, plain) for k, v in template.items() if k not in own_types) else None


_fast_tensordicts: bool | None = None
_new_attributes: dict[str, Any] | None = None


def _builds_tensordicts() -> bool:
    """Whether TensorDicts built by the native core equal those that the constructor makes."""
    global _fast_tensordicts
    if _fast_tensordicts is None:
        _fast_tensordicts = _template() is not None and _same_as_public()
    return _fast_tensordicts


def tensordict_of(entries: dict[str, Any], batch_size: torch.Size, *, device: torch.device | None = _CPU) -> TensorDict:
    """A TensorDict of these CPU tensors, all of which begin with the batch size, made in a tenth of the usual time.

    Entries may be TensorDicts of the same `device`, which is the CPU or None.

    Example:
        >>> tensordict_of({"a": torch.zeros(2, 3)}, torch.Size([2]))["a"].shape
        torch.Size([2, 3])
    """
    global _new_attributes
    if not _builds_tensordicts():
        return TensorDict(entries, batch_size=batch_size, device=device)
    if _new_attributes is None:
        _new_attributes = _template()
        assert _new_attributes is not None
    tensordict = TensorDict.__new__(TensorDict)
    vars(tensordict).update(_new_attributes)
    tensordict._tensordict, tensordict._batch_size, tensordict._device = entries, batch_size, device
    return tensordict


def name_dimensions(tensordict: TensorDictBase, names: list[str | None]) -> None:
    """Sets `tensordict.names`, of the nested ones too; in a tenth of the usual time for those of `tensordict_of`.

    Example:
        >>> batch = tensordict_of({"a": torch.zeros(2, 3)}, torch.Size([2]))
        >>> name_dimensions(batch, ["time"])
        >>> batch.names
        ['time']
    """
    found: list[Any] = [tensordict]
    for one in found:  # which grows by the nested ones
        attributes = vars(one) if type(one) is TensorDict else {}
        if attributes.get("_td_dim_names", 0) is not None or len(attributes["_batch_size"]) != len(names):
            tensordict.names = names
            return
        found += [value for value in attributes["_tensordict"].values() if type(value) is not torch.Tensor]
    for one in found:
        one._td_dim_names = list(names)


def _same_as_public() -> bool:
    leaf = (2, 32, (2,), 0)
    tree = ("td", (("a", ("leaf", 0)),), ())
    codec = _native.Codec([leaf], tree, TensorDict, _template(), torch.Size, np.ndarray, np.generic)
    store = _native.Store.create(-1, 1, 4, 1, 8, 8, False, b"", bytes(16))
    data = TensorDict({"a": torch.arange(6.0, device="cpu").reshape(3, 2)}, batch_size=[3], device=_CPU)
    plan = codec.check(data, 1, 0)
    if plan is None:
        return False
    built = store.gather(codec, store.append(0, plan))[0]
    ours, public = vars(built), vars(data)
    return (
        type(built) is TensorDict
        and ours.keys() == public.keys()
        and all(type(ours[k]) is type(public[k]) for k in ours)
        and built.batch_size == data.batch_size
        and built.device == data.device
        and bool((built == data).all())
    )


def _contiguous(shape: tuple[int, ...]) -> list[int]:
    strides: list[int] = []
    step = 1
    for d in reversed(shape):
        strides.insert(0, step)
        step *= max(d, 1)
    return strides


def _typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    return raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _number(value: Any, tensor: Tensor, leaf: LeafSpec) -> Tensor:
    """A Python number in the dtype of its leaf where it fits: bools to bool, ints to ints and floats."""
    if isinstance(value, bool) != (leaf.dtype == torch.bool) or tensor.ndim != len(leaf.shape):
        return tensor
    if isinstance(value, int) and not leaf.dtype.is_floating_point and not leaf.dtype.is_complex:
        if leaf.dtype != torch.bool:
            info = torch.iinfo(leaf.dtype)
            if not info.min <= value <= info.max:
                raise ValueError(
                    f"{pytree.format_key(leaf.path)} is {leaf.dtype} in this storage, which {value} does not fit"
                )
        return torch.tensor(value, dtype=leaf.dtype, device="cpu")
    if isinstance(value, float | int) and leaf.dtype.is_floating_point:
        return torch.tensor(value, dtype=leaf.dtype, device="cpu")
    return tensor
