"""`TransformedEnv`: an environment behind transforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram import _forms as forms
from engram._advice import advised
from engram._copies import PartlyCopied
from engram.envs.base import EnvBase, own_next, own_reset, steps_as
from engram.envs.from_torchrl import as_env
from engram.errors import CheckpointMisfitError
from engram.pytree import Key
from engram.specs import Spec
from engram.specs.spaces import EncodedSpaces
from engram.transforms import Compose, Transform
from engram.transforms.adapters import as_transform
from engram.transforms.env_specs import FLAGS, EnvSpecs
from engram.transforms.roles import Role, warn_if_idle

Self = TypeVar("Self", bound="TransformedEnv")


@advised
class TransformedEnv(PartlyCopied, EnvBase):
    """An environment whose observations, rewards and actions go through a transform, a list of them, or a callable.

    Transforms change the root that a reset returns and the `"next"` that a step returns, in order; the action goes
    through their `inv` in reverse order. The specs are those of the transformed values. A callable gets these
    TensorDicts, without the reward at resets, and returns one.

    Transforms along time (`CatFrames`, `RewardSum`, `StepCounter`, `InitTracker`) restart exactly where an
    environment is reset; this object has its own copies, which `transform` returns. All others are the caller's
    objects, so that a `VecNorm` may be shared. An entry that is computed from rewards only is zero at resets.

    Keys are those of the root: `"observation"`, `"reward"`. A base environment that reads its state from the TensorDict
    reads the caller's: there, use `out_keys` that leave the state's entries unchanged. The base environment may be one
    of TorchRL's, and so may transforms.

    `device` is the device of all outputs, and of the base environment; None keeps the base environment's. Attributes of
    the base environment are accessible. `auto_unwrap` and `cache_specs` have no effect: nested ones are not flattened.

    Raises TypeError and ValueError for transforms that only work in buffers, or that remove rewards, flags or the
    action; KeyError for keys that the environment does not have.

    >>> from engram.envs import GymEnv
    >>> from engram.envs.transforms import RewardSum, StepCounter
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(max_steps=3), RewardSum()))
    >>> env.rollout(10)["next", "episode_reward"].flatten()
    tensor([1., 2., 3.])
    """

    _base: EnvBase
    _parents: dict[int, EnvBase]  # the environments before the transforms, by the transform's position
    _copied_as: ClassVar[Mapping[str, Any]] = {"_parents": None}

    def __init__(self, base_env: Any, transform: Any = None, *, device: Any = None) -> None:
        base_env = as_env(base_env, "TransformedEnv")
        super().__init__(batch_size=base_env.batch_size, device=base_env.device)
        vars(self)["_base"] = base_env  # the lookup of the module `base_env` is too slow for each step
        self._take_specs(base_env)
        self.batch_locked = base_env.batch_locked
        self._parts: list[Transform] = []
        self._replace_all(transform)
        if device is not None:
            self.to(device)

    # ---- transforms ----
    @property
    def base_env(self) -> EnvBase:
        """The environment below the transforms."""
        return self._base

    @property
    def transform(self) -> Transform:
        """The transform, or a flat `Compose` of all of them, as this environment uses them."""
        return self._parts[0] if self._is_single else Compose(*self._parts)

    @transform.setter
    def transform(self, transform: Any) -> None:
        self._replace_all(transform)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("base_env", "transform"):
            object.__setattr__(self, name, value)  # nn.Module's `__setattr__` would bypass the property
        else:
            super().__setattr__(name, value)

    def _replace_all(self, transform: Any) -> None:
        """Uses these transforms only."""
        given = _as_list(transform)
        is_single = len(given) == 1 and given[0].parts() == given
        self._attach([part for one in given for part in one.parts()], 0, is_single=is_single)

    def append_transform(self: Self, transform: Any) -> Self:
        """Adds a transform at the end; one along time starts at the next reset. Returns the environment itself."""
        self.insert_transform(len(self._parts), transform)
        return self

    def insert_transform(self, index: int, transform: Any) -> None:
        """Adds a transform before the one at `index`. Raises IndexError if the index is out of range."""
        n = len(self._parts)
        if not -n <= index <= n:
            raise IndexError(f"there are {n} transforms; index must be -{n} to {n}, got {index}")
        at = index + n if index < 0 else index
        new = [part for one in _as_list(transform) for part in one.parts()]
        self._attach([*self._parts[:at], *new, *self._parts[at:]], at)

    def _attach(self, parts: list[Transform], n_attached: int, *, is_single: bool = False) -> None:
        """Sets the transforms; the first `n_attached` of them are already attached."""
        before, specs = self._parts, self._base_specs()
        self._parts = []  # the attached ones, for the `parent` of the next one
        self._parents = {}
        try:
            for i, part in enumerate(parts):
                own = part if i < n_attached else part.for_env(specs)
                self._parts = [*self._parts, own]
                own.set_container(self)
                specs = own.transform_specs(specs)
                if i >= n_attached:
                    warn_if_idle(own, Role.ENVIRONMENT, "in an environment")
        except BaseException:
            self._parts = before
            raise
        self._is_single = is_single
        self._update_specs()

    def before_transform(self, transform: Transform) -> EnvBase:
        """The base environment with the transforms before `transform`, which is its `parent`."""
        n = next(i for i, part in enumerate(self._parts) if part is transform)
        if n == 0:
            return self._base
        if n not in self._parents:
            parent = object.__new__(type(self))  # copy.copy would attach the transforms to the copy
            own = {"_parts": self._parts[:n], "_is_single": False, "_parents": {}, "_modules": {}}
            vars(parent).update(vars(self), **own, _specs=dict(self._specs))
            parent._update_specs()
            self._parents[n] = parent
        return self._parents[n]

    def _complete_copy(self) -> None:
        self._parents = {}
        for part in self._parts:
            part.set_container(self)

    def _base_specs(self) -> EnvSpecs:
        base = self._base
        flags: dict[Key, Spec] = {
            key: spec for key, spec in base.full_done_spec.leaves().items() if isinstance(key, tuple)
        }
        specs = (base.observation_spec, base.action_spec, base.full_reward_spec, base.done_spec)
        return EnvSpecs(*specs, flags, tuple(base.action_keys))

    def _update_specs(self) -> None:
        self._take_specs(self._base)
        specs = self._base_specs()
        self._modules["base_env"], self._modules["transform"] = self._base, self.transform
        self._parents = {}  # their specs have changed
        own = [key for part in self._parts for key in part.policy_entries()]
        self.policy_entries = (*self._base.policy_entries, *own)
        self._resets: list[tuple[Any, dict[Any, Any]]] = []  # transforms with the entries that they add at resets
        self._steps: list[Any] = []
        self._invs: list[Any] = []
        for part in self._parts:
            before, specs = specs.observation.leaves(), part.transform_specs(specs)
            added = {key: spec for key, spec in specs.observation.leaves().items() if key not in before}
            for calls in [calls.guarded() for calls in part.env_steps()]:
                self._resets.append((calls.reset, added))
                self._steps.append(calls.step)
                if calls.inv is not None:
                    self._invs.insert(0, calls.inv)
        self.observation_spec = specs.observation
        base = self._base
        if specs.action is not base.action_spec:  # specs with several keys do not change
            self.action_spec = specs.action
        if specs.rewards is not base.full_reward_spec:
            self.full_reward_spec = specs.rewards
        if specs.done is not base.done_spec:
            self.done_spec = specs.done

    def encoded_spaces(self) -> EncodedSpaces:
        own, below = super().encoded_spaces(), self._base.encoded_spaces()
        same = {path: one for path, one in below.spaces.items() if own.specs.get(path) == below.specs.get(path)}
        return own._replace(spaces=same)

    # ---- episodes ----
    def random_state(self) -> Any:
        return self._base.random_state()

    def set_random_state(self, state: Any) -> None:
        self._base.set_random_state(state)

    def _reset_from(self, td: TensorDictBase | None, mask: Tensor | None, kwargs: dict[str, Any]) -> TensorDictBase:
        if td is None or not self._reads_state():
            return super()._reset_from(td, mask, kwargs)
        fresh = own_reset(self._base, td, **kwargs).exclude("_reset")
        blank = TensorDict(batch_size=fresh.batch_size, device=self.device)
        return self._after_reset(blank if mask is None else blank.set("_reset", mask), fresh)

    def _reads_state(self) -> bool:
        return self._base._reads_state()

    def _reset(self, mask: Tensor | None) -> TensorDictBase:
        td = TensorDict(batch_size=self.batch_size, device=self.device)
        if mask is None:
            fresh = own_reset(self._base)
        else:
            # Rows without a reset are zeros: the base must not get the caller's transformed values.
            blank = self._base.observation_spec.zero().update(self._base.full_done_spec.zero())
            fresh = own_reset(self._base, blank.set("_reset", mask))
            fresh.pop("_reset", None)
            td.set("_reset", mask)
        return self._after_reset(td, fresh)

    def _after_reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        """The base environment's reset `result` after the transforms; `td` has the mask of resets."""
        for reset, added in self._resets:
            fresh = reset(td, fresh)
            for key, spec in added.items():
                if fresh.get(key, None) is None:
                    fresh.set(key, spec.zero(self._extra_batch(fresh)))
        return fresh

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._check_open()
        td = tensordict
        self._require_action(td)
        # A recurrent policy writes its next hidden state under "next": transforms do not see it.
        hidden = td.get("next", None)
        following = self._with_flags(self._own_result(self._step(td if hidden is None else td.exclude("next"))))
        return td.set("next", self._with_policy_entries(td, hidden, following))

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        inner = td
        if self._invs:
            inner = td.exclude("next")
            for inv in self._invs:
                inner = inv(inner)
        following = own_next(self._base, inner)
        for step in self._steps:
            following = step(td, following)
        return following

    def _with_flags(self, td: TensorDictBase) -> TensorDictBase:
        if not self._parts:
            return td
        terminated, truncated = td.get("terminated", None), td.get("truncated", None)
        if terminated is None or truncated is None:
            raise KeyError(f"a transform removed flags: the keys are {list(td.keys())}, and {FLAGS} must stay")
        return td.set("done", terminated | truncated)

    def call_below(self, path: str) -> Any:
        return self._base.call_below(path)

    def engines(self) -> None:
        """None: raw steps of the base environment would skip the transforms."""

    def vector_engine(self) -> None:
        """None, as for `engines`."""

    def deferrable_transforms(self) -> list[Transform] | None:
        """The transforms, for collectors that step `base_env` and then transform whole batches.

        None if a subclass has changed steps.
        """
        return list(self._parts) if steps_as(self, TransformedEnv) else None

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        return self._base.set_seed(seed, static_seed)

    def _set_seed(self, seed: int) -> None:
        self._base.set_seed(seed)

    def to(self: Self, device: torch.device | str) -> Self:  # type: ignore[override]
        self._base.to(device)
        for part in self._parts:
            part.to(device)
        self.device = self._base.device
        self._update_specs()
        return self

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Applies torch's changes of parameters and buffers, such as `double()`, which may change the specs."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._update_specs()
        return self

    def _open(self) -> None:
        self._base.start()

    def _close(self) -> None:
        self._base.close()
        for part in self._parts:
            part.close()

    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The state of all transforms of this environment and its base, without the state of running episodes.

        The other arguments are torch's, for modules that contain this environment.
        """
        if destination is not None:
            return super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        state = Compose(*self._parts).state_dict()
        below = dict(self._base.state_dict())
        return {**state, "base_env": below} if below else state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Continues from a saved state.

        Raises CheckpointMisfitError (a ValueError), which lists every difference, if it is that of other transforms, or
        no such state; nothing is changed then. `strict` and `assign` are torch's, and have no effect.
        """
        try:
            forms.check(_STATE, state_dict, "the state of a TransformedEnv")
            state = dict(state_dict)
            differences = self.differences(state)
        except ValueError as error:
            differences = [str(error)]
        if differences:
            raise CheckpointMisfitError("the state does not fit this environment", differences)
        Compose(*self._parts).load_state_dict(state)
        self._base.load_state_dict(state.get("base_env", {}))

    def differences(self, state: dict[str, Any]) -> list[str]:
        """The reasons why a saved state cannot be loaded; empty if it can."""
        forms.check(_STATE, state, "the state of a TransformedEnv")
        differences, below = Compose(*self._parts).differences(state), state.get("base_env", {})
        if isinstance(self._base, TransformedEnv):
            return differences + self._base.differences(below)
        own = self._base.state_dict().keys()
        if below.keys() == own:
            return differences
        return [*differences, f"the saved base_env has the state {sorted(below)}, and here it has {sorted(own)}"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not forwarded: `copy` looks some up before there is a base
            return super().__getattr__(name)
        return getattr(self._base, name)

    def __repr__(self) -> str:
        return f"TransformedEnv(\n    env={self._base!r},\n    transform={self.transform!r})"


_STATE = forms.record({}, {"base_env": forms.record({})})


def _as_list(transform: Any) -> list[Transform]:
    if transform is None:
        return []
    return [as_transform(one) for one in (transform if isinstance(transform, list | tuple) else [transform])]
