"""Every form that a batch can have: TensorDict, dict, list, tuple, tensorclass, tensor. Nobody else walks them.

The functions are in five groups:

- **What is it?** `is_tensorclass`, `has_keys`, `has_batch_size`.
- **Keys**: `as_key`, `as_keys`, `as_path`, `key_path`, `format_key`.
- **Entries**: `get_entry`, `get_tensor`, `require_tensor`, `set_entry`, `set_existing`, `set_per_item`, `with_entry`,
  `remove_entry`, `without_entries`, `leaf_keys`.
- **Whole batches**: `map_outermost`, `move_dim`, `flatten_dims`, `expand`, `select_rows`, `stack`, `collate_items`,
  `unstack`, `clone`, `copy_containers`, `count_bytes`.
- **The form without the data**: `TreeSpec`, made by `describe`; `flatten` and `unflatten` go to a list of leaves and
  back. The native codec does the same for plain TensorDicts and dicts; this is the general way, which has the errors.

Leaves are tensors, or what becomes one: numpy arrays and Python numbers (`as_tensor`, `as_leaf`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard, Union

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor
from torch.utils.dlpack import from_dlpack

import engram._native as _native
from engram.errors import is_masked, masked_array

Key = Union[str, tuple[str, ...]]
Keys = Union[Key, Sequence[Key], None]
KeyPath = tuple[Any, ...]  # of any leaf: strings, integers for members of lists and tuples and for keys of dicts
_MAX_DEPTH = 100
#: Where samplers and collectors say which rows of a batch are steps, and not padding.
MASK: KeyPath = ("collector", "mask")
# Of the wide unsigned integers torch can do little: most code takes their bits for signed ones.
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_NODES = ("leaf", "td", "stack", "dict", "list", "tuple", "constant")


# ---- what is it? ----
_KEYED = (TensorDictBase, dict)


def is_tensorclass(obj: Any) -> bool:
    """Whether it is an instance of a tensorclass (`NonTensorData` is one)."""
    return hasattr(type(obj), "_from_tensordict")


def has_keys(batch: Any) -> TypeGuard[Any]:
    """Whether its entries are read by key: a TensorDict, a dict or a tensorclass."""
    kind = type(batch)  # first what is most common: each sample of slices asks
    return kind is TensorDict or isinstance(batch, _KEYED) or is_tensorclass(batch)


def has_batch_size(batch: Any) -> TypeGuard[Any]:
    """Whether it has a `batch_size`, so that its batch dimensions need not be guessed: a TensorDict or tensorclass."""
    kind = type(batch)
    return kind is TensorDict or isinstance(batch, TensorDictBase) or is_tensorclass(batch)


def to_tensor(value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor as it is, cast where a dtype is given; anything else as a tensor in main memory.

    `torch.as_tensor` without a device puts both on the device of `torch.set_default_device`.
    """
    if isinstance(value, Tensor):
        return value if dtype is None else value.to(dtype)
    return torch.as_tensor(value, dtype=dtype, device="cpu")


# ---- keys ----
def as_key(key: Any) -> Key:
    """A key in its one form: a string, or a tuple of two strings or more.

    Raises:
        TypeError: it is neither a string nor a tuple of strings.
    """
    path = as_path(key)
    return path[0] if len(path) == 1 else path


def as_keys(keys: Keys) -> list[Key]:
    """A list of keys from a list, one string, or None. A tuple at the root is one nested key."""
    if keys is None:
        return []
    return [as_key(keys)] if isinstance(keys, str | tuple) else [as_key(key) for key in keys]


def as_path(key: Any, argument: str = "") -> tuple[str, ...]:
    """The path of a key that a user gave: a tuple of one string or more.

    Raises:
        TypeError: it is neither a string nor a tuple of strings; the message names the argument.
    """
    path = (key,) if isinstance(key, str) else key
    if not isinstance(path, tuple) or not path or not all(isinstance(part, str) for part in path):
        prefix = f"{argument}: " if argument else ""
        raise TypeError(f"{prefix}a key is a string or a tuple of strings, got {key!r}")
    return path


def key_path(key: Key) -> tuple[str, ...]:
    """The path of a key that has been checked: a tuple."""
    return (key,) if isinstance(key, str) else key


def format_key(path: KeyPath) -> str:
    """A leaf's name as a user writes it: `'reward'`, `('next', 'reward')`, `the tensor` at the root."""
    if not path:
        return "the tensor"
    return repr(path[0]) if len(path) == 1 else repr(path)


# ---- entries ----
def get_entry(batch: Any, key: Key | KeyPath) -> Any:
    """What a batch holds under a key or path, as it is; None where it has no such entry.

    Paths lead through TensorDicts, dicts and tensorclasses by string, through lists, tuples and the members of lazy
    stacks by integer.
    """
    for part in (key,) if type(key) is str else key:
        kind = type(batch)
        if kind is TensorDict:
            batch = batch._tensordict.get(part)  # `get` takes ten times as long
        elif type(part) is int and isinstance(batch, LazyStackedTensorDict):
            batch = batch.tensordicts[part] if part < len(batch.tensordicts) else None
        elif kind is dict or has_keys(batch):
            batch = batch.get(part, None)
        elif isinstance(batch, tuple | list):
            batch = batch[part] if type(part) is int and part < len(batch) else None
        else:
            return None
    return batch


def get_tensor(batch: Any, key: Key | KeyPath) -> Any:
    """`get_entry`, a number or a numpy array as a tensor."""
    value = get_entry(batch, key)
    if isinstance(value, bool | int | float | np.ndarray | np.generic):
        return as_leaf(value, (key,) if isinstance(key, str) else key)
    return value


def require_tensor(batch: Any, key: Key, who: str) -> Any:
    """`get_tensor` of an entry that must exist; `who` needs it.

    Raises:
        KeyError: the batch has no such entry; the message names the key, and the keys that exist.
        TypeError: the batch has no keys.
    """
    value = get_tensor(batch, key) if has_keys(batch) else None
    if value is None:
        raise missing_key_error(batch, [key], who)
    return value


def steps_of_padded(batch: Any, shape: Sequence[int], key: Key | KeyPath = MASK) -> Tensor | None:
    """Which rows of a batch `[*shape]` are steps, bool `[*shape]`; None where it has no mask of padding under this key.

    >>> steps_of_padded({"collector": {"mask": torch.tensor([[True], [False]])}}, [2])
    tensor([ True, False])
    """
    mask = get_tensor(batch, key)
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.numel() == math.prod(shape)
    return mask.reshape(tuple(shape)) if is_mask else None


