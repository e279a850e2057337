"""`Transform`, the base class of transforms of batches on reading and writing, and of environment steps."""

from __future__ import annotations

import copy
import functools
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from engram import _forms as forms
from engram._advice import absent_member, advised
from engram._arguments import BUILT_IN, KeepsArguments
from engram._overrides import overrides
from engram.errors import CheckpointMisfitError
from engram.pytree import (
    Key,
    Keys,
    as_keys,
    copy_containers,
    get_entry,
    get_tensor,
    has_batch_size,
    has_keys,
    key_path,
    map_outermost,
    move_dim,
    require_tensor,
    set_entry,
)
from engram.specs import Composite, Spec
from engram.transforms.env_specs import (
    FLAGS,
    RESULT_KEYS,
    EnvSpecs,
    acts_as,
    clone_composite,
    map_leaves,
    map_spec,
    specs_by_trial,
)
from engram.transforms.roles import WARNED, Role, warn_once, where_it_works

IDLE = "_idle"  # the key of the mask of rows that were only reset by a step: see `VectorEnv`
ChangeStep = Callable[[TensorDictBase, TensorDictBase], TensorDictBase]
Self = TypeVar("Self", bound="Transform")
# The environment that contains each transform, and its object there (itself or a copy). Not attributes, as copies and
# pickles of a transform belong to no environment.
_CONTAINERS: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Any], weakref.ref[Any]]] = weakref.WeakKeyDictionary()


class _Stepped(threading.local):
    """The transform whose `forward` a subclass has changed and this thread calls for a reset or step of an environment.

    `Transform.forward` then takes the keys that are there, as without that subclass: a reset has no reward.
    """

    transform: Any = None


_STEPPED = _Stepped()


class TransformStep(NamedTuple):
    """The functions that `TransformedEnv` calls for one transform."""

    transform: Any
    reset: ChangeStep
    step: ChangeStep
    inv: Callable[[TensorDictBase], TensorDictBase] | None  #: None: it does not change actions

    #: Whether results are never written into later. Code of users' may keep its state in the tensors that it returns.
    returns_own_tensors: bool

    def guarded(self) -> TransformStep:
        """The same with results that are never written into later."""
        if self.returns_own_tensors:
            return self
        reset, step = self.reset, self.step
        return self._replace(
            reset=lambda td, fresh: reset(td, fresh).clone(), step=lambda td, following: step(td, following).clone()
        )


class Deferred(NamedTuple):
    """A transform in a form that is applied to whole collected batches instead of to each step."""

    writes: tuple[Key, ...]  #: the root entries that it creates or changes
    limit: int | None  #: the number of steps after which it truncates an episode
    #: Changes a batch `[*batch, T]` in TED in place, and continues where the last batch ended. A mask, bool `[N, T]`,
    #: marks the steps that follow a reset.
    apply: Callable[[TensorDictBase, Tensor], None]


class FrameStacks(NamedTuple):
    """Stacks of the last frames of observations in their episode, concatenated, oldest first: `CatFrames` as data."""

    pairs: tuple[tuple[Key, Key], ...]  #: each observation, and where its stack goes; in this order
    n: int  #: frames
    dim: int  #: the dimension along which they are concatenated, counted from the end
    padding: float | None  #: the value of frames before the first one; None: they are the first one


