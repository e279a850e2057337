"""Lists whose batches are lazy stacks, and lists whose tensors are compressed."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict
from torch import Tensor

from engram._advice import advised
from engram.data.replay_buffers.storages.list import ListStorage
from engram.pytree import TreeSpec, as_tensor, describe, has_batch_size, unflatten
from engram.specs.tensors import usable_device
from engram.store.items import ItemCodec

#: Makes bytes (uint8 [n]) of a tensor.
Compress = Callable[[Tensor], Tensor]
#: Makes the tensor of these bytes again; also given `{"shape": ..., "dtype": ...}`.
Decompress = Callable[[Tensor, dict[str, Any]], Tensor]


@advised
class LazyStackStorage(ListStorage):
    """A ListStorage of TensorDicts of any shapes and keys: batches, and items of an index, are lazy stacks of them.

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
        read_to = None if device is None else usable_device(device, "device")
        collate = _LazyStack(stack_dim, read_to)
        arguments = {"stack_dim": stack_dim, "device": None if read_to is None else str(read_to)}
        self._hold_items(
            max_size, ItemCodec(check=_check_batch_size, collate=collate, joins=True), checkpointer, arguments
        )
        self.stack_dim = stack_dim
        self.device = read_to


def _check_batch_size(item: Any) -> None:
    if not has_batch_size(item):
        raise TypeError(
            f"a LazyStackStorage takes TensorDicts and tensorclasses, found a {type(item).__name__}; a "
            "ListStorage keeps any object. Nothing was written"
        )


class _LazyStack:
    """Makes a lazy stack of items, moved to a device where one is given."""

    __name__ = "lazy_stack"  # as `repr` of a buffer shows it

    def __init__(self, stack_dim: int, device: torch.device | None) -> None:
        self._stack_dim, self._device = stack_dim, device

    def __call__(self, items: list[Any]) -> Any:
        if self._device is not None:
            items = [item.to(self._device) for item in items]
        dim = self._stack_dim if self._stack_dim >= 0 else self._stack_dim + len(items[0].batch_size) + 1
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
        read_to = usable_device(device, "device")
        form = _Compression(
            compression_fn or functools.partial(_deflated, min(compression_level, 9)),
            decompression_fn or _inflated,
            read_to,
        )
        codec = ItemCodec(packs=False, keep=form.keep, read=form.read, nbytes=_compressed_bytes)
        arguments = {
            "compression_fn": compression_fn, "decompression_fn": decompression_fn,
            "compression_level": compression_level, "device": str(read_to),
        }  # fmt: skip
        self._hold_items(max_size, codec, checkpointer, arguments)
        self.device = read_to  # of what is read, unlike that of a ListStorage

    def bytes(self) -> int:
        """The bytes of the compressed items."""
        return self.nbytes


class _PackedLeaf(NamedTuple):
    content: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Packed(NamedTuple):
    """A compressed item."""

    form: TreeSpec
    leaves: list[_PackedLeaf]


class _Compression:
    """Compresses items, and makes new ones of what it made, with their tensors on a device."""

    def __init__(self, compress: Compress, decompress: Decompress, device: torch.device | None) -> None:
        self._compress, self._decompress, self._device = compress, decompress, device
        self._form: TreeSpec | None = None  # of the last item: most have the same

    def keep(self, item: Any) -> _Packed:
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

    def read(self, packed: _Packed) -> Any:
        return unflatten(packed.form, [self._read_leaf(leaf) for leaf in packed.leaves], (), None)

    def _read_leaf(self, leaf: _PackedLeaf) -> Tensor:
        content, shape, dtype = leaf
        tensor = self._decompress(content, {"shape": shape, "dtype": dtype}) if np.prod(shape) else content
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"decompression_fn gave {tensor.dtype} {list(tensor.shape)} for a tensor that was {dtype} {list(shape)}"
            )
        return tensor.to(self._device)


def _compressed_bytes(packed: _Packed) -> int:
    return sum(leaf.content.numel() * leaf.content.itemsize for leaf in packed.leaves)


def _deflated(level: int, tensor: Tensor) -> Tensor:
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return torch.frombuffer(bytearray(zlib.compress(content.data, level)), dtype=torch.uint8)


def _inflated(content: Tensor, form: dict[str, Any]) -> Tensor:
    raw = bytearray(zlib.decompress(content.numpy().tobytes()))
    return torch.frombuffer(raw, dtype=form["dtype"]).reshape(form["shape"])


__all__ = ["CompressedListStorage", "LazyStackStorage"]
