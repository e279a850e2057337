"""Where the actions of a rollout with raw values come from: a random draw, a module, or a policy on TensorDicts.

A loop asks its source for the action of each step, once the observations before that step are there. Before that it
has called `reset_envs` for all environments that start a new episode with this step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.collectors.policy_weights import PolicyWeights
from engram.envs.base import merge_where, zero_where
from engram.envs.codecs import SpaceCodec, space_leaves
from engram.envs.engines import action_check
from engram.envs.policies import FLAGS, ObservationPolicy, RandomPolicy, TensorDictPolicy, zero_outputs
from engram.specs.tensors import ChoiceSpec

Array = np.ndarray[Any, Any]
Envs = Array | list[int] | range
"""Some of the environments: bool `[n]`, or their numbers."""


class ObservedSteps(Protocol):
    """The observations that a rollout has collected so far, as action sources read them."""

    @property
    def keys(self) -> list[Any]:
        """The keys of the observations."""

    def rows(self, key: Any) -> Callable[[int], Tensor]:
        """A function from t to the observation `[*batch_size, *shape]` before step t, once that is the newest."""


def mask_of(envs: Envs, batch_size: torch.Size) -> Tensor:
    """Whether each environment is one of `envs`: bool `[*batch_size, 1]`."""
    mask = np.zeros((*batch_size, 1), np.bool_)
    mask.reshape(-1)[envs] = True
    return torch.from_numpy(mask)


class ActionSource:
    """Chooses the actions of a rollout. This one has no state, and its policy writes nothing but the action."""

    def __init__(self, codec: SpaceCodec, batch_size: torch.Size, weights: PolicyWeights) -> None:
        self._codec, self._batch_size, self._weights = codec, batch_size, weights
        self._check = action_check(codec, batch_size)

    def choose(self, t: int) -> Any:
        """The action of step t, a tensor or TensorDict `[*batch_size, *spec.shape]`."""
        raise NotImplementedError

    def raw_actions(
        self,
        times: Iterable[int],
        decode: Callable[[Any], Any],
        *,
        known: Callable[[Any], Any] | None = None,
        record: Callable[[Any], object],
        record_version: Callable[[int], object],
    ) -> Iterator[Any]:
        """Yields the raw action of each step, as `decode` makes it of the chosen one.

        `known` does the same where the action is quickly found to be one of the space, and returns None, or raises,
        for what needs a closer look. Before the action is yielded `record` gets it, and `record_version` the version of
        the weights that chose it. Raises ValueError for an action that is not of the environments' space.
        """
        weights, choose, accepts, is_first = self._weights, self.choose, self._check.accepts, True
        if known is None:

            def known(action: Any) -> Any:
                return decode(action) if accepts(action) else None

        for t in times:
            with weights.call_lock:
                version = weights.begin_call()
                action = choose(t)
            try:
                raw = None if is_first else known(action)  # of the first the shape is compared, too
            except Exception:
                raw = None
            if raw is None:
                self._check.refuse(action, t)
                raw, is_first = decode(action), False
            record(raw)
            record_version(version)
            yield raw

    def known_by(self, raw_of: Callable[[Array], Any]) -> Callable[[Any], Any]:
        """A `known` for `raw_actions` of a space of arrays, with `raw_of` for numbers that are in the space."""
        array_of = self._check.array_of

        def known(action: Any) -> Any:
            array = array_of(action)
            return None if array is None else raw_of(array)

        return known

    def reset_envs(self, envs: Envs) -> None:
        """Drops the state that the policy has of the last episodes of `envs`, which start new ones."""

    def skip_step(self, t: int) -> None:
        """Leaves out step t, whose actions are random ones of another source."""

    def discard(self, envs: Envs) -> None:
        """Drops the state and outputs of the last `choose` for `envs`, whose actions are replaced by random ones."""


class RandomActions(ActionSource):
    """Random actions, which can be drawn for many steps at once."""

    def __init__(self, policy: RandomPolicy, codec: SpaceCodec, batch_size: torch.Size, weights: PolicyWeights) -> None:
        super().__init__(codec, batch_size, weights)
        self._spec = policy.action_spec
        self._is_codec_spec = self._spec == codec.spec.expand(*batch_size, *codec.spec.shape)
        self.is_one_array = not space_leaves(codec, ("action",))[0].path

    def _has_mask(self) -> bool:
        """Whether the spec forbids choices now, which the codec does not know of."""
        return isinstance(self._spec, ChoiceSpec) and self._spec.mask is not None

    def choose(self, t: int) -> Any:
        return self._spec.rand(())

    def draw_rows(self, steps: int) -> tuple[Any, list[Any]]:
        """Actions `[steps * environments, ...]`, and a list of the raw ones."""
        if self._is_codec_spec and not self._has_mask():
            return self._codec.random_rows(steps * self._batch_size.numel())
        drawn = self._spec.rand((steps,))
        action_check(self._codec, (steps, *self._batch_size)).require(drawn)
        rows = drawn.flatten(0, 1) if self._batch_size else drawn
        raws = self._codec.decode_rows(rows)
        return self._codec.encode_rows(raws), raws

    def draw_batches(self, steps: int) -> Array:
        """Raw actions `[steps, *batch_size, ...]` as gymnasium batches them, where an action is one array."""
        if self._is_codec_spec and not self._has_mask():
            return np.asarray(self._codec.random_batch((steps, *self._batch_size)))
        drawn = self._spec.rand((steps,))
        action_check(self._codec, (steps, *self._batch_size)).require(drawn)
        return np.asarray(self._codec.decode_batch(drawn))


class ModuleActions(ActionSource):
    """Actions of a module on observation tensors, which is called directly.

    `store_outputs` gets a TensorDict of what the module returns besides the action, for steps where there is any, and
    after `discard` one that replaces the last.
    """

    def __init__(
        self,
        policy: ObservationPolicy,
        codec: SpaceCodec,
        batch_size: torch.Size,
        weights: PolicyWeights,
        device: Any,
        observed: ObservedSteps,
        store_outputs: Callable[[TensorDictBase], object],
    ) -> None:
        super().__init__(codec, batch_size, weights)
        self._policy, self._module, self._device = policy, policy.module, device
        self._keys = observed.keys
        self._row, *self._more_rows = [observed.rows(key) for key in policy.in_keys]
        self._store_outputs = store_outputs
        self._last_outputs: TensorDictBase | None = None
        self._zero_outputs: TensorDictBase | None = None

    def choose(self, t: int) -> Any:
        row = self._row(t)
        out = self._module(row, *[more(t) for more in self._more_rows]) if self._more_rows else self._module(row)
        return out if type(out) is Tensor else self._action_of(out)

    def _action_of(self, out: Any) -> Any:
        action, others = self._policy.split(out)
        self._last_outputs = None
        if others:
            self._last_outputs = TensorDict(others, self._batch_size, device=self._device).exclude(*self._keys)
            self._store_outputs(self._last_outputs)
        return action

    def skip_step(self, t: int) -> None:
        if self._policy.outputs == 1:
            return
        if self._zero_outputs is None:
            rows = [self._row, *self._more_rows]
            observations = {key: row(t) for key, row in zip(self._policy.in_keys, rows, strict=True)}
            state = TensorDict(observations, self._batch_size, device=self._device)
            self._zero_outputs = zero_outputs(self._policy, state).exclude(*self._keys)
        if not self._zero_outputs.is_empty():
            self._store_outputs(self._zero_outputs.clone())

    def discard(self, envs: Envs) -> None:
        if self._last_outputs is not None:
            self._store_outputs(zero_where(mask_of(envs, self._batch_size), self._last_outputs))


class TensorDictActions(ActionSource):
    """Actions of a policy on TensorDicts. Its other entries are stored, and are in its input at the next step."""

    def __init__(
        self,
        policy: TensorDictPolicy,
        codec: SpaceCodec,
        batch_size: torch.Size,
        weights: PolicyWeights,
        device: Any,
    ) -> None:
        super().__init__(codec, batch_size, weights)
        self._policy = policy
        self._carried = TensorDict(batch_size=batch_size, device=device)
        self._flag = torch.zeros(*batch_size, 1, dtype=torch.bool)
        self._zero_outputs: TensorDictBase | None = None
        self._last_outputs: TensorDictBase = self._carried

    def start(self, observed: ObservedSteps, store_outputs: Callable[[TensorDictBase], object]) -> TensorDictActions:
        """Reads `observed` from now on; `store_outputs` gets what the policy writes besides the action.

        After `discard` it gets outputs that replace the last ones.
        """
        self._rows = {key: observed.rows(key) for key in observed.keys}
        self._store_outputs = store_outputs
        return self

    def choose(self, t: int) -> Any:
        out = self._policy(self._state(t))
        self._keep_outputs(out)
        return out.get("action")

    def skip_step(self, t: int) -> None:
        state = self._state(t)
        if self._zero_outputs is None:
            self._zero_outputs = zero_outputs(self._policy, state)
        self._keep_outputs(state.update(self._zero_outputs.clone()))

    def discard(self, envs: Envs) -> None:
        mask = mask_of(envs, self._batch_size)
        self._store_outputs(zero_where(mask, self._last_outputs))
        self._carried = zero_where(mask, self._carried)

    def reset_envs(self, envs: Envs) -> None:
        if not self._carried.is_empty():
            self._carried = zero_where(mask_of(envs, self._batch_size), self._carried)

    def _state(self, t: int) -> TensorDictBase:
        td = self._carried.copy()
        for key, row in self._rows.items():
            td.set(key, row(t))
        return td.update(dict.fromkeys(FLAGS, self._flag))

    def _keep_outputs(self, out: TensorDictBase) -> None:
        self._last_outputs = outputs = out.exclude("action", *FLAGS, *self._rows)
        self._store_outputs(outputs)
        following = outputs.get("next", None)
        carried = outputs.exclude("next").copy()
        self._carried = carried if following is None else carried.update(following.copy())


class MaskedRandom(ActionSource):
    """Random actions for `envs` (bool `[n]`), and those of another source for the rest."""

    def __init__(
        self,
        envs: Array,
        random: RandomActions,
        source: ActionSource,
        codec: SpaceCodec,
        batch_size: torch.Size,
        weights: PolicyWeights,
    ) -> None:
        super().__init__(codec, batch_size, weights)
        self._envs, self._random, self._source = envs, random, source

    def reset_envs(self, envs: Envs) -> None:
        self._source.reset_envs(envs)

    def choose(self, t: int) -> Any:
        chosen = self._source.choose(t)
        self._source.discard(self._envs)
        random, mask = self._random.choose(t), torch.from_numpy(self._envs).unsqueeze(1)
        if isinstance(chosen, Tensor):
            return torch.where(mask.reshape(-1, *(1,) * (chosen.ndim - 1)), random.to(chosen.dtype), chosen)
        return merge_where(mask, random, chosen)


def skipping(source: ActionSource, raws: Iterable[Any], *, per_step: int = 1) -> Iterator[Any]:
    """Yields random raw actions, `per_step` for each step, and lets `source` skip these steps."""
    for number, raw in enumerate(raws):
        if number % per_step == 0:
            source.skip_step(number // per_step)
        yield raw
