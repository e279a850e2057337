"""What transforms make of an environment's specs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.pytree import Key, key_path
from engram.specs import Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, Spec, Unbounded

FLAGS = ("done", "terminated", "truncated")
RESULTS = ("reward", *FLAGS)  #: what every step has besides observations, under these names


class EnvSpecs(NamedTuple):
    """The specs of an environment; `done` is that of each flag."""

    observation: Composite
    action: Spec
    reward: Spec
    done: Spec

    def entry(self, key: Key) -> Spec | None:
        """The spec of what a step has under `key`; None where it has nothing."""
        if key == "reward":
            return self.reward
        return self.done if key in FLAGS else self.observation.leaves().get(key)

    def require(self, keys: list[Key], who: str) -> None:
        """Raises KeyError for keys that a step does not have."""
        for key in keys:
            if self.entry(key) is None:
                known = [*self.observation.leaves(), *RESULTS]
                raise KeyError(f"{who} needs the key {key!r}; the environment has {known}")

    def with_entries(self, entries: dict[Key, Spec]) -> EnvSpecs:
        """With these observations too, or in the place of others."""
        observation = clone(self.observation)
        for key, spec in entries.items():
            observation[key] = spec
        return self._replace(observation=observation)

    def blank(self, *, stepped: bool) -> TensorDictBase:
        """Zeros, as a reset gives them, or as a step puts them under `"next"`."""
        td = self.observation.zero()
        for flag in FLAGS:
            td.set(flag, self.done.zero())
        return td.set("reward", self.reward.zero()) if stepped else td


def clone(spec: Composite) -> Composite:
    """Containers of its own with the same leaves."""
    entries = {k: clone(v) if isinstance(v, Composite) else v for k, v in spec.items()}
    return Composite(entries, shape=spec.shape, device=spec.device)


def kept(spec: Composite, keep: Callable[[Key], bool], above: tuple[str, ...] = ()) -> Composite:
    """The leaves for whose keys `keep` holds."""
    entries: dict[str, Spec] = {}
    for name, entry in spec.items():
        path = (*above, name)
        if isinstance(entry, Composite):
            inner = kept(entry, keep, path)
            if len(inner):
                entries[name] = inner
        elif keep(path if above else name):
            entries[name] = entry
    return Composite(entries, shape=spec.shape, device=spec.device)


def is_part(key: Key, of: Key) -> bool:
    """Whether `key` is `of`, or lies below it."""
    path, whole = key_path(key), key_path(of)
    return path[: len(whole)] == whole


def changed_leaves(spec: Spec, root: str, change: Callable[[Key, Spec], Spec]) -> Spec:
    """A spec, or a Composite of them, with each leaf changed; keys begin with `root`."""
    if not isinstance(spec, Composite):
        return change(root, spec)
    result = clone(spec)
    for key, leaf in spec.leaves().items():
        result[key] = change((root, *key_path(key)), leaf)
    return result


def limits_of(spec: Any) -> tuple[Tensor, Tensor] | None:
    """The lowest and the highest value of each element, in the spec's shape and dtype; None where there are none."""
    if isinstance(spec, Bounded):
        return spec.low, spec.high
    if isinstance(spec, Categorical):
        highest: Any = spec.n - 1
    elif isinstance(spec, MultiCategorical):
        highest = [n - 1 for n in spec.nvec]
    elif isinstance(spec, MultiOneHot):
        highest = 1
    else:
        return None
    high = torch.as_tensor(highest, dtype=spec.dtype, device=spec.device)
    return spec.zero(), high.expand(spec.shape)


def map_spec(spec: Any, apply: Callable[[Tensor], Tensor], *, keeps_order: bool) -> Spec:
    """What tensors of `spec` become by `apply`: as bounded as they were where it `keeps_order`, or else unbounded.

    "Order" is that of each element alone; turned round is fine.
    """
    zero = apply(spec.zero())
    limits = limits_of(spec) if keeps_order and zero.dtype is not torch.bool else None
    if limits is not None:
        one, other = (apply(limit.contiguous()) for limit in limits)
        fits = one.shape == zero.shape and _survives(limits, zero.dtype)
        if fits and not bool((torch.isnan(one) | torch.isnan(other)).any()):
            low, high = torch.minimum(one, other), torch.maximum(one, other)
            return Bounded(low, high, zero.shape, spec.device, zero.dtype)
    return Unbounded(zero.shape, spec.device, zero.dtype)


def _survives(limits: tuple[Tensor, Tensor], dtype: torch.dtype) -> bool:
    """Whether a cast of the limits means anything."""
    if dtype.is_floating_point:
        return True
    room = torch.iinfo(dtype)
    return all(bool((limit >= room.min).all() and (limit <= room.max).all()) for limit in limits)


def as_dtype(spec: Any, dtype: torch.dtype) -> Spec:
    """The spec with another dtype, its domain kept where that has a meaning."""
    choices = not isinstance(spec, Bounded | Unbounded)
    if choices:
        return spec.to(dtype)  # type: ignore[no-any-return]
    return map_spec(spec, lambda value: value.to(dtype), keeps_order=True)


def tried(transform: Any, specs: EnvSpecs) -> EnvSpecs:
    """What a copy of `transform` makes of zeros: entries that it leaves alone keep their spec.

    Raises:
        TypeError: it does not return a TensorDict.
        KeyError: it takes the reward or a flag away.
    """
    try:
        copied = copy.deepcopy(transform)
    except Exception:  # it holds what cannot be copied: better tried itself than not at all
        copied = transform
    stage = copied.stages()[0]
    fresh = stage.reset(TensorDict(batch_size=specs.observation.shape), specs.blank(stepped=False))
    _refuse_others(fresh, FLAGS, transform)
    root = fresh.copy().set("action", specs.action.zero())
    given = specs.blank(stepped=True)
    before = {key: (value, value._version) for key, value in given.items(True, True)}
    after = stage.step(root, given)
    _refuse_others(after, RESULTS, transform)

    def spec_of(key: Key) -> Spec:
        value = after.get(key)
        known = specs.entry(key)
        if known is not None and before[key][0] is value and before[key][1] == value._version:
            return known
        return Unbounded(value.shape, specs.observation.device, value.dtype)

    leaves = [key for key in after.keys(True, True) if key not in RESULTS]
    observation = kept(clone(specs.observation), lambda key: key in leaves)
    result = specs._replace(observation=observation).with_entries({key: spec_of(key) for key in leaves})
    return result._replace(reward=spec_of("reward"), done=spec_of("done"))


def _refuse_others(result: Any, needed: tuple[str, ...], transform: Any) -> None:
    if not isinstance(result, TensorDictBase):
        raise TypeError(f"{transform!r} must return a TensorDict in an environment, got a {type(result).__name__}")
    for key in needed:
        if result.get(key, None) is None:
            raise KeyError(f"{transform!r} takes {key!r} away, which every step of an environment must have")