class EnvTransformMixin:
    """The part of `Transform` that `TransformedEnv` uses.

    A subclass that works entry by entry (`_apply_transform`) needs none of this. Others implement `_call(td)`, which
    gets the root of a reset and the `"next"` of a step, or `_reset` and `_step` separately, and override the specs that
    they change: `transform_observation_spec`, `transform_reward_spec`, `transform_action_spec`, `transform_done_spec`.
    If a subclass overrides none of these, a copy is run on zeros, and the specs of changed entries become unbounded.

    Keys are those of the root (`"observation"`, `"reward"`). A leading `"next"`, which buffers need, is dropped:
    `["x", ("next", "x")]` means `"x"` in an environment, at resets and after steps.
    """

    in_keys: Sequence[Key]
    out_keys: Sequence[Key]
    in_keys_inv: Sequence[Key]
    out_keys_inv: Sequence[Key]

    #: Whether `_apply_transform` is monotonic in each element, so that the bounds of specs can be mapped.
    _keeps_order = False

    # ---- values ----
    def _apply_transform(self, value: Tensor) -> Tensor:
        raise NotImplementedError

    def _call(self, td: TensorDictBase) -> TensorDictBase:
        """Changes observations, reward and flags, in place or in a new TensorDict; a reset has no reward."""
        raise NotImplementedError

    def _by_key(self, td: TensorDictBase) -> TensorDictBase:
        for source, target in self._env_pairs:
            value = td.get(source, None)
            if value is not None:
                td.set(target, self._apply_transform(value))
        return td

    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        """Changes `fresh`, the result of the environment's reset.

        `td.get("_reset", None)` (bool `[*batch, 1]`) is True where episodes start; None: everywhere. The other rows of
        `fresh` have no meaning, and their results are not read.
        """
        return self._call(fresh)

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        """Changes `following`, the result of a step; `td` has the state before the step, and the action."""
        return self._call(following)

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        """`td` in the form for the base environment, usually with a changed action; `td` itself stays unchanged."""
        raise NotImplementedError

    def _inverts(self) -> bool:
        """Whether `_inv_call` changes anything."""
        raise NotImplementedError

    # ---- use ----
    def for_env(self, specs: EnvSpecs) -> Any:
        """The transform to use in an environment with these specs: itself, or a copy if it has state per episode.

        Raises:
            TypeError: it does not work in environments; the message names an alternative.
        """
        return self

    @property
    def container(self) -> Any:
        """The latest `TransformedEnv` that contains it; None if there is none."""
        return None if (place := _CONTAINERS.get(self)) is None else place[0]()

    def set_container(self, container: Any, stands_for: Any = None) -> None:
        """Called by an environment that it is added to, which may use a copy of it."""
        _CONTAINERS[self] = weakref.ref(container), weakref.ref(self if stands_for is None else stands_for)

    def reset_parent(self) -> None:
        """Detaches it from its environment; `parent` raises afterwards."""
        _CONTAINERS.pop(self, None)

    @property
    def parent(self) -> Any:
        """The environment before this transform: the base environment with all earlier transforms.

        Raises:
            RuntimeError: it is in no environment, or the environment no longer exists.
        """
        if (container := self.container) is None:
            raise RuntimeError(f"{type(self).__name__} is in no environment: put it into a TransformedEnv first")
        return container.before_transform(_CONTAINERS[self][1]())

    def parts(self) -> list[Any]:
        """The transforms that it is composed of; itself if it is a single one."""
        return [self]

    def policy_entries(self) -> list[Key]:
        """Entries that it adds at resets and that the policy writes under `"next"`; see `TensorDictPrimer`."""
        return []

    def env_steps(self) -> list[TransformStep]:
        """The functions to call at resets and steps."""
        inv = self._inv_call if self._inverts() else None
        return [TransformStep(self, self._reset, self._step, inv, returns_own_tensors=type(self) in BUILT_IN)]

    def deferred(self) -> Deferred | None:
        """Its form for whole batches; None if it must be applied to each step."""
        return None

    def frame_stacks(self) -> FrameStacks | None:
        """What it does, if that is nothing but to stack observations."""
        return None

    def close(self) -> None:
        """Called when its environment is closed; a class with files or windows closes them here."""

    def dump(self, **settings: Any) -> None:
        """Writes its recordings; only classes that record implement this."""

    def empty_cache(self) -> None:
        """Clears values cached from `in_keys` and `out_keys`; call it after changing them."""
        vars(self).pop("_env_pairs", None)

    @cached_property
    def _env_pairs(self) -> list[tuple[Key, Key]]:
        """Pairs of source and target keys at the root, each once; empty if a class maps keys in another way."""
        return root_pairs(self.in_keys, self.out_keys) if len(self.in_keys) == len(self.out_keys) else []

    # ---- specs ----
    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        """The specs of an environment with this transform.

        Raises:
            KeyError: the environment has no such entries.
        """
        specs.require([source for source, _ in self._env_pairs], type(self).__name__)
        if self._changes_groups():
            changed = self._specs_by_groups(specs)
        else:
            # Copies, as a subclass may set entries of the Composite that it gets.
            action = clone_composite(specs.action) if isinstance(specs.action, Composite) else specs.action
            changed = specs._replace(
                observation=self.transform_observation_spec(clone_composite(specs.observation)),
                action=_changed_leaf(self.transform_action_spec, action, "action"),
                rewards=self._changed_rewards(specs.rewards),
                done=_changed_leaf(self.transform_done_spec, specs.done, *FLAGS),
            )
        return changed.with_entries(self._copied_results(specs))

    def _changes_groups(self) -> bool:
        """Whether a class overrides `transform_output_spec` or `transform_input_spec`."""
        kind, base = type(self), EnvTransformMixin
        theirs = (kind.transform_output_spec, kind.transform_input_spec)
        return theirs != (base.transform_output_spec, base.transform_input_spec)

    def _specs_by_groups(self, specs: EnvSpecs) -> EnvSpecs:
        shape, device = specs.observation.shape, specs.observation.device
        flags = Composite(dict.fromkeys(FLAGS, specs.done), shape=shape, device=device)
        outputs = {
            "full_observation_spec": clone_composite(specs.observation),
            "full_reward_spec": clone_composite(specs.rewards),
            "full_done_spec": flags,
        }
        actions = Composite({"action": specs.action}, shape=shape, device=device)
        inputs = {"full_action_spec": actions, "full_state_spec": Composite(shape=shape, device=device)}
        after = self.transform_output_spec(Composite(outputs, shape=shape, device=device))
        given: Any = self.transform_input_spec(Composite(inputs, shape=shape, device=device))
        if len(given["full_state_spec"].leaves()):
            raise TypeError(
                f"{type(self).__name__} adds entries that steps read, {list(given['full_state_spec'].leaves())}: "
                "environments with transforms read an action only"
            )
        return specs._replace(
            observation=after["full_observation_spec"], action=given["full_action_spec", "action"],
            rewards=after["full_reward_spec"], done=after["full_done_spec", "done"],
        )  # fmt: skip

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """`full_observation_spec`, `full_reward_spec` and `full_done_spec` after the transform."""
        groups: Any = output_spec
        groups["full_observation_spec"] = self.transform_observation_spec(groups["full_observation_spec"])
        groups["full_reward_spec"] = self._changed_rewards(groups["full_reward_spec"])
        done = groups["full_done_spec", "done"]
        changed = _changed_leaf(self.transform_done_spec, done, *FLAGS)
        for flag in FLAGS:
            groups["full_done_spec", flag] = changed
        return output_spec

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """`full_action_spec` and `full_state_spec` in the caller's form."""
        groups: Any = input_spec
        action = groups["full_action_spec", "action"]
        groups["full_action_spec", "action"] = _changed_leaf(self.transform_action_spec, action, "action")
        groups["full_state_spec"] = self.transform_state_spec(groups["full_state_spec"])
        return input_spec

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """The specs of the entries besides the action that a step reads; a transform cannot add any."""
        return state_spec

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """The specs of the observations after the transform."""
        result = observation_spec
        for source, target in self._env_pairs:
            spec = result.leaves().get(source)
            if spec is not None:
                if target in RESULT_KEYS:
                    raise ValueError(
                        f"{type(self).__name__} would replace {target!r} by {source!r}; implement _step and "
                        "transform_reward_spec or transform_done_spec for that"
                    )
                result[target] = self._mapped(spec)
        return result

    def transform_reward_spec(self, reward_spec: Spec) -> Spec:
        """The spec of the reward after the transform; of several, or of a group's, a Composite by key."""
        pairs = self._env_pairs
        if isinstance(reward_spec, Composite):
            changed = clone_composite(reward_spec)
            for key, spec in reward_spec.leaves().items():
                if (key, key) in pairs:
                    changed[key] = self._mapped(spec)
            return changed
        return self._mapped(reward_spec) if ("reward", "reward") in pairs else reward_spec

    def _changed_rewards(self, rewards: Composite) -> Composite:
        """The specs of all rewards after the transform. A method of a user's may be written for a single one."""
        leaves = rewards.leaves()
        if list(leaves) == ["reward"]:
            changed = _changed_leaf(self.transform_reward_spec, leaves["reward"], "reward")
            return rewards if changed is leaves["reward"] else clone_composite(rewards).set("reward", changed)
        try:
            group = self.transform_reward_spec(clone_composite(rewards))
        except Exception:
            if len(leaves) != 1:
                raise
            group = rewards
        if isinstance(group, Composite) and group is not rewards:
            return group
        own = clone_composite(rewards)
        for key, spec in leaves.items():
            own[key] = self.transform_reward_spec(spec)
        return own

    def transform_done_spec(self, done_spec: Spec) -> Spec:
        """The spec of each flag after the transform."""
        return self._mapped(done_spec) if ("done", "done") in self._env_pairs else done_spec

    def transform_action_spec(self, action_spec: Spec) -> Spec:
        """The spec of the action that the caller gives."""
        return action_spec

    def _mapped(self, spec: Spec) -> Spec:
        return map_spec(spec, self._apply_transform, keeps_order=self._keeps_order)

    def _copied_results(self, specs: EnvSpecs) -> dict[Key, Spec]:
        """The specs of rewards and flags that are copied to other keys, where they count as observations."""
        copied: dict[Key, Spec] = {}
        results = specs.result_keys
        for source, target in self._env_pairs:
            if source in results and target not in results:
                copied[target] = self._mapped(specs.entry(source))  # type: ignore[arg-type]
        return copied

    def _mapped_action(self, action_spec: Spec, change: Callable[[Spec], Spec]) -> Spec:
        """The action's spec, with `change` applied to the leaves named in `in_keys_inv`.

        Raises:
            ValueError: the action would get another name.
        """
        for inner, outer in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            if inner != outer and "action" in (key_path(inner)[0], key_path(outer)[0]):
                raise ValueError(
                    f"{type(self).__name__} gives the action {inner!r} the name {outer!r}; in an environment it is "
                    "called 'action' on both sides"
                )
        keys = set(self.in_keys_inv)
        return map_leaves(action_spec, "action", lambda key, spec: change(spec) if key in keys else spec)


