"""The comparison of what an environment returns with its specs, for `check_env_specs`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from engram.specs import Composite, Spec, StackedComposite


def compare_with_specs(env: Any, seed: int | None, tensordict: Any, max_steps: int) -> None:
    """Runs `env` for some random steps. Raises ValueError for the first value that does not match its spec."""
    if seed is not None:
        env.set_seed(seed)
    state = [env.observation_spec, env.full_done_spec]
    after = [*state, env.full_reward_spec]
    td = env.reset(tensordict)
    _check("reset", env, td, state)
    for _ in range(max_steps):
        td, following = env.step_and_maybe_reset(env.rand_action(td))
        _check("step", env, td, [*state, env.full_action_spec])
        _check("step, under 'next'", env, td.get("next"), after)
        _check_flags(td.get("next"))
        _check("step and reset", env, following, state)
        _check_others_continue(td.get("next"), following, state)
        td = following


class _Entry(NamedTuple):
    """A leaf of a spec and its value; None where there is none."""

    key: str | tuple[Any, ...]
    spec: Spec
    value: Any


def _entries(td: Any, spec: Composite, path: tuple[Any, ...] = ()) -> list[_Entry]:
    """Every leaf of a spec, those of a stack's members by their numbers, with its value in `td`."""
    if isinstance(spec, StackedComposite):
        parts = (None if td is None else spec.parts_of(td)) or [None] * len(spec.specs)
        members = enumerate(zip(spec.specs, parts, strict=True))
        return [entry for i, (one, part) in members for entry in _entries(part, one, (*path, i))]
    entries: list[_Entry] = []
    for name, part in spec.items():
        value = None if td is None else td.get(name, None)
        if isinstance(part, Composite):
            entries += _entries(value, part, (*path, name))
        elif part is not None:
            entries.append(_Entry((*path, name) if path else name, part, value))
    return entries


def _check(where: str, env: Any, td: Any, specs: list[Composite]) -> None:
    if td.batch_size != env.batch_size or td.device != env.device:
        raise ValueError(
            f"{where}: a TensorDict of batch_size={tuple(td.batch_size)}, device={td.device}; the environment has "
            f"batch_size={tuple(env.batch_size)}, device={env.device}"
        )
    for key, spec, value in [entry for composite in specs for entry in _entries(td, composite)]:
        if not spec.is_in(value):
            is_tensor = isinstance(value, torch.Tensor)
            text = f"{value.dtype} {tuple(value.shape)}: {value}" if is_tensor else repr(value)
            raise ValueError(f"{where}: {key!r} is not what its spec says.\n  found:   {text}\n  allowed: {spec}")


def _check_others_continue(after: Any, following: Any, specs: list[Composite]) -> None:
    continues = ~after["done"].squeeze(-1)
    pairs = [pair for spec in specs for pair in zip(_entries(after, spec), _entries(following, spec), strict=True)]
    for last, first in pairs:
        key, before, now = last.key, last.value[continues], first.value[continues]
        if not bool(((before == now) | ((before != before) & (now != now))).all()):  # NaN stays NaN
            raise ValueError(f"a reset changed {key!r} where no episode was over.\n  before: {before}\n  after:  {now}")


def _check_flags(td: Any) -> None:
    if not torch.equal(td["done"], td["terminated"] | td["truncated"]):
        raise ValueError(
            f"done must be terminated | truncated, got done={td['done'].tolist()}, "
            f"terminated={td['terminated'].tolist()}, truncated={td['truncated'].tolist()}"
        )
