"""The specs of an environment, and functions that transform specs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.pytree import Key, key_path
from engram.specs import (
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Spec,
    StackedComposite,
    Unbounded,
)

FLAGS = ("done", "terminated", "truncated")
RESULT_KEYS = ("reward", *FLAGS)  #: the entries that every step has besides observations


class EnvSpecs(NamedTuple):
    """The specs of an environment; `done` is the spec of each flag at the root."""

    observation: Composite
    action: Spec
    rewards: Composite  #: all rewards: at the root, and of groups of agents
    done: Spec
    flags: Mapping[Key, Spec] = {}  #: those of groups of agents
    action_keys: tuple[Key, ...] = ("action",)

    @property
    def reward_keys(self) -> list[Key]:
        """The keys of all rewards."""
        return list(self.rewards.leaves())

    @property
    def result_keys(self) -> list[Key]:
        """The keys of all rewards and flags."""
        return [*self.reward_keys, *FLAGS, *self.flags]

    @property
    def groups(self) -> list[Key]:
        """The keys of groups of agents that have flags of their own."""
        paths = dict.fromkeys(key_path(key)[:-1] for key in self.flags)
        return [path[0] if len(path) == 1 else path for path in paths]

    def entry(self, key: Key) -> Spec | None:
        """The spec of a step's entry `key`; None if steps have no such entry."""
        if key in FLAGS:
            return self.done
        for leaves in (self.observation.leaves(), self.rewards.leaves(), self.flags):
            if (leaf := leaves.get(key)) is not None:
                return leaf
        return None

    def require(self, keys: list[Key], who: str) -> None:
        """Raises KeyError, which names the existing keys, for keys that steps do not have."""
        for key in keys:
            if self.entry(key) is None:
                keys_of_steps = [*self.observation.leaves(), *self.result_keys]
                raise KeyError(f"{who} needs the key {key!r}; the environment has {keys_of_steps}")

    def with_entries(self, entries: dict[Key, Spec]) -> EnvSpecs:
        """These specs with some observations added or replaced."""
        observation = clone_composite(self.observation)
        for key, spec in entries.items():
            observation[key] = spec
        return self._replace(observation=observation)

    def with_rewards(self, change: Callable[[Key, Spec], Spec]) -> EnvSpecs:
        """These specs with `change(key, spec)` in the place of the spec of each reward."""
        changed = {key: change(key, spec) for key, spec in self.rewards.leaves().items()}
        if all(changed[key] is spec for key, spec in self.rewards.leaves().items()):
            return self
        rewards = clone_composite(self.rewards)
        for key, spec in changed.items():
            rewards[key] = spec
        return self._replace(rewards=rewards)

    def drawn(self, *, stepped: bool) -> TensorDictBase:
        """As `blank`, with random observations and rewards."""
        td = self.blank(stepped=stepped).update(self.observation.rand())
        return td.update(self.rewards.rand()) if stepped else td

    def blank(self, *, stepped: bool) -> TensorDictBase:
        """Zeros for all entries of a reset or, with `stepped`, of a step's `"next"`."""
        td = self.observation.zero()
        for flag in FLAGS:
            td.set(flag, self.done.zero())
        for key, flag_spec in self.flags.items():
            td.set(key, flag_spec.zero())
        return td.update(self.rewards.zero()) if stepped else td


def clone_composite(spec: Composite) -> Composite:
    """A new Composite, nested ones included, with the same leaves."""
    if isinstance(spec, StackedComposite):
        stacked: Composite = spec.clone()
        return stacked
    entries = {k: clone_composite(v) if isinstance(v, Composite) else v for k, v in spec.items()}
    return Composite(entries, shape=spec.shape, device=spec.device)


def filter_leaves(spec: Composite, keep: Callable[[Key], bool], above: tuple[str, ...] = ()) -> Composite:
    """A Composite of the leaves whose keys satisfy `keep`."""
    if isinstance(spec, StackedComposite):
        stacked: Composite = spec.mapped_members(lambda one: filter_leaves(one, keep, above))
        return stacked
    entries: dict[str, Spec] = {}
    for name, entry in spec.items():
        path = (*above, name)
        if isinstance(entry, Composite):
            inner = filter_leaves(entry, keep, path)
            if len(inner):
                entries[name] = inner
        elif keep(path if above else name):
            entries[name] = entry
    return Composite(entries, shape=spec.shape, device=spec.device)


def is_within(key: Key, of: Key) -> bool:
    """Whether `key` is `of` or nested in it."""
    path, prefix = key_path(key), key_path(of)
    return path[: len(prefix)] == prefix


def map_leaves(spec: Spec, root: str, change: Callable[[Key, Spec], Spec]) -> Spec:
    """Applies `change(key, leaf)` to a spec, or to each leaf of a Composite; keys begin with `root`."""
    if not isinstance(spec, Composite):
        return change(root, spec)
    result = clone_composite(spec)
    for key, leaf in spec.leaves().items():
        result[key] = change((root, *key_path(key)), leaf)
    return result


