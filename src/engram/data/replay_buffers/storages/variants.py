"""Lists whose batches are lazy stacks, and lists whose tensors are compressed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict
from torch import Tensor

from engram._advice import advised
from engram.data.replay_buffers.storages.base import Checked
from engram.data.replay_buffers.storages.list import ListStorage, _Items
from engram.pytree import TreeSpec, as_tensor, describe, has_batch_size, unflatten
from engram.specs.tensors import usable_device

#: Makes bytes (uint8 [n]) of a tensor.
Compress = Callable[[Tensor], Tensor]
#: Makes the tensor of these bytes again; also given `{"shape": ..., "dtype": ...}`.
Decompress = Callable[[Tensor, dict[str, Any]], Tensor]


class LazyStackStorage(ListStorage):
    """A ListStorage of TensorDicts of any shapes and keys, whose batches are lazy stacks of them.

    Args:
        max_size: items that fit; without limit if None.
        stack_dim: the dimension of a batch along which its items lie.
        device: where a batch's items are moved to; they stay where they are if None.
        compilable: accepted, without effect.

    Raises:
        TypeError: an item that is no TensorDict or tensorclass. Nothing is written.

    Example:
        >>> rb = ReplayBuffer(storage=LazyStackStorage(10), batch_size=2)
        >>> _ = rb.extend([TensorDict({"obs": torch.zeros(n)}, []) for n in (1, 2, 3)])
        >>> rb.sample().batch_size
        torch.Size([2])
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        stack_dim: int = 0,
        device: torch.device | str | None = None,
        checkpointer: Any = None,
        compilable: bool = False,
    ) -> None:
        super().__init__(max_size, checkpointer=checkpointer, compilable=compilable)
        self.stack_dim = stack_dim
        self.device = None if device is None else usable_device(device, "device")

    def _copy_arguments(self) -> dict[str, Any]:
        device = None if self.device is None else str(self.device)
        return {**super()._copy_arguments(), "stack_dim": self.stack_dim, "device": device}

    def check(
        self, items: Any, single: bool, time_dim: int = 0, index_key: str | None = None, index: Tensor | None = None
    ) -> Checked:
        for item in items if isinstance(items, list) and not single else [items]:
            if not has_batch_size(item):
                raise TypeError(
                    f"a LazyStackStorage takes TensorDicts and tensorclasses, found a {type(item).__name__}; a "
                    "ListStorage keeps any object. Nothing was written"
                )
        return super().check(items, single, time_dim, index_key, index)

    def _default_collate(self, items: list[Any]) -> Any:
        if self.device is not None:
            items = [item.to(self.device) for item in items]
        dim = self.stack_dim if self.stack_dim >= 0 else self.stack_dim + len(items[0].batch_size) + 1
        return LazyStackedTensorDict.lazy_stack(items, dim)