def missing_key_error(batch: Any, keys: Sequence[Key], who: str) -> Exception:
    """The error to raise where `who` needs one of these keys and the batch has none of them."""
    if not has_keys(batch):
        return TypeError(
            f"{who} works on keys, and a {type(batch).__name__} has none; give it TensorDicts, dicts or tensorclasses, "
            "or use a callable as the transform"
        )
    return KeyError(f"{who} needs the key {' or '.join(map(repr, keys))}; the batch has {leaf_keys(batch)}")


def set_entry(batch: Any, key: Key, value: Any) -> None:
    """Sets an entry in place. TensorDicts and dicts on the way are created where they are missing.

    Raises:
        KeyError: a tensorclass on the way has no such field.
    """
    if type(batch) is TensorDict and type(value) is Tensor and _set_plainly(batch, key, value):
        return
    *parents, last = key_path(key)
    for part in parents:
        child = batch.get(part, None) if isinstance(batch, dict) else get_entry(batch, part)
        if child is None and isinstance(batch, dict):
            child = batch[part] = {}
        if child is None or (isinstance(batch, TensorDictBase) and isinstance(child, TensorDictBase)):
            break  # a TensorDict's own `set` takes the rest of the path
        batch, key = child, key_path(key)[1:]
    if isinstance(batch, dict):
        batch[last] = value
        return
    first = key_path(key)[0]
    if is_tensorclass(batch) and first not in _field_names(batch):
        raise KeyError(f"{type(batch).__name__} has no field {first!r}; its fields are {_field_names(batch)}")
    batch.set(key, value)


def _set_plainly(batch: Any, key: Key, value: Tensor) -> bool:
    """Sets an entry that a TensorDict takes as it is, which `set` takes ten times as long for; False: it may not."""
    *parents, last = key_path(key)
    for part in parents:
        if type(batch) is not TensorDict:
            return False
        batch = batch._tensordict.get(part)
    if type(batch) is not TensorDict or type(last) is not str or batch.is_locked:
        return False
    size, device = batch._batch_size, batch._device
    if value.shape[: len(size)] != size or (device is not None and value.device != device):
        return False
    batch._tensordict[last] = value
    return True


def as_arrays(batch: Any, path: KeyPath = ()) -> Any:
    """A batch with a dict for each TensorDict and tensorclass, and an array in the memory of each tensor.

    Tensors of other devices are copied; what is no tensor stays as it is.

    Raises:
        TypeError: a tensor has a dtype that numpy does not have.
    """
    if isinstance(batch, Tensor):
        if batch.dtype is torch.bfloat16:
            raise no_array_error(path)
        return batch.detach().cpu().resolve_conj().resolve_neg().numpy()
    if isinstance(batch, NonTensorData | NonTensorStack):
        return batch.tolist()
    if isinstance(batch, dict) or has_keys(batch):
        return {key: as_arrays(batch.get(key), (*path, key)) for key in batch.keys()}  # noqa: SIM118 -- a TensorDict iterates over rows
    if isinstance(batch, tuple | list):
        return _rebuilt(batch, [as_arrays(part, (*path, i)) for i, part in enumerate(batch)])
    return batch


def no_array_error(path: KeyPath) -> TypeError:
    """The error for an entry without a dtype of numpy's."""
    return TypeError(
        f"{format_key(path)} is torch.bfloat16, which numpy does not have: sample tensors (as_numpy=False), or cast "
        "it, for example by a DTypeCastTransform(torch.bfloat16, torch.float32)"
    )


def with_entry(batch: Any, key: str, value: Any) -> Any:
    """A shallow copy of a TensorDict, dict or tensorclass with one more entry; the caller's object stays as it is."""
    twin = batch.copy()
    set_entry(twin, key, value)
    return twin


def set_existing(rows: Any, key: Key, value: Any) -> None:
    """Sets an entry that a batch, or each of a list of items, has already, in place: to new values or one for all.

    Raises:
        KeyError: there is no such entry.
        ValueError: the value has another shape.
    """
    if isinstance(rows, list):
        shape = (len(rows), *np.shape(require_tensor(rows[0], key, "setting an entry"))) if rows else (0,)
        each = _expanded(value, shape, key)
        for row, own in zip(rows, each, strict=True):
            set_existing(row, key, own)
        return
    old = require_tensor(rows, key, "setting an entry")
    set_entry(rows, key, _expanded(value, tuple(old.shape), key))


def _expanded(value: Any, shape: tuple[int, ...], key: Key) -> Tensor:
    tensor = as_leaf(value, key_path(key))
    try:
        return tensor.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"{key!r} is {list(shape)} in the stored steps, found {list(tensor.shape)}; nothing was changed"
        ) from None


def set_per_item(batch: Any, key: Key | KeyPath, value: Any, lead: int = 1) -> None:
    """Sets an entry `[*lead, ...]` in place, a value for each item.

    Items with batch dimensions of their own (whole trajectories) get it once for each of their steps.
    """
    if isinstance(batch, LazyStackedTensorDict) and lead == 1 and len(value) == len(batch.tensordicts):
        for item, own in zip(batch.tensordicts, value, strict=True):  # whose dimensions may differ
            set_per_item(item, key, own, 0)
        return
    if isinstance(value, Tensor) and not isinstance(batch, dict) and len(batch.batch_size) > lead:
        value = repeat_per_step(value, lead, tuple(batch.batch_size[lead:]))
    set_entry(batch, key, value)


def repeat_per_step(value: Tensor, lead: int, inner: tuple[int, ...]) -> Tensor:
    """A value for each item, `[*lead, ...]`, for each of the item's steps: `[*lead, *inner, ...]`, in new memory."""
    first, rest = value.shape[:lead], value.shape[lead:]
    return value.reshape((*first, *(1 for _ in inner), *rest)).expand((*first, *inner, *rest)).contiguous()


def remove_entry(batch: Any, key: Key) -> None:
    """Removes an entry in place.

    Raises:
        TypeError: a tensorclass cannot lose a field.
    """
    *parents, last = key_path(key)
    for part in parents:
        batch = batch[part] if isinstance(batch, dict) else batch.get(part)
    if is_tensorclass(batch):
        raise TypeError(f"{type(batch).__name__} cannot lose its field {last!r}; store TensorDicts instead")
    batch.pop(last)


