"""Leaves of steps as Parquet columns and back, bit by bit."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engram.data.replay_buffers.layout import LeafSpec, RowLayout
from engram.data.replay_buffers.trees import Node, Path

Array = npt.NDArray[Any]

FORMAT, VERSION = "engram steps", 1
METADATA, HIDDEN = b"engram", b"engram.trajectories"
#: The column that numbers the trajectories of the file.
TRAJECTORIES = "engram.trajectory"
_LONGEST_LIST = 64  # values: longer ones are bytes, which are written and read ten times as fast
_MOST_METADATA = 16 << 20
_RAW = (torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


def library() -> Any:
    """pyarrow, with its Parquet part; an ImportError says how to get it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError('Parquet needs pyarrow: pip install "engram[parquet]"') from error
    return pyarrow


class Column(NamedTuple):
    """A leaf and the column that holds it; None: leaves without bytes have none."""

    leaf: LeafSpec
    name: str
    kind: str  # value, list or bytes; none

    def arrow_type(self) -> Any:
        pa = library()
        if self.kind == "bytes":
            return pa.binary(self.leaf.nbytes)
        value = pa.from_numpy_dtype(np.dtype(str(self.leaf.dtype).removeprefix("torch.")))
        if self.kind == "value":
            return value
        # Never null, and said so: each level that could be costs time and space.
        return pa.list_(pa.field("element", value, nullable=False), math.prod(self.leaf.shape))

    def to_arrow(self, tensor: Tensor) -> Any:
        """A column of `[n, *shape]`."""
        pa = library()
        flat = tensor.contiguous().reshape(-1)
        if self.kind == "bytes":
            raw = flat.view(torch.uint8).numpy()
            return pa.FixedSizeBinaryArray.from_buffers(self.arrow_type(), len(tensor), [None, pa.py_buffer(raw)])
        values = pa.array(flat.numpy())
        return values if self.kind == "value" else pa.FixedSizeListArray.from_arrays(values, type=self.arrow_type())

    def from_arrow(self, found: Any, rows: int) -> Tensor:
        """The reverse: a new tensor `[rows, *shape]`."""
        if self.kind == "none":
            return torch.zeros((rows, *self.leaf.shape), dtype=self.leaf.dtype)
        if self.kind == "bytes":
            size = self.leaf.nbytes
            raw = np.frombuffer(found.buffers()[1], np.uint8, rows * size, found.offset * size).copy()
            return torch.from_numpy(raw).view(self.leaf.dtype).reshape(rows, *self.leaf.shape)
        values = numpy_values(found if self.kind == "value" else found.flatten())
        return torch.from_numpy(values).reshape(rows, *self.leaf.shape)


def columns_of(layout: RowLayout) -> list[Column]:
    """How the leaves of a layout are stored: names are keys joined by dots, each of them once."""
    taken = {TRAJECTORIES}
    columns = []
    for leaf in layout.leaves:
        name = base = ".".join(map(str, leaf.path)) or "value"
        number = 1
        while name in taken:
            number += 1
            name = f"{base}#{number}"
        taken.add(name)
        columns.append(Column(leaf, name, _kind(leaf)))
    return columns


def _kind(leaf: LeafSpec) -> str:
    size = math.prod(leaf.shape)
    if size == 0:
        return "none"
    if leaf.dtype in _RAW or size > _LONGEST_LIST:
        return "bytes"
    return "list" if leaf.shape else "value"


def schema_of(layout: RowLayout, columns: Sequence[Column], numbered: bool) -> Any:
    """The Arrow schema, which says in its metadata what the columns are."""
    pa = library()
    stored = [c for c in columns if c.kind != "none"]
    fields = [pa.field(c.name, c.arrow_type(), nullable=False) for c in stored]
    if numbered:
        fields.append(pa.field(TRAJECTORIES, pa.int64(), nullable=False))
    described = {
        "format": FORMAT,
        "version": VERSION,
        "layout": layout.to_json(),
        "columns": [{"name": c.name, "stored": c.kind} for c in columns],
    }
    return pa.schema(fields, metadata={METADATA: json.dumps(described)})


