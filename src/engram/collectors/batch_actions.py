"""Where actions come from while environments are stepped together.

A source yields one raw batched action a call, as gymnasium batches them, once the log shows the state before it. Before
an action is chosen, `forget` has been called for the environments that start anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.collectors.calls import CallLog
from engram.collectors.extras import extras_of
from engram.envs.base import merge_where, zero_where
from engram.envs.codecs import space_leaves
from engram.envs.engines import VectorEngine, check_action
from engram.envs.policies import FLAGS, ObservationPolicy, RandomPolicy, TensorDictPolicy

Array = np.ndarray[Any, Any]


class BatchSource:
    """A source that keeps nothing from call to call and writes nothing but the action."""

    def __init__(self, engine: VectorEngine) -> None:
        self.engine, self._codec = engine, engine.action

    def act(self, log: CallLog) -> Any:
        """The action `[n, *spec.shape]` in the state that the log shows."""
        raise NotImplementedError

    def actions(self, calls: int, log: CallLog) -> Iterator[Any]:
        """One raw batched action for each of so many calls, when its turn comes."""
        decode = self._codec.decode_batch
        for call in range(calls):
            action = self.act(log)
            if call == 0:  # one look a stretch: a wrong shape or a score instead of a choice shows at once
                check_action(self._codec, action, (self.engine.n,))
            try:
                raw = decode(action)
            except Exception:
                check_action(self._codec, action, (self.engine.n,))  # says what came and what is allowed
                raise
            log.act(raw)
            yield raw

    def forget(self, envs: Array) -> None:
        """Environments `envs` (bool `[n]`) start anew: nothing of their last episodes goes on."""

    def skip(self, log: CallLog) -> None:
        """All actions of the next call are random ones from elsewhere."""

    def disown(self, envs: Array, log: CallLog) -> None:
        """For `envs` (bool `[n]`) the action that `act` gave last was replaced by a random one."""


class BatchRandom(BatchSource):
    """Random actions, drawn for many calls at once."""

    def __init__(self, policy: RandomPolicy, engine: VectorEngine) -> None:
        super().__init__(engine)
        self._spec = policy.action_spec
        self._is_codec_spec = self._spec == self._codec.spec.expand(engine.n, *self._codec.spec.shape)
        self._is_one_array = not space_leaves(self._codec, ("action",))[0].path

    def act(self, log: CallLog) -> Any:
        return self._spec.rand(())

    def actions(self, calls: int, log: CallLog) -> Iterator[Any]:
        if not self._is_one_array:
            return super().actions(calls, log)
        raws = self._drawn(calls)
        log.act_often(raws)
        return iter(raws)

    def _drawn(self, calls: int) -> Array:
        if self._is_codec_spec:
            return np.asarray(self._codec.random_batch((calls, self.engine.n)))
        drawn = self._spec.rand((calls,))
        check_action(self._codec, drawn, (calls, self.engine.n))
        return np.asarray(self._codec.decode_batch(drawn))


class BatchModule(BatchSource):
    """A module from one observation tensor to the action, called with nothing in between."""

    def __init__(self, policy: ObservationPolicy, engine: VectorEngine) -> None:
        super().__init__(engine)
        self._module = policy.module
        self._leaf = [leaf.key for leaf in engine.leaves].index(policy.in_key)
        self._encode = engine.leaves[self._leaf].codec.encode

    def act(self, log: CallLog) -> Any:
        return self._module(self._encode(log.row(self._leaf)))


class BatchTensorDicts(BatchSource):
    """A policy on TensorDicts. What it writes besides the action is kept, stored, and handed to it at the next step."""

    def __init__(self, policy: TensorDictPolicy, engine: VectorEngine, device: Any) -> None:
        super().__init__(engine)
        self._policy = policy
        self._kept = TensorDict(batch_size=[engine.n], device=device)
        self._flag = torch.zeros(engine.n, 1, dtype=torch.bool)
        self._keys = [leaf.key for leaf in engine.leaves]
        self._blank: TensorDictBase | None = None
        self._last: TensorDictBase = self._kept

    def act(self, log: CallLog) -> Any:
        out = self._policy(self._state(log))
        self._note(out, log)
        return out.get("action")

    def skip(self, log: CallLog) -> None:
        state = self._state(log)
        self._note(state.update(self._blanks(state)), log)

    def disown(self, envs: Array, log: CallLog) -> None:
        log.note(zero_where(_as_mask(envs), self._last))
        self._kept = zero_where(_as_mask(envs), self._kept)

    def forget(self, envs: Array) -> None:
        if not self._kept.is_empty() and envs.any():
            self._kept = zero_where(_as_mask(envs), self._kept)

    def _blanks(self, state: TensorDictBase) -> TensorDictBase:
        if self._blank is None:
            self._blank = extras_of(self._policy, state)
        return self._blank.clone()

    def _state(self, log: CallLog) -> TensorDictBase:
        td = self._kept.copy()
        for index, leaf in enumerate(self.engine.leaves):
            td.set(leaf.key, leaf.codec.encode(log.row(index)))
        return td.update(dict.fromkeys(FLAGS, self._flag))

    def _note(self, out: TensorDictBase, log: CallLog) -> None:
        self._last = extras = out.exclude("action", *FLAGS, *self._keys)
        log.note(extras)
        following = extras.get("next", None)
        kept = extras.exclude("next").copy()
        self._kept = kept if following is None else kept.update(following.copy())


class RandomInstead(BatchSource):
    """Random actions; the source that they stand in for skips the steps."""

    def __init__(self, random: BatchRandom, source: BatchSource) -> None:
        super().__init__(random.engine)
        self._random, self._source = random, source

    def forget(self, envs: Array) -> None:
        self._source.forget(envs)

    def actions(self, calls: int, log: CallLog) -> Iterator[Any]:
        for raw in self._random.actions(calls, log):
            self._source.skip(log)
            yield raw


class RandomWhere(BatchSource):
    """Random actions for `envs` (bool `[n]`), those of a source for the others."""

    def __init__(self, envs: Array, random: BatchRandom, source: BatchSource) -> None:
        super().__init__(random.engine)
        self._envs, self._random, self._source = envs, random, source

    def forget(self, envs: Array) -> None:
        self._source.forget(envs)

    def act(self, log: CallLog) -> Any:
        chosen = self._source.act(log)
        self._source.disown(self._envs, log)
        random, mask = self._random.act(log), _as_mask(self._envs)
        if isinstance(chosen, Tensor):
            return torch.where(mask.reshape(-1, *(1,) * (chosen.ndim - 1)), random.to(chosen.dtype), chosen)
        return merge_where(mask, random, chosen)


def _as_mask(envs: Array) -> Tensor:
    return torch.from_numpy(envs).unsqueeze(1)
