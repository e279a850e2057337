"""The forms that data come in (TensorDict, dict, list, tuple, tensorclass, tensor) and the way there and back.

A form is a small tree of nodes over numbered leaves. It is made from the first batch, is JSON-serialisable, and
turns later batches into lists of leaves and lists of leaves into batches. The native codec does the same for
plain TensorDicts and dicts; here is the general way, and here are the errors.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Union

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensorclass
from torch import Tensor

from engram.errors import is_masked, masked_array

KeyPath = tuple[Any, ...]
_DEEPEST = 100


@dataclasses.dataclass
class Node:
    """One node of a form: `kind` is leaf, td, dict, list, tuple, class or constant."""

    kind: str
    leaf: int = -1
    keys: tuple[str, ...] = ()
    children: tuple[Node, ...] = ()
    batch: tuple[int, ...] = ()  # a TensorDict's batch dimensions after those of the batch
    constant: Any = None
    cls: type | None = None  # a tensorclass: known to the process that wrote, never named in a file

    def to_json(self) -> dict[str, Any]:
        made: dict[str, Any] = {"kind": "td" if self.kind == "class" else self.kind}
        if self.kind == "class":
            return self.children[0].to_json()
        if self.kind == "leaf":
            made["leaf"] = self.leaf
        elif self.kind == "constant":
            made["constant"] = self.constant
        else:
            children = list(map(Node.to_json, self.children))
            made |= {"keys": list(self.keys), "children": children, "batch": [*self.batch]}
        return made

    @classmethod
    def from_json(cls, made: dict[str, Any], depth: int = 0) -> Node:
        """Reads what `to_json` wrote; ValueError, KeyError, TypeError or AttributeError where it is not that."""
        kind = made["kind"]
        if kind not in ("leaf", "td", "dict", "list", "tuple", "constant"):
            raise ValueError(
                f"a layout has nodes of the kinds leaf, td, dict, list, tuple and constant; found {kind!r}"
            )
        if depth > _DEEPEST:
            raise ValueError(f"a layout has a form of at most {_DEEPEST} levels")
        children = tuple(map(functools.partial(cls.from_json, depth=depth + 1), made.get("children", ())))
        keys, leaf, batch = tuple(made.get("keys", ())), made.get("leaf", -1), tuple(made.get("batch", ()))
        named = kind in ("td", "dict")
        fits = len(keys) == (len(children) if named else 0) and len(set(keys)) == len(keys)
        if not fits or (children and kind in ("leaf", "constant")):
            raise ValueError(f"a {kind} of a layout has the keys {keys[:9]} for {len(children)} entries")
        sizes = (leaf + 1, *batch)
        if not {*map(type, keys)} <= {str} or {*map(type, sizes)} != {int} or min(sizes) < 0:
            raise ValueError(f"a {kind} of a layout has the keys {keys[:9]}, the number {leaf!r}, the sizes {batch!r}")
        return cls(kind, leaf, keys, children, batch, made.get("constant"))

    def paths(self) -> list[KeyPath]:
        """The path of each leaf, by its number; ValueError where the numbers are not 0 to n - 1."""
        found: list[tuple[int, KeyPath]] = []
        self._visit((), lambda node, path: found.append((node.leaf, path)) if node.kind == "leaf" else None)
        found.sort(key=operator.itemgetter(0))
        if [number for number, _ in found] != list(range(len(found))):
            raise ValueError("the leaves of a layout's form are not numbered from 0 on")
        return [path for _, path in found]

    def batches(self) -> dict[KeyPath, tuple[int, ...]]:
        """The batch dimensions of TensorDicts that have more than the batch, by path."""
        found: dict[KeyPath, tuple[int, ...]] = {}
        self._visit((), lambda node, path: found.update({path: node.batch}) if node.batch else None)
        return found

    def constants(self) -> dict[KeyPath, Any]:
        """What is no tensor, by path."""
        found: dict[KeyPath, Any] = {}
        self._visit((), lambda node, path: found.update({path: node.constant}) if node.kind == "constant" else None)
        return found

    @property
    def within(self) -> tuple[int, ...]:
        """Batch dimensions of the root after those of the batch: of items that are whole trajectories."""
        return self.children[0].batch if self.kind == "class" else self.batch

    def renumbered(self, numbers: list[int]) -> Node:
        """The same form, its leaf i being leaf `numbers[i]`."""
        leaf = numbers[self.leaf] if self.kind == "leaf" else self.leaf
        return dataclasses.replace(self, leaf=leaf, children=tuple(c.renumbered(numbers) for c in self.children))

    def _visit(self, path: KeyPath, see: Callable[[Node, KeyPath], object]) -> None:
        see(self, path)
        keys = self.keys or range(len(self.children))
        for key, child in zip(keys, self.children, strict=True):
            child._visit(path if self.kind == "class" else (*path, key), see)

    def is_plain(self) -> bool:
        """Whether the native codec knows this form: TensorDicts, dicts and leaves alone."""
        return self.kind in ("leaf", "td", "dict") and all(map(Node.is_plain, self.children))

    def native(self) -> tuple[Any, ...]:
        """The form as the native codec takes it."""
        if self.kind == "leaf":
            return ("leaf", self.leaf)
        items = tuple(zip(self.keys, map(Node.native, self.children), strict=True))
        return (self.kind, items, self.batch) if self.kind == "td" else (self.kind, items)


def show(path: KeyPath) -> str:
    """A leaf's name as a user writes it: `'reward'`, `('next', 'reward')`, `the tensor` at the root."""
    if not path:
        return "the tensor"
    return repr(path[0]) if len(path) == 1 else repr(path)