def without_entries(batch: Any, paths: Sequence[KeyPath]) -> Any:
    """The batch without the entries at these paths, and groups that have no others; the caller's object stays as it is.

    Raises:
        ValueError: an entry does not exist.
        TypeError: the batch is no TensorDict or dict, which could lose an entry.
    """
    for path in paths:
        if get_entry(batch, path) is None:
            raise ValueError(f"exclude names {format_key(path)}, which the steps do not have")
    if not paths:
        return batch
    if isinstance(batch, TensorDictBase):
        left = batch.exclude(*paths)
        emptied = [path[:depth] for path in paths for depth in range(1, len(path)) if _is_empty(left, path[:depth])]
        return left.exclude(*emptied) if emptied else left
    if not isinstance(batch, dict):
        raise TypeError(f"exclude is for TensorDicts and dicts; the steps are a {type(batch).__name__}")
    inner = {key: [path[1:] for path in paths if path[0] == key] for key in batch}
    kept = {key: without_entries(value, inner[key]) for key, value in batch.items() if () not in inner[key]}
    return {key: value for key, value in kept.items() if not inner[key] or not _is_empty(kept, (key,))}


def _is_empty(batch: Any, path: KeyPath) -> bool:
    """Whether nothing but groups without entries is below a path."""
    group = get_entry(batch, path)
    return group is not None and all(has_keys(part) and _is_empty(group, (key,)) for key, part in _root_items(group))


def leaf_keys(batch: Any) -> list[Key]:
    """The keys of all leaves of a TensorDict, dict or tensorclass; entries that are None are left out."""
    keys: list[Key] = []
    for key, value in _root_items(batch):
        if has_keys(value):
            keys += [(key, *key_path(inner)) for inner in leaf_keys(value)]
        elif value is not None:
            keys.append(key)
    return keys


