"""From one step to the next: what of a stepped TensorDict is the state that follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor


def step_mdp(
    td: TensorDictBase,
    *,
    keep_other: bool = True,
    exclude_reward: bool = True,
    exclude_done: bool = False,
    exclude_action: bool = True,
) -> TensorDictBase:
    """The root of step t+1 from a stepped TensorDict of step t: what is under `"next"`, moved up.

    Other root keys (a policy's own, say) stay unless `keep_other=False`. The result is a new TensorDict that shares its
    tensors with `td`. Raises KeyError where `td` has not been stepped.

    >>> from tensordict import TensorDict
    >>> step_mdp(TensorDict({"a": torch.zeros(1), "next": {"a": torch.ones(1), "reward": torch.ones(1)}}))["a"]
    tensor([1.])
    """
    following = td.get("next", None)
    if following is None:
        raise KeyError(
            f"step_mdp needs a stepped TensorDict with a 'next' entry, got keys {sorted(td.keys(), key=str)}"
        )
    root = td.exclude("next", "reward", *(("action",) if exclude_action else ())) if keep_other else td.empty()
    dropped = (("reward",) if exclude_reward else ()) + (("done", "terminated", "truncated") if exclude_done else ())
    root = root.exclude(*dropped) if dropped else root
    if not exclude_action and not keep_other:
        root.set("action", td.get("action"))
    return root.copy().update(following.exclude(*dropped).copy())  # copies: nested entries must not become shared


def reset_where(env: Any, td: TensorDictBase, mask: Tensor) -> TensorDictBase:
    """`td` after the environments where `mask` (bool `[*batch, 1]`) holds were reset.

    Whatever else a policy keeps in `td` becomes zero there: a hidden state does not cross into the next trajectory.
    """
    fresh = env.reset(td.copy().set("_reset", mask))
    return zero_where(mask, td).update(fresh.exclude("_reset"))


def zero_where(mask: Tensor, td: TensorDictBase) -> TensorDictBase:
    """A copy of `td` that is zero where `mask` (bool `[*batch, 1]`) holds."""
    return td.apply(lambda leaf: torch.where(_like(mask, leaf, td.ndim), torch.zeros_like(leaf), leaf))


def merge_where(mask: Tensor, new: TensorDictBase, old: TensorDictBase) -> TensorDictBase:
    """`new` where `mask` (bool `[*batch, 1]`) holds, else `old`; the keys are those of `new`."""
    return new.named_apply(
        lambda key, leaf: torch.where(_like(mask, leaf, new.ndim), leaf, old.get(key)), nested_keys=True
    )


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


def _like(mask: Tensor, leaf: Tensor, batch_dims: int) -> Tensor:
    flat = mask.reshape(mask.shape[:batch_dims])
    return flat.reshape((*flat.shape, *(1,) * (leaf.ndim - batch_dims)))