def describe(obj: Any, batch_dims: int) -> tuple[Node, list[tuple[KeyPath, Any]]]:
    """The form of a batch, and its leaves by path."""
    leaves: list[tuple[KeyPath, Any]] = []
    return _describe(obj, batch_dims, (), leaves), leaves


def _describe(obj: Any, batch_dims: int, path: KeyPath, leaves: list[tuple[KeyPath, Any]]) -> Node:
    if isinstance(obj, NonTensorData | NonTensorStack):
        return Node("constant", constant=_constant(obj, path))
    if is_tensorclass(obj) and not isinstance(obj, type):
        return Node("class", cls=type(obj), children=(_describe(_inner(obj), batch_dims, path, leaves),))
    if isinstance(obj, TensorDictBase):
        items = sorted_items(obj, path)
        children = tuple(_describe(v, batch_dims, (*path, k), leaves) for k, v in items)
        return Node("td", keys=tuple(k for k, _ in items), children=children, batch=tuple(obj.batch_size[batch_dims:]))
    if isinstance(obj, dict):
        for key in obj:
            if not isinstance(key, str):
                raise TypeError(f"keys must be strings, found {key!r} under {show(path)}")
        children = tuple(_describe(v, batch_dims, (*path, k), leaves) for k, v in obj.items())
        return Node("dict", keys=tuple(obj), children=children)
    if isinstance(obj, list | tuple):
        children = tuple(_describe(v, batch_dims, (*path, i), leaves) for i, v in enumerate(obj))
        return Node("list" if isinstance(obj, list) else "tuple", children=children)
    leaves.append((path, obj))
    return Node("leaf", leaf=len(leaves) - 1)


def _inner(obj: Any) -> TensorDictBase:
    return obj._tensordict


def sorted_items(td: TensorDictBase, path: KeyPath = ()) -> list[tuple[str, Any]]:
    """Keys with their values; entries without tensors as the objects that carry them.

    Raises:
        ValueError: members of a lazy stack have different keys, or entries that do not stack; the message names them.
    """
    if isinstance(td, LazyStackedTensorDict):
        return _stacked_items(td, path)
    return [(k, td._get_str(k, default=None)) for k in td.keys()]  # noqa: SIM118 -- a TensorDict iterates over rows


def _stacked_items(stack: LazyStackedTensorDict, path: KeyPath) -> list[tuple[str, Any]]:
    missing = sorted(_of_some_members(stack))
    if missing:
        raise ValueError(
            f"only some members of a lazy stack have {', '.join(show((*path, k)) for k in missing)}; a row of this "
            "storage has every key: give them all the same keys, or use a ListStorage. Nothing was written"
        )
    items = []
    for key in stack.keys():  # noqa: SIM118
        try:
            items.append((key, stack._get_str(key, default=None)))
        except RuntimeError as error:
            raise ValueError(
                f"{show((*path, key))} has different shapes in the members of a lazy stack, and a row of this storage "
                f"has one: {error}. Nothing was written"
            ) from error
    return items


def _of_some_members(stack: LazyStackedTensorDict) -> set[str]:
    """The keys that not all members of a lazy stack have, at its root."""
    every, shared = set[str](), set(stack.keys())
    for member in stack.tensordicts:
        every.update(member.keys())
        if isinstance(member, LazyStackedTensorDict):
            every |= _of_some_members(member)
    return every - shared


