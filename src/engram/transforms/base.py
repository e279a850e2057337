"""What a transform does in an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.pytree import (
    Key,
    Keys,
    as_keys,
    copy_containers,
    has_batch_size,
    key_path,
    map_outermost,
    move_dim,
    require_tensor,
    set_entry,
)
from engram.specs import Composite, Spec
from engram.transforms.attributes import MEMORY, Memory, snapshot
from engram.transforms.env_specs import RESULTS, EnvSpecs, changed_leaves, clone, map_spec, tried

IDLE = "_idle"  # where a call only resets an environment, and is none of its steps: see `BatchedEnv`
Change = Callable[[TensorDictBase, TensorDictBase], TensorDictBase]


class Stage(NamedTuple):
    """One transform at work in one environment."""

    transform: Any
    reset: Change
    step: Change
    inv: Callable[[TensorDictBase], TensorDictBase] | None  #: None: it changes nothing on the way in


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
        return map_spec(spec, self._apply_transform, keeps_order=self._keeps_order)

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
            if inner != outer and "action" in (key_path(inner)[0], key_path(outer)[0]):
                raise ValueError(
                    f"{type(self).__name__} gives the action {inner!r} the name {outer!r}; in an environment it is "
                    "called 'action' on both sides"
                )
        keys = set(self.in_keys_inv)
        return changed_leaves(action_spec, "action", lambda key, spec: change(spec) if key in keys else spec)


def root_key(key: Key) -> Key:
    """`("next", "x")`: `"x"`."""
    path = key_path(key)
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


Inverse = Callable[[Any], Any]


class Writing(NamedTuple):
    """What is written, and where time runs in it."""

    items: Any  #: None: nothing is to be written now
    batch_dims: int = 1  #: of the storage: 1, or 2 for `[envs, time]`
    time_dim: int = 0
    single: bool = False  #: one step, without a time dimension
    in_place: bool = False  #: replaces stored steps: no next piece of what was written before
    resized: bool = False  #: steps are not those of the caller one by one
    #: Steps that a transform holds back, as they would be written if nothing followed: the buffer checks that they fit.
    held: Any = None

    def changed(self, fn: Callable[[Any], Any]) -> Writing:
        """With `fn` applied to all data."""
        held = None if self.held is None else fn(self.held)
        return self._replace(items=None if self.items is None else fn(self.items), held=held)

    def as_steps(self) -> Writing:
        """`in_order`, where the data say what their batch dimensions are; what replaces stored steps stays as it is.

        Raises:
            ValueError: there are no steps.
        """
        if self.in_place or not has_batch_size(self.items):
            return self
        if 0 in self.items.batch_size:
            raise ValueError("nothing to add: the batch has no steps")
        return self.in_order()

    def inverted(self, inv: Inverse, who: Any, once: Inverse) -> Writing:
        """With an inverse applied, which may make nothing of the data for now (None), fewer steps or more.

        Args:
            who: the transform whose inverse it is.
            once: the same, for data after which nothing comes: it leaves nothing behind.

        Raises:
            TypeError: these replace stored steps, and the inverse gives another number of steps.
        """
        items = self.items
        if items is None and self.held is None:
            return self
        made = items if items is None else (once if self.in_place else inv)(items)
        held = None if self.held is None else once(self.held)
        if made is items and held is self.held:
            return self
        held = None if held is None or 0 in (_sizes(held) or ()) else held
        before, after = _sizes(items), _sizes(made)
        if before == after and made is not None:
            return Writing(made, self.batch_dims, self.time_dim, self.single, self.in_place, self.resized, held)
        if 0 in (after or ()) and 0 not in (before or ()):
            made = None
        written = self._replace(items=made, held=held)
        if not written.steps_differ_from(self):
            return written
        if self.in_place:
            raise TypeError(
                f"{who.kind} makes another number of steps of what is written, so that it cannot replace stored steps; "
                "write to rb.storage, past the transforms"
            )
        return written._replace(resized=True)

    def steps_differ_from(self, other: Writing) -> bool:
        """Whether there are not as many steps here as there."""
        if self.items is None or other.items is None:
            return self.items is not other.items
        mine, its, dims = _sizes(self.items), _sizes(other.items), self.batch_dims - self.single
        return mine is not None and its is not None and mine[:dims] != its[:dims]

    @property
    def rows_are_trajectories(self) -> bool:
        """Whether the data have more batch dimensions than the storage: time then runs within a row."""
        any_data = self.held if self.items is None else self.items
        dims = any_data.batch_dims if has_batch_size(any_data) else 0
        return bool(dims > self.batch_dims - self.single)

    def in_order(self) -> Writing:
        """With time as the last batch dimension, also of one step."""
        last = self.batch_dims - 1
        if self.single:
            w = self.changed(lambda x: map_outermost(x, lambda t: t.unsqueeze(last), lambda td: td.unsqueeze(last)))
            return w._replace(single=False, time_dim=last)
        if self.time_dim == last:
            return self
        return self.changed(lambda x: move_dim(x, self.time_dim, last))._replace(time_dim=last)

    def in_form_of(self, other: Writing) -> Writing:
        """With time where `other` has it: what `in_order` did, undone."""
        if other.single and not self.single:
            last = self.time_dim
            w = self.changed(lambda x: map_outermost(x, lambda t: t.select(last, 0), lambda td: td.squeeze(last)))
        elif other.time_dim != self.time_dim:
            w = self.changed(lambda x: move_dim(x, self.time_dim, other.time_dim))
        else:
            return self
        return w._replace(single=other.single, time_dim=other.time_dim)


def _sizes(batch: Any) -> tuple[int, ...] | None:
    """Its batch dimensions; None where it does not say what they are."""
    return tuple(batch.batch_size) if has_batch_size(batch) else None


class Transform(InEnvironment):
    """Changes batches: `forward` when they are read, `inv` when they are written.

    A plain callable will do too: a buffer calls it on reading. Children that work entry by entry implement
    `_apply_transform(value)` and `_inv_apply_transform(value)`; others override `forward` and `inv`, or `_call` and
    `_inv_call`, which do the same in buffers.

    Args:
        in_keys: entries that `forward` reads; nested keys are tuples.
        out_keys: where it puts the results; where these differ from `in_keys` the source stays. `in_keys`.
        in_keys_inv: entries as they are stored, which `inv` makes.
        out_keys_inv: the same entries as the caller knows them, which `inv` reads. `in_keys_inv`.

    Batches are TensorDicts, nested dicts or tensorclasses. `forward` sets entries of the batch that it gets (a buffer
    gives it a fresh copy) and changes nothing that the transform knows, so that threads may prepare batches; `inv`
    returns a batch of its own with the other leaves of the caller's, None for nothing yet, or another number of steps:
    those are written. A transform that carries something from one written batch to the next does so in `write` and
    `stream`, or in `_inv_call` and attributes, which are then saved and undone like those of a `ForeignTransform`.
    What a transform does in an environment, and what children can change of that, says `InEnvironment`.

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

    #: Whether what `write` (`stream`) does depends on the batches before: whole writes then follow each other, and
    #: one that is refused is undone by `load_state_dict`.
    write_in_order = False
    stream_in_order = False

    #: Whether `flush` gives all that is held back.
    can_flush = True

    _inverts_by_call = False  # whether `_inv_call` does the work of `inv`
    _has_memory = False  # whether an inverse that knows nothing of buffers may carry anything in attributes

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        by_call = cls._inv_call is not Transform._inv_call and cls.inv is Transform.inv
        if by_call and not cls._inverts_by_call:
            cls._inverts_by_call = cls._has_memory = cls.write_in_order = True
            cls.can_flush = cls.flush is not Transform.flush

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, in_keys_inv: Keys = None, out_keys_inv: Keys = None
    ) -> None:
        self.in_keys, self.out_keys = _pair(in_keys, out_keys, "")
        self.in_keys_inv, self.out_keys_inv = _pair(in_keys_inv, out_keys_inv, "_inv")

    # ---- reading ----
    def forward(self, batch: Any) -> Any:
        """The batch as the caller shall see it.

        Raises:
            KeyError: an entry is missing; the message names it.
            TypeError: the batch has no keys.
        """
        if type(batch) is list:
            return [self.forward(item) for item in batch]
        kind = type(self)
        if kind._call is not Transform._call and kind.forward is Transform.forward:
            return self._call(batch)  # a child written for environments
        for source, target in self._pairs(batch):
            set_entry(batch, target, self._apply_transform(require_tensor(batch, source, type(self).__name__)))
        return batch

    def _pairs(self, batch: Any) -> list[tuple[Key, Key]]:
        """Which entries `forward` reads and where it puts them."""
        return list(zip(self.in_keys, self.out_keys, strict=True))

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value

    def __call__(self, batch: Any) -> Any:
        """`forward`; transforms that learn from data also learn from this batch."""
        return self.forward(batch)

    # ---- environments ----
    def _call(self, td: TensorDictBase) -> TensorDictBase:
        return self._by_key(td) if type(self).forward is Transform.forward else self.forward(td)

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        return self.inv(td)

    def _inverts(self) -> bool:
        kind = type(self)
        return bool(self.in_keys_inv) or kind.inv is not Transform.inv or kind._inv_call is not Transform._inv_call

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        kind = type(self)
        is_keyed = all(getattr(kind, name) is getattr(Transform, name) for name in _OF_VALUES)
        says_specs = any(getattr(kind, name) is not getattr(Transform, name) for name in _OF_SPECS)
        return super().transform_specs(specs) if is_keyed or says_specs else tried(self, specs)

    # ---- writing ----
    def inv(self, batch: Any) -> Any:
        """The batch as it shall be stored; gets the caller's own object. Errors as those of `forward`."""
        if not self.in_keys_inv and not self._inverts_by_call:
            return batch
        if type(batch) is list:
            return [self.inv(item) for item in batch]
        batch = copy_containers(batch)
        if self._inverts_by_call:
            return self._inv_call(batch)
        values = [
            self._inv_apply_transform(require_tensor(batch, key, type(self).__name__)) for key in self.out_keys_inv
        ]
        for target, value in zip(self.in_keys_inv, values, strict=True):
            set_entry(batch, target, value)
        return batch

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return value

    def write(self, writing: Writing) -> Writing:
        """What a buffer calls on writing: `inv`, for batches that follow each other."""
        if not self._has_memory:
            return writing.inverted(self.inv, self, self._inv_leaving_nothing if self.write_in_order else self.inv)
        if writing.in_place and self._memory.holds_back:
            raise TypeError(
                f"{self.kind} holds steps back, so that what replaces stored steps cannot go through it; write to "
                "rb.storage, past the transforms"
            )
        whole, before = writing.as_steps(), snapshot(self._owner)
        made = whole.inverted(self.inv, self, self._inv_leaving_nothing)
        self._memory.note(self._owner, before, made.steps_differ_from(whole))
        return made if made.resized else made.in_form_of(writing)

    def changes_what_is_written(self) -> bool:
        """Whether what is stored is not what the caller writes."""
        return self._inverts()

    def _inv_leaving_nothing(self, batch: Any) -> Any:
        """`inv` of what is no next piece."""
        before = self.remember()
        try:
            return self.inv(batch)
        finally:
            self.undo(before)

    def stream(self, writing: Writing) -> Writing:
        """What a buffer calls on writing where the transform was appended with `invert=True`: `forward`."""
        return writing.changed(self.forward)

    def flush(self, writing: Writing) -> Writing:
        """`write`, after which nothing is held back: what `writing` has, if anything, is the last for now.

        Raises:
            TypeError: it holds steps back, and does not say how to get them.
        """
        if self._has_memory and self._memory.holds_back:
            raise TypeError(
                f"{self.kind} holds steps back, and nobody but itself knows how to ask for them: use "
                "engram.envs.MultiStepTransform, or a child of engram.envs.Transform with `flush`"
            )
        return writing if writing.items is None else self.write(writing)

    # ---- state ----
    @property
    def _memory(self) -> Memory:
        found: Memory = self.__dict__.setdefault(MEMORY, Memory())
        return found

    @property
    def _owner(self) -> Any:
        """Whose attributes the inverse changes."""
        return self

    def remember(self) -> Any:
        """What `undo` needs; nothing of it is changed in place later."""
        return self._memory.remember(self._owner) if self._remembers() else self.state_dict()

    def undo(self, before: Any) -> None:
        """Goes back to what it was, after a write that was refused."""
        if self._remembers():
            self._memory.undo(self._owner, before)
        elif before or self.state_dict():
            self.load_state_dict(before)

    def _remembers(self) -> bool:
        return self._has_memory and type(self).state_dict is Transform.state_dict

    def empty(self) -> None:
        """Forgets what is carried to the next written batch; called when the buffer is emptied."""
        if self._has_memory and self._memory.holds_back:
            self._memory.forget(self._owner)

    def state_dict(self) -> dict[str, Any]:
        """What must be saved; values are never changed in place later. Empty for transforms without state."""
        return self._memory.state_dict(self._owner, self.kind) if self._has_memory else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state."""
        if self._has_memory:
            self._memory.load_state_dict(self._owner, state)

    def differences(self, state: dict[str, Any]) -> list[str]:
        """Why a saved state cannot be loaded; empty: it can."""
        return self._memory.differences(self._owner, self.kind, state) if self._has_memory else []

    #: Attributes without which a state means nothing: saved beside it, and it is only loaded where they are the same.
    _decisive: tuple[str, ...] = ("in_keys", "out_keys")

    def decisive(self) -> dict[str, Any]:
        """The settings that a state belongs to."""
        return {name: getattr(self, name) for name in self._decisive}

    @property
    def kind(self) -> str:
        """The name that its state is saved under."""
        return type(self).__name__

    def _settings(self) -> dict[str, Any]:
        """What `repr` shows besides keys."""
        return {}

    def __repr__(self) -> str:
        said = {**self._settings()}
        if self.in_keys:
            said["in_keys"] = list(self.in_keys)
            if self.out_keys != self.in_keys:
                said["out_keys"] = list(self.out_keys)
        if self.in_keys_inv:
            said["in_keys_inv"] = list(self.in_keys_inv)
            if self.out_keys_inv != self.in_keys_inv:
                said["out_keys_inv"] = list(self.out_keys_inv)
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in said.items())})"


_OF_VALUES = ("forward", "_call", "_reset", "_step")
_OF_SPECS = tuple(f"transform_{name}_spec" for name in ("observation", "action", "reward", "done"))


def _pair(sources: Keys, targets: Keys, suffix: str) -> tuple[list[Key], list[Key]]:
    ins = as_keys(sources)
    outs = list(ins) if targets is None else as_keys(targets)
    if len(ins) != len(outs):
        raise ValueError(f"in_keys{suffix} has {len(ins)} keys, out_keys{suffix} {len(outs)}: {ins} and {outs}")
    if len(set(outs)) < len(outs) or (suffix and len(set(ins)) < len(ins)):
        raise ValueError(f"a key is named twice as a target: {ins if suffix else outs}")
    return ins, outs


class InvertedTransform(Transform):
    """A transform the other way round: `inv` on reading, `forward` on writing."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform
        self.write_in_order = transform.stream_in_order
        self.stream_in_order = transform.write_in_order

    def for_env(self, specs: EnvSpecs) -> Any:
        raise TypeError(f"{self!r} is for buffers; in an environment exchange in_keys and in_keys_inv instead")

    def forward(self, batch: Any) -> Any:
        return self.transform.inv(batch)

    def inv(self, batch: Any) -> Any:
        return self.transform.forward(copy_containers(batch))

    def write(self, writing: Writing) -> Writing:
        return self.transform.stream(writing.changed(copy_containers))

    def stream(self, writing: Writing) -> Writing:
        return self.transform.write(writing)

    def changes_what_is_written(self) -> bool:
        return True

    def remember(self) -> Any:
        return self.transform.remember()

    def undo(self, before: Any) -> None:
        self.transform.undo(before)

    def empty(self) -> None:
        self.transform.empty()

    def state_dict(self) -> dict[str, Any]:
        return self.transform.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.transform.load_state_dict(state)

    def differences(self, state: dict[str, Any]) -> list[str]:
        return self.transform.differences(state)

    def decisive(self) -> dict[str, Any]:
        return self.transform.decisive()

    @property
    def kind(self) -> str:
        return f"inverted {self.transform.kind}"

    def __repr__(self) -> str:
        return f"inverted {self.transform}"
