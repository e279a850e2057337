"""Time steps of trainers that draw by themselves: written without an index, and read in parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram import pytree
from engram.data.replay_buffers.storages.base import Storage
from engram.pytree import KeyPath, to_tensor
from engram.store import n_step
from engram.store.rows import Rows

_MOST_LOOKS = 100  # at rows that other processes overwrite meanwhile


def append_step(storage: Storage, step: Any) -> bool:
    """Writes one time step of all environments behind the newest row, in one native call, without an index of it.

    `step`: numpy arrays, in the form of the stored steps. An array has the shape that the rows of all environments
    have there, but for lengths of 1 and where one of the two is flat, and any dtype (`numpy.astype`; floats do not
    become integers).

    Returns: False: nothing was written; `check` and `append` write it, or say what does not fit. So before the
    first write, which decides what rows have; for other data; and where another process has the turn.

    Example:
        >>> storage = LazyTensorStorage(10, ndim=2)
        >>> rb = ReplayBuffer(storage=storage)
        >>> index = rb.add({"action": torch.zeros(2, 1, dtype=torch.int64), "reward": torch.zeros(2)})
        >>> append_step(storage, {"action": np.array([0, 1]), "reward": np.array([0.5, 1.0])})
        True
        >>> storage[1]["action"].tolist(), storage[1]["reward"]
        ([[0], [1]], tensor([0.5000, 1.0000]))
    """
    with storage.mutex:
        rows = storage.native.appended
        return rows is not None and rows.push_step(step)


def read_leaves(storage: Storage, slots: Tensor | np.ndarray[Any, Any], paths: tuple[KeyPath, ...]) -> Rows:
    """As `read`, of the entries under these paths only: `batch` is a list of one tensor [n, ...] for each.

    Raises:
        KeyError: rows have no such entry.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> index = rb.extend({"obs": torch.arange(6).reshape(3, 2), "next": {"reward": torch.arange(3.0)}})
        >>> read_leaves(rb.storage, np.array([2, 0]), (("next", "reward"), ("obs",))).batch
        [tensor([2., 0.]), tensor([[4, 5],
                [0, 1]])]
    """
    if (native := storage.native.read) is not None:
        return native.read_leaves(slots, paths)
    rows = storage.read(to_tensor(slots))
    leaves = [pytree.get_entry(rows.batch, path) for path in paths]
    missing = [pytree.format_key(path) for path, leaf in zip(paths, leaves, strict=True) if leaf is None]
    if missing:
        raise KeyError(f"the stored steps have no {missing[0]}")
    return rows._replace(batch=leaves)


def read_n_steps(
    storage: Storage,
    slots: Tensor | np.ndarray[Any, Any],
    discounts: Sequence[float] | np.ndarray[Any, Any],
    reward: KeyPath = ("next", "reward"),
    done: KeyPath = ("next", "done"),
) -> n_step.NSteps:
    """The rows of slots (int64 [n]) and those that follow on each in its lane, with the n-step returns of them.

    Args:
        discounts: of the reward of each step, the first one's first, and of what comes after the last:
            `gamma ** np.arange(n_steps + 1)`.
        reward: an entry of one number.
        done: a bool entry that ends the steps, as the lane's newest row does; of several flags one is enough. Seams
            between rows are not looked at.

    Raises:
        IndexError: a slot holds no row.
        KeyError, ValueError: there is no such entry, or it has another form.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> done = torch.tensor([False, False, True, False, False])
        >>> index = rb.extend({"next": {"reward": torch.arange(5.0), "done": done}})
        >>> steps = read_n_steps(rb.storage, np.array([0, 1, 3]), 0.5 ** np.arange(4))
        >>> steps.rewards.tolist(), steps.last.tolist()
        ([[0.0, 1.0, 2.0], [1.0, 2.0, 0.0], [3.0, 4.0, 0.0]], [2, 2, 4])
        >>> steps.returns.flatten(), steps.discounts.flatten()
        (tensor([1., 2., 5.]), tensor([0.1250, 0.2500, 0.2500]))
    """
    powers = np.ascontiguousarray(discounts, np.float32)
    if powers.ndim != 1 or len(powers) < 2:
        raise ValueError(f"discounts must be of each step, and one for what comes after the last, got {discounts}")
    native = storage.native.read
    found = None if native is None else native.read_n_steps(slots, powers, reward, done)
    if found is not None:
        return n_step.NSteps(*found)
    return storage.access.beside_writers(
        functools.partial(_read_one_by_one, storage, to_tensor(slots), powers, reward, done)
    )


def _read_one_by_one(
    storage: Storage, slots: Tensor, discounts: np.ndarray[Any, Any], reward: KeyPath, done: KeyPath
) -> n_step.NSteps:
    """As `read_n_steps`, of rows of any storage."""

    def read(at: Tensor) -> tuple[Tensor, Tensor] | None:
        rows = read_leaves(storage, at, (reward, done))
        if rows.absent is not None or rows.overwritten is not None:
            return None
        numbers, flags = rows.batch
        if numbers.numel() != len(at) or flags.dtype != torch.bool:
            raise ValueError(f"{pytree.format_key(reward)} must be one number, {pytree.format_key(done)} bool")
        return numbers.reshape(-1).to(torch.float32), flags.reshape(len(at), math.prod(flags.shape[1:])).any(1)

    for _ in range(_MOST_LOOKS):
        with storage.mutex:
            found = n_step.read_n_steps(storage.lanes, slots, discounts, read)
        if found is not None:
            return found
    raise RuntimeError("other processes overwrite these rows faster than they can be copied; read fewer at a time")
