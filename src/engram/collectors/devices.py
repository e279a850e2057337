"""Which tensors live where while a collector works."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from engram.envs.policies import CallablePolicy, RandomPolicy, TensorDictPolicy
from engram.specs.tensors import usable_device

Device = torch.device | str | int | None


def first_device(name: str, device: Device, fallback: Device) -> torch.device | None:
    """The device of an argument, or, where it is None, that of `device`.

    Raises:
        ValueError: there is no such device here.
    """
    return usable_device(fallback, "device") if device is None else usable_device(device, name)


def is_cpu(device: torch.device | None) -> bool:
    """Whether tensors there are in main memory; None is no device at all, which is."""
    return device is None or device.type == "cpu"


def on_device(policy: TensorDictPolicy, policy_device: torch.device | None, env: Any) -> TensorDictPolicy:
    """`policy` for TensorDicts of `env`, called with copies on `policy_device`; its results are brought back."""
    theirs = env.device
    same = policy_device is None or policy_device == theirs or (is_cpu(policy_device) and is_cpu(theirs))
    if same or isinstance(policy, RandomPolicy):
        return policy
    home = theirs or torch.device("cpu")

    def call(td: TensorDictBase) -> TensorDictBase:
        out = policy(td.to(policy_device)).to(home)
        return out if theirs is not None else out.clear_device_()

    return CallablePolicy(call)


def stored(batch: TensorDictBase, device: torch.device | None, *, waits: bool) -> TensorDictBase:
    """`batch` on `device` (None: where it is); without waiting, a copy to or from a GPU may still be under way."""
    if device is None:
        return batch
    return batch.to(device) if waits else batch.to(device, non_blocking=True)