def _root_items(batch: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(batch, LazyStackedTensorDict):  # whose members' values may not stack
        return ((key, batch.tensordicts[0].get(key, None)) for key in batch.keys())  # noqa: SIM118
    names = batch.keys() if isinstance(batch, TensorDictBase | dict) else _field_names(batch)
    return ((key, batch.get(key, None)) for key in names)


def _field_names(batch: Any) -> list[str]:
    """The fields of a tensorclass."""
    return [field.name for field in dataclasses.fields(batch)]


# ---- whole batches ----
def map_outermost(batch: Any, on_leaf: Callable[[Tensor], Any], on_batch: Callable[[Any], Any] | None = None) -> Any:
    """A new batch: `on_batch` of every outermost TensorDict or tensorclass, `on_leaf` of every other leaf.

    dicts, lists, tuples and named tuples are rebuilt around the results. `on_batch` is `on_leaf` if None, for what
    tensors and TensorDicts have in common (`flatten`, `expand`, indexing).

    Raises:
        TypeError: a leaf is no tensor, array or number; the message names it.
    """
    return _map(batch, on_leaf, on_batch or on_leaf, ())


def _map(batch: Any, on_leaf: Callable[[Tensor], Any], on_batch: Callable[[Any], Any], path: KeyPath) -> Any:
    if isinstance(batch, Tensor):
        return on_leaf(batch)
    if has_batch_size(batch):
        return on_batch(batch)
    if isinstance(batch, dict):
        return {k: _map(v, on_leaf, on_batch, (*path, k)) for k, v in batch.items()}
    if isinstance(batch, list | tuple):
        return _rebuilt(batch, [_map(v, on_leaf, on_batch, (*path, i)) for i, v in enumerate(batch)])
    return on_leaf(as_leaf(batch, path))


def part_of(batch: Any, dim: int, start: int, stop: int) -> Any:
    """A view of a batch of any form, or of a list of items, from `start` to `stop` along a dimension."""
    if type(batch) is list:
        return batch[start:stop]
    index = (*[slice(None)] * dim, slice(start, stop))
    return map_outermost(batch, lambda part: part[index])


def take_rows(batch: Any, rows: Tensor) -> Any:
    """A copy of certain rows, int64 [n] from 0 on, of a batch `[m, *]` of any form.

    It is what indexing gives, without torch's kernel, which copies element by element.
    """
    return map_outermost(batch, lambda leaf: leaf.index_select(0, rows), lambda part: _take_rows(part, rows))


def _take_rows(batch: Any, rows: Tensor) -> Any:
    leaves: list[Tensor] = []
    taken = _native.take_rows(leaves, rows) if _lists_leaves(batch, leaves) else None
    return batch[rows] if taken is None else _of_leaves(batch, iter(taken), len(rows))


#: The attributes of a TensorDict that has no names, no lock and nothing else that its rows could not have.
_PLAIN_ATTRIBUTES = {"_tensordict", "_batch_size", "_device", "_td_dim_names"}


def _lists_leaves(batch: Any, leaves: list[Tensor]) -> bool:
    """Appends the leaves of a plain TensorDict; False where it has other entries than tensors without gradients."""
    if type(batch) is not TensorDict or vars(batch).keys() != _PLAIN_ATTRIBUTES or batch._td_dim_names is not None:
        return False
    for value in batch._tensordict.values():
        if type(value) is not Tensor:
            if not _lists_leaves(value, leaves):
                return False
        elif value.requires_grad:
            return False
        else:
            leaves.append(value)
    return True


def _of_leaves(batch: TensorDict, leaves: Iterator[Tensor], n: int) -> TensorDict:
    """A plain TensorDict like this one with other leaves, of n rows: indexing makes it in ten times the time."""
    made: TensorDict = TensorDict.__new__(TensorDict)
    entries = {
        key: _of_leaves(value, leaves, n) if type(value) is TensorDict else next(leaves)
        for key, value in batch._tensordict.items()
    }
    vars(made).update(vars(batch), _tensordict=entries, _batch_size=torch.Size((n, *batch.batch_size[1:])))
    return made


def _rebuilt(like: Any, values: list[Any]) -> Any:
    """A list, tuple or named tuple of the class of `like` with these members."""
    kind = type(like)
    return kind._make(values) if _is_named(like) else kind(values)


def _is_named(item: Any) -> bool:
    """Whether it is a named tuple."""
    return isinstance(item, tuple) and hasattr(item, "_fields")


def pinned(batch: Any) -> Any:
    """The batch with its tensors in page-locked memory; those on a GPU, and what is no tensor, as they are."""
    if isinstance(batch, Tensor):
        return batch.pin_memory() if batch.device.type == "cpu" else batch
    if has_batch_size(batch):
        return batch.apply(pinned)
    if isinstance(batch, dict):
        return {k: pinned(v) for k, v in batch.items()}
    if isinstance(batch, list | tuple):
        return _rebuilt(batch, [pinned(v) for v in batch])
    return batch


def move_dim(batch: Any, source: int, target: int) -> Any:
    """The batch with one of its batch dimensions in another place, as `torch.movedim` has it: time, above all."""
    if source == target:
        return batch

    def permuted(td: Any) -> Any:
        order = list(range(td.batch_dims))
        order.insert(target, order.pop(source))
        return td.permute(*order)

    return map_outermost(batch, lambda leaf: leaf.movedim(source, target), permuted)


def flatten_dims(batch: Any, first: int, last: int) -> Any:
    """The batch with the dimensions `first` to `last`, both included, made one."""
    return batch if first >= last else map_outermost(batch, lambda part: part.flatten(first, last))


def expand(batch: Any, n: int) -> Any:
    """One step as a batch of n equal ones, without copies."""
    return map_outermost(batch, lambda part: part.expand(n, *part.shape))


def select_rows(rows: Any, mask: Tensor) -> Any:
    """The rows of a batch, or of a list of items, where the mask (bool [n]) is true.

    Raises:
        ValueError: the batch does not have one row for each entry of the mask.
        TypeError: it has no rows.
    """
    if isinstance(rows, dict):
        return {k: select_rows(v, mask) for k, v in rows.items()}
    if isinstance(rows, tuple):
        return _rebuilt(rows, [select_rows(v, mask) for v in rows])
    if not isinstance(rows, list) and not shape_of(rows):
        raise TypeError(
            f"{len(mask)} steps are indexed, the value is a {type(rows).__name__} ({rows!r:.80}) without rows; nothing "
            "was written"
        )
    if len(rows) != len(mask):
        raise ValueError(f"{len(mask)} steps are indexed, the values have {len(rows)}; nothing was written")
    if isinstance(rows, list):
        return [row for row, is_selected in zip(rows, mask.tolist(), strict=True) if is_selected]
    return rows[mask.numpy() if isinstance(rows, np.ndarray) else mask]


def stack(items: list[Any], dim: int) -> Any:
    """A list of items as one batch with a new dimension `dim`; all items have the form, shapes and dtypes of the first.

    Raises:
        ValueError: the list is empty.
        RuntimeError: its items differ; the message names the item and the leaf.
    """
    if not items:
        raise ValueError("nothing to add: the list is empty")
    root, first = describe(items[0], 0)
    if has_batch_size(items[0]):
        for i, item in enumerate(items[1:], 1):
            _flatten_as_first(root, item, i)
        try:
            return torch.stack(items, dim)
        except RuntimeError as error:
            sizes = [tuple(item.batch_size) for item in items]
            _stack_leaves(root, first, items)  # which names the item and the leaf
            raise RuntimeError(f"the list does not stack: {error}; batch sizes are {sizes!r:.80}") from error
    return unflatten(root, _stack_leaves(root, first, items, dim), (len(items),), None)


def _stack_leaves(root: TreeSpec, first: list[tuple[KeyPath, Any]], items: list[Any], dim: int = 0) -> list[Tensor]:
    columns = [[as_tensor(value, path)] for path, value in first]
    for i, item in enumerate(items[1:], 1):
        for column, (path, _), value in zip(columns, first, _flatten_as_first(root, item, i), strict=True):
            tensor = as_tensor(value, path)
            if tensor.shape != column[0].shape or tensor.dtype != column[0].dtype:
                raise RuntimeError(
                    f"the list does not stack: {format_key(path)} is {tensor.dtype} {list(tensor.shape)} in item {i}, "
                    f"{column[0].dtype} {list(column[0].shape)} in item 0; nothing was written. A ListStorage keeps "
                    "items of any shape"
                )
            column.append(tensor)
    return [torch.stack(column, dim) for column in columns]


def _flatten_as_first(root: TreeSpec, item: Any, i: int) -> list[Any]:
    """The leaves of item i of a list, which has the form of the first."""
    try:
        return flatten(root, item)
    except ValueError as error:
        raise RuntimeError(f"the list does not stack: item {i} differs from item 0: {error}") from error


def collate_items(items: list[Any]) -> Any:
    """A list of items as one batch with a new first dimension, as far as they stack.

    Tensors, TensorDicts and tensorclasses are stacked; dicts, tuples, and lists of one length entry by entry; numbers
    and numpy arrays become tensors. Of anything else it is a list. Devices and gradients stay.

    Raises RuntimeError, with the first difference, for items of which only some can be stacked so.
    """
    return _collated(items, ())


def _collated(items: list[Any], path: KeyPath) -> Any:
    first = items[0]
    if isinstance(first, Tensor) or has_batch_size(first):
        try:
            return torch.stack(items)
        except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise _stacking_error(items, path) or error from None
    if isinstance(first, dict):
        if any(not isinstance(item, dict) or item.keys() != first.keys() for item in items):
            raise _stacking_error(items, path) or AssertionError("dicts that differ")
        return {k: _collated([item[k] for item in items], (*path, k)) for k in first}
    if isinstance(first, tuple):
        if any(not isinstance(item, tuple) or len(item) != len(first) for item in items):
            raise _stacking_error(items, path) or AssertionError("tuples that differ")
        return tuple(_collated([item[i] for item in items], (*path, i)) for i in range(len(first)))
    if isinstance(first, list) and all(isinstance(x, list) and len(x) == len(first) for x in items):
        return [_collated([item[i] for item in items], (*path, i)) for i in range(len(first))]
    if isinstance(first, bool | int | float) or type(first).__module__ == "numpy":
        try:
            return to_tensor(items)
        except (RuntimeError, TypeError, ValueError) as error:
            raise _stacking_error(items, path) or error from None
    if is_masked(first):
        raise masked_array("the data")
    return list(items)


def _stacking_error(items: list[Any], path: KeyPath) -> RuntimeError | None:
    """The error for items that do not stack, with the first difference; None where there is none to be seen."""
    forms = [_forms(item, path) for item in items]
    for i, form in enumerate(forms):
        for key in {**forms[0], **form}:
            if form.get(key) != forms[0].get(key):
                entry = f"entry {format_key(key)}" if key else "it"
                return RuntimeError(
                    f"the items of this batch do not stack: {entry} is {form.get(key, 'missing')} in item {i}, and "
                    f"{forms[0].get(key, 'missing')} in item 0. Give the buffer collate_fn=list for a list of items, "
                    "or a collate_fn that pads them; TensorDicts of any shapes and keys are stored, and sampled as "
                    "lazy stacks, by a LazyStackStorage"
                )
    return None


def _forms(value: Any, path: KeyPath) -> dict[KeyPath, str]:
    """What each leaf of an item is, by its path."""
    entries: list[tuple[Any, Any]]
    if has_batch_size(value):
        entries = list(tensordict_items(value if isinstance(value, TensorDictBase) else value.to_tensordict()))
    elif isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, tuple):
        entries = list(enumerate(value))
    elif isinstance(value, Tensor | np.ndarray):
        return {path: f"{value.dtype} {list(value.shape)}"}
    else:
        return {path: f"a {type(value).__name__}"}
    inner: dict[KeyPath, str] = {path: f"a {type(value).__name__} of {len(entries)} entries"} if path else {}
    for key, entry in entries:
        inner |= _forms(entry, (*path, key))
    return inner