def _constant(obj: Any, path: KeyPath) -> Any:
    """The JSON value that a NonTensorData (or a stack of equal ones) carries."""
    data = obj.data if isinstance(obj, NonTensorData) else obj.tolist()
    if isinstance(obj, NonTensorStack):
        flat = _flat(data)
        if any(value != flat[0] for value in flat[1:]):
            raise TypeError(
                f"{show(path)} holds values that differ from step to step and are no tensors; "
                "a ListStorage keeps any object"
            )
        data = flat[0] if flat else None
    if not _is_json(data):
        raise TypeError(
            f"{show(path)} holds a {type(data).__name__}, which is neither a tensor nor a constant JSON value; "
            "a ListStorage keeps any object"
        )
    return data


def _flat(data: Any) -> list[Any]:
    return [x for part in data for x in _flat(part)] if isinstance(data, list) else [data]


def _is_json(data: Any) -> bool:
    if isinstance(data, dict):
        return all(isinstance(k, str) and _is_json(v) for k, v in data.items())
    if isinstance(data, list):
        return all(_is_json(v) for v in data)
    return data is None or type(data) in (bool, int, float, str)


def flatten(node: Node, obj: Any, path: KeyPath = ()) -> list[Any]:
    """The leaves of `obj` by their numbers; a ValueError names what is missing, new or different."""
    out: dict[int, Any] = {}
    _flatten(node, obj, path, out)
    return [out[number] for number in range(len(out))]


def _flatten(node: Node, obj: Any, path: KeyPath, out: dict[int, Any]) -> None:
    if node.kind == "class":
        return _flatten(node.children[0], obj, path, out)
    if is_tensorclass(obj) and not isinstance(obj, type) and not isinstance(obj, NonTensorData | NonTensorStack):
        obj = _inner(obj)
    if node.kind == "constant":
        found = _constant(obj, path) if isinstance(obj, NonTensorData | NonTensorStack) else obj
        if found != node.constant:
            raise ValueError(f"{show(path)} is the constant {node.constant!r} in this storage, found {found!r}")
    elif node.kind == "leaf":
        if isinstance(obj, TensorDictBase | dict | list | tuple):
            raise ValueError(f"{show(path)} is a tensor in this storage, found a {type(obj).__name__}")
        out[node.leaf] = obj
    elif node.kind in ("td", "dict"):
        for child, value, key in _matching(node, obj, path):
            _flatten(child, value, (*path, key), out)
    else:
        wanted = list if node.kind == "list" else tuple
        if not isinstance(obj, wanted) or len(obj) != len(node.children):
            raise ValueError(
                f"{show(path)} is a {node.kind} of {len(node.children)} in this storage, found {obj!r:.80}"
            )
        for i, child in enumerate(node.children):
            _flatten(child, obj[i], (*path, i), out)


def _matching(node: Node, obj: Any, path: KeyPath) -> list[tuple[Node, Any, str]]:
    if isinstance(obj, TensorDictBase):
        items = dict(sorted_items(obj, path))
    elif isinstance(obj, dict):
        items = obj
    else:
        raise ValueError(f"{show(path)} has the keys {list(node.keys)} in this storage, found a {type(obj).__name__}")
    missing = [k for k in node.keys if k not in items]
    new = [k for k in items if k not in node.keys]
    if missing or new:
        said = [f"{show((*path, k))} is missing" for k in missing]
        said += [f"{show((*path, k))} is not in this storage" for k in new]
        raise ValueError(
            "; ".join(said) + f" (its keys here: {list(node.keys)}). Every batch needs the keys of the first; "
            "nothing was written"
        )
    return [(c, items[k], k) for k, c in zip(node.keys, node.children, strict=True)]


def unflatten(node: Node, leaves: list[Tensor], lead: tuple[int, ...], device: Any) -> Any:
    """The batch with these leaves."""
    if node.kind == "leaf":
        return leaves[node.leaf]
    if node.kind == "constant":
        return NonTensorData(node.constant, batch_size=lead, device=device)
    made = [unflatten(c, leaves, lead, device) for c in node.children]
    if node.kind == "class":
        assert node.cls is not None
        return node.cls._from_tensordict(made[0])  # type: ignore[attr-defined]
    if node.kind == "td":
        return TensorDict(dict(zip(node.keys, made, strict=True)), batch_size=(*lead, *node.batch), device=device)
    if node.kind == "dict":
        return dict(zip(node.keys, made, strict=True))
    return made if node.kind == "list" else tuple(made)


