"""The forms that data come in (TensorDict, dict, list, tuple, tensorclass, tensor) and the way there and back.

A form is a small tree of nodes over numbered leaves. It is made from the first batch, is JSON-serialisable, and
turns later batches into lists of leaves and lists of leaves into batches. The native codec does the same for
plain TensorDicts and dicts; here is the general way, and here are the errors.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
)
from torch import Tensor

from engram.errors import is_masked, masked_array

Path = tuple[Any, ...]
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

    def paths(self) -> list[Path]:
        """The path of each leaf, by its number; ValueError where the numbers are not 0 to n - 1."""
        found: list[tuple[int, Path]] = []
        self._visit((), lambda node, path: found.append((node.leaf, path)) if node.kind == "leaf" else None)
        found.sort(key=operator.itemgetter(0))
        if [number for number, _ in found] != list(range(len(found))):
            raise ValueError("the leaves of a layout's form are not numbered from 0 on")
        return [path for _, path in found]

    def batches(self) -> dict[Path, tuple[int, ...]]:
        """The batch dimensions of TensorDicts that have more than the batch, by path."""
        found: dict[Path, tuple[int, ...]] = {}
        self._visit((), lambda node, path: found.update({path: node.batch}) if node.batch else None)
        return found

    def constants(self) -> dict[Path, Any]:
        """What is no tensor, by path."""
        found: dict[Path, Any] = {}
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

    def _visit(self, path: Path, see: Callable[[Node, Path], object]) -> None:
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


def show(path: Path) -> str:
    """A leaf's name as a user writes it: `'reward'`, `('next', 'reward')`, `the tensor` at the root."""
    if not path:
        return "the tensor"
    return repr(path[0]) if len(path) == 1 else repr(path)


def describe(obj: Any, batch_dims: int) -> tuple[Node, list[tuple[Path, Any]]]:
    """The form of a batch, and its leaves by path."""
    leaves: list[tuple[Path, Any]] = []
    return _describe(obj, batch_dims, (), leaves), leaves


def _describe(obj: Any, batch_dims: int, path: Path, leaves: list[tuple[Path, Any]]) -> Node:
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


def sorted_items(td: TensorDictBase, path: Path = ()) -> list[tuple[str, Any]]:
    """Keys with their values; entries without tensors as the objects that carry them.

    Raises:
        ValueError: members of a lazy stack have different keys, or entries that do not stack; the message names them.
    """
    if isinstance(td, LazyStackedTensorDict):
        return _stacked_items(td, path)
    return [(k, td._get_str(k, default=None)) for k in td.keys()]  # noqa: SIM118 -- a TensorDict iterates over rows


def _stacked_items(stack: LazyStackedTensorDict, path: Path) -> list[tuple[str, Any]]:
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


def _constant(obj: Any, path: Path) -> Any:
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


def flatten(node: Node, obj: Any, path: Path = ()) -> list[Any]:
    """The leaves of `obj` by their numbers; a ValueError names what is missing, new or different."""
    out: dict[int, Any] = {}
    _flatten(node, obj, path, out)
    return [out[number] for number in range(len(out))]


def _flatten(node: Node, obj: Any, path: Path, out: dict[int, Any]) -> None:
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


def _matching(node: Node, obj: Any, path: Path) -> list[tuple[Node, Any, str]]:
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


def entry(batch: Any, path: Path) -> Any:
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


def as_tensor(value: Any, path: Path) -> Tensor:
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


def _plain(t: Tensor, path: Path) -> Tensor:
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
