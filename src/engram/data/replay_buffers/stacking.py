"""Lists of items as one batch, and batches with their dimensions in another order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.data.replay_buffers import trees


def stack_rows(items: list[Any], dim: int) -> Any:
    """A list of items as a batch with a new dimension.

    Raises:
        ValueError: the list is empty, or its items differ; the message names the leaf.
    """
    if not items:
        raise ValueError("nothing to add: the list is empty")
    first = items[0]
    if isinstance(first, TensorDictBase) or hasattr(type(first), "_from_tensordict"):
        root, _ = trees.describe(first, 0)
        for item in items[1:]:
            trees.flatten(root, item)
        return torch.stack(items, dim)
    root, found = trees.describe(first, 0)
    columns = [[trees.as_tensor(value, path)] for path, value in found]
    for item in items[1:]:
        for column, (path, _), value in zip(columns, found, trees.flatten(root, item), strict=True):
            tensor = trees.as_tensor(value, path)
            if tensor.shape != column[0].shape or tensor.dtype != column[0].dtype:
                raise ValueError(
                    f"{trees.show(path)} is {column[0].dtype} {list(column[0].shape)} in the first item, "
                    f"{tensor.dtype} {list(tensor.shape)} in another; nothing was written"
                )
            column.append(tensor)
    stacked = [torch.stack(column, dim) for column in columns]
    return trees.unflatten(root, stacked, (len(items),), None)


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
