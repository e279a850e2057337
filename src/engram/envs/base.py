"""`EnvBase`, the interface of all environments, and `step_mdp`, which moves from one step to the next."""

from __future__ import annotations

import functools
import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor, nn

from engram._advice import absent_member, advised
from engram._checks import attribute, count
from engram._native import take_frames
from engram._overrides import overrides
from engram._providers import PROVIDERS
from engram.envs.action_checks import action_keys
from engram.envs.checks import compare_with_specs
from engram.envs.engines import VectorEngine
from engram.envs.policies import (
    FLAGS,
    RecordedActions,
    as_policy,
    observation_keys,
    on_device_of,
    require_first_marks,
    written_actions,
)
from engram.envs.torchrl import as_torchrl_env
from engram.pytree import Key, KeyPath, as_keys, key_path
from engram.specs import Categorical, Composite, Spec, Stacked, StackedComposite, Unbounded
from engram.specs.spaces import EncodedSpaces, HasSpaces
from engram.specs.tensors import usable_device
from engram.store.layout import name_dimensions, tensordict_of
from engram.transforms.base import IDLE


def step_mdp(
    tensordict: TensorDictBase,
    next_tensordict: TensorDictBase | None = None,
    keep_other: bool = True,
    exclude_reward: bool = True,
    exclude_done: bool = False,
    exclude_action: bool = True,
    reward_keys: Key | Sequence[Key] = "reward",
    done_keys: Key | Sequence[Key] = "done",
    action_keys: Key | Sequence[Key] = "action",
) -> TensorDictBase:
    """The root of step t+1 from a stepped TensorDict of step t: its `"next"` entries, moved to the root.

    Other root keys (those that a policy writes) stay unless `keep_other=False`. The result is a new TensorDict, or
    `next_tensordict` with these entries, and shares its tensors with `tensordict`. A key in `done_keys` includes the
    other two flags beside it. Raises KeyError if there is no `"next"`.

    >>> from tensordict import TensorDict
    >>> step_mdp(TensorDict({"a": torch.zeros(1), "next": {"a": torch.ones(1), "reward": torch.ones(1)}}))["a"]
    tensor([1.])
    """
    td = tensordict
    following = td.get("next", None)
    if following is None:
        raise KeyError(
            f"step_mdp needs a stepped TensorDict with a 'next' entry, got keys {sorted(td.keys(), key=str)}"
        )
    rewards, actions = as_keys(reward_keys), as_keys(action_keys)
    root = td.exclude("next", *rewards, *(actions if exclude_action else ())) if keep_other else td.empty()
    dropped = [*(rewards if exclude_reward else ()), *(_with_siblings(as_keys(done_keys)) if exclude_done else ())]
    root = root.exclude(*dropped) if dropped else root
    if not exclude_action and not keep_other:
        root.update(td.select(*actions))
    # Copies: nested TensorDicts must not be shared with `td`.
    result = root.copy().update(following.exclude(*dropped).copy())
    return result if next_tensordict is None else next_tensordict.update(result)


def _with_siblings(keys: Sequence[Key]) -> list[Key]:
    """Each key, and the keys of the three flags beside it."""
    paths = [key_path(key) for key in keys]
    every = dict.fromkeys([*paths, *((*path[:-1], flag) for path in paths for flag in FLAGS)])
    return [path if len(path) > 1 else path[0] for path in every]


def step_mdp_of(env: Any) -> Callable[[TensorDictBase], TensorDictBase]:
    """`step_mdp` with the keys of an environment, of any library."""
    rewards, actions = list(getattr(env, "reward_keys", ())), action_keys(env)
    if rewards in ([], ["reward"]) and all(key_path(key)[0] == "action" for key in actions):
        return step_mdp
    return functools.partial(step_mdp, reward_keys=rewards, action_keys=actions)


def reset_where(env: Any, td: TensorDictBase, mask: Tensor) -> TensorDictBase:
    """`td` after a reset of the environments where `mask` (bool `[*batch, 1]`) is True.

    All other entries become zero there, so that a policy's hidden state does not carry over to the next trajectory.
    """
    fresh = own_reset(env, td.clone().set("_reset", mask.clone()))  # clones: the reset may write into them
    return zero_where(mask, td).update(fresh.exclude("_reset"))


def zero_where(mask: Tensor, td: TensorDictBase) -> TensorDictBase:
    """A copy of `td` that is zero where `mask` (bool `[*batch, 1]`) is True."""
    return td.apply(lambda leaf: torch.where(_like(mask, leaf, td.ndim), torch.zeros_like(leaf), leaf))


def merge_where(mask: Tensor, new: TensorDictBase, old: TensorDictBase) -> TensorDictBase:
    """`new` where `mask` (bool `[*batch, 1]`) is True, else `old`; with the keys of `new`."""
    return new.apply(lambda leaf, before: torch.where(_like(mask, leaf, new.ndim), leaf, before), old)


def stack_steps(steps: Sequence[TensorDictBase], dim: int) -> TensorDictBase:
    """`torch.stack` of steps; an entry missing in some steps is zero there.

    >>> from tensordict import TensorDict
    >>> stack_steps([TensorDict(), TensorDict({"hidden": torch.ones(1)})], 0)["hidden"].tolist()
    [[0.0], [1.0]]
    """
    keys = [set(step.keys(True, True)) for step in steps]
    if any(k != keys[0] for k in keys):
        models = {key: step.get(key) for step, k in zip(steps, keys, strict=True) for key in k}
        for step, k in zip(steps, keys, strict=True):
            for key in models.keys() - k:
                step.set(key, torch.zeros_like(models[key]))
    return torch.stack(list(steps), dim)


def with_time_named(batch: TensorDictBase) -> TensorDictBase:
    """The same batch `[*, time]`, whose last dimension has the name "time"."""
    name_dimensions(batch, [*[None] * (batch.ndim - 1), "time"])
    return batch


def _like(mask: Tensor, leaf: Tensor, batch_dims: int) -> Tensor:
    flat = mask.reshape(mask.shape[:batch_dims])
    return flat.reshape((*flat.shape, *(1,) * (leaf.ndim - batch_dims)))


Array = np.ndarray[Any, Any]