def unstack(batch: Any, dim: int) -> list[Any]:
    """The items of a batch along the dimension `dim`; of a list its members.

    dicts and tuples are taken apart entry by entry, and each item is such a dict or tuple.

    Raises:
        ValueError: the parts have different lengths, or a part is a single item.
        TypeError: a part is no batch at all.
    """
    if isinstance(batch, list):
        return batch
    if isinstance(batch, Tensor) or has_batch_size(batch):
        if not batch.shape:
            raise ValueError(
                f"extend takes a batch, found a single {type(batch).__name__}; use add. Nothing was written"
            )
        return list(batch.unbind(dim))
    if isinstance(batch, dict | tuple):
        parts = dict(batch if isinstance(batch, dict) else enumerate(batch))
        columns = {k: unstack(v, dim) for k, v in parts.items()}
        sizes = {k: len(v) for k, v in columns.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the parts of the batch have different lengths: {sizes}; nothing was written")
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows] if isinstance(batch, dict) else list(rows)
    try:
        return list(batch)
    except TypeError:
        if (foreign := _array_of(batch)) is not None:
            return unstack(to_tensor(foreign), dim)
        raise TypeError(
            f"extend takes a batch or a list of items, found a {type(batch).__name__} ({batch!r:.80}); use add. "
            "Nothing was written"
        ) from None


def copy_containers(batch: Any) -> Any:
    """New TensorDicts, dicts and tensorclasses with the same leaves: entries may then be set, the caller's stay."""
    if isinstance(batch, dict):
        return {k: copy_containers(v) for k, v in batch.items()}
    return batch.clone(recurse=False) if has_batch_size(batch) else batch


_IMMUTABLE = (int, float, str, bytes, type(None))


def clone(item: Any) -> Any:
    """A copy of an item's tensors, arrays and containers, without gradients; other objects are the same ones.

    Raises:
        TypeError: it holds a numpy masked array, whose mask would be lost.
    """
    kind = type(item)
    if kind is np.ndarray:  # the cheapest tests first: `isinstance` of a tensor runs Python code
        return item.copy()
    if kind is TensorDict and not _may_have_graph(item):
        return item.clone()
    if kind is not Tensor and isinstance(item, _IMMUTABLE):
        return item
    if isinstance(item, Tensor):
        return item.detach().clone()
    if has_batch_size(item):
        if not _may_have_graph(item):
            return item.clone()
        with torch.no_grad():
            return item.clone()
    if kind is dict:
        return {k: clone(v) for k, v in item.items()}
    if kind in (list, tuple):
        return kind(clone(v) for v in item)
    if kind in (OrderedDict, defaultdict, deque) or _is_named(item):
        return _cloned_container(item)
    if is_masked(item):
        raise masked_array("an entry of the data")
    if isinstance(item, np.ndarray | np.generic) and kind.__module__ == "numpy":
        return item.copy()
    return item


def _cloned_container(item: Any) -> Any:
    """A named tuple, or a container of the standard library whose constructor takes more than its members."""
    if isinstance(item, tuple):
        return _rebuilt(item, [clone(value) for value in item])
    twin = copy.copy(item)
    for at, value in list(item.items() if isinstance(item, dict) else enumerate(item)):
        twin[at] = clone(value)
    return twin


def _may_have_graph(item: Any) -> bool:
    """Whether a copy of a TensorDict or tensorclass might keep what its values were computed from."""
    if type(item) is not TensorDict:
        return True
    for value in item._tensordict.values():
        if type(value) is Tensor:  # `isinstance` would run Python code for anything else
            if value.requires_grad:
                return True
        elif _may_have_graph(value):
            return True
    return False


def count_bytes(item: Any) -> int:
    """The bytes of all tensors of an item; what is in other objects is not counted."""
    if isinstance(item, Tensor):
        return item.numel() * item.itemsize
    if isinstance(item, TensorDictBase | dict):
        return sum(count_bytes(v) for v in item.values())
    if is_tensorclass(item):
        return count_bytes(item._tensordict)
    if isinstance(item, list | tuple):
        return sum(count_bytes(v) for v in item)
    return 0


# ---- leaves ----
def as_leaf(value: Any, path: KeyPath = ()) -> Tensor:
    """A tensor as it is, on its device and with its gradient; a number or a numpy array as `as_tensor` makes one."""
    return value if isinstance(value, Tensor) else as_tensor(value, path)


def as_tensor(value: Any, path: KeyPath) -> Tensor:
    """A plain strided CPU tensor with the value of a leaf; a TypeError names a leaf that has none.

    Conjugate and negative views are resolved, gradients detached, other devices copied, numpy arrays and Python
    numbers converted.
    """
    if isinstance(value, Tensor):
        return _plain(value, path)
    if isinstance(value, np.ndarray | np.generic):
        if is_masked(value):
            raise masked_array(format_key(path))
        if value.dtype.hasobject or value.dtype.kind in "USMmV":
            raise TypeError(
                f"{format_key(path)} is a numpy array of {value.dtype}, which no tensor holds; use a ListStorage"
            )
        array = np.ascontiguousarray(value).reshape(np.shape(value))
        if min(array.strides, default=0) < 0:  # of a length of 1, where it counts as contiguous; torch takes none
            array = array.copy()
        native = array.astype(array.dtype.newbyteorder("="), copy=not array.flags.writeable)
        # C's `long long` is an int64 by another name, which torch does not know.
        return torch.from_numpy(native.view(f"{native.dtype.kind}{native.dtype.itemsize}"))
    if isinstance(value, bool | int | float | complex):
        return to_tensor(value)
    foreign = _array_of(value)
    if foreign is not None:
        return as_tensor(foreign, path)
    raise TypeError(
        f"{format_key(path)} is a {type(value).__name__}; a storage of tensors takes tensors, numpy arrays, numbers, "
        "and TensorDicts, dicts, lists and tuples of them. A ListStorage keeps any object"
    )


