"""What a policy writes besides the action."""

from __future__ import annotations

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