def with_entry(batch: Any, key: str, value: Any) -> Any:
    """A shallow copy of a TensorDict, dict or tensorclass with one more entry; what the caller has is not touched."""
    copy = batch.copy()
    put_entry(copy, key, value)
    return copy


def put_entry(batch: Any, key: str, value: Any) -> None:
    """One more entry in a TensorDict, dict or tensorclass."""
    if isinstance(batch, dict):
        batch[key] = value
    else:
        batch.set(key, value)


def spread(value: Tensor, lead: int, within: tuple[int, ...]) -> Tensor:
    """What is said of items `[*lead, ...]` for each of their steps: `[*lead, *within, ...]`, with memory of its own."""
    first, rest = value.shape[:lead], value.shape[lead:]
    return value.reshape((*first, *(1 for _ in within), *rest)).expand((*first, *within, *rest)).contiguous()


def put_of_items(batch: Any, key: str, value: Any, lead: int = 1) -> None:
    """One more entry, `[*lead, ...]`, of a batch whose items may have batch dimensions of their own."""
    if isinstance(value, Tensor) and not isinstance(batch, dict) and len(batch.batch_size) > lead:
        value = spread(value, lead, tuple(batch.batch_size[lead:]))
    put_entry(batch, key, value)


def entry(batch: Any, path: KeyPath) -> Any:
    """What a TensorDict, dict, tensorclass, list or tuple holds at a path; None: nothing."""
    for key in path:
        kind = type(batch)
        if kind is TensorDict:
            batch = batch._tensordict.get(key)  # `get` takes ten times as long
        elif kind is dict or isinstance(batch, TensorDictBase) or hasattr(kind, "_from_tensordict"):
            batch = batch.get(key, None)
        elif kind is tuple or kind is list:
            batch = batch[key] if type(key) is int and key < len(batch) else None
        else:
            return None
    return batch


def as_tensor(value: Any, path: KeyPath) -> Tensor:
    """A plain strided CPU tensor with the value of a leaf; a TypeError names the leaf where there is none.

    Conjugate and negative views are resolved, gradients detached, other devices copied, numpy arrays and Python
    numbers converted.
    """
    if isinstance(value, Tensor):
        return _plain(value, path)
    if isinstance(value, np.ndarray | np.generic):
        if is_masked(value):
            raise masked_array(show(path))
        if value.dtype.hasobject or value.dtype.kind in "USMmV":
            raise TypeError(f"{show(path)} is a numpy array of {value.dtype}, which no tensor holds; use a ListStorage")
        array = np.ascontiguousarray(value).reshape(np.shape(value))
        native = array.astype(array.dtype.newbyteorder("="), copy=not array.flags.writeable)
        # C's `long long` is an int64 by another name, which torch does not know.
        return torch.from_numpy(native.view(f"{native.dtype.kind}{native.dtype.itemsize}"))
    if isinstance(value, bool | int | float | complex):
        return torch.as_tensor(value)
    raise TypeError(
        f"{show(path)} is a {type(value).__name__}; a storage of tensors takes tensors, numpy arrays, numbers, and "
        "TensorDicts, dicts, lists and tuples of them. A ListStorage keeps any object"
    )


def _plain(t: Tensor, path: KeyPath) -> Tensor:
    found = _why_not_plain(t)
    if found is not None:
        raise TypeError(f"{show(path)} is a {found} tensor; a storage takes dense tensors with data of their own")
    t = t.detach()
    if t.device.type != "cpu":
        t = t.cpu()
    t = t.resolve_conj().resolve_neg()
    if type(t) is not Tensor:
        t = t.as_subclass(Tensor)  # a Parameter, a MemoryMappedTensor: plain memory behind another name
    if torch._is_zerotensor(t):
        t = t.clone()
    return t


def _why_not_plain(t: Tensor) -> str | None:
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


Key = Union[str, tuple[str, ...]]
Keys = Union[Key, Sequence[Key], None]


def as_key(key: Any) -> Key:
    """A key in its one form: a string, or a tuple of two strings or more.

    Raises:
        TypeError: it is neither a string nor a tuple of strings.
    """
    if isinstance(key, str):
        return key
    if isinstance(key, tuple) and key and all(isinstance(part, str) for part in key):
        return key[0] if len(key) == 1 else key
    raise TypeError(f"a key is a string or a tuple of strings, got {key!r}")