def _changed_leaf(change: Callable[[Any], Any], spec: Spec, *names: str) -> Any:
    """Applies a user's spec method to the spec of a reward, flag or action, or to a Composite of it if that fails.

    Raises:
        Exception: the method's own error, for the spec itself.
    """
    try:
        changed = change(spec)
    except Exception as error:
        group = Composite(dict.fromkeys(names, spec), shape=spec.shape[: max(spec.ndim - 1, 0)], device=spec.device)
        try:
            changed = change(group)
        except Exception:
            raise error from None
    is_group = isinstance(changed, Composite) and not isinstance(spec, Composite)
    return changed[names[0]] if is_group else changed


def apply_to_composite(change: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A decorator of methods such as `transform_observation_spec` that are written for one spec.

    The method maps the spec of each of `in_keys` to the spec of its `out_key`.

    Example:
        >>> from engram.envs import GymEnv, TransformedEnv
        >>> class Sine(Transform):
        ...     def _apply_transform(self, value):
        ...         return value.sin()
        ...     @apply_to_composite
        ...     def transform_observation_spec(self, spec):
        ...         return Bounded(-1, 1, shape=spec.shape, dtype=spec.dtype)
        >>> env = TransformedEnv(GymEnv("Pendulum-v1"), Sine(["observation"], ["sine"]))
        >>> env.observation_spec["sine"].shape
        torch.Size([3])
    """
    return _by_keys(change, lambda transform: (transform.in_keys, transform.out_keys))


def apply_to_composite_inv(change: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`apply_to_composite` for actions: maps specs of `in_keys_inv` to those of `out_keys_inv`."""
    return _by_keys(change, lambda transform: (transform.in_keys_inv, transform.out_keys_inv))


def _by_keys(change: Callable[[Any, Any], Any], keys_of: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(change)
    def changed(self: Any, spec: Any) -> Any:
        if not isinstance(spec, Composite):
            raise TypeError(f"{change.__name__} of {type(self).__name__} takes a Composite, got {spec}")
        groups = [group for name in _GROUPS if isinstance(group := spec.get(name, None), Composite)] or [spec]
        for group in groups:
            for source, target in root_pairs(*keys_of(self)):
                if source in group.leaves():
                    group[target] = change(self, group[source].clone())
        return spec

    return changed


_GROUPS = ("full_observation_spec", "full_reward_spec", "full_done_spec", "full_action_spec", "full_state_spec")


def root_key(key: Key) -> Key:
    """The key without a leading "next": `"x"` for `("next", "x")`."""
    path = key_path(key)
    path = path[1:] if path[0] == "next" and len(path) > 1 else path
    return path[0] if len(path) == 1 else path


def root_pairs(sources: Sequence[Key], targets: Sequence[Key]) -> list[tuple[Key, Key]]:
    """Pairs of source and target keys without a leading `"next"`, each pair once."""
    pairs = zip(map(root_key, sources), map(root_key, targets), strict=True)
    return list(dict.fromkeys(pairs))


def select_reset(td: TensorDictBase, fresh: Tensor, old: Tensor | None) -> Tensor:
    """`fresh` where `td["_reset"]` is True, else `old`; all of `fresh` if there is no mask or no `old`."""
    mask = td.get("_reset", None)
    if mask is None or old is None:
        return fresh
    batch = mask.shape[:-1]
    return torch.where(mask.reshape(*batch, *[1] * (fresh.ndim - len(batch))), fresh, old.to(fresh.device))


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """`value` on `device`, as an environment may be moved in the middle of an episode."""
    return value if value.device == device else value.to(device)


Inverse = Callable[[Any], Any]


class WriteRequest(NamedTuple):
    """Data to be written to a buffer: the items, and which of their dimensions is time."""

    items: Any  #: None: nothing is to be written yet
    batch_dims: int = 1  #: `ndim` of the storage: 1, or 2 for `[envs, time]`
    time_dim: int = 0
    single: bool = False  #: one step, without a time dimension
    in_place: bool = False  #: replaces stored steps, and does not continue the last write
    resized: bool = False  #: the steps no longer correspond one to one to the caller's
    #: Steps that a transform holds back, as if flushed now: the buffer checks that they match the storage.
    held: Any = None

    def changed(self, fn: Callable[[Any], Any]) -> WriteRequest:
        """The request with `fn` applied to all its data."""
        held = None if self.held is None else fn(self.held)
        return self._replace(items=None if self.items is None else fn(self.items), held=held)

    def as_steps(self) -> WriteRequest:
        """`in_order` for data with a `batch_size` that are appended; other requests stay as they are.

        Raises:
            ValueError: the batch has no steps.
        """
        if self.in_place or not has_batch_size(self.items):
            return self
        if 0 in self.items.batch_size:
            raise ValueError("nothing to add: the batch has no steps")
        return self.in_order()

    def inverted(self, inv: Inverse, who: Any, once: Inverse) -> WriteRequest:
        """The request with an inverse applied, which may return None (nothing yet), fewer steps or more.

        Args:
            who: the transform that the inverse belongs to.
            once: the same inverse without a lasting effect on the transform, for data that are not continued.

        Raises:
            TypeError: the request replaces stored steps, and the inverse returns another number of steps.
        """
        items = self.items
        if items is None and self.held is None:
            return self
        inverted = items if items is None else (once if self.in_place else inv)(items)
        held = None if self.held is None else once(self.held)
        if inverted is items and held is self.held:
            return self
        held = None if held is None or 0 in (_sizes(held) or ()) else held
        before, after = _sizes(items), _sizes(inverted)
        if before == after and inverted is not None:
            return WriteRequest(
                inverted, self.batch_dims, self.time_dim, self.single, self.in_place, self.resized, held
            )
        if 0 in (after or ()) and 0 not in (before or ()):
            inverted = None
        request = self._replace(items=inverted, held=held)
        if not request.steps_differ_from(self):
            return request
        if self.in_place:
            raise TypeError(
                f"{who.kind} changes the number of steps that are written, so that they cannot replace stored steps; "
                "write to rb.storage, past the transforms"
            )
        return request._replace(resized=True)

    def steps_differ_from(self, other: WriteRequest) -> bool:
        """Whether the two requests have different numbers of steps."""
        if self.items is None or other.items is None:
            return (self.items is None) != (other.items is None)
        mine, theirs, dims = _sizes(self.items), _sizes(other.items), self.batch_dims - self.single
        return mine is not None and theirs is not None and mine[:dims] != theirs[:dims]

    @property
    def rows_are_trajectories(self) -> bool:
        """Whether the data have more batch dimensions than the storage: each row is then a whole trajectory."""
        any_data = self.held if self.items is None else self.items
        dims = any_data.batch_dims if has_batch_size(any_data) else 0
        return bool(dims > self.batch_dims - self.single)

    def in_order(self) -> WriteRequest:
        """The request with time as its last batch dimension, also for a single step."""
        last = self.batch_dims - 1
        if self.single:
            w = self.changed(lambda x: map_outermost(x, lambda t: t.unsqueeze(last), lambda td: td.unsqueeze(last)))
            return w._replace(single=False, time_dim=last)
        if self.time_dim == last:
            return self
        return self.changed(lambda x: move_dim(x, self.time_dim, last))._replace(time_dim=last)

    def in_form_of(self, other: WriteRequest) -> WriteRequest:
        """The request with the time dimension where `other` has it: the reverse of `in_order`."""
        if other.single and not self.single:
            last = self.time_dim
            w = self.changed(lambda x: map_outermost(x, lambda t: t.select(last, 0), lambda td: td.squeeze(last)))
        elif other.time_dim != self.time_dim:
            w = self.changed(lambda x: move_dim(x, self.time_dim, other.time_dim))
        else:
            return self
        return w._replace(single=other.single, time_dim=other.time_dim)


class StreamTraits(NamedTuple):
    """How a transform treats consecutive writes.

    What depends on earlier batches is written one batch at a time, and a refused write is undone by `load_state_dict`.
    """

    inverse_is_ordered: bool  #: whether the result of `inverse_stream` depends on earlier batches
    forward_is_ordered: bool  #: whether that of `forward_stream` does
    flushes_all: bool  #: whether `flush` returns all steps that are held back
    horizon: int = 1  #: how many steps behind a written row the one comes whose observation is its next one

    def and_those_of(self, other: StreamTraits) -> StreamTraits:
        """The traits of two transforms, one after the other."""
        return StreamTraits(
            self.inverse_is_ordered or other.inverse_is_ordered,
            self.forward_is_ordered or other.forward_is_ordered,
            self.flushes_all and other.flushes_all,
            max(self.horizon, other.horizon),
        )


def _sizes(batch: Any) -> tuple[int, ...] | None:
    """The batch dimensions of a TensorDict or tensorclass; None for other data."""
    return tuple(batch.batch_size) if has_batch_size(batch) else None


@advised
class Transform(KeepsArguments, EnvTransformMixin, nn.Module):
    """Changes batches: `forward` when they are read, `inv` when they are written.

    A plain callable may be used as a transform too: a buffer calls it on reading. Subclasses that work entry by entry
    implement `_apply_transform(value)` and `_inv_apply_transform(value)`; others override `forward` and `inv`, or
    `_call` and `_inv_call`, which work in buffers and in environments.

    Args:
        in_keys: entries that `forward` reads; nested keys are tuples.
        out_keys: entries that `forward` writes, `in_keys` if None; where the two differ the source stays.
        in_keys_inv: entries as they are stored, which `inv` writes.
        out_keys_inv: the same entries under the caller's names, which `inv` reads; `in_keys_inv` if None.

    Batches are TensorDicts, nested dicts or tensorclasses. `forward` sets entries of the batch that it gets (a buffer
    gives it a fresh copy) and does not change the transform, so that threads may prepare batches. `inv` returns a new
    batch, which shares unchanged leaves with the caller's; or None, if there is nothing to write yet; or any other
    number of steps. For transforms in environments see `EnvTransformMixin`.

    A transform with a state between writes declares it, by `register_buffer` or by `get_extra_state` and
    `set_extra_state`. What is declared is saved with the buffer and put back after a refused write; if the inverse
    holds steps back, `empty` resets it, too. Other attributes that `_inv_call` sets are kept as they are: not saved
    (a save warns of them), not put back, not reset, and copies of the transform have them.

    A transform is an `nn.Module`: parameters, buffers and modules that are its attributes are moved by `to`, saved with
    the replay buffer or environment that the transform is in, and seen by `parameters`, `apply`, `train` and `eval`.
    Forward hooks are not called.

    Example:
        >>> class Double(Transform):
        ...     def _apply_transform(self, value):
        ...         return value * 2
        >>> double = Double(in_keys=["x", ("next", "x")])
        >>> batch = {"x": torch.ones(3), "next": {"x": torch.zeros(3)}}
        >>> double(batch)["x"]
        tensor([2., 2., 2.])
    """

    in_keys: Sequence[Key] = ()
    out_keys: Sequence[Key] = ()
    in_keys_inv: Sequence[Key] = ()
    out_keys_inv: Sequence[Key] = ()

    # The values in `stream`; a class may set them.
    inverse_in_order = False
    forward_in_order = False
    can_flush = True

    _overrides: ClassVar[frozenset[str]] = frozenset()  # methods that it has in place of those of `Transform`
    _inverts_by_call = False  # whether `inv` calls `_inv_call`
    _has_memory = False  # whether the inverse may keep something from one write to the next
    _holds_back = False  # whether the inverse has ever returned another number of steps than it got
    _unused: Unused | None = None  # what it was before its first write

    #: Whether it changes data on writing, or actions: whether it has an inverse.
    invertible = False

    #: Whether `forward` and `inv` ignore `in_keys` that a batch lacks; see `set_missing_tolerance`.
    missing_tolerance = False

    def __init_subclass__(cls, *, built_in: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(built_in=built_in, **kwargs)
        cls._overrides = own = overrides(cls, Transform)
        if "invertible" not in vars(cls):
            cls.invertible = not own.isdisjoint(_INVERTING)
        if "_inv_call" in own and "inv" not in own and not cls._inverts_by_call:
            cls._inverts_by_call = cls._has_memory = cls.inverse_in_order = True
            cls.can_flush = "flush" in own

    def __new__(cls: type[Self], *args: Any, **kwargs: Any) -> Self:
        self: Self = super().__new__(cls, *args, **kwargs)
        nn.Module.__init__(self)  # here, as a user's `__init__` may not call its base's
        return self

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, in_keys_inv: Keys = None, out_keys_inv: Keys = None
    ) -> None:
        is_keyed = self._overrides.isdisjoint(_OF_VALUES)
        self.in_keys, self.out_keys = _pair(in_keys, out_keys, "", must_fit=type(self) in BUILT_IN or is_keyed)
        self.in_keys_inv, self.out_keys_inv = _pair(in_keys_inv, out_keys_inv, "_inv")

    def __setattr__(self, name: str, value: Any) -> None:
        if type(self) in BUILT_IN:  # which keep modules as plain attributes, as these are faster to look up
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def clone(self: Self) -> Self:
        """A copy with the same settings and state that belongs to no environment."""
        return copy.deepcopy(self)

    # ---- modules and tensors of a user's class ----
    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Makes a tensor an attribute that `state_dict` saves and `to` moves.

        It is saved with the transform's replay buffer. Assigning to the attribute replaces the tensor. Loading a state
        without it (saved before it was registered) resets it to its first value.

        Args:
            tensor: None: it is assigned later, and saved from then on.
            persistent: False: it is moved, but not saved.

        Raises:
            TypeError: the name is not a string, or the value not a tensor.
            KeyError: the transform has such an attribute, or the name cannot be one.

        Example:
            >>> class Centred(Transform):
            ...     def __init__(self, mean, in_keys):
            ...         super().__init__(in_keys)
            ...         self.register_buffer("mean", mean)
            ...     def _apply_transform(self, value):
            ...         return value - self.mean
            >>> centred = Centred(torch.tensor(2.0), in_keys=["x"])
            >>> centred.state_dict()
            {'buffers': {'mean': tensor(2.)}}
        """
        if not isinstance(name, str):
            raise TypeError(f"the name of a buffer is a string, got a {type(name).__name__}")
        if not name.isidentifier():
            raise KeyError(f"{name!r} cannot be the name of an attribute: use letters, digits and underscores")
        if name not in self._buffers and name in dir(self):
            raise KeyError(f"{type(self).__name__} has an attribute {name!r} already: choose another name")
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"the buffer {name!r} must be a tensor or None, got a {type(tensor).__name__}")
        super().register_buffer(name, tensor, persistent)
        vars(self).setdefault(REGISTERED, {}).setdefault(name, None if tensor is None else tensor.detach().clone())

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that are its attributes, each with its name; of a Compose the transforms."""
        yield from super().named_children()
        for name, value in vars(self).items():
            if isinstance(value, nn.Module) and not name.startswith("_"):
                yield name, value

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Itself and all modules in it, each with its name."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, child in self.named_children():
            yield from child.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise absent_member(type(self), name) from None

    # ---- roles ----
    def roles(self) -> Role:
        """What it changes. A class declares it where its methods and keys do not tell."""
        own, roles = self._overrides, Role.NOTHING
        is_keyed = bool(self.in_keys) or "_pairs" in own
        if not own.isdisjoint(("forward", "_call")) or (is_keyed and "_apply_transform" in own):
            roles |= Role.READING | Role.ENVIRONMENT
        if self.changes_writes() or "inverse_stream" in own:
            roles |= Role.WRITING
        inverts_actions = any("action" in key_path(key) for key in (*self.in_keys_inv, *self.out_keys_inv))
        is_of_users = type(self) not in BUILT_IN and bool(own)  # which may have only `close`, as a recorder
        if inverts_actions or is_of_users or not own.isdisjoint(("_reset", "_step")):
            roles |= Role.ENVIRONMENT
        return roles

    @property
    def takes_whole_trajectories(self) -> bool:
        """Whether data that are written must have each trajectory whole in one batch."""
        return False

    @property
    def needs_order(self) -> bool:
        """Whether what it gives a row depends on the rows around it, in the order of time."""
        return False

    def has_written(self, batch: Any) -> bool | None:
        """Whether these rows went through it when they were written; None: rows do not show it."""
        return None

    def has_changed(self, batch: Any) -> bool | None:
        """Whether `forward` was applied to these rows; None: they do not show it."""
        return has_entries(batch, [key for key in self.out_keys if key not in self.in_keys])

    # ---- reading ----
    def read(self, batch: Any, loose: int = 0) -> Any:
        """`forward` of a batch that a buffer has read; the batch itself if it is `is_idle`."""
        return batch if self.is_idle(batch, loose) else self.forward(batch)

    def is_idle(self, batch: Any, loose: int = 0) -> bool:
        """Whether it leaves a batch that a buffer has read as it is because its rows do not follow each other.

        Then it warns, once; so it does if it only changes what is written, and these rows were written without it.

        Args:
            loose: how many of the first dimensions are of rows that were drawn one by one; 0: they follow each other.
        """
        is_written = self.has_written(batch)
        if loose and self.needs_order and not is_written and Role.READING in self.roles():
            if _batch_dims(batch) <= loose:
                later = "" if Role.WRITING in self.roles() else " with invert=True, which computes it on writing"
                warn_once(
                    self,
                    f"{self.kind} takes rows in the order of time, and the sampler draws single rows: batches stay as "
                    f"they are. Draw slices (SliceSampler), or append it before the first extend{later}",
                )
                return True
        elif is_written is False and Role.READING not in self.roles():
            warn_once(
                self, f"{self.kind} finds rows that were written without it, which stay so: {where_it_works(self)}"
            )
        return False

    def forward(self, batch: Any) -> Any:
        """The batch in the form that `sample` returns.

        Raises:
            KeyError: an entry is missing; the message names it.
            TypeError: the batch has no keys.
        """
        if type(batch) is list:
            return [self.forward(item) for item in batch]
        if "forward" in self._overrides:
            if _STEPPED.transform is self:
                return self._by_key(batch)
        elif "_call" in self._overrides:
            return self._call(batch)  # a subclass written for environments
        for source, target in self._pairs(batch):
            if self.missing_tolerance and get_tensor(batch, source) is None:
                continue
            set_entry(batch, target, self._apply_transform(require_tensor(batch, source, type(self).__name__)))
        return batch

    def set_missing_tolerance(self, mode: bool = False) -> None:
        """Sets whether `forward` and `inv` ignore missing keys, in transforms that work entry by entry."""
        self.missing_tolerance = bool(mode)

    def _pairs(self, batch: Any) -> list[tuple[Key, Key]]:
        """Pairs of the key that `forward` reads and the key that it sets."""
        return list(zip(self.in_keys, self.out_keys, strict=True))

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value

    def acts_by_row(self, row_ndim: Callable[[Key], int | None]) -> bool:
        """Whether `forward` transforms a row identically in any batch, of any batch dimensions, bit by bit.

        If so, a batch of several buffers may be transformed at once. Used only for the library's own classes.

        Args:
            row_ndim: the number of dimensions of an entry in one row; None: rows have no such entry.
        """
        return False

    def does_the_same(self, other: Transform) -> bool:
        """Whether another transform's `forward` gives the same results for any batch, bit by bit.

        If so, members of an ensemble with their own transforms may be transformed at once. False if
        unknown. Used only for the library's own classes.
        """
        return other is self

    def _has_settings_of(self, other: Transform) -> bool:
        """Whether another transform has this class and equal attributes: `does_the_same` without state."""
        mine, theirs = vars(self), vars(other)
        names = mine.keys() - _NO_SETTINGS
        if type(self) is not type(other) or names != theirs.keys() - _NO_SETTINGS:
            return False
        for name in names:  # no comprehension: this runs for each batch of an ensemble
            value, another = mine[name], theirs[name]
            if value is another:
                continue
            if value != another if name in _KEY_LISTS else not _are_same(value, another):
                return False
        return True

    def __call__(self, batch: Any) -> Any:
        """`forward`; transforms that learn from data also learn from this batch."""
        return self.forward(batch)

    # ---- environments ----
    def _call(self, td: TensorDictBase) -> TensorDictBase:
        if "forward" not in self._overrides:
            return self._by_key(td)
        outer, _STEPPED.transform = _STEPPED.transform, self
        try:
            result: TensorDictBase = self.forward(td)
            return result
        finally:
            _STEPPED.transform = outer

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        return self._inv_by_key(td) if self._inverts_by_call else self.inv(td)

    def _inverts(self) -> bool:
        return bool(self.in_keys_inv) or not self._overrides.isdisjoint(("inv", "_inv_call"))

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        if not self.learns_specs_by_trial():
            return super().transform_specs(specs)
        tried, ours = specs_by_trial(self, specs), self.library_class()
        # A child that does what its parent does has its parent's bounds.
        is_child = ours is not Transform and not ours.learns_specs_by_trial()
        return super().transform_specs(specs) if is_child and acts_as(self, ours, specs) else tried

    @classmethod
    def learns_specs_by_trial(cls) -> bool:
        """Whether specs are learnt from what it makes of some values."""
        own = cls._overrides
        return own.isdisjoint(_OF_SPECS) and not own.isdisjoint(_OF_VALUES)

    # ---- writing ----
    def inv(self, tensordict: Any) -> Any:
        """The batch in its stored form; gets the caller's object itself. Raises the same errors as `forward`."""
        if not self.in_keys_inv and not self._inverts_by_call:
            return tensordict
        if type(tensordict) is list:
            return [self.inv(item) for item in tensordict]
        return self._inv_call(copy_containers(tensordict)) if self._inverts_by_call else self._inv_by_key(tensordict)

    def _inv_by_key(self, tensordict: Any) -> Any:
        tensordict = copy_containers(tensordict)
        pairs = list(zip(self.out_keys_inv, self.in_keys_inv, strict=True))
        if self.missing_tolerance:
            pairs = [pair for pair in pairs if get_tensor(tensordict, pair[0]) is not None]
        values = [self._inv_apply_transform(require_tensor(tensordict, key, type(self).__name__)) for key, _ in pairs]
        for (_, target), value in zip(pairs, values, strict=True):
            set_entry(tensordict, target, value)
        return tensordict

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return value

    def inv_alone(self, batch: Any) -> Any:
        """`inv` of a batch that is read: it continues none, and is continued by none."""
        return self.inv(batch)

    @property
    def stream(self) -> StreamTraits:
        """The facts that a buffer needs before it writes."""
        return StreamTraits(self.inverse_in_order, self.forward_in_order, self.can_flush)

    def inverse_stream(self, writing: WriteRequest) -> WriteRequest:
        """Called by a buffer on each write: `inv` for consecutive batches."""
        if not self._has_memory:
            return writing.inverted(self.inv, self, self._inv_once if self.inverse_in_order else self.inv)
        if writing.in_place and self._holds_back:
            raise TypeError(
                f"{self.kind} holds steps back, so that nothing can replace stored steps through it; write to "
                "rb.storage, past the transforms"
            )
        if self._unused is None:
            self._keep_unused()
        ordered = writing.as_steps()
        inverted = ordered.inverted(self.inv, self, self._inv_once)
        if not self._holds_back and inverted.steps_differ_from(ordered):
            vars(self)[HOLDS_BACK] = True
        return inverted if inverted.resized else inverted.in_form_of(writing)

    def changes_writes(self) -> bool:
        """Whether the stored data differ from those that the caller writes."""
        return self._inverts()

    @classmethod
    def library_class(cls) -> type[Transform]:
        """The class of the library that a user's class derives from; of one of the library's, itself."""
        return next(kind for kind in cls.__mro__ if kind in BUILT_IN)

    def names_no_entry_to_invert(self) -> bool:
        """Whether a user's class has an `_inv_apply_transform` that is never called, without `in_keys_inv`."""
        ours = self.library_class()
        has_caller = not self._overrides.isdisjoint(("inv", "_inv_call", "inverse_stream"))
        return "_inv_apply_transform" in overrides(type(self), ours) and not has_caller and not self.in_keys_inv

    def _inv_once(self, batch: Any) -> Any:
        """`inv` for data that do not continue the last write, without changing the transform."""
        before, spaces = self.remember(), _namespaces(self._owner) if self._has_memory else []
        attributes = [dict(space) for space in spaces]
        try:
            return self.inv(batch)
        finally:
            self.undo(before)
            for space, values in zip(spaces, attributes, strict=True):
                for name in space.keys() - values.keys():
                    del space[name]
                space.update(values)  # in place, as threads that prepare batches read them meanwhile

    def forward_stream(self, writing: WriteRequest) -> WriteRequest:
        """Called by a buffer on each write if the transform was appended with `invert=True`: `forward`."""
        return writing.changed(self.forward)

    def flush(self, writing: WriteRequest) -> WriteRequest:
        """`inverse_stream` of the last data, if any, and of all steps that are held back.

        Raises:
            TypeError: it holds steps back without a `flush` that returns them.
        """
        if self._has_memory and self._holds_back:
            raise TypeError(
                f"{self.kind} holds steps back, and has no `flush` that returns them: use "
                "engram.envs.transforms.MultiStepTransform, or a subclass of Transform with a `flush` of its own"
            )
        return writing if writing.items is None else self.inverse_stream(writing)

    def end_trajectories(self) -> None:
        """Called when a buffer that it was appended to with `invert=True` is flushed: the next write continues none."""

    # ---- state ----
    @property
    def _owner(self) -> Any:
        """The object whose attributes the inverse changes."""
        return self

    def remember(self) -> Any:
        """The present declared state, for `undo`; none of its values is changed in place later."""
        return [copies(module._buffers) for module in self.modules()] if self._remembers() else self.state_dict()

    def undo(self, before: Any) -> None:
        """Restores the state that `remember` returned, after a refused write."""
        if self._remembers():
            for module, tensors in zip(self.modules(), before, strict=False):
                module._buffers.update(tensors)
        elif before or self.state_dict():
            self.load_state_dict(before)

    def _remembers(self) -> bool:
        """Whether registered tensors are all of its declared state."""
        return self._has_memory and self._overrides.isdisjoint(_OF_STATE)

    def empty(self) -> None:
        """Drops the state between writes; called when the buffer is emptied."""
        if not (self._has_memory and self._holds_back):
            return
        if self._declares_state():
            self.load_state_dict({})
            vars(self)[HOLDS_BACK] = False
            return
        warn_once(
            self,
            f"{self.kind} holds steps back and declares no state: those of before are written with the next ones, also "
            "in each process and copy that has them. Declare it (register_buffer, or get_extra_state and "
            "set_extra_state), or use engram.envs.transforms.MultiStepTransform",
        )

    def _declares_state(self) -> bool:
        """Whether it says by its methods or registered tensors what its state is."""
        return not self._overrides.isdisjoint(_OF_STATE) or any(module._buffers for module in self.modules())

    def _keep_unused(self) -> None:
        """Remembers what it is before its first write."""
        vars(self)[UNUSED] = Unused(None, attributes_of(self._owner))

    def lost_attributes(self) -> list[str]:
        """Attributes that have changed since the first write and are in no state: each name, and of what kind it is."""
        if self._unused is None or not self._overrides.isdisjoint(_OF_STATE):
            return []
        return self._unused.changed(self._owner)

    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The state to save, whose values are never changed in place later; empty for transforms without state.

        The other arguments are torch's, for modules that contain this transform.
        """
        if destination is not None:
            return super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        state: dict[str, Any] = self.get_extra_state()
        if self._parameters or self._buffers or self._modules:  # `_has_tensors`, inlined for speed
            tensors, weights = copies(self._saved_tensors()), dict(self.named_parameters()).keys()
            for kind, names in (("parameters", tensors.keys() & weights), ("buffers", tensors.keys() - weights)):
                if names:
                    state = {**state, kind: {name: tensors[name] for name in tensors if name in names}}
        return state

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Continues from a saved state; the other arguments are torch's, and have no effect.

        Raises:
            CheckpointMisfitError: it is no state of such a transform. Nothing is changed. It is a ValueError, too.
        """
        if type(self) in BUILT_IN and (not isinstance(state, dict) or state):
            self._require_fit(state)
        if not self._has_tensors():
            self.set_extra_state(state)
            return
        saved = {**state.get("parameters", {}), **state.get("buffers", {})}
        self.set_extra_state({name: value for name, value in state.items() if name not in ("parameters", "buffers")})
        for name, tensor in self._saved_tensors().items():
            if name in saved and name not in self._buffers:
                with torch.no_grad():
                    tensor.copy_(saved[name])
        for name, initial in vars(self).get(REGISTERED, {}).items():
            if name not in self._non_persistent_buffers_set:
                value, now = saved.get(name, initial), self._buffers[name]
                like = {} if now is None else {"device": now.device, "dtype": now.dtype}
                self._buffers[name] = None if value is None else value.to(**like, copy=True)

    def _require_fit(self, state: Any) -> None:
        """As `load_state_dict`, which changes nothing yet."""
        try:
            different = self._refusals(state)
        except ValueError as error:
            different = [str(error)]
        if different:
            raise CheckpointMisfitError(f"the state does not fit {self.kind}", different)

    def _refusals(self, state: Any) -> list[str]:
        """As `differences`, of a state that is loaded alone."""
        return self.differences(state)

    def get_extra_state(self) -> dict[str, Any]:
        """The state besides parameters and buffers."""
        return {}

    def set_extra_state(self, state: Any) -> None:
        """Restores the result of `get_extra_state`; `{}` is the state of an unused transform."""
        if self._has_memory and "attributes" in state:  # until now, attributes that `_inv_call` had changed were saved
            warnings.warn(
                f"the state of {self.kind} has attributes that it had changed on writing, which are not loaded: "
                f"{HOW_TO_DECLARE}",
                stacklevel=2,
            )

    def adapts_state(self) -> bool:
        """Whether its state is that of a user's object in it, which has methods of its own for it."""
        return False

    def state_is_optional(self) -> bool:
        """Whether nothing is lost where the state is not loaded: a buffer without this transform may load it, then."""
        return False

    def differences(self, state: dict[str, Any]) -> list[str]:
        """The reasons why a saved state cannot be loaded; empty if it can.

        Raises:
            ValueError: no such transform can have saved it.
        """
        forms.check(_STATE, state, f"the state of {self.kind}")
        different: list[str] = []
        own = self._saved_tensors() if self._has_tensors() else {}
        later = {name for name, value in self._buffers.items() if value is None} - self._non_persistent_buffers_set
        for kind, what in (("parameters", "parameter"), ("buffers", "buffer")):
            for name, tensor in state.get(kind, {}).items():
                if name in own and own[name].shape != tensor.shape:
                    different.append(f"{self.kind} has {name} {list(own[name].shape)} here, {list(tensor.shape)} there")
                elif name not in own and name not in later:
                    different.append(f"{self.kind} has no {what} {name!r} here, and one {list(tensor.shape)} there")
        return different

    def _has_tensors(self) -> bool:
        """Whether it may have parameters, buffers or modules registered as an `nn.Module`."""
        return bool(self._parameters or self._buffers or self._modules)

    def _saved_tensors(self) -> dict[str, Tensor]:
        """The current parameters and persistent buffers of itself and its modules, by name."""
        named = super().state_dict(keep_vars=True)
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    #: Attributes that determine the meaning of a state: saved with it, and required to be equal on loading.
    _state_settings: tuple[str, ...] = ("in_keys", "out_keys")

    def state_settings(self) -> dict[str, Any]:
        """The settings that determine the meaning of a state."""
        return {name: getattr(self, name) for name in self._state_settings}

    @property
    def kind(self) -> str:
        """The name that its state is saved under."""
        return type(self).__name__

    def _settings(self) -> dict[str, Any]:
        """The settings that `repr` shows besides keys."""
        return {}

    def __repr__(self) -> str:
        settings = dict(self._settings())
        if self.in_keys:
            settings["in_keys"] = list(self.in_keys)
            if self.out_keys != self.in_keys:
                settings["out_keys"] = list(self.out_keys)
        if self.in_keys_inv:
            settings["in_keys_inv"] = list(self.in_keys_inv)
            if self.out_keys_inv != self.in_keys_inv:
                settings["out_keys_inv"] = list(self.out_keys_inv)
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in settings.items())})"


