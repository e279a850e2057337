"""Where actions come from while a batch of raw gymnasium steps is collected.

A source gives one raw action per environment for a step t, once the observations before it are there, and adds them to
a list that nobody else changes. Before a step is chosen, `forget` has been called for each environment that was reset.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from engram.collectors.extras import extras_of
from engram.collectors.observations import Observations
from engram.envs.base import stack_steps, zero_where
from engram.envs.codecs import SpaceCodec
from engram.envs.engines import check_action
from engram.envs.policies import FLAGS, ObservationPolicy, RandomPolicy, TensorDictPolicy


class ActionSource:
    """A source that keeps nothing from step to step and writes nothing but the action."""

    def __init__(self, codec: SpaceCodec, batch_size: torch.Size) -> None:
        self._codec = codec
        self._batch_size = batch_size

    def act(self, t: int) -> Any:
        """The action `[*batch_size, *spec.shape]` for step t."""
        raise NotImplementedError

    def actions(self, times: range) -> Iterator[Any]:
        """`act` for each step, when its turn comes."""
        return map(self.act, times)

    def raws(self, times: range, record: list[Any]) -> Iterator[Any]:
        """One raw action per environment for each step, when its turn comes; each is also added to `record`."""
        return self._of_several(times, record) if self._batch_size else self._of_one(times, record)

    def _checked(self, times: range) -> Iterator[Any]:
        actions = self.actions(times)
        for first in actions:  # one look a batch: a wrong shape or a score instead of a choice shows at once
            check_action(self._codec, first, self._batch_size)
            return chain((first,), actions)
        return actions

    def _of_one(self, times: range, record: list[Any]) -> Iterator[Any]:
        decode, keep, add = self._codec.decode_one, self._codec.keep, record.append
        for action in self._checked(times):
            try:
                raw = decode(action)
            except Exception:
                check_action(self._codec, action, self._batch_size)  # says what came and what is allowed
                raise
            add(keep(raw))
            yield raw

    def _of_several(self, times: range, record: list[Any]) -> Iterator[Any]:
        decode, keep, add = self._codec.decode_rows, self._codec.keep_rows, record.extend
        for action in self._checked(times):
            try:
                raws = decode(action)
            except Exception:
                check_action(self._codec, action, self._batch_size)
                raise
            add(keep(raws))
            yield from raws

    def forget(self, env: int) -> None:
        """Environment `env` starts anew: nothing of its last episode goes on."""

    def skip(self, t: int) -> None:
        """Step t has a random action from elsewhere."""

    def extras(self, steps: int) -> TensorDictBase | None:
        """What the policy wrote in the first steps of this batch besides the action, `[*batch_size, steps]`."""
        return None


class RandomActions(ActionSource):
    """Random actions, drawn for many steps at once."""

    def __init__(self, policy: RandomPolicy, codec: SpaceCodec, batch_size: torch.Size) -> None:
        super().__init__(codec, batch_size)
        self._spec = policy.action_spec
        self._is_codec_spec = self._spec == codec.spec.expand(*batch_size, *codec.spec.shape)

    def draw(self, steps: int, source: ActionSource) -> tuple[Any, Any]:
        """Actions `[steps * environments, ...]`, and an iterable of the raw ones; `source` skips the steps."""
        encoded, raws = self._drawn(steps)
        return encoded, raws if source is self else _skipping(raws, source, self._batch_size.numel())

    def _drawn(self, steps: int) -> tuple[Any, list[Any]]:
        if self._is_codec_spec:
            return self._codec.random_rows(steps * self._batch_size.numel())
        drawn = self._spec.rand((steps,))
        check_action(self._codec, drawn, (steps, *self._batch_size))
        rows = drawn.flatten(0, 1) if self._batch_size else drawn
        raws = self._codec.decode_rows(rows)
        return self._codec.encode_rows(raws), raws


def _skipping(raws: list[Any], source: ActionSource, width: int) -> Any:
    for slot, raw in enumerate(raws):
        if slot % width == 0:
            source.skip(slot // width)
        yield raw


class ModuleActions(ActionSource):
    """A module from one observation tensor to the action, called with nothing in between."""

    def __init__(self, policy: ObservationPolicy, codec: SpaceCodec, observations: Observations) -> None:
        super().__init__(codec, observations.batch_size)
        self._module, self._row = policy.module, observations.rows(policy.in_key)

    def actions(self, times: range) -> Iterator[Any]:
        return map(self._module, map(self._row, times))


class TensorDictActions(ActionSource):
    """A policy on TensorDicts. What it writes besides the action is kept, stored, and handed to it at the next step."""

    def __init__(self, policy: TensorDictPolicy, codec: SpaceCodec, batch_size: torch.Size, device: Any) -> None:
        super().__init__(codec, batch_size)
        self._policy = policy
        self._kept = TensorDict(batch_size=batch_size, device=device)
        self._flag = torch.zeros(*batch_size, 1, dtype=torch.bool)
        self._blank: TensorDictBase | None = None

    def begin(self, observations: Observations) -> TensorDictActions:
        """Makes ready for one batch."""
        self._rows = {key: observations.rows(key) for key in observations.keys}
        self._steps: list[TensorDictBase] = []
        return self

    def act(self, t: int) -> Any:
        out = self._policy(self._state(t))
        self._note(out)
        return out.get("action")

    def skip(self, t: int) -> None:
        state = self._state(t)
        if self._blank is None:
            self._blank = extras_of(self._policy, state)
        self._note(state.update(self._blank.clone()))

    def forget(self, env: int) -> None:
        mask = torch.zeros_like(self._flag)
        mask.view(-1)[env] = True
        self._kept = zero_where(mask, self._kept)

    def extras(self, steps: int) -> TensorDictBase | None:
        stacked = stack_steps(self._steps[:steps], self._flag.ndim - 1)
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
        kept = extras.exclude("next").copy()
        self._kept = kept if following is None else kept.update(following.copy())