class FrameIndex:
    """Maps calls of `step` to frames of each environment, and tracks the frames that no batch has taken yet.

    Each call steps all `n` environments. An environment that a call only resets gets no frame from it: the other
    environments then have surplus frames, which begin the next batch, in order.

    >>> index = FrameIndex(2)
    >>> for idle in (None, np.array([True, False]), None):
    ...     index.add(idle)
    >>> index.count()
    >>> index.waiting.tolist()
    [2, 3]
    >>> calls, dropped = index.take(2)
    >>> calls.tolist(), dropped, index.waiting.tolist()
    ([[0, 2], [0, 1]], 2, [0, 1])
    """

    def __init__(self, n: int) -> None:
        self.waiting = np.zeros(n, np.int64)  # frames that no batch has taken, by environment
        self._taken = np.zeros(n, np.int64)  # the number of frames already taken from the calls in this index
        self._idle: list[bytes] = []  # bool [n] for each call, as bytes: a tenth of the cost of small arrays
        self._none_idle = bytes(n)
        self._counted = 0

    def add(self, idle: Array | None) -> None:
        """Adds one call; `idle`, bool `[n]`, says which environments it only reset (None: no environment)."""
        self._idle.append(self._none_idle if idle is None else idle.tobytes())

    def count(self, calls: int | None = None) -> None:
        """Counts the frames of the calls since the last count, or of the first `calls` of them, as waiting."""
        new = self._idle[self._counted :] if calls is None else self._idle[self._counted : self._counted + calls]
        self._counted += len(new)
        self.waiting += len(new)
        resets = [row for row in new if row is not self._none_idle]
        if resets:
            self.waiting -= np.frombuffer(b"".join(resets), np.bool_).reshape(len(resets), -1).sum(0)

    def last_frame(self, env: int) -> int | None:
        """The call, numbered as in `take`, of an environment's newest frame; None if a batch has taken it."""
        if not self.waiting[env]:
            return None
        return next(call for call in reversed(range(self._counted)) if not self._idle[call][env])

    def take(self, steps: int) -> tuple[Array, int]:
        """Takes the first `steps` waiting frames of each environment, oldest first.

        Returns the call of each frame, int64 `[n, steps]`, where call 0 is the oldest one in this index; and the number
        of oldest calls without waiting frames, which the index drops.
        """
        calls = np.empty((len(self.waiting), steps), np.int64)
        dropped = take_frames(b"".join(self._idle[: self._counted]), self._taken, self.waiting, calls)
        del self._idle[:dropped]
        self._counted -= dropped
        return calls, dropped


def mark_truncated(td: TensorDictBase, index: Any) -> None:
    """Marks the steps of `td` at `index` as the last ones of their trajectories: truncated where not terminated.

    The flags are replaced, not written into: they may be shared with the next step.
    """
    following = td.get("next")
    for done_key in [key for key in following.keys(True, True) if key == "done" or key[-1] == "done"]:
        parent = () if done_key == "done" else done_key[:-1]
        done, terminated = following.get(done_key).clone(), following.get((*parent, "terminated"), None)
        truncated = following.get((*parent, "truncated"), None)
        truncated = torch.zeros_like(done) if truncated is None else truncated.clone()  # some have no such flag
        truncated[index] = True if terminated is None else truncated[index] | ~terminated[index]
        done[index] = True
        following.set((*parent, "truncated"), truncated).set(done_key, done)


class StepRecord:
    """One step as a batch stores it, while a policy acts and an environment steps.

    Policies and environments may write into the tensors that they get, and, at the next step, into those that they gave
    (a network's output buffer, a simulator's state). So the policy gets copies of the state, `shown`. What the
    environment gave (`given`, see `given_entries`) is stored as it was then; all else is the policy's, such as a count
    that it adds to in place, and is copied after its call, before the environment runs.

    >>> from tensordict import TensorDict
    >>> record = StepRecord(TensorDict({"obs": torch.zeros(1), "count": torch.zeros(1)}), frozenset([("obs",)]))
    >>> acted = record.shown.set("action", torch.zeros(1))
    >>> acted["obs"] += 1
    >>> acted["count"] += 1
    >>> record.add_outputs(acted)
    >>> acted["action"] += 1
    >>> stored = record.of(acted.set("next", TensorDict({"obs": acted["obs"].clone()})), is_own=True)
    >>> stored["obs"], stored["count"], stored["action"], stored["next", "obs"]
    (tensor([0.]), tensor([1.]), tensor([0.]), tensor([1.]))
    """

    def __init__(self, state: TensorDictBase, given: frozenset[KeyPath] | None) -> None:
        self._given = given
        # By id: an entry that others hold, and the one to store.
        self._handed: dict[int, tuple[Any, Any]] = {}
        self._outputs: dict[int, tuple[Any, Any]] = {}
        self.shown = _with_entries(state, self._handed_out)

    def _handed_out(self, path: KeyPath, entry: Any) -> Any:
        copy = entry.clone()
        self._handed[id(copy)] = copy, entry
        return copy

    def _is_given(self, path: KeyPath) -> bool:
        return self._given is None or path in self._given

    def add_outputs(self, acted: TensorDictBase) -> None:
        """Copies what the policy wrote: entries that it has set in `shown`, changed there, or returned beside those."""
        for path, entry in _entries(acted):
            if not self._is_given(path) or id(entry) not in self._handed:
                self._copied(path, entry)

    def _copied(self, path: KeyPath, entry: Any) -> Any:
        found = self._handed.get(id(entry)) if self._is_given(path) else None
        found = found or self._outputs.get(id(entry))
        if found is None:
            found = self._outputs[id(entry)] = entry, entry.clone()
        return found[1]

    def of(self, stepped: TensorDictBase, *, is_own: bool) -> TensorDictBase:
        """What to store of a stepped TensorDict; `is_own`: see `returns_own_tensors`."""
        stored = _with_entries(stepped, self._copied, without="next")
        return stored.set("next", _with_entries(stepped.get("next"), self._known if is_own else self._copied))

    def _known(self, path: KeyPath, entry: Any) -> Any:
        found = self._outputs.get(id(entry)) or self._handed.get(id(entry))
        return entry if found is None else found[1]


def given_entries(env: Any) -> frozenset[KeyPath] | None:
    """The paths of the entries of the state that an environment of any library gives, by its specs.

    None: it has no specs of observations; all of the state then counts as given.
    """
    if attribute(env, "observation_spec") is None:
        return None
    others = [*(attribute(env, "done_keys") or ()), *(attribute(env, "state_keys") or ())]
    keys = [*observation_keys(env), *FLAGS, *others]
    return frozenset([(IDLE,), *map(key_path, keys)])


def _with_entries(
    td: TensorDictBase, function: Callable[[KeyPath, Any], Any], *, without: str | None = None, above: KeyPath = ()
) -> TensorDictBase:
    """A TensorDict with `function` of each entry and its path, those of nested TensorDicts included.

    `without` is an entry at the root that is left out.
    """
    if isinstance(td, LazyStackedTensorDict):
        members = td.tensordicts if without is None else [member.exclude(without) for member in td.tensordicts]
        parts = [_with_entries(member, function, above=above) for member in members]
        return LazyStackedTensorDict(*parts, stack_dim=td.stack_dim)
    if type(td) is not TensorDict:  # a tensorclass
        return (td if without is None else td.exclude(without)).apply(functools.partial(function, above))
    entries = {
        key: _with_entries(entry, function, above=(*above, key))
        if isinstance(entry, TensorDictBase)
        else function((*above, key), entry)
        for key, entry in td.items()
        if key != without
    }
    return tensordict_of(entries, td.batch_size, device=td.device)