BUILT_IN.add(Transform)
_OF_STATE = ("state_dict", "get_extra_state")
_INVERTING = ("inv", "_inv_call", "_inv_apply_transform", "inverse_stream")
_OF_VALUES = ("forward", "_call", "_reset", "_step")
_OF_SPECS = tuple(
    f"transform_{name}_spec" for name in ("observation", "action", "reward", "done", "output", "input", "state")
)


def has_entries(batch: Any, keys: Sequence[Key]) -> bool | None:
    """Whether a batch has all of these entries; None where there are none to look for."""
    return all(get_entry(batch, key) is not None for key in keys) if keys and has_keys(batch) else None


def _batch_dims(batch: Any) -> int:
    """The number of batch dimensions; of a dict those of its flags without a last dimension of 1, or one."""
    if type(batch) is list:
        return 1 + (_batch_dims(batch[0]) if batch else 0)
    if has_batch_size(batch):
        return len(batch.batch_size)
    flags = (get_tensor(batch, key) for key in (("next", "done"), "done"))
    shape = next((tuple(flag.shape) for flag in flags if isinstance(flag, Tensor)), (1,))
    return len(shape) - (len(shape) > 1 and shape[-1] == 1)


def _pair(sources: Keys, targets: Keys, suffix: str, must_fit: bool = True) -> tuple[list[Key], list[Key]]:
    ins = as_keys(sources)
    outs = list(ins) if targets is None else as_keys(targets)
    if must_fit and len(ins) != len(outs):
        raise ValueError(f"in_keys{suffix} has {len(ins)} keys, out_keys{suffix} {len(outs)}: {ins} and {outs}")
    if len(set(outs)) < len(outs) or (suffix and len(set(ins)) < len(ins)):
        raise ValueError(f"a key is written twice: {ins if suffix else outs}")
    return ins, outs