def as_keys(keys: Keys) -> list[Key]:
    """A list of keys from a list, one string, or None. A tuple at the root is one nested key."""
    if keys is None:
        return []
    return [as_key(keys)] if isinstance(keys, str | tuple) else [as_key(key) for key in keys]


def path_of(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def is_class(obj: Any) -> bool:
    """Whether it is an instance of a tensorclass."""
    return not isinstance(obj, type) and hasattr(type(obj), "_from_tensordict")


def has_keys(batch: Any) -> bool:
    return isinstance(batch, TensorDictBase | dict) or is_class(batch)


def has_batch_dims(batch: Any) -> bool:
    """Whether it says itself which of its dimensions are those of the batch."""
    return isinstance(batch, TensorDictBase) or is_class(batch)


def find(batch: Any, key: Key) -> Any:
    """The entry, None where there is none. Numbers and numpy arrays come as tensors."""
    for part in path_of(key):
        if isinstance(batch, dict):
            batch = batch.get(part)
        elif isinstance(batch, TensorDictBase) or (is_class(batch) and part in fields(batch)):
            batch = batch.get(part, None)
        else:
            return None
    return as_leaf(batch, key) if isinstance(batch, bool | int | float | np.ndarray | np.generic) else batch


def as_leaf(value: Any, key: Key | None = None) -> Tensor:
    """A number, an array or a tensor as a tensor.

    Raises:
        TypeError: a numpy masked array, whose mask would be lost.
    """
    if is_masked(value):
        raise masked_array("the data" if key is None else repr(key))
    return torch.as_tensor(value)


def get(batch: Any, key: Key, who: str) -> Any:
    """The entry.

    Raises:
        KeyError: there is none; the message names the key, and the keys that exist.
        TypeError: the batch has no keys.
    """
    found = find(batch, key) if has_keys(batch) else None
    if found is None:
        raise missing(batch, [key], who)
    return found


def missing(batch: Any, wanted: Sequence[Key], who: str) -> Exception:
    """The error for an entry that is not there."""
    if not has_keys(batch):
        return TypeError(
            f"{who} works on keys, and a {type(batch).__name__} has none; give it TensorDicts, dicts or tensorclasses, "
            "or use a callable as the transform"
        )
    return KeyError(f"{who} needs the key {' or '.join(map(repr, wanted))}; the batch has {leaf_keys(batch)}")


def put(batch: Any, key: Key, value: Any) -> None:
    """Sets an entry in place; dicts on the way are made.

    Raises:
        KeyError: a tensorclass on the way has no such field.
    """
    *parents, last = path_of(key)
    for part in parents:
        below = batch.get(part) if isinstance(batch, dict) else find(batch, part)
        if below is None and isinstance(batch, dict):
            below = batch[part] = {}
        if below is None or (isinstance(batch, TensorDictBase) and isinstance(below, TensorDictBase)):
            break  # a TensorDict goes on by itself, and makes what it lacks
        batch, key = below, path_of(key)[1:]
    if isinstance(batch, dict):
        batch[last] = value
        return
    if is_class(batch) and path_of(key)[0] not in fields(batch):
        raise KeyError(f"{type(batch).__name__} has no field {path_of(key)[0]!r}; its fields are {fields(batch)}")
    batch.set(key, value)


def drop(batch: Any, key: Key) -> None:
    """Removes an entry in place.

    Raises:
        TypeError: a tensorclass cannot lose a field.
    """
    *parents, last = path_of(key)
    for part in parents:
        batch = batch[part] if isinstance(batch, dict) else batch.get(part)
    if is_class(batch):
        raise TypeError(f"{type(batch).__name__} cannot lose its field {last!r}; store TensorDicts instead")
    batch.pop(last)


def fields(batch: Any) -> list[str]:
    """The fields of a tensorclass."""
    return [field.name for field in dataclasses.fields(batch)]


def children(batch: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(batch, TensorDictBase | dict):
        for key in batch.keys():  # noqa: SIM118 -- a TensorDict iterates over rows
            yield key, batch.get(key)
    else:
        for key in fields(batch):
            yield key, batch.get(key, None)


def leaf_keys(batch: Any) -> list[Key]:
    """The keys of all leaves."""
    found: list[Key] = []
    for key, value in children(batch):
        if has_keys(value):
            found += [(key, *path_of(below)) for below in leaf_keys(value)]
        elif value is not None:
            found.append(key)
    return found


def shallow(batch: Any) -> Any:
    """Containers of its own with the same leaves: entries can be set without the caller's seeing it."""
    if isinstance(batch, dict):
        return {k: shallow(v) for k, v in batch.items()}
    return batch.clone(recurse=False) if isinstance(batch, TensorDictBase) or is_class(batch) else batch


def mapped(batch: Any, of_tensor: Callable[[Tensor], Tensor], of_batch: Callable[[Any], Any]) -> Any:
    """A batch with every outermost TensorDict or tensorclass, and every leaf of dicts and tuples, changed."""
    if isinstance(batch, dict):
        return {k: mapped(v, of_tensor, of_batch) for k, v in batch.items()}
    if isinstance(batch, tuple):
        return tuple(mapped(v, of_tensor, of_batch) for v in batch)
    if isinstance(batch, TensorDictBase) or is_class(batch):
        return of_batch(batch)
    return of_tensor(as_leaf(batch))


def stacked(items: list[Any]) -> Any:
    """A list of items as one batch with a new first dimension."""
    if isinstance(items[0], dict):
        return {k: stacked([item[k] for item in items]) for k in items[0]}
    has_shape = isinstance(items[0], TensorDictBase | Tensor) or is_class(items[0])
    return torch.stack(items if has_shape else [as_leaf(item) for item in items])


def unstacked(batch: Any, n: int) -> list[Any]:
    """The items of a batch along its first dimension."""
    if isinstance(batch, dict):
        parts = {k: unstacked(v, n) for k, v in batch.items()}
        return [{k: v[i] for k, v in parts.items()} for i in range(n)]
    return list(batch.unbind(0))


def stack_rows(items: list[Any], dim: int) -> Any:
    """A list of items as a batch with a new dimension.

    Raises:
        ValueError: the list is empty, or its items differ; the message names the leaf.
    """
    if not items:
        raise ValueError("nothing to add: the list is empty")
    first = items[0]
    if isinstance(first, TensorDictBase) or hasattr(type(first), "_from_tensordict"):
        root, _ = describe(first, 0)
        for item in items[1:]:
            flatten(root, item)
        return torch.stack(items, dim)
    root, found = describe(first, 0)
    columns = [[as_tensor(value, path)] for path, value in found]
    for item in items[1:]:
        for column, (path, _), value in zip(columns, found, flatten(root, item), strict=True):
            tensor = as_tensor(value, path)
            if tensor.shape != column[0].shape or tensor.dtype != column[0].dtype:
                raise ValueError(
                    f"{show(path)} is {column[0].dtype} {list(column[0].shape)} in the first item, "
                    f"{tensor.dtype} {list(tensor.shape)} in another; nothing was written"
                )
            column.append(tensor)
    stacked = [torch.stack(column, dim) for column in columns]
    return unflatten(root, stacked, (len(items),), None)


def swap_dims(rows: Any, time_dim: int, to_time: bool) -> Any:
    """Rows `[time, *envs]` as users of `[*envs, time]` data know them, or the other way round."""
    if time_dim == 0:
        return rows
    source, target = (0, time_dim) if to_time else (time_dim, 0)
    if isinstance(rows, Tensor):
        return rows.movedim(source, target)
    if isinstance(rows, dict):
        return {k: swap_dims(v, time_dim, to_time) for k, v in rows.items()}
    if isinstance(rows, list | tuple):
        return type(rows)(swap_dims(v, time_dim, to_time) for v in rows)
    order = list(range(rows.batch_dims))
    order.insert(target, order.pop(source))
    return rows.permute(*order)


def chosen(rows: Any, mask: Tensor) -> Any:
    """The rows of a batch, or of a list of items, where the mask is true.

    Raises:
        ValueError: there is not one row for each entry of the mask.
    """
    if isinstance(rows, dict):
        return {k: chosen(v, mask) for k, v in rows.items()}
    if isinstance(rows, tuple):
        return tuple(chosen(v, mask) for v in rows)
    if len(rows) != len(mask):
        raise ValueError(f"{len(mask)} steps are indexed, the values have {len(rows)}; nothing was written")
    if isinstance(rows, list):
        return [row for row, wanted in zip(rows, mask.tolist(), strict=True) if wanted]
    return rows[mask.numpy() if isinstance(rows, np.ndarray) else mask]