def shape_of(leaf: Any) -> tuple[int, ...]:
    """The shape of a leaf; of an array of another library, of what it gives."""
    if isinstance(leaf, Tensor | np.ndarray):
        return leaf.shape
    foreign = _array_of(leaf)
    return np.shape(leaf) if foreign is None else foreign.shape


def _array_of(value: Any) -> Tensor | NDArray[Any] | None:
    """An array of another library, as JAX's, by `__dlpack__` or `__array__`; None: it has neither. Memory is shared."""
    if isinstance(value, type):
        return None
    if hasattr(value, "__dlpack__"):
        with contextlib.suppress(BufferError, RuntimeError, TypeError):  # a dtype that torch lacks, memory elsewhere
            array: Tensor = from_dlpack(value)
            return array
    return np.asarray(value) if hasattr(value, "__array__") else None


def _plain(t: Tensor, path: KeyPath) -> Tensor:
    kind = _unsupported_kind(t)
    if kind is not None:
        raise TypeError(f"{format_key(path)} is a {kind} tensor; a storage takes dense tensors with data of their own")
    t = t.detach()
    if t.device.type != "cpu":
        t = t.cpu()
    t = t.resolve_conj().resolve_neg()
    if type(t) is not Tensor:
        t = t.as_subclass(Tensor)  # a Parameter, a MemoryMappedTensor: plain memory behind another name
    if torch._is_zerotensor(t):
        t = t.clone()
    return t


def _unsupported_kind(t: Tensor) -> str | None:
    """What keeps a tensor from having plain memory of its own; None: nothing."""
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        return "functorch (vmap, grad)"
    if t.is_nested:
        return "nested"
    if t.layout is not torch.strided:
        return str(t.layout).removeprefix("torch.")
    if t.is_quantized:
        return "quantised"
    if t.device.type == "meta":
        return "meta"
    if t.numel() and t.untyped_storage().nbytes() == 0 and not torch._is_zerotensor(t):
        return "freed"
    if type(t).__name__ in ("FakeTensor", "FunctionalTensor") or type(t).__torch_dispatch__ is not _NO_DISPATCH:
        return type(t).__name__
    return None


_NO_DISPATCH = Tensor.__torch_dispatch__


# ---- the form without the data ----
@dataclasses.dataclass
class TreeSpec:
    """The form of a batch without its data: a small tree over numbered leaves.

    It is made from the first batch, is JSON-serialisable, and says how later batches become a list of leaves and back.
    `kind` is leaf, td, stack, dict, list, tuple, class or constant. A stack is a lazy one whose members, which differ
    in shapes or keys, are its children; it has a dimension `dim` of its own batch dimensions.
    """

    kind: str
    leaf: int = -1
    keys: tuple[Any, ...] = ()  # strings; of a dict also integers
    children: tuple[TreeSpec, ...] = ()
    batch: tuple[int, ...] = ()  # batch dimensions that a TensorDict has beyond those of the whole batch
    dim: int = 0  # which of these a lazy stack is along
    constant: Any = None
    cls: type | None = None  # a tensorclass: only in the process that wrote, never named in a file

    def to_json(self) -> dict[str, Any]:
        if self.kind == "class":
            return self.children[0].to_json()
        if self.kind == "leaf":
            return {"kind": "leaf", "leaf": self.leaf}
        if self.kind == "constant":
            return {"kind": "constant", "constant": self.constant}
        children = list(map(TreeSpec.to_json, self.children))
        state = {"kind": self.kind, "keys": list(self.keys), "children": children, "batch": [*self.batch]}
        return {**state, "dim": self.dim} if self.kind == "stack" else state

    @classmethod
    def from_json(cls, state: dict[str, Any], depth: int = 0) -> TreeSpec:
        """Reads what `to_json` wrote; ValueError where it is something else that JSON can be."""
        kind = state.get("kind") if isinstance(state, dict) else None
        if kind not in _NODES:
            raise ValueError(f"a layout has nodes of the kinds {', '.join(_NODES)}; found {kind!r:.80}")
        if depth > _MAX_DEPTH:
            raise ValueError(f"a layout has a form of at most {_MAX_DEPTH} levels")
        saved: dict[str, Any] = {"children": (), "keys": (), "leaf": -1, "batch": (), "dim": None, **state}
        below, keys, leaf, batch, dim = [saved[name] for name in ("children", "keys", "leaf", "batch", "dim")]
        key_types = {str, int} if kind == "dict" else {str}
        if not {type(below), type(keys), type(batch)} <= {list, tuple} or not {*map(type, keys)} <= key_types:
            raise ValueError(f"a {kind} of a layout has the keys {keys!r:.80} and the sizes {batch!r:.80}")
        if {*map(type, (leaf, *batch))} != {int} or min(leaf + 1, *batch, 0) < 0:
            raise ValueError(f"a {kind} of a layout has the number {leaf!r:.80}, the sizes {batch!r:.80}")
        children = tuple(map(functools.partial(cls.from_json, depth=depth + 1), below))
        keys, batch, has_keys = tuple(keys), tuple(batch), kind in ("td", "dict")
        fits = len(keys) == (len(children) if has_keys else 0) and len(set(keys)) == len(keys)
        if not fits or (children and kind in ("leaf", "constant")):
            raise ValueError(f"a {kind} of a layout has the keys {keys[:9]} for {len(children)} entries")
        if kind != "stack":
            dim = 0
        else:
            fits = type(dim) is int and 0 <= dim < len(batch) and batch[dim] == len(children) > 0
            within = (*batch[:dim], *batch[dim + 1 :]) if fits else ()
            if not fits or any(c.kind not in ("td", "stack") or c.batch != within for c in children):
                raise ValueError(
                    f"a stack of a layout has {len(children)} members, the sizes {batch!r}, the dim {dim!r}"
                )
        return cls(kind, leaf, keys, children, batch, dim, state.get("constant"))

    def paths(self) -> list[KeyPath]:
        """The path of each leaf, by its number; ValueError where the numbers are not 0 to n - 1."""
        leaves = [(node.leaf, path) for node, path in self._nodes() if node.kind == "leaf"]
        leaves.sort(key=operator.itemgetter(0))
        if [number for number, _ in leaves] != list(range(len(leaves))):
            raise ValueError("the leaves of a layout's form are not numbered from 0 on")
        return [path for _, path in leaves]

    def batches(self) -> dict[KeyPath, tuple[int, ...]]:
        """By path, the batch dimensions that TensorDicts have beyond those of the whole batch, where they have more.

        Those of a stack are its members' and their number.
        """
        return {path: node.batch for node, path in self._nodes() if node.batch and node.kind != "stack"}

    def constants(self) -> dict[KeyPath, Any]:
        """By path, the entries that are constants instead of tensors."""
        return {path: node.constant for node, path in self._nodes() if node.kind == "constant"}

    def empty_groups(self) -> list[KeyPath]:
        """The paths of TensorDicts and dicts without entries."""
        return [path for node, path in self._nodes() if node.kind in ("td", "dict") and not node.children]

    @property
    def within(self) -> tuple[int, ...]:
        """The batch dimensions of a single item: `()`, or those of a whole trajectory."""
        return self.children[0].batch if self.kind == "class" else self.batch

    def renumbered(self, numbers: list[int]) -> TreeSpec:
        """The same form, its leaf i being leaf `numbers[i]`."""
        leaf = numbers[self.leaf] if self.kind == "leaf" else self.leaf
        return dataclasses.replace(self, leaf=leaf, children=tuple(c.renumbered(numbers) for c in self.children))

    def _nodes(self) -> list[tuple[TreeSpec, KeyPath]]:
        """Every node with its path; without recursion, as loads ask for it often."""
        nodes: list[tuple[TreeSpec, KeyPath]] = [(self, ())]
        for node, path in nodes:  # which grows meanwhile
            keys = node.keys or range(len(node.children))
            for key, child in zip(keys, node.children, strict=True):
                nodes.append((child, path if node.kind == "class" else (*path, key)))
        return nodes

    def is_plain(self) -> bool:
        """Whether the native codec takes this form: TensorDicts, dicts with strings as keys, and leaves only."""
        is_keyed = self.kind in ("leaf", "td", "dict") and int not in map(type, self.keys)
        return is_keyed and all(map(TreeSpec.is_plain, self.children))

    def native(self) -> tuple[Any, ...]:
        """The form as the native codec takes it."""
        if self.kind == "leaf":
            return ("leaf", self.leaf)
        items = tuple(zip(self.keys, map(TreeSpec.native, self.children), strict=True))
        return (self.kind, items, self.batch) if self.kind == "td" else (self.kind, items)


