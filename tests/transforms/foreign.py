"""Transforms of users' own, in the forms that TorchRL's have."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import nn

from engram.transforms import Transform


class Form(nn.Module):
    """A module with `forward`, `inv`, `_inv_call` and keys; its inverse gets containers of its own."""

    def __init__(self, in_keys=(), in_keys_inv=()):
        super().__init__()
        self.in_keys, self.out_keys = list(in_keys), list(in_keys)
        self.in_keys_inv, self.out_keys_inv = list(in_keys_inv), list(in_keys_inv)

    def forward(self, td):
        assert isinstance(td, TensorDictBase)
        for key in self.in_keys:
            td.set(key, td.get(key) / 2)
        return td

    def inv(self, td):
        assert isinstance(td, TensorDictBase)
        return self._inv_call(td.clone(recurse=False))

    def _inv_call(self, td):
        for key in self.in_keys_inv:
            td.set(key, td.get(key) * 2)
        return td


class Delayed(Form):
    """Holds the newest two steps of a trajectory back on writing, as multi-step transforms do."""

    def __init__(self):
        super().__init__()
        self._buffer = None
        self.seen = []

    def _inv_call(self, td):
        self.seen.append(td.batch_size)  # in place
        whole = td if self._buffer is None else torch.cat([self._buffer, td], -1)
        steps = whole.batch_size[-1]
        ready = steps if whole["next", "done"][..., -1, :].all() else max(steps - 2, 0)
        self._buffer = whole[..., ready:] if ready < steps else None
        return whole[..., :ready] if ready else None


class Silent(Delayed):
    """The same, with a batch without steps in the place of None."""

    def _inv_call(self, td):
        made = super()._inv_call(td)
        return td[..., :0] if made is None else made


class Plain:
    """`forward` and `inv`, on data of any form."""

    def forward(self, batch):
        return apply(batch, lambda x: x / 2)

    def inv(self, batch):
        return apply(batch, lambda x: x * 2)

    def __repr__(self):
        return f"{type(self).__name__}()"


class ByCall:
    """Only `_inv_call`, which sets entries in place."""

    def __call__(self, td):
        return td.set("x", td["x"] / 2)

    def _inv_call(self, td):
        return td.set("x", td["x"] * 2)

    __repr__ = Plain.__repr__


class ByKey:
    """Only `_inv_apply_transform`, with keys."""

    in_keys_inv = ["x"]

    def __call__(self, td):
        return td.set("x", td["x"] / 2)

    def _inv_apply_transform(self, value):
        return value * 2

    __repr__ = Plain.__repr__


class ChildByCall(Transform):
    """A child of our own with `_call` and `_inv_call`, written for environments."""

    def _call(self, td):
        return td.set("x", td["x"] / 2)

    def _inv_call(self, td):
        return td.set("x", td["x"] * 2)


class ChildByKey(Transform):
    """A child of our own that works key by key."""

    def __init__(self):
        super().__init__(in_keys=["x"], in_keys_inv=["x"])

    def _apply_transform(self, value):
        return value / 2

    def _inv_apply_transform(self, value):
        return value * 2


class ChildByInv(Transform):
    """A child of our own with `forward` and `inv`."""

    def forward(self, td):
        return td.set("x", td["x"] / 2)

    def inv(self, td):
        return [self.inv(item) for item in td] if isinstance(td, list) else td.copy().set("x", td["x"] * 2)


class ChildDelayed(Transform):
    """A child of our own that holds steps back in `_inv_call`."""

    def __init__(self):
        super().__init__()
        self._buffer = None
        self.seen = []

    _inv_call = Delayed._inv_call


def apply(batch, fn):
    if isinstance(batch, dict):
        return {**batch, "x": fn(batch["x"])}
    return fn(batch) if isinstance(batch, torch.Tensor) else batch.copy().set("x", fn(batch["x"]))


HALVING = [
    lambda: Form(["x"], ["x"]),
    Plain,
    ByCall,
    ByKey,
    ChildByCall,
    ChildByKey,
    ChildByInv,
]  #: halve "x" on reading, and double it on writing
DELAYING = [Delayed, Silent, ChildDelayed]
