"""Where actions come from while a batch of raw gymnasium steps is collected.

A source's `choose(t)` gives one raw action per environment; the observations before step t are there by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from engram.collectors.extras import extras_of, stack_steps
from engram.collectors.observations import Observations
from engram.envs.gym_codecs import Codec
from engram.envs.gym_engine import check_action
from engram.envs.mdp import zero_where
from engram.envs.policies import FLAGS, ObservationPolicy, TensorDictPolicy

Choose = Callable[[int], list[Any]]


def random_actions(spec: Any, codec: Codec, batch_size: torch.Size, steps: int) -> Choose:
    """Actions for `steps` steps, all drawn at once from `spec`, which has the batch dimensions."""
    drawn, width = spec.rand((steps,)), batch_size.numel()
    check_action(codec, drawn)
    raws = codec.decode_rows(drawn.flatten(0, 1) if batch_size else drawn)
    return [raws[start : start + width] for start in range(0, steps * width, width)].__getitem__


def _decoder(codec: Codec, batch_size: torch.Size) -> Callable[[Any], list[Any]]:
    return codec.decode_rows if batch_size else lambda action: [codec.decode_one(action)]


class ModuleActions:
    """A module from one observation tensor to the action, called with nothing in between."""

    def __init__(self, policy: ObservationPolicy, codec: Codec, observations: Observations) -> None:
        module, row, decode = policy.module, observations.rows(policy.in_key), _decoder(codec, observations.batch_size)
        is_checked = False

        def choose(t: int) -> list[Any]:
            nonlocal is_checked
            action = module(row(t))
            if not is_checked:
                check_action(codec, action)
                is_checked = True
            return decode(action)

        self.choose: Choose = choose

    def forget(self, envs: list[int]) -> None:
        """A module keeps nothing from step to step."""

    def skip(self, t: int) -> None:
        """A module adds nothing to a random step."""

    def extras(self) -> TensorDictBase | None:
        """Nothing but the action."""
        return None


class TensorDictActions:
    """A policy on TensorDicts. What it writes besides the action is kept, stored, and handed to it at the next step."""

    def __init__(self, policy: TensorDictPolicy, codec: Codec, batch_size: torch.Size, device: Any) -> None:
        self._policy = policy
        self._codec = codec
        self._decode = _decoder(codec, batch_size)
        self._kept = TensorDict(batch_size=batch_size, device=device)
        self._flag = torch.zeros(*batch_size, 1, dtype=torch.bool)
        self._blank: TensorDictBase | None = None

    def begin(self, observations: Observations) -> TensorDictActions:
        """Makes ready for one batch."""
        self._rows = {key: observations.rows(key) for key in observations.keys}
        self._steps: list[TensorDictBase] = []
        return self

    def choose(self, t: int) -> list[Any]:
        """Raw actions for step t, one per environment."""
        out = self._policy(self._state(t))
        action = out.get("action")
        if not self._steps:
            check_action(self._codec, action)
        self._note(out)
        return self._decode(action)

    def skip(self, t: int) -> None:
        """Step t is a random one: the policy's entries are zero."""
        state = self._state(t)
        if self._blank is None:
            self._blank = extras_of(self._policy, state)
        self._note(state.update(self._blank.clone()))

    def forget(self, envs: list[int]) -> None:
        """These environments start anew: nothing of the last episode goes on."""
        mask = torch.zeros_like(self._flag)
        mask.view(-1)[envs] = True
        self._kept = zero_where(mask, self._kept)

    def extras(self) -> TensorDictBase | None:
        """What the policy wrote in this batch besides the action, `[*batch_size, steps]`."""
        stacked = stack_steps(self._steps, self._flag.ndim - 1)
        return None if stacked.is_empty() else stacked

    def _state(self, t: int) -> TensorDictBase:
        td = self._kept.copy()
        for key, row in self._rows.items():
            td.set(key, row(t))
        return td.update(dict.fromkeys(FLAGS, self._flag))

    def _note(self, out: TensorDictBase) -> None:
        extras = out.exclude("action", *FLAGS, *self._rows)
        self._steps.append(extras)
        following = extras.get("next", None)
        kept = extras.exclude("next")
        self._kept = kept if following is None else kept.update(following)
