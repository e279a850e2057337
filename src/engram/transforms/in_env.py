"""What a transform does in an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.data.specs import Composite, Spec
from engram.transforms.entries import Key, path_of
from engram.transforms.specs import RESULTS, EnvSpecs, changed_leaves, clone, mapped

IDLE = "_idle"  # where a call only resets an environment, and is none of its steps: see `BatchedEnv`
Change = Callable[[TensorDictBase, TensorDictBase], TensorDictBase]


class Stage(NamedTuple):
    """One transform at work in one environment."""

    transform: Any
    reset: Change
    step: Change
    inv: Callable[[TensorDictBase], TensorDictBase] | None  #: None: it changes nothing on the way in


class Deferred(NamedTuple):
    """A transform that changes whole batches that were collected without it, as it would have changed each step."""

    writes: tuple[Key, ...]  #: the root entries that it makes or changes
    limit: int | None  #: the number of steps after which it truncates an episode
    #: Changes a batch `[*batch, T]` in TED in place, and goes on where the last batch ended. A mask, bool `[N, T]`,
    #: says which of its steps follow a reset.
    apply: Callable[[TensorDictBase, Tensor], None]


class InEnvironment:
    """The half of `Transform` that `TransformedEnv` uses.

    A child that works entry by entry has nothing to do. Others implement `_call(td)`, which gets the root of a reset
    and the `"next"` of a step, or `_reset` and `_step` apart, and say what becomes of specs:
    `transform_observation_spec`, `transform_reward_spec`, `transform_action_spec`, `transform_done_spec`. Where a child
    says nothing about specs, a copy of it is tried on zeros, and what it changes counts as unbounded.

    Keys are those of the root (`"observation"`, `"reward"`). Of keys that begin with `"next"`, as buffers need them,
    the rest counts: `["x", ("next", "x")]` means `"x"` in an environment, at resets and after steps.
    """

    in_keys: Sequence[Key]
    out_keys: Sequence[Key]
    in_keys_inv: Sequence[Key]
    out_keys_inv: Sequence[Key]

    #: Whether of two values of an element the larger one becomes the larger (or always the smaller) result: bounds of
    #: specs can then be mapped.
    _keeps_order = False

    # ---- values ----
    def _apply_transform(self, value: Tensor) -> Tensor:
        raise NotImplementedError

    def _call(self, td: TensorDictBase) -> TensorDictBase:
        """Changes observations, reward and flags, in place or in a TensorDict of its own. The reward is missing in what
        a reset gave."""
        raise NotImplementedError

    def _by_key(self, td: TensorDictBase) -> TensorDictBase:
        for source, target in self._env_pairs:
            value = td.get(source, None)
            if value is not None:
                td.set(target, self._apply_transform(value))
        return td

    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        """What the environment gave at a reset, changed.

        `td.get("_reset", None)` (bool `[*batch, 1]`) says where episodes start; None: everywhere. Elsewhere `fresh`
        holds anything, and is not read after.
        """
        return self._call(fresh)

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        """What will be under `"next"`, changed; `td` has the state before the step, and the action."""
        return self._call(following)

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        """`td` as the environment below shall see it, above all its action; leaves `td` as it is."""
        raise NotImplementedError

    def _inverts(self) -> bool:
        """Whether `_inv_call` changes anything."""
        raise NotImplementedError

    # ---- use ----
    def for_env(self, specs: EnvSpecs) -> Any:
        """The transform that works in an environment with these specs: itself, or, with state per episode, a copy.

        Raises:
            TypeError: it does not work in environments; the message says what does.
        """
        return self

    def parts(self) -> list[Any]:
        """The transforms that it consists of."""
        return [self]

    def stages(self) -> list[Stage]:
        """What to call at resets and steps."""
        return [Stage(self, self._reset, self._step, self._inv_call if self._inverts() else None)]

    def deferred(self) -> Deferred | None:
        """The same work done on whole batches; None where only step by step will do."""
        return None

    @cached_property
    def _env_pairs(self) -> list[tuple[Key, Key]]:
        """Sources and targets by root names, each once."""
        return root_pairs(self.in_keys, self.out_keys)

    # ---- specs ----
    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        """The specs of an environment with this transform.

        Raises:
            KeyError: the environment has no such entries.
        """
        specs.require([source for source, _ in self._env_pairs], type(self).__name__)
        changed = EnvSpecs(
            self.transform_observation_spec(clone(specs.observation)),  # children set entries of what they are given
            self.transform_action_spec(clone(specs.action) if isinstance(specs.action, Composite) else specs.action),
            self.transform_reward_spec(specs.reward),
            self.transform_done_spec(specs.done),
        )
        return changed.with_entries(self._copied(specs))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """The observations' specs with the transform."""
        result = observation_spec
        for source, target in self._env_pairs:
            spec = result.leaves().get(source)
            if spec is not None:
                if target in RESULTS:
                    raise ValueError(
                        f"{type(self).__name__} would put {source!r} in the place of {target!r}; implement _step and "
                        "transform_reward_spec or transform_done_spec for that"
                    )
                result[target] = self._mapped(spec)
        return result

    def transform_reward_spec(self, reward_spec: Spec) -> Spec:
        """The reward's spec with the transform."""
        return self._mapped(reward_spec) if ("reward", "reward") in self._env_pairs else reward_spec

    def transform_done_spec(self, done_spec: Spec) -> Spec:
        """The spec of each flag with the transform."""
        return self._mapped(done_spec) if ("done", "done") in self._env_pairs else done_spec

    def transform_action_spec(self, action_spec: Spec) -> Spec:
        """The action's spec as the caller sees it."""
        return action_spec

    def _mapped(self, spec: Spec) -> Spec:
        return mapped(spec, self._apply_transform, keeps_order=self._keeps_order)

    def _copied(self, specs: EnvSpecs) -> dict[Key, Spec]:
        """Rewards and flags under names of their own are observations."""
        found: dict[Key, Spec] = {}
        for source, target in self._env_pairs:
            if source in RESULTS and target not in RESULTS:
                found[target] = self._mapped(specs.entry(source))  # type: ignore[arg-type]
        return found

    def _mapped_action(self, action_spec: Spec, change: Callable[[Spec], Spec]) -> Spec:
        """The action's spec with those leaves changed that are among `in_keys_inv`.

        Raises:
            ValueError: the action would have another name.
        """
        for inner, outer in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            if inner != outer and "action" in (path_of(inner)[0], path_of(outer)[0]):
                raise ValueError(
                    f"{type(self).__name__} gives the action {inner!r} the name {outer!r}; in an environment it is "
                    "called 'action' on both sides"
                )
        keys = set(self.in_keys_inv)
        return changed_leaves(action_spec, "action", lambda key, spec: change(spec) if key in keys else spec)


def root_key(key: Key) -> Key:
    """`("next", "x")`: `"x"`."""
    path = path_of(key)
    path = path[1:] if path[0] == "next" and len(path) > 1 else path
    return path[0] if len(path) == 1 else path


def root_pairs(sources: Sequence[Key], targets: Sequence[Key]) -> list[tuple[Key, Key]]:
    """Sources and targets without `"next"`, each pair once."""
    pairs = zip(map(root_key, sources), map(root_key, targets), strict=True)
    return list(dict.fromkeys(pairs))


def where_reset(td: TensorDictBase, fresh: Tensor, old: Tensor | None) -> Tensor:
    """`fresh` where the reset that `td` asks for holds, else `old`; `fresh` alone where there is no `old`."""
    mask = td.get("_reset", None)
    if mask is None or old is None:
        return fresh
    batch = mask.shape[:-1]
    return torch.where(mask.reshape(*batch, *[1] * (fresh.ndim - len(batch))), fresh, old.to(fresh.device))


def on(value: Tensor, device: torch.device) -> Tensor:
    """`value` on `device`: an environment may have been moved within an episode."""
    return value if value.device == device else value.to(device)
