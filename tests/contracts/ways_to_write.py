"""Every way to write into a buffer, for what holds writers back: a rate limiter, or a queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from engram.data import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.data.replay_buffers.storages.single_steps import append_step
from engram.envs.transforms import DoubleToFloat, MultiStepTransform
from testing.own_parts import PickledStorage


def buffer(rate_limiter: Any = None, capacity: int = 100, batch_size: int = 4, **parts: Any) -> Any:
    parts.setdefault("storage", LazyTensorStorage(capacity))
    return TensorDictReplayBuffer(batch_size=batch_size, rate_limiter=rate_limiter, **parts)


def rows(n: int, first: int = 0) -> TensorDict:
    done = torch.zeros(n, 1, dtype=torch.bool)
    following = {"reward": torch.ones(n, 1), "done": done}
    return TensorDict({"x": torch.arange(first, first + n, dtype=torch.float32), "next": following}, [n])


class Way(NamedTuple):
    """A way to write: `make` gives a buffer with these arguments, and a call that writes one step into it."""

    make: Callable[..., tuple[Any, Callable[[], Any]]]
    #: Whether the call says itself that it wrote nothing; else it waits.
    declines: bool = False


def _plain(write: Callable[[Any], Any], **parts: Any) -> Way:
    def make(**bound: Any) -> tuple[Any, Callable[[], Any]]:
        made = {name: part() if callable(part) else part for name, part in parts.items()}
        rb = buffer(**{**made, **bound})
        return rb, lambda: write(rb)

    return Way(make)


def _columns(part: bool) -> Way:
    def make(**bound: Any) -> tuple[Any, Callable[[], Any]]:
        rb = buffer(**bound)
        columns = [np.zeros((5, 1), np.bool_), np.ones((5, 1), np.float32), np.zeros(5, np.float32)]

        def write() -> bool:
            into = rb.column_rows
            by_path = {("next", "done"): columns[0], ("next", "reward"): columns[1], ("x",): columns[2]}
            given = [by_path.get(path) for path in into.paths]
            return into.append_part(given, 0, 1) if part else into.append([c if c is None else c[:1] for c in given])

        return rb, write

    return Way(make, declines=True)


def _of_arrays() -> Way:
    def make(**bound: Any) -> tuple[Any, Callable[[], Any]]:
        rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4, **bound)
        step = {"x": np.zeros((), np.float32)}
        return rb, lambda: append_step(rb.storage, step) if rb.storage.initialized else rb.add(step)

    return Way(make, declines=True)


def _held_steps() -> Way:
    def make(**bound: Any) -> tuple[Any, Callable[[], Any]]:
        rb = buffer(**bound, transform=MultiStepTransform(n_steps=3, gamma=0.9))
        return rb, lambda: rb.extend(rows(1))

    return Way(make)


WRITES = {
    "add": _plain(lambda rb: rb.add(rows(1)[0])),
    "extend": _plain(lambda rb: rb.extend(rows(1))),
    "a list": _plain(lambda rb: rb.extend([rows(1)[0]])),
    "a dict": _plain(lambda rb: rb.extend(rows(1).to_dict())),
    "several environments": _plain(lambda rb: rb.add(rows(2)), storage=lambda: LazyTensorStorage(100, ndim=2)),
    "items": _plain(lambda rb: rb.extend(rows(1)), storage=lambda: ListStorage(100)),
    "objects": _plain(lambda rb: rb.add({"text": "a"}), storage=lambda: ListStorage(100), collate_fn=None),
    "a storage of the user's": _plain(lambda rb: rb.extend(rows(1)), storage=lambda: PickledStorage(100)),
    "given tensors": _plain(lambda rb: rb.extend(rows(1)), storage=lambda: TensorStorage(rows(100))),
    "one writer for ever": _plain(lambda rb: rb.extend(rows(1)), storage=lambda: LazyTensorStorage(100, lanes=1)),
    "an inverse transform": _plain(lambda rb: rb.extend(rows(1)), transform=lambda: DoubleToFloat(in_keys_inv=["x"])),
    "priorities": _plain(
        lambda rb: rb.extend(rows(1).set("td_error", torch.ones(1))), sampler=lambda: PrioritizedSampler(100, 0.7, 0.5)
    ),
    "the best rows": _plain(
        lambda rb: rb.extend(rows(1).set("rank", torch.ones(1))),
        writer=lambda: TensorDictMaxValueWriter(rank_key="rank"),
    ),
    "columns of a collector": _columns(part=False),
    "parts of columns": _columns(part=True),
    "arrays of an adapter": _of_arrays(),
    "steps that a transform holds back": _held_steps(),
}