@advised
class CompressedListStorage(ListStorage):
    """A ListStorage that compresses the tensors of its items, and decompresses those that are read.

    Args:
        max_size: items that fit; without limit if None.
        compression_fn: bytes (uint8 [n]) of a tensor; zlib's if None.
        decompression_fn: the tensor again, of these bytes and a dict with its `shape` and `dtype`; zlib's if None.
        compression_level: of zlib, 0 to 9; higher ones, as of other libraries, count as 9.
        device: where the tensors that are read are moved to.
        compilable: accepted, without effect.

    Raises:
        TypeError: an item with entries that are no tensors, arrays or numbers. Nothing is written.
        ValueError: what is decompressed has another shape or dtype than what was compressed.

    Example:
        >>> storage = CompressedListStorage(10)
        >>> rb = ReplayBuffer(storage=storage, batch_size=2)
        >>> _ = rb.extend(TensorDict({"pixels": torch.zeros(4, 3, 64, 64)}, [4]))
        >>> rb.sample()["pixels"].shape, storage.nbytes < 4 * 3 * 64 * 64
        (torch.Size([2, 3, 64, 64]), True)
    """

    _keeps_batches: ClassVar[bool] = False

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compression_fn: Compress | None = None,
        decompression_fn: Decompress | None = None,
        compression_level: int = 3,
        device: torch.device | str = "cpu",
        checkpointer: Any = None,
        compilable: bool = False,
    ) -> None:
        if (compression_fn is None) != (decompression_fn is None):
            raise ValueError("give compression_fn and decompression_fn, or none of them")
        if compression_level < 0:
            raise ValueError(f"compression_level must be 0 or more, got {compression_level}")
        self.compression_level = compression_level
        self._functions = compression_fn, decompression_fn
        self._compress: Compress = compression_fn or self._deflated
        self._decompress: Decompress = decompression_fn or _inflated
        self._form: TreeSpec | None = None  # of the last item: most have the same
        super().__init__(max_size, checkpointer=checkpointer, compilable=compilable)
        self.device = usable_device(device, "device")  # of what is read, unlike that of a ListStorage

    def _copy_arguments(self) -> dict[str, Any]:
        compression_fn, decompression_fn = self._functions
        return {
            **super()._copy_arguments(), "compression_fn": compression_fn, "decompression_fn": decompression_fn,
            "compression_level": self.compression_level, "device": str(self.device),
        }  # fmt: skip

    def bytes(self) -> int:
        """The bytes of the compressed items."""
        return self.nbytes

    def _deflated(self, tensor: Tensor) -> Tensor:
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        compressed = zlib.compress(content.data, min(self.compression_level, 9))
        return torch.frombuffer(bytearray(compressed), dtype=torch.uint8)

    def _no_items(self) -> _Items:
        return _CompressedItems(self._unpacked)

    def _stored_form(self, items: list[Any]) -> list[Any]:
        return [self._packed(item) for item in items]

    def _packed(self, item: Any) -> _Packed:
        form, entries = describe(item, 0)
        if form == self._form:
            form = self._form
        self._form = form
        leaves = []
        for path, value in entries:
            tensor = as_tensor(value, path)
            content = self._compress(tensor) if tensor.numel() else tensor
            leaves.append(_PackedLeaf(content, tuple(tensor.shape), tensor.dtype))
        return _Packed(form, leaves)

    def _unpacked(self, packed: _Packed) -> Any:
        return unflatten(packed.form, [self._unpacked_leaf(leaf) for leaf in packed.leaves], (), None)

    def _unpacked_leaf(self, leaf: _PackedLeaf) -> Tensor:
        content, shape, dtype = leaf
        tensor = self._decompress(content, {"shape": shape, "dtype": dtype}) if np.prod(shape) else content
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"decompression_fn gave {tensor.dtype} {list(tensor.shape)} for a tensor that was {dtype} {list(shape)}"
            )
        return tensor.to(self.device)


class _PackedLeaf(NamedTuple):
    content: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Packed(NamedTuple):
    """A compressed item."""

    form: TreeSpec
    leaves: list[_PackedLeaf]

    @property
    def nbytes(self) -> int:
        return sum(leaf.content.numel() * leaf.content.itemsize for leaf in self.leaves)


class _CompressedItems(_Items):
    """Compressed items by slot, decompressed where they are read."""

    def __init__(self, unpacked: Callable[[_Packed], Any]) -> None:
        super().__init__()
        self._unpacked = unpacked

    def __getitem__(self, index: Any) -> Any:
        item = list.__getitem__(self, index)
        return [self._unpacked(one) for one in item] if isinstance(index, slice) else self._unpacked(item)

    def at(self, slots: Iterable[int], reuse: bool = False) -> list[Any]:
        return [self[slot] for slot in slots]

    def readable(self, rows: list[_Packed]) -> list[Any]:
        return [self._unpacked(row) for row in rows[:2]]  # a border looks at two

    @property
    def nbytes(self) -> int:
        return sum(packed.nbytes for packed in list.__iter__(self))


def _inflated(content: Tensor, form: dict[str, Any]) -> Tensor:
    raw = bytearray(zlib.decompress(content.numpy().tobytes()))
    return torch.frombuffer(raw, dtype=form["dtype"]).reshape(form["shape"])


__all__ = ["CompressedListStorage", "LazyStackStorage"]