def describe(obj: Any, batch_dims: int) -> tuple[TreeSpec, list[tuple[KeyPath, Any]]]:
    """The form of a batch, and its leaves by path."""
    leaves: list[tuple[KeyPath, Any]] = []
    return _describe(obj, batch_dims, (), leaves), leaves


def _describe(obj: Any, batch_dims: int, path: KeyPath, leaves: list[tuple[KeyPath, Any]]) -> TreeSpec:
    if isinstance(obj, NonTensorData | NonTensorStack):
        return TreeSpec("constant", constant=_constant(obj, path))
    if is_tensorclass(obj):
        return TreeSpec("class", cls=type(obj), children=(_describe(obj._tensordict, batch_dims, path, leaves),))
    if isinstance(obj, TensorDictBase):
        dim = _dim_of_members(obj, batch_dims)
        if dim is not None:
            children = tuple([_describe(m, batch_dims, (*path, i), leaves) for i, m in enumerate(obj.unbind(dim))])
            return TreeSpec("stack", children=children, batch=tuple(obj.batch_size[batch_dims:]), dim=dim - batch_dims)
        items = tensordict_items(obj, path)
        children = tuple([_describe(v, batch_dims, (*path, k), leaves) for k, v in items])
        return TreeSpec(
            "td", keys=tuple([k for k, _ in items]), children=children, batch=tuple(obj.batch_size[batch_dims:])
        )
    if isinstance(obj, dict):
        for key in obj:
            if type(key) not in (str, int) and not isinstance(key, str):
                raise TypeError(f"keys must be strings or integers, found {key!r} under {format_key(path)}")
            if type(key) is int and str(key) in obj:
                raise TypeError(f"a dict has the keys {key} and '{key}' under {format_key(path)}: one name in a file")
        children = tuple([_describe(v, batch_dims, (*path, k), leaves) for k, v in obj.items()])
        return TreeSpec("dict", keys=tuple(obj), children=children)
    if isinstance(obj, list | tuple):
        children = tuple([_describe(v, batch_dims, (*path, i), leaves) for i, v in enumerate(obj)])
        return TreeSpec("list" if isinstance(obj, list) else "tuple", children=children)
    leaves.append((path, obj))
    return TreeSpec("leaf", leaf=len(leaves) - 1)


def _dim_of_members(td: TensorDictBase, batch_dims: int) -> int | None:
    """The dimension of a single item along which the members of a lazy stack differ; None where they do not."""
    if td.ndim <= batch_dims or _members_agree(td):
        return None
    within = range(batch_dims, td.ndim)
    for dim in within:
        if all(map(_members_agree, td.unbind(dim))):
            return dim
    stack_dim: int = td.stack_dim
    return stack_dim if stack_dim in within else None


def _members_agree(td: TensorDictBase) -> bool:
    """False for a lazy stack whose members differ in keys or shapes."""
    if not isinstance(td, LazyStackedTensorDict):
        return True
    try:
        tensordict_items(td)
    except ValueError:
        return False
    return True


def is_ragged(td: TensorDictBase) -> bool:
    """Whether it is, or holds, a lazy stack whose members differ in keys or shapes.

    >>> members = [TensorDict({"obs": torch.zeros(3)}), TensorDict({"obs": torch.zeros(5)})]
    >>> is_ragged(TensorDict({"agents": LazyStackedTensorDict(*members, stack_dim=0)}))
    True
    """
    if not _members_agree(td):
        return True
    return any(is_ragged(value) for _, value in tensordict_items(td) if isinstance(value, TensorDictBase))


def map_leaves(td: TensorDictBase, change: Callable[[Tensor], Tensor], batch_size: Sequence[int]) -> TensorDictBase:
    """A TensorDict of `batch_size` with each leaf changed; lazy stacks stay such stacks where members differ."""
    if not is_ragged(td):
        return td.apply(change, batch_size=batch_size)
    form, leaves = describe(td, td.ndim)
    changed: TensorDictBase = unflatten(form, [change(leaf) for _, leaf in leaves], tuple(batch_size), td.device)
    return changed


def tensordict_items(td: TensorDictBase, path: KeyPath = ()) -> list[tuple[str, Any]]:
    """A TensorDict's keys and values; `NonTensorData` stay such objects.

    Raises:
        ValueError: members of a lazy stack have different keys, or entries that do not stack; the message names them.
    """
    if isinstance(td, LazyStackedTensorDict):
        return _lazy_stack_items(td, path)
    return [(k, td._get_str(k, default=None)) for k in td.keys()]  # noqa: SIM118 -- a TensorDict iterates over rows