_KEY_LISTS = frozenset({"in_keys", "out_keys", "in_keys_inv", "out_keys_inv"})


def _are_same(a: Any, b: Any) -> bool:
    """Whether two settings are identical, bit by bit; False for settings that are not plain values."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is Tensor:
        is_number = a.ndim == b.ndim == 0 and a.is_cpu and b.is_cpu
        return is_number and a.dtype == b.dtype and _are_same(a.item(), b.item())
    if type(a) is list or type(a) is tuple:
        return len(a) == len(b) and all(map(_are_same, a, b))
    if type(a) is float:  # 0.0 and -0.0 differ
        return bool(a.hex() == b.hex())
    return type(a) in (int, bool, str) and bool(a == b)


class InvertedTransform(Transform, built_in=True):
    """A transform in the opposite direction: `inv` on reading, `forward` on writing."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform
        stream = transform.stream
        self.inverse_in_order, self.forward_in_order = stream.forward_is_ordered, stream.inverse_is_ordered

    def for_env(self, specs: EnvSpecs) -> Any:
        raise TypeError(f"{self!r} is for buffers; in an environment exchange in_keys and in_keys_inv instead")

    def roles(self) -> Role:
        inner = self.transform.roles()
        reading = Role.READING if Role.WRITING in inner else Role.NOTHING
        return reading | (Role.WRITING if Role.READING in inner else Role.NOTHING)

    @property
    def needs_order(self) -> bool:
        return self.transform.needs_order

    def has_written(self, batch: Any) -> bool | None:
        return self.transform.has_changed(batch)

    def forward(self, batch: Any) -> Any:
        return self.transform.inv_alone(batch)

    def inv(self, tensordict: Any) -> Any:
        return self.transform.forward(copy_containers(tensordict))

    def inverse_stream(self, writing: WriteRequest) -> WriteRequest:
        return self.transform.forward_stream(writing.changed(copy_containers))

    def forward_stream(self, writing: WriteRequest) -> WriteRequest:
        return self.transform.inverse_stream(writing)

    def flush(self, writing: WriteRequest) -> WriteRequest:
        flushed = super().flush(writing)
        self.transform.end_trajectories()
        return flushed

    def changes_writes(self) -> bool:
        return True

    def remember(self) -> Any:
        return self.transform.remember()

    def undo(self, before: Any) -> None:
        self.transform.undo(before)

    def empty(self) -> None:
        self.transform.empty()

    def get_extra_state(self) -> dict[str, Any]:
        return self.transform.state_dict()

    def set_extra_state(self, state: Any) -> None:
        self.transform.load_state_dict(state)

    def adapts_state(self) -> bool:
        return self.transform.adapts_state()

    def state_is_optional(self) -> bool:
        return self.transform.state_is_optional()

    def differences(self, state: dict[str, Any]) -> list[str]:
        return self.transform.differences(state)

    def state_settings(self) -> dict[str, Any]:
        return self.transform.state_settings()

    @property
    def kind(self) -> str:
        return f"inverted {self.transform.kind}"

    def __repr__(self) -> str:
        return f"inverted {self.transform}"


