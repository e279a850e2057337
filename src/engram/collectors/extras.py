"""What a policy writes besides the action, and how steps with and without it become one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase

from engram.envs.policies import CallablePolicy, TensorDictPolicy


def extras_of(policy: TensorDictPolicy, td: TensorDictBase) -> TensorDictBase:
    """Zeros for every entry that `policy` adds to `td` besides the action, under `"next"` too.

    Random steps carry them, so that all batches of a collector have the same keys. The policy is called once, on a
    copy; torch's random numbers are as they were afterwards.
    """
    if not isinstance(policy, CallablePolicy):
        return td.empty()
    with torch.random.fork_rng():
        out = policy(td.clone())
    known = set(td.keys(True, True)) | {"action"}
    return out.select(*[key for key in out.keys(True, True) if key not in known]).apply(torch.zeros_like)


def stack_steps(steps: Sequence[TensorDictBase], dim: int) -> TensorDictBase:
    """`torch.stack`; entries that only some steps have are zero in the others.

    >>> from tensordict import TensorDict
    >>> stack_steps([TensorDict(), TensorDict({"hidden": torch.ones(1)})], 0)["hidden"].tolist()
    [[0.0], [1.0]]
    """
    keys = [set(step.keys(True, True)) for step in steps]
    if any(k != keys[0] for k in keys):
        models = {key: step.get(key) for step, k in zip(steps, keys, strict=True) for key in k}
        for step, k in zip(steps, keys, strict=True):
            for key in models.keys() - k:
                step.set(key, torch.zeros_like(models[key]))
    return torch.stack(list(steps), dim)