def bounds_of(spec: Any) -> tuple[Tensor, Tensor] | None:
    """The lowest and the highest value of each element, in the spec's shape and dtype; None if it is unbounded."""
    if isinstance(spec, Bounded):
        return spec.low, spec.high
    if isinstance(spec, Categorical):
        highest: Any = spec.n - 1
    elif isinstance(spec, MultiCategorical):
        highest = [n - 1 for n in spec.nvec]
    elif isinstance(spec, MultiOneHot | OneHot):
        highest = 1
    else:
        return None
    high = torch.as_tensor(highest, dtype=spec.dtype, device=spec.device)
    return spec.zero(), high.expand(spec.shape)


def map_spec(spec: Any, apply: Callable[[Tensor], Tensor], *, keeps_order: bool) -> Spec:
    """The spec of `apply(tensor)` for tensors of `spec`.

    It is bounded if `spec` is and `apply` is monotonic, rising or falling, in each element (`keeps_order`).
    """
    zero = apply(spec.zero())
    limits = bounds_of(spec) if keeps_order and zero.dtype is not torch.bool else None
    if limits is not None:
        one, other = (apply(limit.contiguous()) for limit in limits)
        fits = one.shape == zero.shape and _survives(limits, zero.dtype)
        if fits and not bool((torch.isnan(one) | torch.isnan(other)).any()):
            low, high = torch.minimum(one, other), torch.maximum(one, other)
            return Bounded(low, high, zero.shape, spec.device, zero.dtype)
    return Unbounded(zero.shape, spec.device, zero.dtype)


def _survives(limits: tuple[Tensor, Tensor], dtype: torch.dtype) -> bool:
    """Whether a cast to `dtype` preserves the limits."""
    if dtype.is_floating_point:
        return True
    room = torch.iinfo(dtype)
    return all(bool((limit >= room.min).all() and (limit <= room.max).all()) for limit in limits)


def cast_spec(spec: Any, dtype: torch.dtype) -> Spec:
    """The spec with another dtype; bounds and choices are kept if the dtype can hold them."""
    if not isinstance(spec, Bounded | Unbounded):
        return spec.to(dtype)  # type: ignore[no-any-return]
    return map_spec(spec, lambda value: value.to(dtype), keeps_order=True)


def specs_by_trial(transform: Any, specs: EnvSpecs) -> EnvSpecs:
    """The specs after `transform`, from running a copy of it on zeros: unchanged entries keep their spec.

    Raises:
        TypeError: the transform does not return a TensorDict.
        KeyError: the transform removes the reward or a flag.
    """
    try:
        copied = copy.deepcopy(transform)
    except Exception:  # it cannot be copied: runs the object itself
        copied = transform
    if transform.container is not None:
        copied.set_container(transform.container, stands_for=transform)
    calls = copied.env_steps()[0]
    fresh = calls.reset(TensorDict(batch_size=specs.observation.shape), specs.blank(stepped=False))
    _check_result(fresh, FLAGS, transform)
    root = fresh.copy().set("action", specs.action.zero())
    given = specs.blank(stepped=True)
    before = {key: (value, value._version) for key, value in given.items(True, True)}
    after = calls.step(root, given)
    results = specs.result_keys
    _check_result(after, results, transform)

    def spec_of(key: Key) -> Spec:
        value = after.get(key)
        old = specs.entry(key)
        if old is not None and before[key][0] is value and before[key][1] == value._version:
            return old
        return Unbounded(value.shape, specs.observation.device, value.dtype)

    leaves = [key for key in after.keys(True, True) if key not in results]
    observation = filter_leaves(clone_composite(specs.observation), lambda key: key in leaves)
    result = specs._replace(observation=observation).with_entries({key: spec_of(key) for key in leaves})
    return result.with_rewards(lambda key, _: spec_of(key))._replace(done=spec_of("done"))


def acts_as(transform: Any, kind: type, specs: EnvSpecs) -> bool:
    """Whether a transform gives what an object of its parent class `kind` would, as far as some steps tell."""
    try:
        own, plain = copy.deepcopy(transform), copy.deepcopy(transform)
        plain.__class__ = kind
        with torch.random.fork_rng(devices=[]):
            for _ in range(_TRIALS):
                fresh, following = (specs.drawn(stepped=stepped) for stepped in (False, True))
                root = fresh.copy().set("action", specs.action.zero())
                for results in zip(*(_outcome(one, fresh, root, following) for one in (own, plain)), strict=True):
                    if not _are_equal(*results):
                        return False
    except Exception:  # of a class of a user's, which may do anything
        return False
    return True


_TRIALS = 3


def _outcome(transform: Any, fresh: TensorDictBase, root: TensorDictBase, following: TensorDictBase) -> list[Any]:
    calls = transform.env_steps()[0]
    return [
        calls.reset(TensorDict(batch_size=fresh.batch_size), fresh.clone()),
        calls.step(root.clone(), following.clone()),
    ]


def _are_equal(one: TensorDictBase, other: TensorDictBase) -> bool:
    leaves, others = (dict(td.items(True, True)) for td in (one, other))
    return leaves.keys() == others.keys() and all(torch.equal(leaves[key], others[key]) for key in leaves)


def _check_result(result: Any, needed: Sequence[Key], transform: Any) -> None:
    """Raises TypeError or KeyError if the result is not a TensorDict, or lacks a required entry."""
    if not isinstance(result, TensorDictBase):
        raise TypeError(f"{transform!r} must return a TensorDict in an environment, got a {type(result).__name__}")
    for key in needed:
        if result.get(key, None) is None:
            raise KeyError(f"{transform!r} removes {key!r}, which every step of an environment must have")