# ---- tensors that a user's class has registered ----
REGISTERED = "_registered_tensors"  # the attribute with the first value of each


def copies(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    return {name: None if tensor is None else tensor.detach().clone() for name, tensor in tensors.items()}


# ---- attributes that an inverse changes ----
HOLDS_BACK, UNUSED = "_holds_back", "_unused"
_LEFT_OUT = frozenset([*vars(nn.Module()), HOLDS_BACK, UNUSED, REGISTERED, WARNED])
_NO_SETTINGS = frozenset([*vars(nn.Module()), "_arguments", WARNED])  # attributes that are not settings
HOW_TO_DECLARE = (
    "a Transform declares what lasts from one write to the next by register_buffer, or by get_extra_state and "
    "set_extra_state, another object by state_dict and load_state_dict"
)


class Unused(NamedTuple):
    """What a transform was before its first write.

    Tensors are compared by identity: changes in place are not seen.
    """

    state: Any  #: what `remember` returned
    attributes: list[dict[str, tuple[Any, Any]]]  #: of it, and of each module in it

    def changed(self, owner: Any) -> list[str]:
        """The attributes that are others now, or have other members: each name, and of what kind it is."""
        return [
            f"{name} (a {type(value[0]).__name__})"
            for now, before in zip(attributes_of(owner), self.attributes, strict=False)
            for name, value in now.items()
            if name not in before or not _are_same(value, before[name])
        ]


def attributes_of(owner: Any) -> list[dict[str, tuple[Any, Any]]]:
    """The attributes of an object, and of the modules in a module: each value, and the members of a container."""
    spaces = _namespaces(owner)
    return [{n: (value, _members(value)) for n, value in space.items() if n not in _LEFT_OUT} for space in spaces]


def _members(value: Any) -> list[Any] | None:
    if isinstance(value, dict):
        return [*value.items()]
    return [*value] if isinstance(value, list | set | deque) else None


def _namespaces(obj: Any) -> list[dict[str, Any]]:
    """The dicts that hold the attributes of an object, and of the modules in a module."""
    if isinstance(obj, nn.Module):
        return [vars(module) for module in obj.modules()]
    try:
        return [vars(obj)]
    except TypeError:  # an object without attributes
        return []


_STATE = forms.record({}, {"parameters": forms.mapping_of(forms.tensor()), "buffers": forms.mapping_of(forms.tensor())})