def described_columns(schema: Any) -> tuple[RowLayout, list[Column]] | None:
    """What the metadata of a schema say; None: engram did not write the file.

    Raises:
        ValueError: the metadata are damaged, or do not fit the columns.
    """
    text = (schema.metadata or {}).get(METADATA)
    if text is None:
        return None
    if len(text) > _MOST_METADATA:
        raise ValueError(f"has metadata of more than {_MOST_METADATA} bytes")
    try:
        made = json.loads(text)
        if made["format"] != FORMAT or made["version"] != VERSION:
            raise ValueError(f"is {made['format']!r}, version {made['version']!r}; this is for {FORMAT!r}, {VERSION}")
        layout = RowLayout.from_json(made["layout"])
        columns = [Column(x, c["name"], c["stored"]) for x, c in zip(layout.leaves, made["columns"], strict=True)]
        _check_form(layout.root, len(layout.leaves))
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"has metadata that are no description of steps ({error!r})") from error
    wanted = columns_of(layout)
    if columns != wanted:
        raise ValueError("has metadata whose columns are not those of its layout")
    for column in columns:
        if column.kind == "none":
            continue
        at = schema.get_all_field_indices(column.name)
        if len(at) != 1 or not _same_type(schema.field(at[0]).type, column.arrow_type()):
            found = [str(schema.field(i).type) for i in at]
            raise ValueError(f"has the column {column.name!r} as {found}, its metadata ask for {column.arrow_type()}")
    return layout, columns


def _same_type(found: Any, wanted: Any) -> bool:
    pa = library()
    if pa.types.is_fixed_size_list(wanted):
        return bool(
            pa.types.is_fixed_size_list(found)
            and found.list_size == wanted.list_size
            and found.value_type == wanted.value_type
        )
    return bool(found == wanted)


def _check_form(root: Node, leaves: int) -> None:
    """Each leaf stands in the form once."""
    found: list[int] = []

    def visit(node: Node) -> None:
        if node.kind == "leaf":
            found.append(node.leaf)
        if node.kind in ("td", "dict") and (
            len(node.keys) != len(node.children) or not all(isinstance(k, str) for k in node.keys)
        ):
            raise ValueError("has metadata whose keys do not fit")
        for child in node.children:
            visit(child)

    visit(root)
    if sorted(found) != list(range(leaves)):
        raise ValueError("has metadata whose form does not fit their leaves")


# ---- files by others ----
def guessed_columns(schema: Any, chosen: Sequence[str] | None) -> list[tuple[Path, str]]:
    """Keys and names of the columns of any file: dots in a name are nested keys.

    Raises:
        ValueError: a column has no numbers, or two are one key.
    """
    names = list(schema.names) if chosen is None else list(chosen)
    missing = [name for name in names if name not in schema.names]
    if missing:
        raise ValueError(f"has no column {missing[0]!r}; it has {schema.names}")
    found: list[tuple[Path, str]] = []
    for name in names:
        path: Path = tuple(name.split("."))
        for other, other_name in found:
            if other[: len(path)] == path or path[: len(other)] == other:
                raise ValueError(
                    f"has the columns {other_name!r} and {name!r}, which would be one key; choose columns="
                )
        if not _has_numbers(schema.field(name).type):
            raise ValueError(
                f"has {name!r} as {schema.field(name).type}; engram reads numbers, bools and lists of them: choose "
                "columns="
            )
        found.append((path, name))
    if not found:
        raise ValueError("has no columns")
    return found


def _has_numbers(kind: Any) -> bool:
    types = library().types
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def tensor_of(found: Any, name: str) -> Tensor:
    """Any column as a new tensor `[n, ...]`; lists become dimensions.

    Raises:
        ValueError: values are missing, or lists differ in length.
    """
    types = library().types
    shape = [len(found)]
    while True:
        if found.null_count:
            raise ValueError(f"has no value in {found.null_count} places of {name!r}")
        kind = found.type
        if types.is_fixed_size_list(kind):
            shape.append(kind.list_size)
        elif types.is_list(kind) or types.is_large_list(kind):
            shape.append(_one_length(found, name))
        else:
            break
        found = found.flatten()
    return torch.from_numpy(numpy_values(found)).reshape(shape)


def _one_length(found: Any, name: str) -> int:
    lengths = np.unique(found.value_lengths().to_numpy(zero_copy_only=False))
    if len(lengths) > 1:
        raise ValueError(
            f"has lists of {lengths[0]} to {lengths[-1]} values in {name!r}; all of a column have one length"
        )
    return int(lengths[0]) if len(lengths) else 0


def numpy_values(found: Any) -> Array:
    """An Arrow array of numbers as a new numpy array."""
    values: Array = found.to_numpy(zero_copy_only=False)
    return values if values.flags.writeable and values.flags.owndata else values.copy()
