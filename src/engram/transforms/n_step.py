"""n-step returns of a batch: what `MultiStep` and `MultiStepTransform` share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.transforms.entries import Key, as_keys, as_leaf, find, get, is_class, put
from engram.transforms.strands import Trajectories
from engram.transforms.timed import sibling

NEXT_REWARD: Key = ("next", "reward")


def checked_gamma(gamma: float) -> float:
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be 0 to 1, got {gamma}")
    return float(gamma)


def checked_n_steps(n_steps: int) -> int:
    if isinstance(n_steps, bool) or not hasattr(n_steps, "__index__") or int(n_steps) < 1:
        raise ValueError(f"n_steps must be an integer of 1 or more, got {n_steps!r}")
    return int(n_steps)


def reward_keys_of(keys: Any) -> list[Key]:
    """Rewards, each of them under `next`."""
    made = [NEXT_REWARD] if keys is None else as_keys(keys)
    if any(key[0] != "next" or isinstance(key, str) for key in made):
        raise ValueError(f"rewards of n steps are under 'next', got {made}")
    return made


def set_n_steps(batch: Any, now: Trajectories, gamma: float, n_steps: int, reward_keys: Sequence[Key]) -> None:
    """Makes each step of a batch one of n steps, in place: rewards are summed, what is under `next` is what came last.

    A step is shorter where its trajectory ends, or the batch does.
    """
    end = torch.minimum(now.position + n_steps - 1, now.last())
    steps = end - now.position + 1
    rewards = [(key, get(batch, key, "n-step returns")) for key in reward_keys]
    following = find(batch, "next")
    put(batch, "next", _mapped(following, _at(now, end)))
    for key, reward in rewards:
        put(batch, key, _summed(now, key, reward, end, gamma, n_steps))
        put(batch, sibling(key, f"original_{key[-1]}"), reward)
    done = now.done.gather(1, end)
    dtype = rewards[0][1].dtype if rewards and rewards[0][1].is_floating_point() else torch.get_default_dtype()
    for name, value in (
        ("gamma", torch.as_tensor(gamma, dtype=torch.float64).pow(steps).to(dtype)),
        ("steps_to_next_obs", steps),
        ("nonterminal", ~done),
    ):
        put(batch, name, now.strands.join(value).unsqueeze(-1))


def _at(now: Trajectories, end: Tensor) -> Callable[[Tensor], Tensor]:
    """The steps `end` of a leaf."""
    rows = torch.arange(end.shape[0], device=end.device).unsqueeze(1)
    return lambda leaf: now.strands.join(now.strands.split(leaf, "next")[rows, end])


def _mapped(part: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(part, dict):
        return {k: _mapped(v, fn) for k, v in part.items()}
    if isinstance(part, TensorDictBase) or is_class(part):
        return part.apply(fn)
    return fn(as_leaf(part))


def _summed(now: Trajectories, key: Key, reward: Tensor, end: Tensor, gamma: float, n_steps: int) -> Tensor:
    split = now.strands.split(reward, key)
    x = split if split.is_floating_point() else split.to(torch.get_default_dtype())
    x = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    total, steps = x.clone(), now.strands.steps
    for ahead in range(1, min(n_steps, steps)):
        there = now.position[: steps - ahead] + ahead <= end[:, : steps - ahead]
        there = there.reshape(*there.shape, *[1] * (x.ndim - 2))
        total[:, : steps - ahead] += gamma**ahead * torch.where(there, x[:, ahead:], 0)
    return now.strands.join(total.to(reward.dtype) if reward.is_floating_point() else total)