def _lazy_stack_items(stack: LazyStackedTensorDict, path: KeyPath) -> list[tuple[str, Any]]:
    partial = sorted(_keys_of_some_members(stack))
    if partial:
        raise ValueError(
            f"only some members of a lazy stack have {', '.join(format_key((*path, k)) for k in partial)}; a row of "
            "this storage has every key: give them all the same keys, or use a ListStorage. Nothing was written"
        )
    items = []
    for key in stack.keys():  # noqa: SIM118
        try:
            items.append((key, stack._get_str(key, default=None)))
        except RuntimeError as error:
            raise ValueError(
                f"{format_key((*path, key))} has different shapes in the members of a lazy stack, and a row of this "
                f"storage has one: {error}. Nothing was written"
            ) from error
    return items


def _keys_of_some_members(stack: LazyStackedTensorDict) -> set[str]:
    """The root keys that some members of a lazy stack have and others lack."""
    every, shared = set[str](), set(stack.keys())
    for member in stack.tensordicts:
        every.update(member.keys())
        if isinstance(member, LazyStackedTensorDict):
            every |= _keys_of_some_members(member)
    return every - shared


def _constant(obj: Any, path: KeyPath) -> Any:
    """The JSON value that a NonTensorData (or a stack of equal ones) carries."""
    data = obj.data if isinstance(obj, NonTensorData) else obj.tolist()
    if isinstance(obj, NonTensorStack):
        flat = _flattened_list(data)
        if any(value != flat[0] for value in flat[1:]):
            raise TypeError(
                f"{format_key(path)} holds values that differ from step to step and are no tensors; "
                "a ListStorage keeps any object"
            )
        data = flat[0] if flat else None
    if not _is_json(data):
        raise TypeError(
            f"{format_key(path)} holds a {type(data).__name__}, which is neither a tensor nor a constant JSON value; "
            "a ListStorage keeps any object"
        )
    return data


def _flattened_list(data: Any) -> list[Any]:
    return [x for part in data for x in _flattened_list(part)] if isinstance(data, list) else [data]


def _is_json(data: Any) -> bool:
    if isinstance(data, dict):
        return all(isinstance(k, str) and _is_json(v) for k, v in data.items())
    if isinstance(data, list):
        return all(_is_json(v) for v in data)
    return data is None or type(data) in (bool, int, float, str)


def flatten(node: TreeSpec, obj: Any, path: KeyPath = ()) -> list[Any]:
    """The leaves of `obj`, which has this form, in the order of their numbers.

    Raises:
        ValueError: an entry is missing, new or of another kind; the message names it.
    """
    leaves: dict[int, Any] = {}
    _flatten(node, obj, path, leaves)
    return [leaves[number] for number in range(len(leaves))]


def _flatten(node: TreeSpec, obj: Any, path: KeyPath, leaves: dict[int, Any]) -> None:
    if node.kind == "class":
        return _flatten(node.children[0], obj, path, leaves)
    if is_tensorclass(obj) and not isinstance(obj, NonTensorData):
        obj = obj._tensordict
    if node.kind == "constant":
        value = _constant(obj, path) if isinstance(obj, NonTensorData | NonTensorStack) else obj
        if value != node.constant:
            raise ValueError(f"{format_key(path)} is the constant {node.constant!r} in this storage, found {value!r}")
    elif node.kind == "leaf":
        if isinstance(obj, TensorDictBase | dict | list | tuple):
            raise ValueError(f"{format_key(path)} is a tensor in this storage, found a {type(obj).__name__}")
        leaves[node.leaf] = obj
    elif node.kind in ("td", "dict"):
        for child, value, key in _matched_children(node, obj, path):
            _flatten(child, value, (*path, key), leaves)
    elif node.kind == "stack":
        dim = obj.ndim - len(node.batch) + node.dim if isinstance(obj, TensorDictBase) else -1
        if dim < 0 or obj.batch_size[dim] != len(node.children):
            raise ValueError(
                f"{format_key(path)} is a stack of {len(node.children)} in this storage, found a {type(obj).__name__} "
                f"of batch size {list(obj.batch_size) if isinstance(obj, TensorDictBase) else []}; nothing was written"
            )
        for i, (child, member) in enumerate(zip(node.children, obj.unbind(dim), strict=True)):
            _flatten(child, member, (*path, i), leaves)
    else:
        kind = list if node.kind == "list" else tuple
        if not isinstance(obj, kind) or len(obj) != len(node.children):
            raise ValueError(
                f"{format_key(path)} is a {node.kind} of {len(node.children)} in this storage, found {obj!r:.80}"
            )
        for i, child in enumerate(node.children):
            _flatten(child, obj[i], (*path, i), leaves)


def _matched_children(node: TreeSpec, obj: Any, path: KeyPath) -> list[tuple[TreeSpec, Any, str]]:
    if isinstance(obj, TensorDictBase):
        items = dict(tensordict_items(obj, path))
    elif isinstance(obj, dict):
        items = obj
    else:
        raise ValueError(
            f"{format_key(path)} has the keys {list(node.keys)} in this storage, found a {type(obj).__name__}"
        )
    missing = [k for k in node.keys if k not in items]
    new = [k for k in items if k not in node.keys]
    if missing or new:
        differences = [f"{format_key((*path, k))} is missing" for k in missing]
        differences += [f"{format_key((*path, k))} is not in this storage" for k in new]
        raise ValueError(
            "; ".join(differences) + f" (its keys here: {list(node.keys)}). Every batch needs the keys of the first; "
            "nothing was written"
        )
    return [(c, items[k], k) for k, c in zip(node.keys, node.children, strict=True)]


def unflatten(node: TreeSpec, leaves: list[Tensor], lead: tuple[int, ...], device: Any) -> Any:
    """The batch of this form with these leaves, whose batch dimensions are `lead`: the reverse of `flatten`."""
    if node.kind == "leaf":
        return leaves[node.leaf]
    if node.kind == "constant":
        return NonTensorData(node.constant, batch_size=lead, device=device)
    children = [unflatten(c, leaves, lead, device) for c in node.children]
    if node.kind == "class":
        assert node.cls is not None
        return node.cls._from_tensordict(children[0])  # type: ignore[attr-defined]
    if node.kind == "td":
        return TensorDict(dict(zip(node.keys, children, strict=True)), batch_size=(*lead, *node.batch), device=device)
    if node.kind == "stack":
        return LazyStackedTensorDict(*children, stack_dim=len(lead) + node.dim)
    if node.kind == "dict":
        return dict(zip(node.keys, children, strict=True))
    return children if node.kind == "list" else tuple(children)
