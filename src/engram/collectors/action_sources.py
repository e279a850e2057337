"""Where the actions of a rollout with raw values come from: a random draw, a module, or a policy on TensorDicts.

A loop asks its source for the action of each step, once the observations before that step are there. Before that it
has called `reset_envs` for all environments that start a new episode with this step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.collectors.policy_weights import PolicyWeights
from engram.envs.base import merge_where, zero_where
from engram.envs.codecs import SpaceCodec, first_of
from engram.envs.engines import action_check
from engram.envs.policies import (
    FLAGS,
    INPUT_ERRORS,
    ObservationPolicy,
    RandomPolicy,
    TensorDictPolicy,
    module_keys,
    with_entries,
    zero_outputs,
)
from engram.pytree import get_entry
from engram.specs.tensors import ChoiceSpec
from engram.store.layout import tensordict_of

Array = np.ndarray[Any, Any]
Envs = Array | list[int] | range
"""Some of the environments: bool `[n]`, or their numbers."""


class ObservedSteps(Protocol):
    """The observations that a rollout has collected so far, as action sources read them."""

    @property
    def keys(self) -> list[Any]:
        """The keys of the observations."""

    def rows(self, key: Any) -> Callable[[int], Tensor]:
        """A function from t to a copy of the observation `[*batch_size, *shape]` before step t, the newest one."""


class OutputSink(Protocol):
    """Takes what a policy writes besides the action of the next step; a second time replaces the first."""

    def store_outputs(self, outputs: Mapping[str, Any]) -> None:
        """Takes the entries at the root of a TensorDict `[*batch_size]`; the tensors may change afterwards."""

    def store_tensordict(self, outputs: TensorDictBase, reason: str) -> None:
        """Takes a TensorDict; `reason` says why these are no entries for `store_outputs`."""


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
        #: `decode_one` of an action of one environment where that is quickly found to be of the space, else None.
        self.quickly_decoded = codec.quick_decoder(self._check)

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

    def known_by(
        self, raw_of: Callable[[Array], Any], read: Callable[[Any], Any] | None = None
    ) -> Callable[[Any], Any]:
        """A `known` for `raw_actions` of a space of arrays, with `raw_of` for numbers that are in the space.

        `read` does the same at a fifth of the cost, for most actions; for others it returns None.
        """
        array_of = self._check.array_of

        def known(action: Any) -> Any:
            array = array_of(action)
            return None if array is None else raw_of(array)

        return known if read is None else first_of(read, known)

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
        self.is_one_array = codec.in_one_array is not None

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


_TENSORS = {Tensor}


class ZeroOutputs:
    """What stands for a module's outputs in steps that it did not choose; None: it was not called for that yet."""

    def __init__(self) -> None:
        self.found: TensorDictBase | None = None