def _entries(td: TensorDictBase, above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """All entries that are no TensorDicts, with their paths; the number of a stack's member is not part of them."""
    if isinstance(td, LazyStackedTensorDict):
        for member in td.tensordicts:
            yield from _entries(member, above)
        return
    for key, entry in td.items():
        if isinstance(entry, TensorDictBase):
            yield from _entries(entry, (*above, key))
        else:
            yield (*above, key), entry


def _clone(path: KeyPath, entry: Any) -> Any:
    return entry.clone()


def returns_own_tensors(env: Any) -> bool:
    """Whether `env` does not write into the tensors that its steps and resets have returned.

    False for environments of other libraries, and where a subclass of a user's, or the object, has another `step` or
    `reset`: they may return the tensors in which they keep their state.
    """
    return isinstance(env, EnvBase) and has_methods_of_engram(env, "step", "reset")


def own_reset(env: Any, td: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
    """The result of a reset, in tensors that `env` does not write into later."""
    fresh: TensorDictBase = env.reset(td, **kwargs)
    return fresh if returns_own_tensors(env) else fresh.clone()


def own_next(env: Any, td: TensorDictBase) -> TensorDictBase:
    """The entries under `"next"` after a step, in tensors that `env` does not write into later."""
    following: TensorDictBase = env.step(td).get("next")
    return following if returns_own_tensors(env) else following.clone()


def has_methods_of_engram(env: EnvBase, *methods: str) -> bool:
    """Whether these methods are those of a class of the library: not a subclass's of a user's, nor the object's own."""
    return vars(env).keys().isdisjoint(methods) and _are_of_engram(type(env), methods)


def steps_as(env: EnvBase, kind: type) -> bool:
    """Whether `env` is stepped and reset by the methods of a class: no subclass, and no object, has others."""
    return _changed_methods(type(env), kind).isdisjoint(_OF_STEPS) and vars(env).keys().isdisjoint(_OF_STEPS)


_OF_STEPS = ("_step", "_reset", "step", "reset")


@functools.lru_cache(maxsize=256)
def _changed_methods(own: type, kind: type) -> frozenset[str]:
    return overrides(own, kind)


@functools.lru_cache(maxsize=256)
def _are_of_engram(kind: type, methods: tuple[str, ...]) -> bool:
    """Whether the methods of a class are those of a class of the library."""
    owners = [next(owner for owner in kind.__mro__ if method in vars(owner)) for method in methods]
    return all(owner.__module__.partition(".")[0] == "engram" for owner in owners)


class FrameQueue:
    """Collects stepped TensorDicts of shape `batch_size` until they contain a whole batch.

    A row whose `"_idle"` is True was only reset and is not a frame, see `FrameIndex`. `version` is a number that is
    stored with the frames of a call.

    >>> from tensordict import TensorDict
    >>> queue = FrameQueue([2])
    >>> for number, idle in enumerate([[False, False], [True, False], [False, False]]):
    ...     idle = torch.tensor(idle).unsqueeze(1)
    ...     queue.add(TensorDict({"x": torch.full((2,), number), "_idle": idle, "next": {}}, [2]), version=number)
    >>> batch, versions = queue.take(queue.least)
    >>> batch["x"].tolist(), versions.tolist(), queue.least
    ([[0, 2], [0, 1]], [[0, 2], [0, 1]], 0)
    """

    def __init__(self, batch_size: Sequence[int]) -> None:
        self._batch_size = torch.Size(batch_size)
        self._steps: list[TensorDictBase] = []
        self._versions: list[int] = []
        self._index: FrameIndex | None = None

    @property
    def least(self) -> int:
        """The number of waiting frames that every environment has."""
        return len(self._steps) if self._index is None else int(self._index.waiting.min())

    @property
    def waiting(self) -> Array:
        """The number of waiting frames of each environment, int64 `[environments]`."""
        return np.full(self._batch_size.numel(), self.least) if self._index is None else self._index.waiting

    def add(self, td: TensorDictBase, version: int = 0) -> None:
        """Adds the result of one call of `step`."""
        idle = td.get(IDLE, None)
        if idle is not None:
            td = td.exclude(IDLE, ("next", IDLE))
            if self._index is None:
                self._index = FrameIndex(self._batch_size.numel())
            self._index.add(idle.reshape(-1).cpu().numpy())
            self._index.count()
        self._steps.append(td)
        self._versions.append(version)

    def cut(self, lost: Array) -> list[int]:
        """Marks the newest frames of environments whose episode broke off (bool `[environments]`) as truncated.

        Returns the environments whose newest frame a batch has taken.
        """
        taken = []
        for env in np.flatnonzero(lost).tolist():
            call = None if self._index is None else self._index.last_frame(env)
            if call is None:
                taken.append(env)
            else:
                mark_truncated(self._steps[call], tuple(np.unravel_index(env, self._batch_size)))
        return taken

    def take(self, steps: int) -> tuple[TensorDictBase, Array]:
        """The first `steps` frames of each environment, `[*batch_size, steps]`, and their versions `[envs, steps]`."""
        n, total = self._batch_size.numel(), len(self._steps)
        batch = stack_steps(self._steps, len(self._batch_size))
        versions = np.array(self._versions, np.int64)
        if self._index is None:
            calls, dropped = np.broadcast_to(np.arange(steps), (n, steps)), steps
        else:
            calls, dropped = self._index.take(steps)
        del self._steps[:dropped], self._versions[:dropped]
        if steps < total:
            rows = batch.reshape(n, total)[torch.arange(n, device="cpu")[:, None], torch.from_numpy(calls.copy())]
            batch = rows.reshape(*self._batch_size, steps)
        return batch, versions[calls]


Self = TypeVar("Self", bound="EnvBase")
_WRAP = "TorchRL's own transforms, collectors and batched environments take `env.to_torchrl()`"
#: The private names that TorchRL's classes read first from an environment.
_READ_BY_TORCHRL = (
    "_has_dynamic_specs",
    "_step_mdp",
    "_spec_locked",
    "_cache",
    "_inplace_update",
    "_complete_done",
)
SPEC_NAMES = ("observation_spec", "full_action_spec", "full_reward_spec", "full_done_spec", "state_spec")


def _unbatched(name: str) -> Any:
    """A property: a spec of one environment of the batch."""

    def of_one(env: EnvBase) -> Any:
        whole = getattr(env, name)
        return whole[(0,) * len(env.batch_size)] if len(env.batch_size) else whole

    return property(of_one, doc=f"`{name}` of one environment of the batch.")


@advised
class EnvBase(nn.Module, HasSpaces):
    """An environment, or a batch of environments, that reads and writes TensorDicts of shape `batch_size`.

    A subclass calls `__init__` with its specs (batch dimensions included) and implements `_reset`, `_step` and
    `_set_seed`. `reset` returns the entries of `observation_spec` and the flags `done`, `terminated`, `truncated` (bool
    `[*batch, 1]`, False); `step` reads `action` and adds `("next", ...)`: observations, `reward` (float32
    `[*batch, 1]`) and flags. Both raise ValueError, which names the key, if the subclass returns another shape or dtype
    than that of the spec.

    A subclass in TorchRL's form calls `__init__` without specs, by keyword only, and sets `observation_spec`,
    `action_spec`, `reward_spec`, `done_spec`, `state_spec` (or their `full_` forms, Composites with any keys) itself.
    Its `_reset(tensordict, **kwargs)` gets the caller's TensorDict or None, `"_reset"` included where only some rows
    are reset; its TensorDicts come to the environment's device, numbers and flags to the shapes of their specs. With
    `batch_locked = False` it steps TensorDicts of any batch size. Flags that are nested only are also at the root,
    True where any of them is.

    An environment is an `nn.Module`: modules and tensors that are its attributes are moved by `to` and seen by
    `parameters`, `state_dict`, `apply`, `train` and `eval`, as are those of environments and transforms in it. A closed
    one opens again at its next reset.

    >>> class Counter(EnvBase):
    ...     def __init__(self):
    ...         super().__init__(Composite(count=Unbounded((1,))), Categorical(2))
    ...     def _reset(self, mask):
    ...         return TensorDict({"count": torch.zeros(1)})
    ...     def _step(self, td):
    ...         count = td["count"] + td["action"]
    ...         return TensorDict({"count": count, "reward": torch.ones(1), "terminated": count >= 3})
    ...     def _set_seed(self, seed):
    ...         pass
    >>> Counter().rollout(2).shape
    torch.Size([2])
    """

    batch_locked = True  #: whether all TensorDicts must have the environment's batch size
    run_type_checks = True  #: shapes and dtypes are always compared with the specs
    is_spec_locked = False  #: specs may be changed at any time
    auto_complete_done_specs = True  #: `done`, `terminated` and `truncated` are always there
    reset_keys: Sequence[Key] = ("_reset",)  #: the keys of the masks of environments to reset

    def __init__(
        self,
        observation_spec: Composite | None = None,
        action_spec: Spec | None = None,
        *,
        batch_size: Sequence[int] | None = (),
        device: torch.device | str | None = None,
        run_type_checks: bool = False,
        allow_done_after_reset: bool = False,
        spec_locked: bool = True,
        auto_reset: bool = False,
    ) -> None:
        """`run_type_checks`, `allow_done_after_reset` and `spec_locked` have no effect: types are always checked.

        Raises:
            TypeError: `auto_reset=True`, or only one of the two specs.
        """
        if auto_reset:
            raise TypeError(
                "auto_reset=True is not supported: leave the reset to whoever sees `done` (rollout, collectors do), so "
                "that the last observation of an episode stays under 'next'"
            )
        if (observation_spec is None) != (action_spec is None):
            raise TypeError("give both observation_spec and action_spec, or none and set them afterwards")
        super().__init__()
        self.batch_size = torch.Size(batch_size or ())
        self.device = usable_device(device, "device")
        self._in_torchrl_form = observation_spec is None
        self._specs: dict[str, Composite] = {}
        blank = Composite(shape=self.batch_size, device=self.device)
        self.observation_spec = blank if observation_spec is None else observation_spec
        self.full_action_spec = blank
        if action_spec is not None:
            self.action_spec = action_spec
        self.state_spec = Composite(shape=self.batch_size, device=self.device)
        self.reward_spec = Unbounded((*self.batch_size, 1), device=self.device)
        self.done_spec = Categorical(2, (*self.batch_size, 1), device=self.device, dtype=torch.bool)
        self.is_closed = False

    # ---- specs ----
    def _take_specs(self, one: Any, *batch: int) -> None:
        """Takes the specs of another environment, or of a description of one, `batch` dimensions before its own."""
        self._in_torchrl_form = False
        for name in SPEC_NAMES:
            spec = getattr(one, name)
            self._specs[name] = spec.expand(*batch, *spec.shape)
        self._action_spec = one.action_spec.expand(*batch, *one.action_spec.shape)
        self._done_spec = one.done_spec.expand(*batch, *one.done_spec.shape)

    @property
    def observation_spec(self) -> Composite:
        """The specs of all entries that a reset returns besides flags."""
        return self._specs["observation_spec"]

    @observation_spec.setter
    def observation_spec(self, spec: Composite) -> None:
        self._specs["observation_spec"] = self._as_composite(spec, "observation")

    full_observation_spec = observation_spec

    @property
    def state_spec(self) -> Composite:
        """The specs of the entries that a step reads besides the action; empty where there are none."""
        return self._specs["state_spec"]

    @state_spec.setter
    def state_spec(self, spec: Composite) -> None:
        self._specs["state_spec"] = self._as_composite(spec, "state")

    full_state_spec = state_spec

    @property
    def full_action_spec(self) -> Composite:
        """The specs of all actions, with their keys."""
        return self._specs["full_action_spec"]

    @full_action_spec.setter
    def full_action_spec(self, spec: Composite) -> None:
        self._specs["full_action_spec"] = self._as_composite(spec, "action")
        self._action_spec = _only_leaf(self._specs["full_action_spec"])

    @property
    def action_spec(self) -> Any:
        """The spec of the action; a Composite where there are several."""
        return self._action_spec

    @action_spec.setter
    def action_spec(self, spec: Spec) -> None:
        is_several = isinstance(spec, Composite) and not self._in_torchrl_form
        if is_several:  # a Dict or Tuple space: all under "action"
            self._specs["full_action_spec"], self._action_spec = self._as_composite({"action": spec}, "action"), spec
        else:
            self.full_action_spec = spec  # type: ignore[assignment]

    @property
    def full_reward_spec(self) -> Composite:
        """The specs of all rewards, with their keys."""
        return self._specs["full_reward_spec"]

    @full_reward_spec.setter
    def full_reward_spec(self, spec: Composite) -> None:
        self._specs["full_reward_spec"] = self._as_composite(spec, "reward")

    @property
    def reward_spec(self) -> Any:
        """The spec of the reward; a Composite where there are several."""
        return _only_leaf(self._specs["full_reward_spec"])

    @reward_spec.setter
    def reward_spec(self, spec: Spec) -> None:
        self.full_reward_spec = spec  # type: ignore[assignment]

    @property
    def done_spec(self) -> Any:
        """The spec of each flag at the root."""
        return self._done_spec

    @done_spec.setter
    def done_spec(self, spec: Spec) -> None:
        flags = self._as_composite(spec, "done")
        leaves = flags.leaves()
        nested = {key: leaf for key, leaf in leaves.items() if len(key_path(key)) > 1}
        root: Any = next((leaf for key, leaf in leaves.items() if key not in nested), None)
        if root is None:
            root = Categorical(2, (*self.batch_size, 1), device=flags.device, dtype=torch.bool)
        self._done_spec = root
        whole = Composite(dict.fromkeys(FLAGS, root), shape=self.batch_size, device=flags.device)
        for key in _with_siblings(list(nested)):
            inner = next(leaf for path, leaf in nested.items() if key_path(path)[:-1] == key_path(key)[:-1])
            _set_nested(whole, flags, key, inner)
        self._specs["full_done_spec"] = whole

    @property
    def full_done_spec(self) -> Composite:
        """The specs of all flags: the three at the root, and three wherever there are nested ones."""
        return self._specs["full_done_spec"]

    @full_done_spec.setter
    def full_done_spec(self, spec: Composite) -> None:
        self.done_spec = spec

    def _as_composite(self, spec: Any, name: str) -> Composite:
        if isinstance(spec, Composite):
            return spec
        entries = spec if isinstance(spec, dict) else {name: spec}
        return Composite(entries, shape=self.batch_size, device=self.device)

    @property
    def output_spec(self) -> Composite:
        """`full_observation_spec`, `full_reward_spec` and `full_done_spec` in a Composite."""
        return self._grouped("full_observation_spec", "full_reward_spec", "full_done_spec")

    @property
    def input_spec(self) -> Composite:
        """`full_state_spec` and `full_action_spec` in a Composite."""
        return self._grouped("full_state_spec", "full_action_spec")

    @property
    def specs(self) -> Composite:
        """`output_spec` and `input_spec` in a Composite."""
        return self._grouped("output_spec", "input_spec")

    def _grouped(self, *names: str) -> Composite:
        specs = {name: getattr(self, name) for name in names}
        return Composite(specs, shape=self.batch_size, device=self.device)

    def encoded_spaces(self) -> EncodedSpaces:
        """The specs of observations and actions with their gymnasium spaces, for `write_minari`."""
        leaves = {**self.observation_spec.leaves(), **self.full_action_spec.leaves()}
        return EncodedSpaces({key_path(key): spec for key, spec in leaves.items()}, len(self.batch_size), {})

    action_spec_unbatched: Any = _unbatched("action_spec")
    full_action_spec_unbatched: Composite = _unbatched("full_action_spec")
    observation_spec_unbatched: Composite = _unbatched("observation_spec")
    full_observation_spec_unbatched: Composite = _unbatched("full_observation_spec")
    reward_spec_unbatched: Any = _unbatched("reward_spec")
    full_reward_spec_unbatched: Composite = _unbatched("full_reward_spec")
    done_spec_unbatched: Any = _unbatched("done_spec")
    full_done_spec_unbatched: Composite = _unbatched("full_done_spec")
    state_spec_unbatched: Composite = _unbatched("state_spec")
    full_state_spec_unbatched: Composite = _unbatched("full_state_spec")
    output_spec_unbatched: Composite = _unbatched("output_spec")
    input_spec_unbatched: Composite = _unbatched("input_spec")

    @property
    def observation_keys(self) -> list[Key]:
        """The keys of all observations; tuples for nested ones."""
        return list(self.observation_spec.leaves())

    @property
    def state_keys(self) -> list[Key]:
        """The keys of `state_spec`."""
        return list(self.state_spec.leaves())

    @property
    def action_keys(self) -> list[Key]:
        """The keys of all actions; tuples for nested ones."""
        return list(self.full_action_spec.leaves())

    @property
    def reward_keys(self) -> list[Key]:
        """The keys of all rewards; tuples for nested ones."""
        return list(self.full_reward_spec.leaves())

    @property
    def done_keys(self) -> list[Key]:
        """The keys of all flags; tuples for nested ones."""
        return list(self.full_done_spec.leaves())

    @property
    def action_key(self) -> Key:
        """The key of the first action."""
        return self.action_keys[0]

    @property
    def reward_key(self) -> Key:
        """The key of the first reward."""
        return self.reward_keys[0]

    @property
    def done_key(self) -> Key:
        """The key of the flag that says that an episode is over."""
        return "done"

    @property
    def shape(self) -> torch.Size:
        """`batch_size`."""
        return self.batch_size

    @property
    def ndim(self) -> int:
        """The number of batch dimensions."""
        return len(self.batch_size)

    @property
    def batch_dims(self) -> int:
        """The number of batch dimensions."""
        return len(self.batch_size)

    def ndimension(self) -> int:
        """The number of batch dimensions."""
        return len(self.batch_size)

    def numel(self) -> int:
        """The number of environments."""
        return self.batch_size.numel()

    def cardinality(self) -> int | float:
        """The number of different actions; infinite for a continuous one."""
        return self.full_action_spec.cardinality()

    # ---- what a subclass defines ----
    @abstractmethod
    def _reset(self, mask: Any) -> TensorDictBase:
        """Observations after a reset, of all environments or where `mask` (bool `[*batch, 1]`) holds.

        The other rows are not read. With a mask the environments go on to the next episodes; with None they start new
        ones at once, also in the middle of an episode. In TorchRL's form it gets `(tensordict, **kwargs)`.
        """

    @abstractmethod
    def _step(self, td: TensorDictBase) -> TensorDictBase:
        """Observations, reward, `terminated`, and `truncated` if the environment has time limits."""

    @abstractmethod
    def _set_seed(self, seed: int) -> None:
        """Seeds the random numbers from the next reset on."""

    def reset(
        self, tensordict: TensorDictBase | None = None, *, set_state: bool | None = None, **kwargs: Any
    ) -> TensorDictBase:
        """Starts episodes, everywhere or where `tensordict["_reset"]` (bool `[*batch, 1]`) is True; other rows stay.

        `set_state=True` requires an environment that reads its state from `tensordict`; False hides it from one.
        `kwargs` go to `_reset` of an environment in TorchRL's form; TypeError for others.
        """
        td = tensordict
        if set_state is not None:
            td = self._with_state(td, set_state)
        if self.is_closed:
            self.start()
            td = None if td is None else td.exclude("_reset")
        mask = None if td is None else td.get("_reset", None)
        if td is None or mask is None:
            return self._with_flags(self._reset_from(td, mask, kwargs))
        given = td
        if not has_methods_of_engram(self, "_reset"):  # a subclass may write into what it gets
            given = td.clone() if self._reads_state() else td.copy().set("_reset", mask.clone())
        fresh = self._with_flags(self._reset_from(given, given.get("_reset"), kwargs))
        return fresh if bool(mask.all()) else merge_where(mask, fresh, td)

    def _with_state(self, td: TensorDictBase | None, set_state: bool) -> TensorDictBase | None:
        """The part of the caller's TensorDict that a reset gets."""
        if set_state and (td is None or not self._reads_state()):
            raise NotImplementedError(
                f"set_state=True: the reset of a {type(self).__name__} reads no state from a TensorDict; "
                "set_seed(...) repeats an episode, and actions=... its steps"
            )
        if set_state or td is None or not self._reads_state():
            return td
        return td.select("_reset", strict=False)

    def _reset_from(self, td: TensorDictBase | None, mask: Tensor | None, kwargs: dict[str, Any]) -> TensorDictBase:
        """The result of a reset, of all or where `mask` is True, before missing flags are added."""
        if self._in_torchrl_form:
            return self._in_form(self._reset(td, **kwargs))
        if kwargs:
            raise TypeError(f"reset of a {type(self).__name__} takes no {list(kwargs)}")
        return self._own_result(self._reset(mask))

    def _own_result(self, td: TensorDictBase) -> TensorDictBase:
        """What `_step` or `_reset` returned, in tensors that a subclass does not write into later."""
        return td if has_methods_of_engram(self, "_step", "_reset") else td.clone()

    @property
    def _supports_set_state(self) -> bool:
        """Whether `reset(td, set_state=True)` reads a state; a name by which users of TorchRL ask.

        Raises:
            TypeError: TorchRL's batched environments ask. They would step this one past `step`, which makes `done`.
        """
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torchrl."):
            raise TypeError(f"TorchRL reads '_supports_set_state' of a {type(self).__name__} of engram: {_WRAP}")
        return self._reads_state()

    def _reads_state(self) -> bool:
        """Whether resets and steps read more of the caller's TensorDict than the action and the mask of resets."""
        return self._in_torchrl_form

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Takes the actions in `tensordict` and puts the results under `"next"` there. KeyError without an action."""
        self._check_open()
        td = tensordict
        self._require_action(td)
        hidden = td.get("next", None)  # a recurrent policy writes its next hidden state there
        following = self._with_flags(self._step_from(td))
        return td.set("next", self._with_policy_entries(td, hidden, following))

    #: The entries of the state that a policy changes, in an environment that begins episodes with them.
    policy_entries: tuple[Key, ...] = ()

    def _with_policy_entries(
        self, td: TensorDictBase, hidden: TensorDictBase | None, following: TensorDictBase
    ) -> TensorDictBase:
        """The entries under `"next"`: the result of a step, and what the policy wrote there, such as its hidden state.

        Only the result's entries `policy_entries` are replaced by the policy's; if it wrote none, they do not change.
        """
        following = following if hidden is None else hidden.copy().update(following)
        for key in self.policy_entries:
            value = None if hidden is None else hidden.get(key, None)
            if value is None and (before := td.get(key, None)) is not None:
                value = before.clone()
            if value is not None:
                following.set(key, value)
        return following

    def call_below(self, path: str) -> Any:
        """Calls a gymnasium environment's method by its dotted path, such as `"unwrapped.ale.lives"`.

        Returns a list for several environments (SerialEnv). Raises AttributeError if there is none.
        """
        raise AttributeError(f"a {type(self).__name__} has no gymnasium environment to ask for {path!r}")

    def _step_from(self, td: TensorDictBase) -> TensorDictBase:
        if not self._in_torchrl_form:
            return self._own_result(self._step(td))
        for key, spec in self.full_action_spec.leaves().items():
            if isinstance(spec, Stacked):
                _check_value(key, _entry_of(td, key, spec), spec, self._extra_batch(td), who="the policy")
            elif td.get(key).shape != (*self._extra_batch(td), *spec.shape):
                raise ValueError(
                    f"{key!r} is not what the environment takes.\n"
                    f"  found:   {td.get(key).dtype} {tuple(td.get(key).shape)}\n"
                    f"  allowed: {spec.dtype} {(*self._extra_batch(td), *spec.shape)}"
                )
        return self._in_form(self._step(td))

    def _require_action(self, td: TensorDictBase) -> None:
        for key in written_actions(self):
            if _entry_of(td, key, self.full_action_spec.get(key)) is None:
                raise KeyError(
                    f"step needs an {key!r}, got keys {list(td.keys())}; use rand_step, or call a policy first"
                )

    def _in_form(self, td: TensorDictBase) -> TensorDictBase:
        """The result of an environment in TorchRL's form, on its device, rewards and flags in their specs' shapes."""
        td = _with_entries(td, _clone, without="_reset")  # it may keep its state in these tensors
        extra = self._extra_batch(td)
        for key, spec in (*self.full_reward_spec.leaves().items(), *self.full_done_spec.leaves().items()):
            value = _entry_of(td, key, spec)
            shape = (*extra, *spec.shape)
            if isinstance(value, Tensor) and value.shape != shape and value.numel() == math.prod(shape):
                td.set(key, value.reshape(shape))
        for prefix in sorted({key_path(key)[:-1] for key in self.done_keys}, key=len, reverse=True):
            self._complete_flags(td, prefix, extra)
        if td.device != self.device:
            td = td.clear_device_() if self.device is None else td.to(self.device)
        return td

    def _complete_flags(self, td: TensorDictBase, prefix: tuple[str, ...], extra: Sequence[int]) -> None:
        """Sets the flags below `prefix` that are missing; at the root, where none is given, True where a nested is."""
        names: list[Key] = [(*prefix, flag) if prefix else flag for flag in FLAGS]
        done, terminated, truncated = (td.get(name, None) for name in names)
        if done is None and terminated is None and truncated is None:
            inner = {key for key in self.done_keys if len(key_path(key)) > 1}
            if not prefix and not inner:
                return  # `_with_flags` makes them
            for name, flag in zip(names, FLAGS, strict=True):
                nested = [td.get(key) for key in inner if key_path(key)[-1] == flag] if not prefix else []
                flat = [part.reshape(*td.batch_size, -1).any(-1, keepdim=True) for part in nested]
                td.set(name, torch.cat(flat, -1).any(-1, keepdim=True) if flat else self._no_flag(name, extra))
            return
        if terminated is None:
            terminated = self._no_flag(names[1], extra) if done is None else done
            terminated = terminated if truncated is None else terminated & ~truncated
        if truncated is None:
            truncated = self._no_flag(names[2], extra) if done is None else done & ~terminated
        for name, value in zip(names, (terminated | truncated, terminated, truncated), strict=True):
            td.set(name, value)

    def _no_flag(self, key: Key, extra: Sequence[int]) -> Tensor:
        zero: Tensor = self.full_done_spec[key].zero(extra)
        return zero

    def _with_flags(self, td: TensorDictBase) -> TensorDictBase:
        """The result of `_reset` or `_step` with all flags. Raises ValueError for values that do not match specs."""
        self._check_values(td)
        done = td.get("done", None)
        if done is not None and td.get("terminated", None) is None:
            td.set("terminated", done)  # an environment may report only that an episode is over
        for key in ("terminated", "truncated"):
            if td.get(key, None) is None:
                td.set(key, self.done_spec.zero(self._extra_batch(td)))
        return td.set("done", td.get("terminated") | td.get("truncated"))

    def _extra_batch(self, td: TensorDictBase) -> torch.Size:
        """The batch dimensions of `td` before those of the environment, if it is not locked to its batch size."""
        return torch.Size(() if self.batch_locked else td.batch_size[: td.ndim - len(self.batch_size)])

    def _check_values(self, td: TensorDictBase) -> None:
        """Raises ValueError if an observation is missing, or an entry has another shape or dtype than its spec."""
        extra = self._extra_batch(td)
        _check_entries((), td, self.observation_spec, extra)
        for key, spec in (*self.full_done_spec.leaves().items(), *self.full_reward_spec.leaves().items()):
            value = _entry_of(td, key, spec)
            if value is not None:
                _check_value(key, value, spec, extra)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """`step`, and the root of the next step, reset where the episode is over; `next` keeps the last observation."""
        stepped = self.step(tensordict)
        return stepped, self.maybe_reset(self.step_mdp(stepped))

    def step_mdp(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """The root of the next step from a stepped TensorDict, with this environment's keys."""
        return step_mdp_of(self)(next_tensordict)

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """`tensordict`, reset where its `done` is True."""
        done = tensordict.get("done")
        return reset_where(self, tensordict, done) if bool(done.any()) else tensordict

    def any_done(self, tensordict: TensorDictBase) -> bool:
        """Whether an episode is over in any environment, by the flag `done` at the root."""
        return bool(tensordict.get("done").any())

    def vector_engine(self) -> VectorEngine | None:
        """The engine that steps the whole batch with raw values, for collectors; None if there is none."""
        return None

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """`tensordict` with a random `action`, drawn from torch's global generator."""
        td = TensorDict(batch_size=self.batch_size, device=self.device) if tensordict is None else tensordict
        drawn = self.full_action_spec.rand(self._extra_batch(td))
        is_usual = list(drawn.keys()) == ["action"]
        return td.set("action", drawn.get("action")) if is_usual else td.update(drawn)

    def rand_step(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """A step with a random action."""
        return self.step(self.rand_action(tensordict))

    def rollout(
        self,
        max_steps: int,
        policy: Any = None,
        callback: Callable[[Any, TensorDictBase], Any] | None = None,
        *,
        actions: Iterable[Any] | None = None,
        auto_reset: bool = True,
        auto_cast_to_device: bool = False,
        break_when_any_done: bool | None = None,
        break_when_all_done: bool | None = None,
        return_contiguous: bool | None = True,
        tensordict: TensorDictBase | None = None,
        set_truncated: bool = False,
        out: TensorDictBase | None = None,
        trust_policy: bool = False,
        storing_device: torch.device | str | None = None,
        set_state: bool | None = None,
    ) -> TensorDictBase:
        """Up to `max_steps` steps as one batch `[*batch_size, T]`, from a fresh reset or from `tensordict`.

        Ends after the first step that is done in any environment (with `break_when_all_done`: in all), or
        (`break_when_any_done=False`) resets those that are done and continues. Rows that only reset (`"_idle"`, see
        `VectorEnv`) are not steps: the rollout continues until every environment has its steps, and drops what others
        have beyond. The batch is contiguous, whatever `return_contiguous` says.

        Args:
            max_steps: the number of steps, 1 or more.
            policy: anything that a collector takes.
            callback: `callback(env, td)` is called between two steps: one time less than there are steps. `td` is the
                root of the next step, which may be changed, with the action that was taken; of a rollout that resets,
                the step that was made.
            actions: the actions to take instead of a policy's, one a step: tensors, arrays, numbers or TensorDicts. The
                rollout ends with the last one.
            auto_reset: False: the first root is `tensordict`, which otherwise goes to the reset.
            auto_cast_to_device: the policy, an `nn.Module`, gets its input on the device of its parameters.
            set_truncated: marks the last step of the batch `truncated` and `done` where it is not terminated.
            out: a TensorDict `[*batch_size, T]` that the batch is written into and that is returned.
            trust_policy: the policy takes TensorDicts, whatever the names of its parameters.
            storing_device: the device of the batch; None: that of the steps.
            set_state: True: the reset must read its state from `tensordict`; False: it does not get it.

        Raises:
            ValueError: fewer than one step; `actions` beside a policy, or none; `out` of another shape.
            NotImplementedError: `set_state=True`, and the environment's reset reads no state.

        >>> from engram.envs import GymEnv
        >>> env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        >>> env.rollout(10, actions=[0, 1, 1])["action"]
        tensor([0, 1, 1])
        """
        max_steps = count(max_steps, "max_steps")
        if not auto_reset and tensordict is None:
            raise ValueError("auto_reset=False needs the state to start from: pass tensordict=env.reset()")
        if actions is not None:
            policy = RecordedActions(actions, max_steps, self, policy)
            max_steps, trust_policy = len(policy), True
        if break_when_any_done is None:
            break_when_any_done = not break_when_all_done
        if auto_reset and tensordict is None:
            require_first_marks(policy, self)
        act = as_policy(policy, self, trusted=trust_policy)
        if auto_cast_to_device:
            act = on_device_of(policy, act)
        begins_here = tensordict is not None and not auto_reset
        state = {} if set_state is None else {"set_state": set_state}
        td = tensordict if begins_here else self.reset(tensordict, **state)
        assert td is not None
        frames, following, given = FrameQueue(td.batch_size), step_mdp_of(self), given_entries(self)
        have_ended, ended = torch.zeros((), dtype=torch.bool, device="cpu"), None
        while True:
            record = StepRecord(td, given)
            acted = act(record.shown)
            record.add_outputs(acted)
            stepped = record.of(self.step(acted), is_own=returns_own_tensors(self))
            frames.add(stepped if storing_device is None else stepped.to(storing_device))
            lost = lost_episodes(stepped, ended)
            ended = stepped.get(("next", "done"))
            if lost is not None:
                begun = lost & (frames.waiting > 0)
                frames.cut(lost)
                if break_when_any_done and not break_when_all_done and begun.any():
                    max_steps = min(max_steps, int(frames.waiting[begun].min()))
            if break_when_all_done:
                have_ended = have_ended | ended
                if bool(have_ended.all()):
                    max_steps = min(max_steps, int(frames.waiting.max()))  # one that lost an episode has fewer
            elif break_when_any_done:
                max_steps = min(max_steps, _frames_of_ended(stepped, frames, default=max_steps))
            if frames.least >= max_steps:
                batch = with_time_named(frames.take(max_steps)[0])
                batch = _with_last_truncated(batch) if set_truncated else batch
                return batch if out is None else _written_into(out, batch)
            td = following(stepped)
            if callback is not None and (break_when_any_done or break_when_all_done):
                td = td.update(stepped.select(*self.action_keys, strict=False))
                td = td.clone()  # the callback may change it, and it has tensors of the batch
                callback(self, td)
                td = td.exclude(*self.action_keys)  # so that a policy that writes no action is still an error
            elif callback is not None:
                callback(self, stepped.clone())
            if not break_when_all_done:
                td = self.maybe_reset(td)

    def check_env_specs(
        self,
        return_contiguous: bool | None = None,
        check_dtype: bool = True,
        seed: int | None = None,
        tensordict: TensorDictBase | None = None,
        break_when_any_done: Any = None,
        *,
        max_steps: int = 5,
    ) -> None:
        """Compares every value of some random steps with its spec: see `engram.envs.utils.check_env_specs`."""
        compare_with_specs(self, seed, tensordict, max_steps)

    def fake_tensordict(self) -> TensorDictBase:
        """A stepped TensorDict of zeros, with the keys, shapes and dtypes that real steps have."""
        state = self.observation_spec.zero().update(self.full_done_spec.zero())
        following = state.clone().update(self.full_reward_spec.zero())
        state = self.state_spec.zero().update(state)
        return state.update(self.full_action_spec.zero()).set("next", following)

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seeds the environments from the next reset on; returns the first seed that none of them uses.

        Without a seed nothing happens, and None is returned. With `static_seed` all environments of a batch get the
        same `seed`, which is returned; a custom batch passes it to its `_set_seed`.
        Raises ValueError, and changes nothing, if the environments of a batch share one random generator.
        """
        if seed is None:
            return None
        if static_seed:
            self._set_same_seed(seed)
            return seed
        self._set_seed(seed)
        return seed + self.batch_size.numel()

    def _set_same_seed(self, seed: int) -> None:
        """Gives all environments of a batch this seed."""
        self._set_seed(seed)

    def random_state(self) -> Any:
        """The state of the environments' random generators, for `set_random_state`; None if it cannot be read."""
        return None

    def set_random_state(self, state: Any) -> None:
        """Sets the random generators to a `random_state`: after a reset of all environments, the same episodes follow.

        Raises ValueError for a state of another environment, and changes nothing.
        """
        raise ValueError(f"{type(self).__name__} has no random state")

    def to(self: Self, device: torch.device | str) -> Self:  # type: ignore[override]
        """Moves specs, modules and all further outputs to `device`; returns the environment itself."""
        self.device = usable_device(device, "device")
        assert self.device is not None
        super().to(self.device)  # moves parameters and submodules
        for name, spec in self._specs.items():
            self._specs[name] = spec.to(self.device)
        self._action_spec, self._done_spec = self._action_spec.to(self.device), self._done_spec.to(self.device)
        return self

    def cpu(self: Self) -> Self:
        """`to("cpu")`."""
        return self.to("cpu")

    def cuda(self: Self, device: torch.device | int | None = None) -> Self:
        """`to` a CUDA device, the current one by default."""
        return self.to("cuda" if device is None else torch.device(device))

    def add_truncated_keys(self: Self) -> Self:
        """Returns the environment unchanged: it has `truncated` wherever it has `done`."""
        return self

    def set_spec_lock_(self: Self, mode: bool = True) -> Self:
        """Returns the environment unchanged: its specs are never locked."""
        return self

    def to_torchrl(self) -> Any:
        """This environment for TorchRL's own transforms, collectors and batched environments.

        `TransformedEnv(env.to_torchrl(), ...)`; the object steps this environment. Raises ImportError unless torchrl is
        imported, TypeError if some rows of a batch may not be steps.
        """
        return as_torchrl_env(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises TypeError: an environment is neither a function that creates one nor a TorchRL module."""
        raise TypeError(
            f"a {type(self).__name__} cannot be called: give `lambda: env` where a function is needed; {_WRAP}"
        )

    def __getattr__(self, name: str) -> Any:
        if name in _READ_BY_TORCHRL:
            raise TypeError(f"TorchRL reads {name!r}, which a {type(self).__name__} of engram does not have: {_WRAP}")
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise absent_member(type(self), name) from None

    def append_transform(self, transform: Any) -> Any:
        """This environment behind `transform`: a `TransformedEnv`."""
        return PROVIDERS["transformed_env"]()(self, transform)

    def close(self, *, raise_if_closed: bool = False) -> None:
        """Releases the environment's resources, until the next reset or `start`.

        A second call does nothing, or raises RuntimeError with `raise_if_closed`.
        """
        if raise_if_closed:
            self._check_open()
        if not self.is_closed:
            self.is_closed = True
            self._close()

    def _close(self) -> None:
        """Releases the resources of a subclass."""

    def start(self) -> None:
        """Opens the environment if it was closed, as a reset does."""
        if self.is_closed:
            self._open()
            self.is_closed = False

    def _open(self) -> None:
        """Reacquires the resources of a subclass after `_close`."""

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError(f"this {type(self).__name__} was closed; reset it first, which opens it again")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch_size={tuple(self.batch_size)}, device={self.device})"


def lost_episodes(td: TensorDictBase, ended: Tensor | None) -> Array | None:
    """The environments that a step only reset in the middle of an episode, bool `[environments]`; None if none.

    `ended` is `("next", "done")` of the step before; None if all episodes began with this step.
    """
    idle = td.get(IDLE, None)
    if idle is None or ended is None or not bool(idle.any()):
        return None
    lost: Array = (idle.reshape(-1) & ~ended.reshape(idle.numel(), -1).any(1)).cpu().numpy()
    return lost if lost.any() else None


def _with_last_truncated(batch: TensorDictBase) -> TensorDictBase:
    """`batch` `[*batch, T]` with its last step truncated and done where it is not terminated."""
    following = batch.get("next")
    truncated, done = following.get("truncated").clone(), following.get("done").clone()
    last = (*(slice(None),) * (batch.ndim - 1), -1)
    truncated[last] |= ~following.get("terminated")[last]
    done[last] = True
    following.set("truncated", truncated).set("done", done)
    return batch


def _written_into(out: TensorDictBase, batch: TensorDictBase) -> TensorDictBase:
    """`out` with the entries of `batch`. Raises ValueError if the shapes differ."""
    if out.batch_size != batch.batch_size:
        raise ValueError(
            f"out has the shape {tuple(out.batch_size)}, and the rollout {tuple(batch.batch_size)}: it ends early "
            "where an episode does, unless break_when_any_done=False"
        )
    return out.update(batch, inplace=True)


def _frames_of_ended(td: TensorDictBase, frames: FrameQueue, *, default: int) -> int:
    """The fewest frames of an environment whose episode ends with the stepped `td`; `default` where none ends."""
    done = td.get(("next", "done"))
    if not bool(done.any()):
        return default
    idle, ends = td.get(IDLE, None), done.reshape(len(frames.waiting), -1).any(1)
    if idle is not None:
        ends = ends & ~idle.reshape(-1)
    return min(frames.waiting[ends.cpu().numpy()].tolist(), default=default)


def _only_leaf(spec: Composite) -> Any:
    """The single leaf of a Composite, or the Composite itself."""
    leaves = list(spec.leaves().values())
    return leaves[0] if len(leaves) == 1 else spec


def _set_nested(spec: Composite, like: Composite, key: Key, leaf: Spec) -> None:
    """Sets a nested leaf; Composites on the way get the shapes that they have in `like`."""
    *parents, _ = key_path(key)
    for depth in range(1, len(parents) + 1):
        above = tuple(parents[:depth])
        if above not in spec:
            spec[above] = like[above].empty()
    spec[key] = leaf


def _entry_of(td: TensorDictBase, key: Key, spec: Any) -> Any:
    """The value of a leaf's key in a TensorDict, or None; for agents with different shapes, a list of their values."""
    return td.get(key, None, as_list=True) if isinstance(spec, Stacked) else td.get(key, None)


def _check_entries(path: tuple[Any, ...], td: TensorDictBase, spec: Composite, extra: Sequence[int]) -> None:
    """`_check_value` of each leaf of a Composite; of a stack of different ones, each member's by its number."""
    if isinstance(spec, StackedComposite):
        parts = spec.parts_of(td)
        if parts is None:
            raise ValueError(
                f"the environment gave {path!r} with the batch size {tuple(td.batch_size)}, and its spec is a stack "
                f"of {len(spec.specs)}, of shape {tuple(spec.shape)}; correct the environment or its spec"
            )
        for i, (member, part) in enumerate(zip(spec.specs, parts, strict=True)):
            _check_entries((*path, i), part, member, extra)
        return
    for name, entry in spec.items():
        if not isinstance(entry, Composite):
            if entry is not None:
                _check_value((*path, name) if path else name, td.get(name, None), entry, extra)
            continue
        nested = td.get(name, None)
        if isinstance(nested, TensorDictBase):
            _check_entries((*path, name), nested, entry, extra)
        elif not entry.is_empty():
            _check_value((*path, name), nested, next(iter(entry.leaves().values()), entry), extra)


def _check_value(key: Any, value: Any, spec: Any, extra: Sequence[int] = (), *, who: str = "the environment") -> None:
    """Raises ValueError if a value has another shape or dtype than its spec, after batch dimensions `extra`."""
    if isinstance(spec, Stacked):
        values = list(value) if isinstance(value, list | tuple) else [value]
        if len(values) == 1 and isinstance(value, Tensor) and value.ndim == len(extra) + spec.ndim:
            values = list(value.unbind(len(extra) + spec.dim))
        if len(values) == len(spec.specs):
            for i, (one, member) in enumerate(zip(values, spec.specs, strict=True)):
                _check_value((*key_path(key), i), one, member, extra, who=who)
            return
    if isinstance(value, Tensor) and value.shape == (*extra, *spec.shape) and value.dtype == spec.dtype:
        return
    kind = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
    raise ValueError(
        f"{who} gave {key!r} as {kind}, and its spec says {spec.dtype} {tuple(spec.shape)}; correct {who} or the spec"
    )