class ModuleActions(ActionSource):
    """Actions of a module on observation tensors, which is called directly.

    `sink` gets what the module returns besides the action, for steps where there is any, and after `discard` what
    replaces the last. `zeros` is kept from batch to batch, so that the module is called for it once.
    """

    def __init__(
        self,
        policy: ObservationPolicy,
        codec: SpaceCodec,
        batch_size: torch.Size,
        weights: PolicyWeights,
        device: torch.device | None,
        observed: ObservedSteps,
        sink: OutputSink,
        zeros: ZeroOutputs,
    ) -> None:
        super().__init__(codec, batch_size, weights)
        self._policy, self._module, self._device = policy, policy.module, device
        self._keys = frozenset(key if isinstance(key, str) else key[0] for key in observed.keys)
        self._row, *self._more_rows = [observed.rows(key) for key in policy.in_keys]
        self._sink = sink
        self._may_be_action = policy.may_be_action
        self._last_outputs: dict[str, Any] = {}
        self._zeros = zeros
        names = policy.out_keys or []
        is_stored_whole = len(names) > 1 and device is None and self._keys.isdisjoint(names)
        self._names = names if is_stored_whole else None  # of the tensors in a tuple that need no closer look

    def choose(self, t: int) -> Any:
        row = self._row(t)
        try:
            out = self._module(row, *[more(t) for more in self._more_rows]) if self._more_rows else self._module(row)
        except INPUT_ERRORS as error:
            rows = [row, *[more(t) for more in self._more_rows]]
            raise with_entries(error, dict(zip(self._policy.in_keys, rows, strict=True))) from error
        return out if type(out) is Tensor and self._may_be_action else self._action_of(out)

    def _action_of(self, out: Any) -> Any:
        names = self._names
        if names is not None and type(out) is tuple and len(out) == len(names) and {*map(type, out)} == _TENSORS:
            self._last_outputs = outputs = dict(zip(names, out, strict=True))
            action = outputs.pop("action")
            self._sink.store_outputs(outputs)
            return action
        action, others = self._policy.split(out)
        if others and (self._device is not None or type(action) is not Tensor):
            action, others = self._on_device(action, others)
        self._last_outputs = outputs = {key: value for key, value in others.items() if key not in self._keys}
        if outputs:
            self._sink.store_outputs(outputs)
        return action

    def _on_device(self, action: Any, others: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The same as entries of a TensorDict."""
        if self._policy.out_keys is None:
            return action, dict(TensorDict(others, self._batch_size, device=self._device).items())
        td = TensorDict({**others, "action": action}, self._batch_size, device=self._device)
        return td.get("action"), dict(td.exclude("action").items())

    def skip_step(self, t: int) -> None:
        if self._policy.outputs == 1:
            return
        if self._zeros.found is None:
            rows = [self._row, *self._more_rows]
            observations = {key: row(t) for key, row in zip(self._policy.in_keys, rows, strict=True)}
            state = TensorDict(observations, self._batch_size, device=self._device)
            self._zeros.found = zero_outputs(self._policy, state).exclude(*self._keys)
        outputs = dict(self._zeros.found.items())
        if outputs:
            self._sink.store_outputs(outputs)

    def discard(self, envs: Envs) -> None:
        if self._last_outputs:
            last = TensorDict(self._last_outputs, self._batch_size, device=self._device)
            self._sink.store_outputs(dict(zero_where(mask_of(envs, self._batch_size), last).items()))


class TensorDictActions(ActionSource):
    """Actions of a policy on TensorDicts. Its other entries are stored, and are in its input at the next step."""

    def __init__(
        self,
        policy: TensorDictPolicy,
        codec: SpaceCodec,
        batch_size: torch.Size,
        weights: PolicyWeights,
        device: torch.device | None,
    ) -> None:
        super().__init__(codec, batch_size, weights)
        self._policy, self._device = policy, device
        self._carried: dict[str, Tensor] | TensorDictBase = {}  # a TensorDict, if not all entries are plain tensors
        self._has_next = False  # whether some of them were written below "next", and are at the root of this step
        self._ended: Array | None = None  # bool [n]: the environments whose carried entries are to be zeros
        self._unset = _unset_flags(batch_size)
        self._zero_outputs: TensorDictBase | None = None
        self._last_outputs: dict[str, Any] | TensorDictBase = {}
        self._input = _PolicyInput(batch_size, device)
        self._observed: ObservedSteps | None = None

    def start(self, observed: ObservedSteps, sink: OutputSink) -> TensorDictActions:
        """Reads `observed` from now on; `sink` gets what the policy writes besides the action.

        After `discard` it gets outputs that replace the last ones.
        """
        if observed is not self._observed:
            self._observed = observed
            self._rows = {key: observed.rows(key) for key in observed.keys}
            self._not_outputs = frozenset({"action", *FLAGS, *self._rows})
            self._has_flat_keys = all(isinstance(key, str) for key in self._rows)
        keys = module_keys(self._policy)  # looked up again for each batch: hooks come and go
        self._read = None if keys is None else {key if isinstance(key, str) else key[0] for key in keys.read}
        self._sink = sink
        return self

    def choose(self, t: int) -> Any:
        out = self._policy(self._state(t))
        self._keep_outputs(out)
        action = get_entry(out, "action")
        return action if type(action) is Tensor else out.get("action")

    def skip_step(self, t: int) -> None:
        state = self._state(t)
        if self._zero_outputs is None:
            self._zero_outputs = zero_outputs(self._policy, state)
        self._keep_outputs(state.update(self._zero_outputs.clone()))

    def discard(self, envs: Envs) -> None:
        last = self._last_outputs
        if isinstance(last, dict):
            last = TensorDict(last, self._batch_size, device=self._device)
        if not last.is_empty():
            self._store(zero_where(mask_of(envs, self._batch_size), last))
        self.reset_envs(envs)

    def reset_envs(self, envs: Envs) -> None:
        if self._ended is None:
            self._ended = np.zeros(self._batch_size.numel(), np.bool_)
        self._ended[envs] = True

    def _state(self, t: int) -> TensorDictBase:
        """The TensorDict for the policy: what it wrote in the last step, the observations and the flags.

        What it wrote is left out where it reads none of it, and writes all of it again.
        """
        carried, rows = self._carried, self._rows
        read = None if self._has_next else self._read
        if read is not None and isinstance(carried, dict) and read.isdisjoint(carried):
            carried = {}
        elif self._ended is not None:
            self._carried = carried = self._without(carried, self._ended)
            self._ended = None
        flags = dict.fromkeys(FLAGS, next(self._unset))
        if isinstance(carried, dict):
            if self._has_flat_keys:
                return self._input.filled({**carried, **{key: row(t) for key, row in rows.items()}, **flags})
            td = TensorDict(carried, self._batch_size, device=self._device)
        else:
            td = carried
        for key, row in rows.items():
            td.set(key, row(t))
        return td.update(flags)

    def _without(self, carried: dict[str, Tensor] | TensorDictBase, ended: Array) -> dict[str, Tensor] | TensorDictBase:
        """`carried` with zeros for the environments that have `ended`."""
        if not isinstance(carried, dict):
            return zero_where(mask_of(ended, self._batch_size), carried)
        mask, dims = torch.from_numpy(ended).reshape(self._batch_size), len(self._batch_size)
        return {
            key: value.masked_fill(mask.to(value.device).reshape(mask.shape + (1,) * (value.ndim - dims)), 0)
            for key, value in carried.items()
        }

    def _keep_outputs(self, out: TensorDictBase) -> None:
        outputs = self._store(out)
        self._ended = None
        if isinstance(outputs, dict):
            following = outputs.get("next")
            self._has_next = following is not None
            if following is None:
                carried = outputs
            elif type(following) is TensorDict:
                carried = {**outputs, **dict(following.items())}
                del carried["next"]
            if all(type(value) is Tensor for value in carried.values()):
                is_read = self._has_next or self._read is None or not self._read.isdisjoint(carried)
                # In copies: other calls of the policy, between two batches, may write into what it gave.
                self._carried = {key: value.clone() for key, value in carried.items()} if is_read else carried
                return
            outputs = TensorDict(outputs, self._batch_size, device=self._device)
        nested = outputs.get("next", None)
        rest = outputs.exclude("next").clone()
        self._carried = rest if nested is None else rest.update(nested.clone())

    def _store(self, out: TensorDictBase) -> dict[str, Any] | TensorDictBase:
        """Stores what the policy wrote besides the action, and returns it: its entries where `out` is as its input."""
        is_like_input = out.batch_size == self._batch_size and out.device == self._device
        if type(out) is not TensorDict or not is_like_input:
            outputs = out.exclude(*self._not_outputs)
            self._sink.store_tensordict(outputs, f"the policy returned {_described(out)}")
            self._last_outputs = outputs
            return outputs
        if not self._has_flat_keys:
            out = out.exclude(*self._not_outputs)
        entries = {key: value for key, value in out.items() if key not in self._not_outputs}
        self._sink.store_outputs(entries)
        self._last_outputs = entries
        return entries


def _described(td: TensorDictBase) -> str:
    return f"a {type(td).__name__} with batch_size={tuple(td.batch_size)} and device={td.device}"


def _unset_flags(batch_size: torch.Size) -> Iterator[Tensor]:
    """Endless tensors bool `[*batch_size, 1]` of zeros, each with memory of its own."""
    while True:
        yield from torch.zeros(64, *batch_size, 1, dtype=torch.bool, device="cpu").unbind(0)


class _PolicyInput:
    """The TensorDict that a policy is called with: made once, and filled anew for each step.

    A policy may keep it, and finds in it later what it found then: while anything but this object refers to it, or
    where the policy has locked it or changed its batch size or device, the next step gets another one.
    """

    def __init__(self, batch_size: torch.Size, device: torch.device | None) -> None:
        self._batch_size, self._device = batch_size, device
        self._renew()

    def _renew(self) -> None:
        self._entries: dict[str, Any] = {}
        self._td = tensordict_of(self._entries, self._batch_size, device=self._device)
        self._references = sys.getrefcount(self._td)
        self._entries.update(dict.fromkeys(FLAGS, torch.zeros(*self._batch_size, 1, dtype=torch.bool, device="cpu")))
        self._has_entries = "done" in self._td  # else tensordict has copied the dict, and cannot share it

    def filled(self, entries: dict[str, Any]) -> TensorDict:
        """The TensorDict with these entries, all of which begin with the batch size."""
        if not self._has_entries:
            return TensorDict(entries, self._batch_size, device=self._device)
        if sys.getrefcount(self._td) != self._references or self._was_changed(self._td):
            self._renew()
        self._entries.clear()
        self._entries.update(entries)
        return self._td

    def _was_changed(self, td: TensorDict) -> bool:
        return bool(td.is_locked) or td.batch_size != self._batch_size or td.device != self._device


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
